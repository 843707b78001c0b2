"""Holders without a CUDA context on a simulated host: what they have open, and what the driver then refuses."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare.base.errors import BadUsage, NoPermission, NotFound, OperationFailed
from gpushare.host.capabilities import Capability, NodeAccess
from gpushare.sim import admin
from gpushare.sim.machine import SimulatedCapabilities
from gpushare.sim.processes import SimulatedProcesses
from gpushare.sim.state import StateFile
from tests.sim.nvml_host import initialised
from tests.sim.test_mig_changes import A100, G1, H100, gpu_of, host, refused, state_of

PERSISTENCED: dict[str, Any] = {"name": "nvidia-persistenced", "holder": True, "memory_bytes": 0}
NSYS: dict[str, Any] = {"name": "nsys", "holder": True, "memory_bytes": 2**28}
CONTROL, GPU0, UVM = "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"


def cap(number: int) -> str:
    return f"/dev/nvidia-caps/nvidia-cap{number}"


def opened(file: StateFile, prefix: str = "/dev/nvidia") -> dict[int, tuple[str, ...]]:
    return dict(SimulatedProcesses(file).open_files(prefix).by_pid)


# -- what they have open --------------------------------------------------------------------------


def test_a_cuda_process_has_the_nodes_of_its_gpu_open() -> None:
    pid = admin.add_process(A100)
    x = admin.add_process(A100, graphics=True, name="Xorg")
    assert opened(StateFile(A100)) == {pid: (UVM, GPU0, CONTROL), x: (GPU0, CONTROL)}
    assert opened(StateFile(A100), GPU0) == {pid: (GPU0,), x: (GPU0,)}


def test_a_process_in_an_instance_has_its_capability_nodes_open() -> None:
    admin.set_mig(A100, "0", ["1g.10gb:4"])
    pid = admin.add_process(A100, mig="11")
    # 3 + 9 * 11 for the GPU instance, 1 more for its compute instance 0.
    assert opened(StateFile(A100))[pid] == (cap(102), cap(103), UVM, GPU0, CONTROL)


def test_a_holder_has_no_context_and_is_in_no_list() -> None:
    with host(A100, mig=False) as (nvml, gpu, file):
        pid = admin.add_process(A100, **PERSISTENCED)
        assert opened(file) == {pid: (GPU0, CONTROL)}
        assert nvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
        assert nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu) == []


def test_a_holder_of_an_instance_of_another_gpu() -> None:
    spec = "sim:2xa100-80gb"
    admin.set_mig(spec, "1", ["7g.80gb"])
    pid = admin.add_process(spec, "1", mig="0", name="nv-hostengine", holder=True)
    assert opened(StateFile(spec))[pid] == (cap(138), cap(139), "/dev/nvidia1", CONTROL)


def test_a_holder_is_not_a_graphics_process_or_client() -> None:
    for other in ({"graphics": True}, {"mps": True}):
        with pytest.raises(BadUsage):
            admin.add_process(A100, holder=True, **other)
    with pytest.raises(NotFound):
        admin.add_process(A100, holder=True, mig="3")


# -- what the driver refuses ----------------------------------------------------------------------


def test_ampere_needs_a_gpu_that_nobody_has_open() -> None:
    with host(A100, mig=False) as (nvml, gpu, _):
        pid = admin.add_process(A100, **PERSISTENCED)
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_ERROR_IN_USE
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
        admin.end_process(A100, pid)
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_SUCCESS


def test_hopper_needs_a_gpu_without_allocations_for_its_first_instance() -> None:
    """A profiler's buffers block it (GH200 with nsys); the persistence daemon has the node open and no memory."""
    with host(H100) as (nvml, gpu, _):
        admin.add_process(H100, **PERSISTENCED)
        pid = admin.add_process(H100, **NSYS)
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlDeviceCreateGpuInstance, gpu, G1)
        admin.end_process(H100, pid)
        nvml.nvmlDeviceCreateGpuInstance(gpu, G1)
        # Only the first: later ones are made beside it.
        admin.add_process(H100, **NSYS)
        nvml.nvmlDeviceCreateGpuInstance(gpu, G1)


def test_an_instance_that_is_held_open_stays() -> None:
    with host(H100) as (nvml, gpu, file):
        held = nvml.nvmlDeviceCreateGpuInstance(gpu, G1)
        inner = nvml.nvmlGpuInstanceCreateComputeInstance(held, 0)
        other = nvml.nvmlDeviceCreateGpuInstance(gpu, G1)
        identity = nvml.nvmlGpuInstanceGetInfo(held).id
        pid = admin.add_process(H100, mig=str(identity), name="nv-hostengine", holder=True, memory_bytes=0)
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlComputeInstanceDestroy, inner)
        nvml.nvmlGpuInstanceDestroy(other)
        admin.end_process(H100, pid)
        nvml.nvmlComputeInstanceDestroy(inner)
        # A GPU instance without a compute instance has a node too.
        pid = admin.add_process(H100, mig=str(identity), name="nv-hostengine", holder=True, memory_bytes=0)
        assert cap(3 + 9 * identity) in opened(file)[pid]
        refused(nvml, nvml.NVML_ERROR_IN_USE, nvml.nvmlGpuInstanceDestroy, held)
        admin.end_process(H100, pid)
        nvml.nvmlGpuInstanceDestroy(held)
        assert not gpu_of(file).bare


# -- capability nodes -----------------------------------------------------------------------------


@pytest.fixture
def capabilities() -> SimulatedCapabilities:
    """Return those of a host whose only instance is a 1g at GPU instance 11."""
    admin.set_mig(A100, "0", ["1g.10gb:4"])
    return SimulatedCapabilities(StateFile(A100))


def node(capabilities: SimulatedCapabilities, compute: int | None = 0) -> Capability:
    found = capabilities.read(0, 11, compute)
    assert found is not None
    return found


def test_every_instance_has_its_capability(capabilities: SimulatedCapabilities) -> None:
    assert {place: one.minor for place, one in capabilities.of_gpu(0).items()} == {(11, None): 102, (11, 0): 103}
    assert node(capabilities).path == "/proc/driver/nvidia/capabilities/gpu0/mig/gi11/ci0/access"
    assert capabilities.access(node(capabilities)) == NodeAccess(owner=0, mode=0o444)
    assert capabilities.read(0, 3) is None
    assert capabilities.of_gpu(7) == {}


def test_nvidia_modprobe_puts_a_node_back_unless_told_not_to(capabilities: SimulatedCapabilities) -> None:
    closed = NodeAccess(owner=65534, mode=0o400)
    capabilities.set_access(node(capabilities), closed)
    assert capabilities.access(node(capabilities)) == closed
    # The next use.
    admin.add_process(A100, mig="11", user="daemon")
    assert capabilities.access(node(capabilities)) == NodeAccess()
    capabilities.set_modify(node(capabilities), modify=False)
    assert not node(capabilities).modify
    capabilities.set_access(node(capabilities), closed)
    with pytest.raises(OperationFailed):
        admin.add_process(A100, mig="11", user="daemon")
    admin.add_process(A100, mig="11", user="nobody")
    admin.add_process(A100, mig="11", user="root")
    assert capabilities.access(node(capabilities)) == closed


def test_a_list_lets_its_users_in(capabilities: SimulatedCapabilities) -> None:
    for compute in (None, 0):
        capabilities.set_modify(node(capabilities, compute), modify=False)
        capabilities.set_access(node(capabilities, compute), NodeAccess(mode=0o400, users=(1, 65534)))
    admin.add_process(A100, mig="11", user="daemon")
    admin.add_process(A100, mig="11", user="nobody")
    with pytest.raises(OperationFailed) as raised:
        admin.add_process(A100, mig="11", user="bin")
    assert "CUDA_ERROR_NO_DEVICE" in raised.value.message


def test_what_was_set_goes_with_its_instance(capabilities: SimulatedCapabilities) -> None:
    file = StateFile(A100)
    for compute in (None, 0):
        capabilities.set_modify(node(capabilities, compute), modify=False)
        capabilities.set_access(node(capabilities, compute), NodeAccess(owner=1, mode=0o400))
    with initialised(file) as (nvml, _):
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        instance = nvml.nvmlDeviceGetGpuInstanceById(gpu, 11)
        nvml.nvmlComputeInstanceDestroy(nvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
        assert list(state_of(file).gpus[0].nodes) == ["11"]
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    assert (node(capabilities).modify, node(capabilities, None).modify) == (True, False)
    admin.set_mig(A100, "0", ["1g.10gb:4"])
    assert capabilities.access(node(capabilities, None)) == NodeAccess()


def test_only_root_changes_a_node_and_only_one_that_is_there(capabilities: SimulatedCapabilities) -> None:
    mine = node(capabilities)
    admin.set_fault(A100, "user", value="nobody")
    with pytest.raises(NoPermission):
        capabilities.set_modify(mine, modify=False)
    with pytest.raises(NoPermission):
        capabilities.set_access(mine, NodeAccess(mode=0o400))
    admin.clear_faults(A100)
    admin.set_mig(A100, "0", [])
    assert capabilities.access(mine) is None
    with pytest.raises(NotFound):
        capabilities.set_modify(mine, modify=False)
