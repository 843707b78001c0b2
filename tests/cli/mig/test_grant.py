"""`mig grant` and `mig revoke`: who may use a named instance, shown, changed, read back, taken back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NotSupported, OperationFailed
from gpushare.connect import connect
from gpushare.host.capabilities import Capability, NodeAccess
from gpushare.host.host import Host
from gpushare.mig.grant import plan_grant, plan_revoke, reapplied_steps
from gpushare.mig.ledger import MigLedger, NamedInstance, changing_names, names_of
from gpushare.plan import Plan, carry_out
from gpushare.sim import admin
from gpushare.sim.machine import SimulatedCapabilities
from tests.cli.drive import Cli, Refused, World, same

A100 = "sim:a100-80gb"
# Every machine has these users.
NOBODY, DAEMON = 65534, 1
OPEN = NodeAccess()


@pytest.fixture(autouse=True)
def train() -> None:
    """Give the host a 3g (GPU instance 1) with the name ``train``, and a 1g (11) without one."""
    prepare()


def prepare() -> None:
    admin.set_mig(A100, "0", ["3g.40gb:0", "1g.10gb:4"])
    host = connect(A100)
    with changing_names(host) as names:
        uuid = str(host.nvml.identities()[0].uuid)
        names["train"] = NamedInstance(name="train", gpu_uuid=uuid, profile="3g.40gb", start=0)


def granted() -> tuple[str, ...]:
    return names_of(connect(A100))["train"].users


def nodes(instance: int = 1) -> list[tuple[bool, NodeAccess | None]]:
    """Return what holds at the nodes of a GPU instance and of its compute instance 0: may they be changed, and access."""
    capabilities = connect(A100).capabilities
    found = [capabilities.read(0, instance), capabilities.read(0, instance, 0)]
    return [(one.modify, capabilities.access(one)) for one in found if one is not None]


def test_a_grant_closes_both_nodes_to_everybody_else(cli: Cli) -> None:
    answer = cli("mig", "grant", "train", "nobody", host=A100).ok()
    assert answer.out == "train is granted to nobody only; undo: gpushare mig revoke train nobody -y\n"
    assert (nodes(), nodes(11)) == ([(False, NodeAccess(owner=NOBODY, mode=0o400))] * 2, [(True, OPEN)] * 2)
    assert (granted(), cli("sim", "add", "--mig", "1", "--user", "nobody", host=A100).code) == (("nobody",), 0)
    assert "CUDA_ERROR_NO_DEVICE" in cli("sim", "add", "--mig", "1", "--user", "daemon", host=A100).err
    assert cli("sim", "add", "--mig", "11", "--user", "daemon", host=A100).code == 0


def test_grants_are_added_and_taken_back(cli: Cli) -> None:
    cli("mig", "grant", "train", "nobody", host=A100).ok()
    cli("mig", "grant", "train", str(DAEMON), host=A100).ok()
    assert nodes() == [(False, NodeAccess(mode=0o400, users=(DAEMON, NOBODY)))] * 2
    assert granted() == ("nobody", "daemon")
    cli("mig", "revoke", "train", "nobody", host=A100).ok()
    assert (nodes(), granted()) == ([(False, NodeAccess(owner=DAEMON, mode=0o400))] * 2, ("daemon",))
    # The last one opens it to everybody.
    assert "every local user may then use train" in cli("mig", "revoke", "train", "daemon", host=A100).ok().err
    assert (nodes(), granted()) == ([(True, OPEN)] * 2, ())
    for user in ("nobody", "daemon"):
        cli("mig", "grant", "train", user, host=A100).ok()
    answer = cli("mig", "revoke", "train", host=A100).ok()
    assert "mig grant train nobody; gpushare mig grant train daemon" in answer.out
    assert (nodes(), granted()) == ([(True, OPEN)] * 2, ())


def test_what_is_so_already_takes_no_step(cli: Cli) -> None:
    assert cli("mig", "revoke", "train", host=A100, output="json").data["steps"] == []
    cli("mig", "grant", "train", "nobody", host=A100).ok()
    again = cli("mig", "grant", "train", "nobody", host=A100)
    assert "is granted to nobody already" in again.err
    assert "nothing to do" in again.out


def test_a_dry_run_shows_the_commands_and_needs_no_root(cli: Cli) -> None:
    admin.set_fault(A100, "user", value="nobody")
    before = same(A100)
    data = cli("mig", "grant", "train", "daemon", "--dry-run", host=A100, output="json").data
    assert data["dry_run"] is True
    assert data["steps"][0]["what"] == "record under the name train: granted to daemon"
    assert data["steps"][0]["command"].endswith("/names/mig.json")
    assert [step["command"] for step in data["steps"]][1:3] == [
        "echo 'DeviceFileModify: 0' | sudo tee /proc/driver/nvidia/capabilities/gpu0/mig/gi1/access",
        "sudo chmod 0400 /dev/nvidia-caps/nvidia-cap12\nsudo chown daemon:root /dev/nvidia-caps/nvidia-cap12",
    ]
    assert data["steps"][2]["undo"] == (
        "sudo chmod 0444 /dev/nvidia-caps/nvidia-cap12\nsudo chown root:root /dev/nvidia-caps/nvidia-cap12"
    )
    assert (same(A100), nodes(), granted()) == (before, [(True, OPEN)] * 2, ())


def test_the_commands_of_a_list(cli: Cli) -> None:
    cli("mig", "grant", "train", "nobody", host=A100).ok()
    data = cli("mig", "grant", "train", "daemon", "--dry-run", host=A100, output="json").data
    node = "/dev/nvidia-caps/nvidia-cap12"
    assert data["steps"][1]["command"] == (
        f"sudo chmod 0400 {node}\nsudo chown root:root {node}\nsudo setfacl -m u:daemon:r -m u:nobody:r {node}"
    )
    assert data["steps"][1]["undo"].startswith(f"sudo setfacl -b {node}\n")


def test_a_user_does_not_forget_names_that_root_has_given(cli: Cli, refused: Refused) -> None:
    cli("mig", "grant", "train", "daemon", host=A100).ok()
    admin.set_fault(A100, "user", value="1000")
    # Without -y too: it is not asked for first.
    for more in ((), ("-y",)):
        words = ("mig", "name", "--forget", "train", *more)
        assert "given by root" in refused(*words, code="no_permission", exit_code=4, host=A100)
    cli("mig", "name", "--forget", "train", "-n", host=A100).ok()
    assert granted() == ("daemon",)


def test_without_root_nothing_changes(refused: Refused) -> None:
    admin.set_fault(A100, "user", value="nobody")
    for words in (("grant", "train", "daemon"), ("grant", "train", "nobody")):
        refused("mig", *words, code="no_permission", exit_code=4, host=A100)
    assert granted() == ()


@pytest.mark.parametrize("then", ["grant", "revoke"])
@pytest.mark.parametrize("verb", ["grant", "revoke"])
def test_one_that_was_killed_in_between_is_completed_or_taken_back_by_the_next(cli: Cli, verb: str, then: str) -> None:
    """A node that is closed and noted nowhere would stay closed: nothing would know that there is something to undo."""
    words = ("train", "nobody") if then == "grant" else ("train",)
    for killed_after in range(6):
        if verb == "revoke":
            cli("mig", "grant", "train", "nobody", host=A100).ok()
        host = connect(A100)
        plan = plan_grant(host, "train", "nobody") if verb == "grant" else plan_revoke(host, "train")
        assert len(plan.steps) == 5
        for step in plan.steps[:killed_after]:
            step.do()
        cli("mig", then, *words, host=A100).ok()
        closed = [(False, NodeAccess(owner=NOBODY, mode=0o400))] * 2
        expected = (closed, ("nobody",)) if then == "grant" else ([(True, OPEN)] * 2, ())
        assert (nodes(), granted()) == expected, killed_after
        cli("mig", "revoke", "train", host=A100).ok()


def test_two_grants_at_once_are_both_kept(cli: Cli) -> None:
    """Planned before the other had noted his, each would write the other's away."""
    with MigLedger(connect(A100)).locked():
        apart = [
            subprocess.Popen([sys.executable, "-m", "gpushare", "--host", A100, "mig", "grant", "train", user, "-y"])
            for user in ("nobody", "daemon")
        ]
        # Both have planned, and wait.
        time.sleep(1.5)
    assert ([one.wait(60) for one in apart], sorted(granted())) == ([0, 0], ["daemon", "nobody"])
    assert nodes() == [(False, NodeAccess(mode=0o400, users=(DAEMON, NOBODY)))] * 2


def test_a_grant_undoes_what_was_interrupted_first(cli: Cli) -> None:
    host = World.new(A100)
    prepare()
    before = host.look()
    host.fault("crash-step", 1)
    assert host.run_apart("mig", "destroy", "train") == 137
    host.clear()
    assert host.look() != before
    assert "'destroy train', which was interrupted" in cli("mig", "grant", "train", "nobody", host=A100).ok().err
    assert host.look() == before
    # Its instance was created again, with another id.
    (found,) = {instance.gpu_instance_id for instance in host.state.gpus[0].mig if instance.profile == "3g.40gb"}
    assert nodes(found) == [(False, NodeAccess(owner=NOBODY, mode=0o400))] * 2
    assert not host.journal.exists()


def test_what_is_not_there(refused: Refused) -> None:
    text = refused("mig", "grant", "train", "nosuchuser", code="no_user", exit_code=6, host=A100)
    assert "getent passwd nosuchuser" in text
    refused("mig", "grant", "other", "nobody", code="no_name", exit_code=6, host=A100)
    refused("mig", "revoke", "other", code="no_name", exit_code=6, host=A100)
    refused("mig", "revoke", "train", "nobody", code="not_granted", exit_code=6, host=A100)
    # Another instance at the same place is not meant.
    for there in (["1g.10gb:4"], ["4g.40gb:0"], []):
        admin.set_mig(A100, "0", there)
        refused("mig", "grant", "train", "nobody", code="no_instance", exit_code=6, host=A100)


def test_a_grant_of_an_instance_that_is_gone_can_be_revoked(cli: Cli, refused: Refused) -> None:
    cli("mig", "grant", "train", "nobody", host=A100).ok()
    admin.set_mig(A100, "0", [])
    # Not "granted already": a script at boot must notice.
    refused("mig", "grant", "train", "nobody", code="no_instance", exit_code=6, host=A100)
    cli("mig", "revoke", "train", host=A100).ok()
    assert granted() == ()


def names() -> Sequence[NamedInstance]:
    return tuple(names_of(connect(A100)).values())


def reapplied() -> int:
    steps = [step for named in names() for step in reapplied_steps(connect(A100), named)]
    carry_out(Plan(title="again", steps=tuple(steps)))
    return len(steps)


def test_grants_are_applied_again_after_a_re_creation(cli: Cli) -> None:
    for user in ("nobody", "daemon"):
        cli("mig", "grant", "train", user, host=A100).ok()
    assert reapplied() == 0
    closed = nodes()
    admin.set_mig(A100, "0", ["1g.10gb:4"])
    assert reapplied() == 0
    admin.set_mig(A100, "0", ["3g.40gb:0"])
    assert (nodes(), reapplied(), nodes()) == ([(True, OPEN)] * 2, 4, closed)


def test_a_user_that_is_gone_opens_nothing_to_others() -> None:
    """Also when nobody of those that it was granted to is left: then only root may."""
    host = connect(A100)
    with changing_names(host) as held:
        held["train"] = NamedInstance(**{**vars(held["train"]), "users": ("left-the-company",)})
    reapplied()
    assert nodes() == [(False, NodeAccess(mode=0o400))] * 2


def test_every_compute_instance_is_granted(cli: Cli) -> None:
    host = connect(A100)
    handle = host.nvml.handle(0)

    def split(nvml: Any) -> None:
        instance = nvml.nvmlDeviceGetGpuInstanceById(handle, 1)
        nvml.nvmlComputeInstanceDestroy(nvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
        for _ in range(2):
            nvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)

    host.nvml.demand(split)
    cli("mig", "grant", "train", "nobody", host=A100).ok()
    found = connect(A100).capabilities.of_gpu(0)
    assert {place: one.modify for place, one in found.items()} == {
        (1, None): False,
        (1, 0): False,
        (1, 1): False,
        (11, None): True,
        (11, 0): True,
    }


class Failing:
    """Capabilities whose Nth change fails, or is accepted and not done."""

    def __init__(self, real: SimulatedCapabilities, at: int, *, silently: bool) -> None:
        self._real, self._left, self._silently = real, at, silently
        self.of_gpu, self.read, self.access = real.of_gpu, real.read, real.access

    def _now(self) -> bool:
        self._left -= 1
        if self._left == 0 and not self._silently:
            raise OperationFailed("the driver refuses", "look")
        return self._left == 0

    def set_modify(self, capability: Capability, *, modify: bool) -> None:
        if not self._now():
            self._real.set_modify(capability, modify=modify)

    def set_access(self, capability: Capability, access: NodeAccess) -> None:
        if not self._now():
            self._real.set_access(capability, access)


def with_capabilities(**fields: Any) -> Host:
    host = connect(A100)
    return type(host)(**{**vars(host), **fields})


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_failure_half_way_leaves_all_as_it_was(at: int, *, silently: bool, cli: Cli) -> None:
    cli("mig", "grant", "train", "daemon", host=A100).ok()
    cli("mig", "revoke", "train", host=A100).ok()
    real = connect(A100).capabilities
    assert isinstance(real, SimulatedCapabilities)
    host = with_capabilities(capabilities=Failing(real, at, silently=silently))
    with pytest.raises(GpushareError) as raised:
        carry_out(plan_grant(host, "train", "nobody"))
    assert raised.value.code == ("not_held" if silently else "failed")
    assert (nodes(), granted()) == ([(True, OPEN)] * 2, ())


def test_a_driver_without_capabilities(cli: Cli) -> None:
    cli("mig", "grant", "train", "daemon", host=A100).ok()

    class Nothing:
        def of_gpu(self, minor: int) -> dict[tuple[int, int | None], Capability]:
            return {}

    host = with_capabilities(capabilities=Nothing())
    for plan in (lambda: plan_grant(host, "train", "nobody"), lambda: reapplied_steps(host, names()[0])):
        with pytest.raises(NotSupported) as raised:
            plan()
        assert raised.value.code == "no_capabilities"
    # The record can still be cleared.
    carry_out(plan_revoke(host, "train"))
    assert granted() == ()


def test_a_node_that_nobody_used_yet_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = connect(A100).capabilities
    made: list[str] = []

    class Fresh(Failing):
        def access(self, capability: Capability) -> NodeAccess | None:  # type: ignore[override]
            return real.access(capability) if capability.path in made else None

    assert isinstance(real, SimulatedCapabilities)
    fresh = Fresh(real, 99, silently=False)
    del fresh.access
    host = with_capabilities(capabilities=fresh)
    monkeypatch.setattr(host.programs, "run", lambda argv: made.append(argv[-1]))
    carry_out(plan_grant(host, "train", "nobody"))
    assert made == [f"/proc/driver/nvidia/capabilities/gpu0/mig/gi1/{inner}access" for inner in ("", "ci0/")]
    assert nodes() == [(False, NodeAccess(owner=NOBODY, mode=0o400))] * 2


def test_a_holder_can_be_put_on_a_simulated_host(cli: Cli, refused: Refused) -> None:
    pid = cli("sim", "add", "--holder", "--name", "nv-hostengine", "--mig", "11", host=A100, output="json").data["pid"]
    (process,) = cli("sim", "show", host=A100, output="json").data["processes"]
    assert (process["pid"], process["memory_bytes"], process["gpu_uuid"]) == (pid, 0, "")
    assert "/dev/nvidia-caps/nvidia-cap102" in process["open_files"]
    uuid = connect(A100).nvml.identities()[0].mig_instances[1].uuid
    by_uuid = cli("sim", "add", "--holder", "-g", uuid, "--memory", "200M", host=A100, output="json").data["pid"]
    process = cli("sim", "show", host=A100, output="json").data["processes"][-1]
    assert (process["pid"], process["memory_bytes"]) == (by_uuid, 200 * 2**20)
    assert "/dev/nvidia-caps/nvidia-cap102" in process["open_files"]
    refused("sim", "add", "--holder", "--graphics", code="bad_holder", exit_code=2, host=A100)
