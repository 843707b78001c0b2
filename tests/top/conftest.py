"""Fixtures that show the cockpit on simulated hosts, without a terminal and without the thread that reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from textual.pilot import Pilot

from gpushare.run.look import with_memory
from gpushare.top.frame import Reader
from gpushare.top.screen import Cockpit
from gpushare.top.watch import Watch
from tests.cli.drive import World

Script = Callable[["Shown"], Awaitable[None]]


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
        assert self.pilot is not None
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
