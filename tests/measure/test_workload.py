"""The built-in workload without a GPU: its loop, its back ends through stand-ins, its kernel's text."""

from __future__ import annotations

import argparse
import ctypes
import re
import struct
import subprocess
import sys
import types

import pytest

from gpushare.connect import connect
from gpushare.errors import BadUsage, NotSupported
from gpushare.measure import workload
from gpushare.measure.built_in import built_in_workload
from gpushare.measure.metric import Printed
from gpushare.measure.workload import BACKENDS, BLOCK, NAME, PTX, DriverMultiplier, Unusable, first_usable
from gpushare.selection import Device
from gpushare.sim.job import _parser as job_parser


class Counting:
    """Stands in for a GPU that multiplies at once."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.waits = 0

    def launch(self, stream: int) -> None:
        self.launched.append(stream)

    def synchronize(self) -> None:
        self.waits += 1

    def element(self) -> float:
        return 32.0


def options(**named: object) -> argparse.Namespace:
    given = {"size": 16, "streams": 1, "cpu": False, "every": 0.0, "seconds": 0.0, **named}
    return argparse.Namespace(**given)


def test_it_prints_a_rate_that_bench_reads(capsys: pytest.CaptureFixture[str]) -> None:
    workload.run(Counting(), options(), [])
    host = connect("sim:h200")
    chosen = built_in_workload(host, Device(gpu=host.nvml.gpu(0)), size=256, cpu=False, footprint=None)
    printed = Printed(chosen.metric)
    for line in capsys.readouterr().out.splitlines():
        printed.listen(line, 1.0)
    assert printed.last is not None
    assert printed.last > 0


def test_streams_take_turns() -> None:
    gpu = Counting()
    workload.run(gpu, options(streams=3, cpu=True), [])
    assert gpu.launched == [0, 1, 2]


def test_with_cpu_each_multiplication_is_followed_by_one_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, done = Counting(), []
    monkeypatch.setattr(workload, "cpu_multiplication", lambda size: lambda: done.append(size))
    workload.run(gpu, options(cpu=True, streams=2), [])
    assert done == [16, 16]
    assert len(gpu.launched) == 2


def test_it_ends_when_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    workload.run(Counting(), options(seconds=None), [15])
    assert capsys.readouterr().out == ""


def test_the_cpu_multiplies_without_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert workload.cpu_multiplication(4)() == [[4.0] * 4 for _ in range(4)]


def test_without_anything_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpushare.measure.workload", "--probe"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        pytest.skip("something here computes on a GPU")
    assert done.stdout == ""
    assert [name for name in BACKENDS if name not in done.stderr] == []
    assert "Traceback" not in done.stderr


def test_a_real_host_without_a_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    host = connect("sim:h200")
    device = Device(gpu=host.nvml.gpu(0))
    monkeypatch.setattr(
        "gpushare.measure.built_in._PROGRAM", (sys.executable, "-c", "import sys; sys.exit('error: no')")
    )
    real = type(host)(**{**vars(host), "spec": "local", "programs": connect("local").programs})
    with pytest.raises(NotSupported) as caught:
        built_in_workload(real, device, size=256, cpu=False, footprint=None)
    assert caught.value.code == "no_backend"
    assert "pip install 'gpushare[bench]'" in caught.value.hint
    monkeypatch.setattr("gpushare.measure.built_in._PROGRAM", (sys.executable, "-c", "print('backend=torch')"))
    chosen = built_in_workload(real, device, size=256, cpu=True, footprint="1G")
    assert chosen.facts["backend"] == "torch"
    assert "(torch)" in chosen.facts["title"]
    assert list(chosen.argv)[-7:] == ["--backend", "torch", "--size", "256", "--cpu", "--footprint", "1G"]


@pytest.mark.parametrize("size", [0, 15, 32769])
def test_sizes_out_of_range(size: int) -> None:
    host = connect("sim:h200")
    with pytest.raises(BadUsage) as caught:
        built_in_workload(host, Device(gpu=host.nvml.gpu(0)), size=size, cpu=False, footprint=None)
    assert caught.value.code == "bad_size"


def test_the_simulated_one_is_a_job_that_the_simulation_knows() -> None:
    host = connect("sim:h200")
    device = Device(gpu=host.nvml.gpu(0))
    needs = []
    for size, cpu in ((256, False), (1024, False), (1024, True), (4096, False)):
        chosen = built_in_workload(host, device, size=size, cpu=cpu, footprint="2G")
        needs.append(job_parser().parse_args(list(chosen.argv)[3:]).need)
    assert needs == [2.0, 25.0, 12.5, 100.0]


# -- the driver's back end, over a stand-in for cuda.bindings.driver ------------------------------------


class FakeDriver(types.ModuleType):
    """Answers as the official bindings do: a tuple with the status first; computes the product's element."""

    def __init__(self, *, broken: str | None = None) -> None:
        super().__init__("cuda.bindings.driver")
        self.broken, self.launches, self.allocated = broken, [], []

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: object) -> tuple[object, ...]:
            if name == "cuGetErrorName":
                return 0, b"CUDA_ERROR_UNKNOWN"
            if name == self.broken:
                return (999,)
            value = getattr(self, f"_{name}", lambda *_: 7)(*arguments)
            return (0,) if value is None else (0, value)

        return call

    def _cuMemAlloc(self, size: int) -> int:  # noqa: N802
        self.allocated.append(size)
        return 0x1000 * len(self.allocated)

    def _cuModuleLoadData(self, image: bytes) -> int:  # noqa: N802
        assert image.endswith(b"\0")
        return 3

    def _cuLaunchKernel(self, *arguments: object) -> None:  # noqa: N802
        self.launches.append(arguments)

    def _cuCtxSynchronize(self) -> None:  # noqa: N802
        return

    def _cuMemcpyDtoH(self, into: bytearray, _source: int, size: int) -> None:  # noqa: N802
        assert len(into) == size
        into[:] = struct.pack("<f", 32.0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    install(monkeypatch, fake)
    return fake


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)


def test_the_driver_gets_the_kernel_with_its_arguments(driver: FakeDriver) -> None:
    multiplier = DriverMultiplier(100, 2, 10 * 2**20)
    multiplier.launch(1)
    (arguments,) = driver.launches
    blocks = -(-100 // BLOCK)
    assert arguments[1:8] == (blocks, blocks, 1, BLOCK, BLOCK, 1, 0)
    table = (ctypes.c_void_p * 4).from_address(arguments[9])
    pointers = [ctypes.c_uint64.from_address(table[place]).value for place in range(3)]
    assert pointers == [0x4000, 0x5000, 0x6000], "the second stream's own matrices"
    assert ctypes.c_int32.from_address(table[3]).value == 100
    assert sum(driver.allocated) == 2 * 10 * 2**20
    assert multiplier.element() == 32.0


def test_the_first_back_end_that_computes_rightly_is_taken(driver: FakeDriver) -> None:
    assert first_usable(["cuda-bindings", "torch"]) == "cuda-bindings"


def test_a_driver_that_answers_with_an_error_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(broken="cuInit"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unusable, match=r"cuda-bindings: CUDA: CUDA_ERROR_UNKNOWN; torch: torch is not installed"):
        first_usable(["cuda-bindings", "torch"])


def test_one_that_computes_wrongly_is_not_taken(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverMultiplier, "element", lambda _self: 31.0)
    with pytest.raises(Unusable, match="computes 31 instead of 32"):
        first_usable(["cuda-bindings"])


def test_the_kernel_is_for_old_drivers_and_any_gpu() -> None:
    """PTX ISA 7.8 is CUDA 11.8 (driver 520), and compute_60 runs on all GPUs from Pascal on."""
    assert re.search(r"^\.version 7\.8$", PTX, re.MULTILINE)
    assert re.search(r"^\.target sm_60$", PTX, re.MULTILINE)
    assert f".entry {NAME}(" in PTX
    assert PTX.isascii()
    assert "\0" not in PTX
