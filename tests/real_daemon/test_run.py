"""`gpushare run` with the real daemon: it talks to it sparsely, because every conversation is logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpushare.host.host import Host
from gpushare.host.mps_home import home_of
from gpushare.selection import Device


def test_a_run_holds_few_conversations(host: Host, device: Device) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpushare", "--host", host.spec, "run", "--", "sleep", "2"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log = Path(home_of(host.run_directory, device.uuid).log) / "control.log"
    conversations = log.read_text(encoding="utf-8").count("NEW UI")
    # Four looks a second while a program usually makes its context, and the end.
    assert 3 <= conversations <= 30
