"""Clocks: one that only a test moves, and the wall clock, set as by the first NTP answer."""

from __future__ import annotations

import time

import psutil
import pytest


def step_the_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the wall clock forward; the kernel moves ``btime``, from which starts are counted, along with it."""
    wall, booted = time.time, psutil.boot_time()
    monkeypatch.setattr(time, "time", lambda: wall() + seconds)
    monkeypatch.setattr(psutil, "boot_time", lambda: booted + seconds)


class Clock:
    """Seconds that pass only by sleeping, or when a test says so: no machine is too slow for them."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
