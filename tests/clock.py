"""A wall clock that is set, as by the first NTP answer or when a virtual machine resumes."""

from __future__ import annotations

import time

import psutil
import pytest


def step_the_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the wall clock forward; the kernel moves ``btime``, from which starts are counted, along with it."""
    wall, booted = time.time, psutil.boot_time()
    monkeypatch.setattr(time, "time", lambda: wall() + seconds)
    monkeypatch.setattr(psutil, "boot_time", lambda: booted + seconds)
