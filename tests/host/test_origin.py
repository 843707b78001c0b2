"""Where a process comes from, and whether only root can have put it into its cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare.host.identity import identity_of
from gpushare.host.origin import MOST_OF_COMMAND, _hierarchy_and_cgroup, only_root_adds_to, origin_of

USER = 65534


@pytest.fixture
def sleeper() -> Iterator[int]:
    words = [sys.executable, "-c", "import time; time.sleep(60)", "two\nlines", "x" * (100 << 10), "x" * (100 << 10)]
    with subprocess.Popen(words) as process:
        # The kernel closes our pipe, for which Popen waits, a moment before the command line is there.
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)
        yield process.pid
        process.kill()


def test_a_process_of_ours(sleeper: int) -> None:
    origin, identity = origin_of(sleeper), identity_of(sleeper)
    assert (origin.uid, origin.started) == (os.getuid(), identity.started)
    assert origin.gids >= {os.getgid(), *os.getgroups()}
    assert len(origin.command) <= MOST_OF_COMMAND
    assert "time.sleep(60) two\nlines xxx" in origin.command


def test_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert origin_of(process.pid) is None


def cgroups(tmp_path: Path, path: str) -> Path:
    root = tmp_path / "cgroup"
    at = root
    for name in ["", *path.split("/")]:
        at = at / name
        at.mkdir(mode=0o755, exist_ok=True)
        (at / "cgroup.procs").touch(mode=0o644)
        (at / "cgroup.threads").touch(mode=0o644)
    (root / "cgroup.controllers").touch()
    return root


@pytest.mark.needs_root
def test_a_cgroup_of_root(tmp_path: Path) -> None:
    root = str(cgroups(tmp_path, "system.slice/vllm.service"))
    assert only_root_adds_to(root, "/system.slice/vllm.service")
    assert only_root_adds_to(root, "/")
    assert not only_root_adds_to(root, "/system.slice/gone.service")
    assert not only_root_adds_to(root, "/../other")
    assert not only_root_adds_to(root, "/system.slice/../system.slice")


@pytest.mark.needs_root
@pytest.mark.parametrize("owned", ["a", "a/b", "a/b/cgroup.procs", "a/b/cgroup.threads"])
def test_a_delegated_cgroup_is_not_of_root(owned: str, tmp_path: Path) -> None:
    root = cgroups(tmp_path, "a/b")
    assert only_root_adds_to(str(root), "/a/b")
    os.chown(root / owned, USER, -1)
    assert not only_root_adds_to(str(root), "/a/b")


@pytest.mark.needs_root
@pytest.mark.parametrize("opened", ["a", "a/b", "a/b/cgroup.procs"])
def test_a_cgroup_that_others_may_write_is_not_of_root(opened: str, tmp_path: Path) -> None:
    root = cgroups(tmp_path, "a/b")
    os.chmod(root / opened, 0o777)  # noqa: S103 - that is the point
    assert not only_root_adds_to(str(root), "/a/b")


@pytest.mark.needs_root
def test_a_link_is_no_cgroup(tmp_path: Path) -> None:
    root = cgroups(tmp_path, "a/b")
    (root / "c").symlink_to(root / "a")
    assert not only_root_adds_to(str(root), "/c/b")


def test_the_cgroup_of_each_version(tmp_path: Path) -> None:
    text = "4:memory:/evil\n1:name=systemd:/system.slice/a.service\n0::/b\n"
    assert _hierarchy_and_cgroup(text, str(tmp_path)) == (f"{tmp_path}/systemd", "/system.slice/a.service")
    (tmp_path / "cgroup.controllers").touch()
    assert _hierarchy_and_cgroup(text, str(tmp_path)) == (str(tmp_path), "/b")
    assert _hierarchy_and_cgroup("", str(tmp_path)) == (str(tmp_path), None)
