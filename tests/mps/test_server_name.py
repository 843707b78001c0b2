"""By which name an MPS server is known."""

from __future__ import annotations

import pytest

from gpushare.mps.control import is_server


@pytest.mark.parametrize(
    ("name", "known"),
    [("nvidia-cuda-mps-server", True), ("nvidia-cuda-mps", True), ("nvidia", False), ("", False), (None, False)],
)
def test_a_server_is_known_by_its_name_also_where_the_kernel_cut_it(name: str | None, known: bool) -> None:
    assert is_server(name) is known
