"""A terminal that is the same everywhere: time zone, colours, width."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator

import pytest

from gpushare.show.render import write
from gpushare.show.result import OutputFormat, Result


class Screen(io.StringIO):
    """A stream that says whether it is a terminal, and in which encoding."""

    def __init__(self, *, terminal: bool = False, encoding: str = "utf-8") -> None:
        super().__init__(newline="")
        self.terminal = terminal
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        text.encode(self._encoding)
        return super().write(text)


Shown = tuple[str, str]


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fix what a rendering may depend on."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shown]:
    """Return a function that writes a result and gives back what stdout and stderr got."""

    def run(
        result: Result,
        output: OutputFormat,
        *,
        terminal: bool = False,
        encoding: str = "utf-8",
        quiet: bool = False,
        width: int | None = None,
    ) -> Shown:
        stdout, stderr = Screen(terminal=terminal, encoding=encoding), Screen(encoding=encoding)
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        write(result, output, stdout=stdout, stderr=stderr, quiet=quiet)
        return stdout.getvalue(), stderr.getvalue()

    return run
