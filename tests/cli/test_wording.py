"""What is said on a screen beside the results: questions, refusals, and the command that comes next."""

from __future__ import annotations

import sys
from typing import NoReturn

import pytest

from gpushare.cli import options
from tests.cli.drive import Cli, Refused

TWO = "sim:2xh200"


class Interrupting:
    """A terminal on which Ctrl-C is the answer."""

    def readline(self) -> NoReturn:
        raise KeyboardInterrupt


def test_ctrl_c_at_a_question_leaves_the_error_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        options.ask_line("Sure? ")
    assert capsys.readouterr().err == "Sure? \n"


def test_a_wrong_option_says_what_was_meant_as_a_wrong_command_does(refused: Refused) -> None:
    assert "no such option: --wach. Did you mean '--watch'?" in refused(
        "status", "--wach", "1", code="usage", exit_code=2
    )


def test_a_word_for_a_number_is_said_in_words(refused: Refused) -> None:
    said = refused("mps", "logs", "--lines", "sleep", code="usage", exit_code=2)
    assert "'sleep' is not a whole number" in said


@pytest.mark.parametrize(
    "words", [("mig", "env", "alice"), ("mig", "grant", "alice", "root"), ("run", "--mig", "alice", "--", "true")]
)
def test_a_name_that_nobody_gave_is_told_the_same_by_all(refused: Refused, words: tuple[str, ...]) -> None:
    said = refused(*words, code="no_name", exit_code=6)
    assert "no MIG instance is named 'alice'" in said
    assert "gpushare mig create WISH --name alice" in said


def test_a_copy_that_a_signal_ended_has_the_exit_code_of_run(cli: Cli) -> None:
    done = cli("-o", "json", "farm", "--copies", "1", "--", "sh", "-c", "kill -9 $$")
    assert [copy["exit_code"] for copy in done.json["data"]["copies"]] == [137]
