"""Which GPU takes which part of a wish: exact, by dynamic programming over the GPUs. Pure.

A part of a wish is a code: one integer with a field per kind of instance, and one for the size of the part, each
under a guard bit, so that subtracting and seeing whether it went below zero is one operation for all fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Codes:
    """The codes of a wish: what one instance of each kind adds, the whole wish, and the guard bits."""

    one: tuple[int, ...]
    whole: int
    guard: int
    # (shift, bits) of each field, the size last.
    fields: tuple[tuple[int, int], ...]

    def field_wise_max(self, codes: Sequence[int]) -> int:
        """Return the code that has in each field the largest of these codes."""
        found = 0
        for shift, bits in self.fields:
            found |= max((code >> shift & ((1 << bits) - 1) for code in codes), default=0) << shift
        return found

    def capped_sum(self, first: int, second: int) -> int:
        """Return the sum field by field, each at most what the whole wish has."""
        found = 0
        for shift, bits in self.fields:
            mask = (1 << bits) - 1
            total = (first >> shift & mask) + (second >> shift & mask)
            found |= min(total, self.whole >> shift & mask) << shift
        return found


def codes_for(counts: Sequence[int], sizes: Sequence[int]) -> Codes:
    """Return the codes of a wish with so many of each kind; any sizes do, true ones make the search short."""
    total = sum(count * size for count, size in zip(counts, sizes, strict=True))
    fields: list[tuple[int, int]] = []
    shift = guard = whole = 0
    for count in (*counts, total):
        bits = count.bit_length()
        fields.append((shift, bits))
        whole |= count << shift
        guard |= 1 << shift + bits
        shift += bits + 1
    one = tuple((1 << fields[n][0]) + (size << fields[-1][0]) for n, size in enumerate(sizes))
    return Codes(one, whole, guard, tuple(fields))


@dataclass(frozen=True)
class Group:
    """GPUs that are the same for the search: how many, and what each part of the wish costs on one of them."""

    count: int
    weights: Mapping[int, int]


def assign(groups: Sequence[Group], codes: Codes, instances: int) -> list[list[int]] | None:
    """Return for each group the parts that its GPUs take (at most one each), at the least total; None: no way.

    ``instances`` is how many instances the wish has: no more GPUs of a group than that are needed. A group's
    ``weights`` are differences to leaving a GPU as it is, and hold the empty part (0) with weight 0.
    """
    order = [number for number, group in enumerate(groups) for _ in range(min(group.count, instances))]
    reach = _reach(groups, order, codes)
    guard = codes.guard
    if ((reach[0] | guard) - codes.whole) & guard != guard:
        return None
    cheapest = {codes.whole: 0}
    steps: list[dict[int, int]] = []
    for layer, number in enumerate(order):
        later = reach[layer + 1] | guard
        parts = tuple(groups[number].weights.items())
        best: dict[int, int] = {}
        taken: dict[int, int] = {}
        for left, weight in cheapest.items():
            guarded = left | guard
            for code, more in parts:
                rest = guarded - code
                if rest & guard != guard:
                    continue
                rest ^= guard
                known = best.get(rest)
                if (known is None or weight + more < known) and (later - rest) & guard == guard:
                    best[rest] = weight + more
                    taken[rest] = code
        cheapest = best
        steps.append(taken)
    return _walk_back(groups, order, steps) if 0 in cheapest else None


def _reach(groups: Sequence[Group], order: Sequence[int], codes: Codes) -> list[int]:
    """Return for each layer, field by field, the most that it and all later ones can take."""
    most = [codes.field_wise_max(list(group.weights)) for group in groups]
    reach = [0]
    for number in reversed(order):
        reach.append(codes.capped_sum(reach[-1], most[number]))
    return reach[::-1]


def _walk_back(groups: Sequence[Group], order: Sequence[int], steps: Sequence[dict[int, int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in groups]
    left = 0
    for number, taken in zip(reversed(order), reversed(steps), strict=True):
        code = taken[left]
        left += code
        if code:
            found[number].append(code)
    return found
