"""``gpushare diff``: how the host differs from gpushare.yaml; done by `gpushare/hostfile/`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from gpushare.base.errors import ExitCode, GpushareError
from gpushare.base.model import FileWay
from gpushare.base.values import dataclass
from gpushare.cli.options import HOST_FILE_ARGUMENT, HOST_FILE_OPTION, Command, host_file, settings, verb
from gpushare.hostfile.diff import Point, check_fits, diff_points
from gpushare.hostfile.file import Entry
from gpushare.hostfile.live import LiveGpu
from gpushare.hostfile.load import changed_limits, entries_of, load, names_in
from gpushare.hostfile.look import live_gpus
from gpushare.show.result import Result
from gpushare.snapshot import HostState
from gpushare.timeslice.keep import Deviation, Policy, deviations


@verb(Command)
def diff(path: str | None = HOST_FILE_ARGUMENT, file: str | None = HOST_FILE_OPTION) -> Any:
    """Show how each GPU differs from its entry in gpushare.yaml; GPUs without an entry are left out.

    With rules for time-slices (slices:) it also names the processes whose slice is not the one that their rule sets. Exit
    code 0: everything is as in the file; 7: something differs. Changes nothing; only root sees all of it.
    """
    path = host_file(path, file, "diff")
    wanted, _ = load(path)
    state = HostState(settings.connect())
    matched = entries_of(wanted, state.gpus)
    live = live_gpus(state, [gpu for gpu in state.gpus if gpu.index in matched.entries])
    rows = [_gpu_diff(gpu, matched.entries) for gpu in live]
    rows += [GpuDiff(problem=error.message) for error in matched.missing]
    processes = deviations(state.host, Policy(wanted.rules, names_in(wanted))) if wanted.rules else []
    limits = changed_limits(state.host, wanted)
    notes = list(matched.notes)
    gpus_as_requested = all(row.as_requested for row in rows)
    # apply refuses the whole file if one GPU has a problem.
    apply_would_help = all(row.problem is None for row in rows)
    if apply_would_help and (limits or not gpus_as_requested):
        notes.append(f"make it so: gpushare apply -f {shlex.quote(path)}")
    if processes:
        notes.append(f"for the processes: gpushare timeslice keep -f {shlex.quote(path)}")
    lines = [*map(_gpu_text, rows), *map(str, processes), *limits]
    as_requested = gpus_as_requested and not processes and not limits
    return Result(
        data=DiffAnswer(as_requested=as_requested, gpus=tuple(rows), processes=tuple(processes), limits=tuple(limits)),
        text="\n".join(lines) or "nothing differs from the file",
        notes=tuple(notes),
        exit_code=ExitCode.OK if as_requested else ExitCode.NOT_AS_REQUESTED,
    )


@dataclass(frozen=True, kw_only=True)
class GpuDiff:
    """How one GPU differs from its entry in the file."""

    # Null: the file has an entry for a GPU that this host does not have.
    gpu: int | None = None
    uuid: str | None = None
    sharing: FileWay | None = None
    as_requested: bool = False
    # Why it cannot be as requested; null: it can.
    problem: str | None = None
    differences: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DiffAnswer:
    """The answer of `diff`."""

    as_requested: bool
    gpus: tuple[GpuDiff, ...]
    # Processes whose time-slice is not what the rules say.
    processes: tuple[Deviation, ...]
    # Limits of users that would change.
    limits: tuple[str, ...]


def _gpu_diff(live: LiveGpu, entries: Mapping[int, Entry]) -> GpuDiff:
    """Return how a GPU differs from its entry; a GPU that cannot be as its entry says has a problem."""
    entry = entries[live.gpu.index]
    problem = live.gpu.error
    differences: tuple[Point, ...] = ()
    if problem is None:
        try:
            differences = diff_points(live, entry, entries)
            if differences:
                check_fits(live.gpu, entry, () if live.layout is None else live.layout.profiles)
        except GpushareError as error:
            problem = error.message
    return GpuDiff(
        gpu=live.gpu.index,
        uuid=live.gpu.uuid,
        sharing=entry.sharing,
        as_requested=problem is None and not differences,
        problem=problem,
        differences=differences,
    )


def _gpu_text(row: GpuDiff) -> str:
    if row.gpu is None or row.sharing is None:
        return str(row.problem)
    title = f"GPU {row.gpu} ({row.sharing.value})"
    if row.as_requested:
        return f"{title}: as in the file"
    lines = [f"{title}: different"]
    if row.problem:
        lines.append(f"  {row.problem}")
    return "\n".join([*lines, *(f"  {text}" for text in row.differences)])
