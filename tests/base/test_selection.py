"""Which devices a ``-g`` value means."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpuLost, GpushareError, NotFound
from gpushare.base.model import Gpu, MigInstance
from gpushare.base.selection import Device, select, select_for_change, select_one
from tests.errors import fails
from tests.tables import each

MIGS = (
    MigInstance(uuid="MIG-8443519f-29f1-5dd9-9d33-0a4c2b6f1c01", profile="1g.18gb", memory_total_bytes=18),
    MigInstance(uuid="MIG-8443519f-aaaa-5dd9-9d33-0a4c2b6f1c02", profile=None),
)
GPUS = (
    Gpu(index=0, uuid="GPU-0d54321e-a080-c56a-9a57-14e2f8d3a1d0", pci_bus_id="00000000:01:00.0", memory_total_bytes=99),
    Gpu(index=1, uuid="GPU-0d54aaaa-1111-2222-3333-444455556666", pci_bus_id="00000000:C1:00.0", mig_instances=MIGS),
    Gpu(index=10, uuid="GPU-ffffffff-1111-2222-3333-444455556666", pci_bus_id="0001ABCD:01:00.0"),
)


def names(devices: tuple[Device, ...]) -> list[str]:
    return [device.selector for device in devices]


@pytest.mark.parametrize(
    ("text", "found"),
    each(
        ([None, "all", " ALL "], ["0", "1", "10"]),
        (["0", "0,0,0000:01:00.0,GPU-0d54321e", "GPU-0d54321e-a080-c56a-9a57-14e2f8d3a1d0", "gpu-0D54321E"], ["0"]),
        (["GPU-0d543", "00000000:01:00.0", "0000:01:00.0", "0000:01:00", "01:00.0", "01:00"], ["0"]),
        (["c1:00.0"], ["1"]),
        (["010", "1ABCD:01:00.0"], ["10"]),
        (["10,0"], ["10", "0"]),
        ([" 1 , 0 "], ["1", "0"]),
        ([MIGS[0].uuid], [MIGS[0].uuid]),
        (["MIG-8443519f-a"], [MIGS[1].uuid]),
        ([f"1,{MIGS[0].uuid}"], ["1", MIGS[0].uuid]),
    ),
)
def test_a_device_is_named_by_index_uuid_prefix_or_pci_bus_id(text: str | None, found: list[str]) -> None:
    assert names(select(text, GPUS)) == found


@pytest.mark.parametrize(
    "text",
    [
        "2",
        "-1",
        "GPU-9999",
        "GPU-0d5",
        "GPU-",
        "01:00.1",
        "02:00.0",
        "0001:01:00.0",
        "MIG-0000",
        "h200",
        "0;1",
        "٠",
        "²",
        "9" * 5000,
    ],
)
def test_a_device_that_is_not_there_is_not_found(text: str) -> None:
    with fails(NotFound, "unknown_gpu", hint="0, 1, 10"):
        select(text, GPUS)


def test_any_is_no_device_of_a_command_that_takes_all() -> None:
    with fails(NotFound, "unknown_gpu"):
        select("any", GPUS)


@pytest.mark.parametrize("text", ["GPU-0d54", "MIG-8443519f"])
def test_a_prefix_that_fits_several_is_refused_with_their_names(text: str) -> None:
    with fails(BadUsage, "ambiguous_gpu") as caught:
        select(text, GPUS)
    assert caught.value.message.count(text) == 3


def test_a_whole_uuid_that_begins_another_is_exact() -> None:
    short = dataclasses.replace(GPUS[0], uuid="GPU-0d54")
    assert names(select("GPU-0d54", (short, GPUS[1]))) == ["0"]


@pytest.mark.parametrize("text", ["", " ", ",", "0,", ",0", "0,,1"])
def test_blanks_in_a_list_are_refused(text: str) -> None:
    with fails(BadUsage, "bad_gpu"):
        select(text, GPUS)


def test_gpus_that_do_not_tell_their_uuid_are_still_two() -> None:
    silent = (Gpu(index=0, error="lost"), Gpu(index=1, error="lost"))
    assert names(select("0,1,0", silent)) == ["0", "1"]


def test_a_change_needs_a_name_where_several_are_there() -> None:
    with fails(BadUsage, "gpu_not_named"):
        select_for_change(None, GPUS)
    assert names(select_for_change(None, GPUS[:1])) == ["0"]
    assert names(select_for_change("all", GPUS)) == ["0", "1", "10"]


def test_a_change_on_a_host_without_gpu_is_not_found() -> None:
    for text in (None, "0", "all"):
        with fails(NotFound, "no_gpu"):
            select_for_change(text, ())
    assert select(None, ()) == ()
    with pytest.raises(NotFound, match="no GPU '0'") as caught:
        select("0", ())
    assert "doctor" in caught.value.hint


def test_a_change_refuses_a_lost_gpu_and_a_look_does_not() -> None:
    gpus = (dataclasses.replace(GPUS[0], error="GPU 0: the GPU is lost"), GPUS[1])
    assert names(select("0", gpus)) == ["0"]
    with pytest.raises(GpuLost, match="is lost") as caught:
        select_for_change("all", gpus)
    assert caught.value.gpu == "0"
    assert names(select_for_change("1", gpus)) == ["1"]


def test_one_device_is_one() -> None:
    assert select_one("GPU-ffff", GPUS).gpu.index == 10
    with fails(BadUsage, "one_gpu"):
        select_one("0,1", GPUS)
    with pytest.raises(BadUsage) as caught:
        select_one(None, GPUS)
    # Not "all": that is refused too.
    assert (caught.value.code, caught.value.hint) == ("gpu_not_named", "name one: -g 0")


def test_a_mig_instance_is_a_device_of_its_own() -> None:
    device = select_one(MIGS[0].uuid, GPUS)
    assert (device.uuid, device.title, device.memory_total_bytes) == (MIGS[0].uuid, "MIG 1g.18gb of GPU 1", 18)
    assert select_one(MIGS[1].uuid, GPUS).title == f"MIG {MIGS[1].uuid} of GPU 1"
    whole = select_one("0", GPUS)
    assert (whole.uuid, whole.title, whole.memory_total_bytes) == (GPUS[0].uuid, "GPU 0", 99)
    assert Device(gpu=Gpu(index=3)).uuid == ""


WORDS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="0123456789abcdef:.-GPUMIG, ", max_size=20),
    st.sampled_from(["0", "1", "all", "GPU-0d54", "01:00.0", "٣", "²", "GPU-" + "0" * 5000, "1" * 5000]),
)


@given(st.lists(WORDS, max_size=3).map(",".join), st.booleans())
def test_any_text_gives_devices_or_an_error_of_ours(text: str, change: bool) -> None:
    try:
        devices = select_for_change(text, GPUS) if change else select(text, GPUS)
    except GpushareError as error:
        assert error.exit_code in {2, 6}
        assert error.hint
    else:
        assert devices
        assert len(set(names(devices))) == len(devices)


def test_a_range_names_the_gpus_from_one_index_to_another() -> None:
    gpus = [Gpu(index=index, uuid=f"GPU-{index}") for index in range(4)]
    assert [device.gpu.index for device in select("0-2", gpus)] == [0, 1, 2]
    assert [device.gpu.index for device in select("3,1-2,2", gpus)] == [3, 1, 2]
    with pytest.raises(BadUsage):
        select("2-1", gpus)
    with pytest.raises(NotFound):
        select("2-9", gpus)
