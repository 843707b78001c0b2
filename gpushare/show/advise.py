"""The advice as text: the answer, the commands, the undo, then every way with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpushare.show.result import Column, Table, record_table
from gpushare.show.text import complete_commands, wrapped

if TYPE_CHECKING:
    from rich.text import Text

_WIDEST: Final = 110
_MOST_CHANGES: Final = 6
_OUTCOMES: Final = {"fits": "green", "fits with a condition": "yellow", "refused": "dim"}
_STYLES: Final = {
    **dict.fromkeys(("measured", "do", "undo"), "bold"),
    **dict.fromkeys(("confidence", "memory", "shared", "step"), "dim"),
    "risk": "yellow",
}


class _Item(NamedTuple):
    """A part of an answer: what it is (why, risk, do, undo, ...), its text, and on a terminal the heading above it."""

    item: str
    text: str
    heading: str = ""


def answer_table(data: Any, *, whole: bool) -> Table:
    """Return the answer: drawn on a terminal, else rows of item and text.

    Without ``whole``, a terminal shows only the first of the changes.
    """
    columns = (Column("item", "item"), Column("text", "text", format=complete_commands))
    return Table(
        name="answer",
        columns=columns,
        rows=tuple(item._asdict() for item in (_Item("answer", data.answer), *_answer_items(data, whole=True))),
        draw=lambda width: _screen_lines(data, min(width, _WIDEST), whole=whole),
    )


def verdicts_table(data: Any) -> Table:
    """Return every way with its verdict and most important reason; the title names the chosen one."""
    columns = (
        Column("way", "way", style=lambda way: "green" if way == data.winner else None),
        Column("verdict", "verdict", style=_OUTCOMES.get),
        Column("why", "why", wrap=True),
    )
    rows = ({"way": verdict.way, "verdict": verdict.outcome, "why": _main_reason(verdict)} for verdict in data.verdicts)
    title = "all ways" if data.winner is None else f"all ways, chosen: {data.winner}"
    return Table(name="verdicts", title=title, columns=columns, rows=tuple(rows))


def reasons_table(verdicts: Sequence[Any], title: str) -> Table:
    """Return every reason of these verdicts, with its rule and source."""
    keys = ("kind", "rule", "text", "source")
    rows = (
        {"way": verdict.way, **{key: getattr(reason, key) for key in keys}}
        for verdict in verdicts
        for reason in verdict.reasons
    )
    return record_table(
        "reasons",
        ("way", *keys),
        rows,
        title=title,
        empty="no rule applies",
        draw=lambda width: _reason_lines(verdicts, min(width, _WIDEST)),
    )


def _answer_items(data: Any, *, whole: bool) -> Iterator[_Item]:
    """Yield the parts of an answer below its first line; without ``whole`` only the first of the changes."""
    if data.measured is not None:
        rules = data.rules
        yield _Item("rules", f"{rules.answer} ({rules.confidence} confidence: {rules.confidence_why})")
        yield _Item("measured", data.measured.sentence)
    for item, texts in (
        ("why", data.why),
        ("risk", data.risks),
        ("cost", [data.cost.sentence] if data.cost else []),
        ("confidence", [f"{data.confidence} ({data.confidence_why})"]),
        ("memory", [data.memory.sentence]),
        ("shared", [", ".join(data.not_protected)]),
    ):
        yield from (_Item(item, text) for text in texts if text)
    for item, lines in (("do", data.commands), ("undo", data.undo)):
        for line in lines:
            # The command alone does not say which program starts it, and how often.
            yield _Item("step", line.what, item)
            if line.command is not None:
                yield _Item(item, line.command, item)
    for text in data.measure:
        yield _Item("measure", text, "measure")
    for text in _change_texts(data.changes, whole=whole):
        yield _Item("change", text, "what would change it")


def _change_texts(changes: Sequence[Any], *, whole: bool) -> list[str]:
    """Return what would change the answer, the open questions first; without ``whole`` only the first few."""
    ordered = [*(change for change in changes if change.open), *(change for change in changes if not change.open)]
    texts = [f"if {change.text}: {change.then_title}" for change in ordered]
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


def _screen_lines(data: Any, width: int, *, whole: bool) -> list[Text]:
    """Return an answer as lines for a terminal of a width, with colours; a command stands alone, so that it can be copied."""
    from rich.text import Text

    answer_style = "bold green" if data.winner else "bold red"
    lines = [Text.assemble((data.answer, answer_style), (f"  on {data.gpu_title}", "dim"))]
    heading = ""
    for item, text, item_heading in _answer_items(data, whole=whole):
        if item_heading != heading:
            heading = item_heading
            lines += [Text(""), Text(heading, style="bold")]
        style = _STYLES.get(item, "")
        if item in {"do", "undo"}:
            lines += [Text(line, style=style) for line in wrapped(text, width, "    ", "    ", command=True)]
        elif heading and item != "step":
            lines += _wrapped(text, width, "  - ", "    ")
        else:
            lines += _wrapped(text if item in {"why", "step"} else f"{item}: {text}", width, "  ", style=style)
    return lines


def _reason_lines(verdicts: Sequence[Any], width: int) -> list[Text]:
    """Return each verdict with all of its reasons and their sources as lines for a terminal."""
    from rich.text import Text

    lines: list[Text] = []
    for verdict in verdicts:
        lines += [
            Text(""),
            Text.assemble(
                (verdict.title, "bold"), f"  {verdict.way.value}: ", (verdict.outcome.value, _OUTCOMES[verdict.outcome])
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
