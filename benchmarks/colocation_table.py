"""The table of `benchmarks.colocation` and the goals that it is measured by, as a section of docs/measurements.md. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.colocation_rows import (
    AS_IT_IS,
    GOALS,
    LOW,
    MPS,
    POISSON,
    WAYS,
    Goal,
    Setting,
    Target,
    choose,
    seen_by_tune,
    setting_of,
    targets,
)
from gpushare.base.units import counted
from gpushare.timeslice.rules import Rule

HEADING: Final = "## A production job next to another job, under every way"
_BEFORE: Final = "## Start-up time"
# The other job may get this much less than under the best way.
_CLOSE: Final = 0.03
# So many rows that miss it are named.
_NAMED: Final = 4
# Parts of a window with a rate each.
_PARTS: Final = 4
_SHARE, _SHARE_WITHIN, _SUM = 0.75, 0.03, 0.95
_PAUSE_MS, _PAUSE_MOST_MS, _VERB_SECONDS = 1.2, 2.0, 0.5

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A mean, and how far it scatters: half of the range over starts, or half of the 95 % interval of a single one."""

    value: float
    half: float | None

    def words(self, unit: str = "") -> str:
        """Return it as in the table."""
        scatter = "" if self.half is None else f"±{self.half:.2f}"
        return f"{self.value:.2f}{scatter}{unit}"

    def plain(self, unit: str = "") -> str:
        """Return it without its scatter."""
        return f"{self.value:.0f}{unit}" if self.value >= 100 else f"{self.value:.2f}{unit}"


@dataclass(frozen=True)
class Found:
    """A setting as it was measured, once or several times."""

    setting: Setting
    kept: Figure
    p99: Figure | None
    other: Figure
    cells: tuple[Mapping[str, Any], ...]

    @property
    def words(self) -> str:
        """Return production's p99, its rate, and the other's rate."""
        tail = "-" if self.p99 is None else self.p99.words("x")
        return f"{tail} {self.kept.words()} {self.other.words()}"

    @property
    def plain(self) -> str:
        """Return the same without the scatter."""
        tail = "-" if self.p99 is None else self.p99.plain("x")
        return f"{tail} {self.kept.plain()} {self.other.plain()}"

    def meets(self, target: Target) -> bool:
        """Return whether production keeps what it is to keep."""
        tail = target.p99 is None or (self.p99 is not None and self.p99.value <= target.p99 + 0.005)
        return tail and self.kept.value >= target.keep - 0.005


def _figure(cells: Rows, name: str) -> Figure | None:
    values = [float(cell[name]) for cell in cells if cell.get(name) is not None]
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) > 1:
        return Figure(mean, (max(values) - min(values)) / 2)
    low, high = (next(cell[f"{name}_{end}"] for cell in cells if cell.get(name) is not None) for end in ("low", "high"))
    return Figure(mean, None if low is None or high is None else (high - low) / 2)


def found_of(setting: Setting, cells: Rows) -> Found | None:
    """Return what was measured of a setting; None: nothing."""
    own = tuple(cell for cell in cells if setting_of(cell) == setting)
    kept, other = _figure(own, "kept"), _figure(own, "other")
    if kept is None or other is None:
        return None
    return Found(setting, kept, _figure(own, "p99"), other, own)


@dataclass(frozen=True)
class Pair:
    """All starts of a pair."""

    rows: tuple[Mapping[str, Any], ...]

    @property
    def first(self) -> Mapping[str, Any]:
        """Return the start with all settings."""
        return self.rows[0]

    @property
    def others(self) -> int:
        return 2 if self.first["kind"] == "two" else 1

    @property
    def title(self) -> str:
        """Return it as in the table."""
        return f"{self.first['production']} + {'2 x ' if self.others > 1 else ''}{self.first['other']}"

    @property
    def targets(self) -> list[Target]:
        """Return what production is to keep."""
        return targets(self.first["production"], self.first["other"], self.others)

    def cells(self) -> list[Mapping[str, Any]]:
        """Return all cells of all starts, with those that measured a choice again."""
        found = [cell for row in self.rows for cell in row["cells"]]
        return found + [one["cell"] for row in self.rows for one in row["choices"]]

    def measured(self, setting: Setting) -> Found | None:
        """Return all that was measured of a setting."""
        return found_of(setting, self.cells())

    def best(self, ways: Sequence[str], target: Target) -> Found | None:
        """Return what the rule of tune chooses of some ways, from the first start; with all measurements of it."""
        pick = choose(seen_by_tune(self.first["cells"], ways), target)
        return None if pick is None else self.measured(pick[0])

    def choice(self, target: Target) -> Found | None:
        """Return tune's choice, as it was measured after it was chosen."""
        pick = choose(seen_by_tune(self.first["cells"]), target)
        if pick is None:
            return None
        chosen = [one["cell"] for row in self.rows for one in row["choices"]]
        later = [*chosen, *(cell for row in self.rows[1:] for cell in row["cells"])]
        return found_of(pick[0], later) or self.measured(pick[0])


def corrected(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row as it is compared.

    Arrivals at random are the same in each window of one length, so production's rate is relative to the first window alone;
    the second one is shorter. Rows of the first day have other figures, and no rate where the other job did nothing.
    """
    if row["kind"] not in {"pair", "two"}:
        return row

    def cell(one: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {**one, "other": one["other"] or 0.0}
        if row["production"] in POISSON:
            rates = row["alone"][_place(setting_of(one))]["rates"][:_PARTS]
            found |= {"kept": one["rate"] * len(rates) / sum(rates), "kept_low": None, "kept_high": None}
        return found

    choices = [{**one, "cell": cell(one["cell"])} for one in row["choices"]]
    return {**row, "cells": [cell(one) for one in row["cells"]], "choices": choices}


def pairs_of(rows: Rows) -> list[Pair]:
    """Return the pairs with all settings measured, each with its later starts; in the order of the goals, then by name."""
    found: dict[tuple[str, str, str], dict[int, Mapping[str, Any]]] = {}
    for row in map(corrected, rows):
        if row["kind"] in {"pair", "two"}:
            found.setdefault((row["kind"], row["production"], row["other"]), {})[row["start"]] = row
    order = list(GOALS)

    def place(one: Pair) -> tuple[int, str, str]:
        key = (one.first["production"], one.first["other"], one.others)
        return (order.index(key) if key in order else len(order), key[1], key[0])

    pairs = [Pair(tuple(starts[number] for number in sorted(starts))) for starts in found.values() if 1 in starts]
    return sorted(pairs, key=place)


# -- goals -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One line of the table of goals; ``met`` None: not measured."""

    goal: str
    measured: str
    met: bool | None
    reason: str = ""

    @property
    def line(self) -> str:
        """Return it as a line of the table."""
        met = {True: "yes", False: "no", None: "not measured"}[self.met]
        return f"| {self.goal} | {self.measured or '-'} | {met} |"


def verdicts(rows: Rows) -> list[Verdict]:
    """Return each goal with what was measured."""
    pairs = pairs_of(rows)
    known = {(one.first["production"], one.first["other"], one.others): one for one in pairs}
    found = [_close(pairs)]
    for key, goals in GOALS.items():
        found += [_goal(key, goal, known.get(key)) for goal in goals]
    return [*found, *_weights(rows), *_pauses(rows)]


def _close(pairs: Sequence[Pair]) -> Verdict:
    """Judge whether tune's choice leaves the other as much as the best way that keeps the target, in every row."""
    goal = (
        f"tune's choice: the other's rate within {_CLOSE} of the best way that keeps production's target, in every row"
    )
    if not pairs:
        return Verdict(goal, "", None)
    gaps: list[tuple[float, str]] = []
    for pair in pairs:
        for target in pair.targets:
            best, pick = _best(pair, target), choose(seen_by_tune(pair.first["cells"]), target)
            choice = None if pick is None else pair.measured(pick[0])
            if choice is not None and best is not None:
                text = f"{pair.title} ({target.title}): {best.setting.short} {best.words}, tune chose"
                gaps.append((best.other.value - choice.other.value, f"{text} {choice.setting.short} {choice.words}"))
    if not gaps:
        return Verdict(goal, "no way keeps the target in any row", None)
    missed = sorted((one for one in gaps if one[0] > _CLOSE), reverse=True)
    text = f"{len(gaps) - len(missed)} of {len(gaps)} rows; the largest gap is {max(0.0, max(gaps)[0]):.2f}"
    reason = "; ".join(words for _, words in missed[:_NAMED])
    reason += f"; and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
    return Verdict(goal, text, not missed, reason)


def _best(pair: Pair, target: Target) -> Found | None:
    """Return the setting that keeps the target and gives the other most, of all that were measured, by all measurements."""
    cells = pair.cells()
    found = [found_of(setting, cells) for setting in dict.fromkeys(map(setting_of, cells))]
    meeting = [one for one in found if one is not None and one.meets(target)]
    return max(meeting, key=lambda one: one.other.value, default=None)


def _goal(key: tuple[str, str, int], goal: Goal, pair: Pair | None) -> Verdict:
    production, other, others = key
    wanted = goal.target
    tail = "" if wanted.p99 is None else f"p99 <= {wanted.p99:.2f}x, "
    name = f"{production} + {'2 x ' if others > 1 else ''}{other}"
    title = f"{name}{' outside MPS' if goal.slices_only else ''}: {tail}rate >= {wanted.keep:.2f}, other >= {goal.other:.2f}"
    if pair is None:
        return Verdict(title, "", None)
    ways = ("timeslice", "slices") if goal.slices_only else WAYS
    pick = choose(seen_by_tune(pair.first["cells"], ways), wanted)
    chosen = None if pick is None else (pair.measured(pick[0]) if goal.slices_only else pair.choice(wanted))
    if chosen is None:
        return Verdict(title, "", None)
    met = chosen.meets(wanted) and chosen.other.value >= goal.other - 0.005
    return Verdict(
        title, f"{chosen.setting.short}: {chosen.words}", met, "" if met else _reason(pair, goal, chosen, ways)
    )


def _reason(pair: Pair, goal: Goal, chosen: Found, ways: Sequence[str]) -> str:
    """Return why a goal is missed, in measured numbers."""
    words = []
    settings = dict.fromkeys(setting_of(cell) for cell in pair.cells() if cell["setting"]["way"] in ways)
    all_found = [one for one in (pair.measured(setting) for setting in settings) if one is not None]
    if not chosen.meets(goal.target):
        words.append("no way keeps production's target; this one is nearest")
    generous = [one for one in all_found if one.other.value >= goal.other - 0.005 and one.setting != chosen.setting]
    best = min(generous, key=lambda one: _missed(one, goal.target), default=None)
    if best is not None:
        words.append(f"of those that give the other its share, {best.setting.short} is nearest: {best.words}")
    before, now = _milliseconds(pair, chosen)
    if before is not None and now is not None:
        words.append(
            f"a request takes {before[0]:.2f} ms alone and {now[0]:.2f} here, at p99 {before[1]:.2f} and {now[1]:.2f}"
        )
    if text := _clock(pair, chosen):
        words.append(text)
    return "; ".join(words)


def _missed(one: Found, target: Target) -> float:
    tail = 0.0 if target.p99 is None or one.p99 is None else one.p99.value / target.p99
    return max(tail, target.keep / max(one.kept.value, 1e-9))


def _place(setting: Setting) -> str:
    return "inside" if setting.way in {"mps", "caps"} else "outside"


def _milliseconds(pair: Pair, chosen: Found) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    if chosen.p99 is None or not chosen.cells:
        return None, None
    alone, cell = pair.first["alone"][_place(chosen.setting)], chosen.cells[0]
    pairs = [(one["p50_ms"], one["p99_ms"]) for one in (alone, cell)]
    before, now = (None if one[0] is None or one[1] is None else (float(one[0]), float(one[1])) for one in pairs)
    return before, now


def _clock(pair: Pair, chosen: Found) -> str:
    alone, cell = pair.first["alone"][_place(chosen.setting)], chosen.cells[0]
    if not alone.get("mhz") or not cell.get("mhz") or cell["mhz"] >= 0.97 * alone["mhz"]:
        return ""
    return f"the clock falls from {alone['mhz']} MHz alone to {cell['mhz']} at {cell['watts']} W"


def _weights(rows: Rows) -> list[Verdict]:
    goal = "weights 3:1 between two jobs that always work: 75:25 within 3 points, in sum >= 0.95"
    runs = [row for row in rows if row["kind"] == "weights"]
    if not runs:
        return [Verdict(goal, "", None)]
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in runs:
        for cell in row["cells"]:
            found.setdefault(tuple(cell["slices"]), []).append(cell)
    own = tuple(Rule(weight=weight).microseconds for weight in (3, 1))
    if own not in found:
        return [Verdict(goal, "", None)]
    lines = {slices: _weight(slices, cells) for slices, cells in found.items()}
    words, share, total = lines[own]
    met = abs(share - _SHARE) <= _SHARE_WITHIN + 0.0005 and total >= _SUM - 0.005
    best = min(lines.values(), key=lambda line: abs(line[1] - _SHARE))
    return [Verdict(goal, words, met, "" if met else f"nearest of the tried ones: {best[0]}")]


def _weight(slices: tuple[int, int], cells: Rows) -> tuple[str, float, float]:
    shares = [cell["shares"][0] / max(cell["sum"], 1e-9) for cell in cells]
    share, total = sum(shares) / len(shares), sum(cell["sum"] for cell in cells) / len(cells)
    spread = f" ±{100 * (max(shares) - min(shares)) / 2:.1f}" if len(shares) > 1 else ""
    words = (
        f"slices {slices[0]}:{slices[1]} us give {100 * share:.0f}:{100 * (1 - share):.0f}{spread}, in sum {total:.2f}"
    )
    return words, share, total


def _pauses(rows: Rows) -> list[Verdict]:
    call = f"the call that pauses: median <= {_PAUSE_MS} ms, 99.9 % <= {_PAUSE_MOST_MS} ms, of 10,000; nothing lost"
    verb = f"the verb `pause` end to end: <= {_VERB_SECONDS} s"
    runs = [row for row in rows if row["kind"] == "pause" and row["off"]]
    if not runs:
        return [Verdict(call, "", None), Verdict(verb, "", None)]
    row = runs[-1]
    off, on, driver = row["off"], row["on"], row["off_in_driver"]
    text = f"{row['count']} pauses: median {off['median']:.2f} ms, 99.9 % {off['p99.9']:.1f}, resume {on['median']:.2f}"
    if row["rate_after"] < _SUM:
        text += f"; then {row['rate_after']:.2f} of its rate"
    met = off["median"] <= _PAUSE_MS and off["p99.9"] <= _PAUSE_MOST_MS and row["count"] >= 10_000
    met = met and row["rate_after"] >= _SUM
    reason = "" if met else f"in the driver: median {driver['median']:.2f} ms, 99.9 % {driver['p99.9']:.2f} ms"
    found = [Verdict(call, text, met, reason)]
    verbs = [one["seconds"] for one in row["verbs"] if one["verb"] == "pause" and one["rc"] == 0]
    if not verbs:
        return [*found, Verdict(verb, "", None)]
    longest = max(verbs)
    return [*found, Verdict(verb, f"{min(verbs):.2f}-{longest:.2f} s, {len(verbs)} times", longest <= _VERB_SECONDS)]


# -- the section -------------------------------------------------------------------------------------------------------


def section(rows: Rows) -> str:
    """Return the section of the document."""
    measured = [row for row in rows if row["kind"] in {"pair", "two", "weights", "pause"}]
    if not measured:
        return f"{HEADING}\n\nNot measured yet.\n"
    return "\n".join(
        [
            HEADING,
            "",
            *_intro(measured),
            "",
            *_goal_lines(rows),
            "",
            *_table(pairs_of(rows)),
            "",
            *_alone_table(rows),
            "",
        ]
    )


def _intro(rows: Rows) -> list[str]:
    dates = sorted(row["taken"] for row in rows)
    gpus = " and ".join(sorted({row["gpu_name"] for row in rows}))
    drivers = ", ".join(sorted({str(row["driver"]) for row in rows}))
    windows = " or ".join(f"{one:g}" for one in sorted({row["window"] for row in rows}))
    starts = max(row["start"] for row in rows)
    cards = len({row["gpu"] for row in rows})
    scatter = "half of the 95 % interval within the window"
    if starts > 1:
        scatter = f"half of the range over up to {starts} starts (all processes new), or {scatter} where there was one"
    text = (
        (
            f"{dates[0][:16]} to {dates[-1][11:16]} UTC, {gpus} ({counted(cards, 'card')}, two or three of a virtual machine at a"
            f" time), driver {drivers}, as root, by `python -m benchmarks.colocation`. No setting of a GPU was changed, and there"
            " was no Xid. All data is in `benchmarks/results/colocation-*.jsonl`."
        ),
        "",
        (
            "Three figures are production's p99, production's rate and the other job's rate, each relative to alone: the first two"
            " are to stay at 1, the last is what sharing gains. How they were measured:"
        ),
        "",
        (
            "- Production: bert-graph and bert-eager are a BERT-base-like encoder with batch 1, as a CUDA graph and eager; their"
            " requests arrive at random (Poisson) at half of what the job can serve, and the latency counts from the arrival."
            " Requests of infer (every 10 ms), enc1 (1 ms every 25 ms) and enc5 (5.6 ms, half load) come by the clock. decode (a"
            " step of an LLM), mid and membw work without gaps. The others always work. Random weights, PyTorch only;"
            " `benchmarks/colocation_programs.py` has the programs."
        ),
        (
            "- All processes of a pair are started once and held. A cell releases production and the other job for a window of"
            f" {windows} s (0.7 of it for pairs without a goal, 1.2 to 1.4 of it where requests are rare). Slices are set while"
            " both live. Under MPS there is one process of the other job per cap. Alone is the same process in the same minutes,"
            " for MPS and caps a client of MPS."
        ),
        f"- ±: {scatter}.",
        (
            "- bert-eager, infer and mid are bound by the CPU, and the CPU of these virtual machines is slow for a second or two"
            " now and then (see the ranges of the last table). A p99 far below 1 means that it was slow while production was"
            " alone. A p99 of 140 to 300 requests is the second or third longest."
        ),
        (
            "- Settings: `16000:100` are the slices of production and of the other in microseconds; `cap 80` is MPS with 80 % of"
            " the SMs and low priority for the other; `group 16000:200` has two others in one MPS daemon with one slice, and"
            " production outside."
        ),
        (
            "- Tune's choice: the search of `gpushare tune` (`gpushare/measure`) decided which slices and caps were measured, with"
            " fewer repetitions than the verb makes and no cap on production, and its rule chose among them. The choice was then"
            " measured again; its figures are of those later measurements, or those of the search where the rule has changed"
            " since. In bold it keeps what production is to keep. Further settings that the search did not ask for were measured to see whether it missed a better one."
        ),
    )
    return [line for part in text for line in (_wrapped([part]) or [""])]


def _goal_lines(rows: Rows) -> list[str]:
    found = verdicts(rows)
    met = sum(one.met is True for one in found)
    reasons = [f"- {one.goal.partition(':')[0]}: {one.reason}." for one in found if one.reason]
    return [
        f"{met} of {len(found)} goals are met:",
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        *(one.line for one in found),
        *(["", "What the missed goals come from:", "", *_wrapped(reasons)] if reasons else []),
    ]


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False
        )
    ]


_Find = Callable[[Pair, Target], Found | None]
_PLAIN: Final[tuple[tuple[str, _Find], ...]] = (
    ("as it is", lambda pair, _: pair.measured(AS_IT_IS)),
    ("MPS", lambda pair, _: pair.measured(MPS)),
    ("MPS low", lambda pair, _: pair.measured(LOW)),
)
_CHOSEN: Final[tuple[tuple[str, _Find], ...]] = (
    ("caps by tune", lambda pair, target: pair.best(("mps", "caps"), target)),
    ("slices by tune", lambda pair, target: pair.best(("timeslice", "slices", "group"), target)),
    ("tune's choice", lambda pair, target: pair.choice(target)),
)


def _table(pairs: Sequence[Pair]) -> list[str]:
    """Return two tables: all ways without the scatter, and what tune finds with it."""
    plain = [title for title, _ in _PLAIN]
    lines = [
        f"| production + other | to keep | {' | '.join(plain)} | tune's choice |",
        "|" + "---|" * (len(plain) + 3),
    ]
    chosen = ["| production + other | " + " | ".join(title for title, _ in _CHOSEN) + " |", "|---|---|---|---|"]
    for pair in pairs:
        for target in pair.targets:
            found = [find(pair, target) for _, find in _PLAIN]
            cells = ["-" if one is None else one.plain for one in found]
            choice = pair.choice(target)
            lines.append(f"| {pair.title} | {target.title} | {' | '.join(cells)} | {_choice(choice, target)} |")
            name = f"{pair.title}, {target.title}" if len(pair.targets) > 1 else pair.title
            three = [find(pair, target) for _, find in _CHOSEN]
            words = ["-" if one is None else f"{one.setting.short}: {one.words}" for one in three]
            chosen.append(f"| {name} | {' | '.join(words)} |")
    for name, figures in (("Tally [1], A100", "1.05x 1.00 0.44"), ("TGS [2], A100", "2.80x 0.95 0.79")):
        lines.append(f"| <sub>{name}</sub> | | | | | <sub>published: {figures}</sub> |")
    return [*lines, "", *_wrapped([_PUBLISHED]), "", "The same with the scatter:", "", *chosen]


_PUBLISHED: Final = (
    "<sub>[1] Zhao et al., Tally: Non-Intrusive Performance Isolation for Concurrent Deep Learning Workloads, ASPLOS 2025."
    " [2] Wu et al., Transparent GPU Sharing in Container Clouds for Deep Learning Workloads, NSDI 2023; as"
    " re-implemented and measured by the authors of [1]. Both figures are means over the 12 pairs of the data that"
    " they publish with Tally, computed here: other programs, another GPU, so only the order of magnitude compares.</sub>"
)


def _choice(found: Found | None, target: Target) -> str:
    if found is None:
        return "-"
    bold = "**" if found.meets(target) else ""
    return f"{found.setting.short}: {bold}{found.plain}{bold}"


def _alone_table(rows: Rows) -> list[str]:
    places = ("outside", "inside")
    alone: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    others: dict[tuple[str, str], list[float]] = {}
    for pair in pairs_of(rows):
        for row in pair.rows:
            for place in places:
                alone.setdefault((row["production"], place), []).append(row["alone"][place])
                rates = row["other_alone"][place]
                others.setdefault((row["other"], place), []).append(sum(rates) / len(rates))
    lines = ["| alone | per second, under MPS | p50, under MPS | p99, under MPS |", "|---|---|---|---|"]
    for name in sorted({name for name, _ in alone}):
        cells = []
        for key, form in (("rate", "{:.0f}"), ("p50_ms", "{:.2f}"), ("p99_ms", "{:.2f}")):
            both = (
                _between([one[key] for one in alone[name, place] if one[key] is not None], form) for place in places
            )
            cells.append(", ".join(both) + (" ms" if key != "rate" else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name in sorted({name for name, _ in others}):
        both = (_between(others[name, place], "{:.1f}") for place in places)
        lines.append(f"| {name}, the other | {', '.join(both)} | - | - |")
    return lines


def _between(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"


def render(rows: Rows, path: Path) -> None:
    """Write the section into the document, over an earlier one."""
    text = path.read_text()
    start = text.find(HEADING)
    if start >= 0:
        end = text.find("\n## ", start + 1)
        before, after = text[:start], text[end + 1 :] if end >= 0 else ""
    else:
        start = text.find(_BEFORE)
        before, after = (text[:start], text[start:]) if start >= 0 else (text + "\n", "")
    path.write_text(before + section(rows) + ("\n" if after else "") + after)
