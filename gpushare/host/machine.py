"""The machine around the GPUs: shared memory, load, limits, environments of processes, the kernel log.

The only importer of psutil, which takes too long to load for what every start reads of a process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from gpushare.base.errors import GpushareError
from gpushare.host.identity import every_pid
from gpushare.host.process import MOST_OF_ENVIRONMENT, entries_of, read_proc

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the kernel's, not a temporary file
# NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
XID: Final = re.compile(r"\bXid \((?:PCI:)?([0-9a-f:.]+)\):\s*(\d{1,4})\b", re.IGNORECASE | re.ASCII)
CGROUPS: Final = "/sys/fs/cgroup"
_PROGRAM_SECONDS: Final = 5.0
# Users may nest cgroups as deep as they like.
_MOST_DEPTH: Final = 32
# About the largest fs.nr_open; stands for unlimited.
_MOST_FILES: Final = 1 << 30


class Space(NamedTuple):
    """A file system: total and free bytes."""

    total: int
    free: int


def space_at(path: str) -> Space | None:
    """Return the file system of a path: what any user can get of it; None: unknown."""
    try:
        stated = os.statvfs(path)
    except OSError:
        return None
    return Space(stated.f_frsize * stated.f_blocks, stated.f_frsize * stated.f_bavail)


class Xid(NamedTuple):
    """A GPU error in the kernel log: its number, and the PCI address as the driver writes it."""

    number: int
    pci: str


class Load(NamedTuple):
    """What the whole machine has done: CPU seconds of all cores since boot, busy and in all; its memory in bytes."""

    busy_seconds: float
    all_seconds: float
    memory_total: int
    memory_free: int


class _MemoryFiles(NamedTuple):
    """Where a version of cgroups has its limits of memory: the kernel's documentation, cgroup-v2 and cgroup-v1/memory."""

    # The directories below `CGROUPS` in which the cgroups are.
    below: tuple[str, ...]
    # The files of the limits and of the bytes in use, and the line of memory.stat on cached files.
    limits: tuple[str, ...]
    used: str
    cached: bytes


# Above memory.high the kernel slows the processes down until they hardly run.
_CGROUP_2: Final = _MemoryFiles((), ("memory.max", "memory.high"), "memory.current", b"inactive_file")
_CGROUP_1: Final = _MemoryFiles(
    ("memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes", b"total_inactive_file"
)


def _bytes_left(files: _MemoryFiles, directory: str) -> Iterator[int]:
    """Yield how many bytes are left below each limit of a cgroup; what the kernel can drop does not count as used."""
    used = read_proc(f"{directory}/{files.used}", 64)
    if used is None or not used.strip().isdigit():
        return
    stat = read_proc(f"{directory}/memory.stat") or b""
    match = re.search(rb"^" + files.cached + rb" (\d+)$", stat, re.MULTILINE)
    cached = 0 if match is None else int(match[1])
    for limit in files.limits:
        allowed = read_proc(f"{directory}/{limit}", 64)
        # Without a limit it is "max".
        if allowed is not None and allowed.strip().isdigit():
            yield max(0, int(allowed) - int(used) + cached)


class Machine:
    """The machine of a host; unknown is None. ``proc`` replaces ``/proc`` where psutil does not read it; a simulated host overrides all."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc

    def shared_memory(self) -> Space | None:
        """Return the file system that MPS servers share with their clients (``/dev/shm``)."""
        return space_at(SHARED_MEMORY)

    def free_memory(self, pid: int) -> int | None:
        """Return how many bytes of host memory a process can still get: MemAvailable, or what its cgroups allow."""
        meminfo = read_proc(f"{self._proc}/meminfo") or b""
        match = re.search(rb"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
        if match is None:
            return None
        return min([int(match[1]) << 10, *self._left_by_cgroups(pid)])

    def resident_bytes(self, pid: int) -> int | None:
        """Return VmRSS and VmSwap of ``/proc/PID/status``."""
        text = read_proc(f"{self._proc}/{pid}/status") or b""
        sizes = re.findall(rb"^Vm(?:RSS|Swap):\s+(\d+) kB", text, re.MULTILINE)
        return sum(int(size) << 10 for size in sizes) if sizes else None

    def load(self) -> Load | None:
        """Return what the machine has done and has (psutil: ``/proc/stat``, ``/proc/meminfo``)."""
        import warnings

        import psutil

        try:
            with warnings.catch_warnings():
                # It warns of the figures that a container's own /proc lacks.
                warnings.simplefilter("ignore")
                times = psutil.cpu_times()
                memory = psutil.virtual_memory()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # Guests are counted within user and nice (proc_stat(5)).
        spent = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + times.iowait
        return Load(
            busy_seconds=spent - idle,
            all_seconds=spent,
            memory_total=memory.total,
            memory_free=memory.available,
        )

    def _left_by_cgroups(self, pid: int) -> Iterator[int]:
        """Yield how many bytes each limit of the cgroups that a process is in still leaves.

        The kernel drops cached files first (inactive_file of memory.stat): a job that reads much fills its cgroup with them.
        """
        text = (read_proc(f"{self._proc}/{pid}/cgroup") or b"").decode(errors="replace")
        # 0::/PATH in version 2, 4:memory:/PATH in version 1.
        for line in text.splitlines():
            fields = line.split(":", 2)
            if len(fields) < 3 or not fields[2].startswith("/"):
                continue
            _, controllers, path = fields
            if not controllers:
                files = _CGROUP_2
            elif "memory" in controllers.split(","):
                files = _CGROUP_1
            else:
                continue
            # Of a cgroup outside this namespace only the topmost is known.
            names = [] if ".." in path else path.strip("/").split("/")
            for depth in range(min(len(names), _MOST_DEPTH), -1, -1):
                yield from _bytes_left(files, "/".join([CGROUPS, *files.below, *names[:depth]]))

    def descriptor_limit(self, pid: int) -> int | None:
        """Return the soft limit of open files (``/proc/PID/limits``); if unlimited, a number that no process reaches."""
        text = read_proc(f"{self._proc}/{pid}/limits") or b""
        match = re.search(rb"^Max open files\s+(\d+|unlimited)", text, re.MULTILINE)
        if match is None:
            return None
        return _MOST_FILES if match[1] == b"unlimited" else int(match[1])

    def environments(self, names: Collection[str]) -> Mapping[int, Mapping[str, str]]:
        """Return these variables by PID (``/proc/PID/environ``): as they were when the program started."""
        environments: dict[int, dict[str, str]] = {}
        for pid in every_pid(self._proc):
            text = read_proc(f"{self._proc}/{pid}/environ", MOST_OF_ENVIRONMENT) or b""
            chosen = {name: value for name, value in entries_of(text) if name in names}
            if chosen:
                environments[pid] = chosen
        return environments

    def xids(self) -> tuple[Xid, ...] | None:
        """Return the Xids of this boot (``journalctl -k -b``, else ``dmesg``)."""
        from gpushare.host.program import Programs

        programs = Programs()
        for argv in (["journalctl", "-k", "-b", "-o", "cat", "--no-pager", "--quiet"], ["dmesg"]):
            try:
                done = programs.run(argv, timeout=_PROGRAM_SECONDS)
            except GpushareError:
                continue
            # Without permission journalctl prints nothing and exits 0.
            if done.exit_code == 0 and done.stdout.strip():
                return xids_in(done.stdout)
        return None


def xids_in(text: str) -> tuple[Xid, ...]:
    return tuple(Xid(int(number), pci) for pci, number in XID.findall(text))
