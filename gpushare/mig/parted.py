"""The configuration file of mig-parted, version v1: which GPUs get which MIG devices. Pure.

What mig-parted refuses is refused here (its api/spec/v1/spec.go; profiles and counts: pkg/types). Only the form of a
profile is checked here; whether a GPU has it, the driver says later. ``parse_parted`` takes what a YAML parser returns;
errors name the line if mappings have an attribute ``line``.

One extension, for exact places: `PLACEMENTS`, a second YAML document. mig-parted reads only the first document and so
accepts the file. It is also read as a key of the first document (``-o json`` writes that).
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpushare.base.errors import BadUsage, NotFound
from gpushare.base.model import Gpu
from gpushare.base.selection import no_mig
from gpushare.inputs import yaml_text
from gpushare.mig.profile import Layout
from gpushare.mig.target import present
from gpushare.mig.wish import Request, Wish, merged, parse_wish, wish_of

_REQUIRED: Final = ("devices", "mig-enabled")
_KEYS: Final = (*_REQUIRED, "mig-devices", "device-filter")
_ATTRIBUTES: Final = r"[a-z][a-z0-9]*(?:\.[a-z0-9]+)*(?:,[a-z][a-z0-9]*(?:\.[a-z0-9]+)*)*"
# The memory size is part of the name there: 3g alone is refused.
_PROFILE: Final = re.compile(rf"(?:\d+c\.)?\d+g\.\d+gb(?:[+-](?P<attributes>{_ATTRIBUTES}))?", re.ASCII)


def _refused(message: str, hint: str, near: object = None, *, code: str = "bad_file") -> BadUsage:
    """Return the error of a file, with the line of ``near`` if the parser has noted it."""
    line = getattr(near, "line", None)
    return BadUsage(message if line is None else f"{message} (line {line})", hint, code=code)


def _kind_of(value: object) -> str:
    """Return the type of a YAML value in words; its content may be very long."""
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


def _text_key(key: object, what: str, near: object) -> str:
    if isinstance(key, bool) or not isinstance(key, (str, int)) or key == "":
        shown = _kind_of(key) if key != "" else "empty"
        raise _refused(f"{what} is {shown}", "put it in quotes", near)
    return str(key)


def _entry_keys(raw: object, where: str) -> Mapping[object, object]:
    """Return an entry, a mapping with all required keys and no unknown ones."""
    if not isinstance(raw, Mapping):
        raise _refused(f"{where} is {_kind_of(raw)}", "write: - devices: all, mig-enabled: false", raw)
    unknown = [key for key in raw if key not in _KEYS]
    if unknown:
        raise _refused(f"{where}: unknown key '{str(unknown[0])[:40]}'", f"the keys are: {', '.join(_KEYS)}", raw)
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise _refused(f"{where}: '{missing[0]}' is missing", f"every entry has {' and '.join(_REQUIRED)}", raw)
    return raw


def _switch_of(raw: object, where: str, near: object) -> bool:
    if not isinstance(raw, bool):
        raise _refused(f"{where}: 'mig-enabled' is {_kind_of(raw)}", "write true or false, without quotes", near)
    return raw


def _indexes_of(raw: object, where: str, near: object) -> tuple[int, ...] | None:
    """Return ``devices``: None for ``all``, else the indexes."""
    if raw == "all":
        return None
    if isinstance(raw, int) and not isinstance(raw, bool):
        raise _refused(
            f"{where}: 'devices' is one number", f"mig-parted accepts only a list: devices: [{str(raw)[:9]}]", near
        )
    if isinstance(raw, str):
        raise _refused(f"{where}: 'devices' is '{raw[:40]}'", "write all, or a list of indexes: [0, 1]", near)
    if not isinstance(raw, list):
        raise _refused(f"{where}: 'devices' is {_kind_of(raw)}", "write all, or a list of indexes: [0, 1]", near)
    for one in raw:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            shown = f"'{one[:40]}'" if isinstance(one, str) else _kind_of(one)
            shown = "below 0" if isinstance(one, int) and not isinstance(one, bool) else shown
            raise _refused(f"{where}: an index in 'devices' is {shown}", "give numbers from 0: [0, 1]", near)
    return tuple(raw)


def _filters_of(raw: object, where: str, near: object) -> tuple[str, ...]:
    """Return ``device-filter`` as written; empty for any GPU."""
    if raw is None or raw == "":
        return ()
    words = raw if isinstance(raw, list) else [raw]
    for word in words:
        if not isinstance(word, str):
            hint = 'put it in quotes: "0x20B510DE" (bare, YAML reads a number)'
            raise _refused(f"{where}: 'device-filter' is {_kind_of(word)}, not a text", hint, near)
    return tuple(words)


def _counts_of(raw: object, where: str, near: object) -> tuple[tuple[str, int], ...] | None:
    """Return ``mig-devices`` in its order, or None if it is absent."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise _refused(f"{where}: 'mig-devices' is {_kind_of(raw)}", 'write: {"1g.10gb": 7}', near)
    for profile, count in raw.items():
        match = _PROFILE.fullmatch(profile) if isinstance(profile, str) else None
        attributes = (match["attributes"] or "").split(",") if match else []
        if match is None or len(set(attributes)) != len(attributes):
            hint = "write it as the driver does: 1g.10gb, 1g.10gb+me, 1c.3g.40gb"
            raise _refused(f"{where}: '{str(profile)[:40]}' is not a MIG profile", hint, raw)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            shown = str(count)[:20] if isinstance(count, int) and not isinstance(count, bool) else _kind_of(count)
            raise _refused(f"{where}: the count of '{profile}' is {shown}", "give a number from 0", raw)
    if raw and not any(raw.values()):
        raise _refused(f"{where}: all counts of 'mig-devices' are 0", "for none write: mig-devices: {}", raw)
    return tuple((str(profile), int(count)) for profile, count in raw.items())


VERSION: Final = "v1"
PLACEMENTS: Final = "gpushare-placements"
_PROFILE_START: Final = re.compile(r"(?:\d+c\.)?[^:*\s]+:\d+(?:\*\d+)?", re.ASCII)


class PciIds(NamedTuple):
    """The PCI ids of a GPU, device above vendor in one number (0x20B510DE), and of its subsystem; None: unknown."""

    device: int | None = None
    subsystem: int | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """One entry of a configuration: for which GPUs, MIG on or off, and the MIG devices by profile."""

    # None: all.
    devices: tuple[int, ...] | None
    mig_enabled: bool
    counts: tuple[tuple[str, int], ...] = ()
    # PCI ids as written; empty: any GPU.
    filters: tuple[str, ...] = ()

    def takes(self, index: int, ids: PciIds) -> bool:
        """Return whether it is for a GPU: both filter and index must match."""
        if self.filters and not any(_fits(text, ids) for text in self.filters):
            return False
        return self.devices is None or index in self.devices

    @property
    def wish(self) -> Wish:
        """Return its MIG devices as a wish without places."""
        words = [(name, number) for name, number in self.counts if number]
        # Commas separate the words of a wish. No driver has a name with one, but only the driver may refuse it.
        odd = tuple(Request(profile=name, count=number) for name, number in words if "," in name)
        plain = " ".join(f"{name}*{number}" for name, number in words if "," not in name)
        return merged((*(parse_wish(plain) if plain else ()), *odd))


@dataclass(frozen=True, kw_only=True)
class Config:
    """One named configuration. ``placements`` gives exact places by GPU, named by index or UUID."""

    name: str
    entries: tuple[ConfigEntry, ...]
    placements: Mapping[str, Wish] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one GPU should have: MIG on or off, and exactly these instances.

    ``of_all``: the entry was for all devices; mig-parted then skips a GPU without MIG.
    """

    mig_enabled: bool
    wish: Wish = ()
    of_all: bool = False


def parse_parted(raw: object, placements: object = None) -> Mapping[str, Config]:
    """Return the configurations of a v1 file by name, in their order.

    ``raw`` is the first document of the file, ``placements`` the second, if any.
    """
    top = _top(raw)
    configs = top.get("mig-configs")
    if not isinstance(configs, Mapping) or not configs:
        what = "has no 'mig-configs'" if "mig-configs" not in top else "has no entry in 'mig-configs'"
        if configs is not None and not isinstance(configs, Mapping):
            what = f"'mig-configs' is {_kind_of(configs)}"
        raise _refused(f"the file {what}", "it maps names to lists of entries")
    places = _placements(top.get(PLACEMENTS) if placements is None else _second(placements))
    found = {}
    for key, entries in configs.items():
        name = _text_key(key, "the name of a configuration", configs)
        if not isinstance(entries, list) or not entries:
            raise _refused(
                f"config '{name}' has no list of entries",
                "give at least one: - devices: all, mig-enabled: false",
                entries if isinstance(entries, Mapping) else configs,
            )
        where = [(f"config '{name}', entry {number}", entry) for number, entry in enumerate(entries, 1)]
        found[name] = Config(
            name=name, entries=tuple(_entry(one, title) for title, one in where), placements=places.get(name, {})
        )
    unknown = sorted(set(places) - set(found))
    if unknown:
        raise _refused(
            f"'{PLACEMENTS}' names config '{unknown[0]}'", f"the file has: {', '.join(found)}", code="unknown_config"
        )
    return found


def choose(configs: Mapping[str, Config], name: str | None) -> Config:
    """Return the configuration with this name; a file with only one needs no name."""
    listing = f"the file has: {', '.join(configs)}"
    if name is None:
        if len(configs) == 1:
            return next(iter(configs.values()))
        raise BadUsage(
            f"the file has {len(configs)} configurations", f"name one with -c; {listing}", code="config_not_named"
        )
    if name in configs:
        return configs[name]
    close = difflib.get_close_matches(name, configs, n=1)
    hint = f"did you mean {close[0]}? {listing}" if close else listing
    raise NotFound(f"the file has no config '{name[:60]}'", hint, code="unknown_config")


def wishes_for(config: Config, gpus: Sequence[Gpu], ids: Mapping[int, PciIds] | None = None) -> dict[int, Demand]:
    """Return what each GPU of a configuration should have, by index.

    A later entry for the same GPU replaces an earlier one, as in mig-parted. GPUs without MIG are included; see
    `for_change`.
    """
    demands: dict[int, Demand] = {}
    for entry in config.entries:
        for gpu in gpus:
            if entry.takes(gpu.index, (ids or {}).get(gpu.index, PciIds())):
                demands[gpu.index] = Demand(
                    mig_enabled=entry.mig_enabled, wish=entry.wish, of_all=entry.devices is None
                )
    for gpu in gpus:
        for key in {str(gpu.index), gpu.uuid} & set(config.placements):
            demands[gpu.index] = _placed(config.name, gpu.index, demands.get(gpu.index), config.placements[str(key)])
    return demands


def for_change(demands: Mapping[int, Demand], gpus: Sequence[Gpu]) -> dict[int, Demand]:
    """Return the demands that a change carries out: GPUs without MIG are skipped, as mig-parted does."""
    without = {gpu.index: gpu for gpu in gpus if gpu.mig_capable is False and gpu.index in demands}
    for index, gpu in without.items():
        if demands[index].mig_enabled and not demands[index].of_all:
            raise no_mig([gpu], "remove it from 'devices', or write devices: all to skip it")
    return {index: demand for index, demand in demands.items() if index not in without}


def absent(config: Config, here: Collection[int]) -> tuple[str, ...]:
    """Return a note for each entry that names GPUs this host does not have; mig-parted ignores them silently."""
    said = []
    for number, entry in enumerate(config.entries, 1):
        gone = [index for index in entry.devices or () if index not in here]
        if gone:
            which = f"GPU {', '.join(map(str, gone))}, which {'is' if len(gone) == 1 else 'are'} not here"
            said.append(f"config '{config.name}', entry {number} names {which}")
    return tuple(said)


def is_elsewhere(entry: ConfigEntry, here: Collection[int]) -> bool:
    """Return whether an entry names only GPUs that this host does not have."""
    return entry.devices is not None and not any(index in here for index in entry.devices)


def idle_entries(
    config: Config, gpus: Sequence[Gpu], ids: Mapping[int, PciIds], here: Collection[int]
) -> tuple[str, ...]:
    """Return a note for each entry that matches none of these GPUs; mig-parted ignores it silently.

    Entries that name only GPUs that are not ``here`` are left to `absent`.
    """
    said = []
    for number, entry in enumerate(config.entries, 1):
        if is_elsewhere(entry, here) or any(entry.takes(gpu.index, ids.get(gpu.index, PciIds())) for gpu in gpus):
            continue
        odd = [text for text in entry.filters if _numbers(text) is None]
        why = f"; '{odd[0][:40]}' is not a PCI id like 0x20B510DE" if odd else ""
        said.append(f"config '{config.name}', entry {number} matches no GPU here{why}")
    return tuple(said)


def _top(raw: object) -> Mapping[object, object]:
    if raw is None:
        raise _refused("the file is empty", "it begins with: version: v1")
    if not isinstance(raw, Mapping):
        raise _refused(f"the file is {_kind_of(raw)}", "it is a mapping with version and mig-configs")
    if raw.get("kind") == "ConfigMap":
        raise _refused("this is a Kubernetes ConfigMap", "give the text below its data: config.yaml as a file")
    if "version" not in raw:
        raise _refused("the file has no 'version'", "it begins with: version: v1")
    if raw["version"] != VERSION:
        shown = raw["version"] if isinstance(raw["version"], (str, int)) else _kind_of(raw["version"])
        raise _refused(f"unknown version: {str(shown)[:40]}", "version v1 is read here")
    unknown = [key for key in raw if key not in {"version", "mig-configs", PLACEMENTS}]
    if unknown:
        raise _refused(f"unknown key '{str(unknown[0])[:40]}'", "the file has only version and mig-configs")
    return raw


def _entry(raw: object, where: str) -> ConfigEntry:
    fields = _entry_keys(raw, where)
    devices = _indexes_of(fields["devices"], where, raw)
    enabled = _switch_of(fields["mig-enabled"], where, raw)
    counts = _counts_of(fields.get("mig-devices"), where, raw)
    if enabled and counts is None:
        raise _refused(f"{where}: no 'mig-devices' although MIG is on", "for none write: mig-devices: {}", raw)
    if counts and not enabled:
        raise _refused(f"{where}: 'mig-devices' although MIG is off", "remove them, or write mig-enabled: true", raw)
    return ConfigEntry(
        devices=devices,
        mig_enabled=enabled,
        counts=counts or (),
        filters=_filters_of(fields.get("device-filter"), where, raw),
    )


def _second(raw: object) -> object:
    if not isinstance(raw, Mapping) or list(raw) != [PLACEMENTS]:
        raise _refused(f"the second document of the file is not '{PLACEMENTS}'", "give one mig-parted file", raw)
    return raw[PLACEMENTS]


def _placements(raw: object) -> dict[str, dict[str, Wish]]:
    if raw is None:
        return {}
    shape = f"'{PLACEMENTS}' maps a config to GPUs, and a GPU to a list like [3g.40gb:4]"
    if not isinstance(raw, Mapping):
        raise _refused(f"'{PLACEMENTS}' is {_kind_of(raw)}", shape)
    found: dict[str, dict[str, Wish]] = {}
    for name, gpus in raw.items():
        if not isinstance(gpus, Mapping):
            raise _refused(f"'{PLACEMENTS}' of config '{str(name)[:60]}' is {_kind_of(gpus)}", shape, raw)
        found[_text_key(name, "the name of a configuration", raw)] = {
            _text_key(gpu, "a GPU", gpus): _places(words, str(name)[:60], gpus) for gpu, words in gpus.items()
        }
    return found


def _places(raw: object, name: str, near: object) -> Wish:
    words = []
    for word in raw if isinstance(raw, list) else [raw]:
        if not isinstance(word, str) or _PROFILE_START.fullmatch(word) is None:
            shown = f"'{word[:40]}'" if isinstance(word, str) else _kind_of(word)
            raise _refused(f"'{PLACEMENTS}' of config '{name}': {shown} is no placement", "write: [3g.40gb:4]", near)
        words.append(word)
    return parse_wish(" ".join(words)) if words else ()


def _placed(name: str, index: int, demand: Demand | None, exact: Wish) -> Demand:
    """Return a demand with its places, which must be of the same MIG devices."""
    if demand is None or not demand.mig_enabled or _devices(demand.wish) != _devices(exact):
        raise _refused(
            f"config '{name}': the placements of GPU {index} are not those of its mig-devices",
            f"change both, or remove '{PLACEMENTS}'",
            code="bad_placement",
        )
    return Demand(mig_enabled=True, wish=exact, of_all=demand.of_all)


def _devices(wish: Wish) -> dict[tuple[str, int], int]:
    """Return how many MIG devices of each profile and size a wish asks for; size 0 fills its GPU instance."""
    found: dict[tuple[str, int], int] = {}
    for request in wish:
        for slices in request.compute or (0,):
            key = (str(request.profile), slices)
            found[key] = found.get(key, 0) + request.count
    return found


def _fits(text: str, ids: PciIds) -> bool:
    numbers = _numbers(text)
    if numbers is None or ids.device is None or numbers[0] != ids.device:
        return False
    return len(numbers) == 1 or numbers[1] == ids.subsystem


def _numbers(text: str) -> list[int] | None:
    """Return ``0xDDDDVVVV`` or ``0xDDDDVVVV:0xSSSSVVVV`` as numbers, or None (pkg/types/device.go)."""
    parts = text.split(":")
    if len(parts) > 2 or not all(re.fullmatch(r"0[xX][0-9a-fA-F]{1,8}|\d{1,10}", part, re.ASCII) for part in parts):
        return None
    return [int(part, 16) if part[:2] in {"0x", "0X"} else int(part) for part in parts]


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One GPU for a file: the MIG devices of each profile, None where MIG is off or absent, and their exact places."""

    index: int
    counts: Mapping[str, int] | None
    places: tuple[str, ...] = ()
    # The PCI id of the device above that of the vendor; None is unknown.
    device_id: int | None = None


def exported(index: int, layout: Layout | None, device_id: int | None = None) -> Exported:
    """Return a GPU with the layout that it has; ``layout`` is None where MIG is off or absent."""
    if layout is None:
        return Exported(index=index, counts=None, device_id=device_id)
    counts: Counter[str] = Counter()
    for device, number in sorted(present(layout).items()):
        if device.slices:
            counts[device.name] += number
    wish = wish_of(instance for instance in layout.instances if instance.compute)
    places = tuple(word for request in wish for word in str(request).split())
    return Exported(index=index, counts=counts, places=places, device_id=device_id)


def check_config_name(name: str) -> str:
    """Return a name that a configuration can have."""
    if _NAME.fullmatch(name) is None:
        raise BadUsage(
            f"'{name[:60]}' is not a name for a configuration",
            "use up to 63 letters, digits and . _ + -, for example: train-night",
            code="bad_name",
        )
    return name


def document(name: str, gpus: Sequence[Exported], *, whole_host: bool) -> dict[str, Any]:
    """Return the v1 document of these GPUs: equal ones in one entry, with ``devices: all`` where possible.

    On a host with several models each entry has a ``device-filter``. The format cannot express a GPU instance without
    a compute instance, which is left out.
    """
    groups: dict[tuple[tuple[str, int], ...] | None, list[Exported]] = {}
    for gpu in gpus:
        groups.setdefault(None if gpu.counts is None else tuple(gpu.counts.items()), []).append(gpu)
    ids = {gpu.device_id for gpu in gpus}
    entries = []
    for counts, members in groups.items():
        entry: dict[str, Any] = {}
        mine = {one.device_id for one in members}
        alike = [gpu for gpu in gpus if gpu.device_id in mine]
        filtered = len(ids) > 1 and None not in ids
        if filtered:
            entry["device-filter"] = [f"0x{one:08X}" for one in sorted(one for one in mine if one is not None)]
        everyone = len(members) == (len(alike) if filtered else len(gpus))
        entry["devices"] = "all" if whole_host and everyone else [one.index for one in members]
        entry["mig-enabled"] = counts is not None
        if counts is not None:
            entry["mig-devices"] = dict(counts)
        entries.append(entry)
    return {"version": VERSION, "mig-configs": {name: entries}}


def placements(name: str, gpus: Sequence[Exported]) -> dict[str, Any]:
    """Return the exact places on each GPU with MIG on, by index: ``{config: {"0": ["3g.40gb:4"]}}``."""
    return {PLACEMENTS: {name: {str(gpu.index): list(gpu.places) for gpu in gpus if gpu.counts is not None}}}


def file_text(config: Mapping[str, Any], places: Mapping[str, Any] | None = None) -> str:
    """Return the file: the v1 document, and the placements as a second document, which mig-parted does not read."""
    text = yaml_text(config)
    if places is not None:
        text += "---\n# For gpushare: exact placements. mig-parted reads the first document only.\n" + yaml_text(places)
    return text
