"""The MPS daemons of a host: ours from their homes, others from the process table."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from gpushare.base.errors import GpushareError, InUse, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import ComputeMode, Gpu, MpsClient, MpsDaemon, MpsServer
from gpushare.base.selection import Device, select
from gpushare.base.units import mps_memory, mps_memory_readback
from gpushare.base.values import dataclass
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.host.identity import start_of
from gpushare.host.process import ProcessInfo, info_of
from gpushare.host.program import Programs, missing_program_error
from gpushare.host.smi import compute_mode_command
from gpushare.mps import control
from gpushare.mps.control import (
    MpsControl,
    NoDaemon,
    Overview,
    ServerRow,
    is_server,
    not_your_daemon_error,
    parse_memory,
)
from gpushare.mps.home import ADOPTED, RUNNING, AttachedClient, DaemonHome, DaemonRecord, homes_in, restart_command
from gpushare.mps.limits import Limits

# For all daemons together; one answers within 2 ms on an H200.
LOOK_SECONDS: Final = 3.0
# A daemon prints percentages with one digit after the point.
_ROUNDED: Final = 0.1
# Concurrent conversations: each is a child process.
_AT_ONCE: Final = 16


def overviews(programs: Programs, pipe_directories: Sequence[str]) -> list[Overview | GpushareError]:
    """Ask all daemons; return the overview of each, or its error, in the same order."""
    until = time.monotonic() + LOOK_SECONDS
    if len(pipe_directories) < 2:
        # The usual case needs no thread.
        return [_overview_or_error(programs, pipe, until) for pipe in pipe_directories]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda pipe: _overview_or_error(programs, pipe, until), pipe_directories))


def _overview_or_error(programs: Programs, pipe: str, until: float) -> Overview | GpushareError:
    """Return what a daemon reports, or its error; it is not asked once the time for all of them is over."""
    if time.monotonic() >= until:
        return TimedOut(
            f"the MPS daemon at {pipe} was not asked: others did not answer within {LOOK_SECONDS:g} s",
            "see: gpushare doctor",
            code="daemon_hangs",
        )
    try:
        return MpsControl(programs, pipe, seconds=LOOK_SECONDS, until=until).overview()
    except GpushareError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a thread that dies would lose its daemon
        return OperationFailed(f"the MPS daemon at {pipe} cannot be asked: {error}", "see: gpushare doctor")


Number = TypeVar("Number", int, float)
NOT_ASKED: Final = (
    "not asked, because it belongs to another user and may report anything; ask it: gpushare mps status -v"
)


def with_answers(host: Host, daemons: Sequence[FoundDaemon], *, strangers: bool) -> list[FoundDaemon]:
    """Ask daemons, all at once, and return each with its answer or error; daemons of other users only with ``strangers``."""
    # By number: several processes may name one directory.
    pipes = {
        number: item.daemon.pipe_directory
        for number, item in enumerate(daemons)
        if (item.trusted or strangers) and item.daemon.error is None and item.daemon.pipe_directory is not None
    }
    answers = dict(zip(pipes, overviews(host.programs, [*pipes.values()]), strict=True))
    completed = []
    for number, item in enumerate(daemons):
        answer, daemon = answers.get(number), item.daemon
        if isinstance(answer, Overview):
            daemon = _Answer(host, item, answer).daemon()
        elif answer is not None:
            daemon = replace(daemon, error=answer.message)
        elif not item.trusted and not strangers and daemon.error is None:
            daemon = replace(daemon, note=NOT_ASKED)
        completed.append(replace(item, daemon=daemon))
    return completed


class _Answer:
    """The answer of a daemon (``overview``) as `MpsDaemon`, completed by its record and the process table."""

    def __init__(self, host: Host, item: FoundDaemon, overview: Overview) -> None:
        self._host, self._item, self._overview = host, item, overview
        self._environment = host.processes.environment(item.daemon.pid or 0) or {}
        visible = self._environment.get("CUDA_VISIBLE_DEVICES", "")
        self._uuid = visible if item.record is None else item.record.device_uuid

    def daemon(self) -> MpsDaemon:
        """Return the daemon with its limits, and with those servers and clients that may be its own."""
        overview = self._overview
        memory = self._exact_memory(overview.limits.memory_limit_bytes)
        if memory is None:
            # A limit from the daemon's environment is in force, but not printed.
            memory = Limits.in_environment(self._environment, self._uuid).memory_limit_bytes
        return replace(
            self._item.daemon,
            threads_percent=overview.limits.threads_percent,
            memory_limit_bytes=memory,
            priority=overview.limits.priority,
            servers=tuple(self._server_with_clients(row) for row in overview.servers if self._may_belong(row.pid)),
        )

    def _may_belong(self, pid: int) -> bool:
        """Return whether a process may be a server or client of the daemon: that of another user may name any PID."""
        if self._item.trusted or self._item.uid is None:
            return True
        return info_of(self._host.processes, pid).uid == self._item.uid

    def _exact_memory(self, printed: int | None) -> int | None:
        """Return the memory limit of the record if the daemon would print it so (in whole G), else the printed one."""
        recorded = None if self._item.record is None else self._item.record.limits.memory_limit_bytes
        if recorded is None:
            return printed
        forms = (mps_memory_readback(recorded), mps_memory(recorded))
        return recorded if printed in map(parse_memory, forms) else printed

    def _server_with_clients(self, row: ServerRow) -> MpsServer:
        """Return a server with those of its clients that may be its own."""
        clients = [client for client in self._overview.clients if client.server_pid in {row.pid, None}]
        return MpsServer(
            pid=row.pid,
            user=info_of(self._host.processes, row.pid).user,
            status=row.status,
            threads_percent=row.limits.threads_percent,
            clients=tuple(self._client_with_limits(client, row) for client in clients if self._may_belong(client.pid)),
        )

    def _client_with_limits(self, row: MpsClient, server: ServerRow) -> MpsClient:
        """Return a client with the limits that it has had since it attached, and those that it would get now."""
        info = info_of(self._host.processes, row.pid)
        environment = self._host.processes.environment(row.pid)
        held = upcoming = Limits()
        # Its own limits may lower those of its server: without its environment both are unknown.
        if environment is not None:
            own_limits = Limits.in_environment(environment, self._uuid)
            of_server_now = Limits(
                threads_percent=server.limits.threads_percent,
                memory_limit_bytes=self._exact_memory(server.limits.memory_limit_bytes),
                priority=self._overview.limits.priority,
            )
            upcoming = _limits_of_client(of_server_now, own_limits)
            of_server_then = self._server_limits_at_attachment(row.pid, of_server_now)
            if of_server_then is not None:
                held = _limits_of_client(of_server_then, own_limits)
        return replace(
            row,
            server_pid=server.pid,
            name=info.name,
            user=info.user,
            threads_percent=held.threads_percent,
            memory_limit_bytes=held.memory_limit_bytes,
            priority=held.priority,
            next_threads_percent=upcoming.threads_percent,
            next_memory_limit_bytes=upcoming.memory_limit_bytes,
            next_priority=upcoming.priority,
        )

    def _server_limits_at_attachment(self, pid: int, now: Limits) -> Limits | None:
        """Return the limits that the server had when a client attached, ``now`` if none are recorded; None: unknown."""
        record = self._item.record
        if record is None:
            return now
        for client in record.attached:
            if client.pid == pid and is_same_process(self._host, client):
                return client.limits
        return None if changed_by_hand(record, now.threads_percent) else now


def is_same_process(host: Host, client: AttachedClient) -> bool:
    """Return whether the PID of a client is still its own, as far as that can be known."""
    return client.started is None or host.processes.alive(client.pid, client.started)


def changed_by_hand(record: DaemonRecord, threads_percent: float | None) -> bool:
    """Return whether a server has another thread percentage than the record says: somebody has set it, nobody knows when.

    It may also be a `mps set` that was killed before it wrote the record.
    """
    if record.state != RUNNING or threads_percent is None:
        return False
    return abs(threads_percent - (record.limits.threads_percent or 100.0)) > _ROUNDED


def _limits_of_client(server: Limits, own: Limits) -> Limits:
    """Return the limits of a client: it can only lower those of its server.

    Seen: 60 under 30 gives 30, 20 under 30 gives 20.
    """
    return Limits(
        threads_percent=_smaller(server.threads_percent, own.threads_percent),
        memory_limit_bytes=_smaller(server.memory_limit_bytes, own.memory_limit_bytes),
        priority=server.priority if own.priority is None else own.priority,
    )


def _smaller(first: Number | None, second: Number | None) -> Number | None:
    """Return the smaller of two limits; None is no limit."""
    return min((value for value in (first, second) if value is not None), default=None)


# The default of the daemon and of CUDA programs (NVIDIA's MPS guide).
DEFAULT_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's choice, not ours
DEFAULT_LOG_DIRECTORY: Final = "/var/log/nvidia-mps"
# More than 16 GPUs with 7 instances each; any user may have set it.
_MOST_DEVICES: Final = 128
_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-fA-F-]{1,60}$", re.ASCII)


@dataclass(frozen=True)
class FoundDaemon:
    """A daemon with the home that gpushare created for it, if it did.

    ``trusted``: it runs as this user or as root. Everything that another user's daemon reports is only a claim.
    ``started`` is the start of its process, which distinguishes it from a later process with the same PID.
    """

    daemon: MpsDaemon
    home: DaemonHome | None
    record: DaemonRecord | None
    trusted: bool = True
    uid: int | None = None
    started: int | None = None

    @property
    def title(self) -> str:
        """Return process, user and directory, for a message."""
        daemon = self.daemon
        return f"process {daemon.pid} of user {daemon.user or 'unknown'}, {daemon.pipe_directory}"

    @property
    def device(self) -> str:
        """Return the ``-g`` value of its device: the index of a whole GPU, else the UUID."""
        uuid = self.daemon.device_uuid or ""
        index = self.daemon.gpu_index
        return uuid if index is None or uuid.startswith("MIG-") else str(index)

    @property
    def stop_command(self) -> str:
        """Return the command that stops one of this user or of root."""
        if self.daemon.ours:
            return f"gpushare mps stop -g {self.device}"
        return f"gpushare mps stop --pipe-directory {shlex.quote(self.daemon.pipe_directory or '')}"

    @property
    def stop_hint(self) -> str:
        """Return how it is stopped, or whom to ask: another user's pipe directory may be that of another daemon."""
        if self.daemon.ours or self.trusted:
            return f"stop it: {self.stop_command}"
        return f"ask {self.daemon.user or 'its owner'} to stop it; see: ps -fp {self.daemon.pid}"

    def serves(self, host: Host, gpu: int) -> bool:
        """Return whether it serves a GPU that it names.

        Any user can start a process of that name: for another user's the driver must show an MPS client, or the server, of
        that user on the GPU.
        """
        if gpu not in self.daemon.gpu_indexes:
            return False
        if self.trusted:
            return True
        for process in (host.nvml.processes(gpu) or ()) if self.uid is not None else ():
            info = info_of(host.processes, process.pid)
            if info.uid == self.uid and (process.mps or is_server(info.name)):
                return True
        return False

    def control(self, host: Host) -> MpsControl:
        """Return what talks to the daemon. Raises NotFound: its pipe directory is unknown."""
        if self.daemon.pipe_directory is None:
            raise NotFound(
                f"the pipe directory of the MPS daemon {self.daemon.pid} is unknown",
                "look as root: sudo gpushare mps status",
                code="pipe_unknown",
            )
        return MpsControl(host.programs, self.daemon.pipe_directory)


@dataclass(frozen=True)
class _Process:
    """A process that is, or claims to be, an MPS control daemon."""

    info: ProcessInfo
    environment: Mapping[str, str] | None
    trusted: bool

    @property
    def pid(self) -> int:
        return self.info.pid

    @property
    def pipe(self) -> str | None:
        """Return where it listens; None: its environment is unknown."""
        if self.environment is None:
            return None
        # The program appends "/control" to an empty one (seen with 535).
        return self.environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY) or "/"

    @property
    def device(self) -> str | None:
        """Return the UUID of the device that it serves, if it is the only one: those of gpushare serve one each."""
        visible = (self.environment or {}).get("CUDA_VISIBLE_DEVICES", "")
        return visible if _UUID.match(visible) else None


def find_daemons(host: Host, gpus: Sequence[Gpu], *, deep: bool = True, strangers: bool = False) -> list[FoundDaemon]:
    """Return the MPS daemons of this host, those of gpushare first.

    ``deep`` asks each daemon for limits, servers and clients. Daemons of other users (except root) are asked only with
    ``strangers``: they may report anything, or hang. A record whose daemon has ended is returned with an error, and
    `gpushare mps stop` cleans it up. A daemon in a home of gpushare counts as gpushare's even without a record.
    """
    directories = host.run_directories
    running = _daemon_processes(host)
    ours = [_daemon_of_home(host, home, gpus, running) for home in homes_in(directories)]
    daemons = [item for item in ours if item is not None]
    # By GPU; those of several or unknown GPUs come last.
    daemons.sort(key=lambda item: (item.daemon.gpu_index is None, item.daemon.gpu_index or 0))
    pids = {item.daemon.pid for item in daemons}
    for process in running:
        if process.pid not in pids:
            daemons.append(_adopted_daemon(process, gpus, directories) or _foreign_daemon(process, gpus))
    return with_answers(host, daemons, strangers=strangers) if deep else daemons


def _daemon_processes(host: Host) -> list[_Process]:
    """Return the processes that are MPS control daemons, sorted by PID.

    A conversation runs the same program without an option that makes it a daemon (seen with 535).
    """
    candidates: dict[tuple[str | None, int | None], list[_Process]] = {}
    trusted = {0, host.uid, os.geteuid()}
    for pid in host.processes.pids_of_program(control.PROGRAM):
        info = host.processes.describe(pid)
        if info is not None and _is_daemon(info.command_line):
            claimed = _Process(info, host.processes.environment(pid), info.uid in trusted)
            # Grouped by user, so that other users' processes cannot hide ours.
            candidates.setdefault((claimed.pipe, info.uid), []).append(claimed)
    running = []
    for same in candidates.values():
        # A daemon's child looks like the daemon for a moment, before it becomes a server.
        pids = {process.pid for process in same} if len(same) > 1 else set()
        running += [process for process in same if not pids or host.processes.parent(process.pid) not in pids]
    return sorted(running, key=lambda process: process.pid)


def _is_daemon(command_line: Sequence[str] | None) -> bool:
    """Return whether ``-d`` or ``-f`` is given (from 580 on also ``--daemon``, ``--forground``), or the words are unknown."""
    if not command_line:
        return True
    return any(re.match(r"-[MSdfq]*[df][MSdfq]*$|--(daemon|fore?ground)$", word) for word in command_line[1:])


def is_multiuser(host: Host, pid: int | None) -> bool:
    """Return whether the daemon with this PID was started for several users at the same time."""
    words = () if pid is None else info_of(host.processes, pid).command_line or ()
    return any(re.match(r"-[MSdfq]*M[MSdfq]*$|--?multiuser-server$", word) for word in words[1:])


def daemon_pid(host: Host, pipe_directory: str) -> int | None:
    """Return the PID of the daemon of this user or root that listens at a pipe directory; None: there is none.

    It is found in the process table. The PID file does not count: any user may write it, and driver 535 has none.
    """
    running = (process for process in _daemon_processes(host) if process.trusted and process.pipe == pipe_directory)
    return next((process.pid for process in running), None)


def live_pid(
    host: Host, home: DaemonHome, record: DaemonRecord, running: Sequence[_Process] | None = None
) -> int | None:
    """Return the PID of the daemon of a record, or None when it is dead.

    The start time guards against a reused PID, but the record of a killed start has none: then a trusted daemon that
    serves this device from this home counts.
    """
    if record.pid is not None and record.started is not None and host.processes.alive(record.pid, record.started):
        return record.pid
    pipe = str(home.pipe)
    for process in _daemon_processes(host) if running is None else running:
        if not process.trusted:
            continue
        # The environment of root's daemon may be closed to us (None).
        if process.pid == record.pid and process.pipe in {None, pipe}:
            return process.pid
        if process.pipe == pipe and process.device == record.device_uuid:
            return process.pid
    return None


def _daemon_of_home(
    host: Host, home: DaemonHome, gpus: Sequence[Gpu], running: Sequence[_Process]
) -> FoundDaemon | None:
    """Return the daemon of a home's record, with an error if it has ended; None: the home has no valid record."""
    record = home.read()
    if record is None:
        return None
    pid = live_pid(host, home, record, running)
    daemon = _recorded_daemon(home, record, pid, gpus)
    if pid is None:
        gone = f"the daemon {record.pid} is gone; clean up: gpushare mps stop -g {record.device_uuid}"
        error = _interrupted_text(record) if record.interrupted else gone
        return FoundDaemon(replace(daemon, error=error), home, record)
    info = info_of(host.processes, pid)
    return FoundDaemon(replace(daemon, user=info.user), home, record, uid=info.uid, started=info.started)


def _interrupted_text(record: DaemonRecord) -> str:
    return (
        f"it is being started, or its start was interrupted; start it again: {restart_command(record, None)}; "
        f"or stop it: gpushare mps stop -g {record.device_uuid}"
    )


def _recorded_daemon(home: DaemonHome, record: DaemonRecord, pid: int | None, gpus: Sequence[Gpu]) -> MpsDaemon:
    """Return a daemon as its record describes it; ``pid`` is None if it has ended."""
    uuid = record.device_uuid
    indexes = (gpu.index for gpu in gpus if gpu.uuid == uuid or any(mig.uuid == uuid for mig in gpu.mig_instances))
    index = next(indexes, None)
    return MpsDaemon(
        pid=pid,
        ours=True,
        pipe_directory=str(home.pipe),
        log_directory=str(home.log),
        device_uuid=uuid,
        gpu_index=index,
        gpu_indexes=() if index is None else (index,),
        threads_percent=record.limits.threads_percent,
        memory_limit_bytes=record.limits.memory_limit_bytes,
        priority=record.limits.priority,
        transient=record.transient,
        note=_interrupted_text(record) if record.interrupted and pid is not None else None,
    )


def _adopted_daemon(process: _Process, gpus: Sequence[Gpu], directories: Sequence[Path]) -> FoundDaemon | None:
    """Return a daemon in a home of gpushare that has no record, because its start was killed before writing one."""
    home = DaemonHome.at_pipe(process.pipe, directories) if process.trusted else None
    if home is None or process.device is None or home.read() is not None:
        return None
    info = process.info
    uid = os.geteuid() if info.uid is None else info.uid
    record = DaemonRecord(device_uuid=process.device, pid=info.pid, started=info.started, uid=uid, state=ADOPTED)
    daemon = replace(_recorded_daemon(home, record, info.pid, gpus), user=info.user)
    return FoundDaemon(daemon, home, record, uid=info.uid, started=info.started)


def _foreign_daemon(process: _Process, gpus: Sequence[Gpu]) -> FoundDaemon:
    """Return a daemon that gpushare did not start, as far as its environment tells."""
    daemon = MpsDaemon(pid=process.pid, ours=False, pipe_directory=process.pipe, user=process.info.user)
    if process.environment is None:
        daemon = replace(daemon, error="no permission to read its environment: run as root")
    else:
        indexes = _visible_gpus(process.environment, gpus)
        daemon = replace(
            daemon,
            log_directory=process.environment.get("CUDA_MPS_LOG_DIRECTORY", DEFAULT_LOG_DIRECTORY) or "/",
            gpu_index=indexes[0] if len(indexes) == 1 else None,
            gpu_indexes=indexes,
        )
    return FoundDaemon(daemon, None, None, process.trusted, process.info.uid, process.info.started)


def _visible_gpus(environment: Mapping[str, str], gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """Return the GPUs in a daemon's CUDA_VISIBLE_DEVICES; CUDA stops at the first word that it does not know."""
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return tuple(gpu.index for gpu in gpus)
    indexes: list[int] = []
    # The rest of a longer list is not even split.
    for word in environment["CUDA_VISIBLE_DEVICES"].split(",", _MOST_DEVICES)[:_MOST_DEVICES]:
        # CUDA takes ordinals and UUIDs; `select` takes more.
        if not re.match(r"\d|GPU-|MIG-", word.strip()) or ":" in word:
            break
        try:
            indexes += [device.gpu.index for device in select(word, gpus) if device.gpu.index not in indexes]
        except GpushareError:
            break
    return tuple(indexes)


def foreign_daemon_error(item: FoundDaemon, where: str, gpu: Gpu) -> InUse:
    """Return the error for a daemon of others that serves a device."""
    return InUse(
        f"an MPS daemon that gpushare did not start serves {where} ({item.title})",
        item.stop_hint,
        gpu=gpu.index,
        code="foreign_daemon",
    )


def own_daemon(host: Host, device: Device, *, to_change: bool = False) -> tuple[DaemonHome, DaemonRecord]:
    """Return the running daemon of gpushare on a device: its home and its record.

    Raises:
        NotFound: there is none, or it died (code ``no_daemon``, ``dead_daemon``).
        NoPermission: with ``to_change``, it belongs to another user. Any user may join it.
    """
    on_device = [
        item
        for item in find_daemons(host, [device.gpu], deep=False)
        if item.daemon.ours and item.daemon.device_uuid == device.uuid
    ]
    for item in on_device:
        home, record, pid = item.home, item.record, item.daemon.pid
        if home is None or record is None or record.interrupted or pid is None:
            continue
        if to_change and not host.root and record.uid != host.uid:
            raise not_your_daemon_error(
                f"the MPS daemon of {device.title}", f"user {user_name(record.uid)}", str(device.gpu.index)
            )
        if record.pid != pid or record.state != RUNNING:
            # Its start was killed before it wrote this, or it was adopted.
            record = replace(record, pid=pid, started=start_of(host.processes.identity(pid)), state=RUNNING)
        return home, record
    for item in on_device:
        if item.record is not None:
            raise _not_running_error(item.record, device)
    raise NoDaemon(
        f"no MPS daemon of gpushare serves {device.title}",
        f"start one: gpushare mps start -g {device.selector}; see others: gpushare mps status",
        gpu=device.gpu.index,
    )


def _not_running_error(record: DaemonRecord, device: Device) -> NotFound:
    """Return the error about a daemon that has a record and does not run."""
    clean_up = f"clean up: gpushare mps stop -g {device.selector}"
    if record.interrupted:
        return NotFound(
            f"the MPS daemon of {device.title} is being started, or its start was interrupted",
            f"start it again: {restart_command(record, device)}; or {clean_up}",
            gpu=device.gpu.index,
            code="start_interrupted",
        )
    return NotFound(
        f"the MPS daemon of {device.title} (process {record.pid}) is dead",
        clean_up if record.transient else f"{clean_up}; then start it again: {restart_command(record, device)}",
        gpu=device.gpu.index,
        code="dead_daemon",
    )


def check_device(host: Host, device: Device) -> None:
    """Raise unless the device can have an MPS daemon.

    Raises:
        NotSupported: no program, or a MIG-enabled GPU without a named instance.
        InUse: compute mode PROHIBITED.
    """
    if host.programs.find(control.PROGRAM) is None:
        raise missing_program_error(control.PROGRAM)
    if not device.uuid:
        raise NotSupported(f"{device.title} reports no UUID", "see: gpushare doctor", gpu=device.gpu.index)
    if device.mig is None and device.gpu.mig_enabled:
        first = device.gpu.mig_instances[0].uuid if device.gpu.mig_instances else "MIG-<uuid>"
        raise NotSupported(
            f"{device.title} is in MIG mode: MPS runs inside a MIG instance",
            f"name the instance: -g {first}",
            gpu=device.gpu.index,
            code="mig_enabled",
        )
    check_mode(device)


def check_mode(device: Device) -> None:
    """Raise if no CUDA program can use the device. Raises InUse: compute mode PROHIBITED."""
    if device.gpu.compute_mode is ComputeMode.PROHIBITED:
        raise InUse(
            f"{device.title} is in compute mode prohibited: no CUDA program can use it",
            f"allow it: sudo {compute_mode_command(device.gpu.uuid or '', 'DEFAULT')}",
            gpu=device.gpu.index,
            code="compute_prohibited",
        )
