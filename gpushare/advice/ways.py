"""The ways of using one GPU that advice chooses among. Pure."""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Final

from gpushare.advice.table import Mechanism
from gpushare.base.errors import BadUsage


class Way(str, Enum):
    """One way, in the order of the answer's table: from the simplest to the most special."""

    WHOLE = "whole-gpu"
    TURNS = "turns"
    SWAP = "swap"
    STREAMS = "streams"
    TIMESLICE = "timeslice"
    SLICES = "slices"
    MPS = "mps"
    MPS_PRIORITY = "mps-priority"
    MPS_STATIC = "mps-static"
    MIG = "mig"
    VGPU = "vgpu"
    MIG_MPS = "mig+mps"
    MIG_TIMESLICE = "mig+timeslice"
    MPS_STREAMS = "mps+streams"
    MEASURE = "measure"
    FIX = "fix-app"

    @property
    def label(self) -> str:
        return _TITLES[self]

    @property
    def outer(self) -> Mechanism | None:
        """Return the mechanism that separates the parties; None if nothing is shared."""
        return _OUTER.get(self)

    @property
    def inner(self) -> Mechanism | None:
        """Return the mechanism inside the part of one party; None if there is only one level."""
        return _INNER.get(self)

    @property
    def table_option(self) -> str | None:
        """Return the key of its option in the table: static partitions, MIG-backed vGPU."""
        return _OPTIONS.get(self)


_TITLES: Final = {
    Way.WHOLE: "whole GPU, or a queue",
    Way.TURNS: "turns, each with the whole GPU",
    Way.SWAP: "swap to host memory",
    Way.STREAMS: "CUDA streams",
    Way.TIMESLICE: "time-slicing",
    Way.SLICES: "time-slicing with a slice per process",
    Way.MPS: "MPS",
    Way.MPS_PRIORITY: "MPS with priority and a cap",
    Way.MPS_STATIC: "MPS static partitions",
    Way.MIG: "MIG",
    Way.VGPU: "vGPU",
    Way.MIG_MPS: "MIG with MPS inside",
    Way.MIG_TIMESLICE: "MIG with time-slicing inside",
    Way.MPS_STREAMS: "MPS, with streams inside",
    Way.MEASURE: "measure it",
    Way.FIX: "fix the application first",
}
_OUTER: Final = {
    Way.STREAMS: Mechanism.STREAMS,
    Way.TIMESLICE: Mechanism.TIMESLICE,
    Way.SLICES: Mechanism.TIMESLICE,
    Way.MPS: Mechanism.MPS,
    Way.MPS_PRIORITY: Mechanism.MPS,
    Way.MPS_STATIC: Mechanism.MPS,
    Way.MIG: Mechanism.MIG,
    Way.VGPU: Mechanism.VGPU,
    Way.MIG_MPS: Mechanism.MIG,
    Way.MIG_TIMESLICE: Mechanism.MIG,
    Way.MPS_STREAMS: Mechanism.MPS,
}
_INNER: Final = {
    Way.MIG_MPS: Mechanism.MPS,
    Way.MIG_TIMESLICE: Mechanism.TIMESLICE,
    Way.MPS_STREAMS: Mechanism.STREAMS,
}
_OPTIONS: Final = {Way.MPS_STATIC: "static", Way.VGPU: "mig-backed", Way.SLICES: "slices"}
# Other words for them.
_ALIASES: Final = {
    "exclusive": Way.WHOLE,
    "whole": Way.WHOLE,
    "queue": Way.WHOLE,
    "turn": Way.TURNS,
    "by-turns": Way.TURNS,
    "in-turns": Way.TURNS,
    "swapping": Way.SWAP,
    "by-swap": Way.SWAP,
    "idle": Way.SWAP,
    "stream": Way.STREAMS,
    "time-slicing": Way.TIMESLICE,
    "timeslicing": Way.TIMESLICE,
    "time-slice": Way.TIMESLICE,
    "ts": Way.TIMESLICE,
    "slice": Way.SLICES,
    "time-slices": Way.SLICES,
    "priority": Way.MPS_PRIORITY,
    "static": Way.MPS_STATIC,
    "mig+time-slicing": Way.MIG_TIMESLICE,
    "fix": Way.FIX,
}

ALL_MPS: Final = (Way.MPS, Way.MPS_PRIORITY, Way.MPS_STATIC, Way.MPS_STREAMS)
ALL_MIG: Final = (Way.MIG, Way.MIG_MPS, Way.MIG_TIMESLICE)
# Several programs on one device at the same time.
CONCURRENT: Final = (Way.STREAMS, Way.TIMESLICE, Way.SLICES, *ALL_MPS, *ALL_MIG, Way.VGPU)
# Jobs that do not fit at the same time: one leaves the GPU with all of its memory, and comes back.
LEAVING: Final = (Way.TURNS, Way.SWAP)
# What can be measured against each other: without the two answers that are not a way of sharing, and without LEAVING.
SHARING: Final = (Way.WHOLE, *CONCURRENT)


def way_of(text: str) -> Way:
    """Return the way that a user names.

    Raises:
        BadUsage: there is none of that name; the hint names close ones.
    """
    wanted = text.strip().lower()
    try:
        return Way(wanted)
    except ValueError:
        pass
    if wanted in _ALIASES:
        return _ALIASES[wanted]
    close = difflib.get_close_matches(wanted, [*(way.value for way in Way), *_ALIASES], n=2, cutoff=0.5)
    known = ", ".join(way.value for way in Way)
    hint = f"did you mean {' or '.join(close)}? All: {known}" if close else f"give one of: {known}"
    raise BadUsage(f"'{text[:40]}' is not a way of sharing", hint, code="bad_mechanism")
