"""The MIG layout of a host as a mig-parted file, and as the ConfigMap that the GPU operator reads. Pure.

Written and read back by the rules of mig/parted.py, which are mig-parted's own (api/spec/v1/spec.go).
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import Any

from gpushare.errors import NotSupported
from gpushare.layout.description import GpuDescription, HostDescription, Sharing
from gpushare.layout.export import Document, Export
from gpushare.mig.parted import VERSION, parse_parted
from gpushare.mig.parted_export import yaml_text

FILE = "mig-parted.yaml"
_MAX_LABEL = 63


def config_of(host: HostDescription, name: str) -> dict[str, Any]:
    """Return the v1 file with one configuration: equal GPUs share an entry, ``devices: all`` where it is true.

    GPUs without MIG are left out: mig-parted skips them under ``all``, and refuses them by number.

    Raises:
        NotSupported: no GPU has MIG.
    """
    capable = [gpu for gpu in host.gpus if gpu.mig_capable is not False]
    if not capable:
        names = ", ".join(sorted({gpu.name or "unknown" for gpu in host.gpus}))
        raise NotSupported(f"no MIG on these GPUs ({names})", "see: gpushare status", code="no_mig")
    groups: dict[tuple[bool, tuple[tuple[str, int], ...]], list[GpuDescription]] = {}
    for gpu in capable:
        counts = tuple(sorted(Counter(mig.profile for mig in gpu.mig).items()))
        groups.setdefault((gpu.sharing is Sharing.MIG, counts), []).append(gpu)
    entries = []
    for (enabled, counts), members in groups.items():
        everyone = host.whole and len(members) == len(capable)
        entry: dict[str, Any] = {"devices": "all" if everyone else [gpu.index for gpu in members]}
        entry["mig-enabled"] = enabled
        if enabled:
            entry["mig-devices"] = dict(counts)
        entries.append(entry)
    config = {"version": VERSION, "mig-configs": {name: entries}}
    parse_parted(config)
    return config


def layout_name(host: HostDescription) -> str:
    """Return a name for the layout that no other layout has, and that a label of Kubernetes may hold.

    ``gpushare-7x1g.10gb`` where all GPUs are cut alike, else ``gpushare-`` and a digest.
    """
    config = config_of(host, "gpushare")
    entries = config["mig-configs"]["gpushare"]
    counts = entries[0].get("mig-devices", {})
    if len(entries) == 1 and entries[0]["devices"] == "all" and counts:
        words = (f"{count}x{profile}".replace("+", ".") for profile, count in counts.items())
        name = "-".join(["gpushare", *words])
        if len(name) <= _MAX_LABEL:
            return name
    return f"gpushare-{sha256(yaml_text(config).encode()).hexdigest()[:12]}"


def export(host: HostDescription, *, name: str) -> Export:
    """Return the file and how `nvidia-mig-parted` applies it."""
    lost = ["places of the instances: gpushare mig export --placement keeps them, for gpushare mig apply -f"]
    lost += lost_of(host)
    return Export(
        documents=(Document(name=FILE, text=yaml_text(config_of(host, name))),),
        commands=(
            f"nvidia-mig-parted assert --valid-config -f {FILE} -c {name}",
            f"sudo nvidia-mig-parted apply -f {FILE} -c {name}",
            f"nvidia-mig-parted assert -f {FILE} -c {name}",
        ),
        needs=(
            "nobody on the GPUs while it is applied; gpushare mig apply -f does it safely with this file",
            "at boot: nvidia-mig-manager.service with MIG_PARTED_CONFIG_FILE; its own config.yaml is written anew each time",
        ),
        lost=tuple(lost),
    )


def lost_of(host: HostDescription) -> list[str]:
    """Return what a mig-parted file cannot say of a host."""
    lost = []
    if any(mig.mps is not None or (mig.replicas or 1) > 1 for _, mig in host.instances()):
        lost.append("sharing inside MIG devices: mig-parted has no word for MPS or replicas")
    if any(mig.name for _, mig in host.instances()):
        lost.append("names of instances: mig-parted has none")
    other = sorted({gpu.sharing.value for gpu in host.gpus} - {Sharing.MIG.value})
    if other:
        lost.append(f"{', '.join(other)} of GPUs without MIG: mig-parted only cuts")
    return lost
