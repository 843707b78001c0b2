"""What the completions offer as values of options and arguments."""

from __future__ import annotations

# The GPUs of the host, which the completion asks gpushare for.
GPUS = "@gpus"
# A program and its arguments.
PROGRAM = "@program"
# A file or directory.
FILES = "@files"


def option_values(name: str) -> tuple[str, ...]:
    """Return the values of an option by its long name: words, one of the ``@`` marks, or nothing."""
    from gpushare.model import Priority
    from gpushare.show.result import OutputFormat

    return {
        "--gpu": (GPUS,),
        "--host": ("local", *simulated_hosts()),
        "--output": tuple(form.value for form in OutputFormat if form is not OutputFormat.AUTO),
        "--priority": tuple(level.title for level in Priority),
        "--pipe-directory": (FILES,),
    }.get(name, ())


def argument_values(path: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the values of an argument of a command."""
    from gpushare.model import TimeSlice

    if path == ("run",):
        return (PROGRAM,)
    if path == ("timeslice", "set"):
        return tuple(level.title for level in TimeSlice)
    if path[:1] == ("sim",) and "HOST" in name:
        return simulated_hosts()
    return ()


def simulated_hosts() -> tuple[str, ...]:
    """Return the simulated hosts with one GPU, one per model."""
    from gpushare.gpu_models import load_models

    return tuple(sorted(f"sim:{model.short}" for model in load_models().values()))
