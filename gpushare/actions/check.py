"""What a check of `gpushare doctor` looks at, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gpushare.errors import GpushareError
from gpushare.model import Gpu

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.host.mps import FoundDaemon


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


@dataclass
class Examination:
    """What the checks look at, asked once."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    nvml_error: GpushareError | None = None
    daemons: list[FoundDaemon] = field(default_factory=list)
