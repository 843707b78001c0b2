"""The MPS daemons of a host as they are now: ours from their homes, others from the process table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from gpushare.errors import GpushareError, NotFound
from gpushare.host import mps_control
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_home import DaemonHome, DaemonRecord, home_of, homes_in
from gpushare.host.mps_text import ClientRow, Overview, parse_memory
from gpushare.model import Gpu, MpsClient, MpsDaemon, MpsServer, Priority
from gpushare.selection import select
from gpushare.units import mps_memory, mps_memory_readback, parse_pinned_limits

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.process import ProcessInfo

Number = TypeVar("Number", int, float)

# Where the daemon listens when nobody tells it otherwise (NVIDIA's MPS guide).
DEFAULT_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's choice, not ours
DEFAULT_LOG_DIRECTORY: Final = "/var/log/nvidia-mps"


@dataclass(frozen=True)
class FoundDaemon:
    """A daemon with the home that gpushare made for it, if it did."""

    daemon: MpsDaemon
    home: DaemonHome | None
    record: DaemonRecord | None

    def control(self, host: Host) -> MpsControl:
        """Return the conversation with it.

        Raises:
            NotFound: its pipe directory is unknown.
        """
        if self.daemon.pipe_directory is None:
            raise NotFound(
                f"the pipe directory of the MPS daemon {self.daemon.pid} is unknown",
                "look as root: sudo gpushare mps status",
                code="pipe_unknown",
            )
        return MpsControl(host.programs, self.daemon.pipe_directory)


def find_daemons(host: Host, gpus: Sequence[Gpu], *, deep: bool = True) -> list[FoundDaemon]:
    """Return the daemons of this host, ours first.

    ``deep`` asks each for limits, servers and clients; otherwise only whether it is there. A record
    whose daemon is gone is returned with an error: `gpushare mps stop` clears it away.
    """
    ours = [_ours(host, home, gpus, deep=deep) for home in homes_in([host.run_directory, *host.shared_run_directories])]
    found = [item for item in ours if item is not None]
    known = {item.daemon.pid for item in found}
    foreign = [_foreign(host, info, gpus, deep=deep) for info in _running(host) if info.pid not in known]
    return found + foreign


def _running(host: Host) -> list[ProcessInfo]:
    """Return the processes that are MPS control daemons, by PID.

    A conversation is a process of the same program for a moment, without an option that makes it a daemon
    (seen with 535). So is a daemon's child before it becomes a server: with its command line and its
    environment, but a daemon's child.
    """
    candidates: dict[str | None, list[ProcessInfo]] = {}
    for pid in host.processes.named(mps_control.PROGRAM):
        info = host.processes.describe(pid)
        if info is not None and _is_daemon(info.command_line):
            candidates.setdefault(_pipe_directory(host.processes.environment(pid)), []).append(info)
    running = []
    for same in candidates.values():
        # Who descends from whom costs a look at every process: only where two share a directory.
        below = {child for one in same for child in host.processes.descendants(one.pid)[1:]} if len(same) > 1 else set()
        running += [info for info in same if info.pid not in below]
    return sorted(running, key=lambda info: info.pid)


def _is_daemon(command_line: Sequence[str] | None) -> bool:
    """Return whether ``-d`` or ``-f`` (also ``--daemon``, ``--forground`` from 580 on) is given; unknown counts as such."""
    if not command_line:
        return True
    return any(re.match(r"-[MSdfq]*[df][MSdfq]*$|--(daemon|fore?ground)$", word) for word in command_line[1:])


def _pipe_directory(environment: Mapping[str, str] | None) -> str | None:
    if environment is None:
        return None
    # The program puts "/control" behind an empty one (seen with 535).
    return environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY) or "/"


def daemon_pid(host: Host, pipe_directory: str) -> int | None:
    """Return the PID of the daemon that listens at a pipe directory, or None.

    Not from its PID file, which any user may write and the daemon of driver 535 does not make:
    from the process table, by program and environment.
    """
    for info in _running(host):
        if _pipe_directory(host.processes.environment(info.pid)) == pipe_directory:
            return info.pid
    return None


def is_running(host: Host, record: DaemonRecord) -> bool:
    """Return whether the daemon of a record lives.

    Its start time guards against a reused PID, but moves when the clock is set: a daemon that listens
    in our directory under that PID is it all the same.
    """
    if host.processes.alive(record.pid, record.started_at):
        return True
    if not host.processes.alive(record.pid) or record.pid not in {info.pid for info in _running(host)}:
        return False
    listens_at = _pipe_directory(host.processes.environment(record.pid))
    directories = (host.run_directory, *host.shared_run_directories)
    return listens_at is None or listens_at in {str(home_of(one, record.device_uuid).pipe) for one in directories}


def _ours(host: Host, home: DaemonHome, gpus: Sequence[Gpu], *, deep: bool) -> FoundDaemon | None:
    record = home.read()
    if record is None:
        return None
    index = _gpu_index(record.device_uuid, gpus)
    info = host.processes.describe(record.pid) if deep else None
    daemon = MpsDaemon(
        pid=record.pid,
        ours=True,
        pipe_directory=str(home.pipe),
        log_directory=str(home.log),
        device_uuid=record.device_uuid,
        gpu_index=index,
        gpu_indexes=() if index is None else (index,),
        user=None if info is None else info.user,
        threads_percent=record.threads_percent,
        memory_limit_bytes=record.memory_limit_bytes,
        priority=None if record.priority is None else Priority(record.priority),
        transient=record.transient,
    )
    if not is_running(host, record):
        gone = f"the daemon {record.pid} is gone; clear it away: gpushare mps stop -g {record.device_uuid}"
        return FoundDaemon(replace(daemon, pid=None, error=gone), home, record)
    return FoundDaemon(_asked(host, daemon, record) if deep else daemon, home, record)


def _foreign(host: Host, info: ProcessInfo, gpus: Sequence[Gpu], *, deep: bool) -> FoundDaemon:
    pid, environment = info.pid, host.processes.environment(info.pid)
    if environment is None:
        daemon = MpsDaemon(
            pid=pid,
            ours=False,
            pipe_directory=None,
            user=info.user,
            error="its environment may not be read: look as root",
        )
        return FoundDaemon(daemon, None, None)
    indexes = _visible_gpus(environment, gpus)
    daemon = MpsDaemon(
        pid=pid,
        ours=False,
        pipe_directory=_pipe_directory(environment),
        log_directory=environment.get("CUDA_MPS_LOG_DIRECTORY", DEFAULT_LOG_DIRECTORY) or "/",
        gpu_index=indexes[0] if len(indexes) == 1 else None,
        gpu_indexes=indexes,
        user=info.user,
    )
    return FoundDaemon(_asked(host, daemon, None) if deep else daemon, None, None)


def _asked(host: Host, daemon: MpsDaemon, record: DaemonRecord | None) -> MpsDaemon:
    try:
        overview = MpsControl(host.programs, daemon.pipe_directory or "").overview()
    except GpushareError as error:
        return replace(daemon, error=error.message)
    uuid = record.device_uuid if record is not None else ""
    return replace(
        daemon,
        threads_percent=overview.threads_percent,
        memory_limit_bytes=_exact(overview.memory_limit_bytes, record),
        priority=overview.priority,
        servers=tuple(_server(host, overview, row.pid, uuid, record) for row in overview.servers),
    )


def _exact(held: int | None, record: DaemonRecord | None) -> int | None:
    """Return the limit of a record where the daemon holds it (it prints whole G, rounded down), else what it holds."""
    noted = None if record is None else record.memory_limit_bytes
    if noted is None or held is None:
        return held
    return noted if held in {parse_memory(mps_memory_readback(noted)), parse_memory(mps_memory(noted))} else held


def _server(host: Host, overview: Overview, pid: int, uuid: str, record: DaemonRecord | None) -> MpsServer:
    row = next(row for row in overview.servers if row.pid == pid)
    info = host.processes.describe(pid)
    limit = _exact(row.memory_limit_bytes, record)
    mine = [client for client in overview.clients if client.server_pid in {pid, None}]
    return MpsServer(
        pid=pid,
        user=None if info is None else info.user,
        status=row.status,
        threads_percent=row.threads_percent,
        clients=tuple(_client(host, client, pid, row.threads_percent, limit, overview, uuid) for client in mine),
    )


def _client(
    host: Host, row: ClientRow, server: int, threads: float | None, memory: int | None, overview: Overview, uuid: str
) -> MpsClient:
    info = host.processes.describe(row.pid)
    own = host.processes.environment(row.pid)
    own_threads = _own_threads(own)
    own_memory = (
        parse_pinned_limits(own["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], uuid)
        if own and "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" in own
        else None
    )
    own_priority = (own or {}).get("CUDA_MPS_CLIENT_PRIORITY")
    return MpsClient(
        pid=row.pid,
        server_pid=server,
        name=row.command or (None if info is None else info.name),
        user=None if info is None else info.user,
        # A client can only lower what its server allows (seen: env 60 under 30 gives 30, 20 under 30 gives 20).
        threads_percent=_smaller(threads, own_threads),
        memory_limit_bytes=_smaller(memory, own_memory),
        priority=Priority(int(own_priority)) if own_priority in {"0", "1"} else overview.priority,
    )


def _own_threads(environment: Mapping[str, str] | None) -> float | None:
    try:
        value = float((environment or {}).get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    except ValueError:
        return None
    return value if 0.0 < value <= 100.0 else None


def _smaller(first: Number | None, second: Number | None) -> Number | None:
    given = [value for value in (first, second) if value is not None]
    return min(given, default=None)


def _gpu_index(uuid: str, gpus: Sequence[Gpu]) -> int | None:
    for gpu in gpus:
        if gpu.uuid == uuid or any(mig.uuid == uuid for mig in gpu.mig_instances):
            return gpu.index
    return None


def _visible_gpus(environment: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """Return the GPUs that a daemon serves by its CUDA_VISIBLE_DEVICES; CUDA stops at the first that it does not know."""
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return tuple(gpu.index for gpu in gpus)
    found: list[int] = []
    for word in environment["CUDA_VISIBLE_DEVICES"].split(","):
        # CUDA takes ordinals and UUIDs; `select` takes more.
        if not re.match(r"\d|GPU-|MIG-", word.strip()) or ":" in word:
            break
        try:
            found += [device.gpu.index for device in select(word, gpus) if device.gpu.index not in found]
        except GpushareError:
            break
    return tuple(found)
