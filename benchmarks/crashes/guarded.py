"""Starts the guard with an injector of its own: ``guarded.py GUARD ARGUMENTS...``.

``GPUSHARE_CRASH_GUARD`` says where it strikes: ``AT:FAULT:LOG``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Put the injector in place and become the guard."""
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from benchmarks.crashes.inject import Injector, install
    from benchmarks.crashes.world import see_only_ours

    at, fault, log = os.environ["GPUSHARE_CRASH_GUARD"].split(":", 2)
    root = os.environ["GPUSHARE_SIM_DIR"]
    see_only_ours(root)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    install(Injector(root, int(at), fault, descriptor))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
