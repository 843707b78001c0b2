"""Two conversations with an MPS daemon at once: one is dropped, and the client must survive it."""

from __future__ import annotations

import pytest

from gpushare.base.errors import NotFound
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.mps.control import MpsControl
from gpushare.mps.home import home_of
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.plan import carry_out
from gpushare.sim import admin

SPEC = "sim:h200"


@pytest.mark.parametrize("dropped", [1, 2, 3, 6])
def test_a_dropped_conversation_is_held_again(dropped: int) -> None:
    host = connect(SPEC)
    device = select_one("0", host.nvml.sweep())
    carry_out(plan_start(host, device, Limits()))
    control = MpsControl(host.programs, str(home_of(host.run_directory, device.uuid).pipe))
    control.set_threads(30.0)
    admin.set_fault(SPEC, "collide", value=str(dropped))
    assert control.threads() == 30.0
    assert control.overview().limits.threads_percent == 30.0


def test_a_daemon_that_is_gone_is_not_taken_for_a_collision() -> None:
    control = MpsControl(connect(SPEC).programs, "/nonexistent")
    with pytest.raises(NotFound):
        control.threads()
