"""Who may enter the pipe directory of a daemon: by mode, and by a POSIX access control list."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

import pytest

from gpushare.base.errors import NotFound, NotSupported
from gpushare.host.capabilities import user_name
from gpushare.host.host import make_private_directory
from gpushare.mps.home import pipe_users, set_pipe_users
from tests.errors import fails


@pytest.fixture
def pipe(sim_dir: Path) -> Path:
    """Return a pipe directory as a daemon's home has it."""
    directory = sim_dir / "pipe"
    make_private_directory(directory)
    return directory


def mode(directory: Path) -> int:
    return stat.S_IMODE(directory.stat().st_mode)


def test_everybody_by_default(pipe: Path) -> None:
    assert pipe_users(pipe) == ()
    assert mode(pipe) == 0o755


def test_named_users_and_back_to_everybody(pipe: Path) -> None:
    set_pipe_users(pipe, ["nobody", str(pwd.getpwnam("daemon").pw_uid)])
    assert pipe_users(pipe) == ("daemon", "nobody")
    # The bits of the group are the mask of the list; others have none.
    assert mode(pipe) & 0o007 == 0
    # A daemon's home is still one: nobody else may write.
    make_private_directory(pipe)
    set_pipe_users(pipe, ["nobody"])
    assert pipe_users(pipe) == ("nobody",)
    set_pipe_users(pipe, [])
    assert pipe_users(pipe) == ()
    assert mode(pipe) == 0o755
    assert "system.posix_acl_access" not in os.listxattr(pipe)


def test_a_directory_closed_by_hand_is_its_owners(pipe: Path) -> None:
    pipe.chmod(0o700)
    assert pipe_users(pipe) == (user_name(os.geteuid()),)


def test_an_unknown_user_changes_nothing(pipe: Path) -> None:
    with fails(NotFound, "no_user"):
        set_pipe_users(pipe, ["no-such-user"])
    assert pipe_users(pipe) == ()


def test_no_directory(tmp_path: Path) -> None:
    assert pipe_users(tmp_path / "none") is None
    with fails(NotFound, "no_daemon"):
        set_pipe_users(tmp_path / "none", ["nobody"])


def test_a_file_system_without_lists_stays_closed(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    with fails(NotSupported, "no_acl"):
        set_pipe_users(pipe, ["nobody"])
    assert mode(pipe) == 0o700
