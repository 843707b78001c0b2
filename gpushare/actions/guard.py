"""The guard of `gpushare run`: ends the program the safe way when gpushare itself dies.

Runs as its own process (`python guard.py ROOT SPEC UUID INDEX LEASE DESCRIPTOR`), started by file so that nothing in the
user's folder can stand in for the package. It reads lines from its standard input: ``program PID
STARTED``, then ``done``, or ``linger`` (the program has ended, others still use the daemon: stop it
when the last one goes). The end of the input without either word is the death of gpushare.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Wait for the word, and act on its absence."""
    import signal

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    program: tuple[int, float | None] | None = None
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["program"]:
            program = int(words[1]), None if words[2] == "-" else float(words[2])
        elif words == ["done"]:
            return
        elif words == ["linger"]:
            _clean_up(*sys.argv[1:7], program=None)
            return
    _clean_up(*sys.argv[1:7], program=program)


def _clean_up(
    root: str,
    spec: str,
    uuid: str,
    index: str,
    lease: str,
    descriptor: str,
    *,
    program: tuple[int, float | None] | None,
) -> None:
    sys.path.insert(0, root)
    from pathlib import Path

    from gpushare.actions.run_after import after_death
    from gpushare.host.mps_home import Lease

    after_death(spec, uuid, int(index), program, Lease(Path(lease), int(descriptor)) if lease else None)


if __name__ == "__main__":
    main()
