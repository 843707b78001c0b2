"""``gpushare apply``: make the host what gpushare.yaml says; done by `gpushare/hostfile/`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from gpushare.base.errors import BadUsage, GpushareError, InUse, NeedsConsent, NoPermission, NotSupported
from gpushare.base.model import FileWay, GpuLease
from gpushare.base.units import parse_seconds
from gpushare.base.values import dataclass
from gpushare.cli.mig_change import recover_first, recovered
from gpushare.cli.options import (
    HOST_FILE_ARGUMENT,
    HOST_FILE_OPTION,
    AskingCommand,
    consented,
    gpus_of,
    host_file,
    is_agreed,
    note,
    option,
    say_step,
    settings,
    verb,
)
from gpushare.host.compute_mode import need_root
from gpushare.host.host import Host
from gpushare.hostfile.apply import GpuApply, plan_gpu
from gpushare.hostfile.file import Entry, HostFile, Matched, text_of
from gpushare.hostfile.kept import kept_limits, user_limits_in
from gpushare.hostfile.live import captured_file
from gpushare.hostfile.load import (
    applied_path,
    changed_limits,
    entries_of,
    is_kept,
    keep_applied,
    keep_state_before,
    kept_entries,
    kept_file,
    load,
    names_in,
    state_before_path,
    with_place_in_file,
)
from gpushare.hostfile.look import live_gpus
from gpushare.memory.leases import leases
from gpushare.mig.change import transact
from gpushare.mig.ledger import MigLedger
from gpushare.plan import Loss, Plan, Step, carry_out, describe_losses, one_plan, open_losses
from gpushare.show.plan import PlanAnswer, plan_result, with_answer, with_undo
from gpushare.show.result import Result
from gpushare.snapshot import HostState
from gpushare.timeslice.rules import KEEP_UNIT

# Errors of a file that can never be applied here: such a file changes nothing.
_NEVER_APPLICABLE: Final = (BadUsage, NotSupported)
_POLL_SECONDS: Final = 0.5


@verb(AskingCommand)
def apply(
    path: str | None = HOST_FILE_ARGUMENT,
    file: str | None = HOST_FILE_OPTION,
    wait: str | None = option(
        "--wait", "TIME", "Wait this long for programs to leave the GPUs that change. [default: refuse]"
    ),
) -> Any:
    """Set up each GPU as its entry in gpushare.yaml says. Needs root, except for MPS daemons of your own.

    GPUs without an entry are left alone, and what already matches the file stays. All GPUs are planned before the first change, and a file that cannot be applied
    here changes nothing. Each GPU is then changed completely or not at all. It never ends a program: if one is in the
    way of a change, its GPU is refused, and the others are changed. gpushare asks before it removes a name, a grant, or
    an instance that it did not make; so does its undo. It keeps the applied file: the units of `gpushare export
    systemd` apply it at boot. Its rules for the time-slices of processes (slices:) are followed by `gpushare timeslice keep`; its limits of
    users (memory:) are in force from then on.
    """
    seconds = 0.0 if wait is None else parse_seconds(wait)
    path = host_file(path, file, "apply")
    wanted, text = load(path)
    # Both raise for a user whom this machine does not have.
    names_in(wanted)
    user_limits_in(wanted)
    host = settings.connect()
    ledger = MigLedger(host)
    if not settings.dry_run:
        recover_first(host, ledger)
    rows, matched = _plan_when_idle(host, ledger, wanted, seconds)
    # Only a file of root puts limits in force.
    limits = changed_limits(host, wanted) if host.root else []
    keeping = _keep_plan(host, wanted, text, limits)
    if settings.dry_run:
        return _apply_result(rows, matched, keeping, limits, dry_run=True, undo=_prepare_undo(host, rows))
    changes_gpus = any(row.steps for row in rows)
    if changes_gpus and any(row.plan is not None and row.plan.needs_root for row in rows):
        need_root(host, "changing how a GPU is shared")
    consented(keeping)
    undo = None
    notes: tuple[str, ...] = ()
    if changes_gpus:
        rows, matched, notes, undo = _carry_out_rows(host, ledger, wanted, rows)
    # Only a file that the host matches is kept for the next boot, and only with it limits come into force.
    if matched.missing or any(row.error is not None for row in rows):
        return _apply_result(rows, matched, None, limits, dry_run=False, undo=undo, notes=notes)
    if keeping.steps and not changes_gpus:
        undo = _prepare_undo(host, rows)
    notes_if_kept = _notes_if_kept(host, wanted, matched)
    try:
        carry_out(keeping, say_step if settings.verbose else None)
    except GpushareError as error:
        problem = "the file is not kept: the next boot will not apply it"
        if limits:
            problem += ", and limits of users in it are not in force"
        not_kept = error.restated(message=f"{problem}: {error.message}")
        result = _apply_result(rows, matched, None, limits, dry_run=False, undo=undo, notes=notes)
        return replace(result, errors=(*result.errors, not_kept))
    result = _apply_result(rows, matched, keeping, limits, dry_run=False, undo=undo, notes=(*notes, *notes_if_kept))
    return replace(result, data=replace(result.data, kept=str(applied_path(host))))


def _keep_plan(host: Host, wanted: HostFile, text: str, limits: Sequence[str]) -> Plan:
    """Return the plan that keeps a file, and puts ``limits`` in force; without steps if this text is kept already."""
    ended = _ended_leases(host, wanted) if limits else {}
    indexes = {gpu.uuid: gpu.index for gpu in gpus_of(host)} if ended else {}
    titles = {uuid: f"the lease of {lease.user} on GPU {indexes.get(uuid, uuid)}" for uuid, lease in ended.items()}
    purpose = "for the next boot" if host.root else "as the one that was applied last"
    what = f"keep the file {purpose}" + (f", and put in force: {'; '.join(limits)}" if limits else "")
    return Plan(
        title="; ".join(limits) or f"the file is kept {purpose}",
        steps=() if is_kept(host, text) else (Step(what=what, do=lambda: keep_applied(host, text)),),
        notes=tuple(f"{title} ends" for title in titles.values()),
        consent=tuple(Loss(action="ends", what=titles[uuid]) for uuid, lease in ended.items() if lease.uid != host.uid),
    )


@dataclass(frozen=True)
class _GpuRow:
    """One GPU: its entry, and its plan or the error; ``done`` once it was carried out."""

    gpu: int
    entry: Entry
    plan: GpuApply | None = None
    error: GpushareError | None = None
    done: bool = False

    @property
    def steps(self) -> Sequence[Any]:
        """Return the steps that change the GPU; none: it is as its entry says, or has no plan."""
        return () if self.plan is None else self.plan.change.plan.steps

    @property
    def state(self) -> Literal["same", "planned", "done", "failed"]:
        if self.error is not None:
            return "failed"
        if self.done:
            return "done"
        return "planned" if self.steps else "same"


def _plan_when_idle(host: Host, ledger: MigLedger, wanted: HostFile, seconds: float) -> tuple[list[_GpuRow], Matched]:
    """Return the plan of each GPU; while one is in use, plan again until the time is up."""
    deadline = time.monotonic() + seconds
    reported: set[str] = set()
    while True:
        matched = entries_of(wanted, gpus_of(host))
        rows = [_planned_row(host, ledger, index, matched, wanted) for index in matched.entries]
        _refuse_file([*matched.missing, *(row.error for row in rows if isinstance(row.error, _NEVER_APPLICABLE))])
        busy_errors = [row.error for row in rows if isinstance(row.error, InUse)]
        seconds_left = deadline - time.monotonic()
        if not busy_errors or seconds_left <= 0:
            return rows, matched
        for error in busy_errors:
            if error.message not in reported:
                reported.add(error.message)
                note(f"waiting up to {seconds_left:.0f} s: {error.message}")
        time.sleep(min(_POLL_SECONDS, max(0.02, seconds_left)))


def _refuse_file(faults: Sequence[GpushareError]) -> None:
    """Raise if the file cannot be applied here, with all that is wrong with it."""
    if faults:
        text = "; ".join(dict.fromkeys(error.message for error in faults))
        raise faults[0].restated(message=text, hint="; ".join(dict.fromkeys(error.hint for error in faults)))


def _planned_row(host: Host, ledger: MigLedger, index: int, matched: Matched, file: HostFile) -> _GpuRow:
    """Return a GPU with its plan, or with the error that keeps its entry from being applied."""
    entry = matched.entries[index]
    try:
        return _GpuRow(index, entry, plan=_plan_entry(host, ledger, index, matched))
    except NoPermission:
        # It is about the user, not about the entry.
        raise
    except _NEVER_APPLICABLE as error:
        return _GpuRow(index, entry, error=with_place_in_file(error, file, index, entry))
    except GpushareError as error:
        return _GpuRow(index, entry, error=error)


def _plan_entry(host: Host, ledger: MigLedger, index: int, matched: Matched) -> GpuApply:
    """Return the plan that makes a GPU match its entry. A name that another GPU with an entry has may move to this GPU."""
    answering = (gpu for gpu in host.nvml.identities() if gpu.index in matched.entries and gpu.error is None)
    return plan_gpu(host, ledger, index, matched.entries[index], others={gpu.uuid for gpu in answering if gpu.uuid})


def _carry_out_rows(
    host: Host, ledger: MigLedger, wanted: HostFile, rows: list[_GpuRow]
) -> tuple[list[_GpuRow], Matched, tuple[str, ...], str | None]:
    """Ask for consent, then plan again and carry out under the lock. A GPU that fails is rolled back; the next follows.

    Returns the rows, the entries as matched under the lock, notes, and the command that takes all of it back.
    """
    agreed: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()
    while True:
        agreed = consented(_joined_plan(rows), agreed)
        with recovered(host, ledger) as undone:
            notes += undone
            matched = entries_of(wanted, gpus_of(host))
            # Plan all before the first change: an error found now still changes nothing.
            rows = [_planned_row(host, ledger, index, matched, wanted) for index in matched.entries]
            _refuse_file(matched.missing)
            if is_agreed(_joined_plan(rows), agreed):
                undo = _prepare_undo(host, rows)
                return [_apply_row(host, ledger, row, matched, agreed) for row in rows], matched, notes, undo


def _prepare_undo(host: Host, rows: Sequence[_GpuRow]) -> str | None:
    """Write a file that describes the GPUs that change as they are now, and return the command that applies it.

    It also has the GPUs of the file kept so far, as boot must still set them up. In a dry run nothing is written. None: a
    file cannot describe the GPUs that change, or cannot be written.
    """
    state = HostState(host)
    changed = {row.gpu for row in rows if row.steps}
    described = changed | {*kept_entries(host, state.gpus)[0]}
    file, _ = captured_file(live_gpus(state, [gpu for gpu in state.gpus if gpu.index in described]))
    if not changed <= {int(value) for entry in file.entries for value in entry.match.values}:
        return None
    kept = kept_file(host)
    if kept is not None:
        file = replace(kept, entries=file.entries)
    text = text_of(file)
    try:
        path = state_before_path(host, text) if settings.dry_run else keep_state_before(host, text)
    except GpushareError:
        # A full disk does not keep the host from being set up.
        return None
    # Without -y: it takes all that is on these GPUs by then, also what others have made since.
    return shlex.join(["gpushare", "apply", "-f", str(path)])


def _joined_plan(rows: Sequence[_GpuRow]) -> Plan:
    plans = [row.plan.change.plan for row in rows if row.plan is not None]
    return one_plan(plans) if plans else Plan(title="apply", steps=())


def _apply_row(host: Host, ledger: MigLedger, row: _GpuRow, matched: Matched, agreed: Sequence[Loss]) -> _GpuRow:
    """Carry out the plan of one GPU, planned again; return its row with ``done``, or with the error.

    It is an error, too, if the new plan takes more than the user has ``agreed`` to.
    """
    if row.error is not None or not row.steps:
        return row
    try:
        # Earlier GPUs may have given up a name, or a program may have started.
        plan = _plan_entry(host, ledger, row.gpu, matched)
        if not is_agreed(plan.change.plan, agreed):
            raise NeedsConsent(
                f"GPU {row.gpu} has changed since the question: applying the file {describe_losses(open_losses(plan.change.plan.consent, agreed))}",
                "run it again: it asks for this too; or agree to everything: -y",
                gpu=row.gpu,
            )
        on_step = say_step if settings.verbose else None
        if plan.change.gpus:
            transact(host, ledger, plan.change, on_step)
        else:
            # Without a MIG change, the next apply repairs whatever a crash leaves.
            carry_out(plan.change.plan, on_step)
    except GpushareError as error:
        return replace(row, plan=None, error=error)
    return replace(row, plan=plan, done=True)


def _notes_if_kept(host: Host, wanted: HostFile, matched: Matched) -> list[str]:
    """Return notes on GPUs that only the file kept so far covers, and on what of a file `apply` does not do itself."""
    notes = []
    entries, _ = kept_entries(host, gpus_of(host))
    dropped = [str(index) for index in entries if index not in matched.entries]
    if dropped:
        which = f"it has no entry for GPU {', '.join(dropped)}, which the previous file had"
        sudo = "sudo " if host.root else ""
        fix = f"for one file with all: {sudo}gpushare capture > gpushare.yaml; {sudo}gpushare apply -f gpushare.yaml"
        notes.append(f"only this file is applied at boot, and {which}; {fix}")
    if wanted.rules:
        # The unit follows the file that root applied.
        whose = "" if host.root else " for your own processes"
        unit = "; as a unit: sudo gpushare export systemd --to units; sh units/apply.sh; sudo systemctl reload "
        notes.append(
            f"the rules for time-slices are followed{whose} by gpushare timeslice keep, which reads the file at its start "
            f"and at SIGHUP{f'{unit}{KEEP_UNIT}' if host.root else ''}"
        )
    if not host.root and changed_limits(host, wanted):
        notes.append("limits of users (memory, reserve) come into force only when root applies the file")
    return notes


def _ended_leases(host: Host, wanted: HostFile) -> dict[str, GpuLease]:
    """Return the leases, by UUID of the GPU, that end when a file is applied, because they are longer than it allows."""
    allowed = leases(host, user_limits_in(wanted))
    return {
        uuid: lease
        for uuid, lease in leases(host, kept_limits(host)).items()
        if uuid not in allowed or allowed[uuid].uid != lease.uid
    }


@dataclass(frozen=True, kw_only=True)
class GpuApplied:
    """What applying the file does to one GPU."""

    gpu: int
    sharing: FileWay
    state: Literal["same", "planned", "done", "failed"]
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class ApplyAnswer(PlanAnswer):
    """The answer of `apply`."""

    gpus: tuple[GpuApplied, ...]
    # The file that is applied at boot.
    kept: str | None = None
    # Limits of users that change.
    limits: tuple[str, ...] = ()


def _in_force_text(row: _GpuRow) -> str:
    """Return how a GPU is shared now that its entry is applied."""
    entry = row.entry
    mps = entry.mps
    words = [] if entry.time_slice is None else [f"level {entry.time_slice.title}"]
    if mps is not None:
        words += mps.words
    if entry.mig:
        words.append(" ".join(mig.wish if mig.name is None else f"{mig.wish} '{mig.name}'" for mig in entry.mig))
    return f"GPU {row.gpu}: {entry.sharing.value}{': ' if words else ''}{', '.join(words)}"


def _apply_result(
    rows: Sequence[_GpuRow],
    matched: Matched,
    keeping: Plan | None,
    limits: Sequence[str],
    *,
    dry_run: bool,
    undo: str | None,
    notes: Sequence[str] = (),
) -> Result:
    """Return what was applied, or in a dry run would be, as a result; a single error is raised instead.

    ``keeping`` is the plan that keeps the file; None, or with an error: it is not kept. ``undo`` is the command that takes
    all of it back.
    """
    errors = [row.error for row in rows if row.error is not None] + list(matched.missing)
    if errors and len(errors) == len(rows) + len(matched.missing) == 1:
        raise errors[0]
    # No steps does not mean that everything is as requested.
    empty = {"empty": "nothing is changed"} if errors or keeping is None else {}
    plan = Plan(title="", steps=()) if errors or keeping is None else keeping
    notes = [*notes, *matched.notes, *(text for row in rows if row.plan for text in row.plan.change.notes), *plan.notes]
    whole = Plan(
        title="apply",
        steps=(*(step for row in rows for step in row.steps), *plan.steps),
        undo=undo,
        notes=tuple(dict.fromkeys(notes)),
        consent=(*_joined_plan(rows).consent, *plan.consent),
    )
    result = plan_result(whole, dry_run=dry_run, **empty)
    in_force = [_in_force_text(row) for row in rows if row.done]
    if plan.steps and not dry_run and (limits or not in_force):
        in_force.append(plan.title)
    if in_force:
        result = replace(result, done=with_undo(in_force, undo))
    gpus = tuple(
        GpuApplied(gpu=row.gpu, sharing=row.entry.sharing, state=row.state, steps=tuple(row.steps)) for row in rows
    )
    return replace(
        with_answer(result, ApplyAnswer, gpus=gpus, limits=tuple(limits if plan.steps else ())),
        errors=tuple(errors),
        all_failed=all(row.error is not None for row in rows),
    )
