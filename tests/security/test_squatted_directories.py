"""A run or state directory that somebody else made first, with links in it to true records: nothing is read there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import NotFound
from gpushare.base.model import ComputeMode, TimeSlice, Way
from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.hostfile.load import keep_applied, kept_entries
from gpushare.memory.peaks import Profile, find_profile, keep_profile
from gpushare.mig.daemons import devices_of
from gpushare.mig.ledger import MigLedger, NamedInstance, changing_names, names_of
from gpushare.mps.daemons import own_daemon
from gpushare.mps.home import DaemonRecord, has_unrecorded_daemon, home_of, homes_in
from gpushare.run.jobs import JobRecord, records, write_record
from gpushare.run.results import BenchedCap, Tuned, find_benched, find_tuned, keep_benched, keep_tuned
from gpushare.timeslice.policy import LENT, MODES, FoundMode, LentLevel, level_before_killed
from gpushare.timeslice.slices import RECORDS, FoundSlice, SliceRecord, slice_records
from tests.cli.drive import World
from tests.errors import fails
from tests.security.conftest import Stranger, gpushare

Reader = Callable[[Host, Device], object]


def fill(host: Host, device: Device) -> None:
    """Write one of everything that gpushare keeps."""
    home = home_of(host.run_directory, device.uuid)
    home.create()
    (home.pipe / "control").touch()
    me = host.processes.identity(os.getpid())
    # One that has ended.
    record = DaemonRecord(device_uuid=device.uuid, pid=me.pid, started=me.started + 1, uid=0)
    home.write(record)
    write_record(host, JobRecord(name="web", **me._asdict(), devices=(device.uuid,)))
    slices = SliceRecord(**me._asdict(), slice_us=500, before=(FoundSlice(1, 2, 2048),), set_at=1.0)
    RECORDS.write(replace(slices, path=RECORDS.path(host, me.pid)))
    MODES.write(FoundMode(mode=ComputeMode.EXCLUSIVE_PROCESS, path=MODES.path(host, device.uuid)))
    # Of one that was killed.
    lent = LentLevel(pid=me.pid, started=me.started + 1, level=TimeSlice.DEFAULT, before=TimeSlice.LONG)
    LENT.write(replace(lent, path=LENT.path(host, device.uuid)))
    keep_profile(host, device, ["true"], Profile(memory_bytes=1))
    cap = BenchedCap(copies=1, threads_percent=50.0, best=True, date="2026-01-01", driver=None)
    keep_benched(host, device, ["true"], [cap])
    keep_tuned(
        host, Tuned(name="web", gpu_name=None, driver=None, threads_percent=50.0, low_priority=True, way=Way.CAPS)
    )
    keep_applied(host, "no gpushare.yaml\n")
    with changing_names(host) as names:
        names["train"] = NamedInstance(name="train", gpu_uuid=device.uuid, profile="3g.71gb", start=0)
    ledger = MigLedger(host)
    with ledger.locked():
        ledger.begin("a change", [], [])
        ledger.give_up()
        ledger.begin("another change", [], [])


READERS: dict[str, Reader] = {
    "record": lambda host, device: home_of(host.run_directory, device.uuid).read(),
    "homes": lambda host, device: homes_in([host.run_directory]),
    "production": lambda host, device: records(host),
    "slices": lambda host, device: slice_records(host),
    "mode": lambda host, device: MODES.read(MODES.path(host, device.uuid)),
    "lent": lambda host, device: level_before_killed(host, device.gpu),
    "peaks": lambda host, device: find_profile(host, device, ["true"]),
    "benched": lambda host, device: find_benched(host, device, ["true"], 1),
    "tuned": lambda host, device: find_tuned(host, "web"),
    "applied": lambda host, device: kept_entries(host, ())[1],
    "names": lambda host, device: names_of(host),
    "journal": lambda host, device: MigLedger(host).interrupted_change(),
    "not restored": lambda host, device: MigLedger(host).failed_changes(),
}


DIRECT = {("middle", "applied")}


@pytest.fixture
def filled() -> tuple[Host, Device]:
    world = World()
    assert gpushare("status").code == 0
    device = devices_of(world.host.nvml.sweep()[0])[0]
    fill(world.host, device)
    return world.host, device


# The applied file lies in the directory itself.
@pytest.mark.parametrize(
    ("kind", "what"),
    [(kind, what) for kind in ("squatted", "middle") for what in READERS if (kind, what) not in DIRECT],
)
def test_nothing_is_read_through_a_directory_of_anothers(
    kind: str, what: str, filled: tuple[Host, Device], mallory: Stranger, tmp_path: Path
) -> None:
    host, device = filled
    read = READERS[what]
    # Itself it is readable: else the test would show nothing.
    assert read(host, device)
    links = mallory.home / f"links-{kind}-{what.replace(' ', '-')}"

    def squat() -> None:
        """Make a directory of the same names, each a link to the true one."""
        for name, true in (("run", host.run_directory), ("var", host.state_directory)):
            (links / name).mkdir(parents=True)
            for path in true.iterdir():
                (links / name / path.name).symlink_to(path)

    mallory.does(squat)
    if kind == "squatted":
        other = replace(host, run_directory=links / "run", state_directory=links / "var")
    else:
        # Its own directory, in the middle a stranger's link.
        for name in ("run", "var"):
            os.chown(links / name, 0, 0)
        other = replace(host, run_directory=links / "run", state_directory=links / "var")
    assert not read(other, device)


def test_no_daemon_is_found_below_a_directory_of_anothers(filled: tuple[Host, Device], mallory: Stranger) -> None:
    host, device = filled
    place = mallory.home / "run-own"
    mallory.does(lambda: (place.mkdir(), (place / "mps").symlink_to(host.run_directory / "mps")))
    with fails(NotFound, "dead_daemon"):
        own_daemon(host, device)
    # Its record is read.
    with fails(NotFound, "no_daemon"):
        own_daemon(replace(host, run_directory=place), device)
    assert not has_unrecorded_daemon([place])
