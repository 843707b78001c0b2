"""What dcgm-exporter measured, read as a recording: from Prometheus, and from its own text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, OperationFailed
from gpushare.base.units import MIB
from gpushare.measure.dcgm import read_measured
from gpushare.measure.recording import find_underuse
from tests.errors import fails

START = 1_795_000_000
# In the form of dcgm-exporter 4.5.
TEXT = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",pci_bus_id="00000000:01:00.0",device="nvidia0",modelName="NVIDIA H200",Hostname="n1"} 80
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-2",pci_bus_id="00000000:02:00.0",device="nvidia1",modelName="NVIDIA H200",Hostname="n1"} 0
# HELP DCGM_FI_PROF_SM_ACTIVE The ratio of cycles an SM has at least 1 warp assigned.
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H200",Hostname="n1",pod="a"} 0.120000
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-1",modelName="NVIDIA H200",Hostname="n1"} 100000
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",modelName="NVIDIA H200",Hostname="n1"} 40000
DCGM_FI_DEV_FB_FREE{gpu="1",UUID="GPU-2",modelName="NVIDIA H200",Hostname="n1"} 120000
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-2",modelName="NVIDIA H200",Hostname="n1"} 20000
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1",Hostname="n1"} 1980
"""


def series(metric: str, values: list[float], **labels: str) -> dict[str, Any]:
    named = {"__name__": metric, "instance": "n1:9400", "gpu": "0", "UUID": "GPU-1", **labels}
    return {"metric": named, "values": [[START + 60 * n, str(one)] for n, one in enumerate(values)]}


def answer(*found: dict[str, Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "matrix", "result": list(found)}}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[object], Path]:
    def write(content: object) -> Path:
        path = tmp_path / "measured"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_range_answer(file: Callable[[object], Path]) -> None:
    found = read_measured(
        file(
            answer(
                series("DCGM_FI_PROF_SM_ACTIVE", [0.1, 0.2, 0.3], modelName="NVIDIA H200"),
                # A series per pod that shares the GPU.
                series("DCGM_FI_PROF_SM_ACTIVE", [0.1, 0.2, 0.3], modelName="NVIDIA H200", pod="a"),
                series("DCGM_FI_DEV_GPU_UTIL", [100, 100, 100]),
                series("DCGM_FI_DEV_FB_USED", [1000, 3000, 2000]),
                series("DCGM_FI_DEV_FB_FREE", [9000, 7000, 8000]),
                series("DCGM_FI_DEV_POWER_USAGE", [300, 300, 300]),
            )
        )
    )
    assert (found.header.host, found.header.started_at, found.header.interval_seconds) == ("n1:9400", START, 60)
    assert (found.samples, found.seconds, found.reason) == (3, 120, "finished")
    (use,) = found.gpus
    assert (use.gpu.index, use.gpu.uuid, use.gpu.name) == (0, "GPU-1", "NVIDIA H200")
    assert use.activity.mean == pytest.approx(20, abs=0.5)
    assert use.source == "gpm"
    assert (use.memory_peak_bytes, use.gpu.memory_total_bytes) == (3000 * MIB, 10000 * MIB)
    (low,) = find_underuse(found)
    assert low.kind == "low"


def test_the_list_of_promtool_and_an_instant_answer(file: Callable[[object], Path]) -> None:
    assert read_measured(file([series("DCGM_FI_DEV_GPU_UTIL", [50, 60])])).samples == 2
    one = series("DCGM_FI_DEV_GPU_UTIL", [])
    del one["values"]
    assert read_measured(file(answer({**one, "value": [START, "50"]}))).samples == 1


def test_the_text_of_the_exporter(file: Callable[[object], Path]) -> None:
    found = read_measured(file(TEXT + TEXT))
    assert (found.header.host, found.samples, found.header.interval_seconds) == ("n1", 2, 1)
    assert any("no times" in warning for warning in found.header.warnings)
    first, second = found.gpus
    assert first.activity.mean == pytest.approx(12, abs=0.5)
    assert (second.source, second.memory_peak_bytes) == ("utilization", 20000 * MIB)
    timed = read_measured(file("".join(f"{line} {START}000\n" for line in TEXT.splitlines() if line[0] != "#")))
    assert timed.header.started_at == START
    assert not any("no times" in warning for warning in timed.header.warnings)


def test_memory_held_without_work_and_nothing_at_all(file: Callable[[object], Path]) -> None:
    found = read_measured(
        file(
            answer(
                series("DCGM_FI_DEV_GPU_UTIL", [0] * 40),
                series("DCGM_FI_DEV_FB_USED", [20000] * 40),
                series("DCGM_FI_DEV_GPU_UTIL", [0] * 40, gpu="1", UUID="GPU-2"),
                series("DCGM_FI_DEV_FB_USED", [4] * 40, gpu="1", UUID="GPU-2"),
            )
        )
    )
    # Processes are unknown, so none is claimed to be missing.
    assert [(device.gpu, device.kind, device.why) for device in find_underuse(found)] == [
        (0, "held_idle", "memory is held with no work: 19.5 GiB"),
        (1, "empty", "idle: no kernel ran"),
    ]


def test_what_dcgm_does_not_know_is_unknown(file: Callable[[object], Path]) -> None:
    blank = series("DCGM_FI_DEV_GPU_UTIL", [9223372036854775794, float("nan"), 50])
    assert read_measured(file(answer(blank))).samples == 1


@pytest.mark.parametrize(
    ("names", "percent"),
    [
        (("DCGM_FI_PROF_GR_ENGINE_ACTIVE",), 25),
        (("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"), 0.25),
        (("DCGM_FI_DEV_GPU_UTIL",), 0.25),
    ],
)
def test_the_engine_is_a_share_and_stands_in_for_utilization(
    file: Callable[[object], Path], names: tuple[str, ...], percent: float
) -> None:
    (use,) = read_measured(file(answer(*(series(name, [0.25] * 3) for name in names)))).gpus
    assert use.utilization.mean == pytest.approx(percent, abs=0.5)
    assert (use.source, use.sm) == ("utilization", None)


def test_mig_instances_are_left_out(file: Callable[[object], Path]) -> None:
    part = series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", [0.5], GPU_I_ID="1", GPU_I_PROFILE="1g.10gb")
    found = read_measured(file(answer(part, series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", [0.4], gpu="1", UUID="GPU-2"))))
    assert [use.gpu.index for use in found.gpus] == [1]
    assert any("MIG" in warning for warning in found.header.warnings)
    with pytest.raises(OperationFailed, match="only counters of MIG instances"):
        read_measured(file(answer(part)))


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (
            answer(series("DCGM_FI_DEV_GPU_UTIL", [1]), series("DCGM_FI_DEV_GPU_UTIL", [1], instance="n2")),
            BadUsage,
            "several_hosts",
        ),
        (answer(series("node_load1", [1])), OperationFailed, "empty_recording"),
        (answer(), OperationFailed, "empty_recording"),
        ({"status": "error", "errorType": "bad_data", "error": "parse error"}, OperationFailed, "not_a_recording"),
        ({"data": {"resultType": "matrix"}}, OperationFailed, "not_a_recording"),
        ('{"resultType": [', OperationFailed, "not_a_recording"),
        ('[{"metric": 5}]', OperationFailed, "not_a_recording"),
        ("# HELP DCGM_X y\n", OperationFailed, "empty_recording"),
        ('{"some": "json"}', OperationFailed, "not_a_recording"),
        ("", OperationFailed, "empty_recording"),
    ],
)
def test_refused(file: Callable[[object], Path], content: object, kind: type[GpushareError], code: str) -> None:
    with fails(kind, code) as refused:
        read_measured(file(content))
    assert refused.value.hint


@given(st.text(alphabet='DCGM_FI{}[]",:=\n #0123456789aemtrics', max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_text(f"# HELP DCGM_FI_DEV_GPU_UTIL\n{text}")
        with pytest.raises(GpushareError):
            read_measured(path)
        path.write_text(f'{{"metric": 1, "resultType": {text}')
        with pytest.raises(GpushareError):
            read_measured(path)
