"""nvidia-smi -mig and nvidia-smi mig of a simulated host: the tables of an H200 and an H100, changes, refusals."""

from __future__ import annotations

import pytest

from gpushare.host.program import Completed
from gpushare.sim import admin, open_simulated, smi
from gpushare.sim.state import SimulatedGpu

SPEC = "sim:h200"
LGI = """\
+---------------------------------------------------------+
| GPU instances:                                          |
| GPU   Name               Profile  Instance   Placement  |
|                            ID       ID       Start:Size |
|=========================================================|
|   0  MIG 1g.10gb           19       13          6:1     |
+---------------------------------------------------------+
|   0  MIG 3g.40gb            9        1          0:4     |
+---------------------------------------------------------+
|   0  MIG 1g.10gb+me        20       11          4:1     |
+---------------------------------------------------------+
"""
LCI = """\
+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
|   0     13       MIG 1g.10gb          0         0          0:1     |
+--------------------------------------------------------------------+
|   0      1       MIG 1c.3g.40gb       0         0          2:1     |
+--------------------------------------------------------------------+
|   0     11       MIG 1g.10gb          0         0          0:1     |
+--------------------------------------------------------------------+
"""
LGIP = """\
|   0  MIG 1g.10gb         19     1/7        9.75       No     16     1     0   |
|                                                               1     1     0   |
+-------------------------------------------------------------------------------+
|   0  MIG 1g.10gb+me      20     0/1        9.75       No     16     1     0   |
|                                                               1     1     1   |
+-------------------------------------------------------------------------------+
"""


def run(*words: str, spec: str = SPEC) -> Completed:
    return smi.main(("nvidia-smi", *words), open_simulated(spec).state_file)


def gpu(spec: str = SPEC) -> SimulatedGpu:
    state = open_simulated(spec).state_file.read()
    assert state is not None
    return state.gpus[0]


def test_the_tables_of_a_mixed_h100_are_the_captured_ones() -> None:
    admin.set_mig("sim:h100", "0", ["3g.40gb:0", "1g.10gb+me:4", "1g.10gb:6"])
    assert run("mig", "-dci", "-gi", "1", spec="sim:h100").exit_code == 0
    made = run("mig", "-cci", "1c.3g.40gb", "-gi", "1", spec="sim:h100")
    assert made.stdout == (
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  1 using profile MIG 1c.3g.40gb (ID  0)\n"
    )
    assert run("mig", "-lgi", spec="sim:h100").stdout == LGI
    assert run("mig", "-lci", spec="sim:h100").stdout == LCI
    assert LGIP in run("mig", "-lgip", spec="sim:h100").stdout


def test_older_drivers_have_narrower_tables_and_535_lists_nothing_with_mig_off() -> None:
    admin.set_fault(SPEC, "driver", value="550.163.01")
    assert (
        "|   0  MIG 7g.141gb       0     1/1        140.00     No     132    7     0   |\n"
        in run("mig", "-lgip").stdout
    )
    off = run("mig", "-lgi")
    assert (off.exit_code, off.stdout) == (0, "No MIG-enabled devices found.\n")
    admin.set_fault(SPEC, "driver", value="535.261.03")
    for words in ("-lgip", "-lgipp", "-lgi", "-lci"):
        done = run("mig", words)
        assert (words, done.exit_code, done.stdout) == (words, 6, "No MIG-enabled devices found.\n")


def test_a_whole_way() -> None:
    bus = gpu().pci_bus_id
    assert run("-i", "0", "-mig", "1").stdout == f"Enabled MIG Mode for GPU {bus}\nAll done.\n"
    assert run("mig", "-lgi").stdout == "No GPU instances found: Not Found\n"
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
    done = run("mig", "-lgi", spec="sim:t4")
    assert (done.exit_code, done.stdout) == (6, "No MIG-supported devices found.\n")
    assert "Not Supported\nTreating as warning and moving on.\nAll done.\n" in run("-mig", "1", spec="sim:t4").stdout
