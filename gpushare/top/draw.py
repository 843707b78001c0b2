"""How the cockpit draws: colours for dark and light terminals, bars with partial blocks, sparklines, charts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gpushare.base.values import dataclass

if TYPE_CHECKING:
    from rich.segment import Segment
    from rich.style import Style

# One cell of a bar: not quite a whole block, so that the bars of two lines do not touch.
_CELL: Final = "▇"
# One that is promised and not held, and one that is free: a bar tells them apart without its colours, too.
_THIN: Final = "▃"
_FREE: Final = "·"
# Eighths of a cell, from below.
_UP: Final = " ▁▂▃▄▅▆▇█"

# The colours of a dark and of a light terminal by their names. `back`, `head` and `row` are backgrounds.
_COLOURS: Final = {
    "back": ("#14161a", "#fcfcfb"),
    "head": ("#1e2127", "#e9ebee"),
    "row": ("#353c47", "#cfe2fb"),
    "text": ("#d8dce3", "#24292f"),
    "dim": ("#858e9c", "#68707a"),
    "util": ("#56c596", "#1f8f63"),
    "memory": ("#5b9df5", "#2a6fd6"),
    "reserved": ("#8fb8f0", "#6f9be0"),
    "sm": ("#b48ef0", "#7d4fc9"),
    "power": ("#e0a458", "#a8650f"),
    "warn": ("#e5c07b", "#8a5a00"),
    "bad": ("#ff7b72", "#c4292f"),
    "good": ("#56c596", "#1f8f63"),
}


# Compared by identity, as `style` keeps its answers.
@dataclass(frozen=True, eq=False)
class Theme:
    """The colours of the cockpit by name; empty: none (NO_COLOR), then shapes alone tell things apart."""

    name: str
    colours: dict[str, str]

    @functools.cache  # noqa: B019 - there are three themes
    def style(self, colour: str, back: str = "back", *, bold: bool = False) -> Style:
        """Return a style by the names of its colours and of its background; ``row`` is that of the line under the cursor.

        A theme without colours has bold text for what is wrong, and the line under the cursor is drawn in reverse.
        """
        from rich.style import Style

        if not self.plain:
            return Style(color=self.colours[colour], bgcolor=self.colours[back], bold=bold or None)
        strong = bold or colour in {"bad", "warn"}
        return Style(bold=strong or None, dim=colour == "dim" or None, reverse=back not in {"back", "head"} or None)

    @property
    def plain(self) -> bool:
        return not self.colours


THEMES: Final = {
    "dark": Theme("dark", {name: dark for name, (dark, _) in _COLOURS.items()}),
    "light": Theme("light", {name: light for name, (_, light) in _COLOURS.items()}),
    "plain": Theme("plain", {}),
}


# A piece of a line: its text, the name of its colour, and that of its background if it is not the line's.
Piece = tuple[str, str] | tuple[str, str, str]


def width_of(text: str) -> int:
    """Return how many cells a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return a text in exactly this many cells: cut with an ellipsis, or filled with blanks."""
    missing = width - width_of(text)
    if missing < 0:
        from rich.cells import set_cell_size

        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return " " * missing + text if right else text + " " * missing


def segments(pieces: Sequence[Piece], width: int, theme: Theme, back: str = "back") -> list[Segment]:
    """Return a line of exactly ``width`` cells; what is longer is cut."""
    from rich.segment import Segment

    line = []
    room = width
    for piece in pieces:
        text = piece[0]
        cells = width_of(text)
        if cells > room:
            text = fit(text, room)
            cells = room
        if text:
            line.append(Segment(text, theme.style(piece[1], piece[2] if len(piece) > 2 else back)))
        room -= cells
        if room <= 0:
            break
    if room > 0:
        line.append(Segment(" " * room, theme.style("text", back)))
    return line


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece to a line; it becomes one with the last piece if their colours are the same."""
    if pieces and pieces[-1][1:] == piece[1:]:
        piece = (pieces.pop()[0] + piece[0], *piece[1:])
    pieces.append(piece)


def bar(width: int, parts: Sequence[tuple[float | None, str]]) -> list[Piece]:
    """Return a bar of ``width`` cells, filled from the left by ``parts``: shares of the bar (0 to 1) with their colours.

    If the first share is None, the bar is a dash: unknown.
    """
    if width <= 0:
        return []
    if parts[0][0] is None:
        return [("-".ljust(width), "dim")]
    # The right edge of each part, in cells; any share above 0 is visible.
    edges: list[tuple[float, str]] = []
    filled = 0.0
    for share, colour in parts:
        filled = min(1.0, filled + max(0.0, share or 0.0))
        edges.append((max(width * filled, 0.6) if filled > 0 else 0.0, colour))
    pieces: list[Piece] = []
    for cell in range(width):
        # A cell has the colour of its middle. A dot is thin, so it has the colour of dim text.
        colour = next((colour for edge, colour in edges if edge > cell + 0.5), "dim")
        _append(pieces, ({"dim": _FREE, "reserved": _THIN}.get(colour, _CELL), colour))
    return pieces


def sparkline(values: Sequence[float | None], colour: str) -> Piece:
    """Return values (0 to 1) as one line, a cell each, none as high as the cell (see `_CELL`); an unknown one is a blank."""
    return "".join(" " if value is None else _UP[min(7, _eighths(value, 1))] for value in values), colour


def chart(values: Sequence[float | None], height: int, colour: str) -> list[list[Piece]]:
    """Return values (0 to 1) as an area of ``height`` lines, a column each.

    A whole cell is a blank on a background: blocks above each other show a seam in some fonts.
    """
    heights_in_eighths = [0 if value is None else _eighths(value, height) for value in values]
    lines: list[list[Piece]] = []
    for lines_below in reversed(range(height)):
        line: list[Piece] = []
        for column_height in heights_in_eighths:
            eighths = min(8, max(0, column_height - 8 * lines_below))
            _append(line, (" ", colour, colour) if eighths == 8 else (_UP[eighths], colour, "head"))
        lines.append(line)
    return lines


def _eighths(value: float, height: int) -> int:
    """Return how many eighths of a cell a share (0 to 1) fills in a column of this many cells; at least one."""
    # Something idle is a thin line, not nothing.
    return max(1, round(8 * height * min(1.0, max(0.0, value))))
