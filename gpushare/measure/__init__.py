"""What is measured over time: recordings of GPU and per-process use."""

from __future__ import annotations
