"""`gpushare timeslice show|set|reset` for processes: what is set, read back, recorded, restored, and refused."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import Interrupted, OperationFailed, TimedOut
from gpushare.host import channels
from gpushare.host.channels import ChannelControl
from gpushare.sim import admin
from gpushare.sim.processes import SimulatedProcesses
from gpushare.timeslice import slices
from gpushare.timeslice.slices import apply_slice, note_slice, restore_slice, slice_records
from tests.cli.drive import H200, Cli, Patch, Refused, Words, World


@pytest.fixture
def pid() -> int:
    return admin.add_process(H200)


def slice_of(world: World, pid: int) -> int:
    return world.process(pid).slices.get("compute", 2048)


def shown(world: World, pid: int) -> dict[str, Any]:
    (row,) = (process for process in world.run("timeslice", "show").data["processes"] if process["pid"] == pid)
    return dict(row)


def test_a_slice_is_set_shown_and_restored(world: World, pid: int) -> None:
    before = shown(world, pid)
    assert (before["slice_us"], before["set_us"], before["reason"]) == (2048, None, None)
    assert world.run("timeslice", "set", "500us", str(pid)).ok().data["undo"] == f"gpushare timeslice reset {pid}"
    assert slice_of(world, pid) == 500
    after = shown(world, pid)
    assert (after["slice_us"], after["set_us"], after["before_us"], after["slices_us"]) == (500, 500, 2048, [500])
    # Set again: the undo is the earlier one, and the first value is still the one that a reset restores.
    assert world.run("timeslice", "set", "2ms", str(pid)).data["undo"] == f"gpushare timeslice set 500us {pid}"
    # A slice has one form everywhere.
    assert world.run("timeslice", "reset", str(pid), "-n").data["undo"] == f"gpushare timeslice set 2ms {pid}"
    assert "already has a time-slice of 2ms" in world.run("timeslice", "set", "2000us", str(pid)).ok().err
    world.run("timeslice", "reset", str(pid)).ok()
    assert (slice_of(world, pid), slice_records(world.host)) == (2048, {})
    assert "gpushare has not set a time-slice" in world.run("timeslice", "reset", str(pid)).ok().err
    # The default is what processes read that nobody has set.
    assert world.run("timeslice", "show").data["gpus"][0]["default_slice_us"] == 2048
    world.run("timeslice", "set", "1ms", str(pid)).ok()
    assert world.run("timeslice", "show").data["gpus"][0]["default_slice_us"] == 2048
    world.alter(admin.add_process(H200), slices={"compute": 700})
    # Somebody else has set it, or the level has changed: they differ, so nothing is claimed.
    assert world.run("timeslice", "show").data["gpus"][0]["default_slice_us"] is None


def test_without_processes_nothing_is_read(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ChannelControl, "find", lambda *_, **__: pytest.fail("no process to read"))
    data = world.run("timeslice", "show").data
    assert (data["processes"], data["gpus"][0]["default_slice_us"]) == ([], None)


def test_in_another_pid_namespace_it_is_said_that_processes_are_missing(cli: Cli, world: World, pid: int) -> None:
    world.fault("blind")
    assert "this PID namespace is not the host's" in cli("timeslice", "show").err
    # The processes of a job are found without NVML.
    world.run("timeslice", "set", "500us", str(pid)).ok()
    assert slice_of(world, pid) == 500


def test_a_job_is_named(world: World, pid: int, monkeypatch: Patch) -> None:
    world.record("web", pid)
    assert world.run("timeslice", "set", "16ms", "web").data["undo"] == "gpushare timeslice reset web"
    assert (shown(world, pid)["job"], slice_records(world.host)[pid].job) == ("web", "web")
    world.run("timeslice", "reset", str(pid)).ok()
    assert slice_of(world, pid) == 2048
    world.run("timeslice", "set", "500us", "web").ok()
    monkeypatch.setattr(ChannelControl, "find", lambda *_, **__: pytest.fail("the driver is not asked"))
    (process,) = world.run("status").data["gpus"][0]["processes"]
    assert (process["job"], process["slice_us"]) == ("web", 500)


def test_a_dry_run_writes_nothing(world: World, pid: int, monkeypatch: Patch) -> None:
    forbidden = {channels.SET_TIMESLICE}
    real = channels._File.control

    def control(self: Any, client: int, thing: int, command: int, parameters: bytearray) -> int:
        assert command not in forbidden
        return real(self, client, thing, command, parameters)

    monkeypatch.setattr(channels._File, "control", control)
    answer = world.run("timeslice", "set", "500us", str(pid), "-n").ok()
    assert (answer.data["dry_run"], len(answer.data["steps"])) == (True, 1)
    world.run("timeslice", "show").ok()
    assert slice_records(world.host) == {}


def test_what_another_program_has_changed(cli: Cli, world: World, pid: int) -> None:
    world.run("timeslice", "set", "500us", str(pid)).ok()
    world.alter(pid, slices={"compute": 700})
    assert "another program (gpushare set 500us)" in cli("timeslice", "show").out
    assert world.run("timeslice", "set", "1ms", str(pid)).data["undo"] == f"gpushare timeslice reset {pid}"
    # What it has restored is reset all the same.
    world.run("timeslice", "set", "500us", str(pid)).ok()
    world.alter(pid, slices={})
    world.run("timeslice", "reset", str(pid)).ok()
    assert (slice_of(world, pid), slice_records(world.host)) == (2048, {})


def test_a_process_in_the_place_of_an_ended_one_has_no_record(world: World, pid: int) -> None:
    world.run("timeslice", "set", "500us", str(pid)).ok()
    (path,) = (world.host.run_directory / "slices").glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "started": record["started"] - 100}))
    assert slice_records(world.host) == {}
    assert shown(world, pid)["set_us"] is None
    assert "gpushare has not set a time-slice" in world.run("timeslice", "reset", str(pid)).ok().err
    # The next record removes those of processes that have ended.
    stale = path.with_name("999999.json")
    stale.write_text(json.dumps({**record, "pid": 999999}))
    world.run("timeslice", "set", "600us", str(pid)).ok()
    assert not stale.exists()


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("10us", "PID"), "bad_slice", 2),
        (("0us", "PID"), "bad_slice", 2),
        (("-5us", "PID"), "usage", 2),
        (("500", "PID"), "bad_slice", 2),
        (("xx", "PID"), "bad_slice", 2),
        (("99x", "PID"), "bad_weight", 2),
        (("2s", "PID"), "bad_slice", 2),
        (("short", "PID"), "bad_combination", 2),
        (("2", "PID"), "bad_combination", 2),
        (("500us",), "no_job_named", 2),
        (("500us", "PID", "-g", "0"), "bad_combination", 2),
        (("500us", "nobody"), "no_job", 6),
        (("500us", "999999"), "no_job", 6),
        (("500us", "1nobody"), "bad_name", 2),
        (("500us", str(os.getpid())), "no_context", 6),
    ],
)
def test_wrong_words(refused: Refused, world: World, pid: int, words: Words, code: str, exit_code: int) -> None:
    words = tuple(str(pid) if each == "PID" else each for each in words)
    message = refused("timeslice", "set", *words, code=code, exit_code=exit_code)
    # That is an option of `run`.
    assert "--weight" not in message
    assert (slice_of(world, pid), slice_records(world.host)) == (2048, {})


def test_a_client_of_mps_is_refused(cli: Cli, refused: Refused, world: World, pid: int) -> None:
    cli("mps", "start").ok()
    client = world.client()
    message = refused("timeslice", "set", "500us", str(client), code="under_mps", exit_code=3)
    assert "share one time-slice" in message
    # `mps set` would leave the limits of a running client as they are.
    assert "start it again" in message
    assert "mps set" not in message
    rows = {process["pid"]: process for process in world.run("timeslice", "show").data["processes"]}
    assert (rows[client]["under_mps"], rows[pid]["under_mps"]) == (True, False)
    assert not any(process.slices for process in world.state.processes)
    # The server's own group may have one, which counts for all.
    ((server,),) = (daemon.servers for daemon in world.state.daemons)
    assert "all of its clients share this slice" in world.run("timeslice", "set", "500us", str(server.pid)).ok().err
    rows = {process["pid"]: process["slice_us"] for process in world.run("timeslice", "show").data["processes"]}
    assert (rows[client], rows[server.pid], rows[pid]) == (500, 500, 2048)


def test_another_users_job_is_for_root_who_is_asked(world: World) -> None:
    other = admin.add_process(H200, user="4242")
    world.asked("timeslice", "set", "500us", str(other)).ends(19, "needs_consent")
    assert slice_of(world, other) == 2048
    undo = world.run("timeslice", "set", "500us", str(other), "-y").ok().data["undo"]
    assert slice_of(world, other) == 500
    # The undo has the consent that it needs, and so has its own.
    again = world.asked(*undo.split()[1:]).ok().data["undo"]
    assert slice_of(world, other) == 2048
    world.asked(*again.split()[1:]).ok()
    assert (slice_of(world, other), world.asked("timeslice", "reset", str(other)).code) == (500, 19)
    world.fault("user", "4243")
    for words in (("set", "500us", str(other)), ("reset", str(other))):
        world.run("timeslice", *words, "-y").ends(4, "other_user")
    row = next(process for process in world.run("timeslice", "show").data["processes"] if process["pid"] == other)
    assert (row["slice_us"], row["reason"]) == (None, "other_user")


def test_a_long_slice_is_for_root_who_is_asked(world: World, pid: int) -> None:
    assert world.asked("timeslice", "set", "40ms", str(pid)).error["code"] == "needs_consent"
    world.run("timeslice", "set", "40ms", str(pid), "-y").ok()
    assert slice_of(world, pid) == 40_000
    world.asked(*world.run("timeslice", "set", "1ms", str(pid)).ok().data["undo"].split()[1:]).ok()
    assert slice_of(world, pid) == 40_000
    world.alter(pid, uid=4242)
    world.fault("user", "4242")
    world.run("timeslice", "set", "50ms", str(pid), "-y").ends(4, "slice_too_long")
    assert slice_of(world, pid) == 40_000


@pytest.mark.parametrize(
    ("fault", "code"),
    [("seccomp", "seccomp"), ("ptrace_scope", "ptrace_scope"), ("gvisor", "gvisor"), ("wsl", "wsl"), ("forged", None)],
)
def test_an_unsupported_host_says_why(
    cli: Cli, refused: Refused, world: World, pid: int, fault: str, code: str | None
) -> None:
    world.set(channel_fault=fault)
    refused("timeslice", "set", "500us", str(pid), code=code or "forged_descriptor", exit_code=3)
    assert world.run("timeslice", "show").ok().data["processes"][0]["reason"] == code or "forged_descriptor"
    assert "slice unknown: process" in cli("timeslice", "show").err
    assert slice_records(world.host) == {}


def test_a_value_that_the_driver_refuses_is_undone(
    refused: Refused, world: World, pid: int, monkeypatch: Patch
) -> None:
    def broken(*_: object) -> float:
        raise OperationFailed("the driver did not take it", "see: sudo dmesg | tail", code="not_taken")

    monkeypatch.setattr(ChannelControl, "set_slice", broken)
    refused("timeslice", "set", "500us", str(pid), code="not_taken", exit_code=1)
    assert slice_records(world.host) == {}


def test_after_a_time_out_the_record_stays_until_it_is_restored(world: World, pid: int, monkeypatch: Patch) -> None:
    real = ChannelControl.set_slice

    def late(self: ChannelControl, scanned: channels.Channels, microseconds: int) -> float:
        real(self, scanned, microseconds)
        raise TimedOut("the driver does not answer", "see: sudo dmesg | tail", code="driver_hangs")

    with monkeypatch.context() as patch:
        patch.setattr(ChannelControl, "set_slice", late)
        answer = world.run("timeslice", "set", "500us", str(pid))
    assert answer.error["code"] == "driver_hangs"
    assert "could not be undone" in answer.error["message"]
    # It was set, and the undo timed out as well: what was there is still known.
    assert slice_records(world.host)[pid].slices_before == {2048}
    world.run("timeslice", "reset", str(pid)).ok()
    assert slice_of(world, pid) == 2048


def test_ctrl_c_in_the_middle_restores_the_slice(world: World, pid: int, monkeypatch: Patch) -> None:
    real = ChannelControl.set_slice
    calls: list[int] = []

    def interrupted(self: ChannelControl, scanned: channels.Channels, microseconds: int) -> float:
        took = real(self, scanned, microseconds)
        calls.append(microseconds)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return took

    monkeypatch.setattr(ChannelControl, "set_slice", interrupted)
    answer = world.run("timeslice", "set", "500us", str(pid))
    assert (answer.code, answer.error["code"]) == (128 + signal.SIGINT, Interrupted.code)
    assert (slice_of(world, pid), slice_records(world.host)) == (2048, {})


def test_a_user_takes_back_what_root_has_set_for_its_process(world: World, pid: int, tmp_path: Path) -> None:
    world.run("timeslice", "set", "500us", str(pid)).ok()
    user = replace(world.host, run_directory=tmp_path / "own", shared_run_directories=(world.host.run_directory,))
    assert slice_records(user)[pid].slice_us == 500
    with user.open_channels() as control:
        restore_slice(user, control, control.find(pid))
    assert slice_of(world, pid) == 2048
    # Root's record stays; the user's later one says what is so.
    assert (slice_records(user)[pid].slice_us, slice_records(world.host)[pid].slice_us) == (2048, 500)


def test_contexts_that_are_made_later_get_the_slice_and_give_it_back(world: World, pid: int) -> None:
    host = world.host
    with host.open_channels() as control:
        scanned = apply_slice(host, control, control.find(pid), 500)
        assert apply_slice(host, control, scanned, 600, job="web").groups[0].slice_us == 500
        record = slice_records(host)[pid]
        assert (record.slice_us, record.slices_before, record.job) == (600, {2048}, "web")
        later = replace(scanned.groups[0], handle=0x5C000099)
        # A group that was not there: it gets what the first one had.
        assert record.slice_before(later) == 2048
        # Nor was a group that is new after a swap, with the slice that gpushare had set.
        note_slice(host, replace(scanned, groups=(replace(later, slice_us=600),)), 500)
        assert slice_records(host)[pid].slice_before(later) == 2048
        restore_slice(host, control, scanned)
    assert (slice_of(world, pid), slice_records(host)) == (2048, {})


def test_all_processes_of_a_job_get_the_slice_or_none(world: World, pid: int, monkeypatch: Patch) -> None:
    other = admin.add_process(H200)
    real_tree = SimulatedProcesses.descendants
    monkeypatch.setattr(
        SimulatedProcesses, "descendants", lambda self, asked: [pid, other] if asked == pid else real_tree(self, asked)
    )
    real_set = ChannelControl.set_slice

    def fails(self: ChannelControl, scanned: channels.Channels, microseconds: int) -> float:
        if scanned.pid == other and microseconds == 500:
            raise OperationFailed("the driver did not take it", "see: sudo dmesg | tail", code="not_taken")
        return real_set(self, scanned, microseconds)

    with monkeypatch.context() as patch:
        patch.setattr(ChannelControl, "set_slice", fails)
        assert world.run("timeslice", "set", "500us", str(pid)).error["code"] == "not_taken"
    assert (slice_of(world, pid), slice_of(world, other), slice_records(world.host)) == (2048, 2048, {})
    assert len(world.run("timeslice", "set", "500us", str(pid)).data["steps"]) == 2
    assert (slice_of(world, pid), slice_of(world, other)) == (500, 500)
    world.run("timeslice", "reset", str(pid)).ok()
    assert (slice_of(world, pid), slice_of(world, other), slice_records(world.host)) == (2048, 2048, {})


def test_root_is_asked_before_the_server_of_another_user_is_touched(world: World) -> None:
    world.run("mps", "start").ok()
    world.client()
    with world.file.changed() as state:
        state.daemons[0].servers[0].uid = 4242
    (daemon,) = world.state.daemons
    (server,) = daemon.servers
    assert (daemon.uid, server.uid) == (os.geteuid(), 4242)
    asked = world.asked("timeslice", "set", "500us", str(daemon.pid)).ends(19, "needs_consent")
    assert f"changes the time-slice of process {server.pid} (of 4242)" in asked.error["message"]
    assert not world.state.daemons[0].servers[0].slices


def test_a_slice_that_is_set_while_a_reset_is_planned_is_restored(world: World, pid: int, monkeypatch: Patch) -> None:
    world.run("timeslice", "set", "500us", str(pid)).ok()
    world.alter(pid, slices={})
    real, again = slices.plan_restore, []

    def planned(*words: Any, **more: Any) -> Any:
        plan = real(*words, **more)
        if not again:
            # The slices are the old ones, so that the plan only forgets the record; then another gpushare sets one.
            again.append(plan)
            world.run("timeslice", "set", "700us", str(pid)).ok()
        return plan

    monkeypatch.setattr("gpushare.cli.timeslice.plan_restore", planned)
    world.run("timeslice", "reset", str(pid)).ok()
    assert slice_of(world, pid) == 2048
    assert shown(world, pid)["set_us"] is None


def test_no_other_gpushare_sets_a_slice_during_a_probe(world: World, pid: int, monkeypatch: Patch) -> None:
    lock = world.host.run_directory / "slices" / "lock"
    real, held = ChannelControl.find, []

    def find(control: ChannelControl, *words: Any, probe: bool = True, **more: Any) -> Any:
        if probe:
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(pid)
        return real(control, *words, probe=probe, **more)

    monkeypatch.setattr(ChannelControl, "find", find)
    world.run("timeslice", "set", "500us", str(pid)).ok()
    world.run("timeslice", "reset", str(pid)).ok()
    world.run("pause", str(pid)).ok()
    world.run("resume", str(pid)).ok()
    assert len(held) == 3
