"""What MPS daemons of other users may and may not do to those who look at them, or stop them."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, InUse, NoPermission, NotFound, OperationFailed, TimedOut
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.host.process import Processes, ProcessInfo
from gpushare.host.program import Completed, Listener
from gpushare.mps import daemons
from gpushare.mps.control import PROGRAM, SERVER_PROGRAM, MpsControl, parse_percentage, parse_pids, parse_ps
from gpushare.mps.daemons import FoundDaemon, daemon_pid, find_daemons, live_pid, own_daemon
from gpushare.mps.home import DaemonHome, DaemonRecord, home_of
from gpushare.mps.stop import Stop, daemons_to_stop, end_daemon
from gpushare.run.share import stop_if_last
from tests.errors import fails
from tests.mps.fake_daemon import Daemon

STRANGER = 2_000_000_001
CLOSING = "get_default_active_thread_percentage"


class Table(Processes):
    """A process table: PID, user, name, environment, parent; signals are noted."""

    def __init__(self, *rows: tuple[int, int, str, Mapping[str, str], int]) -> None:
        self.rows = {row[0]: row for row in rows}
        self.sent: list[tuple[int, int]] = []
        # Of those that did not start at 5.
        self.starts: dict[int, int] = {}

    def pids_of_program(self, name: str) -> list[int]:
        return [pid for pid, row in self.rows.items() if row[2] == name]

    def describe(self, pid: int) -> ProcessInfo | None:
        if pid not in self.rows:
            return None
        _, uid, name, _, _ = self.rows[pid]
        return ProcessInfo(
            pid=pid, uid=uid, user=str(uid), name=name, command_line=(name, "-d"), started=self.starts.get(pid, 5)
        )

    def identity(self, pid: int) -> Identity | None:
        return Identity(pid, self.starts.get(pid, 5)) if pid in self.rows else None

    def alive(self, pid: int, started: int | None = None) -> bool:
        return pid in self.rows and started in {None, self.starts.get(pid, 5)}

    def environment(self, pid: int) -> Mapping[str, str] | None:
        return self.rows[pid][3] if pid in self.rows else None

    def descendants(self, pid: int) -> list[int]:
        below = [row[0] for row in self.rows.values() if row[4] == pid]
        return [pid, *(one for child in below for one in self.descendants(child))]

    def parent(self, pid: int) -> int | None:
        return self.rows[pid][4] if pid in self.rows else None

    def send_to(self, pid: int, started: int, signal: int) -> None:
        if started != self.starts.get(pid, 5):
            raise NotFound("gone", "look")
        self.send(pid, signal)

    def send(self, pid: int, signal: int) -> None:
        self.sent.append((pid, signal))
        if signal in {9, 15}:
            self.rows.pop(pid, None)


class Asked(Daemon):
    """Programs that note whom they asked, and hang where they are told to."""

    def __init__(self, replies: Mapping[str, str] | None = None, *, hanging: bool = False) -> None:
        super().__init__(replies)
        self.hanging, self.pipes, self.children, self.most = hanging, [], 0, 0
        self.lock = threading.Lock()

    pipes: list[str | None]

    def run(self, argv: Sequence[str], *, timeout: float = 10.0, **named: Any) -> Completed:
        with self.lock:
            self.pipes.append((named.get("env") or {}).get("CUDA_MPS_PIPE_DIRECTORY"))
            self.children += 1
            self.most = max(self.most, self.children)
        try:
            if self.hanging:
                time.sleep(timeout)
                raise TimedOut("it hangs", "wait", code="program_hangs")
            return super().run(argv, **named)
        finally:
            with self.lock:
                self.children -= 1


def daemon(pid: int, pipe: object, *, uid: int = STRANGER, device: str | None = None, parent: int = 1) -> tuple:  # type: ignore[type-arg]
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)} | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    return (pid, uid, PROGRAM, environment, parent)


def test_a_stranger_is_named_by_pid_not_by_the_directory_that_it_names(
    host: Host, device: Device, tmp_path: Path
) -> None:
    (found,) = find_daemons(with_table(host, daemon(17, tmp_path / "roots-pipe")), [device.gpu], deep=False)
    assert not found.trusted
    assert found.stop_hint.startswith("ask ")
    assert found.stop_hint.endswith(" to stop it; see: ps -fp 17")


def with_table(host: Host, *rows: tuple, programs: Daemon | None = None) -> Host:  # type: ignore[type-arg]
    return dataclasses.replace(host, processes=Table(*rows), programs=programs or host.programs)


def test_a_name_and_an_environment_do_not_make_a_daemon_ours(host: Host, device: Device) -> None:
    """Any user can start a program of this name that says it listens in root's directory."""
    home = home_of(host.run_directory, device.uuid)
    home.create()
    (home.pipe / "control").touch()
    forged = with_table(host, daemon(50, home.pipe, device=device.uuid))
    assert daemon_pid(forged, str(home.pipe)) is None
    with pytest.raises(NotFound):
        own_daemon(forged, device)
    (found,) = find_daemons(forged, [device.gpu], deep=False)
    assert (found.daemon.ours, found.trusted) == (False, False)
    # Nor is it the one of a record whose daemon died, with its very PID.
    for started in (None, 1):
        record = DaemonRecord(device_uuid=device.uuid, pid=50, started=started, uid=0, transient=True)
        home.write(record)
        if started is None:
            assert live_pid(forged, home, record) is None
    # The same of our own user is.
    real = with_table(host, daemon(50, home.pipe, device=device.uuid), daemon(51, home.pipe, uid=0, device=device.uuid))
    assert daemon_pid(real, str(home.pipe)) == 51


def test_a_daemon_whose_leases_are_unknown_goes_on(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_of(host.run_directory, device.uuid)
    home.create()
    home.write(DaemonRecord(device_uuid=device.uuid, pid=51, started=5, uid=os.geteuid(), transient=True))
    busy = with_table(host, daemon(51, home.pipe, uid=os.geteuid(), device=device.uuid))
    monkeypatch.setattr(DaemonHome, "live_leases", lambda _: None)
    # The guard asks again.
    assert stop_if_last(busy, home) is True
    assert busy.processes.sent == []  # type: ignore[attr-defined]
    assert home.read() is not None


def test_a_record_without_a_start_time_ends_no_stranger(host: Host, device: Device) -> None:
    home = home_of(host.run_directory, device.uuid)
    home.create()
    home.write(DaemonRecord(device_uuid=device.uuid, pid=50, started=None, uid=0, transient=True))
    forged = with_table(host, daemon(50, home.pipe, device=device.uuid))
    assert stop_if_last(forged, home) is False
    assert forged.processes.sent == []  # type: ignore[attr-defined]
    assert home.read() is None


def test_a_daemon_in_our_home_without_a_record_is_ours(host: Host, device: Device) -> None:
    home = home_of(host.run_directory, device.uuid)
    home.create()
    (home.pipe / "control").touch()
    here = with_table(host, daemon(51, home.pipe, uid=0, device=device.uuid))
    (found,) = find_daemons(here, [device.gpu], deep=False)
    assert (found.daemon.ours, found.daemon.pid, found.daemon.device_uuid) == (True, 51, device.uuid)
    _, record = own_daemon(here, device)
    assert (record.pid, record.state) == (51, "running")
    # Not one that serves another device from there.
    assert (
        find_daemons(with_table(host, daemon(51, home.pipe, uid=0)), [device.gpu], deep=False)[0].daemon.ours is False
    )


def test_strangers_are_asked_only_on_request(host: Host, device: Device) -> None:
    programs = Asked({CLOSING: "100.0\n", "get_default_client_priority": "0\n"})
    looked = with_table(host, daemon(50, "/a"), daemon(51, "/b", uid=0), programs=programs)
    first, second = find_daemons(looked, [device.gpu])
    assert set(programs.pipes) == {"/b"}
    assert (first.daemon.unasked, first.daemon.error, second.daemon.unasked) == (True, None, False)
    assert "status -v" in (first.daemon.note or "")
    find_daemons(looked, [device.gpu], strangers=True)
    assert set(programs.pipes) == {"/a", "/b"}


def test_many_that_hang_cost_one_bound(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "LOOK_SECONDS", 0.2)
    programs = Asked(hanging=True)
    rows = [daemon(50 + number, f"/{number}") for number in range(40)]
    began = time.monotonic()
    found = find_daemons(with_table(host, *rows, programs=programs), [device.gpu], strangers=True)
    assert len(found) == 40
    assert all(one.daemon.error is not None for one in found)
    # One after the other it would be 8 s; what did not come to its turn was not started.
    assert (programs.most > 1, len(programs.pipes) < 40) == (True, True)
    assert time.monotonic() - began < 6.0


@pytest.mark.parametrize("uid", [STRANGER, 0])
def test_a_stranger_is_believed_about_its_own_processes_only(host: Host, device: Device, uid: int) -> None:
    """A fake daemon reports PID 1 and root's sshd as its server and its clients."""
    ps = "PID       ID        SERVER    DEVICE    NAMESPACE  COMMAND\n"
    for pid in (1, 700, 701):
        ps += f"{pid:<10}{1:<10}{900:<10}{'GPU-1':<10}{402:<11}x\n"
    replies = {
        "get_server_list": "900\n1\n",
        CLOSING: "100.0\n",
        "get_default_client_priority": "0\n",
        "ps": ps,
        "get_active_thread_percentage 900": "100.0\n",
        "get_active_thread_percentage 1": "100.0\n",
    }
    rows = [
        daemon(50, "/a", uid=uid),
        (1, 0, "systemd", {}, 0),
        (700, 0, "sshd", {}, 1),
        (701, STRANGER, "python", {}, 1),
        (900, STRANGER, SERVER_PROGRAM, {}, 50),
    ]
    (found,) = find_daemons(with_table(host, *rows, programs=Asked(replies)), [device.gpu], strangers=True)
    clients = {client.pid for client in found.daemon.clients}
    assert clients == ({701} if uid else {1, 700, 701})
    assert [server.pid for server in found.daemon.servers] == ([900] if uid else [900, 1])


@pytest.mark.parametrize(("uid", "ended"), [(STRANGER, {50, 60}), (0, {50, 60, 62})])
def test_signals_go_to_a_daemon_and_its_own_servers_only(host: Host, uid: int, ended: set[int]) -> None:
    rows = [
        daemon(50, "/a", uid=uid),
        (60, uid, SERVER_PROGRAM, {}, 50),
        # A program that was started by it, say by sudo, a shell, and a server of somebody else.
        (61, 0, "sshd", {}, 50),
        (62, 4321, SERVER_PROGRAM, {}, 50),
        (63, uid, "bash", {}, 50),
    ]
    processes = Table(*rows)
    programs = Asked(hanging=True)
    hanging = dataclasses.replace(host, processes=processes, programs=programs)
    control = MpsControl(programs, "/a", seconds=0.01)
    control.answers = _hangs  # type: ignore[method-assign]
    assert end_daemon(hanging, control, 50, force=True)
    assert {pid for pid, number in processes.sent if number in {9, 15}} == ended
    assert {pid for pid, _ in processes.sent} == ended


@pytest.mark.parametrize("force", [False, True])
def test_a_daemon_that_has_ended_gets_no_command_though_its_pid_is_in_use(host: Host, force: bool) -> None:
    processes, programs = Table(daemon(50, "/a")), Asked({"quit": ""})
    processes.starts[50] = 100
    there = dataclasses.replace(host, processes=processes, programs=programs)
    control = MpsControl(programs, "/a", seconds=0.01)
    assert not end_daemon(there, control, 50, force=force, started=5)
    assert (processes.sent, programs.pipes) == ([], [])


def test_no_signal_goes_to_who_has_got_the_pid_of_a_daemon_meanwhile(host: Host) -> None:
    processes = Table(daemon(50, "/a"), (60, STRANGER, SERVER_PROGRAM, {}, 50))
    programs = Asked(hanging=True)
    hanging = dataclasses.replace(host, processes=processes, programs=programs)
    control = MpsControl(programs, "/a", seconds=0.01)

    def answers(timeout: float = 1.0) -> bool:
        # While it is waited for it ends, and another daemon of the name starts.
        processes.starts[50] = 100.0
        raise TimedOut("it hangs", "wait")

    control.answers = answers  # type: ignore[method-assign]
    end_daemon(hanging, control, 50, force=True)
    assert processes.sent == []


class Listening(Asked):
    """Programs that know who listens."""

    who: Listener | None = None

    def listener(self, pipe_directory: str) -> Listener | None:
        return self.who


def foreign_daemon(host: Host, device: Device, *more: tuple, uid: int = STRANGER) -> tuple[Host, FoundDaemon]:  # type: ignore[type-arg]
    """Return a host with a daemon that gpushare did not start, as root sees it, and the daemon."""
    programs = Listening({CLOSING: "100.0\n", "ps": "", "get_server_list": ""})
    programs.who = Listener(50, uid)
    seen = with_table(host, daemon(50, "/a", uid=uid, device=device.uuid), *more, programs=programs)
    seen.processes.uid = 0  # type: ignore[attr-defined]
    (found,) = find_daemons(seen, [device.gpu], deep=False)
    return seen, found


@pytest.mark.needs_root
def test_another_users_daemon_is_not_stopped(host: Host, device: Device) -> None:
    """He may lead each conversation to a third one's daemon."""
    seen, _ = foreign_daemon(host, device)
    with pytest.raises(NoPermission, match="belongs to user") as caught:
        daemons_to_stop(seen, [device.gpu], None, "/a")
    assert (caught.value.code, "see: ps -fp 50" in caught.value.hint) == ("not_your_daemon", True)
    assert (seen.programs.pipes, seen.processes.sent) == ([], [])  # type: ignore[attr-defined]


@pytest.mark.needs_root
@pytest.mark.parametrize("force", [False, True])
def test_who_does_not_show_who_listens_is_told_nothing(host: Host, device: Device, force: bool) -> None:
    """Somebody has filled the queue of the socket: then it may be anybody's."""
    seen, found = foreign_daemon(host, device, uid=0)
    seen.programs.who = None  # type: ignore[attr-defined]
    with pytest.raises(InUse) as caught:
        Stop(seen, found, None, drain_seconds=0.0, force=force).run()
    assert (caught.value.code, seen.processes.sent) == ("other_daemon", [])  # type: ignore[attr-defined]
    assert seen.programs.pipes == []  # type: ignore[attr-defined]


def _hangs(timeout: float = 1.0) -> bool:
    raise TimedOut("it hangs", "wait")


def test_what_no_daemon_says_is_not_believed() -> None:
    header = "PID ID SERVER DEVICE NAMESPACE COMMAND\n"
    assert (
        parse_ps(header + "-1 1 2 d n c\n0 1 2 d n c\n+5 1 2 d n c\n99999999999999 1 2 d n c\n4294967296 1 2 d n c\n")
        == []
    )
    (row,) = parse_ps(header + f"7 1 -1 d n {'c' * 100_000}\n")
    assert (row.pid, row.server_pid) == (7, None)
    assert parse_pids("-1\n0\n+3\n1e3\n\x1b[31m5\n" + "9" * 5000 + "\n7\n") == [7]
    assert parse_percentage("100.1") is None
    many = "".join(f"{number}\n" for number in range(1, 1_000_001))
    for parse in (parse_pids, lambda text: parse_ps(header + text.replace("\n", " 1 2 d n c\n"))):
        with fails(OperationFailed, "strange_reply"):
            parse(many)


def test_many_servers_are_not_asked_one_by_one() -> None:
    programs = Asked(
        {
            CLOSING: "100.0\n",
            "get_default_client_priority": "0\n",
            "get_server_list": "".join(f"{number}\n" for number in range(1, 1000)),
        }
    )
    with fails(GpushareError, "strange_reply"):
        MpsControl(programs, "/a").overview()
    assert len(programs.pipes) == 1


def as_another_user(act: Callable[[], object]) -> int:
    """Run something as user 65534 in a child, and return its exit code: 0, 13 for "Permission denied", else 1."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            act()
            code = 0
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.needs_root
def test_another_user_can_open_nothing_that_we_lock(host: Host, device: Device, sim_dir: Path) -> None:
    for path in (sim_dir, *sim_dir.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    home = home_of(host.run_directory, device.uuid)
    home.create()
    lease = home.take_lease()
    with home.locked():
        held = [path for path in home.directory.rglob("*") if path.is_file()]
        assert {path.name for path in held} == {"lock", lease.path.name}
        for path in held:
            assert path.stat().st_mode & 0o777 == 0o600
            assert as_another_user(lambda path=path: os.open(path, os.O_RDONLY)) == 13  # type: ignore[misc]
    # A client can still come to the sockets.
    assert as_another_user(lambda: os.listdir(home.pipe)) == 0
    # Whether leases are held is the owner's to tell: for others it is unknown, not none.
    assert as_another_user(lambda: _assert(home.live_leases() is None)) == 0
    assert home.live_leases() == [os.getpid()]
    lease.release()
    assert home.live_leases() == []


def _assert(holds: bool) -> None:
    assert holds
