"""The processes of a host: who they are, and signals to them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import signal
import signal as signals
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.base.errors import NoPermission, NotFound, OperationFailed, cut, signal_refused_error
from gpushare.base.units import quoted
from gpushare.base.values import dataclass
from gpushare.host.capabilities import user_name
from gpushare.host.identity import (
    HOST_PID_SPACE,
    Identity,
    Stat,
    every_pid,
    identity_of,
    identity_of_child,
    parent_of,
    pid_space,
    read_stat,
    start_of,
    uptime,
    wall_time,
)

if TYPE_CHECKING:
    from gpushare.host.open_files import OpenFiles

# Linux before 5.3, a sandbox without this call, or no descriptor left: then rely on the check just before.
_NO_DESCRIPTOR: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# libnvidia-ml.so (NVML) and libcuda.so (CUDA); the driver version follows the name.
_DRIVER: Final = re.compile(rb"/lib(?:cuda|nvidia-ml)\.so[^/\n]*$", re.MULTILINE)
_MOST_MAPS: Final = 16 << 20
# A program that starts another through more is not followed.
_MOST_PARENTS: Final = 1024
# A process in 16 hierarchies; users who may create cgroups can nest them as deep as they like.
_MOST_CHARACTERS: Final = 64 << 10
# rt_sigtimedwait, by machine (asm/unistd.h).
_SIGTIMEDWAIT: Final = {"x86_64": 128, "aarch64": 137}
# Scopes of systemd, and of containerd without systemd.
_SCOPE: Final = r"(?:docker|libpod|cri-containerd|crio|containerd|nerdctl)[-:]([0-9a-f]{12,64})(?=\.scope|$)"
# A directory named by an id.
_ID: Final = r"[0-9a-f]{32,64}"
_JOB: Final = r"job_[0-9]{1,20}"


def container_of(cgroup: str) -> str | None:
    """Return the container in the text of ``/proc/PID/cgroup``, as short id or name, or None.

    Knows Docker, Podman, containerd and CRI-O (with Kubernetes pods), LXC, and Slurm's ``job_N``;
    cgroup v1 and v2.
    """
    # Split at the slashes: one regular expression for everything takes cubic time.
    for line in cgroup[:_MOST_CHARACTERS].split("\n"):
        # Before the path: the number and the controllers of the hierarchy.
        _, *directories = line.split("/")
        container = _outermost_container(directories)
        if container is not None:
            return container
    return None


def _outermost_container(names: list[str]) -> str | None:
    """Return the outermost container that the directories of one cgroup name, or None."""
    last_id = max((at for at, name in enumerate(names) if re.fullmatch(_ID, name)), default=-1)
    last_job = max((at for at, name in enumerate(names) if re.match(_JOB, name)), default=-1)
    for at, name in enumerate(names):
        # Docker, Kubernetes and others with cgroupfs: the directory of a container is anywhere below this one.
        is_parent = name in {"docker", "lxc"} or (name.startswith("kubepods") and ":" not in name)
        if is_parent and last_id > at:
            return names[last_id][:12]
        if len(name) == 64 and re.fullmatch(_ID, name):
            return name[:12]
        lxc = _lxc_container(name, names[at + 1] if at + 1 < len(names) else "")
        if lxc:
            return lxc
        job = re.match(_JOB, names[last_job]) if "slurm" in name and last_job > at else None
        if job is not None:
            return job[0]
        scope = re.search(_SCOPE, name)
        if scope is not None:
            return scope[1][:12]
    return None


def _lxc_container(name: str, next_name: str) -> str:
    """Return the LXC container that a directory, or the next one below it, is named for; empty: none."""
    if name in {"lxc", "lxc.payload"}:
        return next_name
    if name.startswith("lxc."):
        return name.removeprefix("lxc.payload.").removeprefix("lxc.")
    return ""


# For the kernel's files: /proc/PID/stat, status, cgroup, limits.
_MOST_BYTES: Final = 1 << 20
_PIECE: Final = 16 << 10
_MOST_OF_COMMAND_LINE: Final = 128 << 10
MOST_OF_ENVIRONMENT: Final = 1 << 20
# TASK_COMM_LEN, less the 0 at the end.
_MOST_OF_NAME: Final = 15


def read_proc(path: str, most: int = _MOST_BYTES) -> bytes | None:
    """Return the content of a file in ``/proc``; None: it cannot be read, or is longer than ``most``."""
    parts, room = [], most + 1
    try:
        with open(path, "rb", buffering=0) as file:
            # In pieces: room for all that it might be takes longer to get than the file to read.
            while room and (part := file.read(min(room, _PIECE))):
                parts.append(part)
                room -= len(part)
    except (OSError, MemoryError):
        return None
    return b"".join(parts) if room else None


def every_stat() -> Iterator[tuple[int, Stat]]:
    """Yield every process with its PID. Those that end meanwhile, or that this user may not see, are left out."""
    for pid in every_pid():
        stat = read_stat(pid)
        if stat is not None:
            yield pid, stat


def command_line_of(pid: int) -> Sequence[str] | None:
    """Return the command line of a process; None: it has none (kernel thread, zombie), or it cannot be read or is over 128 KiB.

    Empty words at its end are left out: a program that sets a shorter title fills up the rest of its arguments with NUL.
    """
    text = read_proc(f"/proc/{pid}/cmdline", _MOST_OF_COMMAND_LINE)
    words = (text or b"").rstrip(b"\0").decode(errors="surrogateescape")
    if text is None or not words:
        return None
    has_several_words = text.endswith(b"\0") and "\0" in words
    # A title is one word with spaces.
    if " " in words and not has_several_words:
        return words.split(" ")
    return words.split("\0")


def entries_of(environment: bytes) -> list[tuple[str, str]]:
    """Return the variables in ``/proc/PID/environ``, as they were at the start of the program."""
    entries = (entry.partition("=") for entry in environment.decode(errors="replace").split("\0"))
    return [(name, value) for name, equals, value in entries if equals]


# Called for a new process with its PID and start.
Announce = Callable[[int, int | None], None]

_POLL_SECONDS: Final = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process; unknown is None. ``started`` is as in `identity.Identity`."""

    pid: int
    user: str | None = None
    uid: int | None = None
    name: str | None = None
    command_line: tuple[str, ...] | None = None
    started: int | None = None
    container: str | None = None
    stopped: bool = False

    @property
    def started_at(self) -> float | None:
        """Return its start in seconds since the epoch, to show: it changes when the clock is set."""
        return None if self.started is None else start_time(self.started)


class ProcessUsage(NamedTuple):
    """What a process uses of the host: CPU seconds since its start (clock ticks since boot), and resident bytes."""

    started: int
    cpu_seconds: float
    memory_bytes: int


class Streams(NamedTuple):
    """Open file descriptors that a program gets as stdin, stdout and stderr."""

    stdin: int
    stdout: int
    stderr: int


class Processes:
    """The process table of a host: of this machine here; a simulated host's overrides every method."""

    def describe(self, pid: int) -> ProcessInfo | None:
        """Return a process (``/proc/PID``); ``user`` is the name of the real user id, ``uid`` the effective one.

        None: there is no such process. One that this user may not read (hidepid) has no fields.
        """
        if pid <= 0:
            return None
        command_line = command_line_of(pid)
        status = read_text(f"/proc/{pid}/status")
        ids = re.search(r"^Uid:\s*(\d+)\s+(\d+)", status, re.MULTILINE)
        info = ProcessInfo(
            pid=pid,
            user=None if ids is None else user_name(int(ids[1])),
            uid=None if ids is None else int(ids[2]),
            name=_name_of(pid, command_line),
            command_line=None if command_line is None else tuple(command_line),
            started=_started(pid),
            container=container_of(read_text(f"/proc/{pid}/cgroup")),
            stopped=re.search(r"^State:\s*T", status, re.MULTILINE) is not None,
        )
        # Last, because it may end while it is read.
        return info if os.path.exists(f"/proc/{pid}") else None

    def identity(self, pid: int) -> Identity | None:
        """Return the process that has a PID now (``/proc/PID/stat``); None: it has ended, or is a zombie."""
        return identity_of(pid)

    def alive(self, pid: int, started: int | None = None) -> bool:
        """Return whether the process is alive, and no zombie (``/proc/PID/stat``). ``started`` guards against a reused PID."""
        identity = identity_of(pid)
        return identity is not None and started in {None, identity.started}

    def environment(self, pid: int) -> Mapping[str, str] | None:
        """Return its initial environment (``/proc/PID/environ``), or None if it is unreadable or the process has ended."""
        text = read_proc(f"/proc/{pid}/environ", MOST_OF_ENVIRONMENT)
        if text is None:
            return None
        # A zombie has an empty one.
        has_ended = not text and not self.alive(pid)
        return None if has_ended else dict(entries_of(text))

    def pids_of_program(self, name: str) -> Sequence[int]:
        """Return the PIDs whose executable has this name; by the command line if ``exe`` cannot be read."""
        pids = []
        for pid in every_pid():
            try:
                program = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
            except OSError:
                # Not comm: the kernel cuts it at 15 bytes, which are the same for the MPS daemon and its server.
                program = (command_line_of(pid) or ("",))[0]
            if os.path.basename(program) == name and self.alive(pid):
                pids.append(pid)
        return sorted(pids)

    def pids_with_env(self, name: str, value: str) -> Sequence[int]:
        """Return the PIDs of the processes with this variable (``/proc/PID/environ``)."""
        entry = f"{name}={value}".encode()
        return [
            pid
            for pid in every_pid()
            if entry in (read_proc(f"/proc/{pid}/environ", MOST_OF_ENVIRONMENT) or b"").split(b"\0") and self.alive(pid)
        ]

    def usage(self, pid: int) -> ProcessUsage | None:
        """Return what a process uses of the host (``/proc/PID/stat``)."""
        stat = read_stat(pid)
        if stat is None:
            return None
        cpu_seconds = (stat.user_ticks + stat.kernel_ticks) / _TICKS
        return ProcessUsage(stat.started, cpu_seconds, stat.resident_pages * _PAGE)

    def descendants(self, pid: int) -> Sequence[int]:
        """Return a process with all that descend from it, those nearest to it first; empty: it is gone."""
        return self.families([pid]).get(pid, [])

    def families(self, pids: Iterable[int]) -> Mapping[int, Sequence[int]]:
        """Return each process with all that descend from it, those nearest to it first; one that is gone has no entry."""
        every = dict(every_stat())
        below: dict[int, list[int]] = {}
        for child, stat in every.items():
            # An older one cannot be a child of it: its parent had this PID before.
            if stat.parent in every and stat.started >= every[stat.parent].started:
                below.setdefault(stat.parent, []).append(child)
        families: dict[int, list[int]] = {}
        for pid in every.keys() & set(pids):
            family = families[pid] = [pid]
            seen = {pid}
            for member in family:
                children = [child for child in below.get(member, ()) if child not in seen]
                seen.update(children)
                family += children
        return families

    def parent(self, pid: int) -> int | None:
        """Return the PID of its parent (field 4 of ``/proc/PID/stat``), or None."""
        return parent_of(pid)

    def ancestry(self, pid: int) -> Iterator[int]:
        """Yield a process and its ancestors, nearest first, without init; at most `_MOST_PARENTS`."""
        above: int | None = pid
        for _ in range(_MOST_PARENTS):
            if above is None or above <= 1:
                return
            yield above
            above = self.parent(above)

    def catches(self, pid: int, signal: int) -> bool | None:
        """Return whether a signal does not kill the process, but tells it something; None when unknown.

        It has a handler (SigCgt of ``/proc/PID/status``), or takes the signal by signalfd or sigwait: each of its threads
        blocks it (SigBlk) or waits for it. One that does neither would get the signal, and end the process.
        """
        handles = _is_in_mask("SigCgt", f"{pid}", signal)
        if handles or handles is None:
            return handles
        try:
            threads = [f"{pid}/task/{number}" for number in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            return None
        for thread in threads:
            blocks = _is_in_mask("SigBlk", thread, signal)
            # None: the thread has ended.
            if blocks is False and not _waits_for(thread, signal):
                return False
        return True

    def ignores(self, pid: int, signal: int) -> bool | None:
        """Return whether the process ignores a signal (SigIgn of ``/proc/PID/status``)."""
        return _is_in_mask("SigIgn", f"{pid}", signal)

    def send_to(self, pid: int, started: int, signal: int) -> None:
        """Send a signal to the process that started then, and to no other (pidfd_send_signal).

        Raises:
            NotFound: it is gone, even if its PID was reused; or the number is a thread's.
            NoPermission: it belongs to another user.
        """
        gone = NotFound(f"process {pid} is gone", "see what runs: gpushare status")
        with contextlib.ExitStack() as closing:
            descriptor = -1
            try:
                descriptor = os.pidfd_open(pid)
                closing.callback(os.close, descriptor)
            except (OSError, OverflowError) as error:
                if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTOR:
                    raise gone from None
            # While the descriptor holds the process: one that gets the PID later gets no signal.
            if _started(pid) != started:
                raise gone
            try:
                if descriptor < 0:
                    os.kill(pid, signal)
                else:
                    signals.pidfd_send_signal(descriptor, signal)
            except ProcessLookupError:
                raise gone from None
            except PermissionError:
                raise signal_refused_error(signals.Signals(signal).name, pid) from None

    def uses_driver(self, pid: int) -> bool | None:
        """Return whether the process has libcuda or libnvidia-ml loaded (``/proc/PID/maps``)."""
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                return _DRIVER.search(file.read(_MOST_MAPS)) is not None
        except OSError:
            return None

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: Streams | None = None,
        announce: Announce | None = None,
    ) -> Child:
        """Start a program in its own process group; ``announce`` is called in its process before the program runs.

        Signals that gpushare ignores stay ignored in it.

        Raises:
            NotFound: no such program.
            NoPermission: it may not be executed.
            OperationFailed: it cannot be executed or announced, and does not run.
        """
        allow_tracing = _call_that_allows_tracing()

        def before_it_runs() -> None:
            """Set up the new process: its group, tracing, the guard, and the signals."""
            # process_group= needs Python 3.11.
            os.setpgrp()
            allow_tracing()
            if announce is not None:
                announce(os.getpid(), _started(os.getpid()))
            # Only Python itself ignores these. Reset after announce, in which a broken pipe must raise, not kill.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)

        stream_options = {} if streams is None else streams._asdict()
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                preexec_fn=before_it_runs,  # noqa: PLW1509
                restore_signals=False,
                **stream_options,
            )
        except subprocess.SubprocessError:
            raise OperationFailed(
                f"{quoted(argv[0], 200)} was not started: the guard process, which would end it if gpushare died, is gone",
                "start it again; see what ended the guard: journalctl -e",
                code="guard_gone",
            ) from None
        except (FileNotFoundError, PermissionError) as error:
            raise not_startable_error(argv[0], forbidden=isinstance(error, PermissionError)) from None
        except OSError as error:
            raise OperationFailed(
                f"cannot execute {quoted(argv[0], 200)}: {error.strerror}",
                starting_hint(argv[0]),
            ) from None
        return Child(process)

    def replace_client(self, client: int, pid: int) -> None:
        """Note for a simulated host that the program of the spawned ``client`` is the process ``pid``, as in a container."""

    def namespace_is_host(self) -> bool | None:
        """Return whether this PID namespace is the host's; None: unknown.

        NVML reports the PIDs of the host: in another namespace its process list is empty or wrong.
        """
        return pid_space() == HOST_PID_SPACE if pid_space() else None

    def open_files(self, prefix: str) -> OpenFiles:
        """Return which processes have files open below a path (``/proc/PID/fd``); only root sees all of them."""
        from gpushare.host.open_files import OpenFiles, open_files

        opened = open_files(prefix)
        # Other processes of the host may not be in this namespace. An unknown namespace is taken for the host's.
        return OpenFiles(by_pid=opened.by_pid, complete=opened.complete and self.namespace_is_host() is not False)


def wait_gone(processes: Processes, starts: Mapping[int, int], seconds: float) -> list[int]:
    """Wait until the processes with these starts, by PID, are gone; return the PIDs of those left after ``seconds``."""
    deadline = time.monotonic() + seconds
    alive = [pid for pid in starts if processes.alive(pid, starts[pid])]
    while alive and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        alive = [pid for pid in alive if processes.alive(pid, starts[pid])]
    return alive


def _waits_for(thread: str, signal: int) -> bool:
    """Return whether a thread (``PID/task/TID``) is in sigwait for a signal.

    During sigwait its signals are not in SigBlk but in a set in memory, to which the system call points. False if unknown,
    as for a process that this user may not trace: on Ubuntu, all but those that gpushare has started.
    """
    words = read_text(f"/proc/{thread}/syscall").split()
    if len(words) < 2 or words[0] != str(_SIGTIMEDWAIT.get(os.uname().machine)):
        return False
    try:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(int(words[1], 16))
            mask = int.from_bytes(memory.read(8), "little")
    except (OSError, ValueError, OverflowError):
        return False
    return bool(mask >> (signal - 1) & 1)


def _is_in_mask(field: str, task: str, signal: int) -> bool | None:
    """Return whether a signal is in a mask of ``/proc/TASK/status`` (a task: ``PID`` or ``PID/task/TID``); None: unknown."""
    match = re.search(rf"^{field}:\s*([0-9a-f]+)", read_text(f"/proc/{task}/status"), re.MULTILINE)
    return bool(int(match[1], 16) >> (signal - 1) & 1) if match else None


def read_text(path: str) -> str:
    """Return a file in ``/proc`` as text; empty: it cannot be read."""
    return (read_proc(path) or b"").decode(errors="replace")


def _name_of(pid: int, command_line: Sequence[str] | None) -> str | None:
    """Return the name of a process; if the kernel has cut it, the whole one from the command line."""
    text = read_proc(f"/proc/{pid}/stat")
    if text is None:
        return None
    name = os.fsdecode(text.partition(b"(")[2].rpartition(b")")[0])
    program = os.path.basename(command_line[0]) if command_line else ""
    is_cut = len(os.fsencode(name)) >= _MOST_OF_NAME and program.startswith(name)
    return program if is_cut else name


def start_time(started: int) -> float:
    """Return the time of a start in clock ticks since boot, in seconds since the epoch."""
    return round(wall_time(started / _TICKS), 2)


def ticks_now() -> int:
    """Return the time since boot in clock ticks, as the start of a process is counted."""
    return int(uptime() * _TICKS)


def _started(pid: int) -> int | None:
    """Return the start of a process (field 22 of ``/proc/PID/stat``), also of a zombie."""
    return start_of(identity_of_child(pid))


# CPUCLOCK_SCHED (linux/posix-timers.h).
_SCHED: Final = 2


def cpu_time(pid: int) -> float | None:
    """Return the CPU time of a process with all its threads in seconds; None if it is gone or cannot be read."""
    try:
        # The process's CPU clock, as clock_getcpuclockid of libc makes it from a PID.
        return time.clock_gettime(~pid << 3 | _SCHED)
    except (OSError, OverflowError):
        return None


def main_thread_time(pid: int) -> float | None:
    """Return the CPU time of a process's main thread in seconds (``/proc/PID/task/PID/schedstat``); None: unknown."""
    try:
        return int((read_proc(f"/proc/{pid}/task/{pid}/schedstat") or b"").split()[0]) / 1e9
    except (ValueError, IndexError):
        return None


class Child:
    """A program that `Processes.spawn` started. waitpid(2), unlike subprocess, also reports that it was stopped."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self._stopped: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative: killed by that signal), or None while it runs."""
        while self._process.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                # Another thread reaped it: its exit status is lost.
                self._process.returncode = 0
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._stopped = os.WSTOPSIG(status)
                continue
            self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode

    def stopped_by(self) -> int | None:
        """Return the signal that stopped it since the last call, or None."""
        self.poll()
        stopped, self._stopped = self._stopped, None
        return stopped


def not_startable_error(program: str, *, forbidden: bool) -> NotFound | NoPermission:
    if forbidden:
        return NoPermission(
            f"no permission to execute {quoted(program, 200)}", starting_hint(program), code="command_not_executable"
        )
    return NotFound(f"there is no program {quoted(program, 200)}", starting_hint(program), code="command_not_found")


def starting_hint(program: str) -> str:
    if not os.path.isfile(program):
        return f"check the spelling: {'ls -l' if '/' in program else 'command -v'} {shlex.quote(program)}"
    path = shlex.quote(program if "/" in program else f"./{program}")
    return f"name its interpreter (python3 {path}); or make it executable, with a first line such as #!/bin/sh: chmod +x {path}"


_PR_SET_PTRACER: Final = 0x59616D61


def _call_that_allows_tracing() -> Callable[[], object]:
    """Return what a new process calls to let gpushare and its children trace it (prctl(2), PR_SET_PTRACER).

    Where Yama restricts ptrace to ancestors (ptrace_scope 1), the child that reaches the channels of a process, `channels.Caller`,
    could not trace it otherwise. The permission survives exec and ends with gpushare.
    """
    if read_text("/proc/sys/kernel/yama/ptrace_scope").strip() != "1":
        return lambda: None
    import ctypes

    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def starts_of(processes: Processes, pids: Iterable[int] | Mapping[int, int]) -> dict[int, int]:
    """Return the starts of processes by PID, without those that are gone; a mapping has them already."""
    if isinstance(pids, Mapping):
        return dict(pids)
    return dict(identity for pid in pids if (identity := processes.identity(pid)) is not None)


def signal_if_same(processes: Processes, pid: int, started: int, number: int) -> bool:
    """Send a signal to the process that started then; return whether it was still there.

    Raises:
        NoPermission: it belongs to another user.
    """
    try:
        processes.send_to(pid, started, number)
    except NotFound:
        return False
    return True


def signal_all(processes: Processes, starts: Mapping[int, int], number: int) -> None:
    """Send a signal to the processes with these starts, by PID, that are still there, but to none of other users."""
    for pid, started in starts.items():
        with contextlib.suppress(NoPermission):
            signal_if_same(processes, pid, started, number)


def info_of(processes: Processes, pid: int) -> ProcessInfo:
    """Return what is known of a process: of one that has ended nothing, so that all is None."""
    return processes.describe(pid) or ProcessInfo(pid=pid)


# Characters shown of a command line.
_MOST_OF_A_COMMAND: Final = 80


def processes_text(
    processes: Processes, pids: Iterable[int], most: int = 4, jobs: Mapping[int, str] | None = None
) -> str:
    """Return processes in words: ``7 (train.py, user alice: python3 train.py)``, or ``7 (job resnet, user alice)``."""
    pids = sorted(set(pids))
    text = ", ".join(_process_text(processes, pid, (jobs or {}).get(pid)) for pid in pids[:most])
    return f"{text} and {len(pids) - most} more" if len(pids) > most else text


def _process_text(processes: Processes, pid: int, job: str | None) -> str:
    """Return a process for people; the name of its job, if it is known, says more than its command line."""
    info = processes.describe(pid)
    if info is None:
        return str(pid)
    user = f"user {info.user}" if info.user else None
    if job is not None:
        return f"{pid} ({', '.join(filter(None, [f'job {job}', user]))})"
    facts = ", ".join(filter(None, [info.name, user]))
    command = cut(" ".join(info.command_line or ()), _MOST_OF_A_COMMAND)
    if command == info.name:
        command = ""
    return f"{pid} ({facts or 'unknown'}{f': {command}' if command else ''})"
