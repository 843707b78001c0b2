"""Situations for the tests of advice: the facts are those that a simulated host gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from gpushare.advice.case import Case, workload_of
from gpushare.advice.facts import GpuFacts, HostFacts, host_facts
from gpushare.advice.situation import Situation
from gpushare.advice.table import Table, load_table
from gpushare.base.model import ComputeMode
from gpushare.connect import connect
from gpushare.snapshot import HostState

_FACTS: dict[str, HostFacts] = {}


def facts_of(host: str) -> HostFacts:
    """Return the facts of a simulated host that nobody uses; asked once."""
    if host not in _FACTS:
        # As root: what a user may not is said in the case.
        _FACTS[host] = replace(host_facts(HostState(connect(f"sim:{host}"))), root=True)
    return _FACTS[host]


@cache
def table() -> Table:
    """Return the table of the package."""
    return load_table()


def situation_of(
    *workloads: Mapping[str, Any],
    host: str = "a100-80gb",
    facts: Mapping[str, Any] | None = None,
    root: bool | None = None,
    ways: Table | None = None,
) -> Situation:
    """Return a situation; ``facts`` are fields of the host or of its first GPU."""
    given = dict(facts or {})
    found = facts_of(host)
    if "mps_version" in given:
        version = given.pop("mps_version")
        given["ask_mps_version"] = lambda: version
    of_host = {key: given.pop(key) for key in [field.name for field in fields(HostFacts)] if key in given}
    if isinstance(given.get("compute_mode"), str):
        given["compute_mode"] = next(one for one in ComputeMode if one.title == given["compute_mode"])
    if "compute_capability" in given:
        given["compute_capability"] = tuple(given["compute_capability"])
    gpu: GpuFacts = replace(found.gpus[0], **given)
    found = replace(found, gpus=(gpu, *found.gpus[1:]), **of_host)
    case = Case(workloads=tuple(workload_of(workload) for workload in workloads), root=root)
    return Situation(case, found, gpu, ways or table())
