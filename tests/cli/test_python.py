"""``import gpushare`` in scripts and notebooks: docs/python.md as it stands, and what the verbs refuse."""

from __future__ import annotations

import math
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gpushare
from gpushare.host.checkpoint import CHECKPOINTED, RUNNING
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.run.jobs import find_record
from gpushare.run.stop import Target, find_target
from gpushare.sim import admin
from gpushare.sim.channels import CHANNELS
from tests.cli.drive import H200, ROOT, Patch, World, missing, until

LOOP = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05", "--seconds", "90")


@pytest.fixture(autouse=True)
def host(world: World, monkeypatch: Patch, tmp_path: Path) -> None:
    world.run("status")
    monkeypatch.setenv("GPUSHARE_HOST", H200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_the_page_runs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    Path("train.py").write_text("print('trained')\n", encoding="utf-8")
    job = gpushare.start(LOOP, name="train-2", options=["--swap", "request"])
    until(lambda: find_record(world.host, job.name), "it runs")
    until(lambda: any(process.memory_bytes for process in world.state.processes), "it is on the GPU")
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own page
    out = capsys.readouterr().out
    assert (names["exit_code"], missing(out, "trained\n", "limit_above_gpu"), world.pids()) == (0, [], [])
    assert re.search(r"^0 \d+ \[\]$", out, re.MULTILINE)


def test_a_job_is_paused_and_swapped_by_its_pid(world: World) -> None:
    pid = admin.add_process(H200)
    job = gpushare.job(pid)
    job.pause()
    assert world.process(pid).channels_off == sorted(CHANNELS)
    job.resume()
    assert world.process(pid).channels_off == []
    job.swap_out()
    assert world.process(pid).checkpoint == CHECKPOINTED
    job.swap_in()
    assert world.process(pid).checkpoint == RUNNING
    with pytest.raises(gpushare.TimedOut):
        job.wait(0)
    # Nobody agreed for another user.
    pid = admin.add_process(H200, user="daemon")
    with pytest.raises(gpushare.NeedsConsent if world.host.root else gpushare.NoPermission) as raised:
        gpushare.job(pid).pause()
    assert "yes=True" in raised.value.hint or not world.host.root
    assert world.process(pid).channels_off == []


def test_a_job_moves_to_another_gpu(monkeypatch: Patch) -> None:
    world = World.new("sim:2xh200")
    monkeypatch.setenv("GPUSHARE_HOST", world.spec)
    pid = admin.add_process(world.spec)
    gpushare.job(pid).move("1")
    assert [len(world.host.nvml.processes(gpu) or ()) for gpu in (0, 1)] == [0, 1]
    with pytest.raises(gpushare.NotFound):
        gpushare.job(pid).move("7")


def test_a_block_stops_its_job_and_leaves_the_signals_of_the_caller(world: World) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with gpushare.start(["sleep", "60"]) as job:
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
        assert find_record(world.host, job.name) is not None
    assert (world.pids(), job.wait()) == ([], 143)
    with gpushare.start(["sleep", "60"], production="serve") as serve:
        assert serve.name == "serve"
    with gpushare.start(["true"]) as ended:
        assert ended.wait() == 0


def test_threads_get_their_own_jobs(world: World) -> None:
    def output(number: int) -> tuple[str, int | None, str]:
        command = ["sh", "-c", f"sleep 0.2; echo result={number}"]
        with gpushare.start(command, memory="40G", wait=True) as job:
            return job.name, job.wait(), re.findall("^result=(.*)$", job.output.read_text(), re.MULTILINE)[-1]

    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(output, range(4)))
    assert sorted(name for name, _, _ in jobs) == ["sh-1", "sh-2", "sh-3", "sh-4"]
    assert [(code, text) for _, code, text in jobs] == [(0, str(number)) for number in range(4)]
    assert world.pids() == []


def test_a_later_job_of_the_same_name_is_another_one(world: World) -> None:
    with gpushare.start(["false"], name="train") as first:
        assert first.wait() == 1
        second = gpushare.start(["sleep", "60"], name="train")
        with pytest.raises(gpushare.NotFound, match="this job 'train' has ended"):
            first.pause()
        assert first.wait() == 1
        with pytest.raises(gpushare.NotFound, match="a later job has its name"):
            _ = first.output
        assert second.output.exists()
    assert find_record(world.host, "train") is not None
    second.stop()
    assert (second.wait(), world.pids()) == (143, [])


def test_a_job_whose_end_nobody_saw_hides_no_earlier_one(world: World) -> None:
    assert gpushare.start(["sh", "-c", "exit 7"], name="train").wait() == 7
    # Of a later one there is only the record of a program and its gpushare, which both were killed.
    world.record("train", 4194302, started=1, supervisor=Identity(4194303, 1))
    assert gpushare.job("train").wait(20) is None


def test_a_job_that_has_no_record_yet_is_stopped(world: World, monkeypatch: Patch) -> None:
    looks: list[str] = []

    def find(host: Host, text: str) -> Target:
        looks.append(text)
        if len(looks) == 1:
            raise gpushare.NotFound("it is between the line and its record", "", code="no_job")
        return find_target(host, text)

    with gpushare.start(["sleep", "60"], name="train") as job:
        monkeypatch.setattr("gpushare.run.stop.find_target", find)
    assert (looks, job.wait(), world.pids()) == (["train", "train"], 143, [])


def test_a_job_that_was_stopped_in_the_line_is_gone_whatever_the_time(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gpushare.run.python._NOWHERE_SECONDS", 0.05)
    assert gpushare.start(["false"], name="train").wait() == 1
    with gpushare.start(["sleep", "60"], memory="130G") as first:
        waiting = gpushare.start(["sleep", "60"], memory="130G", wait=True, name="train")
        with pytest.raises(gpushare.TimedOut):
            waiting.wait(0)
        waiting.stop()
        for job in (waiting, gpushare.job(waiting.name)):
            with pytest.raises(gpushare.NotFound):
                job.wait(0)
    assert (first.wait(), world.pids()) == (143, [])


@pytest.mark.parametrize(
    ("act", "kind", "code"),
    [
        (lambda: gpushare.job("nobody").pause(), gpushare.NotFound, "no_job"),
        (lambda: gpushare.job("nobody").resume(), gpushare.NotFound, "not_paused"),
        (lambda: gpushare.job("nobody").stop(), gpushare.NotFound, "no_job"),
        (lambda: gpushare.job("nobody").swap_in(), gpushare.NotFound, "no_job"),
        (lambda: gpushare.job("a b").swap_out(), gpushare.BadUsage, "bad_name"),
        (lambda: gpushare.status("7"), gpushare.NotFound, "unknown_gpu"),
        (lambda: gpushare.start([]), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["true"], options=["--nonsense"]), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["true"], options=["--production=serve"]), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["true"], options=["--dry-run"]), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["true"], options=["--host", "sim:t4"]), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["true"], options=["--help"]), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["true"], options="--swap turns"), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start("sleep 5"), gpushare.BadUsage, "usage"),
        (lambda: gpushare.start(["sleep", None]), gpushare.BadUsage, "usage"),  # type: ignore[list-item]
        (lambda: gpushare.job("nobody").pause("10"), gpushare.BadUsage, "bad_duration"),
        (lambda: gpushare.job("nobody").pause(-1), gpushare.BadUsage, "bad_duration"),
        (lambda: gpushare.job("nobody").wait(math.nan), gpushare.BadUsage, "bad_duration"),
        (lambda: gpushare.job("nobody").output, gpushare.NotFound, "no_job"),
        (lambda: gpushare.job(admin.add_process(H200)).output, gpushare.NotFound, "no_job"),
        (lambda: gpushare.start(["no-such-program"]), gpushare.NotFound, "command_not_found"),
    ],
)
def test_errors_are_those_of_the_commands(act: Callable[[], object], kind: type[Exception], code: str) -> None:
    with pytest.raises(kind) as raised:
        act()
    assert isinstance(raised.value, gpushare.GpushareError)
    assert (raised.value.code, bool(raised.value.hint)) == (code, True)
    # A traceback shows it from Python 3.11 on.
    assert f"hint: {raised.value.hint}" in raised.value.__notes__


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--host=sim:t4", 'name the host in the environment: os.environ["GPUSHARE_HOST"] = "sim:h200"'),
        ("-n", "see the plan with the command: gpushare run --dry-run ..."),
        ("-o", "leave it out"),
        ("--name", 'give it as an argument: name="train"'),
    ],
)
def test_what_start_sets_itself_is_no_option(world: World, option: str, hint: str) -> None:
    with pytest.raises(gpushare.BadUsage) as raised:
        gpushare.start(["sleep", "60"], options=[option])
    assert (raised.value.message, raised.value.hint, world.pids()) == (f"{option} is not for options", hint, [])


def test_a_value_of_an_option_may_look_like_one(world: World) -> None:
    with gpushare.start(["sleep", "60"], production="web", options=["--metric", "-name ([0-9]+)"]) as job:
        until(lambda: find_record(world.host, job.name), "it runs")
    with pytest.raises(gpushare.BadUsage) as raised:
        gpushare.start(None)  # type: ignore[arg-type]
    assert raised.value.hint == 'give a list of words: command=["python3", "train.py"]'


def test_plain_values_are_taken_as_the_command_line_takes_them(world: World, monkeypatch: Patch) -> None:
    with gpushare.start(["sleep", 60], gpu=0, options=["--slice", "2ms"]) as job:
        until(lambda: gpushare.status(0).gpus[0].processes, "it is on the GPU")
        with pytest.raises(gpushare.TimedOut):
            job.wait("1ms")
        job.pause("10m")
        until(lambda: world.state.processes[0].channels_off, "it is paused")
        job.resume()
        job.stop("5s")
        assert job.wait() == 143
    moved = World.new("sim:2xh200")
    monkeypatch.setenv("GPUSHARE_HOST", moved.spec)
    gpushare.job(admin.add_process(moved.spec)).move(1)
    assert [len(moved.host.nvml.processes(gpu) or ()) for gpu in (0, 1)] == [0, 1]


def test_nothing_else_is_public() -> None:
    with pytest.raises(AttributeError):
        _ = gpushare.Host
    assert dir(gpushare) == gpushare.__all__
