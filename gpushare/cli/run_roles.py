"""``gpushare run --production`` and ``--opportunistic``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpushare.cli.common import note, settings
from gpushare.errors import BadUsage, NotFound

if TYPE_CHECKING:
    from gpushare.actions.mps_limits import MpsLimits
    from gpushare.actions.roles import SparedProcess
    from gpushare.actions.run import RunOptions
    from gpushare.cli.run_words import Roles
    from gpushare.host.activity import ActivityRecorder
    from gpushare.host.host import Host
    from gpushare.selection import Device


def run_role(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    """Run a production job or an opportunistic one, and return the program's exit code."""
    if roles.production is not None:
        return _production(host, device, command, options, roles.production)
    return _opportunistic(host, device, command, options, roles)


def _production(host: Host, device: Device, command: Sequence[str], options: RunOptions, name: str) -> Any:
    from gpushare.actions.roles import open_production_share, production_cap_note
    from gpushare.actions.run import run_in
    from gpushare.actions.run_report import RunReport
    from gpushare.cli.run import planned
    from gpushare.host.tuned import check_job_name, find_tuned

    check_job_name(name)
    for text in production_cap_note(device, find_tuned(host, name), options.limits.threads_percent):
        note(text)
    if settings.dry_run:
        return planned(host, device, list(command), options.limits)
    share = open_production_share(host, device, command[0], options.limits, name)
    cap = share.daemon_cap()
    if cap is not None:
        note(
            f"the MPS daemon of {device.title} caps every client at {cap:g} %, this job too: gpushare mps stop, and run it again"
        )
    report = RunReport(device, sys.stderr, quiet=settings.quiet, limits=options.limits)
    return run_in(host, share, command, options, report)


def _opportunistic(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    from gpushare.actions.roles import spared_process

    process = spared_process(host, device, roles.beside)
    outside = process is not None and not process.under_mps
    duty = roles.duty if outside else _duty(host, device, options, roles)
    timed = roles.pause or (duty is not None and duty < 100)
    if process is not None and (timed or (outside and duty is None)):
        return _paused(host, device, command, options, replace(roles, duty=duty), process)
    if timed:
        _demand_one(host, device)
        raise _nobody(device, roles, duty)
    if process is not None and outside:
        note(f"{process.title} runs outside MPS: a cap cannot protect it, and this job runs all of the time beside it")
    return _capped(host, device, command, options, roles)


def _duty(host: Host, device: Device, options: RunOptions, roles: Roles) -> float | None:
    """Return the duty cycle that was asked for, or else tuned: with the tuned cap and priority, not with others."""
    from gpushare.actions.roles import tuned_beside

    if roles.duty is not None or roles.pause:
        return roles.duty
    tuned = tuned_beside(host, device, roles.beside)
    if tuned is None or tuned.duty_percent is None:
        return None
    cap, low = options.limits.threads_percent, options.limits.priority
    if cap in {None, tuned.threads_percent} and (low is None or bool(low) == tuned.low_priority):
        return tuned.duty_percent
    text = f"tuned for {tuned.duty_percent:g} % of the time with cap {tuned.threads_percent:g} %"
    text += ", low priority" if tuned.low_priority else ""
    note(f"{text}: with other limits it runs all of the time, unless you say --duty-cycle {tuned.duty_percent:g}")
    return None


def _nobody(device: Device, roles: Roles, duty: float | None) -> NotFound:
    """Return the error where the production job does not run for which this one would be stopped."""
    if roles.pause or roles.duty is not None:
        return NotFound(
            f"no production job runs on {device.title} that could be spared",
            f"start it: gpushare run --production NAME -g {device.selector} -- CMD; or name a process: --for PID",
            code="no_production",
        )
    name = roles.beside or "production"
    return NotFound(
        f"'{name}' does not run, and it was tuned for {duty:g} % of the time of this job beside it",
        f"start it: gpushare run --production {name} -g {device.selector} -- CMD; or for all of the time: --duty-cycle 100",
        code="no_production",
    )


def _demand_one(host: Host, device: Device) -> None:
    """Raise when several production jobs run: which of them is to be spared was not said."""
    from gpushare.actions.roles import living_productions

    names = [one.name for one in living_productions(host, device)]
    if len(names) > 1:
        raise BadUsage(
            f"{len(names)} production jobs run on {device.title}: {', '.join(names)}",
            f"say which is to be spared: --for {names[0]}",
            code="several_production",
        )


def _paused(
    host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles, process: SparedProcess
) -> Any:
    from gpushare.actions.pause import PausingShare
    from gpushare.actions.pauser import checkpoint_of
    from gpushare.actions.plain_share import PlainShare
    from gpushare.actions.production_job import ProductionJob
    from gpushare.actions.roles import DUTY_COSTS, NOT_PROTECTED
    from gpushare.actions.run import run_in
    from gpushare.actions.run_environment import check_program
    from gpushare.actions.run_report import RunReport
    from gpushare.actions.share import Share, open_mps_share
    from gpushare.cli.run import planned

    check_program(command[0])
    limits = options.limits
    checkpoint = None if process.under_mps else checkpoint_of(host)
    how = "by the driver's lock" if checkpoint is not None else "by SIGSTOP"
    if not roles.pause and roles.duty is None:
        note(
            f"process {process.pid} runs outside MPS: a cap cannot protect it, so this job stands still while it works"
        )
    note(f"opportunistic beside {process.title}: paused {how} {_when(roles, 'it')}; its memory stays on the GPU")
    recorder = None
    if process.under_mps:
        from gpushare.actions.roles import spare

        recorder = _recorder(host, device) if roles.duty is None else None
        spared = spare(host, device, limits, roles.beside)
        limits = spared.limits
        for text in (*spared.notes, f"when it runs: {_words(limits)}"):
            note(text)
    elif limits != type(limits)():
        note("outside MPS there are no limits: --threads, --memory and --priority are left out")
    for text in (*([NOT_PROTECTED] if process.under_mps else []), *([] if roles.duty is None else [DUTY_COSTS])):
        note(text)
    if settings.dry_run:
        when = _when(roles, process.title)
        if process.under_mps:
            return planned(host, device, list(command), limits, f", paused {when}")
        return _planned_pause(host, device, command, when)
    inner: Share = open_mps_share(host, device, command[0], limits) if process.under_mps else PlainShare(host, device)
    production = ProductionJob(
        host, device, process.pid, process.started_at, process.name, always=roles.duty is not None
    )
    share = PausingShare(inner, host, production, checkpoint, recorder, roles.duty)
    report: Any = RunReport(device, sys.stderr, quiet=settings.quiet, limits=limits)
    if not process.under_mps:
        from gpushare.actions.mig_report import InstanceReport

        report = InstanceReport(device, sys.stderr, quiet=settings.quiet)
    return run_in(host, share, command, replace(options, limits=limits), report)


def _when(roles: Roles, who: str) -> str:
    """Return when an opportunistic job is paused, with ``who`` for the production job."""
    return f"while {who} works" if roles.duty is None else f"for {100 - roles.duty:g} % of the time while {who} runs"


def _recorder(host: Host, device: Device) -> ActivityRecorder | None:
    """Return what shows production's work under MPS; None, and it is said, where only its CPU does."""
    from gpushare.host.activity import ActivityRecorder

    recorder = ActivityRecorder(host.nvml, device.gpu.index, None if device.mig is None else device.mig.gpu_instance_id)
    if recorder.gpm:
        return recorder
    note("under MPS this GPU shows only work that uses the CPU: a production job that waits without it pauses nobody")
    return None


def _planned_pause(host: Host, device: Device, command: Sequence[str], when: str) -> Any:
    from gpushare.actions.plain_share import plain_environment
    from gpushare.actions.plan import Step
    from gpushare.cli.run import command_line
    from gpushare.show.plan import plan_result

    line = command_line(plain_environment({}, host, device), command)
    what = f"run {command[0]} on {device.title}, paused {when}"
    return plan_result("run", [Step(what=what, command=line, do=lambda: None)], dry_run=True)


def _capped(host: Host, device: Device, command: Sequence[str], options: RunOptions, roles: Roles) -> Any:
    from gpushare.actions.roles import NOT_PROTECTED, spare
    from gpushare.actions.run import run
    from gpushare.actions.run_report import RunReport
    from gpushare.cli.run import planned

    spared = spare(host, device, options.limits, roles.beside)
    limits = spared.limits
    for text in spared.notes:
        note(text)
    if settings.dry_run:
        return planned(host, device, list(command), limits)
    beside = "" if spared.production is None else f" beside '{spared.production.name}'"
    note(f"opportunistic{beside}: {_words(limits)}")
    note(NOT_PROTECTED)
    given = replace(options, limits=limits)
    return run(host, device, command, given, RunReport(device, sys.stderr, quiet=settings.quiet, limits=limits))


def _words(limits: MpsLimits) -> str:
    """Return limits for people: ``cap 60 %, low priority, memory limit 96.0 GiB``."""
    from gpushare.units import format_bytes, format_percent

    words = ["no cap" if limits.threads_percent is None else f"cap {format_percent(limits.threads_percent)}"]
    words += ["low priority"] if limits.priority else []
    words += [] if limits.memory_limit_bytes is None else [f"memory limit {format_bytes(limits.memory_limit_bytes)}"]
    return ", ".join(words)
