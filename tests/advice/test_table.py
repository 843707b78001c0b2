"""The table of mechanisms: every cell as published, today by driver, and a broken file is refused with its line."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from gpushare.advice.table import Mechanism, Table, driver_branch, load_table
from gpushare.errors import BadUsage, NotFound, OperationFailed

MECHANISMS = (Mechanism.STREAMS, Mechanism.MPS, Mechanism.TIMESLICE, Mechanism.MIG, Mechanism.VGPU)
# NVIDIA's table of 2022, copied by hand from the article, not from our file.
PUBLISHED = {
    "partition_type": (
        "Single process",
        "Logical",
        "Temporal (Single process)",
        "Physical",
        "Temporal & Physical – VMs",
    ),
    "max_partitions": ("Unlimited", "48", "Unlimited", "7", "Variable"),
    "sm_isolation": ("No", "Yes (by percentage, not partitioning)", "Yes", "Yes", "Yes"),
    "memory_protection": ("No", "Yes", "Yes", "Yes", "Yes"),
    "memory_bandwidth_qos": ("No", "No", "No", "Yes", "Yes"),
    "error_isolation": ("No", "No", "Yes", "Yes", "Yes"),
    "interop": ("Always", "IPC", "Limited IPC", "Limited IPC", "No"),
    "reconfigure": ("Dynamic", "At process launch", "N/A", "When idle", "N/A"),
    "telemetry": (
        "N/A",
        "Limited GPU metrics",
        "N/A",
        "Yes – GPU metrics, support for containers",
        "Yes – live migration and other industry virtualization tools",
    ),
    "target_use": (
        "Optimize for concurrency within a single application",
        "Run multiple applications in parallel but can deal with limited resiliency",
        "Run multiple applications that are not latency-sensitive or can tolerate jitter",
        "Run multiple applications in parallel but need resiliency and QoS",
        "Support multi-tenancy on the GPU through virtualization and need VM management benefits",
    ),
}
PUBLISHED_ROWS = (
    "Partition Type",
    "Max Partitions",
    "Streaming Multiprocessor (SM) Performance Isolation",
    "Memory Protection",
    "Memory Bandwidth QoS",
    "Error Isolation",
    "Cross-Partition Interop",
    "Reconfigure",
    "GPU Management (telemetry)",
    "Target use cases (and when to use each)",
)
# What advice reads, on driver 580: the references, not our file.
LEVELS = {
    "partition_type": ("process", "logical", "temporal", "physical", "temporal"),
    "max_partitions": ("unlimited", "dozens", "unlimited", "few", "dozens"),
    "sm_isolation": ("none", "percentage", "time", "partition", "time"),
    "memory_protection": ("none", "quota", "separate", "hardware", "hardware"),
    "memory_bandwidth_qos": ("none", "none", "none", "partition", "none"),
    "error_isolation": ("none", "none", "partial", "full", "full"),
    "interop": ("always", "ipc", "ipc", "limited", "none"),
    "reconfigure": ("live", "launch", "live", "idle", "idle"),
    "telemetry": ("none", "limited", "limited", "partition", "partition"),
    "target_use": ("application", "cooperative", "tolerant", "qos", "tenants"),
}
CELLS = [(one, row) for row in PUBLISHED for one in MECHANISMS]
# Where the sources of the references contradict each other.
DISPUTED = {
    (Mechanism.TIMESLICE, "error_isolation"): ("they all do", "Yes"),
    (Mechanism.TIMESLICE, "memory_protection"): ("no memory or fault isolation", "read another's memory"),
    (Mechanism.TIMESLICE, "sm_isolation"): ("equal share", "Yes"),
    (Mechanism.TIMESLICE, "reconfigure"): ("N/A", "four levels"),
    (Mechanism.TIMESLICE, "target_use"): ("Red Hat", "CERN"),
    (Mechanism.MPS, "max_partitions"): ("60", "48"),
    (Mechanism.MPS, "sm_isolation"): ("not partitioning", "static partitions"),
    (Mechanism.MPS, "memory_protection"): ("quota", "faults"),
    (Mechanism.MPS, "target_use"): ("inside MIG", "CIP203"),
    (Mechanism.MIG, "target_use"): ("inside MIG", "CIP203"),
    (Mechanism.MIG, "max_partitions"): ("inside MIG", "CIP203"),
    (Mechanism.MIG, "reconfigure"): ("no reset", "refused"),
    (Mechanism.VGPU, "memory_bandwidth_qos"): ("Yes", "MIG-backed"),
}


@pytest.fixture(scope="module")
def table() -> Table:
    return load_table()


@pytest.mark.parametrize(("mechanism", "row"), CELLS, ids=lambda value: getattr(value, "value", value))
def test_a_cell_is_as_published(table, mechanism, row):
    assert table.cell(mechanism, row).published == PUBLISHED[row][MECHANISMS.index(mechanism)]


@pytest.mark.parametrize(("mechanism", "row"), CELLS, ids=lambda value: getattr(value, "value", value))
def test_a_cell_has_its_level_its_words_and_its_sources(table, mechanism, row):
    cell = table.cell(mechanism, row, "580.159.04")
    assert cell.level == LEVELS[row][MECHANISMS.index(mechanism)]
    assert cell.today
    assert cell.sources[0].key == "nvidia-table-2022"
    assert all(source.title and source.where and source.date for source in cell.sources)


def test_the_rows_are_the_published_ones_in_their_order(table):
    assert tuple(row.published_title for row in table.rows) == PUBLISHED_ROWS
    assert [row.key for row in table.rows] == list(PUBLISHED)
    assert [row.title for row in table.rows] == [
        "partition type",
        "max partitions",
        "SM performance isolation",
        "memory protection",
        "memory bandwidth QoS",
        "error isolation",
        "cross-partition interop",
        "reconfigure",
        "telemetry",
        "target use",
    ]
    assert list(table.titles.values()) == ["Streams", "MPS", "Time-slicing", "MIG", "vGPU"]


def test_what_changed_since_has_a_second_source(table):
    """A cell that says more than the table of 2022 says where that stands."""
    bare = {
        f"{one.value}.{row}"
        for one, row in CELLS
        if len(table.entries[one, row].today) > 1 and len(table.cell(one, row).sources) < 2
    }
    assert bare == set()


def test_every_source_is_used(table):
    used = {key for entry in table.entries.values() for key in entry.sources}
    assert used == set(table.sources)


@pytest.mark.parametrize(("mechanism", "row"), DISPUTED, ids=lambda value: getattr(value, "value", value))
def test_a_contradiction_names_both_sides(table, mechanism, row):
    said = table.cell(mechanism, row).contradiction
    assert said is not None
    assert [words for words in DISPUTED[mechanism, row] if words not in said] == []
    assert len(table.cell(mechanism, row).sources) >= 2


# How a contradiction names who says what, and the source's key.
NAMED = {
    "device plugin": "device-plugin",
    "Red Hat": "redhat",
    "GKE": "gke",
    "CIP203": "cip203",
    "CERN": "cern",
    "AWS": "eks",
    "GPU Operator": "gpu-operator",
    "MIG guide": "mig-guide",
    "man page": "mps-man-595",
    "MPS guide": "mps-guide-590",
    "CUDA 13.1 announced": "cuda-13.1",
    "H200": "h200-2026",
}


@pytest.mark.parametrize(("mechanism", "row"), DISPUTED, ids=lambda value: getattr(value, "value", value))
def test_who_contradicts_is_among_the_sources(table, mechanism, row):
    cell = table.cell(mechanism, row)
    named = {key for words, key in NAMED.items() if words in cell.contradiction}
    assert named <= {source.key for source in cell.sources}


def test_nothing_else_is_disputed(table):
    assert {place for place, entry in table.entries.items() if entry.contradiction} == set(DISPUTED)


@pytest.mark.parametrize(
    ("driver", "limit"),
    [("470.1", 48), ("535.288.01", 48), ("580.159.04", 48), ("589", 48), ("590.44", 60), ("615.71.09", 60), (None, 60)],
)
def test_mps_takes_48_clients_and_60_from_590_on(table, driver, limit):
    cell = table.cell(Mechanism.MPS, "max_partitions", driver)
    assert cell.limit == limit
    assert str(limit) in cell.today


@pytest.mark.parametrize(
    ("row", "option", "before", "since", "level"),
    [
        ("sm_isolation", "static", "589.99", "590", "partition"),
        ("error_isolation", "static", "609", "610", "partial"),
    ],
)
def test_static_partitions_come_with_their_driver(table, row, option, before, since, level):
    plain = table.cell(Mechanism.MPS, row, before).level
    assert table.level(Mechanism.MPS, row, before, option=option) == plain
    assert table.level(Mechanism.MPS, row, since, option=option) == level
    assert table.level(Mechanism.MPS, row, since) == plain
    assert "static partitions" in table.cell(Mechanism.MPS, row, since).today
    assert "static partitions" not in table.cell(Mechanism.MPS, row, before).today


@pytest.mark.parametrize(("driver", "level"), [("470.256.02", "separate"), ("495", "quota"), ("615", "quota")])
def test_mps_has_memory_limits_from_cuda_11_5_on(table, driver, level):
    assert table.cell(Mechanism.MPS, "memory_protection", driver).level == level


def test_only_mig_has_bandwidth_of_its_own(table):
    having = [
        (one, option)
        for one in MECHANISMS
        for option in (None, "mig-backed")
        if table.level(one, "memory_bandwidth_qos", option=option) != "none"
    ]
    assert having == [(Mechanism.MIG, None), (Mechanism.MIG, "mig-backed"), (Mechanism.VGPU, "mig-backed")]


def test_levels_are_compared_in_the_order_of_the_row(table):
    assert table.at_least("memory_protection", "hardware", "quota")
    assert table.at_least("memory_protection", "quota", "quota")
    assert not table.at_least("memory_protection", "separate", "quota")
    assert not table.at_least("error_isolation", "partial", "full")
    with pytest.raises(BadUsage, match="'strong' is not a level") as caught:
        table.at_least("error_isolation", "strong", "none")
    assert "none, partial, full" in caught.value.hint


def test_an_unknown_row_is_refused(table):
    with pytest.raises(BadUsage, match="no row 'colour'") as caught:
        table.cell(Mechanism.MIG, "colour")
    assert caught.value.code == "no_row"


@pytest.mark.parametrize(
    ("text", "branch"), [("580.159.04", 580), ("595", 595), ("", None), (None, None), ("new", None)]
)
def test_the_branch_of_a_driver(text, branch):
    assert driver_branch(text) == branch


# -- a copy of the file, edited ---------------------------------------------------------------------

TEXT = files("gpushare").joinpath("data/mechanisms.yaml").read_text(encoding="utf-8")


def written(directory: Path, text: str) -> Path:
    path = directory / "mechanisms.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def edited(old: str, new: str) -> str:
    """Return our file with the first occurrence of a text replaced, and make sure that there was one."""
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def test_an_edited_copy_is_another_table(tmp_path, table):
    path = written(tmp_path, edited("- {limit: 48}", "- {limit: 20}"))
    assert load_table(path).cell(Mechanism.MPS, "max_partitions", "580").limit == 20
    assert table.cell(Mechanism.MPS, "max_partitions", "580").limit == 48


@pytest.mark.parametrize(
    ("old", "new", "line_of", "said"),
    [
        ("schema: 1", "schema: 2", "schema: 2", "schema 2 is not known"),
        ("        level: process\n", "        level: procces\n", "level: procces", "'procces' is no level of streams.partition"),
        ("source: [nvidia-table-2022, cuda-guide]", "source: [wikipedia]", "[wikipedia]", "'wikipedia' is no source of"),
        ("source: [nvidia-table-2022, cuda-guide]", "source: []", "source: []", "streams.partition_type has no source"),
        ("        published: Single process\n", "", "today: Single process", "streams.partition_type has no published"),
        ("      interop:\n        published: Always", "      interopp:\n        published: Always", "interopp:", "'interopp' is no key"),
        ("  vgpu:\n    title", "  vgpus:\n    title", "  vgpus:", "'vgpus' is no key of mechanisms"),
        ('published: "No"', "published: No", "published: No", "yes, no and numbers with a point need quotes"),
        ("limit: 7\n", "limit: seven\n", "limit: seven", "not a whole number"),
        ('{since: "590", limit: 60}', '{since: "new", limit: 60}', '{since: "new"', "not a driver branch"),
        ("- {limit: 48}", '- {since: "470", limit: 48}', '- {since: "470"', "must begin with an entry without since"),
        ('- {since: "615", text: "Yes:', '- {since: "400", text: "Yes:', None, "from old to new drivers"),
        ("        note: Lost when", "        noted: Lost when", "noted: Lost", "'noted' is no key of timeslice.reconfigure"),
        ("    title: MIG\n", "    title: MIG\n    title: MIG\n", None, "the key 'title' appears twice"),
        ("  - key: interop\n", "  - key: reconfigure\n", None, "the row 'reconfigure' appears twice"),
        ("levels: [none, limited, ipc, always]", "levels: [none, none]", "levels: [none, none]", "the level 'none' appears twice"),
        ("level: partial, text", "level: most, text", "level: most", "'most' is no level of option static"),
        ("rows:\n", "rows: [\n", None, "not valid YAML"),
        ("    title: Streams\n", "    title: ''\n", "title: ''", "title must be a text"),
        ("    title: Streams\n    cells:\n", "    title: Streams\n    cells: none\n    x:\n", "    x:", "'x' is no key of streams"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_with_its_line(tmp_path, old, new, line_of, said):
    text = edited(old, new)
    with pytest.raises(OperationFailed) as caught:
        load_table(written(tmp_path, text))
    assert said in caught.value.message
    assert caught.value.code == "bad_table"
    assert caught.value.hint
    if line_of is not None:
        line = next(number for number, one in enumerate(text.splitlines(), 1) if line_of in one)
        assert f", line {line}:" in caught.value.message


@pytest.mark.parametrize("text", ["", "just words", "- a\n- list\n", "rows: 7\n"])
def test_what_is_no_table_at_all_is_refused(tmp_path, text):
    with pytest.raises(OperationFailed) as caught:
        load_table(written(tmp_path, text))
    assert caught.value.code == "bad_table"


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(NotFound, match="there is no file"):
        load_table(tmp_path / "none.yaml")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OperationFailed, match="not UTF-8"):
        load_table(path)
    with pytest.raises(OperationFailed, match="cannot read"):
        load_table(tmp_path)
