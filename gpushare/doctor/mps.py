"""The checks of `gpushare doctor` on MPS: programs, daemons, clients."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError, cut
from gpushare.base.model import TimeSlice
from gpushare.base.units import MIB, counted, format_bytes
from gpushare.doctor.check import MOST_SHOWN, Check, Examination, Verdict, process_title, remedy_of
from gpushare.host.capabilities import user_name
from gpushare.host.cdi import local_path, root_of
from gpushare.host.machine import SHARED_MEMORY
from gpushare.host.records import read_tail
from gpushare.hostfile.look import unit_device
from gpushare.mps import control
from gpushare.mps.daemons import DEFAULT_PIPE_DIRECTORY
from gpushare.mps.home import UNIT_PIPES, anybody_changes, pipe_users
from gpushare.mps.limits import MEMORY_VARIABLE, THREADS_VARIABLE

if TYPE_CHECKING:
    from gpushare.base.model import Gpu, GpuProcess, MpsClient, MpsDaemon
    from gpushare.mps.daemons import FoundDaemon


# Processes of other users that claim to be MPS daemons: any user can start hundreds.
MOST_CLAIMS: Final = 10


def mps_programs(seen: Examination) -> Iterator[Check]:
    """Check that the control daemon and the server are installed, and that the control program runs."""
    for name, identifier in ((control.PROGRAM, "mps.control"), (control.SERVER_PROGRAM, "mps.server")):
        path = seen.host.programs.find(name)
        if path is None:
            yield Check.warning(
                identifier,
                seen=f"{name} is not installed",
                why="there is no MPS without it",
                remedy="install it: nvidia-compute-utils on Ubuntu, nvidia-cuda-mps on Debian",
            )
        elif name == control.PROGRAM:
            yield _control(seen, path)
        else:
            yield Check.passed(identifier, seen=path)


def _control(seen: Examination, path: str) -> Check:
    try:
        seen.mps_version = control.probe_version(seen.host.programs)
    except GpushareError as error:
        why = "no MPS daemon can be started, asked or stopped"
        return Check.failure("mps.control", seen=error.message, why=why, remedy=remedy_of(error))
    known = f"binary version {seen.mps_version}" if seen.mps_version else "before driver 580"
    return Check.passed("mps.control", seen=f"{path}, {known}")


def mps_daemons(seen: Examination) -> Iterator[Check]:
    """Check every daemon: dead, not answering, in FAULT, orphaned."""
    if seen.daemons_error is not None:
        yield Check.skipped("mps.daemons", seen=f"the MPS daemons are unknown: {seen.daemons_error.message}")
    elif not seen.daemons:
        yield Check.passed("mps.daemons", seen="no MPS daemon runs")
    unasked = [found.daemon for found in seen.daemons if found.daemon.unasked]
    for found in seen.daemons:
        if not found.daemon.unasked:
            yield _daemon(found)
    for daemon in unasked[:MOST_CLAIMS]:
        yield Check.skipped(
            "mps.unasked",
            gpu=daemon.gpu_index,
            seen=f"MPS daemon {daemon.pid} of {_user(daemon)} was not asked: it is another user's",
        )
    if len(unasked) > MOST_CLAIMS:
        yield Check.skipped(
            "mps.unasked", seen=f"{counted(len(unasked) - MOST_CLAIMS, 'more MPS daemon')} of other users"
        )


def _user(daemon: MpsDaemon) -> str:
    return daemon.user or "an unknown user"


def _daemon(found: FoundDaemon) -> Check:
    daemon, stop = found.daemon, f"gpushare mps stop -g {found.daemon.device_uuid}"
    if found.record is not None and found.record.interrupted:
        return Check.warning(
            "mps.interrupted",
            gpu=daemon.gpu_index,
            seen=f"the MPS daemon of {found.record.device_uuid} is being started, or its start was interrupted",
            why="its limits may not be set, and a compute mode that it changed is still to be restored",
            remedy=f"gpushare mps stop -g {found.record.device_uuid}",
        )
    if daemon.ours and daemon.pid is None:
        return Check.warning(
            "mps.stale",
            gpu=daemon.gpu_index,
            seen=f"an MPS daemon died and left its files in {found.home.directory if found.home else daemon.pipe_directory}",
            why="they name its limits, and a compute mode that is still to be restored",
            remedy=stop,
        )
    if daemon.error is not None:
        return Check(
            id="mps.answers",
            verdict=Verdict.FAIL if daemon.ours else Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=daemon.error,
            why="no program can join it",
            remedy=f"gpushare mps logs -g {daemon.device_uuid}; {stop} --force"
            if daemon.ours
            else "sudo gpushare mps status",
        )
    fault = next((server.pid for server in daemon.servers if server.status == "FAULT"), None)
    if fault is not None:
        return Check.failure(
            "mps.fault",
            gpu=daemon.gpu_index,
            seen=f"MPS server {fault} is in state FAULT",
            why="its clients have lost their contexts; new ones are refused (CUDA error 807) until all of them have ended",
            remedy=f"{stop} --force" if daemon.ours else "end its clients",
        )
    if daemon.transient and not daemon.clients and found.home is not None and not found.home.live_leases():
        return Check.warning(
            "mps.orphan",
            gpu=daemon.gpu_index,
            seen=f"MPS daemon {daemon.pid} was started by a run that has ended",
            why="nothing will stop it",
            remedy=stop,
        )
    whose = "of gpushare" if daemon.ours else f"of another owner ({_user(daemon)}, {daemon.pipe_directory})"
    clients = counted(len(daemon.clients), "client")
    return Check.passed("mps.daemons", f"MPS daemon {daemon.pid} {whose} answers, {clients}", daemon.gpu_index)


# The default /dev/shm of a container; its CUDA programs need some of it too.
_LITTLE_SHARED_MEMORY: Final = 64 * MIB
# NVIDIA advises 16384 for many clients; below the usual soft limit of Linux even a few do not fit.
_FEW_DESCRIPTORS: Final = 1024
_LARGE_LOG: Final = 100 * MIB
_TAIL_BYTES: Final = 64 << 10


def needs(seen: Examination) -> Iterator[Check]:
    """Check what MPS needs: shared memory, open files, reachable directories, a log that is not too large."""
    space = seen.host.machine.shared_memory()
    if space is None:
        yield Check.skipped("mps.shm", seen="the size of /dev/shm is unknown")
    elif space.total <= _LITTLE_SHARED_MEMORY or space.free < _LITTLE_SHARED_MEMORY // 4:
        yield Check.warning(
            "mps.shm",
            seen=f"{SHARED_MEMORY} has {format_bytes(space.total)}, {format_bytes(space.free)} free",
            why="an MPS server shares memory with its clients there: without room it fails to open its SHM segment",
            remedy="sudo mount -o remount,size=8G /dev/shm; of a container: docker run --shm-size=8g, or --ipc=host",
        )
    else:
        yield Check.passed("mps.shm", seen=f"{SHARED_MEMORY} has {format_bytes(space.free)} free")
    for found in seen.believed:
        yield from _descriptors(seen, found.daemon)
        yield from _directories(seen, found)
        yield from _log(found.daemon)


def _descriptors(seen: Examination, daemon: MpsDaemon) -> Iterator[Check]:
    limit = seen.host.machine.descriptor_limit(daemon.pid or 0)
    failed = re.search(r"failed to (?:create|open)[^\n]* SHM segment", log_tail(daemon, "server.log"))
    if failed or (limit is not None and limit < _FEW_DESCRIPTORS):
        told = "unknown" if limit is None else str(limit)
        yield Check.warning(
            "mps.descriptors",
            gpu=daemon.gpu_index,
            seen=f"MPS daemon {daemon.pid} may have {told} open files"
            + (", and its server could not open an SHM segment" if failed else ""),
            why="each client needs several, and the next ones are refused; NVIDIA advises 16384",
            remedy="gpushare mps stop, then: ulimit -n 16384; gpushare mps start (in a unit: LimitNOFILE=16384)",
        )


def _directories(seen: Examination, found: FoundDaemon) -> Iterator[Check]:
    daemon = found.daemon
    pipe = Path(daemon.pipe_directory or "/nonexistent")
    seen_pipe = _own(pipe)
    if seen_pipe is None or not stat.S_ISDIR(seen_pipe.st_mode):
        return
    mode = seen_pipe.st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield Check.warning(
            "mps.directory",
            gpu=daemon.gpu_index,
            seen=f"everybody may write into {pipe} (mode {stat.S_IMODE(mode):o})",
            why="any user can replace the daemon's socket with their own",
            remedy=f"sudo chmod 0755 {shlex.quote(str(pipe))}",
        )
    # 'users' of a gpushare.yaml closes it on purpose; the directories above must still be open.
    chosen = bool(pipe_users(pipe)) and (daemon.ours or str(pipe).startswith(f"{UNIT_PIPES}/"))
    first = pipe.parent if chosen else pipe
    closed = _closed(first, root_of(seen.host)) if daemon.user == "root" else None
    if closed is not None:
        yield Check.warning(
            "mps.reach",
            gpu=daemon.gpu_index,
            seen=f"only its owner may enter {closed}" + ("" if closed == pipe else f", on the way to {pipe}"),
            why="programs of other users and in containers cannot reach the daemon: they run without MPS, or fail",
            remedy=f"sudo chmod o+x {shlex.quote(str(closed))}",
        )


def _closed(directory: Path, root: Path) -> Path | None:
    # Above the directory of a simulated host lies the real machine.
    above = [path for path in (directory, *directory.parents) if path != root and path.is_relative_to(root)]
    for path in reversed(above):
        with contextlib.suppress(OSError):
            if not path.stat().st_mode & stat.S_IXOTH:
                return path
    return None


def _log(daemon: MpsDaemon) -> Iterator[Check]:
    path = Path(daemon.log_directory or "/nonexistent") / "control.log"
    found = _own(path)
    if found is not None and stat.S_ISREG(found.st_mode) and found.st_size > _LARGE_LOG:
        yield Check.warning(
            "mps.log",
            gpu=daemon.gpu_index,
            seen=f"{path} has grown to {format_bytes(found.st_size)}",
            why="every question to the daemon adds lines, and nothing rotates it",
            remedy=f"sudo truncate -s 0 {shlex.quote(str(path))}",
        )


def _own(path: Path) -> os.stat_result | None:
    """Return the lstat of a path that belongs to this user or root."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found if found.st_uid in {os.geteuid(), 0} else None
    return None


def log_tail(daemon: MpsDaemon, name: str) -> str:
    """Return the end of a daemon's log (``control.log``, ``server.log``), empty if it may not be read."""
    return read_tail(Path(daemon.log_directory or "/nonexistent") / name, _TAIL_BYTES)


_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
# The default of libcuda under MPS (NVIDIA's MPS guide).
_USUAL_CONNECTIONS: Final = 2


def client_environments(seen: Examination) -> Iterator[Check]:
    """Check for clients whose memory limits are not in force, or that use up connections."""
    for found in seen.believed:
        for client in found.daemon.clients:
            environment = seen.host.processes.environment(client.pid) or {}
            yield from _dropped_limits(found.daemon, client, environment)
            yield from _many_connections(found.daemon, client, environment)


def _dropped_limits(daemon: MpsDaemon, client: MpsClient, environment: Mapping[str, str]) -> Iterator[Check]:
    """Check for a memory limit that names a GPU the client does not see: CUDA then drops all its limits."""
    text, uuid = environment.get(MEMORY_VARIABLE), daemon.device_uuid
    if text is None or uuid is None or not any(_names_other(entry, uuid) for entry in text.split(",")):
        return
    yield Check.warning(
        "mps.limits_dropped",
        gpu=daemon.gpu_index,
        seen=f"client {client.pid} has {MEMORY_VARIABLE}={cut(text, MOST_SHOWN)}, and sees one GPU only",
        why="an entry for a GPU that it does not see drops all its memory limits, including the server's",
        remedy="restart it with only 0=SIZE: gpushare run --memory SIZE -- CMD",
    )


def _names_other(entry: str, uuid: str) -> bool:
    """Return whether an entry names a device other than the visible one (ordinal 0, or its UUID)."""
    device = entry.partition("=")[0].strip()
    return bool(device) and device != "0" and not (len(device) > 4 and uuid.startswith(device))


def _many_connections(daemon: MpsDaemon, client: MpsClient, environment: Mapping[str, str]) -> Iterator[Check]:
    text = environment.get(_CONNECTIONS, "")
    # Another user may have set thousands of digits, which int() refuses.
    digits = text.lstrip("0") or "0"
    if text.isascii() and text.isdigit() and (len(digits) > 9 or int(digits) > _USUAL_CONNECTIONS):
        yield Check.warning(
            "mps.connections",
            gpu=daemon.gpu_index,
            seen=f"client {client.pid} has {_CONNECTIONS}={cut(text, MOST_SHOWN)}",
            why="a GPU has few connections: fewer clients fit, and the next one gets CUDA error 809",
            remedy=f"restart it without: unset {_CONNECTIONS}",
        )


def daemon_environment(seen: Examination) -> Iterator[Check]:
    """Check for a default thread percentage that a daemon silently ignored."""
    for found in seen.believed:
        text = (seen.host.processes.environment(found.daemon.pid or 0) or {}).get(THREADS_VARIABLE)
        if text is not None and not _is_percentage(text):
            yield Check.warning(
                "mps.threads_ignored",
                gpu=found.daemon.gpu_index,
                seen=f"MPS daemon {found.daemon.pid} was started with {THREADS_VARIABLE}={cut(text, MOST_SHOWN)}",
                why="it ignores anything but 0 to 100 silently, and every client gets 100 %",
                remedy=f"restart it with a number from 1 to 100 in {THREADS_VARIABLE}; or: gpushare mps start --threads 50",
            )


def _is_percentage(text: str) -> bool:
    try:
        return 0.0 < float(text) <= 100.0
    except ValueError:
        return False


_PIPE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PENDING: Final = re.compile(
    r"^\[([\d-]{10} [\d:]{8})\.\d+ Control +\d+\] NEW CLIENT (\d{1,10}) from user (\d{1,10}): Server is not ready, push client to pending",
    re.MULTILINE | re.ASCII,
)


def foreign(seen: Examination) -> Iterator[Check]:
    """Check for daemons of others, at the default path, left dead there, and two on one GPU."""
    claims = [found.daemon for found in seen.serving if not found.trusted]
    for daemon in claims[:MOST_CLAIMS]:
        yield Check.warning(
            "mps.foreign",
            gpu=daemon.gpu_index,
            seen=f"process {daemon.pid} of {_user(daemon)} claims to be an MPS daemon",
            why="only its name and environment say so: it was not asked, and its files were not read",
            remedy=f"ask {daemon.user or 'its user'} what it is; or see: ps -fp {daemon.pid}",
        )
    if len(claims) > MOST_CLAIMS:
        yield Check.warning(
            "mps.foreign",
            seen=f"{counted(len(claims) - MOST_CLAIMS, 'more process')} of other users that claim to be MPS daemons",
            why="any user can start processes of that name",
            remedy=f"list all of them: pgrep -af {control.PROGRAM}",
        )
    for found in seen.serving:
        daemon = found.daemon
        if not found.trusted:
            continue
        if daemon.pipe_directory == DEFAULT_PIPE_DIRECTORY:
            yield Check.warning(
                "mps.default_path",
                gpu=daemon.gpu_index,
                seen=f"MPS daemon {daemon.pid} listens at {DEFAULT_PIPE_DIRECTORY}, where every CUDA program looks",
                why="programs that never asked for MPS join it, even in containers, and fail with it (CUDA error 805)",
                remedy=f"{_quit(daemon)}; then a private one: gpushare mps start",
            )
        elif not daemon.ours and not _is_of_unit(seen, found):
            yield Check.warning(
                "mps.foreign",
                gpu=daemon.gpu_index,
                seen=f"MPS daemon {daemon.pid} of {_user(daemon)} at {daemon.pipe_directory} was not started by gpushare",
                why="gpushare shows it, but leaves its limits, compute mode and end to its owner",
                remedy=f"if it is not needed: {_quit(daemon)}",
            )
    yield from _several(seen)
    yield from _dead_default(seen)


def _is_of_unit(seen: Examination, found: FoundDaemon) -> bool:
    """Return whether a systemd unit of `gpushare export systemd` runs it."""
    return unit_device(found, seen.answering) is not None


def _quit(daemon: MpsDaemon) -> str:
    return f"echo quit | sudo CUDA_MPS_PIPE_DIRECTORY={shlex.quote(daemon.pipe_directory or '')} {control.PROGRAM}"


def _several(seen: Examination) -> Iterator[Check]:
    for gpu in seen.answering:
        pids = [
            str(found.daemon.pid)
            for found in seen.believed
            if gpu.index in found.daemon.gpu_indexes and not (found.daemon.device_uuid or "").startswith("MIG-")
        ]
        if len(pids) > 1:
            yield Check.warning(
                "mps.several",
                gpu=gpu.index,
                seen=f"{len(pids)} MPS daemons serve GPU {gpu.index}: {', '.join(pids)}",
                why="only clients of one daemon run at the same time; between daemons the GPU is time-sliced",
                remedy="gpushare mps status; then stop all but one",
            )


def _dead_default(seen: Examination) -> Iterator[Check]:
    path = local_path(seen.host, f"{DEFAULT_PIPE_DIRECTORY}/control")
    unknown = seen.daemons_error is not None or any(
        found.daemon.pipe_directory in {None, DEFAULT_PIPE_DIRECTORY} for found in seen.daemons
    )
    # In a container, the daemon of this directory may run outside.
    if unknown or seen.host.processes.namespace_is_host() is False or not path.exists() or not _refuses(path):
        return
    yield Check.warning(
        "mps.default_stale",
        seen=f"{DEFAULT_PIPE_DIRECTORY}/control exists, and no MPS daemon answers there",
        why="CUDA programs look there first, and may fail with CUDA error 805",
        remedy=f"sudo rm -r {DEFAULT_PIPE_DIRECTORY}",
    )


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as conversation:
        conversation.settimeout(0.5)
        try:
            conversation.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def devices(seen: Examination) -> Iterator[Check]:
    """Check that the device of each daemon still exists, and that its time-slice is the default."""
    complete = len(seen.answering) == len(seen.gpus)
    whole = {gpu.uuid for gpu in seen.answering if not gpu.mig_enabled}
    present = whole | {mig.uuid for gpu in seen.answering for mig in gpu.mig_instances}
    for found in seen.believed:
        uuid = found.daemon.device_uuid
        if uuid is not None and complete and uuid not in present:
            yield Check.failure(
                "mps.device",
                gpu=found.daemon.gpu_index,
                seen=f"MPS daemon {found.daemon.pid} serves {uuid}, which no longer exists",
                why="MIG was changed while it ran; its clients get CUDA error 100 or 805",
                remedy=f"gpushare mps stop -g {uuid} --force",
            )
    for gpu in seen.answering:
        level = seen.levels.get(gpu.index)
        if level not in {None, TimeSlice.DEFAULT} and any(gpu.index in one.daemon.gpu_indexes for one in seen.believed):
            yield Check.warning(
                "mps.timeslice",
                gpu=gpu.index,
                seen=f"the time-slice of GPU {gpu.index} is {level.title if level else '-'} while an MPS daemon serves it",
                why="clients of one MPS server run at the same time, so the time-slice has no effect between them",
                remedy=f"sudo gpushare timeslice set default -g {gpu.index} --beside-mps",
            )


def outside(seen: Examination) -> Iterator[Check]:
    """Check for CUDA programs on the GPU of a daemon that are not its clients."""
    known = set(seen.host.processes.named(control.SERVER_PROGRAM))
    for found in seen.daemons:
        known |= {server.pid for server in found.daemon.servers} | {client.pid for client in found.daemon.clients}
        known |= {found.daemon.pid or 0}
    for found in seen.believed:
        for gpu in seen.answering:
            # The clients of a daemon that was not asked are unknown.
            if gpu.index not in found.daemon.gpu_indexes or found.daemon.unasked:
                continue
            strangers = [one for one in _on(gpu, found.daemon) if one.compute and not one.mps and one.pid not in known]
            known |= {one.pid for one in strangers}
            if strangers:
                yield Check.warning(
                    "mps.outside",
                    gpu=gpu.index,
                    seen=f"on GPU {gpu.index}, outside the MPS daemon: {_named(seen, strangers)}",
                    why="the daemon's limits do not apply to it, and in its time slices no client runs",
                    remedy=f"restart it as a client: gpushare run -g {gpu.index} --threads 50 -- CMD",
                )


def _on(gpu: Gpu, daemon: MpsDaemon) -> list[GpuProcess]:
    mig = next((one for one in gpu.mig_instances if one.uuid == daemon.device_uuid), None)
    if mig is None:
        return [] if gpu.mig_enabled else list(gpu.processes or ())
    place = (mig.gpu_instance_id, mig.compute_instance_id)
    return [one for one in gpu.processes or () if (one.gpu_instance_id, one.compute_instance_id) == place]


def _named(seen: Examination, processes: list[GpuProcess]) -> str:
    more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    return ", ".join(process_title(seen, one.pid) for one in processes[:3]) + more


def pending(seen: Examination) -> Iterator[Check]:
    """Check for clients that wait for the clients of another user to end (``control.log``)."""
    for found in seen.believed:
        daemon = found.daemon
        served = sorted({server.user or "user unknown" for server in daemon.servers})
        waiting = sorted(set(_waiting(seen, daemon)))
        if waiting and served:
            users = ", ".join(sorted({user for _, user in waiting}))
            yield Check.warning(
                "mps.pending",
                gpu=daemon.gpu_index,
                seen=f"{counted(len(waiting), 'client')} of {users} waits for MPS daemon {daemon.pid}, which serves {', '.join(served)}",
                why="a daemon serves one user at a time: the others wait until that user's last client has ended",
                remedy="see whose clients to end: gpushare mps status; or run all as one user",
            )


def open_limits(seen: Examination) -> Iterator[Check]:
    """Check for daemons of root whose limits every user may change (before driver 550)."""
    for found in seen.believed:
        pipe = Path(found.daemon.pipe_directory or "/nonexistent")
        if found.uid != 0 or pipe_users(pipe) is None or not anybody_changes(pipe, seen.driver):
            continue
        yield Check.warning(
            "mps.open",
            gpu=found.daemon.gpu_index,
            seen=f"every user may change the limits of MPS daemon {found.daemon.pid}: driver {seen.driver}, and {pipe} is open",
            why="before driver 550 a daemon accepts settings from every user who can reach it",
            remedy=f"list the users who may connect ('users' of mps, gpushare apply); or only root: sudo chmod 0700 {shlex.quote(str(pipe))}",
        )


def _waiting(seen: Examination, daemon: MpsDaemon) -> Iterator[tuple[int, str]]:
    """Yield PID and user of waiting clients by the log, checked against the kernel: any client can write lines into it."""
    clients = {client.pid for client in daemon.clients}
    served = {server.user for server in daemon.servers}
    for stamp, pid, uid in _PENDING.findall(log_tail(daemon, "control.log")):
        info = seen.host.processes.describe(int(pid)) if 0 < int(pid) < 1 << 31 else None
        if info is None or info.uid != int(uid):
            continue
        user = user_name(int(uid))
        if int(pid) in clients or user in served:
            continue
        if (seen.host.processes.environment(info.pid) or {}).get(_PIPE, daemon.pipe_directory) != daemon.pipe_directory:
            # A client of another daemon.
            continue
        # The process started after the line was written: the PID belonged to another.
        began = info.started_at
        if began is None or began <= _time(stamp) + 2.0:
            yield int(pid), user


def _time(stamp: str) -> float:
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


def version(seen: Examination) -> Iterator[Check]:
    """Check that the MPS programs are those of the driver (nvmlSystemGetCudaDriverVersion)."""
    program = seen.mps_version
    if seen.nvml_error is not None or program is None:
        return
    try:
        driver = seen.host.nvml.ask(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2())
    except GpushareError:
        return
    if driver is not None and program != int(driver):
        yield Check.warning(
            "mps.version",
            seen=f"{control.PROGRAM} is from CUDA {_cuda(program)}, the driver from CUDA {_cuda(int(driver))}",
            why="the daemon, the server and libcuda must come from one driver: the server fails with a version mismatch",
            remedy="install the MPS programs of the same driver version, and restart the daemons",
        )


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


USE_CHECKS: Final[tuple[Callable[[Examination], Iterator[Check]], ...]] = (
    version,
    foreign,
    devices,
    outside,
    pending,
    open_limits,
    client_environments,
    daemon_environment,
    needs,
)
