"""Whether a GPU can ever be what its entry of gpushare.yaml says, whatever is on it now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpushare.actions.mps_limits import check_memory
from gpushare.errors import NotSupported
from gpushare.layout.description import Sharing
from gpushare.mig.plan import NoPlan
from gpushare.mig.planner import plan_exact
from gpushare.mig.profile import Layout, Profile
from gpushare.mig.wish import parse_wish, resolve
from gpushare.model import Gpu, MigInstance
from gpushare.selection import Device

if TYPE_CHECKING:
    from gpushare.layout.hostfile import Entry


def check_has_mig(gpu: Gpu, entry: Entry) -> None:
    """Raise NotSupported when an entry wants MIG of a GPU that has none (code ``no_mig``)."""
    if entry.sharing is Sharing.MIG and not gpu.mig_capable:
        raise NotSupported(
            f"GPU {gpu.index} ({gpu.name or 'unknown model'}) has no MIG",
            "see the ways of sharing that it has: gpushare compare",
            gpu=str(gpu.index),
            code="no_mig",
        )


def check_fits(gpu: Gpu, entry: Entry, profiles: Sequence[Profile]) -> None:
    """Raise unless the layout fits on the empty GPU, and each memory limit in its device.

    ``profiles`` are the driver's, where the entry wants MIG.

    Raises:
        NotSupported: no MIG, no such profile, or it never fits (code ``never_fits``).
        BadUsage: a profile that fits several, a place that it never has, a limit above the memory.
    """
    check_has_mig(gpu, entry)
    if entry.mps is not None:
        check_memory(Device(gpu=gpu), entry.mps.memory_limit_bytes)
    if entry.sharing is not Sharing.MIG:
        return
    empty = Layout(gpu=gpu.index, uuid=gpu.uuid, profiles=tuple(profiles), instances=())
    found = plan_exact([empty], {gpu.index: entry.wish})
    if isinstance(found, NoPlan):
        raise NotSupported(found.message, found.hint, gpu=str(gpu.index), code="never_fits")
    for one in entry.mig:
        if one.mps is None:
            continue
        for request in parse_wish(one.wish):
            profile = resolve(request, profiles)
            mig = MigInstance(uuid="", profile=profile.name, memory_total_bytes=profile.memory_bytes)
            check_memory(Device(gpu=gpu, mig=mig), one.mps.memory_limit_bytes)
