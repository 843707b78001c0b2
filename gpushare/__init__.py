"""gpushare: share the GPUs of one host well."""

from __future__ import annotations

# A literal: importlib.metadata would cost 12 ms at every start.
__version__ = "0.1.0"
