"""Names of MIG instances: what a user calls (GPU UUID, profile, first memory slice), kept across reboots.

A MIG UUID is a locator: at the same place another instance, also one of another size, comes back with it. A name is
bound to what the user meant instead, and whoever uses it compares. ``<state>/mig-names.json`` holds them; names of root
are everybody's to read.
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
# What -g and a wish take for something else.
_PROFILE_LIKE: Final = re.compile(r"(\d+c\.)?\d+g.*|(mig|gpu)-.*|mig|all", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NamedInstance:
    """One name: the GPU instance that it means, and the users that it is granted to (empty: nobody in particular)."""

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
    """Return a name that may be given."""
    if not _NAME.fullmatch(name) or _PROFILE_LIKE.fullmatch(name):
        raise BadUsage(
            f"'{name[:60]}' cannot be the name of an instance",
            "a letter first, then letters, digits, - _ or ., 32 at most, and not like a profile: train, alice-1",
            code="bad_name",
        )
    return name


def names_of(host: Host) -> dict[str, NamedInstance]:
    """Return all names that hold for this user, by name: root's, and over them the user's own."""
    found: dict[str, NamedInstance] = {}
    for directory in (*host.shared_state_directories, host.state_directory):
        if not is_trusted_directory(directory):
            continue
        found.update(_read(directory / "mig-names.json"))
    return found


def find_name(host: Host, gpu_uuid: str | None, profile: str, start: int) -> NamedInstance | None:
    """Return the name that means this GPU instance, or None."""
    place = (gpu_uuid, profile, start)
    return next((one for one in names_of(host).values() if (one.gpu_uuid, *one.place) == place), None)


@contextlib.contextmanager
def names_changed(host: Host) -> Iterator[dict[str, NamedInstance]]:
    """Yield this user's names under a lock, and write them back.

    Raises:
        NoPermission: the directory or its files are not this user's.
        OperationFailed: they cannot be written; the names are as they were.
    """
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
