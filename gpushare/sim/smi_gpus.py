"""nvidia-smi of a simulated host without a subcommand, and ``pmon``: options, listings, queries, modes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpushare.gpu_models import GpuModel, model_of
from gpushare.sim import activity, library_mig
from gpushare.sim.activity import Resident
from gpushare.sim.devices import forget_gone
from gpushare.sim.mps_servers import binary_version, driver_major
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Handle, HandleKind, Refused, Target
from gpushare.sim.processes import holding
from gpushare.sim.smi_options import BAD_IDS, NO_DEVICES, Wrong, read_number
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, SimulatedMigInstance
from gpushare.units import MIB
from gpushare.values import dataclass


@dataclass(frozen=True)
class Chosen:
    """One GPU that the command names, with its index and model."""

    index: int
    gpu: SimulatedGpu
    model: GpuModel

    def target(self, instance: SimulatedMigInstance | None = None) -> Target:
        """Return it as the simulated NVML counts it, or one of its MIG devices."""
        return Target(Handle(HandleKind.GPU, self.index), self.gpu, self.model, instance)

    @property
    def mig_enabled(self) -> bool:
        """Return whether it is in MIG mode."""
        return self.gpu.mig_mode == 1


def choose(state: SimulatedHostState, ids: str | None) -> list[Chosen]:
    """Return the GPUs that ``-i`` names: indices, UUIDs, bus ids, with commas; all when it is not given."""
    wanted = None if ids is None else [part.strip() for part in ids.split(",")]
    found = [Chosen(index, gpu, model_of(gpu.model)) for index, gpu in enumerate(state.gpus)]
    if wanted is None:
        return found
    return [one for one in found if any(_names(one, part) for part in wanted)]


def _names(one: Chosen, part: str) -> bool:
    bus = one.gpu.pci_bus_id.upper()
    return part in {str(one.index), one.gpu.uuid} or part.upper() in {bus, bus[4:], bus[9:]}


def memory_mib(
    state: SimulatedHostState, one: Chosen, instance: SimulatedMigInstance | None = None
) -> tuple[int, int, int] | None:
    """Return total, reserved and used MiB, or None where NVML does not tell."""
    if supports(one, "nvmlDeviceGetMemoryInfo"):
        try:
            total, reserved, used = activity.memory_of(state, one.target(instance))
        except Refused:
            return None
        return total // MIB, reserved // MIB, used // MIB
    return None


def utilization(state: SimulatedHostState, one: Chosen) -> int | None:
    """Return the GPU's utilization in percent; None with MIG on, or where NVML does not tell."""
    if one.mig_enabled or not supports(one, "nvmlDeviceGetUtilizationRates"):
        return None
    return round(activity.utilization(state, one.target()))


def residents(state: SimulatedHostState, one: Chosen) -> list[activity.Resident]:
    """Return the processes on the GPU; none if NVML is in another PID namespace."""
    shown = state.pid_namespace_is_host and supports(one, "nvmlDeviceGetComputeRunningProcesses")
    return activity.residents(state, one.target()) if shown else []


def supports(one: Chosen, entry_point: str) -> bool:
    """Return whether an NVML entry point works on this GPU (fault ``not-supported``)."""
    return not any(name.startswith(entry_point) for name in one.gpu.not_supported)


def lost_text(one: Chosen) -> str:
    """Return what nvidia-smi says of a GPU that fell off the bus."""
    return (
        f"Unable to determine the device handle for GPU{one.index}: {one.gpu.pci_bus_id}: GPU is lost.  "
        "Reboot the system to recover this GPU\n"
    )


_MODE_TITLES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "pid": "pid",
    "process_name": "process_name",
}
_APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}
_Value = Callable[[SimulatedHostState, Chosen], object]


def _memory(position: int) -> _Value:
    def value(state: SimulatedHostState, one: Chosen) -> object:
        found = memory_mib(state, one)
        return None if found is None else found[position]

    return value


def _free(state: SimulatedHostState, one: Chosen) -> object:
    found = memory_mib(state, one)
    return None if found is None else found[0] - found[1] - found[2]


def _power_limit(_state: SimulatedHostState, one: Chosen) -> object:
    limit = one.model.power_limit_watts
    return None if limit is None else f"{limit:.2f}"


def _power(state: SimulatedHostState, one: Chosen) -> object:
    watts = activity.power_watts(state, one.target())
    return None if watts is None else f"{round(watts):.2f}"


def _mig_title(mode: int | None) -> object:
    return None if mode is None else ("Disabled", "Enabled")[mode]


# Field: unit and value; None is [N/A].
_GPU_FIELDS: dict[str, tuple[str, _Value]] = {
    "timestamp": (
        "",
        lambda _state, _one: time.strftime("%Y/%m/%d %H:%M:%S") + f".{int(time.time() * 1000) % 1000:03d}",
    ),
    "driver_version": ("", lambda state, _one: state.driver),
    "count": ("", lambda state, _one: len(state.gpus)),
    "index": ("", lambda _state, one: one.index),
    "name": ("", lambda _state, one: one.model.name),
    "uuid": ("", lambda _state, one: one.gpu.uuid),
    "pci.bus_id": ("", lambda _state, one: one.gpu.pci_bus_id),
    "compute_cap": ("", lambda _state, one: one.model.compute_capability),
    "compute_mode": ("", lambda _state, one: _MODE_TITLES[one.gpu.compute_mode]),
    "persistence_mode": ("", lambda _state, one: "Enabled" if one.gpu.persistence else "Disabled"),
    "mig.mode.current": ("", lambda _state, one: _mig_title(one.gpu.mig_mode)),
    "mig.mode.pending": ("", lambda _state, one: _mig_title(one.gpu.mig_pending)),
    "memory.total": ("MiB", _memory(0)),
    "memory.reserved": ("MiB", _memory(1)),
    "memory.used": ("MiB", _memory(2)),
    "memory.free": ("MiB", _free),
    "utilization.gpu": ("%", utilization),
    "temperature.gpu": ("", lambda state, one: activity.temperature_celsius(state, one.target())),
    "power.draw": ("W", _power),
    "power.limit": ("W", _power_limit),
}
_APP_FIELDS = ("timestamp", "gpu_name", "gpu_bus_id", "gpu_uuid", "pid", "process_name", "used_gpu_memory")


def check(query: str, fields: str, form: str | None, major: int) -> None:
    """Check what a query asks for, before any GPU is looked at."""
    words = [word.strip() for word in (form or "").split(",") if word.strip()]
    if form is None and major < 580:
        raise Wrong(2, "\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n\n")
    if set(words) - {"csv", "noheader", "nounits"}:
        raise Wrong(2, "Format modifier is not recognized.\n")
    if "csv" not in words and major < 580:
        raise Wrong(2, "Format modifier --format=csv is mandatory.\n")
    known = _GPU_FIELDS.keys() if query == "--query-gpu" else set(_APP_FIELDS)
    for name in _query_names(fields):
        if _ALIASES.get(name, name) not in known and _APP_ALIASES.get(name, name) not in known:
            raise Wrong(2, f'Field "{name}" is not a valid field to query.\n\n')


def _query_names(fields: str) -> list[str]:
    return [name.strip() for name in fields.split(",") if name.strip()]


def gpus(state: SimulatedHostState, chosen: list[Chosen], fields: str, form: str) -> str:
    """Return the text of ``--query-gpu=FIELDS --format=csv[,noheader][,nounits]``."""
    names = _query_names(fields)
    header = [(name, _GPU_FIELDS[_ALIASES.get(name, name)][0]) for name in names]
    rows = [[_GPU_FIELDS[_ALIASES.get(name, name)][1](state, one) for name in names] for one in chosen]
    return _csv(header, rows, form)


def compute_apps(state: SimulatedHostState, chosen: list[Chosen], fields: str, form: str) -> str:
    """Return the text of ``--query-compute-apps``: MPS servers and clients are both in it."""
    names = [_APP_ALIASES.get(name, name) for name in _query_names(fields)]
    titles = activity.process_names(state)
    rows: list[list[object]] = []
    for one in chosen:
        for resident in residents(state, one):
            if resident.graphics:
                continue
            values: dict[str, object] = {
                "pid": resident.pid,
                "process_name": titles.get(resident.pid, "[Not Found]"),
                "used_gpu_memory": resident.memory_bytes // MIB,
            }
            rows.append(
                [
                    values[name] if name in values else _GPU_FIELDS[_ALIASES.get(name, name)][1](state, one)
                    for name in names
                ]
            )
    return _csv([(name, "MiB" if name == "used_gpu_memory" else "") for name in names], rows, form)


def _csv(header: list[tuple[str, str]], rows: list[list[object]], form: str) -> str:
    words = [word.strip() for word in form.split(",")]
    units = "nounits" not in words
    lines = []
    if "noheader" not in words:
        lines.append(", ".join(f"{name} [{unit}]" if unit else name for name, unit in header))
    for row in rows:
        cells = []
        for (_, unit), value in zip(header, row, strict=True):
            text = "[N/A]" if value is None else str(value)
            cells.append(f"{text} {unit}" if unit and units and value is not None else text)
        lines.append(", ".join(cells))
    return "".join(f"{line}\n" for line in lines)


_WIDE = "+-----------------------------------------------------------------------------------------+\n"
_TABLE_RULE = "+-----------------------------------------+------------------------+----------------------+\n"
_HEAD = """\
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
"""
_MIG_RULE = "+------------------+----------------------------------+-----------+-----------------------+\n"
_MIG_HEAD = """\
| MIG devices:                                                                            |
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |
|      ID  ID  Dev |                Shared BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |
|                  |                                  |        ECC|                       |
|==================+==================================+===========+=======================|
"""
_PROCESS_HEAD = """\
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
"""
_NOBODY = "|  No running processes found                                                             |\n"
_MODE_TEXTS = {0: "Default", 1: "E. Thread", 2: "Prohibited", 3: "E. Process"}
_NAME_WIDTH = 36


def gpu_listing(chosen: list[Chosen]) -> str:
    """Return ``nvidia-smi -L``: GPUs and their MIG devices with UUIDs."""
    text = ""
    for one in chosen:
        if one.gpu.lost:
            text += lost_text(one)
            continue
        text += f"GPU {one.index}: {one.model.name} (UUID: {one.gpu.uuid})\n"
        for number, instance in enumerate(one.gpu.mig if one.mig_enabled else []):
            name = activity.device_name(one.target(), instance)
            text += f"  MIG {name:<11} Device {number:>2}: (UUID: {instance.uuid})\n"
    return text


def summary(state: SimulatedHostState, chosen: list[Chosen]) -> str:
    """Return the table of ``nvidia-smi`` without arguments."""
    binary = binary_version(state.driver)
    cuda = f"{binary // 1000}.{binary % 1000 // 10}"
    title = f"| NVIDIA-SMI {state.driver:<22} Driver Version: {state.driver:<14} CUDA Version: {cuda:<8} |\n"
    text = time.strftime("%a %b %e %H:%M:%S %Y") + "       \n" + _WIDE + title + _TABLE_RULE + _HEAD
    text += "".join(_gpu_rows(state, one) + _TABLE_RULE for one in chosen)
    if any(one.mig_enabled for one in chosen):
        text += "\n" + _WIDE + _MIG_HEAD + (_mig_rows(state, chosen) or _NO_MIG + _WIDE)
    return text + "\n" + _WIDE + _PROCESS_HEAD + (_process_rows(state, chosen) or _NOBODY) + _WIDE


_NO_MIG = "|  No MIG devices found                                                                   |\n"


def _gpu_rows(state: SimulatedHostState, one: Chosen) -> str:
    persistence = "On" if one.gpu.persistence else "Off"
    ecc = "On" if one.mig_enabled else "0"
    memory = memory_mib(state, one)
    used, total = ("N/A", "N/A") if memory is None else (f"{memory[2]}MiB", f"{memory[0]}MiB")
    busy = utilization(state, one)
    percent = "N/A" if busy is None else f"{busy}%"
    watts, cap = activity.power_watts(state, one.target()), one.model.power_limit_watts
    power = f"{'N/A':>16} /{'N/A':>6} " if watts is None else f"{round(watts):>15}W /{cap:>5}W "
    mig = {None: "N/A", 0: "Disabled", 1: "Enabled"}[one.gpu.mig_mode]
    temperature, mode = activity.temperature_celsius(state, one.target()), _MODE_TEXTS[one.gpu.compute_mode]
    return (
        f"|{one.index:>4}  {one.model.name[:27]:<27}{persistence:>6}  |   {one.gpu.pci_bus_id} Off |{ecc:>21} |\n"
        f"| N/A  {temperature:>3}C    P0{power}|{used:>11} /{total:>10} |{percent:>8}{mode:>13} |\n"
        f"|{'':41}|{'':24}|{mig:>21} |\n"
    )


def _mig_rows(state: SimulatedHostState, chosen: list[Chosen]) -> str:
    text = ""
    for one in chosen:
        for number, instance in enumerate(one.gpu.mig if one.mig_enabled else []):
            text += _mig_row(state, one, number, instance) + _MIG_RULE
    return text


def _mig_row(state: SimulatedHostState, one: Chosen, number: int, instance: SimulatedMigInstance) -> str:
    profile = one.model.profile(instance.profile)
    memory = memory_mib(state, one, instance) or (0, 0, 0)
    engines = (
        (profile.copy_engines, profile.encoders, profile.decoders, profile.optical_flow_engines, profile.jpeg_engines)
        if profile
        else (None,) * 5
    )
    copy, encode, decode, flow, jpeg = ("-" if value is None else str(value) for value in engines)
    sm = activity.device_multiprocessors(one.target(), instance)
    return (
        f"|{one.index:>3}{instance.gpu_instance_id:>5}{instance.compute_instance_id:>4}{number:>4}  |"
        f"{memory[2]:>16}MiB /{memory[0]:>6}MiB    |{sm:>3}      0 |"
        f"{copy:>3}{encode:>4}{decode:>5}{flow:>5}{jpeg:>5} |\n"
        f"|{'':18}|{0:>16}MiB /{memory[0]:>6}MiB    |{'':11}|{'':23}|\n"
    )


def _process_rows(state: SimulatedHostState, chosen: list[Chosen]) -> str:
    names = activity.process_names(state)
    text = ""
    for one in chosen:
        for resident in residents(state, one):
            gi = "N/A" if resident.gpu_instance_id is None else f"{resident.gpu_instance_id:>2} "
            ci = "N/A" if resident.compute_instance_id is None else f"{resident.compute_instance_id:>2} "
            used = f"{resident.memory_bytes // MIB}MiB"
            text += (
                f"|{one.index:>5}   {gi}  {ci}{resident.pid:>16}{_type(resident):>7}   "
                f"{names.get(resident.pid, '[Not Found]')[:_NAME_WIDTH]:<{_NAME_WIDTH}}{used:>10} |\n"
            )
    return text


def pmon(state: SimulatedHostState, chosen: list[Chosen], *, memory: bool) -> str:
    """Return ``nvidia-smi pmon -c 1``, with frame buffer columns for ``-s um``.

    Under MPS the work of the clients is shown at their server (H200, driver 580).
    """
    extra = ("     fb   ccpm", "     MB     MB") if memory else ("", "")
    text = f"# gpu         pid   type     sm    mem    enc    dec    jpg    ofa{extra[0]}    command \n"
    text += f"# Idx           #    C/G      %      %      %      %      %      %{extra[1]}    name \n"
    names = activity.process_names(state)
    for one in chosen:
        found = residents(state, one)
        if not found:
            blanks = f"{'-':>7}" * (8 if memory else 6)
            text += f"{one.index:>5}{'-':>11}{'-':>6}{blanks}    {'-':<15}\n"
        busy = {} if one.mig_enabled else activity.samples(state, one.target())
        for resident in found:
            percent = busy.get(resident.pid)
            cells = ["-", "-"] if percent is None else [str(round(percent)), str(activity.memory_bandwidth(percent))]
            cells += ["-"] * 4 + ([str(resident.memory_bytes // MIB), "0"] if memory else [])
            row = "".join(f"{cell:>7}" for cell in cells)
            name = names.get(resident.pid, "-")[:15]
            text += f"{one.index:>5}{resident.pid:>11}{_type(resident):>6}{row}    {name:<15}\n"
    return text


def _type(resident: activity.Resident) -> str:
    return "G" if resident.graphics else "M+C" if resident.mps_client else "C"


_LONG = {
    "--id": "-i",
    "--list-gpus": "-L",
    "--compute-mode": "-c",
    "--help": "-h",
    "--multi-instance-gpu": "-mig",
}
_QUERIES = {"--query-gpu": gpus, "--query-compute-apps": compute_apps}
_VALUED = {"-i", "-c", "-mig", "--format", *_QUERIES}
# Names and numbers of what each option sets, as the texts spell them.
_MODES = {
    "-c": ("DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"),
    "-mig": ("DISABLED", "ENABLED"),
}
_HELP = " Please run 'nvidia-smi -h' for help.\n\n"
_EARLY = "Terminating early due to previous errors.\n"
_WARNING = "Treating as warning and moving on.\n"
_DEPRECATED = "Warning: EXCLUSIVE_THREAD mode is deprecated and will be removed in future releases.\n"
_NO_PERSISTENCE = (
    "\nWarning: persistence mode is disabled on device {}. See the Known Issues section of the nvidia-smi(1) man page "
    "for more information. Run with [--help | -h] switch to get more information on how to enable persistence mode.\n"
)
_IN_USE = (
    "{} is currently being used by one or more other processes (e.g. CUDA application or a monitoring application such "
    "as another instance of nvidia-smi). Please first kill all processes using the device and retry the command or "
    "reboot the system to make MIG mode effective.\n"
)
_REBOOT = "Reboot the system or try nvidia-smi --gpu-reset to make MIG mode effective on GPU {}\n"
_PMON_USAGE = """
    Usage: nvidia-smi pmon [options]

    Options include:
    [-i | --id]:          Comma separated Enumeration index, PCI bus ID or UUID
    [-d | --delay]:       Collection delay/interval in seconds [default=1sec, max=10secs]
    [-c | --count]:       Collect specified number of samples and exit
    [-s | --select]:      One or more metrics [default=u]
                          Can be any of the following:
                              u - Utilization
                              m - FB and CC Protected memory usage
    [-o | --options]:     One or more from the following:
                              D - Include Date (YYYYMMDD) in scrolling output
                              T - Include Time (HH:MM:SS) in scrolling output
    [-f | --filename]:    Log to a specified file, rather than to stdout
    [-h | --help]:        Display help information


"""
_USAGE = """\
NVIDIA System Management Interface -- v{driver}

nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...

    -h,   --help                Print usage information and exit.
    -L,   --list-gpus           Display a list of GPUs connected to the system.
    -i,   --id=                 Target a specific GPU.
    -c,   --compute-mode=       Set MODE for compute applications:
                                0/DEFAULT, 1/EXCLUSIVE_THREAD (DEPRECATED),
                                2/PROHIBITED, 3/EXCLUSIVE_PROCESS
    -mig  --multi-instance-gpu= Enable or disable Multi Instance GPU: 0/DISABLED, 1/ENABLED
                                Requires root.
          --query-gpu           Information about GPU.
          --query-compute-apps  List of currently active compute processes.
          --format=             csv, noheader, nounits
    pmon                        Displays process stats in scrolling format.
    mig                         Provides controls for MIG management. "nvidia-smi mig -h" for more information.
    compute-policy              Control and query compute policies.

"""


def run_change(state: SimulatedHostState, words: list[str]) -> tuple[int, str] | tuple[int, str, str]:
    """Carry out the words after ``nvidia-smi`` on the state; return exit code, output and errors."""
    if words[:1] == ["pmon"]:
        return _pmon(state, words[1:])
    alone = _alone(words)
    if alone == "-h":
        return 0, _USAGE.format(driver=state.driver)
    changes = any(_name(word) in _MODES for word in words)
    given = [] if alone else _options(words, driver_major(state.driver), changes=changes)
    options = dict(given)
    if changes:
        return _change(state, given)
    if len(_QUERIES.keys() & options.keys()) > 1:
        return 2, "Only one --query-* switch can be used at a time.\n"
    return _show(state, options, listing=alone == "-L")


def _name(word: str) -> str:
    name = word.partition("=")[0]
    return _LONG.get(name, name)


def _alone(words: list[str]) -> str:
    """Return the option that allows no other, -h before -L, or nothing."""
    for command in ("-h", "-L"):
        names = [_name(word) for word in words]
        if command not in names:
            continue
        for word, name in zip(words, names, strict=True):
            if name != command:
                raise Wrong(2, f"ERROR: Option {word} is not valid for this command.{_HELP}")
            if "=" in word:
                raise Wrong(2, f"ERROR: Option {word.partition('=')[2]} is not valid for this command.{_HELP}")
        if len(words) > 1:
            raise Wrong(2, f"ERROR: Only one command can be run at a time.{_HELP}")
        return command
    return ""


def _options(words: list[str], major: int, *, changes: bool) -> list[tuple[str, str]]:
    """Return the options by their short names, with their values; a mode as its number."""
    known = {"-i", *_MODES} if changes else _VALUED
    query = any(_name(word) in _QUERIES for word in words)
    found = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, (_, equals, value) = _name(word), word.partition("=")
        if name not in known or (name == "--format" and not query):
            ending = _HELP if changes else " Please run 'nvidia-smi -h'.\n\n"
            raise Wrong(255, f"ERROR: Option {word} is not recognized.{ending}")
        if not equals and rest:
            value = rest.pop(0)
        elif not equals and not (name == "--format" and major >= 580):
            raise Wrong(255, f"ERROR: Option {word} is missing its value.{_HELP}")
        if name in _MODES:
            number = _MODES[name].index(value) if value in _MODES[name] else read_number(value)
            if number is None or abs(number) >= 1 << 32:
                raise Wrong(2, f"ERROR: Option {value} is invalid for {word}.{_HELP}")
            # The name of the deprecated mode brings one line more than its number.
            value = f"{number} deprecated" if value == "EXCLUSIVE_THREAD" else str(number)
        found.append((name, value))
    return found


def choose_present(state: SimulatedHostState, ids: str | None) -> list[Chosen]:
    """Return the GPUs that ``-i`` names, all when it is not given."""
    if ids == "":
        raise Wrong(*BAD_IDS)
    chosen = choose(state, ids)
    if not chosen:
        raise Wrong(*NO_DEVICES)
    return chosen


def _show(state: SimulatedHostState, options: dict[str, str], *, listing: bool) -> tuple[int, str]:
    query = next(iter(_QUERIES.keys() & options.keys()), None)
    if query is not None:
        check(query, options[query], options.get("--format"), driver_major(state.driver))
    chosen = choose_present(state, options.get("-i"))
    lost = [one for one in chosen if one.gpu.lost]
    if listing:
        return (15 if lost else 0), gpu_listing(chosen)
    if lost:
        return 15, lost_text(lost[0])
    if query is not None:
        return 0, _QUERIES[query](state, chosen, options[query], options.get("--format") or "csv")
    return 0, summary(state, chosen)


def _pmon(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    given = {"-c": "", "-s": "u", "-d": "1"}
    rest = list(words)
    # A wrong argument is no failure to the program: it prints its usage and exits with 0.
    while rest:
        word = rest.pop(0)
        if word not in {"-c", "-s", "-i", "-d"}:
            return 0, f'Option "{word}" is not recognized.\n{_PMON_USAGE}'
        if not rest:
            return 0, f'Option "{word}" is missing its value.\n{_PMON_USAGE}'
        given[word] = rest.pop(0)
    if given["-c"] and not read_number(given["-c"]):
        return 0, f"Invalid value for number of samples to be displayed\n{_PMON_USAGE}"
    if not 1 <= (read_number(given["-d"]) or 0) <= 10:
        return 0, f"Collection delay/interval should be between 1 second and 10 seconds\n{_PMON_USAGE}"
    chosen = [one for one in choose(state, given.get("-i")) if not one.gpu.lost]
    if not chosen:
        return NO_DEVICES
    if given["-c"] != "1":
        # Without a count it scrolls for ever.
        return 2, "The simulated nvidia-smi pmon takes -c 1 only\n"
    return 0, pmon(state, chosen, memory="m" in given["-s"])


def _change(state: SimulatedHostState, given: list[tuple[str, str]]) -> tuple[int, str] | tuple[int, str, str]:
    names = [name for name, _ in given]
    if len(set(names) & _MODES.keys()) > 1 or len(names) != len(set(names)):
        text = "Invalid combination of input arguments. Only one device modification may be done at a time.\n\n"
        return 2, text
    options = dict(given)
    option = "-c" if "-c" in options else "-mig"
    text, _, deprecated = options[option].partition(" ")
    number = int(text)
    if number == -1:
        # Its own sign of "not given".
        return 255, "Input combination for device modification is not valid.\n\n"
    chosen = choose_present(state, options.get("-i"))
    if not 0 <= number < len(_MODES[option]):
        kind = "compute mode" if option == "-c" else "MIG Mode"
        return 2, f"Invalid {kind}: {number % (1 << 32)}\n{_EARLY}"
    output = _DEPRECATED if deprecated else ""
    # 580 says it on stderr.
    errors, output = (output, "") if driver_major(state.driver) >= 580 else ("", output)
    change: Callable[[SimulatedHostState, Chosen, int], str] = _set_compute_mode if option == "-c" else _set_mig_mode
    for one in chosen:
        if one.gpu.lost:
            return 15, output + lost_text(one)
        try:
            output += change(state, one, number)
        except Refused as refused:
            verb = "set the compute mode" if option == "-c" else f"{('disable', 'enable')[number]} MIG Mode"
            if option == "-c" and one.mig_enabled and refused.code == Code.NOT_SUPPORTED:
                title = _MODES[option][number]
                output += f"Setting compute mode to {title} is not supported on a MIG-enabled device.\n"
            output += f"Unable to {verb} for GPU {one.gpu.pci_bus_id}: {ERROR_TEXTS[refused.code]}\n"
            if refused.code != Code.NOT_SUPPORTED:
                return int(refused.code), output + _EARLY, errors
            output += _WARNING
    return 0, output + "All done.\n", errors


def _set_compute_mode(state: SimulatedHostState, one: Chosen, wanted: int) -> str:
    gpu, title = one.gpu, _MODES["-c"][wanted]
    if title == "EXCLUSIVE_THREAD":
        return f"Exclusive_Thread was deprecated! Use value 3:Exclusive_Process instead.\n{_WARNING}"
    if gpu.compute_mode == wanted:
        return f"Compute mode is already set to {title} for GPU {gpu.pci_bus_id}.\n"
    require_root(state)
    if one.mig_enabled or not supports(one, "nvmlDeviceSetComputeMode"):
        raise Refused(Code.NOT_SUPPORTED)
    gpu.compute_mode = wanted
    return f"Set compute mode to {title} for GPU {gpu.pci_bus_id}.\n"


def _set_mig_mode(state: SimulatedHostState, one: Chosen, wanted: int) -> str:
    verb, bus = ("disable", "enable")[wanted], one.gpu.pci_bus_id
    if one.gpu.mig_mode is None or not supports(one, "nvmlDeviceSetMigMode"):
        raise Refused(Code.NOT_SUPPORTED)
    require_root(state)
    with changed(state, one) as residents:
        code = library_mig.set_mode(one.gpu, one.model, wanted, residents)
    if code == Code.SUCCESS:
        warning = "" if one.gpu.persistence else _NO_PERSISTENCE.format(bus)
        return f"{verb.title()}d MIG Mode for GPU {bus}\n{warning}"
    text = f"Warning: MIG mode is in pending {verb} state for GPU {bus}:{ERROR_TEXTS[code]}\n"
    return text + (_IN_USE if code == Code.IN_USE else _REBOOT).format(bus)


def require_root(state: SimulatedHostState) -> None:
    """Refuse a change to any user but root."""
    if not state.root:
        raise Refused(Code.NO_PERMISSION)


@contextmanager
def changed(state: SimulatedHostState, one: Chosen) -> Iterator[list[Resident]]:
    """Yield the processes that are on the GPU or hold it open, for a change of its MIG state."""
    yield [*activity.residents(state, one.target()), *holding(state, one.index)]
    forget_gone(one.gpu)
