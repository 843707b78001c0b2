"""Who has files open: looked up in the real /proc, with children of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare.host import process as module
from gpushare.host.process import LocalProcesses, OpenFiles, open_files

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
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child
        child.kill()


def test_a_child_that_holds_a_file_is_found(node: Path, holder: subprocess.Popen[str]) -> None:
    assert open_files(str(node.parent)).by_pid == {holder.pid: (str(node),)}
    assert LocalProcesses().open_files(str(node.parent)).by_pid == {holder.pid: (str(node),)}
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
    proc = proc_of(tmp_path, {7: ["/dev/nvidia0", "/dev/null"], 9: ["/dev/null"], 12: ["/dev/nvidiactl"]})
    (tmp_path / "20").mkdir()
    found = open_files("/dev/nvidia", proc)
    assert found == OpenFiles(by_pid={7: ("/dev/nvidia0",), 12: ("/dev/nvidiactl",)}, complete=True)


def test_what_may_not_be_read_is_skipped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = proc_of(tmp_path, {7: ["/dev/nvidia0"], 9: ["/dev/nvidia0"]})
    real = os.listdir

    def listdir(path: str) -> list[str]:
        if path.endswith("/9/fd"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(module.os, "listdir", listdir)
    assert open_files("/dev/nvidia", proc) == OpenFiles(by_pid={7: ("/dev/nvidia0",)}, complete=False)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert open_files("/dev/nvidia", str(tmp_path / "none")) == OpenFiles(by_pid={}, complete=False)


def test_another_pid_namespace_is_never_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalProcesses, "namespace_is_host", lambda _: False)
    assert not LocalProcesses().open_files("/dev/nvidia").complete
