"""``mig apply --name --grant``: a layout for several colleagues in one command."""

from __future__ import annotations

import shlex

import pytest

from gpushare.host.capabilities import NodeAccess
from gpushare.mig.ledger import NamedInstance, changing_names, names_of
from tests.cli.drive import Cli, Refused, World

A100 = "sim:a100-80gb"


@pytest.fixture
def host() -> World:
    return World.new(A100)


def users(world: World) -> dict[str, tuple[str, ...]]:
    """Return the users of each name."""
    return {name: one.users for name, one in names_of(world.host).items()}


def nodes(world: World) -> dict[str, tuple[bool, NodeAccess | None]]:
    """Return what holds at the node of each instance: may it be changed, and its access."""
    capabilities = world.host.capabilities
    each = capabilities.of_gpu(0).values()
    return {str(capability.path): (capability.modify, capabilities.access(capability)) for capability in each}


def test_three_colleagues_in_one_command(host: World) -> None:
    words = ("--name", "a,b,c", "--grant", "a=daemon+nobody", "--grant", "b=bin")
    done = host.asked("mig", "apply", "2g*3", *words).ok()
    assert {name: place[1:] for name, place in host.names().items()} == {
        name: (profile, start) for name, (profile, start, _) in zip("abc", host.look()[0].instances, strict=True)
    }
    assert users(host) == {"a": ("daemon", "nobody"), "b": ("bin",), "c": ()}
    # Again there is nothing to do.
    assert host.asked("mig", "apply", "2g*3", *words).ok().data["steps"] == []
    undo = done.data["undo"]
    for command in undo.split(" && "):
        host.asked(*shlex.split(command)[1:]).ok()
    assert (host.look()[0].mode, host.names()) == (0, {})


def test_names_follow_the_wish_and_one_name_is_numbered(host: World) -> None:
    host.asked("mig", "apply", "1g.10gb", "3g.40gb", "--name", "small,big").ok()
    assert {name: place[1] for name, place in host.names().items()} == {"small": "1g.10gb", "big": "3g.40gb"}
    other = World.new("sim:2xa30")
    other.asked("mig", "apply", "-g", "all", "2g*2", "--name", "part", "--grant", "part=daemon").ok()
    assert users(other) == {f"part-{number}": ("daemon",) for number in range(1, 5)}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--name", "a,b"), "bad_count"),
        (("--name", "a,b,c,d"), "bad_count"),
        (("--name", "a,b,b"), "bad_count"),
        (("--name", "a,b,c", "--grant", "x=daemon"), "no_name"),
        (("--name", "a,b,c", "--grant", "a"), "bad_grant"),
        (("--name", "a,b,c", "--grant", "a=daemon+"), "bad_grant"),
        (("--name", "a,b,2g"), "bad_name"),
        (("--grant", "a=daemon"), "bad_combination"),
        (("--name", "a,b,c", "--grant", "a=no-such-user"), "no_user"),
    ],
)
def test_what_does_not_match_is_an_error_and_changes_nothing(host: World, words: tuple[str, ...], code: str) -> None:
    before = host.look()
    answer = host.asked("mig", "apply", "2g*3", *words, "-y")
    assert (answer.error["code"], (host.look(), host.names())) == (code, (before, {})), answer
    assert "a,b,b" not in words or "the name 'b' is given twice" in answer.error["message"]


@pytest.mark.parametrize("names", ["x,b,c", "b,a,c", "b,x,y"])
def test_a_name_is_not_taken_from_an_instance_that_stays(host: World, names: str) -> None:
    host.asked("mig", "apply", "2g*3", "--name", "a,b,c", "--grant", "a=daemon").ok()
    host.asked("mig", "apply", "2g*3", "--name", names, "-y").ends(2, "name_taken")
    assert users(host) == {"a": ("daemon",), "b": (), "c": ()}


@pytest.mark.parametrize(
    "words",
    [
        ("2g*3", "--name", "a,b,c", "--grant", "b=bin"),
        ("3g*2", "--name", "b,a"),
        ("2g",),
    ],
    ids=" ".join,
)
def test_the_undo_brings_back_names_and_grants(host: World, words: tuple[str, ...]) -> None:
    host.asked("mig", "apply", "2g*3", "--name", "a,b,c", "--grant", "a=daemon+nobody", "--grant", "c=bin").ok()
    before = host.look()[0].places, host.names(), users(host), sorted(nodes(host).values(), key=str)
    undo = host.asked("mig", "apply", *words, "-y").ok().data["undo"]
    for command in undo.split(" && "):
        host.asked(*shlex.split(command)[1:]).ok()
    assert (host.look()[0].places, host.names(), users(host), sorted(nodes(host).values(), key=str)) == before


@pytest.mark.parametrize(
    "grants",
    [("b=nobody",), ("b=bin", "b=bin"), ("b=nobody+65534",)],
    ids=",".join,
)
def test_the_undo_opens_an_instance_that_keeps_its_place(host: World, grants: tuple[str, ...]) -> None:
    host.asked("mig", "apply", "3g", "--name", "b").ok()
    before = host.names(), users(host), nodes(host)
    words = [word for grant in grants for word in ("--grant", grant)]
    undo = host.asked("mig", "apply", "3g", "--name", grants[0][0], *words, "-y").ok().data["undo"]
    assert nodes(host) != before[-1]
    for command in undo.split(" && "):
        host.asked(*shlex.split(command)[1:]).ok()
    assert (host.names(), users(host), nodes(host)) == before


def test_names_and_grants_that_change_alone_are_told(cli: Cli) -> None:
    cli("mig", "apply", "3g", "2g", "--name", "big,small", host=A100).ok()
    granted = cli("mig", "apply", "3g", "2g", "--name", "big,small", "--grant", "big=bin", host=A100).ok().out
    assert granted == "3g.40gb:4 on GPU 0 is now 'big', for bin only; undo: gpushare mig revoke big bin -y\n"


def test_a_name_of_another_gpu_is_refused(cli: Cli, refused: Refused) -> None:
    two = "sim:2xh100"
    cli("mig", "apply", "-g", "1", "3g*2", "--name", "a,b", "--grant", "a=daemon", host=two).ok()
    for name in ("a", "b"):
        words = ("mig", "apply", "-g", "0", "3g*2", "--name", f"{name},x")
        text = refused(*words, code="name_taken", exit_code=2, host=two)
        assert f"the name '{name}' belongs to 3g.40gb:{0 if name == 'a' else 4} of GPU 1" in text
    assert users(World(two)) == {"a": ("daemon",), "b": ()}


def test_a_failure_half_way_leaves_all_as_it_was(host: World) -> None:
    host.asked("mig", "apply", "3g*2", "--name", "a,b", "--grant", "a=daemon").ok()
    before = host.look(), host.names(), users(host)
    with host.fault_at(3):
        assert host.asked("mig", "apply", "2g*3", "--name", "b,a,c", "-y").code != 0
    assert (host.look(), host.names(), users(host)) == before


def test_each_step_of_a_dry_run_has_its_undo(cli: Cli) -> None:
    words = ("mig", "apply", "1c.3g*3", "2g", "--name", "a,b", "--grant", "b=root", "-n")
    steps = cli(*words, host="sim:a100-40gb", output="json").ok().data["steps"]
    assert [step["what"] for step in steps if step["undo"] is None] == []
    assert "gpushare mig destroy 2g.10gb:2 -g 0" in [step["undo"] for step in steps]
    assert steps[0]["undo"] == "gpushare mig name --forget a\ngpushare mig name --forget b"
    assert steps[-1]["undo"] == "gpushare mig revoke b root"


@pytest.mark.parametrize("verb", ["apply", "create"])
def test_a_name_of_a_gpu_that_does_not_answer_is_refused(cli: Cli, refused: Refused, verb: str) -> None:
    two = "sim:2xh100"
    world = World(two)
    cli("mig", "enable", "-g", "0", host=two).ok()
    cli("mig", "apply", "-g", "1", "3g", "--name", "a", "--grant", "a=nobody", host=two).ok()
    world.fault("lost", gpu="1")
    text = refused("mig", verb, "-g", "0", "3g", "--name", "a", code="name_taken", exit_code=2, host=two)
    assert "gpushare mig name --forget a" in text
    world.clear()
    assert (users(world), world.look()[0].instances) == ({"a": ("nobody",)}, ())


@pytest.mark.parametrize("verb", ["apply", "create"])
def test_a_name_of_a_gpu_that_is_gone_is_free_unless_it_has_grants(host: World, verb: str) -> None:
    host.asked("mig", "enable").ok()
    with changing_names(host.host) as names:
        for name, granted in (("a", ("nobody",)), ("b", ())):
            names[name] = NamedInstance(name=name, gpu_uuid="GPU-gone", profile="3g.40gb", start=0, users=granted)
    assert host.asked("mig", verb, "2g", "--name", "a", "-y").error["code"] == "name_taken"
    host.asked("mig", verb, "2g", "--name", "b").ok()
    assert users(host) == {"a": ("nobody",), "b": ()}
