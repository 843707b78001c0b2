"""``gpushare run``: options that do not go together, pair by pair as the one table has them."""

from __future__ import annotations

import shlex

import pytest

from gpushare.cli.run import REFUSED
from gpushare.cli.run import Refused as Row
from tests.cli.drive import Cli, Refused

# As typed; an option that is not here takes no value.
VALUES = {
    "--over": "warn",
    "--timeout": "5s",
    "--for": "web",
    "--yield": "slices",
    "--keep": "97%",
    "--metric": "a(b)",
    "--name": "web",
    "--production": "web",
    "--mig": "1g",
    "--slice": "1ms",
    "--weight": "3",
    "--swap": "request",
    "--gpus": "2",
    "--time": "1h",
    "--threads": "50",
    "--priority": "low",
    "--container": "podman",
    "--restart-on": "mps-fault",
    "--memory": "4G",
}


def words_of(name: str) -> list[str]:
    """Return the words of an option of the table: ``--yield:swap`` is the option with this value."""
    option, _, value = name.partition(":")
    if option == "--swap" and value in {"idle", "turns"}:
        value += "=10m"
    value = value or VALUES.get(option, "")
    return [option, value] if value else [option]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.options)
def test_what_does_not_go_together_is_refused_with_an_example_that_does(cli: Cli, refused: Refused, row: Row) -> None:
    for option in row.options.split():
        for other in [""] if row.needs else row.others.split():
            needed = ["--opportunistic"] if "--yield" in f"{option}{other}" and not row.needs else []
            words = [*words_of(option), *(words_of(other) if other else []), *needed]
            hint = refused("run", *words, "--", "true", code="bad_combination", exit_code=2)
            assert "hint: for example: gpushare run " in hint
    answer = cli("run", "-n", *shlex.split(row.instead), "--", "true")
    assert "cannot be combined" not in answer.err
    assert " needs --" not in answer.err


def test_no_row_and_no_option_of_the_table_is_lost() -> None:
    pairs = [
        (option, other)
        for row in REFUSED
        for option in row.options.split()
        for other in (["needs"] if row.needs else row.others.split())
    ]
    assert (len(REFUSED), len(set(pairs))) == (32, 79)
