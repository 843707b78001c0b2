"""What the guard makes of what it is told, when gpushare has died."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from gpushare.run import guard, share


@pytest.mark.parametrize(("moved", "boot_time"), [(-3600.0, True), (0.0, True), (0.0, False)])
def test_a_clock_that_is_set_does_not_make_its_programs_strangers(
    monkeypatch: pytest.MonkeyPatch, moved: float, boot_time: bool
) -> None:
    """They would be neither ended nor let go on: start times come from the boot time, which moves with the clock."""
    ended: list[Mapping[int, float | None]] = []
    boot_times = iter([1000.0, 1000.0 + moved] if boot_time else [None, None])

    def after_death(spec: str, uuid: str, index: int, programs: Mapping[int, float | None], **_told: Any) -> None:
        ended.append(programs)

    monkeypatch.setattr(share, "after_death", after_death)
    monkeypatch.setattr(guard, "_boot_time", lambda: next(boot_times))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["guard.py", sys.path[0], "sim:h200", "GPU-a", "0", "instance", "", "-1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("program 41 -\nprogram 42 -\nprogram 42 1500.0\n"))
    guard.main()
    assert ended == [{41: None, 42: 1500.0 + moved}]


def test_the_boot_time_is_the_kernels() -> None:
    psutil = pytest.importorskip("psutil")
    assert guard._boot_time() == pytest.approx(psutil.boot_time(), abs=2)
