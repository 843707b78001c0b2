"""The configuration file of mig-parted, version v1: which GPUs get which MIG devices. Pure.

What mig-parted refuses is refused here (its api/spec/v1/spec.go; profiles and counts: pkg/types). Only the form of a
profile is checked here; whether a GPU has it, the driver says later.

One extension, for exact places: `PLACEMENTS`, a second YAML document. mig-parted reads only the first document and so
accepts the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpushare.base.errors import BadUsage, NotFound
from gpushare.base.model import Gpu
from gpushare.base.selection import no_mig_error
from gpushare.form import (
    Form,
    Value,
    constant,
    mapping,
    one_or_several,
    several,
    table,
    text,
    whole,
    whole_document,
    yes_or_no,
)
from gpushare.mig.wish import Wish, parse_wish

VERSION: Final = "v1"
PLACEMENTS: Final = "gpushare-placements"
# Of a file that is there: it is corrected, never written over.
HINT: Final = "to see a valid file of this form: gpushare export mig-parted"
_ATTRIBUTES: Final = r"[a-z][a-z0-9]*(?:\.[a-z0-9]+)*"
# The memory size is part of the name there: 3g alone is refused.
_PROFILE: Final = re.compile(rf"(?:\d+c\.)?\d+g\.\d+gb(?:[+-]{_ATTRIBUTES})?", re.ASCII)
_PROFILE_START: Final = r"^(?:[0-9]+c\.)?[^:*\s]+:[0-9]+(?:\*[0-9]+)?$(?!\n)"


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

    def applies_to(self, index: int, ids: PciIds) -> bool:
        """Return whether the entry is for a GPU: both filter and index must match."""
        if self.filters and not any(_is_pci_id_of(text, ids) for text in self.filters):
            return False
        return self.devices is None or index in self.devices

    @property
    def wish(self) -> Wish:
        """Return its MIG devices as a wish without places."""
        text = " ".join(f"{name}*{number}" for name, number in self.counts if number)
        return parse_wish(text) if text else ()


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


def choose_config(configs: Mapping[str, Config], name: str | None) -> Config:
    """Return the configuration with this name; a file with only one needs no name."""
    listing = f"the file has: {', '.join(configs)}"
    if name is None:
        if len(configs) == 1:
            return next(iter(configs.values()))
        raise BadUsage(
            f"the file has {len(configs)} configurations", f"name one with -c; {listing}", code="config_not_named"
        )
    if name not in configs:
        raise NotFound(f"the file has no config '{name[:60]}'", listing, code="unknown_config")
    return configs[name]


def demands_in(config: Config, gpus: Sequence[Gpu], ids: Mapping[int, PciIds] | None = None) -> dict[int, Demand]:
    """Return what each GPU of a configuration should have, by index.

    A later entry for the same GPU replaces an earlier one, as in mig-parted. GPUs without MIG are included; see
    `demands_for_change`.
    """
    demands: dict[int, Demand] = {}
    for entry in config.entries:
        for gpu in gpus:
            if entry.applies_to(gpu.index, (ids or {}).get(gpu.index, PciIds())):
                demands[gpu.index] = Demand(
                    mig_enabled=entry.mig_enabled, wish=entry.wish, of_all=entry.devices is None
                )
    for gpu in gpus:
        for key in {str(gpu.index), gpu.uuid} & set(config.placements):
            demands[gpu.index] = _demand_with_places(
                config.name, gpu.index, demands.get(gpu.index), config.placements[str(key)]
            )
    return demands


def demands_for_change(demands: Mapping[int, Demand], gpus: Sequence[Gpu]) -> dict[int, Demand]:
    """Return the demands that a change carries out: GPUs without MIG are skipped, as mig-parted does.

    Raises:
        NotSupported: an entry that names such a GPU switches MIG on.
    """
    without_mig = {gpu.index: gpu for gpu in gpus if gpu.mig_capable is False and gpu.index in demands}
    for index, gpu in without_mig.items():
        if demands[index].mig_enabled and not demands[index].of_all:
            raise no_mig_error([gpu], "remove it from 'devices', or write devices: all to skip it")
    return {index: demand for index, demand in demands.items() if index not in without_mig}


def unmatched_entry_notes(config: Config, gpus: Sequence[Gpu], ids: Mapping[int, PciIds]) -> tuple[str, ...]:
    """Return a note for each entry that none of a host's GPUs matches, or that names others; mig-parted ignores those silently."""
    indexes = {gpu.index for gpu in gpus}
    notes = []
    for number, entry in enumerate(config.entries, 1):
        absent = sorted(set(entry.devices or ()) - indexes)
        if absent:
            notes.append(
                f"config '{config.name}', entry {number} names GPU {', '.join(map(str, absent))}, not on this host"
            )
        elif not any(entry.applies_to(gpu.index, ids.get(gpu.index, PciIds())) for gpu in gpus):
            notes.append(f"config '{config.name}', entry {number} matches no GPU here")
    return tuple(notes)


# -- reading ---------------------------------------------------------------------------------------


def _parse_name(key: object) -> str | None:
    """Return a key of the file as a name; None: it cannot be one."""
    return str(key) if isinstance(key, str | int) and not isinstance(key, bool) and key != "" else None


def _parse_profile(key: object) -> str | None:
    """Return a key of the file as a profile; None: it has not the form of one."""
    return str(key) if isinstance(key, str) and _PROFILE.fullmatch(key) else None


def _devices_of(value: Value) -> tuple[int, ...] | None:
    """Return the indexes of an entry; None: all."""
    if value.raw == "all":
        return None
    if not isinstance(value.raw, list):
        example = value.raw if isinstance(value.raw, int) and not isinstance(value.raw, bool) else "0, 1"
        raise value.error(
            f"is {value.short_text}, neither all nor a list of indexes", f"write all, or a list: [{example}]"
        )
    return several(whole(0, _MOST)).read(value)


def _counts_of(value: Value) -> tuple[tuple[str, int], ...] | None:
    """Return how many MIG devices an entry wants of each profile; None: it does not say."""
    if value.raw is None:
        return None
    counts = table(
        _parse_profile, "a MIG profile as the driver writes it: 1g.10gb, 1g.10gb+me, 1c.3g.40gb", _COUNT
    ).read(value)
    if counts and not any(counts.values()):
        raise value.error("has only counts of 0", "for none write: mig-devices: {}")
    return tuple(counts.items())


def _filters_of(value: Value) -> tuple[str, ...]:
    """Return the PCI ids of an entry; none: it is for any GPU."""
    if value.raw in (None, "", []):
        return ()
    # Bare, YAML reads 0x20B510DE as a number.
    return one_or_several(text("", 'a text in quotes: "0x20B510DE"'), unique=False).read(value)


def _entry_of(fields: Mapping[str, Any], value: Value) -> ConfigEntry:
    """Return an entry. Raises BadUsage if MIG is on without devices, or off with some."""
    enabled = fields["mig-enabled"]
    counts = fields.get("mig-devices")
    if enabled and counts is None:
        raise value.error("lacks 'mig-devices' although MIG is on", "for none write: mig-devices: {}")
    if counts and not enabled:
        raise value.error("has 'mig-devices' although MIG is off", "remove them, or write mig-enabled: true")
    return ConfigEntry(
        devices=fields["devices"], mig_enabled=enabled, counts=counts or (), filters=fields.get("device-filter", ())
    )


def _places_of(value: Value) -> Wish:
    """Return the exact places of a GPU as a wish."""
    place = text(_PROFILE_START, "a placement like 3g.40gb:4")
    words = several(place).read(value) if isinstance(value.raw, list) else (place.read(value),)
    return parse_wish(" ".join(words)) if words else ()


# Of an index or a count: far more than any host has.
_MOST: Final = 1 << 20
_COUNT: Final = whole(0, _MOST)
_ENTRY: Final = mapping(
    {
        "devices": Form(_devices_of),
        "mig-enabled": yes_or_no(),
        "mig-devices": Form(_counts_of),
        "device-filter": Form(_filters_of),
    },
    _entry_of,
    need=("devices", "mig-enabled"),
)
_CONFIGS: Final = table(_parse_name, "the name of a configuration (put it in quotes)", several(_ENTRY, least=1))
_PLACES: Final = table(
    _parse_name,
    "the name of a configuration (put it in quotes)",
    table(_parse_name, "a GPU by index or UUID", Form(_places_of)),
)


def _check_configs(value: Value, fields: Mapping[str, Value]) -> None:
    if not fields["mig-configs"].raw:
        raise value.error("has no entry in 'mig-configs'", "it maps names to lists of entries")


_FILE: Final = mapping(
    {"version": constant(VERSION, f"is not {VERSION}, the only version"), "mig-configs": _CONFIGS},
    lambda fields, _: fields["mig-configs"],
    need=("version", "mig-configs"),
    check=_check_configs,
)
_SECOND: Final = mapping({PLACEMENTS: _PLACES}, lambda fields, _: fields[PLACEMENTS], need=(PLACEMENTS,))


def parse_parted(raw: object, placements: object = None, shown: str = "the file") -> Mapping[str, Config]:
    """Return the configurations of a v1 file by name, in their order.

    ``raw`` is the first document of the file, ``placements`` the second, if any; ``shown`` is the file, for errors.

    Raises:
        BadUsage: it is not valid; the message begins with ``FILE:LINE:COLUMN``.
    """
    document = whole_document(raw, "the file", shown, HINT)
    if isinstance(raw, Mapping) and raw.get("kind") == "ConfigMap":
        raise document.error("is a Kubernetes ConfigMap", "give the text below its data: config.yaml as a file")
    configs = _FILE.read(document)
    places = {}
    if placements is not None:
        second = whole_document(placements, "the second document", shown, HINT)
        places = _SECOND.read(second)
        unknown = sorted(places.keys() - configs.keys())
        if unknown:
            hint = f"the file has: {', '.join(configs)}"
            raise second.error(f"names config '{unknown[0]}', which the file does not have", hint)
    return {
        name: Config(name=name, entries=entries, placements=places.get(name, {})) for name, entries in configs.items()
    }


def _demand_with_places(name: str, index: int, demand: Demand | None, exact: Wish) -> Demand:
    """Return a demand with exact places. Raises BadUsage: they are not of the MIG devices that it has."""
    if demand is None or not demand.mig_enabled or _count_devices(demand.wish) != _count_devices(exact):
        raise BadUsage(
            f"config '{name}': the placements of GPU {index} are not those of its mig-devices",
            f"change both, or remove '{PLACEMENTS}'",
            code="bad_placement",
        )
    return Demand(mig_enabled=True, wish=exact, of_all=demand.of_all)


def _count_devices(wish: Wish) -> dict[tuple[str, int], int]:
    """Return how many MIG devices of each profile and size a wish asks for; size 0 fills its GPU instance."""
    counts: dict[tuple[str, int], int] = {}
    for request in wish:
        for slices in request.compute or (0,):
            key = (str(request.profile), slices)
            counts[key] = counts.get(key, 0) + request.count
    return counts


def _is_pci_id_of(text: str, ids: PciIds) -> bool:
    """Return whether ``0xDDDDVVVV`` or ``0xDDDDVVVV:0xSSSSVVVV`` is that of a GPU, as far as it is written (pkg/types/device.go)."""
    parts = text.split(":")
    if len(parts) > 2 or not all(re.fullmatch(r"0[xX][0-9a-fA-F]{1,8}|\d{1,10}", part, re.ASCII) for part in parts):
        return False
    numbers = [int(part, 16) if part[:2] in {"0x", "0X"} else int(part) for part in parts]
    return numbers == list(ids[: len(numbers)])
