"""The room that a file system has left (statvfs(3))."""

from __future__ import annotations

import os


def is_full(descriptor: int) -> bool:
    """Return whether the file system of an open file has no block left for this user; False where it does not tell.

    What is kept back for root (ext4) is room for root.
    """
    try:
        found = os.fstatvfs(descriptor)
    except OSError:
        return False
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return found.f_blocks > 0 and free == 0
