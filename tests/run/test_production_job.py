"""The production job that is spared: by its PID and start, and by its name after it was started again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.run import production as module
from gpushare.run.jobs import JobRecord, PrintedRate, write_record
from gpushare.run.production import ProductionJob
from tests.run.told_program import OTHER, Told


@pytest.fixture
def start(host: Host, device: Device) -> Iterator[Callable[[], JobRecord]]:
    """Return a function that starts a production job named web, and the record of it."""
    children: list[subprocess.Popen[bytes]] = []

    def spawn() -> JobRecord:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        info = host.processes.describe(children[-1].pid)
        record = JobRecord(
            name="web", pid=info.pid, started=info.started, devices=(device.uuid,), memory_peak_bytes=None
        )
        write_record(host, record)
        return record

    yield spawn
    for child in children:
        child.kill()
        child.wait()


def end(record: JobRecord) -> None:
    """End a job, and reap it."""
    os.kill(record.pid, 9)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record.pid, 0)


def test_who_is_started_again_under_the_name_is_followed(
    host: Host, device: Device, start: Callable[[], JobRecord]
) -> None:
    first = start()
    job = ProductionJob(host, device, first.pid, first.started, "web")
    assert job.lives()
    end(first)
    assert not job.lives()
    second = start()
    assert job.lives()
    assert job.pid == second.pid
    end(second)
    assert not job.lives()


def test_who_was_given_by_a_pid_has_no_successor(host: Host, device: Device, start: Callable[[], JobRecord]) -> None:
    first = start()
    job = ProductionJob(host, device, first.pid, first.started)
    end(first)
    start()
    assert not job.lives()
    assert job.pid == first.pid


def test_the_speed_of_a_pid_is_that_of_its_process(host: Host, device: Device, start: Callable[[], JobRecord]) -> None:
    record = replace(start(), rate=PrintedRate("/web.log", "rate=(.)"))
    job = ProductionJob(host, device, record.pid, record.started)
    write_record(host, record)
    assert job.rate() == record.rate
    # An earlier job had this PID.
    write_record(host, replace(record, started=record.started - 1))
    assert job.rate() is None


def test_a_successor_on_another_gpu_is_none(host: Host, device: Device, start: Callable[[], JobRecord]) -> None:
    first = start()
    job = ProductionJob(host, device, first.pid, first.started, "web")
    end(first)
    write_record(host, replace(start(), devices=("GPU-elsewhere",)))
    assert not job.lives()


def test_its_work_is_that_of_the_one_that_runs(
    host: Host, device: Device, start: Callable[[], JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    def activity(_host: Any, _device: Any, pid: int) -> Any:
        return SimpleNamespace(works=lambda: watched.append(pid) or True)

    at = 100.0
    monkeypatch.setattr(module, "Activity", activity)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: at))
    first = start()
    job = ProductionJob(host, device, first.pid, first.started, "web")
    assert job.works()
    end(first)
    at += 0.9
    # Whether it lives is asked once a second.
    assert job.works()
    at += 0.2
    assert not job.works()
    second = start()
    at += 1.1
    assert job.works()
    assert watched == [first.pid, first.pid, second.pid]


def test_production_is_asked_for_by_its_pid_and_its_start() -> None:
    """A PID that was given to somebody else is not production."""
    told = Told()
    told.host.processes.alive = lambda _pid, started=None: started in {None, 8}
    assert not ProductionJob(told.host, told.device, OTHER, 7).lives()
    assert ProductionJob(told.host, told.device, OTHER, 8).lives()
