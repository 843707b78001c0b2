"""A plan as people read it: numbered steps, each with the plain command that it equals and its undo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpushare.base.units import counted
from gpushare.base.values import dataclass
from gpushare.plan import Loss, Plan, Step, describe_losses
from gpushare.show.result import Column, Result, Table
from gpushare.show.text import complete_commands


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """The answer of a change: its steps, the command that undoes them, and what gpushare asks about first."""

    # True: nothing was changed.
    dry_run: bool
    steps: tuple[Step, ...]
    undo: str | None
    consent: tuple[Loss, ...]


def plan_answer(plan: Plan, *, dry_run: bool) -> PlanAnswer:
    return PlanAnswer(dry_run=dry_run, steps=plan.steps, undo=plan.undo if plan.steps else None, consent=plan.consent)


def plan_result(
    plan: Plan, *, dry_run: bool, notes: Sequence[str] = (), empty: str = "nothing to do: the host is as requested"
) -> Result:
    """Return a plan, or with ``dry_run=False`` a plan that was carried out, as a result with a `PlanAnswer`.

    A dry run prints the steps with their commands, and what the user would be asked. A change prints what is in force
    now, with its undo. A step has no undo of its own if the undo of another step includes it.
    """
    steps, notes = plan.steps, [*notes, *plan.notes]
    if dry_run and plan.consent:
        notes.append(f"without -y it asks first, because it {describe_losses(plan.consent)}")
    if dry_run and plan.undo is not None and steps:
        notes.append(f"undo: {plan.undo}")
    table = Table(
        name="steps",
        title=f"plan: {counted(len(steps), 'step')}, nothing is changed (dry run)" if steps else None,
        columns=(
            Column("number", "#", right=True),
            Column("what", "what"),
            Column("command", "command"),
            Column("undo", "undo"),
        ),
        rows=tuple(
            {"number": number, "what": step.what, "command": step.command, "undo": step.undo}
            for number, step in enumerate(steps, 1)
        ),
        # Without a step there is no table to show, either.
        lines=tuple(_step_lines(steps)) if steps else ((empty, None),),
    )
    done: tuple[tuple[str, str | None], ...] = ()
    if not dry_run:
        changed_parts = [part for part in plan.parts or (plan,) if part.steps]
        done = tuple((part.title, part.undo) for part in changed_parts) or ((empty, None),)
    return Result(
        data=plan_answer(plan, dry_run=dry_run),
        tables=(table,) if dry_run else (),
        csv=table,
        done=done,
        notes=tuple(notes),
    )


def with_answer(result: Result, kind: type[PlanAnswer], **fields: Any) -> Result:
    """Return a result of `plan_result` whose answer is a ``kind`` of `PlanAnswer`, with these ``fields`` more."""
    return replace(result, data=kind(**vars(result.data), **fields))


def with_undo(lines: Sequence[str], undo: str | None) -> tuple[tuple[str, str | None], ...]:
    """Return `Result.done` for lines with one undo for all: next to a single line, else on a line of its own."""
    done: list[tuple[str, str | None]] = [(line, None) for line in lines if line]
    if len(done) == 1:
        return ((done[0][0], undo),)
    if undo:
        done.append(("", undo))
    return tuple(done)


def _step_lines(steps: Sequence[Step]) -> list[tuple[str, str | None]]:
    """Return steps as lines with their Rich styles: what each does, and indented its command and its undo."""
    margin = len(str(len(steps)))
    indent = " " * (margin + 2)
    lines: list[tuple[str, str | None]] = []
    for number, step in enumerate(steps, 1):
        lines += [("", None), (f"{number:>{margin}}. {step.what}", None)]
        for lead, command in ((f"{indent}$ ", step.command), (f"{indent}undo: ", step.undo)):
            if command is not None:
                first, *others = command.split("\n")
                lines.append((f"{lead}{first}", "dim"))
                # What shows the lines finds a command behind the lead, and not behind blanks alone.
                lines += [(f"{' ' * len(lead)}{complete_commands(other)}", "dim") for other in others]
    return lines
