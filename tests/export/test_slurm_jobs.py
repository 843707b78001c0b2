"""Jobs of a real slurmctld and slurmd: each gets the daemon of the GPU that Slurm gave it, whatever the numbers are."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpushare.base.model import Way
from gpushare.export.description import HostDescription
from gpushare.export.slurm import STATE, slurm_export
from tests.export.hosts import gpu, host, mps, text
from tests.export.test_slurm import CUT, MIXED, UNEQUAL, detect, lines, write_gres
from tests.export.test_slurm_scripts import CONTROL, SMI

PROGRAMS = os.environ.get("GPUSHARE_TEST_SLURM")
pytestmark = [
    pytest.mark.skipif(
        PROGRAMS is None, reason="GPUSHARE_TEST_SLURM is no directory with slurmctld, slurmd and sbatch"
    ),
    pytest.mark.needs_root,
]
SCRIPTS = ("prolog", "epilog", "task-prolog")


class Cluster:
    """A cluster of one node, with an exported configuration and programs that stand in for NVIDIA's."""

    def __init__(self, tmp: Path, described: HostDescription, autodetect: str = "off") -> None:
        self.tmp, self.name = tmp, socket.gethostname().partition(".")[0]
        self.found = slurm_export(described, autodetect=autodetect)
        self._running: list[subprocess.Popen[bytes]] = []
        for name in ("bin", "dev", "spool", "save"):
            (tmp / name).mkdir()
        for program, body in (("nvidia-smi", SMI), ("nvidia-cuda-mps-control", CONTROL)):
            (tmp / "bin" / program).write_text(body.format(tmp=tmp))
            (tmp / "bin" / program).chmod(0o755)
        # The prolog asks it about a job with two kinds of gres.
        (tmp / "bin" / "scontrol").symlink_to(self.program("scontrol"))
        if autodetect == "nvml":
            detect(tmp, described)
            for gpu in described.gpus:
                (tmp / "dev" / f"nvidia{gpu.minor}").symlink_to("/dev/null")
        names = {document.name for document in self.found.documents}
        self.scripts = [one for one in SCRIPTS if f"gpushare-{one}.sh" in names]
        for script in self.scripts:
            body = text(self.found, f"gpushare-{script}.sh").replace(STATE, str(tmp / "state"))
            path = tmp / f"{script}.sh"
            path.write_text(body.replace("PATH=/usr/local/sbin", f"PATH={tmp / 'bin'}:/usr/local/sbin"))
            path.chmod(0o755)
        self._configure()

    def _configure(self) -> None:
        write_gres(self.tmp, self.found)
        (self.tmp / "cgroup.conf").write_text("")
        said = lines(self.found)
        plugins = os.environ.get("GPUSHARE_TEST_SLURM_PLUGINS")
        config = {
            "ClusterName": "t",
            "SlurmctldHost": f"{self.name}(127.0.0.1)",
            "SlurmUser": "root",
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "SlurmdSpoolDir": f"{self.tmp}/spool",
            "StateSaveLocation": f"{self.tmp}/save",
            "SlurmctldPidFile": f"{self.tmp}/c.pid",
            "SlurmdPidFile": f"{self.tmp}/d.pid",
            "SlurmctldPort": str(_free_port()),
            "SlurmdPort": str(_free_port()),
            # Of a machine without cgroups for us: which devices a task may open is not tested here.
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",
            "MpiDefault": "none",
            "ReturnToService": "2",
            **({"PluginDir": plugins} if plugins else {}),
            **{key: said[key] for key in ("GresTypes", "SelectType", "PrologFlags") if key in said},
            **{one.title().replace("-", ""): f"{self.tmp}/{one}.sh" for one in self.scripts},
        }
        gres = said["NodeName"].partition("Gres=")[2]
        words = [f"{key}={value}" for key, value in config.items()]
        words += [
            f"NodeName={self.name} NodeAddr=127.0.0.1 CPUs=8 Gres={gres}",
            "PartitionName=p Nodes=ALL Default=YES",
        ]
        (self.tmp / "slurm.conf").write_text("\n".join(words) + "\n")

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": f"{self.tmp}/slurm.conf"}

    def program(self, name: str) -> str:
        return str(Path(PROGRAMS or "") / name)

    def ask(self, *words: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            [self.program(words[0]), *words[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout + done.stderr

    def start(self) -> None:
        """Start the daemons and wait for the node."""
        for name, more in (("slurmctld", ()), ("slurmd", ("-d", self.program("slurmstepd")))):
            with (self.tmp / f"{name}.log").open("wb") as log:
                argv = [self.program(name), "-D", "-f", f"{self.tmp}/slurm.conf", *more]
                self._running.append(subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        until(lambda: " State=IDLE" in self.ask("scontrol", "show", "node"), self.logs)

    def stop(self) -> None:
        for one in reversed(self._running):
            one.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(20)
            one.kill()

    def logs(self) -> str:
        return "".join(
            (self.tmp / f"{name}.log").read_text(errors="replace")[-3000:] for name in ("slurmctld", "slurmd")
        )

    def job(self, gres: str) -> dict[str, str]:
        """Run a job and return the environment of its task, with what runs on the node meanwhile."""
        out = self.tmp / f"job-{gres.replace(':', '-').replace(',', '-')}.out"
        script = f"env; cat {self.tmp}/state/*/pipe/alive 2>/dev/null | sed s/^/DAEMON=/"
        said = self.ask("sbatch", f"--gres={gres}", "-o", str(out), "--wrap", script)
        match = re.search(r"Submitted batch job (\d+)", said)
        assert match is not None, said + self.logs()
        until(
            lambda: _state(self.ask("scontrol", "show", "job", match[1])) not in {"PENDING", "RUNNING", "COMPLETING"},
            self.logs,
        )
        assert _state(self.ask("scontrol", "show", "job", match[1])) == "COMPLETED", self.logs()
        told = [line.partition("=") for line in out.read_text().splitlines()]
        return {key: value for key, _, value in told}


def _state(text: str) -> str:
    match = re.search(r"JobState=(\w+)", text)
    return match[1] if match else ""


def until(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, said()
        assert "DRAIN" not in said(), said()
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    begun: list[Cluster] = []

    def start(described: HostDescription, autodetect: str = "off") -> Cluster:
        one = Cluster(tmp_path, described, autodetect)
        begun.append(one)
        one.start()
        return one

    yield start
    for one in begun:
        one.stop()
    shutil.rmtree(tmp_path / "spool", ignore_errors=True)


def test_unequal_gpus_with_a_gap(cluster: Callable[..., Cluster]) -> None:
    """Slurm's number 2 is /dev/nvidia2 here only by chance: it is an A30, after two T4s."""
    one = cluster(UNEQUAL)
    t4, a30 = UNEQUAL.gpus[0].uuid, UNEQUAL.gpus[1].uuid
    task = one.job("mps:a30:10")
    assert (task["CUDA_VISIBLE_DEVICES"], task["DAEMON"]) == (a30, f"{a30} none")
    assert task["CUDA_MPS_PIPE_DIRECTORY"] == f"{one.tmp}/state/{a30}/pipe"
    assert task["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "10"
    task = one.job("mps:t4:25")
    assert (task["CUDA_VISIBLE_DEVICES"], task["DAEMON"]) == (t4, f"{t4} none")
    # The epilog has ended each of them.
    until(lambda: not list((one.tmp / "state").glob("*/pipe/alive")), one.logs)


def test_mps_behind_mig_devices(cluster: Callable[..., Cluster]) -> None:
    one = cluster(CUT)
    uuid = CUT.gpus[1].uuid
    task = one.job("mps:10")
    assert (task["CUDA_VISIBLE_DEVICES"], task["DAEMON"]) == (uuid, f"{uuid} none")


PAIRED = host(gpu(0, replicas=3), gpu(1, replicas=3), *(gpu(index, Way.MPS, mps=mps()) for index in (2, 3)))


@pytest.mark.parametrize("autodetect", ["off", "nvml"])
@pytest.mark.parametrize("described", [MIXED, PAIRED], ids=["mixed", "paired"])
def test_a_share_of_mps_and_a_shard(
    cluster: Callable[..., Cluster], described: HostDescription, autodetect: str
) -> None:
    """In any order: in the prolog CUDA_VISIBLE_DEVICES is that of the last gres of the list."""
    one = cluster(described, autodetect)
    uuid = next(gpu.uuid for gpu in described.gpus if gpu.sharing is Way.MPS)
    shards = [gpu.uuid for gpu in described.gpus if gpu.sharing is Way.TIMESLICE]
    for gres in ("mps:60,shard:1", "shard:1,mps:60"):
        task = one.job(gres)
        assert (task["CUDA_VISIBLE_DEVICES"], task["DAEMON"]) == (uuid, f"{uuid} none")
        assert task["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
        # The shard is not lost.
        assert task["GPUSHARE_SHARD_DEVICES"] in shards
    task = one.job("shard:1")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in task
    assert "DRAIN" not in one.ask("scontrol", "show", "node")


def test_a_share_that_slurm_does_not_place(cluster: Callable[..., Cluster]) -> None:
    one = cluster(PAIRED)
    (one.tmp / "bin" / "scontrol").unlink()
    (one.tmp / "bin" / "scontrol").symlink_to("/bin/false")
    task = one.job("mps:60,shard:1")
    assert any("Slurm does not say which GPU has this job's share of MPS" in line for line in task)
    assert task["CUDA_VISIBLE_DEVICES"] in {PAIRED.gpus[0].uuid, PAIRED.gpus[1].uuid}
    assert not {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "DAEMON"} & set(task)
    assert "DRAIN" not in one.ask("scontrol", "show", "node")
