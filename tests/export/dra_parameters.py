"""The parameters of a device that NVIDIA's DRA driver takes (api/nvidia.com/resource/v1beta1)."""

from __future__ import annotations

from typing import Any, Final

import jsonschema

from gpushare.export.dra import GROUP


def _object(**members: Any) -> dict[str, Any]:
    """Return the schema of an object; the driver decodes strictly."""
    return {"type": "object", "properties": members, "additionalProperties": False}


# A limit below 1Mi is refused.
_MEMORY: Final = {"type": "string", "pattern": "^[1-9][0-9]*(Mi|Gi|Ti)$"}
_MPS: Final = _object(
    strategy={"const": "MPS"},
    mpsConfig=_object(
        defaultActiveThreadPercentage={"type": "integer", "minimum": 0, "maximum": 100},
        defaultPinnedDeviceMemoryLimit=_MEMORY,
        multiUser={"type": "boolean"},
    ),
)
_INTERVAL: Final = _object(interval={"enum": ["Default", "Short", "Medium", "Long"]})
# A MIG device has no slice length.
_SHARING: Final = {
    "GpuConfig": [_MPS, _object(strategy={"const": "TimeSlicing"}, timeSlicingConfig=_INTERVAL)],
    "MigDeviceConfig": [_MPS, _object(strategy={"const": "TimeSlicing"})],
}


def check_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of one device configuration. Raises ValidationError: the driver refuses them."""
    sharing = {"anyOf": [{**each, "required": ["strategy"]} for each in _SHARING[raw["kind"]]]}
    jsonschema.validate(raw, _object(apiVersion={"const": GROUP}, kind={"enum": list(_SHARING)}, sharing=sharing))
    return raw
