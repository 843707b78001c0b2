"""The MIG layout as a mig-parted file: what is written is read back as the same devices."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.model import Gpu, Way
from gpushare.export.containers import FILE, layout_name, mig_parted_export
from gpushare.mig.parted import choose_config, demands_in, parse_parted
from gpushare.mig.wish import parse_wish
from tests.errors import fails
from tests.export.hosts import gpu, host, mig, mps, t4s, text


def test_equal_gpus_share_an_entry() -> None:
    cut = (mig(0), mig(1), mig(4, "3g.40gb"))
    export = mig_parted_export(host(*(gpu(index, Way.MIG, mig=cut) for index in range(3))), name="day")
    (entry,) = yaml.safe_load(text(export, FILE))["mig-configs"]["day"]
    assert entry == {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 2, "3g.40gb": 1}}
    assert any("-c day" in text for text in export.commands)


@given(st.lists(st.lists(st.sampled_from(["1g.10gb", "1g.10gb+me", "3g.40gb"]), max_size=7), min_size=1, max_size=3))
def test_a_layout_has_a_name_that_a_label_may_hold(cuts: list[list[str]]) -> None:
    described = host(
        *(
            gpu(index, Way.MIG, mig=tuple(mig(start, profile) for start, profile in enumerate(cut)))
            for index, cut in enumerate(cuts)
        )
    )
    name = layout_name(described)
    assert re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)
    # The same layout has the same name, another one has not.
    assert name == layout_name(described)
    more = gpu(0, Way.MIG, mig=(mig(9, "7g.80gb"),))
    assert name != layout_name(host(more, *described.gpus[1:]))


def test_on_a_gpu_without_mig_it_is_off() -> None:
    """mig-parted refuses to assert MIG there, and refuses a configuration that leaves out a GPU."""
    described = host(gpu(0, Way.MIG, mig=(mig(),)), gpu(1))
    assert yaml.safe_load(text(mig_parted_export(described, name="x"), FILE))["mig-configs"]["x"] == [
        {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.10gb": 1}},
        {"devices": [1], "mig-enabled": False},
    ]
    with fails(NotSupported, "no_mig"):
        mig_parted_export(t4s(), name="x")


def test_what_is_lost() -> None:
    lost = mig_parted_export(
        host(
            gpu(0, Way.MIG, mig=(mig(mps=mps(), name="train"),)),
            gpu(1, Way.MPS, mps=mps(), mig_capable=True),
            gpu(2, Way.EXCLUSIVE, mig_capable=True),
            whole=False,
        ),
        name="x",
    ).lost
    for word in ("placements", "sharing inside", "names", "exclusive, mps on GPUs without MIG"):
        assert any(word in one for one in lost)


PROFILES = st.lists(st.sampled_from(["1g.10gb", "1g.10gb+me", "2g.20gb", "3g.40gb", "1c.3g.40gb"]), max_size=7)


@given(st.lists(st.none() | PROFILES, min_size=1, max_size=6), st.booleans())
def test_what_is_written_is_read_back(cuts: list[list[str] | None], whole: bool) -> None:
    gpus = [
        gpu(index, Way.TIMESLICE, mig_capable=True)
        if cut is None
        else gpu(index, Way.MIG, mig=tuple(mig(number, profile) for number, profile in enumerate(cut)))
        for index, cut in enumerate(cuts)
    ]
    document = yaml.safe_load(text(mig_parted_export(host(*gpus, whole=whole), name="current"), FILE))
    config = choose_config(parse_parted(document), None)
    demands = demands_in(config, [Gpu(index=gpu.index, mig_capable=True) for gpu in gpus])
    for index, cut in enumerate(cuts):
        assert demands[index].mig_enabled is (cut is not None)
        counts = (
            sorted(
                (str(request.profile), request.count, request.compute)
                for request in parse_wish(
                    " ".join(f"{name}*{(cut or []).count(name)}" for name in dict.fromkeys(cut or ()))
                )
            )
            if cut
            else []
        )
        assert (
            sorted((str(request.profile), request.count, request.compute) for request in demands[index].wish) == counts
        )


def test_models_are_told_apart_by_a_filter() -> None:
    gpus = [gpu(n, mig_capable=True, pci_device_id=model) for n, model in enumerate((0x20B510DE, 0x233510DE))]
    (entry,) = yaml.safe_load(text(mig_parted_export(host(*gpus), name="x"), FILE))["mig-configs"]["x"]
    assert entry == {"device-filter": ["0x20B510DE", "0x233510DE"], "devices": "all", "mig-enabled": False}
    unknown = replace(gpus[1], pci_device_id=None)
    (entry,) = yaml.safe_load(text(mig_parted_export(host(gpus[0], unknown), name="x"), FILE))["mig-configs"]["x"]
    assert entry == {"devices": "all", "mig-enabled": False}


def test_placements_are_a_second_document() -> None:
    cut = (mig(0, "1c.3g.40gb", start=0), mig(1, "1c.3g.40gb", start=0), mig(2, "3g.40gb", start=4))
    found = host(gpu(0, Way.MIG, mig=cut), gpu(1, mig_capable=True))
    first, second = yaml.safe_load_all(text(mig_parted_export(found, name="x", placement=True), FILE))
    assert list(first) == ["version", "mig-configs"]
    assert second == {"gpushare-placements": {"x": {"0": ["1c.3g.40gb:0*2", "3g.40gb:4"]}}}
    parse_parted(first, second)
    elsewhere = replace(found, gpus=(gpu(0, Way.MIG, mig=(mig(0, start=None),)),))
    with pytest.raises(BadUsage):
        mig_parted_export(elsewhere, name="x", placement=True)


@pytest.mark.parametrize("name", ["", "a b", "-x", "a" * 64, "x:y", "é"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(BadUsage):
        mig_parted_export(host(gpu(mig_capable=True)), name=name)


@pytest.mark.parametrize("name", ["yes", "null", "1", "1.0", "0x1", "all-1g.10gb+me", "x", "2001-01-01", "NO"])
def test_any_name_is_read_back_as_text(name: str) -> None:
    written = text(mig_parted_export(host(gpu(mig_capable=True)), name=name), FILE)
    assert list(yaml.safe_load(written)["mig-configs"]) == [name]
