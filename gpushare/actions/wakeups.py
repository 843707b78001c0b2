"""Signals as something to wait for: no handler interrupts the work, none is lost.

A signal that is ignored when gpushare starts (nohup, a script's background job) stays ignored: a handler here would make
gpushare act on it, and give the programs that it starts the default in its place.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Sequence
from types import TracebackType


class Wakeups:
    """Catches signals while it is entered; `wait` returns those that came."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, object] = {}
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._fd_before = -1

    def __enter__(self) -> Wakeups:
        """Take the signals over."""
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGCHLD:
                continue
            # The byte in the wake-up socket is the message; the handler only keeps the default away.
            self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._fd_before)
        self._read.close()
        self._write.close()

    def wait(self, seconds: float) -> list[int]:
        """Wait at most ``seconds`` for a signal and return all that came, in their order."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        if not ready:
            return []
        try:
            return [number for number in self._read.recv(4096) if number in self._numbers]
        except BlockingIOError:
            return []
