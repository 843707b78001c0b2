"""A host, where gpushare keeps what dies with a reboot, and who may write there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.base.errors import BadUsage, GpushareError, NoPermission
from gpushare.connect import connect
from gpushare.host import host as host_module
from gpushare.host.host import (
    SYSTEM_RUN_DIRECTORY,
    is_trusted_directory,
    local_host,
    local_run_directory,
    local_state_directory,
    make_private_directory,
)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what stands in for /tmp and for /run/user, with no directory of this user yet, and neither variable set."""
    found = SimpleNamespace(temporary=tmp_path / "tmp", runtime=tmp_path / "user", uid=os.geteuid() or 1000)
    found.temporary.mkdir()
    found.runtime.mkdir()
    found.own = found.temporary / f"gpushare-{found.uid}"
    found.session = found.runtime / str(found.uid)
    monkeypatch.setattr(host_module, "TEMPORARY", str(found.temporary))
    monkeypatch.setattr(host_module, "RUNTIME", str(found.runtime))
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "GPUSHARE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    return found


def of_user(path: Path, uid: int) -> Path:
    path.mkdir(parents=True)
    os.chown(path, uid, uid)
    return path


def test_the_run_directory_is_the_same_with_and_without_a_session(
    places: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_run_directory(places.uid) == places.own
    of_user(places.session, places.uid)
    assert local_run_directory(places.uid) == places.own
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places.session))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert local_run_directory(places.uid) == places.own
    assert local_run_directory(0) == SYSTEM_RUN_DIRECTORY
    monkeypatch.setenv("GPUSHARE_RUN_DIR", "relative")
    assert local_run_directory(0) == local_run_directory(places.uid) == Path("relative").absolute()


@pytest.mark.needs_root
def test_a_directory_that_another_user_has_made_first_is_not_used(
    places: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = places.uid + 1
    of_user(places.own, stranger)
    of_user(places.session, places.uid)
    assert local_run_directory(places.uid) == places.session / "gpushare"
    # The same from every shell, and without a session the name is said.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert local_run_directory(places.uid) == places.session / "gpushare"
    monkeypatch.delenv("TMPDIR")
    places.session.rmdir()
    places.runtime.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in {str(places.session), str(places.runtime)})
    state = tmp_path / "state"
    monkeypatch.setenv("GPUSHARE_STATE_DIR", str(state))
    assert local_run_directory(places.uid) == state / "run"
    # Nowhere: the first is said.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert local_run_directory(places.uid) == places.own


def test_a_place_that_has_records_is_kept_when_another_becomes_free(
    places: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("GPUSHARE_STATE_DIR", str(state))
    monkeypatch.setattr(host_module, "_belongs_to", lambda place, _: place == str(state / "run"))
    assert local_run_directory(places.uid) == state / "run"


@pytest.mark.needs_root
def test_a_link_of_another_user_is_not_followed(places: SimpleNamespace, tmp_path: Path) -> None:
    of_user(places.session, places.uid)
    places.own.symlink_to(of_user(tmp_path / "mine", places.uid))
    os.lchown(places.own, places.uid + 1, places.uid + 1)
    assert local_run_directory(places.uid) == places.session / "gpushare"


def test_a_user_sees_roots_daemons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    host = local_host()
    assert (host.uid, tuple(host.shared_run_directories), host.is_simulated) == (1000, (SYSTEM_RUN_DIRECTORY,), False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert tuple(local_host().shared_run_directories) == ()


@pytest.mark.parametrize("spec", ["sim:h200", " SIM:H200 ", "Sim:1xh200"])
def test_a_simulated_host_by_any_spelling(spec: str) -> None:
    host = connect(spec)
    assert (host.spec, host.is_simulated) == ("sim:h200", True)


@pytest.mark.parametrize("spec", ["", "remote", "sim", "sim:", "sim:banana", "sim:0xt4", "local:"])
def test_what_is_no_host_is_bad_usage(spec: str) -> None:
    with pytest.raises(BadUsage):
        connect(spec)


def test_this_machine_is_local() -> None:
    assert connect("local").spec == "local"


def refused(path: Path) -> GpushareError:
    with pytest.raises(NoPermission) as caught:
        make_private_directory(path)
    assert str(path) in caught.value.message
    return caught.value


def test_a_directory_is_made_with_its_parents(sim_dir: Path) -> None:
    make_private_directory(sim_dir / "a" / "b")
    make_private_directory(sim_dir / "a" / "b")
    assert (sim_dir / "a" / "b").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_directory_that_others_may_write_is_refused(sim_dir: Path, mode: int) -> None:
    path = sim_dir / "open"
    path.mkdir()
    path.chmod(mode)
    error = refused(path)
    assert error.code == "directory_open"
    assert f"{mode:o}" in error.message
    path.chmod(mode | 0o1000)
    make_private_directory(path)


def test_a_directory_of_somebody_else_is_refused(sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sim_dir / "theirs"
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4343)
    assert refused(path).code == "wrong_owner"


@pytest.mark.needs_root
def test_a_link_of_somebody_else_is_refused_and_not_trusted_and_ones_own_is_followed(sim_dir: Path) -> None:
    """A link of ones own or of root is as good as the directory."""
    make_private_directory(sim_dir / "there" / "mps")
    link = sim_dir / "link"
    link.symlink_to(sim_dir / "there")
    make_private_directory(link)
    assert is_trusted_directory(link, "mps")
    os.chown(link, 4242, -1, follow_symlinks=False)
    assert refused(link).code == "wrong_owner"
    assert not is_trusted_directory(link, "mps")
    os.chown(sim_dir / "there" / "mps", 4242, -1)
    assert not is_trusted_directory(sim_dir / "there", "mps")


def test_a_directory_that_may_not_be_written_is_refused(sim_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert refused(sim_dir).code == "directory_unwritable"


def test_a_file_in_the_way_and_a_name_that_is_too_long_are_refused(sim_dir: Path) -> None:
    (sim_dir / "file").write_text("")
    for path in (sim_dir / "file", sim_dir / "file" / "below", sim_dir / ("x" * 300)):
        assert refused(path).code == "directory_unwritable"


def test_the_umask_does_not_close_what_we_make_and_what_was_there_stays(sim_dir: Path) -> None:
    (sim_dir / "old").mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        make_private_directory(sim_dir / "old" / "a" / "b")
    finally:
        os.umask(before)
    modes = [(sim_dir / name).stat().st_mode & 0o777 for name in ("old", "old/a", "old/a/b")]
    assert modes == [0o700, 0o755, 0o755]


def test_what_lies_below_a_trusted_directory_is_looked_at_one_by_one(sim_dir: Path) -> None:
    make_private_directory(sim_dir / "run" / "mps" / "gpu-1")
    assert is_trusted_directory(sim_dir / "run")
    assert is_trusted_directory(sim_dir / "run", "mps", "gpu-1")
    assert not is_trusted_directory(sim_dir / "run", "mps", "gpu-2")
    assert not is_trusted_directory(sim_dir / "other", "mps")
    (sim_dir / "run" / "file").write_text("")
    assert not is_trusted_directory(sim_dir / "run", "file")
    for mode, trusted in ((0o777, False), (0o775, False), (0o1777, True), (0o755, True)):
        (sim_dir / "run" / "mps").chmod(mode)
        assert is_trusted_directory(sim_dir / "run", "mps", "gpu-1") is trusted


def test_a_user_whom_nobody_has_named_and_without_home_has_a_place_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "GPUSHARE_STATE_DIR", "GPUSHARE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2_000_111)
    assert str(local_state_directory(2_000_111)) == "/nonexistent/.local/state/gpushare"
    assert str(local_run_directory(2_000_111)) == "/tmp/gpushare-2000111"


def test_a_relative_state_directory_of_the_desktop_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification says so; the places above it have no end."""
    monkeypatch.delenv("GPUSHARE_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    for value in ("state", "", "./state"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert str(local_state_directory(1234)) == "/home/ada/.local/state/gpushare"
    monkeypatch.setenv("XDG_STATE_HOME", "/data/state")
    assert str(local_state_directory(1234)) == "/data/state/gpushare"
