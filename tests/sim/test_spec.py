"""Names of simulated hosts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError
from gpushare.gpu_models import GpuModel, load_models
from gpushare.sim.state import canonical_spec, initial_state, parse_spec

MODELS = list(load_models().values())


@pytest.mark.parametrize(
    ("typed", "canonical", "count"),
    [
        ("sim:h200", "sim:h200", 1),
        ("sim:H200-141GB", "sim:h200", 1),
        ("sim:8xa100-80gb", "sim:8xa100-80gb", 8),
        (" sim: 2 x t4 , a30 ", "sim:2xt4,a30", 3),
        ("SIM:t4,t4,a30", "sim:2xt4,a30", 3),
        ("sim:a30,t4,a30", "sim:a30,t4,a30", 3),
        ("sim:64xh100", "sim:64xh100", 64),
    ],
)
def test_a_host_has_one_canonical_name(typed: str, canonical: str, count: int) -> None:
    spec = parse_spec(typed)
    assert (spec.text, len(spec.models)) == (canonical, count)


@pytest.mark.parametrize(
    "typed", ["", "h200", "sim:", "sim:,", "sim:h200,", "sim:0xh200", "sim:65xh200", "sim:2x", "sim:40xt4,25xa30"]
)
def test_a_name_that_makes_no_host_is_bad_usage(typed: str) -> None:
    with pytest.raises(BadUsage):
        parse_spec(typed)


@given(st.lists(st.sampled_from(MODELS), min_size=1, max_size=64))
def test_canonical_names_round_trip(models: list[GpuModel]) -> None:
    spec = parse_spec(canonical_spec(models))
    assert list(spec.models) == models
    assert parse_spec(spec.text) == spec


@given(st.one_of(st.text(), st.text().map(lambda text: f"sim:{text}"), st.from_regex(r"sim:[0-9x,a-h ]{0,30}")))
def test_garbage_raises_only_errors_of_gpushare(text: str) -> None:
    try:
        spec = parse_spec(text)
    except GpushareError as error:
        assert error.hint
    else:
        assert parse_spec(spec.text) == spec


def test_a_new_host_has_distinct_gpus_that_are_the_same_at_every_start() -> None:
    state, again = initial_state("sim:8xa100-80gb,t4"), initial_state("sim:8xA100-80, t4")
    assert [gpu.uuid for gpu in state.gpus] == [gpu.uuid for gpu in again.gpus]
    assert len({gpu.uuid for gpu in state.gpus}) == len({gpu.pci_bus_id for gpu in state.gpus}) == 9
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu.uuid) for gpu in state.gpus)
    assert state.gpus[0].pci_bus_id == "00000000:01:00.0"
    assert (state.gpus[0].mig_mode, state.gpus[8].mig_mode) == (0, None)
    assert state.driver == "580.159.04"
    assert state.gpus[0].persistence


def test_hosts_of_different_names_share_no_uuid() -> None:
    first, second = initial_state("sim:2xh200"), initial_state("sim:3xh200")
    assert not {gpu.uuid for gpu in first.gpus} & {gpu.uuid for gpu in second.gpus}
