"""MIG instances that the driver does not tell (no mig/monitor): unknown, never none, and nothing is planned on it."""

from __future__ import annotations

import pytest

from gpushare.host.nvml import NvmlReader
from gpushare.sim import admin
from tests.cli.drive import Cli, World, Write

TWO = "sim:2xa100-80gb"


@pytest.fixture(params=["not-supported", "refused"])
def host(request: pytest.FixtureRequest) -> World:
    """Return a host whose first GPU tells nothing of its two instances."""
    found = World.new(TWO)
    assert found.run("mig", "apply", "-g", "0", "3g.40gb*2").code == 0
    assert found.run("mig", "enable", "-g", "1").code == 0
    admin.set_fault(found.spec, request.param, "0", "mig-instances")
    return found


def test_what_is_hidden_is_unknown_and_not_empty(host: World) -> None:
    answer = host.run("mig", "status").ok()
    first, second = answer.json["data"]["gpus"]
    assert first["instances"] is None
    assert first["lost_compute_slices"] is first["lost_memory_slices"] is None
    assert "does not list the GPU instances of GPU 0" in first["unknown"]
    assert (second["instances"], second["unknown"]) == ([], None)
    assert "mig/monitor" in answer.err
    assert "GPU 0: MIG is on without an instance" not in answer.err
    assert "GPU 1: MIG is on without an instance" in answer.err
    answer = host.run("status")
    first, second = answer.json["data"]["gpus"]
    assert (first["mig_instances"], second["mig_instances"]) == (None, [])
    assert "hides the MIG devices" in answer.err
    assert "GPU 0: it is in MIG mode" not in answer.err
    assert "no CUDA program can use GPU 1: it is in MIG mode without a MIG device" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("mig", "fits", "1g.10gb", "-g", "0"),
        ("mig", "plan", "1g.10gb", "-g", "0"),
        ("mig", "plan", "--apply", "7g.80gb", "-g", "0"),
        ("mig", "create", "1g.10gb", "-g", "0"),
        ("mig", "create", "1g.10gb", "-g", "0", "-n"),
        ("mig", "apply", "7g.80gb", "-g", "0"),
        ("mig", "destroy", "all", "-g", "0", "-y"),
        ("mig", "disable", "-g", "0", "--destroy", "-y"),
        ("mig", "profiles", "-g", "0"),
        ("export", "mig-parted"),
        ("capture",),
        ("export", "k8s"),
        ("advise", "-g", "0"),
        ("run", "--mig", "3g.40gb", "-g", "0", "--", "true"),
    ],
)
def test_nothing_is_planned_on_what_is_unknown(host: World, words: tuple[str, ...]) -> None:
    before = host.look()
    answer = host.run(*words)
    assert answer.code != 0, answer
    assert host.look() == before
    if words[0] == "mig" and answer.code != 2:
        assert answer.error["code"] == "instances_hidden", answer
        assert "mig/monitor" in answer.error["hint"]


def test_what_was_captured_blindly_destroys_nothing(host: World, write: Write) -> None:
    """As before: a file with an empty list of instances, which root then applies."""
    before = host.look()
    assert host.run("capture").ends(4).json["data"] is None
    path = write("version: 1\ngpus:\n  - match: {index: 0}\n    mig: []\n")
    for verb in ("diff", "apply"):
        host.run(verb, "-f", path, *(["-y"] if verb == "apply" else [])).ends(4, "instances_hidden")
    assert host.look() == before


@pytest.mark.parametrize(
    ("call", "unknown"),
    [
        ("nvmlGpuInstanceGetComputeInstances", "compute instances in GPU instance"),
        ("nvmlDeviceGetGpuInstanceProfileInfo", "profiles"),
    ],
)
def test_what_else_is_hidden_makes_the_instances_unknown(call: str, unknown: str) -> None:
    host = World.new(TWO)
    assert host.run("mig", "apply", "-g", "0", "3g.40gb*2").code == 0
    admin.set_fault(host.spec, "refused", "0", call)
    row = host.run("mig", "status").json["data"]["gpus"][0]
    assert row["instances"] is None
    assert unknown in row["unknown"]
    assert host.run("mig", "destroy", "all", "-g", "0", "-y").error["code"] == "instances_hidden"


@pytest.mark.parametrize("kind", ["not-supported", "refused"])
def test_placements_that_are_refused_are_unknown(kind: str) -> None:
    host = World.new(TWO)
    assert host.run("mig", "apply", "-g", "0", "3g.40gb:4 1g.10gb:0").code == 0
    admin.set_fault(host.spec, kind, "0", "mig-placements")
    row = host.run("mig", "status").ok().json["data"]["gpus"][0]
    assert len(row["instances"]) == 2
    assert row["lost_compute_slices"] is row["lost_memory_slices"] is None
    host.run("mig", "fits", "1g.10gb", "-g", "0").ends(3, "placements_unknown")
    # What is there can go all the same.
    assert host.run("mig", "destroy", "1g.10gb:0", "-g", "0").code == 0


def test_people_read_it_too(cli: Cli) -> None:
    cli("mig", "apply", "-g", "0", "3g.40gb:4", host=TWO).ok()
    for fault, words in (
        ("mig-placements", "what still fits is unknown"),
        ("mig-instances", "unknown: the driver does not list"),
    ):
        admin.set_fault(TWO, "refused", "0", fault)
        assert words in cli("mig", "status", host=TWO).ok().out


def test_instances_are_hidden_only_where_their_number_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    host = World.new("sim:h200")
    host.run("mig", "enable", "-g", "0", "-y")
    host.run("mig", "create", "1g.18gb", "-g", "0")
    gpu = host.host.nvml.gpu(0)
    assert (len(gpu.mig_instances), gpu.mig_hidden) == (1, False)
    monkeypatch.setattr(NvmlReader, "max_mig_devices", lambda *_: None)
    gpu = host.host.nvml.gpu(0)
    assert (gpu.mig_instances, gpu.mig_hidden) == ((), True)
