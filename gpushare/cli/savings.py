"""``gpushare savings``: what sharing fewer GPUs would save; answered by `gpushare/advice/`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from gpushare.advice.savings import MOST_GPUS, Consolidation, Price, Savings, Work
from gpushare.advice.savings import savings as save
from gpushare.base.errors import BadUsage, NotFound, NotSupported
from gpushare.base.model import Gpu
from gpushare.base.selection import select
from gpushare.base.units import counted, format_bytes, format_duration, parse_memory_limit, quoted
from gpushare.cli.options import Command, Refused, option, refuse, verb
from gpushare.measure.dcgm import read_measured
from gpushare.measure.recording import GpuUse, Recording
from gpushare.show.result import Column, Result, Table, plain_value

# Ten years; more is a typo.
_MOST_HOURS: Final = Decimal(87_840)
_MOST_PRICE: Final = Decimal(1_000_000)

_REFUSED: Final = (
    Refused("--from", "--gpus --load --memory", "they are in the recording", "--from week.jsonl"),
    Refused("--gpu", "--from", "it chooses GPUs of a recording", "--from week.jsonl -g 0", needs=True),
)


@verb(Command)
def savings(
    gpus: int | None = option("--gpus", "N", "Number of GPUs, one per cloud instance."),
    load: str | None = option("--load", "PCT", "Mean load of each GPU."),
    price: str | None = option("--price", "PRICE", "Price of one GPU per hour, in dollars."),
    hours: str = option("--hours", "HOURS", "Number of hours; 720 is 30 days.", default="720"),
    target_load: str = option("--target-load", "PCT", "Highest load that a GPU should have.", default="80"),
    memory: str | None = option("--memory", "SIZE", "Peak memory of the work of one GPU."),
    gpu_memory: str | None = option("--gpu-memory", "SIZE", "Memory of one GPU, like 15G or 141G."),
    instance: str | None = option("--instance", "NAME", "Cloud instance type, for the text."),
    read: str | None = option("--from", "FILE", "Take loads and memory from a recording of gpushare observe."),
    gpu: str | None = option("-g --gpu", "GPU", "With --from: only these GPUs."),
) -> Any:
    """Calculate what the work of several GPUs would cost on fewer GPUs: an estimate, not a promise.

    Loads and memory add up, and the GPUs that remain must have room for all of the memory. The overhead of sharing is
    not included, and the mean load hides peaks: measure before you give machines back. The price is the one you give.
    """
    refuse(_REFUSED)
    target = _parse_number("--target-load", target_load, Decimal(100))
    hour_count = _parse_number("--hours", hours, _MOST_HOURS)
    cost = None if price is None else Price(per_hour=_parse_number("--price", price, _MOST_PRICE), hours=hour_count)
    capacity = None if gpu_memory is None else parse_memory_limit(gpu_memory, "--gpu-memory")
    notes: list[str] = []
    if read is None:
        work = _typed_work(gpus, load, memory)
    else:
        recording, uses = _chosen_uses(read, gpu)
        work = [_recorded_work(use) for use in uses]
        notes += _recording_notes(recording, uses)
        sizes = [use.gpu.memory_total_bytes for use in uses if use.gpu.memory_total_bytes is not None]
        if capacity is None and len(sizes) == len(uses):
            capacity = min(sizes, default=None)
    saved = save(work, price=cost, target_load=target, gpu_memory_bytes=capacity)
    notes.append("the overhead of sharing and peaks are not included: measure before you give machines back")
    answer = SavingsAnswer(
        **vars(saved),
        instance=instance,
        loads_percent=tuple(each.load for each in work),
        memory_bytes=tuple(each.memory_bytes for each in work),
        gpu_memory_bytes=capacity,
    )
    return savings_result(answer, notes)


_EXAMPLES: Final = {"--load": "25", "--price": "0.752", "--hours": "720", "--target-load": "80"}


def _parse_number(option: str, text: str, most: Decimal, *, zero: bool = False) -> Decimal:
    """Return a number as typed, with or without $ and %; raises BadUsage above ``most``, and for 0 unless ``zero``."""
    match = re.fullmatch(r"\s*\$?(\d{1,12}(?:\.\d{1,12})?|\.\d{1,12})\s*%?\s*", text, re.ASCII)
    value = Decimal(match.group(1)) if match else None
    if value is None or value > most or (value == 0 and not zero):
        low = "from 0 to " if zero else "above 0 and up to "
        raise BadUsage(
            f"{option} {text} is not a number {low}{most}", f"give {option} {_EXAMPLES[option]}", code="bad_number"
        )
    return value


def _typed_work(gpus: int | None, load: str | None, memory: str | None) -> list[Work]:
    """Return the work of each GPU as --gpus, --load and --memory give it."""
    if gpus is None or load is None:
        raise BadUsage(
            "--gpus and --load are needed together, or --from",
            "give --gpus 4 --load 25; or a recording: gpushare savings --from FILE",
            code="no_load",
        )
    if not 1 <= gpus <= MOST_GPUS:
        raise BadUsage(
            f"--gpus {gpus} is outside 1 to {MOST_GPUS}", "give the number of GPUs: --gpus 4", code="bad_number"
        )
    percent = _parse_number("--load", load, Decimal(100), zero=True)
    memory_bytes = None if memory is None else parse_memory_limit(memory)
    return [Work(name=f"work {number}", load=percent, memory_bytes=memory_bytes) for number in range(1, gpus + 1)]


def _chosen_uses(read: str, gpu: str | None) -> tuple[Recording, list[GpuUse]]:
    """Return a recording and the use of the chosen GPUs in it, which are of one model."""
    recording = read_measured(read)
    gpus = [Gpu(index=use.gpu.index, uuid=use.gpu.uuid) for use in recording.gpus]
    try:
        chosen = {device.gpu.index for device in select(gpu, gpus)}
    except NotFound as error:
        indexes = ", ".join(str(use.gpu.index) for use in recording.gpus)
        raise NotFound(f"{read} has no GPU {quoted(gpu or '')}", f"it has GPU {indexes}", code=error.code) from None
    uses = [use for use in recording.gpus if use.gpu.index in chosen]
    if len(uses) > MOST_GPUS:
        raise BadUsage(
            f"{read} has {len(uses)} GPUs: at most {MOST_GPUS} can be put together",
            f"choose some: -g 0-{MOST_GPUS - 1}",
            code="bad_number",
        )
    names = sorted({use.gpu.name or "unknown" for use in uses})
    if len(names) > 1:
        raise BadUsage(
            f"the loads of different GPU models cannot be added: {', '.join(names)}",
            "choose GPUs of one model: -g 0,1",
            code="different_gpus",
        )
    return recording, uses


def _recorded_work(use: GpuUse) -> Work:
    """Return the work of one GPU in a recording: its mean load and its peak memory."""
    if use.activity is None:
        raise NotSupported(
            f"the load of GPU {use.gpu.index} is unknown in this recording: {use.error or 'the driver did not report it'}",
            "choose other GPUs with -g, or give the load: --gpus 4 --load 25",
            gpu=use.gpu.index,
            code="load_unknown",
        )
    return Work(name=f"GPU {use.gpu.index}", load=Decimal(str(use.activity.mean)), memory_bytes=use.memory_peak_bytes)


def _recording_notes(recording: Recording, uses: list[GpuUse]) -> list[str]:
    """Return what makes loads from this recording uncertain."""
    notes = [
        f"loads are means of {counted(recording.samples, 'sample')} in {format_duration(recording.seconds)}: record a typical period, long enough"
    ]
    if any(use.source == "utilization" for use in uses):
        notes.append("utilization only says that a kernel ran: the real load of the SMs is lower, never higher")
    if len(uses) > 1:
        notes.append("these GPUs are in one machine: it only saves money if GPUs can be given back or used by others")
    return notes


_VERDICTS: Final = {"fits": "fits", "above_target": "above the target", "no_headroom": "no headroom"}


@dataclass(frozen=True, kw_only=True)
class SavingsAnswer(Savings):
    """The answer of `savings`."""

    instance: str | None
    # The load of each GPU now.
    loads_percent: tuple[Decimal, ...]
    memory_bytes: tuple[int | None, ...]
    # The memory of one GPU.
    gpu_memory_bytes: int | None


def savings_result(data: SavingsAnswer, notes: Sequence[str]) -> Result:
    """Return the estimate as a result: a line and a row of the table for each smaller number of GPUs."""
    lines = [_line_of_today(data), *(_option_line(option, data) for option in data.options)]
    lines += _headroom_lines(data)
    lines += [f"warning: {warning}" for warning in data.warnings]
    price = data.price
    lines.append(
        "price: none given, so no amounts; give the price of one GPU per hour: --price 2"
        if price is None
        else f"price: ${plain_value(price.per_hour)} per GPU per hour, {plain_value(price.hours)} hours; source: given with --price"
    )
    columns = (
        Column("gpus", "GPUs", right=True),
        Column("cost", "cost", right=True, format=money),
        Column("saving", "saving", right=True, format=money),
        Column("saving_percent", "saving %", right=True, rank=1),
        Column("max_load_percent", "fullest %", right=True),
        Column("max_memory_bytes", "memory", right=True, rank=1, optional=True, format=format_bytes),
        Column("verdict", "verdict", format=lambda value: _VERDICTS.get(value, str(value))),
        Column(
            "places",
            "together",
            rank=3,
            whole=True,
            format=lambda places: "; ".join(" + ".join(place) for place in places if place),
        ),
    )
    table = Table(name="options", columns=columns, rows=data.options, empty="no smaller number of GPUs fits")
    # A terminal shows these lines wrapped between words.
    estimate = Table(name="estimate", columns=(), rows=(), lines=tuple((line, None) for line in lines))
    return Result(data=data, tables=(estimate, table), csv=table, notes=tuple(notes))


def money(value: Decimal | None) -> str:
    """Return an amount for people: ``$2,165.76``, or ``-`` if unknown."""
    return "-" if value is None else f"${value:,.2f}"


def _line_of_today(data: SavingsAnswer) -> str:
    """Return the line on the GPUs as they are used today: number, load, cost."""
    load = f"{plain_value(data.total_load_percent)} % load together"
    if len(set(data.loads_percent)) == 1:
        load = f"{plain_value(data.loads_percent[0])} % load each"
    line = f"now: {data.gpus} x {data.instance or 'GPU'} at {load}"
    price = data.price
    if price is None:
        return line
    return f"{line}: {data.gpus} x ${plain_value(price.per_hour)}/h x {plain_value(price.hours)} h = {money(data.cost)}"


def _option_line(option: Consolidation, data: SavingsAnswer) -> str:
    """Return the line on one smaller number of GPUs: what it saves, and how full they are."""
    if data.cost is None:
        change = f"{data.gpus} to {option.gpus}: {plain_value(option.saving_percent)} % fewer"
    else:
        change = (
            f"{data.gpus} to {option.gpus}: from {money(data.cost)} to {money(option.cost)}, "
            f"saving {money(option.saving)} ({plain_value(option.saving_percent)} %)"
        )
    load = f"fullest {plain_value(option.max_load_percent)} %, {_VERDICTS[option.verdict]}"
    return f"{change}; {load}{'  <- recommended' if option.recommended else ''}"


def _headroom_lines(data: SavingsAnswer) -> list[str]:
    """Return what the recommended option costs more than the one with the fewest GPUs, which has no room for peaks."""
    fewest = min(data.options, key=lambda option: option.gpus, default=None)
    chosen = data.recommended
    if fewest is None or chosen is None or chosen.gpus == fewest.gpus:
        return []
    more = chosen.gpus - fewest.gpus
    cost = "" if chosen.cost is None or fewest.cost is None else f", {money(chosen.cost - fewest.cost)}"
    loads = f"{plain_value(chosen.max_load_percent)} % full instead of {plain_value(fewest.max_load_percent)} %"
    return [f"headroom costs {more} GPU{'s' * (more > 1)} more{cost}: {loads}"]
