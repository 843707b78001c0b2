"""Cgroups (cgroup v2): one for each job whose device memory the driver limits. Only root makes them.

They are made at the top of the tree, next to ``system.slice`` and ``user.slice``. The driver can limit a cgroup only if it
has the controller ``dmem``, where the kernel has that (6.14; NVIDIA's MPS documentation 615, "Memory Partitioning"). A
cgroup has it if its parent enables it in ``cgroup.subtree_control``, and a parent with processes of its own may not do that
(Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint"). The cgroup of a session or a service, ours
among them, has processes; only the root of the tree is exempt. systemd wants the top of the tree for itself
(systemd.io/CGROUP_DELEGATION), but leaves a cgroup alone that it did not make, and so a controller that it does not know.

There a program is no longer in the cgroup of its session or service. So none is made where that one limits something, or
is a container, a job of Slurm, or a service, whose end must end all that it started.

``dmem`` is enabled where it is not, and stays so: that alone limits nothing, and others may use it by then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import GpushareError
from gpushare.base.values import dataclass
from gpushare.host.identity import Identity, identity_of
from gpushare.host.nvml import NO_LIMIT
from gpushare.host.process import container_of, read_proc

if TYPE_CHECKING:
    from gpushare.host.nvml import NvmlReader

# `records.sweep_cgroups` looks for it.
PREFIX: Final = "gpushare-job-"
# The PID of the gpushare that made it, and its start in clock ticks since boot; a number where it made several.
_NAME: Final = re.compile(rf"{PREFIX}(\d{{1,10}})-(\d{{1,20}})-(\d{{1,4}})", re.ASCII)
_CONTROLLERS: Final = "cgroup.controllers"
_ENABLED: Final = "cgroup.subtree_control"
_PROCESSES: Final = "cgroup.procs"
_DEVICE_MEMORY: Final = "dmem"
# What a program would escape. "max", or empty: no limit.
# Not pids.max, which systemd sets for every user.
_LIMITS: Final = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "cpuset.cpus", "cpuset.mems", "io.max")
# systemd's manager of a user: it has sessions and terminals below it, as a slice has. Other services delegate to jobs.
_MANAGER: Final = re.compile(r"user@\d+\.service", re.ASCII)
_MOST_BYTES: Final = 64 << 10
_MOST_NAMES: Final = 1000
_MOST_DEPTH: Final = 32
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FORBIDDEN: Final = stat.S_IWGRP | stat.S_IWOTH


class Cgroups:
    """The cgroups of this machine. ``root`` is where cgroup v2 is mounted, ``owner`` who owns it."""

    def __init__(self, root: str = "/sys/fs/cgroup", owner: int = 0) -> None:
        self.root, self._owner = root, owner

    def why_not(self) -> str | None:
        """Return why no cgroup can be made for a program of this process, in words; None: one can."""
        try:
            with self.opened() as root:
                if self.read(root, _CONTROLLERS) is None:
                    return f"there is no cgroup v2 at {self.root}"
        except OSError as error:
            return f"{self.root} cannot be used: {error.strerror or error}"
        text = self.own_text()
        match = re.search(r"^0::(/[^\n]*)$", text, re.MULTILINE)
        if match is None or ".." in match[1].split("/"):
            return "the cgroup of gpushare is unknown"
        container = container_of(text)
        if container is not None:
            return f"the program would leave the container or job {container}"
        names = [name for name in match[1].split("/") if name]
        service = next((name for name in names if name.endswith(".service") and not _MANAGER.fullmatch(name)), None)
        if service is not None:
            return f"the program would leave {service}"
        return self._limited(names[:_MOST_DEPTH])

    def _limited(self, names: list[str]) -> str | None:
        for depth in range(len(names), 0, -1):
            directory = "/".join([self.root, *names[:depth]])
            for name in _LIMITS:
                words = (read_proc(f"{directory}/{name}", _MOST_BYTES) or b"").split()
                if words and words[0] != b"max":
                    return f"the program would leave the cgroup /{'/'.join(names[:depth])}, whose {name} is set"
        return None

    def own_text(self) -> str:
        """Return the cgroups of this process, as ``/proc/self/cgroup`` has them."""
        return (read_proc("/proc/self/cgroup", _MOST_BYTES) or b"").decode(errors="replace")

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the root of the tree.

        Raises:
            OSError: it does not exist, or others than its owner may write it.
        """
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        try:
            stated = os.fstat(descriptor)
            if stated.st_uid != self._owner or stated.st_mode & _FORBIDDEN:
                raise PermissionError(errno.EPERM, "it is not root's alone", self.root)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[int]:
        """Yield a descriptor of one of our cgroups. Raises as `opened`."""
        with self.opened() as root:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=root)
            try:
                if os.fstat(descriptor).st_uid != self._owner:
                    raise PermissionError(errno.EPERM, "it is not root's", name)
                yield descriptor
            finally:
                os.close(descriptor)

    def read(self, directory: int, name: str) -> str | None:
        """Return the text of a file in an open directory; None: there is none."""
        try:
            descriptor = os.open(name, os.O_RDONLY | _SAFE, dir_fd=directory)
        except OSError:
            return None
        try:
            return os.read(descriptor, _MOST_BYTES).decode(errors="replace")
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def write(self, directory: int, name: str, text: str) -> None:
        """Write to a file in an open directory, in one call, as the kernel wants it.

        Raises:
            OSError: the kernel refuses.
        """
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | _SAFE, dir_fd=directory)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def create(self) -> JobCgroup:
        """Make an empty cgroup for a program of this process.

        Raises:
            OSError: it cannot be made.
        """
        me = identity_of(os.getpid())
        if me is None:
            raise ProcessLookupError(errno.ESRCH, "this process is not in /proc")
        with self.opened() as root:
            self._enable(root)
            for number in range(_MOST_NAMES):
                name = f"{PREFIX}{me.pid}-{me.started}-{number}"
                try:
                    # Others may look, as everywhere in this tree.
                    os.mkdir(name, 0o755, dir_fd=root)
                except FileExistsError:
                    # A process of an earlier try may still be in that one.
                    continue
                self.made(name)
                return JobCgroup(self, name)
        raise FileExistsError(errno.EEXIST, "too many cgroups of this process", self.root)

    def _enable(self, root: int) -> None:
        """Let the new cgroup have the controller of device memory, where the kernel has it."""
        there, enabled = (self.read(root, name) or "" for name in (_CONTROLLERS, _ENABLED))
        if _DEVICE_MEMORY in there.split() and _DEVICE_MEMORY not in enabled.split():
            # The driver may count by itself all the same; if not, it refuses the limit.
            with contextlib.suppress(OSError):
                self.write(root, _ENABLED, f"+{_DEVICE_MEMORY}")

    def made(self, name: str) -> None:
        """Do what the kernel does when a cgroup is made: nothing is left to do."""

    def emptied(self, name: str) -> None:
        """Do what the kernel does before a cgroup is removed: nothing is left to do."""

    def populated(self, name: str) -> bool | None:
        """Return whether a live process is in a cgroup, or in one below it (cgroup.events); None: unknown."""
        try:
            with self.inside(name) as directory:
                match = re.search(r"^populated ([01])$", self.read(directory, "cgroup.events") or "", re.MULTILINE)
        except OSError:
            return None
        return None if match is None else match[1] == "1"

    def holds(self, name: str, pid: int) -> bool:
        """Return whether a process is in a cgroup, or in one below it (``/proc/PID/cgroup``)."""
        text = (read_proc(f"/proc/{pid}/cgroup", _MOST_BYTES) or b"").decode(errors="replace")
        return re.search(rf"^0::/{re.escape(name)}(?:/|$)", text, re.MULTILINE) is not None

    def jobs(self) -> list[JobCgroup]:
        """Return all cgroups of jobs."""
        try:
            with self.opened() as root:
                names = os.listdir(root)
        except OSError:
            return []
        return [JobCgroup(self, name) for name in names if _NAME.fullmatch(name)]

    def left(self) -> list[JobCgroup]:
        """Return the cgroups of gpushares that are gone."""
        return [job for job in self.jobs() if identity_of(job.maker.pid) != job.maker]


@dataclass(frozen=True)
class JobCgroup:
    """A cgroup of ours."""

    tree: Cgroups
    name: str

    @property
    def path(self) -> str:
        return f"{self.tree.root}/{self.name}"

    @property
    def maker(self) -> Identity:
        """Return the gpushare that made it."""
        pid, started, _ = self.name.removeprefix(PREFIX).split("-")
        return Identity(int(pid), int(started))

    def enter(self, pid: int) -> None:
        """Move a process in.

        Raises:
            OSError: it is gone, or the kernel refuses.
        """
        with self.tree.inside(self.name) as directory:
            self.tree.write(directory, _PROCESSES, f"{pid}\n")

    def holds(self, pid: int) -> bool:
        return self.tree.holds(self.name, pid)

    def populated(self) -> bool | None:
        return self.tree.populated(self.name)

    def hard_limit(self, pci_bus_id: str) -> int | str | None:
        """Return what the kernel limits it to on a GPU (dmem.max), in bytes or as the kernel says it; None: nothing there.

        A second witness to the unit of NVML's numbers. Lines are ``nvidia/00000000:02:00.0/vidmem 8589934592``.
        """
        try:
            with self.tree.inside(self.name) as directory:
                text = self.tree.read(directory, f"{_DEVICE_MEMORY}.max") or ""
        except OSError:
            return None
        for line in text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.lower().startswith(f"nvidia/{pci_bus_id.lower()}/"):
                return int(value) if value.isdecimal() else value
        return None

    def remove(self) -> bool:
        """Remove it if no process is in it; return whether it is gone."""
        if self.populated():
            return False
        try:
            self.tree.emptied(self.name)
            with self.tree.opened() as root:
                os.rmdir(self.name, dir_fd=root)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def sweep(tree: Cgroups, nvml: NvmlReader) -> None:
    """Remove the cgroups of gpushares that are gone, where no process is in them any more."""
    for cgroup in tree.left():
        if not cgroup.populated():
            with contextlib.suppress(GpushareError):
                for index in range(nvml.count()):
                    release(nvml, index, cgroup)
            cgroup.remove()


def release(nvml: NvmlReader, index: int, cgroup: JobCgroup) -> None:
    """Take the driver's limit off a cgroup on a GPU; its removal does the same (nvml.h 615)."""
    with contextlib.suppress(GpushareError):
        nvml.set_memory_limit(index, cgroup.path, NO_LIMIT)
