"""``gpushare logs``: the output of a job in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.run.jobs import PAST, PastJob, output_path
from gpushare.run.output import seek_lines
from gpushare.run.program import open_log
from gpushare.sim import admin
from tests.cli.drive import Cli, Real, Refused, World, environment, until

TEXT = b"one\ntwo\n\x1b[31mthree\xff\n"


@pytest.fixture
def written(world: World) -> Path:
    """The output of a job that has ended."""
    past = PastJob(name="train", command="true", role="plain", device="GPU 0", began=1e9, ended=1e9 + 1, exit_code=0)
    PAST.write(replace(past, path=PAST.path(world.host, "train")))
    path = output_path(world.host, "train")
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(TEXT)
    path.chmod(0o600)
    return path


def raw(world: World, *words: str) -> bytes:
    """Return what a pipe gets."""
    command = [sys.executable, "-m", "gpushare", "--host", world.spec, "logs", *words]
    return subprocess.run(command, capture_output=True, check=True, env=environment()).stdout


def test_it_is_printed_byte_by_byte(world: World, written: Path) -> None:
    assert raw(world, "train") == TEXT
    assert raw(world, "train", "--lines", "2") == b"two\n\x1b[31mthree\xff\n"
    assert raw(world, "train", "--lines", "0") == b""
    assert raw(world, "train", "-f") == TEXT
    # Also if new files of the user may be written by a group, as on Ubuntu, where every user has one of one's own.
    written.unlink()
    before = os.umask(0o002)
    try:
        with os.fdopen(open_log(written), "wb") as file:
            file.write(b"")
    finally:
        os.umask(before)
    assert raw(world, "train") == b""


def test_the_document(cli: Cli, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = cli("logs", "train", output="json").ok().data
    lines = ["one", "two", "\x1b[31mthree\ufffd"]
    assert data == {"job": "train", "path": str(written), "running": False, "complete": True, "lines": lines}
    data = cli("logs", "train", "--lines", "1", output="json").ok().data
    assert (data["lines"], data["complete"]) == (lines[2:], False)

    def answer(text: bytes) -> tuple[list[str], bool]:
        written.write_bytes(text)
        data = cli("logs", "train", output="json").ok().data
        return data["lines"], data["complete"]

    assert answer(b"no end") == (["no end"], True)
    assert answer(b"") == ([], True)
    # It is complete only with the last byte; 8 bytes are 4 characters here.
    monkeypatch.setattr("gpushare.cli.logs._DOCUMENT_BYTES", 8)
    assert answer("éééé\néé\n".encode()) == (["éééé"], False)
    assert answer(b"1234567\n") == (["1234567"], True)
    assert answer(b"1234567\n8") == (["1234567"], False)


@pytest.fixture
def running(world: World, written: Path) -> int:
    """A job with this output that runs: a simulated process stands for it and its gpushare."""
    pid = admin.add_process(world.spec)
    world.record("train", pid, supervisor=world.host.processes.identity(pid))
    return pid


def test_it_is_followed_until_the_job_has_ended(
    real: Real, cli: Cli, world: World, written: Path, running: int
) -> None:
    # By its PID, too.
    written.write_text("one\ntwo\n")
    started = real("logs", "-f", str(running), "--lines", "1")
    assert started.process.stdout is not None
    assert started.process.stdout.readline() == "two\n"
    with written.open("a") as file:
        file.write("three\n")
    assert started.process.stdout.readline() == "three\n"
    # A file that is cut short is read from its start.
    written.write_text("new\n")
    assert started.process.stdout.readline() == "new\n"
    assert cli("logs", "train", output="json").data["running"] is True
    assert started.process.poll() is None
    world.send(running, signal.SIGKILL)
    assert started.result().code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_is_no_error(real: Real, written: Path, running: int, number: int, code: int) -> None:
    written.write_text("one\n")
    started = real("logs", "-f", "train")
    assert started.process.stdout is not None
    started.process.stdout.readline()
    answer = started.end(number)
    assert (answer.code, answer.err) == (code, "")


def test_a_reader_that_goes(world: World, written: Path, running: int) -> None:
    written.write_bytes(b"x\n" * 1_000_000)
    line = f"{sys.executable} -m gpushare --host {world.spec} logs train -f | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True, env=environment(), timeout=60)
    assert (done.stdout, done.stderr) == (b"x\n", b"")


def test_a_job_whose_output_was_not_kept(refused: Refused, real: Real, cli: Cli, world: World, written: Path) -> None:
    written.unlink()
    text = refused("logs", "train", code="no_output", exit_code=6)
    assert "gpushare run -d" in text
    assert "gpushare farm --logs DIR" in text
    started = real("run", "--name", "web", "--", "sleep", "300")
    until(lambda: cli("logs", "web", output="json").error["code"] == "no_output", "it runs")
    cli("stop", "web").ok()
    started.result()


@pytest.mark.parametrize(("words", "code", "exit_code"), [
    (("nosuch",), "no_job", 6), (("1",), "no_job", 6), (("../train",), "bad_name", 2), (("",), "bad_name", 2),
    (("train", "--lines", "-1"), "usage", 2), (("train", "--lines", "x"), "usage", 2),
])  # fmt: skip
def test_wrong_words(refused: Refused, written: Path, words: tuple[str, ...], code: str, exit_code: int) -> None:
    refused("logs", *words, code=code, exit_code=exit_code)


@pytest.mark.parametrize("form", ["json", "yaml", "csv"])
def test_a_document_has_an_end(cli: Cli, written: Path, form: str) -> None:
    answer = cli("logs", "train", "-f", output=form)
    assert answer.code == 2
    assert f"-o {form}: a document has an end" in answer.out + answer.err


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked_directory(path: Path) -> None:
    moved = path.parent.rename(path.parent.with_name("moved"))
    path.parent.symlink_to(moved)


@pytest.mark.parametrize("plant", [
    _link, _fifo, _linked_directory, lambda path: path.chmod(0o666), lambda path: path.parent.chmod(0o777),
    pytest.param(lambda path: os.chown(path, 65534, 65534), marks=pytest.mark.needs_root),
    pytest.param(lambda path: os.chown(path.parent, 65534, 65534), marks=pytest.mark.needs_root),
])  # fmt: skip
def test_what_others_may_have_written_is_not_read(cli: Cli, written: Path, plant: Callable[[Path], None]) -> None:
    plant(written)
    answer = cli("logs", "train", output="json")
    assert answer.error["code"] == "output_unreadable"
    assert answer.code in {1, 4}
    assert str(written) in answer.error["hint"]


def test_root_is_told_to_ask_as_the_user(refused: Refused, world: World) -> None:
    (world.directory / "users" / "65534").mkdir(parents=True)
    pid = admin.add_process(world.spec, user="65534")
    world.fault("user", 65534)
    world.record("train", pid, supervisor=world.host.processes.identity(pid))
    world.fault("user", 0)
    for job in ("train", str(pid)):
        message = refused("logs", job, code="other_user", exit_code=3)
        assert "sudo -u nobody env GPUSHARE_RUN_DIR=" in message


@pytest.mark.parametrize(("text", "lines", "rest", "more"), [
    (b"", 3, b"", False), (b"a\nb\n", 3, b"a\nb\n", False), (b"a\nb\n", 2, b"a\nb\n", False),
    (b"a\nb\n", 1, b"b\n", True), (b"a\nb", 1, b"b", True), (b"\n\n\n", 2, b"\n\n", True),
    (b"a" * 100_000 + b"\nb\n" + b"c" * 100_000, 2, b"b\n" + b"c" * 100_000, True),
    (b"a" * 200_000, 1, b"a" * 200_000, False),
])  # fmt: skip
def test_the_last_lines(tmp_path: Path, text: bytes, lines: int, rest: bytes, more: bool) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    with path.open("rb", buffering=0) as file:
        assert seek_lines(file.fileno(), lines) is more
        assert file.readall() == rest
