"""Running a program of the vendor with a time-out: the seam that a simulated host stands in for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from gpushare.errors import NoPermission, NotSupported, OperationFailed, TimedOut


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


# A killed program is gone at once, unless it hangs in the kernel.
_KILL_SECONDS = 1.0
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
    """Return the error for a vendor program that is not installed."""
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

    def result(self) -> Completed:
        try:
            self._process.communicate(self._stdin.encode(), timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
            raise timed_out(self._argv, self._timeout) from None
        finally:
            stdout, stderr = (self._read(file) for file in self._files)
        return Completed(self._argv, self._process.returncode, stdout, stderr)

    def _kill(self) -> None:
        """Kill the program and what it started; give up on one that hangs in the kernel, as with a lost GPU."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_KILL_SECONDS)

    @staticmethod
    def _read(file: IO[bytes]) -> str:
        with file:
            file.seek(0)
            return file.read().decode(errors="replace")


def timed_out(argv: Sequence[str], timeout: float) -> TimedOut:
    """Return the error for a program that did not end in time."""
    command = " ".join(argv)
    return TimedOut(f"'{command}' did not answer within {timeout:g} s", "see: gpushare doctor", code="program_hangs")


class LocalPrograms:
    """Runs the programs of this machine, in the C locale, in a process group of their own."""

    def find(self, name: str) -> str | None:
        """Return the path of the program, or None."""
        return program_path(name)

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Pending:
        """Start a program; see `Programs.start`."""
        path = program_path(argv[0])
        if path is None:
            raise missing_program(argv[0])
        import tempfile

        # Files, not pipes: a daemon that goes to the background keeps what it inherited, and a pipe would never end.
        files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 - closed in `result`
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
                    f"cannot execute {path}: {error.strerror}", f"check its mode: ls -l {path}"
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
        """Run a program to its end; see `Programs.run`."""
        return self.start(argv, stdin=stdin, env=env, timeout=timeout).result()
