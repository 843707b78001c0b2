"""The device plugin's configuration: what gpushare writes is what the plugin takes."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage
from gpushare.export.k8s import NodeSharing, check_mps, plugin_config, resource_of
from gpushare.inputs import yaml_text
from tests.export.plugin_config import from_config


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
    mig=st.booleans(),
)
def test_what_is_written_is_read_back(strategy: str, replicas: dict[str, int], mig: bool) -> None:
    shared = NodeSharing(strategy=strategy, replicas=replicas, mig=mig and strategy != "mps")
    written = yaml.safe_load(yaml_text(plugin_config(shared)))
    assert from_config(written) == shared
    # Under time-slicing more than one replica gives a program no more: the plugin allows that by default.
    assert written["sharing"][strategy]["failRequestsGreaterThanOne"] is True
