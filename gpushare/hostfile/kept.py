"""The limits of users in the gpushare.yaml that root applied last. A job reads nothing else of it at its start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError, NotFound
from gpushare.host.capabilities import user_id
from gpushare.host.host import Host, is_trusted_directory
from gpushare.host.records import read_own
from gpushare.memory.admission import MOST_LEASE_SECONDS, UserLimits

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.hostfile.file import HostFile

KEPT: Final = "applied.yaml"


def user_limits_in(file: HostFile, *, skip_unknown: bool = False) -> UserLimits:
    """Return the limits of a file; the first row that matches a user counts.

    Raises NotFound with line and column: there is no such user; with ``skip_unknown`` that is no error.
    """
    limits: dict[int, int] = {}
    limit_of_others: int | None = None
    for row in file.memory:
        for name in row.users:
            try:
                uid = user_id(name)
            except NotFound as error:
                if not skip_unknown:
                    raise NotFound(f"{file.shown}:{row.mark}: {error.message}", error.hint, code=error.code) from None
                continue
            # A row for all users, if one came before, matched every user but root.
            if limit_of_others is None or uid == 0:
                limits.setdefault(uid, row.limit_bytes)
        if not row.users and limit_of_others is None:
            limit_of_others = row.limit_bytes
    longest = file.longest_lease_seconds
    return UserLimits(limits, limit_of_others, MOST_LEASE_SECONDS if longest is None else longest)


def kept_limits(host: Host) -> UserLimits:
    """Return the limits of the file that root applied last; none if there is no such file, or it is no longer valid."""
    file = file_applied_by_root(host)
    # If one user was removed since, the limits of all others must stay in force.
    return UserLimits() if file is None else user_limits_in(file, skip_unknown=True)


def file_applied_by_root(host: Host) -> HostFile | None:
    """Return the file that root applied last; None: there is none, or it is no longer valid."""
    directories = list(host.shared_state_directories)
    if host.root:
        directories.insert(0, host.state_directory)
    return next(filter(None, map(file_kept_in, directories)), None)


def unread_kept_files(host: Host) -> list[Path]:
    """Return the kept files of this user and of root that are there, but cannot be read, or are no longer valid."""
    directories = (host.state_directory, *host.shared_state_directories)
    return [
        directory / KEPT for directory in directories if _may_have_file(directory) and file_kept_in(directory) is None
    ]


def _may_have_file(directory: Path) -> bool:
    """Return whether a directory has a kept file; True, too, where this user may not look."""
    try:
        (directory / KEPT).lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def file_kept_in(directory: Path) -> HostFile | None:
    """Return the file that is kept in a directory; None: there is none, it is no longer valid, or may not be read."""
    with contextlib.suppress(OSError, ValueError, GpushareError):
        if is_trusted_directory(directory):
            content = read_own(directory / KEPT)
            # These import a dozen modules, which a job loads at its start only where there is such a file.
            from gpushare.hostfile.parse import parse
            from gpushare.inputs import decode_text

            return parse(decode_text(content, str(directory / KEPT), "gpushare.yaml"))
    return None
