"""The ways for jobs that do not fit at the same time: the answer, its cost, and what is printed, run as printed."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import pytest

from gpushare.advice.ways import way_of
from gpushare.base.model import Way
from tests.cli.advise.asking import advised, commands, on_a_terminal, told
from tests.cli.drive import Cli, Real, Refused, World, until
from tests.cli.run.test_memory import JOB

A30 = "sim:a30"
TWO = ("--processes", "2", "--users", "same", "--saturating")


def job(size: str, seconds: float) -> str:
    return shlex.join((*JOB, "--footprint", size, "--seconds", str(seconds)))


def words_of(command: str, old: str = "", new: str = "") -> list[str]:
    """Return the words of a printed command after ``gpushare``, with a shorter time in a test."""
    assert f"--swap {old}" in command or not old
    command = command.replace(f"--swap {old}", f"--swap {new}")
    first, *rest = shlex.split(command)
    assert first == "gpushare"
    return rest


def on_gpu(world: World, gib: int = 0) -> None:
    """Wait until the job is on the GPU with its memory: at first it has its context alone, and would leave with that."""

    def has_its_memory() -> bool:
        state = world.file.read()
        return state is not None and any(process.memory_bytes >= gib << 30 for process in state.processes)

    until(has_its_memory, "the job is on the GPU with its memory")


def pair(tmp_path: Path, *, users: tuple[str, str] | None = None, seconds: float = 30) -> Path:
    file = tmp_path / "pair.yaml"
    ones = [("serve", "production", "12G", 2.0), ("batch", "opportunistic", "16G", seconds)]
    lines = [
        f"  - {{name: {name}, role: {role}, memory: {size}, command: '{job(size, time)}', "
        + (f"user: {users[number]}}}" if users else "users: same}")
        for number, (name, role, size, time) in enumerate(ones)
    ]
    file.write_text("\n".join(["workloads:", *lines]))
    return file


# -- the answer ----------------------------------------------------------------------------------------


def test_the_cost_is_a_number_with_its_source(cli: Cli) -> None:
    assert advised(cli, "h200", TWO, "--memory", "60G", "--needs", "progress")["cost"] is None
    data = advised(cli, "h200", TWO, "--memory", "80G", "--needs", "progress")
    assert (data["winner"], data["memory"]["fits"]) == ("turns", False)
    cost = data["cost"]
    assert cost["kept_share"] == pytest.approx(0.9)
    assert cost["switch_seconds"] == pytest.approx(cost["out_seconds"] + cost["in_seconds"], abs=0.11)
    assert cost["turn_seconds"] == pytest.approx(9 * cost["switch_seconds"], rel=0.01)
    assert cost["host_bytes"] > 2 * 80 << 30
    assert "H200" in cost["source"]
    assert "run at 90 % of the speed that they have one after another" in cost["sentence"]


def test_a_latency_target_is_productions_which_never_leaves(cli: Cli) -> None:
    words = ("--production", "1", "--opportunistic", "1", "--memory", "16G", "--users", "same", "--latency", "20ms")
    assert advised(cli, A30, words)["winner"] == "swap"
    assert advised(cli, A30, TWO, "--memory", "16G", "--needs", "progress", "--latency", "20ms")["winner"] is None


def test_the_screen_says_the_cost_and_how_to_see_it(cli: Cli) -> None:
    words = ("advise", "-y", *TWO, "--memory", "16G", "--needs", "progress")
    out = " ".join(cli(*words, host=A30, output="table").ok().out.split())
    assert "cost: a switch takes about 8.7 s out and 3.6 s back: with turns of" in out
    assert "gpushare swap list" in out
    plain = cli(*words, host=A30, output="plain").ok().out
    assert [line for line in plain.splitlines() if line.startswith(("cost\t", "cost "))]


@pytest.mark.parametrize("way", ["turns", "swap"])
def test_a_way_is_explained_and_has_no_column_in_the_table(cli: Cli, refused: Refused, way: str) -> None:
    out = cli("advise", *TWO, "--memory", "2G", "--way", way, host=A30, output="table").ok().out
    assert "all of them fit at the same time" in " ".join(out.split())
    assert "host memory" in cli("explain", way, host=None).ok().out
    assert "give streams, mps" in refused("compare", way, code="bad_way", exit_code=2)
    assert [way_of(text) for text in ("by-turns", "swapping", "idle")] == [Way.TURNS, Way.SWAP, Way.SWAP]


@pytest.mark.parametrize(("prepare", "more", "rule"), [
    (("fault", "driver", "565.57.01"), (), "leaving-driver"),
    (("fault", "host-memory", "20G"), (), "leaving-host-memory"), ((), ("--needs", "nccl"), "leaving-peers"),
    ((), ("--latency", "50ms"), "leaving-latency"),
])  # fmt: skip
def test_what_excludes_them(cli: Cli, prepare: tuple[str, ...], more: tuple[str, ...], rule: str) -> None:
    if prepare:
        cli("sim", *prepare, host=A30).ok()
    data = advised(cli, A30, TWO, "--memory", "16G", "--needs", "progress", *more)
    assert data["winner"] not in {"turns", "swap"}
    verdict = next(verdict for verdict in data["verdicts"] if verdict["way"] == "turns")
    assert verdict["outcome"] == "refused"
    assert rule in {reason["rule"] for reason in verdict["reasons"] if reason["kind"] == "veto"}
    if rule not in {"leaving-host-memory", "leaving-latency"}:
        assert not any("--swap request" in command for command in commands(data))


def test_the_first_job_that_does_not_fit_next_to_a_stranger_waits(cli: Cli) -> None:
    cli("sim", "add", "-g", "0", "--memory", "16G", "--user", "1001", host=A30).ok()
    data = advised(cli, A30, "--processes 1 --memory 16G --command true")
    assert commands(data) == ["gpushare run -g 0 --slice 2ms --wait --memory 16884M -- true"]


# -- what is printed, run ------------------------------------------------------------------------------


def test_turns_as_printed(cli: Cli, real: Real) -> None:
    data = advised(cli, A30, TWO, "--memory", "14G", "--needs", "progress", "--command", job("14G", 60))
    assert data["winner"] == "turns"
    first, *rest = words_of(commands(data)[0])
    assert "nine times the measured switch" in cli(first, "-n", *rest, host=A30).ok().out
    (command,) = commands(data)
    pair = [command, command.replace("job-1", "job-2")]
    both = [real(*words_of(command, "turns", "turns=0.5s"), host=A30) for command in pair]
    for one in both:
        one.says("out of the GPU: 14.0 GiB to host memory")
        one.says("back on the GPU: 14.0 GiB")
    for one in both:
        one.signal(signal.SIGINT)
    assert [one.result().code for one in both] == [0, 0]


def test_idle_as_printed(cli: Cli, real: Real) -> None:
    program = shlex.join((sys.executable, "-c", "import time; time.sleep(60)"))
    data = advised(cli, A30, TWO[:4], "--memory", "14G", "--pattern", "interactive", "--command", program)
    assert data["winner"] == "swap"
    (command,) = commands(data)
    world = World(A30)
    first = real(*words_of(command, "idle=10m", "idle=1s"), host=A30)
    on_gpu(world)
    world.alter(world.pids()[0], sm_percent=0)
    first.says("out of the GPU")
    listed = cli("swap", "list", host=A30, output="json").ok().data
    assert [job["state"] for job in listed["jobs"]] == ["out"]
    # Its place is free for the next.
    second = real(*words_of(command.replace("job-1", "job-2")), host=A30)
    second.says("runs on GPU 0")


@pytest.mark.parametrize("users", [None, ("web", "ann")])
def test_production_first_as_printed(cli: Cli, real: Real, tmp_path: Path, users: tuple[str, str] | None) -> None:
    data = advised(cli, A30, "-f", str(pair(tmp_path, users=users)))
    assert data["winner"] == "swap"
    serve, batch = commands(data)
    other = real(*(words_of(batch) if users is None else words_of(batch, "turns=60s", "turns=0.5s")), host=A30)
    on_gpu(World(A30), gib=16)
    web = real(*words_of(serve), host=A30)
    other.says("out of the GPU: 16.0 GiB")
    assert web.result().code == 0
    assert other.end().code == 0


def test_an_mps_server_that_has_the_gpu_alone_is_stopped_first(cli: Cli) -> None:
    words = (*TWO, "--memory", "16G", "--needs", "progress")
    cli("mps", "start", "-g", "0", host=A30).ok()
    assert commands(advised(cli, A30, words))[0].startswith("gpushare run")
    cli("mps", "stop", "-g", "0", host=A30).ok()
    cli("mps", "start", "-g", "0", "--exclusive", host=A30).ok()
    data = advised(cli, A30, words)
    assert data["winner"] == "turns"
    assert commands(data)[0] == "gpushare mps stop -g 0"


@pytest.mark.parametrize("users", [None, ("web", "ann")])
def test_next_to_production_that_runs_only_its_growth_tells(
    cli: Cli, tmp_path: Path, users: tuple[str, str] | None
) -> None:
    file = pair(tmp_path, users=users)
    file.write_text(file.read_text().replace("role: production", "role: production, running: yes"))
    data = advised(cli, A30, "-f", str(file))
    (batch,) = commands(data)
    assert "--opportunistic --yield swap" in batch
    if users is None:
        assert data["winner"] == "swap"
        assert any("grows steadily" in what for what in told(data))
        file.write_text(file.read_text().replace("role: opportunistic", "role: opportunistic, running: yes"))
        assert advised(cli, A30, "-f", str(file))["winner"] != "swap"


def test_whether_they_are_to_advance_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # The numbers are given; of the questions, only the one about advancing is answered.
    words = (*TWO, "--memory", "12G", "--isolation", "none", "--latency", "none")
    out, said = on_a_terminal(monkeypatch, "steady\nyes\n", *words)
    assert "Must each of them keep advancing, instead of waiting until the one before it" in said
    assert "--swap turns" in out


def test_on_several_gpus_the_line_is_for_all_of_them(cli: Cli) -> None:
    words = "--processes 5 --users same --saturating --memory 16G --command true"
    queue = advised(cli, "2xa30", words)
    assert (queue["winner"], commands(queue)) == (
        "whole-gpu",
        ["gpushare run -g 0-1 --slice 2ms --wait --memory 90% --over warn -- true"],
    )
    turns = commands(advised(cli, "2xa30", f"{words} --needs progress"))
    assert turns[0] == "gpushare run -g 0-1 --swap turns --memory 16884M --name job-1 -- true"
    # Two have a GPU each.
    fits = advised(cli, "2xa30", words.replace("5", "2"))
    assert (fits["answer"], fits["confidence"], commands(fits)) == ("a GPU for each", "high", commands(queue))
