"""Pause a program's processes and let them continue.

Outside MPS their channels are taken off the GPU (`gpushare.host.channels`: 1 ms, in the middle of kernels), all of any
number of processes and contexts. Where that is not possible, and under MPS, whose clients share channels, they are stopped
(SIGSTOP): the GPU still works on what they have submitted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from gpushare.base.errors import GpushareError, NotFound, NotSupported
from gpushare.host.channels import Channels
from gpushare.host.host import Host
from gpushare.host.identity import start_of
from gpushare.host.process import signal_all, starts_of
from gpushare.host.slice_lock import probed_channels
from gpushare.pause.change import ChannelsOff, channel_names
from gpushare.pause.record import PAUSED, PAUSES, RUNNING, paused_job, processes_paused_by_root, write
from gpushare.run.jobs import job_names, job_of

# How often a pause checks that all of the program is paused.
_KEEP_SECONDS: Final = 0.5
# Rounds of listing and stopping: a program may start another process between the two.
_STOP_ROUNDS: Final = 3
_CUDA_NODE: Final = "/dev/nvidia-uvm"


class Pauser:
    """Pauses a program's processes and lets them continue: by their channels, or by SIGSTOP."""

    def __init__(self, host: Host, gpus: Collection[int], pid: int, channels: ChannelPauser | None = None) -> None:
        """``gpus`` are the indexes of the program's GPUs; ``pid`` is its first process. Without ``channels``, by SIGSTOP."""
        self._host, self._gpus, self._pid, self._channels = host, tuple(gpus), pid, channels
        # The processes that were stopped, with their starts, because PIDs are reused.
        self._stopped: dict[int, int] = {}
        # When to look next for processes that are not paused yet.
        self._due = 0.0
        self._told: set[tuple[int, int | None]] = set()
        # The processes that the driver did not put back at the last try.
        self._refused: set[int] = set()
        # Called with PID and start of each process before it is paused, once each: the guard continues it if gpushare dies.
        self.tell: Callable[[int, int | None], None] = lambda _pid, _started: None
        # Prints why the program is paused by SIGSTOP from then on, or is not put back on the GPU.
        self.say: Callable[[str], None] = lambda _text: None

    @property
    def paused(self) -> bool:
        """Return whether the program, or a part of it, is paused."""
        return bool(self._stopped or (self._channels is not None and self._channels.off))

    def find_processes(self) -> None:
        """Find the processes to pause, so that the next pause takes effect at once."""
        if not self.paused:
            self._find_channels()

    def pause(self) -> None:
        """Pause all of the program; call again and again for as long as it is to be paused.

        From time to time a call looks for new processes, and for those that others have continued (a SIGCONT of the shell,
        which gpushare passes on).
        """
        if self._channels is not None:
            self._pause_channels(self._channels)
        # `_pause_channels` gives the channels up if they cannot be taken off: then the program is stopped at once.
        if self._channels is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + _KEEP_SECONDS
            self._stop_all()

    def _pause_channels(self, channels: ChannelPauser) -> None:
        """Take the program's channels off the GPU: those known at once, then those that it has made since."""
        is_first_call = not channels.off and bool(channels.known)
        if not is_first_call and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _KEEP_SECONDS
        if is_first_call:
            self._try_channels(channels, channels.disable)
        # Production is spared now; find out whether these were all processes of the program.
        self._find_channels()
        if self._channels is not None:
            self._try_channels(channels, channels.disable)

    def _find_channels(self) -> None:
        """Find the channels of processes that have come to the GPU, or have created a context."""
        channels = self._channels
        if channels is not None:
            pids = self._cuda_processes()
            for pid in pids:
                self._tell_once(pid, start_of(self._host.processes.identity(pid)))
            self._try_channels(channels, lambda: channels.find(pids))

    def _try_channels(self, channels: ChannelPauser, act: Callable[[], None]) -> None:
        """Act on the channels; if that fails, put them back and give them up: from then on SIGSTOP pauses the program."""
        try:
            act()
        except GpushareError as error:
            channels.enable()
            if channels.off:
                # Some could not be put back. The program must not be paused in two ways, so the next look tries again.
                return
            channels.close()
            self._channels = None
            self._due = 0.0
            self.say(f"{error.message}: paused by SIGSTOP from now on")

    def resume(self) -> None:
        """Let the program continue. What fails is said once for each process, and tried again at the next call."""
        self._due = 0.0
        if self._channels is not None:
            refused = self._channels.enable()
            for pid in sorted(refused.keys() - self._refused):
                self.say(f"{refused[pid]}; gpushare goes on trying")
            self._refused = set(refused)
        signal_all(self._host.processes, self._stopped, signal.SIGCONT)
        self._stopped.clear()

    def close(self) -> None:
        """Let the program continue for good; of what fails say how to try it again."""
        channels, self._channels = self._channels, None
        self.resume()
        if channels is not None:
            for pid, text in channels.enable().items():
                self.say(f"{text}; to try again: gpushare resume {pid}")
            channels.close()

    def _stop_all(self) -> None:
        """Stop all processes of the program (SIGSTOP), also those that it starts meanwhile."""
        seen: set[int] = set()
        for _ in range(_STOP_ROUNDS):
            new = [pid for pid in self._host.processes.descendants(self._pid) if pid not in seen]
            seen.update(new)
            sent = [self._stop_process(pid) for pid in new]
            # If all were stopped already, none can have started another.
            if not any(sent):
                return

    def _stop_process(self, pid: int) -> bool:
        """Stop a process (SIGSTOP); return False if that was not needed: it is stopped already, or has ended."""
        info = self._host.processes.describe(pid)
        if info is None or info.stopped or info.started is None:
            return False
        self._tell_once(pid, info.started)
        self._stopped[pid] = info.started
        signal_all(self._host.processes, {pid: info.started}, signal.SIGSTOP)
        return True

    def _tell_once(self, pid: int, started: int | None) -> None:
        """Tell the guard of a process before it is paused: if gpushare dies, the process must not stay paused."""
        if (pid, started) not in self._told:
            self._told.add((pid, started))
            self.tell(pid, started)

    def _cuda_processes(self) -> list[int]:
        """Return the processes of the program that have a CUDA context."""
        family = set(self._host.processes.descendants(self._pid))
        if self._host.processes.namespace_is_host() is False:
            # NVML's PIDs are of another namespace; every CUDA context has this node open.
            return sorted(family & set(self._host.processes.open_files(_CUDA_NODE).by_pid))
        pids: set[int] = set()
        for gpu in self._gpus:
            # Those of a GPU that does not answer are found by the next look.
            with contextlib.suppress(GpushareError):
                listed = self._host.nvml.processes(gpu) or ()
                pids |= {each.pid for each in listed if each.pid in family and (each.compute or each.mps)}
        return sorted(pids)


class ChannelPauser(ChannelsOff):
    """Takes the channels of a program off the GPU and back, with a record from which `gpushare resume` can free it.

    The record is written before the first pause, and again when channels change. If this gpushare dies, its guard ends
    the program, or `gpushare resume` frees it.
    """

    def __init__(self, host: Host, pid: int) -> None:
        super().__init__(host)
        self._pid = pid
        self._has_record = False
        self._name: str | None = None
        # What was found, by PID.
        self.known: dict[int, Channels] = {}

    def find(self, pids: Sequence[int]) -> None:
        """Find the channels of these processes, which are the known ones from then on, and write them into the record.

        New processes are scanned, and those whose channels are off are read again. Of the others `disable` finds out whether
        they have other channels now.

        Raises GpushareError: they cannot be paused in this way.
        """
        channels_of: dict[int, Channels] = {}
        for pid in pids:
            earlier = self.known.get(pid)
            # NotFound: its context has ended, or is another process's, inherited.
            with contextlib.suppress(NotFound):
                if earlier is None:
                    channels_of[pid] = probed_channels(self._host, self.control, pid)
                elif pid not in self.off:
                    channels_of[pid] = earlier
                else:
                    present = self.control.find_again(earlier)
                    # `disable` leaves out the objects that are in `off`: so a new object only if channels have changed.
                    channels_of[pid] = earlier if channel_names(present) == channel_names(earlier) else present
            if pid in channels_of and channels_of[pid].under_mps:
                raise NotSupported(
                    f"process {pid} is under MPS", "its channels are those of the server", code="under_mps"
                )
        if channels_of != self.known:
            self._write_record(PAUSED if self.off else RUNNING, channels_of.values())
            self.known = channels_of

    def disable(self) -> None:
        """Take the known channels off the GPU. Processes that have other channels now are forgotten, for the next `find`.

        Raises GpushareError: it cannot be done.
        """
        changed = False
        for pid, channels in list(self.known.items()):
            if self.off.get(pid) is channels:
                continue
            changed = True
            try:
                self.take_off(channels)
            except NotFound:
                del self.known[pid]
        if changed and self.off:
            self._note_state(PAUSED)

    def enable(self) -> Mapping[int, str]:
        """Put the channels back on the GPU; return by PID in words why the driver refuses some. The next call tries again."""
        refused: dict[int, str] = {}
        if not self.off:
            return refused
        kept_by_root = processes_paused_by_root(self._host)
        for pid, channels in list(self.off.items()):
            # What root has paused too stays off until root resumes it.
            if (pid, channels.started) in kept_by_root:
                continue
            try:
                self.put_back(pid)
            except GpushareError as error:
                refused[pid] = f"process {pid} is still off the GPU: {error.message.removeprefix(f'process {pid}: ')}"
        if not self.off:
            self._note_state(RUNNING)
        return refused

    def close(self) -> None:
        """Forget the record, unless channels are still off the GPU: from it `gpushare resume` puts them back."""
        if self._has_record and not self.off:
            PAUSES.drop(self._host, self._pid)
        super().close()

    def _note_state(self, state: str) -> None:
        """Write whether the program is paused now, for others to see; on a full disk it is paused and resumed all the same."""
        with contextlib.suppress(GpushareError):
            self._write_record(state)

    def _write_record(self, state: str, new: Iterable[Channels] = ()) -> None:
        """Write the record of the pause, from which another gpushare can put back the known channels and ``new`` ones."""
        program = self._host.processes.identity(self._pid)
        if program is None:
            return
        # The records of all jobs are read for it: once, as production may work and rest many times a second.
        self._name = self._name or job_names(self._host, [self._pid]).get(self._pid)
        job = job_of(self._host, program, self._name)
        # By PID, so that new channels replace what is known. What is off stays in the record until it is on.
        by_pid = {each.pid: each for each in (*self.known.values(), *self.off.values(), *new)}
        gpushare = self._host.processes.identity(os.getpid())
        write(paused_job(self._host, job, state, channels=by_pid.values(), keeper=gpushare, by_run=True))
        self._has_record = True


def resume_all(host: Host, pids: Sequence[int]) -> None:
    """Continue (SIGCONT) programs and their descendants, which a gpushare that died may have stopped, so that they can end."""
    members = [member for pid in pids for member in host.processes.descendants(pid)]
    signal_all(host.processes, starts_of(host.processes, members), signal.SIGCONT)
