"""Limits of MPS clients: the values, and how options and environment variables give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpushare.base.errors import BadUsage, NotFound
from gpushare.base.model import MpsDaemon, Priority
from gpushare.base.selection import Device, select
from gpushare.base.units import (
    MIB,
    format_bytes,
    format_percent,
    mps_memory,
    mps_percentage,
    parse_memory_limit,
    parse_pinned_limits,
    parse_thread_percentage,
    quoted,
    size_option,
)
from gpushare.base.values import dataclass

# The environment variables of a client, or of a daemon for its clients (NVIDIA's MPS guide).
THREADS_VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_VARIABLE: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PRIORITY_VARIABLE: Final = "CUDA_MPS_CLIENT_PRIORITY"
VARIABLES: Final = (THREADS_VARIABLE, MEMORY_VARIABLE, PRIORITY_VARIABLE)

# What a CUDA context takes in addition to a program's allocations; the pinned memory limit does not count it.
CONTEXT_BYTES: Final = 512 * MIB


def client_memory(job_bytes: int) -> int:
    """Return what each client of MPS may allocate of the memory of its job: all but one context; of a small job, half."""
    return max(job_bytes - CONTEXT_BYTES, job_bytes // 2) // MIB * MIB


# From this compute capability on, MPS has limits and takes more clients.
VOLTA: Final = (7, 0)
# CUDA 13.1.
_VERSION_WITH_60_CLIENTS: Final = 13010


def max_clients(version: int | None, compute_capability: tuple[int, int] | None, fraction: float = 1.0) -> int | None:
    """Return how many client contexts one server accepts on a device (NVIDIA's MPS guide), or None when unknown.

    ``version`` is the program's binary version (`probe_version`). A MIG instance accepts its ``fraction`` of the number.
    """
    if compute_capability is None:
        return None
    if compute_capability < VOLTA:
        of_whole_gpu = 16
    elif version is not None and version >= _VERSION_WITH_60_CLIENTS:
        of_whole_gpu = 60
    else:
        of_whole_gpu = 48
    return max(1, int(of_whole_gpu * fraction))


def share_of_slices(profile: str | None, slices: int | None) -> float | None:
    """Return the share of a GPU's compute slices that an instance of ``3g.71gb`` (or ``1c.3g.71gb``) has; None: unknown."""
    match = re.match(r"(?:(\d)c\.)?(\d)g\.", profile or "")
    if match is None or not slices:
        return None
    return int(match.group(1) or match.group(2)) / slices


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the clients of an MPS daemon, or of one client; None leaves the default.

    ``threads_percent`` is the active thread percentage, from 0.1 to 100 (the default).
    ``memory_limit_bytes`` is the pinned device memory of each client process; by default there is no limit.
    ``priority`` is normal by default. ``no_memory_limit`` removes the memory limit of a running daemon.
    """

    threads_percent: float | None = None
    memory_limit_bytes: int | None = None
    priority: Priority | None = None
    no_memory_limit: bool = False

    @classmethod
    def of(cls, daemon: MpsDaemon | Limits) -> Limits:
        """Return the limits that a running daemon reports, with its defaults (100 %, normal priority) as None."""
        return cls(
            threads_percent=None if daemon.threads_percent == 100.0 else daemon.threads_percent,
            memory_limit_bytes=daemon.memory_limit_bytes,
            priority=daemon.priority or None,
        )

    @classmethod
    def parse(cls, threads: str | None, memory: str | None, priority: str | None) -> Limits:
        """Return the limits of one client as typed. Raises BadUsage: one of them is not a percentage, size or priority."""
        return cls(
            threads_percent=None if threads is None else parse_thread_percentage(threads),
            memory_limit_bytes=None if memory is None else parse_memory_limit(memory),
            priority=_parse_priority(priority),
        )

    @classmethod
    def in_environment(cls, environment: Mapping[str, str], uuid: str) -> Limits:
        """Return the limits in the environment of a process that sees one device, without values that CUDA ignores."""
        try:
            threads = float(environment.get(THREADS_VARIABLE, ""))
        except ValueError:
            threads = 0.0
        priority = environment.get(PRIORITY_VARIABLE)
        return cls(
            threads_percent=threads if 0.0 < threads <= 100.0 else None,
            memory_limit_bytes=parse_pinned_limits(environment.get(MEMORY_VARIABLE, ""), uuid),
            priority=Priority(int(priority)) if priority in {"0", "1"} else None,
        )

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give these limits to a client of one device.

        The memory limit names device 0: an entry for a device that the client does not see makes CUDA drop all limits,
        including the server's.
        """
        variables = {}
        if self.threads_percent is not None:
            variables[THREADS_VARIABLE] = mps_percentage(self.threads_percent)
        if self.memory_limit_bytes is not None:
            variables[MEMORY_VARIABLE] = f"0={mps_memory(self.memory_limit_bytes)}"
        if self.priority is not None:
            variables[PRIORITY_VARIABLE] = str(int(self.priority))
        return variables

    @property
    def explicit(self) -> Limits:
        """Return the same limits with every default spelled out, for a daemon that must hold exactly these."""
        return Limits(
            threads_percent=self.threads_percent or 100.0,
            memory_limit_bytes=self.memory_limit_bytes,
            priority=self.priority or Priority.NORMAL,
            no_memory_limit=self.memory_limit_bytes is None,
        )

    def changed_by(self, change: Limits) -> Limits:
        """Return these limits after ``mps set`` with others."""
        memory = change.memory_limit_bytes or self.memory_limit_bytes
        return Limits(
            threads_percent=self.threads_percent if change.threads_percent is None else change.threads_percent,
            memory_limit_bytes=None if change.no_memory_limit else memory,
            priority=self.priority if change.priority is None else change.priority,
        )

    def undo_of(self, change: Limits) -> Limits:
        """Return the change that undoes ``change`` of these limits: it sets those that ``change`` sets, to what they are here."""
        before = self.explicit
        changes_memory = change.memory_limit_bytes is not None or change.no_memory_limit
        return Limits(
            threads_percent=None if change.threads_percent is None else before.threads_percent,
            memory_limit_bytes=before.memory_limit_bytes if changes_memory else None,
            priority=None if change.priority is None else before.priority,
            no_memory_limit=changes_memory and before.no_memory_limit,
        )

    @property
    def words(self) -> list[str]:
        """Return the limits that are set, for people: ``threads 30 %``, ``memory 8.0 GiB``, ``priority low``."""
        words = []
        if self.threads_percent is not None:
            words.append(f"threads {format_percent(self.threads_percent)}")
        if self.memory_limit_bytes is not None:
            words.append(f"memory {format_bytes(self.memory_limit_bytes)}")
        if self.priority is not None:
            words.append(f"priority {self.priority.title}")
        return words

    def options(self) -> list[str]:
        """Return the options of ``mps start``, ``mps set`` and ``run`` that give these limits."""
        words = []
        if self.threads_percent is not None:
            words += ["--threads", f"{self.threads_percent:g}"]
        if self.no_memory_limit:
            words += ["--memory", "none"]
        elif self.memory_limit_bytes is not None:
            words += ["--memory", size_option(self.memory_limit_bytes)]
        if self.priority is not None:
            words += ["--priority", self.priority.title]
        return words


def in_force_title(device: Device, limits: Limits) -> str:
    """Return what a daemon with these limits puts in force: ``MPS on GPU 0: threads 30 % per client``."""
    words = f"{', '.join(limits.words)} per client" if limits.words else "no limits"
    return f"MPS on {device.title}: {words}"


def check_memory(device: Device, limit: int | None, *, job: bool = False, key: str = "--memory") -> None:
    """Raise unless a memory limit of a client, or of a whole job, fits the device; MPS itself takes any number.

    ``key`` is the option, or the key of a file, that gives the limit. Raises BadUsage: the limit is above the device's
    memory.
    """
    total = device.job_memory_bytes if job else device.memory_total_bytes
    if limit is not None and total is not None and limit > total:
        # Of the memory that `status` shows, the driver keeps a part.
        empty = " even when it is empty" if job else ""
        raise BadUsage(
            f"the memory limit {format_bytes(limit)} is too large: {device.title} has {format_bytes(total)}{empty}",
            f"give at most {key} {size_option(total)}",
            gpu=device.gpu.index,
            code="limit_above_gpu",
        )


class LimitOptions:
    """``--threads``, ``--memory`` and ``--priority`` as typed: one value for all devices, or one per GPU (``0=4G,1=8G``).

    With ``removable``, ``--memory none`` removes the memory limit. Parsed before the host is asked.
    """

    def __init__(
        self, threads: str | None, memory: str | None, priority: str | None, *, removable: bool = False
    ) -> None:
        self._threads = _parse_by_gpu("--threads", threads, parse_thread_percentage)
        self._memory = _parse_by_gpu("--memory", memory, _parse_memory_or_none if removable else parse_memory_limit)
        self._priority = _parse_priority(priority)

    def for_devices(self, devices: Sequence[Device]) -> dict[str, Limits]:
        """Return the limits by device UUID. Raises BadUsage: a limit names a GPU that is not among them."""
        threads = _values_by_uuid(self._threads, devices)
        memory = _values_by_uuid(self._memory, devices)
        return {
            device.uuid: Limits(
                threads_percent=threads.get(device.uuid),
                memory_limit_bytes=memory.get(device.uuid) or None,
                no_memory_limit=memory.get(device.uuid) == 0,
                priority=self._priority,
            )
            for device in devices
        }


def _parse_memory_or_none(text: str) -> int:
    """Return a typed limit in bytes; 0 for ``none``, which removes the limit."""
    return 0 if text.strip().lower() == "none" else parse_memory_limit(text)


def _parse_priority(text: str | None) -> Priority | None:
    if text is None:
        return None
    names = {level.title: level for level in Priority} | {str(int(level)): level for level in Priority}
    if text.lower() not in names:
        raise BadUsage(
            f"{quoted(text)} is not a priority", "give --priority normal or --priority low", code="bad_priority"
        )
    return names[text.lower()]


def _parse_by_gpu(option: str, text: str | None, parse: Callable[[str], object]) -> dict[str | None, Any]:
    """Return the values by GPU as typed; the key None is for all devices."""
    if text is None:
        return {}
    if "=" not in text:
        return {None: parse(text)}
    values: dict[str | None, Any] = {}
    for entry in text.split(","):
        gpu, equals, value = entry.partition("=")
        problem = f"{option} names GPU {gpu.strip()} twice" if gpu.strip() in values else None
        if not equals or not gpu.strip():
            problem = f"{quoted(entry)} in {option} names no GPU"
        if problem is not None:
            raise BadUsage(problem, f"give one for all, or {option} 0=...,1=...", code="bad_limit")
        values[gpu.strip()] = parse(value)
    return values


def _values_by_uuid(values: Mapping[str | None, Any], devices: Sequence[Device]) -> dict[str, Any]:
    """Return typed values by device UUID. Raises BadUsage if one is for a device that is not chosen."""
    if None in values:
        return {device.uuid: values[None] for device in devices}
    uuids = {device.uuid for device in devices}
    # Two MIG instances have one GPU.
    gpus = list({device.gpu.index: device.gpu for device in devices}.values())
    resolved: dict[str, Any] = {}
    for name, value in values.items():
        try:
            named = select(name, gpus)
        except NotFound:
            named = ()
        if not named or any(device.uuid not in uuids for device in named):
            raise BadUsage(
                f"a limit names GPU {quoted(name or '')}, which is not among the chosen: {', '.join(d.title for d in devices)}",
                f"choose it too: -g {','.join([*(d.selector for d in devices), str(name)])}",
                code="bad_limit",
            )
        for device in named:
            resolved[device.uuid] = value
    return resolved
