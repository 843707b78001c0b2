"""The cockpit of `gpushare top`: what it reads, what it keeps of the past, and its screen."""
