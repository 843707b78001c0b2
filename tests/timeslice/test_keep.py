"""Keeping the time-slices of processes by rules: what is set, what is left alone, and what is put back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, InUse, OperationFailed, TimedOut
from gpushare.connect import connect
from gpushare.host.channels import ChannelControl, Channels
from gpushare.host.host import Host
from gpushare.hostfile.parse import parse
from gpushare.sim import admin
from gpushare.sim.channels import COMPUTE_GROUP
from gpushare.timeslice import keep
from gpushare.timeslice.keep import KEEPS, Event, Keeper, Policy, deviations, keep_record, sole_keep, verdicts
from gpushare.timeslice.rules import Names
from gpushare.timeslice.slices import slice_records
from tests.cli.drive import H200, World
from tests.errors import fails

pytestmark = pytest.mark.usefixtures("near_handles")
DEFAULT = 2048
NAMES = Names(users={"root": 0, "nobody": 65534}, groups={"prod": 50})
RULES = """\
- {match: {user: root, command: "*serve*"}, role: production}
- {match: {command: "*train*"}, slice: 500us}
"""


def policy(rules: str = RULES) -> Policy:
    return Policy(parse(f"version: 1\nslices:\n{rules}").rules, NAMES)


class Desk:
    """A simulated host with a keeper whose clock is told."""

    def __init__(self, world: World, rules: str) -> None:
        self.world, self.now = world, 100.0
        self.host: Host = connect(world.spec)
        self.control: ChannelControl = self.host.open_channels()
        self.keeper = Keeper(self.host, self.control, policy(rules), clock=lambda: self.now)

    def look(self, seconds: float = 1.0) -> list[str]:
        """Return what happened in a look, ``seconds`` after the last one."""
        self.now += seconds
        return self.told(self.keeper.step())

    def told(self, events: list[Event]) -> list[str]:
        return [str(event) for event in events]

    def add(self, command: str = "python train.py", user: str = "root", **more: Any) -> int:
        return admin.add_process(self.world.spec, command_line=command.split(), user=user, **more)

    def slice(self, pid: int) -> int:
        return self.world.process(pid).slices.get("compute", DEFAULT)

    def set(self, pid: int, microseconds: int) -> None:
        """Set a slice, as somebody else does."""
        channels = self.control.find(pid)
        self.control.set_slice(channels, microseconds)


@pytest.fixture
def world() -> World:
    return World.new(H200)


@pytest.fixture
def new_desk(world: World) -> Iterator[Callable[..., Desk]]:
    with sole_keep(connect(world.spec)):
        yield lambda rules=RULES: Desk(world, rules)


@pytest.fixture
def desk(new_desk: Callable[..., Desk]) -> Desk:
    return new_desk()


@pytest.fixture
def pid(desk: Desk) -> int:
    return desk.add()


def test_a_process_is_set_by_its_rule_and_put_back(desk: Desk) -> None:
    serve, train, other = desk.add("python serve.py"), desk.add(user="nobody"), desk.add("python eval.py")
    assert sorted(desk.look()) == [
        f"process {serve} (root) on GPU 0: 2.048ms -> 16ms (rule 3:3)",
        f"process {train} (nobody) on GPU 0: 2.048ms -> 500us (rule 4:3)",
    ]
    assert [desk.slice(pid) for pid in (serve, train, other)] == [16_000, 500, DEFAULT]
    assert desk.look() == desk.look(20) == desk.look(20) == []
    late = desk.add()
    assert desk.look() == [f"process {late} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert desk.told(desk.keeper.undo()) == [
        f"process {serve} (root): restored 16ms -> 2.048ms",
        f"process {train} (nobody): restored 500us -> 2.048ms",
        f"process {late} (root): restored 500us -> 2.048ms",
    ]
    assert [desk.slice(pid) for pid in (serve, train, other, late)] == [DEFAULT] * 4


def test_what_somebody_else_has_set_is_left_and_told_once(desk: Desk, pid: int) -> None:
    desk.look()
    desk.set(pid, 5000)
    assert desk.look(20) == [f"process {pid} (root) on GPU 0: set to 5ms by someone else; left alone"]
    assert desk.look(20) == desk.look(20) == []
    desk.keeper.follow(policy("- {match: all, slice: 300us}\n"))
    assert desk.look() == desk.told(desk.keeper.undo()) == []
    assert desk.slice(pid) == 5000


def test_what_was_set_just_before_the_end_is_left_too(desk: Desk, pid: int) -> None:
    desk.look()
    desk.set(pid, 5000)
    assert desk.keeper.undo() == []
    assert desk.slice(pid) == 5000


def test_a_later_context_gets_the_slice_too(desk: Desk, pid: int) -> None:
    desk.look()
    find = desk.control.find_again

    def with_another(channels: Channels) -> Channels:
        channels = find(channels)
        (group,) = channels.groups
        # The simulated driver has one context per process: another client stands in for the second one.
        return Channels(
            pid=pid, started=channels.started, groups=(*channels.groups, _replaced(group, slice_us=DEFAULT))
        )

    desk.control.find_again = with_another  # type: ignore[method-assign]
    desk.control.read_slices = lambda channels: (DEFAULT,)  # type: ignore[method-assign]
    asked: list[int] = []
    desk.control.set_slice = lambda channels, us: asked.append(channels.groups[0].client) or 0.0  # type: ignore[method-assign,func-returns-value]
    assert desk.look(5) == [f"process {pid} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert asked == [1]


def test_a_process_with_many_contexts_takes_one_call(desk: Desk, pid: int) -> None:
    find, calls = desk.control.find, []

    def with_many(pid: int, started: int | None = None, *, seconds: float = 10.0) -> Channels:
        (group,) = find(pid, started, seconds=seconds).groups
        groups = tuple(replace(group, client=number) for number in range(500))
        return Channels(pid=pid, started=started or 0, groups=groups)

    desk.control.find = with_many  # type: ignore[method-assign,assignment]
    desk.control.read_slices = lambda channels: (DEFAULT,) * len(channels.groups)  # type: ignore[method-assign]
    desk.control.set_slice = lambda channels, us: calls.append(len(channels.groups)) or 0.0  # type: ignore[method-assign,func-returns-value]
    assert desk.look() == [f"process {pid} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert calls == [500]


def test_a_slice_that_another_gpushare_sets_at_the_same_time_is_left(desk: Desk, pid: int) -> None:
    find = desk.control.find

    def and_then(pid: int, started: int | None = None, *, seconds: float = 10.0) -> Channels:
        channels = find(pid, started, seconds=seconds)
        desk.control.set_slice(channels, 4000)
        return channels

    desk.control.find = and_then  # type: ignore[method-assign,assignment]
    assert desk.look() == []
    desk.control.find = find  # type: ignore[method-assign]
    assert desk.look(20) == [f"process {pid} (root) on GPU 0: set to 4ms by someone else; left alone"]
    desk.keeper.undo()
    assert desk.slice(pid) == 4000


def _replaced(group: Any, **more: Any) -> Any:
    return replace(group, client=1, **more)


def test_other_rules_are_followed(desk: Desk) -> None:
    train, serve = desk.add(), desk.add("python serve.py")
    desk.look()
    desk.keeper.follow(policy('- {match: {command: "*train*"}, slice: 300us}\n'))
    assert sorted(desk.look()) == [
        f"process {train} (root) on GPU 0: 500us -> 300us (rule 3:3)",
        f"process {serve} (root) on GPU 0: restored 16ms -> 2.048ms",
    ]
    assert [desk.slice(train), desk.slice(serve)] == [300, DEFAULT]
    # The default is still known, though it was changed twice.
    desk.keeper.undo()
    assert desk.slice(train) == DEFAULT


def test_the_cgroup_of_a_pod(new_desk: Callable[..., Desk]) -> None:
    desk = new_desk("- {match: {cgroup: '/kubepods.slice/*'}, slice: 16ms}\n")
    path = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-abc.scope"
    pod = desk.add(user="nobody", cgroup=path, cgroup_of_root=True)
    own = desk.add(user="nobody", cgroup=path)
    desk.look()
    assert [desk.slice(pod), desk.slice(own)] == [16_000, DEFAULT]


def test_clients_of_mps_are_skipped_by_name_once(new_desk: Callable[..., Desk]) -> None:
    desk = new_desk("- {match: all, slice: 300us}\n")
    desk.world.run("mps", "start").ok()
    desk.world.client()
    (event, *server) = desk.look()
    assert "skipped: it runs under MPS, where all clients of a server share one time-slice" in event
    assert all("under MPS" in text for text in server)
    assert desk.look() == desk.look(30) == []


def test_another_users_process_is_skipped_with_the_reason_once(new_desk: Callable[..., Desk]) -> None:
    desk = new_desk("- {match: all, slice: 300us}\n")
    with desk.world.file.changed() as state:
        state.fault_uid = 65534
    desk = Desk(desk.world, "- {match: all, slice: 300us}\n")
    theirs, ours = desk.add(user="root"), desk.add(user="nobody")
    assert sorted(desk.look()) == [
        f"process {theirs} (root): skipped: it belongs to another user",
        f"process {ours} (nobody) on GPU 0: 2.048ms -> 300us (rule 3:3)",
    ]
    assert desk.look() == []


@pytest.mark.parametrize(("fault", "reason"), [("seccomp", "a sandbox forbids"), ("gvisor", "gVisor"), ("wsl", "WSL")])
def test_what_the_host_does_not_allow_is_said_once(fault: str, reason: str, desk: Desk) -> None:
    desk.add()
    with desk.world.file.changed() as state:
        state.channel_fault = fault
    (told,) = desk.look()
    assert reason in told
    assert desk.look() == desk.look(60) == []


def test_a_process_that_ends_is_forgotten(desk: Desk, pid: int) -> None:
    desk.look()
    admin.end_process(desk.world.spec, pid)
    assert desk.look() == desk.told(desk.keeper.undo()) == []
    record = keep_record(desk.host)
    assert record.processes == ()


def test_a_gpu_that_is_lost_for_a_moment_forgets_nothing(desk: Desk, pid: int) -> None:
    desk.look()
    desk.world.fault("lost", gpu=0)
    assert desk.look() == []
    desk.world.clear()
    desk.keeper.undo()
    assert desk.slice(pid) == DEFAULT


def test_a_full_disk_sets_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch, pid: int) -> None:

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpushare.host.store.replace_file", full)
    (told,) = desk.look()
    assert "No space left on device" in told
    assert desk.slice(pid) == DEFAULT
    # Nothing is taken for set: neither slices nor the channels that would have them.
    (process,) = desk.keeper._processes.values()
    assert (process.slices, process.channels, process.scan) == ({}, None, True)


# -- nobody keeps others waiting ---------------------------------------------------------------------


class Hostile:
    """A driver that takes its time for the processes of some users."""

    def __init__(self, slowed: Desk, slow: Callable[[int], bool], takes: float) -> None:
        self._desk, self._slow, self._takes = slowed, slow, takes
        self.asked: list[int] = []
        self._find = slowed.control.find
        slowed.control.find = self.find  # type: ignore[method-assign,assignment]

    def find(self, pid: int, started: int | None = None, *, seconds: float = 10.0) -> Channels:
        self.asked.append(pid)
        if self._slow(pid):
            self._desk.now += min(self._takes, seconds)
            if self._takes >= seconds:
                raise TimedOut(f"process {pid}: the driver does not answer", "wait")
        return self._find(pid, started)


@pytest.mark.parametrize("takes", [1.0, 1000.0])
def test_a_user_with_many_slow_processes_does_not_keep_others_waiting(desk: Desk, takes: float) -> None:
    slow = {desk.add(user="nobody") for _ in range(30)}
    hostile = Hostile(desk, slow.__contains__, takes)
    for _ in range(3):
        desk.look()
    ours = desk.add()
    before = desk.now
    desk.look()
    # At once: at most the process that was begun before.
    assert hostile.asked[-1] == ours or ours in hostile.asked[-2:]
    assert desk.slice(ours) == 500
    assert desk.now - before <= 1.0 + 2.5


def test_the_work_of_a_look_is_bounded(desk: Desk) -> None:
    pids = {desk.add() for _ in range(12)}
    hostile = Hostile(desk, pids.__contains__, 0.3)
    desk.look()
    assert len(hostile.asked) == 3
    for _ in range(4):
        desk.look()
    assert {desk.slice(pid) for pid in pids} == {500}


def test_a_process_that_never_answers_is_given_up(desk: Desk, pid: int) -> None:
    hostile = Hostile(desk, lambda _: True, 1000.0)
    told = [line for _ in range(20) for line in desk.look(60)]
    assert told == [f"process {pid} (root): skipped: the driver does not answer"]
    assert len(hostile.asked) == 8


# -- after a crash -----------------------------------------------------------------------------------


def test_a_killed_keep_is_undone_by_the_next_one(new_desk: Callable[..., Desk]) -> None:
    killed = new_desk()
    train, serve, changed = killed.add(), killed.add("python serve.py"), killed.add()
    killed.look()
    killed.set(changed, 7000)
    desk = new_desk()
    assert desk.told(desk.keeper.recover()) == [
        f"process {train} (root): restored 500us -> 2.048ms",
        f"process {serve} (root): restored 16ms -> 2.048ms",
    ]
    assert [desk.slice(pid) for pid in (train, serve, changed)] == [DEFAULT, DEFAULT, 7000]
    assert desk.keeper.recover() == []


@pytest.mark.parametrize("crash", ["set_slice", "find_again"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_call_is_undone(crash: str, after: bool, new_desk: Callable[..., Desk]) -> None:
    desk = new_desk()
    pid = desk.add()
    desk.look()
    desk.keeper.follow(policy("- {match: all, slice: 300us}\n"))
    real = getattr(desk.control, crash)

    def killed(*arguments: Any) -> None:
        if after:
            real(*arguments)
        raise SystemExit

    setattr(desk.control, crash, killed)
    with pytest.raises(SystemExit):
        desk.look()
    again = new_desk()
    again.keeper.recover()
    assert again.slice(pid) == DEFAULT


def test_a_process_with_a_recorded_pid_that_started_later_is_not_touched(new_desk: Callable[..., Desk]) -> None:
    desk = new_desk()
    pid = desk.add()
    desk.look()
    with desk.world.file.changed() as state:
        next(process for process in state.processes if process.pid == pid).started += 60
    assert new_desk().keeper.recover() == []
    assert desk.slice(pid) == 500


def test_the_record_names_what_was_set(desk: Desk, pid: int) -> None:
    desk.look()
    record = keep_record(desk.host)
    assert record.runs
    (kept,) = record.processes
    (kept_slice,) = kept.slices
    assert (kept.pid, kept.uid, kept_slice[2:]) == (pid, 0, (DEFAULT, 500, DEFAULT))
    assert kept_slice.handle == COMPUTE_GROUP
    path = desk.host.run_directory / "keep" / "keep.json"
    assert json.loads(path.read_text())["schema"] == 1


# -- one keep per host -------------------------------------------------------------------------------


def test_there_is_one_keep_per_host(desk: Desk, pid: int) -> None:
    with fails(InUse, "keep_running", hint="see which: fuser -v "), sole_keep(desk.host):
        pass
    desk.look()
    message, hint = f"(process {os.getpid()})", f"kill -HUP {os.getpid()}; or stop it: kill {os.getpid()}; "
    with fails(InUse, "keep_running", message=message, hint=hint), sole_keep(desk.host):
        pass


def test_what_would_be_done_asks_no_driver(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    train, serve, other = desk.add(user="nobody"), desk.add("serve"), desk.add("x\ny\x1b[2J")

    def never(*_: object) -> None:
        raise GpushareError("the driver was asked", "do not")

    monkeypatch.setattr(ChannelControl, "find", never)
    decided = {verdict.pid: (verdict.rule, verdict.slice_us, verdict.why) for verdict in verdicts(desk.host, policy())}
    assert decided == {train: ("4:3", 500, None), serve: ("3:3", 16_000, None), other: (None, None, None)}


def test_a_rule_that_does_not_raise_is_followed_by_a_shorter_slice(new_desk: Callable[..., Desk]) -> None:
    desk = new_desk()
    pid = desk.add(user="nobody")
    found = []
    for microseconds in (300, 4000):
        desk.set(pid, microseconds)
        for rules in ('- {match: {command: "*"}, slice: 16ms}\n', "- {match: {user: nobody}, slice: 500us}\n"):
            found.append([row.found_us for row in deviations(desk.host, policy(rules))])
    assert found == [[], [300], [4000], [4000]]


@pytest.mark.parametrize(("failures", "stays"), [(1, False), (9, True)])
def test_what_cannot_be_put_back_is_tried_again_and_stays_written_down(
    new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, failures: int, stays: bool
) -> None:
    desk = new_desk()
    pid = desk.add()
    desk.look()
    real, count = ChannelControl.set_slice, [0]

    def failing(self: ChannelControl, channels: Channels, microseconds: int) -> Any:
        count[0] += 1
        if count[0] <= failures:
            raise OperationFailed("no", "none")
        return real(self, channels, microseconds)

    with monkeypatch.context() as patched:
        patched.setattr(ChannelControl, "set_slice", failing)
        events = desk.keeper.undo()
    assert [event.kind for event in events] == ["skipped" if stays else "restored"]
    assert desk.keeper.not_restored == ([pid] if stays else [])
    record = keep_record(desk.host)
    assert [kept.pid for kept in record.processes] == ([pid] if stays else [])
    # The next one does it.
    new_desk().keeper.recover()
    assert desk.slice(pid) == DEFAULT


def failing(*_: Any) -> None:
    raise OperationFailed("no", "none")


def recovered_in_vain(new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, rules: str) -> tuple[Desk, int]:
    """Return a keep that could not put back what a killed one has set, and the process."""
    killed = new_desk()
    pid = killed.add()
    killed.look()
    desk = new_desk(rules)
    with monkeypatch.context() as patched:
        patched.setattr(ChannelControl, "set_slice", failing)
        assert [event.kind for event in desk.keeper.recover()] == ["skipped"]
    return desk, pid


@pytest.mark.parametrize(("rule", "told"), [("none", []), ("*train*", ["set"])])
def test_what_the_next_keep_cannot_put_back_counts_as_its_own(
    new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, rule: str, told: list[str]
) -> None:
    desk, pid = recovered_in_vain(new_desk, monkeypatch, f"- {{match: {{command: '{rule}'}}, slice: 1ms}}\n")
    # Another process is set meanwhile, which writes the record again.
    serve = desk.add("python serve.py")
    desk.keeper.follow(
        policy(f"- {{match: {{command: '{rule}'}}, slice: 1ms}}\n- {{match: {{command: '*serve*'}}, slice: 1ms}}\n")
    )
    assert [event.kind for event in desk.keeper.step() if event.pid == pid] == told
    assert not KEEPS.unread(desk.host)
    record = keep_record(desk.host)
    assert record is not None
    assert sorted(kept.pid for kept in record.processes) == [pid, serve]
    if told:
        # A killed one is undone as a whole.
        assert {event.kind for event in new_desk().keeper.recover()} == {"restored"}
    else:
        assert {event.kind for event in desk.keeper.undo()} == {"restored"}
        assert desk.keeper.not_restored == []
    assert (desk.slice(pid), desk.slice(serve)) == (DEFAULT, DEFAULT)


def test_a_slice_that_was_put_back_in_a_try_that_failed_gets_its_rule(
    new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = new_desk()
    serve = killed.add("python serve.py")
    killed.look()
    # Another process lets the record be written once more.
    killed.add()
    killed.look()
    desk = new_desk()
    with monkeypatch.context() as patched:
        patched.setattr(keep, "note_restored", failing)
        assert {event.kind for event in desk.keeper.recover()} == {"skipped"}
    assert desk.slice(serve) == DEFAULT
    assert any(told.startswith(f"process {serve} (root) on GPU 0: 2.048ms -> 16ms") for told in desk.look())
    assert desk.slice(serve) == 16_000
    desk.keeper.undo()
    assert desk.slice(serve) == DEFAULT


def test_a_keep_that_cannot_begin_leaves_no_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    host = connect(world.spec)
    monkeypatch.setattr(type(host.nvml), "identities", failing)
    with pytest.raises(OperationFailed, match=r"(?m)^no$"):
        keep.keep(host, policy(), reload=policy, say=lambda _: None)
    assert not KEEPS.path(host, "keep").exists()


def test_what_cannot_be_put_back_at_the_end_either_stays_written_down(
    new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, pid = recovered_in_vain(new_desk, monkeypatch, "- {match: {command: '*train*'}, slice: 1ms}\n")
    with monkeypatch.context() as patched:
        patched.setattr(ChannelControl, "set_slice", failing)
        desk.look()
        assert [event.kind for event in desk.keeper.undo()] == ["skipped"]
    assert desk.keeper.not_restored == [pid]
    new_desk().keeper.recover()
    assert desk.slice(pid) == DEFAULT


def test_a_killed_keep_is_undone_where_nvml_fails(
    new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = new_desk()
    pid = killed.add()
    killed.look()
    desk = new_desk()
    monkeypatch.setattr(desk.host.nvml, "identities", failing)
    assert [event.kind for event in desk.keeper.recover()] == ["restored"]
    with pytest.raises(OperationFailed):
        desk.look()
    assert desk.slice(pid) == DEFAULT


def test_what_a_killed_keep_left_is_not_forgotten_while_no_gpu_lists_it(
    new_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, pid = recovered_in_vain(new_desk, monkeypatch, RULES)
    with monkeypatch.context() as patched:
        patched.setattr(ChannelControl, "set_slice", failing)
        patched.setattr(desk.host.nvml, "processes", lambda _: [])
        desk.look()
    assert [event.kind for event in desk.keeper.undo()] == ["restored"]
    assert desk.slice(pid) == DEFAULT


@pytest.mark.parametrize("code", ["driver_failed", "half_done", "helper_ended"])
def test_a_slice_that_was_refused_is_not_written_down_unless_a_part_of_it_may_be_set(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, pid: int, code: str
) -> None:
    def refused(*_: Any) -> None:
        raise OperationFailed("no", "none", code=code)

    monkeypatch.setattr(ChannelControl, "set_slice", refused)
    assert [line for line in desk.look() if "skipped" in line]
    assert set(slice_records(desk.host)) == (set() if code == "driver_failed" else {pid})
    assert desk.slice(pid) == DEFAULT
