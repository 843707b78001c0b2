"""The options that every command has that measures a program of the user: what it prints, how long, how hung."""

from __future__ import annotations

from typing import Annotated

import typer

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
