"""``gpushare mig`` create, destroy, apply, enable, disable, recover, name: what they do, refuse, and print."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.host.capabilities import user_name
from gpushare.mig.ledger import changing_names, made_by_gpushare
from gpushare.sim import admin
from gpushare.sim.current import changing
from gpushare.sim.state import SimulatedGpuInstance
from tests.cli.drive import Cli, Patch, Refused, Words, World, missing, refusals, same

A100, H100, EIGHT, MIXED = "sim:a100-80gb", "sim:h100-80gb", "sim:8xa100-80gb", "sim:2xh100-80gb,a30,t4"


def instances(world: World, gpu: int = 0) -> list[tuple[str, int]]:
    return sorted(world.look()[gpu].places, key=lambda place: place[1])


def test_create_adds_and_says_what_it_made(cli: Cli) -> None:
    world = World(A100)
    cli("mig", "enable", host=A100).ok()
    answer = cli("-o", "json", "mig", "create", "3g.40gb", "1g.10gb*2", "--name", "train", host=A100).ok()
    made = {(change["profile"], change["start"]): change["uuids"] for change in answer.data["created"]}
    assert sorted(made) == sorted(instances(world))
    assert {uuid for uuids in made.values() for uuid in uuids} == {each.uuid for each in world.state.gpus[0].mig}
    text = cli("mig", "status", host=A100).out
    assert all(f"'train-{number}'" in text for number in (1, 2, 3))
    shown = cli("mig", "create", "1g.10gb", "--name", "more", host=A100).ok()
    (line,) = shown.out.splitlines()
    assert line.startswith("1g.10gb:")
    assert "'more' on GPU 0: MIG-" in line
    assert line.endswith("; undo: gpushare mig destroy more -y")
    assert not shown.err
    # What was there stayed: exactly one more.
    assert len(instances(world)) == len(made) + 1


@pytest.mark.parametrize(
    "words", [("apply", "7g.80gb"), ("destroy", "all"), ("disable", "--destroy"), ("create", "1g")]
)
def test_an_instance_is_no_gpu(cli: Cli, refused: Refused, words: Words) -> None:
    """Its neighbours would go with it."""
    cli("mig", "apply", "3g.40gb", "1g.10gb", host=A100).ok()
    uuid = World(A100).state.gpus[0].mig[0].uuid
    assert "-g 0" in refused("mig", *words, "-g", uuid, code="whole_gpu", exit_code=2, host=A100)


def test_create_and_names_on_several_gpus(cli: Cli, refused: Refused) -> None:
    cli("mig", "apply", "3g.40gb", "-g", "1", host="sim:2xh100").ok()
    cli("mig", "create", "3g.40gb", "-g", "all", host="sim:2xh100").ok()
    assert [len(instances(World("sim:2xh100"), gpu)) for gpu in (0, 1)] == [0, 2]
    refused("mig", "create", "3g.40gb", "-g", "all", code="no_room", exit_code=19, host="sim:2xh100")
    cli("mig", "enable", "-g", "3", host=EIGHT).ok()
    planned = cli("-o", "json", "mig", "create", "1g.10gb:6", "-g", "3", "--name", "train", "-n", host=EIGHT).ok()
    naming, creating = planned.data["steps"]
    assert naming["what"] == "name 1g.10gb:6 on GPU 3 'train'"
    # The name is recorded first; the command that does it needs the instance.
    assert naming["command"].startswith("write ")
    assert creating["command"].endswith("\ngpushare mig name train 1g.10gb:6 -g 3")
    cli("mig", "create", "1g.10gb:6", "-g", "3", "--name", "train", host=EIGHT).ok()
    again = cli("mig", "name", "other", "train", "-g", "3", host=EIGHT)
    assert "1g.10gb:6 on GPU 3 is already named 'train'" in again.err


def test_create_beside_others_tells_only_what_is_new(cli: Cli) -> None:
    world = World(H100)
    cli("mig", "apply", "1c.3g.40gb*2", host=H100).ok()
    before = {instance.uuid for instance in world.state.gpus[0].mig}
    answer = cli("-o", "json", "mig", "create", "1c.3g.40gb", host=H100).ok()
    (new,) = {instance.uuid for instance in world.state.gpus[0].mig} - before
    assert [change["uuids"] for change in answer.data["created"]] == [[new]]
    assert answer.data["undo"] == "gpushare mig apply -g 0 '1c.3g.40gb:4*2'"
    # A name is one of a GPU instance: what gets one is not put among others.
    cli("mig", "destroy", new, host=H100).ok()
    cli("mig", "create", "1c.3g.40gb", "--name", "mine", host=H100).ok()
    assert instances(world) == [("3g.40gb", 0), ("3g.40gb", 4)]


def test_apply_keeps_every_busy_instance_of_a_full_host(cli: Cli) -> None:
    host = World.new(EIGHT)
    assert host.run("mig", "apply", "-g", "all", "3g.40gb 1g.10gb*4").code == 0
    free = next(mig.uuid for mig in host.state.gpus[0].mig if (mig.profile, mig.start) == ("1g.10gb", 2))
    pids = [host.add(uuid) for gpu, uuid in host.devices() if gpu in {0, 3} and uuid != free]
    before, busy = host.look(), host.busy()
    assert sorted(busy) == sorted(pids)
    cli("mig", "apply", "-g", "0", "3g.40gb 1g.10gb*3 1g.10gb+me", host=EIGHT).ok()
    assert (host.busy(), host.look()[1:]) == (busy, before[1:])
    assert host.look()[0].places == (before[0].places - {("1g.10gb", 2)}) | {("1g.10gb+me", 2)}


def test_apply_reads_a_file_from_stdin_once(cli: Cli, monkeypatch: Patch) -> None:
    devices = '{devices: [1], mig-enabled: true, mig-devices: {"3g.40gb": 1, "2g.20gb": 1}}'
    text = f"version: v1\nmig-configs: {{two: [{devices}]}}\n"
    # It gives its text once, as a pipe does.
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    cli("mig", "apply", "-f", "-", "-c", "two", host=EIGHT).ok()
    world = World(EIGHT)
    assert [[one for one, _ in instances(world, gpu)] for gpu in range(3)] == [[], ["2g.20gb", "3g.40gb"], []]
    assert [gpu.mig_mode for gpu in world.state.gpus] == [0, 1, *[0] * 6]


def test_what_gpushare_has_made_is_known_until_it_is_destroyed(cli: Cli) -> None:
    world = World(A100)
    admin.set_mig(A100, "0", ["3g.40gb"])
    with changing(world.file) as (state, _):
        state.gpus[0].bare.append(SimulatedGpuInstance("2g.20gb", 4, 9))
    found = instances(world)
    # The one of 2g is only filled.
    cli("mig", "create", "1g.10gb", "2g.20gb", host=A100).ok()
    assert not world.state.gpus[0].bare
    own = [place for place in instances(world) if place not in found]
    for left in (own, own[1:], []):
        assert sorted((spot.profile, spot.start) for spot in made_by_gpushare(world.host)) == sorted(left)
        if left:
            profile, start = left[0]
            cli("mig", "destroy", f"{profile}:{start}", host=A100).ok()
    assert instances(world) == found


def test_what_switching_costs_is_told(cli: Cli) -> None:
    answer = cli("mig", "enable", host=A100).ok()
    assert "MIG stays on after a reboot; its instances are lost" in answer.err
    assert "GPU 0: switching its MIG mode resets it" in answer.err
    assert "lost at a reboot or when the driver" not in answer.err
    world = World(H100)
    answer = cli("mig", "enable", host=H100).ok()
    assert answer.err.count("no CUDA program can use it") == 1
    assert "MIG and its instances are lost at a reboot or when the driver is reloaded" in answer.err
    assert (world.state.gpus[0].mig_mode, world.state.gpus[0].mig_pending) == (1, 1)
    assert "nothing to do" in cli("mig", "enable", host=H100).ok().out
    assert "no CUDA program" not in cli("mig", "create", "1g.10gb", host=H100).ok().err
    assert "no CUDA program can use it" in cli("mig", "destroy", "all", "-n", host=H100).ok().err
    cli("mig", "destroy", "all", host=H100).ok()
    cli("mig", "disable", host=H100).ok()
    assert (world.state.gpus[0].mig_mode, world.state.gpus[0].mig_pending) == (0, 0)


CHANGES: list[Words] = [
    ("create", "-g", "0", "1g.10gb", "--name", "ann"),
    ("destroy", "-g", "0", "2g.20gb:4"),
    ("apply", "-g", "0,1", "7g.80gb"),
    ("enable", "-g", "2"),
    ("disable", "-g", "0", "--destroy"),
    ("recover",),
    ("name", "bob", "0/3"),
]


@pytest.mark.parametrize("words", CHANGES, ids=" ".join)
def test_a_dry_run_changes_nothing_and_needs_no_root(cli: Cli, words: Words) -> None:
    cli("mig", "apply", "-g", "0", "3g.40gb:0 2g.20gb:4", host=EIGHT).ok()
    instance = next(instance for instance in World(EIGHT).state.gpus[0].mig if instance.profile == "2g.20gb")
    words = tuple(f"0/{instance.gpu_instance_id}" if word == "0/3" else word for word in words)
    World(EIGHT).fault("user", "1000")
    before = same(EIGHT)
    answer = cli("-o", "json", "mig", *words, "--dry-run", host=EIGHT).ok()
    assert same(EIGHT) == before
    assert answer.data["dry_run"] is True
    if words[0] != "recover":
        assert answer.data["steps"]
        assert all(step["command"] for step in answer.data["steps"])


UNDONE: list[Words] = [
    ("create", "-g", "1", "1g.10gb*2", "--name", "ann"),
    ("destroy", "-g", "1", "train"),
    ("destroy", "-g", "1", "2g.20gb:0", "train"),
    ("destroy", "-g", "1", "all"),
    ("apply", "-g", "1", "7g.80gb"),
    ("apply", "-g", "0,1", "1c.4g.40gb*2 1g.10gb"),
    ("apply", "-g", "3", "4g.40gb"),
    ("enable", "-g", "3"),
    ("disable", "-g", "1", "--destroy"),
    ("disable", "-g", "2"),
    ("disable", "-g", "0,1,2", "--destroy"),
]


@pytest.mark.parametrize("words", UNDONE, ids=" ".join)
def test_the_printed_undo_brings_the_old_layout_back(words: Words) -> None:
    host = World.new(EIGHT)
    for prepare in (
        ("apply", "-g", "0", "2c.3g.40gb 1c.3g.40gb 2g.20gb"),
        ("apply", "-g", "1", "2g.20gb:0"),
        ("create", "-g", "1", "3g.40gb", "--name", "train"),
        ("enable", "-g", "2"),
    ):
        assert host.run("mig", *prepare).code == 0
    before, names = host.look(), host.names()
    answer = host.run("mig", *words).ok()
    assert host.look() != before
    for command in answer.json["data"]["undo"].split(" && "):
        program, *rest = shlex.split(command)
        assert program == "gpushare"
        again = host.run(*rest)
        assert again.code == 0, (command, again)
    assert [(gpu.mode, gpu.pending, gpu.places, gpu.devices) for gpu in host.look()] == [
        (one.mode, one.pending, one.places, one.devices) for one in before
    ]
    assert host.names() == names


@pytest.mark.parametrize(
    ("host", "words", "code", "exit_code"),
    [
        (MIXED, ("enable", "-g", "3"), "no_mig", 3),
        (MIXED, ("apply", "-g", "all", "1g"), "no_mig", 3),
        ("sim:t4", ("create", "1g.5gb"), "no_mig", 3),
        (A100, ("create", "1g.10gb"), "mig_off", 3),
        (A100, ("apply", "4g.40gb*2"), "never_fits", 3),
        (A100, ("apply", "5g.50gb"), "mig_profile_unknown", 3),
        (A100, ("apply", "banana"), "bad_profile", 2),
        (A100, ("apply", "3g.40gb:1"), "bad_placement", 2),
        (A100, ("apply",), "no_wish", 2),
        (A100, ("apply", "1g.10gb", "-f", "x.yaml"), "no_wish", 2),
        (A100, ("apply", "1g.10gb", "-c", "day"), "bad_combination", 2),
        (A100, ("destroy", "train"), "unknown_instance", 6),
        (A100, ("destroy", "0/99"), "unknown_instance", 6),
        (A100, ("name", "train", "0/1"), "unknown_instance", 6),
        (A100, ("name", "train"), "no_name", 2),
        (A100, ("name", "train", "--forget", "eval"), "no_name", 2),
        (A100, ("name", "--forget", "train"), "no_name", 6),
        (A100, ("name", "3g.40gb", "0/1"), "bad_name", 2),
        # What is typed wrong is told before what the host lacks.
        (A100, ("create", "1g.10gb", "--name", "a b"), "bad_name", 2),
        (A100, ("enable", "-g", "7"), "unknown_gpu", 6),
        (EIGHT, ("enable",), "gpu_not_named", 2),
        (EIGHT, ("apply", "1g.10gb"), "gpu_not_named", 2),
        (EIGHT, ("create", "1g.10gb"), "gpu_not_named", 2),
        (EIGHT, ("destroy", "3"), "gpu_not_named", 2),
        (EIGHT, ("destroy", "all"), "gpu_not_named", 2),
        (EIGHT, ("disable",), "gpu_not_named", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_refused_on_a_new_host(refused: Refused, host: str, words: Words, code: str, exit_code: int) -> None:
    refused("mig", *words, code=code, exit_code=exit_code, host=host)


def test_a_name_whose_instance_is_gone_is_free_again(cli: Cli, refused: Refused) -> None:
    two = "sim:2xh200"
    cli("sim", "mig", "-g", "0", "1g.18gb:0", host=two).ok()
    cli("sim", "mig", "-g", "1", "1g.18gb:0", host=two).ok()
    cli("mig", "create", "1g.18gb", "-g", "1", "--name", "train", host=two).ok()
    cli("sim", "mig", "-g", "1", "7g.141gb", host=two).ok()
    # GPU 1 was looked at, and gets nothing.
    assert "'train' on GPU 0" in cli("mig", "create", "1g.18gb", "-g", "all", "--name", "train", host=two).ok().out
    cli("sim", "mig", "-g", "0", "1g.18gb:0", host=two).ok()
    # Nobody has a grant by the old name: it gives way.
    planned = cli("mig", "create", "1g.18gb", "-g", "0", "--name", "other", "-n", host=two).ok().out
    assert "forget the name 'train'" in planned
    cli("mig", "create", "1g.18gb", "-g", "0", "--name", "other", host=two).ok()
    world = World(two)
    assert list(world.names()) == ["other"]
    cli("sim", "mig", "-g", "0", "1g.18gb:0", host=two).ok()
    with changing_names(world.host) as names:
        names["other"] = replace(names["other"], users=("nobody",))
    error = refused("mig", "create", "1g.18gb", "-g", "0", "--name", "more", code="name_taken", exit_code=2, host=two)
    assert "hint: forget it: gpushare mig name --forget other" in error


@refusals(
    "no_room 19: create 4g.40gb | apply 7g.80gb | destroy all | disable --destroy",
    "unknown_instance 6: destroy MIG- | apply 7g.80gb --evict nobody",
    "instances_exist 19: disable",
    "name_taken 2: create 1g.10gb --name train | name train 0/8 | name other train",
    "bad_name 2: create 1g.10gb --name 3g",
    "one_instance 2: name other all",
)
def test_refused_beside_instances(cli: Cli, refused: Refused, words: Words, code: str, exit_code: int) -> None:
    cli("mig", "enable", host=A100).ok()
    cli("mig", "create", "3g.40gb:4", "--name", "train", host=A100).ok()
    cli("mig", "create", "1g.10gb:1", host=A100).ok()
    admin.add_process(A100, mig=next(mig.uuid for mig in World(A100).state.gpus[0].mig if mig.profile == "1g.10gb"))
    refused("mig", *words, code=code, exit_code=exit_code, host=A100)


def test_instances_are_named_with_their_gpu(cli: Cli, refused: Refused) -> None:
    two = "sim:2xh200"
    for gpu in ("0", "1"):
        cli("sim", "mig", "-g", gpu, *(f"1g.18gb:{start}" for start in range(5)), host=two).ok()
    message = refused("mig", "disable", "-g", "0-1", code="instances_exist", exit_code=19, host=two)
    assert missing(message, "1g.18gb:0 on GPU 0", "on GPU 1 and 2 more") == []
    cli("mig", "apply", "-g", "0,1", "3g.40gb:4", host=EIGHT).ok()
    text = refused("mig", "destroy", "-g", "0,1", "2", code="ambiguous_instance", exit_code=2, host=EIGHT)
    assert "0/2, 1/2" in text


@pytest.mark.parametrize(
    ("before", "words", "undo"),
    [
        ((), ("apply", "-g", "0-2", "3g.40gb"), "gpushare mig disable -g 0-2 --destroy"),
        (
            (("0,1",),),
            ("apply", "-g", "0,1", "3g.40gb"),
            "gpushare mig destroy 3g.40gb:4 -g 0 && gpushare mig destroy 3g.40gb:4 -g 1",
        ),
        ((("0,1",),), ("apply", "-g", "0,1", "3g.40gb", "--name", "a"), "gpushare mig destroy a-1 a-2 -y"),
        ((("0-2",),), ("disable", "-g", "0-2"), "gpushare mig enable -g 0-2"),
        (
            (("0", "7g.80gb"),),
            ("apply", "-g", "0", "1c.3g.40gb*2"),
            "gpushare mig destroy 3g.40gb:4 -g 0 && gpushare mig create 7g.80gb:0 -g 0",
        ),
        (
            (("0,2", "7g.80gb"), ("1", "1g.10gb:6")),
            ("disable", "-g", "0-2", "--destroy"),
            "gpushare mig apply -g 0,2 7g.80gb:0 && gpushare mig apply -g 1 1g.10gb:6",
        ),
        (
            (("0", "1c.3g.40gb:4*2"), ("1", "1g.10gb:6")),
            ("destroy", "-g", "0-2", "all"),
            "gpushare mig create '1c.3g.40gb:4*2' -g 0 && gpushare mig create 1g.10gb:6 -g 1",
        ),
    ],
)
def test_the_undo_on_several_gpus(cli: Cli, before: tuple[Words, ...], words: Words, undo: str) -> None:
    cli("mig", "status", host=EIGHT).ok()
    for gpus, *wish in before:
        cli("mig", *(["apply"] if wish else ["enable"]), "-g", gpus, *wish, host=EIGHT).ok()
    places = [seen.places for seen in World(EIGHT).look()]
    answer = cli("mig", *words, host=EIGHT, output="json").ok()
    assert answer.data["undo"] == undo
    notes = answer.lines("note")
    assert len(notes) == len({re.sub("GPU [-0-9, ]+", "", note) for note in notes})
    for command in undo.split(" && "):
        cli(*shlex.split(command)[1:], host=EIGHT).ok()
    assert [seen.places for seen in World(EIGHT).look()] == places


def test_an_undo_leaves_what_was_made_since(cli: Cli) -> None:
    cli("mig", "enable", host=A100).ok()
    undo = {
        name: cli("mig", "create", "1g.10gb", *words, host=A100, output="json").ok().data["undo"]
        for name, words in (("a", ("--name", "a")), ("plain", ()), ("b", ("--name", "b")))
    }
    cli("mig", "grant", "b", "nobody", host=A100).ok()
    places = [place for seen in World(A100).look() for place in seen.places]
    for name in ("a", "plain"):
        assert " && " not in undo[name]
        cli(*undo[name].split()[1:], host=A100, asks=True).ok()
    assert set(World(A100).names()) == {"b"}
    (left,) = (place for seen in World(A100).look() for place in seen.places)
    assert left in places
    # Where only the whole layout can come back, it asks.
    line = cli("mig", "disable", "--destroy", "-y", host=A100, output="json").ok().data["undo"]
    first, *naming = line.split(" && ")
    assert first.startswith("gpushare mig apply -g 0 1g.10gb:")
    assert naming == [f"gpushare mig name b {first.split()[-1]} -g 0", "gpushare mig grant b nobody"]
    cli("mig", "apply", "7g.80gb", "--name", "late", host=A100).ok()
    assert cli(*first.split()[1:], host=A100, output="json", asks=True).error["code"] == "needs_consent"


def test_an_mps_daemon_that_a_change_stops_is_told_and_comes_back(cli: Cli) -> None:
    cli("mps", "start", "--threads", "30", host=A100).ok()
    done = cli("mig", "apply", "3g.40gb", "2g.20gb", "--name", "big,small", host=A100).ok()
    assert done.out.startswith("the MPS daemon of GPU 0 is gone\nGPU 0: MIG is on\n")
    assert done.out.endswith("mig disable -g 0 --destroy && gpushare mps start -g 0 --threads 30\n")
    cli("mps", "start", "-g", "big", "--threads", "50", host=A100).ok()
    shown = cli("mig", "destroy", "big", "-n", host=A100, output="json").ok().data["undo"]
    done = cli("mig", "destroy", "big", host=A100).ok()
    assert done.out.startswith("the MPS daemon of 'big' is gone\n3g.40gb:4 on GPU 0 is gone\n")
    assert shown.endswith(" && gpushare mps start -g big --threads 50")
    for command in shown.split(" && "):
        cli(*shlex.split(command)[1:], host=A100, asks=True).ok()
    (daemon,) = World(A100).state.daemons
    assert daemon.visible == [next(each.uuid for each in World(A100).state.gpus[0].mig if each.profile == "3g.40gb")]
    # An instance without a name may get another UUID.
    cli("mig", "name", "--forget", "big", host=A100).ok()
    done = cli("mig", "destroy", "3g.40gb:4", "-g", "0", host=A100).ok()
    assert done.out == (
        "the MPS daemon of 3g.40gb:4 on GPU 0 is gone\n"
        "3g.40gb:4 on GPU 0 is gone\nundo: gpushare mig create 3g.40gb:4 -g 0\n"
    )


def test_compute_instances_that_go_are_counted(cli: Cli) -> None:
    cli("mig", "apply", "1c.3g.40gb*2", "--name", "a", host=A100).ok()
    asked = cli("mig", "apply", "3g.40gb:4", host=A100, asks=True)
    assert "this destroys 1c.3g.40gb:4*2 on GPU 0 (named 'a')" in asked.err
    done = cli("mig", "apply", "3g.40gb:4", "-y", host=A100).ok().out
    assert "2 compute instances of 3g.40gb:4 on GPU 0 are gone" in done
    assert "undo: gpushare mig apply -g 0 '1c.3g.40gb:4*2'" in done


@pytest.mark.parametrize("words", [("enable",), ("apply", "1g.10gb"), ("destroy", "all")], ids=" ".join)
def test_without_root_nothing_changes(cli: Cli, refused: Refused, monkeypatch: Patch, words: Words) -> None:
    if words[0] == "destroy":
        cli("mig", "apply", "1g.10gb", host=A100).ok()
    World(A100).fault("user", "1000")
    # On a simulated host, however gpushare was called.
    monkeypatch.setattr("sys.argv", ["/opt/bin/gpushare"])
    assert "as root: sudo gpushare " in refused("mig", *words, code="no_permission", exit_code=4, host=A100)


@pytest.mark.parametrize("host", [A100, H100])
def test_mig_is_not_switched_on_beside_a_program(refused: Refused, host: str) -> None:
    """Hopper would let it, and refuse the first instance."""
    assert World(host).host.nvml.count() == 1
    pid = admin.add_process(host)
    text = refused("mig", "enable", code="in_use", exit_code=19, host=host)
    assert f"{pid} (python3, user {user_name(os.geteuid())}" in text
    assert f"end them, or ask their users to end them: gpushare stop {pid}" in text
    assert str(pid) in refused("mig", "apply", "1g.10gb", code="in_use", exit_code=19, host=host)


def test_programs_in_the_way_are_named_at_once(refused: Refused, cli: Cli) -> None:
    host = "sim:2xh100"
    assert World(host).host.nvml.count() == 2
    pids = [admin.add_process(host, str(number % 2)) for number in range(8)]
    text = refused("mig", "apply", "-g", "0,1", "1g.10gb", code="in_use", exit_code=19, host=host)
    assert missing(text, "GPUs 0, 1: these must end before the MIG mode can change: ", " and 4 more\n") == []
    see = "see all: gpushare status -g 0,1; end them, or ask their users to end them: gpushare stop "
    assert sorted(map(int, text.partition(see)[2].split())) == sorted(pids)
    # An MPS server ends after its clients, not by a signal.
    cli("mps", "start", host=H100).ok()
    pid = World(H100).client()
    text = refused("mig", "enable", code="in_use", exit_code=19, host=H100)
    assert "(nvidia-cuda-mps-server, " in text
    assert f"gpushare stop {pid}\n" in f"{text}\n"


def test_a_pending_mode_is_taken_back_also_beside_a_program(cli: Cli) -> None:
    """Somebody else asked for it with nvidia-smi while the GPU was in use."""
    host = World.new(A100)
    admin.add_process(A100)
    with host.file.changed() as state:
        state.gpus[0].mig_pending = 1
    assert "pending: on" in cli("mig", "status", host=A100).out
    cli("mig", "disable", host=A100).ok()
    assert (host.look()[0][:2], len(host.pids())) == ((0, 0), 1)


def test_dcgm_is_in_the_way_where_the_gpu_must_be_reset(cli: Cli, refused: Refused) -> None:
    for host in (A100, H100):
        World(host).host.nvml.count()
        cli("sim", "add", "--holder", "--name", "nv-hostengine", host=host).ok()
    text = refused("mig", "enable", code="in_use", exit_code=19, host=A100)
    assert missing(text, "nv-hostengine", "systemctl") == []
    cli("mig", "enable", host=H100).ok()


def test_a_mode_that_is_only_pending_is_an_error_and_taken_back(refused: Refused) -> None:
    for host in (A100, H100):
        World(host).fault("reset-required")
        text = refused("mig", "apply", "1g.10gb", code="mode_pending", exit_code=1, host=host)
        assert "reset it: sudo nvidia-smi --gpu-reset -i 0; then run this again; if that fails, too: " in text
        gpu = World(host).state.gpus[0]
        assert (gpu.mig_mode, gpu.mig_pending) == (0, 0)
    # The ways that the hint names: after a reset the driver takes the change, or a reboot completes a pending one.
    World(H100).clear()
    assert "sudo nvidia-smi -i 0 -mig 1; sudo reboot" in text
    with World(A100).file.changed() as state:
        state.gpus[0].mig_mode = state.gpus[0].mig_pending = 1
    for host in (A100, H100):
        World(host).run("mig", "apply", "1g.10gb").ends(0)
        assert [profile for profile, _ in World(host).look()[0].places] == ["1g.10gb"]
    # Instances that went for it are made again.
    host = World.new(A100)
    assert host.run("mig", "apply", "1c.3g.40gb*2 1g.10gb").code == 0
    before = host.look()
    host.fault("reset-required")
    host.run("mig", "disable", "--destroy").ends(1, "mode_pending")
    assert host.look() == before


def test_a_driver_that_hides_the_profiles_until_mig_is_on(cli: Cli, refused: Refused) -> None:
    """Driver 535 and older."""
    World(EIGHT).fault("not-supported", "nvmlDeviceGetGpuInstanceProfileInfo")
    for verb in ("apply", "plan", "fits"):
        words = ("--memory", "8G") if verb == "fits" else ("1g.10gb",)
        text = refused("mig", verb, "-g", "1", *words, code="no_profiles", exit_code=3, host=EIGHT)
        assert "only while MIG is on" in text
        # Without -g it is refused on a host with several GPUs.
        assert "gpushare mig enable -g 1;" in text
    assert "only while MIG is on" in cli("mig", "profiles", host=EIGHT).ok().out
    cli("mig", "enable", "-g", "1", host=EIGHT).ok()


@pytest.mark.parametrize(
    "words", [("enable",), ("apply", "3g.40gb"), ("profiles",), ("apply", "off"), ("check", "off")]
)
def test_a_mode_that_the_driver_hides_is_unknown(refused: Refused, cli: Cli, sim_dir: Path, words: Words) -> None:
    World(A100).fault("refused", "nvmlDeviceGetMigMode")
    if words[-1] == "off":
        (sim_dir / "off.yaml").write_text("version: v1\nmig-configs: {plain: [{devices: all, mig-enabled: false}]}\n")
        words = (words[0], "-f", str(sim_dir / "off.yaml"))
    if words[0] == "check":
        assert "the driver does not report its MIG mode" in cli("mig", *words, host=A100).out
        return
    text = refused("mig", *words, code="not_supported", exit_code=3, host=A100)
    assert "GPU 0 (NVIDIA A100-SXM4-80GB): the driver does not report whether it has MIG" in text


def test_a_lost_gpu_among_eight(cli: Cli, refused: Refused) -> None:
    cli("mig", "apply", "-g", "0,1", "1g.10gb", host=EIGHT).ok()
    World(EIGHT).fault("lost", gpu="1")
    refused("mig", "apply", "-g", "all", "2g.20gb", code="gpu_lost", exit_code=6, host=EIGHT)
    cli("mig", "apply", "-g", "0", "2g.20gb", host=EIGHT).ok()
    assert [one for one, _ in instances(World(EIGHT))] == ["2g.20gb"]


@pytest.mark.parametrize("words", CHANGES[:6], ids=" ".join)
def test_without_a_driver(cli: Cli, words: Words) -> None:
    World(EIGHT).fault("no-driver")
    assert cli("mig", *words, host=EIGHT).code == (0 if words == ("recover",) else 9)


def test_cdi_is_written_anew_only_where_there_is_one(cli: Cli, refused: Refused) -> None:
    refused("mig", "apply", "1g.10gb", "--refresh-cdi", code="no_cdi_spec", exit_code=6, host=A100)
    cli("sim", "cdi", host=A100).ok()
    assert "--refresh-cdi" in cli("mig", "apply", "1g.10gb", host=A100).ok().err
    fresh = cli("mig", "apply", "2g.20gb", "--refresh-cdi", host=A100).ok()
    assert "note: the CDI specification of containers is written again" in fresh.err
    assert "stale" not in fresh.err
    assert "--refresh-cdi" not in fresh.err


def test_a_server_without_clients_ends_with_its_daemon(refused: Refused) -> None:
    assert World(H100).host.nvml.count() == 1
    admin.add_process(H100, name="nvidia-cuda-mps-server", user="bob")
    text = refused("mig", "enable", "-y", code="in_use", exit_code=19, host=H100)
    assert "or ask their users to end them: gpushare mps stop -g 0\n" in f"{text}\n"
