"""The CSV queries of nvidia-smi: ``--query-gpu`` and ``--query-compute-apps``."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpushare.sim import activity, smi_view
from gpushare.sim.smi import Wrong
from gpushare.sim.smi_view import Chosen
from gpushare.sim.state import SimulatedHostState
from gpushare.units import MIB

_MODE_TITLES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "pid": "pid",
    "process_name": "process_name",
}
_APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}
_Value = Callable[[SimulatedHostState, Chosen], object]


def _memory(position: int) -> _Value:
    def value(state: SimulatedHostState, one: Chosen) -> object:
        found = smi_view.memory_mib(state, one)
        return None if found is None else found[position]

    return value


def _free(state: SimulatedHostState, one: Chosen) -> object:
    found = smi_view.memory_mib(state, one)
    return None if found is None else found[0] - found[1] - found[2]


def _power_limit(_state: SimulatedHostState, one: Chosen) -> object:
    limit = one.model.power_limit_watts
    return None if limit is None else f"{limit:.2f}"


def _power(state: SimulatedHostState, one: Chosen) -> object:
    watts = smi_view.power_watts(state, one)
    return None if watts is None else f"{watts:.2f}"


def _mig_title(mode: int | None) -> object:
    return None if mode is None else ("Disabled", "Enabled")[mode]


# Field: unit and value; None is [N/A].
_GPU_FIELDS: dict[str, tuple[str, _Value]] = {
    "timestamp": (
        "",
        lambda _state, _one: time.strftime("%Y/%m/%d %H:%M:%S") + f".{int(time.time() * 1000) % 1000:03d}",
    ),
    "driver_version": ("", lambda state, _one: state.driver),
    "count": ("", lambda state, _one: len(state.gpus)),
    "index": ("", lambda _state, one: one.index),
    "name": ("", lambda _state, one: one.model.name),
    "uuid": ("", lambda _state, one: one.gpu.uuid),
    "pci.bus_id": ("", lambda _state, one: one.gpu.pci_bus_id),
    "compute_cap": ("", lambda _state, one: one.model.compute_capability),
    "compute_mode": ("", lambda _state, one: _MODE_TITLES[one.gpu.compute_mode]),
    "persistence_mode": ("", lambda _state, one: "Enabled" if one.gpu.persistence else "Disabled"),
    "mig.mode.current": ("", lambda _state, one: _mig_title(one.gpu.mig_mode)),
    "mig.mode.pending": ("", lambda _state, one: _mig_title(one.gpu.mig_pending)),
    "memory.total": ("MiB", _memory(0)),
    "memory.reserved": ("MiB", _memory(1)),
    "memory.used": ("MiB", _memory(2)),
    "memory.free": ("MiB", _free),
    "utilization.gpu": ("%", smi_view.utilization),
    "temperature.gpu": ("", smi_view.temperature),
    "power.draw": ("W", _power),
    "power.limit": ("W", _power_limit),
}
_APP_FIELDS = ("timestamp", "gpu_name", "gpu_bus_id", "gpu_uuid", "pid", "process_name", "used_gpu_memory")


def check(query: str, fields: str, form: str | None, major: int) -> None:
    """Check what a query asks for, before any GPU is looked at.

    Raises:
        Wrong: a format or a field is not known, or the format is missing, which it may from 580 on.
    """
    words = [word.strip() for word in (form or "").split(",") if word.strip()]
    if form is None and major < 580:
        raise Wrong(2, "\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n\n")
    if set(words) - {"csv", "noheader", "nounits"}:
        raise Wrong(2, "Format modifier is not recognized.\n")
    if "csv" not in words and major < 580:
        raise Wrong(2, "Format modifier --format=csv is mandatory.\n")
    known = _GPU_FIELDS.keys() if query == "--query-gpu" else set(_APP_FIELDS)
    for name in _names(fields):
        if _ALIASES.get(name, name) not in known and _APP_ALIASES.get(name, name) not in known:
            raise Wrong(2, f'Field "{name}" is not a valid field to query.\n\n')


def _names(fields: str) -> list[str]:
    return [name.strip() for name in fields.split(",") if name.strip()]


def gpus(state: SimulatedHostState, chosen: list[Chosen], fields: str, form: str) -> str:
    """Return the text of ``--query-gpu=FIELDS --format=csv[,noheader][,nounits]``."""
    names = _names(fields)
    header = [(name, _GPU_FIELDS[_ALIASES.get(name, name)][0]) for name in names]
    rows = [[_GPU_FIELDS[_ALIASES.get(name, name)][1](state, one) for name in names] for one in chosen]
    return _csv(header, rows, form)


def compute_apps(state: SimulatedHostState, chosen: list[Chosen], fields: str, form: str) -> str:
    """Return the text of ``--query-compute-apps``: MPS servers and clients are both in it."""
    names = [_APP_ALIASES.get(name, name) for name in _names(fields)]
    titles = activity.process_names(state)
    rows: list[list[object]] = []
    for one in chosen:
        for resident in smi_view.residents(state, one):
            if resident.graphics:
                continue
            values: dict[str, object] = {
                "pid": resident.pid,
                "process_name": titles.get(resident.pid, "[Not Found]"),
                "used_gpu_memory": resident.memory_bytes // MIB,
            }
            rows.append(
                [
                    values[name] if name in values else _GPU_FIELDS[_ALIASES.get(name, name)][1](state, one)
                    for name in names
                ]
            )
    return _csv([(name, "MiB" if name == "used_gpu_memory" else "") for name in names], rows, form)


def _csv(header: list[tuple[str, str]], rows: list[list[object]], form: str) -> str:
    words = [word.strip() for word in form.split(",")]
    units = "nounits" not in words
    lines = []
    if "noheader" not in words:
        lines.append(", ".join(f"{name} [{unit}]" if unit else name for name, unit in header))
    for row in rows:
        cells = []
        for (_, unit), value in zip(header, row, strict=True):
            text = "[N/A]" if value is None else str(value)
            cells.append(f"{text} {unit}" if unit and units and value is not None else text)
        lines.append(", ".join(cells))
    return "".join(f"{line}\n" for line in lines)
