"""Running a program of the vendor with a time-out: the seam that a simulated host stands in for."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Final, NamedTuple, Protocol

from gpushare.errors import GpushareError, NoPermission, NotSupported, OperationFailed, TimedOut
from gpushare.values import dataclass


@dataclass(frozen=True)
class Completed:
    """What a program did. The exit code alone proves nothing: the vendor's exit 0 when they refuse."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Return everything it said, stdout first, without outer blanks."""
        return "\n".join(part.strip() for part in (self.stdout, self.stderr) if part.strip())


class Pending(Protocol):
    """A program that was started and not yet waited for."""

    def result(self) -> Completed:
        """Wait and return what it did; same errors as `Programs.run`."""


class Programs(Protocol):
    """Runs the vendor's programs on a host."""

    def find(self, name: str) -> str | None:
        """Return the path of the program, or None when the host does not have it."""

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Pending:
        """Start a program and return at once.

        ``env`` is laid over the caller's environment (None removes a variable); ``timeout`` is in
        seconds, from now.

        Raises:
            NotSupported: the program is not installed.
            NoPermission: it may not be executed.
        """

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Completed:
        """Run a program to its end.

        Raises:
            TimedOut: it did not end within ``timeout`` seconds, and was killed.
            NotSupported: the program is not installed.
            NoPermission: it may not be executed.
        """

    def listener(self, pipe_directory: str) -> Listener | None:
        """Return which process takes the conversations of an MPS daemon at a pipe directory; None: not to be told."""


# A killed program is gone at once, unless it hangs in the kernel.
_KILL_SECONDS = 1.0
# How often a program that runs is looked at for how much it has printed.
_LOOK_SECONDS = 0.1
# nvidia-smi -q of 16 GPUs with MIG prints 2 MiB; an MPS daemon with all the clients that it can have, 10 KiB.
_MOST_OF_A_DAEMON = 1 << 20
_MOST_OF_OTHERS = 16 << 20
_SLACK = 1 << 16
# linux/memfd.h
_MFD_NOEXEC_SEAL = 0x8
# Where packages put the programs when PATH does not say (cron, systemd, containers).
_EXTRA_PATH = "/usr/bin:/usr/sbin:/usr/local/bin:/opt/bin:/usr/lib/nvidia/bin:/usr/local/nvidia/bin"
MPS_CONTROL = "nvidia-cuda-mps-control"
_OVERRIDES = {"nvidia-smi": "GPUSHARE_NVIDIA_SMI", MPS_CONTROL: "GPUSHARE_MPS_CONTROL"}


def program_path(name: str) -> str | None:
    """Return the path of a vendor program: its ``GPUSHARE_...`` variable, PATH, the usual places."""
    override = os.environ.get(_OVERRIDES.get(name, ""), "")
    if override:
        return override if os.access(override, os.X_OK) else None
    return shutil.which(name) or shutil.which(name, path=_EXTRA_PATH)


def missing_program(name: str) -> NotSupported:
    package = {
        "nvidia-smi": "it comes with the driver: install the driver's utilities package",
        "nvidia-cuda-mps-control": "it comes with the driver: nvidia-compute-utils on Ubuntu, nvidia-cuda-mps on Debian",
    }.get(name, "install it")
    return NotSupported(f"{name} is not installed", f"{package}; then run: gpushare doctor", code="program_missing")


def merged_environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return the caller's environment with ``env`` laid over it; None removes a variable."""
    merged: dict[str, str | None] = {**os.environ, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


class _Started:
    def __init__(
        self,
        argv: tuple[str, ...],
        process: subprocess.Popen[bytes],
        files: tuple[IO[bytes], IO[bytes]],
        stdin: str,
        deadline: float,
        timeout: float,
    ) -> None:
        self._argv, self._process, self._files = argv, process, files
        self._stdin, self._deadline, self._timeout = stdin, deadline, timeout
        self._most = _most_bytes(argv[0])

    def result(self) -> Completed:
        try:
            self._wait()
        except GpushareError:
            # Not by Ctrl-C: it would be cut in the middle of a change.
            self._kill()
            raise
        finally:
            stdout, stderr = (self._read(file) for file in self._files)
        return Completed(self._argv, self._process.returncode, stdout, stderr)

    def _wait(self) -> None:
        """Wait for the end of the program, of its time, or of its room."""
        given: bytes | None = self._stdin.encode()
        while True:
            left = self._deadline - time.monotonic()
            try:
                self._process.communicate(given, timeout=max(0.0, min(left, _LOOK_SECONDS)))
            except subprocess.TimeoutExpired:
                given = None
            flooded = any(_written(file) > self._most for file in self._files)
            if flooded:
                raise _flooded(self._argv, self._most)
            if self._process.returncode is not None:
                return
            if left <= 0.0:
                raise timed_out(self._argv, self._timeout)

    def _kill(self) -> None:
        """Kill the program and what it started; give up on one that hangs in the kernel, as with a lost GPU."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_KILL_SECONDS)

    def _read(self, file: IO[bytes]) -> str:
        with file:
            return os.pread(file.fileno(), min(_written(file), self._most), 0).decode(errors="replace")


def _most_bytes(program: str) -> int:
    """Return how much a program may print: a daemon may be anybody's, and say anything."""
    return _MOST_OF_A_DAEMON if program == MPS_CONTROL else _MOST_OF_OTHERS


def _written(file: IO[bytes]) -> int:
    """Return how far a program has come in a file that it shares with us: there is one position for both."""
    return os.lseek(file.fileno(), 0, os.SEEK_CUR)


def _output_file(most: int) -> IO[bytes]:
    """Return a file for what a program prints, in memory, that cannot grow beyond its room.

    No pipe: a daemon that goes to the background keeps what it inherited, and a pipe would never end, or end it.
    """
    import fcntl

    for flags in (_MFD_NOEXEC_SEAL, 0):
        try:
            descriptor = os.memfd_create("gpushare", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        except OSError:
            # Linux before 6.3 does not know the first flag; with vm.memfd_noexec=2 it is needed.
            continue
        # Some pages more than it may print show that it wanted more. What is not written takes no memory.
        os.ftruncate(descriptor, most + _SLACK)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return os.fdopen(descriptor, "w+b", buffering=0)
    import tempfile

    # Without memfd it is looked at from time to time.
    return tempfile.TemporaryFile(buffering=0)


def _flooded(argv: Sequence[str], most: int) -> OperationFailed:
    return OperationFailed(
        f"'{' '.join(argv)}' printed more than {most >> 20} MiB, and was ended",
        "see whose MPS daemons there are: gpushare mps status; then: gpushare doctor",
        code="program_floods",
    )


def timed_out(argv: Sequence[str], timeout: float) -> TimedOut:
    command = " ".join(argv)
    return TimedOut(f"'{command}' did not answer within {timeout:g} s", "see: gpushare doctor", code="program_hangs")


class LocalPrograms:
    """Runs the programs of this machine, in the C locale, in a process group of their own."""

    def find(self, name: str) -> str | None:
        return program_path(name)

    def listener(self, pipe_directory: str) -> Listener | None:
        """Return who listens at ``control`` in it, as the kernel knows (SO_PEERCRED)."""
        return listener(pipe_directory)

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Pending:
        path = program_path(argv[0])
        if path is None:
            raise missing_program(argv[0])
        most = _most_bytes(argv[0])
        files = (_output_file(most), _output_file(most))
        try:
            process = subprocess.Popen(
                [path, *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=files[0],
                stderr=files[1],
                env=merged_environment({"LC_ALL": "C", **(env or {})}),
                # Ctrl-C at the terminal is ours to handle: a vendor program cut in the middle of a
                # change leaves the host half changed.
                start_new_session=True,
            )
        except OSError as error:
            for file in files:
                file.close()
            if isinstance(error, PermissionError):
                raise NoPermission(
                    f"cannot execute {path}: {error.strerror}", f"check its mode: ls -l {shlex.quote(path)}"
                ) from None
            raise OperationFailed(f"cannot execute {path}: {error.strerror}", "see: gpushare doctor") from None
        return _Started(tuple(argv), process, files, stdin, time.monotonic() + timeout, timeout)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Completed:
        return self.start(argv, stdin=stdin, env=env, timeout=timeout).result()


def group_members(group: int) -> list[int]:
    """Return the PIDs of a process group, without its leader and without the dead that nobody has waited for."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != group:
            # One that ends meanwhile is none.
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    found.append(int(name))
    return sorted(found)


_SECONDS: Final = 1.0
# struct ucred of Linux: pid, uid, gid.
_CREDENTIALS: Final = struct.Struct("3i")


class Listener(NamedTuple):
    """A process and its user, as they were when it began to listen."""

    pid: int
    uid: int


def listener(pipe_directory: str) -> Listener | None:
    """Return who listens at the control socket of an MPS daemon; None: nobody, or it cannot be told.

    A daemon that is stopped or hangs is told too: it need not answer.
    """
    # Not at the top: only a stop of another user's daemon asks.
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(_SECONDS)
        try:
            end.connect(os.path.join(pipe_directory, "control"))
            said = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except (OSError, ValueError):
            return None
    pid, uid, _ = _CREDENTIALS.unpack(said)
    # 0: it is in another PID namespace.
    return Listener(pid, uid) if pid > 0 else None
