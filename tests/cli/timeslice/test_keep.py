"""``gpushare timeslice keep`` as a program: signals, documents, files that are not followed, and kill -9."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest

from gpushare.host.capabilities import user_name
from gpushare.sim import admin
from gpushare.timeslice.keep import keep_record
from gpushare.timeslice.slices import slice_records
from tests.cli.drive import H200, Cli, Real, World, sure, until

ME = user_name(os.geteuid())
DEFAULT = 2048
RULES = """\
version: 1
slices:
- match: {command: "*train*"}
  slice: 500us
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "gpushare.yaml"
    path.write_text(RULES)
    path.chmod(0o644)
    return path


@pytest.fixture
def keep(real: Real, world: World, rules: Path) -> Real:
    world.run("status")
    return functools.partial(real, "timeslice", "keep", "-f", str(rules))


def train(command: str = "python train.py") -> int:
    return admin.add_process(H200, command_line=command.split())


def slice_of(world: World, pid: int) -> int:
    return world.process(pid).slices.get("compute", DEFAULT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_puts_everything_back_when_it_ends(number: int, world: World, keep: Real, rules: Path) -> None:
    pid = train()
    keeper = keep()
    assert f"following 1 rule of {rules}" in keeper.says("following")
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    late = train("python -m train")
    until(lambda: slice_of(world, late) == 500, "the slice of a later process is set")
    answer = keeper.end(number).ok()
    assert [slice_of(world, each) for each in (pid, late)] == [DEFAULT, DEFAULT]
    assert answer.out.splitlines() == [
        f"process {pid} ({ME}) on GPU 0: 2.048ms -> 500us (rule 3:3)",
        f"process {late} ({ME}) on GPU 0: 2.048ms -> 500us (rule 3:3)",
        f"process {pid} ({ME}): restored 500us -> 2.048ms",
        f"process {late} ({ME}): restored 500us -> 2.048ms",
    ]
    assert keep_record(world.host) is None
    assert slice_records(world.host) == {}


def test_a_hangup_reads_the_file_again(world: World, keep: Real, rules: Path) -> None:
    pid = train()
    keeper = keep("-o", "json")
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    rules.write_text("version: 1\nslices: [{match: all}]\n")
    keeper.signal(signal.SIGHUP)
    keeper.says("the earlier rules stay")
    assert slice_of(world, pid) == 500
    rules.write_text(RULES.replace("500us", "300us"))
    keeper.signal(signal.SIGHUP)
    until(lambda: slice_of(world, pid) == 300, "the other rule is followed")
    answer = keeper.end(signal.SIGTERM).ok()
    documents = [json.loads(line) for line in answer.out.splitlines()]
    assert {document["command"] for document in documents} == {"timeslice keep"}
    assert [document["status"] for document in documents] == ["ok", "ok", "error", "ok", "ok"]
    events = [event for document in documents if document["data"] for event in document["data"]["events"]]
    assert [(event["kind"], event["slice_us"]) for event in events] == [
        ("set", 500),
        ("set", 300),
        ("restored", DEFAULT),
    ]


def test_a_killed_one_is_undone_by_the_next(world: World, keep: Real) -> None:
    pid = train()
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    keeper.end(signal.SIGKILL)
    assert not sure(keep_record(world.host)).runs
    assert slice_of(world, pid) == 500
    again = keep()
    assert again.line() == f"process {pid} ({ME}): restored 500us -> 2.048ms\n"
    until(lambda: slice_of(world, pid) == 500, "the slice is set again")
    again.end(signal.SIGTERM).ok()
    assert slice_of(world, pid) == DEFAULT


def test_a_reader_that_leaves_ends_it_in_order(world: World, keep: Real) -> None:
    pid = train()
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    sure(keeper.process.stdout).close()
    train()
    assert keeper.process.wait(60) != 0
    assert slice_of(world, pid) == DEFAULT


def test_a_dry_run_changes_nothing(cli: Cli, world: World, rules: Path) -> None:
    world.run("status")
    pid, other = train(), train("evil\n\x1b[2Jname")
    (first, second) = cli("timeslice", "keep", "-f", str(rules), "--dry-run", output="json").ok().data["processes"]
    assert (first["pid"], first["rule"], first["outcome"], first["slice_us"]) == (pid, "3:3", "500us", 500)
    assert (second["pid"], second["rule"]) == (other, None)
    assert "\x1b" not in cli("timeslice", "keep", "-f", str(rules), "--dry-run", output="plain").ok().out
    assert slice_of(world, pid) == DEFAULT
    assert not (world.directory / "run" / "keep").exists()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("version: 1\ngpus: []\n", "no_rules", "has no rules for time-slices"),
        ("version: 1\nslices: [{match: all, slize: 1ms}]\n", "bad_file", "2:23: item 1 of 'slices' has an unknown key"),
        ("version: 1\nslices: [{match: {user: no-such-user-x}, slice: 1ms}]\n", "no_user", ":2:10: there is no user"),
        ("version: 1\nslices: [{match: {group: no-such-group}, slice: 1ms}]\n", "no_group", ":2:10: there is no group"),
        ("\x00", "bad_file", "this is not YAML"),
        ("#" * (257 << 10), "bad_file", "larger than 256 KiB"),
    ],
)
def test_a_file_that_is_wrong(text: str, code: str, message: str, cli: Cli, rules: Path) -> None:
    rules.write_text(text)
    answer = cli("timeslice", "keep", "-f", str(rules), output="json")
    assert answer.error["code"] == code
    assert message in answer.error["message"]
    assert answer.code


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_not_followed(mode: int, cli: Cli, rules: Path) -> None:
    rules.chmod(mode)
    answer = cli("timeslice", "keep", "-f", str(rules), output="json").ends(4, "untrusted_file")
    assert "others may write it" in answer.error["message"]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "missing", "stdin"])
def test_what_is_no_file_is_not_followed(kind: str, cli: Cli, rules: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    if kind == "link":
        path.symlink_to(rules)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    answer = cli("timeslice", "keep", "-f", "-" if kind == "stdin" else str(path), output="json")
    assert answer.code in {2, 4, 6}
    assert answer.error["hint"]


def test_apply_keeps_the_rules_for_keep(cli: Cli, rules: Path) -> None:
    assert cli("timeslice", "keep", "-n", output="json").error["code"] == "no_file"
    assert "the rules for time-slices are followed by gpushare timeslice keep" in cli("apply", str(rules)).ok().err
    assert "match: {command: '*train*'}\n    slice: 500us" in cli("capture").ok().out
    assert cli("timeslice", "keep", "-n", output="json").ok().data["file"].endswith("/applied.yaml")


def test_diff_names_the_processes_that_deviate(cli: Cli, world: World, keep: Real, rules: Path) -> None:
    pid, _ = train(), train("python eval.py")
    answer = cli("diff", str(rules), output="json")
    (process,) = answer.data["processes"]
    assert (answer.code, answer.data["as_requested"]) == (7, False)
    assert process == {"pid": pid, "user": ME, "gpu": 0, "rule": "3:3", "found_us": DEFAULT, "wanted_us": 500}
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    assert cli("diff", str(rules), output="json").ok().data["processes"] == []
    with world.host.open_channels() as control:
        control.set_slice(control.find(pid), 7000)
    text = cli("diff", str(rules)).ends(7)
    assert f"process {pid} ({ME}) on GPU 0: time-slice 7ms; the file: 500us (rule 3:3)" in text.out
    keeper.end(signal.SIGTERM)


def test_reset_takes_what_keep_has_set_and_keep_leaves_it(cli: Cli, world: World, keep: Real) -> None:
    pid = train()
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    (process,) = cli("timeslice", "show", output="json").ok().data["processes"]
    assert (process["slice_us"], slice_records(world.host)[pid].slice_us) == (500, 500)
    cli("timeslice", "reset", str(pid)).ok()
    assert (slice_of(world, pid), slice_records(world.host)) == (DEFAULT, {})
    keeper.line()
    assert "set to 2.048ms by someone else; left alone" in keeper.line()
    assert keeper.end(signal.SIGTERM).code == 0


def test_a_slice_that_was_set_before_comes_back(cli: Cli, world: World, keep: Real) -> None:
    pid = train()
    cli("timeslice", "set", "4ms", str(pid)).ok()
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    keeper.end(signal.SIGTERM).ok()
    assert (slice_of(world, pid), slice_records(world.host)[pid].slice_us) == (4000, 4000)
    cli("timeslice", "reset", str(pid)).ok()
    assert (slice_of(world, pid), slice_records(world.host)) == (DEFAULT, {})


def test_doctor_says_whether_the_rules_are_followed(cli: Cli, world: World, keep: Real, rules: Path) -> None:
    def check() -> tuple[str, str]:
        checks = {check["id"]: check for check in cli("doctor", output="json").data["checks"]}
        found = checks.get("timeslice.rules", {"verdict": "", "seen": ""})
        return found["verdict"], found["seen"]

    assert check() == ("", "")
    cli("apply", str(rules)).ok()
    assert check()[0] == "warn"
    pid = train()
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    assert check() == ("pass", f"gpushare timeslice keep runs (process {keeper.pid}), for 1 process")
    keeper.end(signal.SIGKILL)
    assert check() == ("warn", "gpushare timeslice keep was killed, and 1 process may still have its slices")
    cli("timeslice", "reset", str(pid)).ok()
    assert (slice_of(world, pid), slice_records(world.host)) == (DEFAULT, {})
    verdict, text = check()
    assert verdict == "warn"
    assert "1 rule for time-slices, but gpushare timeslice keep is not running" in text


def test_rules_of_a_user_are_followed_by_no_unit(cli: Cli, world: World, keep: Real, rules: Path) -> None:
    def remedy() -> str:
        checks = cli("doctor", output="json").data["checks"]
        (found,) = [check for check in checks if check["id"] == "timeslice.rules" and check["verdict"] == "warn"]
        return str(found["remedy"])

    world.fault("user", "1000")
    note = cli("apply", str(rules)).ok().err
    # A unit follows the file that root applied.
    assert ("followed for your own processes" in note, "systemd" in note, "sudo" in note) == (True, False, False)
    assert remedy() == "gpushare timeslice keep"
    pid = train()
    keeper = keep()
    until(lambda: slice_of(world, pid) == 500, "the slice is set")
    keeper.end(signal.SIGKILL)
    assert remedy() == "gpushare timeslice keep"
    # What a user has applied is not in a capture of root.
    assert "sudo gpushare capture leaves them out" in cli("capture").ok().err


def test_the_unit_is_written_if_the_file_has_rules(cli: Cli, world: World, rules: Path) -> None:
    def units(*words: str) -> dict[str, str]:
        documents = cli("export", "systemd", *words, output="json").ok().data["documents"]
        return {document["name"]: document["text"] for document in documents}

    assert list(units()) == ["gpushare.service"]
    unit = units("-f", str(rules))["gpushare-timeslice.service"]
    assert "ExecStart=/usr/bin/gpushare timeslice keep -f /var/lib/gpushare/applied.yaml\n" in unit
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in unit
    cli("apply", str(rules)).ok()
    assert list(units()) == ["gpushare.service", "gpushare-timeslice.service"]
