"""``gpushare observe``: a recording as data, and as tables of GPUs, processes and what is underused."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpushare.base.units import format_bytes, format_duration
from gpushare.show.result import Column, Result, Table


def observe_result(data: Mapping[str, Any], notes: Sequence[str] = ()) -> Result:
    """Return the result of ``gpushare observe`` from its data: keys as the JSON document has them."""
    return Result(command="observe", data=data, text=_header(data), tables=_tables(data), notes=tuple(notes))


def _header(data: Mapping[str, Any]) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(data["started_at"]))
    samples = f"{data['samples']} sample{'' if data['samples'] == 1 else 's'}"
    seen = f"{samples} in {format_duration(data['seconds'])}"
    return f"{data['host']}   driver {data['driver'] or '-'}   {began}   {seen}\n{data['file']}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}"


def _tables(data: Mapping[str, Any]) -> tuple[Table, ...]:
    gpu_columns = (
        Column(key="gpu", title="GPU", right=True),
        Column(key="name", title="name", rank=3),
        Column(key="source", title="from", rank=2),
        Column(key="activity_mean", title="mean %", right=True, format=_percent),
        Column(key="activity_p95", title="p95 %", right=True, format=_percent),
        Column(key="activity_max", title="max %", right=True, rank=1, format=_percent),
        Column(key="utilization_mean", title="util mean %", right=True, rank=2, format=_percent),
        Column(key="busy_percent", title="busy %", right=True, rank=2, format=_percent),
        Column(key="memory_peak_bytes", title="peak memory", right=True, format=format_bytes),
        Column(key="memory_total_bytes", title="of", right=True, rank=1, format=format_bytes),
        Column(key="unanswered", title="no answer", right=True, rank=1, optional=True),
    )
    process_columns = (
        Column(key="gpu", title="GPU", right=True),
        Column(key="pid", title="PID", right=True),
        Column(key="name", title="name", least=8),
        Column(key="user", title="user", rank=1),
        Column(key="container", title="container", rank=4, optional=True),
        Column(key="source", title="from", rank=3),
        Column(key="activity_mean", title="mean %", right=True, format=_percent),
        Column(key="activity_p95", title="p95 %", right=True, format=_percent),
        Column(key="activity_max", title="max %", right=True, rank=4, format=_percent),
        Column(key="pattern", title="pattern", rank=1),
        Column(key="memory_peak_bytes", title="peak memory", right=True, format=format_bytes),
        Column(key="seen_from_seconds", title="from s", right=True, rank=2),
        Column(key="seen_to_seconds", title="to s", right=True, rank=2),
    )
    under_columns = (
        Column(key="gpu", title="GPU", right=True),
        Column(key="kind", title="finding", rank=1),
        Column(key="why", title="why"),
    )
    return (
        Table(name="gpus", title="GPUs", columns=gpu_columns, rows=tuple(map(_flat, data["gpus"]))),
        Table(
            name="processes",
            title="processes",
            columns=process_columns,
            rows=tuple(map(_flat, data["processes"])),
            empty="no process was seen" if data["processes_known"] else "processes were not recorded",
        ),
        Table(
            name="underused",
            title="underused",
            columns=under_columns,
            rows=tuple(data["underused"]),
            empty="no GPU is underused",
        ),
    )


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    activity, utilization = row["activity"] or {}, row["utilization"] or {}
    share = row["busy_share"]
    return {
        **row,
        **{f"activity_{key}": activity.get(key) for key in ("mean", "p95", "max")},
        "utilization_mean": utilization.get("mean"),
        "busy_percent": None if share is None else 100 * share,
        "unanswered": row.get("unanswered") or None,
    }
