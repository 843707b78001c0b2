"""Arranging simulated hosts: processes, faults, MIG, and forgetting them again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare.base.errors import BadUsage
from gpushare.sim import admin, open_simulated

SPEC = "sim:2xh200"


def test_opening_a_host_creates_it_once(sim_dir: Path) -> None:
    host = open_simulated("sim:h200, H200")
    assert host.spec == SPEC
    assert host.run_directory.parent.parent == sim_dir
    assert (host.uid, host.root) == (os.geteuid(), True)
    admin.set_fault(SPEC, "user", value="1000")
    host = open_simulated(SPEC)
    assert (host.uid, host.root) == (1000, False)
    assert len(admin.list_hosts()) == 1
    with pytest.raises(BadUsage):
        open_simulated("sim:nothing")


def test_a_broken_state_file_does_not_hide_the_other_hosts(sim_dir: Path) -> None:
    open_simulated(SPEC)
    (sim_dir / "other").mkdir()
    (sim_dir / "other" / "state.json").write_text("{")
    assert [host.spec for host in admin.list_hosts()] == [SPEC]
