"""`gpushare run --mig`: find and claim a free MIG instance, or wait for one."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpushare.base.errors import BadUsage, GpushareError, InUse, NoPermission, NotFound, or_none
from gpushare.base.model import Holder, MigInstance
from gpushare.base.selection import Device
from gpushare.base.units import counted, format_duration, quoted
from gpushare.base.values import dataclass
from gpushare.host.claims import EXCLUSIVE, Claim, HeldClaim, claim_directory, take_claim, why_unreadable
from gpushare.host.process import info_of
from gpushare.memory.ledger import PATIENCE_SECONDS, Place, Request, Reservation, jobs_before, reservations
from gpushare.memory.room import POLL_SECONDS
from gpushare.mig.holders import claim_holder, claimed_instances
from gpushare.mig.places import (
    InstancePlace,
    check_granted,
    means_profile,
    named_places,
    places_on,
    profile_places,
    selected_gpus,
)
from gpushare.mps.daemons import find_daemons
from gpushare.show.waiting import waiting_line

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.run.created import Creator

# The kernel cuts process names at 15 bytes.
_MPS_PROCESS: Final = "nvidia-cuda-mps"

# The holders of an instance; empty: it is free; None: unknown.
Holders = tuple[Holder, ...] | None
HeldPlaces = list[tuple[InstancePlace, Holders]]


class TakenInstance(NamedTuple):
    """An instance, and the claim by which this gpushare holds it."""

    place: InstancePlace
    claim: HeldClaim


# How many instances the entry of a waiting job in the line names, and how many a message.
_MOST_KEYS: Final = 128
_MOST_NAMED: Final = 8


@dataclass(frozen=True, kw_only=True)
class InstanceWish:
    """What ``--mig`` asks for: an instance of a profile, or the one with a name; on the GPUs of ``-g``, if that is given.

    ``check`` raises if the program cannot run in such an instance; it is called before one is taken, or right after it was
    made. A ``creator`` makes one if none is free.
    """

    host: Host
    text: str
    gpu: str | None
    check: Callable[[Device], None] = lambda _: None
    creator: Creator | None = None

    def places(self) -> list[InstancePlace]:
        """Return the instances that ``--mig`` may mean, the first choice first, free or not; none, if one may be made."""
        try:
            return self._existing_places()
        except NotFound as error:
            if self.creator is None or error.code != "no_instance":
                raise
            return []

    def _existing_places(self) -> list[InstancePlace]:
        """Return the instances that ``--mig`` may mean. Raises NotFound: there are none."""
        host = self.host
        if means_profile(self.text):
            return profile_places(host, self.text, self.gpu)
        places = named_places(host, self.text)
        check_granted(host, self.text)
        if self.gpu is not None:
            indexes = {gpu.index for gpu in selected_gpus(host, self.gpu, answering=False)}
            if places[0].gpu.index not in indexes:
                raise BadUsage(
                    f"{places[0].title} is not on {quoted(self.gpu)}",
                    "drop -g: the name already says where",
                    code="two_names",
                )
        return places

    def _checked_places(self) -> list[InstancePlace]:
        """Return the instances that ``--mig`` may mean, after a check that the program can run in the first one."""
        places = self.places()
        if places:
            self.check(places[0].device)
        return places

    def take(self) -> TakenInstance:
        """Take a free instance; no other `gpushare run --mig` gets it meanwhile.

        Raises:
            InUse: all of them are in use.
            NoPermission: it is not known which of them are claimed (code ``lease_unusable``).
            GpushareError: as `places` and `take_claim`.
        """
        places = self._checked_places()
        taken, held = _take_first(self.host, places)
        if taken is None and self.creator is not None:
            self.creator.make()
            taken, held = _take_first(self.host, self._existing_places())
        if taken is None:
            raise _in_use_error(self.host, held)
        if not places:
            # There was no instance to check before.
            self._check_or_release(taken)
        return taken

    def free(self) -> list[InstancePlace]:
        """Return the instances that ``--mig`` may mean and that are free now. Raises as `take`, but for InUse."""
        return _free_and_held(self.host, self.places())[0]

    def _check_or_release(self, taken: TakenInstance) -> None:
        """Check that the program can run in an instance that was just made; if the check raises, release the claim."""
        try:
            self.check(taken.place.device)
        except BaseException:
            taken.claim.release()
            raise

    def wait(
        self,
        *,
        seconds: float | None,
        name: str | None,
        say: Callable[[str], None],
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> TakenInstance:
        """Wait until such an instance is free, and take it as `take`; first come, first served among those that wait.

        ``seconds`` None: as long as it takes. While it waits, the job has an entry in the ledger of memory.

        Raises:
            InUse: the time is over (code ``no_room``).
            GpushareError: as `take`.
        """
        places = self._checked_places()
        # Those that may make an instance stand in one line for the GPUs on which they may.
        creator_gpus = () if self.creator is None else tuple(gpu.uuid or "" for gpu in self.creator.gpus)
        keys = (*creator_gpus, *(place.mig.uuid for place in places))[:_MOST_KEYS]
        entry = Place(self.host, Request(memory_bytes=None, keys=keys, client=False, name=name))
        began = last_without_free = clock()
        try:
            with waiting_line(say, quiet=quiet) as draw:
                while True:
                    free, held = _free_and_held(self.host, places)
                    jobs_ahead = jobs_before(reservations(self.host) or [], entry)
                    now = clock()
                    if not free:
                        last_without_free = now
                    # Instances are free for long, and the jobs ahead have not taken them: they hang, and are passed.
                    passes = now - last_without_free >= PATIENCE_SECONDS
                    taken = self._take_in_turn(free, jobs_ahead, passes=passes)
                    if taken is not None:
                        return taken
                    # A job ahead may want to make one on these GPUs.
                    is_first = all(set(creator_gpus).isdisjoint(job.keys) for job in jobs_ahead)
                    if not free and is_first and self.creator is not None and self.creator.make_if_room():
                        places = self.places()
                        continue
                    reason = in_use_text(held) if held else "others were first"
                    if not places:
                        reason = "none is there"
                    if seconds is not None and now - began >= seconds:
                        raise InUse(
                            f"no instance ({quoted(self.text)}) was free within {seconds:g} s: {reason}",
                            "wait longer: --timeout TIME; see who holds them: gpushare mig status",
                            code="no_room",
                        )
                    line = f", {counted(len(jobs_ahead), 'job')} before it" if jobs_ahead else ""
                    draw(f"waiting for a free instance ({quoted(self.text)}){line}: {reason}", now - began, seconds)
                    seconds_left = math.inf if seconds is None else max(0.01, began + seconds - clock())
                    sleep(min(POLL_SECONDS, seconds_left))
                    try:
                        places = self.places()
                    except GpushareError:
                        # It is being changed, or the GPU does not answer: it may come back.
                        places = []
        finally:
            entry.leave()

    def _take_in_turn(
        self, free: Sequence[InstancePlace], jobs_ahead: Sequence[Reservation], *, passes: bool
    ) -> TakenInstance | None:
        """Take a free instance that the jobs ahead leave, or with ``passes`` any; None: there is none, or others were faster."""
        # Each job ahead takes one.
        left_by_others = free[_count_takers(jobs_ahead, free) :]
        if not left_by_others and not passes:
            return None
        taken, _ = _take_first(self.host, left_by_others or free)
        if taken is not None and self.creator is not None:
            self._check_or_release(taken)
        return taken

    def instance_for_plan(self, *, waits: bool) -> InstancePlace:
        """Return the instance that a job would take now, or the first of those that it would wait for. Raises as `take`."""
        places = self._checked_places()
        free, held = _free_and_held(self.host, places)
        if not free and not waits:
            raise _in_use_error(self.host, held)
        return (free or places)[0]


def _free_and_held(host: Host, places: Sequence[InstancePlace]) -> tuple[list[InstancePlace], HeldPlaces]:
    """Return which instances are free, and who holds the others: programs in them, else the job that claims them.

    Raises NoPermission: none is free, as the claims cannot be read (code ``lease_unusable``).
    """
    claims = claimed_instances(host)
    daemons = _daemons_by_instance(host, places)
    free: list[InstancePlace] = []
    held: HeldPlaces = []
    for place in places:
        holders = _holders_inside(host, place, daemons)
        is_free = _is_free(place, holders)
        # Where no program is seen, a job may have claimed it. None: unknown.
        claim = None if holders or claims is None else claims.get(place.mig.uuid)
        if not holders and claims is None:
            holders, is_free = None, False
        elif claim is not None:
            holders, is_free = (claim,), False
        if is_free:
            free.append(place)
        else:
            held.append((place, holders))
    # If the claims cannot be read, none counts as free, and one that was made would not either.
    reason = None if free else why_unreadable(host, EXCLUSIVE)
    if reason is not None:
        raise NoPermission(
            f"it is not known which instances are in use: {reason}",
            f"see what is there: ls -ld {shlex.quote(str(claim_directory(host)))}",
            code="lease_unusable",
        )
    return free, held


def _take_first(host: Host, places: Sequence[InstancePlace]) -> tuple[TakenInstance | None, HeldPlaces]:
    """Take the first of some instances that is free; return it (None: none is), and who holds the others."""
    free, held = _free_and_held(host, places)
    for place in free:
        claim = take_claim(host, place.mig.uuid)
        if isinstance(claim, Claim):
            # Another job was faster.
            held.append((place, (claim_holder(host, claim),)))
            continue
        try:
            present, holders = _read_again(host, place)
        except BaseException:
            claim.release()
            raise
        if present is not None and _is_free(present, holders):
            return TakenInstance(present, claim), held
        claim.release()
        held.append((place, holders))
    return None, held


def _count_takers(jobs: Sequence[Reservation], free: Sequence[InstancePlace]) -> int:
    """Return how many of these waiting jobs may take one of the free instances."""

    def may_take(job: Reservation, mig: MigInstance) -> bool:
        """Return whether a job waits for an instance, and fits into it as far as is known."""
        # A job without a size takes any instance.
        size, total = job.memory_bytes, mig.memory_total_bytes
        return mig.uuid in job.keys and (size is None or total is None or size <= total)

    return sum(any(may_take(job, place.mig) for place in free) for job in jobs)


def waiting_text(text: str, seconds: float | None) -> str:
    """Return the text of the step of a plan in which the job waits for an instance."""
    most = "" if seconds is None else f", for {format_duration(seconds)} at most"
    return f"wait until an instance ({quoted(text)}) is free, first come first served{most}; take it"


def _read_again(host: Host, place: InstancePlace) -> tuple[InstancePlace | None, Holders]:
    """Return an instance read again after it was claimed (None: it is gone), and its holders: both may have changed."""
    gpu = host.nvml.gpu(place.gpu.index)
    places = [] if gpu.error is not None else places_on(host, gpu)
    current = next((other for other in places if other.same(place)), None)
    if current is None:
        return None, ()
    return current, _holders_inside(host, current, _daemons_by_instance(host, [current]))


def _is_free(place: InstancePlace, holders: Holders) -> bool:
    """Return whether an instance is free. Unknown is not free, unless the instance was named."""
    if holders is None:
        return place.name is not None
    return not holders


def _holders_inside(host: Host, place: InstancePlace, daemons: Mapping[str, Holder]) -> Holders:
    """Return what uses an instance: the programs in it, and its MPS daemon. None: unknown.

    An idle MPS daemon keeps the instance for its owner. The owner may name the instance, and then the daemon is no holder.
    """
    if host.processes.namespace_is_host() is False:
        # In another PID namespace, NVML lists nothing, or unrelated processes.
        return None
    processes = host.nvml.processes_in(place.mig, place.gpu.index)
    if processes is None:
        return None
    holders = []
    for process in processes:
        info = info_of(host.processes, process.pid)
        if place.name is None or not (info.name or "").startswith(_MPS_PROCESS):
            holders.append(Holder(pid=process.pid, what="context", user=info.user, name=info.name))
    daemon = daemons.get(place.mig.uuid)
    if daemon is not None and place.name is None:
        holders.append(daemon)
    return tuple(holders)


def _daemons_by_instance(host: Host, places: Sequence[InstancePlace]) -> dict[str, Holder]:
    """Return the MPS daemons that serve MIG instances, by MIG UUID."""
    gpus = list({place.gpu.index: place.gpu for place in places}.values())
    daemons = [item.daemon for item in or_none(lambda: find_daemons(host, gpus, deep=False)) or ()]
    return {
        daemon.device_uuid: Holder(pid=daemon.pid or 0, what="MPS daemon", user=daemon.user, name=_MPS_PROCESS)
        for daemon in daemons
        if daemon.device_uuid is not None and daemon.error is None
    }


def in_use_text(held: HeldPlaces) -> str:
    """Return in words who holds instances."""
    texts = [f"{place.title}: {_holders_text(holders)}" for place, holders in held[:_MOST_NAMED]]
    if len(held) > _MOST_NAMED:
        texts.append(f"and {len(held) - _MOST_NAMED} more")
    return f"in use: {'; '.join(texts)}"


def _in_use_error(host: Host, held: HeldPlaces) -> InUse:
    """Return the error when all instances that would do are held."""
    place, _ = held[0]
    all_unknown = all(holders is None for _, holders in held)
    if all_unknown and host.processes.namespace_is_host() is False:
        hint = "NVML reports PIDs of the host: run there, or name the instance (--mig NAME, -g MIG-...)"
    elif place.name is not None:
        hint = "wait until it ends: --wait; see: gpushare mig status"
    else:
        make = f"gpushare mig create {place.instance.profile.name} -g {place.gpu.index}"
        hint = f"wait for one: --wait; or make another: {make}"
    return InUse(in_use_text(held), hint, gpu=place.gpu.index, code="instance_in_use")


def _holders_text(holders: Holders) -> str:
    """Return the holders of an instance in words: what each is, its PID, name and user."""
    if holders is None:
        return "its processes are unknown"
    texts = []
    for holder in holders[:4]:
        facts = [fact for fact in (holder.name, holder.user and f"user {holder.user}") if fact]
        kind = {"lease": "gpushare run, process", "MPS daemon": "MPS daemon, process"}.get(holder.what, "process")
        texts.append(f"{kind} {holder.pid}" + (f" ({', '.join(facts)})" if facts else ""))
    return ", ".join(texts) or "it has just been changed"
