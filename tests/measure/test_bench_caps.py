"""The thread caps that a benchmark found, and how they are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.benchmark import BenchCell, BenchGpu, Benchmark, Metric, Pick
from gpushare.base.errors import BadUsage
from gpushare.base.model import MigInstance
from gpushare.base.selection import Device, select_one
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.measure import bench_data
from gpushare.measure.statistics import summarize
from gpushare.run.results import BenchedCap, find_benched, keep_benched
from gpushare.show.result import jsonable
from tests.errors import fails

PICK = Pick(
    copies=4,
    way="mps",
    threads_percent=None,
    fastest="mps",
    no_difference=(),
    certain=True,
    ways=2,
    open_ways=0,
    gain=None,
    over=None,
)
BENCHMARK = Benchmark(
    driver="580.1",
    gpu=BenchGpu(index=0, uuid="GPU-1", name="NVIDIA H200", mig=None),
    command=("a",),
    workload=None,
    started_at=1_700_000_000.0,
    metric=Metric(),
    window_seconds=None,
    cells=(),
    picks=(),
)
# The best cap for four copies, which these tests speak of.
FOUR = BenchedCap(copies=4, threads_percent=50.0, best=True, date="2026-11-21", driver=None)


def cell(way: str, threads: float | None, mean: float | None, *failures: str) -> BenchCell:
    throughput = None if mean is None else summarize([mean])
    return BenchCell(way=way, copies=4, threads_percent=threads, throughput=throughput, failures=failures)


def document(*cells: BenchCell, way: str | None = None) -> Benchmark:
    return replace(BENCHMARK, cells=cells, picks=() if way is None else (replace(PICK, way=way),))


def best_caps(benchmark: Benchmark) -> dict[int, BenchedCap]:
    """Return the best caps by the number of copies: one for each."""
    caps = bench_data.best_caps(benchmark)
    found = {cap.copies: cap for cap in caps}
    assert len(found) == len(caps)
    return found


def test_the_pick_counts_although_another_is_a_little_faster() -> None:
    caps = best_caps(document(cell("mps", None, 98), cell("mps:200/n", 50.0, 100), way="mps"))
    assert caps[4] == BenchedCap(copies=4, threads_percent=None, best=True, date="2023-11-14", driver="580.1")
    again = best_caps(document(cell("mps:200/n", 50.0, 100), cell("mps", None, 98), way="mps"))
    assert again == caps


def test_where_another_way_is_better_the_fastest_under_mps_counts() -> None:
    cells = (cell("timeslice", None, 120), cell("mps", None, 90), cell("mps:100/n", 25.0, 100))
    caps = best_caps(document(*cells, way="timeslice"))
    assert (caps[4].threads_percent, caps[4].best) == (25.0, False)


def test_of_printed_times_the_shortest_is_the_fastest() -> None:
    cells = (cell("timeslice", None, 8), cell("mps", None, 12), cell("mps:100/n", 25.0, 10))
    times = replace(document(*cells, way="timeslice"), metric=Metric(pattern="ms=(.*)", higher_is_better=False))
    assert best_caps(times)[4].threads_percent == 25.0


def test_a_way_that_failed_or_was_not_measured_is_no_answer() -> None:
    failed = cell("mps", None, 200, "copy 1: exit code 1")
    assert best_caps(document(failed, cell("mps:100/n", 25.0, None))) == {}
    assert best_caps(document(failed, cell("mps:100/n", 25.0, 1.0)))[4].threads_percent == 25.0


@given(st.lists(st.tuples(st.sampled_from(["queue", "timeslice", "mps", "mps:60"]), st.floats(0.1, 1e6)), max_size=6))
def test_the_answer_is_one_of_the_fastest_cells_under_mps(rows: list[tuple[str, float]]) -> None:
    caps = best_caps(document(*[cell(way, 60.0 if way == "mps:60" else None, mean) for way, mean in rows]))
    under_mps = [row for row in rows if row[0].startswith("mps")]
    assert bool(caps) == bool(under_mps)
    if under_mps:
        fastest = {way for way, mean in under_mps if mean == max(mean for _, mean in under_mps)}
        assert ("mps:60" if caps[4].threads_percent else "mps") in fastest


def test_caps_are_kept_by_command_and_numbers_of_copies_add_up(host: Host, device: Device) -> None:
    two = replace(FOUR, copies=2, threads_percent=None, driver="580.1")
    keep_benched(host, device, ["a", "b c"], [FOUR])
    keep_benched(host, device, ["a", "b c"], [two])
    path = file_of(host)
    assert find_benched(host, device, ["a", "b c"], 4) == FOUR
    assert find_benched(host, device, ["a", "b c"], 2) == two
    assert find_benched(host, device, ["a", "b c"], 8) is None
    assert find_benched(host, device, ["a", "b", "c"], 4) is None
    other = connect("sim:a100-80gb")
    assert find_benched(other, select_one(None, other.nvml.sweep()), ["a", "b c"], 4) is None
    later = replace(FOUR, threads_percent=25.0, date="2026-11-22")
    keep_benched(host, device, ["a", "b c"], [later])
    assert find_benched(host, device, ["a", "b c"], 4) == later
    assert find_benched(host, device, ["a", "b c"], 2) == two
    for broken in ("", "[]", json.dumps({**json.loads(path.read_text()), "caps": {"4": {"threads_percent": 40}}})):
        path.write_text(broken)
        assert find_benched(host, device, ["a", "b c"], 4) is None


def file_of(host: Host) -> Path:
    """Return the only file of kept caps."""
    (path,) = (host.state_directory / "benched").glob("*.json")
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        *({"threads_percent": value} for value in (400, 100, 0, -5, "50", [50])),
        {"best": "yes"},
        {"best": None},
        {"date": 20261121},
        {"date": None},
        {"driver": 580},
        *({"copies": value} for value in (-4, "4", None, 4.0)),
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_kept_cap_with_one_field_that_cannot_be_is_not_believed(
    host: Host, device: Device, wrong: dict[str, Any]
) -> None:
    keep_benched(host, device, ["a"], [FOUR, replace(FOUR, copies=2)])
    path = file_of(host)
    record = json.loads(path.read_text())
    assert [one["copies"] for one in record["caps"]] == [4, 2]
    record["caps"][0].update(wrong)
    path.write_text(json.dumps(record))
    assert find_benched(host, device, ["a"], 4) is None
    # Nor is the rest of its record.
    assert find_benched(host, device, ["a"], 2) is None


def test_a_benchmark_that_picked_nothing_for_some_copies_still_tells_the_fastest() -> None:
    caps = best_caps(document(cell("mps", None, 90), cell("mps:100/n", 25.0, 100)))
    assert (caps[4].threads_percent, caps[4].best) == (25.0, True)


@pytest.mark.parametrize("threads", [0, 100, 200, "50", True])
def test_a_file_with_a_cap_that_is_none_is_not_believed(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    data = jsonable(document(cell("mps:50", 50.0, 100)))
    path.write_text(json.dumps(data))
    assert best_caps(bench_data.read_bench(str(path)))[4].threads_percent == 50
    data["cells"][0]["threads_percent"] = threads
    path.write_text(json.dumps(data))
    with fails(BadUsage, "not_a_bench"):
        bench_data.read_bench(str(path))


def test_a_cap_of_one_size_of_instance_is_not_that_of_another_model_or_the_whole_gpu(
    host: Host, device: Device
) -> None:
    small, large = (
        replace(device, mig=MigInstance(uuid=f"MIG-{profile}", profile=profile)) for profile in ("1g.18gb", "3g.71gb")
    )
    keep_benched(host, small, ["a"], [FOUR])
    assert find_benched(host, small, ["a"], 4) == FOUR
    assert find_benched(host, replace(small, mig=MigInstance(uuid="MIG-other", profile="1g.18gb")), ["a"], 4) == FOUR
    assert find_benched(host, large, ["a"], 4) is None
    assert find_benched(host, replace(small, gpu=replace(device.gpu, name="NVIDIA L4")), ["a"], 4) is None
    assert find_benched(host, device, ["a"], 4) is None


def test_a_command_line_that_is_kept_is_its_owners_alone(host: Host, device: Device) -> None:
    """It may hold a token."""
    keep_benched(host, device, ["train", "--token=secret"], [replace(FOUR, copies=2)])
    path = file_of(host)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o022 == 0
    assert "secret" not in str(path)
    assert find_benched(host, device, ["train", "--token=secret"], 2) == replace(FOUR, copies=2)
