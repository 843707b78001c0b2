"""`gpushare run --container`, with an engine of our own that has the options and habits of Podman's, and with Podman itself.

The stand-in starts the container's process outside the tree of its client, as engines do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare.run.container import ENGINES, check_options
from tests.cli.drive import Cli, Real, Refused, World, alive, missing, until

ENGINE = f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys, time

state = pathlib.Path(os.environ["ENGINE_STATE"])
words = sys.argv[1:]
log = open(state / "calls", "a")
log.write(" ".join(words) + chr(10))
log.close()
ID = "ab" * 32
pid_file = state / "pid"


def lives(pid):
    try:
        return pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if words[0] == "run":
    names, index = [], 1
    while words[index].startswith("-"):
        if words[index] in ("--cidfile", "--mount", "--device", "--gpus", "--user", "-e"):
            index += 1
            if words[index - 1] == "--cidfile":
                file = words[index]
            if words[index - 1] == "-e":
                names.append(words[index])
        index += 1
    image, command = words[index], words[index + 1:]
    if image == "missing":
        sys.stderr.write("Error: no such image" + chr(10))
        sys.exit(125)
    environment = {{name: os.environ[name] for name in names if name in os.environ}}
    code = state / "code"
    shell = ["sh", "-c", '"$@"; echo $? > ' + str(code), "sh", *command]
    # A daemon of its own, whose parent is not this client.
    if os.fork() == 0:
        os.setsid()
        child = subprocess.Popen(command, env={{"PATH": os.environ["PATH"], **environment}})
        pid_file.write_text(str(child.pid))
        pathlib.Path(file).write_text(ID)
        status = child.wait()
        code.write_text(str(status if status >= 0 else 128 - status))
        os._exit(0)

    def pass_on(number, _frame):
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    while not code.exists():
        time.sleep(0.02)
    sys.exit(int(code.read_text()))
pid = int(pid_file.read_text()) if pid_file.exists() else 0
if words[:2] == ["container", "inspect"]:
    sys.exit(0 if lives(pid) else 1)
if words[0] == "inspect":
    print(pid if lives(pid) else 0)
if words[0] == "rm":
    os.kill(pid, signal.SIGKILL)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the stand-in as podman and docker, and return the directory of its state."""
    state, programs = tmp_path / "engine", tmp_path / "programs"
    state.mkdir()
    programs.mkdir()
    for name in ENGINES:
        (programs / name).write_text(ENGINE)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ENGINE_STATE", str(state))
    return state


def run_call(engine: Path) -> list[str]:
    """Return the words of the engine's `run`."""
    return next(line for line in (engine / "calls").read_text().splitlines() if line.startswith("run ")).split()


def container(engine: Path) -> int:
    """Return the PID of the container, once it runs."""
    until(lambda: (engine / "pid").exists() and (engine / "pid").read_text(), "the container runs")
    return int((engine / "pid").read_text())


def test_the_container_has_the_limits_and_is_proved_by_its_pid(real: Real, world: World, engine: Path) -> None:
    text = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE; cat; exit 7"
    words = ("--container", "podman", "--threads", "25", "--name", "box", "--", "image", "sh", "-c", text)
    started = real("run", *words, stdin=subprocess.PIPE)
    pid = container(engine)
    assert f"process {pid} is attached to MPS server" in started.says("attached")
    assert [process.pid for process in world.attached()] == [pid]
    assert str(pid) in world.run("timeslice", "show").out
    answer = started.result()
    assert (answer.code, answer.out) == (7, "25.0\n")
    call = run_call(engine)
    assert "--ipc=host" in call
    assert "CUDA_MPS_LOG_DIRECTORY" not in call
    (mount,) = (word for word in call if word.startswith("type=bind"))
    assert mount.count(str(world.host.run_directory)) == 2
    assert list((world.host.run_directory / "containers").iterdir()) == []


def test_outside_mps_with_a_slice(real: Real, world: World, engine: Path) -> None:
    started = real("run", "--container", "podman", "--slice", "500us", "--", "image", "sleep", "600")
    pid = container(engine)
    assert f"process {pid} has a time-slice of 500us (read back)" in started.says("time-slice")
    assert "--ipc=host" not in run_call(engine)
    assert started.end(signal.SIGTERM).code == 143
    assert not alive(pid)


def test_a_signal_ends_the_container_the_safe_way(real: Real, engine: Path) -> None:
    """A client of MPS with no handler is stopped, drained and killed, and its engine's client ends with it."""
    started = real("run", "--container", "podman", "--grace", "1s", "--", "image", "sleep", "600")
    pid = container(engine)
    started.says("attached")
    assert started.end(signal.SIGTERM).code in {137, 143}
    assert not alive(pid)


def test_if_gpushare_dies_the_guard_ends_the_container(real: Real, engine: Path) -> None:
    started = real("run", "--container", "podman", "--", "image", sys.executable, "-c", "import time; time.sleep(600)")
    pid = container(engine)
    started.says("attached")
    started.signal(signal.SIGKILL)
    until(lambda: not alive(pid), "the container has ended", seconds=60)
    assert started.result().code == -signal.SIGKILL


def test_a_container_next_to_production_is_paused(real: Real, world: World, engine: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as production:
        try:
            words = ("--opportunistic", "--yield", "pause", "--for", str(production.pid), "--", "image", "sleep", "600")
            started = real("run", "--container", "podman", "--grace", "1s", *words)
            pid = container(engine)
            until(
                lambda: any(process.pid == pid and process.channels_off for process in world.state.processes),
                "it is paused",
            )
        finally:
            production.kill()
        started.end(signal.SIGTERM)
        assert not alive(pid)


def test_an_engine_that_fails_has_its_own_exit_code(real: Real, engine: Path) -> None:
    assert "no such image" in real("run", "--container", "podman", "--", "missing").result().ends(125).err


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--container", "lxc", "--", "image"), "bad_engine", 2),
        *(
            (
                ("--container", "podman", "--threads", "50", "--memory", "1G", "--", *options, "image", "sleep", "1"),
                code,
                2,
            )
            for code in ["bad_container_option"]
            for options in (
                ("-d",),
                ("-itd",),
                ("--name", "x", "--detach"),
                ("-v", "/a:/b", "--detach=true"),
                ("--rm=false",),
                ("-e", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"),
                ("-eCUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100",),
                ("--env=CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=9G",),
                ("--env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"),
            )
        ),
    ],
)
def test_wrong_usage(refused: Refused, engine: Path, words: tuple[str, ...], code: str, exit_code: int) -> None:
    assert engine.is_dir()
    assert refused("run", *words, code=code, exit_code=exit_code)


@pytest.mark.parametrize(
    "words",
    [
        ["-it", "--detach=false", "--rm", "-e", "A=-d", "--name", "-d", "image", "-d"],
        ["-e", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "image", "--rm=false"],
        ["-h", "-d", "image"],
    ],
)
def test_options_of_a_container_that_stay(words: list[str]) -> None:
    check_options(words, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"})


def test_without_the_engine(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_named: None)
    for more in ((), ("-d",)):
        words = ("run", *more, "--container", "podman", "--", "image")
        message = refused(*words, code="command_not_found", exit_code=127)
        assert "podman is not installed" in message
        assert "spelling" not in message


@pytest.mark.parametrize("words", [("--slice", "1ms"), ("--opportunistic", "--yield", "pause")])
def test_what_only_root_may_do_with_docker(refused: Refused, cli: Cli, engine: Path, words: tuple[str, ...]) -> None:
    """Its daemon, which is root's, is the parent of the processes."""
    assert engine.is_dir()
    cli("sim", "fault", "user", "1000").ok()
    message = refused("run", "--container", "docker", *words, "--", "image", code="container_needs_root", exit_code=3)
    assert "--container podman, which starts them as you" in message


def test_the_plan_of_docker_as_a_user(cli: Cli, engine: Path) -> None:
    assert engine.is_dir()
    cli("sim", "fault", "user", "1000").ok()
    answer = cli("run", "--container", "docker", "-n", "--", "-v", "/data:/data", "image", "job").ok()
    assert "docker run --rm" in answer.out
    assert "run a container of docker as a client of the MPS daemon of GPU 0" in answer.out
    assert missing(answer.out, f"--user {os.getuid()}:{os.getgid()}", "-v /data:/data image job") == []
    assert "without root, a container of docker is ended by its client's signal" in answer.err


def podman_works() -> bool:
    """Return whether Podman runs containers here, with a file system of our own: no image can be pulled."""
    return os.environ.get("GPUSHARE_TEST_PODMAN") is not None and shutil.which("podman") is not None


@pytest.mark.skipif(not podman_works(), reason="set GPUSHARE_TEST_PODMAN to an image with sh")
def test_with_podman_itself(real: Real, world: World) -> None:
    image = os.environ["GPUSHARE_TEST_PODMAN"]
    text = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE; test -S $CUDA_MPS_PIPE_DIRECTORY/control && sleep 3; exit 7"
    started = real("run", "--container", "podman", "--threads", "25", "--", image, "/bin/sh", "-c", text)
    line = started.says("attached")
    answer = started.result()
    assert (answer.code, answer.out) == (7, "25.0\n")
    assert "is attached to MPS server" in line
    assert world.attached() == []
