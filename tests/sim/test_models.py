"""The catalogue of GPU models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage
from gpushare.gpu_models import NVML_PROFILE, GpuModel, find_model, load_models
from gpushare.sim.mig import gpu_instance_id

MODELS = list(load_models().values())


def test_the_catalogue_holds_every_mig_gpu_and_the_common_others() -> None:
    assert sum(model.mig for model in MODELS) == 20
    assert {model.key for model in MODELS if not model.mig} == {
        *("t4-16gb", "v100-16gb", "v100-32gb", "a10-24gb", "l4-24gb", "l40s-48gb", "rtx-4090-24gb", "p100-16gb")
    }


def test_the_h200_is_as_measured() -> None:
    h200 = find_model("h200")
    assert (h200.name, h200.memory_bytes, h200.multiprocessors) == ("NVIDIA H200", 150754820096, 132)
    assert h200.pci_device_ids == ("0x2335",)
    profile = h200.profile("3g.71gb")
    assert profile is not None
    assert (profile.id, profile.memory_bytes, profile.multiprocessors) == (9, 71424 << 20, 60)
    assert (profile.starts, profile.size, profile.instances) == ((0, 4), 4, 2)


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("NVIDIA H200", "h200-141gb"),
        ("a100_80", "a100-80gb"),
        ("h100-80gb", "h100-sxm-80gb"),
        ("RTX 4090", "rtx-4090-24gb"),
    ],
)
def test_a_model_is_found_by_the_names_that_people_type(typed: str, key: str) -> None:
    assert find_model(typed).key == key


def test_every_model_is_found_by_each_of_its_names() -> None:
    for model in MODELS:
        for name in (model.key, model.short, model.name, *model.aliases):
            assert find_model(name) is model, name


def test_an_unknown_model_is_refused_with_what_is_close() -> None:
    with pytest.raises(BadUsage) as caught:
        find_model("h20O")
    assert caught.value.code == "unknown_model"
    assert "h200" in caught.value.hint
    assert "gpushare sim list --models" in caught.value.hint


@given(st.text(max_size=40))
def test_any_text_is_a_model_or_bad_usage(text: str) -> None:
    try:
        assert find_model(text) in MODELS
    except BadUsage as error:
        assert error.code == "unknown_model"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_a_model_is_consistent(model: GpuModel) -> None:
    assert model.mig == bool(model.profiles)
    ids = [profile.id for profile in model.profiles if profile.id is not None]
    numbers = [profile.nvml_profile for profile in model.profiles if profile.nvml_profile is not None]
    assert len(set(ids)) == len(ids)
    assert len(set(numbers)) == len(numbers)
    assert len({profile.name for profile in model.profiles}) == len(model.profiles)
    for profile in model.profiles:
        assert (profile.starts is None) == (profile.size is None) == (profile.id is None)
        assert profile.memory_bytes is None or model.memory_bytes is None or profile.memory_bytes <= model.memory_bytes
        assert profile.multiprocessors is None or profile.multiprocessors <= (model.multiprocessors or 0)
        for start in profile.starts or ():
            # Each published placement is a node of the driver's buddy tree.
            assert gpu_instance_id(model.axis or 0, start, profile.size or 0) >= 0


def test_time_slice_levels_follow_the_kernel_driver() -> None:
    by_arch = {(model.arch, model.time_slice) for model in MODELS}
    assert ("pascal", False) in by_arch
    assert ("volta", None) in by_arch
    assert {level for arch, level in by_arch if arch not in {"pascal", "volta"}} == {True}


def test_profile_numbers_are_those_of_nvml() -> None:
    import pynvml

    for name, value in NVML_PROFILE.items():
        # The oldest bindings that we take do not have the newest profiles.
        constant = f"NVML_GPU_INSTANCE_PROFILE_{name}"
        assert getattr(pynvml, constant, value) == value
    assert NVML_PROFILE["7_SLICE"] == pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE
