"""What others lock or plant never blocks root for long, and never aims a signal of root's."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import struct
from pathlib import Path

import pytest

from gpushare.connect import connect
from gpushare.host.identity import identity_of
from gpushare.mig.ledger import MigLedger
from gpushare.sim import admin
from tests.cli.drive import World, alive
from tests.security.conftest import Stranger, gpushare

A100 = "sim:a100-80gb"
_WRITE_LOCK = struct.pack("@hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)


def start_ticks(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def claim_of(pid: int, key: str, *, ticket: int = 1) -> str:
    """Return a claim as gpushare writes it, in the name of a process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.stat("/proc/self/ns/pid").st_ino
    process = f"process {pid} {start_ticks(pid)}\n"
    return f"gpushare claim 1\nboot {boot}\nspace {space}\nkey {key}\n{process}ticket {ticket}\n{process}"


def open_to_all(world: World) -> list[Path]:
    """Make the directories where all users meet on a real machine what /run/lock is there."""
    found = [world.directory / "run" / "claims", world.directory / "run" / "mig" / "leases"]
    for path in found:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o1777)
    return found


def plant(directories: list[Path], uuid: str, pid: int) -> list[int]:
    """Say in every way that there is or was that a process holds an instance; return what holds the locks."""
    kept = []
    claims, leases = directories
    (claims / f"gpushare-claim-{secrets.token_hex(8)}").write_text(claim_of(pid, uuid))
    for name in (f"gpushare-{uuid}.lease", f"{uuid}.lease"):
        descriptor = os.open(leases / name, os.O_RDWR | os.O_CREAT, 0o666)
        os.write(descriptor, f"{pid}\n".encode())
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WRITE_LOCK)
        kept.append(descriptor)
    return kept


@pytest.fixture
def world() -> World:
    connect(A100)
    return World(A100)


def test_a_planted_pid_is_never_killed(world: World, mallory: Stranger, alice: Stranger) -> None:
    (uuid,) = world.mig("1g.10gb")
    directories = open_to_all(world)
    with alice.runs(["sleep", "600"]) as victim, mallory.keeps(lambda: plant(directories, uuid, victim)) as mallorys:
        answer = gpushare("mig", "destroy", "all", "--evict", "all", "-y", host=A100)
        assert alive(victim)
        assert alive(mallorys)
        # What Mallory said of others is worth nothing, so nobody is in the way.
        assert answer.code == 0, answer
    assert world.state.gpus[0].mig == []


def test_a_claim_of_ones_own_keeps_others_out_and_is_never_killed_for(world: World, mallory: Stranger) -> None:
    (uuid,) = world.mig("1g.10gb")
    directories = open_to_all(world)
    with mallory.keeps(lambda: plant(directories, uuid, os.getpid())) as mallorys:
        answer = gpushare("mig", "destroy", "all", "--evict", "all", "-y", host=A100)
        assert alive(mallorys)
        # Root is told by whom it is kept out.
        assert answer.code == 19, answer
        assert str(mallorys) in answer.err
        assert mallory.name in answer.err
    assert gpushare("mig", "destroy", "all", "-y", host=A100).code == 0
    assert world.state.gpus[0].mig == []


def lock_what_opens(directory: Path) -> list[Path]:
    """Take an exclusive lock on each file that can be opened; return those, and keep them open."""
    found = []
    for path in sorted(directory.rglob("*")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        found.append(path)
        # Kept open: a lock ends with its last descriptor.
        os.dup(descriptor)
    return found


def test_no_lock_of_roots_can_be_held_by_others(world: World, mallory: Stranger) -> None:
    assert gpushare("mig", "apply", "-g", "0", "2g.20gb", "1g.10gb", "-y", host=A100).code == 0
    uuid = world.state.gpus[0].mig[0].uuid
    assert gpushare("mig", "name", "web", uuid, "-y", host=A100).code == 0
    assert gpushare("mps", "start", "-g", uuid, host=A100).code == 0
    opened = mallory.does(
        lambda: [str(path) for room in ("run", "var") for path in lock_what_opens(world.directory / room)]
    )
    assert [name for name in opened if Path(name).name == "lock" or name.endswith((".lock", ".lease"))] == []


def test_locks_held_by_others_block_nothing(world: World, mallory: Stranger) -> None:
    assert gpushare("mig", "apply", "-g", "0", "2g.20gb", "1g.10gb", "-y", host=A100).code == 0
    uuid = world.state.gpus[0].mig[0].uuid
    assert gpushare("mps", "start", "-g", uuid, host=A100).code == 0
    with mallory.keeps(lambda: [lock_what_opens(world.directory / room) for room in ("run", "var")]):
        for words in (
            ("mig", "name", "web", uuid, "-y"),
            ("run", "--mig", "web", "--", "true"),
            ("mps", "stop", "-g", uuid),
            ("mig", "destroy", "all", "-y"),
        ):
            assert gpushare(*words, host=A100, seconds=30).code == 0, words


def test_an_interrupted_change_is_not_hidden(world: World, mallory: Stranger) -> None:
    admin.set_fault(A100, "crash-step", None, "3")
    assert gpushare("mig", "apply", "-g", "0", "2g.20gb", "1g.10gb", "-y", host=A100).code == 137
    with mallory.keeps(lambda: lock_what_opens(world.directory / "run")):
        answer = gpushare("mig", "status", host=A100)
        assert "interrupted" in answer.out + answer.err
        assert gpushare("mig", "recover", "-y", host=A100, seconds=30).code == 0


def test_who_cannot_open_the_lock_sees_whether_a_change_goes_on(world: World, mallory: Stranger) -> None:
    admin.set_fault(A100, "crash-step", None, "3")
    assert gpushare("mig", "apply", "-g", "0", "2g.20gb", "1g.10gb", "-y", host=A100).code == 137
    ledger = MigLedger(connect(A100))
    # All that is imported late is imported while that is possible.
    assert ledger.interrupted_change() is not None

    def seen() -> tuple[bool, bool]:
        return mallory.does(lambda: (ledger.is_running(), ledger.interrupted_change() is not None))

    assert seen() == (False, True)
    entry, me = json.loads(world.journal.read_text()), identity_of(os.getpid())
    world.journal.write_text(json.dumps({**entry, "pid": me.pid, "started": me.started}))
    assert seen() == (True, False)
    # Somebody else has its PID now.
    world.journal.write_text(json.dumps({**entry, "pid": me.pid, "started": me.started + 1}))
    assert seen() == (False, True)
