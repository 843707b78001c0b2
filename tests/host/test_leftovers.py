"""What a kill left of a record that was being written: the next record of its kind removes it, and nothing else."""

from __future__ import annotations

import fcntl
import os

from gpushare.base.model import ComputeMode
from gpushare.connect import connect
from gpushare.host.host import make_private_directory
from gpushare.mps.home import DaemonRecord, home_of
from gpushare.timeslice.policy import MODES, FoundMode


def test_a_write_removes_what_was_left_in_its_directory_and_not_what_is_being_written() -> None:
    host = connect("sim:a100-80gb")
    path = MODES.path(host, "gpu")
    make_private_directory(path.parent)
    left, kept, busy = (path.with_name(name) for name in (".other-abcdefgh", ".other-short", ".gpu-0123_xyz"))
    for file in (left, kept, busy):
        file.write_text("{")
    descriptor = os.open(busy, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    MODES.write(FoundMode(mode=ComputeMode.DEFAULT, path=path))
    os.close(descriptor)
    assert [file.exists() for file in (left, kept, busy)] == [False, True, True]


def test_the_home_of_a_daemon() -> None:
    host = connect("sim:a100-80gb")
    home = home_of(host.run_directory, "GPU-1")
    home.create()
    left = home.directory / ".daemon-abcdefgh"
    left.write_text("{")
    home.write(DaemonRecord(device_uuid="GPU-1", pid=1, started=1, uid=0))
    assert not left.exists()
