"""Signals while something runs: they wait, are ignored, become an exception, or wake up a loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, Final

# Those by which a user ends gpushare and what it runs.
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP: handled like Ctrl-C, with rollback."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def signals_handled(
    numbers: Collection[int], handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> Iterator[None]:
    """Handle signals by ``handler`` in this block, except those that are ignored (nohup), and in the main thread only."""
    before = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            # Where ended children are ignored, their exit codes are lost.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None: not a handler of Python, which cannot be restored.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Take the place of the default action. Not SIG_IGN, which a program started meanwhile would inherit."""


def ending_signals_ignored() -> contextlib.AbstractContextManager[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP in this block: what it undoes or restores is not left half done."""
    return signals_handled(ENDING, _do_nothing)


def ended_by_exception() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP raise `Ended`, as Ctrl-C raises KeyboardInterrupt; not if the caller handles or ignores them."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Ended(number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    return signals_handled(numbers, end)


# A screen that waits for a terminal that takes nothing cannot end in order.
_GRACE_SECONDS: Final = 1.2


@contextlib.contextmanager
def leaving_on_ending_signal(leave: Callable[[], object]) -> Iterator[None]:
    """Call ``leave`` in a thread, at a signal or when the terminal is gone, so that the block ends; then raise `Ended`.

    If the block has not ended after `_GRACE_SECONDS`, the process exits at once, with the terminal's attributes restored.
    """
    import termios
    import threading

    terminal = sys.stdin.fileno()
    attributes = termios.tcgetattr(terminal)
    # The first signal, once one came.
    ended_by: list[int] = []

    def end(number: int) -> None:
        """End the block; if that takes too long, end the process."""
        if ended_by:
            return
        ended_by.append(number)
        leave()
        time.sleep(_GRACE_SECONDS)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        os._exit(128 + number)

    def in_thread(function: Callable[..., object], *arguments: object) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def end_with_the_terminal() -> None:
        # No event is asked for: it answers when the terminal is gone, also to a process that ignores SIGHUP.
        hangup = select.poll()
        hangup.register(terminal, 0)
        hangup.poll()
        end(signal.SIGHUP)

    in_thread(end_with_the_terminal)
    with signals_handled(ENDING, lambda number, _: in_thread(end, number)):
        yield
    if ended_by:
        raise Ended(ended_by[0])


@contextlib.contextmanager
def ending_signals_held() -> Iterator[Callable[[float], int | None]]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP in this block; yields a function that waits for one, at most the given number of seconds."""

    def wait(seconds: float) -> int | None:
        came = signal.sigtimedwait(ENDING, seconds)
        return None if came is None else came.si_signo

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield wait
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Wakeups:
    """Catches signals while it is entered, those that end gpushare and SIGCHLD if no others are given."""

    def __init__(self, numbers: Collection[int] = (*ENDING, signal.SIGCHLD)) -> None:
        self._numbers, self._stack = numbers, contextlib.ExitStack()
        # The first of `ENDING` that `ending_came` has seen.
        self.first: int | None = None

    def __enter__(self) -> Wakeups:
        with contextlib.ExitStack() as stack:
            self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, self._read)
            stack.callback(os.close, write)
            # The byte in this pipe is the message; the handler only replaces the default action.
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
            stack.enter_context(signals_handled(self._numbers, _do_nothing))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self, seconds: float) -> list[int]:
        """Wait at most ``seconds`` for a signal and return all that came, in order."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        return [number for number in (os.read(self._read, 4096) if ready else b"") if number in self._numbers]

    def ending_came(self, seconds: float = 0.0) -> bool:
        """Wait at most ``seconds``, less if any signal comes; return whether one that asks for the end came meanwhile."""
        numbers = [number for number in self.wait(seconds) if number in ENDING]
        self.first = self.first or next(iter(numbers), None)
        return bool(numbers)

    def end_requested(self, seconds: float) -> bool:
        """Wait as `ending_came`, and return whether a signal that asks for the end has come, meanwhile or earlier."""
        return self.ending_came(seconds) or self.first is not None
