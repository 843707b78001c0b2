"""Leases: a GPU for one user for some hours (`gpushare reserve`).

A lease is a file in the directory of the claims (`host/claims.py`), which all users share; its owner, by the kernel, is whose
the lease is. It outlives the command that made it, so it names no process, but an end: it counts until then, and of a user
other than root for at most `MOST_SECONDS` from its creation. Of two leases on a GPU the earlier one counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.base.errors import InUse, OperationFailed
from gpushare.base.model import GpuLease
from gpushare.base.units import format_duration
from gpushare.host.capabilities import user_name
from gpushare.host.claims import claim_directory
from gpushare.host.host import make_private_directory
from gpushare.host.identity import boot_id, uptime
from gpushare.host.records import writing

if TYPE_CHECKING:
    from gpushare.host.host import Host

PREFIX: Final = "gpushare-lease-"
# What a user gets unless root has set less in gpushare.yaml.
MOST_SECONDS: Final = 12 * 3600.0
_NAME: Final = re.compile(rf"{PREFIX}[0-9a-f]{{16}}", re.ASCII)
_TEXT: Final = re.compile(
    rb"gpushare lease 1\nboot ([0-9a-f-]{1,36})\ngpu (GPU-[0-9a-fA-F-]{1,60})\nuntil (\d{1,12})\n", re.ASCII
)
# Further leases of one user do not count. Files of all are looked at: a user who makes thousands hides only leases of his own.
_MOST_OF_ONE_USER: Final = 64
_UNREADABLE_SECONDS: Final = 60.0


class _LeaseFile(NamedTuple):
    """A lease that counts, in the order in which they do: by ``created``, the file's ctime, the same for all who read it.

    ``until`` is in seconds since boot.
    """

    created: float
    path: Path
    gpu_uuid: str
    uid: int
    until: float


def leases(host: Host) -> dict[str, GpuLease]:
    """Return the leases in force by the UUID of their GPU."""
    found: dict[str, GpuLease] = {}
    for one in _files(host):
        left = one.until - uptime()
        found.setdefault(
            one.gpu_uuid, GpuLease(gpu_uuid=one.gpu_uuid, uid=one.uid, user=user_name(one.uid), seconds_left=left)
        )
    return found


def lease_of_others(host: Host, gpu_uuid: str | None) -> GpuLease | None:
    """Return the lease of another user on a GPU, or None."""
    lease = leases(host).get(gpu_uuid or "")
    return None if lease is None or lease.uid == host.uid else lease


def reserved_words(lease: GpuLease) -> str:
    """Return in words whose a GPU is: ``is reserved by alice for 3 h 20 min``."""
    return f"is reserved by {lease.user} for {format_duration(lease.seconds_left)}"


def take_lease(host: Host, gpu_uuid: str, seconds: float) -> None:
    """Reserve a GPU for this user; an earlier lease of the user on it is replaced.

    Raises:
        InUse: another user was first.
        NoPermission, OperationFailed: the lease cannot be written (code ``lease_unusable``).
    """
    directory = claim_directory(host)
    if directory.is_relative_to(host.run_directory):
        make_private_directory(directory)
    earlier = [one.path for one in _files(host) if one.gpu_uuid == gpu_uuid and one.uid == host.uid]
    path = directory / f"{PREFIX}{secrets.token_hex(8)}"
    text = f"gpushare lease 1\nboot {boot_id() or '-'}\ngpu {gpu_uuid}\nuntil {int(uptime() + seconds)}\n"
    with writing(path, "the lease", code="lease_unusable"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(descriptor, 0o644)
            os.write(descriptor, text.encode())
        except OSError:
            _remove(path)
            raise
        finally:
            os.close(descriptor)
    for old in earlier:
        _remove(old)
    lease = leases(host).get(gpu_uuid)
    if lease is None or lease.uid != host.uid:
        _remove(path)
        if lease is None:
            raise OperationFailed(
                "the lease was written, and does not count", "see: gpushare doctor", code="lease_unusable"
            )
        raise InUse(f"the GPU {reserved_words(lease)}", "see all leases: gpushare reserve", code="reserved")


def end_lease(host: Host, gpu_uuid: str) -> None:
    """End the lease of this user on a GPU; root ends that of anybody. Raises as `take_lease`."""
    for one in _files(host):
        if one.gpu_uuid == gpu_uuid and (one.uid == host.uid or host.root):
            with writing(one.path, "the lease", code="lease_unusable"):
                one.path.unlink(missing_ok=True)


def _files(host: Host) -> list[_LeaseFile]:
    directory = claim_directory(host)
    try:
        names = [name for name in sorted(os.listdir(directory)) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return sorted(_read(host, directory, names))


def _read(host: Host, directory: Path, names: list[str]) -> Iterator[_LeaseFile]:
    met: Counter[int] = Counter()
    for name in names:
        path = directory / name
        try:
            owner = os.lstat(path)
            # A second hard link would survive the end, and anybody may make one of a file that is another's.
            if not stat.S_ISREG(owner.st_mode) or owner.st_nlink != 1 or met[owner.st_uid] >= _MOST_OF_ONE_USER:
                continue
            met[owner.st_uid] += 1
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            seen, text = os.fstat(descriptor), os.read(descriptor, 512)
        except OSError:
            continue
        finally:
            os.close(descriptor)
        match = _TEXT.fullmatch(text)
        mine = seen.st_uid == host.uid or host.root
        # It may be another file by now.
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1 or seen.st_uid != owner.st_uid:
            continue
        if match is None:
            # Half written, by a gpushare that was killed.
            if mine and time.time() - seen.st_ctime > _UNREADABLE_SECONDS:
                _remove(path)
            continue
        # Its owner can set mtime to any time, but not ctime.
        begun = uptime() - max(0.0, time.time() - seen.st_ctime)
        until = float(match[3]) if seen.st_uid == 0 else min(float(match[3]), begun + MOST_SECONDS)
        if match[1].decode() == boot_id() and until > uptime():
            yield _LeaseFile(seen.st_ctime, path, match[2].decode(), seen.st_uid, until)
        elif mine:
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
