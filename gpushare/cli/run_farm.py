"""``gpushare run --copies N``: the farm on the command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpushare.actions.farm import Copy, FarmOptions, FarmReporter, FarmResult
from gpushare.cli.common import note, settings
from gpushare.errors import BadUsage, GpushareError, NotFound, OperationFailed

if TYPE_CHECKING:
    from gpushare.actions.run import RunOptions
    from gpushare.cli.run_words import Farming
    from gpushare.host.host import Host
    from gpushare.selection import Device

_LINE_SECONDS = 0.5


def run_copies(host: Host, device: Device, command: Sequence[str], run: RunOptions, farming: Farming) -> Any:
    """Run a farm and return its result; exit code 1 when a copy failed, 128 + N when signal N ended it."""
    from dataclasses import replace

    from gpushare.actions.farm import farm
    from gpushare.actions.farm_room import share_of_memory
    from gpushare.units import parse_seconds

    copies, limits = farming.copies or 1, run.limits
    stall_seconds = None if farming.stall is None else parse_seconds(farming.stall)
    if stall_seconds == 0:
        raise BadUsage("--stall 0 would end every copy at once", "give --stall 60s", code="bad_duration")
    at_once = _most_at_once(host, device, copies)
    # Shares are of those that run at the same time.
    together = copies if at_once is None else min(copies, at_once)
    threads = limits.threads_percent
    if threads is None:
        threads = _threads(host, device, command, farming, together)
    memory = limits.memory_limit_bytes
    if memory is None:
        memory = share_of_memory(host, device, together)
    options = FarmOptions(
        copies=copies,
        limits=replace(limits, threads_percent=threads, memory_limit_bytes=memory),
        restarts=farming.restart,
        logs=None if farming.logs is None else Path(farming.logs),
        grace_seconds=run.grace_seconds,
        stall_seconds=stall_seconds,
        at_once=at_once,
    )
    if settings.dry_run:
        return _planned(host, device, command, options)
    _say_first(host, device, options)
    report = _Lines(copies)
    try:
        result = farm(host, device, command, options, report)
    finally:
        report.clear()
    return _finished(result, options)


def _threads(host: Host, device: Device, command: Sequence[str], farming: Farming, together: int) -> float | None:
    """Return the cap of each copy: what `gpushare bench` found for this command here, else its share; None is no cap.

    Raises:
        NotFound: the file of --bench did not measure so many copies under MPS; or as `read_bench`.
    """
    from gpushare.actions.farm_room import share_of_threads
    from gpushare.host.benched import find_benched
    from gpushare.measure.bench_caps import best_caps
    from gpushare.measure.bench_data import read_bench

    copies = farming.copies or 1
    if farming.bench is None:
        found = find_benched(host, device, command, copies)
        if found is None:
            return share_of_threads(together)
        by = f"gpushare bench found the cap on {found.date}"
        driver = host.nvml.driver_version()
        note(by if found.driver == driver else f"{by} under driver {found.driver or 'unknown'}; measure again here")
    else:
        found = best_caps(read_bench(farming.bench)).get(copies)
        if found is None:
            raise NotFound(
                f"{farming.bench} holds no measurement of {copies} copies under MPS",
                f"measure it: gpushare bench --copies {copies} --ways mps,mps:200/n -- CMD",
                code="not_measured",
            )
    if not found.best:
        note(f"another way than MPS was faster for {copies} copies (gpushare bench); this is the best cap under MPS")
    return found.threads_percent


def _most_at_once(host: Host, device: Device, copies: int) -> int | None:
    from gpushare.host.mps_program import max_clients, probe_version

    if copies <= 16:
        return None
    return max_clients(probe_version(host.programs), host.nvml.compute_capability(device.gpu.index))


def _say_first(host: Host, device: Device, options: FarmOptions) -> None:
    from gpushare.actions.farm_room import check_room
    from gpushare.units import format_bytes, format_copies, format_percent

    threads = (
        "no thread cap"
        if options.limits.threads_percent is None
        else f"cap {format_percent(options.limits.threads_percent)}"
    )
    memory = options.limits.memory_limit_bytes
    limit = "no memory limit" if memory is None else f"memory limit {format_bytes(memory)}"
    note(f"{format_copies(options.copies)} on {device.title}, each with {threads} and {limit}")
    fitting = check_room(host, device, options)
    bounds = [bound for bound in (fitting, options.at_once) if bound is not None and bound < options.copies]
    if bounds:
        note(f"{min(bounds)} run at once; the others start as these end")


class _Lines(FarmReporter):
    """Prefixed lines of the copies on stdout (on stderr beside a JSON document), and one progress line on a terminal."""

    def __init__(self, copies: int) -> None:
        from gpushare.show.result import OutputFormat

        documents = {OutputFormat.JSON, OutputFormat.YAML, OutputFormat.CSV}
        self._stream = sys.stderr if settings.output in documents else sys.stdout
        self._width = len(str(copies - 1))
        self._drawn = False
        self._next = 0.0

    def line(self, copy: int, text: str) -> None:
        from gpushare.show.text import put, visible

        self.clear()
        put(self._stream, f"[{copy:{self._width}}] {visible(text)}\n")

    def ended(self, copy: Copy, *, again: bool) -> None:
        if copy.failure is not None:
            self.clear()
            more = "; it is started again" if again else ""
            note(f"copy {copy.number} failed: {copy.failure}{more}")

    def left_behind(self, copy: Copy, pids: Sequence[int]) -> None:
        self.clear()
        named = ", ".join(map(str, pids))
        note(f"copy {copy.number} left process {named} behind, which was ended; it must stay in the foreground")

    def progress(self, copies: Sequence[Copy], seconds: float) -> None:
        if settings.quiet or not sys.stderr.isatty() or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_SECONDS
        counts = {
            state: sum(copy.state == state for copy in copies) for state in ("running", "waiting", "done", "failed")
        }
        words = [f"{count} {state}" for state, count in counts.items() if count]
        sys.stderr.write(f"\r\x1b[K{', '.join(words)}, {seconds:.0f} s")
        sys.stderr.flush()
        self._drawn = True

    def clear(self) -> None:
        """Take the progress line away."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


def _finished(result: FarmResult, options: FarmOptions) -> Any:
    from gpushare.show.farm import farm_result

    errors: list[GpushareError] = [
        OperationFailed(
            f"copy {copy.number}: {copy.failure}",
            copy.hint or f"see its output: {copy.log}"
            if copy.hint or copy.log
            else "keep its output: --logs DIR; start it again by itself: --restart 1",
            code="copy_failed",
        )
        for copy in result.failed
    ]
    unproved = [str(copy.number) for copy in result.copies if copy.attached is False]
    notes = []
    if unproved:
        notes.append(f"not seen in MPS, so that their limits held is not proved: copy {', '.join(unproved)}")
    data = {
        "seconds": round(result.seconds, 2),
        "threads_percent": options.limits.threads_percent,
        "memory_limit_bytes": options.limits.memory_limit_bytes,
        "copies": [
            {
                "copy": copy.number,
                "state": copy.state,
                "exit_code": _as_of_run(copy.exit_code),
                "seconds": round(copy.seconds, 2),
                "tries": copy.tries,
                "attached": copy.attached,
                "failure": copy.failure,
                "left_behind": list(copy.left_behind),
                "log": copy.log,
            }
            for copy in result.copies
        ],
    }
    code = 1 if result.failed else 0
    return farm_result(data, errors, notes, code if result.ended_by is None else 128 + result.ended_by)


def _planned(host: Host, device: Device, command: Sequence[str], options: FarmOptions) -> Any:
    from gpushare.actions.farm import numbered
    from gpushare.actions.farm_room import check_room
    from gpushare.actions.plan import Step
    from gpushare.actions.run_environment import client_environment
    from gpushare.actions.share import check_mps_share
    from gpushare.cli.run import command_line
    from gpushare.host.mps_home import home_of
    from gpushare.show.plan import plan_result

    check_mps_share(host, device, numbered(command, 0)[0], options.limits)
    check_room(host, device, options)
    home = home_of(host.run_directory, device.uuid)
    steps = []
    for number in range(options.copies):
        environment = {**client_environment({}, device, home, options.limits), "GPUSHARE_COPY": str(number)}
        line = command_line(environment, numbered(command, number))
        steps.append(
            Step(
                what=f"run copy {number} as a client of the MPS daemon of {device.title}", command=line, do=lambda: None
            )
        )
    return plan_result("run", steps, dry_run=True)


def _as_of_run(status: int | None) -> int | None:
    """Return the exit code of a copy as `gpushare run` and shells give it: 128 + N where signal N ended it."""
    return 128 - status if status is not None and status < 0 else status
