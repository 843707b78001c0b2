"""What `benchmarks.colocation` measures, in order: pairs, their targets, goals, and the settings that are tried. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpushare.measure import search
from gpushare.measure.search import Trial
from gpushare.measure.slices import SliceSearch, next_slices
from gpushare.run.results import CAPS as CAPS_WAY
from gpushare.run.results import SLICES


@dataclass(frozen=True)
class Target:
    """What production must keep: a share of its rate alone, and a p99 within a factor of that alone."""

    keep: float = 0.97
    p99: float | None = None

    @property
    def goal(self) -> search.Goal:
        """Return it as tune has it."""
        return search.Goal(keep=self.keep, p99_factor=self.p99)

    @property
    def title(self) -> str:
        """Return it as in the table: the most that p99 may grow, and the least rate."""
        return f"{self.keep:.2f}" if self.p99 is None else f"{self.p99:.2f}x {self.keep:.2f}"


@dataclass(frozen=True)
class Goal:
    """What a row is to reach: production as the target says, and the other's share of its rate alone."""

    target: Target
    other: float
    # Slices only: the row asks what time-slicing can do.
    slices_only: bool = False


# Production with gaps is judged by its p99, without gaps by its rate.
LATENCY: Final = ("bert-graph", "bert-eager", "infer", "enc1", "enc5")
# Their requests arrive at random, at the same moments in each window of one length.
POISSON: Final = ("bert-graph", "bert-eager")
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

    @property
    def short(self) -> str:
        """Return it as in a column of settings."""
        if self.way == "timeslice":
            return "as it is"
        if self.way in {"slices", "group"}:
            words = f"{self.production_us or 'default'}:{self.other_us or 'default'}"
            return words if self.way == "slices" else f"group {words}"
        if self.threads >= 100:
            return "MPS low" if self.low else "MPS"
        return f"cap {self.threads:g}"


WAYS: Final = ("timeslice", "slices", "mps", "caps", "group")
AS_IT_IS: Final = Setting("timeslice")
MPS: Final = Setting("mps")
LOW: Final = Setting("mps", low=True)
# Production's slice is longer than its request; microseconds.
LONG_US: Final = 16000
CAPS: Final = (80.0, 65.0, 50.0, 35.0, 25.0, 12.0)
# The slice of a compute group on an H100 and an H200 (driver 580).
DEFAULT_US: Final = 2048
# What is measured besides what tune asks for, to see whether it misses anything: production's slice and the other's, from
# what gives the other most. None: production keeps its own.
_GAPS: Final = ((LONG_US, 500), (LONG_US, 200), (LONG_US, 50), (None, 50))
_FULL: Final = ((4000, DEFAULT_US), (LONG_US, 4000), (LONG_US, 1000))


def slices(production: str) -> list[Setting]:
    """Return slices to try next to a production job, whatever tune asks for."""
    pairs: Sequence[tuple[int | None, int]] = _GAPS if production in LATENCY else _FULL
    return [Setting("slices", production_us=ours, other_us=other) for ours, other in pairs]


def caps() -> list[Setting]:
    """Return the caps to try, from the largest; there is a process of the other job for each."""
    return [Setting("caps", threads=cap, low=True) for cap in CAPS]


def two_settings() -> list[Setting]:
    """Return what is tried with two others: each with a slice, and both in one MPS daemon with one slice."""
    each = [Setting("slices", production_us=LONG_US, other_us=us) for us in (1000, 500)]
    return [*each, *(Setting("group", production_us=LONG_US, other_us=us) for us in (None, 1000, 500, 200, 100))]


# Slices of two jobs that always work: 3:1 in the numbers, what may give 75:25, and two for comparison.
WEIGHTS: Final = ((6144, 2048), (6144, 2560), (6144, 2816), (6144, 3072), (12288, 4096), (4096, 2048), (2048, 2048))


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
        cells = {"pair": 15.0 if self.short else 24.0, "two": 13.0, "weights": 9.0}[self.kind]
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
        picks = [choose(seen_by_tune(cells, ways), target) for target in wanted]
        found += [pick[0] for pick in picks if pick is not None]
    return list(dict.fromkeys(found))


def setting_of(cell: Mapping[str, Any]) -> Setting:
    """Return the setting of a measured cell."""
    return Setting(**cell["setting"])


def seen_by_tune(cells: Sequence[Mapping[str, Any]], ways: Sequence[str] = WAYS) -> list[Mapping[str, Any]]:
    """Return the cells of some ways that tune's search asked for; MPS without a cap is measured before it asks."""
    return [
        cell for cell in cells if cell["setting"]["way"] in ways and (cell["tune"] or cell["setting"]["way"] == "mps")
    ]


def tuned(setting: Setting) -> search.Setting:
    """Return a setting as tune has it. Slices of a group are those of one other job."""
    if setting.way in {"mps", "caps"}:
        return search.Setting(threads=setting.threads, low=setting.low)
    return search.sliced(setting.production_us, setting.other_us or DEFAULT_US)


def setting_from(wanted: search.Setting) -> Setting:
    """Return what tune asks for as a setting."""
    if wanted.way == SLICES:
        as_it_is = wanted.production_slice_us is None and wanted.other_slice_us == DEFAULT_US
        own = Setting("slices", production_us=wanted.production_slice_us, other_us=wanted.other_slice_us)
        return AS_IT_IS if as_it_is else own
    return Setting("mps" if wanted.threads >= 100 else "caps", threads=wanted.threads, low=wanted.low)


def trials(cells: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Return cells as trials of tune."""
    found = []
    for cell in cells:
        width = None if cell["p99_low"] is None else cell["p99_high"] - cell["p99_low"]
        between = None if cell["kept_low"] is None else cell["kept_high"] - cell["kept_low"]
        found.append(
            Trial(
                setting=tuned(setting_of(cell)),
                kept=cell["kept"],
                # A 95 % interval is four standard errors wide.
                error=0.0 if between is None else between / 4,
                p99=cell["p99"],
                p99_error=None if width is None else width / 4,
                opportunistic=cell["other"],
            )
        )
    return found


def judged(cells: Sequence[Mapping[str, Any]], target: Target) -> list[search.Judged]:
    """Return cells by setting, as tune judges its trials."""
    return search.judge(target.goal, trials(cells))


def choose(cells: Sequence[Mapping[str, Any]], target: Target) -> tuple[Setting, bool] | None:
    """Return the setting that tune chooses from cells, and whether it meets the target; else the nearest one."""
    found = judged(cells, target)
    best = search.best_of(found)
    pick = best or max(found, key=lambda one: one.margin, default=None)
    if pick is None:
        return None
    return next(setting_of(cell) for cell in cells if tuned(setting_of(cell)) == pick.setting), best is not None


def next_of(
    way: str, cells: Sequence[Mapping[str, Any]], target: Target, most: int, *, request_us: float | None
) -> Setting | None:
    """Return what tune's search of a way asks for next, after these cells; None: it has an answer.

    As gpushare tune searches, but among the caps for which there is a process, and with fewer repetitions.
    """
    known = [trial for trial in trials(seen_by_tune(cells)) if trial.setting.way == way]
    if way == SLICES:
        asked = SliceSearch(goal=target.goal, request_us=request_us, other_alone=1.0, confirmed=1, most=most)
        wanted = next_slices(asked, known)
    else:
        start = search.Setting(threads=65.0)
        grid = (100.0, *CAPS)
        wanted = search.next_setting(
            search.Search(goal=target.goal, grid=grid, start=start, confirmed=1, most=most + 2), known
        )
    if wanted is None or (wanted.way == CAPS_WAY and wanted.threads < 100 and not wanted.low):
        # There is no process with a cap and normal priority.
        return None
    return setting_from(wanted)
