"""Which process gets which time-slice: the first match wins, and what a user says about itself never raises a share."""

from __future__ import annotations

import fnmatch
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.model import Gpu
from gpushare.inputs import Mark
from gpushare.timeslice.rules import (
    MOST_CHARACTERS,
    Decision,
    Names,
    Origin,
    ProcessMatch,
    Role,
    Rule,
    decide,
    fits_glob,
)
from gpushare.timeslice.slices import MOST_US

DEFAULT = 2048
GPU = Gpu(index=0, uuid="GPU-00000000-0278-5de8-9bc3-edc91cebc70e")
NAMES = Names(users={"alice": 1000, "bob": 1001}, groups={"prod": 50})
ALICE = Origin(uid=1000, gids=frozenset({1000}), command="python train.py", cgroup="/a.slice", of_root=False)


def rule(microseconds: int, line: int = 1, **match: tuple[str, ...]) -> Rule:
    return Rule(match=ProcessMatch(**match), slice_us=microseconds, mark=Mark(line, 3))


def decided(*rules: Rule, origin: Origin = ALICE, default: int = DEFAULT) -> Decision | None:
    return decide(rules, NAMES, origin, GPU, default)


def microseconds(*rules: Rule, origin: Origin = ALICE, default: int = DEFAULT) -> int | None:
    decision = decided(*rules, origin=origin, default=default)
    return None if decision is None else decision.microseconds


def test_the_first_match_wins() -> None:
    rules = (rule(300, users=("bob",)), rule(700, users=("alice",)), rule(900))
    assert microseconds(*rules) == 700
    assert microseconds(*rules, origin=replace(ALICE, uid=1001)) == 300
    assert microseconds(*rules, origin=replace(ALICE, uid=7)) == 900
    assert microseconds(*rules[:2], origin=replace(ALICE, uid=7)) is None


def test_all_keys_of_a_match_have_to_fit() -> None:
    both = rule(300, users=("alice",), commands=("*train*", "*serve*"))
    assert microseconds(both) == 300
    assert microseconds(both, origin=replace(ALICE, command="python eval.py")) is None
    assert microseconds(both, origin=replace(ALICE, command=None)) is None


@pytest.mark.parametrize(
    "gpu", ["0", "GPU-00000000-0278-5de8-9bc3-edc91cebc70e", "GPU-00000000-0278-5DE8-9BC3-EDC91CEBC70E"]
)
def test_a_rule_for_a_gpu(gpu: str) -> None:
    assert microseconds(rule(300, gpus=(gpu,))) == 300
    assert microseconds(rule(300, gpus=("1",))) is None


@pytest.mark.parametrize("kind", ["commands", "cgroups", "containers"])
def test_what_a_user_says_only_lowers(kind: str) -> None:
    own = replace(ALICE, container="vllm")
    assert microseconds(rule(300, **{kind: ("*",)}), origin=own) == 300
    decision = decided(rule(16_000, **{kind: ("*",)}), origin=own)
    assert (decision.microseconds, decision.limited) == (DEFAULT, "the slice that it had")


def test_what_a_user_says_does_not_lead_past_a_lower_rule() -> None:
    # Otherwise a command line would raise the share from 200 to 1000.
    decision = decided(rule(1000, commands=("*train*",)), rule(200, line=7, users=("alice",)))
    assert (decision.microseconds, decision.limited) == (200, "the rule 7:3")
    assert microseconds(rule(1000, commands=("*train*",)), rule(16_000, users=("alice",))) == 1000


@pytest.mark.parametrize(
    "match",
    [
        {"users": ("alice",)},
        {"groups": ("prod",)},
        {"users": ("alice",), "commands": ("*train*",)},
        {},
        {"gpus": ("0",)},
    ],
)
def test_what_the_kernel_or_the_file_says_raises(match: dict[str, tuple[str, ...]]) -> None:
    assert microseconds(rule(16_000, **match), origin=replace(ALICE, gids=frozenset({50}))) == 16_000


@pytest.mark.parametrize("kind", ["cgroups", "containers"])
def test_a_cgroup_of_root_raises(kind: str) -> None:
    placed = replace(ALICE, container="vllm", of_root=True)
    assert microseconds(rule(16_000, **{kind: ("*",)}), origin=placed) == 16_000
    # The command line is still what the user says, but which cgroup it is in is not.
    assert microseconds(rule(16_000, commands=("*",), cgroups=("*",)), origin=placed) == 16_000
    assert microseconds(rule(16_000, commands=("*",)), origin=placed) == DEFAULT


texts = st.text(st.sampled_from("ab*? \n"), max_size=12)
origins = st.builds(
    Origin,
    uid=st.sampled_from([None, 1000, 1001, 7]),
    gids=st.sampled_from([frozenset(), frozenset({50})]),
    container=st.none() | texts,
    command=st.none() | texts,
    cgroup=st.none() | texts.map(lambda text: f"/{text}"),
    of_root=st.booleans(),
)
globs = st.lists(texts.filter(bool), max_size=2).map(tuple)
matches = st.builds(
    ProcessMatch,
    users=st.sampled_from([(), ("alice",), ("bob", "nobody")]),
    groups=st.sampled_from([(), ("prod",)]),
    containers=globs,
    commands=globs,
    cgroups=globs,
    gpus=st.sampled_from([(), ("0",), ("1",)]),
)
some_rules = st.lists(st.builds(Rule, match=matches, slice_us=st.integers(20, MOST_US)), max_size=5)


@given(some_rules, origins, origins, st.integers(20, MOST_US))
def test_a_process_never_gains_by_what_it_says(
    rules: list[Rule], origin: Origin, claimed: Origin, default: int
) -> None:
    """With another command line, container or cgroup of its own, no process gets more than if it said nothing."""
    own = replace(origin, of_root=False)
    silent = replace(own, command=None, container=None, cgroup=None)
    talking = replace(own, command=claimed.command, container=claimed.container, cgroup=claimed.cgroup)
    # A rule that names a user as well was written for what that user says.
    rules = [each for each in rules if not ((each.match.users or each.match.groups) and _says(each))]
    before, after = (decide(rules, NAMES, each, GPU, default) for each in (silent, talking))
    most = default if before is None else max(before.microseconds, min(default, before.microseconds))
    assert after is None or after.microseconds <= most
    assert before is None or after is not None


def _says(rule: Rule) -> bool:
    return bool(rule.match.commands or rule.match.cgroups or rule.match.containers)


@given(some_rules, origins, st.integers(20, MOST_US))
def test_what_is_decided_is_a_rule_and_in_its_range(rules: list[Rule], origin: Origin, default: int) -> None:
    decision = decide(rules, NAMES, origin, GPU, default)
    if decision is not None:
        assert decision.rule in rules
        assert 20 <= decision.microseconds <= decision.rule.microseconds
        assert (decision.limited is None) == (decision.microseconds == decision.rule.microseconds)


@given(texts, texts)
def test_a_glob_is_what_the_shell_means(glob: str, text: str) -> None:
    assert fits_glob(glob, text) == (re.fullmatch(fnmatch.translate(glob), text) is not None)


@pytest.mark.parametrize("glob", ["*a" * 90 + "b", "*" * 200, "*?" * 99 + "b", "?*" * 99 + "b", "*" + "?" * 190 + "b"])
def test_a_hostile_glob_ends(glob: str) -> None:
    began = time.process_time()
    for text in ("a" * (2 << 20), "a" * MOST_CHARACTERS, "\n" * MOST_CHARACTERS, "ab" * MOST_CHARACTERS):
        fits_glob(glob, text)
    # It takes some milliseconds; a matcher that tries again takes years.
    assert time.process_time() - began < 5


def test_a_glob_sees_the_beginning_of_a_long_command_line() -> None:
    assert fits_glob("*train*", "python train.py " + "x" * (2 << 20))
    assert not fits_glob("*train*", "x" * (2 << 20) + "train")


def test_roles_and_weights_have_slices() -> None:
    assert [Rule(role=role).microseconds for role in Role] == [16_000, 500]
    assert Rule(weight=3).microseconds == 3 * 2048
    assert Rule(weight=1).microseconds == 2048
    assert Rule(weight=0.5).microseconds >= 1000
    assert Rule(weight=14).microseconds <= 30_000
