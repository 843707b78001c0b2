"""``gpushare advise`` on a host that is in use: what is in the way goes first, and the undo brings all of it back."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpushare.advice.recipe import recipe
from gpushare.base.model import ComputeMode, Way
from gpushare.connect import connect
from gpushare.sim.admin import add_process
from tests.advice.conftest import situation_of
from tests.cli.advise.test_advise import GROUPS, PEOPLE, USERS, commands, pasted

SMALL = ("--processes", "3", "--memory", "2G", "--users", "same", "--no-saturating")
BIG = ("--processes", "6", "--memory", "7G", "--groups", "3", "--isolation", "fault", "--no-saturating", "--destroy")
DESTROY = (*SMALL, "--destroy")
OURS = ("--users", "same", "--no-saturating")
APART = ("--users", "different", "--isolation", "fault", "--root")
PAIR = ("--production", "1", "--opportunistic", "1", "--users", "same")


def advised(cli: Any, spec: str, *words: str) -> Any:
    return cli("advise", *words, "--command", "true", host=spec, output="json").ok().data


@pytest.mark.parametrize(
    ("spec", "there", "words", "winner", "first"),
    [
        ("sim:t4", "mps start -g 0 --threads 20 --memory 1G", SMALL, "mps", "gpushare mps set -g 0"),
        ("sim:h200", "mps start -g 0 --threads 30", PAIR, "mps-priority", "gpushare mps set -g 0"),
        ("sim:t4", "mps start -g 0 --memory 1G --priority low", PEOPLE, "timeslice", "gpushare mps stop -g 0"),
        ("sim:a100-80gb", "mps start -g 0 --threads 20", USERS, "mig", "gpushare mps stop -g 0"),
        ("sim:a100-80gb", "mps start -g 0", GROUPS, "mig+mps", "gpushare mps stop -g 0"),
        ("sim:a100-80gb", "mig apply -g 0 1g.10gb*7", GROUPS, "mig+mps", "gpushare mps start -g MIG-"),
        ("sim:a100-80gb", "mig apply -g 0 1g.10gb*7", BIG, "mig+mps", "gpushare mig destroy 0/7"),
        ("sim:a100-80gb", "mig apply -g 0 3g.40gb", DESTROY, "mps", "gpushare mig disable -g 0 --destroy"),
        ("sim:a100-80gb", "mig apply -g 0 1g.10gb", GROUPS, "mig+mps", "gpushare mig create -g 0"),
    ],
)
def test_what_was_there_comes_back(
    cli: Any, spec: str, there: str, words: tuple[str, ...], winner: str, first: str
) -> None:
    cli(*there.split(), host=spec).ok()
    before = cli("capture", host=spec).ok().out
    data = advised(cli, spec, *words)
    assert data["winner"] == winner
    assert commands(data)[0].startswith(first)
    done = pasted(commands(data), spec)
    assert done.returncode == 0, done
    assert cli("capture", host=spec).ok().out != before
    undone = pasted(commands(data, "undo"), spec)
    assert undone.returncode == 0, undone
    assert cli("capture", host=spec).ok().out == before


@pytest.mark.parametrize("level", ["default", "long"])
def test_a_compute_mode_in_the_way_comes_back_and_so_does_the_level(cli: Any, level: str) -> None:
    spec, host = "sim:t4", connect("sim:t4")
    cli("timeslice", "set", level, "-g", "0", host=spec).ok()
    host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)

    def now() -> tuple[Any, Any]:
        (gpu,) = connect(spec).nvml.sweep()
        return gpu.compute_mode, gpu.time_slice

    before = now()
    data = advised(cli, spec, *PEOPLE)
    assert data["winner"] == "timeslice"
    assert pasted(commands(data), spec).returncode == 0
    assert now() != before
    lines = commands(data, "undo")
    for line in lines:
        # A simulated GPU has no nvidia-smi on the PATH.
        if " -c " in line:
            host.nvml.set_compute_mode(0, ComputeMode[line.rpartition(" -c ")[2]])
        elif line.startswith("nvidia-smi"):
            assert host.programs.run(line.split()).exit_code == 0
        else:
            assert pasted([line], spec).returncode == 0
    assert now() == before


def test_a_daemon_in_the_way_is_a_condition(cli: Any) -> None:
    cli("mps", "start", "-g", "0", host="sim:a100-80gb").ok()
    data = advised(cli, "sim:a100-80gb", *USERS)
    found = {verdict["way"]: {reason["rule"] for reason in verdict["reasons"]} for verdict in data["verdicts"]}
    for way in ("timeslice", "mig", "mig+mps", "mig+timeslice"):
        assert "mps-serves" in found[way]
    assert "mps-serves" not in found["whole-gpu"]


def test_a_daemon_of_somebody_else_is_not_stopped_by_a_command(cli: Any) -> None:
    case = {"processes": 3, "memory": "2G", "users": "different", "pattern": "interactive"}
    found = recipe(situation_of(case, host="t4", facts={"mps_daemons": 1}), Way.TIMESLICE)
    assert found.lines[0].command is None
    assert found.undo[-1].command is None
    assert not any("mps stop" in (line.command or "") for line in found.lines)


def test_instances_that_somebody_is_in_stay(cli: Any) -> None:
    spec = "sim:a100-80gb"
    made = cli("mig", "apply", "-g", "0", "4g.40gb", "1g.10gb", host=spec).ok()
    uuid = re.search(r"4g.40gb:0 on GPU 0: (MIG-\S+)", made.out + made.err)
    assert uuid is not None
    add_process(spec, "0", mig=uuid[1])
    data = advised(cli, spec, "--processes", "3", "--memory", "15G", "--users", "different", "--pattern", "steady")
    (mig,) = (verdict for verdict in data["verdicts"] if verdict["way"] == "mig")
    assert "mig-too-small" in {reason["rule"] for reason in mig["reasons"]}
    assert "next to 4g.40gb:0 (in use)" in mig["reasons"][0]["text"]
    assert data["winner"] is None
    assert data["commands"] == []


def cut(cli: Any, spec: str) -> None:
    """Cut GPU 0 into halves, one of them named and granted."""
    cli("mig", "apply", "-g", "0", "2g.12gb*2", "-y", host=spec).ok()
    cli("mig", "name", "prod", "2g.12gb:0", "-g", "0", host=spec).ok()
    cli("mig", "grant", "prod", "root", host=spec).ok()


FARM = ("--processes", "4", "--memory", "2G", "--users", "same", "--no-saturating")


def test_advice_takes_the_gpu_that_is_idle_and_uncut(cli: Any) -> None:
    spec = "sim:2xa30"
    cut(cli, spec)
    before = cli("mig", "status", host=spec, output="json").ok().data
    planned = cli("advise", *FARM, "--apply", "-n", host=spec, output="json").ok().data["steps"]
    done = cli("advise", *FARM, "--apply", host=spec, output="json").ok().data["steps"]
    assert [one["what"] for one in planned] == [one["what"] for one in done]
    assert any("GPU 1" in one["what"] for one in done)
    assert cli("mig", "status", host=spec, output="json").ok().data == before


@pytest.mark.parametrize("words", [(), ("--no-root",), ("--destroy", "--no-root"), ("--root",)])
def test_a_cut_gpu_is_left_as_it_is(cli: Any, words: tuple[str, ...]) -> None:
    """Neither an answer nor a measurement needs the named instance, and without root nothing is turned off."""
    spec = "sim:2xa30"
    cut(cli, spec)
    for more in ((), ("--saturating",), ("--users", "different"), ("--pattern", "interactive")):
        data = advised(cli, spec, "-g", "0", "--processes", "4", "--memory", "2G", *more, *words)
        text = " ".join(commands(data))
        # The other half has no name and was made by gpushare: with root it may go.
        assert not re.search(r"mig (disable|apply|enable)|destroy 0/1|prod", text)
        assert "--no-root" not in words or "mig " not in text.replace("run --mig", "")


@pytest.mark.parametrize("there", [("3g.40gb", "3g.40gb"), ("7g.80gb",), ("1g.10gb",) * 7])
@pytest.mark.parametrize("words", [SMALL, USERS, BIG[:-1], ("--processes", "1"), ("--processes", "4")])
def test_instances_that_gpushare_did_not_make_stay(cli: Any, there: tuple[str, ...], words: tuple[str, ...]) -> None:
    spec = "sim:a100-80gb"
    cli("sim", "mig", *there, host=spec).ok()
    data = advised(cli, spec, *words, "--root")
    assert not re.search(r"mig (disable|apply|destroy)", " ".join(commands(data)))


def test_with_consent_the_undo_restores_names_and_grants(cli: Any) -> None:
    spec = "sim:2xa30"
    cut(cli, spec)
    before = cli("capture", host=spec).ok().out
    data = advised(cli, spec, "-g", "0", *FARM, "--destroy")
    # The user has given them away: without -y, the line would ask once more.
    assert commands(data)[0] == "gpushare mig disable -g 0 --destroy -y"
    assert pasted(commands(data), spec).returncode == 0
    assert "prod" not in cli("capture", host=spec).ok().out
    assert pasted(commands(data, "undo"), spec).returncode == 0
    assert cli("capture", host=spec).ok().out == before
    assert cli("mig", "status", host=spec).ok().out.count("for root only") == 1


def test_advice_on_an_instance_stays_in_it(cli: Any) -> None:
    spec = "sim:h100"
    made = cli("mig", "apply", "-g", "0", "2g.20gb", "3g.40gb", "-y", host=spec).ok()
    uuid = re.search(r"2g.20gb:\d on GPU 0: (MIG-\S+)", made.out + made.err)
    assert uuid is not None
    before = cli("capture", host=spec).ok().out
    for words in (FARM, USERS, ("--processes", "2", "--saturating"), ("--processes", "1"), ("--processes", "3")):
        data = advised(cli, spec, "-g", uuid[1], *words, "--no-root")
        assert data["instance"] == uuid[1]
        assert all(uuid[1] in line for line in commands(data) if "mkdir" not in line), data["commands"]
        assert data["memory"]["total_bytes"] < 21 << 30
    farm = advised(cli, spec, "-g", uuid[1], *FARM)
    assert farm["winner"] == "mps"
    cli("advise", "-g", uuid[1], *FARM, "--apply", host=spec).ok()
    assert pasted(commands(farm, "undo"), spec).returncode == 0
    assert cli("capture", host=spec).ok().out == before


def test_two_small_instances_fit_next_to_a_named_one(cli: Any) -> None:
    spec = "sim:a100-80gb"
    cli("mig", "apply", "-g", "0", "3g.40gb:4", "-y", host=spec).ok()
    cli("mig", "name", "prod", "3g.40gb:4", "-g", "0", host=spec).ok()
    data = advised(cli, spec, "--processes", "2", "--memory", "8G", "--users", "different", "--isolation", "fault")
    assert commands(data)[0] == "gpushare mig create -g 0 '2g.20gb*2'"
    assert pasted(commands(data)[:1], spec).returncode == 0


def test_mps_inside_instances_that_go_is_named_in_the_undo(cli: Any) -> None:
    case = {"processes": 3, "memory": "2G", "users": "same", "saturating": False}
    found = recipe(situation_of(case, facts={"mps_daemons": 1, "mig_enabled": True}), Way.MPS)
    assert "MPS in the instances" in found.undo[-1].what


@pytest.mark.parametrize(
    ("spec", "words", "way", "first"),
    [
        ("sim:2xa30", ("--processes", "4", "--memory", "10G", *APART), "mig", "gpushare mig apply -g 0-1 '2g.12gb*2'"),
        ("sim:4xt4", ("--processes", "10", "--memory", "4G", *OURS), "mps", "gpushare mps start -g 0-3 --threads 66.6"),
        (
            "sim:2xa30",
            ("--processes", "60", "--memory", "300M", *OURS),
            "mps",
            "gpushare mps start -g 0-1 --threads 6.6",
        ),
        ("sim:2xt4", ("--processes", "4", "--memory", "6G", *OURS), "mps", "gpushare mps start -g 0-1 --memory 6912M"),
        (
            "sim:2xa30",
            ("--processes", "6", "--groups", "6", "--memory", "2G", *APART),
            "mig",
            "gpushare mig apply -g 0-1",
        ),
    ],
)
def test_more_than_one_gpu_holds_is_placed_on_several(
    cli: Any, spec: str, words: tuple[str, ...], way: str, first: str
) -> None:
    before = cli("capture", host=spec).ok().out
    data = advised(cli, spec, *words)
    assert data["winner"] == way
    assert commands(data)[0].startswith(first)
    assert data["gpus"][:2] == [0, 1]
    assert "on GPU 0" in data["why"][0]
    assert "on GPU 1" in data["why"][0]
    assert data["case"]["workloads"][0]["processes"] == int(words[1])
    planned = cli("advise", *words, "--apply", "-n", host=spec, output="json").ok().data["steps"]
    done = cli("advise", *words, "--apply", host=spec, output="json").ok().data["steps"]
    assert [one["what"] for one in planned] == [one["what"] for one in done]
    for index in data["gpus"]:
        assert any(f"GPU {index}" in one["what"] for one in done)
    assert pasted(commands(data, "undo"), spec).returncode == 0
    assert cli("capture", host=spec).ok().out == before


def test_the_lists_of_several_gpus_are_placed_too(cli: Any, write: Any) -> None:
    file = write(
        "\n".join(f"- {{name: {n}, user: {n}, processes: 1, memory: 10G, isolation: fault}}" for n in ("a", "b", "c"))
    )
    data = advised(cli, "sim:2xa30", "-f", file, "--root")
    assert data["winner"] == "mig"
    assert data["why"][0].endswith("2 on GPU 0 (MIG), 1 on GPU 1 (the whole GPU)")
