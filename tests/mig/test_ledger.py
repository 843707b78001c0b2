"""The journal of MIG changes: what is torn or foreign is refused, what is of another boot over; one change at a time."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from gpushare.base.errors import InUse, OperationFailed
from gpushare.connect import connect
from gpushare.host import identity, store
from gpushare.host.identity import boot_id, pid_space
from gpushare.mig import ledger as mig_ledger
from gpushare.mig.ledger import MigLedger
from gpushare.mig.shape import ComputeShape, GpuShape, InstanceShape
from tests.cli.drive import World, environment, start_real, until
from tests.errors import fails

H200 = "sim:h200"
INSTANCE = InstanceShape("3g.71gb", 4, 4, (ComputeShape(3, 0),), "train")
BEFORE = GpuShape(uuid="GPU-1", index=0, mig_enabled=False, instances=())
AFTER = GpuShape(uuid="GPU-1", index=0, mig_enabled=True, instances=(INSTANCE,))


@pytest.fixture
def ledger() -> MigLedger:
    return MigLedger(connect(H200))


@pytest.fixture
def path(ledger: MigLedger) -> Path:
    """Return the file of a change that died at its second step."""
    with ledger.locked():
        ledger.begin("apply 3g.71gb", [BEFORE], [AFTER], names=["train"])
        ledger.note("first")
        ledger.note("second")
    return ledger._path


def test_a_change_that_died_is_told_whole(path: Path) -> None:
    left = MigLedger(connect(H200)).interrupted_change()
    assert (left.title, left.step, left.pid) == ("apply 3g.71gb", "second", os.getpid())
    assert (left.before, left.after, left.names) == ((BEFORE,), (AFTER,), ("train",))
    # Of a user's word others may read, and not write.
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_change_that_ended_leaves_nothing(ledger: MigLedger, path: Path) -> None:
    with ledger.locked():
        ledger.end()
        ledger.end()
        # After its end there is nothing to note.
        ledger.note("late")
    assert not path.exists()
    assert sorted(one.name for one in path.parent.iterdir()) == ["lock"]
    assert ledger.interrupted_change() is None


def test_a_change_that_goes_on_is_not_one_that_died(ledger: MigLedger) -> None:
    other = MigLedger(connect(H200))
    with ledger.locked():
        ledger.begin("apply", [BEFORE], [AFTER])
        assert other.is_running()
        assert other.interrupted_change() is None
        # Who holds the lock sees it.
        assert ledger.current_change() is not None
    assert not other.is_running()
    assert other.interrupted_change() is not None


def test_who_has_another_run_directory_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, and a user to whom mig/config is open."""
    node = tmp_path / "nvidia-cap1"
    node.touch()
    monkeypatch.setattr(mig_ledger, "CONFIG_NODE", node)
    monkeypatch.setattr(mig_ledger, "_LOCK_SECONDS", 0.0)
    root, user = (
        MigLedger(cast("Any", SimpleNamespace(is_simulated=False, run_directory=tmp_path / name)))
        for name in ("root", "user")
    )
    with root.locked():
        with pytest.raises(InUse, match="another gpushare") as refused, user.locked():
            pass
        assert refused.value.hint == f"see which: fuser -v {node}"
    with user.locked():
        pass
    node.unlink()
    with root.locked(), user.locked():
        pass


def test_two_who_ask_at_once_do_not_take_each_other_for_a_change(path: Path) -> None:
    import fcntl

    asking = os.open(path.parent / "lock", os.O_RDONLY)
    try:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not MigLedger(connect(H200)).is_running()
    finally:
        os.close(asking)


def whole() -> dict[str, Any]:
    return {
        "title": "x",
        "pid": 1,
        "started": 1,
        "boot": boot_id(),
        "space": pid_space(),
        "before": [],
        "after": [],
        "names": [],
        "step": None,
        "proof": {"made": [], "begun": None},
        "daemons": [],
        "schema": 1,
    }


def broken() -> Iterator[tuple[str, bytes]]:
    good = whole()
    yield "empty", b""
    yield "torn", json.dumps(good).encode()[:-20]
    yield "not JSON", b"\x00\xff\xfe"
    yield "a list", b"[1, 2]"
    yield "a number", b"7"
    yield "null", b"null"
    yield "deep", b"[" * 100_000
    for key in sorted(good.keys() - {"space"}):
        yield f"without {key}", json.dumps({name: value for name, value in good.items() if name != key}).encode()
    yield "a newer one", json.dumps({**good, "schema": 2, "more": 1}).encode()
    gpu = {"uuid": "u", "index": 0, "mig_enabled": True, "instances": []}
    for what, change in {
        "after without the GPU": {"before": [gpu]},
        "before without the GPU": {"after": [gpu]},
        "another GPU after": {"before": [gpu], "after": [{**gpu, "uuid": "other"}]},
        "a title that is a number": {"title": 7},
        "a step that is a list": {"step": [1]},
        "a pid that is text": {"pid": "1"},
        "a proof without anything": {"proof": {}},
    }.items():
        yield what, json.dumps({**good, **change}).encode()
    yield "a shape that is none", json.dumps({**good, "before": ["GPU-1"]}).encode()


@pytest.mark.parametrize(("what", "content"), list(broken()), ids=[what for what, _ in broken()])
def test_what_is_no_journal_is_not_taken_for_none(ledger: MigLedger, path: Path, what: str, content: bytes) -> None:
    path.write_text(json.dumps(whole()))
    assert ledger.interrupted_change() is not None
    path.write_bytes(content)
    for look in (ledger.interrupted_change, ledger.current_change):
        with pytest.raises(OperationFailed) as caught:
            look()
        assert caught.value.code == "journal_unreadable", what
        assert str(path) in caught.value.message
    assert path.read_bytes() == content


def test_one_that_cannot_be_read_is_the_runners_business_while_it_runs(ledger: MigLedger, path: Path) -> None:
    path.write_bytes(b"{")
    with MigLedger(connect(H200)).locked():
        assert ledger.interrupted_change() is None


def test_a_journal_that_cannot_be_opened_is_not_taken_for_none(ledger: MigLedger, path: Path) -> None:
    path.unlink()
    path.mkdir()
    with fails(OperationFailed, "journal_unreadable", match="Is a directory"):
        ledger.interrupted_change()


def test_of_another_boot_it_tells_nothing(monkeypatch: pytest.MonkeyPatch, ledger: MigLedger, path: Path) -> None:
    """Its instances are gone."""
    boot = path.parent / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(identity, "_BOOT_ID", boot)
    assert ledger.interrupted_change() is None
    assert ledger.current_change() is None
    with ledger.locked():
        ledger.begin("apply", [BEFORE], [AFTER])
    assert MigLedger(connect(H200)).interrupted_change() is not None


def test_of_another_user_it_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, ledger: MigLedger, path: Path
) -> None:
    assert ledger.interrupted_change() is not None
    owner, real = path.stat().st_uid, os.fstat

    class Foreign:
        def __init__(self, found: os.stat_result) -> None:
            self._found = found
            self.st_uid = owner + 4711

        def __getattr__(self, name: str) -> Any:
            return getattr(self._found, name)

    def foreign_file(found: os.stat_result) -> Any:
        return Foreign(found) if stat.S_ISREG(found.st_mode) else found

    monkeypatch.setattr(mig_ledger.os, "fstat", lambda number: foreign_file(real(number)))
    with fails(OperationFailed, "journal_unreadable", match=f"belongs to user {owner + 4711}"):
        ledger.interrupted_change()


def test_a_change_is_rolled_back_when_its_journal_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    host = World.new(H200)
    before, written = host.look(), 0
    real = store.replace_file

    def full_at_the_fourth(path: Path, text: str, *, durable: bool, mode: int) -> None:
        nonlocal written
        written += 1
        if written == 4:
            raise OSError(28, "No space left on device")
        real(path, text, durable=durable, mode=mode)

    monkeypatch.setattr(store, "replace_file", full_at_the_fourth)
    answer = host.run("mig", "apply", "3g.71gb*2")
    assert (answer.code, answer.error["code"]) == (1, "journal_unwritable")
    assert answer.error["message"].endswith("GPU 0 is as before")
    assert host.look() == before
    assert not host.journal.exists()


# -- one at a time ---------------------------------------------------------------------------------

HOLDING = """
import sys
from gpushare.connect import connect
from gpushare.mig.ledger import MigLedger
with MigLedger(connect("sim:h200")).locked():
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def held() -> Iterator[subprocess.Popen[str]]:
    """Yield another process that holds the lock until it is told something."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.communicate(timeout=120)


def test_another_process_holds_the_lock(
    held: subprocess.Popen[str], ledger: MigLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mig_ledger, "_LOCK_SECONDS", 0.05)
    assert ledger.is_running()
    with fails(InUse, "locked", hint="fuser"), ledger.locked():
        pytest.fail("two at a time")
    held.communicate("go\n", timeout=120)
    with ledger.locked():
        assert not held.poll()


def test_two_changes_at_once_come_one_after_the_other() -> None:
    """Both want the whole GPU: the second is planned again when the first is done, and finds no room."""
    host = World.new(H200)
    assert host.run("mig", "enable").code == 0
    started = [start_real("mig", "create", "-o", "json", *words) for words in (["4g.71gb"], ["7g.141gb"], ["4g.71gb"])]
    answers = [one.result() for one in started]
    assert sorted(answer.code for answer in answers) == [0, 19, 19], answers
    assert len(host.look()[0].instances) == 1
    assert not host.journal.exists()


def test_a_change_that_waits_is_ended_by_ctrl_c(held: subprocess.Popen[str]) -> None:
    import signal

    host = connect(H200)
    started = start_real("mig", "enable")
    lock = str(host.run_directory / "mig" / "lock")
    # Those that are closed meanwhile are left out.
    until(lambda: lock in {file.path for file in psutil.Process(started.pid).open_files()}, "it waits for the lock")
    started.signal(signal.SIGINT)
    answer = started.result()
    assert answer.code == 130, answer
    assert "Traceback" not in answer.err
    held.communicate("go\n", timeout=120)
    assert host.nvml.gpu(0).mig_enabled is False


# -- the lock itself -------------------------------------------------------------------------------


def test_without_the_lock_nobody_is_changing_anything(ledger: MigLedger, path: Path) -> None:
    """As after somebody has cleared up: what died in the middle is told all the same."""
    (path.parent / "lock").unlink()
    assert ledger.is_running() is False
    assert ledger.interrupted_change() is not None


def test_each_word_of_the_journal_and_its_end_are_on_the_disk(
    ledger: MigLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash of the machine would bring an entry back that is done, or lose the step that was begun."""
    durable: list[str] = []
    real = store.replace_file

    def replaced(path: Path, text: str, *, durable: bool, mode: int) -> None:
        assert durable
        real(path, text, durable=durable, mode=mode)

    monkeypatch.setattr(store, "replace_file", replaced)
    monkeypatch.setattr(mig_ledger, "sync_directory", lambda path: durable.append(path.name))
    with ledger.locked():
        ledger.begin("apply", [BEFORE], [AFTER])
        ledger.note("first")
        ledger.end()
    assert durable == ["mig"]
