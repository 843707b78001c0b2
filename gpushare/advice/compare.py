"""The table on one host: what of today holds there, computed from its facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpushare.advice.facts import HOPPER, mps_clients
from gpushare.advice.table import Cell, Table, dated_values, driver_branch, options_of
from gpushare.base.model import ComputeMode, Way
from gpushare.base.units import counted
from gpushare.gpu_models import named_model
from gpushare.mps.limits import VOLTA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpushare.advice.facts import GpuFacts, HostFacts


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a way is available on a GPU; ``usable`` is None if unknown."""

    usable: bool | None
    why: str


def availability(way: Way, host: HostFacts, gpu: GpuFacts) -> Availability:
    """Return whether a way is available on a GPU, and why not."""
    usable, why = (None, f"unknown: {gpu.error}") if gpu.error is not None else _USABLE[way](host, gpu)
    return Availability(usable=usable, why=why)


def cell_here(table: Table, way: Way, row: str, host: HostFacts, gpu: GpuFacts) -> str | None:
    """Return the text of a cell for this GPU; None if the way is not available."""
    if availability(way, host, gpu).usable is False or gpu.error is not None:
        return None
    computed = _COMPUTED.get((way, row))
    text = computed(table, host, gpu) if computed else None
    return text or table.cell(way, row, host.driver).today


# -- availability ---------------------------------------------------------------------------------


def _mps_availability(host: HostFacts, gpu: GpuFacts) -> tuple[bool | None, str]:
    if not host.mps_program:
        return False, "no: nvidia-cuda-mps-control is not installed"
    if gpu.compute_mode is ComputeMode.PROHIBITED:
        return False, "no: compute mode prohibited"
    if gpu.mig_enabled:
        return True, "yes, one daemon per MIG instance"
    return True, f"yes, without root{f'; {gpu.mps_daemons} running' if gpu.mps_daemons else ''}"


def _timeslice_availability(_host: HostFacts, gpu: GpuFacts) -> tuple[bool | None, str]:
    if gpu.compute_mode is not None and gpu.compute_mode is not ComputeMode.DEFAULT:
        return False, f"no: compute mode {gpu.compute_mode.title}"
    return True, "yes, inside each MIG instance" if gpu.mig_enabled else "yes, it is the default"


def _mig_availability(host: HostFacts, gpu: GpuFacts) -> tuple[bool | None, str]:
    if gpu.mig_capable is None:
        return None, "unknown: the driver does not report it"
    if not gpu.mig_capable:
        return False, f"no: {gpu.name or 'this GPU'} has no MIG"
    if gpu.mig_enabled:
        instances = counted(0 if gpu.layout is None else len(gpu.layout.instances), "instance")
        return True, f"yes: on, {instances}" + ("" if host.root else "; changing it needs root")
    return True, "yes: off now" + ("" if host.root else "; turning it on needs root")


def _vgpu_availability(_host: HostFacts, gpu: GpuFacts) -> tuple[bool | None, str]:
    if gpu.vgpu_capable:
        return True, "yes: the vGPU host driver runs"
    if gpu.vgpu_capable is None:
        return None, "not with this driver: it needs a hypervisor, NVIDIA's vGPU driver and a licence"
    model = named_model(gpu.name)
    is_board = model is not None and model.vgpu is False
    return False, f"no: NVIDIA's vGPU software does not support {gpu.name}" if is_board else "no: this is a vGPU guest"


_USABLE: Final[dict[Way, Callable[[HostFacts, GpuFacts], tuple[bool | None, str]]]] = {
    Way.STREAMS: lambda _host, _gpu: (True, "yes, inside each program"),
    Way.MPS: _mps_availability,
    Way.TIMESLICE: _timeslice_availability,
    Way.MIG: _mig_availability,
    Way.VGPU: _vgpu_availability,
}


# -- cells that the host decides -------------------------------------------------------------------


def _mps_max_text(table: Table, host: HostFacts, gpu: GpuFacts) -> str | None:
    """Return how many clients a server takes; None: the table's text holds."""
    clients = mps_clients(table, host, gpu)
    if clients is None:
        return None
    version = "" if host.mps_version is None else f" (MPS {host.mps_version})"
    if gpu.compute_capability is not None and gpu.compute_capability < VOLTA:
        version = " (before Volta)"
    return f"{clients} clients{version}" + ("; a share of them in each MIG instance" if gpu.mig_enabled else "")


def _text_before_volta(text: str) -> Callable[[Table, HostFacts, GpuFacts], str | None]:
    """Return the function that gives a text for a GPU before Volta; for others, the table's text holds."""

    def text_of(_table: Table, _host: HostFacts, gpu: GpuFacts) -> str | None:
        return text if gpu.compute_capability is not None and gpu.compute_capability < VOLTA else None

    return text_of


def _timeslice_change_text(table: Table, host: HostFacts, gpu: GpuFacts) -> str | None:
    """Return who may change the level of the GPU, and whether a process can have a slice; None: unknown."""
    if gpu.time_slice_settable is None:
        return None
    if not gpu.time_slice_settable:
        return "No: this GPU has no time-slice levels"
    rights = "you are root" if host.root else "needs root"
    levels = f"Live, {rights}: default, short, medium, long for the GPU"
    per_process = table.cell(Way.TIMESLICE, "reconfigure", host.driver or "0").options
    return f"{levels}; a slice per process" if per_process else levels


def _mig_max_text(_table: Table, _host: HostFacts, gpu: GpuFacts) -> str | None:
    """Return how many instances fit, with the profile that fits that often; None: the table's text holds."""
    most = gpu.largest_instance_count
    plain = [] if gpu.layout is None else [profile for profile in gpu.layout.profiles if profile.plain]
    if most is None or not plain:
        # Nothing is listed. With MIG on, no reason is known.
        return None if gpu.mig_enabled else "Up to 7; this driver does not list the profiles while MIG is off"
    smallest = next((profile.name for profile in plain if profile.instances == most), None)
    return str(most) if smallest is None else f"{most} of {smallest}"


def _mig_change_text(_table: Table, host: HostFacts, gpu: GpuFacts) -> str | None:
    """Return when MIG can be changed here, and by whom; None: the table's text holds."""
    rights = "you are root" if host.root else "needs root"
    if gpu.mig_enabled:
        return f"Idle instances at any time, {rights}"
    if gpu.compute_capability is None:
        return None
    how = "no reset" if gpu.compute_capability >= HOPPER else "with a reset of the GPU"
    if gpu.processes is None:
        return f"When idle, {rights}; {how}"
    present = f"{counted(gpu.processes, 'process')} now" if gpu.processes else "idle now"
    return f"When idle, {rights}; {how}; {present}"


_COMPUTED: Final[dict[tuple[Way, str], Callable[[Table, HostFacts, GpuFacts], str | None]]] = {
    (Way.MPS, "max_partitions"): _mps_max_text,
    (Way.MPS, "sm_isolation"): _text_before_volta("No: MPS has no caps before Volta"),
    (Way.MPS, "memory_protection"): _text_before_volta("No: one address space before Volta"),
    (Way.TIMESLICE, "reconfigure"): _timeslice_change_text,
    (Way.MIG, "max_partitions"): _mig_max_text,
    (Way.MIG, "reconfigure"): _mig_change_text,
}


NOT_HERE: Final = "not here"


@dataclass(frozen=True, kw_only=True)
class HostCell(Cell):
    """One cell with the title of its row, and its text on this host."""

    title: str
    # None: there is no host, or the way is not available there.
    host: str | None


def host_cell(table: Table, way: Way, row_key: str, driver: str | None, host: HostFacts | None) -> HostCell:
    """Return a cell with the title of its row, and its text on this host."""
    return HostCell(
        **vars(table.cell(way, row_key, driver)),
        title=table.row(row_key).title,
        host=None if host is None else text_here(table, way, row_key, host, answering_gpus(host)),
    )


def answering_gpus(host: HostFacts) -> tuple[GpuFacts, ...]:
    return tuple(gpu for gpu in host.gpus if gpu.error is None)


def text_here(table: Table, way: Way, row_key: str, host: HostFacts, gpus: Sequence[GpuFacts]) -> str | None:
    """Return the text of a cell for these GPUs: once if they agree, else by GPU; None if available on none."""
    return _text_by_gpu([(gpu.index, cell_here(table, way, row_key, host, gpu)) for gpu in gpus])


def availability_text(way: Way, host: HostFacts, gpus: Sequence[GpuFacts]) -> str:
    """Return whether a way is available on these GPUs, in words."""
    return _text_by_gpu([(gpu.index, availability(way, host, gpu).why) for gpu in gpus]) or NOT_HERE


def _text_by_gpu(texts: Iterable[tuple[int, str | None]]) -> str | None:
    """Return the texts of GPUs as one: once if all agree, else with the indexes before each."""
    by_text: dict[str | None, list[int]] = {}
    for index, text in texts:
        by_text.setdefault(text, []).append(index)
    if len(by_text) < 2:
        return next(iter(by_text), None)
    return ". ".join(f"GPU {','.join(map(str, indexes))}: {text or NOT_HERE}" for text, indexes in by_text.items())


def today_text(cell: Cell, driver: str | None) -> str:
    """Return the present text of a cell; if the driver is unknown, with the one from which on it is true."""
    return cell.today if cell.since is None or driver is not None else f"{cell.today} [driver {cell.since} on]"


def explanation_lines(
    table: Table,
    way: Way,
    row_key: str,
    driver: str | None,
    host: HostFacts | None,
    why_no_host: str | None,
) -> list[tuple[str, str]]:
    """Return all that is known about a cell as pairs of a title and a text: views, level, options, sources."""
    entry = table.entries[way, row_key]
    cell = table.cell(way, row_key, driver)
    row = table.row(row_key)
    lines = [("question", row.question), ("published 2022", cell.published), *_lines_by_driver(entry)]
    if host is not None:
        gpus = answering_gpus(host)
        # The availability begins with "no: ", which `NOT_HERE` says.
        not_here = f"{NOT_HERE}: {availability_text(way, host, gpus).removeprefix('no: ')}"
        lines.append(("this host", text_here(table, way, row_key, host, gpus) or not_here))
    elif why_no_host:
        lines.append(("this host", f"not known: {why_no_host}"))
    lines.append(("level", f"{cell.level} (of {', '.join(row.levels)})"))
    branch = driver_branch(driver)
    for option in options_of(entry):
        since = "" if option.since is None else f", driver {option.since} on"
        if branch is not None and option.since is not None and branch < option.since:
            since += " (not this driver)"
        lines.append(("option", f"{option.key}{since}: {option.text}; level {option.level}"))
    if cell.contradiction:
        lines.append(("sources disagree", cell.contradiction))
    if cell.note:
        lines.append(("note", cell.note))
    lines += [("source", f"{source.title} ({source.date}), {source.where}") for source in cell.sources]
    return lines


def _lines_by_driver(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is true today of a cell of the file; one line for each driver branch from which it differs."""
    texts = dated_values(entry["today"], "text")
    lines = [("today" if since is None else f"driver {since} on", text) for since, text in texts]
    if len(texts) > 1:
        lines[0] = (f"before driver {texts[1].since}", texts[0].value)
    return lines
