"""Waiting for room: `run --wait` enters the ledger, waits for its turn, and takes a device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, InUse, NoPermission, or_none
from gpushare.base.model import ComputeMode, Gpu, GpuLease
from gpushare.base.selection import Device, select
from gpushare.base.units import WORTH_NAMING, counted, first_few, format_bytes, format_duration, size_option
from gpushare.base.values import dataclass
from gpushare.host.claims import live_claims, why_unreadable
from gpushare.host.host import Host
from gpushare.host.process import info_of
from gpushare.host.records import has_claims
from gpushare.host.store import JobProcess, Named
from gpushare.memory.admission import UserLimits
from gpushare.memory.leases import PREFIX as LEASES
from gpushare.memory.leases import leases, reserved_words
from gpushare.memory.ledger import (
    PREFIX,
    Line,
    Place,
    Request,
    Reservation,
    jobs_before,
    line_of,
    lines_of,
    never_fits,
    owners_of,
    reservations,
    waiting_before,
    without_enclosing_jobs,
    would_take,
)
from gpushare.memory.peaks import KnownCommands, find_profile
from gpushare.memory.swapped import GPU_MARGIN_BYTES, Swap, has_room, several_gpus_error

# Shows what a job waits for, how long it has, and how long it waits at most (`show.waiting`).
Draw = Callable[[str, float, "float | None"], None]
POLL_SECONDS: Final = 0.5
# How often a waiting job looks for what it waits for.
_LOOK_SECONDS: Final = 2.0
_MOST_NAMED: Final = 4
_HARM_STEP_PERCENT: Final = 10
# Of more jobs, the rest is only seen in the utilization of the GPU.
_MOST_LOOKED_UP: Final = 64


def read_lines(host: Host, devices: Sequence[Device], limits: UserLimits, own_place: Place | None = None) -> list[Line]:
    """Return what is free and reserved on devices that were read just now, without those whose memory is unknown.

    It does not count ``own_place``, which the asking job has reserved itself.
    """
    jobs = without_enclosing_jobs(host, reservations(host) or [])
    if own_place is not None:
        jobs = [job for job in jobs if job.id != own_place.id]
    clients = {device.uuid: client_limit(host, device) for device in devices}
    return [*lines_of(host, devices, jobs, clients=clients, limits=limits).values()]


def client_limit(host: Host, device: Device) -> int | None:
    """Return how many clients an MPS server takes on a device; None: unknown."""
    from gpushare.mps.control import probe_version
    from gpushare.mps.limits import max_clients, share_of_slices

    index = device.gpu.index
    fraction: float | None = 1.0
    if device.mig is not None:
        profile = device.mig.profile
        fraction = or_none(lambda: share_of_slices(profile, host.nvml.max_mig_devices(index)))
    if fraction is None:
        return None
    version = or_none(lambda: probe_version(host.programs))
    return max_clients(version, or_none(lambda: host.nvml.compute_capability(index)), fraction)


def best_first(
    host: Host,
    devices: Sequence[Device],
    productions: Callable[[Device], Sequence[str]],
    limits: UserLimits,
    command: Sequence[str] = (),
    own_place: Place | None = None,
    count: int = 1,
    memory_bytes: int | None = None,
) -> list[tuple[Device, str]]:
    """Return devices in the order in which a job harms least, each with the reason in a few words.

    First come devices with room for ``memory_bytes`` within this user's limit (None: for a whole device). Of these, the ones
    with the fewest production jobs (``productions`` returns their names), then those where the job and the jobs there slow
    each other down least (`harm_percent`), then those with the most room. For a job of ``count`` devices those come first
    that are `best_together`. ``own_place`` is the place of the job itself, ``command`` its command line.
    """
    lines = {line.device.uuid: line for line in read_lines(host, devices, limits, own_place)}
    profiles = KnownCommands(host)
    # By device; the harm alone counts if several are chosen together.
    harms: dict[str, tuple[int, ...]] = {}
    texts: dict[str, str] = {}
    for device in devices:
        line = lines.get(device.uuid)
        if line is None:
            continue
        names = productions(device)
        use_there = _use_percent_of_jobs(host, line, profiles)
        profile = find_profile(host, device, command) if command else None
        own_use = None if profile is None else profile.use_percent
        text = f"production job '{names[0]}' runs there" if names else "no production job"
        text += f"; {harm_in_words(own_use, use_there)}; {format_bytes(line.free_bytes)} free to reserve"
        is_over_limit = line.exceeds_limit(os.geteuid(), memory_bytes)
        is_full = is_over_limit or line.free_bytes < line.room.bytes_of(memory_bytes)
        # A smaller difference of the harm is noise: then the GPU with more room is better.
        harm_steps = int(harm_percent(own_use, use_there) // _HARM_STEP_PERCENT)
        harms[device.uuid] = (is_full, len(names), harm_steps)
        texts[device.uuid] = text
    ranked = sorted(
        (device for device in devices if device.uuid in harms),
        key=lambda device: (harms[device.uuid], -lines[device.uuid].free_bytes, device.gpu.index),
    )
    if 1 < count < len(ranked):
        indexes = [device.gpu.index for device in ranked]
        order = best_together_first(host, [harms[device.uuid] for device in ranked], indexes, count)
        ranked = [ranked[number] for number in order]
    return [(device, texts[device.uuid]) for device in ranked]


def _use_percent_of_jobs(host: Host, line: Line, profiles: KnownCommands) -> float | None:
    """Return how many percent of a device the jobs there use together; None: unknown, for example if one has just begun.

    That is the sum of what each uses alone, if the commands of all were measured (`KnownCommands`: this user's own). Else it
    is the utilization of the GPU, but at least what the measured ones use.
    """
    from gpushare.mps.control import is_server

    device = line.device
    processes = [each for each in device.gpu.processes or () if device.has(each) and (each.compute or each.mps)]
    # In another PID namespace than the host's, NVML's PIDs are of other processes.
    blind = host.processes.namespace_is_host() is False
    owners = owners_of(host, line.holders, () if blind else (process.pid for process in processes))
    if not blind and any(job.id not in owners.values() for job in line.holders):
        # It is not on the GPU yet.
        return None
    busy = device.gpu.utilization_percent if device.mig is None else None
    if device.gpu.processes is None:
        return busy
    # By the nearest process above that was measured, which is the job's, or else by the process itself.
    uses: dict[int, float | None] = {}
    for process in processes:
        info = None if blind else host.processes.describe(process.pid)
        if info is not None and is_server(info.name):
            continue
        pid, percent = process.pid, None
        if profiles and info is not None and info.uid == host.uid and len(uses) < _MOST_LOOKED_UP:
            for above in host.processes.ancestry(process.pid):
                info = info_of(host.processes, above)
                if info.uid == host.uid and info.command_line:
                    percent = profiles.use_percent(device, info.command_line)
                if percent is not None:
                    pid = above
                    break
        uses[pid] = percent
    measured = sum(use or 0.0 for use in uses.values())
    if None not in uses.values():
        return measured
    return None if busy is None else max(float(busy), measured)


def wait_for_room(
    host: Host,
    place: Place,
    devices: Sequence[Device],
    seconds: float | None,
    limits: UserLimits,
    draw: Draw,
    *,
    best: Callable[[Sequence[Device]], Sequence[Device]] = lambda devices: devices,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Device, ...]:
    """Wait until it is this job's turn and as many devices as it needs have room; return those, which the place then holds.

    ``seconds`` None: as long as it takes. ``devices`` are in the order in which they were best when the job came; ``best``
    orders them by their state now. ``draw`` shows what the job waits for. The place is left if anything fails, Ctrl-C included.

    Raises:
        BadUsage: it fits on none of the devices, even if they are empty (code ``never_fits``).
        NoPermission: it is more than this user may reserve (code ``over_user_limit``).
        InUse: the time is over (code ``no_room``).
    """
    began = next_look = clock()
    text = ""
    clients = {device.uuid: client_limit(host, device) if place.request.client else None for device in devices}
    usable: Sequence[Device] = ()
    reasons: Sequence[str] = ()
    waited = False

    def best_now(keys: Sequence[str]) -> list[str]:
        return [device.uuid for device in best([device for device in usable if device.uuid in keys])]

    try:
        while True:
            usable, reasons = usable_now(host, devices, limits, client=place.request.client)
            # Without a wait the order of ``devices`` is still right for one device; several may be better together.
            is_ordered_again = len(devices) > 1 and (waited or place.request.count > 1)
            if place.try_to_take(usable, clients, limits, best_now if is_ordered_again else None):
                return tuple(device for key in place.held for device in usable if device.uuid == key)
            waited = True
            is_due = clock() >= next_look
            if is_due:
                lines = read_lines(host, usable, limits)
                # Other devices, which cannot be used now, may be larger.
                check_fits(lines, place.request, when_empty=len(lines) == len(devices))
            if seconds is not None and clock() - began >= seconds:
                jobs_ahead = len(jobs_before(reservations(host) or [], place))
                lines = read_lines(host, usable, limits)
                raise _no_room_error(lines, place.request, seconds, reasons, jobs_ahead)
            if is_due:
                next_look = clock() + _LOOK_SECONDS
                text = why_it_waits(host, lines, place, reasons)
            draw(text, clock() - began, seconds)
            sleep(POLL_SECONDS if seconds is None else max(0.01, min(POLL_SECONDS, began + seconds - clock())))
    except BaseException:
        place.leave()
        raise


def bytes_reserved_by(host: Host, job: Named, processes: Sequence[JobProcess]) -> int | None:
    """Return what a job with these processes has reserved on its GPU; 0: nothing, None: all of the GPU.

    Raises NotSupported: it has reserved several GPUs, even if it uses only one of them now (code ``several_gpus``).
    """
    holders = [each for each in reservations(host) or [] if each.held]
    own_ids = set(owners_of(host, holders, (process.pid for process in processes)).values())
    own_jobs = [each for each in holders if each.id in own_ids]
    uuids = {uuid for each in own_jobs for uuid in each.held}
    if len(uuids) > 1:
        raise several_gpus_error(job, [gpu.index for gpu in host.nvml.identities() if gpu.uuid in uuids])
    sizes = [each.memory_bytes for each in own_jobs]
    return None if None in sizes else sum(size or 0 for size in sizes)


def bytes_to_come_in(host: Host, device: Device, memory_bytes: int, reserved_bytes: int | None = 0) -> int | None:
    """Return what a swapped-out job has to reserve on a device to come in; None: all of the device.

    It is what the job held (``memory_bytes``) with a margin, and at least what it had reserved (``reserved_bytes``, as in
    `Swap`), as the job may grow again. A job that had nearly all of the device gets all of it, without the margin.
    """
    if reserved_bytes is None:
        return None
    line = line_of(host, device, [])
    need = max(memory_bytes + GPU_MARGIN_BYTES, reserved_bytes)
    return None if line is not None and need > line.room.whole_bytes else need


def _has_own_place(host: Host, jobs: Iterable[Reservation], swap: Swap, key: str, need: int | None) -> bool:
    """Return whether one of these reservations is a swapped job's own, on device ``key``, and large enough.

    ``need`` None: it has to be of the whole device.
    """
    ancestors = {pid for image in swap.images for pid in host.processes.ancestry(image.pid)}
    return any(
        key in job.held
        and (job.memory_bytes is None or (need is not None and job.memory_bytes >= need))
        and not ancestors.isdisjoint(process.pid for process in job.claim.processes)
        for job in jobs
    )


def keeps_place(host: Host, line: Line, swap: Swap, need: int | None) -> bool:
    """Return whether a job that comes back still has a large enough place on a device, and the room for it is there."""
    return line.fits and _has_own_place(host, line.holders, swap, line.device.uuid, need)


@contextlib.contextmanager
def room_reserved(
    host: Host,
    devices: Sequence[Device],
    swap: Swap,
    seconds: float | None,
    limits: UserLimits,
    waiting: Callable[[], contextlib.AbstractContextManager[Draw]],
) -> Iterator[Device]:
    """Reserve room for a swapped-out job on one of ``devices`` while the block runs; yield the GPU.

    The GPUs are of one model. Waits as `wait_for_room`, which ``waiting`` shows. If the job still has a place on one of them,
    that is enough: a second place might not fit beside it.
    """
    need = bytes_to_come_in(host, devices[0], swap.memory_bytes, swap.reserved_bytes)
    usable, _ = usable_now(host, devices, limits, client=False)
    kept = next((line.device for line in read_lines(host, usable, limits) if keeps_place(host, line, swap, need)), None)
    if kept is not None:
        yield kept
        return
    keys = tuple(device.uuid for device in devices)
    place = Place(host, Request(memory_bytes=need, keys=keys, client=False, name=swap.name))
    try:
        # A limit of its user that was lowered meanwhile keeps no job out.
        own_limits = limits.at_least(os.geteuid(), need)
        with waiting() as draw:
            (device,) = wait_for_room(host, place, devices, seconds, own_limits, draw)
        yield device
    finally:
        place.leave()


@contextlib.contextmanager
def room_kept(host: Host, swap: Swap, size: int) -> Iterator[bool | None]:
    """Reserve these bytes for a job that comes back while the block runs; yield whether there is room (None: unknown).

    A place that the job itself still has in the ledger is enough.
    """
    is_free = has_room(host, swap, size)
    devices = [Device(gpu=gpu) for gpu in host.nvml.sweep() if gpu.uuid == swap.gpu_uuid]
    jobs = reservations(host)
    if not is_free or jobs is None or not devices or _has_own_place(host, jobs, swap, swap.gpu_uuid, size):
        yield is_free
        return
    need = bytes_to_come_in(host, devices[0], size)
    place = Place(host, Request(memory_bytes=need, keys=(swap.gpu_uuid,), client=False, name=swap.name))
    try:
        yield place.try_to_take(devices, {}, UserLimits())
    finally:
        place.leave()


@dataclass(frozen=True, kw_only=True)
class RoomJob:
    """A job that waits for a device, or has a place on it."""

    pid: int
    user: str | None
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RoomOnDevice:
    """What is free on a device that a job may have, and who holds the rest."""

    gpu: int
    device_uuid: str
    free_bytes: int
    # What jobs of gpushare have reserved.
    reserved_bytes: int
    why: str | None
    held_by: tuple[RoomJob, ...]


@dataclass(frozen=True, kw_only=True)
class RoomAnswer:
    """Whether a job would start now, where, and behind whom it would wait."""

    starts_now: bool
    # Where it would start; empty: it would wait.
    gpus: tuple[int, ...]
    device_uuids: tuple[str, ...]
    # The reason, as a sentence.
    why: str
    # What it needs on each of its devices; null: a device of its own.
    memory_bytes: int | None
    behind: tuple[RoomJob, ...]
    devices: tuple[RoomOnDevice, ...]


def room_job(host: Host, job: Reservation) -> RoomJob:
    """Return a job of the ledger as a row of the answer."""
    user = info_of(host.processes, job.pid).user
    return RoomJob(pid=job.pid, user=user, name=job.name, memory_bytes=job.memory_bytes)


def outlook(
    host: Host,
    devices: Sequence[Device],
    request: Request,
    limits: UserLimits,
    reasons: Mapping[str, str] | None = None,
) -> RoomAnswer:
    """Return what would happen to a job that came now. Nothing is written.

    ``reasons`` say why a device is good for the job, by UUID.
    """
    uid = os.geteuid()
    reasons_by_uuid = reasons or {}
    usable, unusable = usable_now(host, devices, limits, client=request.client)
    unreadable = why_unreadable(host, PREFIX)
    jobs = without_enclosing_jobs(host, reservations(host) or [])
    clients = {device.uuid: client_limit(host, device) for device in usable} if request.client else {}
    lines = [*lines_of(host, usable, jobs, clients=clients, limits=limits).values()]
    keys = () if unreadable else would_take(jobs, lines, request, uid)[: request.count]
    jobs_ahead = [job for job in waiting_before(jobs, request, uid) if not set(job.keys).isdisjoint(request.keys)]
    lines_taken = [line for key in keys for line in lines if line.device.uuid == key]
    if lines_taken:
        texts = [
            reasons_by_uuid.get(line.device.uuid) or f"{format_bytes(line.free_bytes)} free to reserve"
            for line in lines_taken
        ]
        if len(lines_taken) == 1:
            where = f"{lines_taken[0].device.title}: {texts[0]}"
        else:
            where = " and ".join(
                f"{line.device.title} ({reason})" for line, reason in zip(lines_taken, texts, strict=True)
            )
        text = f"now it would start at once, on {where}"
    else:
        text = f"now it would wait for {_room_text(lines, request, len(jobs_ahead), unusable)}"
        if unreadable:
            text += f"; {unreadable}"
    return RoomAnswer(
        starts_now=bool(lines_taken),
        gpus=tuple(line.device.gpu.index for line in lines_taken),
        device_uuids=keys,
        why=text,
        memory_bytes=request.memory_bytes,
        behind=tuple(room_job(host, job) for job in jobs_ahead),
        devices=tuple(
            RoomOnDevice(
                gpu=line.device.gpu.index,
                device_uuid=line.device.uuid,
                free_bytes=line.free_bytes,
                reserved_bytes=line.reserved_bytes,
                why=reasons_by_uuid.get(line.device.uuid),
                held_by=tuple(room_job(host, job) for job in line.holders),
            )
            for line in lines
        ),
    )


def usable_now(
    host: Host, devices: Sequence[Device], limits: UserLimits, *, client: bool
) -> tuple[list[Device], list[str]]:
    """Return the devices as they are now, and why others cannot be used: lost, reserved, or one program has it alone."""
    # Not of all GPUs: many jobs may wait, and each looks twice a second.
    try:
        gpus = {index: host.nvml.gpu(index) for index in dict.fromkeys(device.gpu.index for device in devices)}
    except GpushareError as error:
        # The driver is being loaded again: a job may have waited for hours.
        return [], [error.message]
    usable: list[Device] = []
    reasons: list[str] = []
    reserved = leases(host, limits) if has_claims(host, LEASES) else {}
    for device in devices:
        gpu = gpus[device.gpu.index]
        try:
            (current,) = select(device.uuid, [gpu])
        except GpushareError:
            reasons.append(f"{device.title} is gone" if gpu.error is None else f"{device.title} does not answer")
            continue
        reason = _why_unusable(host, current, reserved.get(gpu.uuid or ""), client=client)
        if reason is None:
            usable.append(current)
        else:
            reasons.append(f"{current.title} {reason}")
    return usable, reasons


def _why_unusable(host: Host, device: Device, lease: GpuLease | None, *, client: bool) -> str | None:
    """Return why a job cannot have a device now: ``is leased to process 7 (run --mig)``; None: it can."""
    if device.gpu.error is not None:
        return "does not answer"
    holder = None if device.mig is None else _instance_holder(host, device.uuid)
    if holder is not None:
        return f"is leased to process {holder} (run --mig)"
    if lease is not None and lease.uid != host.uid:
        return reserved_words(lease)
    return _compute_mode_reason(host, device.gpu, client=client)


def _instance_holder(host: Host, uuid: str) -> int | None:
    """Return the PID of the gpushare that holds an instance for its program (`run --mig`).

    None: there is none, or this gpushare is a part of that program.
    """
    claim = (live_claims(host) or {}).get(uuid)
    if claim is None:
        return None
    above = set(host.processes.ancestry(os.getpid()))
    return claim.pid if above.isdisjoint(process.pid for process in claim.processes) else None


def _compute_mode_reason(host: Host, gpu: Gpu, *, client: bool) -> str | None:
    """Return why the compute mode keeps another program out now; None: it does not.

    In exclusive-process mode one program has the GPU. If that is an MPS server, further clients can come.
    """
    if gpu.compute_mode is ComputeMode.PROHIBITED:
        return "is in compute mode prohibited"
    if gpu.compute_mode is not ComputeMode.EXCLUSIVE_PROCESS:
        return None
    from gpushare.mps.control import SERVER_PROGRAM

    for process in gpu.processes or ():
        is_mps = process.mps or info_of(host.processes, process.pid).name == SERVER_PROGRAM
        if process.compute and not (client and is_mps):
            return f"is in compute mode exclusive-process, and process {process.pid} has it"
    return None


def size_text(request: Request) -> str:
    """Return what a job waits for: ``8.0 GiB``, ``a GPU without other jobs``, ``8.0 GiB on each of 2 GPUs``."""
    size, count = request.memory_bytes, request.count
    if size is None:
        return "a GPU without other jobs" if count == 1 else f"{count} GPUs without other jobs"
    return format_bytes(size) + ("" if count == 1 else f" on each of {count} GPUs")


def why_it_waits(host: Host, lines: Sequence[Line], place: Place, reasons: Sequence[str]) -> str:
    """Return in a sentence what a job waits for; ``reasons`` are those of `usable_now`."""
    if not lines:
        # A driver that was loaded again, or a GPU that was reset, answers after that.
        host.nvml.restart()
    elif (reason := why_unreadable(host, PREFIX)) is not None:
        return reason
    jobs_ahead = len(jobs_before(reservations(host) or [], place)) if lines else 0
    return f"waiting for {_room_text(lines, place.request, jobs_ahead, reasons)}"


def _free_text(line: Line, request: Request) -> str:
    """Return what a device has: ``GPU 0 has 9.8 GiB free to reserve``."""
    full = request.client and line.free_clients == 0
    clients = f", but has {counted(line.room.clients or 0, 'client')} of MPS and takes no more" if full else ""
    return f"{line.device.title} has {format_bytes(line.free_bytes)} free to reserve{clients}"


def _held_by_text(line: Line, request: Request, most: int) -> str:
    """Return who has the rest, the largest first: ``; the rest is held by 'train' (40.0 GiB) and 2 more``; empty: nobody."""
    holders = [(size, f"process {job.pid}" if job.name is None else f"'{job.name}'") for job, size in line.held_by]
    others_bytes = line.others_bytes
    if request.memory_bytes is None:
        # Each is in the way of a job that needs a whole GPU, however little it holds.
        processes = [(process.memory_used_bytes or 0, f"process {process.pid}") for process in line.others]
        holders += [(size, title) for size, title in processes if size]
        others_bytes -= sum(size for size, _ in processes)
    if others_bytes >= WORTH_NAMING:
        holders.append((others_bytes, "other programs"))
    largest = sorted(holders, reverse=True)
    texts = first_few((f"{title} ({format_bytes(size)})" for size, title in largest), most)
    return f"; the rest is held by {texts}" if texts else ""


def _room_text(lines: Sequence[Line], request: Request, jobs_ahead: int, reasons: Sequence[str]) -> str:
    """Return what a job waits for, and what there is: ``8.0 GiB, 1 job before it: GPU 0 has 3.5 GiB free to reserve``."""
    if not lines:
        return f"{size_text(request)}: {first_few(reasons, _MOST_NAMED, '; ')}"
    most_holders = 3 if len(lines) == 1 else 1
    rooms = [f"{_free_text(line, request)}{_held_by_text(line, request, most_holders)}" for line in lines[:_MOST_NAMED]]
    ahead = f", {counted(jobs_ahead, 'job')} before it" if jobs_ahead else ""
    text = f"{size_text(request)}{ahead}: {'; '.join(rooms)}"
    staying = [job.title for line in lines for job in line.holders if job.stays and request.production]
    if staying:
        text += f"; {staying[0]} was to leave the GPU for it, and cannot: see its output"
    if reasons:
        text += f"; {first_few(reasons, _MOST_NAMED, '; ')}"
    return text + _limit_text(lines, request)


def check_fits(lines: Sequence[Line], request: Request, *, when_empty: bool = True) -> None:
    """Raise if a job can never start on these devices.

    Without ``when_empty`` only the limit of its user is checked: the job has further devices, on which it may fit.

    Raises:
        BadUsage: it fits on too few of them, even if they are empty (code ``never_fits``).
        NoPermission: on too few of them its user may reserve so much (code ``over_user_limit``).
    """
    if when_empty and lines and never_fits(lines, request):
        raise _never_fits_error(lines, request)
    limit = _own_limit(lines)
    within_limit = [line for line in lines if limit is None or line.room.bytes_of(request.memory_bytes) <= limit]
    if limit is None or len(within_limit) >= min(request.count, len(lines)):
        return
    raise NoPermission(
        f"the job needs {size_text(request)}, and you may reserve {format_bytes(limit)} on a GPU",
        f"give it at most --memory {size_option(limit)}; or ask the administrator: memory in gpushare.yaml",
        code="over_user_limit",
    )


def check_limit_now(lines: Sequence[Line], request: Request) -> None:
    """Raise InUse if a job that starts now on one of these devices would exceed the limit of its user (``no_room``)."""
    over = [line for line in lines if line.exceeds_limit(os.geteuid(), request.memory_bytes)]
    if over:
        raise InUse(
            f"no room for {size_text(request)} now{_limit_text(over, request)}",
            "wait for it: --wait; or end one of your jobs: gpushare stop NAME; see: gpushare status",
            code="no_room",
        )


def _own_limit(lines: Sequence[Line]) -> int | None:
    """Return how many bytes this user may reserve on each of these devices; None: no limit."""
    return lines[0].limits.get(os.geteuid()) if lines else None


def _limit_text(lines: Sequence[Line], request: Request) -> str:
    """Return a text on the limit of this user if it holds the job back on each of these devices; else an empty one."""
    uid, limit = os.geteuid(), _own_limit(lines)
    if limit is None or not all(line.exceeds_limit(uid, request.memory_bytes) for line in lines):
        return ""
    reserved = min(line.granted.get(uid, 0) for line in lines)
    return f"; your jobs have reserved {format_bytes(reserved)} of the {format_bytes(limit)} that you may have on a GPU"


def _never_fits_error(lines: Sequence[Line], request: Request) -> BadUsage:
    """Return the error about a job for which even empty devices are too small, or too few."""
    sizes = sorted((line.room.memory_bytes for line in lines), reverse=True)
    # The smallest of the largest devices, as many as it needs, or else all.
    at_most = f"--memory {size_option(sizes[min(request.count, len(sizes)) - 1])}"
    fitting = sum(not never_fits([line], replace(request, count=1)) for line in lines)
    return BadUsage(
        f"the job needs {size_text(request)}, and {counted(fitting, 'GPU')} of {len(lines)} can have that even when empty",
        f"give it at most {at_most}" + (f"; or fewer GPUs: --gpus {fitting}" if fitting else "; or name a larger GPU"),
        code="never_fits",
    )


def _no_room_error(
    lines: Sequence[Line], request: Request, seconds: float, reasons: Sequence[str], jobs_ahead: int
) -> InUse:
    """Return the error about a job that found no room within ``seconds`` (0: it was not to wait), with what is free."""
    freest = max(lines, key=lambda line: line.free_bytes, default=None)
    if freest is None:
        free = first_few(reasons, _MOST_NAMED, "; ") or "its memory is not known"
    elif request.client and freest.free_clients == 0:
        free = _free_text(freest, request)
    else:
        free = f"at most {format_bytes(freest.free_bytes)} are free to reserve"
    if jobs_ahead:
        free += f"; {counted(jobs_ahead, 'job')} waited before it"
    limit_text = _limit_text(lines, request)
    stop = "; or end one of your jobs: gpushare stop NAME" if limit_text else ""
    needs_whole_gpu = request.memory_bytes is None and request.count == 1
    job = "a job that needs a whole GPU" if needs_whole_gpu else size_text(request)
    when, way = "now", "wait for it: --wait, or --wait --timeout 10m"
    if seconds > 0:
        when, way = f"within {format_duration(seconds)}", "wait longer: --timeout TIME"
    return InUse(
        f"no room for {job} {when}: {free}{limit_text}",
        f"{way}{stop}; see who holds the memory: gpushare status",
        code="no_room",
    )


_FULL: Final = 100.0
# More sets than any real host has: beyond this many only the first ones are compared.
_MOST_SETS: Final = 20_000


def harm_percent(own_use: float | None, others: float | None) -> float:
    """Return how many percent of a GPU's time a new job makes work wait: what it and the others use above 100 percent.

    An unknown use (None) counts as 100 percent. What already waits without the new job is no harm of it.
    """
    own_use = _FULL if own_use is None else own_use
    others = _FULL if others is None else others
    waits_then = max(0.0, own_use + others - _FULL)
    waits_now = max(0.0, others - _FULL)
    return waits_then - waits_now


def harm_in_words(own_use: float | None, others: float | None) -> str:
    """Return the harm in words: ``it uses 50 %, those there 90 %, and 40 % has to wait``."""
    if others is None:
        return "its load is unknown"
    if not others:
        return "it is idle"
    if own_use is None:
        return f"it is {others:.0f} % busy"
    text = f"it uses {own_use:.0f} %, those there {others:.0f} %"
    harm = harm_percent(own_use, others)
    return f"{text}, and {harm:.0f} % has to wait" if harm >= 1 else text


def best_together(
    ranked: Sequence[tuple[int, ...]], count: int, closeness: Callable[[int, int], int]
) -> tuple[int, ...]:
    """Return the positions of the ``count`` candidates that together harm others least; ``ranked`` has the harm of each.

    The harm of a set is the sum of its candidates' harm, compared component by component. Among equal sets the one with
    the best connections wins (``closeness`` is higher for a better one: `host.nvml.NvmlReader.closeness`), then the first.
    """
    numbers = range(len(ranked))
    sets = itertools.islice(itertools.combinations(numbers, count), _MOST_SETS)

    def rank(chosen: tuple[int, ...]) -> tuple[object, ...]:
        harm = tuple(sum(column) for column in zip(*(ranked[number] for number in chosen), strict=True))
        links = [closeness(*pair) for pair in itertools.combinations(chosen, 2)]
        # A collective is as slow as its slowest connection.
        return harm, -min(links, default=0), -sum(links), chosen

    return min(sets, key=rank, default=())


def best_together_first(host: Host, ranked: Sequence[tuple[int, ...]], gpus: Sequence[int], count: int) -> list[int]:
    """Return the positions of all candidates: first the ``count`` that are `best_together`. ``gpus`` are their indexes."""

    @functools.cache
    def closeness(first: int, second: int) -> int:
        """Return how closely two candidates are connected; 0: unknown."""
        return or_none(lambda: host.nvml.closeness(gpus[first], gpus[second])) or 0

    chosen = best_together(ranked, count, closeness)
    return [*chosen, *(number for number in range(len(ranked)) if number not in chosen)]
