"""Which jobs `gpushare move` takes to which GPU, as a plan; the move itself is `gpushare/memory/move.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from gpushare.base.errors import GpuLost, InUse, NotFound, NotSupported, or_none
from gpushare.base.model import Gpu
from gpushare.base.selection import Device, titles
from gpushare.base.units import first_few, format_bytes
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.store import Job
from gpushare.memory import move
from gpushare.memory.admission import UserLimits
from gpushare.memory.leases import lease_of_others
from gpushare.memory.ledger import Reservation, reservations
from gpushare.memory.room import Draw, bytes_to_come_in, keeps_place, read_lines, reserved_by, room_reserved
from gpushare.memory.swap import check_continues, check_host, come_in, guarded, leaving_record, swapped_out
from gpushare.memory.swapped import BACK, LEAVING, LOST, OUT, Swap, find_swap, locked, lost_error, own_record, swaps
from gpushare.plan import Loss, Plan, Step
from gpushare.run.jobs import consent_to, find_job, gpu_processes, job_names, processes_to_swap
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
class _Move:
    """A planned move of one job; ``candidates`` are the GPUs that it may go to."""

    job: Job
    # The record that go_out writes; of a job that is swapped out already, its record.
    swap: Swap
    source: Gpu
    candidates: tuple[Gpu, ...]

    @property
    def row(self) -> MovedJob:
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
    """Plans moves.

    ``limits`` are those of users in gpushare.yaml, ``seconds`` how long a job waits for room: 0 not at all, None as long as
    it takes; ``waiting`` shows meanwhile what it waits for (`show.waiting`).
    """

    def __init__(
        self,
        host: Host,
        limits: UserLimits,
        seconds: float | None,
        say: Callable[[str], None],
        waiting: Callable[[], contextlib.AbstractContextManager[Draw]],
    ) -> None:
        self._host, self._limits, self._seconds = host, limits, seconds
        self._say, self._waiting = say, waiting
        check_host(host)
        move.check_driver(host)
        self._gpus = host.nvml.sweep()

    def plan_job(self, text: str, devices: Sequence[Device] | None) -> Moves:
        """Return the move of one job, by name or PID, to one of these devices; None: to any GPU of its model.

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
            # `LEAVING`: it is on its GPU, and the move would begin with its way out.
            if swap.state == LEAVING and any(gpu.uuid == source.uuid for gpu in candidates):
                return self._plan_of([])
            for gpu in candidates:
                move.check_target(source, gpu)
        return self._plan_of(
            [self._with_target(_Move(job=job, swap=swap, source=source, candidates=tuple(candidates)))]
        )

    def plan_all_off(self, device: Device, devices: Sequence[Device] | None) -> Moves:
        """Return the moves of all jobs of a GPU to others with room.

        Raises:
            GpushareError: one of them cannot move; nothing has changed.
            InUse: the other GPUs have no room for all of them (code ``no_room``).
        """
        source = self._whole_gpu(device)
        if source.mig_enabled:
            raise NotSupported(
                f"GPU {source.index} is in MIG mode, and a job moves only between whole GPUs",
                "see the GPUs: gpushare status",
                gpu=str(source.index),
                code="mig_enabled",
            )
        others = [self._whole_gpu(each) for each in devices] if devices is not None else self._gpus
        candidates = move.possible_targets(source, others)
        moves = []
        for job in self._jobs_on(source):
            consent_to(self._host, job, "moves")
            swap, _ = self._record_and_gpu(job)
            moves.append(_Move(job=job, swap=swap, source=source, candidates=tuple(candidates)))
        index_of = self._assign_gpus(moves, candidates)
        without_room = next((wish for wish in moves if wish.job.pid not in index_of), None)
        if without_room is not None:
            reserved_bytes = without_room.swap.reserved_bytes
            size = ", which has reserved a whole GPU"
            if reserved_bytes is not None:
                size = f" with {format_bytes(max(without_room.swap.memory_bytes, reserved_bytes))}"
            raise InUse(
                f"no other GPU of this model that may be used has room for {without_room.job.title}{size}",
                "see what is free: gpushare status; move jobs one by one: gpushare move JOB --wait",
                gpu=str(source.index),
                code="no_room",
            )
        by_index = {gpu.index: gpu for gpu in candidates}
        returning = self._jobs_that_come_to(source, {wish.job.pid for wish in moves})
        if returning:
            texts = first_few(job.selector for job in returning)
            own = next((job.selector for job in returning if self._is_own(job)), None)
            end = "" if own is None else f"; end one: gpushare stop {own}"
            self._say(
                f"not moved: {texts}, which wait for GPU {source.index} or are swapped out, and come to it once"
                f" it has room; see them: gpushare jobs{end}"
            )
        return self._plan_of([replace(wish, candidates=(by_index[index_of[wish.job.pid]],)) for wish in moves])

    def _jobs_that_come_to(self, gpu: Gpu, moved_pids: Container[int]) -> list[Swap | Reservation]:
        """Return the jobs that are not on a GPU, and may start or come back there."""
        waiting = [job for job in reservations(self._host) or () if job.waits and gpu.uuid in job.keys]
        out = [swap for swap in swaps(self._host) if swap.state == OUT and swap.gpu_uuid == gpu.uuid]
        jobs: list[Swap | Reservation] = [*out, *waiting]
        return list({job.selector: job for job in jobs if job.pid not in moved_pids}.values())

    def _is_own(self, job: Swap | Reservation) -> bool:
        """Return whether a job is this user's, by who has written it down: what others write may name any PID."""
        return job.keeper_uid is None if isinstance(job, Swap) else job.claim.uid == self._host.uid

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
        """Return the jobs with a compute process on a GPU: each by its name, or else by the process."""
        pids = [process.pid for process in gpu.processes or () if process.compute or process.mps]
        names = job_names(self._host, pids)
        texts = dict.fromkeys(names.get(pid) or str(pid) for pid in pids)
        jobs = [find_job(self._host, text) for text in texts]
        # A process below the first one of another job goes with that job.
        below = {pid for job in jobs for pid in self._host.processes.descendants(job.pid) if pid != job.pid}
        return [job for job in jobs if job.pid not in below]

    def _record_and_gpu(self, job: Job) -> tuple[Swap, Gpu]:
        """Return the record of a job that is about to leave its GPU or is swapped out, and the GPU of its memory.

        Raises:
            GpushareError: it cannot move: the driver has lost it, a part of it is out, its GPU is gone, or as
                `jobs.processes_to_swap`.
        """
        swap = swapped_out(self._host, job)
        if swap is not None and swap.state == LOST:
            raise lost_error(swap)
        if swap is not None:
            check_continues(self._host, swap)
            self._check_whole(job, swap)
            return own_record(self._host, swap), self._gpu_by_uuid(swap.gpu_uuid, job)
        processes = processes_to_swap(self._host, job)
        move.check_single_rank(self._host, job.title, processes)
        uuid = next((gpu.uuid for gpu in self._gpus if gpu.index == processes[0].gpus[0]), None)
        source = self._gpu_by_uuid(uuid, job)
        reserved_bytes = reserved_by(self._host, job, processes)
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

    def _gpu_by_uuid(self, uuid: str | None, job: Job) -> Gpu:
        """Return the GPU of a job's memory. Raises NotFound: it is gone."""
        gpu = next((gpu for gpu in self._gpus if uuid is not None and gpu.uuid == uuid), None)
        if gpu is None:
            raise NotFound(f"the GPU of {job.title} is gone", "see: gpushare status", code="unknown_gpu")
        return gpu

    def _assign_gpus(self, moves: Sequence[_Move], gpus: Sequence[Gpu]) -> dict[int, int]:
        """Return the index of the GPU with room now for each job, by its PID; none that another user has reserved.

        A job goes first to one where it still has a place.
        """
        usable = [Device(gpu=gpu) for gpu in gpus if lease_of_others(self._host, gpu.uuid, self._limits) is None]
        lines = read_lines(self._host, usable, self._limits)
        needs = {}
        index_of = {}
        for wish in moves if lines else ():
            memory_bytes, reserved_bytes = wish.swap.memory_bytes, wish.swap.reserved_bytes
            sizes = [bytes_to_come_in(self._host, line.device, memory_bytes, reserved_bytes) for line in lines]
            for line, size in zip(lines, sizes, strict=True):
                if keeps_place(self._host, line, wish.swap, size):
                    index_of[wish.job.pid] = line.device.gpu.index
            if wish.job.pid not in index_of:
                needs[wish.job.pid] = min(line.room.bytes_of(size) for line, size in zip(lines, sizes, strict=True))
        free = {line.device.gpu.index: line.free_bytes for line in lines}
        return {**move.assign_gpus(needs, free), **index_of}

    def _with_target(self, wish: _Move) -> _Move:
        """Return the move to the one GPU that has room now; without room as it is: it waits, or says why it cannot."""
        chosen = self._assign_gpus([wish], wish.candidates)
        target = next((gpu for gpu in wish.candidates if gpu.index == chosen.get(wish.job.pid)), None)
        return wish if target is None else replace(wish, candidates=(target,))

    def _plan_of(self, moves: Sequence[_Move]) -> Moves:
        """Return the plan of these moves, one step for each job."""
        undo = "; ".join(self._undo_command(wish) for wish in moves)
        plan = Plan(
            title="; ".join(map(_end_text, moves)) or "no job is there",
            steps=tuple(self._step(wish) for wish in moves),
            undo=undo or None,
            consent=tuple(loss for wish in moves for loss in self._losses(wish)),
        )
        return Moves(plan=plan, jobs=tuple(wish.row for wish in moves))

    def _losses(self, wish: _Move) -> tuple[Loss, ...]:
        """Return what to ask before a job moves, if it is another user's."""
        return consent_to(self._host, wish.job, "moves", [image.pid for image in wish.swap.images])

    def _undo_command(self, wish: _Move) -> str:
        """Return the command that takes a job back to where it was; if it was swapped out, from there out again."""
        agreed = " -y" if self._losses(wish) else ""
        back = f"gpushare move {wish.job.selector} -g {wish.source.index}{agreed}"
        if wish.swap.state != OUT:
            return back
        return f"{back} && gpushare swap out {wish.job.selector}{agreed}"

    def _step(self, wish: _Move) -> Step:
        """Return the step that moves a job."""
        target = titles([Device(gpu=gpu) for gpu in wish.candidates])
        if len(wish.candidates) > 1:
            target = f"the first with room of {target}"
        pids = " ".join(str(image.pid) for image in wish.swap.images)
        pairs = ",".join(f"{old}={new}" for old, new in self._device_map(wish.source, wish.candidates[0]))
        actions = [f"restore --device-map {pairs}", "unlock"]
        if wish.swap.state != OUT:
            actions = ["lock", "checkpoint", *actions]
        command = "; ".join(f"cuda-checkpoint --pid $pid --action {action}" for action in actions)
        return Step(
            what=f"move {wish.job.title} with {format_bytes(wish.swap.memory_bytes)} from GPU {wish.source.index} to {target}",
            command=f"for pid in {pids}; do {command}; done",
            undo=self._undo_command(wish),
            do=lambda: self._move_now(wish),
            revert=lambda: self._move_back(wish),
        )

    def _device_map(self, source: Gpu, target: Gpu) -> list[tuple[str, str]]:
        """Return the pairs of GPUs, old and new, that cuda-checkpoint takes: source and target change places."""
        exchanged = {source.uuid: target.uuid, target.uuid: source.uuid}
        return [(gpu.uuid, exchanged.get(gpu.uuid) or gpu.uuid) for gpu in self._gpus if gpu.uuid is not None]

    def _move_now(self, wish: _Move) -> None:
        """Move a job, or bring it in on its new GPU if it is swapped out, once there is room."""
        host = self._host
        devices = [Device(gpu=gpu) for gpu in wish.candidates]
        room = room_reserved(host, devices, wish.swap, self._seconds, self._limits, self._waiting)
        with room as device, guarded(host, self._say), locked(host, say=self._say):
            # Read under the lock: it may have been swapped out or in while we waited.
            present = swapped_out(host, wish.job)
            if present is not None and present.state in {OUT, LOST}:
                moved = come_in(host, move.retargeted(own_record(host, present), device.gpu.uuid or ""))
            else:
                moved = move.move(host, wish.swap, device.gpu, lambda: processes_to_swap(host, wish.job))
            renew_slices(host, moved.identities(host), self._say)

    def _move_back(self, wish: _Move) -> None:
        """Undo a move that was carried out: move the job back from the GPU where it is now."""
        swap = find_swap(self._host, wish.job.pid, wish.job.name)
        if swap is None or swap.state != BACK or swap.gpu_uuid == wish.source.uuid:
            return
        present_gpu = self._gpu_by_uuid(swap.gpu_uuid, wish.job)
        record, _ = self._record_and_gpu(wish.job)
        self._move_now(_Move(job=wish.job, swap=record, source=present_gpu, candidates=(wish.source,)))


def _end_text(wish: _Move) -> str:
    """Return in words what holds after a move."""
    if len(wish.candidates) == 1:
        return f"{wish.job.title} is on GPU {wish.candidates[0].index} now"
    return f"{wish.job.title} has moved"
