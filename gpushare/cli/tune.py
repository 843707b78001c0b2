"""``gpushare tune``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.cli.common import Command, gpus_of, settings
from gpushare.errors import BadUsage
from gpushare.units import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpushare.measure.controller import Search
    from gpushare.measure.tune_report import TrialReport, TuneReporter


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune", cls=Command, short_help="Find the cap of a job beside a production job.")(tune)


def tune(
    production: Annotated[
        str,
        typer.Option(
            "--production", metavar="CMD", help="The job that must keep its speed; it runs on from trial to trial."
        ),
    ],
    opportunistic: Annotated[
        str,
        typer.Option("--opportunistic", metavar="CMD", help="The job that takes what is left; started anew per trial."),
    ],
    keep: Annotated[
        str, typer.Option("--keep", metavar="PCT", help="Share of its rate alone that production keeps.")
    ] = "97%",
    p99: Annotated[
        str | None, typer.Option("--p99", metavar="FACTOR", help="Its p99 latency stays within so much of alone: 1.1x.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="REGEX", help="The rate that both print: 'rate=([0-9.]+)'. [default: lines per second]"
        ),
    ] = None,
    opportunistic_metric: Annotated[
        str | None,
        typer.Option("--opportunistic-metric", metavar="REGEX", help="The opportunistic job's, if it differs."),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option("--latency", metavar="REGEX", help="The latency of a request. [default: latency_ms=NUMBER]"),
    ] = None,
    production_caps: Annotated[
        str | None,
        typer.Option(
            "--production-caps",
            metavar="LIST",
            help="Caps on production to try too, the other gets the rest: 70,60,50; none: leave it uncapped. [default: where memory bounds it, 99 to 80; it starts anew for each]",
        ),
    ] = None,
    caps: Annotated[
        str | None,
        typer.Option(
            "--caps",
            metavar="LIST",
            help="Caps to choose from. [default: 100,95,90 and so on to 10, and between the best and the next where that gives the other job much more]",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="TIME",
            help="Length of one window of measuring. [default: 1.5s; longer for jobs that seldom print, and without --p99 down to 0.6s for those that often do]",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            metavar="N",
            min=2,
            help="Least windows together per trial. [default: 3 of 1.5 s to 8 of 0.6 s; up to 3 times as many where the figures scatter, 4 times with --p99]",
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option("--timeout", metavar="TIME", help="How long a job may take until it prints for the first time."),
    ] = "10m",
    gpu: Annotated[
        str | None, typer.Option("-g", "--gpu", metavar="GPU", help="One GPU: index, UUID, PCI bus id.")
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Keep the result for run --opportunistic --for NAME.")
    ] = "production",
) -> Any:
    """Find the largest thread cap of an opportunistic job with which a production job keeps its speed.

    Both run under MPS. A trial pauses the opportunistic job again and again, and compares production beside it with
    production alone in one process. The start is cap 60 with low priority. The opportunistic job is started and killed
    many times, the safe way: stop, drain, kill. CMD runs without a shell; for one give: sh -c '...'.

    Where a job draws the memory's bandwidth, which no cap limits, and no --p99 is asked for, settings that cost too much
    are tried for a part of the time too (a duty cycle: the opportunistic job is stopped for the rest of each half second).
    """
    from gpushare.cli.limits import positive
    from gpushare.host.tuned import check_job_name
    from gpushare.measure.metric import parse_metric
    from gpushare.measure.pair import TuneOptions
    from gpushare.selection import select_one

    check_job_name(name)
    options = TuneOptions(
        production=words_of("--production", production),
        opportunistic=words_of("--opportunistic", opportunistic),
        search=_search(keep, p99, caps, production_caps),
        metric=parse_metric(metric, latency=latency),
        opportunistic_metric=parse_metric(opportunistic_metric or metric),
        window_seconds=None if window is None else _window(window),
        rounds=rounds,
        start_seconds=positive("--timeout", timeout, "10m"),
    )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    from gpushare.measure.tune import tune as measured

    with _reporter() as reporter:
        result = measured(host, device, options, reporter)
    from gpushare.cli.tune_result import finished

    return finished(host, device, options, result, name)


def _search(keep: str, p99: str | None, caps: str | None, production_caps: str | None) -> Search:
    from gpushare.measure.controller import FINE, GRID, Search
    from gpushare.measure.trials import Goal, Setting

    grid = _percentages("--caps", caps, "80,60,40") or GRID
    return Search(
        goal=Goal(keep=_keep(keep), p99_factor=None if p99 is None else _factor(p99)),
        grid=grid,
        fine=FINE if caps is None else (),
        start=Setting(threads=min(grid, key=lambda cap: abs(cap - 60.0))),
        production_caps=_production_caps(production_caps),
    )


def _percentages(option: str, text: str | None, example: str) -> tuple[float, ...]:
    from gpushare.units import parse_thread_percentage

    if text is None:
        return ()
    try:
        return tuple(parse_thread_percentage(word) for word in text.split(","))
    except BadUsage as error:
        raise BadUsage(
            f"{option} {quoted(text)}: {error.message}", f"give {option} {example}", code=error.code
        ) from None


def _production_caps(text: str | None) -> tuple[float, ...] | None:
    option, example = "--production-caps", "60,50"
    if text is None or text.strip() == "none":
        return None if text is None else ()
    caps = _percentages(option, text, example)
    if any(cap >= 100 for cap in caps):
        raise BadUsage(
            f"{option} {text}: a cap of 100 leaves no share for the other job",
            f"give {option} {example}",
            code="bad_cap",
        )
    return caps


def _window(text: str) -> float:
    from gpushare.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds < 0.1:
        raise BadUsage(f"--window {text} is too short to measure in", "give at least 0.1s", code="bad_duration")
    return seconds


def words_of(option: str, command: str) -> list[str]:
    """Return the words of a command line as a shell splits them.

    Raises:
        BadUsage: there are none, or a quote is open.
    """
    import shlex

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadUsage(
            f"{option} {quoted(command, 200)} is no command line: {error}", "close the quote", code="bad_command"
        ) from None
    if not words:
        raise BadUsage(f"{option} names no program", f"give one: {option} 'python train.py'", code="no_command")
    return words


def _keep(text: str) -> float:
    from gpushare.cli.limits import percentage

    return percentage("--keep", text, example="--keep 97%", hint="give one: --keep 97%", code="bad_keep") / 100


def _factor(text: str) -> float:
    try:
        value = float(text.strip().lower().removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= 1000.0:
        raise BadUsage(f"--p99 {quoted(text)} is not a factor from 1 up", "give one: --p99 1.1x", code="bad_factor")
    return value


@contextlib.contextmanager
def _reporter() -> Iterator[TuneReporter]:
    from gpushare.measure.tune_report import TuneReporter
    from gpushare.show.text import put
    from gpushare.show.tune import factor, share

    class Lines(TuneReporter):
        def doing(self, what: str) -> None:
            if not settings.quiet:
                put(sys.stderr, f"gpushare: {what}\n")

        def measured(self, report: TrialReport) -> None:
            if not settings.quiet:
                said = f"production {share(report.trial.kept)} of alone"
                said += "" if report.trial.p99 is None else f", p99 {factor(report.trial.p99)}"
                other = report.opportunistic_share
                said += "" if other is None else f"; the other {share(other)}"
                put(sys.stderr, f"gpushare:   {said} ({report.rounds} windows)\n")

    yield Lines()
