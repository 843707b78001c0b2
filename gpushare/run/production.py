"""The production job beside which a program is paused: a process, or whoever bears its name now."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from gpushare.host.activity import samples_since
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.process import CpuTime, cpu_time
from gpushare.host.records import read_trusted, record_from, replace_file, writing

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
        """Return whether there was a little work again and again; updated every half second."""
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


SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class Production:
    """One production job: its program's PID and start, its device, and the most memory that was seen."""

    name: str
    pid: int
    started_at: float | None
    device_uuid: str
    memory_peak_bytes: int | None = None
    schema: int = SCHEMA


def write_production(host: Host, production: Production) -> None:
    """Write the record of a production job.

    Raises:
        NoPermission, OperationFailed: the directory cannot be made, or the file not be written.
    """
    directory = host.run_directory / "production"
    # One by one: a mode holds for the last of a path only.
    make_private_directory(host.run_directory)
    make_private_directory(directory)
    # Others read it too, and spare the job.
    path = directory / f"{production.name}.json"
    with writing(path, "the record of a production job"):
        replace_file(path, json.dumps(asdict(production)))


def productions(host: Host) -> list[Production]:
    """Return every production job that is known, living or not: this user's, and root's."""
    found = []
    for run_directory in (host.run_directory, *host.shared_run_directories):
        if not is_trusted_directory(run_directory, "production"):
            continue
        with contextlib.suppress(OSError):
            found += [
                record_from(Production, read_trusted(path))
                for path in sorted((run_directory / "production").glob("*.json"))
            ]
    return [one for one in found if one is not None and one.pid > 0]


def find_production(host: Host, name: str) -> Production | None:
    """Return the production job of a name, living or not, or None."""
    return next((one for one in productions(host) if one.name == name), None)


def lives(host: Host, production: Production) -> bool:
    """Return whether a production job runs now."""
    return host.processes.alive(production.pid, production.started_at)


class ProductionJob:
    """A production job by PID and start time; with a name also those that follow it under this name.

    ``always``: it counts as active as long as it lives. In the short stops of a duty cycle nobody can see more than its CPU.
    """

    def __init__(
        self,
        host: Host,
        device: Device,
        pid: int,
        started_at: float | None,
        name: str | None = None,
        *,
        always: bool = False,
    ) -> None:
        self._host, self._device, self._name, self._always = host, device, name, always
        self._is(pid, started_at)

    def _is(self, pid: int, started_at: float | None) -> None:
        self.pid, self._started_at = pid, started_at
        self._activity = Activity(self._host, self._device, pid)

    def active(self) -> bool:
        """Return whether it works now; see `Activity`."""
        return self._always or self._activity.active()

    def lives(self) -> bool:
        """Return whether it runs. One that has ended may have been started again under its name: then it is that one."""
        here = self._host.processes.alive(self.pid, self._started_at)
        return here or (self._name is not None and self._follow(self._name))

    def _follow(self, name: str) -> bool:
        found = find_production(self._host, name)
        if found is None or found.device_uuid != self._device.uuid or not lives(self._host, found):
            return False
        self._is(found.pid, found.started_at)
        return True


# GPM averages between two samples: shorter windows are noise. Percent of the SMs that are work (idle GPUs show 0).
_LOOK_SECONDS: Final = 0.1
_BUSY_PERCENT: Final = 1.0
# A queue of the job that was stopped has drained by then (the deepest one measured took 0.1 s).
_DRAINED_SECONDS: Final = 0.5
# How long the other runs between two looks for which it is stopped (for 0.3 s): twice as long after each that found nothing,
# up to the most; less of a job that works unseen than of one that never has.
_FIRST_PAUSE_SECONDS: Final = 1.5
_MOST_UNSEEN_SECONDS: Final = 6.0
_FIRST_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 64.0
_ALONE_SECONDS: Final = 1.0


class UnseenWork:
    """Whether production works, where its CPU says that it does not.

    ``activity`` returns the percent of the SMs that were busy since it was asked last, or None; ``alone`` whether nobody
    but production and the other job is on the GPU.
    """

    def __init__(self, activity: Callable[[], float | None], alone: Callable[[], bool]) -> None:
        self._activity, self._alone = activity, alone
        # It has worked unseen before.
        self.found = False
        self._pause = _FIRST_SECONDS
        self._look_at = math.inf
        self._still_since: float | None = None
        self._window_at = 0.0
        self._working = False
        # Whether the window that goes on can only show work that was not seen.
        self._clean = False
        self._trusted, self._trust_due = True, -math.inf

    def works(self, at: float, *, seen: bool, still: bool) -> bool:
        """Return whether production works at a time (seconds of a clock that only rises).

        ``seen`` is what its CPU says; ``still`` whether the other job stands still, or is not on the GPU yet.
        """
        if at >= self._trust_due:
            self._trusted, self._trust_due = self._alone(), at + _ALONE_SECONDS
        if not self._trusted:
            self._still_since, self._working, self._look_at = None, False, math.inf
            return seen
        return self._standing(at, seen=seen) if still else self._running(at, seen=seen)

    def _standing(self, at: float, *, seen: bool) -> bool:
        if self._still_since is None:
            self._still_since, self._window_at, self._working, self._clean = at, at, False, False
            self._activity()
            return True
        if at - self._window_at >= _LOOK_SECONDS:
            self._window_at = at
            percent = self._activity()
            # A window may show what the other had in its queue when it was stopped, or work that was seen.
            self._working = self._clean and percent is not None and percent >= _BUSY_PERCENT
            self._clean = not seen
            if self._working and at - self._still_since >= _DRAINED_SECONDS:
                self.found, self._pause = True, _FIRST_PAUSE_SECONDS
        self._clean = self._clean and not seen
        return seen or self._working

    def _running(self, at: float, *, seen: bool) -> bool:
        if self._still_since is not None or self._look_at == math.inf:
            # It has just gone on: nothing was found this time.
            self._still_since, self._working = None, False
            self._look_at = at + self._pause
            self._pause = min(_MOST_UNSEEN_SECONDS if self.found else _MOST_SECONDS, 2 * self._pause)
        # Called work, the look stops the other job; what comes of it is told there.
        return seen or at >= self._look_at
