"""What `gpushare top` costs on a host of eight GPUs with 30 processes: CPU time, memory, and the time to its first frame.

``python -m benchmarks.top [--seconds 30] [--size 120x40]``. The GPUs are simulated, whose answers cost far more than
those of the real library: `--parts` tells how much of the time that is, and what a look and a drawing cost alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

SPEC = "sim:8xh100"
TICKS = os.sysconf("SC_CLK_TCK")
# The line of a job is on the screen.
FIRST_WORD = b"job-"


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


def usage(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and what it has in memory, in MiB."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def screen(size: tuple[int, int]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield `gpushare top` on a terminal of its own, and that terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gpushare", "--host", SPEC, "top"], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        # Nobody reads what it would still draw, and it would wait for that.
        process.kill()
        process.wait()
        os.close(ours)


def drained(terminal: int, until: float, word: bytes | None = None) -> int:
    """Read what is drawn until a time, or a word; return how many bytes that was."""
    count, tail = 0, b""
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            block = os.read(terminal, 1 << 16)
            count += len(block)
            tail = tail[-64:] + block
            if word is not None and word in tail:
                break
    return count


def measure(seconds: float, size: tuple[int, int]) -> None:
    """Print the cost of the whole program."""
    began = time.monotonic()
    with screen(size) as (process, terminal):
        drained(terminal, began + 30, FIRST_WORD)
        first, (first_cpu, _) = time.monotonic() - began, usage(process.pid)
        drained(terminal, time.monotonic() + 5)
        before, at = usage(process.pid)[0], time.monotonic()
        drawn = drained(terminal, at + seconds)
        after, memory = usage(process.pid)
        passed = time.monotonic() - at
    print(f"first frame    {first:6.2f} s, {first_cpu:.2f} s of CPU time")
    print(f"CPU            {100 * (after - before) / passed:6.1f} % of a core, simulated NVML included")
    print(f"memory         {memory:6.1f} MiB")
    print(f"to the screen  {drawn / passed / 1024:6.1f} KiB/s")


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    size = tuple(map(int, options.size.split("x")))
    with tempfile.TemporaryDirectory(prefix="gt", dir="/tmp") as directory:
        os.environ["GPUSHARE_SIM_DIR"] = directory
        busy_host()
        (parts if options.parts else lambda size: measure(options.seconds, size))((size[0], size[1]))


if __name__ == "__main__":
    main()
