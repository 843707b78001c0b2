"""``gpushare savings``: the example in words and numbers, from flags and from a recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.units import GIB
from gpushare.measure.recording import GpuSample, Header, RecordedGpu, RecordingFile, Sample
from tests.cli.drive import Cli, Refused, missing, refusals

EXAMPLE = (
    *("savings", "--gpus", "4", "--load", "25", "--price", "0.752", "--hours", "720"),
    *("--target-load", "80", "--instance", "g4dn.2xlarge"),
)


def test_the_example_says_all_of_it(cli: Cli) -> None:
    said = cli(*EXAMPLE).ok().out
    assert "now: 4 x g4dn.2xlarge at 25 % load each: 4 x $0.752/h x 720 h = $2,165.76" in said
    assert "from $2,165.76 to $541.44, saving $1,624.32 (75 %)" in said
    assert "warning: on one GPU, 4 x 25 % is 100 % load: no headroom" in said
    assert "4 to 2: from $2,165.76 to $1,082.88, saving $1,082.88 (50 %); fullest 50 %, fits  <- recommended" in said
    assert "headroom costs 1 GPU more, $541.44: 50 % full instead of 100 %" in said
    assert "price: $0.752 per GPU per hour, 720 hours; source: given with --price" in said
    data = cli(*EXAMPLE, output="json").ok().data
    assert (data["price"], data["cost"]) == ({"per_hour": 0.752, "hours": 720.0}, 2165.76)
    # The warning stays with -q.
    quiet = cli("-q", *EXAMPLE).ok()
    assert ("no headroom, so every peak" in quiet.out, quiet.err) == (True, "")


def test_a_narrow_terminal_breaks_no_word_and_names_what_it_drops(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("savings", "--gpus", "16", "--load", "20%", "--price", "2.50", "--memory", "5G", "--gpu-memory", "80G")
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(*words, output="table").ok().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert "saving $21,600.00 (75 %); fullest 80 %, fits  <- recommended" in " ".join(lines)
    assert lines[-1] == "not shown at this width: together"


def test_csv_is_the_options(cli: Cli) -> None:
    lines = cli(*EXAMPLE, output="csv").ok().out.splitlines()
    assert lines[0].startswith("gpus,cost,saving,saving_percent")
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2"]


def test_without_a_price_it_is_a_share(cli: Cli) -> None:
    answer = cli("savings", "--gpus", "4", "--load", "20", "--instance", "p5.48xlarge").ok()
    assert missing(answer.out, "4 to 1: 75 % fewer", "price: none given, so no amounts") == []
    assert "$2" not in answer.out


@refusals(
    "no_load 2:  | --gpus 4 | --load 4",
    "bad_number 2: --gpus 0 --load 4 | --gpus 9999 --load 4 | --gpus 4 --load 101 | --gpus 4 --load nan",
    "bad_number 2: --gpus 4 --load -3 | --gpus 4 --load 25 --price cheap | --gpus 4 --load 25 --price 0",
    "bad_number 2: --gpus 4 --load 25 --hours 0 | --gpus 4 --load 25 --hours 1e9",
    "bad_number 2: --gpus 4 --load 25 --target-load 120",
    "bad_size 2: --gpus 4 --load 25 --memory 5",
    "memory_too_large 2: --gpus 4 --load 25 --memory 20G --gpu-memory 15G",
    "bad_combination 2: --gpus 4 --load 25 -g 0 | --from x.jsonl --gpus 4 | --from x.jsonl --load 4",
    "bad_combination 2: --from x.jsonl --memory 4G",
)
def test_what_is_wrong_is_refused(refused: Refused, words: list[str], code: str, exit_code: int) -> None:
    said = refused("savings", *words, code=code, exit_code=exit_code)
    # A wrong number gets an example of its own option.
    is_example_of_option = words[:2] == ["--gpus", "4"] and code == "bad_number"
    assert not is_example_of_option or f"give {words[-2]} " in said


Recorded = Callable[..., str]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Return a function that writes a recording of GPUs with constant loads, and returns its path."""

    def write(*loads: float | None, names: tuple[str, ...] = (), sm: bool = True) -> str:
        gpus = tuple(
            RecordedGpu(index=index, uuid=f"GPU-0000000{index}", name=name, memory_total_bytes=140 * GIB)
            for index, name in enumerate(names or ("NVIDIA H200",) * len(loads))
        )
        path = tmp_path / "r.jsonl"
        path.unlink(missing_ok=True)
        header = Header(host="h", started_at=0.0, interval_seconds=1.0, gpus=gpus)
        with RecordingFile(path, header) as file:
            for second in range(1, 11):
                rows = tuple(
                    GpuSample(
                        index=index,
                        utilization_percent=load,
                        sm_percent=load if sm else None,
                        memory_used_bytes=(index + 1) * 30 * GIB,
                    )
                    for index, load in enumerate(loads)
                )
                file.write_sample(Sample(at=float(second), gpus=rows))
        return str(path)

    return write


def test_a_recording_gives_loads_and_memory_of_the_chosen_gpus(cli: Cli, recorded: Recorded) -> None:
    data = cli("savings", "--from", recorded(10.0, 20.0, 30.0), "--price", "4", output="json").ok().data
    assert (data["loads_percent"], data["gpu_memory_bytes"]) == ([10.0, 20.0, 30.0], 140 * GIB)
    # 30 + 60 + 90 GiB are too much for one.
    (option,) = data["options"]
    assert (option["gpus"], option["max_load_percent"], option["saving"]) == (2, 30.0, 2880.0)
    assert sorted(map(sorted, option["places"])) == [["GPU 0", "GPU 1"], ["GPU 2"]]
    data = cli("savings", "--from", recorded(10.0, 20.0, 30.0), "-g", "0,2", output="json").ok().data
    assert data["loads_percent"] == [10.0, 30.0]


def test_the_notes_say_how_far_a_recording_goes(cli: Cli, recorded: Recorded) -> None:
    answer = cli("savings", "--from", recorded(10.0, 20.0, sm=False)).ok()
    assert missing(answer.err, "means of 10 samples in 10 s", "a kernel ran", "one machine") == []


def test_recordings_that_are_refused(refused: Refused, recorded: Recorded, tmp_path: Path) -> None:
    path = recorded(10.0, 20.0, names=("NVIDIA H200", "Tesla T4"))
    refused("savings", "--from", path, code="different_gpus", exit_code=2)
    assert "GPU 1" in refused("savings", "--from", recorded(10.0, None), code="load_unknown", exit_code=3)
    text = refused("savings", "--from", recorded(10.0), "-g", "7", code="unknown_gpu", exit_code=6)
    assert (" has no GPU 7\n" in text.replace("'", ""), "hint: it has GPU 0" in text, "this host" in text) == (
        True,
        True,
        False,
    )
    refused("savings", "--from", str(tmp_path / "none"), code="no_recording", exit_code=6)
    file = tmp_path / "x"
    file.write_text("")
    refused("savings", "--from", str(file), code="empty_recording", exit_code=1)
    file.write_text("some text\n")
    refused("savings", "--from", str(file), code="not_a_recording", exit_code=1)
    file.write_text('{"gpushare_recording": 99}\n')
    refused("savings", "--from", str(file), code="newer_recording", exit_code=3)
