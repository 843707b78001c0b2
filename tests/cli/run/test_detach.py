"""``gpushare run -d``: a job in the background, its name, its output and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from gpushare.base.units import GIB
from gpushare.run.jobs import JOBS, PAST, find_record, output_path
from gpushare.run.listing import listed_jobs
from gpushare.sim import admin
from gpushare.snapshot import Observer
from tests.cli.drive import Cli, Patch, Real, Refused, World, missing, sure, until


def name_of(cli: Cli, *words: str) -> str:
    return cli("run", "-d", *words).ok().out.strip()


def test_it_prints_its_name_and_goes_on_in_a_session_of_its_own(cli: Cli, world: World, refused: Refused) -> None:
    name = name_of(cli, "--", "sh", "-c", "echo begun; sleep 60")
    assert name == "sh-1"
    record = sure(find_record(world.host, name))
    assert record.supervisor is not None
    assert os.getsid(record.supervisor.pid) == record.supervisor.pid != os.getsid(0)
    until(lambda: "begun" in cli("logs", name).ok().out, "its output is kept")
    assert name_of(cli, "--", "sh", "-c", "exit 3") == "sh-2"
    cli("stop", name).ok()
    until(lambda: world.pids() == [], "it is gone")

    def states() -> dict[str, tuple[str, int | None]]:
        return {job["name"]: (job["state"], job["exit_code"]) for job in cli("jobs", output="json").ok().data["jobs"]}

    # Its gpushare may outlive the program for a moment.
    until(lambda: states()["sh-2"] != ("running", None), "it has ended")
    assert states() == {"sh-1": ("ended", 143), "sh-2": ("ended", 3)}
    # A name that is given is taken once.
    assert name_of(cli, "--name", "train", "--", "sleep", "60") == "train"
    hint = refused("run", "-d", "--name", "train", "--", "true", code="name_in_use", exit_code=19)
    assert "see its output: gpushare logs train; end the other: gpushare stop train" in hint
    cli("stop", "train").ok()


def test_commands_at_the_same_time_start_a_job_each(real: Real, world: World) -> None:
    words = ("-q", "run", "-d", "--wait", "--memory", "30G")
    started = [real(*words, "--", "sleep", str(60 + number)) for number in range(4)]
    jobs = {one.result().out.strip(): 60 + number for number, one in enumerate(started)}
    until(lambda: all(find_record(world.host, name) for name in jobs), "all run")
    records = [find_record(world.host, f"sleep-{number}") for number in (1, 2, 3, 4)]
    commands = {record.name: record.command for record in records if record}
    assert commands == {name: f"sleep {seconds}" for name, seconds in jobs.items()}


def test_commands_of_one_name_at_the_same_time_start_one_job(real: Real, world: World) -> None:
    started = [real("-q", "run", "-d", "--name", "train", "--", "sleep", str(60 + number)) for number in range(3)]
    results = [one.result() for one in started]
    assert sorted(result.code for result in results) == [0, 19, 19]
    record = sure(find_record(world.host, "train"))
    assert record.command == f"sleep {60 + [result.code for result in results].index(0)}"


def test_what_keeps_it_from_starting_is_said_as_without_d(cli: Cli, world: World) -> None:
    for words in (("--memory", "900G", "--", "true"), ("--", "no-such-program")):
        plain, detached = cli("run", *words), cli("run", "-d", *words)
        assert (detached.code, detached.out) == (plain.code, plain.out)
        assert detached.lines("error") == plain.lines("error")
        assert cli("-o", "json", "run", "-d", *words).error == cli("-o", "json", "run", *words).error
    assert world.pids() == []
    # A dry run starts nothing.
    assert "run date as a client" in cli("run", "-d", "-n", "--", "date").ok().out
    assert not output_path(world.host, "date-1").exists()


def test_a_job_whose_error_cannot_be_kept_is_refused_aloud(cli: Cli, monkeypatch: Patch) -> None:
    # As on a full disk: nothing that the gpushare in the background prints can be written.
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    answer = cli("run", "-d", "--name", "train", "--memory", "900G", "--", "true")
    assert answer.code != 0
    (error,) = answer.lines("error")
    assert error == f"error: 'train' was not started: exit code {answer.code}"
    (hint,) = answer.lines("hint")
    assert "run it without -d" in hint
    for printed in (b"", b'{\n  "schema": 1,\n  "com'):
        monkeypatch.setattr(os, "pread", lambda *_, printed=printed: printed)
        error = cli("-o", "json", "run", "-d", "--name", "train", "--memory", "900G", "--", "true").error
        assert "'train' was not started" in error["message"]


def test_the_caller_reads_its_notes_too(cli: Cli, world: World) -> None:
    admin.add_process(world.spec, memory_bytes=120 * GIB)
    words = ("--memory", "60G", "--slice", "2ms", "--", "sh", "-c", "echo begun; echo note: mine")
    plain, detached = cli("run", *words).ok(), cli("run", "-d", *words).ok()
    (short,) = (line for line in plain.lines("note") if "may run out of memory" in line)
    # The output of the program is in its log only.
    first, last = detached.lines("note")
    assert first == short
    assert last.startswith(f"note: {detached.out.strip()} ")
    assert cli("-q", "run", "-d", *words).ok().err == ""


def test_a_start_that_fails_leaves_the_earlier_job_of_its_name(cli: Cli, world: World, monkeypatch: Patch) -> None:
    name_of(cli, "--name", "train", "--", "sh", "-c", "echo ready; exit 3")

    def listed() -> list[tuple[object, ...]]:
        jobs = cli("jobs", output="json").ok().data["jobs"]
        return [(job["name"], job["state"], job["exit_code"], job["command"]) for job in jobs]

    until(lambda: [job[1] for job in listed()] == ["ended"], "it has ended")
    before = listed()
    assert cli("run", "-d", "--opportunistic", "--for", "nosuch", "--name", "train", "--", "true").code == 6
    assert listed() == before
    assert "ready" in cli("logs", "train").ok().out
    # One that starts takes its place.
    name_of(cli, "--name", "train", "--", "sh", "-c", "echo again")
    until(lambda: "again" in cli("logs", "train").ok().out, "the new one has ended")
    assert "ready" not in cli("logs", "train").ok().out
    assert not list(output_path(world.host, "train").parent.glob("*.earlier"))
    # The system refuses to start it.
    until(lambda: {job[1] for job in listed()} == {"ended"}, "it has ended")
    before = listed()

    def fails(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", fails)
    assert cli("run", "-d", "--name", "train", "--", "true").code == 1
    assert "again" in cli("logs", "train").ok().out
    assert listed() == before
    assert not list(output_path(world.host, "train").parent.glob("*.earlier"))


def test_it_waits_in_line(cli: Cli, refused: Refused, world: World) -> None:
    first = name_of(cli, "--memory", "100G", "--name", "first", "--", "sleep", "60")
    words = ("run", "-d", "--wait", "--memory", "100G", "--name", "second", "--", "sleep", "60")
    data = cli("-o", "json", *words).ok().data
    assert (data["job"], data["state"]) == ("second", "waiting")
    # It is known, but nothing of it is on a GPU.
    on_gpu = (("pause",), ("swap", "out"), ("timeslice", "set", "2ms"))
    for verb in (*on_gpu, ("run", "--opportunistic", "-n", "--for")):
        text = refused(*verb, "second", *(() if verb in on_gpu else ("--", "true")), code="waits_in_line", exit_code=6)
        assert missing(text, "job 'second' waits in line and has not started yet", "gpushare jobs") == []
    cli("stop", first).ok()
    until(lambda: find_record(world.host, "second") is not None, "it runs")
    os.kill(data["pid"], signal.SIGTERM)
    until(lambda: world.pids() == [], "it is gone")


def test_at_each_moment_it_runs_or_has_ended(cli: Cli, world: World, monkeypatch: Patch) -> None:
    states: list[list[str]] = []

    def watched(change: Callable[..., object]) -> Callable[..., None]:
        def changed(*args: object) -> None:
            for step in (lambda: None, lambda: change(*args)):
                step()
                states.append([job.state for job in listed_jobs(world.host, Observer(world.host).read())])

        return changed

    monkeypatch.setattr(PAST, "write", watched(PAST.write))
    monkeypatch.setattr(JOBS, "drop", watched(JOBS.drop))
    cli("run", "--name", "train", "--", "true").ok()
    assert states == [["running"], ["running"], ["running"], ["ended"]]
