"""Cgroups of jobs: made at the top of the tree, entered, removed when empty; on a real tree where there is one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.cgroups import PREFIX, Cgroups, JobCgroup
from gpushare.host.host import Host
from gpushare.host.identity import identity_of
from gpushare.host.records import sweep_leftovers
from gpushare.sim import admin

# Of a process that had our PID long ago: tests that run at the same time do not meet.
GONE = f"{PREFIX}{os.getpid()}-1-0"


def mounted() -> str | None:
    """Return where cgroup v2 is mounted on this machine: alone, or next to v1."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[2] == "cgroup2":
            return words[1]
    return None


@contextlib.contextmanager
def real_tree() -> Iterator[Cgroups]:
    """Yield the tree of this machine, and remove what this process made in it; skip where there is none to write."""
    root = mounted()
    if root is None:
        pytest.skip("no cgroup v2 is mounted here")
    if not os.access(root, os.W_OK) or os.statvfs(root).f_flag & os.ST_RDONLY:
        pytest.skip("the cgroups of this machine may not be written")
    tree = Cgroups(root)
    yield tree
    for name in os.listdir(root):
        if name.startswith(f"{PREFIX}{os.getpid()}-"):
            os.rmdir(f"{root}/{name}")


@pytest.fixture
def tree() -> Iterator[Cgroups]:
    with real_tree() as found:
        yield found


def wait_empty(cgroup: JobCgroup) -> None:
    deadline = time.monotonic() + 10
    while cgroup.populated() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.needs_root
def test_a_real_cgroup_takes_a_program_and_its_children(tree: Cgroups) -> None:
    cgroup = tree.create()
    assert cgroup.populated() is False
    reading, writing = os.pipe()
    # The shell's child is started in the cgroup that the shell was moved to.
    child = subprocess.Popen(["sh", "-c", "read x; sleep 100 & echo $!; wait"], stdin=reading, stdout=subprocess.PIPE)
    cgroup.enter(child.pid)
    os.write(writing, b"\n")
    assert child.stdout is not None
    below = int(child.stdout.readline())
    assert cgroup.holds(child.pid)
    assert cgroup.holds(below)
    assert not cgroup.holds(os.getpid())
    assert cgroup.populated() is True
    assert not cgroup.remove()
    child.kill()
    child.wait()
    # It was the shell's, and stays.
    assert cgroup.holds(below)
    os.kill(below, 9)
    wait_empty(cgroup)
    assert cgroup.remove()
    assert not os.path.exists(cgroup.path)
    assert cgroup.remove()
    child.stdout.close()
    for one in (reading, writing):
        os.close(one)


@pytest.mark.needs_root
def test_a_real_leftover_is_found_and_a_living_one_is_not(tree: Cgroups) -> None:
    os.mkdir(f"{tree.root}/{GONE}")
    mine = tree.create()
    left = [one for one in tree.left() if one.name in {GONE, mine.name}]
    assert [one.name for one in left] == [GONE]
    assert left[0].remove()
    assert mine.remove()


@pytest.mark.needs_root
def test_the_name_has_pid_and_start(tree: Cgroups) -> None:
    me = identity_of(os.getpid())
    assert me is not None
    first, second = tree.create(), tree.create()
    assert first.name == f"{PREFIX}{me.pid}-{me.started}-0"
    assert second.name == f"{PREFIX}{me.pid}-{me.started}-1"
    assert first.remove()
    assert second.remove()


class Told(Cgroups):
    """A tree in a directory, and where this process is in it."""

    def __init__(self, root: Path, own: str = "0::/user.slice/session-1.scope\n") -> None:
        super().__init__(str(root), os.geteuid())
        self.own = own

    def own_text(self) -> str:
        return self.own


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    (root / "user.slice" / "session-1.scope").mkdir(parents=True)
    root.chmod(0o755)
    (root / "cgroup.controllers").write_text("cpu memory\n")
    return root


def service(root: Path) -> Told:
    return Told(root, "0::/system.slice/train.service\n")


def batch_system(root: Path) -> Told:
    return Told(root, "0::/system.slice/condor.service/condor_slot1_1@node\n")


def bandwidth(root: Path) -> Told:
    (root / "user.slice" / "io.max").write_text("8:0 rbps=1048576 wbps=max riops=max wiops=max\n")
    return Told(root, "0::/user.slice/session-1.scope\n")


def container(root: Path) -> Told:
    return Told(root, f"0::/system.slice/docker-{'ab' * 32}.scope\n")


def slurm(root: Path) -> Told:
    return Told(root, "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n")


def unknown(root: Path) -> Told:
    return Told(root, "4:memory:/\n")


def outside(root: Path) -> Told:
    return Told(root, "0::/../other\n")


def limited(root: Path) -> Told:
    (root / "user.slice" / "memory.max").write_text("1073741824\n")
    return Told(root)


def no_tree(root: Path) -> Told:
    (root / "cgroup.controllers").unlink()
    return Told(root)


def of_all(root: Path) -> Told:
    root.chmod(0o777)
    return Told(root)


def link(root: Path) -> Told:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to(root.with_name("elsewhere"))
    return Told(root)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (service, "leave train.service"),
        (batch_system, "leave condor.service"),
        (bandwidth, "/user.slice, whose io.max is set"),
        (container, "leave the container or job abababababab"),
        (slurm, "leave the container or job job_17"),
        (unknown, "unknown"),
        (outside, "unknown"),
        (limited, "/user.slice, whose memory.max is set"),
        (no_tree, "no cgroup v2"),
        (of_all, "not root's alone"),
        (link, "cannot be used"),
    ],
)
def test_no_program_leaves_what_limits_it(directory: Path, make: Callable[[Path], Told], why: str) -> None:
    assert why in (make(directory).why_not() or "")


def test_a_session_without_limits_may_be_left(directory: Path) -> None:
    scope = directory / "user.slice" / "session-1.scope"
    for name, text in (("memory.max", "max"), ("cpu.max", "max 100000"), ("cpuset.cpus", ""), ("pids.max", "100")):
        (scope / name).write_text(f"{text}\n")
    assert Told(directory).why_not() is None


def test_the_manager_of_a_user_is_no_service_that_ends_its_programs(directory: Path) -> None:
    own = "0::/user.slice/user-0.slice/user@0.service/tmux-spawn-1.scope\n"
    assert Told(directory, own).why_not() is None


def test_a_link_with_our_name_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "cgroup.procs").touch()
    (directory / GONE).symlink_to(tmp_path / "target")
    (one,) = Told(directory).left()
    with pytest.raises(OSError, match=r"directory|symbolic"):
        one.enter(os.getpid())
    assert not one.remove()
    assert (tmp_path / "target" / "cgroup.procs").read_text() == ""


@pytest.mark.parametrize("name", ["gpushare-job-x-1-0", "gpushare-job-1-1", "gpushare-other", "gpushare-job-1-1-1-1"])
def test_only_our_names_are_ours(directory: Path, name: str) -> None:
    (directory / name).mkdir()
    assert Told(directory).left() == []


def test_the_controller_is_enabled_once(directory: Path) -> None:
    (directory / "cgroup.controllers").write_text("cpu memory dmem\n")
    enabled = directory / "cgroup.subtree_control"
    enabled.write_text("cpu\n")
    tree = Told(directory)
    tree.create()
    assert enabled.read_text() == "cpu\n+dmem"
    enabled.write_text("cpu dmem\n")
    tree.create()
    assert enabled.read_text() == "cpu dmem\n"


def test_what_the_kernel_says_is_read_for_the_right_gpu(directory: Path) -> None:
    cgroup = Told(directory).create()
    assert cgroup.hard_limit("00000000:02:00.0") is None
    Path(cgroup.path, "dmem.max").write_text("nvidia/00000000:0a:00.0/vidmem max\nnvidia/00000000:02:00.0/vidmem 8\n")
    assert cgroup.hard_limit("00000000:02:00.0") == 8
    assert cgroup.hard_limit("00000000:0A:00.0") == "max"
    assert cgroup.hard_limit("00000000:03:00.0") is None


@pytest.fixture
def host() -> Host:
    admin.set_fault("sim:h200", "driver", None, "615.71.09")
    return connect("sim:h200")


def leftover(host: Host) -> JobCgroup:
    """Leave what a gpushare leaves that is killed while its job has a limit."""
    tree = host.open_cgroups()
    found = tree.create()
    host.nvml.set_memory_limit(0, found.path, GIB)
    os.rename(found.path, f"{tree.root}/{GONE}")
    return JobCgroup(tree, GONE)


def test_a_leftover_is_swept_when_nobody_is_in_it(host: Host) -> None:
    left = leftover(host)
    sleeper = subprocess.Popen(["sleep", "100"])
    left.enter(sleeper.pid)
    sweep_leftovers(host)
    assert os.path.isdir(left.path)
    limits = host.nvml.memory_limits(0, left.path)
    assert limits is not None
    assert limits.hard_bytes == GIB
    sleeper.kill()
    sleeper.wait()
    sweep_leftovers(host)
    assert not os.path.exists(left.path)


def test_a_user_sweeps_nothing_of_root(host: Host) -> None:
    left = leftover(host)
    admin.set_fault("sim:h200", "user", None, "1000")
    sweep_leftovers(connect("sim:h200"))
    assert os.path.isdir(left.path)


def test_a_gpu_that_is_lost_does_not_keep_a_leftover(host: Host) -> None:
    left = leftover(host)
    admin.set_fault("sim:h200", "lost", None, None)
    sweep_leftovers(host)
    assert not os.path.exists(left.path)
