"""Time-slices of processes: read, set with a record of the old value, restored; `status` shows the records.

A slice counts for all CUDA contexts of a process, on all its GPUs. It ends with the process: nothing of the GPU is set. What
the driver offers, and who may call it, is in `gpushare.host.channels`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeAlias, TypeVar

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, NotFound, NotSupported, TimedOut, may_be_done
from gpushare.base.typed import Count, JobName, Pid, Within
from gpushare.base.units import format_slice
from gpushare.base.values import dataclass
from gpushare.host.identity import uptime
from gpushare.host.process import info_of
from gpushare.host.slice_lock import SLICES, probed_channels, slices_locked
from gpushare.host.store import Job, JobProcess, Kept, Past, RecordStore
from gpushare.mps.control import is_server
from gpushare.plan import Loss, Plan, Step

if TYPE_CHECKING:
    from gpushare.host.channels import ChannelControl, Channels, Group
    from gpushare.host.host import Host

T = TypeVar("T")
OnFound: TypeAlias = "Callable[[Channels], object]"
# The slices that a user may set.
LEAST_US: Final = 20
MOST_US: Final = 30_000
# What comes or goes is found at the next look: a process, or the context that it has not made yet.
PASSING: Final = frozenset({"process_gone", "no_context", "inherited_context", "stale_channels", "no_job"})
# A process may make or close contexts between a look and a call: look at it again at most this many times.
_MOST_STALE: Final = 2


def check_settable(host: Host) -> None:
    """Raise NotSupported if no time-slice can be set on this host, as far as the kernel tells before a program starts."""
    with host.open_channels() as control:
        control.check()


def check_slice(microseconds: int) -> int:
    """Return a slice unchanged. Raises BadUsage: it is too short. One above 30 ms is for root, see `plan_slice`."""
    if microseconds < LEAST_US:
        raise BadUsage(
            f"a time-slice of {format_slice(microseconds)} is below {format_slice(LEAST_US)}",
            f"give {format_slice(LEAST_US)} to {format_slice(MOST_US)}; below 100us little is gained",
            code="bad_slice",
        )
    return microseconds


# -- records -----------------------------------------------------------------------------------------------------------


class FoundSlice(NamedTuple):
    """The slice that a channel group had before gpushare set one; `Group.key` names the group."""

    client: Count
    handle: Count
    slice_us: Annotated[int, Within(1, 999_999_999)]


@dataclass(frozen=True, kw_only=True)
class SliceRecord(Kept):
    """What gpushare set for a process, and what its channel groups had ``before``."""

    pid: Pid
    started: Count
    slice_us: Count
    before: tuple[FoundSlice, ...]
    # Seconds since boot.
    set_at: Past
    job: JobName | None = None

    def slice_before(self, group: Group) -> int | None:
        """Return the slice that a group had; a group made since then counts as the first one. None: no group is recorded."""
        slices = {(earlier.client, earlier.handle): earlier.slice_us for earlier in self.before}
        return slices.get(group.key) or next(iter(slices.values()), None)

    @property
    def slices_before(self) -> set[int]:
        """Return the different slices that the groups had."""
        return {earlier.slice_us for earlier in self.before}


RECORDS: Final = RecordStore(SliceRecord, SLICES, "the record of a time-slice")


def slice_records(host: Host) -> dict[int, SliceRecord]:
    """Return what gpushare has set for living processes, by PID: this user's records and root's, the latest of each.

    No call to the driver: a slice that another program changed since then is not seen.
    """
    latest: dict[int, SliceRecord] = {}
    for record in sorted(RECORDS.all(host), key=lambda record: record.set_at):
        if not record.keeper_uid and host.processes.alive(record.pid, record.started):
            latest[record.pid] = record
    return latest


def slice_record(host: Host, pid: int, started: int) -> SliceRecord | None:
    """Return the record of one process, as `slice_records`."""
    records = [record for record in RECORDS.find(host, pid) if (record.pid, record.started) == (pid, started)]
    return max(records, key=lambda record: record.set_at, default=None)


def forget_ended(host: Host) -> None:
    """Remove this user's records of processes that have ended; a failure does not matter."""
    RECORDS.sweep(host)


def put_record_back(host: Host, pid: int, record: SliceRecord | None) -> None:
    """Make the record of a process what it was; None: there was none. Raises as `note_slice`."""
    if record is None:
        RECORDS.forget(RECORDS.path(host, pid))
    else:
        RECORDS.write(replace(record, path=RECORDS.path(host, pid)))


def note_slice(host: Host, channels: Channels, microseconds: int, *, job: str | None = None) -> None:
    """Record a slice that is about to be set: if gpushare is killed after the call, `reset` still knows what was there.

    Raises NoPermission, OperationFailed: the record cannot be written.
    """
    earlier = slice_record(host, channels.pid, channels.started)
    before = () if earlier is None else earlier.before
    recorded = {(group.client, group.handle) for group in before}
    # After a swap the groups are new, and `renew_slices` gave them gpushare's own slice: that is not what they had before.
    own_us = None if earlier is None else earlier.slice_us
    new = (
        FoundSlice(*group.key, group.slice_us)
        for group in channels.groups
        if group.slice_us and group.slice_us != own_us and group.key not in recorded
    )
    record = SliceRecord(
        pid=channels.pid,
        started=channels.started,
        slice_us=microseconds,
        before=(*before, *new),
        set_at=uptime(),
        job=job or (None if earlier is None else earlier.job),
        path=RECORDS.path(host, channels.pid),
    )
    RECORDS.write(record)


def note_restored(host: Host, pid: int, started: int, microseconds: int) -> None:
    """Record that a process has an earlier slice again; the record goes if that is the slice from before gpushare.

    Raises NoPermission, OperationFailed: the record cannot be written.
    """
    record = slice_record(host, pid, started)
    if record is None:
        return
    is_original = record.slices_before == {microseconds}
    put_record_back(host, pid, None if is_original else replace(record, slice_us=microseconds, set_at=uptime()))


# -- one process -------------------------------------------------------------------------------------------------------


def find_channels(host: Host, control: ChannelControl, process: JobProcess, *, probe: bool = True) -> Channels:
    """Scan a process whose slice is to be set. Without ``probe`` nothing is written, and whether it can be set is unproved.

    Raises:
        NotSupported: it is a client of MPS (``under_mps``); and as `ChannelControl.find`.
        NotFound, NoPermission, TimedOut, OperationFailed: as `ChannelControl.find`.
    """
    if process.under_mps:
        raise under_mps_error(process.pid)
    if probe:
        channels = probed_channels(host, control, process.pid, process.started)
    else:
        channels = control.find(process.pid, process.started, probe=False)
    if channels.under_mps:
        raise under_mps_error(process.pid)
    return channels


def under_mps_error(pid: int) -> NotSupported:
    return NotSupported(
        f"process {pid}: it runs under MPS, where all clients of a server share one time-slice",
        "start it again outside MPS: gpushare run --slice TIME -- CMD; or with a lower limit: gpushare run --threads PCT -- CMD",
        code="under_mps",
    )


def apply_slice(
    host: Host,
    control: ChannelControl,
    channels: Channels,
    microseconds: int,
    job: str | None = None,
    on_found: OnFound = lambda _found: None,
) -> Channels:
    """Set the slice of all contexts that a process has now, and read it back; return them with the slices that they had.

    These are recorded, and given to ``on_found``, before the slice is set. After a failure both the contexts and the
    record are as before. Raises GpushareError: as `ChannelControl.find` and `ChannelControl.set_slice`, or the record
    cannot be written.
    """

    def record_and_set(present: Channels) -> Channels:
        forget_ended(host)
        with record_put_back_on_failure(host, present):
            note_slice(host, present, microseconds, job=job)
            on_found(present)
            control.set_slice(present, microseconds)
        return present

    with slices_locked(host):
        return _with_present(control, channels, record_and_set)


@contextlib.contextmanager
def record_put_back_on_failure(host: Host, channels: Channels) -> Iterator[None]:
    """Put the record of a process back as it was if what is done here fails to set its slice."""
    record = slice_record(host, channels.pid, channels.started)
    try:
        yield
    except GpushareError as error:
        # Where the slice may have been set, the new record is needed.
        if not may_be_done(error):
            with contextlib.suppress(GpushareError):
                put_record_back(host, channels.pid, record)
        raise


def restore_slice(
    host: Host, control: ChannelControl, channels: Channels, on_found: OnFound = lambda _found: None
) -> None:
    """Give a process the slices from before the first `apply_slice`, and forget the record; nothing without a record.

    ``on_found`` gets the contexts with the slices that they have until then. Raises GpushareError: as `apply_slice`.
    """
    with slices_locked(host):
        record = slice_record(host, channels.pid, channels.started)
        if record is None:
            return

        def restore(present: Channels) -> None:
            on_found(present)
            groups = tuple(replace(group, slice_us=record.slice_before(group)) for group in present.groups)
            control.restore_slices(replace(present, groups=groups))

        _with_present(control, channels, restore)
        put_record_back(host, channels.pid, None)
        if slice_record(host, channels.pid, channels.started) is not None:
            # Root's record, which this user cannot remove, counts until there is a later one.
            slice_us = min(record.slices_before, default=record.slice_us)
            put_record_back(host, channels.pid, replace(record, slice_us=slice_us, set_at=uptime()))


def _with_present(control: ChannelControl, channels: Channels, act: Callable[[Channels], T]) -> T:
    """Act on the contexts that a process has now; once more each time that it makes or closes one meanwhile."""
    for _ in range(_MOST_STALE):
        try:
            return act(control.find_again(channels))
        except NotFound as error:
            if error.code != "stale_channels":
                raise
    return act(control.find_again(channels))


def renew_slices(host: Host, processes: Iterable[tuple[int, int]], say: Callable[[str], None]) -> None:
    """Set the slices again that gpushare had set for processes (PID and start time) which came back from host memory.

    The driver restores their channels with a slice of 1.024ms, whatever they had (H200, driver 580.159.04, 2026-11-27).
    ``say`` is told which process has lost its slice. If the driver does not answer, the rest is not tried.
    """
    records = [record for pid, started in processes if (record := slice_record(host, pid, started)) is not None]
    for record in records:
        try:
            with host.open_channels() as control:
                channels = probed_channels(host, control, record.pid, record.started)
                # On the channels that the process has now; the record keeps what they had before it was set.
                with slices_locked(host):
                    _with_present(control, channels, partial(control.set_slice, microseconds=record.slice_us))
        except GpushareError as error:
            if error.code in PASSING:
                continue
            again = _set_command({record.slice_us}, str(record.pid), ())
            say(f"process {record.pid} lost its time-slice on the way: {error.message}; set it again: {again}")
            if isinstance(error, TimedOut):
                return


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_slice(
    host: Host,
    control: ChannelControl,
    job: Job,
    processes: Sequence[JobProcess],
    microseconds: int,
    *,
    consent: Sequence[Loss] = (),
    probe: bool = True,
) -> Plan:
    """Return the plan that sets the slice of all processes of a job.

    Without ``probe`` (a dry run) nothing is written. ``control`` must be open while the plan is carried out.

    Raises:
        NoPermission: more than 30 ms, and this is not root (``slice_too_long``).
        GpushareError: as `find_channels`, for any of them.
    """
    wanted = format_slice(check_slice(microseconds))
    asked = (*consent, *_losses_of_others(host, microseconds))
    records = slice_records(host)
    # A job that was given by PID has no name.
    name = None if job.selector.isdecimal() else job.selector
    notes = []
    steps: list[Step] = []
    # The slices that gpushare had set; None: one of another program.
    earlier: set[int | None] = set()
    for process in processes:
        channels = find_channels(host, control, process, probe=probe)
        if is_server(info_of(host.processes, process.pid).name):
            notes.append(f"process {process.pid} is an MPS server: all of its clients share this slice")
        now = {group.slice_us for group in channels.groups}
        record = records.get(process.pid)
        earlier.add(record.slice_us if record is not None and now == {record.slice_us} else None)
        if now != {microseconds}:
            act = partial(apply_slice, host, control, channels, microseconds, name)
            steps.append(_set_step(host, control, channels, f"to {wanted}", act))
    reset = f"gpushare timeslice reset {job.selector}{' -y' if consent else ''}"
    return Plan(
        title=f"time-slice {wanted} for {job.title}",
        steps=tuple(steps),
        undo=_set_command(earlier, job.selector, consent) or reset,
        consent=asked,
        notes=tuple(notes) if steps else (f"{job.title} already has a time-slice of {wanted}",),
    )


def _losses_of_others(host: Host, microseconds: int) -> tuple[Loss, ...]:
    """Return what to ask before a slice above 30 ms, which stalls other programs. Raises NoPermission: this is not root."""
    if microseconds <= MOST_US:
        return ()
    wanted = format_slice(microseconds)
    if not host.root:
        raise NoPermission(
            f"a time-slice of {wanted} is above {format_slice(MOST_US)}: other programs would stall for up to that long per turn",
            f"give {format_slice(LEAST_US)} to {format_slice(MOST_US)}; or run as root: sudo gpushare ...",
            code="slice_too_long",
        )
    return (Loss(action="may stall", what=f"the other programs on its GPU for {wanted} at a time"),)


def _set_command(slices: Collection[int | None], selector: str, consent: Sequence[Loss]) -> str | None:
    """Return the command that gives a job its only slice again; None: it has several, or an unknown one.

    It asks for another user's job (``consent``), and for a slice that may stall others: hence -y.
    """
    (slice_us,) = slices if len(slices) == 1 else (None,)
    if slice_us is None:
        return None
    agreed = " -y" if consent or slice_us > MOST_US else ""
    return f"gpushare timeslice set {format_slice(slice_us)} {selector}{agreed}"


def _set_step(
    host: Host, control: ChannelControl, channels: Channels, to: str, act: Callable[[OnFound], object]
) -> Step:
    """Return the step that sets the slices of a process by ``act``, as `apply_slice` does; ``to`` says to what."""
    record = slice_record(host, channels.pid, channels.started)
    old_slices: list[Channels] = []

    def restore() -> None:
        """Restore the slices that were found: a record's may be out of date, as other programs set slices too."""
        while old_slices:
            present = old_slices.pop()
            # If it has ended, its slice has ended with it.
            with contextlib.suppress(NotFound):
                control.restore_slices(present)
            put_record_back(host, present.pid, record)

    now = {group.slice_us for group in channels.groups}
    return Step(
        what=f"set the time-slice of process {channels.pid} from {_slices_text(now)} {to}: NVA06C_CTRL_CMD_SET_TIMESLICE, on its channel groups",
        do=lambda: act(old_slices.append),
        revert=restore,
    )


def plan_restore(
    host: Host,
    control: ChannelControl,
    job: Job,
    processes: Sequence[JobProcess],
    *,
    consent: Sequence[Loss] = (),
    probe: bool = True,
) -> Plan:
    """Return the plan that gives the processes of a job the slices from before `plan_slice`."""
    steps = []
    records = slice_records(host)
    # Of all groups, what they have now, and what they get.
    slices: set[int | None] = set()
    restored: set[int] = set()
    for process in processes:
        record = records.get(process.pid)
        if record is None or record.started != process.started:
            continue
        channels = find_channels(host, control, process, probe=probe)
        earlier = {record.slice_before(group) for group in channels.groups}
        now = {group.slice_us for group in channels.groups}
        slices |= now
        act = partial(restore_slice, host, control, channels)
        steps.append(_set_step(host, control, channels, f"back to {_slices_text(earlier)}", act))
        restored |= {value for value in earlier if value is not None}
    restored_text = ", ".join(map(format_slice, sorted(restored)))
    return Plan(
        title=f"time-slice {restored_text or 'as before'} for {job.title}",
        steps=tuple(steps),
        undo=_set_command(slices, job.selector, consent),
        consent=tuple(consent) if steps else (),
        notes=() if steps else (f"gpushare has not set a time-slice for {job.title}",),
    )


def _slices_text(slices: Iterable[int | None]) -> str:
    """Return different slices for people: ``500us and 2ms``."""
    values = sorted(value for value in set(slices) if value is not None)
    return " and ".join(format_slice(value) for value in values) or "unknown"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The slices of the CUDA contexts of a process by GPU (UUID; None: not told), or why they are unknown."""

    slices: Mapping[str | None, tuple[int, ...]]
    error: GpushareError | None = None
    under_mps: bool = False

    def on(self, uuid: str | None) -> tuple[int, ...]:
        """Return the slices on a GPU. A group whose GPU the driver does not tell, or tells as a MIG device, is on every GPU."""
        return tuple(
            value
            for gpu, slices in self.slices.items()
            for value in slices
            if gpu is None or gpu.startswith("MIG-") or gpu == uuid
        )


def read_slices(control: ChannelControl, pid: int, started: int | None) -> Reading:
    """Return the slices of a process as the driver reads them; nothing is written."""
    try:
        channels = control.find(pid, started, probe=False)
    except GpushareError as error:
        return Reading(slices={}, error=error)
    slices: dict[str | None, tuple[int, ...]] = {}
    for group in channels.groups:
        if group.slice_us is not None:
            slices[group.gpu] = (*slices.get(group.gpu, ()), group.slice_us)
    return Reading(slices=slices, under_mps=channels.under_mps)
