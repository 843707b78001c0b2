"""What `gpushare run` believes of the log of its daemon: whoever may connect can have any line written into it."""

from __future__ import annotations

import os
import signal

import pytest

from gpushare.base.selection import Device
from gpushare.connect import connect
from gpushare.mps.daemons import own_daemon
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.plan import carry_out
from gpushare.run.share import Attachment
from gpushare.sim import admin


@pytest.mark.parametrize(
    ("served", "foreign", "attached"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_a_line_alone_proves_no_attachment(served: bool, foreign: bool, attached: bool) -> None:
    """A client was accepted if it is this user's and the daemon has a server."""
    host = connect("sim:h200")
    device = Device(gpu=host.nvml.sweep()[0])
    carry_out(plan_start(host, device, Limits()))
    home, _ = own_daemon(host, device)
    if served:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(home.pipe), "CUDA_VISIBLE_DEVICES": device.uuid}
        admin.add_process("sim:h200", "0", mps=True, environment=environment)
    seen = Attachment(host, device, os.getpid(), home=home, seen={os.getpid()})
    uid = host.uid + 1 if foreign else host.uid
    with (home.log / "control.log").open("a") as file:
        file.write(f"NEW CLIENT {'9' * 5000} from user {uid}: Server already exists\n")
        file.write(f"NEW CLIENT {os.getpid()} from user {uid}: Server already exists\n")
    seen.settle()
    assert (os.getpid() in seen.attached) == attached


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        ("nothing", False),
        ("server", True),
        ("daemon", True),
        ("daemon, before it joined", True),
        ("daemon, as asked", False),
    ],
)
def test_a_client_whose_server_or_daemon_died_is_started_again(ended: str, fault: bool) -> None:
    host = connect("sim:h200")
    device = Device(gpu=host.nvml.sweep()[0])
    carry_out(plan_start(host, device, Limits()))
    home, record = own_daemon(host, device)
    assert record.pid is not None
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(home.pipe), "CUDA_VISIBLE_DEVICES": device.uuid}
    program = admin.add_process("sim:h200", "0", mps=True, environment=environment)
    watch = Attachment(host, device, program, home=home)
    watch.find_processes()
    (server,) = watch.attached.values()
    assert server is not None
    if ended == "daemon, before it joined":
        watch.attached.clear()
    if ended == "daemon, as asked":
        home.clear()
    if ended != "nothing":
        host.processes.send(server if ended == "server" else record.pid, signal.SIGKILL)
    # The program may fail before the next look.
    assert watch.mps_fault() == fault
