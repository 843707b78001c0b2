"""``gpushare explain``: an error code or a log line in words; from `gpushare/doctor/` and `gpushare/advice/explain.py`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpushare.cli.options import Command


def register(app: typer.Typer) -> None:
    app.command("explain", cls=Command, short_help="Explain an error code or a log line.")(explain)


def explain(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CODE|TEXT...", help="805, CUDA_ERROR_..., NVML_..., Xid 31, or a log line; - is stdin."
        ),
    ],
) -> Any:
    """Explain a CUDA or NVML error, an Xid in the kernel log, or lines of MPS logs.

    Prints its meaning, its usual cause on a shared GPU, what to do next, and the source.
    To explain a whole log, pipe it in: gpushare mps logs | gpushare explain -
    """
    from gpushare.advice import explain as facts
    from gpushare.inputs import text_of
    from gpushare.show.explain import explained_text
    from gpushare.show.result import Result

    text = text_of("-", "log", "pipe a log into it") if words == ["-"] else " ".join(words)
    matches = facts.explain(text)
    data = [
        {"title": one.explanation.title, "line": one.line, "lines": one.lines, **vars(one.explanation)}
        for one in matches
    ]
    return Result(command="explain", data={"explanations": data}, text=explained_text(matches))
