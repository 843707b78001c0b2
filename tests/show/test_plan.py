"""A plan: every step with its plain command and its undo."""

from __future__ import annotations

import io
import re

import pytest

from gpushare.plan import Plan, Step, one_plan
from gpushare.show.plan import plan_result
from gpushare.show.render import write
from gpushare.show.result import OutputFormat, Result, Table, jsonable
from gpushare.show.text import set_host
from tests.show.hosts import uuid


def step(what: str, command: str, undo: str | None = None) -> Step:
    return Step(what=what, command=command, undo=undo, do=lambda: None)


STEPS = (
    step(
        "put GPU 0 into compute mode exclusive-process",
        f"nvidia-smi -i {uuid(0)} -c EXCLUSIVE_PROCESS",
        f"nvidia-smi -i {uuid(0)} -c DEFAULT",
    ),
    step(
        "start an MPS control daemon for GPU 0",
        f"CUDA_VISIBLE_DEVICES=0 CUDA_MPS_PIPE_DIRECTORY=/run/gpushare/mps/{uuid(0)} nvidia-cuda-mps-control -d",
        f"echo quit | CUDA_MPS_PIPE_DIRECTORY=/run/gpushare/mps/{uuid(0)} nvidia-cuda-mps-control",
    ),
    step("read back that the daemon answers", "echo get_server_list |\n  nvidia-cuda-mps-control"),
)


PLAN = Plan(title="MPS on GPU 0: no limits", steps=STEPS, undo="gpushare mps stop -g 0")


def test_a_plan_on_a_terminal_and_off_it_is_the_same_list(shown, golden):
    """Commands are never cut, however narrow the window: people copy them."""
    plan = plan_result(PLAN, dry_run=True)
    golden("plan-table", shown(plan, OutputFormat.TABLE, width=60)[0])
    golden("plan-plain", shown(plan, OutputFormat.AUTO)[0])


def test_each_line_of_a_command_names_the_host(shown):
    plan = Plan(
        title="t", steps=(step("name two", "gpushare mig a\ngpushare mig b", "gpushare mig c\ngpushare mig d"),)
    )
    set_host("sim:h200", ("mig",), simulated=True)
    try:
        text = shown(plan_result(plan, dry_run=True), OutputFormat.TABLE)[0]
    finally:
        set_host(None, (), simulated=False)
    assert re.findall("gpushare (.+)", text) == [f"--host sim:h200 mig {letter}" for letter in "abcd"]


@pytest.mark.parametrize("output", [OutputFormat.TABLE, OutputFormat.PLAIN])
def test_what_an_empty_table_proposes_names_the_host(shown, output):
    table = Table(name="t", columns=(), rows=(), empty="nothing is there; make one: gpushare mig create 1g.10gb -g 0")
    set_host("sim:8xa100-80gb", ("mig",), simulated=True)
    try:
        text = shown(Result(command="x", data=None, tables=(table,)), output, width=60)[0]
    finally:
        set_host(None, (), simulated=False)
    assert "gpushare --host sim:8xa100-80gb mig create 1g.10gb -g 0" in " ".join(text.split())
    assert output is OutputFormat.PLAIN or max(map(len, text.splitlines())) <= 60


def test_a_change_is_one_line_each_with_its_undo(shown):
    other = Plan(title="MPS on GPU 1: threads 30 % per client", steps=STEPS[:1])
    same = Plan(title="MPS on GPU 2: as it was", steps=())
    out, notes = shown(plan_result(one_plan([PLAN, other, same]), dry_run=False), OutputFormat.AUTO)
    assert out == "MPS on GPU 0: no limits; undo: gpushare mps stop -g 0\nMPS on GPU 1: threads 30 % per client\n"
    assert not notes


def test_an_undo_that_does_not_fit_begins_a_line(shown):
    out, _ = shown(plan_result(PLAN, dry_run=False), OutputFormat.TABLE, width=40)
    assert out == "MPS on GPU 0: no limits\n  undo: gpushare mps stop -g 0\n"


def test_a_long_line_of_what_was_done_ends_between_words(shown):
    text = f"'{'n' * 30}' (process 4711) is gone after 10.1 s: the gpushare that ran it has ended it"
    out, _ = shown(Result(done=((text, None),)), OutputFormat.TABLE, width=80)
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(out.split()) == text


def test_quiet_says_nothing_of_a_change_that_succeeded():
    for dry_run in (False, True):
        out, notes = io.StringIO(), io.StringIO()
        result = plan_result(PLAN, dry_run=dry_run, notes=["needs root"])
        write(result, OutputFormat.AUTO, stdout=out, stderr=notes, quiet=True)
        assert (bool(out.getvalue()), notes.getvalue()) == (dry_run, "")


def test_the_data_of_a_plan_is_pinned():
    result = plan_result(Plan(title="MPS", steps=STEPS), dry_run=True, notes=["needs root"])
    assert jsonable(result.data) == {
        "dry_run": True,
        "steps": [{"what": step.what, "command": step.command, "undo": step.undo} for step in STEPS],
        "undo": None,
        "consent": [],
    }
    assert result.notes == ("needs root",)


def test_the_undo_of_a_dry_run_is_a_note(shown):
    result = plan_result(PLAN, dry_run=True, notes=["needs root"])
    assert result.data.undo == "gpushare mps stop -g 0"
    assert result.notes == ("needs root", "undo: gpushare mps stop -g 0")
    assert "undo: none" not in shown(result, OutputFormat.TABLE)[0]
    nothing = Plan(title="MPS", steps=(), undo="gpushare mps stop")
    assert plan_result(nothing, dry_run=True).notes == ()


def test_no_step_says_that_there_is_nothing_to_do(shown):
    for dry_run in (True, False):
        result = plan_result(Plan(title="x", steps=()), dry_run=dry_run)
        assert shown(result, OutputFormat.TABLE)[0] == "nothing to do: the host is as requested\n"


def test_a_long_step_is_wrapped_between_words_and_its_command_can_be_copied(shown):
    what = "wait until GPU 0 has room for 60.0 GiB, first come first served, for 3600 s at most; reserve it"
    one = step(what, f"gpushare {'x' * 40} {'y' * 50}")
    out, _ = shown(plan_result(Plan(title="run", steps=(one,)), dry_run=True), OutputFormat.TABLE, width=60)
    lines = out.splitlines()
    assert lines[2:] == [
        "1. wait until GPU 0 has room for 60.0 GiB, first come first",
        "   served, for 3600 s at most; reserve it",
        f"   $ gpushare {'x' * 40} \\",
        f"     {'y' * 50}",
    ]
