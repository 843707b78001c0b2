"""Prolog and epilog with the real daemon, beside a user who wants the node drained."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpushare.base.model import Way
from gpushare.base.units import MIB
from gpushare.export.slurm import STATE, slurm_export
from tests.cli.drive import until
from tests.export.hosts import gpu, host, mps, text
from tests.export.test_slurm_scripts import SMI, uuid
from tests.real_daemon.conftest import daemons_below
from tests.real_daemon.strangers import STRANGER, acting, connects, locks, opens_lock

pytestmark = pytest.mark.needs_root
# The daemon prints this limit as 3G.
HOST = host(gpu(0, Way.MPS, mps=mps(memory_limit_bytes=3840 * MIB)))
OWNER = 61007


class RealNode:
    """A node whose scripts start the real daemon."""

    def __init__(self, tmp: Path, program: str) -> None:
        self.tmp = tmp
        (tmp / "bin").mkdir()
        (tmp / "bin" / "nvidia-cuda-mps-control").symlink_to(program)
        (tmp / "bin" / "nvidia-smi").write_text(SMI.format(tmp=tmp))
        (tmp / "bin" / "nvidia-smi").chmod(0o755)

    @property
    def pipe(self) -> Path:
        """Return the pipe directory of the daemon."""
        return self.tmp / "state" / uuid(0) / "pipe"

    def run(self, script: str, job: int, user: int = OWNER) -> subprocess.CompletedProcess[str]:
        """Run a script as slurmd does; a conversation is given up early."""
        body = text(slurm_export(HOST, autodetect="off"), f"gpushare-{script}.sh").replace(
            STATE, str(self.tmp / "state")
        )
        body = body.replace("PATH=/usr/local/sbin", f"PATH={self.tmp / 'bin'}:/usr/local/sbin").replace(":-10}", ":-2}")
        path = self.tmp / f"{script}.sh"
        path.write_text(body)
        # slurmd gives them no PATH.
        environment = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_UID": str(user),
            "SLURM_JOB_GID": str(user),
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }
        return subprocess.run(
            ["/bin/sh", str(path)], env=environment, capture_output=True, text=True, check=False, timeout=120
        )


@pytest.fixture
def node(real_program: str) -> Iterator[RealNode]:
    # Short, and open for the users: the pipe directory has at most 87 bytes.
    tmp = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    tmp.chmod(0o755)
    try:
        yield RealNode(tmp, real_program)
    finally:
        for pid in daemons_below(tmp):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        until(lambda: not daemons_below(tmp), "its daemons have ended")
        shutil.rmtree(tmp)


@pytest.mark.parametrize("act", [connects, opens_lock])
def test_only_the_user_of_a_job_reaches_its_daemon(node: RealNode, act: Callable[[Path], bool]) -> None:
    done = node.run("prolog", 1)
    assert done.returncode == 0, done.stderr
    with acting(STRANGER, lambda: act(node.pipe)) as got:
        assert not got
    with acting(OWNER, lambda: connects(node.pipe)) as got:
        assert got
    # Nobody may put a link into it, which the daemon as root would follow.
    assert node.pipe.stat().st_uid == 0
    assert node.pipe.stat().st_mode & 0o022 == 0
    done = node.run("epilog", 1)
    assert (done.returncode, daemons_below(node.tmp)) == (0, []), done.stderr


def test_a_daemon_whose_user_holds_a_connection_is_ended(node: RealNode) -> None:
    assert node.run("prolog", 1).returncode == 0
    with acting(OWNER, lambda: connects(node.pipe)) as got:
        assert got
        done = node.run("epilog", 1)
        assert (done.returncode, daemons_below(node.tmp)) == (0, []), done.stderr
        assert (node.tmp / f"mode-{uuid(0)}").read_text() == "Default\n"
        # And the next job gets one.
        done = node.run("prolog", 2)
        assert done.returncode == 0, done.stderr
    assert node.run("epilog", 2).returncode == 0


def test_a_lock_that_a_user_took_meets_no_later_job(node: RealNode) -> None:
    """The daemon makes its lock for everybody, and leaves it."""
    assert node.run("prolog", 1).returncode == 0
    with acting(OWNER, lambda: opens_lock(node.pipe)) as opened:
        assert opened
        (pid,) = daemons_below(node.tmp)
        os.kill(pid, 9)
        until(lambda: not daemons_below(node.tmp), "its daemons have ended")
        with acting(OWNER, lambda: locks(node.pipe)) as locked:
            assert locked
            assert node.run("epilog", 1).returncode == 0
            done = node.run("prolog", 2, STRANGER)
            assert done.returncode == 0, done.stderr
            with acting(STRANGER, lambda: connects(node.pipe)) as got:
                assert got
            assert node.run("epilog", 2).returncode == 0
    assert daemons_below(node.tmp) == []


def test_users_of_several_jobs_share_a_daemon(node: RealNode) -> None:
    assert node.run("prolog", 1).returncode == 0
    assert node.run("prolog", 2, STRANGER).returncode == 0
    for user in (OWNER, STRANGER):
        with acting(user, lambda: connects(node.pipe)) as got:
            assert got
    assert node.run("epilog", 1).returncode == 0
    # It belongs to the other one alone again.
    with acting(OWNER, lambda: connects(node.pipe)) as got:
        assert not got
    with acting(STRANGER, lambda: connects(node.pipe)) as got:
        assert got
    assert node.run("epilog", 2).returncode == 0
