"""What nvidia-cuda-mps-control prints, parsed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.model import MpsClient
from gpushare.base.units import GIB, MIB
from gpushare.mps.control import parse_memory, parse_percentage, parse_pids, parse_ps

CAPTURE = Path(__file__).parent.parent / "data" / "h200-r580" / "mps-control.txt"
HEADER = ("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND", "ATTRIBUTES")


def line(*cells: str) -> str:
    """Print a row as the program does: ``%-10d%-10d%-15d%-*s%-15s%-15s``, and ``%-15s`` more from 595 on."""
    widths = (10, 10, 15, 26, 15, 15, 15)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)) + "\n"


def ps(*rows: tuple[str, ...], layout: int = 580) -> str:
    last = 7 if layout >= 595 else 6
    return line(*HEADER[:last]) + "".join(line(*row[:last]) for row in rows)


def client(pid: int, command: str, attributes: str = "") -> tuple[str, ...]:
    return str(pid), "1", "628", "GPU-0d54321e-a080-c56a", "4026531836", command, attributes


def test_the_rows_of_the_h200() -> None:
    lines = CAPTURE.read_text().splitlines()
    at = next(index for index, text in enumerate(lines) if text.startswith("PID  "))
    rows = parse_ps("\n".join(lines[at : at + 2]))
    assert rows == [MpsClient(pid=593, server_pid=628)]


@pytest.mark.parametrize("layout", [580, 595])
@pytest.mark.parametrize("command", ["python3", "./nbody", "a b c", "/usr/lib/a very long/path/python3.11", ""])
def test_a_row_is_read_in_either_layout(layout: int, command: str) -> None:
    rows = parse_ps(ps(client(593, command, "MD"), client(594, "x"), layout=layout))
    assert [(row.pid, row.server_pid) for row in rows] == [(593, 628), (594, 628)]


def test_columns_are_found_by_their_names() -> None:
    text = "PID SERVER NEW COMMAND\n7 8 x ./a\n"
    assert parse_ps(text) == [MpsClient(pid=7, server_pid=8)]
    assert parse_ps("PID ID SERVER DEVICE NAMESPACE COMMAND\n9741 0 - GPU-cb 4026531836 ./nbody\n") == [
        MpsClient(pid=9741)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "Server not found\n",
        "Server 5 not found\nServer 5 not found\n\n",
        ps(),
        ps(layout=595),
        "PID COMMANDS\n1 x\n",
    ],
)
def test_no_clients_are_no_rows(text: str) -> None:
    assert parse_ps(text) == []


def test_lines_that_are_no_rows_are_left_out() -> None:
    text = ps() + "Server 9 is busy\n\n² 1 2 3 4 5 6\n12\n" + line(*client(5, "x")[:6])
    assert [row.pid for row in parse_ps(text)] == [5]


TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(["PID COMMAND", "PID XCOMMAND", "1 x", "²", "9" * 5000, " ", "5G", "5.0"]), max_size=5
    ).map("\n".join),
    st.text(max_size=30).map(lambda text: "PID ID SERVER COMMAND\n" + text),
)


@given(TEXTS)
def test_no_text_breaks_a_parser(text: str) -> None:
    assert all(row.pid >= 0 for row in parse_ps(text))
    assert all(pid >= 0 for pid in parse_pids(text))
    memory, percentage = parse_memory(text), parse_percentage(text)
    assert memory is None or memory >= 0
    assert percentage is None or percentage >= 0.0


def test_pids_are_one_per_line() -> None:
    assert parse_pids("628\n 629 \n\nServer 5 not found\n-1\n٣\n") == [628, 629]


@pytest.mark.parametrize(
    ("text", "size"),
    [("10G\n", 10 * GIB), ("512M", 512 * MIB), ("", None), ("None", None), ("1.5G", None), ("5", None), ("٣G", None)],
)
def test_a_printed_limit(text: str, size: int | None) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25.0\n", 25.0),
        ("100.0", 100.0),
        ("warning\n30.0\n", 30.0),
        ("", None),
        ("Server 5 not found", None),
        ("²", None),
    ],
)
def test_a_printed_percentage(text: str, value: float | None) -> None:
    assert parse_percentage(text) == value
