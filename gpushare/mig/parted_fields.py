"""The fields of one entry of a mig-parted file, each refused as mig-parted refuses it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gpushare.errors import BadUsage

REQUIRED: Final = ("devices", "mig-enabled")
KEYS: Final = (*REQUIRED, "mig-devices", "device-filter")
_ATTRIBUTES: Final = r"[a-z][a-z0-9]*(?:\.[a-z0-9]+)*(?:,[a-z][a-z0-9]*(?:\.[a-z0-9]+)*)*"
# The size in memory is part of the name there: 3g alone is refused.
_PROFILE: Final = re.compile(rf"(?:\d+c\.)?\d+g\.\d+gb(?:[+-](?P<attributes>{_ATTRIBUTES}))?", re.ASCII)


def refused(message: str, hint: str, near: object = None, *, code: str = "bad_file") -> BadUsage:
    """Return the error of a file, with the line of ``near`` where a parser noted it."""
    line = getattr(near, "line", None)
    return BadUsage(message if line is None else f"{message} (line {line})", hint, code=code)


def kind_of(value: object) -> str:
    """Return what a value of a YAML file is, for messages; never its content, which may be endless."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else "of another kind"


def text_key(key: object, what: str, near: object) -> str:
    """Return a key as text: a number is one too.

    Raises:
        BadUsage: it is neither.
    """
    if isinstance(key, bool) or not isinstance(key, (str, int)) or key == "":
        shown = kind_of(key) if key != "" else "empty"
        raise refused(f"{what} is {shown}", "put it in quotes", near)
    return str(key)


def entry_keys(raw: object, where: str) -> Mapping[object, object]:
    """Return an entry, if it is a mapping of known keys with the required ones.

    Raises:
        BadUsage: it is not.
    """
    if not isinstance(raw, Mapping):
        raise refused(f"{where} is {kind_of(raw)}", "write: - devices: all, mig-enabled: false", raw)
    unknown = [key for key in raw if key not in KEYS]
    if unknown:
        raise refused(f"{where}: unknown key '{str(unknown[0])[:40]}'", f"the keys are: {', '.join(KEYS)}", raw)
    missing = [key for key in REQUIRED if key not in raw]
    if missing:
        raise refused(f"{where}: '{missing[0]}' is missing", f"every entry has {' and '.join(REQUIRED)}", raw)
    return raw


def switch_of(raw: object, where: str, near: object) -> bool:
    """Return ``mig-enabled``.

    Raises:
        BadUsage: it is no boolean.
    """
    if not isinstance(raw, bool):
        raise refused(f"{where}: 'mig-enabled' is {kind_of(raw)}", "write true or false, without quotes", near)
    return raw


def indexes_of(raw: object, where: str, near: object) -> tuple[int, ...] | None:
    """Return ``devices``: None for ``all``, else the indexes.

    Raises:
        BadUsage: neither ``all`` nor a list of indexes.
    """
    if raw == "all":
        return None
    if isinstance(raw, int) and not isinstance(raw, bool):
        raise refused(
            f"{where}: 'devices' is one number", f"mig-parted takes only a list: devices: [{str(raw)[:9]}]", near
        )
    if isinstance(raw, str):
        raise refused(f"{where}: 'devices' is '{raw[:40]}'", "write all, or a list of indexes: [0, 1]", near)
    if not isinstance(raw, list):
        raise refused(f"{where}: 'devices' is {kind_of(raw)}", "write all, or a list of indexes: [0, 1]", near)
    for one in raw:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            shown = f"'{one[:40]}'" if isinstance(one, str) else kind_of(one)
            shown = "below 0" if isinstance(one, int) and not isinstance(one, bool) else shown
            raise refused(f"{where}: an index in 'devices' is {shown}", "give numbers from 0: [0, 1]", near)
    return tuple(raw)


def filters_of(raw: object, where: str, near: object) -> tuple[str, ...]:
    """Return ``device-filter`` as written; empty stands for any GPU.

    Raises:
        BadUsage: neither a text nor a list of texts.
    """
    if raw is None or raw == "":
        return ()
    words = raw if isinstance(raw, list) else [raw]
    for word in words:
        if not isinstance(word, str):
            hint = 'put it in quotes: "0x20B510DE" (bare, YAML reads a number)'
            raise refused(f"{where}: 'device-filter' is {kind_of(word)}, not a text", hint, near)
    return tuple(words)


def counts_of(raw: object, where: str, near: object) -> tuple[tuple[str, int], ...] | None:
    """Return ``mig-devices`` in its order, or None when it is absent.

    Raises:
        BadUsage: no mapping, no profile, no count, or all counts 0.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise refused(f"{where}: 'mig-devices' is {kind_of(raw)}", 'write: {"1g.10gb": 7}', near)
    for profile, count in raw.items():
        match = _PROFILE.fullmatch(profile) if isinstance(profile, str) else None
        attributes = (match["attributes"] or "").split(",") if match else []
        if match is None or len(set(attributes)) != len(attributes):
            hint = "write it as the driver does: 1g.10gb, 1g.10gb+me, 1c.3g.40gb"
            raise refused(f"{where}: '{str(profile)[:40]}' is not a MIG profile", hint, raw)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            shown = str(count)[:20] if isinstance(count, int) and not isinstance(count, bool) else kind_of(count)
            raise refused(f"{where}: the count of '{profile}' is {shown}", "give a number from 0", raw)
    if raw and not any(raw.values()):
        raise refused(f"{where}: all counts of 'mig-devices' are 0", "for none write: mig-devices: {}", raw)
    return tuple((str(profile), int(count)) for profile, count in raw.items())
