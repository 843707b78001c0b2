"""What a MIG change does about who is, or comes, in what goes: services, programs that will not end, late runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import InUse
from gpushare.base.model import Gpu, GpuProcess, Holder
from gpushare.connect import connect
from gpushare.host.capabilities import user_name
from gpushare.host.claims import live_claims, take_claim
from gpushare.host.process import Processes
from gpushare.mig import change
from gpushare.mig.layouts import layouts_of
from gpushare.mig.ledger import MigLedger
from gpushare.mig.plan import whole_change
from gpushare.mig.profile import ComputeInstance, ComputeProfile, GpuInstance, Placement, Profile
from gpushare.mig.recover import Calls
from gpushare.sim import admin
from gpushare.sim.processes import SimulatedProcesses
from tests.cli.drive import World, environment
from tests.errors import fails

A100 = "sim:a100-80gb"


@pytest.fixture
def host() -> World:
    """Return a host with two instances."""
    found = World.new(A100)
    assert found.run("mig", "apply", "3g.40gb*2").code == 0
    return found


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note which signals are sent to whom, and let nobody end before the second one."""
    sent: list[tuple[int, int]] = []
    real = SimulatedProcesses._send

    def send(self: SimulatedProcesses, pid: int, number: int, to_real: Callable[[int], None]) -> None:
        sent.append((pid, number))
        if number != signal.SIGTERM:
            real(self, pid, number, to_real)

    monkeypatch.setattr(SimulatedProcesses, "_send", send)
    monkeypatch.setattr(change, "GRACE_SECONDS", 0.0)
    return sent


def instance_of(host: World, uuid: str) -> str:
    """Return a GPU instance as it is named on the command line."""
    found = next(instance for instance in host.state.gpus[0].mig if instance.uuid == uuid)
    return f"0/{found.gpu_instance_id}"


# -- evicting --------------------------------------------------------------------------------------


def test_a_service_is_not_ended_but_told_how_to_be_stopped(host: World) -> None:
    (_, uuid), _ = host.devices()
    pid = admin.add_process(A100, mig=uuid, name="nv-hostengine", holder=True, memory_bytes=0)
    name, before = instance_of(host, uuid), host.look()
    answer = host.run("mig", "destroy", name, "--evict", name)
    assert (answer.code, answer.error["code"]) == (19, "held_by_service")
    assert f"{pid} (nv-hostengine" in answer.error["message"]
    assert answer.error["hint"] == "sudo systemctl stop nvidia-dcgm"
    assert host.look() == before
    assert pid in host.pids()


def test_a_holder_that_is_no_known_service_is_ended(host: World) -> None:
    (_, uuid), _ = host.devices()
    pid = admin.add_process(A100, mig=uuid, name="my-monitor", holder=True, memory_bytes=0)
    name = instance_of(host, uuid)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    assert pid not in host.pids()
    assert len(host.devices()) == 1


def test_who_does_not_end_when_asked_is_killed(host: World, signals: list[tuple[int, int]]) -> None:
    (_, uuid), _ = host.devices()
    pids = [host.add(uuid), host.add(uuid)]
    name = instance_of(host, uuid)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    # All are asked before anybody is killed.
    assert signals == [(pid, number) for number in (signal.SIGTERM, signal.SIGKILL) for pid in pids]
    assert not host.pids()


def test_who_ends_when_asked_is_not_killed(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, uuid), _ = host.devices()
    host.add(uuid)
    sent: list[int] = []
    real = SimulatedProcesses.send_to

    def send_to(self: SimulatedProcesses, pid: int, started: int, number: int) -> None:
        sent.append(number)
        real(self, pid, started, number)

    monkeypatch.setattr(SimulatedProcesses, "send_to", send_to)
    name = instance_of(host, uuid)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    assert sent == [signal.SIGTERM]


def test_who_cannot_be_killed_keeps_the_instance(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in uninterruptible sleep."""
    (_, uuid), _ = host.devices()
    pid = host.add(uuid)
    before, name = host.look(), instance_of(host, uuid)
    monkeypatch.setattr(SimulatedProcesses, "send_to", lambda *_: None)
    monkeypatch.setattr(change, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(change, "_KILL_SECONDS", 0.0)
    answer = host.run("mig", "destroy", name, "--evict", name)
    assert (answer.code, answer.error["code"]) == (19, "in_use")
    assert f"{pid} (python3, user {user_name(os.geteuid())}) in 3g.40gb:" in answer.error["message"]
    assert "did not end" in answer.error["message"]
    assert host.look() == before


# -- runs that come in between ---------------------------------------------------------------------


def test_a_run_that_comes_after_the_plan_keeps_its_instance(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = host.look()
    (_, first), (_, second) = host.devices()
    real, theirs = change.take_claim, []

    def somebody_was_faster(told: Any, uuid: str) -> Any:
        if uuid == second:
            theirs.append(take_claim(told, uuid))
        return real(told, uuid)

    monkeypatch.setattr(change, "take_claim", somebody_was_faster)
    answer = host.run("mig", "apply", "7g.80gb")
    assert (answer.code, answer.error["code"]) == (19, "in_use")
    assert "a gpushare run has just taken 3g.40gb:" in answer.error["message"]
    assert host.look() == before
    assert not host.journal.exists()
    # What the change had taken itself is free again.
    assert set(live_claims(connect(A100))) == {second}
    assert first != second
    theirs[0].release()


def test_no_run_starts_in_what_goes_and_all_is_free_afterwards(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it, meanwhile = {uuid for _, uuid in host.devices()}, []
    real = change.carry_out

    def look_first(*words: Any) -> None:
        meanwhile.append(set(live_claims(connect(A100))))
        real(*words)

    monkeypatch.setattr(change, "carry_out", look_first)
    assert host.run("mig", "apply", "7g.80gb").code == 0
    assert meanwhile == [all_of_it]
    assert live_claims(connect(A100)) == {}


def test_a_change_that_changes_nothing_leaves_no_trace(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MigLedger, "begin", lambda *_, **__: pytest.fail("a journal of nothing"))
    assert host.run("mig", "apply", "3g.40gb*2").code == 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_journal_is_cleared_at_every_end(host: World, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    begun: list[bool] = []
    real = MigLedger.begin

    def begin(self: MigLedger, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        begun.append(host.journal.exists())

    monkeypatch.setattr(MigLedger, "begin", begin)
    if fails:
        host.fault("fail-step", 2)
    assert host.run("mig", "apply", "7g.80gb").code == (1 if fails else 0)
    assert begun == [True]
    assert not host.journal.exists()


def test_each_step_is_told_where_it_is_asked_for(host: World) -> None:
    answer = host.run("-v", "mig", "apply", "7g.80gb")
    assert answer.code == 0
    assert "7g.80gb:0" in answer.err
    assert "destroy GPU instance " in answer.err


# Takes an instance, as `gpushare run` does, and gives it back when a process has ended.
RUNS = """
import sys, time
from gpushare.connect import connect
from gpushare.host.claims import HeldClaim, take_claim
host = connect(sys.argv[1])
claim = take_claim(host, sys.argv[2])
print("taken" if isinstance(claim, HeldClaim) else "none", flush=True)
while host.processes.alive(int(sys.argv[3])):
    time.sleep(0.02)
claim.release()
"""


@contextlib.contextmanager
def runs(uuid: str, pid: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RUNS, A100, uuid, str(pid)], stdout=subprocess.PIPE, text=True, env=environment()
    ) as run:
        try:
            assert run.stdout.readline() == "taken\n"
            yield run
        finally:
            # A failed test must not wait for it forever.
            run.kill()


def test_a_run_whose_program_is_evicted_gives_its_instance_back_and_is_not_signalled(host: World) -> None:
    (_, evicted), (_, staying) = host.devices()
    name, pid = instance_of(host, evicted), host.add(evicted)
    with runs(evicted, pid) as run:
        refused = host.run("mig", "destroy", name)
        assert (refused.code, run.poll()) == (19, None)
        answer = host.run("mig", "destroy", name, "--evict", name)
        assert answer.code == 0, answer
        assert run.wait(20) == 0
    assert [uuid for _, uuid in host.devices()] == [staying]
    assert live_claims(connect(A100)) == {}


def test_a_claim_alone_blocks_and_gets_no_signal(host: World) -> None:
    """Any user writes claims: no signal goes out on their word."""
    (_, uuid), _ = host.devices()
    name, before = instance_of(host, uuid), host.look()
    with runs(uuid, os.getpid()) as run:
        for words in ((name,), ("all",)):
            answer = host.run("mig", "destroy", *words, "--evict", words[0], "-y")
            assert (answer.code, answer.error["code"]) == (19, "claimed")
            assert f"process {run.pid} (" in answer.error["message"]
            assert "-c" in answer.error["message"], "with its command"
            assert answer.error["hint"].endswith(f"ps -fp {run.pid}")
        assert (run.poll(), host.look()) == (None, before)
        run.kill()
    assert host.run("mig", "destroy", name).code == 0


def test_a_claim_that_outlives_all_who_were_inside_keeps_the_instance(
    host: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, uuid), _ = host.devices()
    name, before, pid = instance_of(host, uuid), host.look(), host.add(uuid)
    monkeypatch.setattr(change, "CLAIM_SECONDS", 0.1)
    with runs(uuid, os.getpid()) as run:
        answer = host.run("mig", "destroy", name, "--evict", name)
        assert (answer.code, answer.error["code"]) == (19, "claimed")
        assert "is claimed by process" in answer.error["message"]
        assert (run.poll(), host.look(), pid in host.pids()) == (None, before, False)
        run.kill()


def test_nobody_runs_in_what_was_emptied_until_it_is_gone(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, uuid), _ = host.devices()
    name, seen = instance_of(host, uuid), []
    host.add(uuid)
    real = Calls.do

    def looked(*words: Any) -> None:
        seen.append(set(live_claims(connect(A100))))
        real(*words)

    monkeypatch.setattr(Calls, "do", looked)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    assert seen == [{uuid}, {uuid}]
    assert live_claims(connect(A100)) == {}


def test_the_plan_names_whom_it_ends(host: World) -> None:
    (_, uuid), _ = host.devices()
    pid = admin.add_process(A100, mig=uuid, name="train.py", user="4321")
    name = instance_of(host, uuid)
    answer = host.run("mig", "destroy", name, "--evict", name, "-n")
    (what,) = [step["what"] for step in answer.json["data"]["steps"] if step["what"].startswith("end ")]
    assert what == f"end 1 process in 3g.40gb:{host.look()[0].instances[0][1]} on GPU 0: {pid} (train.py, user 4321)"
    assert pid in host.pids()


# -- who gets a signal -----------------------------------------------------------------------------


def step_for(host: World, *pids: int) -> Any:
    """Return the eviction of processes that NVML lists in the first instance, and its step."""
    seen = connect(A100)
    gpu = seen.nvml.gpu(0)
    (layout,) = layouts_of(seen, [gpu])
    one = next(
        instance
        for instance in layout.instances
        if {part.pid for part in instance.compute[0].holders or ()} >= set(pids)
    )
    eviction = change.Eviction(seen, gpu, whole_change(one))
    return eviction, eviction.step()


@pytest.mark.parametrize("other", ["another process with its PID", "it has left the instance"])
def test_who_is_another_since_the_plan_gets_no_signal(host: World, signals: list[tuple[int, int]], other: str) -> None:
    (_, uuid), (_, elsewhere) = host.devices()
    pid = host.add(uuid)
    eviction, step = step_for(host, pid)
    place = next(instance for instance in host.state.gpus[0].mig if instance.uuid == elsewhere)
    with host.file.changed() as state:
        process = next(process for process in state.processes if process.pid == pid)
        if other == "it has left the instance":
            process.gpu_instance_id, process.compute_instance_id = place.gpu_instance_id, place.compute_instance_id
        else:
            process.started += 6000
    step.do()
    eviction.claims.close()
    assert (signals, pid in host.pids()) == ([], True)


@pytest.mark.parametrize("who", ["init", "ourselves", "our shell"])
def test_neither_init_nor_ourselves_nor_our_shell(who: str) -> None:
    pid = {"init": 1, "ourselves": os.getpid(), "our shell": os.getppid()}[who]
    with fails(InUse, "not_evictable", match="runs this gpushare", message=f"{pid} ("):
        change.Eviction(connect(A100), Gpu(index=0), going((), (GpuProcess(pid=pid, compute=True),))).step()


def test_in_another_pid_namespace_nobody_is_taken_for_another(host: World) -> None:
    host.add(host.devices()[0][1])
    host.fault("blind")
    with pytest.raises(InUse, match="another PID here"):
        change.Eviction(connect(A100), Gpu(index=0), going((), (PROGRAM,))).step()


def test_an_open_node_without_the_drivers_library_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor can be sent to any service, as to a message bus."""
    monkeypatch.setattr(SimulatedProcesses, "uses_driver", lambda *_: False)
    holder = Holder(pid=4194999, what="/dev/nvidia-caps/nvidia-cap12", user="root", name="dbus-daemon")
    with fails(InUse, "not_evictable", match="only has its device node open"):
        change.Eviction(connect(A100), Gpu(index=0), going((holder,))).step()
    listed = GpuProcess(pid=4194999, compute=True)
    assert change.Eviction(connect(A100), Gpu(index=0), going((holder,), (listed,))).step().command == "kill 4194999"


def test_the_driver_is_seen_in_what_a_process_has_loaded(tmp_path: Path) -> None:
    holds = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    for name, found in (("libnvidia-ml.so.580.1", True), ("libcuda.so.1", True), ("notlibcuda.so.1", False)):
        library = tmp_path / name
        library.write_bytes(b"x" * 4096)
        with subprocess.Popen(
            [sys.executable, "-c", holds, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"ready\n"
            assert Processes().uses_driver(process.pid) is found
            process.communicate()


def going(instance: tuple[Any, ...] | None, *parts: tuple[Any, ...] | None) -> Any:
    """Return what goes: who is known to be in the GPU instance itself, and in each compute instance."""
    profile = Profile(name="3g.40gb", id=9, slices=3, placements=None)
    compute = tuple(ComputeInstance(profile=ComputeProfile(slices=1), holders=part) for part in parts)
    return whole_change(GpuInstance(profile=profile, placement=Placement(0, 4), compute=compute, holders=instance))


SERVICE = Holder(pid=7, what="/dev/nvidia-caps/nvidia-cap12", user="root", name="nv-hostengine")
# Beyond what the kernel gives out.
PROGRAM = GpuProcess(pid=4194999, compute=True)
RUN = Holder(pid=4194999, what="lease", name="python3")


def test_all_who_are_anywhere_in_it_are_ended_once() -> None:
    assert change.holders_of(going((SERVICE,), (PROGRAM, RUN), None)) == [7, PROGRAM.pid]
    assert change.holders_of(going(None, (PROGRAM,))) == [PROGRAM.pid]
    assert change.holders_of(going(None, None)) == []
    # What claims it is not known to be in it.
    assert change.holders_of(going((), (RUN,))) == []
    gpu = Gpu(index=0)
    step = change.Eviction(connect(A100), gpu, going((), (PROGRAM, RUN))).step()
    assert (step.what, step.command) == (f"end 1 process in 3g.40gb:0 on GPU 0: {PROGRAM.pid}", f"kill {PROGRAM.pid}")
    other = GpuProcess(pid=PROGRAM.pid - 1, compute=True)
    step = change.Eviction(connect(A100), gpu, going((), (PROGRAM,), (other,))).step()
    assert step.what == f"end 2 processes in 3g.40gb:0 on GPU 0: {other.pid}, {PROGRAM.pid}"
    assert step.command == f"kill {other.pid} {PROGRAM.pid}"
    assert (step.undo, step.revert) == (None, None)


@pytest.mark.parametrize("gone", [going((SERVICE,), None), going(None, (SERVICE,)), going((), (PROGRAM,), (SERVICE,))])
def test_a_service_is_found_wherever_it_is(gone: Any) -> None:
    with fails(InUse, "held_by_service"):
        change.Eviction(connect(A100), Gpu(index=0), gone).step()


def test_a_run_by_a_services_name_is_a_run() -> None:
    named = Holder(pid=PROGRAM.pid, what="lease", name="nsys")
    assert (
        change.Eviction(connect(A100), Gpu(index=0), going((), (PROGRAM, named))).step().command
        == f"kill {PROGRAM.pid}"
    )


def test_programs_have_ten_seconds_to_end() -> None:
    assert change.GRACE_SECONDS == 10.0


def test_where_claims_cannot_be_told_every_instance_counts_as_held(
    host: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of claim files hides none: what may be in use is not destroyed."""
    from gpushare.host import claims

    take_claim(connect(A100), "MIG-x")
    assert all(
        instance.holders == () for instance in layouts_of(connect(A100), [connect(A100).nvml.gpu(0)])[0].instances
    )
    monkeypatch.setattr(claims, "_MOST_FILES", 0)
    (layout,) = layouts_of(connect(A100), [connect(A100).nvml.gpu(0)])
    assert [instance.holders for instance in layout.instances] == [None, None]
    assert all(part.busy for instance in layout.instances for part in instance.compute)
    answer = host.run("mig", "destroy", "0/1", "-y")
    assert answer.code != 0
    assert len(host.state.gpus[0].mig) == 2
