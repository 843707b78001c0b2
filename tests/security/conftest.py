"""Two further users, and what they can do to root.

They need no name in ``/etc/passwd``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpushare.cli import main
from gpushare.connect import connect
from tests.cli.drive import Answer, World, loaded

T = TypeVar("T")


@dataclass(frozen=True)
class Stranger:
    """A user who is not root."""

    name: str
    uid: int
    home: Path

    def become(self) -> None:
        """Let this process be the user's, for good."""
        os.setgroups([])
        os.setgid(self.uid)
        os.setuid(self.uid)

    def does(self, act: Callable[[], T]) -> T:
        """Do something as this user, in a process of its own, and return what it returned."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                self.become()
                answer = pickle.dumps((True, act()))
            except BaseException as error:  # noqa: BLE001 - told to the test
                traceback.print_exc()
                answer = pickle.dumps((False, repr(error)))
            os.write(writing, answer)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            done, answer_ = pickle.loads(file.read())  # noqa: S301 - of our own child
        os.waitpid(child, 0)
        assert done, answer_
        return answer_  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def keeps(self, act: Callable[[], Any]) -> Iterator[int]:
        """Do something as this user and stay: locks and files stay open as long as the block runs. Yields the PID."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                self.become()
                kept = act()
                os.write(writing, b"ready")
                while kept is not child:
                    time.sleep(3600)
            except BaseException:  # noqa: BLE001 - said, and the parent sees that it is not ready
                traceback.print_exc()
            os._exit(1)
        os.close(writing)
        try:
            assert os.read(reading, 5) == b"ready"
            yield child
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    @contextlib.contextmanager
    def runs(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[int]:
        """Run a program as this user as long as the block runs; yield its PID."""
        process = subprocess.Popen(
            list(argv), user=self.uid, group=self.uid, extra_groups=[], env={"PATH": os.environ["PATH"], **(environment or {})},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        try:
            yield process.pid
        finally:
            process.kill()
            process.communicate()


def _stranger(number: int) -> Iterator[Stranger]:
    # Each worker of a parallel run has its own, and no user of the machine has its id.
    uid = 10_000_000 + 2 * os.getpid() + number
    home = Path(tempfile.mkdtemp(prefix="gsu", dir="/tmp"))
    try:
        os.chown(home, uid, uid)
        home.chmod(0o755)
        yield Stranger(str(uid), uid, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def mallory() -> Iterator[Stranger]:
    """Return the attacker."""
    yield from _stranger(0)


@pytest.fixture(scope="session")
def alice() -> Iterator[Stranger]:
    """Return somebody who only works here."""
    yield from _stranger(1)


@pytest.fixture(autouse=True)
def open_host(sim_dir: Path) -> None:
    """Let everybody look into the simulated hosts of the test, as into /run and /var/lib of a real machine."""
    sim_dir.chmod(0o755)


@pytest.fixture
def sticky(open_host: None) -> Iterator[Path]:
    """Return a directory like /tmp: everybody may put files into it."""
    directory = Path(tempfile.mkdtemp(prefix="gss", dir="/tmp"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def world() -> World:
    """Return an H200 with the directory where the claims of all users meet."""
    connect("sim:h200").nvml.sweep()
    world = World("sim:h200")
    claims = world.directory / "run" / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    claims.chmod(0o1777)
    return world


def gpushare(*words: str, host: str = "sim:h200", seconds: float = 60.0, output: str | None = None) -> Answer:
    """Run a command as root in a process of its own, which must end within some time."""
    loaded()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            code = 70
            try:
                os.setsid()
                for number, file in ((1, out), (2, err)):
                    os.dup2(file.fileno(), number)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
                code = main(["--host", host, *words, *(["-o", output] if output else [])])
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:  # noqa: BLE001 - the test sees the code and the text
                traceback.print_exc()
            finally:
                os._exit(code)
        code = _within(child, seconds)
        out.seek(0)
        err.seek(0)
        answer = Answer(code, out.read().decode(errors="replace"), err.read().decode(errors="replace"))
    assert "Traceback" not in answer.err, answer
    assert "bug in gpushare" not in answer.err + answer.out, answer
    return answer


def _within(child: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"gpushare did not end within {seconds:g} s")
