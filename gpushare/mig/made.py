"""Which GPU instances gpushare created: what others created goes only with consent.

The record does not survive a reboot, as the instances do not. An instance is told by its GPU, profile and place, because
the driver reuses ids; one that is gone at the next change is dropped from the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.host.store import Kept, RecordStore
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.shape import GpuShape


class Made(NamedTuple):
    """An instance: GPU UUID, profile, first memory slice."""

    gpu: str
    profile: str
    start: int


@dataclass(frozen=True, kw_only=True)
class _Record(Kept):
    instances: tuple[Made, ...] = ()


MADE: Final = RecordStore(_Record, "made", "the record of the instances that gpushare created")


def made_by_gpushare(host: Host) -> frozenset[Made]:
    """Return the instances that this user's gpushare or root's has created since the boot; some may be gone."""
    return frozenset(made for record in MADE.find(host, "mig") for made in record.instances)


def note_made(host: Host, before: Iterable[GpuShape], after: Iterable[GpuShape], made: Iterable[Made]) -> None:
    """Note what a change has created and destroyed. The caller holds the lock of all MIG changes.

    Call it before the journal of the change ends: where it fails, the next gpushare finds the change complete and
    notes it.
    """
    path = MADE.path(host, "mig")
    record = MADE.read(path) or _Record(path=path)
    there = {Made(gpu.uuid, *instance.place) for gpu in after for instance in gpu.instances}
    gpus = {gpu.uuid for gpu in before}
    now = {each for each in record.instances if each.gpu not in gpus or each in there} | (set(made) & there)
    if now != set(record.instances):
        MADE.write(replace(record, instances=tuple(sorted(now))))
