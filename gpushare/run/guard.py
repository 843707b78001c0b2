"""The guard of `gpushare run`: ends the program the safe way when gpushare itself dies.

Runs as its own process (`python guard.py ROOT SPEC UUID INDEX KIND LEASE DESCRIPTOR [CLAIM]...`),
started by file so that nothing in the user's folder can stand in for the package. KIND is what the program runs in:
``mps``, or ``instance``, MIG instances (or a whole GPU) without MPS. It reads lines from its standard input: ``program PID
STARTED`` and ``ended PID``, of as many programs as there are, then ``done``, or ``linger`` (the program has ended, others still use the daemon: stop it
when the last one goes). The end of the input without either word is the death of gpushare.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Wait for the word, and act on its absence."""
    import signal

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    programs: dict[int, float | None] = {}
    booted = _boot_time()
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["program"]:
            programs[int(words[1])] = None if words[2] == "-" else float(words[2])
        elif words[:1] == ["ended"]:
            programs.pop(int(words[1]), None)
        elif words == ["done"]:
            return
        elif words == ["linger"]:
            # The program has ended: its MIG instances were given back, and may be another's by now.
            _clean_up(sys.argv[1:8], {})
            return
    _clean_up(sys.argv[1:], _moved(programs, booted))


def _moved(programs: dict[int, float | None], booted: float | None) -> dict[int, float | None]:
    """Return programs with their start times as they are told now: the clock may have been set, which moves them all."""
    now = _boot_time()
    moved = 0.0 if now is None or booted is None else now - booted
    return {pid: None if started is None else started + moved for pid, started in programs.items()}


def _boot_time() -> float | None:
    """Return when the system was started (``btime`` of ``/proc/stat``), which start times are counted from."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return next((float(line.split()[1]) for line in file if line.startswith("btime ")), None)
    except (OSError, ValueError):
        return None


def _clean_up(told: list[str], programs: dict[int, float | None]) -> None:
    root, spec, uuid, index, kind, lease, descriptor, *claims = told
    sys.path.insert(0, root)
    from pathlib import Path

    from gpushare.host.claims import HeldClaim
    from gpushare.mps.home import Lease
    from gpushare.run.share import after_death

    after_death(
        spec,
        uuid,
        int(index),
        programs,
        mps=kind == "mps",
        lease=Lease(Path(lease), int(descriptor)) if lease else None,
        claims=[HeldClaim(Path(path)) for path in claims],
    )


if __name__ == "__main__":
    main()
