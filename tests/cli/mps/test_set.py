"""``gpushare mps set``."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

import pytest

from gpushare.base.units import GIB, MIB
from gpushare.mps.control import MpsControl
from gpushare.mps.home import DaemonHome
from tests.cli.drive import Cli, Patch, Refused, Words, World, refusals, sure

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


def shown_clients(cli: Cli) -> dict[int, tuple[object, ...]]:
    """Return limits at attachment and from now on by PID, as status and mps status show them."""
    keys = ("threads_percent", "memory_limit_bytes", "priority")
    found = []
    for words in (("status",), ("mps", "status")):
        (daemon,) = cli(*words, output="json").ok().data["mps_daemons"]
        clients = [client for server in daemon["servers"] for client in server["clients"]]
        found.append({one["pid"]: tuple(one[f"{w}{key}"] for w in ("", "next_") for key in keys) for one in clients})
    assert found[0] == found[1]
    return found[0]


@pytest.mark.usefixtures("daemon")
def test_a_client_is_shown_with_the_limits_that_it_has(cli: Cli, world: World) -> None:
    first = world.client()
    assert "running clients keep" in cli("mps", "set", "--threads", "20", "--memory", "2G").ok().err
    second = world.client()
    for pid, limits_of_it in ((first, (50.0, 8 * GIB)), (second, (20.0, 2 * GIB))):
        assert (world.process(pid).threads, world.process(pid).memory_limit_bytes) == limits_of_it
    new = (20.0, 2 * GIB, "normal")
    assert shown_clients(cli) == {first: (50.0, 8 * GIB, "normal", *new), second: (*new, *new)}
    text = cli("mps", "status").ok().out
    assert "50 % (20 % from now on)  8.0 GiB (2.0 GiB from now on)" in text
    assert text.count("from now on") == 2
    # A second change: each client keeps what it had.
    cli("mps", "set", "--memory", "none", "--priority", "low").ok()
    last = (20.0, None, "low")
    assert shown_clients(cli) == {first: (50.0, 8 * GIB, "normal", *last), second: (*new, *last)}
    assert {pid: world.process(pid).threads for pid in (first, second)} == {first: 50.0, second: 20.0}


@pytest.mark.usefixtures("daemon")
def test_a_clients_own_lower_limit_stays_in_sight(cli: Cli, world: World) -> None:
    pid = world.client(environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"})
    cli("mps", "set", "--threads", "40").ok()
    assert [shown_clients(cli)[pid][part] for part in (0, 3)] == [30.0, 30.0]
    cli("mps", "set", "--threads", "10").ok()
    assert [shown_clients(cli)[pid][part] for part in (0, 3)] == [30.0, 10.0]


@pytest.mark.usefixtures("daemon")
def test_limits_changed_by_hand_leave_those_at_attachment_unknown(cli: Cli, world: World) -> None:
    """When they changed is unknown: the client may have attached before or after."""
    before = world.client()
    cli("mps", "set", "--threads", "40").ok()
    after = world.client()
    (server,) = world.state.daemons[-1].servers
    MpsControl(world.host.programs, world.state.daemons[-1].pipe_directory).set_threads(10.0, server.pid)
    shown = shown_clients(cli)
    assert (shown[before][0], shown[after][:4]) == (50.0, (None, None, None, 10.0))
    assert "- (10 % from now on)" in cli("mps", "status").ok().out


@pytest.mark.usefixtures("daemon")
def test_a_failed_change_leaves_the_record_as_it_was(cli: Cli, world: World, monkeypatch: Patch) -> None:
    pid = world.client()
    (record,) = world.directory.glob("run/mps/*/daemon.json")
    before = record.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(MpsControl, "set_memory", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli("mps", "set", "--threads", "40", "--memory", "2G", "--debug")
    assert (record.read_text(), shown_clients(cli)[pid][0]) == (before, 50.0)


def test_per_gpu_leaves_the_other_alone(cli: Cli) -> None:
    cli("mps", "start", "-g", "all", "--threads", "50", host=TWO).ok()
    assert len(cli("mps", "set", "-g", "all", "--threads", "1=25", host=TWO, output="json").ok().data["steps"]) == 2
    assert limits(cli, TWO) == [(50.0, None, "normal"), (25.0, None, "normal")]


@refusals(
    "nothing_to_set 2: ",
    "bad_size 2: --memory 0",
    "limit_above_gpu 2: --memory 500G",
    "bad_limit 2: --threads 5=25",
)
@pytest.mark.usefixtures("daemon")
def test_wrong_limits(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    text = refused("mps", "set", *words, code=code, exit_code=exit_code)
    assert ("'0' is below 1 MiB" in text) == (code == "bad_size")


def test_without_a_daemon_or_with_a_dead_one(refused: Refused, cli: Cli, world: World) -> None:
    assert "gpushare mps start -g 0" in refused("mps", "set", "--threads", "5", code="no_daemon", exit_code=6)
    cli("mps", "start", "--threads", "50").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    text = refused("mps", "set", "--threads", "5", code="dead_daemon", exit_code=6)
    assert "gpushare mps stop -g 0; then start it again: gpushare mps start -g 0 --threads 50\n" in text


@pytest.mark.usefixtures("daemon")
def test_hanging_daemon(refused: Refused, world: World, monkeypatch: Patch) -> None:
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", 0.1)
    world.send(world.state.daemons[0].pid, signal.SIGSTOP)
    pipe = world.state.daemons[0].pipe_directory
    text = refused("mps", "set", "--threads", "5", code="daemon_hangs", exit_code=1)
    assert f"gpushare mps stop --pipe-directory {pipe} --force\n" in text
    # That of another user is not even asked.
    world.fault("user", "61000")
    text = refused("mps", "set", "--threads", "5", code="not_your_daemon", exit_code=4)
    assert "could not be undone" not in text


def simulated(world: World) -> tuple[object, ...]:
    (daemon,) = world.state.daemons
    (server,) = daemon.servers
    return daemon.threads, daemon.memory, daemon.priority, server.threads, server.memory


@pytest.mark.parametrize(("getter", "of_server"), [("memory", False), ("priority", False), ("memory", True)])
@pytest.mark.usefixtures("daemon")
def test_a_limit_that_does_not_hold(
    refused: Refused, world: World, monkeypatch: Patch, getter: str, of_server: bool
) -> None:
    world.client()
    (server,) = world.state.daemons[0].servers
    # A percentage of its own, which it keeps on the way back.
    MpsControl(world.host.programs, world.state.daemons[0].pipe_directory).set_threads(33.0, server.pid)
    before = simulated(world)
    proper = getattr(MpsControl, getter)
    lies = iter([True, False, True, False])

    def lying(self: MpsControl, *more: int) -> object:
        # One lie per command, and the truth while it goes back.
        return "nothing of the kind" if any(more) is of_server and next(lies, False) else proper(self, *more)

    monkeypatch.setattr(MpsControl, getter, lying)
    words = ("--threads", "25", "--memory", "2G", "--priority", "low")
    assert "could not be undone" not in refused("mps", "set", *words, code="limit_not_held", exit_code=1)
    assert simulated(world) == before


@pytest.mark.parametrize("at_first", [(), ("--memory", "8G")])
def test_memory_none_removes_the_limit_and_the_undo_restores_it(cli: Cli, world: World, at_first: Words) -> None:
    cli("mps", "start", *at_first).ok()
    world.client()
    before, held = limits(cli), simulated(world)
    undo = cli("mps", "set", "--memory", "2G").ok().out.partition("; undo: gpushare ")[2]
    assert undo.split() == ["mps", "set", "-g", "0", "--memory", "8G" if at_first else "none"]
    cli("mps", "set", "--memory", "none").ok()
    assert limits(cli) == [(100.0, None, "normal")]
    assert world.process(world.client()).memory_limit_bytes is None
    cli(*undo.split()).ok()
    assert limits(cli) == before
    if at_first:
        assert simulated(world) == held


def test_two_at_once_keep_each_others_record(cli: Cli, monkeypatch: Patch) -> None:
    """The other one sets its limit after this one has made its first plan, and before it has the lock."""
    cli("mps", "start").ok()
    proper, others = DaemonHome.locked, iter([("--threads", "25")])

    def locked(self: DaemonHome) -> AbstractContextManager[None]:
        for words in others:
            cli("mps", "set", *words).ok()
        return proper(self)

    monkeypatch.setattr(DaemonHome, "locked", locked)
    cli("mps", "set", "--memory", "2G").ok()
    assert limits(cli) == [(25.0, 2 * GIB, "normal")]
    record = sure(next(DaemonHome(path.parent).read() for path in World().host.run_directory.rglob("daemon.json")))
    assert (record.limits.threads_percent, record.limits.memory_limit_bytes) == (25.0, 2 * GIB)


def test_limits_of_two_instances_of_one_gpu(cli: Cli, world: World) -> None:
    first, second = world.mig("3g.71gb", "1g.18gb")
    words = ("-g", f"{first},{second}", "--memory", f"{first}=4G,{second}=2G")
    cli("mps", "start", *words).ok()
    assert sorted(str(limit[1]) for limit in limits(cli)) == [str(2 * GIB), str(4 * GIB)]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    "words", [("--threads", "50"), ("--memory", "8G"), ("--threads", "50", "--memory", "8G", "--priority", "normal")]
)
def test_what_the_daemon_holds_already_is_not_set_again(cli: Cli, world: World, words: Words) -> None:
    world.client()
    answer = cli("mps", "set", *words, output="json").ok()
    assert (answer.data["steps"], answer.data["undo"]) == ([], None)
    assert cli("mps", "set", *words).ok().out == "nothing to do: the host is as requested\n"


def test_a_daemon_without_a_memory_limit_needs_none_taken_away(cli: Cli) -> None:
    cli("mps", "start", "--threads", "30").ok()
    assert cli("mps", "set", "--memory", "none").ok().out == "nothing to do: the host is as requested\n"


@pytest.mark.usefixtures("daemon")
def test_a_limit_that_was_changed_by_hand_is_set_again(cli: Cli, world: World) -> None:
    world.client()
    home = sure(
        DaemonHome.at_pipe(
            cli("mps", "status", output="json").ok().data["mps_daemons"][0]["pipe_directory"],
            world.host.run_directories,
        )
    )
    control = MpsControl(world.host.programs, str(home.pipe))
    control.set_threads(70, control.servers()[0])
    assert cli("mps", "set", "--threads", "50", output="json").ok().data["steps"]
    assert control.threads(control.servers()[0]) == 50.0
    cli("mps", "set", "--memory", "none").ok()
    control.set_memory(GIB)
    cli("mps", "set", "--memory", "none").ok()
    assert control.memory() is None
