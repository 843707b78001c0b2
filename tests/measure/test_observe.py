"""Observing a simulated host whose load changes: the clock is the test's own, nothing waits."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import DriverNotLoaded, GpushareError, NotFound, OperationFailed
from gpushare.base.selection import select
from gpushare.base.units import GIB
from gpushare.cli.options import Ended
from gpushare.connect import connect
from gpushare.host.activity import ActivityRecorder
from gpushare.host.host import Host
from gpushare.host.nvml import NvmlReader
from gpushare.measure.observe import Clock, Sampler, header_for, observe
from gpushare.measure.recording import ProcessUse, Recording, RecordingFile, Samples, read_recording, workloads_of
from gpushare.memory.peaks import find_profile
from gpushare.mps.control import SERVER_PROGRAM
from gpushare.sim import admin
from gpushare.sim.state import SimulatedHostState, StateFile, parse_spec
from tests.cli.drive import World
from tests.errors import fails
from tests.host.test_nvml import Altered

Events = Mapping[int, Callable[[], Any]]


@dataclass
class FakeTime:
    """A clock that moves when somebody sleeps; ``events`` happen before the N-th sleep."""

    events: Events = field(default_factory=dict)
    time: float = 0.0
    slept: list[float] = field(default_factory=list)
    # How long the looks take that follow a sleep, by its number.
    slow: Mapping[int, float] = field(default_factory=dict)

    def sleep(self, seconds: float) -> None:
        number = len(self.slept)
        self.slept.append(seconds)
        if number in self.events:
            self.events[number]()
        self.time += seconds

    def monotonic(self) -> float:
        return self.time

    @property
    def clock(self) -> Clock:
        return Clock(monotonic=self.monotonic, wall=lambda: 1000.0 + self.time, sleep=self.sleep)


def recorded(
    host: Host | str, path: Path, *, seconds: float = 10.0, interval: float = 1.0, events: Events | None = None
) -> Recording:
    """Observe a host for some of the fake clock's seconds; what is read back must be what was summed up."""
    found = connect(host) if isinstance(host, str) else host
    times = FakeTime(events or {})
    header = header_for(found, None, interval, times.clock)
    with RecordingFile(path / "r.jsonl", header) as file:
        recording = observe(found, header, file, seconds=seconds, clock=times.clock)
    assert read_recording(path / "r.jsonl") == recording
    return recording


def state(spec: str, change: Callable[[SimulatedHostState], Any]) -> None:
    """Change the state of a simulated host by hand."""
    with StateFile(parse_spec(spec).text).changed() as found:
        change(found)


def use_of(recording: Recording, pid: int) -> ProcessUse:
    (use,) = [use for use in recording.processes if use.process.pid == pid]
    return use


def test_a_changing_load_is_summed_up(tmp_path: Path) -> None:
    pid = admin.add_process("sim:h200", memory_bytes=3 * GIB, sm_percent=0, user="root")

    def work() -> None:
        state("sim:h200", lambda found: setattr(found.processes[0], "sm_percent", 80))

    recording = recorded("sim:h200", tmp_path, events={5: work})
    (gpu,) = recording.gpus
    assert (recording.samples, recording.seconds, recording.reason, recording.missed) == (10, 10.0, "finished", 0)
    assert gpu.source == "gpm"
    # Five idle seconds, one in which it began (GPM averages over it), four busy ones.
    assert (gpu.sm.mean, gpu.sm.max) == (36.0, 80.0)
    assert gpu.busy_share == 0.5
    use = use_of(recording, pid)
    assert (use.process.name, use.process.user, use.memory_peak_bytes) == ("python3", "root", 3 * GIB)
    assert (use.sm.mean, use.source) == (36.0, "gpm")
    (workload,) = workloads_of(recording)
    assert (workload.pattern, workload.activity.p95) == ("bursty", 80.0)


def test_without_gpm_utilization_stands_in(tmp_path: Path) -> None:
    pid = admin.add_process("sim:t4", sm_percent=30)
    recording = recorded("sim:t4", tmp_path)
    assert recording.gpus[0].source == use_of(recording, pid).source == "utilization"
    assert recording.gpus[0].sm is None
    assert recording.gpus[0].activity is not None
    assert recording.gpus[0].activity.mean == 30.0


def test_processes_come_and_go(tmp_path: Path) -> None:
    pids: dict[str, int] = {"first": admin.add_process("sim:h200", sm_percent=10)}

    def second() -> None:
        pids["second"] = admin.add_process("sim:h200", sm_percent=40, memory_bytes=2 * GIB)

    events = {3: second, 6: lambda: admin.end_process("sim:h200", pids["first"])}
    recording = recorded("sim:h200", tmp_path, events=events)
    first, late = use_of(recording, pids["first"]), use_of(recording, pids["second"])
    assert (first.seen_from_seconds, first.seen_to_seconds, first.samples) == (1.0, 6.0, 6)
    assert (late.seen_from_seconds, late.seen_to_seconds, late.samples) == (4.0, 10.0, 7)
    # Whose SMs they were is known while one was alone: 3 seconds of the first, 4 of the second.
    assert (first.sm.samples, late.sm.samples) == (3, 4)
    assert [
        (workload.process.pid, workload.seen_from_seconds, workload.seen_to_seconds)
        for workload in workloads_of(recording)
    ] == [(pids["first"], 1.0, 6.0), (pids["second"], 4.0, 10.0)]
    assert (first.utilization.samples, first.utilization.mean) == (6, 10.0)


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    pid = admin.add_process("sim:h200", sm_percent=10)

    def again() -> None:
        def change(found: SimulatedHostState) -> None:
            found.processes[0].started += 100
            found.processes[0].name = "other"

        state("sim:h200", change)

    recording = recorded("sim:h200", tmp_path, events={4: again})
    uses = [use for use in recording.processes if use.process.pid == pid]
    assert [(use.process.name, use.samples) for use in uses] == [("python3", 4), ("other", 6)]


def test_a_process_that_cannot_be_described_any_more_stays_itself(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = admin.add_process("sim:h200")
    events = {4: lambda: monkeypatch.setattr(type(host.processes), "describe", lambda *_: None)}
    recording = recorded(host, tmp_path, events=events)
    assert use_of(recording, pid).samples == 10


def test_a_process_between_two_looks_is_seen_by_its_work(tmp_path: Path) -> None:
    """NVML still has a sample of it when it has left the lists."""
    calls: list[int] = []

    def utilization(_handle: Any, rows: Any, count: Any, since: Any) -> int:
        assert since.value >= 900 * 1_000_000
        calls.append(since.value)
        if len(calls) != 4:
            return 6
        for place, (pid, percent) in enumerate([(4242, 90), (4242, 70), (0, 9), (77, 4_000)]):
            rows[place].pid, rows[place].smUtil, rows[place].timeStamp = pid, percent, since.value + place
        count._obj.value = 4
        return 0

    host = replace(
        connect("sim:h200"), nvml=NvmlReader(Altered("sim:h200", nvmlDeviceGetProcessUtilization=utilization))
    )
    recording = recorded(host, tmp_path)
    use = use_of(recording, 4242)
    assert (use.samples, use.memory_peak_bytes, len(recording.processes)) == (1, None, 1)
    assert use.utilization.mean == 80.0
    # Each look asks for what came since the one before.
    assert [later - earlier for earlier, later in itertools.pairwise(calls)] == [1_000_000] * 10


def test_a_gpu_that_is_lost_does_not_stop_it(tmp_path: Path) -> None:
    spec = "sim:2xh200"
    pid = admin.add_process(spec, "1", sm_percent=50)
    events = {4: lambda: admin.set_fault(spec, "lost", "0"), 7: lambda: admin.clear_faults(spec)}
    recording = recorded(spec, tmp_path, events=events)
    lost, other = recording.gpus
    assert (lost.samples, lost.unanswered, other.samples, other.unanswered) == (7, 3, 10, 0)
    assert "lost" in (lost.error or "")
    assert use_of(recording, pid).samples == 10


def test_a_driver_that_goes_away_for_a_while_does_not_stop_it(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = host.nvml.sweep

    def gone() -> Any:
        raise DriverNotLoaded("the driver is not loaded", "load it")

    events = {
        3: lambda: monkeypatch.setattr(host.nvml, "sweep", gone),
        5: lambda: monkeypatch.setattr(host.nvml, "sweep", sweep),
    }
    (gpu,) = recorded(host, tmp_path, events=events).gpus
    assert (gpu.samples, gpu.unanswered, gpu.error) == (8, 2, "the driver is not loaded")


def test_under_mps_the_only_client_has_the_activity(cli_start: Callable[[], dict[str, str]], tmp_path: Path) -> None:
    pid = admin.add_process("sim:h200", mps=True, sm_percent=40, environment=cli_start())
    recording = recorded("sim:h200", tmp_path)
    use = use_of(recording, pid)
    assert use.process.mps
    assert use.sm.mean == 40.0
    assert [workload.process.name for workload in workloads_of(recording)] == ["python3"]
    assert SERVER_PROGRAM in {process.process.name for process in recording.processes}


def test_under_mps_the_share_of_one_of_several_is_unknown(
    cli_start: Callable[[], dict[str, str]], tmp_path: Path
) -> None:
    environment = cli_start()
    pids = [admin.add_process("sim:h200", mps=True, sm_percent=40, environment=environment) for _ in range(2)]
    recording = recorded("sim:h200", tmp_path)
    for pid in pids:
        use = use_of(recording, pid)
        assert (use.sm, use.utilization, use.activity, use.busy_share) == (None, None, None, None)


@pytest.fixture
def cli_start() -> Callable[[], dict[str, str]]:
    """Return a function that starts an MPS daemon and returns a client's environment."""

    def start() -> dict[str, str]:
        from gpushare.cli import main

        assert main(["--host", "sim:h200", "mps", "start", "-o", "json"]) == 0
        found = StateFile(parse_spec("sim:h200").text).read()
        return {"CUDA_MPS_PIPE_DIRECTORY": found.daemons[0].pipe_directory}

    return start


def test_each_mig_instance_tells_for_its_only_process(tmp_path: Path) -> None:
    spec = "sim:h200"
    admin.set_mig(spec, "0", ["3g.71gb", "3g.71gb"])
    host = connect(spec)
    busy, shared = host.nvml.sweep()[0].mig_instances
    alone = admin.add_process(spec, mig=busy.uuid, sm_percent=80)
    pair = [admin.add_process(spec, mig=shared.uuid, sm_percent=10) for _ in range(2)]
    recording = recorded(host, tmp_path)
    use = use_of(recording, alone)
    assert use.process.mig == busy.uuid
    assert use.sm.mean == 80.0
    assert [use_of(recording, pid).activity for pid in pair] == [None, None]


def test_mig_devices_are_recorded_with_their_use_and_again_with_a_new_name(tmp_path: Path) -> None:
    world = World("sim:h200")
    world.mig("3g.71gb", "1g.18gb")
    busy = world.devices()[0][1]
    admin.add_process(world.spec, mig=busy, memory_bytes=GIB, sm_percent=80)
    recorded(world.host, tmp_path, events={3: lambda: world.run("mig", "name", "alice", busy)})
    samples = Samples(tmp_path / "r.jsonl")
    devices = [samples.instances[number] for number in sorted(samples.instances)]
    assert [(device.profile, device.name) for device in devices] == [
        ("3g.71gb", None), ("1g.18gb", None), ("3g.71gb", "alice"),
    ]  # fmt: skip
    uses = samples.read(len(samples) - 1, len(samples))[0].gpus[0].instances
    assert [(use.id, use.sm_percent, use.memory_used_bytes) for use in uses] == [
        (devices[2].id, 80.0, GIB), (devices[1].id, 0.0, 0),
    ]  # fmt: skip


def test_nothing_of_gpm_is_left_behind(host: Host, tmp_path: Path) -> None:
    library: Any = host.nvml._library
    recorded(host, tmp_path, events={4: lambda: admin.set_fault("sim:h200", "lost")})
    assert library.samples == {}


def test_the_first_reading_since_nothing_is_unknown() -> None:
    meter = ActivityRecorder(connect("sim:h200").nvml, 0)
    admin.add_process("sim:h200", sm_percent=60)
    assert meter.percent_since_last() is None
    assert meter.percent_since_last() == 60.0
    meter.close()
    assert meter.percent_since_last() is None
    meter.close()


@pytest.mark.parametrize("interval", [1.0, 0.3])
def test_looks_do_not_drift(tmp_path: Path, interval: float) -> None:
    host, times = connect("sim:h200"), FakeTime()
    look = host.nvml.sweep

    def slowly() -> Any:
        times.time += interval / 4
        return look()

    header = header_for(host, None, interval, times.clock)
    host.nvml.sweep = slowly  # type: ignore[method-assign]
    seen: list[float] = []
    with RecordingFile(tmp_path / "r.jsonl", header) as file:
        recording = observe(host, header, file, seconds=100 * interval, clock=times.clock, progress=seen.append)
    assert (recording.samples, recording.missed) == (100, 0)
    # The last look begins when it is due, however long all others took.
    assert recording.seconds == pytest.approx(100 * interval, abs=interval)
    assert times.time == pytest.approx(100 * interval + interval / 4)
    assert seen == pytest.approx([number * interval for number in range(1, 101)])


def test_looks_that_were_late_are_counted(tmp_path: Path) -> None:
    host, times = connect("sim:h200"), FakeTime()
    look, calls = host.nvml.sweep, [0]

    def once_slow() -> Any:
        calls[0] += 1
        times.time += 3.5 if calls[0] == 4 else 0.0
        return look()

    header = header_for(host, None, 1.0, times.clock)
    host.nvml.sweep = once_slow  # type: ignore[method-assign]
    with RecordingFile(tmp_path / "r.jsonl", header) as file:
        recording = observe(host, header, file, seconds=10.0, clock=times.clock)
    assert (recording.samples, recording.missed) == (7, 3)
    assert times.time == 10.0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Ended(signal.SIGTERM)])
def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path, error: KeyboardInterrupt) -> None:
    def stop() -> None:
        raise error

    recording = recorded("sim:h200", tmp_path, events={4: stop})
    assert (recording.samples, recording.reason) == (4, "interrupted")


def test_ctrl_c_before_the_first_sample_is_ctrl_c(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded("sim:h200", tmp_path, events={0: stop})


def test_a_disk_that_fills_up_ends_it_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OperationFailed("cannot write: no space left", "free some", code="not_written")

    with pytest.raises(OperationFailed):
        recorded("sim:h200", tmp_path, events={4: lambda: monkeypatch.setattr(RecordingFile, "write_sample", full)})
    found = read_recording(tmp_path / "r.jsonl")
    assert (found.samples, found.reason) == (4, None)


@pytest.mark.parametrize("seconds", [10, 40])
def test_the_use_of_ones_own_commands_is_kept_after_a_while(host: Host, tmp_path: Path, seconds: int) -> None:
    admin.add_process("sim:h200", memory_bytes=3 * GIB, sm_percent=40, command_line=("python", "train.py"))
    recorded(host, tmp_path, seconds=seconds)
    (device,) = select("0", host.nvml.sweep())
    found = find_profile(host, device, ("python", "train.py"))
    if seconds < 30:
        assert found is None
    else:
        assert found.memory_bytes == 3 * GIB
        assert found.use_percent == pytest.approx(40, abs=1)
    assert "train.py" not in (tmp_path / "r.jsonl").read_text()


def test_the_use_of_others_and_next_to_others_is_not_kept(tmp_path: Path) -> None:
    host = connect("sim:2xh100")
    admin.add_process("sim:2xh100", gpu="0", memory_bytes=GIB, command_line=("python", "a.py"), user="nobody")
    for name in ("b.py", "c.py"):
        admin.add_process("sim:2xh100", gpu="1", memory_bytes=GIB, command_line=("python", name))
    recorded(host, tmp_path, seconds=40)
    assert not (host.state_directory / "peaks").exists()


def test_only_the_chosen_gpus_are_recorded(tmp_path: Path) -> None:
    host, times = connect("sim:4xh200"), FakeTime()
    for gpu in range(4):
        admin.add_process("sim:4xh200", str(gpu))
    header = header_for(host, [1, 3], 1.0, times.clock)
    with RecordingFile(tmp_path / "r.jsonl", header) as file:
        recording = observe(host, header, file, seconds=3.0, clock=times.clock)
    assert [use.gpu.index for use in recording.gpus] == [1, 3]
    assert {use.process.gpu for use in recording.processes} == {1, 3}


def test_a_host_without_gpus_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.nvml, "sweep", tuple)
    with fails(NotFound, "no_gpu"):
        header_for(host, None, 1.0)


def test_a_host_where_no_gpu_answers_is_refused(host: Host) -> None:
    admin.set_fault("sim:h200", "lost")
    with fails(GpushareError, "no_gpu_answers"):
        header_for(host, None, 1.0)


def test_a_blind_process_list_is_said(host: Host, tmp_path: Path) -> None:
    admin.set_fault("sim:h200", "blind")
    recording = recorded(host, tmp_path)
    assert "incomplete" in recording.header.warnings[0]


def test_who_left_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpushare.measure import observe as module

    monkeypatch.setattr(module, "_REMEMBERED", 3)
    sampler = Sampler(connect("sim:h200"), frozenset({0}), 1.0, FakeTime().clock)
    for _ in range(10):
        pid = admin.add_process("sim:h200")
        sampler.take(0.0)
        admin.end_process("sim:h200", pid)
    sampler.take(0.0)
    assert len(sampler._known) == 3
    sampler.close()
