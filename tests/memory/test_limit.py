"""The limit of a job: the sum over its processes, and what happens above it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpushare.base.errors import GpushareError, OperationFailed
from gpushare.base.model import Gpu, GpuProcess, MigInstance
from gpushare.base.selection import Device
from gpushare.base.units import GIB, MIB
from gpushare.host.identity import Identity
from gpushare.host.process import Processes, ProcessInfo
from gpushare.memory.limit import _TOUCH_SECONDS, MARK, JobMemory, MemoryAction
from tests.clock import Clock
from tests.errors import fails


class Told:
    """A process table and NVML that say what they are told."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {10: 1, 11: 10, 12: 11, 99: 1}
        self.memory: dict[int, int | None] = {}
        self.sent: list[tuple[int, int]] = []
        self.stopped: set[int] = set()
        self.environments: dict[int, dict[str, str]] = {}
        self.error: GpushareError | None = None

    def processes(self, _index: int) -> tuple[GpuProcess, ...]:
        if self.error is not None:
            raise self.error
        return tuple(GpuProcess(pid=pid, compute=True, memory_used_bytes=size) for pid, size in self.memory.items())

    def namespace_is_host(self) -> bool:
        return True

    def pids_with_env(self, name: str, value: str) -> list[int]:
        return [pid for pid, each in self.environments.items() if each.get(name) == value and pid in self.parents]

    def environment(self, pid: int) -> dict[str, str] | None:
        return self.environments.get(pid)

    def parent(self, pid: int) -> int | None:
        return self.parents.get(pid)

    def ancestry(self, pid: int) -> Any:
        return Processes.ancestry(self, pid)  # type: ignore[arg-type]

    def alive(self, pid: int, _started: int | None = None) -> bool:
        return pid in self.parents

    def identity(self, pid: int) -> Identity | None:
        return Identity(pid, pid) if pid in self.parents else None

    def describe(self, pid: int) -> ProcessInfo | None:
        if pid not in self.parents:
            return None
        return ProcessInfo(pid=pid, started=pid, stopped=pid in self.stopped)

    def descendants(self, pid: int) -> list[int]:
        return [pid, *(child for child, parent in self.parents.items() if parent == pid)]

    def send_to(self, pid: int, _started: float, number: int) -> None:
        self.sent.append((pid, number))
        if number == signal.SIGSTOP:
            self.stopped.add(pid)
        elif number == signal.SIGCONT:
            self.stopped.discard(pid)


@pytest.fixture
def told() -> Told:
    return Told()


def job(
    told: Told, action: MemoryAction = "end", limit: int | None = 8 * GIB, clock: Callable[[], float] = time.monotonic
) -> tuple[JobMemory, list[str]]:
    messages: list[str] = []
    host = cast("Any", SimpleNamespace(nvml=told, processes=told))
    device = Device(gpu=Gpu(index=0, uuid="GPU-1"))
    memory = JobMemory(host, device, limit_bytes=limit, action=action, say=messages.append, clock=clock)
    memory.begin(10)
    return memory, messages


def test_the_limit_is_told_at_the_new_place_of_a_job(told: Told) -> None:
    memory, _ = job(told)
    heard: list[Any] = []
    place = SimpleNamespace(tell_limit=lambda *words: heard.append(words), add=heard.append)
    memory.reserve(cast("Any", place))
    assert heard == [(8 * GIB, "end"), 10]


@pytest.mark.parametrize(
    ("within", "more", "text"),
    [
        # Process 99 is not of the job.
        ({10: 3, 12: 5, 99: 60}, {11: 1}, "9.0 GiB, over its limit of 8.0 GiB (3 processes; process 12 has 5.0 GiB)"),
        ({10: 8}, {10: 9}, "over its limit of 8.0 GiB (process 10)"),
    ],
)
def test_the_sum_over_all_processes_counts(told: Told, within: dict[int, int], more: dict[int, int], text: str) -> None:
    memory, _ = job(told)
    told.memory = {pid: size * GIB for pid, size in within.items()}
    assert not memory.poll()
    assert memory.peak_bytes == 8 * GIB
    told.memory |= {pid: size * GIB for pid, size in more.items()}
    assert memory.poll()
    with fails(OperationFailed, "memory_limit", message=text):
        memory.raise_end()


def test_a_process_that_was_seen_counts_after_it_left_the_tree(told: Told) -> None:
    memory, _ = job(told)
    told.memory = {12: 5 * GIB}
    assert not memory.poll()
    told.parents[12] = 1
    told.memory[10] = 4 * GIB
    assert memory.poll()


def test_unknown_memory_is_not_a_number(told: Told) -> None:
    memory, messages = job(told)
    told.memory = {10: None, 11: GIB}
    assert not memory.poll()
    assert not memory.poll()
    # A peak without it would be reserved the next time.
    assert memory.peak_bytes is None
    assert messages == [
        "its limit of 8.0 GiB cannot be checked: the driver does not tell how much memory process 10 has on GPU 0"
    ]
    told.memory[11] = 9 * GIB
    assert memory.poll()


@pytest.mark.parametrize(
    ("of", "name", "answer", "reason"),
    [
        ("memory", "_listed", None, "the driver does not list the processes of GPU 0"),
        ("host", "namespace_is_host", False, "this PID namespace is not the host's"),
    ],
)
def test_a_limit_that_cannot_be_checked_is_told_once(
    told: Told, monkeypatch: pytest.MonkeyPatch, of: str, name: str, answer: bool | None, reason: str
) -> None:
    memory, messages = job(told)
    monkeypatch.setattr(memory if of == "memory" else told, name, lambda: answer)
    assert not memory.poll()
    assert not memory.poll()
    assert messages == [f"its limit of 8.0 GiB cannot be checked: {reason}"]


def test_without_a_limit_only_the_peak_is_kept(told: Told) -> None:
    memory, messages = job(told, limit=None)
    told.memory = {10: 90 * GIB}
    assert not memory.poll()
    assert memory.peak_bytes == 90 * GIB
    told.memory = {10: None}
    assert not memory.poll()
    assert messages == []


def test_in_an_instance_only_what_is_there_counts(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = job(told)
    memory._device = Device(gpu=Gpu(index=0, uuid="GPU-1"), mig=MigInstance(uuid="MIG-1", gpu_instance_id=3))

    def listed() -> tuple[GpuProcess, ...]:
        # The driver lists the processes of all instances on the GPU; some drivers do not say where one is.
        places = {10: 3, 11: None, 12: 4, 99: 3}
        return tuple(
            GpuProcess(pid=pid, compute=True, gpu_instance_id=place, memory_used_bytes=GIB)
            for pid, place in places.items()
        )

    monkeypatch.setattr(memory, "_listed", listed)
    memory.poll()
    assert memory.peak_bytes == 2 * GIB


@pytest.mark.parametrize("over", [True, False])
def test_a_process_that_left_the_tree_before_it_was_seen_is_known_by_its_environment(told: Told, over: bool) -> None:
    memory, _ = job(told)
    told.parents[13] = 1
    told.environments = {13: dict(memory.variables), 99: {MARK: "of another job"}}
    told.memory = {10: (5 if over else 4) * GIB, 13: 4 * GIB, 99: 60 * GIB}
    assert memory.poll() is over
    # It would go on above the limit; of a job that its user ends a daemon stays.
    assert memory.release() == ({13: 13.0} if over else {})


def test_a_limit_that_cannot_be_enforced_is_said(told: Told) -> None:
    clock = Clock(100.0)
    memory, messages = job(told, clock=clock)
    told.memory = {10: GIB}
    memory.poll()
    told.error = OperationFailed("GPU 0 does not answer", "see: dmesg")
    memory.poll()
    assert messages == []
    clock.now += 3
    memory.poll()
    memory.poll()
    assert messages == ["its limit of 8.0 GiB cannot be checked: GPU 0 does not answer"]


def test_a_job_above_its_limit_is_stopped_until_it_is_within_it_or_ends(told: Told) -> None:
    memory, messages = job(told, "pause")
    told.memory = {10: 5 * GIB, 12: 4 * GIB}
    assert not memory.poll()
    assert {number for _, number in told.sent} == {signal.SIGSTOP}
    assert 10 in told.stopped
    # Somebody continues it.
    for _ in range(2):
        told.stopped.clear()
        memory.poll()
        assert 10 in told.stopped
    (message,) = messages
    assert "cannot grow" in message
    # One of its processes was killed.
    del told.memory[12]
    memory.poll()
    assert told.stopped == set()
    assert "within its limit again" in messages[1]
    told.memory = {10: 9 * GIB}
    memory.poll()
    assert 10 in told.stopped
    memory.release()
    assert told.stopped == set()


def test_a_job_that_grows_while_it_ends_has_no_more_time(told: Told) -> None:
    memory, _ = job(told)
    told.memory = {10: 7 * GIB}
    memory.poll()
    assert not memory.grows()
    told.memory = {10: 9 * GIB}
    assert memory.poll()
    told.memory = {10: 9 * GIB + 100 * MIB}
    assert not memory.grows()
    told.memory = {10: 10 * GIB}
    assert memory.grows()


def test_a_reservation_is_touched_now_and_then_while_it_is_used(told: Told) -> None:
    clock, touched = Clock(100.0), list[float]()
    memory, _ = job(told, limit=None, clock=clock)
    place = SimpleNamespace(request=SimpleNamespace(memory_bytes=GIB), touch=lambda: touched.append(clock.now))
    memory.place = cast("Any", place)
    memory.poll()
    assert touched == []
    told.memory = {10: GIB}
    for at in (101.0, 101.0 + _TOUCH_SECONDS - 0.5, 101.0 + _TOUCH_SECONDS):
        clock.now = at
        memory.poll()
    assert touched == [101.0, 101.0 + _TOUCH_SECONDS]


def test_a_warning_is_said_once_for_each_time(told: Told) -> None:
    memory, messages = job(told, "warn")
    told.memory = {10: 9 * GIB}
    assert not memory.poll()
    assert not memory.poll()
    assert len(messages) == 1
    told.memory = {10: 7 * GIB}
    memory.poll()
    told.memory = {10: 9 * GIB}
    memory.poll()
    assert len(messages) == 2
    memory.raise_end()
