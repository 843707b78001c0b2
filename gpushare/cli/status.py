"""``gpushare status``: GPUs, how they are shared, processes; read by `gpushare/snapshot.py`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpushare.base.errors import BadUsage
from gpushare.cli.options import Command, GpuOption, settings

if TYPE_CHECKING:
    from gpushare.base.model import Gpu, GpuProcess, Snapshot
    from gpushare.host.host import Host


# The interval of -w without a number.
_SECONDS: Final = "2"


class WatchCommand(Command):
    """Takes ``-w`` without a number, and never the next word for one."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the words, with the interval after each ``-w`` that has none."""
        words: list[str] = []
        for place, word in enumerate(args):
            words.append(word)
            following = args[place + 1 : place + 2]
            if re.fullmatch(r"-[aqv]*w|--watch", word) and not re.match(r"[-+]?\.?\d", "".join(following)):
                words.append(_SECONDS)
        return super().make_context(info_name, words, parent, **extra)


WatchOption = Annotated[
    str | None,
    typer.Option("-w", "--watch", metavar="[SECS]", help="Look again every SECS seconds (alone: 2), until Ctrl-C."),
]


def register(app: typer.Typer) -> None:
    app.command("status", cls=WatchCommand, short_help="Show GPUs, how they are shared, limits and processes.")(status)


def status(
    gpu: GpuOption = None,
    watch: WatchOption = None,
    legend: Annotated[bool, typer.Option("--legend", help="Explain the column heads instead.")] = False,
) -> Any:
    """Show the GPUs, how they are shared, MPS daemons with limits and clients, and the processes on them.

    GPU utilization is the time in which some kernel ran, not a share of the GPU: one small program can
    show 100 %. Under MPS the driver counts the work of all clients for the server, so a client's SM % is
    unknown. "-" is unknown, never zero. With -w, time-slice and MPS daemons are read every 5 seconds.
    """
    from gpushare.show.result import OutputFormat
    from gpushare.show.status import status_result
    from gpushare.snapshot import LastWork, Observer

    if legend:
        from gpushare.show.legend import legend_result

        return legend_result()
    host = settings.connect()
    power = settings.output in {OutputFormat.JSON, OutputFormat.YAML}
    observer, work = Observer(host, strangers=settings.verbose, power=power), LastWork(host)

    def look() -> Any:
        seen = with_memory(host, with_leases(host, work.look(of_gpus(observer.look(), gpu))))
        return status_result(with_jobs(host, seen))

    if watch is None:
        return look()
    from gpushare.show.live import watch as keep_watching

    # Look once first: a wrong GPU or a missing driver ends the command instead of repeating.
    seconds = interval(watch)
    look()
    keep_watching(look, seconds=seconds, stream=sys.stdout, output=settings.output, quiet=settings.quiet)
    return 0


def with_jobs(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the jobs that processes belong to, as `gpushare jobs` lists them."""
    from gpushare.host.users import has_records

    if not any(gpu.processes for gpu in snapshot.gpus) or not has_records(host, "jobs"):
        return snapshot
    from gpushare.run.listing import present_jobs

    jobs = {pid: job for job in present_jobs(host, snapshot) if job.role is not None for pid in job.processes}

    def with_job(process: GpuProcess) -> GpuProcess:
        job = jobs.get(process.pid)
        if job is None:
            return process
        slice_us = job.slice_us if process.slice_us is None else process.slice_us
        limit = job.threads_percent
        return replace(process, job=job.name, role=job.role, way=job.way, threads_percent=limit, slice_us=slice_us)

    gpus = (
        gpu if gpu.processes is None else replace(gpu, processes=tuple(map(with_job, gpu.processes)))
        for gpu in snapshot.gpus
    )
    return replace(snapshot, gpus=tuple(gpus))


# As `memory.ledger.PREFIX`, which most hosts need not load.
LEDGER: Final = "gpushare-memory-"


# As `memory.leases.PREFIX`.
LEASES: Final = "gpushare-lease-"


def with_leases(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the GPUs that users have reserved."""
    from gpushare.snapshot import has_claims

    if not has_claims(host, LEASES):
        return snapshot
    from gpushare.memory.leases import leases

    uuids = {gpu.uuid for gpu in snapshot.gpus}
    return replace(snapshot, leases=tuple(one for one in leases(host).values() if one.gpu_uuid in uuids))


def with_memory(host: Host, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the ledger of memory and the jobs that are swapped out, if there are any."""
    from gpushare.host.users import has_records
    from gpushare.snapshot import has_claims

    if not has_claims(host, LEDGER) and not has_records(host, "swap"):
        return replace(snapshot, gpus=tuple(map(_without_reservations, snapshot.gpus)))
    from gpushare.memory.look import with_ledger

    return with_ledger(host, snapshot)


def _without_reservations(gpu: Gpu) -> Gpu:
    if gpu.error is not None:
        return gpu
    return replace(
        gpu,
        jobs_reserved_bytes=0,
        mig_instances=tuple(replace(one, jobs_reserved_bytes=0) for one in gpu.mig_instances),
    )


def interval(text: str) -> float:
    from gpushare.base.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds < 0.1:
        raise BadUsage(f"the interval {text} is too short", "give at least 0.1s, for example 1s", code="bad_interval")
    return seconds


def of_gpus(snapshot: Snapshot, gpu: str | None) -> Snapshot:
    """Return the snapshot with only the named GPUs and their daemons."""
    if gpu is None:
        return snapshot
    from gpushare.base.selection import select

    devices = select(gpu, snapshot.gpus)
    indexes = list(dict.fromkeys(device.gpu.index for device in devices))
    wanted = {device.uuid for device in devices if device.mig is not None}
    gpus = [next(found for found in snapshot.gpus if found.index == index) for index in indexes]
    if wanted:
        gpus = [_of_instances(found, wanted) for found in gpus]
    daemons = [
        daemon
        for daemon in snapshot.daemons
        if set(daemon.gpu_indexes) & set(indexes)
        and (not wanted or daemon.device_uuid is None or daemon.device_uuid in wanted)
    ]
    return replace(snapshot, gpus=tuple(gpus), daemons=tuple(daemons))


def _of_instances(gpu: Any, uuids: set[str]) -> Any:
    instances = tuple(mig for mig in gpu.mig_instances if mig.uuid in uuids)
    if not instances:
        return gpu
    on = {(mig.gpu_instance_id, mig.compute_instance_id) for mig in instances}
    processes = (
        None
        if gpu.processes is None
        else tuple(process for process in gpu.processes if (process.gpu_instance_id, process.compute_instance_id) in on)
    )
    return replace(gpu, mig_instances=instances, processes=processes)
