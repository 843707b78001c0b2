"""``gpushare bench``: the ways of sharing, measured with a command; done by `gpushare/measure/`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from gpushare.base.benchmark import BenchAnswer, Benchmark
from gpushare.base.errors import BadCombination, GpushareError, Interrupted, OperationFailed
from gpushare.base.selection import Device, select_one
from gpushare.base.units import counted, format_copies
from gpushare.cli.options import (
    HUNG_AFTER,
    LOWER_IS_BETTER,
    MEASURED_TIME,
    ONE_GPU_OPTION,
    PRINTED_NUMBER,
    ChangingCommand,
    Refused,
    argument,
    flag,
    gpus_of,
    note,
    option,
    others_note,
    positive_time,
    refuse,
    settings,
    verb,
)
from gpushare.host.host import Host
from gpushare.host.written_file import create_file
from gpushare.measure.bench import Measurement, Prepared, Settings, measure, planned_steps, prepare
from gpushare.measure.bench_data import (
    bench_answer,
    best_caps,
    check_comparable,
    check_new_file,
    compare_cells,
    profile_of,
    read_bench,
    what_else_differs,
    write_bench,
)
from gpushare.measure.built_in import built_in_workload, parse_sizes, sizes_answer
from gpushare.measure.metric import parse_metric
from gpushare.measure.ways import DEFAULT_WAYS, parse_copies, parse_ways
from gpushare.memory.peaks import keep_profile
from gpushare.plan import Plan
from gpushare.run.results import keep_benched
from gpushare.show.bench import bench_result, sizes_picture, sizes_result, throughput_picture
from gpushare.show.plan import plan_result
from gpushare.show.plot import check_plot
from gpushare.show.result import Result
from gpushare.show.waiting import progress_line
from gpushare.signals import Ended
from gpushare.snapshot import BLIND

Answer = TypeVar("Answer")

MOST_REPEATS: Final = 100

_REFUSED: Final = (
    Refused("--size --cpu --copy --footprint", "CMD", "only the built-in workload has it", "--size 256"),
    Refused("--metric --latency", "CMD", "the built-in workload has its own", "--metric 'rate=([0-9.]+)' -- CMD", needs=True),
    Refused("--lower-is-better", "--metric", "it is about that number", "--metric 'ms=([0-9.]+)' --lower-is-better -- CMD", needs=True),
)  # fmt: skip


@verb(ChangingCommand, takes_program=True)
def bench(
    command: list[str] | None = argument("[CMD...]", "What to measure. [default: the built-in workload]"),
    copies: str = option("--copies", "LIST", "Numbers of copies.", default="1,2,4,8"),
    ways: str | None = option(
        "--ways",
        "LIST",
        "A comma-separated list of queue, timeslice, mps, mps:100/n, mps:200/n, mig, streams [default: all of these], mps:PCT, streams:priority and threads; slices:500us,2ms (each copy with such a time-slice, outside MPS); and as root timeslice:short, medium or long (the level of the GPU, set back afterwards).",
    ),
    repeat: int = option("--repeat", "N", "Runs of each way.", default=3, min=1, max=MOST_REPEATS),
    gpu: str | None = ONE_GPU_OPTION,
    metric: str | None = PRINTED_NUMBER,
    lower: bool = LOWER_IS_BETTER,
    latency: str | None = option(
        "--latency", "REGEX", "Regex of a latency that CMD prints. [default: latency=... and p50=, p99=]"
    ),
    window: str | None = MEASURED_TIME,
    timeout: str | None = HUNG_AFTER,
    size: str | None = option(
        "--size", "LIST", "Built-in workload: N x N matrices; several sizes give a table of times. [default: 1024]"
    ),
    cpu: bool = flag("--cpu", "Built-in workload: multiply on the CPU too."),
    copy: str | None = option(
        "--copy",
        "WAY",
        "Built-in workload: copy a matrix next to each multiplication: to or from the GPU, or both at once.",
    ),
    footprint: str | None = option("--footprint", "SIZE", "Built-in workload: device memory to hold."),
    to: str | None = option("--to", "FILE", "Write all figures to a new JSON file."),
    compare: str | None = option("--compare", "FILE", "Compare with an earlier --to file."),
    plot: str | None = option("--plot", "FILE", "Draw the figures to a new .png or .svg file."),
) -> Any:
    """Measure a command as several copies under each way of sharing, and say which way is best.

    Each way is run in turn, several times, after a warm-up. Throughput is finished runs per second of all copies
    together, start-up included, or a number that CMD prints (--metric). Slowdown compares one copy with a copy alone;
    waiting in the queue does not count. Where 95 % intervals overlap, there is no difference. The host is left
    unchanged: an MPS daemon is started and stopped; MIG instances are used, never created (gpushare mig create).
    Ctrl-C ends the copies safely and shows what was measured; --to also keeps it. The peak memory of CMD and what it uses
    of the GPU are kept for run --wait.
    Example: gpushare bench --copies 1,4 --metric 'steps/s: ([0-9.]+)' --for 5s -- python3 train.py
    """
    refuse(_REFUSED)
    if command:
        check_window(window, metric)
    to_file = None if to is None else check_new_file("--to", to)
    picture = None if plot is None else picture_path(plot)
    earlier = None if compare is None else read_bench(compare)
    printed = parse_metric(metric, higher_is_better=metric is None or not lower, latency=latency)
    sizes = (None,) if size is None else parse_sizes(size)
    if len(sizes) > 1 and earlier is not None:
        raise BadCombination(
            "--compare cannot be combined with several sizes", "compare one size at a time: --size 256"
        )
    host = settings.connect()
    device = select_one(gpu, gpus_of(host))
    if command:
        programs = [Settings(argv=command, metric=printed)]
        # Streams are copies inside one process, which only the built-in workload can be.
        default_ways = DEFAULT_WAYS.replace(",streams", "")
    else:
        programs = [
            built_in_workload(host, device, size=each_size, cpu=cpu, copy=copy, footprint=footprint)
            for each_size in sizes
        ]
        default_ways = _WAYS_OF_SIZES if len(sizes) > 1 else DEFAULT_WAYS
    cells = [(way, number) for way in parse_ways(ways or default_ways) for number in parse_copies(copies)]
    limit = None if timeout is None else positive_time("--timeout", timeout, "10m")
    programs = [replace(program, cells=cells, repeat=repeat, limit=limit) for program in programs]
    if window is not None:
        programs = [replace(program, window=positive_time("--for", window, "3s")) for program in programs]
    if len(sizes) > 1:
        return _measure_sizes(host, device, programs, to_file, picture)
    if earlier is not None:
        check_comparable(programs[0].metric, earlier)
    prepared = prepare(host, device, programs[0])
    if settings.dry_run:
        return bench_plan(host, device, prepared)
    data, measurement = measure_with_progress(host, device, prepared)
    if command and data.reason == "finished":
        keep_caps(host, device, command, data)
    return _result_of_runs(data, measurement, earlier, to_file, picture)


def check_window(window: str | None, metric: str | None) -> None:
    """Raise BadCombination if a command is ended by --for, and prints no number that is counted."""
    if window is not None and metric is None:
        raise BadCombination(
            "--for ends the command before it finishes, so finished runs cannot be counted",
            "say what it prints: --metric 'rate=([0-9.]+)'; or drop --for",
        )


def picture_path(text: str) -> Path:
    """Return the path of ``--plot``. Raises if no picture can be drawn, or there is such a file."""
    check_plot(text)
    return check_new_file("--plot", text)


# The ways that differ where matrices are small; --ways gives others.
_WAYS_OF_SIZES: Final = "timeslice,mps"


def _measure_sizes(
    host: Host, device: Device, programs: Sequence[Settings], to_file: Path | None, picture: Path | None
) -> Any:
    """Measure the programs, one for each size, one after the other until one ends early, and show the times of all."""
    prepared_sizes = [prepare(host, device, program) for program in programs]
    if settings.dry_run:
        steps = tuple(step for each in prepared_sizes for step in planned_steps(host, device, each.settings))
        return plan_result(Plan(title="the sizes are measured", steps=steps), dry_run=True)
    benchmarks: list[BenchAnswer] = []
    runs = 0
    end = _AS_PLANNED
    for prepared in prepared_sizes:
        try:
            data, measurement = measure_with_progress(host, device, prepared)
        except GpushareError as error:
            if not benchmarks:
                raise
            # The figures of the sizes before are shown.
            end = (error,), None
            break
        runs += len(measurement.runs)
        end = _end_of(measurement, runs)
        if measurement.runs:
            benchmarks.append(data)
        if end != _AS_PLANNED:
            break
    notes = list(dict.fromkeys(note for data in benchmarks for note in bench_notes(data)))
    result = sizes_result(sizes_answer(benchmarks), notes, errors=end[0], exit_code=end[1])
    return _with_files(result, runs, to_file, picture, sizes_picture)


def _result_of_runs(
    data: BenchAnswer, measurement: Measurement, earlier: Benchmark | None, to_file: Path | None, picture: Path | None
) -> Any:
    """Return what was measured as the command's result, compared with an ``earlier`` benchmark, and write the files."""
    runs = len(measurement.runs)
    errors, exit_code = end = _end_of(measurement, runs)
    all_failed = end == _AS_PLANNED and bool(data.cells) and all(cell.throughput is None for cell in data.cells)
    if all_failed:
        failure = next(text for cell in data.cells for text in cell.failures)
        hint = "run the command alone by hand, then two copies of it"
        errors = (OperationFailed(f"every run failed: {failure}", hint, code="all_failed"),)
    notes = bench_notes(data)
    if earlier is not None:
        data = replace(data, comparison=compare_cells(data, earlier))
        notes += what_else_differs(data, earlier)
    result = bench_result(data, notes, errors=errors, exit_code=exit_code, all_failed=all_failed)
    return _with_files(result, runs, to_file, picture, throughput_picture)


# How a benchmark ended: by errors, by a signal (then it has its exit code), or as planned.
_End = tuple[tuple[GpushareError, ...], "int | None"]
_AS_PLANNED: Final[_End] = ((), None)


def _end_of(measurement: Measurement, runs: int) -> _End:
    """Return the errors and the exit code of a benchmark that ended. Raises Ended after a signal if there are no ``runs``."""
    if measurement.error is not None:
        return (measurement.error,), None
    if not measurement.interrupted:
        return _AS_PLANNED
    number = measurement.signal or signal.SIGINT
    if not runs:
        raise Ended(number)
    return (), 128 + number


def _with_files(
    result: Result, runs: int, to_file: Path | None, picture: Path | None, draw: Callable[[Any, str], bytes]
) -> Result:
    """Write the files of --to and --plot, and return the result with the errors of those that could not be written."""
    failed: list[GpushareError] = []
    if to_file is not None:
        try:
            write_bench(to_file, result.data)
        except GpushareError as error:
            failed.append(error)
    errors = list(result.errors)
    if result.exit_code is not None:
        # Only a signal gives it one.
        errors.append(_interrupted_error(runs, None if failed else to_file))
    if picture is not None:
        failed += write_picture(picture, result.data, draw)
    # The figures are shown even if a file cannot be written.
    return replace(result, errors=(*errors, *failed))


def _interrupted_error(runs: int, file: Path | None) -> Interrupted:
    """Return the error of a benchmark that a signal ended; its runs are in a ``file``, or without one only shown."""
    where = "the figures are shown, and no file has them" if file is None else f"{file} has them"
    hint = "the copies were ended and the host was restored; --to FILE keeps figures"
    return Interrupted(f"interrupted after {counted(runs, 'run')}; {where}", hint)


def write_picture(path: Path, answer: Answer, draw: Callable[[Answer, str], bytes]) -> list[GpushareError]:
    """Draw an answer to a new file, and return what went wrong; ``draw`` takes png or svg."""
    try:
        create_file(path, draw(answer, path.suffix.lower().removeprefix(".")))
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        return [OperationFailed(message, "give another --plot FILE", code="not_written")]
    return []


def measure_with_progress(host: Host, device: Device, prepared: Prepared) -> tuple[BenchAnswer, Measurement]:
    """Measure with progress on stderr; what a command needed is kept for `gpushare run --wait`."""
    started = time.time()
    with progress_line(quiet=settings.quiet) as progress:
        measurement = measure(host, device, prepared, progress)
    if prepared.settings.workload is None:
        _keep_profile(host, device, prepared.settings.argv, measurement)
    blind = (BLIND,) if host.processes.namespace_is_host() is False else ()
    answer = bench_answer(
        measurement,
        device,
        host=host.spec,
        driver=host.nvml.driver_version(),
        started_at=started,
        notes=(*blind, *prepared.notes),
    )
    return answer, measurement


def keep_caps(host: Host, device: Device, command: Sequence[str], data: Benchmark) -> None:
    """Keep the best caps of MPS for `gpushare farm`; a failure to do so does not fail the benchmark."""
    caps = best_caps(data)
    if not caps:
        return
    try:
        keep_benched(host, device, command, caps)
    except GpushareError as error:
        note(f"the caps are not kept for gpushare farm: {error.message}")


def _keep_profile(host: Host, device: Device, command: Sequence[str], measurement: Measurement) -> None:
    """Keep the peak and the use of the command for `gpushare run --wait`."""
    profile = profile_of(measurement)
    if host.processes.namespace_is_host() is False:
        # The measured memory is the increase of the whole GPU, not the program's.
        profile = replace(profile, memory_bytes=None)
    keep_profile(host, device, command, profile)


def bench_plan(host: Host, device: Device, prepared: Prepared) -> Any:
    """Return the runs that would be made, as a plan, with notes on those that cannot be made here."""
    notes = [
        f"left out: {cell.way}{'' if cell.copies is None else f' {cell.copies}'}: {cell.reason}"
        for cell in prepared.left_out
    ]
    steps = planned_steps(host, device, prepared.settings)
    return plan_result(Plan(title="the ways are measured", steps=steps), dry_run=True, notes=notes)


def bench_notes(data: BenchAnswer) -> list[str]:
    """Return what the tables do not say: ways that were not measured, failures, other programs, and doubts."""
    missing_copies: dict[str, list[int]] = {}
    for cell in data.cells:
        if not cell.is_shown:
            missing_copies.setdefault(cell.way, []).append(cell.copies)
    notes = [*data.notes]
    if missing_copies:
        ways = (
            f"{way} ({', '.join(map(str, copies))} {'copy' if copies == [1] else 'copies'})"
            for way, copies in missing_copies.items()
        )
        notes.append(f"not measured: {', '.join(ways)}")
    notes += [
        f"{cell.way}, {format_copies(cell.copies)}: {failure}" for cell in data.cells for failure in cell.failures
    ]
    if data.others:
        notes.append(others_note({pid: data.other_names.get(pid, "") for pid in data.others}))
    if data.repeat == 1:
        notes.append("single runs cannot tell a difference from noise; give --repeat 3 or more")
    if not data.metric.printed:
        notes.append("start-up counts too; for a long-running program give --metric and --for")
    return notes
