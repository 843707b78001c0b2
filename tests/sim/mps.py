"""Driving the simulated nvidia-cuda-mps-control in tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpushare.host.program import Completed
from gpushare.sim import SimulatedHost, admin, open_simulated
from gpushare.sim.mps_control import main
from gpushare.sim.state import SimulatedHostState, SimulatedProcess


@dataclass
class Mps:
    """One simulated host with the directories of one daemon."""

    host: SimulatedHost
    pipe: Path
    log: Path

    @property
    def env(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    @property
    def state(self) -> SimulatedHostState:
        state = self.host.state_file.read()
        assert state is not None
        return state

    def run(self, *words: str, stdin: str = "", timeout: float = 0.2, **env: str) -> Completed:
        """Run the program with these arguments."""
        argv = ("nvidia-cuda-mps-control", *words)
        return main(argv, stdin, {**self.env, **env}, self.host.state_file, timeout)

    def ask(self, *commands: str, timeout: float = 0.2) -> str:
        """Return what the UI prints for these commands."""
        return self.run(stdin="".join(f"{command}\n" for command in commands), timeout=timeout).stdout

    def start(self, **env: str) -> int:
        """Start the daemon and return its PID."""
        done = self.run("-d", **env)
        assert (done.exit_code, done.stdout) == (0, ""), done
        return self.state.daemons[-1].pid

    def client(self, **options: object) -> SimulatedProcess:
        """Add a client and return it."""
        environment = {**self.env, **options.pop("environment", {})}  # type: ignore[dict-item]
        pid = admin.add_process(self.host.spec, mps=True, environment=environment, **options)  # type: ignore[arg-type]
        return self.process(pid)

    def process(self, pid: int) -> SimulatedProcess:
        """Return a process of the state."""
        return next(process for process in self.state.processes if process.pid == pid)

    def control_log(self) -> str:
        return (self.log / "control.log").read_text()

    def server_log(self) -> str:
        return (self.log / "server.log").read_text()


def new(directory: Path, spec: str = "sim:h200", driver: str | None = None) -> Mps:
    """Return a simulated host whose daemon would live below a directory."""
    host = open_simulated(spec)
    if driver is not None:
        admin.set_fault(spec, "driver", value=driver)
    return Mps(host, directory / "p", directory / "l")
