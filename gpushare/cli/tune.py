"""``gpushare tune``: the best time-slice or cap next to a production job; done by `gpushare/measure/`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpushare.base.errors import BadCombination, BadUsage, GpushareError
from gpushare.base.model import Way
from gpushare.base.selection import Device, select_one
from gpushare.base.units import parse_thread_percentage, quoted
from gpushare.cli.bench import picture_path, write_picture
from gpushare.cli.options import (
    Command,
    gpus_of,
    interrupted_error,
    option,
    others_note,
    parse_percentage,
    positive_time,
    settings,
    split_command,
    verb,
)
from gpushare.host.host import Host
from gpushare.job_command import JobCommand
from gpushare.measure.metric import parse_metric
from gpushare.measure.search import CAPS_PERCENT, Figures, Goal, Search
from gpushare.measure.tune import (
    TuneOptions,
    TuneReporter,
    TuneResult,
    commands,
    find_tried,
    keep_tried,
    tuned_record,
)
from gpushare.measure.tune import tune as measured
from gpushare.memory.peaks import keep_profile
from gpushare.run.jobs import check_job_name
from gpushare.run.results import keep_tuned
from gpushare.show.text import put
from gpushare.show.tune import factor_text, frontier_picture, share_text, tune_result
from gpushare.show.waiting import progress_line


@verb(Command)
def tune(
    production: str = option(
        "--production", "CMD", "The job that must keep its speed; it keeps running between trials.", default=...
    ),
    opportunistic: list[str] = option(
        "--opportunistic",
        "CMD",
        "A job that takes what is left; restarted for each cap. Give it several times to run several jobs together.",
        default=...,
    ),
    keep: str = option("--keep", "PCT", "How much of its stand-alone rate production must keep.", default="97%"),
    p99: str | None = option(
        "--p99", "FACTOR", "How far its p99 latency may rise above that of production alone: 1.1x or 1.1."
    ),
    metric: str | None = option(
        "--metric", "REGEX", "The rate that both print: 'rate=([0-9.]+)'. [default: lines per second]"
    ),
    opportunistic_metric: str | None = option(
        "--opportunistic-metric", "REGEX", "The same for the opportunistic job, if it differs."
    ),
    latency: str | None = option("--latency", "REGEX", "The latency of a request. [default: latency_ms=NUMBER]"),
    ways: str = option(
        "--ways",
        "LIST",
        "What to search: slices (time-slices, production outside MPS), caps (thread caps, all under MPS), or both.",
        default="slices,caps",
    ),
    copies: int = option("--copies", "N", "Run N copies of each opportunistic job.", default=1, min=1, max=64),
    caps: str | None = option("--caps", "LIST", "Caps to choose from. [default: 100,95,90 and so on to 10]"),
    budget: str | None = option(
        "--budget",
        "TIME",
        "How long to search, counted from when all jobs have printed; then the best setting so far is kept. [default: 150s; 60s for slices alone]",
    ),
    window: str | None = option(
        "--window",
        "TIME",
        "Length of a window with production alone; those with all jobs are twice as long. [default: 0.6s; longer for jobs that print seldom]",
    ),
    plot: str | None = option("--plot", "FILE", "Draw the frontier to a new .png or .svg file."),
    timeout: str = option(
        "--timeout",
        "TIME",
        "How long a job may take to print for the first time; the budget does not count this time.",
        default="10m",
    ),
    gpu: str | None = option("-g --gpu", "GPU", "One GPU: index, UUID, PCI bus id."),
    name: str = option("--name", "NAME", "Keep the result for run --opportunistic --for NAME.", default="production"),
) -> Any:
    """Find how much of a GPU opportunistic jobs may get next to a production job that keeps its speed.

    There are two ways, the same that `gpushare run` sets. Slices: production runs outside MPS, and the others are
    clients of one MPS daemon and share one time-slice. Caps: all run under MPS, with a thread cap on each of the
    others. tune searches slices first, because they are set while all run, and then caps, unless slices leave the
    others all of their rate. It keeps the setting with which production meets the goal and the others do most.

    Windows with all jobs alternate with windows of production alone, and of the others alone. tune measures a setting
    until the figures decide. Ctrl-C, SIGTERM and the end of --budget keep the best setting so far; a later tune of the
    same jobs goes on from there. CMD runs without a shell; to use one: sh -c '...'.

    Neither way limits memory bandwidth. Where both jobs need it, pause the other while production works: run --yield
    pause. The peak memory of all jobs and what they use of the GPU are kept for run --wait.
    """
    check_job_name(name)
    picture = None if plot is None else picture_path(plot)
    options = TuneOptions(
        production=split_command("--production", production),
        opportunistic=[split_command("--opportunistic", each) for each in opportunistic],
        search=Search(
            goal=Goal(
                keep=parse_percentage("--keep", keep, example="--keep 97%", code="bad_keep") / 100,
                p99_factor=None if p99 is None else _parse_factor(p99),
            ),
            ways=_parse_ways(ways, caps),
            caps=CAPS_PERCENT if caps is None else _parse_caps(caps),
        ),
        metric=parse_metric(metric, latency=latency),
        opportunistic_metric=parse_metric(opportunistic_metric or metric),
        copies=copies,
        budget_seconds=None if budget is None else positive_time("--budget", budget, "150s"),
        window_seconds=None if window is None else positive_time("--window", window, "0.6s, at least 0.1s", least=0.1),
        start_seconds=positive_time("--timeout", timeout, "10m"),
    )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    with _stderr_reporter() as reporter:
        result = measured(host, device, options, reporter, find_tried(host, device, options))
    return keep_result(host, device, options, result, name, picture)


def _parse_ways(text: str, caps: str | None) -> tuple[Way, ...]:
    """Return the ways to search, in the order typed."""
    words = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    wrong = next((word for word in words if word not in {"slices", "caps"}), None)
    if wrong is not None:
        raise BadUsage(f"{quoted(wrong)} is not a way that tune searches", "give --ways slices,caps", code="bad_way")
    if caps is not None and "caps" not in words:
        raise BadCombination(f"--caps cannot be combined with --ways {text}", "drop --caps")
    return tuple(map(Way, words))


def _parse_caps(text: str) -> tuple[float, ...]:
    try:
        return tuple(parse_thread_percentage(word) for word in text.split(","))
    except BadUsage as error:
        raise BadUsage(f"--caps {quoted(text)}: {error.message}", "give --caps 80,60,40", code=error.code) from None


def _parse_factor(text: str) -> float:
    """Return the factor by which production's latency may rise over that of production alone: ``1.1x`` or ``1.1``."""
    try:
        value = float(text.strip().lower().removesuffix("x"))
    except ValueError:
        value = 0.0
    # A larger one is probably meant as a percentage.
    if not 1.0 <= value <= 99.0:
        raise BadUsage(f"--p99 {quoted(text)} is not a factor from 1 to 99", "give one: --p99 1.1x", code="bad_factor")
    return value


@contextlib.contextmanager
def _stderr_reporter() -> Iterator[TuneReporter]:
    """Yield a reporter that prints each trial and draws the progress on stderr; with --quiet it does nothing."""
    terminal = sys.stderr.isatty()

    class Lines(TuneReporter):
        def doing(self, what: str) -> None:
            if not settings.quiet:
                put(sys.stderr, f"gpushare: {what}\n")

        def measured(self, figures: Figures) -> None:
            """Print what a setting gave: the share of its rate alone that each side has."""
            if settings.quiet:
                return
            words = [f"production {share_text(figures.kept)} of its rate alone"]
            if figures.p99 is not None:
                words.append(f"p99 {factor_text(figures.p99)}")
            if figures.share is not None:
                words.append(f"the others {share_text(figures.share)}")
            title = f"{figures.setting.title}: " if terminal else "  "
            put(sys.stderr, f"gpushare: {title}{', '.join(words)} ({figures.seconds:.1f} s)\n")

        def progress(self, what: str, seconds: float, most: float) -> None:
            draw(what, round(seconds), round(most), max(0.0, most - seconds))

    with progress_line(quiet=settings.quiet, about="at most") as draw:
        yield Lines()


def keep_result(
    host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str, picture: Path | None
) -> Any:
    """Keep the setting, what was tried, and the profiles of the commands in files; return the figures as a result.

    ``picture``: also draw the settings to this file. A setting or picture that cannot be written is an error of the result.
    """
    # None: no setting surely meets the goal.
    tuned = tuned_record(options, result, name)
    data = result.answer if tuned is None else replace(result.answer, name=name)
    errors = [] if result.stopped is None else [_early_end_error(result.stopped)]
    # The next tune of these commands goes on from there.
    keep_tried(host, device, options, result.outcome.curve)
    _keep_profiles(host, device, options, result)
    if tuned is not None:
        try:
            data = replace(data, file=str(keep_tuned(host, tuned)), commands=tuple(commands(tuned, device, options)))
        except GpushareError as error:
            errors.append(error)
    if picture is not None:
        errors += write_picture(picture, data, frontier_picture)
    notes = _doubt_notes(options, result)
    if data.warning is not None:
        notes.insert(0, data.warning)
    if result.strangers:
        notes.append(others_note(result.strangers))
    if tuned is None:
        notes.append(_no_setting_note(device, options, unsure=data.best is not None))
    elif data.file is not None:
        production, *others = data.commands
        outside = ", outside MPS" if tuned.way is Way.SLICES else ""
        notes += [f"start production{outside}: {production}", *(f"then the other: {other}" for other in others)]
    return tune_result(data, notes, errors)


def _no_setting_note(device: Device, options: TuneOptions, *, unsure: bool) -> str:
    """Return the note that no setting was kept: the best does not surely meet the goal (``unsure``), or there is none."""
    if unsure:
        advice = "the best setting does not surely meet the goal yet; the same tune again goes on from there"
    else:
        program = options.opportunistic[0]
        pause = JobCommand(gpu=device.selector, opportunistic=True, yields="pause", program=program)
        advice = f"pause the opportunistic job instead: {pause}"
    return f"no setting was kept: {advice}"


def _keep_profiles(host: Host, device: Device, options: TuneOptions, result: TuneResult) -> None:
    """Keep the peaks and the use of the commands for `gpushare run --wait`."""
    # What several jobs or copies use together tells nothing about each.
    single = options.copies == 1 and len(options.opportunistic) == 1
    of_others = result.others.profile(is_single=single and not result.strangers)
    keep_profile(host, device, options.production, result.production.profile(is_single=not result.strangers))
    for command in options.opportunistic:
        keep_profile(host, device, command, of_others)


# The standard deviation of production's windows alone, relative to their mean, above which a note tells it.
_MUCH_SPREAD: Final = 0.05


def _doubt_notes(options: TuneOptions, result: TuneResult) -> list[str]:
    """Return notes on how sure the answer is."""
    goal = options.search.goal
    best = result.outcome.best
    spread = result.production.spread
    notes = []
    if result.answer.ended == "budget":
        notes.append(f"the budget of {options.most_seconds:g} s is spent; the same tune again goes on from there")
    if best is not None and not best.meets_safely(goal):
        notes.append("the goal is met by less than the scatter of the figures; the same tune again measures longer")
    if result.answer.production_waits:
        notes.append("production waits for requests: its rate is the demand, and its latency decides")
    elif spread is not None and spread > _MUCH_SPREAD:
        notes.append(f"production alone varied by {100 * spread:.0f} % between windows")
    return notes


def _early_end_error(stopped: KeyboardInterrupt | GpushareError) -> GpushareError:
    """Return the error of a search that ended early: what failed, or the signal with what comes next."""
    if isinstance(stopped, GpushareError):
        return stopped
    return interrupted_error(stopped).restated(
        hint="all jobs were ended and the host was restored; the same tune again goes on from there"
    )
