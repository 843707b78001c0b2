"""What the checks of `gpushare doctor` look at, and their result."""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from gpushare.base.errors import GpushareError, TimedOut, cut
from gpushare.base.model import Gpu, TimeSlice
from gpushare.base.package import package_rows
from gpushare.base.units import first_few
from gpushare.host.host import Host
from gpushare.hostfile.file import Entry
from gpushare.mps.daemons import FoundDaemon

# Characters shown of a text that other users choose, such as a variable of their program.
MOST_SHOWN: Final = 100
_MOST_USERS: Final = 3


class Verdict(str, Enum):
    """The result of a check. The worst one decides the exit code of `doctor`."""

    PASS = "pass"  # noqa: S105 - a verdict
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. The meaning of an ``id`` never changes. ``remedy`` says what to do; None: nothing is wrong."""

    id: str
    verdict: Verdict
    seen: str
    why: str | None = None
    remedy: str | None = None
    gpu: int | None = None

    @classmethod
    def passed(cls, id: str, seen: str, gpu: int | None = None) -> Check:  # noqa: A002 - the field's name
        """Return a check that found nothing wrong."""
        return cls(id=id, verdict=Verdict.PASS, seen=seen, gpu=gpu)

    @classmethod
    def skipped(cls, id: str, seen: str, gpu: int | None = None) -> Check:  # noqa: A002
        """Return a check that could not be made."""
        return cls(id=id, verdict=Verdict.SKIP, seen=seen, gpu=gpu)


class _Filler(string.Formatter):
    """Fills in values: ``{path!q}`` is quoted for a shell."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return shlex.quote(str(value)) if conversion == "q" else super().convert_field(value, conversion)


def finding(name: str, gpu: int | None = None, **values: Any) -> Check:
    """Return a problem as a check: a row of ``data/doctor-checks.yaml`` with these values filled in.

    ``name`` is that of the row: the id of the check, and a word where one id has several rows.
    """
    row = package_rows("doctor-checks.yaml")[name]
    verdict = Verdict.FAIL if "fail" in row else Verdict.WARN
    # The text of what was seen stands under the verdict.
    seen, cause, remedy = (_Filler().format(row[key], gpu=gpu, **values) for key in (verdict.value, "why", "remedy"))
    return Check(id=name.partition(" ")[0], verdict=verdict, seen=seen, why=cause, remedy=remedy, gpu=gpu)


def remedy_of(error: GpushareError) -> str:
    """Return what to do about an error, in the doctor's answer: its hint, unless that leads back to the doctor."""
    if isinstance(error, TimedOut):
        # A program of the driver hangs in the kernel; its log has the cause.
        return "sudo dmesg | grep -i -e nvrm -e xid"
    return "nvidia-smi (shows what the driver says)" if error.hint == "see: gpushare doctor" else error.hint


@dataclass
class Examination:
    """What the checks look at, read once."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    nvml_error: GpushareError | None = None
    daemons: list[FoundDaemon] = field(default_factory=list)
    # "Binary version" of nvidia-cuda-mps-control.
    mps_version: int | None = None
    # Time-slice by GPU index; empty where nvidia-smi does not report it.
    levels: dict[int, TimeSlice | None] = field(default_factory=dict)
    # Entries of the last applied gpushare.yaml by GPU index.
    wanted: Mapping[int, Entry] = field(default_factory=dict)
    # Why that file, or a part of it, no longer fits this host.
    wanted_error: GpushareError | None = None
    # Why ``daemons`` is unknown; then it is empty.
    daemons_error: GpushareError | None = None

    @property
    def answering(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.error is None]

    @property
    def serving_daemons(self) -> list[FoundDaemon]:
        """Return the MPS daemons that answer."""
        return [item for item in self.daemons if item.daemon.pid is not None and item.daemon.error is None]

    @property
    def trusted_daemons(self) -> list[FoundDaemon]:
        """Return the answering daemons of this user and of root: what others claim about theirs is not acted on."""
        return [item for item in self.serving_daemons if item.trusted]


def whom_to_ask(seen: Examination, pids: Collection[int]) -> str | None:
    """Return in words the users who must act, because these processes are theirs; None: this user can act.

    Root asks known owners, too: the processes are not root's to end.
    """
    owners = [seen.host.processes.describe(pid) for pid in pids]
    # Where one of the processes is this user's, he can begin there.
    if os.getpid() in pids or any(info is not None and info.uid == seen.host.uid for info in owners):
        return None
    users = sorted({info.user for info in owners if info is not None and info.user})
    if users:
        return first_few(users, _MOST_USERS)
    return None if seen.host.root else "the administrator (its owner is unknown)"


def for_owner(seen: Examination, check: Check, pids: Collection[int]) -> Check:
    """Return a check with "ask USER" before its remedy if these processes are not this user's to end."""
    owner = whom_to_ask(seen, pids)
    return check if owner is None else replace(check, remedy=f"ask {owner}: {check.remedy}")


def process_title(seen: Examination, pid: int) -> str:
    """Return a process for people: ``123 (python, alice)``."""
    info = seen.host.processes.describe(pid)
    if info is None:
        return str(pid)
    description = ", ".join(filter(None, (cut(info.name or "", MOST_SHOWN), info.user)))
    return f"{pid} ({description})" if description else str(pid)
