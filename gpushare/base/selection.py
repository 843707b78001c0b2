"""Find the devices for ``-g``: index, range, UUID or its prefix, PCI bus id, MIG UUID, the name of an instance, a list, all. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from gpushare.base.errors import (
    BadUsage,
    GpuLost,
    GpushareError,
    NotFound,
    NotSupported,
    gpu_not_named_error,
    no_gpu_error,
)
from gpushare.base.model import Gpu, GpuProcess, MigInstance
from gpushare.base.units import first_few, quoted
from gpushare.base.values import dataclass

_PCI: Final = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?$", re.IGNORECASE | re.ASCII)
# "GPU-" and at least four digits of the UUID: shorter ones are typing errors more often than prefixes.
_UUID: Final = re.compile(r"^(gpu|mig)-[0-9a-f-]{4,}$", re.IGNORECASE | re.ASCII)
_RANGE: Final = re.compile(r"^(\d{1,4})-(\d{1,4})$", re.ASCII)


def titles(devices: Sequence[Device]) -> str:
    """Return devices for people: ``GPU 0``, ``GPUs 0, 1, 5``."""
    if len(devices) == 1 or any(device.mig is not None for device in devices):
        return ", ".join(device.title for device in devices)
    return "GPUs " + ", ".join(str(device.gpu.index) for device in devices)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that a command works on: a GPU, or one MIG instance of it."""

    gpu: Gpu
    mig: MigInstance | None = None

    @property
    def uuid(self) -> str:
        """Return the UUID that CUDA_VISIBLE_DEVICES takes for it."""
        return self.mig.uuid if self.mig is not None else (self.gpu.uuid or "")

    @property
    def title(self) -> str:
        if self.mig is None:
            return f"GPU {self.gpu.index}"
        return f"MIG {self.mig.profile or self.mig.uuid} of GPU {self.gpu.index}"

    @property
    def selector(self) -> str:
        """Return the ``-g`` value for exactly this device."""
        return self.mig.uuid if self.mig is not None else str(self.gpu.index)

    @property
    def memory_total_bytes(self) -> int | None:
        return self.mig.memory_total_bytes if self.mig is not None else self.gpu.memory_total_bytes

    @property
    def job_memory_bytes(self) -> int | None:
        """Return what jobs can have on it: not what the driver reserves; None: unknown."""
        if self.mig is not None or self.gpu.memory_total_bytes is None:
            return self.memory_total_bytes
        return self.gpu.memory_total_bytes - (self.gpu.memory_reserved_bytes or 0)

    def has(self, process: GpuProcess) -> bool:
        """Return whether a process of its GPU is on it."""
        return self.mig is None or self.mig.has(process)


def no_mig_error(
    gpus: Sequence[Gpu], hint: str = "see the ways of sharing that it has: gpushare compare"
) -> NotSupported:
    """Return the error that none of these GPUs has MIG, or that the driver does not report whether one has."""
    for gpu in gpus:
        if gpu.mig_capable is None:
            return NotSupported(
                f"GPU {gpu.index} ({gpu.name or 'unknown model'}): the driver does not report whether it has MIG",
                "see why: gpushare doctor",
                gpu=gpu.index,
            )
    if len(gpus) == 1:
        index = gpus[0].index
        name = gpus[0].name or "unknown model"
        return NotSupported(f"GPU {index} ({name}) has no MIG", hint, gpu=index, code="no_mig")
    names = ", ".join(sorted({gpu.name or "unknown model" for gpu in gpus})) or "no GPU"
    return NotSupported(f"none of these GPUs has MIG ({names})", hint, code="no_mig")


def select(text: str | None, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """Return the devices that a ``-g`` value names, in its order, each once. None and ``all`` are all GPUs.

    Raises:
        NotFound: no such device on this host.
        BadUsage: empty, or an ambiguous prefix.
    """
    if text is None or text.strip().lower() == "all":
        return tuple(Device(gpu=gpu) for gpu in gpus)
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise BadUsage(
            f"{quoted(text)} is not a list of GPUs", "give -g 0, -g 0,1, -g GPU-<uuid> or -g all", code="bad_gpu"
        )
    devices: dict[str, Device] = {}
    for word in [index for part in words for index in _indexes(part)]:
        device = _find_device(word, gpus)
        # A GPU may have no known UUID.
        devices.setdefault(device.uuid or f"#{device.gpu.index}", device)
    return tuple(devices.values())


def _indexes(word: str) -> list[str]:
    """Return the indexes of a range, ``0-3``; of any other word, the word."""
    match = _RANGE.match(word)
    if match is None:
        return [word]
    first = int(match[1])
    last = int(match[2])
    if first > last:
        raise BadUsage(f"{quoted(word)} is not a range of GPUs", "give the lower index first: -g 0-3", code="bad_gpu")
    return [str(index) for index in range(first, last + 1)]


def select_one(text: str | None, gpus: Sequence[Gpu]) -> Device:
    """Return the device that a change works on. ``-g`` may be absent only on a host with one GPU."""
    if text is None and len(gpus) > 1:
        raise gpu_not_named_error(len(gpus), "this command needs one")
    devices = select_for_change(text, gpus)
    if len(devices) > 1:
        raise BadUsage(
            f"{quoted(text or '')} names {len(devices)} GPUs; this command needs one",
            f"give one: -g {devices[0].selector}",
            code="one_gpu",
        )
    return devices[0]


def select_for_change(text: str | None, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """Return the devices that a change works on. On a host with several GPUs, ``-g`` is required."""
    if not gpus:
        raise no_gpu_error()
    if text is None and len(gpus) > 1:
        raise gpu_not_named_error(len(gpus), "say which to change", "name one: -g 0; or all: -g all")
    devices = select(text, gpus)
    refuse_silent_gpus(*(device.gpu for device in devices))
    return devices


def is_any(gpu: str | None) -> bool:
    return gpu is not None and gpu.strip().lower() == "any"


def candidates(
    gpu: str | None, gpus: Sequence[Gpu], visible: str | None, say: Callable[[str], None]
) -> tuple[Device, ...]:
    """Return the devices that a job may have.

    ``visible`` is CUDA_VISIBLE_DEVICES: if it is set, ``any`` takes one of those, and ``say`` is called with a note on it.

    Raises:
        BadUsage: none is named on a host with several GPUs (code ``gpu_not_named``).
        GpushareError: as `select_for_change`.
    """
    if gpu is None and len(gpus) > 1:
        hint = "name one: -g 0; or take the one where it harms least: -g any"
        raise gpu_not_named_error(len(gpus), "say on which to run", hint)
    if not is_any(gpu):
        return select_for_change(gpu, gpus)
    # Any GPU is one that answers. If none does, the error names one.
    answering = [each for each in gpus if each.error is None] or gpus
    return select_for_change("all", answering) if visible is None else _select_visible(visible, answering, say)


def _select_visible(text: str, gpus: Sequence[Gpu], say: Callable[[str], None]) -> tuple[Device, ...]:
    """Return the GPUs that a batch system, or the user, has left to this job: the others belong to other jobs."""
    # CUDA ignores all entries from the first one on that names no device: "0,-1,1" is GPU 0.
    words: list[str] = []
    for word in text.split(","):
        try:
            select(word, gpus)
        except GpushareError:
            break
        words.append(word)
    if not words:
        raise BadUsage(
            f"-g any takes one of the GPUs in CUDA_VISIBLE_DEVICES, and {quoted(text)} names none of this host",
            "name one: -g 0; or for any of the host: env -u CUDA_VISIBLE_DEVICES gpushare run --wait -g any -- CMD",
            code="bad_gpu",
        )
    visible = select(",".join(words), gpus)
    if len(visible) < len(gpus):
        say(f"-g any: of the GPUs in CUDA_VISIBLE_DEVICES: {', '.join(device.title for device in visible)}")
    return visible


def devices_for_any(devices: Sequence[Device], *, instances: bool) -> tuple[Device, ...]:
    """Return the devices that ``-g any`` chooses from: GPUs without MIG, and with ``instances`` those of the others.

    ``devices`` may have instances, too: those that a batch system has given to this job.
    """
    chosen: list[Device] = []
    for device in devices:
        if not device.gpu.mig_enabled or (instances and device.mig is not None):
            chosen.append(device)
        elif instances:
            chosen += [Device(gpu=device.gpu, mig=instance) for instance in device.gpu.mig_instances]
    if not chosen:
        raise NotSupported(
            "all GPUs are in MIG mode" + (" without an instance" if instances else ", where jobs cannot be swapped"),
            "see: gpushare mig status; to run in an instance: gpushare run --mig PROFILE -- CMD",
            code="mig_enabled",
        )
    return tuple(chosen)


def refuse_silent_gpus(*gpus: Gpu) -> None:
    """Raise GpuLost for the first GPU that does not answer."""
    for gpu in gpus:
        if gpu.error is not None:
            raise GpuLost(gpu.error, "see: gpushare status", gpu=gpu.index)


def _find_device(word: str, gpus: Sequence[Gpu]) -> Device:
    """Return the device that one word of ``-g`` names; raises as `select`."""
    if word.isascii() and word.isdigit():
        # Compared as text: int() refuses numbers of thousands of digits.
        matches = [Device(gpu=gpu) for gpu in gpus if str(gpu.index) == (word.lstrip("0") or "0")]
    elif _UUID.match(word):
        matches = _by_uuid(word.lower(), gpus)
    elif _PCI.match(word):
        matches = [Device(gpu=gpu) for gpu in gpus if gpu.pci_bus_id and _pci_key(gpu.pci_bus_id) == _pci_key(word)]
    else:
        matches = [Device(gpu=gpu, mig=mig) for gpu in gpus for mig in gpu.mig_instances if mig.name == word]
    if not matches:
        raise NotFound(
            f"there is no GPU {quoted(word)} on this host", _devices_hint(gpus), code="unknown_gpu", gpu=word[:60]
        )
    if len(matches) > 1:
        names = ", ".join(device.uuid for device in matches)
        raise BadUsage(
            f"{quoted(word)} fits {len(matches)} devices: {names}",
            "give more of the UUID",
            code="ambiguous_gpu",
            gpu=word[:60],
        )
    return matches[0]


def _by_uuid(prefix: str, gpus: Sequence[Gpu]) -> list[Device]:
    """Return the devices whose UUID begins so; a whole UUID names one, whatever others begin with it."""
    devices = [Device(gpu=gpu) for gpu in gpus]
    devices += [Device(gpu=gpu, mig=mig) for gpu in gpus for mig in gpu.mig_instances]
    exact = [device for device in devices if device.uuid.lower() == prefix]
    return exact or [device for device in devices if device.uuid.lower().startswith(prefix)]


def _pci_key(text: str) -> tuple[int, int, int, int] | None:
    """Return domain, bus, device and function as numbers: a PCI id can be written in several ways."""
    match = _PCI.match(text)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16), int(function or "0")


def _devices_hint(gpus: Sequence[Gpu]) -> str:
    """Return the hint of an error that names no device: which ones there are."""
    if not gpus:
        return "this host has no GPU; see: gpushare doctor"
    title = f"GPU{'s' if len(gpus) > 1 else ''} {first_few((gpu.index for gpu in gpus), 16)}"
    if any(gpu.mig_instances for gpu in gpus):
        return f"this host has {title}; an instance: -g NAME, or -g MIG-<uuid>; see: gpushare mig status -v"
    return f"this host has {title}; see: gpushare status"
