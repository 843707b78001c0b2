"""The line of a job that waits: drawn on a terminal, told elsewhere when something changes."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace

import pytest

from gpushare.show import waiting
from gpushare.show.waiting import waiting_line


class Terminal(io.StringIO):
    """A terminal of a width."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(waiting, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(waiting.os, "get_terminal_size", lambda _descriptor: os.terminal_size((40, 24)))
    return stream


def test_on_a_terminal_one_line_moves_and_goes(terminal: Terminal) -> None:
    said: list[str] = []
    with waiting_line(said.append) as draw:
        draw("waiting for 1.0 GiB", 0.4, None)
        draw("waiting for 1.0 GiB, 2 jobs before it: GPU 0 is full", 65.0, 7200.0)
    first, second, cleared = terminal.getvalue().split("\r\x1b[K")[1:]
    assert (first, cleared, said) == ("0 s: waiting for 1.0 GiB", "", [])
    assert second == "1 min 5 s of 2 h: waiting for 1.0 GiB,…"[:38] + "…"
    assert "\n" not in terminal.getvalue()


def test_what_others_write_cannot_leave_the_line(terminal: Terminal) -> None:
    with waiting_line(lambda _: None) as draw:
        draw("held by\n\x1b[2Jx", 1.0, None)
    assert "\x1b[2J" not in terminal.getvalue()
    assert "\n" not in terminal.getvalue()


def test_ctrl_c_leaves_no_line(terminal: Terminal) -> None:
    def interrupted() -> None:
        with waiting_line(lambda _: None) as draw:
            draw("waiting", 1.0, None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("term", "quiet"), [("dumb", False), ("xterm", True)])
def test_no_line_is_drawn_where_it_is_not_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, term: str, quiet: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    said: list[str] = []
    with waiting_line(said.append, quiet=quiet) as draw:
        draw("waiting", 1.0, None)
    assert (terminal.getvalue(), said) == ("", [] if quiet else ["waiting"])


def test_elsewhere_it_says_what_is_new_and_not_what_changes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "sys", SimpleNamespace(stderr=io.StringIO()))
    said: list[str] = []
    texts = [
        "GPU 0 has 3.5 GiB free to reserve",
        "GPU 0 has 900 MiB free to reserve",
        "GPU 0 has 0 B free to reserve",
        "GPU 1 has 2.0 GiB free to reserve",
    ]
    with waiting_line(said.append) as draw:
        for text in texts:
            draw(text, 1.0, None)
    assert said == [texts[0], texts[-1]]
