"""What another user of the machine can do to root's MIG changes: nothing, with all that he may open and lock."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.connect import connect
from gpushare.host.claims import claim_directory
from gpushare.host.identity import Identity, boot_id, identity_of
from gpushare.mig.ledger import MigLedger
from tests.cli.drive import World

A100 = "sim:a100-80gb"
NOBODY = 65534

pytestmark = pytest.mark.needs_root


@contextmanager
def stranger(work: Callable[[], object]) -> Iterator[None]:
    """Let another user do something, and stay as he is then, until this ends."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(told, json.dumps(work()).encode() + b"\n")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    try:
        with open(ready, encoding="utf-8") as answer:
            stranger.answer = json.loads(answer.readline())  # type: ignore[attr-defined]
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def answer() -> object:
    return stranger.answer  # type: ignore[attr-defined]


@pytest.fixture
def host(sim_dir: Path) -> World:
    found = World.new(A100)
    assert found.run("mig", "apply", "1g.10gb").code == 0
    for directory in (sim_dir, *(path for path in sim_dir.rglob("*") if path.is_dir())):
        directory.chmod(0o755)
    return found


def locks_all(host: World) -> Callable[[], object]:
    """Return the work of locking all that belongs to gpushare; the simulated machine's own files are no files there."""
    seen = connect(host.spec)
    roots = [seen.run_directory, seen.state_directory]

    def work() -> list[str]:
        held = []
        for path in sorted(path for root in roots for path in (root, *root.rglob("*"))):
            for flags in (os.O_RDWR, os.O_RDONLY):
                try:
                    descriptor = os.open(path, flags | os.O_NONBLOCK)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held.append(path.name)
                    break
                except OSError:
                    continue
        return held

    return work


def test_holding_all_that_another_user_can_open_blocks_no_change_of_root(host: World) -> None:
    # A lock of an older gpushare was open to all.
    lock = host.journal.parent / "lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    with stranger(locks_all(host)):
        assert "lock" not in answer()  # type: ignore[operator]
        begun = time.monotonic()
        assert host.run("mig", "create", "1g.10gb", "--name", "train").code == 0
        assert host.run("mig", "destroy", "all").code == 0
        assert time.monotonic() - begun < 20.0


def test_holding_anything_hides_no_interrupted_change(host: World) -> None:
    host.fault("crash-step", 2)
    assert host.run_apart("mig", "create", "1g.10gb*2") == 137
    host.clear()
    with stranger(locks_all(host)):
        assert "was interrupted" in host.run("mig", "status").err


def ledger_seen(path: Path) -> Callable[[], object]:
    ledger = MigLedger(replace(connect(A100), run_directory=path))
    # All that is imported late is imported while that is possible.
    ledger.interrupted_change()

    def work() -> dict[str, bool]:
        return {"running": ledger.is_running(), "left": ledger.interrupted_change() is not None}

    return work


def test_who_cannot_open_the_lock_sees_whether_a_change_goes_on(host: World) -> None:
    host.fault("crash-step", 2)
    assert host.run_apart("mig", "create", "1g.10gb*2") == 137
    run = host.journal.parent.parent
    look = ledger_seen(run)
    with stranger(look):
        assert answer() == {"running": False, "left": True}
    entry = json.loads(host.journal.read_text())
    me = identity_of(os.getpid())
    host.journal.write_text(json.dumps({**entry, "pid": me.pid, "started": me.started}))
    with stranger(look):
        assert answer() == {"running": True, "left": False}
    # Somebody else has its PID now.
    host.journal.write_text(json.dumps({**entry, "pid": me.pid, "started": me.started + 1}))
    with stranger(look):
        assert answer() == {"running": False, "left": True}


def claims(host: World, claimant: Callable[[], Identity | None]) -> Callable[[], object]:
    """Return the work of claiming the first device in the name of a process."""
    (_, uuid), *_ = host.devices()
    directory = claim_directory(connect(A100))
    directory.mkdir(exist_ok=True)
    directory.chmod(0o1777)
    space = os.stat("/proc/self/ns/pid").st_ino

    def work() -> int:
        process = claimant()
        head = f"gpushare claim 1\nboot {boot_id()}\nspace {space}\nkey {uuid}\n"
        path = directory / f"gpushare-claim-{'0' * 16}"
        path.write_text(f"{head}process {process.pid} {process.started}\nticket 1\n")
        return process.pid

    return work


def test_a_claim_for_roots_process_neither_blocks_nor_ends_it(host: World) -> None:
    """Another user names PID and start time of a process that is not his."""
    me = identity_of(os.getpid())
    with stranger(claims(host, lambda: me)):
        assert host.run("mig", "destroy", "all").code == 0


def test_a_claim_of_his_own_blocks_and_names_him(host: World) -> None:
    with stranger(claims(host, lambda: identity_of(os.getpid()))):
        pid = answer()
        for more in ((), ("--evict", "all", "-y")):
            said = host.run("mig", "destroy", "all", *more)
            assert said.code == 19
            assert f"{pid}" in said.error["message"]
            assert "nobody" in said.error["message"]
    assert host.run("mig", "destroy", "all").code == 0
