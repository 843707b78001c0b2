"""Advice: which way of sharing fits. Pure: it reads facts and one table, never a host."""

from __future__ import annotations
