"""nvidia-smi of a simulated host without a subcommand, and ``pmon``: options, listings, queries, modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpushare.sim import activity, capabilities, mig_changes, smi_query, smi_tables
from gpushare.sim.activity import Resident
from gpushare.sim.mps_servers import driver_major
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Refused
from gpushare.sim.open_files import holding
from gpushare.sim.smi import BAD_IDS, NO_DEVICES, Wrong, read_number
from gpushare.sim.smi_view import Chosen, choose, lost_text, supports
from gpushare.sim.state import SimulatedHostState

_LONG = {
    "--id": "-i",
    "--list-gpus": "-L",
    "--compute-mode": "-c",
    "--help": "-h",
    "--multi-instance-gpu": "-mig",
}
_QUERIES = {"--query-gpu": smi_query.gpus, "--query-compute-apps": smi_query.compute_apps}
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


def run(state: SimulatedHostState, words: list[str]) -> tuple[int, str] | tuple[int, str, str]:
    """Carry out the words after ``nvidia-smi`` on the state; return exit code, output and errors.

    Raises:
        Wrong: the arguments are.
    """
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
    """Return the option that allows no other, -h before -L, or nothing.

    Raises:
        Wrong: there is another one.
    """
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
    """Return the GPUs that ``-i`` names, all when it is not given.

    Raises:
        Wrong: there is none.
    """
    if ids == "":
        raise Wrong(*BAD_IDS)
    chosen = choose(state, ids)
    if not chosen:
        raise Wrong(*NO_DEVICES)
    return chosen


def _show(state: SimulatedHostState, options: dict[str, str], *, listing: bool) -> tuple[int, str]:
    query = next(iter(_QUERIES.keys() & options.keys()), None)
    if query is not None:
        smi_query.check(query, options[query], options.get("--format"), driver_major(state.driver))
    chosen = choose_present(state, options.get("-i"))
    lost = [one for one in chosen if one.gpu.lost]
    if listing:
        return (15 if lost else 0), smi_tables.listing(chosen)
    if lost:
        return 15, lost_text(lost[0])
    if query is not None:
        return 0, _QUERIES[query](state, chosen, options[query], options.get("--format") or "csv")
    return 0, smi_tables.summary(state, chosen)


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
    return 0, smi_tables.pmon(state, chosen, memory="m" in given["-s"])


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
        code = mig_changes.set_mode(one.gpu, one.model, wanted, residents)
    if code == Code.SUCCESS:
        warning = "" if one.gpu.persistence else _NO_PERSISTENCE.format(bus)
        return f"{verb.title()}d MIG Mode for GPU {bus}\n{warning}"
    text = f"Warning: MIG mode is in pending {verb} state for GPU {bus}:{ERROR_TEXTS[code]}\n"
    return text + (_IN_USE if code == Code.IN_USE else _REBOOT).format(bus)


def require_root(state: SimulatedHostState) -> None:
    """Refuse a change to any user but root."""
    if state.uid != 0:
        raise Refused(Code.NO_PERMISSION)


@contextmanager
def changed(state: SimulatedHostState, one: Chosen) -> Iterator[list[Resident]]:
    """Yield who is on the GPU, or holds it open, for a change of its MIG state."""
    yield [*activity.residents(state, one.target()), *holding(state, one.index)]
    capabilities.forget_gone(one.gpu)
