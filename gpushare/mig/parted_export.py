"""A host as a mig-parted file, version v1, and its text as YAML. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpushare.errors import BadUsage
from gpushare.mig.difference import present
from gpushare.mig.parted import PLACEMENTS, VERSION
from gpushare.mig.profile import Layout
from gpushare.mig.wish import wish_of

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}", re.ASCII)
_BARE: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*", re.ASCII)
# What a YAML 1.1 parser takes for something else than text.
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One GPU as it is: ``layout`` is None where MIG is off or absent."""

    index: int
    layout: Layout | None
    # The PCI id of the device above that of the vendor; None is unknown.
    device_id: int | None = None


def check_config_name(name: str) -> str:
    """Return a name that a configuration can have.

    Raises:
        BadUsage: it cannot.
    """
    if _NAME.fullmatch(name) is None:
        raise BadUsage(
            f"'{name[:60]}' is no name for a configuration",
            "take up to 63 letters, digits and . _ + -, for example: train-night",
            code="bad_name",
        )
    return name


def document(name: str, gpus: Sequence[Exported], *, whole_host: bool) -> dict[str, Any]:
    """Return the v1 document of these GPUs: equal ones in one entry, ``devices: all`` where it is true.

    On a host of several models each entry has its ``device-filter``. A GPU instance without a compute instance
    cannot be said in this format, and is left out.
    """
    groups: dict[tuple[bool, tuple[tuple[str, int], ...]], list[Exported]] = {}
    for gpu in gpus:
        groups.setdefault((gpu.layout is not None, tuple(_counts(gpu.layout).items())), []).append(gpu)
    ids = {gpu.device_id for gpu in gpus}
    entries = []
    for (enabled, counts), members in groups.items():
        entry: dict[str, Any] = {}
        mine = {one.device_id for one in members}
        alike = [gpu for gpu in gpus if gpu.device_id in mine]
        filtered = len(ids) > 1 and None not in ids
        if filtered:
            entry["device-filter"] = [f"0x{one:08X}" for one in sorted(one for one in mine if one is not None)]
        everyone = len(members) == (len(alike) if filtered else len(gpus))
        entry["devices"] = "all" if whole_host and everyone else [one.index for one in members]
        entry["mig-enabled"] = enabled
        if enabled:
            entry["mig-devices"] = dict(counts)
        entries.append(entry)
    return {"version": VERSION, "mig-configs": {name: entries}}


def placements(name: str, gpus: Sequence[Exported]) -> dict[str, Any]:
    """Return the exact places of each GPU with MIG on, by its index: ``{config: {"0": ["3g.40gb:4"]}}``."""
    return {
        PLACEMENTS: {
            name: {str(gpu.index): _places(gpu.layout) for gpu in gpus if gpu.layout is not None},
        }
    }


def yaml_text(config: Mapping[str, Any], places: Mapping[str, Any] | None = None) -> str:
    """Return the file: the v1 document, and the placements as a second one, which mig-parted does not read."""
    lines = [f"version: {config['version']}", "mig-configs:"]
    for name, entries in config["mig-configs"].items():
        lines.append(f"  {_scalar(name)}:")
        for entry in entries:
            lines += _entry_lines(entry)
    if places is not None:
        lines += ["---", "# For gpushare: exact places. mig-parted reads the first document only.", f"{PLACEMENTS}:"]
        for name, gpus in places[PLACEMENTS].items():
            lines.append(f"  {_scalar(name)}:" if gpus else f"  {_scalar(name)}: {{}}")
            lines += [f"    {json.dumps(gpu)}: {json.dumps(words)}" for gpu, words in gpus.items()]
    return "\n".join(lines) + "\n"


def _entry_lines(entry: Mapping[str, Any]) -> list[str]:
    rows = []
    if "device-filter" in entry:
        rows.append(f"device-filter: {json.dumps(entry['device-filter'])}")
    devices = entry["devices"]
    rows.append(f"devices: {devices if devices == 'all' else json.dumps(devices)}")
    rows.append(f"mig-enabled: {json.dumps(entry['mig-enabled'])}")
    if "mig-devices" in entry:
        counts = entry["mig-devices"]
        rows.append("mig-devices:" if counts else "mig-devices: {}")
        rows += [f"  {json.dumps(profile)}: {count}" for profile, count in counts.items()]
    return [f"  {'- ' if number == 0 else '  '}{row}" for number, row in enumerate(rows)]


def _scalar(text: str) -> str:
    plain = _BARE.fullmatch(text) is not None and text.lower() not in _WORDS
    return text if plain else json.dumps(text)


def _counts(layout: Layout | None) -> dict[str, int]:
    found: Counter[str] = Counter()
    for device, number in () if layout is None else sorted(present(layout).items()):
        if device.slices:
            found[device.name] += number
    return dict(found)


def _places(layout: Layout) -> list[str]:
    made = [one for one in layout.instances if one.compute]
    return [word for request in wish_of(made) for word in str(request).split()]
