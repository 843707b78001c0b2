"""Asking several MPS daemons for their state at once, under one bound of time, and what of it is believed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, OperationFailed, TimedOut
from gpushare.host.kept_file import read_tail
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_text import Overview, parse_memory

if TYPE_CHECKING:
    from gpushare.host.program import Programs

# For all daemons of a look together; one answers within 2 ms on an H200.
LOOK_SECONDS: Final = 3.0
# Conversations at a time: each is a child process.
_AT_ONCE: Final = 16
_LOG_TAIL_BYTES: Final = 256 * 1024
_SET: Final = re.compile(
    r"Cmd:set_default_device_pinned_mem_limit (0|(?:GPU|MIG)-[0-9a-fA-F-]{1,60}) (\S{1,20})\s*\n(?:\[[^\]\n]*\] *(.*))?",
    re.ASCII,
)


def overviews(
    programs: Programs, pipe_directories: Sequence[str], seconds: float | None = None
) -> list[Overview | GpushareError]:
    """Return what each daemon tells of itself, or why it does not, in the order asked."""
    seconds = LOOK_SECONDS if seconds is None else seconds
    until = time.monotonic() + seconds
    found: list[Overview | GpushareError | None] = [None] * len(pipe_directories)
    left = iter(list(enumerate(pipe_directories)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number, pipe = next(left, (-1, ""))
            if number < 0:
                return
            found[number] = _overview(programs, pipe, until, seconds)

    # Its own thread for each but the first: one daemon, the usual case, needs none.
    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(pipe_directories)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    return [one if one is not None else _late(pipe, seconds) for one, pipe in zip(found, pipe_directories, strict=True)]


def _overview(programs: Programs, pipe: str, until: float, seconds: float) -> Overview | GpushareError:
    if time.monotonic() >= until:
        return _late(pipe, seconds)
    try:
        return MpsControl(programs, pipe, seconds=seconds, until=until).overview()
    except GpushareError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a thread that dies would leave its daemon without a word
        return OperationFailed(f"the MPS daemon at {pipe} cannot be asked: {error}", "see: gpushare doctor")


def _late(pipe: str, seconds: float) -> TimedOut:
    return TimedOut(
        f"the MPS daemon at {pipe} was not asked: others did not answer within {seconds:g} s",
        "see: gpushare doctor",
        code="daemon_hangs",
    )


def logged_limit(log_directory: str | None, uuid: str) -> int | None:
    """Return the default memory limit that a daemon was last given for its device, by number or UUID, or None.

    The daemon prints whole G, and nothing for a limit that was set by UUID (seen on 535 and 550): only its log tells.
    A command that it refused does not count.
    """
    text = read_tail(Path(log_directory or "/nonexistent") / "control.log", _LOG_TAIL_BYTES)
    # A limit that an earlier daemon in this directory was given died with it.
    text = text[max(0, text.rfind("Starting control daemon using socket")) :]
    limit = None
    for device, value, answer in _SET.findall(text):
        if device in {"0", uuid} and "privilege" not in answer:
            limit = parse_memory(value)
    return limit or None
