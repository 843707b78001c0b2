"""The device plugin under the GPU operator: ready to use, valid, and refused where it cannot say it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, GpushareError, NotSupported
from gpushare.base.model import Gpu, Priority, TimeSlice, Way
from gpushare.base.units import GIB, MIB
from gpushare.export.containers import layout_name
from gpushare.export.description import HostDescription
from gpushare.export.k8s import operator_export, sharing_of_node
from gpushare.mig.parted import demands_in, parse_parted
from gpushare.mig.wish import parse_wish
from tests.errors import fails
from tests.export.hosts import T4_BYTES, check_kubernetes, gpu, host, loaded, mig, mps, t4s
from tests.export.plugin_config import from_config

MIG_HOST = host(gpu(0, Way.MIG, mig=tuple(mig(n) for n in range(7))), gpu(1, Way.MIG, mig=(mig(8, "3g.40gb"),)))


def plugin(found: Any, key: str) -> Any:
    return from_config(yaml.safe_load(loaded(found, "device-plugin-config.yaml")["data"][key]))


def test_time_slicing_is_ready_to_use() -> None:
    found = operator_export(t4s(replicas=4))
    assert check_kubernetes(found) == 2
    config = loaded(found, "device-plugin-config.yaml")
    assert list(config["data"]) == ["none", "timeslice-4"]
    assert plugin(found, "none").strategy is None
    assert plugin(found, "timeslice-4").replicas == {"nvidia.com/gpu": 4}
    patch = loaded(found, "cluster-policy-patch.yaml")
    assert patch["spec"] == {"devicePlugin": {"config": {"name": config["metadata"]["name"], "default": "none"}}}
    verify = loaded(found, "verify-gpu.yaml")["spec"]
    # One pod more than GPUs: it runs only if they are shared.
    assert verify["replicas"] == 5
    pod = verify["template"]["spec"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["nodeSelector"] == {"nvidia.com/device-plugin.config": "timeslice-4"}
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    said = "\n".join(found.commands)
    for part in (
        "--field-manager=gpushare-timeslice-4 -f device-plugin-config.yaml",
        "--type merge --patch-file cluster-policy-patch.yaml",
        "kubectl label node gpu01 nvidia.com/device-plugin.config=timeslice-4 --overwrite",
        "kubectl taint node gpu01 nvidia.com/gpu=true:NoSchedule",
        "kubectl rollout restart -n gpu-operator daemonset/nvidia-device-plugin-daemonset",
        "kubectl get events -n gpu-operator --sort-by=.lastTimestamp",
        "kubectl apply -f verify-gpu.yaml",
    ):
        assert part in said
    # Every file that a command names is there.
    names = {document.name for document in found.documents}
    assert {word for word in said.split() if word.endswith(".yaml")} == names


def test_a_number_nobody_said_is_said_to_be_chosen() -> None:
    found = operator_export(t4s())
    assert plugin(found, "timeslice-4").replicas == {"nvidia.com/gpu": 4}
    assert any("--replicas" in one for one in found.lost)
    assert not any("--replicas" in one for one in operator_export(t4s(replicas=4)).lost)


def test_in_another_namespace() -> None:
    found = operator_export(t4s(replicas=3), namespace="nvidia")
    assert loaded(found, "cluster-policy-patch.yaml")["spec"]["devicePlugin"]["config"]["default"] == "none"
    assert loaded(found, "device-plugin-config.yaml")["metadata"]["namespace"] == "nvidia"


def test_gpus_that_are_not_shared() -> None:
    found = operator_export(t4s(sharing=Way.EXCLUSIVE))
    assert check_kubernetes(found) == 2
    assert plugin(found, "whole").strategy is None
    assert loaded(found, "verify-gpu.yaml")["spec"]["replicas"] == 4


@pytest.mark.parametrize("limit", [None, T4_BYTES // 4])
def test_mps_with_the_equal_part(limit: int | None) -> None:
    found = operator_export(t4s(sharing=Way.MPS, mps=mps(25.0, memory_limit_bytes=limit)))
    assert check_kubernetes(found) == 2
    assert plugin(found, "mps-4").strategy == "mps"
    assert plugin(found, "mps-4").replicas == {"nvidia.com/gpu": 4}
    assert any("mps.capable" in need for need in found.needs)
    assert any("clients without a limit of threads or memory" in one for one in found.lost) is (limit is None)


def test_mps_without_limits_gets_some() -> None:
    lost = operator_export(t4s(sharing=Way.MPS, replicas=5, mps=mps(None, priority=Priority.LOW))).lost
    assert any("20 %" in one for one in lost)
    assert any("low priority" in one for one in lost)


def test_mig_mixed() -> None:
    found = operator_export(MIG_HOST)
    assert check_kubernetes(found) == 4
    policy = loaded(found, "cluster-policy-patch.yaml")["spec"]
    assert policy["mig"] == {"strategy": "mixed"}
    assert policy["migManager"] == {"config": {"name": "gpushare-mig-parted"}}
    # The same strategy in both places: which one wins is not settled upstream.
    assert plugin(found, "mig").mig is plugin(found, "none").mig is True
    configs = parse_parted(yaml.safe_load(loaded(found, "mig-parted-config.yaml")["data"]["config.yaml"]))
    disabled, name = configs
    assert (disabled, name) == ("all-disabled", layout_name(MIG_HOST))
    demands = demands_in(configs[name], [Gpu(index=index, mig_capable=True) for index in (0, 1)])
    assert [demand.wish for demand in demands.values()] == [parse_wish("1g.10gb*7"), parse_wish("3g.40gb")]
    limits = [
        loaded(found, name)["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for name in ("verify-mig-1g-10gb.yaml", "verify-mig-3g-40gb.yaml")
    ]
    assert limits == [{"nvidia.com/mig-1g.10gb": 1}, {"nvidia.com/mig-3g.40gb": 1}]
    # The success of an earlier layout must not pass for that of this one.
    forgotten, asked = (
        found.commands.index(f"kubectl label node gpu01 nvidia.com/{word}")
        for word in ("mig.config.state-", f"mig.config={name} --overwrite")
    )
    assert forgotten < asked
    assert "mig\\.config\\.state}'=success" in found.commands[asked + 1]


def test_other_nodes_keep_what_they_have() -> None:
    """One ConfigMap is for the whole cluster: what another host's export wrote there must not go, or mean another."""
    first, second = (
        operator_export(t4s(1, replicas=4)),
        operator_export(t4s(1, sharing=Way.MPS, replicas=4, mps=mps(None))),
    )
    for found in (first, second):
        assert "--server-side" in found.commands[0]
        assert found.commands[0].endswith("-f device-plugin-config.yaml")
    assert first.commands[0] != second.commands[0]
    cut = [host(gpu(0, Way.MIG, mig=tuple(mig(number) for number in range(count)))) for count in (2, 3)]
    labels = [next(one for one in operator_export(one).commands if "mig.config=" in one) for one in cut]
    assert [one.rpartition("=")[2] for one in labels] == [
        "gpushare-2x1g.10gb --overwrite",
        "gpushare-3x1g.10gb --overwrite",
    ]
    assert any("gpushare-mig-parted" in need for need in operator_export(cut[0]).needs)


def test_mig_shared_beside_shared_gpus() -> None:
    mixed = host(gpu(0, Way.MIG, mig=(mig(0, replicas=2), mig(1, replicas=2))), gpu(1, replicas=3))
    sharing = sharing_of_node(mixed)
    assert sharing.key == "mig-timeslice-2-3"
    assert sharing.replicas == {"nvidia.com/gpu": 3, "nvidia.com/mig-1g.10gb": 2}
    assert sharing.capacity(mixed) == {"nvidia.com/gpu": 3, "nvidia.com/mig-1g.10gb": 4}
    assert check_kubernetes(operator_export(mixed)) == 4


def with_mps(**changes: Any) -> HostDescription:
    return t4s(sharing=Way.MPS, mps=mps(changes.pop("percent", 25.0), **changes))


@pytest.mark.parametrize(
    ("described", "code", "hint"),
    [
        (host(gpu(0), gpu(1, Way.EXCLUSIVE)), "per_gpu", "gpushare export dra"),
        (host(gpu(0, replicas=2), gpu(1, replicas=3)), "per_gpu", "gpushare export dra"),
        (host(gpu(0), gpu(1, Way.MPS, mps=mps())), "per_gpu", "gpushare export dra"),
        (host(gpu(0, Way.MPS, mps=mps(25.0)), gpu(1, Way.MPS, mps=mps(50.0))), "per_gpu", "gpushare export dra"),
        (host(gpu(0), whole=False), "per_node", "gpushare export dra"),
        (t4s(time_slice=TimeSlice.LONG), "no_slice_length", "gpushare export dra"),
        (with_mps(percent=30.0), "uneven_limits", "gpushare export dra"),
        (with_mps(memory_limit_bytes=1 * GIB), "uneven_limits", "--memory 3840M"),
        (host(gpu(0, Way.MIG, mig=(mig(),)), gpu(1, Way.MPS, mps=mps())), "mps_beside_mig", "gpushare export dra"),
        (host(gpu(0, Way.MIG, mig=(mig(mps=mps()),))), "mps_on_mig", "gpushare export dra"),
        (host(gpu(0, Way.MIG, mig=(mig(0, "1c.3g.40gb"),))), "partial_compute_instance", "gpushare export slurm"),
        (host(gpu(0, Way.MIG, mig=(mig(0, replicas=2), mig(1)))), "per_gpu", "gpushare export dra"),
    ],
)
def test_what_the_plugin_cannot_say(described: HostDescription, code: str, hint: str) -> None:
    with fails(NotSupported, code, hint=hint):
        operator_export(described)


@pytest.mark.parametrize(
    ("described", "options", "code"),
    [
        (t4s(replicas=1), {}, "bad_replicas"),
        (with_mps(percent=2.0), {}, "bad_plugin_config"),
        (t4s(sharing=Way.MPS, mps=mps(None), replicas=17, compute_capability=(7, 0)), {}, "bad_plugin_config"),
        (t4s(), {"namespace": "default"}, "bad_namespace"),
        (t4s(), {"namespace": "A B"}, "bad_namespace"),
    ],
)
def test_what_is_wrong(described: HostDescription, options: dict[str, Any], code: str) -> None:
    with fails(BadUsage, code):
        operator_export(described, **options)


GPUS = st.builds(
    lambda sharing, replicas, level, percent, memory: {
        "sharing": sharing,
        "replicas": replicas,
        "time_slice": level,
        "mps": mps(percent, memory_limit_bytes=memory) if sharing is Way.MPS else None,
    },
    st.sampled_from([Way.TIMESLICE, Way.MPS, Way.EXCLUSIVE]),
    st.none() | st.integers(2, 60),
    st.none() | st.sampled_from(TimeSlice),
    st.none() | st.sampled_from([10.0, 20.0, 25.0, 33.0, 33.3, 50.0]),
    st.none() | st.integers(1, 16 * 1024).map(lambda number: number * MIB),
)


@given(st.lists(GPUS, min_size=1, max_size=3))
def test_a_host_is_said_as_it_is_or_refused(kinds: list[dict[str, Any]]) -> None:
    described = host(*(gpu(index, **kind) for index, kind in enumerate(kinds)))
    try:
        sharing = sharing_of_node(described)
        found = operator_export(described)
    except GpushareError as error:
        assert error.hint
        return
    read = plugin(found, sharing.key)
    assert read == sharing
    # Never another way of sharing than the host's, and the same one for all its GPUs.
    assert {one["sharing"] for one in kinds} == {
        {None: Way.EXCLUSIVE, "mps": Way.MPS, "timeSlicing": Way.TIMESLICE}[read.strategy]
    }
    for kind in kinds:
        number = dict(read.replicas).get("nvidia.com/gpu", 1)
        assert kind["replicas"] in {None, number} or kind["sharing"] is Way.EXCLUSIVE
        if kind["mps"] is not None:
            assert kind["mps"].limits.threads_percent in {None, 100 // number}
            assert kind["mps"].limits.memory_limit_bytes in {None, T4_BYTES // number // MIB * MIB}


def test_mps_restarts_its_control_daemon_too() -> None:
    shared = operator_export(t4s(sharing=Way.MPS, mps=mps(25.0)))
    restarts = [command for command in shared.commands if "rollout restart" in command]
    assert restarts[0].endswith("daemonset/gpu-feature-discovery daemonset/nvidia-device-plugin-mps-control-daemon")
    assert "mps-control-daemon" not in "\n".join(operator_export(t4s()).commands)
