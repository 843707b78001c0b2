"""What the parts of an answer say of each other: its headline, its numbers and its commands agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.advise.test_advise import commands


def answer(cli: Any, spec: str, words: str) -> Any:
    return cli("advise", *words.split(), host=spec, output="json").ok().data


def test_the_headline_says_that_the_queue_is_by_room(cli: Any) -> None:
    data = answer(cli, "sim:t4", "--processes 4 --memory 4G --users same")
    assert data["answer"] == "as many at a time as fit"
    assert commands(data) == ["gpushare run -g 0 --wait --swap request --memory 4596M -- CMD"]
    alone = answer(cli, "sim:t4", "--processes 4 --memory 4G --users same --saturating")
    assert alone["answer"] == "one at a time, each with the whole GPU"
    # In line and without a limit, a job claims the whole GPU.
    assert commands(alone) == ["gpushare run -g 0 --slice 2ms --wait -- CMD"]
    each = answer(cli, "sim:2xt4", "--processes 8 --memory 4G --users same")
    assert each["answer"] == "as many at a time as fit"


@pytest.mark.parametrize(("spec", "words", "text"), [
    ("sim:8xh100", "--processes 20 --memory 2G --users same", "at most 3 on each of GPUs 0-7"),
    ("sim:3xl4,h100", "--processes 12 --users different --untrusted --isolation full --memory 6G", "one at a time, each with the whole GPU"),
])  # fmt: skip
def test_the_placement_says_what_is_on_each_gpu(cli: Any, spec: str, words: str, text: str) -> None:
    (placement,) = [why for why in answer(cli, spec, words)["why"] if why.startswith("spread over")]
    assert text in placement
    # That would be of all GPUs together.
    assert "at a time, each" not in placement.replace("one at a time, each", "")


def test_groups_are_split_into_as_many_copies_as_were_asked_for(cli: Any) -> None:
    lines = commands(answer(cli, "sim:2xt4", "--processes 4 --groups 3 --memory 2G --users same"))
    assert [line for line in lines if "--copies" in line]
    assert sum(int(line.partition("--copies ")[2].split()[0]) for line in lines if "--copies" in line) == 4


def test_a_paused_job_is_not_called_a_queue(cli: Any) -> None:
    words = "--production 1 --opportunistic 1 --memory 5G --users same --bandwidth-bound --no-root"
    data = answer(cli, "sim:l4", words)
    assert data["answer"] == "the whole GPU for production, the other job paused meanwhile"
    assert "--yield pause" in commands(data)[1]


@pytest.mark.parametrize("memory", ["381M", "1G", "3G", "6G", "2900M"])
@pytest.mark.parametrize("spec", ["sim:a30", "sim:a100-40gb"])
def test_one_number_runs_at_a_time(cli: Any, spec: str, memory: str) -> None:
    data = answer(cli, spec, f"--processes 60 --memory {memory} --users same --no-saturating")
    (parallel,) = re.findall(r"--parallel (\d+)", " ".join(commands(data)))
    assert f"not all of them fit at the same time: {parallel} at a time, the others wait" in data["conditions"]
    sentence = data["memory"]["sentence"]
    assert "too much" not in sentence or f"too much, {parallel} at a time" in sentence


def test_more_programs_than_clients_run_some_at_a_time(cli: Any) -> None:
    """Also where it is unknown whether one of them fills the GPU: that is a condition, and no reason for a veto."""
    for memory, parallel in (("500M", 48), ("2G", 31)):
        data = answer(cli, "sim:a100-80gb", f"--processes 100 --memory {memory} --users same")
        assert data["winner"] == "mps"
        assert f"--copies 100 --parallel {parallel} " in commands(data)[1]
        assert any("only if one process does not fill the GPU" in text for text in data["conditions"])


def test_no_more_pods_share_a_gpu_than_fit(cli: Any) -> None:
    data = answer(cli, "sim:a100-40gb", "--processes 20 --memory 3G --users same --no-saturating --needs kubernetes")
    assert "--replicas 11 " in commands(data)[0]


def test_sessions_that_are_kept_apart_are_not_queued(cli: Any) -> None:
    """People's sessions do not end: each needs an instance or a GPU."""
    words = "--processes 2 --memory 3G --users different --pattern interactive --isolation full"
    assert answer(cli, "sim:l40s", words)["winner"] is None
    assert answer(cli, "sim:2xl40s", words)["answer"] == "a GPU for each"
    assert answer(cli, "sim:a100-40gb", words)["winner"] == "mig"


def test_an_engine_that_wakes_up_too_late_is_not_put_to_sleep(cli: Any) -> None:
    words = "--like serving --processes 2 --memory 14G --users same"
    asleep = answer(cli, "sim:rtx-4090", words)
    late = answer(cli, "sim:rtx-4090", f"{words} --latency 20ms")
    assert asleep["winner"] == late["winner"] == "fix-app"
    texts = [" ".join(line["what"] for line in data["commands"]) for data in (asleep, late)]
    assert ["sleep" in text for text in texts] == [True, False]
    assert all("less memory for each" in text for text in texts)


def test_equal_changes_of_several_gpus_are_one_command(cli: Any) -> None:
    data = answer(cli, "sim:8xh100", "--processes 16 --memory 4G --users same --no-saturating")
    assert commands(data)[0].startswith("gpushare mps start -g 0-7 ")
    assert commands(data, "undo") == ["gpushare mps stop -g 0-7"]


def test_a_desktop_is_no_program_to_share_with(cli: Any) -> None:
    spec = "sim:rtx-4090"
    cli("sim", "add", "--graphics", "--name", "Xorg", "--memory", "600M", "--user", "root", host=spec).ok()
    assert answer(cli, spec, "--processes 1 --code")["winner"] == "streams"
    assert answer(cli, spec, "--processes 1 --no-code")["answer"] == "the whole GPU"
    large = answer(cli, spec, "--processes 1 --no-code --memory 23G")
    assert any("programs that run now use 600 MiB" in text for text in large["conditions"])
    cli("sim", "add", "--memory", "2G", "--user", "1001", host=spec).ok()
    assert answer(cli, spec, "--processes 1 --code")["winner"] == "timeslice"


def test_one_program_in_an_instance_is_told_of_streams(cli: Any) -> None:
    spec = "sim:a100-80gb"
    cli("sim", "mig", "3g.40gb", "2g.20gb", host=spec).ok()
    data = answer(cli, spec, "--processes 1 --memory 9G --code")
    assert commands(data) == ["gpushare run --mig 2g.20gb -- CMD"]
    assert any("separate streams" in line["what"] for line in data["commands"])


def test_each_program_of_a_list_with_unequal_shares_is_started(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    works = ", ".join(f"{{name: {name}, command: ./{name}, weights: yes, memory: 2G}}" for name in ("a", "b", "c"))
    for more, option in (
        ("users: same, saturating: no", "--threads"),
        ("users: different, saturating: yes", "--weight"),
    ):
        file.write_text(f"[{works.replace('memory', f'{more}, memory')}]")
        lines = [line for line in commands(answer(cli, "sim:l40s", f"-f {file}")) if " run " in line]
        assert [line.rpartition("./")[2] for line in lines] == ["a", "b", "c"]
        assert all(f" {option} " in line for line in lines)


def test_a_list_may_have_a_workload_with_several_shares(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("[{memory: 5G, weights: [30, 70], users: same}, {memory: 5G, weights: [50], users: same}]")
    lines = [line for line in commands(answer(cli, "sim:l40s", f"-f {file}")) if " run " in line]
    assert [line.partition("--threads ")[2].split()[0] for line in lines] == ["20", "46.7", "33.3"]
    # On two GPUs, each process is started once, with the share that it has of its GPU.
    lines = [line for line in commands(answer(cli, "sim:2xl40s", f"-f {file}")) if " run " in line]
    assert [line.partition("--threads ")[2].split()[:1] for line in lines] == [["37.5"], ["62.5"], []]


def test_shares_are_rounded_once(cli: Any) -> None:
    words = "--memory 1G --saturating --users same --needs weights=8:407:4:9:760"
    lines = [line["what"] for line in answer(cli, "sim:l40s", words)["commands"] if " run " in (line["command"] or "")]
    assert "the program with 64 of 100.1" in lines


def test_shares_of_which_one_is_nothing_next_to_the_others_are_refused(refused: Any, write: Any) -> None:
    for text in ("[{weights: []}]", "[{weights: '1:999:999:999'}]", "[{weights: '1:999'}, {weights: 999}]"):
        refused("advise", "-f", write(text), code="bad_value", exit_code=2)


def test_shares_of_bandwidth_are_slices_of_time(cli: Any) -> None:
    words = "--processes 2 --memory 5G --users same --saturating --bandwidth-bound --needs weights=2:1"
    assert answer(cli, "sim:l40s", words)["winner"] == "slices"
    assert answer(cli, "sim:l40s", words.replace(" --bandwidth-bound", ""))["winner"] != "mig"
