"""What the grounds of an experiment say of the MPS daemon that they have set up."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from gpushare.base.benchmark import Metric
from gpushare.base.errors import GpushareError
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.measure.experiment import Experiment, Grounds
from gpushare.sim import admin
from gpushare.sim.state import StateFile


def test_the_servers_of_programs_are_those_that_the_daemon_names(host: Host, device: Device) -> None:
    grounds = Grounds(host, device, sys.executable)
    grounds.open(mps=False, instances=0)
    assert grounds.servers([1]) == set(), "none without MPS"
    grounds.open(mps=True, instances=0)
    try:
        file = StateFile(host.spec)
        pipe = {"CUDA_MPS_PIPE_DIRECTORY": file.read().daemons[0].pipe_directory}
        client = admin.add_process(host.spec, "0", mps=True, environment=pipe)
        (server,) = (process.mps_server for process in file.read().processes if process.pid == client)
        assert grounds.servers([client, 999_999]) == {server}
        assert grounds.servers([999_999]) == set()
        with file.changed() as state:
            state.daemons.clear()
        with pytest.raises(GpushareError):
            grounds.servers([client])
    finally:
        grounds.close()


def test_each_line_of_a_read_has_a_time_of_its_own(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(host, Grounds(host, device, sys.executable))
    listeners: list[Callable[[str, float], None]] = []

    def launch(*_: object, listen: Callable[[str, float], None], **__: object) -> object:
        listeners.append(listen)
        return None

    monkeypatch.setattr(experiment, "launch", launch)
    monkeypatch.setattr(experiment, "now", iter([5.0, 5.1]).__next__)
    printed = experiment.run("web", ["true"], {}, Metric()).printed
    for _ in range(2):
        listeners[0]("a line", 4.9)
    assert printed.lines == [5.0, 5.1]
