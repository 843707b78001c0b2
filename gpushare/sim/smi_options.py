"""What the subcommands of nvidia-smi share: their options, what they say of wrong ones, and their tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

NO_DEVICES: Final = (6, "No devices were found\n")
BAD_IDS: Final = (255, "Failed to parse device string on command line")
# How an option takes a value.
NO_VALUE, VALUE, MAYBE = "no", "yes", "maybe"
_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)")


class Wrong(Exception):
    """The arguments are wrong: what the program prints for it, and its exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def parse(words: Sequence[str], options: Mapping[str, tuple[str, str]]) -> list[tuple[str, str | None]]:
    """Return the options of a subcommand by their short names, with their values."""
    long = {name: short for short, (name, _) in options.items() if name}
    found: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word, equals, text = rest.pop(0).partition("=")
        option = long.get(word, word)
        if option not in options:
            raise Wrong(2, f'Option "{word}" is not recognized.\n')
        takes, value = options[option][1], text if equals else None
        if takes == NO_VALUE and equals:
            rest.insert(0, text)
        elif takes != NO_VALUE and not equals:
            # Another option is no value; "-1" is one.
            known = bool(rest) and long.get(name := rest[0].partition("=")[0], name) in options
            if rest and not known:
                value = rest.pop(0)
            elif takes == VALUE:
                raise Wrong(2, f'Option "{word}" is missing its value.\n')
        found.append((option, value))
    return found


def read_number(text: str) -> int | None:
    """Return a whole number as C's strtol reads it, in any of its bases; None when something else is in it."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    base = 16 if digits[:2] in {"0x", "0X"} else 8 if digits.startswith("0") else 10
    try:
        number = int(digits[:40], base)
    except ValueError:
        return None
    return -number if sign == "-" else number


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table with a rule after each row, which may have several lines."""

    def lines(texts: Sequence[str]) -> str:
        return "".join(f"|{text:<{width}}|\n" for text in texts)

    rule = "+" + "-" * width + "+\n"
    return rule + lines([f" {title}", *head, "=" * width]) + "".join(lines(row) + rule for row in rows)
