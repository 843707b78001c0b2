"""What a check of `gpushare doctor` looks at, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpushare.errors import GpushareError, TimedOut
from gpushare.model import Gpu, TimeSlice

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.hostfile.file import Entry
    from gpushare.mps.daemons import FoundDaemon


# How much of a text is shown that other users choose, such as a variable of their program.
MOST_SHOWN: Final = 100


class Verdict(str, Enum):
    """How a check ended; the exit code of `doctor` is the worst one's."""

    PASS = "pass"  # noqa: S105 - a verdict
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. ``id`` never changes its meaning; ``remedy`` is a command, or None when nothing is wrong."""

    id: str
    verdict: Verdict
    seen: str
    why: str | None = None
    remedy: str | None = None
    gpu: int | None = None


def remedy_of(error: GpushareError) -> str:
    """Return the remedy for an error: its hint, unless that leads back to the doctor."""
    if isinstance(error, TimedOut):
        # A vendor program hangs in the kernel driver, whose log has the cause.
        return "sudo dmesg | grep -i -e nvrm -e xid"
    return "nvidia-smi (shows what the driver says)" if error.hint == "see: gpushare doctor" else error.hint


@dataclass
class Examination:
    """What the checks look at, asked once."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    nvml_error: GpushareError | None = None
    daemons: list[FoundDaemon] = field(default_factory=list)
    # Time-slice by GPU index; empty where nvidia-smi does not tell.
    levels: dict[int, TimeSlice | None] = field(default_factory=dict)
    # What the last gpushare.yaml that held says, by GPU index.
    wanted: Mapping[int, Entry] = field(default_factory=dict)
    # Why that file, or a part of it, is for this host no more.
    wanted_error: GpushareError | None = None

    @property
    def answering(self) -> list[Gpu]:
        """Return the GPUs that answer."""
        return [gpu for gpu in self.gpus if gpu.error is None]

    @property
    def serving(self) -> list[FoundDaemon]:
        """Return the MPS daemons that answer."""
        return [found for found in self.daemons if found.daemon.pid is not None and found.daemon.error is None]

    @property
    def believed(self) -> list[FoundDaemon]:
        """Return those of this user and of root: what any other says of itself is no reason to look or to act."""
        return [found for found in self.serving if found.trusted]
