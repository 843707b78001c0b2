"""``gpushare sim``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpushare.base.model import ComputeMode
from gpushare.base.units import GIB
from gpushare.cli.sim import fault
from gpushare.host import capabilities
from gpushare.sim.faults import ENTRY_POINTS, KINDS
from tests.cli.drive import H200, Cli, Patch, Real, Refused, Words, World, refusals, until

TWO = "sim:2xt4,a30"


def test_list_of_hosts_and_models(cli: Cli) -> None:
    assert "no simulated hosts yet" in cli("sim", "list", host=None).ok().out
    assert cli("sim", "list", host=None, output="json").ok().data == {"hosts": []}
    cli("status", host=TWO).ok()
    cli("mps", "start").ok()
    hosts = cli("sim", "list", host=None, output="json").ok().data["hosts"]
    assert [(host["spec"], host["gpus"], host["daemons"]) for host in hosts] == [(TWO, 3, 0), (H200, 1, 1)]
    for form in ("table", "plain", "csv", "yaml"):
        assert TWO in cli("sim", "list", host=None, output=form).ok().out
    models = cli("sim", "list", "--models", host=None, output="json").ok().data["models"]
    assert len(models) > 20
    h200 = next(model for model in models if model["host"] == H200)
    assert (h200["name"], h200["mig"], h200["multiprocessors"]) == ("NVIDIA H200", True, 132)
    # Each name is a host.
    for model in models[:5]:
        assert cli("status", host=model["host"], output="json").ok().data["gpus"][0]["name"] == model["name"]
    assert "sim:p100" in cli("sim", "list", "--models", host=None).ok().out


def test_show(cli: Cli, world: World) -> None:
    data = cli("sim", "show", output="json").ok().data
    assert (data["spec"], data["used"], data["driver"]) == (H200, False, "580.159.04")
    assert not world.directory.exists()
    assert cli("sim", "show", TWO, host=None, output="json").ok().data["spec"] == TWO
    world.fault("busy")
    text = cli("sim", "show").ok().out
    assert H200 in text
    assert str(world.pids()[0]) in text


@pytest.mark.parametrize("verb", ["show", "reset", "mig", "fault", "add"])
def test_no_simulated_host(cli: Cli, verb: str) -> None:
    words = ("fault", "lost") if verb == "fault" else (verb,)
    cli("sim", *words, host=None, output="json").ends(2, "no_sim_host")
    assert cli("sim", *words, host="local").code == 2
    if verb == "reset":
        said = cli("sim", "reset", "foo").err
        assert "'foo' is not a simulated host" in said
        assert "sim show" not in said


def test_reset(cli: Cli, world: World, refused: Refused) -> None:
    cli("mps", "start").ok()
    world.client()
    before = world.uuid()
    assert cli("sim", "reset", "-n").ok().out == f"would delete {H200}\n"
    assert world.state.daemons
    assert cli("sim", "reset").ok().out == f"{H200}: reset\n"
    assert not world.directory.exists()
    assert (world.uuid(), cli("sim", "reset", TWO, host=None).ok().out) == (before, f"{TWO}: reset\n")
    # That of all is asked for.
    cli("status").ok()
    cli("status", host=TWO).ok()
    refused("sim", "reset", "--all", asks=True, code="needs_consent", exit_code=19)
    assert len(cli("sim", "list", host=None, output="json").ok().data["hosts"]) == 2
    cli("sim", "reset", "--all", "--yes", host=None).ok()
    assert cli("sim", "list", host=None, output="json").ok().data["hosts"] == []
    assert "no simulated hosts to reset" in cli("sim", "reset", "--all", host=None).ok().out


def test_reset_leaves_real_programs_alone(cli: Cli, real: Real, world: World) -> None:
    started = real("run", "--memory", "100G", "--", "sleep", "600", stderr=None, stdout=None)
    until(world.attached, "attached")
    (pid,) = world.pids()
    waits = real("run", "--wait", "--memory", "100G", "--name", "next", "--", "true")
    until(lambda: "next" in cli("jobs").ok().out, "it waits")
    assert cli("sim", "reset").ok().err.endswith(f"left running; end them: kill {pid} {waits.pid}\n")
    for process in (pid, waits.pid):
        os.kill(process, 0)
        os.kill(process, signal.SIGTERM)
    assert started.result().code in {128 + signal.SIGTERM, 1}
    assert waits.result().code == 128 + signal.SIGTERM


def test_add_and_end(cli: Cli, world: World) -> None:
    words = ("--memory", "2G", "--sm", "30", "--name", "train.py", "--queue", "110ms", "--user", "nobody")
    pid = int(cli("sim", "add", *words).ok().out)
    process = world.process(pid)
    assert (process.memory_bytes, process.sm_percent, process.name) == (2 * GIB, 30, "train.py")
    assert (capabilities.user_name(process.uid), process.queue_seconds, process.mps_daemon) == ("nobody", 0.11, None)
    (shown,) = cli("status", output="json").ok().data["gpus"][0]["processes"]
    assert (shown["pid"], shown["user"], shown["sm_percent"]) == (pid, "nobody", 30)
    cli("sim", "end", str(pid)).ok()
    assert world.pids() == []
    cli("sim", "add", "--graphics", "-g", "1", host=TWO).ok()
    (process,) = cli("status", "-g", "1", host=TWO, output="json").ok().data["gpus"][0]["processes"]
    assert (process["graphics"], process["compute"]) == (True, False)


def test_add_a_client(refused: Refused, cli: Cli, world: World) -> None:
    refused("sim", "add", "--mps", code="no_daemon", exit_code=6)
    cli("mps", "start", "--threads", "25").ok()
    assert world.process(cli("sim", "add", "--mps", output="json").ok().data["pid"]).threads == 25.0


def test_add_a_client_on_a_mig_instance(cli: Cli, world: World) -> None:
    uuids = world.mig("3g.71gb", "1g.18gb")
    cli("mps", "start", "-g", uuids[1]).ok()
    pid = cli("sim", "add", "--mps", "--mig", uuids[1], output="json").ok().data["pid"]
    assert world.process(pid).gpu_instance_id == world.state.gpus[0].mig[1].gpu_instance_id
    number = str(world.state.gpus[0].mig[1].gpu_instance_id)
    again = cli("sim", "add", "--mps", "--mig", number, output="json").ok().data["pid"]
    assert world.process(again).mps_server == world.process(pid).mps_server


@refusals(
    "bad_size 2: --memory x",
    "bad_duration 2: --queue x",
    "bad_user 2: --user ' ' | --user 99999999999",
    "not_found 6: --mig 5",
    "unknown_gpu 6: -g 9",
)
def test_wrong_add(refused: Refused, world: World, words: Words, code: str, exit_code: int) -> None:
    world.host.nvml.identities()
    refused("sim", "add", *words, code=code, exit_code=exit_code)


def test_add_that_cuda_refuses(refused: Refused, world: World) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.PROHIBITED)
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in refused("sim", "add", code="cuda_refused", exit_code=1)


@pytest.mark.parametrize("name", ["KILL", "SIGKILL", "term", "int", "HUP"])
def test_end_by_a_signal(cli: Cli, world: World, name: str) -> None:
    cli("mps", "start").ok()
    first, second = world.client(queue_seconds=0.5), world.client(queue_seconds=0.5)
    cli("sim", "end", str(first), "--signal", name).ok()
    assert world.pids() == [second]
    # It handles SIGINT, and drains its queue then.
    assert world.process(second).broken == (name != "int")


def test_stop_continue_and_wrong_words(cli: Cli, world: World, refused: Refused) -> None:
    world.fault("busy")
    (pid,) = world.pids()
    cli("sim", "end", str(pid), "--signal", "STOP").ok()
    assert world.process(pid).stopped_at is not None
    cli("sim", "end", str(pid), "--signal", "CONT").ok()
    assert world.process(pid).stopped_at is None
    refused("sim", "end", "1", code="not_found", exit_code=6)
    for name in ("NOPE", "WINCH", "USR1"):
        message = refused("sim", "end", str(world.pids()[0]), "--signal", name, code="bad_signal", exit_code=2)
        assert "give KILL, TERM, INT, HUP, QUIT, ABRT, STOP or CONT" in message


def test_the_example_of_a_fault_is_a_plausible_value(refused: Refused, world: World) -> None:
    world.host.nvml.identities()
    assert refused("sim", "fault", "power-cap", code="bad_fault", exit_code=2).endswith("power-cap 300\n")
    assert refused("sim", "fault", "shm", code="bad_fault", exit_code=2).endswith("shm 64M\n")
    for kind in ("unlisted-memory", "shm", "host-memory"):
        assert f"for example {kind} 4G" in refused("sim", "fault", kind, "20000000", code="bad_size", exit_code=2)


def test_mig(cli: Cli, world: World, refused: Refused) -> None:
    assert cli("sim", "mig", "3g.71gb", "1g.18gb:4").ok().out == "GPU 0: 3g.71gb, 1g.18gb:4\n"
    assert world.look()[0].places == {("3g.71gb", 0), ("1g.18gb", 4)}
    assert cli("sim", "mig").ok().out == "GPU 0: MIG off\n"
    assert (world.state.gpus[0].mig, world.state.gpus[0].mig_mode) == ([], 0)
    refused("sim", "mig", "7g.141gb", "1g.18gb", code="never_fits", exit_code=1)
    refused("sim", "mig", "-g", "4", "1g.18gb", code="not_found", exit_code=6)
    world.fault("busy")
    refused("sim", "mig", "1g.18gb", code="in_use", exit_code=1)


FAULTS = {
    "lost": (None, lambda world: world.state.gpus[0].lost),
    "persistence-off": (None, lambda world: not world.state.gpus[0].persistence),
    "not-supported": ("utilization", lambda world: world.state.gpus[0].not_supported),
    "refused": ("mig-instances", lambda world: "nvmlDeviceGetGpuInstances" in world.state.gpus[0].refused),
    "no-driver": (None, lambda world: not world.state.driver_loaded),
    "no-nvml": (None, lambda world: not world.state.nvml_installed),
    "no-permission": (None, lambda world: world.state.permission_denied),
    "blind": (None, lambda world: not world.state.pid_namespace_is_host),
    "hang": ("nvidia-smi", lambda world: world.state.hanging_programs == ["nvidia-smi"]),
    "missing": ("nvidia-smi", lambda world: world.state.missing_programs == ["nvidia-smi"]),
    "user": ("61000", lambda world: world.state.uid == 61000),
    "driver": ("535.261.03", lambda world: world.state.driver == "535.261.03"),
    "busy": (None, lambda world: world.state.processes),
    "collide": ("1", lambda world: True),
    "reset-required": (None, lambda world: world.state.gpus[0].reset_required),
    "fail-step": ("2", lambda world: world.state.fail_step == 2),
    "crash-step": ("2", lambda world: world.state.crash_step == 2),
    "mismatch": (None, lambda world: world.state.library_mismatch),
    "shm": ("64M", lambda world: world.state.shared_memory_bytes == 64 << 20),
    "descriptors": ("256", lambda world: world.state.descriptor_limit == 256),
    "host-memory": ("1G", lambda world: world.state.host_memory_bytes == 1 << 30),
    "mps-version": ("13020", lambda world: world.state.mps_binary == 13020),
    "unlisted-memory": ("2GiB", lambda world: world.state.gpus[0].unlisted_bytes == 2 << 30),
    "slowed": ("8", lambda world: world.state.gpus[0].slowed == 8),
    "power-cap": ("300", lambda world: world.state.gpus[0].power_cap_watts == 300),
    "xid": ("79", lambda world: world.state.gpus[0].xids == [79]),
}


def test_every_fault_has_a_test() -> None:
    assert set(FAULTS) == set(KINDS)


@pytest.mark.parametrize("kind", FAULTS)
def test_fault(cli: Cli, world: World, kind: str) -> None:
    value, holds = FAULTS[kind]
    cli("sim", "fault", kind, *([value] if value else [])).ok()
    assert holds(world)
    assert cli("sim", "show").ok().out
    assert cli("sim", "fault", "--clear").ok().out == f"{world.spec}: no faults\n"
    # Processes, MIG and the driver's version are no faults.
    assert bool(holds(world)) == (kind in {"driver", "busy", "collide"})


def test_fault_of_one_gpu(cli: Cli) -> None:
    assert cli("sim", "fault", "lost", "-g", "1", host=TWO).ok().out == f"{TWO}, GPU 1: lost\n"
    assert cli("sim", "fault", "blind", host=TWO).ok().out == f"{TWO}: blind\n"
    assert [gpu.lost for gpu in World(TWO).state.gpus] == [False, True, False]


@refusals(
    "bad_fault 2: nonsense || lost --clear | hang | hang vi | user | driver | driver x | not-supported",
    "bad_fault 2: not-supported x",
    "not_found 6: lost -g 7",
)
def test_wrong_fault(refused: Refused, world: World, words: Words, code: str, exit_code: int) -> None:
    world.host.nvml.identities()
    refused("sim", "fault", *words, code=code, exit_code=exit_code)


def test_the_help_of_a_fault_lists_the_fields() -> None:
    text = " ".join((fault.__doc__ or "").split())
    assert f"FIELD: {', '.join(ENTRY_POINTS)}, or an entry point: nvml..." in text


def test_a_user_whom_this_machine_lacks(cli: Cli, world: World) -> None:
    for name in ("dr.who", "dr.no", "dr.who"):
        cli("sim", "add", "--user", name, "--name", "tardis").ok()
    first, second, third = (process.uid for process in world.state.processes)
    assert first == third != second
    text = cli("status").ok().out
    assert (text.count("dr.who"), text.count("dr.no")) == (2, 1)
    cli("sim", "fault", "user", "dr.who").ok()
    cli("mps", "start").ok()
    assert world.state.daemons[0].uid == first
    assert "dr.who" in cli("mps", "status").ok().out
    capabilities.SIMULATED_USERS.clear()
    assert "dr.who" in cli("mps", "status").ok().out


@pytest.mark.parametrize("words", [("list",), ("show",), ("reset",), ("add",)])
def test_state_that_cannot_be_written(cli: Cli, sim_dir: Path, monkeypatch: Patch, words: Words) -> None:
    blocked = sim_dir / "file"
    blocked.write_text("")
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(blocked))
    answer = cli("sim", *words)
    assert "bug" not in answer.err
    assert answer.code in {0, 4}
