"""A plan as people read it: numbered steps, each with the plain command that it equals and its undo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpushare.plan import Loss, Plan, Step, taken
from gpushare.show.result import Column, Result, Table


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON: its steps, and what it takes."""
    return {
        "steps": [{"what": one.what, "command": one.command, "undo": one.undo} for one in plan.steps],
        "consent": [{"action": one.action, "what": one.what, "why": list(one.why)} for one in plan.consent],
    }


def plan_result(
    command: str, steps: Sequence[Step], *, dry_run: bool, notes: Sequence[str] = (), consent: Sequence[Loss] = ()
) -> Result:
    """Return the result of planning: ``{"dry_run": bool, "steps": [{"what", "command", "undo"}], "consent": [...]}``.

    People read the commands in a dry run; of what was done they read what it was, and the undo as a note. ``consent``
    is what the steps take: a dry run says that it would be asked for.
    """
    if dry_run and consent:
        notes = [*notes, f"it would be asked first (-y: not), as this {taken(consent)}"]
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
        data={"dry_run": dry_run, **plan_data(Plan(title=command, steps=tuple(steps), consent=tuple(consent)))},
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
