"""`gpushare tune` that is ended early, and what it refuses with a hint of its own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.cli.options import Ended
from gpushare.cli.tune import _search, _uncertain
from gpushare.measure.search import FINE, GRID, Goal, Search, Setting, Trial, outcome
from gpushare.measure.tune import Tuning
from gpushare.run.results import find_tuned
from gpushare.sim import admin
from tests.cli.drive import H200, Answer, World
from tests.measure.told_jobs import tell

Cli = Callable[..., Answer]
JOB = f"{sys.executable} -m gpushare.sim.job"
PAIR = ("--production", f"{JOB} --need 30", "--opportunistic", f"{JOB} --need 95")
QUICK = ("--ways", "caps", "--metric", "rate=([0-9.]+)", "--window", "0.1s", "--rounds", "2")


def ending_at(monkeypatch: pytest.MonkeyPatch, trials: int, error: BaseException) -> None:
    """Let the trial after so many end with an error."""
    tell(monkeypatch)
    trial, done = Tuning.trial, []

    def counted(self: Tuning, setting: object) -> object:
        if len(done) == trials:
            raise error
        done.append(setting)
        return trial(self, setting)  # type: ignore[arg-type]

    monkeypatch.setattr(Tuning, "trial", counted)


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Ended(15), 143, "interrupted"),
        (OperationFailed("the production job ended", "let it run", code="job_ended"), 1, "job_ended"),
    ],
)
def test_what_was_measured_until_then_is_shown_and_not_kept(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, code: str
) -> None:
    ending_at(monkeypatch, 2, error)
    answer = cli("tune", *PAIR, *QUICK, output="json")
    assert answer.code == exit_code
    assert answer.json["errors"][0]["code"] == code
    assert [row["setting"] for row in answer.data["trials"]] == ["cap 60 %, low priority", "cap 80 %, low priority"]
    assert (answer.data["file"], answer.data["stable"], answer.data["name"]) == (None, False, None)
    assert "nothing was saved" in answer.err
    assert find_tuned(world.host, "production") is None
    assert world.state.daemons == []


def test_a_script_that_runs_it_in_the_background_ends_it_by_sigterm(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell lets what it runs there ignore SIGINT: that stays so, as with every other program."""
    tell(monkeypatch)
    came = []

    def trial(_self: Tuning, _setting: object) -> None:
        signal.raise_signal(signal.SIGINT)
        came.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Tuning, "trial", trial)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = cli("tune", *PAIR, *QUICK)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIG_IGN]
    assert answer.code == 143
    assert "error: interrupted" in answer.err


def test_what_cannot_be_kept_is_shown_all_the_same(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch)
    world.host.state_directory.mkdir()
    (world.host.state_directory / "tuned").write_text("no directory")
    answer = cli("tune", *PAIR, *QUICK, "--caps", "60", output="json")
    assert answer.data["best"]["setting"] == "cap 60 %, low priority"
    assert (answer.data["file"], answer.json["errors"][0]["code"]) == (None, "directory_unwritable")
    assert answer.code == 4
    assert "GPUSHARE_STATE_DIR" in answer.json["errors"][0]["hint"]
    assert "start production" not in answer.err


def test_what_it_says_to_run_names_the_gpu(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch)
    words = ("-g", "1", "--caps", "60")
    err = cli("tune", *PAIR, *QUICK, *words, host="sim:2xh200").err
    assert f"run -g 1 --production production -- {JOB} --need 30" in err
    assert f"run -g 1 --opportunistic --for production -- {JOB} --need 95" in err
    words = ("--production", f"{JOB} --need 95", *PAIR[2:], *QUICK, *words)
    answer = cli("tune", *words, host="sim:2xh200")
    assert answer.code == 7
    assert "gpushare run -g 1 --opportunistic --yield pause" in answer.err


def test_before_the_first_trial_there_is_nothing_to_show(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ending_at(monkeypatch, 0, KeyboardInterrupt())
    answer = cli("tune", *PAIR, *QUICK)
    assert (answer.code, answer.out) == (130, "")


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("--caps", "60,"), "bad_percentage", "--caps 80,60,40"),
        (("--caps", "150"), "bad_percentage", "--caps 80,60,40"),
        (("--timeout", "0"), "bad_duration", "--timeout 10m"),
    ],
)
def test_a_hint_names_the_option_that_is_wrong(
    refused: Callable[..., str], words: tuple[str, ...], code: str, hint: str
) -> None:
    assert hint in refused("tune", *PAIR, *words, code=code, exit_code=2)


def test_in_mig_mode_the_hint_leads_on(refused: Callable[..., str], world: World) -> None:
    admin.set_mig(world.spec, "0", ["1g.18gb"])
    lines = refused("tune", *PAIR, code="mig_mode", exit_code=3, host=H200)
    assert "gpushare run --mig" in lines


def test_only_caps_that_are_asked_for_are_tried_where_some_are() -> None:
    free, asked = _search("97%", None, None), _search("97%", None, "80,40")
    assert (free.grid, free.fine, free.start.threads) == (GRID, FINE, 60.0)
    assert (asked.grid, asked.fine, asked.start.threads) == ((80.0, 40.0), (), 80.0)


@pytest.mark.parametrize(
    ("kept", "error", "spread", "said"),
    [
        (1.0, 0.01, 0.01, None),
        (0.98, 0.02, 0.01, "met by less than the scatter of the figures (0.980 ±0.020)"),
        (1.0, 0.01, 0.12, "production alone varied by 12 % between windows"),
        (1.0, 0.01, None, None),
    ],
)
def test_figures_that_scatter_are_said_to(kept: float, error: float, spread: float | None, said: str | None) -> None:
    search = Search(goal=Goal(keep=0.97))
    found = outcome(search, [Trial(setting=Setting(threads=60.0), kept=kept, error=error)])
    result: Any = SimpleNamespace(outcome=found, production_spread=spread, trials=[SimpleNamespace(rounds=24)])
    notes = _uncertain(result, 0.97)
    assert len(notes) == (said is not None)
    assert all(said in note and "--rounds 48" in note for note in notes if said)


def test_a_p99_that_is_not_certain_is_named() -> None:
    """It was measured once, from too few requests to say how certain it is; the rate is certain."""
    search = Search(goal=Goal(keep=0.97, p99_factor=1.2))
    trial = Trial(setting=Setting(threads=60.0), kept=1.0, error=0.001, p99=1.06)
    result: Any = SimpleNamespace(
        outcome=outcome(search, [trial]), production_spread=0.01, trials=[SimpleNamespace(rounds=2)]
    )
    (note,) = _uncertain(result, 0.97)
    assert "scatter of the figures (p99 1.06x); more windows" in note


def test_a_larger_cap_that_met_the_goal_by_luck_is_named() -> None:
    search = Search(goal=Goal(keep=0.97))
    trials = [
        Trial(setting=Setting(threads=80.0), kept=0.98, error=0.02, opportunistic=80.0),
        Trial(setting=Setting(threads=60.0), kept=1.0, error=0.01, opportunistic=60.0),
        Trial(setting=Setting(threads=40.0), kept=0.98, error=0.02, opportunistic=40.0),
    ]
    result: Any = SimpleNamespace(
        outcome=outcome(search, trials), production_spread=0.2, trials=[SimpleNamespace(rounds=24)]
    )
    (note,) = _uncertain(result, 0.97)
    assert note.startswith("cap 80 %, low priority met the goal too, but by less than the scatter of its figures")
