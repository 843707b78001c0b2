"""The table of ways: every cell as published, today by driver, and a fault in the file is found."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gpushare.advice.table import Table, driver_branch, load_table, parse_table
from gpushare.base.errors import BadUsage
from gpushare.base.model import Way
from gpushare.inputs import documents

WAYS = (Way.STREAMS, Way.MPS, Way.TIMESLICE, Way.MIG, Way.VGPU)
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
CELLS = [(way, row) for row in PUBLISHED for way in WAYS]
# Where the sources of the references contradict each other.
DISPUTED = {
    (Way.TIMESLICE, "error_isolation"): ("they all do", "Yes"),
    (Way.TIMESLICE, "memory_protection"): ("no memory or fault isolation", "read another's memory"),
    (Way.TIMESLICE, "sm_isolation"): ("equal share", "Yes"),
    (Way.TIMESLICE, "reconfigure"): ("N/A", "four levels"),
    (Way.TIMESLICE, "target_use"): ("Red Hat", "CERN"),
    (Way.MPS, "max_partitions"): ("60", "48"),
    (Way.MPS, "sm_isolation"): ("not partitioning", "static partitions"),
    (Way.MPS, "memory_protection"): ("quota", "faults"),
    (Way.MPS, "target_use"): ("inside MIG", "CIP203"),
    (Way.MIG, "target_use"): ("inside MIG", "CIP203"),
    (Way.MIG, "max_partitions"): ("inside MIG", "CIP203"),
    (Way.MIG, "reconfigure"): ("no reset", "refused"),
    (Way.VGPU, "memory_bandwidth_qos"): ("Yes", "MIG-backed"),
}


@pytest.fixture(scope="module")
def table() -> Table:
    return load_table()


@pytest.mark.parametrize(("way", "row"), CELLS, ids=lambda value: getattr(value, "value", value))
def test_a_cell_is_as_published(table, way, row):
    assert table.cell(way, row).published == PUBLISHED[row][WAYS.index(way)]


@pytest.mark.parametrize(("way", "row"), CELLS, ids=lambda value: getattr(value, "value", value))
def test_a_cell_has_its_level_its_words_and_its_sources(table, way, row):
    cell = table.cell(way, row, "580.159.04")
    assert cell.level == LEVELS[row][WAYS.index(way)]
    assert cell.today
    assert cell.sources[0].key == "nvidia-table-2022"
    assert all(source.title and source.where and source.date for source in cell.sources)


def test_the_rows_are_the_published_ones_in_their_order(table):
    assert tuple(row.published for row in table.rows) == PUBLISHED_ROWS
    assert [row.key for row in table.rows] == list(PUBLISHED)
    assert [row.title for row in table.rows] == [
        *("partition type", "max partitions", "SM performance isolation", "memory protection"),
        *("memory bandwidth QoS", "error isolation", "cross-partition interop", "reconfigure"),
        *("telemetry", "target use"),
    ]
    assert list(table.titles.values()) == ["Streams", "MPS", "Time-slicing", "MIG", "vGPU"]


def test_what_changed_since_has_a_second_source(table):
    """A cell that says more than the table of 2022 says where that stands."""
    bare = {
        f"{one.value}.{row}"
        for one, row in CELLS
        if isinstance(table.entries[one, row]["today"], list) and len(table.cell(one, row).sources) < 2
    }
    assert bare == set()


def test_every_source_is_used(table):
    used = {key for entry in table.entries.values() for key in entry["source"]}
    assert used == set(table.sources)


@pytest.mark.parametrize(("way", "row"), DISPUTED, ids=lambda value: getattr(value, "value", value))
def test_a_contradiction_names_both_sides(table, way, row):
    said = table.cell(way, row).contradiction
    assert said is not None
    assert [words for words in DISPUTED[way, row] if words not in said] == []
    assert len(table.cell(way, row).sources) >= 2


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


@pytest.mark.parametrize(("way", "row"), DISPUTED, ids=lambda value: getattr(value, "value", value))
def test_who_contradicts_is_among_the_sources(table, way, row):
    cell = table.cell(way, row)
    named = {key for words, key in NAMED.items() if words in cell.contradiction}
    assert named <= {source.key for source in cell.sources}


def test_nothing_else_is_disputed(table):
    assert {place for place, entry in table.entries.items() if "contradiction" in entry} == set(DISPUTED)


@pytest.mark.parametrize(
    ("driver", "limit"),
    [("470.1", 48), ("535.288.01", 48), ("580.159.04", 48), ("589", 48), ("590.44", 60), ("615.71.09", 60), (None, 60)],
)
def test_mps_takes_48_clients_and_60_from_590_on(table, driver, limit):
    cell = table.cell(Way.MPS, "max_partitions", driver)
    assert cell.limit == limit
    assert str(limit) in cell.today


@pytest.mark.parametrize(
    ("row", "option", "before", "since", "level"),
    [("sm_isolation", "static", "589.99", "590", "partition"), ("error_isolation", "static", "609", "610", "partial")],
)
def test_static_partitions_come_with_their_driver(table, row, option, before, since, level):
    plain = table.cell(Way.MPS, row, before).level
    assert table.level(Way.MPS, row, before, option=option) == plain
    assert table.level(Way.MPS, row, since, option=option) == level
    assert table.level(Way.MPS, row, since) == plain
    assert "static partitions" in table.cell(Way.MPS, row, since).today
    assert "static partitions" not in table.cell(Way.MPS, row, before).today


@pytest.mark.parametrize(("driver", "level"), [("470.256.02", "separate"), ("495", "quota"), ("615", "quota")])
def test_mps_has_memory_limits_from_cuda_11_5_on(table, driver, level):
    assert table.cell(Way.MPS, "memory_protection", driver).level == level


def test_only_mig_has_bandwidth_of_its_own(table):
    having = [
        (way, option)
        for way in WAYS
        for option in (None, "mig-backed")
        if table.level(way, "memory_bandwidth_qos", option=option) != "none"
    ]
    assert having == [(Way.MIG, None), (Way.MIG, "mig-backed"), (Way.VGPU, "mig-backed")]


def test_levels_are_compared_in_the_order_of_the_row(table):
    assert table.at_least("memory_protection", "hardware", "quota")
    assert table.at_least("memory_protection", "quota", "quota")
    assert not table.at_least("memory_protection", "separate", "quota")
    assert not table.at_least("error_isolation", "partial", "full")


@pytest.mark.parametrize(
    ("text", "branch"), [("580.159.04", 580), ("595", 595), ("", None), (None, None), ("new", None)]
)
def test_the_branch_of_a_driver(text, branch):
    assert driver_branch(text) == branch


# -- a copy of the file, edited ---------------------------------------------------------------------

TEXT = files("gpushare").joinpath("data/ways.yaml").read_text(encoding="utf-8")
WORD = {"type": "string", "minLength": 1}
SINCE = {"type": "integer", "minimum": 1}


def mapping(properties: dict[str, Any], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [key for key in properties if key not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def dated(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value that may differ by driver; the first is the one of older drivers."""
    older, newer = mapping({name: value}), mapping({"since": SINCE, name: value})
    return {"anyOf": [value, {"type": "array", "prefixItems": [older], "items": newer, "minItems": 1}]}


NUMBER = {"type": "integer", "minimum": 0}
OPTION = mapping({"since": SINCE, "level": WORD, "text": WORD}, optional=("since",))
CELL = mapping(
    {
        "published": WORD,
        "today": dated("text", WORD),
        "level": dated("level", WORD),
        "source": {"type": "array", "items": WORD, "minItems": 1},
        "limit": dated("limit", NUMBER),
        "options": {"type": "object", "additionalProperties": OPTION},
        "contradiction": WORD,
        "note": WORD,
    },
    optional=("limit", "options", "contradiction", "note"),
)
LEVEL_LIST = {"type": "array", "items": WORD, "minItems": 1, "uniqueItems": True}
ROW = mapping({"key": WORD, "title": WORD, "published": WORD, "question": WORD, "levels": LEVEL_LIST})
COLUMN = mapping({"title": WORD, "cells": mapping(dict.fromkeys(PUBLISHED, CELL))})
SCHEMA = mapping(
    {
        "schema": {"const": 1},
        "sources": {"type": "object", "additionalProperties": mapping({"title": WORD, "where": WORD, "date": WORD})},
        "rows": {"type": "array", "items": ROW},
        "ways": mapping({way.value: COLUMN for way in WAYS}),
    }
)


def faults(text: str) -> list[str]:
    """Return what is wrong with a table of ways."""
    try:
        # Refuses a key that is given twice.
        (raw,) = documents(text, "table", "hint")
    except BadUsage as error:
        return [error.message]
    found = [f"{one.json_path}: {one.message}" for one in Draft202012Validator(SCHEMA).iter_errors(raw)]
    if found:
        return found
    levels = {row["key"]: row["levels"] for row in raw["rows"]}
    found += [f"the row {row['key']} is there twice" for row in raw["rows"] if raw["rows"].count(row) > 1]
    found += [f"there is no row {key}" for key in PUBLISHED if key not in levels]
    for name, column in raw["ways"].items():
        for key, cell in column["cells"].items():
            said = [cell["level"]] if isinstance(cell["level"], str) else [one["level"] for one in cell["level"]]
            said += [value["level"] for value in cell.get("options", {}).values()]
            found += [f"{name}.{key}: no level {one}" for one in said if one not in levels.get(key, ())]
            found += [f"{name}.{key}: no source {one}" for one in cell["source"] if one not in raw["sources"]]
            for several in (cell["today"], cell["level"], cell.get("limit")):
                order = [one.get("since", 0) for one in several] if isinstance(several, list) else []
                found += [f"{name}.{key}: not from old to new"] if order != sorted(set(order)) else []
    return found


def edited(old: str, new: str) -> str:
    """Return our file with the first occurrence of a text replaced, and make sure that there was one."""
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def test_the_file_has_no_faults():
    assert faults(TEXT) == []


def test_an_edited_copy_is_another_table(table):
    other = parse_table(edited("- {limit: 48}", "- {limit: 20}"))
    assert other.cell(Way.MPS, "max_partitions", "580").limit == 20
    assert table.cell(Way.MPS, "max_partitions", "580").limit == 48
