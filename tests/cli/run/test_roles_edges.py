"""An opportunistic job beside several production jobs, and a pause under MPS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.model import Way
from gpushare.base.units import GIB
from gpushare.run.jobs import PRODUCTION, find_record, write_record
from gpushare.run.results import Tuned, keep_tuned
from tests.cli.drive import Cli, Refused, World


@pytest.fixture
def two(world: World) -> Iterator[list[str]]:
    """Start two processes that stand for production jobs, with 40 and 60 GiB, and return their names."""
    with subprocess.Popen(["sleep", "600"]) as first, subprocess.Popen(["sleep", "600"]) as other:
        try:
            for name, process, peak in (("web", first, 40), ("llm", other, 60)):
                world.record(name, process.pid, PRODUCTION, memory_peak_bytes=peak * GIB)
            yield ["llm", "web"]
        finally:
            first.kill()
            other.kill()


@pytest.mark.usefixtures("two")
def test_a_pause_asks_which_of_several_is_spared(refused: Refused) -> None:
    text = refused("run", "--opportunistic", "--yield", "pause", "--", "true", code="several_production", exit_code=2)
    assert "2 production jobs run on GPU 0: llm, web" in text
    assert "--for llm" in text


@pytest.mark.usefixtures("two")
def test_the_memory_of_all_of_them_is_left_to_them(cli: Cli) -> None:
    planned = cli("run", "--opportunistic", "-n", "--", "true").ok()
    limit = int(planned.out.partition("MEM_LIMIT=0=")[2].partition("M")[0])
    total = 143771
    assert total - 102 * 1024 < limit < total - 100 * 1024
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60.0" in planned.out


def test_it_is_said_whose_memory_the_limit_does_not_leave(cli: Cli, two: list[str], world: World) -> None:
    record = find_record(world.host, two[0])
    assert record is not None
    write_record(world.host, replace(record, memory_peak_bytes=None))
    planned = cli("run", "--opportunistic", "-n", "--", "true").ok()
    assert "_MEM_LIMIT=0=" in planned.out
    assert "the memory limit leaves nothing to 'llm', whose memory is unknown; set one with --memory" in planned.err


@pytest.mark.parametrize(("words", "told"), [((), True), (("--threads", "90"), False)])
def test_the_default_cap_is_told_where_it_is_taken(cli: Cli, words: tuple[str, ...], told: bool) -> None:
    planned = cli("run", "--opportunistic", "-n", *words, "--", "true").ok()
    assert ("using the default: cap 60 %" in planned.err) is told


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("nope", "no_production", "no job 'nope' is running, and tune has kept no result for it"),
        ("4194300", "no_process", "there is no process 4194300"),
        ("tuned", "gpu_not_named", "this host has 4 GPUs; 'tuned' is not running: say where this job is to run"),
    ],
)
def test_the_job_to_spare_is_looked_for_before_its_gpu(target: str, code: str, text: str) -> None:
    world = World.new("sim:4xh100")
    keep_tuned(
        world.host,
        Tuned(
            name="tuned", gpu_name=None, driver=None, threads_percent=60.0, low_priority=True, way=Way.CAPS, path=Path()
        ),
    )
    answer = world.run("run", "--opportunistic", "--for", target, "--", "true")
    assert (answer.error["code"], answer.error["message"]) == (code, text)
