"""gpushare.yaml: written and read back, every error with its place, and the JSON Schema that says the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage
from gpushare.base.model import Gpu, Priority, TimeSlice, Way
from gpushare.base.units import GIB, MIB
from gpushare.hostfile.file import (
    Entry,
    Exactness,
    HostFile,
    InstanceWish,
    Match,
    MemoryLimit,
    MpsWish,
    match_entries,
    text_of,
)
from gpushare.hostfile.parse import parse, read, schema
from gpushare.mps.limits import Limits
from gpushare.timeslice.rules import ProcessMatch, Role, Rule
from tests.errors import fails

UUID = "GPU-d6ed5cdc-0278-5de8-9bc3-edc91cebc70e"
FULL = """\
version: 1
gpus:
- match: {index: [0, 1]}
  timeslice: long
- match: {model: h100}
  mps: {threads: 25, memory: 4G, priority: low, users: [alice], exclusive: true}
- match: {uuid: GPU-d6ed5cdc-0278-5de8-9bc3-edc91cebc70e}
  mig:
  - 1g.10gb*2
  - {wish: "3g.40gb:4", name: train, users: [alice, bob], mps: {threads: 50.5, memory: 1500M}}
  - 1c.2g.20gb
- match: all
  exclusive: true
slices:
- match: {user: [alice, "1000"], command: "*serve.py*", gpu: [0, GPU-d6ed5cdc-0278-5de8-9bc3-edc91cebc70e]}
  slice: 16ms
- match: {container: "vllm-*", cgroup: /kubepods.slice/*}
  weight: 2.5
- match: all
  role: opportunistic
memory:
- match: {user: [alice, "1000"]}
  limit: 40G
- match: all
  limit: 1500M
"""

# -- written and read back ---------------------------------------------------------------------------

users = st.lists(st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True), max_size=3, unique=True).map(tuple)
limits = st.builds(
    Limits,
    threads_percent=st.none() | st.integers(1, 1000).map(lambda tenths: tenths / 10),
    memory_limit_bytes=st.none()
    | st.integers(1, 99999).map(lambda n: n * MIB)
    | st.integers(1, 999).map(lambda n: n * GIB),
    priority=st.sampled_from([None, Priority.LOW]),
)
instance_daemons = st.builds(MpsWish, limits=limits, users=users, multiuser=st.booleans())
daemons = st.builds(lambda wish, exclusive: replace(wish, exclusive=exclusive), instance_daemons, st.booleans())
profiles = st.sampled_from(
    ["1g.10gb", "3g.40gb", "3g", "7g", "1g.10gb+me", "1c.3g.40gb", "2c.4g", "1g+me.all", "2g-me"]
)
wishes = st.builds(
    lambda profile, start: profile + ("" if start is None else f":{start}"), profiles, st.none() | st.integers(0, 11)
)


@st.composite
def instances(draw: st.DrawFn) -> InstanceWish:
    wish = draw(wishes)
    name = draw(st.none() | st.from_regex(r"[a-fh-lo-z][a-z0-9_.-]{0,9}", fullmatch=True).filter(lambda n: n != "all"))
    count = draw(st.sampled_from(["", "*2", "*14"])) if name is None else ""
    mps = draw(st.none() | instance_daemons)
    return InstanceWish(wish=wish + count, name=name, users=draw(users) if name is not None else (), mps=mps)


matches = st.one_of(
    st.just(Match(by=Exactness.ALL)),
    st.lists(st.integers(0, 1023).map(str), min_size=1, max_size=3, unique=True).map(
        lambda values: Match(by=Exactness.INDEX, values=tuple(values))
    ),
    st.lists(st.uuids().map(lambda uuid: f"GPU-{uuid}"), min_size=1, max_size=2, unique=True).map(
        lambda values: Match(by=Exactness.UUID, values=tuple(values))
    ),
    st.lists(st.sampled_from(["h100", "Tesla T4", "NVIDIA H100 80GB HBM3"]), min_size=1, unique=True).map(
        lambda values: Match(by=Exactness.MODEL, values=tuple(values))
    ),
)
entries = st.one_of(
    st.builds(Entry, match=matches, sharing=st.just(Way.EXCLUSIVE)),
    st.builds(Entry, match=matches, sharing=st.just(Way.TIMESLICE), time_slice=st.sampled_from(TimeSlice)),
    st.builds(Entry, match=matches, sharing=st.just(Way.MPS), mps=daemons),
    st.builds(Entry, match=matches, sharing=st.just(Way.MIG), mig=st.lists(instances(), max_size=4).map(tuple)),
)
texts = st.from_regex(r"[ -~]{1,12}", fullmatch=True)
several = st.lists(st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True), max_size=2, unique=True).map(tuple)
process_matches = st.builds(
    ProcessMatch,
    users=several,
    groups=several,
    containers=st.lists(texts, max_size=2, unique=True).map(tuple),
    commands=st.lists(texts, max_size=2, unique=True).map(tuple),
    cgroups=st.lists(texts.map(lambda text: f"/{text}"), max_size=2, unique=True).map(tuple),
    gpus=st.lists(st.integers(0, 1023).map(str) | st.just(UUID), max_size=2, unique=True).map(tuple),
)
rules = st.one_of(
    st.builds(Rule, match=process_matches, slice_us=st.integers(20, 30_000)),
    st.builds(Rule, match=process_matches, weight=st.integers(1, 28).map(lambda halves: halves / 2)),
    st.builds(Rule, match=process_matches, role=st.sampled_from(Role)),
)
memory_limits = st.builds(
    MemoryLimit,
    users=several,
    limit_bytes=st.integers(1, 99999).map(lambda n: n * MIB) | st.integers(1, 999).map(lambda n: n * GIB),
)
files = st.builds(
    HostFile,
    entries=st.lists(entries, max_size=4).map(tuple),
    rules=st.lists(rules, max_size=3).map(tuple),
    memory=st.lists(memory_limits, max_size=3).map(tuple),
)


@given(files)
def test_what_is_written_is_read_back(file: HostFile) -> None:
    assert parse(text_of(file)) == file


def test_a_whole_file() -> None:
    file = parse(FULL)
    assert [entry.sharing for entry in file.entries] == [Way.TIMESLICE, Way.MPS, Way.MIG, Way.EXCLUSIVE]
    first, second, third, _ = file.entries
    assert (first.match.values, first.time_slice) == (("0", "1"), TimeSlice.LONG)
    assert second.mps == MpsWish(
        limits=Limits(threads_percent=25.0, memory_limit_bytes=4 * GIB, priority=Priority.LOW),
        users=("alice",),
        exclusive=True,
    )
    assert [instance.wish for instance in third.mig] == ["1g.10gb*2", "3g.40gb:4", "1c.2g.20gb"]
    assert str(third.mig[1].mark) == "10:5"
    assert str(third.mark) == "7:3"
    assert [rule.microseconds for rule in file.rules] == [16_000, 5120, 500]
    assert [rule.outcome for rule in file.rules] == ["16ms", "weight 2.5", "role opportunistic"]
    assert str(file.rules[1].match) == "container vllm-*, cgroup /kubepods.slice/*"
    assert file.rules[0].match.gpus == ("0", UUID)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{match: all}", "2:10: item 1 of 'slices' has none: it needs exactly one of slice, weight, role"),
        ("{match: all, slice: 1ms, role: production}", "has slice and role: it needs exactly one"),
        ("{slice: 1ms}", "2:10: item 1 of 'slices' lacks the key 'match'"),
        ("{match: {}, slice: 1ms}", "2:18: 'match' is empty"),
        ("{match: alice, slice: 1ms}", "'match' is 'alice', not one of: all"),
        ("{match: {usr: alice}, slice: 1ms}", "2:19: 'match' has an unknown key 'usr'"),
        ("{match: {user: 1000}, slice: 1ms}", "'user' is 1000, not the name or id (in quotes) of a user"),
        ("{match: {command: []}, slice: 1ms}", "'command' is empty"),
        ('{match: {command: "a\\nb"}, slice: 1ms}', "is 'a\\nb', not text without control characters"),
        ("{match: {cgroup: kubepods}, slice: 1ms}", "'cgroup' is 'kubepods', not the path of a cgroup"),
        ("{match: {gpu: -1}, slice: 1ms}", "'gpu' is -1, not a whole number from 0 to 1023"),
        ("{match: all, slice: 19us}", "2:30: 'slice' is '19us', not a time-slice from 20us to 30ms"),
        ("{match: all, slice: 31ms}", "is '31ms', not a time-slice from 20us to 30ms"),
        ("{match: all, slice: 500}", "is 500, not a time-slice from 20us to 30ms"),
        ("{match: all, weight: 0.4}", "is 0.4, not a weight from 0.5 to 14"),
        ("{match: all, weight: .nan}", "is nan, not a weight from 0.5 to 14"),
        ("{match: all, role: best}", "is 'best', not one of: production, opportunistic"),
    ],
)
def test_a_wrong_rule_is_said_with_its_place(rule: str, said: str) -> None:
    with pytest.raises(BadUsage) as caught:
        parse(f"version: 1\nslices: [{rule}]\n")
    assert said in caught.value.message
    assert caught.value.message.startswith("gpushare.yaml:2:")
    assert caught.value.hint


def test_the_limits_of_users() -> None:
    file = parse(FULL)
    assert [(one.users, one.limit_bytes) for one in file.memory] == [(("alice", "1000"), 40 * GIB), ((), 1500 * MIB)]
    assert parse("version: 1\nmemory: [{match: all, limit: 4G}]\n").entries == ()
    assert parse(text_of(file)) == file


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("{match: all}", "2:10: item 1 of 'memory' lacks the key 'limit'"),
        ("{limit: 4G}", "2:10: item 1 of 'memory' lacks the key 'match'"),
        ("{match: alice, limit: 4G}", "2:18: 'match' is 'alice', not one of: all"),
        ("{match: {}, limit: 4G}", "2:18: 'match' lacks the key 'user'"),
        ("{match: {group: dev}, limit: 4G}", "2:19: 'match' has an unknown key 'group'"),
        ("{match: {user: 1000}, limit: 4G}", "'user' is 1000, not the name or id (in quotes) of a user"),
        ("{match: all, limit: 4}", "2:30: 'limit' is 4, not a size like 40G or 1500M"),
        ("{match: all, limit: 0G}", "'limit' is '0G', not a size like"),
        ("{match: all, memory: 4G}", "2:23: item 1 of 'memory' has an unknown key 'memory'"),
        ("alice", "item 1 of 'memory' is 'alice', not a mapping"),
    ],
)
def test_a_wrong_limit_is_said_with_its_place(item: str, said: str) -> None:
    with pytest.raises(BadUsage) as caught:
        parse(f"version: 1\nmemory: [{item}]\n")
    assert said in caught.value.message


# -- errors, each with its place ---------------------------------------------------------------------

ONE = "version: 1\ngpus:\n- match: all\n  "


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "1:1", "the file is empty"),
        ("[]", "1:1", "not a mapping"),
        ("version: 1\n", "1:1", "lacks the key 'gpus'"),
        ("gpus: []\n", "1:1", "lacks the key 'version'"),
        ("version: 2\ngpus: []\n", "1:10", "is not 1"),
        ("version: 2\n", "1:10", "is not 1"),
        ("version: true\ngpus: []\n", "1:10", "is not 1"),
        ("version: 1\ngpus: {}\n", "2:7", "not a list"),
        ("version: 1\ngpus: []\nnodes: []\n", "3:1", "unknown key 'nodes'"),
        ("version: 1\ngpus:\n- exclusive: true\n", "3:3", "lacks the key 'match'"),
        ("version: 1\ngpus:\n- match: all\n", "3:3", "has none: it needs exactly one of"),
        (ONE + "exclusive: true\n  mig: []\n", "3:3", "has exclusive and mig"),
        (ONE + "exclusive: false\n", "4:14", "is not true"),
        (ONE + "timslice: long\n", "4:3", "unknown key 'timslice'"),
        (ONE + "timeslice: fast\n", "4:14", "'fast', not one of: default, short, medium, long"),
        (ONE + "timeslice:\n", "4:13", "is empty, not one of: default, short, medium, long"),
        (ONE + "timeslice: 3\n", "4:14", "is 3, not one of: default"),
        (ONE + "mps: []\n", "4:8", "not a mapping"),
        (ONE + "mps:\n    threads: 0\n", "5:14", "0, not a percentage"),
        (ONE + "mps: {threads: 101}\n", "4:18", "101, not a percentage"),
        (ONE + "mps: {threads: .nan}\n", "4:18", "not a percentage"),
        (ONE + "mps: {threads: '25'}\n", "4:18", "not a percentage"),
        (ONE + "mps: {memory: 4}\n", "4:17", "4, not a size"),
        (ONE + "mps: {memory: 1.5X}\n", "4:17", "not a size"),
        (ONE + "mps: {priority: high}\n", "4:19", "'high', not one of: normal, low"),
        (ONE + "mps: {users: []}\n", "4:16", "is empty"),
        (ONE + "mps: {users: [1000]}\n", "4:17", "1000, not the name or id"),
        (ONE + "mps: {users: [bob, bob]}\n", "4:22", "is given twice: 'bob'"),
        (ONE + "mps: {exclusive: 1}\n", "4:20", "neither true nor false"),
        (ONE + "mig: 3g.40gb\n", "4:8", "not a list"),
        (ONE + "mig:\n  - 5c.3g.40gb\n", "5:5", "not a MIG profile"),
        (ONE + "mig:\n  - 3g.40gb 1g.10gb\n", "5:5", "not a MIG profile"),
        (ONE + "mig:\n  - {name: train}\n", "5:5", "lacks the key 'wish'"),
        (ONE + "mig:\n  - {wish: 1g*2, name: train}\n", "5:24", "is for one instance"),
        (ONE + "mig:\n  - {wish: 1g, name: 3g}\n", "5:22", "not a name"),
        (ONE + "mig:\n  - {wish: 1g, users: [bob]}\n", "5:23", "needs a name"),
        (ONE + "mig:\n  - {wish: 1g, mps: {exclusive: true}}\n", "5:22", "unknown key 'exclusive'"),
        ("version: 1\ngpus:\n- match: some\n  mig: []\n", "3:10", "'some', not one of: all"),
        ("version: 1\ngpus:\n- match: {}\n  mig: []\n", "3:10", "exactly one of index, uuid, model"),
        ("version: 1\ngpus:\n- match: {index: 0, model: t4}\n  mig: []\n", "3:10", "exactly one of"),
        ("version: 1\ngpus:\n- match: {index: -1}\n  mig: []\n", "3:18", "-1, not a whole number from 0"),
        ("version: 1\ngpus:\n- match: {index: true}\n  mig: []\n", "3:18", "True, not a whole number"),
        ("version: 1\ngpus:\n- match: {index: [0, 0]}\n  mig: []\n", "3:22", "is given twice: 0"),
        ("version: 1\ngpus:\n- match: {uuid: GPU-1234}\n  mig: []\n", "3:17", "not the UUID of a GPU"),
        ("version: 1\ngpus:\n- match: {model: ''}\n  mig: []\n", "3:18", "not the model of a GPU"),
        ("version: 1\ngpus:\n- match: {gpu: 0}\n  mig: []\n", "3:11", "unknown key 'gpu'"),
        ("version: 1\ngpus:\n- all\n", "3:3", "not a mapping"),
    ],
)
def test_an_error_has_line_and_column(text: str, where: str, what: str) -> None:
    with fails(BadUsage, "bad_file", message=what) as raised:
        parse(text, "host.yaml")
    assert raised.value.message.startswith(f"host.yaml:{where}: ")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "gpushare capture > gpushare.yaml"),
        # A file that is there is corrected, not written over.
        (ONE + "mps: {threads: 300}\n", "its keys and values: gpushare schema gpushare.yaml"),
        (ONE + "mps: {exclusive: 1}\n", "write true or false"),
        (ONE + "exclusive: 1\n", "write: exclusive: true"),
        ("version: 2\ngpus: []\n", "write: version: 1"),
        ("version: 1\n", "add one of: gpus, slices, memory, reserve"),
        ("gpus: []\n", "its keys: version, gpus"),
        ("a: [1\n", "to see a valid file: gpushare capture"),
        (ONE + "mps: {thread: 3}\n", "did you mean 'threads'?"),
    ],
)
def test_how_to_write_it_is_said(text: str, hint: str) -> None:
    with pytest.raises(BadUsage) as raised:
        parse(text)
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1\n", "host.yaml:2:1: this is not YAML"),
        ("a:\n  b: \x07\n", "host.yaml:2:6: this is not YAML"),
        ("version: 1\nversion: 1\ngpus: []\n", "host.yaml:2:1: the key 'version' is given twice"),
        (ONE + "timeslice: long\n  timeslice: short\n", "host.yaml:5:3: the key 'timeslice' is given twice"),
        ("!!python/object/apply:os.system [id]\n", "host.yaml:1:1: this is not YAML"),
        ("version: 1\ngpus: []\n---\nversion: 1\ngpus: []\n", "2 YAML documents"),
        ("[" * 5000, "nested too deeply"),
        ("version: 2026-13-40\n", "this is not a valid timestamp"),
    ],
)
def test_what_is_no_file_at_all(text: str, what: str) -> None:
    with fails(BadUsage, "bad_file", message=what):
        parse(text, "host.yaml")


def test_a_merged_mapping_counts_where_it_stands() -> None:
    text = "version: 1\ngpus:\n- match: {index: 0}\n  mps: &limits {threads: 25}\n- match: {index: 1}\n  mps:\n    <<: *limits\n    memory: 4\n"
    with pytest.raises(BadUsage, match=r"gpushare\.yaml:8:13: 'memory'"):
        parse(text)
    parsed = parse(text.replace("memory: 4", "memory: 4G"))
    assert parsed.entries[1].mps == MpsWish(limits=Limits(threads_percent=25.0, memory_limit_bytes=4 * GIB))


# -- the JSON Schema ---------------------------------------------------------------------------------

SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
NUMBERS = (0, 1, 1.0, 2.5, -1, 101, 10**30, float("inf"))
WORDS = [
    *("all", "low", "long", "4G", "0M", "1000000G", "1g.10gb", "1g.10gb*2", "2c.1g", "1g:7", "train", "mig"),
    *("MIG-x", "h100", "bob", "-x", "19us", "500us", "0.02ms", "30.5ms", "16ms", "/a*", "production"),
]
LINES = ("", "4G\n", "train\n", UUID, f"{UUID}\n")
GROUPS = (
    [],
    {},
    [0],
    [0, 0.0],
    ["bob", "bob"],
    [[]],
    {"index": 0},
    {"threads": 0.04},
    {"user": "bob"},
    {"command": "*", "gpu": [0]},
)
JUNK = st.sampled_from([None, True, False, *NUMBERS, *WORDS, *LINES, *GROUPS])
KEYS = st.sampled_from(
    [
        *("version", "gpus", "match", "index", "uuid", "model", "exclusive", "timeslice"),
        *("mps", "threads", "memory", "priority", "users", "mig", "wish", "name", "unknown", "slices", "user"),
        *("group", "container", "command", "cgroup", "gpu", "slice", "weight", "role", "limit"),
    ]
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deep for key, child in children for deep in places_in(child, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """Return a good document in which up to three things were replaced, added or taken away."""
    document = yaml.safe_load(draw(st.just(FULL) | files.map(text_of)))
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places_in(document)))
        if not path:
            continue
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "remove":
            del parent[path[-1]]
        elif how == "add" and isinstance(parent, dict):
            parent[draw(KEYS)] = copy.deepcopy(draw(JUNK))
        else:
            parent[path[-1]] = copy.deepcopy(draw(JUNK))
    return document


def accepted(document: Any) -> bool:
    try:
        read(document)
    except BadUsage:
        return False
    return True


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert VALIDATOR.is_valid(yaml.safe_load(FULL))


@given(mutated())
def test_schema_and_parser_accept_and_refuse_the_same(document: Any) -> None:
    assert VALIDATOR.is_valid(document) == accepted(document)


# -- which entry is for which GPU --------------------------------------------------------------------


def gpus(*names: str) -> list[Gpu]:
    return [
        Gpu(index=n, uuid=f"GPU-{n:08x}-0278-5de8-9bc3-edc91cebc70e", name=name, mig_capable=True)
        for n, name in enumerate(names)
    ]


def same(written: str, name: str) -> bool:
    return written in name.lower()


def test_the_most_exact_entry_holds() -> None:
    text = (
        "version: 1\ngpus:\n- {match: all, timeslice: default}\n- {match: {model: t4}, timeslice: short}\n"
        "- {match: {index: 1}, timeslice: medium}\n"
        "- {match: {uuid: GPU-00000001-0278-5de8-9bc3-edc91cebc70e}, timeslice: long}\n"
    )
    found = match_entries(parse(text), gpus("H100", "Tesla T4", "Tesla T4"), same)
    assert [entry.time_slice for entry in found.entries.values()] == [
        TimeSlice.DEFAULT,
        TimeSlice.LONG,
        TimeSlice.SHORT,
    ]
    assert (found.missing, found.notes) == ((), ())


def test_a_full_name_wins_over_words_of_a_longer_one() -> None:
    text = (
        "version: 1\ngpus:\n- {match: {model: NVIDIA H200}, timeslice: short}\n"
        "- {match: {model: NVIDIA H200 NVL}, timeslice: long}\n"
    )
    hosts_gpus = gpus("NVIDIA H200", "NVIDIA H200 NVL")
    matched = match_entries(parse(text), hosts_gpus, lambda written, name: written == name)
    assert [entry.time_slice for entry in matched.entries.values()] == [TimeSlice.SHORT, TimeSlice.LONG]


def test_two_entries_of_one_kind_for_a_gpu_are_refused() -> None:
    text = "version: 1\ngpus:\n- {match: {index: 0}, exclusive: true}\n- {match: {index: [1, 0]}, exclusive: true}\n"
    with pytest.raises(BadUsage, match=r"gpushare.yaml:4:3: GPU 0 is matched in the same way by the entry at 3:3"):
        match_entries(parse(text), gpus("T4", "T4"), same)


def test_a_name_is_given_once() -> None:
    text = "version: 1\ngpus:\n- match: all\n  mig: [{wish: 1g.10gb, name: train}]\n"
    assert list(match_entries(parse(text), gpus("H100"), same).entries) == [0]
    with pytest.raises(BadUsage, match=r"gpushare.yaml:4:9: the name 'train' is used twice, on GPU 0 and GPU 1"):
        match_entries(parse(text), gpus("H100", "H100"), same)


def test_what_is_not_there_is_said() -> None:
    text = "version: 1\ngpus:\n- {match: {index: [0, 7]}, exclusive: true}\n- {match: {model: a30}, mig: []}\n"
    found = match_entries(parse(text), gpus("T4"), same)
    assert [error.message for error in found.missing] == ["gpushare.yaml:3:3: this host has no GPU 7"]
    assert found.notes == ("gpushare.yaml:4:3: no GPU of this host is model a30",)


def test_a_file_of_mig_parted_is_told_where_it_belongs() -> None:
    with pytest.raises(BadUsage) as refused:
        parse("version: v1\nmig-configs: {small: [], large: []}\n", "my layouts.yaml")
    assert (refused.value.code, "is for mig-parted" in refused.value.message) == ("bad_file", True)
    assert refused.value.hint == "apply it: gpushare mig apply -f 'my layouts.yaml'"


@pytest.mark.parametrize("longest", ["4h", "90m", "0m", "12h"])
def test_a_time_is_written_as_people_write_it(longest: str) -> None:
    text = f"version: 1\nreserve: {{longest: {longest}}}\n"
    assert f"reserve: {{longest: {longest}}}" in text_of(parse(text))
    assert parse("version: 1\nreserve: {longest: 0h}\n").longest_lease_seconds == 0.0
