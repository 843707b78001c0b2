"""The advice as text: the answer, the commands, the undo, then every way with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpushare.show.result import Column, Table, records
from gpushare.show.text import to_type, wrapped

if TYPE_CHECKING:
    from rich.text import Text

_WIDEST: Final = 110
_MOST_CHANGES: Final = 6
# On a narrower terminal, lines are longer than it is wide.
_LEAST_REASON: Final = 20
_STYLES: Final = {"fits": "green", "fits with a condition": "yellow", "refused": "dim"}
_SHORT: Final = {"fits": "fits", "fits with a condition": "depends", "refused": "no"}


def answer_table(data: Any, *, whole: bool = False) -> Table:
    """Return the answer: drawn on a terminal, else rows of item and text.

    Without ``whole``, a terminal shows only the first of the changes.
    """
    rows = tuple({"item": item, "text": text} for item, text in _answer_items(data))
    columns = (Column("item", "item"), Column("text", "text", format=to_type))
    return Table(
        name="answer",
        columns=columns,
        rows=rows,
        draw=lambda width: _screen_lines(data, min(width, _WIDEST), whole=whole),
    )


def verdicts_table(data: Any) -> Table:
    """Return every way with its verdict and most important reason."""
    rows = ({"way": verdict.way, "verdict": verdict.outcome, "why": _main_reason(verdict)} for verdict in data.verdicts)
    return records(
        "verdicts", ("way", "verdict", "why"), rows, draw=lambda width: _verdict_lines(data, min(width, _WIDEST))
    )


def reasons_table(verdicts: Sequence[Any], title: str) -> Table:
    """Return every reason of these verdicts, with its rule and source."""
    keys = ("kind", "rule", "text", "source")
    rows = (
        {"way": verdict.way, **{key: getattr(reason, key) for key in keys}}
        for verdict in verdicts
        for reason in verdict.reasons
    )
    return records(
        "reasons",
        ("way", *keys),
        rows,
        title=title,
        empty="no rule applies",
        draw=lambda width: _reason_lines(verdicts, min(width, _WIDEST)),
    )


# -- what the items are ----------------------------------------------------------------------------


def _answer_items(data: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of an answer for plain output: what each is (why, risk, do, undo, ...), and its text."""
    yield "answer", data.answer
    yield from _measured_items(data)
    costs = [data.cost.sentence] if data.cost else []
    for item, texts in (("why", data.why), ("risk", data.risks), ("cost", costs)):
        for text in texts:
            yield item, text
    yield "confidence", f"{data.confidence}: {data.confidence_why}"
    if data.memory.sentence:
        yield "memory", data.memory.sentence
    if data.not_protected:
        yield "shared", ", ".join(data.not_protected)
    for item, lines in (("do", data.commands), ("undo", data.undo)):
        for line in lines:
            if item == "do" and line.command is not None:
                # The command alone does not say which program starts it, and how often.
                yield "step", line.what
            yield item, line.command or line.what
    for text in data.measure:
        yield "measure", text
    for change in data.changes:
        yield "change", _change_text(change)


def _measured_items(data: Any) -> Iterator[tuple[str, str]]:
    """Yield the rules' answer and the effect of a measurement, if there was one."""
    if data.measured is not None:
        rules = data.rules
        yield "rules", f"{rules.answer} ({rules.confidence} confidence: {rules.confidence_why})"
        yield "measured", data.measured.sentence


def _change_text(change: Any) -> str:
    return f"if {change.text}: {change.then_title}"


def _change_texts(changes: Sequence[Any], *, whole: bool) -> list[str]:
    """Return what would change the answer, the open questions first; without ``whole`` only the first few."""
    ordered = [*(change for change in changes if change.open), *(change for change in changes if not change.open)]
    texts = [_change_text(change) for change in ordered]
    if whole or len(texts) <= _MOST_CHANGES + 1:
        return texts
    return [*texts[:_MOST_CHANGES], f"and {len(texts) - _MOST_CHANGES} more with -v"]


def _main_reason(verdict: Any) -> str:
    """Return the text of the first reason of the most important kind: a veto, a condition, for, against."""
    for kind in ("veto", "condition", "for", "against"):
        for reason in verdict.reasons:
            if reason.kind == kind:
                return str(reason.text)
    return "possible, no advantage here"


# -- the screen ------------------------------------------------------------------------------------


def _screen_lines(data: Any, width: int, *, whole: bool) -> list[Text]:
    """Return an answer as lines for a terminal of a width, with colours."""
    from rich.text import Text

    lines = [
        Text.assemble((data.answer, "bold green" if data.winner else "bold red"), (f"  on {data.gpu_title}", "dim"))
    ]
    for item, text in _measured_items(data):
        lines += _wrapped(f"{item}: {text}", width, "  ", "    ", style="bold" if item == "measured" else "")
    for text in data.why:
        lines += _wrapped(text, width, "  ")
    for text in data.risks:
        lines += _wrapped(f"risk: {text}", width, "  ", style="yellow")
    if data.cost:
        lines += _wrapped(f"cost: {data.cost.sentence}", width, "  ", "    ")
    lines += _wrapped(f"{data.confidence} confidence: {data.confidence_why}", width, "  ", style="dim")
    if data.memory.sentence:
        lines += _wrapped(f"memory: {data.memory.sentence}", width, "  ", style="dim")
    if data.not_protected:
        lines += _wrapped(f"still shared: {', '.join(data.not_protected)}", width, "  ", style="dim")
    lines += _command_lines(data, width)
    for title, texts in (
        ("measure", data.measure),
        ("what would change it", _change_texts(data.changes, whole=whole)),
    ):
        if texts:
            lines += [Text(""), Text(title, style="bold")]
            for text in texts:
                lines += _wrapped(text, width, "  - ", "    ")
    return lines


def _command_lines(data: Any, width: int) -> list[Text]:
    """Return the commands of an answer and their undo as lines: those that can be typed stand alone."""
    from rich.text import Text

    lines: list[Text] = []
    for title, entries in (("do", data.commands), ("undo", data.undo)):
        if entries:
            lines += [Text(""), Text(title, style="bold")]
        for entry in entries:
            lines += _wrapped(entry.what, width, "  ", style="" if entry.command is None else "dim")
            if entry.command is not None:
                command = wrapped(entry.command, width, "    ", "    ", command=True)
                lines += [Text(line, style="bold") for line in command]
    return lines


def _verdict_lines(data: Any, width: int) -> list[Text]:
    """Return a line for each way: whether it fits, and its most important reason."""
    from rich.text import Text

    way_width = max(len(verdict.way) for verdict in data.verdicts)
    lines = [Text("all ways", style="bold")]
    for verdict in data.verdicts:
        word = _SHORT[verdict.outcome]
        style = _STYLES[verdict.outcome]
        if verdict.way == data.winner:
            # Also if it fits with a condition, which is its reason.
            word = "chosen"
            style = "green"
        head = f"{verdict.way.value:<{way_width}}  {word:<7}  "
        parts = wrapped(_main_reason(verdict), max(width - len(head) - 2, _LEAST_REASON)) or [""]
        reason_style = "dim" if style == "dim" else ""
        lines.append(Text.assemble("  ", (head, style), (parts[0], reason_style)))
        lines += [Text(" " * (len(head) + 2) + part, style=reason_style) for part in parts[1:]]
    return lines


def _reason_lines(verdicts: Sequence[Any], width: int) -> list[Text]:
    """Return each verdict with all of its reasons and their sources as lines for a terminal."""
    from rich.text import Text

    lines: list[Text] = []
    for verdict in verdicts:
        lines += [
            Text(""),
            Text.assemble(
                (verdict.title, "bold"), f"  {verdict.way.value}: ", (verdict.outcome.value, _STYLES[verdict.outcome])
            ),
        ]
        for reason in verdict.reasons:
            lines += _wrapped(f"{reason.kind.value}: {reason.text}", width, "  ", "    ")
            lines += _wrapped(f"[{reason.rule}] {reason.source}", width, "      ", style="dim")
            if reason.contradiction:
                lines += _wrapped(f"sources disagree: {reason.contradiction}", width, "      ", style="yellow")
        if not verdict.reasons:
            lines.append(Text("  no rule applies", style="dim"))
    return lines


def _wrapped(text: str, width: int, first: str, rest: str | None = None, *, style: str = "") -> list[Text]:
    """Return text as lines that begin with ``first``, and with ``rest`` if it is given, in a Rich style."""
    from rich.text import Text

    return [Text(line, style=style) for line in wrapped(text, width, first, first if rest is None else rest)]
