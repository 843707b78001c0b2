"""Processes that only look like an MPS daemon: they are not root's daemon, and cost root next to nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare.host.identity import Stat
from gpushare.host.process import every_stat
from gpushare.host.program import Programs
from gpushare.mps.control import PROGRAM, SERVER_PROGRAM, MpsControl
from gpushare.sim import admin
from tests.cli.drive import World, alive, until
from tests.real_daemon.conftest import PATH_VARIABLE, PATIENCE_SECONDS, daemons_below
from tests.security.conftest import Stranger, gpushare


@pytest.fixture
def only_these(monkeypatch: pytest.MonkeyPatch, sim_dir: Path, mallory: Stranger) -> None:
    """See only the daemons of this test: others run on this machine."""
    from gpushare.host.process import Processes

    everybody = Processes.pids_of_program

    def pids_of_program(self: Processes, name: str) -> list[int]:
        found = []
        for pid in everybody(self, name):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/environ").read_bytes()
                if name != PROGRAM or f"={sim_dir}/".encode() in text or f"={mallory.home}/".encode() in text:
                    found.append(pid)
        return found

    monkeypatch.setattr(Processes, "pids_of_program", pids_of_program)


@pytest.fixture
def imposter(mallory: Stranger, only_these: None) -> Path:
    """Return a program with the daemon's name that takes any options, and waits."""
    path = mallory.home / "bin" / PROGRAM
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        shutil.copy(os.path.realpath("/bin/sh"), path)
        path.chmod(0o755)
    return path


@contextlib.contextmanager
def imposters(
    mallory: Stranger, program: Path, *directories: Path, visible: str = "GPU-none", log: Path | None = None
) -> Iterator[list[int]]:
    """Run one for each pipe directory, as the attacker."""
    with contextlib.ExitStack() as stack:
        argv = [str(program), "-c", "while :; do read line || sleep 600; done", "-d"]
        pids = [
            stack.enter_context(
                mallory.runs(
                    argv,
                    {
                        "CUDA_MPS_PIPE_DIRECTORY": str(directory),
                        "CUDA_MPS_LOG_DIRECTORY": str(log or directory),
                        "CUDA_VISIBLE_DEVICES": visible,
                        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "many",
                    },
                )
            )
            for directory in directories
        ]
        until(lambda: all(Path(f"/proc/{pid}/exe").resolve().name == PROGRAM for pid in pids), "they run")
        yield pids


@pytest.fixture
def control(sticky: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the vendor's program where it talks to such a daemon; it notes with which."""
    path = sticky / PROGRAM
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", str(path))
    return path


def says(control: Path, what: str) -> None:
    control.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" >>{control}.asked\n{what}\n')
    control.chmod(0o755)


def asked(control: Path, directories: list[Path]) -> list[str]:
    """Return with which of these daemons it talked."""
    path = Path(f"{control}.asked")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if Path(line) in directories]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program that hangs have a tenth of its time."""
    start = Programs.start

    def started(self: Programs, argv: Any, *, timeout: float = 10.0, **named: Any) -> Any:
        return start(self, argv, timeout=timeout / 10, **named)

    monkeypatch.setattr(Programs, "start", started)


@pytest.mark.usefixtures("impatient")
def test_hanging_daemons_of_others_are_not_asked(mallory: Stranger, imposter: Path, control: Path) -> None:
    says(control, "exec sleep 60")
    directories = [mallory.home / f"p{number}" for number in range(6)]
    with imposters(mallory, imposter, *directories):
        for words in (("status",), ("mps", "status"), ("status", "-o", "json")):
            answer = gpushare(*words, seconds=20)
            assert answer.code == 0, answer
        assert asked(control, directories) == []


@pytest.mark.usefixtures("impatient")
def test_hanging_daemons_of_others_are_asked_at_once(mallory: Stranger, imposter: Path, control: Path) -> None:
    says(control, "exec sleep 60")
    with imposters(mallory, imposter, *(mallory.home / f"p{number}" for number in range(6))):
        began = time.monotonic()
        assert gpushare("status", "-v", seconds=60).code == 0
    # One after the other each would have its half a second three times or more.
    assert time.monotonic() - began < 6.0


def test_many_in_one_directory_cost_no_look_at_all_processes_each(
    mallory: Stranger, imposter: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(control, ":")
    looks: list[int] = []

    def counted() -> Iterator[tuple[int, Stat]]:
        looks.append(1)
        return every_stat()

    monkeypatch.setattr("gpushare.host.process.every_stat", counted)
    with imposters(mallory, imposter, *[mallory.home / "p"] * 12) as pids:
        answer = gpushare("mps", "status", output="json")
    assert looks == []
    assert [pid for pid in pids if f'"pid": {pid},' not in answer.out] == []


def test_a_flood_of_text_is_cut(mallory: Stranger, imposter: Path, control: Path) -> None:
    says(control, "exec yes 100.0")
    with imposters(mallory, imposter, mallory.home / "p0"):
        room = resource.getrlimit(resource.RLIMIT_AS)
        before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (before + (400 << 20), room[1]))
        try:
            assert gpushare("status", "-v", seconds=60).code == 0
        finally:
            resource.setrlimit(resource.RLIMIT_AS, room)


@pytest.mark.parametrize("kind", ["fifo", "endless", "large"])
def test_the_doctor_looks_into_no_directory_that_a_stranger_names(
    kind: str, mallory: Stranger, imposter: Path, control: Path, sticky: Path
) -> None:
    """Neither waits there, nor takes in what has no end, nor has root change what the stranger's links mean."""
    says(control, ":")
    roots = sticky / "roots"
    roots.mkdir()
    roots.chmod(0o777)
    with (roots / "precious").open("wb") as file:
        file.truncate(200 << 20)
    log, pipe = mallory.home / f"log-{kind}", mallory.home / f"pipe-{kind}"

    def plant() -> None:
        log.mkdir()
        pipe.symlink_to(roots)
        for name in ("control.log", "server.log"):
            if kind == "fifo":
                os.mkfifo(log / name)
            else:
                (log / name).symlink_to("/dev/zero" if kind == "endless" else roots / "precious")

    mallory.does(plant)
    world = World()
    with imposters(mallory, imposter, pipe, log=log, visible=world.uuid()) as (pid,):
        answer = gpushare("doctor", seconds=30, output="json")
    checks = answer.json["data"]["checks"]
    assert "bug in gpushare" not in answer.out
    about = [check for check in checks if str(pid) in check["seen"] or str(mallory.home) in check["seen"]]
    # It is told, and as another's; what it says of itself is no reason for a remedy.
    assert {one["id"] for one in about} == {"mps.foreign"}
    assert not [
        check
        for check in checks
        if str(mallory.home) in (check["remedy"] or "") or "truncate" in (check["remedy"] or "")
    ]
    assert mallory.name in about[0]["seen"]


@pytest.fixture
def real_program(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of the real program, which answers when the machine lets it, as in `tests/real_daemon`."""
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", PATIENCE_SECONDS)
    monkeypatch.setattr("gpushare.mps.control._QUIT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(MpsControl.answers, "__defaults__", (PATIENCE_SECONDS,))
    path = os.environ.get(PATH_VARIABLE, "")
    if not (path and os.access(path, os.X_OK)):
        pytest.skip(f"{PATH_VARIABLE} does not name the real {PROGRAM}")
    return path


def test_a_strangers_process_is_not_roots_daemon(
    mallory: Stranger, imposter: Path, real_program: str, sim_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the name, and says in its environment that it listens where root's daemon does."""
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", real_program)
    world = World()
    assert gpushare("status").code == 0
    # Where root's daemon will be: known to everybody from the GPU's UUID.
    assert gpushare("mps", "start", "-g", "0").code == 0
    (record,) = world.directory.glob("run/mps/*/daemon.json")
    pipe = record.parent / "pipe"
    assert gpushare("mps", "stop", "-g", "0").code == 0
    with imposters(mallory, imposter, pipe) as (pid,):
        assert gpushare("mps", "start", "-g", "0").code == 0
        (daemon,) = [one for one in daemons_below(sim_dir) if one != pid]
        assert os.stat(f"/proc/{daemon}").st_uid == 0
        assert f'"pid": {daemon},' in record.read_text()
        assert gpushare("mps", "stop", "-g", "0", "--force").code == 0
        assert not alive(daemon)
        assert alive(pid)


def names_all(mallory: Stranger, program: Path, directory: Path) -> contextlib.AbstractContextManager[int]:
    """Run a process that looks like a daemon for every GPU, as the attacker."""
    argv = [str(program), "-c", "while :; do read line || sleep 600; done", "-d"]
    return mallory.runs(argv, {"CUDA_MPS_PIPE_DIRECTORY": str(directory)})


def test_a_name_and_an_environment_do_not_take_a_gpu(
    mallory: Stranger, imposter: Path, real_program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", real_program)
    with names_all(mallory, imposter, mallory.home / "p") as pid:
        until(lambda: Path(f"/proc/{pid}/exe").resolve().name == PROGRAM, "it runs")
        started = gpushare("mps", "start", "-g", "0")
        assert started.code == 0, started
        assert gpushare("mps", "stop", "-g", "0").code == 0
        assert gpushare("run", "-g", "0", "--", "true").code == 0
        enabled = gpushare("mig", "enable", "-g", "0", "-y", host="sim:h100")
        assert enabled.code == 0, enabled


def test_a_strangers_daemon_whose_server_is_on_the_gpu_counts(
    mallory: Stranger, imposter: Path, real_program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", real_program)
    world = World()
    world.host.nvml.identities()
    admin.add_process(world.spec, "0", name=SERVER_PROGRAM, user=mallory.name)
    with names_all(mallory, imposter, mallory.home / "p") as pid:
        until(lambda: Path(f"/proc/{pid}/exe").resolve().name == PROGRAM, "it runs")
        started = gpushare("mps", "start", "-g", "0", output="json")
        assert (started.code, started.json["errors"][0]["code"]) == (19, "foreign_daemon")
        assert f"process {pid} of user {mallory.name}" in started.json["errors"][0]["message"]


@pytest.fixture
def alices(mallory: Stranger, alice: Stranger) -> Iterator[Path]:
    """Return a directory of somebody else, where the daemons of this test are seen."""
    path = Path(tempfile.mkdtemp(dir=mallory.home))
    os.chown(path, alice.uid, alice.uid)
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_the_daemon_of_a_third_is_not_stopped_for_an_imposter(
    mallory: Stranger, alice: Stranger, imposter: Path, real_program: str, alices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", real_program)
    # Everybody may run it there.
    program = alices / PROGRAM
    shutil.copy(real_program, program)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(alices), "CUDA_MPS_LOG_DIRECTORY": str(alices)}
    with (
        alice.runs([str(program), "-f"], {**environment, "CUDA_VISIBLE_DEVICES": "GPU-0"}) as daemon,
        names_all(mallory, imposter, alices) as pid,
    ):
        until((alices / "control").exists, "it listens")
        until(lambda: Path(f"/proc/{pid}/exe").resolve().name == PROGRAM, "it runs")
        said = gpushare("mps", "stop", "--pipe-directory", str(alices), "--yes", output="json")
        assert (said.code, said.json["errors"][0]["code"]) == (19, "several_daemons")
        message = said.json["errors"][0]["message"]
        assert f"{daemon} (user {alice.name})" in message
        assert f"{pid} (user {mallory.name})" in message
        assert f"process {daemon} listens" in message
        assert alive(daemon)
        assert alive(pid)


def test_who_only_names_a_directory_does_not_get_what_listens_there_stopped(
    mallory: Stranger, alice: Stranger, imposter: Path, control: Path, alices: Path
) -> None:
    says(control, "echo 100.0")

    def listens() -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.bind(str(alices / "control"))
        end.listen()
        return end

    with alice.keeps(listens), imposters(mallory, imposter, alices) as (pid,):
        said = gpushare("mps", "stop", "--pipe-directory", str(alices), "--yes", "--force", output="json")
        assert (said.code, said.json["errors"][0]["code"]) == (4, "not_your_daemon")
        assert f"the MPS daemon {pid} belongs to user {mallory.name}" in said.json["errors"][0]["message"]
        assert asked(control, [alices]) == []
        assert alive(pid)


def test_root_leaves_another_users_daemon_alone(
    mallory: Stranger, imposter: Path, real_program: str, control: Path
) -> None:
    """A word would go to whoever the directory leads to by then."""
    says(control, "echo 100.0")
    real = mallory.home / "real-one"
    mallory.does(real.mkdir)
    pipe = mallory.home / "turned"
    program = mallory.home / PROGRAM
    shutil.copy(real_program, program)
    program.chmod(0o755)
    mallory.does(lambda: pipe.symlink_to(real))
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(real)}
    with mallory.runs([str(program), "-f"], {**environment, "CUDA_VISIBLE_DEVICES": "GPU-0"}) as pid:
        until((real / "control").exists, "it listens")
        hint = gpushare("mps", "stop", "-g", "0", output="json").json["errors"][0]["hint"]
        assert "gpushare mps status" in hint
        said = gpushare("mps", "stop", "--pipe-directory", str(pipe), "--yes", output="json")
        assert (said.code, said.json["errors"][0]["code"]) == (4, "not_your_daemon")
        assert f"ask {mallory.name} to stop it; see: ps -fp {pid}" in said.json["errors"][0]["hint"]
        assert asked(control, [pipe, real]) == []
        assert alive(pid)
