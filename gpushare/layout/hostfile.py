"""``gpushare.yaml``, version 1: how each GPU of a host is shared. Frozen, pure.

An entry names its GPUs (``match``: all, or index, uuid or model) and exactly one way of sharing::

    version: 1
    gpus:
    - match: {index: [0, 1]}
      timeslice: long                  # or {level: long, replicas: 4}
    - match: {model: h100}
      mps: {threads: 25, memory: 4G, priority: low, users: [alice], exclusive: true}
    - match: {uuid: GPU-...}
      mig:
      - 1g.10gb*2
      - {wish: "3g.40gb:4", name: train, users: [alice], mps: {threads: 50}}
    - match: all
      exclusive: true

Of several entries for one GPU the most exact holds: uuid, index, model, all. `hostfile_schema.json` says the same as
`hostfile_parse`, and a test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from gpushare.layout.description import Sharing
from gpushare.layout.export import yaml_text
from gpushare.layout.yaml_source import Mark
from gpushare.mig.wish import Wish, parse_wish
from gpushare.model import Priority, TimeSlice
from gpushare.units import GIB, MIB

VERSION: Final = 1


class Exactness(IntEnum):
    """How an entry names its GPUs; of several for one GPU the greatest holds."""

    ALL = 0
    MODEL = 1
    INDEX = 2
    UUID = 3

    @property
    def title(self) -> str:
        """Return the key of ``match``."""
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
    """An MPS daemon as a file wants it; None is no limit, and normal priority.

    ``users`` may be its clients, empty: everybody. ``exclusive``: nothing else runs on the GPU (compute mode
    exclusive-process). ``replicas`` is how many programs shall share it, for other engines.
    """

    threads_percent: float | None = None
    memory_limit_bytes: int | None = None
    priority: Priority = Priority.NORMAL
    users: tuple[str, ...] = ()
    exclusive: bool = False
    replicas: int | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceWish:
    """MIG devices as a file wants them: one word of a wish, and what is special about each of them.

    A ``name`` means the GPU instance, and so do its ``users``; ``mps`` is a daemon on each device, and without one
    they are time-sliced.
    """

    wish: str
    name: str | None = None
    users: tuple[str, ...] = ()
    mps: MpsWish | None = None
    replicas: int | None = None
    mark: Mark = field(default=Mark(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry: its GPUs, and how they are shared."""

    match: Match
    sharing: Sharing
    time_slice: TimeSlice | None = None
    replicas: int | None = None
    mps: MpsWish | None = None
    mig: tuple[InstanceWish, ...] = ()
    mark: Mark = field(default=Mark(), compare=False)

    @property
    def wish(self) -> Wish:
        """Return the MIG layout as the planner takes it."""
        return parse_wish(" ".join(one.wish for one in self.mig)) if self.mig else ()

    @property
    def alike(self) -> Entry:
        """Return it without its GPUs: entries that are alike may be one."""
        return replace(self, match=Match(by=Exactness.ALL))


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A whole file. ``shown`` is what it is called in messages."""

    entries: tuple[Entry, ...] = ()
    shown: str = field(default="gpushare.yaml", compare=False)


# -- writing ---------------------------------------------------------------------------------------


def text_of(file: HostFile) -> str:
    """Return the text of a file, which `parse` reads back as the same."""
    lines = [f"version: {VERSION}", "gpus:" if file.entries else "gpus: []"]
    for one in file.entries:
        # The match on one line: people look for it.
        lines.append(f"  - match: {_flow(_match(one.match))}")
        lines += [f"    {line}" for line in yaml_text({one.sharing.value: _sharing(one)}).splitlines()]
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()


def _match(match: Match) -> object:
    if match.by is Exactness.ALL:
        return "all"
    values = [int(value) if match.by is Exactness.INDEX else value for value in match.values]
    return {match.by.title: values[0] if len(values) == 1 else values}


def _sharing(entry: Entry) -> object:
    if entry.sharing is Sharing.MIG:
        return [_instance(one) for one in entry.mig]
    if entry.sharing is Sharing.MPS:
        return _mps(entry.mps or MpsWish())
    if entry.sharing is Sharing.TIMESLICE:
        level = (entry.time_slice or TimeSlice.DEFAULT).title
        return level if entry.replicas is None else {"level": level, "replicas": entry.replicas}
    return True


def _instance(one: InstanceWish) -> object:
    found: dict[str, object] = {"wish": one.wish}
    if one.name is not None:
        found["name"] = one.name
    if one.users:
        found["users"] = list(one.users)
    if one.mps is not None:
        found["mps"] = _mps(one.mps)
    if one.replicas is not None:
        found["timeslice"] = {"replicas": one.replicas}
    return found if len(found) > 1 else one.wish


def _mps(mps: MpsWish) -> dict[str, object]:
    found: dict[str, object] = {}
    if mps.threads_percent is not None:
        whole = mps.threads_percent.is_integer()
        found["threads"] = int(mps.threads_percent) if whole else mps.threads_percent
    if mps.memory_limit_bytes is not None:
        found["memory"] = size_text(mps.memory_limit_bytes)
    if mps.priority is not Priority.NORMAL:
        found["priority"] = mps.priority.title
    if mps.users:
        found["users"] = list(mps.users)
    if mps.exclusive:
        found["exclusive"] = True
    if mps.replicas is not None:
        found["replicas"] = mps.replicas
    return found


def size_text(size: int) -> str:
    """Return a limit as a file has it: ``4G`` where it is whole, else ``1500M``."""
    return f"{size // GIB}G" if size % GIB == 0 else f"{size // MIB}M"
