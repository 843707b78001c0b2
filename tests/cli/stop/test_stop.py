"""``gpushare stop``: jobs that gpushare runs, that wait, that are paused or out, and processes that it did not start."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.units import GIB
from gpushare.host.identity import Identity, is_stopped
from gpushare.run import stop as module
from gpushare.run.jobs import JobRecord, find_record
from gpushare.sim import admin
from tests.cli.drive import Cli, Patch, Real, Refused, Started, World, alive, refusals, sure, until, until_it_runs
from tests.cli.test_consent import typed


def runs(real: Real, world: World, *options: str, program: tuple[str, ...] = ("sleep", "300")) -> Started:
    """Start a job and wait until its record names its program."""
    started = real("run", *options, "--name", "train", "--", *program)
    until_it_runs(world, started, "train")
    return started


@pytest.mark.parametrize("options", [(), ("--slice", "2ms"), ("--memory", "4G")])
def test_its_gpushare_ends_it_unasked(real: Real, cli: Cli, world: World, options: tuple[str, ...]) -> None:
    started = runs(real, world, *options)
    (job,) = cli("stop", "train", output="json", asks=True).ok().data["jobs"]
    assert (job["name"], job["ended_by"], job["drain"]) == ("train", "gpushare", None)
    assert started.result().code == 128 + signal.SIGTERM
    assert not alive(job["pid"])
    assert find_record(world.host, "train") is None
    assert cli("stop", "train", output="json", asks=True).error["code"] == "no_job"


@pytest.mark.parametrize("which", ["program", "gpushare"])
def test_a_job_by_pid(real: Real, cli: Cli, world: World, which: str) -> None:
    started = runs(real, world)
    record = sure(find_record(world.host, "train"))
    answer = cli("stop", str(record.pid if which == "program" else started.pid), asks=True).ok()
    assert answer.out.startswith(f"'train' (process {record.pid}) is gone after ")
    assert started.result().code == 143


def test_several_jobs_each_once(real: Real, cli: Cli, world: World) -> None:
    started = runs(real, world)
    pid = admin.add_process(world.spec, name="python3")
    jobs = cli("stop", "train", str(pid), str(started.pid), output="json").ok().data["jobs"]
    assert ([job["ended_by"] for job in jobs], world.pids()) == (["gpushare", "signal"], [])


def test_those_that_are_there_end_beside_one_that_has_ended(real: Real, cli: Cli, world: World) -> None:
    started = runs(real, world)
    assert cli("stop", "train", "bad name", output="json").error["code"] == "bad_name"
    assert started.process.poll() is None
    planned = cli("stop", "nosuch", "train", "-n")
    assert (planned.code, "no job 'nosuch'" in planned.err, "train" in planned.out) == (6, True, True)
    answer = cli("stop", "nosuch", "train", output="json").ends(6, "no_job")
    # It has ended by then, so the hint does not name it.
    assert "train" not in answer.error["hint"]
    assert ([job["name"] for job in answer.data["jobs"]], started.result().code) == (["train"], 143)


STUBBORN = ("sh", "-c", "trap '' TERM INT; echo here >&2; while :; do sleep 0.1; done")


def test_a_second_try_cuts_its_grace_period_short(real: Real, cli: Cli, world: World, monkeypatch: Patch) -> None:
    started = runs(real, world, "--slice", "2ms", "--grace", "600s", program=STUBBORN)
    with monkeypatch.context() as patched:
        patched.setattr(module, "BOUND_SECONDS", 0.4)
        patched.setattr(module, "HURRY_SECONDS", -599.8)
        answer = cli("stop", "train", output="json", asks=True)
    assert (answer.code, answer.error["code"]) == (1, "still_running")
    assert answer.error["hint"].endswith("gpushare stop --grace 0 train")
    assert started.process.poll() is None
    cli("stop", "--grace", "0", "train", asks=True).ok()
    assert started.result().code == 143


@pytest.mark.parametrize("earliest_look", [1, 2], ids=["stopped", "stopped after it was asked"])
def test_a_stopped_gpushare_goes_on_to_end(
    real: Real, cli: Cli, world: World, monkeypatch: Patch, earliest_look: int
) -> None:
    started = runs(real, world)
    started.signal(signal.SIGSTOP)
    polls: list[int] = []

    def stopped_later(pid: int) -> bool:
        polls.append(pid)
        return len(polls) >= earliest_look and is_stopped(pid)

    monkeypatch.setattr(module, "is_stopped", stopped_later)
    cli("stop", "train", asks=True).ok()
    assert started.result().code == 143


def test_a_waiting_job_leaves_the_line(real: Real, cli: Cli, world: World) -> None:
    assert world.host
    admin.add_process(world.spec, memory_bytes=100 * GIB)
    waiting: list[Started] = []
    listed: list[dict[str, Any]] = []
    for name in ("one", "two"):
        waiting.append(real("run", "--wait", "--memory", "60G", "--name", name, "--", "true"))
        listed = until(lambda: len(jobs := cli("jobs", output="json").data["jobs"]) == len(waiting) and jobs, name)
    assert [(job["name"], job["state"], job["line"]["place"]) for job in listed] == [
        ("one", "waiting", 1),
        ("two", "waiting", 2),
    ]
    assert listed[1]["line"]["behind"] == ["one"]
    assert cli("stop", "one", asks=True).ok().out == f"'one' (process {waiting[0].pid}) has left the line\n"
    assert waiting[0].result().code == 143
    (job,) = cli("jobs", output="json").data["jobs"]
    assert (job["name"], job["line"]["place"]) == ("two", 1)
    cli("stop", str(waiting[1].pid), asks=True).ok()
    assert waiting[1].result().code == 143


def test_of_several_those_that_wait_leave_the_line_first_from_its_end(real: Real, cli: Cli, world: World) -> None:
    """Whichever ended before, the next one in the line would start in its place."""
    started = runs(real, world, "--memory", "100G")
    for name in ("two", "three"):
        real("run", "--wait", "--memory", "60G", "--name", name, "--", "touch", str(world.directory / name))
        until(lambda name=name: name in {job["name"] for job in cli("jobs", output="json").data["jobs"]}, "it waits")
    jobs = cli("stop", "train", "two", "three", output="json", asks=True).ok().data["jobs"]
    assert [(job["name"], job["ended_by"]) for job in jobs] == [
        ("three", "line"),
        ("two", "line"),
        ("train", "gpushare"),
    ]
    assert started.result().code == 143
    assert not any((world.directory / name).exists() for name in ("two", "three"))


@pytest.mark.parametrize(("verb", "state"), [(("pause",), "paused"), (("swap", "out"), "out")])
def test_a_job_off_the_gpu_ends(real: Real, cli: Cli, world: World, verb: tuple[str, ...], state: str) -> None:
    started = runs(real, world, "--slice", "2ms")
    cli(*verb, "train").ok()
    (job,) = cli("jobs", output="json").data["jobs"]
    assert (job["state"], job["memory_used_bytes"] == 0, bool(job["swapped_bytes"])) == (state, *[state == "out"] * 2)
    cli("stop", "train", asks=True).ok()
    assert started.result().code == 143
    assert "no job is paused" in cli("pause", "list").out
    assert cli("swap", "list", output="json").data["jobs"] == []


@pytest.fixture
def pid(world: World) -> int:
    assert world.host
    return admin.add_process(world.spec, name="python3")


def test_a_process_of_one_self_is_asked_for(refused: Refused, cli: Cli, world: World, pid: int) -> None:
    message = refused("stop", str(pid), asks=True, code="needs_consent", exit_code=19)
    assert f"this ends process {pid} (python3, gpushare did not start it)" in message
    (job,) = cli("stop", str(pid), "-y", output="json", asks=True).ok().data["jobs"]
    assert (job["name"], job["ended_by"], world.pids()) == (None, "signal", [])
    # One that catches its signals is killed after the grace.
    pid = admin.add_process(world.spec, catches=(signal.SIGTERM, signal.SIGINT))
    cli("stop", str(pid), "--grace", "0.1s").ok()
    assert pid not in world.pids()


@pytest.mark.parametrize("verb", [("pause",), ("swap", "out")])
def test_a_process_off_the_gpu_ends(cli: Cli, world: World, pid: int, verb: tuple[str, ...]) -> None:
    cli(*verb, str(pid)).ok()
    step = cli("stop", str(pid), "-n", output="json").ok().data["steps"][0]
    assert step["what"].startswith("resume it, so that it can end, then end process") == (verb == ("pause",))
    cli("stop", str(pid)).ok()
    assert world.pids() == []
    assert "no job is paused" in cli("pause", "list").out
    assert cli("swap", "list", output="json").data["jobs"] == []


def test_root_is_asked_before_a_users_record_ends_a_process(
    refused: Refused, world: World, pid: int, monkeypatch: Patch
) -> None:
    record = replace(write_orphan(world, pid), keeper_uid=4242)
    monkeypatch.setattr(module, "running_record", lambda *_: record)
    message = refused("stop", "train", asks=True, code="needs_consent", exit_code=19)
    assert f"this ends 'train' (process {pid}) (its gpushare is gone)" in message


def write_orphan(world: World, pid: int) -> JobRecord:
    """Write and return the record of a job 'train' whose gpushare is gone."""
    with subprocess.Popen(["true"]) as dead:
        return world.record("train", pid, supervisor=Identity(dead.pid, 1))


def test_jobs_whose_gpushare_is_slow_or_was_killed(cli: Cli, world: World, pid: int) -> None:
    with subprocess.Popen(["sleep", "300"]) as supervisor:
        own = world.host.processes.identity(supervisor.pid)
        for grace, expected in ((5.0, "30 s"), (120.0, "2 min 20 s")):
            world.record("train", pid, supervisor=own, grace_seconds=grace)
            steps = cli("stop", "train", "-n", output="json").ok().data["steps"]
            assert steps[1]["what"] == f"wait until it is gone, at most {expected}"
        supervisor.kill()
    # It was killed: the job is the user's own.
    write_orphan(world, pid)
    cli("stop", "train", asks=True).ok()
    assert (world.pids(), find_record(world.host, "train")) == ([], None)
    # Nobody else notes its end.
    (past,) = cli("jobs", output="json").ok().data["jobs"]
    assert (past["name"], past["state"], past["device"], past["exit_code"]) == ("train", "ended", "GPU 0", None)
    assert "gpushare killed" in cli("jobs").ok().out


def test_a_container_is_stopped_by_its_engine(cli: Cli, world: World, monkeypatch: Patch) -> None:
    identity = "0123456789ab" + "0" * 52
    pid = admin.add_process(world.spec, container=identity[:12])
    asked: list[tuple[str, ...]] = []

    def engine(name: str, *words: str, **_: float) -> str | None:
        asked.append((name, *words))
        if name != "docker":
            return None
        if words[0] == "stop":
            world.send(pid, signal.SIGKILL)
        return identity

    monkeypatch.setattr("gpushare.run.container.ask_engine", engine)
    plan = cli("stop", str(pid), "-n", output="json").ok().data
    assert plan["steps"][0]["command"] == "docker stop -t 10 0123456789ab"
    (job,) = cli("stop", str(pid), "--grace", "3s", output="json").ok().data["jobs"]
    assert (job["ended_by"], job["container"]) == ("container", "0123456789ab")
    assert asked[-1] == ("docker", "stop", "-t", "3", "0123456789ab")


def test_an_engine_that_does_not_stop_a_container(cli: Cli, world: World, monkeypatch: Patch) -> None:
    pid = admin.add_process(world.spec, container="0123456789ab")
    monkeypatch.setattr("gpushare.run.container.ask_engine", lambda *_, **__: "0123456789ab" + "0" * 52)
    monkeypatch.setattr(module, "_GONE_SECONDS", 0.1)
    error = cli("stop", str(pid), output="json").error
    assert (error["code"], "podman rm --force" in error["hint"]) == ("still_running", True)


@pytest.mark.parametrize("name", ["--help", "web", "0123"])
def test_a_name_of_a_container_is_no_id(cli: Cli, world: World, monkeypatch: Patch, name: str) -> None:
    pid = admin.add_process(world.spec, container=name)
    monkeypatch.setattr("gpushare.run.container.ask_engine", lambda *_, **__: pytest.fail("an engine was asked"))
    cli("stop", str(pid)).ok()
    assert world.pids() == []


@refusals(
    "no_job 6: nosuch | 4190000 | 0 | 99999999999999",
    "bad_name 2: 'bad name' | '' | list",
    "bad_duration 2: train --grace soon | train --grace -1 | train --grace 31d",
)
def test_wrong_words(refused: Refused, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("stop", *words, code=code, exit_code=exit_code)


def test_a_process_that_is_on_no_gpu_is_left_alone(refused: Refused, world: World, pid: int) -> None:
    assert f"kill {os.getpid()}" in refused("stop", str(os.getpid()), code="not_on_gpu", exit_code=6)


@pytest.mark.parametrize("user", ["bob", None])
def test_nobody_is_told_to_kill_what_is_not_theirs(refused: Refused, world: World, user: str | None) -> None:
    if user is not None:
        world.fault("user", user)
    # PID 1 ends all of a container, or of the machine.
    message = refused("stop", "1", code="not_on_gpu", exit_code=6)
    assert "kill" not in message
    assert "see what it is: ps -fp 1" in message
    other = admin.add_process(world.spec, holder=True, user="carl")
    message = refused("stop", str(other), code="not_on_gpu", exit_code=6)
    assert f"ask carl to end it; see: ps -fp {other}" in message
    assert "kill" not in message


def test_names_of_running_jobs_are_offered(real: Real, cli: Cli, world: World) -> None:
    runs(real, world)
    assert (
        cli("stop", "nosuch", output="json").error["hint"]
        == "running jobs: train; see all, and those that have ended: gpushare jobs -v"
    )
    cli("stop", "train").ok()


@pytest.fixture
def daemon(cli: Cli, world: World) -> int:
    cli("mps", "start").ok()
    return world.state.daemons[0].pid


@pytest.fixture
def idle(world: World, daemon: int) -> int:
    """A client that does nothing."""
    assert daemon
    return world.client(sm_percent=0)


@pytest.mark.usefixtures("daemon")
def test_busy_neighbour_survives_the_end_of_a_deep_queue(cli: Cli, world: World) -> None:
    victim = world.client(sm_percent=60, queue_seconds=0.3)
    neighbour = world.client(sm_percent=30, queue_seconds=0.1)
    begun = time.monotonic()
    answer = cli("stop", str(victim), "--grace", "600s").ok()
    assert time.monotonic() - begun >= 0.3
    assert "drained for" in answer.out
    assert f"process {victim} is gone: stopped, drained for" in answer.out
    assert world.pids() == [neighbour]
    assert not world.process(neighbour).broken
    assert world.state.daemons[0].servers[0].status == "ACTIVE"


@pytest.mark.usefixtures("daemon")
def test_neighbours_that_hide_the_fall_cost_the_bound(cli: Cli, world: World) -> None:
    victim = world.client(sm_percent=5, queue_seconds=0.2)
    world.client(sm_percent=95)
    said = cli("stop", str(victim), "--grace", "0.4s").ok().out
    assert "neighbours kept the GPU busy for the whole time limit" in said


@pytest.mark.usefixtures("daemon")
def test_fault_of_an_earlier_plain_kill_is_explained(cli: Cli, world: World) -> None:
    first, second, third = (world.client(queue_seconds=0.3) for _ in range(3))
    world.send(first, signal.SIGKILL)
    assert world.process(second).broken
    answer = cli("stop", str(second), output="json").ends(1, "server_fault")
    assert "is in state FAULT" in answer.error["message"]
    assert "gpushare stop PID" in answer.error["hint"]
    # The way out that the hint names.
    cli("stop", str(third)).ok()
    assert world.state.daemons[0].servers[0].status == "ACTIVE"


def test_the_hint_after_a_fault_restarts_the_daemon_as_it_was(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "50", "--memory", "8G", "--exclusive", "--users", "all").ok()
    cli("mps", "set", "--threads", "40").ok()
    before = world.state.daemons[0]
    first, second, _ = (world.client(queue_seconds=0.3) for _ in range(3))
    world.send(first, signal.SIGKILL)
    hint = cli("stop", str(second), output="json").error["hint"]
    for command in hint.partition("or restart MPS: ")[2].split(" && "):
        cli(*command.split()[1:]).ok()
    (after,) = world.state.daemons
    assert after.pid != before.pid
    assert (after.threads, set(after.memory.values()), after.multiuser) == (40, {8192}, True)
    assert world.state.gpus[0].compute_mode == 3


def test_what_serves_the_clients_is_left_alone(refused: Refused, world: World, daemon: int, idle: int) -> None:
    server = world.state.daemons[0].servers[0].pid
    for each in (daemon, server):
        assert "gpushare mps stop" in refused("stop", str(each), code="serves_clients", exit_code=2)


def test_an_idle_client_ends_as_planned(cli: Cli, world: World, idle: int) -> None:
    data = cli("stop", str(idle), "-n", output="json").ok().data
    commands = [step["command"] for step in data["steps"]]
    assert (commands[0], commands[2]) == (f"kill -STOP {idle}", f"kill -KILL {idle}")
    assert commands[3].startswith("echo get_server_status ")
    assert len(data["consent"]) == 1
    assert world.process(idle).stopped_at is None
    (job,) = cli("stop", str(idle), "--grace", "600s", output="json").ok().data["jobs"]
    assert (job["pid"], job["ended_by"], job["server_status"]) == (idle, "mps", "ACTIVE")
    assert (job["drain"]["by"], world.pids()) == ("idle", [])


@pytest.mark.usefixtures("daemon")
def test_a_stopped_client_is_ended(cli: Cli, world: World) -> None:
    pid = world.client(queue_seconds=0.2)
    world.send(pid, signal.SIGSTOP)
    cli("stop", str(pid)).ok()
    assert world.pids() == []


def test_client_of_a_foreign_daemon(cli: Cli, world: World, sim_dir: Path) -> None:
    world.foreign_daemon(sim_dir)
    (job,) = cli("stop", str(world.client(sm_percent=0)), output="json").ok().data["jobs"]
    assert (job["ended_by"], world.pids()) == ("mps", [])


@pytest.mark.usefixtures("daemon")
def test_interrupted_while_it_drains_lets_the_client_go_on(real: Real, world: World) -> None:
    pid = world.client(sm_percent=10, queue_seconds=60)
    world.client(sm_percent=90, queue_seconds=60)
    started = real("stop", str(pid), "-y", "--grace", "600s")
    until(lambda: world.process(pid).stopped_at is not None, "stopped")
    assert started.end().ends(130).lines("error") == ["error: interrupted"]
    assert world.process(pid).stopped_at is None


def test_client_on_a_mig_instance(cli: Cli, world: World) -> None:
    (uuid,) = world.mig("3g.71gb")
    cli("mps", "start", "-g", uuid).ok()
    pid = world.client(sm_percent=50, queue_seconds=0.1, mig=uuid)
    (job,) = cli("stop", str(pid), output="json").ok().data["jobs"]
    # Utilization does not cover an instance: only GPM sees its end.
    assert job["drain"]["by"] != "bound"
    assert world.pids() == []


@pytest.mark.usefixtures("daemon")
def test_another_users_client_is_asked_for(refused: Refused, cli: Cli, world: World) -> None:
    pid = world.client(sm_percent=0, user="nobody")
    message = refused("stop", str(pid), asks=True, code="needs_consent", exit_code=19)
    assert f"this ends process {pid} (of nobody)" in message
    cli("stop", str(pid), "--yes").ok()
    assert world.pids() == []


def test_another_users_process_may_not_be_ended(refused: Refused, world: World, idle: int) -> None:
    world.fault("user", "nobody")
    refused("stop", str(idle), "--yes", code="other_user", exit_code=4)
    assert world.process(idle).stopped_at is None


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("\n", False)])
@pytest.mark.usefixtures("daemon")
def test_the_question_on_a_terminal(world: World, answer: str, gone: bool) -> None:
    pid = world.client(sm_percent=0, user="nobody")
    code, _ = typed(world, ["stop", str(pid)], answer)
    assert (code, pid not in world.pids()) == (0 if gone else 19, gone)


def test_root_ends_the_job_of_a_user_after_a_question(refused: Refused, cli: Cli, world: World) -> None:
    uids = (65534, 1)
    for uid in uids:
        (world.directory / "users" / str(uid)).mkdir(parents=True)
    pids = []
    for uid in uids:
        pid = admin.add_process(world.spec, name="train", user=str(uid))
        world.fault("user", uid)
        # Its program is its own supervisor, as the copies of a farm have one.
        world.record("train", pid, supervisor=world.host.processes.identity(pid))
        pids.append(pid)
    world.fault("user", 0)
    error = cli("stop", "train", output="json").error
    assert (error["code"], all(str(pid) in error["hint"] for pid in pids)) == ("ambiguous_job", True)
    assert len(cli("jobs", output="json").ok().data["jobs"]) == 2
    text = refused("stop", str(pids[0]), asks=True, code="needs_consent", exit_code=19)
    assert f"'train' (process {pids[0]}) (of nobody)" in text
    cli("stop", str(pids[0])).ok()
    world.fault("user", uids[1])
    assert [job["pid"] for job in cli("jobs", output="json").ok().data["jobs"]] == [pids[1]]
    cli("stop", "train", asks=True).ok()
    assert world.pids() == []


def test_a_record_of_a_user_never_ends_what_is_anothers(cli: Cli, world: World) -> None:
    """A record that names another user's process as its gpushare says nothing to root."""
    (world.directory / "users" / "65534").mkdir(parents=True)
    mine, theirs = (admin.add_process(world.spec, name="train", user=str(uid)) for uid in (65534, 1))
    world.fault("user", 65534)
    world.record("train", mine, supervisor=world.host.processes.identity(theirs))
    world.fault("user", 0)
    assert cli("stop", "train", output="json").error["code"] == "no_job"
    assert sorted(world.pids()) == sorted([mine, theirs])
