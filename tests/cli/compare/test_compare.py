"""``gpushare compare``: the views, the names, one cell explained, and hosts that do not answer."""

from __future__ import annotations

import csv
import io
import re

import pytest

from gpushare.connect import connect
from gpushare.sim import admin
from tests.cli.drive import H200, same

ROWS = 10
WAYS = ["streams", "mps", "timeslice", "mig", "vgpu"]


def cells(answer, way):
    """Return the cells of one way by row."""
    return {cell["row"]: cell for cell in answer.data["cells"] if cell["way"] == way}


def grid_of(answer):
    """Return the records of plain output: (row, way) to what it says."""
    lines = answer.out.splitlines()
    at = [lines[1].index(word) for word in ("row", "way", "says")]
    return {(line[: at[1]].strip(), line[at[1] : at[2]].strip()): line[at[2] :].strip() for line in lines[2:]}


def test_all_of_it_on_a_host(cli):
    cli("status").ok()
    before = same(H200)
    answer = cli("compare", output="json").ok()
    # Looking changes nothing.
    assert same(H200) == before
    data = answer.data
    assert (data["view"], data["host"], data["driver"], data["root"]) == ("host", "sim:h200", "580.159.04", True)
    assert [(cell["row"], cell["way"]) for cell in data["cells"]][:5] == [("partition_type", way) for way in WAYS]
    assert len(data["cells"]) == ROWS * len(WAYS)
    for cell in data["cells"]:
        assert cell["sources"], cell
        assert all(list(source) == ["key", "title", "where", "date"] for source in cell["sources"])


def test_a_gpu_without_mig(cli):
    answer = cli("compare", "mig", host="sim:t4", output="json").ok()
    assert {cell["host"] for cell in answer.data["cells"]} == {None}
    assert answer.data["availability"] == [{"way": "mig", "gpu": 0, "usable": False, "why": "no: Tesla T4 has no MIG"}]
    plain = grid_of(cli("compare", "mig", host="sim:t4").ok())
    assert plain["on this host", "MIG"] == "no: Tesla T4 has no MIG"
    assert plain["max partitions", "MIG"] == "not here"


def test_a_newer_driver_takes_60_clients(cli, world):
    world.fault("driver", "595.45.04")
    mps = cells(cli("compare", "mps", output="json").ok(), "mps")
    assert (mps["max_partitions"]["limit"], mps["max_partitions"]["host"]) == (60, "60 clients (MPS 13020)")
    assert mps["sm_isolation"]["host"].endswith("or exclusive static partitions (from Ampere on)")
    assert mps["error_isolation"]["host"] == "No: a fatal fault ends all clients of the GPU"


def test_gpus_of_several_kinds(cli):
    answer = cli("compare", "mig", host="sim:2xt4,a30").ok()
    assert answer.out.startswith("# Ways to share a GPU, on sim:2xt4,a30, driver")
    assert grid_of(answer)["max partitions", "MIG"] == "GPU 0,1: not here. GPU 2: 4 of 1g.6gb"
    one = cli("compare", "mig", "-g", "2", host="sim:2xt4,a30").ok()
    assert grid_of(one)["max partitions", "MIG"] == "4 of 1g.6gb"


def test_a_lost_gpu_is_left_out(cli, world, refused):
    admin.set_fault(connect("sim:2xa30").spec, "lost", "1", None)
    answer = cli("compare", "mig", host="sim:2xa30")
    assert (answer.code, grid_of(answer)["max partitions", "MIG"]) == (1, "4 of 1g.6gb")
    assert answer.lines("error") == ["error: GPU 1 does not answer: the GPU is lost: it fell off the bus"]
    # No GPU answers.
    world.fault("lost", gpu="0")
    answer = cli("compare").ok()
    assert "Ways to share a GPU, today" in answer.out
    assert "no GPU answers" in answer.err
    refused("compare", "--view", "host", code="gpu_lost", exit_code=6)


@pytest.mark.parametrize(("fault", "code", "exit_code", "why"), [
    ("no-driver", "driver_not_loaded", 9, "the NVIDIA driver is not loaded"),
    ("no-nvml", "nvml_missing", 12, "libnvidia-ml.so.1 is not on this machine"),
])  # fmt: skip
def test_without_a_driver_the_table_is_there(cli, world, refused, fault, code, exit_code, why):
    world.fault(fault)
    answer = cli("compare").ok()
    assert answer.out.startswith("# Ways to share a GPU, today, newest drivers\n")
    assert answer.lines("note") == [f"note: showing the view today, because this host does not answer: {why}"]
    for view in ("published", "today"):
        quiet = cli("compare", "--view", view, output="json").ok()
        assert (quiet.data["view"], quiet.data["host"], quiet.err) == (view, None, "")
        assert len(quiet.data["cells"]) == 50
    assert why in cli("compare", "--why", "reconfigure", "mig").ok().out
    assert why in refused("compare", "--view", "host", code=code, exit_code=exit_code)


def test_published_is_what_nvidia_published(cli):
    said = grid_of(cli("compare", "--view", "published").ok())
    assert said["error isolation", "Time-slicing"] == "Yes"
    assert said["max partitions", "MPS"] == "48"
    assert said["partition type", "vGPU"] == "Temporal & Physical – VMs"
    assert len(said) == 50


@pytest.mark.parametrize(
    ("driver", "clients"),
    [([], "60 clients"), (["--driver", "580"], "48 clients"), (["--driver", "595.45.04"], "60 clients")],
)
def test_today_by_driver(cli, driver, clients):
    # A driver alone means today.
    view = ["--view", "today"] if driver == [] else []
    said = grid_of(cli("compare", "MPS", *view, *driver).ok())
    assert said["max partitions", "MPS"].startswith(clients)
    assert ("[driver 590 on]" in said["max partitions", "MPS"]) is (driver == [])
    data = cli("compare", *view, *driver, output="json").ok().data
    assert (data["view"], data["host"], data["driver"]) == ("today", None, driver[1] if driver else None)


@pytest.mark.parametrize("words", [("error isolation", "ts"), ("errors", "Time-slicing")])
def test_why_a_cell_is_so(cli, words):
    answer = cli("compare", "--why", *words).ok()
    assert answer.out.startswith("# error isolation, Time-slicing\n")
    for part in ("published 2022", "today", "this host", "sources disagree", "they all do", "k8s-device-plugin", "GKE"):
        assert part in answer.out
    assert "GKE and CIP203 describe it" in cli("compare", "--why", "target-use", "mig").ok().out
    one = cli("compare", "--why", *words, output="json").ok().data["cells"]
    assert [(cell["row"], cell["way"], cell["published"]) for cell in one] == [("error_isolation", "timeslice", "Yes")]


def test_csv_is_a_record_per_cell(cli):
    # Names are forgiven, and taken once.
    out = cli("compare", "Time-Slicing", "ts", "MIG", output="csv").ok().out
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert [row["way"] for row in rows] == ["timeslice", "mig"] * ROWS
    assert list(rows[0]) == [
        "row", "way", "published", "today", "host", "level", "limit", "since", "contradiction", "note", "sources",
    ]  # fmt: skip
    assert all(row["sources"].split()[0] == "nvidia-table-2022" for row in rows)


@pytest.mark.parametrize(("words", "code"), [
    (("mgi",), "bad_way"), (("--view", "tomorrow"), "bad_view"), (("--view", ""), "bad_view"),
    (("--why", "colour", "mig"), "no_row"), (("--why", "memory", "mig"), "no_row"),
    (("--why", "errors", "colour"), "bad_way"), (("mig", "--why", "errors", "mig"), "bad_combination"),
    (("--driver", "new"), "bad_driver"), (("--driver", "100"), "bad_driver"), (("--driver", "469.99"), "bad_driver"),
    (("--driver", "5800"), "bad_driver"), (("--driver", "580", "--view", "host"), "bad_combination"),
    (("--driver", "580", "-g", "0"), "bad_combination"), (("-g", "0", "--view", "published"), "bad_combination"),
    (("--why", "errors"), "usage"), (("-g", "7"), "unknown_gpu"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(refused, words, code):
    message = refused("compare", *words, code=code, exit_code=6 if code == "unknown_gpu" else 2)
    assert code != "bad_driver" or f"'{words[1]}' is not a driver version from 470 to 999" in message


# -- the screens ------------------------------------------------------------------------------------


@pytest.fixture
def screen(cli, monkeypatch):
    """Return a function that returns the table on a screen of a width."""

    def shown(width, *words, host="sim:h200"):
        monkeypatch.setenv("COLUMNS", str(width))
        out = cli("compare", *words, host=host, output="table").ok().out
        assert max(map(len, out.splitlines())) <= width or "--why" in words
        return out

    return shown


def test_the_screens(cli, golden, screen):
    for width in (80, 200):
        golden(f"compare-{width}", screen(width, host="sim:a100-80gb"))
    golden("compare-why-80", screen(80, "--why", "error isolation", "mps"))
    golden("compare-plain", cli("compare", "mps", "mig", host="sim:t4").ok().out)
    for width, columns in ((80, 2), (120, 4)):
        out = screen(width, *WAYS[:columns], host="sim:t4")
        assert out.splitlines()[2].split() == ["Streams", "MPS", "Time-slicing", "MIG"][:columns]


@pytest.mark.parametrize("width", [80, 120])
def test_a_screen_that_is_no_grid_is_short_and_says_how_to_see_all(screen, width):
    out = screen(width)
    assert len(out.splitlines()) <= 43
    assert "not shown: partition type, cross-partition interop, telemetry, target use" in " ".join(out.split())
    # A way that this host does not have is one line.
    assert len(re.findall(r"\n +vGPU  ", out)) == 1
    assert "…" not in screen(width, "-v")
