"""``gpushare apply``: one plan per GPU from its state to what the file wants; each GPU is its own transaction.

The order on a GPU: stop the daemons in the way, bind names, set compute mode and MIG mode, create instances; then
grants, time-slice and daemons; last, check that the GPU is as the file wants it. Programs are never ended: a GPU
on which one is in the way is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from gpushare.base.errors import NotFound, NotSupported
from gpushare.base.model import ComputeMode, Way
from gpushare.base.selection import Device, refuse_silent_gpus
from gpushare.host.compute_mode import compute_mode_step
from gpushare.host.host import Host
from gpushare.hostfile.diff import check_has_mig, diff_points
from gpushare.hostfile.file import Entry, MpsWish
from gpushare.hostfile.live import (
    Assignment,
    LiveGpu,
    PlacedDevice,
    assignment_of,
    devices_of_layout,
    devices_to_be,
    limits_key,
)
from gpushare.hostfile.look import live_gpus, refuse_units
from gpushare.hostfile.steps import (
    Find,
    check_daemon,
    check_levels_known,
    check_step,
    daemon_step,
    device_to_be,
    grant_steps,
    level_step,
    naming_steps,
    refuse_programs,
    revoke_steps,
    stop_steps,
)
from gpushare.mig.change import GpuChange, MigChange, gpu_change, plan_change
from gpushare.mig.daemons import daemons_of_others, devices_of, idle_daemon_pids, refuse_foreign
from gpushare.mig.grant import binding_commands, refuse_name_elsewhere, revocation_loss
from gpushare.mig.holders import no_plan_error
from gpushare.mig.ledger import MigLedger, NamedInstance, names_of
from gpushare.mig.plan import GpuPlan, NoPlan
from gpushare.mig.planner import plan_exact, unchanged_plan
from gpushare.mig.target import difference
from gpushare.mps.daemons import own_daemon
from gpushare.plan import Loss, Plan, Step
from gpushare.snapshot import HostState


@dataclass(frozen=True)
class GpuApply:
    """The change of one GPU. Any user may start and stop MPS daemons of its own; everything else needs root."""

    change: MigChange
    needs_root: bool = False


def plan_gpu(host: Host, ledger: MigLedger, index: int, entry: Entry, *, others: Collection[str] = ()) -> GpuApply:
    """Return the plan that makes a GPU match its entry; without steps if it already does.

    ``others`` are the UUIDs of the other GPUs in the file: they give up names that this one gets.

    Raises:
        InUse: programs use the GPU, or an instance or daemon that has to go.
        NotSupported: this GPU, driver or host cannot do it.
        BadUsage: an impossible profile, placement, limit or name.
        GpuLost: the GPU does not answer.
    """
    live = _read_live(host, index)
    refuse_silent_gpus(live.gpu)
    title = f"apply to GPU {index}: {entry.sharing.value}"
    check_has_mig(live.gpu, entry)
    if not diff_points(live, entry):
        return GpuApply(MigChange(gpus=(), plan=Plan(title=title, steps=())))
    refuse_units(live)
    if live.foreign:
        refuse_foreign(host, live.gpu, {device.uuid for device in devices_of(live.gpu)})
    work = _GpuWork(host, live, entry, _mig_change_of(live, entry))
    work.check_names(others)
    work.check_daemons()
    stops = work.stop_steps()
    before_mig = work.steps_before_mig()
    if work.wants_mig:
        after_mig = grant_steps(host, live, work.names, work.made)
        daemons = work.instance_daemon_steps()
    else:
        after_mig = [*work.mode_steps(), *work.time_slice_steps()]
        daemons = work.gpu_daemon_steps()
    check = check_step(lambda: _read_live_anew(host, index), entry, index)
    mig_changes = [work.change] if work.change is not None and work.change.changes else []
    change = plan_change(
        host,
        mig_changes,
        ledger,
        title=title,
        first=[*stops, *before_mig],
        naming=binding_commands(work.names_to_come, {live.gpu.uuid or "": index}),
        after=[*after_mig, *daemons, check],
    )
    plan = replace(change.plan, consent=(*change.plan.consent, *work.losses()))
    wishes = [wish for wish in (entry.mps, *(mig.mps for mig in entry.mig)) if wish is not None]
    # Such a daemon sets the compute mode, or has a server of root.
    daemons_of_root = daemons and any(wish.exclusive or wish.multiuser for wish in wishes)
    needs_root = bool(mig_changes or before_mig or after_mig or daemons_of_root or work.changes_daemon_of_others)
    return GpuApply(replace(change, plan=plan, names=work.new_names), needs_root)


def _read_live_anew(host: Host, index: int) -> LiveGpu:
    """Return how a GPU is shared now, by a new session of NVML: an open one keeps the old MIG devices."""
    host.nvml.restart()
    return _read_live(host, index)


def _read_live(host: Host, index: int) -> LiveGpu:
    state = HostState(host, [host.nvml.gpu(index)])
    return live_gpus(state, state.gpus)[0]


def _mig_change_of(live: LiveGpu, entry: Entry) -> GpuChange | None:
    """Return the change of MIG mode and instances that an entry needs; None for a GPU without MIG."""
    gpu, layout = live.gpu, live.layout
    wants_mig = entry.sharing is Way.MIG
    if layout is None:
        return None
    plan = unchanged_plan(layout)
    if (wants_mig and difference(layout, entry.wish)) or (not wants_mig and layout.instances):
        planned = plan_exact([layout], {gpu.index: entry.wish})
        if isinstance(planned, NoPlan):
            raise no_plan_error(planned, gpu.index)
        plan = planned.gpus[0]
    return gpu_change(gpu, layout, plan, wants_mig)


@dataclass
class _GpuWork:
    """The steps that make one GPU match its entry; ``change`` is what they do to its MIG (None: it has no MIG)."""

    host: Host
    live: LiveGpu
    entry: Entry
    change: GpuChange | None

    def __post_init__(self) -> None:
        self.wants_mig = self.entry.sharing is Way.MIG
        self.plan: GpuPlan | None = None if self.change is None else self.change.plan
        # UUIDs of the MIG devices that the change destroys.
        self.destroyed: set[str] = set() if self.plan is None else self.plan.destroyed_uuids
        # All MIG devices after the change, and the devices of the entry with those that serve them.
        self.devices_after: list[PlacedDevice] = []
        self.assignment = Assignment(())
        if self.change is not None:
            layout = self.change.layout
            kept = [device for device in devices_of_layout(self.live) if device.uuid not in self.destroyed]
            self.devices_after = devices_to_be(self.change.after, layout.profiles, kept)
            self.assignment = assignment_of(self.live, self.entry, layout, self.devices_after)
        self.names = self.assignment.names
        # UUIDs of devices; a wanted daemon is started again at the end.
        self.daemons_to_stop = self._daemons_to_stop()
        # Set by the steps of daemons; only root may.
        self.changes_daemon_of_others = False

    def check_names(self, others: Collection[str]) -> None:
        """Raise BadUsage if a name belongs to an instance of a GPU that is not in the file.

        ``others`` are the UUIDs of the other GPUs in the file. The names of GPUs that are no longer in the host are free.
        """
        names = names_of(self.host)
        for named in self.names:
            if named.name in names:
                refuse_name_elsewhere(self.host, names[named.name], {self.live.gpu.uuid or "", *others})

    def check_daemons(self) -> None:
        """Raise if a device can never have the daemon that the entry wants for it. Raises as `check_daemon`."""
        if self.entry.mps is not None:
            check_daemon(self.host, Device(gpu=self.live.gpu), self.entry.mps)
        profiles = () if self.change is None else self.change.layout.profiles
        memory_of = {profile.name: profile.memory_bytes for profile in profiles}
        for want in self.assignment.devices:
            if want.device is not None and want.wish.mps is not None:
                device = device_to_be(self.live.gpu, want.device, memory_of.get(want.device.profile))
                check_daemon(self.host, device, want.wish.mps)

    def _daemons_to_stop(self) -> set[str]:
        """Return the UUIDs of devices whose daemon must stop, for good or to be restarted."""
        # Of the existing devices that stay.
        wishes = {
            want.device.uuid: want.wish.mps for want in self.assignment.devices if want.device and want.device.uuid
        }
        wishes[self.live.gpu.uuid or ""] = self.entry.mps
        stopping = set()
        for uuid, daemon in self.live.daemons.items():
            wish = wishes.get(uuid)
            now = daemon.wish
            if daemon.transient:
                # It belongs to a single `gpushare run`, and may stay where nothing else is wanted.
                stops = wish is not None or self._changes_whole_gpu
            elif wish is None:
                stops = True
            else:
                # Only a start sets these two; limits and users of a running daemon can be changed.
                stops = now is not None and (wish.exclusive, wish.multiuser) != (now.exclusive, now.multiuser)
            if stops:
                stopping.add(uuid)
        return stopping

    @property
    def _changes_whole_gpu(self) -> bool:
        """Return whether the GPU becomes exclusive, or MIG goes on or off: no daemon may keep running there then."""
        return self.entry.sharing is Way.EXCLUSIVE or self.wants_mig is not bool(self.live.gpu.mig_enabled)

    @property
    def new_names(self) -> tuple[NamedInstance, ...]:
        """Return the names that the GPU does not have yet, or has for another instance."""
        present = {named.binding for named in self.live.names}
        return tuple(named for named in self.names if named.binding not in present)

    @property
    def made(self) -> set[tuple[str, int]]:
        """Return the places of the instances that the change creates."""
        return {new.instance.place for new in (self.plan.created if self.plan else ())}

    @property
    def names_to_come(self) -> list[NamedInstance]:
        """Return the new names whose instances the change creates; they are bound before."""
        return [named for named in self.new_names if named.place in self.made]

    def stop_steps(self) -> list[Step]:
        """Return the steps that stop daemons; the MIG change itself stops those on its instances."""
        stopped_by_change = set(self.destroyed)
        if self.change is not None and self.change.enable:
            # Enabling MIG stops the daemon of the whole GPU.
            stopped_by_change.add(self.live.gpu.uuid or "")
        return stop_steps(self.host, self.live, self.daemons_to_stop - stopped_by_change)

    def losses(self) -> list[Loss]:
        """Return what is lost besides instances: names and grants of instances that stay, and other users' daemons."""
        staying = {device.place for device in self.devices_after}
        wanted_users = {named.binding: named.users for named in self.names}
        losses: list[Loss] = []
        for named in self.live.names:
            users = wanted_users.get(named.binding)
            if users is not None:
                revoked = [user for user in named.users if user not in users]
                losses += [revocation_loss(named.name, user, opens=not users) for user in revoked]
            elif named.place in staying:
                reasons = (f"granted to {', '.join(named.users)}",) if named.users else ()
                title = f"the name '{named.name}' of {named} on GPU {self.live.gpu.index}"
                losses.append(Loss(action="forgets", what=title, why=reasons))
        return [*losses, *daemons_of_others(self.host, self.live.gpu, self.daemons_to_stop)]

    def steps_before_mig(self) -> list[Step]:
        """Return what comes before the MIG change: revoke grants of lost names, bind the new names, set the compute mode.

        Raises InUse: programs on a whole GPU would keep running next to what the file wants.
        """
        # Where MIG goes off, the switch of the mode refuses them.
        if not self.wants_mig and self.live.gpu.mig_enabled is not True:
            self._refuse_programs()
        staying = {device.place for device in self.devices_after}
        steps = revoke_steps(self.host, self.live, self.names, staying)
        steps += naming_steps(self.host, self.live, self.names, self.names_to_come)
        # With MIG, a GPU has no other compute mode.
        if self.wants_mig and not self.live.gpu.mig_enabled and self._mode_after_stops() is not ComputeMode.DEFAULT:
            steps.append(self._mode_step(ComputeMode.DEFAULT))
        return steps

    def _mode_after_stops(self) -> ComputeMode:
        """Return the compute mode once the daemons to stop have stopped: an exclusive daemon restores the default."""
        uuid = self.live.gpu.uuid or ""
        daemon = self.live.daemons.get(uuid)
        exclusive = daemon is not None and daemon.wish is not None and daemon.wish.exclusive
        if self.live.gpu.mig_enabled or (exclusive and uuid in self.daemons_to_stop):
            return ComputeMode.DEFAULT
        # A GPU without a compute mode only has the default.
        return self.live.gpu.compute_mode or ComputeMode.DEFAULT

    @property
    def _gpu_daemon_stays(self) -> bool:
        """Return whether a lasting daemon serves the whole GPU before and after the change."""
        return self.live.mps is not None and (self.live.gpu.uuid or "") not in self.daemons_to_stop

    def _refuse_programs(self) -> None:
        """Raise InUse if programs on the GPU would keep running next to what the file wants."""
        gpu, mps = self.live.gpu, self.entry.mps
        # The server of an unused daemon does not count: it ends with its daemon.
        idle = idle_daemon_pids(self.host, gpu)
        outside_mps = [
            self._process_title(process.pid)
            for process in gpu.processes or ()
            if process.compute and not process.mps and process.pid not in idle
        ]
        if mps is not None and not self._gpu_daemon_stays:
            refuse_programs(f"GPU {gpu.index}", gpu, outside_mps)
        elif self.entry.sharing is Way.EXCLUSIVE and gpu.compute_mode is not ComputeMode.EXCLUSIVE_PROCESS:
            # The mode exclusive-process has room for one.
            refuse_programs(f"GPU {gpu.index}", gpu, outside_mps, allowed=1)

    def _mode_step(self, mode: ComputeMode) -> Step:
        # Unlike `timeslice set`, do not note the earlier mode: the file decides.
        gpu = self.live.gpu
        return compute_mode_step(self.host, Device(gpu=gpu), mode, before=gpu.compute_mode)

    def mode_steps(self) -> list[Step]:
        """Return the step that sets the compute mode, or none."""
        mps = self.entry.mps
        mode = ComputeMode.DEFAULT
        # An exclusive daemon that starts later sets the mode itself, and restores at its end the one that it found.
        if self.entry.sharing is Way.EXCLUSIVE or (mps is not None and mps.exclusive and self._gpu_daemon_stays):
            mode = ComputeMode.EXCLUSIVE_PROCESS
        return [] if self._mode_after_stops() is mode else [self._mode_step(mode)]

    def time_slice_steps(self) -> list[Step]:
        """Return the step that sets the level of the time-slice, or none. Raises NotSupported if the GPU has none to set."""
        level, live = self.entry.time_slice, self.live
        if level is None or not live.lacks_level(level):
            return []
        # A GPU with MIG on may have a time-slice when the earlier steps have switched MIG off.
        if not live.has_time_slice and not live.gpu.mig_enabled:
            check_levels_known(self.host)
            raise NotSupported(
                f"GPU {live.gpu.index} ({live.gpu.name or 'unknown model'}): the driver lists no time-slice for it",
                "see which GPUs have one: gpushare timeslice show; or write: timeslice: default",
                gpu=live.gpu.index,
                code="no_time_slice",
            )
        return [level_step(self.host, live.gpu, level, live.time_slice)]

    def gpu_daemon_steps(self) -> list[Step]:
        """Return the step that starts or changes the daemon of the whole GPU, or none."""
        mps, index = self.entry.mps, self.live.gpu.index
        if mps is None or self._keeps_daemon(self.live.gpu.uuid, mps):
            return []

        def find() -> Device:
            return Device(gpu=self.host.nvml.gpu(index))

        device = Device(gpu=self.live.gpu)
        return [self._daemon_step(f"GPU {index}", find, mps, device, selector=str(index), uuid=device.uuid)]

    def _daemon_step(
        self, title: str, find: Find, wish: MpsWish, device: Device, *, selector: str, uuid: str | None
    ) -> Step:
        """Return the step that starts the daemon of a device, or changes the one that serves it now and stays."""
        runs = None
        if device.uuid not in self.daemons_to_stop and self.live.daemon(device.uuid) is not None:
            # If it has died since, the step starts another one.
            with contextlib.suppress(NotFound):
                runs = own_daemon(self.host, device)
                _, record = runs
                self.changes_daemon_of_others |= record.uid != self.host.uid
        return daemon_step(self.host, title, find, wish, selector=selector, uuid=uuid, runs=runs)

    def _keeps_daemon(self, uuid: str | None, wish: MpsWish) -> bool:
        """Return whether a device has a daemon with the wanted limits that is not stopped on the way."""
        daemon = self.live.daemon(uuid)
        return uuid not in self.daemons_to_stop and daemon is not None and limits_key(daemon.wish) == limits_key(wish)

    def instance_daemon_steps(self) -> list[Step]:
        """Return the steps that give the MIG devices their daemons. Raises InUse if programs in one would stay outside MPS."""
        if self.change is None:
            return []
        gpu = self.live.gpu
        existing_uuids = frozenset(device.uuid for device in self.devices_after if device.uuid)
        steps = []
        for want in self.assignment.devices:
            device, wish = want.device, want.wish.mps
            if device is None or wish is None or (device.uuid is not None and self._keeps_daemon(device.uuid, wish)):
                continue
            device_now = device_to_be(gpu, device, None)
            if device.uuid is None or self.live.daemon(device.uuid) is None:
                # None in a device that does not exist yet.
                parts = [part for instance in self.live.instances for part in instance.compute]
                holders = [
                    each for part in parts if part.uuid and part.uuid == device.uuid for each in part.holders or ()
                ]
                refuse_programs(device_now.title, gpu, [self._process_title(holder.pid) for holder in holders])
            title = f"MIG {device} of GPU {gpu.index}"
            # A new device has no UUID yet: the printed command has a word in its place.
            selector = device.uuid or f"MIG-UUID-OF-{device}"
            find = partial(_find_device, self.host, gpu.index, device, existing_uuids)
            steps.append(self._daemon_step(title, find, wish, device_now, selector=selector, uuid=device.uuid))
        return steps

    def _process_title(self, pid: int) -> str:
        info = self.host.processes.describe(pid)
        return f"process {pid}" if info is None else f"{info.name} ({pid}, {info.user or 'unknown user'})"


def _find_device(host: Host, index: int, wanted: PlacedDevice, existing_uuids: Collection[str]) -> Device:
    """Return a MIG device of a GPU as it is now: by UUID, else of the new ones of its size and place the one with its number.

    ``existing_uuids`` are those of the devices that are not new. Raises NotFound: it is not there.
    """
    live = _read_live_anew(host, index)
    new = [
        device.uuid
        for device in devices_of_layout(live)
        if device.uuid not in existing_uuids and (device.place, device.slices) == (wanted.place, wanted.slices)
    ]
    uuid = wanted.uuid or next(iter(new[wanted.number :]), None)
    mig = next((mig for mig in live.gpu.mig_instances if uuid is not None and mig.uuid == uuid), None)
    if mig is not None:
        return Device(gpu=live.gpu, mig=mig)
    raise NotFound(
        f"GPU {index} has no MIG device {wanted}",
        "see the current layout: gpushare mig status",
        gpu=index,
        code="device_gone",
    )
