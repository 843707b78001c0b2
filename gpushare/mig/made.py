"""Which GPU instances gpushare created: what others created goes only with consent.

They are in ``<run>/mig/made.json``, which like the instances does not survive a reboot. An instance is told by its GPU,
profile and place, because the driver reuses ids; one that is gone at the next change is dropped from the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from gpushare.host.host import is_trusted_directory
from gpushare.host.identity import boot_id
from gpushare.host.records import read_trusted, replace_file, writing

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.host import Host
    from gpushare.mig.shape import GpuShape

SCHEMA: Final = 1
# GPU UUID, profile, first memory slice.
Made = tuple[str, str, int]


def made_by_gpushare(host: Host) -> frozenset[Made]:
    """Return the instances that this user's gpushare or root's has created since the boot; some may be gone."""
    found: set[Made] = set()
    for directory in host.run_directories:
        if is_trusted_directory(directory, "mig"):
            found |= _read(directory / "mig" / "made.json")
    return frozenset(found)


def note_made(host: Host, before: Iterable[GpuShape], after: Iterable[GpuShape], made: Iterable[Made]) -> None:
    """Note what a change has created and destroyed. The caller holds the lock of all MIG changes.

    Call it before the journal of the change ends: where it fails, the next gpushare finds the change complete and
    notes it.
    """
    path = host.run_directory / "mig" / "made.json"
    known, there = _read(path), {(gpu.uuid, *one.place) for gpu in after for one in gpu.instances}
    gpus = {gpu.uuid for gpu in before}
    now = {one for one in known if one[0] not in gpus or one in there} | (set(made) & there)
    if now == known:
        return
    rows = [{"gpu": gpu, "profile": profile, "start": start} for gpu, profile, start in sorted(now)]
    text = json.dumps({"schema": SCHEMA, "boot_id": boot_id(), "instances": rows}, indent=2)
    with writing(path, "the record of the instances that gpushare created"):
        replace_file(path, text)


def _read(path: Path) -> set[Made]:
    raw = read_trusted(path)
    if not isinstance(raw, dict) or raw.get("boot_id") != boot_id() or not isinstance(raw.get("instances"), list):
        return set()
    rows = [one for one in raw["instances"] if isinstance(one, dict)]
    found = [(one.get("gpu"), one.get("profile"), one.get("start")) for one in rows]
    return {
        (gpu, profile, start)
        for gpu, profile, start in found
        if isinstance(gpu, str) and isinstance(profile, str) and type(start) is int
    }
