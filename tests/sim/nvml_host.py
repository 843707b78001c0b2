"""A simulated host beneath the real pynvml, for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpushare.host.process import ticks_now
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.state import (
    SimulatedGpu,
    SimulatedHostState,
    SimulatedProcess,
    StateFile,
    initial_state,
    parse_spec,
)


def new_host(spec: str, **changes: Any) -> StateFile:
    """Write the state of a new simulated host and return its file."""
    file = StateFile(parse_spec(spec).text)
    with file.changed(dataclasses.replace(initial_state(spec), **changes)):
        pass
    return file


def add_process(state: SimulatedHostState, gpu: SimulatedGpu, **fields: Any) -> SimulatedProcess:
    """Put a simulated process on a GPU and return it."""
    values: dict[str, Any] = {"name": "python", "user": "ann", "uid": 1000, "started": ticks_now(), "real": False}
    process = SimulatedProcess(pid=state.new_pid(), gpu_uuid=gpu.uuid, **{**values, **fields})
    state.processes.append(process)
    return process


@contextmanager
def loaded(file: StateFile) -> Iterator[tuple[Any, SimulatedLibrary]]:
    """Yield the real pynvml with the simulated library beneath it, not yet initialised."""
    import pynvml

    library = SimulatedLibrary(file)
    before = pynvml.nvmlLib
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield pynvml, library
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


@contextmanager
def initialised(file: StateFile) -> Iterator[tuple[Any, SimulatedLibrary]]:
    """Yield the real pynvml after nvmlInit."""
    with loaded(file) as (nvml, library):
        nvml.nvmlInit()
        yield nvml, library
        nvml.nvmlShutdown()
