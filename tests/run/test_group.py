"""Opportunistic jobs in one MPS daemon: the slice of its server, set, read back, set again, and given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpushare.base.errors import GpushareError
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.host.identity import identity_of, start_of
from gpushare.mps.limits import Limits
from gpushare.part import Part
from gpushare.run import group
from gpushare.run.group import GroupSlice, why_not_settable
from gpushare.run.jobs import OPPORTUNISTIC, JobRecord, slices_of_group, write_record
from gpushare.run.share import MpsShare
from gpushare.sim import admin, open_simulated
from gpushare.sim.state import StateFile
from tests.errors import fails
from tests.sim.nvml_host import state_of

SPEC = "sim:h200"


@pytest.fixture
def file() -> StateFile:
    return open_simulated(SPEC).state_file


@pytest.fixture
def share(host: Host, device: Device) -> Iterator[MpsShare]:
    """Return an open share; its daemon has no client yet."""
    opened = MpsShare(host, device, Limits())
    opened.open()
    yield opened
    opened.close()


def client(share: MpsShare) -> int:
    return admin.add_process(SPEC, mps=True, environment={"CUDA_MPS_PIPE_DIRECTORY": str(share.home.pipe)})


class Watched:
    """A program in the share, and its part in the slice."""

    def __init__(self, share: MpsShare, *, slice_us: int = 200) -> None:
        self.host = share.host
        self.watch = share.watch(client(share))
        self.part = GroupSlice(share.host, share.device, slice_us)
        self.record = record_of_member(share.host, share.device, self.watch.program_pid, slice_us)
        write_record(share.host, self.record)
        self.part.started(self.watch)

    def poll(self) -> None:
        self.watch.poll()
        assert not self.part.poll()

    def settle(self) -> None:
        """End the program. The record of the job is dropped later, and its gpushare still lives."""
        self.end_program()
        self.part.settle()

    def end_program(self) -> None:
        admin.end_process(SPEC, self.record.pid)


def record_of_member(host: Host, device: Device, pid: int, slice_us: int) -> JobRecord:
    started = start_of(host.processes.identity(pid))
    assert started is not None
    return JobRecord(
        name=f"job-{pid}",
        pid=pid,
        started=started,
        devices=(device.uuid,),
        role=OPPORTUNISTIC,
        mps=True,
        slice_us=slice_us,
        supervisor=identity_of(os.getpid()),
    )


def server_slices(file: StateFile) -> list[int]:
    return [server.slices.get("compute", 2048) for daemon in state_of(file).daemons for server in daemon.servers]


def fault(file: StateFile, name: str | None) -> None:
    with file.changed() as state:
        state.channel_fault = name


def test_the_server_gets_the_slice_with_the_first_client_and_no_client_does(share: MpsShare, file: StateFile) -> None:
    watch = Watched(share)
    watch.poll()
    pid = watch.watch.program_pid
    assert server_slices(file) == [200]
    assert [process.slices for process in state_of(file).processes if process.pid == pid] == [{}]
    server = state_of(file).daemons[0].servers[0].pid
    assert watch.watch.news == [
        f"the opportunistic jobs of GPU 0 share a time-slice of 200us (MPS server {server}, read back)"
    ]
    watch.poll()
    assert len(watch.watch.news) == 1


def test_a_slice_that_was_changed_is_set_again(share: MpsShare, file: StateFile) -> None:
    watch = Watched(share)
    watch.poll()
    with file.changed() as state:
        state.daemons[0].servers[0].slices["compute"] = 2048
    watch.poll()
    assert server_slices(file) == [200]


def test_a_new_server_gets_the_slice_too(share: MpsShare, file: StateFile) -> None:
    watch = Watched(share)
    watch.poll()
    first = watch.watch.program_pid
    before = state_of(file).daemons[0].servers[0].pid
    admin.end_process(SPEC, first)
    with file.changed() as state:
        state.daemons[0].servers.clear()
    second = client(share)
    assert state_of(file).daemons[0].servers[0].pid != before
    watch.watch.program_pid = second
    watch.poll()
    assert server_slices(file) == [200]
    assert len(watch.watch.news) == 2


def test_of_several_members_the_shortest_slice_counts_and_the_last_gives_it_back(
    share: MpsShare, file: StateFile, host: Host, device: Device
) -> None:
    first, second = Watched(share), Watched(share, slice_us=100)
    first.poll()
    assert server_slices(file) == [100]
    second.poll()
    assert sorted(slices_of_group(host, device).values()) == [100, 200]
    second.settle()
    first.poll()
    assert server_slices(file) == [200]
    first.settle()
    assert server_slices(file) == [2048]
    assert not slices_of_group(host, device)


def test_the_member_that_ends_last_knows_the_slice_of_before(
    share: MpsShare, file: StateFile, host: Host, device: Device
) -> None:
    first = Watched(share)
    first.poll()
    second = Watched(share, slice_us=700)
    second.poll()
    first.settle()
    second.poll()
    assert server_slices(file) == [700]
    second.settle()
    assert server_slices(file) == [2048]


def test_two_members_that_end_together_give_the_slice_back(share: MpsShare, file: StateFile) -> None:
    both = Watched(share), Watched(share)
    # A client that is no member keeps the server.
    client(share)
    for watch in both:
        watch.poll()
    for watch in both:
        watch.end_program()
    for watch in both:
        watch.part.settle()
    assert server_slices(file) == [2048]


@pytest.mark.parametrize("name", ["ptrace_scope", "seccomp", "no_pidfd_getfd"])
def test_where_it_is_not_supported_it_is_said_and_the_job_is_paused_instead(
    share: MpsShare, file: StateFile, name: str
) -> None:
    watch = Watched(share)
    paused: list[str] = []

    class Instead(Part):
        due = 0.01

        def started(self, watch: object) -> None:
            paused.append("started")

        def poll(self) -> bool:
            paused.append("poll")
            return False

    watch.part.instead = Instead()  # type: ignore[assignment]
    fault(file, name)
    watch.poll()
    (told,) = watch.watch.troubles
    assert told.startswith("the time-slice of the MPS server cannot be set: process ")
    assert told.endswith("; this job is paused while production works")
    watch.poll()
    assert (paused, watch.part.due, server_slices(file)) == (["started", "poll", "poll"], 0.01, [2048])


def test_a_driver_that_fails_once_is_tried_again(share: MpsShare, file: StateFile) -> None:
    watch = Watched(share)
    fault(file, "hang")
    watch.poll()
    assert watch.watch.news == []
    fault(file, None)
    watch.poll()
    assert server_slices(file) == [200]
    fault(file, "hang")
    for _ in range(4):
        watch.poll()
    (told,) = watch.watch.troubles
    assert "cannot be set" in told


def test_why_not_names_the_reason(file: StateFile, host: Host, device: Device) -> None:
    assert why_not_settable(host, device) is None
    fault(file, "seccomp")
    reason = why_not_settable(host, device)
    assert reason.code == "seccomp"


def test_the_daemon_of_another_user_is_left_alone(share: MpsShare, host: Host, device: Device) -> None:
    elsewhere = replace(
        host, run_directory=host.run_directory.parent / "mine", shared_run_directories=(host.run_directory,)
    )
    reason = why_not_settable(elsewhere, device)
    assert reason.code == "not_your_daemon"


def test_records_of_strangers_and_of_what_has_ended_do_not_count(host: Host, device: Device) -> None:
    record = record_of_member(host, device, admin.add_process(SPEC), 30)
    write_record(host, replace(record, started=1))
    assert not slices_of_group(host, device)
    write_record(host, record)
    assert slices_of_group(host, device)
    (host.run_directory / "jobs").chmod(0o777)
    assert not slices_of_group(host, device)


def test_production_in_the_daemon_is_refused_by_name(
    share: MpsShare, host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Web:
        name, pid = "web", 1

    monkeypatch.setattr(group, "living_productions", lambda *_: [Web])
    monkeypatch.setattr(group.roles, "is_under_mps", lambda *_: True)
    with fails(GpushareError, "production_under_mps", message="'web'"):
        GroupSlice(host, device).check()


def test_members_that_begin_at_once_do_not_take_each_others_trials_for_the_slice_of_before(
    share: MpsShare, file: StateFile, host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is probed: production and the server are everybody's."""
    from gpushare.host import channels

    def probed(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(channels, "_probe", probed)
    watches = [Watched(share) for _ in range(3)]
    assert why_not_settable(host, device) is None
    for watch in watches:
        watch.poll()
    assert server_slices(file) == [200]
    for watch in watches:
        watch.settle()
    assert server_slices(file) == [2048]
