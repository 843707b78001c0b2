"""Plans: steps that act, read back and know their undo, each with the plain command that does the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Final, TypeVar

from gpushare.base.errors import GpushareError, Interrupted, NotHeld, OperationFailed, system_error
from gpushare.base.values import NOT_STORED, dataclass
from gpushare.signals import ending_signals_ignored

T = TypeVar("T")
# The code of an error that names all that could not be restored, and the command for it.
NOT_RESTORED: Final = "not_restored"


class NotUndone(OperationFailed):
    """A step failed, and some of the steps before it could not be undone; the message names them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a plan.

    ``command`` is the plain vendor command that does the same (None: there is none), ``undo`` the one that reverts it.
    """

    what: str
    command: str | None = None
    undo: str | None = None
    # It acts and reads back: it raises unless the host has the new state.
    do: Callable[[], object] = field(repr=False, metadata=NOT_STORED)
    # It undoes the step, even if ``do`` failed half way.
    revert: Callable[[], object] | None = field(default=None, repr=False, metadata=NOT_STORED)
    # False: it only checks.
    changes: bool = field(default=True, metadata=NOT_STORED)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Something that a plan takes and that a user may miss: gpushare asks first.

    The question has ``action``, ``what`` and ``why``: ``destroys 1g.10gb:6 on GPU 0 (named 'train', granted to
    alice)``. What is idle, unnamed, ungranted and made by gpushare for this user is no loss.
    """

    action: str
    what: str
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} ({', '.join(self.why)})" if self.why else self.what


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps in order; ``undo`` is the gpushare command that reverts all of them, ``consent`` what they take.

    ``title`` says what is in force when all steps are done: ``MPS on GPU 0: threads 30 % per client``. ``parts`` are the
    plans that this one joins, each with its own title and undo.
    """

    title: str
    steps: tuple[Step, ...]
    undo: str | None = None
    notes: tuple[str, ...] = ()
    consent: tuple[Loss, ...] = ()
    parts: tuple[Plan, ...] = ()


def one_plan(plans: Sequence[Plan]) -> Plan:
    """Return several plans as one, so that a failure rolls all of them back."""
    if len(plans) == 1:
        return plans[0]
    return Plan(
        title="; ".join(plan.title for plan in plans),
        steps=tuple(step for plan in plans for step in plan.steps),
        undo="; ".join(plan.undo for plan in plans if plan.undo) or None,
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        consent=tuple(loss for plan in plans for loss in plan.consent),
        parts=tuple(plans),
    )


def one_shell_line(commands: Sequence[str]) -> str | None:
    """Return commands of which each needs those before it, as one line of the shell; None: there are none."""
    return " && ".join(commands) or None


def open_losses(losses: Sequence[Loss], agreed: Sequence[Loss]) -> tuple[Loss, ...]:
    """Return the losses that the user has not agreed to: new ones, and those with a further reason (a new holder)."""
    reasons = {(loss.action, loss.what): set(loss.why) for loss in agreed}
    return tuple(
        loss
        for loss in losses
        if (loss.action, loss.what) not in reasons or not set(loss.why) <= reasons[loss.action, loss.what]
    )


# How many losses and reasons a question names; the plan has all of them.
_NAMED: Final = 6


def describe_losses(losses: Sequence[Loss]) -> str:
    """Return losses in words: ``destroys A (named 'train') and B (granted to alice), and ends C``."""
    # Of more, the last place says how many are not named.
    shown = losses if len(losses) <= _NAMED else losses[: _NAMED - 1]
    actions = list(dict.fromkeys(loss.action for loss in shown))
    parts = [f"{action} {_join_words([str(loss) for loss in shown if loss.action == action])}" for action in actions]
    if len(shown) < len(losses):
        parts.append(f"takes {len(losses) - len(shown)} more")
    return _join_words(parts, ", and " if len(parts) > 1 and len(shown) > 2 else " and ")


def _join_words(words: Sequence[str], last: str = " and ") -> str:
    """Return words with commas between them, and ``last`` before the last one."""
    return last.join(filter(None, [", ".join(words[:-1]), words[-1]]))


def setting_step(
    *,
    what: str,
    command: str,
    undo: str | None = None,
    setting: str,
    read: Callable[[], T | None],
    write: Callable[[T], object],
    wanted: T,
    in_words: Callable[[T], object],
    see: str,
    gpu: str | None = None,
    allowed: Callable[[], object],
) -> Step:
    """Return a step that gives one setting a value: read, write, read back; undone, the value found is written back.

    ``read`` returns None where the host does not tell the value; such a value cannot come back. ``setting`` names it in
    the error of a value that is not held (`NotHeld`), ``in_words`` prints a value and ``see`` is the command that shows
    it. ``allowed`` raises for a user who may not change it; a setting that has its value already needs no permission.

    The value to restore is the one found when the step acts, not the one at planning: what another process changed
    before is its own. The undo writes nothing where the host has that value, so a step that failed before
    it changed anything undoes nothing.
    """
    values_before: list[T] = []

    def put(value: T) -> None:
        """Write a value and read it back."""
        allowed()
        write(value)
        held = read()
        if held != value:
            now = "unknown" if held is None else in_words(held)
            raise NotHeld(f"{setting} was set to {in_words(value)} but reads back as {now}", f"see: {see}", gpu=gpu)

    def act() -> None:
        """Write the wanted value, unless the host has it, and keep the one found for `back`."""
        now = read()
        if now == wanted:
            return
        if now is not None:
            # Noted before the write, which may fail half way.
            values_before.append(now)
        put(wanted)

    def back() -> None:
        """Write the value found back, unless the host has it."""
        while values_before:
            before = values_before.pop()
            if read() != before:
                put(before)

    return Step(what=what, command=command, undo=undo, do=act, revert=back)


def deferred_step(what: str, command: str, make: Callable[[], Sequence[Step]], *, undo: str | None = None) -> Step:
    """Return one step made of several, which ``make`` plans when it acts."""
    done: list[Step] = []

    def act() -> None:
        for step in make():
            # Noted before it acts, as in `carry_out`.
            done.append(step)
            step.do()

    def back() -> None:
        while done:
            step = done.pop()
            if step.revert is not None:
                step.revert()

    return Step(what=what, command=command, undo=undo, do=act, revert=back)


def carry_out(plan: Plan, on_step: Callable[[Step], None] | None = None) -> None:
    """Do the steps in order. If one fails, undo it and those before it, last first, and raise its error.

    The error is a NotUndone with the same code if some steps could not be undone.
    """
    done: list[Step] = []
    try:
        for step in plan.steps:
            if on_step is not None:
                on_step(step)
            # Noted before it acts: a step that fails half way is undone, too.
            done.append(step)
            step.do()
    except (GpushareError, OSError) as error:
        not_undone = roll_back(done)
        reported = error if isinstance(error, GpushareError) else system_error(error)
        # Without an error to report it is a bug in gpushare, which shows itself.
        if not_undone and reported is not None:
            raise _not_undone_error(reported, not_undone) from error
        raise
    except KeyboardInterrupt:
        # Ctrl-C leaves nothing half done.
        not_undone = roll_back(done)
        if not_undone:
            raise _not_undone_error(Interrupted("interrupted", "see: gpushare status"), not_undone) from None
        raise
    except BaseException:
        roll_back(done)
        raise


def roll_back(done: Sequence[Step]) -> list[tuple[Step, GpushareError]]:
    """Undo steps, last first; return those that could not be undone, with the reason.

    Ctrl-C is ignored meanwhile: it would leave the host half changed.
    """
    not_undone: list[tuple[Step, GpushareError]] = []
    with ending_signals_ignored():
        for step in reversed(done):
            if step.revert is None:
                continue
            try:
                step.revert()
            except GpushareError as error:
                not_undone.append((step, error))
            except Exception as error:  # noqa: BLE001 - after any error the steps before are undone, too
                reason = OperationFailed(f"{type(error).__name__}: {error}", "see: gpushare doctor")
                not_undone.append((step, reason))
    return not_undone


def _not_undone_error(error: GpushareError, not_undone: Sequence[tuple[Step, GpushareError]]) -> GpushareError:
    """Return the error of a failed step, with the steps that could not be undone, and the commands that undo them."""
    names: list[str] = []
    commands: list[str | None] = []
    for step, reason in not_undone:
        if reason.code == NOT_RESTORED:
            # Of a change of MIG: the error says itself what is missing, and which commands restore it.
            names.append(reason.message)
            commands.append(reason.hint)
        else:
            names.append(f"{step.what} ({reason.message})")
            commands.append(step.undo)
    by_hand = "; ".join(filter(None, commands))
    can_recover = any(reason.code == NOT_RESTORED for _, reason in not_undone)
    first = "restore it: gpushare mig recover; or " if can_recover else "undo "
    return error.restated(
        message=f"{error.message}; these steps could not be undone: {'; '.join(names)}",
        hint=f"{first}by hand: {by_hand}" if by_hand else None,
        kind=NotUndone,
    )
