"""The vendor's programs of a simulated host, run in this process: no child, so no start-up cost.

nvidia-smi is here: the two commands that gpushare runs, `host.smi.LIST_ARGV` and `host.smi.set_argv`. Any other is refused:
compute modes and MIG are changed by NVML. Texts: an H200 with driver 580.159.04; of a host without a driver only the exit code.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpushare.base.model import MPS_SERVER, TimeSlice
from gpushare.gpu_models import model_of
from gpushare.host.program import (
    MPS_CONTROL,
    Completed,
    Listener,
    Pending,
    Programs,
    merged_environment,
    missing_program_error,
    timed_out_error,
)
from gpushare.sim.current import changing, clock, current
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, StateFile

SMI = "nvidia-smi"
TOOLKIT = "nvidia-ctk"
_POLL_SECONDS = 0.01


class _Deferred:
    """A simulated program that runs when its result is asked for the first time."""

    def __init__(self, run: Callable[[], Completed]) -> None:
        self.result = functools.cache(run)


class SimulatedPrograms(Programs):
    """Stands in for `Programs` on a simulated host.

    With ``GPUSHARE_MPS_CONTROL`` set, nvidia-cuda-mps-control is the real program at that path: its
    daemon runs on this machine, next to the simulated GPUs.
    """

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def find(self, name: str) -> str | None:
        """Return the path of a program; None: it is not installed."""
        if self._is_real(name):
            return Programs().find(name)
        # One package has both programs.
        package = MPS_CONTROL if name == MPS_SERVER else name
        return None if self._is_missing(package) else f"/usr/bin/{name}"

    def listener(self, pipe_directory: str) -> Listener | None:
        """Return the daemon that listens in a pipe directory; None: none does."""
        if self._is_real(MPS_CONTROL):
            return Programs().listener(pipe_directory)
        for daemon in current(self._state_file).daemons:
            if daemon.pipe_directory == pipe_directory:
                return Listener(daemon.pid, daemon.uid)
        return None

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Pending:
        """Return a program that runs when its result is asked for; NotFound at once if it is not installed."""
        name = os.path.basename(argv[0])
        if self._is_real(name):
            return Programs().start(argv, stdin=stdin, env=env, timeout=timeout)
        if self._is_missing(name):
            raise missing_program_error(name)
        environment = merged_environment(env)
        deadline = clock() + timeout
        return _Deferred(lambda: self._run_program(argv, name, stdin, environment, deadline, timeout))

    def _run_program(
        self, argv: Sequence[str], name: str, stdin: str, env: Mapping[str, str], deadline: float, timeout: float
    ) -> Completed:
        """Run a program, and return what it printed; TimedOut: it hangs (fault ``hang``)."""
        while name in current(self._state_file).hanging_programs:
            if clock() >= deadline:
                raise timed_out_error(argv, timeout)
            time.sleep(_POLL_SECONDS)
        if name == SMI:
            return run_smi(argv, self._state_file)
        if name == TOOLKIT:
            from gpushare.sim import nvidia_ctk

            return nvidia_ctk.main(argv, self._state_file)
        from gpushare.sim import mps_control

        return mps_control.main(argv, stdin, env, self._state_file, timeout)

    def _is_missing(self, name: str) -> bool:
        """Return whether a program is not installed: by the fault ``missing``, or no program that is simulated."""
        state = current(self._state_file)
        if name == TOOLKIT and not state.toolkit_installed:
            return True
        return name not in {SMI, MPS_CONTROL, TOOLKIT} or name in state.missing_programs

    @staticmethod
    def _is_real(name: str) -> bool:
        return name == MPS_CONTROL and bool(os.environ.get("GPUSHARE_MPS_CONTROL"))


_LEVELS: Final = tuple(level.name.title() for level in TimeSlice)
_LEVEL_NUMBERS: Final = [str(int(level)) for level in TimeSlice]
_RULE: Final = f"+{'-' * 37}+\n"
_HEADER: Final = f"""\
{_RULE}| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
"""


def run_smi(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run nvidia-smi; ``argv`` with its name. Errors go to stdout too."""
    state = current(state_file)
    match list(argv[1:]):
        case _ if not (state.nvml_installed and state.driver_loaded):
            missing = Code.DRIVER_NOT_LOADED if state.nvml_installed else Code.LIBRARY_NOT_FOUND
            code, text = int(missing), f"{ERROR_TEXTS[missing]}\n"
        case ["compute-policy", "-l"]:
            code, text = _list_policies(state)
        case ["compute-policy", "-i", device, "--set-timeslice", level] if level in _LEVEL_NUMBERS:
            with changing(state_file) as (changed, _):
                code, text = _set_policy(changed, device, int(level))
        case words:
            code, text = 255, f"ERROR: Option {' '.join(words)} is not simulated. Please run 'gpushare status'.\n\n"
    return Completed(tuple(argv), code, text, "")


def _list_policies(state: SimulatedHostState) -> tuple[int, str]:
    """Return the exit code (of the last GPU that refuses), and the table of time-slice levels followed by the errors."""
    code, rows, errors = Code.SUCCESS, "", ""
    for index, gpu in enumerate(state.gpus):
        refusal = _refusal_code(gpu)
        if refusal is None:
            rows += f"|{index:>4}   {'Timeslice':<16}{_LEVELS[gpu.time_slice]:<14}|\n{_RULE}"
        else:
            code = refusal
            errors += f"Failed to get compute policies for GPU {index} : {ERROR_TEXTS[refusal]}\n"
    return int(code), (_HEADER + rows if rows else "") + errors


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
