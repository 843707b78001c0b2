"""Read gpushare.yaml for a host: the entry of each GPU. Keep the file that was applied last for the next boot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpushare.base.errors import BadUsage, GpushareError, NoPermission, NotFound
from gpushare.base.model import Gpu
from gpushare.base.units import format_duration, size_option
from gpushare.gpu_models import find_model
from gpushare.host.capabilities import group_id, user_id, user_name
from gpushare.host.host import Host, is_trusted_directory, make_private_directory
from gpushare.host.records import read_own, replace_file, writing
from gpushare.host.written_file import opened_directory
from gpushare.hostfile.file import Entry, HostFile, InstanceWish, Matched, MpsWish, match_entries
from gpushare.hostfile.kept import KEPT, file_kept_in, kept_limits, user_limits_in
from gpushare.hostfile.parse import parse, write_hint
from gpushare.inputs import Mark, decode_text, shown_path, text_of
from gpushare.timeslice.rules import Names

DEFAULT: Final = "gpushare.yaml"
_MOST_BEFORE_FILES: Final = 8


def load(path: str) -> tuple[HostFile, str]:
    """Return a file and its text.

    Raises:
        BadUsage: it is not valid; the message has line and column.
        NotFound, NoPermission: it cannot be read.
    """
    text = text_of(path, "gpushare.yaml", write_hint(shown_path(path)))
    return parse(text, shown_path(path)), text


def load_own(path: str) -> HostFile:
    """Return a file whose rules this process may follow: no other user can have written or replaced it.

    It belongs to root or to this user; others may write neither it nor a directory above it. A link is not followed.

    Raises:
        BadUsage: it is not valid, or it is stdin.
        NotFound, NoPermission: it cannot be read, or others may write it (code ``untrusted_file``).
    """
    if path == "-":
        raise BadUsage(
            "the rules cannot come from stdin: they are read again later", "give a file: -f FILE", code="bad_file"
        )
    try:
        with opened_directory(Path(path).parent, make=False) as directory:
            text = decode_text(read_own(path, directory=directory), path, "gpushare.yaml")
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {path}",
            "give a file with rules: -f FILE; or apply one first: gpushare apply -f FILE; see examples/slices.yaml",
            code="no_file",
        ) from None
    except PermissionError:
        raise NoPermission(f"{path} cannot be read", "run as root: sudo gpushare ...", code="bad_file") from None
    except (OSError, ValueError) as error:
        # A directory above the file may be the reason.
        refused = getattr(error, "filename", None) or path
        raise NoPermission(
            f"the rules of {path} are not followed: {refused}: {getattr(error, 'strerror', None) or error}",
            f"see who may write it: ls -ld {shlex.quote(str(refused))}; root can follow /etc/gpushare.yaml",
            code="untrusted_file",
        ) from None
    return parse(text, path)


def names_in(file: HostFile) -> Names:
    """Return the ids of the users and groups that the rules of a file name: a process has ids only.

    Raises NotFound with line and column: there is no such user or group.
    """
    users: dict[str, int] = {}
    groups: dict[str, int] = {}
    for rule in file.rules:
        try:
            users.update({name: user_id(name) for name in rule.match.users if name not in users})
            groups.update({name: group_id(name) for name in rule.match.groups if name not in groups})
        except NotFound as error:
            raise NotFound(f"{file.shown}:{rule.mark}: {error.message}", error.hint, code=error.code) from None
    return Names(users=users, groups=groups)


def entries_of(file: HostFile, gpus: Sequence[Gpu]) -> Matched:
    """Return the entry of each GPU, with users by name. Raises as `match_entries`, and NotFound: there is no such user."""
    matched = match_entries(file, gpus, _same_model)
    return replace(
        matched, entries={index: _with_user_names(entry, file.shown) for index, entry in matched.entries.items()}
    )


def with_place_in_file(error: GpushareError, file: HostFile, index: int, entry: Entry) -> GpushareError:
    """Return the error of a GPU with the line and column of its entry."""
    whose = "" if f"GPU {index}" in error.message else f"GPU {index}: "
    return error.restated(message=f"{file.shown}:{entry.mark}: {whose}{error.message}")


def kept_entries(host: Host, gpus: Sequence[Gpu]) -> tuple[Mapping[int, Entry], GpushareError | None]:
    """Return the entries of the kept gpushare.yaml, and why it, or a part of it, no longer fits this host.

    Both are empty if none was kept, or if this user may not read it.
    """
    if not is_trusted_directory(host.state_directory):
        return {}, None
    try:
        matched = entries_of(load(str(applied_path(host)))[0], gpus)
    except GpushareError as error:
        if error.code == "no_file" or isinstance(error, NoPermission):
            return {}, None
        return {}, error
    return matched.entries, next(iter(matched.missing), None)


def kept_file(host: Host) -> HostFile | None:
    """Return the gpushare.yaml that this user applied last, as `file_kept_in`."""
    return file_kept_in(host.state_directory)


def changed_limits(host: Host, file: HostFile) -> list[str]:
    """Return how the limits of users in a file differ from those in force: ``... of each user: none -> 20G``."""
    wanted = user_limits_in(file)
    in_force = kept_limits(host)
    rows = [
        (f"user {user_name(uid)}", in_force.get(uid), wanted.get(uid))
        for uid in sorted({*wanted.named, *in_force.named})
    ]
    rows.append(("each other user" if rows else "each user", in_force.others, wanted.others))

    def text(size: int | None) -> str:
        return "none" if size is None else size_option(size)

    changed = [f"memory: limit of {user}: {text(old)} -> {text(new)}" for user, old, new in rows if new != old]
    old, new = in_force.longest_lease_seconds, wanted.longest_lease_seconds
    if new != old:
        changed.append(f"reserve: longest lease: {format_duration(old)} -> {format_duration(new)}")
    return changed


def _same_model(written: str, name: str) -> bool:
    """Return whether a model in a file (product name or catalogue alias) is that of a GPU with this name."""

    def model_key(text: str) -> str:
        """Return the catalogue's key of a model, or the text in plain form if the catalogue lacks it."""
        try:
            return find_model(text).key
        except BadUsage:
            return " ".join(text.lower().split())

    return model_key(written) == model_key(name)


def _with_user_names(entry: Entry, shown: str) -> Entry:
    """Return an entry with users by name; the file may have ids. ``shown`` names the file in errors."""

    def user_names(users: tuple[str, ...], mark: Mark) -> tuple[str, ...]:
        try:
            return tuple(sorted({user_name(user_id(user)) for user in users}))
        except NotFound as error:
            raise NotFound(f"{shown}:{mark}: {error.message}", error.hint, code=error.code) from None

    def mps_with_names(wish: MpsWish | None, mark: Mark) -> MpsWish | None:
        return None if wish is None else replace(wish, users=user_names(wish.users, mark))

    def instance_with_names(wish: InstanceWish) -> InstanceWish:
        return replace(wish, users=user_names(wish.users, wish.mark), mps=mps_with_names(wish.mps, wish.mark))

    return replace(entry, mps=mps_with_names(entry.mps, entry.mark), mig=tuple(map(instance_with_names, entry.mig)))


def applied_path(host: Host) -> Path:
    return host.state_directory / KEPT


def keep_applied(host: Host, text: str) -> Path:
    """Keep the text of an applied file for the next boot; return the path.

    Raises NoPermission, OperationFailed: it cannot be written (code ``not_kept``); the earlier one stays.
    """
    return _write_kept(host, applied_path(host), text)


def state_before_path(host: Host, text: str) -> Path:
    """Return where the state before an apply is kept: each has its own file, so that its undo stays right."""
    return host.state_directory / f"before-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"


def keep_state_before(host: Host, text: str) -> Path:
    """Keep the state before an apply, and of earlier ones the last few; return the path. Errors as `keep_applied`."""
    path = _write_kept(host, state_before_path(host, text), text)
    with contextlib.suppress(OSError):
        # An equal state that was kept before is now the newest.
        os.utime(path)
        newest_first = sorted(path.parent.glob("before-*.yaml"), key=lambda file: -file.lstat().st_mtime)
        for old in newest_first[_MOST_BEFORE_FILES:]:
            old.unlink()
    return path


def default_path() -> str | None:
    """Return ``gpushare.yaml``, if it is in the working directory.

    Raises NoPermission: this is root, and another than root or the caller of sudo may have written it
    (``untrusted_file``).
    """
    if not os.path.lexists(DEFAULT):
        return None
    if os.geteuid() != 0:
        return DEFAULT
    trusted_uids = {0}
    caller_of_sudo = os.environ.get("SUDO_UID", "")
    if caller_of_sudo.isdecimal():
        trusted_uids.add(int(caller_of_sudo))
    for path in (".", DEFAULT):
        stated = os.lstat(path)
        if stated.st_uid not in trusted_uids or stated.st_mode & 0o022 or stat.S_ISLNK(stated.st_mode):
            raise NoPermission(
                f"other users may have written ./{DEFAULT}, so root does not take it unasked",
                f"see who may: ls -ld . {DEFAULT}; if it is right, name it: -f {DEFAULT}",
                code="untrusted_file",
            )
    return DEFAULT


def is_kept(host: Host, text: str) -> bool:
    """Return whether this is the text of the file that was applied last."""
    return _has_text(host, applied_path(host), text)


def _has_text(host: Host, path: Path, text: str) -> bool:
    """Return whether a file of the state directory has this text and no other user can have written it."""
    with contextlib.suppress(OSError, ValueError):
        return is_trusted_directory(host.state_directory) and read_own(path) == text.encode()
    return False


def _write_kept(host: Host, path: Path, text: str) -> Path:
    """Write a file of the state directory, atomically and durably.

    The same text is not written again: at boot the disk may be full or read-only.
    """
    if _has_text(host, path, text):
        return path
    make_private_directory(host.state_directory, variable="GPUSHARE_STATE_DIR")
    with writing(path, "the file for the next boot", code="not_kept"):
        replace_file(path, text, durable=True)
    return path
