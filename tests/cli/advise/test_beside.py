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
from tests.cli.advise.asking import FARM, GROUPS, PEOPLE, USERS, advised, captured, commands, pasted
from tests.cli.drive import Cli, World

A30S = "sim:2xa30"
A100 = "sim:a100-80gb"
RUN = ("--command", "true")
SMALL = ("--processes", "3", "--memory", "2G", "--users", "same", "--no-saturating", *RUN)
BIG = ("--processes", "6", "--memory", "7G", "--groups", "3", "--isolation", "fault", "--no-saturating", *RUN)
DESTROY = "--destroy"
OURS = "--users same --no-saturating"
APART = "--users different --isolation fault --root"
PAIR = ("--production", "1", "--opportunistic", "1", "--users", "same", *RUN)


@pytest.mark.parametrize(("spec", "there", "words", "winner", "first"), [
    ("sim:t4", "mps start -g 0 --threads 20 --memory 1G", SMALL, "mps", "gpushare mps set -g 0"),
    ("sim:h200", "mps start -g 0 --threads 30", PAIR, "mps-priority", "gpushare mps set -g 0"),
    ("sim:t4", "mps start -g 0 --memory 1G --priority low", PEOPLE, "timeslice", "gpushare mps stop -g 0"),
    (A100, "mps start -g 0 --threads 20", USERS, "mig", "gpushare mps stop -g 0"),
    (A100, "mps start -g 0", GROUPS, "mig+mps", "gpushare mps stop -g 0"),
    (A100, "mig apply -g 0 1g.10gb*7", GROUPS, "mig+mps", "gpushare mps start -g MIG-"),
    (A100, "mig apply -g 0 1g.10gb*7", (*BIG, DESTROY), "mig+mps", "gpushare mig destroy 0/7"),
    (A100, "mig apply -g 0 3g.40gb", (*SMALL, DESTROY), "mps", "gpushare mig disable -g 0 --destroy"),
    (A100, "mig apply -g 0 1g.10gb", GROUPS, "mig+mps", "gpushare mig create -g 0"),
])  # fmt: skip
def test_what_was_there_comes_back(cli: Cli, spec: str, there: str, words: Any, winner: str, first: str) -> None:
    cli(*there.split(), host=spec).ok()
    before = captured(cli, spec)
    data = advised(cli, spec, words, *(() if "--command" in words else RUN))
    assert data["winner"] == winner
    assert commands(data)[0].startswith(first)
    pasted(commands(data), spec)
    assert captured(cli, spec) != before
    pasted(commands(data, "undo"), spec)
    assert captured(cli, spec) == before


@pytest.mark.parametrize("level", ["default", "long"])
def test_a_compute_mode_in_the_way_comes_back_and_so_does_the_level(cli: Cli, level: str) -> None:
    spec, host = "sim:t4", connect("sim:t4")
    cli("timeslice", "set", level, "-g", "0", host=spec).ok()
    host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)

    def now() -> tuple[Any, Any]:
        (gpu,) = connect(spec).nvml.sweep()
        return gpu.compute_mode, gpu.time_slice

    before = now()
    data = advised(cli, spec, PEOPLE, *RUN)
    assert data["winner"] == "timeslice"
    pasted(commands(data), spec)
    assert now() != before
    for line in commands(data, "undo"):
        # A simulated GPU has no nvidia-smi on the PATH.
        if " -c " in line:
            host.nvml.set_compute_mode(0, ComputeMode[line.rpartition(" -c ")[2]])
        elif line.startswith("nvidia-smi"):
            assert host.programs.run(line.split()).exit_code == 0
        else:
            pasted([line], spec)
    assert now() == before


def test_a_daemon_in_the_way_is_a_condition(cli: Cli) -> None:
    cli("mps", "start", "-g", "0", host=A100).ok()
    verdicts = advised(cli, A100, USERS)["verdicts"]
    found = {verdict["way"] for verdict in verdicts if "mps-serves" in {one["rule"] for one in verdict["reasons"]}}
    assert found >= {"timeslice", "mig", "mig+mps", "mig+timeslice"}
    assert "whole-gpu" not in found


def test_a_daemon_of_somebody_else_is_not_stopped_by_a_command() -> None:
    case = {"processes": 3, "memory": "2G", "users": "different", "pattern": "interactive"}
    found = recipe(situation_of(case, host="t4", facts={"mps_daemons": 1}), Way.TIMESLICE)
    assert (found.lines[0].command, found.undo[-1].command) == (None, None)
    assert not any("mps stop" in (line.command or "") for line in found.lines)
    # MPS inside instances that go is named in the undo.
    case = {"processes": 3, "memory": "2G", "users": "same", "saturating": False}
    found = recipe(situation_of(case, facts={"mps_daemons": 1, "mig_enabled": True}), Way.MPS)
    assert "MPS in the instances" in found.undo[-1].what


def test_instances_that_somebody_is_in_stay(cli: Cli) -> None:
    cli("mig", "apply", "-g", "0", "4g.40gb", "1g.10gb", host=A100).ok()
    add_process(A100, "0", mig=next(mig.uuid for mig in World(A100).state.gpus[0].mig if mig.profile == "4g.40gb"))
    data = advised(cli, A100, "--processes 3 --memory 15G --users different --pattern steady")
    (mig,) = (verdict for verdict in data["verdicts"] if verdict["way"] == "mig")
    assert "mig-too-small" in {reason["rule"] for reason in mig["reasons"]}
    assert "next to 4g.40gb:0 (in use)" in mig["reasons"][0]["text"]
    assert (data["winner"], data["commands"]) == (None, [])


@pytest.fixture
def halves(cli: Cli) -> str:
    """Cut GPU 0 of a host into halves, one of them named and granted, and return what its capture says."""
    for words in ("apply -g 0 2g.12gb*2 -y", "name prod 2g.12gb:0 -g 0", "grant prod root"):
        cli("mig", *words.split(), host=A30S).ok()
    return captured(cli, A30S)


@pytest.mark.usefixtures("halves")
def test_advice_takes_the_gpu_that_is_idle_and_uncut(cli: Cli) -> None:
    before = cli("mig", "status", host=A30S, output="json").ok().data
    planned, done = (advised(cli, A30S, FARM, "--apply", *more)["steps"] for more in (["-n"], []))
    assert [step["what"] for step in planned] == [step["what"] for step in done]
    assert any("GPU 1" in step["what"] for step in done)
    assert cli("mig", "status", host=A30S, output="json").ok().data == before


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("words", ["", "--no-root", "--destroy --no-root", "--root"])
def test_a_cut_gpu_is_left_as_it_is(cli: Cli, words: str) -> None:
    """Neither an answer nor a measurement needs the named instance, and without root nothing is turned off."""
    for more in ("", "--saturating", "--users different", "--pattern interactive"):
        text = " ".join(commands(advised(cli, A30S, f"-g 0 --processes 4 --memory 2G {more} {words}", *RUN)))
        # The other half has no name and was made by gpushare: with root it may go.
        assert not re.search(r"mig (disable|apply|enable)|destroy 0/1|prod", text)
        assert "--no-root" not in words or "mig " not in text.replace("run --mig", "")


@pytest.mark.parametrize("there", [("3g.40gb", "3g.40gb"), ("7g.80gb",), ("1g.10gb",) * 7])
@pytest.mark.parametrize("words", [SMALL, USERS, BIG, ("--processes", "1"), ("--processes", "4")])
def test_instances_that_gpushare_did_not_make_stay(cli: Cli, there: tuple[str, ...], words: tuple[str, ...]) -> None:
    World(A100).mig(*there)
    assert not re.search(r"mig (disable|apply|destroy)", " ".join(commands(advised(cli, A100, words, "--root"))))


def test_with_consent_the_undo_restores_names_and_grants(cli: Cli, halves: str) -> None:
    data = advised(cli, A30S, FARM, "-g", "0", "--destroy", *RUN)
    # The user has given them away: without -y, the line would ask once more.
    assert commands(data)[0] == "gpushare mig disable -g 0 --destroy -y"
    pasted(commands(data), A30S)
    assert "prod" not in captured(cli, A30S)
    pasted(commands(data, "undo"), A30S)
    assert captured(cli, A30S) == halves
    assert cli("mig", "status", host=A30S).ok().out.count("for root only") == 1


def test_advice_on_an_instance_stays_in_it(cli: Cli) -> None:
    spec = "sim:h100"
    cli("mig", "apply", "-g", "0", "2g.20gb", "3g.40gb", "-y", host=spec).ok()
    uuid = next(mig.uuid for mig in World(spec).state.gpus[0].mig if mig.profile == "2g.20gb")
    before = captured(cli, spec)
    for words in (FARM, USERS, ("--processes", "2", "--saturating"), ("--processes", "1"), ("--processes", "3")):
        data = advised(cli, spec, words, "-g", uuid, "--no-root", *RUN)
        assert data["instance"] == uuid
        assert all(uuid in line for line in commands(data) if "mkdir" not in line), data["commands"]
        assert data["memory"]["total_bytes"] < 21 << 30
    farm = advised(cli, spec, FARM, "-g", uuid)
    assert farm["winner"] == "mps"
    cli("advise", "-g", uuid, *FARM, "--apply", host=spec).ok()
    pasted(commands(farm, "undo"), spec)
    assert captured(cli, spec) == before


def test_two_small_instances_fit_next_to_a_named_one(cli: Cli) -> None:
    cli("mig", "apply", "-g", "0", "3g.40gb:4", "-y", host=A100).ok()
    cli("mig", "name", "prod", "3g.40gb:4", "-g", "0", host=A100).ok()
    data = advised(cli, A100, "--processes 2 --memory 8G --users different --isolation fault", *RUN)
    assert commands(data)[0] == "gpushare mig create -g 0 '2g.20gb*2'"
    pasted(commands(data)[:1], A100)


@pytest.mark.parametrize(("spec", "words", "way", "first"), [
    ("sim:2xa30", f"--processes 4 --memory 10G {APART}", "mig", "mig apply -g 0-1 '2g.12gb*2'"),
    ("sim:4xt4", f"--processes 10 --memory 4G {OURS}", "mps", "mps start -g 0-3 --threads 66.6"),
    ("sim:2xa30", f"--processes 60 --memory 300M {OURS}", "mps", "mps start -g 0-1 --threads 6.6"),
    ("sim:2xt4", f"--processes 4 --memory 6G {OURS}", "mps", "mps start -g 0-1 --memory 6912M"),
    ("sim:2xa30", f"--processes 6 --groups 6 --memory 2G {APART}", "mig", "mig apply -g 0-1"),
])  # fmt: skip
def test_more_than_one_gpu_holds_is_placed_on_several(cli: Cli, spec: str, words: str, way: str, first: str) -> None:
    before = captured(cli, spec)
    data = advised(cli, spec, words, *RUN)
    assert data["winner"] == way
    assert commands(data)[0].startswith(f"gpushare {first}")
    assert data["gpus"][:2] == [0, 1]
    assert all(f"on GPU {index}" in data["why"][0] for index in (0, 1))
    assert data["case"]["workloads"][0]["processes"] == int(words.split()[1])
    planned, done = (advised(cli, spec, words, "--apply", *more)["steps"] for more in (["-n"], []))
    assert [step["what"] for step in planned] == [step["what"] for step in done]
    assert all(any(f"GPU {index}" in step["what"] for step in done) for index in data["gpus"])
    pasted(commands(data, "undo"), spec)
    assert captured(cli, spec) == before
