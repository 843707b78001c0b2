"""Names of MIG instances, each bound to (GPU UUID, profile, first memory slice), kept across reboots.

A MIG UUID only tells a place: another instance there, even of another size, may get the same one. A name is bound to
what the user meant, and is compared with the host at each use. Names are in ``<state>/mig-names.json``; everybody can
read those of root.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage
from gpushare.host.host import is_trusted_directory, make_private_directory
from gpushare.host.records import clear_leftovers, open_lock, read_trusted, record_from, replace_file, writing

if TYPE_CHECKING:
    from gpushare.host.host import Host

SCHEMA: Final = 1
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


def names_of(host: Host) -> dict[str, NamedInstance]:
    """Return the names that this user sees, by name: root's, overridden by the user's own."""
    found: dict[str, NamedInstance] = {}
    for directory in (*host.shared_state_directories, host.state_directory):
        if not is_trusted_directory(directory):
            continue
        found.update(_read(directory / "mig-names.json"))
    return found


@contextlib.contextmanager
def names_changed(host: Host) -> Iterator[dict[str, NamedInstance]]:
    """Yield this user's names under a lock, and write them back."""
    make_private_directory(host.state_directory, variable="GPUSHARE_STATE_DIR")
    path = host.state_directory / "mig-names.json"
    descriptor = open_lock(host.state_directory / "mig-names.lock", "the lock of the names")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        clear_leftovers(host.state_directory, path.stem)
        names = _read(path)
        before = dict(names)
        yield names
        if names != before:
            _write(path, names)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, NamedInstance]:
    raw = read_trusted(path)
    entries = raw.get("names") if isinstance(raw, dict) else None
    found = (record_from(NamedInstance, entry) for entry in (entries if isinstance(entries, list) else ()))
    return {one.name: one for one in found if one is not None}


def _write(path: Path, names: dict[str, NamedInstance]) -> None:
    document = {"schema": SCHEMA, "names": [asdict(names[name]) for name in sorted(names)]}
    with writing(path, "the names of instances"):
        replace_file(path, json.dumps(document, indent=2), durable=True)
