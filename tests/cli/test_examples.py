"""The files of examples/ do what their comments say."""

from __future__ import annotations

import pytest

from gpushare.sim import admin
from tests.cli.drive import ROOT, Cli, World

EXAMPLES = ROOT / "examples"


def test_the_sample_files(cli: Cli, world: World) -> None:
    words, host = ("-f", str(EXAMPLES / "gpushare.yaml")), "sim:4xh100"
    assert cli("diff", *words, host=host).code == 7
    assert "13 steps, nothing is changed" in cli("apply", *words, "--dry-run", host=host).ok().out
    cli("apply", *words, "--yes", host=host).ok()
    cli("diff", *words, host=host).ok()
    answer = cli("advise", "-f", str(EXAMPLES / "workload.yaml"), "--yes", host="sim:h100").ok()
    assert "gpushare run -g 0 --memory 21760M --name serve -- ./serve" in answer.out
    batch = "gpushare run -g 0 --threads 30 --memory 11520M --priority low --name batch-1 -- python3 batch.py"
    assert batch in answer.out
    for command, user in (("python3 serve.py", "www-data"), ("python3 train.py", "root"), ("bash", "nobody")):
        admin.add_process("sim:h200", command_line=command.split(), user=user)
    found = cli("timeslice", "keep", "-f", str(EXAMPLES / "slices.yaml"), "-n", output="json").ok().data["processes"]
    assert [(one["outcome"], one["slice_us"]) for one in found] == [
        ("role production", 16_000),
        ("500us", 500),
        ("1ms", 1000),
    ]
    cli("apply", "-f", str(EXAMPLES / "slices.yaml")).ok()
    assert "role: production" in cli("capture").ok().out


@pytest.mark.parametrize(("config", "instances"), [("off", 0), ("balanced", 8), ("all-1g.10gb", 56)])
def test_the_sample_mig_parted_file_is_applied(config: str, instances: int, cli: Cli) -> None:
    words, host = ("-f", str(EXAMPLES / "mig-parted.yaml"), "-c", config), "sim:8xh100"
    cli("mig", "apply", *words, "--yes", host=host).ok()
    cli("mig", "check", *words, host=host).ok()
    found = cli("status", host=host, output="json").json["data"]["gpus"]
    assert sum(len(gpu["mig_instances"]) for gpu in found) == instances
