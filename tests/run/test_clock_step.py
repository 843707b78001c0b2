"""A clock that is set loses no job, no group member and no pause: they are told from others by ticks since boot."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.run.jobs import (
    OPPORTUNISTIC,
    PLAIN,
    find_job,
    find_record,
    forget_ended,
    is_running,
    slices_of_group,
    write_record,
)
from tests.cli.drive import record_of
from tests.clock import step_the_clock

OWN = os.getpid()


def test_a_named_job_runs_on(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(host, record_of(host, device, "web", OWN, PLAIN))
    step_the_clock(monkeypatch, 60.0)
    assert find_job(host, "web").pid == OWN
    # Each new record sweeps those of jobs that have ended.
    write_record(host, record_of(host, device, "other", OWN, PLAIN))
    forget_ended(host)
    record = find_record(host, "web")
    assert record is not None
    assert is_running(host, record)


def test_a_member_stays_in_its_group(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(host, device, "batch", OWN, OPPORTUNISTIC)
    write_record(host, replace(record, mps=True, slice_us=30))
    step_the_clock(monkeypatch, -60.0)
    assert slices_of_group(host, device) == {OWN: 30}
