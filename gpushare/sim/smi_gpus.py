"""nvidia-smi of a simulated host but for ``compute-policy``: options, listings, queries and the compute mode."""

from __future__ import annotations

from gpushare.sim import smi_query, smi_tables
from gpushare.sim.smi_view import Chosen, choose, lost_text
from gpushare.sim.state import SimulatedHostState

_COMBINATION = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n"
_MODES = {"0": 0, "default": 0, "1": 1, "exclusive_thread": 1, "2": 2, "prohibited": 2, "3": 3, "exclusive_process": 3}
_MODE_NAMES = {0: "DEFAULT", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
_USAGE = """\
NVIDIA System Management Interface -- v{driver}

nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...

    -h,   --help                Print usage information and exit.
    -L,   --list-gpus           Display a list of GPUs connected to the system.
    -i,   --id=                 Target a specific GPU.
    -c,   --compute-mode=       Set MODE for compute applications:
                                0/DEFAULT, 1/EXCLUSIVE_THREAD (DEPRECATED),
                                2/PROHIBITED, 3/EXCLUSIVE_PROCESS
          --query-gpu           Information about GPU.
          --query-compute-apps  List of currently active compute processes.
          --format=             csv, noheader, nounits
    pmon                        Displays process stats in scrolling format.
    compute-policy              Control and query compute policies.

"""


def run(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out the words after ``nvidia-smi`` on the state; return exit code and output."""
    if words[:1] == ["pmon"]:
        return _pmon(state, words[1:])
    options, unknown = _options(words)
    if unknown is not None:
        return 2, f"ERROR: Option {unknown} is not recognized. Please run 'nvidia-smi -h'.\n\n"
    if "-h" in options:
        return 0, _USAGE.format(driver=state.driver)
    chosen = choose(state, options.get("-i"))
    if not chosen:
        return 6, "No devices were found\n"
    kinds = {"-L", "-c", "--query-gpu", "--query-compute-apps"} & set(options)
    if len(kinds) > 1 or ("--format" in options) != bool({"--query-gpu", "--query-compute-apps"} & kinds):
        return 2, _COMBINATION
    return _show(state, options, chosen)


def _show(state: SimulatedHostState, options: dict[str, str], chosen: list[Chosen]) -> tuple[int, str]:
    if "-c" in options:
        return _set_compute_mode(state, chosen, options["-c"])
    lost = [one for one in chosen if one.gpu.lost]
    if lost and "-L" not in options:
        return 15, lost_text(lost[0])
    if "-L" in options:
        return (15 if lost else 0), smi_tables.listing(chosen)
    if "--query-gpu" in options:
        return smi_query.gpus(state, chosen, options["--query-gpu"], options["--format"])
    if "--query-compute-apps" in options:
        return smi_query.compute_apps(state, chosen, options["--query-compute-apps"], options["--format"])
    return 0, smi_tables.summary(state, chosen)


def _options(words: list[str]) -> tuple[dict[str, str], str | None]:
    """Return the options by their short names, and the first that is unknown."""
    names = {"--id": "-i", "--list-gpus": "-L", "--compute-mode": "-c", "--help": "-h"}
    valued = {"-i", "-c", "--query-gpu", "--query-compute-apps", "--format"}
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        option = names.get(word, word)
        if option in valued:
            if not equals and not rest:
                return found, word
            found[option] = value if equals else rest.pop(0)
        elif option in {"-L", "-h"} and not equals:
            found[option] = ""
        else:
            return found, word
    return found, None


def _pmon(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    counted, selection, ids = False, "u", None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word not in {"-c", "-s", "-i"} or not rest:
            return 2, f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi pmon -h'.\n\n"
        value = rest.pop(0)
        if word == "-c":
            counted = value == "1"
        elif word == "-s":
            selection = value
        else:
            ids = value
    chosen = [one for one in choose(state, ids) if not one.gpu.lost]
    if not counted:
        # Without a count it scrolls for ever.
        return 2, "The simulated nvidia-smi pmon takes -c 1 only\n"
    if not chosen:
        return 6, "No devices were found\n"
    return 0, smi_tables.pmon(state, chosen, memory="m" in selection)


def _set_compute_mode(state: SimulatedHostState, chosen: list[Chosen], text: str) -> tuple[int, str]:
    wanted = _MODES.get(text.lower())
    if wanted is None:
        return 2, _COMBINATION
    output = ""
    if wanted == 1:
        output, wanted = "Warning: Exclusive_Thread was deprecated! Setting Exclusive_Process instead.\n", 3
    title = _MODE_NAMES[wanted]
    for one in chosen:
        gpu, bus = one.gpu, one.gpu.pci_bus_id
        if gpu.lost:
            return 15, output + lost_text(one)
        if state.uid != 0:
            error = f"Unable to set the compute mode for GPU {bus}: Insufficient Permissions\n"
            return 4, output + error + "Terminating early due to previous errors.\n"
        if gpu.mig_mode == 1:
            output += f"Setting compute mode to {title} is not supported on a MIG-enabled device.\n"
            output += "Treating as warning and moving on.\n"
        elif any(name.startswith("nvmlDeviceSetComputeMode") for name in gpu.not_supported):
            output += f"Setting compute mode to {title} is not supported.\nTreating as warning and moving on.\n"
        elif gpu.compute_mode == wanted:
            output += f"Compute mode is already set to {title} for GPU {bus}.\n"
        else:
            gpu.compute_mode = wanted
            output += f"Set compute mode to {title} for GPU {bus}.\n"
    return 0, output + "All done.\n"
