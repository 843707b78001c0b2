"""A benchmark as a picture: throughput against copies, a line a way. The only importer of matplotlib (optional)."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpushare.errors import BadUsage, NotSupported
from gpushare.units import quoted


def check_plot(text: str) -> None:
    """Raise unless a picture of this name can be drawn, before anything is measured.

    Raises:
        BadUsage: neither PNG nor SVG.
        NotSupported: matplotlib is not installed.
    """
    from importlib.util import find_spec

    if Path(text).suffix.lower() not in {".png", ".svg"}:
        raise BadUsage(f"{quoted(text)} is neither .png nor .svg", "give --plot bench.png", code="bad_plot")
    if find_spec("matplotlib") is None:
        raise NotSupported(
            "drawing needs matplotlib, and it is not installed",
            "install it: pip install 'gpushare[plot]'; or leave --plot away",
            code="no_matplotlib",
        )


def drawn(data: Mapping[str, Any], form: str) -> bytes:
    """Return throughput against copies as a picture, ``png`` or ``svg``, with intervals as error bars."""
    import matplotlib as mpl

    # No window: this may run where there is no display.
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    try:
        ways = list(dict.fromkeys(cell["way"] for cell in data["cells"]))
        for way, marker in zip(ways, itertools.cycle("osD^vPX*"), strict=False):
            cells = [cell for cell in data["cells"] if cell["way"] == way and cell["throughput"] is not None]
            if cells:
                means = [cell["throughput"]["mean"] for cell in cells]
                below = [mean - (cell["throughput"]["low"] or mean) for cell, mean in zip(cells, means, strict=True)]
                axes.errorbar(
                    [cell["copies"] for cell in cells],
                    means,
                    yerr=below,
                    label=way,
                    marker=marker,
                    alpha=0.7,
                    capsize=3,
                )
        numbers = sorted({cell["copies"] for cell in data["cells"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("copies")
        unit = data["workload"]["unit"] if data["workload"] else "runs per second"
        axes.set_ylabel(unit if data["metric"]["pattern"] is None or data["workload"] else "printed number")
        axes.set_title(f"{data['gpu']['name'] or 'GPU'}, driver {data['driver'] or 'unknown'}")
        axes.grid(alpha=0.3)
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150, format=form)
        return picture.getvalue()
    finally:
        plt.close(figure)
