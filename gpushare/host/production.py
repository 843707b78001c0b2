"""The production jobs of a host that run now, by name: who they are and how much memory they have taken at most.

``<run>/production/NAME.json``, written by `gpushare run --production` while the job lives. It stays after the end: the
peak is what the job will need again. Whether it lives is asked of the process table, never of the file.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.kept_file import read_trusted, replace_file, writing

if TYPE_CHECKING:
    from gpushare.host.host import Host

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class Production:
    """One production job: its program's PID and start, its device, and the most memory that was seen."""

    name: str
    pid: int
    started_at: float | None
    device_uuid: str
    memory_peak_bytes: int | None = None
    schema: int = SCHEMA


def write_production(host: Host, production: Production) -> None:
    """Write the record of a production job.

    Raises:
        NoPermission, OperationFailed: the directory cannot be made, or the file not be written.
    """
    directory = host.run_directory / "production"
    # One by one: a mode holds for the last of a path only.
    make_private_directory(host.run_directory)
    make_private_directory(directory)
    # Others read it too, and spare the job.
    path = directory / f"{production.name}.json"
    with writing(path, "the record of a production job"):
        replace_file(path, json.dumps(asdict(production)))


def productions(host: Host) -> list[Production]:
    """Return every production job that is known, living or not: this user's, and root's."""
    found = []
    for run_directory in (host.run_directory, *host.shared_run_directories):
        if not is_trusted_directory(run_directory, "production"):
            continue
        with contextlib.suppress(OSError):
            found += [_production(read_trusted(path)) for path in sorted((run_directory / "production").glob("*.json"))]
    return [one for one in found if one is not None]


def find_production(host: Host, name: str) -> Production | None:
    """Return the production job of a name, living or not, or None."""
    return next((one for one in productions(host) if one.name == name), None)


def lives(host: Host, production: Production) -> bool:
    """Return whether a production job runs now."""
    return host.processes.alive(production.pid, production.started_at)


def _production(raw: Any) -> Production | None:
    if not isinstance(raw, dict):
        return None
    known = {field.name: raw[field.name] for field in fields(Production) if field.name in raw}
    texts = all(isinstance(known.get(key), str) for key in ("name", "device_uuid"))
    pid, started, peak = known.get("pid"), known.get("started_at"), known.get("memory_peak_bytes")
    numbers = isinstance(pid, int) and pid > 0 and (started is None or isinstance(started, (int, float)))
    # Without its start a record would soon tell of whoever has the PID then.
    whole = "started_at" in known and (peak is None or isinstance(peak, int))
    if not texts or not numbers or not whole:
        return None
    return Production(**known)
