"""What gpushare writes for a user: never through another's link, over another's file, or into another's FIFO."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.host import records
from gpushare.host.written_file import create_file, open_over, open_to_append, opened_directory
from tests.cli.drive import Cli, Patch, World

STRANGER = 12345


Plant = Callable[[Path, Path], object]


def dangling(path: Path, target: Path) -> None:
    target.unlink()
    path.symlink_to(target)


# What stands in the way of a file, and a target.
PLANTS: dict[str, Plant] = {
    "link": lambda path, target: path.symlink_to(target),
    "dangling": dangling,
    "fifo": lambda path, _: os.mkfifo(path),
    "hard link": lambda path, target: os.link(target, path),
    "directory": lambda path, _: path.mkdir(),
}
every_plant = pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a file that nobody may write to."""
    path = tmp_path / "target"
    path.write_text("precious")
    return path


@every_plant
def test_an_export_writes_new_files_only(cli: Cli, tmp_path: Path, target: Path, plant: Plant) -> None:
    directory = tmp_path / "to"
    names = [document["name"] for document in cli("export", "slurm", "--node", "n1", output="json").data["documents"]]
    directory.mkdir()
    plant(directory / names[-1], target)
    answer = cli("export", "slurm", "--node", "n1", "--to", str(directory))
    assert (answer.code, len(answer.lines("error")), len(answer.lines("hint"))) == (19, 1, 1)
    assert "exists already" in answer.err
    assert not target.exists() or target.read_text() == "precious"
    assert sorted(os.listdir(directory)) == [names[-1]]


@every_plant
def test_logs_go_into_own_files_only(cli: Cli, world: World, tmp_path: Path, target: Path, plant: Plant) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    plant(directory / "copy-1.log", target)
    answer = cli("farm", "--copies", "2", "--logs", str(directory), "--", "echo", "hello").ends(1)
    assert "unexpected" not in answer.err
    assert f"cannot write {directory}/copy-1.log" in answer.err
    assert (directory / "copy-0.log").read_text() == "hello\n"
    assert not target.exists() or target.read_text() == "precious"
    assert world.state.daemons == []


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (PLANTS["link"], "it is a symbolic link"),
        (PLANTS["fifo"], "it is not a regular file"),
        (PLANTS["hard link"], "it is a file with several hard links"),
    ],
)
def test_what_is_in_the_way_of_a_file_is_named(tmp_path: Path, target: Path, plant: Plant, problem: str) -> None:
    path = tmp_path / "log"
    plant(path, target)
    for opened in (open_over, open_to_append):
        with pytest.raises(FileExistsError) as raised:
            opened(path)
        assert raised.value.strerror == problem
        # Other errors of the system are told as they are.
        with pytest.raises(FileNotFoundError):
            opened(tmp_path / "none" / "log")
    with pytest.raises(FileNotFoundError):
        open_to_append(tmp_path / "none.log", create=False)
    assert target.read_text() == "precious"


def test_logs_of_an_earlier_farm_are_written_anew(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "copy-0.log").write_text("much longer than what comes now")
    cli("farm", "--copies", "1", "--logs", str(tmp_path), "--", "echo", "hello").ok()
    assert (tmp_path / "copy-0.log").read_text() == "hello\n"


@pytest.mark.parametrize("verb", ["observe", "bench"])
def test_a_recording_and_a_result_are_new_files(cli: Cli, tmp_path: Path, verb: str) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nowhere")
    more = ("--for", "1s") if verb == "observe" else ("--", "true")
    assert "already exists" in cli(verb, "--to", str(link), *more).ends(2).err
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_cannot_be_emptied_is_closed(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "copy-0.log"
    path.write_text("earlier")
    refused: list[int] = []

    def refuse(descriptor: int, _size: int) -> None:
        refused.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        open_over(path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(refused[0])


@pytest.mark.needs_root
def test_root_spares_another_users_file_unless_called_with_sudo(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "copy-0.log"
    path.write_text("theirs")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(FileExistsError, match=f"user {STRANGER}"):
        open_over(path)
    assert path.read_text() == "theirs"
    os.chown(tmp_path, STRANGER, -1)
    with pytest.raises(OSError, match=f"of user {STRANGER}"), opened_directory(tmp_path):
        pass
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    with opened_directory(tmp_path):
        pass


@pytest.mark.needs_root
@pytest.mark.parametrize("caller", ["", str(STRANGER)])
@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_root_follows_no_strangers_link_to_a_directory(
    tmp_path: Path, monkeypatch: Patch, mode: int, caller: str
) -> None:
    """In a directory for everybody, or in the stranger's own; also where the stranger has called sudo."""
    monkeypatch.setenv("SUDO_UID", caller)
    public, elsewhere = tmp_path / "public", tmp_path / "elsewhere"
    public.mkdir()
    elsewhere.mkdir()
    public.chmod(mode)
    os.chown(public, 0 if mode == 0o1777 else STRANGER, -1)
    (public / "dir").symlink_to(elsewhere)
    os.lchown(public / "dir", STRANGER, STRANGER)
    for path in (public / "dir", public / "dir" / "below"):
        for strangers in (False, True):
            with pytest.raises(OSError, match="of user"), opened_directory(path, strangers=strangers):
                pass
    assert os.listdir(elsewhere) == []
    os.lchown(public / "dir", 0, 0)
    if mode == 0o1777:
        with opened_directory(public / "dir"):
            pass


def test_own_links_and_directories_of_an_own_group_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with opened_directory(tmp_path / "link") as descriptor:
        create_file("a", b"text", directory=descriptor)
    assert (tmp_path / "real" / "a").read_bytes() == b"text"
    # As /var/log is on some systems: root's own groups may write there.
    tmp_path.chmod(0o775)
    with opened_directory(tmp_path):
        pass


def test_a_file_that_cannot_be_written_whole_is_removed(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(io.FileIO):
        write = full

    monkeypatch.setattr("gpushare.host.written_file.open", Full, raising=False)
    with pytest.raises(OSError, match="No space"):
        create_file(tmp_path / "a", b"text")
    assert os.listdir(tmp_path) == []


def test_what_is_made_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        create_file(tmp_path / "a", b"", mode=0o777)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "to"),
    [(STRANGER, 0o755, ""), (STRANGER, 0o777, ""), (0, 0o777, ""), (STRANGER, 0o777, "n/sub"), (0, 0o777, "n/sub")],
)
def test_root_writes_nothing_where_others_may(
    cli: Cli, tmp_path: Path, world: World, owner: int, mode: int, to: str
) -> None:
    """What is exported there is what root then installs."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, owner, -1)
    theirs.chmod(mode)
    target = str(theirs / to)
    whose = f"of user {STRANGER}" if owner else "that anyone may change"
    answer = cli("export", "slurm", "--node", "n1", "--to", target)
    assert (answer.code, len(answer.lines("error")), len(answer.lines("hint"))) == (4, 1, 1)
    assert f"it is a directory {whose}" in answer.err or f"below a directory {whose}" in answer.err
    answer = cli("farm", "--copies", "1", "--logs", target, "--", "echo", "hello")
    assert (answer.code, whose in answer.err) == (4, True)
    assert (list(theirs.iterdir()), world.state.daemons) == ([], [])


@pytest.mark.needs_root
def test_metrics_go_into_the_directory_of_node_exporters_user_through_no_link_of_his(cli: Cli, tmp_path: Path) -> None:
    theirs, roots = tmp_path / "theirs", tmp_path / "roots"
    theirs.mkdir()
    roots.mkdir()
    os.chown(theirs, STRANGER, -1)
    cli("export", "prometheus", "--textfile", str(theirs / "gpushare.prom")).ok()
    assert (theirs / "gpushare.prom").read_text().startswith("# HELP")
    (theirs / "below").symlink_to(roots)
    os.chown(theirs / "below", STRANGER, -1, follow_symlinks=False)
    answer = cli("export", "prometheus", "--textfile", str(theirs / "below" / "gpushare.prom"))
    assert (answer.code, len(answer.lines("error")), len(answer.lines("hint"))) == (4, 1, 1)
    assert list(roots.iterdir()) == []


@pytest.mark.needs_root
@pytest.mark.parametrize("owner", [STRANGER, 0])
def test_root_writes_no_metrics_where_everybody_may_change_them(cli: Cli, tmp_path: Path, owner: int) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, owner, -1)
    theirs.chmod(0o777)
    answer = cli("export", "prometheus", "--textfile", str(theirs / "gpushare.prom"))
    whose = "that anyone may change"
    assert (answer.code, f"it is a directory {whose}" in answer.err, len(answer.lines("hint"))) == (4, True, 1)
    assert list(theirs.iterdir()) == []


def test_metrics_go_into_the_directory_that_was_looked_at(cli: Cli, tmp_path: Path, monkeypatch: Patch) -> None:
    there, moved, elsewhere = tmp_path / "there", tmp_path / "moved", tmp_path / "elsewhere"
    there.mkdir()
    elsewhere.mkdir()
    replace_file = records.replace_file

    def turned(path: Path, text: str, **more: Any) -> None:
        there.rename(moved)
        there.symlink_to(elsewhere)
        replace_file(path, text, **more)

    monkeypatch.setattr("gpushare.cli.metrics.replace_file", turned)
    cli("export", "prometheus", "--textfile", str(there / "gpushare.prom")).ok()
    assert (os.listdir(elsewhere), os.listdir(moved)) == ([], ["gpushare.prom"])


def test_below_a_sticky_directory_an_own_one_is_safe(cli: Cli, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    cli("export", "slurm", "--node", "n1", "--to", str(public / "own" / "sub")).ok()
    assert (public / "own" / "sub" / "gres.conf").exists()


def test_a_directory_of_logs_that_is_swapped_keeps_its_logs(cli: Cli, tmp_path: Path) -> None:
    """A copy that is started again writes into the directory that was looked at, whatever has its name by now."""
    logs, moved, elsewhere = tmp_path / "logs", tmp_path / "moved", tmp_path / "elsewhere"
    elsewhere.mkdir()
    swap = f"[ -e {moved} ] && exit 0; mv {logs} {moved}; ln -s {elsewhere} {logs}; exit 1"
    cli("farm", "--copies", "1", "--restart", "1", "--logs", str(logs), "--", "sh", "-c", swap).ok()
    assert os.listdir(elsewhere) == []
    assert sorted(os.listdir(moved)) == ["copy-0.1.log", "copy-0.log", "farm.jsonl"]
