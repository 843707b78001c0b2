"""`gpushare farm`: many copies of one program under MPS, on one or several GPUs, each with its number and its log.

Each copy is a job in the ledger of memory: what it needs is reserved while it runs. The farm has one place in the line of
waiting jobs, which its next copy takes over; then the farm goes to the end of the line again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final

from gpushare.base.errors import BadUsage, GpushareError, InUse, NoPermission, OperationFailed, error_of
from gpushare.base.model import GpuProcess
from gpushare.base.selection import Device
from gpushare.base.units import MIB, counted, format_bytes, format_copies
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.store import digest_of_words
from gpushare.host.written_file import open_to_append
from gpushare.memory.admission import UserLimits
from gpushare.memory.ledger import Line, Patience, Place, Request, jobs_before, reservations
from gpushare.memory.limit import JobMemory, MemoryBudget
from gpushare.memory.peaks import Profile, keep_profile, known_peak
from gpushare.memory.room import best_together_first, check_fits, client_limit, read_lines, usable_now, why_it_waits
from gpushare.mps.limits import CONTEXT_BYTES, Limits, client_memory
from gpushare.plan import Step
from gpushare.run.end import GRACE_SECONDS
from gpushare.run.plain import PlainShare
from gpushare.run.program import command_line, step_of_run
from gpushare.run.several import Group, Log, Program, directory_of_logs
from gpushare.run.share import MpsShare, Share, check_program
from gpushare.show.run import Copy, CopyLines, FarmAnswer
from gpushare.signals import Wakeups

MOST_COPIES: Final = 10_000
# The longest line of ``--each``.
MOST_LINE_BYTES: Final = 4096
# The other copies reserve the measured peak and a fifth more.
_MORE: Final = 1.2


def share_of_threads(copies: int) -> float | None:
    """Return the thread cap of each of N copies on a GPU: 200/N percent, as NVIDIA advises; None (no cap) for one or two."""
    return None if copies <= 2 else max(0.1, round(200.0 / copies, 1))


@dataclass(frozen=True, kw_only=True)
class FarmOptions:
    """What a farm runs, and how. ``lines`` are those of ``--each`` (None: the copies have numbers only).

    ``parallel`` is how many copies may run at the same time on all GPUs together (None: as many as fit). ``budget`` is
    the memory of a copy on each of its GPUs. ``cap`` returns the thread percentage of each of N copies on one GPU (None: no
    cap). ``restarts`` is how often a failed copy is started again, ``stall_seconds`` how long a copy
    may print nothing (None: no limit). ``user_limits`` are what users may reserve on a GPU, by uid. ``gpus`` is how many
    GPUs each copy has; a copy on several GPUs runs outside MPS.
    """

    copies: int
    lines: tuple[str, ...] | None = None
    parallel: int | None = None
    limits: Limits = field(default_factory=Limits)
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    cap: Callable[[int], float | None] = share_of_threads
    restarts: int = 0
    fail_fast: bool = False
    logs: Path | None = None
    resume: bool = False
    grace_seconds: float = GRACE_SECONDS
    stall_seconds: float | None = None
    user_limits: UserLimits = field(default_factory=UserLimits)
    name: str | None = None
    gpus: int = 1


def next_step(*, waiting: int, running: int, parallel: int | None, size_known: bool, giving_up: bool) -> str:
    """Return what a farm does next: start a copy if the line lets it, start one alone, wait for one to end, or end.

    ``alone``: the memory of a copy is not known yet, so nothing else of the farm runs until it is. ``giving_up``: a copy
    has failed, and no further one starts.
    """
    if giving_up:
        return "end"
    if not waiting:
        return "wait" if running else "end"
    if parallel is not None and running >= parallel:
        return "wait"
    if not size_known:
        return "wait" if running else "alone"
    return "start"


def copies_at_once(copies: int, parallel: int | None, fitting: Mapping[str, int | None]) -> dict[str, int]:
    """Return how many copies run at the same time on each device: dealt out in turn, at most ``fitting`` to each.

    ``fitting`` is None where any number fits. Each device gets at least 1, because a copy may wait for room there.
    """
    undealt = copies if parallel is None else min(copies, parallel)
    dealt = dict.fromkeys(fitting, 0)
    not_full = list(fitting)
    while undealt > 0 and not_full:
        not_full = [key for key, most in fitting.items() if most is None or dealt[key] < most]
        for key in not_full[:undealt]:
            dealt[key] += 1
        undealt -= len(not_full)
    return {key: max(1, number) for key, number in dealt.items()}


def size_of_others(peak_bytes: int | None) -> int:
    """Return what each further copy reserves after the measured one: its peak and a fifth, at least one CUDA context."""
    return max(CONTEXT_BYTES, int((peak_bytes or 0) * _MORE)) // MIB * MIB


def command_of(command: Sequence[str], copy: Copy) -> list[str]:
    """Return a command with the line of a copy, else its number, in place of every ``{}``."""
    text = str(copy.copy) if copy.line is None else copy.line
    return [word.replace("{}", text) for word in command]


def parse_lines(text: bytes, name: str) -> tuple[str, ...]:
    """Return the lines of ``--each`` without the empty ones; ``name`` is the file, for errors.

    Raises:
        BadUsage: none is left, one is too long or no text, or there are too many (code ``bad_lines``).
    """
    lines: list[str] = []
    for number, raw in enumerate(text.split(b"\n"), start=1):
        line = raw.removesuffix(b"\r")
        if not line.strip():
            continue
        if len(line) > MOST_LINE_BYTES:
            raise _bad_lines_error(
                f"line {number} of {name} has {len(line)} bytes", f"give at most {MOST_LINE_BYTES} bytes"
            )
        try:
            decoded = line.decode()
        except UnicodeDecodeError:
            decoded = "\0"
        # No argument of a program can contain a zero byte.
        if "\0" in decoded:
            raise _bad_lines_error(f"line {number} of {name} is not text", "give a file of UTF-8 text")
        lines.append(decoded)
        if len(lines) > MOST_COPIES:
            raise _bad_lines_error(
                f"{name} has more than {MOST_COPIES} lines", f"split it: split -l {MOST_COPIES} FILE"
            )
    if not lines:
        raise _bad_lines_error(
            f"{name} has no lines", "give one line for each copy: seq 8 | gpushare farm --each - -- CMD {}"
        )
    return tuple(lines)


def _bad_lines_error(message: str, hint: str) -> BadUsage:
    return BadUsage(message, hint, code="bad_lines")


# -- DIR/farm.jsonl ----------------------------------------------------------------------------------------------------
#
# One line for each copy that has ended: ``farm --resume`` skips the copies that are done. The file only grows. A line is one
# write, so that a kill leaves whole lines; after a crash of the machine the last line may be torn and is ignored. Of several
# lines for one copy the last counts. A farm locks the file, and its copies have the directory in their environment: a second
# farm starts no copy while another farm, or a copy left by a killed farm, still runs.

NAME: Final = "farm.jsonl"
# In the environment of each copy: the directory of logs.
MARK: Final = "GPUSHARE_FARM"
# A line holds at most one of ``--each`` (4 KiB, escaped six times as long) and a few numbers.
_MOST_RECORD_BYTES: Final = 32 << 10
_MOST_BYTES: Final = 256 << 20
# So long the copies of an earlier farm may take to end: if it was killed, its guard ends them, after their grace time.
_EARLIER_SECONDS: Final = 20.0
_EARLIER_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class CopyEnd:
    """A line of the file: a copy that has ended. ``command`` is the digest of the command as typed, with its ``{}``."""

    command: str
    copy: int
    line: str | None
    done: bool


def read_ends(file: int) -> Iterator[CopyEnd]:
    """Yield the ends in an open farm.jsonl, from its beginning; nothing if it cannot be read.

    Torn and foreign lines are skipped, and what is beyond a bound of bytes.
    """
    bytes_read = 0
    # With a position of its own.
    with contextlib.suppress(OSError), open(f"/proc/self/fd/{file}", "rb") as lines:
        while bytes_read < _MOST_BYTES and (line := lines.readline(_MOST_RECORD_BYTES)):
            bytes_read += len(line)
            end = parse_end(line)
            if end is not None:
                yield end


def parse_end(line: bytes) -> CopyEnd | None:
    """Return a line of the file, parsed; None: it is torn or foreign."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    command, copy, text, exit_code = (value.get(key) for key in ("command", "copy", "line", "exit_code"))
    # Exact types: True is an int, too.
    if type(command) is not str or type(copy) is not int or not (text is None or type(text) is str):
        return None
    is_done = value.get("state") == "done" and type(exit_code) is int and exit_code == 0
    return CopyEnd(command=command, copy=copy, line=text, done=is_done)


def copies_done(ends: Iterable[CopyEnd], command: str, copies: int, lines: Sequence[str] | None) -> set[int] | None:
    """Return the numbers of the copies that are done: with exit code 0, for the same command and the same line.

    ``command`` is its digest; None: all ends are of other commands. A line of the ``--each`` file may have moved since. A
    line that occurs twice is done twice only if two copies have completed it.
    """
    # Of several ends of a copy the last counts.
    is_done: dict[tuple[str | None, int], bool] = {}
    has_others = False
    for end in ends:
        if end.command == command:
            is_done[end.line, end.copy] = end.done
        else:
            has_others = True
    if has_others and not is_done:
        return None
    if lines is None:
        return {number for number in range(copies) if is_done.get((None, number), False)}
    # Lines that have not moved are matched first: copies of the same line differ by their number.
    numbers = {number for number, line in enumerate(lines) if is_done.get((line, number), False)}
    # How often each line was done without being matched yet.
    unmatched = Counter(line for (line, _), done in is_done.items() if done)
    unmatched.subtract(lines[number] for number in numbers)
    for number, line in enumerate(lines):
        if number not in numbers and unmatched[line] > 0:
            unmatched[line] -= 1
            numbers.add(number)
    return numbers


def line_of_end(copy: Copy, command: str, ended_at: float) -> bytes:
    """Return the line of ``farm.jsonl`` for a copy that has ended at a time (seconds since 1970)."""
    value: dict[str, Any] = {
        "command": command,
        "copy": copy.copy,
        "line": copy.line,
        "state": copy.state,
        "exit_code": copy.exit_code,
        "seconds": copy.seconds,
        "gpu_indexes": list(copy.gpu_indexes),
        "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ended_at)),
    }
    return json.dumps(value).encode() + b"\n"


class FarmResults:
    """The file of one farm, while it runs. Entered, it is locked."""

    def __init__(self, host: Host, path: Path, directory: int, command: Sequence[str]) -> None:
        """``directory`` is the open directory of ``path``."""
        self._host, self._path, self._directory = host, path, directory
        self._command = digest_of_words(command)
        status = os.fstat(directory)
        # What copies have in their environment to be found by: no path, as the directory may be renamed.
        self.mark = f"{status.st_dev:x}-{status.st_ino:x}"
        self._file = -1

    def __enter__(self) -> FarmResults:
        """Open the file, and lock it, so that no other farm writes there.

        Raises:
            NoPermission: it cannot be written (code ``not_written``).
            InUse: another farm has it (code ``logs_in_use``).
        """
        try:
            self._file = open_to_append(self._path, directory=self._directory)
        except OSError as error:
            raise _unwritable_error(self._path, error, NoPermission) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise _unwritable_error(self._path, error, OperationFailed) from None
            raise InUse(
                f"another farm writes to {self._path.parent}",
                "give this one a directory of its own: --logs OTHER",
                code="logs_in_use",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def wait_for_earlier_copies(self, say: Callable[[str], None], interrupted: Callable[[float], bool]) -> bool:
        """Wait until all copies of a killed farm with these logs have ended; return False if the user interrupts the wait.

        Else two copies would write to one log. ``interrupted`` waits for some seconds, and returns whether the user did so.

        Raises:
            InUse: a copy does not end (code ``logs_in_use``).
        """
        deadline = time.monotonic() + _EARLIER_SECONDS
        reported = False
        while pids := self._host.processes.pids_with_env(MARK, self.mark):
            if interrupted(_EARLIER_POLL_SECONDS):
                return False
            if time.monotonic() >= deadline:
                raise InUse(
                    f"process {pids[0]} of an earlier farm with these logs still runs",
                    f"end it: gpushare stop {pids[0]}; or give this farm a directory of its own: --logs OTHER",
                    code="logs_in_use",
                )
            if not reported:
                reported = True
                say(f"waiting for {counted(len(pids), 'process')} of an earlier farm with these logs, being ended")
        return True

    def ends(self) -> Iterator[CopyEnd]:
        """Yield the copies that have ended, from the beginning of the file."""
        return read_ends(self._file)

    def add(self, copy: Copy) -> None:
        """Append a copy that has ended. Raises OperationFailed: it cannot be written (``not_written``)."""
        try:
            line = line_of_end(copy, self._command, time.time())
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                # A torn line before it stays a line of its own, which readers skip.
                line = b"\n" + line
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unwritable_error(self._path, error, OperationFailed) from None


def _unwritable_error(
    path: Path, error: OSError, kind: type[NoPermission | OperationFailed]
) -> NoPermission | OperationFailed:
    return kind(f"cannot write {path}: {error.strerror}", "give --logs a directory of your own", code="not_written")


# -- the farm ----------------------------------------------------------------------------------------------------------

_STEP_SECONDS: Final = 0.02
# When it is checked after the start of a copy whether the daemon lists it (seconds).
_CLIENT_CHECKS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# How often to look for room while copies wait for it.
_ROOM_LOOK_SECONDS: Final = 0.2
# How long the first copy is measured alone, from when it is on the GPU.
_ALONE_SECONDS: Final = 20.0
# With less free memory, a copy of unknown size waits.
_LEAST_BYTES: Final = 2 * CONTEXT_BYTES
# How often it may repeat what it waits for.
_SAY_SECONDS: Final = 10.0


class _CopiesOnGpu:
    """The GPU of some copies, or the GPUs that each of them has: their share, opened with the first one."""

    def __init__(self, host: Host, device: Device, *more: Device) -> None:
        self.host, self.device, self.devices = host, device, (device, *more)
        self.share: Share
        if more:
            self.share = PlainShare(host, device, more=more)
        else:
            # Limits in the caller's environment do not count.
            self.share = MpsShare(host, device, Limits(), own_limits=False)
        self.group: Group | None = None
        # The processes on each GPU by its index, and when they were listed.
        self._listed: dict[int, tuple[float, tuple[GpuProcess, ...] | None]] = {}
        # When to ask the daemon again which copies are its clients (monotonic seconds).
        self.checks_due: list[float] = []

    def open(self, held: contextlib.ExitStack, grace_seconds: float) -> Group:
        """Return the group in which copies start; the first call opens the share. Raises GpushareError: there is no daemon."""
        if self.group is None:
            self.share.open()
            clients = self.share.watch(os.getpid()).clients
            self.group = held.enter_context(Group(self.host, self.share, clients, grace_seconds=grace_seconds))
            self.checks_due = [time.monotonic() + seconds for seconds in _CLIENT_CHECKS]
        return self.group

    def processes(self, device: Device) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a GPU (None: unknown), which are read once for all copies in a round of the farm."""
        now = time.monotonic()
        index = device.gpu.index
        listed_at, processes = self._listed.get(index, (-math.inf, None))
        if now - listed_at >= _STEP_SECONDS:
            processes = self.host.nvml.processes(index)
            self._listed[index] = now, processes
        return processes

    def environment(self, limits: Limits, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a copy with these limits."""
        if isinstance(self.share, MpsShare):
            return replace(self.share, limits=limits).environment(base)
        return self.share.environment(base)

    def note_clients(self, running: Iterable[_RunningCopy]) -> None:
        """Note which copies the daemon lists as clients, for the farm's report. It asks only when due: the daemon logs that."""
        if self.group is None or len(self.devices) > 1 or not self.checks_due or time.monotonic() < self.checks_due[0]:
            return
        self.checks_due.pop(0)
        clients = self.group.clients()
        if clients is None:
            return
        for each in running:
            if each.gpu is self and not each.copy.attached:
                each.copy.attached = not clients.isdisjoint(self.host.processes.descendants(each.program.pid))

    def was_client(self, pid: int) -> bool | None:
        """Return whether a program that has ended was a client of MPS, by the daemon's log; None: it ran outside MPS."""
        if not isinstance(self.share, MpsShare):
            return None
        return bool(self.share.watch(os.getpid()).accepted_clients({pid}))


@dataclass
class _RunningCopy:
    """A copy that runs: its GPU, its program, and its memory on each of its GPUs."""

    copy: Copy
    gpu: _CopiesOnGpu
    program: Program
    memories: tuple[JobMemory, ...]
    # It is above its limit and cannot be ended.
    stuck: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """Return the most that it has held on one of its GPUs; None: nothing was seen."""
        return max((memory.peak_bytes for memory in self.memories if memory.peak_bytes is not None), default=None)

    def leave(self) -> None:
        """Give back the memory that the copy has reserved."""
        for memory in self.memories:
            memory.leave()


class Farm:
    """Copies of a command on devices, many at a time: first `check`, then `plan` or `run`."""

    def __init__(
        self,
        host: Host,
        devices: Sequence[Device],
        command: Sequence[str],
        options: FarmOptions,
        reporter: CopyLines,
    ) -> None:
        self._host, self._command, self._options, self._reporter = host, command, options, reporter
        lines = options.lines
        self._copies = [
            Copy(copy=number, line=None if lines is None else lines[number]) for number in range(options.copies)
        ]
        # The devices that copies may have, and the shares of those that they had, by UUID.
        self._devices = {device.uuid: device for device in devices}
        self._gpus: dict[tuple[str, ...], _CopiesOnGpu] = {}
        self._clients = {device.uuid: client_limit(host, device) for device in devices} if options.gpus == 1 else {}
        # The memory limit of a copy in bytes (None: none was given), and what happens to a copy above it.
        self._copy_limit = options.budget.on(devices)
        self._action = options.budget.action
        self._user_limits = options.user_limits
        # The place of the next copy in the line. After each start the farm goes to the end of the line.
        self._place: Place | None = None
        self._patience = Patience()
        self._running: dict[int, _RunningCopy] = {}
        # What a copy reserves on each of its GPUs (None: unknown yet); the source: "given", "known" or "measured".
        self._size: int | None = None
        self._size_from: str | None = None
        # The copy that is measured while no other runs, and when it was first seen on the GPU.
        self._measured: _RunningCopy | None = None
        self._measured_since: float | None = None
        self._caps: dict[str, float | None] = {}
        # When to look for room again, and how many copies ran at the last look (-1: there was none).
        self._next_look = 0.0
        self._running_then = -1
        # What the user was last told of the line, and when.
        self._said_at = -_SAY_SECONDS
        self._said_line = ""
        self._giving_up = False
        # Why the end of a copy could not be written to the results file.
        self._unrecorded: OperationFailed | None = None
        self._started = time.monotonic()
        self._signals = Wakeups()
        self._logs: int | None = None
        self._results: FarmResults | None = None
        self._open_parts = contextlib.ExitStack()

    def check(self) -> None:
        """Raise if no copy could ever start; nothing is changed.

        Raises:
            BadUsage: one fits on no device (code ``never_fits``), or the logs are of an earlier farm that is not resumed, or
                of another command (``logs_used``).
            NoPermission: a copy is more than this user may reserve (``over_user_limit``), or the logs cannot be written
                (``not_written``).
            GpushareError: no device can be used.
        """
        self._check_logs()
        program = command_of(self._command, self._copies[0])[0]
        if self._options.gpus == 1:
            self._leave_out_unusable(program)
        else:
            from gpushare.run.start import check_enough, check_not_mig

            devices = list(self._devices.values())
            check_not_mig(devices, whole=True)
            check_enough(devices, self._options.gpus)
            check_program(program)
        self._find_size()
        if self._size is not None:
            lines = self._lines()
            is_complete = len(lines) == len(self._devices)
            check_fits(lines, self._request(self._size), when_empty=is_complete)

    def _check_logs(self) -> None:
        """Raise if the logs of copies that an earlier farm has ended would be overwritten; with --resume, skip those copies.

        No file is made or locked: that is left to `run`.
        """
        options = self._options
        if options.logs is None:
            return
        try:
            file = open_to_append(options.logs / NAME, create=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unwritable_error(options.logs / NAME, error, NoPermission) from None
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, file)
            if options.resume:
                self._skip_done(read_ends(file))
            elif os.fstat(file).st_size:
                raise BadUsage(
                    f"{options.logs} has the results of an earlier farm",
                    "go on with it: add --resume; or give this farm a directory of its own: --logs OTHER",
                    code="logs_used",
                )

    def _leave_out_unusable(self, program: str) -> None:
        """Leave out the devices on which a copy cannot run; raise if none is left."""

        def check(share: Share) -> None:
            """Raise unless the program can run in a share, and a server of MPS there takes new clients."""
            share.check(program)
            if isinstance(share, MpsShare):
                share.check_no_fault()

        errors = {uuid: error_of(functools.partial(check, self._copies_on(uuid).share)) for uuid in self._devices}
        refusals = {uuid: error for uuid, error in errors.items() if error is not None}
        if len(refusals) == len(errors):
            raise next(iter(refusals.values()))
        for uuid, refusal in refusals.items():
            self._leave_out(uuid, refusal)

    @property
    def _own_limit_bytes(self) -> int | None:
        """Return how many bytes this user may reserve on a GPU; None: no limit."""
        return self._user_limits.get(os.geteuid())

    def _request(self, size: int, devices: Iterable[Device] | None = None) -> Request:
        """Return what a copy asks the ledger for: ``size`` bytes on some of these devices; None: on those that it may have."""
        count = self._options.gpus
        uuids = tuple(self._devices) if devices is None else tuple(device.uuid for device in devices)
        return Request(memory_bytes=size, keys=uuids, client=count == 1, count=count, name=self._options.name)

    def _copies_on(self, *uuids: str) -> _CopiesOnGpu:
        """Return the copies on a GPU, or on GPUs that each copy uses together, with their share; made at the first call."""
        if uuids not in self._gpus:
            self._gpus[uuids] = _CopiesOnGpu(self._host, *(self._devices[uuid] for uuid in uuids))
        return self._gpus[uuids]

    def _leave_out(self, uuid: str, error: GpushareError) -> None:
        """Run no copy on a device, and say why."""
        device = self._devices.pop(uuid)
        self._gpus.pop((uuid,), None)
        self._reporter.say(f"{device.title} is left out: {error.message}")

    def _find_size(self) -> None:
        """Set what each copy reserves: as given, else the most that this command used on such a GPU; else it stays unknown."""
        if self._copy_limit is not None:
            self._size = self._copy_limit
            self._size_from = "given"
            return
        commands = [self._command, command_of(self._command, self._copies[0])]
        peak = known_peak(self._host, self._devices.values(), commands)
        if peak is not None:
            self._set_copy_size(size_of_others(peak.memory_bytes) if peak.short else peak.memory_bytes, "known")

    def _set_copy_size(self, size: int, source: str) -> None:
        """Set the bytes that each further copy reserves per GPU: ``size``, or what it can have at most if that is less.

        ``source`` says where ``size`` is from: ``known`` (earlier runs of the command) or ``measured`` (in this farm).
        """
        bounds = [size]
        capacity = self._largest_on_each(line.room.whole_bytes for line in self._lines())
        if capacity is not None:
            bounds.append(capacity)
        if self._own_limit_bytes is not None:
            bounds.append(self._own_limit_bytes)
        self._size = min(bounds) // MIB * MIB
        self._size_from = source

    def _largest_on_each(self, sizes: Iterable[int]) -> int | None:
        """Return what a copy can have at most on each of its N GPUs: the Nth largest of ``sizes``; None: there are fewer."""
        largest_first = sorted(sizes, reverse=True)
        return largest_first[self._options.gpus - 1] if len(largest_first) >= self._options.gpus else None

    def _usable(self) -> tuple[list[Device], list[str]]:
        """Return the farm's devices that can be used now, as they are now, and in words why the others cannot be used."""
        client = self._options.gpus == 1
        return usable_now(self._host, [*self._devices.values()], self._user_limits, client=client)

    def _lines(self) -> list[Line]:
        """Return what is reserved and free on each device now, without devices whose memory is unknown."""
        return read_lines(self._host, self._usable()[0], self._user_limits)

    # -- what an earlier farm has done ---------------------------------------------------------------

    def _skip_done(self, ends: Iterable[CopyEnd]) -> None:
        """Skip the copies that an earlier farm has done, and say so.

        Raises:
            BadUsage: it ran another command, and the logs of its copies would be overwritten (code ``logs_used``).
        """
        options = self._options
        done = copies_done(ends, digest_of_words(self._command), options.copies, options.lines)
        if done is None:
            raise BadUsage(
                f"{options.logs} has the results of another command",
                "give the command of that farm, unchanged; or another directory: --logs OTHER",
                code="logs_used",
            )
        newly_done = [self._copies[number] for number in done if self._copies[number].state == "waiting"]
        for copy in newly_done:
            copy.state = "done earlier"
        if newly_done:
            self._reporter.say(f"{format_copies(len(newly_done))} done earlier: not started again")

    def _waiting(self) -> list[Copy]:
        return [copy for copy in self._copies if copy.state == "waiting"]

    # -- what is said before -------------------------------------------------------------------------

    def say_first(self) -> None:
        """Say what each copy is given, and how many run at the same time."""
        options = self._options
        copies = self._waiting()
        if not copies:
            return
        text = f"{format_copies(len(copies))} on {', '.join(device.title for device in self._devices.values())}"
        if self._size is None:
            self._reporter.say(
                f"{text}; the memory of a copy is not known: the first one runs alone until it is measured"
            )
            return
        size = format_bytes(self._size)
        text += f", {size} each" if options.gpus == 1 else f", each with {size} on each GPU"
        if self._size_from == "known":
            text += ", the most that this command has used here"
        at_once = min(len(copies), self._most_at_once(), options.parallel or len(copies))
        if at_once < len(copies):
            text += f"; {at_once} at a time"
        self._reporter.say(text)

    # -- the plan ------------------------------------------------------------------------------------

    def plan(self) -> tuple[Step, ...]:
        """Return the steps of the farm: what is reserved, the daemons, each copy, and what is watched; none if all is done.

        It sets caps as `run` does; that changes nothing but this object.
        """
        waiting = self._waiting()
        if not waiting:
            return ()
        self._set_caps()
        return tuple(self._steps(waiting))

    def _steps(self, waiting: Sequence[Copy]) -> Iterator[Step]:
        """Yield the steps of the plan; the copies are dealt out to the GPUs as if all ran at the same time."""
        where = " or ".join(device.title for device in self._devices.values())
        if self._size is None:
            yield _step_of_farm(
                f"run copy {waiting[0].copy} alone on {where}, at most {_ALONE_SECONDS:g} s, and measure its memory"
            )
            yield _step_of_farm("reserve a fifth more than that for each further copy while it runs")
        else:
            if self._options.gpus > 1:
                where = "each of its GPUs"
            yield _step_of_farm(f"reserve {format_bytes(self._size)} on {where} for each copy while it runs")
        for gpu in self._gpus.values():
            yield from gpu.share.steps()
        planned: Counter[str] = Counter()
        for copy in waiting:
            uuids = self._order_of_gpus([*self._devices], planned)[: self._options.gpus]
            planned.update(uuids)
            gpu = self._copies_on(*uuids)
            environment = gpu.environment(self._limits_on(gpu.device.uuid), {})
            command = command_line({**environment, **self._variables(copy)}, command_of(self._command, copy))
            yield step_of_run(f"run copy {copy.copy} {gpu.share.where}", command)
        if self._copy_limit is not None:
            action = {"end": "end", "warn": "warn of", "pause": "stop (SIGSTOP)"}[self._action]
            limit = format_bytes(self._copy_limit)
            yield _step_of_farm(
                f"{action} each copy whose processes together hold more than {limit} (added up five times a second)"
            )

    # -- the loop ------------------------------------------------------------------------------------

    def run(self) -> FarmAnswer:
        """Run the copies until all have ended; if a copy fails, the others go on.

        Raises:
            BadUsage: the logs are of another command (code ``logs_used``).
            InUse: another farm has the logs (``logs_in_use``).
            GpushareError: no share can be opened; the ledger cannot be written.
        """
        try:
            with self._open_parts:
                with self._signals:
                    self._run_all()
                self._keep_peaks()
        finally:
            # After the copies have ended: else their memory would look free.
            self._leave_line()
            for running in self._running.values():
                running.leave()
        return FarmAnswer(
            seconds=round(time.monotonic() - self._started, 2),
            memory_bytes=self._size,
            memory_source=self._size_from,
            memory_limit_bytes=self._client_limit,
            job_memory_bytes=self._copy_limit,
            copies=tuple(self._copies),
            ended_by=self._signals.first,
            unrecorded=self._unrecorded,
        )

    def _run_all(self) -> None:
        """Start copies as they fit, and see them end, until all have or the user interrupts the farm."""
        self._prepare_logs()
        self.say_first()
        while self._signals.first is None:
            self._do_round()
            if self._is_over() or self._signals.ending_came(_STEP_SECONDS):
                break
        self._leave_line()
        if self._signals.first is not None or self._giving_up:
            self._interrupt()

    def _do_round(self) -> None:
        """Do one round of the farm: start copies, end those above their limit, collect the ended ones, report progress."""
        self._start_copies()
        self._watch_memory()
        self._collect_ended()
        self._measure_first()
        for gpu in self._gpus.values():
            gpu.note_clients(self._running.values())
        self._reporter.progress(self._copies, time.monotonic() - self._started)

    def _leave_line(self) -> None:
        """Give up the place in the line of waiting jobs, so that no other job waits for this farm."""
        if self._place is not None:
            self._place.leave()
        self._place = None

    def _prepare_logs(self) -> None:
        """Open the directory of logs, and wait for what an earlier farm has left running.

        With ``--resume``, copies that an earlier farm has done are skipped. A signal during the wait ends this early.
        """
        options = self._options
        if options.logs is None:
            return
        self._logs = self._open_parts.enter_context(directory_of_logs(options.logs))
        results = FarmResults(self._host, options.logs / NAME, self._logs, self._command)
        self._results = self._open_parts.enter_context(results)
        if not results.wait_for_earlier_copies(self._reporter.say, self._signals.end_requested):
            # Nothing is started; what the earlier farm has left stays.
            return
        if options.resume:
            self._skip_done(results.ends())

    def _is_over(self) -> bool:
        """Return whether to stop polling: nothing is left to do, or a signal came meanwhile; the next one hurries `_interrupt`."""
        return self._signals.first is not None or self._next_step() == "end"

    def _next_step(self) -> str:
        """Return what the farm does next, as `next_step`."""
        return next_step(
            waiting=len(self._waiting()),
            running=len(self._running),
            parallel=self._options.parallel,
            size_known=self._size is not None,
            giving_up=self._giving_up,
        )

    # -- starting ------------------------------------------------------------------------------------

    def _start_copies(self) -> None:
        """Start copies as long as one may start and finds room, which is looked for now and then, and when a copy has ended."""
        now = time.monotonic()
        if now < self._next_look and len(self._running) == self._running_then:
            return
        self._next_look = now + _ROOM_LOOK_SECONDS
        if self._next_step() == "start" and self._size is not None:
            self._set_caps()
        has_room = True
        while has_room and (step := self._next_step()) in {"start", "alone"} and not self._signals.ending_came():
            has_room = self._start_next(alone=step == "alone")
        if has_room:
            # The farm waits for its own copies: it must not hold up other jobs in the line.
            self._leave_line()
        self._running_then = len(self._running)

    def _start_next(self, *, alone: bool) -> bool:
        """Start the next copy, or note that it cannot be started; return False if it waits for room."""
        gpu_and_place = self._gpu_for_next(alone=alone)
        if gpu_and_place is None:
            self._say_waiting()
            return False
        gpu, place = gpu_and_place
        copy = self._waiting()[0]
        if not self._open_share(gpu, place):
            return True
        # What the next one waits for is news again.
        self._said_at = -_SAY_SECONDS
        self._said_line = ""
        try:
            running = self._start(copy, gpu, place)
        except GpushareError as error:
            copy.state = "failed"
            copy.failure = error.message
            copy.hint = error.hint
            copy.log = None
            self._after_end(copy, again=False)
            return True
        if alone:
            self._measured = running
            self._measured_since = None
        return True

    def _open_share(self, gpu: _CopiesOnGpu, place: Place | None) -> bool:
        """Open the share of a device; return whether that worked. If not, the device is left out, and the place given back.

        Raises:
            GpushareError: it cannot be opened, and a copy needs all devices that are left.
        """
        try:
            gpu.open(self._open_parts, self._options.grace_seconds)
        except GpushareError as error:
            if place is not None:
                place.leave()
            if len(self._devices) == self._options.gpus:
                raise
            self._leave_out(gpu.device.uuid, error)
            return False
        return True

    def _gpu_for_next(self, *, alone: bool) -> tuple[_CopiesOnGpu, Place | None] | None:
        """Return the GPU of the next copy, and its place in the ledger, if there is a ledger; None: it waits. Raises as `Place`."""
        if all(device.memory_total_bytes is None for device in self._devices.values()):
            gpu = self._gpu_without_ledger()
            return None if gpu is None else (gpu, None)
        size = self._size_to_measure() if alone else self._size or 0
        place = self._take_place(self._request(size))
        return None if place is None else (self._copies_on(*place.held), place)

    def _gpu_without_ledger(self) -> _CopiesOnGpu | None:
        """Return the GPU of the next copy where no GPU reports its memory, so that only MPS bounds them; None: all are full."""
        count = self._options.gpus
        gpu = self._copies_on(*self._order_of_gpus([*self._devices])[:count])
        # Outside MPS one at a time: without a ledger nothing tells whether a second one fits.
        most_copies = self._clients.get(gpu.device.uuid) if count == 1 else 1
        copies_by_gpu = self._copies_by_gpu()
        running = max(copies_by_gpu[device.uuid] for device in gpu.devices)
        return None if most_copies is not None and running >= most_copies else gpu

    def _size_to_measure(self) -> int:
        """Return what the copy reserves that is measured alone, whose need is unknown: half of what is free, so that others find room too."""
        available = self._largest_on_each(line.free_bytes for line in self._lines()) or 0
        if self._own_limit_bytes is not None:
            available = min(available, self._own_limit_bytes)
        return max(_LEAST_BYTES, available // 2 // MIB * MIB)

    def _take_place(self, request: Request) -> Place | None:
        """Return the place of the next copy, after which the farm goes to the end of the line; None: it waits in the line."""
        if self._place is None or self._place.request != request:
            self._leave_line()
            self._place = Place(self._host, request, self._patience)
        place = self._place
        usable, _ = self._usable()
        order = self._order_of_gpus if len(self._devices) > request.count else None
        if not place.try_to_take(usable, self._clients, self._user_limits, order):
            return None
        self._place = None
        return place

    def _copies_by_gpu(self) -> Counter[str]:
        return Counter(device.uuid for running in self._running.values() for device in running.gpu.devices)

    def _order_of_gpus(self, uuids: Sequence[str], copies: Counter[str] | None = None) -> list[str]:
        """Return devices with those first that the next copy gets: of those with the fewest copies the ones connected best.

        ``copies`` is how many run on each; None: as it is now.
        """
        if copies is None:
            copies = self._copies_by_gpu()
        indexes = [self._devices[uuid].gpu.index for uuid in uuids]
        order = best_together_first(self._host, [(copies[uuid],) for uuid in uuids], indexes, self._options.gpus)
        return [uuids[number] for number in order]

    def _say_waiting(self) -> None:
        """Say what the next copy waits for, each time that changes; nothing while it waits for copies of this farm only."""
        now = time.monotonic()
        place = self._place
        if place is None or now - self._said_at < _SAY_SECONDS:
            return
        if self._running and not jobs_before(reservations(self._host) or [], place):
            return
        usable, reasons = self._usable()
        lines = read_lines(self._host, usable, self._user_limits)
        text = why_it_waits(self._host, lines, place, reasons)
        self._said_at = now
        # The number of free bytes changes all the time, and is no news.
        text_without_bytes = re.sub(r"[\d.]+ \w+ free", "", text)
        if text_without_bytes != self._said_line:
            self._said_line = text_without_bytes
            self._reporter.say(text)

    def _set_caps(self) -> None:
        """Set the thread cap of a copy on each device, by how many run there at the same time."""
        if self._options.gpus > 1:
            # They run outside MPS, where there is no cap.
            self._caps = dict.fromkeys(self._devices)
            return
        given_percent = self._options.limits.threads_percent
        for uuid, number in self._at_once_by_gpu().items():
            self._caps[uuid] = self._options.cap(number) if given_percent is None else given_percent

    def _most_at_once(self) -> int:
        """Return how many copies run at the same time, as far as it is known now."""
        return max(1, sum(self._at_once_by_gpu().values()) // self._options.gpus)

    def _at_once_by_gpu(self) -> dict[str, int]:
        """Return how many copies run at the same time on each device, as far as it is known now."""
        gpus_each = self._options.gpus
        lines = {line.device.uuid: line for line in self._lines()}
        running = self._copies_by_gpu()
        fitting: dict[str, int | None] = {}
        for uuid in self._devices:
            line = lines.get(uuid)
            if line is None or not self._size:
                # Its memory is unknown, and no bound: see `_gpu_without_ledger`.
                fitting[uuid] = self._clients.get(uuid) if gpus_each == 1 else 1
            else:
                fitting[uuid] = running[uuid] + self._further_copies(line, self._size)
        # A copy counts once on each of its GPUs.
        copies = sum(copy.state != "done earlier" for copy in self._copies)
        parallel = None if self._options.parallel is None else self._options.parallel * gpus_each
        return copies_at_once(copies * gpus_each, parallel, fitting)

    def _further_copies(self, line: Line, size: int) -> int:
        """Return how many more copies of a size fit on a device: by free memory, by this user's limit, as clients."""
        bounds = [line.free_bytes // size]
        if self._own_limit_bytes is not None:
            bounds.append(max(0, self._own_limit_bytes - line.granted.get(os.geteuid(), 0)) // size)
        if line.free_clients is not None and self._options.gpus == 1:
            bounds.append(line.free_clients)
        return min(bounds)

    def _limits_on(self, uuid: str) -> Limits:
        """Return the limits of MPS for a copy on a device."""
        given = self._options.limits
        threads_percent = self._caps.get(uuid, given.threads_percent)
        return Limits(threads_percent=threads_percent, memory_limit_bytes=self._client_limit, priority=given.priority)

    @property
    def _client_limit(self) -> int | None:
        """Return the memory limit of each process of a copy, which MPS enforces; None: there is none.

        MPS refuses memory above a limit, so there is none where gpushare is only to warn of that, or to stop the copy.
        """
        limit = self._copy_limit
        if limit is None or self._action != "end" or self._options.gpus > 1:
            return None
        return client_memory(limit)

    def _variables(self, copy: Copy) -> dict[str, str]:
        """Return what a copy has in its environment: its number, how many there are, its line, the mark of the farm."""
        variables = {"GPUSHARE_COPY": str(copy.copy), "GPUSHARE_COPIES": str(self._options.copies)}
        if copy.line is not None:
            variables["GPUSHARE_LINE"] = copy.line
        if self._results is not None:
            variables[MARK] = self._results.mark
        return variables

    def _start(self, copy: Copy, gpu: _CopiesOnGpu, place: Place | None) -> _RunningCopy:
        """Start a copy on a device, where ``place`` holds its memory; if that fails, the place is left.

        Raises:
            GpushareError: its program cannot be started, or its log not be written.
        """
        log = None
        if self._options.logs is not None and self._logs is not None:
            restarts = f".{copy.tries}" if copy.tries else ""
            log = Log(self._options.logs / f"copy-{copy.copy}{restarts}.log", self._logs)
        copy.begin_try(
            log=None if log is None else str(log.path),
            gpu_indexes=tuple(device.gpu.index for device in gpu.devices),
        )
        try:
            memories = self._memories_of(copy, gpu, place)
            limits = self._limits_on(gpu.device.uuid)
            copy.threads_percent = limits.threads_percent
            program = gpu.open(self._open_parts, self._options.grace_seconds).launch(
                f"copy {copy.copy}",
                command_of(self._command, copy),
                {**gpu.environment(limits, os.environ), **self._variables(copy), **memories[0].variables},
                listen=lambda line, _at: self._reporter.line(copy.copy, line),
                log=log,
            )
        except BaseException:
            if place is not None:
                place.leave()
            raise
        now = time.monotonic()
        copy.pid = program.pid
        copy.state = "running"
        copy.started_after = now - self._started
        running = self._running[copy.copy] = _RunningCopy(copy, gpu, program, memories)
        # Check soon whether it is a client, and then ever less often.
        if not gpu.checks_due or gpu.checks_due[0] > now + _CLIENT_CHECKS[0]:
            gpu.checks_due = [now + seconds for seconds in _CLIENT_CHECKS]
        for memory in memories:
            memory.begin(program.pid)
        return running

    def _memories_of(self, copy: Copy, gpu: _CopiesOnGpu, place: Place | None) -> tuple[JobMemory, ...]:
        """Return what watches the memory of a copy on each of its GPUs; the first holds the place in the ledger for all.

        All find the processes of the copy by the mark of the first one.
        """
        memories: list[JobMemory] = []
        for device in gpu.devices:
            memory = JobMemory(
                self._host,
                device,
                limit_bytes=self._copy_limit,
                action=self._action,
                place=None if memories else place,
                say=functools.partial(self._reporter.news, copy),
                listed=functools.partial(gpu.processes, device),
                mark=memories[0].mark if memories else None,
            )
            memories.append(memory)
        return tuple(memories)

    # -- the size of a copy --------------------------------------------------------------------------

    def _measure_first(self) -> None:
        """Learn what a copy needs from the one that runs alone, once it has been on the GPU for a while."""
        if self._measured is None or not self._measured.peak_bytes:
            return
        now = time.monotonic()
        self._measured_since = self._measured_since or now
        if now - self._measured_since >= _ALONE_SECONDS:
            self._learn_size(self._measured, self._measured.peak_bytes)

    def _learn_size(self, measured: _RunningCopy, peak_bytes: int | None) -> None:
        """Let the others reserve what a copy has used, and a fifth more; the copy too, if it still runs."""
        self._measured = None
        copy = measured.copy
        # In another PID namespace its processes cannot be told from others on the GPU.
        is_unseen = self._host.processes.namespace_is_host() is False
        if peak_bytes is None and (copy.failure is not None or is_unseen):
            # It tells nothing of the others: the next one is measured.
            return
        self._set_copy_size(size_of_others(peak_bytes), "measured")
        if any(other.state == "waiting" for other in self._copies):
            used = "not used the GPU" if peak_bytes is None else f"used {format_bytes(peak_bytes)}"
            size = format_bytes(self._size)
            self._reporter.say(
                f"copy {copy.copy} has {used}: each of the others reserves {size}, {self._most_at_once()} at a time"
            )
        # Without a place the GPUs do not report their memory, so there is nothing to be reserved.
        if copy.copy in self._running and measured.memories[0].place is not None:
            self._reserve_less(measured)

    def _reserve_less(self, running: _RunningCopy) -> None:
        """Reserve the size of a copy for the measured one, which still runs, in place of half of the free memory."""
        request = self._request(self._size or 0, running.gpu.devices)
        # It keeps what it has, if the ledger cannot be written.
        with contextlib.suppress(GpushareError), contextlib.ExitStack() as undo:
            place = Place(self._host, request)
            undo.callback(place.leave)
            place.take(*request.keys)
            undo.pop_all()
            running.memories[0].reserve(place)

    def _note_peak(self, copy: Copy, peak_bytes: int | None) -> None:
        """Note the peak of a copy; if it exceeds what copies reserve, the next copies reserve more."""
        if peak_bytes is None:
            return
        copy.memory_peak_bytes = max(peak_bytes, copy.memory_peak_bytes or 0)
        if self._size_from in {"known", "measured"} and peak_bytes > (self._size or 0):
            self._set_copy_size(size_of_others(peak_bytes), "measured")
            size = format_bytes(self._size)
            self._reporter.news(copy, f"it has used {format_bytes(peak_bytes)}: the next ones reserve {size}")

    def _keep_peaks(self) -> None:
        """Keep the most memory that a finished copy has used on each GPU, for the next farm of this command.

        The figure only spares the next farm a measurement: a failure to write it changes nothing.
        """
        for device in self._devices.values():
            peaks = [
                copy.memory_peak_bytes
                for copy in self._copies
                if copy.state == "done" and copy.gpu_indexes[0] == device.gpu.index and copy.memory_peak_bytes
            ]
            if peaks:
                keep_profile(self._host, device, self._command, Profile(memory_bytes=max(peaks)))

    # -- memory --------------------------------------------------------------------------------------

    def _watch_memory(self) -> None:
        """End all copies above their memory limit together, the safe way."""
        over_limit = self._poll_memory()
        if not over_limit:
            return
        try:
            self._end(over_limit, hurry=self._poll_and_hurry)
        except GpushareError as error:
            for running in over_limit:
                if running.program.runs:
                    running.stuck = True
                    self._reporter.news(running.copy, f"it cannot be ended: {error.message}; {error.hint}")

    def _poll_and_hurry(self) -> bool:
        """Read the memory of the other copies while some end; return whether to hurry: on a signal, or if memory grows."""
        self._poll_memory()
        is_growing = any(memory.grows() for running in self._running.values() for memory in running.memories)
        return self._signals.ending_came() or is_growing

    def _poll_memory(self) -> list[_RunningCopy]:
        """Read the memory of all running copies at once, note their peaks, and return the copies above their limit."""
        copies = [running for running in self._running.values() if running.program.runs]
        watched = [(each.copy, memory) for each in copies for memory in each.memories if memory.over is None]
        to_read = [(copy, memory) for copy, memory in watched if memory.seconds_to_poll <= 0]
        if to_read and self._copy_limit is not None:
            # Copies with limits are all read at the same moment, so that all that are above theirs end together.
            to_read = watched
        for copy, memory in to_read:
            memory.poll()
            self._note_peak(copy, memory.peak_bytes)
        return [each for each in copies if not each.stuck and any(memory.over is not None for memory in each.memories)]

    # -- ending --------------------------------------------------------------------------------------

    def _end(self, ending: Sequence[_RunningCopy], *, hurry: Callable[[], bool]) -> None:
        """End copies together, the safe way; on several devices at the same time. Raises GpushareError: one cannot be ended."""
        calls: list[Callable[..., Any]] = []
        for gpu in self._gpus.values():
            on_gpu = [running for running in ending if running.gpu is gpu]
            if on_gpu and gpu.group is not None:
                # Its memory lets go of each copy, and names the processes that have left the tree of its program.
                strays = [pid for running in on_gpu for memory in running.memories for pid in memory.release()]
                programs = [running.program for running in on_gpu]
                calls.append(functools.partial(gpu.group.end, programs, strays=strays))
        if len(calls) == 1:
            calls[0](hurry=hurry)
        elif calls:
            _call_at_once(calls, hurry)

    def _collect_ended(self) -> None:
        """Note the copies that have ended, and end those that print nothing for too long."""
        for gpu in self._gpus.values():
            if gpu.group is None:
                continue
            gpu.group.read_outputs()
            ended: list[tuple[_RunningCopy, str | None]] = []
            for running in self._running.values():
                if running.gpu is not gpu:
                    continue
                if not running.program.runs:
                    ended.append((running, running.program.failure))
                elif self._stalled(running.program):
                    gpu.group.kill(running.program)
                    ended.append((running, f"printed nothing for {self._options.stall_seconds:g} s: ended by gpushare"))
            if ended:
                errors = self._end_left_behind(gpu.group, [running for running, _ in ended])
                for running, failure in ended:
                    self._note_end(running, failure, errors.get(running.copy.copy))

    def _end_left_behind(self, group: Group, ended: Sequence[_RunningCopy]) -> dict[int, GpushareError]:
        """End what programs that have ended left running; return why that failed for a copy, by its number."""
        pids_by_program = group.left_behind([running.program for running in ended])
        failure = None
        if pids_by_program:
            failure = error_of(lambda: group.end_left_behind(pids_by_program, hurry=self._signals.ending_came))
        errors = {}
        for running in ended:
            copy = running.copy
            pids = pids_by_program.get(running.program.pid, ())
            copy.left_behind += pids
            if failure is not None and any(self._host.processes.alive(pid) for pid in pids):
                errors[copy.copy] = failure
            elif pids:
                self._reporter.left_behind(copy, pids)
        return errors

    def _stalled(self, program: Program) -> bool:
        """Return whether a program has printed nothing for so long that it is ended (``stall_seconds``)."""
        seconds = self._options.stall_seconds
        return seconds is not None and time.monotonic() - program.heard > seconds

    def _note_end(
        self,
        running: _RunningCopy,
        failure: str | None,
        stuck: GpushareError | None = None,
        *,
        interrupted: bool = False,
    ) -> None:
        """Note how a copy has ended, and whether it is started again.

        ``stuck`` is why something that it has left behind could not be ended; ``interrupted``: the farm has ended it.
        """
        copy = running.copy
        self._note_result(running, failure, stuck)
        del self._running[copy.copy]
        # It is not started again next to a process that could not be ended.
        may_restart = stuck is None and self._signals.first is None and not self._giving_up
        again = copy.failure is not None and may_restart and copy.tries <= self._options.restarts
        if interrupted and copy.reason is None:
            copy.state = "ended"
        elif again:
            copy.state = "waiting"
        else:
            copy.state = "done" if copy.failure is None else "failed"
        if running is self._measured and not interrupted:
            self._learn_size(running, copy.memory_peak_bytes)
        self._after_end(copy, again=again)

    def _note_result(self, running: _RunningCopy, failure: str | None, stuck: GpushareError | None) -> None:
        """Note the exit code of a copy, whether it was a client of MPS, and how it failed, with a hint."""
        copy = running.copy
        program = running.program
        copy.seconds = round((program.ended or time.monotonic()) - program.started, 2)
        copy.exit_code = program.status
        if program.status is not None and program.status < 0:
            copy.exit_code = 128 - program.status
        # One that ended between two checks, or while the daemon was asked.
        copy.attached = copy.attached or running.gpu.was_client(program.pid)
        copy.failure = failure
        self._note_memory_end(running)
        if stuck is not None:
            copy.failure = f"left process {', '.join(map(str, copy.left_behind))} behind: {stuck.message}"
            copy.hint = stuck.hint

    def _after_end(self, copy: Copy, *, again: bool) -> None:
        """Write the end of a copy into the file of the farm and report it; with --fail-fast a failure ends the farm."""
        if not again and copy.state in {"done", "failed"} and self._results is not None:
            try:
                self._results.add(copy)
            except OperationFailed as error:
                # A failed write must not end the copies.
                if self._unrecorded is None:
                    self._unrecorded = error
                    self._reporter.say(f"{error.message}; the farm goes on")
        if self._options.fail_fast and copy.state == "failed" and self._signals.first is None:
            self._giving_up = True
        self._reporter.ended(copy, again=again)

    def _note_memory_end(self, running: _RunningCopy) -> None:
        """Give a copy that was ended for its memory that reason, whatever its exit code, and release its reservation."""
        copy = running.copy
        try:
            for memory in running.memories:
                self._note_peak(copy, memory.peak_bytes)
                # Raises if the memory of this GPU was why the copy was ended.
                memory.raise_end()
        except OperationFailed as error:
            copy.failure = error.message
            copy.hint = error.hint
            copy.reason = error.code
        running.leave()

    def _interrupt(self) -> None:
        """End all copies, because the user asked for it or a copy failed and the farm gives up."""
        # A copy that has ended by itself keeps its result, also if it does so while others are collected.
        self._collect_ended()
        for gpu in self._gpus.values():
            if gpu.group is not None:
                gpu.group.read_outputs()
        interrupted = [running for running in self._running.values() if running.program.runs]
        self._end(interrupted, hurry=self._signals.ending_came)
        for running in interrupted:
            self._note_end(running, None, interrupted=True)
        self._collect_ended()
        for copy in self._waiting():
            copy.state = "skipped" if copy.tries == 0 else "failed"


def _step_of_farm(text: str) -> Step:
    """Return a step of the plan that no command of its own would do."""
    return step_of_run(text, "# by gpushare farm itself")


def _call_at_once(calls: Sequence[Callable[..., Any]], hurry: Callable[[], bool]) -> None:
    """Make these calls of `Group.end` in threads, because each waits for its programs; only the calling one sees signals (``hurry``).

    Raises:
        GpushareError: the first that failed.
    """
    from concurrent.futures import ThreadPoolExecutor

    is_hurried = threading.Event()
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call, hurry=is_hurried.is_set) for call in calls]
        while not all(future.done() for future in futures):
            if hurry():
                is_hurried.set()
            time.sleep(_STEP_SECONDS)
    for future in futures:
        future.result()
