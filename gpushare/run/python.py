"""What `import gpushare` offers to scripts and notebooks: the verbs `status`, `run -d`, `pause`, `swap` and others as functions.

They act on the host that ``GPUSHARE_HOST`` names (default: this machine), and raise the errors of the command line:
``GpushareError`` with ``message``, ``hint`` and ``code``.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import TYPE_CHECKING, Final

from gpushare.base.errors import BadUsage, NeedsConsent, NotFound, TimedOut
from gpushare.base.units import parse_seconds
from gpushare.connect import connect
from gpushare.plan import Plan, carry_out, describe_losses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gpushare.base.model import Snapshot
    from gpushare.host.host import Host
    from gpushare.host.identity import Identity
    from gpushare.run.jobs import PastJob
    from gpushare.run.stop import Target

    # Of a command or an option.
    Word = str | float | os.PathLike[str]

_POLL_SECONDS: Final = 0.1
# Between leaving the line and the record of its program, or its end and the record of that, a job is nowhere.
_NOWHERE_SECONDS: Final = 5.0
# Options of `run` that `start` does not take, each with its hint.
_OURS: Final[Mapping[str, str]] = {
    "--host": 'name the host in the environment: os.environ["GPUSHARE_HOST"] = "sim:h200"',
    "--name": 'give it as an argument: name="train"',
    "--production": 'give it as an argument: production="serve"',
    **dict.fromkeys(("-d", "--detach"), "leave it out: start does this by itself"),
    **dict.fromkeys(("-n", "--dry-run"), "see the plan with the command: gpushare run --dry-run ..."),
    **dict.fromkeys(("-o", "--output", "-h", "--help", "--help-all", "--"), "leave it out"),
}


def _host() -> Host:
    """Return the host that ``GPUSHARE_HOST`` names."""
    return connect(os.environ.get("GPUSHARE_HOST") or "local")


def status(gpu: str | int | None = None) -> Snapshot:
    """Return the GPUs, how they are shared, and the processes on them; ``gpu`` as of ``-g``, None: all.

    Raises GpushareError: there is no driver, or not this GPU.
    """
    from gpushare.run.look import StatusReader

    return StatusReader(_host(), None if gpu is None else str(gpu)).snapshot()


def job(name: str | int, *, yes: bool = False) -> Job:
    """Return the job with this name or PID. Nothing is looked up yet: its methods raise NotFound if there is no such job.

    ``yes``: agree to what the commands would ask, such as root's pause of another user's job.
    """
    return Job(str(name), yes=yes)


def start(
    command: Sequence[Word],
    *,
    memory: str | None = None,
    wait: bool = False,
    gpu: str | int | None = None,
    name: str | None = None,
    production: str | None = None,
    threads: float | None = None,
    options: Sequence[Word] = (),
) -> Job:
    """Start a program in the background as `gpushare run -d` does, and return its job as soon as it runs or waits in line.

    ``production``: the name of a job that opportunistic ones spare; it has no other ``name``. ``options`` are further options
    of `gpushare run`: ``["--swap", "turns"]``. The job goes on after the end of this process; used as a context manager, it
    is stopped at the end of the block. Raises GpushareError: it does not start.
    """
    program = _words("command", command)
    further = _words("options", options)
    for word in further:
        option = word.partition("=")[0]
        if option in _OURS:
            raise BadUsage(f"{word} is not for options", _OURS[option])
    from gpushare.host.records import sweep_leftovers
    from gpushare.run.detach import could_not_start, detach, not_started_error

    host = _host()
    sweep_leftovers(host)
    values = {"--memory": memory, "--gpu": gpu, "--name": name, "--production": production, "--threads": threads}
    given = [word for option, value in values.items() if value is not None for word in (option, str(value))]
    words = ["-o", "json", "run", *given, *(["--wait"] if wait else []), *further, "--", *program]
    started = detach(host, words, program=program[0] if program else "", name=production or name)
    if could_not_start(host, started):
        raise not_started_error(started)
    return Job(started.name, supervisor=started.supervisor)


def _words(argument: str, words: Sequence[Word]) -> list[str]:
    """Return a command, or options, as words of text. Raises BadUsage unless it is a list of texts, numbers or paths."""
    example = '["python3", "train.py"]' if argument == "command" else '["--swap", "turns"]'
    hint = f"give a list of words: {argument}={example}"
    if isinstance(words, (str, bytes)):
        hint = f"split it: {argument}=shlex.split({os.fsdecode(words)!r})"
    else:
        with contextlib.suppress(TypeError):
            return [str(word) if isinstance(word, (int, float)) else os.fsdecode(word) for word in words]
    raise BadUsage(f"{argument} must be a list of texts, numbers or paths", hint)


def _seconds(duration: float | str | None) -> float | None:
    """Return a duration in seconds, also of one as on the command line: ``10m``. Raises BadUsage (``bad_duration``)."""
    if isinstance(duration, str):
        return parse_seconds(duration)
    if duration is not None and not 0 <= duration < math.inf:
        raise BadUsage(
            f"{duration} is not a duration", "give a time in seconds, or with its unit: '10m'", code="bad_duration"
        )
    return duration


class Job:
    """A job, by its name or PID. As a context manager it is stopped at the end of the block.

    One that `start` returned is never a later job of the same name: after its end the verbs raise NotFound.
    """

    def __init__(self, name: str, *, yes: bool = False, supervisor: Identity | None = None) -> None:
        self.name: Final = name
        self._host, self._yes, self._supervisor = _host(), yes, supervisor

    def __repr__(self) -> str:
        return f"gpushare.job({self.name!r})"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        # It has ended by itself.
        with contextlib.suppress(NotFound):
            self.stop()

    @property
    def output(self) -> Path:
        """Return the file that keeps what a job in the background prints.

        Raises GpushareError: there is none, such as of a process that gpushare did not start, or a later job has taken the name.
        """
        from gpushare.run.jobs import PAST
        from gpushare.run.output import find_output, gpushare_of

        output = find_output(self._host, self.name)
        os.close(output.descriptor)
        past = PAST.read(PAST.path(self._host, self.name))
        # The gpushare of the last job of this name; None: unknown.
        last = gpushare_of(self._host, self.name) or (None if past is None else past.supervisor)
        if self._supervisor is not None and last not in {None, self._supervisor}:
            raise NotFound(
                f"the output of this job '{self.name}' is gone: a later job has its name",
                "give each job a name of its own, or none",
                code="no_output",
            )
        return output.path

    def pause(self, seconds: float | str | None = None) -> None:
        """Take the job off the GPU, until `resume` or for this time. Raises GpushareError."""
        from gpushare.pause.change import pauses_locked
        from gpushare.run.jobs import pause_of

        with pause_of(self._host, self._checked_name, _seconds(seconds)) as work, pauses_locked(self._host):
            self._carry_out(work.plan(begin=True))

    def resume(self) -> None:
        """Put the job back on the GPU after `pause`. Raises GpushareError."""
        from gpushare.pause.change import pauses_locked, resume_step
        from gpushare.run.jobs import find_paused_job

        with pauses_locked(self._host), self._host.open_channels() as control:
            resume_step(self._host, control, find_paused_job(self._host, self._checked_name)).do()

    def stop(self, grace: float | str | None = None) -> None:
        """End the job in the way that is safe for its neighbours; ``grace``: seconds, or ``30s``. Raises GpushareError."""
        from gpushare.mig.places import with_names
        from gpushare.run.stop import Stop

        seconds = _seconds(grace)
        target = self._target()
        # A job of gpushare is ended by its gpushare: the GPUs are only looked at for other processes.
        gpus = () if target.supervisor is not None else with_names(self._host, self._host.nvml.sweep())
        work = Stop(self._host, target, gpus, seconds)
        self._agree(work.plan)
        work.run()

    def _target(self) -> Target:
        """Return what `stop` ends. A job that `start` returned has neither a place nor a record for a moment: wait for it."""
        from gpushare.run.stop import find_target

        began = time.monotonic()
        while True:
            name = self._checked_name
            try:
                return find_target(self._host, name)
            except NotFound:
                if self._supervisor is None or time.monotonic() - began > _NOWHERE_SECONDS:
                    raise
            time.sleep(_POLL_SECONDS)

    def swap_out(self) -> None:
        """Move the job out of the GPU into host memory. Raises GpushareError."""
        from gpushare.run.swap_job import plan_swap_out

        self._carry_out(plan_swap_out(self._host, self._checked_name, _quiet).plan)

    def swap_in(self, *, wait: bool = False) -> None:
        """Bring the job back to its GPU, with ``wait`` as soon as there is room. Raises GpushareError."""
        from gpushare.run.swap_job import plan_swap_in

        seconds = None if wait else 0.0
        self._carry_out(plan_swap_in(self._host, self._checked_name, seconds, _quiet, quiet=True).plan)

    def move(self, gpu: str | int | None = None, *, wait: bool = False) -> None:
        """Move the job to another GPU, the first of ``gpu`` (None: any of its model) with room. Raises GpushareError."""
        from gpushare.base.selection import select
        from gpushare.memory.swap import repair_first
        from gpushare.run.moving import Mover

        host = self._host
        repair_first(host, _quiet, dry_run=False)
        seconds = None if wait else 0.0
        mover = Mover(host, seconds, _quiet, quiet=True)
        devices = None if gpu is None else select(str(gpu), host.nvml.sweep())
        self._carry_out(mover.plan_job(self._checked_name, devices).plan)

    def wait(self, seconds: float | str | None = None) -> int | None:
        """Wait until the job has ended, and return its exit code; None: it was never started, or nobody saw its end.

        Raises:
            NotFound: there is no such job. This is certain five seconds after it was last seen, also if ``seconds`` are less.
            TimedOut: it still runs or waits after this time.
        """
        most_seconds = _seconds(seconds)
        began = seen = time.monotonic()
        while True:
            now = time.monotonic()
            if self._is_there():
                seen = now
                if most_seconds is not None and now - began >= most_seconds:
                    raise TimedOut(
                        f"'{self.name}' has not ended within {most_seconds:g} s", f"end it: gpushare stop {self.name}"
                    )
            else:
                past = self._past()
                if past is not None:
                    return past.exit_code
                if now - seen > _NOWHERE_SECONDS:
                    raise NotFound(f"no job '{self.name}' is known", "see all: gpushare jobs -v", code="no_job")
            time.sleep(_POLL_SECONDS)

    def _past(self) -> PastJob | None:
        """Return how the job has ended; None: nothing is known of its end."""
        from gpushare.run.jobs import last_past, past_jobs

        if self._supervisor is None:
            return last_past(self._host, self.name)
        # Later jobs may have had its name.
        return next((past for past in past_jobs(self._host) if past.supervisor == self._supervisor), None)

    def _is_there(self) -> bool:
        """Return whether the job runs or waits."""
        from gpushare.run.stop import find_target

        if self._supervisor is not None:
            return self._lives(self._supervisor)
        try:
            find_target(self._host, self.name)
        except NotFound:
            return False
        return True

    @property
    def _checked_name(self) -> str:
        """Return its name. Raises NotFound (``no_job``): the job has ended, and another one may have its name."""
        if self._supervisor is not None and not self._lives(self._supervisor):
            raise NotFound(f"this job '{self.name}' has ended", "see how: gpushare jobs -v", code="no_job")
        return self.name

    def _lives(self, supervisor: Identity) -> bool:
        """Return whether the job that `start` returned is there: its gpushare, or, if that was killed, its program."""
        from gpushare.run.jobs import JOBS, is_running

        if self._host.processes.alive(*supervisor):
            return True
        record = JOBS.read(JOBS.path(self._host, self.name))
        return record is not None and record.supervisor == supervisor and is_running(self._host, record)

    def _agree(self, plan: Plan) -> None:
        """Raise NeedsConsent if a plan asks something, unless ``yes`` was given."""
        if plan.consent and not self._yes:
            raise NeedsConsent(f"this {describe_losses(plan.consent)}", f"agree: gpushare.job({self.name!r}, yes=True)")

    def _carry_out(self, plan: Plan) -> None:
        self._agree(plan)
        carry_out(plan)


def _quiet(_: str) -> None:
    """Print nothing: notes of the command line are for people who watch it."""
