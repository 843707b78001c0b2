"""``gpushare explain``: an error code or a log line in words; from `gpushare/doctor/` and `gpushare/advice/explain.py`."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

from gpushare.advice import explain as facts
from gpushare.advice.explain import Explanation, Match
from gpushare.base.errors import BadUsage, NotFound, OperationFailed
from gpushare.base.package import package_rows
from gpushare.base.units import counted
from gpushare.base.values import dataclass
from gpushare.cli.options import Command, argument, settings, verb
from gpushare.inputs import shown_path
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
        "805, CUDA_ERROR_..., Xid 31, exit code 143, a log line, log files, or a concept; - is stdin.",
    ),
) -> Any:
    """Explain a CUDA or NVML error, an Xid, MPS logs, an error code of gpushare (in_use), an exit code, a check of doctor, or a concept.

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
    paths = _log_paths(words)
    logs = {path: _read_log(path) for path in paths} if paths else {None: _explain_words(" ".join(words or ()))}
    if paths and not any(log.matches for log in logs.values()):
        raise NotFound(
            f"no known error in {counted(sum(log.lines for log in logs.values()), 'line')}",
            "give a code (805), a name, or the line of the error",
            code="not_explained",
        )
    verdicts, texts = [], []
    for path, log in logs.items():
        # Of a code, a name or a single line all is shown, and a verdict would say nothing more.
        single = path is None and log.lines <= 1
        verdict = None if single else _verdict(log, path if len(paths) > 1 else None)
        verdicts += [] if verdict is None else [verdict]
        texts.append(explained_text(log.matches if settings.verbose or single else log.faults, verdict))
    return Result(
        data=ExplainAnswer(
            verdict="\n".join(verdicts) or None,
            lines=sum(log.lines for log in logs.values()),
            explanations=tuple(_explained_match(match, path) for path, log in logs.items() for match in log.matches),
        ),
        text="\n\n".join(texts),
    )


def _verdict(log: facts.Log, path: str | None) -> str:
    """Return what is wrong in a log; ``path``: one of several logs."""
    words = log.verdict if log.matches else f"no known error in {counted(log.lines, 'line')}"
    return words if path is None else f"{shown_path(path)}: {words}"


def _explain_words(text: str) -> facts.Log:
    """Return what the words of the command line mean. Raises NotFound (``not_explained``, ``no_file``)."""
    of_gpushare = (*_column_matches(text), *_check_matches(text))
    try:
        matches = (*facts.explain(text), *of_gpushare)
    except NotFound:
        if not of_gpushare and re.fullmatch(r"\S+\.log", text):
            raise NotFound(
                f"there is no file {shown_path(text)}", "give a log file, or a line of it", code="no_file"
            ) from None
        if not of_gpushare:
            raise
        matches = of_gpushare
    if any(match.explanation.kind == "column" for match in matches):
        # Such a word on the screen is the column; an error code of this name (reserved) is rarer.
        matches = tuple(sorted(matches, key=lambda match: match.explanation.kind == "gpushare"))
    return facts.Log(matches=matches, lines=len(text.splitlines()))


def _read_log(path: str) -> facts.Log:
    """Return what the lines of a log mean; none may be known."""
    with _open_log(path) as stream:
        return facts.explain_log(_log_lines(stream))


@dataclass(frozen=True, kw_only=True)
class Explained(Explanation):
    """One error, log line or concept, and where a log has it."""

    title: str
    # Whether it is no sign of a fault.
    normal: bool
    # The first such line of the log.
    line: str
    # The number of that line.
    number: int
    # How many such lines the log has.
    lines: int
    # The log, as named on the command line; - is stdin; null: the words of the command line.
    file: str | None


@dataclass(frozen=True, kw_only=True)
class ExplainAnswer:
    """The answer of `explain`."""

    # What is wrong in a log, a line for each log; null: a code or a name was asked for.
    verdict: str | None
    # The number of lines of the logs.
    lines: int
    explanations: tuple[Explained, ...]


def _explained_match(match: Match, path: str | None) -> Explained:
    fact = match.explanation
    return Explained(
        **vars(fact),
        title=fact.title,
        normal=fact.normal,
        line=match.line,
        number=match.number,
        lines=match.lines,
        file=path,
    )


def _column_matches(text: str) -> tuple[Match, ...]:
    """Return what the columns of `status` and `jobs` mean whose head is this text."""
    heads = [head for head in HEADS if head.lower() == text.strip().lower()]
    return tuple(
        Match(
            explanation=Explanation(
                kind="column",
                names=(head,),
                meaning=HEADS[head],
                cause="- is unknown, never zero.",
                next=("gpushare status --legend",),
                source="gpushare",
            ),
            line=text,
        )
        for head in heads
    )


# A value in a text of a check.
_VALUE: Final = re.compile(r"\{[^{}]*\}")


def _check_matches(text: str) -> tuple[Match, ...]:
    """Return the explanation of the doctor check whose id the text is; it joins all that the check may find.

    ``...`` stands for what differs from case to case.
    """
    name = text.strip().lower()
    rows = [row for key, row in package_rows("doctor-checks.yaml").items() if key.partition(" ")[0] == name]
    if not rows:
        return ()

    def texts(*keys: str) -> list[str]:
        """Return the texts that the rows have under these keys, each once."""
        without_values = (_VALUE.sub("...", row[key]) for row in rows for key in keys if key in row)
        return [words for words in dict.fromkeys(without_values) if words.strip(". ")]

    return (
        Match(
            explanation=Explanation(
                kind="check",
                names=(name,),
                meaning="; ".join(texts("warn", "fail")) or "The error says what is wrong.",
                cause="; ".join(texts("why")) or "It differs from case to case.",
                next=("gpushare doctor", *texts("remedy")),
                source="gpushare",
            ),
            line=text,
        ),
    )


def _log_paths(words: list[str] | None) -> list[str]:
    """Return the paths of the logs to read; empty: the words are to be explained."""
    if words == ["-"]:
        return words
    if words:
        # A file may be named like a code (805), and the code is meant then; a log has a dot or a slash in its name.
        logs = [word for word in words if not word.isalnum() and os.path.isfile(word)]
        # Of ``log/*`` also the directories are given.
        return logs if all(word in logs or os.path.isdir(word) for word in words) else []
    if _is_stdin_piped():
        return ["-"]
    raise BadUsage("missing argument 'CODE|TEXT|FILE'", "see: gpushare explain --help", code="usage")


def _is_stdin_piped() -> bool:
    """Return whether stdin is a pipe or a file, which may hold a log."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _open_log(path: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a log for reading bytes; ``-`` is stdin."""
    if path == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(path, "rb")
    except OSError as error:
        raise OperationFailed(
            f"{path} cannot be read: {error.strerror}", "read it as its owner, or as root", code="bad_file"
        ) from None


# A longer line counts as several.
_LONGEST_LINE: Final = 1 << 16


def _log_lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a log of any size."""
    while line := stream.readline(_LONGEST_LINE):
        yield line.decode("utf-8", "replace")


def explained_text(matches: Sequence[Match], verdict: str | None = None) -> str:
    """Return a verdict and explanations as paragraphs of at most 80 columns."""
    paragraphs = ["\n".join(_match_lines(match)) for match in matches]
    if verdict:
        head = "verdict: "
        paragraphs.insert(0, "\n".join(wrapped(verdict, _WIDTH, head, " " * len(head))))
    return "\n\n".join(paragraphs)


def _match_lines(match: Match) -> Iterator[str]:
    """Yield the lines about one match: title, the line of the log, meaning, cause, next commands, source."""
    explanation = match.explanation
    names = ", ".join(explanation.names)
    yield from wrapped(f"{explanation.title}  {names}" if names else explanation.title, _WIDTH, "", "  ")
    if explanation.pattern is not None or match.lines > 1:
        more = f" (and {match.lines - 1} more like it)" if match.lines > 1 else ""
        yield from _labelled_lines("line", visible(match.line) + more)
    if explanation.text is not None:
        yield from _labelled_lines("says", explanation.text)
    yield from _labelled_lines("means", explanation.meaning)
    yield from _labelled_lines(
        "sharing" if explanation.kind == "concept" and explanation.pattern is None else "cause", explanation.cause
    )
    for number, command in enumerate(explanation.next):
        yield from _labelled_lines("" if number else "next", command)
    yield from _labelled_lines("source", explanation.source)


def _labelled_lines(label: str, text: str) -> list[str]:
    return wrapped(text, _WIDTH, f"  {label:<{_LABEL - 2}}", " " * _LABEL)
