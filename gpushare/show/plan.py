"""A plan as people read it: numbered steps, each with the plain command that it equals and its undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpushare.errors import GpushareError
from gpushare.plan import Step
from gpushare.show.result import Column, Result, Table


def plan_result(command: str, steps: Sequence[Step], *, dry_run: bool, notes: Sequence[str] = ()) -> Result:
    """Return the result of planning: ``{"dry_run": bool, "steps": [{"what", "command", "undo"}]}``.

    People read the commands in a dry run; of what was done they read what it was, and the undo as a note.
    """
    rows = tuple(
        {"number": number, "what": step.what, "command": step.command, "undo": step.undo}
        for number, step in enumerate(steps, 1)
    )
    columns: tuple[Column, ...] = (Column(key="number", title="#", right=True), Column(key="what", title="what"))
    if dry_run:
        columns += (
            Column(key="command", title="command", whole=True),
            Column(key="undo", title="undo", whole=True),
        )
    count = "1 step" if len(rows) == 1 else f"{len(rows)} steps"
    return Result(
        command=command,
        data={"dry_run": dry_run, "steps": [{key: row[key] for key in ("what", "command", "undo")} for row in rows]},
        tables=(
            Table(
                name="steps",
                title=(f"plan: {count}, nothing is changed (dry run)" if dry_run else f"done: {count}")
                if rows
                else None,
                columns=columns,
                rows=rows,
                empty="nothing to do: the host is as requested",
                lines=tuple(_lines(steps) if dry_run else _done(steps)) if rows else None,
            ),
        ),
        notes=tuple(notes),
    )


def _done(steps: Sequence[Step]) -> list[tuple[str, str | None]]:
    margin = len(str(len(steps)))
    return [(f"{number:>{margin}}. {step.what}", None) for number, step in enumerate(steps, 1)]


def _lines(steps: Sequence[Step]) -> list[tuple[str, str | None]]:
    margin = len(str(len(steps)))
    indent = " " * (margin + 2)
    lines: list[tuple[str, str | None]] = []
    for number, step in enumerate(steps, 1):
        lines += [("", None), (f"{number:>{margin}}. {step.what}", None)]
        command = step.command.split("\n")
        lines.append((f"{indent}$ {command[0]}", "dim"))
        lines += [(f"{indent}  {line}", "dim") for line in command[1:]]
        undo = (step.undo or "none").split("\n")
        lines.append((f"{indent}undo: {undo[0]}", "dim"))
        lines += [(f"{indent}      {line}", "dim") for line in undo[1:]]
    return lines


def farm_result(
    data: Mapping[str, Any], errors: Sequence[GpushareError] = (), notes: Sequence[str] = (), exit_code: int = 0
) -> Result:
    """Return the result of a farm from its data: keys as the JSON document has them."""
    columns = (
        Column(key="copy", title="copy", right=True),
        Column(key="state", title="state"),
        Column(key="exit_code", title="exit", right=True, rank=1),
        Column(key="seconds", title="seconds", right=True, format=lambda value: f"{value:.1f}"),
        Column(key="tries", title="starts", right=True, rank=2),
        Column(key="failure", title="failure", least=10, optional=True),
        Column(key="log", title="log", rank=3, least=10, optional=True),
    )
    return Result(
        command="run",
        data=data,
        tables=(Table(name="copies", title="copies", columns=columns, rows=tuple(data["copies"])),),
        errors=tuple(errors),
        notes=tuple(notes),
        exit_code=exit_code,
    )
