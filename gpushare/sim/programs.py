"""The vendor's programs of a simulated host, run in this process: no child, so no start-up cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from gpushare.base.model import MPS_SERVER
from gpushare.host.program import (
    Completed,
    Listener,
    Pending,
    Programs,
    merged_environment,
    missing_program_error,
    timed_out_error,
)
from gpushare.sim.current import clock
from gpushare.sim.state import MPS_CONTROL, StateFile

SMI = "nvidia-smi"
TOOLKIT = "nvidia-ctk"
_POLL_SECONDS = 0.01


class _Deferred:
    """A simulated program that runs when its result is asked for."""

    def __init__(self, run: Callable[[], Completed]) -> None:
        self._run = run
        self._done: Completed | None = None

    def result(self) -> Completed:
        if self._done is None:
            self._done = self._run()
        return self._done


class SimulatedPrograms(Programs):
    """Stands in for `Programs` on a simulated host.

    With ``GPUSHARE_MPS_CONTROL`` set, nvidia-cuda-mps-control is the real program at that path: its
    daemon runs on this machine, next to the simulated GPUs.
    """

    def __init__(self, state_file: StateFile) -> None:
        self._state_file = state_file

    def find(self, name: str) -> str | None:
        """Return the path of a program; None: it is not installed."""
        if self._is_real(name):
            return Programs().find(name)
        # One package has both programs.
        package = MPS_CONTROL if name == MPS_SERVER else name
        return None if self._is_missing(package) else f"/usr/bin/{name}"

    def listener(self, pipe_directory: str) -> Listener | None:
        """Return the daemon that listens in a pipe directory; None: none does."""
        if self._is_real(MPS_CONTROL):
            return Programs().listener(pipe_directory)
        state = self._state_file.read()
        for daemon in () if state is None else state.daemons:
            if daemon.pipe_directory == pipe_directory:
                return Listener(daemon.pid, daemon.uid)
        return None

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 10.0,
    ) -> Pending:
        """Return the program to be run when its result is asked for; one that is missing raises at once."""
        name = os.path.basename(argv[0])
        if self._is_real(name):
            return Programs().start(argv, stdin=stdin, env=env, timeout=timeout)
        if self._is_missing(name):
            raise missing_program_error(name)
        environment = merged_environment(env)
        deadline = clock() + timeout
        return _Deferred(lambda: self._completed(argv, name, stdin, environment, deadline, timeout))

    def _completed(
        self, argv: Sequence[str], name: str, stdin: str, env: Mapping[str, str], deadline: float, timeout: float
    ) -> Completed:
        """Run a program, and return what it printed; one that hangs runs into the time limit."""
        while self._hangs(name):
            if clock() >= deadline:
                raise timed_out_error(argv, timeout)
            time.sleep(_POLL_SECONDS)
        if name == SMI:
            from gpushare.sim import smi

            return smi.main(argv, self._state_file)
        if name == TOOLKIT:
            from gpushare.sim import nvidia_ctk

            return nvidia_ctk.main(argv, self._state_file)
        from gpushare.sim import mps_control

        return mps_control.main(argv, stdin, env, self._state_file, timeout)

    def _hangs(self, name: str) -> bool:
        state = self._state_file.read()
        return state is not None and name in state.hanging_programs

    def _is_missing(self, name: str) -> bool:
        state = self._state_file.read()
        if name == TOOLKIT and (state is None or not state.toolkit_installed):
            return True
        return name not in {SMI, MPS_CONTROL, TOOLKIT} or (state is not None and name in state.missing_programs)

    @staticmethod
    def _is_real(name: str) -> bool:
        return name == MPS_CONTROL and bool(os.environ.get("GPUSHARE_MPS_CONTROL"))
