"""Who is in a process group (``/proc/PID/stat``): what a program has started stays in it when the program has ended."""

from __future__ import annotations

import contextlib
import os


def group_members(group: int) -> list[int]:
    """Return the PIDs of a process group, without its leader and without the dead that nobody has waited for."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != group:
            # One that ends meanwhile is none.
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    found.append(int(name))
    return sorted(found)
