"""Claims: which job has which device, recorded in one file per job that only its owner can write.

All users share one sticky directory made by root. No user opens another user's file to write or lock it, so no user can
block others by holding a lock. A claim counts only while it names a live process (PID and start time) whose real user
owns the file: a claim for another user's process, or for a process that has ended, is void.

Taking is an attempt, as in Lamport's bakery algorithm. A claim is first *choosing*, then draws a ticket
(CLOCK_BOOTTIME). The lowest live ticket gets the device, and all others withdraw. A file only grows, by lines, under one
name: replacing it would hide it from a directory listing at that moment (tmpfs), and two claims would be first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

from gpushare.base.errors import OperationFailed
from gpushare.base.values import dataclass
from gpushare.host.host import Host, make_private_directory
from gpushare.host.identity import Identity, boot_id, identity_of, lives, pid_space, real_uid
from gpushare.host.records import SHARED_DIRECTORIES, kept_mode, unwritable_error, writing

# Claims of one device by one job at a time.
EXCLUSIVE: Final = "gpushare-claim-"
_AFTER: Final = rb"(?:ticket \d{1,20}|process \d{1,10} \d{1,20}|fact [\w.:/, -]{1,8000})\n"
_LATER_LINE: Final = re.compile(_AFTER, re.ASCII)
_TEXT: Final = re.compile(
    rb"gpushare claim 1\nboot (?P<boot>[0-9a-f-]{1,36})\nspace (?P<space>\d{1,20})\nkey (?P<key>[\w.:/-]{1,160})\n"
    rb"process (?P<pid>\d{1,10}) (?P<started>\d{1,20})\n(?P<later>(?:" + _AFTER + rb"){0,64})",
    re.ASCII,
)
_LINE: Final = re.compile(rb"(ticket|process|fact) ([^\n]+)\n", re.ASCII)
# A job may name all MIG instances of a host.
_MOST_BYTES: Final = 16384
# Besides the creator.
_MOST_PROCESSES: Final = 8
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Further claims of one user do not count. Dead ones are removed when found.
_MOST_OF_ONE_USER: Final = 256
_MOST_FILES: Final = 50_000
# Choosing takes microseconds; a claim that chooses for longer counts as holding the device.
_CHOOSING_SECONDS: Final = 0.5
_CHOOSING_POLL_SECONDS: Final = 0.002
# An unreadable file may still be being written.
_UNREADABLE_SECONDS: Final = 60.0
_CODE: Final = "lease_unusable"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim: what is claimed, and by whom; ``ticket`` is None while it is choosing."""

    path: Path
    key: str
    uid: int
    # Its live processes, the creator first.
    processes: tuple[Identity, ...]
    # Whether its creator is one of them: the gpushare that watches the program.
    kept: bool
    ticket: int | None
    # What else it says, in order, and when its owner last touched it (seconds since the epoch).
    facts: tuple[str, ...] = ()
    touched_at: float = 0.0

    @property
    def pid(self) -> int:
        """Return the process that made the claim, or the first one that still lives."""
        return self.processes[0].pid

    @property
    def rank(self) -> tuple[int, int, str]:
        """Return its rank: the lowest gets the device. A claim without a ticket, whose choosing hangs, ranks first."""
        ticket = -1 if self.ticket is None else self.ticket
        return ticket, self.uid, self.path.name


@dataclass(frozen=True)
class HeldClaim:
    """A claim of this user; another process of the user can take it over by its path."""

    path: Path

    def release(self) -> None:
        _remove(self.path)

    def add(self, pid: int) -> None:
        """Let another process of this user hold it too; its rank stays."""
        process = identity_of(pid)
        if process is None:
            raise OperationFailed(f"process {pid} is gone", "see why: dmesg", code=_CODE)
        _append(self.path, _process_line(process))

    def add_fact(self, fact: str) -> None:
        """Add a line to the claim that others read as one of `Claim.facts`.

        Raises:
            NoPermission, OperationFailed: it cannot be written (code ``lease_unusable``).
        """
        line = f"fact {fact}\n"
        if not _LATER_LINE.fullmatch(line.encode()):
            # It would make the whole claim unreadable.
            raise OperationFailed(f"{fact[:60]!r} cannot be noted in a claim", "see: gpushare doctor", code=_CODE)
        _append(self.path, line)

    def draw_ticket(self) -> int:
        """Draw its ticket, the time: the lowest is first. Others wait for a claim without one. Raises as `add_fact`."""
        ticket = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        _append(self.path, f"ticket {ticket}\n")
        return ticket

    def touch(self) -> None:
        """Mark it as still in use (`Claim.touched_at`), so that a reservation of memory does not lapse."""
        with contextlib.suppress(OSError):
            os.utime(self.path, follow_symlinks=False)


def claim_directory(host: Host) -> Path:
    """Return the directory of a host's claims: the same for all users.

    ``/run/lock``, or ``/tmp`` where only root may write the former (Fedora, RHEL). Only owner and mode decide, so that
    all users choose the same. A service with PrivateTmp=, or a container with its own /tmp or PIDs, does not see the
    others' claims; there only NVML's process lists help.
    """
    users_own = host.run_directory / "claims"
    if host.is_simulated:
        return users_own
    return next((path for path in SHARED_DIRECTORIES if _is_shared(path)), users_own)


def claims_are_shared(host: Host) -> bool:
    """Return whether the users of a host see each other's claims; those of a simulated host are of one user."""
    return host.is_simulated or claim_directory(host) in SHARED_DIRECTORIES


def take_claim(host: Host, key: str) -> HeldClaim | Claim:
    """Claim ``key`` for this process and return the new claim, or the `Claim` that was first. Never waits for its holder.

    Raises:
        NoPermission, OperationFailed: no claim can be made here (code ``lease_unusable``).
    """
    held = make_claim(host, key)
    try:
        first = _earlier_claim(held.path.parent, key, held, held.draw_ticket())
    except BaseException:
        held.release()
        raise
    if first is None:
        return held
    held.release()
    return first


def make_claim(host: Host, key: str, prefix: str = EXCLUSIVE) -> HeldClaim:
    """Write this process's claim to a device (``key``). Without a ticket yet, it is choosing: others wait a moment for it.

    Raises:
        NoPermission, OperationFailed: no claim can be made here, or it would not count (code ``lease_unusable``).
    """
    me = identity_of(os.getpid())
    if me is None or real_uid(os.getpid()) != os.geteuid():
        raise OperationFailed(
            "gpushare runs as a different user from the one who started it, so its claim would not count",
            "run it as one user: sudo gpushare ..., or without sudo",
            code=_CODE,
        )
    text = f"gpushare claim 1\nboot {boot_id() or '-'}\nspace {pid_space()}\nkey {key}\n{_process_line(me)}"
    if not _TEXT.fullmatch(text.encode()):
        raise OperationFailed(f"{key[:60]!r} cannot be claimed", "see: gpushare doctor", code=_CODE)
    return HeldClaim(write_shared_file(host, prefix, text, "the claim of a job"))


def write_shared_file(host: Host, prefix: str, text: str, purpose: str) -> Path:
    """Write a new file of this user into the directory of the claims, for all users to read; return its path.

    ``purpose`` says in messages what it is.

    Raises:
        NoPermission, OperationFailed: it cannot be written (code ``lease_unusable``).
    """
    directory = claim_directory(host)
    if directory.is_relative_to(host.run_directory):
        make_private_directory(directory)
    # Random, so that no other user can create it in advance.
    path = directory / f"{prefix}{os.urandom(8).hex()}"
    with writing(path, purpose, code=_CODE):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o644)
        try:
            # Others must be able to read it, whatever the umask.
            os.fchmod(descriptor, kept_mode(path, 0o644))
            _write_whole(descriptor, text)
        except OSError:
            _remove(path)
            raise
        finally:
            os.close(descriptor)
    return path


def all_claims(host: Host, prefix: str = EXCLUSIVE) -> list[Claim] | None:
    """Return the live claims with a prefix; None: unknown."""
    claims = _claims_or_reason(host, prefix)
    return None if isinstance(claims, str) else claims


def why_unreadable(host: Host, prefix: str) -> str | None:
    """Return why `all_claims` is None, and what to do; None: it is not."""
    claims = _claims_or_reason(host, prefix)
    return claims if isinstance(claims, str) else None


def _claims_or_reason(host: Host, prefix: str) -> list[Claim] | str:
    """Return the live claims with a prefix, or why they cannot be read, and what to do."""
    directory = claim_directory(host)
    try:
        return list(_claims(directory, prefix=prefix))
    except FileNotFoundError:
        return []
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror or error}"
    except OperationFailed as error:
        return f"{error.message}; {error.hint}"


def live_claims(host: Host) -> dict[str, Claim] | None:
    """Return the claim that holds each key, of all live claims the one of the lowest rank; None: unknown."""
    claims = all_claims(host)
    if claims is None:
        return None
    # The lowest rank comes last, and stays.
    return {claim.key: claim for claim in sorted(claims, key=attrgetter("rank"), reverse=True)}


def _earlier_claim(directory: Path, key: str, held: HeldClaim, ticket: int) -> Claim | None:
    """Return the live claim that comes before the one ``held`` with this ticket, or None.

    Waits for claims that are choosing, because they may draw a lower ticket; one that chooses for too long comes first.
    """
    deadline = time.monotonic() + _CHOOSING_SECONDS
    own_rank = ticket, os.geteuid(), held.path.name
    while True:
        others = [claim for claim in _claims(directory, key) if claim.path != held.path]
        earlier = [other for other in others if other.ticket is not None and other.rank < own_rank]
        if earlier:
            return min(earlier, key=attrgetter("rank"))
        choosing = next((other for other in others if other.ticket is None), None)
        if choosing is None or time.monotonic() > deadline:
            return choosing
        time.sleep(_CHOOSING_POLL_SECONDS)


def read_shared_file(path: Path, most: int) -> tuple[os.stat_result, bytes] | None:
    """Return the status and the first bytes of a file that all users may have written; None: it does not count.

    Only a regular file with one name does: a second hard link would survive its removal, and anybody may make one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return None
        return status, os.read(descriptor, most)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _claims(directory: Path, key: str | None = None, prefix: str = EXCLUSIVE) -> Iterator[Claim]:
    """Yield the live claims on a key (None: on any) with a prefix. Their owner and root also remove dead ones.

    Raises:
        OSError: the directory cannot be listed.
        OperationFailed: it is full of files with such names; the message says whose.
    """
    pattern = re.compile(rf"{prefix}[0-9a-f]{{16}}", re.ASCII)
    names = [name for name in os.listdir(directory) if name.startswith(prefix) and pattern.fullmatch(name)]
    files_of_user: Counter[int] = Counter()
    claims_of_user: Counter[int] = Counter()
    boot = boot_id() or "-"
    space = pid_space()
    own_uid = os.geteuid()
    for number, name in enumerate(names):
        path = directory / name
        try:
            status = os.lstat(path)
        except OSError:
            continue
        files_of_user[status.st_uid] += 1
        if number >= _MOST_FILES:
            raise _flooded_error(directory, prefix, files_of_user)
        # What is no claim does not use up the claims of its user: others may make links of a user's file.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            continue
        claims_of_user[status.st_uid] += 1
        if status.st_uid != own_uid and claims_of_user[status.st_uid] > _MOST_OF_ONE_USER:
            continue
        claim = _read_claim(path, boot, space, remove=own_uid in {0, status.st_uid})
        if claim is not None and key in {None, claim.key}:
            yield claim


def _read_claim(path: Path, boot: str, space: int, *, remove: bool) -> Claim | None:
    """Return the claim in a file; None: it is void, of another PID namespace, or cannot be read.

    ``remove``: also remove a void one, and one that has been unreadable for longer than it takes to write it.
    """
    # One byte more than allowed: a longer file does not match.
    read = read_shared_file(path, _MOST_BYTES + 1)
    if read is None:
        return None
    status, text = read
    match = _TEXT.fullmatch(text)
    # Each process costs a look at /proc.
    if match is None or match["later"].count(b"process ") > _MOST_PROCESSES:
        if remove and time.time() - status.st_ctime > _UNREADABLE_SECONDS:
            _remove(path)
        return None
    is_of_this_boot = match["boot"].decode() == boot
    if is_of_this_boot and int(match["space"]) != space:
        # Its PIDs belong to another namespace.
        return None
    processes, ticket, facts = _parse_lines(match)
    alive = tuple(process for process in processes if is_of_this_boot and lives(process, status.st_uid))
    if not alive:
        if remove:
            _remove(path)
        return None
    return Claim(
        path=path,
        key=match["key"].decode(),
        uid=status.st_uid,
        processes=alive,
        kept=processes[0] in alive,
        ticket=ticket,
        facts=facts,
        # Its owner can set mtime to any time, but not ctime.
        touched_at=min(status.st_mtime, status.st_ctime),
    )


def _parse_lines(match: re.Match[bytes]) -> tuple[list[Identity], int | None, tuple[str, ...]]:
    """Return the processes, the ticket (None: not drawn yet) and the facts of a claim."""
    processes = [Identity(int(match["pid"]), int(match["started"]))]
    ticket: int | None = None
    facts: list[str] = []
    for kind, text in _LINE.findall(match["later"]):
        if kind == b"process":
            processes.append(Identity(*map(int, text.split())))
        elif kind == b"fact":
            facts.append(text.decode())
        elif ticket is None:
            # The first one counts: a claim cannot draw again.
            ticket = int(text)
    return processes, ticket, tuple(facts)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _append(path: Path, line: str) -> None:
    """Append a line to a claim. Raises NoPermission, OperationFailed."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | _SAFE)
        try:
            _write_whole(descriptor, line)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise OperationFailed(
            f"{path} was removed while in use", f"see who can do that: ls -ld {path.parent}", code=_CODE
        ) from None
    except OSError as error:
        raise unwritable_error(path, "the claim of a job", error, code=_CODE) from error


def _write_whole(descriptor: int, text: str) -> None:
    """Write a text by one call: a reader sees all or nothing. Raises OSError."""
    if os.write(descriptor, text.encode()) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _process_line(process: Identity) -> str:
    return f"process {process.pid} {process.started}\n"


def _flooded_error(directory: Path, prefix: str, files_of_user: Counter[int]) -> OperationFailed:
    (uid, number), *_ = files_of_user.most_common(1)
    return OperationFailed(
        f"{directory} holds {number} or more claims of user {uid}, so the claims cannot be read",
        f"remove them: sudo find {directory} -maxdepth 1 -name '{prefix}*' -uid {uid} -delete",
        code=_CODE,
    )


def _is_shared(path: Path) -> bool:
    """Return whether all users may create files there, and only root and their owners may remove them."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    needed = stat.S_ISVTX | stat.S_IWOTH | stat.S_IXOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and status.st_mode & needed == needed
