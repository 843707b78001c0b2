"""A whole job out of the GPU into host memory, and back: the plans of `gpushare swap`; done by `gpushare/memory/`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import field, replace
from functools import partial

from gpushare.base.errors import BadUsage, GpushareError, InUse, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.selection import Device
from gpushare.base.units import format_bytes
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.hostfile.kept import kept_limits
from gpushare.memory.room import bytes_reserved_by, room_reserved
from gpushare.memory.swap import (
    check_host,
    come_in,
    find_swapped_out,
    go_out,
    guarded,
    leaving_record,
    refuse_stopped_swap,
    repair_first,
)
from gpushare.memory.swapped import (
    BACK,
    LOST,
    OUT,
    Swap,
    ended_swap,
    find_swap,
    gpu_of,
    is_swapped_by_other,
    locked,
    lost_error,
    own_record,
    swap_from_driver_state,
    swaps,
)
from gpushare.plan import Plan, Step
from gpushare.run.jobs import consent_to, find_job, job_of, processes_to_swap
from gpushare.show.waiting import waiting_line
from gpushare.timeslice.slices import renew_slices


@dataclass
class SwapWork:
    """The way of one job out of the GPU or back: the plan, and the job's record before it.

    When the plan is carried out, it appends the record of after it to ``done``.
    """

    plan: Plan
    before: Swap
    done: list[Swap] = field(default_factory=list)

    @property
    def swap(self) -> Swap:
        """Return the record of the job: as the plan left it, or before that as it was planned."""
        return self.done[0] if self.done else self.before


def plan_swap_out(host: Host, text: str, say: Callable[[str], None], *, dry_run: bool = False) -> SwapWork:
    """Plan to swap a job, by name or PID, out of its GPU into host memory.

    Swaps that a killed gpushare left halfway are completed or taken back first, unless it is a dry run.

    Raises:
        NotFound, BadUsage: there is no such job (`jobs.find_job`), or it is not on a GPU.
        NoPermission: it belongs to another user.
        NotSupported: this host, GPU or job cannot do it; the code says why.
        InUse: it is out already (``already_out``).
    """
    job = find_job(host, text)
    # Only raises here, before the repair changes something; what to ask is known when its processes are.
    consent_to(host, job, "swaps out")
    check_host(host)
    repair_first(host, say, dry_run=dry_run)
    present = find_swapped_out(host, job)
    # The repair corrects no record of another user. If that user is swapping the job now, `go_out` waits for it.
    if present is not None and not is_swapped_by_other(present):
        raise _already_out_error(present)
    processes = processes_to_swap(host, job)
    losses = consent_to(host, job, "swaps out", [process.pid for process in processes])
    gpu = gpu_of(host.nvml.sweep(), processes[0].gpus[0], job.title)
    if gpu.mig_enabled:
        raise NotSupported(
            f"{job.title} is on a MIG instance of GPU {gpu.index}, and such jobs cannot be swapped",
            "pause it instead: gpushare pause JOB",
            gpu=gpu.index,
            code="mig_enabled",
        )
    swap = leaving_record(host, job, gpu.uuid or "", processes, bytes_reserved_by(host, job, processes))
    done: list[Swap] = []

    def act() -> None:
        """Swap the job out, unless that was done meanwhile."""
        with guarded(host, say), locked(host, say=say):
            present = find_swapped_out(host, job)
            if present is not None and present.state in {OUT, LOST}:
                raise _already_out_error(present)
            done.append(go_out(host, swap, lambda: processes_to_swap(host, job)))

    pids = " ".join(str(process.pid) for process in processes)
    undo = f"gpushare swap in {job.selector}"
    step = Step(
        what=f"copy {format_bytes(swap.memory_bytes)} of {job.title} from GPU {gpu.index} to host memory",
        command=f"for pid in {pids}; do cuda-checkpoint --action lock --pid $pid; cuda-checkpoint --action checkpoint --pid $pid; done",
        undo=undo,
        do=act,
    )
    plan = Plan(
        title=f"{job.title} is swapped out of GPU {gpu.index}, with {format_bytes(swap.memory_bytes)} in host memory",
        steps=(step,),
        undo=undo,
        consent=losses,
    )
    return SwapWork(plan, swap, done)


def plan_swap_in(
    host: Host,
    text: str,
    seconds: float | None,
    say: Callable[[str], None],
    *,
    quiet: bool,
    dry_run: bool = False,
) -> SwapWork:
    """Plan to swap a job, by name or PID, back in to its GPU; it waits this long for room there (None: without end).

    Raises:
        NotFound: it is not out (``not_out``), has ended, or its GPU is gone.
        OperationFailed: the driver has lost it.
        NotSupported: its GPU is in MIG mode now.
        NoPermission: it belongs to another user.
    """
    # Read before the repair, which forgets what has ended.
    ended = ended_swap(host, text)
    repaired = repair_first(host, say, dry_run=dry_run)
    try:
        named = _swapped_out_job(host, text, ended)
        swap = own_record(host, named)
    except NotFound:
        back = next((each for each in repaired if each.is_named(text) and each.living(host)), None)
        if back is None:
            raise
        # The repair has brought it back.
        plan = Plan(title=f"{back.title} is back already", steps=(), undo=f"gpushare swap out {back.selector}")
        return SwapWork(plan, replace(back, state=BACK, restored=True))
    living = swap.identities(host)
    # Its first process, whose PID names it, may have ended: then another one tells whose job it is.
    process = living[0] if living else Identity(swap.pid, swap.started)
    job = replace(job_of(host, process, swap.name), pid=swap.pid)
    losses = consent_to(host, job, "swaps in", [identity.pid for identity in living])
    # What root itself has swapped out comes back unasked, as root resumes what it has paused.
    is_own_swap = any(each.pid == named.pid and each.keeper_uid is None for each in swaps(host))
    if swap.state == LOST:
        raise lost_error(swap)
    refuse_stopped_swap(host, swap)
    device = Device(gpu=gpu_of(host.nvml.sweep(), swap.gpu_uuid, swap.title))
    if device.gpu.mig_enabled:
        raise NotSupported(
            f"{device.title} is in MIG mode now, and {swap.title} came from the whole GPU",
            f"when its instances are free: sudo gpushare mig disable -g {device.gpu.index}",
            gpu=device.gpu.index,
            code="mig_enabled",
        )
    done: list[Swap] = []
    pids = " ".join(str(identity.pid) for identity in living)
    undo = f"gpushare swap out {swap.selector}"
    step = Step(
        what=f"copy {format_bytes(swap.memory_bytes)} of {swap.title} back to {device.title}",
        command=f"for pid in {pids}; do cuda-checkpoint --action restore --pid $pid; cuda-checkpoint --action unlock --pid $pid; done",
        undo=undo,
        do=lambda: done.append(_wait_and_return(host, text, swap, device, seconds, say, quiet=quiet)),
    )
    plan = Plan(
        title=f"{swap.title} is back on {device.title}, with {format_bytes(swap.memory_bytes)}",
        steps=(step,),
        undo=undo,
        consent=() if is_own_swap else losses,
    )
    return SwapWork(plan, swap, done)


def _wait_and_return(
    host: Host,
    text: str,
    swap: Swap,
    device: Device,
    seconds: float | None,
    say: Callable[[str], None],
    *,
    quiet: bool,
) -> Swap:
    """Wait for room, and bring a job back; wait again if a program without a place in the line took the room first.

    Where the line cannot be written, as on a full disk, the job comes back without a place in it if the GPU has room.
    After ``seconds`` (None: never) it is tried once more without a wait; then InUse is raised (code ``no_room``).
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    limits = kept_limits(host)
    while True:
        wait_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            with room_reserved(host, [device], swap, wait_seconds, limits, partial(waiting_line, say, quiet=quiet)):
                return _return_now(host, text, swap, say)
        except InUse as error:
            # `room_reserved` raises it, too, when the time is over.
            is_without_room = error.code == "no_room"
            if not is_without_room or wait_seconds == 0.0:
                raise
        except (NoPermission, OperationFailed) as error:
            if error.code != "lease_unusable":
                raise
            say(f"{error.message}; so it comes back without a place in the line, if there is room")
            return _return_now(host, text, swap, say)


def _return_now(host: Host, text: str, swap: Swap, say: Callable[[str], None]) -> Swap:
    """Bring a job back, for which there is room, and renew its slices. Raises InUse (code ``no_room``) and as `come_in`."""
    with guarded(host, say), locked(host, say=say):
        swap = come_in(host, own_record(host, _swapped_out_job(host, text, swap)))
        renew_slices(host, swap.identities(host), say)
        return swap


def _already_out_error(swap: Swap) -> GpushareError:
    """Return the error about a job that is swapped out already, or lost."""
    if swap.state == LOST:
        return lost_error(swap)
    return InUse(
        f"{swap.title} is already swapped out (state {swap.state})",
        f"bring it back: gpushare swap in {swap.selector}",
        code="already_out",
    )


def _swapped_out_job(host: Host, text: str, earlier: Swap | None) -> Swap:
    """Return the record of the swapped-out job with this name or PID.

    ``earlier`` is the record of a job that had it before, for the error: that job has ended meanwhile.

    Raises:
        NotFound: no job has it (``no_job``), it has ended, or is not swapped out (``not_out``).
        BadUsage: several users have such a job (``ambiguous_job``).
    """
    # By its record first: the process whose PID names it may have ended before its other processes.
    named = [swap for swap in swaps(host) if swap.state != BACK and swap.is_named(text)]
    # This user's and root's before those of others, which only root sees.
    nearest = [swap for swap in named if swap.keeper_uid in {None, 0}] or named
    if len(nearest) > 1:
        raise BadUsage(
            f"{len(named)} users have a swapped-out job '{text}'",
            f"give a PID: {', '.join(str(swap.pid) for swap in named[:5])}",
            code="ambiguous_job",
        )
    if nearest:
        return nearest[0]
    try:
        job = find_job(host, text)
    except NotFound:
        if earlier is None:
            raise
        raise NotFound(
            f"{earlier.title} ended while it was swapped out", "see swapped jobs: gpushare swap list", code="no_job"
        ) from None
    swap = find_swap(host, job.pid, job.name)
    if swap is None:
        swap = swap_from_driver_state(host, job.pid, job.name, job.uid)
    if swap is None or swap.state == BACK:
        raise NotFound(f"{job.title} is not swapped out", "see swapped jobs: gpushare swap list", code="not_out")
    return swap
