"""Each rule both ways: a situation in which it speaks, and one in which it does not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpushare.advice.case import workload_of
from gpushare.advice.recipe import recipe
from gpushare.advice.rules import Kind, Outcome, Reason, WayVerdict, rules, verdicts
from gpushare.base.errors import BadUsage
from gpushare.base.model import ComputeMode, Holder, TimeSlice, Way
from gpushare.base.units import GIB
from gpushare.mig.profile import ComputeInstance, GpuInstance
from tests.advice.conftest import facts_of, situation_of

FOUR = {"processes": 4, "users": "same", "saturating": False}
RANKS = {**FOUR, "cooperating": True}
PAIR = ({"role": "production"}, {"role": "opportunistic"})


@dataclass(frozen=True)
class Example:
    """One situation: workloads, host, and what is different there."""

    workloads: tuple[dict[str, Any], ...]
    host: str = "a100-80gb"
    facts: dict[str, Any] = field(default_factory=dict)
    root: bool | None = None


def of(*workloads: dict[str, Any], **named: Any) -> Example:
    return Example(workloads or (FOUR,), **named)


def four(**more: Any) -> Example:
    return Example(({**FOUR, **more},))


def one(facts: dict[str, Any] | None = None, **more: Any) -> Example:
    return Example(({"processes": 1, **more},), facts=facts or {})


def short(**more: Any) -> Example:
    """Return two jobs that do not fit at the same time."""
    return Example(({"processes": 2, "memory": "60G", "users": "same", **more},))


def short_on(facts: dict[str, Any]) -> Example:
    return replace(short(), facts=facts)


SHORT = short()
SHORT_PAIR = of(*({**job, "memory": "60G", "users": "same"} for job in PAIR))
OLD = {"compute_capability": (6, 0)}
NEW = {"driver": "595.45.04", "mps_version": 13020}
ON = {"mig_enabled": True}


def held() -> dict[str, Any]:
    """Return the facts of an A100 in whose one instance, the whole of it, somebody may be."""
    layout = facts_of("a100-80gb").gpus[0].layout
    whole = next(profile for profile in layout.profiles if profile.name == "7g.80gb")
    assert whole.placements
    instance = GpuInstance(id=0, profile=whole, placement=whole.placements[0], holders=None)
    return {**ON, "layout": replace(layout, instances=(instance,))}


def with_foreign() -> dict[str, Any]:
    """Return the facts of an A100 with one idle instance that gpushare did not make."""
    facts = held()
    layout = facts["layout"]
    return {**facts, "layout": replace(layout, instances=(replace(layout.instances[0], holders=()),))}


SHUT = {"compute_mode": ComputeMode.EXCLUSIVE_PROCESS}
FULL = {"processes": 1, "memory_used_bytes": 50 << 30}
GRAPHICS = "rtx-pro-6000-blackwell"

# rule: the way that it speaks of, where it speaks, where it does not.
EXAMPLES: dict[str, tuple[str, Example, Example]] = {
    "production-milliseconds-apart": ("mig", of({**PAIR[0], "latency": "4ms"}, PAIR[1]), of(*PAIR)),
    "queue-of-sessions": ("whole-gpu", four(pattern="interactive"), four(pattern="steady")),
    "ranks-in-turn": ("whole-gpu", short(cooperating=True), short()),
    "several-gpus": ("whole-gpu", four(gpus=2), four()),
    "several-gpus-one-way": ("mig", four(gpus=2), four()),
    "too-few-gpus": ("timeslice", four(gpus=2), replace(four(gpus=2), host="2xt4")),
    # vetoes
    "mig-not-there": ("mig", of(host="t4"), of()),
    "mig-needs-root": ("mig", of(facts={"root": False}, root=False), of(facts={"root": True})),
    "mig-stays-on": ("mps", of(facts=held()), of(facts=ON)),
    "mig-occupied": ("mig", of(facts={"processes": 1}), four(occupied=False)),
    "peers-inside": ("whole-gpu", Example(({**FOUR, "nccl": True},), facts={"instance": "MIG-1"}), four(nccl=True)),
    "exclusive": ("timeslice", of(facts=SHUT, root=False), of(facts=SHUT, root=True)),
    "nccl": ("mig", four(nccl=True), four(nccl=False)),
    "graphics": ("mig", four(graphics=True), four()),
    "profiler": ("mps", four(profiler=True), four(profiler=False)),
    "mig-too-small": ("mig", of({"processes": 8}), of({"processes": 7})),
    "mps-other-users": ("mps", four(users="different"), four()),
    "mps-other-users-inside": ("mig+mps", four(users="different"), four(users="different", groups=2)),
    "mps-clients": ("mps", of({**RANKS, "processes": 49}), of({**RANKS, "processes": 48})),
    "mps-not-installed": ("mps", of(facts={"mps_program": False}), of()),
    "mps-dynamic-parallelism": ("mps", four(dynamic_parallelism=True), four()),
    "mps-limits-before-volta": (
        "mps",
        of({**FOUR, "isolation": "quota"}, host="t4", facts=OLD),
        of({**FOUR, "isolation": "quota"}, host="t4"),
    ),
    "mps-shares-before-volta": ("mps-priority", of(host="t4", facts=OLD), of(host="t4")),
    "mps-static-old": ("mps-static", of(), of(facts=NEW)),
    "streams-need-code": ("streams", one(code=False), one(code=True)),
    "streams-running": ("streams", one(running=True), one(running=False)),
    "vgpu-not-there": ("vgpu", of({"vms": True}, facts={"vgpu_capable": False}), of({"vms": True})),
    "vgpu-no-vms": ("vgpu", four(vms=False), four(vms=True)),
    "memory-sum": ("timeslice", four(memory="20G", cooperating=True), four(memory="20G")),
    "memory-one": ("whole-gpu", one(memory="79G"), one(memory="77G")),
    "memory-one-shared": ("timeslice", one(memory="79G"), one(memory="77G")),
    "progress-queue": ("whole-gpu", four(progress=True), four()),
    "managed-paging": ("whole-gpu", one(memory="79G", managed_memory=True), one(memory="77G", managed_memory=True)),
    "faults-without-mig": ("timeslice", of({**FOUR, "isolation": "fault"}, host="t4"), of(host="t4")),
    "prohibited": ("mps", of(facts={"root": False, "compute_mode": ComputeMode.PROHIBITED}), of()),
    # conditions
    "mig-busy": ("mig", Example(({**FOUR, "occupied": False},), facts={"processes": 1}), of(facts={"processes": 0})),
    "mig-profiles-unknown": ("mig", of(facts={"layout": None}), of()),
    "mig-is-on": ("mps", of(facts=ON), of()),
    "mps-serves": ("timeslice", of(facts={"mps_daemons": 1}), of()),
    "no-room-now": ("timeslice", Example(({"processes": 1, "memory": "40G"},), facts=FULL), one(memory="40G")),
    "mps-beside-others": ("mps", one(facts={"processes": 1}), one()),
    "mig-of-virtual-machines": ("mig", of({"vms": True}, facts={"vgpu_capable": False}), of({"vms": True})),
    "sessions-in-a-queue": ("whole-gpu", four(pattern="interactive", isolation="fault"), four(pattern="interactive")),
    "phases": ("fix-app", short(cooperating=True, progress=True), short(cooperating=True)),
    "in-use-now": ("whole-gpu", Example(({"processes": 1, "memory": "40G"},), facts=FULL), one(memory="40G")),
    "in-turns": ("timeslice", four(memory="20G"), four(memory="19G")),
    "whole-together": ("whole-gpu", four(nccl=True), four(nccl=False)),
    "timeslice-compute-mode": ("timeslice", of(facts={"compute_mode": ComputeMode.EXCLUSIVE_PROCESS}), of()),
    "memory-tight": ("timeslice", of({**FOUR, "memory": "19700M"}), four(memory="19G")),
    "mps-memory-tight": ("mps", four(memory="19G"), four(memory="18G")),
    "mig-ipc": ("mig+mps", four(ipc=True), four(ipc=False)),
    "mps-without-limits": ("mps", of(host="t4", facts=OLD), of(host="t4")),
    "mps-containers": ("mps", four(containers=True), four()),
    "priority-needs-pair": ("mps-priority", four(), of(*PAIR)),
    "mig-fixed-sizes": ("mig", four(weights="30:20:20:30"), four()),
    "mig-sms-short": ("mig", of({**FOUR, "processes": 2, "sms": 44}), of({**FOUR, "processes": 2, "sms": 42})),
    "one-engine": ("fix-app", four(replicas=True, cuda_graphs=True), four(replicas=True)),
    "multi-model-streams": ("streams", one(needs="multi-model", code=True), one(needs="multi-model")),
    "multi-model": ("whole-gpu", of({"needs": "multi-model"}), one()),
    "resizing": ("mps", four(resizing=True), four()),
    "resizing-time": ("timeslice", four(resizing=True), four()),
    "resizing-idle": ("mig", four(resizing=True), four()),
    "mps-bandwidth": ("mps", four(bandwidth_bound=True), four()),
    "bandwidth-bound": ("mig", four(bandwidth_bound=True), four()),
    "bandwidth-in-turn": ("whole-gpu", four(bandwidth_bound=True), four()),
    "bandwidth-bound-mps": ("mps", four(bandwidth_bound=True), of(PAIR[0], {**PAIR[1], "bandwidth_bound": True})),
    "priority-bandwidth": ("mps-priority", four(bandwidth_bound=True), four()),
    "nccl-sharing": ("mps", four(nccl=True), four()),
    "inside-needs-groups": ("mig+mps", four(), four(groups=2)),
    "measure-needs-program": ("measure", four(), four(cuda_graphs=True)),
    "fix-only-io": ("fix-app", four(io_bound=False), four(io_bound=True)),
    # requirements of the table
    "several-processes": ("streams", four(), one()),
    "fault-isolation": ("mps", four(isolation="fault"), four(isolation="quota")),
    "memory-quota": ("timeslice", four(isolation="quota"), four(isolation="none")),
    "full-isolation-memory": ("timeslice", four(isolation="full"), four(isolation="fault")),
    "full-isolation-faults": ("mps", four(isolation="full"), four(isolation="quota")),
    "full-isolation-sm": ("mps", four(isolation="full"), four(isolation="fault")),
    "bandwidth-qos": ("mps", four(bandwidth_qos=True), four(bandwidth_qos=False)),
    "untrusted": ("mps", four(trusted=False), four(trusted=True)),
    "weights": ("timeslice", four(weights=True), four()),
    "vms": ("mps", four(vms=True), four()),
    "ipc": ("mig", four(ipc=True), four()),
    "running": ("mps", four(running=True), four(running=False)),
    "latency": ("mps", four(latency="20ms"), four(latency="none")),
    "containment": ("timeslice", four(containment=True), four()),
    # preferences
    "one-process": ("whole-gpu", one(), four()),
    "one-process-own-code": ("streams", one(code=True), one()),
    "small-same-user": ("mps", four(), four(saturating=True)),
    "small-maybe-same-user": ("mps", of({"processes": 4, "saturating": False}), four()),
    "cooperating": ("mps", four(cooperating=True), four()),
    "small-batch": ("mps", four(pattern="steady"), four(pattern="bursty")),
    "latency-own-part": ("mig", four(latency="20ms"), four(latency="no")),
    "latency-alone": ("whole-gpu", four(latency="20ms"), four()),
    "latency-jitter": ("timeslice", four(latency="yes"), four()),
    "bandwidth": ("mig", four(bandwidth_qos=True), four()),
    "other-users-production": ("mig", four(users="different"), four()),
    "bursty": ("timeslice", four(pattern="interactive"), four(pattern="steady")),
    "older-or-many": ("timeslice", of({"processes": 4, "users": "different"}, host="t4"), four(users="different")),
    "groups-together": ("mig+mps", four(groups=2), four()),
    "groups-interactive": ("mig+timeslice", four(groups=2, pattern="interactive"), four(groups=2)),
    "half-a-gpu": ("mig", four(memory="20G"), four(memory="40G")),
    "half-a-gpu-alone": ("mig", one(saturating=False, memory="8G"), one(saturating=False, memory="60G")),
    "saturating": ("whole-gpu", four(saturating=True), four()),
    "production-pair": ("mps-priority", of(*PAIR), four()),
    "production-plain-mps": ("mps", of(*PAIR), four()),
    "production-apart": ("mig", of(*PAIR), four()),
    "production-first": ("whole-gpu", of(*PAIR), of({**PAIR[0], "users": "different"}, PAIR[1])),
    "production-other-users": ("timeslice", of({**PAIR[0], "users": "different"}, PAIR[1]), of(*PAIR)),
    "production-gaps": ("slices", of({**PAIR[0], "gaps": True}, PAIR[1]), of({**PAIR[0], "latency": "10ms"}, PAIR[1])),
    "production-slices": ("slices", of(*PAIR), of({**PAIR[0], "gaps": True}, PAIR[1])),
    "production-no-gaps": ("slices", of({**PAIR[0], "gaps": False}, PAIR[1]), of(*PAIR)),
    "slices-old-driver": ("slices", of(*PAIR, facts={"driver": "470.82"}), of(*PAIR)),
    "slices-no-vms": ("slices", of(*PAIR, {"vms": True}), of(*PAIR)),
    "slices-latency": ("slices", of({**PAIR[0], "latency": "10ms"}, PAIR[1]), of(*PAIR)),
    "weights-slices": ("slices", four(weights=True, users="different"), four(weights=True)),
    "weights-bandwidth": ("slices", four(weights=True, bandwidth_bound=True), four(weights=True)),
    "slices-need-pair": ("slices", four(), of(*PAIR)),
    "slices-whose": ("slices", of({**PAIR[0], "users": "different"}, PAIR[1], root=False), of(*PAIR)),
    "slices-unofficial": ("slices", of(*PAIR), four()),
    "slices-in-instance": ("slices", of(*PAIR, facts={"instance": "MIG-1"}), of(*PAIR)),
    "joins-others": ("timeslice", one(users="different", facts={"processes": 1}), one(users="different")),
    "production-fills": ("whole-gpu", of({**PAIR[0], "saturating": True}, PAIR[1]), of(*PAIR)),
    "mps-there-already": ("mps", of(facts={"mps_daemons": 1}), of()),
    "production-time": ("timeslice", of(*PAIR), four()),
    "production-bandwidth": ("mig", of(PAIR[0], {**PAIR[1], "bandwidth_bound": True}), of(*PAIR)),
    "production-bandwidth-cap": ("mps-priority", of(PAIR[0], {**PAIR[1], "bandwidth_bound": True}), of(*PAIR)),
    "kept-in-share": ("mps-static", four(containment=True), four()),
    "cuda-graphs": ("measure", four(cuda_graphs=True), four(cuda_graphs=True, isolation="fault")),
    "waits-for-input": ("fix-app", four(io_bound=True), four()),
    "one-virtual-machine": ("whole-gpu", one(vms=True), four(vms=True)),
    "virtual-machines": ("vgpu", four(vms=True), four()),
    "not-trusted": ("mig", four(trusted=False), four()),
    "not-trusted-time": ("timeslice", four(trusted=False), four()),
    "isolated": ("mig", four(isolation="fault"), four(isolation="quota")),
    "quota": ("mps", four(isolation="quota"), four()),
    "needs-peers": ("whole-gpu", four(p2p=True), four()),
    "profiled-alone": ("whole-gpu", four(profiler=True), four()),
    "runs-already": ("timeslice", four(running=True), four()),
    "queue-of-people": ("whole-gpu", four(pattern="interactive"), four()),
    "one-process-shares": ("mps", one(), four()),
    # -- jobs that leave the GPU
    "leaving-one": ("turns", one(), SHORT),
    "leaving-fits": ("turns", of({"processes": 2, "memory": "6G"}), SHORT),
    "leaving-driver": ("turns", short_on({"driver": "565.57"}), SHORT),
    "leaving-instance": ("swap", short_on({"instance": "MIG-1"}), SHORT),
    "leaving-peers": ("turns", short(nccl=True), SHORT),
    "leaving-ipc": ("turns", short(ipc=True), SHORT),
    "leaving-managed": ("swap", short(managed_memory=True), SHORT),
    "leaving-together": ("turns", short(cooperating=True), SHORT),
    "leaving-vms": ("turns", short(vms=True), SHORT),
    "leaving-containers": ("turns", short(containers=True), SHORT),
    "leaving-running": ("swap", short(running=True), SHORT),
    "leaving-host-memory": ("turns", short_on({"host_memory_bytes": 100 * GIB}), SHORT),
    "leaving-latency": ("turns", short(latency="20ms"), SHORT),
    "leaving-apart": ("turns", short(trusted=False), SHORT),
    "leaving-refused": ("turns", SHORT, short(nccl=False, ipc=False, managed_memory=False)),
    "leaving-quota": ("swap", short(isolation="quota"), SHORT),
    "leaving-cost": ("turns", SHORT, of({"processes": 2, "memory": "6G"})),
    "turns-production": ("turns", SHORT_PAIR, SHORT),
    "turns-progress": ("turns", short(progress=True), SHORT),
    "turns-people": ("turns", short(users="different", pattern="steady"), short(pattern="steady")),
    "turns-interactive": ("turns", short(pattern="interactive"), SHORT),
    "turns-short": ("turns", short(pattern="bursty"), SHORT),
    "queue-shortest": ("whole-gpu", SHORT, short(progress=True)),
    "swap-who": ("swap", SHORT, SHORT_PAIR),
    "swap-foreign-production": (
        "swap",
        of(*({**job, "user": user} for job, user in zip(SHORT_PAIR.workloads, ("ann", "bob"), strict=True))),
        SHORT_PAIR,
    ),
    "swap-production": ("swap", SHORT_PAIR, SHORT),
    "swap-production-too-large": (
        "swap",
        of({**SHORT_PAIR.workloads[0], "processes": 2}, SHORT_PAIR.workloads[1]),
        SHORT_PAIR,
    ),
    "swap-idle": ("swap", short(pattern="interactive"), SHORT),
    "profiler-shared": ("timeslice", four(profiler=True), one(profiler=True)),
    "kubernetes-mps-mig": ("mig+mps", four(kubernetes=True), four(containers=True)),
    "kubernetes-host": ("slices", four(kubernetes=True), four(containers=True)),
    "kubernetes-weights": ("mps", four(kubernetes=True, weights=True), four(kubernetes=True)),
    "kubernetes-mps-replicas": ("mps", four(kubernetes=True, processes=60), four(kubernetes=True)),
    "pods-idle": (
        "timeslice",
        four(kubernetes=True, processes=300, memory="100M", pattern="interactive"),
        four(kubernetes=True, pattern="interactive"),
    ),
    "production-milliseconds": ("mps-priority", of({**PAIR[0], "latency": "4ms"}, PAIR[1]), of(*PAIR)),
    "server-queue": ("whole-gpu", four(server=True), one(server=True)),
    "fix-no-code": ("fix-app", four(code=False), four(code=True)),
    "idle-instances-first": ("whole-gpu", one(facts=with_foreign(), saturating=True), one(facts=with_foreign())),
    "slices-need-gaps": ("slices", of(*PAIR), of({**PAIR[0], "gaps": True}, PAIR[1])),
    "queue-no-shares": ("whole-gpu", four(weights=True), four()),
    "slices-shares-idle": ("slices", four(weights=True), four(weights=True, saturating=True)),
    "mps-if-small": ("mps", four(saturating=True), four()),
    "maybe-small": ("mps", of({"processes": 4, "users": "same"}), four()),
    "maybe-small-maybe-same-user": ("mps", of({"processes": 4}), of({"processes": 4, "users": "same"})),
    "production-bandwidth-alone": ("whole-gpu", of(PAIR[0], {**PAIR[1], "bandwidth_bound": True}), of(*PAIR)),
    "not-trusted-alone": ("whole-gpu", four(trusted=False), four()),
    "waits-for-input-shared": ("mps", four(io_bound=True, code=False), four(io_bound=True)),
    "servers-do-not-fit": ("fix-app", short(server=True), SHORT),
    "servers-do-not-fit-awake": ("fix-app", short(server=True, latency="20ms"), short(server=True)),
    # of the engine itself
    "nothing-to-compare": ("measure", four(memory="30G", cooperating=True), four()),
}
RULES = rules()
# Of several GPUs: tests/advice/test_place.py.
IDS = sorted(
    {rule.id for rule in RULES} - {"own-gpu", "own-gpus", "several-gpus-in-use", "unlike-gpus"} | {"nothing-to-compare"}
)


def verdict(example: Example, way: str) -> WayVerdict:
    made = situation_of(*example.workloads, host=example.host, facts=example.facts, root=example.root)
    return next(found for found in verdicts(made) if found.way is Way(way))


def spoken(found: WayVerdict, rule: str) -> list[Reason]:
    return [reason for reason in found.reasons if reason.rule == rule and not reason.open]


def test_every_rule_has_its_examples() -> None:
    assert sorted(EXAMPLES) == IDS


@pytest.mark.parametrize("rule", IDS)
def test_a_rule_speaks(rule: str) -> None:
    way, example, _ = EXAMPLES[rule]
    found = verdict(example, way)
    (reason,) = spoken(found, rule)
    assert reason.text
    assert "{" not in reason.text
    assert reason.source
    if reason.kind is Kind.VETO:
        assert found.outcome is Outcome.REFUSED
    elif reason.kind is Kind.CONDITION:
        assert found.outcome is not Outcome.FITS


@pytest.mark.parametrize("rule", IDS)
def test_a_rule_is_silent(rule: str) -> None:
    way, _, example = EXAMPLES[rule]
    assert spoken(verdict(example, way), rule) == []


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        ("mps-other-users", "mps"),
        ("fault-isolation", "mps"),
        ("streams-need-code", "streams"),
        ("vgpu-no-vms", "vgpu"),
        ("fix-only-io", "fix-app"),
    ],
)
def test_an_open_question_is_a_condition(rule: str, way: str) -> None:
    found = verdict(of({"processes": 1 if way == "streams" else 2}), way)
    if way == "mps":
        assert found.outcome is Outcome.CONDITION
    assert rule in {reason.rule for reason in found.reasons if reason.open and reason.kind is Kind.CONDITION}


def test_a_gpu_with_graphics_profiles_takes_graphics() -> None:
    example = of({"processes": 2, "graphics": True}, host=GRAPHICS)
    assert "graphics" not in {reason.rule for reason in verdict(example, "mig").reasons}


def test_the_undo_goes_back_to_the_mode_and_level_of_now() -> None:
    case = {"processes": 4, "users": "different", "pattern": "interactive"}
    for level, more in ((TimeSlice.MEDIUM, ["nvidia-smi compute-policy -i 0 --set-timeslice 2"]), (None, [])):
        facts = {"ask_levels": {0: level}.copy, "compute_mode": ComputeMode.EXCLUSIVE_PROCESS}
        made = recipe(situation_of(case, facts=facts), Way.TIMESLICE)
        assert [line.command for line in made.undo] == ["gpushare timeslice reset -g 0", *more]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"processes": 2, "groups": 5}, "5 groups of 2 processes"),
        ({"isolation": "none,fault"}, "combines none with others"),
        ({"isolation": "nothing"}, "'nothing' is not a valid value for isolation"),
        ({"weights": "some"}, "'some' is not a valid value for weights"),
        ({"weights": "30:0"}, "shares of 30:0 are not possible"),
        ({"weights": "30:x"}, "'30:x' are not shares"),
        ({"weights": "30:70", "processes": 3}, "2 shares for 3 processes"),
        ({"weights": []}, "'' are not shares"),
        ({"weights": "1:999:999:999"}, "of the shares 1:999:999:999, the smallest rounds to 0 %"),
        ({"weights": ":".join(["1"] * 2001)}, "the smallest rounds to 0 %"),
    ],
)
def test_workloads_that_contradict_themselves(words: dict[str, Any], message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        workload_of(words)


def with_instances(*busy: bool) -> dict[str, Any]:
    """Return the facts of an A100 with MIG on and one 3g.40gb for each of these; somebody is in the busy ones."""
    layout = facts_of("a100-80gb").gpus[0].layout
    half = next(profile for profile in layout.profiles if profile.name == "3g.40gb")
    in_use = (Holder(pid=7, what="lease"),)
    assert half.placements
    there = tuple(
        GpuInstance(
            id=number,
            profile=half,
            placement=half.placements[number],
            compute=(ComputeInstance(id=0, profile=half.filling_compute, holders=in_use if is_busy else ()),),
        )
        for number, is_busy in enumerate(busy)
    )
    return {**ON, "layout": replace(layout, instances=there)}


@pytest.mark.parametrize(
    ("busy", "needed"),
    [(None, True), ((False, False), False), ((False,), True), ((False, True), True)],
    ids=["mig is off", "two idle", "one idle", "one of two is busy"],
)
def test_root_is_needed_only_where_idle_instances_do_not_serve(busy: tuple[bool, ...] | None, needed: bool) -> None:
    facts = {} if busy is None else with_instances(*busy)
    example = of({"processes": 2, "users": "same", "saturating": False}, facts=facts, root=False)
    assert bool(spoken(verdict(example, "mig"), "mig-needs-root")) is needed


def test_a_gpu_that_is_divided_already_need_not_be_idle() -> None:
    assert spoken(verdict(of(facts={"processes": 1}), "mig"), "mig-busy")
    assert not spoken(verdict(of(facts={**ON, "processes": 1}), "mig"), "mig-busy")


def test_what_one_process_lacks_is_said_in_numbers() -> None:
    (reason,) = spoken(verdict(one(memory="100G"), "whole-gpu"), "memory-one")
    needed, total, over = re.findall(r"[\d.]+ GiB", reason.text)
    assert float(needed.split()[0]) >= 100
    assert float(total.split()[0]) == pytest.approx(80, abs=2)
    assert float(over.split()[0]) == pytest.approx(float(needed.split()[0]) - float(total.split()[0]), abs=2)


def test_a_rule_has_an_id_of_its_own() -> None:
    ids = [rule.id for rule in RULES]
    assert sorted(set(ids)) == sorted(ids)


def test_how_many_are_in_the_way_and_which_mode_is_said() -> None:
    for count, text in ((1, "work on it: 1 process"), (3, "work on it: 3 processes")):
        (reason,) = spoken(verdict(of(facts={"processes": count}), "mig"), "mig-busy")
        assert text in reason.text
    mode = ComputeMode.EXCLUSIVE_PROCESS
    (reason,) = spoken(verdict(of(facts={"compute_mode": mode}), "timeslice"), "timeslice-compute-mode")
    assert mode.title in reason.text


def test_memory_that_does_not_fit_at_all_is_not_called_tight() -> None:
    for memory in ("30G", None):
        example = of({**FOUR, "memory": memory} if memory else FOUR)
        assert not spoken(verdict(example, "mps"), "mps-memory-tight")


def test_what_all_lack_together_is_said_in_numbers() -> None:
    (reason,) = spoken(verdict(four(memory="30G", cooperating=True), "timeslice"), "memory-sum")
    needed, total, short = (float(one.split()[0]) for one in re.findall(r"[\d.]+ GiB", reason.text))
    assert needed >= 120
    assert total == pytest.approx(80, abs=2)
    assert short == pytest.approx(needed - total, abs=3)
    assert "2 fit at the same time" in reason.text


@pytest.mark.parametrize(
    ("example", "rule", "way", "other"),
    [
        (four(latency="20ms"), "latency-own-part", "mig", "latency-alone"),
        (four(latency="20ms"), "latency-alone", "whole-gpu", "latency-own-part"),
    ],
)
def test_a_reason_is_about_its_own_way(example: Example, rule: str, way: str, other: str) -> None:
    rules = {reason.rule for reason in verdict(example, way).reasons}
    assert rule in rules
    assert other not in rules
