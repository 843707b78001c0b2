"""The screens that print commands, at 80 columns: each command can be copied."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cli.drive import H200, Cli, World
from tests.show.test_text import copied


@pytest.fixture
def at_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def is_whole(command: str, screen: str) -> bool:
    return f"{command}\n" in copied(screen) or f"{command};" in copied(screen) or f"{command})" in copied(screen)


@pytest.mark.usefixtures("at_80")
@pytest.mark.parametrize("case", [
    ("--production", "1", "--opportunistic", "2", "--users", "same", "--memory", "30G", "--needs", "gaps"),
    ("--production", "1", "--opportunistic", "1", "--memory", "30G"),
    ("--processes", "3", "--users", "different", "--isolation", "fault", "--memory", "10G"),
])  # fmt: skip
def test_the_commands_of_advise(cli: Cli, case: tuple[str, ...]) -> None:
    screen = cli("advise", "--no-input", *case, host=H200, output="table").ok().out
    data: Any = cli("advise", "--no-input", *case, host=H200, output="json").ok().data
    commands = [line["command"] for key in ("commands", "undo") for line in data[key] if line["command"]]
    in_sentences = [part for text in data["measure"] for part in re.findall("gpushare .*", text)]
    assert commands
    for command in (*commands, *in_sentences):
        assert is_whole(command, screen), command
    assert max(map(len, screen.splitlines())) <= 80


@pytest.mark.usefixtures("at_80")
def test_the_remedies_of_doctor_and_the_next_commands_of_an_explanation(cli: Cli, world: World) -> None:
    for kind in ("persistence-off", "hang"):
        world.fault(kind, "nvidia-smi" if kind == "hang" else None, gpu=None if kind == "hang" else 0)
    world.fault("power-cap", "300", gpu=0)
    screen = cli("doctor", output="table").out
    remedies = [check["remedy"] for check in cli("doctor", output="json").json["data"]["checks"] if check["remedy"]]
    assert remedies
    for remedy in remedies:
        assert is_whole(remedy.rpartition(": ")[2], screen)
    assert max(map(len, screen.splitlines())) <= 80
    for name in ("mps", "mig", "swap", "Xid 31", "out_of_memory"):
        answer = cli("explain", name, output="json", host=None)
        screen = cli("explain", name, output="table", host=None).out
        for explained in answer.json["data"]["explanations"] if answer.code == 0 else ():
            for command in explained["next"]:
                assert is_whole(command, screen), command
