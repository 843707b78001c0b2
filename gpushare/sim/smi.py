"""nvidia-smi of a simulated host: its argv, output and exit code.

Texts: an H200 with driver 580.159.04, the strings of the program, and its manual page.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpushare.host.program import Completed
from gpushare.sim.settled import changing, current
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


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name. It never blocks."""
    name, words = tuple(argv), list(argv[1:])
    state = current(state_file)
    failed = _cannot_start(state)
    if failed is not None:
        return Completed(name, *failed, "")
    if _changes(words):
        with changing(state_file) as (changed, _):
            code, text = _run(changed, words)
    else:
        code, text = _run(state, words)
    return Completed(name, code, text, "")


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
    options = {word.partition("=")[0] for word in words}
    return bool(options & {"-c", "--compute-mode", "--set-timeslice"})


def _run(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    # Each part is loaded by whoever asks for it: every look at a host asks for the time-slice.
    if words[:1] == ["compute-policy"]:
        from gpushare.sim import smi_policy

        return smi_policy.run(state, words[1:])
    from gpushare.sim import smi_gpus

    return smi_gpus.run(state, words)
