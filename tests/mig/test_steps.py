"""A change of MIG that fails, or dies, at each single step comes back to exactly what was there."""

from __future__ import annotations

import pytest

from tests.cli.drive import CRASHED, World

EIGHT = "sim:8xa100-80gb"
# What is there before, and the change, in the words of the command line.
CHANGES = {
    "one slice of eight GPUs": (
        [("mig", "apply", "-g", "all", "3g.40gb:4 1g.10gb*4")],
        ("mig", "apply", "-g", "0", "3g.40gb:4 1g.10gb*2 2g.20gb"),
    ),
    "three GPUs, mode switched on": ([], ("mig", "apply", "-g", "0,3,7", "4g.40gb 2c.3g.40gb 1c.3g.40gb")),
    "two GPUs, mode switched off": (
        [("mig", "apply", "-g", "1,2", "1c.3g.40gb*2 1g.10gb*2")],
        ("mig", "disable", "-g", "1,2", "--destroy"),
    ),
    "compute instances inside": (
        [("mig", "apply", "-g", "0", "1c.7g.80gb*3 2c.7g.80gb")],
        ("mig", "apply", "-g", "0", "1c.7g.80gb 3c.7g.80gb 2c.7g.80gb"),
    ),
    "a larger compute instance where small ones were": (
        [("mig", "apply", "-g", "1", "1c.3g.40gb*3")],
        ("mig", "apply", "-g", "1", "2c.3g.40gb 1c.3g.40gb"),
    ),
    "another compute instance where one was": (
        [("mig", "apply", "-g", "2", "1c.3g.40gb*2 1g.10gb+me:0")],
        ("mig", "apply", "-g", "2", "3g.40gb 1g.10gb"),
    ),
    "named instances": (
        [("mig", "enable", "-g", "4"), ("mig", "create", "-g", "4", "2g.20gb*2", "--name", "ann")],
        ("mig", "destroy", "ann-1", "ann-2"),
    ),
    "new instances with a name": (
        [("mig", "apply", "-g", "5", "3g.40gb")],
        ("mig", "create", "-g", "5", "1g.10gb*2", "--name", "bob"),
    ),
}


def prepared(key: str) -> tuple[World, tuple[str, ...]]:
    host = World.new(EIGHT)
    before, change = CHANGES[key]
    for words in before:
        assert host.run(*words).code == 0
    return host, change


@pytest.mark.parametrize("key", CHANGES)
def test_a_fault_at_each_step_rolls_back_exactly(key: str) -> None:
    host, change = prepared(key)
    uuid = next((uuid for gpu, uuid in host.devices() if gpu in {6, 7}), None)
    pid = None if uuid is None else host.add(uuid)
    before, names = host.look(), host.names()
    for step in range(1, 100):
        with host.fault_at(step):
            answer = host.run(*change)
        if answer.code == 0:
            break
        assert (host.look(), host.names(), host.journal.exists()) == (before, names, False), step
        assert answer.error["code"] == "nvml"
        assert answer.error["message"].endswith(" as before"), answer.error
        assert pid is None or pid in host.pids()
    # So many steps were there, and the last run met none.
    assert step >= 4
    assert host.look() != before


@pytest.mark.parametrize("key", CHANGES)
def test_a_crash_after_each_step_is_undone_exactly_or_was_complete(key: str) -> None:
    host, change = prepared(key)
    before, names = host.look(), host.names()
    wanted = None
    for step in range(1, 100):
        host.fault("crash-step", step)
        code = host.run_apart(*change)
        host.clear()
        assert code == CRASHED, code
        assert host.journal.exists()
        answer = host.run("mig", "recover")
        assert answer.code == 0, answer
        assert not host.journal.exists()
        if "was complete" in answer.json["data"]["done"][0]:
            # Only the last step leaves nothing to undo.
            wanted = host.look()
            break
        assert host.look() == before, step
        assert host.names() == names
    assert step >= 3
    assert wanted not in (None, before)
    prepared(key)[0].run(*change)
    assert host.look() == wanted
    assert host.run("mig", "recover").json["data"]["done"] == []
