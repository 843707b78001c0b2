"""The live view: one screen redrawn in place, or one document per look; Ctrl-C ends it well."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re

import pytest
import yaml
from rich.console import Console

from gpushare.base.errors import DriverNotLoaded
from gpushare.show.live import screen_lines, watch
from gpushare.show.render import result_lines
from gpushare.show.result import OutputFormat
from gpushare.show.status import status_result
from tests.show.conftest import Screen
from tests.show.hosts import mixed_host, quiet_host

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
BROKEN = DriverNotLoaded("the driver does not answer", "sudo modprobe nvidia")


class Looks:
    """Look, fail on the second look if asked, and press Ctrl-C on the third."""

    def __init__(self, snapshot=None, *, fails=False):
        self.count = 0
        self.snapshot = snapshot or quiet_host()
        self.fails = fails

    def __call__(self):
        self.count += 1
        if self.count == 3:
            raise KeyboardInterrupt
        if self.count == 2 and self.fails:
            raise BROKEN
        return status_result(self.snapshot)


def watched(output, *, terminal=False, looks=None, quiet=False):
    stream, stderr = Screen(terminal=terminal), Screen()
    looks = looks or Looks()
    with contextlib.redirect_stderr(stderr):
        watch(looks, seconds=0.001, stream=stream, output=output, quiet=quiet)
    assert looks.count == 3
    return stream.getvalue(), stderr.getvalue()


def test_a_terminal_gets_the_alternate_screen_and_gets_its_own_back():
    out, _ = watched(OutputFormat.AUTO, terminal=True)
    assert out.count(ENTER) == out.count(LEAVE) == 1
    assert out.index(ENTER) < out.index("no processes on the GPU") < out.index(LEAVE)
    assert "Ctrl-C ends" in out
    assert "every 0.001 s" in out
    assert "\x1b[2J" not in out[out.index("no processes") :]


def test_the_screen_comes_back_after_any_error():
    stream = Screen(terminal=True)

    def look():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(look, seconds=0.001, stream=stream, output=OutputFormat.AUTO)
    assert LEAVE in stream.getvalue()


def test_an_error_of_one_look_is_shown_in_place_and_the_next_look_goes_on():
    out, err = watched(OutputFormat.AUTO, terminal=True, looks=Looks(fails=True))
    assert "the driver does not answer" in out
    assert "sudo modprobe nvidia" in out
    assert err == ""


def test_json_is_one_compact_document_per_line_also_of_an_error():
    out, err = watched(OutputFormat.JSON, terminal=True, looks=Looks(fails=True))
    documents = [json.loads(line) for line in out.splitlines()]
    assert [document["status"] for document in documents] == ["ok", "error"]
    assert err == "error: the driver does not answer\nhint: sudo modprobe nvidia\n"


def test_yaml_is_a_stream_of_documents():
    out, _ = watched(OutputFormat.YAML)
    assert [document["command"] for document in yaml.safe_load_all(out)] == ["status", "status"]


def test_csv_has_its_header_once():
    out, _ = watched(OutputFormat.CSV, looks=Looks(mixed_host()))
    rows = list(csv.reader(io.StringIO(out, newline="")))
    assert len(rows) == 1 + 2 * 11
    assert [row[0] for row in rows].count("gpu_index") == 1


def test_csv_has_its_header_even_when_the_first_look_fails():
    looks = Looks()
    looks.count, stream = -1, Screen()

    def look():
        if looks.count == -1:
            looks.count = 0
            raise BROKEN
        return looks()

    watch(look, seconds=0.001, stream=stream, output=OutputFormat.CSV)
    assert stream.getvalue().startswith("gpu_index,")


@pytest.mark.parametrize("output", [OutputFormat.AUTO, OutputFormat.PLAIN, OutputFormat.TABLE])
def test_off_a_terminal_looks_are_separated_by_a_blank_line(output):
    out, _ = watched(output)
    first, second = re.split(r"\n\n(?=local)", out)
    assert first + "\n" == second
    assert "\x1b" not in out


def test_a_dumb_terminal_gets_documents(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out, _ = watched(OutputFormat.AUTO, terminal=True)
    assert "\x1b" not in out
    assert out.count("no processes on the GPU") == 2


def test_quiet_looks_have_no_notes():
    assert "note:" in watched(OutputFormat.PLAIN, looks=Looks(mixed_host()))[1]
    assert "note:" not in watched(OutputFormat.PLAIN, looks=Looks(mixed_host()), quiet=True)[1]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 50), (40, 10), (200, 80)])
def test_a_screen_never_has_more_than_fits_and_says_what_it_left_out(width, height):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    result = status_result(mixed_host())
    lines = screen_lines(result, "head", console)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    tall = screen_lines(result, "head", Console(file=io.StringIO(), width=width, height=1000, force_terminal=True))
    short = result_lines(result, width, short=True)
    if lines[-1].plain.startswith("..."):
        more = int(lines[-1].plain.split()[1])
        above = len(tall) - len(result_lines(result, width))
        assert more == above + len(short) - height + 1
    elif len(tall) > height:
        assert {line.plain for line in lines} <= {line.plain.rstrip() for line in [*tall, *short]}
    else:
        assert [line.plain for line in lines] == [line.plain for line in tall]


def test_a_long_hint_is_wrapped_on_the_screen_because_nobody_can_scroll_sideways():
    console = Console(file=io.StringIO(), width=50, height=60, force_terminal=True)
    text = " ".join(line.plain for line in screen_lines(status_result(mixed_host()), "head", console))
    assert "a reboot may bring the GPU back" in re.sub(r"\s+", " ", text)


def test_idle_gpus_are_one_line_where_the_processes_would_be_cut():
    from dataclasses import replace

    snapshot = quiet_host()
    idle = replace(snapshot.gpus[0], processes=(), utilization_percent=0, error=None)
    busy = next(gpu for gpu in mixed_host().gpus if gpu.processes)
    gpus = tuple(replace(idle if index != 5 else busy, index=index) for index in range(8))
    result = status_result(replace(snapshot, gpus=gpus, daemons=()))

    def screen(height):
        console = Console(file=io.StringIO(), width=80, height=height, force_terminal=True)
        return [line.plain for line in screen_lines(result, "head", console)]

    whole, short = screen(60), screen(len(screen(60)) - 1)
    assert not any(line.startswith("idle:") for line in whole)
    assert "idle: GPU 0-4, 6-7" in short
    assert whole[whole.index("processes") : whole.index("processes") + 3] == short[short.index("processes") :][:3]
