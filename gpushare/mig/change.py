"""A MIG change as a transaction: a journal entry before each call, a read-back after it, a rollback on an error."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.base.errors import GpushareError, InUse, NotHeld, needs_root_error
from gpushare.base.model import MPS_SERVER, Gpu, GpuProcess, Holder
from gpushare.base.selection import Device, no_mig_error, titles
from gpushare.host.capabilities import NODES
from gpushare.host.claims import Claim, take_claim
from gpushare.host.host import Host, ending_hint
from gpushare.host.identity import is_kernel_thread, start_of
from gpushare.host.process import processes_text, signal_if_same, wait_gone
from gpushare.host.records import has_records
from gpushare.mig.daemons import (
    daemon_steps_after,
    daemon_steps_before,
    daemons_of_others,
    idle_daemon_pids,
    stopped_records,
)
from gpushare.mig.driver import NOT_READ_BACK, MigChanges
from gpushare.mig.holders import CLAIM, gpu_holders, instance_holders, release_remedy, with_name
from gpushare.mig.ledger import MigLedger, NamedInstance
from gpushare.mig.plan import Call, GpuPlan, InstanceChange, mode_step, steps_of
from gpushare.mig.profile import Layout, on_or_off
from gpushare.mig.recover import Calls, creation_made, restore, shape_now
from gpushare.mig.shape import GpuShape, differences, shape_of
from gpushare.mps.home import DaemonRecord
from gpushare.plan import Loss, NotUndone, Plan, Step, carry_out

# nvidia-persistenced releases a GPU for a reset by itself. Its name in full, and as the kernel cuts it.
_RELEASES_FOR_RESET: Final = {"nvidia-persistenced", "nvidia-persiste"}


def _mode_change_notes(host: Host, gpu: Gpu, *, enable: bool) -> list[str]:
    """Return notes on what a change of the MIG mode costs: a reset, and what a reboot takes."""
    resetless = MigChanges(host.nvml).switches_without_reset(gpu.index)
    notes = []
    if enable and resetless:
        notes.append("MIG and its instances are lost at a reboot or when the driver is reloaded")
    elif enable:
        notes.append("MIG stays on after a reboot; its instances are lost")
    if not resetless:
        notes.append("switching its MIG mode resets it")
    return [f"GPU {gpu.index}: {note}" for note in notes]


def _check_switchable(host: Host, switched: Sequence[tuple[Gpu, Collection[int]]]) -> None:
    """Raise unless the MIG mode of GPUs can change, each given with the PIDs that the change ends first.

    From Hopper on, the driver switches the mode of a busy GPU, and only the first instance fails.

    Raises:
        NotSupported: a GPU has no MIG.
        InUse: a process is on a GPU, or a program without a CUDA context holds one that must be reset.
    """
    processes: list[tuple[Gpu, GpuProcess]] = []
    holders: list[tuple[Gpu, Holder]] = []
    for gpu, ending in switched:
        if not gpu.mig_capable:
            raise no_mig_error([gpu])
        blind = host.processes.namespace_is_host() is False and not gpu.processes
        if gpu.processes is None or blind:
            raise InUse(
                f"GPU {gpu.index}: the driver does not list the processes on it, so its MIG mode is not changed",
                "run as root, outside a container",
                gpu=gpu.index,
                code="unknown_holders",
            )
        idle = idle_daemon_pids(host, gpu).union(ending)
        processes += [(gpu, process) for process in gpu.processes if process.pid not in idle]
        if not MigChanges(host.nvml).switches_without_reset(gpu.index):
            others = (holder for holder in gpu_holders(host, gpu) if holder.name not in _RELEASES_FOR_RESET)
            holders += [(gpu, holder) for holder in others if holder.pid not in idle]
    if processes:
        raise _processes_error(host, processes)
    if holders:
        gpu = holders[0][0]
        of_gpu = [holder for each, holder in holders if each is gpu]
        raise InUse(
            f"GPU {gpu.index} must be reset, and this holds it: {processes_text(host.processes, [each.pid for each in of_gpu])}",
            release_remedy(of_gpu) or f"{ending_hint(host, of_gpu[0].pid)}; then run this again",
            gpu=gpu.index,
        )


def _processes_error(host: Host, processes: Sequence[tuple[Gpu, GpuProcess]]) -> InUse:
    """Return the error about processes on GPUs whose MIG mode is to change."""
    gpus = list({gpu.index: gpu for gpu, _ in processes}.values())
    names = {process.pid: with_name(host, process).name for _, process in processes}
    # An MPS server ends after its clients.
    ended = [pid for pid in sorted(names) if names[pid] != MPS_SERVER]
    numbers = ",".join(str(gpu.index) for gpu in gpus)
    command = f"stop {' '.join(map(str, ended))}" if ended else f"mps stop -g {numbers}"
    return InUse(
        f"{titles([Device(gpu=gpu) for gpu in gpus])}: these must end before the MIG mode can change: "
        f"{processes_text(host.processes, names)}",
        f"see all: gpushare status -g {numbers}; end them, or ask their users to end them: gpushare {command}",
        gpu=gpus[0].index if len(gpus) == 1 else None,
    )


def _switch_step(host: Host, gpu: Gpu, ledger: MigLedger, *, enable: bool) -> Step:
    """Return the step that switches MIG mode and reads it back; undoing it cancels a pending mode, too."""
    changes = MigChanges(host.nvml)
    enabled_now = bool(gpu.mig_enabled)

    def switch() -> None:
        if not host.root:
            raise needs_root_error(f"GPU {gpu.index}: switching MIG", gpu.index)
        ledger.note(f"MIG {on_or_off(enable)} on GPU {gpu.index}: nvmlDeviceSetMigMode")
        host.nvml.restart()
        changes.set_mode(gpu.index, enabled=enable)

    def switch_back() -> None:
        # Current and pending.
        if changes.mode(gpu.index) != (enabled_now, enabled_now):
            host.nvml.restart()
            changes.set_mode(gpu.index, enabled=enabled_now)

    return mode_step(gpu.index, switch, switch_back, enable=enable)


GRACE_SECONDS: Final = 10.0
# A `gpushare run` releases its instance when its program has ended.
CLAIM_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 5.0


def holders_of(removed: InstanceChange) -> list[int]:
    """Return the PIDs of the processes that are seen in what is destroyed, or that hold its GPU instance by its node.

    A `gpushare run` that has only claimed the instance is not seen in it.
    """
    seen = (
        holder
        for holder in removed.known_holders
        if isinstance(holder, GpuProcess) or holder.what.startswith(f"{NODES}/")
    )
    return sorted({holder.pid for holder in seen})


def _refuse_claimed(host: Host, gpu: Gpu, removed: InstanceChange) -> None:
    """Raise InUse if a job has claimed an instance that is to go, and has no process in it yet that could be ended."""
    claims = [holder for holder in removed.known_holders if isinstance(holder, Holder) and holder.what == CLAIM]
    if claims and not holders_of(removed):
        raise _claimed_error(host, gpu, str(removed.instance), claims[0].pid)


def _claimed_error(host: Host, gpu: Gpu, title: str, pid: int) -> InUse:
    return InUse(
        f"GPU {gpu.index}: {title} is claimed by process {processes_text(host.processes, [pid])}; "
        "the driver does not list it there, so --evict does not end it",
        f"wait until it ends, or check it and end it yourself: ps -fp {pid}",
        gpu=gpu.index,
        code="claimed",
    )


class Eviction:
    """End the processes in a MIG instance named by ``--evict``: SIGTERM, then SIGKILL. They are those seen at planning.

    MPS daemons are stopped by their own step; without MPS, ending one process harms no other.
    """

    def __init__(self, host: Host, gpu: Gpu, removed: InstanceChange) -> None:
        self._host, self._gpu, self._removed = host, gpu, removed
        self.title = str(removed.instance)
        # When each started: PIDs are reused.
        self.started = {pid: start_of(self._host.processes.identity(pid)) for pid in holders_of(removed)}
        # Claims on the instance until the end of the change: no `gpushare run` starts in it.
        self.claims = contextlib.ExitStack()
        # Whether the first process may have got a signal.
        self.begun = False

    def step(self) -> Step:
        """Return the step that ends the processes; it cannot be undone. Raises InUse if one must not be ended."""
        self._check_evictable()
        pids = sorted(self.started)
        count = f"{len(pids)} {'process' if len(pids) == 1 else 'processes'}"
        who = processes_text(self._host.processes, pids, most=len(pids))
        return Step(
            what=f"end {count} in {self.title} on GPU {self._gpu.index}: {who}",
            command=f"kill {' '.join(map(str, pids))}",
            do=self._end_processes,
        )

    def _check_evictable(self) -> None:
        """Raise InUse if a process must not be ended: a service, one above this gpushare, one of the kernel."""
        held = [holder for holder in self._removed.known_holders if isinstance(holder, Holder) and holder.what != CLAIM]
        way = release_remedy(held)
        if way is not None:
            raise InUse(
                f"GPU {self._gpu.index}: {self.title} is held by {processes_text(self._host.processes, [each.pid for each in held])}; --evict does not end it",
                way,
                gpu=self._gpu.index,
                code="held_by_service",
            )
        if self._host.processes.namespace_is_host() is False:
            raise self._not_evictable_error(
                self.started, "has another PID here than the driver reports", "run on the host, outside the container"
            )
        listed = {holder.pid for holder in self._removed.known_holders if isinstance(holder, GpuProcess)}
        for pid in sorted(self.started):
            if pid in {1, *self._host.processes.ancestry(os.getpid())}:
                raise self._not_evictable_error([pid], "runs this gpushare", "run it from another shell")
            if is_kernel_thread(pid):
                raise self._not_evictable_error([pid], "is a thread of the kernel", "see why: gpushare doctor")
            if pid not in listed and self._host.processes.uses_driver(pid) is not True:
                reason = "only has its device node open and does not use the driver's library"
                raise self._not_evictable_error([pid], reason, f"check it and end it yourself: ps -fp {pid}")

    def _end_processes(self) -> None:
        """End the processes, and claim the devices for the rest of the change. Raises InUse if one does not end."""
        self.begun = True
        if has_records(self._host, "pause"):
            from gpushare.pause.change import resume_before_end

            # A handler that waits for the GPU does not end a paused program.
            resume_before_end(self._host, self.started)
        alive = self._signal_and_wait(sorted(self.started), signal.SIGTERM, GRACE_SECONDS)
        alive = self._signal_and_wait(alive, signal.SIGKILL, _KILL_SECONDS)
        if alive:
            raise InUse(
                f"GPU {self._gpu.index}: {processes_text(self._host.processes, alive)} in {self.title} did not end",
                f"see why: ps -o pid,stat,wchan,cmd -p {','.join(map(str, alive))}",
                gpu=self._gpu.index,
            )
        for part in self._removed.compute:
            if part.uuid:
                self._claim_device(part.uuid)

    def _claim_device(self, uuid: str) -> None:
        """Claim a device, once the `gpushare run` whose program was ended has released it."""
        deadline = time.monotonic() + CLAIM_SECONDS
        while isinstance(claim := take_claim(self._host, uuid), Claim):
            if time.monotonic() > deadline:
                raise _claimed_error(self._host, self._gpu, self.title, claim.pid)
            time.sleep(0.05)
        self.claims.callback(claim.release)

    def _signal_and_wait(self, pids: list[int], number: int, seconds: float) -> list[int]:
        """Send a signal to the processes that are still inside and not new ones; return those alive after ``seconds``.

        A client whose MPS daemon this change has stopped, for example, is no longer inside.
        """
        inside = self._pids_inside() if pids else set()
        starts = {pid: started for pid in pids if pid in inside and (started := self.started[pid]) is not None}
        for pid, started in starts.items():
            signal_if_same(self._host.processes, pid, started, number)
        return wait_gone(self._host.processes, starts, seconds)

    def _pids_inside(self) -> set[int]:
        """Return the PIDs in the instance at this moment, by NVML and by the capability nodes."""
        # An open session keeps the old MIG devices.
        self._host.nvml.restart()
        try:
            gpu = self._host.nvml.gpu(self._gpu.index)
            nodes = instance_holders(self._host, gpu)
        except GpushareError:
            return set()
        # None: the GPU instance itself.
        parts = {None, *(part.id for part in self._removed.compute)}
        places = {(self._removed.instance.id, part) for part in parts}
        pids = {
            process.pid
            for process in gpu.processes or ()
            if (process.gpu_instance_id, process.compute_instance_id) in places
        }
        pids |= {holder.pid for place, holders in nodes.items() if place in places for holder in holders}
        # Reading has opened handles on MIG devices, which keep them in use.
        self._host.nvml.restart()
        return pids

    def _not_evictable_error(self, pids: Collection[int], reason: str, hint: str) -> InUse:
        return InUse(
            f"GPU {self._gpu.index}: {processes_text(self._host.processes, pids)} in {self.title} {reason}; --evict does not end it",
            hint,
            gpu=self._gpu.index,
            code="not_evictable",
        )


@dataclass(frozen=True, kw_only=True)
class GpuChange:
    """What happens to one GPU: its instances, and its mode (None: stays)."""

    gpu: Gpu
    layout: Layout
    plan: GpuPlan
    enable: bool | None = None

    @property
    def changes(self) -> bool:
        return self.plan.changes or self.enable is not None

    @property
    def switches(self) -> bool:
        """Return whether the MIG mode changes, and not only a pending one is canceled, which needs no idle GPU."""
        return self.enable is not None and self.enable != self.gpu.mig_enabled

    @property
    def before(self) -> GpuShape:
        return shape_of(self.layout, mig_enabled=self.gpu.mig_enabled)

    @property
    def after(self) -> GpuShape:
        enabled = self.gpu.mig_enabled if self.enable is None else self.enable
        return shape_of(self.layout, mig_enabled=enabled, instances=self.plan.after)

    @property
    def lost_uuids(self) -> set[str]:
        """Return the UUIDs of the devices whose MPS daemon must stop: MIG devices that go, and the GPU if MIG goes on."""
        gpu = {self.gpu.uuid} if self.enable and self.gpu.uuid else set()
        return self.plan.destroyed_uuids | gpu

    @property
    def staying(self) -> list[Device]:
        """Return the MIG devices that it leaves alone; their MPS daemons are started again if they died."""
        return [Device(gpu=self.gpu, mig=mig) for mig in self.gpu.mig_instances if mig.uuid not in self.lost_uuids]


def gpu_change(gpu: Gpu, layout: Layout, plan: GpuPlan, mode: bool | None = None) -> GpuChange:  # noqa: FBT001
    """Return the change of a GPU to a MIG mode; None: it stays as it is.

    A mode that is in force while the other one is pending is set again: that cancels the pending one.
    """
    in_force = mode is None or (gpu.mig_enabled == mode and gpu.mig_pending in {None, mode})
    return GpuChange(gpu=gpu, layout=layout, plan=plan, enable=None if in_force else mode)


@dataclass(frozen=True, kw_only=True)
class MigChange:
    """A change of several GPUs, with the plan that carries it out."""

    gpus: tuple[GpuChange, ...]
    plan: Plan
    notes: tuple[str, ...] = field(default=())
    # The names that the change gives.
    names: tuple[NamedInstance, ...] = field(default=())
    # The daemons that it stops, for the journal.
    daemons: tuple[DaemonRecord, ...] = field(default=())
    instances: tuple[_InstanceWork, ...] = field(default=(), repr=False, compare=False)
    evictions: tuple[Eviction, ...] = field(default=(), repr=False, compare=False)


def plan_change(
    host: Host,
    changes: Sequence[GpuChange],
    ledger: MigLedger,
    *,
    title: str,
    evict: Collection[tuple[int, int]] = (),
    first: Sequence[Step] = (),
    naming: Sequence[str] = (),
    after: Sequence[Step] = (),
) -> MigChange:
    """Return a change of GPUs as planned, checked for what forbids it, with its steps and the consent it needs.

    ``evict`` are the instances whose processes are ended: (GPU index, GPU instance id). ``first`` are steps before all
    others: a name is bound early, so that a crash does not lose it. ``naming`` are the commands that bind these names once
    the instances exist: the plan shows them there. ``after`` are steps for when the instances exist.
    """
    evicted_on = {
        change.gpu.index: [
            removed for removed in change.plan.destroyed if (change.gpu.index, removed.instance.id) in evict
        ]
        for change in changes
    }
    switched = [
        (change.gpu, [pid for removed in evicted_on[change.gpu.index] for pid in holders_of(removed)])
        for change in changes
        if change.switches
    ]
    _check_switchable(host, switched)
    changing = [change for change in changes if change.changes]
    parts = [_plan_gpu(host, change, ledger, evicted_on[change.gpu.index]) for change in changing]
    steps = [step for part in parts for step in part.plan.steps]
    if naming and steps:
        steps[-1] = replace(steps[-1], command="\n".join(filter(None, [steps[-1].command, *naming])))
    # Dead MPS daemons start again when the instances of all GPUs exist.
    starting = daemon_steps_after(host, [device for change in changing for device in change.staying])
    losses = tuple(loss for part in parts for loss in part.plan.consent)
    return MigChange(
        gpus=tuple(changes),
        plan=Plan(title=title, steps=(*first, *steps, *starting, *after), consent=losses),
        notes=tuple(note for part in parts for note in part.notes),
        daemons=tuple(record for part in parts for record in part.daemons),
        instances=tuple(work for part in parts for work in part.instances),
        evictions=tuple(eviction for part in parts for eviction in part.evictions),
    )


def _plan_gpu(host: Host, change: GpuChange, ledger: MigLedger, evicted: Sequence[InstanceChange]) -> MigChange:
    """Return the part of a transaction on one GPU; ``evicted`` are its instances whose processes are ended."""
    gpu = change.gpu
    notes = []
    if change.after.mig_enabled and not change.after.instances:
        notes.append(f"GPU {gpu.index}: with MIG on and no instance, no CUDA program can use it")
    if change.enable is not None and change.switches:
        notes += _mode_change_notes(host, gpu, enable=change.enable)
    losses = (*_losses(host, change), *daemons_of_others(host, gpu, change.lost_uuids))
    for removed in evicted:
        _refuse_claimed(host, gpu, removed)
    evictions = [Eviction(host, gpu, removed) for removed in evicted if holders_of(removed)]
    forced = {part.uuid for removed in evicted for part in removed.compute if part.uuid}
    steps = [*daemon_steps_before(host, gpu, change.lost_uuids, evicted=forced), *(each.step() for each in evictions)]
    if change.enable:
        steps.append(_switch_step(host, gpu, ledger, enable=True))
    instances = _InstanceWork(host, change, ledger)
    steps += instances.steps()
    if change.enable is False:
        steps.append(_switch_step(host, gpu, ledger, enable=False))
    return MigChange(
        gpus=(change,),
        plan=Plan(title="", steps=tuple(steps), consent=losses),
        notes=tuple(notes),
        daemons=stopped_records(host, gpu, change.lost_uuids),
        instances=(instances,),
        evictions=tuple(evictions),
    )


def _losses(host: Host, change: GpuChange) -> Iterator[Loss]:
    """Yield what a change destroys that is named, granted, busy, or not made by gpushare."""
    for removed in change.plan.destroyed:
        instance = removed.instance
        sizes = Counter(part.profile.name for part in removed.compute)
        parts = [f"{size}.{instance}" + (f"*{count}" if count > 1 else "") for size, count in sizes.items()]
        lost = f"{instance if removed.whole else ', '.join(parts)} on GPU {change.gpu.index}"
        reasons = []
        if instance.name:
            reasons.append(f"named '{instance.name}'")
        if instance.granted:
            reasons.append(f"granted to {', '.join(instance.granted)}")
        for pid in sorted({holder.pid for holder in removed.known_holders}):
            reasons.append(f"in use by {processes_text(host.processes, [pid])}")
        if not instance.made:
            reasons.append("not made by gpushare")
        if reasons:
            yield Loss(action="destroys", what=lost, why=tuple(reasons))


class _InstanceWork:
    """The instances of one GPU while they change."""

    def __init__(self, host: Host, change: GpuChange, ledger: MigLedger) -> None:
        self._host, self._change, self._ledger = host, change, ledger
        self._calls = Calls(host.nvml)
        self._begun = False
        # The instances that a rollback left, in words, because another program created them.
        self.left_alone: tuple[str, ...] = ()

    def steps(self) -> list[Step]:
        """Return the steps: the last one reads the layout back, and the undo of the first one restores it."""
        steps = steps_of(self._change.plan, self._carry_out_call)
        if steps:
            last = steps[-1].do

            def finish() -> None:
                last()
                self._check_layout()

            steps[-1] = replace(steps[-1], do=finish)
            # The undo of the first step restores the whole GPU, from what the host has.
            steps[0] = replace(steps[0], revert=self._restore)
        return steps

    def _carry_out_call(self, what: str, call: Call) -> None:
        """Do one call. What it creates is noted in the journal before it, with the ids that exist, and after it."""
        if not self._begun:
            # Our own handles on MIG devices keep them in use.
            self._host.nvml.restart()
            self._begun = True
        creation = self._calls.creation(self._change.before.uuid, call)
        self._ledger.note(f"{what}: {call.action.value}", creation)
        try:
            made = self._calls.do(call)
        except GpushareError as error:
            # An instance that cannot be read back may exist.
            if error.code != NOT_READ_BACK:
                self._ledger.note_refused()
            raise
        if creation is not None and made is not None:
            self._ledger.note_created(creation_made(self._host, creation, call.gpu, made))

    def _check_layout(self) -> None:
        """Raise NotHeld if the layout is not the planned one."""
        present = shape_now(self._host, self._change.gpu.index)
        # Where the change switches MIG off, that is a later step.
        wrong = differences(present, replace(self._change.after, mig_enabled=True))
        if wrong:
            raise NotHeld(
                f"the driver accepted every call, but the layout differs: {'; '.join(wrong)}",
                "see: gpushare mig status",
                gpu=self._change.gpu.index,
            )

    def _restore(self) -> None:
        """Bring the GPU back to its shape before; without a call made, nothing has changed."""
        if self._begun:
            self.left_alone = restore(self._host, self._change.before, self._ledger.proof)


def transact(host: Host, ledger: MigLedger, change: MigChange, on_step: Callable[[Step], None] | None = None) -> None:
    """Carry a change out, noted in the journal so that a crash can be undone. The caller holds its lock."""
    if not change.plan.steps:
        return
    with contextlib.ExitStack() as claims:
        for eviction in change.evictions:
            claims.enter_context(eviction.claims)
        _take_claims(host, change, claims)
        _carry_out_with_journal(ledger, change, on_step)


def _take_claims(host: Host, change: MigChange, claims: contextlib.ExitStack) -> None:
    """Claim what is destroyed, so that no `gpushare run` starts in it; evictions claim theirs when it is empty."""
    for gpu_change in change.gpus:
        for removed in gpu_change.plan.destroyed:
            for part in removed.compute:
                if not part.uuid or part.busy or removed.instance.busy:
                    continue
                claim = take_claim(host, part.uuid)
                if isinstance(claim, Claim):
                    raise InUse(
                        f"GPU {gpu_change.gpu.index}: a gpushare run has just taken {removed.instance}: process {processes_text(host.processes, [claim.pid])}",
                        f"see who: gpushare mig status -g {gpu_change.gpu.index}",
                        gpu=gpu_change.gpu.index,
                    )
                claims.callback(claim.release)


def _carry_out_with_journal(ledger: MigLedger, change: MigChange, on_step: Callable[[Step], None] | None) -> None:
    """Carry out a plan, with its journal open from the first step to the end or the undo."""
    touched = [gpu for gpu in change.gpus if gpu.changes]
    before = [part.before for part in touched]
    after = [part.after for part in touched]
    ledger.begin(change.plan.title, before, after, names=[named.name for named in change.names], daemons=change.daemons)
    last: Step | None = None

    def begin(step: Step) -> None:
        """Note which step is begun, for the error if it fails."""
        nonlocal last
        last = step
        if on_step is not None:
            on_step(step)

    # `give_up` keeps the journal: after NotUndone and after an unexpected error anything may be left. The other errors of
    # `carry_out` come after its undo.
    close_journal = ledger.give_up
    try:
        carry_out(change.plan, begin)
        close_journal = ledger.complete
    except NotUndone as error:
        if last is not None:
            raise error.restated(message=f"could not {last.what}: {error.message}") from error
        raise
    except KeyboardInterrupt:
        close_journal = ledger.end
        raise
    except GpushareError as error:
        close_journal = ledger.end
        if last is not None:
            raise _undone_error(error, last, change) from error
        raise
    finally:
        # When this process is killed the journal stays: the change was interrupted.
        close_journal()


def _undone_error(error: GpushareError, step: Step, change: MigChange) -> GpushareError:
    """Return the error of a step after the undo, which says which GPUs are as before, and what is not."""
    evicted = any(eviction.begun for eviction in change.evictions)
    not_restored = ["the processes that --evict ended"] if evicted else []
    others = [instance for work in change.instances for instance in work.left_alone]
    not_restored += [f"{instance}, which another program created and which stays" for instance in others]
    exceptions = f", except {' and '.join(not_restored)}" if not_restored else ""
    # Other GPUs of the file that `apply` follows may have changed.
    touched = [part for part in change.gpus if part.changes] or change.gpus
    gpus = [Device(gpu=part.gpu) for part in touched]
    restored = f"{titles(gpus)} {'is' if len(gpus) == 1 else 'are'} as before{exceptions}"
    return error.restated(message=f"could not {step.what}: {error.message}; {restored}")
