"""A lost GPU is shown in one way: the same word in its row, the others shown, ``partial`` and exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare.base.units import GIB
from gpushare.memory.ledger import Place, Request
from gpushare.sim import admin
from tests.cli.drive import Cli, World

TWO = "sim:2xa30"
SAID = "error: GPU 1 does not answer: the GPU is lost: it fell off the bus"


def test_each_view_shows_the_others_and_ends_with_1(cli: Cli) -> None:
    World(TWO).fault("lost", gpu="1")
    rows = {"status": "  1  -     lost", "mig status": "GPU 1  lost"}
    for words in ("status", "timeslice show", "mig status", "mig profiles", "mps status", "capture", "compare"):
        done = cli(*words.split(), host=TWO)
        assert (done.code, done.lines("error")) == (1, [SAID]), words
        assert not [line for line in done.lines("note") if "GPU 1" in line], words
        assert rows.get(words, "") in done.out, words
        found = cli(*words.split(), host=TWO, output="json")
        assert (found.code, found.json["status"]) == (1, "partial")
        assert [(error["code"], error["gpu"]) for error in found.json["errors"]] == [("gpu_lost", "1")]
    assert cli("compare", "--why", "error-isolation", "mps", host=TWO).code == 1


def test_what_is_lost_is_unknown_to_machines(cli: Cli) -> None:
    cli("mps", "start", "-g", "1", host=TWO).ok()
    World(TWO).fault("lost", gpu="1")
    assert cli("timeslice", "show", host=TWO, output="json").json["data"]["gpus"][1]["time_slice"] is None
    assert "lost" not in cli("timeslice", "show", host=TWO, output="csv").out
    done = cli("mps", "status", host=TWO).ends(1)
    assert any("none yet" in line for line in done.out.splitlines() if "gpushare" in line)


@pytest.mark.usefixtures("even_samples")
def test_a_recording_of_a_lost_gpu(cli: Cli, tmp_path: Path) -> None:
    World(TWO).fault("lost", gpu="1")
    file = str(tmp_path / "one.jsonl")
    done = cli("observe", "--for", "0.3s", "--interval", "0.1s", "--to", file, host=TWO).ends(1)
    assert SAID in done.err
    assert "times: the GPU is lost" in done.err
    cli("observe", "--from", file, host=TWO).ok()


def test_a_job_that_waits_for_a_lost_gpu_is_listed(cli: Cli) -> None:
    world = World(TWO)
    uuids = world.uuid(0), world.uuid(1)
    world.hold(20 * GIB, gpu=0)
    places = [
        Place(world.host, Request(memory_bytes=20 * GIB, keys=keys, client=False, name=name))
        for name, keys in (("lost", uuids[1:]), ("both", uuids), ("well", uuids[:1]))
    ]
    world.fault("lost", gpu="1")
    try:
        found = cli("jobs", host=TWO, output="json").data["jobs"]
        lines = [(job["name"], job["gpu_indexes"], job["line"]["place"], job["line"]["lost_uuids"]) for job in found]
        assert lines == [("lost", [], 1, [uuids[1]]), ("both", [0], 2, [uuids[1]]), ("well", [0], 2, [])]
        for words in (("jobs",), ("status",)):
            text = cli(*words, host=TWO).out
            assert f"  {uuids[1]}  " in text, words
            assert f"  0, {uuids[1]}  " in text, words
        names = {
            gpu: [job["name"] for job in cli("status", "-g", gpu, host=TWO, output="json").data["waiting_jobs"]]
            for gpu in "01"
        }
        assert names == {"0": ["both", "well"], "1": ["lost", "both"]}
    finally:
        for place in places:
            place.leave()


def test_a_job_that_is_swapped_out_of_a_lost_gpu_is_shown(cli: Cli) -> None:
    pid = admin.add_process(TWO, "1", memory_bytes=4 * GIB, name="train")
    cli("swap", "out", str(pid), host=TWO).ok()
    uuid = World(TWO).uuid(1)
    World(TWO).fault("lost", gpu="1")
    (job,) = cli("status", host=TWO, output="json").data["swapped_jobs"]
    assert (job["pid"], job["gpu_indexes"], job["device_uuids"]) == (pid, [], [uuid])
    assert cli("status", "-g", "0", host=TWO, output="json").data["swapped_jobs"] == []


def test_what_a_neighbour_calls_a_gpu_is_no_lost_gpu(cli: Cli) -> None:
    world = World(TWO)
    cli("status", host=TWO).ok()
    place = Place(world.host, Request(memory_bytes=GIB, keys=("GPU-" + "A" * 150,), client=False, name="loud"))
    world.fault("lost", gpu="1")
    try:
        assert "loud" not in cli("jobs", host=TWO).out
        assert "loud" not in cli("status", host=TWO).out
    finally:
        place.leave()
