"""What the commands of the simulated nvidia-smi share: options, what is said of wrong ones, the GPUs they name, tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from gpushare.gpu_models import model_of
from gpushare.sim.nvml_abi import Code, Handle, HandleKind, Refused, Target
from gpushare.sim.state import SimulatedHostState

HELP: Final = " Please run 'nvidia-smi -h' for help.\n\n"
# How an option takes a value.
NO_VALUE, VALUE, MAYBE = "no", "yes", "maybe"


class Wrong(Exception):
    """The command failed: its exit code, and what the program prints for it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def parse(words: Sequence[str], options: Mapping[str, str], *, subcommand: bool = False) -> dict[str, str | None]:
    """Return the options with their values."""
    found: dict[str, str | None] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in options or (equals and options[name] == NO_VALUE):
            if subcommand:
                raise Wrong(2, f'Option "{word}" is not recognized.\n')
            raise Wrong(255, f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi -h'.\n\n")
        found[name] = value if equals else None
        if options[name] != NO_VALUE and not equals:
            # To a subcommand, another option is no value.
            if rest and not (subcommand and rest[0].partition("=")[0] in options):
                found[name] = rest.pop(0)
            elif options[name] == VALUE and subcommand:
                raise Wrong(2, f'Option "{word}" is missing its value.\n')
            elif options[name] == VALUE:
                raise Wrong(255, f"ERROR: Option {word} is missing its value.{HELP}")
    return found


def number(text: str | None) -> int | None:
    """Return a whole number; None for anything else."""
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None


def choose(state: SimulatedHostState, ids: str | None, *, lost: bool = False) -> list[Target]:
    """Return the GPUs that ``-i`` names by index or UUID, with commas; all when it is not given.

    Raises:
        Wrong: there is none, or one of them fell off the bus and ``lost`` is not set.
    """
    wanted = None if ids is None else {part.strip() for part in ids.split(",")}
    gpus = (Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model)) for index, gpu in enumerate(state.gpus))
    found = [one for one in gpus if wanted is None or wanted & {str(one.handle.index), one.gpu.uuid}]
    if not found:
        raise Wrong(6, "No devices were found\n")
    gone = [] if lost else [one for one in found if one.gpu.lost]
    if gone:
        raise Wrong(15, lost_text(gone[0]))
    return found


def lost_text(one: Target) -> str:
    """Return what is said of a GPU that fell off the bus."""
    where = f"GPU{one.handle.index}: {one.gpu.pci_bus_id}"
    return f"Unable to determine the device handle for {where}: GPU is lost.  Reboot the system to recover this GPU\n"


def supports(one: Target, entry_point: str) -> bool:
    """Return whether an NVML entry point works on this GPU (fault ``not-supported``)."""
    return not any(name.startswith(entry_point) for name in one.gpu.not_supported)


def require_root(state: SimulatedHostState) -> None:
    """Refuse a change to any user but root."""
    if not state.root:
        raise Refused(Code.NO_PERMISSION)
