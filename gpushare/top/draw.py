"""How the cockpit draws: colours for dark and light terminals, bars with partial blocks, sparklines, charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "track": ("#282d36", "#e3e6ea"),
    "util": ("#56c596", "#1f8f63"),
    "memory": ("#5b9df5", "#2a6fd6"),
    "reserved": ("#8fb8f0", "#6f9be0"),
    "sm": ("#b48ef0", "#7d4fc9"),
    "power": ("#e0a458", "#a8650f"),
    "warn": ("#e5c07b", "#8a5a00"),
    "bad": ("#ff7b72", "#c4292f"),
    "good": ("#56c596", "#1f8f63"),
}


@dataclass(frozen=True)
class Theme:
    """The colours of the cockpit by name; empty: none (NO_COLOR), then shapes alone tell things apart."""

    name: str
    colours: dict[str, str]

    def style(self, colour: str, back: str = "back", *, bold: bool = False) -> Style:
        """Return a style by the names of its colours and of its background; ``row`` is that of the line under the cursor.

        A theme without colours has bold text for what is wrong, and the line under the cursor is drawn in reverse.
        """
        key = (self.name, colour, back, bold)
        if key not in _STYLES:
            from rich.style import Style

            colours = self.colours
            if colours:
                _STYLES[key] = Style(
                    color=colours.get(colour, colour), bgcolor=colours.get(back, back), bold=bold or None
                )
            else:
                strong = bold or colour in {"bad", "warn"}
                _STYLES[key] = Style(
                    bold=strong or None, dim=colour == "dim" or None, reverse=back not in {"back", "head"} or None
                )
        return _STYLES[key]

    @property
    def plain(self) -> bool:
        return not self.colours


THEMES: Final = {
    "dark": Theme("dark", {name: dark for name, (dark, _) in _COLOURS.items()}),
    "light": Theme("light", {name: light for name, (_, light) in _COLOURS.items()}),
    "plain": Theme("plain", {}),
}
_STYLES: dict[tuple[str, str, str, bool], Style] = {}


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


def bar(width: int, parts: Sequence[tuple[float | None, str]], theme: Theme) -> list[Piece]:
    """Return a bar of ``width`` cells, filled from the left by ``parts``: shares of the bar (0 to 1) with their colours.

    A cell that two parts share has a mixture of their colours. If the first share is None, the bar is a dash: unknown.
    """
    if width <= 0:
        return []
    if not parts or parts[0][0] is None:
        return [("-".ljust(width), "dim")]
    # The right edge of each part, in cells.
    edges: list[tuple[float, str]] = []
    filled = 0.0
    for share, colour in parts:
        filled = min(1.0, filled + max(0.0, share or 0.0))
        # Any share above 0 is visible.
        edges.append((max(width * filled, 0.3) if filled > 0 else 0.0, colour))
    edges.append((float(width), "track"))
    pieces: list[Piece] = []
    for cell in range(width):
        colours = _colours_in_cell(cell, edges)
        first = next(iter(colours))
        if first == "track":
            # A dot is thin: the colour of a track would hide it.
            _append(pieces, (_FREE, "dim"))
        elif first == "reserved":
            _append(pieces, (_THIN, first))
        elif len(colours) > 1 and not theme.plain:
            _append(pieces, (_CELL, mix_colours(colours, theme)))
        else:
            _append(pieces, (_CELL, first))
    return pieces


def _colours_in_cell(cell: int, edges: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return the colours in one cell of a bar from the left, with their parts of it; ``edges`` are where each ends."""
    parts: dict[str, float] = {}
    filled_to = float(cell)
    for edge, colour in edges:
        # In eighths: a colour for each value would be a style for each value, kept until the end.
        part = round(8 * (min(edge, cell + 1) - filled_to)) / 8
        if part > 0:
            parts[colour] = part
            filled_to += part
    return parts or {"track": 1.0}


def mix_colours(parts: Mapping[str, float], theme: Theme) -> str:
    """Return the mean of colours by their parts, as a name that `Theme.style` takes: ``#5b9df5``."""
    whole = sum(parts.values())
    mixed = "#"
    # Red, green and blue: two hexadecimal digits each.
    for start in (1, 3, 5):
        total = sum(part * int(theme.colours[name][start : start + 2], 16) for name, part in parts.items())
        mixed += f"{min(255, round(total / whole)):02x}"
    return mixed


def sparkline(values: Sequence[float | None], width: int, colour: str) -> list[Piece]:
    """Return the newest values (0 to 1) as one line, the newest at the right; an unknown one is a blank."""
    shown = _newest(values, width)
    return [("".join(" " if value is None else _UP[min(7, _eighths(value, 1))] for value in shown), colour)]


def chart(values: Sequence[float | None], width: int, height: int, colour: str) -> list[list[Piece]]:
    """Return values (0 to 1) as an area of ``height`` lines, the newest at the right.

    A whole cell is a blank on a background: blocks above each other show a seam in some fonts.
    """
    heights_in_eighths = [0 if value is None else _eighths(value, height) for value in _newest(values, width)]
    lines: list[list[Piece]] = []
    for lines_below in reversed(range(height)):
        line: list[Piece] = []
        for column_height in heights_in_eighths:
            eighths = min(8, max(0, column_height - 8 * lines_below))
            _append(line, (" ", colour, colour) if eighths == 8 else (_UP[eighths], colour, "head"))
        lines.append(line)
    return lines


def _newest(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return the last ``width`` values, after unknown ones if there are fewer."""
    return [*([None] * (width - len(values))), *values[-width:]] if width > 0 else []


def _eighths(value: float, height: int) -> int:
    """Return how many eighths of a cell a share (0 to 1) fills in a column of this many cells; at least one."""
    # Something idle is a thin line, not nothing.
    return max(1, round(8 * height * min(1.0, max(0.0, value))))
