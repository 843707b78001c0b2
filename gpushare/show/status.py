"""``gpushare status``: a snapshot as data, as tables for people and as one rectangle for CSV."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from gpushare.base.errors import ExitCode, GpuLost, GpushareError, OperationFailed
from gpushare.base.model import (
    HIDDEN_DEVICES,
    MUCH_UNLISTED,
    Gpu,
    GpuLease,
    GpuProcess,
    LinePlace,
    ListedJob,
    MigInstance,
    MpsDaemon,
    Priority,
    Snapshot,
    VgpuSession,
    WayInForce,
    sharing_now,
)
from gpushare.base.units import (
    GIB,
    MIB,
    WORTH_NAMING,
    counted,
    first_few,
    format_bytes,
    format_duration,
    format_percent,
    format_slice,
    ranges,
)
from gpushare.base.values import dataclass
from gpushare.show.result import Column, Result, Table, format_date, plain_value, record_table

Row = Mapping[str, Any]

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_HEXADECIMAL: Final = frozenset("0123456789abcdef")
# MPS daemons of others that are shown.
_MOST_OTHERS: Final = 10
# Waiting jobs that are shown.
_MOST_WAITING: Final = 10
_ALARMS: Final = {"lost": "red", "error": "red", "no answer": "red", "FAULT": "red", "unknown": "yellow"}


def people_tables(snapshot: Snapshot) -> tuple[Table, ...]:
    """Return the tables that have rows; GPUs and processes always."""
    gpus = _gpu_table(snapshot)
    processes = _process_table(snapshot)
    tables = (
        gpus,
        _instance_table(snapshot),
        daemon_table(snapshot),
        _client_table(snapshot),
        _vgpu_table(snapshot),
        processes,
        waiting_table(snapshot.waiting_jobs[:_MOST_WAITING]),
        _swapped_table(snapshot),
        lease_table(snapshot.leases, snapshot.gpus),
    )
    return tuple(table for table in tables if table.rows or table is gpus or table is processes)


def _alarm_style(value: Any) -> str | None:
    return _ALARMS.get(value) if isinstance(value, str) else None


def _zero_style(value: Any) -> str | None:
    return "dim" if value == 0 else None


def used_of_total(value: tuple[int | None, int | None] | None) -> str:
    """Return memory as ``23.4 / 79.6 GiB``, both in the unit of the total."""
    if value is None or value == (None, None):
        return "-"
    used, total = value
    if total is None:
        return f"{format_bytes(used)} / -"
    unit = GIB if total >= GIB else MIB
    unit_name = "GiB" if total >= GIB else "MiB"
    if used is None:
        used_number = "-"
    elif 0 < used < unit // 20:
        # A few hundred MiB must not look like nothing.
        used_number = "<0.1"
    else:
        used_number = f"{used / unit:.1f}"
    return f"{used_number} / {total / unit:.1f} {unit_name}"


def age(seconds: float | None) -> str:
    """Return an age in its largest unit: ``42s``, ``3m``, ``5h``, ``2d``; ``-`` when unknown."""
    if seconds is None:
        return "-"
    whole = max(int(seconds), 0)
    for size, letter in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "m")):
        if whole >= size:
            return f"{whole // size}{letter}"
    return f"{whole}s"


def command_of(process: GpuProcess) -> str | None:
    """Return the command line, quoted for a shell, or the program's name."""
    if not process.command_line:
        return process.name
    return shlex.join(process.command_line)


def is_lost(reason: str) -> bool:
    """Return whether the text of an NVML error is about a lost GPU (NVML_ERROR_GPU_IS_LOST)."""
    return "lost" in reason.lower() or "fallen off the bus" in reason.lower()


def silent_word(reason: str) -> str:
    """Return what tables show for a GPU that does not answer: the same word in every command."""
    return "lost" if is_lost(reason) else "error"


def container_name(value: Any) -> str:
    """Return a container's name; of a full id the 12 digits that ``docker ps`` shows."""
    text = plain_value(value)
    return text[:12] if len(text) == 64 and set(text) <= _HEXADECIMAL else text


def _model_name(value: Any) -> str:
    return plain_value(value).removeprefix("NVIDIA ")


def _gpu_column(**more: Any) -> Column:
    return Column("gpu", "GPU", right=True, **more)


# The index of a row's GPU.
_of_gpu: Final = attrgetter("gpu_index")
# Who is on a GPU is never dropped.
_USER: Final = Column("user", "user", least=12)


def _memory(key: str, title: str, rank: int = 0, **more: Any) -> Column:
    return Column(key, title, right=True, rank=rank, format=format_bytes, **more)


def _memory_of(row: Any) -> tuple[int | None, int | None]:
    return (row.memory_used_bytes, row.memory_total_bytes)


def _reserved_bytes(row: Any) -> int | None:
    return row.jobs_reserved_bytes or None


def _percent(key: str, title: str, rank: int = 0) -> Column:
    return Column(key, title, right=True, rank=rank, format=format_percent, style=_zero_style)


def _gpu_table(snapshot: Snapshot) -> Table:
    """Return the table of GPUs: sharing, memory, utilization, modes; idle GPUs may share a line."""

    def sharing_word(gpu: Gpu) -> str:
        """Return how a GPU is shared now, or that it does not answer."""
        if gpu.error is not None:
            return silent_word(gpu.error)
        way = sharing_now(gpu, snapshot.daemons)
        return "unknown" if way is None else way.label

    columns = (
        _gpu_column(of=lambda gpu: gpu.index),
        Column("name", "name", rank=2, format=_model_name),
        Column("sharing", "sharing", of=sharing_word, style=_alarm_style),
        Column("memory", "memory", right=True, of=_memory_of, format=used_of_total),
        _memory("reserved", "reserved", rank=1, of=_reserved_bytes, optional=True),
        _percent("utilization_percent", "util", rank=1),
        Column(
            "processes",
            "procs",
            right=True,
            rank=3,
            of=lambda gpu: None if gpu.processes is None else len(gpu.processes),
            style=_zero_style,
        ),
        Column("time_slice", "time-slice", rank=4),
        Column("compute_mode", "compute mode", rank=5),
        Column("mig", "MIG", rank=6, of=_mig_mode),
        Column("pci_bus_id", "PCI bus id", rank=7, whole=True),
        Column("uuid", "UUID", rank=8, whole=True),
    )
    return Table(
        name="gpus",
        title="GPUs",
        columns=columns,
        rows=snapshot.gpus,
        empty="no GPU is visible",
        idle=lambda gpu: (
            gpu.processes == ()
            and not (gpu.utilization_percent or gpu.jobs_reserved_bytes)
            and sharing_word(gpu) not in _ALARMS
        ),
        folded=lambda idle: f"idle: GPU {ranges(gpu.index for gpu in idle)}",
    )


def _mig_mode(gpu: Gpu) -> str | None:
    """Return the MIG mode of a GPU in words: no, on, off, and what is pending; None: unknown."""
    if gpu.mig_capable is False:
        return "no"
    if gpu.mig_enabled is None:
        return None
    now = "on" if gpu.mig_enabled else "off"
    if gpu.mig_pending is None or gpu.mig_pending == gpu.mig_enabled:
        return now
    return f"{now} → {'on' if gpu.mig_pending else 'off'} at reset"


def _instance_table(snapshot: Snapshot) -> Table:
    """Return the table of MIG instances with their memory and number of processes; idle ones may share a line."""
    rows = [
        {
            **vars(instance),
            "gpu": gpu.index,
            "memory": _memory_of(instance),
            "reserved": _reserved_bytes(instance),
            "processes": None if gpu.processes is None else sum(map(instance.has, gpu.processes)),
        }
        for gpu in snapshot.gpus
        for instance in gpu.mig_instances
    ]
    columns = (
        _gpu_column(group=True),
        Column("gpu_instance_id", "GI", right=True),
        Column("compute_instance_id", "CI", right=True),
        Column("profile", "profile"),
        Column("name", "name", optional=True),
        Column("multiprocessors", "SMs", right=True, rank=2),
        Column("memory", "memory", right=True, rank=1, format=used_of_total),
        _memory("reserved", "reserved", rank=1, optional=True),
        Column("processes", "procs", right=True, rank=3, style=_zero_style),
        Column("uuid", "UUID", rank=4, whole=True),
    )
    return Table(
        name="mig_instances",
        title="MIG instances",
        columns=columns,
        rows=tuple(rows),
        idle=lambda row: row["processes"] == 0 and not row["reserved"],
        folded=lambda idle: f"idle: {len(idle)} instances on GPU {ranges(row['gpu'] for row in idle)}",
    )


def daemon_table(snapshot: Snapshot) -> Table:
    """Return the table of MPS daemons with their limits and numbers of clients."""
    columns = (
        _gpu_column(of=_of_gpu),
        Column("pid", "pid", right=True),
        _USER,
        Column(
            "started_by",
            "started by",
            rank=5,
            of=lambda daemon: "gpushare run" if daemon.transient else "gpushare" if daemon.ours else "others",
        ),
        Column("status", "server", of=_server_word, style=_alarm_style),
        Column("clients", "clients", right=True, rank=1, of=_clients_text),
        _percent("threads_percent", "threads", rank=2),
        _memory("memory_limit_bytes", "memory limit", rank=3),
        Column("priority", "priority", rank=6),
        Column("pipe_directory", "pipe directory", rank=7, whole=True),
        Column("device_uuid", "device", rank=8, whole=True),
    )
    return Table(name="mps_daemons", title="MPS daemons", columns=columns, rows=tuple(_shown_daemons(snapshot)))


def _shown_daemons(snapshot: Snapshot) -> list[MpsDaemon]:
    """Return the daemons that are shown: all of gpushare, but few of others, because any user can start hundreds."""
    others = [daemon for daemon in snapshot.daemons if not daemon.ours]
    # Those that could be asked come first, and of these the ones of root.
    others.sort(key=lambda daemon: (daemon.unasked, daemon.user != "root"))
    return [*(daemon for daemon in snapshot.daemons if daemon.ours), *others[:_MOST_OTHERS]]


def _clients_text(daemon: MpsDaemon) -> str | None:
    return None if daemon.error or daemon.unasked else f"{len(daemon.clients)} / {plain_value(daemon.max_clients)}"


def _server_word(daemon: MpsDaemon) -> str:
    """Return the state of a daemon's servers in a word, or why it is unknown."""
    if daemon.error:
        return "no answer"
    if daemon.unasked:
        return "not asked"
    return ", ".join(sorted({server.status or "-" for server in daemon.servers})) or "none yet"


def _format_with_next(format_limit: Callable[[Any], str], no_limit: str = "-") -> Callable[[Any], str]:
    """Return the format of a pair of limits of a client: its own, and what it would get if it attached now.

    The second one is shown only if it differs: ``50 % (25 % from now on)``.
    """

    def pair_text(limits: tuple[Any, Any]) -> str:
        limit, next_limit = limits
        if limit == next_limit:
            return format_limit(limit)
        next_text = no_limit if next_limit is None else format_limit(next_limit)
        return f"{format_limit(limit)} ({next_text} from now on)"

    return pair_text


def _client_table(snapshot: Snapshot) -> Table:
    columns = (
        _gpu_column(group=True),
        Column("pid", "pid", right=True),
        _USER,
        Column("name", "program", rank=3, least=12),
        Column("threads", "threads", right=True, format=_format_with_next(format_percent)),
        Column("memory_limit", "memory limit", right=True, rank=1, format=_format_with_next(format_bytes, "none")),
        Column(
            "priority",
            "priority",
            rank=4,
            style=lambda value: "dim" if value[0] is Priority.LOW else None,
            format=_format_with_next(plain_value),
        ),
        Column("server_pid", "server pid", right=True, rank=5),
    )
    rows = tuple(
        {
            **vars(client),
            "gpu": daemon.gpu_index,
            "user": client.user if client.user is not None else server.user,
            "threads": (client.threads_percent, client.next_threads_percent),
            "memory_limit": (client.memory_limit_bytes, client.next_memory_limit_bytes),
            "priority": (client.priority, client.next_priority),
            "server_pid": client.server_pid if client.server_pid is not None else server.pid,
        }
        for daemon in snapshot.daemons
        for server in daemon.servers
        for client in server.clients
    )
    return Table(name="mps_clients", title="MPS clients", columns=columns, rows=rows)


def _seconds_since(snapshot: Snapshot, moment: float | None) -> float | None:
    """Return the seconds from a moment, in seconds since 1970, to the snapshot; None: there is no such moment."""
    return None if moment is None else (snapshot.taken_at or 0.0) - moment


def holders(line: LinePlace) -> list[str]:
    """Return who has the memory for which a job waits: ``other programs 60.0 GiB``, then the jobs."""
    others = line.others_bytes or 0
    if others < WORTH_NAMING:
        return list(line.held_by)
    return [f"other programs {format_bytes(others)}", *line.held_by]


def role_style(value: Any) -> str | None:
    return "bold" if value == "production" else None


# What the verbs take as JOB, which has to be typed; then what tells a job from its namesake.
JOB: Final = Column("job", "job", whole=True, of=lambda job: job.name or job.pid)
PID: Final = Column("pid", "pid", right=True, rank=6)
OWNER: Final = Column("user", "user", rank=1)
ROLE: Final = Column("role", "role", rank=3, style=role_style)
SINCE: Final = Column("since_seconds", "since", right=True, rank=4, format=age)
COMMAND: Final = Column("command", "command", rank=1, least=12, optional=True)


def _candidates_text(job: Any) -> str | None:
    """Return the GPUs that a job waits for: ``0-3``, or of a job of several ``2 of 0-3``; a lost one by its UUID."""
    text = first_few(filter(None, [ranges(job.gpu_indexes), *job.line.lost_uuids]), 2)
    return f"{job.line.count} of {text}" if text and job.line.count > 1 else text or None


def waiting_table(jobs: Sequence[ListedJob]) -> Table:
    """Return the table of the jobs in line for room."""
    columns = (
        Column("place", "place", right=True, of=lambda job: job.line.place),
        JOB,
        PID,
        OWNER,
        ROLE,
        Column("gpu", "GPU", right=True, of=_candidates_text),
        Column(
            "memory",
            "for",
            right=True,
            of=lambda job: job.line.memory_bytes,
            format=format_bytes,
            unknown="all",
        ),
        Column(
            "waits_for",
            "waits for",
            rank=2,
            of=lambda job: first_few([*job.line.behind, *holders(job.line)], 2) or None,
        ),
        SINCE,
        Column("state", "state", optional=True, of=lambda job: "stopped, skipped" if job.line.stopped else None),
        COMMAND,
    )
    return Table(name="waiting_jobs", title="waiting for room", columns=columns, rows=tuple(jobs))


def _swapped_table(snapshot: Snapshot) -> Table:
    columns = (
        Column("gpu", "GPU", right=True, of=lambda job: ranges(job.gpu_indexes) or None),
        Column("pid", "pid", right=True),
        _USER,
        Column("name", "job", optional=True),
        Column("state", "state", style=_alarm_style),
        _memory("swapped_bytes", "memory"),
        Column("since_seconds", "since", right=True, rank=1, format=age),
    )
    return Table(name="swapped_jobs", title="swapped out to host memory", columns=columns, rows=snapshot.swapped_jobs)


def lease_table(leases: Sequence[GpuLease], gpus: Sequence[Gpu]) -> Table:
    """Return the table of the GPUs that users have reserved; lost GPUs, whose index is unknown, come last."""
    index = {gpu.uuid: gpu.index for gpu in gpus}
    columns = (
        _gpu_column(of=lambda lease: index.get(lease.gpu_uuid)),
        Column("user", "user"),
        Column("seconds_left", "left", right=True, format=format_duration),
        Column("gpu_uuid", "UUID", rank=1, whole=True),
    )
    return Table(
        name="leases",
        title="reserved GPUs",
        columns=columns,
        rows=tuple(sorted(leases, key=lambda lease: index.get(lease.gpu_uuid, len(gpus)))),
        empty="no GPU is reserved; reserve one: gpushare reserve -g 0 --for 4h",
    )


def way_text(
    way: str | None,
    threads_percent: float | None = None,
    slice_us: int | None = None,
    profile: str | None = None,
    name: str | None = None,
) -> str | None:
    """Return how a job shares its GPU, with its limits: ``MPS 25 %``, ``MPS, slice 200us``, ``MIG train (1g.10gb)``.

    ``way`` is as in `ListedJob`. Of a process that is not a job of gpushare only a slice that gpushare has set is known.
    """
    turns = "time-slice" if slice_us is None else f"slice {format_slice(slice_us)}"
    if way is None:
        return None if slice_us is None else turns
    parts = []
    if way.startswith("mig"):
        parts.append(f"MIG {profile or '-'}" if name is None else f"MIG {name} ({profile or '-'})")
    if way.endswith("mps"):
        percent = "" if threads_percent in {None, 100} else f" {format_percent(threads_percent)}"
        parts.append(f"MPS{percent}")
    if not parts or slice_us is not None:
        parts.append(turns)
    return ", ".join(parts)


def _vgpu_table(snapshot: Snapshot) -> Table:
    columns = (
        _gpu_column(group=True, of=_of_gpu),
        Column("id", "vGPU", right=True, rank=2),
        Column("type", "type", format=_model_name),
        Column("vm", "virtual machine", whole=True),
        Column("memory", "memory", right=True, of=_memory_of, format=used_of_total),
        Column("uuid", "UUID", rank=1, whole=True),
    )
    return Table(name="vgpu_sessions", title="vGPU sessions", columns=columns, rows=snapshot.vgpu_sessions)


def _process_table(snapshot: Snapshot) -> Table:
    """Return the table of the processes on the GPUs with their jobs."""
    rows = tuple(_process_rows(snapshot))
    columns = (
        _gpu_column(group=True),
        Column("gpu_instance_id", "GI", right=True, rank=4, optional=True),
        Column("pid", "pid", right=True),
        Column("type", "type", rank=6),
        _USER,
        _percent("sm_percent", "SM", rank=2),
        _memory("memory_used_bytes", "memory"),
        Column("age", "age", right=True, rank=3, format=age),
        Column("idle", "idle", right=True, rank=3, optional=True, format=age),
        Column("job", "job", optional=True, least=16),
        Column("role", "role", optional=True, rank=2, style=role_style),
        Column("way", "way", optional=True, least=16),
        Column("paused", "paused", right=True, rank=1, optional=True, format=age),
        Column("container", "container", rank=5, whole=True, optional=True, format=container_name),
        Column("command", "command", least=16),
    )
    return Table(
        name="processes", title="processes", columns=columns, rows=rows, empty=_no_processes_text(snapshot.gpus)
    )


def _process_rows(snapshot: Snapshot) -> Iterable[Row]:
    """Yield a row per process on a GPU, those of an instance together, the largest first."""
    for gpu in snapshot.gpus:
        for process in sorted(
            gpu.processes or (), key=lambda each: (each.gpu_instance_id or 0, -(each.memory_used_bytes or 0), each.pid)
        ):
            instance = next((each for each in gpu.mig_instances if each.has(process)), MigInstance(uuid=""))
            yield {
                **vars(process),
                "gpu": gpu.index,
                "type": process.type or None,
                "age": None if snapshot.taken_at is None else _seconds_since(snapshot, process.started_at),
                "idle": _idle_seconds(process, snapshot),
                "way": way_text(
                    process.way, process.threads_percent, process.slice_us, instance.profile, instance.name
                ),
                "paused": _seconds_since(snapshot, process.paused_since),
                "command": command_of(process),
            }


def _idle_seconds(process: GpuProcess, snapshot: Snapshot) -> float | None:
    """Return how long ago a process last worked on its GPU; None: it works now, or that is unknown."""
    if process.last_work_at is None or process.sm_percent:
        return None
    seconds = (snapshot.taken_at or 0.0) - process.last_work_at
    # Less would be shown as 0s.
    return seconds if seconds >= 1.0 else None


def _no_processes_text(gpus: tuple[Gpu, ...]) -> str:
    """Return what is said if no process is listed: none, or that those of some GPUs are unknown."""
    if not gpus:
        return "the processes on the GPUs are unknown"
    unknown = [gpu.index for gpu in gpus if gpu.processes is None]
    return f"the processes on GPU {ranges(unknown)} are unknown" if unknown else "no processes on the GPUs"


CSV_GPU: Final = (
    "gpu_index", "gpu_uuid", "gpu_name", "pci_bus_id", "sharing", "compute_mode", "time_slice", "mig_enabled",
    "mig_pending", "utilization_percent", "memory_used_bytes", "memory_total_bytes", "gpu_error",
)  # fmt: skip
CSV_PROCESS: Final = (
    "pid", "type", "user", "gpu_instance_id", "compute_instance_id", "sm_percent", "process_memory_used_bytes",
    "started_at", "job", "role", "way", "threads_percent", "slice_us", "container", "command_line",
)  # fmt: skip


def status_result(snapshot: Snapshot) -> Result:
    """Return the result of ``gpushare status``. If a GPU has an error, the exit code is 1, and the others are shown."""
    errors = gpu_errors(snapshot.gpus)
    if not snapshot.gpus:
        hint = "find the cause: gpushare doctor; hosts to try without a GPU: gpushare sim list"
        errors = (OperationFailed(f"no GPU is visible on {snapshot.host}", hint, code="no_gpu"),)
    answer = StatusAnswer(
        host=snapshot.host,
        driver_version=snapshot.driver_version,
        taken_at=snapshot.taken_at,
        gpus=tuple(_status_gpu(gpu, snapshot) for gpu in snapshot.gpus),
        mps_daemons=snapshot.daemons,
        warnings=snapshot.warnings,
        waiting_jobs=snapshot.waiting_jobs,
        swapped_jobs=snapshot.swapped_jobs,
        leases=snapshot.leases,
        vgpu_sessions=snapshot.vgpu_sessions,
    )
    return Result(
        data=answer,
        text=_header_line(snapshot),
        tables=people_tables(snapshot),
        csv=csv_table(snapshot),
        notes=tuple(_status_notes(snapshot)),
        errors=errors,
    )


@dataclass(frozen=True, kw_only=True)
class StatusGpu(Gpu):
    """One GPU; if it does not answer, ``error`` says why and the rest is null."""

    # Null: unknown, because it does not answer or its MIG devices are hidden from this user.
    mig_instances: tuple[MigInstance, ...] | None = None  # type: ignore[assignment]
    sharing: WayInForce | None = None
    # Memory in use that belongs to no process that the driver lists.
    memory_unlisted_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StatusAnswer:
    """The answer of `status`: a host with its GPUs, daemons and jobs."""

    host: str
    driver_version: str | None
    # Seconds since 1970.
    taken_at: float | None
    gpus: tuple[StatusGpu, ...]
    mps_daemons: tuple[MpsDaemon, ...]
    warnings: tuple[str, ...]
    waiting_jobs: tuple[ListedJob, ...]
    swapped_jobs: tuple[ListedJob, ...]
    leases: tuple[GpuLease, ...]
    vgpu_sessions: tuple[VgpuSession, ...]


def _status_gpu(gpu: Gpu, snapshot: Snapshot) -> StatusGpu:
    """Return a GPU of the answer; what is unknown of it is null, not empty."""
    is_silent = gpu.error is not None
    replaced_or_added = {
        "sharing": sharing_now(gpu, snapshot.daemons),
        "memory_unlisted_bytes": gpu.unlisted_bytes,
        # An empty list would mean that there are none.
        "mig_instances": gpu.mig_instances or (None if is_silent or gpu.mig_hidden else ()),
        "processes": gpu.processes or (None if is_silent else gpu.processes),
    }
    return StatusGpu(**{**vars(gpu), **replaced_or_added})


def _header_line(snapshot: Snapshot) -> str:
    parts = [snapshot.host, f"driver {snapshot.driver_version or '-'}"]
    if snapshot.taken_at is not None:
        parts.append(format_date(snapshot.taken_at))
    return "   ".join(parts)


def _status_notes(snapshot: Snapshot) -> Iterable[str]:
    """Yield what the tables do not say: warnings, trouble with a GPU or a daemon, pauses, what is not shown."""
    yield from snapshot.warnings
    yield from _gpu_notes(snapshot)
    yield from _paused_note(snapshot)
    shown = _shown_daemons(snapshot)
    for daemon in shown:
        place = f"the MPS daemon at {daemon.pipe_directory or 'an unknown pipe directory'}"
        if daemon.error is not None:
            yield f"{place} cannot be queried: {daemon.error}"
        elif daemon.note is not None:
            yield f"{place}: {daemon.note}"
    if len(snapshot.waiting_jobs) > _MOST_WAITING:
        yield f"{counted(len(snapshot.waiting_jobs) - _MOST_WAITING, 'more waiting job')} not shown; -o json lists all"
    if len(snapshot.daemons) > len(shown):
        more = counted(len(snapshot.daemons) - len(shown), "more MPS daemon")
        yield f"{more} of others not shown; -o json lists all"


def _gpu_notes(snapshot: Snapshot) -> Iterable[str]:
    """Yield what is unusual about GPUs: unknown processes, memory of nobody, MIG without instances."""
    for gpu in snapshot.gpus:
        if gpu.error is not None:
            continue
        if gpu.processes is None:
            yield f"GPU {gpu.index}: its processes are unknown"
        virtual = any(session.gpu_index == gpu.index for session in snapshot.vgpu_sessions)
        if (gpu.unlisted_bytes or 0) > MUCH_UNLISTED and not virtual:
            yield (
                f"GPU {gpu.index}: {format_bytes(gpu.unlisted_bytes)} are held by no process that the driver lists; "
                "see by whom, and the way out: gpushare doctor"
            )
        if gpu.mig_hidden:
            yield f"GPU {gpu.index}: {HIDDEN_DEVICES}"
        elif gpu.mig_enabled and not gpu.mig_instances:
            yield (
                f"no CUDA program can use GPU {gpu.index}: it is in MIG mode without a MIG device; "
                f"see its instances, and what still fits: gpushare mig status -g {gpu.index}"
            )


def _paused_note(snapshot: Snapshot) -> Iterable[str]:
    """Yield a note on the processes that are paused, if there are any."""
    paused = sorted(
        {process.pid for gpu in snapshot.gpus for process in gpu.processes or () if process.paused_since is not None}
    )
    if paused:
        yield f"paused: process {', '.join(map(str, paused))}; see by whom, and until when: gpushare pause list"


def gpu_errors(gpus: Iterable[Gpu]) -> tuple[GpushareError, ...]:
    """Return an error for each GPU that does not answer.

    Each has exit code 1, also for a lost GPU: the command shows the other GPUs.
    """
    errors: list[GpushareError] = []
    for gpu in gpus:
        if gpu.error is None:
            continue
        # NVML's reasons begin with the GPU already.
        message = f"GPU {gpu.index} does not answer: {gpu.error.removeprefix(f'GPU {gpu.index}: ')}"
        if is_lost(gpu.error):
            hint = "see the cause in the kernel log: sudo dmesg | grep -i xid; a reboot may bring the GPU back"
            errors.append(GpuLost(message, hint, gpu=gpu.index))
        else:
            hint = f"see what the driver reports: nvidia-smi -q -i {gpu.index}"
            errors.append(OperationFailed(message, hint, gpu=gpu.index))
        errors[-1].exit_code = ExitCode.FAILED
    return tuple(errors)


def csv_table(snapshot: Snapshot) -> Table:
    """Return one row per GPU and process; a GPU without processes has one row."""
    rows = []
    for gpu in snapshot.gpus:
        gpu_fields = {
            **vars(gpu),
            "gpu_index": gpu.index,
            "gpu_uuid": gpu.uuid,
            "gpu_name": gpu.name,
            "gpu_error": gpu.error,
            "sharing": sharing_now(gpu, snapshot.daemons),
        }
        for process in gpu.processes or (None,):
            process_fields: dict[str, Any] = {}
            if process is not None:
                process_fields = {key: getattr(process, key, None) for key in CSV_PROCESS}
                process_fields["process_memory_used_bytes"] = process.memory_used_bytes
                process_fields["command_line"] = command_of(process)
            rows.append({**gpu_fields, **process_fields})
    return record_table("status", (*CSV_GPU, *CSV_PROCESS), rows)
