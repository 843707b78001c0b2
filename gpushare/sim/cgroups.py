"""Cgroups of a simulated host, in a directory of its own, and the driver's limits of memory on them (driver 615).

A limit is kept in its cgroup, as the kernel keeps it, and goes with it. Facts: NVIDIA's MPS documentation 615, "Memory
Partitioning"; nvml.h 615.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.host.cgroups import Cgroups
from gpushare.host.nvml import NO_LIMIT
from gpushare.host.process import Processes
from gpushare.sim.nvml_abi import Code, On, Refused, Target, entry_point, put_fields, target_of

if TYPE_CHECKING:
    from gpushare.sim.library import SimulatedLibrary
    from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedProcess, StateFile

# Branch of the driver that has the calls.
FIRST_DRIVER: Final = 615
# Values of the fault memory-limits: a limit that is taken and forgotten; numbers taken as MiB; given back as MiB.
FAULTS: Final = ("ignored", "mib", "told-in-mib")
_MIB: Final = 20
_KEPT: Final = "driver.limits"


class SimulatedCgroups(Cgroups):
    """The cgroups of a simulated host: directories, with files in place of the kernel's."""

    def __init__(self, state_file: StateFile) -> None:
        super().__init__(str(state_file.directory / "cgroup"), os.geteuid())
        with contextlib.suppress(OSError):
            os.mkdir(self.root, 0o755)
            Path(self.root, "cgroup.controllers").write_text("cpu memory dmem\n", encoding="ascii")
            Path(self.root, "cgroup.subtree_control").write_text("cpu memory\n", encoding="ascii")

    def own_text(self) -> str:
        """Return that gpushare is in no other cgroup there."""
        return "0::/\n"

    def read(self, directory: int, name: str) -> str | None:
        """Return the text of a file: the kernel takes "+dmem", and shows it as "dmem"."""
        text = super().read(directory, name)
        return text and text.replace("+", " ")

    def made(self, name: str) -> None:
        """Put the kernel's file there."""
        Path(self.root, name, "cgroup.procs").touch(0o644)

    def emptied(self, name: str) -> None:
        """Remove the kernel's files, which do not keep a cgroup from being removed."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(Path(self.root, name)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry)

    def populated(self, name: str) -> bool | None:
        local = Processes()
        return any(local.alive(child) for pid in self._entered(name) for child in local.descendants(pid))

    def holds(self, name: str, pid: int) -> bool:
        entered, local = self._entered(name), Processes()
        return pid in entered or any(pid in local.descendants(entry) for entry in entered)

    def _entered(self, name: str) -> set[int]:
        with contextlib.suppress(OSError):
            text = Path(self.root, name, "cgroup.procs").read_text(encoding="ascii")
            return {int(line) for line in text.split() if line.isdigit()}
        return set()

    def limits(self, name: str) -> dict[str, list[int]]:
        """Return the limits on a cgroup by UUID of the GPU: soft, hard."""
        with contextlib.suppress(OSError, ValueError):
            limits: dict[str, list[int]] = json.loads(Path(self.root, name, _KEPT).read_text(encoding="ascii"))
            return limits
        return {}

    def keep_limit(self, name: str, gpu: SimulatedGpu, soft: int, hard: int) -> None:
        """Put a limit on a cgroup."""
        limits = {**self.limits(name), gpu.uuid: [soft, hard]}
        Path(self.root, name, _KEPT).write_text(json.dumps(limits), encoding="ascii")
        if self.has_controller():
            shown = "max" if hard == NO_LIMIT else str(hard)
            line = f"nvidia/{gpu.pci_bus_id.lower()}/vidmem {shown}\n"
            Path(self.root, name, "dmem.max").write_text(line, encoding="ascii")

    def has_controller(self) -> bool:
        """Return whether the kernel has the controller dmem; else the driver counts by itself."""
        with self.opened() as root:
            return "dmem" in (self.read(root, "cgroup.controllers") or "").split()

    def check(self, path: bytes) -> str:
        """Return the name of a cgroup that can have a limit.

        Raises:
            Refused: NOT_FOUND, there is none, or the controller is not enabled for it.
        """
        where, _, name = path.decode(errors="replace").rpartition("/")
        if where != self.root or not Path(self.root, name).is_dir():
            raise Refused(Code.NOT_FOUND)
        with self.opened() as root:
            enabled = self.read(root, "cgroup.subtree_control") or ""
        if self.has_controller() and "dmem" not in enabled.split():
            raise Refused(Code.NOT_FOUND)
        return name


def is_refused(file: StateFile, state: SimulatedHostState, process: SimulatedProcess, size: int) -> bool:
    """Return whether the driver refuses a process so much memory, for the limit of its cgroup."""
    tree = SimulatedCgroups(file)
    for cgroup in Path(tree.root).glob("gpushare-job-*"):
        hard = tree.limits(cgroup.name).get(process.gpu_uuid, [0, NO_LIMIT])[1]
        if hard != NO_LIMIT and tree.holds(cgroup.name, process.pid):
            others = _used(tree, cgroup.name, state, process.gpu_uuid) - process.memory_bytes
            return size + others > hard
    return False


def _used(tree: SimulatedCgroups, name: str, state: SimulatedHostState, gpu_uuid: str) -> int:
    here = (process for process in state.processes if process.gpu_uuid == gpu_uuid)
    return sum(process.memory_bytes for process in here if tree.holds(name, process.pid))


def _checked(library: SimulatedLibrary, target: Target) -> SimulatedCgroups:
    if library.state.branch < FIRST_DRIVER:
        raise Refused(Code.FUNCTION_NOT_FOUND)
    if target.mig_enabled:
        raise Refused(Code.NOT_SUPPORTED)
    return SimulatedCgroups(library.file)


@entry_point("nvmlDeviceSetMemoryLimits_v1", on=On.GPU)
def _set_limits(library: SimulatedLibrary, target: Target, argument: Any) -> None:
    tree, asked = _checked(library, target), target_of(argument)
    name, fault = tree.check(asked.nameSpace), library.state.memory_limits_fault
    with library.changed_gpu(target) as gpu:
        hard = asked.hardLimit
        if fault == "mib" and hard != NO_LIMIT:
            hard <<= _MIB
        if fault != "ignored":
            tree.keep_limit(name, gpu, asked.softLimit, hard)


@entry_point("nvmlDeviceGetMemoryLimits_v1", on=On.GPU)
def _limits(library: SimulatedLibrary, target: Target, argument: Any) -> None:
    tree, answer = _checked(library, target), target_of(argument)
    name, fault = tree.check(answer.nameSpace), library.state.memory_limits_fault
    limits = tree.limits(name).get(target.gpu.uuid)
    if limits is None:
        if not tree.has_controller():
            raise Refused(Code.NOT_SUPPORTED)
        limits = [0, NO_LIMIT]
    soft, hard = limits
    if fault is not None and hard != NO_LIMIT:
        hard >>= _MIB
    used = _used(tree, name, library.state, target.gpu.uuid)
    put_fields(answer, {"softLimit": soft, "hardLimit": hard, "currentUsed": used})
