"""Which jobs go to which GPU of the host, and in which way there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpushare.advice import place as place_module
from gpushare.advice.advise import Advice, advice_answer, advise
from gpushare.advice.case import Case, workload_of
from gpushare.advice.place import place
from gpushare.advice.situation import Situation
from gpushare.base.model import ComputeMode, Way
from gpushare.base.units import GIB
from gpushare.gpu_models import named_model
from tests.advice.conftest import facts_of, table

APART = {"users": "different", "isolation": "full", "memory": "4G"}
FARM = {"users": "same", "saturating": False}


def placed(host: str, *works: dict[str, Any], **more: Any) -> Advice:
    facts = facts_of(host)
    case = Case(workloads=tuple(map(workload_of, works)), root=True)
    return advise(Situation(case, facts, facts.gpus[0], table(), **more))


def where(advice: Advice) -> list[tuple[list[int], str | None, int | None]]:
    """Return the GPUs, the way and the number of processes of each part."""
    return [(place.gpus, place.way, place.processes) for place in advice_answer(advice).placement]


@pytest.mark.parametrize(
    ("host", "works", "expected"),
    [
        # As many idle GPUs as processes: nothing is shared, whatever was asked.
        ("5xv100-32gb", [{"processes": 3, "users": "different", "pattern": "bursty"}], [([0, 1, 2], "whole-gpu", 3)]),
        ("2xa30", [{"processes": 2, **APART}], [([0, 1], "whole-gpu", 2)]),
        # More: evenly over all of them.
        ("4xh100", [{"processes": 28, "memory": "1G", **FARM}], [([0, 1, 2, 3], "mps", 28)]),
        ("2xa30", [{"processes": 12, "users": "different", "pattern": "interactive"}], [([0, 1], "timeslice", 12)]),
        # A GPU that cannot is no reason against one that can.
        ("2xt4,a30", [{"processes": 4, **APART}], [([2], "mig", 2), ([0, 1], "whole-gpu", 2)]),
        # Production has a GPU of its own as long as there is one.
        (
            "2xa30",
            [{"role": "production", "users": "same"}, {"role": "opportunistic", "processes": 2, **FARM}],
            [([1], "mps", 2), ([0], "whole-gpu", 1)],
        ),
        # There, opportunistic jobs that fill a GPU wait for each other, not next to production.
        (
            "2xh100",
            [
                {"role": "production", "users": "same", "memory": "20G", "latency": "50ms", "saturating": False},
                {"role": "opportunistic", "processes": 2, "users": "same", "memory": "10G", "saturating": True},
            ],
            [([1], "whole-gpu", 2), ([0], "whole-gpu", 1)],
        ),
        # Ranks of one job are on GPUs of one kind.
        ("8xh100", [{"processes": 4, "needs": "nccl", "users": "same"}], [([0, 1, 2, 3], "whole-gpu", 4)]),
        # What does not fit on its GPU leaves it there, also if another GPU has room for less.
        (
            "2xa30",
            [{"processes": 3, "memory": "16G", "users": "same", "saturating": True, "progress": True}],
            [([0, 1], "turns", 3)],
        ),
        # Servers that do not fit on one GPU are spread, before anything is to be changed about them.
        (
            "8xh200",
            [
                {
                    "processes": 20,
                    "like": "serving",
                    "users": "different",
                    "trusted": True,
                    "memory": "16G",
                    "isolation": "fault",
                }
            ],
            [([0, 1, 2, 3, 4, 5, 6, 7], "mig", 20)],
        ),
        # Jobs of several GPUs have them at the same time; others go on the rest.
        ("4xh100", [{"processes": 3, "gpus": 2, "users": "same"}], [([0, 1, 2, 3], "whole-gpu", 3)]),
        ("4xh100", [{"processes": 4, "gpus": 4, "needs": "nccl", "users": "same"}], [([0, 1, 2, 3], "whole-gpu", 4)]),
        ("2xh100", [{"processes": 2, "gpus": 2, "like": "jupyter", "memory": "9G"}], [([0, 1], "timeslice", 2)]),
        (
            "8xh100",
            [{"gpus": 4, "users": "same"}, {"processes": 6, "memory": "4G", **FARM}],
            [([0, 1, 2, 3], "whole-gpu", 1), ([4, 5, 6, 7], "mps", 6)],
        ),
        (
            "2xh100",
            [{"gpus": 2, "role": "production"}, {"gpus": 2, "role": "opportunistic"}],
            [([0, 1], "whole-gpu", 2)],
        ),
        ("2xt4,a30", [{"gpus": 3}], [([0, 1, 2], "whole-gpu", 1)]),
        ("2xt4,a30", [{"gpus": 3, "memory": "20G"}], [([0, 1], None, 1)]),
        # The job of two GPUs leaves the one that can to the other.
        ("h100,2xt4", [{"gpus": 2}, {"memory": "60G"}], [([1, 2], "whole-gpu", 1), ([0], "whole-gpu", 1)]),
        # As many on each as it has instances.
        ("a100-40gb,a100-80gb", [{"processes": 14, **APART, "memory": "3G"}], [([0], "mig", 7), ([1], "mig", 7)]),
        # A program that is profiled takes nothing from the services on another GPU.
        (
            "2xh100",
            [
                {"user": "ann", "profiler": True, "memory": "9G"},
                {
                    "user": "bob",
                    "processes": 3,
                    "memory": "7G",
                    "isolation": "fault",
                    "latency": "40ms",
                    "server": True,
                },
            ],
            [([1], "mig", 3), ([0], "whole-gpu", 1)],
        ),
        # Each user's small programs are on one GPU, under MPS.
        (
            "2xl40s",
            [{"user": user, "processes": 4, "memory": "2G", "saturating": False} for user in ("ann", "bob")],
            [([0], "mps", 4), ([1], "mps", 4)],
        ),
        # A GPU remains for the workload beside them.
        (
            "4xh100",
            [{"processes": 2, "gpus": 2, "memory": "20G"}, {"processes": 1, "memory": "6G"}],
            [([0, 1], "whole-gpu", 2), ([2], "whole-gpu", 1)],
        ),
        (
            "6xh100",
            [{"processes": 3, "gpus": 2, "memory": "20G"}, {"processes": 1, "memory": "6G"}],
            [([0, 1, 2, 3], "whole-gpu", 3), ([4], "whole-gpu", 1)],
        ),
        (
            "8xh100",
            [{"processes": 3, "gpus": 2, "memory": "20G"}, {"processes": 1, "memory": "6G"}],
            [([0, 1, 2, 3, 4, 5], "whole-gpu", 3), ([6], "whole-gpu", 1)],
        ),
        # Servers that have all GPUs each do not end: the second one would never start in a queue.
        (
            "4xh100",
            [{"processes": 2, "gpus": 4, "like": "serving", "memory": "30G", "users": "same"}],
            [([0, 1, 2, 3], "timeslice", 2)],
        ),
        # One process needs one GPU.
        ("4xl4", [{"processes": 1, "memory": "4G"}], [([0], "whole-gpu", 1)]),
    ],
)
def test_jobs_are_placed_on_the_host(host: str, works: list[dict[str, Any]], expected: list[Any]) -> None:
    assert where(placed(host, *works)) == expected


def test_consolidated_jobs_use_as_few_gpus_as_possible() -> None:
    work = {"processes": 4, "memory": "2G", **FARM}
    assert where(placed("8xh100", work)) == [([0, 1, 2, 3], "whole-gpu", 4)]
    assert where(placed("8xh100", work, consolidate=True)) == [([0], "mps", 4)]


def test_a_named_gpu_is_the_only_one() -> None:
    assert where(placed("8xh100", {"processes": 4, "memory": "2G", **FARM}, among=(0,))) == [([0], "mps", 4)]


def test_jobs_of_several_gpus_are_said_to_have_them() -> None:
    """Each gets its set, one after the other where there are fewer sets, or waits for GPUs that are in use."""
    answers = [advice_answer(placed("4xh100", {"processes": count, "gpus": 2, "users": "same"})) for count in (1, 2, 3)]
    assert [answer.answer for answer in answers] == [
        "2 whole GPUs",
        "2 GPUs for each",
        "2 at a time, each with 2 whole GPUs",
    ]
    assert advice_answer(placed("2xh100", {"processes": 2, "gpus": 2, "users": "same"})).answer == (
        "one at a time, each with 2 whole GPUs"
    )
    # One place, and parts whose jobs have different numbers of GPUs.
    assert advice_answer(placed("8xh100", {"gpus": 4}, {"processes": 1, "memory": "4G"})).answer == (
        "GPUs 0-3: 4 whole GPUs; GPU 4: the whole GPU"
    )
    assert answers[2].commands[0].command == "gpushare run -g 0-3 --gpus 2 --wait --memory 90% --over warn -- CMD"
    facts = facts_of("4xh100")
    busy = replace(facts, gpus=(facts.gpus[0], *(replace(gpu, processes=1) for gpu in facts.gpus[1:])))
    case = Case(workloads=(workload_of({"gpus": 2}),), root=True)
    waits = advice_answer(advise(Situation(case, busy, busy.gpus[0], table())))
    assert waits.conditions == ["of the GPUs with enough memory 1 is idle now: the job waits until it can have 2"]
    assert waits.commands[0].command == "gpushare run -g 0-3 --gpus 2 --wait --memory 90% --over warn -- CMD"
    mixed = advice_answer(placed("8xh100", {"gpus": 4}, {"processes": 6, "memory": "4G", **FARM}))
    assert mixed.answer == "GPUs 0-3: 4 whole GPUs; GPUs 4-7: MPS"


def test_jobs_of_several_gpus_are_not_packed_by_memory() -> None:
    """Each has its set for itself, so it reserves all of it: three of them would fit into the memory of one set."""
    line, *_ = advice_answer(placed("2xh100", {"processes": 6, "gpus": 2, "memory": "20G"})).commands
    assert line.command == "gpushare run -g 0-1 --gpus 2 --wait --memory 90% --over warn -- CMD"


def test_the_memory_line_is_about_the_gpus_of_the_verdict() -> None:
    answer = advice_answer(placed("4xh100", {"processes": 28, "memory": "1G", **FARM}))
    assert answer.memory.sentence.startswith("on each GPU, 7.0 GiB + 7 x ")
    assert advice_answer(placed("8xh100", {"processes": 8, "memory": "47G", **FARM})).memory.sentence is None


def test_each_has_its_own_gpu_for_certain() -> None:
    advice = placed("4xl4", {"processes": 4, "memory": "2G", **FARM})
    answer = advice_answer(advice)
    assert (answer.answer, answer.confidence) == ("a GPU for each", "high")
    assert "own-gpu" in {reason.rule for reason in advice.verdict_on(Way.WHOLE).reasons}
    assert [line.command for line in answer.commands] == [
        "gpushare run -g 0-3 --slice 2ms --wait --memory 90% --over warn -- CMD"
    ]


def test_many_unlike_jobs_are_placed_without_trying_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, part_of = [], place_module._judge_part

    def counted(situation: Situation) -> Any:
        judged.append(situation)
        return part_of(situation)

    monkeypatch.setattr(place_module, "_judge_part", counted)
    works = [
        {"memory": "20G", "saturating": True, "users": "same"},
        {"processes": 2, "memory": "6G", "users": "different", "latency": "40ms"},
        {"processes": 3, "memory": "10G", **FARM},
        {**APART, "memory": "30G"},
    ]
    assert placed("8xh100", *works).best is not None
    assert len(judged) < 1000


def test_unequal_instances_are_judged_by_the_documented_profiles_one_by_one() -> None:
    facts = facts_of("a100-80gb")
    gpu = replace(facts.gpus[0], layout=None, documented=facts.gpus[0].layout.profiles)  # type: ignore[union-attr]
    facts = replace(facts, gpus=(gpu,))
    for sizes, fits in (((30, 6, 6), True), ((30, 30, 6, 6), False), ((30, 30, 30), False)):
        works = [workload_of({"users": "different", "isolation": "full", "memory": f"{size}G"}) for size in sizes]
        situation = Situation(Case(workloads=tuple(works), root=True), facts, gpu, table())
        assert (situation.documented_why_not(Way.MIG) is None) is fits, sizes


@pytest.mark.parametrize(
    ("host", "memory", "most"),
    # Without documented places and memory; with places, and without the memory of all or of the large profiles.
    [("rtx-pro-5000", "9G", 2), ("thor", "20G", 3), ("b300", "60G", 4), ("b200", "80G", 2), ("b200", "40G", 4)],
)
def test_profiles_without_a_documented_memory_or_place_are_taken_at_their_best(
    host: str, memory: str, most: int
) -> None:
    facts = facts_of(host)
    model = named_model(facts.gpus[0].name)
    gpu = replace(facts.gpus[0], layout=None, documented=model.profiles)
    facts = replace(facts, gpus=(gpu,))
    work = {"memory": memory, "isolation": "fault"}
    fits = {
        number: Situation(
            Case(workloads=(workload_of({**work, "processes": number}),), root=True), facts, gpu, table()
        ).documented_why_not(Way.MIG)
        is None
        for number in (most, most + 1)
    }
    assert fits == {most: True, most + 1: False}


def test_a_refusal_by_documented_profiles_says_how_many_would_fit() -> None:
    facts = facts_of("rtx-pro-5000")
    gpu = replace(facts.gpus[0], layout=None, documented=named_model(facts.gpus[0].name).profiles)
    case = Case(workloads=(workload_of({"processes": 3, "memory": "9G", "isolation": "fault"}),), root=True)
    why_not = Situation(case, replace(facts, gpus=(gpu,)), gpu, table()).documented_why_not(Way.MIG)
    assert str(why_not).endswith("do not fit: 2 of 1g.24gb would")


def test_of_parts_of_equal_size_the_kind_that_is_judged_first_is_first() -> None:
    facts = facts_of("3xl40s")
    other_kind = replace(facts.gpus[0], compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
    facts = replace(facts, gpus=(other_kind, *facts.gpus[1:]))
    works = (
        workload_of({"name": "web", "memory": "8G", "role": "production"}),
        workload_of({"name": "batch", "processes": 6, "memory": "2G", "role": "opportunistic", "users": "different"}),
    )
    # GPU 1 is judged first: GPU 2 is of its kind.
    situation = Situation(Case(workloads=works, root=False), facts, facts.gpus[1], table())
    assert [part.situation.gpu.index for part in place(situation, separate=False)] == [2, 0, 1]


@pytest.mark.parametrize(("total", "size"), [(80 * GIB, " --memory 90% --over warn"), (None, "")])
def test_a_queue_claims_most_of_a_gpu_of_known_size(total: int | None, size: str) -> None:
    facts = facts_of("h100")
    facts = replace(facts, gpus=(replace(facts.gpus[0], memory_total_bytes=total),))
    case = Case(workloads=(workload_of({"processes": 2, "users": "same", "saturating": True}),), root=True)
    answer = advice_answer(advise(Situation(case, facts, facts.gpus[0], table())))
    assert [line.command for line in answer.commands if line.command] == [
        f"gpushare run -g 0 --slice 2ms --wait{size} -- CMD"
    ]
