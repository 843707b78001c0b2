"""A simulated host beneath the real pynvml, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpushare.gpu_models import find_model
from gpushare.host.process import ticks_now
from gpushare.mig.profile import Profile
from gpushare.sim import open_simulated
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.mig import Occupied, free_starts, may_join, occupied_places
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedProcess, StateFile, parse_spec


def new_host(spec: str, **changes: Any) -> StateFile:
    """Write the state of a new simulated host and return its file."""
    file = StateFile(parse_spec(spec).text)
    with file.changed() as state:
        vars(state).update(changes)
    return file


def add_process(state: SimulatedHostState, gpu: SimulatedGpu, **fields: Any) -> SimulatedProcess:
    """Put a simulated process on a GPU and return it."""
    values: dict[str, Any] = {"name": "python", "uid": 1000, "started": ticks_now(), "real": False}
    process = SimulatedProcess(pid=state.new_pid(), gpu_uuid=gpu.uuid, **{**values, **fields})
    state.processes.append(process)
    return process


def remaining_capacity(profile: Profile, present: Sequence[Occupied]) -> int:
    """Return how many more instances fit (the Free column of ``nvidia-smi mig -lgip``)."""
    added = list(present)
    while may_join(profile, added):
        # All placements of a profile have one size: taking the first free one each time is optimal.
        starts = free_starts(profile, added)
        if not starts:
            break
        added.append(Occupied(profile, min(starts)))
    return len(added) - len(present)


def free_count(file: StateFile, profile_id: int) -> int:
    """Return how many more instances of a profile fit on the first GPU of a host."""
    state = file.read()
    assert state is not None
    model = find_model(state.gpus[0].model)
    profile = model.profile_by_id(profile_id)
    assert profile is not None
    return remaining_capacity(profile, occupied_places(state.gpus[0], model))


def state_of(host: str | StateFile) -> SimulatedHostState:
    """Return the state of a simulated host."""
    state = (open_simulated(host).state_file if isinstance(host, str) else host).read()
    assert state is not None
    return state


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
