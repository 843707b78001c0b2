"""nvidia-smi of a simulated host: what gpushare runs (compute-policy), and the compute mode that it prints.

Any other option is answered as a wrong one; changes of MIG are made by NVML. Texts: an H200 with driver 580.159.04, and
what the programs of drivers 550 and 580 say to wrong arguments on NVIDIA's mocked NVML. Errors go to stdout too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from gpushare.gpu_models import model_of
from gpushare.host.program import Completed
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Handle, HandleKind, Target
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
_HELP: Final = " Please run 'nvidia-smi -h' for help.\n\n"
_LEVELS = ("Default", "Short", "Medium", "Long")
_COMPUTE_MODES = ("DEFAULT", "", "PROHIBITED", "EXCLUSIVE_PROCESS")
# Options that take a value.
_WITH_VALUE: Final = ("-i", "-c", "--set-timeslice")


class Wrong(Exception):
    """The command failed: its exit code, and what the program prints for it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name. It never blocks."""
    words = list(argv[1:])
    state = current(state_file)
    # NVIDIA's own messages of this kind go to stdout.
    failures = (
        (not state.nvml_installed, 12, _NO_LIBRARY),
        (not state.driver_loaded, 9, _NO_DRIVER),
        (state.library_mismatch, 18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        (state.permission_denied, 4, "Failed to initialize NVML: Insufficient Permissions\n"),
    )
    for failed, code, text in failures:
        if failed:
            return Completed(tuple(argv), code, text, "")
    run: Callable[[SimulatedHostState, list[str]], tuple[int, str]] = _set_compute_mode
    if words[:1] == ["compute-policy"]:
        run = _compute_policy
    try:
        if {"-c", "--set-timeslice"} & {word.partition("=")[0] for word in words}:
            with changing(state_file) as (changed, _):
                code, text = run(changed, words)
        else:
            code, text = run(state, words)
    except Wrong as wrong:
        # Raised before anything changes.
        code, text = wrong.code, wrong.text
    return Completed(tuple(argv), code, text, "")


def _parse(words: Sequence[str], options: Sequence[str], *, subcommand: bool = False) -> dict[str, str | None]:
    """Return the options with their values."""
    given: dict[str, str | None] = {}
    rest = list(words[1:] if subcommand else words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in options or (equals and name not in _WITH_VALUE):
            if subcommand:
                raise Wrong(2, f'Option "{word}" is not recognized.\n')
            raise Wrong(255, f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi -h'.\n\n")
        given[name] = value if equals else None
        if name in _WITH_VALUE and not equals:
            # To a subcommand, another option is no value.
            if rest and not (subcommand and rest[0].partition("=")[0] in options):
                given[name] = rest.pop(0)
            elif subcommand:
                raise Wrong(2, f'Option "{word}" is missing its value.\n')
            else:
                raise Wrong(255, f"ERROR: Option {word} is missing its value.{_HELP}")
    return given


def _choose(state: SimulatedHostState, ids: str | None, *, lost: bool = False) -> list[Target]:
    """Return the GPUs that ``-i`` names by index or UUID, with commas; all when it is not given.

    Raises:
        Wrong: there is none, or one of them fell off the bus and ``lost`` is not set.
    """
    wanted = None if ids is None else {part.strip() for part in ids.split(",")}
    gpus = (Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model)) for index, gpu in enumerate(state.gpus))
    chosen = [gpu for gpu in gpus if wanted is None or wanted & {str(gpu.handle.index), gpu.gpu.uuid}]
    if not chosen:
        raise Wrong(6, "No devices were found\n")
    for target in chosen:
        if target.gpu.lost and not lost:
            raise Wrong(15, _lost_text(target))
    return chosen


def _lost_text(target: Target) -> str:
    where = f"GPU{target.handle.index}: {target.gpu.pci_bus_id}"
    return f"Unable to determine the device handle for {where}: GPU is lost.  Reboot the system to recover this GPU\n"


_RULE = f"+{'-' * 37}+\n"
_POLICIES = f"""\
{_RULE}| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
"""


def _compute_policy(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    given = _parse(words, ("-i", "-l", "--set-timeslice"), subcommand=True)
    text = given.get("--set-timeslice")
    level = int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None
    if text is not None and level is None:
        return 2, f'Option "{text}" is invalid for "--set-timeslice".\n'
    if not given.keys() - {"-i"}:
        return 2, f"Invalid combination of input arguments.{_HELP}"
    if {"-l", "--set-timeslice"} <= given.keys():
        return 2, "One, and only one, compute-policy command allowed at a time\n"
    task = "get compute policies"
    if level is not None:
        task = f"set timeslice policy with value {_LEVELS[level] if level < len(_LEVELS) else 'Unknown'}"
    code, rows, output = Code.SUCCESS, "", ""
    for target in _choose(state, given.get("-i"), lost=True):
        index, refusal = target.handle.index, _policy_refusal(state, target, level)
        if refusal is not None:
            code, output = refusal, f"{output}Failed to {task} for GPU {index} : {ERROR_TEXTS[refusal]}\n"
        elif level is None:
            rows += f"|{index:>4}   {'Timeslice':<16}{_LEVELS[target.gpu.time_slice]:<14}|\n{_RULE}"
        else:
            target.gpu.time_slice = level
            output += f"Successfully {task} for GPU {index}\n"
    return int(code), (_POLICIES + rows if rows else "") + output


def _policy_refusal(state: SimulatedHostState, target: Target, level: int | None) -> Code | None:
    if target.gpu.lost:
        return Code.GPU_IS_LOST
    if target.model.time_slice is False or "compute-policy" in target.gpu.not_supported:
        return Code.NOT_SUPPORTED
    if level is not None and not state.root:
        return Code.NO_PERMISSION
    # nvidia-smi checks no number, the driver does.
    return Code.INVALID_ARGUMENT if level is not None and level >= len(_LEVELS) else None


def _set_compute_mode(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out ``-c MODE``: a name or its number. The table of a call without options is not simulated."""
    options = _parse(words, ("-i", "-c"))
    targets = _choose(state, options.get("-i"))
    if "-c" not in options:
        return 255, "The simulated nvidia-smi has no table. Please run 'gpushare status'.\n"
    names = {text: place for place, name in enumerate(_COMPUTE_MODES) if name for text in (name, str(place))}
    wanted, output = names.get(options["-c"] or ""), ""
    if wanted is None:
        return 2, f"ERROR: Option {options['-c']} is invalid for -c.{_HELP}"
    title = _COMPUTE_MODES[wanted]
    for target in targets:
        gpu, bus = target.gpu, target.gpu.pci_bus_id
        if gpu.compute_mode == wanted:
            output += f"Compute mode is already set to {title} for GPU {bus}.\n"
        elif "nvmlDeviceSetComputeMode" in gpu.not_supported or (state.root and target.mig_enabled):
            if target.mig_enabled:
                output += f"Setting compute mode to {title} is not supported on a MIG-enabled device.\n"
            output += f"Unable to set the compute mode for GPU {bus}: {ERROR_TEXTS[Code.NOT_SUPPORTED]}\n"
            output += "Treating as warning and moving on.\n"
        elif not state.root:
            output += f"Unable to set the compute mode for GPU {bus}: {ERROR_TEXTS[Code.NO_PERMISSION]}\n"
            return int(Code.NO_PERMISSION), f"{output}Terminating early due to previous errors.\n"
        else:
            gpu.compute_mode = wanted
            output += f"Set compute mode to {title} for GPU {bus}.\n"
    return 0, output + "All done.\n"
