"""The table on one host: each cell that the host decides, both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.advice.compare import availability, availability_text, cell_here, explanation_lines, host_cell, text_here
from gpushare.advice.facts import GpuFacts, HostFacts, mps_clients
from gpushare.advice.table import COLUMNS, load_table, row_named
from gpushare.advice.ways import way_of
from gpushare.base.errors import BadUsage
from gpushare.base.model import ComputeMode, TimeSlice, Way
from gpushare.base.units import GIB
from gpushare.mig.profile import Layout, Placement, Profile

TABLE = load_table()
PROFILES = (
    Profile(
        name="1g.18gb", id=19, nvml_profile=0, slices=1, memory_bytes=16 * GIB, multiprocessors=16, instances=7,
        placements=tuple(Placement(start, 1) for start in range(7)),
    ),
    Profile(
        name="1g.18gb+me", id=20, nvml_profile=7, slices=1, memory_bytes=16 * GIB, multiprocessors=16, instances=1,
        placements=(Placement(0, 1),),
    ),
    Profile(
        name="7g.141gb", id=0, nvml_profile=4, slices=7, memory_bytes=140 * GIB, multiprocessors=132, instances=1,
        placements=(Placement(0, 8),),
    ),
)  # fmt: skip
H200 = GpuFacts(
    index=0,
    name="NVIDIA H200",
    memory_total_bytes=140 * GIB,
    memory_used_bytes=20 * GIB,
    multiprocessors=132,
    compute_capability=(9, 0),
    mig_capable=True,
    mig_enabled=False,
    layout=Layout(gpu=0, profiles=PROFILES),
    compute_mode=ComputeMode.DEFAULT,
    processes=0,
    ask_levels=lambda: {0: None, 1: None},
)
T4 = GpuFacts(
    index=1,
    name="Tesla T4",
    multiprocessors=40,
    compute_capability=(7, 5),
    mig_capable=False,
    mig_enabled=None,
    compute_mode=ComputeMode.DEFAULT,
    ask_levels=lambda: {0: None, 1: None},
)
HOST = HostFacts(
    host="here", driver="580.159.04", root=True, gpus=(H200,), mps_program=True, ask_mps_version=lambda: 13000
)
NEW = replace(HOST, driver="615.71.09", ask_mps_version=lambda: 13040)


def said(way: Way, row: str, host: HostFacts = HOST, gpu: GpuFacts = H200) -> str | None:
    return cell_here(TABLE, way, row, host, gpu)


@pytest.mark.parametrize(
    ("host", "gpu", "clients"),
    [
        (HOST, H200, 48),
        (NEW, H200, 60),
        # The program counts: an older one in a container, a newer one than the driver's name says.
        (replace(NEW, ask_mps_version=lambda: 13000), H200, 48),
        (replace(HOST, ask_mps_version=lambda: 13010), H200, 60),
        (replace(HOST, ask_mps_version=lambda: None), H200, 48),
        (replace(NEW, ask_mps_version=lambda: None), H200, 60),
        (replace(HOST, driver=None, ask_mps_version=lambda: None), H200, 48),
        (NEW, replace(H200, compute_capability=(6, 1)), 16),
    ],
)
def test_mps_clients_by_version_and_generation(host, gpu, clients):
    assert mps_clients(TABLE, host, gpu) == clients
    assert said(Way.MPS, "max_partitions", host, gpu).startswith(f"{clients} clients")


def test_clients_in_a_mig_instance_are_a_share():
    assert "a share of them in each MIG instance" in said(
        Way.MPS, "max_partitions", HOST, replace(H200, mig_enabled=True)
    )


def test_mps_before_volta_has_one_address_space_and_no_caps():
    before_volta = replace(T4, compute_capability=(6, 0))
    for row in ("memory_protection", "sm_isolation"):
        assert said(Way.MPS, row, HOST, before_volta).startswith("No")
        assert said(Way.MPS, row, HOST, T4).startswith("Yes")


def test_mig_cells_come_from_the_live_profiles():
    assert said(Way.MIG, "max_partitions") == "7 of 1g.18gb"


def test_profiles_that_the_driver_does_not_list_are_unknown():
    blind = replace(H200, layout=None)
    assert "does not list the profiles" in said(Way.MIG, "max_partitions", HOST, blind)
    on = replace(blind, mig_enabled=True)
    assert said(Way.MIG, "max_partitions", HOST, on) == TABLE.cell(Way.MIG, "max_partitions").today
    assert blind.largest_instance_count is None


@pytest.mark.parametrize("row", [row.key for row in TABLE.rows])
def test_without_mig_no_mig_cell_says_anything(row):
    assert said(Way.MIG, row, HOST, T4) is None


@pytest.mark.parametrize(
    ("root", "gpu", "words"),
    [
        (True, H200, ("When idle", "you are root", "no reset", "idle now")),
        (False, H200, ("needs root",)),
        (True, replace(H200, compute_capability=(8, 0), processes=2), ("with a reset", "2 processes now")),
        (True, replace(H200, processes=1), ("1 process now",)),
        (False, replace(H200, mig_enabled=True), ("Idle instances at any time", "needs root")),
    ],
)
def test_when_mig_can_be_changed(root, gpu, words):
    text = said(Way.MIG, "reconfigure", replace(HOST, root=root), gpu)
    assert [word for word in words if word not in text] == []


def test_the_unknown_is_left_out():
    unknown = replace(H200, compute_capability=None, processes=None)
    assert said(Way.MIG, "reconfigure", HOST, unknown) == TABLE.cell(Way.MIG, "reconfigure").today
    assert "now" not in said(Way.MIG, "reconfigure", HOST, replace(H200, processes=None))


@pytest.mark.parametrize(
    ("root", "settable", "words"),
    [
        (True, True, "Live, you are root: default, short, medium, long"),
        (False, True, "Live, needs root"),
        (True, False, "No: this GPU has no time-slice levels"),
        (True, None, "Live: four levels for the GPU by root; a slice per process"),
    ],
)
def test_time_slice_levels(root, settable, words):
    text = said(
        Way.TIMESLICE,
        "reconfigure",
        replace(HOST, root=root),
        replace(H200, ask_levels={True: lambda: {0: None}, False: dict, None: lambda: None}[settable]),
    )
    assert text.startswith(words)


@pytest.mark.parametrize(
    ("way", "host", "gpu", "usable", "why"),
    [
        (Way.STREAMS, HOST, T4, True, "inside each program"),
        (Way.MPS, HOST, T4, True, "without root"),
        (Way.MPS, HOST, replace(T4, mps_daemons=1), True, "1 running"),
        (Way.MPS, HOST, replace(H200, mig_enabled=True), True, "per MIG instance"),
        (Way.MPS, replace(HOST, mps_program=False), T4, False, "not installed"),
        (Way.MPS, HOST, replace(T4, compute_mode=ComputeMode.PROHIBITED), False, "prohibited"),
        (Way.TIMESLICE, HOST, T4, True, "the default"),
        (Way.TIMESLICE, HOST, replace(H200, mig_enabled=True), True, "inside each MIG instance"),
        (Way.TIMESLICE, HOST, replace(T4, compute_mode=ComputeMode.EXCLUSIVE_PROCESS), False, "exclusive-process"),
        (Way.MIG, HOST, T4, False, "Tesla T4 has no MIG"),
        (Way.MIG, HOST, replace(T4, mig_capable=None), None, "unknown"),
        (Way.MIG, HOST, H200, True, "off now"),
        (Way.MIG, replace(HOST, root=False), H200, True, "turning it on needs root"),
        (Way.MIG, replace(HOST, root=False), replace(H200, mig_enabled=True), True, "on, 0 instances; changing it needs root"),
        (Way.VGPU, HOST, T4, None, "NVIDIA's vGPU driver"),
        (Way.VGPU, HOST, replace(T4, vgpu_capable=True), True, "vGPU host driver runs"),
        (Way.VGPU, HOST, replace(T4, vgpu_capable=False), False, "vGPU guest"),
        (Way.VGPU, HOST, replace(T4, name="NVIDIA GH200 480GB", vgpu_capable=False), False, "does not support"),
        (Way.MIG, HOST, replace(H200, error="it fell off the bus"), None, "fell off the bus"),
    ],
)  # fmt: skip
def test_whether_a_way_can_be_had(way, host, gpu, usable, why):
    found = availability(way, host, gpu)
    assert found.usable is usable
    assert why in found.why
    if usable is False:
        assert cell_here(TABLE, way, "telemetry", host, gpu) is None


def test_gpus_that_agree_are_said_once_and_others_apart():
    three = (H200, T4, replace(T4, index=2))
    assert text_here(TABLE, Way.MIG, "max_partitions", HOST, three) == "GPU 0: 7 of 1g.18gb. GPU 1,2: not here"
    assert text_here(TABLE, Way.MIG, "max_partitions", HOST, three[1:]) is None
    assert text_here(TABLE, Way.MPS, "max_partitions", HOST, three) == "48 clients (MPS 13000)"
    assert availability_text(Way.TIMESLICE, HOST, three) == "yes, it is the default"
    assert availability_text(Way.STREAMS, HOST, ()) == "not here"


def test_a_cell_of_a_host_has_every_view():
    cell = host_cell(TABLE, Way.MPS, "max_partitions", "580.1", HOST)
    assert (cell.published, cell.host, cell.limit) == ("48", "48 clients (MPS 13000)", 48)
    assert host_cell(TABLE, Way.MPS, "max_partitions", None, None).host is None


def test_an_explanation_has_views_disagreement_and_sources():
    lines = explanation_lines(TABLE, Way.TIMESLICE, "error_isolation", HOST.driver, HOST, None)
    heads = [head for head, _ in lines]
    assert heads[:4] == ["question", "published 2022", "today", "this host"]
    assert heads.count("source") == 4
    assert "they all do" in dict(lines)["sources disagree"]
    text = dict(explanation_lines(TABLE, Way.MPS, "sm_isolation", "580", None, "no driver"))
    assert text["this host"] == "not known: no driver"
    assert text["option"].startswith("static, driver 590 on (not this driver):")
    assert "no: " not in dict(explanation_lines(TABLE, Way.MIG, "telemetry", None, HOST, None))["this host"]


def test_today_is_told_by_driver():
    heads = [head for head, _ in explanation_lines(TABLE, Way.MPS, "memory_protection", None, None, None)]
    assert heads[2:5] == ["before driver 495", "driver 495 on", "driver 615 on"]


# -- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("streams", Way.STREAMS), ("CUDA streams", Way.STREAMS), ("MPS", Way.MPS),
        ("time-slicing", Way.TIMESLICE), ("timeslicing", Way.TIMESLICE), ("ts", Way.TIMESLICE),
        ("Time Slice", Way.TIMESLICE), ("time", Way.TIMESLICE), ("mig", Way.MIG), ("vGPU", Way.VGPU),
    ],
)  # fmt: skip
def test_a_way_by_its_names(text, way):
    assert way_of(text, COLUMNS) is way


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("error-isolation", "error_isolation"), ("Error isolation", "error_isolation"), ("errors", "error_isolation"),
        ("err", "error_isolation"), ("qos", "memory_bandwidth_qos"), ("sm", "sm_isolation"), ("ipc", "interop"),
        ("GPU Management (telemetry)", "telemetry"), ("use", "target_use"), ("memory protection", "memory_protection"),
        # In one of its names, and not in all of them.
        ("anagement", "telemetry"),
    ],
)  # fmt: skip
def test_a_row_by_its_names(text, row):
    assert row_named(TABLE, text).key == row


@pytest.mark.parametrize("text", ["timeslcing", "mgi", "", "s"])
def test_an_unknown_way_is_refused(text):
    with pytest.raises(BadUsage) as caught:
        way_of(text, COLUMNS)
    assert (caught.value.code, "give streams" in caught.value.hint) == ("bad_way", True)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "memory",
            "may mean memory protection or memory bandwidth QoS",
            "give one of: memory_protection, memory_bandwidth_qos",
        ),
        ("eror isolation", "is not a row", "its rows: partition_type"),
        ("colour", "is not a row", "its rows: partition_type"),
    ],
)
def test_an_unknown_or_ambiguous_row_is_refused(text, message, hint):
    with pytest.raises(BadUsage) as caught:
        row_named(TABLE, text)
    assert message in caught.value.message
    assert hint in caught.value.hint


FACTS = st.builds(
    GpuFacts,
    index=st.integers(0, 3),
    name=st.none() | st.just("GPU"),
    memory_total_bytes=st.none() | st.just(16 * GIB),
    memory_used_bytes=st.none() | st.just(GIB),
    multiprocessors=st.none() | st.integers(1, 200),
    compute_capability=st.none() | st.sampled_from([(6, 0), (7, 5), (8, 0), (12, 0)]),
    mig_capable=st.none() | st.booleans(),
    mig_enabled=st.none() | st.booleans(),
    layout=st.none() | st.sampled_from([Layout(gpu=0, profiles=()), Layout(gpu=0, profiles=PROFILES)]),
    compute_mode=st.none() | st.sampled_from(ComputeMode),
    mps_daemons=st.integers(0, 2),
    processes=st.none() | st.integers(0, 3),
    ask_levels=st.sampled_from([lambda: None, dict, lambda: {0: TimeSlice.SHORT}]),
    vgpu_capable=st.none() | st.booleans(),
)


@given(
    gpu=FACTS,
    driver=st.none() | st.sampled_from(["", "470.1", "580.159.04", "615"]),
    root=st.booleans(),
    version=st.none() | st.just(13040),
)
def test_no_unknown_fact_breaks_a_cell(gpu, driver, root, version):
    host = HostFacts(host="h", driver=driver, root=root, mps_program=True, ask_mps_version=lambda: version)
    for way in COLUMNS:
        for row in TABLE.rows:
            text = cell_here(TABLE, way, row.key, host, gpu)
            assert (text is None) == (availability(way, host, gpu).usable is False)
            assert text is None or "None" not in text
