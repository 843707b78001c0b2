"""The copies of a farm: what they are given, how they did, and which may start now. Pure."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Literal

from gpushare.base.errors import BadUsage
from gpushare.base.units import MIB, quoted
from gpushare.base.values import dataclass
from gpushare.mps.limits import CONTEXT_BYTES, Limits
from gpushare.run.end import GRACE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gpushare.memory.admission import UserLimits
    from gpushare.memory.limit import MemoryAction

MOST_COPIES: Final = 10_000
# Of a line of ``--each``.
MOST_LINE_BYTES: Final = 4096
# Of a measured peak, the others get a fifth more.
_MORE: Final = 1.2


@dataclass(frozen=True, kw_only=True)
class FarmOptions:
    """What a farm runs, and how. ``lines`` are those of ``--each`` (None: the copies have numbers only).

    ``parallel`` bounds how many run at the same time on all GPUs together (None: as many as fit). ``job_bytes`` is the
    memory of a copy by device UUID, as given (None: not given), and ``action`` what happens to a copy above it. ``cap``
    returns the thread percentage of each of N copies on one GPU (None: no cap). ``restarts`` is how often a failed copy is
    started again, ``stall_seconds`` how long a copy may print nothing (None: no limit). ``user_limits`` are what users may
    reserve on a GPU, by uid. ``done`` are the copies that an earlier farm has completed.
    """

    copies: int
    lines: tuple[str, ...] | None = None
    parallel: int | None = None
    limits: Limits = field(default_factory=Limits)
    job_bytes: Mapping[str, int] | None = None
    action: MemoryAction = "end"
    cap: Callable[[int], float | None] | None = None
    restarts: int = 0
    fail_fast: bool = False
    logs: Path | None = None
    resume: bool = False
    grace_seconds: float = GRACE_SECONDS
    stall_seconds: float | None = None
    user_limits: UserLimits | None = None
    name: str | None = None


@dataclass(kw_only=True)
class Copy:
    """One copy so far. ``failure`` is of its last try; ``tries`` counts the starts.

    ``state``: waiting, running, done, failed, ended (by the user, or with the farm), skipped (never started), or
    done earlier (by the farm that is resumed).
    """

    number: int
    line: str | None = None
    state: str = "waiting"
    tries: int = 0
    pid: int | None = None
    gpu: int | None = None
    threads_percent: float | None = None
    exit_code: int | None = None
    failure: str | None = None
    seconds: float = 0.0
    log: str | None = None
    # What to do about the failure, where its output does not say.
    hint: str | None = None
    # Why gpushare has ended it: ``memory_limit``, or None.
    reason: str | None = None
    # Processes left running by any of its tries; they were ended.
    left_behind: tuple[int, ...] = ()
    # Seen among the daemon's clients; None: never checked.
    attached: bool | None = None
    # The most memory that all its processes held together; None: unknown.
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class FarmResult:
    """How all copies did, and the signal by which the user ended them.

    ``memory_bytes`` is what each copy reserved at last (None: nothing), ``source`` where that is from: given, known (an
    earlier run), measured (the first copy). ``unrecorded`` are copies whose end could not be written to the file of the farm.
    """

    copies: tuple[Copy, ...]
    seconds: float
    ended_by: int | None = None
    memory_bytes: int | None = None
    source: str | None = None
    unrecorded: tuple[int, ...] = ()

    @property
    def failed(self) -> tuple[Copy, ...]:
        """Return the copies that failed."""
        return tuple(copy for copy in self.copies if copy.failure is not None)


Step = Literal["start", "alone", "wait", "end"]


def next_step(*, waiting: int, running: int, parallel: int | None, size_known: bool, giving_up: bool) -> Step:
    """Return what a farm does next: start a copy if the line lets it, start one alone, wait for one to end, or end.

    ``alone``: the memory of a copy is not known yet, so nothing else of the farm runs until it is. ``giving_up``: a copy
    has failed, and no further one starts.
    """
    if giving_up or not waiting:
        return "wait" if running and not giving_up else "end"
    if parallel is not None and running >= parallel:
        return "wait"
    if not size_known:
        return "wait" if running else "alone"
    return "start"


def together(copies: int, parallel: int | None, fitting: Mapping[str, int | None]) -> dict[str, int]:
    """Return how many copies run at the same time on each device: dealt out in turn, to each at most what fits there.

    ``fitting`` None: any number. Each device counts for at least one, as one may wait for its room.
    """
    left = copies if parallel is None else min(copies, parallel)
    dealt = dict.fromkeys(fitting, 0)
    while left > 0:
        open_ones = [key for key, most in fitting.items() if most is None or dealt[key] < most]
        if not open_ones:
            break
        # As many rounds at once as the smallest of them has room for.
        rooms = [most - dealt[key] for key in open_ones if (most := fitting[key]) is not None]
        rounds = min([left // len(open_ones), *rooms]) or 1
        for key in open_ones:
            given = min(rounds, left)
            dealt[key] += given
            left -= given
    return {key: max(1, number) for key, number in dealt.items()}


def share_of_threads(copies: int) -> float | None:
    """Return the thread cap of each of N copies on one GPU, 200/N percent; None (no cap) for one or two."""
    return None if copies <= 2 else max(0.1, round(200.0 / copies, 1))


def size_of_others(peak_bytes: int | None) -> int:
    """Return what each further copy reserves after one that was measured: a fifth more; at least one CUDA context."""
    return max(CONTEXT_BYTES, int((peak_bytes or 0) * _MORE)) // MIB * MIB


def command_of(command: Sequence[str], copy: Copy) -> list[str]:
    """Return a command with the line of a copy, else its number, in place of every ``{}``."""
    text = str(copy.number) if copy.line is None else copy.line
    return [word.replace("{}", text) for word in command]


def parse_lines(text: bytes, name: str) -> tuple[str, ...]:
    """Return the lines of ``--each`` without the empty ones; ``name`` is the file, for errors.

    Raises:
        BadUsage: none is left, one is too long or no text, or there are too many (code ``bad_lines``).
    """
    lines: list[str] = []
    for number, raw in enumerate(text.split(b"\n"), start=1):
        line = raw.removesuffix(b"\r")
        if not line.strip():
            continue
        if len(line) > MOST_LINE_BYTES:
            raise _bad_lines(f"line {number} of {name} has {len(line)} bytes", f"give at most {MOST_LINE_BYTES} bytes")
        try:
            words = line.decode()
        except UnicodeDecodeError:
            words = "\0"
        if "\0" in words:
            raise _bad_lines(f"line {number} of {name} is not text", "give a file of UTF-8 text")
        lines.append(words)
        if len(lines) > MOST_COPIES:
            raise _bad_lines(f"{name} has more than {MOST_COPIES} lines", f"split it: split -l {MOST_COPIES} FILE")
    if not lines:
        raise _bad_lines(
            f"{name} has no lines", "give one line for each copy: seq 8 | gpushare farm --each - -- CMD {}"
        )
    return tuple(lines)


def _bad_lines(message: str, hint: str) -> BadUsage:
    return BadUsage(message, hint, code="bad_lines")


def file_title(path: str) -> str:
    """Return a file of ``--each`` for people."""
    return "stdin" if path == "-" else quoted(path)
