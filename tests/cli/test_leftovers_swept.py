"""What a killed gpushare left in the middle of writing a file is removed, also where there is nothing else to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare.host.host import Host, make_private_directory
from gpushare.mps.home import home_of
from tests.cli.drive import Cli, Words, World, Write

LEVEL = "lent", "gpu.json"
MODE = "mode", "gpu.json"
NAMES = "names", "names.json"
DAEMON = "mps", "daemon.json"


def _top(host: Host, room: str) -> Path:
    return host.state_directory if room == "names" else host.run_directory


def left(world: World, room: str, name: str) -> Path:
    """Leave what `replace_file` leaves when it is killed."""
    host = world.host
    directory = home_of(host.run_directory, world.uuid()).directory if room == "mps" else _top(host, room) / room
    make_private_directory(directory)
    path = directory / f".{Path(name).stem}-abcd_123"
    path.write_text("half of")
    return path


@pytest.mark.parametrize(("where", "words", "code"), [
    (LEVEL, ("timeslice", "reset"), 0), (LEVEL, ("timeslice", "set", "default"), 0), (MODE, ("timeslice", "reset"), 0),
    (NAMES, ("timeslice", "reset"), 0), (DAEMON, ("mps", "stop"), 6), (DAEMON, ("mps", "stop", "-g", "0"), 6),
])  # fmt: skip
def test_a_leftover_is_always_removed(cli: Cli, world: World, where: tuple[str, str], words: Words, code: int) -> None:
    path = left(world, *where)
    assert cli(*words, "--dry-run").code == code
    assert path.exists()
    assert cli(*words).code == code
    assert not path.exists()


def test_apply_removes_a_leftover_of_its_own_file(cli: Cli, world: World, write: Write) -> None:
    file = write("version: 1\ngpus:\n- {match: {index: 0}, timeslice: default}\n")
    cli("apply", "-f", file, "-y").ok()
    path = world.host.state_directory / ".applied-abcd_123"
    path.write_text("half of")
    # Nothing to do, and kept already.
    cli("apply", "-f", file, "-y").ok()
    assert not path.exists()
