"""What a test says of an error that a call must raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gpushare.base.errors import GpushareError


@contextmanager
def fails(
    kind: type[GpushareError], code: str, *, message: str = "", hint: str = "", match: str | None = None
) -> Iterator[Any]:
    """Expect an error of this kind and code, with these parts in its message and its hint."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.value.code == code
    assert message in caught.value.message
    assert hint in caught.value.hint
