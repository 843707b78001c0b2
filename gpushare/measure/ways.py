"""The ways of sharing that `gpushare bench` compares, and which of them can run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.base.benchmark import LeftOut
from gpushare.base.errors import BadUsage, GpushareError, error_of, or_none
from gpushare.base.model import ComputeMode, TimeSlice, Way
from gpushare.base.selection import Device
from gpushare.base.units import format_slice, parse_slice, quoted
from gpushare.host.compute_mode import need_root
from gpushare.host.host import Host
from gpushare.mps.control import probe_version
from gpushare.mps.daemons import find_daemons
from gpushare.mps.limits import VOLTA, Limits, max_clients
from gpushare.run.share import MpsShare
from gpushare.timeslice.policy import plan_level
from gpushare.timeslice.slices import LEAST_US, MOST_US, check_settable

# One process does the work of all copies, which only the built-in workload can.
IN_ONE: Final = frozenset({Way.STREAMS, Way.THREADS})
_PRIORITY: Final = "streams:priority"
# Its options for each of these ways; {} is the number.
IN_ONE_OPTIONS: Final[Mapping[str, Sequence[str]]] = {
    Way.STREAMS.value: ("--streams", "{}"),
    _PRIORITY: ("--streams", "{}", "--priority"),
    Way.THREADS.value: ("--threads", "{}"),
}
# One copy that has the device to itself.
ALONE: Final = "alone"
DEFAULT_WAYS: Final = "queue,timeslice,mps,mps:100/n,mps:200/n,mig,streams"
# The simplest first, which is chosen where there is no difference. For streams, the program must be rewritten.
_SIMPLEST: Final = (Way.WHOLE, Way.TIMESLICE, Way.SLICES, Way.MPS, Way.MIG, Way.THREADS, Way.STREAMS)
_WAY: Final = re.compile(
    r"(?P<kind>queue|timeslice|mig|streams|threads|mps)(?::(?P<percent>\d{1,3}(?:\.\d+)?)(?P<divided>/n)?)?", re.ASCII
)
_LEVEL: Final = re.compile(r"timeslice:(default|short|medium|long)")
_EXAMPLE: Final = f"{DEFAULT_WAYS},mps:50,slices:500us,2ms,timeslice:short"
_MOST_COPIES: Final = 512


@dataclass(frozen=True, kw_only=True)
class BenchWay:
    """One way of sharing. ``percent`` caps the SM threads of each MPS client, divided by the copies if ``divided``.

    ``slice_us`` is the time-slice of each copy, ``level`` the time-slice level of the GPU during a run.
    """

    name: str
    kind: Way
    percent: float | None = None
    divided: bool = False
    slice_us: int | None = None
    level: TimeSlice | None = None

    def cap(self, copies: int) -> float | None:
        """Return the thread percentage of each copy, or None: no cap."""
        if self.percent is None:
            return None
        percent = self.percent / copies if self.divided else self.percent
        # The daemon keeps one decimal.
        return None if percent >= 100 else max(0.1, round(percent, 1))

    @property
    def order(self) -> tuple[int, bool]:
        """Return the sort key: the simplest set-up first."""
        return _SIMPLEST.index(self.kind), self.percent is not None or self.level is not None


# One way with one number of copies.
Cell = tuple[BenchWay, int]


def parse_ways(text: str) -> tuple[BenchWay, ...]:
    """Return the ways in a list, in its order, each once. Times after ``slices:`` are more slices: ``slices:500us,2ms``."""
    ways: dict[str, BenchWay] = {}
    is_slice = False
    for word in (word.strip().lower() for word in text.split(",")):
        # A time after a slice is one more.
        is_slice = word.startswith(f"{Way.SLICES.value}:") or (is_slice and word[:1].isdecimal())
        way = _parse_slice_way(word) if is_slice else _parse_way(word)
        ways.setdefault(way.name, way)
    return tuple(ways.values())


def _parse_slice_way(word: str) -> BenchWay:
    """Return the way of a slice: ``slices:500us``, or ``2ms`` after one."""
    slice_us = parse_slice(word.removeprefix(f"{Way.SLICES.value}:"))
    if not LEAST_US <= slice_us <= MOST_US:
        raise BadUsage(
            f"the slice {quoted(word)} is outside {format_slice(LEAST_US)} to {format_slice(MOST_US)}",
            "give --ways slices:500us,2ms,8ms",
            code="bad_slice",
        )
    return BenchWay(name=f"{Way.SLICES.value}:{format_slice(slice_us)}", kind=Way.SLICES, slice_us=slice_us)


def _parse_way(word: str) -> BenchWay:
    """Return the way that one word names: ``queue``, ``mps:50``, ``mps:200/n``, ``timeslice:short``."""
    # Its name everywhere else.
    word = "timeslice" if word == "time-slicing" else word
    if word == _PRIORITY:
        return BenchWay(name=word, kind=Way.STREAMS)
    level = _LEVEL.fullmatch(word)
    if level is not None:
        return BenchWay(name=word, kind=Way.TIMESLICE, level=TimeSlice[level[1].upper()])
    match = _WAY.fullmatch(word)
    if match is None or (match["percent"] is not None and match["kind"] != "mps"):
        raise BadUsage(f"{quoted(word)} is not a way of sharing", f"give some of --ways {_EXAMPLE}", code="bad_way")
    percent = None if match["percent"] is None else float(match["percent"])
    divided = match["divided"] is not None
    if percent is not None and (percent == 0 or (percent > 100 and not divided)):
        raise BadUsage(f"{percent:g} in {quoted(word)} is outside (0, 100]", "give mps:50 or mps:200/n", code="bad_way")
    kind = Way.WHOLE if match["kind"] == "queue" else Way(match["kind"])
    return BenchWay(name=word, kind=kind, percent=percent, divided=divided)


def parse_copies(text: str) -> tuple[int, ...]:
    """Return the numbers of copies in a list, smallest first, each once."""
    numbers = set()
    for word in (word.strip() for word in text.split(",")):
        if not (word.isascii() and word.isdigit() and len(word) < 5 and 1 <= int(word) <= _MOST_COPIES):
            raise BadUsage(
                f"{quoted(word)} is not a number of copies between 1 and {_MOST_COPIES}",
                "give --copies 1,2,4",
                code="bad_copies",
            )
        numbers.add(int(word))
    return tuple(sorted(numbers))


@dataclass(frozen=True, kw_only=True)
class Obstacles:
    """Why each kind of way cannot run here; None: it can."""

    # Outside MPS: one program alone, in turns, or as streams.
    outside: str | None
    # Several programs outside MPS at the same time.
    timeslice: str | None
    mps: str | None
    # A thread percentage of MPS clients.
    caps: str | None
    mig: str | None
    # The most clients of an MPS server; None: unknown.
    most_clients: int | None
    # A time-slice level of the GPU, and a time-slice of each copy.
    level: str | None = None
    slices: str | None = None
    # Whether the command can run as streams or threads of one process.
    in_one: bool = False

    def why_not(self, way: BenchWay) -> str | None:
        """Return why a way cannot run here; None: it can."""
        if way.kind in IN_ONE and not self.in_one:
            return f"only the built-in workload runs as {way.kind.value} of one process"
        if way.kind in {Way.WHOLE, *IN_ONE}:
            return self.outside
        if way.kind is Way.SLICES:
            return self.outside or self.timeslice or self.slices
        if way.kind is Way.TIMESLICE:
            return self.outside or self.timeslice or (self.level if way.level is not None else None)
        if way.kind is Way.MIG:
            return self.mig
        return self.mps or (self.caps if way.percent is not None else None)

    def why_not_copies(self, way: BenchWay, copies: int) -> str | None:
        """Return why a way cannot run with a number of copies, or None."""
        too_many = way.kind is Way.MPS and self.most_clients is not None and copies > self.most_clients
        return f"an MPS server takes {self.most_clients} clients" if too_many else None


def find_obstacles(host: Host, device: Device, program: str, *, in_one: bool) -> Obstacles:
    """Return why this host and user cannot run each kind of way on a device; nothing is changed."""
    # Whether an MPS daemon that answers serves the GPU of the device.
    daemons = [row.daemon for row in or_none(lambda: find_daemons(host, [device.gpu], deep=False)) or ()]
    served = any(device.gpu.index in daemon.gpu_indexes and daemon.error is None for daemon in daemons)
    capability = host.nvml.compute_capability(device.gpu.index)
    timeslice = None
    mode = device.gpu.compute_mode
    if mode is not None and one_at_a_time(device):
        timeslice = _why_not_in_mode(device, mode, effect=": one process at a time")
    caps = None
    if capability is not None and capability < VOLTA:
        caps = "thread caps need a GPU of the Volta architecture or later"
    return Obstacles(
        outside=_why_not_outside_mps(device, served=served),
        timeslice=timeslice,
        mps=_why_not_mps(host, device, program, served=served),
        caps=caps,
        mig=_why_not_mig(device),
        most_clients=None
        if device.mig is not None
        else max_clients(or_none(lambda: probe_version(host.programs)), capability),
        level=_why_not_level(host, device),
        slices=None if (refusal := error_of(lambda: check_settable(host))) is None else _error_sentence(refusal),
        in_one=in_one,
    )


def _error_sentence(error: GpushareError) -> str:
    return f"{error.message}; {error.hint}"


def _why_not_level(host: Host, device: Device) -> str | None:
    """Return why the time-slice level of a device cannot be set, or None."""
    try:
        need_root(host, f"setting the time-slice of {device.title}")
        plan_level(host, [device], TimeSlice.DEFAULT, beside_mps=True)
    except GpushareError as error:
        return _error_sentence(error)
    return None


def _why_not_in_mode(device: Device, mode: ComputeMode, effect: str = "") -> str:
    """Return the reason that a compute mode gives: the mode, its effect, and the command that changes it."""
    return f"{device.title} is in compute mode {mode.title}{effect}; allow more: sudo nvidia-smi -i {device.gpu.index} -c DEFAULT"


def one_at_a_time(device: Device) -> bool:
    """Return whether the compute mode admits a single process: while that is an MPS server, only its clients get in."""
    return device.mig is None and device.gpu.compute_mode not in {None, ComputeMode.DEFAULT}


def _why_not_outside_mps(device: Device, *, served: bool) -> str | None:
    """Return why no program can run on a device without MPS, or None. ``served``: an MPS daemon serves its GPU."""
    gpu = device.gpu
    if device.mig is None and gpu.mig_enabled:
        return f"{device.title} is in MIG mode: no program can use all of it; gpushare mig disable -g {gpu.index}"
    mode = gpu.compute_mode
    if device.mig is not None or mode is None or mode is ComputeMode.DEFAULT:
        return None
    if mode is ComputeMode.PROHIBITED:
        return _why_not_in_mode(device, mode)
    return f"{device.title} is in compute mode {mode.title}, and its MPS daemon uses it" if served else None


def _why_not_mps(host: Host, device: Device, program: str, *, served: bool) -> str | None:
    """Return why no copy can run under MPS here, or None."""
    if device.gpu.compute_mode is ComputeMode.PROHIBITED and not served:
        return _why_not_in_mode(device, ComputeMode.PROHIBITED)
    try:
        share = MpsShare(host, device, Limits())
        share.check(program)
        share.steps()
        return _why_another_user_blocks(host, device)
    except GpushareError as error:
        return _error_sentence(error)


def _why_another_user_blocks(host: Host, device: Device) -> str | None:
    """Return why another user's clients block the MPS server, which serves one user at a time."""
    for candidate in find_daemons(host, [device.gpu]):
        for server in candidate.daemon.servers:
            info = host.processes.describe(server.pid)
            of_another_user = info is not None and info.uid not in {None, host.uid}
            if of_another_user and server.clients and device.gpu.index in candidate.daemon.gpu_indexes:
                return f"clients of user {server.user} hold the MPS server of {device.title}; one user at a time"
    return None


def _why_not_mig(device: Device) -> str | None:
    """Return why no copy can run in MIG instances here, or None."""
    gpu = device.gpu
    if device.mig is not None:
        return "-g names one instance; name the GPU to use several of its instances"
    if gpu.mig_capable is None:
        return f"the driver does not report whether {device.title} has MIG"
    if not gpu.mig_capable:
        return f"no MIG on {device.title}"
    how_to = f"gpushare mig apply -g {gpu.index} WISH (for profiles: gpushare mig profiles -g {gpu.index})"
    if not gpu.mig_instances:
        return f"there is no MIG instance on {device.title}, and bench makes none: {how_to}"
    return None


def sort_out(
    cells: Sequence[Cell],
    why_not_copies: Callable[[BenchWay, int], str | None],
    why_not: Callable[[BenchWay], str | None] = lambda _: None,
) -> tuple[list[Cell], list[LeftOut]]:
    """Return the cells to measure, and those left out with the reason.

    ``why_not`` returns why a way cannot be measured, ``why_not_copies`` why it cannot with a number of copies; None: it can.
    """
    kept: list[Cell] = []
    left_out: list[LeftOut] = []
    for way, copies in cells:
        of_way = why_not(way)
        reason = why_not_copies(way, copies) if of_way is None else of_way
        if reason is None:
            kept.append((way, copies))
        else:
            left_out.append(LeftOut(way=way.name, copies=copies if of_way is None else None, reason=reason))
    return kept, list(dict.fromkeys(left_out))
