"""What a recipe is made of: changes of the host, each with its undo, and jobs; as lines to type. Pure."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpushare.base.model import TimeSlice
from gpushare.base.units import ranges
from gpushare.base.values import NOT_STORED
from gpushare.job_command import JobCommand
from gpushare.mig.wish import wish_of

if TYPE_CHECKING:
    from gpushare.advice.case import Workload
    from gpushare.advice.situation import Situation
    from gpushare.mig.wish import Wish
    from gpushare.mps.limits import Limits


class Verb(str, Enum):
    """The commands that change a GPU."""

    TIMESLICE_SET = "timeslice set"
    TIMESLICE_RESET = "timeslice reset"
    MPS_START = "mps start"
    MPS_SET = "mps set"
    MPS_STOP = "mps stop"
    MIG_ENABLE = "mig enable"
    MIG_APPLY = "mig apply"
    MIG_CREATE = "mig create"
    MIG_DESTROY = "mig destroy"
    MIG_DISABLE = "mig disable"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of one GPU or several: `advise` prints it as a command, `advise --apply` plans and carries it out."""

    verb: Verb
    gpus: tuple[int, ...]
    # The UUID of a MIG instance of the GPU, if the change is in that instance.
    instance: str | None = None
    limits: Limits | None = None
    level: TimeSlice | None = None
    wish: Wish = ()
    # Of the instances of the wish, in its order; one name is numbered.
    names: tuple[str, ...] = ()
    # For `mig disable`: idle instances go first.
    destroy: bool = False
    # Without a question: the lines before it made what is named, or the user has given it away.
    yes: bool = False
    sudo: bool = False

    @property
    def selector(self) -> str:
        """Return the ``-g`` value for its GPUs or its instance."""
        return self.instance or _selector(self.gpus)

    @property
    def per_gpu(self) -> tuple[Change, ...]:
        """Return the change of each of its GPUs alone."""
        return tuple(replace(self, gpus=(gpu,)) for gpu in self.gpus)

    @property
    def words(self) -> tuple[str, ...]:
        """Return its command line after ``gpushare``."""
        words = self.verb.value.split()
        if self.level is not None:
            words.append(self.level.title)
        words += ["-g", self.selector]
        if self.limits is not None:
            words += self.limits.options()
        words += map(str, self.wish)
        if self.names:
            words += ["--name", ",".join(self.names)]
        if self.verb is Verb.MIG_DESTROY:
            words.append("all")
        if self.destroy:
            words.append("--destroy")
        if self.yes:
            words.append("-y")
        return tuple(words)


@dataclass(frozen=True)
class AdviceStep:
    """One step: what it does, and the command to type; ``command`` is None if there is none."""

    what: str
    text: str | None = field(default=None, metadata=NOT_STORED)
    change: Change | None = field(default=None, metadata=NOT_STORED)
    starts_job: bool = field(default=False, metadata=NOT_STORED)
    json_properties: ClassVar = ("command",)

    @property
    def command(self) -> str | None:
        """Return what is typed; None: there is no command for it."""
        if self.change is None:
            return self.text
        return f"{'sudo ' if self.change.sudo else ''}gpushare {shlex.join(self.change.words)}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Lines in order, those that undo them, and what to measure afterwards."""

    lines: tuple[AdviceStep, ...]
    undo: tuple[AdviceStep, ...]
    measure: tuple[str, ...]
    # The lines name what earlier ones made: one change cannot carry them out.
    several_shells: bool


def join_recipes(recipes: Sequence[Recipe]) -> Recipe:
    """Return one recipe for all: the lines of one after those of the other, equal changes of several GPUs as one."""
    return Recipe(
        lines=_merge_lines(line for made in recipes for line in made.lines),
        undo=_merge_lines(line for made in recipes for line in made.undo),
        measure=tuple(dict.fromkeys(text for made in recipes for text in made.measure)),
        several_shells=any(made.several_shells for made in recipes),
    )


def _merge_lines(lines: Iterable[AdviceStep]) -> tuple[AdviceStep, ...]:
    """Return the lines without duplicates; equal changes of several GPUs are one, equal jobs are not."""
    gpus_of_line: dict[tuple[AdviceStep, int], set[int]] = {}
    for number, line in enumerate(lines):
        gpus = () if line.change is None else line.change.gpus
        key = (_with_gpus(line, ()), number if line.starts_job else -1)
        gpus_of_line.setdefault(key, set()).update(gpus)
    return tuple(_with_gpus(line, sorted(gpus)) for (line, _), gpus in gpus_of_line.items())


def _with_gpus(line: AdviceStep, gpus: Sequence[int]) -> AdviceStep:
    """Return a line with its change on other GPUs; the same line if it changes nothing."""
    return line if line.change is None else replace(line, change=replace(line.change, gpus=tuple(gpus)))


def _selector(gpus: Iterable[int]) -> str:
    """Return the ``-g`` value for these GPUs: ``0-3,5``."""
    return ranges(gpus).replace(" ", "")


_NEEDS_NO_ROOT: Final = frozenset({Verb.MPS_START, Verb.MPS_SET, Verb.MPS_STOP})
# The driver's own slice: given to a job, it says that the job runs outside MPS.
OWN_SLICE: Final = "2ms"
# The driver's calls for the slice of a process are the same from this branch on.
FIRST_SLICES: Final = 515


@dataclass
class Steps:
    """What a recipe is made of while it is written, for the GPUs that a situation is spread over."""

    s: Situation
    lines: list[AdviceStep] = field(default_factory=list)
    undo: list[AdviceStep] = field(default_factory=list)
    measure: list[str] = field(default_factory=list)
    several_shells: bool = False
    # Of the jobs that have names, in the order in which they start.
    job_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sudo = "" if self.s.host.root else "sudo "

    @property
    def own_slice(self) -> str | None:
        """Return the value of ``--slice`` for jobs that only need to be outside MPS; None: the driver is too old for it.

        `gpushare run` starts a job with a slice outside MPS. This one is about what the driver gives by itself.
        """
        too_old = self.s.host.driver_major is not None and self.s.host.driver_major < FIRST_SLICES
        return None if too_old else OWN_SLICE

    @property
    def gpu(self) -> str:
        """Return the ``-g`` value for all GPUs of the situation."""
        return self.s.gpu.instance or _selector(gpu.index for gpu in self.s.used_gpus)

    def each_gpu(self) -> list[Situation]:
        """Return the situation on each of its GPUs alone."""
        return [self.s.on(gpu) for gpu in self.s.used_gpus]

    def add_line(self, what: str, command: str | None = None) -> None:
        """Add a line that changes nothing of the host itself."""
        self.lines.append(AdviceStep(what, command))

    def command_line(self, what: str, *words: str, root: bool = False) -> AdviceStep:
        """Return a line with a command of gpushare that no `Change` stands for."""
        return AdviceStep(what, f"{self.sudo if root else ''}gpushare {shlex.join(words)}")

    def change_line(self, what: str, s: Situation, verb: Verb, **how: Any) -> AdviceStep:
        """Return the line of a change of a GPU; ``how`` are further fields of `Change`."""
        sudo = bool(self.sudo) and verb not in _NEEDS_NO_ROOT
        own = {"gpus": (s.gpu.index,), "instance": s.gpu.instance, "sudo": sudo}
        return AdviceStep(what, change=Change(**{"verb": verb, **own, **how}))

    def add_change(self, what: str, s: Situation, verb: Verb, **how: Any) -> None:
        """Add a change of a GPU and what undoes it."""
        line = self.change_line(what, s, verb, **how)
        self.lines.append(line)
        if line.change is not None:
            self.undo_first(undo_of(self, s, line.change))

    def undo_first(self, lines: Sequence[AdviceStep]) -> None:
        """Put lines before the present undo: what is done last is undone first."""
        self.undo[:0] = lines

    def free_name(self, name: str) -> str:
        """Return a name for a job: with a number if a job on another GPU has it.

        A job on these GPUs may have the name: that is then the job, and its line says that it runs already.
        """
        taken = {job.name for job in self.s.host.jobs} - set(self.s.jobs)
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(free for free in names if free not in taken)

    def add_job(self, what: str, work: Workload, **options: Any) -> None:
        """Add the line of a job, by default on one of the GPUs of the situation; a job of its name that runs there stays.

        ``options`` are fields of `JobCommand`, of which ``production`` or ``name`` is the name.
        """
        name_option = "production" if options.get("production") else "name"
        name = options.get(name_option)
        if name is not None:
            free_name = options[name_option] = self.free_name(name)
            self.job_names.append(free_name)
            if free_name in self.s.jobs:
                self.add_line(f"{what}: '{free_name}' runs already, and stays as it is")
                return
            if free_name != name:
                what += f"; '{name}' is a job on another GPU"
        gpus = None if self.s.gpus_each == 1 else work.gpus
        job = JobCommand(**{"gpu": self.gpu, "gpus": gpus, "program": work.command or "CMD", **options})
        self.lines.append(AdviceStep(what, str(job), starts_job=True))

    def add_copies(
        self, work: Workload, count: int | None, *how: str | None, default: str = "job", **options: Any
    ) -> None:
        """Add the line of the first of some equal jobs, with the names of the others.

        ``default`` is the name where the workload has none.
        """
        name = clean_name(work.name, 1, default)
        names = [name]
        if count is not None and count > 1:
            names = [f"{name}-{number}" for number in range(1, count + 1)]
        # Jobs that run come last: the line is to start one that does not run.
        first, *rest = sorted(names, key=lambda name: self.free_name(name) in self.s.jobs)
        others = [self.free_name(name) for name in rest]
        what = program_text(count, label_of(work), *how)
        if len(others) == 1:
            what += f"; the other is {others[0]}"
        elif others:
            listed = f"{others[0]} to {others[-1]}" if others == names[1:] else ", ".join(others)
            what += f"; the others are {listed}"
        self.add_job(what, work, name=first, **options)
        self.job_names += others

    def finished_recipe(self) -> Recipe:
        """Return the recipe: with nothing else to undo, the undo is the end of the jobs that have names."""
        undo = list(self.undo)
        # The host is asked for the running jobs only where there are names.
        if self.job_names and not any(line.command for line in undo):
            running = {job.name for job in self.s.host.jobs}
            started = [name for name in self.job_names if name not in running]
            # Where all of them run already, so that it starts none, those.
            ended = started or [name for name in self.job_names if name in self.s.jobs]
            if ended:
                undo.insert(0, self.command_line("end the jobs: what they set ends with them", "stop", *ended))
        return Recipe(
            lines=_merge_lines(self.lines),
            undo=_merge_lines(undo),
            measure=tuple(self.measure),
            several_shells=self.several_shells,
        )


def undo_of(steps: Steps, s: Situation, change: Change) -> list[AdviceStep]:
    """Return the lines that undo a change of a GPU, from what is there before it."""
    verb, gpu = change.verb, s.gpu
    if verb is Verb.MPS_START:
        return [steps.change_line("stop MPS; waits for its programs", s, Verb.MPS_STOP, instance=change.instance)]
    if verb is Verb.MPS_SET:
        if gpu.mps is None:
            return [AdviceStep("restore the limits with the line that `gpushare mps set` printed")]
        return [steps.change_line("restore the limits", s, verb, limits=limits_to_set(gpu.mps))]
    if verb is Verb.MPS_STOP:
        return [steps.change_line("start MPS again with its current limits", s, Verb.MPS_START, limits=gpu.mps)]
    if verb is Verb.TIMESLICE_SET:
        lines = [steps.change_line("restore the default", s, Verb.TIMESLICE_RESET)]
        if gpu.time_slice not in {None, TimeSlice.DEFAULT}:
            what = "then the level, which gpushare sets only in a compute mode that admits several programs"
            level = f"compute-policy -i {gpu.index} --set-timeslice {int(gpu.time_slice or 0)}"
            lines.append(AdviceStep(what, f"{steps.sudo}nvidia-smi {level}"))
        return lines
    if verb is Verb.MIG_CREATE and change.names:
        what = "destroy the instance and stop its MPS daemon"
        return [steps.command_line(what, "mig", "destroy", *change.names, "-y", root=True)]
    # An instance with a name is not destroyed without a question, and the change gives names.
    yes = bool(change.names)
    if not gpu.mig_enabled:
        return [steps.change_line("turn MIG off again", s, Verb.MIG_DISABLE, destroy=True, yes=yes)]
    if verb is not Verb.MIG_DISABLE and (gpu.layout is None or not gpu.layout.instances):
        return [steps.change_line("destroy the instances again", s, Verb.MIG_DESTROY, yes=yes)]
    return lines_restoring_mig(steps, s)


def limits_to_set(limits: Limits) -> Limits:
    """Return what `mps set` has to say so that a daemon has exactly these limits; it cannot set the priority."""
    return replace(limits.explicit, priority=None)


def lines_restoring_mig(steps: Steps, s: Situation) -> list[AdviceStep]:
    """Return the undo of changes of MIG: lines that turn it on with its current instances, their names and grants."""
    layout = s.gpu.layout
    if layout is None or not layout.instances:
        return [steps.change_line("turn MIG on again", s, Verb.MIG_ENABLE)]
    wish = wish_of(layout.instances)
    lines = [steps.change_line("restore the current instances", s, Verb.MIG_APPLY, wish=wish)]
    for instance in layout.instances:
        if instance.name:
            words = ("mig", "name", instance.name, str(instance), "-g", str(s.gpu.index))
            lines.append(steps.command_line("restore the name", *words, root=True))
            lines += [
                steps.command_line("restore the grant", "mig", "grant", instance.name, user, root=True)
                for user in instance.granted
            ]
    return lines


def label_of(work: Workload) -> str | None:
    """Return the name of a workload, else its role; None if it has neither."""
    return work.name or (None if work.role is None else work.role.value)


def program_text(processes: int | None, name: str | None = None, *how: str | None) -> str:
    """Return which program a line starts, how often, and how: ``worker, 3 times, one at a time``."""
    label = "each program" if name is None and processes is None else name or "the program"
    times = "" if processes in {None, 1} else f"{processes} times"
    return ", ".join(filter(None, [label, times, *how]))


def clean_name(text: str | None, number: int, default: str = "group") -> str:
    """Return a text as a name that needs no quoting; if nothing is left of it, the default with its number."""
    clean = "".join(letter for letter in text or "" if letter.isascii() and (letter.isalnum() or letter in "-_"))
    if clean[:1].isalpha():
        return clean
    return default if number <= 1 else f"{default}{number}"
