"""`gpushare schema`: of an answer, of gpushare.yaml, and the list."""

from __future__ import annotations

import json

from tests.cli.drive import Cli, Refused


def test_the_schema_of_a_command(cli: Cli) -> None:
    answer = cli("schema", "mps", "stop", host=None)
    schema = json.loads(answer.ok().out)
    assert schema["properties"]["command"] == {"const": "mps stop"}
    assert "StoppedDaemon" in schema["$defs"]
    assert cli("schema", "mps", "stop", host=None, output="json").ok().data == schema


def test_without_a_command_all_are_listed(cli: Cli) -> None:
    names = cli("schema", host=None).ok().out.split("\n")
    assert {"status", "mig plan", "gpushare.yaml"} <= {*names}
    assert cli("schema", host=None, output="json").ok().data == names[:-1]


def test_the_schema_of_a_file(cli: Cli) -> None:
    schema = json.loads(cli("schema", "gpushare.yaml").ok().out)
    assert schema["title"] == "gpushare.yaml, version 1"
    assert cli("schema", "gpushare.yaml", output="json").ok().data == schema


def test_an_unknown_command_is_refused(refused: Refused) -> None:
    refused("schema", "fly", code="no_schema", exit_code=6)
