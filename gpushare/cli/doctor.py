"""``gpushare doctor``: checks with remedies; done by `gpushare/doctor/`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Final

import typer

from gpushare.base.values import dataclass
from gpushare.cli.options import PLAIN, Command, settings
from gpushare.doctor.check import Check, Verdict
from gpushare.doctor.examine import examine, exit_code, worst
from gpushare.show.doctor import COLOURS, check_lines
from gpushare.show.result import Column, Result, Table

app = typer.Typer(**PLAIN)


_CSV: Final = ("verdict", "id", "gpu", "seen", "why", "remedy")


class FailOn(str, Enum):
    """The least severe finding with exit code 1."""

    FAILURE = "failure"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True)
class DoctorAnswer:
    """The answer of `doctor`."""

    worst: Verdict
    checks: tuple[Check, ...]


@app.command(cls=Command)
def doctor(
    fail_on: Annotated[
        FailOn,
        typer.Option("--fail-on", help="Exit with 1 on: a failed check (failure), or also on a warning."),
    ] = FailOn.FAILURE,
) -> Any:
    """Check the host for common problems. Each finding has a stable id and a remedy; nothing is changed.

    Exit code 1 if a check fails, else 0; with --fail-on warning also 1 if a check warns.
    """
    host = settings.connect()
    checks = examine(host)
    columns = (
        Column("verdict", "", style=lambda value: COLOURS.get(getattr(value, "value", value))),
        Column("id", "check", whole=True),
        Column("seen", "seen"),
        Column("remedy", "remedy"),
    )
    rows = tuple({**vars(check), "verdict": check.verdict.value} for check in checks)
    table = Table(name="checks", columns=columns, rows=rows, draw=lambda width: check_lines(rows, width))
    return Result(
        command="doctor",
        data=DoctorAnswer(worst=worst(checks), checks=tuple(checks)),
        tables=(table,),
        csv=Table(name="checks", columns=tuple(Column(key, key) for key in _CSV), rows=rows),
        exit_code=exit_code(checks, Verdict.WARN if fail_on is FailOn.WARNING else Verdict.FAIL),
    )
