"""Root never writes through what others planted, and never waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.drive import World
from tests.security.conftest import Stranger, gpushare

H200 = "sim:h200"
NO_PERMISSION = 4
EXPORTS = ("systemd", "k8s", "slurm", "docker")


def names_of(engine: str, directory: Path) -> list[str]:
    """Return what an export writes."""
    place = directory / f"plain-{engine}"
    assert gpushare("export", engine, "--to", str(place)).code == 0
    return sorted(path.name for path in place.iterdir())


@pytest.mark.parametrize("engine", EXPORTS)
def test_an_export_follows_no_dangling_link(engine: str, mallory: Stranger, sticky: Path) -> None:
    assert gpushare("mps", "start", "-g", "0").code == 0
    secret = sticky / "roots"
    secret.mkdir(0o700)
    for number, name in enumerate(names_of(engine, secret)):
        place = mallory.home / f"{engine}-{number}"
        mallory.does(lambda place=place, name=name: (place.mkdir(), (place / name).symlink_to(secret / f"made-{name}")))
        answer = gpushare("export", engine, "--to", str(place))
        assert answer.code != 0, answer
        assert not (secret / f"made-{name}").exists()


def test_an_export_waits_for_no_fifo(mallory: Stranger, sticky: Path) -> None:
    (name, *_) = names_of("k8s", sticky)
    place = mallory.home / "fifo"
    mallory.does(lambda: (place.mkdir(), os.mkfifo(place / name)))
    assert gpushare("export", "k8s", "--to", str(place), seconds=20).code != 0


@pytest.mark.parametrize("kind", ["nothing", "link", "dangling link", "hard link", "fifo"])
def test_the_log_of_a_copy_goes_through_nothing_planted(kind: str, mallory: Stranger, sticky: Path) -> None:
    logs, victim = sticky / "logs", sticky / "victim"
    logs.mkdir()
    logs.chmod(0o1777)
    log = logs / "copy-0.log"
    if kind in {"link", "hard link"}:
        victim.write_text("precious")
        # A hard link to what one may not write is refused by many kernels (fs.protected_hardlinks).
        victim.chmod(0o666)

    def plant() -> None:
        if kind == "hard link":
            os.link(victim, log)
        elif kind == "fifo":
            os.mkfifo(log)
        elif kind != "nothing":
            log.symlink_to(victim)

    mallory.does(plant)
    answer = gpushare("farm", "--copies", "2", "--logs", str(logs), "--", "echo", "hello", seconds=60)
    assert answer.code == (0 if kind == "nothing" else 1), answer
    assert (f"copy 0: cannot write {log}" in answer.err) is (kind != "nothing")
    # The other copy is done.
    assert (logs / "copy-1.log").read_text() == "hello\n"
    assert (victim.read_text() if victim.exists() else None) == ("precious" if kind in {"link", "hard link"} else None)


def test_logs_go_into_no_directory_of_another_user(mallory: Stranger) -> None:
    logs = mallory.home / "logs"
    mallory.does(logs.mkdir)
    assert gpushare("farm", "--copies", "2", "--logs", str(logs), "--", "echo", "hello").code == NO_PERMISSION
    assert list(logs.iterdir()) == []


def test_root_writes_through_no_directory_link_of_another_user(mallory: Stranger, sticky: Path) -> None:
    words = ("observe", "--for", "1s", "--to", "FILE")
    target = sticky / "target"
    target.mkdir()
    place = mallory.home / words[0]
    mallory.does(lambda: place.symlink_to(target))
    answer = gpushare(*(str(place / "file") if word == "FILE" else word for word in words))
    assert answer.code in {1, 4}, answer
    assert len(answer.lines("hint")) == 1
    assert list(target.iterdir()) == []
    own = gpushare(*(str(target / "file") if word == "FILE" else word for word in words))
    assert own.code == 0, own
    assert [path.name for path in target.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["journal.json", "not-restored-1.json"])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "strangers"])
def test_something_in_place_of_a_state_file_hangs_nothing(name: str, kind: str, mallory: Stranger) -> None:
    world = World("sim:a100-80gb")
    assert gpushare("mig", "status", host=world.spec).code in {0, 3}
    path = world.directory / "run" / "mig" / name
    path.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text('{"schema": 1}')
        os.chown(path, mallory.uid, mallory.uid)
    for words in (
        ("mig", "status"),
        ("status",),
        ("doctor",),
        ("mig", "enable", "-g", "0", "-y"),
        ("mig", "recover", "-y"),
    ):
        gpushare(*words, host=world.spec, seconds=20)


@pytest.mark.parametrize("kind", ["fifo", "link", "strangers"])
def test_a_planted_record_of_a_daemon_is_not_believed(kind: str, mallory: Stranger, alice: Stranger) -> None:
    world = World(H200)
    assert gpushare("mps", "start", "-g", "0").code == 0
    (record,) = world.directory.glob("run/mps/*/daemon.json")
    text = record.read_text()
    assert gpushare("mps", "stop", "-g", "0").code == 0
    with alice.runs(["sleep", "600"]) as victim:
        planted = text.replace(text.partition('"pid": ')[2].partition(",")[0], str(victim), 1)
        if kind == "fifo":
            os.mkfifo(record)
        elif kind == "link":
            (mallory.home / "record").write_text(planted)
            os.chown(mallory.home / "record", mallory.uid, mallory.uid)
            record.symlink_to(mallory.home / "record")
        else:
            record.write_text(planted)
            os.chown(record, mallory.uid, mallory.uid)
        for words in (("status",), ("mps", "status"), ("doctor",), ("mps", "stop", "-g", "0", "--force")):
            gpushare(*words, seconds=20)
        assert Path(f"/proc/{victim}").exists()


@pytest.mark.parametrize("kind", ["strangers", "open", "link"])
def test_a_run_directory_of_anothers_is_refused(kind: str, mallory: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may name one (sudo -E): whose it is decides, not that root may write there."""
    from gpushare.base.errors import NoPermission
    from gpushare.host.host import local_run_directory, make_private_directory

    place = mallory.home / f"run-{kind}"
    if kind == "link":
        mallory.does(lambda: place.symlink_to("/etc"))
    else:
        mallory.does(lambda: place.mkdir(0o755))
    if kind == "open":
        os.chown(place, 0, 0)
        place.chmod(0o777)
    monkeypatch.setenv("GPUSHARE_RUN_DIR", str(place))
    with pytest.raises(NoPermission):
        make_private_directory(local_run_directory(0))
