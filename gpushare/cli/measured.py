"""What every command has that measures a program of the user: options of what it prints, and who else was there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import typer

# So many others are named.
_NAMED: Final = 6

PrintedNumber = Annotated[
    str | None,
    typer.Option("--metric", metavar="REGEX", help="A number that CMD prints, in brackets: 'rate=([0-9.]+)'."),
]
LowerIsBetter = Annotated[
    bool,
    typer.Option(
        "--lower-is-better/--higher-is-better", "--lower", help="What is printed: a time per unit, or a rate."
    ),
]
MeasuredTime = Annotated[
    str | None,
    typer.Option("--for", metavar="TIME", help="Measure so long and end CMD; it needs --metric."),
]
HungAfter = Annotated[
    str | None, typer.Option("--timeout", metavar="TIME", help="When a run counts as hung. [default: by CMD alone]")
]


def others_note(others: Mapping[int, str]) -> str:
    """Return what to say of other processes on the GPU, by PID."""
    named = ", ".join(f"{pid} {name}".rstrip() for pid, name in list(others.items())[:_NAMED])
    return f"other processes were on the GPU while it was measured ({named}): the figures may be theirs too"
