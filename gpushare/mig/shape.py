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
from gpushare.mig.plan import GpuPlan, InstanceChange, whole_change
from gpushare.mig.planner import change_inside, gpu_plan
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Placement, Profile, mask_of, on_or_off

# Slices, ids and indexes are far below.
_Number = Annotated[int, Within(0, 4095)]
_ProfileName = Annotated[str, re.compile(r"(\d{1,3})g", re.ASCII).match]


class ComputeShape(NamedTuple):
    """A compute instance: its slices, and its first slice in the GPU instance or None for any."""

    slices: _Number
    start: _Number | None

    @property
    def rank(self) -> tuple[int, int]:
        """Return a sort key: by start, those that may be anywhere first, then by size."""
        return -1 if self.start is None else self.start, self.slices

    @property
    def placement(self) -> Placement | None:
        return None if self.start is None else Placement(self.start, self.slices)


class InstanceShape(NamedTuple):
    """A GPU instance: what of it does not change by itself."""

    profile: _ProfileName
    start: _Number
    size: _Number
    compute: tuple[ComputeShape, ...]
    name: str | None

    def __str__(self) -> str:
        return f"{self.profile}:{self.start}"

    @property
    def place(self) -> tuple[str, int]:
        """Return profile and first memory slice, as `GpuInstance.place`."""
        return self.profile, self.start

    @property
    def placement(self) -> Placement:
        return Placement(self.start, self.size)

    @property
    def title(self) -> str:
        return f"{self} '{self.name}'" if self.name else str(self)


@dataclass(frozen=True, kw_only=True)
class GpuShape:
    """One GPU: mode (None: not looked at) and instances, by place. A part of the journal."""

    uuid: str
    index: _Number
    mig_enabled: bool | None
    instances: tuple[InstanceShape, ...]

    def without(self, others: Sequence[GpuInstance | InstanceShape]) -> GpuShape:
        """Return the shape less the instances at the places of ``others``."""
        places = {instance.place for instance in others}
        return replace(self, instances=tuple(shape for shape in self.instances if shape.place not in places))


def shape_of(layout: Layout, *, mig_enabled: bool | None, instances: Sequence[GpuInstance] | None = None) -> GpuShape:
    """Return the shape of a GPU with the instances of its layout, or with these ``instances`` instead."""
    shapes = [
        InstanceShape(
            profile=instance.profile.name,
            start=instance.start,
            size=instance.placement.size,
            compute=tuple(map(_compute_shape, instance.compute)),
            name=instance.name,
        )
        for instance in (layout.instances if instances is None else instances)
    ]
    shapes.sort(key=lambda shape: shape.start)
    return GpuShape(uuid=layout.uuid or "", index=layout.gpu, mig_enabled=mig_enabled, instances=tuple(shapes))


def _compute_shape(part: ComputeInstance) -> ComputeShape:
    return ComputeShape(part.profile.slices, None if part.placement is None else part.placement.start)


def differences(now: GpuShape, wanted: GpuShape) -> tuple[str, ...]:
    """Return in words what differs from what is wanted; empty: nothing. An unknown start fits any."""
    words = []
    if wanted.mig_enabled is not None and now.mig_enabled is not wanted.mig_enabled:
        words.append(f"MIG is {on_or_off(now.mig_enabled)}")
    present = {instance.place: instance for instance in now.instances}
    expected = {instance.place: instance for instance in wanted.instances}
    words += [f"{instance.title} is missing" for place, instance in expected.items() if place not in present]
    words += [f"{instance.title} is there" for place, instance in present.items() if place not in expected]
    words += [
        f"{instance.title} has {_compute_text(present[place])} instead of {_compute_text(instance)}"
        for place, instance in expected.items()
        if place in present and not _is_as_wanted(present[place], instance)
    ]
    return tuple(f"GPU {wanted.index}: {text}" for text in words)


def _is_as_wanted(now: InstanceShape, wanted: InstanceShape) -> bool:
    """Return whether a GPU instance has the wanted compute instances, each at its start if it has one."""
    others = list(now.compute)
    for part in wanted.compute:
        if part.start is None:
            continue
        if part not in others:
            return False
        others.remove(part)
    # The others may be anywhere: only their sizes count.
    wanted_anywhere = Counter(part.slices for part in wanted.compute if part.start is None)
    return Counter(part.slices for part in others) == wanted_anywhere


def _compute_text(instance: InstanceShape) -> str:
    ordered = sorted(instance.compute, key=lambda part: part.rank)
    return ", ".join(f"{part.slices}c" for part in ordered) or "no compute instance"


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

    def may_have_made(self, number: int) -> bool:
        """Return whether an instance with this id came into being after the creation was noted."""
        return self.there is not None and number not in self.there


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All that a change has noted to have made; ``begun`` is a creation that may or may not have succeeded."""

    made: tuple[Creation, ...]
    begun: Creation | None

    def owns(self, gpu: str | None, instance: GpuInstance) -> bool:
        """Return whether the change is proved to have made a GPU instance and all in it: only then its undo destroys it."""

        def is_place_of(creation: Creation) -> bool:
            return (creation.gpu, creation.profile, creation.start) == (gpu, *instance.place)

        if any(made.compute is None and is_place_of(made) and made.instance == instance.id for made in self.made):
            return all(self.owns_part(gpu, instance, part) for part in instance.compute)
        begun = self.begun
        if begun is None or begun.slices is not None or not is_place_of(begun):
            return False
        # The change puts compute instances only into a GPU instance that it has noted.
        return begun.may_have_made(instance.id) and not instance.compute and not instance.busy

    def owns_part(self, gpu: str | None, instance: GpuInstance, part: ComputeInstance) -> bool:
        """Return whether the change is proved to have made a compute instance, as `owns`."""
        for made in self.made:
            if (made.gpu, made.instance, made.compute) == (gpu, instance.id, part.id):
                # Another one may have its id now.
                return None in {made.uuid, part.uuid} or made.uuid == part.uuid
        begun = self.begun
        if begun is None or (begun.gpu, begun.instance, begun.slices) != (gpu, instance.id, part.profile.slices):
            return False
        return begun.may_have_made(part.id)


NOTHING: Final = Proof(made=(), begun=None)


class Restoration:
    """How a GPU gets a shape back: ``plan``; in words what is ``lost``; and instances of ``others``, which stay.

    Only idle instances that ``proof`` shows were made by the change being undone are destroyed.
    """

    def __init__(self, layout: Layout, wanted: GpuShape, proof: Proof) -> None:
        self._gpu = layout.gpu
        self.lost: list[str] = []
        self.others: list[GpuInstance] = []
        self._destroyed: list[InstanceChange] = []
        self._created: list[InstanceChange] = []
        kept: list[GpuInstance] = []
        # Those found below are taken out: what remains is missing.
        shapes = {instance.place: instance for instance in wanted.instances}
        for instance in layout.instances:
            shape = shapes.pop(instance.place, None)
            if shape is None and proof.owns(layout.uuid, instance) and not instance.busy:
                self._destroyed.append(whole_change(instance))
                continue
            kept.append(instance)
            if shape is not None:
                own_parts = [part for part in instance.compute if proof.owns_part(layout.uuid, instance, part)]
                self._restore_inside(instance, shape, own_parts)
            elif proof.owns(layout.uuid, instance):
                self._note_lost(f"{instance} is in use and stays")
            else:
                self.others.append(instance)
        profiles = {profile.name: profile for profile in layout.profiles}
        taken = mask_of(instance.placement for instance in kept)
        for missing in shapes.values():
            profile = profiles.get(missing.profile)
            if profile is None or taken & missing.placement.mask:
                self._note_lost(f"{missing.title} has no room")
                continue
            parts = self._parts_to_create(profile, missing.compute)
            self._created.append(whole_change(GpuInstance(profile=profile, placement=missing.placement, compute=parts)))
        self.plan: GpuPlan = gpu_plan(layout, kept, self._destroyed, self._created)

    def _note_lost(self, words: str) -> None:
        self.lost.append(f"GPU {self._gpu}: {words}")

    def _restore_inside(
        self, instance: GpuInstance, wanted: InstanceShape, own_parts: Sequence[ComputeInstance]
    ) -> None:
        """Plan what restores the inside of a GPU instance that stays; only ``own_parts`` may be destroyed."""
        missing = list(wanted.compute)
        removed = []
        for compute in instance.compute:
            # Each counts once: an instance that matches this one matches no other.
            if _take_match(missing, compute) or compute not in own_parts:
                continue
            if compute.busy:
                self._note_lost(f"compute instance {compute.id} of {wanted.title} is in use and stays")
            else:
                removed.append(compute)
        if removed:
            self._destroyed.append(change_inside(instance, removed))
        taken = mask_of(part.placement for part in instance.compute if part not in removed)
        without_room = [part for part in missing if taken & mask_of([part.placement])]
        for part in without_room:
            missing.remove(part)
            self._note_lost(f"{part.slices}c of {wanted.title} has no room")
        parts = self._parts_to_create(instance.profile, missing)
        if parts:
            self._created.append(change_inside(instance, parts))

    def _parts_to_create(self, profile: Profile, parts: Sequence[ComputeShape]) -> tuple[ComputeInstance, ...]:
        """Return the compute instances to create; those that the profile no longer offers are lost."""
        offers = []
        for part in sorted(parts, key=lambda part: part.rank):
            offered = profile.compute_to_create(part.slices)
            if offered is None or offered.id is None:
                self._note_lost(f"{part.slices}c.{profile.name} is no longer offered")
            else:
                offers.append(ComputeInstance(profile=offered, placement=part.placement))
        return tuple(offers)


def _take_match(parts: list[ComputeShape], compute: ComputeInstance) -> bool:
    """Remove the part that an existing compute instance matches from ``parts``; return whether there was one.

    That is the one at its start, or else one of its size that may be anywhere.
    """
    exact = _compute_shape(compute)
    for part in (exact, exact._replace(start=None)):
        if part in parts:
            parts.remove(part)
            return True
    return False
