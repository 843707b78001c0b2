"""One simulated host in a directory of its own: prepared once, put back as often as wanted, looked at from outside.

What is there is read from the simulated host's state and from gpushare's files, not by gpushare.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.crashes.inject import PROGRAM, Injector, install
from gpushare.host.process import Processes
from gpushare.host.program import MPS_CONTROL
from gpushare.sim.processes import SM_PERCENT
from gpushare.sim.state import (
    DEFAULT_SLICE_US,
    FIRST_SIMULATED_PID,
    SimulatedGpu,
    SimulatedHostState,
    StateFile,
    parse_spec,
)

# Nothing that is tried here takes so long; what does, hangs.
PATIENCE_SECONDS: Final = 60.0
# It runs until it is ended: after this time, or so much later than it has set a slice.
KEEP: Final = ("timeslice", "keep")
_KEEP_SECONDS: Final = 1.6
_KEEP_MORE_SECONDS: Final = 0.15
REAL_PROGRAM: Final = "GPUSHARE_MPS_CONTROL"
GUARD: Final = "GPUSHARE_CRASH_GUARD"
_LOCKS: Final = re.compile(r"(.*/)?(lock|[\w.-]+\.lock|[\w.-]+\.lease)")
_CLAIM: Final = re.compile(r"/gpushare-(claim|memory)-[0-9a-f]{16}$")
# Its name and its end differ from run to run. One that is half written counts for nobody.
_LEASE: Final = re.compile(r"/gpushare-lease-[0-9a-f]{16}$")
_PEAKS: Final = re.compile(r"^var/peaks/[0-9a-f]+\.json$")
# How earlier jobs ended: each further one adds its own.
_PAST: Final = re.compile(
    r"^var/past/\w[\w.@-]*\.json$|^var/before-[0-9a-f]{8}\.yaml$|^var/output(?:/\w[\w.-]*\.log)?$"
)
# Records by PID: that of a real process differs from run to run.
_BY_PID: Final = re.compile(r"(/(?:slices|swap|pause)/)(\d{1,7})\.json$")
_PAUSE_GUARD: Final = "the guard of a pause"
# Times, and the most memory that was seen of a job.
_VARIES: Final = frozenset(
    {
        "at",
        "time",
        "boot_id",
        "since",
        "taken_at",
        "set_at",
        "started",
        "memory_peak_bytes",
        "keeper",
        "supervisor",
        "out_seconds",
        # Whether it was taken back in between.
        "restored",
    }
)
_ELSEWHERE: Final = (
    "GPUSHARE_HOST", "GPUSHARE_NVIDIA_SMI", "GPUSHARE_RUN_DIR", "GPUSHARE_STATE_DIR", "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "COLUMNS", "NO_COLOR",
)  # fmt: skip

# What is there, by its name: two looks can be compared line by line.
Look = Mapping[str, str]


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code (negative: by that signal; None: it hung), and what it said."""

    code: int | None
    out: str
    err: str

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Return the errors of the document on stdout."""
        try:
            return list(json.loads(self.out)["errors"])
        except (ValueError, KeyError, TypeError):
            return []

    def improper(self) -> str | None:
        """Return what gpushare may never say, whatever happened to it."""
        for text in (self.err, self.out):
            for line in text.splitlines():
                if re.search(
                    r"Traceback \(most|bug in gpushare|unexpected \w+(Error|Exception)|Exception ignored", line
                ):
                    return line.strip()[:300]
        if any(error.get("code") == "bug" for error in self.errors):
            return "an error of code 'bug'"
        return "it hangs" if self.code is None else None


@dataclass
class World:
    """A directory with one simulated host, and the commands that run on it."""

    spec: str
    root: Path
    real_program: str | None = None
    # What the rows keep for their commands: PIDs, UUIDs, files.
    facts: dict[str, str] = field(default_factory=dict)
    # What was prepared before, with its facts.
    _prepared: dict[tuple[str, Callable[[World], None]], dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = parse_spec(self.spec).text

    @property
    def scratch(self) -> Path:
        """Return the directory beside it, which gpushare does not see."""
        return self.root.with_name(self.root.name + ".kept")

    @property
    def directory(self) -> Path:
        """Return where the host's own state is."""
        self.enter()
        return StateFile(self.spec).directory

    @property
    def state(self) -> SimulatedHostState:
        """Return the host's state, as it was written."""
        self.enter()
        state = StateFile(self.spec).read()
        if state is None:
            message = f"{self.spec} was never used"
            raise FileNotFoundError(message)
        return state

    def enter(self) -> None:
        """Let this process's environment be the host's."""
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
        os.environ["GPUSHARE_SIM_DIR"] = str(self.root)
        if self.real_program is None:
            os.environ.pop(REAL_PROGRAM, None)
        else:
            os.environ[REAL_PROGRAM] = self.real_program

    def clear(self) -> None:
        """Remove everything: processes, files."""
        self.end_all()
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self.scratch.mkdir(exist_ok=True)
        self.facts.clear()

    def remove(self) -> None:
        """Leave nothing of it."""
        self.clear()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def save(self, name: str) -> None:
        """Keep the host as it is now."""
        kept = self.scratch / name
        shutil.rmtree(kept, ignore_errors=True)
        copy_tree(self.root, kept)

    def put_back(self, name: str) -> None:
        """Make the host what it was when it was kept."""
        self.end_all()
        shutil.rmtree(self.root, ignore_errors=True)
        copy_tree(self.scratch / name, self.root)

    def run(
        self,
        words: Sequence[str],
        *,
        at: int = 0,
        fault: str = "kill",
        guard: str | None = None,
        kill_after_program: int = 0,
        program: str = PROGRAM,
    ) -> Done:
        """Run a command in a process of its own, forked from this one, which has everything loaded.

        ``at`` and ``fault`` say where it is hit, ``guard`` where its guard is (``AT:FAULT``). With
        ``kill_after_program`` it is killed so many effects after ``program`` was started.
        """
        self.enter()
        log, out, err = (self.scratch / name for name in ("effects", "out", "err"))
        log.write_bytes(b"")
        # A program with nothing to do.
        environment = {SM_PERCENT: "0"} if "--idle" in words else {}
        if guard is not None:
            (self.scratch / "guard").write_bytes(b"")
            environment[GUARD] = f"{guard}:{self.scratch / 'guard'}"
        child = os.fork()
        if not child:
            _become(self, words, at, fault, (log, out, err), environment, kill_after_program, program)
        if tuple(words[:2]) == KEEP:
            _end_later(child, log)
        code = _wait(child)
        return Done(code, _text(out), _text(err))

    def remember(self, prepare: Callable[[World], None]) -> None:
        """Keep the host as it is prepared now."""
        key = (self.spec, prepare)
        self._prepared[key] = dict(self.facts)
        self.save(f"prepared-{list(self._prepared).index(key)}")

    def recall(self, prepare: Callable[[World], None]) -> bool:
        """Make the host what it was prepared to before; return whether it was."""
        key = (self.spec, prepare)
        if key not in self._prepared:
            return False
        self.facts = dict(self._prepared[key])
        self.put_back(f"prepared-{list(self._prepared).index(key)}")
        return True

    def call(self, act: Callable[[], Any]) -> str:
        """Do something to the host in a process of its own, and return what it returned, as text."""
        self.enter()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.close(reading)
                os.write(writing, str(act()).encode())
                code = 0
            except BaseException:  # noqa: BLE001 - said, and the parent sees the code
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            said = file.read().decode()
        if _wait(child) != 0:
            message = "a host could not be prepared"
            raise RuntimeError(message)
        return said

    def effects(self, name: str = "effects") -> list[list[str]]:
        """Return the effects of the last command: number, kind, what it was, and ``hit`` where it was hit."""
        return [line.split("\t") for line in _text(self.scratch / name).splitlines()]

    def look(self) -> Look:
        """Return what is there."""
        state = self.state
        found: dict[str, str] = {}
        for index, gpu in enumerate(state.gpus):
            found |= _gpu(index, gpu)
        for daemon in state.daemons:
            where = daemon.pipe_directory.replace(str(self.root), "")
            found[f"daemon at {where}"] = (
                f"GPUs {daemon.visible} threads {daemon.threads} memory {dict(sorted(daemon.memory.items()))} priority "
                f"{daemon.priority} user {daemon.uid} servers {len(daemon.servers)} stopped {daemon.stopped} "
                f"slices {sorted(str(one.slices.get('compute', 'default')) for one in daemon.servers)}"
            )
        for process in state.processes:
            if not process.real:
                # The driver's own: the default, or the half of it that a swap leaves.
                slice_us = process.slices.get("compute")
                slice_text = "default" if slice_us in {None, DEFAULT_SLICE_US // 2} else slice_us
                found[f"process {process.pid}"] = (
                    f"{process.name} on {process.gpu_uuid} instance {process.gpu_instance_id} daemon "
                    f"{process.mps_daemon} broken {process.broken} stopped {process.stopped_at is not None} "
                    f"channels off {len(process.channels_off)} "
                    f"slice {slice_text} checkpoint {process.checkpoint} "
                    f"memory {process.memory_bytes} image {process.image_bytes}"
                )
        for pid, what in self.living().items():
            if what == _PAUSE_GUARD:
                # It belongs to the record; where it was killed, that alone must do.
                continue
            key = "a real daemon" if what.startswith(MPS_CONTROL) else f"a process of ours, {what},"
            found[f"{key} lives" + ("" if key == "a real daemon" else f" ({pid})")] = _limits(self, pid)
        return found | self._files(state)

    def _files(self, state: SimulatedHostState) -> dict[str, str]:
        found: dict[str, str] = {}
        directory = self.directory
        # A real program that has ended stays in the simulated state until something looks at the host again: whether it
        # lives is asked of the kernel (`_lives`), not of that list.
        servers = (server.pid for daemon in state.daemons for server in daemon.servers)
        alive = {*(one.pid for one in state.daemons), *servers, *(one.pid for one in state.processes if not one.real)}
        for room in ("run", "var"):
            for path in sorted((directory / room).rglob("*")):
                name = path.relative_to(directory).as_posix()
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode) or re.search(r"/(pipe|log)/", name):
                    continue
                if _CLAIM.search(name) or _LEASE.search(name):
                    found.update(dict.fromkeys(_held(name, _text(path)), "in force"))
                    continue
                if _PAST.search(name) or (_PEAKS.search(name) and "memory_bytes" in _text(path)):
                    # What a command was seen to use: whether a look was in time is chance.
                    continue
                if _LOCKS.fullmatch(name):
                    if _is_locked(path):
                        found[f"lock {name}"] = "held"
                    continue
                key = re.sub(r"/(\.[\w.-]+-)[a-z0-9_]{8}$", r"/\g<1>XXXXXXXX", name)
                if (record := _BY_PID.search(key)) and int(record[2]) < FIRST_SIMULATED_PID:
                    key = f"{key[: record.end(1)]}PID of the {_steady(int(record[2]), alive, 'pid')}.json"
                found[f"file {key}"] = f"{stat.S_IMODE(status.st_mode):o} {_content(path, alive)}"
        return found

    def living(self) -> dict[int, str]:
        """Return the real processes of this host: guards, programs, daemons; gpushare itself is a fork of ours."""
        wanted = f"GPUSHARE_SIM_DIR={self.root}\0".encode()
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            with contextlib.suppress(OSError, IndexError):
                if wanted not in _begin(f"/proc/{entry}/environ") + b"\0":
                    continue
                words = _begin(f"/proc/{entry}/cmdline").decode(errors="replace").split("\0")
                if not _lives(int(entry)):
                    continue
                if "gpushare.pause.keep:keep" in words[:6]:
                    found[int(entry)] = _PAUSE_GUARD
                else:
                    found[int(entry)] = " ".join(Path(word).name for word in words[:3] if word)
        return found

    def settle(self, seconds: float = 20.0) -> dict[int, str]:
        """Wait until guards and programs are gone; return those that are not."""
        deadline = time.monotonic() + seconds
        while True:
            keeping = self._keeping()
            left = {
                pid: what
                for pid, what in self.living().items()
                if not what.startswith(MPS_CONTROL) and not (what == _PAUSE_GUARD and pid in keeping)
            }
            _reap()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.03)

    def _keeping(self) -> set[int]:
        """Return the guards of the jobs that are paused: they stay until the job is resumed."""
        found = set()
        for path in self.directory.glob("run/pause/*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["state"] == "paused":
                    found.add(int(record["keeper"][0]))
        return found

    def end_all(self) -> None:
        """Kill every real process of this host."""
        for _ in range(200):
            left = self.living()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reap()
            time.sleep(0.01)


def see_only_ours(root: str) -> None:
    """Let the real MPS daemons of this machine that belong to others be none of this process's business."""
    everybody = Processes.pids_of_program
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={root}/".encode()

    def mine(self: Processes, name: str) -> Sequence[int]:
        found = []
        for pid in everybody(self, name):
            with contextlib.suppress(OSError):
                if name != MPS_CONTROL or wanted in _begin(f"/proc/{pid}/environ"):
                    found.append(pid)
        return found

    Processes.pids_of_program = mine  # type: ignore[method-assign]


def _become(
    world: World,
    words: Sequence[str],
    at: int,
    fault: str,
    files: tuple[Path, Path, Path],
    environment: Mapping[str, str],
    kill_after_program: int,
    program: str,
) -> None:
    """Run the command in this process, which ends with it."""
    code = 70
    try:
        os.setsid()
        os.environ.update(environment)
        log = os.open(files[0], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        for number, path in ((1, files[1]), (2, files[2])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        from gpushare.cli import main

        see_only_ours(str(world.root))
        injector = Injector(str(world.root), at, fault, log)
        injector.kill_after_program, injector.program = kill_after_program, program
        install(injector)
        code = main(["--host", world.spec, *words])
    except BaseException:  # noqa: BLE001 - it is what is looked for
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_later(child: int, log: Path) -> None:
    """Send SIGTERM to what runs until then, once it has set a slice or has had the time to."""
    descriptor = os.pidfd_open(child)
    try:
        deadline = time.monotonic() + _KEEP_SECONDS
        ended: list[int] = []
        while not ended and time.monotonic() < deadline and "\tchannels set\t" not in _text(log):
            ended, _, _ = select.select([descriptor], [], [], 0.05)
        # What follows the first one belongs to the same look.
        if not ended and not select.select([descriptor], [], [], _KEEP_MORE_SECONDS)[0]:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    finally:
        os.close(descriptor)


def _wait(child: int) -> int | None:
    """Return how a child ended, as subprocess does; None: it had to be killed."""
    descriptor = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([descriptor], [], [], PATIENCE_SECONDS)
    finally:
        os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _reap() -> None:
    """Bury the orphans that came to this process (PR_SET_CHILD_SUBREAPER)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _begin(path: str) -> bytes:
    """Return the begin of a file of /proc: another process of this machine may show gigabytes there."""
    parts, left = [], 1 << 20
    with open(path, "rb", buffering=0) as file:
        while left and (part := file.read(min(left, 16 << 10))):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def _held(name: str, text: str) -> list[str]:
    """Return what a claim or a lease holds: nothing, if nobody is left who has it, or it is half written."""
    claim = _CLAIM.search(name)
    if claim is None:
        return [f"lease of {uuid}" for uuid in re.findall(r"^gpu (.*)\nuntil \d+\n", text, re.MULTILINE)]
    # One of a process that is gone is removed as it is met.
    lives = any(_lives(int(pid)) for pid in re.findall(r"^process (\d+) ", text, re.MULTILINE))
    facts = "; ".join(re.findall(r"^fact (.*)$", text, re.MULTILINE))
    return [f"{claim[1]} held: {facts}"] if lives else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def copy_tree(source: Path, target: Path) -> None:
    """Copy a tree with its sockets and FIFOs, modes and owners."""
    status = source.lstat()
    if stat.S_ISDIR(status.st_mode):
        target.mkdir()
        for entry in os.scandir(source):
            copy_tree(Path(entry.path), target / entry.name)
    elif stat.S_ISLNK(status.st_mode):
        target.symlink_to(source.readlink())
        return
    elif stat.S_ISREG(status.st_mode):
        target.write_bytes(source.read_bytes())
    else:
        os.mknod(target, status.st_mode)
    target.chmod(stat.S_IMODE(status.st_mode))
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An open file description lock is another kind.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _gpu(index: int, gpu: SimulatedGpu) -> dict[str, str]:
    places = {one.gpu_instance_id: f"{one.profile}:{one.start}" for one in (*gpu.mig, *gpu.bare)}
    instances = [
        f"{one.profile}:{one.start} compute {one.compute_profile}@{one.compute_start} {one.uuid}"
        for one in sorted(gpu.mig, key=lambda one: (one.start, one.compute_start))
    ] + [f"{one.profile}:{one.start} without compute" for one in sorted(gpu.bare, key=lambda one: one.start)]
    found = {
        f"GPU {index} modes": f"compute {gpu.compute_mode} slice {gpu.time_slice} MIG {gpu.mig_mode}/{gpu.mig_pending} "
        f"persistence {gpu.persistence}",
        f"GPU {index} instances": ", ".join(instances),
    }
    for key, node in gpu.nodes.items():
        gi, _, ci = key.partition("/")
        # An instance that is created again has another id in the same place.
        where = places.get(int(gi), f"a gone instance {gi}") if gi.isdigit() else gi
        if (node.owner, node.mode, node.users, node.modify) != (0, 0o444, [], True):
            found[f"GPU {index} node {where}{'/' if ci else ''}{ci}"] = (
                f"owner {node.owner} mode {node.mode:o} users {node.users} modify {node.modify}"
            )
    return found


def _done_copies(text: str) -> str:
    """Return which copies of a farm were completed, each as often as it was."""
    done = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            end = json.loads(line)
            if end["state"] == "done":
                done.append(end["copy"])
    return f"copies done: {sorted(done)}"


def _content(path: Path, alive: set[int]) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "no regular file"
    if path.name == "farm.jsonl":
        return _done_copies(text)
    try:
        return json.dumps(_steady(json.loads(text), alive), sort_keys=True)
    except ValueError:
        return text[:2000]


def _steady(value: Any, alive: set[int], key: str = "") -> Any:
    """Return JSON without what differs from run to run: times, and PIDs but for whether they live."""
    if isinstance(value, dict):
        return {one: _steady(inner, alive, one) for one, inner in value.items() if one not in _VARIES}
    if key == "images" and isinstance(value, list):
        # Start times of real processes.
        return [[_steady(pid, alive, "pid"), size] for pid, _, size in value]
    if key == "before" and isinstance(value, list):
        # The handle of a client goes with its PID.
        return [str(one).partition("=")[2] for one in value]
    if isinstance(value, list):
        return [_steady(one, alive, key) for one in value]
    if key.endswith("pid") and isinstance(value, int):
        return "alive" if value in alive or _lives(value) else "dead"
    return value


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def _limits(world: World, pid: int) -> str:
    """Return what a real daemon says of its limits; "" for any other process."""
    import subprocess

    if world.real_program is None:
        return ""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return ""
    environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if Path(f"/proc/{pid}/exe").resolve().name != MPS_CONTROL:
        return ""
    asked = "get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0\n"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [world.real_program], input=asked, env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        where = environment.get("CUDA_MPS_PIPE_DIRECTORY", "").replace(str(world.root), "")
        return f"{where}: {done.stdout.split()}"
    return "does not answer"
