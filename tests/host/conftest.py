"""Fixtures of the host room: pynvml keeps its library in module globals, which every test leaves as it found them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def bindings() -> Iterator[Any]:
    """Return pynvml as at a fresh start, and put back what was beneath it."""
    import pynvml

    before = pynvml.nvmlLib
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
    yield pynvml
    pynvml.nvmlLib = before
    pynvml._nvmlGetFunctionPointer_cache.clear()
