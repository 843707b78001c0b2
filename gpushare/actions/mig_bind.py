"""Names of instances within a change: bound when it is done, forgotten with the instance, their grants given again."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from gpushare.actions.mig_grant import plan_reapply
from gpushare.actions.plan import Step
from gpushare.errors import BadUsage, GpushareError, NoPermission
from gpushare.host.mig_names import NamedInstance, check_name, names_changed, names_of

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.plan import Created, GpuPlan


def named(host: Host, name: str, plans: Sequence[GpuPlan]) -> list[NamedInstance]:
    """Return the names of what plans create: ``name`` for one instance, ``name-1`` ... for several.

    A name whose instance does not exist any more may be given anew.

    Raises:
        BadUsage: no name, or one that is given already.
    """
    made = [(plan, new) for plan in plans for new in plan.created]
    words = [name] if len(made) == 1 else [f"{name}-{number}" for number in range(1, len(made) + 1)]
    check_name(name)
    there = {(plan.uuid, one.profile.name, one.start) for plan in plans for one in plan.kept}
    looked_at = {plan.uuid for plan in plans}
    for word in words:
        one = names_of(host).get(check_name(word))
        if one is None:
            continue
        if one.gpu_uuid not in looked_at or (one.gpu_uuid, one.profile, one.start) in there:
            raise name_taken(one, {plan.uuid: plan.gpu for plan in plans})
    return [_named(word, plan, new) for word, (plan, new) in zip(words, made, strict=True)]


def name_taken(one: NamedInstance, indices: Mapping[str | None, int]) -> BadUsage:
    """Return the error for a name that is given; ``indices`` are those of the GPUs that were looked at, by UUID."""
    index = indices.get(one.gpu_uuid)
    where = one.gpu_uuid if index is None else f"GPU {index}"
    return BadUsage(
        f"the name '{one.name}' is given to {one.profile}:{one.start} of {where}",
        f"choose another, or forget it: gpushare mig name --forget {one.name}",
        code="name_taken",
    )


def _named(word: str, plan: GpuPlan, new: Created) -> NamedInstance:
    return NamedInstance(name=word, gpu_uuid=plan.uuid or "", profile=new.profile.name, start=new.placement.start)


def bind_step(host: Host, one: NamedInstance, gpu: int) -> Step:
    """Return the step that binds a name; ``gpu`` is the index of its GPU."""
    before: list[NamedInstance] = []

    def act() -> None:
        with names_changed(host) as names:
            before.extend(filter(None, [names.get(one.name)]))
            names[one.name] = one

    def back() -> None:
        with names_changed(host) as names:
            names.pop(one.name, None)
            names.update({old.name: old for old in before})

    return Step(
        what=f"name {one.profile}:{one.start} on GPU {gpu} '{one.name}'",
        command=f"gpushare mig name {one.name} {one.profile}:{one.start} -g {gpu}",
        undo=f"gpushare mig name --forget {one.name}",
        do=act,
        revert=back,
    )


def forget_step(host: Host, one: NamedInstance, gpu: int | None = None) -> Step:
    """Return the step that forgets a name; ``gpu`` is the index of its GPU, where that is known."""

    def act() -> None:
        with names_changed(host) as names:
            if names.pop(one.name, None) is None and one.name in names_of(host):
                raise NoPermission(f"the name '{one.name}' was given by root", "run it as root: sudo gpushare ...")

    def back() -> None:
        with names_changed(host) as names:
            names.setdefault(one.name, one)

    return Step(
        what=f"forget the name '{one.name}' ({one.profile}:{one.start})",
        command=f"gpushare mig name --forget {one.name}",
        undo=f"gpushare mig name {one.name} {one.profile}:{one.start}" + ("" if gpu is None else f" -g {gpu}"),
        do=act,
        revert=back,
    )


def name_steps(host: Host, plans: Sequence[GpuPlan]) -> list[Step]:
    """Return what a change means for the names that exist.

    A name whose instance goes and does not come back is forgotten; one whose instance is made again, perhaps after a
    reboot, gets its grants again.
    """
    steps = []
    for plan in plans:
        gone = {(one.instance.profile.name, one.instance.start) for one in plan.destroyed if one.whole}
        made = {(one.profile.name, one.placement.start) for one in plan.created}
        for one in names_of(host).values():
            place = (one.profile, one.start)
            if one.gpu_uuid != plan.uuid or place not in gone | made:
                continue
            if place not in made:
                steps.append(forget_step(host, one, plan.gpu))
            elif one.users:
                steps.append(_grant_step(host, one))
    return steps


def regrant(host: Host, gpu_uuid: str) -> list[str]:
    """Give what is named on a GPU to the users that it is granted to, where that is lost; return what failed."""
    failed = []
    for one in names_of(host).values():
        if one.gpu_uuid != gpu_uuid or not one.users:
            continue
        try:
            for step in plan_reapply(host, [one]):
                step.do()
        except GpushareError as error:
            failed.append(f"the grant of '{one.name}': {error.message}")
    return failed


def forget(host: Host, names: Collection[str]) -> None:
    """Forget names, those that there are."""
    if names:
        with names_changed(host) as known:
            for name in names:
                known.pop(name, None)


def _grant_step(host: Host, one: NamedInstance) -> Step:
    users = ", ".join(one.users)
    done: list[Step] = []

    def act() -> None:
        # Only now the instance is there, with nodes of its own.
        for step in plan_reapply(host, [one]):
            done.append(step)
            step.do()

    def back() -> None:
        for step in reversed(done):
            if step.revert is not None:
                step.revert()

    return Step(
        what=f"grant '{one.name}' to {users} again",
        command="\n".join(f"gpushare mig grant {one.name} {shlex.quote(user)}" for user in one.users),
        undo=None,
        do=act,
        revert=back,
    )
