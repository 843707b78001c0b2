"""nvidia-smi of a simulated host: the commands that gpushare runs or prints, with their output and exit code.

Any other option is answered as a wrong one. Texts: an H200 with driver 580.159.04, and what the programs of drivers 550
and 580 say to wrong arguments on NVIDIA's mocked NVML. Errors go to stdout too, all but one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpushare.host.program import Completed
from gpushare.sim import activity
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Refused, Target
from gpushare.sim.smi_options import (
    HELP,
    NO_VALUE,
    VALUE,
    Wrong,
    choose,
    lost_text,
    number,
    parse,
    require_root,
    supports,
)
from gpushare.sim.state import SimulatedHostState, StateFile

_NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display "
    "Driver is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n"
)
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
    "NVIDIA driver is installed and running.\n\n"
)
_LEVELS = ("Default", "Short", "Medium", "Long")
_COMPUTE_MODES = ("DEFAULT", "", "PROHIBITED", "EXCLUSIVE_PROCESS")
# What the value of each option sets: a name or its number.
_MODES = {
    option: {text: place for place, name in enumerate(names) if name for text in (name, str(place))}
    for option, names in (("-c", _COMPUTE_MODES), ("-mig", ("DISABLED", "ENABLED")), ("-pm", ("DISABLED", "ENABLED")))
}


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name. It never blocks."""
    words = list(argv[1:])
    state = current(state_file)
    failed = _cannot_start(state)
    if failed is not None:
        return Completed(tuple(argv), *failed, "")
    try:
        if words[:1] == ["mig"] or {"--set-timeslice", *_MODES} & {word.partition("=")[0] for word in words}:
            with changing(state_file) as (changed, _):
                code, text = _run(changed, words)
        else:
            code, text = _run(state, words)
    except Wrong as wrong:
        # Raised before anything changes.
        code, text = wrong.code, wrong.text
    return Completed(tuple(argv), code, text, "")


def _cannot_start(state: SimulatedHostState) -> tuple[int, str] | None:
    # NVIDIA's own messages of this kind go to stdout.
    failures = (
        (not state.nvml_installed, 12, _NO_LIBRARY),
        (not state.driver_loaded, 9, _NO_DRIVER),
        (state.library_mismatch, 18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        (state.permission_denied, 4, "Failed to initialize NVML: Insufficient Permissions\n"),
    )
    return next(((code, text) for failed, code, text in failures if failed), None)


def _run(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    if words[:1] == ["compute-policy"]:
        return _compute_policy(state, words[1:])
    if words[:1] == ["mig"]:
        # Loaded late: every look at a host asks for the time slice, few for MIG.
        from gpushare.sim import smi_mig

        return smi_mig.run(state, words[1:])
    if "-L" in words:
        return _listing(state, words)
    if _MODES.keys() & {word.partition("=")[0] for word in words}:
        return _change(state, words)
    return _show(state, words)


_RULE = f"+{'-' * 37}+\n"
_POLICIES = f"""\
{_RULE}| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
"""


def _compute_policy(state: SimulatedHostState, words: Sequence[str]) -> tuple[int, str]:
    given = parse(words, {"-i": VALUE, "-l": NO_VALUE, "--set-timeslice": VALUE}, subcommand=True)
    text = given.get("--set-timeslice")
    level = number(text)
    if text is not None and level is None:
        return 2, f'Option "{text}" is invalid for "--set-timeslice".\n'
    if not given.keys() - {"-i"}:
        return 2, f"Invalid combination of input arguments.{HELP}"
    if {"-l", "--set-timeslice"} <= given.keys():
        return 2, "One, and only one, compute-policy command allowed at a time\n"
    task = "get compute policies"
    if level is not None:
        task = f"set timeslice policy with value {_LEVELS[level] if level < len(_LEVELS) else 'Unknown'}"
    code, rows, said = Code.SUCCESS, [], ""
    for one in choose(state, given.get("-i"), lost=True):
        index, refusal = one.handle.index, _policy_refusal(state, one, level)
        if refusal is not None:
            code, said = refusal, f"{said}Failed to {task} for GPU {index} : {ERROR_TEXTS[refusal]}\n"
        elif level is None:
            rows.append(f"|{index:>4}   {'Timeslice':<16}{_LEVELS[one.gpu.time_slice]:<14}|\n{_RULE}")
        else:
            one.gpu.time_slice = level
            said += f"Successfully {task} for GPU {index}\n"
    return int(code), (_POLICIES + "".join(rows) if rows else "") + said


def _policy_refusal(state: SimulatedHostState, one: Target, level: int | None) -> Code | None:
    if one.gpu.lost:
        return Code.GPU_IS_LOST
    if one.model.time_slice is False or "compute-policy" in one.gpu.not_supported:
        return Code.NOT_SUPPORTED
    if level is not None and not state.root:
        return Code.NO_PERMISSION
    # nvidia-smi checks no number, the driver does.
    return Code.INVALID_ARGUMENT if level is not None and level >= len(_LEVELS) else None


def _listing(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Return ``nvidia-smi -L``: GPUs and their MIG devices with UUIDs."""
    other = next((word for word in words if word != "-L"), None)
    if other is not None:
        return 2, f"ERROR: Option {other} is not valid for this command.{HELP}"
    text = ""
    for one in (found := choose(state, None, lost=True)):
        text += lost_text(one) if one.gpu.lost else f"GPU {one.handle.index}: {one.model.name} (UUID: {one.gpu.uuid})\n"
        for place, instance in enumerate(one.gpu.mig if one.mig_enabled and not one.gpu.lost else []):
            name = activity.device_name(one, instance)
            text += f"  MIG {name:<11} Device {place:>2}: (UUID: {instance.uuid})\n"
    return (15 if any(one.gpu.lost for one in found) else 0), text


def _change(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out ``-c MODE`` or ``-mig MODE``."""
    options = parse(words, dict.fromkeys(("-i", *_MODES), VALUE))
    option, *more = options.keys() & _MODES.keys()
    if more:
        return 2, "Invalid combination of input arguments. Only one device modification may be done at a time.\n\n"
    wanted, output = _MODES[option].get(options[option] or ""), ""
    if wanted is None:
        return 2, f"ERROR: Option {options[option]} is invalid for {option}.{HELP}"
    for one in choose(state, options.get("-i")):
        try:
            output += _set_mode(state, one, option, wanted)
        except Refused as refused:
            what = {"-mig": "MIG Mode", "-pm": "persistence mode"}.get(option)
            verb = "set the compute mode" if what is None else f"{('disable', 'enable')[wanted]} {what}"
            if option == "-c" and one.mig_enabled and refused.code == Code.NOT_SUPPORTED:
                title = _COMPUTE_MODES[wanted]
                output += f"Setting compute mode to {title} is not supported on a MIG-enabled device.\n"
            output += f"Unable to {verb} for GPU {one.gpu.pci_bus_id}: {ERROR_TEXTS[refused.code]}\n"
            if refused.code != Code.NOT_SUPPORTED:
                return int(refused.code), f"{output}Terminating early due to previous errors.\n"
            output += "Treating as warning and moving on.\n"
    return 0, output + "All done.\n"


def _set_mode(state: SimulatedHostState, one: Target, option: str, wanted: int) -> str:
    if option == "-mig":
        from gpushare.sim import smi_mig

        return smi_mig.set_mode(state, one, wanted)
    gpu, title = one.gpu, _COMPUTE_MODES[wanted]
    if option == "-pm":
        require_root(state)
        gpu.persistence = bool(wanted)
        return f"{('Disabled', 'Enabled')[wanted]} persistence mode for GPU {gpu.pci_bus_id}.\n"
    if gpu.compute_mode == wanted:
        return f"Compute mode is already set to {title} for GPU {gpu.pci_bus_id}.\n"
    require_root(state)
    if one.mig_enabled or not supports(one, "nvmlDeviceSetComputeMode"):
        raise Refused(Code.NOT_SUPPORTED)
    gpu.compute_mode = wanted
    return f"Set compute mode to {title} for GPU {gpu.pci_bus_id}.\n"


def _show(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Return the compute modes: ``--query-gpu=compute_mode --format=csv,noheader``. The table is not simulated."""
    known = ("-i", "--query-gpu", "--format") if any(word.startswith("--query-gpu") for word in words) else ("-i",)
    options = parse(words, dict.fromkeys(known, VALUE))
    field, form = options.get("--query-gpu"), (options.get("--format") or "csv").split(",")
    if set(form) - {"csv", "noheader"}:
        return 2, "Format modifier is not recognized.\n"
    if field not in {None, "compute_mode"}:
        return 2, f'Field "{field}" is not a valid field to query.\n\n'
    chosen = choose(state, options.get("-i"))
    if field is None:
        return 255, "The simulated nvidia-smi has no table. Please run 'gpushare status'.\n"
    modes = [_COMPUTE_MODES[one.gpu.compute_mode].title() for one in chosen]
    return 0, "".join(f"{line}\n" for line in (modes if "noheader" in form else [field, *modes]))
