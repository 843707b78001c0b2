"""Decide which GPU takes which part of a wish: exact, by dynamic programming over the GPUs. Pure.

A part of a wish is a code: one integer with a field per kind of instance, and one for the size of the part, each with a
guard bit, so that one subtraction tells for all fields whether any goes below zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Codes:
    """The codes of a wish: what one instance of each kind adds, the whole wish, and the guard bits."""

    one: tuple[int, ...]
    whole: int
    guard: int
    # (shift, bits) of each field, the size last.
    fields: tuple[tuple[int, int], ...]

    def field_wise_max(self, codes: Sequence[int]) -> int:
        """Return the code with the largest value of each field."""
        largest = 0
        for shift, bits in self.fields:
            largest |= max((code >> shift & ((1 << bits) - 1) for code in codes), default=0) << shift
        return largest

    def capped_sum(self, first: int, second: int) -> int:
        """Return the sum field by field, each at most that of the whole wish."""
        total_code = 0
        for shift, bits in self.fields:
            mask = (1 << bits) - 1
            total = (first >> shift & mask) + (second >> shift & mask)
            total_code |= min(total, self.whole >> shift & mask) << shift
        return total_code


def codes_for(counts: Sequence[int], sizes: Sequence[int]) -> Codes:
    """Return the codes of a wish with these counts of each kind; ``sizes`` only make the search short."""
    total = sum(count * size for count, size in zip(counts, sizes, strict=True))
    fields: list[tuple[int, int]] = []
    shift = guard = whole = 0
    for count in (*counts, total):
        bits = count.bit_length()
        fields.append((shift, bits))
        whole |= count << shift
        guard |= 1 << shift + bits
        shift += bits + 1
    each_adds = tuple((1 << fields[n][0]) + (size << fields[-1][0]) for n, size in enumerate(sizes))
    return Codes(each_adds, whole, guard, tuple(fields))


@dataclass(frozen=True)
class Group:
    """GPUs that are the same for the search: how many, and what each part of the wish costs on one of them."""

    count: int
    weights: Mapping[int, int]


def assign(groups: Sequence[Group], codes: Codes, instances: int) -> list[list[int]] | None:
    """Return for each group the parts that its GPUs take (at most one each), at the least total; None: no way.

    ``instances`` is how many instances the wish has: no more GPUs of a group than that are needed. A group's
    ``weights`` are differences to leaving a GPU as it is, and hold the empty part (0) with weight 0.

    GPUs of one group are interchangeable, so of the many orders of the same parts only one is searched: by the first
    kind of instance that a part holds. In the last group, which has to take all that is left, that is the first kind
    that is left.
    """
    # The largest last, where the order says most.
    by_count = sorted(range(len(groups)), key=lambda number: groups[number].count)
    turns = [number for number in by_count for _ in range(min(groups[number].count, instances))]
    reach = _reach(groups, turns, codes)
    guard = codes.guard
    if ((reach[0] | guard) - codes.whole) & guard != guard:
        return None
    cheapest: dict[_State, int] = {(codes.whole, 0): 0}
    steps: list[dict[_State, tuple[int, _State]]] = []
    choices: _Choices | None = None
    for layer, number in enumerate(turns):
        if choices is None or turns[layer - 1] != number:
            choices = _Choices(groups[number], codes, last=number == turns[-1])
            cheapest = _without_order(cheapest, steps)
        cheapest, taken = _turn(cheapest, choices, reach[layer + 1] | guard, guard)
        steps.append(taken)
    ends = [state for state in cheapest if state[0] == 0]
    if not ends:
        return None
    return _parts_taken(groups, turns, steps, min(ends, key=lambda state: (cheapest[state], state)))


# What is left of the wish, and which kind of instance the next part may begin with.
_State = tuple[int, int]


class _Choices:
    """The parts that a GPU of a group may take, by the first kind of instance in them; rare kinds come first."""

    def __init__(self, group: Group, codes: Codes, *, last: bool) -> None:
        masks = [((1 << bits) - 1) << shift for shift, bits in codes.fields[:-1]]
        self._masks = sorted(masks, key=lambda mask: sum(bool(code & mask) for code in group.weights))
        # Code, weight, and the kind from which on the next part may begin: in the last group what is left says that.
        self._first: list[list[tuple[int, int, int]]] = [[] for _ in range(len(masks) + 1)]
        for code, weight in group.weights.items():
            kind = self._first_of(code)
            self._first[kind].append((code, weight, 0 if last else kind))
        self._onward = None if last else [list(chain(*self._first[start:])) for start in range(len(self._first))]

    def _first_of(self, code: int) -> int:
        return next((kind for kind, mask in enumerate(self._masks) if code & mask), len(self._masks))

    def parts(self, remaining: int, begin: int) -> Sequence[tuple[int, int, int]]:
        """Return the parts that fit into the remaining counts: code, weight, and where the next part may begin."""
        return self._first[self._first_of(remaining)] if self._onward is None else self._onward[begin]


def _turn(
    cheapest: Mapping[_State, int], choices: _Choices, later: int, guard: int
) -> tuple[dict[_State, int], dict[_State, tuple[int, _State]]]:
    """Let one GPU take a part: the cheapest way to each state, and from where it was reached by which part."""
    best: dict[_State, int] = {}
    taken: dict[_State, tuple[int, _State]] = {}
    for state, weight in cheapest.items():
        rest_of_wish, begin = state
        guarded = rest_of_wish | guard
        for code, more, kind in choices.parts(rest_of_wish, begin):
            rest = guarded - code
            if rest & guard != guard:
                continue
            rest ^= guard
            if (later - rest) & guard != guard:
                continue
            then = (rest, kind)
            cheaper = best.get(then)
            if cheaper is None or weight + more < cheaper:
                best[then] = weight + more
                taken[then] = (code, state)
    return best, taken


def _without_order(cheapest: Mapping[_State, int], steps: list[dict[_State, tuple[int, _State]]]) -> dict[_State, int]:
    """Return the states at the begin of a new group: the order within the group before says nothing of it."""
    states: dict[_State, int] = {}
    links: dict[_State, tuple[int, _State]] = {}
    for state, weight in cheapest.items():
        fresh = (state[0], 0)
        if fresh not in states or weight < states[fresh]:
            states[fresh] = weight
            if steps:
                links[fresh] = steps[-1][state]
    if steps:
        steps[-1].update(links)
    return states


def _reach(groups: Sequence[Group], turns: Sequence[int], codes: Codes) -> list[int]:
    """Return for each layer, field by field, the most that it and all later ones can take."""
    most = [codes.field_wise_max(list(group.weights)) for group in groups]
    reach = [0]
    for number in reversed(turns):
        reach.append(codes.capped_sum(reach[-1], most[number]))
    return reach[::-1]


def _parts_taken(
    groups: Sequence[Group], turns: Sequence[int], steps: Sequence[Mapping[_State, tuple[int, _State]]], end: _State
) -> list[list[int]]:
    """Return the parts that the GPUs of each group took, read back from the end: ``steps`` say how each state was reached."""
    parts: list[list[int]] = [[] for _ in groups]
    state = end
    for group, taken in zip(reversed(turns), reversed(steps), strict=True):
        part, state = taken[state]
        if part:
            parts[group].append(part)
    return parts
