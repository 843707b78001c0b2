"""Which processes are MPS control daemons: conversations and forked children are not."""

from __future__ import annotations

import dataclasses

import pytest

from gpushare.host.host import Host
from gpushare.host.process import Processes, ProcessInfo
from gpushare.mps.control import PROGRAM
from gpushare.mps.daemons import daemon_pid, find_daemons
from tests.tables import each


class Table(Processes):
    """A process table of (PID, command line, pipe directory, parent)."""

    def __init__(self, *rows: tuple[int, str, str | None, int]) -> None:
        self.rows = {row[0]: row for row in rows}

    def pids_of_program(self, name: str) -> list[int]:
        assert name == PROGRAM
        return list(self.rows)

    def describe(self, pid: int) -> ProcessInfo | None:
        return (
            ProcessInfo(pid=pid, uid=0, command_line=tuple(self.rows[pid][1].split()) or None)
            if pid in self.rows
            else None
        )

    def environment(self, pid: int) -> dict[str, str] | None:
        pipe = self.rows[pid][2]
        return None if pipe is None else {} if pipe == "unset" else {"CUDA_MPS_PIPE_DIRECTORY": pipe}

    def parent(self, pid: int) -> int | None:
        return self.rows[pid][3] if pid in self.rows else None


def daemons(host: Host, *rows: tuple[int, str, str | None, int]) -> list[int | None]:
    shown = find_daemons(dataclasses.replace(host, processes=Table(*rows)), (), deep=False)
    return [item.daemon.pid for item in shown]


@pytest.mark.parametrize(
    ("arguments", "is_daemon"),
    each(
        (
            ["-d", "-f", "--daemon", "--forground", "--foreground", "-S -d", "-f -multiuser-server", "-d -p 3", "-dM"],
            True,
        ),
        (["", "get_server_list", "start_server -uid 1000", "-v", "-h"], False),
        (["set_default_active_thread_percentage 50"], False),
    ),
)
def test_a_conversation_is_no_daemon(host: Host, arguments: str, is_daemon: bool) -> None:
    row = (10, f"/usr/bin/{PROGRAM} {arguments}", "/p", 1)
    assert daemons(host, row) == ([10] if is_daemon else [])
    assert daemon_pid(dataclasses.replace(host, processes=Table(row)), "/p") == (10 if is_daemon else None)


def test_a_process_that_hides_its_command_line_may_be_one(host: Host) -> None:
    assert daemons(host, (10, "", None, 1)) == [10]


def test_a_daemon_and_what_it_forks_before_it_becomes_a_server_are_one(host: Host) -> None:
    line = f"{PROGRAM} -d"
    assert daemons(host, (10, line, "/p", 1), (11, line, "/p", 10), (12, line, "/q", 1)) == [10, 12]
    assert daemons(host, (5, PROGRAM, "/p", 1), (10, line, "/p", 1)) == [10]
    assert daemons(host, (10, line, None, 1), (11, line, None, 1)) == [10, 11]
    assert daemons(host, (12, line, "/p", 11), (11, line, "/p", 10), (10, line, "/p", 1)) == [10]


@pytest.mark.parametrize(("pipe", "directory"), [("unset", "/tmp/nvidia-mps"), ("", "/"), ("/p", "/p")])
def test_where_a_daemon_listens(host: Host, pipe: str, directory: str) -> None:
    table = Table((10, f"{PROGRAM} -d", pipe, 1))
    assert daemon_pid(dataclasses.replace(host, processes=table), directory) == 10


def test_a_daemon_that_ends_while_it_is_looked_at_is_none(host: Host) -> None:
    table = Table((10, f"{PROGRAM} -d", "/p", 1))
    looked: list[int] = []

    def gone(pid: int) -> ProcessInfo | None:
        looked.append(pid)
        return None

    table.describe = gone  # type: ignore[method-assign]
    assert find_daemons(dataclasses.replace(host, processes=table), (), deep=False) == []
    assert looked == [10]
