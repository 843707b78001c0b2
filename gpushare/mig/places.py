"""Find the MIG instance that a name or a profile means, verified against the driver.

After a change an instance of another size may have the same MIG UUID. So a UUID is trusted here only if it was just read
together with the profile and the first memory slice.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from gpushare.base.errors import BadUsage, NoPermission, NotFound, NotSupported, or_none
from gpushare.base.model import Gpu, MigInstance
from gpushare.base.selection import Device, no_mig_error, refuse_silent_gpus, select, select_for_change, titles
from gpushare.base.units import first_few
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host
from gpushare.mig.driver import MigReader
from gpushare.mig.ledger import NamedInstance, names_of
from gpushare.mig.profile import ComputeInstance, GpuInstance
from gpushare.mig.wish import Request, find_profile, parse_wish

_UUID_OR_IDS: Final = re.compile(r"mig-(gpu-.*|[0-9a-f]+(-[0-9a-f-]*)?)|\d+/\d+(/\d+)?", re.ASCII | re.IGNORECASE)
# A name begins with a letter, a profile or its id with a digit; the driver prints "MIG 1g.10gb".
_PROFILE: Final = re.compile(r"(mig[\s-]+)?\d", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class InstancePlace:
    """One MIG device as it was just read: a compute instance in its GPU instance."""

    gpu: Gpu
    instance: GpuInstance
    compute: ComputeInstance
    mig: MigInstance
    name: str | None = None

    @property
    def device(self) -> Device:
        return Device(gpu=self.gpu, mig=self.mig)

    @property
    def title(self) -> str:
        """Return its title for messages: ``1g.10gb:2 of GPU 0``, with its name if it has one."""
        part = "" if self.compute.profile.slices == self.instance.profile.slices else f"{self.compute.profile.name}."
        place = f"{part}{self.instance} of GPU {self.gpu.index}"
        return place if self.name is None else f"{self.name} ({place})"

    def same(self, other: InstancePlace) -> bool:
        """Return whether the other is still the same instance: another one may have got its UUID, not its place and size."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        instance, part = self.instance, self.compute
        return self.gpu.uuid, self.mig.uuid, instance.id, *instance.place, part.id, part.profile.slices


def means_profile(text: str) -> bool:
    """Return whether the value of ``--mig`` is a profile and not a name. Raises BadUsage: it is a UUID or ids."""
    word = text.strip()
    if _UUID_OR_IDS.fullmatch(word):
        raise BadUsage(
            f"'{word[:60]}' is neither a profile nor a name, and may mean another instance now",
            f"give --mig 1g, or a name: gpushare mig name train {word[:60]}; an instance by its UUID: -g MIG-<uuid>",
            code="bad_mig",
        )
    return _PROFILE.match(word) is not None


def named_instance(host: Host, name: str) -> NamedInstance:
    """Return the instance that a name means.

    Raises:
        NotFound: there is no such name; the hint lists the known names, or says how to give this one.
    """
    names = names_of(host)
    if name in names:
        return names[name]
    listing = first_few(sorted(names), 16)
    hint = (
        f"names: {listing}"
        if names
        else f"to create one with this name: gpushare mig create WISH --name {shlex.quote(name[:60])}"
    )
    raise NotFound(f"no MIG instance is named '{name[:60]}'", f"{hint}; see: gpushare mig status", code="no_name")


def named_places(host: Host, name: str) -> list[InstancePlace]:
    """Return the MIG devices of the instance that a name means, by compute instance id.

    Raises:
        NotFound: no such name, or something else is at its place now; the message says what.
        GpuLost: its GPU does not answer.
        NoPermission: the driver does not list the GPU instances for this user.
    """
    named = named_instance(host, name)
    gpus = host.nvml.sweep()
    gpu = next((gpu for gpu in gpus if gpu.uuid == named.gpu_uuid), None)
    if gpu is None:
        # A lost GPU has no UUID.
        gpu = next((gpu for gpu in gpus if gpu.error is not None and gpu.uuid is None), None)
    if gpu is None:
        raise NotFound(
            f"{name} means {named} of {named.gpu_uuid}, and that GPU is not on this host",
            "see: gpushare status",
            code="unknown_gpu",
        )
    refuse_silent_gpus(gpu)
    places = places_on(host, gpu)
    meant = [place for place in places if place.instance.place == named.place]
    if not meant:
        raise _not_as_named_error(host, named, gpu)
    return sorted(meant, key=lambda place: place.compute.id)


def check_granted(host: Host, name: str) -> None:
    """Raise if a named instance is granted to other users only: the driver would show it to no program of this user.

    Raises:
        NoPermission: it is (code ``granted_to_others``).
    """
    named = names_of(host).get(name)
    if named is None or not named.users or host.uid == 0:
        return
    user = user_name(host.uid)
    if user not in named.users and str(host.uid) not in named.users:
        raise NoPermission(
            f"{name} is granted to {', '.join(named.users)} only",
            f"ask root to grant it: sudo gpushare mig grant {shlex.quote(name)} {shlex.quote(user)}",
            code="granted_to_others",
        )


def _not_as_named_error(host: Host, named: NamedInstance, gpu: Gpu) -> NotFound:
    """Return the error about a name whose place has no such instance now, with what is there instead."""

    def error(why: str, hint: str, code: str) -> NotFound:
        return NotFound(f"{named.name} means {named} of GPU {gpu.index}, and {why}", hint, gpu=gpu.index, code=code)

    again = f"gpushare mig create -g {gpu.index} {named}"
    if not gpu.mig_enabled:
        enable = f"switch it on and create it again: gpushare mig enable -g {gpu.index}"
        return error("MIG is off there", f"{enable}; {again}", code="mig_off")
    instances = MigReader(host.nvml).layout(gpu).instances
    present = [instance for instance in instances if instance.placement.mask >> named.start & 1]
    if any(instance.place == named.place for instance in present):
        ids = ", ".join(str(instance.id) for instance in present)
        return error(
            "that GPU instance has no compute instance: no program can use it",
            f"make one: sudo nvidia-smi mig -i {gpu.index} -gi {ids} -cci",
            code="no_compute_instance",
        )
    return error(
        f"{', '.join(map(str, present)) or 'nothing'} is there now",
        f"see what is where: gpushare mig status; create it again: {again}",
        code="not_as_named",
    )


def profile_places(host: Host, text: str, gpu: str | None) -> list[InstancePlace]:
    """Return every MIG device of a profile that has no name, by GPU and place.

    ``1c.3g.40gb`` means such a compute instance; ``3g.40gb`` one that fills its GPU instance. An instance with a name is
    reserved for programs that name it.

    Raises:
        NotFound: there is none, all have names, or MIG is off.
        NotSupported: no GPU has MIG, or no GPU has such a profile.
    """
    request = single_request(text)
    gpus = selected_gpus(host, gpu)
    capable = [gpu for gpu in gpus if gpu.mig_capable]
    if not capable:
        raise no_mig_error(gpus, "see: gpushare status; run in a share: --threads")
    enabled = [gpu for gpu in capable if gpu.mig_enabled]
    if not enabled:
        _check_profile_exists(host, capable, request)
        first = capable[0].index
        raise NotFound(
            f"MIG is off on {titles([Device(gpu=gpu) for gpu in capable])}",
            f"switch it on: gpushare mig enable -g {first}; then: gpushare mig create {request.single} -g {first}",
            code="mig_off",
        )
    places = [place for gpu in enabled for place in _places_of_request(host, gpu, request)]
    unnamed = [place for place in places if place.name is None]
    if not unnamed:
        _check_profile_exists(host, enabled, request)
        raise _no_instance_error(request, places, [gpu.index for gpu in enabled])
    return unnamed


def single_request(text: str) -> Request:
    """Return the one MIG device that a word asks for. Raises BadUsage: it is no profile, or asks for several."""
    requests = parse_wish(text)
    if len(requests) != 1 or requests[0].count != 1 or len(requests[0].compute) > 1:
        raise BadUsage(
            f"'{text[:60]}' asks for several instances; a program runs in one",
            "give one profile: --mig 1g",
            code="bad_count",
        )
    return requests[0]


def selected_gpus(host: Host, gpu: str | None, *, answering: bool = True) -> Sequence[Gpu]:
    """Return the GPUs that ``-g`` names, by default all that answer.

    Raises:
        BadUsage: it names an instance.
        GpuLost: one of them does not answer; not without ``answering``.
    """
    gpus = host.nvml.sweep()
    if gpu is None:
        return [gpu for gpu in gpus if gpu.error is None]
    devices = (select_for_change if answering else select)(gpu, with_names(host, gpus))
    if any(device.mig is not None for device in devices):
        raise BadUsage("both -g and --mig name an instance", "give -g a GPU, or drop one of them", code="two_names")
    return [device.gpu for device in devices]


def _places_of_request(host: Host, gpu: Gpu, request: Request) -> list[InstancePlace]:
    """Return the MIG devices of a GPU that serve a request; none if its model has no such profile."""
    places = places_on(host, gpu)
    if not places:
        return []
    try:
        wanted = find_profile(str(request.profile), MigReader(host.nvml).profiles(gpu.index))
    except NotSupported:
        # A profile of another model.
        return []
    slices = request.compute[0] if request.compute else wanted.slices
    return [
        place
        for place in places
        if place.instance.profile.name == wanted.name
        and place.compute.profile.slices == slices
        and request.start in {None, place.instance.start}
    ]


def _check_profile_exists(host: Host, gpus: Sequence[Gpu], request: Request) -> None:
    """Raise unless one of the GPUs has such a profile, or none lists any: up to driver 575 while MIG is off."""
    reader = MigReader(host.nvml)
    errors = []
    for gpu in gpus:
        try:
            find_profile(str(request.profile), reader.profiles(gpu.index))
        except NotSupported as error:
            errors.append(error)
        else:
            return
    if any(reader.profiles(gpu.index) for gpu in gpus):
        raise errors[0]


def _no_instance_error(request: Request, named: Sequence[InstancePlace], gpus: Sequence[int]) -> NotFound:
    """Return the error that no free instance serves a request; ``named`` are those kept for runs that give their name."""
    where = f"GPU {', '.join(map(str, gpus))}"
    make = f"gpushare mig create {request.single} -g {','.join(map(str, gpus))}"
    if named:
        names = sorted({place.name or "" for place in named})
        return NotFound(
            f"every {request.single} of {where} has a name, and is reserved for runs that name it: {', '.join(names)}",
            f"run in one of them, if it is open to you: --mig NAME; or make another: {make}",
            code="no_instance",
        )
    return NotFound(
        f"there is no MIG instance {request.single} on {where}",
        f"make one: {make}; see: gpushare mig status",
        code="no_instance",
    )


def with_names(host: Host, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Return GPUs with the names of their instances, as far as this user sees them."""
    if not any(gpu.mig_instances for gpu in gpus) or not names_of(host):
        return gpus
    named_gpus = []
    for gpu in gpus:
        # A GPU whose layout cannot be read keeps its instances, without names.
        places = or_none(partial(places_on, host, gpu)) or ()
        names = {place.mig.uuid: place.name for place in places}
        instances = tuple(replace(mig, name=names.get(mig.uuid)) for mig in gpu.mig_instances)
        named_gpus.append(replace(gpu, mig_instances=instances))
    return named_gpus


def places_on(host: Host, gpu: Gpu) -> list[InstancePlace]:
    """Return every MIG device of a GPU with its name, by place."""
    if not gpu.mig_enabled or not gpu.mig_instances:
        return []
    instances = MigReader(host.nvml).layout(gpu).instances
    by_uuid = {mig.uuid: mig for mig in gpu.mig_instances}
    names = {(named.gpu_uuid, *named.place): named.name for named in names_of(host).values()}
    return [
        InstancePlace(
            gpu=gpu,
            instance=instance,
            compute=part,
            mig=by_uuid[part.uuid],
            name=names.get((gpu.uuid or "", *instance.place)),
        )
        for instance in sorted(instances, key=lambda instance: instance.start)
        for part in sorted(instance.compute, key=lambda compute: compute.id)
        if part.uuid in by_uuid
    ]
