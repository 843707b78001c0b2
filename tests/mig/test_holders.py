"""Who holds a GPU or an instance besides those that NVML lists."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.base.model import Gpu, Holder
from gpushare.base.package import package_rows
from gpushare.connect import connect
from gpushare.host.capabilities import Capabilities, user_name
from gpushare.host.host import Host
from gpushare.host.open_files import OpenFiles
from gpushare.mig.holders import gpu_holders, instance_holders, open_device_files, release_remedy
from gpushare.sim import admin

A100 = "sim:a100-80gb"


@pytest.fixture
def host() -> Host:
    """Return a host with a 3g (GPU instance 1) and a 1g (11) on its only GPU."""
    admin.set_mig(A100, "0", ["3g.40gb:0", "1g.10gb:4"])
    return connect(A100)


def gpu_of(host: Host) -> Gpu:
    return host.nvml.sweep()[0]


def pids(holders: Mapping[Any, tuple[Holder, ...]]) -> dict[Any, list[int]]:
    return {place: [one.pid for one in found] for place, found in holders.items()}


def test_nobody_holds_an_idle_gpu(host: Host) -> None:
    assert instance_holders(host, gpu_of(host)) == {}
    assert gpu_holders(host, gpu_of(host)) == ()
    assert open_device_files(host).complete


def test_cuda_processes_are_in_the_lists_and_not_here(host: Host) -> None:
    admin.add_process(A100, mig="1")
    assert instance_holders(host, gpu_of(host)) == {}
    assert gpu_holders(host, gpu_of(host)) == ()


def test_dcgm_holds_an_instance_by_its_capability_nodes(host: Host) -> None:
    pid = admin.add_process(A100, mig="11", name="nv-hostengine", holder=True, memory_bytes=0)
    admin.add_process(A100, mig="1")
    held = instance_holders(host, gpu_of(host))
    assert pids(held) == {(11, None): [pid], (11, 0): [pid]}
    (own,) = held[11, None]
    assert (own.name, own.user, own.what) == (
        "nv-hostengine",
        user_name(os.geteuid()),
        "/dev/nvidia-caps/nvidia-cap102",
    )
    # 3 + 9 * 11, and one more and the id of the compute instance.
    assert held[11, 0][0].what == "/dev/nvidia-caps/nvidia-cap103"
    assert [(holder.pid, holder.what) for holder in gpu_holders(host, gpu_of(host))] == [(pid, "/dev/nvidia0")]


def test_a_holder_of_the_gpu_holds_no_instance(host: Host) -> None:
    pid = admin.add_process(A100, name="nvidia-persistenced", holder=True, memory_bytes=0)
    assert instance_holders(host, gpu_of(host)) == {}
    assert [holder.pid for holder in gpu_holders(host, gpu_of(host))] == [pid]


def test_a_process_in_one_instance_holds_another_one_too(host: Host) -> None:
    """NVML lists it where its context is; what else it keeps open is not in the list."""
    pid = admin.add_process(A100, mig="1")
    with_more = OpenFiles(
        by_pid={pid: ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap102")}, complete=True
    )
    assert pids(instance_holders(host, gpu_of(host), with_more)) == {(11, None): [pid]}
    # The same for compute instances of one GPU instance.
    gpu = gpu_of(host)
    in_other_part = replace(gpu, processes=tuple(replace(each, compute_instance_id=7) for each in gpu.processes or ()))
    assert pids(instance_holders(host, in_other_part)) == {(1, 0): [pid]}


def test_when_nvml_lists_nobody_all_are_here(host: Host) -> None:
    pid = admin.add_process(A100, mig="1")
    unknown = replace(gpu_of(host), processes=None)
    assert pids(instance_holders(host, unknown)) == {(1, None): [pid], (1, 0): [pid]}
    assert [holder.pid for holder in gpu_holders(host, unknown)] == [pid]


def test_every_gpu_has_nodes_of_its_own() -> None:
    spec = "sim:2xa100-80gb"
    for index in ("0", "1"):
        admin.set_mig(spec, index, ["7g.80gb"])
    pid = admin.add_process(spec, "1", mig="0", name="nv-hostengine", holder=True)
    host = connect(spec)
    first, second = host.nvml.sweep()
    files = open_device_files(host)
    assert (instance_holders(host, first, files), gpu_holders(host, first, files)) == ({}, ())
    held = instance_holders(host, second, files)
    assert (held[0, None][0].what, held[0, 0][0].what) == (
        "/dev/nvidia-caps/nvidia-cap138",
        "/dev/nvidia-caps/nvidia-cap139",
    )
    assert [holder.pid for holder in gpu_holders(host, second, files)] == [pid]


def test_gpushare_itself_is_no_holder(host: Host) -> None:
    files = OpenFiles(by_pid={os.getpid(): ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12")}, complete=True)
    assert gpu_holders(host, gpu_of(host), files) == ()
    assert instance_holders(host, gpu_of(host), files) == {}


def test_others_see_only_their_own_and_know_it(host: Host) -> None:
    admin.add_process(A100, name="nv-hostengine", holder=True)
    mine = admin.add_process(A100, name="nvtop", user="nobody", holder=True)
    admin.set_fault(A100, "user", value="nobody")
    host = connect(A100)
    assert [holder.pid for holder in gpu_holders(host, gpu_of(host))] == [mine]
    assert not open_device_files(host).complete


def test_from_another_pid_namespace_nobody_is_seen(host: Host) -> None:
    admin.add_process(A100, name="nv-hostengine", holder=True)
    admin.set_fault(A100, "blind")
    assert gpu_holders(host, gpu_of(host)) == ()
    assert not open_device_files(host).complete


def test_nothing_of_it_fails_a_command(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_of(host)
    assert instance_holders(replace(host, capabilities=Capabilities(tmp_path)), gpu) == {}
    assert gpu_holders(host, replace(gpu, error="the GPU is lost")) == ()

    def fail(_: int) -> int:
        raise OperationFailed("no", "no")

    monkeypatch.setattr(host.nvml, "minor_number", fail)
    assert (instance_holders(host, gpu), gpu_holders(host, gpu)) == ({}, ())


def test_who_ended_since_the_look_holds_nothing(host: Host) -> None:
    files = OpenFiles(by_pid={2**22 - 1: ("/dev/nvidia0",)}, complete=True)
    assert gpu_holders(host, gpu_of(host), files) == ()


def test_a_remedy_is_named_once() -> None:
    dcgm = Holder(pid=812, what="/dev/nvidia0", user="root", name="nv-hostengine")
    nameless = Holder(pid=900, what="/dev/nvidia0")
    assert release_remedy([dcgm, dcgm, nameless]) == "sudo systemctl stop nvidia-dcgm"
    assert release_remedy([nameless]) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvidia-persistenced", "systemctl stop nvidia-persistenced"),
        # The kernel cuts names at 15 bytes.
        ("nvidia-persiste", "systemctl stop nvidia-persistenced"),
        ("dcgm-exporter", "dcgm-exporter"),
        ("nvsm_core", "systemctl stop nvsm"),
        ("X", "multi-user.target"),
        ("Xorg", "multi-user.target"),
        ("slurmstepd", "HWLOC_COMPONENTS=-opencl"),
        ("nsys-launcher", "nsys shutdown"),
        ("nvidia-cuda-mps-server", "gpushare mps stop"),
        ("gpushare", "end that gpushare command"),
        *((other, None) for other in ("python3", "Xyz", "xorg-like", "nv")),
    ],
)
def test_what_is_known_to_help(name: str, part: str | None) -> None:
    known = release_remedy([Holder(pid=1, what="/dev/nvidia0", name=name)])
    assert known is None if part is None else part in known


def test_each_name_has_one_remedy() -> None:
    names = [name for row in package_rows("holders.yaml") for name in row["names"]]
    assert len(names) == len(set(names))
