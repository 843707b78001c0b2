"""``gpushare explain``: an error code, a log line or a concept in words; from `gpushare/advice/explain.py`."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpushare.advice import explain as facts
from gpushare.advice.explain import Explained
from gpushare.base.errors import BadUsage, NotFound, OperationFailed
from gpushare.base.units import counted
from gpushare.base.values import dataclass
from gpushare.cli.options import Command, argument, settings, verb
from gpushare.show.legend import HEADS
from gpushare.show.result import Result
from gpushare.show.text import visible, wrapped

# Of the text for people, in columns.
_WIDTH: Final = 80
_LABEL: Final = 10


@verb(Command)
def explain(
    words: list[str] | None = argument(
        "[CODE|TEXT|FILE]...",
        "805, CUDA_ERROR_..., Xid 31, exit code 143, a log line, a log file, or a concept; - is stdin.",
    ),
) -> Any:
    """Explain a CUDA or NVML error, an Xid, an MPS log, an error code of gpushare (in_use), an exit code, or a concept.

    Prints its meaning, its usual cause on a shared GPU, what to do next, and the source. For a log it prints a verdict
    and what is wrong; with -v also the normal lines. Concepts: kernel, SM, warp, register file, shared memory,
    occupancy, streams, stream priority, CUDA graphs, copy engine, threads, thread percentage, context, context switch,
    time-slice, slice, time-slice level, throttled, lost, weight, preemption, channel, Hyper-Q, MPS, MPS daemon, attached, drain,
    CUDA_VISIBLE_DEVICES, MIG, GI, placement, M+C, compute mode, vGPU, SR-IOV, isolation, QoS, latency, production,
    farm, turns, undo, pause, swap, requeue, line, lease, grant, held, drift, underused, consolidation,
    oversubscription, host memory, full disk, unified memory, IPC, NVLink, NCCL, MPI, notebooks, container, cgroup, Yama, shard,
    Slurm, Kubernetes, Karpenter, DCGM, NVML, GPM, Prometheus, nvidia-smi, persistence, Xid, reboot, architecture, static
    partitions, utilization, MPS utilization; and each column of `status` and `jobs`.
    """
    path = _log_path(words)
    log = _explain_words(" ".join(words or ())) if path is None else _read_log(path)
    # Of a code, a name or a single line all is shown, and a verdict would say nothing more.
    single = path is None and log.lines <= 1
    verdict = None if single else log.verdict
    return Result(
        data=ExplainAnswer(verdict=verdict, lines=log.lines, explanations=log.matches),
        text=explained_text(log.matches if settings.verbose or single else log.faults, verdict),
    )


def _explain_words(text: str) -> facts.Log:
    """Return what the words of the command line mean. Raises NotFound (``not_explained``)."""
    columns = tuple(
        Explained(
            kind="column",
            names=(head,),
            meaning=f'{meaning} "-" means unknown or none.',
            cause="",
            next=("gpushare status --legend",),
            source="gpushare",
            line=text,
        )
        for head, meaning in HEADS.items()
        if head.lower() == text.strip().lower()
    )
    try:
        matches = facts.explain(text)
    except NotFound:
        if not columns:
            raise
        matches = ()
    return facts.Log(matches=(*columns, *matches), lines=len(text.splitlines()))


def _read_log(path: str) -> facts.Log:
    """Return what the lines of a log of any size mean; ``-`` is stdin. Raises NotFound: none is known."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as stream:
            pieces = iter(lambda: stream.readline(_LONGEST_LINE), b"")
            log = facts.explain_log(piece.decode("utf-8", "replace") for piece in pieces)
    except OSError as error:
        raise OperationFailed(
            f"{path} cannot be read: {error.strerror}", "read it as its owner, or as root", code="bad_file"
        ) from None
    if not log.matches:
        raise NotFound(
            f"no known error in {counted(log.lines, 'line')}",
            "give a code (805), a name, or the line of the error",
            code="not_explained",
        )
    return log


@dataclass(frozen=True, kw_only=True)
class ExplainAnswer:
    """The answer of `explain`."""

    # What is wrong in a log; null: a code or a name was asked for.
    verdict: str | None
    # The number of lines of the log.
    lines: int
    explanations: tuple[Explained, ...]


def _log_path(words: list[str] | None) -> str | None:
    """Return the path of the log to read; None: the words are to be explained."""
    if not words:
        if _is_stdin_piped():
            return "-"
        raise BadUsage("missing argument 'CODE|TEXT|FILE'", "see: gpushare explain --help", code="usage")
    # A file may be named like a code (805), and the code is meant then; a log has a dot or a slash in its name.
    is_log = len(words) == 1 and (words[0] == "-" or (not words[0].isalnum() and os.path.isfile(words[0])))
    return words[0] if is_log else None


def _is_stdin_piped() -> bool:
    """Return whether stdin is a pipe or a file, which may hold a log."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


# A longer line counts as several.
_LONGEST_LINE: Final = 1 << 16


def explained_text(matches: Sequence[Explained], verdict: str | None = None) -> str:
    """Return a verdict and explanations as paragraphs of at most 80 columns."""
    paragraphs = ["\n".join(_match_lines(match)) for match in matches]
    if verdict:
        head = "verdict: "
        paragraphs.insert(0, "\n".join(wrapped(verdict, _WIDTH, head, " " * len(head))))
    return "\n\n".join(paragraphs)


def _match_lines(match: Explained) -> Iterator[str]:
    """Yield the lines about one match: title, the line of the log, meaning, cause, next commands, source."""
    names = ", ".join(match.names)
    yield from wrapped(f"{match.title}  {names}" if names else match.title, _WIDTH, "", "  ")
    if match.pattern is not None or match.lines > 1:
        more = f" (and {match.lines - 1} more like it)" if match.lines > 1 else ""
        yield from _labelled_lines("line", visible(match.line) + more)
    if match.text is not None:
        yield from _labelled_lines("says", match.text)
    yield from _labelled_lines("means", match.meaning)
    if match.cause:
        yield from _labelled_lines(
            "sharing" if match.kind == "concept" and match.pattern is None else "cause", match.cause
        )
    for number, command in enumerate(match.next):
        yield from _labelled_lines("" if number else "next", command)
    yield from _labelled_lines("source", match.source)


def _labelled_lines(label: str, text: str) -> list[str]:
    return wrapped(text, _WIDTH, f"  {label:<{_LABEL - 2}}", " " * _LABEL)
