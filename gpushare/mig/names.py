"""Names of MIG instances, each bound to (GPU UUID, profile, first memory slice), kept across reboots.

A MIG UUID only tells a place: another instance there, even of another size, may get the same one. A name is bound to
what the user meant, and is compared with the host at each use. Everybody can read those of root.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage
from gpushare.host.store import Kept, RecordStore
from gpushare.values import dataclass

if TYPE_CHECKING:
    from gpushare.host.host import Host

_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII | re.IGNORECASE)
# Words with another meaning for -g and in a wish.
_PROFILE_LIKE: Final = re.compile(r"(\d+c\.)?\d+g.*|(mig|gpu)-.*|mig|all", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NamedInstance:
    """One name: the GPU instance that it means, and the users that it is granted to (empty: open to everybody)."""

    name: str
    gpu_uuid: str
    # The driver's name: 3g.71gb.
    profile: str
    # Its first memory slice.
    start: int
    users: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.profile}:{self.start}"

    @property
    def place(self) -> tuple[str, int]:
        """Return profile and first memory slice, as `GpuInstance.place`."""
        return self.profile, self.start


def check_name(name: str) -> str:
    """Return a name if it is allowed."""
    if not _NAME.fullmatch(name) or _PROFILE_LIKE.fullmatch(name):
        raise BadUsage(
            f"'{name[:60]}' cannot be the name of an instance",
            "a letter first, then letters, digits, - _ or ., 32 at most, and not like a profile: train, alice-1",
            code="bad_name",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class _Names(Kept):
    names: tuple[NamedInstance, ...] = ()


NAMES: Final = RecordStore(_Names, "names", "the names of instances", lasting=True, durable=True)


def names_of(host: Host) -> dict[str, NamedInstance]:
    """Return the names that this user sees, by name: root's, overridden by the user's own."""
    return {each.name: each for record in reversed(NAMES.find(host, "mig")) for each in record.names}


@contextlib.contextmanager
def names_changed(host: Host) -> Iterator[dict[str, NamedInstance]]:
    """Yield this user's names under a lock, and write them back."""
    path = NAMES.path(host, "mig")
    with NAMES.locked(host):
        record = NAMES.read(path) or _Names(path=path)
        names = {each.name: each for each in record.names}
        before = dict(names)
        yield names
        if names != before:
            NAMES.write(replace(record, names=tuple(names[name] for name in sorted(names))))
