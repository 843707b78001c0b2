"""The sessions of vGPU on a hypervisor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare.base.model import VgpuSession
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host import host as hosts
from gpushare.host.vgpu import vgpu_sessions
from gpushare.sim import admin
from gpushare.snapshot import Observer

SPEC = "sim:2xh200"


def test_sessions_by_gpu_with_type_and_machine() -> None:
    host = connect(SPEC)
    assert host.makes_vgpus() is False
    admin.add_vgpu(SPEC, "1", "NVIDIA H200-35C", "win-1", 35 * GIB)
    second = admin.add_vgpu(SPEC, "1", "NVIDIA H200-70C", "lin-2", 70 * GIB)
    assert host.makes_vgpus() is True
    first, other = vgpu_sessions(host.nvml, host.nvml.sweep())
    assert (first.gpu_index, first.vm, first.type) == (1, "win-1", "NVIDIA H200-35C")
    # More than 4 GiB: the bindings themselves would cut it off.
    assert (first.memory_used_bytes, first.memory_total_bytes) == (35 * GIB // 2, 35 * GIB)
    assert (other.uuid, other.memory_total_bytes) == (second, 70 * GIB)
    assert host.nvml.virtualization_mode(1) == 3


def test_what_is_not_told_is_unknown_and_no_other_gpu_is_missed() -> None:
    host = connect(SPEC)
    admin.add_vgpu(SPEC, "0", "NVIDIA H200-35C", "vm", 35 * GIB)
    admin.add_vgpu(SPEC, "1", "NVIDIA H200-35C", "vm", 35 * GIB)
    admin.set_fault(SPEC, "not-supported", "0", "nvmlDeviceGetActiveVgpus")
    (only,) = vgpu_sessions(host.nvml, host.nvml.sweep())
    assert only.gpu_index == 1


def test_status_looks_only_where_there_may_be_some(monkeypatch: pytest.MonkeyPatch) -> None:
    host = connect(SPEC)
    assert Observer(host).read().vgpu_sessions == ()
    assert Observer(replace(host, makes_vgpus=lambda: True)).read().vgpu_sessions == ()
    monkeypatch.setattr(hosts, "_VGPU_MODULE", "/nowhere")
    assert hosts.local_host().makes_vgpus() is False
    monkeypatch.setattr(hosts, "_VGPU_MODULE", "/proc")
    assert hosts.local_host().makes_vgpus() is True
    admin.add_vgpu(SPEC, "0", "NVIDIA H200-35C", "vm", 35 * GIB)
    (found,) = Observer(host).read().vgpu_sessions
    assert isinstance(found, VgpuSession)
