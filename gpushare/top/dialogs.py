"""The dialogs of the cockpit: lines to read, a question, a list to choose from, a text to type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Static

from gpushare.show.text import one_line, visible
from gpushare.top.draw import fit

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

    from gpushare.top.draw import Theme

# A line and the name of its colour.
Line = tuple[str, str]
# Of a log that is followed.
_MOST_LINES: Final = 5000
# The cells of a box that have no text: its padding (`Dialog.DEFAULT_CSS`), and one more on each side.
_SIDES: Final = 6


def wrap_lines(lines: Sequence[Line], width: int) -> list[Line]:
    """Return lines broken at words to at most ``width`` cells; the rest of a line is indented two cells more than it."""
    import textwrap

    from rich.cells import chop_cells

    rows: list[Line] = []
    for text, colour in lines:
        indent = " " * min(len(text) - len(text.lstrip()) + 2, width // 2)
        # A command keeps its hyphens.
        parts = textwrap.wrap(visible(text), width, subsequent_indent=indent, break_on_hyphens=False)
        # A character may take two cells.
        rows += [(piece, colour) for part in parts for piece in chop_cells(part, width)] or [("", colour)]
    return rows


class Lines(Widget):
    """Lines that can be scrolled.

    ``cursor`` is the line that is chosen, None where lines are only read. Those before ``first`` cannot be chosen.
    ``offset_y`` is the first line in view.
    """

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._colours = theme
        self.offset_y = 0
        self.first = 0
        self.cursor: int | None = None
        self.styles.height = "auto"

    def get_content_height(self, container: object, viewport: object, width: int) -> int:  # noqa: ARG002 - Textual's
        return max(1, len(self.lines))

    def render_line(self, y: int) -> Strip:
        number = self.offset_y + y
        if number >= len(self.lines):
            return Strip([Segment(" " * self.size.width, self._colours.style("text", "head"))])
        text, colour = self.lines[number]
        back = "row" if number == self.cursor else "head"
        return Strip([Segment(fit(text, self.size.width), self._colours.style(colour, back))])

    def on_resize(self) -> None:
        """Keep the cursor in view, and show the last lines where there is room for more of them."""
        self.move(0)

    def move(self, by: int) -> None:
        """Move the cursor, or without one the view."""
        last = len(self.lines) - 1
        if self.cursor is None:
            self.offset_y = min(max(0, self.offset_y + by), max(0, len(self.lines) - self.size.height))
        else:
            self.cursor = min(max(self.first, self.cursor + by), last)
            self.offset_y = min(max(self.offset_y, self.cursor - self.size.height + 1), self.cursor)
        self.refresh()

    def add(self, lines: Sequence[Line]) -> None:
        """Add lines at the end, and follow them if the end is in view."""
        follows = self.offset_y >= len(self.lines) - self.size.height
        self.lines = [*self.lines, *lines][-_MOST_LINES:]
        if follows:
            self.offset_y = max(0, len(self.lines) - self.size.height)
        self.refresh(layout=True)


class Dialog(ModalScreen[object]):
    """Lines in a box in the middle of the screen; more may be added while it is open. Escape closes it."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 50%; }
    Dialog > Vertical { height: auto; max-height: 100%; padding: 1 2; }
    Dialog Static { height: auto; }
    Dialog Input { margin: 1 0 0 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("pagedown,space", "scroll(15)", show=False),
        Binding("pageup", "scroll(-15)", show=False),
        Binding("home,g", "scroll(-99999)", show=False),
        Binding("end,G", "scroll(99999)", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Line], theme: Theme, keys: str = "↑ ↓ scroll    Esc closes") -> None:
        super().__init__()
        self._title = title
        # The lines as they were given, before they are broken at the width of the box.
        self._given = list(lines)
        self._colours = theme
        self._keys = keys
        self.lines = Lines(theme)

    @property
    def _width(self) -> int:
        return min(100, self.app.size.width - 4)

    def add(self, lines: Sequence[Line]) -> None:
        """Add lines at the end, broken as the others."""
        self._given = [*self._given, *lines][-_MOST_LINES:]
        self.lines.add(wrap_lines(lines[-_MOST_LINES:], self._width - _SIDES))

    def replace(self, lines: Sequence[Line]) -> None:
        """Show other lines instead, unless the dialog is closed."""
        self._given = list(lines)
        if self.is_attached:
            self.on_resize()
            self.lines.move(0)

    def _break_lines(self, width: int) -> list[Line]:
        """Return the lines of the dialog, broken at this width."""
        return wrap_lines(self._given, width)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.styles.background = self._colours.colours.get("head")
            if self._colours.plain:
                box.styles.border = ("solid", "ansi_white")
                box.styles.padding = (0, 1)
            yield Static(self._title_text(self._title, bold=True))
            yield Static("")
            yield self.lines
            yield from self.widgets_below()
            yield Static("")
            yield Static(self._title_text(self._keys))

    def on_mount(self) -> None:
        self._widgets = [self, *self.query("*")]
        self.on_resize()

    def on_resize(self) -> None:
        """Fit the box into the terminal, and break the lines again."""
        for box in self.query(Vertical):
            box.styles.width = self._width
        # Title, keys, and the blanks around them.
        self.lines.styles.max_height = max(3, self.app.size.height - 7 - self.height_below)
        self.lines.lines = self._break_lines(self._width - _SIDES)
        self.lines.refresh(layout=True)

    def on_unmount(self) -> None:
        """Forget what was drawn: a cache of Textual 8.2 keeps the lines of 1024 widgets that are gone, 100 MiB of them."""
        for widget in self._widgets:
            widget.refresh()

    def _title_text(self, text: str, *, bold: bool = False) -> Text:
        return Text(visible(text), self._colours.style("text" if bold else "dim", "head", bold=bold))

    # In lines.
    height_below = 0

    def widgets_below(self) -> ComposeResult:
        """Yield what stands below the lines, such as a field to type in: nothing, or what a subclass has there."""
        yield from ()

    def action_close(self) -> None:
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        self.lines.move(by)

    def on_mouse_scroll_down(self, _event: events.MouseScrollDown) -> None:
        self.lines.move(3)

    def on_mouse_scroll_up(self, _event: events.MouseScrollUp) -> None:
        self.lines.move(-3)


class Question(Dialog):
    """A plan, and whether to carry it out."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n", "answer(False)", "no"),
    ]

    def __init__(self, title: str, lines: Sequence[Line], theme: Theme) -> None:
        super().__init__(title, lines, theme, "y does it    n or Esc leaves everything as it is")

    def action_answer(self, answer: bool) -> None:  # noqa: FBT001 - Textual calls it
        self.dismiss(answer)


class Choice(Dialog):
    """A list of which one line is chosen, by Enter, a click, or its key: the character that it begins with, of ``keys``.

    The answer is its number. ``above`` are lines that tell more, above the list.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", show=False)]

    def __init__(
        self,
        title: str,
        texts: Sequence[str],
        theme: Theme,
        *,
        cursor: int = 0,
        keys: str = "",
        above: Sequence[Line] = (),
    ) -> None:
        super().__init__(title, above, theme, "↑ ↓ move    Enter chooses    Esc closes")
        self._texts = texts
        self._chosen = cursor
        # The n-th character chooses the n-th text.
        self._keys_of_texts = keys

    def _break_lines(self, width: int) -> list[Line]:
        """Return the lines above, broken, then one line per choice.

        Broken at another width, the lines above move the choices: ``lines.first`` follows, and so does ``lines.cursor``, so
        that the same choice stays chosen.
        """
        above = super()._break_lines(width)
        # None until the lines are broken for the first time.
        if self.lines.cursor is not None:
            self._chosen = self.lines.cursor - self.lines.first
        self.lines.first = len(above)
        self.lines.cursor = self.lines.first + self._chosen
        # A choice is never broken: its number is that of its line, less `lines.first`.
        return [*above, *((one_line(text), "text") for text in self._texts)]

    def on_key(self, event: events.Key) -> None:
        if event.character and event.character in self._keys_of_texts:
            event.stop()
            self.dismiss(self._keys_of_texts.index(event.character))

    def action_choose(self) -> None:
        self.dismiss((self.lines.cursor or 0) - self.lines.first)

    def on_click(self, event: events.Click) -> None:
        number = self.lines.offset_y + event.screen_y - self.lines.region.y - self.lines.first
        if self.lines.region.contains(event.screen_x, event.screen_y) and 0 <= number < len(self._texts):
            self.dismiss(number)


class Prompt(Dialog):
    """A text to type, with a line that says what; None: Escape."""

    height_below = 4

    def __init__(self, title: str, question: str, theme: Theme, *, example: str = "", value: str = "") -> None:
        super().__init__(title, [(question, "dim")], theme, "Enter goes on    Esc closes")
        self._input = Input(value=value, placeholder=example and f"for example: {example}")

    def widgets_below(self) -> ComposeResult:
        yield self._input

    def on_mount(self) -> None:
        self._input.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())
