"""What is free, what is lost: against the simulated driver, and against real output of an H200."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpushare.gpu_models import find_model, load_models
from gpushare.mig.planner import capacity_lost, free_profiles, lost_slices
from gpushare.mig.profile import Layout, Profile
from gpushare.sim.mig import Occupied, free_starts
from tests.mig.boards import MODELS, SHAPES, instance, layout
from tests.mig.brute import State, brute_of
from tests.sim.nvml_host import remaining_capacity

CAPTURES = Path(__file__).parent.parent / "data" / "h200-r580"
KEYS = [model.key for model in SHAPES]


def laid(profiles: tuple[Profile, ...], state: State) -> Layout:
    """Return a GPU with these instances."""
    by_name = {profile.name: profile for profile in profiles}
    return Layout(gpu=0, profiles=profiles, instances=tuple(instance(by_name[n], s) for n, s in sorted(state)))


@pytest.mark.parametrize("key", KEYS)
def test_free_is_what_the_driver_counts(key: str) -> None:
    """Over the whole state space, as the simulated driver counts it; compute slices bind on one odd board only."""
    model = load_models()[key]
    profiles = model.profiles
    bound = 0
    for state in brute_of(key).states:
        present = [Occupied(next(p for p in model.profiles if p.name == name), start) for name, start in state]
        spare = (model.compute_slices or 0) - sum(one.profile.slices for one in present)
        for free, raw in zip(free_profiles(laid(profiles, state)), model.profiles, strict=True):
            driver = remaining_capacity(raw, present)
            assert free.count == min(driver, spare // raw.slices)
            bound += free.count != driver
            if free.count:
                assert list(free.starts) == free_starts(raw, present)
    assert (bound > 0) == (key == "h100-pcie-80gb")


@pytest.mark.parametrize("key", KEYS)
def test_the_capacity_lost_is_that_of_brute_force(key: str) -> None:
    brute, profiles = brute_of(key), load_models()[key].profiles
    for content, states in list(brute.by_content.items())[::2]:
        for state in states[::5]:
            assert capacity_lost(laid(profiles, state)) == brute.lost(state), content


@pytest.mark.parametrize("key", KEYS)
def test_lost_slices_are_those_that_no_further_set_reaches(key: str) -> None:
    brute, model = brute_of(key), load_models()[key]
    profiles = model.profiles

    def used(state: State) -> tuple[int, int]:
        slices = sum(brute.profiles[name].slices for name, _ in state)
        return slices, sum(brute.profiles[name].size or 0 for name, _ in state)

    for state in brute.states[::97]:
        larger = [other for other in brute.states if state <= other]
        lost = lost_slices(laid(profiles, state))
        assert lost.compute == (model.compute_slices or 0) - max(used(other)[0] for other in larger)
        assert lost.memory == (model.axis or 0) - max(used(other)[1] for other in larger)


def test_two_halves_lose_a_compute_slice() -> None:
    assert lost_slices(layout("h200", "3g.71gb:0", "3g.71gb:4")).compute == 1
    assert lost_slices(layout("h200", "4g.71gb:0", "3g.71gb:4")).compute == 0
    assert lost_slices(layout("h200")).compute == 0


def test_an_empty_h200_is_what_its_driver_prints() -> None:
    """Names, ids, Free/Total and SMs of -lgip, placements of -lgipp (driver 580, MIG off)."""
    rows = re.findall(
        r"^\|\s+0\s+MIG (\S+)\s+(\d+)\s+(\d+)/(\d+)\s+([\d.]+)\s+No\s+(\d+)",
        (CAPTURES / "mig-lgip.txt").read_text(),
        re.MULTILINE,
    )
    printed = {
        int(number): ([int(one) for one in starts.split(",")], int(size))
        for number, starts, size in re.findall(
            r"Profile ID\s+(\d+) Placements?\s*: \{([\d,]+)\}:(\d+)", (CAPTURES / "mig-lgipp.txt").read_text()
        )
    }
    found = {}
    for free in free_profiles(layout("h200")):
        one = free.profile
        gib = f"{(one.memory_bytes or 0) / 1024**3:.2f}"
        found[one.name] = (str(one.id), str(free.count), str(one.instances), gib, str(one.multiprocessors))
        assert (list(free.starts), one.size) == printed[one.id or 0]
    assert found == {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        # Seen on an H100 with 3g, 1g and 1g+me, and on an H200 with two 1g: the Free column.
        (("3g.71gb:0", "1g.18gb:6", "1g.18gb+me:4"), [1, 0, 0, 0, 0, 0, 0]),
        (("1g.18gb:4", "1g.18gb:6"), [5, 1, 2, 2, 1, 1, 0]),
    ],
)
def test_free_column_of_used_gpus(instances: tuple[str, ...], expected: list[int]) -> None:
    assert [free.count for free in free_profiles(layout("h200", *instances))] == expected


def test_every_model_with_published_placements_is_a_board() -> None:
    assert len(MODELS) > 12
    for model in MODELS:
        gpu = Layout(gpu=0, profiles=model.profiles)
        assert gpu.memory_slices == model.axis
        assert gpu.compute_slices == model.compute_slices
        assert [free.count for free in free_profiles(gpu)] == [raw.instances for raw in model.profiles]


def test_unknown_placements_leave_nothing_free() -> None:
    """A model of which the placements are not published: nothing is promised."""
    gpu = Layout(gpu=0, profiles=find_model("rtx-pro-4500-blackwell-32gb").profiles)
    assert {free.count for free in free_profiles(gpu)} == {0}
