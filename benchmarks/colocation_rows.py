"""What `benchmarks.colocation` measures, in order: pairs, their targets, goals, and the settings that are tried. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpushare.measure.search import Goal as SearchGoal
from gpushare.measure.search import Judged, Trial, judge


@dataclass(frozen=True)
class Target:
    """What production must keep: a share of its rate alone, and a p99 within a factor of that alone."""

    keep: float = 0.97
    p99: float | None = None

    @property
    def title(self) -> str:
        """Return it as in the table."""
        return f"{self.keep:.2f}" if self.p99 is None else f"{self.keep:.2f}, {self.p99:.2f}x"


@dataclass(frozen=True)
class Goal:
    """What a row is to reach: production as the target says, and the other's share of its rate alone."""

    target: Target
    other: float
    # Slices only: the row asks what time-slicing can do.
    slices_only: bool = False


# Production with gaps is judged by its p99, without gaps by its rate.
LATENCY: Final = ("bert-graph", "bert-eager", "infer", "enc1", "enc5")
PRODUCTION: Final = ("bert-graph", "bert-eager", "decode", "infer", "mid", "membw")
OTHERS: Final = ("bert-train", "gpt2-train", "resnet-train", "big", "membw")
RATE_TARGETS: Final = {"mid": Target(0.97), "membw": Target(0.90), "decode": Target(0.90)}

# Requests that come every 10 or 25 ms need longer windows for a p99.
LONGER: Final = {"enc1": 1.4, "infer": 1.2}

# The first target of a pair is what its row in the table is tuned for.
GOALS: Final[dict[tuple[str, str, int], tuple[Goal, ...]]] = {
    ("infer", "big", 1): (Goal(Target(0.97, 1.15), 0.95, slices_only=True),),
    ("enc1", "resnet-train", 1): (Goal(Target(0.97, 1.35), 0.93),),
    ("enc1", "bert-train", 1): (Goal(Target(0.97, 1.45), 0.90),),
    ("enc5", "bert-train", 1): (Goal(Target(0.97, 1.25), 0.45),),
    ("enc5", "bert-train", 2): (Goal(Target(0.97, 1.25), 0.40),),
    ("bert-eager", "bert-train", 1): (Goal(Target(0.97, 1.15), 0.45), Goal(Target(0.97, 1.40), 0.90)),
    # The figures of the day before, less the scatter of one window.
    ("membw", "big", 1): (Goal(Target(0.90), 0.21),),
    ("mid", "big", 1): (Goal(Target(0.97), 0.72),),
}


def targets(production: str, other: str, others: int = 1) -> list[Target]:
    """Return what production must keep in a pair; several where a user may ask for either."""
    if goals := GOALS.get((production, other, others)):
        return [goal.target for goal in goals]
    return [RATE_TARGETS.get(production, Target(0.97, 1.25))]


@dataclass(frozen=True)
class Setting:
    """How a cell runs. ``way``: timeslice, slices, mps, caps (low priority), group (others in MPS, production outside)."""

    way: str
    production_us: int | None = None
    other_us: int | None = None
    threads: float = 100.0
    low: bool = False

    @property
    def title(self) -> str:
        """Return it as in the table."""
        if self.way == "timeslice":
            return "time-slicing as it is"
        if self.way in {"slices", "group"}:
            words = f"slices {self.production_us or 'default'}:{self.other_us or 'default'} us"
            return words if self.way == "slices" else f"others in one MPS daemon, {words}"
        if self.threads >= 100:
            return "MPS, low priority" if self.low else "MPS"
        return f"cap {self.threads:g} %, low priority"


AS_IT_IS: Final = Setting("timeslice")
MPS: Final = Setting("mps")
LOW: Final = Setting("mps", low=True)
# Production's slice is longer than its request; microseconds.
LONG_US: Final = 16000
CAPS: Final = (80.0, 65.0, 50.0, 35.0, 25.0, 12.0)
CAPS_SHORT: Final = (80.0, 50.0, 25.0, 12.0)
# The other's slice, from what gives it most to what gives it least. None: production keeps its own.
_GAPS: Final = ((LONG_US, 1000), (LONG_US, 500), (LONG_US, 200), (LONG_US, 100), (LONG_US, 50), (None, 50))
_GAPS_SHORT: Final = ((LONG_US, 500), (LONG_US, 200), (LONG_US, 50), (None, 100))
_FULL: Final = ((4000, 2048), (LONG_US, 4096), (LONG_US, 2048), (LONG_US, 1000), (LONG_US, 500))
_FULL_SHORT: Final = ((LONG_US, 4096), (LONG_US, 2048), (LONG_US, 1000))


def slices(production: str, *, short: bool) -> list[Setting]:
    """Return the slices to try next to a production job."""
    if production in LATENCY:
        pairs: Sequence[tuple[int | None, int]] = _GAPS_SHORT if short else _GAPS
    else:
        pairs = _FULL_SHORT if short else _FULL
    return [Setting("slices", production_us=ours, other_us=other) for ours, other in pairs]


def caps(*, short: bool) -> list[Setting]:
    """Return the caps to try, from the largest."""
    return [Setting("caps", threads=cap, low=True) for cap in (CAPS_SHORT if short else CAPS)]


def two_settings() -> list[Setting]:
    """Return what is tried with two others: each with a slice, and both in one MPS daemon with one slice."""
    each = [Setting("slices", production_us=LONG_US, other_us=us) for us in (1000, 500)]
    return [*each, *(Setting("group", production_us=LONG_US, other_us=us) for us in (None, 1000, 500, 200, 100))]


# Slices of two jobs that always work; the first is 3:1 in the numbers.
WEIGHTS: Final = ((2048, 2048), (6144, 2048), (6144, 2560), (6144, 3072), (12288, 4096), (9000, 3600))


@dataclass(frozen=True)
class Item:
    """One row to measure: pair, two, weights or pause; ``short`` has fewer settings and windows of two thirds."""

    kind: str
    production: str
    other: str
    start: int
    short: bool = False

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return what tells it from others in the results."""
        return self.kind, self.production, self.other, self.start

    @property
    def others(self) -> int:
        """Return how many other jobs there are."""
        return 2 if self.kind in {"two", "weights"} else 1

    def seconds(self, window: float, settle: float) -> float:
        """Return how long it takes at most, with windows of such a length."""
        if self.kind == "pause":
            return 45.0
        own = window * LONGER.get(self.production, 1.0) * (0.7 if self.short else 1.0)
        cells = {"pair": 15.0 if self.short else 18.0, "two": 13.0, "weights": 9.0}[self.kind]
        return (9.0 if self.start > 1 and self.kind != "weights" else cells) * (own + settle)


@dataclass(frozen=True)
class Batch:
    """Rows that share the processes of one other job."""

    other: str
    start: int
    items: tuple[Item, ...]


def _goals(start: int) -> Iterator[Batch]:
    trained = [Item("pair", one, "bert-train", start) for one in ("enc5", "enc1", "bert-eager")]
    trained += [Item("two", "enc5", "bert-train", start), Item("weights", "", "bert-train", start)]
    yield Batch("bert-train", start, tuple(trained))
    yield Batch("big", start, tuple(Item("pair", one, "big", start) for one in ("infer", "mid", "membw")))
    last = [Item("pair", "enc1", "resnet-train", start)]
    last += [Item("pause", "", "resnet-train", start)] if start == 1 else []
    yield Batch("resnet-train", start, tuple(last))


def _rest(start: int) -> Iterator[Batch]:
    known = {(item.production, item.other) for batch in _goals(start) for item in batch.items if item.kind == "pair"}
    for other in OTHERS:
        wanted = [one for one in PRODUCTION if (one, other) not in known and one != other]
        yield Batch(other, start, tuple(Item("pair", one, other, start, short=True) for one in wanted))


def batches(starts: int) -> list[Batch]:
    """Return all of the work, the rows with goals first: once, then the rest once, then the goals again."""
    found = [*_goals(1), *_rest(1)]
    for start in range(2, starts + 1):
        found += _goals(start)
    for start in range(2, starts + 1):
        found += _rest(start)
    return found


def known_settings(cells: Sequence[Mapping[str, Any]], wanted: Sequence[Target]) -> list[Setting]:
    """Return what a later start measures again: the ways without a choice, and the best slices, caps and groups."""
    found = [setting_of(cell) for cell in cells if setting_of(cell) in {AS_IT_IS, MPS, LOW}]
    for ways in (("slices",), ("caps",), ("group",)):
        some = [cell for cell in cells if cell["setting"]["way"] in ways]
        picks = [choose(some, target) for target in wanted]
        found += [pick[0] for pick in picks if pick is not None]
    return list(dict.fromkeys(found))


def setting_of(cell: Mapping[str, Any]) -> Setting:
    """Return the setting of a measured cell."""
    return Setting(**cell["setting"])


def judged(cells: Sequence[Mapping[str, Any]], target: Target) -> list[Judged]:
    """Return cells by setting, as tune judges its trials."""
    trials: list[Any] = []
    for cell in cells:
        width = None if cell["p99_low"] is None else cell["p99_high"] - cell["p99_low"]
        between = None if cell["kept_low"] is None else cell["kept_high"] - cell["kept_low"]
        trials.append(
            Trial(
                # It is compared only.
                setting=setting_of(cell),  # type: ignore[arg-type]
                kept=cell["kept"],
                error=0.0 if between is None else between / 4,
                p99=cell["p99"],
                p99_error=None if width is None else width / 4,
                opportunistic=cell["other"],
            )
        )
    return judge(SearchGoal(keep=target.keep, p99_factor=target.p99), trials)


def choose(cells: Sequence[Mapping[str, Any]], target: Target) -> tuple[Setting, bool] | None:
    """Return the setting that tune chooses from cells, and whether it meets the target.

    Of those that meet it beyond their errors, else of those that meet it, the one in which the other does the most; if
    none does, the nearest.
    """
    found = judged(cells, target)
    for some in ([one for one in found if one.safe], [one for one in found if one.meets]):
        if some:
            best = max(some, key=lambda one: one.opportunistic or 0.0)
            return best.setting, True  # type: ignore[return-value]
    nearest = max(found, key=lambda one: one.margin, default=None)
    return None if nearest is None else (nearest.setting, False)  # type: ignore[return-value]
