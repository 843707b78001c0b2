"""Sizes, percentages and durations as users type them and as the drivers take them. Pure.

MPS takes a memory limit only as a whole number of M or G: it silently turns ``1.5G`` into 1M and ``1024K`` into 1G
(seen on nvidia-cuda-mps-control 550). So every size is parsed here and written as whole mebibytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from gpushare.base.errors import BadUsage, cut

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4
# Less memory of other programs is a context, or what the driver has for itself.
WORTH_NAMING: Final = GIB

# Compiled at the first use, because status does not parse. All units are binary: nvidia-smi's MiB and MPS's M and G are
# powers of 1024.
# 8G, 8GB, 8GiB and 8Gi are the same.
_SIZE: Final = r"^\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)i?b?\s*$"
_FACTORS: Final = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_PERCENT: Final = r"^\s*(\d+(?:\.\d+)?|\.\d+)\s*%?\s*$"
_SECONDS: Final = r"^\s*(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|m|min|h|d)?\s*$"
_SECOND_FACTORS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_SIZE: Final = 1024 * TIB
_MOST_DEPTH: Final = 64
# A year: more is a typing error, and system clocks overflow.
_MAX_SECONDS: Final = 366 * 86400.0


def quoted(text: str, most: int = 60) -> str:
    """Return a user's text in quotes; of a long one only the beginning and the end."""
    return f"'{cut(text, most)}'"


def check_depth(text: str, loader: Any) -> None:
    """Check how deep a YAML text is nested: libyaml's composer crashes, and PyYAML's scanner takes quadratic time.

    Raises:
        RecursionError: it is nested too deep.
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MOST_DEPTH:
                raise RecursionError(depth)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def parse_memory_limit(text: str, option: str = "--memory") -> int:
    """Return a memory limit in bytes, rounded down to whole mebibytes (what MPS can hold). ``option`` is what it was given to.

    ``4G``, ``4GiB``, ``4Gi``, ``4096M``, ``1.5g``, ``0.5 GB``: all binary. A number without a unit is refused: MPS would take it
    as M, and a user may mean bytes.

    Raises:
        BadUsage: not a size, no unit, below 1 MiB, or absurdly large.
    """
    hint = f"give a size with its unit, for example {option} 4G or {option} 1500M"

    def wrong(problem: str) -> BadUsage:
        return BadUsage(f"{quoted(text)} {problem}", hint, code="bad_size")

    match = re.match(_SIZE, text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise wrong("is not a memory size")
    number, prefix = match.groups()
    if not prefix and float(number):
        raise wrong("has no unit")
    from decimal import ROUND_FLOOR, Decimal, localcontext

    with localcontext() as context:
        context.prec, context.rounding = 60, ROUND_FLOOR
        exact = Decimal(number) * _FACTORS.get(prefix.lower(), 1)
    if exact > _MAX_SIZE:
        raise wrong("is larger than any GPU")
    size = int(exact) // MIB * MIB
    if size == 0:
        # MPS would take 0 as no limit.
        raise wrong("is below 1 MiB")
    return size


def parse_thread_percentage(text: str) -> float:
    """Return an active thread percentage from 0.1 to 100, with the one decimal that the daemon keeps.

    Given a value out of range, MPS keeps the old one and exits 0; so it is refused here.

    Raises:
        BadUsage: not a number, or out of range.
    """
    match = re.match(_PERCENT, text, re.ASCII)
    value = 0.0 if match is None else float(match.group(1))
    if value > 100.0 or round(value, 1) == 0.0:
        problem = f"{quoted(text.strip())} is not a percentage from 0.1 to 100"
        raise BadUsage(problem, "give a percentage, for example --threads 25", code="bad_percentage")
    return round(value, 1)


def parse_seconds(text: str) -> float:
    """Return a duration in seconds: ``2.5s``, ``250ms``, ``10m``, ``1h``, ``2d``; only ``0`` needs no unit.

    Raises:
        BadUsage: not a duration, no unit, or longer than a year.
    """
    hint = "give a time with its unit: 250ms, 2s, 10m, 1h"
    match = re.match(_SECONDS, text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise BadUsage(f"{quoted(text)} is not a duration", hint, code="bad_duration")
    number, unit = match.groups()
    if unit is None and float(number):
        raise BadUsage(f"the time {quoted(text)} has no unit", hint, code="bad_duration")
    seconds = float(number) * _SECOND_FACTORS[(unit or "s").lower()]
    if seconds > _MAX_SECONDS:
        raise BadUsage(f"the duration {quoted(text)} is longer than a year", hint, code="bad_duration")
    return seconds


_SLICE: Final = r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*(us|µs|ms|s)\s*"
_MICROSECONDS: Final = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_MAX_SLICE_US: Final = 1_000_000


def parse_slice(text: str) -> int:
    """Return a time-slice in whole microseconds: ``500us``, ``2.5ms``. The caller checks its own range.

    Raises:
        BadUsage: not a time with its unit, 0, or longer than a second.
    """
    match = re.fullmatch(_SLICE, text, re.IGNORECASE | re.ASCII)
    value = round(float(match[1]) * _MICROSECONDS[match[2].lower()]) if match is not None else 0
    if not 0 < value <= _MAX_SLICE_US:
        problem = "is longer than any time-slice (1s)" if value else "is not a time-slice"
        raise BadUsage(f"{quoted(text)} {problem}", "give a time like 500us or 16ms", code="bad_slice")
    return value


def format_slice(microseconds: int | None) -> str:
    """Return a time-slice as `parse_slice` takes it: ``500us`` below a millisecond, then ``2.048ms``; ``-``: unknown."""
    if microseconds is None:
        return "-"
    return f"{microseconds}us" if microseconds < 1000 else f"{microseconds / 1000:g}ms"


def mps_memory(size_bytes: int) -> str:
    """Return the size as the MPS control daemon takes it: whole M."""
    return f"{size_bytes // MIB}M"


def size_option(size_bytes: int) -> str:
    """Return a size as for an option: ``4G`` if it is whole, else ``1500M``."""
    return f"{size_bytes // GIB}G" if size_bytes % GIB == 0 else mps_memory(size_bytes)


def mps_memory_readback(size_bytes: int) -> str:
    """Return what ``get_default_device_pinned_mem_limit`` prints for a limit of this size.

    From 1024M up the daemon floors to whole G: 2000M reads back as 1G (nvidia-cuda-mps-control
    535 and 550 without a GPU).
    """
    mebibytes = size_bytes // MIB
    return f"{mebibytes // 1024}G" if mebibytes >= 1024 else f"{mebibytes}M"


def mps_percentage(value: float) -> str:
    """Return a percentage as the MPS control daemon prints it: ``25.0``."""
    return f"{value:.1f}"


def format_bytes(size: int | None) -> str:
    """Return a size for people: ``4.0 GiB``, ``512 MiB``, ``-`` when unknown."""
    if size is None:
        return "-"
    if size >= TIB:
        return f"{size / TIB:.1f} TiB"
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    if size >= MIB or size == 0:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def format_distinct(size: int, other: int) -> tuple[str, str]:
    """Return two different sizes for people, in MiB or bytes if they would read alike: ``8212 MiB``, ``8192 MiB``."""
    for texts in ((format_bytes(size), format_bytes(other)), (f"{size // MIB} MiB", f"{other // MIB} MiB")):
        if texts[0] != texts[1]:
            return texts
    return f"{size} B", f"{other} B"


def duration_option(seconds: float) -> str:
    """Return a duration as an option takes it, in whole seconds: ``13h``, ``90m``, ``45s``."""
    whole = round(seconds)
    for size, unit in ((3600, "h"), (60, "m")):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def format_copies(number: int) -> str:
    """Return a number of copies for people: ``1 copy``, ``8 copies``."""
    return f"{number} {'copy' if number == 1 else 'copies'}"


def format_percent(value: float | None) -> str:
    """Return a percentage for people: ``25 %``, ``33.3 %``, ``-`` when unknown."""
    return "-" if value is None else f"{value:g} %"


def parse_pinned_limits(text: str, uuid: str) -> int | None:
    """Return the limit in bytes that ``CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`` sets for a process that sees one device.

    ``0=1G`` or ``GPU-uuid=512M``. None: 0, other text, or an entry that names another device: then CUDA drops all limits.
    """
    limit = None
    for entry in filter(None, (part.strip() for part in text.split(","))):
        device, _, value = entry.partition("=")
        # At most 12 digits: any process can set anything, and int() refuses numbers of thousands of digits.
        match = re.fullmatch(r"(\d{1,12})([MG])B?", value.strip(), re.IGNORECASE | re.ASCII)
        if match is None or device.strip().lower() not in {"0", uuid.lower()}:
            return None
        limit = int(match.group(1)) * (GIB if match.group(2).upper() == "G" else MIB)
    return limit or None


def format_duration(seconds: float) -> str:
    """Return a duration for people: ``45 s``, ``10 min``, ``1 h 5 min``, ``2 d 3 h``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    parts: list[tuple[int, str]] = []
    for size, name in units:
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append((count, name))
    return " ".join(f"{count} {name}" for count, name in parts[:2] if count)


def pid_of(text: str) -> int | None:
    """Return the PID that a text is; 0: a number that no process can have; None: no number."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0")
    # /proc/sys/kernel/pid_max is at most 4,194,304; a simulated PID is above it.
    return int(digits) if 0 < len(digits) < 10 else 0


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 GPU``, ``2 GPUs``, ``2 processes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def plain_name(name: str) -> str:
    """Return a name without case, blanks and punctuation, to compare it with what a user has typed."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def first_few(items: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """Return the first items, and how many more there are: ``a, b and 3 more``."""
    texts = [str(item) for item in items]
    return separator.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def natural_key(name: str) -> str:
    """Return a key that sorts names by the numbers in them, as people do: ``s2`` before ``s10``."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(20), name)


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in short: ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
