"""What other users put into the ledger of memory never makes others wait forever, or takes memory for granted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpushare import start
from gpushare.base.selection import Device, select
from gpushare.base.units import GIB
from gpushare.host.claims import all_claims
from gpushare.memory import ledger
from gpushare.memory.admission import UserLimits
from gpushare.memory.ledger import PREFIX, Place, Request, reservations
from tests.cli.drive import ROOT, World
from tests.security.conftest import Stranger, gpushare
from tests.security.test_locks_and_claims import start_ticks

H200 = "sim:h200"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the times that are waited be short; gpushare runs in forks of this process."""
    monkeypatch.setattr(ledger, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(ledger, "LAPSE_SECONDS", 2.0)


def device(world: World) -> Device:
    (found,) = select(None, world.host.nvml.sweep())
    return found


def claim(world: World, *facts: str, pid: int | None = None, ticket: int | None = 1, name: int = 0) -> Path:
    """Write a claim as its user may write it; to be called in that user's process."""
    pid = os.getpid() if pid is None else pid
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.stat("/proc/self/ns/pid").st_ino
    lines = [f"fact {one}\n" for one in facts] + ([] if ticket is None else [f"ticket {ticket}\n"])
    path = world.directory / "run" / "claims" / f"{PREFIX}{name:016x}"
    path.write_text(
        f"gpushare claim 1\nboot {boot}\nspace {space}\nkey memory\nprocess {pid} {start_ticks(pid)}\n{''.join(lines)}"
    )
    return path


def waits(*words: str, seconds: float = 20.0) -> int:
    return gpushare(
        "run", "--wait", "--memory", "100G", "-g", "0", *words, "--", "true", host=H200, seconds=seconds
    ).code


def whole(world: World) -> str:
    return f"want {130 * GIB} 0 {world.uuid()}"


def test_one_that_waits_for_the_whole_gpu_and_never_comes_is_passed(
    world: World, mallory: Stranger, quick: None
) -> None:
    text = whole(world)
    with mallory.keeps(lambda: claim(world, text)):
        assert waits() == 0


def test_thousands_of_claims_cost_no_minutes(world: World, mallory: Stranger) -> None:
    text = f"want {1 << 60} 0 {world.uuid()}"

    def flood() -> None:
        for name in range(3000):
            claim(world, text, name=name)
        claims = world.directory / "run" / "claims"
        os.mkfifo(claims / f"{PREFIX}{'e' * 16}")
        os.symlink("/etc/shadow", claims / f"{PREFIX}{'d' * 16}")

    with mallory.keeps(flood):
        assert waits(seconds=30) == 0
        assert gpushare("status", host=H200, seconds=20).code == 0


def test_a_claim_for_somebody_elses_process_counts_for_nothing(
    world: World, mallory: Stranger, alice: Stranger
) -> None:
    text, held = whole(world), f"sure {world.uuid()}"
    with alice.runs(["sleep", "600"]) as victim:
        mallory.does(lambda: claim(world, text, held, pid=victim) and None)
        mallory.does(lambda: claim(world, text, held, pid=os.getppid(), name=1) and None)
        assert reservations(world.host) == []
        assert waits() == 0


def test_a_claim_with_a_second_name_counts_for_nothing(world: World, mallory: Stranger) -> None:
    text, held = whole(world), f"sure {world.uuid()}"

    def link() -> None:
        path = claim(world, text, held)
        os.link(path, path.with_name(f"{PREFIX}{'a' * 16}"))

    with mallory.keeps(link):
        assert reservations(world.host) == []


def test_a_claim_that_changes_while_it_is_read_breaks_nothing(world: World, mallory: Stranger) -> None:
    text, held = f"want {GIB} 0 {world.uuid()}", f"sure {world.uuid()}"

    def change() -> None:
        path = claim(world, text, held)
        whole_text = path.read_text()
        if os.fork():
            return
        end, parent = time.monotonic() + 20, os.getppid()
        try:
            # As long as the one that stays is there.
            while time.monotonic() < end and os.getppid() == parent:
                for part in (whole_text, whole_text[: len(whole_text) // 2], "", whole_text + "fact back\n" * 80):
                    path.write_text(part)
        finally:
            os._exit(0)

    with mallory.keeps(change):
        for _ in range(200):
            found = all_claims(world.host, PREFIX)
            assert found is not None
            assert reservations(world.host, found) is not None
        assert waits() == 0


def test_a_small_job_and_a_large_one_of_one_user_do_not_keep_a_gpu_empty(world: World, mallory: Stranger) -> None:
    small, held, large = f"want {20 * GIB} 0 {world.uuid()}", f"sure {world.uuid()}", whole(world)

    def plant() -> None:
        claim(world, small, held)
        claim(world, large, name=1, ticket=2)

    with mallory.keeps(plant):
        assert waits() == 0


def test_what_others_call_production_pushes_nobody_out(world: World, mallory: Stranger) -> None:
    from gpushare.memory.limit import JobMemory
    from gpushare.run.swapping import ForProduction, Swapping

    text = whole(world)
    here = device(world)
    place = Place(world.host, Request(memory_bytes=20 * GIB, keys=(here.uuid,), client=False, turns=True))
    place.take(here.uuid)
    watch = Swapping(
        world.host,
        here,
        JobMemory(world.host, here),
        place,
        ForProduction(),
        lambda _: None,
        limits=UserLimits(),
        movable=False,
    )
    with mallory.keeps(lambda: claim(world, text, "role production")):
        look = watch._read_sample(0.0)
        assert look.next_in_turn is not None
        assert not look.production_waits
    place.leave()


def test_the_output_of_a_job_is_not_refused_for_a_name_that_another_user_takes_in_the_line(
    world: World, mallory: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_HOST", H200)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = start(["true"], name="train")
    assert job.wait() == 0
    text = whole(world)
    with mallory.keeps(lambda: claim(world, text, "name train")):
        assert [each.name for each in reservations(world.host) or ()] == ["train"]
        assert job.output.exists()
