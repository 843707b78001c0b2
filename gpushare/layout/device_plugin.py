"""The configuration file of NVIDIA's device plugin, version v1: read strictly, checked, written. Pure.

The rules are those of NVIDIA/k8s-device-plugin v0.20.0 (api/config/v1: config.go, sharing.go, replicas.go; MPS:
cmd/mps-control-daemon and internal/rm), restated. The plugin itself drops unknown keys in silence: a `timeslicing:`
with a small s gives a running plugin that shares nothing. Here an unknown key is an error, and so is what the plugin
takes and ignores (`rename`, `devices` of a resource), for then the file would not do what it says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpushare.errors import BadUsage

VERSION: Final = "v1"
PREFIX: Final = "nvidia.com/"
STRATEGIES: Final = ("none", "single", "mixed")
# Clients of an MPS server by the plugin: from compute capability 7.5 on, and below (it tests 7.5, so a V100 has 16).
MPS_REPLICAS: Final = 48
MPS_REPLICAS_OLD: Final = 16
_MAX_NAME: Final = 63
_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_FLAGS: Final = (
    *("migStrategy", "failOnInitError", "mpsRoot", "nvidiaDriverRoot", "nvidiaDevRoot", "gdrcopyEnabled", "gdsEnabled"),
    *("mofedEnabled", "useNodeFeatureAPI", "deviceDiscoveryStrategy", "plugin", "gfd"),
)
_HINT: Final = "see: https://github.com/NVIDIA/k8s-device-plugin#configuration-option-details"


@dataclass(frozen=True, kw_only=True)
class PluginSharing:
    """How the plugin of one node shares: by ``strategy`` (timeSlicing, mps or None), replicas by resource name."""

    strategy: str | None = None
    replicas: tuple[tuple[str, int], ...] = ()
    rename: bool = False
    fail_above_one: bool = True
    mig_strategy: str | None = None


def resource_of(profile: str) -> str:
    """Return the resource name of a MIG profile under strategy mixed: the plugin writes + as a dot."""
    return f"{PREFIX}mig-{profile.replace('+', '.')}"


def config_of(sharing: PluginSharing) -> dict[str, Any]:
    """Return the file as a mapping, checked as `from_config` checks it.

    Raises:
        BadUsage: the plugin would refuse or ignore it.
    """
    config: dict[str, Any] = {"version": VERSION}
    if sharing.mig_strategy is not None:
        config["flags"] = {"migStrategy": sharing.mig_strategy}
    if sharing.strategy is not None:
        config["sharing"] = {
            sharing.strategy: {
                "renameByDefault": sharing.rename,
                "failRequestsGreaterThanOne": sharing.fail_above_one,
                "resources": [{"name": name, "replicas": number} for name, number in sharing.replicas],
            }
        }
    from_config(config)
    return config


def from_config(raw: object) -> PluginSharing:
    """Return what a configuration file says about sharing; ``raw`` is what a YAML parser returns.

    Raises:
        BadUsage: the plugin refuses it, or takes it and does something else than it says.
    """
    top = _mapping(raw, "the file", ("version", "flags", "resources", "sharing", "imex"))
    if top.get("version", VERSION) not in {VERSION, ""}:
        raise _refused(f"unknown version: {str(top['version'])[:40]}")
    if top.get("resources"):
        raise _refused("'resources' is read and then ignored by the plugin")
    strategy = _mig_strategy(top.get("flags"))
    _imex(top.get("imex"))
    sharing = _mapping(top.get("sharing"), "'sharing'", ("timeSlicing", "mps"))
    if len(sharing) > 1:
        raise _refused("'timeSlicing' and 'mps' exclude each other")
    for name, block in sharing.items():
        return _shared(str(name), block, strategy)
    return PluginSharing(mig_strategy=strategy)


def check_mps(replicas: int, compute_capability: tuple[int, int] | None) -> None:
    """Check the number of MPS clients as the plugin does at its start (internal/rm).

    Raises:
        BadUsage: more than the GPU takes.
    """
    # Unknown is taken for a GPU of today: the plugin asks the GPU itself.
    most = MPS_REPLICAS if compute_capability is None or compute_capability >= (7, 5) else MPS_REPLICAS_OLD
    if replicas > most:
        raise _refused(f"invalid device maximum allowed replicas exceeded: {replicas} > {most} (MPS clients of a GPU)")


def _mig_strategy(raw: object) -> str | None:
    flags = _mapping(raw, "'flags'", _FLAGS)
    strategy = flags.get("migStrategy")
    if strategy is not None and strategy not in STRATEGIES:
        raise _refused(f"unknown MIG strategy: {str(strategy)[:40]}")
    return None if strategy is None else str(strategy)


def _imex(raw: object) -> None:
    imex = _mapping(raw, "'imex'", ("channelIDs", "required"))
    if imex.get("channelIDs", []) not in ([], [0]):
        raise _refused("'channelIDs' must be [] or [0]")


def _shared(strategy: str, raw: object, mig_strategy: str | None) -> PluginSharing:
    block = _mapping(raw, f"'{strategy}'", ("renameByDefault", "failRequestsGreaterThanOne", "resources"))
    if strategy == "mps" and mig_strategy == "mixed":
        raise _refused("using --mig-strategy=mixed is not supported with MPS")
    resources = block.get("resources")
    if not isinstance(resources, list) or not resources:
        raise _refused(f"'{strategy}': no resources specified")
    replicas = tuple(_resource(one) for one in resources)
    names = [name for name, _ in replicas]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _refused(f"the resource '{twice}' stands twice")
    for key in ("renameByDefault", "failRequestsGreaterThanOne"):
        if not isinstance(block.get(key, False), bool):
            raise _refused(f"'{key}' is not true or false")
    return PluginSharing(
        strategy=strategy,
        replicas=replicas,
        rename=block.get("renameByDefault", False) is True,
        # The plugin's own default: for MPS it is on (and until v0.19 cannot be turned off).
        fail_above_one=block.get("failRequestsGreaterThanOne", strategy == "mps") is True,
        mig_strategy=mig_strategy,
    )


def _resource(raw: object) -> tuple[str, int]:
    entry = _mapping(raw, "a resource", ("name", "replicas", "devices", "rename"))
    name, replicas = entry.get("name"), entry.get("replicas")
    if not isinstance(name, str) or not name:
        raise _refused("no resource name specified")
    for key in ("devices", "rename"):
        if entry.get(key, "all") != "all":
            raise _refused(f"'{key}' of a resource is not supported yet: the plugin ignores it")
    if replicas is None:
        raise _refused("no replicas specified")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 2:
        raise _refused("number of replicas must be >= 2; for one leave the block out")
    full = name if name.startswith(PREFIX) else PREFIX + name
    if len(full) > _MAX_NAME:
        raise _refused(f"fully-qualified resource name must be 63 characters or less: {full}")
    if _SUBDOMAIN.fullmatch(full.removeprefix(PREFIX)) is None:
        raise _refused(f"incorrect format for resource name '{name[:60]}'; the plugin writes + as a dot")
    return full, replicas


def _mapping(raw: object, what: str, keys: tuple[str, ...]) -> Mapping[Any, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise _refused(f"{what} is not a mapping")
    unknown = [key for key in raw if key not in keys]
    if unknown:
        raise _refused(
            f"unknown key '{str(unknown[0])[:40]}' in {what}: the plugin would drop it; the keys are: {', '.join(keys)}"
        )
    return raw


def _refused(message: str) -> BadUsage:
    return BadUsage(f"device-plugin config: {message}", _HINT, code="bad_plugin_config")
