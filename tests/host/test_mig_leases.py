"""Leases of MIG instances: held by one at a time, over processes, users and crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.errors import NoPermission, OperationFailed
from gpushare.host import mig_leases
from gpushare.host.connect import connect
from gpushare.host.host import Host
from gpushare.host.mig_leases import MigLease, live_leases, take_lease

ROOT = Path(__file__).parents[2]
ONE, OTHER = "MIG-11111111-1111-5111-8111-111111111111", "MIG-22222222-2222-5222-8222-222222222222"
TAKE = """
import os
import sys
from dataclasses import replace
from pathlib import Path
from gpushare.host import mig_leases
from gpushare.host.connect import connect
host = connect("sim:h200")
if sys.argv[2:]:
    mig_leases.SHARED_DIRECTORIES = (Path(sys.argv[2]),)
    host = replace(host, spec="local", run_directory=Path("/nonexistent"))
    # Nobody, after all that only root may import was imported.
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
lease = mig_leases.take_lease(host, sys.argv[1])
print("none" if lease is None else "taken", flush=True)
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def host() -> Host:
    return connect("sim:h200")


@pytest.fixture
def taker() -> Iterator[Start]:
    """Return a function that starts a process which takes a lease, says so, and waits."""
    started: list[subprocess.Popen[str]] = []

    def start(uuid: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKE, uuid, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def taken(host: Host, uuid: str = ONE) -> MigLease:
    lease = take_lease(host, uuid)
    assert lease is not None
    return lease


def test_nobody_holds_anything_where_nothing_was_ever_taken(host: Host) -> None:
    assert live_leases(host) == {}


def test_one_at_a_time(host: Host) -> None:
    lease = taken(host)
    assert take_lease(host, ONE) is None
    (holder,) = live_leases(host).values()
    assert (holder.pid, holder.what) == (os.getpid(), "lease")
    assert holder.user
    other = taken(host, OTHER)
    assert set(live_leases(host)) == {ONE, OTHER}
    lease.release()
    other.release()
    assert live_leases(host) == {}
    taken(host).release()


def test_another_process_holds_it_until_it_is_killed(host: Host, taker: Start) -> None:
    process = taker(ONE)
    assert said(process) == "taken"
    assert take_lease(host, ONE) is None
    assert live_leases(host)[ONE].pid == process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert live_leases(host) == {}
    taken(host).release()


def test_of_many_at_the_same_moment_one_gets_it(host: Host, taker: Start) -> None:
    processes = [taker(ONE) for _ in range(6)]
    assert sorted(said(process) for process in processes) == ["none"] * 5 + ["taken"]


def test_who_inherits_the_descriptor_holds_it_on(host: Host) -> None:
    lease = taken(host)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lease.descriptor,))
    lease.leave()
    assert take_lease(host, ONE) is None
    child.communicate()
    taken(host).release()


def test_a_release_holds_for_all_who_inherited_it(host: Host) -> None:
    lease = taken(host)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lease.descriptor,))
    lease.release()
    again = taken(host)
    child.communicate()
    again.release()


def test_a_lease_that_was_given_back_is_not_taken_from_its_new_holder(host: Host) -> None:
    lease = taken(host)
    copy = MigLease(lease.path, os.dup(lease.descriptor))
    assert copy.held()
    lease.release()
    new = taken(host)
    assert not copy.held()
    new.release()
    assert copy.held()
    copy.release()


def test_a_look_never_keeps_anybody_out(host: Host) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            live_leases(host)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            taken(host).release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@given(st.lists(st.tuples(st.sampled_from(["take", "release", "crash"]), st.sampled_from([ONE, OTHER])), max_size=30))
def test_any_sequence_has_one_holder_at_most(steps: list[tuple[str, str]]) -> None:
    host = connect("sim:h200")
    held: dict[str, MigLease] = {}
    try:
        for what, uuid in steps:
            if what == "take":
                lease = take_lease(host, uuid)
                assert (lease is None) == (uuid in held)
                held.update({} if lease is None else {uuid: lease})
            elif uuid in held:
                # A crash closes the descriptor and says nothing.
                (held[uuid].release if what == "release" else held[uuid].leave)()
                del held[uuid]
            assert set(live_leases(host)) == set(held)
    finally:
        for lease in held.values():
            lease.release()


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cleaner of /tmp does: a lock on a removed file keeps nobody out."""
    lock, removed = mig_leases._lock, []

    def removed_once(descriptor: int, kind: int) -> bool:
        if not removed:
            removed.append(os.unlink(os.readlink(f"/proc/self/fd/{descriptor}")))
        return lock(descriptor, kind)

    monkeypatch.setattr(mig_leases, "_lock", removed_once)
    lease = taken(host)
    assert (removed, take_lease(host, ONE)) == ([None], None)
    lease.release()


def put_symlink(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("put", [put_symlink, os.mkfifo, os.mkdir])
def test_what_is_no_lock_file_is_said(host: Host, put: Callable[[Path], None]) -> None:
    path = taken(host).path
    path.unlink()
    put(path)
    with pytest.raises(OperationFailed, match="should be a lock file") as raised:
        take_lease(host, ONE)
    assert (raised.value.code, str(path) in raised.value.hint) == ("lease_unusable", True)


def test_a_file_that_may_not_be_opened_is_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(host).release()

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(mig_leases.os, "open", refused)
    with pytest.raises(NoPermission, match="Permission denied"):
        take_lease(host, ONE)


def test_the_file_is_all_users_own_whatever_the_umask(host: Host) -> None:
    before = os.umask(0o077)
    try:
        lease = taken(host)
    finally:
        os.umask(before)
    assert lease.path.stat().st_mode & 0o777 == 0o666
    assert [path.name for path in lease.path.parent.iterdir()] == [lease.path.name]
    lease.release()


@pytest.mark.parametrize("text", ["", "x", "-7", "9" * 40 + "x"])
def test_what_others_wrote_into_the_file_frees_nothing(host: Host, text: str) -> None:
    lease = taken(host)
    lease.path.write_text(text)
    assert live_leases(host)[ONE].pid == 0
    assert take_lease(host, ONE) is None
    lease.release()


def local(host: Host, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a host that is not simulated, and whose shared directory is this one."""
    monkeypatch.setattr(mig_leases, "SHARED_DIRECTORIES", (directory,))
    return replace(host, spec="local", run_directory=directory / "own")


def test_a_simulated_host_keeps_its_leases_to_itself(host: Host) -> None:
    assert mig_leases.lease_directory(host).is_relative_to(host.run_directory)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1755])
def test_a_directory_that_is_not_for_all_or_not_sticky_is_no_shared_one(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    tmp_path.chmod(mode)
    seen = local(host, tmp_path, monkeypatch)
    assert mig_leases.lease_directory(seen) == seen.run_directory / "mig" / "leases"
    link = tmp_path / "link"
    link.symlink_to("/tmp")
    seen = local(host, link, monkeypatch)
    assert mig_leases.lease_directory(seen) == seen.run_directory / "mig" / "leases"


@pytest.mark.skipif(os.stat("/tmp").st_uid != 0, reason="/tmp is not root's here")
def test_the_machine_has_a_shared_one(host: Host) -> None:
    assert mig_leases.lease_directory(replace(host, spec="local")) in mig_leases.SHARED_DIRECTORIES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("root_first", [True, False])
def test_root_and_others_keep_each_other_out(
    host: Host, sim_dir: Path, monkeypatch: pytest.MonkeyPatch, taker: Start, root_first: bool
) -> None:
    shared = sim_dir / "lock"
    shared.mkdir()
    shared.chmod(0o1777)
    sim_dir.chmod(0o777)
    seen = local(host, shared, monkeypatch)
    before = os.umask(0o077)
    try:
        if root_first:
            lease = taken(seen)
            assert said(taker(ONE, str(shared))) == "none"
            lease.release()
            assert said(taker(ONE, str(shared))) == "taken"
            assert take_lease(seen, ONE) is None
        else:
            process = taker(ONE, str(shared))
            assert said(process) == "taken"
            assert take_lease(seen, ONE) is None
            assert live_leases(seen)[ONE].pid == process.pid
            process.communicate()
            taken(seen).release()
    finally:
        os.umask(before)


# -- files that come and go ------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_is_removed_again_and_again_is_said_in_the_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, removed = mig_leases._lock, []

    def always_removed(descriptor: int, kind: int) -> bool:
        removed.append(os.unlink(os.readlink(f"/proc/self/fd/{descriptor}")))
        return lock(descriptor, kind)

    taken(host).release()
    monkeypatch.setattr(mig_leases, "_lock", always_removed)
    before = open_descriptors()
    with pytest.raises(OperationFailed, match="removed again and again") as caught:
        take_lease(host, ONE)
    assert caught.value.code == "lease_unusable"
    assert 1 < len(removed) <= 100
    assert open_descriptors() == before


def test_a_file_that_goes_before_it_is_opened_is_said_in_the_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    create = mig_leases._create

    def gone_at_once(path: Path) -> None:
        create(path)
        path.unlink()

    monkeypatch.setattr(mig_leases, "_create", gone_at_once)
    with pytest.raises(OperationFailed, match="comes and goes") as caught:
        take_lease(host, ONE)
    assert caught.value.code == "lease_unusable"


def test_two_who_make_the_file_at_once_lock_the_same(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    create, made = mig_leases._create, []

    def other_was_first(path: Path) -> None:
        create(path)
        made.append(path)
        create(path)

    monkeypatch.setattr(mig_leases, "_create", other_was_first)
    lease = taken(host)
    assert made == [lease.path]
    assert [path.name for path in lease.path.parent.iterdir()] == [lease.path.name]
    assert take_lease(host, ONE) is None
    lease.release()


def test_who_is_refused_keeps_nothing_open(host: Host) -> None:
    nothing = open_descriptors()
    lease = taken(host)
    before = open_descriptors()
    # Its own, and none of how the file was made.
    assert before == nothing + 1
    for _ in range(3):
        assert take_lease(host, ONE) is None
        assert set(live_leases(host)) == {ONE}
    assert open_descriptors() == before
    lease.release()
    assert open_descriptors() == before - 1


def test_what_is_no_lease_is_not_told_and_hides_none(host: Host) -> None:
    lease = taken(host)
    directory = lease.path.parent
    for name in ("gpushare-GPU-1.lease", f"gpushare-{ONE}.lease.old", f"x-gpushare-{ONE}.lease", ".gpushare-x"):
        (directory / name).write_text("1\n")
    (directory / f"gpushare-{OTHER}.lease").symlink_to(lease.path)
    (directory / "gpushare-MIG-pipe.lease").mkdir()
    assert set(live_leases(host)) == {ONE}
    lease.release()


def test_a_lease_names_who_holds_it_and_only_while_he_does(host: Host) -> None:
    lease = taken(host)
    assert lease.path.read_text() == f"{os.getpid()}\n"
    lease.release()
    # Nobody's name stays in a file that is free.
    assert lease.path.read_text() == ""
    again = taken(host)
    again.path.write_text("4194999\n")
    (holder,) = live_leases(host).values()
    assert (holder.pid, holder.user, holder.name) == (4194999, None, None)
    again.release()


def test_an_old_way_of_naming_an_instance_makes_a_file_name_too(host: Host) -> None:
    """MIG-GPU-<uuid>/<gi>/<ci>, of drivers before 470."""
    lease = taken(host, "MIG-GPU-1/5/0")
    assert lease.path.name == "gpushare-MIG-GPU-1_5_0.lease"
    assert take_lease(host, "MIG-GPU-1/5/0") is None
    lease.release()


def test_a_directory_that_is_not_there_is_no_shared_one(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = local(host, tmp_path / "none", monkeypatch)
    assert mig_leases.lease_directory(seen) == seen.run_directory / "mig" / "leases"


def test_the_first_shared_directory_is_everybodys(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "lock", tmp_path / "tmp"
    for one in (first, second):
        one.mkdir()
    seen = replace(host, spec="local", run_directory=tmp_path / "own")
    monkeypatch.setattr(mig_leases, "SHARED_DIRECTORIES", (first, second))
    modes = {first: 0o1777, second: 0o1777}
    # Who owns it counts too, which only root could set.
    monkeypatch.setattr(
        mig_leases.os, "lstat", lambda path: os.stat_result((0o040000 | modes[path], 0, 0, 1, 0, 0, 0, 0, 0, 0))
    )
    assert mig_leases.lease_directory(seen) == first
    modes[first] = 0o755
    assert mig_leases.lease_directory(seen) == second
    monkeypatch.setattr(mig_leases.os, "lstat", lambda path: os.stat_result((0o041777, 0, 0, 1, 1000, 0, 0, 0, 0, 0)))
    assert mig_leases.lease_directory(seen) == seen.run_directory / "mig" / "leases"
