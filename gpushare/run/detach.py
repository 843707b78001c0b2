"""A job in the background (`gpushare run -d`): the same gpushare again, in a session of its own, its output kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gpushare.base.errors import (
    BadUsage,
    DriverNotLoaded,
    ExitCode,
    GpushareError,
    InUse,
    NoPermission,
    NotFound,
    NotSupported,
    NvmlMissing,
    OperationFailed,
)
from gpushare.host.host import Host
from gpushare.host.identity import Identity, identity_of_child
from gpushare.host.records import try_lock
from gpushare.memory.ledger import reservations
from gpushare.run.jobs import (
    JOBS,
    PAST,
    check_name_free,
    check_not_waiting,
    earlier_output_path,
    make_name,
    output_path,
    runs_in_background,
    set_past_aside,
)
from gpushare.run.program import begin_log, open_log
from gpushare.run.share import NO_PROGRAM
from gpushare.run.start import DETACHED
from gpushare.show.render import NOTE

# By then it runs or waits; else it is said that neither was seen.
_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02
_WAITS_SECONDS: Final = 1.0
_MOST_PRINTED: Final = 64 << 10
_MAIN: Final = "import sys; sys.path[0] = {!r}; from gpushare.cli import main; sys.exit(main())"


class Detached(NamedTuple):
    """A job in the background, as it was when `detach` returned. ``supervisor`` is its gpushare, ``output`` a file."""

    name: str
    supervisor: Identity
    output: Path
    # running, waiting or ended; None: none of these was seen in time.
    state: str | None
    # Of one that has ended already.
    exit_code: int | None = None
    # What it has printed by then.
    printed: str = ""

    @property
    def notes(self) -> list[str]:
        """Return the notes with which its output begins: those before the start of its program."""
        lines = itertools.takewhile(lambda line: line.startswith(NOTE), self.printed.splitlines())
        return [line.removeprefix(NOTE).strip() for line in lines]


def detach(host: Host, words: Sequence[str], program: str, name: str | None) -> Detached:
    """Start the command line ``words`` in the background, and wait until its job runs, waits in line or has ended.

    Raises:
        InUse: a job of this name runs, waits or starts (``name_in_use``).
        NoPermission: its output cannot be kept (``not_written``).
        OperationFailed: it does not start (``detach_failed``).
    """
    with _reserved_name(host, program, name) as (job_name, descriptor, earlier_record):
        try:
            # Not by -m: that would look for gpushare in the working directory first.
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(str(Path(__file__).resolve().parents[2])), *words],
                env={**os.environ, DETACHED: job_name},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        except OSError as error:
            _put_earlier_back(host, job_name, earlier_record)
            raise OperationFailed(
                f"the job cannot be put into the background: {error.strerror or error}",
                "run it here: without -d",
                code="detach_failed",
            ) from error
        supervisor = identity_of_child(process.pid) or Identity(process.pid, 0)
        try:
            job = _wait_until_settled(host, Detached(job_name, supervisor, output_path(host, job_name), None), process)
        finally:
            # It outlives us: a Popen without a return code warns, when it is deleted, that its process still runs.
            process.returncode = 0
        job = job._replace(printed=os.pread(descriptor, _MOST_PRINTED, 0).decode(errors="replace"))
        if could_not_start(host, job):
            _put_earlier_back(host, job_name, earlier_record)
        return job


def _put_earlier_back(host: Host, name: str, record: Path | None) -> None:
    """Undo `_reserved_name` for a job that was not started: put the earlier job's output and record back (None: no such job)."""
    if record is not None:
        with contextlib.suppress(OSError):
            os.replace(earlier_output_path(host, name), output_path(host, name))
        with contextlib.suppress(OSError):
            os.replace(record, PAST.path(host, name))


@contextlib.contextmanager
def _reserved_name(host: Host, program: str, name: str | None) -> Iterator[tuple[str, int, Path | None]]:
    """Reserve a name, made of ``program`` if none is given, and set the output and record of an earlier job of it aside.

    Yields the name, the descriptor of the new output, and the file of the earlier record (None: no such job). The lock of the
    output reserves the name, also while there is no record of the job yet, and until its last process has ended.
    """
    earlier_record = None
    with JOBS.locked(host):
        if name is not None:
            check_name_free(host, name)
            check_not_waiting(host, name)
            # What a job that has ended left behind may still write there.
            if runs_in_background(host, name) and not PAST.path(host, name).exists():
                raise InUse(f"a job '{name}' is starting", "give it another name: --name OTHER", code="name_in_use")
            earlier_record = set_past_aside(host, name)
            if earlier_record is not None:
                with contextlib.suppress(OSError):
                    os.replace(output_path(host, name), earlier_output_path(host, name))
        name = name or make_name(host, program)
        try:
            begin_log(output_path(host, name))
            descriptor = open_log(output_path(host, name))
        except BaseException:
            _put_earlier_back(host, name, earlier_record)
            raise
        # Some file systems have no locks.
        with contextlib.suppress(OSError):
            try_lock(descriptor)
    try:
        yield name, descriptor, earlier_record
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            earlier_output_path(host, name).unlink(missing_ok=True)


def _wait_until_settled(host: Host, job: Detached, process: subprocess.Popen[bytes]) -> Detached:
    """Return a job as soon as it runs, waits or has ended; unchanged if none of these was seen in time."""
    deadline = time.monotonic() + _SECONDS
    waiting_since = None
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            return job._replace(state="ended", exit_code=code if code >= 0 else 128 - code)
        record = JOBS.read(JOBS.path(host, job.name))
        if record is not None and record.supervisor != job.supervisor:
            record = None
        if record is not None and record.pid != job.supervisor.pid:
            return job._replace(state="running")
        in_line = any(row.waits and job.supervisor in row.claim.processes for row in reservations(host) or ())
        if record is not None or in_line:
            # For a moment this is so of a program that is about to start, too.
            waiting_since = waiting_since or time.monotonic()
            if time.monotonic() - waiting_since > _WAITS_SECONDS:
                return job._replace(state="waiting")
        time.sleep(_POLL_SECONDS)
    # It goes on: a driver may take its time.
    return job


def could_not_start(host: Host, job: Detached) -> bool:
    """Return whether a job has ended with an error before its program was started."""
    if job.state != "ended" or not job.exit_code:
        return False
    past = PAST.read(PAST.path(host, job.name))
    return past is None or past.supervisor != job.supervisor or not past.started


def not_started_error(job: Detached) -> GpushareError:
    """Return the error that kept a job from starting, as its gpushare has printed it (``-o json``)."""
    error_classes = (BadUsage, NotSupported, NoPermission, NotFound, DriverNotLoaded, NvmlMissing, InUse)
    code = ExitCode.NOT_FOUND if job.exit_code == NO_PROGRAM else job.exit_code
    error_class = next((each for each in error_classes if each.exit_code == code), OperationFailed)
    try:
        error = json.loads(printed_document(job))["errors"][0]
        return error_class(error["message"], error["hint"], gpu=error["gpu"], code=error["code"])
    except (ValueError, LookupError, TypeError):
        return error_class(
            f"'{job.name}' was not started: exit code {job.exit_code}",
            f"see: gpushare logs {job.name}; or run it without -d",
            code="detach_failed",
        )


def printed_document(job: Detached) -> str:
    """Return the JSON document in what a job that did not start has printed; without one, all that it has printed."""
    opening = "{\n"
    closing = "\n}\n"
    begin = job.printed.find(opening)
    end = job.printed.rfind(closing)
    return job.printed[begin : end + len(closing)] if 0 <= begin < end else job.printed
