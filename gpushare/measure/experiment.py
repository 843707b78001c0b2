"""An experiment: programs that are started on one device under a way of sharing, read, paused, sliced and ended.

`bench` and `tune` differ in what they ask of it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpushare.base.benchmark import Metric
from gpushare.base.errors import GpushareError, OperationFailed, or_none
from gpushare.base.selection import Device
from gpushare.host.channels import ChannelControl, Channels
from gpushare.host.claims import HeldClaim
from gpushare.host.host import Host, make_private_directory
from gpushare.host.records import has_records
from gpushare.measure.metric import Printed
from gpushare.mig.places import InstancePlace, places_on
from gpushare.mps.control import MpsControl, is_server
from gpushare.mps.home import client_environment
from gpushare.mps.kill import Meter
from gpushare.mps.limits import Limits
from gpushare.plan import Plan, Step, carry_out
from gpushare.run.end import CONVERSATION_SECONDS, GRACE_SECONDS, client_pids
from gpushare.run.jobs import find_job, gpu_processes
from gpushare.run.mig import InstanceWish
from gpushare.run.plain import pipe_directory, plain_environment
from gpushare.run.several import Group, Program
from gpushare.run.share import INSTANCE, MPS, MpsShare, guard_words
from gpushare.timeslice.policy import level_before_killed, plan_level
from gpushare.timeslice.slices import PASSING, apply_slice, find_channels, restore_slice


class Grounds:
    """The MPS daemon and MIG instances that programs on one device need: set up by `open`, given back by `close`."""

    def __init__(self, host: Host, device: Device, program: str) -> None:
        self.host = host
        self.device = device
        self._program = program
        self._share: MpsShare | None = None
        self._instances: list[tuple[InstancePlace, HeldClaim]] = []

    def open(self, *, mps: bool, instances: int = 0) -> Grounds:
        """Set up what is needed: an MPS daemon, and up to N MIG instances (fewer if fewer are free); return itself.

        Raises:
            GpushareError: the daemon could not be started.
        """
        make_private_directory(pipe_directory(self.host, self.device))
        title = f"the time-slice level of {self.device.title} as it was"
        carry_out(Plan(title=title, steps=self.steps_to_restore_level()))
        if mps:
            share = MpsShare(self.host, self.device, Limits())
            share.check(self._program)
            share.open()
            self._share = share
        if instances:
            self._instances = _claim_instances(self.host, self.device, instances)
        return self

    def close(self, *, program_lives: bool = False) -> bool:
        """Stop the daemon if it is unused, and release the instances; as `Share.close`."""
        claims = [claim for _, claim in self._instances]
        self._instances = []
        if not program_lives:
            for claim in claims:
                claim.release()
        return self._share is not None and self._share.close(program_lives=program_lives)

    @property
    def words_for_guard(self) -> tuple[str, ...]:
        """Return the words that tell the guard which claims, and which lease of a daemon, to give back after a death."""
        claims = [claim for _, claim in self._instances]
        if self._share is None:
            return guard_words(INSTANCE, None, *claims)
        return guard_words(MPS, self._share.lease, *claims)

    @property
    def meter(self) -> Meter | None:
        """Return what tells whether the queue of a client has drained; None outside MPS, where a sudden end breaks no others."""
        return None if self._share is None else self._share.meter

    @property
    def instances(self) -> Sequence[str]:
        """Return the titles of the MIG instances that were taken, all of one profile."""
        return [place.title for place, _ in self._instances]

    @property
    def has_mps(self) -> bool:
        return self._share is not None

    @property
    def gpu_instances(self) -> set[int]:
        """Return the ids of the GPU instances that were taken."""
        return {place.instance.id for place, _ in self._instances}

    def environment(self, limits: Limits | None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a program under MPS with these limits; outside MPS if they are None, or there is no daemon.

        ``extra`` are variables of its own.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        base = {**inherited, **(extra or {})}
        if self._share is not None and limits is not None:
            return client_environment(base, self.device, self._share.home, limits)
        return plain_environment(base, self.host, self.device)

    def environments_of_instances(self, number: int, extra: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the environments of programs in so many of the MIG instances, one each."""
        places = [place for place, _ in self._instances[:number]]
        for place in places:
            make_private_directory(pipe_directory(self.host, place.device))
        return [plain_environment({**os.environ, **extra}, self.host, place.device) for place in places]

    @property
    def _control(self) -> MpsControl | None:
        """Return the connection to the MPS daemon; None without one."""
        if self._share is None:
            return None
        return MpsControl(self.host.programs, str(self._share.home.pipe), seconds=CONVERSATION_SECONDS)

    def why_mps_failed(self) -> str | None:
        """Return why MPS can no longer be used; None: it can, or it was not used."""
        control = self._control
        if control is None:
            return None
        try:
            control.servers()
        except GpushareError as error:
            return f"the MPS daemon does not answer: {error.message}"
        return None

    def clients(self) -> set[int] | None:
        """Return the clients of MPS, whose sudden end breaks others; None: unknown."""
        control = self._control
        return set() if control is None else client_pids(control)

    def servers(self, pids: Collection[int]) -> set[int]:
        """Return the PIDs of the MPS servers that serve some of these processes; none without MPS.

        Raises:
            GpushareError: the daemon does not answer.
        """
        control = self._control
        rows = [] if control is None else control.clients()
        serving = {row.server_pid for row in rows if row.pid in pids and row.server_pid is not None}
        infos = {pid: self.host.processes.describe(pid) for pid in serving}
        return {pid for pid, info in infos.items() if info is not None and is_server(info.name)}

    def steps_to_restore_level(self) -> tuple[Step, ...]:
        """Return the steps that set back a time-slice level that a killed bench has left; none if the user is not root."""
        if self.device.mig is not None or not self.host.root or not has_records(self.host, "lent"):
            return ()
        with contextlib.suppress(GpushareError):
            level = level_before_killed(self.host, self.device.gpu)
            return () if level is None else plan_level(self.host, [self.device], level, beside_mps=True).steps
        return ()


def _claim_instances(host: Host, device: Device, most: int) -> list[tuple[InstancePlace, HeldClaim]]:
    """Claim up to ``most`` free instances without a name, all of the most common profile that has a free one."""
    places = or_none(lambda: [place for place in places_on(host, device.gpu) if place.name is None]) or []
    profiles = Counter(place.mig.profile for place in places if place.mig.profile)
    claimed: list[tuple[InstancePlace, HeldClaim]] = []
    for profile, _ in profiles.most_common():
        wish = InstanceWish(host=host, text=profile, gpu=str(device.gpu.index))
        while len(claimed) < most and (taken := or_none(wish.take)) is not None:
            claimed.append(taken)
        if claimed:
            break
    return claimed


@dataclass
class Running:
    """A program of an experiment, and what it has printed. ``outside`` MPS."""

    program: Program
    printed: Printed
    outside: bool = False

    @property
    def runs(self) -> bool:
        """Return whether it was still running when outputs were last read."""
        return self.program.runs


class Experiment(Group):
    """Programs on one device, each under a way of its own; leaving it ends them and gives the grounds back.

    Time-slices that it set are restored when a program goes on without it.
    """

    def __init__(self, host: Host, grounds: Grounds, *, grace_seconds: float = GRACE_SECONDS) -> None:
        super().__init__(host, grounds, grounds.clients, grace_seconds=grace_seconds)
        self.grounds = grounds
        self._opened: ChannelControl | None = None
        self._sliced: dict[int, Channels] = {}

    def __exit__(self, *_: object) -> None:
        """End what still runs, and restore the slice of a server that goes on."""
        with contextlib.ExitStack() as stack:
            if self._opened is not None:
                stack.callback(self._opened.close)
            stack.callback(super().__exit__)
            self.restore_slices()

    def now(self) -> float:
        """Return the time at which lines are seen now (monotonic seconds)."""
        return time.monotonic()

    def run(
        self, title: str, argv: Sequence[str], environment: Mapping[str, str], metric: Metric, *, outside: bool = False
    ) -> Running:
        """Start a program whose output is read. Errors as `Group.launch`."""
        printed = Printed(metric)

        def listen(line: str, _read_at: float) -> None:
            # A time of its own for each line of a read: lines per second are counted by the gaps between them.
            printed.listen(line, self.now())

        return Running(self.launch(title, argv, environment, listen=listen, redrawn=True), printed, outside)

    def is_client(self, running: Running) -> bool | None:
        """Return whether a program is a client of the daemon; None outside MPS, and when the daemon does not answer."""
        clients = None if running.outside else self.clients()
        if clients is None:
            return None
        return bool(clients & set(self.host.processes.descendants(running.program.pid)))

    # -- time-slices ---------------------------------------------------------------------------------------------------

    @property
    def _channels(self) -> ChannelControl:
        """Return the connection to the GPU's channels, which is opened at first use."""
        if self._opened is None:
            self._opened = self.host.open_channels()
        return self._opened

    def restore_slices(self) -> None:
        """Give the processes that still run the slices that they had before this experiment."""
        for pid in list(self._sliced):
            channels = self._sliced.pop(pid)
            # Most processes have ended.
            with contextlib.suppress(GpushareError):
                restore_slice(self.host, self._channels, channels)

    def slice_of(self, program: Program) -> int:
        """Return the longest slice of a program and its children in microseconds; 0: the driver does not tell it.

        Raises:
            GpushareError: a slice cannot be read and set, as `find_channels`; or no process of it is on a GPU.
        """
        slices = [group.slice_us for channels in self._channels_of(program) for group in channels.groups]
        return max((each for each in slices if each is not None), default=0)

    def set_slice(self, program: Program, microseconds: int) -> None:
        """Set the slice of a program and its children, in all their contexts. Raises as `slice_of`."""
        for channels in self._channels_of(program):
            self._sliced[channels.pid] = apply_slice(self.host, self._channels, channels, microseconds)

    def set_server_slice(self, programs: Sequence[Program], microseconds: int) -> None:
        """Set the slice of the MPS server of these clients, which all clients share. Raises as `servers` and `ChannelControl.find`."""
        pids = {pid for program in programs for pid in self.host.processes.descendants(program.pid)}
        servers = self.grounds.servers(pids)
        if not servers:
            raise OperationFailed(
                "the MPS daemon names no server of the opportunistic job, so there is none to set a time-slice for",
                "check that it uses the GPU and does not change CUDA_MPS_PIPE_DIRECTORY",
                code="not_attached",
            )
        for pid in servers:
            # As run does: the read-back is the proof.
            channels = self._sliced.get(pid) or self._channels.find(pid, probe=False)
            self._sliced[pid] = apply_slice(self.host, self._channels, channels, microseconds)

    def _channels_of(self, program: Program) -> list[Channels]:
        """Return the channels of a program's processes that have a context; raise only if none of them has one yet."""
        all_channels: list[Channels] = []
        no_context: GpushareError | None = None
        for process in gpu_processes(self.host, find_job(self.host, str(program.pid))):
            try:
                channels = self._sliced.get(process.pid) or find_channels(self.host, self._channels, process)
            except GpushareError as error:
                if error.code not in PASSING:
                    raise
                no_context = error
                continue
            self._sliced[process.pid] = channels
            all_channels.append(channels)
        if not all_channels and no_context is not None:
            raise no_context
        return all_channels
