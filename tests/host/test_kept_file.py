"""Files that gpushare keeps: whose word counts, and that nobody ever reads half of one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.host import kept_file
from gpushare.host.kept_file import read_trusted, replace_file


def test_what_was_written_is_read_and_everybody_may(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    before = os.umask(0o077)
    try:
        replace_file(path, '{"a": 1}', durable=True)
    finally:
        os.umask(before)
    assert read_trusted(path) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize(("owner", "trusted"), [(0, True), (1000, True), (1001, False)])
def test_only_our_own_and_roots_word_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, trusted: bool
) -> None:
    path = tmp_path / "one.json"
    path.write_text("{}")
    # Its own names only: open() asks the module os, too.
    told = SimpleNamespace(geteuid=lambda: 1000, fstat=lambda _: SimpleNamespace(st_uid=owner))
    monkeypatch.setattr(kept_file, "os", told)
    assert read_trusted(path) == ({} if trusted else None)


@pytest.mark.parametrize("text", ["", '{"a": ', "\x00", "[" * 100_000])
def test_what_cannot_be_understood_is_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    assert read_trusted(path) is None
    assert read_trusted(tmp_path / "none.json") is None
    assert read_trusted(tmp_path) is None


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    replace_file(path, "1")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "2", durable=True)
    assert path.read_text() == "1"
    assert [one.name for one in tmp_path.iterdir()] == ["one.json"]
