"""Who may be a client of an MPS daemon of ours: its pipe directory, which a client must be able to enter.

Everybody by default (0755). For named users the directory is closed (0750) and a POSIX access control list lets them in;
the sockets inside stay open to all who come that far (``control`` is 0666).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpushare.errors import GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.host.capabilities import user_id, user_name

_ACL: Final = "system.posix_acl_access"
_ACL_VERSION: Final = 2
# linux/posix_acl.h: entries of the owner, a user, the group, the mask, all others.
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF
_ENTER: Final = 0o5
OPEN_MODE: Final = 0o755
_CLOSED_MODE: Final = 0o700


def pipe_users(directory: Path) -> tuple[str, ...] | None:
    """Return the users that may enter a pipe directory besides its owner; none: everybody; None: it is not there."""
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & 0o001:
            return ()
        with contextlib.suppress(OSError, struct.error):
            entries = struct.iter_unpack("<HHI", os.getxattr(directory, _ACL)[4:])
            ids = [uid for tag, permissions, uid in entries if tag == _USER and permissions & 1]
            return tuple(sorted(map(user_name, ids))) or _owner(directory)
        return _owner(directory)
    except OSError:
        return None


def _owner(directory: Path) -> tuple[str, ...]:
    return (user_name(directory.stat().st_uid),)


def let_in(directory: Path, users: Sequence[str]) -> None:
    """Let these users, and nobody else but the owner and root, enter a pipe directory; none: everybody.

    Raises:
        NotFound: no such user, or no such directory.
        NoPermission: the directory is not ours.
        NotSupported: its file system keeps no access control lists.
    """
    ids = sorted({user_id(user) for user in users})
    try:
        # Closed before it is opened to some.
        os.chmod(directory, _CLOSED_MODE if ids else OPEN_MODE)
        with contextlib.suppress(OSError):
            os.removexattr(directory, _ACL)
        os.chmod(directory, _CLOSED_MODE if ids else OPEN_MODE)
        if ids:
            os.setxattr(directory, _ACL, _list_of(ids))
    except OSError as error:
        raise _refused(directory, error) from None
    if pipe_users(directory) != tuple(sorted(map(user_name, ids))):
        raise OperationFailed(
            f"{directory} was changed, but lets others in",
            f"see: getfacl {shlex.quote(str(directory))}",
            code="not_held",
        )


def _list_of(ids: Sequence[int]) -> bytes:
    entries = [(_OWNER, 7, _NO_ID), *((_USER, _ENTER, uid) for uid in ids)]
    entries += [(_GROUP, 0, _NO_ID), (_MASK, _ENTER, _NO_ID), (_OTHER, 0, _NO_ID)]
    return struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def _refused(directory: Path, error: OSError) -> GpushareError:
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return NoPermission(f"may not change {directory}: {error.strerror}", "run it as root: sudo gpushare ...")
    if error.errno == errno.ENOENT:
        return NotFound(f"there is no {directory}", "see the daemons: gpushare mps status", code="no_daemon")
    if error.errno == errno.ENOTSUP:
        return NotSupported(
            f"the file system of {directory} keeps no access control lists, which 'users' of mps needs",
            "leave 'users' out, or set GPUSHARE_RUN_DIR to a file system that has them (tmpfs, ext4, xfs)",
            code="no_acl",
        )
    return OperationFailed(f"cannot change {directory}: {error.strerror}", "see what is wrong: gpushare doctor")
