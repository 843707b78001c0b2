"""Where one MPS daemon lives: directories and their owners, the record, the lock, the leases."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import BadUsage, InUse, NoPermission, OperationFailed
from gpushare.base.model import device_key
from gpushare.base.typed import parse_typed
from gpushare.host.identity import boot_id, pid_space
from gpushare.mps import home as mps_home
from gpushare.mps.home import DaemonHome, DaemonRecord, home_of, homes_in
from gpushare.mps.limits import Limits
from tests.cli.drive import until
from tests.errors import fails

UUID = "GPU-0d54321e-a080-c56a-9a57-14e2f8d3a1d0"
GOOD = {"device_uuid": UUID, "pid": 7, "started": 1, "uid": 0}
RECORD = DaemonRecord(
    device_uuid=UUID, pid=7, started=15, uid=0, limits=Limits(threads_percent=25.0, memory_limit_bytes=2**30)
)


@pytest.fixture
def home(sim_dir: Path) -> DaemonHome:
    made = home_of(sim_dir / "run", UUID)
    made.create()
    return made


@contextlib.contextmanager
def elsewhere(home: DaemonHome, code: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in another process with ``home``; it has printed a line when the block begins."""
    start = f"import os, time; from pathlib import Path; from gpushare.mps.home import DaemonHome; home = DaemonHome(Path({str(home.directory)!r}))\n"
    with subprocess.Popen(
        [sys.executable, "-c", start + code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as child:
        child.first = child.stdout.readline().strip()  # type: ignore[attr-defined]
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(("length", "fits"), [(86, True), (87, True), (88, False), (89, False)])
def test_a_pipe_directory_has_87_bytes_at_most(sim_dir: Path, length: int, fits: bool) -> None:
    rest = length - len(str(sim_dir)) - len(f"//mps/{device_key(UUID)}/pipe")
    home = home_of(sim_dir / ("ü" * (rest // 2) + "x" * (rest % 2)), UUID)
    assert len(os.fsencode(home.pipe)) == length
    if fits:
        home.check_path()
        home.create()
        assert home.pipe.is_dir()
    else:
        with fails(BadUsage, "path_too_long", match=f"has {length} bytes; 87 is the limit"):
            home.check_path()
        assert not home.pipe.exists()


def test_directories_are_closed_to_others_whatever_the_umask(sim_dir: Path) -> None:
    before = os.umask(0)
    try:
        home = home_of(sim_dir / "a" / "run", UUID)
        with home.locked():
            home.create()
    finally:
        os.umask(before)
    made = [home.pipe, home.log, home.leases, home.directory, home.directory.parent, home.directory.parent.parent]
    assert [path.stat().st_mode & 0o022 for path in made] == [0] * 6


def test_a_name_is_short_and_of_one_device() -> None:
    assert device_key(UUID) == "gpu-0d54321e-7aaa804e"
    assert device_key("MIG-8443519F-29f1") == "mig-8443519f-5a2ae53d"
    assert home_of(Path("/run/gpushare"), UUID).pipe == Path("/run/gpushare/mps/gpu-0d54321e-7aaa804e/pipe")
    # The default of a user, and of one without a session.
    for short in ("/run/user/1000/gpushare", "/tmp/gpushare-4294967294"):
        assert len(str(home_of(Path(short), UUID).pipe)) <= 87


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_devices_whose_first_digits_are_the_same_have_homes_of_their_own(kind: str) -> None:
    """NVIDIA's mock and some virtual GPUs count in the last digits."""
    names = {device_key(f"{kind}-00000000-0000-0000-0000-{number:012x}") for number in range(20_000)}
    assert len(names) == 20_000


def document(**more: object) -> str:
    return json.dumps({"schema": 1, "boot": boot_id(), "space": pid_space(), **GOOD, **more})


def put(home: DaemonHome, text: str) -> None:
    (home.directory / "daemon.json").write_bytes(text.encode("latin-1"))


def test_only_a_record_of_a_start_needs_no_pid(home: DaemonHome) -> None:
    put(home, document(pid=None, started=None, state="starting"))
    record = home.read()
    assert (record.pid, record.interrupted) == (None, True)
    put(home, document(pid=None, started=None))
    assert home.read() is None
    put(home, document())
    record = home.read()
    assert (record.pid, record.interrupted) == (7, False)


def test_a_record_is_written_and_read(home: DaemonHome) -> None:
    assert home.read() is None
    home.write(RECORD)
    assert home.read() == RECORD
    assert (home.directory / "daemon.json").stat().st_mode & 0o777 == 0o644
    assert homes_in([home.directory.parent.parent, Path("/nonexistent")]) == [home]
    home.clear()
    assert home.read() is None
    assert homes_in([home.directory.parent.parent]) == []
    home.clear()


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "limits", "transient", "attached"]),
        st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2)),
    )
)
def test_any_record_is_read_or_refused(fields: dict[str, object]) -> None:
    try:
        found = parse_typed(DaemonRecord, {**GOOD, **fields})
    except ValueError:
        return
    assert found.pid is None or found.pid > 0
    assert found.limits == Limits()


def test_clearing_leaves_the_logs(home: DaemonHome) -> None:
    home.write(RECORD)
    for path in (home.pipe / "control", home.pipe / "log", home.log / "control.log"):
        path.write_text("")
    assert [path.name for path in home.files_of_dead_daemon()] == ["control", "log"]
    home.clear()
    assert home.files_of_dead_daemon() == []
    assert (home.log / "control.log").exists()


def test_a_record_that_may_not_be_removed_is_an_error_of_ours(
    home: DaemonHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write(RECORD)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(NoPermission):
        home.clear()


def test_two_processes_exclude_each_other(home: DaemonHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.mps.home._LOCK_SECONDS", 0.05)
    with elsewhere(home, "with home.locked():\n print('locked', flush=True); input()") as other:
        with fails(InUse, "locked", hint="fuser"), home.locked():
            pass
        other.kill()
        other.wait()
        monkeypatch.setattr("gpushare.mps.home._LOCK_SECONDS", 5.0)
        with home.locked():
            pass


def test_the_lock_is_free_after_an_error(home: DaemonHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.mps.home._LOCK_SECONDS", 0.0)
    with pytest.raises(ZeroDivisionError), home.locked():
        raise ZeroDivisionError
    with home.locked():
        pass


def test_a_lease_lives_until_it_is_released(home: DaemonHome) -> None:
    assert home.live_leases() == []
    lease = home.take_lease()
    assert home.live_leases() == [os.getpid()]
    lease.release()
    assert home.live_leases() == []
    lease.release()
    assert list(home.leases.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_lease_ends_with_its_holder(home: DaemonHome, sent: int) -> None:
    with elsewhere(home, "lease = home.take_lease(); print('taken', flush=True); input()") as other:
        assert home.live_leases() == [other.pid]
        other.send_signal(sent)
        other.wait()
        assert home.live_leases() == []
        assert list(home.leases.iterdir()) == []


def test_a_lease_is_inherited_by_a_forked_child_and_not_by_a_program(home: DaemonHome) -> None:
    code = """
import subprocess, sys
lease = home.take_lease()
program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
child = os.fork()
if not child:
    time.sleep(600)
print(child, program.pid, flush=True)
input()
"""
    with elsewhere(home, code) as other:
        child, program = map(int, other.first.split())  # type: ignore[attr-defined]
        other.kill()
        other.wait()
        assert home.live_leases() == [other.pid]
        os.kill(child, signal.SIGKILL)
        until(lambda: home.live_leases() == [], "the lease is gone")
        os.kill(program, signal.SIGKILL)


def test_a_lease_that_was_swept_while_it_was_taken_is_taken_again(
    home: DaemonHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real, swept = fcntl.flock, []

    def meanwhile(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(1)
            next(home.leases.glob("*.lease")).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    lease = home.take_lease()
    assert home.live_leases() == [os.getpid()]
    lease.release()


@pytest.mark.parametrize(("number", "leases"), [(errno.EMFILE, None), (errno.ENOENT, [])])
def test_a_lease_that_cannot_be_opened_may_be_in_use(
    home: DaemonHome, monkeypatch: pytest.MonkeyPatch, number: int, leases: list[int] | None
) -> None:
    lease = home.take_lease()
    real = os.open

    def refuse(path: str | Path, *more: Any, **named: Any) -> int:
        if Path(path) == lease.path:
            raise OSError(number, os.strerror(number))
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert home.live_leases() == leases
    lease.release()


def test_files_that_are_no_leases_are_no_users(home: DaemonHome) -> None:
    import fcntl

    odd = home.leases / "odd.lease"
    odd.write_text("")
    with odd.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert home.live_leases() == []


def test_a_lease_whose_file_cannot_be_removed_is_given_back(home: DaemonHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard holds the same descriptor: closing ours alone would leave the daemon in use forever."""
    lease = home.take_lease()
    guards = os.dup(lease.descriptor)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "unlink", refuse)
    lease.release()
    assert lease.path.exists()
    assert home.live_leases() == []
    os.close(guards)


@pytest.mark.parametrize("act", ["locked", "take_lease", "live_leases"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOLCK])
def test_a_lock_that_the_system_refuses_is_said(
    home: DaemonHome, monkeypatch: pytest.MonkeyPatch, act: str, number: int
) -> None:
    """Never a bug in gpushare, and never a lease that counts for nobody."""
    home.take_lease()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mps_home.fcntl, "flock", refuse)
    with pytest.raises(OperationFailed, match=os.strerror(number)) as caught:
        home.locked().__enter__() if act == "locked" else getattr(home, act)()
    assert str(home.directory) in caught.value.message
