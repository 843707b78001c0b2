"""`gpushare run` with the real daemon: it talks to it sparsely, because every conversation is logged."""

from __future__ import annotations

import time
from pathlib import Path

from gpushare.base.selection import Device
from gpushare.cli import main
from gpushare.host.host import Host
from gpushare.mps.home import home_of
from tests.cli.drive import until


def test_a_run_holds_few_conversations(host: Host, device: Device) -> None:
    # In this process: another one would see the daemons of the tests that run beside this one.
    begun = time.monotonic()
    assert main(["--host", host.spec, "run", "--", "sleep", "2"]) == 0
    seconds = time.monotonic() - begun
    log = Path(home_of(host.run_directory, device.uuid).log) / "control.log"

    def conversations() -> int:
        return log.read_text(encoding="utf-8").count("NEW UI")

    # The daemon writes its log after it has answered.
    until(lambda: conversations() >= 3, "it has talked to the daemon")
    # Four looks a second while a program usually makes its context (however long the machine takes), and both ends.
    assert conversations() <= 4 * seconds + 22
