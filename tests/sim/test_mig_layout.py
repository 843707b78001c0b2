"""Placing MIG instances on a simulated GPU."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, NotSupported, OperationFailed
from gpushare.gpu_models import find_model
from gpushare.sim.mig import gpu_instance_id, occupied_places, place_instances
from gpushare.sim.state import SimulatedGpu, initial_state


def new_gpu(name: str) -> SimulatedGpu:
    return initial_state(f"sim:{name}").gpus[0]


def layout(name: str, requests: list[str]) -> list[tuple[str, int, int]]:
    gpu = place_instances(new_gpu(name), find_model(name), requests)
    return [(mig.profile, mig.start, mig.gpu_instance_id) for mig in gpu.mig]


def test_gpu_instance_ids_number_the_buddy_tree() -> None:
    assert [gpu_instance_id(8, start, 1) for start in range(8)] == list(range(7, 15))
    assert [gpu_instance_id(8, start, 2) for start in (0, 2, 4, 6)] == [3, 4, 5, 6]
    assert [gpu_instance_id(8, 0, 8), gpu_instance_id(8, 0, 4), gpu_instance_id(8, 4, 4)] == [0, 1, 2]
    assert [gpu_instance_id(12, start, 3) for start in (0, 3, 6, 9)] == [3, 4, 5, 6]
    assert [gpu_instance_id(4, start, 1) for start in range(4)] == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="no GPU instance"):
        gpu_instance_id(8, 1, 2)


def test_instances_take_the_places_asked_for() -> None:
    assert layout("h200", ["3g.71gb", "1g.18gb:6"]) == [("3g.71gb", 0, 1), ("1g.18gb", 6, 13)]
    assert layout("h200", ["1g.18gb", "3g.71gb:0"]) == [("3g.71gb", 0, 1), ("1g.18gb", 4, 11)]
    assert layout("a30", ["1g.6gb"] * 4) == [("1g.6gb", start, 3 + start) for start in range(4)]
    assert layout("rtx-pro-6000", ["2g.48gb", "1g.24gb+gfx:9"]) == [("2g.48gb", 0, 1), ("1g.24gb+gfx", 9, 6)]


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        # The 1g must leave the half for the 3g, whatever the order of asking.
        ("h200", ["1g.18gb", "1g.18gb", "2g.35gb", "3g.71gb"]),
        ("rtx-pro-6000", ["1g.24gb-me", "1g.24gb+me.all", "1g.24gb-me"]),
    ],
)
def test_the_search_finds_sets_that_first_fit_misses(name: str, requests: list[str]) -> None:
    assert len(layout(name, requests)) == len(requests)


def test_placing_switches_mig_on_and_compute_mode_to_default() -> None:
    before = new_gpu("h200")
    before.compute_mode = 3
    after = place_instances(before, find_model("h200"), ["7g.141gb"])
    assert (after.mig_mode, after.mig_pending, after.compute_mode) == (1, 1, 0)
    assert (before.mig_mode, before.mig) == (0, [])
    assert place_instances(after, find_model("h200"), []).mig == []


def test_the_uuid_comes_from_the_place_and_not_from_the_profile() -> None:
    plain = place_instances(new_gpu("h200"), find_model("h200"), ["1g.18gb:4"]).mig[0]
    media = place_instances(new_gpu("h200"), find_model("h200"), ["1g.18gb+me:4"]).mig[0]
    other = place_instances(new_gpu("h200"), find_model("h200"), ["1g.18gb:5"]).mig[0]
    assert plain.uuid == media.uuid != other.uuid
    assert plain.uuid.startswith("MIG-")
    # Version nibble 5, as every MIG UUID of the driver.
    assert plain.uuid.removeprefix("MIG-")[14] == "5"


@pytest.mark.parametrize(
    ("name", "requests", "error"),
    [
        ("h200", ["9g.1gb"], NotSupported),
        ("h200", ["3g.71gb:1"], BadUsage),
        ("h200", ["3g.71gb:"], BadUsage),
        ("h200", [""], BadUsage),
        ("h200", ["3g.71gb"] * 3, OperationFailed),
        ("h200", ["1g.18gb"] * 8, OperationFailed),
        ("h200", ["1g.18gb+me"] * 2, OperationFailed),
        ("h200", ["4g.71gb", "2g.35gb:0"], OperationFailed),
        ("rtx-pro-6000", ["1g.24gb+me.all", "1g.24gb"], OperationFailed),
        ("t4", ["1g.5gb"], NotSupported),
        ("rtx-pro-5000", ["1g.24gb"], NotSupported),
    ],
)
def test_what_cannot_be_placed_is_refused(name: str, requests: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        place_instances(new_gpu(name), find_model(name), requests)


@given(st.sampled_from(["h200", "a30", "rtx-pro-6000", "h100-pcie"]), st.data())
def test_instances_never_overlap_and_ids_differ(name: str, data: st.DataObject) -> None:
    model = find_model(name)
    names = [profile.name for profile in model.profiles]
    requests = data.draw(st.lists(st.sampled_from(names), max_size=8))
    try:
        gpu = place_instances(new_gpu(name), model, requests)
    except OperationFailed:
        assume(False)
    slices = [one for instance in occupied_places(gpu, model) for one in instance.span]
    assert sorted(mig.profile for mig in gpu.mig) == sorted(requests)
    assert len(set(slices)) == len(slices)
    assert all(0 <= one < (model.axis or 0) for one in slices)
    assert len({mig.uuid for mig in gpu.mig}) == len({mig.gpu_instance_id for mig in gpu.mig}) == len(requests)
