"""The guard of a pause: keeps a job paused, and resumes it in time. Runs as its own process (`python guard.py ROOT SPEC RECORD`).

Started by path so that nothing in the user's folder can replace the package. It writes ``ready``, and reads one line:
``held`` once the pause is complete. If its input ends without that, gpushare has died or rolled back, and what is off
goes back on. Then it looks at the record from time to time, and ends when the record or the job is gone. It pauses
channels and processes that the job creates, resumes the job when its time is over, and completes a resume that died.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Wait for the word, then keep the job paused until its time is over, it is resumed, or it ends."""
    import signal

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    root, spec, path = sys.argv[1:]
    # Not the directory of this file, which Python has put there.
    sys.path[0] = root
    import os
    from pathlib import Path

    from gpushare.connect import connect
    from gpushare.pause.change import HELD, READY
    from gpushare.pause.keep import Keeper

    host = connect(spec)
    if not host.is_simulated:
        os.chdir("/")
    keeper = Keeper(host, Path(path))
    os.write(1, READY)
    held = sys.stdin.buffer.readline() == HELD
    # Nobody reads it any more, and a pipe of the caller must not stay open.
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    if held:
        keeper.keep()
    else:
        keeper.take_back()


if __name__ == "__main__":
    main()
    import os

    # Nothing is left to write, and to take the modules down would be a sixth of all its work.
    os._exit(0)
