"""The checks of `gpushare doctor` on MPS: programs, daemons, clients."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from gpushare.base.errors import GpushareError, cut, or_none
from gpushare.base.model import Gpu, GpuProcess, MpsDaemon
from gpushare.base.units import MIB, counted, first_few, format_bytes
from gpushare.doctor.check import MOST_SHOWN, Check, Examination, finding, for_owner, process_title, remedy_of
from gpushare.host.capabilities import user_name
from gpushare.host.cdi import local_path, root_of
from gpushare.host.machine import SHARED_MEMORY
from gpushare.host.records import read_tail
from gpushare.hostfile.look import unit_device
from gpushare.mps import control
from gpushare.mps.daemons import DEFAULT_PIPE_DIRECTORY, FoundDaemon
from gpushare.mps.home import UNIT_PIPES, pipe_users, restart_command
from gpushare.mps.kill import fault_hint
from gpushare.mps.limits import MEMORY_VARIABLE, THREADS_VARIABLE, Limits
from gpushare.run.jobs import OPPORTUNISTIC, jobs_of_processes

# Stands for a directory that is unknown: nothing is read from it.
_NO_DIRECTORY: Final = "/nonexistent"
# How many processes of other users that claim to be MPS daemons are named: any user can start hundreds.
MOST_CLAIMS: Final = 10


def mps_programs(seen: Examination) -> Iterator[Check]:
    """Check that the control daemon and the server are installed, and that the control program runs."""
    for name, identifier in ((control.PROGRAM, "mps.control"), (control.SERVER_PROGRAM, "mps.server")):
        path = seen.host.programs.find(name)
        if path is None:
            yield finding(identifier, program=name)
            continue
        if name == control.PROGRAM:
            try:
                # Later checks need the version too.
                seen.mps_version = control.probe_version(seen.host.programs)
            except GpushareError as error:
                yield finding("mps.control failed", error=error, remedy=remedy_of(error))
                continue
            path += f", binary version {seen.mps_version}" if seen.mps_version else ", before driver 580"
        yield Check.passed(identifier, seen=path)


def mps_daemons(seen: Examination) -> Iterator[Check]:
    """Check every daemon: dead, not answering, in FAULT, orphaned."""
    if seen.daemons_error is not None:
        yield Check.skipped("mps.daemons", seen=f"the MPS daemons are unknown: {seen.daemons_error.message}")
    elif not seen.daemons:
        yield Check.passed("mps.daemons", seen="no MPS daemon runs")
    for item in seen.daemons:
        if not item.daemon.unasked:
            yield _daemon_check(item)


def _owner_text(daemon: MpsDaemon) -> str:
    return daemon.user or "an unknown user"


def _daemon_check(found: FoundDaemon) -> Check:
    """Return the worst that is wrong with a daemon that was asked, or that it answers."""
    daemon = found.daemon
    gpu = daemon.gpu_index
    stop = f"gpushare mps stop -g {daemon.device_uuid}"
    # A daemon that a run started has no limits of its own; the next run starts another.
    start = "" if daemon.transient else f"; {_start_text(found)}"
    if found.record is not None and found.record.interrupted:
        return finding("mps.interrupted", gpu, uuid=found.record.device_uuid)
    if daemon.ours and daemon.pid is None:
        return finding(
            "mps.stale",
            gpu,
            directory=found.home.directory if found.home else daemon.pipe_directory,
            remedy=f"{stop}{start}",
        )
    if daemon.error is not None:
        return finding(
            "mps.answers" if daemon.ours else "mps.answers other", gpu, daemon=daemon, stop=stop, start=start
        )
    fault = next((server.pid for server in daemon.servers if server.status == "FAULT"), None)
    if fault is not None:
        remedy = fault_hint(stop, found.record) if daemon.ours else "end its clients"
        return finding("mps.fault", gpu, pid=fault, remedy=remedy)
    if daemon.transient and not daemon.clients and found.home is not None and found.home.live_leases() == []:
        return finding("mps.orphan", gpu, daemon=daemon, stop=stop)
    whose = "of gpushare" if daemon.ours else f"of another owner ({_owner_text(daemon)}, {daemon.pipe_directory})"
    clients = counted(len(daemon.clients), "client")
    return Check.passed("mps.daemons", f"MPS daemon {daemon.pid} {whose} answers, {clients}", gpu)


def _start_text(found: FoundDaemon) -> str:
    """Return how a daemon is started again, with its limits."""
    return "start it again" if found.record is None else restart_command(found.record, None)


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
        yield finding("mps.shm", total=format_bytes(space.total), free=format_bytes(space.free))
    else:
        yield Check.passed("mps.shm", seen=f"{SHARED_MEMORY} has {format_bytes(space.free)} free")
    for item in seen.trusted_daemons:
        yield from _few_descriptors(seen, item)
        yield from _pipe_directory(seen, item)
        log = Path(item.daemon.log_directory or _NO_DIRECTORY) / "control.log"
        status = _trusted_lstat(log)
        # A log that nothing rotates.
        if status is not None and stat.S_ISREG(status.st_mode) and status.st_size > _LARGE_LOG:
            yield finding("mps.log", item.daemon.gpu_index, path=log, size=format_bytes(status.st_size))


def _few_descriptors(seen: Examination, found: FoundDaemon) -> Iterator[Check]:
    """Check that a daemon may open enough files for its clients."""
    daemon = found.daemon
    limit = seen.host.machine.descriptor_limit(daemon.pid or 0)
    failed = re.search(r"failed to (?:create|open)[^\n]* SHM segment", log_tail(daemon, "server.log"))
    if failed or (limit is not None and limit < _FEW_DESCRIPTORS):
        yield finding(
            "mps.descriptors",
            daemon.gpu_index,
            daemon=daemon,
            limit="unknown" if limit is None else limit,
            failed=", and its server could not open an SHM segment" if failed else "",
            stop=found.stop_command,
            start=_start_text(found),
        )


def _pipe_directory(seen: Examination, found: FoundDaemon) -> Iterator[Check]:
    """Check that nobody else may replace the pipes of a daemon, and that users reach the pipes of root's daemon."""
    daemon = found.daemon
    pipe = Path(daemon.pipe_directory or _NO_DIRECTORY)
    status = _trusted_lstat(pipe)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return
    mode = status.st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield finding("mps.directory", daemon.gpu_index, pipe=pipe, mode=stat.S_IMODE(mode))
    if daemon.user != "root":
        return
    # Under `users:` of gpushare.yaml it is closed on purpose; the directories above must still be open.
    closed_on_purpose = bool(pipe_users(pipe)) and (daemon.ours or str(pipe).startswith(f"{UNIT_PIPES}/"))
    closed = _first_closed(pipe.parent if closed_on_purpose else pipe, root_of(seen.host))
    if closed is not None:
        yield finding(
            "mps.reach", daemon.gpu_index, closed=closed, way="" if closed == pipe else f", on the way to {pipe}"
        )


def _first_closed(directory: Path, root: Path) -> Path | None:
    """Return the first directory on the way to this one that other users may not enter; None: there is none."""
    # Above the directory of a simulated host lies the real machine.
    above = [path for path in (directory, *directory.parents) if path != root and path.is_relative_to(root)]
    for path in reversed(above):
        with contextlib.suppress(OSError):
            if not path.stat().st_mode & stat.S_IXOTH:
                return path
    return None


def _trusted_lstat(path: Path) -> os.stat_result | None:
    """Return the lstat of a path that belongs to this user or root; None: it does not, as others may swap it, or is not there."""
    with contextlib.suppress(OSError):
        stated = path.lstat()
        return stated if stated.st_uid in {os.geteuid(), 0} else None
    return None


def log_tail(daemon: MpsDaemon, name: str) -> str:
    """Return the end of a daemon's log (``control.log``, ``server.log``), empty if it may not be read."""
    return read_tail(Path(daemon.log_directory or _NO_DIRECTORY) / name, _TAIL_BYTES)


_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
# The default of libcuda under MPS (NVIDIA's MPS guide).
_USUAL_CONNECTIONS: Final = 2


def client_environments(seen: Examination) -> Iterator[Check]:
    """Check for clients whose memory limits are not in force, or that use up connections.

    CUDA drops all limits of a client if one of them names a GPU that it does not see. A server has fewer clients if some
    take more connections than usual.
    """
    for item in seen.trusted_daemons:
        uuid = item.daemon.device_uuid
        for client in item.daemon.clients:
            environment = seen.host.processes.environment(client.pid) or {}
            limits = environment.get(MEMORY_VARIABLE, "")
            if uuid is not None and any(_names_other_device(entry, uuid) for entry in limits.split(",")):
                value = cut(limits, MOST_SHOWN)
                check = finding("mps.limits_dropped", item.daemon.gpu_index, client=client, value=value)
                yield for_owner(seen, check, [client.pid])
            text = environment.get(_CONNECTIONS, "")
            # Another user may have set thousands of digits, which int() refuses.
            digits = (text.lstrip("0") or "0") if text.isascii() and text.isdigit() else "0"
            if len(digits) > 9 or int(digits) > _USUAL_CONNECTIONS:
                value = cut(text, MOST_SHOWN)
                check = finding("mps.connections", item.daemon.gpu_index, client=client, value=value)
                yield for_owner(seen, check, [client.pid])


def _names_other_device(entry: str, uuid: str) -> bool:
    """Return whether an entry (``DEVICE=SIZE``) names a device other than the visible one: ordinal 0, or its UUID."""
    device = entry.partition("=")[0].strip()
    # CUDA takes the beginning of a UUID too, but GPU- alone is none.
    is_visible = device == "0" or (len(device) > len("GPU-") and uuid.startswith(device))
    return bool(device) and not is_visible


def daemon_environment(seen: Examination) -> Iterator[Check]:
    """Check for a default thread percentage that a daemon silently ignored."""
    for item in seen.trusted_daemons:
        environment = seen.host.processes.environment(item.daemon.pid or 0) or {}
        text = environment.get(THREADS_VARIABLE)
        accepted = Limits.in_environment(environment, item.daemon.device_uuid or "")
        if text is not None and accepted.threads_percent is None:
            yield finding("mps.threads_ignored", item.daemon.gpu_index, daemon=item.daemon, value=cut(text, MOST_SHOWN))


_PIPE: Final = "CUDA_MPS_PIPE_DIRECTORY"
# A PID is a positive pid_t: the log can have any number.
_MOST_PID: Final = (1 << 31) - 1
# The log has whole seconds, and the start of a process is not exact either.
_LOG_CLOCK_SECONDS: Final = 2.0
_PENDING: Final = re.compile(
    r"^\[([\d-]{10} [\d:]{8})\.\d+ Control +\d+\] NEW CLIENT (\d{1,10}) from user (\d{1,10}): Server is not ready, push client to pending",
    re.MULTILINE | re.ASCII,
)


def foreign(seen: Examination) -> Iterator[Check]:
    """Check for daemons that gpushare did not start, for two on one GPU, and for what is left of one at the default path."""
    claims = [f"{item.daemon.pid} ({_owner_text(item.daemon)})" for item in seen.serving_daemons if not item.trusted]
    if claims:
        yield finding("mps.foreign claim", processes=first_few(claims, MOST_CLAIMS))
    for item in seen.trusted_daemons:
        daemon = item.daemon
        if daemon.pipe_directory == DEFAULT_PIPE_DIRECTORY:
            yield finding(
                "mps.default_path",
                daemon.gpu_index,
                daemon=daemon,
                quit=_quit_command(daemon),
                gpus="all" if daemon.gpu_index is None else daemon.gpu_index,
            )
        elif not daemon.ours and unit_device(item, seen.answering) is None:
            yield finding(
                "mps.foreign", daemon.gpu_index, daemon=daemon, user=_owner_text(daemon), quit=_quit_command(daemon)
            )
    for gpu in seen.answering:
        pids = [
            str(item.daemon.pid)
            for item in seen.trusted_daemons
            if gpu.index in item.daemon.gpu_indexes and not (item.daemon.device_uuid or "").startswith("MIG-")
        ]
        if len(pids) > 1:
            yield finding("mps.several", gpu.index, number=len(pids), pids=", ".join(pids))
    yield from _dead_default(seen)


def _quit_command(daemon: MpsDaemon) -> str:
    return f"echo quit | sudo CUDA_MPS_PIPE_DIRECTORY={shlex.quote(daemon.pipe_directory or '')} {control.PROGRAM}"


def _dead_default(seen: Examination) -> Iterator[Check]:
    """Check that no dead daemon has left its socket at the default path, where programs would look for it."""
    path = local_path(seen.host, f"{DEFAULT_PIPE_DIRECTORY}/control")
    unknown = seen.daemons_error is not None or any(
        item.daemon.pipe_directory in {None, DEFAULT_PIPE_DIRECTORY} for item in seen.daemons
    )
    # In a container, the daemon of this directory may run outside.
    if unknown or seen.host.processes.namespace_is_host() is False:
        return
    if path.exists() and _refuses_connection(path):
        yield finding("mps.default_stale", directory=DEFAULT_PIPE_DIRECTORY)


def _refuses_connection(path: Path) -> bool:
    """Return whether nothing listens at a socket any longer."""
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
    """Check that the device of each daemon still exists."""
    if seen.nvml_error is not None or len(seen.answering) != len(seen.gpus):
        return
    whole = {gpu.uuid for gpu in seen.gpus if not gpu.mig_enabled}
    present = whole | {mig.uuid for gpu in seen.gpus for mig in gpu.mig_instances}
    for item in seen.trusted_daemons:
        uuid = item.daemon.device_uuid
        if uuid is not None and uuid not in present:
            yield finding("mps.device", item.daemon.gpu_index, daemon=item.daemon)


def outside(seen: Examination) -> Iterator[Check]:
    """Check for CUDA programs on the GPU of a daemon that are not its clients, but should be."""
    # The processes that belong to MPS, and those that were looked at for another daemon.
    accounted = set(seen.host.processes.pids_of_program(control.SERVER_PROGRAM))
    for item in seen.daemons:
        accounted |= {server.pid for server in item.daemon.servers} | {client.pid for client in item.daemon.clients}
        accounted |= {item.daemon.pid or 0}
    for item in seen.trusted_daemons:
        for gpu in seen.answering:
            # The clients of a daemon that was not asked are unknown.
            if gpu.index not in item.daemon.gpu_indexes or item.daemon.unasked:
                continue
            programs = [
                process
                for process in _processes_on(gpu, item.daemon)
                if process.compute and not process.mps and process.pid not in accounted
            ]
            accounted |= {process.pid for process in programs}
            unintended = _outside_by_mistake(seen, item.daemon, programs) if programs else []
            if unintended:
                titles = first_few((process_title(seen, process.pid) for process in unintended), 3)
                yield finding("mps.outside", gpu.index, processes=titles)


def _outside_by_mistake(seen: Examination, daemon: MpsDaemon, programs: list[GpuProcess]) -> list[GpuProcess]:
    """Return the programs outside a daemon that should be its clients.

    A job that gpushare has started outside MPS stays there on purpose: production, with a time-slice of its own, one that
    can be swapped. So does all that runs beside a daemon of opportunistic jobs only.
    """
    clients = [client.pid for client in daemon.clients]
    jobs = jobs_of_processes(seen.host, [*clients, *(process.pid for process in programs)])
    if clients and all(pid in jobs and jobs[pid].role == OPPORTUNISTIC for pid in clients):
        return []
    return [process for process in programs if process.pid not in jobs or jobs[process.pid].mps]


def _processes_on(gpu: Gpu, daemon: MpsDaemon) -> list[GpuProcess]:
    """Return the processes of a GPU that are on the device of a daemon."""
    mig = next((instance for instance in gpu.mig_instances if instance.uuid == daemon.device_uuid), None)
    if mig is None:
        return [] if gpu.mig_enabled else list(gpu.processes or ())
    return [process for process in gpu.processes or () if mig.has(process)]


def pending(seen: Examination) -> Iterator[Check]:
    """Check for clients that wait for the clients of another user to end (``control.log``)."""
    for item in seen.trusted_daemons:
        daemon = item.daemon
        served = sorted({server.user or "user unknown" for server in daemon.servers})
        waiting = sorted(set(_waiting_clients(seen, daemon)))
        if waiting and served:
            users = ", ".join(sorted({user for _, user in waiting}))
            yield finding(
                "mps.pending",
                daemon.gpu_index,
                number=counted(len(waiting), "client"),
                users=users,
                daemon=daemon,
                served=", ".join(served),
            )


# From this driver on daemons refuse changes of limits by other users (535 refuses only "quit").
_REFUSING_DRIVER: Final = 550


def limits_open_to_all(seen: Examination) -> Iterator[Check]:
    """Check for daemons of root whose limits every user may change (before driver 550)."""
    branch = re.match(r"\d{1,6}", seen.driver or "", re.ASCII)
    if branch is None or int(branch.group()) >= _REFUSING_DRIVER:
        return
    for item in seen.trusted_daemons:
        if item.uid != 0 or item.daemon.pipe_directory is None:
            continue
        pipe = Path(item.daemon.pipe_directory)
        # None: the directory does not exist, so nobody reaches the daemon.
        if pipe_users(pipe) == ():
            yield finding("mps.open", item.daemon.gpu_index, daemon=item.daemon, driver=seen.driver, pipe=pipe)


def _waiting_clients(seen: Examination, daemon: MpsDaemon) -> Iterator[tuple[int, str]]:
    """Yield PID and user of waiting clients by the log, checked against the kernel: any client can write lines into it."""
    clients = {client.pid for client in daemon.clients}
    served = {server.user for server in daemon.servers}
    for stamp, pid, uid in _PENDING.findall(log_tail(daemon, "control.log")):
        info = seen.host.processes.describe(int(pid)) if 0 < int(pid) <= _MOST_PID else None
        if info is None or info.uid != int(uid):
            continue
        user = user_name(int(uid))
        if int(pid) in clients or user in served:
            continue
        if (seen.host.processes.environment(info.pid) or {}).get(_PIPE, daemon.pipe_directory) != daemon.pipe_directory:
            # A client of another daemon.
            continue
        # If the process started after the line was written, the PID belonged to another.
        began = info.started_at
        if began is None or began <= _parse_log_time(stamp) + _LOG_CLOCK_SECONDS:
            yield int(pid), user


def _parse_log_time(stamp: str) -> float:
    """Return the time of a log line in seconds since 1970; 0 if it is none."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


def version(seen: Examination) -> Iterator[Check]:
    """Check that the MPS programs are those of the driver (nvmlSystemGetCudaDriverVersion)."""
    program = seen.mps_version
    if seen.nvml_error is not None or program is None:
        return
    driver = or_none(lambda: seen.host.nvml.ask(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2()))
    if driver is not None and program != int(driver):
        yield finding("mps.version", program=_cuda_version_text(program), driver=_cuda_version_text(int(driver)))


def _cuda_version_text(version: int) -> str:
    """Return a CUDA version as the driver counts it, 12080, as text: 12.8."""
    return f"{version // 1000}.{version % 1000 // 10}"


USE_CHECKS: Final[tuple[Callable[[Examination], Iterator[Check]], ...]] = (
    version,
    foreign,
    devices,
    outside,
    pending,
    limits_open_to_all,
    client_environments,
    daemon_environment,
    needs,
)
