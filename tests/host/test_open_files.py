"""Who has files open: looked up in the real /proc, with children of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare.host import open_files as module
from gpushare.host.open_files import OpenFiles, open_files
from gpushare.host.process import Processes

HOLD = "import sys; kept = [open(path) for path in sys.argv[1:]]; print('open', flush=True); sys.stdin.read()"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "nvidia-cap12"
    path.touch()
    return path


@pytest.fixture
def holder(node: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a child that has the node open until it is told to end."""
    command = [sys.executable, "-c", HOLD, str(node)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "open\n"
        yield child
        child.kill()


def test_a_child_that_holds_a_file_is_found(node: Path, holder: subprocess.Popen[str]) -> None:
    assert open_files(str(node.parent)).by_pid == {holder.pid: (str(node),)}
    assert Processes().open_files(str(node.parent)).by_pid == {holder.pid: (str(node),)}
    assert open_files(str(node.parent)).holders_of(str(node)) == (holder.pid,)
    assert open_files(str(node.parent)).holders_of(str(node.parent)) == ()


def test_a_child_that_ended_holds_nothing(node: Path, holder: subprocess.Popen[str]) -> None:
    holder.communicate("")
    assert open_files(str(node.parent)).by_pid == {}


def test_only_files_below_the_prefix_count_each_once(node: Path, tmp_path: Path) -> None:
    with open(node), open(node), open(tmp_path / "other", "w"):
        assert open_files(str(tmp_path / "nvidia")).by_pid == {os.getpid(): (str(node),)}


def test_a_file_that_was_removed_counts_under_its_old_name(node: Path) -> None:
    with open(node):
        node.unlink()
        assert open_files(str(node)).by_pid == {os.getpid(): (str(node),)}


def proc_of(root: Path, files: dict[int, list[str]]) -> str:
    """Return a directory like /proc: descriptors are links, as there."""
    for pid, paths in files.items():
        descriptors = root / str(pid) / "fd"
        descriptors.mkdir(parents=True)
        for number, path in enumerate(paths):
            (descriptors / str(number)).symlink_to(path)
    (root / "meminfo").touch()
    return str(root)


def test_the_whole_of_proc_is_read(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, {7: ["/dev/zero", "/etc/passwd"], 9: ["/etc/passwd"], 12: ["/dev/null"]})
    (tmp_path / "20").mkdir()
    opened = open_files("/dev/", proc)
    assert opened == OpenFiles(by_pid={7: ("/dev/zero",), 12: ("/dev/null",)}, complete=True)


def test_what_may_not_be_read_is_skipped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = proc_of(tmp_path, {7: ["/dev/null"], 9: ["/dev/null"]})
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/9/fd"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(module.os, "scandir", scandir)
    assert open_files("/dev/null", proc) == OpenFiles(by_pid={7: ("/dev/null",)}, complete=False)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert open_files("/dev/nvidia", str(tmp_path / "none")) == OpenFiles(by_pid={}, complete=False)


def test_another_pid_namespace_is_never_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "namespace_is_host", lambda _: False)
    assert not Processes().open_files("/dev/nvidia").complete


IMPOSTER = """
mount -t tmpfs none /dev && mkdir /dev/nvidia-caps && : > /dev/nvidia-caps/nvidia-cap5 && : > /dev/null &&
exec 7< /dev/nvidia-caps/nvidia-cap5 8< /dev/null && echo open && read -r _
"""


def test_a_file_of_ones_own_with_the_name_of_a_node_is_none() -> None:
    """In a name space of their own all users may put any file at any path."""
    command = ["unshare", "-Urm", "bash", "-c", IMPOSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        if child.stdout.readline() != "open\n":
            pytest.skip("no user name spaces here")
        assert os.readlink(f"/proc/{child.pid}/fd/7") == "/dev/nvidia-caps/nvidia-cap5"
        assert os.readlink(f"/proc/{child.pid}/fd/8") == "/dev/null"
        assert child.pid not in open_files("/dev/").by_pid
        child.communicate("\n")


def test_another_device_in_the_place_of_a_node_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = proc_of(tmp_path, {7: ["/dev/zero"], 9: ["/dev/null"]})
    real = os.readlink
    monkeypatch.setattr(module.os, "readlink", lambda path: real(path).replace("/dev/zero", "/dev/null"))
    assert open_files("/dev/null", proc).by_pid == {9: ("/dev/null",)}


def test_a_node_that_is_not_there_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container has nodes that this one lacks."""
    proc = proc_of(tmp_path, {7: ["/dev/zero"], 9: ["/dev/null"]})
    names = {"/dev/zero": "/dev/nvidia-caps/nvidia-cap5", "/dev/null": "/dev/nvidia-caps/nvidia-cap3"}
    real = os.readlink
    monkeypatch.setattr(module.os, "readlink", lambda path: names[real(path)])
    assert open_files("/dev/nvidia", proc).by_pid == {}
    # /dev/zero is 1:5, /dev/null 1:3; the driver of both is called mem.
    monkeypatch.setattr(module, "drivers", lambda: {1: "nvidia"})
    assert open_files("/dev/nvidia", proc).by_pid == {}, "a GPU's node is no capability"
    monkeypatch.setattr(module, "drivers", lambda: {1: "nvidia-caps"})
    assert open_files("/dev/nvidia", proc).by_pid == {7: (names["/dev/zero"],), 9: (names["/dev/null"],)}
    names["/dev/zero"] = "/dev/nvidia-caps/nvidia-cap6"
    assert open_files("/dev/nvidia", proc).by_pid == {9: (names["/dev/null"],)}


def test_many_descriptors_are_not_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_DESCRIPTORS", 50)
    proc = proc_of(tmp_path, {7: ["/dev/null"] * 50, 9: ["/dev/null"] * 51})
    seen: list[str] = []
    real = os.readlink
    monkeypatch.setattr(module.os, "readlink", lambda path: seen.append(path) or real(path))  # type: ignore[func-returns-value]
    assert open_files("/dev/null", proc) == OpenFiles(by_pid={7: ("/dev/null",), 9: ("/dev/null",)}, complete=False)
    # The one after the last tells that there are more.
    assert len(seen) <= 101


def test_a_file_system_that_refuses_hides_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE answers root EACCES, and ENOTCONN when its program has ended."""
    proc = proc_of(tmp_path, {7: ["/dev/zero", "/dev/null"]})
    real = module.is_device

    def is_device(opened: str, path: str) -> bool:
        if path == "/dev/zero":
            raise PermissionError(13, "Permission denied", opened)
        return real(opened, path)

    monkeypatch.setattr(module, "is_device", is_device)
    assert open_files("/dev/", proc) == OpenFiles(by_pid={7: ("/dev/null",)}, complete=True)
