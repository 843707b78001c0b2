"""Whether a production job works now, so that a program next to it is paused."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Final

from gpushare.base.selection import Device
from gpushare.host.activity import samples_since
from gpushare.host.host import Host
from gpushare.host.process import cpu_time
from gpushare.run.jobs import PrintedRate, find_record, is_running, records

_FAMILY_SECONDS: Final = 1.0
_ALIVE_SECONDS: Final = 1.0
_NVML_SECONDS: Final = 0.2
# This share of CPU time in a window counts as work.
_BUSY_SHARE: Final = 0.25
_WINDOW_SECONDS: Final = 0.02
# A request every 10 ms that takes 0.4 ms of CPU is work too; idle programs stay below 1 % of a core.
_LIGHT_SHARE: Final = 0.03
_LIGHT_SECONDS: Final = 0.5
# After a longer gap (gpushare itself was stopped), the work in it says nothing about now.
_UNSEEN_SECONDS: Final = 1.5
# An NVML sample covers up to a second before its stamp (1/6 to 1 s, by GPU model).
_SAMPLE_SECONDS: Final = 1.0


class Activity:
    """Whether a production job works now. ``clock`` is monotonic; ``wall`` is the time of day, which NVML stamps."""

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
        # Time of each look in the window, and the CPU seconds used up to then.
        self._looks: list[tuple[float, float]] = []
        self._used: dict[int, float] = {}
        self._used_seconds = 0.0
        # Start and CPU seconds of the current window for light work, and the verdict of the last one.
        self._light_window: tuple[float, float] | None = None
        self._works_lightly = False
        # When the CPU last showed work, by the monotonic clock: the time of day may be set back.
        self._cpu_active_at = -math.inf
        self._nvml_active = False

    def works(self) -> bool:
        """Return whether production works now, by the CPU time of its processes, else by NVML's samples of the GPU."""
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
        """Return the processes of production, without those that this gpushare has started."""
        family = self._host.processes.descendants(self._pid)
        own_pid = os.getpid()
        if own_pid not in family:
            return list(family)
        # Production has started this gpushare: the job that it pauses is not production.
        ours = set(self._host.processes.descendants(own_pid))
        return [pid for pid in family if pid not in ours]

    def _busy_on_the_cpu(self, at: float) -> bool:
        """Return whether production used the CPU: much within some 20 ms, or a little all through the last half second."""
        used = {pid: spent for pid in self._family if (spent := cpu_time(pid)) is not None}
        if not used:
            return False
        # One by one: the CPU time of a child that ends is lost, and must not hide the work of the others.
        earlier = self._used
        self._used = used
        self._used_seconds += sum(max(0.0, spent - earlier[pid]) for pid, spent in used.items() if pid in earlier)
        if self._looks and at - self._looks[-1][0] >= _UNSEEN_SECONDS:
            self._looks = []
            self._begin_light_window()
        self._looks.append((at, self._used_seconds))
        # The shortest span at least as long as the window; some looks come late.
        while len(self._looks) > 2 and at - self._looks[1][0] >= _WINDOW_SECONDS:
            del self._looks[0]
        first_at, first_seconds = self._looks[0]
        spent_seconds = self._used_seconds - first_seconds
        if at > first_at and spent_seconds >= _BUSY_SHARE * max(_WINDOW_SECONDS, at - first_at):
            # Light work is counted from here, so that the same work does not count twice.
            self._begin_light_window()
            return True
        return self._busy_lightly(at)

    def _begin_light_window(self) -> None:
        """Start a new window of light work: what was counted so far no longer counts."""
        self._light_window = None
        self._works_lightly = False

    def _busy_lightly(self, at: float) -> bool:
        """Return whether there was steady light work in the last complete window of half a second."""
        if self._light_window is None:
            self._light_window = at, self._used_seconds
        began, seconds_before = self._light_window
        if at - began >= _LIGHT_SECONDS:
            self._works_lightly = self._used_seconds - seconds_before >= _LIGHT_SHARE * (at - began)
            self._light_window = at, self._used_seconds
        return self._works_lightly

    def _busy_on_the_gpu(self, at: float) -> bool:
        """Return whether production had kernels on the GPU, by NVML's samples of the last moment.

        Only samples from a second after its last work on the CPU: earlier ones cover that work, which was seen already.
        """
        window_seconds = min(_SAMPLE_SECONDS, at - self._cpu_active_at - _SAMPLE_SECONDS)
        if window_seconds <= 0:
            return False
        samples = samples_since(self._host.nvml, self._device.gpu.index, self._wall() - window_seconds) or ()
        return any(percent > 0 and pid in self._family for pid, percent in samples)


class ProductionJob:
    """A production job by PID and start time; with a name also those that follow it under this name.

    ``under_mps``: it is a client of the device's MPS daemon.
    """

    def __init__(
        self,
        host: Host,
        device: Device,
        pid: int,
        started: int,
        name: str | None = None,
        *,
        under_mps: bool = False,
    ) -> None:
        self._host, self._device, self.name, self.under_mps = host, device, name, under_mps
        # For people.
        self.title = f"process {pid}" if name is None else f"'{name}'"
        self._set_process(pid, started)

    def _set_process(self, pid: int, started: int) -> None:
        """Watch this process from now on."""
        self.pid = pid
        self.started = started
        self._activity = Activity(self._host, self._device, pid)
        self._alive, self._alive_due = True, 0.0

    def works(self) -> bool:
        """Return whether the job lives and works now, by `Activity`: if so, a program next to it is paused or ended."""
        at = time.monotonic()
        if at >= self._alive_due:
            # Its PID may have been reused by a busy process, or the job may have been started again under its name.
            self._alive = self.lives()
            self._alive_due = at + _ALIVE_SECONDS
        return self._alive and self._activity.works()

    def lives(self) -> bool:
        """Return whether the job runs. If it was started again under its name, follow the new process."""
        if self._host.processes.alive(self.pid, self.started):
            return True
        record = None if self.name is None else find_record(self._host, self.name)
        if record is None or self._device.uuid not in record.devices or not is_running(self._host, record):
            return False
        self._set_process(record.pid, record.started)
        return True

    def rate(self) -> PrintedRate | None:
        """Return where the job prints its speed, also after it was started again; None: unknown, such as without --metric."""
        if self.name is not None:
            record = find_record(self._host, self.name)
        else:
            # PIDs are reused, and the record of a production job stays.
            same = (each for each in records(self._host) if (each.pid, each.started) == (self.pid, self.started))
            record = next(same, None)
        return None if record is None else record.rate
