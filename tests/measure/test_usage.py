"""What a run draws from its GPU, and who else is there."""

from __future__ import annotations

import pytest

from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.measure.usage import UsageMeter
from gpushare.sim import admin
from gpushare.sim.state import StateFile
from tests.clock import Clock

SPEC = "sim:h200"


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def test_the_energy_counter_only_rises_and_is_joules(host: Host) -> None:
    first = host.nvml.energy_joules(0)
    with StateFile(SPEC).changed() as state:
        state.created_at -= 10
    second = host.nvml.energy_joules(0)
    # An idle H200 draws about 96 W.
    assert second - first == pytest.approx(959, rel=0.05)


def test_without_a_counter_energy_is_unknown_not_zero() -> None:
    host = connect("sim:p100")
    assert host.nvml.energy_joules(0) is None
    usage = UsageMeter(host, Device(gpu=host.nvml.gpu(0))).usage()
    assert (usage.energy_joules, usage.power_watts) == (None, None)


def test_energy_counts_from_the_restart_to_the_stop(host: Host, device: Device, clock: Clock) -> None:
    meter = UsageMeter(host, device, clock=clock)
    clock.now += 5
    meter.restart()
    clock.now += 2
    meter.stop()
    clock.now += 50
    assert meter.usage().seconds == 2


def test_the_peak_is_the_sum_of_the_copies_and_stays(host: Host, device: Device, clock: Clock) -> None:
    pids = [admin.add_process(SPEC, "0", memory_bytes=size * GIB) for size in (2, 3)]
    meter = UsageMeter(host, device, clock=clock)
    meter.sample(pids)
    admin.end_process(SPEC, pids[0])
    clock.now += 1
    meter.sample(pids[1:])
    usage = meter.usage()
    assert usage.memory_peak_bytes == 5 * GIB
    assert usage.others == ()


@pytest.fixture
def pair(host: Host) -> tuple[int, int]:
    """Return the PIDs of the run and of a stranger."""
    mine, other = (admin.add_process(SPEC, "0", memory_bytes=GIB) for _ in range(2))
    return mine, other


def test_who_is_not_of_the_run_is_named(host: Host, device: Device, clock: Clock, pair: tuple[int, int]) -> None:
    mine, other = pair
    meter = UsageMeter(host, device, clock=clock)
    meter.sample([mine])
    clock.now += 0.5
    meter.sample([mine])
    usage = meter.usage()
    assert (usage.others, usage.other_names, usage.memory_peak_bytes) == ((other,), {other: "python3"}, GIB)


def test_who_is_there_for_a_moment_only_is_not_named(
    host: Host, device: Device, clock: Clock, pair: tuple[int, int]
) -> None:
    """A CUDA program that starts on another GPU is."""
    mine, other = pair
    meter = UsageMeter(host, device, clock=clock)
    for _ in range(3):
        meter.sample([mine])
        clock.now += 0.1
    admin.end_process(SPEC, other)
    clock.now += 0.5
    meter.sample([mine])
    assert meter.usage().others == ()


def test_beside_short_runs_who_stays_is_named(host: Host, device: Device, clock: Clock, pair: tuple[int, int]) -> None:
    mine, other = pair
    seen: dict[int, float] = {}
    for others in ((), (other,)):
        meter = UsageMeter(host, device, seen=seen, clock=clock)
        meter.sample([mine])
        assert meter.usage().others == others
        clock.now += 0.5


def test_who_has_gone_is_forgotten_before_the_pid_comes_again(
    host: Host, device: Device, clock: Clock, pair: tuple[int, int]
) -> None:
    mine, other = pair
    seen = {other: clock.now, other + 1: clock.now}
    UsageMeter(host, device, seen=seen, clock=clock).sample([mine])
    assert seen == {other: clock.now}


def test_neighbours_in_other_instances_are_none(host: Host, device: Device, clock: Clock) -> None:
    admin.set_mig(SPEC, "0", ["1g.18gb", "1g.18gb"])
    first, second = host.nvml.gpu(0).mig_instances
    mine = admin.add_process(SPEC, "0", mig=first.uuid)
    beside = admin.add_process(SPEC, "0", mig=second.uuid)
    for instances, others in (
        ((first.gpu_instance_id,), ()),
        ((first.gpu_instance_id, second.gpu_instance_id), (beside,)),
    ):
        meter = UsageMeter(
            host, device, gpu_instances=[instance for instance in instances if instance is not None], clock=clock
        )
        meter.sample([mine])
        clock.now += 1
        meter.sample([mine])
        assert meter.usage().others == others


def test_in_a_container_memory_is_what_the_device_gained(host: Host, device: Device, clock: Clock) -> None:
    with StateFile(SPEC).changed() as state:
        state.pid_namespace_is_host = False
    admin.add_process(SPEC, "0", memory_bytes=GIB)
    meter = UsageMeter(host, device, clock=clock)
    admin.add_process(SPEC, "0", memory_bytes=4 * GIB)
    meter.sample([12345])
    assert meter.usage().memory_peak_bytes == 4 * GIB
    assert meter.usage().others == ()


def test_outside_mps_needs_two_looks_and_the_daemons_word(host: Host, device: Device, clock: Clock) -> None:
    mine = admin.add_process(SPEC, "0")
    # One that is not of the run is no copy that missed MPS.
    admin.add_process(SPEC, "0")
    for known, outside in ((set(), (mine,)), ({mine}, ()), (None, ())):
        meter = UsageMeter(host, device, clients=lambda known=known: known, clock=clock)
        meter.sample([mine])
        assert meter.usage().outside == ()
        clock.now += 1
        meter.sample([mine])
        assert meter.usage().outside == outside


def test_a_lost_gpu_ends_no_measurement(host: Host, device: Device, clock: Clock) -> None:
    meter = UsageMeter(host, device, clock=clock)
    admin.set_fault(SPEC, "lost", "0", None)
    meter.sample([1])
    meter.stop()
    assert meter.usage().energy_joules is None
