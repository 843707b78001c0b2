"""``gpushare run --mig PROFILE --create``: an instance for one job, which is gone after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpushare.base.errors import InUse, OperationFailed
from gpushare.host.claims import HeldClaim, take_claim
from gpushare.host.host import Host
from gpushare.mig import on_demand
from gpushare.mig.change import MigChange
from gpushare.mig.ledger import MigLedger
from gpushare.mig.on_demand import ON_DEMAND, OnDemand
from tests.cli.drive import Cli, Patch, Real, Refused, Words, World, refusals, until

PRINT = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
CREATE = ("run", "--mig", "1g", "--create")
ALIVE = ("--", "cat")


def instances(world: World) -> list[str]:
    return [f"{instance.profile}:{instance.start}" for instance in world.state.gpus[0].mig]


@pytest.fixture
def on(world: World) -> World:
    """Return a host with MIG on and no instance."""
    world.run("mig", "enable")
    return world


def test_an_instance_is_made_and_is_gone_afterwards(real: Real, cli: Cli, on: World) -> None:
    planned = cli("-o", "json", *CREATE, "-n", "--", "true").ok().data["steps"]
    assert [step["what"].split(" ")[0] for step in planned] == ["create", "run", "destroy"]
    done = real(*CREATE, "--", sys.executable, "-c", PRINT).result()
    assert done.out.startswith("MIG-")
    assert (done.code, instances(on), ON_DEMAND.all(on.host)) == (0, [], [])


@pytest.mark.parametrize("more", [(), ("-n",), ("--create",), ("--create", "-n"), ("--create", "--wait", "-n")])
def test_where_the_claims_cannot_be_read_none_is_made(refused: Refused, world: World, more: Words) -> None:
    world.mig("1g.18gb:4")
    world.host.run_directory.mkdir(parents=True, exist_ok=True)
    (world.host.run_directory / "claims").write_text("")
    text = refused("run", "--mig", "1g", *more, "--", "true", code="lease_unusable", exit_code=4)
    assert "claims cannot be read: Not a directory" in text
    assert instances(world) == ["1g.18gb:4"]


@pytest.mark.parametrize("more", [(), ("--create",)])
def test_nobody_waits_where_only_claims_are_unreadable(
    refused: Refused, world: World, monkeypatch: Patch, more: Words
) -> None:
    world.mig("1g.18gb:4")
    # Another user has written too many files.
    monkeypatch.setattr("gpushare.run.mig.claimed_instances", lambda _host: None)
    monkeypatch.setattr("gpushare.run.mig.why_unreadable", lambda _host, _prefix: "there are too many")
    text = refused("run", "--mig", "1g", "--wait", *more, "--", "true", code="lease_unusable", exit_code=4)
    assert "there are too many" in text
    assert instances(world) == ["1g.18gb:4"]


def test_one_that_is_free_is_taken_and_stays(real: Real, world: World) -> None:
    (uuid,) = world.mig("1g.18gb:4")
    assert real(*CREATE, "--", sys.executable, "-c", PRINT).result().out.strip() == uuid
    assert instances(world) == ["1g.18gb:4"]


@pytest.mark.parametrize("daemon", [False, True])
def test_one_that_somebody_else_uses_stays(real: Real, cli: Cli, on: World, daemon: bool) -> None:
    started = real(*CREATE, *ALIVE, stdin=subprocess.PIPE)
    (uuid,) = until(lambda: [each.uuid for each in on.state.gpus[0].mig if ON_DEMAND.all(on.host)], "it is made")
    cli(*(("mps", "start", "-g", uuid) if daemon else ("sim", "add", "--mig", uuid))).ok()
    kept = "an MPS daemon serves it" if daemon else "another program is in it"
    assert f"stays: {kept}" in started.result().err
    assert (len(instances(on)), len(on.state.daemons)) == (1, daemon)
    assert ON_DEMAND.all(on.host) == []


def test_the_guard_removes_what_a_killed_gpushare_has_made(real: Real, on: World) -> None:
    started = real(*CREATE, "--", "sleep", "300")
    started.says("runs in MIG 1g.18gb")
    os.kill(started.pid, signal.SIGKILL)
    until(lambda: not instances(on), "the instance is gone")
    until(lambda: not ON_DEMAND.all(on.host), "its record is gone")
    started.result()


def test_what_nobody_removed_is_removed_by_the_next_change(cli: Cli, on: World) -> None:
    on.run("mig", "create", "1g.18gb:0", "2g.35gb:4")
    dead = subprocess.Popen(["true"])
    dead.wait()
    for profile, start in (("1g.18gb", 0), ("3g.71gb", 4)):
        path = ON_DEMAND.path(on.host, f"{dead.pid}-0-{start}")
        record = OnDemand(pid=dead.pid, started=1, gpu_uuid=on.uuid(), profile=profile, start=start, path=path)
        ON_DEMAND.write(record)
    assert "it would be destroyed" in cli("mig", "recover", "-n").ok().out
    assert "it would be destroyed" in cli("mig", "create", "1g.18gb", "-n").ok().err
    assert "1g.18gb:0" in cli("mig", "recover").ok().out
    # The other place has an instance that it does not speak of.
    assert (instances(on), ON_DEMAND.all(on.host)) == (["2g.35gb:4"], [])


@pytest.mark.parametrize("made", [True, False])
def test_an_instance_whose_making_failed_is_known(monkeypatch: Patch, cli: Cli, on: World, made: bool) -> None:
    real = on_demand.transact

    def fails(host: Host, ledger: MigLedger, change: MigChange) -> None:
        if made:
            real(host, ledger, change)
        raise OperationFailed("it was not undone", "see: gpushare mig status", code="not_restored")

    with monkeypatch.context() as patched:
        patched.setattr(on_demand, "transact", fails)
        with pytest.raises(OperationFailed, match="not undone"):
            on_demand.make_instance(on.host, "1g", [on.host.nvml.gpu(0)])
    assert (len(instances(on)), len(ON_DEMAND.all(on.host))) == (made, made)
    # Its gpushare lives until the end of this test.
    monkeypatch.setattr(on_demand, "any_lives", lambda *_: False)
    cli("mig", "recover").ok()
    assert (instances(on), ON_DEMAND.all(on.host)) == ([], [])


def test_an_instance_that_its_own_job_still_claims_is_not_left_silently(on: World) -> None:
    record = on_demand.make_instance(on.host, "1g", [on.host.nvml.gpu(0)])
    claim = take_claim(on.host, next(instance.uuid for instance in on.state.gpus[0].mig))
    assert isinstance(claim, HeldClaim)
    with pytest.raises(InUse):
        on_demand.remove_instance(on.host, record)
    claim.release()
    assert (on_demand.remove_instance(on.host, record), instances(on)) == (None, [])


def test_a_job_waits_for_room_and_then_makes_its_own(real: Real, cli: Cli, on: World) -> None:
    first = real("run", "--mig", "7g", "--create", *ALIVE, stdin=subprocess.PIPE)
    until(lambda: instances(on), "it is made")
    assert ((answer := cli("-o", "json", *CREATE, "--", "true")).code, answer.error["code"]) == (19, "no_room")
    second = real(*CREATE, "--wait", "--", sys.executable, "-c", PRINT)
    second.says("waiting for a free instance")
    assert first.result().code == 0
    assert second.result().out.startswith("MIG-")
    assert instances(on) == []


@refusals(
    "bad_mig 2: --create --mig train | --create --mig 1c.3g.71gb",
    "mig_profile_unknown 3: --create --mig 9g.99gb",
    "limit_above_gpu 2: --create --mig 1g --memory 40G",
)
def test_what_is_refused_leaves_nothing(refused: Refused, on: World, words: Words, code: str, exit_code: int) -> None:
    refused("run", *words, "--", "true", code=code, exit_code=exit_code)
    assert instances(on) == []


def test_mig_that_is_off_is_not_switched_on(refused: Refused) -> None:
    assert "gpushare mig enable -g 0" in refused(*CREATE, "--", "true", code="mig_off", exit_code=6)
