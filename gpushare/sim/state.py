"""The state of a simulated host: one JSON file, locked, shared by processes, written atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gpushare.base.errors import BadUsage, NoPermission, OperationFailed
from gpushare.base.values import dataclass
from gpushare.gpu_models import GpuModel, find_model
from gpushare.host.capabilities import SIMULATED_USERS, InstanceIds
from gpushare.host.identity import identity_of
from gpushare.host.records import replace_file, writing

# Above the largest PID that Linux gives out (PID_MAX_LIMIT): a simulated PID is never a real one.
FIRST_SIMULATED_PID = 4_194_305
# Microseconds, of a group that computes; one that copies has half of it (H200 and H100, driver 580).
DEFAULT_SLICE_US = 2048
# What a program that `gpushare run` starts learns its host from.
SIM_HOST = "GPUSHARE_SIM_HOST"
_OWN_DIRECTORY = "set GPUSHARE_SIM_DIR to a short directory that you may write"


# Compared by identity: two processes with equal fields are still two.
@dataclass(eq=False)
class SimulatedGpuInstance:
    """One GPU instance of a simulated GPU."""

    profile: str
    start: int
    gpu_instance_id: int


@dataclass(eq=False)
class SimulatedMigInstance(SimulatedGpuInstance):
    """One MIG device of a simulated GPU: a compute instance in its GPU instance."""

    compute_instance_id: int
    uuid: str
    # Its profile in -lcip (NVML_COMPUTE_INSTANCE_PROFILE_*); None: the whole GPU instance.
    compute_profile: int | None = None
    # Its first compute slice in the GPU instance.
    compute_start: int = 0

    @property
    def instance_ids(self) -> tuple[int, int]:
        """Return the ids of its GPU and compute instance."""
        return self.gpu_instance_id, self.compute_instance_id


@dataclass(eq=False)
class SimulatedNode:
    """What differs from the default at the capability node of an instance."""

    owner: int = 0
    mode: int = 0o444
    users: list[int] = field(default_factory=list)
    # DeviceFileModify: nvidia-modprobe puts the node back at each use.
    modify: bool = True

    def may_read(self, uid: int) -> bool:
        """Return whether a user may open the node: root, a user of its ACL, and others by its mode."""
        readable = self.mode & (0o400 if uid == self.owner else 0o004)
        return uid in {0, *self.users} or bool(readable)


@dataclass(eq=False)
class SimulatedGpu:
    """One simulated GPU: what differs from its model, and its faults."""

    model: str
    uuid: str
    pci_bus_id: str
    compute_mode: int = 0
    time_slice: int = 0
    persistence: bool = True
    mig_mode: int | None = None
    mig_pending: int | None = None
    mig: list[SimulatedMigInstance] = field(default_factory=list)
    # GPU instances without a compute instance: no MIG device, no CUDA.
    bare: list[SimulatedGpuInstance] = field(default_factory=list)
    lost: bool = False
    # Memory of processes that are gone: NVML lists no process that has it.
    unlisted_bytes: int = 0
    # Its Xids in the kernel log since the boot.
    xids: list[int] = field(default_factory=list)
    # Why its clocks are lowered, as nvmlClocksEventReasons.
    slowed: int = 0
    # A power limit below that of its model; None: none.
    power_cap_watts: int | None = None
    # A change of the MIG mode stays pending until a reset.
    reset_required: bool = False
    # Names of NVML entry points (any suffix) that answer NOT_SUPPORTED here.
    not_supported: list[str] = field(default_factory=list)
    # Names of those that answer NO_PERMISSION.
    refused: list[str] = field(default_factory=list)
    # Capability nodes that were changed, by GPU instance id, or GPU and compute instance id: "9", "9/0".
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    vgpus: list[SimulatedVgpu] = field(default_factory=list)


@dataclass(eq=False)
class SimulatedVgpu:
    """A vGPU that a virtual machine uses."""

    uuid: str
    # As NVIDIA names it: "NVIDIA H200-35C".
    type: str
    vm: str
    # Half of it is in use.
    memory_bytes: int


@dataclass(eq=False)
class SimulatedProcess:
    """A process on a simulated GPU: simulated (PID above every real one) or a real one that `run` started."""

    pid: int
    real: bool
    # Empty while it has no CUDA context: it was refused, waits for a server, or has not attached yet.
    gpu_uuid: str
    name: str
    uid: int
    # When it started, in clock ticks since boot.
    started: int
    command_line: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    sm_percent: int = 0
    # Percent of the memory bandwidth that it uses; None: what its work on the SMs implies.
    bandwidth_percent: int | None = None
    # Percent of the time in which it has work.
    busy_percent: float = 100.0
    # How long one of its requests takes.
    request_ms: float | None = None
    # How long the GPU stays busy with its queued work after the process stops launching.
    queue_seconds: float = 0.0
    graphics: bool = False
    container: str | None = None
    gids: list[int] = field(default_factory=list)
    cgroup: str | None = None
    # Whether only root can have put it there.
    cgroup_of_root: bool = False
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    # The simulated process that started it.
    parent_pid: int | None = None
    # The PID of the MPS daemon whose client it is; None: no MPS client.
    mps_daemon: int | None = None
    mps_server: int | None = None
    stopped_at: float | None = None
    # Its CUDA context was lost when a neighbour died with work in flight.
    broken: bool = False
    catches: list[int] = field(default_factory=list)
    # The thread limit of an MPS client, in force since it attached; None: no limit, or no client.
    threads: float | None = None
    # Its memory limit, in the same way.
    memory_limit_bytes: int | None = None
    # The CUresult with which CUDA refused it a context; None: it was not refused.
    refused: str | None = None
    # When it makes its first CUDA context; None: it does not wait to do so.
    attach_at: float | None = None
    # Device nodes that it keeps open besides those of its CUDA context: nv-hostengine, nvidia-persistenced.
    open_files: list[str] = field(default_factory=list)
    # Time-slices in microseconds that are not the default, by channel group: "compute", or the handle of another.
    slices: dict[str, int] = field(default_factory=dict)
    # Channel groups that are off.
    channels_off: list[int] = field(default_factory=list)
    # CUprocessState: 0 running, 1 locked, 2 checkpointed, 3 failed.
    checkpoint: int = 0
    # Its memory while it is checkpointed.
    image_bytes: int = 0

    @property
    def instance_ids(self) -> InstanceIds | None:
        """Return the ids of the GPU and compute instance that it runs in; None: it has a whole GPU."""
        return None if self.gpu_instance_id is None else (self.gpu_instance_id, self.compute_instance_id)


@dataclass(eq=False)
class SimulatedServer:
    """One nvidia-cuda-mps-server."""

    pid: int
    uid: int
    status: str = "ACTIVE"
    threads: float = 100.0
    # Memory limits in MiB, by device ordinal or UUID as it was set.
    memory: dict[str, int] = field(default_factory=dict)
    priority: int = 0
    # Time-slices, in the form of SimulatedProcess.slices.
    slices: dict[str, int] = field(default_factory=dict)
    channels_off: list[int] = field(default_factory=list)


@dataclass(eq=False)
class SimulatedDaemon:
    """One nvidia-cuda-mps-control daemon."""

    pid: int
    uid: int
    pipe_directory: str
    log_directory: str
    # CUDA_VISIBLE_DEVICES of the daemon: UUIDs or ordinals; empty for all.
    visible: list[str] = field(default_factory=list)
    started: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    threads: float = 100.0
    memory: dict[str, int] = field(default_factory=dict)
    priority: int = 0
    servers: list[SimulatedServer] = field(default_factory=list)
    stopped: bool = False
    # One server, of root, for the clients of all users.
    multiuser: bool = False


@dataclass(eq=False)
class SimulatedHostState:
    """Everything about one simulated host."""

    spec: str
    gpus: list[SimulatedGpu] = field(default_factory=list)
    processes: list[SimulatedProcess] = field(default_factory=list)
    daemons: list[SimulatedDaemon] = field(default_factory=list)
    driver: str = "580.159.04"
    # The user that commands run as (fault ``user``); None: the real user, who may also do what root may.
    fault_uid: int | None = None
    # The ids of users that this machine does not have, by name.
    users: dict[str, int] = field(default_factory=dict)
    next_pid: int = FIRST_SIMULATED_PID
    created_at: float = 0.0
    driver_loaded: bool = True
    nvml_installed: bool = True
    permission_denied: bool = False
    # The library was updated and the kernel module was not reloaded.
    library_mismatch: bool = False
    # "Binary version" of the MPS programs, if it differs from the driver's.
    mps_binary: int | None = None
    # The size of /dev/shm.
    shared_memory_bytes: int = 64 << 30
    # MemAvailable.
    host_memory_bytes: int = 512 << 30
    # The error that a call of a checkpoint returns, by the name of the call: {"checkpoint": 801}.
    checkpoint_faults: dict[str, int] = field(default_factory=dict)
    # `ulimit -n` of every process.
    descriptor_limit: int = 1024
    pid_namespace_is_host: bool = True
    # Programs that never answer.
    hanging_programs: list[str] = field(default_factory=list)
    # Programs that are not installed.
    missing_programs: list[str] = field(default_factory=list)
    # The NVIDIA Container Toolkit (nvidia-ctk), which is no part of the driver.
    toolkit_installed: bool = False
    # How many of the next connections to an MPS daemon are dropped.
    collisions: int = 0
    # The Nth modifying NVML call from now on fails; 0: none.
    fail_step: int = 0
    # gpushare is killed right after the Nth modifying NVML call from now on; 0: never.
    crash_step: int = 0
    # Why calls on GPU channels fail: "seccomp", "hang" and others.
    channel_fault: str | None = None
    # The status that a call on channels returns, by the number of the call: {"0xa06c0103": 86}.
    channel_statuses: dict[str, int] = field(default_factory=dict)

    @property
    def uid(self) -> int:
        """Return the user that commands run as."""
        return os.geteuid() if self.fault_uid is None else self.fault_uid

    @property
    def root(self) -> bool:
        """Return whether commands count as root's: by default all do, so that anybody can try a change."""
        return not self.fault_uid

    @property
    def branch(self) -> int:
        """Return the branch of the driver: 580 of ``580.159.04``."""
        head = self.driver.split(".", 1)[0]
        return int(head) if head.isdigit() else 0

    @property
    def servers(self) -> list[SimulatedServer]:
        """Return the MPS servers of all daemons."""
        return [server for daemon in self.daemons for server in daemon.servers]

    def process(self, pid: int) -> SimulatedProcess | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def may_touch(self, owner: int) -> bool:
        """Return whether commands may read and change what belongs to a user."""
        return self.root or owner == self.fault_uid

    def new_pid(self) -> int:
        """Return a PID that no process of this host ever had."""
        self.next_pid += 1
        return self.next_pid - 1


def state_root() -> Path:
    """Return the directory of all simulated hosts of this user: ``GPUSHARE_SIM_DIR``, or a runtime directory.

    Short on purpose: MPS pipe directories lie below it and may have 87 bytes at most.
    """
    explicit = os.environ.get("GPUSHARE_SIM_DIR")
    if explicit:
        return Path(explicit)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "gpushare-sim"
    import tempfile

    return Path(tempfile.gettempdir()) / f"gpushare-sim-{os.getuid()}"


class StateFile:
    """The state file of one simulated host.

    ``read()`` never blocks a writer (the file is replaced as a whole); ``changed()`` holds the lock
    from reading to writing.
    """

    def __init__(self, spec: str) -> None:
        # The spec may be long and holds commas; the directory must be short.
        self.directory = state_root() / f"{zlib.crc32(spec.encode()):08x}"
        self.path = self.directory / "state.json"
        self.spec = spec

    def exists(self) -> bool:
        """Return whether this host was ever used."""
        return self.path.exists()

    def read(self) -> SimulatedHostState | None:
        """Return the state, or None when the host was never used."""
        text = self._read_text()
        return None if text is None else self._parse_state(text)

    def _read_text(self) -> str | None:
        """Return the content of the file; None: the host was never used."""
        try:
            # A link or a FIFO there is neither followed nor waited for.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._broken_error("it is not a regular file")
                return file.readall().decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise NoPermission(
                f"cannot read the state of the simulated host in {self.directory}: {error.strerror}", _OWN_DIRECTORY
            ) from None
        except OSError as error:
            raise self._broken_error(error.strerror) from None
        except ValueError:
            raise self._broken_error("it is not text") from None

    def _parse_state(self, text: str) -> SimulatedHostState:
        try:
            raw = json.loads(text)
            SIMULATED_USERS.update({uid: name for name, uid in raw["users"].items()})
            return _build(SimulatedHostState, raw)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._broken_error("the file does not have the form that this gpushare writes") from None

    def _broken_error(self, reason: str | None) -> OperationFailed:
        """Return the error of a state file that cannot be read, with the command that starts over."""
        import shlex

        return OperationFailed(
            f"cannot read the state of the simulated host, {self.path}: {reason}",
            f"start over: rm -r {shlex.quote(str(self.directory))}",
            code="bad_sim_state",
        )

    @contextlib.contextmanager
    def changed(self) -> Iterator[SimulatedHostState]:
        """Yield the state under the lock and write it back, unless the block raises."""
        with self.locked():
            before = self._read_text()
            state = initial_state(self.spec) if before is None else self._parse_state(before)
            yield state
            after = json.dumps(state, default=vars)
            if after != before:
                with writing(self.path, "the state of the simulated host"):
                    replace_file(self.path, after)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the host's lock (flock: the kernel releases it when the process ends); NoPermission: it cannot be opened."""
        try:
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Its default is in /tmp, where anybody may have made it; GPUSHARE_SIM_DIR is the user's own choice.
            owner = os.lstat(self.directory.parent).st_uid
            if "GPUSHARE_SIM_DIR" not in os.environ and owner not in {os.geteuid(), 0}:
                raise PermissionError(errno.EPERM, f"{self.directory.parent} belongs to user {owner}")
            safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            # For its owner alone: whoever may open it can hold it, and block every command on this host.
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | safe, 0o600)
        except OSError as error:
            raise NoPermission(
                f"cannot write the state of the simulated host in {self.directory}: {error.strerror}", _OWN_DIRECTORY
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def now() -> float:
    """Return the simulated host's clock: the wall clock, in seconds."""
    return time.time()


T = TypeVar("T")
# The lists of values in a value, and what they hold.
_PARTS: Final[dict[type[Any], dict[str, type[Any]]]] = {
    SimulatedHostState: {"gpus": SimulatedGpu, "processes": SimulatedProcess, "daemons": SimulatedDaemon},
    SimulatedGpu: {"mig": SimulatedMigInstance, "bare": SimulatedGpuInstance, "vgpus": SimulatedVgpu},
    SimulatedDaemon: {"servers": SimulatedServer},
}


def _build(cls: type[T], raw: dict[str, Any]) -> T:
    """Return a value of the state from its JSON object; KeyError: its names are not the fields of the class.

    Not ``cls(**raw)``, which takes three times as long: each NVML call may read the state.
    """
    made = cls.__new__(cls)
    if raw.keys() != cls.__dataclass_fields__.keys():  # type: ignore[attr-defined]
        raise KeyError(*raw)
    vars(made).update(raw)
    for name, part in _PARTS.get(cls, {}).items():
        vars(made)[name] = [_build(part, each) for each in raw[name]]
    if isinstance(made, SimulatedGpu):
        made.nodes = {key: _build(SimulatedNode, each) for key, each in raw["nodes"].items()}
    return made


PREFIX: Final = "sim:"
MAX_GPUS: Final = 64
_PART: Final = re.compile(r"(?:([0-9]{1,9})\s*[x*]\s*)?(\S.*)", re.IGNORECASE | re.DOTALL)
_HINT: Final = "write for example sim:h200, sim:8xa100-80gb or sim:2xt4,a30; models: gpushare sim list --models"
_NAMESPACE: Final = "6f0e6c5e-2f0b-5b0c-9f5b-3a1d6a4f7c11"


class SimulatedHostSpec(NamedTuple):
    """A simulated host as its name describes it; ``text`` is canonical, equal hosts have equal texts."""

    text: str
    models: tuple[GpuModel, ...]


def parse_spec(text: str) -> SimulatedHostSpec:
    """Return the host that ``sim:[N x]MODEL[,...]`` describes; blanks and case do not matter."""
    stripped = text.strip()
    if not stripped.lower().startswith(PREFIX):
        raise BadUsage(f"'{stripped[:60]}' is not a simulated host", _HINT, code="bad_host")
    models: list[GpuModel] = []
    for part in stripped[len(PREFIX) :].split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise BadUsage("a GPU model is missing in the name of the simulated host", _HINT, code="bad_host")
        count, name = match.groups(default="1")
        model = find_model(name)
        if not 1 <= int(count) <= MAX_GPUS - len(models):
            raise BadUsage(f"a simulated host has 1 to {MAX_GPUS} GPUs", _HINT, code="bad_host")
        models.extend([model] * int(count))
    return SimulatedHostSpec(canonical_spec(models), tuple(models))


def canonical_spec(models: Sequence[GpuModel]) -> str:
    """Return the canonical name of a host with these GPUs: ``sim:8xa100-80gb,t4``."""
    parts = []
    for short, group in itertools.groupby(model.short for model in models):
        count = len(list(group))
        parts.append(short if count == 1 else f"{count}x{short}")
    return PREFIX + ",".join(parts)


def initial_state(spec: str) -> SimulatedHostState:
    """Return the state of a simulated host before its first use."""
    parsed = parse_spec(spec)
    gpus = [_new_gpu(parsed.text, index, model) for index, model in enumerate(parsed.models)]
    return SimulatedHostState(spec=parsed.text, gpus=gpus, created_at=now())


def _new_gpu(spec: str, index: int, model: GpuModel) -> SimulatedGpu:
    """Return a GPU before its first use; its UUID depends on spec and index alone, so that each start has the same GPUs."""
    # Late: only the first use of a host needs it.
    from uuid import UUID, uuid5

    mig_mode = 0 if model.mig else None
    return SimulatedGpu(
        model=model.key,
        uuid=f"GPU-{uuid5(UUID(_NAMESPACE), f'{spec}/{index}')}",
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        mig_mode=mig_mode,
        mig_pending=mig_mode,
    )


def on_gpu(process: SimulatedProcess) -> bool:
    """Return whether a process has a CUDA context on a GPU: not before it attached, and not while it is checkpointed."""
    waits_for_server = process.mps_daemon is not None and process.mps_server is None
    is_attached = process.gpu_uuid != "" and process.attach_at is None and process.refused is None
    checkpointed_or_failed = process.checkpoint in {2, 3}
    return is_attached and not waits_for_server and not checkpointed_or_failed


def settle_is_due(state: SimulatedHostState) -> bool:
    """Return whether `clients.settle` would change anything: a process died, or makes its first context now."""
    at = now()
    return any(
        (process.attach_at is not None and process.attach_at <= at) or (process.real and not lives(process))
        for process in state.processes
    )


def lives(process: SimulatedProcess) -> bool:
    """Return whether a real process lives: its PID, state and start in ``/proc/PID/stat``."""
    return identity_of(process.pid) == (process.pid, process.started)
