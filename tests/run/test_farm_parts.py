"""What a farm reckons with: the memory that is free, who fits beside whom, and whose copies are clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.connect import connect
from gpushare.errors import GpushareError, InUse, NotFound
from gpushare.memory.admission import Room
from gpushare.memory.ledger import Line, Request
from gpushare.model import Gpu, MigInstance
from gpushare.mps.limits import Limits
from gpushare.run import farm as module
from gpushare.run.farm import (
    CONTEXT_BYTES,
    Copy,
    FarmOptions,
    FarmReporter,
    check_room,
    farm,
    free_memory,
    share_of_memory,
    share_of_threads,
)
from gpushare.selection import Device, select_one
from gpushare.units import GIB, MIB


def host_with(gpu: Gpu) -> Any:
    """Return a host with this one GPU."""
    return SimpleNamespace(nvml=SimpleNamespace(gpu=lambda index: gpu if index == gpu.index else None))


def gpu_of(total: int | None, used: int | None, reserved: int | None = None, **more: Any) -> Gpu:
    """Return a GPU with so much memory."""
    return Gpu(
        index=2, uuid="GPU-a", memory_total_bytes=total, memory_used_bytes=used, memory_reserved_bytes=reserved, **more
    )


def mig_of(uuid: str, total: int | None, used: int | None) -> MigInstance:
    """Return an instance with so much memory."""
    return MigInstance(uuid=uuid, memory_total_bytes=total, memory_used_bytes=used)


def bytes_free(gpu: Gpu, mig: MigInstance | None = None) -> int | None:
    """Return the free memory of a GPU or instance."""
    free = free_memory(host_with(gpu), Device(gpu=gpu, mig=mig))
    return None if free is None else free.memory_bytes


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the ledger of a host that is not one empty."""
    real = module.reservations
    monkeypatch.setattr(module, "reservations", lambda host: [] if isinstance(host, SimpleNamespace) else real(host))


@pytest.mark.parametrize(
    ("total", "used", "reserved", "free"),
    [
        (80 * GIB, 20 * GIB, GIB, 59 * GIB),
        (80 * GIB, 20 * GIB, None, 60 * GIB),
        # Unknown is not nothing.
        (None, 0, 0, None),
        (80 * GIB, None, 0, None),
    ],
)
def test_free_is_neither_used_nor_reserved(
    total: int | None, used: int | None, reserved: int | None, free: int | None
) -> None:
    gpu = gpu_of(total, used, reserved)
    assert bytes_free(gpu) == free
    if free is None:
        assert share_of_memory(host_with(gpu), Device(gpu=gpu), 2) is None
        options = FarmOptions(copies=2, limits=Limits(memory_limit_bytes=GIB))
        assert check_room(host_with(gpu), Device(gpu=gpu), options) is None


def test_in_an_instance_its_own_memory_counts_and_of_now() -> None:
    before = mig_of("MIG-b", 20 * GIB, 0)
    now = gpu_of(80 * GIB, 0, mig_instances=(mig_of("MIG-a", 40 * GIB, 0), mig_of("MIG-b", 20 * GIB, 5 * GIB)))
    assert bytes_free(now, before) == 15 * GIB
    for unknown in ((None, 0), (20 * GIB, None)):
        gpu = gpu_of(80 * GIB, 0, mig_instances=(mig_of("MIG-b", *unknown),))
        assert bytes_free(gpu, before) is None
    assert bytes_free(gpu_of(80 * GIB, 0), before) is None


def test_a_share_of_the_memory_leaves_room_for_contexts_and_a_margin() -> None:
    gpu = gpu_of(100 * GIB, 0)
    share = share_of_memory(host_with(gpu), Device(gpu=gpu), 4)
    # Whole MiB of 98 % by four, less a context.
    assert share == int(100 * GIB * 0.98 / 4 - CONTEXT_BYTES) // MIB * MIB
    assert share % MIB == 0
    full = gpu_of(100 * GIB, 100 * GIB - 2 * CONTEXT_BYTES)
    with pytest.raises(InUse, match="2 copies") as caught:
        share_of_memory(host_with(full), Device(gpu=full), 2)
    assert caught.value.code == "memory_does_not_fit"


def test_as_many_fit_as_their_limits_and_contexts_leave_room_for() -> None:
    one = GIB + CONTEXT_BYTES
    for free, fitting in ((one, 1), (2 * one - 1, 1), (2 * one, 2), (9 * one, 3)):
        gpu = gpu_of(80 * GIB, 80 * GIB - free)
        options = FarmOptions(copies=3, limits=Limits(memory_limit_bytes=GIB))
        assert check_room(host_with(gpu), Device(gpu=gpu), options) == fitting
    gpu = gpu_of(80 * GIB, 80 * GIB - one + 1)
    with pytest.raises(InUse, match=r"limit of 1.* GiB"):
        check_room(host_with(gpu), Device(gpu=gpu), FarmOptions(copies=3, limits=Limits(memory_limit_bytes=GIB)))
    assert check_room(host_with(gpu), Device(gpu=gpu), FarmOptions(copies=3)) is None


def test_a_share_of_the_threads_is_never_nothing() -> None:
    assert share_of_threads(10_000) == 0.1


# -- one step of a farm ----------------------------------------------------------------------------


@dataclass
class Running:
    """Stands in for a program."""

    pid: int
    holds: int | None = 0
    runs: bool = True
    failure: str | None = None
    status: int | None = None
    started: float = 0.0
    ended: float | None = None
    heard: float = 100.0
    no_space: bool = False


class Quiet(FarmReporter):
    """Says nothing."""


@dataclass
class Several:
    """Stands in for the programs in a share."""

    started: list[Running] = field(default_factory=list)
    killed: list[Running] = field(default_factory=list)

    def start(self, title: str, *_: Any, **__: Any) -> Running:
        self.started.append(Running(pid=100 + int(title.split()[1])))
        return self.started[-1]

    def look(self) -> None:
        """Nothing ever happens by itself."""

    def kill(self, program: Running) -> None:
        self.killed.append(program)

    def left_behind(self, programs: Sequence[Running]) -> dict[int, tuple[int, ...]]:
        """They start nobody."""
        return {}

    def attached(self, program: Running, clients: set[int]) -> bool:
        """Return whether it, or what it started, is a client."""
        return bool(clients & {program.pid, program.pid + 1000})


@dataclass
class Place:
    """Stands in for a place in the ledger."""

    request: Request
    left: bool = False

    @property
    def claim(self) -> Any:
        return SimpleNamespace(path=Path(f"place-{id(self)}"))

    def take(self, key: str) -> None:
        """It is taken."""

    def add(self, pid: int) -> None:
        """Its program holds it too."""

    def tell_limit(self, limit_bytes: int, above: str) -> None:
        """Others can read it."""

    def leave(self) -> None:
        self.left = True


class Step:
    """A farm whose clock, memory and daemon say what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: FarmOptions) -> None:
        self.at, self.free = 0.0, 80 * GIB
        self.clients: set[int] | None = set()
        self.asked = 0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.at))
        self.allowed: int | None = None
        self.pending = False
        monkeypatch.setattr(module, "free_memory", lambda *_: self._free())
        self.places: list[Place] = []
        monkeypatch.setattr(module, "Place", self._place)
        monkeypatch.setattr(module, "peak_memory", lambda _host, _device, program: program.holds)
        host: Any = SimpleNamespace(
            programs=None,
            processes=SimpleNamespace(
                namespace_is_host=lambda: True, descendants=lambda _: [], started_with=lambda *_: []
            ),
            nvml=SimpleNamespace(processes=lambda _: ()),
        )
        self.several: Any = Several()
        self.several.clients = self._clients
        gpu = gpu_of(80 * GIB, 0)
        self.farm = module._Farm(
            host,
            Device(gpu=gpu),
            ["job"],
            options,
            Quiet(),
            self.several,
            None,
        )

    def _free(self) -> module.Free:
        line = Line(device=self.farm._device, room=Room(memory_bytes=80 * GIB), running=(), holders=(), others_bytes=0)
        return module.Free(memory_bytes=self.free, line=line, allowed_bytes=self.allowed, pending=self.pending)

    def _place(self, _host: Any, request: Request) -> Place:
        self.places.append(Place(request))
        return self.places[-1]

    @property
    def reserved(self) -> list[int | None]:
        return [one.request.memory_bytes for one in self.places if not one.left]

    def _clients(self) -> set[int] | None:
        self.asked += 1
        return self.clients

    @property
    def states(self) -> list[str]:
        return [copy.state for copy in self.farm._copies]

    @property
    def attached(self) -> list[bool | None]:
        return [copy.attached for copy in self.farm._copies]


def test_no_more_run_at_once_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=3, at_once=2))
    step.farm._start_what_fits()
    assert step.states == ["running", "running", "waiting"]
    step.several.started[0].runs = False
    step.farm._collect()
    step.farm._start_what_fits()
    assert step.states == ["done", "running", "running"]


def test_what_a_copy_may_still_allocate_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = GIB + CONTEXT_BYTES
    step = Step(monkeypatch, FarmOptions(copies=2, limits=Limits(memory_limit_bytes=GIB)))
    step.free = 2 * one - 1
    step.farm._start_what_fits()
    assert step.states == ["running", "waiting"]
    # The first one has taken all that it may: what is free now is the second one's.
    step.several.started[0].holds, step.free = one, one
    step.farm._start_what_fits()
    assert step.states == ["running", "running"]


def test_a_copy_that_holds_more_than_its_limit_gives_nothing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    one = GIB + CONTEXT_BYTES
    step = Step(monkeypatch, FarmOptions(copies=2, limits=Limits(memory_limit_bytes=GIB)))
    step.farm._start_what_fits = lambda: None  # type: ignore[method-assign]
    step.farm._start(step.farm._copies[0])
    step.several.started[0].holds, step.free = 2 * one, one - 1
    assert not step.farm._fits()
    # Unknown is taken for nothing held: all of its limit is kept.
    step.several.started[0].holds, step.free = None, 2 * one - 1
    assert not step.farm._fits()
    step.free = 2 * one
    assert step.farm._fits()


def test_when_nothing_runs_and_nothing_fits_any_more_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2, limits=Limits(memory_limit_bytes=GIB)))
    step.free, step.at = GIB, 100.0
    step.farm._start_what_fits()
    step.at += module._ROOM_SECONDS - 0.1
    step.farm._start_what_fits()
    # What has ended may still give its memory back.
    assert step.states == ["waiting", "waiting"]
    step.at += 0.2
    step.farm._start_what_fits()
    assert step.states == ["failed", "failed"]
    assert "not fit into" in (step.farm._copies[1].failure or "")
    assert step.farm._copies[1].hint


def test_room_that_comes_back_in_time_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2, limits=Limits(memory_limit_bytes=GIB)))
    step.free, step.at = GIB, 100.0
    step.farm._start_what_fits()
    step.free = GIB + CONTEXT_BYTES
    step.at += 5.0
    step.farm._start_what_fits()
    assert step.states == ["running", "waiting"]
    assert step.farm._full_since is None


def test_a_copy_that_cannot_be_started_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=3, restarts=2))
    started = step.several.start

    def start(title: str, *words: Any, **more: Any) -> Running:
        if title == "copy 1":
            raise NotFound("there is no program './run-1.sh'", "check the spelling")
        return started(title, *words, **more)

    monkeypatch.setattr(step.several, "start", start)
    step.farm._start_what_fits()
    assert step.states == ["running", "failed", "running"]
    assert (step.farm._copies[1].failure, step.farm._copies[1].hint) == (
        "there is no program './run-1.sh'",
        "check the spelling",
    )


def test_silence_counts_from_the_last_line_and_only_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=1, stall_seconds=10.0))
    step.at = 100.0
    step.farm._start_what_fits()
    step.at = 110.0
    step.farm._collect()
    assert step.states == ["running"]
    step.several.started[0].heard = 105.0
    step.at = 115.0
    step.farm._collect()
    assert step.states == ["running"]
    step.at = 115.5
    step.farm._collect()
    assert step.states == ["failed"]
    assert step.several.killed == step.several.started
    assert step.farm._copies[0].failure == "printed nothing for 10 s, and was ended"
    assert step.farm._copies[0].seconds == 115.5


def test_without_a_limit_of_silence_a_copy_may_be_quiet_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=1))
    step.farm._start_what_fits()
    step.at = 1e9
    step.farm._collect()
    assert step.states == ["running"]


def test_a_copy_is_a_client_when_the_daemon_has_one_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2))
    step.farm._start_what_fits()
    step.farm._prove()
    # It is too early for a look.
    assert (step.asked, step.attached) == (0, [None, None])
    step.at, step.clients = 0.6, None
    step.farm._prove()
    # A daemon that cannot be asked says nothing.
    assert (step.asked, step.attached) == (1, [None, None])
    step.farm._prove()
    assert step.asked == 1
    step.at, step.clients = 1.1, {1101}
    step.farm._prove()
    assert step.attached == [False, True]
    # Once seen is seen; the other one may still come.
    step.at, step.clients = 2.1, {100}
    step.farm._prove()
    assert step.attached == [True, True]
    for at in (5.1, 10.1, 30.1, 1e6):
        step.at = at
        step.farm._prove()
    assert step.asked == 6


# -- the whole of it -------------------------------------------------------------------------------


def test_copies_are_looked_for_among_the_clients_while_they_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "seen"
    monkeypatch.setattr(module, "_LOOKS", (0.0,) * 100_000)

    class Waits(FarmReporter):
        def progress(self, copies: Sequence[Copy], seconds: float) -> None:
            assert seconds >= 0
            if all(copy.attached for copy in copies):
                mark.touch()

    host = connect("sim:h200")
    device = select_one(None, host.nvml.sweep())
    command = ["sh", "-c", f"while ! [ -e {mark} ]; do sleep 0.02; done"]
    # They print nothing: were they never seen, they would count as hung, and have failed.
    result = farm(host, device, command, FarmOptions(copies=2, stall_seconds=600.0), Waits())
    assert [copy.attached for copy in result.copies] == [True, True]
    assert not result.failed
    assert result.seconds >= max(copy.seconds for copy in result.copies) > 0


def test_what_can_never_fit_is_refused_before_there_is_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_mps_share", lambda *_: pytest.fail("something was started"))
    host = connect("sim:h200")
    device = select_one(None, host.nvml.sweep())
    for options, code in (
        (FarmOptions(copies=2, limits=Limits(memory_limit_bytes=1000 * GIB)), "memory_does_not_fit"),
        (FarmOptions(copies=0), "bad_copies"),
        (FarmOptions(copies=-1), "bad_copies"),
    ):
        with pytest.raises(GpushareError) as caught:
            farm(host, device, ["true"], options, Quiet())
        assert caught.value.code == code


class Heard(FarmReporter):
    """Keeps how each copy ended."""

    def __init__(self) -> None:
        self.endings: list[tuple[int, str, bool]] = []

    def ended(self, copy: Copy, *, again: bool) -> None:
        self.endings.append((copy.number, copy.state, again))


def test_a_copy_that_cannot_be_started_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2, restarts=2))
    heard = step.farm._reporter = Heard()

    def start(title: str, *_: Any, **__: Any) -> Running:
        raise NotFound(f"there is no program for {title}", "check the spelling")

    monkeypatch.setattr(step.several, "start", start)
    step.farm._start_what_fits()
    assert [ending[1:] for ending in heard.endings] == [("failed", False), ("failed", False)]


def test_an_interrupt_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never begun is told apart from what waited to be started again, and from what had ended."""
    step = Step(monkeypatch, FarmOptions(copies=4, at_once=2, restarts=1))
    step.several.end = lambda *_, **__: None  # type: ignore[attr-defined]
    step.farm._start_what_fits()
    step.several.started[0].runs, step.several.started[0].failure = False, "exit code 1"
    step.farm._collect()
    assert step.states == ["waiting", "running", "waiting", "waiting"]
    step.farm._copies[3].state = "done"
    step.farm._signals.first = 15
    step.farm._interrupt()
    assert step.states == ["failed", "ended", "never started", "done"]


# -- what copies reserve -----------------------------------------------------------------------------


def test_a_copy_reserves_its_limit_from_its_start_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=3, limits=Limits(memory_limit_bytes=GIB), at_once=2))
    step.farm._start_what_fits()
    assert step.reserved == [GIB, GIB]
    step.several.started[0].runs = False
    step.farm._collect()
    assert step.reserved == [GIB]
    step.farm._start_what_fits()
    assert step.reserved == [GIB, GIB]
    step.farm.close()
    assert step.reserved == []


def test_copies_of_no_known_size_reserve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=3))
    step.farm._start_what_fits()
    assert step.states == ["running"] * 3
    assert step.places == []


def test_a_copy_steps_back_for_who_reserved_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written that it reserves it, and reads again before it starts."""
    one = GIB + CONTEXT_BYTES
    step = Step(monkeypatch, FarmOptions(copies=1, limits=Limits(memory_limit_bytes=GIB)))
    take = Place.take

    def taken(place: Place, key: str) -> None:
        take(place, key)
        step.free = one - 1

    monkeypatch.setattr(Place, "take", taken)
    step.free = one
    step.farm._start_what_fits()
    assert step.states == ["waiting"]
    assert step.reserved == []
    monkeypatch.setattr(Place, "take", take)
    step.free = one
    step.farm._start_what_fits()
    assert step.states == ["running"]


def test_copies_do_not_give_up_while_what_is_reserved_may_lapse(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=1, limits=Limits(memory_limit_bytes=GIB)))
    step.free, step.pending = 0, True
    for _ in range(3):
        step.at += module._ROOM_SECONDS
        step.farm._start_what_fits()
    assert step.states == ["waiting"]
    # It is used now, and stays.
    step.pending = False
    step.farm._start_what_fits()
    step.at += module._ROOM_SECONDS
    step.farm._start_what_fits()
    assert step.states == ["failed"]


def test_copies_beyond_what_their_user_may_reserve_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=3, limits=Limits(memory_limit_bytes=GIB)))
    step.allowed = 2 * GIB
    step.farm._start_what_fits()
    assert step.states == ["running", "running", "waiting"]
    step.several.started[0].runs = False
    step.farm._collect()
    step.allowed = GIB - 1
    step.farm._start_what_fits()
    assert step.states == ["done", "running", "waiting"]


def test_a_copy_that_cannot_be_started_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=1, limits=Limits(memory_limit_bytes=GIB)))

    def start(title: str, *_: Any, **__: Any) -> Running:
        raise NotFound("there is no such program", "check the spelling")

    monkeypatch.setattr(step.several, "start", start)
    step.farm._start_what_fits()
    assert step.states == ["failed"]
    assert step.reserved == []


def test_the_memory_of_the_whole_job_needs_no_room_for_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2, job_bytes=GIB))
    step.free = 2 * GIB
    step.farm._start_what_fits()
    assert step.states == ["running", "running"]


def test_a_copy_over_its_limit_that_cannot_be_ended_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2, job_bytes=GIB))
    said: list[tuple[int, str]] = []
    step.farm._reporter.news = lambda copy, text: said.append((copy.number, text))  # type: ignore[method-assign]
    step.several.end = lambda *_, **__: (_ for _ in ()).throw(  # type: ignore[attr-defined]
        InUse("process 100 hangs in the driver", "reboot")
    )
    step.farm._start_what_fits()
    memory = step.farm._memories[0]
    memory.over = "the job holds 2.0 GiB, over its limit of 1.0 GiB (process 100)"
    monkeypatch.setattr(memory, "release", dict)
    for _ in range(2):
        step.farm._watch_memory()
        step.farm._collect()
    assert said == [(0, "it cannot be ended: process 100 hangs in the driver; reboot")]
    assert step.states == ["running", "running"]
    # In the end it did end, by itself.
    step.several.started[0].runs, step.several.started[0].status = False, 0
    step.farm._collect()
    copy = step.farm._copies[0]
    assert (copy.state, copy.reason) == ("failed", "memory_limit")
    assert copy.failure == f"{memory.over}: ended"


def test_while_copies_end_the_others_are_held_to_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, FarmOptions(copies=2, job_bytes=GIB))
    step.farm._start_what_fits()
    first, second = step.farm._memories.values()
    first.over = "too much"
    ended: list[list[int]] = []

    def end(programs: list[Running], *, hurry: Any, strays: list[int]) -> None:
        second.over = "too much"
        assert strays == []
        hurry()
        ended.append([one.pid for one in programs])
        for one in programs:
            one.runs = False

    step.several.end = end  # type: ignore[attr-defined]
    monkeypatch.setattr(step.farm._signals, "came", lambda: False)
    for _ in range(3):
        step.farm._watch_memory()
        step.farm._collect()
    assert ended == [[100], [101]]
    assert [copy.reason for copy in step.farm._copies] == ["memory_limit"] * 2
