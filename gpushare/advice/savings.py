"""Estimate what the same work would cost on fewer GPUs. Pure arithmetic.

Loads are in percent of one GPU and add up; so does memory. The cost of sharing itself is not included: measure it.
Money is `Decimal`, rounded to cents once per sum, so that the sums that are shown add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

from gpushare.base.errors import BadUsage
from gpushare.base.units import format_bytes

TARGET_LOAD: Final = Decimal(80)
MOST_GPUS: Final = 1024
_CENT: Final = Decimal("0.01")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work on one GPU now: mean load and peak memory; None where unknown."""

    name: str
    load: Decimal
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one GPU per hour, and the number of hours."""

    # In dollars.
    per_hour: Decimal
    hours: Decimal

    def cost(self, gpus: int) -> Decimal:
        return (gpus * self.per_hour * self.hours).quantize(_CENT, ROUND_HALF_UP)


@dataclass(frozen=True, kw_only=True)
class Consolidation:
    """The work on fewer GPUs. ``verdict`` is fits, above_target or no_headroom. ``cost`` is None without a price.

    ``places`` has one list per GPU, with the names of those whose work goes on it. ``max_load_percent`` is the load of the
    fullest GPU.
    """

    gpus: int
    places: tuple[tuple[str, ...], ...]
    max_load_percent: Decimal
    max_memory_bytes: int | None
    verdict: str
    # In dollars.
    cost: Decimal | None
    # In dollars.
    saving: Decimal | None
    saving_percent: Decimal
    recommended: bool = False


@dataclass(frozen=True, kw_only=True)
class Savings:
    """The current state, and the options with fewer GPUs, fewest first."""

    gpus: int
    total_load_percent: Decimal
    target_load_percent: Decimal
    price: Price | None
    # In dollars.
    cost: Decimal | None
    options: tuple[Consolidation, ...]
    warnings: tuple[str, ...]

    @property
    def recommended(self) -> Consolidation | None:
        """Return the option with the fewest GPUs that keeps the target load; None if that needs all of them."""
        return next((option for option in self.options if option.recommended), None)


def savings(
    work: Sequence[Work],
    *,
    price: Price | None = None,
    target_load: Decimal = TARGET_LOAD,
    gpu_memory_bytes: int | None = None,
) -> Savings:
    """Return what the work of each GPU would cost on fewer GPUs of the same kind.

    In an option, all memory must fit and no GPU may have more than 100 % load. The recommended one has the fewest
    GPUs with no load above the target.

    Raises:
        BadUsage: one piece of work needs more memory than a GPU has.
    """
    largest = max(work, key=lambda workload: workload.memory_bytes or 0)
    needed = largest.memory_bytes
    if gpu_memory_bytes is not None and needed is not None and needed > gpu_memory_bytes:
        raise BadUsage(
            f"{largest.name} needs {format_bytes(needed)} and one GPU has {format_bytes(gpu_memory_bytes)}, "
            f"{format_bytes(needed - gpu_memory_bytes)} too little",
            "give a GPU with more memory: --gpu-memory SIZE",
            code="memory_too_large",
        )
    gpus_now = len(work)
    cost = None if price is None else price.cost(gpus_now)
    options: list[Consolidation] = []
    # Why the largest number of GPUs that is too small is that.
    refused: str | None = None
    for gpus in range(1, gpus_now):
        bins = _pack(work, gpus, gpu_memory_bytes)
        if bins is None:
            refused = _no_room_text(work, gpus, gpu_memory_bytes)
            continue
        option = _consolidate(bins, gpus_now, price, cost, target_load)
        if option.max_load_percent > 100:
            fullest = plain_number(option.max_load_percent)
            refused = f"{_on_gpus_text(gpus)} the fullest would have {fullest} % load: more than 100 %"
            continue
        # An additional GPU that takes no load off the fullest one only costs money.
        if options and option.max_load_percent >= options[-1].max_load_percent:
            continue
        options.append(option)
        if option.verdict == "fits":
            options[-1] = replace(option, recommended=True)
            break
    total = sum((workload.load for workload in work), Decimal(0))
    warnings = _warnings(work, options, total, target_load, gpu_memory_bytes)
    if refused is not None:
        warnings.insert(0, refused)
    return Savings(
        gpus=gpus_now,
        total_load_percent=total,
        target_load_percent=target_load,
        price=price,
        cost=cost,
        options=tuple(options),
        warnings=tuple(warnings),
    )


def _pack(work: Sequence[Work], gpus: int, capacity: int | None) -> list[list[Work]] | None:
    """Spread the load evenly over a number of GPUs; None if the memory does not fit.

    By load, largest first, each to the least loaded GPU with room; if the memory then does not fit, by memory, each to
    the first GPU with room.
    """
    by_load = sorted(work, key=lambda workload: (-workload.load, -(workload.memory_bytes or 0), workload.name))
    by_memory = sorted(work, key=lambda workload: (-(workload.memory_bytes or 0), -workload.load, workload.name))
    return _put_on_gpus(by_load, gpus, capacity, even=True) or _put_on_gpus(by_memory, gpus, capacity, even=False)


def _put_on_gpus(work: Sequence[Work], gpus: int, capacity: int | None, *, even: bool) -> list[list[Work]] | None:
    """Put work in this order on GPUs, to the least loaded one with room if ``even``; None: it does not fit."""
    bins: list[list[Work]] = [[] for _ in range(gpus)]
    loads = [Decimal(0)] * gpus
    memories = [0] * gpus
    for workload in work:
        memory = workload.memory_bytes or 0
        with_room = [gpu for gpu in range(gpus) if capacity is None or memories[gpu] + memory <= capacity]
        if not with_room:
            return None
        gpu = min(with_room, key=lambda gpu: (loads[gpu], gpu)) if even else with_room[0]
        bins[gpu].append(workload)
        loads[gpu] += workload.load
        memories[gpu] += memory
    return bins


def _consolidate(
    bins: list[list[Work]], gpus_now: int, price: Price | None, cost: Decimal | None, target_load: Decimal
) -> Consolidation:
    """Return what work on these GPUs comes to: load, memory and cost, against all GPUs now."""
    gpus = len(bins)
    max_load = max(sum((workload.load for workload in place), Decimal(0)) for place in bins)
    max_memory = None
    # Of some work alone, a sum would say too little.
    if all(workload.memory_bytes is not None for place in bins for workload in place):
        max_memory = max(sum(workload.memory_bytes or 0 for workload in place) for place in bins)
    new_cost = None if price is None else price.cost(gpus)
    verdict = "fits"
    if max_load > target_load:
        verdict = "no_headroom" if max_load >= 100 else "above_target"
    return Consolidation(
        gpus=gpus,
        places=tuple(tuple(workload.name for workload in place) for place in bins),
        max_load_percent=max_load,
        max_memory_bytes=max_memory,
        verdict=verdict,
        cost=new_cost,
        saving=None if cost is None or new_cost is None else cost - new_cost,
        saving_percent=(Decimal(100) * (gpus_now - gpus) / gpus_now).quantize(Decimal("0.1"), ROUND_HALF_UP),
    )


def _no_room_text(work: Sequence[Work], gpus: int, capacity: int | None) -> str:
    """Return why the memory of the work does not fit on this many GPUs."""
    needed = sum(workload.memory_bytes or 0 for workload in work)
    available = gpus * (capacity or 0)
    if needed > available:
        reason = f"{format_bytes(needed)} is needed, {format_bytes(available)} is available: {format_bytes(needed - available)} too little"
    else:
        reason = "the work of the GPUs cannot be split that way"
    return f"{_on_gpus_text(gpus)} the memory does not fit: {reason}"


def _on_gpus_text(gpus: int) -> str:
    return "on one GPU" if gpus == 1 else f"on {gpus} GPUs"


def plain_number(number: Decimal) -> str:
    """Return a number without needless zeros: ``12.5``, ``80``."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _warnings(
    work: Sequence[Work], options: Sequence[Consolidation], total: Decimal, target: Decimal, capacity: int | None
) -> list[str]:
    """Return what speaks against the options: no headroom, a load above the target, unchecked memory."""
    warnings = []
    loads = {workload.load for workload in work}
    # Equal loads are shown as "4 x 25 %", others as their sum.
    terms = f"{len(work)} x {plain_number(work[0].load)} % is" if len(loads) == 1 else "the loads add up to"
    for option in options:
        where = _on_gpus_text(option.gpus)
        fullest = plain_number(option.max_load_percent)
        if option.verdict == "no_headroom":
            load = f"{terms} {plain_number(total)} % load" if option.gpus == 1 else f"the fullest has {fullest} % load"
            warnings.append(f"{where}, {load}: no headroom, so every peak slows all of them down")
        elif option.verdict == "above_target":
            warnings.append(f"{where}, the fullest has {fullest} % load, above the target of {plain_number(target)} %")
    is_memory_known = capacity is not None and all(workload.memory_bytes is not None for workload in work)
    if len(work) > 1 and not any(option.recommended for option in options):
        room = " and has room for the memory" if is_memory_known else ""
        warnings.append(
            f"no smaller number of GPUs keeps each load at or below the target of {plain_number(target)} %{room}"
        )
    if len(work) > 1 and not is_memory_known:
        warnings.append("memory was not checked: the work must also fit in memory; give --memory and --gpu-memory")
    return warnings
