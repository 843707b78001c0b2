"""What NVIDIA's device plugin makes of a configuration file: what it refuses, and what it drops in silence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gpushare.export.k8s import PREFIX, VERSION, PluginSharing

_MAX_NAME: Final = 63
_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_FLAGS: Final = (
    *("migStrategy", "failOnInitError", "mpsRoot", "nvidiaDriverRoot", "nvidiaDevRoot", "gdrcopyEnabled", "gdsEnabled"),
    *("mofedEnabled", "useNodeFeatureAPI", "deviceDiscoveryStrategy", "plugin", "gfd"),
)


class Refused(Exception):
    """The plugin refuses it, or takes it and does something else than it says."""


def from_config(raw: object) -> PluginSharing:
    """Return what a configuration file says about sharing; ``raw`` is what a YAML parser returns.

    Raises:
        Refused: the plugin refuses it, or takes it and does something else than it says.
    """
    top = _mapping(raw, "the file", ("version", "flags", "resources", "sharing", "imex"))
    if top.get("version", VERSION) not in {VERSION, ""}:
        raise Refused(f"unknown version: {str(top['version'])[:40]}")
    if top.get("resources"):
        raise Refused("'resources' is read and then ignored by the plugin")
    strategy = _mig_strategy(top.get("flags"))
    _imex(top.get("imex"))
    sharing = _mapping(top.get("sharing"), "'sharing'", ("timeSlicing", "mps"))
    if len(sharing) > 1:
        raise Refused("'timeSlicing' and 'mps' exclude each other")
    for name, block in sharing.items():
        return _shared(str(name), block, strategy)
    return PluginSharing(mig_strategy=strategy)


def _mig_strategy(raw: object) -> str | None:
    flags = _mapping(raw, "'flags'", _FLAGS)
    strategy = flags.get("migStrategy")
    if strategy is not None and strategy not in {"none", "single", "mixed"}:
        raise Refused(f"unknown MIG strategy: {str(strategy)[:40]}")
    return None if strategy is None else str(strategy)


def _imex(raw: object) -> None:
    imex = _mapping(raw, "'imex'", ("channelIDs", "required"))
    if imex.get("channelIDs", []) not in ([], [0]):
        raise Refused("'channelIDs' must be [] or [0]")


def _shared(strategy: str, raw: object, mig_strategy: str | None) -> PluginSharing:
    block = _mapping(raw, f"'{strategy}'", ("renameByDefault", "failRequestsGreaterThanOne", "resources"))
    if strategy == "mps" and mig_strategy == "mixed":
        raise Refused("using --mig-strategy=mixed is not supported with MPS")
    resources = block.get("resources")
    if not isinstance(resources, list) or not resources:
        raise Refused(f"'{strategy}': no resources specified")
    replicas = tuple(_resource(one) for one in resources)
    names = [name for name, _ in replicas]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refused(f"the resource '{twice}' stands twice")
    for key in ("renameByDefault", "failRequestsGreaterThanOne"):
        if not isinstance(block.get(key, False), bool):
            raise Refused(f"'{key}' is not true or false")
    return PluginSharing(
        strategy=strategy,
        replicas=replicas,
        rename=block.get("renameByDefault", False) is True,
        mig_strategy=mig_strategy,
    )


def _resource(raw: object) -> tuple[str, int]:
    entry = _mapping(raw, "a resource", ("name", "replicas", "devices", "rename"))
    name, replicas = entry.get("name"), entry.get("replicas")
    if not isinstance(name, str) or not name:
        raise Refused("no resource name specified")
    for key in ("devices", "rename"):
        if entry.get(key, "all") != "all":
            raise Refused(f"'{key}' of a resource is not supported yet: the plugin ignores it")
    if replicas is None:
        raise Refused("no replicas specified")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 2:
        raise Refused("number of replicas must be >= 2; for one leave the block out")
    full = name if name.startswith(PREFIX) else PREFIX + name
    if len(full) > _MAX_NAME:
        raise Refused(f"fully-qualified resource name must be 63 characters or less: {full}")
    if _SUBDOMAIN.fullmatch(full.removeprefix(PREFIX)) is None:
        raise Refused(f"incorrect format for resource name '{name[:60]}'; the plugin writes + as a dot")
    return full, replicas


def _mapping(raw: object, what: str, keys: tuple[str, ...]) -> Mapping[Any, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise Refused(f"{what} is not a mapping")
    unknown = [key for key in raw if key not in keys]
    if unknown:
        raise Refused(
            f"unknown key '{str(unknown[0])[:40]}' in {what}: the plugin would drop it; the keys are: {', '.join(keys)}"
        )
    return raw
