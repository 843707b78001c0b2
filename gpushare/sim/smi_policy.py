"""nvidia-smi compute-policy of a simulated host: the time-slice level."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare.sim.models import model_of
from gpushare.sim.state import SimulatedGpu, SimulatedHostState

_HELP = """
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
_RULE = "+-------------------------------------+\n"
_LEVELS = ("Default", "Short", "Medium", "Long")


def run(state: SimulatedHostState, words: Sequence[str]) -> tuple[int, str]:
    """Carry out the words after ``compute-policy`` on the state; return exit code and output."""
    ids, listing, level, unknown = _parse(words)
    if unknown == "-h" or not words:
        return 0, _HELP
    if unknown is not None:
        return 2, f"ERROR: Option {unknown} is not recognized. Please run 'nvidia-smi compute-policy -h'.\n\n"
    if listing == (level is not None):
        return 2, "One, and only one, compute-policy command allowed at a time\n"
    chosen = [(index, gpu) for index, gpu in enumerate(state.gpus) if ids is None or _matches(ids, index, gpu)]
    if not chosen:
        return 6, "Failed to find any matching device...\n"
    if level is None:
        return _list(chosen)
    if not level.isdigit() or int(level) >= len(_LEVELS):
        return 2, f"Failed to set timeslice for requested devices : Invalid Argument\n{_HELP}"
    return _set(state, chosen, int(level))


def _parse(words: Sequence[str]) -> tuple[list[str] | None, bool, str | None, str | None]:
    ids: list[str] | None = None
    listing, level = False, None
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word in {"-h", "--help"}:
            return ids, listing, level, "-h"
        if word in {"-l", "--list"}:
            listing = True
        elif word in {"-i", "--id", "--set-timeslice"} and (equals or rest):
            value = value if equals else rest.pop(0)
            if word == "--set-timeslice":
                level = value
            else:
                ids = [part.strip() for part in value.split(",")]
        else:
            return ids, listing, level, word
    return ids, listing, level, None


def _list(chosen: list[tuple[int, SimulatedGpu]]) -> tuple[int, str]:
    code, rows, errors = 0, "", ""
    for index, gpu in chosen:
        error = _unsupported(gpu)
        if error is not None:
            code = error[0]
            errors += f"Failed to get compute policies for GPU {index} : {error[1]}\n"
        else:
            rows += f"|{index:>4}   {'Timeslice':<16}{_LEVELS[gpu.time_slice]:<14}|\n{_RULE}"
    if not rows:
        return code, errors
    head = "| GPU compute policies:               |\n| GPU     Name           Value        |\n"
    return code, f"{_RULE}{head}|=====================================|\n{rows}{errors}"


def _set(state: SimulatedHostState, chosen: list[tuple[int, SimulatedGpu]], level: int) -> tuple[int, str]:
    code, text = 0, ""
    for index, gpu in chosen:
        error = _unsupported(gpu) or ((4, "Insufficient Permissions") if state.uid else None)
        if error is not None:
            code = error[0]
            text += f"Failed to set timeslice policy with value {_LEVELS[level]} for GPU {index} : {error[1]}\n"
        else:
            gpu.time_slice = level
            text += f"Successfully set timeslice policy with value {_LEVELS[level]} for GPU {index}\n"
    return code, text


def _unsupported(gpu: SimulatedGpu) -> tuple[int, str] | None:
    if gpu.lost:
        return 15, "GPU is lost"
    if model_of(gpu.model).time_slice is False or "compute-policy" in gpu.not_supported:
        return 3, "Not Supported"
    return None


def _matches(ids: list[str], index: int, gpu: SimulatedGpu) -> bool:
    return any(one in {str(index), gpu.uuid} or one.upper().endswith(gpu.pci_bus_id.upper()) for one in ids)
