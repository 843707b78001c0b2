"""``gpushare advise --measure``: the rules' answer, the measurement of what they do not refuse, and the final answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpushare.cli.common import gpus_of, settings
from gpushare.errors import BadUsage, GpushareError, Interrupted, NotSupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpushare.advice.advise import Advice
    from gpushare.advice.measured import MeasuredAdvice
    from gpushare.advice.situation import Situation
    from gpushare.host.host import Host
    from gpushare.measure.bench import Measurement
    from gpushare.measure.metric import Metric
    from gpushare.measure.session import Prepared
    from gpushare.selection import Device

_MOST_REPEATS = 100
# Who does not say how many asks how to share, and two are the fewest who do.
_FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be measured, and how; see `bench.Settings`."""

    argv: Sequence[str]
    metric: Metric
    copies: int | None
    repeat: int
    window: float | None
    limit: float | None


def wanted_of(argv: Sequence[str], asked: Mapping[str, Any]) -> Wanted:
    """Return what the options of ``--measure`` say.

    Raises:
        BadUsage: there is no command, or a value is none.
    """
    from gpushare.cli.limits import positive
    from gpushare.measure.metric import parse_metric
    from gpushare.measure.ways import parse_copies

    copies, repeat, window, timeout = (asked[name] for name in ("--copies", "--repeat", "--for", "--timeout"))
    repeat = 3 if repeat is None else repeat
    if not argv:
        raise BadUsage(
            "--measure needs a program to run", "give it last: gpushare advise --measure -- CMD", code="no_command"
        )
    if copies is not None and parse_copies(str(copies))[0] < _FEWEST:
        raise BadUsage(f"--copies {copies}: one copy shares with nobody", "give --copies 2 or more", code="bad_copies")
    if not 1 <= repeat <= _MOST_REPEATS:
        raise BadUsage(f"--repeat {repeat} is outside 1 to {_MOST_REPEATS}", "give --repeat 3", code="bad_repeat")
    if window is not None and asked["--metric"] is None:
        raise BadUsage(
            "--for ends the command before it finishes: finished runs cannot be counted then",
            "say what it prints: --metric 'rate=([0-9.]+)'; or leave --for away",
            code="bad_combination",
        )
    return Wanted(
        argv=argv,
        metric=parse_metric(asked["--metric"], higher_is_better=not asked["--lower-is-better"]),
        copies=copies,
        repeat=repeat,
        window=None if window is None else positive("--for", window, "3s"),
        limit=None if timeout is None else positive("--timeout", timeout, "10m"),
    )


def measured_answer(host: Host, situation: Situation, wanted: Wanted, *, live: bool, apply: bool) -> Any:
    """Ask the rules, measure what they leave, and return the final answer as a result.

    Raises:
        NotSupported: the case is a production job beside another one.
        GpushareError: the command is not there, or already one copy alone failed.
    """
    from gpushare.advice.advise import advise
    from gpushare.advice.measured import measured, unmeasured

    if situation.pair:
        raise NotSupported(
            "copies of one program do not show how production does beside another job",
            "measure the two: gpushare tune --production 'CMD' --opportunistic 'CMD'",
            code="pair_not_measured",
        )
    situation, copies = _counted(situation, wanted.copies)
    advice = advise(situation)
    notes = _first_notes(situation, wanted, copies, live=live)
    why = _why_not(advice)
    if why is not None:
        return _answered(unmeasured(advice, why, copies), None, notes, apply=apply)
    from gpushare.selection import select_one

    device = select_one(str(situation.gpu.index), gpus_of(host))
    try:
        prepared = _prepared(host, device, advice, wanted, copies)
        if settings.dry_run:
            return _planned(prepared, advice)
        from gpushare.cli.bench_run import carried_out

        data, measurement, number = carried_out(host, device, prepared)
    except NotSupported as error:
        # The rules know an answer all the same.
        found = unmeasured(advice, f"nothing could be measured: {error.message}", copies)
        return _answered(found, None, notes, apply=False, error=error)
    early = _ended_early(measurement)
    return _answered(
        measured(advice, data, copies),
        data,
        notes,
        apply=apply and early is None,
        error=early,
        exit_code=128 + number if number is not None else None,
    )


def _counted(situation: Situation, copies: int | None) -> tuple[Situation, int]:
    """Return how many copies are measured; who only said that has said how many processes there are."""
    case = situation.case
    if case.processes is not None:
        return situation, copies or case.processes
    copies = copies or _FEWEST
    ones = tuple(replace(one, processes=copies) for one in case.workloads)
    return replace(situation, case=replace(case, workloads=ones)), copies


def _first_notes(situation: Situation, wanted: Wanted, copies: int, *, live: bool) -> list[str]:
    from gpushare.cli.advise import RUNS_ON

    notes = [RUNS_ON] if live else []
    if copies != situation.case.processes:
        notes.append(f"measured with {copies} copies, and the case has {situation.case.processes} processes")
    elif wanted.copies is None and copies == _FEWEST and len(situation.case.workloads) == 1:
        notes.append(f"{copies} processes are meant; for another number: --processes N")
    if len(situation.case.workloads) > 1:
        notes.append("copies of one program were measured, and the case has several programs")
    return notes


def _why_not(advice: Advice) -> str | None:
    """Return why there is nothing to measure, or None."""
    from gpushare.advice.measured import bench_ways
    from gpushare.advice.measured_cells import BENCH_WAYS

    if advice.best is None:
        return "nothing fits, so there is nothing to measure"
    if not advice.situation.several:
        return "one process shares with nobody, so there is nothing to measure"
    names = set(bench_ways(advice))
    left = [way for way, own in BENCH_WAYS.items() if names & set(own)]
    if len(left) < _FEWEST:
        only = left[0].label if left else "none of those that gpushare bench measures"
        return f"the rules leave nothing to compare ({only})"
    return None


def _prepared(host: Host, device: Device, advice: Advice, wanted: Wanted, copies: int) -> Prepared:
    from gpushare.advice.measured import bench_ways
    from gpushare.measure.session import Request, prepare
    from gpushare.measure.ways import parse_ways

    request = Request(
        argv=wanted.argv,
        metric=wanted.metric,
        ways=parse_ways(",".join(bench_ways(advice))),
        copies=(copies,),
        repeat=wanted.repeat,
        window=wanted.window,
        limit=wanted.limit,
    )
    return prepare(host, device, request)


def _planned(prepared: Prepared, advice: Advice) -> Any:
    from gpushare.cli.bench_run import planned

    plan = planned(prepared, "advise")
    said = "nothing fits" if advice.best is None else advice.best.way.label
    return replace(plan, notes=(f"the rules say: {said}", *plan.notes))


def _ended_early(measurement: Measurement) -> GpushareError | None:
    if measurement.interrupted:
        kept = (
            f"{len(measurement.runs)} runs are kept and answered from" if measurement.runs else "nothing was measured"
        )
        return Interrupted(f"interrupted; {kept}", "the copies were ended, the host is as before")
    return measurement.error


def _answered(
    found: MeasuredAdvice,
    bench: dict[str, Any] | None,
    notes: Sequence[str],
    *,
    apply: bool,
    error: GpushareError | None = None,
    exit_code: int | None = None,
) -> Any:
    from gpushare.cli.advise_data import measured_data
    from gpushare.cli.bench_run import bench_notes
    from gpushare.show.advise import answer_table, reasons_table, verdicts_table
    from gpushare.show.bench import bench_result
    from gpushare.show.result import Result

    data = measured_data(found, bench)
    said = [*notes, *data["notes"], *([] if bench is None else bench_notes(bench))]
    if apply:
        from gpushare.cli.advise_apply import applied

        return applied(found.final, [f"measured: {found.sentence}", *said])
    tables = [answer_table(data, whole=settings.verbose)]
    if bench is not None and bench["cells"]:
        # The mark of the table is that of the final answer.
        chosen = None if found.chosen is None else found.chosen.name
        # At two copies a cap of 200/n is none: it was measured, and is shown, as that way.
        same = [cell["same_as"] for cell in bench["cells"] if cell["way"] == chosen and cell["copies"] == found.copies]
        chosen = next((one["way"] for one in same if one is not None and one["copies"] == found.copies), chosen)
        cells = [{**cell, "chosen": cell["way"] == chosen} for cell in bench["cells"]]
        tables += bench_result({**bench, "cells": cells}).tables
    tables.append(verdicts := verdicts_table(data))
    if settings.verbose:
        tables.append(reasons_table(data["verdicts"], "every rule"))
    more: dict[str, Any] = {}
    if error is not None:
        more = {"errors": (error,), "exit_code": error.exit_code if exit_code is None else exit_code}
    return Result(command="advise", data=data, tables=tuple(tables), csv=verdicts, notes=tuple(said), **more)
