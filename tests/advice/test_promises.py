"""What an answer never does, whatever the case and the host: nobody gets less than what was asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpushare.advice.advise import advice_answer, advise
from gpushare.advice.case import Case, workload_of
from gpushare.advice.place import Part, first_gpu, place
from gpushare.advice.recipe import recipe
from gpushare.advice.situation import Situation
from gpushare.advice.ways import ALL_MIG, ALL_MPS, LEAVING
from gpushare.base.model import Way
from tests.advice.conftest import facts_of, table

HOSTS = (
    *("a100-80gb", "t4", "2xh100", "t4,h100", "4xa10", "a30,l40s", "3xa100-40gb", "rtx-pro-6000"),
    *("rtx-pro-4500", "v100-32gb"),
)
GIB = 1 << 30
JOB = re.compile("gpushare (run|farm) ")
# Two ways of being apart, and two of being alone.
APART = {*ALL_MPS, Way.STREAMS}
works = st.fixed_dictionaries(
    {"processes": st.integers(1, 9), "memory": st.sampled_from(["1G", "6G", "11G", "20G", "45G"])},
    optional={
        "saturating": st.booleans(),
        "users": st.sampled_from(["same", "different"]),
        "pattern": st.sampled_from(["interactive", "bursty", "steady"]),
        "isolation": st.sampled_from(["none", "quota", "fault", "full"]),
        "trusted": st.booleans(),
        "latency": st.sampled_from(["3ms", "50ms", "none"]),
        "code": st.booleans(),
        **dict.fromkeys(
            ("cuda_graphs", "server", "progress", "profiler", "graphics", "bandwidth_bound", "cooperating", "ipc"),
            st.booleans(),
        ),
        **dict.fromkeys(("replicas", "containers", "weights", "io_bound", "containment"), st.booleans()),
    },
)
cases = st.lists(works, min_size=1, max_size=3)
# Of the GPUs of a host, which are in use, and how much of their memory.
busy = st.lists(st.sampled_from([0.0, 0.0, 0.3, 0.95]), min_size=4, max_size=4)


def answer(words: list[dict[str, Any]], host: str, used: list[float], root: bool | None = None) -> tuple[Part, ...]:
    facts = facts_of(host)
    gpus = tuple(
        replace(gpu, processes=bool(part) * 1, memory_used_bytes=int(part * (gpu.memory_total_bytes or 0)))
        for gpu, part in zip(facts.gpus, used, strict=False)
    )
    facts = replace(facts, gpus=gpus, root=root is not False)
    case = Case(workloads=tuple(map(workload_of, words)), root=root)
    situation = Situation(case, facts, gpus[0], table())
    return place(replace(situation, gpu=first_gpu(situation, gpus)))


def shared(parts: tuple[Part, ...]) -> list[tuple[Way | None, Situation]]:
    """Return the ways in which several processes of the case, or one and others, share a GPU."""
    return [(part.way, part.situation) for part in parts if part.situation.several]


@given(cases, st.sampled_from(HOSTS), busy)
def test_who_is_to_be_kept_apart_is_never_under_one_mps_server(
    words: list[dict[str, Any]], host: str, used: list[float]
) -> None:
    for way, situation in shared(answer(words, host, used)):
        for work in situation.case.workloads:
            isolation = {kind.value for kind in work.isolation or ()}
            if isolation & {"fault", "full"} or work.trusted is False:
                assert way not in APART
            if "full" in isolation or work.trusted is False:
                assert way in {Way.WHOLE, Way.VGPU, *ALL_MIG, Way.FIX, None}


@given(cases, st.sampled_from(HOSTS), busy)
def test_who_profiles_has_the_gpu_alone(words: list[dict[str, Any]], host: str, used: list[float]) -> None:
    for way, situation in shared(answer(words, host, used)):
        if situation.case.any("profiler"):
            assert way in {Way.WHOLE, Way.FIX, None}


@given(cases, st.sampled_from(HOSTS), busy)
def test_a_job_is_never_out_longer_than_its_target(words: list[dict[str, Any]], host: str, used: list[float]) -> None:
    for way, situation in shared(answer(words, host, used)):
        if way in LEAVING:
            cost = situation.leaving_cost(way)
            for work in situation.leavers(way):
                assert not work.latency or cost is None or (work.latency_seconds or 0) >= cost.switch_seconds


@given(cases, st.sampled_from(HOSTS), busy)
def test_each_job_fits_its_gpu(words: list[dict[str, Any]], host: str, used: list[float]) -> None:
    for part in answer(words, host, used):
        situation, way = part.situation, part.way
        if way in {None, Way.FIX, Way.MEASURE}:
            continue
        total, largest = (
            situation.gpu.memory_total_bytes or 0,
            max(work.memory or 0 for work in situation.case.workloads),
        )
        assert largest < total
        instances = situation.new_instances(way) if way in ALL_MIG else None
        assert instances is None or instances.why_not is None


@example(
    [{"processes": 1, "memory": "1G"}, {"processes": 1, "memory": "1G", "users": "different", "server": True}],
    "2xh100",
    [0.0] * 4,
)
@given(cases, st.sampled_from(HOSTS), busy)
def test_who_has_to_advance_or_does_not_end_is_never_queued(
    words: list[dict[str, Any]], host: str, used: list[float]
) -> None:
    for way, situation in shared(answer(words, host, used)):
        case = situation.case
        # One process with an idle GPU for itself is in no queue.
        queued = case.processes != 1 or situation.among_others
        if queued and (case.any("progress") or case.any("server")):
            # Of processes that wait for each other, fewer are started.
            assert way is not Way.WHOLE or situation.together


@given(cases, st.sampled_from(HOSTS), busy)
def test_without_root_no_command_needs_it(words: list[dict[str, Any]], host: str, used: list[float]) -> None:
    for part in answer(words, host, used, root=False):
        made = None if part.way is None else recipe(part.situation, part.way)
        for line in () if made is None else (*made.lines, *made.undo):
            assert not (line.command or "").startswith("sudo ")


@given(works, st.sampled_from(HOSTS), busy)
def test_a_gpu_is_shared_only_while_none_is_idle(words: dict[str, Any], host: str, used: list[float]) -> None:
    parts = answer([words], host, used)
    idle = [gpu for gpu in parts[0].situation.host.gpus if not gpu.processes]
    needed = workload_of(words).memory or 0
    assume(all((gpu.memory_total_bytes or 0) > needed + GIB for gpu in idle))
    assume(parts[0].way not in {None, Way.STREAMS, Way.FIX})
    if len(idle) >= words["processes"] > 1:
        assert all((part.situation.case.processes or 1) == 1 or part.situation.together for part in parts)


@given(cases, st.sampled_from(HOSTS), busy)
def test_mig_is_never_turned_on_under_programs(words: list[dict[str, Any]], host: str, used: list[float]) -> None:
    for part in answer(words, host, used):
        if part.way in ALL_MIG:
            assert part.situation.gpu.processes == 0


def works_to_start(has_weights: bool) -> st.SearchStrategy[dict[str, Any]]:
    given_weights = st.sampled_from(["10:20:30:40", "1:1:2", "30:70", "1:1"])
    fields = {
        "memory": st.sampled_from(["1G", "4G", "20G"]),
        **({"weights": given_weights} if has_weights else {"processes": st.integers(1, 4)}),
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "name": st.sampled_from(["a", "b"]),
        "users": st.sampled_from(["same", "different"]),
        "saturating": st.booleans(),
    }
    if not has_weights:
        optional["weights"] = st.sampled_from(["50", "30", "yes"])
    return st.fixed_dictionaries(fields, optional=optional)


@example(
    [{"name": "a", "memory": "4G", "weights": "10:20:30:40", "users": "same"}, {"memory": "4G", "processes": 2}],
    "2xl40s",
)
@example([{"memory": "4G", "weights": "10:20:30:40", "users": "same"}], "2xl40s")
@example([{"memory": "6G", "weights": "1:1:2", "users": "same", "saturating": False}], "h100")
@example([{"memory": "4G", "processes": 5, "weights": "yes", "users": "same"}], "2xl40s")
@example(
    [{"memory": "4G", "weights": "30:70", "users": "same"}, {"memory": "4G", "weights": "50", "processes": 2}], "3xl40s"
)
@given(
    st.lists(st.booleans().flatmap(works_to_start), min_size=1, max_size=3),
    st.sampled_from(["l40s", "h100", "2xl40s", "2xa30", "3xl40s", "t4,h100", "a30,l40s"]),
)
def test_the_lines_start_each_process_once(words: list[dict[str, Any]], host: str) -> None:
    facts = facts_of(host)
    situation = Situation(Case(workloads=tuple(map(workload_of, words)), root=True), facts, facts.gpus[0], table())
    lines = [line for line in advice_answer(advise(situation)).commands if JOB.match(line.command or "")]
    assume(lines)
    started = [re.search(r"\b(\d+) times", line.what) for line in lines]
    asked = sum(work.processes or 1 for work in situation.case.workloads)
    assert sum(int(times[1]) if times else 1 for times in started) == asked
