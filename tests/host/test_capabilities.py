"""The driver's capability files and their nodes, below a directory that stands for the root."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.host import capabilities as module
from gpushare.host.capabilities import Capabilities, Capability, NodeAccess, parse_capability, user_id, user_name
from tests.errors import fails

TEXT = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: {}\n"
MIG = "proc/driver/nvidia/capabilities/gpu0/mig"


def put(root: Path, place: str, minor: int, modify: int = 1) -> Path:
    path = root / MIG / place / "access"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT.format(minor, modify))
    node = root / f"dev/nvidia-caps/nvidia-cap{minor}"
    node.parent.mkdir(parents=True, exist_ok=True)
    node.touch()
    node.chmod(0o444)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with two GPU instances of GPU 0, one with two compute instances, one without."""
    for place, minor in (("gi1", 12), ("gi1/ci0", 13), ("gi1/ci1", 14), ("gi9", 84)):
        put(tmp_path, place, minor)
    return tmp_path


def only(root: Path, place: tuple[int, int | None] = (1, None)) -> Capability:
    found = Capabilities(root).read(0, *place)
    assert found is not None
    return found


def test_the_text_of_a_file() -> None:
    assert parse_capability("/proc/x", "DeviceFileMinor: 12\nDeviceFileMode: 256\nDeviceFileModify: 0\n") == Capability(
        path="/proc/x", minor=12, mode=0o400, modify=False
    )
    assert parse_capability("/proc/x", "DeviceFileMinor: 12\n") == Capability(
        path="/proc/x", minor=12, mode=0o444, modify=True
    )
    assert parse_capability("/proc/x", "") is None
    assert parse_capability("/proc/x", "DeviceFileMinor: x\nDeviceFileMode: 256\n") is None


def test_all_instances_of_a_gpu(root: Path) -> None:
    found = Capabilities(root).of_gpu(0)
    assert {place: one.minor for place, one in found.items()} == {(1, None): 12, (1, 0): 13, (1, 1): 14, (9, None): 84}
    assert found[1, 0].path == "/proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access"
    assert found[1, 0].node == "/dev/nvidia-caps/nvidia-cap13"
    assert found[1, 0].mode == 0o444


def test_absent_files_are_none(root: Path, tmp_path: Path) -> None:
    capabilities = Capabilities(root)
    assert capabilities.read(0, 2) is None
    assert capabilities.read(0, 1, 7) is None
    assert capabilities.read(3, 1) is None
    assert capabilities.of_gpu(3) == {}
    assert Capabilities(tmp_path / "none").of_gpu(0) == {}


def test_what_is_no_instance_is_passed_over(root: Path) -> None:
    (root / MIG / "given").mkdir()
    (root / MIG / "gi").mkdir()
    (root / MIG / "gi5").mkdir()
    assert sorted({place[0] for place in Capabilities(root).of_gpu(0)}) == [1, 9]


def test_modify_is_written_in_the_words_of_the_driver(root: Path) -> None:
    Capabilities(root).set_modify(only(root), modify=False)
    # The driver keeps its own text; a file takes the beginning of it.
    assert (root / MIG / "gi1/access").read_text().startswith("DeviceFileModify: 0\n")
    Capabilities(root).set_modify(only(root, (9, None)), modify=True)
    assert (root / MIG / "gi9/access").read_text().startswith("DeviceFileModify: 1\n")


def test_a_node_as_nvidia_modprobe_gives_it(root: Path) -> None:
    assert Capabilities(root).access(only(root)) == NodeAccess(owner=os.getuid(), mode=0o444)
    (root / "dev/nvidia-caps/nvidia-cap12").unlink()
    assert Capabilities(root).access(only(root)) is None


@pytest.mark.needs_root
def test_a_node_for_one_user(root: Path) -> None:
    capabilities = Capabilities(root)
    capabilities.set_access(only(root), NodeAccess(owner=1, mode=0o400))
    assert capabilities.access(only(root)) == NodeAccess(owner=1, mode=0o400)
    status = (root / "dev/nvidia-caps/nvidia-cap12").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1, 0, 0o400)


def test_the_list_in_the_words_of_the_kernel() -> None:
    """Bytes of ``getfattr -e hex -n system.posix_acl_access`` after ``setfacl -m u:1:r -m u:65534:r`` on mode 0400."""
    raw = bytes.fromhex(
        "02000000 01000400ffffffff 0200040001000000 02000400feff0000 04000000ffffffff 10000400ffffffff 20000000ffffffff"
    )
    assert module._acl_bytes(0o400, (65534, 1), 4) == raw
    assert module._users_in(raw, 4) == (1, 65534)
    # A user of the list without the right to read has nothing.
    assert module._users_in(raw.replace(bytes.fromhex("0200040001000000"), bytes.fromhex("0200000001000000")), 4) == (
        65534,
    )


@given(mode=st.sampled_from([0o400, 0o440, 0o444]), users=st.sets(st.integers(0, 2**32 - 2), max_size=20))
def test_a_list_tells_the_users_that_were_put_into_it(mode: int, users: set[int]) -> None:
    assert module._users_in(module._acl_bytes(mode, tuple(users), 4), 4) == tuple(sorted(users))


@pytest.fixture
def acl(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Keep extended attributes here: not every file system that tests run on has access control lists."""
    kept: dict[str, bytes] = {}

    def get(path: Path, _name: str) -> bytes:
        if str(path) not in kept:
            raise OSError(61, "No data available")
        return kept[str(path)]

    monkeypatch.setattr(module.os, "getxattr", get)
    monkeypatch.setattr(module.os, "setxattr", lambda path, _name, value: kept.update({str(path): value}))
    monkeypatch.setattr(module.os, "removexattr", lambda path, _name: kept.pop(str(path), None))
    monkeypatch.setattr(module.os, "chown", lambda *_: None)
    return kept


def test_a_node_for_several_users(root: Path, acl: dict[str, bytes]) -> None:
    capabilities, wanted = Capabilities(root), NodeAccess(owner=os.getuid(), mode=0o400, users=(1, 2))
    capabilities.set_access(only(root), wanted)
    assert list(acl) == [str(root / "dev/nvidia-caps/nvidia-cap12")]
    # What the kernel shows as the bits of the group is the mask of the list.
    (root / "dev/nvidia-caps/nvidia-cap12").chmod(0o440)
    assert capabilities.access(only(root)) == wanted
    capabilities.set_access(only(root), NodeAccess(owner=os.getuid(), mode=0o444))
    assert acl == {}
    assert capabilities.access(only(root)) == NodeAccess(owner=os.getuid(), mode=0o444)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (13, NoPermission),
        (1, NoPermission),
        (30, NoPermission),
        (2, NotFound),
        (95, NotSupported),
        (5, OperationFailed),
    ],
)
def test_what_the_kernel_refuses(
    number: int, kind: type[GpushareError], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "chmod", refuse)
    with pytest.raises(kind) as raised:
        Capabilities(root).set_access(only(root), NodeAccess(mode=0o400))
    assert "/dev/nvidia-caps/nvidia-cap12" in raised.value.message
    monkeypatch.setattr(module.os, "write", refuse)
    with pytest.raises(kind):
        Capabilities(root).set_modify(only(root), modify=False)


@pytest.mark.parametrize(("number", "kind"), [(1, NoPermission), (5, OperationFailed), (61, None), (95, None)])
def test_a_list_that_cannot_be_removed_is_an_error(
    number: int, kind: type[GpushareError] | None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its users would keep what they had."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "removexattr", refuse)
    monkeypatch.setattr(module.os, "chown", lambda *_: None)
    with contextlib.nullcontext() if kind is None else pytest.raises(kind):
        Capabilities(root).set_access(only(root), NodeAccess(mode=0o400))


def test_an_instance_that_is_gone(root: Path) -> None:
    capability = only(root)
    (root / MIG / "gi1/access").unlink()
    (root / "dev/nvidia-caps/nvidia-cap12").unlink()
    with pytest.raises(NotFound):
        Capabilities(root).set_modify(capability, modify=False)
    with pytest.raises(NotFound):
        Capabilities(root).set_access(capability, NodeAccess())


def test_users_of_the_machine() -> None:
    assert (user_id("root"), user_id("0"), user_name(0)) == (0, 0, "root")
    assert (user_id("3999999999"), user_name(3999999999)) == (3999999999, "3999999999")
    for unknown in ("no-such-user", str(2**32 - 1), "9" * 40, "-1", "", "a" * 5000):
        with fails(NotFound, "no_user"):
            user_id(unknown)


@pytest.mark.needs_root
def test_the_kernel_lets_in_only_whom_the_list_names(sim_dir: Path) -> None:
    put(sim_dir, "gi1", 12)
    for directory in (sim_dir, sim_dir / "dev", sim_dir / "dev/nvidia-caps"):
        directory.chmod(0o755)
    capabilities, node = Capabilities(sim_dir), sim_dir / "dev/nvidia-caps/nvidia-cap12"
    try:
        capabilities.set_access(only(sim_dir), NodeAccess(mode=0o400, users=(1, 2)))
    except NotSupported:
        pytest.skip("this file system keeps no access control lists")
    assert [may_read(node, uid) for uid in (1, 2, 7)] == [True, True, False]
    capabilities.set_access(only(sim_dir), NodeAccess(owner=7, mode=0o400))
    assert [may_read(node, uid) for uid in (1, 2, 7)] == [False, False, True]
    capabilities.set_access(only(sim_dir), NodeAccess())
    assert [may_read(node, uid) for uid in (1, 2, 7)] == [True, True, True]


def may_read(path: Path, uid: int) -> bool:
    """Return whether a process of this user may open a file."""
    done = subprocess.run(["cat", str(path)], user=uid, group=uid, extra_groups=[], capture_output=True, check=False)
    return done.returncode == 0


def test_a_name_in_a_hint_is_one_word_to_the_shell() -> None:
    with pytest.raises(NotFound) as caught:
        user_id("nobody; reboot")
    assert caught.value.hint == "a user is needed here, not a group; check the spelling: getent passwd 'nobody; reboot'"
