"""The meaning of the column heads: each head of `status` and `jobs` has one."""

from __future__ import annotations

import re
from pathlib import Path

from gpushare.show import jobs, status
from gpushare.show.legend import HEADS, legend_result


def test_every_head_is_explained() -> None:
    heads: set[str] = set()
    for module in (jobs, status):
        source = Path(str(module.__file__)).read_text()
        heads |= set(re.findall(r'Column\(\s*"\w+",\s*"([^"]+)"', source))
        heads |= set(re.findall(r'_(?:memory|percent)\("\w+", "([^"]+)"', source))
    assert heads - HEADS.keys() == set()


def test_it_fits_a_narrow_terminal() -> None:
    assert max(map(len, str(legend_result().text).splitlines())) <= 80
