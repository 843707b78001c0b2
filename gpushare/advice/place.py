"""Which jobs of a case go to which GPU of the host, and in which way there. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.advice.case import Case, Role, Workload, percentages
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
        if self.way is None or self.situation.case.processes == 1:
            return self.way is not None
        return self.way in {*CONCURRENT, Way.MEASURE} and self.situation.at_a_time(self.way) is None


def first_gpu(situation: Situation, gpus: Sequence[GpuFacts]) -> GpuFacts:
    """Return the GPU that a case is judged on first: one with an answer that need not wait, if possible idle."""

    def rank(gpu: GpuFacts) -> tuple[object, ...]:
        """Return the sort key of a GPU, the best first; of equal ones, the one whose answer has the best score."""
        part = _judge_part(replace(situation, gpu=gpu))
        # The whole of a GPU that others use is free later.
        waits = part.way is Way.WHOLE and part.situation.among_others
        has_instances = gpu.layout is not None and bool(gpu.layout.instances)
        in_use = (has_instances or bool(gpu.processes), bool(gpu.mig_enabled), gpu.mps_daemons > 0)
        return part.best is None, waits, in_use, 0 if part.best is None else -part.best.score

    # Judging takes long: of GPUs that are alike, also in their use, only the first is judged.
    unlike: dict[object, GpuFacts] = {}
    for gpu in gpus:
        unlike.setdefault((gpu.processes, gpu.memory_used_bytes, *_kind_key(gpu)), gpu)
    return gpus[0] if len(unlike) == 1 else min(unlike.values(), key=rank)


def place(situation: Situation, *, separate: bool = True) -> tuple[Part, ...]:
    """Return the parts of a case, the largest first: one if the case is for one GPU.

    A process has a GPU of its own as long as there are idle ones, unless the situation is to ``consolidate``. If there
    are more processes than GPUs, they are spread evenly over those GPUs on which most of what was asked is kept.
    ``separate``: placements in which some workloads have GPUs of their own are judged too, which takes seconds.
    """
    key = ("place", situation.case, situation.gpu.index, separate)
    return situation.once(key, lambda: _find_placement(situation, separate=separate))


def _find_placement(situation: Situation, *, separate: bool) -> tuple[Part, ...]:
    """Return the best placement: on GPUs like the first one, else on any that have room."""
    if len(situation.case.workloads) > 1:
        # Of a list, each is one process unless said otherwise, also where it is placed without the others.
        works = tuple(replace(work, processes=work.processes or 1) for work in situation.case.workloads)
        situation = situation.variant(case=replace(situation.case, workloads=works))
    # GPUs with MIG are left to others as long as all find room on those without, and the other way round.
    same_mode = [gpu for gpu in situation.gpus_with_room if bool(gpu.mig_enabled) is bool(situation.gpu.mig_enabled)]
    on_same_mode = _place_on(situation, same_mode, separate=separate)
    if len(same_mode) == len(situation.gpus_with_room) or all(part.at_once for part in on_same_mode):
        return on_same_mode
    on_all = _place_on(situation, situation.gpus_with_room, separate=separate)
    # The number of GPUs and the score, which come later in the rank, are no reason to use GPUs of both modes.
    return max(on_same_mode, on_all, key=lambda parts: _rank_of(parts, situation)[:2])


def _place_on(situation: Situation, idle: Sequence[GpuFacts], *, separate: bool) -> tuple[Part, ...]:
    """Return the parts of a case on GPUs that have room now; ``separate`` is as for `place`."""
    case = situation.case
    if situation.gpus_each > 1 and situation.gpu.instance is None and not case.any("running"):
        return _place_jobs_with_several_gpus(situation, idle)
    on_one_gpu = _judge_part(situation)
    if _is_for_one_gpu(on_one_gpu, idle):
        return (on_one_gpu,)
    count = case.processes or 1
    # One job of several processes: a GPU for each, of the kind of which there are most.
    if situation.together and (case.any("nccl") or case.any("p2p") or count <= len(idle)):
        kind = max(_kinds(idle), key=lambda gpus: (min(len(gpus), count), gpus[0] is situation.gpu))
        return (_judge_part(situation.on(kind[0], case, more=kind[1:count])),)
    choices = [
        _split_over(situation, gpus, capacities)
        for gpus in _gpus_to_try(idle, situation)
        for capacities in _capacities(gpus)
    ]
    spread = max(choices, key=lambda parts: _rank_of(parts, situation))
    all_have_own = all(part.situation.own_gpu for part in spread)
    if not separate or len(case.workloads) == 1 or situation.consolidate or all_have_own:
        return spread
    return max([spread, *_placements_on_separate_gpus(situation, idle)], key=lambda parts: _rank_of(parts, situation))


_SEVERAL: Final = 2


def _is_for_one_gpu(part: Part, idle: Sequence[GpuFacts]) -> bool:
    """Return whether there is nothing to spread over idle GPUs, or more GPUs would not change the answer for one."""
    case = part.situation.case
    if len(idle) < _SEVERAL or (case.processes or 1) < _SEVERAL or case.any("running"):
        return True
    # What does not fit on one GPU may fit on several.
    return part.way is Way.STREAMS or (part.way is Way.FIX and not part.situation.short_of_memory)


# Up to this many workloads, each way of putting some of them on GPUs of their own is judged.
_MOST_SEPARATE: Final = 5


def _placements_on_separate_gpus(situation: Situation, idle: Sequence[GpuFacts]) -> Iterator[tuple[Part, ...]]:
    """Yield placements that give some workloads GPUs of their own, where their needs do not rule out ways for others."""
    inseparable: dict[object, list[Workload]] = {}
    for work in situation.case.workloads:
        # In a long list, workloads that differ only in name and number stay together.
        key = work if len(situation.case.workloads) <= _MOST_SEPARATE else replace(work, name=None, processes=None)
        inseparable.setdefault(key, []).append(work)
    if len(inseparable) > _MOST_SEPARATE:
        return
    for blocks in _partitions(list(inseparable.values()), len(idle)):
        cases = [replace(situation.case, workloads=tuple(itertools.chain(*block))) for block in blocks]
        cases.sort(key=lambda case: (-max(work.memory or 0 for work in case.workloads), -(case.processes or 1)))
        # A block is not taken apart again: what that gives is another partition of this loop.
        parts = [
            _place_on_own_gpus(situation, case, gpus, separate=False)
            for case, gpus in zip(cases, _gpus_for_cases(cases, idle), strict=True)
        ]
        yield tuple(sorted(itertools.chain(*parts), key=lambda part: -(part.situation.case.processes or 0)))


def _partitions(items: Sequence[list[Workload]], most: int) -> Iterator[list[list[list[Workload]]]]:
    """Yield the partitions of some items into two blocks or more, at most ``most``."""
    for block_of_item in itertools.product(range(min(most, len(items))), repeat=len(items)):
        blocks = list(dict.fromkeys(block_of_item))
        # Blocks are numbered by their first items: any other numbering is a partition that was there already.
        if len(blocks) >= _SEVERAL and blocks == sorted(blocks) and blocks[-1] == len(blocks) - 1:
            yield [[item for item, of in zip(items, block_of_item, strict=True) if of == block] for block in blocks]


def _gpus_for_cases(cases: Sequence[Case], idle: Sequence[GpuFacts]) -> list[list[GpuFacts]]:
    """Return GPUs for each case: a large one first, then what remains to those with the most processes per GPU."""
    gpus = sorted(idle, key=lambda gpu: -(gpu.memory_total_bytes or 0))
    gpus_of_case = [[gpu] for gpu in gpus[: len(cases)]]
    for gpu in gpus[len(cases) :]:
        fullest = max(range(len(cases)), key=lambda number: (cases[number].processes or 1) / len(gpus_of_case[number]))
        gpus_of_case[fullest].append(gpu)
    return gpus_of_case


def _place_on_own_gpus(
    situation: Situation, case: Case, gpus: Sequence[GpuFacts], *, separate: bool = True
) -> tuple[Part, ...]:
    """Return the parts of a case that has these GPUs for itself; ``separate`` is as for `place`."""
    within = replace(situation, case=case, among=tuple(gpu.index for gpu in gpus))
    first = first_gpu(within, gpus)
    if case.processes == within.gpus_each == 1:
        (work,) = case.workloads
        # It shares with nobody: not with other users either.
        alone = replace(case, workloads=(replace(work, same_user=True),))
        return (_judge_part(situation.on(first, alone, own_gpu=True)),)
    return place(replace(within, gpu=first), separate=separate)


def _place_jobs_with_several_gpus(situation: Situation, idle: Sequence[GpuFacts]) -> tuple[Part, ...]:
    """Return the parts of a case with jobs that have several GPUs each.

    The workload with the most GPUs each has GPUs of its own, the others have the rest. If there are too few GPUs for
    that, all jobs share all of them.
    """
    case = situation.case
    first = max(case.workloads, key=lambda work: work.gpus or 1)
    rest = tuple(work for work in case.workloads if work is not first)
    if not rest:
        return (_part_on_gpu_sets(situation, idle),)
    gpus_each = first.gpus or 1
    choices = []
    situation_of_first = situation.on(situation.gpu, replace(case, workloads=(first,)))
    # All GPUs come last, for a host with too few of each kind.
    for gpus in [*_kinds(idle), idle]:
        for sets in range(1, min(first.processes or 1, len(gpus) // gpus_each) + 1):
            gpus_of_first = gpus[: sets * gpus_each]
            remaining = [gpu for gpu in idle if gpu not in gpus_of_first]
            if remaining:
                part = _part_on_gpu_sets(situation_of_first, gpus_of_first, beside=True)
                choices.append((part, *_place_on_own_gpus(situation, replace(case, workloads=rest), remaining)))
    return max(choices, key=lambda parts: _rank_of(parts, situation), default=(_part_on_gpu_sets(situation, idle),))


def _part_on_gpu_sets(situation: Situation, idle: Sequence[GpuFacts], *, beside: bool = False) -> Part:
    """Return the part of jobs that have several GPUs each, a set; jobs for which there is no set wait for one.

    ``beside``: other workloads have other GPUs, so that even a single job has its GPUs for itself.
    """
    case = situation.case
    gpus_each = situation.gpus_each
    idle_alike = _idle_for_sets(situation, idle)
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


def _idle_for_sets(situation: Situation, idle: Sequence[GpuFacts]) -> Sequence[GpuFacts]:
    """Return the idle GPUs for jobs that have several each: the largest kind, or all kinds if only these are enough.

    Of all kinds, the GPU with the least memory is first, because the part is judged on the first one.
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
    """Return the key that GPUs share if the rules cannot tell them apart."""
    instances = () if gpu.layout is None or not gpu.mig_enabled else gpu.layout.instances
    return gpu.name, gpu.memory_total_bytes, gpu.mig_enabled, gpu.compute_mode, gpu.mps_daemons > 0, instances


def _gpus_to_try(idle: Sequence[GpuFacts], situation: Situation) -> Iterator[Sequence[GpuFacts]]:
    """Yield the choices of GPUs to spread a case over: all, those of one kind, and fewer of a kind."""
    kinds = _kinds(idle)
    yield idle
    for kind in kinds:
        if len(kinds) > 1:
            yield kind
        # If all are on one GPU, more of what was asked for may be kept than if they are spread.
        counts = range(1, len(kind)) if situation.consolidate else (1,)
        yield from (kind[:count] for count in counts)


def _rank_of(parts: Sequence[Part], situation: Situation) -> tuple[object, ...]:
    """Return the sort key of a placement, the best is largest: all have an answer, all run at once, it uses more GPUs.

    If to ``consolidate``, fewer GPUs are better. Next to production on GPUs of its own, opportunistic jobs may wait for each other.
    """
    has_production = Role.PRODUCTION in situation.case.roles
    used = sum(len(part.situation.used_gpus) for part in parts)
    scores = [part.best.score for part in parts if part.best is not None]

    def may_wait(part: Part) -> bool:
        return has_production and all(work.role is Role.OPPORTUNISTIC for work in part.situation.case.workloads)

    return (
        all(part.best is not None for part in parts),
        all(part.at_once or may_wait(part) for part in parts),
        -used if situation.consolidate else used,
        min(scores, default=0),
    )


def _capacities(gpus: Sequence[GpuFacts]) -> list[list[int]]:
    """Return the measures by which unequal GPUs are loaded, each a number per GPU: memory, 1, instances; unknown: 1."""
    by_memory = [gpu.memory_total_bytes or 1 for gpu in gpus]
    if len(set(by_memory)) == 1:
        return [by_memory]
    return [by_memory, [1] * len(gpus), [gpu.largest_instance_count or 1 for gpu in gpus]]


class _GpuCase(NamedTuple):
    """A GPU, and the part of a case that is to run on it."""

    gpu: GpuFacts
    case: Case


def _split_over(situation: Situation, gpus: Sequence[GpuFacts], capacities: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts of a case that is split over these GPUs; GPUs that are alike and have equal jobs are one part."""
    works_per_gpu = _split(situation.case.workloads, gpus, capacities)
    placed = [
        _GpuCase(gpu, replace(situation.case, workloads=works))
        for gpu, works in zip(gpus, works_per_gpu, strict=True)
        if works
    ]
    # The GPUs of the first kind come first.
    kinds = [_kind_key(gpu) for gpu in gpus]
    placed.sort(key=lambda gpu_case: kinds.index(_kind_key(gpu_case.gpu)))
    alike: dict[object, list[_GpuCase]] = {}
    for gpu_case in placed:
        works = gpu_case.case.workloads
        # Of one workload, a GPU may have fewer processes than the others.
        jobs = replace(works[0], processes=None, groups=None) if len(works) == 1 else gpu_case.gpu.index
        alike.setdefault((_kind_key(gpu_case.gpu), jobs), []).append(gpu_case)
    parts = [_joined_part(situation, group, is_spread=len(placed) > 1) for group in alike.values()]
    return tuple(sorted(parts, key=lambda part: -(part.situation.case.processes or 0)))


def _joined_part(situation: Situation, group: Sequence[_GpuCase], *, is_spread: bool) -> Part:
    """Return the part of the answer for GPUs that have equal jobs: the way of sharing for the one with the most processes.

    ``is_spread``: all jobs were split between several GPUs. Then the part also knows the jobs of all its GPUs together
    (``whole``), and whether each process has a GPU of its own.
    """
    first, *others = sorted(group, key=lambda gpu_case: -(gpu_case.case.processes or 0))
    whole = None
    if is_spread and len(first.case.workloads) == 1:
        work = replace(first.case.workloads[0], processes=sum(gpu_case.case.processes or 0 for gpu_case in group))
        whole = replace(first.case, workloads=(work,))
    more = [gpu_case.gpu for gpu_case in others]
    own_gpu = is_spread and first.case.processes == 1
    return _judge_part(situation.on(first.gpu, first.case, more=more, whole=whole, own_gpu=own_gpu))


def _split(
    works: tuple[Workload, ...], gpus: Sequence[GpuFacts], capacities: Sequence[int]
) -> list[tuple[Workload, ...]]:
    """Return the workloads of each GPU, which may be none, if all of them are split by the capacities of the GPUs."""
    if len(works) > 1:
        return _split_list(works, gpus, capacities)
    (work,) = works
    # Groups, or without them processes: one for each GPU first, then by capacity.
    counts = [0] * len(capacities)
    for _ in range(work.groups or work.processes or 1):
        emptiest = min(range(len(counts)), key=lambda n: (counts[n] > 0, (counts[n] + 1) / capacities[n], n))
        counts[emptiest] += 1
    ends = itertools.accumulate(counts)
    return [(_portion(work, end - count, end),) if count else () for count, end in zip(counts, ends, strict=True)]


def _portion(work: Workload, start: int, end: int) -> Workload:
    """Return the part of a workload with its groups from ``start`` up to ``end``, or without groups its processes."""
    processes, groups = work.processes or 1, work.groups or work.processes or 1
    units = end - start
    # The parts add up to all processes; the first group is one of the largest.
    processes = -(-processes * end // groups) + (-processes * start // groups)
    # Shares of all processes say nothing of a part of them.
    shares = work.shares if len(work.shares or ()) == units else None
    portion = replace(work, processes=processes, groups=units if work.groups else None, shares=shares)
    if processes == 1 and (work.processes or 1) > 1:
        # A process alone on its GPU does not share it with other users either.
        return replace(portion, same_user=True)
    return portion


def _split_list(
    works: Sequence[Workload], gpus: Sequence[GpuFacts], capacities: Sequence[int]
) -> list[tuple[Workload, ...]]:
    """Split a list of workloads over GPUs: each process to the least loaded GPU that holds it, the largest first.

    Production has GPUs of its own if there are enough.
    """
    processes: list[Workload] = []
    for work in works:
        for number in range(work.processes or 1):
            # Several shares are those of the processes, in order.
            shares = work.shares if work.shares is None or len(work.shares) == 1 else (work.shares[number],)
            processes.append(replace(work, processes=1, shares=shares))
    processes.sort(key=lambda work: (work.role is not Role.PRODUCTION, -(work.memory or 1)))
    production_count = sum(work.role is Role.PRODUCTION for work in processes)
    memory = [gpu.memory_total_bytes or 1 for gpu in gpus]
    works_on: list[list[Workload]] = [[] for _ in gpus]
    production_gpus: set[int] = set()

    def load(number: int) -> tuple[float, int, int]:
        """Return the sort key of a GPU, the least loaded first; of empty ones the smallest: others may need the large."""
        # Of unknown sizes each counts as 1 byte: then the number of processes decides.
        used = sum(work.memory or 1 for work in works_on[number])
        return used / capacities[number], len(works_on[number]), memory[number]

    for work in processes:
        allowed = list(range(len(gpus)))
        if work.role is not Role.PRODUCTION and production_count < len(gpus):
            allowed = [number for number in allowed if number not in production_gpus]
        large_enough = [number for number in allowed if memory[number] >= (work.memory or 1)]
        chosen = min(large_enough or allowed, key=load)
        works_on[chosen].append(work)
        if work.role is Role.PRODUCTION:
            production_gpus.add(chosen)
    return list(map(_merge_alike, works_on))


def _merge_alike(works: Sequence[Workload]) -> tuple[Workload, ...]:
    """Return the processes of one GPU as workloads: those that are alike but for their shares are one workload."""
    if not works:
        return ()
    if len(works) == 1:
        # A process alone on its GPU shares it with nobody: not with other users either.
        return (replace(works[0], same_user=True, shares=None),)
    alike: dict[Workload, list[Workload]] = {}
    for work in works:
        alike.setdefault(replace(work, shares=None), []).append(work)
    merged = []
    for work, processes in alike.items():
        # One share says nothing without those of the others.
        has_all = all(process.shares for process in processes)
        shares = [share for process in processes for share in process.shares or ()]
        merged.append(replace(work, processes=len(processes), shares=tuple(shares) if has_all else None))
    if len(merged) == 1 and merged[0].shares is not None:
        # All that are on the GPU: its parts.
        return (replace(merged[0], shares=percentages(merged[0].shares)),)
    return tuple(merged)
