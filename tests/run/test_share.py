"""A share under MPS: opened more than once, and what is believed of the log of its daemon, where all may write."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import own_home
from gpushare.mps.limits import Limits
from gpushare.mps.start import plan_start
from gpushare.plan import carry_out
from gpushare.run.share import Attachment, MpsShare
from gpushare.sim import admin


def test_a_share_that_is_opened_again_starts_a_daemon_in_place_of_one_that_has_ended(
    host: Host, device: Device
) -> None:
    of_another = MpsShare(host, device, Limits())
    of_another.open()
    mine = replace(host, run_directory=host.run_directory.parent / "mine", shared_run_directories=(host.run_directory,))
    share = MpsShare(mine, device, Limits())
    share.open()
    assert share.home.directory == of_another.home.directory
    share.close()
    of_another.close()
    share.open()
    assert share.home.directory == own_home(mine, device.uuid).directory
    assert share.environment({})["CUDA_MPS_PIPE_DIRECTORY"] == str(share.home.pipe)
    share.close()


@pytest.mark.parametrize(
    ("served", "foreign", "attached"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_a_line_alone_proves_no_attachment(
    host: Host, device: Device, served: bool, foreign: bool, attached: bool
) -> None:
    """A client was accepted if it is this user's and the daemon has a server."""
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


def test_a_client_that_its_server_refused_was_not_attached(host: Host, device: Device) -> None:
    """The daemon hands it on as any other, but a server in FAULT refuses it."""
    carry_out(plan_start(host, device, Limits()))
    home, _ = own_daemon(host, device)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(home.pipe), "CUDA_VISIBLE_DEVICES": device.uuid}
    admin.add_process("sim:h200", "0", mps=True, environment=environment)
    seen = Attachment(host, device, os.getpid(), home=home, seen={os.getpid(), os.getppid()})
    with (home.log / "control.log").open("a") as file:
        for pid in seen.seen:
            file.write(f"NEW CLIENT {pid} from user {host.uid}: Server already exists\n")
    with (home.log / "server.log").open("a") as file:
        text = "MPS server teardown in progress. Refusing to accept new client"
        file.write(f"{text} {{PID: {os.getpid()}, Context ID: 0}}\n")
    seen.settle()
    assert [*seen.attached] == [os.getppid()]


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
def test_a_client_whose_server_or_daemon_died_is_started_again(
    host: Host, device: Device, ended: str, fault: bool
) -> None:
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
