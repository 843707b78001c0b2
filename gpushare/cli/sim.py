"""``gpushare sim``: simulated hosts; done by `gpushare/sim/`."""

from __future__ import annotations

import signal as signals
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import typer

from gpushare.base.errors import BadUsage
from gpushare.base.selection import select_one
from gpushare.base.units import GIB, counted, format_bytes, parse_memory_limit, parse_seconds, quoted
from gpushare.cli.options import GROUP, AskingCommand, Command, argument, consented, flag, option, settings
from gpushare.gpu_models import load_models
from gpushare.memory.ledger import reservations
from gpushare.mps.daemons import own_daemon
from gpushare.plan import Loss, Plan
from gpushare.show.result import Column, Result, Table
from gpushare.sim import admin, nvidia_ctk, open_simulated
from gpushare.sim.admin import ResetResult, ShownHost, UsedHost, add_vgpu, describe, end_process, set_mig
from gpushare.sim.admin import list_hosts as used_hosts
from gpushare.sim.faults import KINDS
from gpushare.sim.state import SimulatedGpu, SimulatedHostState

GPU: Final = option("-g --gpu", "GPU", "GPU index or UUID.")
GPU_0: Final = option("-g --gpu", "GPU", "GPU index or UUID.", default="0")


@dataclass(frozen=True, kw_only=True)
class SimHostsAnswer:
    """What ``sim list`` answers."""

    hosts: tuple[UsedHost, ...]


@dataclass(frozen=True, kw_only=True)
class SimModel:
    """A GPU model that a simulated host can have, and the host with one of it."""

    host: str
    key: str
    name: str
    memory_bytes: int | None
    multiprocessors: int | None
    mig: bool
    time_slice: bool | None


@dataclass(frozen=True, kw_only=True)
class SimModelsAnswer:
    """What ``sim list --models`` answers."""

    models: tuple[SimModel, ...]


@dataclass(frozen=True, kw_only=True)
class SimResetAnswer:
    """What ``sim reset`` answers: the hosts that it removed, or in a dry run the names of those that it would remove."""

    dry_run: bool
    hosts: tuple[ResetResult | str, ...]


@dataclass(frozen=True, kw_only=True)
class SimProcessAnswer:
    """What ``sim add`` and ``sim end`` answer."""

    pid: int


def simulated_spec(given: str | None) -> str:
    """Return the name of the simulated host to work on: as given, or that of --host."""
    spec = given or settings.spec
    if not spec.startswith("sim:"):
        problem = f"'{given[:60]}' is not a simulated host" if given else "no simulated host is named"
        hint = "name one: --host sim:h200, or export GPUSHARE_HOST=sim:h200; used ones: gpushare sim list"
        raise BadUsage(problem, hint, code="no_sim_host")
    return spec


def _changed_result(spec: str, text: str) -> Result:
    """Return the result of a change of a simulated host: in words, and as data the host as it is now."""
    return Result(data=describe(spec), text=text)


def fault(
    kind: str | None = argument("[KIND]", "What fails."),
    value: str | None = argument("[VALUE]", "The value that the fault takes, if any."),
    gpu: str | None = GPU,
    clear: bool = flag("--clear", "Remove all faults; a driver version and processes (busy) stay."),
) -> Any:
    """Make something fail on a simulated host.

    Of a GPU: lost, busy, persistence-off, not-supported FIELD, refused FIELD, reset-required (a MIG mode change stays
    pending), xid N, slowed N (nvmlClocksEventReasons), power-cap WATTS, unlisted-memory SIZE. Of the host: no-driver,
    no-nvml, no-permission, blind (another PID namespace), hang PROGRAM, missing PROGRAM, user UID, driver VERSION,
    mps-version N, mismatch (library and kernel module differ), shm SIZE, host-memory SIZE, descriptors N, collide N
    (the next N connections to an MPS daemon are dropped), fail-step N (the Nth modifying NVML call from now on fails),
    crash-step N (gpushare is killed right after the Nth modifying NVML call).

    FIELD: utilization, processes, memory, mig, mig-instances, mig-placements, compute-mode, time-slice, or an entry
    point: nvml...
    """
    spec = simulated_spec(None)
    if clear == (kind is not None):
        raise BadUsage("give one fault, or --clear", f"faults: {', '.join(KINDS)}", code="bad_fault")
    if kind is None:
        admin.clear_faults(spec)
        return _changed_result(spec, f"{spec}: no faults")
    # Creates the host if no command has used it yet.
    settings.connect()
    admin.set_fault(spec, kind, gpu, value)
    words = " ".join(filter(None, [kind, value]))
    return _changed_result(spec, f"{spec}: {words}" if gpu is None else f"{spec}, GPU {gpu}: {words}")


def cdi() -> Any:
    """Install the NVIDIA Container Toolkit on a simulated host: nvidia-ctk, and a CDI specification of its GPUs."""
    host = open_simulated(simulated_spec(None))
    path = nvidia_ctk.install(host.state_file)
    return _changed_result(host.spec, f"{path} is {host.state_file.directory / path.lstrip('/')}")


app = typer.Typer(
    **GROUP,
    help="Simulated hosts: try everything, rehearse errors and run tests without a GPU.",
)
SPEC: Final = argument("[HOST]", "The simulated host. [default: --host or GPUSHARE_HOST]")


def list_hosts(
    models: bool = flag("--models", "List the GPU models that a host can have."),
) -> Any:
    """List the simulated hosts in use, or with --models the GPU models."""
    if models:
        return _models_result()
    hosts = used_hosts()
    columns = (
        Column("spec", "host", whole=True),
        Column("gpus", "GPUs", right=True),
        Column("processes", "processes", right=True),
        Column("daemons", "MPS daemons", right=True),
        Column("directory", "state", rank=1),
    )
    empty = "no simulated hosts yet; any command creates one: gpushare --host sim:h200 status"
    return Result(
        data=SimHostsAnswer(hosts=tuple(hosts)),
        tables=(Table(name="hosts", columns=columns, rows=tuple(hosts), empty=empty),),
    )


def _models_result() -> Any:
    rows = tuple(
        SimModel(
            host=f"sim:{model.short}",
            key=key,
            name=model.name,
            memory_bytes=model.memory_bytes,
            multiprocessors=model.multiprocessors,
            mig=model.mig,
            time_slice=model.time_slice,
        )
        for key, model in load_models().items()
    )
    columns = (
        Column("host", "host", whole=True),
        Column("name", "GPU"),
        Column("memory_bytes", "memory", right=True, format=format_bytes),
        Column("multiprocessors", "SMs", right=True, rank=2),
        Column("mig", "MIG", rank=1),
        Column("time_slice", "time-slice", rank=3),
    )
    return Result(data=SimModelsAnswer(models=rows), tables=(Table(name="models", columns=columns, rows=rows),))


def show(host: str | None = SPEC) -> Any:
    """Show a simulated host: its GPUs, and what differs from a new one. Its processes are in `status`."""
    shown = describe(simulated_spec(host))
    return Result(data=shown, text=_state_text(shown))


# Fields that `sim show` leaves out: what every host has, or is shown by another name.
_HIDDEN_OF_HOST: Final = frozenset({"spec", "gpus", "fault_uid", "next_pid", "created_at"})
# The same of a GPU: what every GPU has of its own, and what `mig status` shows.
_HIDDEN_OF_GPU: Final = frozenset({"model", "uuid", "pci_bus_id", "mig_mode", "mig_pending", "mig", "bare", "nodes"})


def _state_text(host: ShownHost) -> str:
    """Return a simulated host as lines: driver, user, and what differs from a new host."""
    facts = {"driver": host.driver, "commands run as": "root" if host.root else f"user {host.uid}"}
    for index, gpu in enumerate(host.gpus):
        facts[f"GPU {index}"] = ", ".join([gpu.model, *_changed_fields(gpu, SimulatedGpu("", "", ""), _HIDDEN_OF_GPU)])
    facts |= {
        "host": ", ".join(_changed_fields(host, SimulatedHostState(""), _HIDDEN_OF_HOST)),
        "state": host.directory,
    }
    width = max(map(len, facts))
    return "\n".join([host.spec, *(f"  {name:<{width}}  {value}" for name, value in facts.items() if value)])


def _changed_fields(
    shown: SimulatedGpu | SimulatedHostState, fresh: SimulatedGpu | SimulatedHostState, hidden: Collection[str]
) -> Iterator[str]:
    """Yield the fields that differ from those of a fresh GPU or host, without the hidden ones; of processes the PIDs."""
    for name, usual in vars(fresh).items():
        value = getattr(shown, name)
        if name in hidden or value == usual:
            continue
        if name in {"processes", "daemons"}:
            value = [entry.pid for entry in value]
        yield f"{name.replace('_', ' ')} {value}"


def reset(
    host: str | None = SPEC,
    everything: bool = flag("--all", "All simulated hosts of this user."),
) -> Any:
    """Delete a simulated host with its state and its simulated processes.

    Jobs on it are real programs: those that run or wait are left alone, and gpushare prints the command that ends them.
    """
    specs = [used.spec for used in admin.list_hosts()] if everything else [simulated_spec(host)]
    if everything and specs:
        hosts = f"{counted(len(specs), 'simulated host')}: {', '.join(specs)}"
        consented(Plan(title="delete all hosts", steps=(), consent=(Loss(action="deletes", what=hosts),)))
    if settings.dry_run:
        return Result(
            data=SimResetAnswer(dry_run=True, hosts=tuple(specs)),
            text=f"would delete {', '.join(specs) or 'nothing'}",
        )
    deleted = []
    for spec in specs:
        # The ledger goes with the host; a job that waits has no program on it yet.
        waiting = tuple(job.claim.pid for job in reservations(open_simulated(spec)) or () if job.waits)
        done = admin.reset(spec)
        deleted.append(replace(done, left_alone=(*done.left_alone, *waiting)))
    left_alone = " ".join(str(pid) for each in deleted for pid in each.left_alone)
    notes = (f"real programs and waiting jobs were left running; end them: kill {left_alone}",) if left_alone else ()
    text = f"{', '.join(each.spec for each in deleted)}: reset" if deleted else "no simulated hosts to reset"
    return Result(data=SimResetAnswer(dry_run=False, hosts=tuple(deleted)), done=((text, None),), notes=notes)


def add(
    gpu: str | None = GPU_0,
    memory: str | None = option("--memory", "SIZE", "Its memory. [default: 1G; of a holder: 0]"),
    sm: int = option("--sm", "PCT", "SM % while it is busy.", default=50, min=0, max=100),
    name: str = option("--name", "NAME", "Its program.", default="python3"),
    user: str | None = option("--user", "USER", "Its owner: any name, or an id."),
    queue: str = option("--queue", "TIME", "How long its queued work takes: 110ms.", default="0"),
    graphics: bool = flag("--graphics", "A graphics process."),
    mps: bool = flag("--mps", "A client of gpushare's MPS daemon on that GPU."),
    instance: str | None = option("--mig", "INSTANCE", "MIG UUID or GPU instance id."),
    command: str | None = option("--command", "LINE", "Its command line. [default: its program]"),
    container: str | None = option("--container", "ID", "Its container."),
    holder: bool = flag("--holder", "It has no CUDA context, only open device nodes."),
) -> Any:
    """Put a simulated process on a simulated GPU and print its PID.

    A holder is not in NVML's process lists, but keeps a GPU, or with --mig an instance, in use, as DCGM does:
    --holder --name nv-hostengine. With --memory it has allocations, as a profiler does.
    """
    spec = simulated_spec(None)
    host = settings.connect()
    gpus = host.nvml.identities()
    if instance is not None and instance.isdigit():
        # The id of a GPU instance: use the UUID of its first device. An unknown id is left for `add_process` to refuse.
        instances = (each for each in select_one(gpu, gpus).gpu.mig_instances if each.gpu_instance_id == int(instance))
        instance = next((each.uuid for each in instances), instance)
    device = select_one(instance if instance and instance.startswith("MIG-") else gpu, gpus)
    if instance is None and device.mig is not None:
        instance = device.mig.uuid
    environment: dict[str, str] = {}
    if mps:
        home, _ = own_daemon(host, device)
        environment["CUDA_MPS_PIPE_DIRECTORY"] = str(home.pipe)
    memory_bytes = 0 if holder else GIB
    if memory:
        memory_bytes = parse_memory_limit(memory)
    pid = admin.add_process(
        spec,
        str(device.gpu.index),
        memory_bytes=memory_bytes,
        sm_percent=sm,
        name=name,
        user=user,
        queue_seconds=parse_seconds(queue),
        graphics=graphics,
        mps=mps,
        mig=instance,
        environment=environment,
        holder=holder,
        command_line=() if command is None else command.split(),
        container=container,
    )
    return Result(data=SimProcessAnswer(pid=pid), text=str(pid))


# What they do to a client of MPS and to its neighbours is known; of others it is not.
_SIGNALS: Final = ("KILL", "TERM", "INT", "HUP", "QUIT", "ABRT", "STOP", "CONT")
_SIGNALS_TEXT: Final = f"{', '.join(_SIGNALS[:-1])} or {_SIGNALS[-1]}"


def end(
    pid: int = argument("PID", "The PID that `sim add` printed.", default=...),
    signal: str | None = option("--signal", "NAME", f"{_SIGNALS_TEXT}. [default: it ends by itself]"),
) -> Any:
    """End a simulated process, by itself or by a signal, with the consequences under MPS."""
    number = None
    if signal is not None:
        name = signal.upper().removeprefix("SIG")
        if name not in _SIGNALS:
            problem = f"{quoted(signal)} is not a signal that the simulation has"
            raise BadUsage(problem, f"give {_SIGNALS_TEXT}", code="bad_signal")
        number = signals.Signals[f"SIG{name}"]
    end_process(simulated_spec(None), pid, number)
    return Result(
        data=SimProcessAnswer(pid=pid),
        text=f"process {pid}: {'ended' if number is None else number.name}",
    )


def mig(
    instances: list[str] | None = argument("[PROFILE[:START]...]"),
    gpu: str | None = GPU_0,
) -> Any:
    """Give a simulated GPU exactly these MIG instances (3g.71gb 1g.18gb:4); without any, switch MIG off."""
    names = instances or []
    set_mig(simulated_spec(None), gpu or "0", names)
    text = f"GPU {gpu}: {', '.join(names)}" if names else f"GPU {gpu}: MIG off"
    return _changed_result(simulated_spec(None), text)


def vgpu(
    kind: str = argument("TYPE", default=...),
    gpu: str | None = GPU_0,
    memory: str = option("--memory", "SIZE", "The memory of the type.", default="16G"),
    vm: str = option("--vm", "NAME", "The virtual machine.", default="vm1"),
) -> Any:
    """Let a virtual machine use a vGPU of a type ('NVIDIA H200-35C'), and print its UUID."""
    spec = simulated_spec(None)
    return _changed_result(spec, add_vgpu(spec, gpu or "0", kind, vm, parse_memory_limit(memory)))


app.command(cls=Command, short_help="Make something fail.")(fault)
app.command(cls=Command, short_help="Install the container toolkit.")(cdi)
app.command("list", cls=Command, short_help="List used hosts, or all GPU models.")(list_hosts)
app.command(cls=Command, short_help="Show the state of a host.")(show)
app.command(cls=AskingCommand, short_help="Delete a host.")(reset)
app.command(cls=Command, short_help="Put a simulated process on a GPU.")(add)
app.command(cls=Command, short_help="End a simulated process.")(end)
app.command(cls=Command, short_help="Give a GPU MIG instances.")(mig)
app.command(cls=Command, short_help="Let a virtual machine use a vGPU.")(vgpu)
