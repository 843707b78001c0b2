"""``gpushare doctor``."""

from __future__ import annotations

from typing import Any

import typer

from gpushare.cli.common import Command, settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", cls=Command, short_help="Check the host; each finding has a remedy.")(doctor)


def doctor() -> Any:
    """Check the host for what goes wrong in practice; each finding has a stable id and its remedy.

    Exit code 0: all is well; 1: something warns; 2: something fails. Nothing is changed.
    """
    from gpushare.actions.doctor import examine, exit_code, worst
    from gpushare.cli.host_file import kept_entries
    from gpushare.show.doctor import COLOURS, check_lines
    from gpushare.show.result import Column, Result, Table

    host = settings.connect()
    checks = examine(host, lambda gpus: kept_entries(host, gpus))
    columns = (
        Column(key="verdict", title="", style=lambda value: COLOURS.get(getattr(value, "value", value))),
        Column(key="id", title="check", whole=True),
        Column(key="seen", title="seen"),
        Column(key="remedy", title="mend"),
    )
    rows = tuple(
        {
            "verdict": check.verdict.value,
            "id": check.id,
            "gpu": check.gpu,
            "seen": check.seen,
            "why": check.why,
            "remedy": check.remedy,
        }
        for check in checks
    )
    table = Table(name="checks", columns=columns, rows=rows, draw=lambda width: check_lines(rows, width))
    return Result(
        command="doctor",
        data={"worst": worst(checks), "checks": checks},
        tables=(table,),
        csv=_csv(rows),
        exit_code=exit_code(checks),
    )


def _csv(rows: tuple[dict[str, Any], ...]) -> Any:
    from gpushare.show.result import Column, Table

    keys = ("verdict", "id", "gpu", "seen", "why", "remedy")
    return Table(name="checks", columns=tuple(Column(key=key, title=key) for key in keys), rows=rows)
