"""The checks of `gpushare doctor`: stable ids, what was seen, why it matters, and the command that mends it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.actions.check import Check, Examination, Verdict, counted, remedy_of
from gpushare.actions.doctor_drift import drift
from gpushare.actions.doctor_environment import environments
from gpushare.actions.doctor_gpu import compute_mode, persistence, xids
from gpushare.actions.doctor_mig import MIG_CHECKS
from gpushare.actions.doctor_mps import mps_daemons, mps_programs
from gpushare.actions.doctor_mps_use import USE_CHECKS
from gpushare.errors import DriverNotLoaded, GpushareError, NvmlMissing
from gpushare.host import mps_control
from gpushare.host.mps import find_daemons
from gpushare.host.mps_home import homes_in
from gpushare.host.smi import PROGRAM as NVIDIA_SMI
from gpushare.host.snapshot import BLIND

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.layout.hostfile import Entry
    from gpushare.model import Gpu


Wanted = Callable[[Sequence["Gpu"]], tuple[Mapping[int, "Entry"], GpushareError | None]]


def examine(host: Host, wanted: Wanted | None = None) -> list[Check]:
    """Run every check. None of them changes anything, and none fails because another did.

    ``wanted`` tells what the last gpushare.yaml that held says of these GPUs, and what is wrong with it: what it asks
    for was not left over, and should be there.
    """
    examination = Examination(host)
    try:
        examination.gpus = host.nvml.sweep()
        examination.driver = host.nvml.driver_version()
        if wanted is not None:
            examination.wanted, examination.wanted_error = wanted(examination.gpus)
    except GpushareError as error:
        examination.nvml_error = error
    try:
        examination.daemons = find_daemons(host, examination.gpus)
    except GpushareError:
        examination.daemons = []
    found: list[Check] = []
    for check in CHECKS:
        try:
            found += check(examination)
        except GpushareError as error:
            # A GPU that was lost, or a program that ended, since the first look.
            said = f"'{check.__name__.strip('_')}' could not be looked at: {error.message}"
            found.append(Check(id="doctor.unseen", verdict=Verdict.SKIP, seen=said))
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
        mismatch = "driver.mismatch" if error.code == "driver_mismatch" else "nvml.answers"
        identifier = "driver.loaded" if isinstance(error, DriverNotLoaded) else mismatch
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
        seen.levels = host.policy.read()
    except GpushareError as error:
        yield Check(
            id="smi.program",
            verdict=Verdict.FAIL,
            seen=error.message,
            why="the time-slice cannot be read",
            remedy=remedy_of(error),
        )
        return
    yield Check(
        id="smi.program",
        verdict=Verdict.PASS,
        seen=f"nvidia-smi lists the time-slice of {counted(len(seen.levels), 'GPU')}",
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
            remedy="export GPUSHARE_RUN_DIR=/tmp/$USER (a short directory of your own)",
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
    yield Check(id="run.directory", verdict=Verdict.PASS, seen=f"{path} ({counted(homes, 'daemon')} noted)")


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
    mps_programs,
    persistence,
    compute_mode,
    xids,
    mps_daemons,
    *USE_CHECKS,
    drift,
    *MIG_CHECKS,
    environments,
    _run_directory,
    _permissions,
    _pid_namespace,
)


def worst(checks: list[Check]) -> Verdict:
    """Return the worst verdict: pass, warn or fail; a skipped check says nothing."""
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in verdicts), Verdict.PASS)


def exit_code(checks: list[Check], fail_on: Verdict = Verdict.FAIL) -> int:
    """Return 1 when something fails, with ``fail_on`` WARN also when something warns; else 0."""
    return int(worst(checks) in {Verdict.FAIL, fail_on})
