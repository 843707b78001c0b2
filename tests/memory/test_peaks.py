"""What is kept of a command: its peak, its use of the GPU, and what it kept next to others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.selection import Device
from gpushare.base.units import GIB
from gpushare.host.host import Host
from gpushare.memory import peaks
from gpushare.memory.peaks import KnownCommands, Profile, digest_of, find_profile, keep_profile

COMMAND = ("python", "train.py", "--key", "secret")


def path_of(host: Host) -> Path:
    (path,) = (host.state_directory / "peaks").glob("*.json")
    return path


def test_the_command_is_not_in_the_file_and_nobody_else_can_read_it(host: Host, device: Device) -> None:
    assert find_profile(host, device, COMMAND) is None
    keep_profile(host, device, COMMAND, Profile(memory_bytes=GIB))
    path = path_of(host)
    assert "secret" not in path.read_text() + path.name
    assert path.stat().st_mode & 0o777 == 0o600
    other = replace(device, gpu=replace(device.gpu, name="another"))
    assert find_profile(host, other, COMMAND) is None


@pytest.mark.parametrize(
    ("first", "then", "memory", "short"),
    [
        ((2, False), (1, False), 2, False),
        ((1, False), (2, False), 2, False),
        # It ran out of memory at its peak, or above it: it needs more.
        ((2, False), (2, True), 2, True),
        ((2, False), (3, True), 3, True),
        # Below its peak, others were in its way.
        ((2, False), (1, True), 2, False),
        ((2, True), (1, True), 2, True),
        # It has ended well with less since.
        ((2, True), (1, False), 2, False),
        ((2, True), (3, False), 3, False),
    ],
)
def test_the_larger_peak_is_kept(
    host: Host, device: Device, first: tuple[int, bool], then: tuple[int, bool], memory: int, short: bool
) -> None:
    for size, ran_out in (first, then):
        keep_profile(host, device, COMMAND, Profile(memory_bytes=size * GIB, short=ran_out))
    profile = find_profile(host, device, COMMAND)
    assert profile == Profile(memory_bytes=memory * GIB, short=short)


def test_the_newest_use_is_kept_and_the_peak_with_it(host: Host, device: Device) -> None:
    for profile in (Profile(memory_bytes=2 * GIB, use_percent=40.0), Profile(memory_bytes=GIB)):
        keep_profile(host, device, COMMAND, profile)
    assert find_profile(host, device, COMMAND) == Profile(memory_bytes=2 * GIB, use_percent=40.0)
    keep_profile(host, device, COMMAND, Profile(use_percent=50.0))
    assert find_profile(host, device, COMMAND) == Profile(memory_bytes=2 * GIB, use_percent=50.0)


@pytest.mark.parametrize(
    ("text", "profile"),
    [
        ('{"schema": 1, "memory_bytes": 5, "short": true}', Profile(memory_bytes=5, short=True)),
        ('{"schema": 1, "memory_bytes": 5}x', None),
        ("[]", None),
        *(
            (f'{{"schema": 1, {fact}}}', None)
            for fact in (
                *(f'"memory_bytes": {size}' for size in ("0", "-5", '"5"', "1152921504606846976")),
                *(f'"use_percent": {share}' for share in ("101", "NaN")),
            )
        ),
    ],
)
def test_a_broken_file_is_not_believed(host: Host, device: Device, text: str, profile: Profile | None) -> None:
    keep_profile(host, device, COMMAND, Profile(memory_bytes=GIB))
    path_of(host).write_text(text)
    assert find_profile(host, device, COMMAND) == profile


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        (("python", "train.py"), ("python", "train.py")),
        (("./train.sh", "-x"), ("/bin/sh", "./train.sh", "-x")),
        (("torchrun", "train.py"), ("/usr/bin/python3", "/usr/local/bin/torchrun", "train.py")),
    ],
)
def test_a_command_is_known_by_the_command_line_of_its_process(
    host: Host, device: Device, typed: tuple[str, ...], seen: tuple[str, ...]
) -> None:
    assert not KnownCommands(host)
    keep_profile(host, device, typed, Profile(use_percent=40.0))
    assert KnownCommands(host).use_percent(device, seen) == 40.0
    assert KnownCommands(host).use_percent(device, ("/bin/sh", "other")) is None
    assert KnownCommands(host).use_percent(device, ()) is None


@pytest.mark.needs_root
def test_the_file_of_another_user_is_not_believed(host: Host, device: Device) -> None:
    keep_profile(host, device, COMMAND, Profile(memory_bytes=GIB))
    os.chown(path_of(host), 65534, 65534)
    assert find_profile(host, device, COMMAND) is None


def test_the_oldest_files_go(host: Host, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_MOST_FILES", 10)
    for number in range(11):
        keep_profile(host, device, ("train", str(number)), Profile(memory_bytes=GIB))
        path = host.state_directory / "peaks" / f"{digest_of(device, ('train', str(number)))}.json"
        os.utime(path, (1000 + number,) * 2)
    keep_profile(host, device, ("train", "last"), Profile(memory_bytes=GIB))
    kept = [number for number in range(11) if find_profile(host, device, ("train", str(number))) is not None]
    assert kept
    assert 0 not in kept
    assert find_profile(host, device, ("train", "last")) is not None
