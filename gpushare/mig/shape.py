"""What a GPU looks like, in few words: mode, GPU instances at their places, compute instances inside. Pure.

A shape holds what is needed to make it again and nothing that changes by itself: no ids, no processes. The journal of a
change keeps two of each GPU, and whoever reads back compares.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Final

from gpushare.mig.plan import Created, Destroyed, GpuPlan, NewCompute
from gpushare.mig.planner import gpu_plan, whole
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Placement, Profile


@dataclass(frozen=True, kw_only=True)
class Made:
    """An instance that the driver said it made: ids, and the MIG UUID of a compute instance where it could be read."""

    gpu: str
    profile: str
    start: int
    instance: int
    # None: the GPU instance itself.
    compute: int | None = None
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A creation whose end is not known: a GPU instance (``slices`` None), or a compute instance in ``instance``."""

    gpu: str
    profile: str
    start: int
    instance: int | None = None
    slices: int | None = None
    # The ids of its kind that were there right before; None: the driver would not tell.
    there: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All that a change knows to have made."""

    made: tuple[Made, ...] = ()
    begun: Begun | None = None

    def with_made(self, one: Made) -> Proof:
        """Return it with one more, and nothing begun."""
        return Proof(made=(*self.made, one))

    def with_begun(self, one: Begun | None) -> Proof:
        """Return it with a creation that is begun."""
        return replace(self, begun=one)

    def owns(self, gpu: str | None, one: GpuInstance) -> bool:
        """Return whether a GPU instance is proved to be the change's own, with all that is in it."""
        place = (gpu, one.profile.name, one.start)
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


def proof_from_json(raw: Mapping[str, Any]) -> Proof:
    """Return what `dataclasses.asdict` of a `Proof` was kept as.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    begun = raw["begun"]
    if begun is not None:
        there = begun["there"]
        begun = Begun(**{**begun, "there": None if there is None else tuple(map(_id, there))})
    made = tuple(Made(**one) for one in raw["made"])
    for one in (*made, *([] if begun is None else [begun])):
        if not all(isinstance(text, str) for text in (one.gpu, one.profile)):
            raise TypeError("no text")
        _id(one.start)
    return Proof(made=made, begun=begun)


def _id(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("no number")
    return value


# Slices, ids and indexes are far below.
_MOST: Final = 4096
_PROFILE: Final = re.compile(r"\d{1,3}g", re.ASCII)


@dataclass(frozen=True, kw_only=True, order=True)
class ComputeShape:
    """A compute instance: its slices, and its first slice in the GPU instance (None: wherever the driver likes)."""

    slices: int
    start: int | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceShape:
    """A GPU instance: the driver's profile name, its place in memory slices, what is inside."""

    profile: str
    start: int
    size: int
    compute: tuple[ComputeShape, ...] = ()
    # What its user calls it: for messages.
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.profile}:{self.start}" + (f" '{self.name}'" if self.name else "")

    @property
    def place(self) -> tuple[str, int]:
        """Return what it is told apart by."""
        return self.profile, self.start


@dataclass(frozen=True, kw_only=True)
class GpuShape:
    """One GPU: mode (None: not looked at) and instances, by place."""

    uuid: str
    index: int
    mig_enabled: bool | None
    instances: tuple[InstanceShape, ...] = ()


def shape_of(layout: Layout, *, mig_enabled: bool | None) -> GpuShape:
    """Return the shape of what exists."""
    return _shape(layout.uuid, layout.gpu, [_of_instance(one) for one in layout.instances], mig_enabled=mig_enabled)


def shape_after(plan: GpuPlan, *, mig_enabled: bool | None) -> GpuShape:
    """Return the shape that a plan leaves."""
    partial = {gone.instance.id: gone for gone in plan.destroyed if not gone.whole}
    into = {new.into.id: new for new in plan.created if new.into is not None}
    found = [_of_instance(one, partial.get(one.id), into.get(one.id)) for one in plan.kept]
    found += [
        InstanceShape(
            profile=new.profile.name,
            start=new.placement.start,
            size=new.placement.size,
            compute=tuple(sorted((_of_new(part) for part in new.compute), key=_rank)),
        )
        for new in plan.created
        if new.into is None
    ]
    return _shape(plan.uuid, plan.gpu, found, mig_enabled=mig_enabled)


def _shape(uuid: str | None, index: int, found: Sequence[InstanceShape], *, mig_enabled: bool | None) -> GpuShape:
    ordered = tuple(sorted(found, key=lambda one: one.start))
    return GpuShape(uuid=uuid or "", index=index, mig_enabled=mig_enabled, instances=ordered)


def _of_instance(one: GpuInstance, gone: Destroyed | None = None, new: Created | None = None) -> InstanceShape:
    stay = [compute for compute in one.compute if gone is None or compute not in gone.compute]
    inside = [_of_compute(compute) for compute in stay] + [_of_new(part) for part in (new.compute if new else ())]
    return InstanceShape(
        profile=one.profile.name,
        start=one.placement.start,
        size=one.placement.size,
        compute=tuple(sorted(inside, key=_rank)),
        name=one.name,
    )


def _of_compute(one: ComputeInstance) -> ComputeShape:
    return ComputeShape(slices=one.profile.slices, start=None if one.placement is None else one.placement.start)


def _of_new(part: NewCompute) -> ComputeShape:
    return ComputeShape(slices=part.profile.slices, start=None if part.placement is None else part.placement.start)


def _rank(one: ComputeShape) -> tuple[int, int]:
    return -1 if one.start is None else one.start, one.slices


# -- comparing -------------------------------------------------------------------------------------


def differences(now: GpuShape, wanted: GpuShape) -> tuple[str, ...]:
    """Return in words what differs from what is wanted; empty: nothing. An unknown start fits any."""
    found = []
    if wanted.mig_enabled is not None and now.mig_enabled is not wanted.mig_enabled:
        found.append(f"MIG is {'on' if now.mig_enabled else 'off'}")
    here = {one.place: one for one in now.instances}
    there = {one.place: one for one in wanted.instances}
    found += [f"{one} is missing" for place, one in there.items() if place not in here]
    found += [f"{one} is there" for place, one in here.items() if place not in there]
    found += [
        f"{one} holds {_words(here[place].compute)} instead of {_words(one.compute)}"
        for place, one in there.items()
        if place in here and not _same(here[place].compute, one.compute)
    ]
    return tuple(f"GPU {wanted.index}: {one}" for one in found)


def _same(now: Sequence[ComputeShape], wanted: Sequence[ComputeShape]) -> bool:
    exact = Counter(one for one in wanted if one.start is not None)
    left = Counter(now)
    left.subtract(exact)
    if any(count < 0 for count in left.values()):
        return False
    anywhere = Counter(one.slices for one in wanted if one.start is None)
    return Counter(one.slices for one in left.elements()) == anywhere


def _words(compute: Sequence[ComputeShape]) -> str:
    return ", ".join(f"{one.slices}c" for one in compute) or "no compute instance"


# -- making it again -------------------------------------------------------------------------------


def restoration(
    layout: Layout, wanted: GpuShape, ours: GpuShape, proof: Proof | None = None
) -> tuple[GpuPlan, tuple[str, ...]]:
    """Return the plan from what exists to a shape, and in words what cannot be had.

    ``ours`` is what the change that is undone was about to leave: only its instances are taken away, and of those only
    what ``proof`` proves to be its own (None: an older gpushare's journal, which has no proof). What somebody else made
    meanwhile stays, and so does what is busy.
    """
    places = {one.place: one for one in wanted.instances}
    made = {one.place: one for one in ours.instances}
    kept: list[GpuInstance] = []
    destroyed: list[Destroyed] = []
    created: list[Created] = []
    lost: list[str] = []
    for one in layout.instances:
        place = (one.profile.name, one.start)
        shape = places.pop(place, None)
        if shape is not None:
            kept.append(one)
            _restore_inside(
                one, shape, made.get(place), destroyed, created, lost, None if proof is None else (layout.uuid, proof)
            )
        elif not _is_ours(layout, one, ours, proof):
            kept.append(one)
        elif one.busy:
            kept.append(one)
            lost.append(f"{one.profile.name}:{one.start} is in use and stays")
        else:
            destroyed.append(whole(one))
    profiles = {profile.name: profile for profile in layout.profiles}
    taken = reduce(or_, (one.placement.mask for one in kept), 0)
    for shape in places.values():
        placement = Placement(shape.start, shape.size)
        if shape.profile not in profiles or taken & placement.mask:
            lost.append(f"{shape} has no room")
            continue
        profile = profiles[shape.profile]
        parts = tuple(_part(profile, part, lost) for part in shape.compute)
        created.append(
            Created(profile=profile, placement=placement, compute=tuple(part for part in parts if part is not None))
        )
    words = tuple(f"GPU {layout.gpu}: {one}" for one in lost)
    return gpu_plan(layout, kept, destroyed, created), words


def _is_ours(layout: Layout, one: GpuInstance, ours: GpuShape, proof: Proof | None) -> bool:
    """Return whether an instance that is not wanted is what the change made: what is busy counts, too, and is named."""
    if proof is not None:
        return proof.owns(layout.uuid, one)
    return any(shape.place == (one.profile.name, one.start) for shape in ours.instances)


def left_alone(layout: Layout, wanted: GpuShape, ours: GpuShape, proof: Proof | None) -> tuple[tuple[str, int], ...]:
    """Return the places of instances that are not wanted, and not known to be made by the change that is undone."""
    places = {one.place for one in wanted.instances}
    return tuple(
        (one.profile.name, one.start)
        for one in layout.instances
        if (one.profile.name, one.start) not in places and not _is_ours(layout, one, ours, proof)
    )


def _restore_inside(
    one: GpuInstance,
    shape: InstanceShape,
    ours: InstanceShape | None,
    destroyed: list[Destroyed],
    created: list[Created],
    lost: list[str],
    proof: tuple[str | None, Proof] | None,
) -> None:
    missing, made, gone = list(shape.compute), list(ours.compute) if ours is not None else [], []
    for compute in one.compute:
        # Each counts once: what stands for this one here stands for no other.
        wanted, meant = _taken(missing, compute), _taken(made, compute)
        if proof is not None:
            meant = proof[1].owns_part(proof[0], one, compute)
        if wanted or not meant:
            continue
        if compute.busy:
            lost.append(f"compute instance {compute.id} of {shape} is in use and stays")
        else:
            gone.append(compute)
    if gone:
        destroyed.append(Destroyed(instance=one, compute=tuple(gone), whole=False))
    staying = (part for part in one.compute if part.placement is not None and part not in gone)
    taken = reduce(or_, (part.placement.mask for part in staying if part.placement is not None), 0)
    for part in [
        part for part in missing if part.start is not None and taken & Placement(part.start, part.slices).mask
    ]:
        missing.remove(part)
        lost.append(f"{part.slices}c of {shape} has no room")
    parts = tuple(part for part in (_part(one.profile, part, lost) for part in missing) if part is not None)
    if parts:
        created.append(Created(profile=one.profile, placement=one.placement, compute=parts, into=one))


def _taken(parts: list[ComputeShape], compute: ComputeInstance) -> bool:
    """Take the shape that an existing compute instance has out of ``parts``; return whether there was one."""
    here = _of_compute(compute)
    match = here if here in parts else ComputeShape(slices=here.slices)
    if match not in parts:
        return False
    parts.remove(match)
    return True


def _part(profile: Profile, part: ComputeShape, lost: list[str]) -> NewCompute | None:
    found = profile.compute_of(part.slices) or (profile.whole if part.slices == profile.slices else None)
    if found is None or found.id is None:
        lost.append(f"{part.slices}c.{profile.name} is not offered any more")
        return None
    return NewCompute(profile=found, placement=None if part.start is None else Placement(part.start, part.slices))


# -- keeping it ------------------------------------------------------------------------------------


def from_json(raw: Mapping[str, Any]) -> GpuShape:
    """Return the shape whose `dataclasses.asdict` was kept.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    instances = tuple(
        InstanceShape(**{**one, "compute": tuple(ComputeShape(**part) for part in one["compute"])})
        for one in raw["instances"]
    )
    found = GpuShape(**{**raw, "instances": instances})
    numbers: list[object] = [found.index, *(number for one in instances for number in (one.start, one.size))]
    numbers += [number for one in instances for part in one.compute for number in (part.slices, part.start or 0)]
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise ValueError("a number that is none")
    texts: list[object] = [found.uuid, *(one.profile for one in instances), *(one.name or "" for one in instances)]
    if not all(isinstance(text, str) for text in texts) or found.mig_enabled not in {True, False, None}:
        raise TypeError("a field of another type")
    if not all(_PROFILE.match(one.profile) for one in instances):
        raise ValueError("no profile")
    return found
