"""``gpushare compare``: the table of ways; from `gpushare/advice/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any, Final

from gpushare.advice.compare import (
    Availability,
    HostCell,
    answering_gpus,
    availability,
    availability_text,
    explanation_lines,
    host_cell,
    text_here,
    today_text,
)
from gpushare.advice.facts import HostFacts, host_facts
from gpushare.advice.table import COLUMNS, Table, driver_branch, load_table, row_named
from gpushare.advice.ways import way_of
from gpushare.base.errors import BadUsage, GpuLost, GpushareError, no_gpu_error
from gpushare.base.model import Gpu, Way
from gpushare.base.selection import select
from gpushare.base.units import quoted
from gpushare.cli.options import GPU_OPTION, Command, Refused, argument, option, refuse, settings, verb
from gpushare.show.compare import ComparedCell, ComparedRow, compare_table, csv_table, why_table
from gpushare.show.result import Result
from gpushare.show.status import gpu_errors
from gpushare.snapshot import HostState


class View(str, Enum):
    """Which words of the table are shown."""

    PUBLISHED = "published"
    TODAY = "today"
    HOST = "host"


@dataclass(frozen=True, kw_only=True)
class WayHere(Availability):
    """Whether a way is available on one GPU of this host."""

    way: Way
    gpu: int


@dataclass(frozen=True, kw_only=True)
class CompareAnswer:
    """What ``compare`` answers: cells of the table, and what this host has."""

    # Null with --why, which shows all three.
    view: View | None = None
    host: str | None
    driver: str | None
    root: bool | None = None
    availability: tuple[WayHere, ...] = ()
    cells: tuple[HostCell, ...]


_REFUSED: Final = (
    Refused("--why", "WAY", "it names the way of a cell", "--why error-isolation mps"),
    Refused("--driver", "--gpu --view:host --view:published", "it is for the view today", "--driver 580"),
    Refused("--gpu", "--view:today --view:published", "it is for the view host", "-g 0"),
)


@verb(Command)
def compare(
    ways: list[str] | None = argument("[WAY]...", "streams, mps, timeslice, mig, vgpu. [default: all]"),
    view: str | None = option(
        "--view",
        "VIEW",
        "published (NVIDIA's table of 2022), today (the current state), or host. [default: host where one answers, else today]",
    ),
    why: tuple[str, str] | None = option("--why", "ROW WAY", "Explain one cell: all views, sources, contradictions."),
    driver: str | None = option(
        "--driver", "VERSION", "The view today for this driver, like 580. [default: the newest]"
    ),
    gpu: str | None = GPU_OPTION,
) -> Any:
    """Compare the ways to share a GPU: Streams, MPS, time-slicing, MIG, vGPU.

    --view published is NVIDIA's table of 2022, --view today the current state by driver, and --view host what applies
    to this host. Sources disagree about a cell with a star: --why explains it.
    """
    asked_view = _parse_view(view)
    refuse(_REFUSED, {*settings.given, f"--view:{asked_view and asked_view.value}"})
    table = load_table()
    if driver is not None:
        branch = driver_branch(driver)
        if branch is None or not _OLDEST_DRIVER <= branch <= _NEWEST_DRIVER:
            raise BadUsage(
                f"{quoted(driver)} is not a driver version from {_OLDEST_DRIVER} to {_NEWEST_DRIVER}",
                "give it like 580 or 580.159.04",
                code="bad_driver",
            )
    if why is not None:
        return _explain_cell(table, why, driver, gpu)
    chosen = list(dict.fromkeys(way_of(text, COLUMNS) for text in ways or ())) or list(COLUMNS)
    return _table_result(table, chosen, asked_view, driver, gpu)


def _parse_view(text: str | None) -> View | None:
    """Return the view with this name; None: none is named."""
    if text is None:
        return None
    if text.lower() not in set(View):
        hint = "give --view published, today or host"
        raise BadUsage(f"{quoted(text)} is not a view of the table", hint, code="bad_view")
    return View(text.lower())


# gpushare needs R470 or later; a branch has three digits.
_OLDEST_DRIVER: Final = 470
_NEWEST_DRIVER: Final = 999


def _facts_of_host(gpu: str | None) -> HostFacts:
    """Return the facts of the host and the chosen GPUs, of which at least one answers."""
    state = HostState(settings.connect())
    # The table shows the levels: nvidia-smi runs during the sweep.
    state.start_reading_levels()
    facts = host_facts(state)
    if gpu is not None:
        chosen = {device.gpu.index for device in select(gpu, state.gpus)}
        facts = replace(facts, gpus=tuple(each for each in facts.gpus if each.index in chosen))
    if not facts.gpus:
        raise no_gpu_error("see the general table: gpushare compare --view today")
    if not answering_gpus(facts):
        raise GpuLost("no GPU answers", "see: gpushare doctor", gpu=facts.gpus[0].index)
    return facts


def _driver_and_facts(
    view: View | None, driver: str | None, gpu: str | None
) -> tuple[str | None, HostFacts | None, str | None]:
    """Return what the cells are about: without a view and a driver this host, if it answers.

    That is a driver (None: the newest), the facts of this host (None: it is not about this host), and why this host does
    not answer, if it was asked.
    """
    is_about_host = view is View.HOST or (view is None and driver is None)
    if not is_about_host:
        return driver, None, None
    try:
        facts = _facts_of_host(gpu)
    except GpushareError as error:
        if view is View.HOST or isinstance(error, BadUsage) or gpu is not None:
            raise
        return None, None, error.message
    return facts.driver, facts, None


def _table_result(table: Table, chosen: Sequence[Way], view: View | None, driver: str | None, gpu: str | None) -> Any:
    """Return the table of the chosen ways in a view; None: that of this host if it answers, else today's."""
    driver, facts, why_not_host = _driver_and_facts(view, driver, gpu)
    if view is None:
        view = View.TODAY if facts is None else View.HOST
    availability_here: list[WayHere] = []
    if facts is not None:
        availability_here = [
            WayHere(way=way, gpu=gpu.index, **vars(availability(way, facts, gpu)))
            for way, gpu in product(chosen, answering_gpus(facts))
        ]
    usable = {here.way for here in availability_here if here.usable}
    cells = tuple(host_cell(table, way, row.key, driver, facts) for row in table.rows for way in chosen)
    notes = (f"showing the view today, because this host does not answer: {why_not_host}",) if why_not_host else ()
    return Result(
        data=CompareAnswer(
            view=view,
            host=None if facts is None else facts.host,
            driver=driver,
            root=None if facts is None else facts.root,
            availability=tuple(availability_here),
            cells=cells,
        ),
        tables=(
            compare_table(
                _table_title(view, driver, facts),
                [table.titles[way] for way in chosen],
                _compared_rows(table, chosen, view, driver, facts),
                whole=settings.verbose or len(chosen) == 1,
                absent=frozenset(table.titles[way] for way in chosen if facts is not None and way not in usable),
            ),
        ),
        csv=csv_table(cells),
        notes=notes,
        errors=_silent_gpu_errors(facts),
    )


def _compared_rows(
    table: Table, chosen: Sequence[Way], view: View, driver: str | None, facts: HostFacts | None
) -> list[ComparedRow]:
    """Return a row per question with a cell per chosen way; with the facts of a host, the first row tells which it has."""

    def cell_of(way: Way, key: str) -> ComparedCell:
        """Return what the view says of a way, and whether sources disagree; this host has no text for a way it lacks."""
        cell = table.cell(way, key, driver)
        if facts is not None:
            text = text_here(table, way, key, facts, answering_gpus(facts))
        else:
            text = cell.published if view is View.PUBLISHED else today_text(cell, driver)
        return ComparedCell(text=text, disputed=cell.contradiction is not None)

    rows = [
        ComparedRow(
            title=row.title,
            cells=tuple(cell_of(way, row.key) for way in chosen),
            decides=row.key not in _BACKGROUND,
        )
        for row in table.rows
    ]
    if facts is None:
        return rows
    available = tuple(ComparedCell(text=availability_text(way, facts, answering_gpus(facts))) for way in chosen)
    return [ComparedRow(title="on this host", cells=available), *rows]


# Rows that are left out where there is no room for a grid.
_BACKGROUND: Final = frozenset({"partition_type", "interop", "telemetry", "target_use"})


def _table_title(view: View, driver: str | None, facts: HostFacts | None) -> str:
    if facts is not None:
        return f"Ways to share a GPU, on {facts.host}, driver {facts.driver or 'unknown'}"
    if view is View.PUBLISHED:
        return "Ways to share a GPU, as published by NVIDIA in 2022"
    return f"Ways to share a GPU, today, {'newest drivers' if driver is None else f'driver {driver}'}"


def _silent_gpu_errors(facts: HostFacts | None) -> tuple[GpushareError, ...]:
    return gpu_errors(Gpu(index=each.index, error=each.error) for each in (() if facts is None else facts.gpus))


def _explain_cell(table: Table, words: tuple[str, str], driver: str | None, gpu: str | None) -> Any:
    """Explain the cell of --why, whose ``words`` name its row and its way; with --driver not for this host."""
    row_word, way_word = words
    row = row_named(table, row_word)
    way = way_of(way_word, COLUMNS)
    driver, facts, why_not_host = _driver_and_facts(None, driver, gpu)
    entries = explanation_lines(table, way, row.key, driver, facts, why_not_host)
    cell = host_cell(table, way, row.key, driver, facts)
    return Result(
        data=CompareAnswer(host=None if facts is None else facts.host, driver=driver, cells=(cell,)),
        tables=(why_table(f"{row.title}, {table.titles[way]}", entries),),
        csv=csv_table([cell]),
        errors=_silent_gpu_errors(facts),
    )
