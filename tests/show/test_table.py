"""Tables on a terminal: what gives way when the window is narrow, and what never does."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gpushare.show.render import GAP, LAST_RESORT, cell, layout_of, table_lines
from gpushare.show.result import Column, OutputFormat, Result, Table
from gpushare.show.status import status_result
from gpushare.show.text import visible
from tests.show.hosts import mig_uuid, mixed_host, uuid

words = st.text(st.characters(codec="utf-8", exclude_characters="-"), min_size=1, max_size=30)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Any table: ids, numbers, text that may be cut, in any order of ranks."""
    columns = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from([{"whole": True}, {"right": True}, {"least": 8}, {}]))
        title, rank = draw(words), draw(st.integers(0, 4))
        columns.append(Column(f"k{number}", title, rank=rank, **kind))
    value = st.one_of(st.none(), words, st.integers(0, 10**12))
    rows = [{column.key: draw(value) for column in columns} for _ in range(draw(st.integers(1, 4)))]
    return Table(name="t", columns=tuple(columns), rows=tuple(rows))


def needed(table: Table) -> int:
    """Return what must be shown at least: ids and numbers of rank 0 in full, the rest of its text cut."""
    plan = layout_of(table, 1)
    whole = [column.whole or column.right for column in plan.columns]
    assert all(width <= LAST_RESORT for width, kept in zip(plan.widths, whole, strict=True) if not kept)
    return sum(plan.widths) + GAP * (len(plan.widths) - 1)


@settings(max_examples=150, deadline=None)
@given(tables(), st.integers(40, 220))
def test_no_line_is_too_long_and_no_id_or_number_is_ever_cut(table, width):
    plan = layout_of(table, width)
    lines = [line.plain for line in table_lines(table, width)[0]]
    assert max(cell_len(line) for line in lines) <= max(width, needed(table))
    for column in plan.columns:
        if column.whole or column.right:
            for row, line in zip(table.rows, lines[2:], strict=True):
                value = row[column.key]
                shown = "-" if value is None else visible(str(value))
                assert shown.strip() in line


@settings(max_examples=150, deadline=None)
@given(tables(), st.integers(40, 220))
def test_columns_go_by_rank_and_rank_0_stays(table, width):
    plan = layout_of(table, width)
    assert set(plan.columns) | set(plan.hidden) == set(table.columns)
    assert all(column.rank > 0 for column in plan.hidden)
    if plan.hidden:
        assert min(column.rank for column in plan.hidden) >= max(column.rank for column in plan.columns)


@settings(max_examples=80, deadline=None)
@given(tables(), st.integers(40, 200), st.integers(1, 40))
def test_a_wider_window_never_shows_less(table, width, more):
    assert set(layout_of(table, width).columns) <= set(layout_of(table, width + more).columns)


def test_a_command_line_is_cut_before_a_column_is_dropped():
    columns = (Column("id", "id", whole=True, rank=1), Column("command", "command", least=10))
    table = Table(name="t", columns=columns, rows=({"id": uuid(1), "command": "x" * 500},))
    lines, hidden = table_lines(table, 60)
    assert hidden == ()
    assert lines[-1].plain == f"{uuid(1)}  {'x' * 9}…{'x' * 8}"


def test_a_repeated_value_is_blank_only_where_it_repeats_and_an_empty_optional_column_is_out():
    columns = (Column("gpu", "GPU", group=True), Column("gi", "GI", optional=True), Column("pid", "pid"))
    rows = tuple({"gpu": gpu, "gi": None, "pid": pid} for gpu, pid in ((1, 7), (1, 8), (2, 9), (1, 10)))
    lines, _ = table_lines(Table(name="t", columns=columns, rows=rows), 80)
    assert [line.plain for line in lines[:1] + lines[2:]] == ["GPU  pid", "1    7", "     8", "2    9", "1    10"]


def test_uuids_are_whole_at_200_columns_and_gone_rather_than_cut_below(shown):
    result = status_result(mixed_host())
    for width in range(40, 201, 8):
        out, _ = shown(result, OutputFormat.TABLE, terminal=True, width=width)
        found = re.findall(r"(?:GPU|MIG)-[0-9a-f]{4,}[0-9a-f-]*", out)
        assert set(found) <= {uuid(index) for index in range(8)} | {mig_uuid(number) for number in range(1, 4)}
    assert uuid(7) in found
    assert mig_uuid(3) in found


def test_off_a_terminal_a_table_is_never_cut_and_has_no_colour(shown):
    """``-o table | less -S`` keeps every column; Rich's own habit is 80 columns and half a UUID."""
    out, _ = shown(status_result(mixed_host()), OutputFormat.TABLE)
    assert uuid(7) in out
    assert "…" not in out
    assert "\x1b" not in out


def test_no_color_and_a_dumb_terminal_are_honoured(shown, monkeypatch):
    result = status_result(mixed_host())
    assert "\x1b[31m" in shown(result, OutputFormat.TABLE, terminal=True, width=100)[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in shown(result, OutputFormat.TABLE, terminal=True, width=100)[0]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(result, OutputFormat.TABLE, terminal=True, width=100)[0]


def test_columns_of_the_environment_is_the_width(shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out, _ = shown(status_result(mixed_host()), OutputFormat.AUTO, terminal=True)
    assert max(cell_len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in out.splitlines()) <= 60


def test_no_value_can_break_the_line_or_drive_the_terminal(shown):
    table = Table(
        name="t", columns=(Column("a", "a"),), rows=({"a": "x\n\x1b[2Jy\u202ez\x9b\x7f[red]"},), title="things"
    )
    for output in (OutputFormat.TABLE, OutputFormat.PLAIN):
        out, _ = shown(Result(command="x", tables=(table,)), output)
        assert "x\\n\\x1b[2Jy\\u202ez\\x9b\\x7f[red]" in out


def test_an_ascii_terminal_gets_ascii_of_the_same_width(shown):
    result = status_result(mixed_host())
    out, _ = shown(result, OutputFormat.TABLE, terminal=True, encoding="ascii", width=80)
    assert out.isascii()
    assert "-------" in out


def test_an_empty_table_says_so_and_plain_keeps_its_header(shown):
    columns = (Column("a", "name"), Column("b", "size"))
    result = Result(command="x", tables=(Table(name="t", title="T", columns=columns, rows=(), empty="none"),))
    assert shown(result, OutputFormat.TABLE) == ("none\n", "")
    assert shown(result, OutputFormat.PLAIN) == ("# T\n# none\nname  size\n", "")


def test_an_unknown_value_has_the_word_of_its_column() -> None:
    share, memory = Column("share", "share", format="{:.2f}".format), Column("memory", "memory", unknown="all")
    assert [cell(share, value) for value in (0.5, None)] == ["0.50", "-"]
    assert [cell(memory, value) for value in (3, None)] == ["3", "all"]
