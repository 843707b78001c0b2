"""What a MIG change left behind: a journal that cannot be read, and what could not come back. Neither is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.actions import mig_recover
from gpushare.actions.mig_left import left_behind, missing
from gpushare.errors import OperationFailed
from gpushare.host.connect import connect
from gpushare.host.mig_journal import Journal
from gpushare.mig.shape import GpuShape
from gpushare.sim import admin
from tests.actions.mig_host import MigHost
from tests.cli.conftest import Cli

A100, TWO = "sim:a100-80gb", "sim:2xa100-80gb"
Refused = Callable[..., str]


def crashed(host: MigHost, *words: str, step: int) -> None:
    host.fault("crash-step", step)
    assert host.run_apart("mig", *words) == 137
    host.clear()


# -- a journal that cannot be read -----------------------------------------------------------------


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def torn(path: Path) -> None:
    path.write_bytes(b"{")


def newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))


BROKEN = pytest.mark.parametrize(("broken", "why"), [(emptied, "empty"), (torn, "JSON"), (newer, "newer gpushare")])


@BROKEN
def test_every_change_is_refused_while_the_journal_cannot_be_read(
    refused: Refused, broken: Callable[[Path], None], why: str
) -> None:
    host = MigHost(A100)
    crashed(host, "apply", "1g.10gb*3", step=4)
    broken(host.journal)
    kept, before = host.journal.read_bytes(), host.look()
    for words in (["mig", "recover"], ["mig", "recover", "-n"], ["mig", "enable"], ["mig", "enable", "-n"]):
        said = refused(*words, code="journal_unreadable", exit_code=1, host=A100)
        assert str(host.journal) in said
        assert why in said
        assert "gpushare mig status" in said
        assert "gpushare mig recover --forget" in said
    assert host.journal.read_bytes() == kept
    assert host.look() == before


def test_a_journal_that_cannot_be_read_is_seen_by_who_only_looks(cli: Cli) -> None:
    host = MigHost(A100)
    crashed(host, "apply", "1g.10gb*3", step=4)
    torn(host.journal)
    assert str(host.journal) in cli("mig", "status", host=A100).ok().err
    found = {check["id"]: check for check in cli("-o", "json", "doctor", host=A100).json["data"]["checks"]}
    assert found["mig.interrupted"]["verdict"] == "fail"
    assert "--forget" in found["mig.interrupted"]["remedy"]
    assert "gpushare_mig_change_interrupted 1" in cli("export", "prometheus", host=A100).out


def test_a_journal_that_cannot_be_read_is_set_aside_and_not_thrown_away(cli: Cli) -> None:
    host = MigHost(A100)
    crashed(host, "apply", "1g.10gb*3", step=4)
    torn(host.journal)
    would = cli("mig", "recover", "--forget", "-n", host=A100).ok()
    assert "would be" in would.out
    assert host.journal.exists()
    said = cli("mig", "recover", "--forget", host=A100).ok()
    (aside,) = host.journal.parent.glob("set-aside-*.json")
    assert str(aside) in said.out
    assert aside.read_bytes() == b"{"
    assert not host.journal.exists()
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out
    cli("mig", "apply", "1g.10gb", host=A100).ok()


def test_one_that_was_set_aside_before_stays(cli: Cli) -> None:
    host = MigHost(A100)
    host.journal.parent.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        host.journal.write_text("{" * number)
        cli("mig", "recover", "--forget", host=A100).ok()
    assert sorted(one.read_text() for one in host.journal.parent.glob("set-aside-*.json")) == ["{", "{{"]


# -- what could not come back ----------------------------------------------------------------------


def lost(host: MigHost) -> tuple[int, str]:
    """Let a change die, somebody begin to use what it made, and the undoing fail; return who, and what stayed."""
    crashed(host, "apply", "1g.10gb*3", step=5)
    pid = host.add(host.devices()[0][1])
    assert host.run("mig", "recover").error["code"] == "not_restored"
    (left,) = host.look()[0].instances
    return pid, f"{left[0]}:{left[1]}"


def test_what_could_not_come_back_is_named_until_it_is_back(cli: Cli, refused: Refused) -> None:
    host = MigHost(A100)
    before = host.look()
    pid, place = lost(host)
    for words in (["mig", "recover"], ["mig", "recover", "-n"], ["mig", "recover"]):
        said = refused(*words, code="not_restored", exit_code=1, host=A100)
        assert place in said
        assert "gpushare mig disable -g 0 --destroy" in said
        assert "gpushare mig recover --forget" in said
    assert place in cli("mig", "status", host=A100).ok().err
    found = {check["id"]: check for check in cli("-o", "json", "doctor", host=A100).json["data"]["checks"]}
    assert place in found["mig.not_restored"]["seen"]
    admin.end_process(host.spec, pid)
    cli("mig", "disable", "-g", "0", "--destroy", host=A100).ok()
    assert host.look() == before
    assert "could not come back" not in cli("mig", "status", host=A100).ok().err
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out
    # Not only unseen: what is wanted otherwise later is nobody's loss.
    assert not list(host.journal.parent.glob("*.json"))
    cli("mig", "apply", "1g.10gb", host=A100).ok()
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out


def test_the_change_that_is_complete_after_all_is_no_loss(cli: Cli) -> None:
    host = MigHost(A100)
    pid, _ = lost(host)
    admin.end_process(host.spec, pid)
    cli("mig", "apply", "1g.10gb*3", host=A100).ok()
    assert "could not come back" not in cli("mig", "status", host=A100).ok().err


def test_an_earlier_loss_is_named_beside_what_is_undone_now(cli: Cli) -> None:
    host = MigHost(TWO)
    crashed(host, "apply", "-g", "0", "1g.10gb*3", step=5)
    host.add(host.devices()[0][1])
    assert host.run("mig", "recover").code == 1
    crashed(host, "apply", "-g", "1", "2g.20gb", step=2)
    done = cli("mig", "recover", host=TWO).ok()
    assert "was undone" in done.out
    assert "could not come back" in done.err


def test_a_list_that_cannot_be_read_is_said_and_stays(cli: Cli, refused: Refused) -> None:
    host = MigHost(A100)
    lost(host)
    (path,) = host.journal.parent.glob("not-restored-*.json")
    path.write_text("{")
    assert str(path) in refused("mig", "recover", code="not_restored", exit_code=1, host=A100)
    assert str(path) in cli("mig", "status", host=A100).ok().err
    cli("mig", "enable", host=A100)
    assert path.exists()
    cli("mig", "recover", "--forget", host=A100).ok()
    assert not path.exists()


def test_another_change_neither_undoes_nor_forgets_it(cli: Cli) -> None:
    host = MigHost(TWO)
    crashed(host, "apply", "-g", "0", "1g.10gb*3", step=5)
    pid = host.add(host.devices()[0][1])
    assert host.run("mig", "recover").code == 1
    admin.end_process(host.spec, pid)
    here = host.look()[0]
    cli("mig", "apply", "-g", "1", "2g.20gb", host=TWO).ok()
    assert host.look()[0] == here
    assert "could not come back" in cli("mig", "status", host=TWO).ok().err


def test_who_accepts_it_is_not_told_again(cli: Cli) -> None:
    host = MigHost(A100)
    _, place = lost(host)
    here = host.look()
    assert place in cli("mig", "recover", "--forget", host=A100).ok().out
    assert host.look() == here
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out
    assert "could not come back" not in cli("mig", "status", host=A100).ok().err


def test_forgetting_nothing_says_so_and_an_interrupted_change_is_undone_and_not_forgotten(
    cli: Cli, refused: Refused
) -> None:
    host = MigHost(A100)
    assert "nothing to forget" in cli("mig", "recover", "--forget", host=A100).ok().out
    crashed(host, "apply", "1g.10gb*3", step=4)
    assert "mig recover" in refused("mig", "recover", "--forget", code="not_recovered", exit_code=2, host=A100)
    assert host.journal.exists()


def test_a_gpu_that_is_not_there_stays_named_until_it_is_back(cli: Cli, refused: Refused) -> None:
    host = MigHost(TWO)
    crashed(host, "apply", "-g", "0", "1g.10gb*3", step=4)
    with host.file.changed() as state:
        gone = state.gpus.pop(0)
    assert "is not there" in host.run("mig", "recover").error["message"]
    for _ in range(2):
        assert "is not there" in refused("mig", "recover", code="not_restored", exit_code=1, host=TWO)
    with host.file.changed() as state:
        state.gpus.insert(0, gone)
    assert "gpushare mig disable -g 0 --destroy" in refused(
        "mig", "recover", code="not_restored", exit_code=1, host=TWO
    )
    cli("mig", "disable", "-g", "0", "--destroy", host=TWO).ok()
    assert "nothing to do" in cli("mig", "recover", host=TWO).ok().out


def test_a_rollback_that_failed_is_not_lost_either(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same list, of a change that did not die: somebody came into what it had made already."""
    from gpushare.actions import mig_change
    from gpushare.errors import OperationFailed

    host = MigHost(A100)
    before = host.look()
    real, calls = mig_change.perform, []

    def in_use(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            host.add(host.devices()[0][1])
            raise OperationFailed("the driver refused", "see: gpushare doctor")
        real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(mig_change, "perform", in_use)
        said = host.run("mig", "apply", "1g.10gb*3")
    assert "could not be undone" in said.error["message"]
    assert "could not come back" in cli("mig", "status", host=A100).ok().err
    for pid in host.pids():
        admin.end_process(host.spec, pid)
    assert host.run("mig", "recover").error["code"] == "not_restored"
    cli("mig", "disable", "--destroy", host=A100).ok()
    assert host.look() == before
    cli("mig", "recover", host=A100).ok()


# -- what is told of it, and to whom ---------------------------------------------------------------


def test_what_was_interrupted_is_told_with_the_step_in_which_it_died() -> None:
    host = MigHost(A100)
    crashed(host, "apply", "1g.10gb*3", step=4)
    seen = connect(A100)
    (left,) = left_behind(seen, Journal(seen))
    entry = json.loads(host.journal.read_text())
    assert (left.id, left.remedy, left.at) == ("mig.interrupted", "gpushare mig recover", entry["step"])
    assert left.at
    assert entry["title"] in left.seen
    assert str(left) == f"{left.seen}: {left.remedy}"


def test_what_another_made_beside_it_meanwhile_is_no_part_of_what_is_lost(cli: Cli) -> None:
    host = MigHost(A100)
    pid, _ = lost(host)
    ((_, entry),) = Journal(connect(A100)).not_restored()
    assert entry is not None
    assert missing(connect(A100), entry)
    admin.end_process(host.spec, pid)
    cli("mig", "apply", "1g.10gb*3", host=A100).ok()
    assert missing(connect(A100), entry) == ()
    cli("mig", "create", "2g.20gb", host=A100).ok()
    assert missing(connect(A100), entry) == ()
    place = next(f"{name}:{start}" for name, start, _ in host.look()[0].instances if name == "1g.10gb")
    cli("mig", "destroy", place, host=A100).ok()
    assert missing(connect(A100), entry)


# -- undoing ---------------------------------------------------------------------------------------


def test_a_gpu_that_cannot_be_looked_at_leaves_the_journal_and_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known to be undone is not forgotten."""
    host = MigHost(A100)
    before = host.look()
    crashed(host, "apply", "1g.10gb*3", step=4)

    real, asked = mig_recover.look, []

    def silent(*arguments: Any) -> GpuShape:
        asked.append(arguments)
        if len(asked) > 1:
            return real(*arguments)
        raise OperationFailed("the GPU does not answer", "see: gpushare doctor", code="nvml_failed")

    with monkeypatch.context() as patched:
        patched.setattr(mig_recover, "look", silent)
        said = host.run("mig", "recover")
    assert (said.code, said.error["code"]) == (1, "nvml_failed")
    assert len(asked) == 1
    assert host.journal.exists()
    assert not list(host.journal.parent.glob("not-restored-*.json"))
    assert host.run("mig", "recover").code == 0
    assert host.look() == before
    assert not host.journal.exists()


@pytest.mark.parametrize("step", range(1, 5))
def test_mig_that_was_turned_off_in_part_is_on_again_with_all_that_was_there(cli: Cli, step: int) -> None:
    host = MigHost(TWO)
    cli("mig", "apply", "-g", "all", "3g.40gb", host=TWO).ok()
    before = host.look()
    assert [one.mode for one in before] == [1, 1]
    crashed(host, "disable", "-g", "all", "--destroy", step=step)
    cli("mig", "recover", host=TWO).ok()
    now = host.look()
    # Complete already, in the last step, is kept.
    assert now == before or (step == 4 and [one.mode for one in now] == [0, 0])
    assert not host.journal.exists()


def test_who_recovers_in_vain_is_told_at_once_how_to_accept_it() -> None:
    host = MigHost(A100)
    crashed(host, "apply", "1g.10gb*3", step=5)
    host.add(host.devices()[0][1])
    said = host.run("mig", "recover")
    assert said.error["code"] == "not_restored"
    assert "gpushare mig recover --forget" in said.error["hint"]
