"""`gpushare stop`: end a job in the way that is safe for its neighbours.

A job that gpushare runs is ended by its own gpushare, which gets SIGTERM; so is one that waits, which leaves the line.
Without a living gpushare, a client of MPS is stopped, drained and killed, a container is stopped by its engine, and
another program gets its signal (`end.ask_to_end`) and, after the grace, SIGKILL.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Container, Iterable, Sequence
from typing import Final

from gpushare.base.errors import NotFound, OperationFailed
from gpushare.base.model import Gpu, GpuProcess
from gpushare.base.units import format_duration, pid_of
from gpushare.base.values import dataclass
from gpushare.host.activity import ActivityMeter
from gpushare.host.host import Host, ending_hint
from gpushare.host.identity import Identity, is_stopped
from gpushare.host.process import info_of, signal_if_same, starts_of, wait_gone
from gpushare.host.program import MPS_CONTROL
from gpushare.host.records import has_records
from gpushare.host.store import Job, Named
from gpushare.memory.ledger import reservations
from gpushare.memory.swapped import forget_ended as forget_ended_swaps
from gpushare.memory.swapped import swaps
from gpushare.mps.control import control_command, is_server
from gpushare.mps.kill import (
    DRAIN_BOUND_SECONDS,
    Client,
    Drain,
    Ending,
    find_clients,
    meter_of,
    server_state_unless_fault,
    serves_clients_error,
)
from gpushare.pause.change import paused_jobs_among
from gpushare.pause.record import PAUSES
from gpushare.plan import Loss, Plan, Step, carry_out
from gpushare.run.container import engine_of, stop_container
from gpushare.run.end import GRACE_SECONDS, end_programs
from gpushare.run.jobs import (
    JobRecord,
    consent_to,
    forget_ended,
    job_in_line,
    job_names,
    job_of,
    no_job_error,
    running_record,
)

# What gpushare may take to end a program: its grace, the drain, the kill, and what it gives back.
BOUND_SECONDS: Final = 30.0
# The same after a second signal, which cuts the grace short.
HURRY_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_GONE_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to end: a job, and the gpushare that runs it or waits for it (None: there is none)."""

    job: Job
    supervisor: Identity | None = None
    waits: bool = False
    # None: it waits, or it is not a job of gpushare.
    record: JobRecord | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(Named):
    """How a job was ended. ``ended_by``: gpushare (its gpushare ended it), line (it left the line), mps (an MPS client), container or signal."""

    name: str | None
    pid: int
    ended_by: str
    seconds: float
    drain: Drain | None = None
    server_status: str | None = None
    container: str | None = None


# -- what is meant -----------------------------------------------------------------------------------------------------


def find_target(host: Host, text: str) -> Target:
    """Return the job with this name or PID that runs or waits, or the process with this PID.

    The PID may be that of its program or of its gpushare.

    Raises:
        BadUsage: it is neither a PID nor a possible name (``bad_name``), or several jobs have the name (``ambiguous_job``).
        NotFound: there is none (``no_job``).
    """
    record = running_record(host, text)
    if record is not None:
        supervisor = record.supervisor
        if supervisor is not None and not host.processes.alive(*supervisor):
            # It has ended.
            supervisor = None
        job = job_of(host, Identity(record.pid, record.started), record.name, record)
        return Target(job=job, supervisor=supervisor, record=record)
    waiting = job_in_line(host, text)
    if waiting is not None:
        supervisor = waiting.claim.processes[0]
        return Target(job=job_of(host, supervisor, waiting.name), supervisor=supervisor, waits=True)
    pid = pid_of(text)
    process = host.processes.identity(pid) if pid else None
    if process is None:
        raise no_job_error(host, text)
    return Target(job=job_of(host, process, None))


def in_order_of_ends(host: Host, targets: Iterable[Target]) -> list[Target]:
    """Return the targets in the order to end them: from the end of the line to its head, then those that run.

    In any other order one of them might start in the place of one that has ended.
    """
    places: dict[Identity | None, int] = {
        job.claim.processes[0]: place for place, job in enumerate(reservations(host) or []) if job.waits
    }
    # Those that do not wait have none.
    return sorted(targets, key=lambda target: places.get(target.supervisor, -1), reverse=True)


def forget_what_ended(host: Host, just_ended: Container[int] = ()) -> None:
    """Remove this user's records of what has ended, also of the jobs ``just_ended``; a failure does not matter."""
    if has_records(host, "pause"):
        PAUSES.sweep(host, lambda job: not job.lives(host))
    if has_records(host, "swap"):
        forget_ended_swaps(host)
    forget_ended(host, just_ended)


# -- how it ends -------------------------------------------------------------------------------------------------------


class Stop:
    """The end of one job: ``plan``, and `run`, which carries it out. ``grace_seconds`` None: as `stop` says.

    Raises:
        NoPermission: the job belongs to another user, and this is not root.
        NotFound: the process is not a job, and not on a GPU (``not_on_gpu``).
        BadUsage: it serves the clients of MPS (``serves_clients``).
    """

    def __init__(self, host: Host, target: Target, gpus: Sequence[Gpu], grace_seconds: float | None = None) -> None:
        self._host, self.target, self._gpus, self._grace = host, target, gpus, grace_seconds
        self._job = target.job
        self._ending: Ending | None = None
        self._container: str | None = None
        self._status: str | None = None
        if target.supervisor is not None:
            self.ended_by = "line" if target.waits else "gpushare"
            self.plan = self._plan_by_gpushare(target.supervisor)
        else:
            self.ended_by, self.plan = self._way_and_plan_without_gpushare()

    def run(self) -> Stopped:
        """Carry the plan out, and read back that the job is gone.

        Raises:
            NoPermission: a process belongs to another user.
            OperationFailed: it does not end (``still_running``, ``process_stays``), or its MPS server is in FAULT
                (``server_fault``).
        """
        began = time.monotonic()
        try:
            carry_out(self.plan)
        finally:
            forget_what_ended(self._host, {self._job.pid})
        return Stopped(
            name=self._job.name,
            pid=self._job.pid,
            ended_by=self.ended_by,
            seconds=round(time.monotonic() - began, 3),
            drain=None if self._ending is None else self._ending.drain,
            server_status=self._status,
            container=self._container,
        )

    def _plan_by_gpushare(self, supervisor: Identity) -> Plan:
        """Return the plan that asks the job's own gpushare to end it, or to leave the line."""
        job = self._job
        does = f"leaves the line: {job.title}" if self.target.waits else f"ends {job.title} the safe way"
        steps = (
            Step(
                what=f"ask its gpushare (process {supervisor.pid}), which {does}",
                command=f"kill -TERM {supervisor.pid}",
                do=lambda: signal_if_same(self._host.processes, *supervisor, signal.SIGTERM),
            ),
            Step(
                what=f"wait until it is gone, at most {format_duration(self._bound_seconds)}",
                command=f"while kill -0 {supervisor.pid}; do sleep 0.1; done",
                do=lambda: self._wait_for_end(supervisor),
                changes=False,
            ),
        )
        return Plan(title=f"stop {job.title}", steps=steps, consent=consent_to(self._host, job, "ends"))

    @property
    def _bound_seconds(self) -> float:
        """Return how long to wait for the job's gpushare: for the grace (the given one, else the job's own), then for the end."""
        if self._grace is not None:
            return self._grace + HURRY_SECONDS
        record = self.target.record
        own_grace = 0.0 if record is None else record.grace_seconds or 0.0
        return max(BOUND_SECONDS, own_grace + HURRY_SECONDS)

    def _wait_for_end(self, supervisor: Identity) -> None:
        """Wait until the job is gone; after a given grace ask once more. Raises OperationFailed: it is still there."""
        if self._wait_gone(supervisor, self._bound_seconds if self._grace is None else self._grace):
            return
        hint = f"its own grace period may be longer; to cut it short: gpushare stop --grace 0 {self._job.selector}"
        if self._grace is not None:
            # As a second Ctrl-C: it cuts the grace short.
            signal_if_same(self._host.processes, *supervisor, signal.SIGTERM)
            if self._wait_gone(supervisor, HURRY_SECONDS):
                return
            hint = "its processes may hang in the driver; see: sudo dmesg | tail"
        raise OperationFailed(
            f"{self._job.title} has not ended within {format_duration(self._bound_seconds)}: its gpushare (process"
            f" {supervisor.pid}) is still running",
            hint,
            code="still_running",
        )

    def _wait_gone(self, supervisor: Identity, seconds: float) -> bool:
        """Wait until the job's gpushare and its program are gone, at most this long; return whether they are."""
        both = {supervisor, Identity(self._job.pid, self._job.started)}
        deadline = time.monotonic() + seconds
        while any(self._host.processes.alive(*process) for process in both):
            if time.monotonic() >= deadline:
                return False
            if is_stopped(supervisor.pid):
                # By Ctrl-Z, which may take effect only after it was asked: stopped, it does not act on the signal.
                signal_if_same(self._host.processes, *supervisor, signal.SIGCONT)
            time.sleep(_POLL_SECONDS)
        return True

    def _way_and_plan_without_gpushare(self) -> tuple[str, Plan]:
        """Return how a program ends that no gpushare runs (`Stopped.ended_by`), and the plan."""
        host = self._host
        job = self._job
        info = info_of(host.processes, job.pid)
        if is_server(info.name) or info.name == MPS_CONTROL:
            kind = "server" if is_server(info.name) else "control daemon"
            raise serves_clients_error(job.pid, kind, "see its GPU: gpushare mps status; stop it: gpushare mps stop")
        tree = host.processes.descendants(job.pid)
        clients = find_clients(host, self._gpus, tree)
        on_gpu = [(gpu, process) for gpu in self._gpus for process in gpu.processes or () if process.pid in tree]
        under_mps = bool(clients) or any(process.mps for _, process in on_gpu)
        if not (self.target.record or on_gpu or under_mps or self._may_be_off_gpu(tree)):
            raise NotFound(
                f"process {job.pid} is not a job of gpushare, and not on a GPU",
                f"{ending_hint(host, job.pid)}; see what runs: gpushare jobs -a",
                code="not_on_gpu",
            )
        losses = self._losses(tree)
        container = info.container
        # Its engine does not drain the queue of an MPS client.
        engine = None if container is None or under_mps else engine_of(container)
        if under_mps:
            way = "mps"
            steps = self._drain_steps(tree, clients, on_gpu)
        elif engine is not None and container is not None:
            way = "container"
            steps = (self._engine_step(engine, container),)
        else:
            way = "signal"
            steps = (self._signal_step(tree),)
        return way, Plan(title=f"stop {job.title}", steps=steps, consent=losses)

    def _losses(self, tree: Sequence[int]) -> tuple[Loss, ...]:
        """Return what to ask about before a program ends that no gpushare runs; nothing if a record of this user names it."""
        job = self._job
        # Of another user's job all processes are lost, whosever they are.
        losses = consent_to(self._host, job, "ends", tree if job.uid == self._host.uid else ())
        record = self.target.record
        # To root, the record of another user may name any process.
        is_recorded_here = record is not None and record.keeper_uid is None
        return losses if losses or is_recorded_here else (self._loss_of_job(),)

    def _may_be_off_gpu(self, tree: Sequence[int]) -> bool:
        """Return whether a program is paused or swapped out, or cannot be seen on the GPU from this PID namespace."""
        host = self._host
        if has_records(host, "pause") and paused_jobs_among(host, [self._job.pid]):
            return True
        if has_records(host, "swap") and any(image.pid in tree for swap in swaps(host) for image in swap.images):
            return True
        is_blind = host.processes.namespace_is_host() is False
        return is_blind and any(host.processes.uses_driver(pid) for pid in tree)

    def _loss_of_job(self) -> Loss:
        """Return the question to ask before a job is ended whose gpushare is gone, or a process that is not a job by itself."""
        job = self._job
        if self.target.record is not None:
            return Loss(action="ends", what=job.title, why=("its gpushare is gone",))
        name = info_of(self._host.processes, job.pid).name
        program = () if name is None else (name,)
        whole_job = job_names(self._host, [job.pid]).get(job.pid)
        reason = "gpushare did not start it" if whole_job is None else f"a part of job '{whole_job}'"
        return Loss(action="ends", what=job.title, why=(*program, reason))

    def _drain_steps(
        self, tree: Sequence[int], clients: Sequence[Client], on_gpu: Sequence[tuple[Gpu, GpuProcess]]
    ) -> tuple[Step, ...]:
        """Return the steps that stop, drain and kill a client of MPS, and read the state of its server."""
        host = self._host
        bound = DRAIN_BOUND_SECONDS if self._grace is None else self._grace
        if clients:
            meter = meter_of(host, clients[0], self._gpus)
        else:
            # NVML lists it as a client, and its daemon does not answer.
            gpu, process = next((gpu, each) for gpu, each in on_gpu if each.mps)
            meter = ActivityMeter(host.nvml, gpu.index, process.gpu_instance_id)
        self._ending = Ending(host, starts_of(host.processes, tree), meter, bound)
        server = clients[0].client.server_pid if clients else None
        if server is None:
            return self._ending.steps()

        def read_server_state() -> None:
            self._status = server_state_unless_fault(host, clients[0])

        state_step = Step(
            what="read the state of the MPS server",
            command=control_command(clients[0].daemon.pipe_directory or "", f"get_server_status {server}"),
            do=read_server_state,
            changes=False,
        )
        return (*self._ending.steps(), state_step)

    def _engine_step(self, engine: str, container: str) -> Step:
        """Return the step in which the engine stops the job's container."""
        grace = GRACE_SECONDS if self._grace is None else self._grace

        def stop() -> None:
            """Let the engine stop the container, and check that its program has ended."""
            self._container = container
            stop_container(engine, container, grace)
            if wait_gone(self._host.processes, {self._job.pid: self._job.started}, _GONE_SECONDS):
                raise OperationFailed(
                    f"{engine} has not stopped container {container}",
                    f"see why: {engine} stop {container}; or remove it: {engine} rm --force {container}",
                    code="still_running",
                )

        text = f"let {engine} stop container {container}, and kill it after {format_duration(grace)}"
        return Step(what=text, command=f"{engine} stop -t {grace:g} {container}", do=stop)

    def _signal_step(self, tree: Sequence[int]) -> Step:
        """Return the step that ends a job outside MPS by signals: there its end breaks no other."""
        host = self._host
        job = self._job
        grace = GRACE_SECONDS if self._grace is None else self._grace
        what = f"end {job.title}: SIGTERM, and SIGKILL after {format_duration(grace)}"
        if has_records(host, "pause") and paused_jobs_among(host, [job.pid]):
            what = f"resume it, so that it can end, then {what}"
        pids = " ".join(map(str, tree))

        def end() -> None:
            """End the job; `set` returns no clients: outside MPS there are none."""
            programs = {job.pid: job.started}
            end_programs(host, programs, clients=set, meter=None, number=signal.SIGTERM, grace_seconds=grace)

        return Step(what=what, command=f"kill -TERM {pids}; sleep {grace:g}; kill -KILL {pids}", do=end)
