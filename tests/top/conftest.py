"""Fixtures that show the cockpit on simulated hosts, without a terminal and without the thread that reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from gpushare.base.model import GpuLease, GpuSensors, LinePlace, ListedJob
from gpushare.run.look import with_memory
from gpushare.top.frame import Frame, HostUse, Member, Reader
from gpushare.top.screen import Cockpit
from gpushare.top.watch import Watch
from tests.cli.drive import World
from tests.show.hosts import GIB, h100, mixed_host, uuid

Script = Callable[["Shown"], Awaitable[None]]


def full_frame(at: float = 0.0) -> Frame:
    """Return a frame with all that a host can have: each kind of GPU, and jobs in each state."""
    host = mixed_host()
    full = h100(
        8, memory_used_bytes=round(79.5 * GIB), utilization_percent=round(at) % 101, jobs_reserved_bytes=80 * GIB
    )
    half = h100(9, memory_used_bytes=20 * GIB, jobs_reserved_bytes=40 * GIB, utilization_percent=1, mig_capable=False)
    lease = GpuLease(gpu_uuid=uuid(9), uid=7, user="bob", seconds_left=5400, held_seconds=60)
    snapshot = replace(host, gpus=(*host.gpus, full, half), leases=(lease,), warnings=())
    hot = GpuSensors(
        power_watts=699.6, power_limit_watts=700.0, temperature_celsius=85, sm_clock_mhz=1980, sm_clock_max_mhz=1980,
        memory_clock_mhz=2619, fan_percent=0, encoder_percent=3, decoder_percent=0, pcie_received=12_345_678,
        pcie_sent=987_654_321, slowed_by=("power", "heat"),
    )  # fmt: skip
    warm = replace(hot, power_watts=0.0, temperature_celsius=84, slowed_by=())
    # fmt: off
    line = LinePlace(place=2, memory_bytes=None, behind=("a", "b", "c", "d"), held_by=("e",), count=2, stopped=True)
    given = {"user": "anna", "role": None, "device": "GPU 1", "gpu_indexes": (1,), "command": "python -m train", "way": "timeslice"}
    jobs = (
        ListedJob(**{**given, "name": "llama-finetune-for-all", "pid": 20411, "state": "running", "role": "production", "memory_used_bytes": 9 * GIB, "memory_limit_bytes": 5 * GIB, "device_uuids": (uuid(1), uuid(2)), "sm_percent": 38, "slice_us": 500, "since_seconds": 187.0}),
        ListedJob(**{**given, "name": None, "pid": 20977, "state": "running", "memory_used_bytes": 1200 * GIB, "sm_percent": 0, "gpu_indexes": (0, 1, 2), "since_seconds": 200_000.0}),
        ListedJob(**{**given, "name": "triton", "pid": 31002, "state": "running", "role": "plain", "way": "mig", "mig_profile": "2c.3g.40gb", "memory_used_bytes": 100 * GIB, "container": "triton-prod", "gpu_indexes": (2,)}),
        ListedJob(**{**given, "name": "serve", "pid": 40102, "state": "paused", "role": "opportunistic", "way": "mig+mps", "mig_name": "alice", "threads_percent": 12.5, "memory_used_bytes": GIB - 1, "memory_limit_bytes": GIB - 1}),
        ListedJob(**{**given, "name": "away", "pid": 5, "state": "out", "swapped_bytes": GIB, "memory_used_bytes": 0, "way": None}),
        ListedJob(**{**given, "name": "gone", "pid": 6, "state": "lost", "memory_used_bytes": 9 * GIB, "memory_limit_bytes": 9 * GIB, "way": "mps"}),
        ListedJob(**{**given, "name": "big", "pid": 77, "state": "waiting", "device": None, "line": line, "way": None}),
        ListedJob(**{**given, "name": "small", "pid": 78, "state": "waiting", "device": None, "line": replace(line, place=3, memory_bytes=GIB, held_by=(), count=1, stopped=False), "way": None}),
        ListedJob(**{**given, "name": "done", "pid": None, "state": "ended", "exit_code": 3, "ran_seconds": 4.0}),
        ListedJob(**{**given, "name": "good", "pid": None, "state": "ended", "exit_code": 0, "ran_seconds": 5.0}),
        ListedJob(**{**given, "name": "none", "pid": None, "state": "ended", "ran_seconds": 6.0, "command": None}),
    )
    # fmt: on
    tree = tuple(Member(pid=pid, depth=depth, name="worker", use=None) for pid, depth in ((8, 1), (9, 2), (10, 1)))
    return Frame(
        at=at,
        snapshot=snapshot,
        jobs=jobs,
        sensors={1: hot, 3: warm},
        sm={(1, None): 38.4, (2, 1): 100.0, (2, 11): 0.0, (3, None): 0.0},
        uses={20411: HostUse(cpu_percent=199.6, memory_bytes=2 * GIB), 20977: HostUse(cpu_percent=0.0, memory_bytes=1)},
        trees={20411: tree},
        cpu_percent=12.4,
        memory_used=100 * GIB,
        memory_total=1000 * GIB,
    )


class Shown:
    """A cockpit on a simulated host: what is pressed, what is on the screen, which verbs ran."""

    def __init__(self, world: World, theme: str = "dark", reader: Any = None) -> None:
        self.world = world
        self.ran: list[list[str]] = []
        self.output: list[str] = []
        reader = reader or Reader(world.host, with_memory)
        self.watch = Watch(reader, 1.0)
        self.watch.latest = reader.read()
        self.app = Cockpit(self.watch, self._answer, theme=theme, examine=False, follow=self._follow)
        self.pilot: Pilot[None] | None = None

    async def _answer(self, words: Sequence[str]) -> dict[str, Any]:
        self.ran.append(list(words))
        answer = self.world.asked(*words)
        return {**answer.json, "exit_code": answer.code}

    async def _follow(self, _job: str, add: Callable[[Sequence[str]], None]) -> None:
        add(self.output)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def look(self) -> None:
        """Read the host again, as the thread does each second."""
        assert self.pilot is not None
        self.app.take(self.watch.reader.read())
        await self.pilot.pause()

    @property
    def text(self) -> str:
        """Return the screen, dialogs included."""
        screen = self.app.screen
        return "\n".join("".join(segment.text for segment in line) for line in screen._compositor.render_strips())

    def line(self, word: str) -> str:
        """Return the first line of the screen with a word."""
        return next((line for line in self.text.splitlines() if word in line), "")


@pytest.fixture
def show() -> Callable[..., None]:
    """Return a function that shows the cockpit on a host and runs a script on it."""

    def run(world: World, script: Script, *, size: tuple[int, int] = (120, 40), **more: Any) -> None:
        async def shown() -> None:
            cockpit = Shown(world, **more)
            async with cockpit.app.run_test(size=size) as pilot:
                cockpit.pilot = pilot
                await pilot.pause()
                await script(cockpit)

        asyncio.run(shown())

    return run
