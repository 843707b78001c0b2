"""What MPS daemons tell of themselves, joined with what the process table and our records know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from gpushare.errors import GpushareError
from gpushare.host.mps_ask import logged_limit, overviews
from gpushare.host.mps_text import ClientRow, Overview, parse_memory
from gpushare.model import MpsClient, MpsDaemon, MpsServer, Priority
from gpushare.units import mps_memory, mps_memory_readback, parse_pinned_limits

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mps import FoundDaemon
    from gpushare.host.mps_home import DaemonRecord

Number = TypeVar("Number", int, float)
NOT_ASKED: Final = "not asked: it is another user's, and may say anything; ask it: gpushare mps status -v"


def ask(host: Host, found: Sequence[FoundDaemon], *, strangers: bool) -> list[FoundDaemon]:
    """Return the daemons with what they say, all asked at once; those of other users only with ``strangers``."""
    asked = [
        item
        for item in found
        if (item.trusted or strangers) and item.daemon.error is None and item.daemon.pipe_directory is not None
    ]
    told = dict(
        zip(
            map(id, asked),
            overviews(host.programs, [item.daemon.pipe_directory or "" for item in asked]),
            strict=True,
        )
    )
    return [_told(host, item, told.get(id(item)), asked=strangers) for item in found]


def _told(host: Host, item: FoundDaemon, said: Overview | GpushareError | None, *, asked: bool) -> FoundDaemon:
    if said is None:
        if item.trusted or asked or item.daemon.error is not None:
            return item
        return replace(item, daemon=replace(item.daemon, note=NOT_ASKED))
    if isinstance(said, GpushareError):
        return replace(item, daemon=replace(item.daemon, error=said.message))
    return replace(item, daemon=_with(host, item, said))


def _with(host: Host, item: FoundDaemon, overview: Overview) -> MpsDaemon:
    daemon, record = item.daemon, item.record
    # A daemon of another user is believed about that user's processes only: it may name any PID.
    believed = None if item.trusted else item.uid
    environment = host.processes.environment(daemon.pid or 0) or {}
    uuid = record.device_uuid if record is not None else environment.get("CUDA_VISIBLE_DEVICES", "")
    logged = logged_limit(daemon.log_directory, uuid) if item.trusted else None
    held = _exact(overview.memory_limit_bytes, record, logged)
    if held is None:
        # Set by UUID, or given in its environment: it is in force, and the daemon does not print it.
        held = logged or parse_pinned_limits(environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""), uuid)
    servers = [row for row in overview.servers if _is_of(host, row.pid, believed)]
    return replace(
        daemon,
        threads_percent=overview.threads_percent,
        memory_limit_bytes=held,
        priority=overview.priority,
        servers=tuple(_server(host, overview, row.pid, uuid, record, believed) for row in servers),
    )


def _is_of(host: Host, pid: int, uid: int | None) -> bool:
    """Return whether a process belongs to a user; None: anybody's will do."""
    if uid is None:
        return True
    info = host.processes.describe(pid)
    return info is not None and info.uid == uid


def _exact(held: int | None, record: DaemonRecord | None, logged: int | None = None) -> int | None:
    """Return the limit of the log or the record where the daemon holds it (it prints whole G), else what it holds."""
    if held is None:
        return None
    for noted in (logged, None if record is None else record.memory_limit_bytes):
        if noted and held in {parse_memory(mps_memory_readback(noted)), parse_memory(mps_memory(noted))}:
            return noted
    return held


def _server(
    host: Host, overview: Overview, pid: int, uuid: str, record: DaemonRecord | None, believed: int | None
) -> MpsServer:
    row = next(row for row in overview.servers if row.pid == pid)
    info = host.processes.describe(pid)
    limit = _exact(row.memory_limit_bytes, record)
    mine = [one for one in overview.clients if one.server_pid in {pid, None} and _is_of(host, one.pid, believed)]
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
