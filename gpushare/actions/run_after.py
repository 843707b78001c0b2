"""What is left to do when a program of `gpushare run` is over: the last one stops the daemon."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from gpushare.actions.attachment import CONVERSATION_SECONDS
from gpushare.actions.mps_stop import clients_of, end_daemon
from gpushare.actions.run_end import end_program
from gpushare.errors import GpushareError
from gpushare.host.activity import ActivityMeter
from gpushare.host.connect import connect
from gpushare.host.mps import is_running
from gpushare.host.mps_control import MpsControl
from gpushare.host.mps_home import DaemonHome, Lease, home_of

if TYPE_CHECKING:
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
        if not is_running(host, record):
            # It died before its last program; nobody else would clear it away.
            home.clear()
            return False
        if home.live_leases():
            return False
        control = MpsControl(host.programs, str(home.pipe))
        if clients_of(control):
            return True
        end_daemon(host, control, record.pid, seconds=1.0, force=False)
        home.clear()
    return False


def after_death(
    spec: str, uuid: str, index: int, program: tuple[int, float | None] | None, lease: Lease | None
) -> None:
    """End an orphaned program the safe way, wait for the daemon's other users, and stop it if it was ours to stop.

    ``lease`` is the dead gpushare's, which the guard has held on.
    """
    host = connect(spec)
    home = home_of(host.run_directory, uuid)
    with contextlib.suppress(GpushareError):
        if program is not None and host.processes.alive(*program):
            instance = _gpu_instance(host, uuid)
            end_program(
                host,
                program[0],
                MpsControl(host.programs, str(home.pipe), seconds=CONVERSATION_SECONDS),
                ActivityMeter(host.nvml, index, instance),
            )
    if lease is not None:
        # Only now: as long as the program lived, its daemon was in use.
        lease.release()
    with contextlib.suppress(GpushareError):
        while stop_if_last(host, home):
            time.sleep(_POLL_SECONDS)


def _gpu_instance(host: Host, uuid: str) -> int | None:
    if not uuid.startswith("MIG-"):
        return None
    instances = (mig for gpu in host.nvml.identities() for mig in gpu.mig_instances)
    return next((mig.gpu_instance_id for mig in instances if mig.uuid == uuid), None)
