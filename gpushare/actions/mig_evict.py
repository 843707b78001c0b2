"""Ending who is in an instance, because ``--evict`` names it: asked first, killed after a while."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpushare.actions.plan import Step
from gpushare.errors import InUse, NotFound
from gpushare.host.holders import blocking, remedy
from gpushare.host.process import wait_gone
from gpushare.model import Holder

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.mig.plan import Destroyed
    from gpushare.model import Gpu

GRACE_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Ending(Step):
    """A step that ends programs: nothing brings them back."""


def holders_of(gone: Destroyed) -> list[int]:
    """Return the PIDs of all who are in what goes, or hold its GPU instance; not those in a part that stays."""
    parts = (gone.instance.holders or (), *(one.holders or () for one in gone.compute))
    return sorted({one.pid for part in parts for one in part})


def evict_step(host: Host, gpu: Gpu, gone: Destroyed) -> Ending:
    """Return the step that ends everybody in what goes: SIGTERM, ten seconds, SIGKILL. There is no way back.

    Without MPS a process in a MIG instance takes nobody with it; MPS daemons are stopped by their own step.

    Raises:
        InUse: a service holds it (DCGM, persistence daemon): that is no program to be killed.
    """
    pids = holders_of(gone)
    title = f"{gone.instance.profile.name}:{gone.instance.start}"
    _refuse_services(gpu, gone, title)

    def act() -> None:
        left = _signalled(host, pids, signal.SIGTERM, GRACE_SECONDS)
        left = _signalled(host, left, signal.SIGKILL, _KILL_SECONDS)
        if left:
            raise InUse(
                f"GPU {gpu.index}: {', '.join(map(str, left))} in {title} would not end",
                f"see why: ps -o pid,stat,wchan,cmd -p {','.join(map(str, left))}",
                gpu=str(gpu.index),
            )

    return Ending(
        what=f"end {len(pids)} {'process' if len(pids) == 1 else 'processes'} in {title} on GPU {gpu.index}",
        command=f"kill {' '.join(map(str, pids))}",
        undo=None,
        do=act,
    )


def _refuse_services(gpu: Gpu, gone: Destroyed, title: str) -> None:
    parts = (gone.instance.holders or (), *(one.holders or () for one in gone.compute))
    held = [one for part in parts for one in part if isinstance(one, Holder) and one.what != "lease"]
    known = remedy(held)
    if known is not None:
        raise InUse(
            f"GPU {gpu.index}: {blocking(held)} holds {title}, and is not ended by --evict",
            known,
            gpu=str(gpu.index),
            code="held_by_service",
        )


def _signalled(host: Host, pids: list[int], number: int, seconds: float) -> list[int]:
    for pid in pids:
        with contextlib.suppress(NotFound):
            host.processes.send(pid, number)
    return wait_gone(host.processes, pids, seconds)
