"""Plans: steps with the plain command that each equals, its undo, and a way back when a later one fails."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Final, TypeVar

from gpushare.errors import GpushareError, Interrupted, NotHeld, OperationFailed, system_error
from gpushare.values import dataclass

T = TypeVar("T")
# The code of an error that names all that could not come back, and the command for it.
NOT_RESTORED: Final = "not_restored"


class NotUndone(OperationFailed):
    """A step failed, and of the steps before it some could not be undone; the message names them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a plan.

    ``command`` is the plain vendor command that it equals and ``undo`` the one that takes it back.
    ``do`` acts and reads back: it raises unless the host says that it is so. ``revert`` undoes it.
    """

    what: str
    command: str
    undo: str | None = None
    do: Callable[[], None] = field(repr=False)
    revert: Callable[[], None] | None = field(default=None, repr=False)
    # False: it only looks.
    changes: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps in order; ``undo`` is the gpushare command that takes all of it back."""

    title: str
    steps: tuple[Step, ...]
    undo: str | None = None
    notes: tuple[str, ...] = ()


def setting_step(
    *,
    what: str,
    command: str,
    undo: str | None = None,
    setting: str,
    read: Callable[[], T | None],
    write: Callable[[T], object],
    wanted: T,
    in_words: Callable[[T], object] = str,
    see: str,
    gpu: str | None = None,
    allowed: Callable[[], object] = lambda: None,
) -> Step:
    """Return a step that gives one setting a value: read, write, read back; undone, the value found is written back.

    ``read`` returns None where the host does not tell the value; such a value cannot come back. ``setting`` names it in
    the error of a value that is not held (`NotHeld`), ``in_words`` prints a value and ``see`` is the command that shows
    it. ``allowed`` raises for a user who may not change it; a setting that has its value already needs no permission.

    The value to restore is the one found when the step acts, not the one at planning: what another process changed
    before is its own. Nothing is written on the way back where the host has that value, so a step that failed before
    it changed anything undoes nothing.
    """
    found: list[T] = []

    def put(value: T) -> None:
        allowed()
        write(value)
        held = read()
        if held != value:
            now = "unknown" if held is None else in_words(held)
            raise NotHeld(f"{setting} was set to {in_words(value)} but reads back as {now}", f"see: {see}", gpu=gpu)

    def act() -> None:
        now = read()
        if now == wanted:
            return
        if now is not None:
            # Noted before the write, which may fail half way.
            found.append(now)
        put(wanted)

    def back() -> None:
        while found:
            before = found.pop()
            if read() != before:
                put(before)

    return Step(what=what, command=command, undo=undo, do=act, revert=back)


def deferred(
    what: str, command: str, makes: Sequence[Callable[[], Sequence[Step]]], *, undo: str | None = None
) -> Step:
    """Return one step made of several that are planned only when it acts, each list after the one before was done."""
    done: list[Step] = []

    def act() -> None:
        for make in makes:
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
    """Do the steps in order; when one fails, undo those before it, last first, and raise its error.

    Raises:
        GpushareError: the error of the failed step.
        NotUndone: the same, with its code and exit code, where some could not be undone.
    """
    done: list[Step] = []
    try:
        for step in plan.steps:
            if on_step is not None:
                on_step(step)
            # Noted before it acts: a step that fails half way is undone too.
            done.append(step)
            step.do()
    except (GpushareError, OSError) as error:
        left, said = roll_back(done), _said(error)
        if left and said is not None:
            raise _not_undone(said, left) from error
        raise
    except KeyboardInterrupt:
        # Ctrl-C in the middle leaves nothing half done either.
        left = roll_back(done)
        if left:
            raise _not_undone(Interrupted("interrupted", "see: gpushare status"), left) from None
        raise
    except BaseException:
        roll_back(done)
        raise


def _said(error: GpushareError | OSError) -> GpushareError | None:
    """Return the error as it is told: a full disk is one, too. None: what the system says is a fault of ours."""
    return error if isinstance(error, GpushareError) else system_error(error)


def roll_back(done: Sequence[Step]) -> list[tuple[Step, GpushareError]]:
    """Undo steps, last first; return those that could not be, with the reason.

    Ctrl-C waits until all is undone: a second one would leave the host half changed.
    """
    left: list[tuple[Step, GpushareError]] = []
    with _undisturbed():
        for step in reversed(done):
            if step.revert is None:
                continue
            try:
                step.revert()
            except GpushareError as error:
                left.append((step, error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the steps before it are undone too
                left.append((step, OperationFailed(f"{type(error).__name__}: {error}", "see: gpushare doctor")))
    return left


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C and what ends like it do nothing. Only the main thread has a say in signals, and is interrupted by them.

    By a handler, which no program inherits: a daemon that is started here would ignore SIGTERM for ever.
    """
    before = {}
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: not Python's handler, and not to be had back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _not_undone(error: GpushareError, left: Sequence[tuple[Step, GpushareError]]) -> GpushareError:
    # Where one step undoes several, its error says what is missing, and with which command it comes back.
    whole = [reason.code == NOT_RESTORED for _, reason in left]
    names = "; ".join(
        reason.message if is_whole else f"{step.what} ({reason.message})"
        for (step, reason), is_whole in zip(left, whole, strict=True)
    )
    commands = "; ".join(
        filter(None, (reason.hint if w else step.undo for (step, reason), w in zip(left, whole, strict=True)))
    )
    return error.restated(
        message=f"{error.message}; and could not be undone: {names}",
        hint=f"undo by hand: {commands}" if commands else None,
        kind=NotUndone,
    )
