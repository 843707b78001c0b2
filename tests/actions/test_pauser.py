"""Pausing step by step, without processes: who is locked, who is stopped, in which order, and what is tried again."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.actions import pause as module
from gpushare.actions.pacing import Pacer
from gpushare.actions.pause import LOCK_SECONDS, TICK_SECONDS, Pauser, PausingShare, PausingWatch, resume_all
from gpushare.errors import GpushareError, NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.model import GpuProcess

PID, CHILD, GRANDCHILD, OTHER = 10, 11, 12, 99
STOP, CONT = signal.SIGSTOP, signal.SIGCONT


class Told:
    """A host and a driver's lock that do what a test says, and note in order what is done to whom."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.family = {PID: [PID, CHILD]}
        self.on_gpu: list[GpuProcess] | GpushareError | None = [GpuProcess(pid=PID, compute=True)]
        self.stopped: set[int] = set()
        self.dead: set[int] = set()
        self.locked: set[int] = set()
        self.fails: dict[tuple[str, int], GpushareError] = {}
        self.host: Any = SimpleNamespace(
            processes=SimpleNamespace(
                descendants=lambda pid: self.family.get(pid, []),
                describe=self._describe,
                alive=lambda pid: pid not in self.dead,
                send=lambda pid, number: self._do(signal.Signals(number).name, pid),
                namespace_is_host=lambda: True,
            ),
            nvml=SimpleNamespace(processes=self._processes),
        )
        self.device: Any = SimpleNamespace(gpu=SimpleNamespace(index=1, uuid="GPU-a"))

    def _describe(self, pid: int) -> Any:
        return None if pid in self.dead else SimpleNamespace(stopped=pid in self.stopped, started_at=5.0)

    def _processes(self, index: int) -> list[GpuProcess] | None:
        assert index == 1
        if isinstance(self.on_gpu, GpushareError):
            raise self.on_gpu
        return self.on_gpu

    def _do(self, what: str, pid: int) -> None:
        self.done.append((what, pid))
        if (what, pid) in self.fails:
            raise self.fails[what, pid]

    # -- the driver's lock -----------------------------------------------------------------------------

    def lock(self, pid: int, seconds: float) -> None:
        assert seconds == LOCK_SECONDS
        self._do("lock", pid)
        self.locked.add(pid)

    def unlock(self, pid: int) -> None:
        self._do("unlock", pid)
        self.locked.discard(pid)

    def is_locked(self, pid: int) -> bool:
        return pid in self.locked

    def pauser(self, *, lock: bool = True) -> Pauser:
        """Return what pauses the program."""
        return Pauser(self.host, self.device, PID, self if lock else None)  # type: ignore[arg-type]

    def since(self) -> list[tuple[str, int]]:
        """Return what was done since the last call."""
        done, self.done = self.done, []
        return done


@pytest.fixture
def told() -> Told:
    """Return a program with a child; only the program itself is on the GPU."""
    return Told()


def test_all_of_a_program_are_stopped_and_each_goes_on(told: Told) -> None:
    pauser = told.pauser(lock=False)
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]
    pauser.resume()
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]
    pauser.resume()
    assert told.since() == []
    assert not pauser.paused


def test_who_was_stopped_by_others_or_is_gone_is_left_alone(told: Told) -> None:
    told.family[PID] = [PID, CHILD, GRANDCHILD]
    told.stopped, told.dead = {CHILD}, {GRANDCHILD}
    pauser = told.pauser(lock=False)
    pauser.pause()
    pauser.resume()
    assert told.since() == [("SIGSTOP", PID), ("SIGCONT", PID)]


@pytest.mark.parametrize("error", [NotFound("gone", "see"), NoPermission("no", "be root")])
def test_one_that_cannot_be_signalled_does_not_keep_the_others(told: Told, error: GpushareError) -> None:
    told.fails = {("SIGSTOP", PID): error, ("SIGCONT", PID): error}
    pauser = told.pauser(lock=False)
    pauser.pause()
    pauser.resume()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD), ("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_only_who_has_a_cuda_context_is_locked(told: Told) -> None:
    told.on_gpu = [
        GpuProcess(pid=OTHER, compute=True),
        GpuProcess(pid=PID, graphics=True),
        GpuProcess(pid=CHILD, mps=True),
    ]
    told.pauser().pause()
    assert told.since() == [("lock", CHILD)]


@pytest.mark.parametrize("said", [None, [], [GpuProcess(pid=OTHER, compute=True)], NotSupported("no", "no")])
def test_where_nobody_of_it_is_on_the_gpu_nothing_is_done(told: Told, said: Any) -> None:
    told.on_gpu = said
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == []
    assert not pauser.paused


def test_several_contexts_are_stopped_from_then_on(told: Told) -> None:
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    pauser = told.pauser()
    assert pauser.by == "lock"
    pauser.pause()
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]
    assert pauser.by == "stop"
    pauser.resume()
    told.on_gpu = [GpuProcess(pid=PID, compute=True)]
    told.since()
    pauser.pause()
    # Not by turns: a process that is stopped would hang the lock.
    assert told.since() == [("SIGSTOP", PID), ("SIGSTOP", CHILD)]


@pytest.mark.parametrize("error", [TimedOut("long", "wait"), OperationFailed("no", "see")])
def test_a_lock_of_which_nothing_is_known_is_undone(told: Told, error: GpushareError) -> None:
    told.fails = {("lock", PID): error}
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID)]
    assert not pauser.paused
    assert pauser.by == "lock"


def test_an_unlock_that_fails_is_tried_again(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.fails = {("unlock", PID): TimedOut("long", "wait")}
    pauser.resume()
    assert pauser.paused
    told.fails = {}
    pauser.resume()
    assert not pauser.paused
    assert told.since() == [("lock", PID), ("unlock", PID), ("unlock", PID)]


def test_a_program_that_died_while_it_was_locked_is_not_unlocked(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.dead = {PID}
    pauser.resume()
    assert told.since() == [("lock", PID)]
    assert not pauser.paused


def test_one_that_is_gone_before_the_lock_is_not_locked(told: Told) -> None:
    told.dead = {PID}
    pauser = told.pauser()
    pauser.pause()
    assert told.since() == []
    assert not pauser.paused


def test_whom_to_lock_is_known_before_it_counts(told: Told) -> None:
    """Asking NVML takes time in which production waits: the lock comes first, and who else is there after it."""
    pauser = told.pauser()
    pauser.look()
    asked: list[str] = []
    told.host.nvml.processes = lambda _index: asked.append(f"after {[what for what, _ in told.done]}") or told.on_gpu
    pauser.pause()
    assert told.since() == [("lock", PID)]
    assert asked == ["after ['lock']"]


def test_a_context_that_came_since_the_look_is_stopped_with_the_rest(told: Told) -> None:
    pauser = told.pauser()
    pauser.look()
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID), ("SIGSTOP", PID), ("SIGSTOP", CHILD)]
    assert pauser.by == "stop"


def test_a_process_that_took_over_since_the_look_is_locked_instead(told: Told) -> None:
    pauser = told.pauser()
    pauser.look()
    told.on_gpu = [GpuProcess(pid=CHILD, compute=True)]
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID), ("lock", CHILD)]
    assert pauser.paused


def test_one_whose_unlock_fails_is_never_stopped(told: Told) -> None:
    pauser = told.pauser()
    pauser.look()
    told.on_gpu = [GpuProcess(pid=pid, compute=True) for pid in (PID, CHILD)]
    told.fails = {("unlock", PID): TimedOut("long", "wait")}
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID)]
    assert pauser.paused


@pytest.mark.parametrize("known", [True, False])
def test_a_lock_is_tried_once_a_look(told: Told, known: bool) -> None:
    told.fails = {("lock", PID): TimedOut("long", "wait")}
    pauser = told.pauser()
    if known:
        pauser.look()
    pauser.pause()
    assert told.since() == [("lock", PID), ("unlock", PID)]


def test_who_is_on_the_gpu_is_not_asked_while_it_stands_still_nor_where_nobody_is_locked(told: Told) -> None:
    pauser = told.pauser()
    pauser.pause()
    told.host.nvml.processes = None
    pauser.look()
    told.pauser(lock=False).look()


# -- what a gpushare that died left ----------------------------------------------------------------


def test_all_that_was_left_goes_on_out_of_the_stop_first(told: Told) -> None:
    told.family = {PID: [PID, CHILD], OTHER: [OTHER]}
    told.locked = {PID, OTHER}
    resume_all(told.host, [PID, OTHER], mps=False, checkpoint=told)
    assert told.since() == [
        ("SIGCONT", PID),
        ("unlock", PID),
        # Not locked: there is nothing to undo.
        ("SIGCONT", CHILD),
        ("SIGCONT", OTHER),
        ("unlock", OTHER),
    ]


def test_inside_mps_nothing_was_locked(told: Told) -> None:
    told.locked = {PID}
    resume_all(told.host, [PID], mps=True, checkpoint=told)
    assert told.since() == [("SIGCONT", PID), ("SIGCONT", CHILD)]


def test_one_that_cannot_go_on_does_not_keep_the_others(told: Told) -> None:
    told.locked = {PID, CHILD}
    told.fails = {("SIGCONT", PID): NotFound("gone", "see"), ("unlock", PID): OperationFailed("no", "see")}
    resume_all(told.host, [PID], mps=False, checkpoint=told)
    assert told.since() == [("SIGCONT", PID), ("unlock", PID), ("SIGCONT", CHILD), ("unlock", CHILD)]


# -- the watch -------------------------------------------------------------------------------------


class Inner:
    """The watch below, which notes when it is asked."""

    program_pid, attached, outside, pending, daemon_gone = PID, {PID}, {CHILD}, {GRANDCHILD}, True

    def __init__(self) -> None:
        self.looks: list[str] = []

    def look(self) -> None:
        self.looks.append("look")

    def settle(self) -> None:
        self.looks.append("settle")

    def wait(self) -> float:
        return 1.0

    def clients(self) -> set[int]:
        return {OTHER}


class Watched:
    """A watch with a clock, a production job and a pause that a test sets."""

    def __init__(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.active, self.alive = 100.0, False, True
        self.inner, self.said = Inner(), []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.at))
        activity: Any = SimpleNamespace(active=lambda: self.active)
        inner: Any = self.inner
        self.watch = PausingWatch(
            inner, told.pauser(), activity, lambda: self.alive, Pacer(quiet_seconds=0.3), tell=self.said.append
        )

    def look(self, *, after: float = 0.0, active: bool = False) -> bool:
        """Look after a while; return whether the program stands still."""
        self.at += after
        self.active = active
        self.watch.look()
        return self.watch.pauser.paused


@pytest.fixture
def watched(told: Told, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return a watch over the program."""
    return Watched(told, monkeypatch)


def test_it_waits_until_production_has_been_quiet_for_a_while(watched: Watched) -> None:
    steps: Sequence[tuple[float, bool, bool]] = (
        (0.0, False, False),
        (0.02, True, True),
        (0.02, False, True),
        (0.2, False, True),
        (0.02, True, True),
        (0.2, False, True),
        (0.2, False, False),
        (0.02, True, True),
    )
    assert [watched.look(after=after, active=active) for after, active, _ in steps] == [still for *_, still in steps]
    assert watched.watch.pauses == 2
    # Told only what is new.
    assert watched.said == [(0, False), (1, True), (1, False), (2, True)]


def test_what_could_not_be_paused_is_not_counted_as_a_pause(watched: Watched, told: Told) -> None:
    told.fails = {("lock", PID): TimedOut("long", "wait")}
    assert not watched.look(active=True)
    assert watched.watch.pauses == 0
    told.fails = {}
    assert watched.look(active=True)
    assert watched.watch.pauses == 1


def test_when_production_has_ended_nobody_waits_any_longer(watched: Watched) -> None:
    assert watched.look(active=True)
    watched.alive = False
    # Its samples still tell of it: it may be alive.
    assert watched.look(active=True)
    assert not watched.look()


def test_who_has_got_the_pid_of_production_since_is_not_production(watched: Watched) -> None:
    assert watched.look(active=True)
    watched.alive = False
    assert watched.look(active=True, after=0.9)
    assert not watched.look(active=True, after=1.1)
    assert not watched.look(active=True, after=0.02)


def test_a_program_that_is_to_end_is_never_paused_again(watched: Watched, told: Told) -> None:
    assert watched.look(active=True)
    watched.watch.release()
    assert not watched.look(active=True)
    assert told.since() == [("lock", PID), ("unlock", PID)]


def test_the_watch_below_looks_in_its_own_time(watched: Watched) -> None:
    watched.watch.pauser.look = lambda: watched.inner.looks.append("who")  # type: ignore[method-assign]
    for _ in range(5):
        watched.look(after=0.2)
    assert watched.inner.looks == ["look", "who"]
    watched.look(after=0.2)
    assert watched.inner.looks == ["look", "who"] * 2
    assert watched.watch.wait() == TICK_SECONDS
    watched.watch.settle()
    assert watched.inner.looks == [*["look", "who"] * 2, "settle"]
    assert watched.said[-1] is None


def test_its_facts_are_those_of_the_watch_below(watched: Watched) -> None:
    watch = watched.watch
    assert (watch.program_pid, watch.attached, watch.outside) == (PID, {PID}, {CHILD})
    assert (watch.pending, watch.daemon_gone, watch.clients()) == ({GRANDCHILD}, True, {OTHER})


def test_a_share_hands_on_all_but_the_watch(told: Told) -> None:
    closed: list[bool] = []
    inner: Any = SimpleNamespace(
        device=told.device,
        guarded=("a", "b"),
        meter="meter",
        environment=lambda base: {**base, "X": "1"},
        watch=lambda _pid: Inner(),
        close=lambda *, program_lives: closed.append(program_lives) or True,
    )
    share = PausingShare(inner, told.host, OTHER, 7.0, None)
    assert (share.device, share.guarded, share.meter) == (told.device, ("a", "b"), "meter")
    assert share.environment({"A": "0"}) == {"A": "0", "X": "1"}
    assert share.close(program_lives=True) is True
    assert share.close() is True
    assert closed == [True, False]


def test_production_is_asked_for_by_its_pid_and_its_start(told: Told) -> None:
    """A PID that was given to somebody else is not production."""
    asked: list[tuple[int, float | None]] = []
    told.host.processes.alive = lambda pid, started: asked.append((pid, started))
    inner: Any = SimpleNamespace(device=told.device, watch=lambda _pid: Inner())
    watch: Any = PausingShare(inner, told.host, OTHER, 7.0, None).watch(PID)
    assert not watch.production_alive()
    assert asked == [(OTHER, 7.0)]
