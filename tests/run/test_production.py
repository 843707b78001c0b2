"""Records of production jobs: whose word counts, what a damaged one tells, and what others may read."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.run.jobs import JobRecord, find_record, is_running, records, write_record

WEB = JobRecord(name="web", pid=17, started=35, devices=("GPU-a",), memory_peak_bytes=7)


@pytest.fixture
def host() -> Host:
    """Return a simulated H200."""
    return connect("sim:h200")


def record_of(host: Host, name: str = "web") -> Path:
    """Return the file of a production job."""
    return host.run_directory / "jobs" / f"{name}.json"


def test_a_record_is_read_as_it_was_written_and_by_all(host: Host) -> None:
    before = os.umask(0o077)
    try:
        write_record(host, WEB)
    finally:
        os.umask(before)
    assert find_record(host, "web") == WEB
    path = record_of(host)
    assert json.loads(path.read_text())["schema"] == 1
    # Others spare the job, too; nobody but its owner writes.
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent, host.run_directory)] == [0o644, 0o755, 0o755]


def test_each_name_has_its_own_record_and_the_last_word_counts(host: Host) -> None:
    other = replace(WEB, name="db", pid=18, started=0, memory_peak_bytes=None)
    write_record(host, other)
    write_record(host, WEB)
    write_record(host, replace(WEB, memory_peak_bytes=9))
    assert records(host) == [other, replace(WEB, memory_peak_bytes=9)]
    assert find_record(host, "db") == other
    assert find_record(host, "we") is None


def test_roots_record_counts_beside_ones_own(host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "root"
    write_record(replace(host, run_directory=shared), replace(WEB, name="db"))
    # One that cannot be looked into hides no other.
    host = replace(host, shared_run_directories=(tmp_path / "none", shared))
    write_record(host, WEB)
    assert [record.name for record in records(host)] == ["web", "db"]


def test_it_lives_as_the_process_that_it_was(host: Host) -> None:
    info = host.processes.describe(os.getpid())
    assert info is not None
    assert info.started is not None
    assert is_running(host, replace(WEB, pid=os.getpid(), started=info.started))
    # The PID is another's now.
    assert not is_running(host, replace(WEB, pid=os.getpid(), started=info.started - 1000))
