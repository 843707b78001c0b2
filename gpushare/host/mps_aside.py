"""The record of an MPS daemon that was stopped for a MIG change: what to start it with again, also after a crash.

``<run>/mps/<mig-8443519f>/aside.json``, beside where `daemon.json` was.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from gpushare.host.kept_file import read_trusted, replace_file, writing
from gpushare.host.mps_home import record_of

if TYPE_CHECKING:
    from gpushare.host.mps_home import DaemonHome, DaemonRecord

_NAME: Final = "aside.json"


def set_aside(home: DaemonHome, record: DaemonRecord, profile: str | None) -> None:
    """Keep a record while its daemon is stopped, with the profile of its MIG device; written atomically.

    Raises:
        NoPermission, OperationFailed: it cannot be written.
    """
    path = home.directory / _NAME
    with writing(path, "the record of an MPS daemon that is stopped for a while"):
        replace_file(path, json.dumps({**asdict(record), "profile": profile}, indent=2))


def aside(home: DaemonHome) -> tuple[DaemonRecord, str | None] | None:
    """Return the record that was set aside and the profile, or None: there is none, or neither we nor root wrote it."""
    raw = read_trusted(home.directory / _NAME) if home.is_trusted() else None
    record = record_of(raw)
    profile = raw.get("profile") if isinstance(raw, dict) else None
    return None if record is None else (record, profile if isinstance(profile, str) else None)


def forget_aside(home: DaemonHome) -> None:
    """Remove a record that was set aside; none is fine."""
    with contextlib.suppress(OSError):
        (home.directory / _NAME).unlink()
