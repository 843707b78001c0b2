"""Swap: a whole job out of the GPU into host memory, and back, by the driver's checkpoint (`host/checkpoint.py`).

While out, a job holds no device memory. What would lose it is checked first: host memory before it goes out, room on the
GPU before it comes back, because a restore without room fails for good. The record is on the disk before the first
process is locked, and a guard completes or takes back what gpushare had begun if it dies.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from gpushare.base.errors import GpushareError, InUse, NotFound, NotSupported, OperationFailed, TimedOut, or_none
from gpushare.base.units import format_bytes, format_distinct
from gpushare.host.checkpoint import CHECKPOINTED, FAILED, LOCKED, RUNNING, Checkpoint
from gpushare.host.guard import DONE, Guard
from gpushare.host.host import Host
from gpushare.host.identity import uptime
from gpushare.host.process import info_of, signal_all, starts_of
from gpushare.host.store import Job, JobProcess, Named
from gpushare.memory.cost import HOST_MARGIN_BYTES, host_bytes
from gpushare.memory.room import room_kept
from gpushare.memory.swapped import (
    BACK,
    LEAVING,
    LOST,
    OUT,
    RETURNING,
    SAY_SECONDS,
    SWAPS,
    Image,
    Swap,
    find_swap,
    forget,
    has_room,
    is_swapped_by_other,
    locked,
    lost_error,
    same_job,
    several_gpus_error,
    swaps,
    write_if_living,
)
from gpushare.pause.change import paused_by_run_error
from gpushare.pause.record import paused_processes

LOCK_SECONDS: Final = 10.0
# A job that starts processes on the GPU while it goes out is looked at this often.
_ROUNDS: Final = 3
# Root waits so long for a user who says to be swapping the same job.
_USERS_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.1
# What ends a job waits for so long for the swap that another gpushare, or its guard, does.
_END_SECONDS: Final = 30.0
# Before each try: a driver that does not answer, or too many open files, may be a matter of a moment.
_REPAIR_PAUSES_SECONDS: Final = (0.0, 1.0, 5.0, 30.0)


def find_swapped_out(host: Host, job: Job) -> Swap | None:
    """Return the record of a job that is out, lost or on its way; None: it is on the GPU, whatever an old record says."""
    swap = find_swap(host, job.pid, job.name)
    return None if swap is None or swap.state == BACK or is_back(host, swap) else swap


# -- out ---------------------------------------------------------------------------------------------------------------


def check_out(host: Host, job: Named, processes: Sequence[JobProcess]) -> None:
    """Raise unless a job, whose processes on GPUs are ``processes``, can go out.

    Raises:
        NotSupported: as `check_host`, or it is a client of MPS, or on several GPUs.
        InUse: it is stopped or paused (which hangs the lock), or host memory is short.
    """
    check_host(host)
    mps = next((process for process in processes if process.under_mps), None)
    if mps is not None:
        raise NotSupported(
            f"{job.title} cannot be swapped or moved: process {mps.pid} is a client of MPS",
            "start it outside MPS, and not in a farm: gpushare run --swap request -- CMD",
            code="under_mps",
        )
    gpus = sorted({gpu for process in processes for gpu in process.gpus})
    if len(gpus) > 1:
        raise several_gpus_error(job, gpus)
    _refuse_stopped(host, job, processes)
    need = host_bytes(sum(process.memory_bytes or 0 for process in processes))
    for process in processes:
        # Each process may be in a cgroup with a limit of its own.
        free = host.machine.free_memory(process.pid)
        if free is not None and need > free:
            needed, available = format_distinct(need, free)
            raise InUse(
                f"{job.title} needs {needed} of host memory, and {available} are available to it",
                "free host memory, or raise the limit of its cgroup (memory.max and memory.high)",
                code="host_memory",
            )


def check_driver(host: Host, first: int, task: str, hint: str = "") -> None:
    """Raise NotSupported if the driver is older than version ``first``, which can do a ``task`` (code ``driver_too_old``)."""
    version = host.nvml.driver_version() or ""
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < first:
        raise NotSupported(
            f"driver {version} cannot {task}", f"driver {first} or later is needed{hint}", code="driver_too_old"
        )


def check_host(host: Host) -> None:
    """Raise NotSupported if jobs cannot be swapped here: a driver before 570, no libcuda, or PIDs of a container's own."""
    check_driver(host, 570, "copy a job out of the GPU")
    if host.processes.namespace_is_host() is False:
        raise NotSupported(
            "in a container with PIDs of its own the driver's process list has other PIDs, so jobs cannot be swapped",
            "run gpushare on the host, with the PID that gpushare status shows there",
            code="pid_namespace",
        )
    host.open_checkpoint().check_available()


def _refuse_stopped(host: Host, job: Named, processes: Sequence[JobProcess]) -> None:
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
        if info_of(host.processes, process.pid).stopped:
            raise _stopped_error(whose, process.pid)


def _stopped_error(whose: str, pid: int) -> InUse:
    return InUse(f"{whose} is stopped: a checkpoint would hang", f"continue it first: kill -CONT {pid}", code="stopped")


def refuse_stopped_swap(host: Host, swap: Swap) -> None:
    """Raise InUse if a process of a swapped job is stopped (SIGSTOP, Ctrl-Z): no call of the driver for it returns."""
    pid = next((image.pid for image in swap.living(host) if info_of(host.processes, image.pid).stopped), None)
    if pid is not None:
        raise _stopped_error(f"process {pid} of {swap.title}" if swap.title != f"process {pid}" else swap.title, pid)


def leaving_record(
    host: Host, job: Job, gpu_uuid: str, processes: Sequence[JobProcess], reserved_bytes: int | None
) -> Swap:
    """Return the record of a job that is about to go out of a GPU. Nothing is written: `go_out` writes it."""
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
    host: Host, swap: Swap, read_processes: Callable[[], Sequence[JobProcess]], target_uuid: str | None = None
) -> Swap:
    """Lock all processes of a job, and copy them to host memory; return the record as it is then.

    The caller holds the lock of the swaps, and has started the guard. ``read_processes`` returns the job's processes on the
    GPU as they are now, and raises if one of them cannot go out: a process that the job has started meanwhile goes with the
    others. With ``target_uuid`` the record says in the end that the job is on its way to this GPU.

    If a process cannot be locked or copied, all are back as they were, unless the message says otherwise.

    Raises:
        NotFound: all of it has ended.
        GpushareError: it cannot go out.
    """
    began = time.monotonic()
    checkpoint = host.open_checkpoint()
    checkpoint.check_available()
    SWAPS.sweep(host)
    earlier_record = SWAPS.read(swap.path)
    SWAPS.write(swap)
    _give_way_to_other_swap(host, swap, earlier_record)
    try:
        locked_pids: set[int] = set()
        for number in range(_ROUNDS + 1):
            for pid in [image.pid for image in swap.living(host) if image.pid not in locked_pids]:
                with _unless_ended(host, pid):
                    checkpoint.lock(pid, LOCK_SECONDS)
                locked_pids.add(pid)
            # A locked process grows no more. With its size from before, the room for its way back could be too small.
            images = _images_now(swap, read_processes())
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
        for image in swap.living(host):
            with _unless_ended(host, image.pid):
                checkpoint.checkpoint(image.pid, image.memory_bytes)
    except GpushareError:
        settle_half_out(host, swap, checkpoint)
        raise
    if not swap.living(host):
        raise _forget_and_ended_error(swap)
    done = replace(swap, state=OUT, out_seconds=round(time.monotonic() - began, 3))
    if target_uuid is not None:
        done = replace(done, state=RETURNING, gpu_uuid=target_uuid, left_uuid=swap.gpu_uuid)
    write_if_living(host, done)
    return done


def _images_now(swap: Swap, processes: Sequence[JobProcess]) -> tuple[Image, ...]:
    """Return the images of a job, as large as its processes have become, and those of further processes."""
    images = {image.pid: image for image in swap.images}
    for process in processes:
        earlier = images.setdefault(process.pid, Image(process.pid, process.started, 0))
        if earlier.started == process.started:
            size = max(earlier.memory_bytes, process.memory_bytes or 0)
            images[process.pid] = earlier._replace(memory_bytes=size)
    return tuple(images.values())


def _give_way_to_other_swap(host: Host, swap: Swap, earlier_record: Swap | None) -> None:
    """Give way if root, or for root the job's user, is swapping this job too: their locks do not exclude each other.

    Each writes its record before it reads that of the other, so at least one of them sees the other. Root gives the user
    time, but not longer than a copy takes: then the driver alone decides what can be done.

    Raises InUse: root is swapping it (code ``swap_busy``); ``earlier_record`` is put back.
    """
    # A copy of a large job takes longer: about 2 GB a second (H200).
    until = time.monotonic() + _USERS_SECONDS + swap.memory_bytes / 1e9
    while others := [
        each for each in SWAPS.all(host) if is_swapped_by_other(each) and same_job(swap, each) and each.living(host)
    ]:
        # Root gives way too, to a root that has another run directory.
        if others[0].keeper_uid == 0:
            if earlier_record is None:
                forget(swap)
            else:
                SWAPS.write(earlier_record)
            raise InUse(
                f"root is swapping {swap.title} now", "try again later; see: gpushare swap list", code="swap_busy"
            )
        if time.monotonic() >= until:
            return
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def _unless_ended(host: Host, pid: int) -> Iterator[None]:
    """Ignore an error about a process that has ended meanwhile."""
    try:
        yield
    except GpushareError:
        if host.processes.identity(pid) is not None:
            raise


def _forget_and_ended_error(swap: Swap) -> NotFound:
    """Remove the record of a job that has ended, and return the error about that."""
    forget(swap)
    return NotFound(f"{swap.title} has ended", "see swapped jobs: gpushare swap list", code="no_job")


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
        raise _forget_and_ended_error(swap)
    if swap.state == LOST:
        raise lost_error(swap)
    checkpoint = host.open_checkpoint()
    checkpoint.check_available()
    refuse_stopped_swap(host, swap)
    _check_gpus(host, swap)
    need = sum(image.memory_bytes for image in living if checkpoint.state(image.pid) != RUNNING)
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
    _give_way_to_other_swap(host, returning, earlier_record)
    try:
        _restore_all(host, swap, checkpoint)
    except OperationFailed as error:
        _settle_failed_restore(host, swap, checkpoint, error.code)
        raise
    _unlock(host, swap, checkpoint)
    if not swap.living(host):
        raise _forget_and_ended_error(swap)
    for image in swap.living(host):
        # The record stays for whoever looks next.
        if checkpoint.state(image.pid) != RUNNING and host.processes.identity(image.pid) is not None:
            raise OperationFailed(
                f"the driver does not say that process {image.pid} of {swap.title} runs again",
                f"try again: gpushare swap in {swap.selector}; see: sudo dmesg | tail",
                code="state_unknown",
            )
    back = replace(swap, state=BACK, restored=True, since=uptime(), left_uuid=None, arrived=())
    try:
        write_if_living(host, back)
    except GpushareError as error:
        raise error.restated(message=f"{swap.title} is back on the GPU, but {error.message}") from error
    return back


def _check_gpus(host: Host, swap: Swap) -> None:
    """Raise OperationFailed if a job still has to move and one of its two GPUs is not on this host.

    The GPU is gone, or the user who wrote the record has invented it.
    """
    gpus = {gpu.uuid for gpu in host.nvml.identities()}
    still_moves = swap.left_uuid is not None and any(image.pid not in swap.arrived for image in swap.images)
    if still_moves and not {swap.left_uuid, swap.gpu_uuid} <= gpus:
        raise OperationFailed(
            f"{swap.title} moves between two GPUs, and one of them is not on this host",
            "see the GPUs: gpushare status",
            code="restore_refused",
        )


def _restore_all(host: Host, swap: Swap, checkpoint: Checkpoint) -> None:
    """Copy the processes that are out back: to the GPU that they left, or by the driver's pairs to another."""
    pairs = [] if swap.left_uuid is None else device_pairs(host, swap.left_uuid, swap.gpu_uuid)
    for image in reversed(swap.living(host)):
        if checkpoint.state(image.pid) == CHECKPOINTED:
            with _unless_ended(host, image.pid):
                checkpoint.restore(image.pid, image.memory_bytes, [] if image.pid in swap.arrived else pairs)


def device_pairs(host: Host, source_uuid: str, target_uuid: str) -> list[tuple[str, str]]:
    """Return the pairs, old and new GPU, with which the driver restores a job on another GPU.

    There is one for each GPU of the host; source and target change places.
    """
    exchanged = {source_uuid: target_uuid, target_uuid: source_uuid}
    uuids = [gpu.uuid for gpu in host.nvml.identities() if gpu.uuid is not None]
    return [(uuid, exchanged.get(uuid, uuid)) for uuid in uuids]


def _settle_failed_restore(host: Host, swap: Swap, checkpoint: Checkpoint, code: str | None) -> None:
    """Bring a job whose restore failed with this error code to one state: lost, or out again."""
    if code == "job_lost":
        # Its other processes do not continue either. Off the GPU they can be killed safely.
        for image in swap.living(host):
            with contextlib.suppress(GpushareError):
                if checkpoint.state(image.pid) == LOCKED:
                    checkpoint.checkpoint(image.pid, image.memory_bytes)
        SWAPS.write(replace(swap, state=LOST))
    elif code == "restore_refused":
        # Here, not by the guard: it would ask the driver for as long as half a minute.
        with contextlib.suppress(GpushareError):
            settle_half_out(host, swap, checkpoint, was_refused=True)


def _unlock(host: Host, swap: Swap, checkpoint: Checkpoint) -> None:
    """Let those of a job's processes continue that the driver holds locked."""
    for image in swap.living(host):
        if checkpoint.state(image.pid) == LOCKED:
            with _unless_ended(host, image.pid):
                checkpoint.unlock(image.pid)


# -- the guard ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded(host: Host, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Run a guard process for as long as the block runs: it repairs the swap if this process dies, or the block fails.

    After a failed block, Ctrl-C included, this process waits until the guard has repaired the swap.
    Raises OperationFailed: the guard does not start (code ``guard_failed``); nothing was begun.
    """
    guard = Guard(host.spec, "repairs a swap if gpushare dies", "gpushare.memory.swap:repair_after_death")
    guard.wait_ready()
    # Without a word the guard repairs (`repair_after_death`).
    word: str | None = None
    try:
        yield
        word = DONE
    finally:
        guard.leave(word)
        if not guard.wait(SAY_SECONDS):
            say("waits until the guard has finished the interrupted swap")
            guard.wait()


# -- what a death left -------------------------------------------------------------------------------------------------


def settle_half_out(host: Host, swap: Swap, checkpoint: Checkpoint, *, was_refused: bool = False) -> None:
    """Bring a job that is half out to one state: all of it running if the GPU has room, else all of it out.

    ``was_refused``: the driver has just refused to restore it, so what is out stays out. The caller holds the lock.

    Raises:
        TimedOut, NotSupported: the driver does not answer, or is not there; the record stays.
        InUse: a process is stopped; the record stays.
    """
    living = swap.living(host)
    if not living:
        forget(swap)
        return
    checkpoint.check_available()
    refuse_stopped_swap(host, swap)
    states = {image.pid: checkpoint.state(image.pid) for image in living}
    hanging = next((pid for pid in states if checkpoint.hangs(pid)), None)
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
    is_partly_out = CHECKPOINTED in states.values()
    if is_partly_out and was_refused:
        _take_out_rest(host, swap, checkpoint, states)
        return
    need = sum(image.memory_bytes for image in living if states[image.pid] == CHECKPOINTED)
    with room_kept(host, swap, need) if is_partly_out else contextlib.nullcontext(True) as has_room:
        if not has_room:
            _take_out_rest(host, swap, checkpoint, states)
            return
        _restore_all(host, swap, checkpoint)
        _unlock(host, swap, checkpoint)
        # Its end needs care from now on if a process of it was ever restored (`checkpoint_before_kill`).
        if is_partly_out or swap.restored or swap.state != LEAVING:
            write_if_living(host, replace(swap, state=BACK, restored=True, left_uuid=None, arrived=()))
        else:
            forget(swap)


def _take_out_rest(host: Host, swap: Swap, checkpoint: Checkpoint, states: Mapping[int, int | None]) -> None:
    """Copy the processes that are still on the GPU, by their ``states``, to host memory, and note that all of the job is out.

    If its user's record says so too, root drops its own: the user may bring the job in.
    """
    for image in swap.images:
        state = states.get(image.pid)
        with _unless_ended(host, image.pid):
            if state == RUNNING:
                checkpoint.lock(image.pid, LOCK_SECONDS)
            if state in {RUNNING, LOCKED}:
                checkpoint.checkpoint(image.pid, image.memory_bytes)
    records_of_users = [record for record in SWAPS.all(host) if record.keeper_uid]
    if any(record.state == OUT and same_job(record, swap) for record in records_of_users):
        forget(swap)
    else:
        write_if_living(host, replace(swap, state=OUT))


def _with_arrived(host: Host, swap: Swap) -> Swap:
    """Return the record of a moving job with the processes that NVML now lists on the new GPU as arrived."""
    if swap.left_uuid is None:
        return swap
    new_gpus = [gpu for gpu in host.nvml.sweep() if gpu.uuid == swap.gpu_uuid]
    on_new_gpu = {process.pid for gpu in new_gpus for process in gpu.processes or ()}
    arrived = {image.pid for image in swap.images} & on_new_gpu | set(swap.arrived)
    return replace(swap, arrived=tuple(sorted(arrived)))


def repair(host: Host, say: Callable[[str], None] = lambda _: None) -> list[Swap]:
    """Complete or undo the swaps of this user that a killed gpushare has begun; return their records of before.

    Records of ended jobs are removed, and one that still says out of a job that is back (`is_back`) is corrected. The lock
    is taken here, but only if there is something to repair.
    """

    def needs_repair(swap: Swap) -> bool:
        return swap.state in {LEAVING, RETURNING} or is_back(host, swap)

    to_repair = [swap for swap in swaps(host, shared=False) if needs_repair(swap)]
    if not to_repair:
        return []
    changed = []
    with locked(host, say=say):
        for swap in to_repair:
            # Another gpushare may have finished it before this one had the lock.
            record = SWAPS.read(swap.path)
            if record is None or not needs_repair(record):
                continue
            settle_half_out(host, record, host.open_checkpoint())
            if record.state != OUT:
                changed.append(record)
    return changed


def repair_first(host: Host, say: Callable[[str], None], *, dry_run: bool) -> list[Swap]:
    """Repair what a gpushare that died has left, before a command does its own work; return the jobs. Not in a dry run."""
    if dry_run:
        return []
    repaired = repair(host, say)
    for job in repaired:
        say(f"{job.title}: a swap that was interrupted has been completed or taken back; see: gpushare swap list")
    return repaired


def repair_after_death(host: Host, _processes: object, _word: str) -> None:
    """Do what the guard of a gpushare that died does: finish or undo the swaps that it had begun.

    It tries again after longer and longer pauses, and gives up silently after the last: nobody reads what it says.
    """
    for seconds in _REPAIR_PAUSES_SECONDS:
        time.sleep(seconds)
        try:
            repair(host)
        except (GpushareError, OSError):
            continue
        return


def is_back(host: Host, swap: Swap) -> bool:
    """Return whether a job is on the GPU although its record says out: on a full disk the record could not be written."""
    if swap.state != OUT:
        return False
    checkpoint = host.open_checkpoint()
    return all(checkpoint.state(image.pid) == RUNNING for image in swap.living(host))


# -- the end of a job that was restored --------------------------------------------------------------------------------


def checkpoint_before_kill(host: Host, pids: Sequence[int]) -> None:
    """Checkpoint those of these processes that were swapped before, because they are about to be killed.

    Killing a restored process has hung a whole host (NVIDIA/cuda-checkpoint issue 53); a checkpointed one ends safely.
    """
    if not any(set(pids) & {image.pid for image in swap.images} for swap in swaps(host)):
        return
    with contextlib.ExitStack() as stack:
        # A swap that is on its way, or the guard that repairs it, comes first: it must not bring back what is killed.
        with contextlib.suppress(GpushareError):
            stack.enter_context(locked(host, seconds=_END_SECONDS))
        for swap in swaps(host):
            restored = [image for image in swap.living(host) if image.pid in pids]
            if restored and (swap.restored or swap.state in {RETURNING, BACK}):
                _checkpoint_restored(host, swap, restored)


def _checkpoint_restored(host: Host, swap: Swap, restored: Sequence[Image]) -> None:
    """Checkpoint these processes of a job that was restored before; what fails is left."""
    checkpoint = host.open_checkpoint()
    # A stopped process hangs the lock.
    signal_all(host.processes, starts_of(host.processes, [image.pid for image in restored]), signal.SIGCONT)
    for pid, _, size in restored:
        free = or_none(partial(host.machine.free_memory, pid))
        if free is not None and free < size + HOST_MARGIN_BYTES:
            continue
        with contextlib.suppress(GpushareError):
            if checkpoint.state(pid) == RUNNING:
                checkpoint.lock(pid, LOCK_SECONDS)
            if checkpoint.state(pid) == LOCKED:
                checkpoint.checkpoint(pid, size)
    if swap.state == RETURNING and swap.keeper_uid is None:
        # A guard that comes later must not bring the job back.
        with contextlib.suppress(GpushareError):
            write_if_living(host, replace(swap, state=OUT))
