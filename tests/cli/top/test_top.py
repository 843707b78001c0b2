"""`gpushare top` before its screen: where it is refused."""

from __future__ import annotations

import builtins
import sys
from typing import Any

from tests.cli.drive import Patch, Refused


def test_refused_without_a_terminal(refused: Refused) -> None:
    assert "gpushare status -w" in refused("top", code="no_terminal", exit_code=3)


def test_without_textual_the_command_that_adds_it(refused: Refused, monkeypatch: Patch) -> None:
    """Everything else of gpushare works without it."""
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "textual":
            raise ModuleNotFoundError(name, name="textual")
        return real(name, *rest)

    for name in [
        name for name in sys.modules if name.startswith(("textual", "gpushare.top.screen", "gpushare.top.dialogs"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("gpushare.cli.top._is_terminal", lambda: True)
    monkeypatch.setattr("builtins.__import__", without)
    assert "pip install textual" in refused("top", code="no_textual", exit_code=1)
