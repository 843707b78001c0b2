"""Results of tune and bench that are kept for later runs: the setting next to a production job, and caps of copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from gpushare.base.model import Way
from gpushare.base.selection import Device
from gpushare.base.typed import Count, JobName, Within
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.store import Kept, RecordStore, digest_of_words

# Above 0 %.
_Part = Annotated[float, Within(1e-9, 100)]
# All of the threads is no cap, which is None.
_Cap = Annotated[float, lambda percent: 0 < percent < 100]
# Microseconds. The driver takes any value above 0; far longer ones freeze the neighbours.
_Slice = Annotated[int, Within(1, 1_000_000)]


@dataclass(frozen=True, kw_only=True)
class Tuned(Kept):
    """The setting found for an opportunistic job next to one production job, and where it was measured.

    ``way`` is `Way.SLICES` or `Way.CAPS`. With slices ``threads_percent`` is 100, and a slice of None is the driver's
    default.
    """

    name: JobName
    gpu_name: str | None
    driver: str | None
    threads_percent: _Part
    low_priority: bool
    way: Annotated[Way, {Way.SLICES, Way.CAPS}.__contains__]
    production_memory_bytes: Count | None = None
    production_slice_us: _Slice | None = None
    other_slice_us: _Slice | None = None


TUNED: Final = RecordStore(Tuned, "tuned", "the result of tune", survives_reboot=True)


def find_tuned(host: Host, name: str) -> Tuned | None:
    """Return the setting that `tune` kept for a production job: this user's, else root's; None: there is none."""
    return next(iter(TUNED.find(host, name)), None)


def keep_tuned(host: Host, tuned: Tuned) -> Path:
    """Keep the setting that `tune` found, in place of an earlier one for this name, and return its file.

    Raises:
        NoPermission, OperationFailed: it cannot be written.
    """
    path = TUNED.path(host, tuned.name)
    TUNED.write(replace(tuned, path=path))
    return path


@dataclass(frozen=True, kw_only=True)
class BenchedCap:
    """The best cap under MPS for some number of copies (None: no cap), when and under which driver it was measured.

    ``best`` False: a way other than MPS was faster.
    """

    copies: Count
    threads_percent: _Cap | None
    best: bool
    date: str
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class _Benched(Kept):
    caps: tuple[BenchedCap, ...] = ()


# By `_record_key`.
BENCHED: Final = RecordStore(_Benched, "benched", "the measured caps", survives_reboot=True, mode=0o600)


def find_benched(host: Host, device: Device, command: Sequence[str], copies: int) -> BenchedCap | None:
    """Return the best cap for N copies of a command on such a GPU; None: it was not measured."""
    caps = (cap for record in BENCHED.find(host, _record_key(device, command)) for cap in record.caps)
    return next((cap for cap in caps if cap.copies == copies), None)


def keep_benched(host: Host, device: Device, command: Sequence[str], caps: Sequence[BenchedCap]) -> None:
    """Keep the caps that `bench` found, in place of earlier ones for these numbers of copies.

    Raises:
        NoPermission, OperationFailed: the directory cannot be made, or the file not be written.
    """
    path = BENCHED.path(host, _record_key(device, command))
    earlier = BENCHED.read(path)
    by_copies = {} if earlier is None else {cap.copies: cap for cap in earlier.caps}
    by_copies |= {cap.copies: cap for cap in caps}
    BENCHED.write(_Benched(caps=tuple(by_copies.values()), path=path))


def _record_key(device: Device, command: Sequence[str]) -> str:
    """Return the name of the record of a command on a GPU of this model, or an instance of this profile: a digest."""
    kind = device.gpu.name or ""
    if device.mig is not None:
        kind += f" {device.mig.profile or ''}"
    return digest_of_words((kind, *command))
