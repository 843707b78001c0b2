"""What consolidation would save: the same work on fewer GPUs, as arithmetic. Pure.

Loads are percent of one GPU and add up; so does memory. What sharing itself costs is not in here: measure it.
Money is `Decimal`, rounded to cents once per sum, so that the sums that are shown add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

from gpushare.errors import BadUsage
from gpushare.units import format_bytes

# 24 hours a day, 30 days; clouds and OpenCost count 730 hours a month.
HOURS: Final = Decimal(720)
TARGET_LOAD: Final = Decimal(80)
MOST_GPUS: Final = 1024
_CENT: Final = Decimal("0.01")


@dataclass(frozen=True, kw_only=True)
class KnownPrice:
    """A price that somebody published, per hour of one instance with one GPU."""

    instance: str
    per_hour: Decimal
    source: str


# Only what our sources name. Everything else the user gives: prices change, and differ by region and contract.
KNOWN_PRICES: Final = (
    KnownPrice(
        instance="g4dn.2xlarge",
        per_hour=Decimal("0.752"),
        source="on demand in us-east-1, as in Karpenter's price list of August 2026",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What runs on one GPU now: its mean load, its 95th percentile if known, and its peak memory if known."""

    name: str
    load: Decimal
    p95: Decimal | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one GPU per hour, the number of hours, and the source of the price."""

    per_hour: Decimal
    hours: Decimal
    source: str

    def cost(self, gpus: int) -> Decimal:
        """Return what a number of GPUs costs, to the cent."""
        return (gpus * self.per_hour * self.hours).quantize(_CENT, ROUND_HALF_UP)


@dataclass(frozen=True, kw_only=True)
class Option:
    """The work on fewer GPUs. ``verdict`` is fits, above_target or no_headroom; cost is None without a price.

    ``places`` tells which GPUs' work goes together. ``max_load`` is of the fullest GPU, ``max_p95`` the largest sum of
    95th percentiles that meet on one, as if all peaks came at once; None where one is unknown.
    """

    gpus: int
    places: tuple[tuple[str, ...], ...]
    max_load: Decimal
    max_p95: Decimal | None
    max_memory_bytes: int | None
    verdict: str
    cost: Decimal | None
    saving: Decimal | None
    saving_percent: Decimal
    recommended: bool = False


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Now, and the ways to use fewer GPUs, the tightest first. ``warnings`` are for people."""

    gpus: int
    total_load: Decimal
    target_load: Decimal
    price: Price | None
    cost: Decimal | None
    options: tuple[Option, ...]
    warnings: tuple[str, ...]

    @property
    def recommended(self) -> Option | None:
        """Return the fewest GPUs that keep the target load, or None when that needs all of them."""
        return next((option for option in self.options if option.recommended), None)


def savings(
    work: Sequence[Work],
    *,
    price: Price | None = None,
    target_load: Decimal = TARGET_LOAD,
    gpu_memory_bytes: int | None = None,
) -> Savings:
    """Return what the work of each GPU would cost on fewer GPUs of the same kind.

    An option needs a place for the memory of all, and at most 100 % load on each GPU. The recommended one is the
    fewest GPUs with no load above the target.

    Raises:
        BadUsage: a load, target or number of GPUs is out of range, or one piece of work needs more than a GPU has.
    """
    _check(work, target_load, gpu_memory_bytes)
    now = len(work)
    cost = None if price is None else price.cost(now)
    options: list[Option] = []
    refused: str | None = None
    for gpus in range(1, now):
        bins = _pack(work, gpus, gpu_memory_bytes)
        if bins is None:
            refused = _no_room(work, gpus, gpu_memory_bytes)
            continue
        found = _option(bins, now, price, cost, target_load)
        if found.max_load > 100:
            refused = f"{_on(gpus)} the fullest would have {plain(found.max_load)} % load: more than 100 %"
            continue
        # More GPUs that take no load off the fullest one only cost.
        if options and found.max_load >= options[-1].max_load:
            continue
        options.append(found)
        if found.verdict == "fits":
            options[-1] = _recommended(found)
            break
    total = sum((one.load for one in work), Decimal(0))
    return Savings(
        gpus=now,
        total_load=total,
        target_load=target_load,
        price=price,
        cost=cost,
        options=tuple(options),
        warnings=(*([refused] if refused else []), *_warnings(work, options, total, target_load, gpu_memory_bytes)),
    )


def known_price(instance: str) -> KnownPrice | None:
    """Return the published price of an instance, or None."""
    return next((one for one in KNOWN_PRICES if one.instance == instance.strip().lower()), None)


def _check(work: Sequence[Work], target_load: Decimal, gpu_memory_bytes: int | None) -> None:
    if not 1 <= len(work) <= MOST_GPUS:
        raise BadUsage(
            f"{len(work)} GPUs cannot be consolidated", f"give 1 to {MOST_GPUS}: --gpus 4", code="bad_number_of_gpus"
        )
    if not 0 < target_load <= 100:
        raise BadUsage(
            f"the target load {target_load} is outside (0, 100]", "give for example --target-load 80", code="bad_load"
        )
    for one in work:
        if not 0 <= one.load <= 100:
            raise BadUsage(
                f"the load {one.load} is outside 0 to 100", "give the mean load of one GPU: --load 25", code="bad_load"
            )
        if gpu_memory_bytes is not None and one.memory_bytes is not None and one.memory_bytes > gpu_memory_bytes:
            raise BadUsage(
                f"{one.name} needs {format_bytes(one.memory_bytes)} and one GPU has {format_bytes(gpu_memory_bytes)}, "
                f"{format_bytes(one.memory_bytes - gpu_memory_bytes)} too little",
                "give a GPU with more memory: --gpu-memory SIZE",
                code="memory_too_large",
            )


def _pack(work: Sequence[Work], gpus: int, capacity: int | None) -> list[list[Work]] | None:
    """Spread the load evenly over a number of GPUs; None if the memory does not fit.

    Largest first, each to the GPU with the least load that has room; by load, and where memory then does not fit,
    by memory to the first GPU with room. What fits on fewer GPUs fits: the caller keeps the better of both.
    """
    by_load = sorted(work, key=lambda one: (-one.load, -(one.memory_bytes or 0), one.name))
    by_memory = sorted(work, key=lambda one: (-(one.memory_bytes or 0), -one.load, one.name))
    return _spread(by_load, gpus, capacity, even=True) or _spread(by_memory, gpus, capacity, even=False)


def _spread(work: Sequence[Work], gpus: int, capacity: int | None, *, even: bool) -> list[list[Work]] | None:
    bins: list[list[Work]] = [[] for _ in range(gpus)]
    loads, memories = [Decimal(0)] * gpus, [0] * gpus
    for one in work:
        memory = one.memory_bytes or 0
        room = [place for place in range(gpus) if capacity is None or memories[place] + memory <= capacity]
        if not room:
            return None
        place = min(room, key=lambda place: (loads[place], place)) if even else room[0]
        bins[place].append(one)
        loads[place] += one.load
        memories[place] += memory
    return bins


def _option(
    bins: list[list[Work]], now: int, price: Price | None, cost: Decimal | None, target_load: Decimal
) -> Option:
    gpus = len(bins)
    max_load = max(sum((one.load for one in place), Decimal(0)) for place in bins)
    p95 = [_sum_p95(place) for place in bins]
    memory = [_sum_memory(place) for place in bins]
    then = None if price is None else price.cost(gpus)
    return Option(
        gpus=gpus,
        places=tuple(tuple(one.name for one in place) for place in bins),
        max_load=max_load,
        max_p95=None if None in p95 else max(one for one in p95 if one is not None),
        max_memory_bytes=None if None in memory else max(one for one in memory if one is not None),
        verdict="fits" if max_load <= target_load else "no_headroom" if max_load >= 100 else "above_target",
        cost=then,
        saving=None if cost is None or then is None else cost - then,
        saving_percent=(Decimal(100) * (now - gpus) / now).quantize(Decimal("0.1"), ROUND_HALF_UP),
    )


def _recommended(option: Option) -> Option:
    from dataclasses import replace

    return replace(option, recommended=True)


def _sum_p95(place: Sequence[Work]) -> Decimal | None:
    known = [one.p95 for one in place if one.p95 is not None]
    return sum(known, Decimal(0)) if len(known) == len(place) else None


def _sum_memory(place: Sequence[Work]) -> int | None:
    known = [one.memory_bytes for one in place if one.memory_bytes is not None]
    return sum(known) if len(known) == len(place) else None


def _no_room(work: Sequence[Work], gpus: int, capacity: int | None) -> str:
    needed, there = sum(one.memory_bytes or 0 for one in work), gpus * (capacity or 0)
    if needed > there:
        why = f"{format_bytes(needed)} is needed, {format_bytes(there)} is available: {format_bytes(needed - there)} too little"
    else:
        why = "the work of the GPUs cannot be split that way"
    return f"{_on(gpus)} the memory does not fit: {why}"


def _on(gpus: int) -> str:
    return "on one GPU" if gpus == 1 else f"on {gpus} GPUs"


def plain(number: Decimal) -> str:
    """Return a number without needless zeros: ``25``, ``0.752``."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _warnings(
    work: Sequence[Work], options: Sequence[Option], total: Decimal, target: Decimal, capacity: int | None
) -> list[str]:
    said = []
    loads = {one.load for one in work}
    # Alike: "4 x 25 %"; else the sum.
    terms = f"{len(work)} x {plain(work[0].load)} %" if len(loads) == 1 else "together the loads"
    for option in options:
        where = _on(option.gpus)
        fullest = plain(option.max_load)
        if option.verdict == "no_headroom":
            load = f"{terms} is {plain(total)} % load" if option.gpus == 1 else f"the fullest has {fullest} % load"
            said.append(f"{where}, {load}: no headroom, so every peak slows all of them down")
        elif option.verdict == "above_target":
            said.append(f"{where}, the fullest has {fullest} % load, above the target of {plain(target)} %")
        if option.recommended and option.max_p95 is not None and option.max_p95 > 100:
            said.append(f"{where}, simultaneous peaks need {plain(option.max_p95)} % (sum of the 95th percentiles)")
    if len(work) > 1 and not any(option.recommended for option in options):
        said.append(f"the target load of {plain(target)} % needs all {len(work)} GPUs with this memory")
    if len(work) > 1 and (capacity is None or any(one.memory_bytes is None for one in work)):
        said.append("memory was not checked: the work must also fit in memory; give --memory and --gpu-memory")
    return said
