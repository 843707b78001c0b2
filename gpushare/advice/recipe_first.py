"""What has to go before a way can be set up, and the lines that bring it back: the MPS daemon that serves the GPU. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpushare.advice.recipe_line import Line, Recipe
from gpushare.advice.recipe_mps import start_words
from gpushare.advice.ways import ALL_MIG, Way

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation


def without_mps(situation: Situation, way: Way, found: Recipe) -> Recipe:
    """Return a recipe that first stops the MPS daemon of the GPU where it is in the way, and at last starts it again."""
    if not in_the_way_of(situation, way):
        return found
    gpu, now = f"-g {situation.gpu.index}", situation.gpu.mps
    if now is None:
        stop = Line("stop the MPS daemon of the GPU, as it was started: see gpushare mps status", None)
        start = Line("start the MPS daemon again, as it was", None)
    else:
        stop = Line("stop the MPS daemon of now, which waits for its programs", f"gpushare mps stop {gpu}")
        start = Line("start MPS again, as it is now", " ".join([f"gpushare mps start {gpu}", *start_words(now)]))
    return replace(found, lines=(stop, *found.lines), undo=(*found.undo, start))


def in_the_way_of(situation: Situation, way: Way) -> bool:
    """Return whether an MPS daemon of the whole GPU keeps a way from being set up.

    Its clients are not time-sliced, and MIG cannot be turned on beside it.
    """
    if not situation.mps_serves or (situation.case.any("running") and way is Way.TIMESLICE):
        return False
    return way in {Way.TIMESLICE, *ALL_MIG}
