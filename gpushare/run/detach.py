"""A job in the background (`gpushare run -d`): the same gpushare again, in a session of its own, its output kept."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

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
from gpushare.memory.ledger import reservations
from gpushare.run.jobs import JOBS, PAST, check_name_free, made_name, output_path
from gpushare.run.program import begin_log, open_log
from gpushare.run.queued import check_not_waiting
from gpushare.run.share import NO_PROGRAM
from gpushare.run.start import DETACHED

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from gpushare.host.host import Host

# By then it runs or waits; else it is said that neither was seen.
_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02
_WAITS_SECONDS: Final = 1.0
_MOST_SAID: Final = 64 << 10
_MAIN: Final = "import sys; sys.path[0] = {!r}; from gpushare.cli import main; sys.exit(main())"


class Detached(NamedTuple):
    """A job in the background: its name, its supervisor, its output, and how it is: runs, waits, ended, or unknown (None)."""

    name: str
    pid: int
    output: Path
    state: str | None
    # Of one that has ended already.
    exit_code: int | None = None


def detach(host: Host, words: Sequence[str], program: str, name: str | None) -> Detached:
    """Start the command line ``words`` in the background, and wait until its job runs, waits in line or has ended.

    Raises:
        InUse: a job of this name runs or waits (``name_in_use``).
        NoPermission: its output cannot be kept (``not_written``).
        OperationFailed: it does not start (``detach_failed``).
    """
    import subprocess

    if name is not None:
        check_name_free(host, name)
        check_not_waiting(host, name)
    name = name or made_name(host, program)
    path = output_path(host, name)
    begin_log(path)
    descriptor = open_log(path)
    # Of an earlier job of this name.
    PAST.forget(PAST.path(host, name))
    try:
        # Not by -m: that would look for gpushare in the working directory first.
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(str(Path(__file__).resolve().parents[2])), *words],
            env={**os.environ, DETACHED: name},
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    except OSError as error:
        raise OperationFailed(
            f"the job cannot be put into the background: {error.strerror or error}",
            "run it here: without -d",
            code="detach_failed",
        ) from error
    finally:
        os.close(descriptor)
    return _followed(host, Detached(name, process.pid, path, None), process)


def _followed(host: Host, job: Detached, process: subprocess.Popen[bytes]) -> Detached:
    """Return a job as soon as it runs, waits or has ended; from then on nobody here waits for it."""
    try:
        return _look(host, job, process)
    finally:
        process.returncode = 0


def _look(host: Host, job: Detached, process: subprocess.Popen[bytes]) -> Detached:
    until, waiting_since = time.monotonic() + _SECONDS, None
    while time.monotonic() < until:
        code = process.poll()
        if code is not None:
            return job._replace(state="ended", exit_code=code if code >= 0 else 128 - code)
        record = JOBS.read(JOBS.path(host, job.name))
        of_ours = record is not None and record.supervisor is not None and record.supervisor.pid == job.pid
        if record is not None and of_ours and record.pid != job.pid:
            return job._replace(state="runs")
        # A program that is about to start passes through both states; one that waits stays there.
        if of_ours or any(
            row.name == job.name and row.waits and row.claim.uid == host.uid for row in reservations(host) or ()
        ):
            waiting_since = waiting_since or time.monotonic()
            if time.monotonic() - waiting_since > _WAITS_SECONDS:
                return job._replace(state="waits")
        time.sleep(_POLL_SECONDS)
    # It goes on: a driver may take its time.
    return job


def was_started(host: Host, job: Detached) -> bool:
    """Return whether the program of a job that has ended was started."""
    past = PAST.read(PAST.path(host, job.name))
    return past is not None and past.exit_code is not None


def why_not_started(job: Detached) -> GpushareError:
    """Return the error that kept a job from starting, which ran with ``-o json``."""
    kinds = (BadUsage, NotSupported, NoPermission, NotFound, DriverNotLoaded, NvmlMissing, InUse)
    code = ExitCode.NOT_FOUND if job.exit_code == NO_PROGRAM else job.exit_code
    kind = next((kind for kind in kinds if kind.exit_code == code), OperationFailed)
    text = said(job, document=True)
    try:
        error = json.loads(text)["errors"][0]
        return kind(error["message"], error["hint"], gpu=error["gpu"], code=error["code"])
    except (ValueError, LookupError, TypeError):
        return kind(
            f"'{job.name}' was not started: exit code {job.exit_code}",
            f"see: gpushare logs {job.name}",
            code="detach_failed",
        )


def said(job: Detached, *, document: bool) -> str:
    """Return what a job has printed that did not start; with ``document`` its JSON document alone, where it has one."""
    try:
        with job.output.open("rb") as file:
            text = file.read(_MOST_SAID).decode(errors="replace")
    except OSError:
        return ""
    begins, ends = text.find("{\n"), text.rfind("\n}\n")
    return text[begins : ends + 3] if document and 0 <= begins < ends else text
