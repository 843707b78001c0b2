"""``gpushare top``: the cockpit; read and drawn by `gpushare/top/`."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from gpushare.base.errors import NotSupported, OperationFailed
from gpushare.cli.options import INTERVAL, Command, option, positive_time, settings, verb
from gpushare.run.look import with_leases, with_memory
from gpushare.signals import leaving_on_ending_signal


@verb(Command)
def top(
    replay: str | None = option("--replay", "FILE", "Show a recording of `gpushare observe` instead."),
    interval: str = option("--interval", "TIME", "Refresh interval: 0.5s, 2s.", default="1s"),
) -> Any:
    """Watch GPUs and jobs on one screen, and act on them: stop, pause, swap, slices, limits, logs.

    ? shows the keys. Each action shows its plan and asks. "-" means unknown or none. A GPU that hangs does not freeze
    the screen. `gpushare top` needs Textual: pipx inject gpushare textual.
    """
    if not _is_terminal():
        raise NotSupported("top needs a terminal", "for logs and pipes: gpushare status -w", code="no_terminal")
    seconds = positive_time("--interval", interval, **INTERVAL)
    # What is shown: this host, or a recording.
    from gpushare.top.watch import Watch

    reader: Any
    if replay is None:
        from gpushare.top.frame import Reader

        reader = Reader(settings.connect(), lambda host, snapshot: with_memory(host, with_leases(host, snapshot)))
    else:
        from gpushare.measure.recording import Samples
        from gpushare.top.replay import Replay

        reader = Replay(Samples(replay))
    watch = Watch(reader, seconds)
    # The first frame is read while Textual is loaded.
    watch.start()
    try:
        from gpushare.top.screen import Cockpit
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        watch.end()
        raise OperationFailed(
            "top needs Textual, which is not installed",
            "add it: pipx inject gpushare textual, or pip install textual",
            code="no_textual",
        ) from None
    from gpushare.top.verbs import follow_output, run_verb

    # The screen. Each drawing of Textual leaves a thousand objects in reference cycles, which `cli` would collect only at
    # 50,000. What is loaded now stays, so the collector skips it.
    gc.freeze()
    gc.set_threshold(5_000)
    spec = settings.spec
    cockpit = Cockpit(
        watch,
        lambda words: run_verb(spec, words),
        theme=_theme_of_terminal(),
        follow=lambda job, add: follow_output(spec, job, add),
    )
    with leaving_on_ending_signal(lambda: cockpit.call_later(cockpit.exit)):
        cockpit.run()
    return 0


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _theme_of_terminal() -> str:
    """Return the colours that suit the terminal: plain, light or dark."""
    if os.environ.get("NO_COLOR"):
        return "plain"
    # As terminals set it that tell their colours: "0;15" is black on white.
    back = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if back in {"7", "15"} else "dark"
