"""``gpushare tune``: the best time-slice or cap next to a production job; done by `gpushare/measure/`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpushare.base.errors import BadUsage, GpushareError
from gpushare.base.units import quoted
from gpushare.cli.options import Command, gpus_of, settings
from gpushare.job_command import JobCommand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpushare.base.selection import Device
    from gpushare.host.host import Host
    from gpushare.measure.pair import TuneOptions
    from gpushare.measure.search import Judged, Search
    from gpushare.measure.tune import TrialReport, TuneReporter, TuneResult, WayResult
    from gpushare.run.results import Tuned


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune", cls=Command, short_help="Find the time-slice or cap of a job next to a production job.")(tune)


def tune(
    production: Annotated[
        str,
        typer.Option(
            "--production", metavar="CMD", help="The job that must keep its speed; it keeps running between trials."
        ),
    ],
    opportunistic: Annotated[
        str,
        typer.Option("--opportunistic", metavar="CMD", help="The job that takes what is left; restarted for each cap."),
    ],
    keep: Annotated[
        str, typer.Option("--keep", metavar="PCT", help="How much of its rate alone production must keep.")
    ] = "97%",
    p99: Annotated[
        str | None, typer.Option("--p99", metavar="FACTOR", help="How far its p99 latency may rise over alone: 1.1x.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="REGEX", help="The rate that both print: 'rate=([0-9.]+)'. [default: lines per second]"
        ),
    ] = None,
    opportunistic_metric: Annotated[
        str | None,
        typer.Option(
            "--opportunistic-metric", metavar="REGEX", help="The same for the opportunistic job, if it differs."
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option("--latency", metavar="REGEX", help="The latency of a request. [default: latency_ms=NUMBER]"),
    ] = None,
    ways: Annotated[
        str,
        typer.Option(
            "--ways",
            metavar="LIST",
            help="What to search: slices (time-slices, production outside MPS), caps (thread caps, all under MPS), or both.",
        ),
    ] = "slices,caps",
    copies: Annotated[
        int,
        typer.Option(
            "--copies", metavar="N", min=1, max=64, help="Run N copies of the opportunistic job; their rates add up."
        ),
    ] = 1,
    caps: Annotated[
        str | None,
        typer.Option(
            "--caps",
            metavar="LIST",
            help="Caps to choose from. [default: 100,95,90 and so on to 10, and finer steps where they gain much]",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="TIME",
            help="Length of one measuring window. [default: 1.5s; longer for jobs that print seldom; without --p99, down to 0.6s for jobs that print often]",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            metavar="N",
            min=2,
            help="Fewest windows with both jobs per trial. [default: 3 of 1.5 s to 8 of 0.6 s; up to 3 times as many where the figures scatter, 4 times with --p99]",
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option("--timeout", metavar="TIME", help="How long a job may take to print for the first time."),
    ] = "10m",
    gpu: Annotated[
        str | None, typer.Option("-g", "--gpu", metavar="GPU", help="One GPU: index, UUID, PCI bus id.")
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Keep the result for run --opportunistic --for NAME.")
    ] = "production",
) -> Any:
    """Find how much of a GPU an opportunistic job may get next to a production job that keeps its speed.

    There are two ways, as run applies them: production outside MPS, and the opportunistic jobs in one MPS daemon, which share
    one time-slice; or all under MPS, with a thread cap on each opportunistic job. tune searches both and keeps the one with
    which production meets the goal and the other job does most. With --p99 and a production job that has gaps it begins with
    slices, otherwise with caps. What cannot be better is not searched.

    A trial pauses the opportunistic job repeatedly, and compares production next to it with production alone, in one
    process. Slices are set while both run. For each cap the opportunistic job is started and killed, the safe way: stop,
    drain, kill; caps start at 60 with low priority. CMD runs without a shell; to use one: sh -c '...'.

    Neither limits memory bandwidth. Where both jobs need it, pause the other while production works: run --yield pause.
    The peak memory of both jobs and what they use of the GPU are kept for run --wait.
    """
    from gpushare.base.selection import select_one
    from gpushare.cli.options import positive
    from gpushare.measure.metric import parse_metric
    from gpushare.measure.pair import TuneOptions
    from gpushare.run.jobs import check_job_name

    check_job_name(name)
    searched = _ways(ways, caps)
    options = TuneOptions(
        production=words_of("--production", production),
        opportunistic=words_of("--opportunistic", opportunistic),
        search=_search(keep, p99, caps),
        metric=parse_metric(metric, latency=latency),
        opportunistic_metric=parse_metric(opportunistic_metric or metric),
        copies=copies,
        ways=searched,
        window_seconds=None if window is None else _window(window),
        rounds=rounds,
        start_seconds=positive("--timeout", timeout, "10m"),
    )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    from gpushare.measure.tune import tune as measured

    with _reporter() as reporter:
        result = measured(host, device, options, reporter)

    return finished(host, device, options, result, name)


def _ways(text: str, caps: str | None) -> tuple[str, ...]:
    from gpushare.base.errors import BadCombination
    from gpushare.run.results import CAPS, SLICES

    found = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    wrong = next((word for word in found if word not in {SLICES, CAPS}), None)
    if wrong is not None:
        raise BadUsage(f"{quoted(wrong)} is not a way that tune searches", "give --ways slices,caps", code="bad_way")
    if caps is not None and CAPS not in found:
        raise BadCombination(f"--caps cannot be combined with --ways {text}", "drop --caps")
    return found


def _search(keep: str, p99: str | None, caps: str | None) -> Search:
    from gpushare.measure.search import FINE, GRID, Goal, Search, Setting

    grid = _percentages("--caps", caps, "80,60,40") or GRID
    return Search(
        goal=Goal(keep=_keep(keep), p99_factor=None if p99 is None else _factor(p99)),
        grid=grid,
        fine=FINE if caps is None else (),
        start=Setting(threads=min(grid, key=lambda cap: abs(cap - 60.0))),
    )


def _percentages(option: str, text: str | None, example: str) -> tuple[float, ...]:
    from gpushare.base.units import parse_thread_percentage

    if text is None:
        return ()
    try:
        return tuple(parse_thread_percentage(word) for word in text.split(","))
    except BadUsage as error:
        raise BadUsage(
            f"{option} {quoted(text)}: {error.message}", f"give {option} {example}", code=error.code
        ) from None


def _window(text: str) -> float:
    from gpushare.base.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds < 0.1:
        raise BadUsage(f"--window {text} is too short to measure in", "give at least 0.1s", code="bad_duration")
    return seconds


def words_of(option: str, command: str) -> list[str]:
    """Return the words of a command line as a shell splits them."""
    import shlex

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadUsage(
            f"{option} {quoted(command, 200)} is not a command line: {error}", "close the quote", code="bad_command"
        ) from None
    if not words:
        raise BadUsage(f"{option} names no program", f"give one: {option} 'python train.py'", code="no_command")
    return words


def _keep(text: str) -> float:
    from gpushare.cli.options import percentage

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
    from gpushare.cli.progress import progress_line
    from gpushare.measure.tune import TuneReporter
    from gpushare.show.text import put
    from gpushare.show.tune import factor, share

    terminal = sys.stderr.isatty()

    class Lines(TuneReporter):
        def doing(self, what: str) -> None:
            # On a terminal, the bar names the trial.
            if not settings.quiet and not (terminal and what.startswith("trial ")):
                put(sys.stderr, f"gpushare: {what}\n")

        def measured(self, report: TrialReport) -> None:
            if not settings.quiet:
                said = f"production {share(report.trial.kept)} of alone"
                said += "" if report.trial.p99 is None else f", p99 {factor(report.trial.p99)}"
                other = report.opportunistic_share
                said += "" if other is None else f"; the other {share(other)}"
                name = f"{report.trial.setting.title}: " if terminal else "  "
                put(sys.stderr, f"gpushare: {name}{said} ({report.rounds} windows)\n")

        def expected(self, what: str, done: int, most: int, seconds_left: float | None) -> None:
            tell(what, done, most, seconds_left)

    with progress_line(quiet=settings.quiet, about="at most") as tell:
        yield Lines()


# Standard deviation of production's windows alone from which a few windows say little.
_MUCH_SPREAD: Final = 0.05


def finished(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str) -> Any:
    """Keep what was found, unless the search was ended early, and return it as the command's result."""
    from gpushare.cli.options import others_note
    from gpushare.run.results import keep_tuned
    from gpushare.show.tune import tune_result

    tuned = None if result.stopped is not None else _tuned(host, device, options, result, name)
    data = {**_data(options, result, tuned), "gpu_name": device.gpu.name, "driver": host.nvml.driver_version()}
    notes = [*([] if result.warning is None else [result.warning]), *_uncertain(result, options.search.goal.keep)]
    if result.others:
        notes.append(others_note(result.others))
    failed = None
    if tuned is not None:
        try:
            data["file"] = str(keep_tuned(host, tuned))
        except GpushareError as error:
            # The figures are shown even if the file cannot be written.
            failed = error
    _keep_profiles(host, device, options, result)
    if tuned is not None and failed is None:
        notes += _apply(tuned, device.selector)
    elif result.stopped is not None:
        return tune_result(data, [*notes, "ended without a result; nothing was saved"], _early(result.stopped))
    elif result.outcome.best is None:
        pause = JobCommand(gpu=device.selector, opportunistic=True, yields="pause", program=options.opportunistic)
        notes.append(f"nothing was saved; pause the opportunistic job instead: {pause}")
    return tune_result(data, notes, failed)


def _keep_profiles(host: Host, device: Device, options: TuneOptions, result: TuneResult) -> None:
    """Keep the peaks and the use of both commands for `gpushare run --wait`; a failure to do so changes nothing."""
    from gpushare.memory.peaks import digest_of, keep_profile

    both = ((options.production, result.production_profile), (options.opportunistic, result.opportunistic_profile))
    digests = [digest_of(device, command) for command, _ in both]
    best = result.outcome.best
    kept = [None, None] if best is None or options.copies > 1 else [best.kept, _share(best, result)]
    for (command, found), other, share in zip(both, digests[::-1], kept, strict=True):
        profile = found if share is None else found.next_to(other, share)
        if profile != type(profile)():
            with contextlib.suppress(GpushareError):
                keep_profile(host, device, command, profile)


def _apply(tuned: Tuned, gpu: str) -> list[str]:
    """Return the commands that use a result: both need no more options."""
    from gpushare.run.results import SLICES

    outside = ", outside MPS" if tuned.way == SLICES else ""
    production = JobCommand(gpu=gpu, production=tuned.name, program=tuned.production or "CMD")
    other = JobCommand(gpu=gpu, opportunistic=True, target=tuned.name, program=tuned.opportunistic or "CMD")
    return [f"start production{outside}: {production}", f"then the other: {other}"]


def _uncertain(result: TuneResult, keep: float) -> list[str]:
    """Return notes on figures that are not certain."""
    best, spread = result.outcome.best, result.production_spread
    more = f"more windows are more certain: --rounds {2 * max(one.rounds for one in result.trials)}"
    notes = []
    if best is not None and not best.safe:
        by_p99 = best.p99 is not None and best.kept - best.error >= keep
        which = f"p99 {best.p99:.2f}x" if by_p99 else f"{best.kept:.3f} ±{best.error:.3f}"
        notes.append(f"the goal is met by less than the scatter of the figures ({which}); {more}")
    elif best is not None:
        lucky = [one for one in result.outcome.curve if one.meets and not one.safe]
        larger = [one.setting.title for one in lucky if (one.opportunistic or 0.0) > (best.opportunistic or 0.0)]
        if larger:
            notes.append(f"{larger[0]} met the goal too, but by less than the scatter of its figures; {more}")
    if not notes and spread is not None and spread > _MUCH_SPREAD:
        moved = f"production alone varied by {100 * spread:.0f} % between windows"
        notes.append(f"{moved}, because of its own work or the CPU of this host; {more}")
    return notes


def _early(stopped: KeyboardInterrupt | GpushareError) -> GpushareError:
    from gpushare.cli.options import interrupted

    if isinstance(stopped, GpushareError):
        return stopped
    return interrupted(stopped).restated(
        hint="both jobs were ended and the host was restored; for fewer trials: --ways slices, or --caps 80,60,40"
    )


def _tuned(host: Host, device: Device, options: TuneOptions, result: TuneResult, name: str) -> Tuned | None:
    import shlex
    import time

    from gpushare.run.results import Tuned

    best = result.outcome.best
    if best is None:
        return None
    goal = options.search.goal
    return Tuned(
        name=name,
        date=time.strftime("%Y-%m-%d %H:%M"),
        gpu_name=device.gpu.name,
        driver=host.nvml.driver_version(),
        threads_percent=best.setting.threads,
        low_priority=best.setting.low,
        meets=True,
        stable=result.outcome.stable,
        keep=goal.keep,
        p99_factor=goal.p99_factor,
        kept=round(best.kept, 4),
        p99=None if best.p99 is None else round(best.p99, 4),
        opportunistic_share=_share(best, result),
        way=best.setting.way,
        production_slice_us=best.setting.production_slice_us,
        other_slice_us=best.setting.other_slice_us,
        production_memory_bytes=result.production_memory_bytes,
        production=shlex.join(options.production),
        opportunistic=shlex.join(options.opportunistic),
    )


def _share(one: Judged, result: TuneResult) -> float | None:
    if one.opportunistic is None or not result.opportunistic_alone:
        return None
    return round(one.opportunistic / result.opportunistic_alone, 4)


def _data(options: TuneOptions, result: TuneResult, tuned: Tuned | None) -> dict[str, Any]:
    import time

    found = result.outcome
    rows = [_row(one, result) for one in found.curve]
    return {
        "keep": options.search.goal.keep,
        "p99_factor": options.search.goal.p99_factor,
        "name": None if tuned is None else tuned.name,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "best": None if found.best is None else _row(found.best, result),
        "nearest": None if found.nearest is None else _row(found.nearest, result),
        "ways": [_way(one, result) for one in result.ways],
        "stable": found.stable,
        "low_priority_helps": found.low_priority_helps,
        "production_alone": result.production_alone,
        "production_spread": None if result.production_spread is None else round(result.production_spread, 4),
        "production_p99": result.production_p99,
        "production_busy_percent": result.production_busy,
        "opportunistic_alone": result.opportunistic_alone,
        "production_memory_bytes": result.production_memory_bytes,
        "opportunistic_memory_bytes": result.opportunistic_memory_bytes,
        "seconds": round(result.seconds, 1),
        "warning": result.warning,
        "curve": rows,
        "copies": options.copies,
        "trials": [_trial(report) for report in result.trials],
        "file": None,
    }


def _way(one: WayResult, result: TuneResult) -> dict[str, Any]:
    found = one.outcome
    return {
        "way": one.way,
        "best": None if found is None or found.best is None else _row(found.best, result),
        "nearest": None if found is None or found.nearest is None else _row(found.nearest, result),
        "left_out": one.left_out,
    }


def _row(one: Judged, result: TuneResult) -> dict[str, Any]:
    best = result.outcome.best
    return {
        "setting": one.setting.title,
        "way": one.setting.way,
        "production_slice_us": one.setting.production_slice_us,
        "other_slice_us": one.setting.other_slice_us,
        "threads_percent": one.setting.threads,
        "low_priority": one.setting.low,
        "kept": round(one.kept, 4),
        "kept_error": round(one.error, 4),
        "p99": None if one.p99 is None else round(one.p99, 4),
        "opportunistic_rate": one.opportunistic,
        "opportunistic_share": _share(one, result),
        "trials": one.trials,
        "meets": one.meets,
        "safe": one.safe,
        "chosen": best is not None and one.setting == best.setting,
    }


def _trial(report: TrialReport) -> Mapping[str, Any]:
    return {
        "setting": report.trial.setting.title,
        "way": report.trial.setting.way,
        "production_slice_us": report.trial.setting.production_slice_us,
        "other_slice_us": report.trial.setting.other_slice_us,
        "kept": report.kept.value,
        "kept_low": report.kept.low,
        "kept_high": report.kept.high,
        "p99": report.trial.p99,
        "rounds": report.rounds,
        "cap_factor": 1.0,
        "production_alone": report.alone_rate,
        "production_together": report.together_rate,
        "production_p99_alone": report.alone_p99,
        "production_p99_together": report.together_p99,
        "opportunistic_rate": report.trial.opportunistic,
    }
