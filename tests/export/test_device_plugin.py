"""The device plugin's configuration: what it refuses, we refuse; what it drops in silence too."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage
from gpushare.export.k8s import PluginSharing, check_mps, plugin_config, resource_of
from gpushare.inputs import yaml_text
from tests.export.plugin_config import Refused, from_config


def config(strategy: str = "timeSlicing", **changes: Any) -> dict[str, Any]:
    resource = {"name": "nvidia.com/gpu", "replicas": 4, **changes}
    return {"version": "v1", "sharing": {strategy: {"resources": [resource]}}}


def shares(block: Any) -> dict[str, Any]:
    return {"version": "v1", "sharing": {"timeSlicing": block}}


def test_what_is_read() -> None:
    found = from_config(
        yaml.safe_load(
            "version: v1\nflags: {migStrategy: mixed}\nsharing:\n  timeSlicing:\n    renameByDefault: true\n"
            "    resources:\n    - {name: gpu, replicas: 10}\n    - {name: nvidia.com/mig-1g.5gb, replicas: 2}\n"
        )
    )
    assert found == PluginSharing(
        strategy="timeSlicing",
        replicas=(("nvidia.com/gpu", 10), ("nvidia.com/mig-1g.5gb", 2)),
        rename=True,
        mig_strategy="mixed",
    )
    assert from_config({}) == from_config(None) == from_config({"version": ""}) == PluginSharing()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "not a mapping"),
        ({"version": "v2"}, "unknown version: v2"),
        ({"version": 1}, "unknown version: 1"),
        ({"version": "v1", "flags": {"migStrategy": "both"}}, "unknown MIG strategy: both"),
        ({"version": "v1", "flags": {"migstrategy": "mixed"}}, "unknown key 'migstrategy'"),
        ({"version": "v1", "sharing": {"timeslicing": {}}}, "unknown key 'timeslicing'"),
        ({"version": "v1", "sharing": {"timeSlicing": {}, "mps": {}}}, "exclude each other"),
        ({"version": "v1", "resources": {"gpus": [{"pattern": "*", "name": "x"}]}}, "ignored"),
        ({"version": "v1", "imex": {"channelIDs": [1]}}, "must be [] or [0]"),
        (shares({}), "no resources specified"),
        (shares(None), "no resources specified"),
        (shares({"resources": []}), "no resources specified"),
        (shares({"resources": {"name": "x"}}), "no resources specified"),
        (shares({"resources": ["x"]}), "a resource is not a mapping"),
        (shares({"resources": [{"name": "gpu", "replicas": 2}], "rename": True}), "unknown key 'rename'"),
        (shares({"resources": [{"name": "gpu", "replicas": 2}], "renameByDefault": "yes"}), "not true or false"),
        (shares({"resources": [{"name": "gpu", "replicas": 2}] * 2}), "stands twice"),
        (config(name=None), "no resource name specified"),
        (config(name=""), "no resource name specified"),
        (config(replicas=None), "no replicas specified"),
        (config(replicas=1), "number of replicas must be >= 2"),
        (config(replicas=0), "number of replicas must be >= 2"),
        (config(replicas=-1), "number of replicas must be >= 2"),
        (config(replicas=True), "number of replicas must be >= 2"),
        (config(replicas="4"), "number of replicas must be >= 2"),
        (config(name="nvidia.com/" + "x" * 60), "63 characters or less"),
        (config(name="mig-1g.5gb+me"), "incorrect format for resource name"),
        (config(name="GPU"), "incorrect format for resource name"),
        (config(name="-gpu"), "incorrect format for resource name"),
        (config(devices=["0"]), "'devices' of a resource is not supported"),
        (config(rename="big"), "'rename' of a resource is not supported"),
        (config(replica=2), "unknown key 'replica'"),
        ({**config("mps"), "flags": {"migStrategy": "mixed"}}, "mixed is not supported with MPS"),
    ],
)
def test_what_is_refused(raw: object, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        from_config(raw)


@pytest.mark.parametrize(
    ("replicas", "capability", "most"), [(48, (7, 5), 48), (48, (9, 0), 48), (16, (7, 0), 16), (48, None, 48)]
)
def test_mps_clients(replicas: int, capability: tuple[int, int] | None, most: int) -> None:
    check_mps(replicas, capability)
    with pytest.raises(BadUsage, match=f"{most + 1} > {most}"):
        check_mps(most + 1, capability)


def test_the_media_extension_is_a_dot() -> None:
    assert resource_of("1g.10gb+me") == "nvidia.com/mig-1g.10gb.me"


NAMES = st.sampled_from(["gpu", "mig-1g.5gb", "mig-1g.10gb.me", "mig-7g.80gb"]).map("nvidia.com/{}".format)


@given(
    strategy=st.sampled_from(["timeSlicing", "mps"]),
    replicas=st.dictionaries(NAMES, st.integers(2, 1000), min_size=1),
    rename=st.booleans(),
    mig=st.sampled_from([None, "none", "single"]),
)
def test_what_is_written_is_read_back(strategy: str, replicas: dict[str, int], rename: bool, mig: str | None) -> None:
    shared = PluginSharing(strategy=strategy, replicas=tuple(replicas.items()), rename=rename, mig_strategy=mig)
    written = yaml.safe_load(yaml_text(plugin_config(shared)))
    assert from_config(written) == shared
    # Under time-slicing more than one replica gives a program no more: the plugin allows that by default.
    assert written["sharing"][strategy]["failRequestsGreaterThanOne"] is True
