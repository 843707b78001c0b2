"""``gpushare bench --size`` with several sizes: times, and where copies begin to take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpushare.base.units import format_copies
from gpushare.show.plot import picture
from gpushare.show.result import Column, Result, Table


def sizes_result(data: Mapping[str, Any], notes: Sequence[str] = (), **more: Any) -> Result:
    """Return the result from the data of `measure.sizes`."""
    gpu, workload = data["gpu"], data["workload"]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(data["started_at"]))
    first = f"{data['host']}   GPU {gpu['index']} {gpu['name']}   driver {data['driver']}   {began}"
    beside = [name for key, name in (("cpu", "as many on the CPU"), ("copy", "a copy to the GPU")) if workload.get(key)]
    what = f"matrix multiplications ({', '.join([workload['backend'], *beside])})"
    return Result(
        command="bench",
        data=data,
        text="\n".join([first, what, "", *map(_sentence, data["concurrency"])]),
        tables=(_times(data),),
        csv=_csv(data),
        notes=tuple(notes),
        **more,
    )


def _sentence(end: Mapping[str, Any]) -> str:
    copies, until, ends = format_copies(end["copies"]), end["concurrent_until"], end["ends_at"]
    if until is None:
        return f"{end['way']}: {copies} take turns at every size ({end['gain_at_end']:.2f} x one copy)."
    said = f"{end['way']}: {copies} run at the same time up to {until} ({end['gain_until']:.2f} x one copy)"
    if ends is None:
        return f"{said}, the largest size that was measured."
    return f"{said}; concurrency ends at {ends} ({end['gain_at_end']:.2f} x)."


def format_time(seconds: float | None) -> str:
    """Return a time with three digits and its unit: ``64.1 us``, ``1.27 ms``, ``2.5 s``."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _times(data: Mapping[str, Any]) -> Table:
    numbers = sorted({cell["copies"] for cell in data["cells"]})
    rows = []
    for size in data["sizes"]:
        mine = [cell for cell in data["cells"] if cell["size"] == size]
        for way in dict.fromkeys(cell["way"] for cell in mine):
            own = {cell["copies"]: cell for cell in mine if cell["way"] == way}
            alone = next((cell["alone_seconds"] for cell in own.values()), None)
            rows.append(
                {
                    "size": size,
                    "way": way,
                    "alone": alone,
                    **{f"n{number}": _shown(own.get(number), alone) for number in numbers},
                }
            )
    columns = (
        Column("size", "size", right=True, group=True),
        Column("way", "way"),
        Column("alone", "alone", right=True, format=format_time),
        *(
            Column(f"n{number}", format_copies(number), right=True)
            for number in numbers
            if number > 1 or len(numbers) == 1
        ),
    )
    return Table(
        name="times",
        title="time until each copy has multiplied once (x alone)",
        columns=columns,
        rows=tuple(rows),
        empty="nothing was measured",
    )


def _shown(cell: Mapping[str, Any] | None, alone: float | None) -> str | None:
    if cell is None:
        return None
    if cell["seconds"] is None:
        return "failed" if cell["failures"] else None
    return format_time(cell["seconds"]) + (f" ({cell['seconds'] / alone:.1f})" if alone else "")


def _csv(data: Mapping[str, Any]) -> Table:
    keys = ("size", "way", "copies", "seconds", "low", "high", "alone_seconds", "gain")
    return Table(name="cells", columns=tuple(Column(key, key) for key in keys), rows=tuple(map(dict, data["cells"])))


def drawn_sizes(data: Mapping[str, Any], form: str) -> bytes:
    """Return time against size as a picture, a line for each way and number of copies."""

    def draw(axes: Any) -> None:
        keys = list(dict.fromkeys((cell["way"], cell["copies"]) for cell in data["cells"]))
        for (way, copies), marker in zip(keys, itertools.cycle("osD^vPX*"), strict=False):
            cells = [cell for cell in data["cells"] if (cell["way"], cell["copies"]) == (way, copies)]
            cells = [cell for cell in cells if cell["seconds"] is not None]
            sizes, seconds = ([cell[key] for cell in cells] for key in ("size", "seconds"))
            axes.plot(sizes, seconds, label=f"{way}, {format_copies(copies)}", marker=marker)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(data["sizes"], [str(size) for size in data["sizes"]])
        axes.set_xlabel("size of the matrices")
        axes.set_ylabel("seconds until each copy has multiplied once")

    return picture(form, data["gpu"]["name"], data["driver"], draw)
