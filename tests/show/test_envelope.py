"""The contract of the machine formats: the envelope, its keys, one document whatever happens."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import yaml

from gpushare.base.errors import DriverNotLoaded, ExitCode, OperationFailed
from gpushare.base.model import ComputeMode, Priority, Way
from gpushare.show.render import csv_text, exit_code_of, write, write_error
from gpushare.show.result import Column, OutputFormat, Result, Table, failed_result, jsonable, plain_value
from gpushare.show.status import status_result
from tests.show.conftest import Screen
from tests.show.hosts import mixed_host, quiet_host

ENVELOPE = ["schema", "command", "status", "data", "errors"]
BROKEN = DriverNotLoaded("the driver does not answer", "sudo modprobe nvidia")


def table(*rows: dict[str, object]) -> Table:
    keys = list(rows[0]) if rows else ["a"]
    return Table(name="t", columns=tuple(Column(key, key) for key in keys), rows=rows)


def test_the_keys_of_the_envelope_are_pinned(shown):
    """A script that reads one command's JSON reads every command's."""
    for result in (Result(command="x"), Result(command="x", data={"a": 1}), failed_result("x", BROKEN)):
        out, _ = shown(result, OutputFormat.JSON)
        read = json.loads(out)
        assert list(read) == ENVELOPE
        assert read["schema"] == 1
        assert all(list(error) == ["code", "message", "hint", "gpu"] for error in read["errors"])


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result(command="x", data={}), "ok"),
        (Result(command="x", data={}, errors=(BROKEN,)), "partial"),
        (Result(command="x", data={"stopped": []}, errors=(BROKEN,), all_failed=True), "error"),
        (failed_result("x", BROKEN), "error"),
    ],
)
def test_the_status_says_whether_there_is_data_beside_errors(shown, result, status):
    assert json.loads(shown(result, OutputFormat.JSON)[0])["status"] == status


def test_an_error_before_any_result_still_speaks_json_and_is_on_stderr_too(shown):
    out, err = shown(failed_result("status", BROKEN), OutputFormat.JSON)
    assert json.loads(out)["errors"] == [
        {"code": "driver_not_loaded", "message": BROKEN.message, "hint": BROKEN.hint, "gpu": None}
    ]
    assert err == "error: the driver does not answer\nhint: sudo modprobe nvidia\n"
    assert exit_code_of(failed_result("status", BROKEN)) == ExitCode.DRIVER_NOT_LOADED


def test_yaml_is_the_same_envelope_in_the_same_order(shown):
    result = status_result(mixed_host())
    from_yaml = yaml.safe_load(shown(result, OutputFormat.YAML)[0])
    assert from_yaml == json.loads(shown(result, OutputFormat.JSON)[0])
    assert list(from_yaml) == ENVELOPE


def test_json_carries_unicode_as_itself_and_as_ascii_where_the_stream_must(shown):
    result = Result(command="x", data={"user": "王小明"})
    assert "王小明" in shown(result, OutputFormat.JSON)[0]
    ascii_out, _ = shown(result, OutputFormat.JSON, encoding="ascii")
    assert ascii_out.isascii()
    assert json.loads(ascii_out)["data"] == {"user": "王小明"}
    assert yaml.safe_load(shown(result, OutputFormat.YAML, encoding="ascii")[0])["data"] == {"user": "王小明"}


def test_what_json_cannot_carry_never_breaks_the_document(shown):
    """NaN is unknown; an undecodable byte of a command line (a lone surrogate) is U+FFFD."""
    result = Result(command="x", data={"a": math.nan, "b": [math.inf, 1.5], "c": "caf\udce9"})
    read = json.loads(shown(result, OutputFormat.JSON)[0].encode())
    assert read["data"] == {"a": None, "b": [None, 1.5], "c": "caf\ufffd"}
    assert jsonable({"m": ComputeMode.EXCLUSIVE_PROCESS, "n": Way.MPS}) == {"m": "exclusive-process", "n": "mps"}


def test_a_set_has_one_order_in_json():
    # Of single letters the hashes, and so the order of a set, differ from run to run; of 20 it is never the sorted one.
    assert jsonable(frozenset("qwertyuiopasdfghjklz")) == sorted("qwertyuiopasdfghjklz")


def test_csv_is_rfc_4180_with_raw_values_and_nothing_for_unknown():
    rows = table({"name": 'a "b", c', "n": 3, "x": 0.5, "on": True, "who": None, "mode": ComputeMode.DEFAULT})
    text = csv_text(rows)
    assert text == 'name,n,x,on,who,mode\r\n"a ""b"", c",3,0.5,true,,default\r\n'
    assert csv_text(rows, header=False).count("\r\n") == 1


def test_csv_takes_the_one_table_or_the_first_and_says_when_there_is_none(shown):
    first, own = table({"a": 1}), table({"b": 2})
    assert shown(Result(command="x", tables=(first,)), OutputFormat.CSV)[0] == "a\r\n1\r\n"
    assert shown(Result(command="x", tables=(first,), csv=own), OutputFormat.CSV)[0] == "b\r\n2\r\n"
    out, err = shown(Result(command="x", data={"a": 1}), OutputFormat.CSV)
    assert out == ""
    assert err.startswith("note: there is no table")
    assert shown(failed_result("x", BROKEN), OutputFormat.CSV) == (
        "",
        "error: the driver does not answer\nhint: sudo modprobe nvidia\n",
    )


def test_every_csv_row_of_status_has_every_field_and_every_gpu_a_row():
    result = status_result(mixed_host())
    assert result.csv is not None
    rows = list(csv.DictReader(io.StringIO(csv_text(result.csv), newline="")))
    assert {row["gpu_index"] for row in rows} == {str(index) for index in range(8)}
    assert len(rows) == 5 + 2 + 1 + 3
    assert all(None not in row and None not in row.values() for row in rows)
    lost = next(row for row in rows if row["gpu_index"] == "5")
    assert (lost["gpu_error"], lost["memory_used_bytes"], lost["sharing"]) == ("GPU is lost", "", "")


def test_messages_are_one_line_each_however_they_came(shown):
    error = OperationFailed("nvidia-smi said:\n  Unable\r\n  to set \x1b[31mred", "try " + "x" * 300)
    _, err = shown(Result(command="x", errors=(error,), notes=("two\nlines",)), OutputFormat.PLAIN)
    assert err == ("note: two lines\nerror: nvidia-smi said: Unable to set \\x1b[31mred\nhint: try " + "x" * 300 + "\n")


@pytest.mark.parametrize(
    ("value", "text"), [(Way.TIMESLICE, "timeslice"), (Priority.LOW, Priority.LOW.title), (None, "-"), (True, "yes")]
)
def test_a_value_is_shown_as_text(value: Any, text: str) -> None:
    assert plain_value(value) == text


@pytest.mark.parametrize("output", ["json", "csv"])
def test_machine_formats_import_no_heavy_module(output):
    """A script that polls must not pay for tables it never sees."""
    program = (
        "import sys, io\n"
        "from gpushare.base.model import Gpu, Snapshot\n"
        "from gpushare.show.render import write\n"
        "from gpushare.show.result import OutputFormat\n"
        "from gpushare.show.status import status_result\n"
        "import gpushare.show.live, gpushare.show.plan, gpushare.show.render, gpushare.show.render\n"
        "result = status_result(Snapshot(host='x', gpus=(Gpu(index=0, error='GPU is lost'),)))\n"
        f"write(result, OutputFormat('{output}'), stdout=io.StringIO(), stderr=io.StringIO())\n"
        "heavy = {'rich', 'tabulate', 'yaml', 'psutil', 'pynvml', 'importlib.metadata', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_plain_prose_does_not_import_tabulate_and_keeps_its_lines(shown):
    out, _ = shown(Result(command="x", text="a: 1\n\tb: \x1b]0;owned\x07\n"), OutputFormat.PLAIN)
    assert out == "a: 1\n\tb: \\x1b]0;owned\\x07\n"


def test_status_data_has_the_fields_that_scripts_rely_on():
    data = jsonable(status_result(quiet_host()).data)
    assert list(data) == [
        *("host", "driver_version", "taken_at", "gpus", "mps_daemons", "warnings", "waiting_jobs", "swapped_jobs"),
        *("leases", "vgpu_sessions"),
    ]
    assert set(data["gpus"][0]) == {
        *("index", "uuid", "name", "pci_bus_id", "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes"),
        "jobs_reserved_bytes",
        *(
            *("power_limit_watts", "power_watts", "utilization_percent", "compute_mode", "mig_capable"),
            *("mig_enabled", "mig_pending", "time_slice"),
        ),
        *("mig_instances", "processes", "error", "sharing", "memory_unlisted_bytes"),
    }


@pytest.mark.parametrize("output", ["table", "plain", "json", "yaml", "csv"])
def test_a_reader_that_is_gone_is_the_callers_matter(output):
    """``gpushare status | head -1``: main ends quietly, so nothing here may swallow it or go on."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    stderr = io.StringIO()
    with pytest.raises(BrokenPipeError):
        write(status_result(mixed_host()), OutputFormat(output), stdout=Closed(), stderr=stderr)
    assert stderr.getvalue() == ""


def test_an_error_is_coloured_only_on_a_terminal_that_takes_colour(monkeypatch):
    def said(*, terminal):
        stream = Screen(terminal=terminal)
        write_error(BROKEN, stream)
        return stream.getvalue()

    assert said(terminal=True).startswith("\x1b[1;31merror:\x1b[0m the driver")
    assert said(terminal=False).startswith("error: the driver")
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(terminal=True).startswith("error: the driver")
