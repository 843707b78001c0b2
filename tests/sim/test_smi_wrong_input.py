"""The simulated nvidia-smi against the real ones, with wrong input and with refused changes.

The answers were recorded from the programs of drivers 535, 550, 555 and 580 on NVIDIA's mocked NVML, to which a small
library added MIG and compute modes: one GPU, persistence mode off, MIG off or on with a 1g at 0 and a 3g at 4. Only
what a driver says in other words than 550 is there for it.
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
DRIVERS = ("535.261.03", "550.163.01", "555.58.02", "580.178.04")


def expected(driver: str, *, mig: bool) -> dict[tuple[str, ...], tuple[int, str, str]]:
    """Return what the program of a driver answers to each command line."""
    found = {}
    for wanted in ("550.163.01", driver):
        found |= {
            tuple(one["argv"]): (one["code"], one["stdout"], one.get("stderr", ""))
            for one in RECORDED
            if (one["driver"], one["mig"]) == (wanted, mig)
        }
    return found


@pytest.mark.parametrize("mig", [False, True], ids=["mig-off", "mig-on"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_every_answer_is_the_recorded_one(driver: str, mig: bool) -> None:
    file = open_simulated("sim:h200").state_file
    admin.set_fault("sim:h200", "driver", value=driver)
    if mig:
        admin.set_mig("sim:h200", "0", ["1g.18gb:0", "3g.71gb:4"])
    with file.changed() as state:
        state.gpus[0].persistence = False
    before = file.path.read_text()
    answers = expected(driver, mig=mig)
    assert len(answers) > 150
    wrong = {}
    for argv, answer in answers.items():
        done = smi.main(("nvidia-smi", *argv), file)
        if (done.exit_code, done.stdout, done.stderr) != answer:
            wrong[argv] = (answer, done)
        file.path.write_text(before)
    assert wrong == {}
