"""nvidia-smi -mig and nvidia-smi mig of a simulated host: changes, refusals, and what a GPU instance offers."""

from __future__ import annotations

import pytest

from gpushare.host.program import Completed
from gpushare.sim import admin, open_simulated, smi
from gpushare.sim.state import SimulatedGpu

SPEC = "sim:h200"


def run(*words: str, spec: str = SPEC) -> Completed:
    return smi.main(("nvidia-smi", *words), open_simulated(spec).state_file)


def gpu(spec: str = SPEC) -> SimulatedGpu:
    state = open_simulated(spec).state_file.read()
    assert state is not None
    return state.gpus[0]


def test_a_compute_instance_at_its_place() -> None:
    admin.set_mig("sim:h100", "0", ["3g.40gb:0", "1g.10gb+me:4", "1g.10gb:6"])
    assert run("mig", "-i", "0", "-dci", "-gi", "1", "-ci", "0", spec="sim:h100").exit_code == 0
    made = run("mig", "-i", "0", "-cci", "0:2", "-gi", "1", spec="sim:h100")
    assert made.stdout == (
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  1 using profile MIG 1c.3g.40gb (ID  0)\n"
    )
    assert gpu("sim:h100").mig[0].compute_start == 2


def test_a_compute_instance_for_each_bare_gpu_instance() -> None:
    admin.set_mig(SPEC, "0", ["3g.71gb:0", "3g.71gb:4"])
    run("mig", "-dci")
    assert gpu().mig == []
    assert run("mig", "-i", "0", "-gi", "1,2", "-cci").stdout.count("Successfully created compute instance ID  0") == 2
    assert [one.gpu_instance_id for one in gpu().mig] == [1, 2]


def test_a_whole_way() -> None:
    bus = gpu().pci_bus_id
    assert run("-i", "0", "-mig", "1").stdout == f"Enabled MIG Mode for GPU {bus}\nAll done.\n"
    assert run("mig", "-dgi").stdout == "No GPU instances found: Not Found\n"
    made = run("mig", "-cgi", "9,3g.71gb:0", "-C")
    assert made.stdout == (
        "Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.71gb (ID  9)\n"
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG 3g.71gb (ID  2)\n"
        "Successfully created GPU instance ID  1 on GPU  0 using profile MIG 3g.71gb (ID  9)\n"
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  1 using profile MIG 3g.71gb (ID  2)\n"
    )
    assert [one.gpu_instance_id for one in gpu().mig] == [1, 2]
    refused = run("mig", "-dgi")
    assert refused.exit_code == 19
    assert refused.stdout == (
        "Unable to destroy GPU instance ID  1 from GPU  0: In use by another client\n"
        "Failed to destroy GPU instances: In use by another client\n"
    )
    assert run("mig", "-dci", "-gi", "2").stdout == (
        "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  2\n"
    )
    assert run("mig", "-dgi", "-gi", "2").stdout == "Successfully destroyed GPU instance ID  2 from GPU  0\n"
    # Pending is a warning, and no failure.
    off = run("-mig", "0")
    assert (off.exit_code, gpu().mig_mode, gpu().mig_pending) == (0, 1, 0)
    assert off.stdout.startswith(
        f"Warning: MIG mode is in pending disable state for GPU {bus}:In use by another client\n{bus} is currently being"
    )
    assert off.stdout.endswith("All done.\n")
    run("mig", "-dci")
    run("mig", "-dgi")
    assert run("-mig", "0").stdout == f"Disabled MIG Mode for GPU {bus}\nAll done.\n"
    assert (gpu().mig_mode, gpu().mig) == (0, [])


def test_nothing_is_rolled_back() -> None:
    run("-mig", "1")
    failed = run("mig", "-cgi", "0,19")
    assert (failed.exit_code, failed.stdout.splitlines()[1:]) == (
        23,
        [
            "Unable to create a GPU instance on GPU  0 using profile 19: Insufficient Resources",
            "Failed to create GPU instances: Insufficient Resources",
        ],
    )
    assert [one.profile for one in gpu().bare] == ["7g.141gb"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["mig", "-cgi", "19"],
            "Unable to create a GPU instance on GPU  0 using profile 19: Insufficient Permissions\n",
        ),
        (["mig", "-dgi"], "Unable to destroy GPU instance ID  1 from GPU  0: Insufficient Permissions\n"),
        (
            ["mig", "-dci"],
            "Unable to destroy compute instance ID  0 from GPU  0 GPU instance ID  1: Insufficient Permissions\n",
        ),
        (["mig", "-cci"], "Unable to create a compute instance on GPU  0 GPU instance ID  1 using profile default: "),
        (["-mig", "0"], "Unable to disable MIG Mode for GPU 00000000:01:00.0: Insufficient Permissions\n"),
    ],
    ids=str,
)
def test_only_root_changes_mig(words: list[str], text: str) -> None:
    admin.set_mig(SPEC, "0", ["3g.71gb:0"])
    admin.set_fault(SPEC, "user", value="1000")
    done = run(*words)
    assert (done.exit_code, done.stdout[: len(text)]) == (4, text)
    assert [one.gpu_instance_id for one in gpu().mig] == [1]


def test_a_gpu_without_mig() -> None:
    done = run("mig", "-dgi", spec="sim:t4")
    assert (done.exit_code, done.stdout) == (6, "No MIG-supported devices found.\n")
    assert "Not Supported\nTreating as warning and moving on.\nAll done.\n" in run("-mig", "1", spec="sim:t4").stdout
