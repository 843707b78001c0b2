"""``gpushare doctor``: checks with remedies; done by `gpushare/doctor/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from gpushare.base.values import dataclass
from gpushare.cli.options import Command, option, settings, verb
from gpushare.doctor.check import Check, Verdict
from gpushare.doctor.examine import examine, worst_verdict
from gpushare.show.result import Column, Result, Table, plain_value, record_table
from gpushare.show.text import complete_commands, wrapped

if TYPE_CHECKING:
    from rich.text import Text


# The width of a verdict with the gap behind it, in columns.
_INDENT: Final = 6
_COLOURS: Final = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
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


@verb(Command)
def doctor(
    fail_on: FailOn = option(
        "--fail-on", None, "Exit with 1 on: a failed check (failure), or also on a warning.", default=FailOn.FAILURE
    ),
) -> Any:
    """Check the host for common problems. Each finding has a stable id and a remedy; nothing is changed.

    Exit code 1 if a check fails, else 0; with --fail-on warning also 1 if a check warns.
    """
    checks = examine(settings.connect())
    columns = (
        Column("verdict", ""),
        Column("id", "check"),
        Column("seen", "seen"),
        Column("remedy", "remedy", format=lambda remedy: complete_commands(plain_value(remedy))),
    )
    rows = tuple({**vars(check), "verdict": check.verdict.value} for check in checks)
    table = Table(name="checks", columns=columns, rows=rows, draw=lambda width: check_lines(rows, width))
    worst = worst_verdict(checks)
    return Result(
        data=DoctorAnswer(worst=worst, checks=tuple(checks)),
        tables=(table,),
        csv=record_table("checks", _CSV, rows),
        exit_code=int(worst in {Verdict.FAIL, Verdict.WARN if fail_on is FailOn.WARNING else Verdict.FAIL}),
    )


def check_lines(rows: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    """Return the checks as lines that fit a width (columns); a command can be copied."""
    from rich.text import Text

    id_width = max((len(row["id"]) for row in rows), default=0)
    lines: list[Text] = []
    for row in rows:
        colour = _COLOURS[row["verdict"]]
        head = f"{row['verdict']:<4}  {row['id']:<{id_width}}  "
        margin = " " * len(head)
        lines += [Text(line, style=colour) for line in wrapped(row["seen"], width, head, margin)]
        if row["verdict"] in {"warn", "fail"}:
            lines += [Text(line) for line in wrapped(row["why"] or "", width, margin, margin)]
            lead, remedy = f"{margin}remedy: ", row["remedy"] or ""
            # Further to the left where it fits one line only there.
            if len(lead) + len(remedy) > width:
                lead = " " * _INDENT + "remedy: "
            lines += [Text(line) for line in wrapped(remedy, width, lead, " " * len(lead))]
    return lines
