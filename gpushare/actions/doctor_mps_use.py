"""The checks of `gpushare doctor` on how MPS is used: whose daemon, who waits, and who runs outside."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.actions.check import Check, Examination, Verdict, counted
from gpushare.actions.doctor_mps_environment import client_environments, daemon_environment
from gpushare.actions.doctor_mps_needs import log_tail, needs
from gpushare.actions.host_units import unit_device
from gpushare.host import mps_control
from gpushare.host.capabilities import user_name
from gpushare.host.cdi import local_path
from gpushare.host.mps import DEFAULT_PIPE_DIRECTORY
from gpushare.model import TimeSlice

if TYPE_CHECKING:
    from gpushare.host.mps import FoundDaemon
    from gpushare.model import Gpu, GpuProcess, MpsDaemon

_PENDING: Final = re.compile(
    r"^\[([\d-]{10} [\d:]{8})\.\d+ Control +\d+\] NEW CLIENT (\d+) from user (\d+): Server is not ready, push client to pending",
    re.MULTILINE | re.ASCII,
)


def foreign(seen: Examination) -> Iterator[Check]:
    """Check for daemons of somebody else, at the default path, left dead there, and two on one GPU."""
    for found in seen.serving:
        daemon = found.daemon
        if not found.trusted:
            yield Check(
                id="mps.foreign",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"process {daemon.pid} of {daemon.user or 'user unknown'} says that it is an MPS daemon",
                why="its name and its environment are all that tells so: it was not asked, and its files are not looked at",
                remedy=f"ask {daemon.user or 'its user'} what it is; or see: ps -fp {daemon.pid}",
            )
        elif daemon.pipe_directory == DEFAULT_PIPE_DIRECTORY:
            yield Check(
                id="mps.default_path",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"MPS daemon {daemon.pid} listens at {DEFAULT_PIPE_DIRECTORY}, where every CUDA program looks",
                why="programs that never asked for MPS join it, containers too, and fail with it (CUDA error 805)",
                remedy=f"{_quit(daemon)}; then a private one: gpushare mps start",
            )
        elif not daemon.ours and not _is_of_unit(seen, found):
            yield Check(
                id="mps.foreign",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"MPS daemon {daemon.pid} of {daemon.user or 'user unknown'} at {daemon.pipe_directory} is not gpushare's",
                why="it is shown here, but its limits, its compute mode and its end are its owner's business",
                remedy=f"if nobody needs it: {_quit(daemon)}",
            )
    yield from _several(seen)
    yield from _dead_default(seen)


def _is_of_unit(seen: Examination, found: FoundDaemon) -> bool:
    """Return whether a systemd unit of `gpushare export systemd` runs it."""
    return unit_device(seen.host, found, seen.answering) is not None


def _quit(daemon: MpsDaemon) -> str:
    return f"echo quit | sudo CUDA_MPS_PIPE_DIRECTORY={shlex.quote(daemon.pipe_directory or '')} {mps_control.PROGRAM}"


def _several(seen: Examination) -> Iterator[Check]:
    for gpu in seen.answering:
        pids = [
            str(found.daemon.pid)
            for found in seen.believed
            if gpu.index in found.daemon.gpu_indexes and not (found.daemon.device_uuid or "").startswith("MIG-")
        ]
        if len(pids) > 1:
            yield Check(
                id="mps.several",
                verdict=Verdict.WARN,
                gpu=gpu.index,
                seen=f"{len(pids)} MPS daemons serve GPU {gpu.index}: {', '.join(pids)}",
                why="only clients of one daemon run at the same time; between daemons the GPU is time-sliced",
                remedy="gpushare mps status; then stop all but one",
            )


def _dead_default(seen: Examination) -> Iterator[Check]:
    path = local_path(seen.host, f"{DEFAULT_PIPE_DIRECTORY}/control")
    unknown = any(found.daemon.pipe_directory in {None, DEFAULT_PIPE_DIRECTORY} for found in seen.daemons)
    # A container may have the directory of a daemon that lives outside.
    if unknown or seen.host.processes.namespace_is_host() is False or not path.exists() or not _refuses(path):
        return
    yield Check(
        id="mps.default_stale",
        verdict=Verdict.WARN,
        seen=f"{DEFAULT_PIPE_DIRECTORY}/control is there and no MPS daemon answers at it",
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
    """Check that what a daemon serves is still there, and that its time-slice is the default."""
    complete = len(seen.answering) == len(seen.gpus)
    whole = {gpu.uuid for gpu in seen.answering if not gpu.mig_enabled}
    present = whole | {mig.uuid for gpu in seen.answering for mig in gpu.mig_instances}
    for found in seen.believed:
        uuid = found.daemon.device_uuid
        if uuid is not None and complete and uuid not in present:
            yield Check(
                id="mps.device",
                verdict=Verdict.FAIL,
                gpu=found.daemon.gpu_index,
                seen=f"MPS daemon {found.daemon.pid} serves {uuid}, and there is no such CUDA device now",
                why="its clients get CUDA error 100 or 805; MIG was changed under it",
                remedy=f"gpushare mps stop -g {uuid} --force",
            )
    for gpu in seen.answering:
        level = seen.levels.get(gpu.index)
        if level not in {None, TimeSlice.DEFAULT} and any(gpu.index in one.daemon.gpu_indexes for one in seen.believed):
            yield Check(
                id="mps.timeslice",
                verdict=Verdict.WARN,
                gpu=gpu.index,
                seen=f"the time-slice of GPU {gpu.index} is {level.title if level else '-'} while an MPS daemon serves it",
                why="clients of one MPS server run at the same time: it changes nothing between them",
                remedy=f"sudo gpushare timeslice set default -g {gpu.index} --beside-mps",
            )


def outside(seen: Examination) -> Iterator[Check]:
    """Check for CUDA programs beside a daemon that are not its clients."""
    known = set(seen.host.processes.named(mps_control.SERVER_PROGRAM))
    for found in seen.daemons:
        known |= {server.pid for server in found.daemon.servers} | {client.pid for client in found.daemon.clients}
        known |= {found.daemon.pid or 0}
    for found in seen.believed:
        for gpu in seen.answering:
            # Who the clients of one are that was not asked is unknown.
            if gpu.index not in found.daemon.gpu_indexes or found.daemon.unasked:
                continue
            strangers = [one for one in _on(gpu, found.daemon) if one.compute and not one.mps and one.pid not in known]
            known |= {one.pid for one in strangers}
            if strangers:
                yield Check(
                    id="mps.outside",
                    verdict=Verdict.WARN,
                    gpu=gpu.index,
                    seen=f"on GPU {gpu.index}, outside the MPS daemon: {_named(seen, strangers)}",
                    why="no limit of the daemon holds for it, and its turns stop every client",
                    remedy=f"end it and start it as a client: gpushare run -g {gpu.index} --threads 50 -- CMD",
                )


def _on(gpu: Gpu, daemon: MpsDaemon) -> list[GpuProcess]:
    mig = next((one for one in gpu.mig_instances if one.uuid == daemon.device_uuid), None)
    if mig is None:
        return [] if gpu.mig_enabled else list(gpu.processes or ())
    place = (mig.gpu_instance_id, mig.compute_instance_id)
    return [one for one in gpu.processes or () if (one.gpu_instance_id, one.compute_instance_id) == place]


def _named(seen: Examination, processes: list[GpuProcess]) -> str:
    words = []
    for one in processes[:3]:
        info = seen.host.processes.describe(one.pid)
        told = () if info is None else filter(None, (info.name, info.user))
        words.append(f"{one.pid} ({', '.join(told)})" if info else str(one.pid))
    more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    return ", ".join(words) + more


def pending(seen: Examination) -> Iterator[Check]:
    """Check for clients of another user that wait until the server's user has no client (``control.log``)."""
    for found in seen.believed:
        daemon = found.daemon
        served = sorted({server.user or "user unknown" for server in daemon.servers})
        waiting = sorted(set(_waiting(seen, daemon)))
        if waiting and served:
            users = ", ".join(sorted({user for _, user in waiting}))
            yield Check(
                id="mps.pending",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"{counted(len(waiting), 'client')} of {users} waits for MPS daemon {daemon.pid}, which serves {', '.join(served)}",
                why="a daemon serves one user at a time: the others hang until that user's last client has ended",
                remedy="gpushare mps status (shows whose clients to end); or use one user for all",
            )


def _waiting(seen: Examination, daemon: MpsDaemon) -> Iterator[tuple[int, str]]:
    clients = {client.pid for client in daemon.clients}
    served = {server.user for server in daemon.servers}
    for stamp, pid, uid in _PENDING.findall(log_tail(daemon, "control.log")):
        user = user_name(int(uid))
        info = seen.host.processes.describe(int(pid)) if int(pid) else None
        if info is None or int(pid) in clients or user in served:
            continue
        # The log is older than the process: its PID was somebody else's then.
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
    from gpushare.errors import GpushareError
    from gpushare.host.mps_program import probe_version

    if seen.nvml_error is not None or seen.host.programs.find(mps_control.PROGRAM) is None:
        return
    try:
        program = probe_version(seen.host.programs)
        driver = seen.host.nvml.ask(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2())
    except GpushareError:
        return
    if program is not None and driver is not None and program != int(driver):
        yield Check(
            id="mps.version",
            verdict=Verdict.WARN,
            seen=f"{mps_control.PROGRAM} is of CUDA {_cuda(program)}, the driver of CUDA {_cuda(int(driver))}",
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
    client_environments,
    daemon_environment,
    needs,
)
