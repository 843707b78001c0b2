"""The simulated nvidia-smi, as far as gpushare runs or prints it, against what an H200 with driver 580.159.04 prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpushare.host.program import Completed
from gpushare.sim import admin, open_simulated, smi
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, StateFile

DATA = Path(__file__).parent.parent / "data" / "h200-r580"
SPEC = "sim:h200"


def run(*words: str, spec: str = SPEC) -> Completed:
    """Run nvidia-smi on a simulated host."""
    return smi.main(("nvidia-smi", *words), open_simulated(spec).state_file)


def captured(name: str) -> str:
    return (DATA / name).read_text()


def state(spec: str = SPEC) -> SimulatedHostState:
    found = open_simulated(spec).state_file.read()
    assert found is not None
    return found


@pytest.fixture
def h200() -> SimulatedGpu:
    """Give the simulated H200 the identity of the captured one."""
    with open_simulated(SPEC).state_file.changed() as changed:
        changed.gpus[0].uuid = "GPU-0d54321e-a080-c56a-bbc0-8fc271e8e655"
        changed.gpus[0].pci_bus_id = "00000000:00:06.0"
        return changed.gpus[0]


def test_compute_policy_texts() -> None:
    assert run("compute-policy", "-l").stdout == captured("compute-policy-list.txt")
    nothing = run("compute-policy")
    text = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n"
    assert (nothing.exit_code, nothing.stdout) == (2, text)


def test_setting_the_time_slice_and_reading_it_back() -> None:
    spec = "sim:2xh200"
    uuid = state(spec).gpus[1].uuid
    for words in (("-i", uuid, "--set-timeslice", "3"), ("--set-timeslice=2", "-i", "1")):
        done = run("compute-policy", *words, spec=spec)
        assert done.exit_code == 0
    assert done.stdout == "Successfully set timeslice policy with value Medium for GPU 1\n"
    assert re.findall(r"(\d)   Timeslice +(\w+)", run("compute-policy", "-l", spec=spec).stdout) == [
        ("0", "Default"),
        ("1", "Medium"),
    ]
    assert [gpu.time_slice for gpu in state(spec).gpus] == [0, 2]


def test_refusals_of_compute_policy() -> None:
    both = run("compute-policy", "-l", "--set-timeslice", "1")
    assert (both.exit_code, both.stdout) == (2, "One, and only one, compute-policy command allowed at a time\n")
    assert run("compute-policy", "-l", "-i", "7").stdout == "No devices were found\n"
    nine = run("compute-policy", "--set-timeslice", "9")
    text = "Failed to set timeslice policy with value Unknown for GPU 0 : Invalid Argument\n"
    assert (nine.exit_code, nine.stdout) == (2, text)
    assert run("compute-policy", "--bogus").exit_code == 2
    admin.set_fault(SPEC, "user", value="1000")
    refused = run("compute-policy", "--set-timeslice", "1")
    assert (refused.exit_code, refused.stdout) == (
        4,
        "Failed to set timeslice policy with value Short for GPU 0 : Insufficient Permissions\n",
    )
    assert run("compute-policy", "-l").exit_code == 0
    admin.clear_faults(SPEC)
    admin.set_fault(SPEC, "not-supported", value="time-slice")
    assert run("compute-policy", "-l").stdout == "Failed to get compute policies for GPU 0 : Not Supported\n"
    assert [gpu.time_slice for gpu in state().gpus] == [0]


def test_compute_modes() -> None:
    bus = state().gpus[0].pci_bus_id
    for word, title, mode in (
        ("EXCLUSIVE_PROCESS", "EXCLUSIVE_PROCESS", 3),
        ("0", "DEFAULT", 0),
        ("PROHIBITED", "PROHIBITED", 2),
    ):
        done = run("-i", "0", "-c", word)
        assert (done.exit_code, done.stdout) == (0, f"Set compute mode to {title} for GPU {bus}.\nAll done.\n")
        assert state().gpus[0].compute_mode == mode
    assert run("-c", "2").stdout == f"Compute mode is already set to PROHIBITED for GPU {bus}.\nAll done.\n"
    assert run("-c", "9").exit_code == run("-c", "default").exit_code == 2
    admin.set_fault(SPEC, "user", value="1000")
    refused = f"Unable to set the compute mode for GPU {bus}: Insufficient Permissions\n"
    refused += "Terminating early due to previous errors.\n"
    done = run("-c", "0")
    assert (done.exit_code, done.stdout, state().gpus[0].compute_mode) == (4, refused, 2)


def test_a_mig_gpu_keeps_its_compute_mode_and_exits_0() -> None:
    admin.set_mig(SPEC, "0", ["1g.18gb"])
    done = run("-c", "3")
    assert done.stdout == (
        "Setting compute mode to EXCLUSIVE_PROCESS is not supported on a MIG-enabled device.\n"
        f"Unable to set the compute mode for GPU {state().gpus[0].pci_bus_id}: Not Supported\n"
        "Treating as warning and moving on.\nAll done.\n"
    )
    assert (done.exit_code, state().gpus[0].compute_mode) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("no-driver", 9, "couldn't communicate with the NVIDIA driver"),
        ("no-nvml", 12, "couldn't find libnvidia-ml.so"),
        ("no-permission", 4, "Insufficient Permissions"),
        ("lost", 15, "GPU is lost"),
    ],
)
def test_exit_codes_of_a_broken_host(fault: str, code: int, text: str) -> None:
    admin.set_fault(SPEC, fault)
    done = run("compute-policy", "-l")
    assert done.exit_code == code
    assert text in done.stdout


def test_one_lost_gpu_does_not_hide_the_other() -> None:
    admin.set_fault("sim:2xh200", "lost", gpu="0")
    listed = run("compute-policy", "-l", spec="sim:2xh200")
    assert (listed.exit_code, "1   Timeslice" in listed.stdout) == (15, True)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--foo"], 255, "ERROR: Option --foo is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (["-i", "4"], 6, "No devices were found\n"),
        (["-i"], 255, "ERROR: Option -i is missing its value. Please run 'nvidia-smi -h' for help.\n\n"),
        (["-q"], 255, "ERROR: Option -q is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (["pmon"], 255, "ERROR: Option pmon is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (["-i", "0", "mig", "-lgi"], 255, "ERROR: Option mig is not recognized. Please run 'nvidia-smi -h'.\n\n"),
    ],
    ids=str,
)
def test_wrong_arguments(words: list[str], code: int, text: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout, done.stderr) == (code, text, "")


def test_a_reader_of_an_unused_host_creates_it() -> None:
    file = StateFile("sim:t4")
    assert "0   Timeslice" in smi.main(("nvidia-smi", "compute-policy", "-l"), file).stdout
    assert file.exists()
