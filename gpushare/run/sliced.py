"""Programs with a time-slice of their own, outside MPS: the slice of each of their processes, kept while `run` watches."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from gpushare.base.errors import GpushareError, NoPermission, NotFound, NotSupported, TimedOut
from gpushare.base.units import format_slice
from gpushare.host.channels import ChannelControl, Channels
from gpushare.host.host import Host
from gpushare.part import Part, Watch
from gpushare.run.jobs import find_job, gpu_processes
from gpushare.timeslice.slices import PASSING, apply_slice, forget_ended, restore_slice, slice_record

# A look at a known process costs a millisecond; contexts that it made since are looked for more seldom.
LOOK_SECONDS: Final = 1.0
_CONTEXT_SECONDS: Final = 5.0
_MOST_TIMEOUTS: Final = 2


def is_final(error: GpushareError) -> bool:
    """Return whether the driver would refuse another try, too: it supports no slices here, or not for this user."""
    return isinstance(error, (NotSupported, NoPermission)) and error.code not in PASSING


@dataclass
class KeptSlices:
    """Sets the slices of processes, reads them back, and finds contexts made later. Used until `close`; slices stay.

    ``fixed``: a slice that others have changed is set again; else it is left.
    """

    host: Host
    fixed: bool = False
    # The slice that a process (PID and start time) was given and that was read back, also while its contexts are gone.
    proved: dict[tuple[int, int], int] = field(default_factory=dict)
    _control: ChannelControl = field(init=False)
    _known: dict[int, Channels] = field(default_factory=dict)
    # When to look for new contexts of a process.
    _contexts_due: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._control = self.host.open_channels()

    def apply(self, pids: Collection[int], microseconds: int) -> list[int]:
        """Give processes a slice; return those that did not have it. The contexts of other processes are forgotten.

        Raises as `ChannelControl.find` and `apply_slice`.
        """
        for pid in self._known.keys() - set(pids):
            self._forget_contexts(pid)
        for pid, started in self.proved.keys() - {(pid, channels.started) for pid, channels in self._known.items()}:
            if not self.host.processes.alive(pid, started):
                del self.proved[pid, started]
        return [pid for pid in sorted(pids) if self._apply_one(pid, microseconds)]

    def _forget_contexts(self, pid: int) -> None:
        """Forget the contexts of a process that has ended, or is without contexts as while it is swapped out."""
        self._known.pop(pid, None)
        self._contexts_due.pop(pid, None)

    def _apply_one(self, pid: int, microseconds: int) -> bool:
        """Give a process a slice; return whether it did not have it."""
        if pid in self._known and self._has_slice(self._known[pid], microseconds):
            return False
        if pid not in self._known:
            # No probe (a trial change): two at once would take each other's trial for the slice of before. It is read back.
            self._known[pid] = self._control.find(pid, probe=False)
        channels = self._known[pid]
        slice_us = self._slice_of_new_contexts(channels, microseconds)
        if slice_us is not None:
            self._known[pid] = apply_slice(self.host, self._control, channels, slice_us)
        self.proved[pid, channels.started] = microseconds
        self._contexts_due[pid] = time.monotonic() + _CONTEXT_SECONDS
        return slice_us == microseconds

    def _slice_of_new_contexts(self, channels: Channels, microseconds: int) -> int | None:
        """Return the slice for contexts that a process has made, or got back after a swap; None: leave them as they are.

        That is what `timeslice set` gave the process meanwhile, and nothing after a `timeslice reset`, unless ``fixed``.
        """
        if self.fixed or self.proved.get((channels.pid, channels.started)) != microseconds:
            return microseconds
        record = slice_record(self.host, channels.pid, channels.started)
        return None if record is None else record.slice_us

    def _has_slice(self, channels: Channels, microseconds: int) -> bool:
        """Return whether a known process has the slice, in all contexts that it has now; which are looked up again every 5 s."""
        pid, process = channels.pid, (channels.pid, channels.started)
        try:
            if self.fixed or self.proved.get(process) != microseconds:
                if set(self._control.read_slices(channels)) != {microseconds}:
                    return False
                self.proved[process] = microseconds
            if time.monotonic() < self._contexts_due.get(pid, 0.0):
                return True
            self._contexts_due[pid] = time.monotonic() + _CONTEXT_SECONDS
            present = self._control.find_again(channels)
        except NotFound:
            self._forget_contexts(pid)
            return False
        self._known[pid] = present
        keys_before = {group.key for group in channels.groups}
        return all(group.slice_us == microseconds for group in present.groups if group.key not in keys_before)

    def restore(self) -> None:
        """Give the processes that still run the slices that they had before `apply`. Raises as `restore_slice`."""
        for channels in self._known.values():
            restore_slice(self.host, self._control, channels)

    def close(self) -> None:
        """End the child process that makes the calls; the next `apply` starts another one."""
        self._control.close()


@dataclass
class OwnSlice(Part):
    """The time-slice of a job outside MPS: each of its processes gets it."""

    host: Host
    slice_us: int
    _slices: KeptSlices = field(init=False)
    _watch: Watch = field(init=False)
    due: float = 0.0
    _told: set[str] = field(default_factory=set)
    _failed: bool = False
    _timeouts: int = 0

    def __post_init__(self) -> None:
        self._slices = KeptSlices(self.host)

    @property
    def where(self) -> str:
        return f", outside MPS, with a time-slice of {format_slice(self.slice_us)}"

    def started(self, watch: Watch) -> None:
        self._watch = watch

    def poll(self) -> bool:
        """Give the program's new processes the slice; return False, as the program need not end."""
        self._set_slice(self._watch)
        self.due = math.inf if self._failed else time.monotonic() + min(self._watch.poll_interval(), LOOK_SECONDS)
        return False

    def _set_slice(self, watch: Watch) -> None:
        """Set the slice of the program's processes on the GPU; say what was set, or once why it cannot be."""
        try:
            processes = gpu_processes(self.host, find_job(self.host, str(watch.program_pid)))
            changed = self._slices.apply([process.pid for process in processes if not process.under_mps], self.slice_us)
        except GpushareError as error:
            if error.code not in PASSING:
                text = f"the time-slice cannot be set: {error.message}; the program goes on with the driver's default"
                self._say_once(watch.troubles, text)
            if isinstance(error, TimedOut):
                # A driver that does not answer must not hold up a signal again and again.
                self._timeouts += 1
            self._failed = is_final(error) or self._timeouts >= _MOST_TIMEOUTS
            return
        if changed:
            # It is on the GPU now: the watch notes that at once.
            watch.poll()
        for pid in changed:
            self._say_once(watch.news, f"process {pid} has a time-slice of {format_slice(self.slice_us)} (read back)")

    def _say_once(self, where: list[str], text: str) -> None:
        """Add a text to the news or the troubles, once."""
        if text not in self._told:
            self._told.add(text)
            where.append(text)

    def settle(self) -> None:
        """End the child process that sets slices, and forget the records of ended processes."""
        self._slices.close()
        forget_ended(self.host)
