"""A program whose speed is known, and a window in which it is measured."""

from __future__ import annotations

import sys

RATE = "^rate=(.+)$"
WINDOW = ("--metric", RATE, "--for", "0.06s")


def job(need: int, *more: str) -> list[str]:
    """Return the words of a program that prints its rate."""
    words = ["--need", str(need), "--rate", "100", "--every", "0.02", *more]
    # -S: it starts in half the time.
    return ["--", sys.executable, "-S", "-m", "gpushare.sim.job", *words]
