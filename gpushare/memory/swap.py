"""Swap: a whole job out of the GPU into host memory, and back, by the driver's checkpoint (`host/checkpoint.py`).

While out, a job holds no device memory. What would lose it is checked first: host memory before it goes out, room on the
GPU before it comes back, because a restore without room fails for good. The record is on the disk before the first
process is locked, and a guard (`guard.py`) completes or takes back what gpushare had begun if it dies.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

import gpushare
from gpushare.errors import GpushareError, InUse, NotFound, NotSupported, OperationFailed, or_none
from gpushare.host.checkpoint import CHECKPOINTED, FAILED, LOCKED, RUNNING, Checkpoint
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.process import known, signal_known
from gpushare.host.records import directory_locked, read_trusted, record_from, replace_file, writing
from gpushare.pause.record import paused_since
from gpushare.units import GIB, MIB, format_bytes
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host

SCHEMA: Final = 1
WHAT: Final = "the record of a swapped job"
# States of a record. `back`: it was swapped before, so its end needs care; see `lay_down`.
LEAVING, OUT, RETURNING, BACK, LOST = "leaving", "out", "returning", "back", "lost"
_DIRECTORY: Final = "swap"
LOCK_SECONDS: Final = 10.0
# Left free in host memory, and on the GPU, besides the copy itself.
_HOST_MARGIN_BYTES: Final = GIB
_HOST_MARGIN_SHARE: Final = 0.05
GPU_MARGIN_BYTES: Final = 256 * MIB


class OnGpu(NamedTuple):
    """A process of a job: its identity, the GPUs that it is on, and the bytes that it holds there."""

    pid: int
    started: int
    gpus: tuple[int, ...]
    memory_bytes: int
    under_mps: bool


@dataclass(frozen=True, kw_only=True)
class Swap:
    """A job that is out, or on its way. ``images`` are its processes with start and bytes, in the order of leaving.

    ``gpu_uuid`` is where it comes back. ``since`` is in seconds since 1970, ``out_seconds`` how long leaving took.
    """

    pid: int
    started: int
    name: str | None
    uid: int | None
    gpu_uuid: str
    state: str
    since: float
    images: tuple[tuple[int, int, int], ...]
    out_seconds: float | None = None
    path: Path = Path()

    @property
    def title(self) -> str:
        return f"process {self.pid}" if self.name is None else f"'{self.name}' (process {self.pid})"

    @property
    def selector(self) -> str:
        return self.name or str(self.pid)

    @property
    def memory_bytes(self) -> int:
        """Return what it holds, in host memory or on the GPU."""
        return sum(size for _, _, size in self.images)

    def living(self, host: Host) -> list[tuple[int, int]]:
        """Return PID and bytes of its processes that still run."""
        return [(pid, size) for pid, started, size in self.images if host.processes.identity(pid) == (pid, started)]


@dataclass(frozen=True, kw_only=True)
class _Record:
    pid: int
    started: int
    name: str | None
    uid: int | None
    gpu_uuid: str
    state: str
    since: float
    out_seconds: float | None
    schema: int


def swaps(host: Host, *, shared: bool = True) -> list[Swap]:
    """Return the jobs with a record that still run: this user's, and with ``shared`` root's."""
    found = []
    for run_directory in (host.run_directory, *(host.shared_run_directories if shared else ())):
        if not is_trusted_directory(run_directory, _DIRECTORY):
            continue
        with contextlib.suppress(OSError):
            found += [_read(path) for path in sorted((run_directory / _DIRECTORY).glob("*.json"))]
    return [one for one in found if one is not None and one.living(host)]


def find_swap(host: Host, pid: int, name: str | None = None) -> Swap | None:
    """Return the record of a job; None: it was never swapped.

    A job that went out while it started has gpushare's PID in its record: then one of its processes, or its name, tells.
    """
    found = swaps(host)
    by_pid = next((one for one in found if one.pid == pid), None)
    inside = next((one for one in found if any(image == pid for image, _, _ in one.images)), None)
    named = None if name is None else next((one for one in found if one.name == name), None)
    return by_pid or inside or named


def _read(path: Path) -> Swap | None:
    raw: Any = read_trusted(path)
    record = record_from(_Record, raw)
    images = raw.get("images") if record is not None else None
    if record is None or record.pid <= 0 or not isinstance(images, list) or not all(_is_image(one) for one in images):
        return None
    values = {name: value for name, value in vars(record).items() if name != "schema"}
    return Swap(**values, images=tuple(tuple(one) for one in images), path=path)


def _is_image(raw: Any) -> bool:
    return isinstance(raw, list) and len(raw) == 3 and all(type(one) is int and 0 <= one < 1 << 63 for one in raw)


def write(swap: Swap) -> None:
    """Write a record to the disk.

    Raises:
        NoPermission, OperationFailed: it cannot be written; an earlier one stays.
    """
    make_private_directory(swap.path.parent.parent)
    make_private_directory(swap.path.parent)
    document = {name: value for name, value in asdict(swap).items() if name != "path"}
    with writing(swap.path, WHAT):
        replace_file(swap.path, json.dumps({**document, "schema": SCHEMA}), durable=True)


def forget(swap: Swap) -> None:
    """Remove a record."""
    with contextlib.suppress(OSError):
        swap.path.unlink()


def path_of(host: Host, pid: int) -> Path:
    return host.run_directory / _DIRECTORY / f"{pid}.json"


@contextlib.contextmanager
def locked(host: Host) -> Iterator[None]:
    """Hold the lock of this user's swaps.

    Raises:
        NoPermission, OperationFailed: it cannot be created.
    """
    with directory_locked(host.run_directory / _DIRECTORY, "the lock of the swaps"):
        yield


# -- out ---------------------------------------------------------------------------------------------------------------


def check_out(host: Host, title: str, processes: Sequence[OnGpu]) -> None:
    """Raise unless a job can go out.

    Raises:
        NotSupported: a client of MPS, on several GPUs or a MIG instance, a driver before 570.
        InUse: it is stopped or paused (which hangs the lock), or host memory is short.
    """
    major = (host.nvml.driver_version() or "").partition(".")[0]
    if major.isdecimal() and int(major) < 570:
        raise NotSupported(
            f"driver {major} cannot copy a job out of the GPU", "driver 570 or later is needed", code="driver_too_old"
        )
    mps = next((one for one in processes if one.under_mps), None)
    if mps is not None:
        raise NotSupported(
            f"{title} cannot be swapped: process {mps.pid} is a client of MPS",
            "start it outside MPS: gpushare run --swappable -- CMD",
            code="under_mps",
        )
    gpus = sorted({gpu for one in processes for gpu in one.gpus})
    if len(gpus) > 1:
        raise NotSupported(
            f"{title} is on GPUs {', '.join(map(str, gpus))}, and only jobs on one GPU can be swapped",
            "pause it instead: gpushare pause JOB",
            code="several_gpus",
        )
    _check_stopped(host, title, processes)
    for one in processes:
        free = host.machine.free_memory(one.pid)
        need = sum(other.memory_bytes for other in processes)
        most = need + max(_HOST_MARGIN_BYTES, int(need * _HOST_MARGIN_SHARE))
        if free is not None and most > free:
            raise InUse(
                f"{title} needs {format_bytes(most)} of host memory, and {format_bytes(free)} are available to it",
                "free host memory, or raise the limit of its cgroup (memory.max)",
                code="host_memory",
            )


def _check_stopped(host: Host, title: str, processes: Sequence[OnGpu]) -> None:
    off = paused_since(host)
    for one in processes:
        if one.pid in off:
            raise InUse(
                f"process {one.pid} of {title} is paused, and the driver would wait for its work for ever",
                f"let it continue first: gpushare resume {one.pid}",
                code="paused",
            )
        info = host.processes.describe(one.pid)
        if info is not None and info.stopped:
            raise InUse(
                f"process {one.pid} of {title} is stopped, and the driver would wait for it for ever",
                f"let it continue first: kill -CONT {one.pid}",
                code="stopped",
            )


def go_out(host: Host, swap: Swap, checkpoint: Checkpoint) -> Swap:
    """Lock all processes of a job, and copy them to host memory; return the record as it is then.

    The caller holds the lock of the swaps, and has started the guard. If a process cannot be locked or copied, all are
    back as they were, unless the message says otherwise.
    """
    began = time.monotonic()
    forget_ended(host)
    write(swap)
    try:
        for pid, _ in swap.living(host):
            checkpoint.lock(pid, LOCK_SECONDS)
        for pid, size in swap.living(host):
            checkpoint.checkpoint(pid, size)
    except GpushareError:
        take_back(host, swap, checkpoint)
        raise
    done = replace(swap, state=OUT, out_seconds=round(time.monotonic() - began, 3))
    write(done)
    return done


# -- in ----------------------------------------------------------------------------------------------------------------


def come_in(host: Host, swap: Swap, checkpoint: Checkpoint) -> Swap:
    """Copy a job back and let it continue. The caller has reserved the room, holds the lock, and started the guard.

    Raises:
        OperationFailed: a process is lost (code ``job_lost``), or the driver refused (``restore_refused``): then all of
            the job is out again.
        NotFound: the job has ended.
    """
    living = swap.living(host)
    if not living:
        forget(swap)
        raise NotFound(f"{swap.title} has ended", "see what is out: gpushare swap list", code="no_job")
    write(replace(swap, state=RETURNING))
    try:
        for pid, size in reversed(living):
            if checkpoint.state(pid) == CHECKPOINTED:
                checkpoint.restore(pid, size)
    except OperationFailed as error:
        if error.code == "job_lost":
            write(replace(swap, state=LOST))
        elif error.code == "restore_refused":
            # Here, not by the guard: it would ask the driver for as long as half a minute.
            with contextlib.suppress(GpushareError):
                take_back(host, swap, checkpoint, room=lambda _size: False)
        raise
    _unlock(host, swap, checkpoint)
    back = replace(swap, state=BACK, since=time.time())
    write(back)
    return back


def _unlock(host: Host, swap: Swap, checkpoint: Checkpoint) -> None:
    for pid, _ in swap.living(host):
        if checkpoint.state(pid) == LOCKED:
            checkpoint.unlock(pid)


# -- the guard ---------------------------------------------------------------------------------------------------------

_GUARD_SECONDS: Final = 20.0


@contextlib.contextmanager
def guarded(host: Host) -> Iterator[None]:
    """Run the guard meanwhile: if this process dies, it repairs what was begun.

    Raises:
        OperationFailed: it does not start (code ``guard_failed``); nothing was begun.
    """
    root = str(Path(gpushare.__file__).resolve().parents[1])
    argv = [sys.executable, str(Path(__file__).resolve().with_name("guard.py")), root, host.spec]
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise _no_guard(error.strerror or str(error)) from error
    # Closing its input without a word makes it repair.
    with process:
        words, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        ready, _, _ = select.select([answers], [], [], _GUARD_SECONDS)
        if not ready or answers.readline() != b"ready\n":
            process.kill()
            raise _no_guard("it does not answer")
        yield
        with contextlib.suppress(OSError):
            words.write(b"done\n")
            words.flush()


def _no_guard(why: str) -> OperationFailed:
    return OperationFailed(
        f"the guard of the swap does not start: {why}",
        f"see what starts it: ls -l {sys.executable}",
        code="guard_failed",
    )


# -- what a death left -------------------------------------------------------------------------------------------------


def take_back(host: Host, swap: Swap, checkpoint: Checkpoint, room: Callable[[int], bool] | None = None) -> None:
    """Bring a job that is half out to one state: all of it running if the GPU has room, else all of it out.

    ``room`` says whether so many bytes are free on its GPU; without it, NVML is asked. The caller holds the lock.
    """
    states = {pid: checkpoint.state(pid) for pid, _ in swap.living(host)}
    sizes = dict(swap.living(host))
    if FAILED in states.values():
        write(replace(swap, state=LOST))
        return
    out = [pid for pid, state in states.items() if state == CHECKPOINTED]
    need = sum(sizes[pid] for pid in out)
    if out and not (room or (lambda size: _has_room(host, swap, size)))(need):
        for pid, state in states.items():
            if state == RUNNING:
                checkpoint.lock(pid, LOCK_SECONDS)
            if state in {RUNNING, LOCKED}:
                checkpoint.checkpoint(pid, sizes[pid])
        write(replace(swap, state=OUT))
        return
    for pid in out:
        checkpoint.restore(pid, sizes[pid])
    _unlock(host, swap, checkpoint)
    if out or swap.state in {RETURNING, BACK}:
        write(replace(swap, state=BACK))
    else:
        forget(swap)


def _has_room(host: Host, swap: Swap, size: int) -> bool:
    for gpu in host.nvml.sweep():
        if gpu.uuid == swap.gpu_uuid and gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None:
            free = gpu.memory_total_bytes - (gpu.memory_reserved_bytes or 0) - gpu.memory_used_bytes
            return size + GPU_MARGIN_BYTES <= free
    return False


def repair(host: Host) -> list[Swap]:
    """Complete or take back what a gpushare that died has begun; return those that were touched. Holds the lock itself.

    Records of jobs that have ended are removed.
    """
    forget_ended(host)
    begun = [one for one in swaps(host, shared=False) if one.state in {LEAVING, RETURNING}]
    if not begun:
        return []
    checkpoint = host.open_checkpoint()
    touched = []
    with locked(host):
        for one in begun:
            now = _read(one.path)
            if now is not None and now.state in {LEAVING, RETURNING}:
                take_back(host, now, checkpoint)
                touched.append(now)
    return touched


def forget_ended(host: Host) -> None:
    """Remove this user's records of jobs that have ended."""
    directory = host.run_directory / _DIRECTORY
    if not is_trusted_directory(host.run_directory, _DIRECTORY):
        return
    with contextlib.suppress(OSError):
        for path in directory.glob("*.json"):
            found = _read(path)
            if found is not None and found.path.parent == directory and not found.living(host):
                forget(found)


# -- the end of a job that was restored --------------------------------------------------------------------------------


def lay_down(host: Host, pids: Sequence[int]) -> None:
    """Before processes are killed: take those that were swapped before off the GPU first.

    Killing a restored process has hung a whole host (NVIDIA/cuda-checkpoint issue 53); a checkpointed one ends safely.
    """
    try:
        restored = {pid: size for one in swaps(host) if one.state == BACK for pid, size in one.living(host)}
    except GpushareError:
        return
    chosen = [pid for pid in pids if pid in restored]
    if not chosen:
        return
    checkpoint = host.open_checkpoint()
    # A stopped process hangs the lock.
    for pid, started in known(host.processes, chosen).items():
        with contextlib.suppress(GpushareError):
            signal_known(host.processes, pid, started, signal.SIGCONT)
    for pid in chosen:
        free = or_none(lambda pid=pid: host.machine.free_memory(pid))  # type: ignore[misc]
        if free is not None and free < restored[pid] + _HOST_MARGIN_BYTES:
            continue
        with contextlib.suppress(GpushareError):
            if checkpoint.state(pid) == RUNNING:
                checkpoint.lock(pid, LOCK_SECONDS)
            checkpoint.checkpoint(pid, restored[pid])
