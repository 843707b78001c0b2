"""The lock under which a user's gpushares set and probe time-slices, one at a time.

A probe writes another value for a moment and puts the old one back: without the lock, a slice that is set meanwhile would
be lost, and a probe would take it for a driver that does not keep what was set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpushare.host.records import directory_locked

if TYPE_CHECKING:
    from gpushare.host.channels import ChannelControl, Channels
    from gpushare.host.host import Host

# The directory of the records of slices.
SLICES: Final = "slices"


@contextlib.contextmanager
def slices_locked(host: Host) -> Iterator[None]:
    """Let one gpushare of this user at a time set slices: two would each take the other's value for the old one."""
    with directory_locked(host.run_directory / SLICES, "the lock of the time-slices"):
        yield


def probed_channels(
    host: Host, control: ChannelControl, pid: int, started: int | None = None, *, seconds: float | None = None
) -> Channels:
    """Scan a process and probe it, while no other gpushare of this user sets a slice or probes.

    Raises as `ChannelControl.find`. The caller does not hold the lock.
    """
    with slices_locked(host):
        return control.find(pid, started) if seconds is None else control.find(pid, started, seconds=seconds)
