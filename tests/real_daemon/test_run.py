"""`gpushare run` with the real daemon: it talks to it sparsely, because every conversation is logged."""

from __future__ import annotations

from pathlib import Path

from gpushare.cli import main
from gpushare.host.host import Host
from gpushare.host.mps_home import home_of
from gpushare.selection import Device


def test_a_run_holds_few_conversations(host: Host, device: Device) -> None:
    # In this process: another one would see the daemons of the tests that run beside this one.
    assert main(["--host", host.spec, "run", "--", "sleep", "2"]) == 0
    log = Path(home_of(host.run_directory, device.uuid).log) / "control.log"
    conversations = log.read_text(encoding="utf-8").count("NEW UI")
    # Four looks a second while a program usually makes its context, and the end.
    assert 3 <= conversations <= 30
