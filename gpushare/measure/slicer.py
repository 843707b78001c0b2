"""The time-slices of programs that are being measured: set while they run, and restored."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError, OperationFailed
from gpushare.run.jobs import find_job, gpu_processes
from gpushare.timeslice.slices import apply_slice, find_channels, restore_slice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpushare.host.channels import ChannelControl, Channels
    from gpushare.host.host import Host
    from gpushare.run.share import MpsShare

# A program that has made no context yet, or a process of it that comes or goes, may have one at the next look.
PASSING: Final = frozenset({"no_context", "inherited_context", "process_gone", "stale_channels", "no_job"})


class Slicer:
    """Sets the slices of running programs outside MPS; a context manager, which restores them at the end."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._opened: ChannelControl | None = None
        self._found: dict[int, Channels] = {}

    def __enter__(self) -> Slicer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.restore()
        if self._opened is not None:
            self._opened.close()

    def restore(self) -> None:
        """Restore the slices of all processes that still run."""
        for pid in list(self._found):
            self.forget(pid)

    def forget(self, pid: int) -> None:
        """Restore the slice of a process, if it still runs."""
        channels = self._found.pop(pid, None)
        if channels is not None:
            # Most have ended by now.
            with contextlib.suppress(GpushareError):
                restore_slice(self._host, self._control, channels)

    @property
    def _control(self) -> ChannelControl:
        if self._opened is None:
            self._opened = self._host.open_channels()
        return self._opened

    def probe(self, pid: int) -> int:
        """Return the longest slice of a program and its children, in microseconds.

        Raises:
            GpushareError: a slice cannot be read and set, as `find_channels`; or no process of it is on a GPU.
        """
        slices = [group.slice_us for channels in self._channels(pid) for group in channels.compute]
        return max((one for one in slices if one is not None), default=0)

    def set(self, pid: int, microseconds: int) -> None:
        """Set the slice of a program and its children, in all their contexts. Raises as `probe`."""
        for channels in self._channels(pid):
            self._found[channels.pid] = apply_slice(self._host, self._control, channels, microseconds)

    def set_group(self, share: MpsShare, pids: Sequence[int], microseconds: int) -> None:
        """Set the slice of the MPS server of these clients, which all clients share. Raises as `ChannelControl.find`."""
        servers: set[int] = set()
        for pid in pids:
            watch = share.watch(pid)
            watch.look()
            servers |= watch.servers()
        if not servers:
            raise OperationFailed(
                "the MPS daemon names no server of the opportunistic job, which would have its time-slice",
                "check that it uses the GPU and does not change CUDA_MPS_PIPE_DIRECTORY",
                code="not_attached",
            )
        for pid in servers:
            # As run does: the read-back is the proof.
            known = self._found.get(pid) or self._control.find(pid, probe=False)
            self._found[pid] = apply_slice(self._host, self._control, known, microseconds)

    def _channels(self, pid: int) -> list[Channels]:
        """Return the channels of a program's processes that have a context; one is enough."""
        found: list[Channels] = []
        none: GpushareError | None = None
        for process in gpu_processes(self._host, find_job(self._host, str(pid))):
            known = self._found.get(process.pid)
            try:
                found.append(known or find_channels(self._host, self._control, process))
            except GpushareError as error:
                if error.code not in PASSING:
                    raise
                none = error
                continue
            self._found[process.pid] = found[-1]
        if not found and none is not None:
            raise none
        return found
