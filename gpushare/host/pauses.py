"""How often each opportunistic program was paused, noted by its ``gpushare run`` for the metrics: a file per program.

Only for those who look: a note that cannot be written is left out, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare.errors import NoPermission
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.kept_file import read_trusted, replace_file

if TYPE_CHECKING:
    from gpushare.host.host import Host


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """An opportunistic program, how often it was paused since its start, and whether it is now."""

    pid: int
    started_at: float | None
    gpu_uuid: str
    pauses: int = 0
    paused: bool = False


def note_pauses(host: Host, found: Pauses) -> None:
    """Note how a program stands now, atomically."""
    path = _directory(host.run_directory) / f"{found.pid}.json"
    with contextlib.suppress(OSError, NoPermission):
        make_private_directory(path.parent)
        replace_file(path, json.dumps(asdict(found)))


def forget_pauses(host: Host, pid: int) -> None:
    """Forget a program that has ended."""
    with contextlib.suppress(OSError):
        (_directory(host.run_directory) / f"{pid}.json").unlink()


def noted_pauses(host: Host) -> tuple[Pauses, ...]:
    """Return the programs that live, by PID; what another user notes where this one cannot look is missing."""
    found = []
    for directory in (host.run_directory, *host.shared_run_directories):
        if not is_trusted_directory(directory, _directory(directory).name):
            continue
        with contextlib.suppress(OSError):
            found += [_read(path) for path in _directory(directory).glob("*.json")]
    alive = [one for one in found if one is not None and host.processes.alive(one.pid, one.started_at)]
    return tuple(sorted(alive, key=lambda one: one.pid))


def _read(path: Path) -> Pauses | None:
    raw = read_trusted(path)
    try:
        return Pauses(**raw) if isinstance(raw["pid"], int) else None
    except (TypeError, KeyError):
        return None


def _directory(run_directory: Path) -> Path:
    return run_directory / "opportunistic"
