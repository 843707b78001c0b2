"""nvidia-smi of a simulated host: its argv, output and exit code.

Errors go to stdout too, all but one. Texts: an H200 with driver 580.159.04, and what the programs of drivers 535, 550, 555 and
580 say to each wrong argument on NVIDIA's mocked NVML.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpushare.gpu_models import model_of
from gpushare.host.program import Completed
from gpushare.sim.current import changing, current
from gpushare.sim.smi_options import BAD_IDS, NO_DEVICES, NO_VALUE, VALUE, Wrong, parse, read_number, table
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, StateFile

_NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display "
    "Driver is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n"
)
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
    "NVIDIA driver is installed and running.\n\n"
)
_CHANGING = {"-c", "--compute-mode", "-mig", "--multi-instance-gpu", "--set-timeslice"}
_LEVELS = ("Default", "Short", "Medium", "Long")
_POLICY_OPTIONS: Final = {
    "-h": ("--help", NO_VALUE),
    "-i": ("--id", VALUE),
    "-l": ("--list", NO_VALUE),
    "--set-timeslice": ("", VALUE),
}
_POLICY_HELP = """
    Compute Policy -- Control and list compute policies.

    Usage: nvidia-smi compute-policy [options]

    Options include:
    [-i | --id]: GPU device ID's. Provide comma
                 separated values for more than one device

    [-l | --list]: List all compute policies

    [ | --set-timeslice]: Set timeslice config for a GPU:
                          0=DEFAULT, 1=SHORT, 2=MEDIUM, 3=LONG

    [-h | --help]: Display help information


"""


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name. It never blocks."""
    name, words = tuple(argv), list(argv[1:])
    state = current(state_file)
    failed = _cannot_start(state)
    if failed is not None:
        return Completed(name, *failed, "")
    try:
        if _changes(words):
            with changing(state_file) as (changed, _):
                answer = _run(changed, words)
        else:
            answer = _run(state, words)
    except Wrong as wrong:
        # Raised before anything changes.
        answer = wrong.code, wrong.text
    return Completed(name, *answer[:2], answer[2] if len(answer) > 2 else "")


def _cannot_start(state: SimulatedHostState) -> tuple[int, str] | None:
    # NVIDIA's own messages of this kind go to stdout.
    if not state.nvml_installed:
        return 12, _NO_LIBRARY
    if not state.driver_loaded:
        return 9, _NO_DRIVER
    if state.library_mismatch:
        return 18, "Failed to initialize NVML: Driver/library version mismatch\n"
    if state.permission_denied:
        return 4, "Failed to initialize NVML: Insufficient Permissions\n"
    return None


def _changes(words: Sequence[str]) -> bool:
    return words[:1] == ["mig"] or any(word.partition("=")[0] in _CHANGING for word in words)


def _run(state: SimulatedHostState, words: list[str]) -> tuple[int, str] | tuple[int, str, str]:
    # Loaded late: every look at a host asks for the time slice, few for more.
    if words[:1] == ["compute-policy"]:
        return _compute_policy(state, words[1:])
    if words[:1] == ["mig"]:
        from gpushare.sim import smi_mig

        return smi_mig.run(state, words[1:])
    from gpushare.sim import smi_gpus

    return smi_gpus.run_change(state, words)


def _compute_policy(state: SimulatedHostState, words: Sequence[str]) -> tuple[int, str]:
    """Carry out the words after ``compute-policy`` on the state; return exit code and output."""
    given = parse(words, _POLICY_OPTIONS)
    level = None
    for option, value in given:
        if option == "--set-timeslice":
            level = read_number(value or "0")
            if level is None:
                raise Wrong(2, f'Option "{value}" is invalid for "--set-timeslice".\n')
    names = [option for option, _ in given]
    commands = [name for name in names if name in {"-l", "--set-timeslice"}]
    if "-h" in names or not commands:
        return 0, _POLICY_HELP
    if len(commands) > 1 or names.count("-i") > 1:
        return 2, "One, and only one, compute-policy command allowed at a time\n"
    ids = dict(given).get("-i")
    if ids == "":
        return BAD_IDS
    wanted = None if ids is None else [part.strip() for part in ids.split(",")]
    chosen = [(index, gpu) for index, gpu in enumerate(state.gpus) if wanted is None or _matches(wanted, index, gpu)]
    if not chosen:
        return NO_DEVICES
    return _list(chosen) if level is None else _set(state, chosen, level % (1 << 32))


def _list(chosen: list[tuple[int, SimulatedGpu]]) -> tuple[int, str]:
    code, rows, errors = 0, [], ""
    for index, gpu in chosen:
        error = _unsupported(gpu)
        if error is not None:
            code = error[0]
            errors += f"Failed to get compute policies for GPU {index} : {error[1]}\n"
        else:
            rows.append([f"{index:>4}   {'Timeslice':<16}{_LEVELS[gpu.time_slice]}"])
    if not rows:
        return code, errors
    return code, table("GPU compute policies:", [" GPU     Name           Value        "], rows, 37) + errors


def _set(state: SimulatedHostState, chosen: list[tuple[int, SimulatedGpu]], level: int) -> tuple[int, str]:
    code, text = 0, ""
    # nvidia-smi checks no number, the driver does.
    known = level < len(_LEVELS)
    title = _LEVELS[level] if known else "Unknown"
    for index, gpu in chosen:
        error = _unsupported(gpu) or ((4, "Insufficient Permissions") if not state.root else None)
        if error is None and not known:
            error = (2, "Invalid Argument")
        if error is not None:
            code = error[0]
            text += f"Failed to set timeslice policy with value {title} for GPU {index} : {error[1]}\n"
        else:
            gpu.time_slice = level
            text += f"Successfully set timeslice policy with value {title} for GPU {index}\n"
    return code, text


def _unsupported(gpu: SimulatedGpu) -> tuple[int, str] | None:
    if gpu.lost:
        return 15, "GPU is lost"
    if model_of(gpu.model).time_slice is False or "compute-policy" in gpu.not_supported:
        return 3, "Not Supported"
    return None


def _matches(ids: list[str], index: int, gpu: SimulatedGpu) -> bool:
    return any(one in {str(index), gpu.uuid} or one.upper().endswith(gpu.pci_bus_id.upper()) for one in ids)
