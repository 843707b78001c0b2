"""The MPS daemons of a host as they are now: ours from their homes, others from the process table."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, NotFound
from gpushare.host import mps_control
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_home import ADOPTED, DaemonHome, DaemonRecord, homes_in
from gpushare.host.mps_told import ask
from gpushare.model import Gpu, MpsDaemon, Priority
from gpushare.selection import select

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.host.process import ProcessInfo

# Where the daemon listens when nobody tells it otherwise (NVIDIA's MPS guide).
DEFAULT_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's choice, not ours
DEFAULT_LOG_DIRECTORY: Final = "/var/log/nvidia-mps"
# 16 GPUs in 7 instances each; it may be anybody's.
_MOST_DEVICES: Final = 128
_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-fA-F-]{1,60}$", re.ASCII)


@dataclass(frozen=True)
class FoundDaemon:
    """A daemon with the home that gpushare made for it, if it did.

    ``trusted``: it runs as this user or as root. Of any other its PIDs, its directories and what it says are a claim.
    ``started_at`` is when its process started: whoever has its PID later is not meant.
    """

    daemon: MpsDaemon
    home: DaemonHome | None
    record: DaemonRecord | None
    trusted: bool = True
    uid: int | None = None
    started_at: float | None = None

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


@dataclass(frozen=True)
class _Process:
    """A process that is, or says that it is, an MPS control daemon."""

    info: ProcessInfo
    environment: Mapping[str, str] | None
    trusted: bool

    @property
    def pid(self) -> int:
        return self.info.pid

    @property
    def pipe(self) -> str | None:
        return _pipe_directory(self.environment)

    @property
    def device(self) -> str | None:
        """Return the UUID of the one device that it serves, as a daemon of ours does."""
        visible = (self.environment or {}).get("CUDA_VISIBLE_DEVICES", "")
        return visible if _UUID.match(visible) else None


def find_daemons(host: Host, gpus: Sequence[Gpu], *, deep: bool = True, strangers: bool = False) -> list[FoundDaemon]:
    """Return the daemons of this host, ours first.

    ``deep`` asks each for limits, servers and clients; otherwise only whether it is there. Those of other users (not
    root's) are asked with ``strangers`` only: they may say anything, or nothing. A record whose daemon is gone is
    returned with an error: `gpushare mps stop` clears it away. A daemon in a home of ours is ours also without a record.
    """
    directories = [host.run_directory, *host.shared_run_directories]
    running = _running(host)
    ours = [_ours(host, home, gpus, running) for home in homes_in(directories)]
    found = [item for item in ours if item is not None]
    known = {item.daemon.pid for item in found}
    for one in running:
        if one.pid not in known:
            found.append(_adopted(one, gpus, directories) or _foreign(one, gpus))
    return ask(host, found, strangers=strangers) if deep else found


def _running(host: Host) -> list[_Process]:
    """Return the processes that are MPS control daemons, by PID.

    A conversation is a process of the same program for a moment, without an option that makes it a daemon
    (seen with 535). So is a daemon's child before it becomes a server: with its command line and its
    environment, but a daemon's child.
    """
    candidates: dict[tuple[str | None, int | None], list[_Process]] = {}
    trusted = {0, host.uid, os.geteuid()}
    for pid in host.processes.named(mps_control.PROGRAM):
        info = host.processes.describe(pid)
        if info is not None and _is_daemon(info.command_line):
            one = _Process(info, host.processes.environment(pid), info.uid in trusted)
            # By user: what others call their processes hides none of ours.
            candidates.setdefault((one.pipe, info.uid), []).append(one)
    running = []
    for same in candidates.values():
        # Who descends from whom costs a look at every process: only where two share a directory.
        below = {child for one in same for child in host.processes.descendants(one.pid)[1:]} if len(same) > 1 else set()
        running += [one for one in same if one.pid not in below]
    return sorted(running, key=lambda one: one.pid)


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
    """Return the PID of the daemon of this user or root that listens at a pipe directory, or None.

    Not from its PID file, which any user may write and the daemon of driver 535 does not make: from the process table,
    by program, environment and user. Name and environment alone prove nothing: any user can have both.
    """
    return next((one.pid for one in _running(host) if one.trusted and one.pipe == pipe_directory), None)


def is_running(host: Host, home: DaemonHome, record: DaemonRecord) -> bool:
    """Return whether the daemon of a record lives."""
    return live_pid(host, home, record) is not None


def live_pid(
    host: Host, home: DaemonHome, record: DaemonRecord, running: Sequence[_Process] | None = None
) -> int | None:
    """Return the PID of the daemon of a record, or None when it is dead.

    Its start time guards against a reused PID, but moves when the clock is set, and a start that was killed has noted
    none: a daemon of ours that serves this device from this home is it all the same.
    """
    if record.pid is not None and record.started_at is not None and host.processes.alive(record.pid, record.started_at):
        return record.pid
    pipe = str(home.pipe)
    for one in _running(host) if running is None else running:
        if not one.trusted:
            continue
        if one.pid == record.pid and one.pipe in {None, pipe}:
            return one.pid
        if one.pipe == pipe and one.device == record.device_uuid:
            return one.pid
    return None


def adopted_record(host: Host, home: DaemonHome, uuid: str) -> DaemonRecord | None:
    """Return a record for a daemon of ours that serves a device from this home and has none, or None."""
    # Its socket is there, or nobody listens: the process table is long.
    if not os.path.lexists(home.pipe / "control"):
        return None
    for one in _running(host):
        if one.trusted and one.pipe == str(home.pipe) and one.device == uuid:
            return _record_for(one, uuid)
    return None


def _record_for(one: _Process, uuid: str) -> DaemonRecord:
    uid = os.geteuid() if one.info.uid is None else one.info.uid
    return DaemonRecord(device_uuid=uuid, pid=one.pid, started_at=one.info.started_at, uid=uid, state=ADOPTED)


def _ours(host: Host, home: DaemonHome, gpus: Sequence[Gpu], running: Sequence[_Process]) -> FoundDaemon | None:
    record = home.read()
    if record is None:
        return None
    pid = live_pid(host, home, record, running)
    daemon = _daemon_of(home, record, pid, gpus)
    if pid is None:
        way = f"clear it away: gpushare mps stop -g {record.device_uuid}"
        gone = f"the daemon {record.pid} is gone; {way}"
        if record.interrupted:
            gone = (
                "its start is under way, or was interrupted; start it again: "
                f"gpushare mps start -g {record.device_uuid}; or {way}"
            )
        return FoundDaemon(replace(daemon, error=gone), home, record)
    info = host.processes.describe(pid)
    daemon = replace(daemon, user=None if info is None else info.user)
    if info is None:
        return FoundDaemon(daemon, home, record)
    return FoundDaemon(daemon, home, record, uid=info.uid, started_at=info.started_at)


def _daemon_of(home: DaemonHome, record: DaemonRecord, pid: int | None, gpus: Sequence[Gpu]) -> MpsDaemon:
    index = _gpu_index(record.device_uuid, gpus)
    uuid = record.device_uuid
    unfinished = (
        f"its start is under way, or was interrupted; finish it: gpushare mps start -g {uuid}; "
        f"or stop it: gpushare mps stop -g {uuid}"
    )
    return MpsDaemon(
        pid=pid,
        ours=True,
        pipe_directory=str(home.pipe),
        log_directory=str(home.log),
        device_uuid=uuid,
        gpu_index=index,
        gpu_indexes=() if index is None else (index,),
        threads_percent=record.threads_percent,
        memory_limit_bytes=record.memory_limit_bytes,
        priority=None if record.priority is None else Priority(record.priority),
        transient=record.transient,
        note=unfinished if record.interrupted and pid is not None else None,
    )


def _adopted(one: _Process, gpus: Sequence[Gpu], directories: Sequence[Path]) -> FoundDaemon | None:
    """Return a daemon in a home of ours whose record is missing: a start was killed before it was written."""
    home = DaemonHome.at_pipe(one.pipe, directories) if one.trusted else None
    if home is None or one.device is None or home.read() is not None:
        return None
    record = _record_for(one, one.device)
    daemon = replace(_daemon_of(home, record, one.pid, gpus), user=one.info.user)
    return FoundDaemon(daemon, home, record, uid=one.info.uid, started_at=one.info.started_at)


def _foreign(one: _Process, gpus: Sequence[Gpu]) -> FoundDaemon:
    if one.environment is None:
        daemon = MpsDaemon(
            pid=one.pid,
            ours=False,
            pipe_directory=None,
            user=one.info.user,
            error="its environment may not be read: look as root",
        )
        return FoundDaemon(daemon, None, None, one.trusted, one.info.uid, one.info.started_at)
    indexes = _visible_gpus(one.environment, gpus)
    daemon = MpsDaemon(
        pid=one.pid,
        ours=False,
        pipe_directory=one.pipe,
        log_directory=one.environment.get("CUDA_MPS_LOG_DIRECTORY", DEFAULT_LOG_DIRECTORY) or "/",
        gpu_index=indexes[0] if len(indexes) == 1 else None,
        gpu_indexes=indexes,
        user=one.info.user,
    )
    return FoundDaemon(daemon, None, None, one.trusted, one.info.uid, one.info.started_at)


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
    for word in environment["CUDA_VISIBLE_DEVICES"].split(",", _MOST_DEVICES)[:_MOST_DEVICES]:
        # CUDA takes ordinals and UUIDs; `select` takes more.
        if not re.match(r"\d|GPU-|MIG-", word.strip()) or ":" in word:
            break
        try:
            found += [device.gpu.index for device in select(word, gpus) if device.gpu.index not in found]
        except GpushareError:
            break
    return tuple(found)
