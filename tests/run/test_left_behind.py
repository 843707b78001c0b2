"""What programs leave running: who stays of it, and how it is ended."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.run import end
from gpushare.run.end import still_there
from gpushare.run.plain import PlainShare
from gpushare.run.several import Group


def test_only_who_stays_is_told_of_by_program(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end, "HELPER_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "600"]) as stays, subprocess.Popen(["true"]) as gone:
        gone.wait()
        assert still_there(host, {1: [stays.pid, gone.pid], 2: [gone.pid], 3: []}) == {1: (stays.pid,)}
        stays.kill()


def test_it_is_asked_by_the_signal_that_a_shells_background_job_does_not_ignore(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = type(host.processes).send_to

    def noted(self: Any, pid: int, started: int, number: int) -> None:
        sent.append(number)
        send(self, pid, started, number)

    monkeypatch.setattr(type(host.processes), "send_to", noted)
    with subprocess.Popen(["sleep", "600"]) as process:
        Group(host, PlainShare(host, device), set, grace_seconds=60.0).end_left_behind({0: [process.pid]})
    assert sent == [signal.SIGTERM]
