"""Words of ``gpushare mig``: what names an instance, and hints that hold for the command that gives them."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.drive import Cli, Refused, World, Write, missing
from tests.cli.run.test_mig import bind, divided

A100, TWO, H100 = "sim:a100-80gb", "sim:2xh100", "sim:h100-80gb"


def test_a_plan_names_what_may_evict(cli: Cli) -> None:
    host = World.new(TWO)
    assert host.run("mig", "apply", "-g", "1", "3g.40gb*2").code == 0
    for _, uuid in host.devices():
        host.add(uuid)
    (hint,) = cli("mig", "plan", "-g", "1", "--exact", "7g.80gb", host=TWO).ends(19).lines("hint")
    evict = shlex.split(hint[hint.index("--evict ") :])
    # What it says can be run with the words of the plan.
    cli("mig", "apply", "-g", "1", "7g.80gb", *evict, "--dry-run", host=TWO).ok()
    cli("mig", "apply", "-g", "1", "7g.80gb", *evict, host=TWO).ok()
    assert [instance[0] for instance in host.look()[1].instances] == ["7g.80gb"]


PARTED = """\
version: v1
mig-configs:
  some:
  - {devices: [0, 9], mig-enabled: true, mig-devices: {"3g.40gb": 1}}
  more:
  - {devices: [0], mig-enabled: true, mig-devices: {"3g.40gb": 1}}
  - {devices: [7, 9], mig-enabled: true, mig-devices: {"3g.40gb": 1}}
  none:
  - {devices: [7, 9], mig-enabled: true, mig-devices: {"3g.40gb": 1}}
"""


@pytest.fixture
def parted(write: Write) -> str:
    return write(PARTED)


@pytest.mark.parametrize(
    ("config", "said"),
    [("some", "entry 1 names GPU 9, not on this host"), ("more", "entry 2 names GPU 7, 9, not on this host")],
)
def test_a_gpu_of_the_file_that_is_not_here_is_said(cli: Cli, parted: str, config: str, said: str) -> None:
    assert said in cli("mig", "apply", "-n", "-f", parted, "-c", config, host=TWO).ok().err
    done = cli("mig", "apply", "-f", parted, "-c", config, host=TWO).ok()
    assert said in done.err
    assert "matches no GPU here" not in done.err
    checked = cli("mig", "check", "-f", parted, "-c", config, "-g", "0", host=TWO).ok()
    assert said in checked.err
    # Of those that are here and were not chosen nothing is said.
    assert "GPU 1" not in checked.err


def test_a_file_for_none_of_the_gpus_here_is_refused(refused: Refused, parted: str) -> None:
    for words in (("mig", "apply"), ("mig", "apply", "-n"), ("mig", "check")):
        text = refused(*words, "-f", parted, "-c", "none", code="no_gpu", exit_code=6, host=TWO)
        assert "entry 1 names GPU 7, 9, not on this host" in text


def test_every_form_names_the_same_instance(cli: Cli) -> None:
    host = World.new(A100)
    assert host.run("mig", "apply", "3g.40gb", "1g.10gb*2").code == 0
    assert host.run("mig", "name", "train", "3g.40gb:4").code == 0
    instance = next(instance for instance in host.state.gpus[0].mig if instance.profile == "3g.40gb")
    ids = f"0/{instance.gpu_instance_id}"
    numbers = [str(instance.gpu_instance_id), ids, f"{ids}/{instance.compute_instance_id}"]

    def destroyed(form: str) -> list[str]:
        steps = cli("-o", "json", "mig", "destroy", "-n", form, host=A100).ok().data["steps"]
        return [step["what"] for step in steps if "destroy" in step["what"]]

    for form in (instance.uuid, instance.uuid[:14], *numbers, "3g.40gb:4"):
        assert destroyed(form) == destroyed("train"), form
        # It has this name already.
        cli("mig", "name", "train", form, host=A100).ok()


ONLY_NAMES = [("env",), ("grant",), ("revoke",)]


@pytest.mark.parametrize("command", ONLY_NAMES)
def test_where_only_a_name_will_do_the_hint_gives_one(refused: Refused, cli: Cli, command: tuple[str, ...]) -> None:
    host = World.new(A100)
    assert host.run("mig", "apply", "3g.40gb", "1g.10gb*2").code == 0
    instance = next(instance for instance in host.state.gpus[0].mig if instance.profile == "3g.40gb")
    ids = f"0/{instance.gpu_instance_id}"
    more = ("root",) if command == ("grant",) else ()
    for form in (instance.uuid, instance.uuid[:14], ids, f"{ids}/{instance.compute_instance_id}", "3g.40gb:4"):
        text = refused("mig", *command, form, *more, code="not_a_name", exit_code=2, host=A100)
        assert f"gpushare mig name NAME {form}" in text
        assert "--mig" not in text


def test_a_name_means_the_gpu_instance_of_a_part(cli: Cli) -> None:
    host = World.new(A100)
    assert host.run("mig", "apply", "1c.3g.40gb*2").code == 0
    part = host.state.gpus[0].mig[0]
    for form in (f"0/{part.gpu_instance_id}/{part.compute_instance_id}", part.uuid):
        named = cli("mig", "name", "train", form, host=A100).ok().out
        assert "3g.40gb:4 on GPU 0 is named 'train'" in named or "nothing" in named


@pytest.mark.parametrize("form", ["0/1", "0/1/0", "3g.40gb:4", "bob"])
def test_g_says_which_form_of_an_instance_it_takes(refused: Refused, form: str) -> None:
    host = World.new(A100)
    assert host.run("mig", "apply", "3g.40gb").code == 0
    assert host.run("mig", "name", "train", "3g.40gb:4").code == 0
    text = refused("mps", "start", "-g", form, code="unknown_gpu", exit_code=6, host=A100)
    assert missing(text, "-g MIG-<uuid>", "gpushare mig status") == []


def test_env_prints_what_a_shell_takes(cli: Cli, world: World) -> None:
    uuid, _ = world.mig("3g.71gb:4", "1g.18gb:0")
    bind(world, "train", "3g.71gb", 4)
    answer = cli("mig", "env", "train").ok()
    assert (answer.out, answer.err) == (f"export CUDA_VISIBLE_DEVICES={uuid}\n", "")
    assert shlex.split(answer.out) == ["export", f"CUDA_VISIBLE_DEVICES={uuid}"]
    of_instance = {"name": "train", "uuid": uuid, "gpu": 0, "profile": "3g.71gb", "start": 4}
    data = cli("mig", "env", "train", output="json").ok().data
    assert data == {**of_instance, "environment": {"CUDA_VISIBLE_DEVICES": uuid}}
    # Of a divided instance the first.
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
