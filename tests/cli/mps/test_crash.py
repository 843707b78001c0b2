"""``gpushare mps`` killed at every side effect: the next command completes or undoes what was begun."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest

from gpushare.base.model import ComputeMode
from gpushare.host import store
from gpushare.host.nvml import NvmlReader
from gpushare.mps.control import MpsControl
from gpushare.mps.home import home_of
from gpushare.sim.programs import SimulatedPrograms
from tests.cli.drive import Cli, Patch, World

START = ("mps", "start", "--threads", "25", "--exclusive")


class Killer:
    """Ends this process after its N-th side effect; 0: before the first."""

    def __init__(self, number: int) -> None:
        self.left = number

    def around(self, act: Callable[..., object]) -> Callable[..., object]:
        def acting(*args: object, **named: object) -> object:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            # One act may hold others.
            here = self.left == 0
            try:
                return act(*args, **named)
            finally:
                if here:
                    os.kill(os.getpid(), signal.SIGKILL)

        return acting


def killed(cli: Cli, number: int, *words: str) -> bool:
    """Run a command in a process that is killed at its N-th side effect; return whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            killer = Killer(number)
            for owner, name in (
                (SimulatedPrograms, "run"),
                (NvmlReader, "set_compute_mode"),
                (store, "replace_file"),
                (os, "unlink"),
                (os, "mkdir"),
            ):
                setattr(owner, name, killer.around(getattr(owner, name)))
            cli(*words)
        except BaseException:  # noqa: BLE001 - nothing of pytest may run on in the child
            traceback.print_exc(file=sys.__stderr__)
            os._exit(70)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def points(cli: Cli, *words: str, before: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Yield each point of a command after it was killed there, until it comes to its end."""
    for number in itertools.count():
        before()
        if not killed(cli, number, *words):
            assert number > 5, "hardly a side effect was met"
            break
        yield number


def mode(world: World) -> ComputeMode:
    return ComputeMode(world.state.gpus[0].compute_mode)


@pytest.fixture(autouse=True)
def made(cli: Cli) -> None:
    """Make the simulated host: its own files are none of our side effects."""
    cli("status").ok()


@pytest.fixture
def clean(cli: Cli, world: World) -> Callable[[], None]:
    """Return a check that nothing is left."""

    def check() -> None:
        assert world.state.daemons == []
        assert mode(world) is ComputeMode.DEFAULT
        assert home_of(world.host.run_directory, world.uuid()).read() is None

    return check


def test_a_start_that_was_killed_is_completed_by_a_start(cli: Cli, world: World, clean: Callable[[], None]) -> None:
    for point in points(cli, *START):
        record = home_of(world.host.run_directory, world.uuid()).read()
        complete = record is not None and not record.interrupted
        assert cli(*START).code == (19 if complete else 0), point
        (daemon,) = cli("mps", "status", output="json").ok().data["mps_daemons"]
        assert (daemon["ours"], daemon["threads_percent"], daemon["error"], daemon["note"]) == (True, 25.0, None, None)
        assert mode(world) is ComputeMode.EXCLUSIVE_PROCESS
        cli("mps", "stop").ok()
        clean()


def test_a_start_that_was_killed_is_seen_and_undone_by_a_stop(
    cli: Cli, world: World, clean: Callable[[], None]
) -> None:
    seen = 0
    for point in points(cli, *START):
        begun = bool(world.state.daemons) or mode(world) is not ComputeMode.DEFAULT
        if begun:
            checks = {check["id"]: check for check in cli("doctor", output="json").data["checks"]}
            record = home_of(world.host.run_directory, world.uuid()).read()
            assert record is not None, point
            if record.interrupted:
                seen += 1
                assert checks["mps.interrupted"]["remedy"] == f"gpushare mps stop -g {world.uuid()}"
                assert "was interrupted" in cli("status").err
        stopped = cli("mps", "stop")
        # Nothing is there to stop where nothing was begun.
        assert stopped.code == 0 or (stopped.code == 6 and not begun), point
        clean()
    assert seen > 4


def test_a_stop_that_was_killed_is_completed(cli: Cli, world: World, clean: Callable[[], None]) -> None:
    def started() -> None:
        cli(*START).ok()

    for point in points(cli, "mps", "stop", before=started):
        again = cli("mps", "stop")
        assert again.code in {0, 6}, point
        clean()


def test_a_killed_stop_does_not_hide_the_mode_from_a_start(cli: Cli, world: World, clean: Callable[[], None]) -> None:
    def started() -> None:
        if not world.state.daemons:
            cli(*START).ok()

    for point in points(cli, "mps", "stop", before=started):
        if not world.state.daemons:
            assert cli(*START).code == 0, point
        cli("mps", "stop").ok()
        clean()


def test_a_killed_rollback_is_completed(cli: Cli, world: World, clean: Callable[[], None], monkeypatch: Patch) -> None:
    """The daemon does not take a limit, the start takes itself back, and is killed on the way."""
    with monkeypatch.context() as patched:
        patched.setattr(MpsControl, "threads", lambda *_: 99.0)
        for point in points(cli, *START):
            begun = bool(world.state.daemons) or mode(world) is not ComputeMode.DEFAULT
            stopped = cli("mps", "stop")
            assert stopped.code == 0 or (stopped.code == 6 and not begun), point
            clean()
    clean()


def test_a_run_that_was_killed_while_it_started_its_daemon(cli: Cli, world: World, clean: Callable[[], None]) -> None:
    """A dead daemon's compute mode is the next run's to restore, and a killed run's daemon is the next one's."""
    for number in range(1, 12):
        cli(*START).ok()
        world.send(world.state.daemons[0].pid, signal.SIGKILL)
        killed(cli, number, "run", "--", "true")
        assert cli("run", "--", "true").code == 0, number
        clean()


def test_an_apply_after_a_start_that_was_killed(cli: Cli, world: World, clean: Callable[[], None]) -> None:
    cli(*START).ok()
    path = world.directory / "gpushare.yaml"
    path.write_text(cli("capture").ok().out)
    cli("mps", "stop").ok()
    for point in points(cli, *START):
        assert cli("apply", "-f", str(path), "--yes").code == 0, point
        (daemon,) = world.state.daemons
        assert (daemon.threads, mode(world)) == (25.0, ComputeMode.EXCLUSIVE_PROCESS), point
        cli("mps", "stop").ok()
        clean()
