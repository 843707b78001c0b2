"""The time-slice level: set together with the compute mode that it needs, read back, reset."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage, InUse, NotSupported
from gpushare.host.compute_mode import compute_mode_step, need_root
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.identity import Identity
from gpushare.host.records import read_trusted, record_from, replace_file, writing
from gpushare.host.smi import parse_level, set_argv
from gpushare.model import ComputeMode, TimeSlice
from gpushare.mps.daemons import find_daemons
from gpushare.plan import Plan, Step, carry_out, roll_back, setting_step
from gpushare.units import quoted
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.model import Gpu
    from gpushare.selection import Device

_DIRECTORY: Final = "timeslice"
NO_MILLISECONDS: Final = (
    "NVIDIA publishes no millisecond value for any level (others measured waits of 1 to 2.3 ms at level default on GeForce cards); "
    "running programs may keep the old level: measure your own program before and after"
)


def level_of(text: str) -> TimeSlice:
    """Return the level for a name or number."""
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
    both are read back.
    """
    _refuse_instances(devices)
    if not beside_mps:
        _refuse_mps(host, devices)
    levels = host.policy.read()
    steps: list[Step] = []
    notes = [NO_MILLISECONDS]
    for device in devices:
        steps += _steps(host, device, level, levels, notes)
    names = ",".join(device.selector for device in devices)
    return Plan(
        title=f"time-slice {level.title} on {', '.join(device.title for device in devices)}",
        steps=tuple(steps),
        undo=f"gpushare timeslice reset -g {names}",
        notes=tuple(notes),
    )


def plan_reset(host: Host, devices: Sequence[Device]) -> Plan:
    """Return the plan that restores level default and the compute mode that `plan_level` found."""
    _refuse_instances(devices)
    levels = host.policy.read()
    steps: list[Step] = []
    for device in devices:
        before = _supported_level(device, levels)
        if before is not TimeSlice.DEFAULT:
            steps.append(_policy_step(host, device, TimeSlice.DEFAULT, before))
        record = _record(host, device)
        mode = _recorded_mode(record)
        if mode is not None:
            steps.append(_mode_step(host, device, mode, record, keep=False))
    notes = () if steps else ("the time-slice is already default; nothing to do",)
    return Plan(title="time-slice default", steps=tuple(steps), notes=notes)


@dataclass(frozen=True, kw_only=True)
class LentLevel:
    """A level that a process has set for a while: its PID and start in clock ticks since boot, and the names of levels."""

    pid: int
    started: int
    level: str
    before: str
    schema: int = 1


@contextlib.contextmanager
def lent_level(host: Host, device: Device, level: TimeSlice) -> Iterator[None]:
    """Set a level, and set it back at the end. A record says so meanwhile, for `left_level`.

    Raises:
        GpushareError: it cannot be set, or not be set back; or the record cannot be written.
    """
    steps = plan_level(host, [device], level, beside_mps=True).steps
    before, me = host.policy.read().get(device.gpu.index), host.processes.identity(os.getpid())
    if steps and before is not None and me is not None:
        record = LentLevel(pid=me.pid, started=me.started, level=level.name, before=before.name)
        path = _lent(host.run_directory, device.gpu)
        make_private_directory(path.parent)
        with writing(path, "the note of the time-slice that was there"):
            replace_file(path, json.dumps(asdict(record)))
    carry_out(Plan(title=f"time-slice {level.title} for a while", steps=steps))
    try:
        yield
    finally:
        for step, error in roll_back(steps):
            raise error.restated(hint=f"set it back: sudo {step.undo}")
        with contextlib.suppress(OSError):
            _lent(host.run_directory, device.gpu).unlink(missing_ok=True)


def left_level(host: Host, gpu: Gpu, now: TimeSlice | None = None) -> TimeSlice | None:
    """Return the level that a GPU had before a process that was killed set the one that it has ``now``; None: none did.

    ``now`` is read, only where there is a record, if it is not given.
    """
    for directory in host.run_directories:
        if not is_trusted_directory(directory, _DIRECTORY):
            continue
        one = record_from(LentLevel, read_trusted(_lent(directory, gpu)))
        if one is None or host.processes.identity(one.pid) == Identity(one.pid, one.started):
            continue
        with contextlib.suppress(KeyError):
            if TimeSlice[one.level] is (host.policy.read().get(gpu.index) if now is None else now):
                return TimeSlice[one.before]
    return None


def _lent(run_directory: Path, gpu: Gpu) -> Path:
    return run_directory / _DIRECTORY / f"{gpu.uuid}.lent.json"


def _steps(
    host: Host, device: Device, level: TimeSlice, levels: dict[int, TimeSlice | None], notes: list[str]
) -> list[Step]:
    before = _supported_level(device, levels)
    steps = []
    mode = host.nvml.compute_mode(device.gpu.index)
    if mode is not None and mode is not ComputeMode.DEFAULT:
        steps.append(_mode_step(host, device, ComputeMode.DEFAULT, _record(host, device), keep=True))
        notes.append(
            f"{device.title} is in compute mode {mode.title}; it becomes default, and `gpushare timeslice reset` restores it"
        )
    if before is not level:
        steps.append(_policy_step(host, device, level, before))
    else:
        notes.append(f"{device.title} is already at time-slice {level.title}")
    return steps


def _policy_step(host: Host, device: Device, level: TimeSlice, before: TimeSlice | None) -> Step:
    setting = f"the time-slice of {device.title}"

    def write(value: TimeSlice) -> None:
        host.policy.set(device.uuid, value)
        # What a killed one had set is over.
        if left_level(host, device.gpu, before) is not None:
            with contextlib.suppress(OSError):
                _lent(host.run_directory, device.gpu).unlink(missing_ok=True)

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


def _mode_step(host: Host, device: Device, mode: ComputeMode, record: Path, *, keep: bool) -> Step:
    """Return the step that sets a compute mode.

    With ``keep`` the mode that was there is written to ``record``, unless the record has an earlier one;
    without, the record is removed: the mode is back.
    """
    before = host.nvml.compute_mode(device.gpu.index)
    setting = compute_mode_step(host, device, mode, before=before)
    recorded = _recorded_mode(record)
    # A record that another gpushare wrote meanwhile is not restored.
    noted: list[Path] = []

    def act() -> None:
        now = host.nvml.compute_mode(device.gpu.index)
        if keep and recorded is None and now not in {None, mode}:
            noted.append(record)
            _note(record, now)
        setting.do()
        if not keep:
            noted.append(record)
            _note(record, None)

    def back() -> None:
        if setting.revert is not None:
            setting.revert()
        if noted and _recorded_mode(record) is not recorded:
            _note(record, recorded)

    return replace(setting, do=act, revert=back)


def _note(record: Path, previous: ComputeMode | None) -> None:
    if previous is not None:
        make_private_directory(record.parent)
    with writing(record, "the note of the compute mode that was there"):
        if previous is None:
            record.unlink(missing_ok=True)
        else:
            replace_file(record, json.dumps({"schema": 1, "previous_compute_mode": previous.name}))


def _refuse_instances(devices: Sequence[Device]) -> None:
    for device in devices:
        if device.mig is not None:
            raise NotSupported(
                f"{device.title}: the time-slice is set per GPU, not per MIG instance",
                f"name the GPU: -g {device.gpu.index}",
                gpu=str(device.gpu.index),
            )


def _refuse_mps(host: Host, devices: Sequence[Device]) -> None:
    for found in find_daemons(host, [device.gpu for device in devices], deep=False):
        daemon = found.daemon
        if daemon.ours and daemon.error is None and daemon.gpu_index is not None:
            raise InUse(
                f"GPU {daemon.gpu_index}: an MPS daemon of gpushare serves it, and its clients are not time-sliced",
                f"stop it first: gpushare mps stop -g {daemon.gpu_index}; or set the level anyway: --beside-mps",
                gpu=str(daemon.gpu_index),
                code="mps_in_force",
            )


def _supported_level(device: Device, levels: dict[int, TimeSlice | None]) -> TimeSlice | None:
    if device.gpu.index not in levels:
        raise NotSupported(
            f"{device.title} ({device.gpu.name or 'unknown model'}): the driver lists no time-slice for it",
            "see which GPUs have one: gpushare timeslice show",
            gpu=str(device.gpu.index),
            code="no_time_slice",
        )
    return levels[device.gpu.index]


def _record(host: Host, device: Device) -> Path:
    return host.run_directory / _DIRECTORY / f"{device.uuid}.json"


def _recorded_mode(record: Path) -> ComputeMode | None:
    directory = record.parent
    if not is_trusted_directory(directory.parent, directory.name):
        return None
    with contextlib.suppress(KeyError, TypeError):
        return ComputeMode[read_trusted(record)["previous_compute_mode"]]
    return None
