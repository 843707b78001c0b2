"""The guard of `gpushare run`: ends the program the safe way when gpushare itself dies.

Runs as its own process (`python guard.py ROOT SPEC UUID INDEX KIND LEASE DESCRIPTOR [CLAIM]...`),
started by path so that nothing in the user's folder can replace the package. KIND is what the program runs in: ``mps``,
or ``instance`` for MIG instances (or a whole GPU) without MPS. It reads lines from its standard input: ``program PID
STARTED`` and ``ended PID`` for any number of programs, then ``done``, or ``linger``: the program has ended and others
still use the daemon, so stop it when the last one goes. If the input ends without either word, gpushare has died.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Wait for ``done`` or ``linger``; clean up if neither comes."""
    import signal

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    programs: dict[int, int | None] = {}
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["program"]:
            programs[int(words[1])] = None if words[2] == "-" else int(words[2])
        elif words[:1] == ["ended"]:
            programs.pop(int(words[1]), None)
        elif words == ["done"]:
            return
        elif words == ["linger"]:
            # The program has ended. Its MIG instances were given back, and may be in other hands by now.
            _clean_up(sys.argv[1:8], {})
            return
    _clean_up(sys.argv[1:], programs)


def _clean_up(told: list[str], programs: dict[int, int | None]) -> None:
    root, spec, uuid, index, kind, lease, descriptor, *claims = told
    sys.path.insert(0, root)
    from pathlib import Path

    from gpushare.host.claims import HeldClaim
    from gpushare.mps.home import Lease
    from gpushare.run.jobs import forget_ended
    from gpushare.run.share import after_death

    after_death(
        spec,
        uuid,
        int(index),
        programs,
        mps=kind == "mps",
        lease=Lease(Path(lease), int(descriptor)) if lease else None,
        claims=[HeldClaim(Path(path)) for path in claims],
        ended=forget_ended,
    )


if __name__ == "__main__":
    main()
    import os

    # Nothing is left to write, and to take the modules down would be a sixth of all its work.
    os._exit(0)
