"""The mig-parted file: what is read, what is refused and where, and that what is written is read back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, NotFound, NotSupported
from gpushare.base.model import Gpu
from gpushare.mig.parted import (
    PLACEMENTS,
    Demand,
    PciIds,
    choose_config,
    demands_for_change,
    demands_in,
    parse_parted,
    unmatched_entry_notes,
)
from gpushare.mig.planner import plan_exact
from gpushare.mig.profile import Layout
from gpushare.mig.target import difference
from gpushare.mig.wish import parse_wish
from tests.mig.boards import MODELS, instance, layout
from tests.tables import each

A100 = 0x20B510DE
GPUS = [Gpu(index=index, uuid=f"GPU-{index}", name="A", mig_capable=True) for index in range(4)]
IDS = {gpu.index: PciIds(A100, 0x153310DE) for gpu in GPUS}
MIXED = """
version: v1
mig-configs:
  nothing:
  - {devices: all, mig-enabled: false}
  mixed:
  - device-filter: "0x20B510DE"
    devices: [0, 1]
    mig-enabled: true
    mig-devices: {"1g.10gb": 7}
  - device-filter: ["0x20B210DE", "0x20B510DE"]
    devices: [1]
    mig-enabled: true
    mig-devices: {"1c.3g.40gb": 3, "1g.10gb": 2, "2g.20gb": 0}
  - devices: [2, 9]
    mig-enabled: false
"""


def configs(text: str) -> Any:
    return parse_parted(*yaml.safe_load_all(text))


def entry(**changes: Any) -> dict[str, Any]:
    """Return a file with one good entry, changed; None takes a key out."""
    fields = {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 7}}
    fields |= {key.replace("_", "-"): value for key, value in changes.items()}
    return {"version": "v1", "mig-configs": {"x": [{k: v for k, v in fields.items() if v is not KEEP_OUT}]}}


KEEP_OUT = object()


def test_what_is_read() -> None:
    found = configs(MIXED)
    assert list(found) == ["nothing", "mixed"]
    demands = demands_in(found["mixed"], GPUS, IDS)
    assert demands == {
        0: Demand(mig_enabled=True, wish=parse_wish("1g.10gb*7")),
        # The later entry replaces the earlier one, and a count of 0 is none.
        1: Demand(mig_enabled=True, wish=parse_wish("1g.10gb*2 1c.3g.40gb*3")),
        2: Demand(mig_enabled=False),
    }
    assert demands_in(found["nothing"], GPUS, IDS) == {
        index: Demand(mig_enabled=False, of_all=True) for index in range(4)
    }


@pytest.mark.parametrize(
    ("text", "fits"),
    each(
        (["0x20B510DE", "0x20b510de", "0X20B510DE", str(A100), "0x20B510DE:0x153310DE", "", []], True),
        ([["nonsense", "0x20B510DE"]], True),
        (["0x20B510DE:0x153210DE", "0x20B210DE", "0x20B510DE:0x153310DE:0x1", "A100-PCIE-80GB"], False),
        ([["0x20B210DE", "0x233010DE"]], False),
    ),
)
def test_device_filter(text: object, fits: bool) -> None:
    config = parse_parted(entry(device_filter=text))["x"]
    assert bool(demands_in(config, GPUS[:1], IDS)) is fits
    assert bool(unmatched_entry_notes(config, GPUS[:1], IDS)) is not fits


def test_a_filter_never_fits_a_gpu_whose_id_is_unknown() -> None:
    config = parse_parted(entry(device_filter="0x0"))["x"]
    assert demands_in(config, GPUS, {}) == {}
    assert demands_in(config, GPUS, {0: PciIds()}) == {}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (None, "the file is empty, not a mapping"),
        ([], "a list"),
        ("text", "'text', not a mapping"),
        ({"mig-configs": {}}, "lacks the key 'version'"),
        ({"version": "v2", "mig-configs": {}}, "no entry"),
        ({"version": "v2", "mig-configs": {"x": [{}]}}, "'version' is not v1"),
        ({"version": 1, "mig-configs": {"x": [{}]}}, "'version' is not v1"),
        ({"version": "v1"}, "lacks the key 'mig-configs'"),
        ({"version": "v1", "mig-configs": {}}, "no entry"),
        ({"version": "v1", "mig-configs": None}, "no entry"),
        ({"version": "v1", "mig-configs": ["x"]}, "'mig-configs' is a list, not a mapping"),
        ({"version": "v1", "mig-configs": {"x": []}}, "'x' is empty"),
        ({"version": "v1", "mig-configs": {"x": {"devices": "all"}}}, "'x' is a mapping, not a list"),
        ({"version": "v1", "mig-configs": {"x": [None]}}, "item 1 of 'x' is empty, not a mapping"),
        ({"version": "v1", "mig-configs": {True: [{}]}}, "has the key True, which is not the name of a configuration"),
        ({"version": "v1", "mig-configs": {"": [{}]}}, "has the key '', which is not the name of a configuration"),
        ({"version": "v1", "mig-configs": {}, "bogus": 1}, "unknown key 'bogus'"),
        ({"kind": "ConfigMap", "data": {}}, "ConfigMap"),
        (entry(bogus=1), "item 1 of 'x' has an unknown key 'bogus'"),
        (entry(devices=KEEP_OUT), "lacks the key 'devices'"),
        (entry(mig_enabled=KEEP_OUT), "lacks the key 'mig-enabled'"),
        (entry(mig_devices=KEEP_OUT), "lacks 'mig-devices' although MIG is on"),
        (entry(mig_devices=None), "lacks 'mig-devices' although MIG is on"),
        (entry(mig_enabled=False), "'mig-devices' although MIG is off"),
        (entry(mig_enabled="true"), "'mig-enabled' is neither true nor false"),
        (entry(devices=7), "'devices' is 7, neither all nor a list of indexes"),
        (entry(devices="0"), "'devices' is '0', neither"),
        (entry(devices="ALL"), "'devices' is 'ALL', neither"),
        (entry(devices=["0"]), "item 1 of 'devices' is '0', not a whole number from 0"),
        (entry(devices=[-1]), "item 1 of 'devices' is -1, not"),
        (entry(device_filter=0x20B510DE), "'device-filter' is 548737246, not a text in quotes"),
        (entry(device_filter=[0x20B510DE]), "item 1 of 'device-filter' is 548737246, not a text in quotes"),
        (entry(mig_devices=["1g.10gb"]), "'mig-devices' is a list"),
        *(
            (entry(mig_devices={name: 2}), f"'{name}', which is not a MIG profile")
            for name in (
                *("bogus", "3g", "3G.40GB", " 3g.40gb", "3g.40gb:4", "1g.10gb+"),
                *("1g.10gb+me,me", "1g.10gb+me-gfx", "1g.10gb+1me"),
            )
        ),
        (entry(mig_devices={9: 2}), "the key 9, which is not a MIG profile"),
        (entry(mig_devices={"1g.10gb": -1}), "'1g.10gb' is -1, not a whole number"),
        (entry(mig_devices={"1g.10gb": "2"}), "'1g.10gb' is '2', not a whole number"),
        (entry(mig_devices={"1g.10gb": 0}), "'mig-devices' has only counts of 0"),
    ],
)
def test_what_is_refused(raw: object, said: str) -> None:
    with pytest.raises(BadUsage) as caught:
        parse_parted(raw)
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "profile", ["1g.10gb", "1c.3g.40gb", "1g.10gb+me", "1g.24gb+me.all", "1g.24gb-me", "2g.48gb+gfx", "0g.0gb"]
)
def test_profiles_are_checked_for_their_form_only(profile: str) -> None:
    (one,) = parse_parted(entry(mig_devices={profile: 1}))["x"].entries
    assert one.counts == ((profile, 1),)


def test_one_index_hints_the_list() -> None:
    with pytest.raises(BadUsage) as caught:
        parse_parted(entry(devices=7))
    assert "[7]" in caught.value.hint


@pytest.mark.parametrize("counts", [{"1g.10gb": 99999}, {"5c.3g.40gb": 1}])
def test_what_no_gpu_can_have_is_refused_when_it_is_wanted(counts: dict[str, int]) -> None:
    config = parse_parted(entry(mig_devices=counts))["x"]
    with pytest.raises(BadUsage):
        demands_in(config, GPUS)


def test_choosing() -> None:
    found = configs(MIXED)
    assert choose_config(found, "mixed").name == "mixed"
    assert choose_config(parse_parted(entry()), None).name == "x"
    with pytest.raises(BadUsage) as several:
        choose_config(found, None)
    assert "nothing, mixed" in several.value.hint
    with pytest.raises(NotFound) as unknown:
        choose_config(found, "mixd")
    assert "nothing, mixed" in unknown.value.hint


def test_a_gpu_without_mig_is_skipped_as_one_of_all_and_refused_by_index() -> None:
    gpus = [GPUS[0], Gpu(index=1, name="T4", mig_capable=False)]
    everyone = demands_in(parse_parted(entry())["x"], gpus)
    assert list(everyone) == [0, 1]
    assert list(demands_for_change(everyone, gpus)) == [0]
    off = parse_parted(entry(devices=[1], mig_enabled=False, mig_devices={}))["x"]
    assert demands_for_change(demands_in(off, gpus), gpus) == {}
    with pytest.raises(NotSupported) as caught:
        demands_for_change(demands_in(parse_parted(entry(devices=[1]))["x"], gpus), gpus)
    assert "GPU 1 (T4)" in caught.value.message


# -- placements --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["0", 0, "GPU-0"])
def test_placements_by_index_and_uuid(key: object) -> None:
    exact = {PLACEMENTS: {"x": {key: ["1g.10gb:0", "1g.10gb:6"]}}}
    raw = entry(mig_devices={"1g.10gb": 2})
    demands = demands_in(parse_parted(raw, exact)["x"], GPUS)
    assert demands[0].wish == parse_wish("1g.10gb:0 1g.10gb:6")
    assert demands[1].wish == parse_wish("1g.10gb*2")
    with pytest.raises(BadUsage):
        parse_parted(raw | exact)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([], "is a list"),
        ({"y": {}}, "the file:1:1: the second document names config 'y'"),
        ({"x": []}, "'x' is a list, not a mapping"),
        ({"x": {"0": "1g.10gb:0"}}, "not those of its mig-devices"),
        ({"x": {"0": {}}}, "'0' is a mapping, not a placement"),
        ({"x": {"0": [None]}}, "item 1 of '0' is empty, not a placement"),
        ({"x": {"0": ["1g.10gb"]}}, "'1g.10gb', not a placement"),
        ({"x": {"0": ["1g.10gb:0 1g.10gb:1"]}}, "not a placement"),
        ({"x": {True: ["1g.10gb:0"]}}, "the key True, which is not a GPU by index or UUID"),
        ({"x": {"0": ["1g.10gb:0"]}}, "the placements of GPU 0 are not those"),
        ({"x": {"0": []}}, "the placements of GPU 0 are not those"),
    ],
)
def test_placements_that_are_refused(places: object, said: str) -> None:
    with pytest.raises(BadUsage) as caught:
        demands_in(parse_parted(entry(), {PLACEMENTS: places})["x"], GPUS)
    assert said in caught.value.message


def test_another_second_document_is_refused() -> None:
    with pytest.raises(BadUsage):
        parse_parted(entry(), entry())


# -- writing -----------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, *, plain: bool = False) -> Layout:
    """Return any GPU with instances that do not overlap, filled or cut into compute instances."""
    profiles = draw(st.sampled_from(MODELS)).profiles
    taken, slices, found = 0, 0, []
    for number in range(draw(st.integers(0, 7))):
        profile = draw(st.sampled_from([profile for profile in profiles if profile.plain or not plain]))
        place = draw(st.sampled_from(list(profile.placements or ())))
        if place.mask & taken or slices + profile.slices > 7:
            continue
        taken, slices = taken | place.mask, slices + profile.slices
        parts = None if plain else draw(st.sampled_from([None, (), *([c] for c in _cuts(profile.slices))]))
        compute = parts if parts is None else tuple(size for part in parts for size in part)
        found.append(instance(profile, place.start, compute=compute, identity=number))
    return Layout(gpu=0, uuid="GPU-0", profiles=profiles, instances=tuple(found))


def _cuts(slices: int) -> list[tuple[int, ...]]:
    return {2: [(1, 1), (1,)], 3: [(2, 1), (1, 1, 1), (2,)], 4: [(2, 2), (2, 1, 1)], 7: [(4, 3), (1,)]}.get(slices, [])


# -- the difference ----------------------------------------------------------------------------------


def test_what_is_missing_and_too_much() -> None:
    gpu = layout("h100", "3g.40gb:4/1,1", "1g.10gb:0", "1g.10gb:1", "1g.10gb:2/")
    differs = difference(gpu, parse_wish("1c.3g.40gb:4*3 1g.10gb:1 1g.10gb 2g*2"))
    assert [str(devices) for devices in differs.missing] == ["1c.3g.40gb:4", "2g.20gb*2"]
    assert [str(devices) for devices in differs.extra] == ["1g.10gb:2 (no compute instance)"]


def test_how_many_gpu_instances_hold_the_devices_does_not_matter() -> None:
    apart = layout("h100", "3g.40gb:0/2", "3g.40gb:4/1")
    assert not difference(apart, parse_wish("1c.3g.40gb 2c.3g.40gb"))


@given(layouts(plain=True), st.data())
@settings(max_examples=60, deadline=None)
def test_no_difference_is_nothing_to_do(gpu: Layout, data: st.DataObject) -> None:
    names = [instance.profile.name for instance in gpu.instances]
    if data.draw(st.booleans(), "another wish"):
        names = names[1:]
    wish = parse_wish(" ".join(names)) if names else ()
    plan = plan_exact([gpu], {0: wish})
    assert any(gpu.changes for gpu in plan.gpus) == bool(difference(gpu, wish))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["all", "v1", "1g.10gb", "x", ""]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["version", "mig-configs", "devices", "mig-enabled", "mig-devices", "x", PLACEMENTS]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_anything_is_a_file_or_an_error_of_ours(raw: object) -> None:
    for value in (raw, {"version": "v1", "mig-configs": {"x": [raw]}}, entry() | {PLACEMENTS: raw}):
        try:
            demands_in(choose_config(parse_parted(value), None), GPUS, IDS)
        except GpushareError as error:
            assert error.hint


@pytest.mark.parametrize(
    ("devices", "absent"), [("all", ""), ([0, 1], ""), ([0, 9], "names GPU 9, not"), ([7, 9], "names GPU 7, 9, not")]
)
def test_gpus_that_this_host_has_not_are_told(devices: object, absent: str) -> None:
    raw = {"version": "v1", "mig-configs": {"x": [{"devices": devices, "mig-enabled": False}]}}
    notes = unmatched_entry_notes(parse_parted(raw)["x"], GPUS, IDS)
    assert [absent in note for note in notes] == ([True] if absent else [])
