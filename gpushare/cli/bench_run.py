"""A benchmark carried out from the command line, for `gpushare bench` and `gpushare advise --measure`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gpushare.cli.common import note, settings
from gpushare.errors import GpushareError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpushare.host.host import Host
    from gpushare.measure.bench import Measurement
    from gpushare.measure.session import Prepared
    from gpushare.selection import Device


def carried_out(
    host: Host, device: Device, prepared: Prepared, workload: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Measurement, int | None]:
    """Measure with progress on stderr; return the document, what was measured, and the signal that ended it early.

    Raises:
        GpushareError: as `session.measure`.
    """
    from gpushare.cli.bench_progress import progress_line
    from gpushare.host.snapshot import BLIND
    from gpushare.measure.bench_data import Header, bench_data
    from gpushare.measure.session import measure

    started = time.time()
    with progress_line(quiet=settings.quiet) as progress:
        measurement, number = measure(host, device, prepared, progress)
    blind = (BLIND,) if host.processes.namespace_is_host() is False else ()
    header = Header(
        host=host.spec,
        driver=host.nvml.driver_version(),
        device=device,
        started_at=started,
        workload=workload,
        notes=(*blind, *prepared.notes),
    )
    return bench_data(header, measurement), measurement, number


def keep_caps(host: Host, device: Device, command: Sequence[str], data: Mapping[str, Any]) -> None:
    """Keep the caps that were found, for `gpushare run --copies`: that they cannot be kept does not fail a benchmark."""
    from gpushare.host.benched import keep_benched
    from gpushare.measure.bench_caps import best_caps

    caps = best_caps(data)
    if not caps:
        return
    try:
        keep_benched(host, device, command, caps)
    except GpushareError as error:
        note(f"the caps are not kept for gpushare run --copies: {error.message}")


def planned(prepared: Prepared, command: str = "bench") -> Any:
    """Return what would be run, as a plan of a command."""
    import shlex

    from gpushare.actions.plan import Step
    from gpushare.measure.bench import schedule
    from gpushare.show.plan import plan_result
    from gpushare.units import format_copies

    line = shlex.join(prepared.settings.argv)
    steps = [
        Step(
            what=f"run {format_copies(number)} under {way.name}, {prepared.settings.repeat} times",
            command=line,
            do=lambda: None,
        )
        for way, number in schedule(prepared.settings)
    ]
    notes = [
        f"left out: {one.way}{'' if one.copies is None else f' {one.copies}'}: {one.reason}"
        for one in prepared.left_out
    ]
    return plan_result(command, steps, dry_run=True, notes=notes)


def bench_notes(data: Mapping[str, Any]) -> list[str]:
    """Return what to know of the figures of a benchmark, from its document."""
    from gpushare.cli.measured import others_note
    from gpushare.units import format_copies

    notes = [*data["notes"]]
    notes += [
        f"{cell['way']}, {format_copies(cell['copies'])}: {failure}"
        for cell in data["cells"]
        for failure in cell["failures"]
    ]
    if data["others"]:
        names = data.get("other_names", {})
        notes.append(others_note({pid: names.get(str(pid), "") for pid in data["others"]}))
    if data["repeat"] == 1:
        notes.append("each was run once: what differs cannot be told from noise; give --repeat 3 or more")
    if data["metric"]["pattern"] is None:
        notes.append("start-up is counted; for a program that runs long give --metric and --for")
    return notes
