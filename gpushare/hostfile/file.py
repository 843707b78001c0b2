"""``gpushare.yaml``, version 1: how each GPU of a host is shared. Frozen, pure.

An entry names its GPUs (``match``: all, or index, uuid or model) and exactly one way of sharing::

    version: 1
    gpus:
    - match: {index: [0, 1]}
      timeslice: long
    - match: {model: h100}
      mps: {threads: 25, memory: 4G, priority: low, users: [alice], exclusive: true}
    - match: {uuid: GPU-...}
      mig:
      - 1g.10gb*2
      - {wish: "3g.40gb:4", name: train, users: [alice], mps: {threads: 50}}
    - match: all
      exclusive: true
    slices:                            # for single processes: `gpushare timeslice keep`
    - match: {user: alice, command: "*serve.py*"}
      slice: 16ms                      # or weight: 3, or role: production or opportunistic

    memory:                            # what the jobs of a user may reserve on each GPU: `gpushare run --wait`
    - match: {user: alice}
      limit: 40G
    reserve: {longest: 4h}             # the longest lease of a user: `gpushare reserve`; 0m: none

Of several entries for one GPU the most specific wins: uuid, index, model, all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, NotFound
from gpushare.base.model import FileWay, Gpu, TimeSlice, Way
from gpushare.base.units import duration_option, format_slice, size_option
from gpushare.inputs import Flow, Mark, yaml_text
from gpushare.mig.wish import Wish, parse_wish
from gpushare.mps.limits import Limits
from gpushare.timeslice.rules import ProcessMatch, Rule

VERSION: Final = 1
# The key of a memory limit, as errors say to write it.
MEMORY_KEY: Final = "memory:"


class Exactness(IntEnum):
    """How an entry names its GPUs; of several for one GPU the greatest wins."""

    ALL = 0
    MODEL = 1
    INDEX = 2
    UUID = 3

    @property
    def title(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Match:
    """The GPUs that an entry is for; ``values`` are indexes, UUIDs or models as text, none for all."""

    by: Exactness
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.by.title if self.by is Exactness.ALL else f"{self.by.title} {', '.join(self.values)}"


@dataclass(frozen=True, kw_only=True)
class MpsWish:
    """An MPS daemon as a file wants it, or as it runs.

    ``users`` may connect; empty: all. ``exclusive``: nothing else runs on the GPU (compute mode exclusive-process).
    """

    limits: Limits = field(default_factory=Limits)
    users: tuple[str, ...] = ()
    exclusive: bool = False
    # Several users at the same time, in one server of root.
    multiuser: bool = False
    # Where its clients find it, of one that runs or whose place is known.
    pipe_directory: str | None = field(default=None, compare=False)

    @property
    def words(self) -> list[str]:
        """Return it for people: its limits, who it is for, what else may run."""
        words = list(self.limits.words)
        if self.users:
            words.append(f"for {', '.join(self.users)}")
        if self.multiuser:
            words.append("several users at the same time")
        if self.exclusive:
            words.append("no programs outside it")
        return words


@dataclass(frozen=True, kw_only=True)
class InstanceWish:
    """MIG devices as a file wants them: one word of a wish, with options.

    ``name`` and ``users`` apply to the GPU instance. ``mps`` is a daemon on each device; without it they are
    time-sliced.
    """

    wish: str
    name: str | None = None
    users: tuple[str, ...] = ()
    mps: MpsWish | None = None
    mark: Mark = field(default=Mark(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry: its GPUs, and how they are shared."""

    match: Match
    sharing: FileWay
    time_slice: TimeSlice | None = None
    mps: MpsWish | None = None
    mig: tuple[InstanceWish, ...] = ()
    mark: Mark = field(default=Mark(), compare=False)

    @property
    def wish(self) -> Wish:
        return parse_wish(" ".join(mig.wish for mig in self.mig)) if self.mig else ()


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """What the jobs of one user may reserve together on one GPU. ``users`` empty: every user but root."""

    users: tuple[str, ...]
    limit_bytes: int
    mark: Mark = field(default=Mark(), compare=False)


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A whole file. ``rules`` are for the time-slices of processes, ``memory`` for what users reserve, the first match counts.

    ``shown`` is what it is called in messages.
    """

    entries: tuple[Entry, ...] = ()
    rules: tuple[Rule, ...] = ()
    memory: tuple[MemoryLimit, ...] = ()
    # The longest lease of a user (`gpushare reserve`); None: the longest that there is.
    longest_lease_seconds: float | None = None
    shown: str = field(default="gpushare.yaml", compare=False)


# -- writing ---------------------------------------------------------------------------------------


def document_of(file: HostFile) -> dict[str, object]:
    """Return a file as YAML has it; `parse.read` reads back the same."""
    entries = [
        {"match": _match_document(entry.match), entry.sharing.value: _sharing_document(entry)} for entry in file.entries
    ]
    document: dict[str, object] = {"version": VERSION, "gpus": entries}
    if file.rules:
        document["slices"] = [
            {"match": _process_match_document(rule.match), **_outcome_document(rule)} for rule in file.rules
        ]
    if file.memory:
        document["memory"] = [
            {"match": _one_or_list("user", row.users) or "all", "limit": size_option(row.limit_bytes)}
            for row in file.memory
        ]
    if file.longest_lease_seconds is not None:
        document["reserve"] = Flow(
            {"longest": duration_option(file.longest_lease_seconds) if file.longest_lease_seconds else "0m"}
        )
    return document


def text_of(file: HostFile) -> str:
    return yaml_text(document_of(file))


def _one_or_list(key: str, values: Sequence[object]) -> Flow:
    """Return a mapping with one key, and one value or a list, on one line: people search for it."""
    return Flow({key: values[0] if len(values) == 1 else list(values)} if values else {})


def _match_document(match: Match) -> object:
    """Return the GPUs of an entry as YAML has them: ``all``, or a mapping with one key."""
    values = [int(value) if match.by is Exactness.INDEX else value for value in match.values]
    return "all" if match.by is Exactness.ALL else _one_or_list(match.by.title, values)


def _process_match_document(match: ProcessMatch) -> object:
    """Return the processes of a rule as YAML has them: ``all``, or a mapping."""
    keys = Flow()
    for key, values in match.given_values().items():
        keys |= _one_or_list(key, [int(value) if key == "gpu" and value.isdecimal() else value for value in values])
    return keys or "all"


def _outcome_document(rule: Rule) -> dict[str, object]:
    """Return what a rule gives its processes: a role, a slice or a weight."""
    if rule.role is not None:
        return {"role": rule.role.value}
    if rule.slice_us is not None:
        return {"slice": format_slice(rule.slice_us)}
    weight = rule.weight or 1
    return {"weight": int(weight) if weight == int(weight) else weight}


def _sharing_document(entry: Entry) -> object:
    """Return the value of the key that names the way of sharing."""
    if entry.sharing is Way.MIG:
        return [_instance_document(mig) for mig in entry.mig]
    if entry.sharing is Way.MPS:
        return _mps_document(entry.mps or MpsWish())
    if entry.sharing is Way.TIMESLICE:
        return (entry.time_slice or TimeSlice.DEFAULT).title
    return True


def _instance_document(wish: InstanceWish) -> object:
    """Return MIG devices as YAML has them: the wish alone, or a mapping with its options."""
    mps = None if wish.mps is None else _mps_document(wish.mps)
    keys = _without_defaults({"wish": wish.wish, "name": wish.name, "users": list(wish.users), "mps": mps})
    return keys if len(keys) > 1 else wish.wish


def _mps_document(mps: MpsWish) -> dict[str, object]:
    """Return an MPS daemon as YAML has it; what is left to its default has no key."""
    limits, threads = mps.limits, mps.limits.threads_percent
    return _without_defaults(
        {
            "threads": int(threads) if threads is not None and threads.is_integer() else threads,
            "memory": None if limits.memory_limit_bytes is None else size_option(limits.memory_limit_bytes),
            "priority": None if limits.priority is None else limits.priority.title,
            "users": list(mps.users),
            "exclusive": mps.exclusive,
            "multiuser": mps.multiuser,
        }
    )


def _without_defaults(keys: dict[str, object]) -> dict[str, object]:
    """Return the keys that have a value other than None, false or an empty list."""
    return {key: value for key, value in keys.items() if value not in (None, False, [])}


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The entries by GPU index, errors for GPUs that do not exist, and notes on entries without a GPU."""

    entries: dict[int, Entry]
    missing: tuple[GpushareError, ...] = ()
    notes: tuple[str, ...] = ()


def match_entries(file: HostFile, gpus: Sequence[Gpu], same_model: Callable[[str, str], bool]) -> Matched:
    """Return the entry of each GPU; a GPU without one is left out.

    ``same_model`` returns whether a model in the file (product name or alias) means a product name. Words of the name,
    ``a100``, match every such GPU that no entry names in full.
    """
    chosen: dict[int, Entry] = {}
    missing: list[GpushareError] = []
    notes = []
    models = [value for entry in file.entries if entry.match.by is Exactness.MODEL for value in entry.match.values]
    named_in_full = {gpu.index for gpu in gpus if gpu.name and any(same_model(value, gpu.name) for value in models)}

    def is_model(written: str, gpu: Gpu) -> bool:
        """Return whether a written model means a GPU: in full, or by words if no entry names this GPU in full."""
        name = gpu.name or ""
        return same_model(written, name) if gpu.index in named_in_full else _words_of(written) <= _words_of(name)

    # The most exact entries come first, and keep their GPUs.
    for entry in sorted(file.entries, key=lambda entry: -entry.match.by):
        matched_gpus = [gpu for gpu in gpus if _is_for(entry.match, gpu, is_model)]
        for gpu in matched_gpus:
            before = chosen.setdefault(gpu.index, entry)
            if before is not entry and before.match.by is entry.match.by:
                raise BadUsage(
                    f"{file.shown}:{entry.mark}: GPU {gpu.index} is matched in the same way by the entry at {before.mark}",
                    "name it in one of them; uuid wins over index, index over model, model over all",
                    gpu=gpu.index,
                    code="bad_file",
                )
        missing += _missing_gpu_errors(file, entry, gpus)
        if not matched_gpus and entry.match.by in {Exactness.MODEL, Exactness.ALL}:
            notes.append(f"{file.shown}:{entry.mark}: no GPU of this host is {entry.match}")
    entries = {index: chosen[index] for index in sorted(chosen)}
    _check_names_differ(file, entries)
    return Matched(entries=entries, missing=tuple(missing), notes=tuple(notes))


def _words_of(model: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", model.lower()))


def _is_for(match: Match, gpu: Gpu, is_model: Callable[[str, Gpu], bool]) -> bool:
    """Return whether a match names a GPU; ``is_model`` tells whether a written model means it."""
    if match.by is Exactness.MODEL:
        return bool(gpu.name) and any(is_model(value, gpu) for value in match.values)
    name = str(gpu.index) if match.by is Exactness.INDEX else (gpu.uuid or "").lower()
    return match.by is Exactness.ALL or name in map(str.lower, match.values)


def _missing_gpu_errors(file: HostFile, entry: Entry, gpus: Sequence[Gpu]) -> list[GpushareError]:
    """Return an error for each index and UUID of an entry that no GPU has. A model may have none."""
    if entry.match.by not in {Exactness.INDEX, Exactness.UUID}:
        return []
    names = {str(gpu.index) for gpu in gpus} | {(gpu.uuid or "").lower() for gpu in gpus}
    return [
        NotFound(
            f"{file.shown}:{entry.mark}: this host has no GPU {value}",
            "see which are there: gpushare status",
            gpu=value,
            code="unknown_gpu",
        )
        for value in entry.match.values
        if value.lower() not in names
    ]


def _check_names_differ(file: HostFile, entries: dict[int, Entry]) -> None:
    """Raise BadUsage if two instances would have one name."""
    owners: dict[str, int] = {}
    for index, entry in entries.items():
        for mig in entry.mig:
            if mig.name is None:
                continue
            if mig.name in owners:
                raise BadUsage(
                    f"{file.shown}:{mig.mark}: the name '{mig.name}' is used twice, on GPU {owners[mig.name]} and GPU {index}",
                    "use each name once; an entry with names is for one GPU",
                    code="bad_file",
                )
            owners[mig.name] = index
