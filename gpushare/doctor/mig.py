"""The checks of `gpushare doctor` on MIG: modes, instances, names, grants, holders, containers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

from gpushare.base.errors import GpuLost, GpushareError, NotFound, NotSupported, error_of
from gpushare.base.model import Gpu
from gpushare.base.units import counted
from gpushare.doctor.check import Check, Examination, finding
from gpushare.host import cdi
from gpushare.host.process import processes_text
from gpushare.mig.driver import MigReader
from gpushare.mig.grant import reapplied_steps
from gpushare.mig.holders import claimed_instances, gpu_holders, instance_holders, open_device_files, release_remedy
from gpushare.mig.ledger import MigLedger, NamedInstance, names_of
from gpushare.mig.places import named_places
from gpushare.mig.profile import on_or_off
from gpushare.mig.recover import visible_leftovers

# The persistence daemon belongs on every host; the MPS programs have checks of their own.
_NO_OBSTACLE: Final = ("nvidia-persiste", "nvidia-cuda-mps")


def modes(seen: Examination) -> Iterator[Check]:
    """Check for a pending MIG mode, changes that were not finished, and MIG mode without usable instances."""
    directories = seen.host.run_directories
    ledgers = [MigLedger(replace(seen.host, run_directory=directory)) for directory in directories]
    if any(ledger.is_running() for ledger in ledgers):
        yield Check.skipped("mig.state", seen="gpushare is changing MIG right now")
        return
    wrong = False
    leftovers = visible_leftovers(seen.host)
    half_changed = {uuid for leftover in leftovers for uuid in leftover.gpus}
    for gpu in seen.answering:
        for check in _mode_findings(seen, gpu, half_changed=gpu.uuid in half_changed):
            wrong = True
            yield check
    for leftover in leftovers:
        wrong = True
        step = f", at: {leftover.at}" if leftover.at else ""
        yield finding(leftover.id, seen=leftover.seen + step, remedy=leftover.remedy)
    mig_gpus = [gpu for gpu in seen.answering if gpu.mig_enabled]
    if mig_gpus and not wrong:
        number = sum(len(gpu.mig_instances) for gpu in mig_gpus)
        seen_text = f"MIG is enabled on {counted(len(mig_gpus), 'GPU')}: {counted(number, 'MIG device')}"
        yield Check.passed("mig.state", seen=seen_text)


def _mode_findings(seen: Examination, gpu: Gpu, *, half_changed: bool) -> Iterator[Check]:
    """Check a GPU for a pending MIG mode, and for MIG mode without usable instances.

    The instances of a GPU that a change left half changed are not to be mended by hand: the remedy of that change does it.
    """
    if gpu.mig_enabled is not None and gpu.mig_pending not in {None, gpu.mig_enabled}:
        yield finding("mig.pending", gpu.index, now=on_or_off(gpu.mig_enabled), next=on_or_off(gpu.mig_pending))
    if not gpu.mig_enabled or half_changed:
        return
    try:
        instances = MigReader(seen.host.nvml).layout(gpu).instances
    except GpushareError as error:
        yield Check.skipped(
            "mig.state", gpu=gpu.index, seen=f"the instances of GPU {gpu.index} are unknown: {error.message}"
        )
        return
    if not instances:
        yield finding("mig.empty", gpu.index)
    for instance in instances:
        if not instance.compute:
            yield finding("mig.bare", gpu.index, instance=instance)


def names(seen: Examination) -> Iterator[Check]:
    """Check that every name still means its instance, and that granted instances are closed to other users."""
    if seen.nvml_error is not None:
        return
    for name, named in sorted(names_of(seen.host).items()):
        wrong = _name_finding(seen, name)
        if wrong is not None:
            yield wrong
        elif named.users:
            yield from _grant_findings(seen, named)


def _name_finding(seen: Examination, name: str) -> Check | None:
    """Return a finding if a name no longer means an instance; None: it does, or its GPU does not answer."""
    error = error_of(lambda: named_places(seen.host, name))
    # An instance without a compute instance is reported as mig.bare.
    if not isinstance(error, NotFound) or isinstance(error, GpuLost) or error.code == "no_compute_instance":
        return None
    index = int(error.gpu) if error.gpu is not None and error.gpu.isdigit() else None
    return finding("mig.name", index, error=error)


def _grant_findings(seen: Examination, named: NamedInstance) -> Iterator[Check]:
    """Check that a granted instance is open to its users only."""
    gpu = next((gpu for gpu in seen.gpus if gpu.uuid == named.gpu_uuid), None)
    index = None if gpu is None else gpu.index
    try:
        # No step: the nodes are as the grants say.
        if not reapplied_steps(seen.host, named):
            return
        remedy = f"sudo gpushare mig grant {shlex.quote(named.name)} {shlex.quote(named.users[0])}"
    except NotSupported as error:
        # Without capabilities no instance is closed to anybody, and no grant closes it.
        remedy = error.hint
    except GpushareError:
        # The GPU does not answer, which another check says.
        return
    yield finding("mig.grant", index, named=named, users=", ".join(named.users), remedy=remedy)


def holders(seen: Examination) -> Iterator[Check]:
    """Check for programs in no process list that block a MIG change (DCGM, Xorg, nsys), where MIG is on or pending."""
    gpus = [gpu for gpu in seen.answering if gpu.mig_enabled or gpu.mig_pending]
    if not gpus:
        return
    files = open_device_files(seen.host)
    ending = _pids_ending_by_themselves(seen)
    for gpu in gpus:
        by_instance = instance_holders(seen.host, gpu, files).values()
        present = [
            holder
            for holder in chain(gpu_holders(seen.host, gpu, files), *by_instance)
            if holder.pid not in ending and not (holder.name or "").startswith(_NO_OBSTACLE)
        ]
        if present:
            text = processes_text(seen.host.processes, [holder.pid for holder in present])
            yield finding("mig.holders", gpu.index, holders=text, remedy=release_remedy(present) or "end what holds it")


def _pids_ending_by_themselves(seen: Examination) -> set[int]:
    """Return the processes that block no MIG change for long: of MPS and of every `gpushare run`, as they end with its program."""
    daemons = {entry.daemon.pid or 0 for entry in seen.daemons}
    servers = {server.pid for entry in seen.daemons for server in entry.daemon.servers}
    runs = {pid for entry in seen.daemons if entry.home is not None for pid in entry.home.live_leases() or ()}
    runs |= {holder.pid for holder in (claimed_instances(seen.host) or {}).values()}
    return daemons | servers | {below for pid in runs for below in seen.host.processes.descendants(pid)}


def containers(seen: Examination) -> Iterator[Check]:
    """Check that CDI specifications name the GPUs and MIG devices that exist."""
    if seen.nvml_error is not None:
        return
    by_path = {spec.path: spec for spec in cdi.find_specs(seen.host)}
    for wrong in cdi.stale_specs(seen.host, seen.gpus):
        yield finding(
            "cdi.stale",
            path=wrong.path,
            fault=cdi.describe_staleness(wrong),
            command=" ".join(cdi.refresh_command(by_path.get(wrong.path))),
        )


MIG_CHECKS: Final[tuple[Callable[[Examination], Iterator[Check]], ...]] = (modes, names, holders, containers)
