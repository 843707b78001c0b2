"""The built-in workload without a GPU: its loop, and its back ends over stand-ins for PyTorch and CuPy."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import types
from typing import Any

import pytest

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.selection import Device
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.measure import workload
from gpushare.measure.built_in import built_in_workload
from gpushare.measure.metric import Printed
from gpushare.measure.workload import BACKENDS, Unusable, cpu_multiplication, first_usable
from gpushare.sim.job import _parser as job_parser
from tests.errors import fails


class Counting:
    """Stands in for a GPU that multiplies at once."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.copied: list[int] = []
        self.waited: list[int] = []
        self.waits = 0

    def launch(self, stream: int) -> None:
        self.launched.append(stream)

    def wait(self, stream: int) -> None:
        self.waited.append(stream)

    def copy(self, stream: int) -> None:
        self.copied.append(stream)

    def synchronize(self) -> None:
        self.waits += 1

    def element(self) -> float:
        return 32.0


def options(**named: object) -> argparse.Namespace:
    given = {"size": 16, "streams": 1, "threads": 0, "cpu": False, "copy": False, "every": 0.0, "seconds": 0.0, **named}
    return argparse.Namespace(**given)


def test_it_prints_a_rate_that_bench_reads(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    workload.run(Counting(), options(), [])
    chosen = built_in_workload(host, Device(gpu=host.nvml.gpu(0)), size=256, cpu=False, footprint=None)
    printed = Printed(chosen.metric)
    for line in capsys.readouterr().out.splitlines():
        printed.listen(line, 1.0)
    assert printed.last > 0


@pytest.fixture(autouse=True)
def without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "cpu_multiplication", lambda _size: lambda: None)


def test_streams_take_turns_and_each_thread_launches_its_own_part() -> None:
    gpu = Counting()
    workload.run(gpu, options(streams=3, cpu=True), [])
    # The first, whose latency is measured, comes while the others are busy.
    assert (gpu.launched, gpu.waited) == ([1, 2, 0], [0])
    gpu = Counting()
    workload.run(gpu, options(threads=3, cpu=True), [])
    assert sorted(gpu.launched) == [0, 1, 2]
    gpu = Counting()
    workload.run(gpu, options(streams=2, cpu=True, copy=True), [])
    assert sorted(gpu.copied) == [0, 1]


def test_of_several_streams_the_first_tells_its_latency(capsys: pytest.CaptureFixture[str]) -> None:
    workload.run(Counting(), options(streams=2, cpu=True), [])
    rate, latency = capsys.readouterr().out.splitlines()
    assert rate.startswith("rate=")
    assert re.fullmatch(r"p50=[0-9.e-]+ p99=[0-9.e-]+", latency)
    workload.run(Counting(), options(cpu=True), [])
    assert "p50" not in capsys.readouterr().out


def test_with_cpu_each_multiplication_is_followed_by_one_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, done = Counting(), []
    monkeypatch.setattr(workload, "cpu_multiplication", lambda size: lambda: done.append(size))
    workload.run(gpu, options(cpu=True, streams=2), [])
    assert done == [16, 16]
    assert len(gpu.launched) == 2


def test_it_ends_when_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    workload.run(Counting(), options(seconds=None), [15])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("library", "other"), [("numpy", "torch"), ("torch", "numpy")])
def test_the_cpu_multiplies_with_the_library_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, library: str, other: str
) -> None:
    matrix = type("Matrix", (), {"__matmul__": lambda *_: "product"})
    monkeypatch.setitem(sys.modules, other, None)
    monkeypatch.setitem(sys.modules, library, types.SimpleNamespace(ones=lambda _shape: matrix()))
    assert cpu_multiplication(4)() == "product"


def test_without_anything_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpushare.measure.workload", "--probe"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        pytest.skip("something here computes on a GPU")
    assert done.stdout == ""
    assert [name for name in BACKENDS if name not in done.stderr] == []
    assert "Traceback" not in done.stderr


def test_a_real_host_without_a_back_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(gpu=host.nvml.gpu(0))
    monkeypatch.setattr(
        "gpushare.measure.built_in._PROGRAM", (sys.executable, "-c", "import sys; sys.exit('error: no')")
    )
    real = type(host)(**{**vars(host), "spec": "local", "programs": connect("local").programs})
    with fails(NotSupported, "no_backend", hint="pip install 'cupy-cuda12x[ctk]'"):
        built_in_workload(real, device, size=256, cpu=False, footprint=None)
    monkeypatch.setattr("gpushare.measure.built_in._PROGRAM", (sys.executable, "-c", "print('backend=torch')"))
    chosen = built_in_workload(real, device, size=256, cpu=True, footprint="1G")
    assert chosen.workload.backend == "torch"
    assert "(torch)" in chosen.workload.title
    assert list(chosen.argv)[-7:] == ["--backend", "torch", "--size", "256", "--cpu", "--footprint", "1G"]


@pytest.mark.parametrize("size", [0, 15, 32769])
def test_sizes_out_of_range(host: Host, size: int) -> None:
    with fails(BadUsage, "bad_size"):
        built_in_workload(host, Device(gpu=host.nvml.gpu(0)), size=size, cpu=False, footprint=None)


def test_the_simulated_one_is_a_job_that_the_simulation_knows(host: Host) -> None:
    device = Device(gpu=host.nvml.gpu(0))
    needs = []
    for size, cpu in ((256, False), (1024, False), (1024, True), (4096, False)):
        chosen = built_in_workload(host, device, size=size, cpu=cpu, footprint="2G")
        needs.append(job_parser().parse_args(list(chosen.argv)[3:]).need)
    assert needs == [2.0, 25.0, 12.5, 100.0]


# -- the back ends, over stand-ins for the two libraries ------------------------------------------------


class Array:
    """A matrix, or a block of memory."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype, self.value = shape, dtype, 1.0

    def __getitem__(self, place: tuple[int, int]) -> float:
        assert place == (-1, -1)
        return self.value


class Stream:
    """A stream of either library; entered, work goes into it."""

    def __init__(self, library: Any, **options: object) -> None:
        self.library, self.options = library, options

    def __enter__(self) -> None:
        self.library.current = self

    def __exit__(self, *_: object) -> None:
        self.library.current = None


class _Streams:
    """The class of streams of a library: called it makes one, and CuPy has the default one as ``null``."""

    null = None

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, **options: object) -> Stream:
        return Stream(self._library, **options)


class Library(types.ModuleType):
    """Notes what is asked of it. ``wrong`` is added to each product."""

    def __init__(self, name: str, *, wrong: float = 0.0, fails: BaseException | None = None, gpu: bool = True) -> None:
        super().__init__(name)
        self.current: Stream | None = None
        self.allocated: list[int] = []
        self.launches: list[tuple[Stream | None, tuple[int, ...], str]] = []
        self.waits = 0
        self.wrong, self.fails = wrong, fails
        self.uint8 = "uint8"
        self.cuda = types.SimpleNamespace(
            is_available=lambda: gpu,
            Stream=_Streams(self),
            default_stream=lambda: None,
            stream=lambda stream: stream,
            synchronize=self._wait,
            Device=lambda: types.SimpleNamespace(synchronize=self._wait),
        )

    def _wait(self) -> None:
        self.waits += 1

    def _made(self, shape: tuple[int, ...], dtype: str) -> Array:
        if self.fails is not None:
            raise self.fails
        self.allocated.append(math.prod(shape) * (1 if dtype == "uint8" else 4))
        return Array(shape, dtype)

    def ones(self, *shape: Any, dtype: str = "float32", device: str | None = None) -> Array:
        assert (self.__name__, device) in {("torch", "cuda"), ("cupy", None)}
        return self._made(shape[0] if isinstance(shape[0], tuple) else shape, dtype)

    def empty(self, size: int, *, dtype: str, device: str | None = None) -> Array:
        assert (self.__name__, device) in {("torch", "cuda"), ("cupy", None)}
        return self._made((size,), dtype)

    def matmul(self, left: Array, right: Array, *, out: Array) -> None:
        assert left is not right is not out
        self.launches.append((self.current, left.shape, left.dtype))
        out.value = left.shape[1] * left.value * right.value + self.wrong


def install(monkeypatch: pytest.MonkeyPatch, *libraries: Library) -> None:
    for name in BACKENDS:
        found = next((one for one in libraries if one.__name__ == name), None)
        monkeypatch.setitem(sys.modules, name, found)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_stream_multiplies_its_own_matrices_and_holds_its_footprint(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(name)
    install(monkeypatch, library)
    multiplier = BACKENDS[name](100, 2, 10 * 2**20)
    assert sum(library.allocated) == 2 * 10 * 2**20
    multiplier.launch(1)
    multiplier.launch(0)
    (second, *what), (first, *same) = library.launches
    assert isinstance(first, Stream)
    assert isinstance(second, Stream)
    assert first is not second
    assert what == same == [(100, 100), "float32"]
    assert library.current is None
    waited = library.waits
    multiplier.synchronize()
    assert library.waits == waited + 1
    assert multiplier.element() == 100.0


def test_streams_of_cupy_do_not_wait_for_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library("cupy")
    install(monkeypatch, library)
    BACKENDS["cupy"](16, 1, 0).launch(0)
    ((stream, *_),) = library.launches
    assert stream.options == {"non_blocking": True}


@pytest.mark.parametrize("name", BACKENDS)
def test_the_first_stream_can_have_priority(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(name)
    install(monkeypatch, library)
    multiplier = BACKENDS[name](16, 2, 0, workload.Streams(first_high=True))
    multiplier.launch(0)
    multiplier.launch(1)
    (first, *_), (second, *_) = library.launches
    assert first.options.get("priority") == -1
    assert "priority" not in second.options


def test_a_footprint_below_the_matrices_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library("torch")
    install(monkeypatch, library)
    BACKENDS["torch"](100, 1, 1000)
    assert library.allocated[-1] == 0


def test_the_first_library_that_computes_correctly_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library("torch"), Library("cupy"))
    assert first_usable(list(BACKENDS)) == "torch"
    install(monkeypatch, Library("torch", wrong=-1.0), Library("cupy"))
    assert first_usable(list(BACKENDS)) == "cupy"
    install(monkeypatch, Library("cupy"))
    assert first_usable(list(BACKENDS)) == "cupy"


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Library("torch", gpu=False), "torch: torch sees no GPU"),
        (Library("torch", fails=RuntimeError("CUDA error: no kernel image")), "torch: CUDA error: no kernel image"),
        (Library("cupy", fails=RuntimeError("cudaErrorNoDevice")), "cupy: cudaErrorNoDevice"),
        (Library("cupy", fails=MemoryError("out of memory")), "cupy: out of memory"),
        (Library("cupy", fails=ImportError("libcublas.so.12")), "cupy: libcublas.so.12"),
        (Library("cupy", wrong=-1.0), "cupy: computes 31 instead of 32"),
    ],
)
def test_why_a_library_is_not_taken(library: Library, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, library)
    with pytest.raises(Unusable) as caught:
        first_usable(list(BACKENDS))
    assert reason in str(caught.value)
    other = next(name for name in BACKENDS if name != library.__name__)
    assert f"{other}: {other} is not installed" in str(caught.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_program_prints_what_bench_reads(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, Library(name))
    assert workload.main(["--probe"]) == 0
    assert workload.main(["--backend", name, "--size", "16", "--seconds", "0", "--every", "0"]) == 0
    probed, rate = capsys.readouterr().out.splitlines()
    assert probed == f"backend={name}"
    assert re.fullmatch(r"rate=[0-9.]+(e[-+]?[0-9]+)?", rate)


def test_the_program_fails_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch)
    assert workload.main(["--size", "16"]) == 1
    assert re.fullmatch(r"error: torch: .*; cupy: .*\n", capsys.readouterr().err)
