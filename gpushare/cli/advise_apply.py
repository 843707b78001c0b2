"""Carrying advice out: the very lines that it prints, run as commands of this program."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from gpushare.cli.common import settings
from gpushare.errors import GpushareError, NotSupported, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpushare.advice.advise import Advice

# The commands that set something up; those that run a program are left to the user.
_SET_UP: Final = frozenset(
    {
        *(("mps", verb) for verb in ("start", "set", "stop")),
        *(("mig", verb) for verb in ("apply", "create", "destroy", "disable")),
        ("timeslice", "set"),
    }
)


def applied(advice: Advice, notes: Sequence[str]) -> Any:
    """Carry the set-up of the winner out, or with --dry-run only show it.

    Raises:
        NotSupported: nothing fits, or the lines belong into several shells.
        GpushareError: what a line itself raises; the lines before it are taken back.
    """
    from gpushare.show.plan import plan_result

    lines = _set_up(advice)
    steps: list[Any] = []
    said = list(notes)
    # Where the way back is known only when it is done, the line itself says it.
    keeps_undo = advice.recipe is not None and any(line.command is None for line in advice.recipe.undo)
    for number, words in enumerate(lines):
        try:
            result = _run(words)
        except GpushareError as error:
            if number and not settings.dry_run:
                raise _half_done(error, advice) from error
            raise
        steps += [_Step(**step) for step in (result.data or {}).get("steps", ())]
        said += [note for note in result.notes if keeps_undo or not note.startswith("undo: ")]
    recipe = advice.recipe
    if recipe is not None:
        runs = [line for line in recipe.lines if line.command and _words(line.command)[:2] not in _SET_UP]
        said += [f"then, {line.what}: {line.command}" for line in runs]
        if not settings.dry_run and lines:
            said += [f"undo: {line.command}" for line in recipe.undo if line.command]
    return plan_result("advise", steps, dry_run=settings.dry_run, notes=said)


class _Step:
    """A step as the command's document has it."""

    def __init__(self, what: str, command: str, undo: str | None) -> None:
        self.what, self.command, self.undo = what, command, undo


def _set_up(advice: Advice) -> list[tuple[str, ...]]:
    if advice.best is None or advice.recipe is None:
        raise NotSupported(
            "nothing fits, so there is nothing to set up", "see why: gpushare advise -v", code="nothing_fits"
        )
    commands = [line.command for line in advice.recipe.lines if line.command is not None]
    if any("$CUDA_VISIBLE_DEVICES" in one or one.startswith("eval ") for one in commands):
        raise NotSupported(
            f"{advice.best.way.label} is set up in a shell per group",
            "type the lines that `gpushare advise` prints",
            code="several_shells",
        )
    return [words for words in map(_words, commands) if words[:2] in _SET_UP]


def _words(command: str) -> tuple[str, ...]:
    """Return the words of a gpushare line behind the program's name; none of another program's line."""
    words = shlex.split(command)
    if words[:1] == ["sudo"]:
        words = words[1:]
    return tuple(words[1:]) if words[:1] == ["gpushare"] else ()


def _run(words: tuple[str, ...]) -> Any:
    """Run one line in this process: the common options stay as they were given."""
    from gpushare.cli import root

    return root()(args=list(words), prog_name="gpushare", standalone_mode=False)


def _half_done(error: GpushareError, advice: Advice) -> GpushareError:
    commands = [line.command for line in (advice.recipe.undo if advice.recipe else ()) if line.command]
    return error.restated(
        message=f"{error.message}; what came before it was done",
        hint=f"take it back: {'; '.join(commands)}" if commands else None,
        kind=OperationFailed,
    )
