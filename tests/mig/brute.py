"""The same question answered the slow way: sets of (profile, start), rules checked one pair at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import combinations

from gpushare.gpu_models import GpuModel
from gpushare.mig.profile import Profile

Place = tuple[str, int]
State = frozenset[Place]


class Brute:
    """One model: all its layouts, and the least cost of a change by trying everything."""

    def __init__(self, model: GpuModel) -> None:
        self.model = model
        self.profiles = {profile.name: profile for profile in model.profiles}
        self.places = [(p.name, start) for p in model.profiles for start in p.starts or ()]
        # The memory slices of each place.
        self.cells = {place: self._cells(place) for place in self.places}
        self.states = self._all_states()
        self.by_content: dict[tuple[str, ...], list[State]] = {}
        for state in self.states:
            self.by_content.setdefault(content(state), []).append(state)
        self.free = lru_cache(maxsize=None)(self._free)
        self.lost = lru_cache(maxsize=None)(self._lost)

    def _cells(self, place: Place) -> frozenset[int]:
        return frozenset(range(place[1], place[1] + (self.profiles[place[0]].size or 0)))

    def allowed(self, state: Iterable[Place]) -> bool:
        """Return whether the driver lets these exist together."""
        places = list(state)
        raws: list[Profile] = [self.profiles[name] for name, _ in places]
        taken = [self.cells[place] for place in places]
        if len(frozenset().union(*taken)) < sum(map(len, taken)):
            return False
        for name, number in Counter(name for name, _ in places).items():
            if number > self.profiles[name].instances:
                return False
        if sum("+me" in raw.name for raw in raws) > 1:
            return False
        whole = [raw for raw in raws if raw.name.endswith("+me.all")]
        if whole and any(raw is not whole[0] and not raw.name.endswith("-me") for raw in raws):
            return False
        return sum(raw.slices for raw in raws) <= (self.model.compute_slices or 0)

    def _all_states(self) -> list[State]:
        found: list[State] = []

        def grow(state: list[Place], first: int) -> None:
            found.append(frozenset(state))
            for number in range(first, len(self.places)):
                if self.allowed([*state, self.places[number]]):
                    grow([*state, self.places[number]], number + 1)

        grow([], 0)
        return found

    def _free(self, name: str, state: State) -> int:
        best = 0
        for start in self.profiles[name].starts or ():
            if (name, start) not in state and self.allowed([*state, (name, start)]):
                best = max(best, 1 + self.free(name, state | {(name, start)}))
        return best

    def _lost(self, state: State) -> int:
        empty: State = frozenset()
        return sum((p.size or 0) * (self.free(p.name, empty) - self.free(p.name, state)) for p in self.model.profiles)

    def change(
        self, have: dict[Place, str], wish: Sequence[str], *, exact: bool, add_only: bool = False
    ) -> tuple[int, ...] | None:
        """Return the least cost of a change; ``have`` says of each place ``busy``, ``named`` or ``idle``."""
        best = None
        for size in range(len(have) + 1):
            for gone in combinations(sorted(have), size):
                if any(have[place] == "busy" for place in gone) or (add_only and gone):
                    continue
                kept = frozenset(have) - set(gone)
                total = Counter(wish) if exact else Counter(wish) + Counter(name for name, _ in kept)
                for after in self.by_content.get(tuple(sorted(total.elements())), ()):
                    if kept <= after:
                        kinds = Counter(have[place] for place in gone)
                        sliced = sum(self.profiles[name].size or 0 for name, _ in gone)
                        made = 2 * len(after - kept)
                        cost = (0, kinds["named"], kinds["idle"], made, sliced, self.lost(after))
                        best = cost if best is None or cost < best else best
        return best


def content(state: Iterable[Place]) -> tuple[str, ...]:
    """Return the profiles of a layout, sorted."""
    return tuple(sorted(name for name, _ in state))


@cache
def brute_of(key: str) -> Brute:
    """Return the brute force of a model, made once."""
    from gpushare.gpu_models import load_models

    return Brute(load_models()[key])
