"""What is left to do when a program of `gpushare run` is over: the last one stops the daemon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.actions.mps_stop import clients_of, end_daemon, restore_mode
from gpushare.actions.pauser import resume_all
from gpushare.actions.run_end import CONVERSATION_SECONDS, client_pids, end_programs
from gpushare.errors import GpushareError
from gpushare.host.activity import ActivityMeter
from gpushare.host.connect import connect
from gpushare.host.known_process import known
from gpushare.host.mps import live_pid
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_home import DaemonHome, Lease, home_of

if TYPE_CHECKING:
    from gpushare.host.claims import HeldClaim
    from gpushare.host.host import Host

_POLL_SECONDS: Final = 2.0


def stop_if_last(host: Host, home: DaemonHome) -> bool:
    """Stop a daemon that a `gpushare run` started, if nobody uses it any more; return whether it lives on in use.

    Raises:
        GpushareError: it is unused and would not stop.
    """
    with home.locked():
        record = home.read()
        if record is None or not record.transient:
            return False
        pid = live_pid(host, home, record)
        if pid is None:
            # It died before its last program; nobody else would clear it away.
            restore_mode(host, record)
            home.clear()
            return False
        if home.live_leases():
            return False
        control = MpsControl(host.programs, str(home.pipe))
        if clients_of(control):
            return True
        end_daemon(host, control, pid, seconds=1.0, force=False)
        # It may have taken over what a daemon before it had changed.
        restore_mode(host, record)
        home.clear()
    return False


def after_death(
    spec: str,
    uuid: str,
    index: int,
    programs: Mapping[int, float | None],
    *,
    mps: bool,
    lease: Lease | None,
    claims: Sequence[HeldClaim] = (),
) -> None:
    """End orphaned programs, give their MIG instances back, and stop an MPS daemon that was ours with its last user.

    ``programs`` are PIDs with their start times. The lease and the claims are the dead gpushare's, which the guard has
    held on; with ``mps`` the programs end the safe way.
    """
    host = connect(spec)
    # One that was given back before gpushare died may be somebody else's.
    claims = [one for one in claims if one.held()]
    home = home_of(host.run_directory, uuid)
    with contextlib.suppress(GpushareError):
        _end(host, home, uuid, index, programs, mps=mps)
    # Only now: as long as the programs lived, its daemon was in use.
    if lease is not None:
        lease.release()
    lingers = mps and _in_use(host, home)
    if claims:
        # One that hangs in the driver is still in its instance.
        while any(host.processes.alive(pid, started) for pid, started in programs.items()):
            time.sleep(_POLL_SECONDS)
    for one in claims:
        one.release()
    while lingers:
        time.sleep(_POLL_SECONDS)
        lingers = _in_use(host, home)


def _end(
    host: Host, home: DaemonHome, uuid: str, index: int, programs: Mapping[int, float | None], *, mps: bool
) -> None:
    pids = known(host.processes, [pid for pid, started in programs.items() if host.processes.alive(pid, started)])
    if not pids:
        return
    # It may have died while it held them still.
    resume_all(host, list(pids), mps=mps)
    if not mps:
        end_programs(host, pids, set, None)
        return
    control = MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS)
    meter = ActivityMeter(host.nvml, index, _gpu_instance(host, uuid))
    end_programs(host, pids, lambda: client_pids(control), meter)


def _in_use(host: Host, home: DaemonHome) -> bool:
    """Stop the daemon with its last user; return whether it is still to be waited for."""
    try:
        return stop_if_last(host, home)
    except GpushareError:
        return False


def _gpu_instance(host: Host, uuid: str) -> int | None:
    if not uuid.startswith("MIG-"):
        return None
    instances = (mig for gpu in host.nvml.identities() for mig in gpu.mig_instances)
    return next((mig.gpu_instance_id for mig in instances if mig.uuid == uuid), None)
