"""``gpushare jobs``: what runs, waits, is paused or swapped out, and has ended; read by `gpushare/run/listing.py`."""

from __future__ import annotations

from typing import Any, Final

from gpushare.cli.options import flag, settings, verb
from gpushare.cli.status import WATCH_OPTION, WatchCommand, read_or_watch
from gpushare.run.jobs import KEPT_JOBS
from gpushare.run.listing import listed_jobs
from gpushare.show.jobs import jobs_result
from gpushare.show.result import Result
from gpushare.snapshot import Observer

# Jobs that ended recently; all that are kept with -v.
_MOST_ENDED: Final = 10


@verb(WatchCommand)
def jobs(
    everything: bool = flag("-a --all", "Also each process on the GPUs that gpushare did not start."),
    watch: str | None = WATCH_OPTION,
) -> Any:
    """List the jobs that run, wait for room, are paused or swapped out, and the last ten that have ended.

    A job is what `gpushare run` or `gpushare farm` started. A process that gpushare did not start has no name: give its
    PID as JOB to `stop`, `pause` and others. The column memory shows what the processes of a job hold, and the limit of
    the job. "-" means unknown or none. Root sees the jobs of all users, but of those that have ended only its own. -v
    lists all that are kept: up to a hundred.
    """
    host = settings.connect()
    observer = Observer(host)
    most = KEPT_JOBS if settings.verbose else _MOST_ENDED

    def read() -> Result:
        snapshot = observer.read()
        listed = listed_jobs(host, snapshot, everything=everything, most_ended=most)
        return jobs_result(snapshot, listed, everything=everything)

    return read_or_watch(read, watch)
