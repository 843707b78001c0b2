"""``gpushare timeslice keep``: the rules of gpushare.yaml for the time-slices of processes; done by `gpushare/timeslice/`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpushare.base.errors import BadUsage, GpushareError
from gpushare.cli.options import settings
from gpushare.host.records import sweep_leftovers

if TYPE_CHECKING:
    from gpushare.hostfile.file import HostFile
    from gpushare.show.result import Result
    from gpushare.timeslice.keep import Policy

# Twenty files more are loaded in the functions below: `timeslice set JOB` needs none of them.
RulesOption = Annotated[
    str | None,
    typer.Option("-f", "--file", metavar="FILE", help="gpushare.yaml with rules. [default: the last applied file]"),
]


def keep(file: RulesOption = None) -> Any:
    """Give each GPU process the time-slice that the rules of gpushare.yaml say, until Ctrl-C or SIGTERM.

    The first rule under 'slices' that matches a process wins. A new process is seen within a second. A slice that someone
    else has set since is left alone, and reported. MPS clients share the slice of their server, and are skipped. At the end
    everything is put back; SIGHUP reads the file again. As root it is for all users' processes, else for your own. The file
    must be root's (or, for your own processes, yours), and not writable for others. `gpushare export systemd` writes a unit.
    """
    from gpushare.hostfile.load import applied_path
    from gpushare.show.keep import Said
    from gpushare.timeslice.keep import keep as keep_slices

    host = settings.connect()
    path = str(applied_path(host)) if file is None else file
    wanted, policy = _read(path)
    if settings.dry_run:
        return _planned(policy, path)
    sweep_leftovers(host)
    printed = Said(sys.stdout, settings.output, quiet=settings.quiet)
    printed.follows(path, len(wanted.rules))

    def again() -> Policy:
        try:
            policy = _read(path)[1]
        except GpushareError as error:
            printed.failed(error)
            raise
        printed.follows(path, len(policy.rules))
        return policy

    keep_slices(host, policy, reload=again, say=printed.events)
    return 0


def _read(path: str) -> tuple[HostFile, Policy]:
    from gpushare.hostfile.load import load_own, names_in
    from gpushare.timeslice.keep import Policy

    wanted = load_own(path)
    if not wanted.rules:
        raise BadUsage(
            f"{path} has no rules for time-slices",
            "add them under 'slices', or give another file: -f FILE",
            code="no_rules",
        )
    return wanted, Policy(wanted.rules, names_in(wanted))


def _planned(policy: Policy, path: str) -> Result:
    from gpushare.show.keep import planned_result
    from gpushare.timeslice.keep import verdicts

    return planned_result(verdicts(settings.connect(), policy), path)
