"""The terminal of a program that runs in a process group of its own.

The program is kept in the background, so that Ctrl-C comes to gpushare alone: the terminal's SIGINT
would kill an MPS client with its queue in flight. A program that reads the terminal (a shell, a
debugger) is stopped by SIGTTIN; it is then given the terminal, and Ctrl-C is its own from there on.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpushare.host.process import Spawned


class Terminal:
    """Lends the terminal to the program when it asks for it, and takes it back."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._descriptor = _controlling_terminal()
        self._lent = False

    def __enter__(self) -> Terminal:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the terminal back."""
        self._take_back()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def serve(self, child: Spawned) -> None:
        """See whether the program was stopped by the terminal, and act on it."""
        number = child.stopped_by()
        if number in {signal.SIGTTIN, signal.SIGTTOU}:
            self._lend()
            if self._lent or self._descriptor is None or _foreground(self._descriptor) is None:
                # With a terminal that is gone the program reads its end.
                self._continue()
            else:
                # We are in the background too: stop like any job that wants the terminal. The SIGCONT
                # of `fg` is passed on, and the program asks again.
                self._stop_self()
        elif number == signal.SIGTSTP and self._lent:
            # Ctrl-Z in the program: the shell must get its terminal back, so we stop with it.
            self._take_back()
            self._stop_self()
            self._lend()
            self._continue()

    def suspend(self) -> None:
        """Ctrl-Z at gpushare: stop the program with it, and let both go on together."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGTSTP)
        self._stop_self()
        self._continue()

    def _stop_self(self) -> None:
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)

    def _continue(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGCONT)

    def _lend(self) -> None:
        if self._descriptor is not None and os.getpgrp() == _foreground(self._descriptor):
            self._lent = _give(self._descriptor, self._group)

    def _take_back(self) -> None:
        if self._lent and self._descriptor is not None:
            _give(self._descriptor, os.getpgrp())
            self._lent = False


def _controlling_terminal() -> int | None:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def _foreground(descriptor: int) -> int | None:
    try:
        return os.tcgetpgrp(descriptor)
    except OSError:
        return None


def _give(descriptor: int, group: int) -> bool:
    with _ignored(signal.SIGTTOU):
        try:
            os.tcsetpgrp(descriptor, group)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _ignored(number: int) -> Iterator[None]:
    """A background process that moves the terminal would be stopped by SIGTTOU."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
