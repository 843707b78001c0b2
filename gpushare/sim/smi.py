"""nvidia-smi of a simulated host: its argv, output and exit code.

Errors go to stdout too, all but one. Texts: an H200 with driver 580.159.04, and what the programs of drivers 535, 550, 555 and
580 say to each wrong argument on NVIDIA's mocked NVML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from gpushare.host.program import Completed
from gpushare.sim.models import model_of
from gpushare.sim.settled import changing, current
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
NO_DEVICES: Final = (6, "No devices were found\n")
BAD_IDS: Final = (255, "Failed to parse device string on command line")
# How an option takes a value.
NO_VALUE, VALUE, MAYBE = "no", "yes", "maybe"
_CHANGING = {"-c", "--compute-mode", "-mig", "--multi-instance-gpu", "--set-timeslice"}
_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)")
_RULE = "+-------------------------------------+\n"
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


class Wrong(Exception):
    """The arguments are wrong: what the program prints for it, and its exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


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
    # Each part is loaded by whoever asks for it: every look at a host asks for the time-slice.
    if words[:1] == ["compute-policy"]:
        return _compute_policy(state, words[1:])
    if words[:1] == ["mig"]:
        from gpushare.sim import smi_mig

        return smi_mig.run(state, words[1:])
    from gpushare.sim import smi_gpus

    return smi_gpus.run(state, words)


def parse(words: Sequence[str], options: Mapping[str, tuple[str, str]]) -> list[tuple[str, str | None]]:
    """Return the options of a subcommand by their short names, with their values.

    Raises:
        Wrong: one is not known, or misses its value.
    """
    long = {name: short for short, (name, _) in options.items() if name}
    found: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word, equals, text = rest.pop(0).partition("=")
        option = long.get(word, word)
        if option not in options:
            raise Wrong(2, f'Option "{word}" is not recognized.\n')
        takes, value = options[option][1], text if equals else None
        if takes == NO_VALUE and equals:
            rest.insert(0, text)
        elif takes != NO_VALUE and not equals:
            # Another option is no value; "-1" is one.
            known = bool(rest) and long.get(name := rest[0].partition("=")[0], name) in options
            if rest and not known:
                value = rest.pop(0)
            elif takes == VALUE:
                raise Wrong(2, f'Option "{word}" is missing its value.\n')
        found.append((option, value))
    return found


def read_number(text: str) -> int | None:
    """Return a whole number as C's strtol reads it, in any of its bases; None when something else is in it."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    base = 16 if digits[:2] in {"0x", "0X"} else 8 if digits.startswith("0") else 10
    try:
        number = int(digits[:40], base)
    except ValueError:
        return None
    return -number if sign == "-" else number


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
    # nvidia-smi checks no number, the driver does.
    known = level < len(_LEVELS)
    title = _LEVELS[level] if known else "Unknown"
    for index, gpu in chosen:
        error = _unsupported(gpu) or ((4, "Insufficient Permissions") if state.uid else None)
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
