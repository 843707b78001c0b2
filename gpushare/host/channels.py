"""Time-slices and pauses of other processes: the resource manager's calls on their channel groups.

This is the only file that knows these calls. CUDA allocates channel groups (TSGs) under a client of NVIDIA's resource
manager (RM). RM accepts calls on a client only from the open file that created it. A process that may ptrace another (root,
or the same user) can duplicate that file with ``pidfd_getfd`` (Linux 5.6) and make the calls. The target is not stopped.

The numbers come from NVIDIA/open-gpu-kernel-modules and are the same from 515.43 to 595.45: ``ctrl/ctrla06c.h`` (groups),
``ctrl/ctrl0000/ctrl0000client.h`` (handles), ``ctrl/ctrl2080/ctrl2080fifo.h`` and ``ctrl2080gpu.h`` (GPU), ``nvos.h``.
NVIDIA does not document them for users, so a scan that a change follows ends with a probe: it reads each slice, writes another
one, reads it back, and restores the first. They were first measured on an H200 and an H100 with driver 580.159.04 (2026-11-22).

What a caller must know:

- An open duplicate keeps the memory of an ended process on the GPU. Each request duplicates, checks, calls, and closes.
- A slice lasts until its process ends. Channels that are off **stay off** until they are enabled, even if gpushare dies:
  a caller that disables channels needs a guard. A paused process ends on SIGKILL; a SIGTERM handler that waits for the
  GPU does not finish before the channels are on again.
- Under MPS all clients share the server's group: the slice of a client has no effect, and disabling the channels of one
  client stops all of them. `Channels.under_mps` tells; the caller refuses. The slice of the server's own group counts for
  all its clients together.
- The calls run in a child process, which is killed when it hangs (a hostile file system, a driver that does not answer).
- That child is not an ancestor of the target. With Yama's ptrace_scope 1, a program started by a plain user must allow
  gpushare with ``PR_SET_PTRACER``, which includes gpushare's children; otherwise root is needed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from gpushare.base import errors
from gpushare.base.errors import GpushareError, OperationFailed, TimedOut
from gpushare.base.package import package_rows
from gpushare.base.typed import Count, Pid, Shown, parse_typed
from gpushare.base.units import format_slice
from gpushare.base.values import dataclass
from gpushare.host.identity import HOST_PID_SPACE, Identity, identity_of, parent_of, pid_space, real_uid
from gpushare.host.process import read_text

if TYPE_CHECKING:
    import socket

CONTROL_NODE: Final = "/dev/nvidiactl"
# Major and minor number of it (Documentation/admin-guide/devices.txt).
CONTROL_DEVICE: Final = (195, 255)

# _IOWR('F', NV_ESC_RM_CONTROL or NV_ESC_RM_ALLOC, 32 bytes): NVOS54_PARAMETERS, NVOS21_PARAMETERS.
RM_CONTROL: Final = 0xC020462A
RM_ALLOC: Final = 0xC020462B
# hClient, hObject, cmd, flags, params, paramsSize, status; and hRoot, hObjectParent, hObjectNew, hClass, ...
ARGUMENT: Final = struct.Struct("<IIIIQII")
_POINTER_AT: Final = 16
_STATUS_AT: Final = 28
_POINTER: Final = struct.Struct("<Q").pack_into
_HANDLES: Final = struct.Struct("<II").pack_into
_STATUS: Final = struct.Struct("<I").pack_into
_NUMBER: Final = struct.Struct("<I").unpack_from
# No status of RM: it stays where an ioctl writes none.
_NO_STATUS: Final = 0xFFFFFFFF

# RS_CLIENT_HANDLE_BASE and _MAX: handles are given out one after the other, and start again after a million.
CLIENT_BASE: Final = 0xC1D00000
CLIENT_COUNT: Final = 0x100000
# Where libcuda's own handles begin (seen); the handle of the device tells where they do in others.
OBJECT_BASE: Final = 0x5C000000
_BASE_BITS: Final = 0xFFF00000

HANDLE_INFO: Final = 0xD02
PARENT, CLASS = 1, 2
CHILD_HANDLE: Final = 0xD05
SET_TIMESLICE: Final = 0xA06C0103
GET_TIMESLICE: Final = 0xA06C0104
DISABLE_CHANNELS: Final = 0x2080110B
GPU_GET_PIDS: Final = 0x2080018D
GPU_GET_GID_INFO: Final = 0x2080014A

CLASS_ROOT_CLIENT: Final = 0x41
CLASS_DEVICE: Final = 0x80
CLASS_SUBDEVICE: Final = 0x2080
CLASS_MPS: Final = 0x900E
CLASS_GROUP: Final = 0xA06C
# Of each generation another high byte: GPFIFO channels, and what is made on them.
_CHANNEL, _COMPUTE = 0x6F, 0xC0
# What CHILD_HANDLE calls a Device (its NVOC class id).
INTERNAL_DEVICE: Final = 0xE0AC20

# struct NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS, ..._GET_CHILD_HANDLE_PARAMS, NVA06C_CTRL_TIMESLICE_PARAMS.
INFO: Final = struct.Struct("<IIQ")
_INFO: Final = INFO.pack_into
CHILD: Final = struct.Struct("<III")
SLICE: Final = struct.Struct("<Q")
# NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS: bDisable, numChannels, bOnlyDisableScheduling, bRewindGpPut, event; then the lists.
DISABLE: Final = struct.Struct("<B3xIBB6xQ64I64I")
CHANNELS_PER_CALL: Final = 64
# NV2080_CTRL_GPU_GET_PIDS_PARAMS (kind of id, 0 for a class; id; number of PIDs; PIDs) and ..._GET_GID_INFO_PARAMS.
_MOST_PIDS: Final = 950
PIDS: Final = struct.Struct(f"<III{_MOST_PIDS}I")
GID: Final = struct.Struct("<III256s")
# More than NV0000_ALLOC_PARAMETERS, of which RM takes the first field: the new handle.
_MOST_OF_ALLOCATION: Final = 256

# Status of a call (nvstatuscodes.h).
OK: Final = 0x00
GPU_IS_LOST: Final = 0x0F
INSUFFICIENT_PERMISSIONS: Final = 0x1B
INVALID_CLIENT: Final = 0x23
INVALID_COMMAND: Final = 0x24
NOT_SUPPORTED: Final = 0x56
OBJECT_NOT_FOUND: Final = 0x57
# The code of the refusal for a status; 0x31 is INVALID_OBJECT, 0x33 INVALID_OBJECT_HANDLE.
_REFUSALS: Final[Mapping[int, str]] = {
    GPU_IS_LOST: "lost",
    **dict.fromkeys((INVALID_CLIENT, 0x31, 0x33, OBJECT_NOT_FOUND), "stale"),
    **dict.fromkeys((INSUFFICIENT_PERMISSIONS, INVALID_COMMAND, NOT_SUPPORTED), "refuses"),
}

_SYS_PIDFD_GETFD: Final = 438
_SYS_KCMP: Final[Mapping[str, int]] = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE: Final = 0

_MOST_DESCRIPTORS: Final = 16 << 10
_MOST_FILES: Final = 64
_MOST_ANCESTORS: Final = 32
_MOST_CHANNELS: Final = 4096
# Handles are looked at in blocks. libcuda gives them out from 1 on (seen: up to 0x174), so a first block without objects
# ends the search, and later on a gap of two blocks.
_BLOCK: Final = 0x400
_MOST_EMPTY: Final = 2
_MOST_BLOCKS: Final = 256
# How many further clients are tried after a compute group was found: a process may have several.
_WINDOW: Final = 0x400
SCAN_SECONDS: Final = 4.0
FIND_SECONDS: Final = 10.0
CALL_SECONDS: Final = 5.0
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Group:
    """A compute channel group of a process: a CUDA context has one. Its copy groups are left alone.

    ``descriptor`` is the process's own number of its control file. ``client``, ``handle``, ``subdevice`` and ``channels``
    are RM handles, ``classes`` the classes of the objects on its channels. ``slice_us`` is the time-slice at the scan, in
    microseconds (None: not readable). ``gpu`` is the UUID of the GPU.
    """

    descriptor: Count
    client: Count
    handle: Count
    subdevice: Count
    gpu: Shown | None
    classes: tuple[Count, ...]
    channels: tuple[Count, ...]
    slice_us: Count | None
    under_mps: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Return what names it among the groups of its process."""
        return self.client, self.handle


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The compute channel groups of a process, as a scan found them. Later calls need nothing else; no descriptor stays open.

    ``started`` is its start time in clock ticks since boot, which tells it from a later process with the same PID.
    """

    pid: Pid
    started: Count
    groups: tuple[Group, ...]

    @property
    def under_mps(self) -> bool:
        """Return whether the process is a client of MPS. The server itself is not."""
        return any(group.under_mps for group in self.groups)


# -- in the child process ----------------------------------------------------------------------------------------------


class Refused(Exception):
    """The reason why a request has no answer: a key of ``data/channel-refusals.yaml``, with details. Sent from the child to gpushare."""

    def __init__(self, code: str, text: str = "", status: int | None = None) -> None:
        super().__init__(code, text)
        self.code, self.text, self.status = code, text, status


class KernelFiles:
    """The control files of processes, and ioctls on them: of this machine here; a simulated host's overrides every method.

    ``node`` and ``device`` are replaced in tests.
    """

    def __init__(self, node: str = CONTROL_NODE, device: tuple[int, int] = CONTROL_DEVICE) -> None:
        import ctypes
        import fcntl

        self._node, self._device = node, device
        # Kept: a scan makes ten thousand calls.
        self._ioctl = fcntl.ioctl
        self._address = ctypes.addressof
        self._byte = ctypes.c_char.from_buffer

    def check(self) -> None:
        """Raise Refused if this kernel or a sandbox lets nobody duplicate a descriptor of another process.

        Tried on this process itself: that is allowed wherever the system call is.
        """
        if _in_wsl() and not os.path.exists(self._node):
            raise Refused("wsl")
        refused = _refusal_on_self()
        if refused is not None:
            raise refused
        scope = _yama_scope()
        # 3: nobody may, not even root (`forbidding_yama_scope`).
        if scope == "3":
            raise Refused("ptrace_scope", scope)

    @contextlib.contextmanager
    def process(self, pid: int, started: int | None) -> Iterator[KernelProcess]:
        """Open a process with a pidfd, which is closed at the end.

        Raises Refused when it has ended, or its PID belongs to another process now.
        """
        pidfd = _pidfd(pid)
        try:
            identity = identity_of(pid)
            # The start time was read while the pidfd was open and its process alive: both are the same process.
            if identity is None or started not in {None, identity.started} or _has_ended(pidfd):
                raise Refused("gone")
            yield KernelProcess(identity, pidfd, self._node, self._device)
        finally:
            os.close(pidfd)

    def open_control_node(self) -> int | None:
        """Open the control node for gpushare itself; None if that is not allowed."""
        try:
            file = os.open(CONTROL_NODE, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if not _is_device(file, CONTROL_DEVICE):
            os.close(file)
            return None
        return file

    def ioctl(self, file: int, request: int, argument: bytearray, parameters: bytearray) -> None:
        """Make one ioctl, which writes its results to both buffers. Every call to the driver goes through here."""
        self.prepared_ioctl(file, request, argument, parameters)()

    def prepared_ioctl(
        self, file: int, request: int, argument: bytearray, parameters: bytearray
    ) -> Callable[[], object]:
        """Return an ioctl that can be made again and again with these buffers."""
        _POINTER(argument, _POINTER_AT, self._address(self._byte(parameters)))
        return functools.partial(self._ioctl, file, request, argument)

    def close(self, file: int) -> None:
        os.close(file)

    def sees_host_pids(self) -> bool:
        """Return whether this PID namespace is the host's. Up to driver 535 RM names PIDs of the host only."""
        return pid_space() == HOST_PID_SPACE


class KernelProcess:
    """A process held by a pidfd."""

    def __init__(self, identity: Identity, pidfd: int, node: str, device: tuple[int, int]) -> None:
        self.identity = identity
        self._pidfd, self._node, self._device = pidfd, node, device

    def control_descriptors(self) -> list[int]:
        """Return the descriptors whose path is the control node. Their device is not checked yet. Raises Refused."""
        try:
            numbers = _control_descriptors(self.identity.pid, self._node)
        except PermissionError:
            raise _refusal_by_kernel(self.identity.pid) from None
        except OSError:
            raise Refused("gone") from None
        if not numbers and _in_wsl():
            raise Refused("wsl")
        return numbers

    def is_inherited(self, number: int) -> bool:
        """Return whether an ancestor has the same file open, and so created its clients. False if unknown."""
        kcmp = _SYS_KCMP.get(os.uname().machine)
        if kcmp is None:
            return False
        ancestor = self.identity.pid
        for _ in range(_MOST_ANCESTORS):
            ancestor = parent_of(ancestor) or 0
            if ancestor <= 1:
                break
            with contextlib.suppress(OSError):
                for other in _control_descriptors(ancestor, self._node):
                    order, _ = _syscall(kcmp, self.identity.pid, ancestor, _KCMP_FILE, number, other)
                    # 0: the same open file. Without a right to both, -1.
                    if order == 0:
                        return True
        return False

    def duplicate(self, number: int) -> int:
        """Return our duplicate of a descriptor, checked to be the control device. Raises Refused."""
        file, error = _syscall(_SYS_PIDFD_GETFD, self._pidfd, number, 0)
        if file < 0:
            if error == errno.ENOSYS:
                raise Refused("gvisor" if _in_gvisor() else "no_pidfd_getfd")
            if error == errno.EPERM:
                raise _refusal_by_kernel(self.identity.pid)
            raise Refused("gone" if error == errno.ESRCH else "stale", os.strerror(error))
        try:
            genuine = _is_device(file, self._device)
        except OSError:
            genuine = False
        if not genuine:
            # Users can mount anything at that path: no ioctl on any other device.
            os.close(file)
            raise Refused("forged", str(number))
        return file


def _is_device(file: int, device: tuple[int, int]) -> bool:
    """Return whether an open file is a character device with these numbers."""
    stated = os.fstat(file)
    return stat.S_ISCHR(stated.st_mode) and (os.major(stated.st_rdev), os.minor(stated.st_rdev)) == device


def _control_descriptors(pid: int, node: str) -> list[int]:
    """Return the numbers of a process's descriptors whose path is ``node`` in the mount namespace of that process."""
    numbers: list[int] = []
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, _MOST_DESCRIPTORS):
            if len(numbers) >= _MOST_FILES:
                break
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(entry.path) == node:
                    numbers.append(int(entry.name))
    return sorted(numbers)


def _has_ended(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended (poll(2): readable)."""
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _syscall(number: int, *arguments: int) -> tuple[int, int]:
    """Make a system call; return its result and errno."""
    import ctypes

    result = ctypes.CDLL(None, use_errno=True).syscall(number, *(ctypes.c_long(argument) for argument in arguments))
    return int(result), ctypes.get_errno()


def _pidfd(pid: int) -> int:
    """Return a pidfd of a process. Raises Refused: it has ended, or the kernel does not allow it."""
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        raise Refused("gone") from None
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise Refused("gvisor" if _in_gvisor() else "no_pidfd_getfd") from None
        # EINVAL, ENOENT: the number is a thread's. EPERM: a sandbox.
        raise Refused("seccomp" if error.errno == errno.EPERM else "gone") from None


def _refusal_on_self() -> Refused | None:
    """Return why pidfd_getfd does not even work on this process; None: it does."""
    pidfd = _pidfd(os.getpid())
    try:
        # Duplicated is the pidfd itself: a descriptor that is surely open.
        file, error = _syscall(_SYS_PIDFD_GETFD, pidfd, pidfd, 0)
    finally:
        os.close(pidfd)
    if file >= 0:
        os.close(file)
        return None
    if error == errno.ENOSYS:
        return Refused("gvisor" if _in_gvisor() else "no_pidfd_getfd")
    return Refused("seccomp")


def _refusal_by_kernel(pid: int) -> Refused:
    """Return the reason for EPERM from pidfd_getfd."""
    refused = _refusal_on_self()
    if refused is not None:
        return refused
    uid = real_uid(pid)
    if uid is not None and os.geteuid() not in {0, uid}:
        return Refused("other_user")
    scope = _yama_scope()
    return Refused("ptrace_scope", scope) if scope in {"1", "2", "3"} else Refused("no_ptrace")


def _yama_scope() -> str:
    """Return Yama's ptrace_scope as text; empty: there is no Yama."""
    return read_text("/proc/sys/kernel/yama/ptrace_scope").strip()


def forbidding_yama_scope() -> str | None:
    """Return Yama's ptrace_scope if it forbids this user access to processes that gpushare has not started; else None."""
    scope = _yama_scope()
    # 1: only ancestors have access; 2: only root; 3: nobody.
    forbids = scope == "3" or (scope in {"1", "2"} and os.geteuid() != 0)
    return scope if forbids else None


def _in_wsl() -> bool:
    """Return whether this is Windows' Linux kernel."""
    return "microsoft" in read_text("/proc/sys/kernel/osrelease").lower()


def _in_gvisor() -> bool:
    """Return whether this is gVisor, which has no pidfd_getfd."""
    # What its /proc/version always says.
    return (
        re.match(r"Linux version 4\.4\.0 .*(gVisor|Jan 10 15:06:54 PST 2016)", read_text("/proc/version")) is not None
    )


class _File:
    """A duplicate of a process's control file, and RM's calls on it."""

    def __init__(self, files: KernelFiles, file: int) -> None:
        self._files, self._file = files, file
        # For `class_or_parent`, which a scan calls ten thousand times: only handles, index and status are written for each call.
        self._argument = bytearray(ARGUMENT.pack(0, 0, HANDLE_INFO, 0, 0, INFO.size, _NO_STATUS))
        self._info = bytearray(INFO.size)
        self._ask_info = files.prepared_ioctl(file, RM_CONTROL, self._argument, self._info)

    def control(self, client: int, handle: int, command: int, parameters: bytearray) -> int:
        """Make one call and return its status; ``parameters`` takes what it answers."""
        argument = bytearray(ARGUMENT.pack(client, handle, command, 0, 0, len(parameters), _NO_STATUS))
        self._ioctl(RM_CONTROL, argument, parameters)
        return int.from_bytes(argument[_STATUS_AT:], "little")

    def demand(self, name: str, client: int, handle: int, command: int, parameters: bytearray) -> None:
        """Make one call, called ``name`` in messages. Raises Refused unless its status is OK."""
        status = self.control(client, handle, command, parameters)
        if status != OK:
            raise _status_refusal(name, status)

    def class_or_parent(self, client: int, handle: int, index: int = CLASS) -> tuple[int, int]:
        """Return the status, and a handle's class or, with ``index`` PARENT, its parent. RM takes no GPU lock for this call."""
        argument, parameters = self._argument, self._info
        _HANDLES(argument, 0, client, client)
        _STATUS(argument, _STATUS_AT, _NO_STATUS)
        _INFO(parameters, 0, handle, index, 0)
        try:
            self._ask_info()
        except OSError as error:
            raise _ioctl_refusal(error) from None
        # The result is a union of a 32-bit handle and 64 bits.
        return _NUMBER(argument, _STATUS_AT)[0], _NUMBER(parameters, 8)[0]

    def parent_of(self, client: int, handle: int) -> int | None:
        """Return the parent of an object; None: there is no such object."""
        status, parent = self.class_or_parent(client, handle, PARENT)
        return parent if status == OK else None

    def slice_of(self, client: int, group: int) -> int:
        """Return the time-slice of a group in microseconds. Raises Refused."""
        parameters = bytearray(SLICE.size)
        self.demand("GET_TIMESLICE", client, group, GET_TIMESLICE, parameters)
        return int(SLICE.unpack(parameters)[0])

    def set_slice(self, client: int, group: int, microseconds: int) -> int:
        """Write a slice and return what the driver then reads."""
        self.demand("SET_TIMESLICE", client, group, SET_TIMESLICE, bytearray(SLICE.pack(microseconds)))
        return self.slice_of(client, group)

    def _ioctl(self, request: int, argument: bytearray, parameters: bytearray) -> None:
        """Make one ioctl on the file. Raises Refused."""
        try:
            self._files.ioctl(self._file, request, argument, parameters)
        except OSError as error:
            raise _ioctl_refusal(error) from None


def _ioctl_refusal(error: OSError) -> Refused:
    return Refused("ioctl", error.strerror or str(error))


def _status_refusal(name: str, status: int) -> Refused:
    """Return the refusal for a status of RM other than OK, which the call ``name`` answered."""
    return Refused(_REFUSALS.get(status, "failed"), name, status)


@contextlib.contextmanager
def _duplicated(files: KernelFiles, process: KernelProcess, number: int) -> Iterator[_File]:
    """Yield the calls on a duplicate of a process's descriptor, which is closed at the end."""
    file = process.duplicate(number)
    try:
        yield _File(files, file)
    finally:
        files.close(file)


def _find_groups(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compute groups of a process: scan all its clients and probe the groups, unless the request says no.

    If the request names groups, only their clients are read again, without a probe.
    """
    deadline = time.monotonic() + SCAN_SECONDS
    known_groups = request.get("groups")
    newest = _newest_client(files) if known_groups is None else None
    with files.process(request["pid"], request["started"]) as process, contextlib.ExitStack() as stack:
        opened = _open_own_files(files, process, stack)
        groups = _scan(opened, newest, deadline) if known_groups is None else _groups_again(opened, known_groups)
        groups = _own_groups(files, process, opened, groups)
        if request.get("probe", known_groups is None):
            for group in groups:
                _probe(opened[group.descriptor], group)
        return {"started": process.identity.started, "groups": [asdict(group) for group in groups]}


def _groups_again(opened: Mapping[int, _File], known: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return the groups that the clients of known groups have now. Raises Refused: there is none."""
    groups: list[Group] = []
    for number, client in sorted({(group["descriptor"], group["client"]) for group in known}):
        if number in opened:
            groups += _groups_of_client(opened[number], number, client)
    if not groups:
        raise Refused("no_context")
    return groups


def _open_own_files(files: KernelFiles, process: KernelProcess, stack: contextlib.ExitStack) -> dict[int, _File]:
    """Return duplicates, by number, of the control files that a process itself has opened; ``stack`` closes them."""
    numbers = process.control_descriptors()
    if not numbers:
        raise Refused("no_context")
    own_numbers = [number for number in numbers if not process.is_inherited(number)]
    if not own_numbers:
        raise Refused("inherited")
    opened: dict[int, _File] = {}
    refused: list[Refused] = []
    for number in own_numbers:
        try:
            opened[number] = stack.enter_context(_duplicated(files, process, number))
        except Refused as error:
            # A forged descriptor, or one closed meanwhile, must not hide the others.
            if error.code not in {"forged", "stale"}:
                raise
            refused.append(error)
    if not opened:
        raise refused[0]
    return opened


def _newest_client(files: KernelFiles) -> int | None:
    """Return the number of the newest client, where a scan begins, by allocating it for a moment; None: not allowed."""
    file = files.open_control_node()
    if file is None:
        return None
    try:
        # hRoot, hObjectParent, hObjectNew, hClass; RM writes the new handle to the parameters.
        argument = bytearray(ARGUMENT.pack(0, 0, 0, CLASS_ROOT_CLIENT, 0, 0, _NO_STATUS))
        parameters = bytearray(_MOST_OF_ALLOCATION)
        try:
            files.ioctl(file, RM_ALLOC, argument, parameters)
        except OSError:
            return None
        handle = int.from_bytes(argument[8:12], "little") or int.from_bytes(parameters[:4], "little")
        status = int.from_bytes(argument[_STATUS_AT:], "little")
    finally:
        files.close(file)
    if status != OK or not CLIENT_BASE <= handle < CLIENT_BASE + CLIENT_COUNT:
        return None
    return handle - CLIENT_BASE


def _client_handles(newest: int | None) -> Iterator[int]:
    """Yield all client handles, newest first; from the lowest up if the newest is unknown."""
    for step in range(CLIENT_COUNT):
        number = step if newest is None else (newest - step) % CLIENT_COUNT
        yield CLIENT_BASE + number


def _scan(opened: Mapping[int, _File], newest: int | None, deadline: float) -> list[Group]:
    """Return the groups of all clients that were created through these files. Raises Refused: no compute group is found.

    RM does not list the clients of a file, so every handle is tried, from that of the ``newest`` client on (None: unknown).
    Ends `_WINDOW` handles after the last client, once there is a compute group, or at the deadline.
    """
    groups: list[Group] = []
    clients_read: set[int] = set()
    last_step: int | None = None
    unusual_status: int | None = None
    for step, client in enumerate(_client_handles(newest)):
        for number, file in opened.items():
            status, _ = file.class_or_parent(client, client)
            if status == INVALID_CLIENT:
                # Another file created it, or none.
                continue
            if status not in {OK, OBJECT_NOT_FOUND}:
                unusual_status = status
            # Several descriptors may have the same file open.
            elif client not in clients_read:
                clients_read.add(client)
                groups += _groups_of_client(file, number, client)
                last_step = step + _WINDOW if groups else None
        if step == last_step:
            break
        if last_step is None and step % 1024 == 0 and time.monotonic() > deadline:
            raise _no_group_refusal(unusual_status, "scan_incomplete")
    if sum(len(group.channels) for group in groups) > _MOST_CHANNELS:
        raise Refused("too_many")
    if not groups:
        raise _no_group_refusal(unusual_status, "no_context")
    return groups


def _no_group_refusal(unusual_status: int | None, code: str) -> Refused:
    """Return why there is no compute group: what RM answered, or else ``code``."""
    return Refused(code) if unusual_status is None else _status_refusal("CLIENT_GET_HANDLE_INFO", unusual_status)


def _own_groups(
    files: KernelFiles, process: KernelProcess, opened: Mapping[int, _File], groups: list[Group]
) -> list[Group]:
    """Return those groups that belong to the process itself. Raises Refused: no compute group does.

    A forked worker inherits the file of its parent. The call that NVML lists compute processes with does not list the
    worker, even after the parent has ended. No call names the PID of a single client to a plain user.
    """
    if not files.sees_host_pids():
        return groups
    own_groups = []
    for group in groups:
        owners = _pids_with_compute(opened[group.descriptor], group)
        if not owners or process.identity.pid in owners:
            own_groups.append(group)
    if not own_groups:
        raise Refused("inherited")
    return own_groups


def _pids_with_compute(file: _File, group: Group) -> Sequence[int] | None:
    """Return the PIDs with compute objects on the GPU of a group: forked workers are not among them. None: unknown."""
    holders: list[int] = []
    for kind in group.classes:
        if not _is_compute(kind):
            continue
        parameters = bytearray(PIDS.pack(0, kind, 0, *[0] * _MOST_PIDS))
        if file.control(group.client, group.subdevice, GPU_GET_PIDS, parameters) != OK:
            return None
        _, _, count, *pids = PIDS.unpack(parameters)
        holders += pids[: min(count, len(pids))]
    return holders


def _groups_of_client(file: _File, number: int, client: int) -> list[Group]:
    """Return the compute groups of a client, from the classes and parents of its objects.

    ``number`` is the process's descriptor of the file. A device has a subdevice and groups, a group has channels, and a
    channel the objects that do its work.
    """
    objects = _classes_of_objects(file, client)
    parents: dict[int, int] = {}
    for handle, kind in objects.items():
        parent = file.parent_of(client, handle) if kind >= CLASS_SUBDEVICE else None
        if parent is not None:
            parents[handle] = parent
    subdevice_of_device: dict[int, int] = {}
    channels_of_group: dict[int, list[int]] = {}
    classes_of_group: dict[int, set[int]] = {}
    for handle, parent in parents.items():
        if objects[handle] == CLASS_SUBDEVICE:
            subdevice_of_device.setdefault(parent, handle)
        elif _is_channel(objects[handle]) and objects.get(parent) == CLASS_GROUP:
            channels_of_group.setdefault(parent, []).append(handle)
        elif _is_channel(objects.get(parent, 0)):
            # An object on a channel; 0 is no group.
            classes_of_group.setdefault(parents.get(parent, 0), set()).add(objects[handle])
    under_mps = CLASS_MPS in objects.values()
    groups = []
    for handle, kind in objects.items():
        subdevice = subdevice_of_device.get(parents.get(handle, 0))
        classes = tuple(sorted(classes_of_group.get(handle, ())))
        if kind != CLASS_GROUP or subdevice is None or not any(map(_is_compute, classes)):
            continue
        groups.append(
            Group(
                descriptor=number,
                client=client,
                handle=handle,
                subdevice=subdevice,
                gpu=_gpu_uuid(file, client, subdevice),
                classes=classes,
                channels=tuple(sorted(channels_of_group.get(handle, ()))),
                slice_us=_slice_or_none(file, client, handle),
                under_mps=under_mps,
            )
        )
    return groups


def _classes_of_objects(file: _File, client: int) -> dict[int, int]:
    """Return the class of each object of a client, by its handle.

    RM does not list them: each handle is tried, in blocks, until there are no more (`_BLOCK`).
    """
    classes: dict[int, int] = {}
    ask_class = file.class_or_parent
    for base in _bases_of_handles(file, client):
        empty_blocks = 0
        for block in range(base, base + _BLOCK * _MOST_BLOCKS, _BLOCK):
            count_before = len(classes)
            for handle in range(block, block + _BLOCK):
                status, kind = ask_class(client, handle)
                if status == OK:
                    classes[handle] = kind
            empty_blocks = 0 if len(classes) > count_before else empty_blocks + 1
            if empty_blocks == (1 if block == base else _MOST_EMPTY):
                break
    return classes


def _bases_of_handles(file: _File, client: int) -> list[int]:
    """Return where the handles of a client's objects may begin: where libcuda's do, and where that of its device does."""
    bases = {OBJECT_BASE}
    parameters = bytearray(CHILD.pack(client, INTERNAL_DEVICE, 0))
    if file.control(client, client, CHILD_HANDLE, parameters) == OK:
        device = CHILD.unpack(parameters)[2]
        bases.add((device & _BASE_BITS) or OBJECT_BASE)
    return sorted(bases)


def _is_channel(kind: int) -> bool:
    """Return whether a class is that of a channel, of any generation that has groups: 0xA06F (Kepler), 0xC46F, ..."""
    return kind & 0xFF == _CHANNEL and kind > CLASS_GROUP


def _is_compute(kind: int) -> bool:
    """Return whether a class is that of the compute objects on the channels of a compute group; lower ones are of no engine."""
    return kind & 0xFF == _COMPUTE and kind > CLASS_SUBDEVICE


def _gpu_uuid(file: _File, client: int, subdevice: int) -> str | None:
    """Return the UUID of the GPU of a subdevice; None: the driver does not tell."""
    parameters = bytearray(GID.pack(0, 0, 0, b""))
    if file.control(client, subdevice, GPU_GET_GID_INFO, parameters) != OK:
        return None
    text = GID.unpack(parameters)[3].partition(b"\0")[0].decode("ascii", "replace")
    return text if re.fullmatch(r"(GPU|MIG)-[0-9a-fA-F-]{36}", text) else None


def _slice_or_none(file: _File, client: int, group: int) -> int | None:
    """Return the slice of a group; None: it cannot be read."""
    try:
        return file.slice_of(client, group)
    except Refused:
        return None


def _probe(file: _File, group: Group) -> None:
    """Write another slice, read it back, restore the old one, and read that back. Raises Refused: the driver keeps none."""
    before = file.slice_of(group.client, group.handle)
    # A microsecond up from a small one, down from a large one: so it stays within the range of the driver.
    wanted = before + 1 if before < 1000 else before - 1
    try:
        read = file.set_slice(group.client, group.handle, wanted)
    finally:
        restored = file.set_slice(group.client, group.handle, before)
    if read != wanted or restored != before:
        raise Refused(
            "probe",
            f"{format_slice(before)}, then {format_slice(wanted)} read as {format_slice(read)} and {format_slice(before)} as {format_slice(restored)}",
        )


@contextlib.contextmanager
def _opened_groups(
    files: KernelFiles, request: Mapping[str, Any], *, skip_stale: bool = False
) -> Iterator[list[tuple[_File, Group]]]:
    """Duplicate the files of known groups for one request, and check that each is still a group.

    Raises Refused: a group is stale, which means gone; with ``skip_stale`` such groups are left out, unless all are.
    """
    opened_groups: list[tuple[_File, Group]] = []
    stale: Refused | None = None
    with files.process(request["pid"], request["started"]) as process, contextlib.ExitStack() as stack:
        opened: dict[int, _File] = {}
        for group in (Group(**row) for row in request["groups"]):
            number = group.descriptor
            try:
                if number not in opened:
                    opened[number] = stack.enter_context(_duplicated(files, process, number))
                status, kind = opened[number].class_or_parent(group.client, group.handle)
                if status != OK or kind != CLASS_GROUP:
                    raise Refused("stale", "CLIENT_GET_HANDLE_INFO", status or OBJECT_NOT_FOUND)
            except Refused as error:
                if error.code not in {"stale", "forged"} or not skip_stale:
                    raise
                stale = error
            else:
                opened_groups.append((opened[number], group))
        if not opened_groups and stale is not None:
            raise stale
        yield opened_groups


def _check_kernel(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - as the others
    """Check whether channels of processes can be reached from here at all."""
    files.check()
    return {}


def _read_slices(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:
    with _opened_groups(files, request) as groups:
        return {"slices": [file.slice_of(group.client, group.handle) for file, group in groups]}


def _set_slices(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:
    """Set a slice for all groups or for none."""
    with _opened_groups(files, request) as groups:
        slices_before = [file.slice_of(group.client, group.handle) for file, group in groups]
        _do_all_or_none(
            [
                _Call(
                    functools.partial(_set_group, file, group, request["microseconds"]),
                    undo=functools.partial(_set_group, file, group, slice_before),
                )
                for (file, group), slice_before in zip(groups, slices_before, strict=True)
            ]
        )
        return {}


def _set_group(file: _File, group: Group, microseconds: int) -> None:
    """Set the slice of a group. Raises Refused: the driver reads another one back."""
    read = file.set_slice(group.client, group.handle, microseconds)
    if read != microseconds:
        raise Refused("not_taken", f"{format_slice(microseconds)}, read {format_slice(read)}")


class _Call(NamedTuple):
    """A call that changes something, and the call that undoes it."""

    do: Callable[[], object]
    undo: Callable[[], object]

    def take_back(self) -> bool:
        """Undo it; return whether nothing of it is left. What has gone meanwhile needs no undo."""
        try:
            self.undo()
        except Refused as error:
            return error.code in {"stale", "gone"}
        return True


def _do_all_or_none(calls: Sequence[_Call]) -> None:
    """Make some calls; if one is refused, undo it and those before it.

    Raises Refused: that one was refused; or, with the code ``half_done``, some could not be undone.
    """
    for number, call in enumerate(calls):
        try:
            call.do()
        except Refused as error:
            undone = [earlier.take_back() for earlier in calls[:number]]
            # It may have done a part all the same; it surely has if the driver took another value.
            undone.append(call.take_back() or error.code != "not_taken")
            if not all(undone):
                raise Refused("half_done", error.text, error.status) from error
            raise


def _disable_channels(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:
    """Take all channels off the GPU, or none."""
    with _opened_groups(files, request) as groups:
        # What the driver does with a channel that has gone is not known: it is never asked.
        if any(len(_existing_channels(file, group)) < len(group.channels) for file, group in groups):
            raise Refused("stale", "CLIENT_GET_HANDLE_INFO", OBJECT_NOT_FOUND)
        batches = _batches(groups)
        began = time.monotonic()
        _do_all_or_none([_Call(functools.partial(batch.switch, off=True), batch.switch) for batch in batches])
        return {"seconds": time.monotonic() - began}


def _enable_channels(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:
    """Enable the channels that are left; one failure does not stop the others."""
    with _opened_groups(files, request, skip_stale=True) as groups:
        batches = _batches([(file, replace(group, channels=_existing_channels(file, group))) for file, group in groups])
        began = time.monotonic()
        failed: list[Refused] = []
        for batch in batches:
            try:
                batch.switch()
            except Refused as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return {"seconds": time.monotonic() - began}


class _Batch(NamedTuple):
    """At most `CHANNELS_PER_CALL` channels of one GPU, for one call."""

    file: _File
    client: int
    subdevice: int
    channels: list[int]

    def switch(self, *, off: bool = False) -> None:
        """Take them off the GPU, or put them back. Raises Refused."""
        pad = [0] * (CHANNELS_PER_CALL - len(self.channels))
        lists = (*[self.client] * len(self.channels), *pad, *self.channels, *pad)
        parameters = bytearray(DISABLE.pack(off, len(self.channels), 0, 0, 0, *lists))
        self.file.demand("FIFO_DISABLE_CHANNELS", self.client, self.subdevice, DISABLE_CHANNELS, parameters)


def _existing_channels(file: _File, group: Group) -> tuple[int, ...]:
    return tuple(channel for channel in group.channels if file.parent_of(group.client, channel) == group.handle)


def _batches(groups: Sequence[tuple[_File, Group]]) -> list[_Batch]:
    """Return the channels of these groups in batches, each for one call: of one subdevice, and at most `CHANNELS_PER_CALL`."""
    by_subdevice: dict[tuple[int, int, int], tuple[_File, list[int]]] = {}
    for file, group in groups:
        key = group.descriptor, group.client, group.subdevice
        _, channels = by_subdevice.setdefault(key, (file, []))
        channels += group.channels
    return [
        _Batch(file, client, subdevice, channels[start : start + CHANNELS_PER_CALL])
        for (_, client, subdevice), (file, channels) in by_subdevice.items()
        for start in range(0, len(channels), CHANNELS_PER_CALL)
    ]


_REQUESTS: Final[Mapping[str, Callable[[KernelFiles, Mapping[str, Any]], dict[str, Any]]]] = {
    "check": _check_kernel,
    "find": _find_groups,
    "read": _read_slices,
    "set": _set_slices,
    "off": _disable_channels,
    "on": _enable_channels,
}


def answer(files: KernelFiles, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one request, as JSON can carry it."""
    try:
        return _REQUESTS[request["do"]](files, request)
    except Refused as error:
        return {"refused": error.code, "text": error.text, "status": error.status}


def serve(channel: int) -> None:
    """Answer requests, one line of JSON each, on a socket. Ends when gpushare closes it."""
    files = KernelFiles()
    with open(channel, "rb", closefd=False) as requests, open(channel, "wb", closefd=False) as answers:
        for line in requests:
            if not line.endswith(b"\n"):
                # gpushare died while it wrote.
                return
            try:
                reply = answer(files, json.loads(line))
            except Exception as error:  # noqa: BLE001 - gpushare reports it
                reply = {"refused": "internal", "text": f"{type(error).__name__}: {error}", "status": None}
            answers.write(json.dumps(reply).encode() + b"\n")
            answers.flush()


def _become_child(work: Callable[[int], None], channel: int) -> NoReturn:
    """Work on a socket in a process that was just forked, with nothing else of gpushare's open, and exit."""
    code = 1
    try:
        # Ctrl-C at the terminal must not end it between two calls.
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in map(int, signal.valid_signals()):
            if callable(signal.getsignal(number)):
                # Ignored for a moment: one that came since the fork was meant for gpushare, which got it too.
                signal.signal(number, signal.SIG_IGN)
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # To the first number after stderr. Everything above is closed: locks and files of gpushare must not outlive it.
        channel = os.dup2(channel, 3)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > channel:
                with contextlib.suppress(OSError):
                    os.close(number)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        os.chdir("/")
        work(channel)
        code = 0
    finally:
        os._exit(code)


# -- in gpushare -------------------------------------------------------------------------------------------------------

Ask = Callable[[Mapping[str, Any], float], Mapping[str, Any]]

# A killed process is gone at once, unless it hangs in the driver.
_KILL_SECONDS: Final = 1.0


def _reap_if_ended(child: int) -> bool:
    """Wait for a child if it has ended, so that it is no zombie; return whether it has."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == child
    except ChildProcessError:
        # Where SIGCHLD is ignored, the kernel waits for children.
        return True


def not_answered_error(pid: int, seconds: float) -> TimedOut:
    return TimedOut(
        f"process {pid}: the driver does not answer within {seconds:g} s",
        "see: sudo dmesg | tail; then: gpushare doctor",
        code="driver_hangs",
    )


class Caller:
    """The child process that makes the calls. Started by the first request, killed when it does not answer in time.

    It is forked, because a new Python would take longer to start than all calls of a pause. It keeps one end of a socket
    and no other file, and ends with gpushare. Between requests it has no file of another process open. Not for use by
    several threads. ``work`` is what it does with its end of the socket.
    """

    def __init__(self, work: Callable[[int], None] = serve) -> None:
        self._work = work
        self._child: int | None = None
        self._socket: socket.socket | None = None

    def ask(self, request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """Return the answer to a request. Raises TimedOut or OperationFailed, after ending the child."""
        self.start()
        try:
            return self._exchange(request, time.monotonic() + seconds)
        except TimeoutError:
            self.close()
            raise not_answered_error(request["pid"], seconds) from None
        except (OSError, ValueError) as error:
            self.close()
            raise OperationFailed(
                f"process {request['pid']}: the child process that calls the driver ended: {error}",
                "run it again; see: sudo dmesg | tail",
                code="helper_ended",
            ) from None
        except BaseException:
            # Ctrl-C: the child finishes this request, so that nothing stays half done, and ends because its socket is closed.
            self._forget()
            raise

    def start(self) -> None:
        """Start the process, unless it runs. Raises OperationFailed: there is no memory, process or file for it."""
        if self._child is not None and _reap_if_ended(self._child):
            self._forget()
        if self._child is None:
            try:
                self._start()
            except OSError as error:
                # A GpushareError, which a running job survives without the child.
                raise errors.system_error(error) or error from None

    def close(self) -> None:
        """End the process; the next request starts another one."""
        child = self._forget()
        if child is None or _reap_if_ended(child):
            return
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        while not _reap_if_ended(child) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _forget(self) -> int | None:
        """Close the socket, and leave the process to end by itself; return its PID, or None if there is no process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        child, self._child = self._child, None
        return child

    def _start(self) -> None:
        """Start the process with one end of a new socket."""
        # The child uses the first three. If it imported them, it could wait forever for another thread's lock at the fork.
        import ctypes  # noqa: F401
        import fcntl  # noqa: F401
        import select  # noqa: F401
        import socket

        ours, its = socket.socketpair()
        # Until the child has its own handlers, it would handle a Ctrl-C as gpushare does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with its:
            try:
                child = os.fork()
                if child == 0:
                    _become_child(self._work, its.fileno())
                self._child, self._socket = child, ours
            except BaseException:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _exchange(self, request: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
        """Send a request, and return the answer. Raises TimeoutError, OSError (it has ended), ValueError (no answer of ours)."""
        channel = self._socket
        if channel is None:
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        channel.sendall(json.dumps(request).encode() + b"\n")
        reply = bytearray()
        while not reply.endswith(b"\n"):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            channel.settimeout(seconds)
            chunk = channel.recv(1 << 16)
            if not chunk:
                raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
            reply += chunk
            if len(reply) > _MOST_BYTES:
                raise ValueError("its answer is too long")
        answered = json.loads(reply)
        if not isinstance(answered, dict):
            raise ValueError("its answer is no object")  # noqa: TRY004 - as json raises
        return answered


class ChannelControl:
    """Reads and sets the time-slices of processes, and takes them off the GPU. A context manager.

    ``ask`` answers a request; None starts a `Caller`.
    """

    def __init__(self, ask: Ask | None = None) -> None:
        self._caller: Caller | None = None
        if ask is None:
            self._caller = Caller()
            ask = self._caller.ask
        self._ask = ask

    def __enter__(self) -> ChannelControl:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child process now. It loads while the caller does something else; a failure shows with the first call."""
        if self._caller is not None:
            with contextlib.suppress(GpushareError, OSError):
                self._caller.start()

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._caller is not None:
            self._caller.close()

    def check(self) -> None:
        """Raise if no process's slice can be set from here, whatever its user. The driver is not asked.

        Raises:
            NotSupported: the kernel or a sandbox does not allow it; the code says which.
            TimedOut, OperationFailed: the child process does not answer.
        """
        reply = self._ask({"do": "check", "pid": os.getpid()}, CALL_SECONDS)
        if "refused" in reply:
            prefix, text = "time-slices cannot be set here: ", reply.get("text") or ""
            raise _error_of_row(reply["refused"], prefix, text=text, status="", pid=os.getpid())

    def find(
        self, pid: int, started: int | None = None, *, probe: bool = True, seconds: float = FIND_SECONDS
    ) -> Channels:
        """Scan a process (about 0.1 s) and probe its compute groups. Without ``probe`` nothing is written.

        ``started`` is its expected start time in clock ticks since boot (`identity.Identity`). CUDA contexts and channels
        that it creates later are found by another scan, or by `find_again`. ``seconds`` is the most that it may take.

        Raises:
            NotFound: it has ended, has no CUDA context, or only shares another process's.
            NoPermission: it belongs to another user.
            NotSupported: the kernel, a sandbox or the driver does not allow it; the code says which.
            TimedOut: the driver did not answer, or the scan took too long.
            OperationFailed: the driver failed.
        """
        return self._find_channels({"do": "find", "pid": pid, "started": started, "probe": probe}, seconds)

    def find_again(self, channels: Channels) -> Channels:
        """Find the contexts and channels that known clients have now; faster than `find`, and without a probe.

        Raises as `find`.
        """
        return self._find_channels(_request("find", channels))

    def _find_channels(self, request: Mapping[str, Any], seconds: float = FIND_SECONDS) -> Channels:
        """Send a request that finds channels, and return those that the answer names. Raises as `find`."""
        pid = request["pid"]
        reply = self._ask_or_raise(request, pid, seconds)
        # Our own child answers: what is wrong here is a fault of gpushare.
        try:
            channels: Channels = parse_typed(
                Channels, {"pid": pid, "started": reply["started"], "groups": reply["groups"]}
            )
        except ValueError:
            raise _refusal_error("internal", pid, "its answer is not a list of groups", None) from None
        if not channels.groups:
            raise _refusal_error("internal", pid, "its answer names no groups", None)
        return channels

    def read_slices(self, channels: Channels) -> tuple[int, ...]:
        """Return the slices of the compute groups in microseconds. Raises like `set_slice`."""
        return tuple(self._ask_or_raise(_request("read", channels), channels.pid, CALL_SECONDS)["slices"])

    def set_slice(self, channels: Channels, microseconds: int) -> None:
        """Set the slice of all compute groups and read it back.

        If one group fails, the others get their old slices back. The caller checks the range.

        Raises:
            NotFound: the process has ended, or its groups have changed (code ``stale_channels``: find again).
            NoPermission, NotSupported: as `find`.
            OperationFailed: the driver refused the value, or reads another one back; with the code ``half_done`` others could
                not get their old slices back.
            TimedOut: the driver did not answer; the slice may be the old or the new one.
        """
        request = {**_request("set", channels), "microseconds": microseconds}
        self._ask_or_raise(request, channels.pid, CALL_SECONDS)

    def restore_slices(self, channels: Channels) -> None:
        """Set each compute group to the slice that the scan found. Raises like `set_slice`."""
        for group in channels.groups:
            if group.slice_us is not None:
                alone = Channels(pid=channels.pid, started=channels.started, groups=(group,))
                self.set_slice(alone, group.slice_us)

    def disable(self, channels: Channels) -> float:
        """Take the compute channels off the GPU, even in the middle of a kernel; return the seconds spent in the driver.

        They stay off until `enable`. If one call fails, those already off are enabled again.

        Raises:
            NotFound, NoPermission, NotSupported, OperationFailed: like `set_slice`; all channels are on, but with the code
                ``half_done``.
            TimedOut: the driver did not answer; the channels may be off.
        """
        return float(self._ask_or_raise(_request("off", channels), channels.pid, CALL_SECONDS)["seconds"])

    def enable(self, channels: Channels) -> float:
        """Put the channels that still exist back on the GPU; return the seconds spent in the driver.

        Raises like `set_slice`.
        """
        return float(self._ask_or_raise(_request("on", channels), channels.pid, CALL_SECONDS)["seconds"])

    def _ask_or_raise(self, request: Mapping[str, Any], pid: int, seconds: float) -> Mapping[str, Any]:
        """Return the answer to a request about a process. Raises GpushareError if it is refused."""
        reply = self._ask(request, seconds)
        if "refused" in reply:
            raise _refusal_error(reply["refused"], pid, reply.get("text") or "", reply.get("status"))
        return reply


def _request(do: str, channels: Channels) -> dict[str, Any]:
    """Return a request about the compute groups of a process."""
    return {
        "do": do,
        "pid": channels.pid,
        "started": channels.started,
        "groups": [vars(group) for group in channels.groups],
    }


def _refusal_error(code: str, pid: int, text: str, status: int | None) -> GpushareError:
    """Return the error for a refusal of a request about a process; ``status`` is RM's, if the refusal came from there."""
    status_text = "" if status is None else f"{status:#04x}"
    if code == "stale":
        text = status_text or text or "no such handle"
    return _error_of_row(code, f"process {pid}: ", text=text, status=status_text, pid=pid)


def _error_of_row(code: str, prefix: str, **values: object) -> GpushareError:
    """Return the error of a code in ``data/channel-refusals.yaml``; the values fill its message, which follows the prefix."""
    rows = package_rows("channel-refusals.yaml")
    row = rows.get(code) or rows["internal"]
    kind: type[GpushareError] = getattr(errors, row["error"])
    return kind(prefix + row["message"].format(**values), row["hint"].format(**values), code=row["code"])
