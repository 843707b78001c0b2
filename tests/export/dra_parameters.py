"""What NVIDIA's DRA driver makes of the parameters of a device (api/nvidia.com/resource/v1beta1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gpushare.base.units import MIB
from gpushare.export.dra import GROUP

INTERVALS: Final = ("Default", "Short", "Medium", "Long")
_QUANTITY: Final = re.compile(r"(\d{1,15})(Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)
_FACTORS: Final = {
    "": 1,
    "k": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}
_DEVICE: Final = re.compile(r"\d{1,4}|GPU-[0-9a-f-]+", re.ASCII)


class Refused(Exception):
    """The driver refuses it."""


def check_parameters(raw: object) -> Mapping[str, Any]:
    """Return the parameters of one device configuration, if the driver takes them.

    Raises:
        Refused: it does not.
    """
    top = _fields(raw, "the parameters", ("apiVersion", "kind", "sharing"))
    if top.get("apiVersion") != GROUP:
        raise Refused(f"no kind of group {GROUP}")
    kind = top.get("kind")
    if kind not in {"GpuConfig", "MigDeviceConfig"}:
        raise Refused(f"no kind '{str(kind)[:40]}'")
    if "sharing" in top:
        _check_sharing(top["sharing"], is_mig=kind == "MigDeviceConfig")
    return top


def _check_sharing(raw: object, *, is_mig: bool) -> None:
    # A MIG device has no slice length, so its configuration has no such member.
    members = ("strategy", "mpsConfig") if is_mig else ("strategy", "timeSlicingConfig", "mpsConfig")
    sharing = _fields(raw, "'sharing'", members)
    strategy = sharing.get("strategy")
    if strategy not in {"TimeSlicing", "MPS"}:
        raise Refused(f"unknown GPU sharing strategy: {str(strategy)[:40]}")
    if strategy == "TimeSlicing":
        if "mpsConfig" in sharing:
            raise Refused("cannot use 'mpsConfig' with the TimeSlicing strategy")
        interval = _fields(sharing.get("timeSlicingConfig", {}), "'timeSlicingConfig'", ("interval",)).get("interval")
        if interval is not None and interval not in INTERVALS:
            raise Refused(f"unknown time-slice interval: {str(interval)[:40]}")
        return
    if "timeSlicingConfig" in sharing:
        raise Refused("cannot use 'timeSlicingConfig' with the MPS strategy")
    _check_mps(sharing.get("mpsConfig", {}))


def _check_mps(raw: object) -> None:
    members = (
        *("defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"),
        "multiUser",
    )
    config = _fields(raw, "'mpsConfig'", members)
    threads = config.get("defaultActiveThreadPercentage")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= 100):
        raise Refused("'defaultActiveThreadPercentage' must be a whole number from 0 to 100")
    if "defaultPinnedDeviceMemoryLimit" in config:
        _check_memory(config["defaultPinnedDeviceMemoryLimit"])
    for device, limit in _fields(config.get("defaultPerDevicePinnedMemoryLimit", {}), "the limits", None).items():
        if not isinstance(device, str) or _DEVICE.fullmatch(device) is None:
            raise Refused(f"invalid device index: {str(device)[:60]}")
        _check_memory(limit)
    if not isinstance(config.get("multiUser", False), bool):
        raise Refused("'multiUser' is not true or false")


def _check_memory(raw: object) -> None:
    match = _QUANTITY.fullmatch(raw) if isinstance(raw, str) else None
    if match is None:
        raise Refused(f"'{str(raw)[:40]}' is no quantity")
    if int(match[1]) * _FACTORS[match[2] or ""] < MIB:
        raise Refused(f"the memory limit {raw}: value set too low (below 1Mi)")


def _fields(raw: object, what: str, members: tuple[str, ...] | None) -> Mapping[Any, Any]:
    if not isinstance(raw, Mapping):
        raise Refused(f"{what} is not a mapping")
    unknown = [key for key in raw if members is not None and key not in members]
    if unknown:
        raise Refused(f'strict decoding error: unknown field "{str(unknown[0])[:40]}" in {what}')
    return raw
