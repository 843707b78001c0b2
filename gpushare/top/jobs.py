"""The list of jobs in the cockpit: its columns, and which rows it has after filters, sorting and the tree. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpushare.base.units import GIB, MIB, format_slice, natural_key, ranges
from gpushare.base.values import dataclass
from gpushare.run.listing import ENDED, PAUSED, RUNNING
from gpushare.show.status import age, container_name, holders, way_text
from gpushare.show.text import visible
from gpushare.top.history import exceeds_limit, program_of

if TYPE_CHECKING:
    from gpushare.base.model import ListedJob
    from gpushare.top.frame import Frame, HostUse, Member


class Row(NamedTuple):
    """One line of the list: a job, or a process of it in the tree."""

    job: ListedJob
    use: HostUse | None
    member: Member | None = None
    # The bars before a process in the tree.
    branch: str = ""


# The text of a cell, and the name of its colour.
Cell = tuple[str, str]


class Column(NamedTuple):
    """A column of the list. ``value`` sorts; None comes last."""

    key: str
    title: str
    width: int
    value: Callable[[Row], Any]
    cell: Callable[[Row], Cell]
    right: bool = False
    # Sorted, the largest comes first.
    falls: bool = False


def size_text(size: int | None) -> str:
    """Return a size in at most five cells: ``31.2G``, ``512M``, ``-``."""
    if size is None:
        return "-"
    if size >= 1000 * GIB:
        return f"{size / GIB / 1024:.1f}T"
    if size >= 100 * GIB:
        return f"{size / GIB:.0f}G"
    return f"{size / GIB:.1f}G" if size >= GIB else f"{size // MIB}M"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


_STATE_COLOURS: Final = {RUNNING: "text", PAUSED: "warn", "lost": "bad", ENDED: "dim", "-": "dim"}


def _state_cell(job: ListedJob) -> Cell:
    """Return the cell of a job's state: what is wrong with it comes first."""
    if job.line is not None:
        return f"waits #{job.line.place}", "warn"
    if job.state == ENDED:
        return f"ended {'-' if job.exit_code is None else job.exit_code}", "bad" if job.exit_code else "dim"
    if exceeds_limit(job):
        return "too large", "bad"
    return job.state, _STATE_COLOURS.get(job.state, "warn")


_ROLE_CELLS: Final = {"production": ("prod", "good"), "opportunistic": ("opport", "text"), "plain": ("plain", "dim")}


def _command_cell(row: Row) -> Cell:
    """Return what runs, or what a job waits for."""
    job = row.job
    if row.member is not None:
        return visible(row.member.name or "-"), "dim"
    if job.line is not None:
        return waiting_reason(job), "dim"
    return visible(job.command or "-"), "dim"


def waiting_reason(job: ListedJob) -> str:
    """Return what a job waits for, and behind whom."""
    line = job.line
    if line is None:
        return ""
    want = "a device of its own" if line.memory_bytes is None else size_text(line.memory_bytes)
    devices = f" on {line.count} GPUs" if line.count > 1 else ""
    parts = [f"for {want}{devices}"]
    if line.stopped:
        parts.append("its gpushare is stopped: skipped")
    if line.behind:
        parts.append(f"behind {', '.join(line.behind[:3])}")
    holding = holders(line)
    if holding:
        parts.append(f"held by {', '.join(holding[:3])}")
    return "; ".join(parts)


def _name_cell(row: Row) -> Cell:
    """Return the name of a job, or its program in another colour; of a process its program, in the tree."""
    if row.member is not None:
        return row.branch + visible(row.member.name or "-"), "dim"
    return visible(program_of(row.job)), "text" if row.job.name is not None else "dim"


def _job_column(
    key: str,
    title: str,
    width: int,
    get: Callable[[ListedJob], Any],
    show: Callable[[Any], str] = visible,
    colour: str = "text",
    *,
    cell: Callable[[ListedJob], Cell] | None = None,
    **more: bool,
) -> Column:
    """Return a column about jobs; processes in the tree have nothing there.

    ``get`` returns the value of a job. It is shown by ``show`` in ``colour``, as a dash if it is None, or by ``cell``.
    """

    def value_of(row: Row) -> Any:
        return None if row.member is not None else get(row.job)

    def cell_of(row: Row) -> Cell:
        if row.member is not None:
            return "", "dim"
        if cell is not None:
            return cell(row.job)
        value = get(row.job)
        return ("-", "dim") if value is None else (show(value), colour)

    return Column(key, title, width, value_of, cell_of, **more)


def _memory_cell(job: ListedJob) -> Cell:
    """Return the memory of a job; in brackets what is out of the GPU."""
    if job.swapped_bytes and not job.memory_used_bytes:
        return f"({size_text(job.swapped_bytes)})", "warn"
    return size_text(job.memory_used_bytes), "bad" if exceeds_limit(job) else "text"


def _short_way(job: ListedJob) -> str | None:
    """Return the way of a job in few cells: of MIG the name of its instance or the profile; the dialog of the job has all."""
    if job.way is None or not job.way.startswith("mig"):
        return way_text(job.way)
    profile = job.mig_profile or "MIG"
    if job.way.endswith("mps"):
        # The memory of the profile would not fit: 3g+MPS.
        return f"{job.mig_name or profile.rsplit('.', 1)[0]}+MPS"
    return job.mig_name or profile


def _cpu_cell(row: Row) -> Cell:
    percent = None if row.use is None else row.use.cpu_percent
    return _number_text(percent), "text" if percent else "dim"


COLUMNS: Final = (
    Column("job", "JOB", 14, lambda row: None if row.member is not None else program_of(row.job), _name_cell),
    Column("pid", "PID", 7, lambda row: row.job.pid if row.member is None else row.member.pid, lambda row: (str(row.member.pid if row.member else row.job.pid or "-"), "dim"), right=True),
    _job_column("state", "STATE", 9, lambda job: _state_cell(job)[0], cell=_state_cell),
    _job_column("user", "USER", 7, lambda job: job.user),
    _job_column("role", "ROLE", 6, lambda job: job.role, cell=lambda job: _ROLE_CELLS.get(job.role or "", ("-", "dim"))),
    _job_column("gpu", "GPU", 3, lambda job: job.gpu_indexes or None, ranges, right=True),
    _job_column("sm", "SM%", 4, lambda job: job.sm_percent, cell=lambda job: (_number_text(job.sm_percent), "util" if job.sm_percent else "dim"), right=True, falls=True),
    _job_column("memory", "MEM", 6, lambda job: job.memory_used_bytes, cell=_memory_cell, right=True, falls=True),
    _job_column("limit", "LIMIT", 5, lambda job: job.whole_limit_bytes, size_text, "dim", right=True, falls=True),
    _job_column("way", "WAY", 10, _short_way),
    Column("cpu", "CPU%", 5, lambda row: row.use and row.use.cpu_percent, _cpu_cell, right=True, falls=True),
    _job_column("age", "AGE", 4, lambda job: job.since_seconds, age, "dim", right=True, falls=True),
    Column("ram", "RAM", 5, lambda row: row.use and row.use.memory_bytes, lambda row: (size_text(None if row.use is None else row.use.memory_bytes), "text"), right=True, falls=True),
    _job_column("threads", "THR%", 4, lambda job: job.threads_percent, lambda value: f"{value:g}", right=True, falls=True),
    _job_column("slice", "SLICE", 7, lambda job: job.slice_us, format_slice, right=True, falls=True),
    _job_column("container", "CONTAINER", 12, lambda job: job.container, lambda name: visible(container_name(name)), "dim"),
    Column("command", "COMMAND", 20, lambda row: _command_cell(row)[0], _command_cell),
)  # fmt: skip


@dataclass
class View:
    """What the user has chosen to see."""

    sort: str = "memory"
    reverse: bool = False
    text: str = ""
    user: str | None = None
    gpu: int | None = None
    ended: bool = False
    tree: bool = False

    @property
    def filters(self) -> str:
        """Return the filters in words; empty: there are none."""
        filters = []
        if self.text:
            filters.append(f"/{self.text}")
        if self.user:
            filters.append(f"user {self.user}")
        if self.gpu is not None:
            filters.append(f"GPU {self.gpu}")
        return "  ".join(filters)


def rows_of(frame: Frame, view: View) -> list[Row]:
    """Return the rows of the list: jobs sorted, those that wait below them in the order of the line, then those that ended."""
    rows = [
        Row(job, None if job.pid is None else frame.uses.get(job.pid)) for job in frame.jobs if _is_shown(job, view)
    ]
    present = [row for row in rows if row.job.line is None and row.job.state != ENDED]
    waiting = [row for row in rows if row.job.line is not None]
    lines = [*sorted_rows(present, view), *waiting, *(row for row in rows if row.job.state == ENDED)]
    if not view.tree:
        return lines
    return [line for row in lines for line in (row, *_member_rows(row, frame))]


def _is_shown(job: ListedJob, view: View) -> bool:
    """Return whether the filters of a view let a job through."""
    if job.state == ENDED and not view.ended:
        return False
    if view.user is not None and job.user != view.user:
        return False
    if view.gpu is not None and view.gpu not in job.gpu_indexes:
        return False
    words = " ".join(filter(None, [job.name, job.user, job.role, job.command, job.container, job.state, str(job.pid)]))
    return view.text.lower() in words.lower()


def sorted_rows(rows: Sequence[Row], view: View) -> list[Row]:
    """Return rows by the chosen column; unknown values are last either way, and equal ones stay by GPU and PID."""
    column = next(column for column in COLUMNS if column.key == view.sort)
    by_place = sorted(rows, key=lambda row: (row.job.gpu_indexes, row.job.pid or 0))
    valued = [row for row in by_place if column.value(row) is not None]
    unknown = [row for row in by_place if column.value(row) is None]

    def key(row: Row) -> Any:
        value = column.value(row)
        return natural_key(value) if isinstance(value, str) else value

    largest_first = column.falls != view.reverse
    return [*sorted(valued, key=key, reverse=largest_first), *unknown]


def _member_rows(row: Row, frame: Frame) -> list[Row]:
    """Return the rows of a job's processes, each with the branches of the tree before it."""
    members = frame.trees.get(row.job.pid or 0, ())
    lines = []
    for number, member in enumerate(members):
        # The depth of the next process that is not below this one; the same depth: its parent has another child.
        next_depth = next((later.depth for later in members[number + 1 :] if later.depth <= member.depth), 0)
        branch = "  " * (member.depth - 1) + ("├ " if next_depth == member.depth else "└ ")
        lines.append(Row(row.job, member.use, member, branch))
    return lines


# Shown only if a job has a value there.
_OPTIONAL: Final = frozenset({"role", "limit", "threads", "slice", "container"})
_LEAST_COMMAND: Final = 10


def visible_columns(width: int, first: int, rows: Sequence[Row]) -> list[tuple[Column, int]]:
    """Return the columns that fit into ``width`` cells, with their widths: the names of jobs, then those from ``first`` on.

    What is left widens the names, and the command if it is there.
    """
    candidates = [
        column
        for column in COLUMNS[max(1, first) :]
        if column.key not in _OPTIONAL or any(column.value(row) is not None for row in rows)
    ]
    chosen = [(COLUMNS[0], COLUMNS[0].width)]
    room = width - COLUMNS[0].width
    for column in candidates:
        least = _LEAST_COMMAND if column.key == "command" else column.width
        if room < least + 1:
            break
        chosen.append((column, least))
        room -= least + 1
    last, last_width = chosen[-1]
    has_command = last.key == "command"
    longest_name = max((len(program_of(row.job)) for row in rows), default=0)
    # The command has the most use for the rest; without it, long gaps after names would be hard to read across.
    most_wider = room // 3 if has_command else min(room, 12)
    wider_name = min(max(0, longest_name - COLUMNS[0].width), most_wider)
    chosen[0] = (COLUMNS[0], COLUMNS[0].width + wider_name)
    if has_command:
        chosen[-1] = (last, last_width + room - wider_name)
    return chosen
