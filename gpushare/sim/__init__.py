"""Simulated hosts. They replace NVML and NVIDIA's programs; everything above runs unchanged."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

from gpushare.base.values import dataclass
from gpushare.host.host import Host, UserDirectory, loaded_at_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpushare.sim.library import SimulatedLibrary
    from gpushare.sim.state import StateFile


@dataclass(frozen=True, kw_only=True)
class SimulatedHost(Host):
    """A simulated host, with its state and its NVML library."""

    state_file: StateFile
    library: SimulatedLibrary


# A directory below it with the UID of a user gives that user a run directory other than root's.
_USERS: Final = "users"


def _user_directories(state_file: StateFile) -> Sequence[UserDirectory]:
    """Return the run directories of the users below ``users/UID``, if there are any."""
    users = state_file.directory / _USERS
    uids = sorted(int(entry.name) for entry in users.iterdir() if entry.name.isdecimal()) if users.is_dir() else ()
    return [UserDirectory(uid, users / str(uid) / "gpushare", os.geteuid()) for uid in uids]


def open_simulated(spec: str) -> SimulatedHost:
    """Return the simulated host of a name like ``sim:8xa100-80gb``, created when it was never used.

    Raises:
        BadUsage: not a simulated host's name, or an unknown GPU model.
        NoPermission: its state cannot be written.
    """
    from gpushare.host.nvml import NvmlReader
    from gpushare.sim.current import current
    from gpushare.sim.library import SimulatedLibrary
    from gpushare.sim.machine import SimulatedCapabilities, SimulatedMachine
    from gpushare.sim.processes import SimulatedProcesses
    from gpushare.sim.programs import SimulatedPrograms
    from gpushare.sim.state import StateFile, parse_spec

    canonical = parse_spec(spec).text
    state_file = StateFile(canonical)
    # Not settled where it exists: only its owner may write it.
    state = state_file.read() or current(state_file)
    directory, library, processes = state_file.directory, SimulatedLibrary(state_file), SimulatedProcesses(state_file)
    shared, user_directory = directory / "run", directory / _USERS / str(state.uid)
    has_own = not state.root and user_directory.is_dir()
    # What outlives a reboot of the simulated host: root's, and that of each user who is not root.
    roots_state = directory / "var"
    return SimulatedHost(
        spec=canonical,
        state_file=state_file,
        library=library,
        nvml=NvmlReader(library),
        programs=SimulatedPrograms(state_file),
        processes=processes,
        capabilities=SimulatedCapabilities(state_file),
        machine=SimulatedMachine(state_file),
        origin=processes.origin,
        open_channels=loaded_at_call("sim.channels:SimulatedChannels", state_file),
        open_checkpoint=loaded_at_call("sim.checkpoint:open_checkpoint", state_file),
        makes_vgpus=lambda: any(gpu.vgpus for gpu in (state_file.read() or state).gpus),
        user_directories=partial(_user_directories, state_file) if state.root else tuple,
        run_directory=user_directory / "gpushare" if has_own else shared,
        shared_run_directories=(shared,) if has_own else (),
        state_directory=roots_state if state.root else directory / f"var-{state.uid}",
        shared_state_directories=() if state.root else (roots_state,),
        uid=state.uid,
        root=state.root,
    )
