"""What a MIG change left behind: a journal that cannot be read, and what could not be restored. Neither is lost."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.connect import connect
from gpushare.host import store
from gpushare.mig import grant, recover
from gpushare.mig.driver import MigChanges
from gpushare.mig.ledger import MigLedger
from gpushare.mig.recover import Calls, leftovers, unrestored_differences, visible_leftovers
from gpushare.mig.shape import NOTHING, GpuShape
from gpushare.sim import admin
from gpushare.sim.state import SimulatedGpuInstance, StateFile
from tests.cli.drive import Answer, Cli, Patch, Refused, World, missing

A100, TWO = "sim:a100-80gb", "sim:2xa100-80gb"


def crashed(host: World, *words: str, step: int) -> None:
    host.fault("crash-step", step)
    assert host.run_apart("mig", *words) == 137
    host.clear()


@pytest.fixture
def host() -> World:
    """Return a host on which a change was cut off."""
    host = World.new(A100)
    crashed(host, "apply", "1g.10gb*3", step=4)
    return host


def test_status_and_doctor_lead_to_the_recovery_and_to_nothing_else() -> None:
    host = World.new("sim:2xh200")
    assert host.run("mig", "enable", "-g", "1").code == 0
    crashed(host, "apply", "-g", "0", "3g.71gb", "1g.18gb*2", "-y", step=2)
    with StateFile(host.spec).changed() as state:
        state.gpus[1].bare.append(SimulatedGpuInstance(profile="1g.18gb", start=1, gpu_instance_id=10))
    answer = host.run("status")
    (note,) = (line for line in answer.err.splitlines() if "interrupted" in line)
    assert note == "note: 'apply 3g.71gb 1g.18gb*2' was interrupted: gpushare mig recover"
    assert "without instances" not in answer.err
    assert "see its instances, and what still fits: gpushare mig status -g 0" in answer.err
    checks = [check for check in host.run("doctor").json["data"]["checks"] if check["id"].startswith("mig.")]
    assert {(check["id"], check["gpu"]): check["remedy"] for check in checks} == {
        ("mig.interrupted", None): "gpushare mig recover",
        ("mig.bare", 1): "sudo nvidia-smi mig -i 1 -gi 10 -cci",
    }
    assert host.run("mig", "recover").code == 0
    assert "interrupted" not in host.run("status").err


def test_status_of_a_user_names_what_root_has_to_recover(tmp_path: Path) -> None:
    host = World.new(A100)
    crashed(host, "apply", "3g.40gb", step=2)
    theirs = replace(host.host, run_directory=tmp_path, shared_run_directories=(host.journal.parents[1],))
    told = "'apply 3g.40gb' was interrupted: sudo gpushare mig recover"
    assert [str(leftover) for leftover in visible_leftovers(theirs)] == [told]
    # The metrics count what status names.
    (host.journal.parents[2] / "users" / "1000").mkdir(parents=True)
    host.fault("user", "1000")
    assert "sudo gpushare mig recover" in host.run("status").err
    assert "gpushare_mig_change_interrupted 1" in host.run("export", "prometheus").out


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def torn(path: Path) -> None:
    path.write_bytes(b"{")


def newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))


BROKEN = pytest.mark.parametrize(("broken", "why"), [(emptied, "empty"), (torn, "JSON"), (newer, "another version")])


@BROKEN
def test_an_unreadable_journal_refuses_every_change(
    refused: Refused, broken: Callable[[Path], None], why: str, host: World
) -> None:
    broken(host.journal)
    kept, before = host.journal.read_bytes(), host.look()
    for words in (["mig", "recover"], ["mig", "recover", "-n"], ["mig", "enable"], ["mig", "enable", "-n"]):
        text = refused(*words, code="journal_unreadable", exit_code=1, host=A100)
        assert str(host.journal) in text
        assert why in text
        assert missing(text, "gpushare mig status", "gpushare mig recover --forget") == []
    assert (host.journal.read_bytes(), host.look()) == (kept, before)


def test_a_journal_that_cannot_be_read_is_seen_by_who_only_looks(cli: Cli, host: World) -> None:
    torn(host.journal)
    assert str(host.journal) in cli("mig", "status", host=A100).ok().err
    by_key = {check["id"]: check for check in cli("-o", "json", "doctor", host=A100).json["data"]["checks"]}
    assert by_key["mig.interrupted"]["verdict"] == "fail"
    assert "--forget" in by_key["mig.interrupted"]["remedy"]
    assert "gpushare_mig_change_interrupted 1" in cli("export", "prometheus", host=A100).out


def test_a_journal_that_cannot_be_read_is_set_aside_and_not_thrown_away(cli: Cli, host: World) -> None:
    torn(host.journal)
    assert "would be" in cli("mig", "recover", "--forget", "-n", host=A100).ok().out
    assert host.journal.exists()
    answer = cli("mig", "recover", "--forget", host=A100).ok()
    (aside,) = host.journal.parent.glob("set-aside-*.json")
    assert str(aside) in answer.out
    assert aside.read_bytes() == b"{"
    assert not host.journal.exists()
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out
    cli("mig", "apply", "1g.10gb", host=A100).ok()
    # One that was set aside before stays.
    host = World.new(A100)
    host.journal.parent.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        host.journal.write_text("{" * number)
        cli("mig", "recover", "--forget", host=A100).ok()
    assert sorted(path.read_text() for path in host.journal.parent.glob("set-aside-*.json")) == ["{", "{{"]


def lost(host: World) -> tuple[int, str]:
    """Let a change die, somebody begin to use what it made, and the undoing fail; return who, and what stayed."""
    crashed(host, "apply", "-g", "0", "1g.10gb*3", step=5)
    pid = host.add(host.devices()[0][1])
    answer = host.run("mig", "recover").ends(1, "not_restored")
    (left,) = host.look()[0].instances
    assert f"{left[0]}:{left[1]}" in answer.error["message"]
    # Who recovers in vain is told at once how to accept it.
    assert "gpushare mig recover --forget" in answer.error["hint"]
    assert host.pids() == [pid]
    return pid, f"{left[0]}:{left[1]}"


def with_an_instance() -> World:
    """Return a host with one instance, named 'new'."""
    host = World.new(A100)
    assert host.run("mig", "enable").code == 0
    assert host.run("mig", "create", "3g.40gb", "--name", "new").code == 0
    return host


def test_what_could_not_come_back_is_named_until_it_is_back(cli: Cli, refused: Refused) -> None:
    host = World.new(A100)
    before = host.look()
    pid, place = lost(host)
    for words in (["mig", "recover"], ["mig", "recover"]):
        text = refused(*words, code="not_restored", exit_code=1, host=A100)
        assert place in text
        assert missing(text, "gpushare mig disable -g 0 --destroy", "gpushare mig recover --forget") == []
    assert place in cli("mig", "status", host=A100).ok().err
    by_key = {check["id"]: check for check in cli("-o", "json", "doctor", host=A100).json["data"]["checks"]}
    assert place in by_key["mig.not_restored"]["seen"]
    admin.end_process(host.spec, pid)
    cli("mig", "disable", "-g", "0", "--destroy", host=A100).ok()
    assert host.look() == before
    assert "could not be restored" not in cli("mig", "status", host=A100).ok().err
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out
    # Not only unseen: what is wanted otherwise later is nobody's loss.
    assert {path.name for path in host.journal.parent.glob("*.json")} <= {"made.json"}
    cli("mig", "apply", "1g.10gb", host=A100).ok()
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out


def test_an_earlier_loss_is_named_beside_what_is_undone_now(cli: Cli) -> None:
    host = World.new(TWO)
    lost(host)
    crashed(host, "apply", "-g", "1", "2g.20gb", step=2)
    done = cli("mig", "recover", host=TWO).ok()
    assert "was undone" in done.out
    assert "could not be restored" in done.err


def test_a_list_that_cannot_be_read_is_said_and_stays(cli: Cli, refused: Refused) -> None:
    host = World.new(A100)
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
    host = World.new(TWO)
    pid, _ = lost(host)
    admin.end_process(host.spec, pid)
    here = host.look()[0]
    cli("mig", "apply", "-g", "1", "2g.20gb", host=TWO).ok()
    assert host.look()[0] == here
    assert "could not be restored" in cli("mig", "status", host=TWO).ok().err


def test_who_accepts_it_is_not_told_again(cli: Cli) -> None:
    host = World.new(A100)
    _, place = lost(host)
    here = host.look()
    assert place in cli("mig", "recover", "--forget", host=A100).ok().out
    assert host.look() == here
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out
    assert "could not be restored" not in cli("mig", "status", host=A100).ok().err


def test_forgetting_nothing_says_so_and_an_interrupted_change_is_not_forgotten(cli: Cli, refused: Refused) -> None:
    host = World.new(A100)
    assert "nothing to do" in cli("mig", "recover", "--forget", host=A100).ok().out
    crashed(host, "apply", "1g.10gb*3", step=4)
    assert "mig recover" in refused("mig", "recover", "--forget", code="not_recovered", exit_code=2, host=A100)
    assert host.journal.exists()


def test_a_gpu_that_is_not_there_stays_named_until_it_is_back(cli: Cli, refused: Refused) -> None:
    host = World.new(TWO)
    crashed(host, "apply", "-g", "0", "1g.10gb*3", step=4)
    with host.file.changed() as state:
        gone = state.gpus.pop(0)
    before = host.look()
    assert "is missing" in host.run("mig", "recover").error["message"]
    # It touches no other.
    assert host.look() == before
    assert not host.journal.exists()
    for _ in range(2):
        assert "is missing" in refused("mig", "recover", code="not_restored", exit_code=1, host=TWO)
    with host.file.changed() as state:
        state.gpus.insert(0, gone)
    assert "is now undone" in cli("mig", "recover", host=TWO).ok().out
    assert [gpu.mode for gpu in host.look()] == [0, 0]
    assert "nothing to do" in cli("mig", "recover", host=TWO).ok().out


def test_a_rollback_that_failed_is_not_lost_either(cli: Cli, monkeypatch: Patch) -> None:
    """The same list, of a change that did not die: somebody came into what it had made already."""
    host = World.new(A100)
    before = host.look()
    real, calls = Calls.do, []

    def in_use(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            host.add(host.devices()[0][1])
            raise OperationFailed("the driver refused", "see: gpushare doctor")
        return real(*arguments)  # type: ignore[arg-type, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(Calls, "do", in_use)
        answer = host.run("mig", "apply", "1g.10gb*3")
    assert "could not be undone" in answer.error["message"]
    assert answer.error["hint"].startswith("restore it: gpushare mig recover; or by hand: ")
    assert "then: gpushare mig disable -g 0 --destroy" in answer.error["hint"]
    assert "could not be restored" in cli("mig", "status", host=A100).ok().err
    for pid in host.pids():
        admin.end_process(host.spec, pid)
    assert "it would be tried again" in cli("mig", "recover", "-n", host=A100).ok().out
    assert (host.run("mig", "recover").code, host.look()) == (0, before)
    assert "nothing to do" in cli("mig", "recover", host=A100).ok().out


def refusing(monkeypatch: Patch, host: World) -> Answer:
    """Recover while the driver refuses to take an instance away."""

    def refuse(*_: object) -> None:
        raise OperationFailed("the driver refused", "see: gpushare doctor")

    with monkeypatch.context() as patched:
        patched.setattr(MigChanges, "destroy_gpu_instance", refuse)
        patched.setattr(MigChanges, "destroy_compute_instance", refuse)
        return host.run("mig", "recover")


def test_what_the_driver_refuses_is_kept_apart_until_it_is_undone(cli: Cli, monkeypatch: Patch) -> None:
    host = World.new(A100)
    before = host.look()
    crashed(host, "apply", "1g.10gb*3", step=4)
    for _ in range(2):
        assert refusing(monkeypatch, host).error["code"] == "not_restored"
        assert not host.journal.exists()
    assert "could not be restored" in cli("mig", "status", host=A100).ok().err
    assert "is now undone" in cli("mig", "recover", host=A100).ok().out
    assert host.look() == before


@pytest.mark.parametrize("then", [("recover", "--forget"), ("apply", "1g.10gb*3")])
def test_what_the_driver_refuses_is_in_nobodys_way(monkeypatch: Patch, then: tuple[str, ...], host: World) -> None:
    assert refusing(monkeypatch, host).error["hint"].startswith("try again: gpushare mig recover")
    assert (host.run("mig", *then).code, host.run("mig", "recover").code) == (0, 0)
    assert {path.name for path in host.journal.parent.glob("*.json")} <= {"made.json"}


def test_who_tries_again_later_destroys_nothing_that_was_made_since() -> None:
    """The driver gives ids again: what is in that place now is not what was made then."""
    host = World.new(A100)
    pid, _ = lost(host)
    admin.end_process(host.spec, pid)
    ((_, kept),) = MigLedger(connect(A100)).failed_changes()
    assert kept is not None
    assert kept.proof != NOTHING
    assert (host.run("mig", "destroy", "all").code, host.run("mig", "create", "1g.10gb*2").code) == (0, 0)
    here = host.look()
    host.run("mig", "recover")
    assert host.look()[0].instances == here[0].instances


def test_the_same_command_again_comes_to_its_end_wherever_it_was_killed() -> None:
    for verb, last in (("create", 6), ("destroy", 3)):
        words = (verb, "3g.40gb", "--name", "new") if verb == "create" else (verb, "new")
        for step in range(1, last):
            host = World.new(A100)
            host.run("mig", "disable", "--destroy")
            assert host.run("mig", "enable").code == 0
            if verb == "destroy":
                assert host.run("mig", "create", "3g.40gb", "--name", "new").code == 0
            host.fault("crash-step", step)
            host.run_apart("mig", *words)
            host.clear()
            answer = host.run("mig", *words)
            # One that had come to its end is told so: the name is given, or nobody has it any more.
            assert answer.code in {0, 2, 6}, (verb, step, answer)
            assert len(host.look()[0].instances) == (verb == "create"), (verb, step)
            assert list(host.names()) == (["new"] if verb == "create" else [])
            assert not host.journal.exists()


def full(monkeypatch: Patch) -> None:
    """Let the disk be full for all that gpushare keeps."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(store, "replace_file", refuse)


def test_a_name_that_a_full_disk_kept_is_forgotten_by_recover(cli: Cli, monkeypatch: Patch) -> None:
    host = World.new(A100)
    assert host.run("mig", "enable").code == 0
    before = host.look()
    with monkeypatch.context() as patched:
        real = MigLedger.note_created

        def made(self: MigLedger, one: Any) -> None:
            full(patched)
            real(self, one)

        patched.setattr(MigLedger, "note_created", made)
        assert "could not be undone" in host.run("mig", "create", "3g.40gb", "--name", "new").error["message"]
    assert (host.look(), list(host.names())) == (before, ["new"])
    cli("mig", "recover", host=A100).ok()
    assert (host.look(), list(host.names())) == (before, [])
    assert {path.name for path in host.journal.parent.glob("*.json")} <= {"made.json"}


def test_a_daemon_that_a_full_disk_kept_from_its_return_is_started_by_recover(cli: Cli, monkeypatch: Patch) -> None:
    host = with_an_instance()
    cli("mps", "start", "-g", host.devices()[0][1], "--threads", "40", host=A100).ok()
    before = host.look()
    with monkeypatch.context() as patched:
        real = grant.changing_names

        def changed(*arguments: Any) -> Any:
            full(patched)
            return real(*arguments)

        patched.setattr(grant, "changing_names", changed)
        assert "could not be undone" in host.run("mig", "destroy", "new").error["message"]
    assert host.look() == before
    assert not host.state.daemons
    assert "started the MPS daemon" in cli("mig", "recover", host=A100).ok().out
    assert [daemon.threads for daemon in host.state.daemons] == [40]
    assert {path.name for path in host.journal.parent.glob("*.json")} <= {"made.json"}


@pytest.mark.parametrize("then", [("recover",), ("destroy", "new")])
def test_a_daemon_whose_instance_is_gone_for_good_is_forgotten_by_recover(cli: Cli, then: tuple[str, ...]) -> None:
    """Else an instance that is made there some day would get the daemon of another."""
    host = with_an_instance()
    cli("mps", "start", "-g", host.devices()[0][1], host=A100).ok()
    child = os.fork()
    if not child:
        # Dies when the instance is gone, and its name is not forgotten yet.
        grant.changing_names = lambda *_: os._exit(137)  # type: ignore[assignment]
        try:
            host.run("mig", "destroy", "new")
        finally:
            os._exit(99)
    assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), host.look()[0].instances) == (137, ())
    assert (host.run("mig", *then).code, host.state.daemons) == (0 if then == ("recover",) else 6, [])
    assert not host.journal.exists()
    assert host.names() == {}


def test_what_was_interrupted_is_told_with_the_step_in_which_it_died(host: World) -> None:
    seen = connect(A100)
    (left,) = leftovers(seen, MigLedger(seen))
    entry = json.loads(host.journal.read_text())
    assert (left.id, left.remedy, left.at) == ("mig.interrupted", "gpushare mig recover", entry["step"])
    assert left.at
    assert entry["title"] in left.seen
    assert str(left) == f"{left.seen}: {left.remedy}"


def test_what_another_made_beside_it_meanwhile_is_no_part_of_what_is_lost(cli: Cli) -> None:
    host = World.new(A100)
    pid, _ = lost(host)
    ((_, entry),) = MigLedger(connect(A100)).failed_changes()
    assert entry is not None
    assert unrestored_differences(connect(A100), entry)
    admin.end_process(host.spec, pid)
    # The change is complete after all.
    cli("mig", "apply", "1g.10gb*3", host=A100).ok()
    assert unrestored_differences(connect(A100), entry) == ()
    assert "could not be restored" not in cli("mig", "status", host=A100).ok().err
    cli("mig", "create", "2g.20gb", host=A100).ok()
    assert unrestored_differences(connect(A100), entry) == ()
    place = next(f"{name}:{start}" for name, start, _ in host.look()[0].instances if name == "1g.10gb")
    cli("mig", "destroy", place, host=A100).ok()
    assert unrestored_differences(connect(A100), entry)


def test_a_gpu_that_cannot_be_looked_at_leaves_the_journal_and_is_no_success(monkeypatch: Patch) -> None:
    """What is not known to be undone is not forgotten."""
    host = World.new(A100)
    before = host.look()
    crashed(host, "apply", "1g.10gb*3", step=4)
    real, asked = recover.shape_now, []

    def silent(*arguments: Any) -> GpuShape:
        asked.append(arguments)
        # Its undo is looked for first.
        if len(asked) > 2:
            return real(*arguments)
        raise OperationFailed("the GPU does not answer", "see: gpushare doctor", code="nvml_failed")

    with monkeypatch.context() as patched:
        patched.setattr(recover, "shape_now", silent)
        answer = host.run("mig", "recover")
    assert (answer.code, answer.error["code"], len(asked)) == (1, "nvml_failed", 2)
    assert host.journal.exists()
    assert not list(host.journal.parent.glob("not-restored-*.json"))
    assert (host.run("mig", "recover").code, host.look()) == (0, before)
    assert not host.journal.exists()


@pytest.mark.parametrize("step", range(1, 5))
def test_mig_that_was_turned_off_in_part_is_on_again_with_all_that_was_there(cli: Cli, step: int) -> None:
    host = World.new(TWO)
    cli("mig", "apply", "-g", "all", "3g.40gb", host=TWO).ok()
    before = host.look()
    assert [one.mode for one in before] == [1, 1]
    crashed(host, "disable", "-g", "all", "--destroy", step=step)
    cli("mig", "recover", host=TWO).ok()
    now = host.look()
    # Complete already, in the last step, is kept.
    assert now == before or (step == 4 and [one.mode for one in now] == [0, 0])
    assert not host.journal.exists()
