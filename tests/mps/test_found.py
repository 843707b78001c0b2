"""The MPS daemons of a host: ours, foreign ones, dead ones, and what only looks like one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.model import MpsClient, Priority
from gpushare.base.units import GIB, MIB
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.mps import daemons as host_mps
from gpushare.mps.control import PROGRAM, MpsControl, start_environment
from gpushare.mps.daemons import FoundDaemon, daemon_pid, find_daemons
from gpushare.mps.home import DaemonHome, DaemonRecord, home_of
from gpushare.mps.limits import Limits
from gpushare.sim import admin

SPEC = "sim:2xh200"


@pytest.fixture
def host() -> Host:
    return connect(SPEC)


def start(host: Host, pipe: Path, visible: str | None) -> int:
    """Start a daemon as anybody would, and return its PID."""
    pipe.mkdir(parents=True, exist_ok=True)
    environment = {**start_environment("", str(pipe), str(pipe.parent / "log")), "CUDA_VISIBLE_DEVICES": visible}
    assert host.programs.run([PROGRAM, "-d"], env=environment).exit_code == 0
    pid = daemon_pid(host, str(pipe))
    assert pid is not None
    return pid


def start_ours(host: Host, *, transient: bool = False, **limits: Any) -> tuple[DaemonHome, DaemonRecord]:
    uuid = host.nvml.sweep()[0].uuid or ""
    home = home_of(host.run_directory, uuid)
    home.create()
    pid = start(host, home.pipe, uuid)
    info = host.processes.describe(pid)
    record = DaemonRecord(
        device_uuid=uuid, pid=pid, started=info.started, uid=0, limits=Limits(**limits), transient=transient
    )
    home.write(record)
    return home, record


def found(host: Host) -> list[FoundDaemon]:
    return find_daemons(host, host.nvml.sweep())


def client(home: DaemonHome, **environment: str) -> int:
    return admin.add_process(SPEC, mps=True, environment={"CUDA_MPS_PIPE_DIRECTORY": str(home.pipe), **environment})


def clients_of(host: Host) -> dict[int, MpsClient]:
    return {client.pid: client for item in found(host) for client in item.daemon.clients}


def test_a_host_without_daemons(host: Host) -> None:
    assert found(host) == []
    assert daemon_pid(host, "/nowhere") is None


def test_a_daemon_of_ours_with_what_it_holds(host: Host) -> None:
    home, record = start_ours(
        host, threads_percent=30.0, memory_limit_bytes=1500 * MIB, transient=True, priority=Priority.LOW
    )
    talk = MpsControl(host.programs, str(home.pipe))
    talk.set_threads(30.0)
    talk.set_memory(1500 * MIB)
    pid = client(home)
    (item,) = found(host)
    daemon = item.daemon
    assert (daemon.pid, daemon.ours, daemon.gpu_index, daemon.gpu_indexes) == (record.pid, True, 0, (0,))
    assert (daemon.threads_percent, daemon.transient, daemon.error, daemon.priority) == (
        30.0,
        True,
        None,
        Priority.NORMAL,
    )
    # The daemon prints 1G: the record knows better.
    assert (daemon.memory_limit_bytes, daemon.servers[0].status) == (1500 * MIB, "ACTIVE")
    assert [(client.pid, client.threads_percent, client.memory_limit_bytes) for client in daemon.clients] == [
        (pid, 30.0, 1500 * MIB)
    ]
    assert (item.home, item.record) == (home, record)
    assert item.control(host).pipe_directory == str(home.pipe)


def test_a_dead_daemon_of_ours_is_shown_with_its_way_out(host: Host) -> None:
    _, record = start_ours(host)
    host.processes.send(record.pid, 9)
    (item,) = found(host)
    assert (item.daemon.pid, item.daemon.ours) == (None, True)
    assert f"gpushare mps stop -g {record.device_uuid}" in item.daemon.error


def test_another_process_with_the_daemons_pid_is_not_the_daemon(host: Host) -> None:
    home, record = start_ours(host)
    before = dataclasses.replace(record, started=record.started - 1000)
    home.write(dataclasses.replace(before, pid=admin.add_process(SPEC)))
    # The daemon that listens in our home is it, whatever PID the record names.
    (item,) = found(host)
    assert (item.daemon.ours, item.daemon.pid) == (True, record.pid)


def test_another_daemon_with_the_daemons_pid_is_not_the_daemon(host: Host, sim_dir: Path) -> None:
    home, record = start_ours(host)
    host.processes.send(record.pid, 9)
    other = start(host, sim_dir / "f" / "pipe", "1")
    home.write(dataclasses.replace(record, pid=other, started=1))
    assert [(item.daemon.ours, item.daemon.pid) for item in found(host)] == [(True, None), (False, other)]


def test_a_daemon_lives_on_when_the_clock_is_set(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    # A start time is counted from the boot time, which moves with the clock (NTP, a resumed machine).
    home, record = start_ours(host)
    home.write(dataclasses.replace(record, started=record.started + 30))
    (item,) = found(host)
    assert (item.daemon.ours, item.daemon.pid, item.daemon.error) == (True, record.pid, None)
    # Another user's environment may not be read: its program and PID must do.
    admin.set_fault(SPEC, "user", value="61000")
    assert [daemon.daemon.pid for daemon in find_daemons(host, (), deep=False)] == [record.pid]


def test_a_daemon_in_our_home_is_ours_also_with_a_broken_record(host: Host) -> None:
    home, record = start_ours(host)
    (home.directory / "daemon.json").write_text('{"pid": "?"}')
    (item,) = found(host)
    assert (item.daemon.ours, item.daemon.pid, item.daemon.pipe_directory) == (True, record.pid, str(home.pipe))


@pytest.mark.parametrize(
    ("visible", "indexes"), [(None, (0, 1)), ("0", (0,)), ("1", (1,)), ("1,0", (1, 0)), ("0,7,1", (0,))]
)
def test_a_foreign_daemon_and_the_gpus_it_serves(
    host: Host, sim_dir: Path, visible: str | None, indexes: tuple[int, ...]
) -> None:
    pid = start(host, sim_dir / "f" / "pipe", visible)
    (item,) = found(host)
    daemon = item.daemon
    assert (daemon.pid, daemon.ours, daemon.gpu_indexes) == (pid, False, indexes)
    assert daemon.gpu_index == (indexes[0] if len(indexes) == 1 else None)
    assert (daemon.error, daemon.pipe_directory) == (None, str(sim_dir / "f" / "pipe"))
    assert (item.home, item.record) == (None, None)


@pytest.mark.parametrize("visible", ["", "all", "-1", "00000000:01:00.0", "GPU-00000000"])
def test_what_cuda_takes_for_no_device_is_none(host: Host, visible: str) -> None:
    assert host_mps._visible_gpus({"CUDA_VISIBLE_DEVICES": visible}, host.nvml.sweep()) == ()


def test_a_shallow_look_asks_no_daemon(host: Host) -> None:
    start_ours(host)
    admin.set_fault(SPEC, "hang", value=PROGRAM)
    (item,) = find_daemons(host, host.nvml.sweep(), deep=False)
    assert (item.daemon.error, item.daemon.ours) == (None, True)


def test_a_daemon_that_does_not_answer_is_shown_with_its_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    start_ours(host)
    admin.set_fault(SPEC, "missing", value=PROGRAM)
    (item,) = found(host)
    assert item.daemon.error == "nvidia-cuda-mps-control is not installed"
    assert item.daemon.pid is not None


def test_limits_of_a_client_are_the_smaller_of_its_own_and_the_servers(host: Host) -> None:
    home, record = start_ours(host, threads_percent=50.0, memory_limit_bytes=2 * GIB)
    talk = MpsControl(host.programs, str(home.pipe))
    talk.set_threads(50.0)
    talk.set_memory(2 * GIB)
    uuid = record.device_uuid
    expected = {
        client(home): (50.0, 2 * GIB, Priority.NORMAL),
        client(home, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="20"): (20.0, 2 * GIB, Priority.NORMAL),
        client(home, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="90"): (50.0, 2 * GIB, Priority.NORMAL),
        client(home, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G"): (50.0, GIB, Priority.NORMAL),
        client(home, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"{uuid}=8G"): (50.0, 2 * GIB, Priority.NORMAL),
        client(home, CUDA_MPS_CLIENT_PRIORITY="1"): (50.0, 2 * GIB, Priority.LOW),
    }
    shown = clients_of(host)
    assert {pid: (one.threads_percent, one.memory_limit_bytes, one.priority) for pid, one in shown.items()} == expected


@pytest.mark.parametrize("value", ["nan", "inf", "-5", "0", "101", "abc", "", "9" * 5000])
def test_nonsense_in_a_clients_environment_is_no_limit(host: Host, value: str) -> None:
    home, _ = start_ours(host)
    names = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_CLIENT_PRIORITY")
    pid = client(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(host.processes), "environment", lambda *_: dict.fromkeys(names, value))
        shown = clients_of(host)[pid]
    assert (shown.threads_percent, shown.memory_limit_bytes) == (100.0, None)


def test_the_limits_of_a_client_that_has_ended_are_unknown(host: Host) -> None:
    home, _ = start_ours(host)
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert host.processes.environment(ended.pid) is None
    pid = client(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(host.processes), "environment", lambda *_: None)
        shown = clients_of(host)[pid]
    assert (shown.threads_percent, shown.memory_limit_bytes, shown.priority) == (None, None, None)


def test_another_users_processes_keep_their_environment_to_themselves(host: Host, sim_dir: Path) -> None:
    home, _ = start_ours(host)
    pid = client(home)
    start(host, sim_dir / "f" / "pipe", "1")
    admin.set_fault(SPEC, "user", value="61000")
    ours, foreign = found(host)
    assert (ours.daemon.error, ours.daemon.clients[0].pid, ours.daemon.clients[0].threads_percent) == (None, pid, None)
    assert (foreign.daemon.pipe_directory, foreign.daemon.gpu_indexes) == (None, ())
    assert foreign.daemon.error is not None
    with pytest.raises(Exception, match="pipe directory of the MPS daemon"):
        foreign.control(host)
