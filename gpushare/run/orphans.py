"""What the guard of a run does when gpushare has died: it ends the programs the safe way, and gives back what they held."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpushare.base.errors import GpushareError, or_none
from gpushare.host.activity import ActivityMeter
from gpushare.host.claims import HeldClaim
from gpushare.host.host import Host
from gpushare.host.process import starts_of
from gpushare.host.records import has_records
from gpushare.mps.control import MpsControl
from gpushare.mps.home import DaemonHome, Lease, own_home
from gpushare.run.end import CONVERSATION_SECONDS, client_pids, end_programs
from gpushare.run.jobs import forget_ended
from gpushare.run.share import LINGER, MPS, stop_if_last

_POLL_SECONDS: Final = 2.0
# The guard of a swap may just be writing the record of what has ended: wait this long for its lock.
_LOCK_SECONDS: Final = 10.0


def after_death(
    host: Host,
    programs: dict[int, int | None],
    word: str,
    uuid: str,
    index: str,
    kind: str,
    lease_path: str,
    lease_descriptor: str,
    *claim_paths: str,
) -> None:
    """End orphaned programs, give their MIG instances back, and stop gpushare's MPS daemon with its last user.

    ``programs`` are PIDs with their start times; ``word`` is what gpushare said last. After `LINGER` they have ended and their
    instances were given back; another job may use them since. ``uuid`` is that of the device, ``index`` that of its GPU. From
    ``kind`` on as `guard_words`: the lease and the claims of the dead gpushare, which the guard still holds.
    """
    mps = kind == MPS
    claims: list[HeldClaim] = []
    if word == LINGER:
        programs = {}
    else:
        # Names of claims are never used again: one whose file is gone was released before gpushare died.
        claims = [HeldClaim(Path(path)) for path in claim_paths if os.path.lexists(path)]
    home = own_home(host, uuid)
    with contextlib.suppress(GpushareError):
        _end_programs(host, home, uuid, int(index), programs, mps=mps)
    # Only now: while the programs lived, the daemon was in use.
    if lease_path:
        Lease(Path(lease_path), int(lease_descriptor)).release()
    others_use_it = mps and or_none(lambda: stop_if_last(host, home))
    if claims:
        # A program that hangs in the driver still uses its instance.
        while any(host.processes.alive(pid, started) for pid, started in programs.items()):
            time.sleep(_POLL_SECONDS)
    for claim in claims:
        claim.release()
    if has_records(host, "on-demand"):
        from gpushare.mig.on_demand import sweep_orphans

        with contextlib.suppress(GpushareError):
            sweep_orphans(host)
    forget_ended(host, programs)
    if has_records(host, "swap"):
        from gpushare.memory import swapped

        swapped.forget_ended(host, _LOCK_SECONDS)
    while others_use_it:
        time.sleep(_POLL_SECONDS)
        others_use_it = or_none(lambda: stop_if_last(host, home))


def _end_programs(
    host: Host, home: DaemonHome, uuid: str, index: int, programs: Mapping[int, int | None], *, mps: bool
) -> None:
    """End those of the programs that still run, the safe way."""
    pids = starts_of(host.processes, [pid for pid, started in programs.items() if host.processes.alive(pid, started)])
    if not pids:
        return
    from gpushare.run.pause import resume_all

    # gpushare may have died while they were paused, and a stopped program does not end by a signal that it handles.
    resume_all(host, list(pids))
    if not mps:
        # `set`: there are no clients.
        end_programs(host, pids, set, None)
        return
    control = MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS)
    gpus = host.nvml.identities() if uuid.startswith("MIG-") else ()
    instances = [mig.gpu_instance_id for gpu in gpus for mig in gpu.mig_instances if mig.uuid == uuid]
    # None: it is a whole GPU, or an instance that is gone.
    meter = ActivityMeter(host.nvml, index, next(iter(instances), None))
    end_programs(host, pids, lambda: client_pids(control), meter)
