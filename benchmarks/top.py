"""What `gpushare top` costs on a host of eight GPUs with 30 processes: CPU time, memory, and the time to its first frame.

``python -m benchmarks.top [--seconds 30] [--size 120x40]``. The GPUs are simulated, whose answers cost far more than
those of the real library: `--parts` tells how much of the time that is, and what a look and a drawing cost alone.
`--first 20` starts it so often, in turns with the smallest program of Textual.

``python -m benchmarks.top --beside nvitop``, on a machine with a GPU, lasts less than a minute: the same of the real
driver, then of nvitop (any command may stand there), with two programs on the first GPU; then it reads the screen of
`top`, and tells how often it showed what NVML answered in the same second. It needs Textual and nvitop in this Python,
and PyTorch or CuPy for the two programs, here or in another python3 of PATH; without them it measures the GPU as it is.
``--rehearse`` does the same on a simulated host. Without a network: wheels of ``pip download textual nvitop``.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SPEC = "sim:8xh100"
ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


def busy_host() -> None:
    """Put 30 processes on eight GPUs: MPS with six clients, MIG with three programs, and time-slicing."""
    from gpushare.base.units import GIB
    from gpushare.cli import main
    from gpushare.sim import admin
    from gpushare.sim.current import current
    from gpushare.sim.state import StateFile

    with contextlib.redirect_stdout(None):
        main(["--host", SPEC, "-q", "mps", "start", "-g", "0", "--threads", "50"])
        main(["--host", SPEC, "-q", "sim", "mig", "-g", "1", "3g.40gb", "1g.10gb", "1g.10gb"])
    pipe = current(StateFile(SPEC)).daemons[0].pipe_directory
    instances = [one.uuid for one in current(StateFile(SPEC)).gpus[1].mig]
    for number in range(6):
        admin.add_process(
            SPEC,
            "0",
            mps=True,
            environment={"CUDA_MPS_PIPE_DIRECTORY": pipe},
            name=f"job-{number}",
            memory_bytes=3 * GIB,
        )
    for number, uuid in enumerate(instances, 6):
        admin.add_process(SPEC, "1", mig=uuid, name=f"job-{number}", memory_bytes=5 * GIB)
    for number in range(9, 30):
        admin.add_process(SPEC, str(2 + number % 6), name=f"job-{number}", memory_bytes=7 * GIB, sm_percent=30)


class Usage(NamedTuple):
    """The CPU seconds of a process and of children that have ended, and its memory."""

    cpu: float
    children: float
    mib: float


def usage(pid: int) -> Usage:
    """Return what a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    user, system, child_user, child_system = map(int, fields[11:15])
    memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Usage((user + system) / TICKS, (child_user + child_system) / TICKS, memory)


def top_of(spec: str) -> list[str]:
    """Return the command that shows a host."""
    return [sys.executable, "-m", "gpushare", "--host", spec, "top"]


@contextlib.contextmanager
def screen(command: Sequence[str], size: tuple[int, int]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a program on a terminal of its own, and that terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def blocks(terminal: int, until: float) -> Iterator[bytes]:
    """Yield what is drawn until a time, or until the program closes its terminal."""
    while (left := until - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left)[0]:
            return
        try:
            yield os.read(terminal, 1 << 16)
        except OSError:
            return


def seconds_to(word: bytes, terminal: int, began: float) -> float | None:
    """Return after how many seconds a word is on the screen; None: it is not within 15 s."""
    tail = b""
    for block in blocks(terminal, began + 15):
        tail = tail[-64:] + block
        if word in tail:
            return time.monotonic() - began
    return None


def measure(name: str, command: Sequence[str], word: str, seconds: float, size: tuple[int, int]) -> None:
    """Print what a program costs; its first frame is the one with a word."""
    began = time.monotonic()
    with screen(command, size) as (process, terminal):
        first = seconds_to(word.encode(), terminal, began)
        begin = usage(process.pid)
        # What it does once at its start.
        for _ in blocks(terminal, time.monotonic() + 5):
            pass
        before, at = usage(process.pid), time.monotonic()
        drawn = sum(map(len, blocks(terminal, at + seconds)))
        time.sleep(max(0.0, at + seconds - time.monotonic()))
        after = usage(process.pid)
        passed = time.monotonic() - at
        ended = process.poll()
    if ended is not None:
        print(f"{name:<9} ended with exit code {ended}")
        return
    cpu = 100 * (after.cpu - before.cpu) / passed
    children = 100 * (after.children - before.children) / passed
    print(
        f"{name:<9} first frame {'-' if first is None else f'{first:.2f}'} s ({begin.cpu:.2f} s of CPU time)"
        f"  CPU {cpu:.1f} % of a core, its children {children:.1f} %  memory {after.mib:.1f} MiB"
        f"  to the screen {drawn / passed / 1024:.1f} KiB/s",
        flush=True,
    )


# The least that Textual draws.
SMALLEST = """
from textual.app import App
from textual.widgets import Static
class Smallest(App):
    def compose(self):
        yield Static("job-")
Smallest().run()
"""


def first_frames(rounds: int, size: tuple[int, int]) -> None:
    """Print the time to the first frame of `top` beside that of the smallest program of Textual, in turns."""
    programs = {"top": top_of(SPEC), "Textual": [sys.executable, "-c", SMALLEST]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, command in programs.items():
            began = time.monotonic()
            with screen(command, size) as (process, terminal):
                seconds = seconds_to(b"job-", terminal, began)
                times[name].append((seconds or float("inf"), usage(process.pid).cpu))
    for name, pairs in times.items():
        wall, cpu = ([pair[part] for pair in pairs] for part in (0, 1))
        print(
            f"{name:<9} first frame: best {min(wall):.2f} s, median {statistics.median(wall):.2f} s;"
            f" CPU time: best {min(cpu):.2f} s, median {statistics.median(cpu):.2f} s"
        )
    ratios = [ours[1] / theirs[1] for ours, theirs in zip(times["top"], times["Textual"], strict=True)]
    print(f"CPU time of top by that of Textual: median {statistics.median(ratios):.2f}")


class Cells:
    """The text on a terminal, of a program that places the cursor for each line that it draws, as Textual does."""

    _SEQUENCE = re.compile(r"\x1b(?:\[([?>=]?)([\d;]*)[ -/]*([@-~])|[()].|[=>78])|([^\x1b])")

    def __init__(self, size: tuple[int, int]) -> None:
        self.width, self.height = size
        self._cells = [[" "] * self.width for _ in range(self.height)]
        self._x = self._y = 0
        self._rest = b""

    def feed(self, block: bytes) -> None:
        """Take in what was drawn; half a sequence or character is kept for the next block."""
        data = self._rest + block
        start = data.rfind(b"\x1b")
        whole = start < 0 or self._SEQUENCE.match(data[start:].decode(errors="ignore")) is not None
        cut = len(data) if whole else start
        while cut and whole and len(data) - cut < 3 and not _is_text(data[:cut]):
            cut -= 1
        self._rest = data[cut:]
        for match in self._SEQUENCE.finditer(data[:cut].decode(errors="replace")):
            private, numbers, final, character = match.groups()
            if character is not None:
                self._put(character)
            elif final == "H" and not private:
                row, _, column = numbers.partition(";")
                self._y, self._x = int(row or 1) - 1, int(column or 1) - 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self._x = 0
        elif character == "\n":
            self._y += 1
        elif character >= " " and self._y < self.height and self._x < self.width:
            self._cells[self._y][self._x] = character
            self._x += 1

    @property
    def lines(self) -> list[str]:
        return ["".join(line) for line in self._cells]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class Answer(NamedTuple):
    """What NVML says of the first GPU at one moment, or what the screen shows of it; bytes by PID in ``processes``."""

    at: float
    util: float | None
    memory: float | None
    power: float | None
    temperature: float | None
    clock: float | None
    processes: dict[int, float | None]


def nvml_answer(pynvml: Any, handle: Any) -> Answer:
    """Ask NVML itself, not through gpushare."""

    def asked(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except pynvml.NVMLError:
            return None

    def memory() -> int:
        # Without what the driver reserves for itself, as nvidia-smi shows it.
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)

    power = asked(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    return Answer(
        at=time.monotonic(),
        util=asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        memory=asked(memory),
        power=None if power is None else power / 1000,
        temperature=asked(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        clock=asked(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        processes={
            process.pid: process.usedGpuMemory
            for process in asked(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        },
    )


UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}


def size_of(text: str, unit: str = "") -> float | None:
    """Return a size of the screen in bytes: ``31.2G``."""
    match = re.fullmatch(r"([\d.]+)([MGT]?)", text.strip())
    return float(match[1]) * UNITS[match[2] or unit] if match else None


def shown_answer(lines: Sequence[str], at: float) -> Answer | None:
    """Return what a screen of `top` shows of GPU 0 and of all processes; None: nothing yet."""
    gpu = next((line for line in lines if line.startswith("  0 ")), "")
    head = next((number for number, line in enumerate(lines) if " PID " in line and "MEM" in line), None)
    sizes = re.search(r"([\d.]+)([MGT]?)/([\d.]+)([MGT]) ", gpu)
    if head is None or sizes is None:
        return None

    def number(pattern: str) -> float | None:
        match = re.search(pattern, gpu)
        return float(match[1]) if match else None

    pid_end, memory_end = (re.search(title, lines[head]).end() for title in ("PID[▼▲]?", "MEM[▼▲]?"))  # type: ignore[union-attr]
    processes = {}
    for line in lines[head + 1 :]:
        if (pid := line[pid_end - 7 : pid_end].strip()).isdigit():
            processes[int(pid)] = size_of(line[memory_end - 6 : memory_end])
    return Answer(
        at=at,
        util=number(r"(\d+)% "),
        memory=size_of(sizes[1] + sizes[2], sizes[4]),
        power=number(r"(\d+)W "),
        temperature=number(r"(\d+)° "),
        clock=number(r"(\d+)MHz "),
        processes=processes,
    )


def agreements(shown: Answer, near: Sequence[Answer]) -> dict[str, bool | None]:
    """Return by value whether the screen shows something between the least and the most of answers, but for rounding.

    None: NVML does not answer that.
    """

    def between(value: float | None, answers: Sequence[float | None], rounding: float) -> bool | None:
        numbers = [answer for answer in answers if answer is not None]
        if not numbers:
            return None
        return value is not None and min(numbers) - rounding <= value <= max(numbers) + rounding

    def rounding(value: float | None) -> float:
        return 2**20 if value is None or value < 2**30 else 0.051 * 2**30 if value < 100 * 2**30 else 0.51 * 2**30

    verdicts = {
        "utilization": between(shown.util, [answer.util for answer in near], 0),
        "memory": between(shown.memory, [answer.memory for answer in near], rounding(shown.memory)),
        "power": between(shown.power, [answer.power for answer in near], 0.51),
        "temperature": between(shown.temperature, [answer.temperature for answer in near], 0),
        "SM clock": between(shown.clock, [answer.clock for answer in near], 0),
        "processes": any(shown.processes.keys() == answer.processes.keys() for answer in near),
    }
    held = [
        between(size, [answer.processes.get(pid) for answer in near], rounding(size))
        for pid, size in shown.processes.items()
    ]
    verdicts["memory of processes"] = None if all(verdict is None for verdict in held) else False not in held
    return verdicts


class Witness:
    """Asks NVML ten times a second, in a thread, while top is on a screen."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self.answers: list[Answer] = []
        self._ended = threading.Event()

    def __enter__(self) -> Witness:
        self._nvml.nvmlInit()
        handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

        def ask() -> None:
            while not self._ended.wait(0.1):
                self.answers.append(nvml_answer(self._nvml, handle))

        threading.Thread(target=ask, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def near(self, shown: Answer) -> list[Answer]:
        """Return the answers of the second before a frame was drawn."""
        return [answer for answer in self.answers if shown.at - 1.0 <= answer.at <= shown.at]


def frames_of_top(spec: str, seconds: float, change: Callable[[], None]) -> list[Answer]:
    """Return what the screen of top shows, once for each look; ``change`` is called in the middle."""
    size, frames, clock = (200, 50), list[Answer](), ""
    cells, timer = Cells(size), threading.Timer(seconds / 2, change)
    timer.start()
    with screen(top_of(spec), size) as (_, terminal):
        for block in blocks(terminal, time.monotonic() + seconds):
            cells.feed(block)
            lines = cells.lines
            # The title ends with the time of the look; nothing more is drawn of it.
            if lines[0][-10:] != clock and not select.select([terminal], [], [], 0.05)[0]:
                clock = lines[0][-10:]
                shown = shown_answer(lines, time.monotonic())
                frames += [] if shown is None else [shown]
    timer.cancel()
    return frames


def compare(spec: str, seconds: float, change: Callable[[], None]) -> None:
    """Print how often `top` shows what NVML answers in the same second."""
    with Witness() as witness:
        frames = frames_of_top(spec, seconds, change)
    counts: dict[str, list[bool | None]] = {}
    differs: dict[str, Answer] = {}
    for shown in frames:
        for name, verdict in agreements(shown, witness.near(shown)).items():
            counts.setdefault(name, []).append(verdict)
            if verdict is False:
                differs[name] = shown
    print(f"{len(frames)} frames of top, each beside what NVML answered in the second before, every 0.1 s:")
    for name, verdicts in counts.items():
        told = len(verdicts) - verdicts.count(None)
        print(f"  {name:<20} " + (f"agrees in {verdicts.count(True)} of {told}" if told else "NVML does not tell it"))
    for name, shown in differs.items():
        near = witness.near(shown)
        print(f"  the last that differs, {name}: shown {shown}; answered {near[0]} to {near[-1]}" if near else name)


def workloads() -> list[subprocess.Popen[bytes]]:
    """Start two programs on the GPU, one small; none: there is neither PyTorch nor CuPy."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0"}

    def started(python: str, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [python, "-m", "gpushare.measure.workload", *options],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    others = [shutil.which("python3", path=folder) for folder in os.environ["PATH"].split(":")]
    for python in dict.fromkeys([sys.executable, *filter(None, others)]):
        if started(python, "--probe").wait() == 0:
            return [started(python, "--size", size) for size in ("4096", "512")]
    return []


def beside(other: str, seconds: float, size: tuple[int, int], *, rehearse: bool) -> None:
    """Measure `top` and another monitor one after the other, and hold what `top` shows against NVML."""
    if rehearse:
        import pynvml

        from gpushare.connect import connect
        from gpushare.sim import admin
        from gpushare.sim.library import SimulatedLibrary
        from gpushare.sim.state import StateFile

        connect(SPEC)
        pynvml.nvmlLib = SimulatedLibrary(StateFile(SPEC))
        pids = [admin.add_process(SPEC, "0", name="big", memory_bytes=9 << 30, sm_percent=60)]
        pids.append(admin.add_process(SPEC, "0", name="small", memory_bytes=1 << 30, sm_percent=20))
        spec, programs = SPEC, []
    else:
        spec, programs = "local", workloads()
        pids = [program.pid for program in programs]
        if not programs:
            print("neither PyTorch nor CuPy: the GPU as it is")
        time.sleep(8 if programs else 0)
    word = str(pids[0]) if pids else "MHz"

    def change() -> None:
        if rehearse:
            admin.end_process(SPEC, pids[1])
        elif programs:
            programs[1].kill()

    try:
        measure("top", top_of(spec), word, seconds, size)
        program, *options = shlex.split(other)
        path = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if path is None:
            print(f"{program} is not installed")
        else:
            measure(program, [path, *options], word, seconds, size)
        compare(spec, seconds, change)
    finally:
        for program in programs:
            program.kill()
            program.wait()


def parts(size: tuple[int, int]) -> None:
    """Print what a look costs, how much of it is the simulation, and what a drawing costs."""
    from gpushare.connect import connect
    from gpushare.run.look import with_memory
    from gpushare.sim.library import SimulatedLibrary
    from gpushare.sim.state import StateFile
    from gpushare.top.frame import Reader
    from gpushare.top.screen import Cockpit
    from gpushare.top.watch import Watch

    spent, calls, depth = [0.0], [0], [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            depth[0] += 1
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.process_time() - began

        return call

    def library_call(*arguments: Any) -> Any:
        calls[0] += 1
        return library(*arguments)

    library = SimulatedLibrary._call
    SimulatedLibrary._call = counted(library_call)  # type: ignore[method-assign]
    # The state of the host is a file, which each question about a process reads.
    StateFile.read = counted(StateFile.read)  # type: ignore[method-assign]
    reader = Reader(connect(SPEC), with_memory)
    for _ in range(3):
        reader.read()
    rounds = 20
    spent[0], calls[0] = 0.0, 0
    began = time.process_time()
    for _ in range(rounds):
        frame = reader.read()
    whole = 1000 * (time.process_time() - began) / rounds
    simulated = 1000 * spent[0] / rounds
    print(
        f"a look     {whole:6.1f} ms of CPU time, of which {simulated:.1f} ms in the simulation ({calls[0] / rounds:.0f} calls of NVML)"
    )

    async def draw() -> float:
        watch = Watch(reader, 1.0)
        watch.latest = frame
        app = Cockpit(watch, lambda _words: asyncio.sleep(0, {}), examine=False)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            frames = [reader.read() for _ in range(rounds)]
            at = time.process_time()
            for one in frames:
                app.take(one)
                await asyncio.sleep(0.05)
            return 1000 * (time.process_time() - at) / rounds

    print(f"a drawing  {asyncio.run(draw()):6.1f} ms of CPU time at {size[0]}x{size[1]}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--beside", metavar="COMMAND")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    # As pip does when it installs it: in a fresh checkout, a start would compile gpushare for 0.2 s.
    compileall.compile_dir(ROOT / "gpushare", quiet=1)
    with tempfile.TemporaryDirectory(prefix="gt", dir="/tmp") as directory:
        if options.beside is None or options.rehearse:
            os.environ["GPUSHARE_SIM_DIR"] = directory
        if options.beside is not None:
            beside(options.beside, options.seconds or 8, (width, height), rehearse=options.rehearse)
            return
        busy_host()
        if options.parts:
            parts((width, height))
        elif options.first:
            first_frames(options.first, (width, height))
        else:
            measure("top", top_of(SPEC), "job-", options.seconds or 30, (width, height))


if __name__ == "__main__":
    main()
