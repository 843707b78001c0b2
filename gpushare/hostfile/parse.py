"""Parse ``gpushare.yaml`` strictly; each error has its line and column. Pure."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gpushare.base.errors import BadUsage
from gpushare.base.model import Priority, Sharing, TimeSlice
from gpushare.base.units import parse_memory_limit
from gpushare.hostfile.file import VERSION, Entry, Exactness, HostFile, InstanceWish, Match, MemoryLimit, MpsWish
from gpushare.inputs import Located, LocatedList, Mark, documents
from gpushare.mps.limits import Limits
from gpushare.timeslice.rules import LEAST_WEIGHT, MOST_WEIGHT, ProcessMatch, Role, Rule

T = TypeVar("T")

HINT: Final = "write one from the current state: gpushare capture > gpushare.yaml"
# The same as in schema.json. `$(?!\n)`: Python's $ also matches before a final newline.
_COMPUTE: Final = "|".join(f"{slices}c\\.[{slices}-9]" for slices in range(1, 9))
WISH: Final = rf"^(?:(?:{_COMPUTE})|[1-9])g(?:\.[1-9][0-9]{{0,3}}gb)?(?:[+-][a-z]{{1,8}}(?:\.[a-z]{{1,8}})?){{0,3}}(?::[0-9]{{1,2}})?(?:\*[1-9][0-9]{{0,2}})?$(?!\n)"
NAME: Final = (
    r"^(?!(?:[mM][iI][gG]|[gG][pP][uU])-)(?!(?:[mM][iI][gG]|[aA][lL][lL])$)[A-Za-z][A-Za-z0-9_.-]{0,31}$(?!\n)"
)
USER: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}[$]?$(?!\n)"
UUID: Final = r"^GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$(?!\n)"
MODEL: Final = r"^[A-Za-z0-9][A-Za-z0-9 ._()+/-]{0,79}$(?!\n)"
# From 20us to 30ms.
SLICE: Final = (
    r"^(?:(?:[2-9][0-9]|[1-9][0-9]{2,3}|[12][0-9]{4}|30000)us"
    r"|(?:0\.(?:0[2-9][0-9]?|[1-9][0-9]{0,2})|(?:[1-9]|[12][0-9])(?:\.[0-9]{1,3})?|30)ms)$(?!\n)"
)
# What is printed, without control characters.
GLOB: Final = r"^[^\x00-\x1f\x7f-\x9f]{1,200}$(?!\n)"
CGROUP: Final = r"^/[^\x00-\x1f\x7f-\x9f]{0,500}$(?!\n)"
LEVELS: Final = {level.title: level for level in TimeSlice}
PRIORITIES: Final = {level.title: level for level in Priority}
_SCHEMA: Final = Path(__file__).with_name("schema.json")
_WAYS: Final = tuple(way.value for way in Sharing)
_LEAST_THREADS: Final = 0.05
_MAX_INDEX: Final = 1023
_MAX_REPLICAS: Final = 1024
_MAX_RULES: Final = 256
_OUTCOMES: Final = ("slice", "weight", "role")


def parse(text: str, shown: str = "gpushare.yaml") -> HostFile:
    """Return the file.

    Raises:
        BadUsage: it is not valid; the message begins with ``FILE:LINE:COLUMN`` (code ``bad_file``).
    """
    found = documents(text, shown, HINT)
    if len(found) > 1:
        raise BadUsage(f"{shown}: {len(found)} YAML documents", "give one", code="bad_file")
    return read(found[0], shown)


def read(raw: object, shown: str = "gpushare.yaml") -> HostFile:
    """Return the file from loaded YAML; errors as `parse`. Without noted places, everything is at 1:1."""
    more = isinstance(raw, dict) and ("slices" in raw or "memory" in raw)
    need = ("version",) if more else ("version", "gpus")
    whole = _Value(raw, getattr(raw, "mark", Mark()), "the file", shown)
    if isinstance(raw, dict) and "mig-configs" in raw:
        configs = raw["mig-configs"]
        name = next(iter(configs), None) if isinstance(configs, dict) else None
        config = f" -c {shlex.quote(str(name)[:40])}" if name is not None and len(configs) > 1 else ""
        raise whole.wrong("is for mig-parted", f"apply it: gpushare mig apply -f {shlex.quote(shown)}{config}")
    top = whole.fields("version", "gpus", "slices", "memory", need=need)
    version = top["version"]
    if isinstance(version.raw, bool) or version.raw != VERSION:
        raise version.wrong(f"is not {VERSION}, the only version")
    entries = tuple(_entry(one) for one in top["gpus"].items()) if "gpus" in top else ()
    return HostFile(
        entries=entries,
        rules=_rules(top["slices"]) if "slices" in top else (),
        memory=_memory_limits(top["memory"]) if "memory" in top else (),
        shown=shown,
    )


def schema_text() -> str:
    """Return the JSON Schema of the file; it accepts what `read` accepts."""
    return _SCHEMA.read_text(encoding="utf-8")


@dataclass(frozen=True)
class _Value:
    """One value, its place in the file, and what messages call it."""

    raw: Any
    mark: Mark
    what: str
    shown: str

    def wrong(self, problem: str, hint: str = HINT, *, at: Mark | None = None) -> BadUsage:
        return BadUsage(f"{self.shown}:{at or self.mark}: {self.what} {problem}", hint, code="bad_file")

    def fields(self, *known: str, need: Sequence[str] = ()) -> dict[str, _Value]:
        if not isinstance(self.raw, dict):
            raise self.wrong(f"is {_short(self.raw)}, not a mapping (keys: {', '.join(known)})", self._as_mapping())
        located = self.raw if isinstance(self.raw, Located) else Located()
        for key in self.raw:
            if key not in known:
                raise self._unknown(key, known, located.keys_at.get(key))
        for key in need:
            if key not in self.raw:
                raise self.wrong(f"lacks the key '{key}'")
        return {
            key: _Value(value, located.values_at.get(key, self.mark), f"'{key}'", self.shown)
            for key, value in self.raw.items()
        }

    def _as_mapping(self) -> str:
        """Return a hint how to write it as a mapping."""
        key = self.what.strip("'")
        if self.raw is None and key == Sharing.MPS.value:
            return "for a daemon without limits write: mps: {}"
        if key == "match" and not isinstance(self.raw, list | bool | None):
            return f"for one GPU write: match: {{index: {self.raw}}}; for all: match: all"
        if key == "match" and isinstance(self.raw, list):
            return "for some GPUs write: match: {index: [0, 1]}; for all: match: all"
        return HINT

    def _unknown(self, key: object, known: Sequence[str], at: Mark | None) -> BadUsage:
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
        hint = f"did you mean '{close[0]}'?" if close else f"its keys: {', '.join(known)}"
        return self.wrong(f"has an unknown key '{str(key)[:40]}'", hint, at=at)

    def items(self) -> list[_Value]:
        if not isinstance(self.raw, list):
            one = isinstance(self.raw, str | int) and not isinstance(self.raw, bool) and self.what.startswith("'")
            hint = f"write it as a list: {self.what.strip(chr(39))}: [{self.raw}]" if one else HINT
            if isinstance(self.raw, dict) and self.what == "'mig'" and self.raw:
                # The form of mig-parted.
                hint = (
                    f"write it as a list: mig: [{', '.join(f'{key}*{count}' for key, count in self.raw.items())[:80]}]"
                )
            raise self.wrong(f"is {_short(self.raw)}, not a list", hint)
        places = self.raw.items_at if isinstance(self.raw, LocatedList) else ()
        return [
            _Value(
                one,
                places[number] if number < len(places) else self.mark,
                f"item {number + 1} of {self.what}",
                self.shown,
            )
            for number, one in enumerate(self.raw)
        ]

    def text(self, pattern: str, meaning: str) -> str:
        if not isinstance(self.raw, str) or re.search(pattern, self.raw) is None:
            raise self.wrong(f"is {_short(self.raw)}, not {meaning}")
        return self.raw

    def size(self) -> int:
        """Return a size in bytes."""
        try:
            return parse_memory_limit(str(self.raw))
        except BadUsage:
            raise self.wrong(f"is {_short(self.raw)}, not a size like 40G or 1500M") from None

    def one_of(self, known: dict[str, T]) -> T:
        if not isinstance(self.raw, str) or self.raw not in known:
            raise self.wrong(f"is {_short(self.raw)}, not one of: {', '.join(known)}")
        return known[self.raw]

    def whole(self, least: int, most: int) -> int:
        good = isinstance(self.raw, int | float) and not isinstance(self.raw, bool)
        if not good or not least <= self.raw <= most or self.raw != int(self.raw):
            raise self.wrong(f"is {_short(self.raw)}, not a whole number from {least} to {most}")
        return int(self.raw)

    def several(self, read_one: Callable[[_Value], T], *, least: int) -> tuple[T, ...]:
        found: list[T] = []
        for one in self.items():
            value = read_one(one)
            if value in found:
                raise one.wrong(f"is given twice: {_short(one.raw)}")
            found.append(value)
        if len(found) < least:
            raise self.wrong("is empty")
        return tuple(found)

    def one_or_several(self, read_one: Callable[[_Value], T]) -> tuple[T, ...]:
        return self.several(read_one, least=1) if isinstance(self.raw, list) else (read_one(self),)


def _short(raw: object) -> str:
    if isinstance(raw, dict | list):
        return "a mapping" if isinstance(raw, dict) else "a list"
    return repr(raw)[:60] if raw is not None else "empty"


def _entry(value: _Value) -> Entry:
    fields = value.fields("match", *_WAYS, need=("match",))
    ways = [key for key in fields if key != "match"]
    if len(ways) != 1:
        said = " and ".join(ways) or "none"
        raise value.wrong(f"has {said}: it needs exactly one of {', '.join(_WAYS)}")
    sharing, how = Sharing(ways[0]), fields[ways[0]]
    entry = Entry(match=_match(fields["match"]), sharing=sharing, mark=value.mark)
    if sharing is Sharing.EXCLUSIVE:
        if how.raw is not True:
            raise how.wrong("is not true: drop the entry, or give another way of sharing")
        return entry
    if sharing is Sharing.TIMESLICE:
        level, replicas = _time_slice(how)
        return Entry(**{**vars(entry), "time_slice": level, "replicas": replicas})
    if sharing is Sharing.MPS:
        return Entry(**{**vars(entry), "mps": _mps(how, in_instance=False)})
    return Entry(**{**vars(entry), "mig": tuple(_instance(one) for one in how.items())})


def _match(value: _Value) -> Match:
    if isinstance(value.raw, str):
        value.one_of({"all": None})
        return Match(by=Exactness.ALL)
    fields = value.fields("index", "uuid", "model")
    if len(fields) != 1:
        raise value.wrong("needs exactly one of index, uuid, model; or the word all")
    ((key, named),) = fields.items()
    if key == "index":
        indexes = named.one_or_several(lambda one: one.whole(0, _MAX_INDEX))
        return Match(by=Exactness.INDEX, values=tuple(map(str, indexes)))
    if key == "uuid":
        return Match(by=Exactness.UUID, values=named.one_or_several(lambda one: one.text(UUID, "the UUID of a GPU")))
    return Match(by=Exactness.MODEL, values=named.one_or_several(lambda one: one.text(MODEL, "the model of a GPU")))


def _time_slice(value: _Value) -> tuple[TimeSlice, int | None]:
    if not isinstance(value.raw, dict):
        return value.one_of(LEVELS), None
    fields = value.fields("level", "replicas")
    level = fields["level"].one_of(LEVELS) if "level" in fields else TimeSlice.DEFAULT
    return level, _replicas(fields)


def _replicas(fields: dict[str, _Value]) -> int | None:
    return fields["replicas"].whole(2, _MAX_REPLICAS) if "replicas" in fields else None


def _mps(value: _Value, *, in_instance: bool) -> MpsWish:
    known = ("threads", "memory", "priority", "users", "replicas")
    fields = value.fields(*known, *(() if in_instance else ("exclusive",)))
    exclusive = fields["exclusive"].raw if "exclusive" in fields else False
    if not isinstance(exclusive, bool):
        raise fields["exclusive"].wrong("is neither true nor false")
    return MpsWish(
        limits=Limits(
            threads_percent=_threads(fields["threads"]) if "threads" in fields else None,
            memory_limit_bytes=fields["memory"].size() if "memory" in fields else None,
            # Normal is the default; defaults are None.
            priority=(fields["priority"].one_of(PRIORITIES) or None) if "priority" in fields else None,
        ),
        users=_users(fields),
        exclusive=exclusive,
        replicas=_replicas(fields),
    )


def _threads(value: _Value) -> float:
    number = isinstance(value.raw, int | float) and not isinstance(value.raw, bool)
    if not number or not _LEAST_THREADS <= value.raw <= 100:
        raise value.wrong(f"is {_short(value.raw)}, not a percentage above 0 and up to 100")
    # MPS keeps one decimal.
    return round(float(value.raw), 1)


def _users(fields: dict[str, _Value]) -> tuple[str, ...]:
    if "users" not in fields:
        return ()
    return fields["users"].several(lambda one: one.text(USER, "the name or id (in quotes) of a user"), least=1)


def _instance(value: _Value) -> InstanceWish:
    if isinstance(value.raw, str):
        return InstanceWish(wish=_wish(value), mark=value.mark)
    fields = value.fields("wish", "name", "users", "mps", "timeslice", need=("wish",))
    wish = _wish(fields["wish"])
    if "name" in fields and "*" in wish:
        raise fields["name"].wrong("is for one instance: write one item per instance", "drop the *COUNT")
    if "users" in fields and "name" not in fields:
        raise fields["users"].wrong("needs a name: access is granted to a named instance", "add: name: NAME")
    if "mps" in fields and "timeslice" in fields:
        raise value.wrong("has both mps and timeslice: it needs one of them")
    replicas = _replicas(fields["timeslice"].fields("replicas")) if "timeslice" in fields else None
    return InstanceWish(
        wish=wish,
        name=fields["name"].text(NAME, "a name: a letter, then letters, digits, - _ . (not all or mig)")
        if "name" in fields
        else None,
        users=_users(fields),
        mps=_mps(fields["mps"], in_instance=True) if "mps" in fields else None,
        replicas=replicas,
        mark=value.mark,
    )


def _wish(value: _Value) -> str:
    return value.text(WISH, "a MIG profile: 3g.40gb, 1g.10gb:6, 1g.10gb*2, 1c.3g.40gb")


def _rules(value: _Value) -> tuple[Rule, ...]:
    items = value.items()
    if len(items) > _MAX_RULES:
        raise value.wrong(f"has {len(items)} rules, more than {_MAX_RULES}", "merge them: a key takes a list of values")
    return tuple(map(_rule, items))


def _memory_limits(value: _Value) -> tuple[MemoryLimit, ...]:
    items = value.items()
    if len(items) > _MAX_RULES:
        raise value.wrong(f"has {len(items)} limits, more than {_MAX_RULES}", "merge them: user takes a list")
    return tuple(map(_memory_limit, items))


def _memory_limit(value: _Value) -> MemoryLimit:
    fields = value.fields("match", "limit", need=("match", "limit"))
    match = fields["match"]
    users: tuple[str, ...] = ()
    if isinstance(match.raw, str):
        match.one_of({"all": None})
    else:
        named = match.fields("user", need=("user",))["user"]
        users = named.one_or_several(lambda one: one.text(USER, "the name or id (in quotes) of a user"))
    return MemoryLimit(
        users=users,
        limit_bytes=fields["limit"].size(),
        mark=value.mark,
    )


def _rule(value: _Value) -> Rule:
    fields = value.fields("match", *_OUTCOMES, need=("match",))
    outcomes = [key for key in fields if key != "match"]
    if len(outcomes) != 1:
        said = " and ".join(outcomes) or "none"
        raise value.wrong(
            f"has {said}: it needs exactly one of {', '.join(_OUTCOMES)}", "write for example: slice: 500us"
        )
    ((key, how),) = ((key, fields[key]) for key in outcomes)
    return Rule(
        match=_process_match(fields["match"]),
        slice_us=_slice(how) if key == "slice" else None,
        weight=_weight(how) if key == "weight" else None,
        role=how.one_of({role.value: role for role in Role}) if key == "role" else None,
        mark=value.mark,
    )


def _process_match(value: _Value) -> ProcessMatch:
    if isinstance(value.raw, str):
        value.one_of({"all": None})
        return ProcessMatch()
    fields = value.fields("user", "group", "container", "command", "cgroup", "gpu")
    if not fields:
        raise value.wrong("is empty", "name a user, group, container, command, cgroup or gpu; or write: match: all")

    def texts(key: str, pattern: str, meaning: str) -> tuple[str, ...]:
        return fields[key].one_or_several(lambda one: one.text(pattern, meaning)) if key in fields else ()

    glob = "text without control characters, at most 200; * matches any text, ? one character"
    return ProcessMatch(
        users=texts("user", USER, "the name or id (in quotes) of a user"),
        groups=texts("group", USER, "the name or id (in quotes) of a group"),
        containers=texts("container", GLOB, glob),
        commands=texts("command", GLOB, glob),
        cgroups=texts("cgroup", CGROUP, "the path of a cgroup, which begins with /; * matches any text"),
        gpus=fields["gpu"].one_or_several(_gpu) if "gpu" in fields else (),
    )


def _gpu(value: _Value) -> str:
    if isinstance(value.raw, str):
        return value.text(UUID, "the index or the UUID of a GPU")
    return str(value.whole(0, _MAX_INDEX))


def _slice(value: _Value) -> int:
    text = value.text(SLICE, "a time-slice from 20us to 30ms")
    return int(text[:-2]) if text.endswith("us") else round(float(text[:-2]) * 1000)


def _weight(value: _Value) -> float:
    number = isinstance(value.raw, int | float) and not isinstance(value.raw, bool)
    if not number or not LEAST_WEIGHT <= value.raw <= MOST_WEIGHT:
        raise value.wrong(f"is {_short(value.raw)}, not a weight from {LEAST_WEIGHT} to {MOST_WEIGHT}")
    return float(value.raw)
