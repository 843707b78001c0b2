"""The GPUs in the cockpit: a line each, with MIG instances and MPS daemons below, and charts of the past. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.base.model import Gpu, GpuSensors, MigInstance, MpsDaemon, Way
from gpushare.base.units import format_bytes, format_duration
from gpushare.show.status import silent_word
from gpushare.show.text import visible
from gpushare.top.draw import Piece, bar, chart, fit, sparkline
from gpushare.top.history import SERIES, History, gpu_values
from gpushare.top.jobs import size_text

if TYPE_CHECKING:
    from gpushare.top.frame import Frame

_HOT_CELSIUS: Final = 85
_FULL: Final = 0.97
# The column of the way of sharing; the longest word has twelve letters.
_SHARING: Final = 13
# The bars are at least so wide.
_LEAST_UTIL: Final = 6
_LEAST_MEMORY: Final = 8


class Layout(NamedTuple):
    """The widths of the parts of a GPU's line; 0: not shown."""

    name: int
    util: int
    memory: int
    past: int
    sm: int
    clocks: int
    pcie: int
    fan: int


def layout_of(width: int, longest_name: int) -> Layout:
    """Return how many columns each part of a line has; 0: it does not fit.

    Name and bars are always there; then, as far as they fit, the history (``past``), SM activity, clocks, PCIe and fan. What
    is left widens the name, the bars and the history.
    """
    # Number, bars with their figures, power, temperature, sharing, and blanks between.
    room = width - (4 + (_LEAST_UTIL + 6) + (_LEAST_MEMORY + 12) + 5 + 6 + _SHARING)
    name = min(longest_name, 9, max(0, room - 1))
    room -= name + 1
    # The other parts, each with a blank after it.
    past = min(10, room - 1) if room > 6 else 0
    if past:
        room -= past + 1
    optional = {"sm": 6, "clocks": 8, "pcie": 13, "fan": 4}
    for part, cells in optional.items():
        if room > cells:
            room -= cells + 1
        else:
            optional[part] = 0
    # What is left.
    wider_name = max(0, min(longest_name - name, room // 4))
    room -= wider_name
    wider_util = min(18, room // 4)
    wider_memory = min(30, room // 3)
    room -= wider_util + wider_memory
    return Layout(
        name=name + wider_name,
        util=_LEAST_UTIL + wider_util,
        memory=_LEAST_MEMORY + wider_memory,
        past=past + min(50, max(0, room)) if past else 0,
        **optional,
    )


def short_name(gpu: Gpu) -> str:
    """Return the model of a GPU without what all of them have."""
    return visible((gpu.name or "GPU").removeprefix("NVIDIA ").replace("Tesla ", "").replace("GeForce ", ""))


def head_line(layout: Layout) -> list[Piece]:
    """Return the titles above the GPUs."""
    pieces: list[Piece] = [(fit(" GPU", layout.name + 5), "dim")]
    pieces.append((fit("UTIL", layout.util + 6), "dim"))
    pieces.append((fit("MEMORY", layout.memory + 12), "dim"))
    if layout.past:
        pieces.append((fit("LAST 5 MIN" if layout.past >= 10 else "5 MIN", layout.past + 1), "dim"))
    if layout.sm:
        pieces.append((fit("SM", layout.sm, right=True) + " ", "dim"))
    pieces.append(("POWER TEMP ", "dim"))
    for width, title in ((layout.clocks, "SM CLOCK"), (layout.pcie, "PCIE ↓/↑ MB/s"), (layout.fan, "FAN")):
        if width:
            pieces.append((fit(title, width, right=True) + " ", "dim"))
    pieces.append(("SHARING", "dim"))
    return pieces


def gpu_line(frame: Frame, gpu: Gpu, history: History, layout: Layout) -> list[Piece]:
    """Return the line of a GPU, with the parts of its layout; for one that does not answer, its error."""
    pieces: list[Piece] = [
        (f"{gpu.index:>3} ", "text"),
        (fit(short_name(gpu)[: layout.name], layout.name) + " ", "text"),
    ]
    if gpu.error is not None:
        return [*pieces, (f"{silent_word(gpu.error)}  ", "bad"), (visible(gpu.error), "dim")]
    util = gpu.utilization_percent
    pieces += bar(layout.util, [(None if util is None else util / 100, "util")])
    pieces.append(_percent_piece(util))
    pieces += memory_bar(gpu, layout.memory)
    pieces.append((fit(used_text(gpu), 11, right=True) + " ", "bad" if _is_full(gpu) else "text"))
    if layout.past:
        # The driver tells no utilization in MIG mode.
        series = "sm" if gpu.mig_enabled else "util"
        pieces += [sparkline(history.means(gpu.index, series, layout.past), series), (" ", "text")]
    if layout.sm:
        sm = frame.activity(gpu)
        pieces.append(_figure_piece(sm, "%", layout.sm, "sm" if sm else "dim"))
    sensors = frame.sensors.get(gpu.index, GpuSensors())
    pieces += _power_and_heat(sensors)
    if layout.clocks:
        colour = "warn" if sensors.slowed_by else "dim"
        pieces.append(_figure_piece(sensors.sm_clock_mhz, "MHz", layout.clocks, colour))
    if layout.pcie:
        traffic = f"{_megabytes(sensors.pcie_received)}/{_megabytes(sensors.pcie_sent)}"
        pieces.append((fit(traffic, layout.pcie, right=True) + " ", "dim"))
    if layout.fan:
        pieces.append(_figure_piece(sensors.fan_percent, "%", layout.fan, "dim"))
    pieces.append((sharing_text(frame, gpu), "text"))
    return pieces


def _figure_piece(value: float | None, unit: str, width: int, colour: str) -> Piece:
    """Return a figure without decimals at the right of its column, and a blank after it; a dash if it is unknown."""
    return (fit("-" if value is None else f"{value:.0f}{unit}", width, right=True) + " ", colour)


def _percent_piece(value: float | None) -> Piece:
    return _figure_piece(value, "%", 5, "text" if value else "dim")


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:.0f}"


def _power_and_heat(sensors: GpuSensors) -> list[Piece]:
    """Return power and temperature, coloured if clocks are lowered or the GPU is hot."""
    watts = sensors.power_watts
    power_colour = "text" if watts else "dim"
    if sensors.slowed_by:
        power_colour = "warn"
    heat = sensors.temperature_celsius
    heat_colour = "text" if heat else "dim"
    if heat is not None and heat >= _HOT_CELSIUS:
        heat_colour = "bad"
    power = fit("-" if watts is None else f"{watts:.0f}W", 5, right=True)
    return [(power, power_colour), _figure_piece(heat, "°", 5, heat_colour)]


def _is_full(gpu: Gpu) -> bool:
    return bool(gpu.memory_total_bytes) and (gpu.memory_used_bytes or 0) > _FULL * (gpu.memory_total_bytes or 1)


def memory_bar(gpu: Gpu | MigInstance, width: int) -> list[Piece]:
    """Return what is held, what jobs have reserved above that, and the rest."""
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    if not total or used is None:
        return bar(width, [(None, "memory")])
    reserved = max(0, (gpu.jobs_reserved_bytes or 0) - used)
    colour = "bad" if isinstance(gpu, Gpu) and _is_full(gpu) else "memory"
    return bar(width, [(used / total, colour), (reserved / total, "reserved")])


def used_text(gpu: Gpu | MigInstance) -> str:
    """Return memory as ``31.2/79.6G``."""
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    return f"{size_text(used).removesuffix('G')}/{size_text(total)}"


def sharing_text(frame: Frame, gpu: Gpu) -> str:
    """Return how a GPU is shared, in few words: ``MPS 50% 3/48``, ``MIG 3``, ``time-slicing``."""
    way = frame.way(gpu)
    if way is Way.MIG:
        return f"MIG {len(gpu.mig_instances)}"
    if way is Way.MPS:
        daemons = frame.daemons_of(gpu)
        limits = {daemon.threads_percent for daemon in daemons} - {None, 100.0}
        clients = sum(len(daemon.clients) for daemon in daemons)
        most_clients = next((f"/{daemon.max_clients}" for daemon in daemons if daemon.max_clients), "")
        text = f"MPS {f'{limits.pop():g}% ' if len(limits) == 1 else ''}{clients}"
        return text + most_clients if len(text + most_clients) <= _SHARING else text
    if way is Way.MPS_TIMESLICE:
        return "MPS+slicing"
    return "-" if way is None else way.label


def lines_below(frame: Frame, gpu: Gpu, layout: Layout) -> list[list[Piece]]:
    """Return the lines below a GPU: its MIG instances with their load, and its MPS daemons with limits."""
    rows = [_instance_line(frame, gpu, instance, layout) for instance in gpu.mig_instances]
    rows += [_daemon_line(gpu, daemon) for daemon in frame.daemons_of(gpu)]
    rows += [
        [(f"reserved for {visible(lease.user)} for {format_duration(lease.seconds_left)}", "warn")]
        for lease in frame.snapshot.leases
        if lease.gpu_uuid == gpu.uuid
    ]
    branches = ["├ "] * (len(rows) - 1) + ["└ "] * min(1, len(rows))
    return [[("    ", "dim"), (branch, "dim"), *row] for branch, row in zip(branches, rows, strict=True)]


def _instance_line(frame: Frame, gpu: Gpu, instance: MigInstance, layout: Layout) -> list[Piece]:
    """Return the line of a MIG instance: its load, its memory, its name, and what runs in it."""
    sm = frame.activity(gpu, instance)
    processes = filter(instance.has, gpu.processes or ())
    names = ", ".join(dict.fromkeys(frame.name_of(each.pid, each.name) or str(each.pid) for each in processes))
    no_names = "-" if gpu.processes is None else "free"
    return [
        ((instance.profile or "-").ljust(max(6, layout.name - 2)) + " ", "text"),
        *bar(layout.util, [(None if sm is None else sm / 100, "sm")]),
        _percent_piece(sm),
        *memory_bar(instance, layout.memory),
        (fit(used_text(instance), 11, right=True) + "  ", "text"),
        (f"{visible(instance.name)}  " if instance.name else "", "good"),
        (visible(names) or no_names, "text" if names else "dim"),
    ]


def _daemon_line(gpu: Gpu, daemon: MpsDaemon) -> list[Piece]:
    """Return the line of an MPS daemon: whose it is, the state of its servers, its clients and limits."""
    status = ", ".join(sorted({server.status or "-" for server in daemon.servers})) or "no server yet"
    instance = next((mig for mig in gpu.mig_instances if mig.uuid == daemon.device_uuid), None)
    where = "" if instance is None else f" in {instance.name or instance.profile}"
    clients = f"{len(daemon.clients)}/{daemon.max_clients or '-'} clients"
    wrong = daemon.error is not None or "FAULT" in status
    limits = _limits_text(daemon.threads_percent, daemon.memory_limit_bytes)
    words = [clients, limits] if daemon.error is None else [daemon.error]
    return [
        (f"MPS{where} {daemon.pid or '-'} {daemon.user or '-'}  ", "text"),
        (f"{'no answer' if daemon.error else status}  ", "bad" if wrong else "good"),
        (visible("  ".join(words)), "dim"),
    ]


def _limits_text(threads_percent: float | None, memory_bytes: int | None) -> str:
    """Return limits of MPS in words. Of memory, None is no limit if the threads are known, else the limit is unknown."""
    if threads_percent is None:
        return f"threads -  memory {format_bytes(memory_bytes)}"
    memory = f"memory {format_bytes(memory_bytes)}" if memory_bytes else "no memory limit"
    return f"threads {threads_percent:g} %  {memory}"


def client_lines(frame: Frame, gpu: Gpu) -> list[list[Piece]]:
    """Return the MPS clients of a GPU with the limits that are in force for them."""
    return [
        [
            ("        ", "dim"),
            (
                f"{client.pid:>8} {fit(client.user or '-', 9)}{fit(visible(frame.name_of(client.pid, client.name) or '-'), 16)}",
                "text",
            ),
            (f" {_limits_text(client.threads_percent, client.memory_limit_bytes)}", "dim"),
        ]
        for daemon in frame.daemons_of(gpu)
        for client in daemon.clients
    ]


def fact_lines(frame: Frame, gpu: Gpu, width: int) -> list[list[Piece]]:
    """Return all that is known of a GPU, for the view of one."""
    sensors = frame.sensors.get(gpu.index, GpuSensors())

    def shown(value: object, unit: str = "") -> str:
        return "-" if value is None else f"{value}{unit}"

    def watts(value: float | None, unit: str = "") -> str:
        return shown(None if value is None else round(value), unit)

    slowed = "-" if sensors.slowed_by is None else ", ".join(sensors.slowed_by) or "nothing"
    mig = {True: "on", False: "off", None: "-"}[gpu.mig_enabled]
    if gpu.mig_capable is False:
        mig = "no"
    facts = [
        [
            ("power", f"{watts(sensors.power_watts)} of {watts(sensors.power_limit_watts, ' W')}"),
            ("temperature", shown(sensors.temperature_celsius, " °C")),
            ("fan", shown(sensors.fan_percent, " %")),
            ("SM clock", f"{shown(sensors.sm_clock_mhz)} of {shown(sensors.sm_clock_max_mhz, ' MHz')}"),
            ("memory clock", shown(sensors.memory_clock_mhz, " MHz")),
            ("slowed by", slowed),
        ],
        [
            ("PCIe in, out", f"{_megabytes(sensors.pcie_received)}, {_megabytes(sensors.pcie_sent)} MB/s"),
            ("encoder", shown(sensors.encoder_percent, " %")),
            ("decoder", shown(sensors.decoder_percent, " %")),
            ("reserved by jobs", size_text(gpu.jobs_reserved_bytes)),
            ("held by no listed process", size_text(gpu.unlisted_bytes)),
        ],
        [
            ("time-slice", shown(None if gpu.time_slice is None else gpu.time_slice.title)),
            ("compute mode", shown(None if gpu.compute_mode is None else gpu.compute_mode.title)),
            ("MIG", mig),
            ("PCI", shown(gpu.pci_bus_id)),
            ("UUID", shown(gpu.uuid)),
        ],
    ]
    return [line for group in facts for line in _flow_facts(group, width)]


def _flow_facts(facts: Sequence[tuple[str, str]], width: int) -> list[list[Piece]]:
    """Return facts, each a title and a value, one after the other in as many lines of ``width`` cells as they need."""
    lines: list[list[Piece]] = []
    room = 0
    for title, value in facts:
        cells = len(title) + len(value) + 4
        if cells > room:
            lines.append([("    ", "dim")])
            room = width - 4
        lines[-1] += [(f"{title} ", "dim"), (f"{value}   ", "text")]
        room -= cells
    return lines


def chart_lines(frame: Frame, gpu: Gpu, history: History, width: int, height: int) -> list[list[Piece]]:
    """Return charts of a GPU side by side, with a line of titles: utilization, memory, SM activity and power."""
    present = gpu_values(frame, gpu)
    shown = [key for key in SERIES if present[key] is not None or key in {"util", "memory"}]
    # As many as have 24 cells each.
    count = max(1, min(len(shown), width // 24))
    # The cells of a chart; what is left over makes the first charts a cell wider.
    cells_each, extra_cells = divmod(width - 1 - count, count)
    heads: list[Piece] = [(" ", "dim")]
    rows: list[list[Piece]] = [[(" ", "dim")] for _ in range(height - 1)]
    watts = frame.sensors.get(gpu.index, GpuSensors()).power_watts
    for number, key in enumerate(shown[:count]):
        cells = cells_each + (number < extra_cells)
        share = present[key]
        figure = "-" if share is None else f"{100 * share:.0f} %"
        if key == "memory":
            figure = used_text(gpu)
        elif key == "power" and watts is not None:
            figure = f"{watts:.0f} W"
        label = f"GPU {gpu.index} {SERIES[key]}"
        heads += [(fit(label, cells - len(figure)), "dim"), (figure, "text"), (" ", "dim")]
        area = chart(history.means(gpu.index, key, cells), height - 1, key)
        for row, line in zip(rows, area, strict=True):
            row += [*line, (" ", "dim")]
    return [heads, *rows]
