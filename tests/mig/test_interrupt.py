"""A MIG change that a signal meets in the middle: undone and said, or left to `mig recover` when it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cli.drive import World, environment

A100 = "sim:a100-80gb"
# gpushare, whose driver takes forever at its third compute instance.
SLOW = """
import sys, time
from gpushare.cli import main
from gpushare.sim import library_mig as mig_changes

real, calls = mig_changes.create_compute_instance, []

def slow(*arguments):
    calls.append(1)
    if len(calls) == 3:
        print("waiting", flush=True)
        while True:
            time.sleep(0.05)
    return real(*arguments)

mig_changes.create_compute_instance = slow
sys.exit(main(["--host", "sim:a100-80gb", *sys.argv[1:]]))
"""


def interrupted(number: int) -> tuple[int, str]:
    """Send a signal to a change in its middle; return its exit code and what it said."""
    words = ["mig", "apply", "1g.10gb*4"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_undoes_the_change(number: signal.Signals) -> None:
    host = World.new(A100)
    before = host.look()
    code, err = interrupted(number)
    assert code == 128 + number, err
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert host.look() == before
    assert not host.journal.exists()
