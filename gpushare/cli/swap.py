"""``gpushare swap``: a whole job out of the GPU into host memory, and back; done by `gpushare/memory/`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.base.errors import (
    BadCombination,
    BadUsage,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    OperationFailed,
    or_none,
)
from gpushare.base.values import dataclass
from gpushare.cli.options import AskingCommand, Command, Group, carried_out, note, settings
from gpushare.show.plan import PlanAnswer, with_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpushare.base.selection import Device
    from gpushare.host.host import Host
    from gpushare.memory.ledger import Request
    from gpushare.memory.swap import Swap

group = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Move a whole job out of the GPU into host memory, and back.",
)
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job by name or PID.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(group, name="swap", cls=Group, short_help="Move a job out of the GPU into host memory, and back.")
    group.command("out", cls=AskingCommand, short_help="Move a job into host memory.")(out)
    group.command("in", cls=AskingCommand, short_help="Bring a job back when the GPU has room.")(back_in)
    group.command("list", cls=Command, short_help="List the jobs that are out.")(listed)


def out(job: JobArgument) -> Any:
    """Move a job out of the GPU into host memory: it holds no device memory until it comes back.

    The driver waits for its GPU work, copies its memory (about 2 GB per second on an H200) and frees the GPU. Its CPU side
    goes on until it next uses the GPU. All its processes go together. Not under MPS, not on MIG instances, and not for
    jobs that use NCCL or CUDA IPC, which the driver refuses.
    """
    from gpushare.base.units import format_bytes
    from gpushare.memory.room import repair_first, room_kept
    from gpushare.memory.swap import (
        BACK,
        LOST,
        OUT,
        check_host,
        find_swap,
        go_out,
        guarded,
        is_back,
        is_on_its_way,
        leaving,
        locked,
    )
    from gpushare.plan import Plan, Step
    from gpushare.run.jobs import consent_to, find_job, processes_to_swap

    host = settings.connect()
    found = find_job(host, job)
    consent_to(host, found, "swaps out")
    check_host(host)
    repair_first(host, note, dry_run=settings.dry_run)
    before = find_swap(host, found.pid, found.name)
    # The record of another user, which is not corrected here; if he is swapping it now, `go_out` waits for him.
    if (
        before is not None
        and before.state != BACK
        and not is_on_its_way(before)
        and not is_back(host, before, host.open_checkpoint())
    ):
        raise _already(before)
    processes = processes_to_swap(host, found)
    losses = consent_to(host, found, "swaps out", [process.pid for process in processes])
    gpu = next((one for one in host.nvml.sweep() if one.index == processes[0].gpus[0]), None)
    if gpu is None or gpu.uuid is None:
        raise NotFound(f"GPU {processes[0].gpus[0]} is gone", "see: gpushare status", code="unknown_gpu")
    if gpu.mig_enabled:
        raise NotSupported(
            f"{found.title} is on a MIG instance of GPU {gpu.index}, and such jobs cannot be swapped",
            "pause it instead: gpushare pause JOB",
            gpu=gpu.index,
            code="mig_enabled",
        )
    swap = leaving(
        host,
        pid=found.pid,
        started=found.started,
        name=found.name,
        uid=found.uid,
        gpu_uuid=gpu.uuid,
        processes=processes,
    )
    done: list[Swap] = []

    def act() -> None:
        with guarded(host, note), locked(host, say=note):
            again = find_swap(host, found.pid, found.name)
            checkpoint = host.open_checkpoint()
            if again is not None and again.state in {OUT, LOST} and not is_back(host, again, checkpoint):
                raise _already(again)
            done.append(go_out(host, swap, checkpoint, lambda: processes_to_swap(host, found), room_kept))

    pids = " ".join(str(process.pid) for process in processes)
    what = f"copy {format_bytes(swap.memory_bytes)} of {found.title} from GPU {gpu.index} to host memory"
    gone = f"{found.title} is out of GPU {gpu.index}, with {format_bytes(swap.memory_bytes)} in host memory"
    undo = f"gpushare swap in {found.selector}"
    step = Step(
        what=what,
        command=f"for pid in {pids}; do cuda-checkpoint --action lock --pid $pid; cuda-checkpoint --action checkpoint --pid $pid; done",
        undo=undo,
        do=act,
    )
    result = carried_out("swap out", Plan(title=gone, steps=(step,), undo=undo, consent=losses))
    return _with_job(result, done[0] if done else swap)


def back_in(
    job: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the GPU has room, first come first served.")] = False,
    wait_timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="With --wait: give up after this time: 10m. [default: never]"),
    ] = None,
) -> Any:
    """Bring a job back to its GPU and let it continue.

    Its room is reserved first: the driver never tries a failed restore again, and the job would be lost. Without room
    nothing happens (exit code 19), or with --wait it waits. What root has swapped out, root brings back.
    """
    from gpushare.base.units import format_bytes, parse_seconds
    from gpushare.hostfile.kept import kept_limits
    from gpushare.memory.ledger import Request
    from gpushare.memory.room import back_bytes, repair_first
    from gpushare.memory.swap import BACK, LOST, check_continues, ended_swap, lost, taken_over
    from gpushare.plan import Plan, Step

    if wait_timeout is not None and not wait:
        raise BadCombination("--timeout belongs to --wait", "gpushare swap in JOB --wait --timeout 10m")
    seconds = 0.0 if not wait else None if wait_timeout is None else parse_seconds(wait_timeout)
    host = settings.connect()
    gone = ended_swap(host, job)
    repaired = repair_first(host, note, dry_run=settings.dry_run)
    try:
        swap = taken_over(host, _out_now(host, job, gone))
    except NotFound:
        back = next((one for one in repaired if one.is_named(job) and one.living(host)), None)
        if back is None:
            raise
        # The repair has brought it back.
        plan = Plan(title=f"{back.title} is back already", steps=(), undo=f"gpushare swap out {back.selector}")
        return _with_job(carried_out("swap in", plan), replace(back, state=BACK, restored=True))
    losses = _consent(host, swap)
    if swap.state == LOST:
        raise lost(swap)
    check_continues(host, swap)
    device = _device_of(host, swap)
    need = back_bytes(host, device, swap.memory_bytes)
    request = Request(memory_bytes=need, keys=(swap.gpu_uuid,), client=False, name=swap.name)
    limits = kept_limits(host).without(os.geteuid())
    done: list[Swap] = []
    pids = " ".join(str(pid) for pid, _, _ in swap.living(host))
    what = f"copy {format_bytes(swap.memory_bytes)} of {swap.title} back to {device.title}"
    back_on = f"{swap.title} is back on {device.title}, with {format_bytes(swap.memory_bytes)}"
    undo = f"gpushare swap out {swap.selector}"
    step = Step(
        what=what,
        command=f"for pid in {pids}; do cuda-checkpoint --action restore --pid $pid; cuda-checkpoint --action unlock --pid $pid; done",
        undo=undo,
        do=lambda: done.append(_come_back(host, job, swap, device, request, limits, seconds)),
    )
    notes = (_room_now(host, device, request, limits, wait=wait),) if settings.dry_run else ()
    result = carried_out("swap in", Plan(title=back_on, steps=(step,), undo=undo, consent=losses, notes=notes))
    return _with_job(result, done[0] if done else swap)


def _device_of(host: Host, swap: Swap) -> Device:
    """Return the GPU that a job comes back to. Raises NotFound, NotSupported."""
    from gpushare.base.selection import Device

    # Not by `select`: a record that a user has written may say "all".
    gpu = next((one for one in host.nvml.sweep() if one.uuid == swap.gpu_uuid), None)
    if gpu is None:
        raise NotFound(
            f"the GPU that {swap.title} came from is gone ({swap.gpu_uuid})", "see: gpushare status", code="unknown_gpu"
        )
    if gpu.mig_enabled:
        raise NotSupported(
            f"GPU {gpu.index} is in MIG mode now, and {swap.title} came from the whole GPU",
            f"when its instances are free: sudo gpushare mig disable -g {gpu.index}",
            gpu=gpu.index,
            code="mig_enabled",
        )
    return Device(gpu=gpu)


def _come_back(
    host: Host,
    text: str,
    swap: Swap,
    device: Device,
    request: Request,
    limits: Mapping[int, int],
    seconds: float | None,
) -> Swap:
    """Wait for room, and bring a job back; wait again if a program that keeps no place was faster.

    Where the ledger cannot be written, as on a full disk, it comes back without a place there if the GPU has room.
    """
    from gpushare.memory.ledger import Place
    from gpushare.memory.room import wait_for_room
    from gpushare.memory.swap import come_in, guarded, locked, taken_over
    from gpushare.show.waiting import waiting_line

    ends = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if ends is None else max(0.0, ends - time.monotonic())
        place: Place | None = None
        try:
            try:
                place = Place(host, request)
                with waiting_line(note, quiet=settings.quiet) as draw:
                    wait_for_room(host, place, [device], left, limits, draw)
            except (NoPermission, OperationFailed) as error:
                if error.code != "lease_unusable":
                    raise
                note(f"{error.message}; so it comes back without a place in the line, if there is room")
                left = 0.0
            with guarded(host, note), locked(host, say=note):
                return come_in(host, taken_over(host, _out_now(host, text, swap)), host.open_checkpoint())
        except InUse as error:
            if error.code != "no_room" or left == 0.0:
                raise
        finally:
            if place is not None:
                place.leave()


def _room_now(host: Host, device: Device, request: Request, limits: Mapping[int, int], *, wait: bool) -> str:
    from gpushare.memory.room import outlook, outlook_text

    found = outlook(host, [device], request, limits)
    if not found.devices:
        text = outlook_text(found, {})
        return text if wait else text.replace("now it would wait for", "now there is no room for", 1)
    return f"now there is room: {outlook_text(found, {}).rpartition(': ')[2]}"


def listed() -> Any:
    """List the jobs that are out: this user's, and those that root has swapped out. Root sees those of all users."""
    from gpushare.base.units import format_bytes
    from gpushare.memory.swap import BACK, swaps
    from gpushare.show.result import Column, Result, Table

    host = settings.connect()
    out = [swap for swap in swaps(host) if swap.state != BACK]
    # Without a driver, the list is there all the same.
    gpus = (or_none(host.nvml.identities) if out else None) or ()
    indexes = {gpu.uuid: gpu.index for gpu in gpus}
    rows = tuple(_row(one, indexes.get(one.gpu_uuid)) for one in out)
    columns = (
        Column(key="gpu", title="GPU", right=True),
        Column(key="pid", title="pid", right=True),
        Column(key="name", title="name", optional=True),
        Column(key="user", title="user", rank=2),
        Column(key="state", title="state"),
        Column(key="memory_bytes", title="memory", right=True, format=format_bytes),
        Column(key="gpu_uuid", title="GPU UUID", rank=2),
        Column(key="since", title="since", format=lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))),
    )
    return Result(
        command="swap list",
        data=SwapListAnswer(jobs=rows),
        tables=(Table(name="jobs", columns=columns, rows=tuple(map(vars, rows)), empty="no job is swapped out"),),
    )


def _consent(host: Host, swap: Swap) -> Any:
    """Return what to ask before another user's job comes back, as root."""
    from gpushare.run.jobs import Job, consent_to

    pids = [pid for pid, _, _ in swap.living(host)]
    info = host.processes.describe(pids[0]) if pids else None
    job = Job(
        pid=swap.pid,
        started=swap.started,
        uid=None if info is None else info.uid,
        user=None if info is None else info.user,
        name=swap.name,
    )
    return consent_to(host, job, "swaps in", pids)


@dataclass(frozen=True, kw_only=True)
class SwappedProcess:
    """A process that is out of the GPU."""

    pid: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SwapRow:
    """A job that is out of the GPU, or on its way."""

    # Null: its GPU is unknown, or the answer is about this job alone.
    gpu: int | None
    pid: int
    name: str | None
    uid: int | None
    user: str | None
    # Who has swapped it out; null: this user.
    by: str | None
    state: str
    memory_bytes: int
    gpu_uuid: str
    # Seconds since 1970.
    since: float
    # How long the way out took.
    out_seconds: float | None
    processes: tuple[SwappedProcess, ...]


@dataclass(frozen=True, kw_only=True)
class SwapAnswer(PlanAnswer):
    """The answer of `swap out` and `swap in`."""

    job: SwapRow


@dataclass(frozen=True, kw_only=True)
class SwapListAnswer:
    """The answer of `swap list`."""

    jobs: tuple[SwapRow, ...]


def _row(swap: Swap, gpu: int | None = None) -> SwapRow:
    from gpushare.host.capabilities import user_name
    from gpushare.host.store import wall_time

    return SwapRow(
        gpu=gpu,
        pid=swap.pid,
        name=swap.name,
        uid=swap.uid,
        user=None if swap.uid is None else user_name(swap.uid),
        by=None if swap.keeper_uid is None else user_name(swap.keeper_uid),
        state=swap.state,
        memory_bytes=swap.memory_bytes,
        gpu_uuid=swap.gpu_uuid,
        since=wall_time(swap.since),
        out_seconds=swap.out_seconds,
        processes=tuple(SwappedProcess(pid=pid, memory_bytes=size) for pid, _, size in swap.images),
    )


def _with_job(result: Any, swap: Swap) -> Any:
    return with_answer(result, SwapAnswer, job=_row(swap))


def _already(swap: Swap) -> GpushareError:
    from gpushare.memory.swap import LOST, lost

    if swap.state == LOST:
        return lost(swap)
    return InUse(
        f"{swap.title} is out already (state {swap.state})",
        f"bring it back: gpushare swap in {swap.selector}",
        code="already_out",
    )


def _out_now(host: Host, text: str, gone: Swap | None) -> Swap:
    """Return the job with this name or PID, which is out now; ``gone`` had it before, and may have ended."""
    from gpushare.memory.swap import BACK, check_here, find_swap, out_by_driver, swaps
    from gpushare.run.jobs import find_job

    # By its record first: the process that it is named after may have ended before the others.
    named = [one for one in swaps(host) if one.state != BACK and one.is_named(text)]
    ours = [one for one in named if one.keeper_uid in {None, 0}]
    if len(ours or named) > 1:
        raise BadUsage(
            f"{len(named)} users have a job '{text}' that is out",
            f"give a PID: {', '.join(str(one.pid) for one in named[:5])}",
            code="ambiguous_job",
        )
    if named:
        return (ours or named)[0]
    try:
        job = find_job(host, text)
    except NotFound:
        check_here(host, text)
        if gone is None:
            raise
        raise NotFound(
            f"{gone.title} has ended while it was out", "see what is out: gpushare swap list", code="no_job"
        ) from None
    swap = find_swap(host, job.pid, job.name)
    if swap is None:
        check_here(host, text)
        swap = out_by_driver(host, job.pid, job.name, job.uid)
    if swap is None or swap.state == BACK:
        raise NotFound(f"{job.title} is not swapped out", "see what is out: gpushare swap list", code="not_out")
    return swap
