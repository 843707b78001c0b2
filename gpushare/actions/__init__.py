"""What commands do: plans with steps, undo and read-back; runs; checks."""

from __future__ import annotations
