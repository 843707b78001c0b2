"""From ``--host`` to a host: ``local``, or ``sim:...`` for a simulated one."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare.base.errors import BadUsage
from gpushare.base.units import quoted
from gpushare.host.host import Host, UserDirectory, local_host

_USERS_SECONDS = 1.0
_users_seen: tuple[float, Sequence[UserDirectory]] | None = None


def _users() -> Sequence[UserDirectory]:
    """Return the run directories of users, as they were at most a second ago: one command asks several times."""
    global _users_seen  # noqa: PLW0603
    import time

    now = time.monotonic()
    if _users_seen is None or now - _users_seen[0] > _USERS_SECONDS:
        from gpushare.host.users import user_directories

        _users_seen = now, user_directories()
    return _users_seen[1]


def connect(spec: str) -> Host:
    """Return the host that ``--host`` names, without reading it."""
    if spec == "local":
        return local_host(_users)
    if not spec.strip().lower().startswith("sim:"):
        raise BadUsage(
            f"{quoted(spec)} is not a host",
            "give local or a simulated host: --host sim:h200, --host sim:2xt4,a30",
            code="bad_host",
        )
    # Load the simulation only for a simulated host.
    from gpushare.sim import open_simulated

    return open_simulated(spec)
