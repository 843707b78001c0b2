"""Names of ways, caps, and which of them a host can run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage
from gpushare.base.selection import select_one
from gpushare.connect import connect
from gpushare.measure.ways import DEFAULT_WAYS, Obstacles, find_obstacles, parse_copies, parse_ways, sort_out
from gpushare.sim import admin
from gpushare.sim.state import StateFile
from tests.errors import fails

ALL = Obstacles(outside=None, timeslice=None, mps=None, caps=None, mig=None, most_clients=None)


def here(spec: str = "sim:h200") -> Obstacles:
    host = connect(spec)
    return find_obstacles(host, select_one("0", host.nvml.sweep()), "true", in_one=False)


def test_names_in_their_order_each_once() -> None:
    assert [way.name for way in parse_ways("mps, queue,MPS:200/n,mps")] == ["mps", "queue", "mps:200/n"]
    assert len(parse_ways(DEFAULT_WAYS)) == 7
    # Time-slicing has its name of elsewhere too.
    assert parse_ways("time-slicing,mps") == parse_ways("timeslice,mps")


@pytest.mark.parametrize(
    "text", ["", "mps:", "mps:0", "mps:101", "mps:0/n", "queue:50", "mig:2", "foo", "mps,,queue", "mps:x"]
)
def test_what_is_no_way(text: str) -> None:
    with fails(BadUsage, "bad_way"):
        parse_ways(text)


@pytest.mark.parametrize(
    ("name", "copies", "cap"),
    [
        ("mps", 4, None),
        ("mps:100/n", 1, None),
        ("mps:100/n", 8, 12.5),
        ("mps:200/n", 2, None),
        ("mps:200/n", 16, 12.5),
        ("mps:100/n", 3, 33.3),
        ("mps:60", 5, 60.0),
        ("mps:100", 5, None),
    ],
)
def test_caps(name: str, copies: int, cap: float | None) -> None:
    assert parse_ways(name)[0].cap(copies) == cap


@given(st.integers(1, 512), st.sampled_from([50, 100, 150, 200, 999]))
def test_a_cap_is_what_mps_takes(copies: int, percent: int) -> None:
    cap = parse_ways(f"mps:{percent}/n")[0].cap(copies)
    assert cap is None or 0.1 <= cap < 100


def test_copies() -> None:
    assert parse_copies("8,1, 2,2") == (1, 2, 8)


@pytest.mark.parametrize("text", ["", "0", "x", "1,", "-1", "513", "1.5", "٣", "9" * 5000])
def test_what_is_no_number_of_copies(text: str) -> None:
    with fails(BadUsage, "bad_copies"):
        parse_copies(text)


def test_a_host_with_everything_but_mig() -> None:
    found = here()
    assert (found.outside, found.timeslice, found.mps, found.caps) == (None, None, None, None)
    assert "there is no MIG instance on GPU 0" in (found.mig or "")
    assert "gpushare mig apply" in (found.mig or "")
    assert found.most_clients == 48


@pytest.mark.parametrize(
    ("spec", "field", "reason"), [("sim:t4", "mig", "no MIG on GPU 0"), ("sim:p100", "caps", "Volta")]
)
def test_what_a_model_lacks(spec: str, field: str, reason: str) -> None:
    assert reason in getattr(here(spec), field)


def test_a_mig_mode_that_the_driver_refuses_is_not_none() -> None:
    connect("sim:h200")
    admin.set_fault("sim:h200", "refused", "0", "mig")
    assert "does not report whether GPU 0 has MIG" in (here().mig or "")


def test_in_mig_mode_only_mig_is_left() -> None:
    connect("sim:h200")
    admin.set_mig("sim:h200", "0", ["1g.18gb", "1g.18gb"])
    found = here()
    assert found.mig is None
    assert "MIG mode" in (found.outside or "")
    assert "MIG mode" in (found.mps or "")


def test_without_the_program_there_is_no_mps() -> None:
    connect("sim:h200")
    admin.set_fault("sim:h200", "missing", None, "nvidia-cuda-mps-control")
    found = here()
    assert "nvidia-cuda-mps-control" in (found.mps or "")
    assert found.outside is None


@pytest.mark.parametrize("mode", [2, 3])
def test_compute_modes(mode: int) -> None:
    host = connect("sim:h200")
    with StateFile(host.spec).changed() as state:
        state.gpus[0].compute_mode = mode
    found = here()
    assert (found.outside is None) == (mode == 3), "prohibited lets nobody in, exclusive-process one"
    assert "one process at a time" in (found.timeslice or "")
    assert (found.mps is None) == (mode == 3), "the MPS server is the one process of exclusive-process"


def test_left_out_are_named_with_reason() -> None:
    ways = parse_ways("queue,mps,mps:100/n,mig,streams")
    why = Obstacles(outside=None, timeslice=None, mps=None, caps="no caps here", mig="no MIG here", most_clients=4)
    cells, left = sort_out([(way, copies) for way in ways for copies in (2, 8)], why.why_not_copies, why.why_not)
    assert [(way.name, copies) for way, copies in cells] == [("queue", 2), ("queue", 8), ("mps", 2)]
    assert {(one.way, one.copies): one.reason for one in left} == {
        ("mps", 8): "an MPS server takes 4 clients",
        ("mps:100/n", None): "no caps here",
        ("mig", None): "no MIG here",
        ("streams", None): "only the built-in workload runs as streams of one process",
    }


def test_numbers_of_copies_that_cannot_be() -> None:
    (mig,) = parse_ways("mig")
    cells, left = sort_out([(mig, 1), (mig, 4)], lambda _way, copies: "too few" if copies > 2 else None, ALL.why_not)
    assert [copies for _, copies in cells] == [1]
    assert [(one.copies, one.reason) for one in left] == [(4, "too few")]
