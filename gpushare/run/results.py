"""Results of tune and bench that are kept for later runs: the setting next to a production job, and caps of copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import NoPermission
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.records import read_trusted, record_from, replace_file, writing
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.selection import Device


# The period of a duty cycle: short enough for several in a window of measuring, long enough that stops and draining
# queues cost little of it.
DUTY_SECONDS: Final = 0.5
DUTY_COSTS: Final = "a duty cycle raises production's p99 in each slice, and slows a job of small kernels by more than its share of the time"
SCHEMA: Final = 1
# The ways in which a production job and another one share a GPU: time-slices of their own outside MPS, or thread caps under MPS.
SLICES: Final = "slices"
CAPS: Final = "caps"
# Microseconds. The driver takes any value above 0; far longer ones freeze the neighbours.
_MOST_SLICE_US: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The setting found for an opportunistic job next to one production job, and the conditions of the measurement.

    ``meets`` False: no setting met the goal, and this one comes nearest. Shares are relative to the job alone.
    ``way`` is `SLICES` or `CAPS`, which is what results of older versions mean. With slices ``threads_percent`` is 100, and a
    slice of None is the driver's default.
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
    way: str = CAPS
    production_slice_us: int | None = None
    other_slice_us: int | None = None
    schema: int = SCHEMA


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


def _tuned(raw: Any) -> Tuned | None:
    found = record_from(Tuned, raw)
    if found is None or (found.production_memory_bytes or 0) < 0:
        return None
    percents = (found.threads_percent, found.duty_percent)
    slices = (found.production_slice_us, found.other_slice_us)
    sound = found.way in {SLICES, CAPS} and all(one is None or 0 < one <= _MOST_SLICE_US for one in slices)
    return found if sound and all(one is None or 0 < one <= 100 for one in percents) else None


@dataclass(frozen=True, kw_only=True)
class BenchedCap:
    """The best cap under MPS for some number of copies (None: no cap), when and under which driver it was measured.

    ``best`` False: another way than MPS was faster.
    """

    threads_percent: float | None
    best: bool
    date: str
    driver: str | None


def find_benched(host: Host, device: Device, command: Sequence[str], copies: int) -> BenchedCap | None:
    """Return the best cap for N copies of a command on such a GPU; None: it was not measured."""
    for directory in (host.state_directory, *host.shared_state_directories):
        if not is_trusted_directory(directory, "benched"):
            continue
        found = _cap(
            _read_benched(directory / "benched" / _file_name(device, command), device, command).get(str(copies))
        )
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
    # A command line may hold a secret, and an older gpushare made this directory readable for all.
    with writing(directory, "which keeps the measured caps"):
        directory.chmod(0o700)
    path = directory / _file_name(device, command)
    known = _read_benched(path, device, command)
    known.update({str(copies): vars(cap) for copies, cap in caps.items()})
    record = {"schema": SCHEMA, "device": _kind(device), "command": list(command), "caps": known}
    with writing(path, "which keeps the measured caps"):
        replace_file(path, json.dumps(record, indent=2), mode=0o600)
    return path


def _kind(device: Device) -> str:
    return device.gpu.name or "" if device.mig is None else f"{device.gpu.name or ''} {device.mig.profile or ''}"


def _file_name(device: Device, command: Sequence[str]) -> str:
    return (
        hashlib.sha256("\0".join((_kind(device), *command)).encode(errors="surrogateescape")).hexdigest()[:24] + ".json"
    )


def _read_benched(path: Path, device: Device, command: Sequence[str]) -> dict[str, Any]:
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
    found = record_from(BenchedCap, raw)
    if found is None or not (found.threads_percent is None or 0 < found.threads_percent < 100):
        return None
    return found
