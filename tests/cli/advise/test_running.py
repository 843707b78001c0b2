"""``gpushare advise`` where the jobs that it would start run already, and how its jobs are ended again."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.cli.advise.asking import advised, commands, told
from tests.cli.drive import H200, Cli, Real, until

ONE_EACH = ("--no-input", "-g", "0", "--production", "1", "--opportunistic", "1")
CASE = ("--users", "same", "--memory", "20G", "--needs", "gaps")
PAIR = (*ONE_EACH, *CASE)


def start(real: Real, cli: Cli, *words: str, host: str = H200) -> None:
    """Start a job, and wait until it is listed."""
    real(*words, "--", "sleep", "300", host=host)
    name = words[words.index("--name" if "--name" in words else "--production") + 1]
    until(lambda: f'"{name}"' in cli("jobs", host=host, output="json").ok().out, f"{name} runs")


@pytest.mark.parametrize("case", [
    "--users same --memory 20G --needs gaps", "--users same --memory 80G,20G --needs gaps --latency 50ms",
    "--users different --memory 20G --needs gaps", "--users same --memory 20G", "--users same --memory 80G",
    "--users different --memory 80G",
])  # fmt: skip
def test_the_jobs_have_names_their_memory_and_an_undo(cli: Cli, case: str) -> None:
    data = advised(cli, H200, ONE_EACH, *case.split())
    jobs = [command for command in commands(data) if command.startswith("gpushare run")]
    assert ["--memory" in job for job in jobs] == [True, True]
    names = re.findall(r"--(?:production|name) (\S+)", " ".join(jobs))
    assert len(names) == 2
    if data["winner"] != "mps-priority":
        assert commands(data, "undo") == [f"gpushare stop {' '.join(names)}"]


def test_the_undo_of_several_names_each(cli: Cli) -> None:
    data = advised(cli, H200, "--no-input --production 1 --opportunistic 3 --users same --needs gaps")
    assert commands(data, "undo") == ["gpushare stop serve other-1 other-2 other-3"]
    assert any("the others are other-2 to other-3" in what for what in told(data))


def test_a_set_up_that_runs_is_not_started_again(cli: Cli, real: Real) -> None:
    for line in commands(advised(cli, H200, PAIR)):
        words = shlex.split(line)
        start(real, cli, *words[1 : words.index("--")])
    data = advised(cli, H200, PAIR)
    assert commands(data) == []
    assert told(data) == [
        "production: 'serve' runs already, and stays as it is",
        "opportunistic: 'other' runs already, and stays as it is",
    ]
    assert commands(data, "undo") == ["gpushare stop serve other"]
    # One more is asked for than runs.
    data = advised(cli, H200, (*ONE_EACH[:-1], "2"), *CASE)
    assert [shlex.split(line)[-3] for line in commands(data)] == ["other-1"]


def test_production_of_another_name_is_the_one_to_spare(cli: Cli, real: Real) -> None:
    start(real, cli, "run", "-g", "0", "--production", "web")
    data = advised(cli, H200, PAIR)
    (line,) = commands(data)
    assert "--for web" in line
    assert told(data)[0] == "production: 'web' runs already, and stays as it is"
    # Production ran before, and goes on after the undo.
    assert commands(data, "undo") == ["gpushare stop other"]


def test_a_name_that_is_taken_on_another_gpu_is_not_given(cli: Cli, real: Real) -> None:
    start(real, cli, "run", "-g", "1", "--production", "serve", host="sim:2xh200")
    data = advised(cli, "2xh200", PAIR)
    assert told(data)[0] == "production; 'serve' is a job on another GPU"
    production, other = commands(data)
    assert "--production serve-2 " in production
    assert "--for serve-2 " in other
    # The undo does not end the job on the other GPU.
    assert commands(data, "undo") == ["gpushare stop serve-2 other"]


def test_copies_whose_names_are_taken_on_another_gpu_have_the_same_names_in_text_and_undo(cli: Cli, real: Real) -> None:
    for gpu, name, others, first in (
        ("1", "job-2", "job-2-2, job-3", "job-1"),
        ("1", "job-1", "job-2-2, job-3; 'job-1' is a job on another GPU", "job-1-2"),
        # One that was started by an earlier answer is not started again.
        ("0", "job-1-2", "job-3, job-1-2; 'job-2' is a job on another GPU", "job-2-2"),
    ):
        start(real, cli, "run", "-g", gpu, "--name", name, host="sim:2xh100")
        data = advised(cli, "2xh100", "--no-input -g 0 --processes 3 --memory 60G --needs progress")
        assert told(data)[0].endswith(f"; the others are {others}")
        assert f"--name {first} " in commands(data)[0]
        assert first != "job-1" or commands(data, "undo") == ["gpushare stop job-1 job-2-2 job-3"]
