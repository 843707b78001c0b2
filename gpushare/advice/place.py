"""Which jobs of a case go to which GPU of the host, and in which way there. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpushare.advice.case import Case, Role, Workload
from gpushare.advice.rules import WayVerdict, verdicts, winner
from gpushare.advice.situation import Situation
from gpushare.advice.ways import CONCURRENT
from gpushare.base.model import Way
from gpushare.base.values import dataclass

if TYPE_CHECKING:
    from gpushare.advice.facts import GpuFacts


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a case on one GPU, or on several that are alike; ``best`` is None if nothing fits there."""

    situation: Situation
    best: WayVerdict | None

    @property
    def way(self) -> Way | None:
        return None if self.best is None else self.best.way

    @property
    def at_once(self) -> bool:
        """Return whether all of its processes run at the same time."""
        alone = (self.situation.case.processes or 2) == 1 and self.way is not None
        shared = self.way in {*CONCURRENT, Way.MEASURE} and self.situation.wave_size(self.way) is None
        return alone or shared

    @property
    def is_opportunistic(self) -> bool:
        """Return whether all of its processes are opportunistic."""
        return all(work.role is Role.OPPORTUNISTIC for work in self.situation.case.workloads)


def first_gpu(situation: Situation, gpus: Sequence[GpuFacts]) -> GpuFacts:
    """Return the GPU that a case is judged on first: one that has an answer, at once, and is idle, uncut and without MPS."""

    def rank(gpu: GpuFacts) -> tuple[object, ...]:
        """Return the sort key of a GPU, the best first; of equal ones, the one whose answer has the best score."""
        part = _judge_part(replace(situation, gpu=gpu))
        cut = gpu.layout is not None and bool(gpu.layout.instances)
        in_use = (cut or bool(gpu.processes), bool(gpu.mig_enabled), gpu.mps_daemons > 0)
        # The whole of a GPU that others use is free later.
        waits = part.way is Way.WHOLE and part.situation.among_others
        return part.best is None, waits, in_use, 0 if part.best is None else -part.best.score

    # Of those that are alike and alike in use, only the first is judged: to judge one takes long.
    unlike: dict[object, GpuFacts] = {}
    for gpu in gpus:
        unlike.setdefault((gpu.processes, gpu.memory_used_bytes, *_kind_key(gpu)), gpu)
    return gpus[0] if len(unlike) == 1 else min(unlike.values(), key=rank)


def place(situation: Situation, *, apart: bool = True) -> tuple[Part, ...]:
    """Return the parts of a case, the largest first: one if the case is for one GPU.

    A process has a GPU of its own as long as there are idle ones, unless the situation is to ``consolidate``. If there
    are more processes than GPUs, they are spread evenly over those GPUs on which most of what was asked is kept.
    Without ``apart`` it is not tried to keep some workloads on other GPUs than the others, which takes seconds.
    """
    return situation.once(
        ("place", situation.case, situation.gpu.index, apart), lambda: _find_placement(situation, apart=apart)
    )


def _find_placement(situation: Situation, *, apart: bool) -> tuple[Part, ...]:
    """Return the best placement: on GPUs like the first one, else on any that have room."""
    if len(situation.case.workloads) > 1:
        # Of a list, each is one process unless said otherwise, also where it is placed without the others.
        works = tuple(replace(work, processes=work.processes or 1) for work in situation.case.workloads)
        situation = situation.variant(case=replace(situation.case, workloads=works))
    # GPUs with MIG are left to others as long as all find room on those without, and the other way round.
    same_mode = [gpu for gpu in situation.gpus_to_have if bool(gpu.mig_enabled) is bool(situation.gpu.mig_enabled)]
    on_same_mode = _placed_on(situation, same_mode, apart=apart)
    if len(same_mode) == len(situation.gpus_to_have) or all(part.at_once for part in on_same_mode):
        return on_same_mode
    on_all = _placed_on(situation, situation.gpus_to_have, apart=apart)
    # Only for an answer for all, or for all at once: not to use more GPUs.
    return max(on_same_mode, on_all, key=lambda parts: _rank_of(parts, situation)[:2])


def _placed_on(situation: Situation, idle: Sequence[GpuFacts], *, apart: bool) -> tuple[Part, ...]:
    """Return the parts of a case on GPUs that have room now; ``apart`` is as for `place`."""
    case = situation.case
    if situation.gpus_each > 1 and situation.gpu.instance is None and not case.any("running"):
        return _of_several_gpus(situation, idle)
    on_one_gpu = _judge_part(situation)
    count = case.processes
    # Nothing to spread: one idle GPU, one process or an unknown number, or an answer that more GPUs do not change.
    if (
        len(idle) < _SEVERAL
        or count is None
        or count < _SEVERAL
        or case.any("running")
        or on_one_gpu.way is Way.STREAMS
        # What does not fit on one GPU may fit on several.
        or (on_one_gpu.way is Way.FIX and not on_one_gpu.situation.short_of_memory)
    ):
        return (on_one_gpu,)
    # One job of several processes: a GPU of one kind for each.
    if situation.together and (case.any("nccl") or case.any("p2p") or count <= len(idle)):
        kind = max(_kinds(idle), key=lambda gpus: (min(len(gpus), count), gpus[0] is situation.gpu))
        return (_judge_part(situation.on(kind[0], case, more=kind[1:count])),)
    # Else the best of all sets of GPUs and ways to load them.
    choices = [
        parts
        for gpus in _gpu_sets(idle, situation)
        for sizes in _load_measures(gpus)
        if (parts := _split_over(situation, gpus, sizes))
    ]
    spread = max(choices, key=lambda parts: _rank_of(parts, situation), default=(on_one_gpu,))
    if not apart or len(case.workloads) == 1 or situation.consolidate or all(part.situation.own_gpu for part in spread):
        return spread
    return max([spread, *_placements_apart(situation, idle)], key=lambda parts: _rank_of(parts, situation))


_SEVERAL: Final = 2
# Up to so many workloads, each way of putting some of them on GPUs of their own is judged.
_MOST_APART: Final = 5


def _placements_apart(situation: Situation, idle: Sequence[GpuFacts]) -> Iterator[tuple[Part, ...]]:
    """Yield the placements that keep some workloads apart: a need of one then rules out a way only on its own GPUs."""
    alike: dict[object, list[Workload]] = {}
    for work in situation.case.workloads:
        # In a long list, workloads that differ only in name and number stay together.
        key = work if len(situation.case.workloads) <= _MOST_APART else replace(work, name=None, processes=None)
        alike.setdefault(key, []).append(work)
    if len(alike) > _MOST_APART:
        return
    for blocks in _partitions([tuple(works) for works in alike.values()], len(idle)):
        cases = [replace(situation.case, workloads=tuple(itertools.chain(*block))) for block in blocks]
        cases.sort(key=lambda case: (-max(work.memory or 0 for work in case.workloads), -(case.processes or 1)))
        # Not apart again: the partitions of a block are among those of this loop.
        parts = [
            _on_own_gpus(situation, case, gpus, apart=False)
            for case, gpus in zip(cases, _gpus_for_cases(cases, idle), strict=True)
        ]
        yield tuple(sorted(itertools.chain(*parts), key=lambda part: -(part.situation.case.processes or 0)))


def _gpus_for_cases(cases: Sequence[Case], idle: Sequence[GpuFacts]) -> list[list[GpuFacts]]:
    """Return GPUs for each case: a large one first, then what remains to those with the most processes per GPU."""
    gpus = sorted(idle, key=lambda gpu: -(gpu.memory_total_bytes or 0))
    gpus_of_case = [[gpu] for gpu in gpus[: len(cases)]]
    for gpu in gpus[len(cases) :]:
        fullest = max(range(len(cases)), key=lambda number: (cases[number].processes or 1) / len(gpus_of_case[number]))
        gpus_of_case[fullest].append(gpu)
    return gpus_of_case


def _on_own_gpus(situation: Situation, case: Case, gpus: Sequence[GpuFacts], *, apart: bool = True) -> tuple[Part, ...]:
    """Return the parts of a case that has these GPUs for itself; ``apart`` is as for `place`."""
    within = replace(situation, case=case, among=tuple(gpu.index for gpu in gpus))
    first = first_gpu(within, gpus)
    if case.processes == within.gpus_each == 1:
        (work,) = case.workloads
        # It shares with nobody: not with other users either.
        alone = replace(case, workloads=(replace(work, same_user=True),))
        return (_judge_part(situation.on(first, alone, own_gpu=True)),)
    return place(replace(within, gpu=first), apart=apart)


def _partitions(items: Sequence[tuple[Workload, ...]], most: int) -> Iterator[list[list[tuple[Workload, ...]]]]:
    """Yield the partitions of some items into two blocks or more, at most ``most``."""

    def grown(number: int, blocks: list[list[tuple[Workload, ...]]]) -> Iterator[list[list[tuple[Workload, ...]]]]:
        """Yield the partitions that begin with these blocks, after each item from ``number`` on was put into one."""
        if number == len(items):
            if len(blocks) >= _SEVERAL:
                yield blocks
            return
        for chosen in range(len(blocks)):
            larger_block = [*blocks[chosen], items[number]]
            yield from grown(number + 1, [*blocks[:chosen], larger_block, *blocks[chosen + 1 :]])
        if len(blocks) < most:
            yield from grown(number + 1, [*blocks, [items[number]]])

    return grown(0, [])


def _of_several_gpus(situation: Situation, idle: Sequence[GpuFacts]) -> tuple[Part, ...]:
    """Return the parts of a case whose jobs have several GPUs each: the one with the most first, the others on the rest.

    Where there are too few for each workload, all of them share what there is; where too few are idle, they wait.
    """
    case = situation.case
    first = max(case.workloads, key=lambda work: work.gpus or 1)
    rest = tuple(work for work in case.workloads if work is not first)
    if not rest:
        return (_shared_by_all(situation, idle),)
    gpus_each = first.gpus or 1
    choices = []
    situation_of_first = situation.on(situation.gpu, replace(case, workloads=(first,)))
    # All GPUs come last, for a host with too few of each kind.
    for gpus in [*_kinds(idle), idle]:
        for sets in range(1, min(first.processes or 1, len(gpus) // gpus_each) + 1):
            gpus_of_first = gpus[: sets * gpus_each]
            remaining = [gpu for gpu in idle if gpu not in gpus_of_first]
            if remaining:
                part = _shared_by_all(situation_of_first, gpus_of_first, beside=True)
                choices.append((part, *_on_own_gpus(situation, replace(case, workloads=rest), remaining)))
    return max(choices, key=lambda parts: _rank_of(parts, situation), default=(_shared_by_all(situation, idle),))


def _shared_by_all(situation: Situation, idle: Sequence[GpuFacts], *, beside: bool = False) -> Part:
    """Return the part of jobs that have several GPUs each, on sets of GPUs of one kind.

    ``beside``: other workloads have GPUs next to them. Jobs for which there is no set wait for one.
    """
    case = situation.case
    gpus_each = situation.gpus_each
    idle_alike = _alike_for_a_set(situation, idle)
    jobs = case.processes or 1
    sets = max(1, min(jobs, len(idle_alike) // gpus_each))
    if len(idle_alike) >= gpus_each:
        gpus = idle_alike[: sets * gpus_each]
    else:
        # Those in use count too if there are too few others.
        gpus = max(_kinds([situation.gpu, *situation.other_gpus]), key=len)
    works_of_a_set = tuple(replace(work, processes=-(-(work.processes or 1) // sets)) for work in case.workloads)
    if sets >= jobs:
        # Each job is alone on its set: it shares with nobody.
        works_of_a_set = tuple(replace(work, same_user=True) for work in works_of_a_set)
    return _judge_part(
        situation.on(
            gpus[0],
            replace(case, workloads=works_of_a_set),
            more=gpus[1:],
            whole=case if jobs > 1 else None,
            own_gpu=sets >= jobs and (jobs > 1 or beside),
        )
    )


def _alike_for_a_set(situation: Situation, idle: Sequence[GpuFacts]) -> Sequence[GpuFacts]:
    """Return the largest kind of idle GPUs; if it has too few for a job, all that hold one, if these are enough.

    Of several kinds, the one with the least memory is first: all is judged on the first GPU.
    """
    kind: Sequence[GpuFacts] = max(_kinds(idle), key=len, default=[])
    if len(kind) >= situation.gpus_each:
        return kind
    largest = max(work.memory or 0 for work in situation.case.workloads)
    large_enough = [gpu for gpu in idle if (gpu.memory_total_bytes or largest) >= largest]
    if len(large_enough) < situation.gpus_each:
        return kind
    return sorted(large_enough, key=lambda gpu: gpu.memory_total_bytes or 0)


def _judge_part(situation: Situation) -> Part:
    """Return a case on its GPUs with the verdict that wins there."""
    return Part(situation=situation, best=winner(verdicts(situation)))


def _kinds(gpus: Sequence[GpuFacts]) -> list[list[GpuFacts]]:
    """Return the GPUs in groups that are alike in what matters to the rules: model, memory, MIG and compute mode."""
    kinds: dict[object, list[GpuFacts]] = {}
    for gpu in gpus:
        kinds.setdefault(_kind_key(gpu), []).append(gpu)
    return list(kinds.values())


def _kind_key(gpu: GpuFacts) -> tuple[object, ...]:
    """Return what makes GPUs alike to the rules."""
    instances = () if gpu.layout is None or not gpu.mig_enabled else gpu.layout.instances
    return gpu.name, gpu.memory_total_bytes, gpu.mig_enabled, gpu.compute_mode, gpu.mps_daemons > 0, instances


def _gpu_sets(idle: Sequence[GpuFacts], situation: Situation) -> Iterator[Sequence[GpuFacts]]:
    """Yield the sets of GPUs to judge: all, those of one kind, and if need be fewer."""
    kinds = _kinds(idle)
    yield idle
    for kind in kinds:
        if len(kinds) > 1:
            yield kind
        # Else one GPU alone is tried too: there, all may keep more of what they asked for.
        counts = range(1, len(kind)) if situation.consolidate else (1,)
        yield from (kind[:count] for count in counts)


def _rank_of(parts: Sequence[Part], situation: Situation) -> tuple[object, ...]:
    """Return how good a placement is: all have an answer, all run at once, on more GPUs (if to ``consolidate``, on fewer).

    Next to production on GPUs of its own, opportunistic jobs may wait for each other.
    """
    has_production = any(work.role is Role.PRODUCTION for work in situation.case.workloads)
    used = sum(len(part.situation.spread) for part in parts)
    scores = [part.best.score for part in parts if part.best is not None]
    return (
        all(part.best is not None for part in parts),
        all(part.at_once or (has_production and part.is_opportunistic) for part in parts),
        -used if situation.consolidate else used,
        min(scores, default=0),
    )


def _load_measures(gpus: Sequence[GpuFacts]) -> list[list[int]]:
    """Return what unequal GPUs may be loaded by, as a number per GPU: memory, the same for each, the number of instances."""
    by_memory = [gpu.memory_total_bytes or 1 for gpu in gpus]
    if len(set(by_memory)) == 1:
        return [by_memory]
    return [by_memory, [1] * len(gpus), [gpu.largest_instance_count or 1 for gpu in gpus]]


def _split_over(situation: Situation, gpus: Sequence[GpuFacts], sizes: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts of a case on these GPUs, alike ones joined; GPUs for which nothing is left have none."""
    placed_cases = [
        (gpu, case) for gpu, case in zip(gpus, _split(situation.case, gpus, sizes), strict=True) if case is not None
    ]
    whole = situation.case if len(placed_cases) > 1 else None
    parts: list[Part] = []
    for kind in _kinds([gpu for gpu, _ in placed_cases]):
        groups: dict[object, list[tuple[GpuFacts, Case]]] = {}
        for gpu, case in placed_cases:
            if gpu in kind:
                # Alike are equal jobs on equal GPUs; an uneven rest is judged as the largest part.
                works = case.workloads
                key = replace(works[0], processes=None, groups=None, shares=None) if len(works) == 1 else gpu.index
                groups.setdefault(key, []).append((gpu, case))
        parts += [_group_part(situation, group, whole=whole) for group in groups.values()]
    return tuple(sorted(parts, key=lambda part: -(part.situation.case.processes or 0)))


def _group_part(situation: Situation, group: Sequence[tuple[GpuFacts, Case]], *, whole: Case | None) -> Part:
    """Return one part for GPUs that have equal jobs, judged on the one with the most.

    ``whole`` is the case that was spread over the GPUs; None: each of them has a case of its own.
    """
    first, *others = sorted(group, key=lambda share: -(share[1].processes or 0))
    total = sum(case.processes or 0 for _, case in group)
    joined = whole is not None and len(first[1].workloads) == 1
    return _judge_part(
        situation.on(
            first[0],
            first[1],
            more=[gpu for gpu, _ in others],
            whole=_with_processes(first[1], total) if joined else None,
            own_gpu=whole is not None and first[1].processes == 1,
        )
    )


def _with_processes(case: Case, processes: int) -> Case:
    (work,) = case.workloads
    return replace(case, workloads=(replace(work, processes=processes),))


def _split(case: Case, gpus: Sequence[GpuFacts], sizes: Sequence[int]) -> list[Case | None]:
    """Split a case over GPUs by their sizes (see `_load_measures`); None for a GPU that gets no part."""
    if len(case.workloads) > 1:
        return _split_list(case, gpus, sizes)
    (work,) = case.workloads
    portions = (_portion(work, count) for count in _units_per_gpu(work.groups or work.processes or 1, sizes))
    return [None if portion is None else replace(case, workloads=(portion,)) for portion in portions]


def _portion(work: Workload, units: int) -> Workload | None:
    """Return the part of a workload that has so many of its groups, or processes if it has none; None if that is nothing."""
    if not units:
        return None
    processes = -(-(work.processes or 1) * units // (work.groups or work.processes or 1))
    # Shares of all processes say nothing of a part of them.
    has_all = work.shares is not None and units == len(work.shares)
    portion = replace(
        work,
        processes=processes,
        groups=units if work.groups else None,
        shares=work.shares if has_all else None,
    )
    if processes == 1 and (work.processes or 1) > 1:
        # A process alone on its GPU does not share it with other users either.
        return replace(portion, same_user=True)
    return portion


def _split_list(case: Case, gpus: Sequence[GpuFacts], sizes: Sequence[int]) -> list[Case | None]:
    """Split a list of workloads over GPUs: each process to the least loaded GPU that holds it, the largest first.

    Production has GPUs of its own if there are enough.
    """
    works_on: list[list[Workload]] = [[] for _ in gpus]
    processes = [replace(work, processes=1) for work in case.workloads for _ in range(work.processes or 1)]
    processes.sort(key=lambda work: (work.role is not Role.PRODUCTION, -(work.memory or 1)))
    production = sum(work.role is Role.PRODUCTION for work in processes)
    memory = [gpu.memory_total_bytes or 1 for gpu in gpus]

    def load(number: int) -> tuple[float, int, int]:
        # Of empty GPUs the smallest is first: the larger ones may be needed for other workloads.
        used = sum(work.memory or 1 for work in works_on[number])
        return used / sizes[number], len(works_on[number]), memory[number]

    for work in processes:
        allowed = list(range(len(gpus)))
        if work.role is not Role.PRODUCTION and 0 < production < len(gpus):
            allowed = [
                number for number in allowed if not any(other.role is Role.PRODUCTION for other in works_on[number])
            ]
        large_enough = [number for number in allowed if memory[number] >= (work.memory or 1)]
        works_on[min(large_enough or allowed, key=load)].append(work)
    return [replace(case, workloads=_merged(works)) if works else None for works in works_on]


def _merged(works: Sequence[Workload]) -> tuple[Workload, ...]:
    """Return the workloads of one GPU, each of one process, with equal ones as one that has the number of its processes."""
    if len(works) == 1:
        # A process alone on its GPU does not share it with other users either.
        return (replace(works[0], same_user=True),)
    kinds = dict.fromkeys(works)
    return tuple(replace(work, processes=works.count(work)) for work in kinds)


def _units_per_gpu(units: int, sizes: Sequence[int]) -> list[int]:
    """Return how many of N units each GPU gets: one each first, then by size."""
    counts = [0] * len(sizes)
    for _ in range(units):
        number = min(range(len(sizes)), key=lambda n: (counts[n] > 0, (counts[n] + 1) / sizes[n], n))
        counts[number] += 1
    return counts
