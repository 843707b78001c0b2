"""What nvidia-smi of a simulated host shows of one GPU: the same numbers as the simulated NVML."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare.sim import activity
from gpushare.sim.models import GpuModel, model_of
from gpushare.sim.nvml_abi import Handle, Kind, Refused, Target
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedMigInstance
from gpushare.units import MIB

# Ratios of an idle H200 (96 W of 700 W, 31 degrees), as the simulated NVML has them.
_IDLE_POWER, _IDLE_TEMPERATURE, _BUSY_TEMPERATURE = 0.137, 31, 65


@dataclass(frozen=True)
class Chosen:
    """One GPU that the command names, with its index and model."""

    index: int
    gpu: SimulatedGpu
    model: GpuModel

    def target(self, instance: SimulatedMigInstance | None = None) -> Target:
        """Return it as the simulated NVML counts it, or one of its MIG devices."""
        return Target(Handle(Kind.GPU, self.index), self.gpu, self.model, instance)

    @property
    def mig_enabled(self) -> bool:
        """Return whether it is in MIG mode."""
        return self.gpu.mig_mode == 1


def choose(state: SimulatedHostState, ids: str | None) -> list[Chosen]:
    """Return the GPUs that ``-i`` names: indices, UUIDs, bus ids, with commas; all when it is not given."""
    wanted = None if ids is None else [part.strip() for part in ids.split(",")]
    found = [Chosen(index, gpu, model_of(gpu.model)) for index, gpu in enumerate(state.gpus)]
    if wanted is None:
        return found
    return [one for one in found if any(_names(one, part) for part in wanted)]


def _names(one: Chosen, part: str) -> bool:
    bus = one.gpu.pci_bus_id.upper()
    return part in {str(one.index), one.gpu.uuid} or part.upper() in {bus, bus[4:], bus[9:]}


def memory_mib(
    state: SimulatedHostState, one: Chosen, instance: SimulatedMigInstance | None = None
) -> tuple[int, int, int] | None:
    """Return total, reserved and used MiB, or None where NVML does not tell."""
    if supports(one, "nvmlDeviceGetMemoryInfo"):
        try:
            total, reserved, used = activity.memory_of(state, one.target(instance))
        except Refused:
            return None
        return total // MIB, reserved // MIB, used // MIB
    return None


def utilization(state: SimulatedHostState, one: Chosen) -> int | None:
    """Return the GPU's utilisation in percent; None with MIG on, or where NVML does not tell."""
    if one.mig_enabled or not supports(one, "nvmlDeviceGetUtilizationRates"):
        return None
    return round(activity.utilization(state, one.target()))


def power_watts(state: SimulatedHostState, one: Chosen) -> int | None:
    """Return the power draw in watts, or None when the model's limit is not known."""
    limit = one.model.power_limit_watts
    if limit is None:
        return None
    busy = activity.utilization(state, one.target()) / 100
    return round(limit * (_IDLE_POWER + (1 - _IDLE_POWER) * busy))


def temperature(state: SimulatedHostState, one: Chosen) -> int:
    """Return the temperature in degrees Celsius."""
    busy = activity.utilization(state, one.target()) / 100
    return round(_IDLE_TEMPERATURE + (_BUSY_TEMPERATURE - _IDLE_TEMPERATURE) * busy)


def residents(state: SimulatedHostState, one: Chosen) -> list[activity.Resident]:
    """Return who is on the GPU; nobody when NVML counts in another PID namespace."""
    shown = state.pid_namespace_is_host and supports(one, "nvmlDeviceGetComputeRunningProcesses")
    return activity.residents(state, one.target()) if shown else []


def supports(one: Chosen, entry_point: str) -> bool:
    """Return whether an NVML entry point works on this GPU (fault ``not-supported``)."""
    return not any(name.startswith(entry_point) for name in one.gpu.not_supported)


def lost_text(one: Chosen) -> str:
    """Return what nvidia-smi says of a GPU that fell off the bus."""
    return (
        f"Unable to determine the device handle for GPU{one.index}: {one.gpu.pci_bus_id}: GPU is lost.  "
        "Reboot the system to recover this GPU\n"
    )
