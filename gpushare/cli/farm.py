"""``gpushare farm``: many copies of one program, as many at a time as fit; done by `gpushare/run/farm.py`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from gpushare.base.errors import BadUsage, GpushareError, NotFound, OperationFailed, gpu_not_named_error
from gpushare.base.model import Gpu
from gpushare.base.selection import Device, candidates, devices_for_any, is_any
from gpushare.base.units import format_copies, parse_seconds, quoted, ranges
from gpushare.cli.options import (
    CLIENT_THREADS,
    OVER_ACTION,
    PRIORITY_OPTION,
    ChangingCommand,
    Refused,
    argument,
    flag,
    gpus_of,
    note,
    option,
    positive_time,
    refuse,
    settings,
    verb,
)
from gpushare.host.host import Host
from gpushare.hostfile.kept import kept_limits
from gpushare.measure.bench_data import best_caps, read_bench
from gpushare.memory.limit import parse_budget
from gpushare.mps.limits import Limits
from gpushare.plan import Plan
from gpushare.run.farm import MOST_COPIES, MOST_LINE_BYTES, Farm, FarmOptions, parse_lines, share_of_threads
from gpushare.run.jobs import check_job_name, farm_job
from gpushare.run.program import RunOptions
from gpushare.run.results import BenchedCap, find_benched
from gpushare.show.plan import plan_result
from gpushare.show.render import exit_code_of
from gpushare.show.result import Result
from gpushare.show.run import Copy, CopyLines, FarmAnswer, farm_result

_REFUSED: Final = (
    Refused("--over", "--memory", "it says what happens above the limit", "--copies 4 --memory 20G --over warn -- CMD", needs=True),
    Refused("--resume", "--logs", "the file farm.jsonl there says what is done", "--copies 100 --logs logs --resume -- CMD {}", needs=True),
    Refused("--gpus", "--threads --priority --like", "an MPS daemon has one GPU", "--copies 4 --gpus 2 --memory 20G -g any -- CMD"),
)  # fmt: skip


@verb(ChangingCommand, takes_program=True)
def farm(
    command: list[str] = argument("CMD...", "The program; {} is the number of the copy, or its line.", default=...),
    copies: int | None = option("--copies", "N", "Run N copies, numbered from 0.", min=1, max=MOST_COPIES),
    each: str | None = option("--each", "FILE", "Run one copy for each line of FILE; - is stdin."),
    parallel: int | None = option("--parallel", "K", "At most K at a time. [default: as many as fit]", min=1),
    gpu: str | None = option("-g --gpu", "SET", "The GPUs or instances: 0, 0-3, 0,2, any (all)."),
    gpus: int = option("--gpus", "N", "How many of them each copy has.", default=1, min=1),
    threads: str | None = CLIENT_THREADS,
    memory: str | None = option("--memory", "SIZE", "Device memory of each copy: 20G, 80%. [default: measured]"),
    over: str | None = OVER_ACTION,
    priority: str | None = PRIORITY_OPTION,
    logs: str | None = option("--logs", "DIR", "Write DIR/copy-N.log and DIR/farm.jsonl."),
    resume: bool = flag("--resume", "Skip the copies that are done in DIR/farm.jsonl."),
    restart: int = option("--restart", "K", "Restart a failed copy, at most K times.", default=0, min=0),
    fail_fast: bool = flag("--fail-fast", "End the farm with the first failed copy."),
    stall: str | None = option("--stall", "TIME", "End a copy that prints nothing for this long: 60s."),
    like: str | None = option("--like", "FILE", "Take the thread percentage of each copy from a file of bench --to."),
    name: str | None = option("--name", "NAME", "Name the farm, for commands that take a JOB."),
    grace: str | None = option("--grace", "TIME", "Time that a copy gets to end after a signal. [default: 10s]"),
) -> Any:
    """Run many copies of a program under MPS, as many at a time as fit into the memory of the GPUs.

    Each copy finds its number in GPUSHARE_COPY. A copy reserves its memory while it runs; after each start the farm
    goes to the end of the line. Without --memory, the first copy is measured. If a copy fails, the others go on.
    With --gpus N, each copy runs outside MPS on N GPUs with the best links between them, and reserves its memory on
    each.
    """
    if (copies is None) is (each is None):
        wrong = "neither --copies nor --each is given" if copies is None else "--copies and --each are both given"
        raise BadUsage(wrong, "give one of them before the program: --copies 8, or --each FILE", code="bad_copies")
    # --gpus 1 is as without it.
    refuse(_REFUSED, settings.given - {"--gpus"} if gpus == 1 else None)
    limits = Limits.parse(threads, None, priority)
    title = None if name is None else check_job_name(name)
    grace_seconds = RunOptions().grace_seconds if grace is None else parse_seconds(grace)
    budget = parse_budget(memory, over)
    stall_seconds = None if stall is None else positive_time("--stall", stall, "60s")
    caps = None if like is None else _read_caps(like)
    host = settings.connect()
    devices = _chosen_devices(gpu, gpus_of(host), instances=gpus == 1)
    lines = None if each is None else _read_lines(each)
    options = FarmOptions(
        copies=len(lines) if lines is not None else copies or 0,
        lines=lines,
        parallel=parallel,
        limits=limits,
        budget=budget,
        cap=_cap_finder(host, devices[0], command, caps),
        restarts=restart,
        fail_fast=fail_fast,
        logs=None if logs is None else Path(logs),
        resume=resume,
        grace_seconds=grace_seconds,
        stall_seconds=stall_seconds,
        user_limits=kept_limits(host),
        name=title,
        gpus=gpus,
    )
    report = CopyLines(options.copies, output=settings.output, quiet=settings.quiet, note=note)
    copies_of_farm = Farm(host, devices, command, options, report)
    # An error comes before the farm is a job.
    copies_of_farm.check()
    if settings.dry_run:
        plan = Plan(title="the farm has ended", steps=copies_of_farm.plan())
        return plan_result(plan, dry_run=True, empty="nothing to do: all copies were done earlier")
    try:
        with farm_job(host, devices[0], name, command, mps=gpus == 1) as note_end:
            result = _result_of_farm(copies_of_farm.run())
            peaks = [copy.memory_peak_bytes for copy in result.data.copies if copy.memory_peak_bytes is not None]
            note_end(exit_code_of(result), max(peaks, default=None))
    finally:
        report.clear()
    return result


def _chosen_devices(gpu: str | None, gpus: Sequence[Gpu], *, instances: bool) -> tuple[Device, ...]:
    """Return the devices of ``-g``. For ``any`` they are all GPUs that answer; with ``instances`` also MIG instances."""
    if gpu is None and len(gpus) > 1:
        hint = "name them: -g 0,1; or all that answer: -g any"
        raise gpu_not_named_error(len(gpus), "say on which to run", hint)
    chosen = candidates(gpu, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), note)
    return devices_for_any(chosen, instances=instances) if is_any(gpu) else chosen


def _read_lines(each: str) -> tuple[str, ...]:
    """Return the lines of a file, or of stdin, one for each copy."""
    # A line may end in CR LF.
    most_bytes = MOST_COPIES * (MOST_LINE_BYTES + 2)
    title = "stdin" if each == "-" else quoted(each)
    try:
        if each == "-":
            text = sys.stdin.buffer.read(most_bytes + 1)
        else:
            with open(each, "rb") as file:
                text = file.read(most_bytes + 1)
    except OSError as error:
        kind = NotFound if isinstance(error, FileNotFoundError) else OperationFailed
        raise kind(
            f"cannot read {title}: {error.strerror}", "give a file with one line for each copy", code="no_file"
        ) from None
    if len(text) > most_bytes:
        raise BadUsage(
            f"{title} is longer than {MOST_COPIES} lines of {MOST_LINE_BYTES} bytes", "split it", code="bad_lines"
        )
    return parse_lines(text, title)


def _read_caps(like: str) -> list[BenchedCap]:
    """Return the best caps under MPS that a file of bench has, by number of copies."""
    caps = sorted(best_caps(read_bench(like)), key=lambda cap: cap.copies)
    if not caps:
        raise NotFound(
            f"{like} has no measurement under MPS",
            "measure it: gpushare bench --copies 1,2,4,8 --ways mps,mps:200/n -- CMD",
            code="not_measured",
        )
    return caps


def _cap_finder(
    host: Host, device: Device, command: Sequence[str], caps: Sequence[BenchedCap] | None
) -> Callable[[int], float | None]:
    """Return a function that finds the thread percentage of each copy for a number of copies at a time, and notes its source.

    The cap is one of ``caps``, which --like gives; else the one that `gpushare bench` has kept for this command; else
    `share_of_threads`.
    """
    # Each note is printed once.
    say_once = functools.cache(note)

    @functools.cache
    def find_cap(number: int) -> float | None:
        if caps is None:
            benched: Any = find_benched(host, device, command, number)
            if benched is None:
                return share_of_threads(number)
            say_once(f"gpushare bench found the cap on {benched.date} under driver {benched.driver or 'unknown'}")
        else:
            # The nearest number of copies; of two, the smaller one, whose cap is the higher.
            benched = min(caps, key=lambda cap: (abs(cap.copies - number), cap.copies))
            if benched.copies != number:
                say_once(
                    f"the cap is that of {format_copies(benched.copies)}: {format_copies(number)} were not measured"
                )
        if not benched.best:
            say_once(
                f"a way other than MPS was faster for {format_copies(benched.copies)} (gpushare bench); this is the best cap under MPS"
            )
        percent: float | None = benched.threads_percent
        return percent

    return find_cap


def _result_of_farm(answer: FarmAnswer) -> Result:
    """Return the result of a farm that has ended, with its errors and notes."""
    errors = _failure_errors(answer.failed)
    if answer.unrecorded is not None:
        errors.append(answer.unrecorded)
    notes = []
    unproved = [copy.copy for copy in answer.copies if copy.attached is False]
    if unproved:
        notes.append(f"never seen attached to MPS, so their limits are not proved: copy {ranges(unproved)}")
    skipped = [copy.copy for copy in answer.copies if copy.state == "skipped"]
    if skipped:
        notes.append(f"not started: copy {ranges(skipped)}")
    exit_code = 1 if errors else 0
    if answer.ended_by is not None:
        exit_code = 128 + answer.ended_by
    return farm_result(answer, errors, notes, exit_code)


def _failure_errors(failed: Sequence[Copy]) -> list[GpushareError]:
    """Return an error for each way in which copies failed, with the text of the first copy."""
    groups: dict[tuple[str, str | None], list[Copy]] = {}
    for copy in failed:
        # By the reason, not the text: each that was ended for its memory held another sum.
        groups.setdefault((copy.reason or str(copy.failure), copy.hint), []).append(copy)
    errors: list[GpushareError] = []
    for (_, hint), alike in groups.items():
        first, *others = alike
        like_first = f" (copy {first.copy}; the others likewise)" if first.reason is not None and others else ""
        logs = ", ".join(copy.log for copy in alike[:3] if copy.log)
        errors.append(
            OperationFailed(
                f"{'copies' if others else 'copy'} {ranges(copy.copy for copy in alike)}: {first.failure}{like_first}",
                hint or (f"see the output: {logs}" if logs else "keep the output: --logs DIR"),
                code=first.reason or "copy_failed",
            )
        )
    return errors
