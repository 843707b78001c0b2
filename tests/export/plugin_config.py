"""The configuration file of NVIDIA's device plugin: what it takes as it is meant (api/config/v1, internal/rm)."""

from __future__ import annotations

from typing import Any, Final

import jsonschema

from gpushare.export.k8s import PREFIX, VERSION, NodeSharing

_LABEL: Final = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
# A resource also has `devices` and `rename`, which the plugin ignores; and it drops what it does not know.
_RESOURCE: Final = {
    "type": "object",
    "properties": {
        # It writes + as a dot.
        "name": {"type": "string", "pattern": rf"^{PREFIX}{_LABEL}(\.{_LABEL})*$", "maxLength": 63},
        "replicas": {"type": "integer", "minimum": 2},
    },
    "required": ["name", "replicas"],
    "additionalProperties": False,
}
_SHARED: Final = {
    "type": "object",
    "properties": {
        "renameByDefault": {"type": "boolean"},
        "failRequestsGreaterThanOne": {"type": "boolean"},
        "resources": {"type": "array", "minItems": 1, "items": _RESOURCE},
    },
    "required": ["resources"],
    "additionalProperties": False,
}
SCHEMA: Final = {
    "properties": {
        "version": {"const": VERSION},
        "flags": {
            "type": "object",
            "properties": {"migStrategy": {"enum": ["none", "single", "mixed"]}},
            "additionalProperties": False,
        },
        # They exclude each other.
        "sharing": {
            "type": "object",
            "properties": {"timeSlicing": _SHARED, "mps": _SHARED},
            "maxProperties": 1,
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
    # With MIG strategy mixed it has no MPS.
    "not": {
        "properties": {"flags": {"properties": {"migStrategy": {"const": "mixed"}}}, "sharing": {"required": ["mps"]}},
        "required": ["flags", "sharing"],
    },
}


def from_config(raw: dict[str, Any]) -> NodeSharing:
    """Return what a configuration file says about sharing. Raises ValidationError: the plugin does not take it so."""
    jsonschema.validate(raw, {"type": "object", **SCHEMA})
    mig = raw.get("flags", {}).get("migStrategy") == "mixed"
    for strategy, block in raw.get("sharing", {}).items():
        replicas = {each["name"]: each["replicas"] for each in block["resources"]}
        assert len(replicas) == len(block["resources"]), "a resource stands twice"
        return NodeSharing(strategy=strategy, replicas=replicas, mig=mig)
    return NodeSharing(mig=mig)
