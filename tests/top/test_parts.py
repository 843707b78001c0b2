"""What the cockpit keeps, draws and lists, without a screen."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.color import Color, ColorSystem

from gpushare.base.model import (
    Gpu,
    GpuLease,
    GpuProcess,
    GpuSensors,
    LinePlace,
    ListedJob,
    MigInstance,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Snapshot,
    TimeSlice,
)
from gpushare.base.units import GIB
from gpushare.host.machine import Load, Xid
from gpushare.run.listing import listed_jobs
from gpushare.run.look import with_memory
from gpushare.sim import admin
from gpushare.snapshot import Observer
from gpushare.top.dialogs import wrap_lines
from gpushare.top.draw import THEMES, Piece, bar, chart, fit, segments, sparkline
from gpushare.top.frame import Frame, Member, Reader
from gpushare.top.gpus import (
    chart_lines,
    client_lines,
    fact_lines,
    gpu_line,
    head_line,
    layout_of,
    lines_below,
    sharing_text,
)
from gpushare.top.history import Events, History
from gpushare.top.jobs import COLUMNS, Row, View, rows_of, visible_columns
from gpushare.top.verbs import follow_output, plan_lines
from gpushare.top.watch import DEADLINE_SECONDS, Watch
from tests.cli.drive import World
from tests.top.conftest import full_frame

DARK, PLAIN = THEMES["dark"], THEMES["plain"]


def frame(at: float = 0.0, **facts: Any) -> Frame:
    gpu = Gpu(index=0, memory_total_bytes=80 * GIB, memory_used_bytes=40 * GIB, utilization_percent=50)
    snapshot = facts.pop("snapshot", Snapshot(host="local", gpus=(facts.pop("gpu", gpu),)))
    return Frame(at=at, snapshot=snapshot, **facts)


def job(pid: int = 7, **facts: Any) -> ListedJob:
    return ListedJob(**{"name": None, "pid": pid, "state": "running", "user": "alice", "role": None, "device": "GPU 0", "gpu_indexes": (0,), "command": "train", **facts})  # fmt: skip


def past_of(*frames: Frame) -> History:
    past = History()
    for shown in frames:
        past.add(shown)
    return past


def drawn(lines: Sequence[Sequence[Piece]], *, colours: bool) -> str:
    """Return lines as text; with the name of its colour before each piece, if wanted."""
    return "".join(
        "".join(f"<{piece[1]}>{piece[0]}" if colours else piece[0] for piece in line) + "\n" for line in lines
    )


@pytest.mark.parametrize("width", [60, 80, 100, 118, 140, 240])
def test_the_gpus(golden: Callable[[str, str], None], width: int) -> None:
    """What each GPU looks like at a width of the screen: its line, and the lines of the view of one."""
    shown, past = full_frame(300.0), past_of(*(full_frame(float(second)) for second in range(0, 301, 4)))
    layout = layout_of(width, 14)
    lines = [head_line(layout)]
    for gpu in shown.snapshot.gpus:
        lines += [gpu_line(shown, gpu, past, layout), *lines_below(shown, gpu, layout)]
    for index in (1, 3, 7, 8):
        gpu = shown.snapshot.gpus[index]
        lines += [*fact_lines(shown, gpu, width), *client_lines(shown, gpu), *chart_lines(shown, gpu, past, width, 4)]
    golden(f"top-gpus-{width}", drawn(lines, colours=width == 118))


@pytest.mark.parametrize("width", [30, 60, 100, 180, 240])
def test_the_jobs(golden: Callable[[str, str], None], width: int) -> None:
    """What the list of jobs looks like at a width of the screen, and from its fourth column on."""
    shown, lines = full_frame(), list[list[Piece]]()
    for first in (1, 4):
        rows = rows_of(shown, View(ended=True, tree=width > 60))
        columns = visible_columns(width, first, rows)
        lines.append([(fit(column.title, cells, right=column.right) + " ", "dim") for column, cells in columns])
        for row in rows:
            cells_of_row = [(*column.cell(row), column.right, cells) for column, cells in columns]
            lines.append([(fit(text, cells, right=right) + " ", colour) for text, colour, right, cells in cells_of_row])
    golden(f"top-jobs-{width}", drawn(lines, colours=width == 100))


def told(*frames: Frame) -> list[str]:
    """Return what happened between frames."""
    events = Events()
    for number, one in enumerate(frames):
        events.add(replace(one, at=float(number)))
    return [event.text for event in events.all]


@pytest.mark.parametrize(("share", "cells"), [(0.0, 0), (0.001, 1), (0.5, 4), (1.0, 8), (1.7, 8)])
def test_a_bar_has_its_width_whatever_it_shows(share: float, cells: int) -> None:
    pieces = bar(8, [(share, "util"), (0.2, "reserved")])
    assert sum(len(piece[0]) for piece in pieces) == 8
    assert sum(len(piece[0]) for piece in pieces if piece[1] == "util") == cells
    # Something is not nothing.
    assert (pieces[0][1] == "dim" or pieces[0][1] == "reserved") is (share == 0.0)


def test_an_unknown_value_is_a_dash_in_a_bar_and_a_gap_in_the_past() -> None:
    assert bar(5, [(None, "util")]) == [("-    ", "dim")]
    assert sparkline([0.0, None, 1.0], "util") == ("▁ ▇", "util")
    lines = ["".join(piece[0] for piece in line) for line in chart([None, 0.5, 1.0], 2, "util")]
    assert [len(line) for line in lines] == [3, 3]


def test_what_a_chart_is_filled_with_shows_without_colours() -> None:
    full = segments(chart([1.0], 2, "util")[1], 1, PLAIN)
    assert full[0].text == "█" or (full[0].style is not None and full[0].style.reverse)


def test_colours_are_told_apart_where_there_are_256() -> None:
    """Lines, titles and the cursor differ, and their text can be read (WCAG: a contrast of 3 for large text)."""
    for theme in (DARK, THEMES["light"]):
        shown = {
            name: Color.parse(code).downgrade(ColorSystem.EIGHT_BIT).get_truecolor()
            for name, code in theme.colours.items()
        }
        assert len({shown[name] for name in ("back", "head", "row")}) == 3
        for back in ("back", "head", "row"):
            weak = [name for name in ("text", "dim", "warn", "bad") if contrast(shown[name], shown[back]) < 3]
            assert not weak, (theme.name, back)


def contrast(text: tuple[int, int, int], back: tuple[int, int, int]) -> float:
    """Return the contrast of two colours (WCAG 2, relative luminance)."""

    def luminance(colour: tuple[int, int, int]) -> float:
        parts = (channel / 255 for channel in colour)
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(text), luminance(back)))
    return (light + 0.05) / (dark + 0.05)


def test_a_line_is_as_wide_as_the_screen() -> None:
    for text in ("short", "x" * 50, "日本語" * 9):
        assert sum(segment.cell_length for segment in segments([(text, "text")], 20, DARK)) == 20
        assert fit(text, 7)


def test_the_past_has_five_minutes_and_goes_back_with_the_time() -> None:
    past = History()
    for second in range(600):
        past.add(frame(float(second), gpu=Gpu(index=0, utilization_percent=100 if second < 450 else 0)))
    values = past.means(0, "util", 10)
    assert values[0] == 1.0
    assert values[-1] == 0.0
    assert past.means(0, "sm", 3) == [None] * 3
    assert past.means(9, "util", 2) == [None] * 2
    # A replay that goes back forgets what is later.
    past.add(frame(430.0, gpu=Gpu(index=0, utilization_percent=100)))
    assert past.means(0, "util", 10)[-1] == 1.0


def test_events_of_jobs() -> None:
    line = LinePlace(place=2, memory_bytes=GIB, behind=(), held_by=())
    waits = job(name="llm", state="waiting", line=line)
    runs = job(8, name="llm")
    ended = job(name="llm", pid=None, state="ended", exit_code=3, ran_seconds=4.0)
    over = job(9, memory_used_bytes=9 * GIB, memory_limit_bytes=8 * GIB)
    queued = frame(jobs=(waits,))
    assert told(frame(), queued, queued, queued, frame(jobs=(runs,)), frame(jobs=(ended,))) == [
        "llm waits for room, place 2",
        "llm started on GPU 0",
        "llm ended with exit code 3",
    ]
    # Who waits since before the start is no news.
    assert told(queued, queued) == []
    assert told(frame(jobs=(runs,)), frame(jobs=(replace(runs, state="paused"),)), frame(jobs=(runs,))) == [
        "llm was paused",
        "llm goes on",
    ]
    assert told(frame(), frame(jobs=(over,)), frame(jobs=(over,)), frame()) == [
        "train (9) started on GPU 0",
        "train (9) is over its limit: 9.0 GiB of 8.0 GiB",
        "train (9) ended",
    ]
    assert told(frame(jobs=(waits,)), frame()) == ["llm left the line"]
    # Its process is there for a moment longer than its record.
    rest = job(8, name=None)
    assert told(frame(jobs=(runs,)), frame(jobs=(rest, ended)), frame(jobs=(ended,))) == ["llm ended with exit code 3"]
    # A GPU that does not answer tells nothing of what it runs.
    lost = frame(gpu=Gpu(index=0, error="GPU 0 is lost"))
    assert told(frame(jobs=(job(9),)), lost) == ["GPU 0 is lost"]
    # Nor did that start when it answers again; what runs on another GPU too is seen all the time.
    assert told(frame(jobs=(job(9),)), lost, frame(jobs=(job(9),))) == ["GPU 0 is lost", "GPU 0 answers again"]
    both = job(9, gpu_indexes=(0, 1))
    assert told(frame(jobs=(both,)), replace(lost, jobs=(replace(both, gpu_indexes=(1,)),))) == ["GPU 0 is lost"]
    # Nothing can be read: nothing has ended.
    assert told(frame(jobs=(runs,)), frame(error="the driver is gone"), frame(jobs=(runs,))) == []


def test_events_of_gpus_and_daemons() -> None:
    lost = frame(gpu=Gpu(index=0, error="GPU 0: the GPU is lost"))
    slow = frame(sensors={0: GpuSensors(slowed_by=("heat",))})
    assert told(frame(), lost, lost, frame()) == ["GPU 0: the GPU is lost", "GPU 0 answers again"]
    # Reasons come and go each second: once a minute is enough.
    assert told(frame(), slow, frame(), slow) == ["GPU 0 is throttled: heat"]
    assert told(frame(xids=()), frame(xids=(Xid(79, "0000:01:00"),))) == ["Xid 79 of the GPU at 0000:01:00"]
    server = MpsServer(pid=5, status="ACTIVE", clients=(MpsClient(pid=6),))
    daemon = MpsDaemon(pid=4, ours=True, pipe_directory="/p", gpu_index=0, servers=(server,))
    served, broken, dead = (
        frame(snapshot=Snapshot(host="local", daemons=(replace(daemon, servers=servers),)))
        for servers in ((server,), (replace(server, status="FAULT"),), ())
    )
    assert told(frame(), served, broken, dead, frame()) == [
        "the MPS server of GPU 0 is FAULT",
        "the MPS server of GPU 0 died, with 1 client",
        "the MPS daemon of GPU 0 ended",
    ]


def test_a_job_under_a_daemon_of_its_own_is_told_once() -> None:
    """Neither that daemon nor its server is news."""
    daemon = MpsDaemon(pid=4, ours=True, pipe_directory="/p", gpu_index=0, transient=True, servers=(MpsServer(pid=5),))
    server = job(5, command="nvidia-cuda-mps-server")
    served = frame(snapshot=Snapshot(host="local", daemons=(daemon,)), jobs=(job(8, name="llm"), server))
    assert told(frame(), served, frame()) == ["llm started on GPU 0", "llm ended"]


def test_who_has_just_ended_is_told_by_name() -> None:
    """It ended between the look at the GPUs and that at the processes."""
    world = World("sim:h200")
    pid = admin.add_process(world.spec, "0", name="train", user="bob")
    snapshot = Observer(world.host).read()
    admin.end_process(world.spec, pid)
    assert [(job.command, job.user) for job in listed_jobs(world.host, snapshot, everything=True)] == [("train", "bob")]


def test_lines_of_a_gpu_fit_their_columns() -> None:
    """The longest word of sharing is whole, and a lease stands below."""
    gpu = Gpu(index=0, uuid="GPU-0", name="NVIDIA A100-SXM4-40GB")
    daemon = MpsDaemon(pid=4, ours=True, pipe_directory="/p", gpu_index=0, threads_percent=12.5, max_clients=48)
    lease = GpuLease(gpu_uuid="GPU-0", uid=7, user="bob", seconds_left=7200, held_seconds=60)
    shown = frame(snapshot=Snapshot(host="local", gpus=(gpu,), daemons=(daemon,), leases=(lease,)))
    assert sharing_text(shown, gpu) == "MPS 12.5% 0"
    for width in range(80, 301):
        layout = layout_of(width, 14)
        line = gpu_line(shown, gpu, History(), layout)
        assert sum(len(piece[0]) for piece in line[:-1]) + 13 <= width
    assert any("reserved for bob for 2 h" in piece[0] for line in lines_below(shown, gpu, layout) for piece in line)


def test_limits_that_are_unknown_are_no_limits_of_100_percent() -> None:
    clients = (MpsClient(pid=6), MpsClient(pid=7, threads_percent=100.0), MpsClient(pid=8, threads_percent=25.0, memory_limit_bytes=GIB))  # fmt: skip
    daemon = MpsDaemon(pid=4, ours=True, pipe_directory="/p", gpu_index=0, servers=(MpsServer(pid=5, clients=clients),))
    gpu = Gpu(index=0)
    shown = frame(snapshot=Snapshot(host="local", gpus=(gpu,), daemons=(daemon,)))
    assert [line[-1][0].strip() for line in client_lines(shown, gpu)] == [
        "threads -  memory -",
        "threads 100 %  no memory limit",
        "threads 25 %  memory 1.0 GiB",
    ]
    assert "threads -  memory -" in lines_below(shown, gpu, layout_of(80, 9))[0][-1][0]


def test_below_a_gpu_are_the_names_of_jobs() -> None:
    """Of what belongs to none its program; who is on a GPU that does not tell its processes is unknown."""
    instances = (MigInstance(uuid="MIG-1", gpu_instance_id=1), MigInstance(uuid="MIG-2", gpu_instance_id=2))
    inside = (GpuProcess(pid=6, name="python3", gpu_instance_id=1), GpuProcess(pid=7, name="top", gpu_instance_id=1))
    daemon = MpsDaemon(
        pid=4, ours=True, pipe_directory="/p", gpu_index=0, servers=(MpsServer(pid=5, clients=(MpsClient(pid=6),)),)
    )
    jobs, layout = (job(5, name="train", processes=(6,)),), layout_of(120, 9)
    for processes, ends in ((inside, ["train, top", "free"]), (None, ["-", "-"])):
        gpu = Gpu(index=0, mig_enabled=True, mig_instances=instances, processes=processes)
        shown = frame(snapshot=Snapshot(host="local", gpus=(gpu,), daemons=(daemon,)), jobs=jobs)
        assert [line[-1][0] for line in lines_below(shown, gpu, layout)[:2]] == ends
        assert "train" in client_lines(shown, gpu)[0][1][0]


def test_lines_to_read_are_broken_where_they_are_wider_than_the_box() -> None:
    """Also such that have no blanks, and characters that take two cells."""
    for text in ("word " * 30, "x" * 70, "日本" * 30, " " * 40 + "far in"):
        rows = [row for row, _ in wrap_lines([(text, "text")], 30)]
        assert all(cell_len(row) <= 30 for row in rows)
        assert "".join("".join(rows).split()) == "".join(text.split())
    assert wrap_lines([("", "text")], 30) == [("", "text")]
    # A command can be copied.
    command = "$ quit | nvidia-cuda-mps-control"
    assert [row.strip() for row, _ in wrap_lines([(command, "text")], 30)] == ["$ quit |", "nvidia-cuda-mps-control"]


def test_output_without_ends_of_lines_is_shown_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar has carriage returns; what is no text may have neither, and takes no memory without end."""
    program = "import sys; sys.stdout.write('1 %\\r2 %\\r\\n' + 'x' * 200_000)"
    monkeypatch.setattr("gpushare.top.verbs.argv_of", lambda *_: [sys.executable, "-c", program])
    lines: list[str] = []
    asyncio.run(follow_output("sim:h200", "train", lines.extend))
    assert lines[:2] == ["1 %", "2 %"]
    assert "".join(lines[2:]) == "x" * 200_000
    assert 1 < len(lines[2:]) < 8


def test_a_replay_that_moves_its_time_forgets_what_is_later() -> None:
    events = Events()
    for second in range(5):
        events.add(replace(frame(jobs=(job(),) if second % 2 else ()), at=float(second)))
    assert len(events.all) == 4
    events.restart(2.0)
    assert [event.at for event in events.all] == [1.0, 2.0]
    events.add(replace(frame(jobs=(job(),)), at=2.0))
    assert len(events.all) == 2


def test_unknown_values_are_last_in_every_order() -> None:
    shown = frame(jobs=(job(1, memory_used_bytes=None), job(2, memory_used_bytes=5), job(3, memory_used_bytes=9)))
    for column in COLUMNS:
        for reverse in (False, True):
            view = View(sort=column.key, reverse=reverse)
            rows = [row.job.pid for row in rows_of(shown, view)]
            assert sorted(rows, key=str) == [1, 2, 3]
            if column.key == "memory":
                assert rows == ([2, 3, 1] if reverse else [3, 2, 1])
    for width in range(20, 300, 7):
        columns = visible_columns(width, 1, rows_of(shown, View()))
        assert sum(cells + 1 for _, cells in columns) - 1 <= max(width, COLUMNS[0].width)


def test_names_are_sorted_by_the_numbers_in_them() -> None:
    names = ["s10", "s2", "s", "serve", f"s{'9' * 5000}", "s1", "2nd"]
    shown = frame(jobs=tuple(job(pid, name=name) for pid, name in enumerate(names, 1)))
    rows = [row.job.name for row in rows_of(shown, View(sort="job"))]
    assert rows == ["2nd", "s", "s1", "s2", "s10", f"s{'9' * 5000}", "serve"]


def test_a_step_without_a_program_has_no_command_in_a_plan() -> None:
    steps = [{"what": "write the record", "command": None}, {"what": "kill it", "command": "kill 7"}]
    lines = [text for text, _ in plan_lines({"data": {"steps": steps}}, ["stop", "7"])]
    assert lines == ["gpushare stop 7", "", "1. write the record", "2. kill it", "   $ kill 7"]


def test_a_look_that_hangs_is_noticed_and_ends_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is a daemon; what it has read before stays."""
    hangs, first = threading.Event(), threading.Event()

    class Reader:
        looks = 0

        def read(self) -> Frame:
            self.looks += 1
            if self.looks > 1:
                first.set()
                hangs.wait()
            return frame()

    watch = Watch(Reader(), 0.0)  # type: ignore[arg-type]
    watch.start()
    assert first.wait(5)
    assert watch.latest is not None
    assert watch.hangs_for() is None
    monkeypatch.setattr(watch, "_began", 0.0)
    for seconds, told in ((DEADLINE_SECONDS, None), (DEADLINE_SECONDS + 5, DEADLINE_SECONDS + 5)):
        monkeypatch.setattr("gpushare.top.watch.time.monotonic", lambda now=seconds: now)
        assert watch.hangs_for() == told
    watch.end()
    hangs.set()


def test_a_look_that_fails_unexpectedly_is_told_and_repeated() -> None:
    seen: list[Frame] = []
    done = threading.Event()

    class Reader:
        def read(self) -> Frame:
            if seen:
                done.set()
                return frame()
            message = "oops"
            raise ValueError(message)

    watch = Watch(Reader(), 0.0)  # type: ignore[arg-type]
    watch.deliver = seen.append
    watch.start()
    assert done.wait(5)
    watch.end()
    assert "unexpected ValueError: oops" in (seen[0].error or "")


def test_the_first_look_runs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-slice of a GPU, its traffic and the Xids come with the second."""
    world = World("sim:h200")
    reader, ran = Reader(world.host, with_memory), list[str]()
    monkeypatch.setattr(type(world.host.machine), "xids", lambda _: ran.append("journalctl"))
    first, second = reader.read(), reader.read()
    assert (first.snapshot.gpus[0].time_slice, second.snapshot.gpus[0].time_slice) == (None, TimeSlice.DEFAULT)
    assert (first.sensors[0].pcie_sent, ran) == (None, ["journalctl"])
    assert second.sensors[0].pcie_sent is not None


def test_the_work_of_the_cores_is_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what was done since the look before; and the kernel may count backwards."""
    world = World("sim:h200")
    reader = Reader(world.host, with_memory)
    load = Load(busy_seconds=1.0, all_seconds=9.0, memory_total=64 * GIB, memory_free=GIB)
    loads = [load, load._replace(all_seconds=load.all_seconds + 1.0, busy_seconds=load.busy_seconds + 1.5)]
    loads.append(loads[1]._replace(all_seconds=loads[1].all_seconds + 1.0, busy_seconds=loads[1].busy_seconds - 0.5))
    monkeypatch.setattr(type(world.host.machine), "load", lambda _: loads.pop(0))
    assert [reader.read().cpu_percent for _ in range(3)][1:] == [100.0, 0.0]


def test_the_tree_of_a_job_has_branches() -> None:
    """A process with a later one of its depth below the same parent is no last one."""
    tree = tuple(Member(pid=pid, depth=depth, name="w", use=None) for pid, depth in ((8, 1), (9, 2), (10, 1)))
    rows = rows_of(frame(jobs=(job(7),), trees={7: tree}), View(tree=True))
    assert [row.branch for row in rows] == ["", "├ ", "  └ ", "└ "]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"way": "mig+mps", "mig_profile": "2c.3g.40gb"}, "2c.3g+MPS"),
        ({"way": "mig+mps", "mig_profile": "1g.10gb", "mig_name": "alice"}, "alice+MPS"),
        ({"way": "mig", "mig_profile": "7g.141gb"}, "7g.141gb"),
        ({"way": "mig+mps"}, "MIG+MPS"),
        ({"way": "mps"}, "MPS"),
        ({"way": None}, "-"),
    ],
)
def test_the_way_of_a_job_fits_its_column(facts: dict[str, Any], text: str) -> None:
    (column,) = (column for column in COLUMNS if column.key == "way")
    job = ListedJob(name="a", pid=1, state="running", user="anna", role=None, device=None, **facts)
    assert column.cell(Row(job, None))[0] == text
    assert len(text) <= column.width
