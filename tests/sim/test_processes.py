"""The process table of a simulated host, and how the end of an MPS client breaks its neighbours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare.base.errors import NoPermission, NotFound, NotSupported, OperationFailed, TimedOut
from gpushare.host.capabilities import Capabilities
from gpushare.host.identity import identity_of_child
from gpushare.host.process import Processes, ProcessInfo, starts_of, wait_gone
from gpushare.host.program import Programs
from gpushare.sim import admin, clients
from gpushare.sim.current import current
from gpushare.sim.machine import SimulatedCapabilities
from gpushare.sim.processes import SimulatedProcesses
from gpushare.sim.programs import SimulatedPrograms
from gpushare.sim.state import FIRST_SIMULATED_PID, SimulatedProcess
from tests.cli.drive import until
from tests.sim import mps
from tests.sim.mps import Mps

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
DEEP = 0.11


@pytest.fixture
def h200(sim_dir: Path) -> Mps:
    return mps.new(sim_dir)


def pair(
    h200: Mps, *, queue_seconds: float, sm_percent: int = 60, catches: tuple[int, ...] = ()
) -> tuple[SimulatedProcess, SimulatedProcess]:
    """Start a daemon with a production client and an opportunistic one."""
    h200.start()
    production = h200.client()
    return production, h200.client(queue_seconds=queue_seconds, sm_percent=sm_percent, catches=catches)


def test_a_signal_to_a_program_that_has_just_died_is_sent_as_on_a_real_host(h200: Mps) -> None:
    child = subprocess.Popen(["true"])
    until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "it has died")
    zombie = identity_of_child(child.pid)
    assert zombie is not None
    h200.host.processes.send_to(*zombie, signal.SIGTERM)
    child.wait()
    with pytest.raises(NotFound):
        h200.host.processes.send_to(*zombie, signal.SIGTERM)


def drain(h200: Mps, pid: int, seconds: float) -> None:
    """Let time pass for a stopped process."""
    with h200.host.state_file.changed() as state:
        process = next(process for process in state.processes if process.pid == pid)
        assert process.stopped_at is not None
        process.stopped_at -= seconds


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_dies_with_a_deep_queue_breaks_its_neighbour(h200: Mps, sent: int) -> None:
    production, other = pair(h200, queue_seconds=DEEP)
    h200.host.processes.send(other.pid, sent)
    assert h200.process(production.pid).broken
    assert h200.ask(f"get_server_status {production.mps_server}") == "FAULT\n"
    assert "Server has begun teardown sequence to handle a fatal GPU error." in h200.server_log()
    with pytest.raises(OperationFailed, match="SERVER_NOT_READY"):
        h200.client()
    # It recovers when everybody whom the fault hit is gone.
    h200.host.processes.send(production.pid, signal.SIGKILL)
    assert h200.ask(f"get_server_status {production.mps_server}") == "ACTIVE\n"
    assert not h200.client().broken


@pytest.mark.parametrize(("queue", "sm"), [(0.007, 100), (0.0, 0), (0.02, 60)])
def test_a_shallow_queue_or_an_idle_client_is_harmless(h200: Mps, queue: float, sm: int) -> None:
    production, other = pair(h200, queue_seconds=queue, sm_percent=sm)
    h200.host.processes.send(other.pid, signal.SIGKILL)
    assert not h200.process(production.pid).broken
    assert h200.ask(f"get_server_status {production.mps_server}") == "ACTIVE\n"
    assert "Number of active client contexts is 1." in h200.server_log()


def test_stop_drain_kill_is_harmless_but_not_before_the_queue_is_empty(h200: Mps) -> None:
    production, other = pair(h200, queue_seconds=60.0)
    h200.host.processes.send(other.pid, signal.SIGSTOP)
    info = h200.host.processes.describe(other.pid)
    assert info is not None
    assert info.stopped
    drain(h200, other.pid, 61.0)
    h200.host.processes.send(other.pid, signal.SIGKILL)
    assert not h200.process(production.pid).broken
    hasty = h200.client(queue_seconds=60.0)
    h200.host.processes.send(hasty.pid, signal.SIGSTOP)
    h200.host.processes.send(hasty.pid, signal.SIGKILL)
    assert h200.process(production.pid).broken


def test_a_caught_signal_ends_a_program_cleanly(h200: Mps) -> None:
    production, other = pair(h200, queue_seconds=DEEP, catches=(signal.SIGINT,))
    assert h200.host.processes.catches(other.pid, signal.SIGINT) is True
    assert h200.host.processes.catches(other.pid, signal.SIGTERM) is False
    h200.host.processes.send(other.pid, signal.SIGINT)
    assert not h200.host.processes.alive(other.pid)
    assert not h200.process(production.pid).broken


def test_time_sliced_neighbours_never_break(h200: Mps) -> None:
    first = h200.client()
    second = h200.client(queue_seconds=DEEP)
    h200.host.processes.send(second.pid, signal.SIGKILL)
    assert not h200.process(first.pid).broken


def test_the_table_of_simulated_processes(h200: Mps) -> None:
    processes = h200.host.processes
    daemon = h200.start()
    client = h200.client(name="train")
    assert client.pid >= FIRST_SIMULATED_PID
    info = processes.describe(client.pid)
    assert isinstance(info, ProcessInfo)
    assert (info.name, info.command_line, info.uid, info.started) == ("train", ("train",), os.geteuid(), client.started)
    assert processes.pids_of_program("nvidia-cuda-mps-control") == [daemon]
    assert processes.pids_of_program("nvidia-cuda-mps-server") == [client.mps_server]
    assert processes.pids_of_program("train") == [client.pid]
    assert processes.descendants(daemon) == [daemon, client.mps_server]
    assert processes.descendants(client.pid) == [client.pid]
    server = processes.describe(client.mps_server or 0)
    assert server is not None
    assert server.name == "nvidia-cuda-mps-server"
    environment = processes.environment(daemon)
    assert environment is not None
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(h200.pipe)
    assert processes.alive(client.pid, client.started)
    assert not processes.alive(client.pid, client.started + 100)
    assert processes.describe(FIRST_SIMULATED_PID + 999) is None
    assert processes.environment(FIRST_SIMULATED_PID + 999) is None
    assert not processes.alive(FIRST_SIMULATED_PID + 999)
    assert processes.namespace_is_host() is True
    admin.set_fault("sim:h200", "blind")
    assert processes.namespace_is_host() is False


def test_real_processes_are_seen_through(h200: Mps) -> None:
    info = h200.host.processes.describe(os.getpid())
    assert info is not None
    assert info.pid == os.getpid()
    assert h200.host.processes.alive(os.getpid())
    assert os.getpid() in h200.host.processes.descendants(os.getpid())


def test_a_real_program_has_its_environment_before_its_exec_too(h200: Mps) -> None:
    """Until then /proc has that of gpushare, as here."""
    client = h200.client()
    with h200.host.state_file.changed() as state:
        process = next(process for process in state.processes if process.pid == client.pid)
        process.pid, process.environment = os.getpid(), {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    environment = h200.host.processes.environment(os.getpid()) or {}
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["PATH"] == os.environ["PATH"]


def test_another_users_process_may_not_be_touched(h200: Mps) -> None:
    pid = admin.add_process("sim:h200")
    admin.set_fault("sim:h200", "user", value="61000")
    with pytest.raises(NoPermission, match="another user"):
        h200.host.processes.send(pid, signal.SIGKILL)
    assert h200.host.processes.environment(pid) is None
    with pytest.raises(NotFound):
        h200.host.processes.send(FIRST_SIMULATED_PID + 999, signal.SIGKILL)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_daemon_leaves_its_files_and_may_start_again(h200: Mps, sent: int) -> None:
    pid = h200.start()
    client = h200.client()
    before = sorted(path.name for path in h200.pipe.iterdir())
    h200.host.processes.send(pid, sent)
    assert sorted(path.name for path in h200.pipe.iterdir()) == before
    assert h200.run(stdin="ps\n").stderr == "Cannot find MPS control daemon process\n"
    assert h200.process(client.pid).broken
    assert h200.start() != pid


def test_a_killed_server_takes_its_clients_contexts(h200: Mps) -> None:
    h200.start()
    client = h200.client()
    h200.host.processes.send(client.mps_server or 0, signal.SIGKILL)
    assert h200.process(client.pid).refused == "CUDA_ERROR_MPS_RPC_FAILURE"
    assert h200.ask("get_server_list") == ""
    client, waiting = h200.client(), h200.client(user=str(os.geteuid() + 1))
    assert waiting.mps_server is None
    h200.host.processes.send(client.mps_server or 0, signal.SIGKILL)
    assert h200.process(waiting.pid).mps_server is not None


def end_child(h200: Mps, pid: int) -> None:
    h200.host.processes.send(pid, signal.SIGKILL)
    assert wait_gone(h200.host.processes, starts_of(h200.host.processes, [pid]), 120.0) == []


def test_a_spawned_program_is_a_client_while_it_lives(h200: Mps) -> None:
    h200.start()
    child = h200.host.processes.spawn(SLEEPER, {**os.environ, **h200.env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"})
    try:
        process = h200.process(child.pid)
        assert (process.real, process.threads, process.sm_percent, process.memory_bytes) == (True, 40.0, 20, 512 << 20)
        assert f"\n{child.pid} " in h200.ask("ps")
        h200.host.processes.send(child.pid, signal.SIGSTOP)
        assert h200.process(child.pid).stopped_at is not None
        h200.host.processes.send(child.pid, signal.SIGCONT)
        assert h200.process(child.pid).stopped_at is None
        os.kill(child.pid, signal.SIGKILL)
        assert wait_gone(h200.host.processes, starts_of(h200.host.processes, [child.pid]), 120.0) == []
        assert str(child.pid) not in h200.ask("ps")
    finally:
        child.poll()


def test_a_spawned_program_may_miss_mps_or_attach_late(h200: Mps) -> None:
    h200.start()
    base = {**os.environ, **h200.env}
    outside = h200.host.processes.spawn(SLEEPER, {**base, "GPUSHARE_SIM_OUTSIDE": "1"})
    late = h200.host.processes.spawn(SLEEPER, {**base, "GPUSHARE_SIM_ATTACH_DELAY": "0.15"})
    try:
        assert (h200.process(outside.pid).mps_daemon, h200.process(outside.pid).gpu_uuid) == (
            None,
            h200.state.gpus[0].uuid,
        )
        assert not clients.on_gpu(h200.process(late.pid))
        until(
            lambda: any(
                process.pid == late.pid and process.mps_server for process in current(h200.host.state_file).processes
            ),
            "it attaches late",
        )
    finally:
        for child in (outside, late):
            end_child(h200, child.pid)
            child.poll()
    assert h200.state.processes == []


def test_a_spawned_program_goes_to_the_gpu_that_cuda_would_give_it(sim_dir: Path) -> None:
    two = mps.new(sim_dir, "sim:2xh200")
    admin.set_mig("sim:2xh200", "1", ["1g.18gb", "1g.18gb"])
    instance = two.state.gpus[1].mig[1]
    for wanted, gpu, place in (
        ("0", 0, None),
        (two.state.gpus[0].uuid[:12], 0, None),
        (instance.uuid, 1, instance.gpu_instance_id),
    ):
        child = two.host.processes.spawn(SLEEPER, {**os.environ, "CUDA_VISIBLE_DEVICES": wanted})
        process = two.process(child.pid)
        end_child(two, child.pid)
        child.poll()
        assert (process.gpu_uuid, process.gpu_instance_id) == (two.state.gpus[gpu].uuid, place)


def test_programs_are_dispatched_missing_or_hanging(h200: Mps) -> None:
    programs = h200.host.programs
    assert programs.find("nvidia-smi") == "/usr/bin/nvidia-smi"
    assert "Timeslice" in programs.run(["nvidia-smi", "compute-policy", "-l"]).stdout
    assert programs.run(["nvidia-cuda-mps-control", "-v"]).stdout.startswith("CUDA MPS Control")
    with pytest.raises(NotSupported, match="rm is not installed"):
        programs.run(["rm", "-rf", "/nonexistent"])
    admin.set_fault("sim:h200", "missing", value="nvidia-smi")
    assert programs.find("nvidia-smi") is None
    with pytest.raises(NotSupported, match="nvidia-smi is not installed"):
        programs.start(["nvidia-smi"])
    admin.set_fault("sim:h200", "hang", value="nvidia-cuda-mps-control")
    pending = programs.start(["nvidia-cuda-mps-control", "-v"], timeout=0.05)
    with pytest.raises(TimedOut, match="did not answer within"):
        pending.result()
    admin.clear_faults("sim:h200")
    assert programs.run(["nvidia-cuda-mps-control", "-v"], timeout=0.05).exit_code == 0


def test_the_environment_of_a_call_is_laid_over_the_callers(h200: Mps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(h200.pipe))
    h200.start()
    ask = ["nvidia-cuda-mps-control"]
    assert h200.host.programs.run(ask, stdin="get_default_client_priority\n").stdout == "0\n"
    elsewhere = {"CUDA_MPS_PIPE_DIRECTORY": None}
    assert h200.host.programs.run(ask, stdin="get_server_list\n", env=elsewhere).exit_code == 1


def test_a_real_control_program_is_run_when_it_is_named(
    h200: Mps, sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = sim_dir / "control"
    program.write_text("#!/bin/sh\necho real $1\n")
    program.chmod(0o755)
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", str(program))
    assert h200.host.programs.find("nvidia-cuda-mps-control") == str(program)
    assert h200.host.programs.run(["nvidia-cuda-mps-control", "-v"]).stdout == "real -v\n"


@pytest.mark.parametrize(
    ("simulated", "local"),
    [(SimulatedProcesses, Processes), (SimulatedPrograms, Programs), (SimulatedCapabilities, Capabilities)],
)
def test_a_simulated_host_asks_nothing_of_this_machine_by_inheritance(simulated: type, local: type) -> None:
    # These ask only `parent`, `start` and `families`, which are overridden.
    asking_others = {"ancestry", "run", "descendants"}
    public = {name for name in vars(local) if not name.startswith("_")} - asking_others
    assert public <= vars(simulated).keys()
