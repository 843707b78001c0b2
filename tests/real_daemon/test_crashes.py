"""Some points of the crash injector with the real control daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.test_crashes import crashes

PARTS = {
    "mps": ["mps start --exclusive", "mps start with limits", "mps stop", "mps set"],
    "run": ["run", "run under MPS, its guard too"],
}


@pytest.mark.parametrize("part", PARTS)
def test_one_more_command_brings_back_the_old_or_the_new_state(part: str, real_program: str, tmp_path: Path) -> None:
    words = [word for name in PARTS[part] for word in ("--verb", name)]
    code, said, found = crashes(
        tmp_path, "--real-daemon", real_program, *words, "--sample", "5", "--brief", "--jobs", "2"
    )
    assert code == 0, said
    assert found["daemon"] == "real"
