"""``gpushare mps set``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from gpushare.host.mps_control import MpsControl
from gpushare.units import GIB, MIB
from tests.cli.conftest import Cli
from tests.cli.drive import World

TWO = "sim:2xh200"


@pytest.fixture
def daemon(cli: Cli) -> None:
    cli("mps", "start", "--threads", "50", "--memory", "8G").ok()


def limits(cli: Cli, host: str = "sim:h200") -> list[tuple[object, object, object]]:
    shown = cli("mps", "status", host=host, output="json").ok().data["mps_daemons"]
    return [(one["threads_percent"], one["memory_limit_bytes"], one["priority"]) for one in shown]


@pytest.mark.usefixtures("daemon")
def test_each_alone_leaves_the_others(cli: Cli) -> None:
    cli("mps", "set", "--threads", "25").ok()
    assert limits(cli) == [(25.0, 8 * GIB, "normal")]
    cli("mps", "set", "--memory", "1500M").ok()
    assert limits(cli) == [(25.0, 1500 * MIB, "normal")]
    cli("mps", "set", "--priority", "low").ok()
    assert limits(cli) == [(25.0, 1500 * MIB, "low")]


@pytest.mark.usefixtures("daemon")
def test_future_clients_get_it_and_running_ones_keep_theirs(cli: Cli, world: World) -> None:
    old = world.client()
    answer = cli("mps", "set", "--threads", "25", "--memory", "2G").ok()
    assert "running clients keep" in answer.err
    new = world.client()
    assert (world.process(old).threads, world.process(old).memory_limit_bytes) == (50.0, 8 * GIB)
    assert (world.process(new).threads, world.process(new).memory_limit_bytes) == (25.0, 2 * GIB)


@pytest.mark.usefixtures("daemon")
def test_the_undo_that_is_said_undoes_it(cli: Cli) -> None:
    before = limits(cli)
    answer = cli("mps", "set", "--threads", "25", "--memory", "2G").ok()
    (undo,) = [line.removeprefix("note: undo: gpushare ") for line in answer.err.splitlines() if "undo:" in line]
    cli(*undo.split()).ok()
    assert limits(cli) == before


@pytest.mark.usefixtures("daemon")
def test_dry_run(cli: Cli) -> None:
    before = limits(cli)
    data = cli("mps", "set", "--threads", "25", "-n", output="json").ok().data
    assert "set_default_active_thread_percentage 25.0" in data["steps"][0]["command"]
    assert limits(cli) == before


def test_per_gpu_leaves_the_other_alone(cli: Cli) -> None:
    cli("mps", "start", "-g", "all", "--threads", "50", host=TWO).ok()
    data = cli("mps", "set", "-g", "all", "--threads", "1=25", host=TWO, output="json").ok().data
    assert len(data["steps"]) == 2
    shown = cli("mps", "status", host=TWO, output="json").ok().data["mps_daemons"]
    assert {one["gpu_index"]: one["threads_percent"] for one in shown} == {0: 50.0, 1: 25.0}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "nothing_to_set"),
        (("--threads", "0"), "bad_percentage"),
        (("--threads", "nan"), "bad_percentage"),
        (("--memory", "0G"), "bad_size"),
        (("--memory", "500G"), "limit_above_gpu"),
        (("--priority", "2"), "bad_priority"),
        (("--threads", "5=25"), "bad_limit"),
    ],
)
@pytest.mark.usefixtures("daemon")
def test_wrong_limits(refused: Callable[..., str], words: tuple[str, ...], code: str) -> None:
    refused("mps", "set", *words, code=code, exit_code=2)


def test_without_a_daemon(refused: Callable[..., str]) -> None:
    assert "gpushare mps start -g 0" in refused("mps", "set", "--threads", "5", code="no_daemon", exit_code=6)


@pytest.mark.usefixtures("daemon")
def test_dead_daemon(refused: Callable[..., str], world: World) -> None:
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    assert "gpushare mps stop -g 0" in refused("mps", "set", "--threads", "5", code="dead_daemon", exit_code=6)


@pytest.mark.usefixtures("daemon")
def test_hanging_daemon(refused: Callable[..., str], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)
    world.send(world.state.daemons[0].pid, signal.SIGSTOP)
    assert "stop --force" in refused("mps", "set", "--threads", "5", code="daemon_hangs", exit_code=1)


@pytest.mark.usefixtures("daemon")
def test_another_users_daemon(refused: Callable[..., str], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fault("user", "1000")
    said = refused("mps", "set", "--threads", "5", code="not_your_daemon", exit_code=4)
    assert "could not be undone" not in said
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused("mps", "set", "--threads", "5", code="not_your_daemon", exit_code=4)


def simulated(world: World) -> tuple[object, ...]:
    (daemon,) = world.state.daemons
    (server,) = daemon.servers
    return daemon.threads, daemon.memory, daemon.priority, server.threads, server.memory


@pytest.mark.parametrize("getter", ["default_memory", "default_priority", "server_memory"])
@pytest.mark.usefixtures("daemon")
def test_a_limit_that_does_not_hold_restores_all_of_them(
    refused: Callable[..., str], cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, getter: str
) -> None:
    world.client()
    before = simulated(world)
    proper = getattr(MpsControl, getter)
    lies = iter([True, False, True, False])

    def lying(self: MpsControl, *more: int) -> object:
        # One lie per command, and the truth while it goes back.
        return "nothing of the kind" if next(lies, False) else proper(self, *more)

    monkeypatch.setattr(MpsControl, getter, lying)
    words = ("--threads", "25", "--memory", "2G", "--priority", "low")
    said = refused("mps", "set", *words, code="limit_not_held", exit_code=1)
    assert "could not be undone" not in said
    assert simulated(world) == before


@pytest.mark.usefixtures("daemon")
def test_a_server_keeps_its_own_percentage_on_the_way_back(
    refused: Callable[..., str], cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.client()
    (server,) = world.state.daemons[0].servers
    MpsControl(world.host.programs, world.state.daemons[0].pipe_directory).set_server_threads(server.pid, 33.0)
    before = simulated(world)
    lies = iter([True, False, True, False])
    proper = MpsControl.server_memory
    monkeypatch.setattr(MpsControl, "server_memory", lambda self, pid: "x" if next(lies, False) else proper(self, pid))
    refused("mps", "set", "--threads", "25", "--memory", "2G", code="limit_not_held", exit_code=1)
    assert simulated(world) == before
