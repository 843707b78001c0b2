"""Pictures of measurements, by matplotlib: an extra, imported here only."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.units import quoted


def check_plot(text: str) -> None:
    """Raise unless a picture can be drawn into a file of this name: called before the measurement that it shows."""
    if Path(text).suffix.lower() not in {".png", ".svg"}:
        raise BadUsage(f"{quoted(text)} is neither .png nor .svg", "give --plot bench.png", code="bad_plot")
    if find_spec("matplotlib") is None:
        raise NotSupported(
            "drawing needs matplotlib, which is not installed",
            "install it: pip install matplotlib, or pipx inject gpushare matplotlib; or drop --plot",
            code="no_matplotlib",
        )


def picture(form: str, gpu: str | None, driver: str | None, draw: Callable[[Any], object]) -> bytes:
    """Return a picture, ``png`` or ``svg``, of what ``draw`` puts on its axes; the title names GPU and driver."""
    import matplotlib as mpl

    # Without a window: there may be no display.
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    try:
        draw(axes)
        axes.set_title(f"{gpu or 'GPU'}, driver {driver or 'unknown'}")
        axes.grid(alpha=0.3)
        axes.legend()
        file = io.BytesIO()
        figure.savefig(file, dpi=150, format=form)
        return file.getvalue()
    finally:
        plt.close(figure)
