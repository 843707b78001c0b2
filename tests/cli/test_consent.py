"""What is named, granted, busy or not ours goes only with consent; what is idle and ours goes without a question."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.base.model import Holder
from gpushare.host.capabilities import user_name
from gpushare.mig.planner import holders_text
from tests.cli.drive import World, environment, until

A100 = "sim:a100-80gb"
TWO = "sim:2xa100-80gb"


@pytest.fixture
def host() -> World:
    """Return a host with MIG on, and two idle instances that gpushare has made."""
    world = World.new(A100)
    world.asked("mig", "enable").ok()
    world.asked("mig", "create", "3g.40gb:4", "2g.20gb:2").ok()
    return world


@pytest.fixture
def world() -> World:
    """Return a host with an MPS daemon."""
    world = World.new("sim:h200")
    world.asked("mps", "start").ok()
    return world


def typed(
    world: World, words: list[str], answer: str, meanwhile: Callable[[], object] = lambda: None
) -> tuple[int, str]:
    """Run a command on a terminal, answer each question, and return its exit code and what it wrote there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpushare", "--host", world.spec, *words],
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    os.close(theirs)
    said, asked = b"", 0
    while True:
        try:
            said += os.read(ours, 1000)
        except OSError:
            break
        if said.count(b"[y/N]") > asked:
            asked += 1
            meanwhile()
            os.write(ours, answer.encode())
    os.close(ours)
    return process.wait(timeout=120), said.decode()


def wants(world: World, *words: str) -> list[dict[str, object]]:
    """Check that a command without a terminal is refused and changes nothing, and return what it would take."""
    before = world.look(), world.names(), world.pids()
    answer = world.asked(*words).ends(19, "needs_consent")
    assert answer.error["hint"].startswith("to do it: gpushare ")
    assert " -y " in answer.error["hint"]
    assert answer.data["dry_run"] is False
    assert answer.data["steps"]
    assert (world.look(), world.names(), world.pids()) == before
    # A dry run never asks, and says the same.
    assert world.asked(*words, "-n").ok().data["consent"] == answer.data["consent"]
    found = answer.data["consent"]
    world.asked(*words, "-y").ok()
    return list(found)


@pytest.mark.parametrize(
    "words",
    [("apply", "7g.80gb"), ("destroy", "all"), ("destroy", "0/2"), ("disable", "--destroy"), ("apply", "1g.10gb")],
)
def test_idle_instances_of_ours_go_without_a_question(host: World, words: tuple[str, ...]) -> None:
    host.asked("mig", *words).ok()


@pytest.mark.parametrize(
    "words", [("apply", "7g.80gb"), ("destroy", "all"), ("destroy", "train"), ("disable", "--destroy")]
)
def test_a_named_and_granted_instance_is_asked_for(host: World, words: tuple[str, ...]) -> None:
    host.asked("mig", "name", "train", "3g.40gb:4").ok()
    host.asked("mig", "grant", "train", "daemon").ok()
    (lost,) = wants(host, "mig", *words)
    assert lost == {"action": "destroys", "what": "3g.40gb:4 on GPU 0", "why": ["named 'train'", "granted to daemon"]}


def test_what_gpushare_did_not_make_is_asked_for() -> None:
    world = World.new(A100)
    world.mig("3g.40gb", "2g.20gb")
    assert [lost["why"] for lost in wants(world, "mig", "apply", "7g.80gb")] == [["not made by gpushare"]] * 2
    # Now it is ours.
    world.asked("mig", "apply", "1g.10gb").ok()


def test_a_busy_instance_is_asked_for_even_with_evict(host: World) -> None:
    holder = Holder(pid=4194999, what="lease", user="alice", name="python3")
    assert holders_text([holder]) == "4194999 python3 (alice) by gpushare run"
    pid = host.add(next(mig.uuid for mig in host.state.gpus[0].mig if mig.profile == "3g.40gb"))
    (lost,) = wants(host, "mig", "destroy", "0/2", "--evict", "all")
    assert lost["why"] == [f"in use by {pid} (python3, user {user_name(os.geteuid())})"]
    assert pid not in host.pids()
    holder = Holder(pid=4194999, what="lease", user="alice", name="python3")
    assert holders_text([holder]) == "4194999 python3 (alice) by gpushare run"


@pytest.mark.parametrize(
    "words",
    [("revoke", "train"), ("destroy", "train"), ("disable",), ("disable", "--destroy", "-y"), ("apply", "7g.80gb")],
)
def test_a_plain_user_is_first_told_that_it_needs_root(host: World, words: tuple[str, ...]) -> None:
    """Not that something is busy or asked for: with that done, the next refusal would follow."""
    host.add(next(mig.uuid for mig in host.state.gpus[0].mig if mig.profile == "3g.40gb"))
    host.asked("mig", "name", "train", "3g.40gb:4").ok()
    host.asked("mig", "grant", "train", "daemon").ok()
    host.fault("user", "1000")
    assert "needs root" in host.asked("mig", *words).ends(4, "no_permission").error["message"]
    planned = host.asked("mig", *words, "-n")
    assert planned.code == (0 if "revoke" in words else 19)
    if "revoke" in words:
        assert [loss["what"] for loss in planned.data["consent"]] == ["the grant of 'train' to daemon"]


def test_an_undo_asks_nothing_and_a_grant_is_asked_for(host: World) -> None:
    undo = host.asked("mig", "create", "1g.10gb", "--name", "new").ok().data["undo"]
    assert undo.endswith(" -y")
    host.asked(*undo.split()[1:]).ok()
    assert "new" not in host.names()
    for words in (("train", "3g.40gb:4"), ("--forget", "train"), ("train", "3g.40gb:4")):
        host.asked("mig", "name", *words).ok()
    host.asked("mig", "grant", "train", "daemon").ok()
    (lost,) = wants(host, "mig", "revoke", "train")
    assert lost["why"] == ["every local user may then use 'train'"]
    host.asked("mig", "grant", "train", "daemon").ok()
    assert wants(host, "mig", "name", "--forget", "train")[0]["why"] == ["granted to daemon"]


@pytest.mark.parametrize("how", ["--force", "--drain=0.1s"])
def test_a_daemon_with_clients_is_asked_for(how: str, world: World) -> None:
    pid = world.client()
    (lost,) = wants(world, "mps", "stop", how)
    assert lost["why"] == [f"1 program on it: {pid} (python3, user {user_name(os.geteuid())})"]
    # An idle one of ours is not.
    world.asked("mps", "start").ok()
    world.asked("mps", "stop", "--force").ok()


def test_the_job_on_a_daemon_is_named_and_never_the_gpushare_that_runs_it(world: World) -> None:
    script = "true 'a word that is so long that its second quote would be cut off after eighty characters'; sleep 600"
    world.asked("run", "-d", "--name", "trainer", "--threads", "20", "--", "sh", "-c", script).ok()
    try:
        pid = until(lambda: [client.pid for client in world.attached()], "it is a client")[0]
        plans = [
            world.asked("mps", "stop", *more, "-n").ok().data["steps"][0]["what"] for more in ((), ("--drain", "3s"))
        ]
        assert plans == [
            "wait up to 10 s for the clients of the MPS daemon of GPU 0; if any is left, change nothing (exit code 19)",
            "wait up to 3 s for the clients of the MPS daemon of GPU 0",
        ]
        (lost,) = wants(world, "mps", "stop", "--force")
        assert lost["why"] == [f"1 program on it: {pid} (job trainer, user {user_name(os.geteuid())})"]
    finally:
        world.run("stop", "trainer", "-y")


def test_a_long_command_line_shows_its_beginning_and_its_end(world: World) -> None:
    world.client(name="python3", command_line=["python3", "train.py", "--data", "x" * 200, "--seed", "7"])
    (lost,) = wants(world, "mps", "stop", "--force")
    assert "python3 train.py --data xxx" in lost["why"][0]
    assert lost["why"][0].endswith("xxx --seed 7)")


def test_a_daemon_that_gpushare_did_not_start_is_asked_for(tmp_path: Path) -> None:
    world = World.new("sim:h200")
    world.foreign_daemon(tmp_path)
    (lost,) = wants(world, "mps", "stop", "--pipe-directory", str(tmp_path / "p"))
    assert lost["why"] == [f"not started by gpushare, of {user_name(os.geteuid())}"]


def test_a_file_that_takes_names_grants_and_instances_asks(host: World, tmp_path: Path) -> None:
    host.asked("mig", "name", "train", "3g.40gb:4").ok()
    host.asked("mig", "grant", "train", "daemon").ok()
    file = tmp_path / "gpushare.yaml"
    file.write_text("version: 1\ngpus:\n- match: {index: 0}\n  mig:\n  - 3g.40gb:4\n")
    (lost,) = wants(host, "apply", "-f", str(file))
    assert lost == {"action": "forgets", "what": "the name 'train' of 3g.40gb:4 on GPU 0", "why": ["granted to daemon"]}
    # What a file has made is ours.
    file.write_text("version: 1\ngpus:\n- match: {index: 0}\n  timeslice: default\n")
    host.asked("apply", "-f", str(file)).ok()


def test_an_answer_decides_on_a_terminal(host: World) -> None:
    host.asked("mig", "name", "train", "3g.40gb:4").ok()
    before = host.look()
    code, said = typed(host, ["mig", "destroy", "all"], "\n")
    assert code == 19
    assert "This destroys 3g.40gb:4 on GPU 0 (named 'train'). Continue? [y/N]" in said
    assert "not confirmed; nothing was changed" in said
    assert (host.look(), typed(host, ["mig", "destroy", "all"], "y\n")[0]) == (before, 0)
    assert host.look() != before


def test_what_comes_after_the_answer_is_asked_for_too(host: World) -> None:
    host.asked("mig", "name", "train", "3g.40gb:4").ok()
    code, said = typed(host, ["mig", "destroy", "all"], "y\n", lambda: host.asked("mig", "name", "late", "2g.20gb:2"))
    assert (code, said.count("[y/N]")) == (0, 2)
    assert "This destroys 2g.20gb:2 on GPU 0 (named 'late'). Continue? [y/N]" in said


def test_a_client_that_comes_after_the_answer_is_not_ended(world: World) -> None:
    world.client()
    code, said = typed(world, ["mps", "stop", "--force"], "y\n", world.client)
    assert code == 19
    assert "new client" in said
    assert len(world.attached()) == 2


def test_units_that_gpushare_writes_never_ask(host: World) -> None:
    host.asked("mps", "start", "-g", host.devices()[0][1]).ok()
    documents = host.asked("export", "systemd").ok().data["documents"]
    texts = [document["text"] for document in documents if document["kind"] == "unit"]
    assert len(texts) == 2
    for line in "\n".join(texts).splitlines():
        assert not any(f"gpushare {verb} " in line for verb in ("apply", "mig enable", "mps stop")) or "--yes" in line
