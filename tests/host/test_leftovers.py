"""What a kill left of a file that was being written: removed, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpushare
from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.host.records import replace_file, sweep_leftovers

LEFT = (
    "mig/.journal-abcdefgh",
    "mps/mig-1/.daemon-abcdefgh",
    "mps/mig-1/.daemon-0123_xyz",
    "on-demand/.7-0-4-abcdefgh",
)


@pytest.fixture
def host() -> Host:
    host = connect("sim:a100-80gb")
    for path in (
        *(host.run_directory / name for name in ("mig", "mps/mig-1", "on-demand")),
        host.state_directory / "names",
    ):
        path.mkdir(parents=True, exist_ok=True)
    return host


def put(directory: Path, *names: str) -> list[Path]:
    paths = [directory / name for name in names]
    for path in paths:
        path.write_text("{")
    return paths


def test_temporary_files_of_ours_go_and_all_else_stays(host: Host) -> None:
    gone = [*put(host.run_directory, *LEFT), *put(host.state_directory, "names/.mig-abcdefgh", ".applied-abcdefgh")]
    stays = put(host.run_directory, "mig/journal.json", "mps/mig-1/.daemon-short", "mps/.journal-abcdefgh")
    # The directory of the state may be any that a user names.
    stays += put(host.state_directory, ".other-abcdefgh")
    sweep_leftovers(host)
    assert [path for path in gone if path.exists()] == []
    assert all(path.exists() for path in stays)


def test_the_directories_of_all_records_are_swept(host: Host) -> None:
    sources = "".join(path.read_text() for path in Path(gpushare.__file__).parent.rglob("*.py"))
    directories = set(re.findall(r'RecordStore\(\w+, "([\w-]+)"', sources))
    assert {"jobs", "tried"} <= directories
    for directory in sorted(directories):
        for root in (host.run_directory, host.state_directory):
            (root / directory).mkdir(parents=True, exist_ok=True)
        left = [
            *put(host.run_directory / directory, ".1-abcdefgh"),
            *put(host.state_directory / directory, ".1-abcdefgh"),
        ]
        sweep_leftovers(host)
        assert not all(path.exists() for path in left), directory


def test_what_is_being_written_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpushare.host import records

    real, path = records.os.replace, host.run_directory / "mig" / "journal.json"
    seen: list[str] = []

    def swept(source: str, target: Path) -> None:
        sweep_leftovers(host)
        seen.append(Path(source).read_text())
        real(source, target)

    monkeypatch.setattr(records.os, "replace", swept)
    replace_file(path, "[]")
    assert (seen, path.read_text()) == (["[]"], "[]")


@pytest.mark.parametrize("planted", ["mps/mig-2", "mps", "mig", ""])
def test_a_link_that_others_planted_leads_nowhere(host: Host, sim_dir: Path, tmp_path: Path, planted: str) -> None:
    """Their /tmp/gpushare-1000 would else choose whose files go."""
    victim = tmp_path / "victim"
    (victim / "mig-1").mkdir(parents=True)
    (victim / "mig").mkdir()
    (victim / "mps").mkdir()
    kept = put(victim, ".notes-abcdefgh", "mig/.notes-abcdefgh", "mig-1/.notes-abcdefgh", "mps/.notes-abcdefgh")
    link = host.run_directory / planted
    if link.exists():
        link.rename(sim_dir / "before")
    link.symlink_to(victim)
    sweep_leftovers(host)
    assert all(path.exists() for path in kept)


def test_a_directory_that_others_may_write_is_left_alone(host: Host) -> None:
    (kept,) = put(host.run_directory / "mig", ".journal-abcdefgh")
    host.run_directory.chmod(0o777)
    sweep_leftovers(host)
    assert kept.exists()
    host.run_directory.chmod(0o755)
    sweep_leftovers(host)
    assert not kept.exists()
