"""The checks of `gpushare doctor`: stable ids, what was seen, why it matters, and the command that mends it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpushare.errors import DriverNotLoaded, GpushareError, NvmlMissing
from gpushare.host import mps_control
from gpushare.host.mps import find_daemons
from gpushare.host.mps_home import homes_in
from gpushare.host.smi import PROGRAM as NVIDIA_SMI
from gpushare.host.snapshot import BLIND
from gpushare.model import ComputeMode, Gpu

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mps import FoundDaemon


class Verdict(str, Enum):
    """How a check ended; the exit code of `doctor` is the worst one's."""

    PASS = "pass"  # noqa: S105 - a verdict
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. ``id`` never changes its meaning; ``remedy`` is a command, or None when nothing is wrong."""

    id: str
    verdict: Verdict
    seen: str
    why: str | None = None
    remedy: str | None = None
    gpu: int | None = None


@dataclass
class Examination:
    """What the checks look at, asked once."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    nvml_error: GpushareError | None = None
    daemons: list[FoundDaemon] = field(default_factory=list)


def examine(host: Host) -> list[Check]:
    """Run every check. None of them changes anything, and none fails because another did."""
    examination = Examination(host)
    try:
        examination.gpus = host.nvml.sweep()
        examination.driver = host.nvml.driver_version()
    except GpushareError as error:
        examination.nvml_error = error
    try:
        examination.daemons = find_daemons(host, examination.gpus)
    except GpushareError:
        examination.daemons = []
    found: list[Check] = []
    for check in CHECKS:
        found += check(examination)
    return found


def _nvml(seen: Examination) -> Iterator[Check]:
    error = seen.nvml_error
    if isinstance(error, NvmlMissing):
        yield Check(
            id="nvml.library",
            verdict=Verdict.FAIL,
            seen=error.message,
            why="nothing about a GPU can be known",
            remedy=error.hint,
        )
        return
    yield Check(
        id="nvml.library",
        verdict=Verdict.PASS,
        seen="libnvidia-ml answers" if error is None else "libnvidia-ml is there",
    )
    if error is not None:
        identifier = "driver.loaded" if isinstance(error, DriverNotLoaded) else "nvml.answers"
        yield Check(
            id=identifier, verdict=Verdict.FAIL, seen=error.message, why="no GPU can be used", remedy=error.hint
        )
        return
    yield Check(id="driver.loaded", verdict=Verdict.PASS, seen=f"driver {seen.driver or 'of unknown version'}")
    if not seen.gpus:
        yield Check(
            id="gpu.present",
            verdict=Verdict.FAIL,
            seen="the driver sees no GPU",
            why="there is nothing to share",
            remedy="lspci | grep -i nvidia",
        )
    for gpu in seen.gpus:
        if gpu.error is not None:
            yield Check(
                id="gpu.answers",
                verdict=Verdict.FAIL,
                seen=gpu.error,
                gpu=gpu.index,
                why="a lost GPU comes back only with a reset or a reboot",
                remedy="sudo dmesg | grep -i xid",
            )


def _smi(seen: Examination) -> Iterator[Check]:
    host = seen.host
    if host.programs.find(NVIDIA_SMI) is None:
        yield Check(
            id="smi.program",
            verdict=Verdict.FAIL,
            seen="nvidia-smi is not installed",
            why="the time-slice is read and set only through it",
            remedy="install the driver's utilities (nvidia-utils, nvidia-smi)",
        )
        return
    if seen.nvml_error is not None:
        yield Check(
            id="smi.program", verdict=Verdict.SKIP, seen="nvidia-smi is there; not asked, because NVML does not answer"
        )
        return
    try:
        levels = host.policy.read()
    except GpushareError as error:
        yield Check(
            id="smi.program",
            verdict=Verdict.FAIL,
            seen=error.message,
            why="the time-slice cannot be read",
            remedy=error.hint,
        )
        return
    yield Check(id="smi.program", verdict=Verdict.PASS, seen=f"nvidia-smi lists the time-slice of {len(levels)} GPUs")


def _mps_programs(seen: Examination) -> Iterator[Check]:
    for name, identifier in ((mps_control.PROGRAM, "mps.control"), (mps_control.SERVER_PROGRAM, "mps.server")):
        path = seen.host.programs.find(name)
        if path is None:
            yield Check(
                id=identifier,
                verdict=Verdict.WARN,
                seen=f"{name} is not installed",
                why="there is no MPS without it",
                remedy="install it: nvidia-compute-utils on Ubuntu, nvidia-cuda-mps on Debian",
            )
        elif name == mps_control.PROGRAM:
            version = mps_control.probe_version(seen.host.programs)
            yield Check(
                id=identifier,
                verdict=Verdict.PASS,
                seen=f"{path}, " + (f"binary version {version}" if version else "before driver 580"),
            )
        else:
            yield Check(id=identifier, verdict=Verdict.PASS, seen=path)


def _persistence(seen: Examination) -> Iterator[Check]:
    modes = {gpu.index: seen.host.nvml.persistence(gpu.index) for gpu in seen.gpus if gpu.error is None}
    off = [index for index, on in modes.items() if on is False]
    for index in off:
        yield Check(
            id="gpu.persistence",
            verdict=Verdict.WARN,
            seen=f"persistence mode is off on GPU {index}",
            gpu=index,
            why="each first program on an idle GPU pays seconds, and nvidia-smi answers slowly",
            remedy="sudo systemctl enable --now nvidia-persistenced",
        )
    if modes and not off:
        yield Check(id="gpu.persistence", verdict=Verdict.PASS, seen="persistence mode is on")


def _compute_mode(seen: Examination) -> Iterator[Check]:
    kept = {
        found.record.device_uuid for found in seen.daemons if found.record is not None and found.daemon.error is None
    }
    left = [gpu for gpu in seen.gpus if gpu.compute_mode not in {None, ComputeMode.DEFAULT} and gpu.uuid not in kept]
    foreign = {index for found in seen.daemons if not found.daemon.ours for index in found.daemon.gpu_indexes}
    for gpu in left:
        mode = gpu.compute_mode.title if gpu.compute_mode is not None else "unknown"
        if gpu.index in foreign:
            continue
        yield Check(
            id="gpu.compute_mode",
            verdict=Verdict.WARN,
            gpu=gpu.index,
            seen=f"GPU {gpu.index} is in compute mode {mode} and no MPS daemon serves it",
            why="only one program (or none) can use it at a time; often left over from an MPS daemon",
            remedy=f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if seen.gpus and not left:
        yield Check(id="gpu.compute_mode", verdict=Verdict.PASS, seen="no compute mode is left over")


def _mps_daemons(seen: Examination) -> Iterator[Check]:
    for found in seen.daemons:
        daemon = found.daemon
        if daemon.ours and daemon.pid is None:
            yield Check(
                id="mps.stale",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"an MPS daemon died and left its files in {found.home.directory if found.home else daemon.pipe_directory}",
                why="its limits, and a compute mode that it changed, are still noted there",
                remedy=f"gpushare mps stop -g {daemon.device_uuid}",
            )
        elif daemon.error is not None:
            yield Check(
                id="mps.answers",
                verdict=Verdict.FAIL if daemon.ours else Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=daemon.error,
                why="no program can join it",
                remedy="gpushare mps logs; gpushare mps stop --force" if daemon.ours else "sudo gpushare mps status",
            )
        else:
            yield from _daemon_state(found)
    if not seen.daemons:
        yield Check(id="mps.daemons", verdict=Verdict.PASS, seen="no MPS daemon runs")


def _daemon_state(found: FoundDaemon) -> Iterator[Check]:
    daemon = found.daemon
    fault = [server.pid for server in daemon.servers if server.status == "FAULT"]
    if fault:
        yield Check(
            id="mps.fault",
            verdict=Verdict.FAIL,
            gpu=daemon.gpu_index,
            seen=f"MPS server {fault[0]} is in state FAULT",
            why="its clients have lost their contexts and new ones are refused (CUDA error 807) until all of them have ended",
            remedy=f"gpushare mps stop -g {daemon.device_uuid} --force" if daemon.ours else "end its clients",
        )
        return
    whose = (
        "of gpushare" if daemon.ours else f"of somebody else ({daemon.user or 'user unknown'}, {daemon.pipe_directory})"
    )
    if daemon.transient and not daemon.clients and found.home is not None and not found.home.live_leases():
        yield Check(
            id="mps.orphan",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"MPS daemon {daemon.pid} was started by a run that is over",
            why="nobody will stop it",
            remedy=f"gpushare mps stop -g {daemon.device_uuid}",
        )
        return
    yield Check(
        id="mps.daemons",
        verdict=Verdict.PASS,
        gpu=daemon.gpu_index,
        seen=f"MPS daemon {daemon.pid} {whose} answers, {len(daemon.clients)} clients",
    )


def _run_directory(seen: Examination) -> Iterator[Check]:
    from gpushare.host.host import make_private_directory

    path = seen.host.run_directory
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    length = len(os.fsencode(str(path / "mps" / "gpu-00000000" / "pipe")))
    if length > mps_control.MAX_PIPE_DIRECTORY_BYTES:
        yield Check(
            id="run.path",
            verdict=Verdict.FAIL,
            seen=f"an MPS pipe directory below {path} has {length} bytes; 87 is the limit",
            why="the daemon dies at its start without a word",
            remedy="export GPUSHARE_RUN_DIR=/tmp/gs (a short directory of your own)",
        )
        return
    try:
        if path.exists():
            make_private_directory(path)
        elif not os.access(nearest, os.W_OK):
            yield Check(
                id="run.directory",
                verdict=Verdict.WARN,
                seen=f"{path} does not exist and {nearest} is not writable",
                why="no MPS daemon can be started",
                remedy="export GPUSHARE_RUN_DIR to a short directory of your own",
            )
            return
    except GpushareError as error:
        yield Check(
            id="run.directory",
            verdict=Verdict.FAIL,
            seen=error.message,
            why="whoever may write there decides who talks to the GPU",
            remedy=error.hint,
        )
        return
    homes = len(homes_in([path]))
    yield Check(id="run.directory", verdict=Verdict.PASS, seen=f"{path} ({homes} daemons noted)")


def _permissions(seen: Examination) -> Iterator[Check]:
    if seen.host.uid == 0:
        yield Check(id="user.root", verdict=Verdict.PASS, seen="commands run as root")
    else:
        yield Check(
            id="user.root",
            verdict=Verdict.PASS,
            seen=f"commands run as user {seen.host.uid}: MPS works, time-slice, compute mode and MIG need root",
        )
    nodes = [f"/dev/{name}" for name in ("nvidiactl", "nvidia0")]
    closed = [node for node in nodes if os.path.exists(node) and not os.access(node, os.R_OK | os.W_OK)]
    if closed and not seen.host.is_simulated:
        yield Check(
            id="device.nodes",
            verdict=Verdict.FAIL,
            seen=f"no access to {', '.join(closed)}",
            why="no CUDA program of this user can use the GPU",
            remedy=f"ls -l {' '.join(closed)}; id",
        )


def _pid_namespace(seen: Examination) -> Iterator[Check]:
    host = seen.host.processes.namespace_is_host()
    if host is False:
        yield Check(
            id="pid.namespace",
            verdict=Verdict.WARN,
            seen="this PID namespace is not the host's",
            why=BLIND,
            remedy="docker run --pid=host ...",
        )
    elif host:
        yield Check(id="pid.namespace", verdict=Verdict.PASS, seen="the host's PID namespace")
    else:
        yield Check(id="pid.namespace", verdict=Verdict.SKIP, seen="it cannot be told")


CHECKS: Final[tuple[Callable[[Examination], Iterator[Check]], ...]] = (
    _nvml,
    _smi,
    _mps_programs,
    _persistence,
    _compute_mode,
    _mps_daemons,
    _run_directory,
    _permissions,
    _pid_namespace,
)


def exit_code(checks: list[Check]) -> int:
    """Return 0, 1 when something warns, 2 when something fails."""
    verdicts = {check.verdict for check in checks}
    return 2 if Verdict.FAIL in verdicts else 1 if Verdict.WARN in verdicts else 0
