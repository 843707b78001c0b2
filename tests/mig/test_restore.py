"""What a rollback owes beyond the instances: grants given again, and by name what could not be restored."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare.sim import admin, library_mig
from gpushare.sim.nvml_abi import Code, Refused
from tests.cli.drive import CRASHED, World

A100, H100 = "sim:a100-80gb", "sim:h100-80gb"


def refusing_from(monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
    """Let a change of the simulated driver be refused, from its Nth call on."""
    real, calls = getattr(library_mig, name), []

    def refusing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) >= first:
            raise Refused(Code.UNKNOWN)
        return real(*arguments)

    monkeypatch.setattr(library_mig, name, refusing)


def test_an_instance_that_could_not_go_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    host = World.new(A100)
    assert host.run("mig", "enable").code == 0
    refusing_from(monkeypatch, "create_compute_instance", 2)
    refusing_from(monkeypatch, "destroy_gpu_instance", 1)
    answer = host.run("mig", "create", "3g.40gb:4 2g.20gb:0")
    assert answer.code == 1
    for profile, start in host.look()[0].places:
        assert f"{profile}:{start} is there" in answer.error["message"]
    assert host.look()[0].places == {("3g.40gb", 4), ("2g.20gb", 0)}


def test_a_mode_that_could_not_go_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    host = World.new(A100)
    refusing_from(monkeypatch, "set_mode", 2)
    refusing_from(monkeypatch, "create_gpu_instance", 1)
    answer = host.run("mig", "apply", "3g.40gb")
    assert answer.code == 1
    assert "could not be undone: switch MIG on for GPU 0" in answer.error["message"]
    assert "nvidia-smi -i 0 -mig 0" in answer.error["hint"]
    assert host.look()[0][:2] == (1, 1)


def test_a_driver_that_accepts_another_layout_is_caught_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = World.new(A100)
    assert host.run("mig", "apply", "1g.10gb:6").code == 0
    before = host.look()
    real = library_mig.create_compute_instance

    def smaller(gpu: Any, model: Any, instance: int, number: int, placement: Any) -> int:
        return real(gpu, model, instance, 0 if number == 2 else number, placement)

    monkeypatch.setattr(library_mig, "create_compute_instance", smaller)
    answer = host.run("mig", "apply", "3g.40gb:0 1g.10gb:6")
    assert answer.error["code"] == "not_held"
    assert "3g.40gb:0 has 1c instead of 3c" in answer.error["message"]
    assert host.look() == before


@pytest.fixture
def granted() -> World:
    """Return a host with an instance that is one user's alone."""
    host = World.new(H100)
    assert host.run("mig", "enable").code == 0
    assert host.run("mig", "create", "3g.40gb:4", "--name", "train").code == 0
    answer = host.run("mig", "grant", "train", "nobody")
    assert answer.code == 0, answer
    return host


def nodes(host: World) -> dict[str, Any]:
    return {key: (one.owner, one.mode, one.users, one.modify) for key, one in host.state.gpus[0].nodes.items()}


def test_an_instance_that_a_rollback_makes_again_is_granted_again(granted: World) -> None:
    before, names = nodes(granted), granted.names()
    assert before
    with granted.fault_at(3):
        said = granted.run("mig", "apply", "7g.80gb")
    assert said.error["message"].endswith("GPU 0 is as before")
    assert granted.look()[0].places == {("3g.40gb", 4)}
    assert (nodes(granted), granted.names()) == (before, names)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_recovering_grants_again(granted: World, step: int) -> None:
    before = nodes(granted)
    granted.fault("crash-step", step)
    assert granted.run_apart("mig", "apply", "7g.80gb") == CRASHED
    granted.clear()
    assert granted.run("mig", "recover").code == 0
    assert granted.look()[0].places == {("3g.40gb", 4)}
    assert nodes(granted) == before


def test_evicting_ends_a_daemon_of_ours_with_its_clients_and_no_other() -> None:
    host = World.new(H100)
    assert host.run("mig", "apply", "3g.40gb:0 3g.40gb:4").code == 0
    first, second = (uuid for _, uuid in host.devices())
    for uuid in (first, second):
        assert host.run("mps", "start", "-g", uuid).code == 0
    pipes = {daemon.visible[0]: daemon.pipe_directory for daemon in host.state.daemons}
    pids = {
        uuid: admin.add_process(host.spec, mig=uuid, mps=True, environment={"CUDA_MPS_PIPE_DIRECTORY": pipes[uuid]})
        for uuid in (first, second)
    }
    assert host.run("mig", "destroy", first).error["code"] == "no_room"
    answer = host.run("mig", "destroy", first, "--evict", first)
    assert answer.code == 0, answer
    # Cut off from the GPU with its daemon, the client is in nobody's way, and gets no signal.
    assert set(host.busy()) == {pids[second]}
    assert [daemon.visible for daemon in host.state.daemons] == [[second]]
    assert [uuid for _, uuid in host.devices()] == [second]
