"""A plan as people read it: numbered steps, each with the plain command that it equals and its undo."""

from __future__ import annotations

from collections.abc import Sequence

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
