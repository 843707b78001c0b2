"""Leases: a GPU for one user for some hours (`gpushare reserve`).

A lease is a file in the directory of the claims (`host/claims.py`), which all users share; it belongs to the owner of the
file. It outlives the command that made it, so it names an end instead of a process. It counts until then; a lease of a user
other than root counts at most for the time that root allows (`UserLimits.longest_lease_seconds`) after its start. A renewal
keeps the start, so that others get the GPU after that time. Both times are of the clock since boot, which cannot be set. Of
two leases on a GPU the earlier one counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gpushare.base.errors import InUse, OperationFailed
from gpushare.base.model import GpuLease
from gpushare.base.units import format_duration
from gpushare.host.capabilities import user_name
from gpushare.host.claims import claim_directory, read_shared_file, write_shared_file
from gpushare.host.host import Host
from gpushare.host.identity import boot_id, uptime
from gpushare.host.records import writing
from gpushare.memory.admission import UserLimits

PREFIX: Final = "gpushare-lease-"
_NAME: Final = re.compile(rf"{PREFIX}[0-9a-f]{{16}}", re.ASCII)
_TEXT: Final = re.compile(
    rb"gpushare lease 1\nboot (?P<boot>[0-9a-f-]{1,36})\ngpu (?P<gpu>GPU-[0-9a-fA-F-]{1,60})\n"
    rb"since (?P<since>\d{1,12})\nuntil (?P<until>\d{1,12})\n",
    re.ASCII,
)
# More than a lease has.
_MOST_BYTES: Final = 512
# Further leases of one user do not count. Files of all are looked at: a user who makes thousands hides only leases of his own.
_MOST_OF_ONE_USER: Final = 64
_UNREADABLE_SECONDS: Final = 60.0


class _LeaseFile(NamedTuple):
    """The file of a lease; sorted, the one that counts comes first. Times are in seconds since boot.

    ``created`` is by the file's ctime, which its owner cannot set, and not before the lease begins. A clock that is set back
    makes a file look younger.
    """

    created: float
    path: Path
    gpu_uuid: str
    uid: int
    since: float
    until: float
    # What the file itself says: root may have shortened it, and may lengthen it again.
    written_until: float


def leases(host: Host, limits: UserLimits) -> dict[str, GpuLease]:
    """Return the lease in force of each GPU that has one, by UUID."""
    first: dict[str, GpuLease] = {}
    now = uptime()
    for file in _lease_files(host, limits):
        if not file.since <= now < file.until:
            continue
        lease = GpuLease(
            gpu_uuid=file.gpu_uuid,
            uid=file.uid,
            user=user_name(file.uid),
            seconds_left=file.until - now,
            held_seconds=now - file.since,
        )
        first.setdefault(file.gpu_uuid, lease)
    return first


def lease_of_others(host: Host, gpu_uuid: str | None, limits: UserLimits) -> GpuLease | None:
    """Return the lease of another user on a GPU, or None."""
    lease = leases(host, limits).get(gpu_uuid or "")
    return None if lease is None or lease.uid == host.uid else lease


def reserved_words(lease: GpuLease) -> str:
    """Return in words whose a GPU is: ``is reserved by alice for 3 h 20 min``."""
    return f"is reserved by {lease.user} for {format_duration(lease.seconds_left)}"


def take_lease(host: Host, gpu_uuid: str, seconds: float, limits: UserLimits) -> None:
    """Reserve a GPU for this user. An earlier lease of the user on it is replaced; if it was in force, its beginning stays.

    Raises:
        InUse: another user was first.
        NoPermission, OperationFailed: the lease cannot be written (code ``lease_unusable``).
    """
    if host.is_simulated and host.uid != os.geteuid():
        raise OperationFailed(
            "the user of a simulated host cannot reserve: a lease belongs to the user who writes its file",
            "be yourself again: gpushare sim fault --clear",
            code="lease_unusable",
        )
    earlier = [file for file in _lease_files(host, limits) if file.gpu_uuid == gpu_uuid and file.uid == host.uid]
    now = uptime()
    since = min((file.since for file in earlier if file.since <= now < file.until), default=now)
    text = (
        f"gpushare lease 1\nboot {boot_id() or '-'}\ngpu {gpu_uuid}\nsince {int(since)}\nuntil {int(now + seconds)}\n"
    )
    path = write_shared_file(host, PREFIX, text, "the lease")
    for file in earlier:
        _remove_file(file.path)
    # Read again: another user may have been faster.
    lease = leases(host, limits).get(gpu_uuid)
    if lease is None or lease.uid != host.uid:
        _remove_file(path)
        if lease is None:
            raise OperationFailed(
                "the lease was written but does not count", "see: gpushare doctor", code="lease_unusable"
            )
        raise InUse(f"the GPU {reserved_words(lease)}", "see all leases: gpushare reserve", code="reserved")


def end_lease(host: Host, gpu_uuid: str, limits: UserLimits) -> None:
    """End the lease of this user on a GPU; root ends anybody's. Raises as `take_lease`."""
    for file in _lease_files(host, limits):
        if file.gpu_uuid == gpu_uuid and (file.uid == host.uid or host.root):
            with writing(file.path, "the lease", code="lease_unusable"):
                file.path.unlink(missing_ok=True)


def _lease_files(host: Host, limits: UserLimits) -> list[_LeaseFile]:
    """Return the files of all leases, earliest first; also those past the time that root allows, as root may allow more."""
    return sorted(_read_lease_files(host, limits))


def _read_lease_files(host: Host, limits: UserLimits) -> Iterator[_LeaseFile]:
    """Yield the leases in their files; remove those that are over, as far as this user may."""
    directory = claim_directory(host)
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(filter(_NAME.fullmatch, os.listdir(directory)))
    files_of_user: Counter[int] = Counter()
    now = uptime()
    booted_at = time.time() - now
    for name in names:
        path = directory / name
        try:
            before = os.lstat(path)
        except OSError:
            continue
        # Another user may make links of a user's file: they do not use up the leases of that user.
        if not stat.S_ISREG(before.st_mode) or before.st_nlink != 1:
            continue
        files_of_user[before.st_uid] += 1
        if files_of_user[before.st_uid] > _MOST_OF_ONE_USER:
            continue
        read = read_shared_file(path, _MOST_BYTES)
        # It may be another file by now.
        if read is None or read[0].st_uid != before.st_uid:
            continue
        status, text = read
        lease = _parse_lease(path, text, status, limits, since_boot=status.st_ctime - booted_at)
        if lease is not None:
            is_over = lease.written_until <= now
        else:
            # It is half written, by a gpushare that was killed, or just being written.
            is_over = time.time() - status.st_ctime > _UNREADABLE_SECONDS
        if is_over and (status.st_uid == host.uid or host.root):
            _remove_file(path)
        elif lease is not None and not is_over:
            yield lease


def _parse_lease(
    path: Path, text: bytes, status: os.stat_result, limits: UserLimits, *, since_boot: float
) -> _LeaseFile | None:
    """Return the lease in a file that was created ``since_boot`` seconds after boot; None: its text is no lease."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    since = float(match["since"])
    # A lease of an earlier boot is over.
    written_until = float(match["until"]) if match["boot"].decode() == boot_id() else 0.0
    longest = math.inf if status.st_uid == 0 else limits.longest_lease_seconds
    return _LeaseFile(
        created=max(since, since_boot),
        path=path,
        gpu_uuid=match["gpu"].decode(),
        uid=status.st_uid,
        since=since,
        until=min(written_until, since + longest),
        written_until=written_until,
    )


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
