"""What `gpushare run` runs a program in: the variables that lead there, the proof that it is there, and its end."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from gpushare.actions.attachment import Attachment
from gpushare.actions.mps_device import check_device, own_daemon
from gpushare.actions.mps_limits import MpsLimits, check_memory
from gpushare.actions.mps_start import plan_start
from gpushare.actions.plan import carry_out
from gpushare.actions.run_after import stop_if_last
from gpushare.actions.run_environment import check_command, client_environment
from gpushare.errors import GpushareError, NotFound
from gpushare.host.activity import ActivityMeter
from gpushare.host.mps_home import DaemonHome, Lease, home_of

if TYPE_CHECKING:
    from gpushare.host.claims import HeldClaim
    from gpushare.host.host import Host
    from gpushare.selection import Device

# The guard's words for what the program runs in.
MPS: Final = "mps"
INSTANCE: Final = "instance"


class Watch(Protocol):
    """What is known so far of where a program's processes are; `look` brings it up to date."""

    program_pid: int
    outside: set[int]
    pending: set[int]
    daemon_gone: bool

    @property
    def attached(self) -> Collection[int]:
        """Return the processes that were seen inside."""

    def wait(self) -> float:
        """Return how many seconds may pass until the next look."""

    def look(self) -> None:
        """Look for the program's processes."""

    def settle(self) -> None:
        """Find out what can still be found out of a program that has ended."""

    def clients(self) -> set[int] | None:
        """Return the processes whose sudden death breaks others; None when it cannot be told."""


class Guarded(Protocol):
    """What the guard must know of a place."""

    @property
    def device(self) -> Device:
        """Return the GPU or MIG instance."""

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return what the guard is told: the kind, path and descriptor of the daemon's lease, the claim of each instance."""


class Share(Guarded, Protocol):
    """A place for one program; `close` gives it back."""

    @property
    def meter(self) -> ActivityMeter | None:
        """Return what measures a drained queue; None where a program's end breaks nobody."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the program."""

    def watch(self, pid: int) -> Watch:
        """Return the watch over a program that has just been started."""

    def close(self, *, program_lives: bool = False) -> bool:
        """Give it back, once; return whether others go on using it, which the guard then waits for.

        ``program_lives``: something failed, and the guard will end the program; until then it is not given back.
        """


@dataclass
class MpsShare:
    """A share under an MPS daemon of ours.

    The lease on the daemon is None on another user's: it is not ours to stop. ``claim`` is held with it when the device
    is an instance that was taken.
    """

    host: Host
    device: Device
    home: DaemonHome
    lease: Lease | None
    limits: MpsLimits
    claim: HeldClaim | None = None

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return what the guard is told."""
        return (MPS, *held(self.lease), *claimed(self.claim))

    @property
    def meter(self) -> ActivityMeter:
        """Return what measures a drained queue."""
        mig = self.device.mig
        return ActivityMeter(self.host.nvml, self.device.gpu.index, None if mig is None else mig.gpu_instance_id)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a client."""
        return client_environment(base, self.device, self.home, self.limits)

    def watch(self, pid: int) -> Attachment:
        """Return the watch over a program."""
        return Attachment(self.host, self.device, self.home, pid, seen={pid})

    def close(self, *, program_lives: bool = False) -> bool:
        """Give the leases back, and stop the daemon if this was its last program; return whether others use it.

        With clients left the guard waits for them.
        """
        lease, self.lease = self.lease, None
        lingers = False
        if lease is not None:
            lease.release()
            try:
                lingers = stop_if_last(self.host, self.home)
            except GpushareError:
                lingers = True
        # After the daemon: who takes the instance then finds it empty.
        claim, self.claim = self.claim, None
        if claim is not None and not program_lives:
            # Else it is the guard's now, as long as the program lives.
            claim.release()
        return lingers


def open_mps_share(
    host: Host, device: Device, program: str, limits: MpsLimits, claim: HeldClaim | None = None
) -> MpsShare:
    """Return a share of a device for a program; starts an MPS daemon when the device has none.

    Raises:
        GpushareError: the program or the limits cannot be; or as `plan_start`.
    """
    check_mps_share(host, device, program, limits)
    home, lease = _joined(host, device)
    return MpsShare(host, device, home, lease, limits, claim)


def check_mps_share(host: Host, device: Device, program: str, limits: MpsLimits) -> None:
    """Raise unless a program can run under MPS on a device with these limits.

    Raises:
        GpushareError: as `check_device`, `check_memory` and `check_command`.
    """
    check_device(host, device)
    check_memory(device, limits.memory_limit_bytes)
    check_command(device, program, limits)


def _joined(host: Host, device: Device) -> tuple[DaemonHome, Lease | None]:
    own_home = home_of(host.run_directory, device.uuid)
    try:
        home, _ = own_daemon(host, device)
        if home.directory != own_home.directory:
            return home, None
    except NotFound:
        pass
    own_home.create()
    with own_home.locked():
        try:
            own_daemon(host, device)
        except NotFound:
            carry_out(plan_start(host, device, MpsLimits(), transient=True))
        return own_home, own_home.take_lease()


def held(lease: Lease | None) -> tuple[str, str]:
    """Return path and descriptor of a lease as the guard is told them."""
    return ("", "-1") if lease is None else (os.fspath(lease.path), str(lease.descriptor))


def claimed(*claims: HeldClaim | None) -> tuple[str, ...]:
    """Return claims as the guard is told them."""
    return tuple(os.fspath(one.path) for one in claims if one is not None)
