"""Windows that last as long as the copies need to print in them: how fast they do is the machine's affair."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpushare.measure.bench import Copies

# What was worked out before the last copy came may still be printed after it; the one after that is of both.
_BEFORE = 2
_WITHIN = 3


def wait_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each copy print some numbers after all have begun and before its window opens, and some in it."""
    look = Copies._poll
    stages: dict[int, tuple[Any, int]] = {}

    def patient(self: Copies, copies: Any, usage: Any) -> float:
        at = look(self, copies, usage)
        running = [copy for copy in copies if copy.program.runs]
        if self.window is None or not running or not all(copy.printed.values for copy in running):
            return at
        # The list itself is kept, so that no other has its identity.
        _, stage = stages.get(id(copies), (copies, 0))
        stages[id(copies)] = copies, stage + 1
        wanted = (_BEFORE, _WITHIN)[stage] if stage < 2 else 0
        before = [len(copy.printed.values) for copy in running]
        while any(
            len(copy.printed.values) < count + wanted for copy, count in zip(running, before, strict=True)
        ) and all(copy.program.runs for copy in running):
            time.sleep(0.01)
            at = look(self, copies, usage)
        return at

    monkeypatch.setattr(Copies, "_poll", patient)
