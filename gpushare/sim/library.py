"""A stand-in for libnvidia-ml.so.1 beneath the real pynvml bindings: ``pynvml.nvmlLib = SimulatedLibrary(file)``."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from gpushare.errors import NoPermission
from gpushare.sim import library_device, library_processes, library_sensors, liveness, settled
from gpushare.sim.models import model_of
from gpushare.sim.nvml_abi import (
    ENTRY_POINTS,
    Code,
    EntryPoint,
    Handle,
    Kind,
    On,
    Refused,
    Target,
    pointer_value,
    unversioned,
)
from gpushare.sim.spec import initial_state
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedHostState, SimulatedMigInstance, StateFile

# Importing these rooms fills the table of entry points. Those of MIG instances and of GPM are loaded at the
# first name that the others do not have: most hosts have no MIG, and loading costs every command.
ROOMS: Final = (library_device, library_processes, library_sensors)
RARE_ROOMS: Final = ("library_compute", "library_gpm", "library_mig", "library_mig_changes")
# How long a look at real processes holds, in seconds: they end without anybody writing the state.
_SETTLED_FOR: Final = 0.05


class SimulatedLibrary:
    """The entry points of NVML on a simulated host.

    ``getattr`` gives a callable for each entry point, as ctypes does; a name that the library does
    not have raises AttributeError, which pynvml turns into FunctionNotFound. ``calls`` counts the
    calls by entry point.
    """

    # Whoever puts a library beneath pynvml can tell this one from the real one.
    is_simulated: Final = True

    def __init__(self, file: StateFile) -> None:
        self.file: Final = file
        self.calls: Final[Counter[str]] = Counter()
        # Samples of nvmlGpmSampleAlloc by pointer value: utilisation and bandwidth in percent that they saw.
        self.samples: Final[dict[int, tuple[float, float] | None]] = {}
        self.references = 0
        self._state: SimulatedHostState | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._settled_at = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        entry = ENTRY_POINTS.get(name) or _rare(name)
        if entry is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            return self._call(entry, arguments)

        if name != "nvmlErrorString":
            return call

        # The only entry point that returns no code; ctypes lets its restype be set.
        def error_string(code: Any) -> bytes:
            self.calls[name] += 1
            return library_device.error_text(code).encode()

        return error_string

    @property
    def state(self) -> SimulatedHostState:
        """Return the host's state: read anew when the file changed, and what time did to it settled."""
        stamp = self._file_stamp()
        at = time.monotonic()
        if self._state is None or stamp != self._stamp:
            self._state, self._stamp = self.file.read() or initial_state(self.file.spec), stamp
        elif at - self._settled_at < _SETTLED_FOR:
            return self._state
        self._settled_at = at
        if liveness.due(self._state):
            self._settle()
        return self._state

    def _settle(self) -> None:
        try:
            self._state = settled.current(self.file)
            self._stamp = self._file_stamp()
        except NoPermission:
            # Another user's host: what happened is seen here, and written by its owner.
            if self._state is not None:
                from gpushare.sim import clients

                clients.settle(self._state)

    def forget(self) -> None:
        """Read the state anew at the next call."""
        self._state = None

    @contextmanager
    def changed_gpu(self, target: Target) -> Iterator[SimulatedGpu]:
        """Yield a GPU to change, under the lock of the state file.

        Raises:
            Refused: NO_PERMISSION, every setter needs root; UNKNOWN by the fault ``fail-step``; what the block raises.
        """
        with self.changed_host() as state:
            yield state.gpus[target.handle.index]

    @contextmanager
    def changed_host(self) -> Iterator[SimulatedHostState]:
        """Yield the host to change, as `changed_gpu`; a block that refuses must have changed nothing yet."""
        if self.state.uid != 0:
            raise Refused(Code.NO_PERMISSION)
        refused: Refused | None = None
        crashes = False
        with settled.changing(self.file) as (state, _):
            # A refused call counts for the faults too, so what they count is written in either case.
            if step_due(state, "fail_step"):
                refused = Refused(Code.UNKNOWN)
            else:
                try:
                    yield state
                except Refused as raised:
                    refused = raised
                else:
                    crashes = step_due(state, "crash_step")
        self.forget()
        if refused is not None:
            raise refused
        if crashes:
            crash()

    def gpu(self, index: int) -> Target:
        """Return a GPU by its index.

        Raises:
            Refused: INVALID_ARGUMENT, there is none; GPU_IS_LOST.
        """
        gpus = self.state.gpus
        if not 0 <= index < len(gpus):
            raise Refused(Code.INVALID_ARGUMENT)
        if gpus[index].lost:
            raise Refused(Code.GPU_IS_LOST)
        return Target(Handle(Kind.GPU, index), gpus[index], model_of(gpus[index].model))

    def _call(self, entry: EntryPoint, arguments: tuple[Any, ...]) -> int:
        try:
            if entry.needs_init and not self.references:
                raise Refused(Code.UNINITIALIZED)
            if entry.on is On.NOTHING:
                entry.function(self, *arguments)
            else:
                target = self._target(entry, arguments[0])
                entry.function(self, target, *arguments[1:])
        except Refused as refused:
            return int(refused.code)
        return int(Code.SUCCESS)

    def _target(self, entry: EntryPoint, pointer: Any) -> Target:
        handle = Handle.unpack(pointer_value(pointer))
        if handle.kind not in entry.on.value:
            # A MIG device where only a whole GPU will do.
            raise Refused(Code.NOT_SUPPORTED if handle.kind is Kind.MIG_DEVICE else Code.INVALID_ARGUMENT)
        whole = self.gpu(handle.index)
        for refused, code in ((whole.gpu.not_supported, Code.NOT_SUPPORTED), (whole.gpu.refused, Code.NO_PERMISSION)):
            if refused and unversioned(entry.name) in map(unversioned, refused):
                raise Refused(code)
        if handle.kind is Kind.GPU:
            return whole
        if handle.kind is Kind.GPU_INSTANCE:
            return Target(handle, whole.gpu, whole.model, gpu_instance=_gpu_instance(whole, handle))
        instance = _instance(whole, handle)
        return Target(handle, whole.gpu, whole.model, instance, instance)

    def _file_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self.file.path.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def step_due(state: SimulatedHostState, counter: str) -> bool:
    """Count one call down for a fault (``fail_step``, ``crash_step``); return whether it is this one that it hits."""
    left = getattr(state, counter)
    if left > 0:
        setattr(state, counter, left - 1)
    return bool(left == 1)


def crash() -> None:
    """End the process as SIGKILL would: nothing is cleaned up, nothing flushed (exit status 137)."""
    os._exit(137)


def _rare(name: str) -> EntryPoint | None:
    for room in RARE_ROOMS:
        import_module(f"gpushare.sim.{room}")
    return ENTRY_POINTS.get(name)


def _instance(whole: Target, handle: Handle) -> SimulatedMigInstance:
    wanted = (handle.gpu_instance, handle.compute_instance)
    for instance in whole.gpu.mig if whole.mig_enabled else []:
        if (instance.gpu_instance_id, instance.compute_instance_id) == wanted:
            return instance
    # It was destroyed after the caller took the handle.
    raise Refused(Code.INVALID_ARGUMENT)


def _gpu_instance(whole: Target, handle: Handle) -> SimulatedGpuInstance:
    everything: list[SimulatedGpuInstance] = [*whole.gpu.mig, *whole.gpu.bare] if whole.mig_enabled else []
    for instance in everything:
        if instance.gpu_instance_id == handle.gpu_instance:
            return instance
    raise Refused(Code.INVALID_ARGUMENT)
