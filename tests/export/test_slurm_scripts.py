"""Prolog and epilog as a shell runs them, with programs that stand in for NVIDIA's."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpushare.base.model import Way
from gpushare.base.units import MIB
from gpushare.export.description import HostDescription
from gpushare.export.document import apply_script
from gpushare.export.slurm import STATE, slurm_export
from gpushare.export.systemd import units_export
from tests.export.hosts import gpu, host, mps, text

HOST = host(
    *(gpu(index, Way.MPS, mps=mps(memory_limit_bytes=3840 * MIB if index else None)) for index in range(12)),
    gpu(12),
    gpu(13),
)

SMI = """\
#!/bin/sh
# Stands in for nvidia-smi: the compute mode of each GPU is a file.
case "$*" in
*--query-gpu=compute_mode*) cat "{tmp}/mode-$2" 2>/dev/null || echo Default ;;
"-i GPU-"*" -c EXCLUSIVE_PROCESS") echo Exclusive_Process >"{tmp}/mode-$2" ;;
"-i GPU-"*" -c DEFAULT") echo Default >"{tmp}/mode-$2" ;;
*) echo "nvidia-smi: $*" >>"{tmp}/wrong"; exit 1 ;;
esac
"""
CONTROL = """\
#!/bin/sh
# Stands in for nvidia-cuda-mps-control of driver 535: commands by stdin only.
if [ "${{1:-}}" = -d ]; then
    [ ! -e "{tmp}/no-daemon" ] || exit 1
    echo "$CUDA_VISIBLE_DEVICES ${{CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-none}}" >"$CUDA_MPS_PIPE_DIRECTORY/alive"
    exit 0
fi
[ $# -eq 0 ] || {{ echo "arguments: $*" >>"{tmp}/wrong"; exit 0; }}
read -r line
[ -e "$CUDA_MPS_PIPE_DIRECTORY/alive" ] || exit 1
echo "$line" >>"$CUDA_MPS_PIPE_DIRECTORY/asked"
case $line in
quit*) [ -e "{tmp}/stuck" ] || rm "$CUDA_MPS_PIPE_DIRECTORY/alive" ;;
get_default_device_pinned_mem_limit*) cat "{tmp}/held" 2>/dev/null || echo 3G ;;
esac
"""


@pytest.mark.parametrize("share", [HOST, host(gpu(0, Way.MPS, mps=mps()), gpu(1)), host(gpu(0, Way.MPS, mps=mps()))])
def test_shellcheck_finds_nothing(share: HostDescription, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    units = units_export(share)
    scripts = [
        document
        for document in (*slurm_export(share).documents, *units.documents, apply_script("systemd", units))
        if document.kind == "sh"
    ]
    assert len(scripts) == 5
    for one in scripts:
        (tmp_path / one.name).write_text(one.text)
    # 2317: functions that are called by their name in a variable.
    command = [shellcheck, "--exclude", "SC2317", *(script.name for script in scripts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


@dataclass
class Node:
    """A node on which slurmd runs the scripts."""

    tmp: Path

    def run(
        self, script: str, job: int, gpus: str = "", percent: str | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script as slurmd does."""
        body = text(slurm_export(HOST, autodetect="off"), f"gpushare-{script}.sh").replace(
            STATE, str(self.tmp / "state")
        )
        body = body.replace("PATH=/usr/local/sbin", f"PATH={self.tmp / 'bin'}:/usr/local/sbin").replace(
            "sleep 0.5", ":"
        )
        path = self.tmp / f"{script}.sh"
        path.write_text(body)
        # slurmd gives them no PATH.
        environment = {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": "0", "CUDA_VISIBLE_DEVICES": gpus}
        if percent is not None:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
        environment.update(more)
        done = subprocess.run(
            ["/bin/sh", str(path)], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        wrong = self.tmp / "wrong"
        assert not wrong.exists(), wrong.read_text()
        return done

    def daemon(self, number: int) -> str | None:
        """Return what the daemon of a GPU was started with, or None when it does not run."""
        alive = self.tmp / "state" / uuid(number) / "pipe" / "alive"
        return alive.read_text().strip() if alive.exists() else None

    def mode(self, number: int) -> str:
        """Return the compute mode of a GPU."""
        path = self.tmp / f"mode-{uuid(number)}"
        return path.read_text().strip() if path.exists() else "Default"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "bin").mkdir()
    for name, body in (("nvidia-smi", SMI), ("nvidia-cuda-mps-control", CONTROL)):
        path = tmp_path / "bin" / name
        path.write_text(body.format(tmp=tmp_path))
        path.chmod(0o755)
    return Node(tmp_path)


def test_a_daemon_lives_as_long_as_its_jobs(node: Node) -> None:
    assert node.run("prolog", 1, "1", "25").returncode == 0
    # The percentage is the job's own, not the daemon's.
    assert node.daemon(1) == f"{uuid(1)} none"
    assert node.mode(1) == "Exclusive_Process"
    asked = (node.tmp / "state" / uuid(1) / "pipe" / "asked").read_text()
    assert "set_default_device_pinned_mem_limit 0 3840M" in asked
    assert node.run("prolog", 2, "1", "50").returncode == 0
    assert node.run("epilog", 1, "1", "25").returncode == 0
    assert node.daemon(1) is not None
    assert node.run("epilog", 2, "1", "50").returncode == 0
    assert node.daemon(1) is None
    assert node.mode(1) == "Default"


def test_gpu_one_is_not_gpu_eleven(node: Node) -> None:
    """The sample compares lists of numbers as text."""
    node.run("prolog", 1, "11", "25")
    assert node.run("prolog", 2, "1", None).returncode == 0
    assert node.daemon(11) is not None
    assert node.daemon(1) is None
    assert node.run("prolog", 3, "0", "25").returncode == 0
    assert (node.daemon(0), node.daemon(11)) == (f"{uuid(0)} none", f"{uuid(11)} none")
    node.run("epilog", 1)
    assert (node.daemon(11), node.mode(11)) == (None, "Default")
    assert (node.daemon(0), node.mode(0)) == (f"{uuid(0)} none", "Exclusive_Process")


def test_the_task_is_told_where(node: Node) -> None:
    node.run("prolog", 7, "3", "25")
    told = node.run("task-prolog", 7, "3", "25").stdout
    assert told == (
        f"export CUDA_MPS_PIPE_DIRECTORY={node.tmp}/state/{uuid(3)}/pipe\nexport CUDA_VISIBLE_DEVICES={uuid(3)}\n"
    )
    assert node.run("task-prolog", 8, "3", "25").stdout == ""
    # A step of this job without a share of MPS.
    assert node.run("task-prolog", 7, "12").stdout == ""
    node.run("epilog", 7)
    assert node.run("task-prolog", 7, "3", "25").stdout == ""


def test_a_step_with_a_shard_is_told_what_it_gets(node: Node) -> None:
    node.run("prolog", 7, "3", "25", GPU_DEVICE_ORDINAL="12")
    # Slurm's own number counts the devices of one gres: 0 would be the GPU with MPS.
    told = node.run("task-prolog", 7, "0", "25", SLURM_SHARDS_ON_NODE="1").stdout.splitlines()
    assert told[0].startswith("print gpushare: this step has a share of MPS and a shard")
    assert told[1:] == [
        f"export GPUSHARE_SHARD_DEVICES={uuid(12)}",
        f"export CUDA_MPS_PIPE_DIRECTORY={node.tmp}/state/{uuid(3)}/pipe",
        f"export CUDA_VISIBLE_DEVICES={uuid(3)}",
    ]


@pytest.mark.parametrize(
    "details",
    [
        # Before 23.11, and since then; one of several nodes; a type; the share before and after.
        "JobId=7 JOB_GRES=mps:60,shard:1 Nodes=n2 CPU_IDs=0 Mem=0 GRES=mps:60(IDX:3),shard:1(IDX:12) MinMemoryNode=0",
        "JobId=7 Nodes=n1 CPU_IDs=0 Mem=0 GRES=mps:60(IDX:1) Nodes=n2 CPU_IDs=0 Mem=0 GRES=shard:1(IDX:12),mps:60(IDX:3)",
        "JobId=7 Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=mps:60(0/100,0/100,0/100,60/100,0/0),shard:1(SHARD) A=mps:1(IDX:2)",
        "JobId=7 Nodes=n2 CPU_IDs=0 Mem=0 GRES=shard:1(SHARD),mps:t4:60(0/100,0/100,0/100,60/100)",
    ],
)
@pytest.mark.parametrize(
    "seen",
    [
        # mps before shard, and after it; with AutoDetect=nvml there is no ordinal.
        {"CUDA_VISIBLE_DEVICES": "12", "SLURM_JOB_GPUS": "12", "GPU_DEVICE_ORDINAL": "12"},
        {"CUDA_VISIBLE_DEVICES": "12", "SLURM_JOB_GPUS": "12"},
        {"CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_GPUS": "3", "GPU_DEVICE_ORDINAL": "12"},
        {"CUDA_VISIBLE_DEVICES": uuid(3), "SLURM_JOB_GPUS": "3"},
        {"CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_GPUS": "12"},
    ],
)
def test_a_share_beside_another_gres(node: Node, details: str, seen: dict[str, str]) -> None:
    """The variables of the prolog are those of the last gres in the list of the job."""
    scontrol = node.tmp / "bin" / "scontrol"
    details = details.replace("SHARD", "0/0," * 12 + "1/2")
    scontrol.write_text(f'#!/bin/sh\n[ "$*" = "-d -o show job 7" ] && echo "{details}"\n')
    scontrol.chmod(0o755)
    names = {"SLURMD_NODENAME": "n2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert node.run("prolog", 7, percent="60", **seen, **names).returncode == 0
    assert node.daemon(3) == f"{uuid(3)} none"
    told = node.run("task-prolog", 7, "0", "60", SLURM_SHARDS_ON_NODE="1").stdout
    assert f"export GPUSHARE_SHARD_DEVICES={uuid(12)}\nexport CUDA_MPS" in told
    assert told.endswith(f"export CUDA_VISIBLE_DEVICES={uuid(3)}\n")


@pytest.mark.parametrize("answer", ["exit 1", "echo JobId=7 Nodes=n1 GRES='mps:60(IDX:1)'", "echo"])
def test_a_job_whose_share_slurm_does_not_place_runs_without_it(node: Node, answer: str) -> None:
    scontrol = node.tmp / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{answer}\n")
    scontrol.chmod(0o755)
    done = node.run("prolog", 7, "12", "60", GPU_DEVICE_ORDINAL="12", SLURMD_NODENAME="n2")
    assert (done.returncode, done.stderr) == (
        0,
        "gpushare: Slurm does not say which GPU has the share of MPS of job 7\n",
    )
    told = node.run("task-prolog", 7, "0", "60", SLURM_SHARDS_ON_NODE="1").stdout.splitlines()
    assert told[0].startswith("print gpushare: Slurm does not say which GPU has this job's share of MPS")
    assert told[1:] == ["unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", f"export CUDA_VISIBLE_DEVICES={uuid(12)}"]
    assert node.run("epilog", 7).returncode == 0


@pytest.mark.parametrize("number", ["14", "GPU-x", ""])
def test_a_share_on_a_gpu_that_the_script_does_not_know_fails(node: Node, number: str) -> None:
    """Otherwise the job would run without its limit, on all of the GPU."""
    done = node.run("prolog", 1, number, "25")
    assert done.returncode == 1
    assert "a share of MPS" in done.stderr
    assert not list((node.tmp / "state").glob("GPU-*"))
    assert node.run("task-prolog", 1, number, "25").stdout == ""


@pytest.mark.parametrize("program", ["nvidia-cuda-mps-control", "nvidia-smi"])
def test_a_program_that_is_missing_is_named_at_once(node: Node, program: str) -> None:
    if shutil.which(program) is not None:
        pytest.skip(f"{program} is installed here")
    (node.tmp / "bin" / program).unlink()
    done = node.run("prolog", 1, "1", "25")
    assert done.returncode == 1
    assert f"{program} not found in " in done.stderr
    # A job without a share of MPS does not need it.
    assert node.run("prolog", 2, "1").returncode == 0


def test_a_memory_limit_that_the_daemon_does_not_take_fails(node: Node) -> None:
    (node.tmp / "held").write_text("0G\n")
    done = node.run("prolog", 1, "1", "25")
    assert done.returncode == 1
    assert "has the memory limit '0G' instead of 3840M" in done.stderr
    assert node.daemon(1) is None
    # Without a limit nothing is read.
    assert node.run("prolog", 2, "0", "25").returncode == 0


def test_slurm_may_name_gpus_by_uuid(node: Node) -> None:
    node.run("prolog", 1, uuid(4), "25")
    assert node.daemon(4) == f"{uuid(4)} none"


def test_the_mode_that_was_there_comes_back(node: Node) -> None:
    (node.tmp / f"mode-{uuid(2)}").write_text("Exclusive_Process\n")
    node.run("prolog", 1, "2", "25")
    # nvidia-smi is asked for EXCLUSIVE_PROCESS both times.
    node.run("epilog", 1)
    assert node.mode(2) == "Exclusive_Process"


def test_a_whole_gpu_finds_no_daemon_that_was_left(node: Node) -> None:
    node.run("prolog", 1, "5", "25")
    assert node.run("prolog", 2, "5").returncode == 0
    assert (node.daemon(5), node.mode(5)) == (None, "Default")


def test_a_gpu_without_mps_and_a_job_without_a_gpu(node: Node) -> None:
    assert node.run("prolog", 1, "12").returncode == 0
    assert node.run("prolog", 2).returncode == 0
    assert node.run("epilog", 2).returncode == 0
    assert not list((node.tmp / "state").glob("GPU-*"))


def test_a_daemon_that_does_not_start_fails_the_prolog(node: Node) -> None:
    (node.tmp / "no-daemon").touch()
    done = node.run("prolog", 1, "1", "25")
    assert done.returncode == 1
    assert "does not start" in done.stderr
    assert node.mode(1) == "Default"
    assert node.run("task-prolog", 1).stdout == ""


def test_a_daemon_that_does_not_quit_fails_the_epilog(node: Node) -> None:
    node.run("prolog", 1, "1", "25")
    (node.tmp / "stuck").touch()
    done = node.run("epilog", 1)
    assert done.returncode == 1
    assert "does not quit" in done.stderr


@pytest.mark.parametrize("older", [False, True])
def test_no_job_can_hold_the_lock(node: Node, older: bool) -> None:
    """Whoever can open a file can lock it, and a prolog that waits in vain drains the node."""
    lock = node.tmp / "state" / "lock"
    if older:
        lock.parent.mkdir()
        lock.touch()
        lock.chmod(0o644)
    assert node.run("prolog", 7, "0", "50").returncode == 0
    assert lock.stat().st_mode & 0o777 == 0o600
