"""Who may use a MIG instance: the driver's capability files and their device nodes.

``/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<G>/access`` and ``.../ci<C>/access`` have the minor number and the
mode of ``/dev/nvidia-caps/nvidia-cap<minor>``. nvidia-modprobe gives a node this mode, and root, at each use, unless
``DeviceFileModify: 0`` was written to the file (MIG User Guide, "Device Nodes and Capabilities"; nv-caps.c of
NVIDIA's open kernel modules). The files, and what was written to them, disappear with their instance.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpushare.base.errors import GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.values import dataclass

# GPU instance id, and compute instance id; None is the node of the GPU instance itself.
InstanceIds = tuple[int, int | None]

NODES: Final = "/dev/nvidia-caps"
DEFAULT_MODE: Final = 0o444
_FIELD: Final = r"(?am)^DeviceFile(Minor|Mode|Modify):\s*(\d{1,9})\b"
# linux/posix_acl_xattr.h: a version, then entries of tag, permissions and id.
_ACL: Final = "system.posix_acl_access"
_ACL_VERSION, _NO_ID = 2, 0xFFFFFFFF
_USER_OWNER, _USER, _GROUP_OWNER, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ: Final = 4


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A capability of the driver: the right to use a GPU instance, or a compute instance of it."""

    # Its file below /proc/driver/nvidia/capabilities.
    path: str
    minor: int
    # The mode that nvidia-modprobe gives the node: 0444.
    mode: int = DEFAULT_MODE
    # nvidia-modprobe may change the node.
    modify: bool = True

    @property
    def node(self) -> str:
        return f"{NODES}/nvidia-cap{self.minor}"


@dataclass(frozen=True, kw_only=True)
class NodeAccess:
    """Access to a node: its owner and mode, and the user ids of its access control list."""

    owner: int = 0
    mode: int = DEFAULT_MODE
    users: tuple[int, ...] = ()


class Capabilities:
    """The capabilities of a host: of this machine here, where ``root`` replaces ``/``; a simulated host overrides it."""

    def __init__(self, root: str | Path = "/") -> None:
        self._root = Path(root)

    def of_gpu(self, minor: int) -> Mapping[InstanceIds, Capability]:
        """Return the capabilities of the instances of a GPU, given by minor number."""
        capabilities: dict[InstanceIds, Capability] = {}
        for gpu_instance in _numbers_in(self._real(_mig_directory(minor)), "gi"):
            of_whole_instance = self.read(minor, gpu_instance)
            if of_whole_instance is not None:
                capabilities[gpu_instance, None] = of_whole_instance
            for compute_instance in _numbers_in(self._real(_mig_directory(minor, gpu_instance)), "ci"):
                of_compute_instance = self.read(minor, gpu_instance, compute_instance)
                if of_compute_instance is not None:
                    capabilities[gpu_instance, compute_instance] = of_compute_instance
        return capabilities

    def read(self, minor: int, gpu_instance: int, compute_instance: int | None = None) -> Capability | None:
        """Return one capability, or None if it has no file."""
        path = f"{_mig_directory(minor, gpu_instance, compute_instance)}/access"
        try:
            text = self._real(path).read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        return parse_capability(path, text)

    def access(self, capability: Capability) -> NodeAccess | None:
        """Return the access to the node (stat and its POSIX ACL), or None if there is no node."""
        try:
            status = self._real(capability.node).stat()
        except OSError:
            return None
        users = listed_users(self._real(capability.node), _READ)
        mode = stat.S_IMODE(status.st_mode)
        # With a list, the group bits are its mask.
        return NodeAccess(owner=status.st_uid, mode=mode & ~0o070 if users else mode, users=users)

    def set_modify(self, capability: Capability, *, modify: bool) -> None:
        """Write ``DeviceFileModify`` to the capability's file: whether nvidia-modprobe resets the mode of its node at each use.

        Raises:
            NoPermission: not root.
            NotFound: the instance is gone.
        """
        try:
            # One write: the driver parses it when the file is closed.
            descriptor = os.open(self._real(capability.path), os.O_WRONLY)
            try:
                os.write(descriptor, modify_line(modify=modify).encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _refused_error(capability.path, error) from None

    def set_access(self, capability: Capability, access: NodeAccess) -> None:
        """Set owner (and group root), mode and access control list of the node.

        Raises:
            NoPermission: not root.
            NotFound: there is no node.
            NotSupported: its file system has no access control lists.
        """
        node = self._real(capability.node)
        try:
            # Remove the old list first: its users must not keep access while the node changes, or if a later step fails.
            set_listed_users(node, access.mode, (), _READ)
            # Mode before owner: a new owner could widen the mode in between.
            os.chmod(node, access.mode)
            os.chown(node, access.owner, 0)
            set_listed_users(node, access.mode, access.users, _READ)
        except OSError as error:
            raise _refused_error(capability.node, error) from None

    def _real(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def parse_capability(path: str, text: str) -> Capability | None:
    """Return the capability from the text of its file; None without a minor number."""
    fields = {name: int(value) for name, value in re.findall(_FIELD, text)}
    if "Minor" not in fields:
        return None
    return Capability(
        path=path,
        minor=fields["Minor"],
        mode=fields.get("Mode", DEFAULT_MODE),
        modify=bool(fields.get("Modify", 1)),
    )


def modify_line(*, modify: bool) -> str:
    return f"DeviceFileModify: {int(modify)}\n"


# Users that a simulated host has and this machine has not, by id.
SIMULATED_USERS: Final[dict[int, str]] = {}


def user_id(name: str) -> int:
    """Return the id of a user, given by name or id; an id needs no name, as for chown.

    Raises:
        NotFound: there is no such user.
    """
    import pwd

    if name.isascii() and name.isdigit() and len(name) <= 10 and int(name) < _NO_ID:
        return int(name)
    with contextlib.suppress(KeyError, ValueError):
        return pwd.getpwnam(name).pw_uid
    for uid, simulated_name in SIMULATED_USERS.items():
        if simulated_name == name:
            return uid
    raise NotFound(
        f"there is no user '{name[:60]}'",
        f"a user is needed here, not a group; check the spelling: getent passwd {shlex.quote(name[:60])}",
        code="no_user",
    )


def group_id(name: str) -> int:
    """Return the id of a group of this machine, given by name or id.

    Raises:
        NotFound: there is no such group.
    """
    import grp

    try:
        if name.isascii() and name.isdigit():
            return grp.getgrgid(int(name)).gr_gid
        return grp.getgrnam(name).gr_gid
    except (KeyError, OverflowError, ValueError):
        raise NotFound(
            f"there is no group '{name[:60]}'",
            f"check the spelling: getent group {shlex.quote(name[:60])}",
            code="no_group",
        ) from None


def user_name(uid: int) -> str:
    """Return the name of a user; the number if there is none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return SIMULATED_USERS.get(uid, str(uid))


def _mig_directory(minor: int, gpu_instance: int | None = None, compute_instance: int | None = None) -> str:
    """Return the directory of the capabilities of a GPU, a GPU instance or a compute instance."""
    path = f"/proc/driver/nvidia/capabilities/gpu{minor}/mig"
    if gpu_instance is not None:
        path += f"/gi{gpu_instance}"
    return path if compute_instance is None else f"{path}/ci{compute_instance}"


def _numbers_in(directory: Path, prefix: str) -> list[int]:
    """Return the numbers of the entries of a directory with a prefix: 0 and 3 of ``gi0``, ``gi3``."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def _refused_error(path: str, error: OSError) -> GpushareError:
    """Return the error about a file or node of a capability that could not be changed."""
    missing = NotFound(
        f"there is no {path}", "see which instances are there: gpushare mig status", code="no_capability"
    )
    return change_refused_error(path, error, missing, "grant the instance to one user")


# -- access control lists --------------------------------------------------------------------------


def listed_users(path: Path, permission: int) -> tuple[int, ...]:
    """Return the ids of the users whom the access control list of a file gives a permission; empty if it has no list."""
    with contextlib.suppress(OSError, struct.error):
        return _users_in(os.getxattr(path, _ACL), permission)
    return ()


def set_listed_users(path: Path, mode: int, users: Sequence[int], permission: int) -> None:
    """Give users a permission by the access control list of a file; without users, remove the list.

    ``mode`` is what the owner, the group and others keep.

    Raises:
        OSError: it cannot be written; ENOTSUP: the file system has no lists.
    """
    if users:
        os.setxattr(path, _ACL, _acl_bytes(mode, users, permission))
    else:
        try:
            os.removexattr(path, _ACL)
        except OSError as error:
            # It has none, or its file system has no lists.
            if error.errno not in {errno.ENODATA, errno.ENOTSUP}:
                raise


def change_refused_error(path: str, error: OSError, missing: GpushareError, hint_without_lists: str) -> GpushareError:
    """Return the error about access to a path that could not be changed.

    ``missing`` is the error if there is no such path, ``hint_without_lists`` the hint if its file system has no lists.
    """
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return NoPermission(f"may not change {path}: {error.strerror}", "run it as root: sudo gpushare ...")
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return missing
    if error.errno == errno.ENOTSUP:
        return NotSupported(
            f"the file system of {path} has no access control lists, which access for several users needs",
            hint_without_lists,
            code="no_acl",
        )
    return OperationFailed(f"cannot change {path}: {error.strerror}", "see what is wrong: gpushare doctor")


def _acl_bytes(mode: int, users: Sequence[int], permission: int) -> bytes:
    """Return an access control list as the kernel takes it, with the bits of a mode."""
    entries = [(_USER_OWNER, mode >> 6 & 7, _NO_ID)]
    entries += [(_USER, permission, uid) for uid in sorted(users)]
    entries += [(_GROUP_OWNER, mode >> 3 & 7, _NO_ID), (_MASK, permission, _NO_ID), (_OTHER, mode & 7, _NO_ID)]
    return struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def _users_in(raw: bytes, permission: int) -> tuple[int, ...]:
    """Return the users whom an access control list, as the kernel gives it, gives a permission."""
    entries = struct.iter_unpack("<HHI", raw[struct.calcsize("<I") :])
    return tuple(sorted(uid for tag, permissions, uid in entries if tag == _USER and permissions & permission))
