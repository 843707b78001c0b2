"""The real nvidia-cuda-mps-control: its daemon starts and answers on a machine without a GPU (up to driver 550)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpushare.connect import connect
from gpushare.host.host import Host
from gpushare.host.process import Processes
from gpushare.host.program import Completed, Programs
from gpushare.mps.control import PROGRAM, MpsControl, start_environment
from tests.cli.drive import until

PATH_VARIABLE = "GPUSHARE_TEST_MPS_CONTROL"
REQUIRE_VARIABLE = "GPUSHARE_REQUIRE_REAL_DAEMON"
PATIENCE_SECONDS = 120.0
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.real_daemon)


def daemons_below(directory: Path) -> list[int]:
    """Return the PIDs of the live MPS daemons whose pipe directory lies below a directory (``/proc``, not our own code)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if f"CUDA_MPS_PIPE_DIRECTORY={directory}/".encode() not in (entry / "environ").read_bytes():
                continue
            if (entry / "exe").resolve().name == PROGRAM and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.fixture
def real_program() -> str:
    """Return the path of the real program; without one the test is skipped, or fails where it is required."""
    path = os.environ.get(PATH_VARIABLE, "")
    if path and os.access(path, os.X_OK):
        return path
    reason = f"{path} is no program" if path else f"{PATH_VARIABLE} does not name the real {PROGRAM}"
    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(f"{reason}, and {REQUIRE_VARIABLE}=1")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def real_control(sim_dir: Path, real_program: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let everything use the real program, see only this test's daemons, and leave none of them behind."""
    monkeypatch.setenv("GPUSHARE_MPS_CONTROL", real_program)
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)
    everybody = Processes.pids_of_program

    def mine(self: Processes, name: str) -> Sequence[int]:
        below = set(daemons_below(sim_dir))
        return [pid for pid in everybody(self, name) if name != PROGRAM or pid in below]

    # Other daemons of this machine, and those of tests that run beside this one, are none of its business.
    monkeypatch.setattr(Processes, "pids_of_program", mine)
    # The real one answers when the machine lets it; what hangs for good is given up by who tests that.
    monkeypatch.setitem(MpsControl.ask.__kwdefaults__, "timeout", PATIENCE_SECONDS)
    monkeypatch.setattr("gpushare.mps.start._ANSWER_SECONDS", PATIENCE_SECONDS)
    yield real_program
    for pid in daemons_below(sim_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not daemons_below(sim_dir), "its daemons have ended")


@pytest.fixture
def host(real_control: str) -> Host:
    """Return a simulated host with one H200 whose nvidia-cuda-mps-control is the real one."""
    assert real_control
    return connect("sim:h200")


def start_by_hand(pipe: Path, log: Path, visible: str = "GPU-0") -> Completed:
    """Start a daemon as somebody who does not use gpushare would."""
    pipe.mkdir(parents=True, exist_ok=True)
    log.mkdir(parents=True, exist_ok=True)
    return Programs().run(
        [PROGRAM, "-d"], env=start_environment(visible, str(pipe), str(log)), timeout=PATIENCE_SECONDS
    )


@pytest.fixture
def control(sim_dir: Path, real_control: str) -> MpsControl:
    """Return the conversation with a daemon that was started by hand, and answers."""
    assert real_control
    pipe = sim_dir / "hand" / "pipe"
    assert start_by_hand(pipe, sim_dir / "hand" / "log").exit_code == 0
    conversation = MpsControl(Programs(), str(pipe))
    until(conversation.answers, "the daemon answers")
    return conversation
