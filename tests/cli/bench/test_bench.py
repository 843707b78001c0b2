"""``gpushare bench`` on simulated hosts, with short real programs whose speed is known."""

from __future__ import annotations

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.benchmark import Metric
from gpushare.base.model import Way
from gpushare.base.selection import select_one
from gpushare.base.units import GIB
from gpushare.cli import options
from gpushare.connect import connect
from gpushare.host.claims import HeldClaim, live_claims, take_claim
from gpushare.measure.bench import Bench, Copies
from gpushare.measure.bench_data import read_bench, write_bench
from gpushare.memory.peaks import Profile, find_profile
from gpushare.run.results import BenchedCap, keep_benched
from gpushare.show.result import jsonable
from gpushare.show.waiting import progress_line
from gpushare.sim import admin
from tests.cli.advise.asking import Terminal
from tests.cli.bench.conftest import RATE, WINDOW, job
from tests.cli.drive import Cli, Real, Refused, World, alive, same, until, until_one_run_is_over
from tests.measure.test_bench import answer, measured

pytestmark = pytest.mark.usefixtures("printed_windows")


def bench(cli: Cli, *words: str, host: str = "sim:h200") -> Any:
    return cli("-o", "json", "bench", *words, host=host).ok().data


def test_a_job_that_needs_40_percent_wins_under_mps(cli: Cli, world: World) -> None:
    data = bench(cli, "--copies", "2", "--ways", "queue,timeslice,mps", "--repeat", "2", *WINDOW, *job(40))
    assert data["best"]["way"] == "mps"
    assert data["best"]["certain"]
    assert data["best"]["no_difference"] == []
    assert data["best"]["gain"]["value"] == pytest.approx(2, rel=0.05)
    rates = {cell["way"]: cell["throughput"]["mean"] for cell in data["cells"]}
    assert rates == {
        way: pytest.approx(rate, rel=0.05) for way, rate in (("queue", 100), ("timeslice", 100), ("mps", 200))
    }
    slowdowns = {cell["way"]: cell["slowdown"] for cell in data["cells"]}
    assert slowdowns == {way: pytest.approx(by, rel=0.05) for way, by in (("queue", 1), ("timeslice", 2), ("mps", 1))}
    assert world.state.daemons == []
    assert world.pids() == []


def test_a_job_that_fills_the_gpu_gains_nothing(cli: Cli) -> None:
    best = bench(cli, "--copies", "2", "--ways", "queue,timeslice,mps", "--repeat", "2", *WINDOW, *job(100))["best"]
    assert best["way"] == "queue"
    assert {"queue", best["fastest"], *best["no_difference"]} == {"queue", "timeslice", "mps"}


def test_a_farm_takes_the_cap_that_was_found(cli: Cli) -> None:
    """Two that need 80 lose 20 percent when they want more than there is; with 50 percent each they never do."""
    command = job(80, "--contention", "20")
    data = bench(cli, "--copies", "2", "--ways", "mps,mps:100/n", "--repeat", "2", *WINDOW, *command)
    assert (data["best"]["way"], data["best"]["threads_percent"]) == ("mps:100/n", 50.0)
    planned = cli("farm", "--copies", "2", "-n", *command).ok()
    assert planned.out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50.0") == 2
    assert "gpushare bench found the cap" in planned.err
    assert cli("farm", "--copies", "2", "-n", *job(80)).ok().out.count("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100.0") == 0


@pytest.mark.parametrize("in_the_way", ["benched", "benched/KEY.json"])
def test_caps_that_cannot_be_kept_fail_no_benchmark(cli: Cli, world: World, in_the_way: str) -> None:
    command = job(40)
    device = select_one(None, world.host.nvml.sweep())
    cap = BenchedCap(copies=8, threads_percent=None, best=True, date="2026-11-20", driver=None)
    keep_benched(world.host, device, command[1:], [cap])
    (kept,) = (world.host.state_directory / "benched").glob("*.json")
    kept.unlink()
    if in_the_way == "benched":
        kept.parent.rmdir()
        kept.parent.write_text("")
    else:
        (kept / "something").mkdir(parents=True)
    answer = cli("-o", "json", "bench", "--copies", "2", "--ways", "mps", "--repeat", "1", *WINDOW, *command).ok()
    assert answer.data["reason"] == "finished"
    assert "the caps are not kept for gpushare farm: " in answer.err


def test_finished_runs_are_counted(cli: Cli) -> None:
    words = ("--copies", "2", "--ways", "queue,mps", "--repeat", "1")
    data = bench(cli, *words, *job(40, "--work", "15"))
    cells = {cell["way"]: cell for cell in data["cells"]}
    assert data["metric"]["unit"] == "runs_per_second"
    # Which is faster depends on how long the copies take to start: that is the machine's affair.
    for way in ("queue", "mps"):
        (run,) = (run for run in data["runs"] if run["way"] == way and run["copies"] == 2)
        assert [result["exit_code"] for result in run["result"]["copies"]] == [0, 0]
        assert cells[way]["throughput"]["mean"] == pytest.approx(2 / run["result"]["seconds"], rel=0.01)
    assert not data["best"]["certain"], "each ran once"


def test_mig_uses_the_instances_that_are_there(cli: Cli, world: World) -> None:
    world.mig("1g.18gb", "1g.18gb")
    data = bench(cli, "--copies", "1,2,4", "--repeat", "1", *WINDOW, *job(10))
    cells = {cell["copies"]: cell for cell in data["cells"]}
    assert {cell["way"] for cell in data["cells"]} == {"mig"}
    assert cells[2]["throughput"]["mean"] == pytest.approx(2 * cells[1]["throughput"]["mean"], rel=0.1)
    reasons = {(one["way"], one["copies"]): one["reason"] for one in data["left_out"]}
    assert reasons["mig", 4] == "4 copies need 4 free MIG instances of one profile, and there are 2"
    assert "MIG mode" in reasons["timeslice", None]
    assert len(world.state.gpus[0].mig) == 2


def test_instances_of_several_profiles_count_by_the_one_of_which_there_are_most(cli: Cli, world: World) -> None:
    world.mig("2g.35gb", "1g.18gb", "1g.18gb")
    words = ("--copies", "1,2,3", "--ways", "mig", "--repeat", "1", *WINDOW)
    left = {one["copies"]: one["reason"] for one in bench(cli, *words, *job(10))["left_out"]}
    assert left == {3: "3 copies need 3 free MIG instances of one profile, and there are 2"}
    lease = take_claim(world.host, world.state.gpus[0].mig[2].uuid)
    assert isinstance(lease, HeldClaim)
    left = {one["copies"]: one["reason"] for one in bench(cli, *words, *job(10))["left_out"]}
    lease.release()
    assert left[2] == "2 copies need 2 free MIG instances of one profile, and there is 1"


def test_under_mps_inside_one_instance(cli: Cli, world: World) -> None:
    uuid = world.mig("1g.18gb")[0]
    words = ("-g", uuid, "--copies", "2", "--ways", "timeslice,mps,mig", "--repeat", "1")
    data = bench(cli, *words, *WINDOW, *job(5))
    rates = {cell["way"]: cell["throughput"]["mean"] for cell in data["cells"]}
    assert rates == {"timeslice": pytest.approx(100, rel=0.1), "mps": pytest.approx(200, rel=0.1)}
    assert data["gpu"]["mig"] == "1g.18gb"
    assert world.state.daemons == []


def test_a_daemon_that_was_there_stays_and_time_slicing_is_outside_it(cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    data = bench(cli, "--copies", "2", "--ways", "timeslice,mps", "--repeat", "1", *WINDOW, *job(40))
    rates = {cell["way"]: cell["throughput"]["mean"] for cell in data["cells"]}
    assert rates == {"timeslice": pytest.approx(100, rel=0.1), "mps": pytest.approx(200, rel=0.1)}
    assert len(world.state.daemons) == 1


def test_a_default_limit_of_the_daemon_is_said(cli: Cli) -> None:
    cli("mps", "start", "--threads", "30").ok()
    words = ("bench", "--copies", "2", "--ways", "mps", "--repeat", "1", *WINDOW, *job(40))
    answer = cli("-o", "csv", *words).ok()
    assert "note: the MPS daemon of GPU 0 caps each client at 30 %" in answer.err
    assert "gpushare mps set -g 0 --threads 100" in answer.err
    header, _, row = answer.out.splitlines()
    assert header.startswith("copies,way,threads_percent,mean,spread")
    assert row.startswith("2,mps,")


def test_a_foreign_daemon_leaves_mps_out(cli: Cli, world: World, sim_dir: Path) -> None:
    world.foreign_daemon(sim_dir)
    words = ("--copies", "2", "--ways", "timeslice,mps", *WINDOW, *job(40))
    answer = cli("bench", "-n", *words).ok()
    assert re.search("left out: mps: .*gpushare did not start", answer.err)
    assert "under mps" not in answer.out


def test_others_on_the_gpu_are_said(cli: Cli, world: World) -> None:
    pid = admin.add_process(world.spec, "0", sm_percent=20)
    answer = cli("bench", "--copies", "2", "--ways", "timeslice", "--repeat", "1", *WINDOW, *job(40)).ok()
    assert f"other processes used the GPU during the measurement ({pid} python3)" in answer.err
    assert "others there" in answer.out
    assert "\r" not in answer.err, "no progress off a terminal"


def test_copies_that_miss_mps_do_not_count(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_OUTSIDE", "1")
    words = ("--copies", "2", "--ways", "mps", "--repeat", "1", "--metric", RATE, "--for", "0.6s")
    answer = cli("-o", "json", "bench", *words, *job(40))
    (cell,) = answer.data["cells"]
    assert cell["throughput"] is None
    # Nothing was measured: that is no success, not even in part.
    assert (answer.code, answer.json["status"], answer.error["code"]) == (1, "error", "all_failed")
    for said in (cell["failures"][0], answer.error["message"]):
        assert "ran outside MPS" in said


def test_a_daemon_that_dies_ends_no_measurement(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it CUDA would run outside MPS without a word, and time-slicing be measured as MPS."""
    real = Bench._launches

    def launches(self: Bench, way: Any, copies: int, *more: Any) -> Any:
        found = real(self, way, copies, *more)
        if way.kind == "mps":
            state = World().state
            World().send(state.daemons[0].pid, signal.SIGKILL) if state.daemons else None
        return found

    monkeypatch.setattr(Bench, "_launches", launches)
    words = ("--copies", "2", "--ways", "timeslice,mps", "--repeat", "1", *WINDOW)
    data = bench(cli, *words, *job(40))
    cells = {cell["way"]: cell for cell in data["cells"]}
    assert cells["mps"]["throughput"] is None
    assert "the MPS daemon does not answer" in cells["mps"]["failures"][0]
    assert cells["timeslice"]["throughput"] is not None


def test_what_does_not_fit_is_left_out(cli: Cli) -> None:
    # As long as the time between two looks at the memory may be.
    words = ("--copies", "1,2", "--ways", "queue,mps", "--repeat", "1", "--metric", RATE, "--for", "0.6s")
    (left,) = bench(cli, *words, *job(10, "--footprint", "90G"))["left_out"]
    assert (left["way"], left["copies"], "2 copies need 180.0 GiB" in left["reason"]) == ("mps", 2, True)
    # Where nothing fits, nothing has failed.
    words = ("--copies", "8", "--ways", "timeslice", "--repeat", "1", *WINDOW)
    answer = cli("-o", "json", "bench", *words, *job(30, "--footprint", "100G")).ok()
    assert (answer.data["cells"], answer.json["errors"]) == ([], [])
    assert "8 copies need 800.0 GiB" in answer.data["left_out"][0]["reason"]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell copies that run at the same time as others so: BESIDE is set."""
    real = Bench._launches

    def launches(self: Bench, way: Any, copies: int, *more: Any) -> Any:
        beside = {"BESIDE": "1"} if way.kind is not Way.WHOLE and copies > 1 else {}
        return [replace(one, environment={**one.environment, **beside}) for one in real(self, way, copies, *more)]

    monkeypatch.setattr(Bench, "_launches", launches)


@pytest.mark.usefixtures("beside")
def test_a_copy_that_fails_beside_others_is_named_and_the_rest_kept(cli: Cli, tmp_path: Path) -> None:
    """Alone it works; of two, one does not find its lock free."""
    lock, tried = tmp_path / "lock", tmp_path / "tried"
    script = f"mkdir {lock} || {{ echo locked >&2; touch {tried}; exit 3; }}; "
    script += f'while [ "$BESIDE" ] && ! [ -e {tried} ]; do sleep 0.02; done; rmdir {lock}'
    answer = cli("bench", "--copies", "2", "--ways", "queue,timeslice", "--repeat", "1", "--", "sh", "-c", script).ok()
    assert "timeslice, 2 copies: round 1: copy 1" in answer.err or "timeslice, 2 copies: round 1: copy 0" in answer.err
    assert "exit code 3: locked" in answer.err
    row = next(line.split() for line in answer.out.splitlines() if line.startswith("timeslice"))
    assert row == ["timeslice", "failed"]
    assert re.search(r"^queue +\d", answer.out, re.MULTILINE), "the queue is kept"


@pytest.mark.usefixtures("beside")
def test_a_copy_that_hangs_is_ended_and_not_tried_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, tried = tmp_path / "lock", tmp_path / "tried"
    script = f"mkdir {lock} 2>/dev/null || {{ echo try >>{tried}; exec sleep 600; }}; "
    script += f'while [ "$BESIDE" ] && ! [ -e {tried} ]; do sleep 0.02; done; rmdir {lock}'
    look = Copies._poll

    def late(self: Copies, copies: Any, usage: Any) -> float:
        # The time is over when one is left of two that hangs, however slow the machine is.
        left = sum(copy.program.runs for copy in copies)
        return look(self, copies, usage) + 1000.0 * (tried.exists() and (len(copies), left) == (2, 1))

    monkeypatch.setattr(Copies, "_poll", late)
    words = ("--copies", "2", "--ways", "queue,timeslice", "--repeat", "2", "--timeout", "500s")
    data = bench(cli, *words, "--", "sh", "-c", script)
    cell = next(cell for cell in data["cells"] if cell["way"] == "timeslice")
    assert cell["throughput"] is None
    (failure,) = cell["failures"]
    assert "did not end within 500 s" in failure
    assert tried.read_text() == "try\n"


def test_what_was_measured_is_kept_when_something_fails_later(cli: Cli, tmp_path: Path, world: World) -> None:
    """The program removes itself in its second run."""
    program = tmp_path / "job"
    program.write_text(f"#!/bin/sh\n[ -e {tmp_path}/once ] && rm -- {program}\ntouch {tmp_path}/once\n")
    program.chmod(0o755)
    answer = cli("-o", "json", "bench", "--copies", "2", "--ways", "queue", "--repeat", "1", "--", str(program))
    document = answer.json
    assert (answer.code, document["status"], answer.error["code"]) == (6, "partial", "command_not_found")
    assert document["data"]["reason"] == "failed"
    assert [run["way"] for run in document["data"]["runs"]] == ["alone"]
    assert world.pids() == []


@pytest.mark.parametrize(("script", "words", "says"), [
    ("exit 3", (), "exit code 3"), ("kill -9 $$", (), "killed by SIGKILL"),
    ("echo hello", ("--metric", RATE), "printed no rate or time that --metric matches"),
    ("exec sleep 600", ("--timeout", "0.3s"), "did not end within 0.3 s"),
    ("exec sleep 600", ("--timeout", "0.3s", *WINDOW), "printed no rate or time that --metric matches in 0.3 s"),
    ("echo rate=1", WINDOW, "ended before it was measured for 0.06 s"),
])  # fmt: skip
def test_a_command_that_fails_already_alone(
    cli: Cli, world: World, script: str, words: tuple[str, ...], says: str
) -> None:
    answer = cli("bench", "--copies", "2", *words, "--", "sh", "-c", script)
    assert answer.code == 1
    assert "one copy alone failed: copy 0 (process " in answer.err
    assert says in answer.err
    assert len(answer.lines("hint")) == 1
    assert (world.state.daemons, world.pids()) == ([], [])


@pytest.mark.parametrize(("words", "code", "exit_code"), [
    (("--copies", "0", "--", "true"), "bad_copies", 2), (("--ways", "x", "--", "true"), "bad_way", 2),
    (("--repeat", "0", "--", "true"), "usage", 2), (("--metric", "x", "--", "true"), "bad_metric", 2),
    (("--latency", "(", "--", "true"), "bad_metric", 2), (("--for", "1s", "--", "true"), "bad_combination", 2),
    (("--for", "0", "--metric", "(x)", "--", "true"), "bad_duration", 2),
    (("--timeout", "x", "--", "true"), "bad_duration", 2), (("--timeout", "0s", "--", "true"), "bad_duration", 2),
    (("--size", "256", "--", "true"), "bad_combination", 2), (("--cpu", "--", "true"), "bad_combination", 2),
    (("--metric", "(x)"), "bad_combination", 2), (("--lower-is-better", "--", "true"), "bad_combination", 2),
    (("--size", "3"), "bad_size", 2), (("--footprint", "3"), "bad_size", 2),
    (("--to", "/tmp", "--", "true"), "file_exists", 2), (("--to", "/nonexistent/x", "--", "true"), "no_directory", 6),
    (("--compare", "/nonexistent/x", "--", "true"), "no_file", 6),
    (("--plot", "/tmp/x.gif", "--", "true"), "bad_plot", 2), (("-g", "4", "--", "true"), "unknown_gpu", 6),
    (("--", "gs-no-such-program"), "command_not_found", 127), (("--ways", "streams,mig", "--", "true"), "no_way", 3),
])  # fmt: skip
def test_wrong_usage(refused: Refused, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("bench", *words, code=code, exit_code=exit_code)


def test_a_plot(cli: Cli, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda _name: None)
        text = refused("bench", "--plot", "x.png", "--", "true", code="no_matplotlib", exit_code=3)
        assert "pip install matplotlib" in text
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.svg"
    words = ("--copies", "1,2", "--ways", "timeslice,mps", "--repeat", "2", "--plot", str(path))
    bench(cli, *words, *WINDOW, *job(40))
    assert "<svg" in path.read_text()


def test_dry_run_changes_nothing(cli: Cli, world: World) -> None:
    before = same(world.spec)
    words = ("-n", "--copies", "2", "--ways", "timeslice,mps")
    steps = bench(cli, *words, "--", "true")["steps"]
    # First the daemon that way mps needs.
    assert "nvidia-cuda-mps-control -d" in " ".join(step["command"] for step in steps[:-3])
    assert [step["what"] for step in steps[-3:]] == [
        "run 1 copy under alone, 3 times",
        "run 2 copies under timeslice, 3 times",
        "run 2 copies under mps, 3 times",
    ]
    assert same(world.spec)[1] == before[1]


def test_kept_and_compared(cli: Cli, tmp_path: Path) -> None:
    """The earlier one was twice as fast."""
    before, path = tmp_path / "first.json", tmp_path / "second.json"
    earlier = measured("mps", (2,), {("mps", 2): [124.9, 125.0, 125.1]}, Metric(pattern=RATE))
    write_bench(before, answer(earlier))
    words = ("--copies", "2", "--ways", "mps", "--repeat", "2", *WINDOW, "--to", str(path))
    data = bench(cli, *words, "--compare", str(before), *job(80))
    assert json.loads(path.read_text()) == data
    (row,) = data["comparison"]
    assert (row["way"], row["verdict"]) == ("mps", "slower")
    assert row["ratio"] == pytest.approx(0.5, rel=0.05)
    assert jsonable(read_bench(str(path)).cells) == data["cells"], "what is kept can be compared with"


def test_the_built_in_workload_on_a_simulated_host(cli: Cli) -> None:
    words = ("--size", "256", "--copies", "2", "--ways", "timeslice,mps,streams", "--repeat", "1", "--for", "0.1s")
    data = bench(cli, *words)
    assert data["workload"]["backend"] == "simulated"
    assert data["workload"]["unit"] == "multiplications per second"
    gains = {cell["way"]: cell["gain"]["value"] for cell in data["cells"]}
    assert gains == {way: pytest.approx(gain, rel=0.1) for way, gain in (("timeslice", 1), ("mps", 2), ("streams", 2))}


def test_latencies_are_summed_up(cli: Cli) -> None:
    words = ("--copies", "2", "--ways", "timeslice,mps", "--repeat", "1", *WINDOW)
    data = bench(cli, *words, *job(40, "--latency", "5"))
    cells = {cell["way"]: cell for cell in data["cells"]}
    assert cells["mps"]["latency_p50"] == pytest.approx(5, rel=0.05)
    assert cells["timeslice"]["latency_p50"] == pytest.approx(10, rel=0.05)
    assert cells["mps"]["latency_p99"] >= cells["mps"]["latency_p50"]


def test_it_fits_a_terminal_of_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--copies", "1,2", "--ways", "queue,timeslice,mps,mig", "--repeat", "1", *WINDOW, *job(40))
    answer = cli("-o", "table", "bench", *words).ok()
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    assert "2 copies: " in answer.out
    assert "gpushare mig apply -g 0" in re.sub(r"\n +", " ", answer.out), "a reason is wrapped, not cut"


# gpushare, which writes down whom its guard knows of by now.
TELLING = """
import sys
from gpushare.cli import main
from gpushare.host.guard import Guard

real, path = Guard.announce, sys.argv.pop(1)

def announce(self, pid, started):
    real(self, pid, started)
    with open(path, "a") as told:
        told.write(f"{pid}\\n")

Guard.announce = announce
sys.exit(main(sys.argv[1:]))
"""


def guarded(told: Path) -> list[int]:
    """Return whom the guard has been told of."""
    return [int(line) for line in told.read_text().split("\n")[:-1]] if told.exists() else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_copies_and_keeps_what_was_measured(
    real: Real, world: World, number: int, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    first = ("-o", "json", "bench", "--ways", "mps,timeslice", "--copies", "2,4", "--repeat", "50", "--to", str(path))
    started = real(*first, *job(40, "--work", "30"))
    until_one_run_is_over(world)
    answer = started.end(number)
    assert answer.code == 128 + number
    data = answer.json["data"]
    assert (answer.json["status"], answer.error["code"], data["reason"]) == ("partial", "interrupted", "interrupted")
    assert answer.error["message"].endswith(f"; {path} has them")
    assert data["runs"]
    assert json.loads(path.read_text())["runs"] == data["runs"]
    assert (world.state.daemons, world.pids()) == ([], [])
    # People see which ways are missing.
    missing = {cell["way"] for cell in data["cells"] if cell["throughput"] is None}
    assert missing
    (note,) = (line for line in answer.lines("note") if "not measured: " in line)
    assert all(f"{way} (" in note for way in missing)


def test_killed_it_leaves_neither_copies_nor_a_daemon(real: Real, world: World, tmp_path: Path) -> None:
    told, first = tmp_path / "told", ("bench", "--ways", "mps", "--copies", "2")
    # Alone it ends, under MPS it never does.
    script = 'case "$CUDA_MPS_PIPE_DIRECTORY" in */pipe) exec sleep 600;; esac'
    started = real(*first, "--", "sh", "-c", script, program=("-c", TELLING, str(told)))
    clients = until(lambda: world.begun and world.attached()[1:] and world.attached(), "copies under MPS run")
    until(lambda: {client.pid for client in clients} <= set(guarded(told)), "the guard knows of both")
    started.process.kill()
    started.process.wait()
    until(lambda: not any(alive(client.pid) for client in clients), "the copies are gone")
    until(lambda: not world.state.daemons, "the daemon is gone")


def test_killed_it_holds_its_instances_until_the_copies_have_ended(real: Real, world: World, tmp_path: Path) -> None:
    """A copy that takes its time to end is still in its instance: nobody else may get it meanwhile."""
    world.mig("1g.18gb", "1g.18gb")
    first, ending = ("-o", "json", "bench", "--ways", "mig", "--copies", "2"), tmp_path / "end"
    script = f"trap 'while [ ! -e {ending} ]; do sleep 0.02; done; exit' INT; while :; do sleep 0.02; done"
    told = tmp_path / "told"
    started = real(*first, "--", "sh", "-c", script, program=("-c", TELLING, str(told)))
    host = connect(world.spec)
    until(lambda: world.begun and len(live_claims(host)) == 2, "both instances are taken")
    (copy,) = until(world.pids, "the first copy runs")
    until(lambda: guarded(told) == [copy], "the guard knows of it")
    started.process.kill()
    started.process.wait()
    until(
        lambda: {value.pid for value in live_claims(host).values()}.isdisjoint({started.pid, 0}), "the guard has both"
    )
    assert alive(copy)
    assert len(live_claims(host)) == 2
    ending.touch()
    until(lambda: not alive(copy), "the copy is gone")
    until(lambda: not live_claims(host), "the instances are given back")


def test_progress_on_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress_line(quiet=options.settings.quiet) as tell:
        tell("mps, 2 copies, round 1 of 3", 3, 10, 200.0)
    text = stream.getvalue()
    assert "mps, 2 copies, round 1 of 3" in text
    assert "3/10" in text
    assert "about 3 min left" in text


def test_the_peak_and_the_use_of_a_command_are_kept(cli: Cli, world: World) -> None:
    command = job(40, "--footprint", "9G")
    data = bench(cli, "--copies", "1,2", "--ways", "timeslice,mps", "--repeat", "1", *WINDOW, *command)
    device = select_one("0", world.host.nvml.sweep())
    found = find_profile(world.host, device, command[1:])
    assert found is not None
    assert found.memory_bytes == 9 * GIB
    assert found.use_percent == pytest.approx(40, abs=5)
    assert data["alone"]["sm_percent"] == found.use_percent
    answer = cli("run", "-n", "--wait", *command)
    assert any("reserves 9.0 GiB" in line for line in answer.lines("note")), answer


def test_the_use_next_to_others_is_not_kept(cli: Cli, world: World) -> None:
    admin.add_process(world.spec, memory_bytes=GIB, name="other")
    command = job(40, "--footprint", "9G")
    bench(cli, "--copies", "1", "--ways", "timeslice", "--repeat", "1", "--metric", RATE, "--for", "1s", *command)
    found = find_profile(world.host, select_one("0", world.host.nvml.sweep()), command[1:])
    assert found == Profile(memory_bytes=9 * GIB)
