"""Pausing a real process while another works, on a simulated host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.selection import Device
from gpushare.host.channels import DISABLE_CHANNELS, Channels
from gpushare.host.host import Host
from gpushare.host.identity import Identity, start_of
from gpushare.pause.record import paused_jobs, write
from gpushare.run import jobs as jobs_module
from gpushare.run import production as module
from gpushare.run.jobs import PLAIN, JobRecord, is_running, write_record
from gpushare.run.pause import ChannelPauser, Pauser
from gpushare.run.plain import PlainShare
from gpushare.run.production import Activity
from gpushare.run.roles import PauseForProduction
from gpushare.sim.admin import add_process, end_process
from tests.cli.drive import World, until

H200 = "sim:h200"
_IDLE = "import time; time.sleep(600)"


@pytest.fixture
def start(host: Host, device: Device) -> Iterator[Callable[[str], int]]:
    """Return a function that starts a Python program on the GPU and returns its PID."""
    children: list[Any] = []

    def spawn(text: str) -> int:
        environment = PlainShare(host, device).environment(os.environ)
        children.append(host.processes.spawn([sys.executable, "-c", text], environment))
        return int(children[-1].pid)

    yield spawn
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        until(lambda child=child: child.poll() is not None, "it has ended")  # type: ignore[misc]


def stopped(host: Host, pid: int) -> bool:
    """Return whether a process is stopped."""
    info = host.processes.describe(pid)
    return info is not None and info.stopped


def test_one_that_waits_without_the_processor_is_seen_by_its_gpu_use(
    host: Host, device: Device, start: Callable[[str], int]
) -> None:
    waiting = Activity(host, device, start(_IDLE))
    # A simulated context keeps its GPU busy as long as its process runs.
    until(waiting.works, "it is seen")


def test_a_stopped_or_ended_production_job_does_not_work(
    host: Host, device: Device, start: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_NVML_SECONDS", 0.0)
    pid = start(_IDLE)
    activity = Activity(host, device, pid)
    until(activity.works, "it works")
    host.processes.send(pid, signal.SIGSTOP)
    until(lambda: not activity.works(), "it rests")


class Scripted:
    """A production job that does as it is told."""

    def __init__(self) -> None:
        self.now = False

    def works(self) -> bool:
        return self.now


def test_it_stands_still_while_production_works_and_goes_on_when_that_has_ended(
    host: Host, device: Device, start: Callable[[str], int]
) -> None:
    pid, activity = start(_IDLE), Scripted()
    watch = PauseForProduction(host, activity)  # type: ignore[arg-type]
    watch.started(PlainShare(host, device).watch(pid))
    assert watch.pauser is not None
    watch.poll()
    assert not watch.pauser.paused
    activity.now = True
    watch.poll()
    assert watch.pauser.paused
    activity.now = False
    until(lambda: not watch.poll() and not watch.pauser.paused, "it goes on")


def test_one_that_others_continue_is_stopped_again_and_its_worker_goes_on_when_it_has_ended(
    host: Host, device: Device, start: Callable[[str], int]
) -> None:
    """The worker is in a session of its own: no kernel continues it when the program dies."""
    pid = start("import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)")
    until(lambda: len(host.processes.descendants(pid)) == 2, "its worker is there")
    (worker,) = set(host.processes.descendants(pid)) - {pid}
    # Until then its parent waits in vfork, where no signal stops it.
    until(lambda: Path(f"/proc/{worker}/comm").read_text() == "sleep\n", "the worker runs")
    activity = Scripted()
    watch = PauseForProduction(host, activity)  # type: ignore[arg-type]
    watch.started(PlainShare(host, device).watch(pid))
    assert watch.pauser is not None
    activity.now = True
    try:
        watch.poll()
        until(lambda: stopped(host, pid) and stopped(host, worker), "both are stopped")
        for number in (pid, worker):
            host.processes.send(number, signal.SIGCONT)
        until(lambda: (watch.poll(), stopped(host, pid) and stopped(host, worker))[1], "both are stopped again")
        host.processes.send(pid, signal.SIGKILL)
        until(lambda: not host.processes.alive(pid), "it has ended")
        watch.settle()
        until(lambda: not stopped(host, worker), "the worker goes on")
    finally:
        host.processes.send(worker, signal.SIGKILL)


def test_a_process_that_ended_before_its_channels_went_off_is_no_longer_known(host: Host) -> None:
    pids = [add_process(H200), add_process(H200)]
    pauser = ChannelPauser(host, os.getpid())
    pauser.find(pids)
    assert pauser.known.keys() == set(pids)
    end_process(H200, pids[0])
    pauser.disable()
    assert pauser.known.keys() == pauser.off.keys() == {pids[1]}
    pauser.enable()
    assert not pauser.off


def test_the_name_of_a_job_that_is_paused_again_and_again_is_looked_up_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, inner = (
        Identity(pid, start_of(host.processes.identity(pid)) or 0) for pid in (add_process(H200), add_process(H200))
    )
    job = JobRecord(name="outer", pid=program.pid, started=program.started, devices=("GPU-a",), role=PLAIN)
    write_record(host, job)
    # The program is a gpushare that runs another job.
    write_record(host, replace(job, name="inner", **inner._asdict(), supervisor=program))
    read: list[str] = []

    def runs(of: Host, record: JobRecord) -> bool:
        read.append(record.name)
        return is_running(of, record)

    monkeypatch.setattr(jobs_module, "is_running", runs)
    pauser = ChannelPauser(host, program.pid)
    pauser.find([program.pid])
    for _ in range(3):
        pauser.disable()
        assert [(job.name, job.pid, job.is_paused(host)) for job in paused_jobs(host)] == [("outer", program.pid, True)]
        pauser.enable()
    assert sorted(read) == ["inner", "outer"]


def test_what_is_off_is_put_back_if_the_driver_refuses_channels_made_since(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = add_process(H200)
    pauser = ChannelPauser(host, os.getpid())
    pauser.find([pid])
    pauser.disable()
    pauser.known[pid] = replace(pauser.known[pid])

    def refuse(_channels: object) -> float:
        raise OperationFailed("the driver failed", "see: sudo dmesg | tail")

    monkeypatch.setattr(pauser.control, "disable", refuse)
    with pytest.raises(OperationFailed):
        pauser.disable()
    assert pauser.off.keys() == {pid}
    assert not pauser.enable()
    assert World(H200).process(pid).channels_off == []


def test_what_may_be_off_is_put_back_if_the_process_that_asked_the_driver_was_killed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = add_process(H200)
    channels = ChannelPauser(host, os.getpid())
    pauser = Pauser(host, (0,), os.getpid(), channels)
    channels.find([pid])
    disable = channels.control.disable

    def killed(known: Channels) -> float:
        disable(known)
        raise OperationFailed("it ended", "run it again", code="helper_ended")

    monkeypatch.setattr(channels.control, "disable", killed)
    monkeypatch.setattr(pauser, "_stop_all", lambda: None)
    pauser.pause()
    assert World(H200).process(pid).channels_off == []
    assert not paused_jobs(host)


def test_what_the_driver_does_not_put_back_is_told_and_can_be_resumed_later() -> None:
    world = World.new(H200)
    pid = add_process(H200)
    channels = ChannelPauser(world.host, os.getpid())
    pauser = Pauser(world.host, (0,), os.getpid(), channels)
    said: list[str] = []
    pauser.say = said.append
    channels.find([pid])
    channels.disable()
    world.set(channel_statuses={hex(DISABLE_CHANNELS): 0x62})
    for _ in range(3):
        pauser.resume()
    (text,) = said
    assert text.startswith(f"process {pid} is still off the GPU: ")
    assert text.endswith("; gpushare goes on trying")
    pauser.close()
    assert said[1:] == [text.replace("gpushare goes on trying", f"to try again: gpushare resume {pid}")]
    # As it says, once the driver answers again, and this gpushare is gone.
    world.set(channel_statuses={})
    (job,) = paused_jobs(world.host)
    write(replace(job, keeper=Identity(1, 1)))
    world.run("resume", str(pid)).ok()
    assert world.process(pid).channels_off == []
    assert not paused_jobs(world.host)
