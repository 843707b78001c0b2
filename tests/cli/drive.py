"""Driving gpushare in tests: in this process, and as a real one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.sim import admin
from gpushare.sim.state import SimulatedHostState, SimulatedProcess, StateFile, parse_spec

ROOT = Path(__file__).parents[2]
H200 = "sim:h200"


@dataclass(frozen=True)
class Answer:
    """What one command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the document on stdout."""
        return json.loads(self.out)

    @property
    def data(self) -> Any:
        """Return the data of the document, after its envelope was checked."""
        document = self.json
        assert list(document) == ["schema", "command", "status", "data", "errors"]
        assert document["schema"] == 1
        return document["data"]

    def lines(self, word: str) -> list[str]:
        """Return the lines of stderr that begin with ``word:``."""
        return [line for line in self.err.splitlines() if line.startswith(f"{word}:")]

    def ok(self) -> Answer:
        """Return itself, if it succeeded without an error."""
        assert self.code == 0, self
        assert not self.lines("error"), self
        return self


def same(host: str) -> tuple[Any, dict[str, str]]:
    """Return all of a simulated host that a refused command must leave as it was."""
    file = StateFile(parse_spec(host).text)
    state = file.read()
    run = file.directory / "run"
    files = {
        str(path): path.read_text() if path.suffix == ".json" else ""
        for path in sorted(run.rglob("*"))
        if not path.is_dir() and path.name != "lock" and path.suffix != ".log"
    }
    # PIDs that were given out, and how busy an MPS log is, are nobody's state.
    return {key: value for key, value in asdict(state).items() if key != "next_pid"} if state else None, files


@dataclass
class World:
    """One simulated host."""

    spec: str = H200

    @property
    def host(self) -> Host:
        return connect(self.spec)

    @property
    def state(self) -> SimulatedHostState:
        state = StateFile(parse_spec(self.spec).text).read()
        assert state is not None
        return state

    @property
    def begun(self) -> bool:
        """Return whether the host has a state: a program that was started has asked it."""
        return StateFile(parse_spec(self.spec).text).exists()

    @property
    def directory(self) -> Path:
        return StateFile(parse_spec(self.spec).text).directory

    def uuid(self, index: int = 0) -> str:
        """Return the UUID of a GPU."""
        return self.host.nvml.identities()[index].uuid or ""

    def mig(self, *profiles: str, gpu: str = "0") -> list[str]:
        """Cut a GPU into instances and return their UUIDs."""
        connect(self.spec)
        admin.set_mig(self.spec, gpu, profiles)
        return [instance.uuid for instance in self.state.gpus[int(gpu)].mig]

    def fault(self, kind: str, value: str | None = None, gpu: str | None = None) -> None:
        """Make something fail."""
        connect(self.spec)
        admin.set_fault(self.spec, kind, gpu, value)

    def client(self, index: int = 0, daemon: int = -1, **options: Any) -> int:
        """Add a client of a daemon and return its PID."""
        pipe = self.state.daemons[daemon].pipe_directory
        environment = {"CUDA_MPS_PIPE_DIRECTORY": pipe, **options.pop("environment", {})}
        return admin.add_process(self.spec, str(index), mps=True, environment=environment, **options)

    def process(self, pid: int) -> SimulatedProcess:
        """Return a process of the state."""
        return next(process for process in self.state.processes if process.pid == pid)

    def attached(self) -> list[SimulatedProcess]:
        """Return the clients of all daemons; none of a host that was never used."""
        state = StateFile(parse_spec(self.spec).text).read()
        return [one for one in state.processes if one.mps_server] if state else []

    def pids(self) -> list[int]:
        """Return the PIDs of all processes."""
        return [process.pid for process in self.state.processes]

    def send(self, pid: int, number: int) -> None:
        """Send a signal past gpushare."""
        self.host.processes.send(pid, number)

    def foreign_daemon(self, directory: Path, *, uuid: str | None = None) -> int:
        """Start a daemon by hand, as somebody else would, and return its PID."""
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "p"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "l"),
            "CUDA_VISIBLE_DEVICES": uuid,
        }
        done = self.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment)
        assert done.exit_code == 0, done
        return self.state.daemons[-1].pid


def until(holds: Callable[[], Any], what: str, *, seconds: float = 120.0) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return value


def until_one_run_is_over(world: World, copies: int = 2) -> None:
    """Wait until a benchmark has a run behind it: more have been clients than one run has."""
    seen: set[int] = set()

    def more_than_one() -> bool:
        seen.update(one.pid for one in world.attached())
        return len(seen) > copies

    until(more_than_one, "a second run under MPS begins")


def alive(pid: int) -> bool:
    """Return whether a process of this machine lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a real gpushare."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}


@dataclass
class Started:
    """A real gpushare that runs."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def says(self, text: str) -> str:
        """Read what it says on stderr up to the line with a text, and return that line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended and never said {text!r}: {self.said}")

    def result(self, timeout: float = 120.0) -> Answer:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout)
        return Answer(self.process.returncode, out, err)


def start_real(*words: str, host: str | None = H200, env: Mapping[str, str] | None = None, **named: Any) -> Started:
    """Start a real gpushare, or a ``program`` that runs it."""
    first = [] if host is None else ["--host", host]
    process = subprocess.Popen(
        [sys.executable, *named.pop("program", ("-m", "gpushare")), *first, *words],
        stdin=named.pop("stdin", subprocess.DEVNULL),
        stdout=named.pop("stdout", subprocess.PIPE),
        stderr=named.pop("stderr", subprocess.PIPE),
        env=environment(**(env or {})),
        text=True,
        **named,
    )
    return Started(process)


def clear_up(processes: list[subprocess.Popen[str]], host: World) -> None:
    """End what a failed test left: the programs of runs, and gpushare itself."""
    with contextlib.suppress(AssertionError):
        for process in host.state.processes:
            if process.real:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(ValueError, OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=5)
