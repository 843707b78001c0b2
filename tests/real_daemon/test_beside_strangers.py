"""Our own daemons beside a user who holds what is open to everybody in their pipe directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.mps.daemons import FoundDaemon, find_daemons
from gpushare.mps.home import home_of
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.mps.stop import Stop
from gpushare.plan import carry_out
from tests.cli.drive import until
from tests.real_daemon.conftest import daemons_below
from tests.real_daemon.strangers import STRANGER, acting, connects, locks

pytestmark = pytest.mark.needs_root


def start(host: Host, device: Device) -> FoundDaemon:
    carry_out(plan_start(host, device, Limits()))
    (found,) = find_daemons(host, [device.gpu])
    return found


def test_a_stranger_who_locks_what_a_crash_left_does_not_hinder_the_next_start(
    host: Host, device: Device, sim_dir: Path
) -> None:
    sim_dir.chmod(0o755)
    crashed = start(host, device).daemon.pid
    assert crashed is not None
    os.kill(crashed, signal.SIGKILL)
    until(lambda: not daemons_below(sim_dir), "its daemons have ended")
    with acting(STRANGER, lambda: locks(home_of(host.run_directory, device.uuid).pipe)) as got:
        assert got
        found = start(host, device)
        assert [found.daemon.pid] == daemons_below(sim_dir)
        Stop(host, found, device, drain_seconds=0.0, force=False).run()


def test_force_stops_a_daemon_whose_connection_a_stranger_holds(host: Host, device: Device, sim_dir: Path) -> None:
    sim_dir.chmod(0o755)
    found = start(host, device)
    with acting(STRANGER, lambda: connects(home_of(host.run_directory, device.uuid).pipe)) as got:
        assert got
        stop = Stop(host, found, device, drain_seconds=0.0, force=True)
        stop.run()
        assert (stop.forced, daemons_below(sim_dir)) == (True, [])
        # Nor does he hinder the next one.
        again = start(host, device)
        Stop(host, again, device, drain_seconds=0.0, force=False).run()
    assert daemons_below(sim_dir) == []
