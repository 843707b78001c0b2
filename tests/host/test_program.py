"""Running the vendor's programs: time-outs, missing and broken ones, daemons that keep what they inherited."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.errors import ExitCode, NoPermission, NotSupported, OperationFailed, TimedOut
from gpushare.host.process import Processes
from gpushare.host.program import Completed, Programs, program_path
from tests.cli.drive import until
from tests.errors import fails

Script = Callable[[str], str]


@pytest.fixture
def script(sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that makes nvidia-smi of this machine a shell script."""

    def make(text: str) -> str:
        path = sim_dir / "smi"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("GPUSHARE_NVIDIA_SMI", str(path))
        return str(path)

    return make


def run(stdin: str = "", timeout: float = 120.0, **env: str | None) -> Completed:
    return Programs().run(["nvidia-smi", "-L"], stdin=stdin, env=env, timeout=timeout)


def test_a_program_is_run_with_arguments_stdin_and_environment(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GS_GONE", "1")
    monkeypatch.setenv("GS_KEPT", "kept")
    script('cat; echo "$1 $LC_ALL $GS_NEW $GS_KEPT ${GS_GONE-unset}"; echo err >&2; exit 3')
    done = run("in\n", GS_NEW="new", GS_GONE=None)
    assert done == Completed(("nvidia-smi", "-L"), 3, "in\n-L C new kept unset\n", "err\n")
    assert done.text == "in\n-L C new kept unset\nerr"


def test_text_that_is_no_utf8_is_read(script: Script) -> None:
    script(r"printf 'a\377b'")
    assert run().stdout == "a�b"


def test_much_output_and_much_input_do_not_block(script: Script) -> None:
    script("head -c 1000000 /dev/zero | tr '\\0' x; exec 0<&-")
    assert len(run("y" * 1_000_000).stdout) == 1_000_000


def test_a_time_out_ends_the_program_and_what_it_started(script: Script, sim_dir: Path) -> None:
    script(f"sleep 600 & echo $! $$ > {sim_dir}/pids; wait")
    started = Programs().start(["nvidia-smi"], timeout=0.2)
    pids = sim_dir / "pids"
    # However slow the machine is, the time is not over before there is something to end.
    until(lambda: pids.exists() and pids.read_text().endswith("\n"), "there is something to end")
    with pytest.raises(TimedOut) as caught:
        started.result()
    assert (caught.value.code, caught.value.exit_code) == ("program_hangs", ExitCode.FAILED)
    assert "'nvidia-smi' did not answer within 0.2 s" in caught.value.message
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not Processes().alive(pid), "it is ended")


def test_a_program_that_cannot_be_killed_is_not_waited_for(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    # As nvidia-smi in the kernel with a lost GPU: SIGKILL waits until the kernel returns.
    script("sleep 600")
    monkeypatch.setattr("gpushare.host.program._KILL_SECONDS", 0.05)
    pending = Programs().start(["nvidia-smi"], timeout=0.05)
    process = pending.process  # type: ignore[attr-defined]
    with monkeypatch.context() as deaf:
        deaf.setattr(os, "killpg", lambda *_: None)
        with pytest.raises(TimedOut):
            pending.result()
    assert process.poll() is None
    os.killpg(process.pid, 9)
    process.wait()


def test_a_daemon_that_keeps_stdout_open_does_not_block(script: Script, sim_dir: Path) -> None:
    script(f"sleep 600 & echo $! > {sim_dir}/pid; echo started")
    assert run().stdout == "started\n"
    os.kill(int((sim_dir / "pid").read_text()), 9)


def test_a_program_is_in_a_session_of_its_own(script: Script) -> None:
    script("exec cut -d ' ' -f 1,6 /proc/self/stat")
    pid, session = run().stdout.split()
    assert pid == session


def test_a_missing_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_NVIDIA_SMI", "/nonexistent/smi")
    for name in ("nvidia-smi", "gs-no-such-program"):
        assert Programs().find(name) is None
        with fails(NotSupported, "program_missing", match=f"{name} is not installed"):
            Programs().run([name])


def test_a_file_that_is_not_executable_is_no_program(script: Script) -> None:
    path = Path(script("true"))
    path.chmod(0o644)
    if os.access(path, os.X_OK):
        pytest.skip("this user may execute anything")
    assert program_path("nvidia-smi") is None


def test_a_directory_is_no_program(sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_NVIDIA_SMI", str(sim_dir))
    with pytest.raises(NoPermission, match="cannot execute"):
        run()


def test_a_file_of_another_format_is_an_error(script: Script) -> None:
    Path(script("")).write_bytes(b"\x7fELFgarbage")
    with pytest.raises(OperationFailed, match="cannot execute"):
        run()


def test_programs_are_found_beyond_a_poor_path(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script("true")
    assert program_path("nvidia-smi") == path
    monkeypatch.setenv("PATH", "/nonexistent")
    real = shutil.which("env", path="/usr/bin:/bin")
    assert real is not None
    assert os.path.basename(program_path("env") or "") == "env"


@pytest.mark.parametrize(("program", "room"), [("nvidia-cuda-mps-control", 1 << 20), ("nvidia-smi", 16 << 20)])
def test_a_program_that_floods_is_ended(
    script: Script, sim_dir: Path, monkeypatch: pytest.MonkeyPatch, program: str, room: int
) -> None:
    path = script(f"echo $$ > {sim_dir}/pid; trap '' PIPE XFSZ; while :; do head -c 9000000 /dev/zero; done")
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", path)
    started = Programs().start([program], timeout=120.0)
    with fails(OperationFailed, "program_floods", message=f"more than {room >> 20} MiB"):
        started.result()
    pid = int((sim_dir / "pid").read_text())
    until(lambda: not Processes().alive(pid), "it is ended")


def test_as_much_as_there_is_room_for_is_read(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script("head -c 1048576 /dev/zero | tr '\\0' x")
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", path)
    done = Programs().run(["nvidia-cuda-mps-control"], timeout=120.0)
    assert len(done.stdout) == 1 << 20


def test_without_memory_files_a_flood_is_ended_too(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr("gpushare.host.program._MOST_OF_OTHERS", 1 << 16)
    script("while :; do echo flood; sleep 0.00001; head -c 70000 /dev/zero; sleep 1; done")
    with fails(OperationFailed, "program_floods"):
        run()
