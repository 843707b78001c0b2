"""Claims: held by one at a time, over processes, users and crashes; and what strangers can do to them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import NoPermission, OperationFailed
from gpushare.connect import connect
from gpushare.host import claims, identity
from gpushare.host.claims import Claim, HeldClaim, live_claims, take_claim
from gpushare.host.host import Host
from gpushare.host.identity import Identity, boot_id, identity_of, lives, pid_space
from gpushare.mig.holders import claimed_instances
from tests.errors import fails

ROOT = Path(__file__).parents[2]
ONE, OTHER = "MIG-11111111-1111-5111-8111-111111111111", "MIG-22222222-2222-5222-8222-222222222222"
NOBODY = 65534
TAKE = """
import os
import sys
from dataclasses import replace
from pathlib import Path
from gpushare.host import claims
from gpushare.connect import connect
host = connect("sim:h200")
if sys.argv[2:]:
    claims.SHARED_DIRECTORIES = (Path(sys.argv[2]),)
    host = replace(host, spec="local", run_directory=Path("/nonexistent"))
    # Nobody, after all that only root may import was imported.
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
claim = claims.take_claim(host, sys.argv[1])
print("taken" if isinstance(claim, claims.HeldClaim) else "none", flush=True)
sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def taker() -> Iterator[Start]:
    """Return a function that starts a process which takes a claim, says so, and waits."""
    started: list[subprocess.Popen[str]] = []

    def start(key: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKE, key, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def taken(host: Host, key: str = ONE) -> HeldClaim:
    claim = take_claim(host, key)
    assert isinstance(claim, HeldClaim), claim
    return claim


def refused(host: Host, key: str = ONE) -> Claim:
    claim = take_claim(host, key)
    assert isinstance(claim, Claim), claim
    return claim


def files(host: Host) -> list[Path]:
    return sorted(claims.claim_directory(host).iterdir())


# -- one at a time ---------------------------------------------------------------------------------


def test_one_at_a_time(host: Host) -> None:
    opened = os.listdir("/proc/self/fd")
    claim = taken(host)
    assert refused(host).pid == os.getpid()
    (holder,) = claimed_instances(host).values()
    assert (holder.pid, holder.what) == (os.getpid(), "lease")
    assert holder.user
    assert holder.name
    other = taken(host, OTHER)
    assert set(live_claims(host)) == {ONE, OTHER}
    assert len(os.listdir("/proc/self/fd")) == len(opened)
    claim.release()
    other.release()
    assert (live_claims(host), files(host)) == ({}, [])
    taken(host).release()


def test_another_process_holds_it_until_it_is_killed(host: Host, taker: Start) -> None:
    process = taker(ONE)
    assert said(process) == "taken"
    assert refused(host).pid == process.pid
    os.kill(process.pid, signal.SIGKILL)
    # A zombie holds nothing.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert live_claims(host) == {}
    # Its file is gone with the first look.
    assert files(host) == []
    taken(host).release()


def test_of_many_at_the_same_moment_one_gets_it(host: Host, taker: Start) -> None:
    for _ in range(3):
        processes = [taker(ONE) for _ in range(6)]
        assert sorted(said(process) for process in processes) == ["none"] * 5 + ["taken"]
        for process in processes:
            process.kill()
            process.wait()


def test_of_many_threads_never_two_have_it(host: Host) -> None:
    inside, most, wins = 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most, wins
        for _ in range(60):
            claim = take_claim(host, ONE)
            if not isinstance(claim, HeldClaim):
                continue
            with lock:
                inside, wins = inside + 1, wins + 1
                most = max(most, inside)
            time.sleep(0.0005)
            with lock:
                inside -= 1
            claim.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert wins > 0


def test_another_process_that_was_added_holds_it_on(host: Host, taker: Start) -> None:
    """As the guard, when gpushare is killed."""
    process = taker(ONE)
    assert said(process) == "taken"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        (path,) = files(host)
        HeldClaim(path).add(other.pid)
        before = live_claims(host)[ONE]
        assert [process.pid for process in before.processes] == [process.pid, other.pid]
        process.kill()
        process.wait()
        after = refused(host)
        assert (after.pid, after.rank) == (other.pid, before.rank)
        other.communicate()
    taken(host).release()


def test_a_release_holds_for_all_who_hold_it(host: Host) -> None:
    claim = taken(host)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        claim.add(child.pid)
        claim.release()
        again = taken(host)
        assert not claim.path.exists()
        assert again.path.exists()
        child.communicate()
    again.release()


def test_a_process_that_is_gone_cannot_be_added_nor_one_to_a_claim_that_was_given_back(host: Host) -> None:
    claim = taken(host)
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(OperationFailed, match="is gone"):
        claim.add(child.pid)
    claim.release()
    with pytest.raises(OperationFailed, match="was removed"):
        claim.add(os.getpid())


def test_a_look_never_keeps_anybody_out(host: Host) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            live_claims(host)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            taken(host).release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@given(st.lists(st.tuples(st.sampled_from(["take", "release"]), st.sampled_from([ONE, OTHER])), max_size=30))
def test_any_sequence_has_one_holder_at_most(steps: list[tuple[str, str]]) -> None:
    host = connect("sim:h200")
    held: dict[str, HeldClaim] = {}
    try:
        for what, key in steps:
            if what == "take":
                claim = take_claim(host, key)
                assert isinstance(claim, Claim) == (key in held)
                held.update({key: claim} if isinstance(claim, HeldClaim) else {})
            elif key in held:
                held.pop(key).release()
            assert set(live_claims(host)) == set(held)
    finally:
        for claim in held.values():
            claim.release()


# -- choosing and the order ------------------------------------------------------------------------


def text(
    one: Identity | None = None, *, key: str = ONE, ticket: int | None = 1, more: str = "", boot: str | None = None
) -> str:
    one = one or identity_of(os.getpid())
    drawn = "" if ticket is None else f"ticket {ticket}\n"
    head = f"gpushare claim 1\nboot {boot or boot_id()}\nspace {pid_space()}\nkey {key}\n"
    return f"{head}process {one.pid} {one.started}\n{drawn}{more}"


def put(host: Host, content: str | bytes, name: str = "0" * 16) -> Path:
    """Put a claim there by hand."""
    taken(host, "MIG-makes-the-directory").release()
    path = claims.claim_directory(host) / f"gpushare-claim-{name}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_lowest_ticket_is_first(host: Host) -> None:
    put(host, text(ticket=2**63), name="f" * 16)
    claim = taken(host)
    assert live_claims(host)[ONE].path == claim.path
    claim.release()
    put(host, text(ticket=1), name="0" * 16)
    assert refused(host).ticket == 1


def test_one_that_stays_choosing_has_it_after_a_short_wait(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_CHOOSING_SECONDS", 0.1)
    path = put(host, text(ticket=None))
    begun = time.monotonic()
    assert refused(host).path == path
    assert 0.1 <= time.monotonic() - begun < 5.0
    path.unlink()
    taken(host).release()


def test_one_that_chooses_is_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sleep, waits = put(host, text(ticket=None)), time.sleep, []

    def drawn(seconds: float) -> None:
        if not waits:
            path.write_text(text(ticket=2**62))
        waits.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(claims.time, "sleep", drawn)
    taken(host).release()
    assert len(waits) == 1


def test_the_ticket_is_drawn_when_the_claim_can_be_seen(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    real = time.clock_gettime_ns

    def drawn(clock: int) -> int:
        seen.append(live_claims(host)[ONE].ticket)
        return real(clock)

    monkeypatch.setattr(claims.time, "clock_gettime_ns", drawn)
    taken(host).release()
    assert seen == [None]


# -- what counts, and what does not ----------------------------------------------------------------


def another_process() -> str:
    me = identity_of(os.getpid())
    return text(Identity(me.pid, me.started + 1))


@pytest.mark.parametrize("content", [another_process, lambda: text(boot="00000000-0000-0000-0000-000000000000")])
def test_a_claim_for_another_process_of_that_pid_or_of_another_boot_goes(
    host: Host, content: Callable[[], str]
) -> None:
    path = put(host, content())
    taken(host).release()
    assert not path.exists()


def test_a_claim_of_another_pid_namespace_is_neither_believed_nor_removed(host: Host) -> None:
    path = put(host, text().replace(f"space {pid_space()}", "space 7"))
    taken(host).release()
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"-7",
        b"\0" * 100,
        text().encode()[:-1],
        text().encode() + b"x",
        text().encode() * 2,
        text(more="process 1 1\n" * 9).encode(),
        text(more="process 1 1\n" * 200).encode(),
        text().replace("claim 1", "claim 2").encode(),
        text().replace("process", "process -").encode(),
        text(Identity(10**11, 1)).encode(),
        text(key="a b").encode(),
        text(key="k" * 161).encode(),
    ],
)
def test_what_is_no_claim_keeps_nobody_out(host: Host, content: bytes) -> None:
    path = put(host, content)
    assert live_claims(host) == {}
    taken(host).release()
    # It may be in the writing.
    assert path.exists()


def test_what_was_no_claim_for_long_is_removed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(host, "x")
    monkeypatch.setattr(claims, "_UNREADABLE_SECONDS", -1.0)
    assert live_claims(host) == {}
    assert not path.exists()


def put_link(path: Path, link: Callable[..., None]) -> None:
    real = path.with_name("real")
    real.write_text(text())
    link(real, path)


@pytest.mark.parametrize(
    "made",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: put_link(path, os.symlink),
        lambda path: put_link(path, os.link),
        os.mkfifo,
        os.mkdir,
    ],
)
def test_what_is_no_file_of_its_own_is_not_opened_and_not_waited_for(host: Host, made: Callable[[Path], None]) -> None:
    path = put(host, "")
    path.unlink()
    made(path)
    assert live_claims(host) == {}
    taken(host).release()
    assert os.path.lexists(path)


def test_links_that_others_make_of_a_users_files_hide_no_claim(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(host, text(), "f" * 16)
    (path.parent / "linked").write_text(text())
    for number in range(claims._MOST_OF_ONE_USER + 1):
        os.link(path.parent / "linked", path.with_name(f"gpushare-claim-{number:016x}"))
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert list(live_claims(host) or {}) == [ONE]


def test_a_directory_full_of_claims_costs_little_and_keeps_nobody_out(host: Host) -> None:
    put(host, "x")
    directory = claims.claim_directory(host)
    for number in range(3000):
        (directory / f"gpushare-claim-{number:016x}").write_bytes(b"")
    begun = time.monotonic()
    taken(host).release()
    assert time.monotonic() - begun < 5.0


def test_a_flood_is_said_with_whose_it_is(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        put(host, "x", name=f"{number:016x}")
    assert claimed_instances(host) == {}
    monkeypatch.setattr(claims, "_MOST_FILES", 20)
    # A true claim may be beyond the bound: that nobody has anything is not known.
    assert (live_claims(host), claimed_instances(host)) == (None, None)
    with fails(
        OperationFailed, "lease_unusable", match=f"claims of user {os.geteuid()}", hint=f"-uid {os.geteuid()} -delete"
    ):
        take_claim(host, ONE)


@pytest.mark.needs_root
def test_of_another_user_only_so_many_count(host: Host) -> None:
    put(host, "x")
    for number in range(claims._MOST_OF_ONE_USER + 40):
        os.chown(put(host, "x", name=f"{number:016x}"), NOBODY, NOBODY)
    reads: list[str] = []
    real = os.open

    def opened(path: Any, *rest: Any, **named: Any) -> int:
        reads.append(str(path))
        return real(path, *rest, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(claims.os, "open", opened)
        assert live_claims(host) == {}
    assert len([path for path in reads if "gpushare-claim" in path]) == claims._MOST_OF_ONE_USER


@pytest.mark.needs_root
def test_a_claim_that_names_anothers_process_is_worth_nothing(host: Host) -> None:
    """Whose file it is decides: nobody speaks for root's process."""
    path = put(host, text())
    assert set(live_claims(host)) == {ONE}
    os.chown(path, NOBODY, NOBODY)
    assert live_claims(host) == {}
    taken(host).release()


def test_processes_that_are_hidden_count_where_they_must_not_be_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc mounted with hidepid."""
    monkeypatch.setattr(identity, "read_stat", lambda _: None)
    answers: list[Exception | None] = [PermissionError(errno.EPERM, "x"), ProcessLookupError(), None]

    def kill(*_: int) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(identity.os, "kill", kill)
    assert [lives(Identity(77, 1), 0) for _ in range(3)] == [True, False, False]
    assert not lives(Identity(0, 1), 0)


def test_a_thread_is_no_process() -> None:
    release, ids = threading.Event(), []
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), release.wait()))
    thread.start()
    try:
        while not ids:
            time.sleep(0.001)
        one = identity_of(ids[0])
        assert one is not None
        assert not lives(one, os.getuid())
    finally:
        release.set()
        thread.join()


# -- making it -------------------------------------------------------------------------------------


def test_everybody_may_read_it_and_only_its_owner_write_whatever_the_umask(host: Host) -> None:
    before = os.umask(0o077)
    try:
        claim = taken(host)
    finally:
        os.umask(before)
    assert claim.path.stat().st_mode & 0o777 == 0o644
    assert files(host) == [claim.path]
    claim.release()


def test_a_claim_that_became_a_link_marks_no_other_file_as_used(host: Host, tmp_path: Path) -> None:
    claim, other = taken(host), tmp_path / "other"
    other.touch()
    os.utime(other, (1, 1))
    claim.path.unlink()
    claim.path.symlink_to(other)
    claim.touch()
    assert other.stat().st_mtime == 1
    assert claim.path.lstat().st_mtime > 1


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, OperationFailed), (errno.EACCES, NoPermission), (errno.EROFS, NoPermission)]
)
def test_a_claim_that_cannot_be_made_is_said(
    host: Host, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    taken(host).release()

    real = os.open

    def refuses(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith("/proc/"):
            return real(path, *arguments, **named)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(claims.os, "open", refuses)
    with pytest.raises(kind, match=os.strerror(number)):
        take_claim(host, ONE)


@pytest.mark.parametrize("nth", [1, 2])
def test_no_room_for_the_text_leaves_nothing_behind(host: Host, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    taken(host).release()
    real, calls = os.write, []

    def full(descriptor: int, content: bytes) -> int:
        calls.append(content)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content)

    monkeypatch.setattr(claims.os, "write", full)
    with fails(OperationFailed, "lease_unusable", match="No space left"):
        take_claim(host, ONE)
    assert files(host) == []


def test_who_runs_under_another_user_than_who_started_it_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "real_uid", lambda _: 4711)
    with pytest.raises(OperationFailed, match="its claim would not count"):
        take_claim(host, ONE)


def test_what_is_claimed_besides_instances_is_no_instance(host: Host) -> None:
    claim = taken(host, "memory:GPU-1")
    assert set(live_claims(host)) == {"memory:GPU-1"}
    assert claimed_instances(host) == {}
    claim.release()


# -- where they lie --------------------------------------------------------------------------------


def local(host: Host, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a host that is not simulated, and whose shared directory is this one."""
    monkeypatch.setattr(claims, "SHARED_DIRECTORIES", (directory,))
    return replace(host, spec="local", run_directory=directory / "own")


def test_a_simulated_host_keeps_its_claims_to_itself(host: Host) -> None:
    assert claims.claim_directory(host).is_relative_to(host.run_directory)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1755])
def test_a_directory_that_is_not_for_all_or_not_sticky_is_no_shared_one(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    tmp_path.chmod(mode)
    seen = local(host, tmp_path, monkeypatch)
    assert claims.claim_directory(seen) == seen.run_directory / "claims"
    link = tmp_path / "link"
    link.symlink_to("/tmp")
    seen = local(host, link, monkeypatch)
    assert claims.claim_directory(seen) == seen.run_directory / "claims"


@pytest.mark.skipif(os.stat("/tmp").st_uid != 0, reason="/tmp is not root's here")
def test_the_machine_has_a_shared_one(host: Host) -> None:
    assert claims.claim_directory(replace(host, spec="local")) in claims.SHARED_DIRECTORIES
    assert claims.claims_are_shared(replace(host, spec="local"))


def test_a_directory_that_is_not_there_is_no_shared_one(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = local(host, tmp_path / "none", monkeypatch)
    assert claims.claim_directory(seen) == seen.run_directory / "claims"
    assert not claims.claims_are_shared(seen)
    assert claims.claims_are_shared(host)
    assert live_claims(seen) == {}


def test_the_first_shared_directory_is_everybodys(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "lock", tmp_path / "tmp"
    for one in (first, second):
        one.mkdir()
    seen = replace(host, spec="local", run_directory=tmp_path / "own")
    monkeypatch.setattr(claims, "SHARED_DIRECTORIES", (first, second))
    modes = {first: 0o1777, second: 0o1777}
    # Who owns it counts too, which only root could set.
    monkeypatch.setattr(
        claims.os, "lstat", lambda path: os.stat_result((0o040000 | modes[path], 0, 0, 1, 0, 0, 0, 0, 0, 0))
    )
    assert claims.claim_directory(seen) == first
    modes[first] = 0o755
    assert claims.claim_directory(seen) == second
    monkeypatch.setattr(claims.os, "lstat", lambda path: os.stat_result((0o041777, 0, 0, 1, 1000, 0, 0, 0, 0, 0)))
    assert claims.claim_directory(seen) == seen.run_directory / "claims"


@pytest.mark.needs_root
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
            claim = taken(seen)
            assert said(taker(ONE, str(shared))) == "none"
            claim.release()
            assert said(taker(ONE, str(shared))) == "taken"
            refused(seen)
        else:
            process = taker(ONE, str(shared))
            assert said(process) == "taken"
            assert refused(seen).uid == NOBODY
            assert live_claims(seen)[ONE].pid == process.pid
            process.kill()
            process.wait()
            taken(seen).release()
            # Root clears up what others leave.
            assert list(shared.iterdir()) == []
    finally:
        os.umask(before)
