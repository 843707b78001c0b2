"""Starting and ending a simulated MPS control daemon: its files, its refusals, its entry in the state."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from gpushare.host.process import ticks_now
from gpushare.sim import clients
from gpushare.sim.devices import daemon_devices, split
from gpushare.sim.mps_servers import (
    CONTROL,
    DEFAULT_DIRECTORY,
    SERVER,
    LogLine,
    binary_version,
    control_line,
    parse_threads,
)
from gpushare.sim.state import SimulatedDaemon, SimulatedHostState

NO_DAEMON = "Cannot find MPS control daemon process\n"
# Of two conversations at once the daemon drops one, with this or in silence (seen on driver 580).
CANNOT_SEND = "Cannot send command to MPS control daemon process\n"
NO_LOGS = "Warning: Failed writing log files to directory [{}]. No logs will be available.\n"
RUNNING = "An instance of this daemon is already running\n"


def version(binary: int) -> str:
    """Return what ``-v`` prints (drivers 580 and up)."""
    return (
        f"CUDA MPS Control for Linux/Unix/QNX. Binary version: {binary}\n"
        "Copyright (C) 2003 - 2025 NVIDIA Corporation.\n\n"
    )


PID_FILE = "nvidia-cuda-mps-control.pid"
# <dir>/control_privileged and its NUL must fit the 108 bytes of sun_path.
MAX_PIPE_DIRECTORY = 87
_CUDA_ERROR_NO_DEVICE = 100
_NO_LIBCUDA = 244


def start(
    state: SimulatedHostState, env: Mapping[str, str], *, multiuser: bool = False
) -> tuple[int, str, list[LogLine]]:
    """Start a daemon as ``nvidia-cuda-mps-control -d`` does; return the exit code, what goes to stdout, and the log lines."""
    if state.branch >= 580:
        if not state.nvml_installed:
            return _NO_LIBCUDA, "", []
        if not state.driver_loaded:
            return _CUDA_ERROR_NO_DEVICE, "", []
    pipe = env.get("CUDA_MPS_PIPE_DIRECTORY") or clients.DEFAULT_PIPE_DIRECTORY
    if multiuser and not state.root:
        return 1, "Only root user may enable -multiuser-server!\n", []
    daemon = _new_daemon(state, env, pipe)
    daemon.multiuser = multiuser
    warning = "" if _open_logs(daemon.log_directory) else NO_LOGS.format(daemon.log_directory)
    error = _open_pipe(state, pipe)
    if error is not None:
        # An error goes to the logs too; missing logs are reported again.
        return 1, warning + error + (warning if error else ""), []
    if state.branch >= 580 and not daemon_devices(state, daemon):
        return _CUDA_ERROR_NO_DEVICE, "", []
    state.daemons.append(daemon)
    if state.branch >= 550 and not _of_real_mps(pipe):
        _write_file(os.path.join(pipe, PID_FILE), str(daemon.pid), 0o666)
    return 0, warning, [] if warning else _first_log_lines(state, daemon)


def remove_ended(state: SimulatedHostState, daemon: SimulatedDaemon, *, cleanly: bool) -> None:
    """Remove a daemon that has ended from the state of the host.

    If it quit (``cleanly``), its log fifo and PID file go too; a killed one leaves every file.
    """
    clients.drop_daemon(state, daemon)
    # A directory of the machine's own MPS contains no simulated file.
    if not cleanly or _of_real_mps(daemon.pipe_directory):
        return
    for name in ("log", PID_FILE):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(daemon.pipe_directory, name))


def _new_daemon(state: SimulatedHostState, env: Mapping[str, str], pipe: str) -> SimulatedDaemon:
    """Return a daemon with the settings that it takes from its environment."""
    daemon = SimulatedDaemon(
        pid=state.new_pid(),
        uid=state.uid,
        pipe_directory=pipe,
        log_directory=env.get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_DIRECTORY,
        visible=split(env.get("CUDA_VISIBLE_DEVICES")),
        started=ticks_now(),
        environment={key: value for key, value in env.items() if key.startswith(("CUDA_", "GPUSHARE_"))},
    )
    # One out of range is accepted: the default stays 100, with a line in control.log only.
    daemon.threads = parse_threads(env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")) or 100.0
    if env.get("CUDA_MPS_CLIENT_PRIORITY") in {"0", "1"}:
        daemon.priority = int(env["CUDA_MPS_CLIENT_PRIORITY"])
    return daemon


def _open_pipe(state: SimulatedHostState, pipe: str) -> str | None:
    """Make the files of a pipe directory; return what the daemon says when it cannot, or None."""
    if clients.daemon_of(state, {"CUDA_MPS_PIPE_DIRECTORY": pipe}) is not None:
        return RUNNING
    try:
        return None if _of_real_mps(pipe) or _make_files(pipe) else ""
    except OSError:
        return f"Cannot access CUDA_MPS_PIPE_DIRECTORY={pipe}\n"


def _open_logs(directory: str) -> bool:
    """Make the log files; return whether they can be written."""
    if _of_real_mps(directory):
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


def _first_log_lines(state: SimulatedHostState, daemon: SimulatedDaemon) -> list[LogLine]:
    """Return what a daemon writes into its log when it starts."""
    if _of_real_mps(daemon.log_directory):
        return []
    pipe = daemon.pipe_directory
    texts = [
        f"Starting control daemon using socket {pipe}/control",
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}",
    ]
    if state.branch >= 580:
        texts.append(f"CUDA MPS Control binary version: {binary_version(state)}")
    given = daemon.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if given and parse_threads(given) is None:
        texts.append("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE should be between (0.0, 100.0]")
    return [control_line(daemon, text) for text in texts]


def _of_real_mps(directory: str) -> bool:
    """Return whether the machine's own MPS uses a directory (by default, or by a unit): no simulated file goes there.

    A dead socket in /tmp/nvidia-mps would break every real CUDA program on the machine.
    """
    ours = ("/run/gpushare-mps/", "/var/log/gpushare-mps/")
    return directory in {clients.DEFAULT_PIPE_DIRECTORY, DEFAULT_DIRECTORY} or directory.startswith(ours)


def _make_files(pipe: str) -> bool:
    """Make the directory, not its parents, the lock, the fifo and the sockets; False: the path is too long for these."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(pipe)
        # Without a sticky bit, as the daemon does.
        os.chmod(pipe, 0o777)  # noqa: S103
    _write_file(os.path.join(pipe, "control_lock"), "", 0o666)
    for name in ("log", "control", "control_privileged")[: 3 if len(os.fsencode(pipe)) <= MAX_PIPE_DIRECTORY else 1]:
        path = os.path.join(pipe, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if name == "log":
            os.mkfifo(path)
        else:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
        os.chmod(path, {"log": 0o777, "control": 0o666, "control_privileged": 0o755}[name])
    return len(os.fsencode(pipe)) <= MAX_PIPE_DIRECTORY


def _write_file(path: str, text: str, mode: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
