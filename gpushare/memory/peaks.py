"""The most device memory that a command has used here before: what it reserves when no size was given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.records import read_trusted, record_from, replace_file, writing

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.selection import Device

_DIRECTORY: Final = "peaks"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of a command on one model of GPU: bytes over all its processes, context included."""

    memory_bytes: int
    # A job that was still growing when it ended for want of memory: it needs more.
    short: bool = False


def find_peak(host: Host, device: Device, command: Sequence[str]) -> Peak | None:
    """Return the peak of a command on such a GPU; None: it has not run here."""
    if not is_trusted_directory(host.state_directory, _DIRECTORY):
        return None
    found = record_from(Peak, read_trusted(_path(host, device, command)))
    return found if found is not None and 0 < found.memory_bytes < 1 << 50 else None


def keep_peak(host: Host, device: Device, command: Sequence[str], peak: Peak) -> None:
    """Keep the larger of a peak and the one kept before.

    Raises:
        NoPermission, OperationFailed: it cannot be written.
    """
    before = find_peak(host, device, command)
    if before is not None and before.memory_bytes >= peak.memory_bytes and before.short == peak.short:
        return
    path = _path(host, device, command)
    make_private_directory(path.parent, variable="GPUSHARE_STATE_DIR")
    with writing(path, "which keeps the peak"):
        replace_file(path, json.dumps(asdict(peak)), mode=0o600)


def _path(host: Host, device: Device, command: Sequence[str]) -> Path:
    # The command line may hold a secret, so only its digest is kept.
    words = "\0".join((device.gpu.name or "", *command)).encode(errors="surrogateescape")
    return host.state_directory / _DIRECTORY / f"{hashlib.sha256(words).hexdigest()[:24]}.json"
