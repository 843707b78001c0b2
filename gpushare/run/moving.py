"""Which jobs `gpushare move` takes to which GPU, as a plan; the move itself is `gpushare/memory/move.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gpushare.base.errors import GpuLost, GpushareError, InUse, NotSupported, or_none
from gpushare.base.model import Gpu
from gpushare.base.selection import Device, titles
from gpushare.base.units import format_bytes
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.store import Job
from gpushare.hostfile.kept import kept_limits
from gpushare.memory import move
from gpushare.memory.leases import lease_of_others
from gpushare.memory.room import bytes_reserved_by, bytes_to_come_in, keeps_place, read_lines, room_reserved
from gpushare.memory.swap import (
    check_driver,
    check_host,
    come_in,
    device_pairs,
    find_swapped_out,
    guarded,
    leaving_record,
    refuse_stopped_swap,
)
from gpushare.memory.swapped import BACK, LEAVING, LOST, OUT, Swap, find_swap, gpu_of, locked, lost_error, own_record
from gpushare.plan import Plan, Step
from gpushare.run.jobs import consent_to, find_job, gpu_processes, job_names, processes_to_swap
from gpushare.show.waiting import waiting_line
from gpushare.timeslice.slices import renew_slices


@dataclass(frozen=True, kw_only=True)
class MovedJob:
    """A job that moves. ``to_gpu`` None: it goes to the first of several GPUs that has room."""

    pid: int
    name: str | None
    user: str | None
    memory_bytes: int
    from_gpu: int
    to_gpu: int | None


@dataclass(frozen=True, kw_only=True)
class _JobMove:
    """A planned move of one job; ``candidates`` are the GPUs that it may go to."""

    job: Job
    # The record that go_out writes; of a job that is swapped out already, its record.
    swap: Swap
    source: Gpu
    candidates: tuple[Gpu, ...]

    @property
    def undo(self) -> str:
        """Return the command that takes the job back to where it was; if it was swapped out, from there out again."""
        back = f"gpushare move {self.job.selector} -g {self.source.index}"
        return back if self.swap.state != OUT else f"{back} && gpushare swap out {self.job.selector}"

    @property
    def outcome(self) -> str:
        """Return in words what holds after the move."""
        to_gpu = self.row.to_gpu
        return f"{self.job.title} has moved" if to_gpu is None else f"{self.job.title} is on GPU {to_gpu} now"

    @property
    def row(self) -> MovedJob:
        """Return the move as the command prints it."""
        to = self.candidates[0].index if len(self.candidates) == 1 else None
        return MovedJob(
            pid=self.job.pid,
            name=self.job.name,
            user=self.job.user,
            memory_bytes=self.swap.memory_bytes,
            from_gpu=self.source.index,
            to_gpu=to,
        )


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The plan of a move, and the jobs that it is about."""

    plan: Plan
    jobs: tuple[MovedJob, ...]


class Mover:
    """Plans moves, each of one job.

    ``seconds`` is how long a job waits for room: 0 not at all, None as long as it takes. Meanwhile it is shown what the job
    waits for, unless ``quiet``.
    """

    def __init__(self, host: Host, seconds: float | None, say: Callable[[str], None], *, quiet: bool) -> None:
        self._host, self._seconds, self._say = host, seconds, say
        self._waiting = partial(waiting_line, say, quiet=quiet)
        self._limits = kept_limits(host)
        check_host(host)
        check_driver(
            host, 580, "move a job to another GPU", "; the job can be swapped out and in: gpushare swap out JOB"
        )
        self._gpus = host.nvml.sweep()

    def plan_job(self, text: str, devices: Sequence[Device] | None) -> Moves:
        """Plan the move of one job, by name or PID, to one of these devices; None: to any GPU of its model.

        Raises:
            GpushareError: it cannot move there (`move.check_target`, `jobs.processes_to_swap`), or no GPU has room and it
                does not wait.
        """
        job = find_job(self._host, text)
        consent_to(self._host, job, "moves")
        swap, source = self._record_and_gpu(job)
        if devices is None:
            candidates = move.possible_targets(source, self._gpus)
            if not candidates:
                raise NotSupported(
                    f"no other GPU of this host is of the model of GPU {source.index} ({source.name or 'unknown model'})",
                    "swap the job out and in instead: gpushare swap out JOB",
                    code="other_model",
                )
        else:
            candidates = [self._whole_gpu(device) for device in devices]
            # `LEAVING` is the state of a job that has still to go out, so it is on its GPU.
            if swap.state == LEAVING and any(gpu.uuid == source.uuid for gpu in candidates):
                return self._plan_of([])
            for gpu in candidates:
                move.check_target(source, gpu)
        job_move = _JobMove(job=job, swap=swap, source=source, candidates=tuple(candidates))
        target = self._assign_gpus([job_move], candidates).get(job.pid)
        # Without room now the job waits for any of its candidates when it moves, or finds no room.
        return self._plan_of([job_move if target is None else replace(job_move, candidates=(target,))])

    def plan_all_off(self, device: Device, devices: Sequence[Device] | None) -> Moves:
        """Plan the moves of all jobs of a GPU to other GPUs with room, so that it becomes free.

        Raises:
            GpushareError: one of them cannot move; nothing has changed.
            InUse: the other GPUs have no room for all of them (code ``no_room``).
        """
        source = self._whole_gpu(device)
        # Raises if the GPU is in MIG mode: it is always of its own model.
        move.check_target(source, source)
        others = [self._whole_gpu(each) for each in devices] if devices is not None else self._gpus
        candidates = move.possible_targets(source, others)
        moves = []
        jobs = self._jobs_on(source)
        for job in jobs:
            try:
                consent_to(self._host, job, "moves")
                swap, _ = self._record_and_gpu(job)
            except GpushareError as error:
                if len(jobs) == 1:
                    raise
                raise error.restated(hint=f"{error.hint}; move the others one by one: gpushare move JOB") from error
            moves.append(_JobMove(job=job, swap=swap, source=source, candidates=tuple(candidates)))
        target_of = self._assign_gpus(moves, candidates)
        without_room = next((job_move for job_move in moves if job_move.job.pid not in target_of), None)
        if without_room is not None:
            raise _no_room_error(without_room)
        return self._plan_of([replace(job_move, candidates=(target_of[job_move.job.pid],)) for job_move in moves])

    def _whole_gpu(self, device: Device) -> Gpu:
        """Return the GPU of a device. Raises NotSupported: it is an instance; GpuLost: it does not answer."""
        if device.mig is not None:
            raise NotSupported(
                f"{device.title} is an instance, and a job moves only between whole GPUs",
                "name a GPU: -g 1",
                code="mig_enabled",
            )
        if device.gpu.error is not None:
            raise GpuLost(device.gpu.error, "see: gpushare status", gpu=str(device.gpu.index))
        return device.gpu

    def _jobs_on(self, gpu: Gpu) -> list[Job]:
        """Return the jobs with a compute process on a GPU; a process that belongs to no job of gpushare is one by itself."""
        pids = [process.pid for process in gpu.processes or () if process.compute or process.mps]
        names = job_names(self._host, pids)
        selectors = dict.fromkeys(names.get(pid) or str(pid) for pid in pids)
        jobs = [find_job(self._host, selector) for selector in selectors]
        # A process below the first one of another job goes with that job.
        below = {pid for job in jobs for pid in self._host.processes.descendants(job.pid) if pid != job.pid}
        return [job for job in jobs if job.pid not in below]

    def _record_and_gpu(self, job: Job) -> tuple[Swap, Gpu]:
        """Return the record with which a job moves, and the GPU of its memory.

        Of a swapped-out job it is the record that there is, else a new one in state `LEAVING`, which is not written yet.

        Raises:
            GpushareError: it cannot move: the driver has lost it, a part of it is out, its GPU is gone, or as
                `jobs.processes_to_swap`.
        """
        swap = find_swapped_out(self._host, job)
        if swap is not None and swap.state == LOST:
            raise lost_error(swap)
        if swap is not None:
            refuse_stopped_swap(self._host, swap)
            self._check_whole(job, swap)
            return own_record(self._host, swap), gpu_of(self._gpus, swap.gpu_uuid, job.title)
        processes = processes_to_swap(self._host, job)
        move.check_single_rank(self._host, job.title, processes)
        source = gpu_of(self._gpus, processes[0].gpus[0], job.title)
        reserved_bytes = bytes_reserved_by(self._host, job, processes)
        return leaving_record(self._host, job, source.uuid or "", processes, reserved_bytes), source

    def _check_whole(self, job: Job, swap: Swap) -> None:
        """Raise InUse if only a part of a job was swapped out, by its PID: the rest would stay (``already_out``)."""
        swapped_pids = {image.pid for image in swap.images}
        on_gpu = or_none(lambda: gpu_processes(self._host, job)) or ()
        staying = next((process.pid for process in on_gpu if process.pid not in swapped_pids), None)
        if staying is not None:
            raise InUse(
                f"{swap.title}, a part of {job.title}, is swapped out (state {swap.state}), but process {staying} is on the GPU",
                f"bring it back first: gpushare swap in {swap.selector}; or move it alone: gpushare move {swap.selector}",
                code="already_out",
            )

    def _assign_gpus(self, moves: Sequence[_JobMove], gpus: Sequence[Gpu]) -> dict[int, Gpu]:
        """Return by PID a GPU that has room now for each job; jobs without room are left out.

        A GPU on which the job still has a place comes first. GPUs that another user has reserved are not used.
        """
        usable = [Device(gpu=gpu) for gpu in gpus if lease_of_others(self._host, gpu.uuid, self._limits) is None]
        lines = read_lines(self._host, usable, self._limits)
        needs = {}
        index_of = {}
        for job_move in moves if lines else ():
            swap, pid = job_move.swap, job_move.job.pid
            bytes_on = []
            for line in lines:
                size = bytes_to_come_in(self._host, line.device, swap.memory_bytes, swap.reserved_bytes)
                bytes_on.append(line.room.bytes_of(size))
                if keeps_place(self._host, line, swap, size):
                    index_of[pid] = line.device.gpu.index
            if pid not in index_of:
                # The GPUs are of one model: what they need differs only by what the driver itself takes.
                needs[pid] = min(bytes_on)
        free = {line.device.gpu.index: line.free_bytes for line in lines}
        by_index = {gpu.index: gpu for gpu in gpus}
        return {pid: by_index[index] for pid, index in {**move.assign_gpus(needs, free), **index_of}.items()}

    def _plan_of(self, moves: Sequence[_JobMove]) -> Moves:
        """Return the plan of these moves, one step for each job."""
        plan = Plan(
            title="; ".join(job_move.outcome for job_move in moves) or "no job is there",
            steps=tuple(self._step(job_move) for job_move in moves),
            undo="; ".join(job_move.undo for job_move in moves) or None,
            consent=tuple(
                loss
                for job_move in moves
                for loss in consent_to(self._host, job_move.job, "moves", [image.pid for image in job_move.swap.images])
            ),
        )
        return Moves(plan=plan, jobs=tuple(job_move.row for job_move in moves))

    def _step(self, job_move: _JobMove) -> Step:
        """Return the step that moves a job."""
        target = titles([Device(gpu=gpu) for gpu in job_move.candidates])
        if len(job_move.candidates) > 1:
            target = f"the first with room of {target}"
        pids = " ".join(str(image.pid) for image in job_move.swap.images)
        source_uuid, target_uuid = job_move.source.uuid or "", job_move.candidates[0].uuid or ""
        pairs = ",".join(f"{old}={new}" for old, new in device_pairs(self._host, source_uuid, target_uuid))
        actions = [f"restore --device-map {pairs}", "unlock"]
        if job_move.swap.state != OUT:
            actions = ["lock", "checkpoint", *actions]
        command = "; ".join(f"cuda-checkpoint --pid $pid --action {action}" for action in actions)
        return Step(
            what=f"move {job_move.job.title} with {format_bytes(job_move.swap.memory_bytes)} from GPU {job_move.source.index} to {target}",
            command=f"for pid in {pids}; do {command}; done",
            undo=job_move.undo,
            do=lambda: self._move_now(job_move),
            revert=lambda: self._move_back(job_move),
        )

    def _move_now(self, job_move: _JobMove) -> None:
        """Move a job, or bring it in on its new GPU if it is swapped out, once there is room."""
        host = self._host
        devices = [Device(gpu=gpu) for gpu in job_move.candidates]
        room = room_reserved(host, devices, job_move.swap, self._seconds, self._limits, self._waiting)
        with room as device, guarded(host, self._say), locked(host, say=self._say):
            # Read under the lock: it may have been swapped out or in while we waited.
            present = find_swapped_out(host, job_move.job)
            if present is not None and present.state in {OUT, LOST}:
                moved = come_in(host, move.retargeted(own_record(host, present), device.gpu.uuid or ""))
            else:
                moved = move.move(host, job_move.swap, device.gpu, lambda: processes_to_swap(host, job_move.job))
            renew_slices(host, moved.identities(host), self._say)

    def _move_back(self, job_move: _JobMove) -> None:
        """Undo a move that was carried out: move the job back from the GPU where it is now."""
        swap = find_swap(self._host, job_move.job.pid, job_move.job.name)
        if swap is None or swap.state != BACK or swap.gpu_uuid == job_move.source.uuid:
            return
        present_gpu = gpu_of(self._gpus, swap.gpu_uuid, job_move.job.title)
        record, _ = self._record_and_gpu(job_move.job)
        self._move_now(_JobMove(job=job_move.job, swap=record, source=present_gpu, candidates=(job_move.source,)))


def _no_room_error(job_move: _JobMove) -> InUse:
    """Return the error about a job that is to leave its GPU, for which no other GPU has room."""
    reserved_bytes = job_move.swap.reserved_bytes
    size = ", which has reserved a whole GPU"
    if reserved_bytes is not None:
        size = f" with {format_bytes(max(job_move.swap.memory_bytes, reserved_bytes))}"
    return InUse(
        f"no other GPU of this model that may be used has room for {job_move.job.title}{size}",
        "see what is free: gpushare status; move jobs one by one: gpushare move JOB --wait",
        gpu=str(job_move.source.index),
        code="no_room",
    )
