"""nvidia-smi, for the time-slice, which NVML does not have."""

from __future__ import annotations

import re
from typing import Final

from gpushare.base.errors import GpushareError, NotSupported, OperationFailed
from gpushare.base.model import TimeSlice
from gpushare.host import nvml
from gpushare.host.program import Completed, Pending, Programs

PROGRAM: Final = "nvidia-smi"
# 14 (infoROM corrupt) comes with good output.
_GOOD_EXIT: Final = frozenset({0, 14})
# Lists the time-slice of every GPU; it has no CSV or JSON output.
LIST_ARGV: Final = (PROGRAM, "compute-policy", "-l")


def set_argv(uuid: str, level: TimeSlice) -> list[str]:
    """Return the command that sets the time-slice of one GPU, as in NVIDIA's DRA driver."""
    return [PROGRAM, "compute-policy", "-i", uuid, "--set-timeslice", str(int(level))]


def compute_mode_command(uuid: str, mode_name: str) -> str:
    """Return the command that sets a compute mode, to show in a plan (gpushare itself uses NVML)."""
    return f"{PROGRAM} -i {uuid} -c {mode_name}"


def parse_compute_policies(text: str) -> dict[int, TimeSlice | None]:
    """Return the time-slice by GPU index from the table of ``nvidia-smi compute-policy -l``.

    Columns are found by the words of the header, because NVIDIA does not promise a stable format; an unknown value is
    None.

    Raises:
        OperationFailed: there is no such table in the text.
    """
    lines = [line.strip().strip("|").strip() for line in text.splitlines()]
    header = next(
        (line.lower().split() for line in lines if {"gpu", "name", "value"} <= set(line.lower().split())), None
    )
    if header is None:
        raise OperationFailed(
            "nvidia-smi compute-policy -l printed no table of policies",
            "see what it prints: nvidia-smi compute-policy -l",
            code="smi_text",
        )
    gpu_at, name_at, value_at = (header.index(word) for word in ("gpu", "name", "value"))
    levels: dict[int, TimeSlice | None] = {}
    for line in lines:
        words = line.split()
        if len(words) < len(header) or words[name_at].lower() != "timeslice":
            continue
        # Four digits: int() refuses numbers of thousands of them.
        if re.fullmatch(r"[0-9]{1,4}", words[gpu_at]):
            levels[int(words[gpu_at])] = parse_level(words[value_at])
    return levels


def parse_level(text: str) -> TimeSlice | None:
    """Return the level for a name or number of nvidia-smi; None: there is no such level."""
    word = text.strip().lower()
    by_name = {level.name.lower(): level for level in TimeSlice}
    by_number = {str(int(level)): level for level in TimeSlice}
    return by_name.get(word, by_number.get(word))


class ComputePolicy:
    """The time-slice policy of a host, through ``nvidia-smi compute-policy``."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def start(self, timeout: float = 5.0) -> Pending:
        """Start listing; the child runs during the NVML sweep. Errors as `Programs.start`."""
        return self._programs.start(LIST_ARGV, timeout=timeout)

    def read(self, timeout: float = 10.0) -> dict[int, TimeSlice | None]:
        """Return the level of each GPU, by index; None: one that gpushare does not know. Errors as `Programs.run`."""
        return policies_of(self._programs.run(LIST_ARGV, timeout=timeout))

    def set(self, uuid: str, level: TimeSlice) -> Completed:
        """Set the time-slice of one GPU by UUID. Read it back: the exit code proves nothing."""
        done = self._programs.run(set_argv(uuid, level), timeout=30.0)
        if done.exit_code not in _GOOD_EXIT or re.search(r"\bfailed\b", done.text, re.IGNORECASE):
            raise smi_error(done)
        return done


def policies_of(done: Completed) -> dict[int, TimeSlice | None]:
    """Return the time-slice by GPU index from a finished ``compute-policy -l``.

    With a lost GPU nvidia-smi lists the others and then fails: they count.

    Raises:
        GpushareError: it failed and listed none; as `smi_error` says.
    """
    if done.exit_code in _GOOD_EXIT:
        return parse_compute_policies(done.stdout)
    try:
        levels = parse_compute_policies(done.stdout)
    except OperationFailed:
        levels = {}
    if not levels:
        raise smi_error(done)
    return levels


def smi_error(done: Completed) -> GpushareError:
    """Return the error of a failed nvidia-smi; its exit codes equal nvmlReturn_t (man nvidia-smi)."""
    # Skip the frames of a partly printed table.
    lines = [line for line in done.text.splitlines() if not line.lstrip().startswith(("+", "|"))]
    text = " ".join(" ".join(lines).split()) or f"exit code {done.exit_code}, no text"
    message = f"'{' '.join(done.argv)}' failed: {text}"
    if done.exit_code in {nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND} or "not supported" in text.lower():
        return NotSupported(message, "this GPU has no time-slice policy; see: gpushare timeslice show")
    code = nvml.NO_PERMISSION if "permission" in text.lower() else done.exit_code
    if code in {nvml.NO_PERMISSION, nvml.NOT_FOUND, nvml.GPU_IS_LOST, nvml.DRIVER_NOT_LOADED, nvml.LIBRARY_NOT_FOUND}:
        return nvml.nvml_error(code, message)
    return OperationFailed(message, "see: gpushare doctor", code="smi")
