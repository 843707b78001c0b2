"""``gpushare status``: GPUs, how they are shared, processes; read by `gpushare/snapshot.py`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final

from gpushare.cli.options import GPU_OPTION, INTERVAL, Command, flag, option, positive_time, settings, verb
from gpushare.run.look import StatusReader
from gpushare.show.legend import legend_result
from gpushare.show.live import watch as keep_watching
from gpushare.show.result import OutputFormat, Result
from gpushare.show.status import status_result

# The interval of -w alone.
_INTERVAL: Final = "2s"


class WatchCommand(Command):
    """Takes ``-w`` without a time: then it is two seconds. No verb of this class takes an argument."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the words, with the interval after each ``-w`` that has none."""
        words: list[str] = []
        for place, word in enumerate(args):
            next_word = args[place + 1] if place + 1 < len(args) else ""
            words.append(word)
            if re.fullmatch(r"-[aqv]*w|--watch", word) and (not next_word or re.match(r"-(?!\.?\d)", next_word)):
                words.append(_INTERVAL)
        return super().make_context(info_name, words, parent, **extra)


WATCH_OPTION: Final = option("-w --watch", "[TIME]", "Refresh after each TIME (alone: 2s), until Ctrl-C.")


@verb(WatchCommand)
def status(
    gpu: str | None = GPU_OPTION,
    watch: str | None = WATCH_OPTION,
    legend: bool = flag("--legend", "Explain the column heads instead."),
) -> Any:
    """Show the GPUs, how they are shared, MPS daemons with limits and clients, and the processes on them.

    GPU utilization is the time in which some kernel ran, not a share of the GPU: one small program can
    show 100 %. Under MPS the driver counts the work of all clients for the server, so a client's SM % is
    unknown. "-" means unknown or none. With -w, time-slice and MPS daemons are read every 5 seconds.
    """
    if legend:
        return legend_result()
    host = settings.connect()
    power = settings.output in {OutputFormat.JSON, OutputFormat.YAML}
    reader = StatusReader(host, gpu, strangers=settings.verbose, power=power)
    return read_or_watch(lambda: status_result(reader.snapshot()), watch)


def read_or_watch(read: Callable[[], Result], interval: str | None) -> Any:
    """Return one result; with an interval of -w, show a new one each time until Ctrl-C, and return exit code 0."""
    if interval is None:
        return read()
    seconds = positive_time("-w", interval, **INTERVAL)
    # Read once first: a wrong GPU or a missing driver ends the command instead of repeating.
    read()
    keep_watching(
        read,
        seconds=seconds,
        stream=sys.stdout,
        output=settings.output,
        command=settings.command,
        quiet=settings.quiet,
    )
    return 0
