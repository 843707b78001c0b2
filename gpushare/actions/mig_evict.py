"""End the processes in a MIG instance named by `--evict`: SIGTERM, then SIGKILL.

Only processes that the driver itself names go: those in NVML's list of the instance, and those that have the capability
node of this very instance open and the driver's library loaded (a descriptor alone can be sent to any service). A claim
keeps others out; it is a file that any user writes, and no signal goes out on its word.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gpushare.actions.plan import Step
from gpushare.errors import GpushareError, InUse, NotFound
from gpushare.host.capabilities import NODES
from gpushare.host.claims import Claim, take_claim
from gpushare.host.holders import CLAIM, blocking, instance_holders, named, remedy
from gpushare.host.identity import ancestors, is_kernel_thread
from gpushare.model import GpuProcess, Holder

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.plan import Destroyed
    from gpushare.model import Gpu

GRACE_SECONDS: Final = 10.0
# A `gpushare run` gives its instance back when its program has ended.
CLAIM_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Ending(Step):
    """A step that ends programs: nothing brings them back. What it then holds is released at the end of the change."""

    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False, compare=False)


def holders_of(gone: Destroyed) -> list[int]:
    """Return the PIDs of all who are in what goes, or hold its GPU instance; not those in a part that stays.

    A claim alone is none: nothing proves that its process is in the instance.
    """
    return sorted({one.pid for one in _all(gone) if _is_proved(one)})


def evict_step(host: Host, gpu: Gpu, gone: Destroyed) -> Ending:
    """Return the step that ends everybody in what goes: SIGTERM, ten seconds, SIGKILL. There is no way back.

    Without MPS a process in a MIG instance takes nobody with it; MPS daemons are stopped by their own step.

    Raises:
        InUse: only a claim holds it (``claimed``); a service (DCGM, persistence daemon) does, which is no program to be
            killed (``held_by_service``); or it is this gpushare's own shell, or cannot be told apart (``not_evictable``).
    """
    eviction = _Eviction(host, gpu, gone)
    eviction.check()
    pids = sorted(eviction.started)
    count = f"{len(pids)} {'process' if len(pids) == 1 else 'processes'}"
    held = contextlib.ExitStack()
    return Ending(
        what=f"end {count} in {eviction.title} on GPU {gpu.index}: {named(host, pids, most=len(pids))}",
        command=f"kill {' '.join(map(str, pids))}",
        undo=None,
        do=lambda: eviction.end(held),
        held=held,
    )


def refuse_claimed(host: Host, gpu: Gpu, gone: Destroyed) -> None:
    """Raise InUse when nobody is known to be in what goes, and a claim holds it."""
    claims = [one for one in _all(gone) if isinstance(one, Holder) and one.what == CLAIM]
    if claims and not holders_of(gone):
        raise _claimed(host, gpu, _title(gone), claims[0].pid)


def _claimed(host: Host, gpu: Gpu, title: str, pid: int, then: str = "") -> InUse:
    return InUse(
        f"GPU {gpu.index}: {title} is claimed by process {named(host, [pid])}{then}; "
        "the driver does not name it, so --evict does not end it",
        f"wait until it ends, or look at it and end it yourself: ps -fp {pid}",
        gpu=str(gpu.index),
        code="claimed",
    )


class _Eviction:
    """The end of all who were in what goes when it was planned."""

    def __init__(self, host: Host, gpu: Gpu, gone: Destroyed) -> None:
        self._host, self._gpu, self._gone = host, gpu, gone
        self.title = _title(gone)
        # When each started: a PID is given out again.
        self.started: dict[int, float | None] = {pid: self._start_of(pid) for pid in holders_of(gone)}

    def check(self) -> None:
        """Raise unless all of them may be ended."""
        held = [one for one in _all(self._gone) if isinstance(one, Holder) and one.what != CLAIM]
        known = remedy(held)
        if known is not None:
            raise InUse(
                f"GPU {self._gpu.index}: {blocking(held)} holds {self.title}, and is not ended by --evict",
                known,
                gpu=str(self._gpu.index),
                code="held_by_service",
            )
        if self._host.processes.namespace_is_host() is False:
            raise self._refused(
                self.started, "has another PID here than the driver tells", "run it on the host, outside the container"
            )
        listed = {one.pid for one in _all(self._gone) if isinstance(one, GpuProcess)}
        for pid in sorted(self.started):
            if pid in ancestors():
                raise self._refused([pid], "runs this gpushare", "run it from another shell, or leave this one")
            if is_kernel_thread(pid):
                raise self._refused([pid], "is a thread of the kernel", "see why: gpushare doctor")
            if pid not in listed and self._host.processes.uses_driver(pid) is not True:
                why = "has only its device node open, and not the driver's library"
                raise self._refused([pid], why, f"look at it and end it yourself: ps -fp {pid}")

    def end(self, held: contextlib.ExitStack) -> None:
        """End them, and hold what they were in, so that no `gpushare run` starts there."""
        left = self._signalled(sorted(self.started), signal.SIGTERM, GRACE_SECONDS)
        left = self._signalled(left, signal.SIGKILL, _KILL_SECONDS)
        if left:
            raise InUse(
                f"GPU {self._gpu.index}: {named(self._host, left)} in {self.title} would not end",
                f"see why: ps -o pid,stat,wchan,cmd -p {','.join(map(str, left))}",
                gpu=str(self._gpu.index),
            )
        for part in self._gone.compute:
            if part.uuid:
                self._take(part.uuid, held)

    def _take(self, uuid: str, held: contextlib.ExitStack) -> None:
        deadline = time.monotonic() + CLAIM_SECONDS
        while isinstance(claim := take_claim(self._host, uuid), Claim):
            if time.monotonic() > deadline:
                then = ", although all who were in it have ended"
                raise _claimed(self._host, self._gpu, self.title, claim.pid, then)
            time.sleep(0.05)
        held.callback(claim.release)

    def _signalled(self, pids: list[int], number: int, seconds: float) -> list[int]:
        """Send a signal to those who are still the same, and still there; return who of them lives after so long.

        Whoever has left, as a client whose MPS daemon this change has stopped, is not in the way.
        """
        inside = self._inside() if pids else set()
        pids = [pid for pid in pids if pid in inside]
        for pid in pids:
            started = self.started[pid]
            if started is not None:
                with contextlib.suppress(NotFound):
                    self._host.processes.send_to(pid, started, number)
        deadline = time.monotonic() + seconds
        while (left := [pid for pid in pids if self._lives(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _inside(self) -> set[int]:
        """Return who is in what goes at this moment: by NVML, and by the capability nodes."""
        self._host.nvml.restart()
        try:
            gpu = self._host.nvml.gpu(self._gpu.index)
            nodes = instance_holders(self._host, gpu)
        except GpushareError:
            return set()
        instance = self._gone.instance.id
        parts = {one.id for one in self._gone.compute}
        found = {
            one.pid
            for one in gpu.processes or ()
            if one.gpu_instance_id == instance and one.compute_instance_id in {None, *parts}
        }
        for place, holders in nodes.items():
            if place[0] == instance and (place[1] is None or place[1] in parts):
                found |= {one.pid for one in holders}
        # Our own look holds handles.
        self._host.nvml.restart()
        return found

    def _lives(self, pid: int) -> bool:
        return self._host.processes.alive(pid, self.started[pid])

    def _start_of(self, pid: int) -> float | None:
        info = self._host.processes.describe(pid)
        return None if info is None else info.started_at

    def _refused(self, pids: Collection[int], why: str, hint: str) -> InUse:
        return InUse(
            f"GPU {self._gpu.index}: {named(self._host, pids)} in {self.title} {why}; it is not ended by --evict",
            hint,
            gpu=str(self._gpu.index),
            code="not_evictable",
        )


def _all(gone: Destroyed) -> list[GpuProcess | Holder]:
    parts = (gone.instance.holders or (), *(one.holders or () for one in gone.compute))
    return [one for part in parts for one in part]


def _is_proved(one: GpuProcess | Holder) -> bool:
    return isinstance(one, GpuProcess) or one.what.startswith(f"{NODES}/")


def _title(gone: Destroyed) -> str:
    return f"{gone.instance.profile.name}:{gone.instance.start}"
