"""One benchmark from the request to the measurement: what can run is found out, set up, measured and given back."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpushare.actions.mps_device import own_daemon
from gpushare.actions.run_end import CONVERSATION_SECONDS
from gpushare.actions.run_environment import check_program
from gpushare.actions.wakeups import Wakeups
from gpushare.errors import GpushareError, NotSupported
from gpushare.host.mps_control import MpsControl
from gpushare.measure.bench import Bench, Measurement, Progress, Settings, schedule
from gpushare.measure.copies import Watcher
from gpushare.measure.grounds import Grounds
from gpushare.measure.metric import Metric
from gpushare.measure.ways import ALONE, MIG, MPS, QUEUE, LeftOut, Reasons, Way, reasons, sort_out

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user wants measured; see `bench.Settings`."""

    argv: Sequence[str]
    metric: Metric
    ways: Sequence[Way]
    copies: Sequence[int]
    repeat: int = 3
    window: float | None = None
    limit: float | None = None
    streams: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What can be measured, and what not; nothing is set up yet."""

    request: Request
    settings: Settings
    left_out: Sequence[LeftOut]
    why: Reasons
    notes: Sequence[str] = ()


def prepare(host: Host, device: Device, request: Request) -> Prepared:
    """Find out what can be measured; nothing is changed.

    Raises:
        NotSupported: none of the ways can run here.
        NotFound, NoPermission: the program is not there, or may not be executed.
    """
    check_program(request.argv[0])
    why = reasons(host, device, request.argv[0])
    alone = _alone(why, {way.kind for way in request.ways})
    profiles = Counter(one.profile for one in device.gpu.mig_instances)
    instances = max(profiles.values(), default=0)
    cells, left = sort_out(
        request.ways,
        request.copies,
        why,
        streams=bool(request.streams),
        more=lambda way, copies: _too_few(copies, instances) if way.kind == MIG and copies > instances else None,
    )
    if alone is None or not cells:
        reason = "; ".join(dict.fromkeys(f"{one.way}: {one.reason}" for one in left)) or "nothing is left"
        raise NotSupported(
            f"none of these ways can run on {device.title}: {reason}", "see: gpushare doctor", code="no_way"
        )
    settings = Settings(
        argv=request.argv,
        metric=request.metric,
        cells=cells,
        alone=alone,
        repeat=request.repeat,
        window=request.window,
        limit=request.limit,
        streams=request.streams,
        environment=request.environment,
    )
    uncapped = any(way.kind == MPS and way.cap(copies) is None for way, copies in schedule(settings))
    notes = default_limit(host, device) if uncapped else ()
    return Prepared(request=request, settings=settings, left_out=left, why=why, notes=notes)


def default_limit(host: Host, device: Device) -> tuple[str, ...]:
    """Return a note when the MPS daemon that is there caps each client by itself: then way mps is not without a cap."""
    try:
        home, _ = own_daemon(host, device)
        percent = MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS).default_threads()
    except GpushareError:
        return ()
    if percent is None or percent >= 100:
        return ()
    undo = f"gpushare mps set -g {device.selector} --threads 100"
    return (f"the MPS daemon of {device.title} caps each client at {percent:g} %, under way mps too; lift it: {undo}",)


def _alone(why: Reasons, wanted: set[str]) -> Way | None:
    """Return the way of one copy alone: outside MPS where that can be, else under one that was asked for."""
    if why.outside is None:
        return Way(name=ALONE, kind=QUEUE)
    if why.mps is None and MPS in wanted:
        return Way(name=MPS, kind=MPS)
    return Way(name=MIG, kind=MIG) if why.mig is None and MIG in wanted else None


def _too_few(copies: int, instances: int) -> str:
    there = f"there {'is' if instances == 1 else 'are'} {instances}"
    return f"{copies} copies need {copies} free MIG instances of one profile, and {there}"


class _Signals(Watcher):
    """Waits for signals and ended copies; the guard learns of every copy."""

    def __init__(self, wakeups: Wakeups, grounds: Grounds) -> None:
        self._wakeups, self._grounds = wakeups, grounds
        self.number: int | None = None

    def announce(self, pid: int, started: float | None) -> None:
        """Tell the guard."""
        self._grounds.announce(pid, started)

    def ended(self, pid: int) -> None:
        """Tell the guard."""
        self._grounds.ended(pid)

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether the user has ended it."""
        self.hurry(seconds)
        return self.number is not None

    def hurry(self, seconds: float = 0.0) -> bool:
        """Return whether an ending signal came."""
        came = [number for number in self._wakeups.wait(seconds) if number in _ENDING]
        if came and self.number is None:
            self.number = came[0]
        return bool(came)


def measure(
    host: Host, device: Device, prepared: Prepared, progress: Callable[[Progress], None] = lambda _: None
) -> tuple[Measurement, int | None]:
    """Measure, and return what was measured and the signal that ended it early, if one did.

    Raises:
        OperationFailed: already one copy alone failed.
        GpushareError: something could not be set up, started or ended; the host is as before.
    """
    settings, left = prepared.settings, list(prepared.left_out)
    wanted = max((copies for way, copies in settings.cells if way.kind == MIG), default=0)
    if settings.alone.kind == MIG:
        wanted = max(wanted, 1)
    started = time.monotonic()
    # From before anything is set up to after it was given back: no signal interrupts either.
    with Wakeups((*_ENDING, signal.SIGCHLD)) as wakeups, Grounds(host, device, settings.argv[0]) as grounds:
        settings, unset = _opened(grounds, settings, wanted)
        free = len(grounds.instances)
        settings, more = _with_instances(settings, free)
        watcher = _Signals(wakeups, grounds)
        bench = Bench(host, device, grounds, settings, watcher, progress)
        bench.measurement.left_out += [*left, *unset, *more]
        measurement = bench.go()
    measurement.seconds = time.monotonic() - started
    return measurement, watcher.number if measurement.interrupted else None


def _opened(grounds: Grounds, settings: Settings, instances: int) -> tuple[Settings, list[LeftOut]]:
    """Set up what the ways need; MPS is left out where its daemon cannot be started and others can be measured.

    Raises:
        GpushareError: nothing could be measured without it.
    """
    mps = any(way.kind == MPS for way, _ in schedule(settings))
    try:
        grounds.open(mps=mps, instances=instances)
    except GpushareError as error:
        rest = [cell for cell in settings.cells if cell[0].kind != MPS]
        if not mps or not rest or settings.alone.kind == MPS:
            raise
        grounds.open(mps=False, instances=instances)
        names = dict.fromkeys(way.name for way, _ in settings.cells if way.kind == MPS)
        reason = f"{error.message}; {error.hint}"
        return replace(settings, cells=rest), [LeftOut(way=name, copies=None, reason=reason) for name in names]
    return settings, []


def _with_instances(settings: Settings, free: int) -> tuple[Settings, list[LeftOut]]:
    """Leave out what needs more MIG instances than are free.

    Raises:
        NotSupported: not one is free, and nothing else can be measured.
    """
    short = [(way, copies) for way, copies in settings.cells if way.kind == MIG and copies > free]
    kept = [cell for cell in settings.cells if cell not in short]
    if (settings.alone.kind == MIG and not free) or not kept:
        raise NotSupported(
            "no MIG instance is free", "see who is in them: gpushare mig status", code="no_free_instance"
        )
    left = [LeftOut(way=way.name, copies=copies, reason=_too_few(copies, free)) for way, copies in short]
    return replace(settings, cells=kept), left
