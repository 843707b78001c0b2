"""From ``--host`` to a host: ``local``, or ``sim:...`` for a simulated one."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from gpushare.base.errors import BadUsage
from gpushare.base.units import quoted
from gpushare.host.host import Host, UserDirectory, local_host


@functools.lru_cache(maxsize=1)
def _users_at(_second: int) -> Sequence[UserDirectory]:
    """Return the run directories of users in a second of the clock: one command asks several times."""
    from gpushare.host.users import user_directories

    return user_directories()


def connect(spec: str) -> Host:
    """Return the host that ``--host`` names, without reading it."""
    if spec == "local":
        return local_host(lambda: _users_at(int(time.monotonic())))
    if not spec.strip().lower().startswith("sim:"):
        raise BadUsage(
            f"{quoted(spec)} is not a host",
            "give local or a simulated host: --host sim:h200, --host sim:2xt4,a30",
            code="bad_host",
        )
    # Load the simulation only for a simulated host.
    from gpushare.sim import open_simulated

    return open_simulated(spec)
