"""Carrying a MIG change out: its claims held, its journal written, and in words what a failure left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpushare.actions.mig_change import InstanceStep
from gpushare.actions.mig_evict import Ending
from gpushare.actions.plan import NotUndone, carry_out
from gpushare.errors import GpushareError, InUse
from gpushare.host.claims import Claim, take_claim
from gpushare.host.holders import named

if TYPE_CHECKING:
    from gpushare.actions.mig_change import MigChange
    from gpushare.actions.plan import Step
    from gpushare.host.host import Host
    from gpushare.host.mig_journal import Journal


def transact(host: Host, journal: Journal, change: MigChange, on_step: Callable[[Step], None] | None = None) -> None:
    """Carry a change out under the journal, whose lock is held.

    Raises:
        InUse: a `gpushare run` took an instance that goes, since the plan was made.
        GpushareError: of the step that failed; everything is as before, or the error names what is not.
    """
    if not change.plan.steps:
        return
    with contextlib.ExitStack() as claims:
        for step in change.plan.steps:
            if isinstance(step, Ending):
                claims.enter_context(step.held)
        _take_claims(host, change, claims)
        _carry_out(journal, change, on_step)


def _take_claims(host: Host, change: MigChange, claims: contextlib.ExitStack) -> None:
    """Hold what goes, so that no `gpushare run` starts in it meanwhile; what is evicted is taken when it is empty."""
    for one in change.gpus:
        for gone in one.plan.destroyed:
            for part in gone.compute:
                if not part.uuid or part.busy or gone.instance.busy:
                    continue
                claim = take_claim(host, part.uuid)
                if isinstance(claim, Claim):
                    title = f"{gone.instance.profile.name}:{gone.instance.start}"
                    raise InUse(
                        f"GPU {one.gpu.index}: a gpushare run has just taken {title}: process {named(host, [claim.pid])}",
                        f"see who: gpushare mig status -g {one.gpu.index}",
                        gpu=str(one.gpu.index),
                    )
                claims.callback(claim.release)


def _carry_out(journal: Journal, change: MigChange, on_step: Callable[[Step], None] | None) -> None:
    touched = [one for one in change.gpus if one.changes]
    shapes = [one.before for one in touched], [one.after for one in touched]
    journal.begin(change.plan.title, *shapes, names=change.names)
    step = _Watched(on_step)
    # What an error that nobody foresaw leaves may be anything; it is compared with what is there.
    over = journal.give_up
    try:
        carry_out(change.plan, step)
        over = journal.end
    except NotUndone as error:
        if step.last is not None:
            raise error.restated(message=f"could not {step.last.what}: {error.message}") from error
        raise
    except KeyboardInterrupt:
        over = journal.end
        raise
    except GpushareError as error:
        over = journal.end
        if step.last is not None:
            raise _undone(error, step.last, _left_alone(change), ended=step.ended) from error
        raise
    finally:
        # Killed in between, the journal stays as that of a change that was interrupted.
        over()


class _Watched:
    """Remembers the step that was begun last, and whether one ended programs."""

    def __init__(self, on_step: Callable[[Step], None] | None) -> None:
        self.last: Step | None = None
        self.ended = False
        self._on_step = on_step

    def __call__(self, step: Step) -> None:
        self.last = step
        self.ended = self.ended or isinstance(step, Ending)
        if self._on_step is not None:
            self._on_step(step)


def _left_alone(change: MigChange) -> list[str]:
    works = {id(step.work): step.work for step in change.plan.steps if isinstance(step, InstanceStep)}
    return [words for work in works.values() for words in work.left_alone]


def _undone(error: GpushareError, step: Step, others: Sequence[str], *, ended: bool) -> GpushareError:
    but = ["the programs that --evict ended"] if ended else []
    but += [f"{one}, which somebody else made and which stays" for one in others]
    exceptions = f", but for {' and '.join(but)}" if but else ""
    return error.restated(message=f"could not {step.what}: {error.message}; everything is as before{exceptions}")
