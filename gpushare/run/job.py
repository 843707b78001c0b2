"""What a job is, as typed: how it yields, when it is swapped, and which options of `gpushare run` exclude each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

from gpushare.base.errors import BadCombination, BadUsage
from gpushare.base.units import format_slice, parse_seconds, parse_thread_percentage, quoted
from gpushare.base.values import dataclass

if TYPE_CHECKING:
    from gpushare.run.jobs import PrintedRate

# In the environment of the gpushare that runs a job in the background: the name of that job.
DETACHED: Final = "GPUSHARE_DETACHED"
Yield = Literal["slices", "caps", "pause", "swap", "requeue"]
_WAYS_TO_YIELD: Final = ("slices", "caps", "pause", "swap", "requeue")


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a production or an opportunistic job asks for; of a job without a role all is None."""

    production: str | None = None
    opportunistic: bool = False
    # The production job that it spares, by name or PID; None: the only one there.
    target: str | None = None
    # None: as tuned, else the best that the host allows.
    yields: Yield | None = None
    # Of production, or of all opportunistic jobs of the GPU together (microseconds).
    slice_us: int | None = None
    # Which part of its speed production keeps; None: the slice is fixed.
    keep: float | None = None
    # Where production prints its speed.
    rate: PrintedRate | None = None

    @property
    def any(self) -> bool:
        """Return whether a role was asked for."""
        return self.production is not None or self.opportunistic


@dataclass(frozen=True, kw_only=True)
class SwapWish:
    """When a job leaves the GPU: at ``swap out`` alone, after this time without work, or in turns (None: by the switch)."""

    idle_seconds: float | None = None
    turns: bool = False
    turn_seconds: float | None = None


class Refused(NamedTuple):
    """Options that do not go together: one of ``options`` beside one of ``others``, or, if ``needs``, without any of them.

    An option with a value (``--yield swap``) stands for this value of it alone.
    """

    options: str
    others: str
    why: str
    instead: str
    needs: bool = False


REFUSED: Final = (
    Refused("--over", "--memory", "it says what happens above the limit", "--memory 20G --over warn", needs=True),
    Refused("--timeout", "--wait --swap:turns --yield:swap", "only a job that waits gives up", "--wait --timeout 2h", True),
    Refused("--requeue", "--wait", "it waits again for more memory", "--wait --requeue --memory 20G", True),
    Refused("--for --yield --keep", "--opportunistic", "only an opportunistic job spares another", "--opportunistic --for NAME", True),
    Refused("--metric", "--production", "it finds the speed of production in its output", "--production NAME --metric 'rate=([0-9.]+)'", True),
    Refused("--lower-is-better", "--metric", "it is about that number", "--production NAME --metric 'ms=([0-9.]+)' --lower-is-better", True),
    Refused("--name", "--production", "a production job has the name of its role", "--production NAME"),
    Refused("--production", "--opportunistic", "a job has one role", "--production NAME"),
    Refused("--mig", "--production --opportunistic", "a job with an instance of its own shares with nobody", "--mig 1g"),
    Refused("--mig", "--slice --weight", "a time-slice shares a GPU, and an instance has no other jobs", "--mig 1g"),
    Refused("--mig", "--swap", "a checkpoint needs a GPU without MIG", "--swap request"),
    Refused("--mig", "--requeue", "an instance does not grow", "--mig PROFILE --wait"),
    Refused("--gpus", "--mig", "a program uses one MIG instance", "--gpus 2 -g 0-3"),
    Refused("--gpus", "--threads --priority --strict", "an MPS daemon has one GPU", "--gpus 2 --memory 20G"),
    Refused("--gpus", "--opportunistic", "an opportunistic job spares production on one GPU", "--gpus 2 --wait --memory 20G"),
    Refused("--gpus", "--swap", "a job that is swapped has one GPU", "--gpus 2 --wait --memory 20G"),
    Refused("--gpus --bind", "--container", "a container is given one GPU, and CPUs by its engine", "--container podman"),
    Refused("--weight", "--slice", "a weight is a time-slice", "--weight 3"),
    Refused("--weight", "--production --opportunistic", "roles have time-slices of their own", "--weight 3 --name NAME"),
    Refused("--slice --weight", "--threads --priority --strict", "time-slices are set outside MPS", "--slice 500us --memory 20G"),
    Refused("--slice", "--opportunistic", "all opportunistic jobs of a GPU share one time-slice", "--opportunistic --yield slices=500us"),
    Refused("--swap", "--production --opportunistic", "production stays, and an opportunistic job leaves by --yield swap", "--opportunistic --yield swap"),
    Refused("--swap --yield:swap", "--threads --priority --strict", "a job that is swapped runs outside MPS", "--swap request --memory 20G"),
    Refused("--swap", "--slice --weight", "a job that is swapped has the driver's time-slice", "--swap request --name NAME"),
    Refused("--swap:idle --swap:turns --yield:swap", "--over:pause", "a job that is stopped for its memory cannot leave the GPU", "--swap turns --memory 60G"),
    Refused("--swap --yield:swap", "--container", "a container cannot be swapped", "--container podman"),
    Refused("--keep", "--yield:caps --yield:pause --yield:swap --yield:requeue", "it adapts a time-slice", "--opportunistic --keep 97%"),
)  # fmt: skip


def check_combination(given: Collection[str]) -> None:
    """Raise BadCombination if options exclude each other; ``given`` has the options and their values: ``--yield:swap``."""
    for row in REFUSED:
        options, others = ([name for name in names.split() if name in given] for names in (row.options, row.others))
        if options and bool(others) is not row.needs:
            example = (
                f"for example: gpushare run {row.instead} -- {'IMAGE CMD' if '--container' in row.instead else 'CMD'}"
            )
            first = _shown(options[0])
            if row.needs:
                needed = [_shown(name) for name in row.others.split()]
                raise BadCombination(f"{first} needs {' or '.join(needed)}: {row.why}", example)
            raise BadCombination(f"{first} cannot be combined with {_shown(others[0])}: {row.why}", example)


def _shown(name: str) -> str:
    return name.replace(":", " ")


def parse_yield(text: str) -> tuple[Yield, str | None]:
    """Return how a job yields and the value behind ``=``: ``slices=200us``, ``caps=60``, ``pause``.

    Raises:
        BadUsage: no such way, or one that takes no value (code ``bad_yield``).
    """
    way, equals, value = text.strip().partition("=")
    if way not in _WAYS_TO_YIELD or (equals and (way not in {"slices", "caps"} or not value)):
        raise BadUsage(
            f"--yield {quoted(text)} is not a way to yield",
            "give slices, slices=200us, caps, caps=60, pause, swap or requeue",
            code="bad_yield",
        )
    return cast("Yield", way), value or None


def parse_swap(text: str) -> SwapWish:
    """Return when a job is swapped: ``request``, ``idle=10m``, ``turns``, ``turns=60s``, or two with a comma.

    Raises:
        BadUsage: it is none of them, one is there twice, or a time is wrong (code ``bad_swap``).
    """
    wish, seen = SwapWish(), set[str]()
    for word in text.split(","):
        when, equals, value = word.strip().partition("=")
        fits = {"request": not equals, "idle": bool(value), "turns": bool(value) or not equals}.get(when, False)
        if not fits or when in seen:
            raise BadUsage(
                f"--swap {quoted(text)} does not say when the job leaves the GPU",
                "give request, idle=10m, turns, turns=60s, or two of them: idle=10m,turns",
                code="bad_swap",
            )
        seen.add(when)
        seconds = parse_seconds(value) if value else None
        if seconds == 0:
            raise BadUsage(f"--swap {quoted(word)}: 0 is not a duration", f"give {when}=10m", code="bad_duration")
        if when == "idle":
            wish = replace(wish, idle_seconds=seconds)
        elif when == "turns":
            wish = replace(wish, turns=True, turn_seconds=seconds)
    return wish


# What `--memory` and `--memory 80%` become: bytes, or a part of the GPU's total.
class MemoryWish(NamedTuple):
    """A limit of a job on each of its GPUs: bytes, or a part of all memory of the GPU (percent)."""

    bytes: int | None
    percent: float | None = None

    def of(self, total_bytes: int | None) -> int | None:
        """Return it in bytes on a device with so much memory; None: that is not known."""
        if self.percent is None:
            return self.bytes
        from gpushare.base.units import MIB

        return None if total_bytes is None else int(total_bytes * self.percent / 100) // MIB * MIB


def parse_job_memory(text: str) -> MemoryWish:
    """Return the memory of a job: ``20G``, or ``80%`` of the GPU. Raises BadUsage."""
    if not text.strip().endswith("%"):
        from gpushare.base.units import parse_memory_limit

        return MemoryWish(parse_memory_limit(text))
    try:
        return MemoryWish(None, parse_thread_percentage(text))
    except BadUsage:
        raise BadUsage(
            f"--memory {quoted(text)} is not a part of the GPU's memory", "give --memory 80%", code="bad_size"
        ) from None


def given_options(
    values: Mapping[str, object], yields: str | None, swap: SwapWish | None, over: str | None
) -> set[str]:
    """Return the options that are given, with those of their values that `REFUSED` names."""
    given = {name for name, value in values.items() if value not in {None, False}}
    given |= {f"--yield:{yields}"} if yields is not None else set()
    given |= {f"--over:{over}"} if over is not None else set()
    if swap is not None:
        given |= {"--swap:idle"} if swap.idle_seconds is not None else set()
        given |= {"--swap:turns"} if swap.turns else set()
    return given


def slice_of(text: str) -> int:
    """Return the time-slice of ``--slice`` in microseconds. Raises BadUsage."""
    from gpushare.base.units import parse_slice
    from gpushare.timeslice.slices import MOST_US, check_slice

    slice_us = check_slice(parse_slice(text))
    if slice_us > MOST_US:
        raise BadUsage(
            f"a slice of {format_slice(slice_us)} is above {format_slice(MOST_US)}: other programs would stall for up to that "
            "long per turn",
            "give 16ms; or set a longer one as root while it runs: gpushare timeslice set 50ms JOB",
            code="slice_too_long",
        )
    return slice_us


def weight_of(text: str) -> int:
    """Return the time-slice of ``--weight`` in microseconds. Raises BadUsage."""
    from gpushare.timeslice.rules import LEAST_WEIGHT, MOST_WEIGHT, slice_of_weight

    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise BadUsage(
            f"--weight {quoted(text)} is not a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
            "give --weight 3; programs without a weight count as 1",
            code="bad_weight",
        )
    return slice_of_weight(weight)
