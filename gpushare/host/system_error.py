"""What the system refuses, said as an error with what to do: a full disk is no bug of gpushare."""

from __future__ import annotations

import errno
import shlex
from typing import Final

from gpushare.errors import GpushareError, NoPermission, OperationFailed

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_MEMORY: Final = frozenset({errno.ENOMEM, errno.EAGAIN})
# Nothing of ours brings these about, whatever it was that we did.
_RESOURCES: Final = frozenset({errno.EIO}) | _FULL | _FILES | _MEMORY


def system_error(error: OSError) -> GpushareError | None:
    """Return the error to tell, or None where the system says that we did something wrong."""
    if error.errno not in _RESOURCES and (error.errno is None or error.filename is None):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    message = f"the system refused: {where}{error.strerror}"
    there = "" if error.filename is None else f" {shlex.quote(str(error.filename))}"
    if error.errno in _FORBIDDEN:
        hint = f"run as its owner, or as root: sudo gpushare ...; see whose it is: ls -ld{there}"
        return NoPermission(message, hint, code="system_error")
    if error.errno in _FULL:
        hint = "make room, and run it again: df -h"
    elif error.errno in _FILES:
        hint = "too many files are open; raise the limit: ulimit -n 4096"
    elif error.errno in _MEMORY:
        hint = "memory or processes have run out; see: free -h; ulimit -u"
    elif error.errno == errno.EIO:
        hint = "the disk may be broken; see: sudo dmesg | tail"
    else:
        hint = f"see what is there: ls -ld{there}"
    return OperationFailed(message, hint, code="system_error")
