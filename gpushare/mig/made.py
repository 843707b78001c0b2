"""Which instances a change has made itself: only those are taken away when it is undone. Pure.

The driver gives ids again, and others change MIG too (`nvidia-smi mig`). So each creation is noted with the ids that
the driver gave, and before it what was there already: of a change that died between the two it is known what can be its.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpushare.mig.profile import ComputeInstance, GpuInstance


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
