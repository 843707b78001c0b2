"""``gpushare run --gpus N``: a job of several GPUs gets all of them at once, and its ranks are one job for every verb."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare.base.errors import NotSupported
from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.memory.ledger import Place, Request, reservations
from gpushare.run.jobs import records
from gpushare.run.start import CpuBinding
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Refused, Started, World, refusals, sure, until

SPEC = "sim:4xh200"
# What torchrun does: one process for each GPU, which finds its own by LOCAL_RANK.
RANKS = """
IFS=, read -ra uuids <<<"$CUDA_VISIBLE_DEVICES"
for rank in "${!uuids[@]}"; do
  LOCAL_RANK=$rank %s -S -m gpushare.sim.job --every 0.05 --footprint %s --seconds %s &
done
wait
"""


def ranks(size: str = "20G", seconds: str = "30") -> tuple[str, ...]:
    return "bash", "-c", RANKS % (sys.executable, size, seconds)


@pytest.fixture
def four() -> Iterator[World]:
    """Yield a simulated host with four GPUs."""
    yield World.new(SPEC)
    admin.reset(SPEC)


def start(real: Real, four: World, *words: str) -> Started:
    return real("run", *words, host=four.spec)


def on_gpus(world: World) -> set[int]:
    """Return the GPUs on which ranks are."""
    index = {gpu.uuid: number for number, gpu in enumerate(world.state.gpus)}
    return {index[process.gpu_uuid] for process in world.state.processes if process.memory_bytes > GIB}


def fixed(world: World) -> tuple[str, ...]:
    """Return the two GPUs for which the only job that waits has decided."""
    waiting = [reservation.keys for reservation in reservations(world.host) or [] if reservation.waits]
    return next((keys for keys in waiting if len(keys) == 2), ())


@refusals(
    "too_few_gpus 2: --gpus 5 -- true | --gpus 3 -g 0,1 -- true",
    "one_gpu 2: --gpus 2 -g all -- true",
    "usage 2: --gpus 0 -- true",
    "never_fits 2: --gpus 2 --wait --memory 500G -- true | --gpus 2 --memory 500G -- true",
)
def test_wrong_usage(refused: Refused, four: World, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("run", *words, code=code, exit_code=exit_code, host=four.spec)


def test_too_few_gpus_and_mig_mode(refused: Refused, four: World, cli: Cli) -> None:
    words = ("run", "--gpus", "2", "-g", "0", "--", "true")
    text = refused(*words, code="too_few_gpus", exit_code=2, host=four.spec)
    assert "give it fewer: --gpus 1; or name more GPUs with -g" in text
    four.run("mig", "enable", "-g", "0")
    words = ("run", "--gpus", "2", "-g", "0,1", "--", "true")
    assert "in MIG mode" in refused(*words, code="mig_enabled", exit_code=3, host=four.spec)
    assert "GPUs 1, 2, 3" in cli("run", "-n", "--gpus", "3", "--", "true", host=four.spec).ok().out


def test_several_gpus_beside_production(real: Real, cli: Cli, four: World) -> None:
    job = start(real, four, "-g", "1", "--production", "web", "--", "sleep", "600")
    until(lambda: len(four.pids()) == 1, "it runs")
    beside = ("--opportunistic", "--for", "web", "--yield", "pause", "--gpus", "2")
    assert "GPUs 0, 1" in cli("run", "-n", *beside, "-g", "0,1", "--", "true", host=four.spec).ok().out
    job.end()
    # Production itself is on several, and found on each.
    job = start(real, four, "--gpus", "2", "-g", "0,1", "--production", "web", "--", *ranks())
    until(lambda: on_gpus(four) == {0, 1}, "both ranks are on their GPUs")
    for gpu in ("0", "1"):
        plan = cli("run", "-n", "-g", gpu, "--opportunistic", "--for", "web", "--", "true", host=four.spec).ok()
        assert "'web'" in plan.err + plan.out
    elsewhere = cli("run", "-g", "2", "--opportunistic", "--for", "web", "--", "true", host=four.spec)
    assert "'web' runs on a different device" in elsewhere.lines("error")[0]
    job.end()


def test_a_program_sees_its_gpus_in_one_variable(cli: Cli, four: World) -> None:
    cli("run", "--gpus", "3", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES >&2", host=four.spec).ok()
    plan = cli("-o", "json", "run", "-n", "--gpus", "2", "-g", "1,3", "--", "true", host=four.spec).ok()
    (step,) = plan.data["steps"]
    uuids = [gpu.uuid for gpu in four.state.gpus]
    assert f"CUDA_VISIBLE_DEVICES={uuids[1]},{uuids[3]} " in step["command"]
    assert step["what"] == "run true on GPUs 1, 3"


def test_ranks_are_one_job_in_every_list(real: Real, cli: Cli, four: World) -> None:
    job = start(real, four, "--gpus", "2", "--wait", "--memory", "60G", "--name", "pair", "--", *ranks())
    until(lambda: on_gpus(four) == {0, 1}, "both ranks are on their GPUs")
    (listed,) = cli("jobs", host=four.spec, output="json").ok().data["jobs"]
    assert (listed["gpu_indexes"], listed["device"], listed["memory_limit_bytes"]) == ([0, 1], "GPUs 0, 1", 60 * GIB)
    assert listed["device_uuids"] == [gpu.uuid for gpu in four.state.gpus[:2]]
    assert "/ 120.0 GiB" in cli("jobs", host=four.spec).ok().out
    gpus = cli("status", host=four.spec, output="json").ok().data["gpus"]
    assert [gpu["jobs_reserved_bytes"] for gpu in gpus] == [60 * GIB, 60 * GIB, 0, 0]
    cli("pause", "pair", host=four.spec).ok()
    assert {bool(process.channels_off) for process in four.state.processes} == {True}
    cli("resume", "pair", host=four.spec).ok()
    assert {bool(process.channels_off) for process in four.state.processes} == {False}
    cli("stop", "pair", host=four.spec).ok()
    job.process.wait(20)
    assert (on_gpus(four), reservations(four.host)) == (set(), [])


def test_a_limit_holds_on_each_gpu(real: Real, cli: Cli, four: World) -> None:
    words = ("run", "--gpus", "2", "-g", "2,3", "--memory", "30G", "--name", "over", "--", *ranks("31G"))
    assert "over its limit of 30.0 GiB" in cli(*words, host=four.spec).ends(1).lines("error")[0]
    assert on_gpus(four) == set()
    (past,) = cli("jobs", host=four.spec, output="json").ok().data["jobs"]
    assert (past["device"], past["exit_code"]) == ("GPUs 2, 3", 1)


def test_it_waits_until_as_many_gpus_have_room(real: Real, cli: Cli, four: World) -> None:
    uuids = [gpu.uuid for gpu in four.state.gpus]
    held = [four.hold(100 * GIB, index) for index in (0, 1, 2)]
    plan = cli("-o", "json", "run", "-n", "--gpus", "2", "--wait", "--memory", "60G", "--", "true", host=four.spec).ok()
    assert not plan.data["room"]["starts_now"]
    job = start(real, four, "--gpus", "2", "--wait", "--memory", "60G", "--name", "pair", "--", *ranks(seconds="0.5"))
    keys = until(lambda: fixed(four), "it has fixed its GPUs")
    # The free one, and one of those that are not.
    assert uuids[3] in keys
    assert "2 of" in cli("jobs", host=four.spec).ok().out
    # A later job has the other GPUs, and what both leave on these.
    cli("run", "--wait", "--timeout", "0.1s", "-g", "3", "--memory", "100G", "--", "true", host=four.spec).ends(19)
    assert cli("run", "--wait", "--timeout", "5s", "-g", "3", "--memory", "70G", "--", "true", host=four.spec).code == 0
    next(place for place, uuid in zip(held, uuids, strict=False) if uuid in keys).leave()
    assert job.result().code == 0
    for place in held:
        place.leave()


def test_a_gpu_that_is_lost_is_replaced_by_another(real: Real, four: World) -> None:
    uuids = [gpu.uuid for gpu in four.state.gpus]
    blocker = Place(four.host, Request(memory_bytes=None, keys=tuple(uuids), client=False))
    blocker.take(*uuids[:3])
    job = start(real, four, "--gpus", "2", "--wait", "--memory", "60G", "--", *ranks(seconds="0.2"))
    until(lambda: fixed(four), "it has fixed its GPUs")
    admin.set_fault(four.spec, "lost", "3")
    until(lambda: (keys := fixed(four)) and uuids[3] not in keys, "it has chosen again")
    blocker.leave()
    assert job.result().code == 0


def test_a_job_is_bound_to_the_cpus_next_to_its_gpus(cli: Cli, four: World, tmp_path: Path) -> None:
    out = tmp_path / "cpus"
    ask = f"import os; open({str(out)!r}, 'w').write(str(sorted(os.sched_getaffinity(0))))"
    assert cli("run", "--bind", "-g", "3", "--", sys.executable, "-c", ask, host=four.spec).code == 0
    near = sure(four.host.nvml.cpus(3))
    assert near != four.host.nvml.cpus(0) or os.cpu_count() == 1
    assert out.read_text() == str(sorted(near))
    # Where they are unknown nothing is bound.
    admin.set_fault(four.spec, "not-supported", "0", "nvmlDeviceGetCpuAffinity")
    host = four.host
    device = select("0", host.nvml.sweep())[0]
    with pytest.raises(NotSupported, match="does not say which CPUs"):
        CpuBinding(host, (device,)).check()


def test_gpus_that_are_connected_go_together(cli: Cli, refused: Refused) -> None:
    world = World.new("sim:4xh200-nvl")
    nvml = world.host.nvml
    # A bridge connects two boards; the others meet in their CPU, or between the CPUs.
    assert ([nvml.closeness(0, other) for other in (1, 2, 3)], nvml.closeness(2, 3)) == ([6, 0, 0], 6)
    assert World.new(SPEC).host.nvml.closeness(0, 3) == 6
    world = World.new("sim:4xh200-nvl")
    words = ("farm", "--copies", "3", "--gpus", "2", "-g", "0,2,1,3", "--memory", "80G", "--", *ranks("70G", "0.5"))
    answer = cli("-o", "json", *words, host=world.spec).ok()
    copies = answer.data["copies"]
    assert "each with 80.0 GiB on each GPU; 2 at a time" in answer.err
    assert [copy["gpu_indexes"] for copy in copies[:2]] == [[0, 1], [2, 3]]
    assert {copy["state"] for copy in copies} == {"done"}
    # Both ranks of a copy count, each on its GPU.
    assert 70 * GIB <= copies[2]["memory_peak_bytes"] <= 80 * GIB
    # MPS, which would enforce a limit, has one GPU.
    assert (answer.data["job_memory_bytes"], answer.data["memory_limit_bytes"]) == (80 * GIB, None)
    assert (reservations(world.host), world.state.daemons) == ([], [])
    over = cli("farm", "--copies", "1", *words[3:7], "--memory", "60G", *words[9:], host=world.spec)
    assert "over its limit of 60.0 GiB" in over.lines("error")[0]
    spare = cli("farm", "-n", "--copies", "1", "--gpus", "3", "-g", "any", "--", "true", host=world.spec).ok()
    assert "run copy 0 on GPUs 0, 1, 2" in spare.out
    cli("mig", "enable", "-y", "-g", "3", host=world.spec).ok()
    refused("farm", "--copies", "1", *words[3:], code="mig_enabled", exit_code=3, host=world.spec)


def test_a_job_ends_at_its_time_and_tells_those_that_wait(real: Real, cli: Cli, refused: Refused, four: World) -> None:
    uuids = [gpu.uuid for gpu in four.state.gpus]
    for text in ("0", "-1"):
        refused("run", "--time", text, "--", "true", code="bad_duration", exit_code=2, host=four.spec)
    plan = cli("run", "-n", "-g", "0", "--time", "2h", "--memory", "20G", "--", "true", host=four.spec).ok()
    assert "end it after 2 h" in plan.out
    long = start(real, four, "-g", "0", "--time", "2h", "--memory", "100G", "--", *ranks("80G"))
    until(lambda: on_gpus(four) == {0}, "it runs")
    (running,) = reservations(four.host) or []
    assert running.until_ns is not None
    large = Place(four.host, Request(memory_bytes=120 * GIB, keys=(uuids[0],), client=False))
    small = ("run", "--wait", "--timeout", "0.3s", "-g", "0", "--memory", "30G")
    # It might run longer than the first one, and would delay the large one, which came before it.
    assert cli(*small, "--", "true", host=four.spec).code == 19
    assert cli(*small, "--time", "3h", "--", "true", host=four.spec).code == 19
    assert cli(*small, "--time", "1h", "--", "true", host=four.spec).code == 0
    large.leave()
    over = cli("run", "-g", "1", "--time", "0.3s", "--name", "over", "--", *ranks(seconds="30"), host=four.spec)
    assert (over.code, over.lines("error")[0]) == (1, "error: the job ran longer than its --time of 0.3 s: ended")
    long.end()


def test_ranks_yield_together_to_production_on_one_gpu(real: Real, refused: Refused, cli: Cli, four: World) -> None:
    words = ("run", "--gpus", "2", "-g", "1,2", "--opportunistic")
    refused(*words, "--", "true", code="no_production", exit_code=6, host=four.spec)
    spins = (sys.executable, "-c", "while True: pass")
    production = start(real, four, "-g", "2", "--production", "web", "--", *spins)
    until(lambda: "web" in [record.name for record in records(four.host)], "production runs")
    assert "run true on GPUs 1, 2" in cli(*words, "-n", "--yield", "requeue", "--", "true", host=four.spec).ok().out
    job = start(real, four, *words[1:], "--grace", "1s", "--", *ranks())

    def off() -> list[bool]:
        return [bool(process.channels_off) for process in four.state.processes if process.memory_bytes > GIB]

    until(lambda: off() == [True, True], "both ranks are paused")
    production.end(signal.SIGTERM)
    until(lambda: off() == [False, False], "both go on")
    job.end()


@refusals(
    "too_few_gpus 2: --gpus 5 -g any | --gpus 2 -g 1",
    "usage 2: --gpus 0 -g any",
    "bad_combination 2: --gpus 2 -g any --threads 30",
    "never_fits 2: --gpus 2 -g any --memory 500G",
)
def test_a_farm_of_several_gpus_is_refused(
    refused: Refused, four: World, words: tuple[str, ...], code: str, exit_code: int
) -> None:
    refused("farm", "--copies", "2", *words, "--", "true", code=code, exit_code=exit_code, host=four.spec)


def test_a_farm_of_several_gpus_is_measured_and_no_job_of_mps(cli: Cli, four: World, real: Real) -> None:
    words = ("farm", "--copies", "2", "--gpus", "2", "-g", "any", "--", *ranks("50G", "0.8"))
    answer = cli("-o", "json", *words, host=four.spec).ok()
    assert answer.data["memory_source"] == "measured"
    assert 60 * GIB <= answer.data["memory_bytes"] < 70 * GIB
    farm = real("farm", "--copies", "1", "--gpus", "2", "-g", "any", "--", *ranks(), host=four.spec)
    until(lambda: len(on_gpus(four)) == 2, "its ranks run")
    (way,) = [job["way"] for job in four.asked("jobs", "-o", "json").data["jobs"] if job["state"] != "ended"]
    assert way == "timeslice"
    farm.end(signal.SIGTERM)
