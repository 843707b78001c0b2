"""One step of a farm after another: what starts, what ends, and whose copies are clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import InUse, NotFound
from gpushare.base.model import Gpu
from gpushare.base.selection import Device, select_one
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.memory.ledger import Request
from gpushare.memory.limit import MemoryBudget
from gpushare.run import farm as module
from gpushare.run.farm import Copy, FarmOptions
from tests.run.farm_command import Heard, Silent, farm, sized

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


@dataclass
class Programs:
    """Stands in for the programs in a share."""

    started: list[Running] = field(default_factory=list)
    killed: list[Running] = field(default_factory=list)

    def launch(self, title: str, *_: Any, **__: Any) -> Running:
        self.started.append(Running(pid=100 + int(title.split()[1])))
        return self.started[-1]

    def read_outputs(self) -> None:
        """Nothing ever happens by itself."""

    def kill(self, program: Running) -> None:
        self.killed.append(program)

    def left_behind(self, programs: Sequence[Running]) -> dict[int, tuple[int, ...]]:
        """They start nobody."""
        return {}


@dataclass
class Place:
    """Stands in for a place in the ledger."""

    request: Request
    free: bool = False

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
        self.free = True


class Step:
    """A farm whose clock, memory and daemon say what a test wants. ``room``: how many copies have room at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.at, self.room = 0.0, 100
        self.clients: set[int] | None = set()
        self.asked = 0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.at, sleep=lambda _: None))
        monkeypatch.setattr(module, "client_limit", lambda *_: None)
        monkeypatch.setattr(module._CopiesOnGpu, "environment", lambda *_: {})
        monkeypatch.setattr(module._CopiesOnGpu, "was_client", lambda *_: None)
        self.places: list[Place] = []
        host: Any = SimpleNamespace(
            programs=None,
            processes=SimpleNamespace(
                namespace_is_host=lambda: True, descendants=lambda pid: [pid, pid + 1000], pids_with_env=lambda *_: []
            ),
            nvml=SimpleNamespace(processes=lambda _: ()),
        )
        self.several: Any = Programs()
        self.several.clients = self._clients
        device = Device(gpu=Gpu(index=2, uuid="GPU-a", memory_total_bytes=80 * GIB))
        self.farm = module.Farm(host, [device], ["job"], FarmOptions(**options), Silent())
        self.gpu = self.farm._copies_on("GPU-a")
        self.gpu.group = self.several
        self.farm._size, self.farm._size_from = GIB, "given"
        monkeypatch.setattr(self.farm, "_gpu_for_next", self._turn)
        monkeypatch.setattr(self.farm, "_set_caps", lambda: None)
        monkeypatch.setattr(self.farm._signals, "ending_came", lambda *_: False)

    def start(self) -> None:
        """Look for room again."""
        self.farm._next_look = 0.0
        self.farm._running_then = -1
        self.farm._start_copies()

    def _turn(self, *, alone: bool) -> Any:
        assert not alone
        if len(self.farm._running) >= self.room:
            return None
        self.places.append(Place(Request(memory_bytes=GIB, keys=("GPU-a",), client=True)))
        return self.gpu, self.places[-1]

    @property
    def reserved(self) -> list[int | None]:
        return [place.request.memory_bytes for place in self.places if not place.free]

    def _clients(self) -> set[int] | None:
        self.asked += 1
        return self.clients

    @property
    def states(self) -> list[str]:
        return [copy.state for copy in self.farm._copies]

    @property
    def attached(self) -> list[bool | None]:
        return [copy.attached for copy in self.farm._copies]


def test_a_copy_that_cannot_be_started_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=3, restarts=2)
    started = step.several.launch

    def start(title: str, *words: Any, **more: Any) -> Running:
        if title == "copy 1":
            raise NotFound("there is no program './run-1.sh'", "check the spelling")
        return started(title, *words, **more)

    monkeypatch.setattr(step.several, "launch", start)
    heard = step.farm._reporter = Heard()
    step.start()
    assert step.states == ["running", "failed", "running"]
    assert (heard.endings, step.reserved) == ([(1, "failed", False)], [GIB, GIB])
    assert (step.farm._copies[1].failure, step.farm._copies[1].hint) == (
        "there is no program './run-1.sh'",
        "check the spelling",
    )


def test_a_copy_whose_memory_cannot_be_watched_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotFound("there is no memory", "check the GPU")

    step = Step(monkeypatch, copies=1)
    monkeypatch.setattr(module, "JobMemory", refuse)
    step.start()
    assert (step.states, step.reserved) == (["failed"], [])


def test_silence_counts_from_the_last_line_and_only_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=1, stall_seconds=10.0)
    step.at = 100.0
    step.start()
    step.at = 110.0
    step.farm._collect_ended()
    assert step.states == ["running"]
    step.several.started[0].heard = 105.0
    step.at = 115.0
    step.farm._collect_ended()
    assert step.states == ["running"]
    step.at = 115.5
    step.farm._collect_ended()
    assert step.states == ["failed"]
    assert step.several.killed == step.several.started
    assert step.farm._copies[0].failure == "printed nothing for 10 s: ended by gpushare"
    assert step.farm._copies[0].seconds == 115.5


def test_without_a_limit_of_silence_a_copy_may_be_quiet_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=1)
    step.start()
    step.at = 1e9
    step.farm._collect_ended()
    assert step.states == ["running"]


def test_a_copy_is_a_client_when_the_daemon_has_one_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=2)
    step.start()
    step.gpu.note_clients(step.farm._running.values())
    # It is too early for a look.
    assert (step.asked, step.attached) == (0, [None, None])
    step.at, step.clients = 0.6, None
    step.gpu.note_clients(step.farm._running.values())
    # A daemon that cannot be asked says nothing.
    assert (step.asked, step.attached) == (1, [None, None])
    step.gpu.note_clients(step.farm._running.values())
    assert step.asked == 1
    step.at, step.clients = 1.1, {1101}
    step.gpu.note_clients(step.farm._running.values())
    assert step.attached == [False, True]
    # Once seen is seen; the other one may still come.
    step.at, step.clients = 2.1, {100}
    step.gpu.note_clients(step.farm._running.values())
    assert step.attached == [True, True]
    for at in (5.1, 10.1, 30.1, 1e6):
        step.at = at
        step.gpu.note_clients(step.farm._running.values())
    assert step.asked == 6


# -- the whole of it -------------------------------------------------------------------------------


def test_copies_are_looked_for_among_the_clients_while_they_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "seen"
    monkeypatch.setattr(module, "_CLIENT_CHECKS", (0.0,) * 100_000)

    class Waits(Silent):
        def progress(self, copies: Sequence[Copy], seconds: float) -> None:
            assert seconds >= 0
            if all(copy.attached for copy in copies):
                mark.touch()

    host = connect("sim:h200")
    device = select_one(None, host.nvml.sweep())
    command = ["sh", "-c", f"while ! [ -e {mark} ]; do sleep 0.02; done"]
    # They print nothing: were they never seen, they would count as hung, and have failed.
    result = farm(host, [device], command, sized(device, copies=2, stall_seconds=600.0), Waits())
    assert [copy.attached for copy in result.copies] == [True, True]
    assert not result.failed
    assert result.seconds >= max(copy.seconds for copy in result.copies) > 0


def test_an_interrupt_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never begun is told apart from what waited to be started again, and from what had ended."""
    step = Step(monkeypatch, copies=4, parallel=2, restarts=1)
    step.several.end = lambda *_, **__: None
    step.start()
    step.several.started[0].runs, step.several.started[0].failure = False, "exit code 1"
    step.farm._collect_ended()
    assert step.states == ["waiting", "running", "waiting", "waiting"]
    step.farm._copies[3].state = "done"
    step.farm._signals.first = 15
    step.farm._interrupt()
    assert step.states == ["failed", "ended", "skipped", "done"]


def test_a_copy_that_ends_just_before_the_signal_reaches_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """While gpushare collects those that have ended, which may take a second, a further one may end by itself."""
    step = Step(monkeypatch, copies=2)
    step.start()
    ending: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            step.several.started[0].runs, step.several.started[0].status = False, 0

    looks: list[int] = []
    step.several.read_outputs = look
    step.several.end = lambda programs, **_: ending.extend(program.pid for program in programs)
    step.farm._signals.first = 2
    step.farm._interrupt()
    assert (step.states, ending) == (["done", "ended"], [101])


# -- what copies reserve -----------------------------------------------------------------------------


def test_a_copy_reserves_its_memory_from_its_start_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=3)
    step.room = 2
    step.start()
    assert (step.states, step.reserved) == (["running", "running", "waiting"], [GIB, GIB])
    step.several.started[0].runs = False
    step.farm._collect_ended()
    assert step.reserved == [GIB]
    step.start()
    assert (step.states, step.reserved) == (["done", "running", "running"], [GIB, GIB])


def test_the_first_that_fails_ends_a_farm_that_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=4, parallel=2, restarts=1, fail_fast=True)
    step.several.end = lambda *_, **__: None
    step.start()
    for _ in range(2):
        program: Any = step.farm._running[0].program
        program.runs, program.failure = False, "exit code 1"
        step.farm._collect_ended()
        step.start()
    assert step.farm._next_step() == "end"
    step.farm._interrupt()
    assert step.states == ["failed", "ended", "skipped", "skipped"]


def test_a_gpu_whose_daemon_does_not_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=1)
    messages: list[str] = []
    step.farm._reporter.say = messages.append  # type: ignore[method-assign]
    step.farm._devices["GPU-b"] = Device(gpu=Gpu(index=3, uuid="GPU-b", memory_total_bytes=80 * GIB))
    other = step.farm._copies_on("GPU-b")

    def refuse(*_: Any) -> Any:
        raise InUse("GPU 3 is busy", "wait")

    monkeypatch.setattr(other, "open", refuse)
    assert not step.farm._open_share(other, None)
    assert list(step.farm._devices) == ["GPU-a"]
    assert messages == ["GPU 3 is left out: GPU 3 is busy"]
    monkeypatch.setattr(step.gpu, "open", refuse)
    with pytest.raises(InUse):
        step.farm._open_share(step.gpu, None)


def test_a_copy_over_its_limit_that_cannot_be_ended_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=2, budget=MemoryBudget(bytes=GIB))
    messages: list[tuple[int, str]] = []
    step.farm._reporter.news = lambda copy, text: messages.append((copy.copy, text))  # type: ignore[method-assign]
    step.several.end = lambda *_, **__: (_ for _ in ()).throw(InUse("process 100 hangs in the driver", "reboot"))
    step.start()
    (memory,) = step.farm._running[0].memories
    memory.over = "the job holds 2.0 GiB, over its limit of 1.0 GiB (process 100)"
    monkeypatch.setattr(memory, "release", dict)
    for _ in range(2):
        step.farm._watch_memory()
        step.farm._collect_ended()
    assert messages == [(0, "it cannot be ended: process 100 hangs in the driver; reboot")]
    assert step.states == ["running", "running"]
    # In the end it did end, by itself.
    step.several.started[0].runs, step.several.started[0].status = False, 0
    step.farm._collect_ended()
    copy = step.farm._copies[0]
    assert (copy.state, copy.reason) == ("failed", "memory_limit")
    assert copy.failure == f"{memory.over}: ended"


def test_while_copies_end_the_others_are_held_to_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, copies=2, budget=MemoryBudget(bytes=GIB))
    step.start()
    (first,), (second,) = (running.memories for running in step.farm._running.values())
    first.over = "too much"
    ended: list[list[int]] = []

    def end(programs: list[Running], *, hurry: Any, strays: list[int]) -> None:
        second.over = "too much"
        assert strays == []
        hurry()
        ended.append([process.pid for process in programs])
        for process in programs:
            process.runs = False

    step.several.end = end
    monkeypatch.setattr(step.farm._signals, "ending_came", lambda: False)
    for _ in range(3):
        step.farm._watch_memory()
        step.farm._collect_ended()
    assert ended == [[100], [101]]
    assert [copy.reason for copy in step.farm._copies] == ["memory_limit"] * 2
