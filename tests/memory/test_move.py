"""What keeps a job from moving to another GPU, by the values at which it begins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare.base.errors import NotSupported, OperationFailed
from gpushare.memory import move, swap
from gpushare.memory.swapped import OUT, RETURNING, SWAPS, Image, Swap

JOB = Swap(pid=7, started=1, name=None, uid=0, gpu_uuid="GPU-b", state=RETURNING, since=0.0, images=(Image(7, 1, 5),))


@pytest.mark.parametrize(("version", "moves"), [("579.99", False), ("580.1", True), ("", True), ("unknown", True)])
def test_the_driver_moves_jobs_from_its_first_branch_on(version: str, moves: bool) -> None:
    host: Any = SimpleNamespace(nvml=SimpleNamespace(driver_version=lambda: version))
    if moves:
        swap.check_driver(host, 580, "move a job")
    else:
        with pytest.raises(NotSupported, match="cannot move a job"):
            swap.check_driver(host, 580, "move a job")


@pytest.mark.parametrize(("size", "alone"), [("1", True), ("2", False), ("two", True), ("", True)])
def test_one_rank_of_several_stays(size: str, alone: bool) -> None:
    environment = {"WORLD_SIZE": size}
    host: Any = SimpleNamespace(processes=SimpleNamespace(environment=lambda pid: environment if pid == 8 else None))
    processes: Any = [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]
    if alone:
        move.check_single_rank(host, "process 7", processes)
    else:
        with pytest.raises(NotSupported, match="is one of 2 ranks"):
            move.check_single_rank(host, "process 7", processes)


@pytest.mark.parametrize(
    ("left", "arrived", "refused"),
    [
        ("GPU-a", (), False),
        ("GPU-gone", (), True),
        # It has left that GPU with all of its processes, or never was on another one.
        ("GPU-gone", (7, 8), False),
        ("GPU-gone", (7,), True),
        (None, (), False),
    ],
)
def test_a_job_that_moves_is_between_two_gpus_of_this_host(
    left: str | None, arrived: tuple[int, ...], refused: bool
) -> None:
    gpus = [SimpleNamespace(uuid="GPU-a"), SimpleNamespace(uuid="GPU-b")]
    host: Any = SimpleNamespace(nvml=SimpleNamespace(identities=lambda: gpus))
    moving = replace(JOB, images=(Image(7, 1, 5), Image(8, 1, 5)), left_uuid=left, arrived=arrived)
    if refused:
        with pytest.raises(OperationFailed, match="one of them is not on this host"):
            swap._check_gpus(host, moving)
    else:
        swap._check_gpus(host, moving)


@pytest.mark.parametrize(
    ("pid", "state", "kept"), [(7, OUT, False), (7, RETURNING, True), (9, OUT, True), (9, RETURNING, True)]
)
def test_root_notes_a_job_that_is_out_unless_its_user_has(
    monkeypatch: pytest.MonkeyPatch, pid: int, state: str, kept: bool
) -> None:
    """Only the user's own record lets the user bring the job in."""
    users = replace(JOB, pid=pid, state=state, images=(Image(pid, 1, 5),), keeper_uid=4242)
    done: list[str] = []
    monkeypatch.setattr(type(SWAPS), "all", lambda *_: [users])
    monkeypatch.setattr(swap, "forget", lambda _: done.append("forgotten"))
    monkeypatch.setattr(swap, "write_if_living", lambda _, record: done.append(record.state))
    swap._take_out_rest(SimpleNamespace(), JOB, SimpleNamespace(), {})  # type: ignore[arg-type]
    assert done == ([OUT] if kept else ["forgotten"])
