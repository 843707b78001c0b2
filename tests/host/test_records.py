"""Files that gpushare keeps: whose word counts, and that nobody ever reads half of one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.host import records
from gpushare.host.records import clear_leftovers, kept_mode, open_lock, read_own, read_tail, replace_file


def read_trusted(path: Path) -> object:
    """Return the JSON of a file that is believed; None: it is not, or there is none."""
    try:
        return json.loads(read_own(path))
    except (OSError, ValueError, RecursionError):
        return None


def test_what_was_written_is_read_and_everybody_may(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    before = os.umask(0o077)
    try:
        replace_file(path, '{"a": 1}', durable=True)
    finally:
        os.umask(before)
    assert read_trusted(path) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize(("owner", "trusted"), [(0, True), (1000, True), (1001, False)])
def test_only_our_own_and_roots_word_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, trusted: bool
) -> None:
    path = tmp_path / "one.json"
    path.write_text("{}")
    # Its own names only: open() asks the module os, too.
    told = SimpleNamespace(
        geteuid=lambda: 1000,
        fstat=lambda _: SimpleNamespace(st_uid=owner, st_mode=stat.S_IFREG | 0o644),
        open=os.open,
        O_RDONLY=os.O_RDONLY,
    )
    monkeypatch.setattr(records, "os", told)
    assert read_trusted(path) == ({} if trusted else None)


def test_a_lock_that_the_system_refuses_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(records.fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(tmp_path / "one.json", "{}")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    replace_file(path, "1")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "2", durable=True)
    assert path.read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize("durable", [True, False])
def test_what_must_outlive_a_crash_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path = tmp_path / "one.json"
    done: list[str] = []
    replace = os.replace

    def synced(descriptor: int) -> None:
        opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        # All of the text, and not what a buffer had let through so far.
        done.append(f"sync {opened.name}" if opened == tmp_path else f"sync text {opened.read_text()}")

    def renamed(old: str, new: Path) -> None:
        done.append(f"rename to {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(records.os, "fsync", synced)
    monkeypatch.setattr(records.os, "replace", renamed)
    replace_file(path, '{"a": 1}', durable=durable)
    expected = ['sync text {"a": 1}', "rename to one.json", f"sync {tmp_path.name}"]
    assert done == (expected if durable else ["rename to one.json"])
    replace_file(path, "2")
    assert done[-1] == "rename to one.json"


def test_a_directory_is_synced_without_keeping_it_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        replace_file(tmp_path / "one.json", str(number), durable=True)
        assert read_trusted(tmp_path / "one.json") == number
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_interruption_leaves_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "one.json", "1")
    assert list(tmp_path.iterdir()) == []


def plant(path: Path, kind: str) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_text("{}")
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text('"' + "x" * (5 << 20) + '"')


@pytest.mark.parametrize("kind", ["link", "fifo", "device", "long"])
def test_what_others_plant_in_the_place_of_a_file_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "one.json"
    plant(path, kind)
    assert read_trusted(path) is None
    with pytest.raises(ValueError, match=r"symbolic link|regular file|longer than"):
        read_own(path)


@pytest.mark.parametrize("kind", ["link", "fifo", "device"])
def test_what_others_plant_in_the_place_of_a_lock_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    plant(path, kind)
    with pytest.raises(OperationFailed, match=r"regular file|symbolic links"):
        open_lock(path, "a lock")
    assert (tmp_path / "elsewhere").read_text() == "{}"


def test_a_lock_is_closed_to_others_also_one_that_was_open(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    os.close(open_lock(path, "a lock"))
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    os.close(open_lock(path, "a lock"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_in_tmp_a_file_has_the_sticky_bit() -> None:
    modes = [kept_mode(Path(path), 0o644) for path in ("/tmp/gpushare-1/a", "/var/tmp/a", "/run/gpushare/a", "/tmpa/b")]
    assert modes == [0o1644, 0o1644, 0o644, 0o644]


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="needs systemd-tmpfiles")
def test_systemd_tmpfiles_leaves_what_is_ours_in_tmp(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        replace_file(directory / "one.json", "{}")
        os.close(open_lock(directory / "lock", "a lock"))
        (directory / "stranger").touch()
        # systemd-tmpfiles goes by all times, and a file's ctime cannot be set back.
        rule = tmp_path / "rule.conf"
        rule.write_text(f"d {directory} - - - 1us\n")
        subprocess.run(["systemd-tmpfiles", "--clean", str(rule)], check=True, timeout=20)
        assert {path.name for path in directory.iterdir()} == {"one.json", "lock"}


def test_what_a_crash_left_is_removed_but_nothing_that_is_being_written(tmp_path: Path) -> None:
    left, written, other = tmp_path / ".one-abcdefgh", tmp_path / ".one-12345678", tmp_path / ".two-abcdefgh"
    for path in (left, written, other, tmp_path / ".one-else", tmp_path / "one-abcdefgh"):
        path.write_text("half")
    with open(written, encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        replace_file(tmp_path / "one.json", "1")
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".one-12345678",
            ".one-else",
            ".two-abcdefgh",
            "one-abcdefgh",
            "one.json",
        ]
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".one-else", "one-abcdefgh", "one.json"]


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "missing"])
def test_the_end_of_a_log_is_taken_of_a_file_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "control.log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    assert records.read_tail(path, 100) == ""


def test_the_end_of_a_log_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "control.log"
    path.write_bytes(b"x" * 1000 + b"end")
    assert records.read_tail(path, 5) == "xxend"
    assert records.read_tail(path, 5000) == "x" * 1000 + "end"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_not_believed(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("{}")
    path.chmod(0o644)
    assert read_trusted(path) == {}
    path.chmod(mode)
    assert read_trusted(path) is None
    with pytest.raises(ValueError, match="others may write"):
        read_own(path)


@pytest.mark.parametrize(("mode", "text"), [(0o644, "end"), (0o600, "end"), (0o646, ""), (0o666, "")])
def test_a_log_that_others_may_write_says_nothing(tmp_path: Path, mode: int, text: str) -> None:
    path = tmp_path / "control.log"
    path.write_text("the end")
    path.chmod(mode)
    assert read_tail(path, 3) == text


def test_a_log_may_be_open_to_the_own_group_of_its_owner_only(tmp_path: Path) -> None:
    """With umask 002 a daemon makes its logs so where every user has a group of one's own."""
    path = tmp_path / "control.log"
    path.write_text("the end")
    path.chmod(0o664)
    own = path.stat().st_gid == path.stat().st_uid
    assert read_tail(path, 3) == ("end" if own else "")
    if os.geteuid() == 0:
        os.chown(path, 0, 1234)
        assert read_tail(path, 3) == ""
