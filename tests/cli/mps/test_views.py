"""``gpushare mps status``, ``logs`` and ``env``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from gpushare.mps.control import without_own_questions
from tests.cli.drive import Cli, Refused, Words, World, missing, refusals

TWO = "sim:2xh200"


def test_status_of_nothing(cli: Cli, world: World) -> None:
    host = "sim:4xh200"
    out = cli("mps", "status", host=host).ok().out
    assert out == "no MPS daemon runs on this host; start one: gpushare mps start -g 0\n"
    assert cli("mps", "status", host=host, output="json").ok().data == {"mps_daemons": []}
    cli("mps", "start", "-g", "0", host=host).ok()
    text = cli("mps", "status", "-g", "1,3", host=host).ok().out
    assert text == "no MPS daemon runs on these GPUs; start one: gpushare mps start -g 1\n"
    with world.file.changed() as state:
        state.gpus.clear()
    assert cli("mps", "status").out == "no MPS daemon runs on this host; start one: gpushare mps start\n"


def test_status_of_ours_and_others_by_gpu(cli: Cli, sim_dir: Path) -> None:
    world = World(TWO)
    cli("mps", "start", "-g", "0", host=TWO).ok()
    world.foreign_daemon(sim_dir, uuid=world.uuid(1))
    data = cli("mps", "status", host=TWO, output="json").ok().data["mps_daemons"]
    assert [(one["ours"], one["gpu_index"]) for one in data] == [(True, 0), (False, 1)]
    (only,) = cli("mps", "status", "-g", "1", host=TWO, output="json").ok().data["mps_daemons"]
    assert only["pipe_directory"] == f"{sim_dir}/p"
    host = "sim:8xh200"
    cli("mps", "start", "-g", "all", host=host).ok()
    for words in (("status",), ("mps", "status")):
        data = cli(*words, host=host, output="json").ok().data["mps_daemons"]
        assert [one["gpu_index"] for one in data] == list(range(8))


def test_status_shows_clients_with_their_limits(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "50").ok()
    pid = world.client(environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}, name="train.py")
    for form in ("table", "plain", "csv", "yaml"):
        assert str(pid) in cli("mps", "status", output=form).ok().out or form == "csv"
    (daemon,) = cli("mps", "status", output="json").ok().data["mps_daemons"]
    (client,) = daemon["servers"][0]["clients"]
    assert (client["pid"], client["name"], client["threads_percent"]) == (pid, "train.py", 20.0)


@refusals(
    "unknown_gpu 6: status -g 9 | logs -g 9 | env -g 9",
    "no_log 6: logs",
    "no_daemon 6: env",
    "limit_above_gpu 2: env --memory 1T",
    "bad_priority 2: env --priority x",
)
def test_wrong_words(refused: Refused, words: Words, code: str, exit_code: int) -> None:
    refused("mps", *words, code=code, exit_code=exit_code)


def test_logs(cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    world.client()
    lines = cli("mps", "logs", output="json").ok().data["lines"]
    assert set(lines) == {"control.log", "server.log"}
    assert any("NEW SERVER" in line for line in lines["control.log"])
    assert cli("mps", "logs", "--lines", "3").ok().out.count("\n") == 9
    # Of a daemon that is gone, too.
    cli("mps", "stop", "--force").ok()
    assert "Starting control daemon" in cli("mps", "logs").ok().out


def test_logs_leave_out_what_gpushare_asks(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "30").ok()
    client = world.client()
    for _ in range(30):
        cli("status").ok()
    answer = cli("mps", "logs").ok()
    # Also those of the start are among the last 40 lines, however often the daemon was asked.
    assert missing(answer.out, "Starting control daemon", f"NEW CLIENT {client} from user") == []
    assert "Cmd:set_default_active_thread_percentage 30.0" in answer.out
    assert "Cmd:get_server_list" not in answer.out
    assert "Cmd:get_server_list" in cli("mps", "logs", "-v").ok().out


def conversation(*texts: str) -> list[str]:
    return [f"[2026-11-24 13:17:34.722 Control 12345] {text}" for text in ("NEW UI", *texts, "UI closed")]


QUESTION = conversation("Cmd:get_server_list", "77", "Cmd:get_default_active_thread_percentage", "100.0")
SETTING = conversation("Cmd:set_default_client_priority 1", "1", "Cmd:get_default_active_thread_percentage", "100.0")
BY_HAND = conversation("Cmd:get_server_list", "77")
BETWEEN = conversation(
    "Cmd:ps", "PID  ID", "Server 77 exited with status 1", "Cmd:get_default_active_thread_percentage", "100.0"
)


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([*QUESTION, *SETTING, *QUESTION], SETTING),
        (["[x Control 12345] Accepting connection...", *QUESTION], []),
        (
            ["[x Control 12345] Accepting connection...", *SETTING],
            ["[x Control 12345] Accepting connection...", *SETTING],
        ),
        (BY_HAND, BY_HAND),
        # What happens meanwhile, and a question without an answer.
        (BETWEEN, BETWEEN[3:4]),
        (QUESTION[:-1], QUESTION[:-1]),
        (QUESTION[2:], QUESTION[2:]),
        (["", "no line of a log"], ["", "no line of a log"]),
    ],
)
def test_only_closed_questions_of_gpushare_are_left_out(lines: list[str], kept: list[str]) -> None:
    assert without_own_questions(lines) == kept


def test_logs_of_several_gpus(refused: Refused) -> None:
    refused("mps", "logs", code="gpu_not_named", exit_code=2, host=TWO)
    refused("mps", "logs", "-g", "0,1", code="one_gpu", exit_code=2, host=TWO)


def test_logs_in_a_directory_of_others_are_not_read(cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    home = Path(world.state.daemons[0].log_directory).parent
    home.chmod(0o777)
    answer = cli("mps", "logs").ends(4)
    assert "Starting control daemon" not in answer.out
    assert str(home) in answer.lines("error")[0]
    assert "ls -ld" in answer.lines("hint")[0]


@pytest.mark.parametrize("put", ["directory", "link", "fifo", "open"])
def test_logs_that_cannot_be_read_or_that_others_may_have_put_there(
    cli: Cli, world: World, tmp_path: Path, put: str
) -> None:
    cli("mps", "start").ok()
    log = Path(world.state.daemons[0].log_directory) / "server.log"
    log.unlink()
    secret = tmp_path / "secret"
    secret.write_text("a secret\n")
    if put == "directory":
        log.mkdir()
    elif put == "link":
        log.symlink_to(secret)
    elif put == "fifo":
        os.mkfifo(log)
    else:
        log.write_text("a secret\n")
        log.chmod(0o666)
    answer = cli("mps", "logs").ends(1)
    assert "a secret" not in answer.out
    assert str(log) in answer.lines("error")[0]
    assert put != "directory" or "sudo tail" in answer.lines("hint")[0]


def test_env_in_a_real_shell(cli: Cli, sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(sim_dir / "a b'c"))
    cli("mps", "start").ok()
    text = cli("mps", "env", "--threads", "25", "--memory", "4G", "--priority", "low").ok().out
    names = "CUDA_VISIBLE_DEVICES CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    names += " CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUDA_MPS_CLIENT_PRIORITY"
    script = f"eval {shlex.quote(text)}; printf '%s\\n' " + " ".join(f'"${name}"' for name in names.split())
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True, env={})
    world = World()
    assert done.stdout.splitlines() == [world.uuid(), world.state.daemons[0].pipe_directory, "25.0", "0=4096M", "1"]


def test_env_makes_a_client_with_these_limits(cli: Cli, world: World) -> None:
    cli("mps", "start", "--threads", "50").ok()
    environment = cli("mps", "env", "--threads", "30", output="json").ok().data["environment"]
    assert world.process(world.client(environment=environment)).threads == 30.0


def test_env_of_a_dead_daemon(refused: Refused, cli: Cli, world: World) -> None:
    cli("mps", "start").ok()
    world.send(world.state.daemons[0].pid, signal.SIGKILL)
    refused("mps", "env", code="dead_daemon", exit_code=6)
