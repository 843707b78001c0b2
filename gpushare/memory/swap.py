"""Swap: a whole job out of the GPU into host memory, and back, by the driver's checkpoint (`host/checkpoint.py`).

While out, a job holds no device memory. What would lose it is checked first: host memory before it goes out, room on the
GPU before it comes back, because a restore without room fails for good. The record is on the disk before the first
process is locked, and a guard completes or takes back what gpushare had begun if it dies.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

from gpushare.base.errors import (
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    OperationFailed,
    TimedOut,
    or_none,
)
from gpushare.base.typed import Count, JobName, Most, Pid, Shown, Within
from gpushare.base.units import MIB, format_apart, format_bytes
from gpushare.base.values import dataclass
from gpushare.host.capabilities import user_name
from gpushare.host.checkpoint import CHECKPOINTED, FAILED, LOCKED, RUNNING, Checkpoint
from gpushare.host.guard import DONE, Guard
from gpushare.host.host import Host
from gpushare.host.identity import uptime
from gpushare.host.process import signal_all
from gpushare.host.store import Job, JobProcess, Kept, Named, Past, RecordStore, named_after_living
from gpushare.pause.change import paused_by_run_error
from gpushare.pause.record import paused_processes

# States of a record. `back`: it is on the GPU again.
LEAVING, OUT, RETURNING, BACK, LOST = "leaving", "out", "returning", "back", "lost"
LOCK_SECONDS: Final = 10.0
# A job that starts processes on the GPU while it goes out is looked at this often.
_ROUNDS: Final = 3
# Another swap of this user takes as long as its copy. After a moment the one that waits says so.
# Root waits so long for a user who says to be swapping the same job.
_USERS_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.1
_SAY_SECONDS: Final = 2.0
# What ends a job waits for so long for the swap that another gpushare, or its guard, does.
_END_SECONDS: Final = 30.0
# Left free on the GPU besides the job itself.
GPU_MARGIN_BYTES: Final = 256 * MIB


class Image(NamedTuple):
    """A process of a job that is swapped out or being swapped: identity, and bytes held in host memory or on the GPU."""

    pid: Pid
    started: Count
    memory_bytes: Count


@dataclass(frozen=True, kw_only=True)
class Swap(Kept, Named):
    """A job that is swapped out or being swapped. ``images`` are its processes, in the order of leaving.

    ``gpu_uuid`` is where it comes back. ``reserved_bytes`` is what it had reserved there (0: nothing, None: all of the GPU).
    ``since`` is in seconds since boot, ``out_seconds`` how long leaving took.
    ``restored``: it was swapped before, so its end needs care (`checkpoint_before_kill`). ``left_uuid``: the GPU that it
    moves from (`move.py`); None: it comes back to where it was. The images of ``arrived`` are of ``gpu_uuid`` already.
    """

    pid: Pid
    started: Count
    name: JobName | None
    uid: int | None
    gpu_uuid: Shown
    state: Annotated[str, {LEAVING, OUT, RETURNING, BACK, LOST}.__contains__]
    since: Past
    images: Annotated[tuple[Image, ...], Most(256)]
    reserved_bytes: Count | None = 0
    out_seconds: Annotated[float, Within(0, 1e6)] | None = None
    restored: bool = False
    left_uuid: Shown | None = None
    arrived: Annotated[tuple[Pid, ...], Most(256)] = ()

    def is_named(self, text: str) -> bool:
        """Return whether this is its name, or the PID of one of its processes."""
        return text in {self.name, str(self.pid), *(str(image.pid) for image in self.images)}

    @property
    def memory_bytes(self) -> int:
        """Return what it holds, in host memory or on the GPU."""
        return sum(image.memory_bytes for image in self.images)

    def living(self, host: Host) -> tuple[Image, ...]:
        """Return the images of its processes that still run."""
        return tuple(image for image in self.images if host.processes.identity(image.pid) == image[:2])

    def identities(self, host: Host) -> list[tuple[int, int]]:
        """Return PID and start time of its processes that still run."""
        return [image[:2] for image in self.living(host)]


SWAPS: Final = RecordStore(Swap, "swap", "the record of a swapped job", durable=True)


def swaps(host: Host, *, shared: bool = True) -> list[Swap]:
    """Return the records of swapped jobs, each with its processes that still run: this user's, with ``shared`` root's too.

    Root sees those of all users. If both root and its user have swapped a job, root's record counts while root has it
    swapped out, otherwise the later record. This user's records of ended jobs are removed.
    """
    records = SWAPS.all(host, shared=shared)
    if not all(swap.living(host) for swap in records if swap.keeper_uid is None):
        forget_ended(host)
    living_swaps = [
        named_after_living(host, replace(swap, images=living), living)
        for swap in records
        if (living := swap.living(host))
    ]

    def rank(swap: Swap) -> tuple[bool, float, bool]:
        """Return the rank of a record, of which the lowest of a job counts."""
        is_of_root = _is_of_root(host, swap)
        # Where the times are the same, root has put back what its user had taken out.
        return not is_of_root or swap.state == BACK, -swap.since, not is_of_root

    counted: list[Swap] = []
    for swap in sorted(living_swaps, key=rank):
        if not any(_same_job(swap, other) for other in counted):
            counted.append(swap)
    return [swap for swap in living_swaps if swap in counted]


def _is_of_root(host: Host, swap: Swap) -> bool:
    """Return whether root keeps this record."""
    return swap.keeper_uid == 0 or (swap.keeper_uid is None and host.root)


def _same_job(swap: Swap, other: Swap) -> bool:
    """Return whether two records are of one job."""
    return not {image[:2] for image in swap.images}.isdisjoint(image[:2] for image in other.images)


def check_same_namespace(host: Host, text: str) -> None:
    """Raise if a job of this name or PID was swapped in another PID namespace.

    Raises:
        NotSupported: it was (code ``pid_namespace``).
    """
    for swap in SWAPS.elsewhere(host):
        if swap.is_named(text):
            raise NotSupported(
                f"{swap.title} was swapped out in another PID namespace, a container or its host, where PIDs differ",
                f"run it there: gpushare swap in {swap.selector}",
                code="pid_namespace",
            )


def find_swap(host: Host, pid: int, name: str | None = None) -> Swap | None:
    """Return the record of a job, or else of a part of it that was swapped by its own PID; None: none was.

    A record of a swapped-out job comes before one of a job that is back. A job that was swapped out while it started has
    gpushare's PID in its record and is found by its name.
    """
    records = swaps(host)
    if not records:
        return None
    family = set(host.processes.descendants(pid))
    info = host.processes.describe(pid)
    uid = None if info is None else info.uid
    # A user's record counts only for that user's programs.
    candidates = [
        swap
        for swap in records
        if swap.keeper_uid in {None, 0, uid} and (swap.pid == pid or family & {image.pid for image in swap.images})
    ]
    if not candidates and name is not None:
        # To root, jobs of several users may have this name.
        candidates = [swap for swap in records if swap.name == name and swap.uid in {None, uid}]
    return min(candidates, key=lambda swap: swap.state == BACK, default=None)


def swapped_out(host: Host, job: Job) -> Swap | None:
    """Return the record of a job that is out, lost or on its way; None: it is on the GPU, whatever an old record says."""
    swap = find_swap(host, job.pid, job.name)
    return None if swap is None or swap.state == BACK or is_back(host, swap) else swap


def out_by_driver(host: Host, pid: int, name: str | None, uid: int | None) -> Swap | None:
    """Return a job without a readable record that the driver reports as swapped out; None: it is not.

    Its memory is at most what it has in host memory. Its GPU is unknown: the fullest one is assumed, because if that has
    room, every GPU has.
    """
    checkpoint = host.open_checkpoint()
    members = [member for member in host.processes.descendants(pid) if checkpoint.state(member) == CHECKPOINTED]
    first = host.processes.identity(pid)
    gpus = [gpu for gpu in host.nvml.sweep() if gpu.uuid and not gpu.mig_enabled] if members else []
    if first is None or not gpus:
        return None
    fullest = min(gpus, key=lambda gpu: (gpu.memory_total_bytes or 0) - (gpu.memory_used_bytes or 0))
    images = []
    for process in filter(None, map(host.processes.identity, members)):
        size = host.machine.resident_bytes(process.pid)
        # Unknown: all of a GPU.
        images.append(Image(*process, size if size is not None else fullest.memory_total_bytes or 0))
    return Swap(
        pid=pid,
        started=first.started,
        name=name,
        uid=uid,
        gpu_uuid=fullest.uuid or "",
        state=OUT,
        since=uptime(),
        images=tuple(images),
        path=SWAPS.path(host, pid),
    )


@contextlib.contextmanager
def locked(host: Host, *, say: Callable[[str], None] = lambda _: None, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock of this user's swaps. Waits for another gpushare that has it, ``seconds`` at most.

    Raises:
        NoPermission, OperationFailed: it cannot be created.
        InUse: another gpushare has it for longer (code ``swap_busy``).
    """
    reported = False

    def report_wait(so_far: float) -> None:
        """Say once that the lock is waited for; raise after ``seconds``. It is called with the seconds waited."""
        nonlocal reported
        if seconds is not None and so_far >= seconds:
            raise InUse(
                "another gpushare of this user is swapping a job",
                "try again when it is done: gpushare swap list",
                code="swap_busy",
            )
        if so_far >= _SAY_SECONDS and not reported:
            reported = True
            say("waits until another gpushare of this user has swapped its job")

    with SWAPS.locked(host, on_wait=report_wait):
        yield


# -- out ---------------------------------------------------------------------------------------------------------------


def check_out(host: Host, job: Named, processes: Sequence[JobProcess]) -> None:
    """Raise unless a job can go out.

    Raises:
        NotSupported: a client of MPS, on several GPUs, a driver before 570, another PID
            namespace than the host's.
        InUse: it is stopped or paused (which hangs the lock), or host memory is short.
    """
    check_host(host)
    mps = next((process for process in processes if process.under_mps), None)
    if mps is not None:
        raise NotSupported(
            f"{job.title} cannot be swapped or moved: process {mps.pid} is a client of MPS",
            "start it outside MPS: gpushare run --swap request -- CMD",
            code="under_mps",
        )
    gpus = sorted({gpu for process in processes for gpu in process.gpus})
    if len(gpus) > 1:
        raise several_gpus_error(job, gpus)
    _check_stopped(host, job, processes)
    from gpushare.memory.cost import host_bytes

    for process in processes:
        free = host.machine.free_memory(process.pid)
        most = host_bytes(sum(other.memory_bytes or 0 for other in processes))
        if free is not None and most > free:
            needed, available = format_apart(most, free)
            raise InUse(
                f"{job.title} needs {needed} of host memory, and {available} are available to it",
                "free host memory, or raise the limit of its cgroup (memory.max and memory.high)",
                code="host_memory",
            )


def several_gpus_error(job: Named, gpus: Sequence[int]) -> NotSupported:
    """Return the error about a job on several GPUs, of these indexes."""
    return NotSupported(
        f"{job.title} is on GPUs {', '.join(map(str, gpus))}, and only jobs on one GPU can be swapped or moved",
        f"pause it instead: gpushare pause {job.selector}",
        code="several_gpus",
    )


def check_host(host: Host) -> None:
    """Raise unless jobs can be swapped on this host.

    Raises:
        NotSupported: a driver before 570, no libcuda, or another PID namespace than the host's.
    """
    major = (host.nvml.driver_version() or "").partition(".")[0]
    if major.isdecimal() and int(major) < 570:
        raise NotSupported(
            f"driver {major} cannot copy a job out of the GPU", "driver 570 or later is needed", code="driver_too_old"
        )
    if host.processes.namespace_is_host() is False:
        raise NotSupported(
            "in a container with PIDs of its own the driver's process list has other PIDs, so jobs cannot be swapped",
            "run gpushare on the host, with the PID that gpushare status shows there",
            code="pid_namespace",
        )
    host.open_checkpoint().demand()


def _check_stopped(host: Host, job: Named, processes: Sequence[JobProcess]) -> None:
    """Raise InUse if a process of a job is paused or stopped: then the driver's lock would hang."""
    paused = paused_processes(host)
    for process in processes:
        whose = job.title if job.pid == process.pid else f"process {process.pid} of {job.title}"
        if process.pid in paused:
            if paused[process.pid].resumed_by_run(host):
                raise paused_by_run_error(paused[process.pid])
            raise InUse(
                f"{whose} is paused: a checkpoint would hang",
                f"resume it first: gpushare resume {job.selector}",
                code="paused",
            )
        if _is_stopped(host, process.pid):
            raise _stopped_error(whose, process.pid)


def _is_stopped(host: Host, pid: int) -> bool:
    info = host.processes.describe(pid)
    return info is not None and info.stopped


def _stopped_error(whose: str, pid: int) -> InUse:
    return InUse(f"{whose} is stopped: a checkpoint would hang", f"continue it first: kill -CONT {pid}", code="stopped")


def check_continues(host: Host, swap: Swap) -> None:
    """Raise InUse if a process of a swapped job is stopped (SIGSTOP, Ctrl-Z): no call of the driver for it returns."""
    pid = next((image.pid for image in swap.living(host) if _is_stopped(host, image.pid)), None)
    if pid is not None:
        raise _stopped_error(f"process {pid} of {swap.title}" if swap.title != f"process {pid}" else swap.title, pid)


def leaving_record(
    host: Host, job: Job, gpu_uuid: str, processes: Sequence[JobProcess], reserved_bytes: int | None
) -> Swap:
    """Return the record of a job that is about to go out, which `go_out` writes."""
    earlier = find_swap(host, job.pid, job.name)
    return Swap(
        pid=job.pid,
        started=job.started,
        name=job.name,
        uid=job.uid,
        gpu_uuid=gpu_uuid,
        state=LEAVING,
        since=uptime(),
        images=tuple(Image(process.pid, process.started, process.memory_bytes or 0) for process in processes),
        reserved_bytes=reserved_bytes,
        restored=earlier is not None and (earlier.restored or earlier.state == BACK),
        path=SWAPS.path(host, job.pid),
    )


def go_out(
    host: Host, swap: Swap, again: Callable[[], Sequence[JobProcess]], keep: Keep, target_uuid: str | None = None
) -> Swap:
    """Lock all processes of a job, and copy them to host memory; return the record as it is then.

    ``target_uuid``: it moves to this GPU, and the record says that it is on its way there.

    The caller holds the lock of the swaps, and has started the guard. ``again`` returns the job's processes on the GPU as
    they are now, and raises if one of them cannot go out: a process that it has started meanwhile goes with the others. If
    a process cannot be locked or copied, all are back as they were, unless the message says otherwise; ``keep`` reserves the
    room for that.

    Raises:
        NotFound: all of it has ended.
        GpushareError: it cannot go out.
    """
    began = time.monotonic()
    checkpoint = host.open_checkpoint()
    checkpoint.demand()
    SWAPS.sweep(host)
    earlier_record = SWAPS.read(swap.path)
    SWAPS.write(swap)
    _check_alone(host, swap, earlier_record)
    try:
        locked_pids: set[int] = set()
        for number in range(_ROUNDS + 1):
            for pid in [image.pid for image in swap.living(host) if image.pid not in locked_pids]:
                with _unless_ended(host, pid):
                    checkpoint.lock(pid, LOCK_SECONDS)
                locked_pids.add(pid)
            # Locked, it grows no more. As it was before, the room for its way back could be too small.
            images = _images_now(swap, again())
            if images == swap.images:
                break
            has_new_processes = len(images) > len(swap.images)
            if has_new_processes and number == _ROUNDS:
                raise OperationFailed(
                    f"{swap.title} keeps spawning GPU processes, so it cannot be swapped out consistently",
                    "wait until it has started all of them, then try again",
                    code="job_grows",
                )
            swap = replace(swap, images=images)
            SWAPS.write(swap)
            if not has_new_processes:
                break
        for pid, _, size in swap.living(host):
            with _unless_ended(host, pid):
                checkpoint.checkpoint(pid, size)
    except GpushareError:
        with keep(host, swap) as room:
            take_back(host, swap, checkpoint, room)
        raise
    if not swap.living(host):
        raise _ended_error(swap)
    done = replace(swap, state=OUT, out_seconds=round(time.monotonic() - began, 3))
    if target_uuid is not None:
        done = replace(done, state=RETURNING, gpu_uuid=target_uuid, left_uuid=swap.gpu_uuid)
    write_if_living(host, done)
    return done


def _images_now(swap: Swap, processes: Sequence[JobProcess]) -> tuple[Image, ...]:
    """Return the images of a job, as large as its processes have become, and those of further processes."""
    now = [Image(process.pid, process.started, process.memory_bytes or 0) for process in processes]
    sizes = {image[:2]: image.memory_bytes for image in now}
    known = [Image(*image[:2], max(image.memory_bytes, sizes.get(image[:2], 0))) for image in swap.images]
    known_pids = {image.pid for image in swap.images}
    return (*known, *(image for image in now if image.pid not in known_pids))


def _check_alone(host: Host, swap: Swap, earlier_record: Swap | None) -> None:
    """Raise if root, or for root the job's user, is swapping it too: each has a lock of its own.

    Both write what they are about to do before they read what the other has written, so never do both go on. A user's
    record binds root for a while only: after `_USERS_SECONDS` the driver alone decides what can be done.

    Raises:
        InUse: one does (code ``swap_busy``); the record is as it was before.
    """
    # A copy of a large job takes longer: about 2 GB a second (H200).
    until = time.monotonic() + _USERS_SECONDS + swap.memory_bytes / 1e9
    while (other := _swapping_too(host, swap)) is not None:
        if host.root and other.keeper_uid != 0:
            if time.monotonic() >= until:
                return
            time.sleep(_LOOK_SECONDS)
            continue
        if earlier_record is None:
            _forget(swap)
        else:
            SWAPS.write(earlier_record)
        whose = "root" if other.keeper_uid == 0 else user_name(other.keeper_uid or 0)
        raise InUse(
            f"{whose} is swapping {swap.title} now", "try again later; see: gpushare swap list", code="swap_busy"
        )


def _swapping_too(host: Host, swap: Swap) -> Swap | None:
    """Return the record of another user who says to be swapping the same job now."""
    records = SWAPS.all(host)
    return next(
        (other for other in records if is_on_its_way(other) and _same_job(swap, other) and other.living(host)), None
    )


def is_on_its_way(swap: Swap) -> bool:
    """Return whether another user's record says that a job is being swapped now."""
    return swap.keeper_uid is not None and swap.state in {LEAVING, RETURNING}


def taken_over(host: Host, swap: Swap) -> Swap:
    """Return a swapped-out job as this user may bring it in: root brings in a user's job by a record of its own.

    Raises:
        NoPermission: root has taken it out (code ``swapped_by_root``).
    """
    if swap.keeper_uid is None:
        return swap
    if not host.root:
        raise NoPermission(
            f"{swap.title} was swapped out by root",
            f"ask root: sudo gpushare swap in {swap.selector}",
            code="swapped_by_root",
        )
    return replace(swap, path=SWAPS.path(host, swap.pid), keeper_uid=None)


@contextlib.contextmanager
def _unless_ended(host: Host, pid: int) -> Iterator[None]:
    """Ignore an error about a process that has ended meanwhile."""
    try:
        yield
    except GpushareError:
        if host.processes.identity(pid) is not None:
            raise


def lost_error(swap: Swap) -> OperationFailed:
    """Return the error about a job whose restore has failed for good."""
    return OperationFailed(
        f"{swap.title} is lost: the driver could not put it back",
        f"end it: kill -9 {' '.join(str(image.pid) for image in swap.images)}",
        code="job_lost",
    )


def _ended_error(swap: Swap) -> NotFound:
    """Remove the record of a job that has ended, and return the error."""
    _forget(swap)
    return NotFound(f"{swap.title} has ended", "see swapped jobs: gpushare swap list", code="no_job")


def _forget(swap: Swap) -> None:
    """Remove a record; one that cannot be removed stays, and a later sweep removes it."""
    with contextlib.suppress(GpushareError):
        SWAPS.forget(swap.path)


def write_if_living(host: Host, swap: Swap) -> None:
    """Write a record; if the job has ended meanwhile, remove it: whoever ended it looked for a record before this one."""
    SWAPS.write(swap)
    if not swap.living(host):
        _forget(swap)


# -- in ----------------------------------------------------------------------------------------------------------------


def come_in(host: Host, swap: Swap) -> Swap:
    """Copy a job back and let it continue. The caller has reserved the room, holds the lock, and started the guard.

    Raises:
        OperationFailed: a process is lost (code ``job_lost``), or the driver refused (``restore_refused``): then all of
            the job is swapped out again; or the driver does not report whether all of it is back (``state_unknown``).
        InUse: a process is stopped, or another program took the reserved room (code ``no_room``); nothing was changed.
        NotFound: the job has ended.
    """
    living = swap.living(host)
    if not living:
        raise _ended_error(swap)
    if swap.state == LOST:
        raise lost_error(swap)
    checkpoint = host.open_checkpoint()
    checkpoint.demand()
    check_continues(host, swap)
    _check_gpus(host, swap)
    need = sum(size for pid, _, size in living if checkpoint.state(pid) != RUNNING)
    if has_room(host, swap, need) is False:
        raise InUse(
            f"not enough memory is free now: {format_bytes(need)} needed, another program took it",
            f"try again later: gpushare swap in {swap.selector} --wait; see who holds the memory: gpushare status",
            code="no_room",
        )
    earlier_record = SWAPS.read(swap.path)
    returning = replace(swap, state=RETURNING)
    # A full disk must not keep a job out.
    with contextlib.suppress(GpushareError):
        SWAPS.write(returning)
    _check_alone(host, returning, earlier_record)
    try:
        _restore_all(host, swap, checkpoint)
    except OperationFailed as error:
        _settle_failed_restore(host, swap, checkpoint, error.code)
        raise
    _unlock(host, swap, checkpoint)
    if not swap.living(host):
        raise _ended_error(swap)
    _demand_running(host, swap, checkpoint)
    back = replace(swap, state=BACK, restored=True, since=uptime(), left_uuid=None, arrived=())
    try:
        write_if_living(host, back)
    except GpushareError as error:
        raise error.restated(message=f"{swap.title} is back on the GPU, but {error.message}") from error
    return back


def _check_gpus(host: Host, swap: Swap) -> None:
    """Raise OperationFailed if a GPU of a job that moves is not of this host: gone, or invented by the user who wrote the record."""
    gpus = {gpu.uuid for gpu in host.nvml.identities()}
    crosses = swap.left_uuid is not None and any(image.pid not in swap.arrived for image in swap.images)
    if crosses and not {swap.left_uuid, swap.gpu_uuid} <= gpus:
        raise OperationFailed(
            f"{swap.title} moves between two GPUs, and one of them is not on this host",
            "see the GPUs: gpushare status",
            code="restore_refused",
        )


def _restore_all(host: Host, swap: Swap, checkpoint: Checkpoint) -> None:
    """Copy the processes that are out back: to the GPU that they left, or by the driver's pairs to another."""
    pairs: list[tuple[str, str]] = []
    if swap.left_uuid is not None:
        exchanged = {swap.left_uuid: swap.gpu_uuid, swap.gpu_uuid: swap.left_uuid}
        uuids = [gpu.uuid for gpu in host.nvml.identities() if gpu.uuid is not None]
        pairs = [(uuid, exchanged.get(uuid, uuid)) for uuid in uuids]
    for pid, _, size in reversed(swap.living(host)):
        if checkpoint.state(pid) == CHECKPOINTED:
            with _unless_ended(host, pid):
                checkpoint.restore(pid, size, [] if pid in swap.arrived else pairs)


def _settle_failed_restore(host: Host, swap: Swap, checkpoint: Checkpoint, code: str | None) -> None:
    """Bring a job whose restore failed to one state: lost, or out again."""
    if code == "job_lost":
        # The others do not continue either; off the GPU they can be killed safely.
        for pid, _, size in swap.living(host):
            with contextlib.suppress(GpushareError):
                if checkpoint.state(pid) == LOCKED:
                    checkpoint.checkpoint(pid, size)
        SWAPS.write(replace(swap, state=LOST))
    elif code == "restore_refused":
        # Here, not by the guard: it would ask the driver for as long as half a minute.
        with contextlib.suppress(GpushareError):
            take_back(host, swap, checkpoint, room=lambda _size: False)


def _demand_running(host: Host, swap: Swap, checkpoint: Checkpoint) -> None:
    """Raise unless the driver says of all processes that they run: the record stays for whoever looks next."""
    for pid, _, _ in swap.living(host):
        if checkpoint.state(pid) != RUNNING and host.processes.identity(pid) is not None:
            raise OperationFailed(
                f"the driver does not say that process {pid} of {swap.title} runs again",
                f"try again: gpushare swap in {swap.selector}; see: sudo dmesg | tail",
                code="state_unknown",
            )


def _unlock(host: Host, swap: Swap, checkpoint: Checkpoint) -> None:
    """Let those of a job's processes continue that the driver holds locked."""
    for pid, _, _ in swap.living(host):
        if checkpoint.state(pid) == LOCKED:
            with _unless_ended(host, pid):
                checkpoint.unlock(pid)


# -- the guard ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded(host: Host, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Run the guard meanwhile: if this process dies, it repairs what was begun. After an error, and Ctrl-C, it is waited for.

    Raises:
        OperationFailed: it does not start (code ``guard_failed``); nothing was begun.
    """
    guard = Guard(host.spec, "repairs a swap if gpushare dies", "gpushare.memory.room:repair_after_death")
    guard.wait_ready()
    # Without a word the guard acts.
    word: str | None = None
    try:
        yield
        word = DONE
    finally:
        guard.leave(word)
        if not guard.wait(_SAY_SECONDS):
            say("waits until the guard has finished the interrupted swap")
            guard.wait()


# -- what a death left -------------------------------------------------------------------------------------------------


def take_back(host: Host, swap: Swap, checkpoint: Checkpoint, room: Callable[[int], bool | None]) -> None:
    """Bring a job that is half out to one state: all of it running if the GPU has room, else all of it out.

    ``room`` says whether this number of bytes is free on its GPU. The caller holds the lock.

    Raises:
        TimedOut, NotSupported: the driver does not answer, or is not there; the record stays.
        InUse: a process is stopped; so it does.
    """
    sizes = {pid: size for pid, _, size in swap.living(host)}
    if not sizes:
        _forget(swap)
        return
    checkpoint.demand()
    check_continues(host, swap)
    states = {pid: checkpoint.state(pid) for pid in sizes}
    hanging = next((pid for pid in sizes if checkpoint.hangs(pid)), None)
    if hanging is not None:
        # What was asked of it may still take effect, so the record stays for whoever looks next.
        raise TimedOut(
            f"the driver does not answer for process {hanging}, so {swap.title} may be only partly swapped out",
            f"if it is stopped: kill -CONT {hanging}; then: gpushare swap in {swap.selector}",
            code="driver_hangs",
        )
    if FAILED in states.values():
        SWAPS.write(replace(swap, state=LOST))
        return
    swap = _with_arrived(host, swap)
    out = [pid for pid, state in states.items() if state == CHECKPOINTED]
    need = sum(sizes[pid] for pid in out)
    if out and not room(need):
        # All of it goes out.
        for pid, state in states.items():
            if state == RUNNING:
                with _unless_ended(host, pid):
                    checkpoint.lock(pid, LOCK_SECONDS)
            if state in {RUNNING, LOCKED}:
                with _unless_ended(host, pid):
                    checkpoint.checkpoint(pid, sizes[pid])
        _leave_out(host, swap)
        return
    _restore_all(host, swap, checkpoint)
    _unlock(host, swap, checkpoint)
    # Its end needs care from now on if a process of it was ever restored.
    if out or swap.restored or swap.state != LEAVING:
        write_if_living(host, replace(swap, state=BACK, restored=True, left_uuid=None, arrived=()))
    else:
        _forget(swap)


def _with_arrived(host: Host, swap: Swap) -> Swap:
    """Return the record of a moving job with the processes that NVML now lists on the new GPU as arrived."""
    if swap.left_uuid is None:
        return swap
    on_new_gpu = {
        process.pid for gpu in host.nvml.sweep() if gpu.uuid == swap.gpu_uuid for process in gpu.processes or ()
    }
    arrived = on_new_gpu.intersection(image.pid for image in swap.images) | set(swap.arrived)
    return replace(swap, arrived=tuple(sorted(arrived)))


def _leave_out(host: Host, swap: Swap) -> None:
    """Note that a job is swapped out. If its user's record says so too, root drops its own: the user may bring it in."""
    users = [record for record in SWAPS.all(host) if record.keeper_uid]
    if any(record.state == OUT and _same_job(record, swap) for record in users):
        _forget(swap)
    else:
        write_if_living(host, replace(swap, state=OUT))


def has_room(host: Host, swap: Swap, size: int) -> bool | None:
    """Return whether this number of bytes and a margin are free on the GPU of a job; None: unknown.

    If no other process is on that GPU, no margin is needed: the job had fitted there.
    """
    images = {image.pid for image in swap.images}
    for gpu in host.nvml.sweep():
        if gpu.uuid == swap.gpu_uuid and gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None:
            free = gpu.memory_total_bytes - (gpu.memory_reserved_bytes or 0) - gpu.memory_used_bytes
            alone = gpu.processes is not None and {process.pid for process in gpu.processes} <= images
            return size <= (free if alone else free - GPU_MARGIN_BYTES)
    return None


# What keeps room on the GPU of a job for as long as it comes back; it is given the bytes, and returns whether there is any.
Keep = Callable[["Host", Swap], contextlib.AbstractContextManager[Callable[[int], "bool | None"]]]


def repair(host: Host, keep: Keep, say: Callable[[str], None] = lambda _: None) -> list[Swap]:
    """Complete or undo the swaps that a killed gpushare has begun; return those that were changed. Takes the lock itself.

    ``keep`` reserves room for a job that is half out (`room.room_kept`). Records of ended jobs are removed. If a full disk
    kept the record of a job that is back from being updated, it is corrected.
    """
    unfinished = [swap for swap in swaps(host, shared=False) if swap.state in {LEAVING, RETURNING, OUT}]
    if not unfinished:
        return []
    changed = []
    begun = [swap for swap in unfinished if swap.state != OUT or is_back(host, swap)]
    with locked(host, say=say) if begun else contextlib.nullcontext():
        for swap in begun:
            # Another gpushare may have finished it before this one had the lock.
            record = SWAPS.read(swap.path)
            if record is None or not (record.state in {LEAVING, RETURNING} or is_back(host, record)):
                continue
            with keep(host, record) as room:
                take_back(host, record, host.open_checkpoint(), room)
            if record.state != OUT:
                changed.append(record)
    return changed


def is_back(host: Host, swap: Swap) -> bool:
    """Return whether a job that was out by its record is on the GPU: a full disk has kept the record as it was."""
    checkpoint = host.open_checkpoint()
    return swap.state == OUT and all(checkpoint.state(pid) == RUNNING for pid, _, _ in swap.living(host))


def ended_swap(host: Host, text: str) -> Swap | None:
    """Return this user's record of a job that has ended and is still written down, by name or PID."""
    records = SWAPS.all(host, shared=False)
    return next((swap for swap in records if swap.is_named(text) and not swap.living(host)), None)


def forget_ended(host: Host, seconds: float = 0.0) -> None:
    """Remove this user's records of jobs that have ended, unless another gpushare has their lock for ``seconds``."""
    with contextlib.suppress(GpushareError), locked(host, seconds=seconds):
        SWAPS.sweep(host)


# -- the end of a job that was restored --------------------------------------------------------------------------------


def checkpoint_before_kill(host: Host, pids: Sequence[int]) -> None:
    """Checkpoint previously swapped processes before they are killed.

    Killing a restored process has hung a whole host (NVIDIA/cuda-checkpoint issue 53); a checkpointed one ends safely.
    """
    if not any(set(pids) & {image.pid for image in swap.images} for swap in swaps(host)):
        return
    with contextlib.ExitStack() as stack:
        # A swap that is on its way, or the guard that repairs it, comes first: it must not bring back what is killed.
        with contextlib.suppress(GpushareError):
            stack.enter_context(locked(host, seconds=_END_SECONDS))
        for swap in swaps(host):
            _checkpoint_restored(host, swap, pids)


def _checkpoint_restored(host: Host, swap: Swap, pids: Sequence[int]) -> None:
    """Checkpoint those of these processes that were swapped before; the others are left alone."""
    living = swap.living(host) if swap.restored or swap.state in {RETURNING, BACK} else ()
    restored = {pid: size for pid, _, size in living}
    chosen = [pid for pid in pids if pid in restored]
    if not chosen:
        return
    from gpushare.memory.cost import HOST_MARGIN_BYTES

    checkpoint = host.open_checkpoint()
    # A stopped process hangs the lock.
    signal_all(host.processes, chosen, signal.SIGCONT)
    for pid in chosen:
        free = or_none(lambda pid=pid: host.machine.free_memory(pid))  # type: ignore[misc]
        if free is not None and free < restored[pid] + HOST_MARGIN_BYTES:
            continue
        with contextlib.suppress(GpushareError):
            if checkpoint.state(pid) == RUNNING:
                checkpoint.lock(pid, LOCK_SECONDS)
            if checkpoint.state(pid) == LOCKED:
                checkpoint.checkpoint(pid, restored[pid])
    if swap.state == RETURNING and swap.keeper_uid is None:
        # A guard that comes later finds nothing to do.
        with contextlib.suppress(GpushareError):
            write_if_living(host, replace(swap, state=OUT))
