"""The forms of ``gpushare.yaml``: how it is read, and the JSON Schema of it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final, cast

from gpushare.base.errors import BadUsage
from gpushare.base.model import FileWay, Priority, TimeSlice, Way
from gpushare.base.units import parse_memory_limit, parse_seconds
from gpushare.form import (
    Form,
    Value,
    all_or,
    choice,
    constant,
    converted,
    either,
    mapping,
    number,
    one_or_several,
    several,
    text,
    whole,
    whole_document,
    yes_or_no,
)
from gpushare.hostfile.file import VERSION, Entry, Exactness, HostFile, InstanceWish, Match, MemoryLimit, MpsWish
from gpushare.inputs import documents, shown_path
from gpushare.mps.limits import Limits
from gpushare.timeslice.rules import LEAST_WEIGHT, MOST_WEIGHT, ProcessMatch, Role, Rule

# Of a file that is there: it is corrected, never written over.
HINT: Final = "its keys and values: gpushare schema gpushare.yaml; to see a valid file: gpushare capture"
# `$(?!\n)`: Python's $ also matches before a final newline.
_COMPUTE: Final = "|".join(f"{slices}c\\.[{slices}-9]" for slices in range(1, 9))
_WISH: Final = text(
    rf"^(?:(?:{_COMPUTE})|[1-9])g(?:\.[1-9][0-9]{{0,3}}gb)?(?:[+-][a-z]{{1,8}}(?:\.[a-z]{{1,8}})?){{0,3}}(?::[0-9]{{1,2}})?(?:\*[1-9][0-9]{{0,2}})?$(?!\n)",
    "a MIG profile: 3g.40gb, 1g.10gb:6, 1g.10gb*2, 1c.3g.40gb",
).about("A MIG profile: 3g.40gb, 1g.10gb:6 (first memory slice), 1g.10gb*2, 1c.3g.40gb.")
_NAME: Final = text(
    r"^(?!(?:[mM][iI][gG]|[gG][pP][uU])-)(?!(?:[mM][iI][gG]|[aA][lL][lL])$)[A-Za-z][A-Za-z0-9_.-]{0,31}$(?!\n)",
    "a name: a letter, then letters, digits, - _ . (not all or mig)",
)
_ID: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}[$]?$(?!\n)"
# An @ is read, because it tells of a group: `user_id` refuses it, and says what to write instead.
_USER: Final = text(_ID.replace("^", "^@?", 1), "the name or id (in quotes) of a user")
_USERS: Final = several(_USER, least=1, unique=True).about(
    "Users of this machine, by name or by id in quotes; nobody else but root."
)
_UUID: Final = r"^GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$(?!\n)"
_INDEX: Final = whole(0, 1023)
# What is printed, without control characters.
_GLOB: Final = text(
    r"^[^\x00-\x1f\x7f-\x9f]{1,200}$(?!\n)",
    "text without control characters, at most 200; * matches any text, ? one character",
)
_SIZE: Final = converted(
    r"^[ ]*(?=[0-9.]*[1-9])(?:[0-9]{1,6}(?:[.][0-9]{1,6})?|[.][0-9]{1,6})[ ]*[KMGTkmgt][Ii]?[Bb]?[ ]*$(?!\n)",
    "a size like 40G or 1500M",
    parse_memory_limit,
)
_LONGEST: Final = converted(
    r"^(?:(?:[0-9]|[1-9][0-9]|[1-6][0-9]{2}|7[01][0-9]|720)m|(?:[0-9]|1[0-2])h)$(?!\n)",
    "a time from 0m to 12h, like 90m or 4h",
    parse_seconds,
).about("The longest lease of a user, at most 12h; 0m: none.")
_LEVEL: Final = choice({level.title: level for level in TimeSlice})
_MOST_RULES: Final = 256


def _mps_wish(fields: Mapping[str, Any]) -> MpsWish:
    """Return the daemon that these keys want."""
    return MpsWish(
        limits=Limits(
            threads_percent=fields.get("threads"),
            memory_limit_bytes=fields.get("memory"),
            # A limit that is the default is None; Priority.NORMAL is 0.
            priority=fields.get("priority") or None,
        ),
        users=fields.get("users", ()),
        exclusive=fields.get("exclusive", False),
        multiuser=fields.get("multiuser", False),
    )


_DAEMON_KEYS: Final[Mapping[str, Form[Any]]] = {
    # MPS keeps one decimal.
    "threads": number(0.05, 100, "a percentage from 0.1 to 100", lambda value: round(float(value), 1)).about(
        "Active thread percentage per client."
    ),
    "memory": _SIZE.about("Pinned device memory per client process: 4G, 1500M."),
    "priority": choice({level.title: level for level in Priority}),
    "users": _USERS,
    "multiuser": yes_or_no().about("These users, or all, at the same time, in one server of root (driver 580)."),
}
_EXCLUSIVE: Final = yes_or_no().about("No program runs outside MPS: compute mode exclusive-process.")


def _check_instance(_value: Value, fields: Mapping[str, Value]) -> None:
    """Raise BadUsage if a name is for several MIG devices, or users have no name to be granted."""
    if "name" in fields and "*" in str(fields["wish"].raw):
        raise fields["name"].error("is for one instance: write one item per instance", "drop the *COUNT")
    if "users" in fields and "name" not in fields:
        raise fields["users"].error("needs a name: access is granted to a named instance", "add: name: NAME")


_INSTANCE: Final = either(
    _WISH,
    mapping(
        {
            "wish": _WISH,
            "name": _NAME,
            "users": _USERS,
            "mps": mapping(_DAEMON_KEYS, lambda fields, _: _mps_wish(fields)),
        },
        lambda fields, value: InstanceWish(**fields, mark=value.mark),
        need=("wish",),
        check=_check_instance,
        schema={
            "dependentRequired": {"users": ["name"]},
            "dependentSchemas": {"name": {"properties": {"wish": {"pattern": "^[^*]*$"}}}},
        },
    ),
    lambda wish, value: InstanceWish(wish=wish, mark=value.mark),
)


def _check_match(value: Value, fields: Mapping[str, Value]) -> None:
    if len(fields) != 1:
        raise value.error("needs exactly one of index, uuid, model; or the word all")


_MATCH: Final = all_or(
    mapping(
        {
            "index": one_or_several(_INDEX),
            "uuid": one_or_several(text(_UUID, "the UUID of a GPU")),
            "model": one_or_several(text(r"^[A-Za-z0-9][A-Za-z0-9 ._()+/-]{0,79}$(?!\n)", "the model of a GPU")),
        },
        # There is one key.
        lambda fields, _: next(
            Match(by=Exactness[key.upper()], values=tuple(map(str, values))) for key, values in fields.items()
        ),
        check=_check_match,
        schema={"minProperties": 1, "maxProperties": 1},
    ),
    Match(by=Exactness.ALL),
).about("The GPUs of an entry. Of several entries for one GPU uuid wins over index, index over model, model over all.")


def _entry_of(fields: Mapping[str, Any], value: Value) -> Entry:
    """Return an entry; its form makes sure that it has exactly one way of sharing."""
    way = next(key for key in fields if key != "match")
    return Entry(
        match=fields["match"],
        sharing=cast("FileWay", Way(way)),
        time_slice=fields.get("timeslice"),
        mps=fields.get("mps"),
        mig=fields.get("mig", ()),
        mark=value.mark,
    )


_ENTRY: Final = mapping(
    {
        "match": _MATCH,
        "exclusive": constant(True, "is not true: drop the entry, or give another way of sharing").about(
            "One process at a time: compute mode exclusive-process, no MPS daemon."
        ),
        "timeslice": _LEVEL,
        "mps": mapping({**_DAEMON_KEYS, "exclusive": _EXCLUSIVE}, lambda fields, _: _mps_wish(fields)),
        "mig": several(_INSTANCE).about("Exactly these MIG devices; an empty list is MIG without an instance."),
    },
    _entry_of,
    need=("match",),
    one_of=(Way.EXCLUSIVE.value, Way.TIMESLICE.value, Way.MPS.value, Way.MIG.value),
)


def _check_processes(value: Value, fields: Mapping[str, Value]) -> None:
    if not fields:
        raise value.error("is empty", "name a user, group, container, command, cgroup or gpu; or write: match: all")


def _read_rule_gpu(value: Value) -> str:
    """Return the index or the UUID of a GPU as text."""
    if isinstance(value.raw, str):
        return text(_UUID, "the index or the UUID of a GPU").read(value)
    return str(_INDEX.read(value))


_RULE_GPU: Final = Form(_read_rule_gpu, {"oneOf": [_INDEX.schema, {"type": "string", "pattern": _UUID}]})
_PROCESSES: Final = all_or(
    mapping(
        {
            "user": one_or_several(_USER),
            "group": one_or_several(text(_ID, "the name or id (in quotes) of a group")),
            "container": one_or_several(_GLOB),
            "command": one_or_several(_GLOB),
            "cgroup": one_or_several(
                text(
                    r"^/[^\x00-\x1f\x7f-\x9f]{0,500}$(?!\n)",
                    "the path of a cgroup, which begins with /; * matches any text",
                )
            ),
            "gpu": one_or_several(_RULE_GPU),
        },
        lambda fields, _: ProcessMatch(**{f"{key}s": values for key, values in fields.items()}),
        check=_check_processes,
        schema={"minProperties": 1},
    ),
    ProcessMatch(),
).about(
    "The processes that a rule is for: those that fit one value of each key. Only user, group and a cgroup of root can "
    "raise a share."
)
# From 20us to 30ms.
_SLICE: Final = converted(
    r"^(?:(?:[2-9][0-9]|[1-9][0-9]{2,3}|[12][0-9]{4}|30000)us"
    r"|(?:0\.(?:0[2-9][0-9]?|[1-9][0-9]{0,2})|(?:[1-9]|[12][0-9])(?:\.[0-9]{1,3})?|30)ms)$(?!\n)",
    "a time-slice from 20us to 30ms",
    lambda slice_: int(slice_[:-2]) if slice_.endswith("us") else round(float(slice_[:-2]) * 1000),
).about("From 20us to 30ms.")
_RULE: Final = mapping(
    {
        "match": _PROCESSES,
        "slice": _SLICE,
        "weight": number(LEAST_WEIGHT, MOST_WEIGHT, f"a weight from {LEAST_WEIGHT} to {MOST_WEIGHT}", float).about(
            "A share next to processes without a rule, which count as 1."
        ),
        "role": choice({role.value: role for role in Role}).about("production: 16ms; opportunistic: 500us."),
    },
    lambda fields, value: Rule(
        match=fields["match"],
        slice_us=fields.get("slice"),
        weight=fields.get("weight"),
        role=fields.get("role"),
        mark=value.mark,
    ),
    need=("match",),
    one_of=("slice", "weight", "role"),
    example="write for example: slice: 500us",
)
_LIMIT: Final = mapping(
    {
        "match": all_or(
            mapping({"user": one_or_several(_USER)}, lambda fields, _: fields["user"], need=("user",)), ()
        ).about("all: every user but root."),
        "limit": _SIZE.about("Device memory of all jobs of one such user on one GPU: 40G."),
    },
    lambda fields, value: MemoryLimit(users=fields["match"], limit_bytes=fields["limit"], mark=value.mark),
    need=("match", "limit"),
)
_VERSION: Final = constant(VERSION, f"is not {VERSION}, the only version")


def _check_file(value: Value, fields: Mapping[str, Value]) -> None:
    # A file of another version has other keys.
    _VERSION.read(fields["version"])
    if len(fields) == 1:
        raise value.error("lacks the key 'gpus'", "add one of: gpus, slices, memory, reserve")


_FILE: Final = mapping(
    {
        "version": _VERSION,
        "gpus": several(_ENTRY),
        "slices": several(_RULE, most=_MOST_RULES, merge="merge them: a key takes a list of values").about(
            "The time-slices of processes: gpushare timeslice keep. The first rule that matches a process wins."
        ),
        "memory": several(_LIMIT, most=_MOST_RULES, merge="merge them: user takes a list").about(
            "What the jobs of a user may reserve together on each GPU: gpushare run --wait and --memory. The first entry "
            "that matches a user wins."
        ),
        "reserve": mapping({"longest": _LONGEST}, lambda fields, _: fields["longest"], need=("longest",)).about(
            "The leases of users: gpushare reserve."
        ),
    },
    lambda fields, value: HostFile(
        entries=fields.get("gpus", ()),
        rules=fields.get("slices", ()),
        memory=fields.get("memory", ()),
        longest_lease_seconds=fields.get("reserve"),
        shown=value.shown,
    ),
    need=("version",),
    check=_check_file,
    schema={"anyOf": [{"required": [key]} for key in ("gpus", "slices", "memory", "reserve")]},
)


def write_hint(shown: str) -> str:
    """Return the hint of a file that is not there, or has nothing in it; ``shown`` as from `shown_path`."""
    into = "" if shown == shown_path("-") else f" > {shlex.quote(shown)}"
    return f"write one from the current state: gpushare capture{into}"


def parse(text: str, shown: str = "gpushare.yaml") -> HostFile:
    """Return the file that a YAML text describes.

    Raises BadUsage: it is not valid; the message begins with ``FILE:LINE:COLUMN`` (code ``bad_file``).
    """
    yaml_documents = documents(text, shown, HINT)
    if len(yaml_documents) > 1:
        raise BadUsage(f"{shown}: {len(yaml_documents)} YAML documents", "give one", code="bad_file")
    return read(yaml_documents[0], shown)


def read(raw: object, shown: str = "gpushare.yaml") -> HostFile:
    """Return the file from loaded YAML; errors as `parse`. Without noted places, everything is at 1:1."""
    value = whole_document(raw, "the file", shown, HINT)
    if raw is None:
        raise value.error("is empty", write_hint(shown))
    if isinstance(raw, dict) and "mig-configs" in raw:
        raise value.error("is for mig-parted", f"apply it: gpushare mig apply -f {shlex.quote(shown)}")
    return _FILE.read(value)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the file; it accepts what `read` accepts."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpushare.yaml, version {VERSION}",
        "description": "How each GPU of a host is shared: gpushare capture, diff, apply.",
        **_FILE.schema,
    }
