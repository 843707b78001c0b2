"""Simulated hosts. They replace NVML and NVIDIA's programs; everything above runs unchanged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from gpushare.host.cgroups import Cgroups
    from gpushare.host.channels import ChannelControl
    from gpushare.host.checkpoint import Checkpoint
    from gpushare.host.host import UserDirectory
    from gpushare.sim.library import SimulatedLibrary
    from gpushare.sim.machine import SimulatedCapabilities, SimulatedMachine
    from gpushare.sim.processes import SimulatedProcesses
    from gpushare.sim.programs import SimulatedPrograms
    from gpushare.sim.state import SimulatedHostState, StateFile


class SimulatedHost(NamedTuple):
    """A simulated host: NVML library, programs, processes, and the user that commands run as there."""

    spec: str
    state_file: StateFile
    library: SimulatedLibrary
    programs: SimulatedPrograms
    processes: SimulatedProcesses
    capabilities: SimulatedCapabilities
    machine: SimulatedMachine
    run_directory: Path
    # What outlives a reboot of the simulated host.
    state_directory: Path
    uid: int
    root: bool

    def user_directories(self) -> Sequence[UserDirectory]:
        """Return the run directories of its other users, to root: those below ``users/UID``, if there are any."""
        users = self.state_file.directory / _USERS
        if not self.root or not users.is_dir():
            return ()
        from gpushare.host.host import UserDirectory

        uids = sorted(int(one.name) for one in users.iterdir() if one.name.isdecimal())
        return [UserDirectory(uid, users / str(uid) / "gpushare", os.geteuid()) for uid in uids]

    @property
    def shared_run_directories(self) -> Sequence[Path]:
        """Return root's run directory, to a user who has one of his own."""
        shared = self.state_file.directory / "run"
        return () if self.run_directory == shared else (shared,)

    def open_channels(self) -> ChannelControl:
        """Open the channel groups of its processes."""
        from gpushare.sim.channels import SimulatedChannels

        return SimulatedChannels(self.state_file)

    def makes_vgpus(self) -> bool:
        """Return whether virtual machines use vGPUs of it."""
        state = self.state_file.read()
        return state is not None and any(gpu.vgpus for gpu in state.gpus)

    def open_cgroups(self) -> Cgroups:
        """Return its cgroups."""
        from gpushare.sim.cgroups import SimulatedCgroups

        return SimulatedCgroups(self.state_file)

    def open_checkpoint(self) -> Checkpoint:
        """Return what copies the GPU memory of its processes to host memory and back."""
        from gpushare.host.checkpoint import Checkpoint
        from gpushare.sim.checkpoint import SimulatedCheckpoint

        return Checkpoint(SimulatedCheckpoint(self.state_file))


# A directory below it with the UID of a user makes that user's run directory another one than root's.
_USERS: Final = "users"


def _run_directory(directory: Path, state: SimulatedHostState) -> Path:
    own = directory / _USERS / str(state.uid)
    return own / "gpushare" if not state.root and own.is_dir() else directory / "run"


def open_simulated(spec: str) -> SimulatedHost:
    """Return the simulated host of a name like ``sim:8xa100-80gb``, created when it was never used.

    Raises:
        BadUsage: not a simulated host's name, or an unknown GPU model.
        NoPermission: its state cannot be written.
    """
    from gpushare.sim.library import SimulatedLibrary
    from gpushare.sim.machine import SimulatedCapabilities, SimulatedMachine
    from gpushare.sim.processes import SimulatedProcesses
    from gpushare.sim.programs import SimulatedPrograms
    from gpushare.sim.state import StateFile, initial_state, parse_spec

    canonical = parse_spec(spec).text
    state_file = StateFile(canonical)
    state = state_file.read()
    if state is None:
        with state_file.changed(initial_state(canonical)) as state:
            pass
    return SimulatedHost(
        spec=canonical,
        state_file=state_file,
        library=SimulatedLibrary(state_file),
        programs=SimulatedPrograms(state_file),
        processes=SimulatedProcesses(state_file),
        capabilities=SimulatedCapabilities(state_file),
        machine=SimulatedMachine(state_file),
        run_directory=_run_directory(state_file.directory, state),
        state_directory=state_file.directory / "var",
        uid=state.uid,
        root=state.root,
    )
