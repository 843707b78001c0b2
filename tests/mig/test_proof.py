"""A rollback takes away only what the change has made itself, and names the step and the command of what it could not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from gpushare.base.errors import OperationFailed
from gpushare.connect import connect
from gpushare.mig.driver import MigChanges
from gpushare.mig.plan import Action
from gpushare.mig.profile import Placement
from gpushare.mig.recover import Calls
from gpushare.sim import library_mig
from gpushare.sim.nvml_abi import Code, Refused
from tests.cli.drive import CRASHED, World

A100 = "sim:a100-80gb"
ONE_SLICE = 19


@pytest.fixture
def host() -> World:
    found = World.new(A100)
    assert found.run("mig", "enable").code == 0
    return found


def another_makes(start: int, *, bare: bool = False) -> None:
    """Make a 1g.10gb, as `nvidia-smi mig -cgi 19:START -C` does."""
    changes = MigChanges(connect(A100).nvml)
    made = changes.create_gpu_instance(0, ONE_SLICE, Placement(start, 1))
    if not bare:
        changes.create_compute_instance(0, made, 1)


def before_creation(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    work: Callable[[Any], None],
    action: Action = Action.CREATE_GPU_INSTANCE,
) -> None:
    """Do something right before the Nth creation of a change."""
    real, calls = Calls.do, []

    def do(work_on: Calls, step: Any) -> Any:
        if step.action is action:
            calls.append(step)
            if len(calls) == number:
                work(step)
        return real(work_on, step)

    monkeypatch.setattr(Calls, "do", do)


@pytest.mark.parametrize("bare", [False, True])
def test_what_another_made_where_the_step_failed_stays_and_is_said(
    host: World, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    before_creation(monkeypatch, 2, lambda step: another_makes(step.instance.start, bare=bare))
    answer = host.run("mig", "create", "1g.10gb:5 1g.10gb:6")
    assert answer.code == 1
    ((profile, start),) = host.look()[0].places
    assert (profile, start) in {("1g.10gb", 5), ("1g.10gb", 6)}
    assert f"1g.10gb:{start} on GPU 0, which another program created and which stays" in answer.error["message"]
    assert "GPU 0 is as before, except" in answer.error["message"]
    assert not host.journal.exists()
    # The undo was complete as far as it was ours.
    assert host.run("mig", "recover").json["data"]["done"] == []


def test_what_another_made_beside_it_stays(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: Any) -> None:
        another_makes(2)
        host.fault("fail-step", 1)

    before_creation(monkeypatch, 2, work)
    answer = host.run("mig", "create", "1g.10gb:5 1g.10gb:6")
    assert answer.code == 1
    assert host.look()[0].places == {("1g.10gb", 2)}
    assert "1g.10gb:2 on GPU 0, which another program created" in answer.error["message"]


def test_a_compute_instance_that_another_made_in_ours_keeps_it(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(step: Any) -> None:
        # The first is complete by then; he makes another in the second.
        changes = MigChanges(connect(A100).nvml)
        instance = max(instance.gpu_instance_id for instance in (*host.state.gpus[0].bare, *host.state.gpus[0].mig))
        changes.create_compute_instance(0, instance, 1)

    before_creation(monkeypatch, 2, work, Action.CREATE_COMPUTE)
    answer = host.run("mig", "create", "1g.10gb:6 1g.10gb:5")
    assert answer.code == 1
    assert len(host.look()[0].places) == 1
    assert "which another program created" in answer.error["message"]


@pytest.mark.parametrize("bare", [False, True])
def test_after_a_crash_before_the_creation_what_another_made_there_is_left_where_it_can_be_told(
    host: World, bare: bool
) -> None:
    def dies(step: Any) -> None:
        os._exit(CRASHED)

    child = os.fork()
    if not child:
        with pytest.MonkeyPatch.context() as patched:
            before_creation(patched, 1, dies)
            host.run("mig", "create", "1g.10gb:5")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CRASHED
    entry = json.loads(host.journal.read_text())
    assert entry["proof"]["begun"]["start"] == 5
    another_makes(5, bare=bare)
    answer = host.run("mig", "recover")
    if "was complete" in " ".join(answer.json["data"]["done"]):
        # It is just what was to be made: nothing is undone.
        assert not bare
        assert host.look()[0].places == {("1g.10gb", 5)}
        return
    # An empty one, new, where ours was about to be made: what a crash of ours leaves.
    assert (answer.code, bare, host.look()[0].places) == (0, True, set())


def test_after_a_crash_what_is_not_known_to_be_ours_is_left_and_said(host: World) -> None:
    host.fault("crash-step", 1)
    assert host.run_apart("mig", "create", "1g.10gb:5 1g.10gb:6") == CRASHED
    host.clear()
    instance = {start for _, start in host.look()[0].places}
    other = ({5, 6} - instance).pop()
    another_makes(other)
    # Complete but for one compute instance: the rest is undone.
    answer = host.run("mig", "recover")
    assert answer.code == 0, answer
    assert host.look()[0].places == {("1g.10gb", other)}
    assert f"1g.10gb:{other} on GPU 0 is there and stays" in " ".join(answer.json["data"]["done"])
    assert not host.journal.exists()


def test_what_was_made_is_noted_with_its_ids_before_anything_else_is_done(
    host: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[dict[str, Any]] = []
    real = Calls.do

    def do(calls: Calls, step: Any) -> Any:
        noted.append(json.loads(host.journal.read_text())["proof"])
        return real(calls, step)

    monkeypatch.setattr(Calls, "do", do)
    assert host.run("mig", "create", "1g.10gb:5 1g.10gb:6").code == 0
    one, two = sorted(host.state.gpus[0].mig, key=lambda mig: mig.gpu_instance_id)
    ids = {one.gpu_instance_id, two.gpu_instance_id}
    assert [len(proof["made"]) for proof in noted] == [0, 1, 2, 3]
    assert [proof["begun"]["slices"] for proof in noted] == [None, 1, None, 1]
    assert noted[0]["begun"]["there"] == []
    first = noted[2]["made"]
    assert [made["compute"] for made in first] == [None, 0]
    assert {made["instance"] for made in first} < ids
    assert first[1]["uuid"] in {one.uuid, two.uuid}
    assert noted[2]["begun"]["there"] == [first[0]["instance"]]


def test_an_instance_that_was_made_and_cannot_be_read_is_undone(host: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = MigChanges._read_back, []

    def unread(self: MigChanges, made: Any, call: str, index: int) -> Any:
        calls.append(call)
        if len(calls) == 3:
            raise OperationFailed("it cannot be read", "see: gpushare doctor", code="not_read_back")
        return real(self, made, call, index)

    monkeypatch.setattr(MigChanges, "_read_back", unread)
    answer = host.run("mig", "create", "1g.10gb:5 1g.10gb:6")
    assert answer.error["code"] == "not_read_back"
    assert answer.error["message"].endswith("GPU 0 is as before")
    assert host.look()[0].places == set()


def test_an_incomplete_rollback_names_the_step_that_failed_and_the_command_for_what_is_missing(
    host: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.run("mig", "apply", "3g.40gb:0 2g.20gb:4").code == 0

    def refuses(*_: Any) -> Any:
        raise Refused(Code.UNKNOWN)

    monkeypatch.setattr(library_mig, "create_gpu_instance", refuses)
    error = host.run("mig", "apply", "3g.40gb:4 1g.10gb:0").error
    missing = {("3g.40gb", 0), ("2g.20gb", 4)} - host.look()[0].places
    assert missing
    assert all(f"{profile}:{start} is missing" in error["message"] for profile, start in missing)
    assert " as before" not in error["message"]
    assert not host.journal.exists()
    # What failed is a creation, not the first step, which was a destruction.
    assert error["message"].startswith("could not create 3g.40gb:4 on GPU 0"), error["message"]
    assert "could not be undone: could not be restored" in error["message"]
    assert "destroy" not in error["message"].split("could not be undone")[1].split("(")[0]
    assert "gpushare mig apply -g 0 3g.40gb:0 2g.20gb:4" in error["hint"]
    assert "-cci" not in error["hint"]
    monkeypatch.undo()
    assert host.run("mig", "apply", "-g", "0", "3g.40gb:0", "2g.20gb:4").code == 0
    assert host.run("mig", "recover").json["data"]["done"] == []
