"""The memory of MIG instances: what each must hold, and what it has. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gpushare.advice.ways import ALL_MIG, Way
from gpushare.units import format_bytes

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation


def instances_sentence(situation: Situation, way: Way) -> str | None:
    """Return the sum of each instance in words: the sum of the whole GPU says nothing there.

    None: it is another way, nobody said what a process needs, or the driver lists no profiles.
    """
    layout, shares = situation.gpu.layout, situation.shares(way)
    if way not in ALL_MIG or layout is None or not all(share.memory_bytes for share in shares):
        return None
    free, slices = situation.free_now(way), situation.slices(way)
    if free is not None and way is Way.MIG:
        pairs = zip(free, sorted(shares, reverse=True), strict=True)
    else:
        pairs = zip([one.name for one in slices.profiles] if slices else [], shares, strict=False)
    sizes = {profile.name: profile.memory_bytes for profile in layout.profiles}
    sums = []
    for (name, share), count in Counter(pairs).items():
        size = sizes.get(name)
        if size is None:
            return None
        each = "" if count == 1 else f"each of {count} "
        needed, left = format_bytes(share.memory_bytes), format_bytes(size - share.memory_bytes)
        sums.append(f"in {each}{name} {needed} of {format_bytes(size)}, CUDA contexts counted: {left} left")
    return "; ".join(sums) or None
