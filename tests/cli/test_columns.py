"""What scripts rely on: the columns of `-o csv` and `-o plain`, and for people that no table is wider than 80 columns."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from gpushare.show.render import Layout, Table, layout_of
from gpushare.sim import admin
from tests.cli.drive import Cli, Patch, World
from tools.terminal import terminal

# Columns are only added at the end (docs/json.md).
CSV = {
    "status": "gpu_index gpu_uuid gpu_name pci_bus_id sharing compute_mode time_slice mig_enabled mig_pending"
    " utilization_percent memory_used_bytes memory_total_bytes gpu_error pid type user gpu_instance_id"
    " compute_instance_id sm_percent process_memory_used_bytes started_at job role way threads_percent slice_us"
    " container command_line",
    "jobs": "pid name state user role gpu_indexes device_uuids way mig_profile mig_name threads_percent slice_us"
    " memory_used_bytes memory_limit_bytes swapped_bytes sm_percent since_seconds place behind exit_code ran_seconds"
    " memory_peak_bytes container command held_by",
    "mps status": "gpu pid user started_by status clients threads_percent memory_limit_bytes priority pipe_directory"
    " device_uuid",
    "mig status": "gpu profile name uuid gpu_instance_id compute_instance_id start size memory_bytes",
    "timeslice show": "gpu name time_slice default_slice_us compute_mode uuid",
    "doctor": "verdict id gpu seen why remedy",
    "reserve": "gpu user seconds_left gpu_uuid",
    "swap list": "gpu pid name user state memory_bytes gpu_uuid since",
    "pause list": "pid name user state since until by processes",
    "savings --gpus 4 --load 25": "gpus cost saving saving_percent max_load_percent max_memory_bytes verdict places",
    "sim list": "spec gpus processes daemons directory",
}
# Of the tables that have columns which only some hosts fill: `-o plain` shows them always.
PLAIN = {
    "status": {
        "GPUs": "GPU name sharing memory reserved util procs time-slice compute-mode MIG PCI-bus-id UUID",
        "processes": "GPU GI pid type user SM memory age idle job role way paused container command",
    },
    "jobs -a": {"jobs": "job pid state user role GPU way memory swapped SM since container command"},
}


# Of a host with something in each table.
SETUP = (
    "mps start -g 0,1 --threads 50 --memory 8G",
    "sim add -g 0 --mps --name serve --memory 3G",
    "sim add -g 2 --name a-program-with-quite-a-long-name --memory 3G --user nobody",
    "sim mig -g 3 3g.40gb 1g.10gb",
    "mig name vision 3g.40gb:0 -g 3",
    "reserve -g 5 --for 4h",
)
TABLES = (
    *("status", "jobs -a", "mps status", "mig profiles -g 3", "timeslice show", "savings --gpus 4 --load 25"),
    *("sim list", "sim list --models", "reserve", "swap list", "pause list", "observe --from day.jsonl"),
)


def test_which_columns_a_narrow_terminal_drops(
    cli: Cli, golden: Callable[[str, str], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    """The columns that stay in the narrowest table of each kind, and the others in the order in which they go.

    Those with ``>`` stand at the right; those with ``?`` are left out if no row has a value.
    """
    orders: dict[str, str] = {}

    def noted(table: Table, width: int) -> Layout:
        # A column takes several cells, so at most one goes at a time.
        always = replace(table, columns=tuple(replace(column, optional=False) for column in table.columns))
        marked = {
            column.key: f"{'>' if column.right else ''}{column.title}{'?' if column.optional else ''}"
            for column in table.columns
        }
        layouts = [layout_of(always, cells).columns for cells in range(400, 0, -1)]
        shown = [[marked[column.key] for column in columns] for columns in layouts]
        gone = [next(title for title in wide if title not in less) for wide, less in pairwise(shown) if less != wide]
        orders[table.name] = f"{' | '.join(shown[-1])} <- {' | '.join(gone)}"
        return layout_of(table, width)

    monkeypatch.chdir(tmp_path)
    for line in (*SETUP, "observe --for 1s --to day.jsonl"):
        cli(*line.split(), host="sim:8xh100").ok()
    for verb in (("swap", "out"), ("pause",)):
        cli(*verb, str(admin.add_process("sim:8xh100", "6", name="train")), host="sim:8xh100").ok()
    monkeypatch.setattr("gpushare.show.render.layout_of", noted)
    text = ""
    for verb in TABLES:
        orders.clear()
        cli(*verb.split(), host="sim:8xh100", output="table").ok()
        text += "".join(f"{verb}, {name}: {order}\n" for name, order in orders.items())
    golden("columns", text)


def test_the_columns_of_csv_stay(cli: Cli) -> None:
    heads = {verb: next(csv.reader(io.StringIO(cli(*verb.split(), output="csv").out))) for verb in CSV}
    assert {verb: " ".join(head) for verb, head in heads.items()} == CSV


def test_the_columns_of_plain_do_not_depend_on_what_is_there(cli: Cli, world: World) -> None:
    def head(lines: list[str], title: str) -> str:
        # The text of an empty table is a comment too.
        first = next(line for line in lines[lines.index(f"# {title}") + 1 :] if not line.startswith("#"))
        return " ".join(word.replace(" ", "-") for word in re.split(" {2,}", first.strip()))

    def heads() -> dict[str, dict[str, str]]:
        lines = {verb: cli(*verb.split(), output="plain").ok().out.splitlines() for verb in PLAIN}
        return {verb: {title: head(lines[verb], title) for title in tables} for verb, tables in PLAIN.items()}

    assert heads() == PLAIN
    world.run("sim", "add", "--name", "train", "--memory", "3G")
    assert heads() == PLAIN


def test_no_table_is_wider_than_the_terminal() -> None:
    host = "sim:8xh100"
    shown = (
        *("status", "status -v", "status --legend", "jobs -a", "jobs -v", "mps status", "mig status", "timeslice show"),
        *(
            "mig profiles -g 3",
            "mig plan -g 4 3g.40gb 1g.10gb*2",
            "mig check -g 3 3g.40gb 1g.10gb",
            "doctor",
            "compare",
        ),
        *(
            "compare --view published",
            "sim list",
            "sim list --models",
            "sim show",
            "reserve",
            "swap list",
            "pause list",
        ),
    )
    with terminal(columns=80) as session:
        for line in SETUP:
            session.type(f"gpushare --host {host} {line}")
        texts = {line: re.sub(r"\x1b\[[0-9;]*m", "", session.type(f"gpushare --host {host} {line}")) for line in shown}
    assert [line for line, text in texts.items() if max(map(len, text.splitlines())) > 80] == []
