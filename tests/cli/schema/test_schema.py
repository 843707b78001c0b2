"""`gpushare schema`: of an answer, of gpushare.yaml, and the list."""

from __future__ import annotations

import json

from tests.cli.drive import Cli, Refused


def test_schemas(cli: Cli, refused: Refused) -> None:
    schema = json.loads(cli("schema", "mps", "stop", host=None).ok().out)
    assert schema["properties"]["command"] == {"const": "mps stop"}
    assert "StoppedDaemon" in schema["$defs"]
    assert cli("schema", "mps", "stop", host=None, output="json").ok().data == schema
    schema = json.loads(cli("schema", "gpushare.yaml").ok().out)
    assert schema["title"] == "gpushare.yaml, version 1"
    assert cli("schema", "gpushare.yaml", output="json").ok().data == schema
    names = cli("schema", host=None).ok().out.split("\n")
    assert {"status", "mig plan", "gpushare.yaml"} <= {*names}
    assert cli("schema", host=None, output="json").ok().data == names[:-1]
    refused("schema", "fly", code="no_schema", exit_code=6)
