"""Starting and ending a simulated MPS control daemon: its files, its refusals, its entry in the state."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from gpushare.sim import clients, mps_texts
from gpushare.sim.devices import daemon_devices, split
from gpushare.sim.mps_logs import CONTROL, SERVER, LogLine
from gpushare.sim.mps_servers import binary_version, driver_major
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState, now

PID_FILE = "nvidia-cuda-mps-control.pid"
# <dir>/control_privileged and its NUL must fit the 108 bytes of sun_path.
MAX_PIPE_DIRECTORY = 87
_CUDA_ERROR_NO_DEVICE = 100
_NO_LIBCUDA = 244


def start(
    state: SimulatedHostState, env: Mapping[str, str], *, static: bool = False
) -> tuple[SimulatedDaemon | None, int, str, list[LogLine]]:
    """Start a daemon as ``nvidia-cuda-mps-control -d`` does.

    Returns the daemon or None, the exit code, what goes to stdout, and the log lines.
    """
    if driver_major(state.driver) >= 580:
        if not state.nvml_installed:
            return None, _NO_LIBCUDA, "", []
        if not state.driver_loaded:
            return None, _CUDA_ERROR_NO_DEVICE, "", []
    pipe = env.get("CUDA_MPS_PIPE_DIRECTORY") or clients.DEFAULT_PIPE_DIRECTORY
    daemon = _new(state, env, pipe, static=static)
    warning = "" if _open_logs(daemon.log_directory) else mps_texts.NO_LOGS.format(daemon.log_directory)
    error = _open_pipe(state, pipe)
    if error is not None:
        # An error goes to the logs too, and those say once more that they are not there.
        return None, 1, warning + error + (warning if error else ""), []
    if driver_major(state.driver) >= 580 and not daemon_devices(state, daemon):
        return None, _CUDA_ERROR_NO_DEVICE, "", []
    state.daemons.append(daemon)
    if driver_major(state.driver) >= 550 and not _real(pipe):
        _write(os.path.join(pipe, PID_FILE), str(daemon.pid), 0o666)
    return daemon, 0, warning, [] if warning else _first_lines(state, daemon)


def ended(state: SimulatedHostState, daemon: SimulatedDaemon, *, cleanly: bool) -> None:
    """Remove a daemon. One that quits removes its log fifo and PID file; a killed one leaves every file."""
    clients.drop_daemon(state, daemon)
    if not cleanly or _real(daemon.pipe_directory):
        return
    for name in ("log", PID_FILE):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(daemon.pipe_directory, name))


def _new(state: SimulatedHostState, env: Mapping[str, str], pipe: str, *, static: bool) -> SimulatedDaemon:
    daemon = SimulatedDaemon(
        pid=state.new_pid(),
        uid=state.uid,
        pipe_directory=pipe,
        log_directory=env.get("CUDA_MPS_LOG_DIRECTORY") or clients.DEFAULT_LOG_DIRECTORY,
        visible=split(env.get("CUDA_VISIBLE_DEVICES")),
        started_at=now(),
        environment={key: value for key, value in env.items() if key.startswith(("CUDA_", "GPUSHARE_"))},
        static=static,
    )
    threads = _number(env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))
    # One out of range is accepted: the default stays 100, with a line in control.log only.
    if threads is not None and 0.0 < threads <= 100.0:
        daemon.threads = threads
    if env.get("CUDA_MPS_CLIENT_PRIORITY") in {"0", "1"}:
        daemon.priority = int(env["CUDA_MPS_CLIENT_PRIORITY"])
    return daemon


def _open_pipe(state: SimulatedHostState, pipe: str) -> str | None:
    """Make the files of a pipe directory; return what the daemon says when it cannot, or None."""
    cannot = f"Cannot access CUDA_MPS_PIPE_DIRECTORY={pipe}\n"
    if not _real(pipe) and not _make_directory(pipe):
        return cannot
    if clients.daemon_of(state, {"CUDA_MPS_PIPE_DIRECTORY": pipe}) is not None:
        return mps_texts.RUNNING
    try:
        return None if _real(pipe) or _make_files(pipe) else ""
    except OSError:
        return cannot


def _open_logs(directory: str) -> bool:
    if _real(directory):
        return True
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        for name in (CONTROL, SERVER):
            with open(os.path.join(directory, name), "a", encoding="utf-8"):
                pass
    except OSError:
        return False
    return True


def _first_lines(state: SimulatedHostState, daemon: SimulatedDaemon) -> list[LogLine]:
    if _real(daemon.log_directory):
        return []
    pipe = daemon.pipe_directory
    texts = [
        f"Starting control daemon using socket {pipe}/control",
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}",
    ]
    if driver_major(state.driver) >= 580:
        texts.append(f"CUDA MPS Control binary version: {binary_version(state.driver)}")
    given = _number(daemon.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))
    if given is not None and not 0.0 < given <= 100.0:
        texts.append("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE should be between (0.0, 100.0]")
    return [LogLine(daemon.log_directory, CONTROL, "Control", daemon.pid, text) for text in texts]


def _real(directory: str) -> bool:
    """Return whether the machine's own MPS lives there (by default, or by a unit): no simulated file goes there.

    A socket in /tmp/nvidia-mps that nobody answers would break every real CUDA program of the machine.
    """
    ours = ("/run/gpushare-mps/", "/var/log/gpushare-mps/")
    return directory in {clients.DEFAULT_PIPE_DIRECTORY, clients.DEFAULT_LOG_DIRECTORY} or directory.startswith(ours)


def _make_directory(pipe: str) -> bool:
    """Make the last element of the path, 0777 without a sticky bit, as the daemon does; not its parents."""
    try:
        os.mkdir(pipe)
        os.chmod(pipe, 0o777)  # noqa: S103 - what the real daemon does
    except FileExistsError:
        return os.path.isdir(pipe)
    except OSError:
        return False
    return True


def _make_files(pipe: str) -> bool:
    """Make the lock, the fifo and the sockets; return False when the path is too long for the sockets."""
    _write(os.path.join(pipe, "control_lock"), "", 0o666)
    fifo = os.path.join(pipe, "log")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fifo)
    os.mkfifo(fifo)
    os.chmod(fifo, 0o777)  # noqa: S103 - what the real daemon does
    if len(os.fsencode(pipe)) > MAX_PIPE_DIRECTORY:
        return False
    for name, mode in (("control", 0o666), ("control_privileged", 0o755)):
        path = os.path.join(pipe, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
        os.chmod(path, mode)
    return True


def _write(path: str, text: str, mode: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
