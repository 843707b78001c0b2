"""data/doctor-checks.yaml: each row is used, with the values that it names, and is complete."""

from __future__ import annotations

import ast
import string
from pathlib import Path

from gpushare.base.package import package_rows
from gpushare.doctor.check import finding

ROOM = Path(__file__).resolve().parents[2] / "gpushare" / "doctor"
# Rows whose name is worked out.
COMPUTED = {
    "driver.mismatch", "nvml.answers", "mps.control", "mps.server", "mig.environment", "gpu.environment",
    "mig.interrupted", "mig.not_restored", "gpu.environment more", "mps.environment more",
}  # fmt: skip


def placeholders(row: dict[str, str]) -> set[str]:
    """Return the values that the texts of a row name."""
    fields = [name for text in row.values() for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    return {field.partition(".")[0].partition("[")[0] for field in fields}


def test_each_row_is_used_with_its_values() -> None:
    rows, used, wrong = package_rows("doctor-checks.yaml"), set(COMPUTED), []
    for path in sorted(ROOM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "finding"):
                continue
            given = {keyword.arg or "" for keyword in node.keywords} | ({"gpu"} if len(node.args) > 1 else set())
            names = [each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
            for name in [str(name) for name in names if str(name) in rows]:
                used.add(name)
                if not placeholders(dict(rows[name])) <= given:
                    wrong.append(f"{path.name}:{node.lineno} {name} needs {placeholders(dict(rows[name])) - given}")
    assert wrong == []
    assert sorted(rows.keys() - used) == []


def test_each_row_is_complete() -> None:
    assert [
        name
        for name, row in package_rows("doctor-checks.yaml").items()
        if row.keys() not in ({"warn", "why", "remedy"}, {"fail", "why", "remedy"})
    ] == []


def test_a_value_is_text_and_quoted_where_a_shell_reads_it() -> None:
    check = finding("mps.log", 0, path="/tmp/{gpu} log", size="1 GiB")
    assert (check.id, check.gpu, check.verdict.value) == ("mps.log", 0, "warn")
    assert check.seen == "/tmp/{gpu} log has grown to 1 GiB"
    assert check.remedy == "sudo truncate -s 0 '/tmp/{gpu} log'"
