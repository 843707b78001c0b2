"""The ways of using one GPU that advice chooses among. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from gpushare.base.errors import BadUsage
from gpushare.base.model import Way
from gpushare.base.units import plain_name, quoted

K = TypeVar("K")

# What can be the answer, in the order of its table.
ADVISED: Final = tuple(
    way for way in Way if way not in {Way.EXCLUSIVE, Way.PROHIBITED, Way.MPS_TIMESLICE, Way.CAPS, Way.THREADS}
)
# Other names for them, besides the beginnings and parts of their own.
_OTHER_NAMES: Final = {
    Way.WHOLE: ("exclusive", "queue"),
    Way.TURNS: ("by-turns", "in-turns"),
    Way.SWAP: ("swapping", "by-swap", "idle"),
    Way.STREAMS: ("CUDA streams",),
    Way.TIMESLICE: ("time-slicing", "time-sharing", "ts"),
    Way.SLICES: ("time-slices",),
    Way.MPS: ("multi-process service",),
    Way.MIG: ("multi-instance GPU",),
    Way.VGPU: ("virtual GPU",),
    Way.MIG_TIMESLICE: ("mig+time-slicing",),
}

ALL_MPS: Final = (Way.MPS, Way.MPS_PRIORITY, Way.MPS_STATIC, Way.MPS_STREAMS)
ALL_MIG: Final = (Way.MIG, Way.MIG_MPS, Way.MIG_TIMESLICE)
# Several programs on one device at the same time.
CONCURRENT: Final = (Way.STREAMS, Way.TIMESLICE, Way.SLICES, *ALL_MPS, *ALL_MIG, Way.VGPU)
# Jobs that do not fit at the same time: one leaves the GPU with all of its memory, and comes back.
LEAVING: Final = (Way.TURNS, Way.SWAP)
# What can be measured against each other: without the two answers that are not a way of sharing, and without LEAVING.
SHARING: Final = (Way.WHOLE, *CONCURRENT)


def way_of(text: str, ways: Sequence[Way] = ADVISED) -> Way:
    """Return the one of some ways that a user names: ``MPS``, ``time-slicing``, ``ts``.

    Raises:
        BadUsage: there is none of that name.
    """
    names = {way: (way.value, *_OTHER_NAMES.get(way, ())) for way in ways}
    named = keys_named(text, names)
    if len(named) == 1:
        return named[0]
    listed = ", ".join(way.value for way in ways)
    raise BadUsage(f"{quoted(text)} is not a way of sharing", f"give {listed}", code="bad_way")


def keys_named(text: str, names: Mapping[K, Iterable[str]]) -> list[K]:
    """Return the keys with exactly this name; else those whose names begin with it; else those that contain it."""
    asked = plain_name(text)
    if not asked:
        return []
    bare = {key: [plain_name(name) for name in several] for key, several in names.items()}
    exact = [key for key, several in bare.items() if asked in several]
    # One or two letters are too short to match a part of a name.
    if exact or len(asked) < 3:
        return exact
    begins = [key for key, several in bare.items() if any(name.startswith(asked) for name in several)]
    return begins or [key for key, several in bare.items() if any(asked in name for name in several)]
