"""The simulated nvidia-smi against the real ones, with wrong input and where nothing changes.

The answers were recorded from the programs of drivers 550 and 580 on NVIDIA's mocked NVML, to which a small library added
MIG and compute modes: one GPU, persistence mode off, MIG off or on with a 1g at 0 and a 3g at 4. A few of each kind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpushare.sim import admin, open_simulated, smi

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "data" / "nvidia-smi-wrong-input.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("mig", [False, True], ids=["mig-off", "mig-on"])
def test_every_answer_is_the_recorded_one(mig: bool) -> None:
    file = open_simulated("sim:h200").state_file
    if mig:
        admin.set_mig("sim:h200", "0", ["1g.18gb:0", "3g.71gb:4"])
    with file.changed() as state:
        state.gpus[0].persistence = False
    before = file.path.read_text()
    wrong = {}
    for one in [one for one in RECORDED if one["mig"] == mig]:
        done = smi.main(("nvidia-smi", *one["argv"]), file)
        answer = one["code"], one["stdout"], one.get("stderr", "")
        if (done.exit_code, done.stdout, done.stderr) != answer:
            wrong[tuple(one["argv"])] = answer, done
        file.path.write_text(before)
    assert wrong == {}
