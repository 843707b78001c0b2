"""The channel groups of a simulated host's processes: what the resource manager answers, call by call.

Stands in below `gpushare.host.channels`, at the ioctl: the scan, the probe and the checks above run unchanged. A process
with a CUDA context has one client with a compute group of 8 channels and three copy groups of 4, like libcuda's on an H100
(driver 580); a client of MPS has an MPS object besides, the server has none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpushare.host import channels as rm
from gpushare.host.channels import ChannelControl, KernelFiles, KernelProcess, Refused, answer
from gpushare.host.identity import Identity
from gpushare.sim.current import changing, current
from gpushare.sim.devices import daemon_devices
from gpushare.sim.processes import identity_in
from gpushare.sim.state import (
    DEFAULT_SLICE_US,
    SimulatedHostState,
    SimulatedProcess,
    SimulatedServer,
    StateFile,
    on_gpu,
)

INVALID_ARGUMENT: Final = 0x1F
INVALID_PARAM_STRUCT: Final = 0x3A
# A fault of the state (`channel_fault`) that makes every call hang; the others are codes of `Refused`.
HANGS: Final = "hang"

# Hopper: GPFIFO channel, compute, copy engine.
_CHANNEL, _COMPUTE, _COPY = 0xC86F, 0xCBC0, 0xC8B5
_DESCRIPTOR: Final = 5
_NEWEST: Final = rm.CLIENT_BASE + 0x200
# Where an ioctl writes in its argument (`rm.ARGUMENT`).
_NEW_HANDLE, _STATUS = slice(8, 12), slice(28, 32)
_DEVICE, _SUBDEVICE = rm.OBJECT_BASE + 1, rm.OBJECT_BASE + 2
COMPUTE_GROUP: Final = rm.OBJECT_BASE + 0x10
_COPY_GROUPS: Final = tuple(rm.OBJECT_BASE + at for at in (0x40, 0x50, 0x60))
CHANNELS: Final = tuple(COMPUTE_GROUP + at for at in range(1, 9))
_COPY_CHANNELS: Final = {group + at: group for group in _COPY_GROUPS for at in range(1, 5)}
# Class and parent (0: the client) of each object of a client.
_OBJECTS: Final[Mapping[int, tuple[int, int]]] = {
    _DEVICE: (rm.CLASS_DEVICE, 0),
    _SUBDEVICE: (rm.CLASS_SUBDEVICE, _DEVICE),
    **dict.fromkeys((COMPUTE_GROUP, *_COPY_GROUPS), (rm.CLASS_GROUP, _DEVICE)),
    **dict.fromkeys(CHANNELS, (_CHANNEL, COMPUTE_GROUP)),
    **{channel + 0x10: (_COMPUTE, channel) for channel in CHANNELS},
    **{channel + 0x20: (_COPY, channel) for channel in CHANNELS},
    **{channel: (_CHANNEL, group) for channel, group in _COPY_CHANNELS.items()},
    **{channel + 8: (_COPY, channel) for channel in _COPY_CHANNELS},
}
# What a client of MPS has besides.
_OF_MPS: Final = {rm.OBJECT_BASE + 0x70: (rm.CLASS_MPS, 0)}

Owner = SimulatedProcess | SimulatedServer


class SimulatedChannels(ChannelControl):
    """Stands in for `ChannelControl` on a simulated host: the calls are answered in this process."""

    def __init__(self, state_file: StateFile) -> None:
        files = SimulatedFiles(state_file)

        def ask(request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
            """Answer here, from the state of the host, as the helper process of the real control would; ``check`` asks no driver."""
            if current(state_file).channel_fault == HANGS and request["do"] != "check":
                raise rm.not_answered_error(request["pid"], seconds)
            return answer(files, request)

        super().__init__(ask)


class _ControlFile(NamedTuple):
    """An open control file of the driver: what the process that opened it has there."""

    pid: int
    # The handle of its client.
    client: int
    # The client itself and its objects, in the form of `_OBJECTS`.
    objects: Mapping[int, tuple[int, int]]


class SimulatedFiles(KernelFiles):
    """The control files of simulated processes; a descriptor is a number that this process alone knows."""

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file
        # A scan asks thousands of times: the state is read once for each file, and again after each change.
        self._state = current(state_file)
        self._opened: dict[int, _ControlFile] = {}
        self._next = 1000

    def check(self) -> None:
        """Raise Refused where a sandbox forbids to copy descriptors of other processes: no time-slice can be set there."""
        fault = current(self._state_file).channel_fault
        if fault in {"no_pidfd_getfd", "gvisor", "seccomp", "wsl"}:
            raise Refused(fault)

    @contextlib.contextmanager
    def process(self, pid: int, started: int | None) -> Iterator[KernelProcess]:
        """Yield a process; Refused: it is gone, has a different start from this (None: any), or a sandbox forbids it."""
        state = current(self._state_file)
        if state.channel_fault in {"no_pidfd_getfd", "gvisor"}:
            raise Refused(state.channel_fault)
        identity = identity_in(state, pid)
        if identity is None or started not in {None, identity.started}:
            raise Refused("gone")
        yield _Process(self, state, identity)

    def open_control_node(self) -> int:
        return self.new_descriptor(0)

    def new_descriptor(self, pid: int) -> int:
        """Return a new descriptor for the control file of a process."""
        self._state = current(self._state_file)
        owner = _find_owner(self._state, pid)
        is_mps_client = isinstance(owner, SimulatedProcess) and owner.mps_daemon is not None
        client = _client_handle(pid)
        objects = {client: (rm.CLASS_ROOT_CLIENT, 0), **_OBJECTS, **(_OF_MPS if is_mps_client else {})}
        self._next += 1
        self._opened[self._next] = _ControlFile(pid, client, objects)
        return self._next

    def close(self, file: int) -> None:
        del self._opened[file]

    def sees_host_pids(self) -> bool:
        return current(self._state_file).pid_namespace_is_host

    def prepared_ioctl(
        self, file: int, request: int, argument: bytearray, parameters: bytearray
    ) -> Callable[[], object]:
        """Return a call that answers this ioctl."""
        return functools.partial(self.ioctl, file, request, argument, parameters)

    def ioctl(self, file: int, request: int, argument: bytearray, parameters: bytearray) -> None:
        """Answer one ioctl as the driver does: a status in the argument, results in the parameters."""
        client, handle, command, _, _, size, _ = rm.ARGUMENT.unpack(argument)
        if request == rm.RM_ALLOC:
            status = rm.OK
            argument[_NEW_HANDLE] = _NEWEST.to_bytes(4, "little")
        elif request != rm.RM_CONTROL or size != len(parameters):
            status = INVALID_PARAM_STRUCT
        elif client != self._opened[file].client:
            status = rm.INVALID_CLIENT
        else:
            status = self._control(self._opened[file], handle, command, parameters)
        argument[_STATUS] = status.to_bytes(4, "little")

    def _control(self, file: _ControlFile, handle: int, command: int, parameters: bytearray) -> int:
        """Answer one RM_CONTROL, a call of the driver on an object; return the status, or the one that a test has set for it."""
        status_of_test = self._state.channel_statuses.get(hex(command))
        if status_of_test is not None:
            return status_of_test
        if command == rm.HANDLE_INFO:
            return _object_info(file, handle, parameters)
        if command not in _CALLS:
            return rm.NOT_SUPPORTED
        if command not in {rm.SET_TIMESLICE, rm.DISABLE_CHANNELS}:
            return _answer_call(self._state, file, command, handle, parameters)
        with changing(self._state_file) as (state, _):
            status = _answer_call(state, file, command, handle, parameters)
        self._state = current(self._state_file)
        return status


class _Process(KernelProcess):
    """Stands in for `KernelProcess`: a process of the host, whose control file can be duplicated."""

    def __init__(self, files: SimulatedFiles, state: SimulatedHostState, identity: Identity) -> None:
        self._files, self._state, self.identity = files, state, identity

    def control_descriptors(self) -> list[int]:
        """Return the descriptors with which the process has the driver's control file open: one, if it has a context."""
        if self._state.channel_fault == "wsl":
            raise Refused("wsl")
        owner = _find_owner(self._state, self.identity.pid)
        if owner is None or (isinstance(owner, SimulatedProcess) and not on_gpu(owner)):
            return []
        self._check_permitted(owner)
        return [_DESCRIPTOR]

    def is_inherited(self, number: int) -> bool:  # noqa: ARG002 - as the kernel's
        return False

    def duplicate(self, number: int) -> int:
        """Return a descriptor of ours for the control file that the process has open."""
        owner = _find_owner(self._state, self.identity.pid)
        if owner is None or number != _DESCRIPTOR:
            raise Refused("stale", os.strerror(errno.EBADF))
        self._check_permitted(owner)
        if self._state.channel_fault == "forged":
            raise Refused("forged", str(number))
        return self._files.new_descriptor(owner.pid)

    def _check_permitted(self, owner: Owner) -> None:
        """Raise Refused where the kernel would not let this user copy the process's descriptors."""
        if not self._state.may_touch(owner.uid):
            raise Refused("other_user")
        fault = self._state.channel_fault
        if fault in {"seccomp", "ptrace_scope", "no_ptrace"}:
            # With the scope of Yama.
            raise Refused(fault, "1" if fault == "ptrace_scope" else "")


def _find_owner(state: SimulatedHostState, pid: int) -> Owner | None:
    """Return the process, or the MPS server, with this PID."""
    owners: list[Owner] = [*state.processes, *state.servers]
    return next((owner for owner in owners if owner.pid == pid), None)


def _client_handle(pid: int) -> int:
    """Return the handle of a process's client: one of the 256 below the newest client of the driver."""
    return _NEWEST - 0x100 + pid % 0x100


def _object_info(file: _ControlFile, handle: int, parameters: bytearray) -> int:
    """Answer HANDLE_INFO: the class or the parent of the client, or of one of its objects. Return the status."""
    object_handle, index, _ = rm.INFO.unpack(parameters)
    if handle != file.client or object_handle not in file.objects:
        return rm.OBJECT_NOT_FOUND
    object_class, parent = file.objects[object_handle]
    if index not in {rm.PARENT, rm.CLASS}:
        return INVALID_ARGUMENT
    value = object_class if index == rm.CLASS else parent or file.client
    rm.INFO.pack_into(parameters, 0, object_handle, index, value)
    return rm.OK


def _answer_call(
    state: SimulatedHostState, file: _ControlFile, command: int, handle: int, parameters: bytearray
) -> int:
    """Answer a call of `_CALLS` on an object of the class that the call is for; return the status."""
    needed_class, call = _CALLS[command]
    object_class, _ = file.objects.get(handle, (0, 0))
    owner = _find_owner(state, file.pid)
    if owner is None or needed_class not in {None, object_class}:
        return rm.OBJECT_NOT_FOUND
    return call(state, owner, handle, parameters)


def _child_handle(_state: SimulatedHostState, _owner: Owner, _handle: int, parameters: bytearray) -> int:
    """Answer CHILD_HANDLE: the handle of a parent's device that the driver uses internally. Return the status."""
    parent, kind, _ = rm.CHILD.unpack(parameters)
    if kind != rm.INTERNAL_DEVICE:
        return rm.OBJECT_NOT_FOUND
    rm.CHILD.pack_into(parameters, 0, parent, kind, _DEVICE)
    return rm.OK


def _slices(state: SimulatedHostState, owner: Owner) -> dict[str, int]:
    """Return the time-slices of a process or server that are not the default: of a client of MPS its server's."""
    server = None if isinstance(owner, SimulatedServer) else owner.mps_server
    return next((each.slices for each in state.servers if each.pid == server), owner.slices)


def _group_name(group: int) -> str:
    """Return the key of a channel group in ``slices``."""
    return "compute" if group == COMPUTE_GROUP else hex(group)


def _slice_of(state: SimulatedHostState, owner: Owner, group: int) -> int:
    """Return the time-slice of a group in microseconds; one that copies has half of the default."""
    default = DEFAULT_SLICE_US if group == COMPUTE_GROUP else DEFAULT_SLICE_US // 2
    return _slices(state, owner).get(_group_name(group), default)


def _read_slice(state: SimulatedHostState, owner: Owner, group: int, parameters: bytearray) -> int:
    """Read the time-slice of a group; return the status."""
    rm.SLICE.pack_into(parameters, 0, _slice_of(state, owner, group))
    return rm.OK


def _set_slice(state: SimulatedHostState, owner: Owner, group: int, parameters: bytearray) -> int:
    """Set the time-slice of a group; 0 is refused, as by the driver. Return the status."""
    (slice_us,) = rm.SLICE.unpack(parameters)
    if slice_us == 0:
        return INVALID_ARGUMENT
    slices = _slices(state, owner)
    slices.pop(_group_name(group), None)
    # What is the default now is not kept.
    if slice_us != _slice_of(state, owner, group):
        slices[_group_name(group)] = slice_us
    return rm.OK


def _switch_channels(state: SimulatedHostState, owner: Owner, _handle: int, parameters: bytearray) -> int:
    """Take channels of the owner's client off the GPU, or put them back; return the status."""
    off, count, _, _, _, *lists = rm.DISABLE.unpack(parameters)
    clients, channels = set(lists[:count]), set(lists[rm.CHANNELS_PER_CALL : rm.CHANNELS_PER_CALL + count])
    are_its_own = clients <= {_client_handle(owner.pid)} and channels <= set(CHANNELS)
    if count > rm.CHANNELS_PER_CALL or not are_its_own:
        return INVALID_ARGUMENT
    server_pid = owner.pid if isinstance(owner, SimulatedServer) else owner.mps_server
    members: list[Owner] = [owner]
    if server_pid is not None:
        # Channels of one client stop the server and all its clients (measured).
        members = [process for process in state.processes if process.mps_server == server_pid]
        members += [server for server in state.servers if server.pid == server_pid]
    for member in members:
        switched = set(member.channels_off)
        member.channels_off = sorted(switched | channels if off else switched - channels)
    return rm.OK


def _list_pids(state: SimulatedHostState, owner: Owner, _handle: int, parameters: bytearray) -> int:
    """Answer GPU_GET_PIDS: the processes on the owner's GPU, and all MPS servers. Return the status."""
    gpu = _gpu_of(state, owner)
    pids = [process.pid for process in state.processes if process.gpu_uuid == gpu and on_gpu(process)]
    kind, asked_for, _, *empty = rm.PIDS.unpack(parameters)
    pids = [*pids, *(server.pid for server in state.servers)][: len(empty)]
    rm.PIDS.pack_into(parameters, 0, kind, asked_for, len(pids), *pids, *empty[len(pids) :])
    return rm.OK


def _gpu_gid(state: SimulatedHostState, owner: Owner, _handle: int, parameters: bytearray) -> int:
    """Answer GPU_GET_GID_INFO: the UUID of the owner's GPU. Return the status."""
    uuid = _gpu_of(state, owner).encode()
    rm.GID.pack_into(parameters, 0, 0, 0, len(uuid) + 1, uuid)
    return rm.OK


def _gpu_of(state: SimulatedHostState, owner: Owner) -> str:
    """Return the UUID of the GPU that a process, or an MPS server, is on; empty: none."""
    if isinstance(owner, SimulatedProcess):
        return owner.gpu_uuid
    daemon = next(daemon for daemon in state.daemons if owner in daemon.servers)
    return next((device.gpu.uuid for device in daemon_devices(state, daemon)), "")


_Call = Callable[[SimulatedHostState, Any, int, bytearray], int]
# The class of the object that a call is for, and what answers it.
_CALLS: Final[Mapping[int, tuple[int | None, _Call]]] = {
    rm.CHILD_HANDLE: (None, _child_handle),
    rm.GET_TIMESLICE: (rm.CLASS_GROUP, _read_slice),
    rm.SET_TIMESLICE: (rm.CLASS_GROUP, _set_slice),
    rm.DISABLE_CHANNELS: (rm.CLASS_SUBDEVICE, _switch_channels),
    rm.GPU_GET_PIDS: (rm.CLASS_SUBDEVICE, _list_pids),
    rm.GPU_GET_GID_INFO: (rm.CLASS_SUBDEVICE, _gpu_gid),
}
