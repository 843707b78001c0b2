"""What ``--evict`` may end, and what the next command makes of a MIG change that died in the middle."""

from __future__ import annotations

import pytest

from tests.cli.drive import Cli, World, missing
from tests.cli.mig.test_left import crashed

A100, EIGHT = "sim:a100-80gb", "sim:8xa100-80gb"


@pytest.fixture
def two_parts() -> tuple[World, list[int], list[str]]:
    """Return a host with a program in each of two compute instances, and one beside; their PIDs and ids."""
    host = World.new(A100)
    assert host.run("mig", "apply", "1c.3g.40gb*2 1g.10gb").code == 0
    rows = sorted(host.state.gpus[0].mig, key=lambda instance: instance.profile != "3g.40gb")
    ids = [f"0/{one.gpu_instance_id}/{one.compute_instance_id}" for one in rows]
    return host, [host.add(row.uuid) for row in rows], ids


def test_evicting_a_compute_instance_ends_only_its_programs(two_parts: tuple[World, list[int], list[str]]) -> None:
    host, (_, second, beside), ids = two_parts
    assert host.run("mig", "destroy", ids[0], "--evict", ids[0]).code == 0
    assert (set(host.pids()), len(host.devices())) == ({second, beside}, 2)


def test_a_named_part_is_no_leave_to_end_its_neighbours(two_parts: tuple[World, list[int], list[str]]) -> None:
    host, pids, ids = two_parts
    instance = ids[0].rpartition("/")[0]
    before = host.look()
    for words in (("destroy", instance), ("apply", "7g.80gb"), ("disable", "--destroy")):
        answer = host.run("mig", *words, "--evict", ids[0])
        assert (answer.code, answer.error["code"]) == (19, "no_room"), words
        assert set(host.pids()) == set(pids)
    assert host.look() == before
    assert host.run("mig", "destroy", instance, "--evict", ids[0], "--evict", ids[1]).code == 0
    assert set(host.pids()) == {pids[2]}


def test_evicting_all_makes_way_for_another_mode(two_parts: tuple[World, list[int], list[str]]) -> None:
    host, _, _ = two_parts
    host.run("mig", "disable", "--destroy", "--evict", "all").ok()
    assert (set(host.pids()), host.look()[0][:2]) == (set(), (0, 0))


def test_programs_that_were_ended_are_not_said_to_be_back(two_parts: tuple[World, list[int], list[str]]) -> None:
    host, _, _ = two_parts
    before = host.look()
    host.fault("fail-step", 3)
    answer = host.run("mig", "apply", "7g.80gb", "--evict", "all").ends(1)
    assert answer.error["message"].endswith("GPU 0 is as before, except the processes that --evict ended")
    assert host.look() == before


def test_the_next_change_undoes_what_was_interrupted_first(cli: Cli) -> None:
    host = World.new(EIGHT)
    crashed(host, "apply", "-g", "2", "1g.10gb*3", step=4)
    assert "was interrupted: gpushare mig recover" in cli("mig", "status", host=EIGHT).err
    assert "would be undone" in cli("mig", "enable", "-g", "5", "--dry-run", host=EIGHT).ok().err
    assert len(host.look()[2].instances) > 0
    assert "was undone" in cli("mig", "enable", "-g", "5", host=EIGHT).ok().err
    assert [gpu.mode for gpu in host.look()] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert not host.journal.exists()


def test_what_was_interrupted_after_its_last_step_is_complete_also_for_a_dry_run(cli: Cli) -> None:
    host = World.new(EIGHT)
    assert host.run("mig", "apply", "-g", "2", "1g.10gb:0").code == 0
    crashed(host, "destroy", "-g", "2", "all", step=2)
    assert "is complete; nothing would be undone" in cli("mig", "recover", "-n", host=EIGHT).ok().out
    assert "interrupted, would" not in cli("mig", "enable", "-g", "5", "--dry-run", host=EIGHT).ok().err
    assert "was complete and stays: GPU 2: 1g.10gb:0 is missing" in cli("mig", "enable", "-g", "5", host=EIGHT).ok().err
    assert host.look()[2].instances == ()


def test_no_undo_is_printed_that_would_lose_grants(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    host = World.new(A100)
    assert host.run("mig", "apply", "3g.40gb", "2g.20gb", "--name", "big,small").code == 0
    crashed(host, "disable", "--destroy", "-y", step=5)
    monkeypatch.setattr("gpushare.mig.recover.names_of", lambda _: {})
    assert cli("mig", "recover", "-n", host=A100, output="json").ok().data["undo"] is None


def test_what_was_interrupted_is_undone_before_a_change_is_refused(cli: Cli) -> None:
    """It may be all that is in the way; and what it was comes before what is wanted now."""
    host = World.new(A100)
    assert host.run("mig", "enable").code == 0
    assert host.run("mig", "create", "3g.40gb", "--name", "train").code == 0
    crashed(host, "destroy", "train", step=1)
    before = host.look()
    # Who only looks, or may not, changes nothing.
    assert (cli("mig", "destroy", "0/99", "-n", host=A100).code, host.look()) == (6, before)
    answer = cli("mig", "destroy", "0/99", host=A100).ends(6)
    assert missing(answer.err, "'destroy train', which was interrupted", "was undone") == []
    assert (host.look()[0].instances, list(host.names())) == ((("3g.40gb", 4, ((3, 0),)),), ["train"])


def test_a_name_given_in_vain_is_forgotten_and_one_that_was_there_stays() -> None:
    host = World.new(A100)
    assert host.run("mig", "enable").code == 0
    assert host.run("mig", "create", "3g.40gb", "--name", "train").code == 0
    names = host.names()
    crashed(host, "create", "1g.10gb*2", "--name", "ann", step=3)
    assert (len(host.names()), host.run("mig", "recover").code, host.names()) == (3, 0, names)


def test_recovering_finds_its_gpu_again_by_uuid() -> None:
    """One that fell off the bus and came back last renumbers the others."""
    host = World.new("sim:3xa100-80gb")
    crashed(host, "apply", "-g", "0", "1g.10gb*3", step=4)
    with host.file.changed() as state:
        state.gpus.append(state.gpus.pop(0))
    assert (host.run("mig", "recover").code, [gpu.mode for gpu in host.look()]) == (0, [0, 0, 0])
