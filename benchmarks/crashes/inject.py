"""Ends this process, or lets one call fail, at its N-th side effect.

A side effect is a call that changes something outside the process: a file, a lock, a process, a signal, NVML, a
conversation with one of the vendor's programs, a word to the guard. What the simulated host does inside is hardware:
its own files are not counted, and each call that enters it is one effect.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import io
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, Final

from gpushare.base.errors import NoPermission, OperationFailed
from gpushare.host import capabilities
from gpushare.sim import channels
from gpushare.sim.checkpoint import NOT_PERMITTED, OPERATING_SYSTEM, SimulatedCheckpoint
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.machine import SimulatedCapabilities
from gpushare.sim.nvml_abi import Code
from gpushare.sim.processes import SimulatedProcesses
from gpushare.sim.programs import SimulatedPrograms

KILL: Final = "kill"
# After the last one there is no next one to be killed before.
AFTER: Final = "kill-after"
# From this effect on the disk is full: whatever needs room fails.
FULL: Final = "full"
ERRNOS: Final[Mapping[str, int]] = {"ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "EIO": errno.EIO}

# What each kind of effect can fail with, besides that the process is killed.
FAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "open": ("ENOSPC", "EACCES", "EIO", FULL),
    "mkdir": ("ENOSPC", "EACCES", "EIO", FULL),
    "rename": ("ENOSPC", "EACCES", "EIO"),
    "link": ("ENOSPC", "EACCES", "EIO"),
    "unlink": ("EACCES", "EIO"),
    "mode": ("EACCES", "EIO"),
    "write": ("ENOSPC", "EIO", FULL),
    "truncate": ("EIO",),
    "fsync": ("ENOSPC", "EIO"),
    "lock": ("EIO",),
    "tell": ("EIO",),
    "start": ("EACCES", "EIO"),
    "signal": ("EACCES",),
    "nvml": ("EACCES", "EIO"),
    "program": ("EACCES", "EIO"),
    "access": ("EACCES", "EIO"),
    "channels": ("EACCES", "EIO"),
    "checkpoint": ("EACCES", "EIO"),
}
# What the rows run: a shell, which knows whether its gpushare lives.
PROGRAM: Final = "start sh"
_NEEDS_ROOM: Final = frozenset({"open", "mkdir", "write"})
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES: Final = re.compile(
    r"nvml(Device(Set|Create|Clear|Reset)|GpuInstance(Create|Destroy)|ComputeInstance(Create|Destroy))"
)
_SIMULATION: Final = os.sep + os.path.join("gpushare", "sim") + os.sep
# The simulated host's own files, below its directory.
_HARDWARE: Final = re.compile(r"[0-9a-f]{8}(/(state\.json|lock|\.state-\w+))?")


@dataclass
class Injector:
    """Counts the side effects of this process below a directory, and strikes at one of them; ``at`` 0: never."""

    root: str
    at: int
    fault: str
    # An open file: each effect is a line in it. Written before the effect happens.
    log: int
    # Killed so many effects after the program of `gpushare run` was started, whatever `at` says; 0: not.
    kill_after_program: int = 0
    program: str = PROGRAM
    program_at: int = 0
    # What a program does before it is executed counts too: its process shares this.
    _counted: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))
    _pid: int = field(default_factory=os.getpid)
    _mutex: Any = field(default_factory=_thread.RLock)

    @property
    def count(self) -> int:
        """Return how many effects there were."""
        return int.from_bytes(self._counted[:], "little")

    def strike(self, kind: str, what: str) -> int | None:
        """Count one effect; return the errno that it fails with, if it is to fail."""
        with self._mutex:
            self._counted[:] = (self.count + 1).to_bytes(8, "little")
            if kind == "start" and not self.program_at and self.program in what:
                self.program_at = self.count
            hit = self.count == self.at
            if self.kill_after_program and self.program_at and self.count - self.program_at >= self.kill_after_program:
                _kill(self._pid, signal.SIGKILL)
            full = self.fault == FULL and 0 < self.at <= self.count and _needs_room(kind, what)
            _write(self.log, f"{self.count}\t{kind}\t{self._short(what)}\t{'hit' if hit else ''}\n".encode())
        if hit and self.fault == KILL:
            # In a program that is not executed yet, it is gpushare that dies, and the program that goes on.
            _kill(self._pid, signal.SIGKILL)
        if full:
            return errno.ENOSPC
        return ERRNOS.get(self.fault) if hit else None

    def done(self, number: int) -> None:
        """End the process where it shall die right after an effect."""
        if self.fault == AFTER and number == self.at:
            _kill(self._pid, signal.SIGKILL)

    def perform(self, kind: str, what: str, act: Callable[[], Any], fail: Callable[[int], Any] | None = None) -> Any:
        """Carry out an effect, unless it is to fail."""
        code = self.strike(kind, what)
        number = self.count
        if code is not None:
            if fail is not None:
                return fail(code)
            raise OSError(code, os.strerror(code), what.partition(" ")[2])
        result = act()
        self.done(number)
        return result

    def ours(self, path: str) -> bool:
        """Return whether a path is gpushare's, on this host."""
        if not path.startswith(self.root + os.sep):
            return False
        return _HARDWARE.fullmatch(path[len(self.root) + 1 :]) is None

    def _short(self, what: str) -> str:
        return what.replace(self.root + os.sep, "").replace("\n", "; ").replace("\t", " ")[:200]


def _needs_room(kind: str, what: str) -> bool:
    """Return whether an effect fails on a full disk: what is there already can be opened, or not be made again."""
    if kind == "mkdir" and os.path.isdir(what.partition(" ")[2]):
        return False
    return kind in _NEEDS_ROOM and not (kind == "open" and what.startswith("open "))


_write = os.write
_kill = os.kill
# Not empty while a new process tells the guard of itself: gpushare's own work, with the simulated host on its stack.
_announcing: list[bool] = []


def _inside_simulation() -> bool:
    """Return whether the simulated host is at work: what it does is hardware."""
    if _announcing:
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _SIMULATION in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _path(given: Any, dir_fd: int | None = None) -> str:
    if isinstance(given, int):
        try:
            return os.readlink(f"/proc/self/fd/{given}")
        except OSError:
            return ""
    path = os.fsdecode(given)
    if dir_fd is not None and not path.startswith("/"):
        return os.path.join(_path(dir_fd), path)
    return os.path.abspath(path)


def install(injector: Injector) -> None:
    """Stand in for everything that changes something; for the rest of this process's life."""
    _install_paths(injector)
    _install_open(injector)
    _install_locks(injector)
    _install_processes(injector)
    _install_hardware(injector)


def _install_paths(injector: Injector) -> None:
    # Function, kind, and how many paths it takes.
    for name, kind, paths in (
        ("mkdir", "mkdir", 1),
        ("rmdir", "unlink", 1),
        ("unlink", "unlink", 1),
        ("remove", "unlink", 1),
        ("rename", "rename", 2),
        ("replace", "rename", 2),
        ("link", "link", 2),
        ("symlink", "link", 2),
        ("mkfifo", "open", 1),
        ("mknod", "open", 1),
        ("chmod", "mode", 1),
        ("fchmod", "mode", 1),
        ("chown", "mode", 1),
        ("fchown", "mode", 1),
        ("lchown", "mode", 1),
        ("utime", "mode", 1),
        ("setxattr", "mode", 1),
        ("removexattr", "mode", 1),
        ("truncate", "truncate", 1),
        ("ftruncate", "truncate", 1),
        ("fsync", "fsync", 1),
        ("fdatasync", "fsync", 1),
        ("write", "write", 1),
        ("pwrite", "write", 1),
    ):
        setattr(os, name, _on_paths(injector, getattr(os, name), name, kind, paths))
    real = os.open

    @wraps(real)
    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def act() -> int:
            return real(path, flags, mode, dir_fd=dir_fd)

        found = _path(path, dir_fd)
        if not flags & _WRITES or not injector.ours(found) or _inside_simulation():
            return act()
        verb = "create" if flags & os.O_CREAT and not os.path.lexists(found) else "open"
        return int(injector.perform("open", f"{verb} {found}", act))

    os.open = opened


def _on_paths(injector: Injector, real: Callable[..., Any], name: str, kind: str, paths: int) -> Callable[..., Any]:
    @wraps(real)
    def stood_in(*arguments: Any, **named: Any) -> Any:
        def act() -> Any:
            return real(*arguments, **named)

        descriptor = named.get("dir_fd", named.get("src_dir_fd"))
        found = [_path(one, descriptor) for one in arguments[:paths]]
        pipe = kind == "write" and found[0].startswith("pipe:")
        if not (pipe or any(map(injector.ours, found))) or _inside_simulation():
            return act()
        return injector.perform("tell" if pipe else kind, f"{name} {' '.join(found)}", act)

    return stood_in


class _CountedFile(io.FileIO):
    """A file whose writes are counted as they reach the system."""

    injector: Injector
    path: str

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not size or _inside_simulation():
            return super().write(data)
        kind, what = ("tell", bytes(data).decode(errors="replace").strip()) if self.path.startswith("pipe:") else (
            "write", f"{self.path} ({size} bytes)")  # fmt: skip
        return int(self.injector.perform(kind, f"{kind} {what}", lambda: super(_CountedFile, self).write(data)))

    def truncate(self, size: int | None = None) -> int:
        act: Callable[[], int] = lambda: super(_CountedFile, self).truncate(size)  # noqa: E731
        if _inside_simulation():
            return act()
        return int(self.injector.perform("truncate", f"truncate {self.path}", act))


def _install_open(injector: Injector) -> None:
    real = io.open

    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,  # noqa: FBT001, FBT002 - as the real one takes it
        opener: Any = None,
    ) -> Any:
        found = _path(file)
        pipe = found.startswith("pipe:") and isinstance(file, int) and file > 2
        if not set(mode) & set("wax+") or not (pipe or injector.ours(found)) or _inside_simulation():
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        plain = mode.replace("b", "").replace("t", "")

        def act() -> _CountedFile:
            return _CountedFile(file, plain, closefd, opener)

        raw = act() if isinstance(file, int) else injector.perform("open", f"create {found}", act)
        raw.injector, raw.path = injector, found
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)

    sys.modules["builtins"].open = opened  # type: ignore[attr-defined]
    io.open = opened


def _install_locks(injector: Injector) -> None:
    for name in ("flock", "lockf", "fcntl"):
        setattr(fcntl, name, _on_lock(injector, getattr(fcntl, name), name))


def _on_lock(injector: Injector, real: Callable[..., Any], name: str) -> Callable[..., Any]:
    locking = {getattr(fcntl, one, None) for one in ("F_SETLK", "F_SETLKW", "F_OFD_SETLK", "F_OFD_SETLKW")} | {37, 38}

    @wraps(real)
    def stood_in(descriptor: Any, *arguments: Any) -> Any:
        def act() -> Any:
            return real(descriptor, *arguments)

        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if name == "fcntl" and (not arguments or arguments[0] not in locking):
            return act()
        if not injector.ours(found := _path(number)) or _inside_simulation():
            return act()
        return injector.perform("lock", f"{name} {found}", act)

    return stood_in


def _install_processes(injector: Injector) -> None:
    real: Any = subprocess.Popen

    class Popen(real):  # type: ignore[misc]
        def __init__(self, args: Any, *rest: Any, **named: Any) -> None:
            if _inside_simulation():
                super().__init__(args, *rest, **named)
                return
            words = [args] if isinstance(args, str) else [os.fsdecode(one) for one in args]
            shown = next((Path(one).name for one in words if one.endswith("guard.py")), Path(words[0]).name)
            injector.perform(
                "start", f"start {shown}", lambda: super(Popen, self).__init__(guard_words(words), *rest, **named)
            )

    subprocess.Popen = Popen  # type: ignore[misc]
    for name in ("kill", "killpg"):
        setattr(os, name, _on_signal(injector, getattr(os, name), name))


def _on_signal(injector: Injector, real: Callable[[int, int], None], name: str) -> Callable[[int, int], None]:
    def stood_in(pid: int, number: int) -> None:
        if number == 0 or _inside_simulation():
            real(pid, number)
            return
        injector.perform("signal", f"{name} {signal.Signals(number).name} {_who(pid)}", lambda: real(pid, number))

    return stood_in


def _who(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "a process"


def guard_words(words: list[str]) -> list[str]:
    """Return how the guard is started: with its own injector where the environment asks for one."""
    place = next((number for number, word in enumerate(words) if word.endswith("guard.py")), None)
    if place is None or "GPUSHARE_CRASH_GUARD" not in os.environ:
        return words
    return [*words[:place], str(Path(__file__).with_name("guarded.py")), *words[place:]]


def _install_hardware(injector: Injector) -> None:
    library: Any = SimulatedLibrary
    getting = library.__getattr__

    def entry_point(self: Any, name: str) -> Any:
        call = getting(self, name)
        if not _CHANGES.match(name):
            return call

        def counted(*arguments: Any) -> Any:
            codes = {errno.EACCES: Code.NO_PERMISSION}
            return injector.perform(
                "nvml", name, lambda: call(*arguments), lambda code: int(codes.get(code, Code.UNKNOWN))
            )

        return counted

    library.__getattr__ = entry_point
    for name in ("set_access", "set_modify"):
        _count_access(injector, name)
    _count_channels(injector)
    for name in ("Lock", "Unlock", "Checkpoint", "Restore"):
        _count_checkpoint(injector, f"cuCheckpointProcess{name}")
    programs: Any = SimulatedPrograms
    starting = programs.start

    def start(self: Any, argv: Any, **named: Any) -> Any:
        said = named.get("stdin") or ""
        what = f"{' '.join(map(str, argv))}{' <<< ' + said if said else ''}"
        return injector.perform("program", what, lambda: starting(self, argv, **named), lambda code: _fail(argv, code))

    programs.start = start
    _install_signals(injector)


def _install_signals(injector: Injector) -> None:
    processes: Any = SimulatedProcesses
    sending, sending_to, spawning = processes.send, processes.send_to, processes.spawn

    def send(self: Any, pid: int, number: int) -> Any:
        if number == 0:
            return sending(self, pid, number)
        return injector.perform("signal", sent(pid, number), lambda: sending(self, pid, number), lambda _: _deny(pid))

    def send_to(self: Any, pid: int, started: int, number: int) -> Any:
        act = partial(sending_to, self, pid, started, number)
        return injector.perform("signal", sent(pid, number), act, lambda _: _deny(pid))

    def sent(pid: int, number: int) -> str:
        return f"send {signal.Signals(number).name} to {_who(pid) if pid < 1 << 22 else 'a simulated process'}"

    def spawn(self: Any, argv: Any, env: Any, *rest: Any, announce: Any = None, **named: Any) -> Any:
        def announced(*told: Any) -> None:
            _announcing.append(True)
            try:
                announce(*told)
            finally:
                _announcing.pop()

        if announce is not None:
            named["announce"] = announced
        return injector.perform(
            "start",
            f"start {argv[0]}",
            lambda: spawning(self, argv, env, *rest, **named),
            lambda code: _fail(argv, code),
        )

    processes.send, processes.send_to, processes.spawn = send, send_to, spawn


def _count_channels(injector: Injector) -> None:
    real = channels.answer

    def stood_in(files: Any, request: Any) -> Any:
        act = partial(real, files, request)
        if request["do"] not in {"set", "off", "on"}:
            return act()
        codes = {errno.EACCES: "other_user"}
        return injector.perform(
            "channels",
            f"channels {request['do']}",
            act,
            lambda code: {"refused": codes.get(code, "failed"), "text": "FIFO_DISABLE_CHANNELS", "status": 0x62},
        )

    channels.answer = stood_in  # type: ignore[attr-defined]


def _count_checkpoint(injector: Injector, name: str) -> None:
    owner: Any = SimulatedCheckpoint
    real = getattr(owner, name)

    def stood_in(self: Any, pid: int, arguments: Any) -> Any:
        codes = {errno.EACCES: NOT_PERMITTED}
        return injector.perform(
            "checkpoint", name, lambda: real(self, pid, arguments), lambda code: codes.get(code, OPERATING_SYSTEM)
        )

    setattr(owner, name, stood_in)


def _count_access(injector: Injector, name: str) -> None:
    owner: Any = SimulatedCapabilities
    real = getattr(owner, name)

    def stood_in(self: Any, capability: Any, *rest: Any, **named: Any) -> Any:
        def fail(code: int) -> Any:
            raise capabilities._refused_error(capability.node, OSError(code, os.strerror(code)))

        return injector.perform(
            "access", f"{name} {capability.node}", lambda: real(self, capability, *rest, **named), fail
        )

    setattr(owner, name, stood_in)


def _fail(argv: Any, code: int) -> Any:
    """Raise what `Programs` and `Processes` raise for a program that does not start."""
    error = NoPermission if code == errno.EACCES else OperationFailed
    raise error(f"cannot execute {argv[0]}: {os.strerror(code)}", "see: gpushare doctor")


def _deny(pid: int) -> Any:
    raise NoPermission(f"may not send a signal to process {pid}: it belongs to another user", "run it as root")
