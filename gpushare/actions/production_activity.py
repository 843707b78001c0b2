"""Whether a production job works now, as seen from outside.

That production works is seen by its own CPU time (within 30 ms: a process that launches kernels or waits for them spins)
and, for one that waits without the CPU, by NVML's per-process utilisation (up to a second late, and not under MPS). GPU
wide numbers cannot tell the two jobs apart. A production job that is busy on the CPU alone pauses the other too: on the
safe side.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from gpushare.host.activity import busy_since
from gpushare.host.cpu_time import cpu_time

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
        # The time of day at which the CPU showed work last.
        self._cpu_active_at = 0.0
        self._nvml_active = False

    def active(self) -> bool:
        """Return whether it works."""
        at = self._clock()
        if at >= self._family_due:
            self._family = list(self._host.processes.descendants(self._pid))
            self._family_due = at + _FAMILY_SECONDS
        if self._busy_on_the_cpu(at):
            self._cpu_active_at = self._wall()
            self._nvml_active = False
            return True
        if at >= self._nvml_due:
            self._nvml_due = at + _NVML_SECONDS
            self._nvml_active = self._busy_on_the_gpu()
        return self._nvml_active

    def _busy_on_the_cpu(self, at: float) -> bool:
        used = cpu_time(self._family)
        if used is None:
            return False
        self._looks.append((at, used.seconds))
        window, least = (_WINDOW_SECONDS, 0.0) if used.exact else (_TICKS_WINDOW_SECONDS, _LEAST_TICKS_SECONDS)
        # The shortest stretch that is as long as the window; looks come late at times.
        while len(self._looks) > 2 and at - self._looks[1][0] >= window:
            del self._looks[0]
        (first, before), (last, now) = self._looks[0], self._looks[-1]
        return last > first and now - before >= _BUSY_SHARE * max(window, last - first) and now - before > least

    def _busy_on_the_gpu(self) -> bool:
        now = self._wall()
        # A sample from right after work that the CPU showed still tells of it.
        since = max(now - _SAMPLE_SECONDS, self._cpu_active_at + _SAMPLE_SECONDS)
        busy = busy_since(self._host.nvml, self._device.gpu.index, since) if since < now else None
        return not (busy or set()).isdisjoint(self._family)
