"""Run NVIDIA's programs with a timeout. A simulated host replaces these."""

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

from gpushare.base.errors import GpushareError, NoPermission, NotSupported, OperationFailed, TimedOut
from gpushare.base.values import dataclass
from gpushare.host.identity import GONE
from gpushare.host.process import every_stat


@dataclass(frozen=True)
class Completed:
    """The result of a program. Do not rely on the exit code: NVIDIA's programs exit 0 when they refuse."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Return its whole output, stdout first, stripped."""
        return "\n".join(part.strip() for part in (self.stdout, self.stderr) if part.strip())


class Pending(Protocol):
    """A program that was started."""

    def result(self) -> Completed:
        """Wait for it and return its result; errors as `Programs.run`."""


# A killed program is gone at once, unless it hangs in the kernel.
_KILL_SECONDS = 1.0
# Interval of the checks of how much a program has printed.
_LOOK_SECONDS = 0.1
# nvidia-smi -q prints 2 MiB for 16 GPUs with MIG; an MPS daemon with the maximum of clients 10 KiB.
_MOST_OF_A_DAEMON = 1 << 20
_MOST_OF_OTHERS = 16 << 20
_SLACK = 1 << 16
# linux/memfd.h
_MFD_NOEXEC_SEAL = 0x8
# Where packages install the programs, for a short PATH (cron, systemd, containers).
_EXTRA_PATH = "/usr/bin:/usr/sbin:/usr/local/bin:/opt/bin:/usr/lib/nvidia/bin:/usr/local/nvidia/bin"
MPS_CONTROL = "nvidia-cuda-mps-control"
_OVERRIDES = {"nvidia-smi": "GPUSHARE_NVIDIA_SMI", MPS_CONTROL: "GPUSHARE_MPS_CONTROL"}


def program_path(name: str) -> str | None:
    """Return the path of one of NVIDIA's programs: its ``GPUSHARE_...`` variable, PATH, the usual places."""
    override = os.environ.get(_OVERRIDES.get(name, ""), "")
    if override:
        return override if os.access(override, os.X_OK) else None
    return shutil.which(name) or shutil.which(name, path=_EXTRA_PATH)


def missing_program_error(name: str) -> NotSupported:
    package = {
        "nvidia-smi": "it comes with the driver: install the driver's utilities package",
        "nvidia-cuda-mps-control": "it comes with the driver: nvidia-compute-utils-MAJOR on Ubuntu (MAJOR: that of the driver version), nvidia-cuda-mps on Debian (non-free)",
    }.get(name, "install it")
    return NotSupported(f"{name} is not installed", f"{package}; then run: gpushare doctor", code="program_missing")


def merged_environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return the caller's environment overridden by ``env``; None removes a variable."""
    merged: dict[str, str | None] = {**os.environ, **(env or {})}
    return {name: value for name, value in merged.items() if value is not None}


@dataclass
class _Started:
    """A program that was started, with the files that it prints to; ``deadline`` is monotonic seconds."""

    argv: tuple[str, ...]
    process: subprocess.Popen[bytes]
    files: tuple[IO[bytes], IO[bytes]]
    stdin: str
    deadline: float
    timeout: float

    def result(self) -> Completed:
        """Wait for the program and return its result; it is killed at its deadline, and if it prints too much."""
        try:
            self._wait()
        except GpushareError:
            # Not on Ctrl-C: that would interrupt it in the middle of a change.
            self._kill()
            raise
        finally:
            stdout, stderr = (self._read_output(file) for file in self.files)
        return Completed(self.argv, self.process.returncode, stdout, stderr)

    def _wait(self) -> None:
        """Wait until the program ends, its time is up, or it has printed too much."""
        text: bytes | None = self.stdin.encode()
        while True:
            seconds = self.deadline - time.monotonic()
            try:
                self.process.communicate(text, timeout=max(0.0, min(seconds, _LOOK_SECONDS)))
            except subprocess.TimeoutExpired:
                # The first call has kept what is still to be written.
                text = None
            most = _most_bytes(self.argv[0])
            if any(_bytes_written(file) > most for file in self.files):
                raise _flooded_error(self.argv, most)
            if self.process.returncode is not None:
                return
            if seconds <= 0.0:
                raise timed_out_error(self.argv, self.timeout)

    def _kill(self) -> None:
        """Kill the program and its children; give up if it hangs in the kernel, as with a lost GPU."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=_KILL_SECONDS)

    def _read_output(self, file: IO[bytes]) -> str:
        """Return what the program has printed to a file, up to the limit; close it."""
        with file:
            size = min(_bytes_written(file), _most_bytes(self.argv[0]))
            return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _most_bytes(program: str) -> int:
    """Return how much a program may print: a daemon may belong to anybody and print anything."""
    return _MOST_OF_A_DAEMON if program == MPS_CONTROL else _MOST_OF_OTHERS


def _bytes_written(file: IO[bytes]) -> int:
    """Return how much a program has written: it shares the position in the file with us."""
    return os.lseek(file.fileno(), 0, os.SEEK_CUR)


def _output_file(most: int) -> IO[bytes]:
    """Return a file in memory of limited size for the output of a program.

    Not a pipe: a daemon that goes to the background keeps it open, so that it never ends, or breaks the daemon.
    """
    import fcntl

    for flags in (_MFD_NOEXEC_SEAL, 0):
        try:
            descriptor = os.memfd_create("gpushare", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        except OSError:
            # Linux before 6.3 does not have the first flag; vm.memfd_noexec=2 requires it.
            continue
        # Some pages more than the limit, to notice that it was exceeded. Unwritten pages take no memory.
        os.ftruncate(descriptor, most + _SLACK)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return os.fdopen(descriptor, "w+b", buffering=0)
    import tempfile

    # Without memfd, only the regular checks limit it.
    return tempfile.TemporaryFile(buffering=0)


def _flooded_error(argv: Sequence[str], most: int) -> OperationFailed:
    return OperationFailed(
        f"'{' '.join(argv)}' printed more than {most >> 20} MiB and was killed",
        "see which MPS daemons run: gpushare mps status; then: gpushare doctor",
        code="program_floods",
    )


def timed_out_error(argv: Sequence[str], timeout: float) -> TimedOut:
    command = " ".join(argv)
    return TimedOut(f"'{command}' did not answer within {timeout:g} s", "see: gpushare doctor", code="program_hangs")


_CONNECT_SECONDS: Final = 1.0
# struct ucred of Linux: pid, uid, gid.
_CREDENTIALS: Final = struct.Struct("3i")


class Listener(NamedTuple):
    """A process and its user at the time when it began to listen."""

    pid: int
    uid: int


class Programs:
    """Runs the vendor's programs of a host, in the C locale, in a process group of their own; a simulated host overrides it."""

    def find(self, name: str) -> str | None:
        """Return the path of a program, or None if it is not installed."""
        return program_path(name)

    def listener(self, pipe_directory: str) -> Listener | None:
        """Return the process that listens at the control socket of an MPS daemon, as the kernel knows it (SO_PEERCRED).

        None: no process, or unknown. The daemon need not answer: this also works if it is stopped or hangs.
        """
        # Imported here: only a stop of another user's daemon needs it.
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(_CONNECT_SECONDS)
            try:
                end.connect(os.path.join(pipe_directory, "control"))
                credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            except (OSError, ValueError):
                return None
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        # 0: it is in another PID namespace.
        return Listener(pid, uid) if pid > 0 else None

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Pending:
        """Start a program and return at once.

        ``env`` overrides the caller's environment (None removes a variable); ``timeout`` is in seconds from now.

        Raises:
            NotSupported: the program is not installed.
            NoPermission: it may not be executed.
        """
        path = program_path(argv[0])
        if path is None:
            raise missing_program_error(argv[0])
        most = _most_bytes(argv[0])
        files = (_output_file(most), _output_file(most))
        try:
            process = subprocess.Popen(
                [path, *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=files[0],
                stderr=files[1],
                env=merged_environment({"LC_ALL": "C", **(env or {})}),
                # Keep Ctrl-C away: a program interrupted in the middle of a change leaves the host half changed.
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
        """Run a program to its end. Raises as `start`, and TimedOut: it did not end in time, and was killed."""
        return self.start(argv, stdin=stdin, env=env, timeout=timeout).result()


def group_members(group: int) -> list[int]:
    """Return the PIDs of a process group without zombies and without its leader, which the caller started and knows."""
    return sorted(pid for pid, stat in every_stat() if stat.group == group and pid != group and stat.state not in GONE)
