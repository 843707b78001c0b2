"""The rules for time-slices of a host: which process gets which slice. Pure.

A rule of ``gpushare.yaml`` names processes and gives them a slice, a weight or a role. The first rule that matches a process
wins. A command line, or a cgroup that its user owns, is what users say about themselves: a rule that relies on it alone never
raises a share. Such a rule gives at most the slice that the process had, and at most what the rules below would give.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import lru_cache
from typing import Final

from gpushare.base.errors import BadUsage
from gpushare.base.model import Gpu
from gpushare.base.units import format_slice, quoted
from gpushare.base.values import dataclass
from gpushare.host.origin import Origin
from gpushare.inputs import Mark

# The unit of `gpushare export systemd` that follows the rules.
KEEP_UNIT: Final = "gpushare-timeslice.service"
# Weight 1: the slice that a compute group has on an H100 and an H200 (driver 580), and so each process without a weight.
SLICE_PER_WEIGHT_US: Final = 2048
# Weights below it lose their slice to the switch (measured: from 500 us down); above it a slice is longer than 30 ms.
LEAST_WEIGHT: Final = 0.5
MOST_WEIGHT: Final = 14
# Characters of a text that a glob looks at: `origin` reads as much of a command line.
MOST_CHARACTERS: Final = 4096


def slice_of_weight(weight: float) -> int:
    """Return the slice in microseconds that gives a weight its share next to programs with the default slice (weight 1).

    Of two BERT trainings slices of 6144 us and 2048 us gave .75 and .25 of their speed alone; a slice of 4364 us, which
    would count 890 us for each switch, only .67 and .31 (H200, driver 580.159.04, 2026-11-22).
    """
    return round(weight * SLICE_PER_WEIGHT_US)


def slice_of_weight_text(text: str) -> int:
    """Return the slice of a weight as typed. Raises BadUsage."""
    with contextlib.suppress(ValueError):
        weight = float(text)
        if LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            return slice_of_weight(weight)
    raise BadUsage(
        f"{quoted(text)} is not a weight from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
        "give 3, for example; programs without a weight count as 1",
        code="bad_weight",
    )


class Role(str, Enum):
    """What a process is next to others on its GPU; each role has its slice."""

    PRODUCTION = "production"
    OPPORTUNISTIC = "opportunistic"

    @property
    def microseconds(self) -> int:
        return 16_000 if self is Role.PRODUCTION else 500


@dataclass(frozen=True, kw_only=True)
class ProcessMatch:
    """Which processes a rule is for: those that fit one value of each kind that is given. None given: all.

    Users and groups are names or ids; ``containers``, ``commands`` and ``cgroups`` are globs (``*`` and ``?``); ``gpus`` are
    indexes or UUIDs.
    """

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    def given_values(self) -> dict[str, tuple[str, ...]]:
        """Return the values of each kind that is given, by its key in gpushare.yaml."""
        values = {
            "user": self.users,
            "group": self.groups,
            "container": self.containers,
            "command": self.commands,
            "cgroup": self.cgroups,
            "gpu": self.gpus,
        }
        return {key: values for key, values in values.items() if values}

    def __str__(self) -> str:
        return ", ".join(f"{key} {' or '.join(values)}" for key, values in self.given_values().items()) or "all"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: its processes, and exactly one of slice (microseconds), weight and role."""

    match: ProcessMatch = field(default_factory=ProcessMatch)
    slice_us: int | None = None
    weight: float | None = None
    role: Role | None = None
    mark: Mark = field(default=Mark(), compare=False)

    @property
    def microseconds(self) -> int:
        if self.role is not None:
            return self.role.microseconds
        return self.slice_us if self.slice_us is not None else slice_of_weight(self.weight or 1)

    @property
    def outcome(self) -> str:
        """Return what it gives, as the file has it."""
        if self.role is not None:
            return f"role {self.role.value}"
        return format_slice(self.microseconds) if self.slice_us is not None else f"weight {self.weight:g}"


@dataclass(frozen=True)
class Names:
    """The ids of the users and groups that rules name."""

    users: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the rules say about one process on one GPU.

    ``microseconds`` is the slice to set; ``limited`` is what keeps it below the slice of the rule, or None.
    """

    rule: Rule
    microseconds: int
    limited: str | None = None


def decide(rules: Sequence[Rule], names: Names, origin: Origin, gpu: Gpu, default_us: int) -> Decision | None:
    """Return what the first rule that matches gives a process on a GPU; None: no rule matches.

    ``default_us`` is the slice that the process had before anybody changed it.
    """
    for number, rule in enumerate(rules):
        kinds = _kinds_matched(rule.match, names, origin, gpu)
        if kinds is None:
            continue
        wanted = rule.microseconds
        if _is_trusted(kinds, origin):
            return Decision(rule=rule, microseconds=wanted)
        # What users say about themselves raises no share.
        most, limit = default_us, "the slice that it had"
        below = decide(rules[number + 1 :], names, origin, gpu, default_us)
        if below is not None and below.microseconds < default_us:
            most, limit = below.microseconds, f"the rule {below.rule.mark}"
        if wanted <= most:
            return Decision(rule=rule, microseconds=wanted)
        return Decision(rule=rule, microseconds=most, limited=limit)
    return None


def _is_trusted(kinds: Iterable[str], origin: Origin) -> bool:
    """Return whether what a rule relies on is known from the kernel or from root, not from the user."""
    kinds = set(kinds)
    claimed = kinds & {"command", "cgroup", "container"}
    # A rule for all processes, or all of a GPU or a user, relies on nothing that a process says.
    if not claimed or kinds & {"user", "group"}:
        return True
    return origin.of_root and bool(claimed & {"cgroup", "container"})


def _kinds_matched(match: ProcessMatch, names: Names, origin: Origin, gpu: Gpu) -> list[str] | None:
    """Return the kinds of values that a match names; None: the process does not fit one of them."""
    given = match.given_values()
    for kind, values in given.items():
        if kind == "user":
            fits = origin.uid is not None and any(names.users.get(value) == origin.uid for value in values)
        elif kind == "group":
            fits = any(names.groups.get(value) in origin.gids for value in values)
        elif kind == "gpu":
            gpu_names = {str(gpu.index), (gpu.uuid or "").lower()}
            fits = any(value.lower() in gpu_names for value in values)
        else:
            text = getattr(origin, kind)
            fits = text is not None and any(fits_glob(value, text) for value in values)
        if not fits:
            return None
    return list(given)


def fits_glob(glob: str, text: str) -> bool:
    """Return whether a glob (``*`` any characters, ``?`` one) fits a whole text, of which the first 4096 count.

    fnmatch makes a pattern that never tries a part between two stars again, so that a hostile glob ends; a ``[`` is itself.
    """
    return _pattern_of(glob).match(text[:MOST_CHARACTERS]) is not None


@lru_cache(maxsize=1024)
def _pattern_of(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob.replace("[", "[[]")))
