"""`gpushare tune --ways` on the command line, with jobs whose need is known."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from gpushare.base.errors import NotSupported
from gpushare.run.results import find_tuned
from tests.cli.drive import Answer, World
from tests.measure.told_jobs import ToldSlicer, tell

Cli = Callable[..., Answer]
JOB = f"{sys.executable} -m gpushare.sim.job --every 0.02"
# Requests of 5.6 ms at half load, next to a job that always works.
PAIR = ("--production", f"{JOB} --need 95 --busy 50 --latency 5.6", "--opportunistic", f"{JOB} --need 95")
QUICK = ("--metric", "rate=([0-9.]+)", "--window", "0.6s", "--rounds", "2", "--p99", "1.2x", "--name", "web")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure jobs that are no processes: what they print, and when, is known."""
    tell(monkeypatch)
    monkeypatch.setattr(ToldSlicer, "refusal", None)
    monkeypatch.setattr("gpushare.measure.pair.utilization", lambda *_: 50.0)


def test_slices_are_found_kept_and_told_how_to_be_used(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = cli("tune", *PAIR, *QUICK, output="json").ok()
    best = answer.data["best"]
    assert (best["way"], best["production_slice_us"], best["other_slice_us"]) == ("slices", 16000, 100)
    assert best["setting"] == "slice 100us, production slice 16ms"
    assert (best["threads_percent"], best["low_priority"]) == (100.0, False)
    assert answer.data["production_busy_percent"] == 50.0
    assert [one["way"] for one in answer.data["ways"]] == ["slices", "caps"]
    assert {one["way"] for one in answer.data["trials"]} == {"slices", "caps"}
    err = " ".join(answer.err.split())
    assert f"start production, outside MPS: gpushare run -g 0 --production web -- {PAIR[1]}" in err
    assert f"then the other: gpushare run -g 0 --opportunistic --for web -- {PAIR[3]}" in err
    kept = find_tuned(world.host, "web")
    assert kept is not None
    assert (kept.way, kept.production_slice_us, kept.other_slice_us) == ("slices", 16000, 100)


def test_the_other_way_is_told_with_what_it_gives(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("-o", "table", "tune", *PAIR, *QUICK, "--caps", "60,20").ok().out
    assert "found: slice 100us, production slice 16ms: production 1.00 of alone, p99" in lines
    whole = " ".join(lines.split())
    assert "caps: cap 20 %, low priority: production 1.00 of alone, p99 1.15x, opportunistic 0.19" in whole
    assert "; the other does 0.28 less" in whole
    assert max(map(len, lines.splitlines())) <= 80
    (chosen,) = (line for line in lines.splitlines() if line.startswith("slice 100us") and line.endswith("yes"))
    assert " 16ms " in chosen


def test_a_way_in_which_nothing_meets_the_goal_is_told(cli: Cli) -> None:
    lines = " ".join(cli("tune", *PAIR, *QUICK, "--caps", "60").ok().out.split())
    assert "caps: none meets the goal; nearest: cap 60 %" in lines


def test_one_way_is_searched_where_one_is_asked_for(cli: Cli) -> None:
    data = cli("tune", *PAIR, *QUICK, "--ways", "caps", "--caps", "20", output="json").ok().data
    assert {one["way"] for one in data["trials"]} == {"caps"}
    assert [one["way"] for one in data["ways"]] == ["caps"]
    data = cli("tune", *PAIR, *QUICK, "--ways", " Slices ", output="json").ok().data
    assert {one["way"] for one in data["trials"]} == {"slices"}


def test_slices_that_cannot_be_set_are_told_and_refused_where_nothing_else_was_asked_for(
    cli: Cli, refused: Callable[..., str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = NotSupported("process 7: a sandbox forbids pidfd_getfd", "run it on the host", code="seccomp")
    monkeypatch.setattr(ToldSlicer, "refusal", refusal)
    answer = cli("tune", *PAIR, *QUICK, "--caps", "20").ok()
    assert "slices: not searched: process 7: a sandbox forbids pidfd_getfd; run it on the" in answer.out
    assert "slices are left out: process 7" in answer.err
    words = ("tune", *PAIR, *QUICK[:-2], "--ways", "slices", "--name", "other")
    refused(*words, code="seccomp", exit_code=3)
    assert find_tuned(world.host, "other") is None


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("--ways", "mps"), "bad_way", "--ways slices,caps"),
        (("--ways", ""), "bad_way", "--ways slices,caps"),
        (("--ways", "slices", "--caps", "60"), "bad_combination", "drop --caps"),
    ],
)
def test_a_wrong_way_is_refused(refused: Callable[..., str], words: tuple[str, ...], code: str, hint: str) -> None:
    assert hint in refused("tune", *PAIR, *words, code=code, exit_code=2)
