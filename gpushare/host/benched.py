"""The thread caps that `gpushare bench` found for a command: ``<state>/benched/KEY.json``, kept across reboots.

One file per command and kind of GPU: the cap of so many copies depends on both. A farm of that command takes it.
Only their owner reads them: they name the whole command.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.kept_file import read_trusted, replace_file, writing

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.selection import Device

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class BenchedCap:
    """What was best under MPS for so many copies: percent of the threads, None is no cap; when, and under which driver.

    ``best`` False: another way than MPS was better still.
    """

    threads_percent: float | None
    best: bool
    date: str
    driver: str | None


def find_benched(host: Host, device: Device, command: Sequence[str], copies: int) -> BenchedCap | None:
    """Return what was found for so many copies of a command on such a GPU; None: it was not measured."""
    for directory in (host.state_directory, *host.shared_state_directories):
        if not is_trusted_directory(directory, "benched"):
            continue
        found = _cap(_read(directory / "benched" / _file_name(device, command), device, command).get(str(copies)))
        if found is not None:
            return found
    return None


def keep_benched(host: Host, device: Device, command: Sequence[str], caps: Mapping[int, BenchedCap]) -> Path:
    """Write what was found, over earlier results for these numbers of copies, and return the file.

    Raises:
        NoPermission, OperationFailed: the directory cannot be made, or the file not be written.
    """
    directory = host.state_directory / "benched"
    make_private_directory(directory, variable="GPUSHARE_STATE_DIR")
    # A command line may hold a secret; what an older gpushare wrote here everybody could read.
    with writing(directory, "which keeps the caps that were found"):
        directory.chmod(0o700)
    path = directory / _file_name(device, command)
    known = _read(path, device, command)
    known.update({str(copies): vars(cap) for copies, cap in caps.items()})
    record = {"schema": SCHEMA, "device": _kind(device), "command": list(command), "caps": known}
    with writing(path, "which keeps the caps that were found"):
        replace_file(path, json.dumps(record, indent=2), mode=0o600)
    return path


def _kind(device: Device) -> str:
    return device.gpu.name or "" if device.mig is None else f"{device.gpu.name or ''} {device.mig.profile or ''}"


def _file_name(device: Device, command: Sequence[str]) -> str:
    return (
        hashlib.sha256("\0".join((_kind(device), *command)).encode(errors="surrogateescape")).hexdigest()[:24] + ".json"
    )


def _read(path: Path, device: Device, command: Sequence[str]) -> dict[str, Any]:
    raw = read_trusted(path)
    if not isinstance(raw, dict) or (raw.get("schema"), raw.get("device"), raw.get("command")) != (
        SCHEMA,
        _kind(device),
        list(command),
    ):
        return {}
    caps = raw.get("caps")
    return dict(caps) if isinstance(caps, dict) else {}


def _cap(raw: Any) -> BenchedCap | None:
    if not isinstance(raw, dict):
        return None
    percent, best, date, driver = (raw.get(key) for key in ("threads_percent", "best", "date", "driver"))
    if percent is not None and not (isinstance(percent, (int, float)) and 0 < percent < 100):
        return None
    if not isinstance(best, bool) or not isinstance(date, str) or not (driver is None or isinstance(driver, str)):
        return None
    return BenchedCap(threads_percent=percent, best=best, date=date, driver=driver)
