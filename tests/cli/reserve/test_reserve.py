"""``gpushare reserve``: a GPU for some hours."""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.model import GpuLease
from gpushare.base.selection import Device
from gpushare.cli.options import settings
from gpushare.host.claims import claim_directory
from gpushare.host.identity import boot_id, uptime
from gpushare.hostfile.kept import kept_limits
from gpushare.memory import leases as leases_module
from gpushare.memory.admission import MOST_LEASE_SECONDS, UserLimits
from gpushare.memory.leases import PREFIX, leases, take_lease
from gpushare.memory.room import usable_now
from tests.cli.drive import Cli, Patch, Refused, Words, World, refusals

TWO = "sim:2xh100"


@pytest.fixture
def two() -> World:
    return World.new(TWO)


@pytest.fixture
def of_alice(two: World, monkeypatch: Patch) -> World:
    """Return a host on which another user has reserved GPU 0."""
    lease = GpuLease(gpu_uuid=two.uuid(0), uid=4242, user="alice", seconds_left=7200.0, held_seconds=0.0)
    monkeypatch.setattr(leases_module, "leases", lambda *_: {lease.gpu_uuid: lease})
    for module in ("host.records", "memory.room", "run.start"):
        monkeypatch.setattr(f"gpushare.{module}.has_claims", lambda *_: True)
    monkeypatch.setattr("gpushare.cli.reserve.leases", lambda *_: {lease.gpu_uuid: lease})
    monkeypatch.setattr("gpushare.memory.room.leases", lambda *_: {lease.gpu_uuid: lease})
    return two


def test_where_old_files_are_removed_a_lease_stays(two: World, monkeypatch: Patch) -> None:
    """systemd-tmpfiles leaves files with the sticky bit, and a lease of root may be longer than its 10 days."""
    directory = claim_directory(two.host)
    monkeypatch.setattr("gpushare.host.records._AGED", (str(directory),))
    take_lease(two.host, two.uuid(0), 20 * 86400.0, UserLimits())
    (file,) = directory.glob(f"{PREFIX}*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o1644


def test_a_gpu_is_reserved_listed_and_given_back(cli: Cli, two: World, monkeypatch: Patch) -> None:
    answer = cli("reserve", "-g", "0", "--for", "2h", host=TWO, output="json").ok()
    assert answer.data["undo"] == "gpushare reserve -g 0 --end"
    (lease,) = cli("reserve", host=TWO, output="json").ok().data["leases"]
    assert (lease["gpu_uuid"], lease["uid"]) == (two.uuid(0), os.getuid())
    assert 7100 < lease["seconds_left"] <= 7200
    assert cli("status", host=TWO, output="json").ok().data["leases"][0]["gpu_uuid"] == two.uuid(0)
    assert "reserved GPUs" in cli("status", host=TWO).ok().out
    # Once more: the new one counts, and its undo is the earlier one.
    longer = cli("reserve", "-g", "0,1", "--for", "3h", host=TWO, output="json").ok()
    assert longer.data["undo"] == "gpushare reserve -g 1 --end; gpushare reserve -g 0 --for 2h"
    assert leases(two.host, UserLimits())[two.uuid(0)].seconds_left > 7200
    assert cli("run", "-g", "0", "-n", "--", "true", host=TWO).code == 0
    planned = cli("reserve", "-g", "0", "--end", "-n", host=TWO, output="json").ok().data
    assert planned["steps"][0]["undo"] == planned["undo"] == "gpushare reserve -g 0 --for 3h"
    cli("reserve", "-g", "0,1", "--end", host=TWO).ok()
    assert leases(two.host, UserLimits()) == {}
    # The undo of a shorter lease is in whole minutes.
    cli("reserve", "-g", "0", "--for", "12h", host=TWO).ok()
    assert cli("reserve", "-g", "0", "--for", "1h", host=TWO).ok().out.strip().endswith("reserve -g 0 --for 12h")
    # The twelve hours of a user include the half minute that has passed.
    two.fault("user", 1000)
    lease = GpuLease(gpu_uuid=two.uuid(0), uid=1000, user="alice", seconds_left=60.0, held_seconds=30.0)
    monkeypatch.setattr("gpushare.cli.reserve.leases", lambda *_: {lease.gpu_uuid: lease})
    cli("reserve", "-n", "-g", "0", "--for", "12h", host=TWO).ok()


def test_the_list_is_by_gpu_and_the_end_of_all_is_of_what_is_reserved(cli: Cli, refused: Refused, two: World) -> None:
    three = "sim:3xh100"
    for gpu in ("2", "0"):
        cli("reserve", "-g", gpu, "--for", "1h", host=three).ok()
    lines = cli("reserve", host=three, output="table").ok().out.splitlines()
    assert [line.split()[0] for line in lines if "GPU-" in line] == ["0", "2"]
    refused("reserve", "-g", "1", "--end", host=three, code="no_lease", exit_code=6)
    answer = cli("reserve", "-g", "all", "--end", host=three, output="json").ok().data
    assert [step["command"] for step in answer["steps"]] == [
        "gpushare reserve -g 0 --end",
        "gpushare reserve -g 2 --end",
    ]
    assert cli("reserve", host=three, output="json").ok().data["leases"] == []
    words = refused("reserve", "-g", "all", "--end", host=three, code="no_lease", exit_code=6)
    assert "not reserved: GPUs 0, 1, 2" in words


def test_run_does_not_start_where_another_user_has_a_lease(cli: Cli, refused: Refused, of_alice: World) -> None:
    said = refused("run", "-g", "0", "--", "true", code="reserved", exit_code=19, host=TWO)
    assert "GPU 0 is reserved by alice for 2 h" in said
    gpus = of_alice.host.nvml.sweep()
    now, reasons = usable_now(of_alice.host, [Device(gpu=gpu) for gpu in gpus], UserLimits(), client=True)
    assert ([device.gpu.index for device in now], reasons) == ([1], ["GPU 0 is reserved by alice for 2 h"])
    assert "GPU 1" in cli("run", "-g", "any", "--memory", "4G", "-n", "--", "true", host=TWO, output=None).ok().out
    refused("reserve", "-g", "0", "--for", "1h", code="reserved", exit_code=19, host=TWO)


@pytest.mark.needs_root
def test_root_sets_the_longest_lease_whoever_writes_the_file(cli: Cli, two: World, tmp_path: Path) -> None:
    assert kept_limits(two.host).longest_lease_seconds == MOST_LEASE_SECONDS
    file = tmp_path / "gpushare.yaml"
    file.write_text("version: 1\nreserve: {longest: 90m}\n")
    cli("apply", "-f", str(file), host=TWO).ok()
    assert kept_limits(two.host).longest_lease_seconds == 90 * 60
    assert "reserve: {longest: 90m}" in cli("capture", host=TWO).ok().out
    # As a user would write it by hand.
    path = write(two, "a" * 16, until=3 * 3600)
    limits = kept_limits(two.host)
    assert leases(two.host, limits)[two.uuid(0)].seconds_left > 2 * 3600
    os.chown(path, 65534, 65534)
    assert leases(two.host, limits)[two.uuid(0)].seconds_left <= 90 * 60
    assert cli("status", host=TWO, output="json").ok().data["leases"][0]["seconds_left"] <= 90 * 60
    assert leases(two.host, UserLimits(longest_lease_seconds=0.0)) == {}
    # It is over only by what its own file says: once root allows more, it counts again.
    assert path.exists()


@pytest.mark.needs_root
def test_a_file_that_shortens_leases_says_so_and_names_those_that_end(cli: Cli, two: World, tmp_path: Path) -> None:
    os.chown(write(two, "a" * 16, since=-60, until=3600), 65534, 65534)
    file = tmp_path / "gpushare.yaml"
    file.write_text("version: 1\nreserve: {longest: 0m}\n")
    told = "reserve: longest lease: 12 h -> 0 s"
    assert cli("diff", "-f", str(file), host=TWO).out.strip() == told
    planned = cli("apply", "-n", "-f", str(file), host=TWO).ok()
    ends = "the lease of nobody on GPU 0 ends"
    assert f"1. keep the file for the next boot, and put in force: {told}\n" in planned.out
    assert ends in planned.err
    assert "without -y it asks first, because it ends the lease of nobody on GPU 0" in planned.err
    refused = cli("apply", "-f", str(file), host=TWO, asks=True)
    assert "ends the lease of nobody on GPU 0, and there is no terminal to ask on" in refused.err
    assert refused.code == 19
    assert leases(two.host, kept_limits(two.host)) != {}
    assert ends in cli("apply", "-f", str(file), host=TWO).ok().err
    assert leases(two.host, kept_limits(two.host)) == {}
    assert cli("diff", "-f", str(file), host=TWO).ok().out.strip() == "nothing differs from the file"
    two.fault("user", 1000)
    file.write_text("version: 1\nreserve: {longest: 1h}\n")
    assert "only when root applies the file\n" in cli("apply", "-f", str(file), host=TWO).err


def test_a_renewal_counts_from_the_first_lease(two: World, monkeypatch: Patch) -> None:
    # The host may have been up for a minute.
    monkeypatch.setattr(leases_module, "uptime", lambda: uptime() + MOST_LEASE_SECONDS)
    write(two, "a" * 16, since=3600, until=MOST_LEASE_SECONDS + 60)
    take_lease(two.host, two.uuid(0), 1800.0, UserLimits())
    (lease,) = leases(two.host, UserLimits()).values()
    assert (round(lease.held_seconds / 3600), round(lease.seconds_left / 60)) == (11, 30)


def test_what_is_longer_than_root_allows_is_refused(refused: Refused, two: World, monkeypatch: Patch) -> None:
    two.fault("user", 1000)
    refused("reserve", "-g", "0", "--for", "13h", code="lease_too_long", exit_code=4, host=TWO)
    lease = GpuLease(gpu_uuid=two.uuid(0), uid=1000, user="alice", seconds_left=60.0, held_seconds=11 * 3600.0)
    monkeypatch.setattr("gpushare.cli.reserve.leases", lambda *_: {lease.gpu_uuid: lease})
    said = refused("reserve", "-g", "0", "--for", "2h", code="lease_too_long", exit_code=4, host=TWO)
    assert "the lease of GPU 0 would be 13 h long, and the longest here is 12 h" in said


def test_a_user_who_may_do_what_root_may_gets_no_longer_lease(refused: Refused, two: World, monkeypatch: Patch) -> None:
    """The file of a lease belongs to the real user, so a longer lease would not count to its end."""
    host = replace(two.host, uid=4242)
    assert host.root
    monkeypatch.setattr(settings, "connect", lambda: host)
    refused("reserve", "-g", "0", "--for", "13h", code="lease_too_long", exit_code=4, host=TWO)


def test_the_user_of_a_simulated_host_is_told_why_it_cannot_reserve(cli: Cli, refused: Refused, two: World) -> None:
    two.fault("user", os.geteuid() + 1)
    refused("reserve", "-g", "0", "--for", "1h", code="lease_unusable", exit_code=1, host=TWO)
    assert cli("-o", "json", "reserve", host=TWO).ok().data["leases"] == []


def write(
    host: World, name: str, *, gpu: str | None = None, boot: str | None = None, since: float = 0.0, until: float = 60.0
) -> Path:
    path = claim_directory(host.host) / f"{PREFIX}{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, end = max(0, int(uptime() + since)), round(uptime() + until)
    text = f"gpushare lease 1\nboot {boot or boot_id()}\ngpu {gpu or host.uuid(0)}\nsince {begin}\nuntil {end}\n"
    path.write_text(text)
    return path


def test_what_is_no_lease_does_not_count_and_the_clock_changes_none(two: World, monkeypatch: Patch) -> None:
    write(two, "0" * 16, boot="00000000-0000-0000-0000-000000000000")
    write(two, "1" * 16, until=-5)
    write(two, "2" * 16).write_text("gpushare lease 1\n")
    write(two, "nonsense")
    os.link(write(two, "3" * 16), claim_directory(two.host) / "another-name")
    assert leases(two.host, UserLimits()) == {}
    # Those that are over are removed.
    assert not (claim_directory(two.host) / f"{PREFIX}{'1' * 16}").exists()
    # A clock that is set changes none.
    write(two, "a" * 16, until=60)
    # One that begins later does not count yet.
    write(two, "b" * 16, gpu=two.uuid(1), since=500, until=600)
    now = time.time()
    for seconds in (-86400.0, 86400.0):
        monkeypatch.setattr(leases_module.time, "time", lambda seconds=seconds: now + seconds)
        (lease,) = leases(two.host, UserLimits()).values()
        assert 30 < lease.seconds_left <= 61


@pytest.mark.needs_root
def test_of_two_leases_the_earlier_counts_and_no_user_has_one_for_longer(two: World) -> None:
    path = write(two, "a" * 16, until=10 * MOST_LEASE_SECONDS)
    os.chown(path, 65534, 65534)
    lease = leases(two.host, UserLimits())[two.uuid(0)]
    assert lease.uid == 65534
    assert lease.seconds_left <= MOST_LEASE_SECONDS + 1
    from gpushare.base.errors import InUse

    # The clock of files ticks every few milliseconds.
    time.sleep(0.02)
    with pytest.raises(InUse):
        take_lease(two.host, two.uuid(0), 60.0, UserLimits())
    assert [path.name for path in claim_directory(two.host).glob(f"{PREFIX}*")] == [path.name]


@pytest.mark.needs_root
def test_files_of_a_user_hide_no_lease_of_another(two: World) -> None:
    mine = write(two, "f" * 16)
    directory, hidden = claim_directory(two.host), write(two, "e" * 16, gpu=two.uuid(1))
    os.chown(hidden, 1000, 1000)
    # Files of this user under more names, which come first.
    (directory / "shared").write_text("x")
    for number in range(100):
        os.link(directory / "shared", directory / f"{PREFIX}{number:016x}")
    # A user's files before those of all others.
    for number in range(100, 5000):
        path = directory / f"{PREFIX}{number:016x}"
        path.touch()
        os.chown(path, 65534, 65534)
    assert {uuid: lease.uid for uuid, lease in leases(two.host, UserLimits()).items()} == {
        two.uuid(0): 0,
        two.uuid(1): 1000,
    }
    assert mine.exists()


@refusals(
    "bad_combination 2: -g 0 --for 2h --end | -g 0",
    "bad_duration 2: -g 0 --for soon | -g 0 --for 0",
    "no_lease 6: -g 0 --end",
    "unknown_gpu 6: -g 9 --for 2h",
    "gpu_not_named 2: --for 2h",
)
def test_what_is_refused(refused: Refused, two: World, words: Words, code: str, exit_code: int) -> None:
    refused("reserve", *words, code=code, exit_code=exit_code, host=TWO)


@pytest.mark.needs_root
@pytest.mark.parametrize(("uid", "root", "stays"), [(4242, False, False), (4343, False, True), (0, True, False)])
def test_a_lease_that_is_over_is_removed_by_its_user_or_root(two: World, uid: int, root: bool, stays: bool) -> None:
    path = two.lease(0, 4242)
    path.write_text(re.sub(r"until \d+", f"until {int(uptime()) - 1}", path.read_text()))
    assert leases(replace(two.host, uid=uid, root=root), UserLimits()) == {}
    assert path.exists() is stays
