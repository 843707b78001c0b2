"""What is known of a command on one model of GPU: the most memory that it has used, and how much of the GPU it uses alone.

`run`, `bench`, `tune` and `observe` keep it. A job that gives no size reserves its peak; `run -g any` ranks GPUs by use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from gpushare.base.typed import Percent, Within
from gpushare.base.values import dataclass
from gpushare.host.store import Kept, RecordStore

if TYPE_CHECKING:
    from gpushare.base.selection import Device
    from gpushare.host.host import Host

# Each command of a sweep over parameters has its own file; above this number the oldest files go.
_MOST_FILES: Final = 1000
_MOST_PAIRS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Profile(Kept):
    """A command on one model of GPU. Unknown is None."""

    # The peak over all processes of one copy, contexts included.
    memory_bytes: Annotated[int, Within(1, 1 << 50)] | None = None
    # It was still growing when it ended for want of memory: it needs more.
    short: bool = False
    # Alone on a whole GPU, in percent: busy SMs and memory bandwidth (GPM), and the time in which a kernel ran.
    sm_percent: Percent | None = None
    dram_percent: Percent | None = None
    busy_percent: Percent | None = None
    # The part of its speed that it kept next to another command: "DIGEST 0.93".
    pairs: tuple[str, ...] = ()

    @property
    def use_percent(self) -> float | None:
        """Return how much of a GPU it uses: SMs, else time."""
        return self.busy_percent if self.sm_percent is None else self.sm_percent

    @property
    def kept(self) -> Mapping[str, float]:
        """Return the part of its speed that it kept next to other commands, by their digests."""
        found = {}
        for pair in self.pairs[-_MOST_PAIRS:]:
            digest, _, share = pair.partition(" ")
            with contextlib.suppress(ValueError):
                if 0 <= float(share) <= 1:
                    found[digest] = float(share)
        return found

    def next_to(self, digest: str, kept: float) -> Profile:
        """Return it with the part of its speed that it keeps next to another command."""
        shares = {name: share for name, share in self.kept.items() if name != digest}
        shares[digest] = round(min(1.0, max(0.0, kept)), 4)
        return replace(self, pairs=tuple(f"{name} {share:g}" for name, share in list(shares.items())[-_MOST_PAIRS:]))


PROFILES: Final = RecordStore(Profile, "peaks", "the peak of a command", lasting=True, mode=0o600)


def find_profile(host: Host, device: Device, command: Sequence[str]) -> Profile | None:
    """Return what is known of a command on such a GPU; None: it has not run here."""
    return PROFILES.read(PROFILES.path(host, digest_of(device, command)))


class Known:
    """The commands of this user of which something is known, found by the command lines of running processes."""

    def __init__(self, host: Host) -> None:
        self._host, self._names = host, frozenset[str]()
        with contextlib.suppress(OSError):
            self._names = frozenset(os.listdir(PROFILES.path(host, "").parent))

    def __bool__(self) -> bool:
        return bool(self._names)

    def find(self, device: Device, words: Sequence[str]) -> tuple[str, Profile] | None:
        """Return the digest and the profile of the command that a process runs; None: it is not known."""
        for command in _commands(words):
            digest = digest_of(device, command)
            if f"{digest}.json" in self._names:
                profile = PROFILES.read(PROFILES.path(self._host, digest))
                if profile is not None:
                    return digest, profile
        return None


def _commands(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield what a user may have typed for a command line: the kernel puts the interpreter before a script."""
    yield words
    if len(words) > 1 and "/" in words[1]:
        yield words[1:]
        yield (os.path.basename(words[1]), *words[2:])


def keep_profile(host: Host, device: Device, command: Sequence[str], profile: Profile) -> None:
    """Keep what was measured: the larger peak, and the newest use.

    Raises:
        NoPermission, OperationFailed: it cannot be written.
    """
    before = find_profile(host, device, command)
    merged = profile if before is None else _merged(before, profile)
    if merged == before:
        return
    path = PROFILES.path(host, digest_of(device, command))
    PROFILES.write(replace(merged, path=path))
    _drop_oldest(path.parent)


def digest_of(device: Device, command: Sequence[str]) -> str:
    """Return the name under which a command is kept. The command line may hold a secret, so only its digest is."""
    words = "\0".join((device.gpu.name or "", *command)).encode(errors="surrogateescape")
    return hashlib.sha256(words).hexdigest()[:24]


def _merged(before: Profile, new: Profile) -> Profile:
    known, peak, short = before.memory_bytes or 0, new.memory_bytes or 0, before.short
    if new.short or peak > known:
        # What ran out of memory below a peak that it has reached before was in the way of others.
        short = new.short if peak >= known else before.short
    elif new.memory_bytes is not None:
        # It has ended well with less.
        short = False
    pairs = before
    for digest, kept in new.kept.items():
        pairs = pairs.next_to(digest, kept)
    use = before if new.use_percent is None else new
    return replace(use, memory_bytes=max(known, peak) or None, short=short, pairs=pairs.pairs)


def _drop_oldest(directory: Path) -> None:
    try:
        files = [entry for entry in os.scandir(directory) if entry.name.endswith(".json")]
        if len(files) <= _MOST_FILES:
            return
        by_age = sorted(files, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return
    for entry in by_age[: len(files) - _MOST_FILES * 9 // 10]:
        with contextlib.suppress(OSError):
            Path(entry.path).unlink()
