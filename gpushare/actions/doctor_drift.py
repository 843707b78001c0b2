"""The check of `gpushare doctor` on what was applied last: a reboot, a driver update or a hand takes it away."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpushare.actions.check import Check, Examination, Verdict, counted
from gpushare.actions.host_look import look
from gpushare.errors import GpushareError
from gpushare.host.applied import applied_path
from gpushare.layout.hostdiff import points

if TYPE_CHECKING:
    from gpushare.layout.live import LiveGpu

_AT_MOST: Final = 3
_KEEP: Final = "gpushare capture > gpushare.yaml; sudo gpushare apply -f gpushare.yaml"


def drift(seen: Examination) -> Iterator[Check]:
    """Check that the GPUs are as the last gpushare.yaml that held says, and that it would hold again at boot."""
    # What others have, grants and daemons, only root sees.
    if seen.nvml_error is not None or seen.host.uid != 0:
        return
    if seen.wanted_error is not None:
        yield Check(
            id="host.file",
            verdict=Verdict.WARN,
            seen=f"what was applied last does not hold any more: {seen.wanted_error.message}",
            why="gpushare.service applies it at boot, and would fail",
            remedy=f"keep what is there now: {_KEEP}",
        )
    kept = [gpu for gpu in seen.answering if gpu.index in seen.wanted]
    wrong = False
    for live in look(seen.host, kept) if kept else ():
        said = _said(seen, live)
        if said:
            wrong = True
            yield Check(
                id="host.drift",
                verdict=Verdict.WARN,
                gpu=live.gpu.index,
                seen=f"GPU {live.gpu.index} is not as it was applied: {said}",
                why="a reboot takes modes, levels, daemons and MIG away; what was changed by hand goes with the next one",
                remedy=f"sudo gpushare apply -f {shlex.quote(str(applied_path(seen.host)))}; or keep what is there now: {_KEEP}",
            )
    if kept and not wrong:
        yield Check(
            id="host.drift",
            verdict=Verdict.PASS,
            seen=f"{counted(len(kept), 'GPU')} as applied ({applied_path(seen.host)})",
        )


def _said(seen: Examination, live: LiveGpu) -> str:
    try:
        found = [str(one) for one in points(live, seen.wanted[live.gpu.index], seen.wanted) if one.found != "unknown"]
    except GpushareError as error:
        return error.message
    more = f"; and {len(found) - _AT_MOST} more" if len(found) > _AT_MOST else ""
    return "; ".join(found[:_AT_MOST]) + more
