"""How the simulated GPUs are connected: NVLink by their model, PCIe and NUMA by halves of the host."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

from gpushare.gpu_models import model_of
from gpushare.sim import nvml_abi as abi
from gpushare.sim.library import SimulatedLibrary
from gpushare.sim.nvml_abi import Code, On, Refused, Target

# Boards with NVLink to all others of the host (HGX, DGX), and those with a bridge between two.
_ALL: Final = ("a100-40gb", "a100-80gb", "h100-sxm", "h20-", "h200-141gb", "b200", "b300", "gb200", "gb300", "v100")
_PAIRS: Final = ("h100-nvl", "h200-nvl")
# NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM, NVML_P2P_CAPS_INDEX_NVLINK.
_NODE, _SYSTEM, _NVLINK = 40, 50, 2
# NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED.
_OK, _NOT_SUPPORTED = 0, 5


def _numa_node(library: SimulatedLibrary, index: int) -> int:
    return int(2 * index >= len(library.state.gpus) > 1)


def _other(argument: Any) -> int:
    return abi.Handle.unpack(abi.pointer_value(argument)).index


@abi.entry_point("nvmlDeviceGetTopologyCommonAncestor", on=On.GPU)
def _ancestor(library: SimulatedLibrary, target: Target, other: Any, level: Any) -> None:
    same = _numa_node(library, target.handle.index) == _numa_node(library, _other(other))
    abi.put(level, _NODE if same else _SYSTEM)


@abi.entry_point("nvmlDeviceGetP2PStatus", on=On.GPU)
def _p2p(library: SimulatedLibrary, target: Target, other: Any, what: Any, status: Any) -> None:
    if abi.number(what) != _NVLINK:
        raise Refused(Code.NOT_SUPPORTED)
    gpus = library.state.gpus
    first, second = target.handle.index, _other(other)
    keys = [model_of(gpus[index].model).key for index in (first, second)]
    linked = all(key.startswith(_ALL) for key in keys) or (
        all(key.startswith(_PAIRS) for key in keys) and first // 2 == second // 2
    )
    abi.put(status, _OK if linked else _NOT_SUPPORTED)


@abi.entry_point("nvmlDeviceGetCpuAffinity", on=On.GPU)
def _cpus(library: SimulatedLibrary, target: Target, words: Any, cpus: Any) -> None:
    # The processes of a simulated host run on the CPUs that there are.
    here = sorted(os.sched_getaffinity(0))
    middle = (len(here) + 1) // 2
    node = _numa_node(library, target.handle.index)
    mine = (here[middle:] or here) if node else here[:middle]
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    array = abi.target_of(cpus)
    for word in range(abi.number(words)):
        array[word] = sum(1 << cpu % bits for cpu in mine if cpu // bits == word)
