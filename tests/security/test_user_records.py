"""Root reads the records of users: only where the directory is that user's own, and never through what a user plants."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.typed import Count, Pid
from gpushare.base.values import dataclass
from gpushare.host import host, users
from gpushare.host.host import UserDirectory
from gpushare.host.identity import Identity, boot_id, pid_space
from gpushare.host.records import has_records
from gpushare.host.store import Kept, RecordStore
from gpushare.host.users import user_directories
from tests.security.conftest import Stranger


@pytest.fixture
def runtime(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, alice: Stranger, mallory: Stranger
) -> Path:
    """Return what stands in for /run/user."""
    directory = tmp_path_factory.mktemp("runtime")
    monkeypatch.setattr(users, "_uids_with_processes", lambda: sorted([alice.uid, mallory.uid]))
    for one in (directory, *directory.parents):
        if one.stat().st_uid == os.geteuid() and str(one) not in {"/", "/tmp", "/dev/shm"}:
            one.chmod(0o755)
    return directory


def found(runtime: Path, temporary: Path) -> list[tuple[int, Path]]:
    return [(one.uid, one.path) for one in user_directories(str(runtime), str(temporary))]


def own(runtime: Path, user: Stranger) -> Path:
    """Give a user its directory below /run/user, as systemd does."""
    directory = runtime / str(user.uid)
    directory.mkdir(mode=0o700)
    os.chown(directory, user.uid, user.uid)
    return directory


@dataclass(frozen=True, kw_only=True)
class Note(Kept):
    pid: Pid
    started: Count
    number: int = 0


NOTES = RecordStore(Note, "swap", "a note")


def text_of(number: int = 0) -> str:
    document = {"schema": 1, "boot": boot_id(), "space": pid_space(), "pid": 1, "started": 1, "number": number}
    return json.dumps(document)


def write(directory: Path, name: str = "1.json", text: str | None = None) -> Path:
    (directory / "swap").mkdir(parents=True, exist_ok=True)
    (directory / "swap" / name).write_text(text_of() if text is None else text)
    return directory


def seen(*users: UserDirectory) -> Any:
    """Return the host of a root to whom these users' processes run, with nothing of its own."""

    def identity(pid: int) -> Identity:
        return Identity(pid, 1)

    def describe(_pid: int) -> Any:
        return SimpleNamespace(uid=users[0].uid)

    return SimpleNamespace(
        uid=0,
        run_directory=Path("/nonexistent"),
        run_directories=(),
        shared_run_directories=(),
        user_directories=lambda: users,
        processes=SimpleNamespace(identity=identity, describe=describe),
    )


def numbers(*users: UserDirectory) -> list[int]:
    return [note.number for note in NOTES.all(seen(*users))]


def test_the_directories_of_users_are_found_where_gpushare_puts_them(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger
) -> None:
    home = own(runtime, alice)
    temporary = sticky / f"gpushare-{mallory.uid}"
    alice.does(lambda: write(home / "gpushare"))
    mallory.does(lambda: write(temporary))
    both = {alice.uid: home / "gpushare", mallory.uid: temporary}
    assert dict(found(runtime, sticky)) == both
    first, second = sorted(user_directories(str(runtime), str(sticky)), key=lambda one: one.uid == mallory.uid)
    (note,) = NOTES.all(seen(first))
    assert (note.path, note.keeper_uid) == (home / "gpushare" / "swap" / "1.json", alice.uid)
    # What names a process of another user says nothing.
    assert [record.keeper_uid for record in NOTES.all(seen(first, second))] == [alice.uid]
    (unread,) = NOTES.unread(seen(first, second))
    assert (unread.uid, unread.why) == (mallory.uid, "it names process 1, which belongs to another user")


def test_a_directory_in_the_name_of_another_counts_for_nothing(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger
) -> None:
    mallory.does(lambda: write(sticky / f"gpushare-{alice.uid}"))
    mallory.does(lambda: write(sticky / "gpushare-0"))
    mallory.does(lambda: write(sticky / "gpushare-00012"))
    assert found(runtime, sticky) == []


def test_links_are_not_followed(runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger) -> None:
    alice.does(lambda: write(sticky / "real"))
    home = own(runtime, mallory)
    mallory.does(lambda: (home / "gpushare").symlink_to(sticky / "real"))
    mallory.does(lambda: (sticky / f"gpushare-{mallory.uid}").symlink_to(sticky / "real"))
    assert found(runtime, sticky) == []
    directory = UserDirectory(mallory.uid, home / "below", mallory.uid)

    def plant() -> None:
        (home / "below").mkdir()
        (home / "below" / "swap").symlink_to(sticky / "real" / "swap")

    mallory.does(plant)
    assert numbers(directory) == []


def test_what_a_user_plants_is_not_read(runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger) -> None:
    home = own(runtime, mallory)
    secret = sticky / "secret.json"
    secret.write_text('{"of": "root"}')

    def plant() -> None:
        directory = write(home / "gpushare") / "swap"
        os.mkfifo(directory / "2.json")
        (directory / "3.json").symlink_to(secret)
        (directory / "4.json").write_text("{" * 60_000)
        (directory / "5.json").write_bytes(b" " * (5 << 20))
        (directory / "6.json").write_text(text_of(6))
        (directory / "6.json").chmod(0o666)
        (directory / "7.json").mkdir()
        (directory / "8.json").write_text(text_of(8))
        os.link(directory / "8.json", directory / "9.json")
        (directory / "a.json").write_text(text_of(10).replace('"started"', '"other"'))
        for number in range(1000):
            (directory / f"x{number:04}.json").write_text("[]")

    mallory.does(plant)
    (directory,) = user_directories(str(runtime), str(sticky))
    assert numbers(directory) == [0]
    whys = {unread.path.name: unread.why for unread in NOTES.unread(seen(directory))}
    assert len(whys) == 256
    assert "too many" in whys["swap"]
    assert whys["4.json"] == "it is not JSON"
    assert whys["x0001.json"] == "it is of another version"


def test_a_directory_that_others_may_write_counts_for_nothing(runtime: Path, sticky: Path, alice: Stranger) -> None:
    path = sticky / f"gpushare-{alice.uid}"
    alice.does(lambda: write(path))
    path.chmod(0o777)
    assert found(runtime, sticky) == []
    path.chmod(0o755)
    (path / "swap").chmod(0o777)
    (directory,) = user_directories(str(runtime), str(sticky))
    assert numbers(directory) == []


def test_what_a_user_has_mounted_is_not_entered(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of the user's own (FUSE) would never answer."""
    homes = own(runtime, alice), own(runtime, mallory)
    for user, home in zip((alice, mallory), homes, strict=True):
        user.does(lambda home=home: write(home / "gpushare"))  # type: ignore[misc]
    real = users._mount_types()
    fuse = {**real, str(homes[0]): "fuse.evil", str(homes[1] / "gpushare" / "swap"): "fuse.evil"}
    monkeypatch.setattr(users, "_mount_types", lambda: fuse)
    assert found(runtime, sticky) == []
    monkeypatch.setattr(users, "_mount_types", lambda: {**real, str(homes[0]): "tmpfs"})
    assert len(found(runtime, sticky)) == 2


def test_mounts_are_read() -> None:
    if subprocess.run(["findmnt", "-n", "/proc"], capture_output=True, check=False).returncode == 0:
        assert users._mount_types()["/proc"] == "proc"


def test_whether_there_are_records_is_not_looked_up_through_a_link(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger
) -> None:
    """A link could lead root to a file system that never answers."""
    home = own(runtime, alice) / "gpushare"
    alice.does(lambda: write(home))
    (user,) = user_directories(str(runtime), str(sticky))
    assert has_records(seen(user), "swap")
    assert not has_records(seen(user), "pause")
    elsewhere = sticky / "elsewhere"
    alice.does(lambda: write(elsewhere))
    alice.does(lambda: (home / "pause").symlink_to(elsewhere / "swap"))
    assert not has_records(seen(user), "pause")
    alice.does((home / "swap" / "1.json").unlink)
    assert not has_records(seen(user), "swap")


def test_a_user_without_a_process_is_not_looked_up(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may make thousands of names in /tmp, but not become those users."""
    monkeypatch.undo()
    for user in (alice, mallory):
        user.does(lambda user=user: write(sticky / f"gpushare-{user.uid}"))  # type: ignore[misc]
    with alice.keeps(lambda: None):
        assert found(runtime, sticky) == [(alice.uid, sticky / f"gpushare-{alice.uid}")]


def shells(runtime: Path, sticky: Path, user: Stranger, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return where gpushare looks in a login shell of a user, and in one without a session."""
    monkeypatch.setattr(host, "TEMPORARY", str(sticky))
    monkeypatch.setattr(host, "RUNTIME", str(runtime))
    monkeypatch.setenv("HOME", str(user.home))
    for name in ("TMPDIR", "GPUSHARE_RUN_DIR", "GPUSHARE_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = []
    for session in (True, False):
        if session:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / str(user.uid)))
        else:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        found.append(user.does(lambda: str(host.local_host().run_directory)))
    return found


def test_a_user_has_one_run_directory_and_nobody_else_gets_into_it(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = own(runtime, alice)
    place = sticky / f"gpushare-{alice.uid}"
    assert shells(runtime, sticky, alice, monkeypatch) == [str(place)] * 2
    alice.does(lambda: (os.umask(0), host.make_private_directory(place / "mps" / "x" / "pipe")))
    alice.does(lambda: write(session / "gpushare"))
    assert shells(runtime, sticky, alice, monkeypatch) == [str(place)] * 2
    assert [stat.S_IMODE(one.stat().st_mode) for one in (place, place / "mps" / "x" / "pipe")] == [0o700, 0o755]
    with pytest.raises(AssertionError, match="Permission"):
        mallory.does(lambda: os.listdir(place / "mps"))
    # To root it is one of this user's directories.
    assert found(runtime, sticky) == [(alice.uid, session / "gpushare"), (alice.uid, place)]


def test_a_name_that_another_user_has_made_first_keeps_nobody_from_working(
    runtime: Path, sticky: Path, alice: Stranger, mallory: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = own(runtime, alice)
    place = sticky / f"gpushare-{alice.uid}"
    mallory.does(lambda: write(place))
    assert shells(runtime, sticky, alice, monkeypatch) == [str(session / "gpushare")] * 2
    # When the name is free again, its records are still known.
    alice.does(lambda: write(session / "gpushare"))
    shutil.rmtree(place)
    assert shells(runtime, sticky, alice, monkeypatch) == [str(session / "gpushare")] * 2
    mallory.does(lambda: write(place))
    # Without a session it is in the home directory.
    shutil.rmtree(session)
    assert shells(runtime, sticky, alice, monkeypatch) == [f"{alice.home}/.local/state/gpushare/run"] * 2
    with pytest.raises(AssertionError, match="belongs to user"):
        alice.does(lambda: host.make_private_directory(place))
