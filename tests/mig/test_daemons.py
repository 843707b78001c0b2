"""What a MIG change owes to MPS daemons and to containers."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, InUse, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.model import ComputeMode, Gpu
from gpushare.base.selection import Device
from gpushare.cli import main
from gpushare.gpu_models import model_of
from gpushare.host import cdi
from gpushare.mig import daemons
from gpushare.mig.cdi import cdi_notes, refresh_steps
from gpushare.mps.control import MpsControl
from gpushare.mps.home import DaemonHome, home_of
from gpushare.plan import Plan, Step, carry_out, roll_back
from gpushare.sim import admin, nvidia_ctk
from gpushare.sim.activity import residents
from gpushare.sim.library_mig import destroy_compute_instance
from gpushare.sim.nvml_abi import Handle, HandleKind, Refused, Target
from gpushare.sim.state import StateFile
from tests.cli.drive import CRASHED, World
from tests.conftest import IS_ROOT
from tests.errors import fails

A100 = "sim:a100-80gb"
LAYOUT = ("3g.40gb:0", "1g.10gb:4", "1g.10gb:6")
LIMITS = ("--threads", "40", "--memory", "4G", "--priority", "low")


@pytest.fixture
def world() -> World:
    """Return a simulated A100 with three MIG devices."""
    found = World(A100)
    found.mig(*LAYOUT)
    return found


def started(world: World, uuid: str, *words: str) -> DaemonHome:
    """Start a daemon of ours on a device, with limits."""
    assert main(["--host", world.spec, "mps", "start", "-g", uuid, *(words or LIMITS)]) == 0
    return home_of(world.host.run_directory, uuid)


@pytest.fixture
def first(world: World) -> str:
    """Return the UUID of the first device, on which a daemon of ours runs."""
    uuid = uuids(world)[0]
    started(world, uuid)
    return uuid


@pytest.fixture
def home(world: World, first: str) -> DaemonHome:
    return home_of(world.host.run_directory, first)


def gpu_of(world: World) -> Gpu:
    return world.host.nvml.identities()[0]


def uuids(world: World) -> list[str]:
    return [mig.uuid for mig in gpu_of(world).mig_instances]


def devices(world: World) -> dict[str, Device]:
    gpu = gpu_of(world)
    return {mig.uuid: Device(gpu=gpu, mig=mig) for mig in gpu.mig_instances}


def idle_server(world: World, uuid: str) -> int:
    """Have a client come and go: its server stays, and holds the instance. Return the server's PID."""
    pid = client(world, uuid)
    admin.end_process(world.spec, pid)
    (server,) = world.state.daemons[-1].servers
    return server.pid


def client(world: World, uuid: str) -> int:
    pipe = str(home_of(world.host.run_directory, uuid).pipe)
    return admin.add_process(world.spec, mps=True, mig=uuid, environment={"CUDA_MPS_PIPE_DIRECTORY": pipe})


def do(*steps: Step) -> None:
    carry_out(Plan(title="test", steps=steps))


def failing() -> Step:
    def fail() -> None:
        raise OperationFailed("the driver refuses", "see: nothing", code="refused")

    return Step(what="fail", command="false", do=fail)


def refused(world: World, going: list[str]) -> GpushareError:
    """Return why a change that takes these devices away is refused; nothing of the daemons has changed."""
    before = [daemon.pid for daemon in world.state.daemons]
    with pytest.raises(GpushareError) as caught:
        daemons.daemon_steps_before(world.host, gpu_of(world), going)
    assert [daemon.pid for daemon in world.state.daemons] == before
    return caught.value


# -- before ------------------------------------------------------------------------------------------


def test_an_idle_daemon_and_its_server_do_not_count_as_users(world: World) -> None:
    first, second, _ = uuids(world)
    started(world, first)
    server = idle_server(world, first)
    idle = daemons.idle_daemon_pids(world.host, gpu_of(world))
    assert idle == {world.state.daemons[0].pid, server}
    started(world, second)
    client(world, second)
    assert daemons.idle_daemon_pids(world.host, gpu_of(world)) == idle


def test_another_users_daemon_is_not_idle_but_refused(
    world: World, first: str, home: DaemonHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = home.read()
    assert record is not None
    monkeypatch.setattr(DaemonHome, "read", lambda _: replace(record, uid=4711))
    world.fault("user", "61000")
    assert daemons.idle_daemon_pids(world.host, gpu_of(world)) == frozenset()
    error = refused(world, [first])
    assert (type(error), error.code) == (NoPermission, "not_your_daemon")


def test_only_daemons_on_what_goes_are_stopped(world: World) -> None:
    first, second, third = uuids(world)
    started(world, first)
    started(world, second)
    steps = daemons.daemon_steps_before(world.host, gpu_of(world), [second, third])
    assert [step.what for step in steps] == [
        f"stop the idle MPS daemon {world.state.daemons[1].pid} of MIG 1g.10gb of GPU 0; it stays stopped"
    ]
    assert "echo quit" in steps[0].command
    assert steps[0].undo == f"gpushare mps start -g {second} --threads 40 --memory 4G --priority low"
    assert daemons.daemon_steps_before(world.host, gpu_of(world), []) == ()
    assert len(world.state.daemons) == 2
    do(*steps)
    assert [daemon.visible for daemon in world.state.daemons] == [[first]]


def test_the_undo_of_a_stop_is_a_command_that_works(world: World, first: str, home: DaemonHome) -> None:
    record = home.read()
    (step,) = daemons.daemon_steps_before(world.host, gpu_of(world), [first])
    do(step)
    assert main(["--host", world.spec, *step.undo.split()[1:]]) == 0
    again = home.read()
    assert again == replace(record, pid=again.pid, started=again.started)


def test_the_idle_server_is_what_keeps_the_driver_from_destroying(world: World, first: str) -> None:
    idle_server(world, first)

    def destroy() -> None:
        with StateFile(world.spec).changed() as state:
            gpu = state.gpus[0]
            target = Target(Handle(HandleKind.GPU, 0), gpu, model_of(gpu.model), None)
            one = gpu.mig[0]
            destroy_compute_instance(gpu, one.gpu_instance_id, one.compute_instance_id, residents(state, target))

    with pytest.raises(Refused):
        destroy()
    do(*daemons.daemon_steps_before(world.host, gpu_of(world), [first]))
    destroy()


def test_clients_are_named(world: World, first: str) -> None:
    pid = client(world, first)
    error = refused(world, [first])
    assert (type(error), error.code, error.gpu) == (InUse, "daemon_clients", "0")
    assert str(pid) in error.message
    ending = f"gpushare mps stop -g {first}"
    assert (
        error.hint
        == f"wait up to a minute for them, then end them: {ending} --drain 60s; or end them now: {ending} --force"
    )


def test_a_run_is_named(world: World, first: str, home: DaemonHome) -> None:
    lease = home.take_lease()
    assert daemons.idle_daemon_pids(world.host, gpu_of(world)) == frozenset()
    error = refused(world, [first])
    lease.release()
    assert len(daemons.idle_daemon_pids(world.host, gpu_of(world))) == 1
    assert (error.code, str(os.getpid()) in error.message) == ("daemon_clients", True)
    # A drain waits for clients only.
    assert "--drain" not in error.hint


def test_leases_that_cannot_be_read_may_be_those_of_a_run(
    world: World, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaemonHome, "live_leases", lambda _: None)
    assert daemons.idle_daemon_pids(world.host, gpu_of(world)) == frozenset()
    assert refused(world, [first]).code == "daemon_clients"


def test_a_daemon_that_does_not_answer(world: World, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any) -> Any:
        raise OperationFailed("it does not answer", "wait", code="timeout")

    monkeypatch.setattr(MpsControl, "overview", silent)
    assert daemons.idle_daemon_pids(world.host, gpu_of(world)) == frozenset()
    error = refused(world, [first])
    assert (type(error), error.code) == (InUse, "daemon_silent")
    assert "--force" in error.hint


def test_a_dead_daemon_holds_nothing(world: World, first: str) -> None:
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    assert daemons.daemon_steps_before(world.host, gpu_of(world), [first]) == ()


@pytest.mark.parametrize("whole", [False, True])
def test_a_daemon_of_others_is_named_and_left(world: World, sim_dir: Path, *, whole: bool) -> None:
    first = uuids(world)[0]
    pid = world.foreign_daemon(sim_dir, uuid=None if whole else first)
    error = refused(world, [first])
    assert (type(error), error.code) == (InUse, "foreign_daemon")
    assert str(pid) in error.message
    assert error.hint == f"stop it: gpushare mps stop --pipe-directory {sim_dir}/p"


def test_a_daemon_of_others_on_another_instance_is_no_matter(world: World, sim_dir: Path) -> None:
    first, second, _ = uuids(world)
    world.foreign_daemon(sim_dir, uuid=second)
    assert daemons.daemon_steps_before(world.host, gpu_of(world), [first]) == ()


def test_a_client_that_comes_before_the_stop_keeps_its_daemon(world: World, first: str, home: DaemonHome) -> None:
    steps = daemons.daemon_steps_before(world.host, gpu_of(world), [first])
    client(world, first)
    with pytest.raises(InUse):
        do(*steps)
    assert len(world.state.daemons) == 1
    assert home.read() is not None


def test_an_evicted_daemon_is_forced_down_and_comes_back_when_the_change_fails(
    world: World, first: str, home: DaemonHome
) -> None:
    client(world, first)
    steps = daemons.daemon_steps_before(world.host, gpu_of(world), [first], evicted=[first])
    assert [step.what.partition(",")[2] for step in steps] == [" and end its servers; it stays stopped"]
    do(*steps)
    assert (world.state.daemons, home.read()) == ([], None)
    assert roll_back(steps) == []
    record = home.read()
    assert ([daemon.pid for daemon in world.state.daemons], record.limits.threads_percent) == ([record.pid], 40.0)


def test_a_later_failure_starts_it_again_with_its_limits(world: World, first: str, home: DaemonHome) -> None:
    record = home.read()
    steps = daemons.daemon_steps_before(world.host, gpu_of(world), [first])
    with pytest.raises(OperationFailed, match=r"(?m)^the driver refuses$"):
        do(*steps, failing())
    again = home.read()
    assert again.pid != record.pid
    assert again == replace(record, pid=again.pid, started=again.started)


def test_what_cannot_be_started_again_is_said_with_the_command(world: World, first: str) -> None:
    (step,) = daemons.daemon_steps_before(world.host, gpu_of(world), [first])

    def cut() -> None:
        admin.set_mig(world.spec, "0", ["7g.80gb"])
        raise OperationFailed("the driver refuses", "see: nothing", code="refused")

    with pytest.raises(OperationFailed, match="could not be undone: stop the idle MPS daemon") as caught:
        do(step, Step(what="cut", command="cut", do=cut))
    assert step.undo is not None
    assert step.undo in caught.value.hint


def test_mig_switched_on_stops_the_daemon_of_the_whole_gpu() -> None:
    world = World(A100)
    started(world, "0", "--exclusive", "--threads", "50")
    home = home_of(world.host.run_directory, world.uuid())
    assert world.host.nvml.compute_mode(0) is ComputeMode.EXCLUSIVE_PROCESS
    steps = daemons.daemon_steps_before(world.host, gpu_of(world), [world.uuid()])
    for step in steps:
        step.do()
    assert (world.state.daemons, world.host.nvml.compute_mode(0)) == ([], ComputeMode.DEFAULT)
    assert roll_back(steps) == []
    record = home.read()
    assert (record.limits.threads_percent, record.previous_compute_mode) == (50.0, "DEFAULT")
    assert world.host.nvml.compute_mode(0) is ComputeMode.EXCLUSIVE_PROCESS


@pytest.mark.parametrize("mig", [False, True])
def test_the_daemon_of_a_whole_gpu_is_recovered_only_while_mig_is_off(mig: bool) -> None:
    world = World(A100)
    started(world, "0", "--threads", "50")
    records = daemons.stopped_records(world.host, gpu_of(world), [world.uuid()])
    assert [record.limits.threads_percent for record in records] == [50.0]
    for step in daemons.daemon_steps_before(world.host, gpu_of(world), [world.uuid()]):
        step.do()
    if mig:
        world.mig("3g.40gb")
    told = daemons.recover_daemons(world.host, gpu_of(world), records)
    assert told == (() if mig else ("started the MPS daemon of GPU 0 again",))
    assert [daemon.threads for daemon in world.state.daemons] == ([] if mig else [50.0])


# -- after -------------------------------------------------------------------------------------------


def change(world: World, going: list[str], *layout: str) -> list[Step]:
    """Return the steps of a change: daemons that go, another layout, daemons that are started again."""
    stayed = [device for uuid, device in devices(world).items() if uuid not in going]

    def cut() -> None:
        admin.set_mig(world.spec, "0", layout)

    before = daemons.daemon_steps_before(world.host, gpu_of(world), going)
    return [*before, Step(what="cut", command="cut", do=cut), *daemons.daemon_steps_after(world.host, stayed)]


def test_a_dead_daemon_on_an_instance_that_stays_is_started_again(world: World) -> None:
    first, _, third = uuids(world)
    home = started(world, first)
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    do(*change(world, [third], "3g.40gb:0", "1g.10gb:4"))
    record = home.read()
    assert [daemon.pid for daemon in world.state.daemons] == [record.pid]


def test_a_daemon_of_a_run_is_not_started_again(world: World, first: str, home: DaemonHome) -> None:
    record = home.read()
    home.write(replace(record, transient=True))
    (step,) = daemons.daemon_steps_before(world.host, gpu_of(world), [first])
    assert not step.what.endswith("; it stays stopped")
    step.do()
    assert (world.state.daemons, home.read()) == ([], None)
    # Nor when the change is taken back.
    assert roll_back([step]) == []
    assert world.state.daemons == []


def test_another_instance_with_the_old_uuid_gets_no_daemon(world: World) -> None:
    """A MIG UUID is a place: another profile there comes with the same one."""
    third = uuids(world)[2]
    home = started(world, third)
    device = devices(world)[third]
    assert device.mig is not None
    wanted = Device(gpu=device.gpu, mig=type(device.mig)(uuid=third, profile="1g.20gb"))
    record = home.read()
    assert record is not None
    with fails(NotFound, "device_gone"):
        daemons.start_again(world.host, record, wanted)


def test_a_start_that_a_later_failure_takes_back(world: World) -> None:
    first, _, third = uuids(world)
    started(world, first)
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    steps = change(world, [third], "3g.40gb:0", "1g.10gb:4")
    with pytest.raises(OperationFailed, match=r"(?m)^the driver refuses$"):
        do(*steps, failing())
    assert world.state.daemons == []


def test_a_change_that_is_killed_leaves_enough_to_recover(world: World) -> None:
    first, second, _ = uuids(world)
    home = started(world, first)
    started(world, second)
    records = daemons.stopped_records(world.host, gpu_of(world), [first, second])
    records = tuple(sorted(records, key=lambda record: record.device_uuid != first))
    assert [(record.device_uuid, record.profile) for record in records] == [(first, "3g.40gb"), (second, "1g.10gb")]
    for step in daemons.daemon_steps_before(world.host, gpu_of(world), [first, second]):
        step.do()
    # The second comes back as another profile.
    records = (records[0], replace(records[1], profile="1g.20gb"))
    said = daemons.recover_daemons(world.host, gpu_of(world), records)
    assert said[0] == "started the MPS daemon of MIG 3g.40gb of GPU 0 again"
    assert "was not started again" in said[1]
    record = home.read()
    assert ([daemon.pid for daemon in world.state.daemons], record.limits.threads_percent) == ([record.pid], 40.0)
    assert daemons.recover_daemons(world.host, gpu_of(world), records) == (said[1],)


def test_a_crash_on_the_second_gpu_still_brings_the_daemon_of_the_first_back() -> None:
    host = World.new("sim:2xa100-80gb")
    assert host.run("mig", "apply", "-g", "0", "2g.20gb:0").code == 0
    ((_, uuid),) = host.devices()
    assert host.run("mps", "start", "-g", uuid, "--threads", "40").code == 0
    # Of the first GPU: two that destroy, two that create; then the mode of the second.
    host.fault("crash-step", 5)
    assert host.run_apart("mig", "apply", "-g", "0,1", "1g.10gb:4") == CRASHED
    host.clear()
    assert host.state.daemons == []
    assert host.run("mig", "recover").code == 0
    assert [daemon.visible for daemon in host.state.daemons] == [[uuid]]


# -- containers --------------------------------------------------------------------------------------


@pytest.fixture
def toolkit(world: World) -> Callable[[], bytes]:
    """Install the container toolkit; return a function that reads its specification."""
    file = StateFile(world.spec)
    nvidia_ctk.install(file)
    return (file.directory / "var/run/cdi/nvidia.yaml").read_bytes


def test_no_specification_is_nothing_to_say(world: World) -> None:
    assert cdi_notes(world.host, [gpu_of(world)]) == ()


def test_a_stale_specification_is_said_with_the_command(world: World, toolkit: Callable[[], bytes]) -> None:
    assert cdi_notes(world.host, [gpu_of(world)]) == ()
    gone = uuids(world)[2]
    admin.set_mig(world.spec, "0", LAYOUT[:2])
    (note,) = cdi_notes(world.host, [gpu_of(world)])
    assert gone in note
    assert "sudo nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml" in note
    assert toolkit()


def test_a_refreshed_file_keeps_its_mode_and_owner_and_is_taken_back(
    world: World, toolkit: Callable[[], bytes]
) -> None:
    before = toolkit()
    file = cdi.local_path(world.host, cdi.DEFAULT_PATH)
    file.chmod(0o640)
    if IS_ROOT:
        os.chown(file, 1, 8)
    admin.set_mig(world.spec, "0", LAYOUT[:2])
    (step,) = refresh_steps(world.host)
    assert step.command == step.undo == "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"
    rights = rights_of(file)
    step.do()
    assert cdi_notes(world.host, [gpu_of(world)]) == ()
    assert toolkit() != before
    assert rights_of(file) == rights
    assert roll_back([step]) == []
    assert (toolkit(), rights_of(file)) == (before, rights)


def rights_of(file: Path) -> tuple[int, int, int]:
    """Return mode, user and group of a file."""
    stated = file.stat()
    return stat.S_IMODE(stated.st_mode), stated.st_uid, stated.st_gid


def test_refresh_that_fails_leaves_the_old_file(world: World, toolkit: Callable[[], bytes]) -> None:
    before = toolkit()
    file = cdi.local_path(world.host, cdi.DEFAULT_PATH)
    number = file.stat().st_ino
    admin.set_mig(world.spec, "0", LAYOUT[:2])
    steps = refresh_steps(world.host)
    world.fault("user", "61000")
    with pytest.raises(NoPermission):
        do(*steps)
    assert toolkit() == before
    # Not replaced: in a directory that this user may not write, the undo would fail.
    assert file.stat().st_ino == number


def test_refresh_of_a_file_that_went_meanwhile(world: World, toolkit: Callable[[], bytes]) -> None:
    steps = refresh_steps(world.host)
    assert toolkit()
    cdi.local_path(world.host, cdi.DEFAULT_PATH).unlink()
    with fails(OperationFailed, "cdi_unreadable"):
        do(*steps)


def test_refresh_without_a_specification(world: World) -> None:
    with fails(NotFound, "no_cdi_spec", hint="nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"):
        refresh_steps(world.host)


@pytest.mark.usefixtures("toolkit")
def test_refresh_without_the_toolkit(world: World) -> None:
    world.fault("missing", "nvidia-ctk")
    with pytest.raises(NotSupported):
        refresh_steps(world.host)
