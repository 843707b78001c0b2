"""The guard of a swap: runs as its own process (`python guard.py ROOT SPEC`) while a job goes out or comes in.

Started by path so that nothing in the user's folder can replace the package. It writes ``ready`` and reads one line:
``done``. If its input ends without that, gpushare has died, and the guard completes or takes back what it had begun.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Wait for the word; repair if it does not come."""
    import signal

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    root, spec = sys.argv[1:]
    # Not the directory of this file, which Python has put there.
    sys.path[0] = root
    import os

    os.write(1, b"ready\n")
    if sys.stdin.buffer.readline() != b"done\n":
        _repair(spec)


def _repair(spec: str) -> None:
    # Imported only here: each swap waits for the start of its guard, and almost no guard has anything to repair.
    import time

    from gpushare.connect import connect
    from gpushare.errors import GpushareError
    from gpushare.memory.room import room_kept
    from gpushare.memory.swap import repair

    host = connect(spec)
    # A driver that does not answer now may answer later.
    for pause in (0.0, 1.0, 5.0, 30.0):
        time.sleep(pause)
        try:
            repair(host, keep=room_kept)
        except (GpushareError, OSError, ImportError):
            # Too many open files, or an upgrade of gpushare that is just taking place.
            continue
        return


if __name__ == "__main__":
    main()
    import os

    # Nothing is left to write, and to take the modules down would be a sixth of all its work.
    os._exit(0)
