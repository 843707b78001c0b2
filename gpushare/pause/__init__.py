"""Pauses: jobs whose channels were taken off the GPU, their records, and the guard that ends a pause."""
