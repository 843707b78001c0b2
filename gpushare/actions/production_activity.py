"""Whether a production job works now, as seen from outside.

That production works is seen by its own CPU time: within 30 ms (a process that launches kernels or waits for them spins),
or within half a second for a service with short requests, whose share of a core is small. One that waits without the CPU
is seen by NVML's per-process utilisation (up to a second late; under MPS see `unseen_work`). GPU wide numbers cannot tell
the two jobs apart. A production job that is busy on the CPU alone pauses the other too: on the safe side.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Final

from gpushare.host.activity import samples_since
from gpushare.host.cpu_time import CpuTime, cpu_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpushare.host.host import Host
    from gpushare.selection import Device

_FAMILY_SECONDS: Final = 1.0
_NVML_SECONDS: Final = 0.2
# So much CPU time, in so long a window, is work. Told in ticks of 10 ms, one alone may be a timer's.
_BUSY_SHARE: Final = 0.25
_WINDOW_SECONDS: Final = 0.02
_TICKS_WINDOW_SECONDS: Final = 0.06
_LEAST_TICKS_SECONDS: Final = 0.015
# A request every 10 ms of which the CPU sees 0.4 ms is work too; idle programs stay below a hundredth of a core.
_LIGHT_SHARE: Final = 0.03
_LIGHT_SECONDS: Final = 0.5
# Longer than that ago, nobody was looking (gpushare itself was stopped): work from meanwhile says nothing about now.
_UNSEEN_SECONDS: Final = 1.5
# A sample of NVML tells of up to a second before its stamp (a sixth of a second to a second, by the kind of GPU).
_SAMPLE_SECONDS: Final = 1.0


class Activity:
    """Whether a production job works now. ``clock`` only rises; ``wall`` is the time of day, in which NVML stamps."""

    def __init__(
        self,
        host: Host,
        device: Device,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._host, self._device, self._pid, self._clock, self._wall = host, device, pid, clock, wall
        self._family: list[int] = []
        self._family_due = self._nvml_due = 0.0
        self._looks: list[tuple[float, float]] = []
        self._used: dict[int, CpuTime] = {}
        self._used_seconds = 0.0
        # Since when, and from how much CPU time, light work is counted; and what the last half a second said.
        self._light: tuple[float, float] | None = None
        self._lightly = False
        # When the CPU showed work last: by the clock that only rises, for the time of day may be set back.
        self._cpu_active_at = -math.inf
        self._nvml_active = False

    def active(self) -> bool:
        """Return whether it works."""
        at = self._clock()
        if at >= self._family_due:
            self._family = self._find_family()
            self._family_due = at + _FAMILY_SECONDS
        if self._busy_on_the_cpu(at):
            self._cpu_active_at = at
            self._nvml_active = False
            return True
        if at >= self._nvml_due:
            self._nvml_due = at + _NVML_SECONDS
            self._nvml_active = self._busy_on_the_gpu(at)
        return self._nvml_active

    def _find_family(self) -> list[int]:
        family, own = self._host.processes.descendants(self._pid), os.getpid()
        if own not in family:
            return list(family)
        # Production has started this gpushare: the job that it pauses is not production.
        ours = set(self._host.processes.descendants(own))
        return [pid for pid in family if pid not in ours]

    def _busy_on_the_cpu(self, at: float) -> bool:
        used = {pid: one for pid in self._family if (one := cpu_time(pid)) is not None}
        if not used:
            return False
        # One by one: a child that ends takes its time with it, and must not hide the work of the others.
        before_used, self._used = self._used, used
        self._used_seconds += sum(
            max(0.0, one.seconds - before_used[pid].seconds) for pid, one in used.items() if pid in before_used
        )
        if self._looks and at - self._looks[-1][0] >= _UNSEEN_SECONDS:
            self._looks, self._light, self._lightly = [], None, False
        self._looks.append((at, self._used_seconds))
        exact = all(one.exact for one in used.values())
        window, least = (_WINDOW_SECONDS, 0.0) if exact else (_TICKS_WINDOW_SECONDS, _LEAST_TICKS_SECONDS)
        # The shortest stretch that is as long as the window; looks come late at times.
        while len(self._looks) > 2 and at - self._looks[1][0] >= window:
            del self._looks[0]
        (first, before), (last, now) = self._looks[0], self._looks[-1]
        if last > first and now - before >= _BUSY_SHARE * max(window, last - first) and now - before > least:
            # What is light counts from here: the work that has been seen must not look like more.
            self._light, self._lightly = None, False
            return True
        return exact and self._busy_lightly(at)

    def _busy_lightly(self, at: float) -> bool:
        """Return whether there was a little work again and again; told anew each half a second."""
        since, before = self._light or (at, self._used_seconds)
        if at - since < _LIGHT_SECONDS:
            self._light = since, before
            return self._lightly
        self._light = at, self._used_seconds
        self._lightly = self._used_seconds - before >= _LIGHT_SHARE * (at - since)
        return self._lightly

    def _busy_on_the_gpu(self, at: float) -> bool:
        # A sample from right after work that the CPU showed still tells of it.
        told = min(_SAMPLE_SECONDS, at - self._cpu_active_at - _SAMPLE_SECONDS)
        samples = samples_since(self._host.nvml, self._device.gpu.index, self._wall() - told) if told > 0 else None
        return any(percent > 0 and pid in self._family for pid, percent in samples or ())
