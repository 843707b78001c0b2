"""Swapped jobs: their records, the lock of these, and the room that such a job needs to come back.

A record is on the disk before the driver touches the first process (`swap.py`), and stays until the job has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

from gpushare.base.errors import GpushareError, InUse, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.model import Gpu
from gpushare.base.typed import Count, JobName, Most, Pid, Shown, Within
from gpushare.base.units import MIB
from gpushare.base.values import dataclass
from gpushare.host.checkpoint import CHECKPOINTED
from gpushare.host.host import Host
from gpushare.host.identity import Identity, uptime
from gpushare.host.process import info_of
from gpushare.host.store import Kept, Named, Past, RecordStore, with_living_pid

# States of a record. `back`: it is on the GPU again.
LEAVING, OUT, RETURNING, BACK, LOST = "leaving", "out", "returning", "back", "lost"
# Another swap of this user takes as long as its copy. After a moment the one that waits says so.
SAY_SECONDS: Final = 2.0
# Left free on the GPU besides the job itself.
GPU_MARGIN_BYTES: Final = 256 * MIB


class Image(NamedTuple):
    """A process of a job that is swapped out or being swapped: identity, and bytes held in host memory or on the GPU."""

    pid: Pid
    started: Count
    memory_bytes: Count

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started)


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
        return tuple(image for image in self.images if host.processes.alive(image.pid, image.started))

    def identities(self, host: Host) -> list[Identity]:
        """Return its processes that still run."""
        return [image.identity for image in self.living(host)]


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
        with_living_pid(host, replace(swap, images=living), living) for swap in records if (living := swap.living(host))
    ]

    def rank(swap: Swap) -> tuple[bool, float, bool]:
        """Return a sort key: of several records of one job, the one with the lowest key counts."""
        # keeper_uid is None for this user's own records.
        is_of_root = swap.keeper_uid == 0 or (swap.keeper_uid is None and host.root)
        is_out_by_root = is_of_root and swap.state != BACK
        # Where the times are the same, root has put back what its user had taken out.
        return not is_out_by_root, -swap.since, not is_of_root

    chosen: list[Swap] = []
    for swap in sorted(living_swaps, key=rank):
        if not any(same_job(swap, other) for other in chosen):
            chosen.append(swap)
    return [swap for swap in living_swaps if swap in chosen]


def same_job(swap: Swap, other: Swap) -> bool:
    """Return whether two records are of one job: they have a process in common."""
    return not {image.identity for image in swap.images}.isdisjoint(image.identity for image in other.images)


def find_swap(host: Host, pid: int, name: str | None = None) -> Swap | None:
    """Return the record of the job with this first process, or of a part of it that was swapped by its own PID, or None.

    A record of a swapped-out job comes before one of a job that is back. A job that was swapped out while it started has
    gpushare's PID in its record and is found by its name.
    """
    records = swaps(host)
    if not records:
        return None
    family = set(host.processes.descendants(pid))
    uid = info_of(host.processes, pid).uid
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


def swap_from_driver_state(host: Host, pid: int, name: str | None, uid: int | None) -> Swap | None:
    """Return a record made up for a job that has no readable one but is swapped out by the driver's word; else None.

    It says at least what the job needs: as bytes all that its processes have in host memory, as GPU, which is unknown, the
    fullest one: if that has room, every GPU has.
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
    """Hold the lock of this user's swaps; wait at most ``seconds`` for another gpushare that has it (None: without end).

    Raises:
        NoPermission, OperationFailed: it cannot be created.
        InUse: another gpushare has it for longer (code ``swap_busy``).
    """
    reported = False

    def on_wait(waited_seconds: float) -> None:
        """Give up after ``seconds``; before that, say once that this gpushare waits."""
        nonlocal reported
        if seconds is not None and waited_seconds >= seconds:
            raise InUse(
                "another gpushare of this user is swapping a job",
                "try again when it is done: gpushare swap list",
                code="swap_busy",
            )
        if waited_seconds >= SAY_SECONDS and not reported:
            reported = True
            say("waits until another gpushare of this user has swapped its job")

    with SWAPS.locked(host, on_wait=on_wait):
        yield


def forget_ended(host: Host, seconds: float = 0.0) -> None:
    """Remove this user's records of jobs that have ended, unless another gpushare has their lock for ``seconds``."""
    with contextlib.suppress(GpushareError), locked(host, seconds=seconds):
        SWAPS.sweep(host)


def ended_swap(host: Host, text: str) -> Swap | None:
    """Return this user's record of the job with this name or PID if that job has ended; None: no such record is left."""
    records = SWAPS.all(host, shared=False)
    return next((swap for swap in records if swap.is_named(text) and not swap.living(host)), None)


def forget(swap: Swap) -> None:
    """Remove a record; one that cannot be removed stays, and a later sweep removes it."""
    with contextlib.suppress(GpushareError):
        SWAPS.forget(swap.path)


def write_if_living(host: Host, swap: Swap) -> None:
    """Write a record; if the job has ended meanwhile, remove it: whoever ended it looked for a record before this one."""
    SWAPS.write(swap)
    if not swap.living(host):
        forget(swap)


def has_room(host: Host, swap: Swap, size: int) -> bool | None:
    """Return whether this number of bytes and a margin are free on the GPU of a job; None: unknown.

    If no other process is on that GPU, no margin is needed: the job had fitted there.
    """
    own_pids = {image.pid for image in swap.images}
    for gpu in host.nvml.sweep():
        if gpu.uuid == swap.gpu_uuid and gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None:
            free = gpu.memory_total_bytes - (gpu.memory_reserved_bytes or 0) - gpu.memory_used_bytes
            alone = gpu.processes is not None and {process.pid for process in gpu.processes} <= own_pids
            return size <= (free if alone else free - GPU_MARGIN_BYTES)
    return None


def gpu_of(gpus: Iterable[Gpu], index_or_uuid: int | str, title: str) -> Gpu:
    """Return the GPU that a job leaves, or comes back to. Raises NotFound: it is gone (code ``unknown_gpu``)."""
    # Not by `select`: a record that a user has written may say "all".
    gpu = next((gpu for gpu in gpus if gpu.uuid and index_or_uuid in {gpu.index, gpu.uuid}), None)
    if gpu is None:
        raise NotFound(f"the GPU of {title} is gone", "see: gpushare status", code="unknown_gpu")
    return gpu


def several_gpus_error(job: Named, gpus: Sequence[int]) -> NotSupported:
    """Return the error about a job on several GPUs, of these indexes."""
    return NotSupported(
        f"{job.title} is on GPUs {', '.join(map(str, gpus))}, and only jobs on one GPU can be swapped or moved",
        f"pause it instead: gpushare pause {job.selector}",
        code="several_gpus",
    )


def lost_error(swap: Swap) -> OperationFailed:
    """Return the error about a job whose restore has failed for good."""
    return OperationFailed(
        f"{swap.title} is lost: the driver could not put it back",
        f"end it: gpushare stop {swap.selector}",
        code="job_lost",
    )


def is_swapped_by_other(swap: Swap) -> bool:
    """Return whether this is another user's record that says that the job is being swapped now."""
    return swap.keeper_uid is not None and swap.state in {LEAVING, RETURNING}


def own_record(host: Host, swap: Swap) -> Swap:
    """Return the record with which this user may bring in a swapped-out job: for another user's job, root's own copy of it.

    Raises NoPermission: root has taken it out (code ``swapped_by_root``).
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
