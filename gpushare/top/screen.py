"""The screen of the cockpit: GPUs above, jobs below, a line of events, and the keys."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gpushare.base.units import counted, format_bytes, format_duration
from gpushare.show.status import way_text
from gpushare.show.text import one_line, visible
from gpushare.top import gpus, jobs
from gpushare.top.dialogs import Choice, Dialog, Line, Prompt, Question
from gpushare.top.draw import THEMES, Piece, Theme, fit, segments
from gpushare.top.frame import Reader
from gpushare.top.history import Event, Events, History, job_title
from gpushare.top.verbs import ACTIONS, Action, Answering, command_of, error_lines, failed, needs_consent, plan_lines

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult
    from textual.worker import Worker

    from gpushare.base.model import Gpu, ListedJob
    from gpushare.top.frame import Frame
    from gpushare.top.watch import Watch


class Key(NamedTuple):
    """What keys do: their names in Textual, the action; as the help shows them, with a text. A key alone is a heading."""

    names: str
    action: str = ""
    shown: str = ""
    text: str = ""


LOGS: Final = Key("L", "logs", "L", "its output, which follows")
KEYS: Final = (
    Key("Move"),
    Key("down,j", "move(1)", "↑ ↓ j k", "line up, down; PgUp PgDn Home End too"),
    Key("up,k", "move(-1)"),
    Key("pagedown,ctrl+f", "page(1)"),
    Key("pageup,ctrl+b", "page(-1)"),
    Key("home", "move(-99999)"),
    Key("end,G", "move(99999)"),
    Key("left,h", "columns(-1)", "← → h l", "columns of the list of jobs"),
    Key("right,l", "columns(1)"),
    Key("", "", "Tab", "from the GPUs to the jobs and back"),
    Key("enter", "open", "Enter", "open the GPU, or what can be done with the job"),
    Key("escape", "back", "Esc", "back: closes the GPU, then removes filters"),
    Key("Choose"),
    Key("slash,f4,f3", "filter", "/ F4", "filter: part of a name, user, command, state or PID"),
    Key("u", "only_user", "u g", "only jobs of a user; only jobs on a GPU"),
    Key("g", "only_gpu"),
    Key("o,f6", "sort", "o F6 < >", "sort by a column; by the one left or right of it"),
    Key("less_than_sign,comma", "sort_next(-1)"),
    Key("greater_than_sign,full_stop", "sort_next(1)"),
    Key("I", "reverse", "I", "the other way round"),
    Key("t,f5", "tree", "t F5", "tree: each job with its processes"),
    Key("z", "ended", "z", "show jobs that have ended, too"),
    Key("Act on the job", text="each shows its plan and asks"),
    *(Key(action.key, f"act({action.key!r})", action.key, action.title) for action in ACTIONS),
    Key("f9,delete", "act('s')", "F9", "the same as s"),
    LOGS,
    Key("e", "explain", "e", "explain: an error code, a log line, a word"),
    Key("Look"),
    Key("E", "events", "E", "what has happened"),
    Key("D", "findings", "D", "findings of gpushare doctor, with remedies"),
    Key("T", "theme", "T", "dark or light"),
    Key("plus,equals_sign", "interval(0.5)", "+ -", "refresh more often, or less; a replay: faster, slower"),
    Key("minus", "interval(2.0)"),
    Key("space", "hold", "Space", "hold the screen, or in a replay its time"),
    Key("left_square_bracket", "seek(-10)", "[ ] { }", "in a replay: 10 s, or 5 min, back or on"),
    Key("right_square_bracket", "seek(10)"),
    Key("left_curly_bracket", "seek(-300)"),
    Key("right_curly_bracket", "seek(300)"),
    Key("question_mark,f1", "help", "? F1", "this help"),
    Key("q,f10,ctrl+c,ctrl+q", "quit", "q F10", "quit"),
)
# Titles in the footer by action, the most wanted ones first; what does not fit is in the help.
FOOTER: Final = {
    "help": "help", "quit": "quit", "filter": "filter", "sort": "sort", "tree": "tree", "act('s')": "stop",
    "act('p')": "pause", "act('r')": "resume", "act('w')": "swap out", "act('b')": "back in", "logs": "logs",
    "open": "open", "explain": "explain", "events": "events", "findings": "findings", "only_user": "user",
    "only_gpu": "GPU", "act('n')": "slice", "act('v')": "move", "act('m')": "limits",
}  # fmt: skip
# Of a replay, where nothing can be acted on.
REPLAY_FOOTER: Final = {
    "help": "help", "quit": "quit", "hold": "hold", "seek(-10)": "10 s, 5 min", "interval(0.5)": "faster",
    "filter": "filter", "sort": "sort", "open": "open", "explain": "explain", "events": "events", "only_user": "user",
    "only_gpu": "GPU",
}  # fmt: skip
FOOTER_KEYS: Final = {
    key.action: key.shown.split(" ")[0] or key.names
    for key in reversed(KEYS)
    if key.action in {**FOOTER, **REPLAY_FOOTER}
}


# Where the head shows how many rows are out of view: after the title of the first column, which is wider than its title.
_MARKS_AT: Final = 5


class Panel(Widget, can_focus=True):
    """Lines that are drawn whole, with a head, a cursor and a view that follows it."""

    def __init__(self, cockpit: Cockpit) -> None:
        super().__init__()
        self._cockpit = cockpit
        # The row under the cursor, and the first one in view.
        self.cursor = 0
        self.top = 0
        self._head: list[Piece] = []
        self._rows: list[list[Piece]] = []

    @property
    def room(self) -> int:
        """Return how many rows fit below the head."""
        return max(0, self.size.height - 1)

    def show_rows(self, head: list[Piece], rows: list[list[Piece]], cursor: int) -> None:
        """Show these rows from now on, with the cursor in view; only lines that have changed are drawn."""
        old_lines = [self._head, *self._rows]
        old_view = (self.top, self.cursor)
        self._head, self._rows = head, rows
        self.cursor = min(max(0, cursor), max(0, len(rows) - 1))
        self.top = min(self.top, max(0, len(rows) - self.room), self.cursor)
        if self.room:
            self.top = max(self.top, self.cursor - self.room + 1)
        if old_view != (self.top, self.cursor) or len(rows) != len(old_lines) - 1:
            self.refresh()
            return
        changed = []
        for number, (old, new) in enumerate(zip(old_lines, [head, *rows], strict=True)):
            # The head does not move with the view.
            y = number - self.top if number else 0
            if old != new and 0 <= y < self.size.height:
                changed.append(Region(0, y, self.size.width, 1))
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Return line y of the panel, for Textual: the head, a row, or a blank line below the last row."""
        if y == 0:
            return self._head_line()
        theme, width = self._cockpit.colours, self.size.width
        row = self.top + y - 1
        if row >= len(self._rows):
            return Strip(segments([], width, theme))
        chosen = row == self.cursor and self.has_focus
        return Strip(segments(self._rows[row], width, theme, "row" if chosen else "back"))

    def _head_line(self) -> Strip:
        """Return the head, with the numbers of rows above and below the view on it: `` ↑3 ↓12``."""
        theme, width = self._cockpit.colours, self.size.width
        head = Strip(segments(self._head, width, theme, "head"))
        above, below = self.top, len(self._rows) - self.top - self.room
        marks = f"{f' ↑{above}' if above else ''}{f' ↓{below}' if below > 0 else ''}"
        if not marks:
            return head
        arrows = Strip(segments([(marks, "warn")], len(marks), theme, "head"))
        return Strip.join([head.crop(0, _MARKS_AT), arrows, head.crop(_MARKS_AT + len(marks))])

    def on_resize(self) -> None:
        self.show_rows(self._head, self._rows, self.cursor)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            self._cockpit.sort_by_title(self, event.x)
        elif self.top + event.y - 1 < len(self._rows):
            self._cockpit.move_cursor(self, self.top + event.y - 1)
            if event.chain == 2:
                self._cockpit.action_open()

    def on_mouse_scroll_down(self, _event: events.MouseScrollDown) -> None:
        self._cockpit.move_cursor(self, self.cursor + 3)

    def on_mouse_scroll_up(self, _event: events.MouseScrollUp) -> None:
        self._cockpit.move_cursor(self, self.cursor - 3)


class Bar(Widget):
    """One line of the screen."""

    def __init__(self, draw: Callable[[int], list[Segment]]) -> None:
        super().__init__()
        self._draw = draw
        self.styles.height = 1

    def render_line(self, y: int) -> Strip:  # noqa: ARG002 - it has one
        return Strip(self._draw(self.size.width))


class _Note(NamedTuple):
    """A message in the line of events, until a time of `time.monotonic`."""

    until: float
    text: str
    colour: str


class Cockpit(App[None]):
    """`gpushare top`."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding(key.names, key.action, show=False) for key in KEYS if key.action]

    def __init__(
        self,
        watch: Watch,
        answer: Answering,
        *,
        theme: str = "dark",
        examine: bool = True,
        follow: Callable[[str, Callable[[Sequence[str]], None]], Awaitable[None]] | None = None,
    ) -> None:
        """Show what ``watch`` reads; ``answer`` runs the verbs.

        ``examine``: ask the doctor soon, and every five minutes. ``follow`` hands the output of a job, by its name or PID,
        to a function; None: there is no output to show.
        """
        super().__init__(ansi_color=theme == "plain")
        self.watch_host = watch
        self._answer = answer
        self._follow = follow
        self.colours: Theme = THEMES[theme]
        self._examines = examine
        self.view = jobs.View()
        # The index of the GPU that alone is shown.
        self.opened: int | None = None
        self.frame: Frame | None = None
        self.past = History()
        self.happened = Events()
        # Of the doctor, None until it has answered; and their dialog, which may be closed.
        self._findings: list[dict[str, object]] | None = None
        self._finding_pages: Dialog | None = None
        # What is in each row of the two lists.
        self._rows: list[jobs.Row] = []
        self._gpu_of_row: list[int] = []
        # The first column of the list of jobs after their names.
        self._first_column = 1
        self._note: _Note | None = None
        # The command that is being carried out.
        self._doing: str | None = None
        self._title = Bar(self._title_line)
        self._gpus = Panel(self)
        self._jobs = Panel(self)
        self._charts = Panel(self)
        self._charts.can_focus = False
        self._last = Bar(self._event_line)
        self._keys = Bar(self._key_line)

    # -- the screen --------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._gpus
        yield self._charts
        yield self._jobs
        yield self._last
        yield self._keys

    def on_mount(self) -> None:
        self._recolour()
        self._jobs.styles.height = "1fr"
        self._jobs.focus()
        # From the thread that reads: it posts a message.
        self.watch_host.deliver = partial(self.call_later, self._take_unless_held)
        if self.watch_host.latest is not None:
            self.take(self.watch_host.latest)
        # So that a look that hangs is seen.
        self.set_interval(1.0, self._tick)
        if self._examines and not self.watch_host.reader.recorded:
            self.set_timer(2.0, self._examine)
            self.set_interval(300.0, self._examine)

    def on_unmount(self) -> None:
        self.watch_host.end()

    def _take_unless_held(self, frame: Frame) -> None:
        if not self.watch_host.held:
            self.take(frame)

    def on_resize(self) -> None:
        """Draw in the new size, which Textual notes only after this: a held screen has no next frame that would."""
        self.call_later(self.redraw)

    def _tick(self) -> None:
        """Draw the clock again, and remove a message whose time is over."""
        self._title.refresh()
        if self._note is not None and time.monotonic() > self._note.until:
            self._clear_note()

    def _recolour(self) -> None:
        """Draw everything in the colours of the theme."""
        self.theme = "textual-light" if self.colours.name == "light" else "textual-dark"
        back = self.colours.colours.get("back")
        if back is not None:
            self.screen.styles.background = back
        self.redraw()
        self.screen.query("*").refresh()

    def take(self, frame: Frame) -> None:
        """Show a frame that was read, and add it to the charts of the past and the events."""
        if frame.error is None:
            self.past.add(frame)
        self.happened.add(frame)
        # While nothing can be read, the last values stay on the screen.
        if frame.error is None or self.frame is None or self.frame.error is not None:
            self.frame = frame
        else:
            self.say(frame.error.splitlines()[0], "bad")
        self.redraw()

    def say(self, text: str, colour: str = "text", seconds: float = 10.0) -> None:
        """Show a message in the line of events for a while."""
        self._note = _Note(time.monotonic() + seconds, text, colour)
        self._last.refresh()

    def _clear_note(self) -> None:
        self._note = None
        self._last.refresh()

    def redraw(self) -> None:
        """Lay out and draw everything from the last frame."""
        if self.frame is not None and self.size.width:
            self._draw_gpus(self.frame)
            self._draw_jobs(self.frame)
        self._title.refresh()
        self._last.refresh()

    def _draw_gpus(self, frame: Frame) -> None:
        """Draw the GPUs and the charts, as much of them as the list of jobs leaves room for."""
        all_gpus = frame.snapshot.gpus
        shown = [gpu for gpu in all_gpus if self.opened in {None, gpu.index}]
        layout = gpus.layout_of(self.size.width, max((len(gpus.short_name(gpu)) for gpu in all_gpus), default=0))
        # All but the title, the heads of both lists, events and keys.
        height_of_lists = self.size.height - 5
        # The GPUs may have a half of it, an open one more.
        room_for_gpus = max(1, height_of_lists * (2 if self.opened is None else 3) // 4)
        rows, owners = self._gpu_rows(frame, shown, layout, room_for_gpus)
        # By the rows that are on the screen now.
        chosen = self.chosen_gpu
        self._gpu_of_row = owners
        if chosen not in owners:
            chosen = owners[0] if owners else None
        job_count = len(jobs.rows_of(frame, self.view))
        gpu_lines = min(len(rows), max(room_for_gpus, height_of_lists - max(3, job_count)))
        # The jobs have a few lines, and at most two thirds of what is left. Charts, with a head, take the rest.
        least_jobs = 6 if self.opened is None else 3
        room_for_jobs = max(least_jobs, min(job_count + 1, (height_of_lists - gpu_lines) * 2 // 3))
        charted = next((gpu for gpu in shown if self.opened is not None or gpu.index == chosen), None)
        self._draw_charts(frame, charted, height_of_lists - 1 - gpu_lines - room_for_jobs)
        self._gpus.styles.height = gpu_lines + 1
        # The cursor stays on its line of the chosen GPU, else goes to the first one.
        cursor = self._gpus.cursor
        if cursor >= len(owners) or owners[cursor] != chosen:
            cursor = 0 if chosen is None else owners.index(chosen)
        self._gpus.show_rows(gpus.head_line(layout), rows, cursor)

    def _gpu_rows(
        self, frame: Frame, shown: Sequence[Gpu], layout: gpus.Layout, room: int
    ) -> tuple[list[list[Piece]], list[int]]:
        """Return the lines of the GPUs, and the index of the GPU of each line; no indexes where no GPU can be shown."""
        if frame.error is not None:
            first, *others = frame.error.split("\n")
            error_rows: list[list[Piece]] = [[(f" {first}", "bad")]]
            return error_rows + [[(f" {line}", "text")] for line in others], []
        if not frame.snapshot.gpus:
            return [[(" no GPU is visible; find the cause: gpushare doctor", "bad")]], []
        rows: list[list[Piece]] = []
        owners: list[int] = []
        below = {gpu.index: gpus.lines_below(frame, gpu, layout) for gpu in shown}
        # By the size of the screen alone: lines that come and go with the jobs would make it jump. At least 3 are for jobs.
        all_fit = len(shown) + sum(map(len, below.values())) <= max(room - 3, self.size.height // 3)
        for gpu in shown:
            rows.append(gpus.gpu_line(frame, gpu, self.past, layout))
            if self.opened is not None and gpu.error is None:
                rows += gpus.fact_lines(frame, gpu, self.size.width)
            if all_fit or self.opened is not None:
                rows += below[gpu.index]
            if self.opened is not None:
                rows += gpus.client_lines(frame, gpu)
            owners += [gpu.index] * (len(rows) - len(owners))
        return rows, owners

    def _draw_charts(self, frame: Frame, gpu: Gpu | None, room: int) -> None:
        """Draw the charts of a GPU in at most ``room`` lines; none if there is no GPU that answers, or no room for 4 lines."""
        heads: list[Piece] = []
        areas: list[list[Piece]] = []
        if gpu is not None and room >= 4 and not gpu.error:
            most = 16 if self.opened is not None else max(7, self.size.height // 4)
            heads, *areas = gpus.chart_lines(frame, gpu, self.past, self.size.width, min(room, most))
        self._charts.styles.height = len(areas) + 1 if areas else 0
        self._charts.show_rows(heads, areas, 0)

    def _draw_jobs(self, frame: Frame) -> None:
        """Draw the list of jobs, with the cursor on the job on which it was."""
        chosen = self.chosen
        self._rows = jobs.rows_of(frame, self.view)
        columns = jobs.visible_columns(self.size.width - 2, self._first_column, self._rows)
        head: list[Piece] = [(" ", "dim")]
        for column, width in columns:
            mark = ""
            if column.key == self.view.sort:
                mark = "▼" if column.falls != self.view.reverse else "▲"
            title = column.title + mark
            if len(title) > width:
                title = column.title[: width - 1] + mark
            head += [(fit(title, width, right=column.right), "text" if mark else "dim"), (" ", "dim")]
        rows = []
        for row in self._rows:
            line: list[Piece] = [(" ", "text")]
            for column, width in columns:
                text, colour = column.cell(row)
                line += [(fit(text, width, right=column.right), colour), (" ", "text")]
            rows.append(line)
        if not rows:
            rows = [[(f" {self._empty_text(frame)}", "dim")]]
        self._jobs.show_rows(head, rows, self._row_of(chosen))

    def _empty_text(self, frame: Frame) -> str:
        """Return why the list of jobs is empty."""
        if frame.error is not None:
            return ""
        if self.view.text or self.view.user is not None:
            return "nothing is shown by this filter; Esc removes it"
        chosen = [gpu for gpu in frame.snapshot.gpus if self.view.gpu in {None, gpu.index}]
        where = "the GPUs" if self.view.gpu is None else f"GPU {self.view.gpu}"
        if any(gpu.processes is None for gpu in chosen):
            return f"the processes on {where} are unknown; see: gpushare doctor"
        return f"no processes on {where}{'' if self.view.gpu is None else '; Esc shows all GPUs'}"

    def _row_of(self, row: jobs.Row | None) -> int:
        """Return the number of the row that shows the same job or process now; if none does, that under the cursor."""

        def identity(row: jobs.Row) -> tuple[object, ...]:
            # Several jobs of one name may have ended, each after another time.
            return (row.job.name, row.job.pid, row.job.ran_seconds, row.member and row.member.pid)

        if row is None:
            return self._jobs.cursor
        same = (number for number, other in enumerate(self._rows) if identity(other) == identity(row))
        return next(same, self._jobs.cursor)

    # -- the lines -----------------------------------------------------------------------------------------------------------

    def _title_line(self, width: int) -> list[Segment]:
        """Return the first line: the host at the left as far as it fits, and its state at the right."""
        title: Piece = (" gpushare top", "text")
        if self.frame is None:
            return segments([title, ("   reading the host ...", "dim")], width, self.colours, "head")
        right = self._status_pieces(self.frame)
        right_cells = sum(len(piece[0]) for piece in right)
        snapshot = self.frame.snapshot
        hosts = (f"  {snapshot.host}  driver {snapshot.driver_version or '-'} ", f"  {snapshot.host} ", " ")
        host = next((text for text in hosts if len(title[0]) + len(text) <= width - right_cells), "")
        left = segments([title, (host, "dim")], max(0, width - right_cells), self.colours, "head")
        return [*left, *segments(right, min(width, right_cells), self.colours, "head")]

    def _status_pieces(self, frame: Frame) -> list[Piece]:
        """Return the right half of the title: what the screen shows, the CPU and memory of the host, findings, and the time."""
        hangs = self.watch_host.hangs_for()
        right: list[Piece] = []
        if hangs is not None:
            right.append((f"no answer for {hangs:.0f} s: old values  ", "bad"))
        elif self.watch_host.held:
            right.append(("held: Space goes on  ", "warn"))
        if self.view.filters or self.opened is not None:
            right.append((f"{self.view.filters or f'GPU {self.opened}'}: Esc  ", "warn"))
        if frame.cpu_percent is not None:
            right.append((f"CPU {frame.cpu_percent:.0f}%  ", "dim"))
        if frame.memory_total:
            right.append((f"RAM {jobs.size_text(frame.memory_used)}/{jobs.size_text(frame.memory_total)}  ", "dim"))
        if self._findings:
            right.append((f"{counted(len(self._findings), 'finding')}: D  ", "warn"))
        reader = self.watch_host.reader
        if isinstance(reader, Reader):
            return [*right, (time.strftime("%H:%M:%S ", time.localtime(frame.at)), "text")]
        clock = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(frame.at))
        return [*right, (f"recorded, {reader.progress_text}  ", "warn"), (clock, "text")]

    def _event_line(self, width: int) -> list[Segment]:
        """Return the line of events: a message while there is one, else what happened last."""
        if self._note is not None:
            return segments([(" ", "text"), (one_line(self._note.text), self._note.colour)], width, self.colours)
        pieces: list[Piece] = [(" ", "text")]
        for event in reversed(self.happened.all):
            pieces += [(f"{event.clock} ", "dim"), (f"{visible(event.text)}   ", event.colour)]
            if sum(len(piece[0]) for piece in pieces) > width:
                break
        return segments(pieces, width, self.colours)

    def _key_line(self, width: int) -> list[Segment]:
        """Return the footer: keys with titles, as many as fit; each can be clicked."""
        line: list[Segment] = []
        room = width
        for action, title in (REPLAY_FOOTER if self.watch_host.reader.recorded else FOOTER).items():
            key = FOOTER_KEYS[action]
            cells = len(key) + len(title) + 3
            if cells > room:
                break
            click = Style.from_meta({"@click": f"app.{action}"})
            line.append(Segment(f" {key}", self.colours.style("text", "head", bold=True) + click))
            line.append(Segment(f" {title} ", self.colours.style("dim", "head") + click))
            room -= cells
        return [*line, Segment(" " * room, self.colours.style("dim", "head"))]

    # -- what is chosen ------------------------------------------------------------------------------------------------------

    @property
    def chosen(self) -> jobs.Row | None:
        """Return the row under the cursor in the list of jobs."""
        at = self._jobs.cursor
        return self._rows[at] if at < len(self._rows) else None

    @property
    def chosen_gpu(self) -> int | None:
        """Return the GPU under the cursor."""
        at = self._gpus.cursor
        return self._gpu_of_row[at] if at < len(self._gpu_of_row) else None

    def move_cursor(self, panel: Panel, row: int) -> None:
        """Put the cursor and the focus on a row of a panel; for another GPU, draw its charts."""
        panel.focus()
        panel.show_rows(panel._head, panel._rows, row)
        if panel is self._gpus and self.frame is not None:
            self._draw_gpus(self.frame)

    def sort_by_title(self, panel: Panel, x: int) -> None:
        """Sort by the column of the list of jobs whose title was clicked; again: the other way round."""
        if panel is not self._jobs:
            return
        # A blank is before the first column, and after each.
        column_x = 1
        for column, width in jobs.visible_columns(self.size.width - 2, self._first_column, self._rows):
            if column_x <= x < column_x + width:
                self._sort_by(column.key)
            column_x += width + 1

    # -- keys ----------------------------------------------------------------------------------------------------------------

    def _focused(self) -> Panel:
        return self._gpus if self._gpus.has_focus else self._jobs

    def action_move(self, by: int) -> None:
        panel = self._focused()
        self.move_cursor(panel, panel.cursor + by)

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self._focused().room - 1))

    def action_columns(self, by: int) -> None:
        """Scroll the columns of the list of jobs; the names stay."""
        self._first_column = min(max(1, self._first_column + by), len(jobs.COLUMNS) - 1)
        self.redraw()

    async def action_back(self) -> None:
        """Show all GPUs again; if none is open, remove the filters."""
        if self.opened is not None:
            self._open_gpu(None)
        else:
            self._filter_by(text="", user=None, gpu=None)

    def _filter_by(self, **filters: Any) -> None:
        """Show the jobs that these filters of the `jobs.View` let through, with those that are there already."""
        self.view = replace(self.view, **filters)
        self.redraw()

    def action_reverse(self) -> None:
        self._sort_by(self.view.sort)

    def _sort_by(self, key: str) -> None:
        """Sort the jobs by a column; by the same one again: the other way round."""
        self.view.reverse = key == self.view.sort and not self.view.reverse
        self.view.sort = key
        self.redraw()

    def action_sort_next(self, by: int) -> None:
        keys = [column.key for column in jobs.COLUMNS]
        self._sort_by(keys[(keys.index(self.view.sort) + by) % len(keys)])

    def _refuse_in_replay(self, thing: str) -> bool:
        """Say that a recording does not have some thing, and return True, if one is shown; else return False."""
        if self.watch_host.reader.recorded:
            self.say(f"a recording has no {thing}", "warn")
        return self.watch_host.reader.recorded

    def action_tree(self) -> None:
        if self._refuse_in_replay("trees of processes"):
            return
        self.view.tree = not self.view.tree
        self.watch_host.reader.trees = self.view.tree
        self.watch_host.look_now()
        self.redraw()

    def action_ended(self) -> None:
        """Show the jobs that have ended, too, or hide them again."""
        if self._refuse_in_replay("jobs that have ended"):
            return
        self.view.ended = not self.view.ended
        self.redraw()

    def action_theme(self) -> None:
        if not self.colours.plain:
            self.colours = THEMES["light" if self.colours.name == "dark" else "dark"]
            self._recolour()

    def action_interval(self, factor: float) -> None:
        self.watch_host.seconds = seconds = min(60.0, max(0.25, self.watch_host.seconds * factor))
        self.watch_host.look_now()
        reader = self.watch_host.reader
        if isinstance(reader, Reader):
            self.say(f"refreshes every {seconds:g} s")
        else:
            self.say(f"plays {reader.seconds_per_sample / seconds:.3g} times as fast as it was recorded")

    def action_hold(self) -> None:
        """Stop reading, so that the screen stands still, or go on."""
        self.watch_host.held = not self.watch_host.held
        self.watch_host.look_now()
        self._title.refresh()

    def action_seek(self, seconds: float) -> None:
        """Move the time of a replay by seconds, with the past of the five minutes up to it."""
        reader = self.watch_host.reader
        if isinstance(reader, Reader):
            self.say("only a recording has another time: gpushare top --replay FILE", "warn")
            return
        frames = reader.seek(seconds)
        if frames:
            self.happened.restart(frames[0].at)
            for frame in frames[:-1]:
                self.past.add(frame)
                self.happened.add(frame)
            self.take(frames[-1])

    def _open_gpu(self, index: int | None) -> None:
        """Show one GPU and only its jobs; None: all again, with the cursor still on that GPU (`_draw_gpus`)."""
        self.opened = self.view.gpu = index
        if index is not None:
            self._gpus.cursor = 0
        self.watch_host.reader.watched = index
        self.watch_host.look_now()
        self.redraw()

    # -- dialogs -------------------------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        lines: list[Line] = []
        for key in KEYS:
            if key.shown:
                lines.append((f"  {key.shown:<10} {key.text}", "text"))
            elif not key.action:
                lines.append((f"{key.names}{key.text and f': {key.text}'}", "util"))
        self.push_screen(Dialog("gpushare top", lines, self.colours))

    def action_events(self) -> None:
        lines = [(f"{event.clock}  {event.text}", event.colour) for event in reversed(self.happened.all)]
        self.push_screen(Dialog("What has happened", lines or [("nothing since the start", "dim")], self.colours))

    def action_findings(self) -> None:
        """Ask the doctor afresh; the dialog shows the old findings until it has answered."""
        if self._refuse_in_replay("findings"):
            return
        old_findings = [("before:", "dim"), *self._finding_lines()] if self._findings else []
        self._finding_pages = Dialog(
            "Findings of gpushare doctor", [("gpushare doctor is at work ...", "dim"), *old_findings], self.colours
        )
        self.push_screen(self._finding_pages)
        self._examine()

    def _finding_lines(self) -> list[Line]:
        """Return what the doctor has found, with remedies."""
        lines: list[Line] = []
        for finding in self._findings or ():
            lines += [(str(finding["seen"]), "bad" if finding["verdict"] == "fail" else "warn")]
            lines += [
                (f"  {finding[key]}", "dim" if key == "why" else "text") for key in ("why", "remedy") if finding[key]
            ]
        return lines or [("gpushare doctor has found nothing", "dim")]

    def _examine(self) -> None:
        """Run gpushare doctor in the background."""
        self.run_worker(self._ask_doctor(), group="doctor", exclusive=True)

    async def _ask_doctor(self) -> None:
        """Keep the findings of `gpushare doctor` for the title and the dialog."""
        document = await self._answer(["doctor"])
        checks = (document.get("data") or {}).get("checks")
        if checks is None:
            self._findings = None
            lines = error_lines(document, ["doctor"])
        else:
            self._findings = [check for check in checks if check["verdict"] in {"warn", "fail"}]
            lines = self._finding_lines()
        self._title.refresh()
        if self._finding_pages is not None:
            self._finding_pages.replace(lines)

    def action_filter(self) -> None:
        hint = "part of a name, user, command, state or PID; empty shows all"
        prompt = Prompt("Filter", hint, self.colours, value=self.view.text)
        self.push_screen(prompt, lambda text: None if text is None else self._filter_by(text=str(text)))

    def _choose(self, title: str, texts: Sequence[str], chosen: Callable[[int], None], **options: Any) -> None:
        """Let the user choose one of the texts; ``chosen`` gets its number. ``options`` are those of `Choice`."""

        def closed(number: object) -> None:
            if isinstance(number, int):
                chosen(number)

        self.push_screen(Choice(title, texts, self.colours, **options), closed)

    def action_only_user(self) -> None:
        users = sorted({job.user for job in self.frame.jobs if job.user} if self.frame else ())
        chosen = [None, *users]
        self._choose("Jobs of", ["all users", *users], lambda number: self._filter_by(user=chosen[number]))

    def action_only_gpu(self) -> None:
        indexes = [gpu.index for gpu in self.frame.snapshot.gpus] if self.frame else []
        chosen, texts = [None, *indexes], ["all GPUs", *(f"GPU {index}" for index in indexes)]
        self._choose("Jobs on", texts, lambda number: self._filter_by(gpu=chosen[number]))

    def action_sort(self) -> None:
        keys = [column.key for column in jobs.COLUMNS]
        titles = [column.title.lower() for column in jobs.COLUMNS]
        self._choose("Sort by", titles, lambda number: self._sort_by(keys[number]), cursor=keys.index(self.view.sort))

    def action_open(self) -> None:
        """Open or close the chosen GPU, or show the menu of the chosen job."""
        if self._gpus.has_focus:
            if self.chosen_gpu is not None:
                self._open_gpu(None if self.opened is not None else self.chosen_gpu)
        elif self.chosen is not None and self.frame is not None:
            self._open_job_menu(self.chosen.job)

    def _open_job_menu(self, job: ListedJob) -> None:
        """Show what can be done with a job, and do what is chosen."""
        fitting = [action for action in ACTIONS if action.fits(job)]
        acts: list[Callable[[ListedJob], None]] = [partial(self._begin_action, action) for action in fitting]
        acts.append(self._show_logs)
        keys = [*(action.key for action in fitting), LOGS.shown]
        titles = [*(action.title for action in fitting), LOGS.text]
        texts = [f"{key}  {title}" for key, title in zip(keys, titles, strict=True)]
        above = self._job_facts(job)
        self._choose(job_title(job), texts, lambda number: acts[number](job), keys="".join(keys), above=above)

    def _job_facts(self, job: ListedJob) -> list[Line]:
        """Return what the dialog of a job says about it, above what can be done."""
        facts = [
            ("command", job.command),
            ("device", job.device or (f"GPU {', '.join(map(str, job.gpu_indexes))}" if job.gpu_indexes else None)),
            ("way", way_text(job.way, job.threads_percent, job.slice_us, job.mig_profile, job.mig_name)),
            ("processes", ", ".join(map(str, job.processes)) or None),
            (
                "memory",
                None
                if job.line
                else f"{format_bytes(job.memory_used_bytes)}, limit {format_bytes(job.whole_limit_bytes)}",
            ),
            ("waits", jobs.waiting_reason(job) or None),
            ("since", None if job.since_seconds is None else format_duration(job.since_seconds)),
        ]
        return [(f"{title:<10} {one_line(text)[:120]}", "dim") for title, text in facts if text]

    # -- actions -------------------------------------------------------------------------------------------------------------

    def action_act(self, key: str) -> None:
        action = next(action for action in ACTIONS if action.key == key)
        self._with_chosen_job(partial(self._begin_action, action))

    def _with_chosen_job(self, do: Callable[[ListedJob], None]) -> None:
        """Do something with the job under the cursor, or say that there is none."""
        if self.chosen is None:
            self.say("no job is selected", "warn")
        else:
            do(self.chosen.job)

    def _begin_action(self, action: Action, job: ListedJob) -> None:
        """Begin an action on a job, unless another one is under way."""
        if self._doing is not None:
            # A second action would end it in the middle.
            self.say(f"still at work: {self._doing}", "warn")
            return
        self.run_worker(self._carry_out(action, job), group="act", exclusive=True)

    async def _carry_out(self, action: Action, job: ListedJob) -> None:
        """Ask for what is missing, show the plan, ask, carry it out, and say how it went."""
        reader = self.watch_host.reader
        if not isinstance(reader, Reader):
            self.say("a recording cannot be acted on", "warn")
            return
        if not action.fits(job):
            self.say(f"{job_title(job)} is no client of an MPS daemon", "warn")
            return
        # While the user decides, the job may end and its PID go to another process.
        process = reader.identity(job.pid)
        words = await self._command_words(action, job)
        if words is None:
            return
        command = command_of(words)
        self.say(f"planning: {command} ...")
        plan = await self._answer([*words, "-n"])
        while True:
            self._clear_note()
            if failed(plan) and not needs_consent(plan):
                await self._show_dialog(command, error_lines(plan, words))
                return
            question = Question(f"{job_title(job)}: {action.title}?", plan_lines(plan, words), self.colours)
            if not await self.push_screen_wait(question):
                self.say("nothing was changed")
                return
            if reader.identity(job.pid) != process:
                text = f"process {job.pid} has ended meanwhile; nothing was changed"
                await self._show_dialog(command, [(text, "warn")])
                return
            self._doing = command
            try:
                self.say(f"{command} ...", seconds=3600)
                # With what the plan takes, to which the user has agreed.
                result = await self._answer([*words, "-y"] if (plan.get("data") or {}).get("consent") else words)
            finally:
                self._doing = None
            if not needs_consent(result):
                break
            # The host has changed, and the verb would take more than was agreed to: this is a new plan.
            plan = result
        self._note = None
        self.watch_host.look_now()
        if failed(result):
            await self._show_dialog(command, error_lines(result, words))
            return
        undo = (result.get("data") or {}).get("undo")
        self.happened.all.append(Event(time.time(), f"done: {command}{f'; undo: {undo}' if undo else ''}", "good"))
        self._last.refresh()

    async def _command_words(self, action: Action, job: ListedJob) -> list[str] | None:
        """Return the command line of an action, after a question if it has one; None: it is not wanted, or cannot be."""
        text: object = ""
        if action.asks is not None:
            title = f"{job_title(job)}: {action.title}"
            text = await self.push_screen_wait(Prompt(title, action.asks, self.colours, example=action.example))
        return None if text is None else list(action.words(job, str(text)))

    async def _show_dialog(self, title: str, lines: Sequence[Line]) -> None:
        """Show lines instead of the message below, until the user closes them."""
        self._note = None
        await self.push_screen_wait(Dialog(title, lines, self.colours))

    def action_explain(self) -> None:
        self.run_worker(self._ask_and_explain(), group="explain", exclusive=True)

    async def _ask_and_explain(self) -> None:
        """Ask for a word, and show what `gpushare explain` says of it."""
        question = "an error code, a line of a log, or a word"
        text = await self.push_screen_wait(Prompt("Explain", question, self.colours, example="Xid 79"))
        if not text:
            return
        document = await self._answer(["explain", "--", *str(text).split()])
        if failed(document):
            await self._show_dialog("Explain", error_lines(document, ["explain", str(text)]))
            return
        lines: list[Line] = []
        for explanation in document["data"]["explanations"]:
            lines += [
                (str(explanation["title"]), "text"),
                *((f"  {explanation[key]}", "dim") for key in ("meaning", "cause") if explanation.get(key)),
                *((f"  next: {command}", "text") for command in explanation.get("next") or ()),
                ("", "text"),
            ]
        await self._show_dialog(f"Explain: {text}", lines)

    def action_logs(self) -> None:
        self._with_chosen_job(self._show_logs)

    def _show_logs(self, job: ListedJob) -> None:
        """Show what a job prints, and go on with it until the dialog is closed."""
        if self._refuse_in_replay("output of jobs") or self._follow is None:
            return
        dialog = Dialog(f"{job_title(job)}: output", [], self.colours)
        follow = self._follow
        target = job.name or str(job.pid)

        async def add_output() -> None:
            # Lines can be added only to a dialog that is on the screen.
            await on_screen
            await follow(target, lambda lines: dialog.add([(line, "text") for line in lines]))

        on_screen: Awaitable[None] = self.push_screen(dialog, lambda _: worker.cancel())
        worker: Worker[None] = self.run_worker(add_output(), group="logs", exclusive=True)
