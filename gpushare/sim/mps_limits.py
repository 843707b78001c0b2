"""Memory limits as nvidia-cuda-mps-control parses and prints them, with its traps. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpushare.sim.devices import Device

_UINT64 = 1 << 64
_NUMBER = re.compile(r"([+-]?)(\d+)(.*)", re.DOTALL)
_ORDINAL = re.compile(r"[+-]?\d+")
# Seen on 535: 31 is the last one, 32 and -1 are "Invalid device ordinal!" in the log.
_MAX_DEVICES = 32
MIB = 1 << 20


def parse_memory(text: str) -> int | None:
    """Return the mebibytes that the daemon makes of a value; None clears the limit.

    Seen on nvidia-cuda-mps-control 535 and 550: the number ends at the first other character, and
    only a ``G`` right after it (or after one ``M``) counts; so ``1.5G`` is 1M, ``1024K`` is 1024M. It
    wraps at 64 bits of bytes.
    """
    match = _NUMBER.match(text)
    if match is None:
        return None
    sign, digits, rest = match.groups()
    number = min(int(digits), _UINT64 - 1)
    if sign == "-":
        number = -number % _UINT64
    unit = MIB * 1024 if re.match(r"m?g", rest, re.IGNORECASE) else MIB
    return (number * unit % _UINT64) // MIB or None


def readback(mebibytes: int | None) -> str:
    """Return what ``get_..._pinned_mem_limit`` prints: whole G from 1024M up, nothing when unset."""
    if mebibytes is None:
        return ""
    return f"{mebibytes // 1024}G" if mebibytes >= 1024 else f"{mebibytes}M"


def device_key(text: str) -> str | None:
    """Return the entry that a device argument names: an ordinal, or a UUID as it is; None when it is neither."""
    if text.startswith(("GPU-", "MIG-")):
        return text
    match = _ORDINAL.match(text)
    if match is None or not 0 <= int(match.group()) < _MAX_DEVICES:
        return None
    return str(int(match.group()))


def split_device(words: list[str]) -> list[str]:
    """Return the words with a number's tail as the next one: ``1x 7G`` is device 1 and the value ``x``."""
    match = _ORDINAL.match(words[0]) if words else None
    if match is None or match.end() == len(words[0]):
        return words
    return [match.group(), words[0][match.end() :], *words[1:]]


def out_of_range(text: str) -> bool:
    """Return whether it is a number that is no device's (the daemon logs only these as invalid)."""
    return _ORDINAL.match(text) is not None and device_key(text) is None


def limit_of(limits: Mapping[str, int], devices: list[Device], device: Device) -> int | None:
    """Return the limit of a device in MiB: by ordinal or UUID, the entry that was set last wins."""
    found = None
    for key, mebibytes in limits.items():
        if key == device.uuid or (key.isdigit() and int(key) < len(devices) and devices[int(key)] == device):
            found = mebibytes
    return found


def parse_environment(text: str | None) -> dict[str, int | None]:
    """Return the entries of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: ``0=1G,GPU-...=512M``, in MiB."""
    entries: dict[str, int | None] = {}
    for entry in (text or "").split(","):
        key, equals, value = entry.strip().partition("=")
        if equals:
            entries[key.strip()] = parse_memory(value.strip())
    return entries


def names_invisible(entries: Mapping[str, int | None], devices: list[Device]) -> bool:
    """Return whether an entry names a GPU that the process cannot see: then all its limits are dropped."""
    uuids = {device.uuid for device in devices}
    return any(int(key) >= len(devices) if key.isdigit() else key not in uuids for key in entries)
