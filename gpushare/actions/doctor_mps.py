"""The checks of `gpushare doctor` on MPS: its programs, and its daemons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpushare.actions.check import Check, Examination, Verdict, counted, remedy_of
from gpushare.errors import GpushareError
from gpushare.host import mps_control, mps_program

if TYPE_CHECKING:
    from gpushare.host.mps import FoundDaemon


def mps_programs(seen: Examination) -> Iterator[Check]:
    """Check that the control daemon and the server are installed."""
    for name, identifier in ((mps_control.PROGRAM, "mps.control"), (mps_control.SERVER_PROGRAM, "mps.server")):
        path = seen.host.programs.find(name)
        if path is None:
            yield Check(
                id=identifier,
                verdict=Verdict.WARN,
                seen=f"{name} is not installed",
                why="there is no MPS without it",
                remedy="install it: nvidia-compute-utils on Ubuntu, nvidia-cuda-mps on Debian",
            )
        elif name == mps_control.PROGRAM:
            yield _control(seen, path)
        else:
            yield Check(id=identifier, verdict=Verdict.PASS, seen=path)


def _control(seen: Examination, path: str) -> Check:
    try:
        version = mps_program.probe_version(seen.host.programs)
    except GpushareError as error:
        return Check(
            id="mps.control",
            verdict=Verdict.FAIL,
            seen=error.message,
            why="no MPS daemon can be started, asked or stopped",
            remedy=remedy_of(error),
        )
    known = f"binary version {version}" if version else "before driver 580"
    return Check(id="mps.control", verdict=Verdict.PASS, seen=f"{path}, {known}")


def mps_daemons(seen: Examination) -> Iterator[Check]:
    """Check every daemon: dead, silent, in FAULT, orphaned."""
    for found in seen.daemons:
        daemon = found.daemon
        if found.record is not None and found.record.interrupted:
            yield Check(
                id="mps.interrupted",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"a start of the MPS daemon of {found.record.device_uuid} is under way, or was interrupted",
                why="its limits may not be set, and a compute mode that it changed is still to be restored",
                remedy=f"gpushare mps stop -g {found.record.device_uuid}",
            )
        elif daemon.unasked:
            yield Check(
                id="mps.unasked",
                verdict=Verdict.SKIP,
                gpu=daemon.gpu_index,
                seen=f"MPS daemon {daemon.pid} of {daemon.user or 'user unknown'} was not asked: it is another user's",
            )
        elif daemon.ours and daemon.pid is None:
            yield Check(
                id="mps.stale",
                verdict=Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=f"an MPS daemon died and left its files in {found.home.directory if found.home else daemon.pipe_directory}",
                why="its limits, and a compute mode that it changed, are still noted there",
                remedy=f"gpushare mps stop -g {daemon.device_uuid}",
            )
        elif daemon.error is not None:
            yield Check(
                id="mps.answers",
                verdict=Verdict.FAIL if daemon.ours else Verdict.WARN,
                gpu=daemon.gpu_index,
                seen=daemon.error,
                why="no program can join it",
                remedy=f"gpushare mps logs -g {daemon.device_uuid}; gpushare mps stop -g {daemon.device_uuid} --force"
                if daemon.ours
                else "sudo gpushare mps status",
            )
        else:
            yield from _daemon_state(found)
    if not seen.daemons:
        yield Check(id="mps.daemons", verdict=Verdict.PASS, seen="no MPS daemon runs")


def _daemon_state(found: FoundDaemon) -> Iterator[Check]:
    daemon = found.daemon
    fault = [server.pid for server in daemon.servers if server.status == "FAULT"]
    if fault:
        yield Check(
            id="mps.fault",
            verdict=Verdict.FAIL,
            gpu=daemon.gpu_index,
            seen=f"MPS server {fault[0]} is in state FAULT",
            why="its clients have lost their contexts and new ones are refused (CUDA error 807) until all of them have ended",
            remedy=f"gpushare mps stop -g {daemon.device_uuid} --force" if daemon.ours else "end its clients",
        )
        return
    whose = (
        "of gpushare" if daemon.ours else f"of somebody else ({daemon.user or 'user unknown'}, {daemon.pipe_directory})"
    )
    if daemon.transient and not daemon.clients and found.home is not None and not found.home.live_leases():
        yield Check(
            id="mps.orphan",
            verdict=Verdict.WARN,
            gpu=daemon.gpu_index,
            seen=f"MPS daemon {daemon.pid} was started by a run that is over",
            why="nobody will stop it",
            remedy=f"gpushare mps stop -g {daemon.device_uuid}",
        )
        return
    yield Check(
        id="mps.daemons",
        verdict=Verdict.PASS,
        gpu=daemon.gpu_index,
        seen=f"MPS daemon {daemon.pid} {whose} answers, {counted(len(daemon.clients), 'client')}",
    )
