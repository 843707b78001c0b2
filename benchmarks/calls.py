"""Which functions of gpushare a test calls: a plugin of pytest for ``benchmarks.mutants``, which reads what this writes.

Each process of a test appends a line to the file of the test when it first calls a function: the path and the name of the
function. So a process that is killed has written, too. The processes that a test starts load this as ``sitecustomize``;
it imports little, because there are thousands of them.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import posix
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pytest

# The checkout, the directory of the files of the tests, and the file of the test that is running.
CHECKOUT: Final = "GPUSHARE_CALLS_CHECKOUT"
DIRECTORY: Final = "GPUSHARE_CALLS_DIRECTORY"
_FILE: Final = "GPUSHARE_CALLS_FILE"

_package = f"{os.environ.get(CHECKOUT, '')}/gpushare/"
_file = os.environ.get(_FILE, "")
# The functions that this process has called in this test, by the identity of their code.
_seen: set[int] = set()
_numbers = itertools.count()


def _note(frame: FrameType, _event: str, _value: Any) -> None:
    """Write down the function of a frame; what ``sys.settrace`` calls at the start of each."""
    code = frame.f_code
    if id(code) in _seen:
        return
    _seen.add(id(code))
    if code.co_filename.startswith(_package) and not code.co_name.startswith("<"):
        # Another user may not write there. Not os.open: tests replace it.
        with contextlib.suppress(OSError):
            out = posix.open(_file, posix.O_WRONLY | posix.O_APPEND)
            posix.write(out, f"gpushare/{code.co_filename.removeprefix(_package)}:{code.co_name}\n".encode())
            posix.close(out)


def _begin() -> None:
    # At its end a process takes its modules apart.
    atexit.register(sys.settrace, None)
    threading.settrace(_note)
    sys.settrace(_note)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Give each test its file; its first line is ``slow`` or ``daily`` and the test without its parameters."""
    global _file  # noqa: PLW0603 - a process runs one test at a time
    _file = os.environ[_FILE] = f"{os.environ[DIRECTORY]}/{os.getpid()}-{next(_numbers)}"
    with open(_file, "w") as out:
        out.write(f"{'slow' if item.get_closest_marker('slow') else 'daily'} {item.nodeid.split('[')[0]}\n")
    _seen.clear()
    if sys.gettrace() is None:
        _begin()


if _file:
    _begin()
