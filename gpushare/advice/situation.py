"""The situation that the rules judge: one case on one GPU. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from gpushare.advice.case import Isolation, Pattern, Role, any_of
from gpushare.advice.facts import HostFacts, mps_clients
from gpushare.advice.ways import ALL_MIG, LEAVING
from gpushare.base.model import ComputeMode, Way
from gpushare.base.units import MIB, format_bytes, format_duration
from gpushare.base.values import NOT_STORED
from gpushare.mig.planner import can_add
from gpushare.mig.profile import GpuInstance, Layout, Placement, Profile
from gpushare.mig.wish import Request, Wish
from gpushare.mps.limits import CONTEXT_BYTES as CLIENT_BYTES
from gpushare.mps.limits import VOLTA

if TYPE_CHECKING:
    from gpushare.advice.case import Case, Workload
    from gpushare.advice.facts import GpuFacts, RunningJob
    from gpushare.advice.table import Table


T = TypeVar("T")

CONTEXT_BYTES: Final = 500 * MIB
LEAST_CONTEXT_BYTES: Final = 286 * MIB
MPS_CONTEXT_BYTES: Final = 248 * MIB
MPS_SERVER_BYTES: Final = 66 * MIB
# The part of a pinned memory limit that a PyTorch program cannot use: under 8G it saw 7.40 GiB.
MPS_LIMIT_EXTRA_BYTES: Final = 614 * MIB
HEADROOM_PERCENT: Final = 2
# Limits are rounded to this, so that people can read them.
_STEP: Final = 256 * MIB
# MIG divides no GPU into more.
_MOST_INSTANCES: Final = 7
# Limits are worth up to a tenth of the clients that could run at once.
_LEAST_PART_LIMITED: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory budget of one GPU, with or without MPS. None means unknown."""

    total_bytes: int | None
    headroom_bytes: int | None
    # The memory of the MPS server.
    server_bytes: int
    context_bytes: int
    # The smallest reported size; the same where it was measured.
    least_context_bytes: int = field(metadata=NOT_STORED)
    processes: int | None = field(metadata=NOT_STORED)
    # What all processes need without their contexts; None: unknown.
    wanted_bytes: int | None
    # The largest process, with its context.
    largest_bytes: int | None = field(metadata=NOT_STORED)
    json_properties: ClassVar = ("needed_bytes", "left_bytes", "fits", "most")

    @property
    def usable_bytes(self) -> int | None:
        """Return the memory for processes and their contexts; None: unknown."""
        if self.total_bytes is None or self.headroom_bytes is None:
            return None
        return self.total_bytes - self.headroom_bytes - self.server_bytes

    @property
    def needed_bytes(self) -> int | None:
        """Return the memory of all processes with their contexts; None: unknown."""
        if self.wanted_bytes is None or self.processes is None:
            return None
        return self.wanted_bytes + self.processes * self.context_bytes

    @property
    def left_bytes(self) -> int | None:
        """Return the remaining memory; negative if too little."""
        usable, needed = self.usable_bytes, self.needed_bytes
        return None if usable is None or needed is None else usable - needed

    @property
    def fits(self) -> bool | None:
        """Return whether all fit at the same time with contexts of the usual size; None: unknown."""
        left = self.left_bytes
        return None if left is None else left >= 0

    @property
    def may_fit(self) -> bool | None:
        """Return whether all fit at the same time with the smallest reported contexts; None: unknown."""
        if self.wanted_bytes is None or self.processes is None or self.usable_bytes is None:
            return None
        return self.wanted_bytes + self.processes * self.least_context_bytes <= self.usable_bytes

    @property
    def one_fits(self) -> bool | None:
        """Return whether the largest process fits; None: unknown."""
        usable = self.usable_bytes
        return None if usable is None or self.largest_bytes is None else self.largest_bytes <= usable

    @property
    def most(self) -> int | None:
        """Return how many processes of the largest size fit at the same time."""
        usable = self.usable_bytes
        return None if usable is None or not self.largest_bytes else max(usable, 0) // self.largest_bytes

    def calculation(self, at_a_time: int | None = None) -> str | None:
        """Return the calculation as text; None if too little is known. ``at_a_time``: so many run, if not all do."""
        left, needed = self.left_bytes, self.needed_bytes
        if left is None or needed is None:
            return None
        contexts = f"{self.processes} x {format_bytes(self.context_bytes)} CUDA context"
        rest = f"{HEADROOM_PERCENT} % kept free"
        server = f", {format_bytes(self.server_bytes)} MPS server" if self.server_bytes else ""
        fit = f"{self.most} would fit" if at_a_time is None else f"{at_a_time} at a time"
        verdict = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much, {fit}"
        return (
            f"{format_bytes(self.wanted_bytes)} + {contexts} = {format_bytes(needed)} of "
            f"{format_bytes(self.total_bytes)} ({rest}{server}): {verdict}"
        )


def budget(case: Case, gpu: GpuFacts, *, mps: bool) -> Budget:
    """Return the memory budget of all processes of a case on one GPU, under MPS or outside it."""
    context = MPS_CONTEXT_BYTES if mps else CONTEXT_BYTES
    total = gpu.memory_total_bytes
    counts = case.counts
    sizes = [work.memory for work in case.workloads]
    pairs = zip(sizes, counts, strict=True)
    known_bytes = [size * count for size, count in pairs if size is not None and count is not None]
    wanted = sum(known_bytes) if known_bytes else None
    # With unknown sizes the sum is only a lower bound, which counts if it is already too large.
    if wanted is not None and len(known_bytes) < len(sizes) and (total is None or wanted <= total):
        wanted = None
    largest = max((size for size in sizes if size is not None), default=None)
    return Budget(
        total_bytes=total,
        headroom_bytes=None if total is None else -(-total * HEADROOM_PERCENT // 100),
        server_bytes=MPS_SERVER_BYTES if mps else 0,
        context_bytes=context,
        least_context_bytes=MPS_CONTEXT_BYTES if mps else LEAST_CONTEXT_BYTES,
        processes=case.processes,
        wanted_bytes=wanted,
        largest_bytes=None if largest is None else largest + context,
    )


def _is_under_mps(way: Way) -> bool:
    return Way.MPS in {way.outer, way.inner}


def whole_mib(size: int) -> int:
    """Return a size rounded up to whole MiB."""
    return -(-size // MIB) * MIB


def limit_for(memory: int) -> int:
    """Return the limit of an MPS client for a process of this size: with CUDA's own memory, rounded up."""
    return -(-(memory + MPS_LIMIT_EXTRA_BYTES) // _STEP) * _STEP


def equal_limit(usable: int, processes: int) -> int | None:
    """Return an equal part of the usable memory as a limit, rounded down; None if CUDA's own memory would fill it."""
    share = usable // processes // _STEP * _STEP
    return share if share > MPS_LIMIT_EXTRA_BYTES else None


@dataclass(frozen=True, kw_only=True)
class LeavingCost:
    """The cost of moving jobs off the GPU, for the largest of them, and the source of the figures.

    Times are rounded to a tenth of a second. ``turn_seconds`` is None if there are no turns.
    """

    memory_bytes: int
    out_seconds: float
    in_seconds: float
    turn_seconds: float | None
    # The speed of the jobs in turns, relative to their speed one after another; None: there are no turns.
    kept_share: float | None
    # The free host memory that the copies need.
    host_bytes: int
    # Whether the times are estimated from smaller jobs, because no job of this size was measured.
    estimated: bool
    source: str
    json_properties: ClassVar = ("switch_seconds", "sentence")

    @property
    def switch_seconds(self) -> float:
        """Return how long it takes until one job is out and the next is back."""
        return round(self.out_seconds + self.in_seconds, 1)

    @property
    def sentence(self) -> str:
        """Return the cost as text."""
        out = _about_text(self.out_seconds)
        back = _about_text(self.in_seconds)
        host = format_bytes(self.host_bytes)
        guess = ", estimated from smaller jobs" if self.estimated else ""
        if self.turn_seconds is None or self.kept_share is None:
            return (
                f"a job takes about {out} to leave and {back} to come back{guess}; {host} of host memory must be free"
            )
        return (
            f"a switch takes about {out} out and {back} back{guess}: with turns of "
            f"{_about_text(self.turn_seconds)}, the jobs run at {100 * self.kept_share:.0f} % of the speed that they "
            f"have one after another; {host} of host memory must be free"
        )


def _about_text(seconds: float) -> str:
    """Return an estimated time for people: ``4.2 s``, ``35 s``, ``3 min``."""
    if seconds < 9.5:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 119.5 else format_duration(round(seconds / 60) * 60)


@dataclass(frozen=True, order=True)
class Share:
    """What one instance must hold, with CUDA contexts; 0 means unknown. ``graphics`` needs a +gfx profile."""

    memory_bytes: int = 0
    sms: int = 0
    graphics: bool = False
    # Its part of the GPU where unequal parts are wanted; 0 means equal ones.
    percent: float = 0.0

    def __str__(self) -> str:
        parts = []
        if self.memory_bytes:
            parts.append(format_bytes(self.memory_bytes))
        if self.sms:
            parts.append(f"{self.sms} SMs")
        return " and ".join(parts) or "any size"


@dataclass(frozen=True, kw_only=True)
class NewInstances:
    """One profile per share, in order; or why there are none."""

    profiles: tuple[Profile, ...] = ()
    why_not: str | None = None

    @property
    def wish(self) -> Wish:
        """Return the profiles as `mig apply` takes them, in reverse order of their names: 7g before 1g."""
        counts = Counter(sorted((profile.name for profile in self.profiles), reverse=True))
        return tuple(Request(profile=name, count=count) for name, count in counts.items())


# A share of SMs that an instance nearly has may be enough: a 3g of an A100 has 42 SMs, and 44 are asked for.
_NEARLY: Final = 0.9


def instances_for(layout: Layout, shares: tuple[Share, ...], kept: tuple[GpuInstance, ...] = ()) -> NewInstances:
    """Return the largest instances that fit these shares next to those that are kept; if need be, with nearly the SMs asked for."""
    exact = _instances_with(layout, shares, kept)
    if exact.why_not is None or not any(share.sms for share in shares):
        return exact
    nearly = tuple(replace(share, sms=math.ceil(share.sms * _NEARLY)) for share in shares)
    with_nearly = _instances_with(layout, nearly, kept)
    return exact if with_nearly.why_not is not None else with_nearly


def _instances_with(layout: Layout, shares: tuple[Share, ...], kept: tuple[GpuInstance, ...]) -> NewInstances:
    """Return the largest instances that fit exactly these shares next to those that are kept.

    Equal shares get equal instances. Larger than needed is better: unassigned slices would be idle.
    """
    room = replace(layout, instances=kept)
    profiles_by_graphics = {graphics: _profiles_of_kind(layout, graphics=graphics) for graphics in (False, True)}
    # The profiles to choose from for each share.
    candidates = [profiles_by_graphics[share.graphics] for share in shares]
    smallest: list[Profile] = []
    for share, profiles in zip(shares, candidates, strict=True):
        holding = next((profile for profile in profiles if _holds(profile, share)), None)
        if holding is None:
            return NewInstances(why_not=f"no instance has {share}{_largest_profile_text(profiles, share)}")
        smallest.append(holding)
    if not _fit_together(room, smallest):
        largest = max(shares)
        needed = smallest[shares.index(largest)]
        counts = range(needed.instances or _MOST_INSTANCES, 0, -1)
        most = next((count for count in counts if _fit_together(room, [needed] * count)), "none")
        reason = f"{len(shares)} instances with {largest} do not fit: {most} of {needed.name} would"
        return NewInstances(why_not=reason)

    # Then larger ones: by the wanted percentages, equal for equal shares, else each as large as fits.
    weighted = _weighted_profiles(room, candidates, shares) if all(share.percent for share in shares) else None
    if weighted is not None:
        return NewInstances(profiles=weighted)
    if len(set(shares)) == 1:
        return NewInstances(profiles=(_largest_equal(room, candidates[0], smallest[0], len(shares)),) * len(shares))
    return NewInstances(profiles=tuple(_enlarge(room, candidates, smallest)))


def _profiles_of_kind(layout: Layout, *, graphics: bool) -> list[Profile]:
    """Return the ordinary profiles, or those with graphics, small ones first."""
    attributes = {"+gfx"} if graphics else set()
    profiles = [
        profile
        for profile in layout.profiles
        if profile.attributes == attributes and profile.placements and profile.memory_bytes
    ]
    return sorted(profiles, key=lambda profile: (profile.slices, profile.size or 0, profile.memory_bytes or 0))


def _largest_profile_text(profiles: Sequence[Profile], share: Share) -> str:
    """Return the end of a sentence: what the largest profile has of the memory and SMs that a share asks for."""
    if not profiles:
        return ""
    largest = profiles[-1]
    memory = (largest.memory_bytes or 0) if share.memory_bytes or not share.sms else 0
    sms = (largest.multiprocessors or 0) if share.sms else 0
    return f"; the largest, {largest.name}, has {Share(memory, sms)}"


def _holds(profile: Profile, share: Share) -> bool:
    """Return whether a profile has the memory, SMs and graphics of a share."""
    enough = (profile.memory_bytes or 0) >= share.memory_bytes and (profile.graphics or not share.graphics)
    return enough and (not share.sms or (profile.multiprocessors or 0) >= share.sms)


def _fit_together(room: Layout, profiles: Sequence[Profile]) -> bool:
    """Return whether instances of these profiles fit next to those of the layout."""
    counts = Counter(profile.name for profile in profiles)
    if any(profile.instances is not None and counts[profile.name] > profile.instances for profile in profiles):
        return False
    wish = tuple(Request(profile=name, count=count) for name, count in counts.items())
    return can_add(room, wish)


def _largest_equal(room: Layout, candidates: Sequence[Profile], least: Profile, count: int) -> Profile:
    """Return the profile with the most SMs, then the least memory, that fits ``count`` times and is not below ``least``."""
    better = [
        profile
        for profile in candidates
        if (profile.memory_bytes or 0) >= (least.memory_bytes or 0) and profile.slices >= least.slices
    ]
    better.sort(key=lambda profile: (-(profile.multiprocessors or profile.slices), profile.memory_bytes or 0))
    return next((profile for profile in better if _fit_together(room, [profile] * count)), least)


# So many profiles, each chosen for one share, are tried in every combination.
_MOST_WEIGHTED: Final = 4


def _weighted_profiles(
    room: Layout, candidates: Sequence[Sequence[Profile]], shares: Sequence[Share]
) -> tuple[Profile, ...] | None:
    """Return a profile for each share, those whose compute slices are nearest to the wanted percentages.

    ``candidates`` has the profiles to choose from for each share. None: no choice fits the GPU together, or there are too
    many shares to try all choices.
    """
    if len(shares) > _MOST_WEIGHTED:
        return None
    whole = sum(share.percent for share in shares)

    def by_error(profiles: Sequence[Profile]) -> tuple[float, int, int]:
        """Return the sort key: the largest error of a share, then the most slices, then the least memory."""
        total = sum(profile.slices for profile in profiles)
        pairs = zip(profiles, shares, strict=True)
        error = max(abs(profile.slices / total - share.percent / whole) for profile, share in pairs)
        return round(error, 6), -total, sum(profile.memory_bytes or 0 for profile in profiles)

    fitting = [
        [profile for profile in profiles if _holds(profile, share)]
        for profiles, share in zip(candidates, shares, strict=True)
    ]
    choices = sorted(itertools.product(*fitting), key=by_error)
    return next((choice for choice in choices if _fit_together(room, choice)), None)


def _enlarge(room: Layout, candidates: Sequence[Sequence[Profile]], chosen: Sequence[Profile]) -> Sequence[Profile]:
    """Return the chosen profiles enlarged, the smallest first, as long as all fit; each becomes one of its candidates."""
    smallest_first = sorted(range(len(chosen)), key=lambda n: (chosen[n].slices, chosen[n].memory_bytes or 0))
    for number in smallest_first:
        current = chosen[number]
        for larger in candidates[number]:
            # More memory and as many slices, or fewer of one of them, is no step up.
            if larger.slices <= current.slices or (larger.memory_bytes or 0) < (current.memory_bytes or 0):
                continue
            enlarged = [*chosen[:number], larger, *chosen[number + 1 :]]
            if _fit_together(room, enlarged):
                return _enlarge(room, candidates, enlarged)
    return chosen


def _fitting_instances(idle: Sequence[GpuInstance], shares: Sequence[Share]) -> list[GpuInstance] | None:
    """Return an idle instance for each share, the smallest that fits; None if one share has none."""
    unused = sorted(idle, key=lambda instance: (instance.profile.memory_bytes or 0, instance.profile.slices))
    chosen: dict[int, GpuInstance] = {}
    largest_first = sorted(range(len(shares)), key=lambda number: shares[number], reverse=True)
    for number in largest_first:
        fits = next((instance for instance in unused if _holds(instance.profile, shares[number])), None)
        if fits is None:
            return None
        unused.remove(fits)
        chosen[number] = fits
    return [chosen[number] for number in range(len(shares))]


@dataclass(frozen=True)
class Situation:
    """A case, the host and GPU that it is to run on, and the table."""

    case: Case
    host: HostFacts
    gpu: GpuFacts
    table: Table
    # The active thread percentage of an MPS client that was measured to be best (100: no cap); None: not measured.
    cap: float | None = None
    # The indexes of the GPUs that may be used; empty: all of them.
    among: tuple[int, ...] = ()
    # As few GPUs as possible are used.
    consolidate: bool = False
    # Other GPUs like ``gpu``, on which equal jobs run: as many as on ``gpu``, or fewer.
    more: tuple[GpuFacts, ...] = ()
    # The case on all of these GPUs, where there are several.
    whole: Case | None = None
    # The case is one process of several, each of which has a GPU.
    own_gpu: bool = False

    @property
    def used_gpus(self) -> tuple[GpuFacts, ...]:
        """Return the GPUs that this answer is for: the first, and others like it."""
        return (self.gpu, *self.more)

    @property
    def jobs(self) -> dict[str, RunningJob]:
        """Return the jobs that run already on the used GPUs, by name."""
        uuids = {gpu.uuid for gpu in self.used_gpus}
        return {job.name: job for job in self.host.jobs if not uuids.isdisjoint(job.devices)}

    @cached_property
    def gpus_each(self) -> int:
        """Return how many GPUs one process has at the same time, at most.

        N ranks of one job on N GPUs have one each, although the job is said to need N.
        """
        most = max(work.gpus or 1 for work in self.case.workloads)
        as_many_processes = len(self.case.workloads) == 1 and self.case.processes == most
        ranks = as_many_processes and any(map(self.case.any, ("nccl", "cooperating", "one_application")))
        return 1 if ranks else most

    @property
    def gpu_sets(self) -> int:
        """Return how many jobs can have GPUs of their own at the same time: the number of sets of `gpus_each` GPUs."""
        return max(1, len(self.used_gpus) // self.gpus_each)

    @property
    def counts_of_all(self) -> tuple[int | None, ...]:
        """Return the number of processes of each workload on all used GPUs; ``case.counts`` is of one GPU."""
        return (self.whole or self.case).counts

    @property
    def placed_processes(self) -> int:
        """Return the number of processes on all used GPUs; an unknown number counts as 2, of one application as 1."""
        if self.whole is None and self.one_process:
            return 1
        return (self.whole or self.case).processes or 2

    def on(
        self,
        gpu: GpuFacts,
        case: Case | None = None,
        *,
        more: Sequence[GpuFacts] = (),
        whole: Case | None = None,
        own_gpu: bool = False,
    ) -> Situation:
        """Return the situation with another GPU, or several alike, and another case if one is given."""
        return replace(self, gpu=gpu, case=case or self.case, more=tuple(more), whole=whole, own_gpu=own_gpu)

    def variant(self, **changes: Any) -> Situation:
        """Return a copy with another case or cap. The GPU is the same, so the results of `once` are shared."""
        copy = replace(self, **changes)
        vars(copy)["_results"] = self._results
        return copy

    @cached_property
    def _results(self) -> dict[Hashable, Any]:
        """Return the results of `once` by their keys."""
        return {}

    def once(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which is called once for this situation and all of its variants."""
        if key not in self._results:
            self._results[key] = work()
        result: T = self._results[key]
        return result

    # -- the case ----------------------------------------------------------------------------------

    @cached_property
    def several(self) -> bool:
        """Return whether several programs share the GPU, of the case or of others; assumed where the number is unknown."""
        return (self.case.processes or 2) > 1 or self.with_others

    @cached_property
    def with_others(self) -> bool:
        """Return whether one process is to share the GPU with programs that are not part of the case."""
        return self.case.processes == 1 and (self.case.same_user is False or self.among_others)

    @cached_property
    def among_others(self) -> bool:
        """Return whether a program of `in_use` computes: not all of them only draw on a display."""
        return self.in_use and (self.gpu.processes or 0) > self.gpu.displays

    @cached_property
    def in_use(self) -> bool:
        """Return whether programs that are not part of the case stay on the GPU, outside MIG; also those that only draw."""
        has_programs = bool(self.gpu.processes) and not self.gpu.mig_enabled
        return has_programs and not self.case.any("running") and self.case.any("occupied") is not False

    @cached_property
    def pair(self) -> bool:
        """Return whether there are a production job and opportunistic ones, and nothing else."""
        return self.case.roles == {Role.PRODUCTION, Role.OPPORTUNISTIC}

    @cached_property
    def idle_often(self) -> bool:
        return self.case.pattern in {Pattern.INTERACTIVE, Pattern.BURSTY}

    @cached_property
    def saturating(self) -> bool | None:
        """Return whether a process fills the GPU; in a pair, whether production does."""
        if not self.pair:
            return self.case.any("saturating")
        return any_of(work.saturating for work in self.case.workloads if work.role is Role.PRODUCTION)

    @cached_property
    def gaps(self) -> bool | None:
        """Return whether production of a pair waits between requests, so that the GPU is idle in between; None if unknown.

        If it is not stated, interactive and bursty work does, and an LLM that decodes (CUDA graphs) does not.
        """
        if not self.pair:
            return None
        production = [work for work in self.case.workloads if work.role is Role.PRODUCTION]
        if self.saturating is True:
            return False
        if any(work.gaps is not None for work in production):
            return any(work.gaps for work in production)
        if any(work.cuda_graphs for work in production):
            return False
        idle_often = any(work.pattern in {Pattern.INTERACTIVE, Pattern.BURSTY} for work in production)
        return True if idle_often else None

    @cached_property
    def isolation(self) -> frozenset[Isolation]:
        return self.case.wanted_isolation or frozenset()

    @cached_property
    def apart(self) -> bool:
        """Return whether the processes, or their groups, must be kept apart: by isolation, bandwidth, trust or users."""
        explicit = len(self.case.workloads) == 1 and (self.case.groups or 0) > 1
        return bool(
            explicit
            or self.isolation
            or self.case.any("bandwidth_qos")
            or not self.trusted
            or self.case.same_user is False
        )

    @cached_property
    def one_process(self) -> bool:
        """Return whether the case is one process that has the GPU alone; one application of unknown size counts as one."""
        if self.case.processes is None:
            return bool(self.case.any("one_application"))
        return self.case.processes == 1 and not self.with_others

    @cached_property
    def endless(self) -> bool:
        """Return whether jobs do not end by themselves (servers, interactive work): a queue of them would never move."""
        return bool(self.case.any("server")) or self.case.pattern is Pattern.INTERACTIVE

    @cached_property
    def batched(self) -> bool:
        """Return whether one engine with continuous batching can replace the copies of one LLM."""
        cuda_graphs = self.case.any("cuda_graphs")
        # Copies that fill the GPU are taken for an LLM, unless the user says that they use no CUDA graphs.
        is_llm = bool(cuda_graphs or (cuda_graphs is None and self.saturating))
        may_be_merged = self.several and not self.apart and not self.pair
        return bool(self.case.any("replicas")) and is_llm and may_be_merged

    @cached_property
    def exclusive_mode(self) -> bool:
        """Return whether the compute mode of the GPU does not admit several programs."""
        return self.gpu.compute_mode not in {None, ComputeMode.DEFAULT}

    @cached_property
    def short_of_memory(self) -> bool:
        """Return whether not all fit at the same time, so that jobs have to leave or to wait."""
        return self.several and self.fit_together is False

    @cached_property
    def together(self) -> bool:
        """Return whether the processes are one job on one GPU: all have to run, and none can wait for another to end."""
        signs_of_one_job = ("cooperating", "nccl", "ipc", "one_application")
        # The user says that they need not all advance: each may wait for the end of another.
        may_run_in_turn = self.case.any("progress") is False and not self.case.any("nccl") and not self.case.any("p2p")
        may_be_one_job = self.several and not self.pair and self.gpus_each == 1 and not may_run_in_turn
        return may_be_one_job and any(map(self.case.any, signs_of_one_job))

    @cached_property
    def in_phases(self) -> bool:
        """Return whether processes that work together must all advance, but need not run at the same time."""
        at_once = any(map(self.case.any, ("nccl", "p2p", "ipc"))) or len(self.used_gpus) >= (self.case.processes or 2)
        return self.together and not at_once and bool(self.case.any("cooperating") and self.case.any("progress"))

    @cached_property
    def gpus_with_room(self) -> tuple[GpuFacts, ...]:
        """Return this GPU and others that are idle or have an idle MIG instance; this one alone if it is not so itself."""
        if self.gpu.instance is not None or not _has_room_now(self.gpu):
            return (self.gpu,)
        return (self.gpu, *filter(_has_room_now, self.other_gpus))

    @cached_property
    def other_gpus(self) -> tuple[GpuFacts, ...]:
        """Return the other GPUs that may be used, idle or not."""
        allowed = (gpu for gpu in self.host.gpus if gpu.index in self.among or not self.among)
        return tuple(gpu for gpu in allowed if gpu.index != self.gpu.index and gpu.error is None)

    @cached_property
    def trusted(self) -> bool:
        return not any(work.trusted is False for work in self.case.workloads)

    @cached_property
    def grouped(self) -> bool | None:
        """Return whether some groups have several processes, which may share an instance; None if unknown.

        Where no groups are given, each workload of a list is one, unless processes of one user are to be kept apart.
        """
        groups, processes = self.case.groups, self.case.processes
        groups_given = any(work.groups is not None for work in self.case.workloads)
        if not groups_given and self.case.same_user and self.isolation - {Isolation.QUOTA}:
            return False
        return None if groups is None or processes is None else groups < processes

    # -- memory ------------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> Budget:
        """Return the memory budget outside MPS."""
        return budget(self.case, self.gpu, mps=False)

    @cached_property
    def under_mps(self) -> Budget:
        return budget(self.case, self.gpu, mps=True)

    def budget_of(self, way: Way) -> Budget:
        return self.under_mps if _is_under_mps(way) else self.plain

    @cached_property
    def fit_together(self) -> bool | None:
        """Return whether all fit on this GPU at the same time; None if unknown."""
        return any_of([self.plain.may_fit, self.under_mps.may_fit])

    def leavers(self, way: Way) -> list[Workload]:
        """Return the workloads that leave the GPU now and then: all, except production where the opportunistic job swaps."""
        production_stays = way is Way.SWAP and self.pair
        return [work for work in self.case.workloads if not production_stays or work.role is Role.OPPORTUNISTIC]

    def leaving_cost(self, way: Way) -> LeavingCost | None:
        """Return the time and host memory that it takes to swap jobs out and back; None: the memory of none is known."""
        # The bytes of a process with its CUDA context, and the number of such processes.
        leavers = [(work.memory + CONTEXT_BYTES, work.processes or 1) for work in self.leavers(way) if work.memory]
        if not leavers:
            return None
        # Imported here: in most cases no job leaves.
        from gpushare.memory.cost import SOURCE, TURN_FACTOR, beyond_measured, host_bytes, kept_share, swap_times

        largest = max(size for size, _ in leavers)
        times = swap_times(largest)
        both = times.out_seconds + times.in_seconds
        turn = TURN_FACTOR * both if way is Way.TURNS else None
        return LeavingCost(
            memory_bytes=largest,
            out_seconds=round(times.out_seconds, 1),
            in_seconds=round(times.in_seconds, 1),
            turn_seconds=None if turn is None else round(turn, 1),
            kept_share=None if turn is None else kept_share(turn, both),
            host_bytes=host_bytes(sum(size * count for size, count in leavers)),
            estimated=beyond_measured(largest),
            source=SOURCE,
        )

    def at_a_time(self, way: Way) -> int | None:
        """Return how many processes run at a time where not all fit at once, and the rest can wait for their end.

        None: all run at once, at most one does, or none can wait for another.
        """
        processes = self.case.processes
        if processes is None or not self._can_be_queued or way in {*ALL_MIG, Way.VGPU, Way.STREAMS}:
            return None
        at_once = self._most_at_once(way, processes)
        return self._fewer_for_limits(way, at_once) if 1 < at_once < processes else None

    @cached_property
    def _can_be_queued(self) -> bool:
        """Return whether some of the processes may wait until others have ended.

        They are equal and independent, and none is needed now. None is known to fill the GPU: those gain nothing by
        running several at once.
        """
        equal = len(self.case.workloads) == 1 and self.case.same_user is not False
        dependent = self.together or self.apart or self.idle_often
        needed_now = any(map(self.case.any, ("latency", "running", "weights", "progress")))
        return equal and self.saturating is not True and not dependent and not needed_now

    def _most_at_once(self, way: Way, processes: int) -> int:
        """Return how many processes the MPS server and the memory admit at once; 0: there is no reason to run several."""
        clients = self.mps_clients if _is_under_mps(way) else None
        most = processes if clients is None else min(processes, clients)
        memory = self.budget_of(way)
        if memory.may_fit is not False:
            return most
        if self.saturating is None and most == processes:
            # One of them may fill the GPU, so running several may gain nothing: `memory_decides` queues them.
            return 0
        return min(most, memory.most or 0)

    def _fewer_for_limits(self, way: Way, at_once: int) -> int:
        """Return how many of ``at_once`` MPS clients can have limits, which include the memory of their contexts.

        If that would be too few, return all of them: they run without limits.
        """
        size = self.case.workloads[0].memory
        usable = self.budget_of(way).usable_bytes
        if not _is_under_mps(way) or self.before_volta or size is None or usable is None:
            return at_once
        limited = min(at_once, usable // (whole_mib(size) + CLIENT_BYTES))
        return limited if limited >= at_once * _LEAST_PART_LIMITED else at_once

    def counts_at_once(self, way: Way) -> tuple[int | None, ...]:
        """Return the number of processes of each workload that run at the same time."""
        at_a_time = self.at_a_time(way)
        # A case of which some wait has one workload.
        return self.case.counts if at_a_time is None else (at_a_time,)

    @cached_property
    def memory_decides(self) -> bool:
        """Return whether only memory keeps the programs from running together: then as many run at a time as fit."""
        other_needs = (
            *("latency", "profiler", "bandwidth_qos", "bandwidth_bound", "containment"),
            *("vms", "nccl", "weights", "kubernetes"),
        )
        sizes_known = all(work.memory is not None for work in self.case.workloads)
        one_at_a_time = self.isolation - {Isolation.QUOTA} or not self.trusted or self.saturating is True
        # A job with several GPUs has all of them for itself, whatever fits on one of them.
        some_fit = self.gpus_each == 1 and self.plain.may_fit is False and self.plain.one_fits is True
        may_share = self.several and not one_at_a_time and not any(map(self.case.any, other_needs))
        return sizes_known and some_fit and may_share

    # -- MPS and MIG -------------------------------------------------------------------------------

    @property
    def before_volta(self) -> bool | None:
        """Return whether the GPU is older than Volta: MPS has no limits there, and accepts fewer clients."""
        return None if self.gpu.compute_capability is None else self.gpu.compute_capability < VOLTA

    @cached_property
    def mps_clients(self) -> int | None:
        """Return how many clients MPS accepts here; None if unknown. A MIG instance has a proportional part of them.

        The MPS program is asked for its version only for more processes than every version accepts in the smallest
        instance.
        """
        processes = self.case.processes
        # Without driver and program, the number is that of the oldest version.
        clients = mps_clients(self.table, HostFacts(host=self.host.host), self.gpu)
        if clients is None or processes is None or processes > clients // _MOST_INSTANCES:
            clients = mps_clients(self.table, self.host, self.gpu)
        if clients is None or self.gpu.instance is None:
            return clients
        return max(1, int(clients * self.gpu.sm_share))

    def clients_per_server(self, way: Way) -> int | None:
        """Return how many clients the fullest MPS server has: that of the GPU, or of an instance; None if unknown."""
        processes = self.case.processes
        if way is not Way.MIG_MPS or processes is None:
            return processes
        works = self.case.workloads
        if len(works) > 1:
            return max(-(-(work.processes or 1) // (work.groups or 1)) for work in works)
        return -(-processes // max(len(self.shares(way)), 1))

    def clients_accepted(self, way: Way) -> int | None:
        """Return how many clients one MPS server accepts: of the GPU, or of the smallest instance; None if unknown.

        An instance has a part of the clients of the GPU, by its slices (MIG user guide).
        """
        if way is not Way.MIG_MPS or self.mps_clients is None:
            return self.mps_clients
        smallest = min((profile.slices for profile in self.profiles(way)), default=None)
        if smallest is None or self.gpu.layout is None:
            return None
        whole = max(profile.slices for profile in self.gpu.layout.profiles)
        return max(1, self.mps_clients * smallest // whole)

    @cached_property
    def kept_instances(self) -> tuple[GpuInstance, ...]:
        """Return the MIG instances that must stay: busy ones and, unless the user says otherwise, those that somebody may need."""
        layout = self.gpu.layout
        if layout is None or not self.gpu.mig_enabled:
            return ()
        return tuple(
            instance
            for instance in layout.instances
            if instance.busy or not (self.case.destroy or may_be_destroyed_unasked(instance))
        )

    @cached_property
    def idle_instances(self) -> tuple[GpuInstance, ...]:
        """Return the existing instances of the GPU that anybody may use."""
        return _idle_instances(self.gpu)

    @property
    def mps_serves(self) -> bool:
        """Return whether an MPS daemon serves the whole GPU; those of instances end with MIG."""
        return self.gpu.mps_daemons > 0 and not self.gpu.mig_enabled

    def mps_in_the_way(self, way: Way) -> bool:
        """Return whether the MPS daemon of the whole GPU must be stopped first.

        Its clients are not time-sliced, and MIG cannot be turned on while it runs.
        """
        if not self.mps_serves:
            return False
        if way in LEAVING:
            # In an exclusive mode the MPS server has the GPU alone.
            return self.exclusive_mode
        if way is Way.TIMESLICE:
            return not self.case.any("running")
        if way is Way.SLICES:
            # Jobs that yield to production share its daemon.
            return not (self.pair and any(job.mps for job in self.jobs.values()))
        return way in ALL_MIG

    @cached_property
    def most_instances(self) -> int | None:
        """Return the maximum number of MIG instances: the table's, or the driver's if that is lower."""
        limit = self.table.cell(Way.MIG, "max_partitions", self.host.driver).limit
        counts = [count for count in (limit, self.gpu.largest_instance_count) if count is not None]
        return min(counts, default=None)

    @cached_property
    def may_be_root(self) -> bool | None:
        """Return whether the user can become root; None if unknown: a user who is not root may have sudo."""
        return self.case.root if self.case.root is not None else self.host.root or None

    def shares(self, way: Way) -> tuple[Share, ...]:
        """Return what each instance must hold: one process with plain MIG, else the processes of one group.

        With plain MIG, it has its percentage if the user wants unequal shares.
        """
        works = self.case.workloads
        context = MPS_CONTEXT_BYTES if way is Way.MIG_MPS else CONTEXT_BYTES
        shares: list[Share] = []
        for work in works:
            processes = work.processes or (1 if len(works) > 1 else 2)
            if way is Way.MIG:
                instances = processes
            else:
                instances = work.groups or (1 if len(works) > 1 else self._instance_count(processes))
            memory = 0 if work.memory is None else -(-processes // instances) * (work.memory + context)
            shares += [Share(memory, work.sms or 0, bool(work.graphics))] * instances
        percentages = self.case.shares or ()
        if way is Way.MIG and len(percentages) == len(shares):
            return tuple(replace(share, percent=percent) for share, percent in zip(shares, percentages, strict=True))
        return tuple(shares)

    def _instance_count(self, processes: int) -> int:
        """Return the number of instances for processes without groups: at least two in each, evenly if possible.

        Where no instance can be created, for want of root or of room, only the idle instances count.
        """
        if self.idle_instances and (self.may_be_root is False or not self._can_add_instance):
            return max(1, min(len(self.idle_instances), processes - 1))
        most = max(1, min((self.most_instances or _MOST_INSTANCES), processes // 2))
        return next((count for count in range(most, 1, -1) if processes % count == 0), most)

    @cached_property
    def _can_add_instance(self) -> bool:
        """Return whether any instance can be created next to those that stay; True where no profiles are listed."""
        layout = self.gpu.layout
        profiles = [] if layout is None else _profiles_of_kind(layout, graphics=False)
        return (
            layout is None
            or not profiles
            or _fit_together(replace(layout, instances=self.kept_instances), profiles[:1])
        )

    def new_instances(self, way: Way) -> NewInstances | None:
        """Return the instances to create for a way, or why there are none; None if the driver lists no profiles."""
        layout = self.gpu.layout
        if layout is None or not layout.profiles:
            return None
        shares = self.shares(way)
        return self.once(("instances", shares, self.kept_instances), lambda: self._find_instances(layout, shares))

    def _find_instances(self, layout: Layout, shares: tuple[Share, ...]) -> NewInstances:
        """Return the instances to create for these shares: next to all that is there, else next to what must stay."""
        most = self.most_instances
        if most is not None and len(shares) > most:
            return NewInstances(why_not=f"{len(shares)} instances are wanted, and this GPU has at most {most}")
        if self.gpu.mig_enabled and layout.instances:
            # Nothing is destroyed if there is room next to all instances.
            next_to_all = instances_for(layout, shares, layout.instances)
            if next_to_all.why_not is None:
                return next_to_all
            next_to_kept = instances_for(layout, shares, self.kept_instances)
            if next_to_kept.why_not is None or not self.kept_instances:
                return next_to_kept
            kept = ", ".join(map(instance_title, self.kept_instances))
            return replace(next_to_kept, why_not=f"{next_to_kept.why_not}, next to {kept}")
        if len(shares) == 1:
            # One process leaves half of the GPU to others, if half is enough for it.
            half = instances_for(layout, shares * 2)
            if half.why_not is None:
                return replace(half, profiles=half.profiles[:1])
        return instances_for(layout, shares)

    def documented_why_not(self, way: Way) -> str | None:
        """Return why not even NVIDIA's documented profiles hold all shares, where the driver lists none; None if they may."""
        shares, total, documented = self.shares(way), self.gpu.memory_total_bytes or 0, self.gpu.documented
        if not documented:
            return None
        # What is not documented is taken at its best: any place, enough SMs, and the GPU's memory in proportion.
        most = max(profile.slices for profile in documented)
        ends = [place.start + place.size for profile in documented for place in profile.placements or ()]
        profiles = []
        for profile in documented:
            places = profile.placements or [Placement(at, profile.slices) for at in range(most - profile.slices + 1)]
            part = total * places[0].size // max(ends, default=most)
            profiles.append(
                replace(
                    profile,
                    placements=tuple(places),
                    instances=profile.instances if profile.placements else None,
                    memory_bytes=profile.memory_bytes or part or max(share.memory_bytes for share in shares) or 1,
                    multiprocessors=profile.multiprocessors or max(share.sms for share in shares),
                )
            )
        return instances_for(Layout(gpu=self.gpu.index, profiles=tuple(profiles)), shares).why_not

    def short_of_sms(self, way: Way) -> str | None:
        """Return in words which profiles have fewer SMs than asked for; None: none has, or no profiles fit."""
        short = {
            f"{profile.name} has {profile.multiprocessors} of the {share.sms} SMs"
            for profile, share in zip(self.profiles(way), self.shares(way), strict=False)
            if (profile.multiprocessors or share.sms) < share.sms
        }
        return ", ".join(sorted(short)) or None

    def free_instances(self, way: Way) -> list[GpuInstance] | None:
        """Return an existing idle instance for each share of a way, or None."""
        return _fitting_instances(self.idle_instances, self.shares(way)) if self.idle_instances else None

    def profiles(self, way: Way) -> tuple[Profile, ...]:
        """Return the profile of each share's instance: of idle ones that exist, else of those to create; empty: none fit."""
        free = self.free_instances(way)
        if free is not None:
            return tuple(instance.profile for instance in free)
        instances = self.new_instances(way)
        return () if instances is None else instances.profiles


def _idle_instances(gpu: GpuFacts) -> tuple[GpuInstance, ...]:
    """Return the existing instances of a GPU that anybody may use: not busy, not named, not granted."""
    layout = gpu.layout
    if layout is None or not gpu.mig_enabled:
        return ()
    return tuple(
        instance
        for instance in layout.instances
        if instance.compute and not (instance.busy or instance.name or instance.granted)
    )


def _has_room_now(gpu: GpuFacts) -> bool:
    """Return whether a GPU is idle, or has an idle instance."""
    return gpu.processes == 0 or bool(_idle_instances(gpu))


def may_be_destroyed_unasked(instance: GpuInstance) -> bool:
    """Return whether an idle instance may be destroyed without a question: gpushare made it, and it has no name or grant."""
    return instance.made and not instance.name and not instance.granted


def instance_title(instance: GpuInstance) -> str:
    """Return an instance with why it stays: its name, its users, a program in it."""
    reasons = []
    if instance.name:
        reasons.append(instance.name)
    if instance.granted:
        reasons.append(f"granted to {', '.join(instance.granted)}")
    if instance.busy:
        reasons.append("in use")
    if not reasons and not instance.made:
        reasons.append("not made by gpushare")
    return f"{instance} ({', '.join(reasons)})" if reasons else str(instance)


def instances_sentence(situation: Situation, way: Way) -> str | None:
    """Return the memory calculation of each instance of a way with MIG; None: no profiles fit, or a size is unknown."""
    shares = situation.shares(way)
    profiles = situation.profiles(way)
    if not profiles or not all(share.memory_bytes for share in shares):
        return None
    sums = []
    for (profile, share), count in Counter(zip(profiles, shares, strict=True)).items():
        if profile.memory_bytes is None:
            return None
        each = "" if count == 1 else f"each of {count} "
        needed = format_bytes(share.memory_bytes)
        size = format_bytes(profile.memory_bytes)
        unused = format_bytes(profile.memory_bytes - share.memory_bytes)
        sums.append(f"in {each}{profile.name} {needed} of {size}, CUDA contexts counted: {unused} left")
    return "; ".join(sums)
