"""What is known of a command on one model of GPU: the most memory that it has used, and how much of the GPU it uses alone.

`run`, `bench`, `tune` and `observe` keep it. A job that gives no size reserves its peak; `run -g any` ranks GPUs by use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from gpushare.base.errors import GpushareError
from gpushare.base.selection import Device
from gpushare.base.typed import Percent, Within
from gpushare.base.values import dataclass
from gpushare.host.host import Host
from gpushare.host.store import Kept, RecordStore, digest_of_words

# Each command of a sweep over parameters has its own file; above this number the oldest files go.
_MOST_FILES: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Profile(Kept):
    """A command on one model of GPU. Unknown is None."""

    # The peak over all processes of one copy, contexts included.
    memory_bytes: Annotated[int, Within(1, 1 << 50)] | None = None
    # It was still growing when it ended for want of memory: it needs more.
    short: bool = False
    # How much of a whole GPU it uses alone: busy SMs (GPM), else the time in which a kernel ran.
    use_percent: Percent | None = None


PROFILES: Final = RecordStore(Profile, "peaks", "the peak of a command", survives_reboot=True, mode=0o600)


def find_profile(host: Host, device: Device, command: Sequence[str]) -> Profile | None:
    """Return what is known of a command on such a GPU; None: it has not run here."""
    return PROFILES.read(PROFILES.path(host, digest_of(device, command)))


class Peak(NamedTuple):
    """The most bytes that a command has used, and whether it ended for want of more (``Profile.short``)."""

    memory_bytes: int
    short: bool


def known_peak(host: Host, devices: Iterable[Device], commands: Sequence[Sequence[str]]) -> Peak | None:
    """Return the highest peak of one of these commands on such GPUs; None: unknown."""
    profiles = filter(None, (find_profile(host, device, command) for device in devices for command in commands))
    peaks = (Peak(profile.memory_bytes, profile.short) for profile in profiles if profile.memory_bytes is not None)
    return max(peaks, default=None)


class KnownCommands:
    """The commands of this user of which something is known, found by the command lines of running processes."""

    def __init__(self, host: Host) -> None:
        self._host, self._names = host, frozenset[str]()
        with contextlib.suppress(OSError):
            self._names = frozenset(os.listdir(PROFILES.path(host, "").parent))

    def __bool__(self) -> bool:
        return bool(self._names)

    def use_percent(self, device: Device, words: Sequence[str]) -> float | None:
        """Return how much of a GPU the command that a process runs uses alone; None: it is not known."""
        for command in _typed_commands(words):
            digest = digest_of(device, command)
            # Most processes have no profile: their files are not even looked for.
            if f"{digest}.json" in self._names:
                profile = PROFILES.read(PROFILES.path(self._host, digest))
                if profile is not None:
                    return profile.use_percent
        return None


def _typed_commands(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield what a user may have typed for a command line: the kernel puts the interpreter before a script."""
    yield words
    if len(words) > 1 and "/" in words[1]:
        yield words[1:]
        yield (os.path.basename(words[1]), *words[2:])


def keep_profile(host: Host, device: Device, command: Sequence[str], profile: Profile) -> None:
    """Keep what was measured: the larger peak, and the newest use. If it cannot be written, later runs know less."""
    before = find_profile(host, device, command)
    merged = profile if before is None else _merge_profiles(before, profile)
    if merged in (before, Profile()):
        return
    path = PROFILES.path(host, digest_of(device, command))
    with contextlib.suppress(GpushareError):
        PROFILES.write(replace(merged, path=path))
        _drop_oldest_files(path.parent)


def digest_of(device: Device, command: Sequence[str]) -> str:
    """Return the name under which a command is kept."""
    return digest_of_words((device.gpu.name or "", *command))


def _merge_profiles(before: Profile, new: Profile) -> Profile:
    """Return what is known after another run: the larger peak, whether it needs more, the newest use."""
    peak_before = before.memory_bytes or 0
    peak = new.memory_bytes or 0
    only_use_was_measured = new.memory_bytes is None and not new.short
    # Short of a peak that it has reached before: other jobs had taken the rest.
    was_crowded_out = new.short and peak < peak_before
    return Profile(
        memory_bytes=max(peak_before, peak) or None,
        short=before.short if only_use_was_measured or was_crowded_out else new.short,
        use_percent=before.use_percent if new.use_percent is None else new.use_percent,
    )


def _drop_oldest_files(directory: Path) -> None:
    """Remove the oldest tenth of the profiles once there are more than `_MOST_FILES`."""
    try:
        files = [entry for entry in os.scandir(directory) if entry.name.endswith(".json")]
        if len(files) <= _MOST_FILES:
            return
        by_age = sorted(files, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return
    number_removed = len(files) - _MOST_FILES * 9 // 10
    for entry in by_age[:number_removed]:
        with contextlib.suppress(OSError):
            Path(entry.path).unlink()
