"""The shape of a GPU: its MIG mode and instances, compared, made again, and kept on disk. Pure.

A shape tells instances apart by profile and place, never by ids or processes, which change by themselves. The journal
of a change keeps two of each GPU, and a read-back compares with one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, NamedTuple

from gpushare.base.typed import Within
from gpushare.mig.plan import GpuPlan, InstanceChange, whole
from gpushare.mig.planner import gpu_plan, inside
from gpushare.mig.profile import ComputeInstance, ComputeProfile, GpuInstance, Layout, Placement, Profile, mask_of


@dataclass(frozen=True, kw_only=True)
class GpuShape:
    """One GPU: mode (None: not looked at) and instances, by place."""

    uuid: str
    index: int
    mig_enabled: bool | None
    instances: tuple[GpuInstance, ...] = ()

    def without(self, others: Sequence[GpuInstance]) -> GpuShape:
        """Return it without the instances in the places of these."""
        places = {instance.place for instance in others}
        return replace(self, instances=tuple(one for one in self.instances if one.place not in places))


def shape_of(layout: Layout, *, mig_enabled: bool | None, instances: Sequence[GpuInstance] | None = None) -> GpuShape:
    """Return the shape of what exists, or of other instances on the same GPU."""
    ordered = sorted(layout.instances if instances is None else instances, key=lambda one: one.start)
    return GpuShape(uuid=layout.uuid or "", index=layout.gpu, mig_enabled=mig_enabled, instances=tuple(ordered))


# A compute instance in a shape: its slices, and its first slice in the GPU instance or None for any.
_Slot = tuple[int, int | None]


def _slot(one: ComputeInstance) -> _Slot:
    return one.profile.slices, None if one.placement is None else one.placement.start


def _rank(one: ComputeInstance) -> tuple[int, int]:
    return -1 if one.placement is None else one.placement.start, one.profile.slices


def _titled(one: GpuInstance) -> str:
    return f"{one}" + (f" '{one.name}'" if one.name else "")


# -- comparing -------------------------------------------------------------------------------------


def differences(now: GpuShape, wanted: GpuShape) -> tuple[str, ...]:
    """Return in words what differs from what is wanted; empty: nothing. An unknown start fits any."""
    found = []
    if wanted.mig_enabled is not None and now.mig_enabled is not wanted.mig_enabled:
        found.append(f"MIG is {'on' if now.mig_enabled else 'off'}")
    here = {one.place: one for one in now.instances}
    there = {one.place: one for one in wanted.instances}
    found += [f"{_titled(one)} is missing" for place, one in there.items() if place not in here]
    found += [f"{_titled(one)} is there" for place, one in here.items() if place not in there]
    found += [
        f"{_titled(one)} has {_words(here[place])} instead of {_words(one)}"
        for place, one in there.items()
        if place in here and not _same(here[place], one)
    ]
    return tuple(f"GPU {wanted.index}: {one}" for one in found)


def _same(now: GpuInstance, wanted: GpuInstance) -> bool:
    slots = [_slot(part) for part in wanted.compute]
    left = Counter(map(_slot, now.compute))
    left.subtract(slot for slot in slots if slot[1] is not None)
    if any(count < 0 for count in left.values()):
        return False
    anywhere = Counter(slices for slices, start in slots if start is None)
    return Counter(slices for slices, _ in left.elements()) == anywhere


def _words(one: GpuInstance) -> str:
    return ", ".join(part.profile.name for part in sorted(one.compute, key=_rank)) or "no compute instance"


# -- what a change has made itself -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Creation:
    """The creation of one instance as the journal notes it: before the call, and after it with the id that it got.

    ``profile`` and ``start`` are those of the GPU instance.
    """

    # UUID.
    gpu: str
    profile: str
    start: int
    # The GPU instance: its own id when it is made, and the one that a compute instance is in.
    instance: int | None = None
    # Before the call: the size of a compute instance, None for a GPU instance ...
    slices: int | None = None
    # ... and the ids of its kind that are there; None: the driver would not tell.
    there: tuple[int, ...] | None = None
    # After it: the id of a compute instance, None for a GPU instance, and the MIG UUID where it could be read.
    compute: int | None = None
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All that a change knows to have made; ``begun`` is a creation whose end is not known."""

    made: tuple[Creation, ...]
    begun: Creation | None

    def owns(self, gpu: str | None, one: GpuInstance) -> bool:
        """Return whether a GPU instance is proved to be the change's own, with all that is in it."""
        place = (gpu, *one.place)
        noted = any(
            made.compute is None and (made.gpu, made.profile, made.start) == place and made.instance == one.id
            for made in self.made
        )
        if noted:
            return all(self.owns_part(gpu, one, part) for part in one.compute)
        begun = self.begun
        if begun is None or begun.slices is not None or (begun.gpu, begun.profile, begun.start) != place:
            return False
        # As it is in the moment between its creation and the note: without anything in it.
        return begun.there is not None and one.id not in begun.there and not one.compute and not one.busy

    def owns_part(self, gpu: str | None, one: GpuInstance, part: ComputeInstance) -> bool:
        """Return whether a compute instance is proved to be the change's own."""
        for made in self.made:
            if (made.gpu, made.instance, made.compute) == (gpu, one.id, part.id):
                return None in {made.uuid, part.uuid} or made.uuid == part.uuid
        begun = self.begun
        if begun is None or (begun.gpu, begun.instance, begun.slices) != (gpu, one.id, part.profile.slices):
            return False
        return begun.there is not None and part.id not in begun.there


NOTHING: Final = Proof(made=(), begun=None)


# -- making it again -------------------------------------------------------------------------------


def restoration(layout: Layout, wanted: GpuShape, proof: Proof) -> tuple[GpuPlan, tuple[str, ...]]:
    """Return the plan from what exists to a shape, and in words what cannot be had.

    Only what ``proof`` proves to be made by the change that is undone is destroyed. What others made meanwhile
    stays, and so does what is busy.
    """
    places = {one.place: one for one in wanted.instances}
    kept: list[GpuInstance] = []
    destroyed: list[InstanceChange] = []
    created: list[InstanceChange] = []
    lost: list[str] = []
    for one in layout.instances:
        there = places.pop(one.place, None)
        if there is not None:
            kept.append(one)
            ours = [part for part in one.compute if proof.owns_part(layout.uuid, one, part)]
            _restore_inside(one, there, ours, destroyed, created, lost)
        elif not proof.owns(layout.uuid, one):
            kept.append(one)
        elif one.busy:
            kept.append(one)
            lost.append(f"{one} is in use and stays")
        else:
            destroyed.append(whole(one))
    profiles = {profile.name: profile for profile in layout.profiles}
    taken = mask_of(one.placement for one in kept)
    for one in places.values():
        profile = profiles.get(one.profile.name)
        if profile is None or taken & one.placement.mask:
            lost.append(f"{_titled(one)} has no room")
            continue
        parts = _offered(profile, one.compute, lost)
        created.append(whole(GpuInstance(profile=profile, placement=one.placement, compute=parts)))
    words = tuple(f"GPU {layout.gpu}: {one}" for one in lost)
    return gpu_plan(layout, kept, destroyed, created), words


def left_alone(layout: Layout, wanted: GpuShape, proof: Proof) -> tuple[GpuInstance, ...]:
    """Return the instances that are not wanted, and not known to be made by the change that is undone."""
    places = {one.place for one in wanted.instances}
    return tuple(one for one in layout.instances if one.place not in places and not proof.owns(layout.uuid, one))


def _restore_inside(
    one: GpuInstance,
    wanted: GpuInstance,
    ours: Sequence[ComputeInstance],
    destroyed: list[InstanceChange],
    created: list[InstanceChange],
    lost: list[str],
) -> None:
    missing, gone = list(wanted.compute), []
    for compute in one.compute:
        # Each counts once: an instance that matches this one matches no other.
        if _taken(missing, compute) or compute not in ours:
            continue
        if compute.busy:
            lost.append(f"compute instance {compute.id} of {_titled(wanted)} is in use and stays")
        else:
            gone.append(compute)
    if gone:
        destroyed.append(inside(one, gone))
    taken = mask_of(part.placement for part in one.compute if part not in gone)
    for part in [part for part in missing if taken & mask_of([part.placement])]:
        missing.remove(part)
        lost.append(f"{part.profile.name} of {_titled(wanted)} has no room")
    parts = _offered(one.profile, missing, lost)
    if parts:
        created.append(inside(one, parts))


def _taken(parts: list[ComputeInstance], compute: ComputeInstance) -> bool:
    """Remove the part that an existing compute instance matches from ``parts``; return whether there was one."""
    slices, start = _slot(compute)
    for slot in ((slices, start), (slices, None)):
        for number, part in enumerate(parts):
            if _slot(part) == slot:
                del parts[number]
                return True
    return False


def _offered(profile: Profile, parts: Sequence[ComputeInstance], lost: list[str]) -> tuple[ComputeInstance, ...]:
    """Return compute instances to create in a GPU instance of a profile; what it no longer offers is lost."""
    found = []
    for part in sorted(parts, key=_rank):
        slices = part.profile.slices
        offered = profile.compute_of(slices) or (profile.whole if slices == profile.slices else None)
        if offered is None or offered.id is None:
            lost.append(f"{slices}c.{profile.name} is no longer offered")
        else:
            found.append(ComputeInstance(profile=offered, placement=part.placement))
    return tuple(found)


# -- keeping it ------------------------------------------------------------------------------------

# Slices, ids and indexes are far below.
_Number = Annotated[int, Within(0, 4095)]
_ProfileName = Annotated[str, re.compile(r"(\d{1,3})g", re.ASCII).match]


class KeptCompute(NamedTuple):
    """A compute instance in a record: its slices, and its first slice in the GPU instance or None for any."""

    slices: _Number
    start: _Number | None


class KeptInstance(NamedTuple):
    """A GPU instance in a record."""

    profile: _ProfileName
    start: _Number
    size: _Number
    compute: tuple[KeptCompute, ...]
    name: str | None


@dataclass(frozen=True, kw_only=True)
class KeptShape:
    """A shape in a record: what of it does not change by itself."""

    uuid: str
    index: _Number
    mig_enabled: bool | None
    instances: tuple[KeptInstance, ...]


def kept_shape(shape: GpuShape) -> KeptShape:
    """Return a shape as the journal keeps it."""
    instances = tuple(
        KeptInstance(
            profile=one.profile.name,
            start=one.start,
            size=one.placement.size,
            compute=tuple(KeptCompute(*_slot(part)) for part in one.compute),
            name=one.name,
        )
        for one in shape.instances
    )
    return KeptShape(uuid=shape.uuid, index=shape.index, mig_enabled=shape.mig_enabled, instances=instances)


def shape_from(kept: KeptShape) -> GpuShape:
    """Return the shape that `kept_shape` was given, as far as it was kept."""
    return GpuShape(
        uuid=kept.uuid,
        index=kept.index,
        mig_enabled=kept.mig_enabled,
        instances=tuple(
            GpuInstance(
                # The driver knows the rest of it.
                profile=Profile(name=one.profile, id=None, slices=int(one.profile.partition("g")[0]), placements=None),
                placement=Placement(one.start, one.size),
                compute=tuple(
                    ComputeInstance(
                        profile=ComputeProfile(slices=part.slices),
                        placement=None if part.start is None else Placement(part.start, part.slices),
                    )
                    for part in one.compute
                ),
                name=one.name,
            )
            for one in kept.instances
        ),
    )
