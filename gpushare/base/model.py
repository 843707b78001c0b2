"""The vocabulary: a host with GPUs. Frozen, pure; unknown is None everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from enum import Enum, IntEnum
from typing import ClassVar, Final, Literal

from gpushare.base.values import NOT_STORED, dataclass


class ComputeMode(IntEnum):
    """Compute mode of a GPU (nvmlComputeMode_t; ``nvidia-smi -q -d COMPUTE``)."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3

    @property
    def title(self) -> str:
        """Return the name as users read it: ``exclusive-process``."""
        return self.name.lower().replace("_", "-")


class TimeSlice(IntEnum):
    """Time-slice level (``nvidia-smi compute-policy --set-timeslice``). NVIDIA publishes no durations."""

    DEFAULT = 0
    SHORT = 1
    MEDIUM = 2
    LONG = 3

    @property
    def title(self) -> str:
        return self.name.lower()


class Way(str, Enum):
    """A way of sharing: in force on a GPU, asked for by a file, advised, measured or tuned; the simplest first."""

    WHOLE = "whole-gpu"
    TURNS = "turns"
    SWAP = "swap"
    STREAMS = "streams"
    TIMESLICE = "timeslice"
    SLICES = "slices"
    MPS = "mps"
    MPS_PRIORITY = "mps-priority"
    MPS_STATIC = "mps-static"
    MIG = "mig"
    VGPU = "vgpu"
    MIG_MPS = "mig+mps"
    MIG_TIMESLICE = "mig+timeslice"
    MPS_STREAMS = "mps+streams"
    MEASURE = "measure"
    FIX = "fix-app"
    # The rest is never advised. By the compute mode: one process at a time, or none.
    EXCLUSIVE = "exclusive"
    PROHIBITED = "prohibited"
    # Programs outside MPS take turns with all clients of MPS together; only `sharing_now` tells it from MPS.
    MPS_TIMESLICE = "mps+timeslice"
    # Thread caps of `tune`, and threads of one process in `bench`.
    CAPS = "caps"
    THREADS = "threads"

    @property
    def label(self) -> str:
        return _LABELS[self]

    @property
    def outer(self) -> Way | None:
        """Return the way that divides the GPU into parts, a column of the table of `compare`; None if nothing is shared."""
        return _OUTER.get(self)

    @property
    def inner(self) -> Way | None:
        """Return how the programs within one part share it, as MPS does within a MIG instance; None: only one level."""
        return _INNER.get(self)

    @property
    def table_option(self) -> str | None:
        """Return the key of a way that `compare` lists as an option of its `outer` way: ``static`` of MPS; None: it is none."""
        return {Way.MPS_STATIC: "static", Way.VGPU: "mig-backed", Way.SLICES: "slices"}.get(self)


_LABELS: Final = {
    Way.WHOLE: "whole GPU, or a queue",
    Way.TURNS: "turns, each with the whole GPU",
    Way.SWAP: "swap to host memory",
    Way.STREAMS: "CUDA streams",
    Way.TIMESLICE: "time-slicing",
    Way.SLICES: "time-slicing with a slice per process",
    Way.MPS: "MPS",
    Way.MPS_PRIORITY: "MPS with priority and a cap",
    Way.MPS_STATIC: "MPS static partitions",
    Way.MIG: "MIG",
    Way.VGPU: "vGPU",
    Way.MIG_MPS: "MIG with MPS inside",
    Way.MIG_TIMESLICE: "MIG with time-slicing inside",
    Way.MPS_STREAMS: "MPS, with streams inside",
    Way.MEASURE: "measure it",
    Way.FIX: "fix the application first",
    Way.EXCLUSIVE: "exclusive",
    Way.PROHIBITED: "prohibited",
    Way.MPS_TIMESLICE: "MPS + time-slicing",
    Way.CAPS: "thread caps",
    Way.THREADS: "threads",
}
_OUTER: Final = {
    **{way: way for way in (Way.STREAMS, Way.TIMESLICE, Way.MPS, Way.MIG, Way.VGPU)},
    Way.SLICES: Way.TIMESLICE,
    **dict.fromkeys((Way.MPS_PRIORITY, Way.MPS_STATIC, Way.MPS_STREAMS), Way.MPS),
    **dict.fromkeys((Way.MIG_MPS, Way.MIG_TIMESLICE), Way.MIG),
}
_INNER: Final = {Way.MIG_MPS: Way.MPS, Way.MIG_TIMESLICE: Way.TIMESLICE, Way.MPS_STREAMS: Way.STREAMS}


# Of a GPU as it is, as gpushare.yaml asks for it, of a job, and of a setting of `tune`.
WayInForce = Literal[Way.TIMESLICE, Way.MPS, Way.MPS_TIMESLICE, Way.MIG, Way.EXCLUSIVE, Way.PROHIBITED]
FileWay = Literal[Way.EXCLUSIVE, Way.TIMESLICE, Way.MPS, Way.MIG]
JobWay = Literal[Way.MPS, Way.MIG, Way.MIG_MPS, Way.TIMESLICE]
TunedWay = Literal[Way.SLICES, Way.CAPS]


class Priority(IntEnum):
    """MPS client priority (``set_default_client_priority``); a hint to the hardware."""

    NORMAL = 0
    LOW = 1

    @property
    def title(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """One process on one GPU (``nvidia-smi pmon``). ``sm_percent`` 0 is idle, None is unknown."""

    pid: int
    compute: bool = False
    graphics: bool = False
    mps: bool = False
    user: str | None = None
    name: str | None = None
    command_line: tuple[str, ...] | None = None
    # When it started, in clock ticks since boot.
    started: int | None = None
    # The same in seconds since 1970.
    started_at: float | None = None
    container: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_used_bytes: int | None = None
    sm_percent: int | None = None
    # When gpushare last saw it work on the GPU, in seconds since 1970; only `status` and `metrics` look for it.
    last_work_at: float | None = None
    # Since when `gpushare pause` keeps it off the GPU, in seconds since 1970; None: it is not paused.
    paused_since: float | None = None
    # The time-slice that gpushare has set, in microseconds; None: it has set none.
    slice_us: int | None = None
    # The name of its job. Only `status` has this and the next three fields. None: no job, or, without root, another user's.
    job: str | None = None
    role: str | None = None
    way: JobWay | None = None
    threads_percent: float | None = None
    json_properties: ClassVar = ("type",)

    @property
    def type(self) -> str:
        """Return nvidia-smi's letters: ``C``, ``G``, ``C+G``, ``M+C``."""
        letters = [
            letter for letter, on in (("M", self.mps), ("C", self.compute or self.mps), ("G", self.graphics)) if on
        ]
        return "+".join(letters)


def memory_held(processes: Iterable[GpuProcess]) -> int | None:
    """Return the bytes that processes hold together on their GPU; None: there are none, or that of one is unknown."""
    sizes = [process.memory_used_bytes for process in processes]
    return None if not sizes or None in sizes else sum(size or 0 for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds an instance or a GPU without being in NVML's lists: by an open file or a lease."""

    pid: int
    # What it holds: /dev/nvidia-caps/nvidia-cap12, /dev/nvidia0, or "lease" (of `gpushare run --mig`).
    what: str
    user: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class MigInstance:
    """One MIG device: a compute instance in its GPU instance (``nvidia-smi -L``)."""

    uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    profile: str | None = None
    # As `gpushare mig name` gave it. None: none that this user sees.
    name: str | None = None
    multiprocessors: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    # Memory that jobs have reserved on it; only `status` and `metrics` look for it.
    jobs_reserved_bytes: int | None = None

    def has(self, process: GpuProcess) -> bool:
        """Return whether a process is on it; if the compute instance is unknown, the GPU instance decides."""
        if process.gpu_instance_id != self.gpu_instance_id:
            return False
        return process.compute_instance_id in {None, self.compute_instance_id}


@dataclass(frozen=True, kw_only=True)
class MpsClient:
    """One client of an MPS server (``ps`` of nvidia-cuda-mps-control)."""

    pid: int
    server_pid: int | None = None
    name: str | None = None
    user: str | None = None
    # The limit in force: the smaller of its own and that of the server when the client attached.
    threads_percent: float | None = None
    memory_limit_bytes: int | None = None
    priority: Priority | None = None
    # What it would get if it attached now.
    next_threads_percent: float | None = None
    next_memory_limit_bytes: int | None = None
    next_priority: Priority | None = None


@dataclass(frozen=True, kw_only=True)
class MpsServer:
    """One MPS server: one user's clients (``get_server_list``, ``get_server_status``)."""

    pid: int
    user: str | None = None
    status: str | None = None
    threads_percent: float | None = None
    clients: tuple[MpsClient, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MpsDaemon:
    """One MPS control daemon. ``ours`` is False for one that gpushare did not start."""

    pid: int | None
    ours: bool
    pipe_directory: str | None
    log_directory: str | None = None
    device_uuid: str | None = None
    # The first GPU that it serves; None: unknown.
    gpu_index: int | None = None
    # All GPUs that it serves; empty: unknown.
    gpu_indexes: tuple[int, ...] = ()
    user: str | None = None
    version: str | None = None
    threads_percent: float | None = None
    memory_limit_bytes: int | None = None
    priority: Priority | None = None
    max_clients: int | None = None
    servers: tuple[MpsServer, ...] = ()
    # Started by `gpushare run`, and stopped with its last client.
    transient: bool = False
    # Why the daemon did not answer; None: it did, or was not asked.
    error: str | None = None
    # Anything else to know: it was not asked, or its start was interrupted.
    note: str | None = None

    @property
    def unasked(self) -> bool:
        """Return whether it was not asked because it belongs to another user."""
        # Every daemon that answers has a thread percentage.
        return not self.ours and self.note is not None and self.threads_percent is None

    @property
    def clients(self) -> tuple[MpsClient, ...]:
        return tuple(client for server in self.servers for client in server.clients)


# The program of an MPS server.
MPS_SERVER: Final = "nvidia-cuda-mps-server"
# The note on a GPU whose MIG devices are hidden.
HIDDEN_DEVICES: Final = (
    "the driver hides the MIG devices from this user: run as root, or let root grant access to "
    "/dev/nvidia-caps/nvidia-cap2 (mig/monitor)"
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as NVML reports it. If it does not answer, ``error`` is set and the rest is unknown."""

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    # Memory that the driver keeps for itself.
    memory_reserved_bytes: int | None = None
    # Memory that jobs have reserved; only `status` and `metrics` look for it.
    jobs_reserved_bytes: int | None = None
    utilization_percent: int | None = None
    # The power that it draws now; only `status` with -o json, `metrics` and `doctor` read it.
    power_watts: float | None = None
    # The power limit in force; read as power_watts is.
    power_limit_watts: float | None = None
    compute_mode: ComputeMode | None = None
    mig_capable: bool | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None
    time_slice: TimeSlice | None = None
    mig_instances: tuple[MigInstance, ...] = ()
    # NVML hides MIG devices: an empty list does not mean that there are none.
    mig_hidden: bool = field(default=False, metadata=NOT_STORED)
    # None: unknown; empty: no processes.
    processes: tuple[GpuProcess, ...] | None = None
    error: str | None = None

    @property
    def unlisted_bytes(self) -> int | None:
        """Return the memory in use that no process in NVML's lists has; None: unknown.

        The driver needs some for each context and MIG instance. More than `MUCH_UNLISTED` is of processes that are gone,
        or whose memory the driver keeps for them.
        """
        sizes = [process.memory_used_bytes for process in self.processes or ()]
        if self.memory_used_bytes is None or self.processes is None or None in sizes:
            return None
        return max(0, self.memory_used_bytes - sum(size or 0 for size in sizes))


# Unlisted memory above this is worth a word.
MUCH_UNLISTED: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class GpuLease:
    """A GPU that a user has reserved for some hours (`gpushare reserve`)."""

    gpu_uuid: str
    uid: int
    user: str
    seconds_left: float
    # For how long the user has had it, renewals included.
    held_seconds: float


@dataclass(frozen=True, kw_only=True)
class LinePlace:
    """Where a job waits: ``place`` counts from 1 among those for the same devices.

    ``memory_bytes`` None: it waits for a device without other jobs. ``behind`` are the jobs before it in the line, and
    ``held_by`` those that have a place on its devices: names, or PIDs of jobs without one. ``others_bytes`` is what other
    programs use on the device where they use the most; None: unknown.
    """

    place: int
    memory_bytes: int | None
    behind: tuple[str, ...]
    held_by: tuple[str, ...]
    others_bytes: int | None = None
    # How many of its GPUs it needs at the same time, with memory_bytes on each.
    count: int = 1
    # Its gpushare is stopped (Ctrl-Z): the line skips it until it continues.
    stopped: bool = False
    # Its devices that do not answer now, so that the indexes of their GPUs are unknown.
    lost_uuids: tuple[str, ...] = ()


# The state of a job that waits for room.
WAITING: Final = "waiting"


@dataclass(frozen=True, kw_only=True)
class ListedJob:
    """One job as `gpushare jobs` lists it; or a process that gpushare did not start, which has no name.

    ``state`` is running, waiting, paused, ended, or for a swapped job leaving, out, returning or lost; ``since_seconds``
    is how long it has been so. ``pid`` is its program, or its gpushare while it waits; None: it has ended.
    """

    name: str | None
    pid: int | None
    state: str
    user: str | None
    # production, opportunistic or plain; None: it is not a job, or, without root, another user's.
    role: str | None
    device: str | None
    gpu_indexes: tuple[int, ...] = ()
    device_uuids: tuple[str, ...] = ()
    # timeslice: outside MPS. None: it waits or has ended.
    way: JobWay | None = None
    mig_profile: str | None = None
    # As `gpushare mig name` gave it.
    mig_name: str | None = None
    threads_percent: float | None = None
    slice_us: int | None = None
    # Device memory that its processes hold together.
    memory_used_bytes: int | None = None
    # The memory limit of the job on each of its devices; null: it has none. MPS limits each process: see `mps status`.
    memory_limit_bytes: int | None = None
    # What it holds in host memory while it is swapped out.
    swapped_bytes: int | None = None
    sm_percent: int | None = None
    since_seconds: float | None = None
    command: str | None = None
    container: str | None = None
    # The PIDs of its processes on GPUs.
    processes: tuple[int, ...] = ()
    line: LinePlace | None = None
    # The exit code of a job that has ended; None: its program was not started, or its gpushare was killed.
    exit_code: int | None = None
    # Whether the program of a job that has ended was started.
    started: bool | None = None
    ran_seconds: float | None = None
    # The most that its processes held together, on the first of its GPUs; for a farm, the copy that held the most.
    memory_peak_bytes: int | None = None

    @property
    def whole_limit_bytes(self) -> int | None:
        """What it may hold on all its devices together."""
        return None if self.memory_limit_bytes is None else self.memory_limit_bytes * max(1, len(self.device_uuids))


@dataclass(frozen=True, kw_only=True)
class GpuSensors:
    """What a GPU measures of itself at one moment; only `top` and `observe` ask for it.

    ``slowed_by`` are the reasons for lowered clocks that do harm (power, heat, the power supply); empty: there is none.
    The traffic over PCIe is in bytes per second, ``received`` by the GPU.
    """

    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    fan_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    pcie_received: int | None = None
    pcie_sent: int | None = None
    slowed_by: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class VgpuSession:
    """A vGPU that a virtual machine uses, on a hypervisor with NVIDIA's vGPU driver."""

    gpu_index: int
    id: int
    uuid: str | None = None
    # As NVIDIA names it: "NVIDIA H200-35C".
    type: str | None = None
    # The id that the hypervisor gives: a domain or a UUID.
    vm: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A host as shown by status: GPUs, MPS daemons, and warnings about what could not be read."""

    host: str
    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    daemons: tuple[MpsDaemon, ...] = ()
    warnings: tuple[str, ...] = ()
    taken_at: float | None = None
    # Only `status` and `metrics` look for these.
    waiting_jobs: tuple[ListedJob, ...] = ()
    swapped_jobs: tuple[ListedJob, ...] = ()
    leases: tuple[GpuLease, ...] = ()
    vgpu_sessions: tuple[VgpuSession, ...] = ()


def device_key(uuid: str) -> str:
    """Return the short name of a device for directories and units: ``gpu-0d54321e-5f2c91aa``.

    It ends in a CRC of the whole UUID, because some virtual and mocked GPUs share the first digits.
    """
    import zlib

    kind, _, rest = uuid.lower().partition("-")
    return f"{kind}-{rest[:8]}-{zlib.crc32(uuid.lower().encode()):08x}"


def way_in_force(gpu: Gpu, daemons: tuple[MpsDaemon, ...]) -> WayInForce | None:
    """Return the way of sharing in force on a GPU; None when it is unknown.

    Without any setup the driver time-slices (compute mode default).
    """
    if gpu.error is not None:
        return None
    if gpu.mig_enabled:
        return Way.MIG
    if gpu.compute_mode is ComputeMode.PROHIBITED:
        return Way.PROHIBITED
    # Including one that hangs or is stopped: its clients still have the GPU.
    live = [daemon for daemon in daemons if daemon.pid is not None]
    if any(gpu.index in (daemon.gpu_index, *daemon.gpu_indexes) for daemon in live):
        return Way.MPS
    unreadable = any(daemon.pipe_directory is None for daemon in live)
    if unreadable and any(process.mps for process in gpu.processes or ()):
        return Way.MPS
    if gpu.compute_mode in {ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD}:
        return Way.EXCLUSIVE
    # A daemon whose environment cannot be read may serve this GPU.
    return None if gpu.compute_mode is None or unreadable else Way.TIMESLICE


def outside_mps(gpu: Gpu, daemons: tuple[MpsDaemon, ...]) -> set[int]:
    """Return the PIDs of the compute processes on a GPU that are neither clients nor servers of MPS."""
    servers = {server.pid for daemon in daemons for server in daemon.servers}
    clients = {client.pid for daemon in daemons for client in daemon.clients}
    # A starting server is not in its daemon's list yet.
    others = {
        process.pid
        for process in gpu.processes or ()
        if process.compute and not process.mps and process.name != MPS_SERVER
    }
    return others - servers - clients


def sharing_now(gpu: Gpu, daemons: tuple[MpsDaemon, ...]) -> WayInForce | None:
    """Return `way_in_force`, but MPS_TIMESLICE where programs run outside MPS right now."""
    way = way_in_force(gpu, daemons)
    return Way.MPS_TIMESLICE if way is Way.MPS and outside_mps(gpu, daemons) else way
