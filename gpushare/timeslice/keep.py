"""``gpushare timeslice keep``: give each GPU process the time-slice that the rules of the host say, for as long as it runs.

Once per second NVML lists the processes. Each new process is scanned and set, and checked again from time to time: it may
have made another CUDA context, and a slice that another program has set since is left alone. The work of a second is bounded,
and the user whose processes took the least of it comes first: no user's processes keep others waiting.

A slice is recorded before it is set, and restored at the end. What a killed keep has left is restored by the next keep.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from typing import Any, Final, NamedTuple, NoReturn

from gpushare.base.errors import GpushareError, InUse, NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import Gpu
from gpushare.base.typed import Count, Pid
from gpushare.base.units import counted, first_few, format_slice
from gpushare.base.values import dataclass
from gpushare.host.capabilities import user_name
from gpushare.host.channels import ChannelControl, Channels, Group
from gpushare.host.host import Host
from gpushare.host.identity import Identity, identity_of
from gpushare.host.origin import Origin
from gpushare.host.process import info_of
from gpushare.host.slice_lock import probed_channels, slices_locked
from gpushare.host.store import Kept, RecordStore
from gpushare.mps.control import is_server
from gpushare.signals import ending_signals_held
from gpushare.timeslice.rules import KEEP_UNIT, SLICE_PER_WEIGHT_US, Decision, Names, Rule, decide
from gpushare.timeslice.slices import (
    note_restored,
    note_slice,
    read_slices,
    record_put_back_on_failure,
    under_mps_error,
)

LOOK_SECONDS: Final = 1.0
# Time for calls to the driver in one look; one call may take longer, up to the limit of a scan.
_WORK_SECONDS: Final = 0.7
_SCAN_SECONDS: Final = 2.0
_SCAN_AGAIN_SECONDS: Final = 5.0
# Waits before each further try at a process whose first context is not complete yet, or for which the driver does not answer.
_TRY_AGAIN: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 30.0, 120.0)
_FIRST_CHECK_SECONDS: Final = 1.0
_MOST_CHECK_SECONDS: Final = 15.0
_UNDO_SECONDS: Final = 60.0
_MOST_PROCESSES: Final = 4096
# The time that users have taken is halved this often.
_FORGET_SECONDS: Final = 30.0

Key = tuple[int, int]


class KeptSlice(NamedTuple):
    """What a keep has set on a group, by its client and handle: the slice before keep, now, and keep's previous one."""

    client: Count
    handle: Count
    before: Count
    now: Count
    last: Count

    @property
    def key(self) -> Key:
        """Return what names its group, as `Group.key`."""
        return self.client, self.handle


@dataclass(frozen=True, kw_only=True)
class KeptProcess:
    """What a keep has set on one process. ``channels`` are only what it takes to read and set the slices."""

    pid: Pid
    started: Count
    uid: int | None
    channels: Channels
    slices: tuple[KeptSlice, ...]


class _Wish(NamedTuple):
    """The slice that a channel group is to have; ``decision`` None: no rule is for it any more, and its old slice comes back."""

    group: Group
    kept: KeptSlice
    decision: Decision | None


@dataclass(frozen=True)
class Policy:
    """The rules of a host, with the ids of the users and groups that they name."""

    rules: tuple[Rule, ...]
    names: Names = field(default_factory=Names)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a process.

    ``kind``: ``set`` (by a rule), ``restored`` (its rule, or `timeslice keep`, has ended), ``changed`` (by someone else, and left
    alone), ``skipped`` (``why`` is the reason). ``rule`` is the place of the rule in the file.
    """

    kind: str
    pid: int
    user: str | None = None
    gpu: int | None = None
    before_us: int | None = None
    slice_us: int | None = None
    rule: str | None = None
    why: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        process = f"process {self.pid}" + (f" ({self.user})" if self.user else "")
        if self.kind == "skipped":
            return f"{process}: skipped: {self.why}"
        if self.gpu is not None:
            process += f" on GPU {self.gpu}"
        new_slice = "unknown" if self.slice_us is None else format_slice(self.slice_us)
        if self.kind == "changed":
            return f"{process}: set to {new_slice} by someone else; left alone"
        change = new_slice if self.before_us is None else f"{format_slice(self.before_us)} -> {new_slice}"
        if self.kind == "restored":
            change = f"restored {change}"
        if self.rule:
            change += f" (rule {self.rule}" + (f", limited by {self.why})" if self.why else ")")
        return f"{process}: {change}"


@dataclass
class _Process:
    """A process that NVML lists.

    ``channels`` are its channel groups at the last scan; ``scan``: it has to be scanned, for the first time or because its
    contexts have changed. ``ignored``: it is left alone until the rules are read again.
    """

    pid: int
    gpus: frozenset[int]
    mps: bool
    origin: Origin
    due: float
    channels: Channels | None = None
    scan: bool = True
    slices: dict[Key, KeptSlice] = field(default_factory=dict)
    ignored: bool = False
    # Another program has changed it after keep.
    changed: bool = False
    # Its slices are those of a killed keep, some of which may have been put back already.
    taken_over: bool = False
    tries: int = 0
    wait: float = _FIRST_CHECK_SECONDS

    @property
    def kept(self) -> KeptProcess | None:
        """Return what is set on it, for the record; None: nothing is."""
        if not self.slices or self.channels is None:
            return None
        # Slices are read and set by the handles of the groups; their channels would only make the record long.
        groups = tuple(replace(group, channels=()) for group in self.channels.groups)
        return KeptProcess(
            pid=self.pid,
            started=self.origin.started,
            uid=self.origin.uid,
            channels=replace(self.channels, groups=groups),
            slices=tuple(self.slices.values()),
        )


class Keeper:
    """Keeps the slices of a host's processes. ``control`` makes the driver's calls; ``clock`` is monotonic."""

    def __init__(
        self, host: Host, control: ChannelControl, policy: Policy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host, self._control, self._policy, self._clock = host, control, policy, clock
        # Read at the first look: `recover` needs no NVML.
        self._gpus: dict[int, Gpu] = {}
        self._processes: dict[int, _Process] = {}
        # The seconds of work that each user's processes took lately, and when they were halved last, so that old work is forgotten.
        self._spent: dict[int | None, float] = {}
        self._forgotten_at = clock()
        # What has happened in this look.
        self._events: list[Event] = []
        # Processes whose slices `undo` could not put back.
        self.not_restored: list[int] = []

    def recover(self) -> list[Event]:
        """Put back what a killed keep left.

        What cannot be put back now counts as set by this keep: a rule replaces it, and `undo` puts it back.
        """
        record = KEEPS.read(KEEPS.path(self._host, _KEY))
        for kept in () if record is None else record.processes:
            origin = self._host.origin(kept.pid)
            if origin is not None and origin.started == kept.started:
                slices = {slices.key: slices for slices in kept.slices}
                self._processes[kept.pid] = _Process(
                    *(kept.pid, frozenset(), False, origin, self._clock()),
                    channels=kept.channels,
                    slices=slices,
                    taken_over=True,
                )
        events = self.undo()
        self._processes = {pid: process for pid, process in self._processes.items() if process.slices}
        self._write()
        return events

    def step(self) -> list[Event]:
        """Look at the processes of all GPUs once, and do what is due; return what happened."""
        self._events = []
        if not self._gpus:
            self._gpus = {gpu.index: gpu for gpu in self._host.nvml.identities()}
        self._update_processes()
        now = self._clock()
        if now - self._forgotten_at >= _FORGET_SECONDS:
            self._forgotten_at = now
            self._spent = {uid: spent / 2 for uid, spent in self._spent.items() if spent > 0.001}
        end = now + _WORK_SECONDS
        while (now := self._clock()) < end:
            due = [process for process in self._processes.values() if process.due <= now and not process.ignored]
            if not due:
                break
            # Of those that are due, one of the user who took the least time.
            process = min(due, key=lambda process: (self._spent.get(process.origin.uid, 0.0), process.due))
            uid, began = process.origin.uid, self._clock()
            self._work(process)
            self._spent[uid] = self._spent.get(uid, 0.0) + self._clock() - began
        return self._events

    def _update_processes(self) -> None:
        """Take up new processes, and forget those that have ended."""
        listed, silent_gpus = self._listed_processes()
        ended = []
        for process in self._processes.values():
            # A GPU that does not answer for a moment must not let us forget what was set. One without GPUs was left by a
            # killed keep, and not listed since.
            may_be_listed = process.pid in listed or process.gpus & silent_gpus or not process.gpus
            if not (may_be_listed and self._lives(process)):
                ended.append(process)
        for process in ended:
            del self._processes[process.pid]
        for pid, (gpus, mps) in listed.items():
            earlier = self._processes.get(pid)
            if earlier is not None:
                if earlier.gpus != gpus and not earlier.gpus & silent_gpus:
                    earlier.gpus, earlier.mps, earlier.due = gpus, mps, self._clock()
                continue
            if len(self._processes) >= _MOST_PROCESSES:
                break
            origin = self._host.origin(pid)
            if origin is not None:
                self._processes[pid] = _Process(pid, gpus, mps, origin, due=self._clock())
        if any(process.slices for process in ended):
            self._try_to_write()

    def _listed_processes(self) -> tuple[dict[int, tuple[frozenset[int], bool]], set[int]]:
        """Return of each compute process its GPUs and whether it is under MPS, and the GPUs that do not answer."""
        listed: dict[int, tuple[frozenset[int], bool]] = {}
        silent_gpus = set()
        for index in self._gpus:
            try:
                processes = self._host.nvml.processes(index) or ()
            except GpushareError:
                silent_gpus.add(index)
                continue
            for process in processes:
                if process.compute or process.mps:
                    gpus, mps = listed.get(process.pid, (frozenset(), False))
                    listed[process.pid] = gpus | {index}, mps or process.mps
        return listed, silent_gpus

    def _renew_origin(self, process: _Process) -> None:
        """Read again what the rules go by: another program may run in this process by now."""
        origin = self._host.origin(process.pid)
        if origin is not None and origin.started == process.origin.started:
            process.origin = origin

    def _lives(self, process: _Process) -> bool:
        return self._host.processes.alive(process.pid, process.origin.started)

    def _work(self, process: _Process) -> None:
        """Do what is due for one process: scan it, or check its slices; an error is an event."""
        try:
            if process.scan or process.channels is None:
                self._scan_and_apply(process)
            else:
                self._apply_rules(process, self._control.find_again(process.channels))
                self._check_later(process)
        except (NotFound, TimedOut) as error:
            # It has ended, or its contexts have changed; while NVML lists it, it may make another one.
            process.scan = True
            self._try_later(process, error)
        except GpushareError as error:
            self._skip(process, error)

    def _check_later(self, process: _Process) -> None:
        """Look at a process again after a wait, which is doubled each time."""
        process.wait = min(2 * process.wait, _MOST_CHECK_SECONDS)
        process.due = self._clock() + process.wait

    def _try_later(self, process: _Process, error: GpushareError) -> None:
        """Try again after the next wait; after the last, leave the process alone, and tell ``error``."""
        if process.tries < len(_TRY_AGAIN):
            process.due = self._clock() + _TRY_AGAIN[process.tries]
            process.tries += 1
        elif error.code != "process_gone":
            self._skip(process, error)
        else:
            process.ignored = True

    def _skip(self, process: _Process, error: GpushareError) -> None:
        """Leave a process alone until the rules are read again, and say why."""
        process.ignored = True
        self._events.append(_skipped_event(process.pid, process.origin.uid, error))

    def _scan_and_apply(self, process: _Process) -> None:
        """Scan a process for its channel groups and set their slices; if no rule is for it, only look at it again later."""
        if not any(self._decision(process, gpu, SLICE_PER_WEIGHT_US) for gpu in process.gpus):
            self._check_later(process)
            self._renew_origin(process)
            return
        self._check_allowed(process)
        # One that was slow has more time: the first scan is short, so that other processes have their turn.
        limit = _SCAN_SECONDS if process.tries == 0 else _SCAN_AGAIN_SECONDS
        channels = probed_channels(self._host, self._control, process.pid, process.origin.started, seconds=limit)
        if channels.under_mps:
            raise under_mps_error(process.pid)
        process.wait = _FIRST_CHECK_SECONDS
        self._apply_rules(process, channels)
        process.tries, process.due = 0, self._clock() + process.wait

    def _check_allowed(self, process: _Process) -> None:
        """Raise unless this user may set the slice of a process: none under MPS, none of another user."""
        if process.mps or is_server(info_of(self._host.processes, process.pid).name):
            raise under_mps_error(process.pid)
        if not self._host.root and process.origin.uid != self._host.uid:
            raise NoPermission(f"process {process.pid}: it belongs to another user", "run as root", code="other_user")

    def _decision(self, process: _Process, gpu: int, before: int) -> Decision | None:
        """Return what the rules give a process on a GPU, whose slice was ``before``; None: no rule is for it."""
        return decide(self._policy.rules, self._policy.names, process.origin, self._gpus[gpu], before)

    def _gpu_of(self, process: _Process, group: Group) -> int | None:
        """Return the index of the GPU of a channel group; None: unknown."""
        if len(process.gpus) == 1:
            return next(iter(process.gpus))
        uuid = (group.gpu or "").lower()
        return next((index for index in process.gpus if (self._gpus[index].uuid or "").lower() == uuid), None)

    def _apply_rules(self, process: _Process, channels: Channels) -> None:
        """Set the groups of a process as the rules say. If another program has changed one of them, leave all alone."""
        wishes = [wish for group in channels.groups if (wish := self._wish_for(process, group)) is not None]
        if process.changed:
            # The other groups stay in the record: they are put back at the end.
            process.ignored = True
            self._try_to_write()
            return
        if not wishes:
            raise NotSupported(
                f"process {process.pid}: the GPU or the time-slice of its channel groups is not known",
                "see: gpushare doctor",
                code="no_compute_group",
            )
        earlier = process.channels, process.scan, process.taken_over, process.slices
        process.channels, process.scan, process.taken_over = channels, False, False
        process.slices = {wish.kept.key: wish.kept for wish in wishes}
        if process.slices != earlier[-1]:
            # Before anything is set: if this gpushare is killed, the next one knows what to put back.
            try:
                self._write()
            except GpushareError:
                process.channels, process.scan, process.taken_over, process.slices = earlier
                raise
        # One call to the driver, and one event, for all groups that change in the same way.
        batches: dict[tuple[Any, ...], list[_Wish]] = {}
        for wish in wishes:
            group, wanted_us = wish.group, wish.kept.now
            if group.slice_us != wanted_us:
                rule = None if wish.decision is None else wish.decision.rule.mark
                batches.setdefault((self._gpu_of(process, group), group.slice_us, wanted_us, rule), []).append(wish)
        for batch in batches.values():
            self._set_batch(process, batch)
        if not any(wish.decision for wish in wishes):
            # It is scanned again when a rule is for it.
            process.slices, process.channels, process.scan = {}, None, True
            self._try_to_write()

    def _wish_for(self, process: _Process, group: Group) -> _Wish | None:
        """Return what a group is to have; None: its slice or GPU is unknown, or another program has changed the slice.

        If it was changed, the process is marked so, the group is forgotten, and an event says so.
        """
        current, gpu = group.slice_us, self._gpu_of(process, group)
        if current is None or gpu is None:
            return None
        before = current
        earlier = process.slices.get(group.key)
        if earlier is not None:
            before = earlier.before
            # Keep's own values: the one that it wanted, or its previous one if it could not set that yet.
            own_values = {earlier.now, earlier.last}
            if process.taken_over:
                own_values.add(before)
            if current not in own_values:
                process.slices.pop(group.key)
                process.changed = True
                self._note("changed", process, group, slice_us=current, before_us=earlier.now)
                return None
        decision = self._decision(process, gpu, before)
        wanted_us = before if decision is None else decision.microseconds
        return _Wish(group, KeptSlice(*group.key, before, wanted_us, last=current), decision)

    def _note(self, kind: str, process: _Process, group: Group, **more: Any) -> None:
        """Note what has happened to a channel group of a process."""
        gpu, user = self._gpu_of(process, group), _user_name(process.origin.uid)
        self._events.append(Event(kind=kind, pid=process.pid, user=user, gpu=gpu, **more))

    def _set_batch(self, process: _Process, batch: Sequence[_Wish]) -> None:
        """Set a batch: groups on one GPU that have the same slice and get the same one, by the same rule or, back, without one."""
        group, kept, decision = batch[0]
        channels = Channels(pid=process.pid, started=process.origin.started, groups=tuple(wish.group for wish in batch))
        with slices_locked(self._host):
            if set(self._control.read_slices(channels)) != {group.slice_us}:
                # Another gpushare has just set it: the next look handles that.
                return
            with record_put_back_on_failure(self._host, channels):
                if decision is not None:
                    # For `status`, and for `timeslice reset`.
                    note_slice(self._host, channels, kept.now)
                self._control.set_slice(channels, kept.now)
            if decision is None:
                note_restored(self._host, process.pid, process.origin.started, kept.now)
        for wish in batch:
            process.slices[wish.kept.key] = wish.kept._replace(last=wish.kept.now)
        facts: dict[str, Any] = {"before_us": group.slice_us, "slice_us": kept.now}
        if decision is None:
            self._note("restored", process, group, **facts)
        else:
            self._note("set", process, group, **facts, rule=str(decision.rule.mark), why=decision.limited)

    def follow(self, policy: Policy) -> None:
        """Follow other rules from now on. What another program has changed stays as it is."""
        self._policy = policy
        self._gpus = {gpu.index: gpu for gpu in self._host.nvml.identities()} or self._gpus
        for process in self._processes.values():
            self._renew_origin(process)
            process.ignored, process.due = process.changed, self._clock()
            process.tries, process.wait = 0, _FIRST_CHECK_SECONDS

    def undo(self) -> list[Event]:
        """Restore the slices that keep has set and no other program has changed since.

        The record keeps the rest for the next keep, or for `gpushare timeslice reset`.
        """
        end = self._clock() + _UNDO_SECONDS
        failed: dict[int, list[Event]] = {}
        events: list[Event] = []
        # A process that is done has no slices: the second time is for those that failed.
        for _ in range(2):
            for process in self._processes.values():
                kept = process.kept
                if kept is None:
                    continue
                if self._clock() >= end:
                    break
                put_back = _put_back(self._host, self._control, kept)
                if any(event.kind == "skipped" for event in put_back) and self._lives(process):
                    failed[process.pid] = put_back
                    continue
                failed.pop(process.pid, None)
                events += put_back
                process.slices.clear()
        self.not_restored = [process.pid for process in self._processes.values() if process.slices]
        self._try_to_write()
        return events + [event for put_back in failed.values() for event in put_back]

    def _write(self) -> None:
        """Write the record of what is set. Raises GpushareError: it cannot be written."""
        kept_processes = [kept for process in self._processes.values() if (kept := process.kept) is not None]
        # 0: without its start the record reads as that of a killed keep.
        me = identity_of(os.getpid()) or Identity(os.getpid(), 0)
        path = KEEPS.path(self._host, _KEY)
        KEEPS.write(KeepRecord(**me._asdict(), processes=tuple(kept_processes), path=path))

    def _try_to_write(self) -> None:
        """Write the record of what is set; a failure is no reason to stop."""
        with contextlib.suppress(GpushareError):
            self._write()


def _user_name(uid: int | None) -> str | None:
    return None if uid is None else user_name(uid)


def _skipped_event(pid: int, uid: int | None, error: GpushareError) -> Event:
    """Return the event that a process is left alone because of an error."""
    reason = error.message.removeprefix(f"process {pid}: ")
    return Event(kind="skipped", pid=pid, user=_user_name(uid), why=reason, code=error.code)


def _put_back(host: Host, control: ChannelControl, kept: KeptProcess) -> list[Event]:
    """Restore each group of a process that still has the slice that was set; return what happened.

    A ``skipped`` event: not all could be restored.
    """
    groups = {group.key: group for group in kept.channels.groups}
    restored: set[tuple[int, int]] = set()
    try:
        with slices_locked(host):
            for slices in kept.slices:
                if slices.key not in groups:
                    continue
                channels = replace(kept.channels, groups=(groups[slices.key],))
                # Its context, or the process, may have ended.
                with contextlib.suppress(NotFound):
                    (current,) = control.read_slices(channels)
                    # One that another program has set since stays. An earlier try may have restored it, and failed to note it.
                    if current not in {slices.before, slices.now, slices.last}:
                        continue
                    if current != slices.before:
                        control.set_slice(channels, slices.before)
                    note_restored(host, kept.pid, kept.started, slices.before)
                    if current != slices.before:
                        restored.add((current, slices.before))
    except GpushareError as error:
        return [_skipped_event(kept.pid, kept.uid, error)]
    user = _user_name(kept.uid)
    return [
        Event(kind="restored", pid=kept.pid, user=user, before_us=current, slice_us=before)
        for current, before in sorted(restored)
    ]


# -- the record, and the only keep of a host ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeepRecord(Kept):
    """The record of the keep that runs on a host, or that was killed (its process does not live)."""

    pid: Pid
    started: Count
    processes: tuple[KeptProcess, ...] = ()

    @property
    def runs(self) -> bool:
        return identity_of(self.pid) == (self.pid, self.started)


KEEPS: Final = RecordStore(KeepRecord, "keep", "the record of the time-slices that were set")
_KEY: Final = "keep"


def keep_record(host: Host) -> KeepRecord | None:
    """Return the record of this user's keep or root's: of the one that runs, else of one that was killed. None: there is none."""
    records = [record for record in KEEPS.all(host) if not record.keeper_uid]
    return next((record for record in records if record.runs), records[0] if records else None)


@contextlib.contextmanager
def sole_keep(host: Host) -> Iterator[None]:
    """Be the only keep of a host meanwhile.

    Raises:
        InUse: another one runs (code ``keep_running``).
        NoPermission, OperationFailed: the record cannot be written.
    """
    path = KEEPS.path(host, _KEY)

    def raise_in_use(_seconds: float = 0.0) -> NoReturn:
        """Raise InUse: another keep runs."""
        record = keep_record(host)
        # A keep that has just begun may still have the record of one that was killed.
        if record is None or not record.runs:
            which, hint = "", f"see which: fuser -v {shlex.quote(str(path.parent / 'lock'))}"
        else:
            which = f" (process {record.pid})"
            hint = f"reload its file: kill -HUP {record.pid}; or stop it: kill {record.pid}; as a unit: systemctl reload {KEEP_UNIT}"
        raise InUse(f"timeslice keep is already running on this host{which}", hint, code="keep_running")

    # The lock keeps out another keep of this user, and the record root's.
    record = keep_record(host)
    if record is not None and record.keeper_uid == 0 and record.runs:
        raise_in_use()
    with KEEPS.locked(host, on_wait=raise_in_use):
        yield
        record = KEEPS.read(path)
        if record is None or not record.processes:
            KEEPS.forget(path)


# -- the loop ----------------------------------------------------------------------------------------------------------


def keep(host: Host, policy: Policy, *, reload: Callable[[], Policy], say: Callable[[Sequence[Event]], None]) -> None:
    """Keep the slices of this host's processes until SIGTERM or SIGINT; then put everything back.

    ``reload`` returns the rules when SIGHUP asks for them, and reports its own errors by raising GpushareError, which ``say``
    is not told: the earlier rules stay.

    Raises:
        InUse: another keep runs.
        OperationFailed: not everything could be put back (code ``slices_left``).
    """
    with sole_keep(host), ending_signals_held() as wait, host.open_channels() as control:
        keeper = Keeper(host, control, policy)
        say(keeper.recover())
        try:
            while True:
                began = time.monotonic()
                say(keeper.step())
                number = wait(max(0.0, began + LOOK_SECONDS - time.monotonic()))
                if number == signal.SIGHUP:
                    with contextlib.suppress(GpushareError):
                        keeper.follow(reload())
                elif number is not None:
                    break
        finally:
            events = keeper.undo()
            if not keeper.not_restored:
                # Even where the disk is full, and the record could not be written again.
                KEEPS.forget(KEEPS.path(host, _KEY))
        say(events)
        if keeper.not_restored:
            processes = counted(len(keeper.not_restored), "process")
            raise OperationFailed(
                f"the time-slices of {processes} could not be put back: {first_few(keeper.not_restored, 5)}",
                f"the next timeslice keep does it; or: gpushare timeslice reset {keeper.not_restored[0]}",
                code="slices_left",
            )


# -- what would be done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rule for a process on a GPU; the driver was not asked about the process."""

    pid: int
    user: str | None
    name: str | None
    gpu: int
    rule: str | None = None
    outcome: str | None = None
    slice_us: int | None = None
    why: str | None = None


def verdicts(host: Host, policy: Policy) -> list[Verdict]:
    """Return which rule is for each process on the GPUs, as if each had the default slice: no slice is read."""
    rows = []
    for gpu in host.nvml.identities():
        seen: set[int] = set()
        for process in host.nvml.processes(gpu.index) or ():
            if process.pid in seen or not (process.compute or process.mps):
                continue
            seen.add(process.pid)
            origin = host.origin(process.pid)
            if origin is None:
                continue
            rows.append(_verdict_on(host, policy, gpu, process.pid, origin, mps=process.mps))
    return rows


def _verdict_on(host: Host, policy: Policy, gpu: Gpu, pid: int, origin: Origin, *, mps: bool) -> Verdict:
    """Return the rule for one process on a GPU, and why it would not be applied."""
    name = info_of(host.processes, pid).name
    verdict = Verdict(pid=pid, user=_user_name(origin.uid), name=name, gpu=gpu.index)
    decision = decide(policy.rules, policy.names, origin, gpu, SLICE_PER_WEIGHT_US)
    if decision is None:
        return verdict
    verdict = replace(verdict, rule=str(decision.rule.mark), outcome=decision.rule.outcome)
    if mps or is_server(verdict.name):
        return replace(verdict, why="skipped: under MPS")
    if not host.root and origin.uid != host.uid:
        return replace(verdict, why="skipped: it belongs to another user")
    limited = None if decision.limited is None else f"limited by {decision.limited}"
    return replace(verdict, slice_us=decision.microseconds, why=limited)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A process whose time-slice is not what its rule says. ``found_us`` None: the slice cannot be read."""

    pid: int
    user: str | None
    gpu: int
    rule: str
    found_us: int | None
    wanted_us: int

    def __str__(self) -> str:
        who = f"process {self.pid}" + (f" ({self.user})" if self.user else "")
        slice_text = "unknown" if self.found_us is None else format_slice(self.found_us)
        return f"{who} on GPU {self.gpu}: time-slice {slice_text}; the file: {format_slice(self.wanted_us)} (rule {self.rule})"


def deviations(host: Host, policy: Policy) -> list[Deviation]:
    """Return the processes whose slice is not the one of their rule; their slices are read, and nothing is written."""
    rows = []
    uuids = {gpu.index: gpu.uuid for gpu in host.nvml.identities()}
    with host.open_channels() as control:
        for verdict in verdicts(host, policy):
            if verdict.slice_us is None or verdict.rule is None:
                continue
            wanted_us = verdict.slice_us
            wrong = [
                slice_us
                for slice_us in _slices_on(host, control, verdict.pid, uuids[verdict.gpu])
                # A limited rule gives less than the verdict says to a process whose slice was shorter than the default.
                if slice_us is None or slice_us > wanted_us or (slice_us < wanted_us and verdict.why is None)
            ]
            if wrong:
                pid, user, gpu = verdict.pid, verdict.user, verdict.gpu
                row = Deviation(pid=pid, user=user, gpu=gpu, rule=verdict.rule, found_us=wrong[0], wanted_us=wanted_us)
                rows.append(row)
    return rows


def _slices_on(host: Host, control: ChannelControl, pid: int, uuid: str | None) -> Sequence[int | None]:
    """Return the slices of a process on a GPU; None: they cannot be read. Empty: the process has ended, or is under MPS."""
    process = host.processes.identity(pid)
    if process is None:
        return ()
    reading = read_slices(control, pid, process.started)
    if reading.under_mps or (reading.error is not None and reading.error.code == "process_gone"):
        return ()
    return reading.on(uuid) or (None,)
