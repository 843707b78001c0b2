"""Entry points of the simulated NVML: utilisation, power, temperature, clocks, made from who is busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpushare.sim import activity
from gpushare.sim.nvml_abi import (
    Code,
    On,
    Refused,
    Target,
    check_version,
    entry_point,
    number,
    put,
    put_fields,
    put_known,
    target_of,
)
from gpushare.sim.state import now

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary

# Ratios of our idle H200: 96 W of 700 W; 31 degrees.
_IDLE_POWER, _IDLE_TEMPERATURE, _IDLE_CLOCK_MHZ = 0.137, 31, 345


@entry_point("nvmlDeviceGetUtilizationRates", on=On.DEVICE)
def _utilization(library: SimulatedLibrary, target: Target, rates: Any) -> None:
    # nvidia-smi shows N/A with MIG on, on the GPU and on its MIG devices.
    if target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    busy = activity.utilization(library.state, target)
    put_fields(target_of(rates), {"gpu": round(busy), "memory": activity.memory_bandwidth(busy)})


@entry_point("nvmlDeviceGetPowerUsage", on=On.GPU)
def _power(library: SimulatedLibrary, target: Target, milliwatts: Any) -> None:
    limit = _power_limit(target)
    busy = activity.utilization(library.state, target) / 100
    put(milliwatts, round(limit * (_IDLE_POWER + (1 - _IDLE_POWER) * busy)))


@entry_point(
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    on=On.GPU,
)
def _enforced_limit(_library: SimulatedLibrary, target: Target, milliwatts: Any) -> None:
    put(milliwatts, _power_limit(target))


def _power_limit(target: Target) -> int:
    if target.model.power_limit_watts is None:
        raise Refused(Code.NOT_SUPPORTED)
    return target.model.power_limit_watts * 1000


@entry_point("nvmlDeviceGetTemperature", on=On.GPU)
def _temperature(library: SimulatedLibrary, target: Target, sensor: Any, celsius: Any) -> None:
    # NVML_TEMPERATURE_GPU is the only sensor.
    if number(sensor) != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    put(celsius, _celsius(library, target))


@entry_point("nvmlDeviceGetTemperatureV", on=On.GPU)
def _temperature_v(library: SimulatedLibrary, target: Target, temperature: Any) -> None:
    struct = target_of(temperature)
    check_version(struct)
    if number(struct.sensorType) != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    put_fields(struct, {"temperature": _celsius(library, target)})


def _celsius(library: SimulatedLibrary, target: Target) -> int:
    return _IDLE_TEMPERATURE + round(0.35 * activity.utilization(library.state, target))


@entry_point("nvmlDeviceGetTotalEnergyConsumption", on=On.GPU)
def _energy(library: SimulatedLibrary, target: Target, millijoules: Any) -> None:
    if target.model.arch == "pascal":
        raise Refused(Code.NOT_SUPPORTED)
    # Idle power only: load in the past is not recorded, and a counter may never go back.
    seconds = max(now() - library.state.created_at, 0.0)
    put(millijoules, round(_power_limit(target) * _IDLE_POWER * seconds))


@entry_point("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", on=On.GPU)
def _clock(library: SimulatedLibrary, target: Target, kind: Any, megahertz: Any) -> None:
    # Graphics and SM clock run together; the memory and video clocks are not in the catalogue.
    if number(kind) not in {0, 1}:
        raise Refused(Code.NOT_SUPPORTED)
    idle = not activity.utilization(library.state, target)
    put_known(megahertz, _IDLE_CLOCK_MHZ if idle else target.model.max_sm_clock_mhz)
