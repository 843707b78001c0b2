"""Results for programs: JSON, YAML, CSV."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

from gpushare.show.result import Result, Table, jsonable
from gpushare.show.text import in_json, visible, well_formed

# What a spreadsheet takes for the beginning of a formula, in both widths, and the blanks that it drops before one.
_FORMULA: Final = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
_NUMBER: Final = r"[-+]?\d{1,300}(?:\.\d{1,300})?|-"


def document(result: Result) -> dict[str, Any]:
    """Return the envelope with only what JSON can carry: no NaN, no lone surrogate."""
    clean: dict[str, Any] = _clean(result.envelope())
    return clean


def json_text(result: Result, *, compact: bool = False, ascii_only: bool = False) -> str:
    """Return the result as one JSON document, on one line if ``compact`` (JSON Lines)."""
    if compact:
        text = json.dumps(document(result), ensure_ascii=ascii_only, separators=(",", ":"))
    else:
        text = json.dumps(document(result), ensure_ascii=ascii_only, indent=2)
    return in_json(text) + "\n"


def yaml_text(result: Result, *, ascii_only: bool = False) -> str:
    """Return the same envelope as YAML, its keys in the same order."""
    import yaml

    text: str = yaml.safe_dump(document(result), sort_keys=False, allow_unicode=not ascii_only, width=math.inf)
    return text


def csv_table(result: Result) -> Table | None:
    """Return the rectangular table of a result, or None if it has none."""
    return result.csv or (result.tables[0] if result.tables else None)


def csv_text(table: Table, *, header: bool = True) -> str:
    """Return a table as RFC 4180 CSV: a header of keys, plain values, nothing for unknown.

    A text can neither drive the terminal nor be a formula: users choose the names of their processes.
    """
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    keys = [column.key for column in table.columns]
    if header:
        writer.writerow(keys)
    writer.writerows([_field(row.get(key)) for key in keys] for row in table.rows)
    return buffer.getvalue()


def _field(value: Any) -> str | int | float:
    value = _clean(jsonable(value))
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):
        return in_json(json.dumps(value, ensure_ascii=False))
    formula = value.startswith(_FORMULA) and re.fullmatch(_NUMBER, value, re.ASCII) is None
    return f"'{visible(value)}" if formula else visible(value)


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {well_formed(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
