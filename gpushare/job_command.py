"""A job as the command that starts it: what advice, bench, tune, doctor and the exports print. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any, Final

from gpushare.base.model import Priority
from gpushare.base.units import MIB, size_option
from gpushare.base.values import dataclass


@dataclass(frozen=True, kw_only=True)
class JobCommand:
    """What `gpushare run` is asked for, or with ``copies`` `gpushare farm`; a field has the name of its option.

    ``str()`` gives the command line. Unset fields leave the default of the option.
    """

    # Words, or the text of a shell: ``python3 train.py > log``.
    program: Sequence[str] | str = "CMD"
    # The options, in the order in which they are printed.
    mig: str | None = None
    # A selector, or a variable of the shell: ``$CUDA_VISIBLE_DEVICES``.
    gpu: str | None = None
    gpus: int | None = None
    copies: int | None = None
    parallel: int | None = None
    production: str | None = None
    metric: str | None = None
    lower_is_better: bool = False
    opportunistic: bool = False
    # The production job that it spares.
    target: str | None = None
    # ``slices=200us``, ``caps=60``, ``pause``, ``swap``, ``requeue``.
    yields: str | None = None
    keep_percent: float | None = None
    slice: str | None = None
    weight: float | None = None
    wait: bool = False
    # How long it runs at most: ``2h``.
    time: str | None = None
    requeue: bool = False
    # ``mps-fault``.
    restart_on: str | None = None
    swap: str | None = None
    movable: bool = False
    threads_percent: float | None = None
    # Rounded up to whole MiB; a part of the GPU's (``90%``), or "SIZE" where the reader is to choose it.
    memory: int | str | None = None
    over: str | None = None
    priority: Priority | None = None
    container: str | None = None
    name: str | None = None
    detach: bool = False
    root: bool = False

    def options(self) -> list[str]:
        """Return the options, quoted for a shell; a value that begins with $ is a variable of the shell."""
        words: list[str] = []
        for field, value in vars(self).items():
            if value is None or value is False or field in {"program", "root"}:
                continue
            words.append(_OPTIONS.get(field, f"--{field.replace('_', '-')}"))
            if value is not True:
                text = _value_text(field, value)
                words.append(f'"{text}"' if text.startswith("$") else shlex.quote(text))
        return words

    def __str__(self) -> str:
        program = self.program if isinstance(self.program, str) else shlex.join(self.program)
        verb = "run" if self.copies is None else "farm"
        return " ".join([*(["sudo"] if self.root else []), "gpushare", verb, *self.options(), "--", program])


# Those that are not named as their field.
_OPTIONS: Final = {
    "gpu": "-g",
    "target": "--for",
    "yields": "--yield",
    "keep_percent": "--keep",
    "threads_percent": "--threads",
    "detach": "-d",
}


def _value_text(field: str, value: Any) -> str:
    """Return the value of an option as it is typed."""
    if field == "memory" and isinstance(value, int):
        return size_option(math.ceil(value / MIB) * MIB)
    if isinstance(value, Priority):
        return value.title
    if isinstance(value, float):
        return f"{value:.3g}" if field == "weight" else f"{value:g}{'%' if field == 'keep_percent' else ''}"
    return str(value)
