"""Carrying a plan out, or only showing it: the same for every command that changes something."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpushare.cli.common import settings
from gpushare.show.plan import plan_result

if TYPE_CHECKING:
    from gpushare.actions.plan import Plan
    from gpushare.host.mps_home import DaemonHome
    from gpushare.show.result import Result


def one_plan(plans: Sequence[Plan]) -> Plan:
    """Return several plans as one: a failure rolls all of them back."""
    from gpushare.actions.plan import Plan

    if len(plans) == 1:
        return plans[0]
    return Plan(
        title="; ".join(plan.title for plan in plans),
        steps=tuple(step for plan in plans for step in plan.steps),
        undo="; ".join(plan.undo for plan in plans if plan.undo) or None,
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def carried_out(
    command: str, plan: Plan, *, homes: Sequence[DaemonHome] = (), again: Callable[[], Plan] | None = None
) -> Result:
    """Carry a plan out, or with --dry-run only show it, and return its result with the undo.

    The locks of ``homes`` are held meanwhile: another gpushare does not start or stop their daemons.
    ``again`` makes the plan anew under the locks: what the first one saw may have changed before they were held.
    """
    if not settings.dry_run:
        from gpushare.actions.plan import carry_out
        from gpushare.host.leftovers import sweep

        sweep(settings.connect())
        with contextlib.ExitStack() as locks:
            # In one order, so that two that want the same locks do not wait for each other.
            for home in sorted(homes, key=lambda home: home.directory):
                locks.enter_context(home.locked())
            if again is not None:
                plan = again()
            carry_out(plan, _say if settings.verbose else None)
    notes = list(plan.notes)
    if not settings.dry_run and plan.undo and plan.steps:
        notes.append(f"undo: {plan.undo}")
    return plan_result(command, plan.steps, dry_run=settings.dry_run, notes=notes)


def _say(step: object) -> None:
    sys.stderr.write(f"{getattr(step, 'what', '')}\n  {getattr(step, 'command', '')}\n")
    sys.stderr.flush()
