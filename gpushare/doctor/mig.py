"""The checks of `gpushare doctor` on MIG: modes, instances, names, grants, holders, containers."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpushare.doctor.check import Check, Examination, Verdict
from gpushare.errors import GpuLost, GpushareError, NotFound, NotSupported
from gpushare.host import cdi
from gpushare.mig.driver import MigReader
from gpushare.mig.holders import blocking, claimed_instances, gpu_holders, instance_holders, look, remedy
from gpushare.mig.journal import Journal
from gpushare.mig.names import names_of
from gpushare.mig.recover import Left, left_behind
from gpushare.units import counted

if TYPE_CHECKING:
    from gpushare.mig.names import NamedInstance
    from gpushare.model import Gpu, Holder

# Every host should run the first; the others belong to MPS and have their own checks.
_NO_OBSTACLE: Final = ("nvidia-persiste", "nvidia-cuda-mps")


def modes(seen: Examination) -> Iterator[Check]:
    """Check for a mode that is pending, and for MIG without anything that a program could use."""
    directories = (seen.host.run_directory, *seen.host.shared_run_directories)
    journals = [Journal(replace(seen.host, run_directory=directory)) for directory in directories]
    if any(journal.running() for journal in journals):
        yield Check(id="mig.state", verdict=Verdict.SKIP, seen="gpushare is changing MIG at this moment")
        return
    wrong = False
    for gpu in seen.answering:
        for check in _gpu(seen, gpu):
            wrong = True
            yield check
    for left in _left(seen, journals):
        wrong = True
        yield Check(
            id=left.id,
            verdict=Verdict.FAIL,
            seen=left.seen + (f", at: {left.at}" if left.at else ""),
            why="instances, names and grants are neither as they were nor as they should become",
            remedy=left.remedy.replace("gpushare mig recover", "sudo gpushare mig recover"),
        )
    on = [gpu for gpu in seen.answering if gpu.mig_enabled]
    if on and not wrong:
        number = sum(len(gpu.mig_instances) for gpu in on)
        seen_text = f"MIG is on on {counted(len(on), 'GPU')}: {counted(number, 'MIG device')}"
        yield Check(id="mig.state", verdict=Verdict.PASS, seen=seen_text)


def _left(seen: Examination, journals: Sequence[Journal]) -> Iterator[Left]:
    for journal in journals:
        with contextlib.suppress(GpushareError):
            yield from left_behind(seen.host, journal)


def _gpu(seen: Examination, gpu: Gpu) -> Iterator[Check]:
    if gpu.mig_enabled is not None and gpu.mig_pending not in {None, gpu.mig_enabled}:
        yield Check(
            id="mig.pending",
            verdict=Verdict.WARN,
            gpu=gpu.index,
            seen=f"MIG mode of GPU {gpu.index} is {_word(gpu.mig_enabled)}, and {_word(gpu.mig_pending)} after the next reset",
            why="somebody was on the GPU when the mode was changed; a reset or reboot will change it at any time",
            remedy=f"sudo nvidia-smi --gpu-reset -i {gpu.index} (ends nothing by itself: first end who uses it)",
        )
    if not gpu.mig_enabled:
        return
    try:
        instances = MigReader(seen.host.nvml).layout(gpu).instances
    except GpushareError:
        return
    if not instances:
        yield Check(
            id="mig.empty",
            verdict=Verdict.WARN,
            gpu=gpu.index,
            seen=f"MIG is on on GPU {gpu.index}, without an instance",
            why="no CUDA program can use the GPU: CUDA error 100",
            remedy=f"gpushare mig profiles -g {gpu.index}; then sudo gpushare mig create -g {gpu.index} PROFILE, or mig disable",
        )
    for one in instances:
        if not one.compute:
            yield Check(
                id="mig.bare",
                verdict=Verdict.WARN,
                gpu=gpu.index,
                seen=f"GPU instance {one.id} ({one.profile.name}:{one.start}) on GPU {gpu.index} has no compute instance",
                why="it takes its slices, and no program can use it",
                remedy=f"sudo nvidia-smi mig -i {gpu.index} -gi {one.id} -cci",
            )


def _word(on: object) -> str:
    return "on" if on else "off"


def names(seen: Examination) -> Iterator[Check]:
    """Check that every name means what it meant, and that what is granted is closed to the others."""
    if seen.nvml_error is not None:
        return
    for name, named in sorted(names_of(seen.host).items()):
        wrong = _renamed(seen, name)
        if wrong is not None:
            yield wrong
        elif named.users:
            yield from _opened(seen, named)


def _renamed(seen: Examination, name: str) -> Check | None:
    from gpushare.mig.places import named_places

    try:
        named_places(seen.host, name)
    except GpuLost:
        return None
    except NotFound as error:
        if error.code == "no_compute_instance":
            # mig.bare tells it.
            return None
        return Check(
            id="mig.name",
            verdict=Verdict.WARN,
            gpu=None if error.gpu is None or not error.gpu.isdigit() else int(error.gpu),
            seen=error.message,
            why="at its place, with its MIG UUID, another instance of another size may run a program that meant this one",
            remedy=error.hint,
        )
    except GpushareError:
        return None
    return None


def _opened(seen: Examination, named: NamedInstance) -> Iterator[Check]:
    from gpushare.mig.grant import plan_reapply

    gpu = next((gpu for gpu in seen.gpus if gpu.uuid == named.gpu_uuid), None)
    index = None if gpu is None else gpu.index
    why = "every user of this machine can run in the instance"
    try:
        steps = plan_reapply(seen.host, [named])
    except NotSupported as error:
        yield Check(
            id="mig.grant",
            verdict=Verdict.WARN,
            gpu=index,
            seen=f"{named.name} is granted to {', '.join(named.users)}, and {error.message}",
            why=why,
            remedy=error.hint,
        )
        return
    except GpushareError:
        return
    if steps:
        yield Check(
            id="mig.grant",
            verdict=Verdict.WARN,
            gpu=index,
            seen=f"{named.name} is granted to {', '.join(named.users)}, and open to others again",
            why=f"{why}: a grant goes with the instance, with the driver and with a reboot",
            remedy=f"sudo gpushare mig grant {shlex.quote(named.name)} {shlex.quote(named.users[0])}",
        )


def holders(seen: Examination) -> Iterator[Check]:
    """Check for programs that would block a MIG change without being in any list of processes (DCGM, Xorg, nsys)."""
    capable = [gpu for gpu in seen.answering if gpu.mig_capable]
    if not capable:
        return
    files, own = look(seen.host), _own(seen)
    for gpu in capable:
        found: list[Holder] = list(gpu_holders(seen.host, gpu, files))
        for inside in instance_holders(seen.host, gpu, files).values():
            found += inside
        found = [one for one in found if one.pid not in own and not (one.name or "").startswith(_NO_OBSTACLE)]
        if found and not (gpu.mig_enabled or gpu.mig_pending):
            # DCGM runs on most machines; as long as nobody wants MIG it is in nobody's way.
            seen_text = f"{blocking(found)} {_has(found)} GPU {gpu.index} open, and must end before MIG is switched on"
            yield Check(id="mig.holders", verdict=Verdict.PASS, gpu=gpu.index, seen=seen_text)
        elif found:
            yield Check(
                id="mig.holders",
                verdict=Verdict.WARN,
                gpu=gpu.index,
                seen=f"{blocking(found)} {_has(found)} GPU {gpu.index} open without a context",
                why="an instance that it holds cannot be destroyed, and the mode of the GPU not changed",
                remedy=f"before a MIG change: {remedy(found) or 'end it'}",
            )


def _has(found: list[Holder]) -> str:
    return "has" if len({one.pid for one in found}) == 1 else "have"


def _own(seen: Examination) -> set[int]:
    """Return the processes of MPS and of every `gpushare run`: they go with the program that runs."""
    daemons = {one.daemon.pid or 0 for one in seen.daemons}
    servers = {server.pid for one in seen.daemons for server in one.daemon.servers}
    runs = {pid for one in seen.daemons if one.home is not None for pid in one.home.live_leases() or ()}
    runs |= {holder.pid for holder in (claimed_instances(seen.host) or {}).values()}
    return daemons | servers | {below for pid in runs for below in seen.host.processes.descendants(pid)}


def containers(seen: Examination) -> Iterator[Check]:
    """Check that CDI specifications name the GPUs and MIG devices that exist."""
    if seen.nvml_error is not None:
        return
    by_path = {spec.path: spec for spec in cdi.find_specs(seen.host)}
    for wrong in cdi.stale(seen.host, seen.gpus):
        yield Check(
            id="cdi.stale",
            verdict=Verdict.WARN,
            seen=f"{wrong.path} {cdi.describe(wrong)}",
            why="a container that asks for a GPU by CDI gets none, or another one than it means",
            remedy=f"sudo {' '.join(cdi.refresh_command(by_path.get(wrong.path)))}",
        )


MIG_CHECKS: Final[tuple[Callable[[Examination], Iterator[Check]], ...]] = (modes, names, holders, containers)
