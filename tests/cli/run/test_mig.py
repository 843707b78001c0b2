"""``gpushare run --mig``: a free instance is taken, by one program at a time, and given back whatever happens."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import InUse, OperationFailed
from gpushare.base.model import GpuProcess
from gpushare.base.selection import Device
from gpushare.base.units import GIB, MIB
from gpushare.gpu_models import find_model
from gpushare.host.capabilities import user_name
from gpushare.host.claims import HeldClaim, live_claims, take_claim
from gpushare.host.host import Host
from gpushare.host.nvml import NvmlReader
from gpushare.memory.ledger import Place, Request, reservations
from gpushare.mig import on_demand
from gpushare.mig.change import MigChange
from gpushare.mig.ledger import MigLedger, NamedInstance, changing_names
from gpushare.mig.on_demand import ON_DEMAND, OnDemand
from gpushare.mig.places import profile_places
from gpushare.run import mig as run_mig
from gpushare.run.jobs import records
from gpushare.run.plain import PlainWatch
from gpushare.sim import admin
from gpushare.sim.current import changing
from gpushare.sim.library_mig import create_compute_instance, destroy_compute_instance
from gpushare.sim.state import StateFile, parse_spec
from tests.cli.drive import H200, Cli, Patch, Real, Refused, Started, Words, World, alive, missing, refusals, until

PRINT = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CUDA')}))"
WAITS = ("--", "cat")
# Says "ready", then on SIGINT "got"; ends when its file is there.
SLOW = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: print("got", flush=True))
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


def bind(world: World, name: str, profile: str, start: int, gpu: int = 0) -> None:
    """Give an instance a name."""
    with changing_names(world.host) as names:
        names[name] = NamedInstance(name=name, gpu_uuid=world.uuid(gpu), profile=profile, start=start)


def divided(world: World, *numbers: int) -> None:
    """Put these compute instances (NVML profile numbers) into the first GPU instance; none leaves it bare."""
    with changing(StateFile(parse_spec(world.spec).text)) as (state, _):
        gpu = state.gpus[0]
        identity = gpu.mig[0].gpu_instance_id
        destroy_compute_instance(gpu, identity, gpu.mig[0].compute_instance_id, [])
        for number in numbers:
            create_compute_instance(gpu, find_model(gpu.model), identity, number, None)


def leases(world: World) -> dict[str, int]:
    return {uuid: holder.pid for uuid, holder in live_claims(world.host).items()}


def variables(started: Started) -> dict[str, str]:
    answer = started.result().ok()
    return json.loads(answer.out)


def waiting(real: Real, *words: str) -> Started:
    """Start a run that ends with its input."""
    return real("run", *words, *WAITS, stdin=subprocess.PIPE)


def line(started: Started) -> str:
    return started.note()


def ended(started: Started) -> int:
    started.process.communicate(timeout=120)
    return started.process.returncode


@pytest.fixture
def first(real: Real, world: World) -> Started:
    """Start a program in the only instance of the host, which ends with its input."""
    world.mig("1g.18gb")
    started = waiting(real, "--mig", "1g")
    until(lambda: {record.pid for record in records(world.host)} == set(world.pids()) != set(), "the first one runs")
    return started


@pytest.mark.parametrize("text", ["1g.18gb", "1g", "19", "MIG 1g.18gb", "1g.18gb:4"])
def test_a_free_instance_of_the_profile(real: Real, world: World, text: str) -> None:
    _, uuid = world.mig("3g.71gb:0", "1g.18gb:4")
    environment = variables(real("run", "--mig", text, "--", sys.executable, "-c", PRINT))
    assert environment.pop("CUDA_VISIBLE_DEVICES") == uuid
    # No daemon listens there, and nobody else may put one there.
    pipe = Path(environment.pop("CUDA_MPS_PIPE_DIRECTORY"))
    assert (environment, list(pipe.iterdir()), pipe.stat().st_mode & 0o022) == ({}, [], 0)
    assert (world.state.daemons, leases(world)) == ([], {})


def test_the_callers_mps_variables_do_not_lead_it_away(real: Real, world: World, sim_dir: Path) -> None:
    (uuid,) = world.mig("1g.18gb")
    world.foreign_daemon(sim_dir)
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(sim_dir / "p"), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10", "CUDA_CACHE": "1"}
    started = real("run", "--mig", "1g", "--", sys.executable, "-c", PRINT, env=own)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in line(started)
    environment = variables(started)
    assert environment.pop("CUDA_MPS_PIPE_DIRECTORY") != own["CUDA_MPS_PIPE_DIRECTORY"]
    assert environment == {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_CACHE": "1"}


def test_the_proof_of_an_instance(real: Real, world: World, cli: Cli, monkeypatch: Patch) -> None:
    world.mig("1g.18gb")
    started = waiting(real, "--mig", "1g")
    identity = world.state.gpus[0].mig[0].gpu_instance_id
    started.says(f"runs in MIG 1g.18gb of GPU 0 (GPU instance {identity}, compute instance 0)")
    assert ended(started) == 0
    world.mig("1g.18gb")
    monkeypatch.setenv("GPUSHARE_SIM_ATTACH_DELAY", "6000")
    answer = cli("run", "--mig", "1g", "--", "true")
    assert (answer.code, "is not proved" in answer.err) == (0, True)


def test_a_process_elsewhere_is_outside(world: World) -> None:
    mine, other = world.mig("1g.18gb:4", "1g.18gb:5")
    gpu = world.host.nvml.sweep()[0]
    device = Device(gpu=gpu, mig=next(mig for mig in gpu.mig_instances if mig.uuid == mine))
    seen = {}
    for uuid in (mine, other):
        watch = PlainWatch(world.host, device, admin.add_process(H200, mig=uuid))
        watch.find_processes()
        watch.find_processes()
        seen[uuid] = (watch.attached == {watch.program_pid}, watch.outside == {watch.program_pid})
    assert seen == {mine: (True, False), other: (False, True)}


def test_two_at_once_get_different_ones_and_the_third_is_refused(real: Real, refused: Refused, world: World) -> None:
    uuids = world.mig("1g.18gb:4", "1g.18gb:5")
    first, second = waiting(real, "--mig", "1g"), waiting(real, "--mig", "1g")
    until(lambda: len(world.pids()) == 2, "both run")
    until(lambda: {record.pid for record in records(world.host)} == set(world.pids()), "their records name them")
    assert sorted(leases(world)) == sorted(uuids)
    assert sorted(leases(world).values()) == sorted([first.pid, second.pid])
    assert len({process.gpu_instance_id for process in world.state.processes}) == 2
    message = refused("run", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    assert all(str(pid) in message for pid in world.pids())
    assert (ended(first), ended(second), leases(world)) == (0, 0, {})


def test_of_five_at_the_same_moment_two_get_one(real: Real, world: World) -> None:
    world.mig("1g.18gb:4", "1g.18gb:5")
    started = [waiting(real, "--mig", "1g") for _ in range(5)]
    until(lambda: sum(job.process.poll() == 19 for job in started) == 3, "three are refused")
    until(lambda: len(world.pids()) == 2, "two run")
    assert len({process.gpu_instance_id for process in world.state.processes}) == 2
    assert sorted(ended(job) for job in started) == [0, 0, 19, 19, 19]


def test_who_is_in_an_instance_is_named(refused: Refused, world: World, cli: Cli) -> None:
    (uuid,) = world.mig("1g.18gb")
    lease = take_claim(world.host, uuid)
    assert isinstance(lease, HeldClaim)
    for words in ((), ("-n",), ("--threads", "50")):
        message = refused("run", *words, "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
        assert f"gpushare run, process {os.getpid()}" in message
    lease.release()
    busy, _ = world.mig("1g.18gb:4", "1g.18gb:5")
    pid = admin.add_process(H200, mig=busy, name="train.py")
    message = refused("run", "--mig", "1g.18gb:4", "--", "true", code="instance_in_use", exit_code=19)
    assert f"process {pid} (train.py, user {user_name(os.geteuid())})" in message
    assert cli("run", "--mig", "1g", "--", "true").code == 0


def test_what_cannot_be_told_is_not_free(refused: Refused, cli: Cli, world: World) -> None:
    world.mig("1g.18gb")
    world.fault("not-supported", "processes")
    text = refused("run", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    assert "its processes are unknown" in text
    admin.clear_faults(H200)
    world.fault("blind")
    refused("run", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    # Who names an instance means it.
    bind(world, "train", "1g.18gb", world.state.gpus[0].mig[0].start)
    assert cli("run", "--mig", "train", "--", "true").code == 0


def test_an_instance_with_an_idle_daemon_is_kept_for_its_owner(refused: Refused, cli: Cli, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:4")
    cli("mps", "start", "-g", uuid).ok()
    assert "MPS daemon" in refused("run", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    bind(world, "train", "1g.18gb", 4)
    assert cli("run", "--mig", "train", "--threads", "50", "--", "true").code == 0
    assert len(world.state.daemons) == 1


@pytest.mark.parametrize("change", ["process", "profile"])
def test_it_is_looked_at_again_under_the_lease(world: World, monkeypatch: Patch, change: str) -> None:
    """Somebody may come in, or change the instance, until the lease is held."""
    (uuid,) = world.mig("1g.18gb:4")
    lock = run_mig.take_claim

    def late(*arguments: object) -> object:
        if change == "process":
            admin.add_process(H200, mig=uuid)
        else:
            # The same GPU instance id, and so the same UUID, with another size is the driver's to give.
            with changing(StateFile(H200)) as (state, _):
                state.gpus[0].mig[0].profile = "1g.18gb+me"
        return lock(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run_mig, "take_claim", late)
    with pytest.raises(InUse, match="it has just been changed" if change == "profile" else "process"):
        run_mig.InstanceWish(host=world.host, text="1g", gpu=None).take()
    assert leases(world) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("limits", [(), ("--threads", "50")])
def test_a_signal_ends_the_program_and_gives_it_back(real: Real, world: World, number: int, limits: Words) -> None:
    world.mig("1g.18gb")
    started = real("run", "--mig", "1g", *limits, "--", "sleep", "600")
    line(started)
    assert started.end(number).code == 128 + number
    assert (world.host.nvml.processes(0), world.state.daemons, leases(world)) == ((), [], {})


def test_a_program_that_ignores_its_signal_is_killed_after_the_grace(real: Real, world: World) -> None:
    world.mig("1g.18gb")
    started = real("run", "--mig", "1g", "--grace", "0.2s", "--", sys.executable, "-c", SLOW, "/nonexistent")
    assert started.line() == "ready\n"
    line(started)
    answer = started.end()
    # Whether it comes to say "got" within the grace is the machine's affair.
    assert (answer.code, answer.out.removeprefix("got\n")) == (130, "")
    assert (world.host.nvml.processes(0), leases(world)) == ((), {})


@pytest.mark.parametrize("limits", [(), ("--threads", "50")])
def test_death_of_gpushare_gives_it_back_afterwards(
    real: Real, refused: Refused, cli: Cli, world: World, tmp_path: Path, limits: Words
) -> None:
    (uuid,) = world.mig("1g.18gb")
    go = tmp_path / "go"
    started = real("run", "--mig", "1g", *limits, "--", sys.executable, "-c", SLOW, str(go))
    line(started)
    (child,) = [process.pid for process in world.state.processes if process.real]
    assert started.line() == "ready\n"
    started.signal(signal.SIGKILL)
    assert started.line() == "got\n"
    # The guard has it now, as long as the program takes to end.
    assert alive(child)
    until(lambda: leases(world).get(uuid) not in {None, started.pid}, "the guard holds the lease")
    refused("run", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    go.touch()
    until(lambda: leases(world) == {}, "the lease is released")
    assert not alive(child)
    until(lambda: world.state.daemons == [], "no daemon")
    assert cli("run", "--mig", "1g", *limits, "--", "sh", "-c", "exit 3").code == 3


def test_limits_run_under_mps_inside_the_instance(real: Real, world: World) -> None:
    (uuid,) = world.mig("3g.71gb")
    started = waiting(real, "--mig", "3g", "--threads", "50", "--memory", "4G")
    (client,) = until(world.attached, "attached")
    assert "is attached to MPS server" in line(started)
    assert client.gpu_instance_id == world.state.gpus[0].mig[0].gpu_instance_id
    assert (client.threads, client.memory_limit_bytes) == (50.0, 3584 * MIB)
    assert (list(leases(world)), ended(started)) == ([uuid], 0)
    until(lambda: (world.state.daemons, leases(world)) == ([], {}), "all is given back")


def test_what_the_program_leaves_keeps_the_instance_not_the_lease(real: Real, refused: Refused, world: World) -> None:
    (uuid,) = world.mig("1g.18gb")
    started = real("run", "--mig", "1g", "--threads", "50", "--", "sleep", "600")
    until(world.attached, "attached")
    other = world.client(environment={"CUDA_VISIBLE_DEVICES": uuid})
    assert (started.end().code, len(world.state.daemons), leases(world)) == (130, 1, {})
    assert str(other) in refused("run", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    world.send(other, signal.SIGKILL)
    until(lambda: world.state.daemons == [], "no daemon")


def test_names_are_kept_for_who_names_them(real: Real, refused: Refused, world: World) -> None:
    uuid, _ = world.mig("3g.71gb:0", "1g.18gb:4")
    bind(world, "train", "3g.71gb", 0)
    message = refused("run", "--mig", "3g", "--", "true", code="no_instance", exit_code=6)
    assert "reserved for runs that name it: train" in message
    # It may be granted to others only.
    assert "run in one of them, if it is open to you: --mig NAME" in message
    assert variables(real("run", "--mig", "train", "--", sys.executable, "-c", PRINT))["CUDA_VISIBLE_DEVICES"] == uuid
    started = waiting(real, "--mig", "train")
    until(lambda: {record.pid for record in records(world.host)} == set(world.pids()) != set(), "it runs")
    assert "train" in refused("run", "--mig", "train", "--", "true", code="instance_in_use", exit_code=19)
    assert ended(started) == 0


def test_an_instance_that_is_granted_to_others_is_refused(refused: Refused, cli: Cli, world: World) -> None:
    world.mig("3g.71gb:0", "1g.18gb:4")
    bind(world, "train", "3g.71gb", 0)
    cli("mig", "grant", "train", "nobody").ok()
    # Root may use every instance.
    world.fault("user", "root")
    cli("run", "--mig", "train", "-n", "--", "true").ok()
    world.fault("user", "1000")
    uuid = world.host.nvml.gpu(0).mig_instances[0].uuid
    for option in itertools.product(
        (("--mig", "train"), ("-g", "train"), ("-g", uuid)), ((), ("-n",), ("--wait",), ("--memory", "1G"))
    ):
        words = ("run", *option[0], *option[1], "--", "true")
        message = refused(*words, code="granted_to_others", exit_code=4)
        assert missing(message, "train is granted to nobody only", "sudo gpushare mig grant train") == []
    message = refused("run", "--mig", "3g", "--", "true", code="no_instance", exit_code=6)
    assert "--mig train" not in message
    assert "make another: gpushare mig create 3g -g 0" in message
    assert "1g.18gb" in cli("run", "-g", "any", "-n", "--", "true").ok().out
    world.fault("user", "nobody")
    for option in ("--mig", "-g"):
        cli("run", option, "train", "-n", "--", "true").ok()


def test_a_divided_instance(refused: Refused, cli: Cli, world: World) -> None:
    world.mig("3g.71gb:0")
    divided(world, 0, 0)
    refused("run", "--mig", "3g", "--", "true", code="no_instance", exit_code=6)
    assert "1c.3g.71gb:0 of GPU 0" in cli("run", "-n", "--mig", "1c.3g.71gb", "--", "true").ok().out
    assert cli("run", "--mig", "1c.3g", "--", "sh", "-c", "exit 5").code == 5


# What stands where the name points, and what is said of it.
@pytest.mark.parametrize(
    ("there", "code", "instead"),
    [
        (("1g.18gb:0", "1g.18gb:4"), "not_as_named", "1g.18gb:0 is there now"),
        (("7g.141gb",), "not_as_named", "7g.141gb:0 is there now"),
        (("1g.18gb:4",), "not_as_named", "nothing is there now"),
        ((), "mig_off", "MIG is off there"),
    ],
)
@pytest.mark.parametrize("words", [("run", "--mig", "train", "--", "true"), ("mig", "env", "train")])
def test_a_name_of_another_place(
    refused: Refused, world: World, there: Words, code: str, instead: str, words: Words
) -> None:
    bind(world, "train", "3g.71gb", 0)
    world.mig(*there)
    message = refused(*words, code=code, exit_code=6)
    assert "train means 3g.71gb:0 of GPU 0" in message
    assert instead in message
    assert "gpushare mig create -g 0 3g.71gb:0" in message
    assert "MIG-" not in message


@pytest.mark.parametrize("words", [("run", "--mig", "train", "--", "true"), ("mig", "env", "train")])
def test_a_name_that_leads_nowhere(refused: Refused, world: World, words: Words) -> None:
    refused(*words, code="no_name", exit_code=6)
    world.mig("3g.71gb:0")
    bind(world, "train", "3g.71gb", 0)
    divided(world)
    assert "-cci" in refused(*words, code="no_compute_instance", exit_code=6)
    world.fault("lost")
    refused(*words, code="gpu_lost", exit_code=6)
    admin.clear_faults(H200)
    with changing_names(world.host) as names:
        names["train"] = NamedInstance(name="train", gpu_uuid="GPU-gone", profile="3g.71gb", start=0)
    refused(*words, code="unknown_gpu", exit_code=6)


@refusals(
    "no_instance 6: --mig 2g | --wait --mig 2g",
    "mig_profile_unknown 3: --mig 9g.99gb",
    "bad_count 2: --mig '1g*2' | --mig '1g 3g'",
    "bad_mig 2: --mig MIG-0123abcd-0000 | --mig MIG-93 | --mig 0/9 | --mig 0/9/0",
    "bad_profile 2: --mig 1gx",
    "no_name 6: --mig nobody | --wait --mig nobody",
    "unknown_gpu 6: --mig 1g -g 7",
    "limit_above_gpu 2: --wait --mig 1g --memory 20G | -n --wait --mig 1g --memory 20G",
)
def test_wrong_usage(refused: Refused, world: World, words: Words, code: str, exit_code: int) -> None:
    world.mig("1g.18gb")
    refused("run", *words, "--", "true", code=code, exit_code=exit_code)
    assert (leases(world), reservations(world.host)) == ({}, [])


def test_missing_programs(refused: Refused, world: World, cli: Cli) -> None:
    world.mig("1g.18gb")
    refused("run", "--mig", "1g", "--", "no-such-program", code="command_not_found", exit_code=127)
    refused("run", "--mig", "1g", "--threads", "5", "--", "/etc/passwd", code="command_not_executable", exit_code=126)
    # An instance needs no daemon's program.
    world.mig("1g.18gb")
    world.fault("missing", "nvidia-cuda-mps-control")
    assert cli("run", "--mig", "1g", "--", "sh", "-c", "exit 3").code == 3


def test_a_lost_gpu_hides_no_named_instance(cli: Cli) -> None:
    two = "sim:2xh100"
    cli("mig", "enable", "-g", "0", "-y", host=two).ok()
    cli("mig", "create", "1g", "-g", "0", "--name", "tiny", host=two).ok()
    World(two).fault("lost", gpu="1")
    assert "tiny" in cli("run", "--mig", "tiny", "-g", "0,1", "-n", "--", "true", host=two).ok().out


def test_an_instance_and_a_kind_of_instance(refused: Refused, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:4")
    bind(world, "train", "1g.18gb", 4)
    for mig in ("1g", "train"):
        for gpu in (uuid, "train"):
            words = ("run", "--mig", mig, "-g", gpu)
            assert "-g and --mig" in refused(*words, "--", "true", code="two_names", exit_code=2)
    refused("run", "--mig", "1g", "--create", "-g", "train", "--", "true", code="two_names", exit_code=2)


def test_any_gpu_is_all_of_them(cli: Cli) -> None:
    two = World("sim:2xh200")
    (uuid,) = two.mig("1g.18gb:2", gpu="1")
    for more in ((), ("--wait",), ("--create",)):
        assert uuid in cli("run", "-n", "--mig", "1g", "-g", "any", *more, "--", "true", host=two.spec).ok().out
    bind(two, "train", "1g.18gb", 2, gpu=1)
    assert uuid in cli("run", "-n", "--mig", "train", "-g", "any", "--", "true", host=two.spec).ok().out


@pytest.mark.parametrize(("host", "code", "exit_code"), [(H200, "mig_off", 6), ("sim:t4", "no_mig", 3)])
def test_no_mig(refused: Refused, host: str, code: str, exit_code: int) -> None:
    refused("run", "--mig", "1g", "--", "true", code=code, exit_code=exit_code, host=host)


def test_on_the_gpu_that_is_named(cli: Cli) -> None:
    two = World("sim:2xh200")
    two.mig("1g.18gb:0", gpu="0")
    (uuid,) = two.mig("1g.18gb:2", gpu="1")
    steps = cli("-o", "json", "run", "-n", "--mig", "1g", "-g", "1", "--", "true", host=two.spec).ok().data["steps"]
    assert uuid in steps[0]["command"]
    bind(two, "train", "1g.18gb", 2, gpu=1)
    assert cli("run", "--mig", "train", "-g", "0", "--", "true", host=two.spec).code == 2
    assert cli("run", "--mig", "train", "-g", "1", "--", "true", host=two.spec).code == 0


def test_a_plan_in_an_instance(cli: Cli, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:4")
    (step,) = cli("-o", "json", "run", "-n", "--mig", "1g", "--", "sh", "-c", "exit 3").ok().data["steps"]
    assert "1g.18gb:4 of GPU 0" in step["what"]
    assert step["command"].startswith(f"CUDA_VISIBLE_DEVICES={uuid} CUDA_MPS_PIPE_DIRECTORY=")
    assert step["command"].endswith("sh -c 'exit 3'")
    steps = cli("-o", "json", "run", "-n", "--mig", "1g", "--threads", "25", "--", "true").ok().data["steps"]
    assert [each["what"].split()[0] for each in steps] == ["create", "record", "start", "record", "run"]
    assert (leases(world), list(world.directory.rglob("*.lease"))) == ({}, [])
    world.mig("1g.18gb")
    steps = cli("-o", "json", "run", "-n", "--mig", "1g", "--memory", "8G", "--", "true").ok().data["steps"]
    assert [step["what"] for step in steps] == [
        "reserve 8.0 GiB on MIG 1g.18gb of GPU 0",
        "run true in 1g.18gb:0 of GPU 0, if it is still free then",
        "end it if its processes together hold more than 8.0 GiB (added up five times a second)",
    ]


JOB = (sys.executable, "-m", "gpushare.sim.job", "--every", "0.05")


def test_only_its_own_processes_count_for_the_limit_of_a_job_in_an_instance(cli: Cli, world: World) -> None:
    world.mig("1g.18gb")
    answer = cli("run", "--mig", "1g", "--memory", "4G", "--", *JOB, "--footprint", "5G", "--seconds", "60").ends(1)
    (error,) = answer.lines("error")
    assert "the job holds 5.0 GiB, over its limit of 4.0 GiB" in error
    assert (leases(world), reservations(world.host)) == ({}, [])
    _, other = world.mig("1g.18gb:4", "1g.18gb:5")
    admin.add_process(world.spec, mig=other, memory_bytes=8 * GIB)
    cli("run", "--mig", "1g", "--memory", "4G", "--", *JOB, "--footprint", "3G", "--seconds", "0.5").ok()


@pytest.mark.parametrize("more", [(), ("--threads", "50")], ids=["alone", "under MPS"])
def test_the_limit_in_an_instance_is_reserved_and_shown(real: Real, cli: Cli, world: World, more: Words) -> None:
    (uuid,) = world.mig("1g.18gb")
    words = ("--mig", "1g", *more, "--name", "train", "--memory", "8G", "--over", "warn", "--time", "1h")
    job = real("run", *words, "--", *JOB, "--footprint", "2G", "--seconds", "60")
    until(lambda: any(reservation.limit_bytes for reservation in reservations(world.host) or []), "it has a limit")
    assert [job.run_seconds for job in reservations(world.host) or []] == [3600.0]
    data = cli("status", output="json").ok().data
    (limited,) = cli("jobs", output="json").ok().data["jobs"]
    assert (limited["name"], limited["device_uuids"], limited["memory_limit_bytes"]) == ("train", [uuid], 8 * GIB)
    assert data["gpus"][0]["mig_instances"][0]["jobs_reserved_bytes"] == 8 * GIB
    job.end()
    assert (leases(world), reservations(world.host)) == ({}, [])


@pytest.mark.parametrize("more", [(), ("-n",)])
def test_a_limit_above_the_instance_takes_nothing(refused: Refused, world: World, more: Words) -> None:
    world.mig("1g.18gb")
    words = ("run", *more, "--mig", "1g", "--memory", "20G", "--", "true")
    text = refused(*words, code="limit_above_gpu", exit_code=2)
    assert missing(text, "MIG 1g.18gb of GPU 0 has 16.0 GiB", "give at most --memory 16G") == []
    assert (leases(world), reservations(world.host)) == ({}, [])


def test_an_instance_whose_claims_are_unknown_is_not_free(refused: Refused, world: World, monkeypatch: Patch) -> None:
    world.mig("1g.18gb")
    monkeypatch.setattr(run_mig, "claimed_instances", lambda _: None)
    text = refused("run", "-n", "--mig", "1g", "--", "true", code="instance_in_use", exit_code=19)
    assert "its processes are unknown" in text


def test_without_the_ledger_the_instance_is_given_back(cli: Cli, world: World, monkeypatch: Patch) -> None:
    def refuse(*_: object) -> None:
        raise OperationFailed("the ledger is read-only", "see: mount", code="lease_unusable")

    world.mig("1g.18gb")
    monkeypatch.setattr("gpushare.run.queued.Place", refuse)
    answer = cli("run", "--mig", "1g", "--memory", "8G", "--", "true")
    assert (answer.lines("error"), leases(world)) == (["error: the ledger is read-only"], {})


def test_memory_that_the_driver_does_not_tell_is_said(cli: Cli, world: World, monkeypatch: Patch) -> None:
    world.mig("1g.18gb")
    real = NvmlReader.processes

    def untold(self: NvmlReader, index: int) -> tuple[GpuProcess, ...]:
        return tuple(replace(each, memory_used_bytes=None) for each in real(self, index) or ())

    monkeypatch.setattr(NvmlReader, "processes", untold)
    answer = cli("run", "--mig", "1g", "--memory", "4G", "--", *JOB, "--footprint", "5G", "--seconds", "1").ok()
    (line,) = [line for line in answer.lines("note") if "cannot be checked" in line]
    assert "its limit of 4.0 GiB cannot be checked: the driver does not tell how much memory process" in line
    assert line.endswith("on MIG 1g.18gb of GPU 0")


def test_a_job_waits_for_an_instance_and_then_runs_in_it(real: Real, cli: Cli, world: World, first: Started) -> None:
    uuid = world.state.gpus[0].mig[0].uuid
    second = real("run", "--wait", "--mig", "1g", "--name", "second", "--", sys.executable, "-c", PRINT)
    second.says("waiting for a free instance ('1g'): in use: 1g.18gb:0 of GPU 0: process")
    (job,) = cli("status", output="json").ok().data["waiting_jobs"]
    assert (job["name"], job["gpu_indexes"], job["line"]["place"]) == ("second", [0], 1)
    assert (ended(first), variables(second)["CUDA_VISIBLE_DEVICES"]) == (0, uuid)
    assert (leases(world), reservations(world.host)) == ({}, [])


def test_the_first_one_that_waits_gets_the_instance_first(real: Real, tmp_path: Path, first: Started) -> None:
    order = tmp_path / "order"
    later = []
    for number in range(3):
        later.append(real("run", "--wait", "--mig", "1g", "--", "sh", "-c", f"echo {number} >> {order}"))
        later[-1].says("waiting for a free instance")
    assert (ended(first), [job.result().code for job in later]) == (0, [0, 0, 0])
    assert order.read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [("0", "was free within 0 s: in use: 1g.18gb:0"), ("0.3s", "was free within 0.3 s: in use: 1g.18gb:0")],
)
def test_no_instance_in_time(real: Real, refused: Refused, world: World, seconds: str, message: str) -> None:
    world.mig("1g.18gb")
    first = waiting(real, "--mig", "1g")
    until(lambda: {record.pid for record in records(world.host)} == set(world.pids()) != set(), "the first one runs")
    words = ("run", "--wait", "--timeout", seconds, "--mig", "1g", "--", "true")
    assert message in refused(*words, code="no_room", exit_code=19)
    assert (reservations(world.host), ended(first)) == ([], 0)


def test_room_in_an_instance_that_one_program_has(real: Real, world: World, cli: Cli, first: Started) -> None:
    second = real("run", "--wait", "--mig", "1g", "--", "true")
    second.says("waiting for a free instance")
    assert (second.end().code, reservations(world.host)) == (130, [])
    # It is for nobody else.
    uuid = world.state.gpus[0].mig[0].uuid
    words = ("run", "--wait", "--timeout", "0.3s", "-g", uuid, "--memory", "2G", "--", "true")
    assert (cli(*words).code, ended(first), cli(*words).code) == (19, 0, 0)


def test_jobs_before_it_that_take_no_instance(world: World) -> None:
    """It may be stopped, or only an entry that somebody has made."""
    (uuid,) = world.mig("1g.18gb")
    before = Place(world.host, Request(memory_bytes=None, keys=(uuid,), client=False))
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    messages: list[str] = []
    place, claim = run_mig.InstanceWish(host=world.host, text="1g", gpu=None).wait(
        seconds=None, name=None, say=messages.append, clock=lambda: clock[0], sleep=sleep
    )
    assert place.mig.uuid == uuid
    assert 10 <= clock[0] <= 11
    assert messages == ["waiting for a free instance ('1g'), 1 job before it: others were first"]
    claim.release()
    before.leave()
    # One that needs more than an instance has delays nobody either.
    (uuid,) = world.mig("1g.18gb")
    before = Place(world.host, Request(memory_bytes=60 * GIB, keys=(uuid, world.uuid(0)), client=False))
    _, claim = run_mig.InstanceWish(host=world.host, text="1g", gpu=None).wait(seconds=0, name=None, say=lambda _: None)
    claim.release()
    before.leave()


@pytest.mark.parametrize(("total", "ahead"), [(None, 2), (18 * GIB, 1)])
def test_a_job_may_take_an_instance_whose_memory_is_unknown(world: World, total: int | None, ahead: int) -> None:
    (uuid,) = world.mig("1g.18gb")
    (place,) = profile_places(world.host, "1g", None)
    free = [replace(place, mig=replace(place.mig, memory_total_bytes=total))]
    waiting = [Place(world.host, Request(memory_bytes=size, keys=(uuid,), client=False)) for size in (None, 60 * GIB)]
    assert run_mig._count_takers(reservations(world.host) or [], free) == ahead
    for entry in waiting:
        entry.leave()


def test_an_instance_that_is_made_again_meanwhile_is_taken(world: World) -> None:
    """A layout that is changed has no such instance for a while."""
    (uuid,) = world.mig("1g.18gb")
    taken = take_claim(world.host, uuid)
    assert isinstance(taken, HeldClaim)
    steps = iter([world.mig, lambda: (taken.release(), world.mig("1g.18gb"))])
    place, claim = run_mig.InstanceWish(host=world.host, text="1g", gpu=None).wait(
        seconds=None, name=None, say=lambda _: None, sleep=lambda _: next(steps)() and None
    )
    assert place.instance.profile.name == "1g.18gb"
    claim.release()


def test_a_plan_says_that_a_job_waits_for_an_instance(cli: Cli, world: World) -> None:
    (uuid,) = world.mig("1g.18gb")
    words = ("-o", "json", "run", "-n", "--wait", "--timeout", "5m", "--mig", "1g", "--memory", "8G", "--", "true")
    data = cli(*words).ok().data
    wait = "wait until an instance ('1g') is free, first come first served, for 5 min at most; take it"
    assert data["steps"][0]["what"] == wait
    taken = take_claim(world.host, uuid)
    assert isinstance(taken, HeldClaim)
    assert cli(*words).ok().data["steps"] == data["steps"]
    # Nothing was entered, and nothing taken.
    assert reservations(world.host) == []
    taken.release()


def test_two_jobs_of_one_name_do_not_both_wait_for_an_instance(real: Real, refused: Refused, first: Started) -> None:
    words = ("run", "--wait", "--mig", "1g", "--name", "train", "--", "true")
    second = real(*words)
    second.says("waiting for a free instance")
    refused(*words, code="name_in_use", exit_code=19)
    assert (ended(first), second.result().code) == (0, 0)


PRINT_DEVICES = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
CREATE = ("run", "--mig", "1g", "--create")
ALIVE = ("--", "cat")


def instances(world: World) -> list[str]:
    return [f"{instance.profile}:{instance.start}" for instance in world.state.gpus[0].mig]


@pytest.fixture
def on(world: World) -> World:
    """Return a host with MIG on and no instance."""
    world.run("mig", "enable")
    return world


def test_an_instance_is_made_and_is_gone_afterwards(real: Real, cli: Cli, on: World) -> None:
    planned = cli("-o", "json", *CREATE, "-n", "--", "true").ok().data["steps"]
    assert [step["what"].split(" ")[0] for step in planned] == ["create", "run", "destroy"]
    done = real(*CREATE, "--", sys.executable, "-c", PRINT_DEVICES).result()
    assert done.out.startswith("MIG-")
    assert (done.code, instances(on), ON_DEMAND.all(on.host)) == (0, [], [])


@pytest.mark.parametrize("more", [(), ("-n",), ("--create",), ("--create", "-n"), ("--create", "--wait", "-n")])
def test_where_the_claims_cannot_be_read_none_is_made(refused: Refused, world: World, more: Words) -> None:
    world.mig("1g.18gb:4")
    world.host.run_directory.mkdir(parents=True, exist_ok=True)
    (world.host.run_directory / "claims").write_text("")
    text = refused("run", "--mig", "1g", *more, "--", "true", code="lease_unusable", exit_code=4)
    assert "claims cannot be read: Not a directory" in text
    assert instances(world) == ["1g.18gb:4"]


@pytest.mark.parametrize("more", [(), ("--create",)])
def test_nobody_waits_where_only_claims_are_unreadable(
    refused: Refused, world: World, monkeypatch: Patch, more: Words
) -> None:
    world.mig("1g.18gb:4")
    # Another user has written too many files.
    monkeypatch.setattr("gpushare.run.mig.claimed_instances", lambda _host: None)
    monkeypatch.setattr("gpushare.run.mig.why_unreadable", lambda _host, _prefix: "there are too many")
    text = refused("run", "--mig", "1g", "--wait", *more, "--", "true", code="lease_unusable", exit_code=4)
    assert "there are too many" in text
    assert instances(world) == ["1g.18gb:4"]


def test_one_that_is_free_is_taken_and_stays(real: Real, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:4")
    assert real(*CREATE, "--", sys.executable, "-c", PRINT_DEVICES).result().out.strip() == uuid
    assert instances(world) == ["1g.18gb:4"]


@pytest.mark.parametrize("daemon", [False, True])
def test_one_that_somebody_else_uses_stays(real: Real, cli: Cli, on: World, daemon: bool) -> None:
    started = real(*CREATE, *ALIVE, stdin=subprocess.PIPE)
    (uuid,) = until(lambda: [each.uuid for each in on.state.gpus[0].mig if ON_DEMAND.all(on.host)], "it is made")
    cli(*(("mps", "start", "-g", uuid) if daemon else ("sim", "add", "--mig", uuid))).ok()
    kept = "an MPS daemon serves it" if daemon else "another program is in it"
    assert f"stays: {kept}" in started.result().err
    assert (len(instances(on)), len(on.state.daemons), ON_DEMAND.all(on.host)) == (1, daemon, [])


def test_the_guard_removes_what_a_killed_gpushare_has_made(real: Real, on: World) -> None:
    started = real(*CREATE, "--", "sleep", "300")
    started.says("runs in MIG 1g.18gb")
    os.kill(started.pid, signal.SIGKILL)
    until(lambda: not instances(on), "the instance is gone")
    until(lambda: not ON_DEMAND.all(on.host), "its record is gone")
    started.result()


def test_what_nobody_removed_is_removed_by_the_next_change(cli: Cli, on: World) -> None:
    on.run("mig", "create", "1g.18gb:0", "2g.35gb:4")
    dead = subprocess.Popen(["true"])
    dead.wait()
    for profile, start in (("1g.18gb", 0), ("3g.71gb", 4)):
        path = ON_DEMAND.path(on.host, f"{dead.pid}-0-{start}")
        record = OnDemand(pid=dead.pid, started=1, gpu_uuid=on.uuid(), profile=profile, start=start, path=path)
        ON_DEMAND.write(record)
    assert "it would be destroyed" in cli("mig", "recover", "-n").ok().out
    assert "it would be destroyed" in cli("mig", "create", "1g.18gb", "-n").ok().err
    assert "1g.18gb:0" in cli("mig", "recover").ok().out
    # The other place has an instance that it does not speak of.
    assert (instances(on), ON_DEMAND.all(on.host)) == (["2g.35gb:4"], [])


@pytest.mark.parametrize("made", [True, False])
def test_an_instance_whose_making_failed_is_known(monkeypatch: Patch, cli: Cli, on: World, made: bool) -> None:
    real = on_demand.transact

    def fails(host: Host, ledger: MigLedger, change: MigChange) -> None:
        if made:
            real(host, ledger, change)
        raise OperationFailed("it was not undone", "see: gpushare mig status", code="not_restored")

    with monkeypatch.context() as patched:
        patched.setattr(on_demand, "transact", fails)
        with pytest.raises(OperationFailed, match="not undone"):
            on_demand.make_instance(on.host, "1g", [on.host.nvml.gpu(0)])
    assert (len(instances(on)), len(ON_DEMAND.all(on.host))) == (made, made)
    # Its gpushare lives until the end of this test.
    monkeypatch.setattr(on_demand, "any_lives", lambda *_: False)
    cli("mig", "recover").ok()
    assert (instances(on), ON_DEMAND.all(on.host)) == ([], [])


def test_an_instance_that_its_own_job_still_claims_is_not_left_silently(on: World) -> None:
    record = on_demand.make_instance(on.host, "1g", [on.host.nvml.gpu(0)])
    claim = take_claim(on.host, next(instance.uuid for instance in on.state.gpus[0].mig))
    assert isinstance(claim, HeldClaim)
    with pytest.raises(InUse):
        on_demand.remove_instance(on.host, record)
    claim.release()
    assert (on_demand.remove_instance(on.host, record), instances(on)) == (None, [])


def test_a_job_waits_for_room_and_then_makes_its_own(real: Real, cli: Cli, on: World) -> None:
    first = real("run", "--mig", "7g", "--create", *ALIVE, stdin=subprocess.PIPE)
    until(lambda: instances(on), "it is made")
    assert ((answer := cli("-o", "json", *CREATE, "--", "true")).code, answer.error["code"]) == (19, "no_room")
    second = real(*CREATE, "--wait", "--", sys.executable, "-c", PRINT_DEVICES)
    second.says("waiting for a free instance")
    assert first.result().code == 0
    assert second.result().out.startswith("MIG-")
    assert instances(on) == []


@refusals(
    "bad_mig 2: --create --mig train | --create --mig 1c.3g.71gb",
    "mig_profile_unknown 3: --create --mig 9g.99gb",
    "limit_above_gpu 2: --create --mig 1g --memory 40G",
)
def test_what_is_refused_leaves_nothing(refused: Refused, on: World, words: Words, code: str, exit_code: int) -> None:
    refused("run", *words, "--", "true", code=code, exit_code=exit_code)
    assert instances(on) == []


def test_mig_that_is_off_is_not_switched_on(refused: Refused) -> None:
    assert "gpushare mig enable -g 0" in refused(*CREATE, "--", "true", code="mig_off", exit_code=6)
