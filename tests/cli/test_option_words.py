"""Words of the command line that would be lost without a word: repeated options, and options after the program."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NoReturn

import pytest

from gpushare.cli import options
from tests.cli.drive import Cli, Patch, Refused, Words, missing

TWO = "sim:2xa30"


def test_repeated_options(cli: Cli, refused: Refused) -> None:
    answer = cli("status", "-g", "1", "-g", "0", host="sim:3xa30", output="json").ok()
    assert [gpu["index"] for gpu in answer.data["gpus"]] == [1, 0]
    assert cli("status", "-o", "json", "--output", "plain").code == 2
    cli("status", "-v", "-v").ok()
    said = refused("bench", "--lower-is-better", "--higher-is-better", "true", code="bad_combination", exit_code=2)
    assert "--lower-is-better cannot be combined with --higher-is-better" in said


@pytest.mark.parametrize(
    "words",
    [
        ("mps", "start", "-g", "0", "--threads", "30", "--threads", "40"),
        ("run", "--memory", "4G", "--memory=4G", "-g", "0", "--", "true"),
        ("mig", "create", "1g", "-g", "0", "--name", "a", "--name", "b"),
        ("tune", "--name", "a", "--name", "b", "--production", "x", "--opportunistic", "y"),
        ("status", "-w", "1s", "--watch", "2s"),
        ("bench", "--copies", "2", "--copies", "3", "--copies", "4", "--", "true"),
        ("apply", "-f", "a.yaml", "-f", "b.yaml"),
    ],
    ids=" ".join,
)
def test_any_other_repeated_option_is_refused(refused: Refused, words: tuple[str, ...]) -> None:
    assert "is given " in refused(*words, code="repeated_option", exit_code=2, host=TWO)


def test_options_after_the_program_are_named(cli: Cli) -> None:
    answer = cli("run", "-n", "-g", "0", "python3", "job.py", "--threads", "30", "--memory=4G", "-x").ok()
    (note,) = answer.lines("note")
    assert "passed to 'python3', not to gpushare: --threads, --memory; " in note
    assert "put -- before it" in note
    assert not cli("run", "-q", "-n", "python3", "--threads", "30").ok().lines("note")
    assert "passed to 'python3', not to gpushare: -n" in cli("advise", "--no-root", "python3", "job.py", "-n").err


def test_too_many_words_are_refused(refused: Refused) -> None:
    said = refused("farm", "4", "--memory", "6G", "--", "sh", "-c", "true", code="bad_copies", exit_code=2)
    assert "before the program: --copies 8" in said
    for words in (("pause", "a", "b"), ("jobs", "a"), ("mig", "grant", "a", "b", "c")):
        verb = " ".join(word for word in words if len(word) > 1)
        assert f"hint: see: gpushare {verb} --help" in refused(*words, code="usage", exit_code=2)
    assert "'sleep' is not a whole number" in refused("mps", "logs", "--lines", "sleep", code="usage", exit_code=2)


@pytest.mark.parametrize(
    "words",
    [("--", "python3", "--threads", "30"), ("python3", "--", "--threads", "30"), ("python3", "--lr", "30", "-x")],
    ids=" ".join,
)
def test_words_that_are_the_programs_own_are_not_named(cli: Cli, words: tuple[str, ...]) -> None:
    assert not cli("run", "-n", *words).ok().lines("note")


def test_an_empty_list_is_not_given() -> None:
    """Typer 0.26.0 to 0.26.5 name the command line as the source of a list that is not given."""
    typed = SimpleNamespace(name="COMMANDLINE")
    parameters = [
        SimpleNamespace(name="command", metavar="[CMD...]", param_type_name="argument"),
        SimpleNamespace(name="ways", opts=["--ways"], param_type_name="option"),
        SimpleNamespace(name="wait", opts=["--wait"], param_type_name="option"),
        SimpleNamespace(name="gpu", opts=["-g", "--gpu"], param_type_name="option"),
    ]
    context = SimpleNamespace(
        command=SimpleNamespace(params=parameters),
        params={"command": [], "ways": (), "wait": False, "gpu": "0"},
        get_parameter_source=lambda _name: typed,
    )
    assert list(options._given_names(context)) == ["--gpu"]


class Interrupting:
    """A terminal on which Ctrl-C is the answer."""

    def readline(self) -> NoReturn:
        raise KeyboardInterrupt


def test_ctrl_c_at_a_question_ends_its_line(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        options.ask_line("Sure? ")
    assert capsys.readouterr().err == "Sure? \n"


@pytest.mark.parametrize(
    "words", [("mig", "env", "alice"), ("mig", "grant", "alice", "root"), ("run", "--mig", "alice", "--", "true")]
)
def test_a_name_that_nobody_gave_is_told_the_same_by_all(refused: Refused, words: Words) -> None:
    said = refused(*words, code="no_name", exit_code=6)
    assert missing(said, "no MIG instance is named 'alice'", "gpushare mig create WISH --name alice") == []
