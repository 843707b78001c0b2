"""The cockpit, driven by its keys on simulated hosts."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding, BindingType
from textual.strip import Strip

from gpushare.base.model import MPS_SERVER, GpuSensors, LinePlace, ListedJob
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.host.identity import Identity
from gpushare.measure.observe import Clock, header_for, observe
from gpushare.measure.recording import RecordingFile, Samples
from gpushare.run.jobs import JobRecord, keep_past
from gpushare.sim import admin
from gpushare.top.dialogs import Choice, Dialog, Question
from gpushare.top.draw import THEMES
from gpushare.top.frame import Frame, Reader
from gpushare.top.replay import Replay
from gpushare.top.screen import Cockpit
from tests.cli.drive import World
from tests.top.conftest import Shown, full_frame

Show = Callable[..., None]


class Ticks(Clock):
    """A clock on which sleeping takes no time."""

    def __init__(self) -> None:
        now = [1000.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        super().__init__(monotonic=lambda: now[0], wall=lambda: 1_767_614_400.0 + now[0], sleep=sleep)


def add(world: World, gpu: int, name: str, memory: float, **facts: object) -> int:
    connect(world.spec)
    return admin.add_process(world.spec, str(gpu), name=name, memory_bytes=int(memory * GIB), **facts)  # type: ignore[arg-type]


class Still(Reader):
    """A reader of a host on which nothing happens, once a minute."""

    def __init__(self) -> None:
        self.watched, self.trees, self._at = None, False, 0.0

    def read(self) -> Frame:
        self._at += 60.0
        frame = full_frame(self._at)
        throttled = {8: GpuSensors(slowed_by=("heat",))} if self._at == 120 else {}
        return replace(frame, sensors={**frame.sensors, **throttled})


@pytest.fixture
def utc() -> Iterator[None]:
    """Show the clock of Greenwich."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def world() -> World:
    return World("sim:h200")


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [
        ("40", (40, 12), ""),
        ("80", (80, 24), ""),
        ("80-jobs", (80, 24), "end"),
        ("99", (99, 30), "z right right u down enter"),
        ("120-timesliced", (120, 40), "tab down enter"),
        ("120-mig", (120, 40), "tab down down enter"),
        ("120-lost", (120, 40), "tab down down down down down enter"),
        ("160", (160, 50), "t z o home enter"),
        ("160-held", (160, 50), "space I pagedown slash a enter"),
        ("240", (240, 70), "tab end"),
    ],
)
def test_the_screen(
    show: Show, golden: Callable[[str, str], None], name: str, size: tuple[int, int], keys: str
) -> None:
    """What a screen of this size shows after some keys."""

    async def script(screen: Shown) -> None:
        for _ in range(5):
            await screen.look()
        await screen.press(*keys.split())
        golden(f"top-screen-{name}", f"{screen.text}\n")

    show(World("sim:h200"), script, size=size, reader=Still())


def test_jobs_are_sorted_filtered_and_acted_on(show: Show, world: World) -> None:
    """Every key of the list of jobs, and an action from its plan to its end."""
    serve = add(world, 0, "serve", 4, user="alice")
    train = add(world, 0, "train", 9, user="bob", command_line=["train", "--lora"])

    async def script(screen: Shown) -> None:
        assert screen.text.startswith(" gpushare top  sim:h200  driver 580.")
        names = lambda: [row.job.pid for row in screen.app._rows]  # noqa: E731
        assert names() == [train, serve]
        await screen.press("I")
        assert names() == [serve, train]
        await screen.press("I", "o", "home", "enter")
        assert screen.app.view.sort == "job"
        assert names() == [serve, train]
        await screen.press("greater_than_sign", "less_than_sign", "slash", *"bob", "enter")
        assert names() == [train]
        assert "/bob: Esc" in screen.text
        # Those that have ended are shown, or not, whatever is filtered.
        await screen.press("z", "escape", "u", "down", "enter")
        assert (names(), screen.app.view.ended) == ([serve], True)
        await screen.press("z")
        await screen.press("escape", "g", "down", "enter")
        assert len(names()) == 2
        await screen.press("escape", "right", "right")
        assert (screen.app.view.text, screen.app.view.user, screen.app.view.gpu) == ("", None, None)
        assert "JOB" in screen.text
        assert "PID" not in screen.line("JOB")
        await screen.press("left", "left", "z", "t")
        await screen.look()
        # The cursor stays on its job, wherever that goes.
        await screen.press("home")
        chosen = screen.app.chosen
        await screen.press("I")
        assert screen.app.chosen.job.pid == chosen.job.pid
        # The plan first; no: nothing happens.
        await screen.press("s")
        assert f"gpushare stop {chosen.job.pid}" in screen.text
        assert "SIGTERM" in screen.text
        await screen.press("n")
        assert chosen.job.pid in world.pids()
        await screen.press("f9", "y")
        await screen.pilot.pause(0.1)  # type: ignore[union-attr]
        assert chosen.job.pid not in world.pids()
        assert screen.ran[-1] == ["stop", str(chosen.job.pid), "-y"]
        await screen.look()
        assert len(names()) == 1
        assert "ended" in screen.text

    show(world, script)


def test_the_cursor_stays_on_one_of_several_ended_jobs_of_a_name(show: Show, world: World) -> None:
    for code in (3, 4):
        supervisor = Identity(1, code)
        record = JobRecord(name="train", pid=1, started=1, devices=(), role="plain", supervisor=supervisor)
        keep_past(world.host, record, "GPU 0", 1e9 + code, code)

    async def script(screen: Shown) -> None:
        await screen.press("z", "end")
        assert [row.job.exit_code for row in screen.app._rows] == [4, 3]
        await screen.look()
        assert screen.app.chosen.job.exit_code == 3

    show(world, script)


def test_a_job_is_paused_sliced_swapped_and_explained(show: Show, world: World) -> None:
    pid = add(world, 0, "train", 9)

    async def script(screen: Shown) -> None:
        await screen.press("n", *"500us", "enter", "y")
        assert screen.ran[-1] == ["timeslice", "set", "500us", str(pid)]
        await screen.look()
        assert screen.app._rows[0].job.slice_us == 500
        # A weight: three times the usual slice.
        await screen.press("n", *"3x", "enter", "y")
        await screen.look()
        assert screen.app._rows[0].job.slice_us == 3 * 2048
        await screen.press("p", "y")
        await screen.look()
        assert "paused" in screen.line(str(pid))
        await screen.press("r", "y")
        await screen.look()
        assert "running" in screen.line(str(pid))
        await screen.press("w", "y")
        await screen.look()
        assert " out " in screen.line(str(pid))
        await screen.press("b", "y")
        await screen.look()
        assert "running" in screen.line(str(pid))
        # What the verb refuses is said with its hint, and nothing happens.
        await screen.press("b")
        assert "not swapped out" in screen.text
        await screen.press("escape", "e", *"time-slicing", "enter")
        assert "Explain: time-slicing" in screen.text
        assert "next: gpushare" in screen.text
        await screen.press("escape", "E")
        assert "was paused" in screen.text
        await screen.press("escape", "enter")
        assert "pause it: off the GPU at once" in screen.text
        assert "way        slice 6.144ms" in screen.text
        await screen.press("p")
        assert f"gpushare pause {pid}" in screen.text
        await screen.press("n")
        # A line of the output that is wider than the box goes on in the next one.
        screen.output = ["step 1", f"step 2 {'x' * 50} {'日本' * 40} its end"]
        await screen.press("L")
        assert "step 2" in screen.text
        assert "its end" in screen.text
        await screen.press("escape", "enter", "L")
        assert "step 2" in screen.text
        await screen.press("escape", "v", *"1", "enter")
        assert screen.ran[-1] == ["move", str(pid), "-g", "1", "-n"]
        assert "GPU" in screen.text

    show(world, script)


def test_only_a_client_of_a_daemon_has_its_limits_set(show: Show) -> None:
    """A job outside MPS, which may share its GPU with a daemon, is not offered to change it; an instance has its own."""
    world = World("sim:2xh200")
    world.run("mps", "start", "-g", "0")
    world.mig("3g.71gb", "3g.71gb", gpu="1")
    world.run("mps", "start", "-g", instance := world.devices()[0][1])
    tenant = world.client(1, mig=instance, memory_bytes=GIB)
    outside = add(world, 1, "web", 9, mig=world.devices()[1][1])

    async def script(screen: Shown) -> None:
        assert next(row.job.pid for row in screen.app._rows) == outside
        await screen.press("home", "m")
        assert "is no client of an MPS daemon" in screen.text
        await screen.press("enter")
        assert "resume it" in screen.text
        assert "limits of its MPS daemon" not in screen.text
        await screen.press("escape", "slash", *str(tenant), "enter", "enter")
        assert "limits of its MPS daemon" in screen.text
        await screen.press("m", *"--threads 50", "enter")
        assert screen.ran == [["mps", "set", "-g", instance, "--threads", "50", "-n"]]

    show(world, script)


def test_the_doctor_is_asked_afresh(show: Show) -> None:
    """What it has found before stays on the page until it has answered; then the title and the page say the same."""
    world = World("sim:2xh100")
    world.fault("lost", gpu=1)

    async def script(screen: Shown) -> None:
        inner, go_on = screen.app._answer, asyncio.Event()
        await screen.app._ask_doctor()
        world.clear()
        world.fault("persistence-off", gpu=0)
        await screen.look()

        async def slow(words: Sequence[str]) -> dict[str, Any]:
            await go_on.wait()
            return await inner(words)

        screen.app._answer = slow  # type: ignore[method-assign]
        await screen.press("D")
        assert "gpushare doctor is at work ..." in screen.text
        assert "fell off the bus" in screen.text
        go_on.set()
        await screen.pilot.pause(0.1)  # type: ignore[union-attr]
        assert "at work" not in screen.text
        assert "fell off the bus" not in screen.text
        assert "nvidia-persistenced" in screen.text
        assert "1 finding: D" in screen.text
        # It finds nothing, and cannot be asked.
        world.clear()
        await screen.press("escape", "D")
        await screen.pilot.pause(0.1)  # type: ignore[union-attr]
        assert "gpushare doctor has found nothing" in screen.text
        assert "finding: D" not in screen.text

        async def silent(_words: Sequence[str]) -> dict[str, Any]:
            error = {"code": "no_answer", "message": "it ended with exit code 9", "hint": "try it: gpushare doctor"}
            return {"status": "error", "data": None, "errors": [error]}

        screen.app._answer = silent  # type: ignore[method-assign]
        await screen.press("escape", "D")
        await screen.pilot.pause(0.1)  # type: ignore[union-attr]
        assert "it ended with exit code 9" in screen.text

    show(world, script)


def test_an_explained_text_may_begin_with_a_dash(show: Show, world: World) -> None:
    async def script(screen: Shown) -> None:
        await screen.press("e", *"--memory 4G exceeded", "enter")
        assert "no such option" not in screen.text
        assert "no explanation found" in screen.text

    show(world, script)


@pytest.mark.parametrize("key", ["space", "question_mark"])
def test_a_new_size_is_drawn_at_once(show: Show, key: str, world: World) -> None:
    """No next frame comes to a held screen; one below a dialog is drawn too."""
    add(world, 0, "train", 9)

    async def script(screen: Shown) -> None:
        assert screen.pilot is not None
        await screen.press(key)
        await screen.pilot.resize_terminal(80, 24)
        await screen.pilot.pause()
        if key == "question_mark":
            screen.app.screen.dismiss()
            await screen.pilot.pause()
        narrow = screen.text
        screen.app.redraw()
        await screen.pilot.pause()
        assert screen.text == narrow
        assert "COMMAND" not in narrow

    show(world, script, size=(200, 40))


def test_the_menu_of_a_job_with_a_long_command_does_what_is_chosen(show: Show, world: World) -> None:
    """What is told of the job may take several lines; it is never under the cursor."""
    pid = add(world, 0, "train", 9, command_line=["train", *("--option" for _ in range(60))])

    async def script(screen: Shown) -> None:
        await screen.press("enter", "home", "down", "enter")
        assert screen.ran[-1] == ["pause", str(pid), "-n"]
        await screen.press("n", "enter")
        await screen.pilot.click(offset=(12, screen.text.splitlines().index(screen.line("r  resume it"))))  # type: ignore[union-attr]
        await screen.pilot.pause(0.1)  # type: ignore[union-attr]
        assert screen.ran[-1] == ["resume", str(pid), "-n"]

    show(world, script, size=(80, 24))


@pytest.mark.parametrize("count", [1, 3, 30])
def test_gpus_and_jobs_share_the_height(show: Show, count: int) -> None:
    """All of 16 GPUs are on a small screen with few jobs; many jobs take half of it."""
    world = World("sim:16xh100")
    for number in range(count):
        add(world, number % 16, f"job-{number}", 1)

    async def script(screen: Shown) -> None:
        lines = screen.text.splitlines()
        shown = sum(any(line.startswith(f"{gpu:>3} ") for line in lines) for gpu in range(16))
        assert (shown, "job-0" in screen.text) == (16 if count <= 3 else 9, True)
        # The others come into view with the cursor.
        await screen.press("tab", "end")
        assert any(line.startswith(" 15 ") for line in screen.text.splitlines())

    show(world, script, size=(80, 24))


def test_eight_gpus_of_which_one_is_lost_fit_a_small_terminal(show: Show) -> None:
    """A line each; Enter opens one with its MIG instances, Escape goes back."""
    world = World("sim:8xh100")
    world.run("mps", "start", "-g", "0", "--threads", "50", "--memory", "20G")
    world.client(0, name="serve", memory_bytes=11 * GIB)
    world.mig("3g.40gb", "1g.10gb", gpu="1")
    world.run("mig", "name", "alice", world.devices()[0][1])
    world.fault("lost", gpu=6)

    async def script(screen: Shown) -> None:
        lines = screen.text.splitlines()
        assert len(lines) == 24
        assert all(any(line.startswith(f"  {gpu} ") for line in lines) for gpu in range(8))
        assert "MPS 50% 1/48" in lines[2]
        assert "MIG 2" in lines[3]
        assert "lost" in lines[8]
        await screen.press("tab", "down", "enter")
        assert "alice" in screen.line("3g.40gb")
        assert "SM clock" in screen.text
        assert "GPU 1: Esc" in screen.text
        await screen.press("escape", "home", "enter")
        assert "1/48 clients  threads 50 %  memory 20.0 GiB" in screen.text
        assert "serve" in screen.text
        await screen.press("escape")
        # A limit of its daemon, and its death.
        await screen.press("tab", "m", *"--threads 25 --memory 8G", "enter", "y")
        assert screen.ran[-1] == ["mps", "set", "-g", "0", "--threads", "25", "--memory", "8G"]
        world.host.processes.send(world.state.daemons[0].servers[0].pid, 9)
        await screen.look()
        assert any("MPS server of GPU 0 died" in event.text for event in screen.app.happened.all)

    show(world, script, size=(80, 24))


def test_a_gpu_without_jobs_and_one_that_is_lost_say_so(show: Show) -> None:
    world = World("sim:3xh100")
    add(world, 0, "serve", 4)
    world.fault("lost", gpu=2)

    async def script(screen: Shown) -> None:
        await screen.press("tab", "down", "enter")
        assert "no processes on GPU 1; Esc shows all GPUs" in screen.text
        await screen.press("escape", "end", "enter")
        assert "the processes on GPU 2 are unknown; see: gpushare doctor" in screen.text
        assert "it fell off the bus" in screen.text
        # No list of facts that are all unknown.
        assert "temperature" not in screen.text
        await screen.press("slash", *"nobody", "enter")
        assert "nothing is shown by this filter" in screen.text

    show(world, script, size=(80, 24))


def test_what_is_typed_has_an_example_that_looks_like_none(show: Show, world: World) -> None:
    add(world, 0, "serve", 4)

    async def script(screen: Shown) -> None:
        await screen.press("v")
        assert "for example: 1" in screen.text
        await screen.press("escape", "u", "escape", "slash")
        assert "for example" not in screen.text

    show(world, script)


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (300, 70)])
def test_sixteen_gpus_with_three_jobs_each(show: Show, size: tuple[int, int]) -> None:
    """Every job can be reached, in every size."""
    world = World("sim:16xh100")
    connect(world.spec)
    for gpu in range(16):
        for number in range(3):
            add(world, gpu, f"job{gpu}-{number}", 10)

    async def script(screen: Shown) -> None:
        assert all(len(line) == size[0] for line in screen.text.splitlines())
        hidden = 48 - screen.app._jobs.room
        assert (f"↓{hidden}" in screen.line("JOB")) is (hidden > 0)
        await screen.press("end")
        assert (f"↑{hidden}" in screen.line("JOB")) is (hidden > 0)
        assert screen.app._jobs.cursor == 47
        assert screen.app.chosen.job.command is not None
        assert screen.app.chosen.job.command in screen.text
        await screen.press("pageup", "home")
        assert screen.app._jobs.cursor == 0

    show(world, script, size=size)


def test_without_a_gpu_or_a_driver(show: Show, world: World) -> None:
    """What is wrong is on the screen, with the way out; it goes on when the host answers."""
    world.fault("no-driver")

    async def script(screen: Shown) -> None:
        assert "the NVIDIA driver is not loaded" in screen.text
        assert "modprobe" in screen.text
        await screen.press("s", "enter", "t", "tab", "enter", "escape")
        world.clear()
        await screen.look()
        assert "H200" in screen.text
        world.fault("no-driver")
        screen.watch.reader._host.nvml.restart()
        await screen.look()
        # Old values stay, and the reason is told.
        assert "H200" in screen.text
        assert "the NVIDIA driver is not loaded" in screen.text

    show(world, script)


def test_another_users_job_needs_root(show: Show, world: World) -> None:
    pid = add(world, 0, "train", 9, user="bob")
    world.fault("user", "carol")

    async def script(screen: Shown) -> None:
        await screen.press("s")
        assert "belongs to bob" in screen.text
        assert f"as root: sudo gpushare stop {pid}" in screen.text
        await screen.press("escape")
        assert pid in world.pids()

    show(world, script)


def test_help_findings_themes_and_the_mouse(show: Show) -> None:
    world = World("sim:2xh100")
    world.fault("persistence-off", gpu=0)
    first, second = add(world, 0, "one", 2), add(world, 1, "two", 4)

    async def script(screen: Shown) -> None:
        pilot = screen.pilot
        assert pilot is not None
        await screen.press("question_mark")
        assert "Act on the job" in screen.text
        await screen.press("escape")
        await screen.app._ask_doctor()
        assert "finding" in screen.text.splitlines()[0]
        await screen.press("D")
        assert "nvidia-persistenced" in screen.text
        await screen.press("escape", "T")
        assert screen.app.colours.name == "light"
        await screen.press("plus", "minus", "space")
        assert "held" in screen.text
        await screen.press("space")
        head = screen.text.splitlines().index(screen.line("JOB"))
        await pilot.click(offset=(3, head + 2))
        await pilot.pause()
        assert screen.app.chosen.job.pid == first
        await pilot.click(offset=(screen.line("JOB").index("PID"), head))
        await pilot.pause()
        assert screen.app.view.sort == "pid"
        assert [row.job.pid for row in screen.app._rows] == [first, second]
        await pilot.click(offset=(2, 39))
        await pilot.pause()
        assert "Act on the job" in screen.text
        await screen.press("escape", "q")
        assert screen.app._exit

    show(world, script)


def test_the_screen_goes_on_while_a_gpu_hangs(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old values stay, their age is told, and every key answers."""
    world = World("sim:2xh100")
    first, second = add(world, 0, "one", 2), add(world, 1, "two", 4)

    async def script(screen: Shown) -> None:
        began = time.monotonic() - 17
        monkeypatch.setattr(screen.watch, "_began", began)
        screen.app._tick()
        await screen.press("I")
        assert "no answer for 17 s: old values" in screen.text
        assert [row.job.pid for row in screen.app._rows] == [first, second]
        monkeypatch.setattr(screen.watch, "_began", None)
        screen.app._tick()
        await screen.press("I")
        assert "old values" not in screen.text

    show(world, script)


def test_processes_of_a_job_and_the_line_of_waiting_ones(show: Show, world: World) -> None:
    """The tree has the processes of each job; who waits stands below, with place and reason."""
    root = add(world, 0, "train", 9)
    child = add(world, 0, "worker", 1, parent_pid=root)
    line = LinePlace(place=1, memory_bytes=48 * GIB, behind=("eval",), held_by=("train",))
    waiting = ListedJob(name="big", pid=77, state="waiting", user="dave", role="plain", device=None, since_seconds=60, line=line)  # fmt: skip

    async def script(screen: Shown) -> None:
        await screen.press("t")
        await screen.look()
        frame = screen.app.frame
        assert frame is not None
        assert f"└ {'worker':<10}" in screen.text
        assert [row.member.pid for row in screen.app._rows if row.member is not None] == [child]
        for second in (1, 2):
            screen.app.take(replace(frame, at=frame.at + second, jobs=(*frame.jobs, waiting)))
        await screen.press("t")
        assert "waits #1" in screen.line("big")
        assert "for 48.0G; behind eval; held by train" in screen.line("big ")
        assert "big waits for room, place 1" in screen.text.splitlines()[-2]

    show(world, script, size=(160, 40))


def test_a_plan_that_is_longer_than_the_screen_is_scrolled(show: Show) -> None:
    async def script(screen: Shown) -> None:
        screen.app.push_screen(Question("go?", [(f"line {number}", "text") for number in range(60)], THEMES["dark"]))
        await screen.press("end")
        assert "line 59" in screen.text
        assert "y does it" in screen.text
        assert "line 1 " not in screen.text

    show(World("sim:h200"), script, size=(80, 24))


def test_a_dialog_fits_a_terminal_that_was_made_smaller(show: Show, world: World) -> None:
    """Its last line can be reached, and what was chosen in it stays chosen."""
    pid = add(world, 0, "train", 9, command_line=["train", *("--option" for _ in range(60))])

    async def script(screen: Shown) -> None:
        assert screen.pilot is not None
        await screen.press("question_mark")
        await screen.pilot.resize_terminal(60, 20)
        await screen.press("end")
        assert "quit" in screen.text.splitlines()[-5]
        assert "Esc closes" in screen.text
        await screen.press("escape")
        await screen.pilot.resize_terminal(120, 40)
        await screen.press("enter", "down", "down")
        await screen.pilot.resize_terminal(60, 20)
        await screen.pilot.pause()
        assert "r  resume it" in screen.text
        await screen.press("enter")
        assert screen.ran[-1] == ["resume", str(pid), "-n"]

    show(world, script)


def test_without_colours(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone tell what is held, reserved and free, and where the cursor is."""
    monkeypatch.setenv("NO_COLOR", "1")
    world = World("sim:h200")
    add(world, 0, "train", 70)

    async def script(screen: Shown) -> None:
        assert "▇" in screen.line("H200")
        assert "·" in screen.line("H200")
        styles = [segment.style for line in screen.app.screen._compositor.render_strips() for segment in line]
        assert any(style is not None and style.reverse for style in styles)
        # A dialog has a frame.
        await screen.press("enter")
        assert [screen.text.count(corner) for corner in "┌┐└┘"] == [1, 1, 1, 1]

    show(world, script, theme="plain")


def test_dialogs_that_are_closed_take_no_memory(show: Show, world: World) -> None:
    """Textual keeps the cache of a widget that is gone."""
    add(world, 0, "train", 9)

    def drawn() -> int:
        gc.collect()
        return sum(type(thing) is Strip for thing in gc.get_objects())

    async def script(screen: Shown) -> None:
        async def opened(times: int) -> None:
            for _ in range(times):
                await screen.press("question_mark", "escape", "enter", "escape", "slash", "escape")

        await opened(2)
        before = drawn()
        await opened(4)
        assert drawn() - before < 200

    show(world, script)


def recording_of(world: World, file: Path, interval: float = 60.0) -> Samples:
    """Return 20 samples of a host."""
    clock = Ticks()
    header = header_for(world.host, None, interval, clock)
    with RecordingFile(file, header) as recording:
        observe(world.host, header, recording, seconds=20 * interval, clock=clock)
    return Samples(file)


def test_a_recording_shows_what_it_has_and_no_more(show: Show, tmp_path: Path) -> None:
    """MIG devices with their names and load, the power beside its limit; of a daemon of MPS only its clients are known."""
    world = World("sim:3xh100")
    world.run("mps", "start", "-g", "0", "--threads", "50", "--memory", "20G")
    client = world.client(0, name="serve", memory_bytes=11 * GIB)
    world.mig("3g.40gb", "1g.10gb", gpu="1")
    instance = world.devices()[0][1]
    world.run("mig", "name", "alice", instance)
    tenant = add(world, 1, "tenant", 4, mig=instance)
    add(world, 2, "train", 3)
    replay = Replay(recording_of(world, tmp_path / "day.jsonl"))

    async def script(screen: Shown) -> None:
        assert "MPS 1" in screen.line("  0 ")
        assert "MIG 2" in screen.line("  1 ")
        assert "time-slicing" in screen.line("  2 ")
        assert "MPS - -  -  1/- clients  threads -  memory -" in screen.text
        # The load of the instance and not of the GPU; the other one is free.
        assert "50%" in screen.line("3g.40gb")
        assert "4.0/39.5G" in screen.line("3g.40gb")
        assert "alice  tenant" in screen.line("3g.40gb")
        assert "0%" in screen.line("1g.10gb")
        assert "free" in screen.line("1g.10gb")
        rows = {row.job.pid: row.job for row in screen.app._rows}
        assert rows[client].sm_percent is None
        assert rows[client].way == "mps"
        server = next(job for job in rows.values() if job.command == MPS_SERVER)
        assert (server.way, server.sm_percent) == ("mps", 25)
        assert (rows[tenant].mig_name, rows[tenant].mig_profile) == ("alice", "3g.40gb")
        await screen.press("tab", "enter")
        assert "serve            threads 50 %  memory 20.0 GiB" in screen.text
        assert "of 700 W" in screen.text
        assert "compute mode -" in screen.text
        assert "GPU 0 power" in screen.text

    show(world, script, size=(160, 50), reader=replay)


def test_keys_that_a_recording_has_no_answer_to_say_so(show: Show, tmp_path: Path, world: World) -> None:
    add(world, 0, "train", 9)
    replay = Replay(recording_of(world, tmp_path / "day.jsonl", interval=10.0))

    async def script(screen: Shown) -> None:
        for key, word in (("L", "output of jobs"), ("t", "trees of processes"), ("z", "jobs that have ended")):
            await screen.press(key)
            assert f"a recording has no {word}" in screen.text
        await screen.press("D")
        assert "a recording has no findings" in screen.text
        # One sample every second of what was taken every ten.
        await screen.press("escape", "minus")
        assert "plays 5 times as fast as it was recorded" in screen.text
        await screen.press("plus", "plus")
        assert "plays 20 times as fast as it was recorded" in screen.text
        footer = screen.text.splitlines()[-1]
        assert ("Space hold" in footer, "stop" in footer) == (True, False)

    show(world, script, reader=replay)


def test_a_recording_is_shown_and_its_time_moved(show: Show, tmp_path: Path) -> None:
    """Yesterday can be scrolled, and not acted on."""
    world = World("sim:2xh100")
    pid = add(world, 0, "train", 9, user="bob")
    replay = Replay(recording_of(world, tmp_path / "day.jsonl"))

    async def script(screen: Shown) -> None:
        assert "recorded, 5 %" in screen.text
        # Whether it was paused is not recorded.
        assert screen.line(str(pid)).split()[:4] == ["train", str(pid), "-", "bob"]
        assert "time-slicing" in screen.line("H100")
        assert "W " in screen.line("H100")
        first = screen.app.frame
        await screen.press("right_curly_bracket")
        assert "recorded, 30 %" in screen.text
        assert screen.app.frame.at - first.at == pytest.approx(300)
        await screen.press("left_curly_bracket", "left_square_bracket")
        assert "recorded, 5 %" in screen.text
        await screen.press("s")
        assert "a recording cannot be acted on" in screen.text
        await screen.press("L", "space")
        assert "held" in screen.text

    show(world, script, reader=replay)


def test_a_job_that_has_ended_meanwhile_is_not_confused_with_another(
    show: Show, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Its PID may be another process's by the time of the answer."""
    pid = add(world, 0, "train", 9)

    async def script(screen: Shown) -> None:
        await screen.press("s")
        monkeypatch.setattr("gpushare.top.frame.Reader.identity", lambda _self, number: (number, 1))
        await screen.press("y")
        assert "has ended meanwhile" in screen.text
        assert pid in world.pids()
        assert [words[-1] for words in screen.ran] == ["-n"]

    show(world, script)


def test_every_key_does_what_it_is_bound_to(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of other monitors too, and those of dialogs; no key ends in an error."""
    world = World("sim:2xh100")
    add(world, 0, "train", 9)
    ran: list[str] = []
    run_action = Cockpit.run_action

    async def recorded(app: Cockpit, action: Any, *more: Any) -> bool:
        ran.append(str(action) if isinstance(action, str) else action[1])
        return await run_action(app, action, *more)

    monkeypatch.setattr(Cockpit, "run_action", recorded)

    async def pressed(screen: Shown, bindings: list[BindingType], opened: str | None) -> list[str]:
        wrong = []
        for binding in bindings:
            assert isinstance(binding, Binding)
            for key in binding.key.split(","):
                while len(screen.app.screen_stack) > 1:
                    await screen.press("escape")
                if opened is not None:
                    await screen.press(opened)
                ran.clear()
                await screen.press(key)
                if binding.action not in ran:
                    wrong.append(f"{key}: {binding.action}, ran {ran}")
        return wrong

    async def script(screen: Shown) -> None:
        bindings = [key for key in Cockpit.BINDINGS if isinstance(key, Binding) and key.action != "quit"]
        with monkeypatch.context() as patch:
            # What an action does is another test's.
            patch.setattr(Cockpit, "_begin_action", lambda *_: None)
            assert await pressed(screen, [*bindings], None) == []
        assert await pressed(screen, Dialog.BINDINGS, "question_mark") == []
        assert await pressed(screen, Question.BINDINGS, "p") == []
        assert await pressed(screen, Choice.BINDINGS, "o") == []

    show(world, script, size=(80, 24))


def test_a_confirmed_action_is_not_ended_by_another_key(show: Show, world: World) -> None:
    """A move or a swap may take minutes: what is pressed meanwhile must not end it."""
    pid = add(world, 0, "train", 9)

    async def script(screen: Shown) -> None:
        inner, go_on, ended = screen.app._answer, asyncio.Event(), []

        async def slow(words: Sequence[str]) -> dict[str, Any]:
            if "-n" not in words and words[0] == "stop":
                try:
                    await go_on.wait()
                finally:
                    ended.append(go_on.is_set())
            return await inner(words)

        screen.app._answer = slow  # type: ignore[method-assign]
        await screen.press("s", "y")
        await screen.press("p")
        assert f"still at work: gpushare stop {pid}" in screen.text
        await screen.press("e", "escape", "r")
        assert (pid in world.pids(), ended) == (True, [])
        go_on.set()
        await screen.pilot.pause(0.1)  # type: ignore[union-attr]
        assert (pid in world.pids(), ended) == (False, [True])

    show(world, script)
