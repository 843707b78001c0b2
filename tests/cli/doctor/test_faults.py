"""``gpushare doctor``: each fault that a simulated host can have is found, it alone, and none on a healthy one."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import GpuLost
from gpushare.base.model import ComputeMode
from gpushare.base.package import package_rows
from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.doctor import examine
from gpushare.doctor.check import Examination
from gpushare.doctor.examine import BAD_XIDS, _memory_limits, environments
from gpushare.host.machine import Machine, xids_in
from gpushare.host.nvml import NvmlReader
from gpushare.host.open_files import OpenFiles
from gpushare.host.smi import ComputePolicy
from gpushare.hostfile.load import applied_path, keep_applied
from gpushare.memory.swapped import SWAPS, swaps
from gpushare.mig.ledger import MigLedger, NamedInstance, changing_names
from gpushare.mps.home import DaemonHome
from gpushare.run.jobs import OPPORTUNISTIC, PRODUCTION
from gpushare.run.plain import plain_environment
from gpushare.sim import admin
from gpushare.sim.processes import SimulatedProcesses
from gpushare.sim.state import SimulatedGpuInstance
from tests.cli.drive import Cli, World

# A user of every machine that is not root.
NOBODY = "nobody"
# A step to a fault: the words of a command, or what else is to happen.
Step = str | Callable[[Cli, World, Path], object]


def findings(cli: Cli, host: str = "sim:h200") -> dict[str, dict[str, Any]]:
    """Return what warns or fails, by id; each says why it matters and its remedy."""
    answer = cli("doctor", host=host, output="json")
    assert answer.lines("error") == []
    by_key = {check["id"]: check for check in answer.data["checks"] if check["verdict"] in {"warn", "fail"}}
    assert all(value["why"] and value["remedy"] for value in by_key.values())
    return by_key


def all_of(cli: Cli, identifier: str) -> list[dict[str, Any]]:
    """Return the checks with an id, in whatever verdict."""
    return [check for check in cli("doctor", output="json").data["checks"] if check["id"] == identifier]


def finding(cli: Cli, identifier: str) -> dict[str, Any]:
    (found,) = all_of(cli, identifier)
    return found


def named(world: World, profile: str, start: int = 0, users: tuple[str, ...] = ()) -> None:
    with changing_names(world.host) as names:
        names["train"] = NamedInstance(name="train", gpu_uuid=world.uuid(), profile=profile, start=start, users=users)


def started(cli: Cli, *words: str) -> None:
    cli("mps", "start", *words).ok()


def home(world: World) -> Path:
    return Path(world.state.daemons[0].pipe_directory).parent


def client(user: str | None = None, **environment: str) -> Step:
    return lambda cli, world, _: world.client(user=user, environment=environment)


def mig(*placements: str) -> Step:
    return lambda cli, world, _: world.mig(*placements)


def name(profile: str, *users: str) -> Step:
    return lambda cli, world, _: named(world, profile, users=users)


def program_without_a_daemon(cli: Cli, world: World, _: Path) -> None:
    admin.add_process(world.spec, mps=True, environment={"CUDA_MPS_PIPE_DIRECTORY": "/run/nobody-listens"})


def by_hand(world: World, pipe: str | Path, log: str | Path, **more: str) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log), **more}
    assert world.host.programs.run(["nvidia-cuda-mps-control", "-d"], env=environment).exit_code == 0


def default_daemon(_: Cli, world: World, __: Path) -> None:
    by_hand(world, "/tmp/nvidia-mps", "/var/log/nvidia-mps")


def dead_default(_: Cli, world: World, __: Path) -> None:
    path = world.directory / "tmp" / "nvidia-mps"
    path.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "control"))


def foreign(cli: Cli, world: World, directory: Path) -> None:
    world.foreign_daemon(directory)
    (directory / "p").chmod(0o755)


def gone_device(cli: Cli, world: World, _: Path) -> None:
    (uuid,) = world.mig("1g.18gb:0")
    started(cli, "-g", uuid)
    world.mig("1g.18gb:1")


def open_directory(_: Cli, world: World, __: Path) -> None:
    Path(world.state.daemons[0].pipe_directory).chmod(0o777)


def closed_parent(cli: Cli, world: World, _: Path) -> None:
    home(world).chmod(0o700)


def large_log(_: Cli, world: World, __: Path) -> None:
    os.truncate(home(world) / "log" / "control.log", 200 << 20)


def no_segment(_: Cli, world: World, __: Path) -> None:
    with open(home(world) / "log" / "server.log", "a", encoding="utf-8") as file:
        file.write("[2026-11-21 07:58:04.413 Server   426] MPS Server failed to create/open SHM segment.\n")


def ignored_percentage(cli: Cli, world: World, directory: Path) -> None:
    by_hand(world, directory / "p", directory / "l", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="400")
    (directory / "p").chmod(0o755)


def mig_pending(cli: Cli, world: World, _: Path) -> None:
    world.fault("reset-required")
    handle = world.host.nvml.handle(0)
    world.host.nvml.demand(lambda nvml: nvml.nvmlDeviceSetMigMode(handle, 1))


def bare(_: Cli, world: World, __: Path) -> None:
    with world.file.changed() as state:
        state.gpus[0].bare.append(SimulatedGpuInstance(profile="1g.18gb", start=1, gpu_instance_id=10))


def interrupted(cli: Cli, world: World, _: Path) -> None:
    ledger = MigLedger(world.host)
    with ledger.locked():
        ledger.begin("change MIG on GPU 0", (), ())
        ledger.note("create 1g.18gb")


def hostengine_in_instance(cli: Cli, world: World, _: Path) -> None:
    (uuid,) = world.mig("1g.18gb:0")
    cli("sim", "add", "--holder", "--name", "nv-hostengine", "--mig", uuid).ok()


def shell_of_a_gone_instance(cli: Cli, world: World, _: Path) -> None:
    (uuid,) = world.mig("1g.18gb:0")
    world.mig()
    admin.add_process(world.spec, holder=True, memory_bytes=0, environment={"CUDA_VISIBLE_DEVICES": uuid})
    no_files(world)


def shell_of_another_gpu(cli: Cli, world: World, _: Path) -> None:
    cli("doctor")
    gone = "GPU-00000000-0000-0000-0000-000000000000"
    for _ in range(2):
        admin.add_process(world.spec, holder=True, memory_bytes=0, environment={"CUDA_VISIBLE_DEVICES": gone})
        no_files(world)


def no_files(world: World) -> None:
    """Let the last process be one that only was given an environment: a shell."""
    world.alter(world.pids()[-1], open_files=[])


def exclusive_left(cli: Cli, world: World, _: Path) -> None:
    world.host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)


def dead_daemon(_: Cli, world: World, __: Path) -> None:
    world.send(world.state.daemons[0].pid, signal.SIGKILL)


TWO_LIMITS = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G,1=4G"}
HOSTENGINE = "sim add --holder --name nv-hostengine"
# What is found, and the steps to it.
FAULTS: dict[str, tuple[Any, ...]] = {
    "no library": ({"nvml.library"}, "sim fault no-nvml"),
    "no driver": ({"driver.loaded"}, "sim fault no-driver"),
    "a daemon without a driver": ({"driver.loaded"}, "mps start", "sim fault no-driver"),
    "library and driver differ": ({"driver.mismatch"}, "sim fault mismatch"),
    "not permitted": ({"nvml.answers"}, "sim fault no-permission"),
    "lost GPU": ({"gpu.answers", "smi.program"}, "sim fault lost"),
    "no nvidia-smi": ({"smi.program"}, "sim fault missing nvidia-smi"),
    "hanging nvidia-smi": ({"smi.program"}, "sim fault hang nvidia-smi"),
    "persistence off": ({"gpu.persistence"}, "sim fault persistence-off"),
    "exclusive left over": ({"gpu.compute_mode"}, exclusive_left),
    "Xid 79": ({"gpu.xid"}, "sim fault xid 79"),
    "no MPS programs": ({"mps.control", "mps.server"}, "sim fault missing nvidia-cuda-mps-control"),
    "MPS programs of another driver": ({"mps.version"}, "sim fault mps-version 13020"),
    "dead daemon": ({"mps.stale"}, "mps start", dead_daemon),
    "daemon of somebody else": ({"mps.foreign"}, foreign),
    "daemon at the default path": ({"mps.default_path"}, default_daemon),
    "dead daemon at the default path": ({"mps.default_stale"}, "doctor", dead_default),
    "two daemons": ({"mps.foreign", "mps.several"}, "mps start", foreign),
    "daemon without its device": ({"mps.device"}, gone_device),
    "client of another user waits": ({"mps.pending"}, "mps start", client(), client(NOBODY)),
    "program outside MPS": ({"mps.outside"}, "mps start", client(), "sim add --name stranger"),
    "program that found no daemon": ({"mps.environment"}, "doctor", program_without_a_daemon),
    "memory limits dropped": ({"mps.limits_dropped"}, "mps start --memory 8G", client(**TWO_LIMITS)),
    "many connections": ({"mps.connections"}, "mps start", client(CUDA_DEVICE_MAX_CONNECTIONS="8")),
    "thread percentage ignored": ({"mps.foreign", "mps.threads_ignored"}, ignored_percentage),
    "little shared memory": ({"mps.shm"}, "sim fault shm 64M"),
    "few descriptors": ({"mps.descriptors"}, "mps start", "sim fault descriptors 256"),
    "no SHM segment": ({"mps.descriptors"}, "mps start", no_segment),
    "open pipe directory": ({"mps.directory"}, "mps start", open_directory),
    # A daemon of another user lets in only that one.
    "closed parent directory": ({"mps.reach"}, "sim fault user root", "mps start", closed_parent),
    "large log": ({"mps.log"}, "mps start", large_log),
    "MIG pending": ({"mig.pending"}, mig_pending),
    "MIG without instances": ({"mig.empty"}, "mig enable -g 0 -y"),
    "no compute instance": ({"mig.bare"}, mig("1g.18gb:0"), bare),
    "interrupted change": ({"mig.interrupted"}, interrupted),
    "stale CDI": ({"cdi.stale"}, mig("1g.18gb:0"), "sim cdi", mig("2g.35gb:0")),
    "name means another size": ({"mig.name"}, mig("1g.18gb:0"), name("3g.71gb")),
    "name without MIG": ({"mig.name"}, "doctor", name("3g.71gb")),
    "grant open again": ({"mig.grant"}, mig("3g.71gb:0"), name("3g.71gb", NOBODY)),
    "DCGM": ({"mig.holders"}, mig("1g.18gb:0"), HOSTENGINE),
    "DCGM before a reset": ({"mig.holders", "mig.pending"}, mig_pending, HOSTENGINE),
    "DCGM in an instance": ({"mig.holders"}, hostengine_in_instance),
    "environment of a gone instance": ({"mig.environment"}, shell_of_a_gone_instance),
    "environment of a gone GPU": ({"gpu.environment"}, shell_of_another_gpu),
    "blind": ({"pid.namespace"}, "sim fault blind"),
}


@pytest.fixture
def arrange(cli: Cli, world: World, sim_dir: Path) -> Callable[[str], set[str]]:
    """Return what brings a fault about, and returns what is found then."""

    def arranged(case: str) -> set[str]:
        expected, *steps = FAULTS[case]
        for step in steps:
            if isinstance(step, str):
                cli(*step.split()).ok()
            else:
                step(cli, world, sim_dir)
        return expected

    return arranged


@pytest.mark.parametrize(
    ("inside", "beside", "warned"),
    [("plain", PRODUCTION, False), (OPPORTUNISTIC, "plain", False), ("plain", "plain", True)],
)
def test_a_job_that_is_meant_to_run_outside_mps_is_no_fault(
    cli: Cli, world: World, inside: str, beside: str, warned: bool
) -> None:
    started(cli)
    client, other = world.client(), admin.add_process(world.spec)
    world.record("in", client, inside, mps=True)
    world.record("out", other, beside, mps=beside != PRODUCTION)
    assert ("mps.outside" in findings(cli)) is warned
    # As `run --slice` and `run --swap` start it.
    world.record("out", other, beside, mps=False)
    assert "mps.outside" not in findings(cli)


def test_only_the_owner_of_a_program_is_told_to_restart_it(cli: Cli, world: World) -> None:
    started(cli)
    world.client(user="bob", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    mine, others = admin.add_process(world.spec, name="mine"), admin.add_process(world.spec, name="theirs", user="bob")
    check = finding(cli, "mps.outside")
    assert str(mine) in check["seen"]
    assert str(others) in check["seen"]
    assert check["remedy"] == "if they are to share, their users restart them as clients: gpushare run -g 0 -- CMD"
    assert finding(cli, "mps.connections")["remedy"] == "ask bob: restart it without: unset CUDA_DEVICE_MAX_CONNECTIONS"


def test_no_remedy_has_an_invented_figure(cli: Cli, world: World) -> None:
    texts = [row["remedy"] for row in package_rows("doctor-checks.yaml").values()]
    # NVIDIA's number of open files, file modes, a signal.
    numbers = {number for text in texts for number in re.findall(r"\b\d+\b", re.sub(r"\{[^}]*\}", "", text))}
    assert numbers == {"0", "100", "16384", "0700", "0755"}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_found_and_nothing_else(
    cli: Cli, arrange: Callable[[str], set[str]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(ComputePolicy.read, "__defaults__", (0.1,))
    expected = arrange(case)
    assert set(findings(cli)) == expected


def shared(cli: Cli, world: World) -> None:
    started(cli, "--exclusive", "--memory", "8G", "--threads", "50")
    world.client()
    world.client(environment={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G"})


def cut(cli: Cli, world: World) -> None:
    cli("mig", "create", "3g.71gb", "--name", "train", "-y").ok()
    cli("mig", "grant", "train", NOBODY, "-y").ok()
    cli("sim", "cdi").ok()
    cli("sim", "add", "--mig", world.state.gpus[0].mig[0].uuid, "--user", NOBODY).ok()


def plain(cli: Cli, world: World) -> None:
    cli("timeslice", "set", "short").ok()
    cli("sim", "add").ok()
    # A program of this boot that failed by itself, and the daemon that every host should run.
    world.fault("xid", "31")
    cli("sim", "add", "--holder", "--name", "nvidia-persistenced").ok()


def watched(cli: Cli, world: World) -> None:
    # DCGM runs on most machines of a data centre; with MIG off it is in nobody's way.
    cli(*HOSTENGINE.split()).ok()


def apply(cli: Cli, directory: Path, way: str) -> None:
    """Apply a file with one way for all GPUs."""
    path = directory / "gpushare.yaml"
    path.write_text(f"version: 1\ngpus:\n- match: all\n  {way}\n", encoding="utf-8")
    cli("apply", "-f", str(path)).ok()


def applied(cli: Cli, world: World) -> None:
    """What a gpushare.yaml asked for is nothing left over, and nothing closed by mistake."""
    cli("doctor").ok()
    for way in (f"mps: {{users: [{NOBODY}]}}", "exclusive: true"):
        apply(cli, world.directory, way)
        if way.startswith("mps"):
            assert findings(cli) == {}


@pytest.mark.parametrize("arrange", [shared, cut, plain, watched, applied])
def test_a_healthy_host_has_none(cli: Cli, world: World, arrange: Callable[[Cli, World], None]) -> None:
    if arrange is cut:
        cli("mig", "enable", "-g", "0", "-y").ok()
    arrange(cli, world)
    assert findings(cli) == {}
    assert cli("doctor").code == 0


@pytest.mark.parametrize("host", ["sim:8xh100-80gb", "sim:4xa100-40gb", "sim:2xt4", "sim:h200,rtx-4090"])
def test_healthy_hosts_of_all_kinds(cli: Cli, host: str) -> None:
    assert findings(cli, host) == {}


@pytest.mark.parametrize("driver", ["535.261.03", "550.163.01", "570.124.06", "590.44.01", "595.45.04"])
def test_healthy_drivers(cli: Cli, world: World, driver: str) -> None:
    world.fault("driver", driver)
    assert findings(cli) == {}
    check = finding(cli, "mps.control")
    assert (check["verdict"], "before driver 580" in check["seen"]) == ("pass", driver < "580")


@pytest.mark.parametrize("case", ["open pipe directory", "closed parent directory", "dead daemon", "grant open again"])
def test_the_remedy_mends_it(cli: Cli, arrange: Callable[[str], set[str]], case: str) -> None:
    (identifier,) = arrange(case)
    for command in findings(cli)[identifier]["remedy"].split("; "):
        words = command.removeprefix("sudo ").split()
        if words[0] == "chmod":
            path = Path(words[2])
            path.chmod(0o755 if words[1] == "0755" else path.stat().st_mode | 0o001)
        else:
            cli(*words[1:]).ok()
    assert findings(cli) == {}


def test_a_name_that_means_another_size(cli: Cli, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:0")
    named(world, "3g.71gb")
    admin.add_process(world.spec, holder=True, memory_bytes=0, environment={"CUDA_VISIBLE_DEVICES": uuid})
    no_files(world)
    checks = findings(cli)
    assert set(checks) == {"mig.name", "mig.environment"}
    assert checks["mig.name"]["seen"] == "train means 3g.71gb:0 of GPU 0, and 1g.18gb:0 is there now"
    assert checks["mig.name"]["gpu"] == 0
    assert "means 1g.18gb:0 now, where train meant 3g.71gb:0" in checks["mig.environment"]["seen"]


def test_a_change_that_goes_on_is_no_finding(cli: Cli, world: World, tmp_path: Path) -> None:
    ledger = MigLedger(world.host)
    with ledger.locked():
        ledger.begin("change MIG on GPU 0", (), ())
        assert findings(cli) == {}
    # One of root that was interrupted is seen by all.
    ledger = MigLedger(replace(world.host, run_directory=tmp_path / "run"))
    with ledger.locked():
        ledger.begin("change MIG on GPU 0", (), ())
    found = examine.examine(
        replace(world.host, run_directory=world.directory / "r", shared_run_directories=(tmp_path / "run",))
    )
    assert [one.id for one in found if one.verdict.value == "fail"] == ["mig.interrupted"]


def test_a_line_in_the_log_lets_nobody_wait(cli: Cli, world: World) -> None:
    """Whoever may connect can have any line logged, of any process and user."""
    started(cli)
    client = world.client()
    (log,) = world.directory.glob("run/mps/*/log/control.log")
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 60))
    waits = "Server is not ready, push client to pending list"
    with log.open("a") as file:
        for pid, uid in ((os.getpid(), 4321), ("9" * 5000, 0), (os.getpid(), "9" * 5000), (9999999999, 0)):
            file.write(f"[{stamp}.000 Control     1] NEW CLIENT {pid} from user {uid}: {waits}\n")
    assert client
    assert "mps.pending" not in findings(cli)


def test_who_waits_is_named(cli: Cli, world: World, arrange: Callable[[str], set[str]]) -> None:
    arrange("client of another user waits")
    assert ": 1 client of nobody" in findings(cli)["mps.pending"]["seen"]
    # When the server's user has gone it comes in.
    for process in world.state.processes:
        if process.mps_server is not None:
            admin.end_process(world.spec, process.pid)
    assert findings(cli) == {}


@pytest.mark.parametrize("number", sorted(BAD_XIDS))
def test_the_remedy_of_an_xid_explains_it(cli: Cli, number: int) -> None:
    world = World("sim:2xh200")
    world.fault("xid", str(number), gpu="1")
    check = findings(cli, world.spec)["gpu.xid"]
    assert (check["gpu"], check["remedy"]) == (1, f"gpushare explain 'Xid {number}'")
    (found,) = cli("explain", f"Xid {number}", output="json").ok().data["explanations"]
    assert any("reset" in one or "reboot" in one or "power" in one for one in found["next"]), found


@pytest.mark.parametrize(
    ("error", "verdict"), [(GpuLost("GPU 0: the GPU is lost", "see it"), "skip"), (ValueError("x" * 5000), "warn")]
)
def test_an_error_in_one_check_hides_nothing_else(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str
) -> None:
    def broken(*_: object) -> bool:
        raise error

    world.fault("xid", "79")
    monkeypatch.setattr(NvmlReader, "persistence", broken)
    unseen = finding(cli, "doctor.unseen")
    assert (unseen["verdict"], len(unseen["seen"]) < 200) == (verdict, True)
    assert "'persistence'" in unseen["seen"]
    assert verdict == "warn" or "'persistence' could not be checked" in unseen["seen"]
    assert findings(cli).keys() == {"gpu.xid", *(["doctor.unseen"] if verdict == "warn" else [])}


@pytest.mark.parametrize("digits", ["9" * 5000, "0" * 5000 + "8"])
def test_the_variables_of_a_client_end_no_look(cli: Cli, world: World, digits: str) -> None:
    started(cli)
    limits = ",".join(["1=1G"] * 1000)
    world.client(environment={"CUDA_DEVICE_MAX_CONNECTIONS": digits, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limits})
    checks = findings(cli)
    assert checks.keys() == {"mps.connections", "mps.limits_dropped"}
    assert all(len(value["seen"]) < 250 for value in checks.values())


def told(world: World, environments_of: dict[int, dict[str, str]]) -> list[Any]:
    """Return what the check of the environments says when these processes have these."""

    class Machine:
        def environments(self, names: object) -> dict[int, dict[str, str]]:
            return environments_of

    host = replace(world.host, machine=Machine())  # type: ignore[arg-type]
    return list(environments(Examination(host, gpus=host.nvml.sweep())))


@pytest.mark.parametrize("own", [True, False])
def test_nobody_is_told_to_end_a_process_that_only_a_claim_of_another_user_names(
    world: World, monkeypatch: pytest.MonkeyPatch, *, own: bool
) -> None:
    uid = os.geteuid() if own else 12345
    claim = SimpleNamespace(kept=False, uid=uid, processes=[world.host.processes.identity(os.getpid())])
    job = SimpleNamespace(id="1", title="'lim'", pid=os.getpid(), limit_bytes=GIB, held=("GPU-1",), claim=claim)
    monkeypatch.setattr("gpushare.doctor.examine.reservations", lambda _: [job])
    checks = list(_memory_limits(Examination(world.host)))
    assert [check.remedy for check in checks] == [f"end it, and start it again: gpushare stop {os.getpid()}"] * own


def test_the_value_of_others_is_no_path_to_look_at(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: looked.append(path) or real(path))  # type: ignore[func-returns-value]
    (check,) = told(world, {7: {"CUDA_MPS_PIPE_DIRECTORY": "/home/bob/fuse/pipe"}})
    assert check.id == "mps.environment"
    assert "/home/bob/fuse/pipe" not in looked


def test_remedies_name_the_gpu(cli: Cli, world: World) -> None:
    cli("mig", "enable", "-g", "0", "-y").ok()
    assert finding(cli, "mig.empty")["remedy"].endswith("; or sudo gpushare mig disable -g 0")
    cli("mig", "disable", "-g", "0", "-y").ok()
    cli("mps", "start", "--threads", "50").ok()
    world.fault("descriptors", "256")
    uuid = world.uuid()
    assert finding(cli, "mps.descriptors")["remedy"] == (
        f"gpushare mps stop -g 0; ulimit -n 16384; gpushare mps start -g {uuid} --threads 50 "
        "(in a unit: LimitNOFILE=16384)"
    )
    world.fault("no-permission")
    assert finding(cli, "nvml.answers")["remedy"].endswith("if you are root, see why: sudo dmesg | grep -i nvrm")


def test_a_program_that_run_keeps_outside_mps_is_no_finding(world: World) -> None:
    device = Device(gpu=world.host.nvml.sweep()[0])
    environment = plain_environment({}, world.host, device)
    assert environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert told(world, {7: environment}) == []
    other = environment["CUDA_MPS_PIPE_DIRECTORY"][:-1] + "x"
    assert [check.id for check in told(world, {7: {"CUDA_MPS_PIPE_DIRECTORY": other}})] == ["mps.environment"]


def test_whose_value_it_is(world: World) -> None:
    gone = "MIG-00000000-0000-0000-0000-000000000000"
    (check,) = told(world, {os.getpid(): {"CUDA_VISIBLE_DEVICES": gone}})
    assert check.seen == f"CUDA_VISIBLE_DEVICES names {gone}, which does not exist, in the environment of this shell"
    # The values of others do not push ours out.
    values = {pid: {"CUDA_MPS_PIPE_DIRECTORY": f"/{pid}"} for pid in range(2, 100)}
    assert "/ours" in told(world, {**values, os.getpid(): {"CUDA_MPS_PIPE_DIRECTORY": "/ours"}})[0].seen
    # A long value is no path and no list.
    long = ",".join(f"MIG-00000000-0000-0000-0000-{number:012}" for number in range(1000))
    assert told(world, {7: {"CUDA_MPS_PIPE_DIRECTORY": "/a" * 250_000, "CUDA_VISIBLE_DEVICES": long}}) == []


def test_many_values_are_counted_and_the_first_shown(world: World) -> None:
    values = {
        pid: {
            "CUDA_MPS_PIPE_DIRECTORY": f"/{pid}/" + "x" * 4000,
            "CUDA_VISIBLE_DEVICES": f"MIG-00000000-0000-0000-0000-{pid:012}",
        }
        for pid in range(2000, 3000)
    }
    checks = told(world, values)
    assert len(checks) == 22
    assert all(check.why and check.remedy and len(check.seen) < 300 for check in checks)
    assert [check.seen for check in checks if "more" in check.seen] == [
        "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES names 990 more that do not exist",
        "CUDA_MPS_PIPE_DIRECTORY names 990 more where no daemon listens",
    ]


def test_a_value_in_other_words_is_the_same_place(cli: Cli, world: World) -> None:
    started(cli)
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": f"/{world.state.daemons[0].pipe_directory}/./"}
    admin.add_process(world.spec, holder=True, memory_bytes=0, environment=pipe)
    assert findings(cli) == {}


def test_xids_of_real_lines() -> None:
    text = (
        "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[  12.3] NVRM: Xid (PCI:0000:41:00): 31, pid=1234, name=python3, Ch 00000008, intr 00000000. MMU Fault\n"
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.159.04\n"
    )
    assert [tuple(xid) for xid in xids_in(text)] == [(79, "0000:01:00"), (31, "0000:41:00")]


def test_the_machine_itself(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "limits").write_text(
        "Limit    Soft Limit  Hard Limit  Units\nMax open files   1024   524288   files\n"
    )
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0CUDA_VISIBLE_DEVICES=MIG-x\0")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "limits").write_text("Max open files   unlimited   unlimited   files\n")
    machine = Machine(str(tmp_path))
    assert [machine.descriptor_limit(pid) for pid in (7, 8, 9)] == [1024, 1 << 30, None]
    assert machine.environments(["CUDA_VISIBLE_DEVICES"]) == {7: {"CUDA_VISIBLE_DEVICES": "MIG-x"}}
    space = Machine().shared_memory()
    assert space is None or 0 <= space.free <= space.total
    assert Machine().descriptor_limit(os.getpid())


def test_a_kept_file_that_says_otherwise_or_is_damaged_hides_nothing(cli: Cli, world: World) -> None:
    cli("doctor")
    for way in ("exclusive: true", "timeslice: default"):
        apply(cli, world.directory, way)
    exclusive_left(cli, world, world.directory)
    assert set(findings(cli)) == {"gpu.compute_mode", "host.drift"}
    keep_applied(world.host, "version: 9\n")
    checks = findings(cli)
    assert set(checks) == {"gpu.compute_mode", "host.file"}
    assert "applied.yaml:1:10: 'version' is not 1" in checks["host.file"]["seen"]
    keep_applied(world.host, "version: 1\ngpus:\n- {match: {index: 7}, timeslice: default}\n")
    assert "this host has no GPU 7" in findings(cli)["host.file"]["seen"]


@pytest.mark.parametrize(("way", "undone"), [
    ("timeslice: long", ("timeslice", "reset", "-g", "0")), ("mps: {threads: 25}", ("mps", "stop", "-g", "0")),
    ("mps: {threads: 25}", ("mps", "set", "-g", "0", "--threads", "30")),
    ("mig: [3g.71gb]", ("mig", "destroy", "all", "-g", "0")),
    ("mig: [3g.71gb]", ("mig", "create", "1g.18gb", "-g", "0")),
])  # fmt: skip
def test_what_was_applied_and_is_gone_is_told(
    cli: Cli, world: World, tmp_path: Path, way: str, undone: tuple[str, ...]
) -> None:
    apply(cli, tmp_path, way)
    assert findings(cli) == {}
    cli(*undone).ok()
    checks = findings(cli)["host.drift"]
    assert (checks["gpu"], "is not as it was applied" in checks["seen"]) == (0, True)
    command, _, _ = checks["remedy"].partition(";")
    # What a user applied is not the host's.
    world.fault("user", NOBODY)
    assert "host.drift" not in findings(cli)
    world.clear()
    cli(*command.split()[2:]).ok()
    assert findings(cli) == {}


def test_a_gpu_that_cannot_be_compared_hides_no_other(cli: Cli, sim_dir: Path, tmp_path: Path) -> None:
    host = "sim:2xh100"
    path = tmp_path / "gpushare.yaml"
    path.write_text(
        "version: 1\ngpus:\n- match: {index: 0}\n  mig: [3g.40gb]\n- match: {index: 1}\n  timeslice: long\n"
    )
    cli("apply", "-f", str(path), "-y", host=host).ok()
    kept = applied_path(World(host).host)
    kept.write_text(kept.read_text().replace("3g.40gb", "3g.71gb"))
    cli("timeslice", "set", "default", "-g", "1", host=host).ok()
    checks = cli("doctor", host=host, output="json").data["checks"]
    assert [(each["verdict"], each["gpu"]) for each in checks if each["id"] == "host.drift"] == [
        ("warn", 0),
        ("warn", 1),
    ]


def test_a_grant_that_the_driver_cannot_keep_is_not_to_be_repeated(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mig("3g.71gb:0")(cli, world, world.directory)
    name("3g.71gb", NOBODY)(cli, world, world.directory)
    monkeypatch.setattr(type(world.host.capabilities), "of_gpu", lambda *_: {})
    assert findings(cli)["mig.grant"]["remedy"].startswith("access per instance needs nv_cap_enable_devfs=1")


def test_a_run_is_no_holder(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpushare run` has NVML open while its program runs, as seen on an H200."""
    uuid = world.mig("1g.18gb:0")[0]
    started(cli, "-g", uuid)
    lease = DaemonHome(home(world)).take_lease()
    opened = OpenFiles(by_pid={os.getppid(): ("/dev/nvidia0",), os.getpid(): ("/dev/nvidia0",)}, complete=True)
    monkeypatch.setattr(SimulatedProcesses, "open_files", lambda *_: opened)
    # The parent of this test is a stranger; the holder of the lease is not.
    assert f"{os.getppid()} (" in findings(cli)["mig.holders"]["seen"]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert f"{lease.path.name.partition('.')[0]} (" not in findings(cli)["mig.holders"]["seen"]
    lease.release()


def test_memory_of_no_process(cli: Cli, world: World) -> None:
    assert finding(cli, "gpu.unlisted_memory")["verdict"] == "pass"
    world.fault("unlisted-memory", "900M")
    assert finding(cli, "gpu.unlisted_memory")["verdict"] == "pass"
    world.fault("unlisted-memory", "3G")
    check = finding(cli, "gpu.unlisted_memory")
    assert (check["verdict"], "3.0 GiB of GPU 0" in check["seen"]) == ("warn", True)
    assert "gpu-reset" in check["remedy"]
    assert cli("status", output="json").ok().data["gpus"][0]["memory_unlisted_bytes"] == 3 << 30
    assert "held by no process" in cli("status").ok().err


@pytest.mark.parametrize(("fault", "value", "identifier"), [
    ("refused", "compute-mode", "gpu.compute_mode"), ("refused", "processes", "gpu.unlisted_memory"),
    ("not-supported", "memory", "gpu.unlisted_memory"), ("refused", "mig-instances", "mig.state"),
])  # fmt: skip
def test_what_cannot_be_read_does_not_pass(cli: Cli, world: World, fault: str, value: str, identifier: str) -> None:
    if identifier == "mig.state":
        world.mig("1g.18gb")
    cli("doctor").ok()
    world.fault(fault, value)
    (check,) = all_of(cli, identifier)
    assert (check["verdict"], check["gpu"], "GPU 0" in check["seen"]) == ("skip", 0, True)


def test_daemons_that_have_every_gpu_open_are_not_to_be_killed(cli: Cli, world: World) -> None:
    world.fault("unlisted-memory", "3G")
    daemon = admin.add_process(world.spec, holder=True, name="nvidia-persistenced")
    check = finding(cli, "gpu.unlisted_memory")
    assert f"open in {daemon} (nvidia-persistenced" in check["seen"]
    assert check["remedy"].startswith("when it is idle: sudo nvidia-smi --gpu-reset")
    other = admin.add_process(world.spec, holder=True, name="python3")
    assert finding(cli, "gpu.unlisted_memory")["remedy"] == f"end what has it open: kill {other}"
    theirs = admin.add_process(world.spec, holder=True, name="python3", user="bob")
    # The own one first: it may be all.
    assert finding(cli, "gpu.unlisted_memory")["remedy"] == f"end what has it open: kill {other}"
    admin.end_process(world.spec, other)
    end = f"end what has it open: kill {theirs}"
    # Root can do so.
    assert finding(cli, "gpu.unlisted_memory")["remedy"] == (end if world.host.root else f"ask bob: {end}")


def _idle_for_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what does nothing have done nothing for long; the machine itself may have started a minute ago."""
    monkeypatch.setattr("gpushare.doctor.examine._IDLE_SECONDS", 1.0)
    with world.file.changed() as state:
        for process in state.processes:
            process.started -= 200


def test_memory_of_a_process_that_does_nothing(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = admin.add_process(world.spec, memory_bytes=20 << 30, sm_percent=0, name="notebook")
    others = (
        admin.add_process(world.spec, memory_bytes=2 << 30, sm_percent=0, name="Xorg", graphics=True),
        admin.add_process(world.spec, memory_bytes=1 << 29, sm_percent=0),
        admin.add_process(world.spec, memory_bytes=20 << 30, sm_percent=50),
    )
    assert all_of(cli, "gpu.idle_memory") == []
    _idle_for_long(world, monkeypatch)
    check = finding(cli, "gpu.idle_memory")
    assert check["remedy"] == f"end it: kill {pid}; or move it to host memory: gpushare swap out {pid}"
    assert not set(map(str, others)) & set(check["seen"].split())
    cli("pause", str(pid)).ok()
    assert all_of(cli, "gpu.idle_memory") == []
    admin.end_process(world.spec, pid)
    pid = admin.add_process(world.spec, memory_bytes=20 << 30, sm_percent=0, name="notebook", user="nobody")
    _idle_for_long(world, monkeypatch)
    check = finding(cli, "gpu.idle_memory")
    assert (check["verdict"], f"{pid} (notebook, nobody) holds 20.0 GiB of GPU 0" in check["seen"]) == ("warn", True)
    assert check["remedy"].startswith("ask nobody to end it")
    # Root may move a job of another user, other users may not.
    assert ("gpushare swap out" in check["remedy"]) is world.host.root
    world.fault("user", "daemon")
    assert "gpushare swap out" not in finding(cli, "gpu.idle_memory")["remedy"]


def test_swaps_that_were_lost_or_interrupted(cli: Cli, world: World) -> None:
    pid = admin.add_process(world.spec, memory_bytes=4 << 30, name="train")
    cli("swap", "out", str(pid)).ok()
    assert finding(cli, "swap.lost")["verdict"] == "pass"
    (swap,) = swaps(world.host)
    SWAPS.write(replace(swap, state="returning"))
    assert all_of(cli, "swap.interrupted") == []
    os.utime(swap.path, (time.time() - 1200,) * 2)
    assert "20 minutes" in finding(cli, "swap.interrupted")["seen"]
    SWAPS.write(replace(swap, state="lost"))
    check = finding(cli, "swap.lost")
    assert (check["verdict"], check["remedy"]) == ("fail", f"end it: gpushare stop {pid}")


def test_a_power_cap_is_named(cli: Cli, world: World) -> None:
    assert "gpu.power_cap" not in findings(cli)
    world.fault("power-cap", "350")
    capped = finding(cli, "gpu.power_cap")
    assert (capped["seen"], capped["verdict"]) == ("the power limit of GPU 0 is 350 W, and 700 W by default", "warn")
    assert capped["remedy"].endswith("sudo nvidia-smi -i 0 -pl 700")
    admin.add_process(world.spec, sm_percent=100)
    (gpu,) = cli("status", output="json").ok().data["gpus"]
    assert (gpu["power_watts"], gpu["power_limit_watts"]) == (350.0, 350.0)
    metrics = cli("export", "prometheus").ok().out
    assert 'gpushare_gpu_power_watts{UUID="' in metrics
