"""One entry of the journal of MIG changes: what was there, what is to be, and how it is read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.host.identity import boot_id
from gpushare.host.kept_file import read_understood

if TYPE_CHECKING:
    from gpushare.mig.made import Proof
    from gpushare.mig.shape import GpuShape

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One change: shapes by GPU, before and as planned, and the step that was begun last."""

    title: str
    pid: int
    # When that process started, in clock ticks since boot; None in the journal of an older gpushare.
    started: int | None = None
    # Instances do not survive a reboot: what a journal of before it tells is over.
    boot_id: str | None
    before: tuple[GpuShape, ...]
    after: tuple[GpuShape, ...]
    # The names that it gives.
    names: tuple[str, ...] = ()
    step: str | None = None
    # What it has made; None in the journal of an older gpushare.
    proof: Proof | None = None
    # It was tried once to undo it, and the driver refused: who tries in vain again keeps it apart.
    tried: bool = False
    schema: int = SCHEMA


def read_entry(path: Path) -> JournalEntry | None:
    """Return the entry of a file; None: there is none, or it is of another boot, and over.

    Raises:
        ValueError: it cannot be understood; the message says why.
    """
    try:
        raw = read_understood(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if isinstance(raw, dict) and isinstance(raw.get("boot_id"), str) and raw["boot_id"] != boot_id():
        return None
    if isinstance(raw, dict) and isinstance(raw.get("schema"), int) and raw["schema"] > SCHEMA:
        raise ValueError(f"it is a newer gpushare's (schema {raw['schema']})")
    try:
        return _entry_of(raw)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it is not what gpushare writes") from None


def _entry_of(raw: Any) -> JournalEntry:
    # Not at the top: there is hardly ever a journal, and shapes bring the planner's types with them.
    from gpushare.mig.made import proof_from_json
    from gpushare.mig.shape import from_json

    before, after = (tuple(from_json(one) for one in raw[key]) for key in ("before", "after"))
    # A change has both of each GPU.
    if [one.uuid for one in before] != [one.uuid for one in after]:
        raise ValueError("before and after tell of different GPUs")
    names = tuple(str(name) for name in raw["names"])
    entry = JournalEntry(
        **{key: raw[key] for key in ("title", "pid", "boot_id", "step")},
        started=raw.get("started"),
        names=names,
        before=before,
        after=after,
        proof=None if raw.get("proof") is None else proof_from_json(raw["proof"]),
        tried=raw.get("tried") is True,
    )
    if type(raw["pid"]) is not int or type(raw.get("started")) not in {int, type(None)}:
        raise TypeError("no process")
    if not isinstance(raw["title"], str) or not all(isinstance(raw[key] or "", str) for key in ("boot_id", "step")):
        raise TypeError("no text")
    return entry
