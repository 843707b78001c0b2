"""Records of production jobs: what others may read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.run.jobs import JobRecord, find_record, write_record

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
