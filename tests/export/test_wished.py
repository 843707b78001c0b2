"""The host as gpushare.yaml wants it, for other engines: every word of the file arrives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare.base.errors import NotFound, NotSupported
from gpushare.base.model import ComputeMode, Priority, TimeSlice, Way
from gpushare.base.units import GIB
from gpushare.export import containers, dra, k8s, slurm
from gpushare.export.description import HostDescription, MigDescription, as_wished, with_live_devices
from gpushare.export.k8s import sharing_of_node
from gpushare.gpu_models import find_model
from gpushare.hostfile.parse import parse
from tests.errors import fails
from tests.export.hosts import check_kubernetes, gpu, host, mig, mps

PROFILES = find_model("h100-80gb").profiles
H100S = host(*(gpu(index, name="NVIDIA H100 80GB HBM3", mig_capable=True) for index in range(4)))


def read(*entries: str, described: HostDescription = H100S) -> HostDescription:
    """Return the host with these ways of sharing, one per GPU."""
    lines = [f"- {{match: {{index: {index}}}, {entry}}}" for index, entry in enumerate(entries)]
    parsed = parse("version: 1\ngpus:\n" + "\n".join(lines) + "\n", "x")
    by_index = {int(entry.match.values[0]): entry for entry in parsed.entries}
    return as_wished(described, by_index, dict.fromkeys(by_index, PROFILES))


def test_each_way_of_sharing() -> None:
    parsed = read(
        "timeslice: long", "mps: {threads: 25, memory: 4G, priority: low, exclusive: true}", "exclusive: true"
    )
    sliced, clients, alone, untouched = parsed.gpus
    assert (sliced.sharing, sliced.time_slice) == (Way.TIMESLICE, TimeSlice.LONG)
    assert (clients.mps.limits.threads_percent, clients.mps.limits.memory_limit_bytes) == (25.0, 4 * GIB)
    assert clients.mps.limits.priority is Priority.LOW
    assert clients.compute_mode is alone.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    assert alone.sharing is Way.EXCLUSIVE
    # No entry is for it.
    assert untouched == H100S.gpus[3]
    # What was there before and is not wished for is gone.
    before = host(gpu(0, Way.MIG, mig=(mig(),)), gpu(1, Way.MPS, mps=mps(), time_slice=TimeSlice.LONG))
    assert read("timeslice: default", described=before).gpus[0].mig == ()
    assert read("exclusive: true", "exclusive: true", described=before).gpus[1].mps is None


def test_mig_by_size_with_parts_and_sharing_inside() -> None:
    parsed = read(
        'mig: ["3g:4", {wish: "1g*2", mps: {threads: 50}}, "1c.2g.20gb*2", {wish: "1g.10gb", name: dev}]'
    ).gpus[0]
    assert [(instance.profile, instance.start, instance.name) for instance in parsed.mig] == [
        ("3g.40gb", 4, None),
        ("1g.10gb", None, None),
        ("1g.10gb", None, None),
        ("1c.2g.20gb", None, None),
        ("1c.2g.20gb", None, None),
        ("1g.10gb", None, "dev"),
    ]
    assert [instance.mps is not None for instance in parsed.mig] == [False, True, True, False, False, False]
    assert [instance.index for instance in parsed.mig] == list(range(6))


def test_a_profile_that_the_gpu_never_has() -> None:
    with fails(NotSupported, "mig_profile_unknown"):
        read('mig: ["9g.99gb"]')


def test_engines_take_it() -> None:
    alike = read(*['mig: ["1g.10gb*7"]'] * 4)
    shared = (replace(gpu, mig=tuple(replace(each, replicas=2) for each in gpu.mig)) for gpu in alike.gpus)
    alike = replace(alike, gpus=tuple(shared))
    assert sharing_of_node(alike).capacity(alike) == {"nvidia.com/mig-1g.10gb": 56}
    assert check_kubernetes(k8s.operator_export(alike)) == 3
    # Each device is shared by its own pods, so each has its own claim.
    claims = [
        document.name for document in dra.claims_export(alike).documents if not document.name.startswith("verify-")
    ]
    assert len(claims) == len(set(claims)) == 28
    assert check_kubernetes(dra.claims_export(alike)) == 56
    plain = read(*['mig: ["1g.10gb*7"]'] * 4)
    assert containers.mig_config(plain, "x")["mig-configs"]["x"] == [
        {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 7}}
    ]
    assert "gpu:nvidia_h100_80gb_hbm3_1g.10gb:28" in slurm.slurm_export(plain).documents[1].text
    with fails(NotSupported, "no_capabilities"):
        # What is not there yet has no device nodes.
        slurm.slurm_export(plain, autodetect="off")


# -- the devices that are there --------------------------------------------------------------------


def found_in(live: HostDescription, *entries: str, daemons_only: bool = False) -> HostDescription:
    """Return the host of the file with the devices that are there."""
    wanted = read(*entries, described=live)
    return with_live_devices(
        wanted, live, lambda uuid: f"/pipe/{uuid}", apply="gpushare apply -f x", daemons_only=daemons_only
    )


def divided(*there: MigDescription) -> HostDescription:
    return host(gpu(0, Way.MIG, mig=there))


def numbers(found: HostDescription) -> list[int]:
    """Return the numbers of the devices that `mig` made, in the order of the file."""
    return [int(instance.uuid[4:12], 16) for instance in found.gpus[0].mig]


HALVES = (mig(0, "3g.40gb"), mig(4, "3g.40gb"))


@pytest.mark.parametrize("entry", ['mig: ["3g.40gb", "3g.40gb:0"]', 'mig: ["3g.40gb", {wish: "3g.40gb:0", name: a}]'])
def test_what_has_a_place_is_found_there_whatever_stands_before_it(entry: str) -> None:
    assert numbers(found_in(divided(*HALVES), entry)) == [4, 0]


def test_a_daemon_is_looked_for_where_it_runs() -> None:
    """As `gpushare apply` does: else an export would start a second one in the other device."""
    pipe = "/run/gpushare/mps/MIG/pipe"
    there = divided(HALVES[0], replace(HALVES[1], mps=mps(50.0, pipe_directory=pipe)))
    for entry, order in (
        ('mig: [{wish: 3g.40gb, mps: {threads: 50}}, "3g.40gb"]', [4, 0]),
        ('mig: ["3g.40gb", {wish: 3g.40gb, mps: {threads: 50}}]', [0, 4]),
        ('mig: ["3g.40gb", {wish: 3g.40gb, mps: {threads: 25}}]', [0, 4]),
    ):
        found = found_in(there, entry)
        assert numbers(found) == order
        (daemon,) = [instance.mps for instance in found.gpus[0].mig if instance.mps is not None]
        assert daemon.pipe_directory == pipe


def test_a_daemon_that_is_not_up_yet_listens_where_it_will() -> None:
    found = found_in(divided(*HALVES), 'mig: ["3g.40gb:0", {wish: "3g.40gb:4", mps: {threads: 50}}]')
    plain, served = found.gpus[0].mig
    assert plain.mps is None
    assert (served.mps.limits.threads_percent, served.mps.pipe_directory) == (50.0, f"/pipe/{served.uuid}")
    whole = found_in(host(gpu(0)), "mps: {threads: 25}").gpus[0]
    assert whole.mps.pipe_directory == f"/pipe/{whole.uuid}"


def test_what_is_named_goes_to_its_name() -> None:
    there = divided(replace(HALVES[0], name="b"), replace(HALVES[1], name="a"))
    both = "mig: [{wish: 3g.40gb, name: a}, {wish: 3g.40gb, name: b}]"
    found = found_in(there, both)
    assert numbers(found) == [4, 0]
    assert [instance.name for instance in found.gpus[0].mig] == ["a", "b"]
    # A name that is to be given goes to one that has none.
    fresh = divided(replace(HALVES[0], name="b"), HALVES[1])
    assert numbers(found_in(fresh, "mig: [{wish: 3g.40gb, name: c}]")) == [4]
    # And what shall have none to one that has none, as long as there is one.
    assert numbers(found_in(fresh, "mig: [3g.40gb]")) == [4]
    assert numbers(found_in(there, "mig: [3g.40gb]")) == [0]


@pytest.mark.parametrize(
    "entry", ["mig: [2g.20gb]", 'mig: ["3g.40gb*3"]', 'mig: ["1c.3g.40gb"]', "mig: [1g.10gb, 3g.40gb]"]
)
def test_a_device_that_is_not_there_has_no_uuid(entry: str) -> None:
    with fails(NotFound, "not_applied", match="GPU 0 has no", hint="gpushare apply -f x"):
        found_in(divided(*HALVES), entry)


def test_where_only_daemons_count_the_others_need_not_be_there() -> None:
    served = "{wish: 3g.40gb, mps: {threads: 50}}"
    for entry in (f"mig: [1g.10gb, {served}]", f"mig: [{served}, 1g.10gb]"):
        (device,) = found_in(divided(HALVES[1]), entry, daemons_only=True).gpus[0].mig
        assert device.mps is not None
        assert device.uuid == HALVES[1].uuid
    with pytest.raises(NotFound):
        found_in(divided(HALVES[1]), "mig: [{wish: 1g.10gb, mps: {threads: 50}}]", daemons_only=True)


def test_all_of_the_threads_is_no_limit_and_less_is_one() -> None:
    everything, nearly = read("mps: {threads: 100}", "mps: {threads: 99}").gpus[:2]
    assert (everything.mps.limits.threads_percent, nearly.mps.limits.threads_percent) == (None, 99.0)


def test_of_two_daemons_each_is_found_by_what_it_holds() -> None:
    low, normal = (mps(None, priority=priority) for priority in (Priority.LOW, Priority.NORMAL))
    there = divided(replace(HALVES[0], mps=normal), replace(HALVES[1], mps=low))
    plain, yielding = "{wish: 3g.40gb, mps: {}}", "{wish: 3g.40gb, mps: {priority: low}}"
    assert numbers(found_in(there, f"mig: [{plain}, {yielding}]")) == [0, 4]
    assert numbers(found_in(there, f"mig: [{yielding}, {plain}]")) == [4, 0]
