"""Channel groups of other processes: found, probed, set, switched, and refused by name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import GpuLost, GpushareError, NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.base.typed import parse_typed, plain_form
from gpushare.connect import connect
from gpushare.gpu_models import model_of
from gpushare.host import channels as room
from gpushare.host.channels import Caller, ChannelControl, Channels, KernelFiles, Refused, answer
from gpushare.host.identity import identity_of
from gpushare.signals import Wakeups, signals_handled
from gpushare.sim import activity, admin, open_simulated
from gpushare.sim.channels import CHANNELS, COMPUTE_GROUP, SimulatedChannels, SimulatedFiles
from gpushare.sim.job import pace_of
from gpushare.sim.nvml_abi import Handle, HandleKind, Target
from gpushare.sim.state import SimulatedProcess, StateFile, now
from tests.sim import mps

SPEC = "sim:h200"
# A device that every machine has, in place of /dev/nvidiactl.
NODE, DEVICE = "/dev/null", (1, 3)


@pytest.fixture
def state_file() -> StateFile:
    return open_simulated(SPEC).state_file


@pytest.fixture
def pid(state_file: StateFile) -> int:
    return admin.add_process(SPEC)


@pytest.fixture
def control(state_file: StateFile) -> SimulatedChannels:
    return SimulatedChannels(state_file)


@contextlib.contextmanager
def fault(state_file: StateFile, name: str | None = None, **statuses: int) -> Iterator[None]:
    with state_file.changed() as state:
        state.channel_fault = name
        state.channel_statuses = {hex(getattr(room, call)): status for call, status in statuses.items()}
    yield


def process_of(state_file: StateFile, pid: int) -> SimulatedProcess:
    state = state_file.read()
    return next(process for process in state.processes if process.pid == pid)


# -- a scan ------------------------------------------------------------------------------------------------------------


def test_a_scan_finds_the_compute_group_by_the_classes_on_its_channels(state_file: StateFile, pid: int) -> None:
    files = SimulatedFiles(state_file)
    reply = answer(files, {"do": "find", "pid": pid, "started": None})
    assert not files._opened
    assert process_of(state_file, pid).slices == {}
    found = SimulatedChannels(state_file).find(pid)
    # Its three copy groups are left alone.
    (compute,) = found.groups
    assert len(reply["groups"]) == 1
    assert (compute.slice_us, compute.channels) == (2048, CHANNELS)
    assert compute.gpu.startswith("GPU-")
    assert not found.under_mps


def test_a_scan_tries_the_newest_clients_first(state_file: StateFile) -> None:
    newest = room._newest_client(SimulatedFiles(state_file))
    assert newest == 0x200
    order = list(room._client_handles(newest))
    assert order[:3] == [room.CLIENT_BASE + at for at in (0x200, 0x1FF, 0x1FE)]
    # Behind the lowest come the highest: handles are given out round and round.
    assert order[0x200:0x202] == [room.CLIENT_BASE, room.CLIENT_BASE + room.CLIENT_COUNT - 1]
    assert sorted(order) == list(room._client_handles(None))
    assert len(order) == room.CLIENT_COUNT


def test_another_look_finds_channels_made_since_and_does_not_probe(
    control: ChannelControl, state_file: StateFile, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpushare.sim import channels as simulated

    found = control.find(pid)
    made = COMPUTE_GROUP + 0x300
    more = {**simulated._OBJECTS, made: (0xC86F, COMPUTE_GROUP), made + 1: (0xCBC0, made)}
    monkeypatch.setattr(simulated, "_OBJECTS", more)
    with fault(state_file, None, SET_TIMESLICE=0x56):
        again = control.find_again(found)
    assert again.groups[0].channels == (*CHANNELS, made)
    admin.end_process(SPEC, pid)
    assert refusal(lambda: control.find_again(found)) == (NotFound, "process_gone")


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "1"},
        {"pid": -1},
        {"started": True},
        {"groups": 3},
        {"groups": [{"handle": 1}]},
        {"groups": [{"client": 1.5}]},
    ],
)
def test_a_record_that_is_something_else_is_refused(control: ChannelControl, pid: int, change: dict[str, Any]) -> None:
    for raw in ({**plain_form(control.find(pid)), **change}, {}):
        with pytest.raises(ValueError):
            parse_typed(Channels, raw)


def test_groups_without_a_compute_object_are_refused(
    state_file: StateFile, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpushare.sim import channels as simulated

    shown = {handle: one for handle, one in simulated._OBJECTS.items() if one[0] != 0xCBC0}
    monkeypatch.setattr(simulated, "_OBJECTS", shown)
    monkeypatch.setattr(room, "SCAN_SECONDS", 0.3)
    assert refusal(lambda: SimulatedChannels(state_file).find(pid)) == (TimedOut, "scan_incomplete")


# -- slices ------------------------------------------------------------------------------------------------------------


def test_a_slice_is_set_read_back_and_put_back(control: ChannelControl, state_file: StateFile, pid: int) -> None:
    found = control.find(pid)
    control.set_slice(found, 500)
    # Another command sees it, by the record.
    again = parse_typed(Channels, json.loads(json.dumps(plain_form(found))))
    assert (again.pid, again.started, again.groups) == (found.pid, found.started, found.groups)
    assert SimulatedChannels(state_file).read_slices(again) == (500,)
    assert SimulatedChannels(state_file).find(pid).groups[0].slice_us == 500
    control.restore_slices(found)
    assert control.read_slices(found) == (2048,)


def test_slices_are_shares_of_a_simulated_gpu(control: ChannelControl, state_file: StateFile, pid: int) -> None:
    other = admin.add_process(SPEC)
    control.set_slice(control.find(other), 1024)
    state = state_file.read()
    assert state is not None
    speeds = [pace_of(state, process_of(state_file, one), 100).rate for one in (pid, other)]
    assert speeds == pytest.approx([2 / 3, 1 / 3])


class Forgetful(SimulatedFiles):
    """A driver that takes every slice and keeps none."""

    def ioctl(self, file: int, request: int, argument: bytearray, parameters: bytearray) -> None:
        super().ioctl(file, request, argument, parameters)
        if int.from_bytes(argument[8:12], "little") == room.GET_TIMESLICE:
            parameters[:8] = (2048).to_bytes(8, "little")


def test_a_driver_that_keeps_no_slice_fails_the_probe(state_file: StateFile, pid: int) -> None:
    reply = answer(Forgetful(state_file), {"do": "find", "pid": pid, "started": None})
    assert reply["refused"] == "probe"
    assert "2.047ms read as 2.048ms" in reply["text"]


class Failing(SimulatedFiles):
    """A driver that fails at one call, or from it on."""

    def __init__(self, state_file: StateFile, command: int, at: int, status: int, *, on: bool = False) -> None:
        super().__init__(state_file)
        self.command, self.left, self.status, self.on = command, at, status, on

    def ioctl(self, file: int, request: int, argument: bytearray, parameters: bytearray) -> None:
        if int.from_bytes(argument[8:12], "little") == self.command:
            self.left -= 1
            if self.left == 0 or (self.on and self.left < 0):
                argument[28:32] = self.status.to_bytes(4, "little")
                return
        super().ioctl(file, request, argument, parameters)


def request(do: str, found: Channels, *, times: int = 1, **more: object) -> dict[str, Any]:
    made = room._request(do, found)
    return {**made, "groups": made["groups"] * times, **more}


def test_when_one_group_fails_the_others_get_their_slice_back(
    control: ChannelControl, state_file: StateFile, pid: int
) -> None:
    found = control.find(pid)
    files = Failing(state_file, room.SET_TIMESLICE, 2, 0x40)
    assert answer(files, request("set", found, times=2, microseconds=500))["status"] == 0x40
    assert control.read_slices(found) == (2048,)
    assert not files._opened


def test_a_slice_that_cannot_be_put_back_is_told(control: ChannelControl, state_file: StateFile, pid: int) -> None:
    found = control.find(pid)
    files = Failing(state_file, room.SET_TIMESLICE, 2, 0x40, on=True)
    assert answer(files, request("set", found, times=2, microseconds=500))["refused"] == "half_done"
    assert control.read_slices(found) == (500,)
    # Nothing was changed by the only call that was refused.
    files = Failing(state_file, room.SET_TIMESLICE, 1, 0x40, on=True)
    assert answer(files, request("set", found, microseconds=700))["refused"] == "failed"


def test_another_slice_than_the_one_set_that_cannot_be_put_back_is_told(
    control: ChannelControl, state_file: StateFile, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = control.find(pid)
    monkeypatch.setattr(room._File, "set_slice", lambda *_: 250)
    assert answer(SimulatedFiles(state_file), request("set", found, microseconds=500))["refused"] == "half_done"


# -- off and on --------------------------------------------------------------------------------------------------------


def busy(state_file: StateFile, pid: int) -> bool:
    return activity.is_busy(process_of(state_file, pid), now())


def test_channels_that_are_off_do_nothing_until_they_are_on(
    control: ChannelControl, state_file: StateFile, pid: int
) -> None:
    found = control.find(pid)
    control.disable(found)
    assert not busy(state_file, pid)
    assert process_of(state_file, pid).channels_off == list(CHANNELS)
    state = state_file.read()
    target = Target(Handle(HandleKind.GPU, 0), state.gpus[0], model_of(state.gpus[0].model))
    assert activity.utilization(state, target) == 0
    assert pace_of(state, process_of(state_file, pid), 50).rate == 0
    control.enable(found)
    control.enable(found)
    assert busy(state_file, pid)


@pytest.fixture
def four_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call have four channels at most, so that those of a process take two."""
    real = room._batches

    def of_four(groups: Any) -> list[Any]:
        return [
            batch._replace(channels=batch.channels[at : at + 4])
            for batch in real(groups)
            for at in range(0, len(batch.channels), 4)
        ]

    monkeypatch.setattr(room, "_batches", of_four)


@pytest.mark.usefixtures("four_per_call")
@pytest.mark.parametrize(
    ("status", "on", "refused", "off"),
    [
        (0x40, False, "failed", []),
        (0x40, True, "half_done", list(CHANNELS[:4])),
        # What has gone meanwhile needs no undo.
        (room.OBJECT_NOT_FOUND, True, "stale", list(CHANNELS[:4])),
    ],
)
def test_when_one_call_fails_what_was_off_is_on_again_or_told(
    control: ChannelControl, state_file: StateFile, pid: int, status: int, on: bool, refused: str, off: list[int]
) -> None:
    found = control.find(pid)
    files = Failing(state_file, room.DISABLE_CHANNELS, 2, status, on=on)
    reply = answer(files, request("off", found))
    assert (reply["refused"], reply["status"]) == (refused, status)
    assert process_of(state_file, pid).channels_off == off
    assert busy(state_file, pid) is not bool(off)
    assert not files._opened


def test_of_more_than_64_channels_each_call_has_64() -> None:
    file: Any = None
    compute = {"descriptor": 5, "client": 1, "gpu": None, "classes": (), "slice_us": None}
    group = file, room.Group(**compute, handle=2, subdevice=3, channels=tuple(range(150)))
    other = file, room.Group(**compute, handle=9, subdevice=4, channels=tuple(range(3)))
    batches = room._batches([group, group, other])
    assert [(batch.subdevice, len(batch.channels)) for batch in batches] == [*[(3, 64)] * 4, (3, 44), (4, 3)]


def test_a_channel_that_has_gone_stops_a_pause_and_hinders_no_resume(
    control: ChannelControl, state_file: StateFile, pid: int
) -> None:
    found = control.find(pid)
    record = plain_form(found)
    record["groups"][0]["channels"] = [*CHANNELS, COMPUTE_GROUP + 0x700]
    more = parse_typed(Channels, record)
    assert refusal(lambda: control.disable(more)) == (NotFound, "stale_channels")
    assert busy(state_file, pid)
    control.disable(found)
    control.enable(more)
    assert busy(state_file, pid)


def test_a_context_that_has_gone_hinders_no_resume(control: ChannelControl, state_file: StateFile, pid: int) -> None:
    found = control.find(pid)
    gone = replace(found.groups[0], handle=COMPUTE_GROUP + 0x900)
    both = replace(found, groups=(gone, *found.groups))
    none = replace(found, groups=(gone,))
    assert refusal(lambda: control.disable(both)) == (NotFound, "stale_channels")
    control.disable(found)
    assert refusal(lambda: control.enable(none)) == (NotFound, "stale_channels")
    control.enable(both)
    assert busy(state_file, pid)


def test_under_mps_one_clients_channels_stop_all_clients_and_the_scan_says_mps(sim_dir: Path) -> None:
    host = mps.new(sim_dir)
    host.start()
    first, second = host.client(), host.client()
    control = host.host.open_channels()
    found = control.find(first.pid)
    assert found.under_mps
    control.disable(found)
    assert not any(activity.is_busy(host.process(one.pid), now()) for one in (first, second))
    control.enable(found)
    assert first.mps_server is not None
    server = control.find(first.mps_server)
    assert not server.under_mps
    control.set_slice(server, 1000)
    outside = admin.add_process(SPEC)
    assert pace_of(host.state, host.process(outside), 100).rate == pytest.approx(2048 / 3048)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> tuple[type[GpushareError], str]:
    with pytest.raises(GpushareError) as caught:
        call()
    assert caught.value.hint
    assert "{" not in caught.value.message + caught.value.hint
    return type(caught.value), caught.value.code


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        *((status, NotSupported, "driver_refuses") for status in (0x56, 0x1B, 0x24)),
        *((status, NotFound, "stale_channels") for status in (0x57, 0x33, 0x23)),
        (0x0F, GpuLost, "gpu_lost"),
        *((status, OperationFailed, "driver_failed") for status in (0x40, 0x99)),
    ],
)
@pytest.mark.parametrize("call", ["SET_TIMESLICE", "DISABLE_CHANNELS"])
def test_a_status_is_told_by_number_and_name(
    control: ChannelControl, state_file: StateFile, pid: int, call: str, status: int, kind: type, code: str
) -> None:
    found = control.find(pid)
    act = (lambda: control.set_slice(found, 500)) if call == "SET_TIMESLICE" else (lambda: control.disable(found))
    with fault(state_file, None, **{call: status}):
        assert refusal(act) == (kind, code)
    if kind is not GpuLost:
        with pytest.raises(GpushareError, match=f"{status:#04x}"):
            act()
    assert busy(state_file, pid)


def test_the_probe_names_the_call_that_the_driver_refuses(
    control: ChannelControl, state_file: StateFile, pid: int
) -> None:
    with fault(state_file, None, SET_TIMESLICE=0x56), pytest.raises(NotSupported) as caught:
        control.find(pid)
    assert "SET_TIMESLICE with 0x56" in caught.value.message


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        *((name, NotSupported, name) for name in ("no_pidfd_getfd", "gvisor", "wsl", "seccomp", "ptrace_scope")),
        ("no_ptrace", NotSupported, "no_ptrace"),
        ("forged", NotSupported, "forged_descriptor"),
        ("hang", TimedOut, "driver_hangs"),
    ],
)
def test_what_is_not_supported_here_has_a_name(
    control: ChannelControl, state_file: StateFile, pid: int, name: str, kind: type, code: str
) -> None:
    with fault(state_file, name):
        assert refusal(lambda: control.find(pid)) == (kind, code)


def test_another_users_process_needs_root(control: ChannelControl, state_file: StateFile, pid: int) -> None:
    with state_file.changed() as state:
        state.fault_uid = 61000
    assert refusal(lambda: control.find(pid)) == (NoPermission, "other_user")


def test_a_process_without_a_context_and_none_at_all(control: ChannelControl, state_file: StateFile, pid: int) -> None:
    holder = admin.add_process(SPEC, holder=True)
    assert refusal(lambda: control.find(holder)) == (NotFound, "no_context")
    assert refusal(lambda: control.find(pid + 100)) == (NotFound, "process_gone")
    assert refusal(lambda: control.find(os.getpid())) == (NotFound, "no_context")


def test_a_process_that_ends_meanwhile_and_one_that_got_its_pid(
    control: ChannelControl, state_file: StateFile, pid: int
) -> None:
    found = control.find(pid)
    with state_file.changed() as state:
        state.processes[0].started += 5
    assert refusal(lambda: control.set_slice(found, 500)) == (NotFound, "process_gone")
    assert refusal(lambda: control.find(pid, found.started)) == (NotFound, "process_gone")
    admin.end_process(SPEC, pid)
    assert refusal(lambda: control.enable(found)) == (NotFound, "process_gone")


# -- the kernel's own descriptors --------------------------------------------------------------------------------------


class Counted(KernelFiles):
    """Real processes and descriptors; ioctls are answered by the simulation, and counted."""

    def __init__(self, simulated: SimulatedFiles | None, node: str, device: tuple[int, int]) -> None:
        super().__init__(node, device)
        self.simulated, self.calls, self.pid = simulated, 0, 0

    def open_control_node(self) -> int | None:
        return None

    def sees_host_pids(self) -> bool:
        return True

    def prepared_ioctl(
        self, file: int, request: int, argument: bytearray, parameters: bytearray
    ) -> Callable[[], object]:
        return lambda: self.ioctl(file, request, argument, parameters)

    def ioctl(self, file: int, request: int, argument: bytearray, parameters: bytearray) -> None:
        self.calls += 1
        assert room._is_device(file, DEVICE)
        token = self.simulated.new_descriptor(self.pid)
        self.simulated.ioctl(token, request, argument, parameters)
        self.simulated.close(token)


@contextlib.contextmanager
def running(*opened: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has files open, and wait until it has."""
    code = (
        "import os, sys, time\nfor path in sys.argv[1:]: os.open(path, os.O_RDWR)\n"
        "os.write(1, b'ready\\n'); time.sleep(600)"
    )
    argv = [sys.executable, "-S", "-c", code, *opened]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def real(state_file: StateFile, pid: int) -> Counted:
    """Put a real process on the simulated GPU."""
    started = identity_of(pid)
    with state_file.changed() as state:
        state.processes.append(
            SimulatedProcess(
                pid=pid, real=False, gpu_uuid=state.gpus[0].uuid, name="python", uid=0, started=started.started
            )
        )
    files = Counted(SimulatedFiles(state_file), NODE, DEVICE)
    files.pid = pid
    return files


@pytest.mark.parametrize("opened", [(NODE,), (NODE, NODE)], ids=["one", "two of one file"])
def test_a_real_descriptor_is_duplicated_checked_used_and_closed(
    state_file: StateFile, opened: tuple[str, ...]
) -> None:
    with running(*opened) as child:
        files = real(state_file, child.pid)
        before = os.listdir("/proc/self/fd")
        reply = answer(files, {"do": "find", "pid": child.pid, "started": None})
        assert len(reply["groups"]) == 1
        found = parse_typed(Channels, {"pid": child.pid, "started": reply["started"], "groups": reply["groups"]})
        assert answer(files, request("set", found, microseconds=300)) == {}
        assert process_of(state_file, child.pid).slices == {"compute": 300}
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_pid_of_another_process_now_is_refused_before_any_call(state_file: StateFile) -> None:
    with running(NODE) as child:
        identity = identity_of(child.pid)
        files = Counted(None, NODE, DEVICE)
        for started in (identity.started - 1, 0):
            reply = answer(files, {"do": "find", "pid": child.pid, "started": started})
            assert reply["refused"] == "gone"
    assert answer(files, {"do": "find", "pid": child.pid, "started": None})["refused"] == "gone"
    assert answer(files, {"do": "find", "pid": 1 << 40, "started": None})["refused"] == "gone"
    assert files.calls == 0


@pytest.mark.parametrize(("opened", "device"), [("regular", (195, 255)), ("/dev/zero", (195, 255)), (NODE, (1, 5))])
def test_a_forged_descriptor_gets_no_ioctl(tmp_path: Path, opened: str, device: tuple[int, int]) -> None:
    if opened == "regular":
        opened = str(tmp_path / "nvidiactl")
        Path(opened).touch()
    with running(opened) as child:
        files = Counted(None, opened, device)
        before = len(os.listdir("/proc/self/fd"))
        reply = answer(files, {"do": "find", "pid": child.pid, "started": None})
        assert reply["refused"] == "forged"
        assert files.calls == 0
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_became_another_file_gets_no_ioctl(state_file: StateFile) -> None:
    with running(NODE) as child:
        files = real(state_file, child.pid)
        reply = answer(files, {"do": "find", "pid": child.pid, "started": None})
        for group in reply["groups"]:
            # Its stdin is a pipe; 99 is closed.
            group["descriptor"] = 0
        found = parse_typed(Channels, {"pid": child.pid, "started": reply["started"], "groups": reply["groups"]})
        calls = files.calls
        assert answer(files, request("off", found))["refused"] == "forged"
        made = request("off", found)
        made["groups"][0] = {**made["groups"][0], "descriptor": 99}
        assert answer(files, made)["refused"] == "stale"
        assert files.calls == calls


def test_a_forked_worker_has_its_parents_context(state_file: StateFile) -> None:
    code = (
        f"import os, time\nos.open({NODE!r}, os.O_RDWR)\n"
        "pid = os.fork()\nif pid: os.write(1, b'%d\\n' % pid)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        try:
            if room._syscall(room._SYS_KCMP.get(os.uname().machine, 0), parent.pid, worker, 0, 0, 0)[0] < 0:
                pytest.skip("this kernel has no kcmp")
            files = real(state_file, parent.pid)
            assert answer(files, {"do": "find", "pid": worker, "started": None})["refused"] == "inherited"
            assert files.calls == 0
            assert "groups" in answer(files, {"do": "find", "pid": parent.pid, "started": None})
        finally:
            os.kill(worker, signal.SIGKILL)
            parent.kill()


def test_a_context_that_the_driver_counts_for_another_process_is_that_ones(state_file: StateFile) -> None:
    # Its parent ended: nobody else has the file any more, but the driver knows who made the client.
    with running(NODE) as owner, running(NODE) as worker:
        files = real(state_file, owner.pid)
        reply = answer(files, {"do": "find", "pid": worker.pid, "started": None})
        assert reply["refused"] == "inherited"


def test_in_a_container_the_drivers_pids_say_nothing(state_file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "sees_host_pids", lambda _self: False)
    with running(NODE) as owner, running(NODE) as child:
        files = real(state_file, owner.pid)
        assert "groups" in answer(files, {"do": "find", "pid": child.pid, "started": None})


@pytest.mark.parametrize(
    ("own", "uid", "scope", "code"),
    [
        (errno.EPERM, 0, "", "seccomp"),
        (errno.ENOSYS, 0, "", "no_pidfd_getfd"),
        (0, 4242, "0", "other_user"),
        (0, None, "1", "ptrace_scope"),
        (0, None, "3", "ptrace_scope"),
        (0, None, "0", "no_ptrace"),
        (0, None, "", "no_ptrace"),
    ],
)
def test_why_the_kernel_refuses_a_descriptor(
    monkeypatch: pytest.MonkeyPatch, own: int, uid: int | None, scope: str, code: str
) -> None:
    asked: list[int] = []

    def syscall(number: int, *_: int) -> tuple[int, int]:
        assert number == room._SYS_PIDFD_GETFD
        asked.append(number)
        if len(asked) > 1 and own == 0:
            return os.open("/dev/null", os.O_RDONLY), 0
        return -1, errno.EPERM if len(asked) == 1 else own

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(room, "_syscall", syscall)
    monkeypatch.setattr(room, "real_uid", lambda _pid: uid or 1000)
    monkeypatch.setattr(room, "read_text", lambda path: scope if "yama" in path else "")
    with (
        running(NODE) as child,
        KernelFiles(NODE, DEVICE).process(child.pid, None) as process,
        pytest.raises(Refused) as caught,
    ):
        process.duplicate(3)
    assert caught.value.code == code


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSYS, "no_pidfd_getfd"), (errno.EPERM, "seccomp")])
def test_a_kernel_or_sandbox_without_pidfd_open(monkeypatch: pytest.MonkeyPatch, number: int, code: str) -> None:
    def none(_pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", none)
    assert answer(KernelFiles(), {"do": "find", "pid": 1, "started": None})["refused"] == code


@pytest.mark.parametrize(
    ("number", "kernel", "scope", "code"),
    [
        (errno.EPERM, "", "", "seccomp"),
        (errno.ENOSYS, "", "", "no_pidfd_getfd"),
        (0, "6.6.87-microsoft-standard-WSL2", "", "wsl"),
        (0, "", "3", "ptrace_scope"),
        (0, "", "1", None),
        (0, "", "", None),
    ],
)
def test_what_the_kernel_tells_without_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, kernel: str, scope: str, code: str | None
) -> None:
    own: list[int] = []

    def syscall(*_: int) -> tuple[int, int]:
        own.append(os.open("/dev/null", os.O_RDONLY) if number == 0 else -1)
        return own[-1], number

    monkeypatch.setattr(room, "_syscall", syscall)
    monkeypatch.setattr(
        room, "read_text", lambda path: kernel if "osrelease" in path else scope if "yama" in path else ""
    )
    reply = answer(KernelFiles(str(tmp_path / "nvidiactl"), DEVICE), {"do": "check", "pid": os.getpid()})
    assert reply.get("refused") == code
    for file in own:
        if file >= 0:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(file)


def test_gvisor_and_wsl_are_told_by_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "/proc/version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016",
        "/proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2",
    }
    monkeypatch.setattr(room, "read_text", lambda path: said.get(path, ""))
    assert room._in_gvisor()
    assert answer(KernelFiles(), {"do": "find", "pid": os.getpid(), "started": None})["refused"] == "wsl"


def test_an_ioctl_that_the_kernel_refuses_is_told(state_file: StateFile) -> None:
    class Sandboxed(Counted):
        def ioctl(self, file: int, request: int, argument: bytearray, parameters: bytearray) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with running(NODE) as child:
        reply = answer(Sandboxed(None, NODE, DEVICE), {"do": "find", "pid": child.pid, "started": None})
    assert (reply["refused"], reply["text"]) == ("ioctl", "Invalid argument")


# -- the child process -----------------------------------------------------------------------------------------------------


def test_the_real_child_answers_inherits_nothing_and_ends() -> None:
    with running() as child, ChannelControl() as control:
        assert refusal(lambda: control.find(child.pid)) == (NotFound, "no_context")
        helper = control._caller._child
        assert helper is not None
        # 3 is the socket.
        assert sorted(os.listdir(f"/proc/{helper}/fd")) == ["0", "1", "2", "3"]
        assert {os.readlink(f"/proc/{helper}/fd/{number}") for number in range(3)} == {os.devnull}
        assert os.readlink(f"/proc/{helper}/cwd") == "/"
        assert os.getsid(helper) == helper
        assert refusal(lambda: control.find(child.pid)) == (NotFound, "no_context")
        assert control._caller._child == helper
    assert not Path(f"/proc/{helper}").exists()


def _answers(text: bytes) -> Callable[[int], None]:
    """Return a child that answers a request with this text."""

    def work(channel: int) -> None:
        os.read(channel, 9999)
        os.write(channel, text)

    return work


def _floods(channel: int) -> None:
    while True:
        os.write(channel, bytes(65536))


@pytest.mark.parametrize(
    ("work", "kind", "stable"),
    [
        (lambda _: time.sleep(600), TimedOut, "driver_hangs"),
        (lambda _: None, OperationFailed, "helper_ended"),
        (_answers(b"what\n"), OperationFailed, "helper_ended"),
        (_answers(b"[]\n"), OperationFailed, "helper_ended"),
        (_floods, OperationFailed, "helper_ended"),
    ],
    ids=["hangs", "ends", "no JSON", "no object", "floods"],
)
def test_a_child_that_does_not_answer_is_ended(work: Callable[[int], None], kind: type, stable: str) -> None:
    caller = Caller(work)
    for _ in range(2):
        caller.start()
        child = caller._child
        with pytest.raises(GpushareError) as caught:
            caller.ask({"do": "find", "pid": 1}, 0.5 if stable == "driver_hangs" else 60)
        assert (type(caught.value), caught.value.code) == (kind, stable)
        assert caller._child is None
        assert not Path(f"/proc/{child}").exists()


def test_ctrl_c_lets_the_child_finish_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller()
    started: list[Any] = []

    def interrupted(request: Any, deadline: float) -> Any:
        started.append(caller._child)
        raise KeyboardInterrupt

    monkeypatch.setattr(caller, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        caller.ask({"do": "find", "pid": 1}, 60)
    # Not killed: it ends by itself, since its socket is closed.
    assert os.waitpid(started[0], 0) == (started[0], 0)


def test_a_ctrl_c_right_after_the_fork_is_told_once_and_ends_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    new_session = os.setsid

    def interrupted() -> None:
        """Press Ctrl-C while the child is still in the session of gpushare."""
        os.kill(os.getpid(), signal.SIGINT)
        new_session()

    monkeypatch.setattr(os, "setsid", interrupted)
    caller = Caller()
    with Wakeups([signal.SIGINT]) as wakeups:
        assert caller.ask({"do": "find", "pid": 0, "started": None}, 60)["refused"]
        assert wakeups.wait(0.0) == []
    caller.close()


def test_a_signal_that_gpushare_handles_ends_the_child() -> None:
    caller = Caller()
    with signals_handled([signal.SIGTERM], lambda *_: None):
        caller.ask({"do": "find", "pid": 0, "started": None}, 60)
        child = caller._child
        assert child is not None
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0) == (child, signal.SIGTERM)
        # Another one answers the next request.
        assert caller.ask({"do": "find", "pid": 0, "started": None}, 60)["refused"]
    caller.close()


def test_a_child_that_was_started_before_gets_the_first_request() -> None:
    caller = Caller()
    caller.start()
    started = caller._child
    assert caller.ask({"do": "find", "pid": 0, "started": None}, 60)["refused"]
    caller.start()
    assert started is not None
    assert caller._child == started
    caller.close()
    assert not Path(f"/proc/{started}").exists()


def test_a_child_that_cannot_be_started_shows_with_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", refuse)
    with ChannelControl() as control:
        control.start()
        with pytest.raises(OperationFailed, match="Cannot allocate memory") as caught:
            control.find(1)
    assert "free -h" in caught.value.hint


def test_an_error_inside_the_child_is_an_answer(state_file: StateFile) -> None:
    control = ChannelControl(lambda request, seconds: {"refused": "internal", "text": "KeyError: 'do'", "status": None})
    assert refusal(lambda: control.find(1)) == (OperationFailed, "helper_failed")


def test_a_host_opens_its_channels(pid: int) -> None:
    with connect(SPEC).open_channels() as control:
        assert control.find(pid).groups
    with connect("local").open_channels() as local:
        assert type(local) is ChannelControl
