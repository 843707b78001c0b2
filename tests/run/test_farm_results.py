"""DIR/farm.jsonl: what is done, for which command and which line; torn lines, other farms, and what a killed one leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpushare.base.errors import BadUsage, InUse, NoPermission
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.host.store import digest_of_words
from gpushare.run import farm as farm_results
from gpushare.run.farm import MARK, Copy, CopyEnd, FarmResults, copies_done, line_of_end, parse_end
from tests.cli.drive import until
from tests.errors import fails
from tests.run.farm_command import Heard, farm, plan_farm, shell, sized


def end(copy: int, line: str | None = None, *, done: bool = True, command: str = "c") -> CopyEnd:
    return CopyEnd(command=command, copy=copy, line=line, done=done)


def test_the_last_word_on_a_copy_of_this_command_counts() -> None:
    ends = [end(0), end(1, done=False), end(2), end(2, done=False), end(3, command="d"), end(9), end(1, "line")]
    assert copies_done(ends, "c", 4, None) == {0}
    assert copies_done(ends, "e", 4, None) is None
    assert copies_done([], "e", 4, None) == set()


def test_a_line_is_known_again_where_it_was_moved() -> None:
    ends = [end(0, "a"), end(1, "b"), end(2, "b", done=False)]
    assert copies_done(ends, "c", 3, ["b", "new", "a"]) == {0, 2}
    # Twice in the file, and done once.
    assert copies_done(ends, "c", 3, ["b", "b", "a"]) == {1, 2}
    # One that failed is not done because another one of its line is.
    assert copies_done([end(0, "a", done=False), end(2, "a")], "c", 3, ["a", "b", "a"]) == {2}


lines = some.lists(some.sampled_from("abc"), max_size=6)


@given(lines, some.lists(some.tuples(some.integers(0, 5), some.sampled_from("abc"), some.booleans()), max_size=12))
def test_nothing_is_skipped_more_often_than_it_was_done(now: list[str], ended: list[tuple[int, str, bool]]) -> None:
    done = copies_done([end(copy, line, done=ok) for copy, line, ok in ended], "c", len(now), now)
    assert done is not None
    last = {(copy, line): ok for copy, line, ok in ended}
    for line in "abc":
        times = sum(ok for (_, other), ok in last.items() if other == line)
        skipped = sum(now[number] == line for number in done)
        assert skipped == min(times, now.count(line))


@given(some.binary(max_size=60), some.integers(0, 200))
def test_torn_and_strange_lines_say_nothing(junk: bytes, cut: int) -> None:
    copy = Copy(copy=3, line="x \u00e4", state="done", exit_code=0, seconds=1.5, gpu_indexes=(1,))
    whole = line_of_end(copy, "c", 0.0)
    assert json.loads(whole)["ended_at"] == "1970-01-01T00:00:00Z"
    assert parse_end(whole) == CopyEnd(command="c", copy=3, line="x \u00e4", done=True)
    for line in (junk, b"[]\n", b'{"command": 1}\n', whole[: min(cut, len(whole) - 2)]):
        assert parse_end(line) is None


def test_what_is_appended_to_a_torn_line_is_a_line_of_its_own(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "farm.jsonl"
    path.write_bytes(b'{"command": "')
    directory = os.open(tmp_path, os.O_RDONLY)
    with FarmResults(host, path, directory, ["job", "{}"]) as results:
        for number in range(2):
            results.add(Copy(copy=number, state="done", exit_code=0))
        assert copies_done(results.ends(), digest_of_words(["job", "{}"]), 3, None) == {0, 1}
    os.close(directory)
    assert len(path.read_bytes().splitlines()) == 3


def test_another_farm_with_these_logs_is_refused(host: Host, device: Device, tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    with FarmResults(host, tmp_path / "farm.jsonl", directory, ["job"]), pytest.raises(InUse) as caught:
        farm(host, [device], ["true"], sized(device, copies=1, logs=tmp_path), Heard())
    os.close(directory)
    assert caught.value.code == "logs_in_use"


@contextlib.contextmanager
def left_copy(host: Host, logs: Path, seconds: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run what a farm with these logs left when it was killed."""
    directory = os.stat(logs)
    mark = f"{directory.st_dev:x}-{directory.st_ino:x}"
    code = f"import time; time.sleep({seconds})"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark}) as copy:
        until(lambda: host.processes.pids_with_env(MARK, mark), "it has begun")
        try:
            yield copy
        finally:
            copy.kill()


def test_a_farm_waits_for_what_a_killed_one_has_left(
    host: Host, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    with left_copy(host, tmp_path, 1) as copy:
        farm(host, [device], ["true"], sized(device, copies=1, logs=tmp_path), heard)
        assert copy.wait() == 0
    assert "waiting for 1 process of an earlier farm with these logs, being ended" in heard.said
    monkeypatch.setattr(farm_results, "_EARLIER_SECONDS", 0.0)
    with left_copy(host, tmp_path, 60) as copy, fails(InUse, "logs_in_use", hint=f"gpushare stop {copy.pid}"):
        farm(host, [device], ["true"], sized(device, copies=1, logs=tmp_path, resume=True), heard)


def test_ctrl_c_while_it_waits_for_them_ends_it_like_any_farm(host: Host, device: Device, tmp_path: Path) -> None:
    (tmp_path / "copy-0.log").write_text("of the earlier one")
    with (
        left_copy(host, tmp_path, 60),
        subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -INT {os.getpid()}"]) as key,
    ):
        result = farm(host, [device], ["true"], sized(device, copies=1, logs=tmp_path), Heard())
        key.kill()
    assert (result.ended_by, [copy.state for copy in result.copies]) == (signal.SIGINT, ["skipped"])
    assert (tmp_path / "copy-0.log").read_text() == "of the earlier one"


def test_results_of_an_earlier_farm_are_not_overwritten(host: Host, device: Device, tmp_path: Path) -> None:
    first = sized(device, copies=1, logs=tmp_path)
    farm(host, [device], ["echo", "first"], first, Heard())
    for act in (farm, plan_farm):
        with pytest.raises(BadUsage, match="has the results of an earlier farm") as caught:
            act(host, [device], ["echo", "second"], first, Heard())
        assert (caught.value.code, "--resume" in (caught.value.hint or "")) == ("logs_used", True)
    assert (tmp_path / "copy-0.log").read_text() == "first\n"


@pytest.mark.parametrize("resume", [False, True])
def test_results_that_cannot_be_written_are_refused_before_the_farm_is_a_job(
    host: Host, device: Device, tmp_path: Path, resume: bool
) -> None:
    (tmp_path / "farm.jsonl").symlink_to("elsewhere")
    with fails(NoPermission, "not_written", match="it is a symbolic link"):
        plan_farm(host, [device], ["true"], sized(device, copies=1, logs=tmp_path, resume=resume), Heard())
    assert not (tmp_path / "elsewhere").exists()


def ran(directory: Path) -> Sequence[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_done_is_skipped_and_what_failed_is_not(host: Host, device: Device, tmp_path: Path) -> None:
    (tmp_path / "ran").mkdir()
    command = shell(f"touch {tmp_path}/ran/{{}}; [ -e {tmp_path}/good ] || [ {{}} != b ]")
    more = {"logs": tmp_path / "logs", "resume": True}
    first = farm(host, [device], command, sized(device, copies=3, lines=("a", "b", "c"), **more), Heard())
    assert [copy.state for copy in first.copies] == ["done", "failed", "done"]
    for path in (tmp_path / "ran").iterdir():
        path.unlink()
    (tmp_path / "good").touch()
    heard = Heard()
    second = farm(host, [device], command, sized(device, copies=4, lines=("d", "a", "b", "c"), **more), heard)
    assert [copy.state for copy in second.copies] == ["done", "done earlier", "done", "done earlier"]
    assert ran(tmp_path / "ran") == ["b", "d"]
    assert heard.said[0] == "2 copies done earlier: not started again"


def test_a_plan_has_the_copies_that_are_not_done(host: Host, device: Device, tmp_path: Path) -> None:
    more = {"logs": tmp_path / "logs", "resume": True}
    command, heard = ["true"], Heard()
    farm(host, [device], command, sized(device, copies=2, **more), Heard())
    steps = plan_farm(host, [device], command, sized(device, copies=4, **more), heard)
    numbers = [step.what.split()[2] for step in steps if step.what.startswith("run copy")]
    assert numbers == ["2", "3"]
    assert heard.said == ["2 copies done earlier: not started again"]
    assert plan_farm(host, [device], command, sized(device, copies=2, **more), heard) == ()


def test_a_plan_before_the_first_run_makes_no_file(host: Host, device: Device, tmp_path: Path) -> None:
    options = sized(device, copies=2, logs=tmp_path / "logs", resume=True)
    steps = plan_farm(host, [device], ["true"], options, Heard())
    assert sum(step.what.startswith("run copy") for step in steps) == 2
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("act", [farm, plan_farm])
def test_the_logs_of_another_command_are_not_overwritten(
    host: Host, device: Device, tmp_path: Path, act: Callable[..., object]
) -> None:
    options = sized(device, copies=2, lines=("a", "b"), logs=tmp_path, resume=True)
    farm(host, [device], ["echo", "{}"], sized(device, copies=1, lines=("a",), logs=tmp_path), Heard())
    (tmp_path / "copy-0.1.log").write_text("of a restart")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with fails(BadUsage, "logs_used", match="has the results of another command"):
        act(host, [device], ["echo", "-n", "{}"], options, Heard())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # The same command goes on, also with other lines.
    act(host, [device], ["echo", "{}"], options, Heard())


def test_a_farm_that_was_killed_goes_on_where_it_was(host: Host, tmp_path: Path) -> None:
    (tmp_path / "ran").mkdir()
    text = f"echo >> {tmp_path}/ran/{{}}; [ {{}} -lt 2 ] || [ -e {tmp_path}/on ] || sleep 60"
    words = ("--copies", "4", "--parallel", "2", "--memory", "4G", "--grace", "1s", "--logs", str(tmp_path / "logs"))
    started = [sys.executable, "-m", "gpushare", "--host", host.spec, "farm", *words]
    with subprocess.Popen(
        [*started, "--", "sh", "-c", text], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as first:
        until(lambda: ran(tmp_path / "ran") == ["0", "1", "2", "3"], "the last two run")
        first.send_signal(signal.SIGKILL)
    (tmp_path / "on").touch()
    again = subprocess.run(
        [*started, "--resume", "-o", "json", "--", "sh", "-c", text], capture_output=True, text=True, check=True
    )
    copies = json.loads(again.stdout)["data"]["copies"]
    assert [copy["state"] for copy in copies] == ["done earlier", "done earlier", "done", "done"]
    assert [len((tmp_path / "ran" / name).read_text()) for name in "0123"] == [1, 1, 2, 2]
