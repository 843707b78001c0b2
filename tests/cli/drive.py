"""Driving gpushare and a simulated host in tests: in this process, in a fork, and as a real program."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import jsonschema
import pytest

from benchmarks.crashes.hits import load
from gpushare.base.errors import NotFound
from gpushare.base.selection import Device
from gpushare.cli import main
from gpushare.connect import connect
from gpushare.gpu_models import GpuModel, find_model
from gpushare.host.claims import claim_directory
from gpushare.host.host import Host
from gpushare.host.identity import Identity, boot_id, uptime
from gpushare.memory.leases import PREFIX
from gpushare.memory.ledger import Place, Request
from gpushare.mig.ledger import names_of
from gpushare.run.jobs import JobRecord, find_record, write_record
from gpushare.show.schema import schema_of
from gpushare.sim import admin
from gpushare.sim import mig as mig_compute
from gpushare.sim.current import changing, current
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedProcess, StateFile, parse_spec

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
H200 = "sim:h200"
CRASHED = 137
# The commands that may ask.
ASKING = (
    *(("apply",), ("move",), ("pause",), ("reserve",), ("mps", "stop"), ("sim", "reset"), ("stop",)),
    *(("mig", verb) for verb in ("apply", "destroy", "disable", "enable", "name", "revoke")),
    *(("swap", "out"), ("swap", "in"), ("timeslice", "set"), ("timeslice", "reset")),
)
# (profile, start, ((slices, start), ...)), by place.
Instances = tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...]


def as_script(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command with ``-y`` where it may ask, as a script gives it."""
    at = 0
    while words[at : at + 1] and words[at] in {"--host", "-o"}:
        at += 2
    verb = next((verb for verb in ASKING if tuple(words[at : at + len(verb)]) == verb), None)
    if verb is None or {"-y", "--yes", "-n", "--dry-run", "-h", "--help"} & set(words):
        return tuple(words)
    return (*words[:at], *verb, "-y", *words[at + len(verb) :])


@functools.cache
def validator(command: str) -> jsonschema.Draft202012Validator | None:
    """Return what checks the documents of a command; None: before a command is known, there is none."""
    with contextlib.suppress(NotFound):
        return jsonschema.Draft202012Validator(schema_of(command))
    return None


@dataclass(frozen=True)
class Answer:
    """How a command ended, and its output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the document on stdout, which has to be as its schema says."""
        document = json.loads(self.out)
        check = validator(document["command"]) if isinstance(document, dict) and "command" in document else None
        if check is not None:
            check.validate(document)
        return document

    @property
    def data(self) -> Any:
        """Return the data of the document, after its envelope was checked."""
        document = self.json
        assert list(document) == ["schema", "command", "status", "data", "errors"]
        assert document["schema"] == 1
        return document["data"]

    @property
    def error(self) -> dict[str, Any]:
        """Return the only error of the document."""
        (error,) = self.json["errors"]
        return dict(error)

    def lines(self, word: str) -> list[str]:
        """Return the lines of stderr that begin with ``word:``."""
        return [line for line in self.err.splitlines() if line.startswith(f"{word}:")]

    def ok(self) -> Answer:
        """Assert success without an error, and return itself."""
        assert self.code == 0, self
        assert not self.lines("error"), self
        return self

    def ends(self, code: int, error: str | None = None) -> Answer:
        """Assert the exit code, and the code of the only error of the document, and return itself."""
        assert self.code == code, self
        assert error is None or self.error["code"] == error, self
        return self


def refusals(*lines: str) -> Any:
    """Return the mark of a test that tries each command of a table: ``code exit_code: words | other words``."""
    rows = []
    for line in lines:
        refusal, _, commands = line.partition(":")
        code, number = refusal.split()
        rows += [
            pytest.param(tuple(shlex.split(words)), code, int(number), id=words.strip())
            for words in commands.split("|")
        ]
    return pytest.mark.parametrize(("words", "code", "exit_code"), rows)


def same(host: str) -> tuple[Any, dict[str, str]]:
    """Return the parts of a simulated host that a refused command must not change."""
    file = StateFile(parse_spec(host).text)
    state = file.read()
    run = file.directory / "run"
    files = {
        str(path): path.read_text() if path.suffix == ".json" else ""
        for path in sorted(run.rglob("*"))
        if not path.is_dir() and path.name != "lock" and path.suffix != ".log"
    }
    # Not state: PIDs that were given out, and the length of MPS logs.
    return {key: value for key, value in asdict(state).items() if key != "next_pid"} if state else None, files


class Seen(NamedTuple):
    """One GPU as the state file has it, without asking gpushare."""

    mode: int | None
    pending: int | None
    instances: Instances

    @property
    def places(self) -> set[tuple[str, int]]:
        """Return profile and start of each GPU instance."""
        return {(profile, start) for profile, start, _ in self.instances}

    @property
    def devices(self) -> Counter[tuple[str, int]]:
        """Return the MIG devices: profile and compute slices; 0 stands for a GPU instance without one."""
        return Counter((profile, slices) for profile, _, parts in self.instances for slices, _ in parts or ((0, 0),))


@dataclass
class World:
    """One simulated host."""

    spec: str = H200

    @classmethod
    def new(cls, spec: str) -> World:
        """Return a host as it is at its first use, whatever was done to it before."""
        world = cls(parse_spec(spec).text)
        connect(world.spec)
        admin.reset(world.spec)
        world.run("status")
        return world

    @property
    def host(self) -> Host:
        return connect(self.spec)

    @property
    def file(self) -> StateFile:
        return StateFile(parse_spec(self.spec).text)

    @property
    def state(self) -> SimulatedHostState:
        """Return the state of the host, without the processes that have died."""
        assert self.begun
        return current(self.file)

    @property
    def begun(self) -> bool:
        """Return whether the host has a state: some command has used it."""
        return self.file.exists()

    @property
    def directory(self) -> Path:
        return self.file.directory

    @property
    def journal(self) -> Path:
        return self.directory / "run" / "mig" / "journal.json"

    def run(self, *words: str) -> Answer:
        """Run a command in this process as a script would, with ``-y`` where it may ask, and return its document."""
        return self.asked(*as_script(words))

    def asked(self, *words: str) -> Answer:
        """Run a command in this process as it is, without a terminal, and return its document."""
        out, err = io.StringIO(), io.StringIO()
        by_host = mock.patch.dict(os.environ, GPUSHARE_HOST=self.spec)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), by_host:
            code = main(["-o", "json", *words])
        answer = Answer(code, out.getvalue(), err.getvalue())
        assert "Traceback" not in answer.err, answer.err
        assert all(error["code"] != "bug" for error in answer.json["errors"]), answer
        return answer

    def run_apart(self, *words: str) -> int:
        """Run a command in a process of its own, which may be killed; return its exit code."""
        loaded()
        child = os.fork()
        if not child:
            code = 99
            try:
                code = self.run(*words).code
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def uuid(self, index: int = 0) -> str:
        """Return the UUID of a GPU."""
        return self.host.nvml.identities()[index].uuid or ""

    def mig(self, *profiles: str, gpu: str = "0") -> list[str]:
        """Cut a GPU into instances and return their UUIDs."""
        connect(self.spec)
        admin.set_mig(self.spec, gpu, profiles)
        return [instance.uuid for instance in self.state.gpus[int(gpu)].mig]

    def fault(self, kind: str, value: object = None, gpu: int | str | None = None) -> None:
        """Make something fail."""
        connect(self.spec)
        admin.set_fault(self.spec, kind, None if gpu is None else str(gpu), None if value is None else str(value))

    def clear(self) -> None:
        """Clear all faults."""
        admin.clear_faults(self.spec)

    @contextlib.contextmanager
    def fault_at(self, step: int) -> Iterator[None]:
        """Let the Nth modifying NVML call fail; afterwards nothing does."""
        self.fault("fail-step", step)
        try:
            yield
        finally:
            self.clear()

    def client(self, index: int = 0, daemon: int = -1, **options: Any) -> int:
        """Add a client of a daemon and return its PID."""
        pipe = self.state.daemons[daemon].pipe_directory
        environment = {"CUDA_MPS_PIPE_DIRECTORY": pipe, **options.pop("environment", {})}
        return admin.add_process(self.spec, str(index), mps=True, environment=environment, **options)

    def process(self, pid: int) -> SimulatedProcess:
        """Return a process of the state."""
        return next(process for process in self.state.processes if process.pid == pid)

    def attached(self) -> list[SimulatedProcess]:
        """Return the clients of all daemons; none before the first use of the host."""
        state = self.file.read()
        return [process for process in state.processes if process.mps_server] if state else []

    def pids(self) -> list[int]:
        """Return the PIDs of all processes."""
        return [process.pid for process in self.state.processes]

    def model(self, gpu: int) -> GpuModel:
        """Return the model of a GPU."""
        return find_model(self.state.gpus[gpu].model)

    def look(self) -> list[Seen]:
        """Return the MIG state of every GPU."""
        return [_seen(gpu) for gpu in self.state.gpus]

    def busy(self) -> dict[int, tuple[str, str | None, int | None, int | None]]:
        """Return each living process by PID with its GPU, profile, start, and compute instance."""
        state, found = self.state, {}
        for one in state.processes:
            gpu = next((gpu for gpu in state.gpus if gpu.uuid == one.gpu_uuid), None)
            for mig in [] if gpu is None else gpu.mig:
                if (mig.gpu_instance_id, mig.compute_instance_id) == (one.gpu_instance_id, one.compute_instance_id):
                    found[one.pid] = (one.gpu_uuid, mig.profile, mig.start, mig.compute_instance_id)
        return found

    def names(self) -> dict[str, tuple[str, str, int]]:
        """Return GPU, profile and start of each named instance."""
        return {name: (one.gpu_uuid, one.profile, one.start) for name, one in names_of(self.host).items()}

    def devices(self) -> list[tuple[int, str]]:
        """Return GPU and UUID of each MIG device."""
        return [(index, mig.uuid) for index, gpu in enumerate(self.state.gpus) for mig in gpu.mig]

    def add(self, uuid: str) -> int:
        """Put a process into a MIG device."""
        gpu = next(gpu for gpu, one in self.devices() if one == uuid)
        return admin.add_process(self.spec, str(gpu), mig=uuid)

    def send(self, pid: int, number: int) -> None:
        """Send a signal, not by gpushare."""
        self.host.processes.send(pid, number)

    def set(self, **values: object) -> None:
        """Set fields of the state."""
        with changing(self.file) as (state, _):
            vars(state).update(values)

    def alter(self, pid: int, **values: object) -> None:
        """Set fields of a process."""
        with changing(self.file) as (state, _):
            vars(next(process for process in state.processes if process.pid == pid)).update(values)

    def hold(self, size: int | None, gpu: int = 0, **more: Any) -> Place:
        """Let a job that is not here reserve memory of a GPU."""
        place = Place(self.host, Request(memory_bytes=size, keys=(self.uuid(gpu),), client=False, **more))
        place.take(self.uuid(gpu))
        return place

    def record(self, name: str, pid: int, role: str = "plain", gpu: int = 0, **changes: Any) -> JobRecord:
        """Write and return the record of a job that runs now; it has no gpushare, unless a ``supervisor`` is given."""
        device = Device(gpu=self.host.nvml.gpu(gpu))
        job = replace(record_of(self.host, device, name, pid, role), **changes)
        write_record(self.host, job)
        return job

    def wait_for_a_job(self) -> None:
        """Wait until a job is on a GPU."""
        until(lambda: (state := self.file.read()) is not None and state.processes, "the job is on the GPU")

    def lease(self, gpu: int, uid: int) -> Path:
        """Reserve a GPU as another user; return the file of the lease. The test is root."""
        path = claim_directory(self.host) / f"{PREFIX}{uid:016x}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"gpushare lease 1\nboot {boot_id()}\ngpu {self.uuid(gpu)}\nsince {int(uptime())}\nuntil {round(uptime() + 7170)}\n"
        )
        os.chown(path, uid, uid)
        return path

    def foreign_daemon(self, directory: Path, *, uuid: str | None = None) -> int:
        """Start a daemon by hand, as another user would, and return its PID."""
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory / "p"),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "l"),
            "CUDA_VISIBLE_DEVICES": uuid,
        }
        done = self.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment)
        assert done.exit_code == 0, done
        return self.state.daemons[-1].pid


def _seen(gpu: SimulatedGpu) -> Seen:
    model = find_model(gpu.model)
    found: dict[tuple[str, int], list[tuple[int, int]]] = {
        (instance.profile, instance.start): [] for instance in gpu.bare
    }
    for one in gpu.mig:
        profile = model.profile(one.profile)
        assert profile is not None
        slices = len(mig_compute.span(profile, one))
        found.setdefault((one.profile, one.start), []).append((slices, one.compute_start))
    instances = [(name, start, tuple(sorted(parts))) for (name, start), parts in found.items()]
    return Seen(gpu.mig_mode, gpu.mig_pending, tuple(sorted(instances, key=lambda one: (one[1], one[0]))))


def missing(text: str, *parts: str) -> list[str]:
    """Return the parts that are not in a text."""
    return [part for part in parts if part not in text]


def sure(value: T | None) -> T:
    """Return a value that is there."""
    assert value is not None
    return value


def until(holds: Callable[[], Any], what: str, *, seconds: float = 120.0) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return value


def until_it_runs(world: World, started: Started, name: str) -> JobRecord:
    """Wait until the record of a job names its program, which is on the GPU by then, and return the record."""

    def named() -> JobRecord | None:
        record = find_record(world.host, name) if world.begun else None
        return record if record and record.pid != started.pid and record.pid in world.pids() else None

    return until(named, f"{name} runs")


def until_one_run_is_over(world: World, copies: int = 2) -> None:
    """Wait until a benchmark has finished a run: it had more clients than one run has."""
    seen: set[int] = set()

    def more_than_one() -> bool:
        seen.update(one.pid for one in world.attached())
        return len(seen) > copies

    until(more_than_one, "a second run under MPS begins")


def alive(pid: int) -> bool:
    """Return whether a real process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a real gpushare."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@dataclass
class Started:
    """A running gpushare process."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, number: int = signal.SIGINT) -> Answer:
        """Send it a signal, and wait for its end."""
        self.signal(number)
        return self.result()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def line(self) -> str:
        """Return the next line of stdout."""
        return sure(self.process.stdout).readline()

    def note(self) -> str:
        """Return the next line of stderr."""
        return sure(self.process.stderr).readline()

    def says(self, text: str) -> str:
        """Read stderr up to the line with a text, and return that line."""
        for line in sure(self.process.stderr):
            self.said.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended and never said {text!r}: {self.said}")

    def result(self, timeout: float = 120.0) -> Answer:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout)
        return Answer(self.process.returncode, out, err)


# What the fixtures of these names are: a command in this process, the same as a process, and a check that it is refused.
Cli = Callable[..., Answer]
Real = Callable[..., Started]
Refused = Callable[..., str]
Patch = pytest.MonkeyPatch
Words = tuple[str, ...]
# What writes a file and returns its path.
Write = Callable[[str | bytes], str]


# Once for all processes that are forked from this one.
loaded = functools.cache(load)


class Forked(subprocess.Popen[str]):
    """gpushare in a process that is forked from this one, which has all of it loaded: a tenth of the work of a start."""

    def _execute_child(self, *given: Any) -> None:
        loaded()
        words, env, cwd, pipes, new_session = given[0], given[6], given[5], given[10:16], given[21]
        with warnings.catch_warnings():
            # Since Python 3.12 a fork next to threads is warned of: those of pytest-xdist, which hold nothing that we use.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            _become(words[3:], env, cwd, (pipes[0], pipes[3], pipes[5]), new_session=new_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _become(
    words: list[str], env: Mapping[str, str], cwd: str | None, streams: tuple[int, int, int], *, new_session: bool
) -> None:
    """Run gpushare in this process as `python -m gpushare` would, and end with it."""
    code = 70
    try:
        if new_session:
            os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 4096)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
            with contextlib.suppress(OSError, ValueError):
                if signal.getsignal(number) not in {signal.SIG_IGN, signal.SIG_DFL, None}:
                    signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115 - as long as the process
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115 - same
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        code = main(words)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def start_real(*words: str, host: str | None = H200, env: Mapping[str, str] | None = None, **named: Any) -> Started:
    """Start gpushare as a process, or a ``program`` that runs it.

    It is forked where nothing of its start is asked for: no streams, no ``preexec_fn``, no ``program`` of its own.
    """
    # By the variable: with the option, every command that is printed has it too.
    by_host = {} if host is None else {"GPUSHARE_HOST": host}
    own = named.keys() - {"stdin", "start_new_session", "cwd"} or any("PYTHON" in name for name in env or ())
    process = (subprocess.Popen if own else Forked)(
        [sys.executable, *named.pop("program", ("-m", "gpushare")), *words],
        stdin=named.pop("stdin", subprocess.DEVNULL),
        stdout=named.pop("stdout", subprocess.PIPE),
        stderr=named.pop("stderr", subprocess.PIPE),
        env=environment(**by_host, **(env or {})),
        text=True,
        **named,
    )
    return Started(process)


def clear_up(processes: list[subprocess.Popen[str]], host: World) -> None:
    """End what a failed test left running: gpushare and its programs."""
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


def record_of(host: Host, device: Device, name: str, pid: int, role: str) -> JobRecord:
    """Return the record of a job that runs now."""
    process = host.processes.identity(pid) or Identity(pid, 0)
    return JobRecord(name=name, **process._asdict(), devices=(device.uuid,), role=role)
