"""The guard: a process of its own that acts if gpushare dies without a word (`python guard.py WHEN SPEC MODULE:FUNCTION WORD...`).

Started by path so that nothing in the user's folder can replace the package, and in a session of its own so that no
signal of the terminal reaches it. It writes ``ready`` and reads lines: ``PID STARTED`` (``-``: unknown) and ``PID ended``
name the processes that gpushare answers for; a line of one word is the last. After ``done`` it ends. After another word,
and after none, when gpushare has died, it calls the function with the host, the processes, that word, and its arguments.
WHEN is ``early`` if it loads the function at once, and then writes ``loaded``.
"""

from __future__ import annotations

# Little, and late: a swap waits for the start of its guard, and almost no guard has anything to do.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from typing import IO, Any

    from gpushare.base.errors import OperationFailed

DONE = "done"
_READY = b"ready\n"
_LOADED = b"loaded\n"
_START_SECONDS = 20.0


class Guard:
    """The guard as gpushare sees it. ``duty`` is what it does, in messages: ``ends the pause``."""

    # Those that outlive this object are reaped here; those that outlive gpushare, by init.
    _started: list[subprocess.Popen[bytes]] = []  # noqa: RUF012 - of all objects

    def __init__(
        self, spec: str, duty: str, act: str, *words: str, early: bool = False, descriptors: Sequence[int] = ()
    ) -> None:
        """Start it for the host ``spec``; it inherits the open ``descriptors``.

        ``act`` is the ``MODULE:FUNCTION`` that it calls if gpushare dies, with ``words`` as further arguments. ``early``: it
        loads that function at once, because it will be told to act (`hand_over`).

        Raises:
            OperationFailed: it does not start (code ``guard_failed``).
        """
        import subprocess
        from typing import cast

        self._duty, self._early = duty, early
        try:
            self._process = subprocess.Popen(
                [sys.executable, os.path.realpath(__file__), "early" if early else "late", spec, act, *words],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=descriptors,
            )
        except OSError as error:
            from gpushare.base.errors import system_error

            system = system_error(error)
            hint = None if system is None else system.hint
            raise self._guard_failed_error(f"does not start: {error.strerror or error}", hint) from error
        # `poll` reaps the guards that have ended.
        self._started[:] = [*(guard for guard in self._started if guard.poll() is None), self._process]
        self._words = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)
        self.pid = self._process.pid

    def _guard_failed_error(self, failure: str, hint: str | None = None) -> OperationFailed:
        """Return the error about a guard; ``failure`` completes the sentence: ``does not start: it ended``."""
        import shlex

        from gpushare.base.errors import OperationFailed

        return OperationFailed(
            f"the guard, which {self._duty}, {failure}",
            hint or f"see what starts it: ls -l {shlex.quote(sys.executable)}",
            code="guard_failed",
        )

    def wait_ready(self) -> None:
        """Wait until the guard reads what it is told. Raises OperationFailed: it does not, and was ended."""
        self._wait_for(_READY)

    def _wait_for(self, word: bytes) -> None:
        """Wait until the guard writes a word. Raises OperationFailed: it does not, and was ended."""
        import select

        ready, _, _ = select.select([self._answers], [], [], _START_SECONDS)
        if not ready or self._answers.read(len(word)) != word:
            self._process.kill()
            self.leave()
            self.wait()
            reason = "it ended" if ready else f"it does not answer within {_START_SECONDS:g} s"
            raise self._guard_failed_error(f"does not start: {reason}")

    def announce(self, pid: int, started: int | None) -> None:
        """Announce a process from within it, before its program runs: gpushare may be killed at any point.

        Raises:
            OSError: the guard is gone; nothing may run unguarded.
        """
        self._write(_line_of_process(pid, started))

    def add_process(self, pid: int, started: int | None) -> None:
        """Name a process that the guard looks after if gpushare dies. If the guard was killed, the programs go on."""
        self._tell(_line_of_process(pid, started))

    def remove_process(self, pid: int) -> None:
        """Tell the guard that a process no longer needs it."""
        self._tell(f"{pid} ended")

    def hand_over(self, word: str) -> None:
        """Tell the guard to act, with a last word. Raises OperationFailed: it is gone, or cannot load what it does."""
        if self._early:
            self._wait_for(_LOADED)
        try:
            self._write(word)
        except OSError as error:
            hint = "try again; see what ended it: journalctl -e"
            raise self._guard_failed_error(f"is gone: {error.strerror}", hint) from error

    def leave(self, word: str | None = None) -> None:
        """Close the guard's input, after a last word; without one it acts as if gpushare had died."""
        if word is not None:
            self._tell(word)
        for pipe in (self._words, self._answers):
            pipe.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the guard has ended, at most ``seconds``; return whether it has."""
        import subprocess

        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _tell(self, line: str) -> None:
        """Write a line to the guard; if it is gone, nothing happens."""
        try:  # noqa: SIM105 - contextlib takes longer to load
            self._write(line)
        except (OSError, ValueError):
            pass

    def _write(self, line: str) -> None:
        """Write a line by one call: it arrives whole, between those of other processes. Raises OSError: the guard is gone."""
        os.write(self._words.fileno(), f"{line}\n".encode())


def _line_of_process(pid: int, started: int | None) -> str:
    return f"{pid} {'-' if started is None else started}"


def main() -> None:
    """Wait for the last word, or the end of gpushare, and act unless that word is `DONE`."""
    import signal

    _, when, spec, act_name, *words = sys.argv

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Not the directory of this file, which Python has put there.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    _report(_READY)
    loaded = None
    if when == "early":
        loaded = _load(spec, act_name)
        _report(_LOADED)
    word, processes = _listen()
    if word != DONE:
        # gpushare no longer reads the output.
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        host, act = loaded or _load(spec, act_name)
        act(host, processes, word, *words)


def _listen() -> tuple[str, dict[int, int | None]]:
    """Return gpushare's last word (empty: it died without one), and the starts of the processes it answers for, by PID."""
    processes: dict[int, int | None] = {}
    for line in sys.stdin:
        first, _, started = line.strip().partition(" ")
        if not started:
            return first, processes
        processes.pop(int(first), None)
        if started != "ended":
            processes[int(first)] = None if started == "-" else int(started)
    return "", processes


def _report(word: bytes) -> None:
    """Write a word to gpushare, which may have died meanwhile."""
    try:  # noqa: SIM105 - as above
        os.write(1, word)
    except OSError:
        pass


def _load(spec: str, act_name: str) -> tuple[Any, Callable[..., None]]:
    import importlib

    module, _, function = act_name.partition(":")
    host = importlib.import_module("gpushare.connect").connect(spec)
    return host, getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    main()
    # Nothing is left to write, and to take the modules down would be a sixth of all its work.
    os._exit(0)
