"""Keeping the time-slices of processes by rules: what is set, what is left alone, and what is put back."""

from __future__ import annotations

import json
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
from gpushare.timeslice.keep import Event, Keeper, Policy, keep_record, only_one, recover, verdicts
from gpushare.timeslice.rules import Names
from gpushare.timeslice.slices import slice_records
from tests.cli.drive import H200, World

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
        return self.told(self.keeper.look())

    def told(self, events: list[Event]) -> list[str]:
        return [str(one) for one in events]

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
def desk(world: World) -> Iterator[Callable[..., Desk]]:
    with only_one(connect(world.spec)):
        yield lambda rules=RULES: Desk(world, rules)


def test_a_process_is_set_by_its_rule_and_put_back(desk: Callable[..., Desk]) -> None:
    one = desk()
    serve, train, other = one.add("python serve.py"), one.add(user="nobody"), one.add("python eval.py")
    assert sorted(one.look()) == [
        f"process {serve} (root) on GPU 0: 2.048ms -> 16ms (rule 3:3)",
        f"process {train} (nobody) on GPU 0: 2.048ms -> 500us (rule 4:3)",
    ]
    assert [one.slice(pid) for pid in (serve, train, other)] == [16_000, 500, DEFAULT]
    assert one.look() == one.look(20) == one.look(20) == []
    late = one.add()
    assert one.look() == [f"process {late} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert one.told(one.keeper.undo()) == [
        f"process {serve} (root): restored 16ms -> 2.048ms",
        f"process {train} (nobody): restored 500us -> 2.048ms",
        f"process {late} (root): restored 500us -> 2.048ms",
    ]
    assert [one.slice(pid) for pid in (serve, train, other, late)] == [DEFAULT] * 4


def test_what_somebody_else_has_set_is_left_and_told_once(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    one.set(pid, 5000)
    assert one.look(20) == [f"process {pid} (root) on GPU 0: set to 5ms by someone else; left alone"]
    assert one.look(20) == one.look(20) == []
    one.keeper.follow(policy("- {match: all, slice: 300us}\n"))
    assert one.look() == one.told(one.keeper.undo()) == []
    assert one.slice(pid) == 5000


def test_what_was_set_just_before_the_end_is_left_too(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    one.set(pid, 5000)
    assert one.keeper.undo() == []
    assert one.slice(pid) == 5000


def test_a_later_context_gets_the_slice_too(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    find = one.control.find_again

    def with_another(channels: Channels) -> Channels:
        found = find(channels)
        (group,) = found.compute
        # The simulated driver has one context per process: another client stands in for the second one.
        return Channels(pid=pid, started=found.started, groups=(*found.groups, _replaced(group, slice_us=DEFAULT)))

    one.control.find_again = with_another  # type: ignore[method-assign]
    one.control.read_slices = lambda channels: (DEFAULT,)  # type: ignore[method-assign]
    asked: list[int] = []
    one.control.set_slice = lambda channels, us: asked.append(channels.compute[0].client) or 0.0  # type: ignore[method-assign,func-returns-value]
    assert one.look(5) == [f"process {pid} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert asked == [1]


def test_a_process_with_many_contexts_takes_one_call(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    find, calls = one.control.find, []

    def with_many(pid: int, started: int | None = None, *, seconds: float = 10.0) -> Channels:
        (group,) = find(pid, started, seconds=seconds).compute
        groups = tuple(replace(group, client=number) for number in range(500))
        return Channels(pid=pid, started=started or 0, groups=groups)

    one.control.find = with_many  # type: ignore[method-assign,assignment]
    one.control.read_slices = lambda channels: (DEFAULT,) * len(channels.compute)  # type: ignore[method-assign]
    one.control.set_slice = lambda channels, us: calls.append(len(channels.compute)) or 0.0  # type: ignore[method-assign,func-returns-value]
    assert one.look() == [f"process {pid} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert calls == [500]


def test_a_slice_that_another_gpushare_sets_at_the_same_time_is_left(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    find = one.control.find

    def and_then(pid: int, started: int | None = None, *, seconds: float = 10.0) -> Channels:
        found = find(pid, started, seconds=seconds)
        one.control.set_slice(found, 4000)
        return found

    one.control.find = and_then  # type: ignore[method-assign,assignment]
    assert one.look() == []
    one.control.find = find  # type: ignore[method-assign]
    assert one.look(20) == [f"process {pid} (root) on GPU 0: set to 4ms by someone else; left alone"]
    one.keeper.undo()
    assert one.slice(pid) == 4000


def _replaced(group: Any, **more: Any) -> Any:
    return replace(group, client=1, **more)


def test_other_rules_are_followed(desk: Callable[..., Desk]) -> None:
    one = desk()
    train, serve = one.add(), one.add("python serve.py")
    one.look()
    one.keeper.follow(policy('- {match: {command: "*train*"}, slice: 300us}\n'))
    assert sorted(one.look()) == [
        f"process {train} (root) on GPU 0: 500us -> 300us (rule 3:3)",
        f"process {serve} (root) on GPU 0: restored 16ms -> 2.048ms",
    ]
    assert [one.slice(train), one.slice(serve)] == [300, DEFAULT]
    # The default is still known, though it was changed twice.
    one.keeper.undo()
    assert one.slice(train) == DEFAULT


def test_what_a_user_says_does_not_raise_on_a_host(desk: Callable[..., Desk]) -> None:
    one = desk('- {match: {command: "*"}, slice: 16ms}\n')
    pid = one.add(user="nobody")
    assert one.look() == []
    assert one.slice(pid) == DEFAULT


def test_the_cgroup_of_a_pod(desk: Callable[..., Desk]) -> None:
    one = desk("- {match: {cgroup: '/kubepods.slice/*'}, slice: 16ms}\n")
    path = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-abc.scope"
    pod = one.add(user="nobody", cgroup=path, cgroup_of_root=True)
    own = one.add(user="nobody", cgroup=path)
    one.look()
    assert [one.slice(pod), one.slice(own)] == [16_000, DEFAULT]


def test_clients_of_mps_are_skipped_by_name_once(desk: Callable[..., Desk]) -> None:
    one = desk("- {match: all, slice: 300us}\n")
    one.world.run("mps", "start").ok()
    one.world.client()
    (said, *server) = one.look()
    assert "skipped: it is a client or server of MPS: all clients of a server share one time-slice" in said
    assert all("of MPS" in text for text in server)
    assert one.look() == one.look(30) == []


def test_another_users_process_is_skipped_with_the_reason_once(desk: Callable[..., Desk]) -> None:
    one = desk("- {match: all, slice: 300us}\n")
    with one.world.file.changed() as state:
        state.fault_uid = 65534
    one = Desk(one.world, "- {match: all, slice: 300us}\n")
    theirs, ours = one.add(user="root"), one.add(user="nobody")
    assert sorted(one.look()) == [
        f"process {theirs} (root): skipped: it belongs to another user",
        f"process {ours} (nobody) on GPU 0: 2.048ms -> 300us (rule 3:3)",
    ]
    assert one.look() == []


@pytest.mark.parametrize(("fault", "said"), [("seccomp", "a sandbox forbids"), ("gvisor", "gVisor"), ("wsl", "WSL")])
def test_what_the_host_does_not_allow_is_said_once(fault: str, said: str, desk: Callable[..., Desk]) -> None:
    one = desk()
    one.add()
    with one.world.file.changed() as state:
        state.channel_fault = fault
    (told,) = one.look()
    assert said in told
    assert one.look() == one.look(60) == []


def test_a_process_that_ends_is_forgotten(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    admin.end_process(one.world.spec, pid)
    assert one.look() == one.told(one.keeper.undo()) == []
    record = keep_record(one.host)
    assert record is not None
    assert record.processes == ()


def test_a_gpu_that_is_lost_for_a_moment_forgets_nothing(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    one.world.fault("lost", gpu=0)
    assert one.look() == []
    one.world.clear()
    one.keeper.undo()
    assert one.slice(pid) == DEFAULT


def test_it_goes_on_when_the_driver_was_loaded_again(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = desk()
    restarts: list[int] = []
    monkeypatch.setattr(type(one.host.nvml), "restart", lambda _: restarts.append(1))
    one.world.fault("lost", gpu=0)
    for _ in range(19):
        assert one.look() == []
    assert restarts == [1]
    one.world.clear()
    pid = one.add()
    assert one.look() == [f"process {pid} (root) on GPU 0: 2.048ms -> 500us (rule 4:3)"]
    assert restarts == [1]


def test_a_full_disk_sets_nothing(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    one = desk()
    pid = one.add()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpushare.host.store.replace_file", full)
    (told,) = one.look()
    assert "No space left on device" in told
    assert one.slice(pid) == DEFAULT


# -- nobody keeps others waiting ---------------------------------------------------------------------


class Hostile:
    """A driver that takes its time for the processes of some users."""

    def __init__(self, desk: Desk, slow: Callable[[int], bool], takes: float) -> None:
        self._desk, self._slow, self._takes = desk, slow, takes
        self.asked: list[int] = []
        self._find = desk.control.find
        desk.control.find = self.find  # type: ignore[method-assign,assignment]

    def find(self, pid: int, started: int | None = None, *, seconds: float = 10.0) -> Channels:
        self.asked.append(pid)
        if self._slow(pid):
            self._desk.now += min(self._takes, seconds)
            if self._takes >= seconds:
                raise TimedOut(f"process {pid}: the driver does not answer", "wait")
        return self._find(pid, started)


@pytest.mark.parametrize("takes", [1.0, 1000.0])
def test_a_user_with_many_slow_processes_does_not_keep_others_waiting(desk: Callable[..., Desk], takes: float) -> None:
    one = desk()
    slow = {one.add(user="nobody") for _ in range(30)}
    hostile = Hostile(one, slow.__contains__, takes)
    for _ in range(3):
        one.look()
    ours = one.add()
    before = one.now
    one.look()
    # At once: at most the process that was begun before.
    assert hostile.asked[-1] == ours or ours in hostile.asked[-2:]
    assert one.slice(ours) == 500
    assert one.now - before <= 1.0 + 2.5


def test_the_work_of_a_look_is_bounded(desk: Callable[..., Desk]) -> None:
    one = desk()
    pids = {one.add() for _ in range(12)}
    hostile = Hostile(one, pids.__contains__, 0.3)
    one.look()
    assert len(hostile.asked) == 3
    for _ in range(4):
        one.look()
    assert {one.slice(pid) for pid in pids} == {500}


def test_a_process_that_never_answers_is_given_up(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    hostile = Hostile(one, lambda _: True, 1000.0)
    (told,) = one.look()
    assert told == f"process {pid} (root): skipped: the driver does not answer"
    assert [one.look(60) for _ in range(20)] == [[]] * 20
    assert len(hostile.asked) == 4


# -- after a crash -----------------------------------------------------------------------------------


def test_a_killed_keep_is_undone_by_the_next_one(desk: Callable[..., Desk]) -> None:
    killed = desk()
    train, serve, changed = killed.add(), killed.add("python serve.py"), killed.add()
    killed.look()
    killed.set(changed, 7000)
    one = desk()
    assert one.told(recover(one.host, one.control)) == [
        f"process {train} (root): restored 500us -> 2.048ms",
        f"process {serve} (root): restored 16ms -> 2.048ms",
    ]
    assert [one.slice(pid) for pid in (train, serve, changed)] == [DEFAULT, DEFAULT, 7000]
    assert recover(one.host, one.control) == []


@pytest.mark.parametrize("crash", ["set_slice", "find_again"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_call_is_undone(crash: str, after: bool, desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    one.keeper.follow(policy("- {match: all, slice: 300us}\n"))
    real = getattr(one.control, crash)

    def killed(*arguments: Any) -> None:
        if after:
            real(*arguments)
        raise SystemExit

    setattr(one.control, crash, killed)
    with pytest.raises(SystemExit):
        one.look()
    again = desk()
    recover(again.host, again.control)
    assert again.slice(pid) == DEFAULT


def test_a_process_with_a_recorded_pid_that_started_later_is_not_touched(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    with one.world.file.changed() as state:
        next(process for process in state.processes if process.pid == pid).started += 60
    assert recover(one.host, one.control) == []
    assert one.slice(pid) == 500


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
    ],
)
def test_a_broken_record_is_no_record(text: str, desk: Callable[..., Desk]) -> None:
    one = desk()
    one.add()
    one.look()
    (one.host.run_directory / "keep" / "keep.json").write_text(text)
    assert recover(one.host, one.control) == []


def test_the_record_names_what_was_set(desk: Callable[..., Desk]) -> None:
    one = desk()
    pid = one.add()
    one.look()
    record = keep_record(one.host)
    assert record is not None
    assert record.runs
    (kept,) = record.processes
    (kept_slice,) = kept.slices
    assert (kept.pid, kept.uid, kept_slice[2:]) == (pid, 0, (DEFAULT, 500, DEFAULT))
    assert kept_slice.handle == COMPUTE_GROUP
    path = one.host.run_directory / "keep" / "keep.json"
    assert json.loads(path.read_text())["schema"] == 1


# -- one keep per host -------------------------------------------------------------------------------


def test_there_is_one_keep_per_host(desk: Callable[..., Desk]) -> None:
    one = desk()
    with pytest.raises(InUse) as caught, only_one(one.host):
        pass
    assert caught.value.code == "keep_running"


def test_what_would_be_done_asks_no_driver(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    one = desk()
    train, serve, other = one.add(user="nobody"), one.add("serve"), one.add("x\ny\x1b[2J")

    def never(*_: object) -> None:
        raise GpushareError("the driver was asked", "do not")

    monkeypatch.setattr(ChannelControl, "find", never)
    found = {one.pid: (one.rule, one.slice_us, one.why) for one in verdicts(one.host, policy())}
    assert found == {train: ("4:3", 500, None), serve: ("3:3", 16_000, None), other: (None, None, None)}


@pytest.mark.parametrize(("failures", "left"), [(1, False), (9, True)])
def test_what_cannot_be_put_back_is_tried_again_and_stays_written_down(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, failures: int, left: bool
) -> None:
    one = desk()
    pid = one.add()
    one.look()
    real, count = ChannelControl.set_slice, [0]

    def failing(self: ChannelControl, channels: Channels, microseconds: int) -> Any:
        count[0] += 1
        if count[0] <= failures:
            raise OperationFailed("no", "none")
        return real(self, channels, microseconds)

    with monkeypatch.context() as patched:
        patched.setattr(ChannelControl, "set_slice", failing)
        events = one.keeper.undo()
    assert [event.kind for event in events] == ["skipped" if left else "restored"]
    assert one.keeper.left == ([pid] if left else [])
    record = keep_record(one.host)
    assert record is not None
    assert [kept.pid for kept in record.processes] == ([pid] if left else [])
    # The next one does it.
    recover(one.host, one.control)
    assert one.slice(pid) == DEFAULT


def test_a_slice_that_was_refused_is_not_written_down(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = desk()
    pid = one.add()

    def refused(*_: Any) -> None:
        raise OperationFailed("no", "none")

    monkeypatch.setattr(ChannelControl, "set_slice", refused)
    assert [line for line in one.look() if "skipped" in line]
    assert slice_records(one.host) == {}
    assert one.slice(pid) == DEFAULT
