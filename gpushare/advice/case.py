"""What a user wants to run: workloads, and the case of all of them. Pure; None means unknown."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Final, TypeVar

from gpushare.base.errors import BadCombination, BadUsage
from gpushare.base.units import parse_memory_limit, parse_seconds, quoted
from gpushare.inputs import Located, LocatedList, Mark, documents

T = TypeVar("T")


def any_of(values: Iterable[bool | None]) -> bool | None:
    """Return whether one of these is True; None if none is, but some are unknown."""
    result: bool | None = False
    for value in values:
        if value is True:
            return True
        if value is None:
            result = None
    return result


def negated(value: bool | None) -> bool | None:  # noqa: FBT001 - it is the value itself
    return None if value is None else not value


class Isolation(str, Enum):
    """The isolation between processes, or groups of them; several kinds may be requested."""

    QUOTA = "quota"
    FAULT = "fault"
    FULL = "full"


class Pattern(str, Enum):
    """The load pattern."""

    INTERACTIVE = "interactive"
    BURSTY = "bursty"
    STEADY = "steady"


class Role(str, Enum):
    """Which of two jobs yields to the other."""

    PRODUCTION = "production"
    OPPORTUNISTIC = "opportunistic"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Identical processes. None means unknown."""

    name: str | None = None
    # The kind of work whose usual properties were taken, such as jupyter.
    like: str | None = None
    command: str | None = None
    processes: int | None = None
    # How many GPUs one process, or its ranks together, has at the same time; None: one, or what the ranks need.
    gpus: int | None = None
    # Peak bytes of one process, without its CUDA context.
    memory: int | None = None
    # SMs that one process needs, for the choice of a MIG instance.
    sms: int | None = None
    # One process alone fills the GPU.
    saturating: bool | None = None
    user: str | None = None
    same_user: bool | None = None
    trusted: bool | None = None
    isolation: frozenset[Isolation] | None = None
    bandwidth_qos: bool | None = None
    # The shares of time must be unequal.
    weights: bool | None = None
    # These shares in percent.
    shares: tuple[float, ...] | None = None
    # The shares change often.
    resizing: bool | None = None
    # The processes are copies of one model.
    replicas: bool | None = None
    # One process serves several models.
    multi_model: bool | None = None
    # There is a latency target per request.
    latency: bool | None = None
    # That target.
    latency_seconds: float | None = None
    pattern: Pattern | None = None
    one_application: bool | None = None
    cooperating: bool | None = None
    code: bool | None = None
    vms: bool | None = None
    nccl: bool | None = None
    p2p: bool | None = None
    ipc: bool | None = None
    # Memory that the driver pages (cudaMallocManaged, UVM).
    managed_memory: bool | None = None
    graphics: bool | None = None
    profiler: bool | None = None
    dynamic_parallelism: bool | None = None
    running: bool | None = None
    # The programs that are on the GPU now cannot be ended; False: they can.
    occupied: bool | None = None
    role: Role | None = None
    cuda_graphs: bool | None = None
    # It waits between requests, so that the GPU is idle in between.
    gaps: bool | None = None
    bandwidth_bound: bool | None = None
    io_bound: bool | None = None
    # It does not end by itself: nobody can wait for its end.
    server: bool | None = None
    # Each of them has to keep advancing, instead of waiting until the one before it has ended.
    progress: bool | None = None
    # Keeping each process within its share matters more than lending idle SMs.
    containment: bool | None = None
    # The number of groups of processes that must be separated from each other.
    groups: int | None = None
    containers: bool | None = None
    kubernetes: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Workloads that are to share a GPU.

    ``root``: whether the user can become root; None if unknown. ``destroy``: whether idle MIG instances may be destroyed.
    """

    workloads: tuple[Workload, ...]
    root: bool | None = None
    destroy: bool = False

    @functools.cached_property
    def shares(self) -> tuple[float, ...] | None:
        """Return the unequal shares in percent, those of each workload in order; None if they are not known.

        Raises:
            BadUsage: a share of several workloads rounds to 0 %.
        """
        if any(work.shares is None for work in self.workloads):
            return None
        shares = tuple(share for work in self.workloads for share in work.shares or ())
        if len(shares) == 1:
            # A single share says nothing of the others.
            return None
        # Those of one workload are percentages: rounded again, they would change.
        return shares if len(self.workloads) == 1 else percentages(shares)

    def any(self, field: str) -> bool | None:
        """Return whether a workload has a property; None if none has it and it is unknown for some."""
        return any_of([getattr(work, field) for work in self.workloads])

    @functools.cached_property
    def counts(self) -> tuple[int | None, ...]:
        """Return the number of processes of each workload; in a list of several, 1 unless given."""
        several = len(self.workloads) > 1
        return tuple(work.processes or (1 if several else None) for work in self.workloads)

    @functools.cached_property
    def processes(self) -> int | None:
        """Return the number of all processes; None: it is one workload of unknown number."""
        return None if None in self.counts else sum(filter(None, self.counts))

    @functools.cached_property
    def wanted_isolation(self) -> frozenset[Isolation] | None:
        isolations = [work.isolation for work in self.workloads if work.isolation is not None]
        return frozenset().union(*isolations) if isolations else None

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """Return the load pattern, if all workloads that have one have the same."""
        patterns = {work.pattern for work in self.workloads if work.pattern is not None}
        return patterns.pop() if len(patterns) == 1 else None

    @functools.cached_property
    def groups(self) -> int | None:
        """Return the number of groups to separate: as given, or one per workload of a list; None: there are no groups."""
        if len(self.workloads) > 1 or self.workloads[0].groups is not None:
            return sum(work.groups or 1 for work in self.workloads)
        return None

    @functools.cached_property
    def roles(self) -> frozenset[Role]:
        return frozenset(work.role for work in self.workloads if work.role is not None)

    @functools.cached_property
    def same_user(self) -> bool | None:
        """Return whether all processes belong to one user."""
        names = {work.user for work in self.workloads if work.user is not None}
        if len(names) > 1 or any(work.same_user is False for work in self.workloads):
            return False
        one_name = all(work.user is not None for work in self.workloads)
        return True if one_name or all(work.same_user for work in self.workloads) or self.processes == 1 else None

    @property
    def same_user_inside(self) -> bool | None:
        """Return whether the processes of each group belong to one user; without groups, whether all do."""
        if self.same_user or self.groups is None:
            return self.same_user
        if len(self.workloads) == 1:
            # Different users may be those of different groups.
            return None
        if any(work.same_user is False for work in self.workloads):
            return False
        all_known = all(work.same_user or work.user or (work.processes or 1) == 1 for work in self.workloads)
        return True if all_known else None


def check_users(case: Case) -> Case:
    """Return the case, if its users do not contradict each other.

    Raises:
        BadUsage: all are said to be one user, and have several names.
    """
    names = sorted({work.user for work in case.workloads if work.user is not None})
    if len(names) > 1 and all(work.same_user for work in case.workloads):
        raise BadCombination(
            f"users: same contradicts the user names {', '.join(names)}", "drop users: the names imply it"
        )
    return case


# -- from words ------------------------------------------------------------------------------------

_CHOICES: Final[Mapping[str, type[Enum]]] = {"pattern": Pattern, "role": Role}
_COUNTS: Final = ("processes", "gpus", "sms", "groups")
_TEXTS: Final = ("name", "like", "command", "user")
_YES: Final = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
# Properties given as a list: needs: [nccl, no-p2p]; each may also be a property of its own.
NEEDS: Final = (
    *("nccl", "p2p", "ipc", "graphics", "profiler", "dynamic_parallelism", "cuda_graphs"),
    *("bandwidth_qos", "weights", "resizing", "containment", "vms", "containers", "kubernetes", "occupied"),
    *("replicas", "multi_model", "server", "gaps", "progress", "managed_memory"),
)
# The names of a workload's properties in a file and on the command line.
KEYS: Final = (
    *(
        "users" if field.name == "same_user" else field.name
        for field in fields(Workload)
        if field.name not in {"latency_seconds", "shares"}
    ),
    "needs",
)
_MOST_PROCESSES: Final = 100_000
# The usual properties of well-known kinds of work; what a user says about them counts instead. Sources: the examples of AWS
# for EKS (notebooks, Spark, CI, rendering, HPC, serving), the course CIP203 (training fills the GPU).
LIKE: Final[Mapping[str, Mapping[str, Any]]] = {
    "jupyter": {"pattern": "interactive", "saturating": False},
    "spark": {"users": "same", "cooperating": False, "saturating": False},
    "ci": {"pattern": "bursty", "saturating": False},
    "rendering": {"pattern": "bursty", "graphics": True},
    "hpc": {"users": "same", "cooperating": True, "saturating": False},
    "serving": {"latency": "yes", "saturating": False, "server": True},
    "training": {"pattern": "steady", "saturating": True},
}


def flags_like(kind: str) -> str:
    """Return the options that a kind of work stands for."""
    words = []
    for key, value in LIKE[kind].items():
        name = f"--{key}" if value is not False else f"--no-{key}"
        if key in NEEDS:
            name = f"--needs {key}"
        words.append(name if isinstance(value, bool) else f"{name} {value}")
    return " ".join(words)


def workload_of(words: Mapping[str, Any]) -> Workload:
    """Return the workload of plain values from a file or the command line; None means unknown.

    Raises:
        BadUsage: an unknown key (`unknown_key`) or an invalid value.
    """
    given = {key: value for key, value in words.items() if value is not None}
    if "like" in given:
        # The usual properties of this kind, where the user gives no other.
        kind = _parse_choice("like", given["like"], list(LIKE), str)
        given = {**LIKE[kind], **given, "like": kind}
    values: dict[str, Any] = {}
    for key in words:
        if key not in KEYS:
            raise BadUsage(f"{quoted(key)} is not a property of a workload", _close_hint(key, KEYS), code="unknown_key")
    for key, value in given.items():
        values.update(_parse_property(key, value))
    return _with_counts(Workload(**values))


def _with_counts(workload: Workload) -> Workload:
    """Return a workload with the number of processes that its shares or models imply; BadUsage if counts contradict."""
    if workload.shares is not None and len(workload.shares) > 1:
        if workload.processes not in {None, len(workload.shares)}:
            raise BadUsage(
                f"{len(workload.shares)} shares for {workload.processes} processes",
                "give one share for each process: weights=30:70",
                code="bad_count",
            )
        workload = replace(workload, processes=len(workload.shares))
    if workload.multi_model and workload.processes is None:
        workload = replace(workload, processes=1)
    if workload.processes is not None and workload.groups is not None and workload.groups > workload.processes:
        raise BadUsage(
            f"{workload.groups} groups of {workload.processes} processes",
            "a group has at least one process: give fewer groups, or more processes",
            code="bad_count",
        )
    return workload


def sizes_of(memory: Any) -> list[str]:
    """Return the sizes in the property ``memory``: ``34G,17G``, or a list; empty: none is given."""
    if memory is None:
        return []
    return list(map(str, memory)) if isinstance(memory, list) else str(memory).split(",")


def workloads_of(words: Mapping[str, Any]) -> tuple[Workload, ...]:
    """Return the workload of plain values, or one for each process if they need different sizes of memory.

    Raises:
        BadUsage: as `workload_of`; or there are not as many sizes as processes and shares.
    """
    memory = words.get("memory")
    sizes = sizes_of(memory)
    if len(sizes) <= 1:
        # A single value stays as it is: a number is a size in bytes.
        memory = sizes[0] if isinstance(memory, list) and sizes else memory
        return (workload_of({**words, "memory": memory}),)
    count = len(sizes) if words.get("processes") is None else words["processes"]
    return workloads_of_sizes(workload_of({**words, "memory": None, "processes": count}), sizes)


def workloads_of_sizes(base: Workload, sizes: Sequence[str]) -> tuple[Workload, ...]:
    """Return one workload for each size of memory, which is else as ``base``.

    Raises:
        BadUsage: a size is not valid, or there are not as many sizes as processes and shares.
    """
    shares = (None,) * len(sizes) if base.shares is None else base.shares
    if base.processes not in {None, len(sizes)} or len(shares) != len(sizes):
        raise BadUsage(
            f"{len(sizes)} sizes of memory do not match the number of processes or shares",
            "give one size for each process: --memory 34G,17G --needs weights=2:1",
            code="bad_count",
        )
    workloads = []
    for number, (size, share) in enumerate(zip(sizes, shares, strict=True), 1):
        needed = workload_of({"memory": size}).memory
        work_shares = None if share is None else (share,)
        name = f"{base.name or 'job'}{number}"
        workloads.append(replace(base, processes=1, name=name, memory=needed, shares=work_shares))
    return tuple(workloads)


def _close_hint(word: str, names: Iterable[str]) -> str:
    """Return the hint of an unknown word: the names that are like it, or all of them."""
    import difflib

    names = list(names)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"give one of: {', '.join(names)}"


def _parse_property(key: str, value: Any) -> dict[str, Any]:
    """Return the fields of a workload that one property of a file or option sets."""
    if key in _TEXTS:
        if isinstance(value, (list, tuple, Mapping)):
            raise _bad_value_error(key, value, f"give one {key}")
        return {key: str(value)}
    if key in _COUNTS:
        return {key: _parse_count(key, value)}
    if key in _CHOICES:
        return {key: _parse_choice(key, value, [choice.value for choice in _CHOICES[key]], _CHOICES[key])}
    reader = _READERS.get(key)
    return {key: _parse_yes_or_no(key, value)} if reader is None else reader(value)


def _bad_value_error(key: str, value: Any, hint: str) -> BadUsage:
    return BadUsage(f"'{str(value)[:40]}' is not a valid value for {key}", hint, code="bad_value")


# A smaller number is no size in bytes: its unit is missing.
_LEAST_BYTES: Final = 1025


def _parse_memory(value: Any) -> int:
    """Return a size in bytes, from a number of bytes or a text with a unit."""
    if isinstance(value, int) and value >= _LEAST_BYTES:
        return value
    try:
        return parse_memory_limit(str(value))
    except BadUsage as error:
        # In a file there is no option to name.
        raise error.restated(hint="give a size with its unit: 6G or 1500M") from None


def _parse_count(key: str, value: Any) -> int:
    """Return a number of things, at least 1; BadUsage says what a valid one is."""
    text = str(value).strip()
    # Judged as text: int() refuses numbers of thousands of digits.
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if isinstance(value, bool) or not 0 < number <= _MOST_PROCESSES:
        raise BadUsage(
            f"'{text[:40]}' is not a valid number of {key}", f"give 1 to {_MOST_PROCESSES}", code="bad_count"
        )
    return number


def _parse_choice(key: str, value: Any, words: list[str], convert: Any) -> Any:
    """Return one of the words, converted; BadUsage names them."""
    text = str(value).strip().lower()
    if text not in words:
        raise _bad_value_error(key, text, f"give one of: {', '.join(words)}")
    return convert(text)


def _parse_yes_or_no(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    answer = _YES.get(str(value).strip().lower())
    if answer is None:
        raise _bad_value_error(key, value, "give yes or no")
    return answer


def _split_words(value: Any) -> list[str]:
    """Return the words of a list, or of comma-separated text."""
    words = value if isinstance(value, (list, tuple, set, frozenset)) else str(value).split(",")
    return [str(word).strip().lower() for word in words]


def _parse_needs(words: list[str]) -> dict[str, Any]:
    """Return the fields that the words of ``needs`` set: ``nccl``, ``no-p2p``, ``weights=30:70``; contradictions are errors."""
    values: dict[str, Any] = {}
    for text in words:
        word = text.replace("_", "-")
        name = word.removeprefix("no-").replace("-", "_")
        if text.startswith("weights="):
            new = _parse_shares(text.removeprefix("weights=").split(":"))
        elif name in NEEDS:
            new = {name: not word.startswith("no-")}
        else:
            hint = _close_hint(word.removeprefix("no-"), [need.replace("_", "-") for need in NEEDS])
            raise BadUsage(f"unknown need {quoted(text)}", hint, code="bad_value")
        for key, value in new.items():
            if values.setdefault(key, value) != value:
                title = key.replace("_", "-")
                raise BadCombination(f"{title} and no-{title} cannot be combined", "give one of them")
    return values


_SHARE: Final = r"\d{1,3}(\.\d{1,3})?"


def _parse_shares(texts: list[Any]) -> dict[str, Any]:
    """Return what ``weights=30:70`` sets of a workload: that it needs weights, and a share in percent for each process."""
    words = [str(text).strip().removesuffix("%").strip() for text in texts]
    hint = "give a number for each process: weights=30:70, or weights=2:1"
    if not words or not all(re.fullmatch(_SHARE, word, re.ASCII) for word in words):
        raise BadUsage(f"'{':'.join(words)[:40]}' are not shares", hint, code="bad_value")
    shares = tuple(float(word) for word in words)
    if min(shares) <= 0:
        raise BadUsage(f"shares of {':'.join(words)[:40]} are not possible", hint, code="bad_value")
    return {"weights": True, "shares": percentages(shares)}


def percentages(shares: Sequence[float]) -> tuple[float, ...]:
    """Return shares as percentages of their sum; one alone as it is, because those of the others are not known here.

    Raises:
        BadUsage: one of them rounds to 0 %.
    """
    if len(shares) == 1:
        return tuple(shares)
    total = sum(shares)
    rounded = tuple(round(100 * share / total, 1) for share in shares)
    if min(rounded) <= 0:
        listed = ":".join(f"{share:g}" for share in shares)[:40]
        raise BadUsage(
            f"of the shares {listed}, the smallest rounds to 0 %", "give each at least 0.1 %", code="bad_value"
        )
    return rounded


def _parse_weights(value: Any) -> dict[str, Any]:
    """Return the fields that ``weights`` sets: shares, or whether unequal ones are wanted at all."""
    if isinstance(value, list):
        return _parse_shares(value)
    text = str(value).strip()
    if ":" in text or re.fullmatch(_SHARE, text, re.ASCII):
        return _parse_shares(text.split(":"))
    return {"weights": _parse_yes_or_no("weights", value)}


def _parse_isolation(value: Any) -> frozenset[Isolation]:
    """Return the kinds of isolation that are wanted; ``none`` is an empty set."""
    texts = _split_words(value)
    if texts == ["none"]:
        return frozenset()
    words = ["none", *(kind.value for kind in Isolation)]
    if len(texts) > 1 and "none" in texts:
        raise BadUsage(
            f"isolation '{','.join(texts)[:40]}' combines none with others",
            "give none alone, or drop it",
            code="bad_value",
        )
    return frozenset(_parse_choice("isolation", text, words, Isolation) for text in texts)


# A request that may take so long is no reason against any way of sharing.
LONG_SECONDS: Final = 10.0


def _parse_latency(value: Any) -> dict[str, Any]:
    """Return the fields that ``latency`` sets: whether there is a target that matters, and the target if it is given."""
    if isinstance(value, bool):
        return {"latency": value}
    text = str(value).strip().lower()
    if text == "none" or text in _YES:
        return {"latency": _YES.get(text, False)}
    hint = "give a time with its unit: 20ms, 1s; or yes, none"
    try:
        seconds = parse_seconds(text)
    except BadUsage as error:
        raise error.restated(hint=hint) from None
    if seconds <= 0:
        raise BadUsage(f"a latency target of {text[:40]} cannot be met", hint, code="bad_value")
    return {"latency": seconds < LONG_SECONDS, "latency_seconds": seconds}


_READERS: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "users": lambda value: {"same_user": _parse_choice("users", value, ["same", "different"], str) == "same"},
    "memory": lambda value: {"memory": _parse_memory(value)},
    "isolation": lambda value: {"isolation": _parse_isolation(value)},
    "latency": _parse_latency,
    "weights": _parse_weights,
    "needs": lambda value: _parse_needs(_split_words(value)),
}


_HINT: Final = "write for example: workloads: [{processes: 4, memory: 6G, users: same, saturating: no}]"
_TOP_KEYS: Final = ("workloads", "root")


def read_case(text: str, path: str) -> Case:
    """Return the case of a file: a workload, a list of workloads, or ``workloads:`` next to ``root:``.

    Raises:
        BadUsage: not valid YAML, an unknown key, or an invalid value; the message names its place.
    """
    content, *more = documents(text, path, _HINT, texts=True)
    if content is None or more:
        problem = "has several documents" if more else "is empty"
        raise BadUsage(f"{path} {problem}", _HINT, code="bad_file")
    root = None
    # A mapping without these keys is a workload itself.
    if isinstance(content, Located) and not content.keys().isdisjoint(_TOP_KEYS):
        for name, mark in content.keys_at.items():
            if name not in _TOP_KEYS:
                hint = f"the only other key is: {', '.join(_TOP_KEYS[1:])}"
                raise BadUsage(f"{path}:{mark}: unknown key {quoted(str(name))}", hint, code="unknown_key")
        if "root" in content:
            root = _parsed_at(path, content.values_at["root"], lambda: _parse_yes_or_no("root", _flat(content["root"])))
        if "workloads" not in content:
            raise BadUsage(f"{path} has no workloads", _HINT, code="bad_file")
        content = content["workloads"]
    if isinstance(content, LocatedList):
        items = zip(content, content.items_at, strict=True)
        workloads = [workload for words, mark in items for workload in _parse_workloads(words, path, mark)]
    else:
        workloads = list(_parse_workloads(content, path, Mark()))
    if not workloads:
        raise BadUsage(f"{path}: the list of workloads is empty", _HINT, code="bad_file")
    return Case(workloads=tuple(workloads), root=root)


def _parse_workloads(words: Any, path: str, mark: Mark) -> tuple[Workload, ...]:
    """Return the workloads of one mapping of a file; an error names the place of the property."""
    if not isinstance(words, Located):
        raise BadUsage(f"{path}:{mark}: a workload is a mapping", _HINT, code="bad_file")
    flat = {str(name): _flat(value) for name, value in words.items()}
    for name, mark_of_key in words.keys_at.items():
        # Each property alone is parsed first, so that an error has its place; then all, as some contradict each other.
        _parsed_at(path, mark_of_key, functools.partial(workloads_of, {str(name): flat[str(name)]}))
    return _parsed_at(path, mark, lambda: workloads_of(flat))


def _flat(value: Any) -> Any:
    """Return a value without nested ones: no property has them, and an alias may lead back to the list itself."""
    if isinstance(value, list):
        return [item if isinstance(item, str) else "..." for item in value]
    return dict.fromkeys(map(str, value), "...") if isinstance(value, Mapping) else value


def _parsed_at(path: str, mark: Mark, parse: Callable[[], T]) -> T:
    """Return the result of ``parse``; its error gets the place in the file."""
    try:
        return parse()
    except BadUsage as error:
        raise error.restated(message=f"{path}:{mark}: {error.message}") from None
