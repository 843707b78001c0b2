"""The shape of a GPU: its MIG mode and instances, compared, made again, and kept on disk. Pure.

A shape tells instances apart by profile and place, never by ids or processes, which change by themselves. The journal
of a change keeps two of each GPU, and a read-back compares with one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

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

    made: tuple[Creation, ...] = ()
    begun: Creation | None = None

    def with_made(self, one: Creation) -> Proof:
        """Return it with one more, and nothing begun."""
        return Proof(made=(*self.made, one))

    def with_begun(self, one: Creation | None) -> Proof:
        """Return it with a creation that is begun."""
        return replace(self, begun=one)

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
    destroyed: list[InstanceChange] = []
    created: list[InstanceChange] = []
    lost: list[str] = []
    for one in layout.instances:
        there = places.pop(one.place, None)
        if there is not None:
            kept.append(one)
            known = None if proof is None else (layout.uuid, proof)
            _restore_inside(one, there, made.get(one.place), destroyed, created, lost, known)
        elif not _is_ours(layout, one, ours, proof):
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


def _is_ours(layout: Layout, one: GpuInstance, ours: GpuShape, proof: Proof | None) -> bool:
    """Return whether an instance that is not wanted is what the change made: what is busy counts, too, and is named."""
    if proof is not None:
        return proof.owns(layout.uuid, one)
    return any(made.place == one.place for made in ours.instances)


def left_alone(layout: Layout, wanted: GpuShape, ours: GpuShape, proof: Proof | None) -> tuple[GpuInstance, ...]:
    """Return the instances that are not wanted, and not known to be made by the change that is undone."""
    places = {one.place for one in wanted.instances}
    return tuple(one for one in layout.instances if one.place not in places and not _is_ours(layout, one, ours, proof))


def _restore_inside(
    one: GpuInstance,
    wanted: GpuInstance,
    ours: GpuInstance | None,
    destroyed: list[InstanceChange],
    created: list[InstanceChange],
    lost: list[str],
    proof: tuple[str | None, Proof] | None,
) -> None:
    missing, made, gone = list(wanted.compute), list(ours.compute) if ours is not None else [], []
    for compute in one.compute:
        # Each counts once: an instance that matches this one matches no other.
        is_wanted, is_ours = _taken(missing, compute), _taken(made, compute)
        if proof is not None:
            is_ours = proof[1].owns_part(proof[0], one, compute)
        if is_wanted or not is_ours:
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
    """Return compute instances to create in a GPU instance of a profile; what it does not offer any more is lost."""
    found = []
    for part in sorted(parts, key=_rank):
        slices = part.profile.slices
        offered = profile.compute_of(slices) or (profile.whole if slices == profile.slices else None)
        if offered is None or offered.id is None:
            lost.append(f"{slices}c.{profile.name} is not offered any more")
        else:
            found.append(ComputeInstance(profile=offered, placement=part.placement))
    return tuple(found)


# -- keeping it ------------------------------------------------------------------------------------

# Slices, ids and indexes are far below.
_MOST: Final = 4096
_PROFILE: Final = re.compile(r"(\d{1,3})g", re.ASCII)


def to_json(shape: GpuShape) -> dict[str, Any]:
    """Return a shape as the journal keeps it."""
    instances = [
        {
            "profile": one.profile.name,
            "start": one.start,
            "size": one.placement.size,
            "compute": [dict(zip(("slices", "start"), _slot(part), strict=True)) for part in one.compute],
            "name": one.name,
        }
        for one in shape.instances
    ]
    return {"uuid": shape.uuid, "index": shape.index, "mig_enabled": shape.mig_enabled, "instances": instances}


def from_json(raw: Mapping[str, Any]) -> GpuShape:
    """Return the shape that `to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    _only(raw, "uuid", "index", "mig_enabled", "instances")
    if not isinstance(raw["uuid"], str) or raw["mig_enabled"] not in {True, False, None}:
        raise TypeError("a field of the wrong type")
    instances = tuple(map(_instance_from, raw["instances"]))
    return GpuShape(uuid=raw["uuid"], index=_number(raw["index"]), mig_enabled=raw["mig_enabled"], instances=instances)


def _instance_from(raw: Mapping[str, Any]) -> GpuInstance:
    _only(raw, "profile", "start", "size", "compute", "name")
    profile, name = raw["profile"], raw.get("name")
    if not isinstance(profile, str) or not isinstance(name or "", str):
        raise TypeError("a field of the wrong type")
    match = _PROFILE.match(profile)
    if match is None:
        raise ValueError("no profile")
    return GpuInstance(
        # The driver knows the rest of it.
        profile=Profile(name=profile, id=None, slices=int(match.group(1)), placements=None),
        placement=Placement(_number(raw["start"]), _number(raw["size"])),
        compute=tuple(map(_compute_from, raw["compute"])),
        name=name,
    )


def _compute_from(raw: Mapping[str, Any]) -> ComputeInstance:
    _only(raw, "slices", "start")
    slices, start = _number(raw["slices"]), raw.get("start")
    placement = None if start is None else Placement(_number(start), slices)
    return ComputeInstance(profile=ComputeProfile(slices=slices), placement=placement)


def _only(raw: Mapping[str, Any], *keys: str) -> None:
    if not set(raw) <= set(keys):
        raise TypeError("more than gpushare writes")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("a value that is not a number")
    return value


# What a journal has of a creation that is done, and of one that is begun.
_MADE: Final = ("gpu", "profile", "start", "instance", "compute", "uuid")
_BEGUN: Final = ("gpu", "profile", "start", "instance", "slices", "there")


def proof_to_json(proof: Proof) -> dict[str, Any]:
    """Return a proof as the journal keeps it."""
    made = [{key: value for key, value in asdict(one).items() if key in _MADE} for one in proof.made]
    begun = None if proof.begun is None else asdict(proof.begun)
    return {"made": made, "begun": begun and {key: begun[key] for key in _BEGUN}}


def proof_from_json(raw: Mapping[str, Any]) -> Proof:
    """Return the proof that `proof_to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    made = tuple(_creation_from(one, _MADE) for one in raw["made"])
    return Proof(made=made, begun=None if raw["begun"] is None else _creation_from(raw["begun"], _BEGUN))


def _creation_from(raw: Mapping[str, Any], keys: Sequence[str]) -> Creation:
    _only(raw, *keys)
    there = raw.get("there")
    one = Creation(**{**raw, "there": None if there is None else tuple(map(_id, there))})
    if not all(isinstance(text, str) for text in (one.gpu, one.profile)):
        raise TypeError("no text")
    _id(one.start)
    return one


def _id(value: object) -> int:
    if type(value) is not int:
        raise TypeError("no number")
    return value
