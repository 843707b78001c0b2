"""``gpushare timeslice``: time-slices of processes, and the level of a GPU; done by `gpushare/timeslice/`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from gpushare.base.errors import BadCombination, BadUsage, GpushareError, InUse
from gpushare.base.model import ComputeMode, TimeSlice
from gpushare.base.selection import Device, select, select_for_change
from gpushare.base.units import format_slice, parse_slice, quoted
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    GPU_OPTION,
    GROUP,
    WHOLE_GPU_OPTION,
    AskingCommand,
    ChangingCommand,
    Command,
    Refused,
    argument,
    ask_and_carry_out,
    gpus_of,
    option,
    refuse,
    settings,
)
from gpushare.host.compute_mode import need_root
from gpushare.host.host import Host
from gpushare.host.process import info_of
from gpushare.host.smi import parse_level, policies_of
from gpushare.plan import Plan
from gpushare.run.jobs import consent_to, find_job, gpu_processes, job_names
from gpushare.show.result import Column, Result, Table
from gpushare.show.status import gpu_errors
from gpushare.snapshot import BLIND
from gpushare.timeslice.policy import parse_level_or_raise, plan_level, plan_reset
from gpushare.timeslice.rules import slice_of_weight_text
from gpushare.timeslice.slices import Reading, check_slice, plan_restore, plan_slice, read_slices, slice_records

if TYPE_CHECKING:
    from gpushare.timeslice.keep import Policy

app = typer.Typer(
    **GROUP,
    help="Time-slices: how long a program runs before the GPU switches to the next one, per process or per GPU.",
)


@dataclass(frozen=True, kw_only=True)
class GpuSlices:
    """The time-slices of one GPU."""

    gpu: int
    name: str | None
    # The level; null: unknown.
    time_slice: TimeSlice | None
    compute_mode: ComputeMode | None
    # Whether the GPU has time-slice levels.
    supported: bool | None
    uuid: str | None
    # The time-slice of a process whose slice was never set.
    default_slice_us: int | None


@dataclass(frozen=True, kw_only=True)
class ProcessSlices:
    """The time-slices of one process on one GPU."""

    gpu: int
    pid: int
    job: str | None
    user: str | None
    name: str | None
    # Null: its contexts have several, or none could be read.
    slice_us: int | None
    slices_us: tuple[int, ...]
    # The slice that gpushare set; null: it set none.
    set_us: int | None
    # The slice before that.
    before_us: int | None
    # Whether it is an MPS client: all clients share the slice of their server.
    under_mps: bool
    # Why the slices are unknown: the code of the error.
    reason: str | None
    # The text of that error.
    message: str | None


@dataclass(frozen=True, kw_only=True)
class TimesliceAnswer:
    """The answer of `timeslice show`."""

    gpus: tuple[GpuSlices, ...]
    processes: tuple[ProcessSlices, ...]


def show(gpu: str | None = GPU_OPTION) -> Any:
    """Show the time-slice level and the compute mode of each GPU, and the time-slice of each process on it.

    The slices are read from the driver, which takes about 0.1 s per process: your own processes', or as root all.
    A slice is how long the GPU runs a CUDA context while others wait. A process whose slice was
    never set has the default of this GPU (2.048ms on an H100 and an H200; 1.024ms after a swap or a move). NVIDIA does not publish the levels in
    milliseconds. MPS clients share the time-slice of their server.
    """
    host = settings.connect()
    try:
        # nvidia-smi runs while NVML is read.
        pending = host.policy.start()
    except GpushareError:
        # Without a driver there is no nvidia-smi either, and NVML says the reason.
        gpus_of(host)
        raise
    devices = select(gpu, gpus_of(host))
    levels = policies_of(pending.result())
    processes = _process_rows(host, devices)
    rows = [
        GpuSlices(
            gpu=device.gpu.index,
            name=device.gpu.name,
            time_slice=levels.get(device.gpu.index),
            compute_mode=device.gpu.compute_mode,
            supported=None if device.gpu.error else device.gpu.index in levels,
            uuid=device.gpu.uuid,
            default_slice_us=default_slice(process for process in processes if process.gpu == device.gpu.index),
        )
        for device in devices
    ]
    columns = (
        Column("gpu", "GPU", right=True),
        Column("name", "name", rank=3),
        Column("time_slice", "level"),
        Column("default_slice_us", "default slice", right=True, rank=1, optional=True, format=format_slice),
        Column("compute_mode", "compute mode", rank=2),
        Column("uuid", "UUID", whole=True, rank=4),
    )
    tables = [Table(name="gpus", columns=columns, rows=tuple(rows), empty="this host has no GPU")]
    if processes:
        tables.append(_process_table(processes))
    blind = (BLIND,) if host.processes.namespace_is_host() is False else ()
    without = [str(row.gpu) for row in rows if row.supported is False]
    notes = (f"the driver lists no time-slice for GPU {', '.join(without)}",) if without else ()
    return Result(
        data=TimesliceAnswer(gpus=tuple(rows), processes=tuple(processes)),
        tables=tuple(tables),
        csv=tables[0],
        notes=(*notes, *_unknown_slice_notes(processes), *blind),
        errors=gpu_errors(device.gpu for device in devices),
    )


def _process_rows(host: Host, devices: Sequence[Device]) -> list[ProcessSlices]:
    """Return the compute processes of GPUs with their slices; MPS clients have their server's."""
    gpus = {device.gpu.index: device.gpu for device in devices}
    # Each process once per GPU.
    processes = [
        (gpu, process)
        for gpu in gpus.values()
        for process in {each.pid: each for each in gpu.processes or () if each.compute or each.mps}.values()
    ]
    if not processes:
        return []
    names = job_names(host, {process.pid for _, process in processes})
    records = slice_records(host)
    readings: dict[int, Reading] = {}
    rows = []
    with host.open_channels() as control:
        for gpu, process in processes:
            pid = process.pid
            info = info_of(host.processes, pid)
            if pid not in readings:
                readings[pid] = read_slices(control, pid, None)
            reading = readings[pid]
            record = records.get(pid)
            slices = reading.on(gpu.uuid)
            rows.append(
                ProcessSlices(
                    gpu=gpu.index,
                    pid=pid,
                    job=names.get(pid, None if record is None else record.job),
                    user=info.user,
                    name=info.name,
                    slice_us=slices[0] if len({*slices}) == 1 else None,
                    slices_us=tuple(slices),
                    set_us=None if record is None else record.slice_us,
                    before_us=None if record is None else min(record.slices_before, default=None),
                    under_mps=reading.under_mps or process.mps,
                    reason=None if reading.error is None else reading.error.code,
                    message=None if reading.error is None else reading.error.message,
                )
            )
    return rows


def default_slice(rows: Iterable[ProcessSlices]) -> int | None:
    """Return the slice that all processes have unless gpushare sets another; None: no process, or they differ."""
    slices = {row.slice_us if row.set_us is None else row.before_us for row in rows if not row.under_mps}
    slices.discard(None)
    return slices.pop() if len(slices) == 1 else None


def _process_table(rows: Sequence[ProcessSlices]) -> Table:
    """Return the table of processes with their slices, and who has set them."""
    columns = (
        Column("gpu", "GPU", right=True, group=True),
        Column("pid", "PID", right=True),
        Column("job", "job", rank=1, optional=True),
        Column("user", "user", rank=3),
        Column("name", "program", rank=4, least=8),
        Column("slices_us", "slice", right=True, format=_slices_text),
        Column("how", "set by", rank=2, of=_setter_text),
    )
    return Table(name="processes", title="processes", columns=columns, rows=tuple(rows))


def _slices_text(slices_us: Sequence[int]) -> str:
    return ", ".join(map(format_slice, dict.fromkeys(slices_us))) or "-"


def _setter_text(row: ProcessSlices) -> str:
    """Return who has set the slice of a process: gpushare, another program, its MPS server, or nobody."""
    if row.under_mps:
        return "MPS server"
    if row.set_us is None:
        return "-" if row.reason else "default"
    changed = row.slices_us and set(row.slices_us) != {row.set_us}
    return f"another program (gpushare set {format_slice(row.set_us)})" if changed else "gpushare"


def _unknown_slice_notes(rows: Sequence[ProcessSlices]) -> list[str]:
    """Return why slices are unknown: one line per reason."""
    rows_by_reason: dict[str, list[ProcessSlices]] = {}
    for row in rows:
        if row.reason:
            rows_by_reason.setdefault(row.reason, []).append(row)
    return [
        f"slice unknown: {group[0].message}" + (f" (and {len(group) - 1} more)" if len(group) > 1 else "")
        for group in rows_by_reason.values()
    ]


def set_slice(
    level: str = argument(
        "TIME|LEVEL", "With a JOB its slice: 500us, or 3x the usual. Else default, short, medium or long.", default=...
    ),
    job: str | None = argument("[JOB]", "PID or name of a job."),
    gpu: str | None = WHOLE_GPU_OPTION,
) -> Any:
    """Set the time-slice of a job, or the time-slice level of GPUs.

    With a JOB: how long the GPU runs each of its CUDA contexts while others wait, from 20us to 30ms, as root up to 1s.
    This takes effect at once, is read back, and ends with the process. For your own jobs it needs no root, except where
    Yama restricts access, as on Ubuntu. A short slice for a job helps the others on the GPU that must answer fast. The
    shorter the slices, the more time two jobs that always have work lose to the switches. 3x is three times the usual
    slice, as with gpushare run --weight 3.

    Without a JOB: it sets the level of whole GPUs, and compute mode default if another mode is in the way. Needs root;
    both are lost at a reboot, and running programs may keep the old level.
    """
    refuse((Refused("--gpu", "JOB", "the slice of a job applies on all its GPUs", "500us JOB"),))
    if job is not None:
        return _set_slice_of_job(level, job)
    if level[:1].isdigit() and level.endswith("s"):
        raise BadUsage(
            f"{quoted(level)} is a time-slice, and no job is named", f"name one: {_EXAMPLE}", code="no_job_named"
        )
    wanted = parse_level_or_raise(level)
    host = settings.connect()
    devices = select_for_change(gpu, gpus_of(host))
    try:
        plan = plan_level(host, devices, wanted)
    except InUse:
        if not settings.dry_run:
            need_root(host, "setting the time-slice of a GPU")
        raise
    return ask_and_carry_out(plan)


_EXAMPLE = "gpushare timeslice set 500us JOB"


def _set_slice_of_job(text: str, job_text: str) -> Any:
    """Set the slice of a job's processes to a time (``500us``) or to a multiple of the default slice (``3x``)."""
    if parse_level(text) is not None:
        raise BadCombination(
            f"{quoted(text)} is a level, which is set for a whole GPU",
            "give a job a time: gpushare timeslice set 500us JOB; or set the level: gpushare timeslice set short -g 0",
        )
    if re.fullmatch(r"[\d.]*\dx", text, re.ASCII):
        microseconds = slice_of_weight_text(text[:-1])
    else:
        microseconds = check_slice(parse_slice(text))
    return _change_slices(job_text, partial(plan_slice, microseconds=microseconds))


def _change_slices(text: str, plan: Callable[..., Plan]) -> Any:
    """Plan a change of a job's processes (``plan``: `plan_slice` or `plan_restore`), ask for consent and carry it out."""
    host = settings.connect()
    with host.open_channels() as control:
        # The process that calls the driver loads while the job is looked up.
        control.start()

        def plan_now() -> Plan:
            """Return the plan for the processes that the job has now, with what the user is asked."""
            job = find_job(host, text)
            action = "changes the time-slice of"
            # Another user's job is refused before its processes are looked for; what to ask is known only with them.
            consent_to(host, job, action)
            processes = gpu_processes(host, job)
            consent = consent_to(host, job, action, [process.pid for process in processes])
            probe = not settings.dry_run
            return plan(host, control, job, processes, consent=consent, probe=probe)

        first = plan_now()
        # While a question is open, the job may start further processes.
        return ask_and_carry_out(first, replan=plan_now if first.consent else None)


def reset(job: str | None = argument("[JOB]", "PID or name of a job."), gpu: str | None = WHOLE_GPU_OPTION) -> Any:
    """Give a job the time-slice that it had before gpushare set one; without a JOB, set GPUs to level default.

    Without a JOB it also restores the compute mode from before `timeslice set`. That needs root.
    """
    refuse((Refused("--gpu", "JOB", "the slice of a job applies on all its GPUs", "JOB"),))
    if job is not None:
        return _change_slices(job, plan_restore)
    host = settings.connect()
    return ask_and_carry_out(plan_reset(host, select_for_change(gpu, gpus_of(host))))


# Twenty files more are loaded in the functions below: `timeslice set JOB` needs none of them.


def keep(
    file: str | None = option("-f --file", "FILE", "gpushare.yaml with rules. [default: the last applied file]"),
) -> Any:
    """Keep the time-slice of each GPU process as the rules in gpushare.yaml set it, until Ctrl-C or SIGTERM.

    The first rule under 'slices' that matches a process wins. A new process is seen within a second. A slice that
    someone else has set since is left alone, and reported. MPS clients share the slice of their server, and are
    skipped. At the end it restores every slice; at SIGHUP it reads the file again. As root it serves the processes of
    all users, otherwise your own. The file must be root's (or, for your own processes, yours), and not writable by
    others. `gpushare export systemd` writes a unit.
    """
    from gpushare.hostfile.load import applied_path
    from gpushare.show.keep import KeepReport, planned_result
    from gpushare.timeslice.keep import keep as keep_slices
    from gpushare.timeslice.keep import verdicts

    host = settings.connect()
    path = str(applied_path(host)) if file is None else file
    policy = _read_policy(path)
    if settings.dry_run:
        return planned_result(verdicts(host, policy), path)
    printed = KeepReport(sys.stdout, settings.output, quiet=settings.quiet)
    printed.follows(path, len(policy.rules))

    def read_again() -> Policy:
        """Return the policy of the file as it is now, and report it or its error."""
        try:
            policy = _read_policy(path)
        except GpushareError as error:
            printed.failed(error)
            raise
        printed.follows(path, len(policy.rules))
        return policy

    keep_slices(host, policy, reload=read_again, say=printed.events)
    return 0


def _read_policy(path: str) -> Policy:
    """Return the policy of a file's rules. Raises BadUsage: it has none."""
    from gpushare.hostfile.load import load_own, names_in
    from gpushare.timeslice.keep import Policy

    wanted = load_own(path)
    if not wanted.rules:
        raise BadUsage(
            f"{path} has no rules for time-slices",
            "add them under 'slices', or give another file: -f FILE",
            code="no_rules",
        )
    return Policy(wanted.rules, names_in(wanted))


app.command(cls=Command, short_help="Show the level of each GPU and the slice of each process.")(show)
app.command("set", cls=AskingCommand, short_help="Set the slice of a job, or the level of GPUs.")(set_slice)
app.command(cls=AskingCommand, short_help="Restore the slice of a job, or the level.")(reset)
app.command(cls=ChangingCommand, short_help="Follow the rules of gpushare.yaml for single processes.")(keep)
