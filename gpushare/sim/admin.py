"""List, describe, change and reset simulated hosts (``gpushare sim``)."""

from __future__ import annotations

import json
import shutil
import signal as signals
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from gpushare.base.errors import BadUsage, GpushareError, NotFound, OperationFailed
from gpushare.base.units import GIB
from gpushare.base.values import dataclass
from gpushare.gpu_models import find_model
from gpushare.host.capabilities import InstanceIds
from gpushare.host.process import ticks_now
from gpushare.host.records import read_own
from gpushare.sim import clients, faults
from gpushare.sim.current import changing, current
from gpushare.sim.faults import uid_of
from gpushare.sim.mig import place_instances
from gpushare.sim.processes import holders_of, nvml_client_files, signal_process
from gpushare.sim.state import (
    SimulatedGpu,
    SimulatedHostState,
    SimulatedMigInstance,
    SimulatedProcess,
    SimulatedVgpu,
    StateFile,
    initial_state,
    parse_spec,
    state_root,
)

_SHOW: Final = "see the host: gpushare sim show"


@dataclass(frozen=True)
class UsedHost:
    """A simulated host in use, with counts of what is on it."""

    spec: str
    gpus: int
    processes: int
    daemons: int
    created_at: float
    directory: str


@dataclass(frozen=True)
class ResetResult:
    """What `reset` removed, and the real processes that it left alone: programs, and the gpushare of jobs that wait."""

    spec: str
    ended: tuple[int, ...]
    left_alone: tuple[int, ...]


@dataclass(eq=False, kw_only=True)
class ShownHost(SimulatedHostState):
    """A simulated host with its state. ``used``: whether a command has used it; ``directory``: where its state is."""

    json_properties: ClassVar = ("uid",)

    used: bool
    directory: str


def list_hosts() -> list[UsedHost]:
    """Return the simulated hosts of this user that are in use, by name."""
    hosts = []
    for path in sorted(state_root().glob("*/state.json")):
        try:
            spec = json.loads(read_own(path))["spec"]
            state = StateFile(spec).read()
        except (GpushareError, OSError, ValueError, KeyError, TypeError):
            # A file of another version, or half removed.
            continue
        if state is not None:
            clients.settle(state)
            counts = (len(state.gpus), len(state.processes), len(state.daemons))
            hosts.append(UsedHost(spec, *counts, state.created_at, str(path.parent)))
    return sorted(hosts, key=lambda host: host.spec)


def describe(spec: str) -> ShownHost:
    """Return a simulated host as it is shown; one that was never used is not created."""
    state_file = _state_file(spec)
    used = state_file.exists()
    state = current(state_file) if used else initial_state(state_file.spec)
    return ShownHost(**vars(state), used=used, directory=str(state_file.directory))


def reset(spec: str) -> ResetResult:
    """End the simulated processes of a host and remove its state and run directory.

    Real processes are left running and listed in the result.
    """
    state_file = _state_file(spec)
    if not state_file.exists():
        return ResetResult(state_file.spec, (), ())
    with changing(state_file) as (state, _):
        ended = tuple(process.pid for process in state.processes if not process.real)
        ended += tuple(daemon.pid for daemon in state.daemons)
        running = tuple(process.pid for process in state.processes if process.real)
        state.processes, state.daemons = [], []
        shutil.rmtree(state_file.directory / "run", ignore_errors=True)
    shutil.rmtree(state_file.directory, ignore_errors=True)
    return ResetResult(state_file.spec, ended, running)


def add_process(
    spec: str,
    gpu: str = "0",
    *,
    name: str = "python3",
    user: str | None = None,
    mps: bool = False,
    mig: str | None = None,
    environment: Mapping[str, str] | None = None,
    holder: bool = False,
    graphics: bool = False,
    command_line: Sequence[str] = (),
    **details: Any,
) -> int:
    """Put a simulated process on a GPU and return its PID; ``details`` are other fields of `SimulatedProcess`.

    ``gpu`` is an index or UUID (or its beginning); ``mig`` a MIG UUID or GPU instance id; ``mps`` lets it
    look for a daemon at the CUDA_MPS_PIPE_DIRECTORY of ``environment``, as libcuda does. A ``holder`` makes no
    CUDA context: it only keeps device nodes open; with memory it has allocations, as a profiler does.
    """
    if holder and (mps or graphics):
        raise BadUsage("a holder has no context", "give --holder without --mps and --graphics", code="bad_holder")
    with changing(_state_file(spec)) as (state, lines):
        index, chosen = _find_gpu(state, gpu)
        opened = nvml_client_files(index, _held_ids(chosen, mig)) if holder else []
        instance = None if holder else _find_instance(chosen, mig)
        variables = {"CUDA_VISIBLE_DEVICES": instance.uuid if instance else chosen.uuid, **(environment or {})}
        if not mps:
            variables[clients.OUTSIDE] = "1"
        process = SimulatedProcess(
            pid=state.new_pid(),
            real=False,
            gpu_uuid="" if holder else chosen.uuid,
            name=name,
            uid=state.uid if user is None else uid_of(state, user),
            started=ticks_now(),
            command_line=[*command_line] or [name],
            environment=variables,
            graphics=graphics,
            open_files=opened,
            **{"memory_bytes": GIB, "sm_percent": 50, "catches": [signals.SIGINT], **details},
        )
        state.processes.append(process)
        if not graphics and not holder:
            lines += clients.attach(state, process)
        if process.refused is not None:
            raise OperationFailed(
                f"CUDA refuses '{name}' on GPU {gpu}: {process.refused}", _SHOW, gpu=gpu, code="cuda_refused"
            )
        return process.pid


def end_process(spec: str, pid: int, signal: int | None = None) -> None:
    """End a simulated process: by a signal, or (None) by itself."""
    with changing(_state_file(spec)) as (state, lines):
        process = state.process(pid)
        if process is None or process.real:
            raise NotFound(f"there is no simulated process {pid}", _SHOW)
        lines += clients.end(state, process, None) if signal is None else signal_process(state, process, signal)


def set_mig(spec: str, gpu: str, names: Sequence[str]) -> None:
    """Give a GPU exactly these MIG instances; none turns MIG off."""
    with changing(_state_file(spec)) as (state, _):
        index, chosen = _find_gpu(state, gpu)
        if any(process.gpu_uuid == chosen.uuid for process in state.processes) or holders_of(state, index):
            raise OperationFailed(f"there are processes on GPU {gpu}", _SHOW, gpu=gpu, code="in_use")
        if names:
            state.gpus[index] = place_instances(chosen, find_model(chosen.model), list(names))
        elif chosen.mig_mode is not None:
            chosen.mig, chosen.bare, chosen.mig_mode, chosen.mig_pending = [], [], 0, 0
        # All instances are new ones.
        state.gpus[index].nodes = {}


def add_vgpu(spec: str, gpu: str, kind: str, vm: str, memory_bytes: int) -> str:
    """Let a virtual machine use a vGPU of this type (``kind``); return its UUID."""
    with changing(_state_file(spec)) as (state, _):
        index, chosen = _find_gpu(state, gpu)
        number = len(chosen.vgpus)
        vgpu_uuid = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{spec}/{index}/{number}/{vm}"))
        chosen.vgpus.append(SimulatedVgpu(uuid=vgpu_uuid, type=kind, vm=vm, memory_bytes=memory_bytes))
    return vgpu_uuid


def set_fault(spec: str, kind: str, gpu: str | None = None, value: str | None = None) -> None:
    """Make something fail on a simulated host: see `faults.apply`; ``busy`` puts a process on a GPU."""
    if kind == "busy":
        add_process(spec, gpu or "0", name=value or "busy", sm_percent=100)
        return
    with changing(_state_file(spec)) as (state, _):
        faults.apply(state, state.gpus if gpu is None else [_find_gpu(state, gpu)[1]], kind, value)


def clear_faults(spec: str) -> None:
    """Take every fault back; processes, MIG and the driver version stay."""
    with changing(_state_file(spec)) as (state, _):
        faults.clear(state)


def _state_file(spec: str) -> StateFile:
    return StateFile(parse_spec(spec).text)


def _find_gpu(state: SimulatedHostState, text: str) -> tuple[int, SimulatedGpu]:
    """Return the GPU that an index, or the beginning of a UUID, names; and its index."""
    for index, gpu in enumerate(state.gpus):
        if text == str(index) or (len(text) > len("GPU-") and gpu.uuid.startswith(text)):
            return index, gpu
    raise NotFound(f"there is no GPU '{text}' on {state.spec}", _SHOW, gpu=text)


def _find_instance(gpu: SimulatedGpu, text: str | None) -> SimulatedMigInstance | None:
    """Return the MIG device that a UUID or a GPU instance id names, without either the first; None: the GPU has none."""
    if text is None:
        return gpu.mig[0] if gpu.mig_mode and gpu.mig else None
    for instance in gpu.mig:
        if text in {instance.uuid, str(instance.gpu_instance_id)}:
            return instance
    raise NotFound(f"there is no MIG device '{text}' on {gpu.uuid}", _SHOW, gpu=gpu.uuid)


def _held_ids(gpu: SimulatedGpu, text: str | None) -> InstanceIds | None:
    """Return the ids of the instance whose nodes a holder has open, also of one that is no MIG device; None: the whole GPU."""
    for bare in gpu.bare:
        if text == str(bare.gpu_instance_id):
            return bare.gpu_instance_id, None
    instance = None if text is None else _find_instance(gpu, text)
    return None if instance is None else instance.instance_ids
