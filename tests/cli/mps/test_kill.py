"""``gpushare mps kill``."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.drive import Started, World, environment, until


@pytest.fixture
def daemon(cli: Cli, world: World) -> int:
    cli("mps", "start").ok()
    return world.state.daemons[0].pid


@pytest.fixture
def idle(world: World, daemon: int) -> int:
    """A client that does nothing."""
    assert daemon
    return world.client(sm_percent=0)


def test_idle_client(cli: Cli, world: World, idle: int) -> None:
    data = cli("mps", "kill", str(idle), "--drain", "600", output="json").ok().data
    assert (data["pid"], data["method"], data["server_status"]) == (idle, "stop-drain-kill", "ACTIVE")
    assert data["drain"]["by"] == "idle"
    assert world.pids() == []


@pytest.mark.usefixtures("daemon")
def test_busy_neighbour_survives_the_end_of_a_deep_queue(cli: Cli, world: World) -> None:
    victim = world.client(sm_percent=60, queue_seconds=0.3)
    neighbour = world.client(sm_percent=30, queue_seconds=0.1)
    begun = time.monotonic()
    answer = cli("mps", "kill", str(victim), "--drain", "600").ok()
    assert time.monotonic() - begun >= 0.3
    assert "the GPU's activity fell" in answer.out
    assert f"client {victim} is gone" in answer.out
    assert world.pids() == [neighbour]
    assert not world.process(neighbour).broken
    assert world.state.daemons[0].servers[0].status == "ACTIVE"


@pytest.mark.usefixtures("daemon")
def test_neighbours_that_hide_the_fall_cost_the_bound(cli: Cli, world: World) -> None:
    victim = world.client(sm_percent=5, queue_seconds=0.2)
    world.client(sm_percent=95)
    answer = cli("mps", "kill", str(victim), "--drain", "0.4").ok()
    assert "this is the whole bound" in answer.out


@pytest.mark.usefixtures("daemon")
def test_fault_of_an_earlier_plain_kill_is_explained(cli: Cli, world: World) -> None:
    first, second, third = (world.client(queue_seconds=0.3) for _ in range(3))
    world.send(first, signal.SIGKILL)
    assert world.process(second).broken
    answer = cli("mps", "kill", str(second), output="json")
    assert answer.code == 1
    (error,) = answer.json["errors"]
    assert error["code"] == "server_fault"
    assert "is in state FAULT" in error["message"]
    assert "gpushare mps kill PID" in error["hint"]
    # The way out that the hint names.
    cli("mps", "kill", str(third)).ok()
    assert world.state.daemons[0].servers[0].status == "ACTIVE"


@pytest.mark.usefixtures("daemon")
def test_not_a_client(refused: Callable[..., str], world: World) -> None:
    world.fault("busy")
    (pid,) = world.pids()
    assert f"kill {pid}" in refused("mps", "kill", str(pid), code="not_a_client", exit_code=6)
    refused("mps", "kill", str(os.getpid()), code="not_a_client", exit_code=6)


@pytest.mark.parametrize("pid", ["0", "4190000", "99999999999999"])
@pytest.mark.usefixtures("daemon")
def test_no_process(refused: Callable[..., str], pid: str) -> None:
    refused("mps", "kill", pid, code="no_process", exit_code=6)


def test_dry_run(cli: Cli, world: World, idle: int) -> None:
    data = cli("mps", "kill", str(idle), "-n", output="json").ok().data
    commands = [step["command"] for step in data["steps"]]
    assert commands[0] == f"kill -STOP {idle}"
    assert commands[2] == f"kill -KILL {idle}"
    assert commands[3].startswith("echo get_server_status ")
    assert world.process(idle).stopped_at is None


@pytest.mark.usefixtures("daemon")
def test_a_stopped_client_is_ended(cli: Cli, world: World) -> None:
    pid = world.client(queue_seconds=0.2)
    world.send(pid, signal.SIGSTOP)
    cli("mps", "kill", str(pid)).ok()
    assert world.pids() == []


def test_client_of_a_foreign_daemon(cli: Cli, world: World, sim_dir: Path) -> None:
    world.foreign_daemon(sim_dir)
    pid = world.client(sm_percent=0)
    cli("mps", "kill", str(pid)).ok()
    assert world.pids() == []


@pytest.mark.usefixtures("daemon")
def test_another_users_client_is_asked_for(refused: Callable[..., str], cli: Cli, world: World) -> None:
    pid = world.client(sm_percent=0, user="nobody")
    said = refused("mps", "kill", str(pid), asks=True, code="needs_consent", exit_code=19)
    assert f"this ends another user's MPS client {pid} (python3, user nobody: python3)" in said
    cli("mps", "kill", str(pid), "--yes").ok()
    assert world.pids() == []


def test_own_client_of_a_user_is_not_asked_for(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fault("user", "nobody")
    cli("mps", "start").ok()
    pid = world.client(sm_percent=0)
    # Whose programs these are says the user id, not what a login shell left in the environment.
    monkeypatch.setenv("LOGNAME", "somebody")
    cli("mps", "kill", str(pid), asks=True).ok()


def test_another_users_client_may_not_be_ended(refused: Callable[..., str], world: World, idle: int) -> None:
    world.fault("user", "nobody")
    refused("mps", "kill", str(idle), "--yes", code="no_permission", exit_code=4)
    assert world.process(idle).stopped_at is None


@pytest.mark.parametrize(("typed", "gone"), [("y\n", True), ("n\n", False), ("\n", False)])
@pytest.mark.usefixtures("daemon")
def test_the_question_on_a_terminal(world: World, typed: str, gone: bool) -> None:
    pid = world.client(sm_percent=0, user="nobody")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpushare", "--host", world.spec, "mps", "kill", str(pid)],
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    while b"[y/N]" not in said:
        said += os.read(ours, 1000)
    os.write(ours, typed.encode())
    assert process.wait(timeout=120) == (0 if gone else 19)
    os.close(ours)
    assert (pid not in world.pids()) == gone


@pytest.mark.usefixtures("daemon")
def test_interrupted_while_it_drains_lets_the_client_go_on(real: Callable[..., Started], world: World) -> None:
    pid = world.client(sm_percent=10, queue_seconds=60)
    world.client(sm_percent=90, queue_seconds=60)
    started = real("mps", "kill", str(pid), "--drain", "600")
    until(lambda: world.process(pid).stopped_at is not None, "stopped")
    started.signal(signal.SIGINT)
    answer = started.result()
    assert answer.code == 130
    assert answer.lines("error") == ["error: interrupted"]
    assert world.process(pid).stopped_at is None


@pytest.mark.parametrize("words", [("--drain", "soon"), ("--drain", "-1")])
def test_wrong_duration(refused: Callable[..., str], idle: int, words: tuple[str, ...]) -> None:
    refused("mps", "kill", str(idle), *words, code="bad_duration", exit_code=2)


def test_client_on_a_mig_instance(cli: Cli, world: World) -> None:
    (uuid,) = world.mig("3g.71gb")
    cli("mps", "start", "-g", uuid).ok()
    pid = world.client(sm_percent=50, queue_seconds=0.1, mig=uuid)
    assert cli("mps", "kill", str(pid), output="json").ok().data["drain"]["source"] == "gpm"
    assert world.pids() == []
