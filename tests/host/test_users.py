"""What is mounted where, as root looks before it enters a directory of a user."""

from __future__ import annotations

import pytest

from gpushare.host import users


def test_only_whole_lines_tell_what_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "36 35 98:0 / /run/user/1000 rw,nosuid - tmpfs tmpfs rw",
        # The later one lies over the earlier one.
        "37 36 98:0 / /run/user/1000 rw shared:1 - fuse.sshfs host:/ rw",
        "38 35 98:0 / /mnt/no-type rw",
        "39 35 98:0 / - ext4 /dev/sda rw",
        "40 - ext4 /dev/sda rw",
        "",
    )
    monkeypatch.setattr(users, "read_proc", lambda _: "\n".join(lines).encode())
    assert users._mount_types() == {"/run/user/1000": "fuse.sshfs"}
    monkeypatch.setattr(users, "read_proc", lambda _: None)
    assert users._mount_types() == {}
