"""``gpushare advise`` names its jobs, and ends them again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.cli.drive import H200, Cli

ONE_EACH = ("--production", "1", "--opportunistic", "1")
CASE = ("--users", "same", "--memory", "20G", "--needs", "gaps")
PAIR = (*ONE_EACH, *CASE)


def advised(cli: Cli, *words: str) -> dict[str, Any]:
    data: dict[str, Any] = cli("advise", "--no-input", "-g", "0", *words, host=H200, output="json").ok().data
    return data


def commands(data: dict[str, Any], key: str = "commands") -> list[str]:
    return [line["command"] for line in data[key] if line["command"]]


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
