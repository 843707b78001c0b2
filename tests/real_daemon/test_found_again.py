"""The real daemon after gpushare was killed beside it, and with what others told it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NotFound
from gpushare.base.model import ComputeMode
from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.host.host import Host
from gpushare.mps import start
from gpushare.mps.control import MpsControl
from gpushare.mps.daemons import find_daemons, own_daemon
from gpushare.mps.home import home_of
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.mps.stop import Stop
from gpushare.plan import carry_out
from tests.cli.drive import until
from tests.errors import fails
from tests.real_daemon.conftest import daemons_below


@pytest.mark.parametrize("recorded", [True, False])
def test_a_start_that_was_killed(host: Host, device: Device, recorded: bool) -> None:
    steps = plan_start(host, device, Limits(), exclusive=True).steps
    child = os.fork()
    if child == 0:
        try:
            for step in steps[:-1]:
                step.do()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    home = home_of(host.run_directory, device.uuid)
    (pid,) = daemons_below(host.run_directory)
    record = home.read()
    assert (record.interrupted, record.pid, record.previous_compute_mode) == (True, None, "DEFAULT")
    with fails(NotFound, "start_interrupted"):
        own_daemon(host, device)
    if not recorded:
        (home.directory / "daemon.json").unlink()
    (found,) = find_daemons(host, [device.gpu])
    assert (found.daemon.ours, found.daemon.pid, found.daemon.error) == (True, pid, None)
    Stop(host, found, device, drain_seconds=0.0, force=False).run()
    assert (daemons_below(host.run_directory), home.read()) == ([], None)
    if recorded:
        assert host.nvml.compute_mode(0) is ComputeMode.DEFAULT


def test_a_start_that_was_killed_is_completed_by_the_next(host: Host, device: Device) -> None:
    for step in plan_start(host, device, Limits(threads_percent=25.0), exclusive=True).steps[:-1]:
        step.do()
    (before,) = daemons_below(host.run_directory)
    carry_out(plan_start(host, device, Limits(threads_percent=50.0), exclusive=True))
    (after,) = daemons_below(host.run_directory)
    home, record = own_daemon(host, device)
    assert (before != after, record.pid, record.previous_compute_mode) == (True, after, "DEFAULT")
    assert MpsControl(host.programs, str(home.pipe)).threads() == 50.0


def test_a_limit_that_another_set(host: Host, device: Device) -> None:
    carry_out(plan_start(host, device, Limits()))
    home, _ = own_daemon(host, device)
    control = MpsControl(host.programs, str(home.pipe))
    control.ask("set_default_device_pinned_mem_limit 0 2000M")

    def held() -> Any:
        (found,) = find_daemons(host, [device.gpu])
        return found.daemon.memory_limit_bytes

    # The daemon prints whole G.
    assert held() == GIB
    control.ask("set_default_device_pinned_mem_limit 0 0G")
    assert held() is None


def test_a_daemon_that_dies_right_after_its_start(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = MpsControl.answers

    def killing(self: MpsControl, timeout: float = 5.0) -> bool:
        for pid in daemons_below(host.run_directory):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not daemons_below(host.run_directory), "its daemons have ended")
        return answers(self, timeout)

    monkeypatch.setattr(MpsControl, "answers", killing)
    monkeypatch.setattr(start, "_ANSWER_SECONDS", 1e6)
    with pytest.raises(GpushareError) as caught:
        carry_out(plan_start(host, device, Limits()))
    assert "ended right after its start" in caught.value.message
