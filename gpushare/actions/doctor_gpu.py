"""The checks of `gpushare doctor` on the GPUs themselves: persistence, compute mode, errors in the kernel's log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpushare.actions.check import Check, Examination, Verdict
from gpushare.host.machine import Xid
from gpushare.layout.description import Sharing
from gpushare.model import ComputeMode, Gpu

# NVIDIA's Xid catalogue: after these a GPU is not right again before a reset (RESET_GPU, RESTART_BM), or an exchange.
BAD_XIDS: Final = frozenset({46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158})


def persistence(seen: Examination) -> Iterator[Check]:
    """Check that persistence mode is on."""
    modes = {gpu.index: seen.host.nvml.persistence(gpu.index) for gpu in seen.gpus if gpu.error is None}
    off = [index for index, on in modes.items() if on is False]
    for index in off:
        yield Check(
            id="gpu.persistence",
            verdict=Verdict.WARN,
            seen=f"persistence mode is off on GPU {index}",
            gpu=index,
            why="each first program on an idle GPU pays seconds, and nvidia-smi answers slowly",
            remedy="sudo systemctl enable --now nvidia-persistenced",
        )
    if any(on is None for on in modes.values()):
        yield Check(id="gpu.persistence", verdict=Verdict.SKIP, seen="the driver does not tell the persistence mode")
    elif modes and not off:
        yield Check(id="gpu.persistence", verdict=Verdict.PASS, seen="persistence mode is on")


def compute_mode(seen: Examination) -> Iterator[Check]:
    """Check that no compute mode was left over by an MPS daemon that is gone; one that was applied was not."""
    kept = {
        found.record.device_uuid for found in seen.daemons if found.record is not None and found.daemon.error is None
    }
    foreign = {index for found in seen.daemons if not found.daemon.ours for index in found.daemon.gpu_indexes}
    left = [
        gpu
        for gpu in seen.gpus
        if gpu.compute_mode not in {None, ComputeMode.DEFAULT}
        and gpu.uuid not in kept
        and gpu.index not in foreign
        and not _is_wanted(seen, gpu)
    ]
    for gpu in left:
        mode = gpu.compute_mode.title if gpu.compute_mode is not None else "unknown"
        yield Check(
            id="gpu.compute_mode",
            verdict=Verdict.WARN,
            gpu=gpu.index,
            seen=f"GPU {gpu.index} is in compute mode {mode} and no MPS daemon serves it",
            why="only one program (or none) can use it at a time; often left over from an MPS daemon",
            remedy=f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if seen.gpus and not left:
        yield Check(id="gpu.compute_mode", verdict=Verdict.PASS, seen="no compute mode is left over")


def _is_wanted(seen: Examination, gpu: Gpu) -> bool:
    entry = seen.wanted.get(gpu.index)
    asked = entry is not None and entry.sharing is Sharing.EXCLUSIVE
    return asked and gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS


def xids(seen: Examination) -> Iterator[Check]:
    """Check the kernel's log for errors after which a GPU needs a reset; those of programs are only counted."""
    found = seen.host.machine.xids()
    if found is None:
        yield Check(id="gpu.xid", verdict=Verdict.SKIP, seen="the kernel's log may not be read: look as root")
        return
    bad = sorted({(xid.number, xid.pci) for xid in found if xid.number in BAD_XIDS})
    for number, pci in bad:
        gpu = next((gpu for gpu in seen.gpus if _is_at(gpu, pci)), None)
        yield Check(
            id="gpu.xid",
            verdict=Verdict.WARN,
            gpu=None if gpu is None else gpu.index,
            seen=f"Xid {number} of the GPU at {pci} since the boot",
            why="until it is reset, programs on this GPU may fail, all that share it together",
            remedy=f"gpushare explain 'Xid {number}'",
        )
    if not bad:
        yield Check(id="gpu.xid", verdict=Verdict.PASS, seen=_of_programs(found))


def _of_programs(found: tuple[Xid, ...]) -> str:
    numbers = ", ".join(str(number) for number in sorted({xid.number for xid in found}))
    return f"Xids of programs since the boot: {numbers}" if found else "no Xid since the boot"


def _is_at(gpu: Gpu, pci: str) -> bool:
    """Return whether a GPU has this PCI address; NVML writes 00000000:01:00.0 where the kernel has 0000:01:00."""
    return gpu.pci_bus_id is not None and pci.lower().rpartition(".")[0 if "." in pci else 2] in gpu.pci_bus_id.lower()
