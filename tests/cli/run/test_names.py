"""`gpushare run --name`: a job is known by its name while it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare.run.jobs import OPPORTUNISTIC, PLAIN, find_job, find_record
from tests.cli.drive import Cli, Real, Refused, Words, World, refusals, sure, until

RUNS = "echo here >&2; read _; true"


@pytest.mark.parametrize(
    ("options", "role"),
    [((), PLAIN), (("--mig", "1g.18gb"), PLAIN), (("--opportunistic",), OPPORTUNISTIC), (("--threads", "20"), PLAIN)],
)
def test_a_name_stands_for_the_program_while_it_runs(real: Real, world: World, options: Words, role: str) -> None:
    if "--mig" in options:
        world.run("mig", "apply", "1g.18gb,1g.18gb", "-g", "0").ok()
    read, write = os.pipe()
    with os.fdopen(write, "w"):
        started = real("run", *options, "--name", "web", "--", "sh", "-c", RUNS, stdin=read)
        os.close(read)
        started.says("here")
        job = until(lambda: (named := find_job(world.host, "web")).pid != started.pid and named, "the program is named")
        assert sure(find_record(world.host, "web")).role == role
        again = world.run("run", *options, "--name", "web", "--", "true")
        assert (again.code, "is already running" in again.err) == (19, True), again
        # The refused run leaves the name alone.
        assert find_job(world.host, "web") == job
    assert started.result().code == 0
    assert find_record(world.host, "web") is None


@pytest.mark.parametrize("words", [("--name", "web"), ("--production", "web"), ("-d", "--production", "web")])
def test_the_name_of_a_job_that_waits_is_taken(cli: Cli, refused: Refused, world: World, words: Words) -> None:
    world.hold(None)
    cli("run", "-d", "--wait", "--production", "web", "--", "sleep", "60").ok()
    lines = refused("run", *words, "--", "true", code="name_in_use", exit_code=19)
    assert "a job 'web' already waits for room" in lines
    assert "--production OTHER" in lines
    cli("stop", "web").ok()


def test_copies_have_one_name(real: Real, world: World, tmp_path: Path) -> None:
    wait = f"until test -e {tmp_path}/go; do sleep 0.05; done"
    started = real("farm", "--copies", "2", "--name", "farm", "--", "sh", "-c", f"{wait}")
    assert until(lambda: world.begun and find_record(world.host, "farm"), "the farm is named").pid == started.pid
    (tmp_path / "go").touch()
    assert started.result().code == 0
    assert find_record(world.host, "farm") is None


def test_a_named_job_can_be_spared(real: Real, cli: Cli, world: World) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w"):
        started = real("run", "--name", "web", "--", "sh", "-c", RUNS, stdin=read)
        os.close(read)
        started.says("here")
        answer = cli("run", "--opportunistic", "--for", "web", "-n", "--", "true").ok()
        assert "no tuning result found" in answer.err
        assert world.uuid() in answer.out
    started.result()


@refusals(
    "bad_name 2: --name 1web -- true | --name list -- true | --name '' -- true",
    "repeated_option 2: --name a --name b -- true",
)
def test_bad_names_are_refused(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    refused("run", *words, code=code, exit_code=exit_code)
