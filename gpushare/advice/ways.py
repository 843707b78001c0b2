"""The ways of using one GPU that advice chooses among. Pure."""

from __future__ import annotations

import difflib
from typing import Final

from gpushare.base.errors import BadUsage
from gpushare.base.model import Way

# What can be the answer, in the order of its table.
ADVISED: Final = tuple(
    way for way in Way if way not in {Way.EXCLUSIVE, Way.PROHIBITED, Way.MPS_TIMESLICE, Way.CAPS, Way.THREADS}
)
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
    word = text.strip().lower()
    names = {**_ALIASES, **{way.value: way for way in ADVISED}}
    if word in names:
        return names[word]
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    known = ", ".join(way.value for way in ADVISED)
    hint = f"did you mean {' or '.join(close)}? All: {known}" if close else f"give one of: {known}"
    raise BadUsage(f"'{text[:40]}' is not a way of sharing", hint, code="bad_mechanism")
