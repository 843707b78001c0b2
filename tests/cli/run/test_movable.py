"""Jobs of ``gpushare run`` that go to another GPU: by ``gpushare move``, and by themselves for a job that waits."""

from __future__ import annotations

import sys

import pytest

from gpushare.base.units import GIB
from gpushare.memory.ledger import reservations
from gpushare.run.jobs import find_record
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Started, World, until

SPEC = "sim:2xa30"
JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05", "--seconds", "90")


@pytest.fixture
def world() -> World:
    return World.new(SPEC)


@pytest.fixture
def start(real: Real, world: World) -> Real:
    """Return what starts a job of 8 GiB on GPU 0, and waits until it is there."""

    def begin(*words: str) -> Started:
        job = real("run", "-g", "0", *words, "--", *JOB, "--footprint", "8G", host=SPEC)
        until(lambda: any(process.memory_bytes == 8 * GIB for process in world.state.processes), "it runs")
        return job

    return begin


def gpus(world: World) -> list[int]:
    uuids = [gpu.uuid for gpu in world.state.gpus]
    return [uuids.index(process.gpu_uuid) for process in world.state.processes if process.memory_bytes == 8 * GIB]


def held(world: World) -> list[tuple[str, ...]]:
    return [reservation.held for reservation in reservations(world.host) or [] if reservation.name == "train"]


def test_a_job_that_is_moved_keeps_its_limit_its_place_and_its_record(cli: Cli, start: Real, world: World) -> None:
    job = start("--movable", "--memory", "9G", "--name", "train")
    target = world.state.gpus[1].uuid
    cli("move", "train", "-g", "1", host=SPEC).ok()
    job.says("on GPU 1 now, moved by hand")
    until(lambda: held(world) == [(target,)], "its place is there")
    until(lambda: (record := find_record(world.host, "train")) and record.devices == (target,), "its record says so")
    # The limit holds on the new GPU.
    pid = next(process.pid for process in world.state.processes if process.memory_bytes == 8 * GIB)
    admin.add_process(SPEC, "1", memory_bytes=4 * GIB, parent_pid=pid)
    assert "over its limit of 9.0 GiB" in job.result().ends(1).err


def test_it_moves_for_a_job_that_waits_and_for_nobody_else(real: Real, start: Real, world: World) -> None:
    other = admin.add_process(SPEC, "1", memory_bytes=10 * GIB)
    job = start("--movable", "--memory", "9G", "--name", "train")
    large = real("run", "--wait", "-g", "0", "--memory", "20G", "--", "true", host=SPEC)
    job.says("on GPU 1 now, to make room for")
    assert (large.result().code, gpus(world)) == (0, [1])
    # It has room nowhere else now.
    admin.add_process(SPEC, "0", memory_bytes=20 * GIB)
    waiting = real("run", "--wait", "--timeout", "2s", "-g", "1", "--memory", "12G", "--", "true", host=SPEC)
    assert (waiting.result().code, gpus(world)) == (19, [1])
    admin.end_process(SPEC, other)
    job.end()


@pytest.mark.needs_root
def test_it_does_not_move_to_a_gpu_that_another_user_has_reserved(real: Real, start: Real, world: World) -> None:
    world.lease(1, 1000)
    job = start("--movable", "--memory", "9G", "--name", "train")
    large = real("run", "--wait", "--timeout", "2s", "-g", "0", "--memory", "20G", "--", "true", host=SPEC)
    assert (large.result().code, gpus(world)) == (19, [0])
    job.end()


def test_without_the_option_it_stays(real: Real, start: Real, world: World) -> None:
    job = start("--swap", "request", "--memory", "9G")
    large = real("run", "--wait", "--timeout", "2s", "-g", "0", "--memory", "20G", "--", "true", host=SPEC)
    assert (large.result().code, gpus(world)) == (19, [0])
    job.end()
