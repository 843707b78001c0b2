"""The kept output of a detached job (`gpushare run -d`), for `gpushare logs`: found, opened safely, read from its end, followed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gpushare.base.errors import GpushareError, NoPermission, NotFound, NotSupported, OperationFailed
from gpushare.base.units import pid_of
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.host.identity import Identity
from gpushare.host.process import info_of
from gpushare.host.records import open_own
from gpushare.host.users import command_as_user
from gpushare.memory.ledger import reservations
from gpushare.run.jobs import (
    PAST,
    JobRecord,
    check_job_name,
    find_record,
    is_running,
    no_job_error,
    output_path,
    running_record,
    running_records,
)

_BLOCK: Final = 64 << 10
_POLL_SECONDS: Final = 0.2


class Output(NamedTuple):
    """The output of a job: its name, its file, and the open descriptor of that."""

    name: str
    path: Path
    descriptor: int


def find_output(host: Host, text: str) -> Output:
    """Open the output of this user's job with this name or PID, which runs, waits, or has ended.

    Raises:
        BadUsage: it is neither a PID nor a possible name (``bad_name``).
        NotFound: there is no such job (``no_job``), or its output was not kept (``no_output``).
        NotSupported: it is another user's (``other_user``).
        NoPermission, OperationFailed: the file cannot be read, or is not only this user's (``output_unreadable``).
    """
    name = _job_name(host, text)
    path = output_path(host, name)
    try:
        return Output(name, path, open_own(path))
    except FileNotFoundError:
        raise _no_output_error(host, name) from None
    except (OSError, ValueError) as error:
        kind = NoPermission if isinstance(error, PermissionError) else OperationFailed
        reason = error.strerror if isinstance(error, OSError) else error
        raise kind(
            f"cannot read the output of '{name}': {reason}", f"look at it: ls -l {path}", code="output_unreadable"
        ) from None


def _job_name(host: Host, text: str) -> str:
    """Return the name of the job that a name or PID means."""
    pid = pid_of(text)
    if pid is None:
        return check_job_name(text)
    record = running_record(host, text)
    if record is not None:
        if record.keeper_uid is not None:
            raise _another_users_error(record, record.keeper_uid)
        return record.name
    for job in reservations(host) or []:
        if job.claim.pid == pid and job.name is not None:
            return job.name
    raise NotFound(f"process {text[:20]} is not a job of gpushare", "see the jobs: gpushare jobs", code="no_job")


def _no_output_error(host: Host, name: str) -> GpushareError:
    """Return the error for a job without a file of output: its output was not kept, it is another user's, or there is none."""
    has_ended = any(job.name == name for job in PAST.all(host, shared=False))
    if has_ended or gpushare_of(host, name) is not None:
        return NotFound(
            f"the output of '{name}' was not kept: it was not started in the background",
            "start it in the background: gpushare run -d -- CMD; for a farm: gpushare farm --logs DIR, and see DIR/copy-0.log",
            code="no_output",
        )
    for record in running_records(host):
        if record.keeper_uid is not None and record.name == name:
            return _another_users_error(record, record.keeper_uid)
    return no_job_error(host, name, "is running, waiting or among those kept")


def _another_users_error(record: JobRecord, uid: int) -> NotSupported:
    """Return the error about the output of another user's job, with the command that reads it."""
    user = user_name(uid)
    words = f"logs {record.name}"
    command = command_as_user(user, record.path.parent.parent, words) if uid else f"sudo gpushare {words}"
    return NotSupported(
        f"'{record.name}' is a job of {user}: gpushare reads only the output of a user's own jobs",
        f"run it as {user}: {command}",
        code="other_user",
    )


def gpushare_of(host: Host, name: str) -> Identity | None:
    """Return the gpushare of this user's job of this name, which runs or waits; None: it does neither."""
    record = find_record(host, name)
    if record is not None and record.keeper_uid is None and is_running(host, record):
        return record.supervisor or Identity(record.pid, record.started)
    for waiting in reservations(host) or []:
        if waiting.name == name and info_of(host.processes, waiting.claim.pid).uid == host.uid:
            return waiting.claim.processes[0]
    return None


def seek_lines(descriptor: int, lines: int) -> bool:
    """Put the position of a file before its last ``lines`` lines; return whether there are lines before these."""
    position = end = os.fstat(descriptor).st_size
    # They begin after this many line breaks from the end of the file. The one at its very end begins no line.
    breaks_left = lines
    if end and os.pread(descriptor, 1, end - 1) == b"\n":
        breaks_left += 1
    while position > 0 and breaks_left > 0:
        block_start = max(0, position - _BLOCK)
        block = os.pread(descriptor, position - block_start, block_start)
        position = block_start
        line_break = len(block)
        while breaks_left > 0 and (line_break := block.rfind(b"\n", 0, line_break)) >= 0:
            breaks_left -= 1
        if not breaks_left:
            position = block_start + line_break + 1
    os.lseek(descriptor, position if lines else end, os.SEEK_SET)
    return position > 0


def read_blocks(descriptor: int) -> Iterator[bytes]:
    """Yield what a file has from its position up to its present end."""
    while block := os.read(descriptor, _BLOCK):
        yield block


def follow(host: Host, output: Output) -> Iterator[bytes]:
    """Yield what a job prints until it has ended; a file that was cut short is read from its beginning."""
    supervisor = None
    while True:
        # Its record may go before its last words are printed: the job lives as long as the gpushare that was in it.
        supervisor = gpushare_of(host, output.name) or supervisor
        # Looked up before the reading, so that all that it prints before its end is read.
        is_alive = supervisor is not None and host.processes.alive(*supervisor)
        if os.fstat(output.descriptor).st_size < os.lseek(output.descriptor, 0, os.SEEK_CUR):
            os.lseek(output.descriptor, 0, os.SEEK_SET)
        yield from read_blocks(output.descriptor)
        if not is_alive:
            return
        time.sleep(_POLL_SECONDS)
