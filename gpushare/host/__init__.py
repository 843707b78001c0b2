"""The only code that touches the machine: one file per external thing."""

from __future__ import annotations
