"""Results of tune that are kept for later runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.model import Way
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.run.results import Tuned, find_tuned, keep_tuned

CAPS: dict[str, Any] = {
    "name": "web",
    "gpu_name": "NVIDIA H200",
    "driver": "580.159.04",
    "threads_percent": 70.0,
    "low_priority": True,
    "way": Way.CAPS,
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """Return a simulated host that keeps its state in a directory of this test."""
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(tmp_path / "sim"))
    monkeypatch.setenv("GPUSHARE_STATE_DIR", str(tmp_path / "state"))
    return connect("sim:h200")


def written(host: Host, record: dict[str, Any]) -> Tuned | None:
    """Write a result as text, and return what is read."""
    keep_tuned(host, Tuned(**CAPS))
    (host.state_directory / "tuned" / "web.json").write_text(json.dumps(record))
    return find_tuned(host, "web")


def test_slices_are_kept(host: Host) -> None:
    sliced = Tuned(
        **{**CAPS, "threads_percent": 100.0, "way": Way.SLICES}, production_slice_us=16000, other_slice_us=100
    )
    keep_tuned(host, sliced)
    assert find_tuned(host, "web") == sliced


@pytest.mark.parametrize(
    "wrong", [{"way": "magic"}, {"other_slice_us": 0}, {"other_slice_us": 1 << 40}, {"production_slice_us": "16ms"}]
)
def test_a_wrong_way_or_slice_is_no_result(host: Host, wrong: dict[str, Any]) -> None:
    assert written(host, {"schema": 1} | CAPS | wrong) is None
