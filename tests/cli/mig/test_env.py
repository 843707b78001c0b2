"""``gpushare mig env``: the variable of a named instance, after it was looked at."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.drive import Cli, Refused, World
from tests.cli.run.test_mig import bind, divided


def test_it_prints_what_a_shell_takes(cli: Cli, world: World) -> None:
    uuid, _ = world.mig("3g.71gb:4", "1g.18gb:0")
    bind(world, "train", "3g.71gb", 4)
    answer = cli("mig", "env", "train").ok()
    assert (answer.out, answer.err) == (f"export CUDA_VISIBLE_DEVICES={uuid}\n", "")
    assert shlex.split(answer.out) == ["export", f"CUDA_VISIBLE_DEVICES={uuid}"]
    of_instance = {"name": "train", "uuid": uuid, "gpu": 0, "profile": "3g.71gb", "start": 4}
    data = cli("mig", "env", "train", output="json").ok().data
    assert data == {**of_instance, "environment": {"CUDA_VISIBLE_DEVICES": uuid}}


def test_of_a_divided_instance_the_first(cli: Cli, world: World) -> None:
    world.mig("3g.71gb:0")
    divided(world, 1, 0)
    bind(world, "train", "3g.71gb", 0)
    answer = cli("mig", "env", "train").ok()
    assert answer.out == f"export CUDA_VISIBLE_DEVICES={world.state.gpus[0].mig[0].uuid}\n"
    assert "2 compute instances" in answer.err


@pytest.mark.parametrize("word", ["1g.18gb", "19", "MIG-0123abcd-0000"])
def test_only_a_name_says_which(refused: Refused, world: World, word: str) -> None:
    world.mig("1g.18gb")
    refused("mig", "env", word, code="not_a_name", exit_code=2)
