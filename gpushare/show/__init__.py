"""What people and machines read; knows the model, never the host."""

from __future__ import annotations
