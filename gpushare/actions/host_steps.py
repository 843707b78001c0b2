"""The steps of ``gpushare apply`` that are not MIG's own: compute mode, time-slice, names, grants.

They look at the host when they act, not when they are planned: most of them follow a change of MIG.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpushare.actions.mig_grant import plan_grant, plan_reapply, plan_revoke
from gpushare.actions.plan import Step
from gpushare.actions.timeslice import plan_set, set_compute_mode
from gpushare.errors import GpushareError, OperationFailed, TimedOut
from gpushare.host.mig_names import NamedInstance, names_changed, names_of
from gpushare.host.smi import compute_mode_command, set_argv
from gpushare.layout.hostdiff import points
from gpushare.model import ComputeMode
from gpushare.selection import Device

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.layout.hostfile import Entry
    from gpushare.layout.live import LiveGpu
    from gpushare.layout.seats import WantedName
    from gpushare.model import Gpu, TimeSlice


def deferred(
    what: str, command: str, makes: Iterable[Callable[[], Sequence[Step]]], *, undo: str | None = None
) -> Step:
    """Return one step of several that are planned only when it acts, each after the one before was done."""
    done: list[Step] = []

    def act() -> None:
        for make in makes:
            for step in make():
                # Noted before it acts, as in `carry_out`.
                done.append(step)
                step.do()

    def back() -> None:
        while done:
            step = done.pop()
            if step.revert is not None:
                step.revert()

    return Step(what=what, command=command, undo=undo, do=act, revert=back)


def mode_step(host: Host, gpu: Gpu, mode: ComputeMode) -> Step:
    """Return the step that sets a compute mode, and notes nothing to restore: the file is what holds."""
    device, before = Device(gpu=gpu), gpu.compute_mode
    changed: list[ComputeMode] = []

    def act() -> None:
        now = host.nvml.compute_mode(gpu.index)
        if now is not None and now is not mode:
            changed.append(now)
        set_compute_mode(host, device, mode)

    def back() -> None:
        while changed:
            set_compute_mode(host, device, changed.pop())

    return Step(
        what=f"set the compute mode of GPU {gpu.index} to {mode.title}",
        command=compute_mode_command(device.uuid, mode.name),
        undo=None if before is None else compute_mode_command(device.uuid, before.name),
        do=act,
        revert=back,
    )


def ask_levels(host: Host) -> None:
    """Raise where nvidia-smi is missing, or hangs: then no GPU tells a time-slice, whatever it has.

    Raises:
        NotSupported: it is not installed.
        TimedOut: it does not answer.
    """
    try:
        host.policy.read()
    except GpushareError as error:
        if isinstance(error, TimedOut) or error.code == "program_missing":
            raise


def level_step(host: Host, gpu: Gpu, level: TimeSlice, before: TimeSlice | None) -> Step:
    """Return the step that sets a time-slice level; what it needs is looked at when it acts."""
    device = Device(gpu=gpu)
    return deferred(
        f"set the time-slice of GPU {gpu.index} to {level.title}",
        " ".join(set_argv(device.uuid, level)),
        [lambda: plan_set(host, [device], level, beside_mps=True).steps],
        undo=None if before is None else " ".join(set_argv(device.uuid, before)),
    )


# -- names and grants ------------------------------------------------------------------------------


def revoke_steps(host: Host, live: LiveGpu, wanted: Sequence[WantedName], staying: set[tuple[str, int]]) -> list[Step]:
    """Return the steps that open instances that stay and lose their name: a grant goes with the name."""
    kept = {(one.name, one.profile, one.start) for one in wanted}
    return [
        deferred(
            f"take the grants of '{one.name}' ({one.profile}:{one.start}) back",
            f"gpushare mig revoke {shlex.quote(one.name)}",
            [lambda name=one.name: plan_revoke(host, name).steps],  # type: ignore[misc]
        )
        for one in live.names
        if one.users and (one.profile, one.start) in staying and (one.name, one.profile, one.start) not in kept
    ]


def names_steps(host: Host, live: LiveGpu, wanted: Sequence[WantedName]) -> list[Step]:
    """Return the step that gives a GPU exactly these names, or none: bound before the instances are there.

    A crash in the middle then loses no name. Grants follow when the instances are there.
    """
    there = {one.name: (one.profile, one.start) for one in live.names}
    want = {one.name: (one.profile, one.start) for one in wanted}
    if there == want:
        return []
    uuid = live.gpu.uuid or ""
    before: dict[str, NamedInstance] = {}
    gone = [name for name in there if name not in want]
    new = [name for name, place in want.items() if there.get(name) != place]

    def act() -> None:
        with names_changed(host) as names:
            before.update({name: names_of(host)[name] for name in (*gone, *new) if name in names_of(host)})
            for name in gone:
                if name in names and names[name].gpu_uuid == uuid:
                    del names[name]
            for name in new:
                profile, start = want[name]
                names[name] = NamedInstance(name=name, gpu_uuid=uuid, profile=profile, start=start)

    def back() -> None:
        with names_changed(host) as names:
            for name in new:
                names.pop(name, None)
            names.update(before)

    words = [f"call {profile}:{start} '{name}'" for name, (profile, start) in want.items() if name in new]
    words += [f"forget the name '{name}'" for name in gone]
    commands = [f"gpushare mig name {name} {profile}:{start}" for name, (profile, start) in want.items() if name in new]
    commands += [f"gpushare mig name --forget {name}" for name in gone]
    return [
        Step(
            what=f"GPU {live.gpu.index}: {', '.join(words)}",
            command="\n".join(commands),
            do=act,
            revert=back,
        )
    ]


def grant_steps(host: Host, live: LiveGpu, wanted: Sequence[WantedName], made: set[tuple[str, int]]) -> list[Step]:
    """Return the steps that give named instances to exactly their users; ``made`` are those that are new."""
    there = {one.name: one for one in live.names}
    steps = []
    for one in wanted:
        now = there.get(one.name)
        stays = now is not None and (now.profile, now.start) == (one.profile, one.start)
        before = now.users if now is not None and stays else ()
        fresh = (one.profile, one.start) in made or (now is not None and not now.held)
        if set(before) == set(one.users) and not (one.users and (fresh or not stays)):
            continue
        whom = ", ".join(one.users) or "everybody"
        command = f"gpushare mig grant {one.name} USER" if one.users else f"gpushare mig revoke {one.name}"
        steps.append(
            deferred(
                f"open '{one.name}' ({one.profile}:{one.start}) to {whom}",
                "\n".join(f"gpushare mig grant {one.name} {shlex.quote(user)}" for user in one.users) or command,
                _grants(host, one, before),
            )
        )
    return steps


def _grants(host: Host, one: WantedName, before: Sequence[str]) -> list[Callable[[], Sequence[Step]]]:
    """First to those who get it, then away from the others: in between it is nobody else's."""
    new = [user for user in one.users if user not in before]
    old = [user for user in before if user not in one.users]
    makes: list[Callable[[], Sequence[Step]]] = [
        lambda user=user: plan_grant(host, one.name, user).steps  # type: ignore[misc]
        for user in new
    ]
    makes += [lambda user=user: plan_revoke(host, one.name, user).steps for user in old]  # type: ignore[misc]
    if one.users:
        makes.append(lambda: plan_reapply(host, [names_of(host)[one.name]]))
    return makes


@dataclass(frozen=True, kw_only=True)
class CheckStep(Step):
    """A step that only looks."""


def check_step(look: Callable[[], LiveGpu], entry: Entry, index: int) -> CheckStep:
    """Return the step that looks at a GPU at the end: it is as the file has it, or all of it is taken back."""

    def act() -> None:
        left = points(look(), entry)
        if left:
            raise OperationFailed(
                f"GPU {index}: all was done, and it is not as the file has it: {'; '.join(map(str, left))}",
                "see: gpushare diff -f FILE; gpushare doctor",
                gpu=str(index),
                code="not_held",
            )

    return CheckStep(what=f"check that GPU {index} is as the file has it", command="gpushare diff -f FILE", do=act)
