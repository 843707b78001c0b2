"""Who listens at a socket: known from the kernel, and not from what a process says of itself."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

_SECONDS: Final = 1.0
# struct ucred of Linux: pid, uid, gid.
_CREDENTIALS: Final = struct.Struct("3i")


class Listener(NamedTuple):
    """A process and its user, as they were when it began to listen."""

    pid: int
    uid: int


def listener(pipe_directory: str) -> Listener | None:
    """Return who listens at the control socket of an MPS daemon; None: nobody, or it cannot be told.

    A daemon that is stopped or hangs is told too: it need not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(_SECONDS)
        try:
            end.connect(os.path.join(pipe_directory, "control"))
            said = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except (OSError, ValueError):
            return None
    pid, uid, _ = _CREDENTIALS.unpack(said)
    # 0: it is in another PID namespace.
    return Listener(pid, uid) if pid > 0 else None
