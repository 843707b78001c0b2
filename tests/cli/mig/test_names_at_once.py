"""``mig apply --name --grant``: a layout for several colleagues in one command."""

from __future__ import annotations

import pytest

from gpushare.mig.ledger import names_of
from tests.cli.drive import Cli, Refused, World

A100 = "sim:a100-80gb"


@pytest.fixture
def host() -> World:
    return World.new(A100)


def users(world: World) -> dict[str, tuple[str, ...]]:
    """Return the users of each name."""
    return {name: one.users for name, one in names_of(world.host).items()}


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
    for command in undo.split("; "):
        host.asked(*command.split()[1:]).ok()
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
    assert answer.error["code"] == code, answer
    assert (host.look(), host.names()) == (before, {})


def test_an_existing_name_goes_only_with_consent(host: World) -> None:
    host.asked("mig", "apply", "2g*3", "--name", "a,b,c", "--grant", "a=daemon").ok()
    answer = host.asked("mig", "apply", "2g*3", "--name", "x,b,c")
    assert answer.error["code"] == "needs_consent"
    (lost,) = answer.data["consent"]
    assert (lost["action"], lost["why"]) == ("forgets", ["the grants of daemon end"])
    undo = host.asked("mig", "apply", "2g*3", "--name", "x,b,c", "-y").ok().data["undo"]
    assert users(host) == {"x": (), "b": (), "c": ()}
    for command in undo.split("; "):
        host.asked(*command.split()[1:]).ok()
    assert users(host) == {"a": ("daemon",), "b": (), "c": ()}
    host.asked("mig", "apply", "2g*3", "--name", "x,b,c", "-y").ok()
    # A name that moves takes no grant along.
    host.asked("mig", "grant", "x", "daemon").ok()
    assert host.asked("mig", "apply", "2g*3", "--name", "b,x,c").error["code"] == "needs_consent"
    host.asked("mig", "apply", "2g*3", "--name", "b,x,c", "-y").ok()
    assert users(host) == {"b": (), "x": (), "c": ()}


def test_a_failure_half_way_leaves_all_as_it_was(host: World) -> None:
    host.asked("mig", "apply", "3g*2", "--name", "a,b", "--grant", "a=daemon").ok()
    before = host.look(), host.names(), users(host)
    with host.fault_at(3):
        assert host.asked("mig", "apply", "2g*3", "--name", "b,a,c", "-y").code != 0
    assert (host.look(), host.names(), users(host)) == before


def test_a_name_given_twice_is_named(refused: Refused) -> None:
    text = refused("mig", "apply", "2g*3", "--name", "a,b,a", code="bad_count", exit_code=2, host="sim:a100-40gb")
    assert "the name 'a' is given twice" in text


def test_each_step_of_a_dry_run_has_its_undo(cli: Cli) -> None:
    words = ("mig", "apply", "1c.3g*3", "2g", "--name", "a,b", "--grant", "b=root", "-n")
    steps = cli(*words, host="sim:a100-40gb", output="json").ok().data["steps"]
    assert [step["what"] for step in steps if step["undo"] is None] == []
    assert "gpushare mig destroy 2g.10gb:2 -g 0" in [step["undo"] for step in steps]
    assert steps[0]["undo"] == "gpushare mig name --forget a\ngpushare mig name --forget b"
    assert steps[-1]["undo"] == "gpushare mig revoke b root"
