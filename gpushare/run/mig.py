"""`gpushare run --mig`: find and claim a free MIG instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gpushare.errors import BadUsage, GpushareError, InUse
from gpushare.host.claims import Claim, HeldClaim, take_claim
from gpushare.mig.driver import processes_in
from gpushare.mig.holders import claimed_instances, holder_of
from gpushare.mig.places import Place, means_profile, named_places, places_on, profile_places
from gpushare.model import Holder
from gpushare.mps.daemons import find_daemons
from gpushare.selection import Device, select
from gpushare.units import quoted

if TYPE_CHECKING:
    from gpushare.host.host import Host

# The kernel cuts process names at 15 bytes.
_MPS_PROCESS: Final = "nvidia-cuda-mps"

# The holders of an instance; empty: it is free; None: unknown.
Inside = tuple[Holder, ...] | None


def find_places(host: Host, text: str, gpu: str | None) -> list[Place]:
    """Return the instances that ``--mig`` may mean, the first choice first, free or not."""
    if means_profile(text):
        return profile_places(host, text, gpu)
    places = named_places(host, text)
    if gpu is not None:
        devices = select(gpu, host.nvml.sweep())
        if not any(device.mig is None and device.gpu.index == places[0].gpu.index for device in devices):
            raise BadUsage(
                f"{places[0].title} is not on {quoted(gpu)}", "drop -g: the name already says where", code="two_names"
            )
    return places


def free_place(host: Host, text: str, gpu: str | None) -> Place:
    """Return the instance that a run would take now, without taking it."""
    places = find_places(host, text, gpu)
    claims, daemons = claimed_instances(host), _daemons(host, places)
    held: list[tuple[Place, Inside]] = []
    for place in places:
        inside = _inside(host, place, daemons)
        claim = None if claims is None else claims.get(place.mig.uuid)
        if claims is None:
            held.append((place, None))
        elif claim is not None:
            held.append((place, (claim,)))
        elif _is_free(place, inside):
            return place
        else:
            held.append((place, inside))
    raise _busy(host, held)


def take_place(
    host: Host, text: str, gpu: str | None, check: Callable[[Device], None] = lambda _: None
) -> tuple[Place, HeldClaim]:
    """Take a free instance of a profile, or the one with a name; no other `gpushare run --mig` gets it meanwhile.

    ``check`` raises when the program cannot run in such an instance; it is called before anything is taken.

    Raises:
        InUse: all of them are in use.
        GpushareError: as `find_places` and `take_claim`.
    """
    places = find_places(host, text, gpu)
    check(places[0].device)
    daemons = _daemons(host, places)
    held: list[tuple[Place, Inside]] = []
    for place in places:
        inside = _inside(host, place, daemons)
        if not _is_free(place, inside):
            held.append((place, inside))
            continue
        claim = take_claim(host, place.mig.uuid)
        if isinstance(claim, Claim):
            held.append((place, (holder_of(host, claim),)))
            continue
        try:
            again, inside = _again(host, place)
        except BaseException:
            claim.release()
            raise
        if again is not None and _is_free(again, inside):
            return again, claim
        claim.release()
        held.append((place, inside))
    raise _busy(host, held)


def _again(host: Host, place: Place) -> tuple[Place | None, Inside]:
    """Look again under the claim: the instance may have been used or changed before it was taken."""
    gpu = host.nvml.gpu(place.gpu.index)
    now = next((one for one in places_on(host, gpu) if one.same(place)), None) if gpu.error is None else None
    return now, () if now is None else _inside(host, now, _daemons(host, [now]))


def _is_free(place: Place, inside: Inside) -> bool:
    """Return whether an instance is free. Unknown is not free, unless the instance was named."""
    return place.name is not None if inside is None else not inside


def _inside(host: Host, place: Place, daemons: Mapping[str, Holder]) -> Inside:
    """Return the holders of an instance; an idle MPS daemon keeps it for its owner, who may name it."""
    if host.processes.namespace_is_host() is False:
        # In another PID namespace, NVML lists nothing, or unrelated processes.
        return None
    processes = processes_in(host.nvml, place.mig, place.gpu.index)
    if processes is None:
        return None
    found = []
    for process in processes:
        info = host.processes.describe(process.pid)
        user, name = (None, None) if info is None else (info.user, info.name)
        if place.name is None or name is None or not name.startswith(_MPS_PROCESS):
            found.append(Holder(pid=process.pid, what="context", user=user, name=name))
    daemon = daemons.get(place.mig.uuid)
    if daemon is not None and place.name is None:
        found.append(daemon)
    return tuple(found)


def _daemons(host: Host, places: Sequence[Place]) -> dict[str, Holder]:
    """Return the MPS daemons that serve MIG instances, by MIG UUID."""
    gpus = list({place.gpu.index: place.gpu for place in places}.values())
    try:
        found = [item.daemon for item in find_daemons(host, gpus, deep=False)]
    except GpushareError:
        return {}
    return {
        daemon.device_uuid: Holder(pid=daemon.pid or 0, what="MPS daemon", user=daemon.user, name=_MPS_PROCESS)
        for daemon in found
        if daemon.device_uuid is not None and daemon.error is None
    }


def _busy(host: Host, held: Sequence[tuple[Place, Inside]]) -> InUse:
    places = "; ".join(f"{place.title}: {_who(inside)}" for place, inside in held[:8])
    more = f"; and {len(held) - 8} more" if len(held) > 8 else ""
    first = held[0][0]
    hint = "wait until it ends; see: gpushare mig status"
    if first.name is None:
        hint = f"wait for one, or make another: gpushare mig create {first.instance.profile.name} -g {first.gpu.index}"
    if all(inside is None for _, inside in held) and host.processes.namespace_is_host() is False:
        hint = "NVML reports PIDs of the host: run there, or name the instance (--mig NAME, -g MIG-...)"
    return InUse(f"in use: {places}{more}", hint, gpu=str(first.gpu.index), code="instance_in_use")


def _who(inside: Inside) -> str:
    if inside is None:
        return "its processes are unknown"
    return ", ".join(_holder(one) for one in inside[:4]) or "it has just been changed"


def _holder(one: Holder) -> str:
    facts = [fact for fact in (one.name, one.user and f"user {one.user}") if fact]
    what = {"lease": "gpushare run, process", "MPS daemon": "MPS daemon, process"}.get(one.what, "process")
    return f"{what} {one.pid}" + (f" ({', '.join(facts)})" if facts else "")
