"""What dcgm-exporter measured, as a recording: a range answer of Prometheus, or the text of the exporter itself.

Facts: dcgm-exporter 4.5 (names, units and labels of its counters; `Hostname` became `hostname`), Prometheus' HTTP API
(query_range: ``data.result[]`` with ``metric`` and ``values`` of [seconds, text]; promtool prints the list alone).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from gpushare.base.errors import BadUsage, OperationFailed
from gpushare.base.units import MIB, format_bytes
from gpushare.measure.recording import MARK, GpuSample, Header, RecordedGpu, Recording, Sample, Tally, read_recording

SM: Final = "DCGM_FI_PROF_SM_ACTIVE"
UTILIZATION: Final = "DCGM_FI_DEV_GPU_UTIL"
ENGINE: Final = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
USED: Final = "DCGM_FI_DEV_FB_USED"
FREE: Final = "DCGM_FI_DEV_FB_FREE"
_METRICS: Final = frozenset({SM, UTILIZATION, ENGINE, USED, FREE})
_LARGEST: Final = 256 * MIB
_HEAD: Final = 64 << 10
_QUERY: Final = (
    'ask for: {__name__=~"DCGM_FI_(PROF_SM_ACTIVE|PROF_GR_ENGINE_ACTIVE|DEV_GPU_UTIL|DEV_FB_USED|DEV_FB_FREE)", '
    'instance="HOST:9400"}'
)
_LINE: Final = re.compile(r"(?P<metric>DCGM_\w+)\{(?P<labels>.*)\}\s+(?P<value>\S+)(?:\s+(?P<ms>\d+))?\s*")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One value of one metric; ``labels`` name the GPU. ``timed`` False: its time was not known."""

    metric: str
    labels: Mapping[str, str]
    at: float
    value: float
    timed: bool = True


@dataclass
class _Seen:
    """The values of one GPU by time and metric."""

    labels: Mapping[str, str]
    values: dict[float, dict[str, float]] = field(default_factory=dict)


def read_measured(path: str | Path) -> Recording:
    """Return a recording of ``gpushare observe``, or what dcgm-exporter measured in its place."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD)
            if not _looks_like_dcgm(head):
                return read_recording(path)
            text = head + file.read(_LARGEST)
    except OSError:
        # It fails there, too, with the errors of a recording.
        return read_recording(path)
    if len(text) > _LARGEST:
        raise BadUsage(
            f"{path} is larger than {format_bytes(_LARGEST)}", "ask Prometheus with a larger step", code="too_large"
        )
    is_json = head.lstrip()[:1] in {"{", "["}
    return _recording_of(path, list(_points_of_prometheus(path, text) if is_json else _points_of_exporter(text)))


def _looks_like_dcgm(head: str) -> bool:
    """Return whether a file begins like an answer of Prometheus or a scrape of DCGM, and not like our recording."""
    start = head.lstrip()
    if start.startswith(("{", "[")):
        is_answer = any(key in head for key in ('"metric"', '"resultType"', '"error"'))
        return is_answer and MARK not in start.partition("\n")[0]
    return re.search(r"^(?:# (?:HELP|TYPE) )?DCGM_", head, re.MULTILINE) is not None


def _points_of_prometheus(path: Path, text: str) -> Iterator[_Point]:
    """Yield the values of our metrics in a range answer; OperationFailed: it is none."""
    try:
        raw = json.loads(text)
        if isinstance(raw, dict) and raw.get("status") == "error":
            raise OperationFailed(
                f"{path} is an error of Prometheus: {str(raw.get('error'))[:200]}", _QUERY, code="not_a_recording"
            )
        series = raw if isinstance(raw, list) else raw["data"]["result"]
        for entry in series:
            labels = {str(key): str(value) for key, value in entry["metric"].items()}
            metric = labels.get("__name__", "")
            pairs = entry["values"] if "values" in entry else [entry["value"]]
            if metric not in _METRICS:
                continue
            for at, value in pairs:
                yield _Point(metric=metric, labels=labels, at=float(at), value=float(value))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise OperationFailed(f"{path} is not a range answer of Prometheus", _QUERY, code="not_a_recording") from None


def _points_of_exporter(text: str) -> Iterator[_Point]:
    """Yield the values of one scrape, or of several one after the other.

    Without times a new scrape begins where a series occurs again, and scrapes count as one second apart.
    """
    seen_in_scrape: set[tuple[str, str]] = set()
    scrape = 0
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match["metric"] not in _METRICS:
            continue
        series = (match["metric"], match["labels"])
        if series in seen_in_scrape:
            scrape += 1
            seen_in_scrape = set()
        seen_in_scrape.add(series)
        try:
            value = float(match["value"])
        except ValueError:
            continue
        at = float(scrape) if match["ms"] is None else int(match["ms"]) / 1000
        labels = dict(_LABEL.findall(match["labels"]))
        yield _Point(metric=match["metric"], labels=labels, at=at, value=value, timed=match["ms"] is not None)


def _values_by_gpu(points: Iterable[_Point]) -> dict[str, _Seen]:
    """Return the values of each whole GPU, by its UUID or index."""
    gpus: dict[str, _Seen] = {}
    for point in points:
        labels = point.labels
        if not labels.get("GPU_I_ID"):
            seen = gpus.setdefault(labels.get("UUID") or labels.get("gpu") or "", _Seen(labels))
            values = seen.values.setdefault(point.at, {})
            # A GPU that several pods share has a series for each, with the same value.
            values[point.metric] = max(point.value, values.get(point.metric, 0.0))
    return gpus


def _recording_of(path: Path, points: Iterable[_Point]) -> Recording:
    """Return the recording of all values, of the whole GPUs of one host."""
    # What DCGM does not know is a very large number.
    points = [point for point in points if math.isfinite(point.value) and 0 <= point.value < 1e12]
    timed = all(point.timed for point in points)
    parts = any(point.labels.get("GPU_I_ID") for point in points)
    names = ("instance", "Hostname", "hostname")
    hosts = {next((point.labels[name] for name in names if point.labels.get(name)), "unknown") for point in points}
    gpus = _values_by_gpu(points)
    if len(hosts) > 1:
        raise BadUsage(
            f"{path} has GPUs of {len(hosts)} hosts: {', '.join(sorted(hosts)[:4])}",
            'ask for one: {..., instance="HOST:9400"}',
            code="several_hosts",
        )
    if not gpus:
        content = "only counters of MIG instances, none of a whole GPU" if parts else "no counters of dcgm-exporter"
        raise OperationFailed(f"{path} has {content}", _QUERY, code="empty_recording")
    indexes = _indexes(gpus)
    times = sorted({at for seen in gpus.values() for at in seen.values})
    header = Header(
        host=next(iter(hosts)),
        started_at=times[0] if timed else path.stat().st_mtime,
        interval_seconds=min((after - before for before, after in pairwise(times)), default=1.0),
        gpus=tuple(_recorded_gpu(indexes[key], seen) for key, seen in gpus.items()),
        warnings=tuple(_warnings(timed=timed, parts=parts)),
    )
    tally = Tally(header)
    for at in times:
        present = [(indexes[key], seen.values[at]) for key, seen in gpus.items() if at in seen.values]
        tally.add(Sample(at=at - times[0], gpus=tuple(_gpu_sample(index, values) for index, values in present)))
    return replace(tally.recording(reason="finished"), processes_known=False)


def _indexes(gpus: Mapping[str, _Seen]) -> dict[str, int]:
    """Return the index of each GPU: its label ``gpu``, or its place where labels are missing or not unique."""
    labels = [seen.labels.get("gpu", "") for seen in gpus.values()]
    if all(label.isdecimal() for label in labels) and len(set(labels)) == len(labels):
        return {key: int(label) for key, label in zip(gpus, labels, strict=True)}
    return {key: place for place, key in enumerate(gpus)}


def _recorded_gpu(index: int, seen: _Seen) -> RecordedGpu:
    """Return a GPU with the largest memory total that its values add up to: used and free."""
    totals = [values[USED] + values[FREE] for values in seen.values.values() if USED in values and FREE in values]
    return RecordedGpu(
        index=index,
        uuid=seen.labels.get("UUID"),
        name=seen.labels.get("modelName"),
        memory_total_bytes=int(max(totals)) * MIB if totals else None,
    )


def _gpu_sample(index: int, values: Mapping[str, float]) -> GpuSample:
    """Return the values of a GPU at one time, in our units."""
    # Utilization is in percent, the others are shares.
    utilization = values.get(UTILIZATION)
    if utilization is None and ENGINE in values:
        # The activity of the engines tells the same: that some kernel ran.
        utilization = 100 * values[ENGINE]
    return GpuSample(
        index=index,
        utilization_percent=None if utilization is None else min(utilization, 100.0),
        sm_percent=min(100 * values[SM], 100.0) if SM in values else None,
        memory_used_bytes=int(values[USED]) * MIB if USED in values else None,
    )


def _warnings(*, timed: bool, parts: bool) -> Iterator[str]:
    yield "measured by dcgm-exporter, which lists no processes"
    if not timed:
        yield "the file has no times: its samples count as one second apart"
    if parts:
        yield "MIG instances are left out: only whole GPUs are shown"
