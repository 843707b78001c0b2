"""A plan as people read it: numbered steps, each with the plain command that it equals and its undo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpushare.plan import Loss, Plan, Step, taken
from gpushare.show.result import Column, Result, Table
from gpushare.units import counted


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON: its steps, what takes all of them back, and what it takes."""
    return {
        "steps": [{"what": one.what, "command": one.command, "undo": one.undo} for one in plan.steps],
        "undo": plan.undo if plan.steps else None,
        "consent": [{"action": one.action, "what": one.what, "why": list(one.why)} for one in plan.consent],
    }


def plan_result(
    command: str,
    steps: Sequence[Step],
    *,
    dry_run: bool,
    notes: Sequence[str] = (),
    consent: Sequence[Loss] = (),
    undo: str | None = None,
    empty: str = "nothing to do: the host is as requested",
) -> Result:
    """Return the result of planning: ``{"dry_run": bool, "steps": [{"what", "command", "undo"}], "undo", "consent"}``.

    People read the commands in a dry run; of what was done they read what it was. ``consent`` is what the steps take: a
    dry run says that it would be asked for. ``undo`` is the command that takes all of it back, and a note; some steps
    have none of their own, as that of another one includes theirs.
    """
    if dry_run and consent:
        notes = [*notes, f"without -y it asks first, because it {taken(consent)}"]
    if undo is not None and steps:
        notes = [*notes, f"undo: {undo}"]
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
    count = counted(len(rows), "step")
    return Result(
        command=command,
        data={
            "dry_run": dry_run,
            **plan_data(Plan(title=command, steps=tuple(steps), undo=undo, consent=tuple(consent))),
        },
        tables=(
            Table(
                name="steps",
                title=(f"plan: {count}, nothing is changed (dry run)" if dry_run else f"done: {count}")
                if rows
                else None,
                columns=columns,
                rows=rows,
                empty=empty,
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
        if step.undo is not None:
            undo = step.undo.split("\n")
            lines.append((f"{indent}undo: {undo[0]}", "dim"))
            lines += [(f"{indent}      {line}", "dim") for line in undo[1:]]
    return lines
