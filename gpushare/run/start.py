"""A job from its options to its program: which GPU, which way of sharing, which parts; `cli/run.py` only parses.

`JobStart.run` decides in this order: an instance of its own, the devices that it may have, its place in the ledger of
memory, its role, and then the share that its program runs in.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from gpushare.base.errors import BadUsage, GpushareError, InUse, NotFound, NotSupported, OperationFailed, error_of
from gpushare.base.model import ComputeMode, Gpu, Way
from gpushare.base.selection import Device, candidates, devices_for_any, is_any, select_for_change, titles
from gpushare.base.units import counted, format_bytes, format_duration, format_percent, format_slice, ranges
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.records import has_claims
from gpushare.hostfile.kept import kept_limits
from gpushare.memory.leases import PREFIX, lease_of_others, reserved_words
from gpushare.memory.ledger import Request
from gpushare.memory.limit import JobMemory, MemoryBudget
from gpushare.memory.room import RoomAnswer
from gpushare.memory.swap import check_host
from gpushare.mps.daemons import check_mode
from gpushare.mps.limits import Limits, check_memory
from gpushare.mps.start import foreign_errors, limits_ignored
from gpushare.part import Part, Watch
from gpushare.plan import Plan
from gpushare.run.container import Container
from gpushare.run.group import (
    DEFAULT_US,
    PRODUCTION_US,
    AdaptedSlice,
    GroupSlice,
    production_under_mps_error,
    why_not_settable,
)
from gpushare.run.jobs import (
    MOST_GRACE_SECONDS,
    OPPORTUNISTIC,
    PRODUCTION,
    RecordedJob,
    check_not_waiting,
    keep_past,
    living_productions,
    new_record,
    slices_of_group,
)
from gpushare.run.plain import PlainShare, check_outside_mps, dropped_variables
from gpushare.run.production import ProductionJob
from gpushare.run.program import ENDED_BY_USER, QueueOptions, Run, RunOptions, TimeLimit, begin_log, step_of_run
from gpushare.run.queued import Queued
from gpushare.run.results import find_tuned
from gpushare.run.roles import (
    NOT_PROTECTED,
    PauseForProduction,
    device_of_job,
    devices_beside,
    limits_beside,
    spared_process,
    tuned_next_to,
)
from gpushare.run.share import MpsShare, Share, check_program
from gpushare.run.sliced import OwnSlice
from gpushare.show.plan import PlanAnswer, plan_result, with_answer
from gpushare.show.run import InstanceReport, RunReport
from gpushare.timeslice.slices import check_settable

if TYPE_CHECKING:
    from gpushare.run.created import Creator


# In the environment of the gpushare that runs a job in the background: the name of that job.
DETACHED: Final = "GPUSHARE_DETACHED"
# A job whose own kernels break the server would break it for its neighbors each time.
_MOST_RESTARTS: Final = 3
_CPU_ONLY: Final = "under MPS production counts as working only while it uses the CPU"
Yield = Literal["slices", "caps", "pause", "swap", "requeue"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a production or an opportunistic job asks for; of a job without a role all is None."""

    production: str | None = None
    opportunistic: bool = False
    # The production job that it spares, by name or PID; None: the only one there.
    target: str | None = None
    # None: as tuned, else the best that the host allows.
    yields: Yield | None = None
    # Of production, or of all opportunistic jobs of the GPU together (microseconds).
    slice_us: int | None = None
    # Which part of its speed production keeps; None: the slice is fixed.
    keep: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunPlanAnswer(PlanAnswer):
    """The answer of `run --dry-run` for a job that has a place in the line."""

    room: RoomAnswer


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """One job that is about to start. ``say`` prints a note."""

    host: Host
    gpus: Sequence[Gpu]
    command: Sequence[str]
    role: Role
    budget: MemoryBudget
    queue: QueueOptions
    dry_run: bool
    quiet: bool
    say: Callable[[str], None]
    # On how many GPUs it runs; and whether on the CPUs next to them.
    count: int = 1
    bind: bool = False
    # Start it again if its MPS server has died.
    restart: bool = False
    # An instance is made for it if none is free.
    creates: bool = False

    def run(self, gpu: str | None, mig: str | None, options: RunOptions) -> Any:
        """Run the job on devices of ``-g``, or in an instance of ``--mig``; return its exit code, in a dry run its plan."""
        check_not_waiting(self.host, options.name)
        if options.log is not None and not self.dry_run:
            begin_log(options.log)
        if mig is not None:
            # Without -g the instance may be on any GPU.
            return self._run_in_instance(mig, None if is_any(gpu) else gpu, options)
        if gpu is None and self.role.target is not None:
            gpu = device_of_job(self.host, self.gpus, self.role.target)
        if gpu is not None and gpu.strip().lower() == "all":
            raise BadUsage(
                "-g all would give a job all GPUs", "say how many of them it needs: --gpus N", code="one_gpu"
            )
        has_choice = gpu is not None and (is_any(gpu) or len(select_for_change(gpu, self.gpus)) != 1)
        # Only the ledger of memory holds a job to a budget, makes it wait, or chooses among devices.
        if self.budget.is_given or self.queue.takes_place or self.count > 1 or has_choice:
            return self._run_queued(gpu, options)
        return self._run_on([*candidates(gpu, self.gpus, None, self.say)], options)

    def _carry_out(self, share: Share, options: RunOptions, *parts: Part, slice_us: int | None = None) -> Any:
        """Run the program in a share and return its exit code; in a dry run, return the steps as a plan.

        ``parts`` are those of its way of sharing; those that any job may have are added here.
        """
        if isinstance(share, MpsShare):
            for text in limits_ignored(self.host, share.device, share.limits):
                self.say(text)
        job = self._recorded_job(share, options, slice_us)
        all_parts: list[Part] = [job, *options.parts, *parts]
        command = self.command
        container = None
        if options.container is not None:
            container = Container(self.host, share, options.container)
            command = container.command(self.command)
            all_parts.append(container)
        if self.bind:
            all_parts.append(CpuBinding(self.host, share.devices))
        if self.queue.run_seconds is not None:
            all_parts.append(TimeLimit(self.queue.run_seconds))
        if isinstance(share, MpsShare):
            report = RunReport(self.host, share.device, sys.stderr, quiet=self.quiet, limits=options.limits)
        else:
            report = InstanceReport(self.host, share.device, sys.stderr, quiet=self.quiet)
        if len(share.devices) > 1:
            report.title = titles(share.devices)
        if isinstance(share, MpsShare):
            share.check_no_fault()
        run = Run(self.host, share, all_parts, command, options, report, container=container)
        if self.dry_run:
            return plan_result(Plan(title="the program has ended", steps=tuple(run.steps())), dry_run=True)
        return self._run_and_record(run, job)

    def _recorded_job(self, share: Share, options: RunOptions, slice_us: int | None = None) -> RecordedJob:
        """Return the part that keeps the job's record, by which `gpushare jobs` and others find it; not yet written."""
        mps = isinstance(share, MpsShare)
        # Only MPS has limits.
        limits = options.limits if mps else Limits()
        record = replace(
            new_record(options.name, share.devices, self.command),
            role=options.role,
            mps=mps,
            threads_percent=limits.threads_percent,
            memory_bytes=self.budget.on([share.device]),
            slice_us=slice_us,
            grace_seconds=min(options.grace_seconds, MOST_GRACE_SECONDS),
            rate=options.rate,
        )
        return RecordedJob(self.host, share.device, record, options.container or self.command[0])

    def _run_and_record(self, run: Run, job: RecordedJob) -> int:
        """Carry a run out, again if its MPS server has died and that was asked for; keep how it ended."""
        began = time.time()
        code = None
        try:
            code = run.carry_out()
            restarts = 0
            while self.restart and run.mps_fault and restarts < _MOST_RESTARTS:
                restarts += 1
                self.say(f"its MPS server died: started again ({restarts} of at most {_MOST_RESTARTS} times)")
                code = run.carry_out()
        except OperationFailed as error:
            # With these codes its program was started and then ended; else it was not started (None).
            code = int(error.exit_code) if error.code in {"memory_limit", "time_limit"} else None
            raise
        else:
            # A job of the ledger (it has parts) keeps its own peak.
            if not run.options.parts and code in {0, *ENDED_BY_USER}:
                job.keep_peak(self.command)
            return code
        finally:
            if job.record.name:
                # The part that watches its memory reads it more often, so its peak may be higher. Of the first device.
                watched = next((part.peak_bytes for part in run.parts if isinstance(part, JobMemory)), None)
                peaks = [peak for peak in (job.record.memory_peak_bytes, watched) if peak is not None]
                record = replace(job.record, memory_peak_bytes=max(peaks, default=None))
                keep_past(self.host, record, titles(run.share.devices), began, code)
            if not run.options.stays:
                job.forget()

    def _lease_error(self, device: Device) -> InUse | None:
        """Return the error if another user has reserved the GPU."""
        # Only with a lease is gpushare.yaml read.
        if not has_claims(self.host, PREFIX):
            return None
        lease = lease_of_others(self.host, device.gpu.uuid, kept_limits(self.host))
        if lease is None:
            return None
        return InUse(
            f"{device.title} {reserved_words(lease)}",
            "take another GPU: -g any; or wait for the end of the lease: --wait; see: gpushare reserve",
            gpu=str(device.gpu.index),
            code="reserved",
        )

    def _without_granted_to_others(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices without MIG instances granted to other users only. Raises NoPermission: none is left."""
        if not any(device.mig is not None and device.mig.name for device in devices):
            return tuple(devices)
        from gpushare.mig.places import check_granted

        names = ["" if device.mig is None else device.mig.name or "" for device in devices]
        return _without_refused(devices, [error_of(partial(check_granted, self.host, name)) for name in names])

    def _without_leased(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices that no other user has reserved. Raises InUse: all of them are (``reserved``)."""
        return _without_refused(devices, [self._lease_error(device) for device in devices])

    def _run_on(self, devices: Sequence[Device], options: RunOptions) -> Any:
        """Run a program by its role and its slice; on several GPUs outside MPS, as each of its daemons has one GPU."""
        device = devices[0]
        # Raises if none of them may be used; they were chosen by name.
        self._without_leased(self._without_granted_to_others(devices))
        if self.role.production is not None:
            return self._run_production(devices, options, self.role.production)
        if self.role.opportunistic:
            return self._run_opportunistic(devices, options)
        if self.role.slice_us is not None:
            return self._run_sliced(devices, options, self.role.slice_us)
        if len(devices) > 1:
            self._say_dropped()
            return self._carry_out(self._plain_share(devices), options)
        if group := slices_of_group(self.host, device):
            self.say(
                f"opportunistic jobs with a time-slice run in the MPS daemon of {device.title}: this job shares their slice of"
                f" {format_slice(min(group.values()))}; to run outside it: --slice 2ms"
            )
        return self._carry_out(MpsShare(self.host, device, options.limits), options)

    def _plain_share(self, devices: Sequence[Device]) -> PlainShare:
        return PlainShare(self.host, devices[0], more=tuple(devices[1:]))

    def _run_queued(self, gpu: str | None, options: RunOptions) -> Any:
        """Run a program that is held to its memory, waits for it first, or has the choice of several devices."""
        queue = self.queue
        if queue.swappable:
            check_host(self.host)
        devices = self._usable_devices(gpu)
        check_program(options.container or self.command[0])
        if queue.for_production and self.role.target is not None:
            try:
                # Raises if there is no such job.
                self._spared_process(devices)
            except BadUsage as error:
                # It leaves for any production job, and may get one of several GPUs where the named one does not run.
                if error.code != "other_device" or len(devices) == 1:
                    raise
        if self.count == 1:
            devices = self._devices_with_memory(devices)
        if all(each.gpu.compute_mode is ComputeMode.PROHIBITED for each in devices):
            # Waiting would not help: the mode stays until an administrator changes it.
            check_mode(devices[0])
        request = Request(
            client=self.count == 1 and not queue.swappable and not self._is_outside_mps(options),
            count=self.count,
            name=options.name,
            production=self.role.production is not None,
            opportunistic=self.role.opportunistic,
            leaves=queue.for_production,
            turns=queue.turns,
            run_seconds=queue.run_seconds,
        )
        if request.client and len(devices) > 1:
            devices = _without_refused(devices, foreign_errors(self.host, devices))
        start = self._run_swappable if queue.swappable else self._run_on
        return self._run_in_ledger(devices, request, options, queue, start)

    def _run_swappable(self, devices: Sequence[Device], options: RunOptions) -> Any:
        """Run a program that may be swapped: outside MPS, as a checkpoint copies no client of MPS."""
        role = OPPORTUNISTIC if self.role.opportunistic else options.role
        return self._carry_out(self._plain_share(devices), replace(options, role=role))

    def _usable_devices(self, gpu: str | None) -> tuple[Device, ...]:
        """Return the devices of ``-g`` that the job can use, now or after a wait. Raises if they are too few."""
        needs_whole_gpus = self.queue.swappable or self.count > 1
        # A job of several GPUs that names none may have any.
        if gpu is None and self.count > 1:
            gpu = "any"
        devices: Sequence[Device] = candidates(gpu, self.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), self.say)
        if is_any(gpu):
            devices = devices_for_any(devices, instances=not needs_whole_gpus)
        if self.role.target is not None and self.count == 1 and not self.queue.for_production:
            # A job yields to the one of ``--for`` only where that one runs.
            devices = devices_beside(self.host, devices, self.role.target)
        devices = self._without_granted_to_others(devices)
        if not self.queue.wait:
            # A job that waits may have those when the lease is over.
            devices = self._without_leased(devices)
        check_not_mig(devices, whole=needs_whole_gpus)
        check_enough(devices, self.count)
        return devices

    def _run_in_ledger(
        self,
        devices: Sequence[Device],
        request: Request,
        options: RunOptions,
        queue: QueueOptions,
        start: Callable[[Sequence[Device], RunOptions], Any],
    ) -> Any:
        """Run a job with a place in the ledger of memory, on some of these devices; in a dry run, return its plan."""
        queued = Queued(
            host=self.host,
            devices=devices,
            command=self.command,
            options=options,
            queue=queue,
            budget=self.budget,
            request=request,
            start=start,
            say=self.say,
            limits=kept_limits(self.host),
            quiet=self.quiet,
        )
        if not self.dry_run:
            return queued.run()
        planned, room = queued.plan()
        if room is None:
            return planned
        return replace(with_answer(planned, RunPlanAnswer, room=room), notes=(*planned.notes, room.why))

    def _devices_with_memory(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices that have the memory that the job asks for. Raises BadUsage: none has (``limit_above_gpu``)."""
        size = self.budget.on(devices) or 0
        # Where it is unknown what a job can have, the device is not refused.
        capacity = {device.uuid: device.job_memory_bytes or math.inf for device in devices}
        check_memory(max(devices, key=lambda device: capacity[device.uuid]), size, job=True)
        return tuple(device for device in devices if capacity[device.uuid] >= size)

    def _is_outside_mps(self, options: RunOptions) -> bool:
        """Return whether the program will run outside MPS by its options alone: then it takes no place of a client."""
        if self.role.production is not None and not _asks_for_mps(options):
            return True
        return self.role.slice_us is not None and not self.role.opportunistic

    def _run_in_instance(self, text: str, gpu: str | None, options: RunOptions) -> Any:
        """Run a program in a free MIG instance, in the one with a name, or in one that is made for it."""
        if not self.creates:
            return self._run_in_named_instance(text, gpu, options)
        from gpushare.run.created import Creator
        from gpushare.run.mig import InstanceWish

        with Creator(self.host, text, gpu, self.say) as creator:
            check_memory(creator.device, self.budget.on([creator.device]), job=True)
            wish = InstanceWish(host=self.host, text=text, gpu=gpu, creator=creator)
            if self.dry_run and not wish.free():
                return creator.dry_run_result(self.command)
            if not self.dry_run:
                creator.remove_leftovers()
            return self._run_in_named_instance(text, gpu, options, creator)

    def _run_in_named_instance(
        self, text: str, gpu: str | None, options: RunOptions, creator: Creator | None = None
    ) -> Any:
        """Run a program in the instance of ``--mig`` (a profile or a name): under MPS only if its options need it."""
        from gpushare.run.mig import InstanceWish, waiting_text

        check_program(options.container or self.command[0])
        mps = options.strict or _asks_for_mps(options)
        if not mps:
            self._say_dropped()

        def check(device: Device) -> None:
            """Raise unless the program can run in this instance."""
            self._without_leased([device])
            check_memory(device, self.budget.on([device]), job=True)
            if mps:
                MpsShare(self.host, device, options.limits).check(self.command[0])

        wish = InstanceWish(host=self.host, text=text, gpu=gpu, check=check, creator=creator)
        queue = self.queue
        claim = None
        if self.dry_run:
            place = wish.instance_for_plan(waits=queue.wait)
            if queue.wait:
                options = replace(options, before=(step_of_run(waiting_text(text, queue.seconds)),))
        elif queue.wait:
            place, claim = wish.wait(seconds=queue.seconds, name=options.name, say=self.say, quiet=self.quiet)
        else:
            place, claim = wish.take()
        share: MpsShare | PlainShare
        if mps:
            share = MpsShare(self.host, place.device, options.limits, claim)
        else:
            share = PlainShare(self.host, place.device, claim, place.title)
        try:
            return self._run_in_share(share, options)
        except BaseException:
            share.close()
            raise

    def _run_in_share(self, share: MpsShare | PlainShare, options: RunOptions) -> Any:
        """Run a program in the instance of a share; with a memory limit it takes a place in the ledger, without a wait."""
        if not self.budget.is_given:
            return self._carry_out(share, options)

        def start(_: Sequence[Device], options_in_ledger: RunOptions) -> Any:
            """Run the program with the limits that its place in the ledger gives it."""
            if isinstance(share, MpsShare):
                share.limits = options_in_ledger.limits
            return self._carry_out(share, options_in_ledger)

        # The first instance of the profile was checked before; the one that was taken may be smaller.
        check_memory(share.device, self.budget.on([share.device]), job=True)
        request = Request(
            client=isinstance(share, MpsShare),
            name=options.name,
            run_seconds=self.queue.run_seconds,
        )
        unqueued = replace(self.queue, wait=False)
        return self._run_in_ledger((share.device,), request, options, unqueued, start)

    def _say_dropped(self) -> None:
        """Say which variables of the caller mean nothing outside MPS."""
        dropped = dropped_variables(os.environ)
        if dropped:
            self.say(f"ignored without MPS: {', '.join(dropped)}")

    def _run_production(self, devices: Sequence[Device], options: RunOptions, name: str) -> Any:
        """Run a production job: outside MPS with a slice, or under MPS if options or tune say so."""
        device = devices[0]
        slice_us = self.role.slice_us
        options = replace(options, role=PRODUCTION)
        # `tune` finds the setting on one GPU.
        tuned = find_tuned(self.host, name) if len(devices) == 1 else None
        is_tuned_for_mps = slice_us is None and tuned is not None and tuned.way is Way.CAPS
        if not _asks_for_mps(options) and not is_tuned_for_mps:
            tuned_us = None if tuned is None else tuned.production_slice_us
            return self._run_sliced(devices, options, slice_us or tuned_us or PRODUCTION_US, asked=slice_us is not None)
        group = slices_of_group(self.host, device)
        if group:
            raise InUse(
                f"opportunistic jobs with a time-slice run in the MPS daemon of {device.title} (process {min(group)}),"
                " and production would share it",
                f"start it outside MPS: gpushare run --production {name} -- CMD",
                gpu=device.gpu.index,
                code="production_under_mps",
            )
        return self._carry_out(MpsShare(self.host, device, options.limits, own_limits=False), options)

    def _run_sliced(self, devices: Sequence[Device], options: RunOptions, slice_us: int, *, asked: bool = True) -> Any:
        """Run a program outside MPS with a time-slice. If that was not ``asked`` for, it runs even where none can be set."""
        for device in devices:
            check_outside_mps(device)
        if asked:
            check_settable(self.host)
        self._say_dropped()
        return self._carry_out(self._plain_share(devices), options, OwnSlice(self.host, slice_us), slice_us=slice_us)

    def _run_opportunistic(self, devices: Sequence[Device], options: RunOptions) -> Any:
        """Run a job that yields to production, in the way that was asked for, tuned, or is possible here.

        On several GPUs its ranks are paused, or ended, together while production works on one of them.
        """
        options = replace(options, role=OPPORTUNISTIC)
        device = devices[0]
        yields = self.role.yields
        process = self._spared_process(devices)
        needs_production = len(devices) > 1 or yields in {"requeue", "pause"}
        if process is None and needs_production:
            raise _not_one_production_error(self.host, devices)
        if process is not None and yields == "requeue":
            return self._run_requeued(devices, options, process)
        if len(devices) == 1 and self._runs_by_slices(device, process):
            return self._run_in_group(device, options, process)
        # A cap protects only production under MPS.
        if process is not None and (needs_production or not process.under_mps):
            return self._run_paused(devices, options, process)
        next_to = "" if process is None else f" next to {process.title}"
        return self._carry_out(*self._capped_share(device, options, f"opportunistic{next_to}"))

    def _spared_process(self, devices: Sequence[Device]) -> ProductionJob | None:
        """Return the production job to spare, which runs on one of these devices; None: none does."""
        for device in devices:
            try:
                process = spared_process(self.host, device, self.role.target)
            except BadUsage as error:
                # It runs on another of these GPUs.
                if error.code != "other_device" or device is devices[-1]:
                    raise
            else:
                if process is not None:
                    return process
        return None

    def _runs_by_slices(self, device: Device, process: ProductionJob | None) -> bool:
        """Return whether the job runs with a time-slice: as asked, as tuned, or because production runs outside MPS."""
        outside = process is not None and not process.under_mps
        if self.role.yields == "caps":
            if process is not None and outside:
                raise InUse(
                    f"{process.title} runs outside MPS, where a cap does not protect it",
                    "use a time-slice: --yield slices; or start production under MPS: --threads 100",
                    code="production_outside_mps",
                )
            return False
        if self.role.yields == "pause":
            return False
        asked = self.role.yields == "slices" or self.role.keep is not None
        if asked and process is not None and process.under_mps:
            raise production_under_mps_error(process.title, process.name)
        if self.role.keep is not None and process is None:
            raise _not_one_production_error(self.host, [device])
        tuned = tuned_next_to(self.host, device, self.role.target)
        by_tune = tuned is not None and tuned.way is Way.SLICES
        if by_tune and not asked and process is not None and process.under_mps:
            return False
        if not (asked or outside or by_tune):
            return False
        reason = why_not_settable(self.host, device)
        if reason is None:
            return True
        if asked:
            raise reason
        instead = "this job is paused while it works" if outside else "this job gets a cap"
        self.say(f"time-slices are not supported here: {reason.message}; {instead}")
        return False

    def _run_in_group(self, device: Device, options: RunOptions, process: ProductionJob | None) -> Any:
        """Run an opportunistic job in the one MPS daemon of a device, next to production, which runs outside MPS.

        All opportunistic jobs are clients of that daemon's server, so its time-slice is the one slice of them all. A short
        one keeps production fast. The slice is as given, else as tuned, else the default.
        """
        spared = limits_beside(self.host, device, options.limits, self.role.target, way=Way.SLICES)
        tuned_slice_us = None if spared.tuned is None else spared.tuned.other_slice_us
        slice_us = self.role.slice_us or tuned_slice_us or DEFAULT_US
        title = "production" if process is None else process.title
        group = GroupSlice(self.host, device, slice_us, title, self.role.keep)
        parts: list[Part] = [group]
        if process is not None:
            # If the slice cannot be set, the job is paused while production works.
            group.instead = PauseForProduction(self.host, process)
            if self.role.keep is not None:
                _check_rate_known(process)
                parts.append(AdaptedSlice(group, process, self.role.keep))
        for text in spared.notes:
            self.say(text)
        self._say_group(device, spared.limits, slice_us, process)
        share = MpsShare(self.host, device, spared.limits)
        return self._carry_out(share, replace(options, limits=spared.limits), *parts, slice_us=slice_us)

    def _say_group(self, device: Device, limits: Limits, slice_us: int, process: ProductionJob | None) -> None:
        """Say what the opportunistic jobs of the device share, and which of them a GPU fault ends."""
        shared_slice = f"a time-slice of {format_slice(slice_us)}"
        if process is None:
            role_text = "opportunistic; there is not exactly one production job to yield to now"
        else:
            role_text = f"opportunistic next to {process.title}"
            if self.role.keep is not None:
                shared_slice = f"a time-slice by which {process.title} keeps {100 * self.role.keep:g} % of its speed"
        self.say(f"{role_text}: all opportunistic jobs of {device.title} share {shared_slice}; {_limits_text(limits)}")
        self.say("a GPU fault of one of them ends all of them, but not production, which runs outside MPS")

    def _run_paused(self, devices: Sequence[Device], options: RunOptions, process: ProductionJob) -> Any:
        """Run a program that is paused while a production job works on one of the devices."""
        how = "by SIGSTOP" if process.under_mps and len(devices) == 1 else "by its GPU channels"
        self.say(f"opportunistic next to {process.title}: paused {how} while it works; its memory stays on the GPU")
        share, options = self._share_beside(devices, options, process)
        pause = PauseForProduction(self.host, process, by_channels=not isinstance(share, MpsShare), say=self.say)
        return self._carry_out(share, options, pause)

    def _share_beside(
        self, devices: Sequence[Device], options: RunOptions, process: ProductionJob
    ) -> tuple[Share, RunOptions]:
        """Return the share and the options of a job that leaves the GPU to production; say its limits."""
        if process.under_mps and len(devices) == 1:
            share, options = self._capped_share(devices[0], options, "when it runs")
            self.say(_CPU_ONLY)
            return share, options
        if _asks_for_mps(options):
            self.say("there are no limits outside MPS: --threads and --priority are ignored")
        return self._plain_share(devices), options

    def _capped_share(self, device: Device, options: RunOptions, prefix: str) -> tuple[MpsShare, RunOptions]:
        """Return the share and the options of an opportunistic client of MPS; say its limits after the prefix."""
        spared = limits_beside(self.host, device, options.limits, self.role.target)
        for text in (*spared.notes, f"{prefix}: {_limits_text(spared.limits)}", NOT_PROTECTED):
            self.say(text)
        return MpsShare(self.host, device, spared.limits), replace(options, limits=spared.limits)

    def _run_requeued(self, devices: Sequence[Device], options: RunOptions, process: ProductionJob) -> Any:
        """Run a job that is ended while production works, and started again when that rests: one job for all its runs."""
        check_program(options.container or self.command[0])
        self.say(f"opportunistic next to {process.title}: ended while it works, and started again when it rests")
        share, options = self._share_beside(devices, options, process)
        if self.dry_run:
            return self._carry_out(share, options)
        # Its record stays while it waits for production to rest.
        job = self._recorded_job(share, options)
        job.check()
        job.open()
        options = replace(options, name=job.record.name, stays=True)
        try:
            return Yielding(
                production=process, options=options, start=partial(self._carry_out, share), say=self.say
            ).run()
        finally:
            job.close()
            job.forget()


def _asks_for_mps(options: RunOptions) -> bool:
    """Return whether options are given that only MPS has."""
    return options.limits.threads_percent is not None or options.limits.priority is not None


def _without_refused(devices: Sequence[Device], errors: Sequence[GpushareError | None]) -> tuple[Device, ...]:
    """Return the devices that have no error; if all have one, raise the first."""
    usable_devices = tuple(device for device, error in zip(devices, errors, strict=True) if error is None)
    first_error = next(iter(errors), None)
    if first_error is not None and not usable_devices:
        raise first_error
    return usable_devices


def check_enough(devices: Sequence[Device], count: int) -> None:
    """Raise if a job of ``count`` GPUs may have fewer."""
    if len(devices) < count:
        raise BadUsage(
            f"--gpus {count}: the job can choose from {counted(len(devices), 'GPU')} only",
            f"give it fewer: --gpus {len(devices)}; or name more GPUs with -g, if there are more",
            code="too_few_gpus",
        )


def check_not_mig(devices: Sequence[Device], *, whole: bool) -> None:
    """Raise NotSupported if one is a GPU in MIG mode, where programs run in its instances; with ``whole`` also for an instance.

    A job that is swapped, or has several GPUs, needs whole ones: a CUDA program uses one MIG instance (MIG user guide).
    """
    reason = "programs run in its instances"
    if whole:
        reason = "a job that is swapped or has several GPUs needs whole ones"
    for device in devices:
        if device.gpu.mig_enabled and (device.mig is None or whole):
            raise NotSupported(
                f"{device.title} is in MIG mode: {reason}",
                "name another GPU; or run in an instance: gpushare run --mig 1g -- CMD",
                gpu=device.gpu.index,
                code="mig_enabled",
            )


def _check_rate_known(process: ProductionJob) -> None:
    """Raise NotFound unless it is known where production prints its speed."""
    if process.rate() is None:
        name = process.name or "NAME"
        raise NotFound(
            f"the speed of {process.title} is not known, which --keep needs",
            f"start it with --metric: gpushare run --production {name} --metric 'rate=([0-9.]+)' -- CMD",
            code="no_progress",
        )


def _not_one_production_error(host: Host, devices: Sequence[Device]) -> BadUsage | NotFound:
    """Return the error if the production job to spare was not named, and none runs there, or several do."""
    names = [*dict.fromkeys(job.name for device in devices for job in living_productions(host, device))]
    if len(names) < 2:
        return NotFound(
            f"no production job runs on {titles(devices)}",
            f"start it: gpushare run --production NAME -g {devices[0].selector} -- CMD; or name a process: --for PID",
            code="no_production",
        )
    return BadUsage(
        f"{len(names)} production jobs run on {titles(devices)}: {', '.join(names)}",
        f"name the one to spare: --for {names[0]}",
        code="several_production",
    )


def _limits_text(limits: Limits) -> str:
    """Return limits for people: ``cap 60 %, low priority, memory limit 96.0 GiB``."""
    words = ["no cap" if limits.threads_percent is None else f"cap {format_percent(limits.threads_percent)}"]
    if limits.priority:
        words.append("low priority")
    if limits.memory_limit_bytes is not None:
        words.append(f"memory limit {format_bytes(limits.memory_limit_bytes)}")
    return ", ".join(words)


@dataclass
class CpuBinding(Part):
    """The CPUs of a job (sched_setaffinity): those next to any of its GPUs, as far as this process may use them.

    Its memory follows: Linux gives a process memory of the NUMA node on which it first uses it.
    """

    host: Host
    devices: Sequence[Device]
    _cpus: frozenset[int] = field(default=frozenset())

    def check(self) -> None:
        """Find the CPUs next to the job's GPUs that this process may use.

        Raises:
            NotSupported: the driver does not name them, or this process may use none of them (code ``cpus_unknown``).
        """
        cpus_by_device = [self.host.nvml.cpus(device.gpu.index) for device in self.devices]
        known_cpus = [cpus for cpus in cpus_by_device if cpus is not None]
        self._cpus = frozenset(set().union(*known_cpus) & os.sched_getaffinity(0))
        reason = None
        if len(known_cpus) < len(cpus_by_device):
            reason = "the driver does not say which CPUs are"
        elif not self._cpus:
            reason = "this process may not use the CPUs that are"
        if reason is not None:
            raise NotSupported(
                f"{reason} next to {titles(self.devices)}",
                "run it without --bind; see: nvidia-smi topo -m",
                code="cpus_unknown",
            )

    @property
    def where(self) -> str:
        """Return on which CPUs the program runs, for a step of a plan."""
        return f", on CPUs {ranges(self._cpus)}" if self._cpus else ""

    def enter(self, pid: int) -> None:
        """Bind the new process before it runs the program: all that it starts inherits it."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, self._cpus)

    def started(self, watch: Watch) -> None:
        """Read back on which CPUs the program may run, and tell the user if others are among them."""
        with contextlib.suppress(OSError):
            if not os.sched_getaffinity(watch.program_pid) <= self._cpus:
                watch.troubles.append(f"the program does not run on CPUs {ranges(self._cpus)}")


_TICK_SECONDS: Final = 0.01
# So long production must be quiet; twice as long after each run that was ended early, because a start costs time too.
_FIRST_QUIET_SECONDS: Final = 2.0
_MOST_QUIET_SECONDS: Final = 60.0
_EARLY_SECONDS: Final = 10.0


class YieldToProduction(Part):
    """Ends the program once production works; ``yielded`` from then on."""

    def __init__(self, production: ProductionJob) -> None:
        self._production = production
        self.due = 0.0
        self.yielded = False

    def poll(self) -> bool:
        """Return whether production works, or has worked: then the program has to end."""
        self.due = time.monotonic() + _TICK_SECONDS
        self.yielded = self.yielded or self._production.works()
        return self.yielded


@dataclass
class Yielding:
    """Runs a program whenever production rests, and ends it when production works, until the program ends by itself.

    REEF does the same with kernels. The program must be able to start again, for instance from a checkpoint; unlike a pause,
    this leaves no memory on the GPU. ``start`` runs it once with the given options and returns its exit code.
    """

    production: ProductionJob
    options: RunOptions
    start: Callable[[RunOptions], Any]
    say: Callable[[str], None]
    _quiet: float = _FIRST_QUIET_SECONDS

    def run(self) -> Any:
        """Run the program until it ends by itself, and return its exit code."""
        self._wait(_FIRST_QUIET_SECONDS, is_reported=False)
        while True:
            part = YieldToProduction(self.production)
            began = time.monotonic()
            code = self.start(replace(self.options, parts=(*self.options.parts, part)))
            if not part.yielded:
                return code
            if time.monotonic() - began < _EARLY_SECONDS:
                self._quiet = min(2 * self._quiet, _MOST_QUIET_SECONDS)
            else:
                self._quiet = _FIRST_QUIET_SECONDS
            title = self.production.title
            self.say(
                f"ended, because {title} works; it starts again when {title} has rested for "
                f"{format_duration(self._quiet)}"
            )
            self._wait(self._quiet, is_reported=True)

    def _wait(self, quiet_seconds: float, *, is_reported: bool) -> None:
        """Wait until production has been quiet for some seconds; tell the user that the job waits, unless it ``is_reported``."""
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < quiet_seconds:
            if self.production.works():
                quiet_since = time.monotonic()
                if not is_reported:
                    is_reported = True
                    self.say(f"waits until {self.production.title} rests")
            time.sleep(_TICK_SECONDS)
