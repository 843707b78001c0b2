"""nvidia-smi compute-policy: its table and its exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import (
    DriverNotLoaded,
    GpuLost,
    GpushareError,
    NoPermission,
    NotFound,
    NotSupported,
    NvmlMissing,
    OperationFailed,
    TimedOut,
)
from gpushare.base.model import TimeSlice
from gpushare.connect import connect
from gpushare.host import smi
from gpushare.host.program import Completed
from gpushare.sim import admin
from tests.errors import fails

CAPTURE = Path(__file__).parent.parent / "data" / "h200-r580" / "compute-policy-list.txt"
COLUMNS = ("GPU", "Name", "Value")


def table(rows: Sequence[dict[str, str]], columns: Sequence[str] = COLUMNS) -> str:
    """Draw a table as nvidia-smi does, with these columns in this order."""
    lines = ["+" + "-" * 37 + "+", "| GPU compute policies:               |"]
    lines += ["| " + "".join(f"{cell:<14}" for cell in columns) + "|", "|" + "=" * 37 + "|"]
    lines += ["|   " + "".join(f"{row[cell]:<14}" for cell in columns) + "|" for row in rows]
    return "\n".join([*lines, lines[0], ""])


def done(code: int, text: str = "") -> Completed:
    return Completed(("nvidia-smi", "compute-policy", "-l"), code, text, "")


def row(index: int | str, value: str, name: str = "Timeslice") -> dict[str, str]:
    return {"GPU": str(index), "Name": name, "Value": value, "Extra": "n/a"}


def test_the_table_of_the_h200() -> None:
    assert smi.parse_compute_policies(CAPTURE.read_text()) == {0: TimeSlice.DEFAULT}


def test_other_policies_are_left_out_and_an_unknown_level_is_unknown() -> None:
    rows = [row(0, "Huge"), row(1, "2"), row(1, "On", name="Preemption"), row("N/A", "Long"), row("²", "Long")]
    assert smi.parse_compute_policies(table(rows)) == {0: None, 1: TimeSlice.MEDIUM}


def test_a_host_where_no_gpu_has_a_policy_has_an_empty_table() -> None:
    assert smi.parse_compute_policies(table([])) == {}


@pytest.mark.parametrize("text", ["", "\n", "garbage", "GPU Name", "GPU 0: Timeslice Default", "No devices were found"])
def test_what_is_no_table_is_an_error(text: str) -> None:
    with fails(OperationFailed, "smi_text"):
        smi.parse_compute_policies(text)
    with pytest.raises(OperationFailed):
        smi.policies_of(done(0, text))


@given(
    st.dictionaries(st.integers(0, 999), st.sampled_from(TimeSlice), max_size=16),
    st.permutations((*COLUMNS, "Extra")),
    st.booleans(),
)
def test_any_table_reads_back(levels: dict[int, TimeSlice], columns: list[str], numbers: bool) -> None:
    rows = [row(index, str(int(level)) if numbers else level.title.upper()) for index, level in levels.items()]
    assert smi.parse_compute_policies(table(rows, columns)) == levels


LINES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["GPU Name Value", "| 0 Timeslice Long |", "² Timeslice 1", "9" * 5000 + " Timeslice 1"]),
)


@given(st.lists(LINES, max_size=6).map("\n".join))
def test_any_text_is_a_table_or_one_error(text: str) -> None:
    try:
        found = smi.parse_compute_policies(text)
    except OperationFailed as error:
        assert error.code == "smi_text"
    else:
        assert all(isinstance(index, int) for index in found)


@given(st.text(max_size=10))
def test_any_cell_is_a_level_or_unknown(text: str) -> None:
    level = smi.parse_level(text)
    assert level is None or text.strip().lower() in {level.title, str(int(level))}


@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        (2, "Invalid", OperationFailed),
        (3, "", NotSupported),
        (4, "", NoPermission),
        (6, "", NotFound),
        (9, "", DriverNotLoaded),
        (12, "", NvmlMissing),
        (13, "", NotSupported),
        (15, "", GpuLost),
        (255, "", OperationFailed),
        (-9, "", OperationFailed),
        (0, "Failed to set timeslice policy for GPU 0 : Insufficient Permissions", NoPermission),
        (0, "Failed to set timeslice for requested devices : Not Supported", NotSupported),
        (1, "something else", OperationFailed),
    ],
)
def test_exit_codes_and_texts_are_errors(code: int, text: str, error: type[GpushareError]) -> None:
    found = smi.smi_error(done(code, text))
    assert type(found) is error
    assert found.hint


def test_an_error_without_a_text_names_its_exit_code() -> None:
    assert "exit code 255, no text" in smi.smi_error(done(255)).message


def test_a_corrupt_inforom_comes_with_good_output() -> None:
    assert smi.policies_of(done(14, table([row(0, "Long")]))) == {0: TimeSlice.LONG}


def test_commands() -> None:
    assert smi.LIST_ARGV == ("nvidia-smi", "compute-policy", "-l")
    assert smi.set_argv("GPU-1", TimeSlice.LONG) == [
        "nvidia-smi",
        "compute-policy",
        "-i",
        "GPU-1",
        "--set-timeslice",
        "3",
    ]
    assert smi.compute_mode_command("GPU-1", "DEFAULT") == "nvidia-smi -i GPU-1 -c DEFAULT"


def test_a_level_is_set_and_read_on_a_simulated_host() -> None:
    host = connect("sim:2xh200")
    uuid = host.nvml.sweep()[1].uuid or ""
    host.policy.set(uuid, TimeSlice.LONG)
    assert host.policy.read() == {0: TimeSlice.DEFAULT, 1: TimeSlice.LONG}
    assert smi.policies_of(host.policy.start().result()) == host.policy.read()


@pytest.mark.parametrize(
    ("fault", "value", "error"),
    [
        ("user", "1000", NoPermission),
        ("not-supported", "time-slice", NotSupported),
        ("no-driver", None, DriverNotLoaded),
        ("no-nvml", None, NvmlMissing),
        ("missing", "nvidia-smi", NotSupported),
    ],
)
def test_a_refused_level_is_an_error(fault: str, value: str | None, error: type[GpushareError]) -> None:
    host = connect("sim:h200")
    uuid = host.nvml.sweep()[0].uuid or ""
    with pytest.raises(GpushareError):
        host.policy.set("GPU-00000000-0000-0000-0000-000000000000", TimeSlice.LONG)
    admin.set_fault(host.spec, fault, value=value)
    with pytest.raises(error):
        host.policy.set(uuid, TimeSlice.LONG)


def test_a_hanging_nvidia_smi_is_a_time_out() -> None:
    host = connect("sim:h200")
    admin.set_fault(host.spec, "hang", value="nvidia-smi")
    with fails(TimedOut, "program_hangs"):
        host.policy.read(timeout=0.05)
