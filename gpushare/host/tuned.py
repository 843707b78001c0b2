"""What `gpushare tune` found, by the name of the production job: ``<state>/tuned/NAME.json``, kept across reboots."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import BadUsage, NoPermission
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.kept_file import read_trusted, replace_file

if TYPE_CHECKING:
    from gpushare.host.host import Host

SCHEMA: Final = 1
_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The setting that was found for the opportunistic job beside one production job, and under what it was found.

    ``meets`` False: no setting met the goal, and this one comes nearest. Shares are relative to the job alone.
    """

    name: str
    date: str
    gpu_name: str | None
    driver: str | None
    threads_percent: float
    low_priority: bool
    meets: bool
    stable: bool
    keep: float
    p99_factor: float | None = None
    kept: float | None = None
    p99: float | None = None
    opportunistic_share: float | None = None
    production_threads_percent: float | None = None
    duty_percent: float | None = None
    production_memory_bytes: int | None = None
    production: str | None = None
    opportunistic: str | None = None
    schema: int = SCHEMA


def check_job_name(name: str) -> str:
    """Return a name that a production job may have.

    Raises:
        BadUsage: it is none.
    """
    if not _NAME.fullmatch(name):
        raise BadUsage(
            f"'{name[:60]}' cannot be the name of a production job",
            "a letter first, then letters, digits, - _ or ., 32 at most: web, llm-1",
            code="bad_name",
        )
    return name


def find_tuned(host: Host, name: str) -> Tuned | None:
    """Return what was found for a production job: this user's, else root's; None when nothing is kept."""
    for directory in (host.state_directory, *host.shared_state_directories):
        if not is_trusted_directory(directory, "tuned"):
            continue
        found = _tuned(read_trusted(directory / "tuned" / f"{name}.json"))
        if found is not None:
            return found
    return None


def keep_tuned(host: Host, tuned: Tuned) -> Path:
    """Write what was found, over an earlier result of this name, and return the file.

    Raises:
        NoPermission: it cannot be written.
    """
    directory = host.state_directory / "tuned"
    make_private_directory(directory, variable="GPUSHARE_STATE_DIR")
    path = directory / f"{tuned.name}.json"
    try:
        replace_file(path, json.dumps(asdict(tuned), indent=2))
    except OSError as error:
        raise NoPermission(
            f"cannot write {path}: {error.strerror}",
            "set GPUSHARE_STATE_DIR to a directory that you may write",
            code="directory_unwritable",
        ) from None
    return path


def _is_percent(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 100


def _tuned(raw: Any) -> Tuned | None:
    if not isinstance(raw, dict):
        return None
    known = {field.name: raw[field.name] for field in fields(Tuned) if field.name in raw}
    threads, memory = known.get("threads_percent"), known.get("production_memory_bytes")
    duty = known.get("duty_percent")
    if not _is_percent(threads) or not (duty is None or _is_percent(duty)):
        return None
    if not (memory is None or (isinstance(memory, int) and memory >= 0)):
        return None
    try:
        return Tuned(**known)
    except TypeError:
        return None
