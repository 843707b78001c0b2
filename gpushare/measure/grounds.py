"""Where the copies of a benchmark run: outside MPS, under one MPS daemon, in MIG instances; set up once, given back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpushare.actions.mig_places import places_on
from gpushare.actions.mps_limits import MpsLimits
from gpushare.actions.plain_share import pipe_directory, plain_environment
from gpushare.actions.run import announcer, start_guard
from gpushare.actions.run_end import CONVERSATION_SECONDS, client_pids
from gpushare.actions.run_environment import client_environment
from gpushare.actions.run_mig import take_place
from gpushare.actions.share import INSTANCE, MpsShare, claimed, held, open_mps_share
from gpushare.errors import GpushareError
from gpushare.host.host import make_private_directory
from gpushare.host.mps_control import MpsControl
from gpushare.measure.copies import Launch
from gpushare.measure.ways import MIG, MPS, Way

if TYPE_CHECKING:
    from gpushare.actions.mig_places import Place
    from gpushare.actions.safe_end import Meter
    from gpushare.host.claims import HeldClaim
    from gpushare.host.host import Host
    from gpushare.selection import Device


@dataclass(frozen=True)
class _Guarded:
    """The copies as the guard sees them: outside MPS their end breaks nobody. It holds their MIG instances on."""

    device: Device
    share: MpsShare | None
    claims: Sequence[HeldClaim]

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return what the guard is told."""
        base = (INSTANCE, *held(None)) if self.share is None else self.share.guarded
        return (*base, *claimed(*self.claims))


class Grounds:
    """The places of one device. Use it as a context manager: what was set up is given back at the end."""

    def __init__(self, host: Host, device: Device, program: str) -> None:
        self._host, self._device, self._program = host, device, program
        self._share: MpsShare | None = None
        self._instances: list[tuple[Place, HeldClaim]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Grounds:
        """Return itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop the daemon if nobody else uses it, and give the instances back."""
        self._stack.close()

    def open(self, *, mps: bool, instances: int) -> None:
        """Set up what is needed: an MPS daemon, so many MIG instances (fewer, if fewer are free).

        Raises:
            GpushareError: the daemon could not be started.
        """
        make_private_directory(pipe_directory(self._host, self._device))
        if mps:
            self._share = open_mps_share(self._host, self._device, self._program, MpsLimits())
            self._stack.callback(self._share.close)
        if instances:
            self._instances = _take(self._host, self._device, instances)
            for _, claim in self._instances:
                self._stack.callback(claim.release)
        self._guard()

    def _guard(self) -> None:
        guard, self._pipe = start_guard(
            self._host, _Guarded(self._device, self._share, [claim for _, claim in self._instances])
        )

        def dismiss() -> None:
            lingers = self._share is not None and self._share.close()
            self._tell("linger" if lingers else "done")
            with contextlib.suppress(OSError):
                self._pipe.close()
            if not lingers:
                guard.wait()

        self._stack.callback(dismiss)

    def announce(self, pid: int, started: float | None) -> None:
        """Let the guard end this program, in which it is called, if gpushare dies."""
        announcer(self._pipe)(pid, started)

    def ended(self, pid: int) -> None:
        """Let the guard forget a program."""
        self._tell(f"ended {pid}")

    def _tell(self, word: str) -> None:
        # A guard that somebody killed must not end the measurement.
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(word.encode() + b"\n")
            self._pipe.flush()

    @property
    def instances(self) -> Sequence[str]:
        """Return the titles of the MIG instances that were taken, all of one profile."""
        return [place.title for place, _ in self._instances]

    @property
    def profile(self) -> str | None:
        """Return the profile of the MIG instances that were taken."""
        return self._instances[0][0].mig.profile if self._instances else None

    def launches(self, way: Way, copies: int, argv: Sequence[str], extra: Mapping[str, str]) -> list[Launch]:
        """Return the copies as they are started under a way; ``extra`` are variables of the command itself."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")} | dict(extra)
        if way.kind == MPS and self._share is not None:
            limits = MpsLimits(threads_percent=way.cap(copies))
            environment = client_environment(base, self._device, self._share.home, limits)
            return [Launch(argv=argv, environment=environment)] * copies
        if way.kind == MIG:
            places = [place for place, _ in self._instances[:copies]]
            return [
                Launch(argv=argv, environment=plain_environment(base, self._host, self._device_of(place)))
                for place in places
            ]
        # A daemon of ours that runs on the device does not listen there.
        environment = plain_environment(base, self._host, self._device)
        return [Launch(argv=argv, environment=environment)] * copies

    def _device_of(self, place: Place) -> Device:
        make_private_directory(pipe_directory(self._host, place.device))
        return place.device

    def gpu_instances(self, way: Way) -> set[int] | None:
        """Return the GPU instances that copies under a way run in; None: the device itself."""
        return {place.instance.id for place, _ in self._instances} if way.kind == MIG else None

    def lost(self, way: Way) -> str | None:
        """Return why what a way needs is not there any more, or None."""
        if way.kind != MPS or self._share is None:
            return None
        try:
            MpsControl(self._host.programs, str(self._share.home.pipe), seconds=CONVERSATION_SECONDS).servers()
        except GpushareError as error:
            return f"the MPS daemon does not answer: {error.message}"
        return None

    def clients(self, way: Way) -> set[int] | None:
        """Return the processes whose sudden end breaks others under a way; None when it cannot be told."""
        if way.kind != MPS or self._share is None:
            return set()
        return client_pids(MpsControl(self._host.programs, str(self._share.home.pipe), seconds=CONVERSATION_SECONDS))

    def meter(self, way: Way) -> Meter | None:
        """Return what measures a drained queue under a way; None where a sudden end breaks nobody."""
        return self._share.meter if way.kind == MPS and self._share is not None else None


def _take(host: Host, device: Device, most: int) -> list[tuple[Place, HeldClaim]]:
    """Take free instances that nobody has named, all of the profile of which the most are free."""
    try:
        places = [place for place in places_on(host, device.gpu) if place.name is None]
    except GpushareError:
        return []
    profiles = list(dict.fromkeys(place.mig.profile for place in places if place.mig.profile))
    best: list[tuple[Place, HeldClaim]] = []
    for profile in sorted(profiles, key=lambda name: -sum(place.mig.profile == name for place in places)):
        taken = _take_profile(host, device, profile, most)
        if len(taken) > len(best):
            best, taken = taken, best
        for _, claim in taken:
            claim.release()
    return best


def _take_profile(host: Host, device: Device, profile: str, most: int) -> list[tuple[Place, HeldClaim]]:
    taken: list[tuple[Place, HeldClaim]] = []
    while len(taken) < most:
        try:
            taken.append(take_place(host, profile, str(device.gpu.index)))
        except GpushareError:
            break
    return taken
