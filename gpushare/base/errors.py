"""Errors and exit codes: what went wrong, why, and the next command.

Exit codes read like ``nvmlReturn_t`` and like ``nvidia-smi``'s own (man nvidia-smi, RETURN VALUE),
so that a script written for one understands the other.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable
from enum import IntEnum
from typing import Final, TypeVar

T = TypeVar("T")


class ExitCode(IntEnum):
    """Exit codes of every gpushare command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    NOT_AS_REQUESTED = 7
    DRIVER_NOT_LOADED = 9
    NVML_MISSING = 12
    IN_USE = 19
    INTERRUPTED = 130


# A sentence; anything longer repeats some input.
_MOST_CHARACTERS: Final = 2000


def cut(text: str, most: int) -> str:
    """Return a text shortened to at most ``most`` characters: its beginning and its end."""
    if len(text) <= most:
        return text
    kept = most - 3
    return f"{text[: kept - kept // 3]}...{text[-(kept // 3) :]}"


class GpushareError(Exception):
    """One error with its hint; every subclass has a stable code and an exit code.

    ``message`` says what failed and why, ``hint`` names the next command, ``gpu`` is the index
    or UUID concerned, or None. ``data`` is the answer beside the error, if there is one.
    """

    code: str = "failed"
    exit_code: ExitCode = ExitCode.FAILED

    def __init__(
        self, message: str, hint: str, *, gpu: int | str | None = None, code: str | None = None, data: object = None
    ) -> None:
        message = cut(message, _MOST_CHARACTERS)
        super().__init__(message)
        self.message: Final = message
        self.hint: Final = hint
        # What a traceback shows below the message, from Python 3.11 on.
        self.__notes__ = [f"hint: {hint}"]
        self.gpu: Final = None if gpu is None else str(gpu)
        self.data: Final = data
        if code is not None:
            self.code = code

    def restated(
        self, *, message: str | None = None, hint: str | None = None, kind: type[GpushareError] | None = None
    ) -> GpushareError:
        """Return this error with another message, hint or type, but the same GPU, code and exit code."""
        error = (kind or type(self))(message or self.message, hint or self.hint, gpu=self.gpu, code=self.code)
        error.exit_code = self.exit_code
        return error


class OperationFailed(GpushareError):
    """The host refused, or accepted a change and did not make it."""


class NotHeld(OperationFailed):
    """A change was accepted, but the host reads back something else."""

    code = "not_held"


class TimedOut(OperationFailed):
    """A program did not answer, or a condition did not come true, in time."""

    code = "timeout"


class BadUsage(GpushareError):
    """The command line is wrong: unknown level, size, percentage, option."""

    code = "usage"
    exit_code = ExitCode.USAGE


class BadCombination(BadUsage):
    """Options that exclude each other, or one that needs another."""

    code = "bad_combination"


class NotSupported(GpushareError):
    """This GPU, driver or program cannot do this."""

    code = "not_supported"
    exit_code = ExitCode.NOT_SUPPORTED


class NoPermission(GpushareError):
    """The user is not allowed to do this."""

    code = "no_permission"
    exit_code = ExitCode.NO_PERMISSION


def needs_root_error(task: str, gpu: int | None = None) -> NoPermission:
    """Return the error of a change that only root may make: ``switching MIG``."""
    return NoPermission(f"{task} needs root", "run it as root: sudo gpushare ...; or look first: --dry-run", gpu=gpu)


def signal_refused_error(signal: str, pid: int) -> NoPermission:
    message = f"not allowed to send {signal} to process {pid}: it belongs to another user"
    return NoPermission(message, "ask its owner, or run as root: sudo gpushare ...")


class NotFound(GpushareError):
    """The GPU, instance, daemon, job or file does not exist."""

    code = "not_found"
    exit_code = ExitCode.NOT_FOUND


def no_process_error(pid: int | str, hint: str = "see what runs: gpushare status", code: str | None = None) -> NotFound:
    return NotFound(f"there is no process {str(pid)[:20]}", hint, code=code)


class NoGpu(NotFound):
    """There is no GPU, or not the one that is meant."""

    code = "no_gpu"


def no_gpu_error(hint: str = "see: gpushare doctor") -> NoGpu:
    return NoGpu("this host has no GPU", hint)


def gpu_not_named_error(gpus: int, question: str, hint: str = "name one: -g 0") -> BadUsage:
    """Return the error of a command that does not choose among several GPUs."""
    return BadUsage(f"this host has {gpus} GPUs; {question}", hint, code="gpu_not_named")


class DriverNotLoaded(GpushareError):
    """libnvidia-ml is installed, but the kernel driver does not answer."""

    code = "driver_not_loaded"
    exit_code = ExitCode.DRIVER_NOT_LOADED


class NvmlMissing(GpushareError):
    """libnvidia-ml.so.1 is not installed."""

    code = "nvml_missing"
    exit_code = ExitCode.NVML_MISSING


class InUse(GpushareError):
    """The GPU, the instance or the daemon is in use."""

    code = "in_use"
    exit_code = ExitCode.IN_USE


class NeedsConsent(InUse):
    """What the plan destroys, stops or ends is named, granted, busy or not ours, and nobody agreed; ``data`` is the plan."""

    code = "needs_consent"


class GpuLost(NotFound):
    """The GPU fell off the bus or is otherwise inaccessible (NVML_ERROR_GPU_IS_LOST, 15)."""

    code = "gpu_lost"


class Interrupted(GpushareError):
    """The user pressed Ctrl-C."""

    code = "interrupted"
    exit_code = ExitCode.INTERRUPTED


def or_none(read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns, or None if it raises."""
    try:
        return read()
    except GpushareError:
        return None


# Errors of the child process that asks the driver: it did a part that could not be undone, or what it did is not known.
_MAY_BE_DONE: Final = frozenset({"half_done", "helper_ended", "helper_failed"})


def may_be_done(error: GpushareError) -> bool:
    """Return whether a call of the driver that failed so may have changed something all the same."""
    return isinstance(error, TimedOut) or error.code in _MAY_BE_DONE


def error_of(act: Callable[[], object]) -> GpushareError | None:
    """Return the error that ``act`` raises, or None."""
    try:
        act()
    except GpushareError as error:
        return error
    return None


_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# A resource that ran out is never the fault of gpushare itself.
_RESOURCE_HINTS: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, then run it again; see: df -h"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "too many files are open; raise the limit: ulimit -n 4096"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "out of memory or processes; see: free -h; ulimit -u"),
    errno.EIO: "the disk may be faulty; see: sudo dmesg | tail",
}


def system_error(error: OSError) -> GpushareError | None:
    """Return the error to show; None: it is a bug in gpushare, because no resource ran out and the error names no file."""
    resource_hint = _RESOURCE_HINTS.get(error.errno or 0)
    if resource_hint is None and (error.errno is None or error.filename is None):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    message = f"the system refused: {where}{error.strerror}"
    there = "" if error.filename is None else f" {shlex.quote(str(error.filename))}"
    if error.errno in _FORBIDDEN:
        hint = f"run as its owner, or as root: sudo gpushare ...; see its owner: ls -ld{there}"
        return NoPermission(message, hint, code="system_error")
    return OperationFailed(message, resource_hint or f"see: ls -ld{there}", code="system_error")
