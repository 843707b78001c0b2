"""The time-slice level: set together with the compute mode that it needs, read back, reset."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.errors import BadUsage, InUse, NotSupported
from gpushare.base.model import ComputeMode, Gpu, TimeSlice
from gpushare.base.selection import Device
from gpushare.base.typed import Count, Pid
from gpushare.base.units import quoted
from gpushare.base.values import dataclass
from gpushare.host.compute_mode import compute_mode_step, need_root
from gpushare.host.host import Host
from gpushare.host.smi import parse_level, set_argv
from gpushare.host.store import Kept, RecordStore, any_lives
from gpushare.mps.daemons import find_daemons
from gpushare.plan import Plan, Step, carry_out, one_plan, roll_back, setting_step

NO_MILLISECONDS: Final = (
    "NVIDIA publishes no millisecond value for any level (on an H100 and an H200, level default was 2.048ms); "
    "running programs may keep the old level: measure your own program before and after"
)


def parse_level_or_raise(text: str) -> TimeSlice:
    level = parse_level(text)
    if level is None:
        raise BadUsage(
            f"{quoted(text)} is not a time-slice level",
            "give default, short, medium or long (0 to 3): gpushare timeslice set short -g 0",
            code="bad_level",
        )
    return level


def plan_level(host: Host, devices: Sequence[Device], level: TimeSlice, *, beside_mps: bool = False) -> Plan:
    """Return the plan that sets a level on whole GPUs, as NVIDIA's DRA driver does it.

    Compute mode DEFAULT first if another one is set (an exclusive GPU is never time-sliced), then the policy by UUID;
    both are read back. With ``beside_mps`` a daemon of gpushare may serve a GPU that is not exclusive.
    """
    _refuse_instances(devices)
    for index in _served_by_mps(host, devices):
        if not beside_mps or host.nvml.compute_mode(index) is ComputeMode.EXCLUSIVE_PROCESS:
            raise InUse(
                f"GPU {index}: an MPS daemon of gpushare serves it, and its clients are not time-sliced",
                f"stop it first: gpushare mps stop -g {index}",
                gpu=index,
                code="mps_in_force",
            )
    levels = host.policy.read()
    steps: list[Step] = []
    notes = [NO_MILLISECONDS]
    selectors_by_undo: dict[str, list[str]] = {}
    for device in devices:
        mode = host.nvml.compute_mode(device.gpu.index)
        if mode not in {None, ComputeMode.DEFAULT}:
            steps.append(_mode_step(host, device, ComputeMode.DEFAULT, restores=False))
            becomes = "it becomes default, and `gpushare timeslice reset` restores it"
            notes.append(f"{device.title} is in compute mode {mode.title}; {becomes}")
        before = _supported_level(device, levels)
        if before is not level:
            steps.append(_policy_step(host, device, level, before))
        else:
            notes.append(f"{device.title} is already at time-slice {level.title}")
        # It also restores the compute mode.
        undo = "reset"
        if before not in {None, TimeSlice.DEFAULT} and _mode_before_set(host, device) is None:
            undo = f"set {before.title}"
        selectors_by_undo.setdefault(undo, []).append(device.selector)
    return Plan(
        title=f"time-slice level {level.title} on {', '.join(device.title for device in devices)}",
        steps=tuple(steps),
        undo="; ".join(f"gpushare timeslice {undo} -g {','.join(each)}" for undo, each in selectors_by_undo.items()),
        notes=tuple(notes),
    )


def plan_reset(host: Host, devices: Sequence[Device]) -> Plan:
    """Return the plan that restores level default and the compute mode that `plan_level` found."""
    _refuse_instances(devices)
    levels = host.policy.read()
    plans = []
    for device in devices:
        before = _supported_level(device, levels)
        steps: list[Step] = []
        undo = None
        mode = _mode_before_set(host, device)
        if before is not TimeSlice.DEFAULT:
            steps.append(_policy_step(host, device, TimeSlice.DEFAULT, before))
            # Beside a daemon `timeslice set` refuses.
            if before is not None and not _served_by_mps(host, [device]):
                undo = f"gpushare timeslice set {before.title} -g {device.selector}"
        if mode is not None:
            steps.append(_mode_step(host, device, mode, restores=True))
        restored = "" if mode is None else f", compute mode {mode.title}"
        plans.append(Plan(title=f"time-slice level default on {device.title}{restored}", steps=tuple(steps), undo=undo))
    notes = () if any(plan.steps for plan in plans) else ("the time-slice is already default",)
    return replace(one_plan(plans), notes=notes)


@dataclass(frozen=True, kw_only=True)
class LentLevel(Kept):
    """A level that a process has set for a while, and the one that was there."""

    pid: Pid
    started: Count
    level: TimeSlice
    before: TimeSlice


@dataclass(frozen=True, kw_only=True)
class FoundMode(Kept):
    """The compute mode that was there before `timeslice set`."""

    mode: ComputeMode


# By the UUID of the GPU.
LENT: Final = RecordStore(LentLevel, "lent", "the note of the time-slice that was there")
MODES: Final = RecordStore(FoundMode, "mode", "the note of the compute mode that was there")


@contextlib.contextmanager
def temporary_level(host: Host, device: Device, level: TimeSlice) -> Iterator[None]:
    """Set a level, and set it back at the end. If gpushare is killed first, `level_before_killed` finds the old one in a record.

    Raises GpushareError: it cannot be set, or not be set back; or the record cannot be written.
    """
    steps = plan_level(host, [device], level, beside_mps=True).steps
    before = host.policy.read().get(device.gpu.index)
    me = host.processes.identity(os.getpid())
    if steps and before is not None and me is not None:
        LENT.write(LentLevel(**me._asdict(), level=level, before=before, path=LENT.path(host, device.uuid)))
    carry_out(Plan(title=f"time-slice {level.title} for a while", steps=steps))
    try:
        yield
    finally:
        not_undone = roll_back(steps)
        if not_undone:
            step, error = not_undone[0]
            raise error.restated(hint=f"set it back: sudo {step.undo}")
        LENT.drop(host, device.uuid)


def level_before_killed(host: Host, gpu: Gpu) -> TimeSlice | None:
    """Return the level that a GPU had before a gpushare, killed since, set its present level; None: it was not set so."""
    for record in LENT.find(host, gpu.uuid or ""):
        if not any_lives(host, record) and record.level is host.policy.read().get(gpu.index):
            return record.before
    return None


def _policy_step(host: Host, device: Device, level: TimeSlice, before: TimeSlice | None) -> Step:
    """Return the step that sets the level of a GPU by nvidia-smi, and reads it back."""
    setting = f"the time-slice of {device.title}"

    def write(value: TimeSlice) -> None:
        has_record = level_before_killed(host, device.gpu) is not None
        host.policy.set(device.uuid, value)
        # The record of a killed gpushare has no use once its level was changed.
        if has_record:
            LENT.drop(host, device.uuid)

    return setting_step(
        what=f"set {setting} to {level.title}",
        command=" ".join(set_argv(device.uuid, level)),
        undo=None if before is None else " ".join(set_argv(device.uuid, before)),
        setting=setting,
        read=lambda: host.policy.read().get(device.gpu.index),
        write=write,
        wanted=level,
        in_words=lambda value: value.title,
        see="nvidia-smi compute-policy -l",
        gpu=str(device.gpu.index),
        allowed=lambda: need_root(host, f"setting {setting}"),
    )


def _mode_step(host: Host, device: Device, mode: ComputeMode, *, restores: bool) -> Step:
    """Return the step that sets a compute mode, and records the one that it finds, unless an earlier one is recorded.

    With ``restores`` the mode is the recorded one, and the record is removed.
    """
    before = host.nvml.compute_mode(device.gpu.index)
    setting = compute_mode_step(host, device, mode, before=before)
    recorded = _mode_before_set(host, device)
    # The undo puts back only a record that this step has changed: another gpushare may have written it meanwhile.
    has_changed_record = False

    def set_and_note() -> None:
        nonlocal has_changed_record
        now = host.nvml.compute_mode(device.gpu.index)
        if not restores and recorded is None and now not in {None, mode}:
            has_changed_record = True
            _note_mode(host, device, now)
        setting.do()
        if restores:
            has_changed_record = True
            _note_mode(host, device, None)

    def undo() -> None:
        if setting.revert is not None:
            setting.revert()
        if has_changed_record:
            _note_mode(host, device, recorded)

    return replace(setting, do=set_and_note, revert=undo)


def _note_mode(host: Host, device: Device, mode: ComputeMode | None) -> None:
    """Write the record of the compute mode that was there; None: remove it."""
    path = MODES.path(host, device.uuid)
    if mode is None:
        MODES.forget(path)
    else:
        MODES.write(FoundMode(mode=mode, path=path))


def _refuse_instances(devices: Sequence[Device]) -> None:
    for device in devices:
        if device.mig is not None:
            raise NotSupported(
                f"{device.title}: the time-slice is set per GPU, not per MIG instance",
                f"name the GPU: -g {device.gpu.index}",
                gpu=device.gpu.index,
            )


def _served_by_mps(host: Host, devices: Sequence[Device]) -> list[int]:
    """Return the indexes of those GPUs that live MPS daemons of gpushare serve, or an instance of them."""
    return [
        item.daemon.gpu_index
        for item in find_daemons(host, [device.gpu for device in devices], deep=False)
        if item.daemon.ours and item.daemon.error is None and item.daemon.gpu_index is not None
    ]


def _supported_level(device: Device, levels: dict[int, TimeSlice | None]) -> TimeSlice | None:
    """Return the present level of a GPU; None: unknown. Raises NotSupported: the driver lists none."""
    if device.gpu.index not in levels:
        raise NotSupported(
            f"{device.title} ({device.gpu.name or 'unknown model'}): the driver lists no time-slice for it",
            "see which GPUs have one: gpushare timeslice show",
            gpu=device.gpu.index,
            code="no_time_slice",
        )
    return levels[device.gpu.index]


def _mode_before_set(host: Host, device: Device) -> ComputeMode | None:
    """Return the compute mode that was there before `timeslice set`; None: it was not changed."""
    record = MODES.read(MODES.path(host, device.uuid))
    return None if record is None else record.mode
