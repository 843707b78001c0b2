"""``gpushare advise`` where the jobs that it would start run already, and how its jobs are ended again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.cli.drive import H200, Cli, Real, until

ONE_EACH = ("--production", "1", "--opportunistic", "1")
CASE = ("--users", "same", "--memory", "20G", "--needs", "gaps")
PAIR = (*ONE_EACH, *CASE)


def advised(cli: Cli, *words: str) -> dict[str, Any]:
    data: dict[str, Any] = cli("advise", "--no-input", "-g", "0", *words, host=H200, output="json").ok().data
    return data


def commands(data: dict[str, Any], key: str = "commands") -> list[str]:
    return [line["command"] for line in data[key] if line["command"]]


def started(real: Real, cli: Cli, *words: str) -> None:
    real(*words, "--", "sleep", "300", host=H200)
    name = words[words.index("--name" if "--name" in words else "--production") + 1]
    until(lambda: name in cli("jobs", host=H200, output="json").ok().out, f"{name} runs")


@pytest.mark.parametrize(
    "case",
    [
        ("--users", "same", "--memory", "20G", "--needs", "gaps"),
        ("--users", "same", "--memory", "80G,20G", "--needs", "gaps", "--latency", "50ms"),
        ("--users", "different", "--memory", "20G", "--needs", "gaps"),
        ("--users", "same", "--memory", "20G"),
        ("--users", "same", "--memory", "80G"),
        ("--users", "different", "--memory", "80G"),
    ],
)
def test_the_jobs_have_names_their_memory_and_an_undo(cli: Cli, case: tuple[str, ...]) -> None:
    data = advised(cli, *ONE_EACH, *case)
    jobs = [command for command in commands(data) if command.startswith("gpushare run")]
    assert len(jobs) == 2
    assert all("--memory" in job for job in jobs)
    names = [
        words[words.index(option) + 1]
        for words in map(shlex.split, jobs)
        for option in ("--production", "--name")
        if option in words
    ]
    assert len(names) == 2
    if data["winner"] != "mps-priority":
        assert commands(data, "undo") == [f"gpushare stop {' '.join(names)}"]


def test_the_undo_of_several_names_each(cli: Cli) -> None:
    data = advised(cli, "--production", "1", "--opportunistic", "3", "--users", "same", "--needs", "gaps")
    assert commands(data, "undo") == ["gpushare stop serve other-1 other-2 other-3"]
    assert any("the others are other-2 to other-3" in line["what"] for line in data["commands"])


def test_a_set_up_that_runs_is_not_started_again(cli: Cli, real: Real) -> None:
    for line in commands(advised(cli, *PAIR)):
        words = shlex.split(line)
        started(real, cli, *words[1 : words.index("--")])
    data = advised(cli, *PAIR)
    assert commands(data) == []
    assert [line["what"] for line in data["commands"]] == [
        "production: 'serve' runs already, and stays as it is",
        "opportunistic: 'other' runs already, and stays as it is",
    ]
    assert commands(data, "undo") == ["gpushare stop serve other"]
    # One more is asked for than runs.
    data = advised(cli, "--production", "1", "--opportunistic", "2", *CASE)
    assert [shlex.split(line)[-3] for line in commands(data)] == ["other-1"]


def test_production_of_another_name_is_the_one_to_spare(cli: Cli, real: Real) -> None:
    started(real, cli, "run", "-g", "0", "--production", "web")
    data = advised(cli, *PAIR)
    (line,) = commands(data)
    assert "--for web" in line
    assert data["commands"][0]["what"] == "production: 'web' runs already, and stays as it is"
    # Production ran before, and goes on after the undo.
    assert commands(data, "undo") == ["gpushare stop other"]


def test_a_name_that_is_taken_on_another_gpu_is_not_given(cli: Cli, real: Real) -> None:
    host = "sim:2xh200"
    real("run", "-g", "1", "--production", "serve", "--", "sleep", "300", host=host)
    until(lambda: "serve" in cli("jobs", host=host, output="json").ok().out, "serve runs")
    data = cli("advise", "--no-input", "-g", "0", *PAIR, host=host, output="json").ok().data
    assert data["commands"][0]["what"] == "production; 'serve' is a job on another GPU"
    production, other = commands(data)
    assert "--production serve-2 " in production
    assert "--for serve-2 " in other
    # The undo does not end the job on the other GPU.
    assert commands(data, "undo") == ["gpushare stop serve-2 other"]


def test_copies_whose_names_are_taken_on_another_gpu_have_the_same_names_in_text_and_undo(cli: Cli, real: Real) -> None:
    host = "sim:2xh100"
    copies = ("--processes", "3", "--memory", "60G", "--needs", "progress")

    def start(gpu: str, name: str) -> None:
        real("run", "-g", gpu, "--name", name, "--", "sleep", "300", host=host)
        until(lambda: f'"{name}"' in cli("jobs", host=host, output="json").ok().out, f"{name} runs")

    def advice() -> dict[str, Any]:
        data: dict[str, Any] = cli("advise", "--no-input", "-g", "0", *copies, host=host, output="json").ok().data
        return data

    start("1", "job-2")
    data = advice()
    assert data["commands"][0]["what"].endswith("; the others are job-2-2, job-3")
    assert commands(data, "undo") == ["gpushare stop job-1 job-2-2 job-3"]
    start("1", "job-1")
    data = advice()
    assert data["commands"][0]["what"].endswith("; the others are job-2-2, job-3; 'job-1' is a job on another GPU")
    assert "--name job-1-2 " in commands(data)[0]
    # One that was started by an earlier answer is not started again.
    start("0", "job-1-2")
    data = advice()
    assert "--name job-2-2 " in commands(data)[0]
    assert data["commands"][0]["what"].endswith("; the others are job-3, job-1-2; 'job-2' is a job on another GPU")
