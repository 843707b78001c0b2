"""nvidia-smi of a simulated host: the two commands that gpushare runs, `host.smi.list_argv` and `host.smi.set_argv`.

Any other is refused: compute modes and MIG are changed by NVML. Texts: an H200 with driver 580.159.04. Errors go to
stdout too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpushare.base.model import TimeSlice
from gpushare.gpu_models import model_of
from gpushare.host.program import Completed
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code
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
_LEVELS: Final = tuple(level.name.title() for level in TimeSlice)
_RULE: Final = f"+{'-' * 37}+\n"
_HEADER: Final = f"""\
{_RULE}| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
"""


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name. It never blocks."""
    state = current(state_file)
    # NVIDIA's own messages of this kind go to stdout.
    failures = (
        (not state.nvml_installed, 12, _NO_LIBRARY),
        (not state.driver_loaded, 9, _NO_DRIVER),
        (state.library_mismatch, 18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        (state.permission_denied, 4, "Failed to initialize NVML: Insufficient Permissions\n"),
    )
    code, text = next(((code, text) for failed, code, text in failures if failed), (0, ""))
    if not code:
        code, text = _run_command(argv[1:], state, state_file)
    return Completed(tuple(argv), code, text, "")


def _run_command(words: Sequence[str], state: SimulatedHostState, state_file: StateFile) -> tuple[int, str]:
    """Carry out one of the two commands; return the exit code and stdout."""
    match list(words):
        case ["compute-policy", "-l"]:
            return _list_policies(state)
        case ["compute-policy", "-i", device, "--set-timeslice", ("0" | "1" | "2" | "3") as level]:
            with changing(state_file) as (changed, _):
                return _set_policy(changed, device, int(level))
    return 255, f"ERROR: Option {' '.join(words)} is not simulated. Please run 'gpushare status'.\n\n"


def _list_policies(state: SimulatedHostState) -> tuple[int, str]:
    """Return the exit code and the table of the time-slice levels."""
    code, rows, output = Code.SUCCESS, "", ""
    for index, gpu in enumerate(state.gpus):
        refusal = _refusal_code(gpu)
        if refusal is None:
            rows += f"|{index:>4}   {'Timeslice':<16}{_LEVELS[gpu.time_slice]:<14}|\n{_RULE}"
        else:
            code, output = refusal, f"{output}Failed to get compute policies for GPU {index} : {ERROR_TEXTS[refusal]}\n"
    return int(code), (_HEADER + rows if rows else "") + output


def _set_policy(state: SimulatedHostState, device: str, level: int) -> tuple[int, str]:
    """Set the time-slice level of a GPU, named by index or UUID; return the exit code and stdout."""
    index = next((index for index, gpu in enumerate(state.gpus) if device in {str(index), gpu.uuid}), None)
    if index is None:
        return int(Code.NOT_FOUND), "No devices were found\n"
    task = f"set timeslice policy with value {_LEVELS[level]}"
    refusal = _refusal_code(state.gpus[index]) or (None if state.root else Code.NO_PERMISSION)
    if refusal is not None:
        return int(refusal), f"Failed to {task} for GPU {index} : {ERROR_TEXTS[refusal]}\n"
    state.gpus[index].time_slice = level
    return 0, f"Successfully {task} for GPU {index}\n"


def _refusal_code(gpu: SimulatedGpu) -> Code | None:
    """Return why a GPU refuses compute policies; None: it does not."""
    if gpu.lost:
        return Code.GPU_IS_LOST
    unsupported = model_of(gpu.model).time_slice is False or "compute-policy" in gpu.not_supported
    return Code.NOT_SUPPORTED if unsupported else None
