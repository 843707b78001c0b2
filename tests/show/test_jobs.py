"""``jobs``: the screens as people see them, and the document."""

from __future__ import annotations

import pytest

from gpushare.base.errors import ExitCode
from gpushare.base.model import Gpu, LinePlace, ListedJob, Snapshot
from gpushare.show.jobs import jobs_result
from gpushare.show.render import exit_code_of
from gpushare.show.result import OutputFormat, jsonable
from gpushare.show.status import way_text
from tests.show.hosts import GIB, MIB, uuid

COMMAND = "python train.py --data /data/imagenet --epochs 90 --batch-size 256"
SNAPSHOT = Snapshot(host="local", gpus=(Gpu(index=0, uuid=uuid(0)),), taken_at=1.8e9)


def job(name: str | None, pid: int | None, state: str = "running", **facts: object) -> ListedJob:
    given = {"user": "alice", "role": "plain", "device": "GPU 0", "gpu_indexes": (0,), "way": "timeslice", **facts}
    return ListedJob(name=name, pid=pid, state=state, command=given.pop("command", COMMAND), **given)


JOBS = (
    job("web", 4711, role="production", slice_us=16000, sm_percent=62, memory_used_bytes=31 * GIB, since_seconds=90000.0),
    job(
        "batch-1", 4800, role="opportunistic", way="mps", threads_percent=25.0, memory_used_bytes=3 * GIB,
        memory_limit_bytes=8 * GIB, since_seconds=42.0, user="bob",
    ),
    job("train", 5000, "paused", slice_us=500, sm_percent=0, memory_used_bytes=800 * MIB, since_seconds=61.0),
    job("notebook", 5100, "out", memory_used_bytes=0, swapped_bytes=40 * GIB, since_seconds=7300.0, way=None),
    job("small", 5200, way="mig", mig_profile="1g.10gb", gpu_indexes=(1,), memory_limit_bytes=4 * GIB),
    job("shared", 5201, way="mig+mps", mig_profile="2g.20gb", threads_percent=50.0, gpu_indexes=(1,), since_seconds=1.0),
    job(None, 6000, role=None, memory_used_bytes=66 * MIB, sm_percent=3, command="Xorg :0", since_seconds=5.0),
    job(
        "next", 7000, "waiting", way=None, since_seconds=5.0,
        line=LinePlace(place=1, memory_bytes=20 * GIB, behind=(), held_by=("web", "batch-1", "5000"), others_bytes=40 * GIB),
    ),
    job(
        None, 7001, "waiting", way=None, since_seconds=600.0,
        line=LinePlace(place=2, memory_bytes=None, behind=("next",), held_by=("web",), stopped=True),
    ),
    job("done-1", None, "ended", exit_code=0, started=True, ran_seconds=4000.0, since_seconds=30.0, memory_peak_bytes=2 * GIB),
    job("bad-1", None, "ended", exit_code=143, started=True, ran_seconds=3.0, since_seconds=7200.0),
    job("never-1", None, "ended", exit_code=None, started=False, ran_seconds=0.0, since_seconds=90000.0),
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 170])
def test_the_screen(shown, golden, width):
    golden(f"jobs-{width}", "".join(shown(jobs_result(SNAPSHOT, JOBS), OutputFormat.TABLE, width=width)))


def test_a_long_name_can_be_typed_and_a_long_path_takes_no_column(shown):
    """At 80 columns a name is whole, and a command loses the directories that all have in common."""
    command = "/opt/conda/envs/vision/bin/python /home/alice/experiments/train.py --lr 0.1 --epochs 90"
    facts = {"slice_us": 2000, "sm_percent": 62, "memory_used_bytes": GIB, "memory_limit_bytes": 20 * GIB}
    ended = job("x", None, "ended", exit_code=0, started=True, ran_seconds=4.0, since_seconds=30.0, command=command)
    for name, columns in (
        ("train", "job state user role GPU way memory SM command"),
        ("sweep-2026-11-27-bert-large-lr-3", "job state user GPU memory"),
    ):
        jobs = (job(name, 4711, since_seconds=60.0, command=command, **facts), ended)
        result = jobs_result(SNAPSHOT, jobs)
        lines = shown(result, OutputFormat.TABLE, width=80)[0].splitlines()
        assert (lines[3].split()[0], lines[1].split()) == (name, columns.split())
        (row,) = [line for line in lines if line.startswith("x ")]
        assert "  python …/train.py --lr" in row


@pytest.mark.parametrize("output", ["plain", "csv"])
def test_the_document(shown, golden, output):
    golden(f"jobs-{output}", shown(jobs_result(SNAPSHOT, JOBS), OutputFormat(output))[0])


def test_unknown_is_null_in_json_and_never_zero():
    data = jsonable(jobs_result(SNAPSHOT, JOBS).data)["jobs"]
    assert (data[1]["sm_percent"], data[2]["sm_percent"]) == (None, 0)
    assert data[7]["line"] == {
        "place": 1,
        "memory_bytes": 20 * GIB,
        "behind": [],
        "held_by": ["web", "batch-1", "5000"],
        "others_bytes": 40 * GIB,
        "stopped": False,
        "count": 1,
        "lost_uuids": [],
    }


def test_nothing_to_list(shown):
    out, err = shown(jobs_result(SNAPSHOT, ()), OutputFormat.TABLE)
    assert (out, err) == ("no job is running; processes that gpushare did not start: gpushare jobs -a\n", "")
    assert shown(jobs_result(SNAPSHOT, (), everything=True), OutputFormat.TABLE)[0] == "no process is on the GPUs\n"


def test_a_lost_gpu_is_an_error_and_hides_no_job():
    lost = Snapshot(host="local", gpus=(Gpu(index=0, error="GPU is lost"),))
    result = jobs_result(lost, JOBS)
    assert (result.status, exit_code_of(result), len(result.data.jobs)) == ("partial", ExitCode.FAILED, len(JOBS))


@pytest.mark.parametrize(
    ("way", "limits", "text"),
    [
        (None, {}, None),
        (None, {"slice_us": 500}, "slice 500us"),
        ("timeslice", {}, "time-slice"),
        ("timeslice", {"slice_us": 16000}, "slice 16ms"),
        ("mps", {}, "MPS"),
        ("mps", {"threads_percent": 100.0}, "MPS"),
        ("mps", {"threads_percent": 12.5}, "MPS 12.5 %"),
        ("mps", {"slice_us": 200}, "MPS, slice 200us"),
        ("mig", {"profile": "1g.10gb"}, "MIG 1g.10gb"),
        ("mig", {"profile": "1g.10gb", "name": "train", "slice_us": 500}, "MIG train (1g.10gb), slice 500us"),
        ("mig", {}, "MIG -"),
        ("mig+mps", {"threads_percent": 50.0, "profile": "1g.10gb"}, "MIG 1g.10gb, MPS 50 %"),
    ],
)
def test_the_way(way, limits, text):
    assert way_text(way, **limits) == text
