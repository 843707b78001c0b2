"""Reads a host in a thread of its own, so that a GPU that hangs does not freeze the screen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpushare.base.model import Snapshot
from gpushare.top.frame import Frame

if TYPE_CHECKING:
    from gpushare.top.frame import Reader
    from gpushare.top.replay import Replay

# A look that takes longer is said to hang; the values on the screen are then old.
DEADLINE_SECONDS: Final = 3.0


class Watch:
    """Looks every ``seconds``, start to start; ``latest`` is the last frame."""

    def __init__(self, reader: Reader | Replay, seconds: float) -> None:
        self.reader, self.seconds = reader, seconds
        self.latest: Frame | None = None
        # No look is begun: the screen is held.
        self.held = False
        self._began: float | None = None
        self._wake = threading.Event()
        self._ended = threading.Event()
        # Gets each frame, in the thread.
        self.deliver: Callable[[Frame], object] = lambda _frame: None

    def start(self) -> None:
        """Begin to look. The thread is a daemon: one that hangs in the driver does not keep gpushare from ending."""
        threading.Thread(target=self._run, name="gpushare-top", daemon=True).start()

    def look_now(self) -> None:
        """Look again at once, as after an action."""
        self._wake.set()

    def end(self) -> None:
        self._ended.set()
        self._wake.set()

    def hangs_for(self) -> float | None:
        """Return for how long the look that is under way has taken, if that is too long."""
        began = self._began
        seconds = 0.0 if began is None else time.monotonic() - began
        return seconds if seconds > DEADLINE_SECONDS else None

    def _run(self) -> None:
        """Read frames until the end; the thread's function."""
        while not self._ended.is_set():
            if self.held:
                self._wake.wait()
                self._wake.clear()
                continue
            began = self._began = time.monotonic()
            try:
                frame = self.reader.read()
            except Exception as error:  # noqa: BLE001 - the screen stays and says so; the next look may succeed
                text = f"unexpected {type(error).__name__}: {error}\nthis is a bug in gpushare; see: gpushare status --debug"
                frame = Frame(at=time.time(), snapshot=Snapshot(host="-"), error=text)
            self._began = None
            if self._ended.is_set():
                return
            self.latest = frame
            self.deliver(frame)
            self._wake.wait(max(0.0, began + self.seconds - time.monotonic()))
            self._wake.clear()
