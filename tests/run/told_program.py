"""A program on a GPU that does what a test says, and notes in order what is done to whom."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from gpushare.base.errors import GpushareError, NotFound
from gpushare.base.model import GpuProcess
from gpushare.host.identity import Identity
from gpushare.run.pause import Pauser

PID, CHILD, GRANDCHILD, OTHER = 10, 11, 12, 99


class Told:
    """A host that does what a test says, and notes in order what is done to whom."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.family = {PID: [PID, CHILD]}
        self.on_gpu: list[GpuProcess] | GpushareError | None = [GpuProcess(pid=PID, compute=True)]
        self.stopped: set[int] = set()
        self.dead: set[int] = set()
        # Of those that did not start at 5.
        self.starts: dict[int, int] = {}
        self.fails: dict[tuple[str, int], GpushareError] = {}
        self.host: Any = SimpleNamespace(
            processes=SimpleNamespace(
                descendants=lambda pid: self.family.get(pid, []),
                describe=self._describe,
                identity=self._identity,
                alive=lambda pid: pid not in self.dead,
                send_to=self._send_to,
                namespace_is_host=lambda: True,
            ),
            nvml=SimpleNamespace(processes=self._processes),
        )
        self.device: Any = SimpleNamespace(gpu=SimpleNamespace(index=1, uuid="GPU-a"))

    def _describe(self, pid: int) -> Any:
        started = self.starts.get(pid, 5)
        return None if pid in self.dead else SimpleNamespace(stopped=pid in self.stopped, started=started)

    def _identity(self, pid: int) -> Identity | None:
        return None if pid in self.dead else Identity(pid, self.starts.get(pid, 5))

    def _send_to(self, pid: int, started: int, number: int) -> None:
        if started != self.starts.get(pid, 5):
            raise NotFound("gone", "look")
        self._do(signal.Signals(number).name, pid)

    def _processes(self, index: int) -> list[GpuProcess] | None:
        assert index == 1
        if isinstance(self.on_gpu, GpushareError):
            raise self.on_gpu
        return self.on_gpu

    def _do(self, action: str, pid: int) -> None:
        self.done.append((action, pid))
        if (action, pid) in self.fails:
            raise self.fails[action, pid]

    def pauser(self) -> Pauser:
        """Return what pauses the program."""
        return Pauser(self.host, (self.device.gpu.index,), PID)

    def since(self) -> list[tuple[str, int]]:
        """Return what was done since the last call."""
        done, self.done = self.done, []
        return done
