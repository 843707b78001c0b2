"""What a MIG change does about who is, or comes, in what goes: services, programs that will not end, late runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.actions import mig_evict, mig_transact
from gpushare.errors import InUse
from gpushare.host.connect import connect
from gpushare.host.mig_journal import Journal
from gpushare.host.mig_leases import live_leases, take_lease
from gpushare.model import Gpu, GpuProcess, Holder
from gpushare.sim import admin
from gpushare.sim.processes import SimulatedProcesses
from tests.actions.mig_host import MigHost
from tests.cli.drive import environment

A100 = "sim:a100-80gb"


@pytest.fixture
def host() -> MigHost:
    """Return a host with two instances."""
    found = MigHost(A100)
    assert found.run("mig", "apply", "3g.40gb*2").code == 0
    return found


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note which signals are sent to whom, and let nobody end before the second one."""
    sent: list[tuple[int, int]] = []
    real = SimulatedProcesses.send

    def send(self: SimulatedProcesses, pid: int, number: int) -> None:
        sent.append((pid, number))
        if number != signal.SIGTERM:
            real(self, pid, number)

    monkeypatch.setattr(SimulatedProcesses, "send", send)
    monkeypatch.setattr(mig_evict, "GRACE_SECONDS", 0.0)
    return sent


def instance_of(host: MigHost, uuid: str) -> str:
    """Return a GPU instance as it is named on the command line."""
    found = next(one for one in host.state.gpus[0].mig if one.uuid == uuid)
    return f"0/{found.gpu_instance_id}"


# -- evicting --------------------------------------------------------------------------------------


def test_a_service_is_not_ended_but_told_how_to_be_stopped(host: MigHost) -> None:
    (_, uuid), _ = host.devices()
    pid = admin.add_process(A100, mig=uuid, name="nv-hostengine", holder=True, memory_bytes=0)
    name, before = instance_of(host, uuid), host.look()
    said = host.run("mig", "destroy", name, "--evict", name)
    assert (said.code, said.error["code"]) == (19, "held_by_service")
    assert f"nv-hostengine (pid {pid}" in said.error["message"]
    assert said.error["hint"] == "sudo systemctl stop nvidia-dcgm"
    assert host.look() == before
    assert pid in host.pids()


def test_a_holder_that_is_no_known_service_is_ended(host: MigHost) -> None:
    (_, uuid), _ = host.devices()
    pid = admin.add_process(A100, mig=uuid, name="my-monitor", holder=True, memory_bytes=0)
    name = instance_of(host, uuid)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    assert pid not in host.pids()
    assert len(host.devices()) == 1


def test_who_does_not_end_when_asked_is_killed(host: MigHost, signals: list[tuple[int, int]]) -> None:
    (_, uuid), _ = host.devices()
    pids = [host.add(uuid), host.add(uuid)]
    name = instance_of(host, uuid)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    # All are asked before anybody is killed.
    assert signals == [(pid, number) for number in (signal.SIGTERM, signal.SIGKILL) for pid in pids]
    assert not host.pids()


def test_who_ends_when_asked_is_not_killed(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, uuid), _ = host.devices()
    host.add(uuid)
    sent: list[int] = []
    real = SimulatedProcesses.send

    def send(self: SimulatedProcesses, pid: int, number: int) -> None:
        sent.append(number)
        real(self, pid, number)

    monkeypatch.setattr(SimulatedProcesses, "send", send)
    name = instance_of(host, uuid)
    assert host.run("mig", "destroy", name, "--evict", name).code == 0
    assert sent == [signal.SIGTERM]


def test_who_cannot_be_killed_keeps_the_instance(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in uninterruptible sleep."""
    (_, uuid), _ = host.devices()
    pid = host.add(uuid)
    before, name = host.look(), instance_of(host, uuid)
    monkeypatch.setattr(SimulatedProcesses, "send", lambda *_: None)
    monkeypatch.setattr(mig_evict, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(mig_evict, "_KILL_SECONDS", 0.0)
    said = host.run("mig", "destroy", name, "--evict", name)
    assert (said.code, said.error["code"]) == (19, "in_use")
    assert f"{pid} in 3g.40gb:" in said.error["message"]
    assert "would not end" in said.error["message"]
    assert host.look() == before


# -- runs that come in between ---------------------------------------------------------------------


def test_a_run_that_comes_after_the_plan_keeps_its_instance(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    before = host.look()
    (_, first), (_, second) = host.devices()
    real, theirs = mig_transact.take_lease, []

    def somebody_was_faster(told: Any, uuid: str) -> Any:
        if uuid == second:
            theirs.append(take_lease(told, uuid))
        return real(told, uuid)

    monkeypatch.setattr(mig_transact, "take_lease", somebody_was_faster)
    said = host.run("mig", "apply", "7g.80gb")
    assert (said.code, said.error["code"]) == (19, "in_use")
    assert "a gpushare run has just taken 3g.40gb:" in said.error["message"]
    assert host.look() == before
    assert not host.journal.exists()
    # What the change had taken itself is free again.
    assert set(live_leases(connect(A100))) == {second}
    assert first != second
    theirs[0].release()


def test_no_run_starts_in_what_goes_and_all_is_free_afterwards(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it, meanwhile = {uuid for _, uuid in host.devices()}, []
    real = mig_transact.carry_out

    def look_first(*words: Any) -> None:
        meanwhile.append(set(live_leases(connect(A100))))
        real(*words)

    monkeypatch.setattr(mig_transact, "carry_out", look_first)
    assert host.run("mig", "apply", "7g.80gb").code == 0
    assert meanwhile == [all_of_it]
    assert live_leases(connect(A100)) == {}


def test_a_change_that_changes_nothing_leaves_no_trace(host: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "begin", lambda *_, **__: pytest.fail("a journal of nothing"))
    assert host.run("mig", "apply", "3g.40gb*2").code == 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_journal_is_cleared_at_every_end(host: MigHost, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    begun: list[bool] = []
    real = Journal.begin

    def begin(self: Journal, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        begun.append(host.journal.exists())

    monkeypatch.setattr(Journal, "begin", begin)
    if fails:
        host.fault("fail-step", 2)
    assert host.run("mig", "apply", "7g.80gb").code == (1 if fails else 0)
    assert begun == [True]
    assert not host.journal.exists()


def test_each_step_is_told_where_it_is_asked_for(host: MigHost) -> None:
    said = host.run("-v", "mig", "apply", "7g.80gb")
    assert said.code == 0
    assert "7g.80gb:0" in said.err
    assert "3g.40gb:" in said.err


RUNS = """
import sys
from gpushare.host.connect import connect
from gpushare.host.mig_leases import take_lease
lease = take_lease(connect(sys.argv[1]), sys.argv[2])
print("none" if lease is None else "taken", flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_evicted_holds_its_lease_until_it_has_ended(host: MigHost) -> None:
    (_, evicted), (_, staying) = host.devices()
    name = instance_of(host, evicted)
    with subprocess.Popen(
        [sys.executable, "-c", RUNS, A100, evicted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "taken\n"
        refused = host.run("mig", "destroy", name)
        assert (refused.code, run.poll()) == (19, None)
        # Reaped here, as its shell would: a zombie is not gone.
        waiter = threading.Thread(target=run.wait)
        waiter.start()
        said = host.run("mig", "destroy", name, "--evict", name)
        assert said.code == 0, said
        waiter.join()
        assert run.returncode == -signal.SIGTERM
    assert [uuid for _, uuid in host.devices()] == [staying]
    assert live_leases(connect(A100)) == {}


def going(instance: tuple[Any, ...] | None, *parts: tuple[Any, ...] | None) -> Any:
    """Return what goes: who is known to be in the GPU instance itself, and in each compute instance."""
    profile = SimpleNamespace(name="3g.40gb")
    return SimpleNamespace(
        instance=SimpleNamespace(holders=instance, profile=profile, start=0),
        compute=tuple(SimpleNamespace(holders=part) for part in parts),
    )


SERVICE = Holder(pid=7, what="/dev/nvidia-caps/nvidia-cap12", user="root", name="nv-hostengine")
PROGRAM = GpuProcess(pid=9, compute=True)
RUN = Holder(pid=9, what="lease", name="python3")


def test_all_who_are_anywhere_in_it_are_ended_once() -> None:
    assert mig_evict.holders_of(going((SERVICE,), (PROGRAM, RUN), None)) == [7, 9]
    assert mig_evict.holders_of(going(None, (PROGRAM,))) == [9]
    assert mig_evict.holders_of(going(None, None)) == []
    gpu = Gpu(index=0)
    step = mig_evict.evict_step(connect(A100), gpu, going((), (PROGRAM, RUN)))
    assert (step.what, step.command) == ("end 1 process in 3g.40gb:0 on GPU 0", "kill 9")
    other = GpuProcess(pid=8, compute=True)
    step = mig_evict.evict_step(connect(A100), gpu, going((), (PROGRAM,), (other,)))
    assert (step.what, step.command) == ("end 2 processes in 3g.40gb:0 on GPU 0", "kill 8 9")
    assert (step.undo, step.revert) == (None, None)


@pytest.mark.parametrize("gone", [going((SERVICE,), None), going(None, (SERVICE,)), going((), (PROGRAM,), (SERVICE,))])
def test_a_service_is_found_wherever_it_is(gone: Any) -> None:
    with pytest.raises(InUse) as caught:
        mig_evict.evict_step(connect(A100), Gpu(index=0), gone)
    assert caught.value.code == "held_by_service"


def test_a_run_by_a_services_name_is_a_run() -> None:
    named = Holder(pid=9, what="lease", name="nsys")
    assert mig_evict.evict_step(connect(A100), Gpu(index=0), going((), (PROGRAM, named))).command == "kill 9"


def test_programs_have_ten_seconds_to_end() -> None:
    assert mig_evict.GRACE_SECONDS == 10.0
