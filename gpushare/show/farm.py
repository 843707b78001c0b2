"""``gpushare run --copies``: how each copy did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpushare.errors import GpushareError
from gpushare.show.result import Column, Result, Table


def farm_result(
    data: Mapping[str, Any], errors: Sequence[GpushareError] = (), notes: Sequence[str] = (), exit_code: int = 0
) -> Result:
    """Return the result of a farm from its data: keys as the JSON document has them."""
    columns = (
        Column(key="copy", title="copy", right=True),
        Column(key="state", title="state"),
        Column(key="exit_code", title="exit", right=True, rank=1),
        Column(key="seconds", title="seconds", right=True, format=lambda value: f"{value:.1f}"),
        Column(key="tries", title="starts", right=True, rank=2),
        Column(key="failure", title="failure", least=10, optional=True),
        Column(key="log", title="log", rank=3, least=10, optional=True),
    )
    return Result(
        command="run",
        data=data,
        tables=(Table(name="copies", title="copies", columns=columns, rows=tuple(data["copies"])),),
        errors=tuple(errors),
        notes=tuple(notes),
        exit_code=exit_code,
    )
