"""MIG without a machine: profiles and placements, wishes, the exact planner, fragmentation. Pure."""

from __future__ import annotations
