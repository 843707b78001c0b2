"""``gpushare bench --ways slices:LIST,timeslice:LEVEL`` on simulated hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpushare.base.model import TimeSlice
from gpushare.base.selection import Device
from gpushare.measure.bench import Bench, Copies
from gpushare.timeslice.policy import LENT, LentLevel, level_before_killed, temporary_level
from gpushare.timeslice.slices import slice_records
from tests.cli.bench.conftest import job
from tests.cli.drive import Cli, Refused, World

WINDOW = ("--metric", "^rate=(.+)$", "--for", "0.3s", "--repeat", "1", "--copies", "2")
JOB = job(40)


def bench(cli: Cli, *words: str) -> Any:
    return cli("-o", "json", "bench", *words, *WINDOW, *JOB).ok().data


def level(world: World) -> int:
    return world.state.gpus[0].time_slice


def test_each_copy_has_its_slice_and_none_is_left(cli: Cli, world: World) -> None:
    data = bench(cli, "--ways", "timeslice,slices:500us,2ms")
    cells = {cell["way"]: cell for cell in data["cells"]}
    slices = {way: cell["slice_us"] for way, cell in cells.items()}
    assert slices == {"timeslice": None, "slices:500us": 500, "slices:2ms": 2000}
    # Of each turn, two switches of 0.25 ms are lost with short slices.
    assert cells["slices:500us"]["throughput"]["mean"] == pytest.approx(100 * 1000 / 1500, rel=0.1)
    assert cells["slices:2ms"]["throughput"]["mean"] == pytest.approx(100, rel=0.1)
    assert all(not cell["failures"] for cell in cells.values())
    assert world.pids() == []
    assert slice_records(world.host) == {}


def test_where_slices_cannot_be_set_the_others_are_measured(cli: Cli, world: World) -> None:
    world.set(channel_fault="seccomp")
    data = bench(cli, "--ways", "timeslice,slices:500us,2ms")
    assert [cell["way"] for cell in data["cells"]] == ["timeslice"]
    assert {one["way"] for one in data["left_out"]} == {"slices:500us", "slices:2ms"}
    assert "pidfd_getfd" in data["left_out"][0]["reason"]
    # Each run has a PID of its own.
    answer = cli("bench", "--ways", "slices:500us", *WINDOW, *JOB)
    assert (answer.code, answer.out, len(answer.lines("error")), len(answer.lines("hint"))) == (3, "", 1, 1)
    assert "pidfd_getfd" in answer.err
    assert not world.host.nvml.processes(0)


def test_a_level_is_set_for_its_runs_and_set_back(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[tuple[str, int]] = []
    launches = Bench._launches

    def seen(self: Bench, way: Any, copies: int) -> Any:
        found = launches(self, way, copies)
        levels.append((way.name, -1))
        return found

    def together(self: Any, *words: Any) -> Any:
        levels[-1] = (levels[-1][0], level(world))
        return run(self, *words)

    run = Copies.run_together
    monkeypatch.setattr(Bench, "_launches", seen)
    monkeypatch.setattr(Copies, "run_together", together)
    data = bench(cli, "--ways", "timeslice,timeslice:short,timeslice:long")
    assert set(levels) == {("alone", 0), ("timeslice", 0), ("timeslice:short", 1), ("timeslice:long", 3)}
    assert level(world) == TimeSlice.DEFAULT
    set_levels = {cell["way"]: cell["time_slice"] for cell in data["cells"]}
    assert set_levels == {"timeslice": None, "timeslice:short": "short", "timeslice:long": "long"}
    # The gain is over time-slicing as it is.
    assert {pick["over"] for pick in data["picks"]} == {"timeslice"}


@pytest.mark.parametrize(("error", "exit_code"), [(KeyboardInterrupt(), 130), (RuntimeError("a bug"), 1)])
def test_a_level_is_set_back_whatever_ends_the_run(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int
) -> None:
    together = Copies.run_together

    def ended(self: Copies, *words: Any) -> Any:
        if level(world):
            raise error
        return together(self, *words)

    monkeypatch.setattr(Copies, "run_together", ended)
    assert cli("bench", "--ways", "timeslice:short", *WINDOW, *JOB).code == exit_code
    assert level(world) == TimeSlice.DEFAULT


@pytest.fixture
def killed(world: World) -> Iterator[None]:
    """Leave a GPU as a bench leaves it that was killed in a run with another level."""
    (gpu,) = world.host.nvml.sweep()
    # Its end is not reached before that of the test.
    lent = temporary_level(world.host, Device(gpu=gpu), TimeSlice.SHORT)
    lent.__enter__()
    (path,) = left(world)
    record = json.loads(path.read_text())
    assert (record["level"], record["before"]) == ("SHORT", "DEFAULT")
    path.write_text(json.dumps({**record, "started": record["started"] - 1}))
    assert level(world) == TimeSlice.SHORT
    yield
    lent.__exit__(None, None, None)


def left(world: World) -> list[Any]:
    return list((world.host.run_directory / "lent").glob("*.json"))


@pytest.mark.usefixtures("killed")
def test_a_level_that_a_killed_one_left_is_found_and_reset(cli: Cli, world: World) -> None:
    (check,) = (check for check in cli("-o", "json", "doctor").data["checks"] if check["id"] == "timeslice.level")
    assert "GPU 0 still has the time-slice level short of a bench that was killed" in check["seen"]
    assert check["remedy"] == "sudo gpushare timeslice reset -g 0"
    cli("timeslice", "reset", "-g", "0").ok()
    assert (level(world), left(world)) == (TimeSlice.DEFAULT, [])
    assert "timeslice.level" not in cli("-o", "json", "doctor").out


@pytest.mark.usefixtures("killed")
def test_a_level_that_was_set_by_hand_since_then_is_nobodys(cli: Cli, world: World) -> None:
    cli("timeslice", "set", "long", "-g", "0").ok()
    assert left(world) == []
    cli("timeslice", "set", "short", "-g", "0").ok()
    assert "timeslice.level" not in cli("-o", "json", "doctor").out


@pytest.mark.usefixtures("killed")
def test_the_next_bench_sets_a_level_back_first(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = cli("-o", "json", "bench", "-n", "--ways", "timeslice", *WINDOW, *JOB).ok().data["steps"]
    assert steps[0]["what"] == "set the time-slice of GPU 0 to default"
    assert level(world) == TimeSlice.SHORT
    levels = []
    launches = Bench._launches

    def seen(self: Bench, way: Any, copies: int) -> Any:
        levels.append(level(world))
        return launches(self, way, copies)

    monkeypatch.setattr(Bench, "_launches", seen)
    bench(cli, "--ways", "timeslice")
    assert set(levels) == {TimeSlice.DEFAULT}
    assert (level(world), left(world)) == (TimeSlice.DEFAULT, [])


def test_what_a_living_one_has_set_is_left(world: World) -> None:
    (gpu,) = world.host.nvml.sweep()
    with temporary_level(world.host, Device(gpu=gpu), TimeSlice.SHORT):
        assert level_before_killed(world.host, gpu) is None
        assert len(left(world)) == 1
    assert (level(world), left(world)) == (TimeSlice.DEFAULT, [])


@pytest.mark.parametrize(
    "wrong",
    [" ", "{}", "[1]", {"level": "QUICK"}, {"before": None}, {"pid": "1"}, {"started": None}, {"schema": 2}],
    ids=str,
)
def test_a_broken_note_of_a_level_is_no_note(world: World, wrong: Any) -> None:
    (gpu,) = world.host.nvml.sweep()
    path = LENT.path(world.host, gpu.uuid or "")
    LENT.write(LentLevel(pid=999999, started=1, level=TimeSlice(level(world)), before=TimeSlice.LONG, path=path))
    # Itself it is one: else the test would show nothing.
    assert level_before_killed(world.host, gpu) is TimeSlice.LONG
    path.write_text(wrong if isinstance(wrong, str) else json.dumps({**json.loads(path.read_text()), **wrong}))
    assert level_before_killed(world.host, gpu) is None


def test_a_level_needs_root(cli: Cli, world: World, refused: Refused) -> None:
    world.fault("user", 1000)
    data = bench(cli, "--ways", "timeslice,timeslice:short")
    (left,) = data["left_out"]
    assert "needs root" in left["reason"]
    refused("bench", "--ways", "timeslice:short", *WINDOW, *JOB, code="no_way", exit_code=3)
    assert level(world) == TimeSlice.DEFAULT


def test_the_plan_names_the_change_of_the_level(cli: Cli, world: World) -> None:
    steps = cli("-o", "json", "bench", "-n", "--ways", "timeslice:short,slices:1ms", *WINDOW, *JOB).ok().data["steps"]
    assert steps[0]["what"] == "set the time-slice of GPU 0 to short"
    assert "--set-timeslice 0" in steps[0]["undo"]
    assert level(world) == TimeSlice.DEFAULT


@pytest.mark.parametrize(
    "ways",
    ["slices:5us", "slices:31ms", "slices:500", "slices:", "slices", "2ms", "slices:1ms,mps,2ms", "timeslice:fast"],
)
def test_wrong_slices_and_levels_are_refused(refused: Refused, ways: str) -> None:
    code = "bad_slice" if ways.startswith("slices:") and "," not in ways else "bad_way"
    refused("bench", "--ways", ways, "--", "true", code=code, exit_code=2)
