"""What the completions offer as values of options and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tools.tree import Option

# A program and its arguments.
PROGRAM: Final = "@program"
# A file or directory.
FILES: Final = "@files"
# What the completion asks gpushare for: of this machine, or of the host that the line names.
GPUS: Final = "@gpus"
NAMES: Final = "@names"
INSTANCES: Final = "@instances"
PROFILES: Final = "@profiles"
PLACES: Final = "@places"
JOBS: Final = "@jobs"
PAUSES: Final = "@pauses"
ENDED: Final = "@ended"
# A level of a time-slice, or behind a slice a job.
SLICES: Final = "@slices"


class Asked(NamedTuple):
    """Fields of the rows of a command's CSV: of those that match a basic regular expression."""

    command: str
    rows: str
    fields: str


_NAMED: Final = Asked("mig status", "^[0-9]", "3")
_RUNNING: Final = Asked("jobs -a", "^[0-9]", "1,2")
_OFFERED: Final = Asked("mig profiles", "^[0-9]", "2")
# Words that are always offered, and what is asked for.
ASKED: Final[Mapping[str, tuple[tuple[str, ...], tuple[Asked, ...]]]] = {
    GPUS: (("all",), (Asked("status", "^[0-9]", "1,2"),)),
    NAMES: ((), (_NAMED,)),
    INSTANCES: (("all",), (Asked("mig status", "^[0-9]", "3,4"),)),
    PROFILES: ((), (_OFFERED,)),
    PLACES: ((), (_OFFERED, _NAMED)),
    JOBS: ((), (_RUNNING,)),
    PAUSES: (("list",), (_RUNNING,)),
    SLICES: (("default", "short", "medium", "long"), (_RUNNING,)),
    # The names of jobs that run, wait, or have ended; the row of the titles begins with a letter.
    ENDED: ((), (Asked("jobs -v", "^[0-9]*,", "2"),)),
}
# Options that take a comma-separated list.
LISTS: Final = ("-g", "--gpu", "--needs", "--ways", "--isolation", "--evict")


def pipeline(asked: Asked, host: str) -> str:
    """Return the commands that print the values, one on a line; ``host`` is the shell's word for ``--host SPEC``."""
    return (
        f"gpushare {host} {asked.command} -o csv 2>/dev/null </dev/null | grep '{asked.rows}' | "
        f"cut -d, -f{asked.fields} | tr ',' '\\n' | grep . | sort -u"
    )


def option_values(option: Option) -> tuple[str, ...]:
    """Return the values of an option: words, one of the ``@`` marks, or nothing."""
    from gpushare.advice.case import LIKE, NEEDS
    from gpushare.advice.ways import ADVISED
    from gpushare.base.model import Priority
    from gpushare.gpu_models import load_models
    from gpushare.run.container import ENGINES
    from gpushare.show.result import OutputFormat

    if option.metavar in {"FILE", "DIR", "PATH"}:
        return (FILES,)
    if option.metavar == "JOB":
        return (JOBS,)
    if option.long == "--mig":
        return (PLACES,) if option.metavar == "PROFILE|NAME" else (INSTANCES,)
    return {
        "--gpu": (GPUS,),
        "--host": ("local", *simulated_hosts()),
        "--output": tuple(form.value for form in OutputFormat if form is not OutputFormat.AUTO),
        "--priority": tuple(level.title for level in Priority),
        "--evict": (INSTANCES,),
        "--forget": (NAMES,) if option.metavar else (),
        "--model": tuple(sorted(model.short for model in load_models().values() if model.profiles)),
        "--fail-on": ("failure", "warning"),
        "--container": ENGINES,
        "--users": ("same", "different"),
        "--isolation": ("none", "quota", "fault", "full"),
        "--like": tuple(LIKE),
        "--pattern": ("interactive", "bursty", "steady"),
        "--role": ("production", "opportunistic"),
        "--needs": tuple(name.replace("_", "-") for name in NEEDS),
        "--way": tuple(way.value for way in ADVISED),
        "--view": ("published", "today", "host"),
        "--ways": ("queue", "timeslice", "mps", "mps:100/n", "mps:200/n", "mig"),
        "--by": ("index", "uuid"),
        "--autodetect": ("nvml", "off"),
        "--signal": ("KILL", "TERM", "INT", "STOP", "CONT"),
    }.get(option.long, ())


def argument_values(path: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the values of an argument of a command."""
    from gpushare.advice.table import COLUMNS
    from gpushare.sim.faults import KINDS

    if path == ("run",):
        return (PROGRAM,)
    if path == ("timeslice", "set"):
        return (SLICES,)
    if path == ("logs",):
        return (ENDED,)
    if "JOB" in name:
        return (PAUSES,) if path == ("pause",) else (JOBS,)
    if path[:1] == ("sim",) and "HOST" in name:
        return simulated_hosts()
    if "FILE" in name:
        return (FILES,)
    if "WISH" in name or path == ("sim", "mig"):
        return (PROFILES,)
    return {
        ("mig", "destroy"): (INSTANCES,),
        ("mig", "env"): (NAMES,),
        ("mig", "grant"): (NAMES,),
        ("mig", "revoke"): (NAMES,),
        ("compare",): tuple(one.value for one in COLUMNS),
        ("sim", "fault"): KINDS,
    }.get(path, ())


def simulated_hosts() -> tuple[str, ...]:
    """Return the simulated hosts with one GPU, one per model."""
    from gpushare.gpu_models import load_models

    return tuple(sorted(f"sim:{model.short}" for model in load_models().values()))
