"""Whether a file system has room left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.run.several import is_disk_full


@pytest.mark.parametrize(
    ("blocks", "free", "available", "uid", "full"),
    [
        (100, 5, 0, 1000, True),
        (100, 5, 1, 1000, False),
        # The blocks that are kept for root are there for root.
        (100, 5, 0, 0, False),
        (100, 0, 0, 0, True),
        # Some file systems tell nothing.
        (0, 0, 0, 0, False),
        (0, 0, 0, 1000, False),
    ],
)
def test_full_is_when_no_block_is_left_for_this_user(
    monkeypatch: pytest.MonkeyPatch, blocks: int, free: int, available: int, uid: int, full: bool
) -> None:
    found = SimpleNamespace(f_blocks=blocks, f_bfree=free, f_bavail=available)
    monkeypatch.setattr(os, "fstatvfs", lambda _descriptor: found)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert is_disk_full(3) is full


def test_a_real_file(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        descriptor = file.fileno()
        assert not is_disk_full(descriptor)
    # What cannot be asked is not full.
    assert not is_disk_full(descriptor)
