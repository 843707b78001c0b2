"""A job as the command that starts it: what advice, bench, tune, doctor and the exports print. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

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
    # A selector, or a variable of the shell: ``$CUDA_VISIBLE_DEVICES``.
    gpu: str | None = None
    gpus: int | None = None
    copies: int | None = None
    parallel: int | None = None
    mig: str | None = None
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
        memory = self.memory
        if isinstance(memory, int):
            memory = size_option(math.ceil(memory / MIB) * MIB)
        for option, value in (
            ("--mig", self.mig),
            ("-g", self.gpu),
            ("--gpus", self.gpus),
            ("--copies", self.copies),
            ("--parallel", self.parallel),
            ("--production", self.production),
            ("--metric", self.metric),
            ("--lower-is-better", self.lower_is_better),
            ("--opportunistic", self.opportunistic),
            ("--for", self.target),
            ("--yield", self.yields),
            ("--keep", None if self.keep_percent is None else f"{self.keep_percent:g}%"),
            ("--slice", self.slice),
            ("--weight", None if self.weight is None else f"{self.weight:.3g}"),
            ("--wait", self.wait),
            ("--time", self.time),
            ("--requeue", self.requeue),
            ("--restart-on", self.restart_on),
            ("--swap", self.swap),
            ("--movable", self.movable),
            ("--threads", None if self.threads_percent is None else f"{self.threads_percent:g}"),
            ("--memory", memory),
            ("--over", self.over),
            ("--priority", None if self.priority is None else self.priority.title),
            ("--container", self.container),
            ("--name", self.name),
            ("-d", self.detach),
        ):
            if value is True:
                words.append(option)
            elif value is not None and value is not False:
                text = str(value)
                words += [option, f'"{text}"' if text.startswith("$") else shlex.quote(text)]
        return words

    def __str__(self) -> str:
        program = self.program if isinstance(self.program, str) else shlex.join(self.program)
        verb = "run" if self.copies is None else "farm"
        return " ".join([*(["sudo"] if self.root else []), "gpushare", verb, *self.options(), "--", program])
