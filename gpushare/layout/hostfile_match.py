"""Which entry of ``gpushare.yaml`` is for which GPU of a host. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.errors import BadUsage, GpushareError, NotFound
from gpushare.layout.hostfile import Entry, Exactness, HostFile
from gpushare.model import Gpu

_MAKERS: Final = frozenset({"nvidia", "tesla", "geforce", "quadro", "rtx", "gtx", "pro", "pcie", "sxm", "nvl"})


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The entries by GPU index, what is named and is not there, and notes about entries that are for no GPU."""

    entries: dict[int, Entry]
    missing: tuple[GpushareError, ...] = ()
    notes: tuple[str, ...] = ()


def matched(file: HostFile, gpus: Sequence[Gpu], same_model: Callable[[str, str], bool]) -> Matched:
    """Return the entry of each GPU; a GPU that none is for is left out, and left alone.

    ``same_model`` says whether a model as written (product name or alias) is that of a product name. A part of the
    name, ``a100``, is that of every such GPU which no entry names exactly.

    Raises:
        BadUsage: two entries name a GPU in the same way, or one name is given to several instances.
    """
    found: dict[int, Entry] = {}
    missing: list[GpushareError] = []
    notes = []
    models = [value for entry in file.entries if entry.match.by is Exactness.MODEL for value in entry.match.values]
    exact = {gpu.index for gpu in gpus if gpu.name and any(same_model(value, gpu.name) for value in models)}

    def is_model(written: str, gpu: Gpu) -> bool:
        name = gpu.name or ""
        return same_model(written, name) if gpu.index in exact else _is_part(written, name)

    for entry in sorted(file.entries, key=lambda one: -one.match.by):
        mine = _gpus_of(entry, gpus, is_model)
        for gpu in mine:
            _check_twice(file, found.get(gpu.index), entry, gpu)
            found.setdefault(gpu.index, entry)
        missing += _missing(file, entry, gpus)
        if not mine and entry.match.by in {Exactness.MODEL, Exactness.ALL}:
            notes.append(f"{file.shown}:{entry.mark}: no GPU of this host is {entry.match}")
    entries = {index: found[index] for index in sorted(found)}
    _check_names(file, entries)
    return Matched(entries=entries, missing=tuple(missing), notes=tuple(notes))


def _is_part(written: str, name: str) -> bool:
    """Return whether all words of a model as written are words of a product name, and not only the maker's or a size."""
    words, there = (set(re.findall(r"[a-z0-9]+", text.lower())) for text in (written, name))
    return words <= there and any(word not in _MAKERS and not re.fullmatch(r"\d+gb?", word) for word in words)


def _gpus_of(entry: Entry, gpus: Sequence[Gpu], is_model: Callable[[str, Gpu], bool]) -> list[Gpu]:
    by, values = entry.match.by, entry.match.values
    if by is Exactness.ALL:
        return list(gpus)
    if by is Exactness.INDEX:
        return [gpu for gpu in gpus if str(gpu.index) in values]
    if by is Exactness.UUID:
        wanted = {value.lower() for value in values}
        return [gpu for gpu in gpus if gpu.uuid is not None and gpu.uuid.lower() in wanted]
    return [gpu for gpu in gpus if gpu.name and any(is_model(value, gpu) for value in values)]


def _missing(file: HostFile, entry: Entry, gpus: Sequence[Gpu]) -> list[GpushareError]:
    there = {str(gpu.index) for gpu in gpus} | {(gpu.uuid or "").lower() for gpu in gpus}
    if entry.match.by not in {Exactness.INDEX, Exactness.UUID}:
        return []
    return [
        NotFound(
            f"{file.shown}:{entry.mark}: this host has no GPU {value}",
            "see which are there: gpushare status",
            gpu=value,
            code="unknown_gpu",
        )
        for value in entry.match.values
        if value.lower() not in there
    ]


def _check_twice(file: HostFile, before: Entry | None, entry: Entry, gpu: Gpu) -> None:
    if before is not None and before.match.by is entry.match.by:
        raise BadUsage(
            f"{file.shown}:{entry.mark}: GPU {gpu.index} is named by the entry at {before.mark} in the same way",
            "name it in one of them; uuid goes over index, index over model, model over all",
            gpu=str(gpu.index),
            code="bad_file",
        )


def _check_names(file: HostFile, entries: dict[int, Entry]) -> None:
    owners: dict[str, int] = {}
    for index, entry in entries.items():
        for one in entry.mig:
            if one.name is None:
                continue
            if one.name in owners:
                raise BadUsage(
                    f"{file.shown}:{one.mark}: the name '{one.name}' is given twice, on GPU {owners[one.name]} and GPU {index}",
                    "give each instance a name of its own, and an entry with names to one GPU",
                    code="bad_file",
                )
            owners[one.name] = index
