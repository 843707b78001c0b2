"""MIG without a machine: profiles and placements, wishes, the exact planner. Pure."""

from __future__ import annotations
