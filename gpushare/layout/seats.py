"""Which MIG device of a GPU is which item of its entry: names, grants and MPS go there. Pure.

What is placed or named already stays with it: a second look at a host that is as the file has it finds each item in its
own device, so nothing is moved about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpushare.errors import BadUsage
from gpushare.layout.hostfile import Entry, InstanceWish, MpsWish
from gpushare.layout.live import LiveGpu
from gpushare.mig.profile import Profile
from gpushare.mig.shape import GpuShape
from gpushare.mig.wish import parse_wish, resolve


class Device(NamedTuple):
    """One MIG device, there or to be made; ``number`` tells those of one size in one GPU instance apart."""

    profile: str
    start: int
    slices: int
    whole: bool
    number: int = 0
    uuid: str | None = None
    name: str | None = None
    mps: MpsWish | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Return its GPU instance."""
        return self.profile, self.start

    def __str__(self) -> str:
        return f"{'' if self.whole else f'{self.slices}c.'}{self.profile}:{self.start}"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One MIG device of the file, and the device that it is (None: there is none yet)."""

    wish: InstanceWish
    profile: str
    start: int | None
    slices: int
    device: Device | None = None


class WantedName(NamedTuple):
    """A name of the file and the GPU instance that it means."""

    name: str
    profile: str
    start: int
    users: tuple[str, ...]


@dataclass(frozen=True)
class Seats:
    """All items of an entry with their devices."""

    seats: tuple[Seat, ...]

    @property
    def names(self) -> tuple[WantedName, ...]:
        """Return the names whose instance is known.

        Raises:
            BadUsage: two for one GPU instance.
        """
        found: dict[tuple[str, int], WantedName] = {}
        for seat in self.seats:
            if seat.device is None or seat.wish.name is None:
                continue
            other = found.get(seat.device.place)
            if other is not None:
                raise BadUsage(
                    f"the names '{other.name}' and '{seat.wish.name}' are for one GPU instance, {seat.device.profile}",
                    "give one of them; it means the GPU instance with all its compute instances",
                    code="bad_file",
                )
            found[seat.device.place] = WantedName(seat.wish.name, *seat.device.place, seat.wish.users)
        return tuple(found.values())


def seats_of(entry: Entry, profiles: Sequence[Profile], devices: Iterable[Device]) -> Seats:
    """Return the items of an entry, each with the device that suits it best.

    Raises:
        BadUsage, NotSupported: the GPU has no such profile.
    """
    return seated(_expanded(entry, profiles), devices)


def seated(wanted: Iterable[Seat], devices: Iterable[Device]) -> Seats:
    """Return the seats, in their order, each with the device that suits it best; some may find none."""
    free, seats = list(devices), list(wanted)
    # What has a place can have no other. As it is wanted already; then by name; then those that nobody has a word for.
    for placed in (True, False):
        for suits in (_is_it, _is_named, _is_served, _is_bare, _fits):
            for number in _named_first(seats):
                seat = seats[number]
                if seat.device is not None or (seat.start is not None) is not placed:
                    continue
                chosen = next((one for one in free if _fits(seat, one) and suits(seat, one)), None)
                if chosen is not None:
                    free.remove(chosen)
                    seats[number] = replace(seat, device=chosen)
    return Seats(tuple(seats))


def devices_of_layout(live: LiveGpu) -> list[Device]:
    """Return the MIG devices that are there."""
    found: list[Device] = []
    names = {(one.profile, one.start): one.name for one in live.names}
    for one in live.instances:
        place = one.profile.name, one.start
        for part in sorted(one.compute, key=lambda part: part.id):
            daemon = live.daemon(part.uuid)
            found.append(
                Device(
                    *place,
                    slices=part.profile.slices,
                    whole=part.profile.slices == one.profile.slices,
                    number=_count(found, place, part.profile.slices),
                    uuid=part.uuid,
                    name=names.get(place),
                    mps=None if daemon is None else daemon.wish,
                )
            )
    return found


def devices_to_be(shape: GpuShape, profiles: Sequence[Profile], kept: Sequence[Device]) -> list[Device]:
    """Return the MIG devices of a shape that a change will leave; ``kept`` are those of now that it does not touch."""
    whole = {profile.name: profile.slices for profile in profiles}
    left, found = list(kept), []
    for one in shape.instances:
        for part in one.compute:
            same = [k for k in left if k.place == one.place and k.slices == part.slices]
            if same:
                left.remove(same[0])
                found.append(same[0])
                continue
            number = _count(found, one.place, part.slices)
            found.append(Device(*one.place, part.slices, part.slices == whole.get(one.profile), number))
    return found


def _count(found: Sequence[Device], place: tuple[str, int], slices: int) -> int:
    return sum((one.place, one.slices) == (place, slices) for one in found)


def _expanded(entry: Entry, profiles: Sequence[Profile]) -> list[Seat]:
    seats = []
    for one in entry.mig:
        for request in parse_wish(one.wish):
            profile = resolve(request, profiles)
            seats += [
                Seat(wish=one, profile=profile.name, start=request.start, slices=slices)
                for _ in range(request.count)
                for slices in request.compute or (profile.slices,)
            ]
    return seats


def _named_first(seats: list[Seat]) -> list[int]:
    return sorted(range(len(seats)), key=lambda number: (seats[number].wish.name is None, number))


def _fits(seat: Seat, one: Device) -> bool:
    return (seat.profile, seat.slices) == (one.profile, one.slices) and seat.start in {None, one.start}


def _is_it(seat: Seat, one: Device) -> bool:
    return seat.wish.name == one.name and _same_mps(seat.wish.mps, one.mps)


def _is_named(seat: Seat, one: Device) -> bool:
    return seat.wish.name is not None and seat.wish.name == one.name


def _is_served(seat: Seat, one: Device) -> bool:
    return one.name is None and (seat.wish.mps is None) == (one.mps is None)


def _is_bare(_seat: Seat, one: Device) -> bool:
    return one.name is None


def _same_mps(wanted: MpsWish | None, there: MpsWish | None) -> bool:
    if wanted is None or there is None:
        return wanted is there
    return same_limits(wanted, there)


def same_limits(one: MpsWish, other: MpsWish) -> bool:
    """Return whether two daemons would hold the same; ``replicas`` are for other engines."""
    return limits_key(one) == limits_key(other)


def limits_key(wish: MpsWish) -> tuple[object, ...]:
    """Return what a daemon holds: no limit of threads is 100 percent."""
    threads = 100.0 if wish.threads_percent is None else wish.threads_percent
    return threads, wish.memory_limit_bytes, wish.priority, tuple(sorted(wish.users)), wish.exclusive
