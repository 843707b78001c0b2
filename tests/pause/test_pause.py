"""Pauses below the command line: records, the guard's looks, and pauses that half succeed."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, InUse, NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.host.channels import Channels
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.host.records import has_records
from gpushare.host.store import Job, JobProcess
from gpushare.pause import change as module
from gpushare.pause.change import JobPause, find_paused, pauses_locked, resume_and_forget, resume_before_end
from gpushare.pause.keep import LOOK_SECONDS, Keeper
from gpushare.pause.record import PAUSED, PAUSES, PAUSING, RESUMING, PausedJob, paused_jobs, paused_processes, write
from gpushare.plan import NotUndone, carry_out
from gpushare.sim import admin
from gpushare.sim.channels import CHANNELS
from tests.cli.drive import World
from tests.clock import Clock

SPEC = "sim:2xh200"
OFF = sorted(CHANNELS)


class Control:
    """The channels of a simulated host, with errors that a test wants."""

    def __init__(self, host: Host) -> None:
        self._real = host.open_channels()
        self.fails: dict[tuple[str, int], GpushareError] = {}
        self.done: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)

        def called(subject: Any = None, *rest: Any) -> Any:
            pid = subject.pid if isinstance(subject, Channels) else subject
            self.done.append((name, pid))
            if (name, pid) in self.fails:
                raise self.fails[name, pid]
            return call(subject, *rest)

        return call if name in {"start", "close"} else called

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NoGuard:
    """Stands in for the guard process: this one is named as the guard."""

    def __init__(self, *_: object, **__: object) -> None:
        self.pid, self.said = os.getpid(), ["start"]
        NoGuard.last = self

    last: NoGuard

    def wait_ready(self) -> None:
        self.said.append("wait")

    def hand_over(self, word: str) -> None:
        self.said.append(word)

    def leave(self) -> None:
        self.said.append("leave")


class Paused:
    """Two processes of one job on two GPUs, and what pauses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World.new(SPEC)
        self.pids = [admin.add_process(SPEC, str(gpu)) for gpu in (0, 1)]
        self.control = Control(self.world.host)
        self.host = replace(self.world.host, open_channels=lambda: self.control)  # type: ignore[arg-type,return-value]
        monkeypatch.setattr(module, "Guard", NoGuard)

    @property
    def path(self) -> Path:
        return self.host.run_directory / "pause" / f"{self.pids[0]}.json"

    @property
    def off(self) -> list[bool]:
        return [self.world.process(pid).channels_off == OFF for pid in self.pids]

    def pause_of(self, *counts: int, seconds: float | None = None, host: Host | None = None) -> JobPause:
        first = self.host.processes.identity(self.pids[0])
        job = Job(**first._asdict(), uid=0, user="root", name="train")
        # One after the other, the last one from then on.
        rest = [*counts] or [2]
        return JobPause(
            host or self.host,
            job,
            lambda: [JobProcess(pid, 0) for pid in self.pids[: rest.pop(0) if len(rest) > 1 else rest[0]]],
            seconds,
        )

    def pause(self, count: int = 2, seconds: float | None = None) -> JobPause:
        with self.pause_of(count, seconds=seconds) as work, pauses_locked(self.host):
            carry_out(work.plan(begin=True))
        return work

    def job(self) -> PausedJob:
        record = PAUSES.read(self.path)
        assert record is not None
        return record


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Paused:
    return Paused(monkeypatch)


def test_the_record_comes_first_and_the_guard_is_there(job: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, list[str]]] = []
    real = job.control.__getattr__

    def disable(channels: Channels) -> float:
        seen.append((str(channels.pid), job.job().state, list(NoGuard.last.said)))
        return float(real("disable")(channels))

    job.control.disable = disable  # type: ignore[attr-defined]
    work = job.pause()
    assert seen == [(str(pid), PAUSING, ["start", "wait"]) for pid in job.pids]
    assert NoGuard.last.said == ["start", "wait", "held", "leave"]
    assert job.off == [True, True]
    assert work.seconds > 0
    assert (job.job().state, job.job().keeper.pid) == (PAUSED, os.getpid())
    assert [process.pid for process in job.job().channels] == job.pids
    assert has_records(job.host, "pause")


@pytest.mark.parametrize("kind", [OperationFailed, NoPermission])
def test_what_is_half_done_is_taken_back(job: Paused, kind: type[GpushareError]) -> None:
    job.control.fails["disable", job.pids[1]] = kind("no", "see")
    with pytest.raises(kind, match=r"(?m)^no$"):
        job.pause()
    assert job.off == [False, False]
    assert not job.path.exists()
    assert NoGuard.last.said[-1] == "leave"


@pytest.mark.parametrize("code", ["half_done", "helper_ended", "helper_failed"])
def test_what_may_have_been_left_off_halfway_is_put_back(job: Paused, code: str) -> None:
    half_done = OperationFailed("half of it is off", "see", code=code)
    job.control.fails["disable", job.pids[1]] = half_done
    with pytest.raises(OperationFailed, match=r"(?m)^half of it is off$"):
        job.pause()
    assert [("enable", pid) for pid in reversed(job.pids)] == job.control.done[-2:]
    assert not job.path.exists()
    job.control.fails["enable", job.pids[1]] = OperationFailed("still not", "see")
    with pytest.raises(OperationFailed, match="still not"):
        job.pause()
    assert job.path.exists()


def test_what_cannot_be_taken_back_stays_on_record(job: Paused) -> None:
    job.control.fails["disable", job.pids[1]] = TimedOut("no answer", "see")
    job.control.fails["enable", job.pids[0]] = OperationFailed("broken", "see")
    with pytest.raises(NotUndone, match=f"process {job.pids[0]} is still paused: broken"):
        job.pause()
    assert job.off == [True, False]
    # The one whose driver did not answer was enabled, too.
    assert ("enable", job.pids[1]) in job.control.done
    job.control.fails.clear()
    with pauses_locked(job.host):
        resume_and_forget(job.host, job.control, find_paused(job.host, "train"))  # type: ignore[arg-type]
    assert job.off == [False, False]
    assert not job.path.exists()


def test_a_process_that_joins_while_the_others_are_paused_is_paused_too(job: Paused) -> None:
    with job.pause_of(1, 2) as work, pauses_locked(job.host):
        carry_out(work.plan(begin=True))
    assert job.off == [True, True]
    assert [process.pid for process in job.job().channels] == job.pids


def test_one_that_ends_meanwhile_does_not_keep_the_other_from_being_paused(job: Paused) -> None:
    job.control.fails["disable", job.pids[0]] = NotFound("gone", "see", code="process_gone")
    job.pause()
    assert job.off == [False, True]


def test_channels_that_changed_since_the_scan_are_found_again(job: Paused) -> None:
    real = job.control.__getattr__
    failed: list[int] = []

    def disable(channels: Channels) -> float:
        if not failed:
            failed.append(channels.pid)
            raise NotFound("others", "see", code="stale_channels")
        return float(real("disable")(channels))

    job.control.disable = disable  # type: ignore[attr-defined]
    job.pause()
    assert job.off == [True, True]
    assert job.control.done.count(("find", job.pids[0])) == 2


def test_a_pause_that_died_half_way_is_made_whole(job: Paused) -> None:
    job.pause()
    old = job.job()
    with pauses_locked(job.host):
        write(replace(old, state=PAUSING))
    with job.world.file.changed() as state:
        state.processes[1].channels_off = []
    work = job.pause()
    assert not work.was_paused
    assert job.off == [True, True]
    assert job.job().state == PAUSED
    assert job.pause().was_paused


def test_a_failure_keeps_an_older_record(job: Paused) -> None:
    job.pause()
    old = job.job()
    with pauses_locked(job.host):
        write(replace(old, keeper=Identity(1, 1)))
    job.control.fails["disable", job.pids[0]] = OperationFailed("no", "see")
    with pytest.raises(OperationFailed):
        job.pause()
    assert [process.pid for process in job.job().channels] == job.pids


def test_what_cannot_be_taken_back_stays_on_record_instead_of_an_older_one(job: Paused) -> None:
    job.pause(1)
    with pauses_locked(job.host):
        write(replace(job.job(), keeper=Identity(1, 1)))
    job.control.fails["disable", job.pids[1]] = TimedOut("no answer", "see")
    job.control.fails["enable", job.pids[1]] = OperationFailed("broken", "see")
    with pytest.raises(NotUndone):
        job.pause()
    assert [process.pid for process in job.job().channels] == job.pids


def test_who_may_resume(job: Paused, tmp_path: Path) -> None:
    job.pause()
    assert find_paused(job.host, "train").path == job.path
    assert find_paused(job.host, str(job.pids[1])).path == job.path
    user = replace(job.host, run_directory=tmp_path, shared_run_directories=(job.host.run_directory,))
    with pytest.raises(NoPermission, match="paused by root"):
        find_paused(user, "train")
    with pytest.raises(NoPermission, match="paused by root"), job.pause_of(host=user) as work:
        work.plan(begin=False)
    assert paused_processes(user).keys() == set(job.pids)
    # For the end of a job that root has paused, its owner enables the channels; the record is root's.
    resume_before_end(user, [job.pids[1]])
    assert job.off == [False, False]
    assert job.path.exists()


def test_what_root_has_paused_too_stays_off(job: Paused, tmp_path: Path) -> None:
    job.pause()
    user = replace(job.host, run_directory=tmp_path, shared_run_directories=(job.host.run_directory,))
    own = tmp_path / "pause" / job.path.name
    own.parent.mkdir(mode=0o700)
    own.write_text(job.path.read_text())
    # The user paused it first, and root afterwards.
    for text in ("train", str(job.pids[1])):
        with pytest.raises(NoPermission, match="paused by root"):
            find_paused(user, text)
    mine = PAUSES.read(own)
    assert mine is not None
    # The time of the user's pause is over.
    resume_and_forget(user, job.control, mine)
    assert job.off == [True, True]
    assert not own.exists()
    resume_and_forget(job.host, job.control, job.job())
    assert job.off == [False, False]


def test_a_run_that_lives_is_not_disturbed(job: Paused) -> None:
    job.pause()
    old = job.job()
    with pauses_locked(job.host):
        write(replace(old, by_run=True))
    with pytest.raises(InUse) as caught:
        find_paused(job.host, "train")
    assert caught.value.hint == "end the job, and its run with it: gpushare stop train"
    with pytest.raises(InUse):
        job.pause()
    with pauses_locked(job.host):
        write(replace(old, by_run=True, keeper=Identity(1, 1)))
    assert find_paused(job.host, "train")


@pytest.mark.parametrize("change", [{"pid": -1}, {"pid": "1"}, {"since": None}, {"channels": None}, {"channels": [1]}])
def test_a_record_of_another_shape_is_none(job: Paused, change: dict[str, Any]) -> None:
    job.pause()
    job.path.write_text(json.dumps({**json.loads(job.path.read_text()), **change}))
    assert PAUSES.read(job.path) is None


# -- the guard ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def keeper(job: Paused) -> Keeper:
    job.pause()
    job.control.done.clear()
    return Keeper(job.host, job.path)


def test_it_looks_again_and_changes_nothing(job: Paused, keeper: Keeper) -> None:
    before = job.path.read_text()
    assert keeper.step() == LOOK_SECONDS
    assert job.path.read_text() == before
    assert {call for call, _ in job.control.done} == {"find_again"}


def test_it_ends_when_the_record_is_gone_or_names_another(job: Paused, keeper: Keeper) -> None:
    old = job.job()
    with pauses_locked(job.host):
        write(replace(old, keeper=Identity(1, 1)))
    assert keeper.step() is None
    job.path.unlink()
    assert keeper.step() is None
    assert job.off == [True, True]


def test_it_ends_with_the_job(job: Paused, keeper: Keeper) -> None:
    for pid in job.pids:
        assert keeper.step() == LOOK_SECONDS
        admin.end_process(SPEC, pid)
    assert keeper.step() is None
    assert not job.path.exists()


def test_it_resumes_in_time_and_tries_again(job: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    for name in ("keep.time.monotonic", "keep.uptime", "change.uptime"):
        monkeypatch.setattr(f"gpushare.pause.{name}", clock)
    job.pause(seconds=60)
    keeper = Keeper(job.host, job.path)
    assert keeper.step() == LOOK_SECONDS
    clock.now += 59.5
    assert keeper.step() == pytest.approx(0.5)
    job.control.fails["enable", job.pids[1]] = OperationFailed("no", "see")
    clock.now += 1
    assert keeper.step() == LOOK_SECONDS
    assert job.off == [False, True]
    assert job.job().state == RESUMING
    job.control.fails.clear()
    assert keeper.step() is None
    assert job.off == [False, False]
    assert not job.path.exists()


def test_it_completes_a_resume_that_died(job: Paused, keeper: Keeper) -> None:
    old = job.job()
    with pauses_locked(job.host):
        write(replace(old, state=RESUMING))
    assert keeper.step() is None
    assert job.off == [False, False]


def test_it_takes_back_a_pause_that_died(job: Paused, keeper: Keeper) -> None:
    assert keeper.try_resume()
    assert job.off == [False, False]
    assert not job.path.exists()
    assert keeper.try_resume()


def test_it_pauses_a_child_that_comes_to_the_gpu(job: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    job.pause(count=1)
    keeper = Keeper(job.host, job.path)
    family = [job.pids[0]]
    monkeypatch.setattr(type(job.host.processes), "descendants", lambda *_: family)
    assert keeper.step() == LOOK_SECONDS
    assert job.off == [True, False]
    family.append(job.pids[1])
    assert keeper.step() == LOOK_SECONDS
    assert job.off == [True, True]
    assert [process.pid for process in job.job().channels] == job.pids


def test_it_records_new_channels_before_they_go_off(job: Paused, keeper: Keeper) -> None:
    old = job.job()
    first = old.channels[0]
    fewer = tuple(replace(group, channels=group.channels[:4]) for group in first.groups)
    with pauses_locked(job.host):
        write(replace(old, channels=(replace(first, groups=fewer), old.channels[1])))
    with job.world.file.changed() as state:
        state.processes[0].channels_off = OFF[:4]
    job.control.fails["disable", job.pids[0]] = OperationFailed("no", "see")
    assert keeper.step() == LOOK_SECONDS
    by_pid = {process.pid: process for process in job.job().channels}
    assert by_pid[job.pids[0]].groups[0].channels == CHANNELS
    assert job.off == [False, True]
    job.control.fails.clear()
    assert keeper.step() == LOOK_SECONDS
    assert job.off == [True, True]


def test_a_process_that_grows_before_it_could_be_paused_is_recorded_once(
    job: Paused, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job.job().channels[0]

    def channels_now(count: int) -> Channels:
        """Return the first process with this number of channels."""
        return replace(first, groups=tuple(replace(group, channels=group.channels[:count]) for group in first.groups))

    with pauses_locked(job.host):
        write(replace(job.job(), channels=(channels_now(3), job.job().channels[1])))
    job.control.fails["disable", job.pids[0]] = OperationFailed("no", "see")
    for count in (4, 5):
        monkeypatch.setattr(
            job.control, "find_again", lambda of, n=count: channels_now(n) if of.pid == first.pid else of, raising=False
        )
        assert keeper.step() == LOOK_SECONDS
    assert not PAUSES.unread(job.host)
    assert [process.pid for process in job.job().channels] == [job.pids[1], job.pids[0]]


def test_ctrl_c_during_the_call_takes_the_pause_back(job: Paused) -> None:
    real = job.control.__getattr__

    def disable(channels: Channels) -> float:
        if channels.pid == job.pids[1]:
            signal.raise_signal(signal.SIGINT)
        return float(real("disable")(channels))

    job.control.disable = disable  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        job.pause()
    # It waited for the end of the call, and what was off is on again.
    assert ("disable", job.pids[1]) in job.control.done
    assert job.off == [False, False]
    assert not job.path.exists()


def test_a_record_that_could_not_be_read_again_is_not_written(job: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare.pause.record._MOST_GROUPS", 0)
    with pytest.raises(NotSupported, match="too many channels"):
        job.pause()
    assert job.off == [False, False]
    assert not job.path.exists()


def test_a_pid_that_another_process_has_by_now_is_not_the_jobs(job: Paused) -> None:
    job.pause()
    record = job.job()
    write(replace(record, pid=os.getpid(), started=1))
    (paused,) = paused_jobs(job.host)
    assert (paused.pid, paused.started) == (record.channels[0].pid, record.channels[0].started)


def test_under_mps_the_hint_has_the_name_and_the_way_that_can_be_paused(job: Paused) -> None:
    first = job.host.processes.identity(job.pids[0])
    named = Job(**first._asdict(), uid=0, user="root", name="train")
    with (
        JobPause(job.host, named, lambda: [JobProcess(job.pids[1], 0, under_mps=True)], None) as work,
        pytest.raises(NotSupported) as caught,
    ):
        work.plan(begin=False)
    hint = caught.value.hint or ""
    assert caught.value.code == "under_mps"
    assert f"kill -STOP {job.pids[1]}; or end it: gpushare stop train;" in hint
    assert "--slice 2ms" in hint
