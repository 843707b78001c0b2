"""The store of records: whose word a record is, what is not believed, and what is said of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gpushare.base.errors import NoPermission, OperationFailed
from gpushare.base.typed import Count, Pid, Shown
from gpushare.base.values import dataclass
from gpushare.connect import connect
from gpushare.host import store as module
from gpushare.host.host import Host, UserDirectory
from gpushare.host.identity import Identity, boot_id, identity_of, pid_space, uptime, wall_time
from gpushare.host.store import Ahead, Kept, Past, RecordStore, any_lives, named_processes
from tests.clock import step_the_clock

ALICE, BOB = 4001, 4002


@dataclass(frozen=True, kw_only=True)
class Note(Kept):
    pid: Pid
    started: Count
    name: Shown | None = None
    uid: int | None = None
    since: Past = 0.0
    until: Ahead = 0.0
    keeper: Identity | None = None
    others: tuple[Identity, ...] = ()


NOTES = RecordStore(Note, "notes", "a note")
LASTING = RecordStore(Note, "notes", "a note", survives_reboot=True)


def mine() -> Identity:
    found = identity_of(os.getpid())
    assert found is not None
    return found


def note(host: Host, key: int | str = 1, **more: Any) -> Note:
    pid, started = mine()
    return Note(**{"pid": pid, "started": started, "path": NOTES.path(host, key), **more})


def document(**more: Any) -> dict[str, Any]:
    return {"schema": 1, "boot": boot_id(), "space": pid_space(), "pid": mine().pid, "started": mine().started, **more}


def test_a_record_is_read_as_it_was_written_and_forgotten(host: Host) -> None:
    value = note(host, name="train", uid=0, since=1.5, others=(Identity(8, 9),))
    NOTES.write(value)
    assert NOTES.all(host) == NOTES.find(host, 1) == [value]
    (found,) = NOTES.all(host)
    assert (found.path, found.keeper_uid) == (host.run_directory / "notes" / "1.json", None)
    assert json.loads(found.path.read_text()) == document(
        name="train", uid=0, since=1.5, until=0.0, keeper=None, others=[[8, 9]]
    )
    NOTES.forget(value.path)
    NOTES.forget(value.path)
    assert NOTES.all(host) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("", "it is empty"),
        ("{", "it is not JSON"),
        ("[]", "it is of another version"),
        ("[" * 100_000, "it is not JSON"),
        ("1" * 5000, "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        ({"schema": 2}, "it is of another version"),
        ({"schema": None}, "it is of another version"),
        ({"boot": None}, "it does not say of which boot it is"),
        ({"boot": 7}, "it does not say of which boot it is"),
        ({"pid": 0}, "0 is not a valid value"),
        ({"started": -1}, "-1 is not a valid value"),
        ({"since": 1e12}, "1000000000000.0 is not a valid value"),
        ({"since": -1.0}, "-1.0 is not a valid value"),
        ({"until": 1e12}, "1000000000000.0 is not a valid value"),
        ({"since": float("nan")}, "nan is not a valid value"),
        ({"name": "\x1b[2J"}, "is not a valid value"),
        ({"others": [[1, 1], [1, 2]]}, "a process is named twice"),
        ({"more": 1}, "an object with other keys"),
        ({"space": 1}, "it was written in another PID namespace"),
    ],
)  # fmt: skip
def test_what_nobody_writes_says_nothing_and_is_named(host: Host, change: Any, why: str) -> None:
    NOTES.write(note(host))
    path = NOTES.path(host, 1)
    data = change if isinstance(change, (str, bytes)) else json.dumps(document(**change))
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    assert NOTES.all(host) == NOTES.find(host, 1) == []
    (unread,) = NOTES.unread(host)
    assert (unread.path, unread.uid) == (path, host.uid)
    assert why in unread.why
    assert path.exists()


def test_a_record_of_an_earlier_boot_says_nothing_and_is_swept(host: Host) -> None:
    NOTES.write(note(host))
    path = NOTES.path(host, 1)
    path.write_text(json.dumps(document(boot="earlier")))
    assert (NOTES.all(host), NOTES.unread(host)) == ([], [])
    NOTES.sweep(host)
    assert not path.exists()
    # Of any version.
    path.write_text(json.dumps({"schema": 2, "boot": "earlier"}))
    assert NOTES.unread(host) == []


def test_one_that_outlives_reboots_says_so_after_one(host: Host) -> None:
    value = note(host, path=LASTING.path(host, 1))
    LASTING.write(value)
    assert value.path.is_relative_to(host.state_directory)
    assert "boot" not in json.loads(value.path.read_text())
    assert LASTING.all(host) == [value]


def test_records_of_what_has_ended_are_swept_and_others_stay(host: Host) -> None:
    NOTES.write(note(host, 1))
    NOTES.write(note(host, 2, started=mine().started + 1))
    # One of its processes lives.
    NOTES.write(note(host, 3, started=mine().started + 1, keeper=mine()))
    NOTES.path(host, 4).write_text(json.dumps(document(space=1)))
    NOTES.sweep(host)
    assert sorted(path.stem for path in NOTES.path(host, 1).parent.glob("*.json")) == ["1", "3", "4"]
    NOTES.sweep(host, lambda _: True)
    assert sorted(path.stem for path in NOTES.path(host, 1).parent.glob("*.json")) == ["4"]


def test_the_processes_that_a_record_names() -> None:
    named = Note(pid=1, started=2, keeper=Identity(3, 4), others=(Identity(5, 6), Identity(7, 8)))
    assert named_processes(named) == {Identity(1, 2), Identity(3, 4), Identity(5, 6), Identity(7, 8)}
    assert any_lives(connect("sim:h200"), Note(pid=1, started=0, others=(mine(),)))


@pytest.mark.parametrize("what", ["link", "hard link", "fifo", "directory", "open to all"])
def test_only_a_regular_file_of_this_user_is_read(host: Host, what: str) -> None:
    NOTES.write(note(host))
    path, aside = NOTES.path(host, 1), host.run_directory / "aside"
    if what == "open to all":
        path.chmod(0o666)
    elif what == "hard link":
        os.link(path, aside)
    else:
        path.rename(aside)
        {"link": lambda: path.symlink_to(aside), "fifo": lambda: os.mkfifo(path), "directory": path.mkdir}[what]()
    assert NOTES.all(host) == []
    assert [unread.path for unread in NOTES.unread(host)] == [path]


def test_a_directory_that_is_a_link_is_not_entered(host: Host) -> None:
    NOTES.write(note(host))
    directory = NOTES.path(host, 1).parent
    directory.rename(host.run_directory / "aside")
    directory.symlink_to(host.run_directory / "aside")
    assert (NOTES.all(host), NOTES.find(host, 1)) == ([], [])


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_one_that_cannot_be_written_leaves_the_earlier_one(
    host: Host, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    value = note(host)
    NOTES.write(value)

    def refuse(*_: object, **__: object) -> None:
        raise error(28, "No space left on device")

    monkeypatch.setattr(module, "replace_file", refuse)
    with pytest.raises((OperationFailed, NoPermission), match="a note"):
        NOTES.write(note(host, name="other"))
    assert NOTES.all(host) == [value]


def test_a_step_of_the_clock_changes_no_age(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    value = note(host, since=uptime())
    NOTES.write(value)
    before = wall_time(value.since)
    step_the_clock(monkeypatch, 86400)
    assert NOTES.all(host) == [value]
    assert wall_time(value.since) == pytest.approx(before + 86400, abs=5)


# -- what root reads of users ------------------------------------------------------------------------------------------


@pytest.fixture
def users(tmp_path: Path) -> Callable[..., Any]:
    """Return what makes a root to whom PIDs from 100 are alice's, and from 200 bob's, who both keep notes."""
    directories = [UserDirectory(uid, tmp_path / str(uid), os.geteuid()) for uid in (ALICE, BOB)]
    for one in directories:
        (one.path / "notes").mkdir(parents=True)

    def look(*, ended: frozenset[int] = frozenset()) -> Any:
        def identity(pid: int) -> Identity | None:
            return None if pid in ended else Identity(pid, 1)

        return SimpleNamespace(
            uid=0,
            run_directory=tmp_path / "root",
            shared_run_directories=(),
            user_directories=lambda: directories,
            processes=SimpleNamespace(
                identity=identity,
                describe=lambda pid: SimpleNamespace(uid=BOB if 200 <= pid < 300 else ALICE),
                parent=lambda _: None,
            ),
        )

    look.directories = directories  # type: ignore[attr-defined]
    return look


def plant(users: Any, number: int = 0, name: str = "1", **more: Any) -> None:
    path = users.directories[number].path / "notes" / f"{name}.json"
    uid = users.directories[number].uid
    path.write_text(json.dumps(document(**{"pid": 100, "started": 1, "uid": uid, **more})))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"pid": 200}, "it names process 200, which belongs to another user"),
        ({"others": [[200, 1]]}, "it names process 200, which belongs to another user"),
        ({"keeper": [200, 1]}, "it names process 200, which belongs to another user"),
        ({"uid": BOB}, f"it says that it is of user {BOB}"),
        ({"uid": 0}, "it says that it is of user 0"),
        # Else it could be that of a job of anybody, by name.
        ({"uid": None}, "it says that it is of user None"),
        ({"started": 2}, "none of the processes that it names runs"),
        ({"pid": 101}, "none of the processes that it names runs"),
    ],
)
def test_a_users_record_speaks_of_that_user_only(users: Any, more: dict[str, Any], why: str) -> None:
    plant(users)
    host = users(ended=frozenset({101}))
    assert [(record.pid, record.keeper_uid) for record in NOTES.all(host)] == [(100, ALICE)]
    plant(users, **more)
    assert NOTES.all(host) == []
    assert [(record.uid, record.why) for record in NOTES.unread(host)] == [(ALICE, why)]


def test_users_records_are_not_looked_up_by_key_nor_without_being_asked_for(users: Any) -> None:
    """Else the record of a user would stand for root's own of the same PID."""
    plant(users, name="100")
    assert len(NOTES.all(users())) == 1
    assert NOTES.find(users(), 100) == NOTES.all(users(), users=False) == NOTES.all(users(), shared=False) == []
    # Nor does root remove it.
    NOTES.sweep(users(ended=frozenset({100})))
    assert (users.directories[0].path / "notes" / "100.json").exists()


def test_what_root_reads_of_a_user_is_bounded(users: Any) -> None:
    for number in range(300):
        plant(users, name=f"{number:03}", pid=1000 + number)
    plant(users, number=1, pid=200)
    found = NOTES.all(users())
    assert [one.keeper_uid for one in found].count(ALICE) == 256
    assert [one.keeper_uid for one in found].count(BOB) == 1
    (unread,) = NOTES.unread(users())
    assert unread.why == "44 of its 300 files are too many to be read"


def test_a_process_counts_in_one_record_and_is_looked_up_once(users: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(users, name="1")
    plant(users, name="2", pid=101, others=[[100, 1]])
    assert [record.pid for record in NOTES.all(users())] == [100]
    assert [record.why for record in NOTES.unread(users())] == ["it names process 100, which another record names, too"]
    monkeypatch.setattr(module, "_MOST_NAMED", 3)
    plant(users, name="2", pid=101, others=[[102, 1], [103, 1]])
    assert [record.why for record in NOTES.unread(users())] == ["with those before it names more than 3 processes"]


def test_a_directory_that_cannot_be_read_is_said(host: Host) -> None:
    NOTES.write(note(host))
    directory = NOTES.path(host, 1).parent
    directory.chmod(0o775)
    assert NOTES.all(host) == []
    assert [record.path for record in NOTES.unread(host)] == [directory]


@pytest.mark.parametrize(("mode", "faults"), [(0o600, []), (0o644, ["Permission denied"])])
def test_a_file_of_root_that_is_closed_to_this_user_is_no_fault_where_root_keeps_such_to_itself(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, faults: list[str]
) -> None:
    store = RecordStore(Note, "notes", "the note", survives_reboot=True, mode=mode)
    shared = replace(host, uid=ALICE, shared_state_directories=(tmp_path / "root",))
    store.write(note(host, path=tmp_path / "root" / "notes" / "1.json"))
    refused = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(module, "read_own", Mock(side_effect=refused))
    assert store.all(shared) == []
    assert [record.why for record in store.unread(shared)] == faults
    # This user's own is one.
    store.write(note(host, path=store.path(host, 1)))
    assert [record.why for record in store.unread(shared)] == ["Permission denied", *faults]


def test_a_large_file_and_many_large_files_are_not_read(users: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(users)
    path = users.directories[0].path / "notes" / "1.json"
    path.write_text(path.read_text() + " " * (64 << 10))
    assert NOTES.all(users()) == []
    path.unlink()
    monkeypatch.setattr(module, "USERS_BYTES", 2000)
    for number in range(20):
        plant(users, name=f"{number:02}")
    found = NOTES.all(users())
    assert 0 < len(found) < 20
    assert NOTES.unread(users())
