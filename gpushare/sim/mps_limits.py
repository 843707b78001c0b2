"""Memory limits as nvidia-cuda-mps-control parses and prints them, with its traps. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpushare.sim.devices import Device

_UINT64 = 1 << 64
_NUMBER = re.compile(r"([+-]?)(\d+)(.*)", re.DOTALL)
_INTEGER = re.compile(r"\s*([+-]?[0-9]+)")
# Seen on 535: 31 is the last one, 32 and -1 are "Invalid device ordinal!" in the log.
_MAX_DEVICES = 32
# The branch whose daemon knows a GPU by its UUID; the older ones read "GPU-..." as device 0.
_UUIDS_SINCE = 580
MIB = 1 << 20


def parse_memory(text: str) -> int | None:
    """Return the mebibytes that the daemon makes of a value; None clears the limit.

    Seen on nvidia-cuda-mps-control 535, 550 and 555: the number ends at the first other character, and
    only a ``G`` right after it counts; so ``1.5G`` is 1M, ``1024K`` is 1024M. It wraps at 64 bits of bytes.
    """
    match = _NUMBER.match(text)
    if match is None:
        return None
    sign, digits, rest = match.groups()
    number = min(int(digits), _UINT64 - 1)
    if sign == "-":
        number = -number % _UINT64
    unit = MIB * 1024 if rest[:1] in {"g", "G"} else MIB
    return (number * unit % _UINT64) // MIB or None


def readback(mebibytes: int | None) -> str:
    """Return what ``get_..._pinned_mem_limit`` prints: whole G from 1024M up, nothing when unset."""
    if mebibytes is None:
        return ""
    return f"{mebibytes // 1024}G" if mebibytes >= 1024 else f"{mebibytes}M"


def leading_integer(text: str) -> tuple[int, str]:
    """Return a number as C's strtol and a cast to int read it, and the rest: 0 and all of it when there is none."""
    match = _INTEGER.match(text)
    if match is None:
        return 0, text
    # A Python int of thousands of digits takes its time; from 20 on each of them is the same.
    digits = match.group(1)[:30]
    number = max(min(int(digits), 2**63 - 1), -(2**63))
    return (number + 2**31) % 2**32 - 2**31, text[match.end() :]


def read_device(words: list[str], major: int) -> tuple[str | None, str]:
    """Return the entry that the words name, None for a number out of range, and the text of the value.

    What is no number is device 0, and the value begins where the number ends: ``1x 7G`` is device 1
    and the value ``x``, ``abc 7G`` is device 0 and the value ``abc``, which clears it.
    """
    word = words[0] if words else ""
    value = words[1] if len(words) > 1 else ""
    if word.startswith(("GPU-", "MIG-")) and major >= _UUIDS_SINCE:
        return word, value
    number, rest = leading_integer(word)
    return (str(number) if 0 <= number < _MAX_DEVICES else None), rest or value


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
