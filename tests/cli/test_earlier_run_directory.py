"""What an older gpushare of the same user left in another run directory is found, used and ended like the rest."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.host.checkpoint import CHECKPOINTED, RUNNING
from gpushare.host.host import Host
from gpushare.mps.home import own_home
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.plan import carry_out
from gpushare.run.group import Member, members, write_member
from gpushare.run.jobs import record_of, write_record
from gpushare.selection import Device, select_one
from gpushare.sim import admin
from gpushare.timeslice.slices import SliceRecord, _note, put_record_back, slice_record
from tests.cli.conftest import Cli
from tests.cli.drive import H200, World


@pytest.fixture
def earlier(world: World) -> Path:
    """Make the directory, and return it."""
    world.run("status")
    directory = world.host.run_directory.with_name("earlier")
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    return directory


@pytest.fixture
def device(world: World) -> Device:
    return select_one("0", world.host.nvml.sweep())


def moved(world: World, earlier: Path, room: str) -> None:
    """Move the records of a room to where an older gpushare had them."""
    (world.host.run_directory / room).rename(earlier / room)


def old_host(world: World, earlier: Path) -> Host:
    return replace(world.host, run_directory=earlier, earlier_run_directories=())


def job(world: World, earlier: Path, device: Device, role: str = "plain") -> int:
    """Start a job named train, noted in the earlier directory."""
    pid = admin.add_process(H200, name="train")
    write_record(old_host(world, earlier), record_of(world.host, device, "train", pid, role))
    return pid


def test_a_job_is_found_by_name_and_its_name_is_taken(cli: Cli, world: World, earlier: Path, device: Device) -> None:
    job(world, earlier, device)
    cli("pause", "train").ok()
    cli("resume", "train").ok()
    assert cli("-o", "json", "run", "--name", "train", "--", "true").error["code"] == "name_in_use"


def test_a_job_that_is_out_comes_back(cli: Cli, world: World, earlier: Path, device: Device) -> None:
    pid = job(world, earlier, device)
    cli("swap", "out", "train").ok()
    moved(world, earlier, "swap")
    path = earlier / "swap" / f"{pid}.json"
    (found,) = cli("swap", "list", output="json").ok().data["jobs"]
    assert (found["pid"], found["state"], found["by"]) == (pid, "out", None)
    assert cli("status", output="json").ok().data["swapped_jobs"][0]["pid"] == pid
    assert cli("swap", "out", "train", output="json").error["code"] == "already_out"
    cli("swap", "in", "train").ok()
    assert world.process(pid).checkpoint == RUNNING
    assert json.loads(path.read_text())["state"] == "back"
    # Out again: the later record, in the directory for what is new, counts.
    cli("swap", "out", "train").ok()
    assert world.process(pid).checkpoint == CHECKPOINTED
    (found,) = cli("swap", "list", output="json").ok().data["jobs"]
    assert found["state"] == "out"
    cli("swap", "in", "train").ok()
    assert cli("swap", "list", output="json").ok().data["jobs"] == []
    admin.end_process(H200, pid)
    cli("swap", "list").ok()
    assert not path.exists()


def test_a_paused_job_is_resumed(cli: Cli, world: World, earlier: Path, device: Device) -> None:
    pid = job(world, earlier, device)
    cli("pause", "train").ok()
    moved(world, earlier, "pause")
    (found,) = cli("pause", "list", output="json").ok().data["jobs"]
    assert found["pid"] == pid
    cli("resume", "train").ok()
    assert world.process(pid).channels_off == []
    assert not list((earlier / "pause").glob("*.json"))


def test_a_daemon_is_joined_and_stopped(cli: Cli, world: World, earlier: Path, device: Device, tmp_path: Path) -> None:
    carry_out(plan_start(old_host(world, earlier), device, Limits()))
    pipe = str(own_home(world.host, device.uuid).pipe)
    assert pipe.startswith(f"{earlier}/")
    (daemon,) = cli("mps", "status", output="json").ok().data["mps_daemons"]
    assert (daemon["ours"], daemon["pipe_directory"]) == (True, pipe)
    assert pipe in cli("mps", "env", "-g", "0").ok().out
    assert cli("mps", "start", "-g", "0", output="json").error["code"] == "daemon_exists"
    cli("mps", "set", "-g", "0", "--threads", "50").ok()
    cli("run", "-g", "0", "--", "sh", "-c", f"echo $CUDA_MPS_PIPE_DIRECTORY > {tmp_path}/pipe").ok()
    assert (tmp_path / "pipe").read_text() == f"{pipe}\n"
    cli("mps", "stop", "-g", "0").ok()
    assert cli("mps", "status", output="json").ok().data["mps_daemons"] == []
    # The next one is where everything new is.
    cli("mps", "start", "-g", "0").ok()
    assert own_home(world.host, device.uuid).directory.is_relative_to(world.host.run_directory)


def test_a_daemon_that_died_there_is_cleared_away_there(cli: Cli, world: World, earlier: Path, device: Device) -> None:
    carry_out(plan_start(old_host(world, earlier), device, Limits()))
    home = own_home(world.host, device.uuid)
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    assert cli("mps", "status", output="json").data["mps_daemons"][0]["error"]
    cli("mps", "stop", "-g", "0").ok()
    assert home.read() is None


def test_members_of_a_group_and_slices_are_found(world: World, earlier: Path, device: Device) -> None:
    pid = admin.add_process(H200, name="batch")
    host, old = world.host, old_host(world, earlier)
    started = host.processes.describe(pid)
    identity = host.processes.identity(pid)
    assert started is not None
    assert identity is not None
    member = Member(pid=pid, started_at=started.started_at, device_uuid=device.uuid, slice_us=500)
    write_member(old, member)
    assert members(host, device) == (member,)
    _note(old, SliceRecord(pid=pid, started=identity.started, slice_us=500, before=("1:2=2048",), set_at=1.0))
    assert slice_record(host, pid, identity.started) is not None
    put_record_back(host, pid, None)
    assert slice_record(host, pid, identity.started) is None


def test_what_others_may_write_there_counts_for_nothing(cli: Cli, world: World, earlier: Path, device: Device) -> None:
    job(world, earlier, device)
    earlier.chmod(0o777)
    assert cli("pause", "train", output="json").error["code"] == "no_job"
