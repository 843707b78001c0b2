"""The checks of `gpushare doctor` on the environments of MPS daemons and their clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from gpushare.actions.check import Check, Examination, Verdict

if TYPE_CHECKING:
    from gpushare.model import MpsClient, MpsDaemon

_LIMIT: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# What libcuda takes under MPS by itself (NVIDIA's MPS guide).
_USUAL_CONNECTIONS: Final = 2


def client_environments(seen: Examination) -> Iterator[Check]:
    """Check for clients whose memory limits do not hold, or that take the connections of others."""
    for found in seen.believed:
        for client in found.daemon.clients:
            environment = seen.host.processes.environment(client.pid) or {}
            yield from _dropped_limits(found.daemon, client, environment)
            yield from _many_connections(found.daemon, client, environment)


def _dropped_limits(daemon: MpsDaemon, client: MpsClient, environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield a client whose memory limit names a GPU that it does not see: then none of its limits holds."""
    text, uuid = environment.get(_LIMIT), daemon.device_uuid
    if text is None or uuid is None or not any(_names_other(entry, uuid) for entry in text.split(",")):
        return
    yield Check(
        id="mps.limits_dropped",
        verdict=Verdict.WARN,
        gpu=daemon.gpu_index,
        seen=f"client {client.pid} has {_LIMIT}={text}, and sees one GPU only",
        why="one entry for a GPU that it does not see drops all its memory limits, the server's too",
        remedy="start it again with 0=SIZE alone: gpushare run --memory SIZE -- CMD",
    )


def _names_other(entry: str, uuid: str) -> bool:
    """Return whether an entry of the variable names another device than the only one (ordinal 0, or its UUID)."""
    device = entry.partition("=")[0].strip()
    return bool(device) and device != "0" and not (len(device) > 4 and uuid.startswith(device))


def _many_connections(daemon: MpsDaemon, client: MpsClient, environment: Mapping[str, str]) -> Iterator[Check]:
    text = environment.get(_CONNECTIONS, "")
    if text.isascii() and text.isdigit() and int(text) > _USUAL_CONNECTIONS:
        yield Check(
            id="mps.connections",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"client {client.pid} has {_CONNECTIONS}={text}",
            why="connections are what a GPU runs out of: fewer clients fit, and the next gets CUDA error 809",
            remedy=f"start it again without it: unset {_CONNECTIONS}",
        )


def daemon_environment(seen: Examination) -> Iterator[Check]:
    """Check for a default thread percentage that a daemon was given and silently did not take."""
    for found in seen.believed:
        text = (seen.host.processes.environment(found.daemon.pid or 0) or {}).get(_THREADS)
        if text is not None and not _is_percentage(text):
            yield Check(
                id="mps.threads_ignored",
                verdict=Verdict.WARN,
                gpu=found.daemon.gpu_index,
                seen=f"MPS daemon {found.daemon.pid} was started with {_THREADS}={text}",
                why="it takes 0 to 100 only; with anything else it says nothing, and every client gets 100 %",
                remedy=f"restart it with a number from 1 to 100 in {_THREADS}; or: gpushare mps start --threads 50",
            )


def _is_percentage(text: str) -> bool:
    try:
        return 0.0 < float(text) <= 100.0
    except ValueError:
        return False
