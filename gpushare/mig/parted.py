"""The configuration file of mig-parted, version v1: which GPUs get which MIG devices. Pure.

What mig-parted refuses, we refuse (its api/spec/v1/spec.go; profiles and counts: pkg/types). A profile is checked
only for its form here: whether a GPU has it, the driver says when it is wanted. ``parse_parted`` takes what a YAML
parser returns; a mapping with an attribute ``line`` gives its errors the line.

One extension, for exact places: `PLACEMENTS`, a second YAML document behind the v1 one. mig-parted reads the first
document only, and so still takes the file. As a key of the first document (what ``-o json`` gives) we read it too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpushare.errors import BadUsage, NotFound, NotSupported
from gpushare.mig.parted_fields import (
    counts_of,
    entry_keys,
    filters_of,
    indexes_of,
    kind_of,
    refused,
    switch_of,
    text_key,
)
from gpushare.mig.wish import Request, Wish, merged, parse_wish
from gpushare.model import Gpu

VERSION: Final = "v1"
PLACEMENTS: Final = "gpushare-placements"
_PROFILE_START: Final = re.compile(r"(?:\d+c\.)?[^:*\s]+:\d+(?:\*\d+)?", re.ASCII)


class PciIds(NamedTuple):
    """The PCI ids of a GPU, device above vendor in one number (0x20B510DE), and of its subsystem; None: unknown."""

    device: int | None = None
    subsystem: int | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of a configuration: for which GPUs, MIG on or off, and the MIG devices by profile."""

    # None: all.
    devices: tuple[int, ...] | None
    mig_enabled: bool
    counts: tuple[tuple[str, int], ...] = ()
    # PCI ids as written; empty: any GPU.
    filters: tuple[str, ...] = ()

    def takes(self, index: int, ids: PciIds) -> bool:
        """Return whether it is for a GPU: both the filter and the index must fit."""
        if self.filters and not any(_fits(text, ids) for text in self.filters):
            return False
        return self.devices is None or index in self.devices

    @property
    def wish(self) -> Wish:
        """Return its MIG devices as a wish, without places.

        Raises:
            BadUsage: a count too large, or a compute instance larger than its GPU instance.
        """
        words = [(name, number) for name, number in self.counts if number]
        # A wish is cut at commas; no driver has such a name, and only the driver says so.
        odd = tuple(Request(profile=name, count=number) for name, number in words if "," in name)
        plain = " ".join(f"{name}*{number}" for name, number in words if "," not in name)
        return merged((*(parse_wish(plain) if plain else ()), *odd))


@dataclass(frozen=True, kw_only=True)
class Config:
    """One named configuration. ``placements`` gives exact places by GPU, named by index or UUID."""

    name: str
    entries: tuple[Entry, ...]
    placements: Mapping[str, Wish] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one GPU shall be: MIG on or off, and exactly these instances.

    ``of_all`` says that the entry was for all devices: mig-parted then skips a GPU without MIG when it applies.
    """

    mig_enabled: bool
    wish: Wish = ()
    of_all: bool = False


def parse_parted(raw: object, placements: object = None) -> Mapping[str, Config]:
    """Return the configurations of a v1 file by name, in the order of the file.

    ``raw`` is the first document of the file, ``placements`` the second one, if any.

    Raises:
        BadUsage: it is no such file; the message names the configuration and the entry.
    """
    top = _top(raw)
    configs = top.get("mig-configs")
    if not isinstance(configs, Mapping) or not configs:
        what = "has no 'mig-configs'" if "mig-configs" not in top else "has no entry in 'mig-configs'"
        if configs is not None and not isinstance(configs, Mapping):
            what = f"'mig-configs' is {kind_of(configs)}"
        raise refused(f"the file {what}", "it maps names to lists of entries")
    places = _placements(top.get(PLACEMENTS) if placements is None else _second(placements))
    found = {}
    for key, entries in configs.items():
        name = text_key(key, "the name of a configuration", configs)
        if not isinstance(entries, list) or not entries:
            raise refused(
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
        raise refused(
            f"'{PLACEMENTS}' names config '{unknown[0]}'", f"the file has: {', '.join(found)}", code="unknown_config"
        )
    return found


def choose(configs: Mapping[str, Config], name: str | None) -> Config:
    """Return the configuration with this name; a file with only one needs no name.

    Raises:
        BadUsage: there are several, and none is named.
        NotFound: there is none of this name.
    """
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
    """Return what each GPU shall be that the configuration is for, by index.

    Entries count in their order: a later one for the same GPU replaces an earlier one, as in mig-parted. A GPU
    without MIG is among them; see `for_change`.

    Raises:
        BadUsage: a count too large, or placements that are not those of the same devices.
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
    """Return the demands that a change carries out: GPUs without MIG are skipped, as mig-parted does.

    Raises:
        NotSupported: an entry names a GPU without MIG by its index and turns MIG on.
    """
    without = {gpu.index: gpu for gpu in gpus if gpu.mig_capable is False and gpu.index in demands}
    for index, gpu in without.items():
        if demands[index].mig_enabled and not demands[index].of_all:
            raise NotSupported(
                f"GPU {index} ({gpu.name or 'unknown'}) has no MIG",
                "take it out of 'devices', or write devices: all to skip it",
                gpu=str(index),
                code="no_mig",
            )
    return {index: demand for index, demand in demands.items() if index not in without}


def absent(config: Config, here: Collection[int]) -> tuple[str, ...]:
    """Return a sentence for each entry that names GPUs that this host (by index) has not; mig-parted is silent."""
    said = []
    for number, entry in enumerate(config.entries, 1):
        gone = [index for index in entry.devices or () if index not in here]
        if gone:
            which = f"GPU {', '.join(map(str, gone))}, which {'is' if len(gone) == 1 else 'are'} not here"
            said.append(f"config '{config.name}', entry {number} names {which}")
    return tuple(said)


def is_elsewhere(entry: Entry, here: Collection[int]) -> bool:
    """Return whether an entry names only GPUs that this host has not."""
    return entry.devices is not None and not any(index in here for index in entry.devices)


def idle_entries(
    config: Config, gpus: Sequence[Gpu], ids: Mapping[int, PciIds], here: Collection[int]
) -> tuple[str, ...]:
    """Return a sentence for each entry that is for none of these GPUs; mig-parted is silent about it.

    Those that name only GPUs that are not ``here`` are told by `absent`.
    """
    said = []
    for number, entry in enumerate(config.entries, 1):
        if is_elsewhere(entry, here) or any(entry.takes(gpu.index, ids.get(gpu.index, PciIds())) for gpu in gpus):
            continue
        odd = [text for text in entry.filters if _numbers(text) is None]
        why = f"; '{odd[0][:40]}' is no PCI id like 0x20B510DE" if odd else ""
        said.append(f"config '{config.name}', entry {number} is for no GPU here{why}")
    return tuple(said)


def _top(raw: object) -> Mapping[object, object]:
    if raw is None:
        raise refused("the file is empty", "it begins with: version: v1")
    if not isinstance(raw, Mapping):
        raise refused(f"the file is {kind_of(raw)}", "it is a mapping with version and mig-configs")
    if raw.get("kind") == "ConfigMap":
        raise refused("this is a Kubernetes ConfigMap", "give the text below its data: config.yaml as a file")
    if "version" not in raw:
        raise refused("the file has no 'version'", "it begins with: version: v1")
    if raw["version"] != VERSION:
        shown = raw["version"] if isinstance(raw["version"], (str, int)) else kind_of(raw["version"])
        raise refused(f"unknown version: {str(shown)[:40]}", "version v1 is read here")
    unknown = [key for key in raw if key not in {"version", "mig-configs", PLACEMENTS}]
    if unknown:
        raise refused(f"unknown key '{str(unknown[0])[:40]}'", "the file has only version and mig-configs")
    return raw


def _entry(raw: object, where: str) -> Entry:
    fields = entry_keys(raw, where)
    devices = indexes_of(fields["devices"], where, raw)
    enabled = switch_of(fields["mig-enabled"], where, raw)
    counts = counts_of(fields.get("mig-devices"), where, raw)
    if enabled and counts is None:
        raise refused(f"{where}: no 'mig-devices' although MIG is on", "for none write: mig-devices: {}", raw)
    if counts and not enabled:
        raise refused(f"{where}: 'mig-devices' although MIG is off", "take them out, or write mig-enabled: true", raw)
    return Entry(
        devices=devices,
        mig_enabled=enabled,
        counts=counts or (),
        filters=filters_of(fields.get("device-filter"), where, raw),
    )


def _second(raw: object) -> object:
    if not isinstance(raw, Mapping) or list(raw) != [PLACEMENTS]:
        raise refused(f"the second document of the file is not '{PLACEMENTS}'", "give one mig-parted file", raw)
    return raw[PLACEMENTS]


def _placements(raw: object) -> dict[str, dict[str, Wish]]:
    if raw is None:
        return {}
    shape = f"'{PLACEMENTS}' maps a config to GPUs, and a GPU to a list like [3g.40gb:4]"
    if not isinstance(raw, Mapping):
        raise refused(f"'{PLACEMENTS}' is {kind_of(raw)}", shape)
    found: dict[str, dict[str, Wish]] = {}
    for name, gpus in raw.items():
        if not isinstance(gpus, Mapping):
            raise refused(f"'{PLACEMENTS}' of config '{str(name)[:60]}' is {kind_of(gpus)}", shape, raw)
        found[text_key(name, "the name of a configuration", raw)] = {
            text_key(gpu, "a GPU", gpus): _places(words, str(name)[:60], gpus) for gpu, words in gpus.items()
        }
    return found


def _places(raw: object, name: str, near: object) -> Wish:
    words = []
    for word in raw if isinstance(raw, list) else [raw]:
        if not isinstance(word, str) or _PROFILE_START.fullmatch(word) is None:
            shown = f"'{word[:40]}'" if isinstance(word, str) else kind_of(word)
            raise refused(f"'{PLACEMENTS}' of config '{name}': {shown} is no placement", "write: [3g.40gb:4]", near)
        words.append(word)
    return parse_wish(" ".join(words)) if words else ()


def _placed(name: str, index: int, demand: Demand | None, exact: Wish) -> Demand:
    """Return a demand with its places; they must be those of the same MIG devices."""
    if demand is None or not demand.mig_enabled or _devices(demand.wish) != _devices(exact):
        raise refused(
            f"config '{name}': the placements of GPU {index} are not those of its mig-devices",
            f"change both, or take '{PLACEMENTS}' out",
            code="bad_placement",
        )
    return Demand(mig_enabled=True, wish=exact, of_all=demand.of_all)


def _devices(wish: Wish) -> dict[tuple[str, int], int]:
    """Return how many MIG devices of each profile and size a wish asks for; 0 is one that fills."""
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
