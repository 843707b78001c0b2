"""Rows of a table in which many inputs have the same outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def each(*groups: tuple[Iterable[Any], Any]) -> list[tuple[Any, Any]]:
    """Return a row (input, outcome) for each input of each group (inputs, outcome)."""
    return [(one, outcome) for inputs, outcome in groups for one in inputs]
