"""Reading a mig-parted file from the disk or stdin: bounded, and never more than data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gpushare.cli.text_file import shown_as, text_of
from gpushare.errors import BadUsage, GpushareError, NotFound
from gpushare.layout.yaml_source import documents
from gpushare.mig.parted import (
    Config,
    Demand,
    PciIds,
    absent,
    choose,
    for_change,
    idle_entries,
    is_elsewhere,
    parse_parted,
    wishes_for,
)

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.model import Gpu

_HINT: Final = "write one as you need it from what is there: gpushare mig export > mig.yaml"


def config_of(path: str, name: str | None) -> Config:
    """Return a configuration of a mig-parted v1 file; ``-`` is stdin, and a file with only one needs no name.

    Raises:
        BadUsage: no such file format, or several configurations and none is named.
        NotFound: no such file or configuration.
        NoPermission: the file cannot be read.
    """
    found = documents(text_of(path, "mig-parted", _HINT), shown_as(path), _HINT)
    if len(found) > 2:
        raise BadUsage(f"{path}: {len(found)} YAML documents", "give one mig-parted file", code="bad_file")
    return choose(parse_parted(*found), name)


def demands_of(config: Config, gpus: Sequence[Gpu], host: Host) -> dict[int, Demand]:
    """Return what a configuration wants of these GPUs, by index, for a change: GPUs without MIG are skipped.

    GPUs that no entry is for are left out.

    Raises:
        BadUsage: a count too large, or placements that are not those of the same devices.
        NotFound: no entry is for any of these GPUs.
        NotSupported: MIG is turned on by index on a GPU that has none.
    """
    ids = pci_ids(config, gpus, host)
    demands = for_change(wishes_for(config, gpus, ids), gpus)
    if not demands:
        here = range(host.nvml.count())
        why = "; ".join((*absent(config, here), *idle_entries(config, gpus, ids, here))) or "none of them has MIG"
        raise NotFound(
            f"config '{config.name}' asks nothing of the chosen GPUs: {why}", "see: gpushare mig status", code="no_gpu"
        )
    return demands


def absent_gpus(config: Config, host: Host) -> tuple[str, ...]:
    """Return what to say of entries that name GPUs which this host has not.

    Raises:
        NotFound: no entry names one that it has.
    """
    here = range(host.nvml.count())
    said = absent(config, here)
    if said and all(is_elsewhere(entry, here) for entry in config.entries):
        raise NotFound(
            f"config '{config.name}' is for no GPU of this host: {'; '.join(said)}",
            "see which are here: gpushare status",
            code="no_gpu",
        )
    return said


def pci_ids(config: Config, gpus: Sequence[Gpu], host: Host) -> dict[int, PciIds]:
    """Return the PCI ids of the GPUs, if the configuration looks at them; unknown for one that does not answer."""
    found = {}
    if any(entry.filters for entry in config.entries):
        for gpu in gpus:
            with contextlib.suppress(GpushareError):
                found[gpu.index] = PciIds(*host.nvml.pci_ids(gpu.index))
    return found
