"""Advice as the data of its JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpushare.advice.advise import Advice
    from gpushare.advice.engine import Verdict
    from gpushare.advice.measured import MeasuredAdvice
    from gpushare.advice.recipe import Line
    from gpushare.advice.situation import Budget


def advice_data(advice: Advice) -> dict[str, Any]:
    """Return all of an advice: winner, verdicts with reasons and sources, commands, undo, what would change it."""
    from gpushare.advice.rules import Kind
    from gpushare.advice.situation import instances_sentence

    gpu, best, recipe = advice.situation.gpu, advice.best, advice.recipe
    inside = None if best is None else instances_sentence(advice.situation, best.way)
    why = [] if best is None else [one.text for one in best.of(Kind.FOR)]
    conditions = [] if best is None else [one.text for one in best.of(Kind.CONDITION)]
    return {
        "winner": None if best is None else best.way.value,
        "answer": "nothing fits" if best is None else best.way.label,
        "gpu": gpu.index,
        "gpu_title": f"GPU {gpu.index}" + ("" if gpu.name is None else f", {gpu.name}"),
        "why": _why_nothing(advice)
        if best is None
        else [
            *(why or [_why_left(advice, best)]),
            *(f"condition: {text}" for text in conditions),
        ],
        "confidence": advice.confidence.value,
        "confidence_why": advice.confidence_why,
        "conditions": conditions,
        "not_protected": list(advice.gaps),
        "memory": {
            **memory_data(advice.budget, advice.limits_bytes),
            **({} if inside is None else {"sentence": inside}),
        },
        "commands": [] if recipe is None else [line_data(line) for line in recipe.lines],
        "undo": [] if recipe is None else [line_data(line) for line in recipe.undo],
        "measure": [] if recipe is None else list(recipe.measure),
        "changes": [
            {
                "question": one.field,
                "if": one.text,
                "then": None if one.way is None else one.way.value,
                "then_title": "nothing fits" if one.way is None else one.way.label,
                "open": one.open,
            }
            for one in advice.changes
        ],
        "verdicts": [verdict_data(one) for one in advice.verdicts],
        "case": {
            "root": advice.situation.case.root,
            "workloads": [workload_data(one) for one in advice.situation.case.workloads],
        },
        "notes": list(advice.notes),
    }


def measured_data(found: MeasuredAdvice, bench: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the final answer as `advice_data`, with the rules' answer, the effect of the measurement, and its document."""
    from gpushare.advice.rules import Kind

    data, rules = advice_data(found.final), advice_data(found.rules)
    best = found.final.best
    if best is not None and best.way.value != rules["winner"]:
        # Why it won is what was measured; the rules have their own reasons for it, or none.
        data["why"] = [
            *(one.text for one in best.of(Kind.FOR)),
            *(f"condition: {text}" for text in data["conditions"]),
        ]
    chosen, against = found.chosen, found.against
    data["measured"] = {
        "effect": found.effect.value,
        "sentence": found.sentence,
        "copies": found.copies,
        "way": None if chosen is None else chosen.name,
        "threads_percent": None if chosen is None else chosen.cap,
        "against": None if against is None else against.name,
        "ratio": None if found.ratio is None else float(f"{found.ratio:.6g}"),
        "certain": found.certain,
    }
    data["rules"] = {key: value for key, value in rules.items() if key not in {"verdicts", "case", "notes"}}
    data["measurement"] = None if bench is None else dict(bench)
    return data


def _why_left(advice: Advice, best: Verdict) -> str:
    """Return why a way wins for which no rule speaks."""
    from gpushare.advice.engine import Outcome
    from gpushare.advice.ways import CONCURRENT, Way

    ways = [one for one in CONCURRENT if one is not Way.VGPU]
    if all(one is best.way or advice.of(one).outcome is Outcome.REFUSED for one in ways):
        return (
            "every other way of sharing is ruled out" if best.way in CONCURRENT else "every way of sharing is ruled out"
        )
    return "no answer favours another way, and this one needs the least"


def _why_nothing(advice: Advice) -> list[str]:
    """Return why not even the whole GPU is left."""
    from gpushare.advice.rules import Kind
    from gpushare.advice.ways import Way

    return [one.text for one in advice.of(Way.WHOLE).of(Kind.VETO)]


def workload_data(workload: Any) -> dict[str, Any]:
    """Return what was said of a workload; what nobody said is null."""
    return {
        name: sorted(one.value for one in value) if isinstance(value, frozenset) else value
        for name, value in vars(workload).items()
    }


def line_data(line: Line) -> dict[str, Any]:
    """Return one line of a recipe."""
    return {"what": line.what, "command": line.command}


def memory_data(found: Budget, limits: int | None) -> dict[str, Any]:
    """Return the sum of the memory, and of the limits that are set."""
    from gpushare.units import format_bytes

    sentence = found.sentence()
    if limits is not None:
        said = f"the limits add up to {format_bytes(limits)}"
        sentence = said if sentence is None else f"{sentence}; {said}"
    return {
        "total_bytes": found.total_bytes,
        "headroom_bytes": found.headroom_bytes,
        "server_bytes": found.server_bytes,
        "context_bytes": found.context_bytes,
        "wanted_bytes": found.wanted_bytes,
        "needed_bytes": found.needed_bytes,
        "left_bytes": found.left_bytes,
        "fits": found.fits,
        "most": found.most,
        "limits_bytes": limits,
        "sentence": sentence,
    }


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return one way with its outcome and all reasons."""
    return {
        "way": verdict.way.value,
        "title": verdict.way.label,
        "outcome": verdict.outcome.value,
        "reasons": [
            {
                "rule": one.rule,
                "kind": one.kind.value,
                "text": one.text,
                "source": one.source,
                "open": one.open,
                "row": one.row,
                "contradiction": one.contradiction,
            }
            for one in verdict.reasons
        ],
    }
