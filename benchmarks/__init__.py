"""Measurements; not part of the package, and no tests."""
