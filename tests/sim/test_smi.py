"""The simulated nvidia-smi, as far as gpushare runs it, against what an H200 with driver 580.159.04 prints."""

from __future__ import annotations

import re
from pathlib import Path

from gpushare.host.program import Completed
from gpushare.sim import admin, open_simulated
from gpushare.sim.programs import run_smi
from gpushare.sim.state import StateFile
from tests.sim.nvml_host import state_of

DATA = Path(__file__).parent.parent / "data" / "h200-r580"
SPEC = "sim:h200"


def run(*words: str, spec: str = SPEC) -> Completed:
    """Run nvidia-smi on a simulated host."""
    return run_smi(("nvidia-smi", *words), open_simulated(spec).state_file)


def captured(name: str) -> str:
    return (DATA / name).read_text()


def test_what_is_printed_is_what_was_captured() -> None:
    assert run("compute-policy", "-l").stdout == captured("compute-policy-list.txt")


def test_setting_the_time_slice_and_reading_it_back() -> None:
    spec = "sim:2xh200"
    uuid = state_of(spec).gpus[1].uuid
    for device, level in ((uuid, "3"), ("1", "2")):
        done = run("compute-policy", "-i", device, "--set-timeslice", level, spec=spec)
        assert done.exit_code == 0
    assert done.stdout == "Successfully set timeslice policy with value Medium for GPU 1\n"
    assert re.findall(r"(\d)   Timeslice +(\w+)", run("compute-policy", "-l", spec=spec).stdout) == [
        ("0", "Default"),
        ("1", "Medium"),
    ]
    assert [gpu.time_slice for gpu in state_of(spec).gpus] == [0, 2]


def test_refusals() -> None:
    short = ("compute-policy", "-i", "0", "--set-timeslice", "1")
    assert run("compute-policy", "-i", "7", "--set-timeslice", "1").stdout == "No devices were found\n"
    assert run("-i", "0", "-c", "DEFAULT").exit_code == run("compute-policy", "--set-timeslice", "9").exit_code == 255
    admin.set_fault(SPEC, "user", value="1000")
    refused = run(*short)
    assert (refused.exit_code, refused.stdout) == (
        4,
        "Failed to set timeslice policy with value Short for GPU 0 : Insufficient Permissions\n",
    )
    assert run("compute-policy", "-l").exit_code == 0
    admin.clear_faults(SPEC)
    admin.set_fault(SPEC, "not-supported", value="time-slice")
    assert run("compute-policy", "-l").stdout == "Failed to get compute policies for GPU 0 : Not Supported\n"
    assert run(*short).exit_code == 3
    assert [gpu.time_slice for gpu in state_of(SPEC).gpus] == [0]


def test_one_lost_gpu_does_not_hide_the_other() -> None:
    admin.set_fault("sim:2xh200", "lost", gpu="0")
    listed = run("compute-policy", "-l", spec="sim:2xh200")
    assert (listed.exit_code, "1   Timeslice" in listed.stdout) == (15, True)
    assert "GPU 0 : GPU is lost" in listed.stdout


def test_a_reader_of_an_unused_host_creates_it() -> None:
    file = StateFile("sim:t4")
    assert "0   Timeslice" in run_smi(("nvidia-smi", "compute-policy", "-l"), file).stdout
    assert file.exists()
