"""The instances that a user wants, as typed: ``3g.40gb 1g.10gb*2``. Pure.

The rules:

- Words are separated by spaces or commas. A word is ``[Nc.]PROFILE[:START][*COUNT]``; ``xCOUNT`` is the same as
  ``*COUNT``, and either may follow the profile as a separate word (``1g.10gb x2``). The word ``MIG`` is
  skipped, so that the driver's output can be pasted.
- PROFILE is the driver's name (``1g.18gb+me``), a size with or without extension (``3g``, ``1g+me``: the plain
  profile of that size, never the revision with double memory), or the id that ``-lgip`` prints (``19``).
- ``:START`` is the first memory slice, as ``nvidia-smi mig -cgi 9:4`` takes it.
- ``1c.3g.40gb`` is a compute instance inside a GPU instance. COUNT counts MIG devices; those of one profile (and
  one START) share GPU instances, filled largest first, as in mig-parted: ``1c.3g.40gb*3`` is one 3g.40gb with
  three compute instances, and so is ``2c.3g.40gb 1c.3g.40gb`` with two.
- Or by need, without a profile: at least some memory and SMs; each GPU takes its smallest profile that has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.base.units import format_bytes, quoted
from gpushare.mig.board import new_compute
from gpushare.mig.profile import GpuInstance, Profile

_WORD: Final = re.compile(r"(?:(?P<compute>\d{1,3})c\.)?(?P<profile>[^:*]{1,40}?)(?::(?P<start>\d{1,4}))?", re.ASCII)
_COUNT: Final = re.compile(r"(?P<rest>.*?)[*x](?P<count>\d{1,9})", re.ASCII)
_ID: Final = re.compile(r"\d{1,6}", re.ASCII)
_SIZE: Final = re.compile(r"(\d{1,3})g(?:\.\d{1,5}gb)?([+-].+)?", re.ASCII)
_HINT: Final = (
    "write for example: 3g.40gb '1g.10gb*2', with a placement 3g.40gb:4, or inside one instance '1c.3g.40gb*3'"
)
# Of a whole wish; no host holds nearly as many.
_MAX_COUNT: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Need:
    """At least this much memory and this many multiprocessors (SMs); None: any."""

    memory_bytes: int | None = None
    multiprocessors: int | None = None

    def __str__(self) -> str:
        """Return the need for messages: ``20.0 GiB and 30 SMs``."""
        words = []
        if self.memory_bytes is not None:
            words.append(format_bytes(self.memory_bytes))
        if self.multiprocessors is not None:
            words.append(f"{self.multiprocessors} SMs")
        return " and ".join(words)


@dataclass(frozen=True, kw_only=True)
class Request:
    """N equal GPU instances: profile as typed or by need, first memory slice or None, compute instances inside.

    ``compute`` has the slices of each compute instance, largest first; empty: one that fills the GPU instance.
    """

    profile: str | Need
    start: int | None = None
    compute: tuple[int, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        """Return the request as typed: ``3g.40gb:4``, ``1g.10gb*2``, ``2c.3g.40gb 1c.3g.40gb``."""
        place = "" if self.start is None else f":{self.start}"
        counts = {f"{self.profile}{place}": self.count}
        if self.compute:
            largest_first = sorted(Counter(self.compute).items(), reverse=True)
            counts = {f"{slices}c.{self.profile}{place}": number * self.count for slices, number in largest_first}
        return " ".join(f"{word}*{count}" if count > 1 else word for word, count in counts.items())

    @property
    def single(self) -> str:
        """Return the request for one of them, as typed: ``1g.10gb``."""
        return str(replace(self, count=1))


Wish = tuple[Request, ...]


def merge_equal(wish: Wish) -> Wish:
    """Return a wish with equal requests as one, and its count."""
    counts: Counter[Request] = Counter()
    for request in wish:
        counts[replace(request, count=1)] += request.count
    return tuple(replace(request, count=count) for request, count in counts.items())


def parse_wish(text: str) -> Wish:
    """Return the requests of a wish, equal ones merged, in the order of their first mention."""
    # By profile and start: how many whole GPU instances, and the slices of each compute instance inside others.
    whole_counts: Counter[tuple[str, int | None]] = Counter()
    slices_inside: dict[tuple[str, int | None], list[int]] = {}
    for word, count in _words_with_counts(text):
        match = _WORD.fullmatch(word)
        if match is None or not (_ID.fullmatch(match["profile"]) or _SIZE.fullmatch(match["profile"])):
            raise BadUsage(f"{quoted(word)} is not a MIG profile", _HINT, code="bad_profile")
        key = (match["profile"], None if match["start"] is None else int(match["start"]))
        if match["compute"] is None:
            whole_counts[key] += count
        else:
            slices_inside.setdefault(key, []).extend([int(match["compute"])] * count)
    requests = [Request(profile=profile, start=start, count=n) for (profile, start), n in whole_counts.items()]
    for (profile, start), slices in slices_inside.items():
        for compute, count in Counter(_pack(profile, slices)).items():
            requests.append(Request(profile=profile, start=start, compute=compute, count=count))
    return tuple(requests)


def _words_with_counts(text: str) -> list[tuple[str, int]]:
    """Return the words of a wish, each with its count. Raises BadUsage if a count is odd, or there is no word."""
    words: list[tuple[str, int]] = []
    for raw in re.split(r"[\s,]+", text.strip().lower()):
        word = raw.removeprefix("mig-")
        if word in {"", "mig"}:
            continue
        match = _COUNT.fullmatch(word)
        count = 1 if match is None else int(match["count"])
        if not 0 < count <= _MAX_COUNT:
            raise BadUsage(
                f"{quoted(raw)} asks for {count} instances", f"count from 1 to {_MAX_COUNT}", code="bad_count"
            )
        rest = word if match is None else match["rest"]
        if rest:
            words.append((rest, count))
        elif words and words[-1][1] == 1:
            # The count of the word before: 1g.10gb x2.
            words[-1] = (words[-1][0], count)
        else:
            raise BadUsage(f"{quoted(raw)} is a count without a profile", _HINT, code="bad_count")
    if not words:
        raise BadUsage("the wish is empty", _HINT, code="bad_profile")
    total = sum(count for _, count in words)
    if total > _MAX_COUNT:
        raise BadUsage(f"the wish asks for {total} instances", f"ask for {_MAX_COUNT} at most", code="bad_count")
    return words


def _pack(profile: str, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the compute instances of each GPU instance (slices of each): first fit, largest first, as in mig-parted."""
    size = _SIZE.fullmatch(profile)
    if size is None:
        raise BadUsage(
            f"a compute instance cannot be asked for by id ({profile})",
            "write the profile's name: 1c.3g.40gb",
            code="bad_profile",
        )
    slices = int(size.group(1))
    groups: list[list[int]] = []
    for device in sorted(devices, reverse=True):
        if not 0 < device <= slices:
            raise BadUsage(
                f"{device}c does not fit in {profile}", f"it has {slices} compute slices", code="bad_profile"
            )
        group = next((group for group in groups if sum(group) + device <= slices), None)
        if group is None:
            groups.append([device])
        else:
            group.append(device)
    # The plain name asks for a compute instance that fills the GPU instance.
    return [() if group == [slices] else tuple(group) for group in groups]


def resolve(request: Request, profiles: Sequence[Profile]) -> Profile:
    """Return the profile that a request means, among those of a GPU.

    Raises:
        BadUsage: several profiles have the size, or the profile has no such placement.
        NotSupported: the GPU does not have it, or its placements are unknown.
    """
    if isinstance(request.profile, Need):
        profile = smallest_for_need(request.profile, profiles)
    else:
        profile = find_profile(request.profile, profiles)
    if profile.placements is None:
        raise NotSupported(
            f"the placements of {profile.name} are not known",
            "run this on a machine that has the GPU",
            code="placements_unknown",
        )
    if request.start is not None and request.start not in {place.start for place in profile.placements}:
        starts = ", ".join(str(place.start) for place in profile.placements)
        raise BadUsage(
            f"{profile.name} cannot start at {request.start}", f"it starts at: {starts}", code="bad_placement"
        )
    if new_compute(profile, request.compute) is None:
        hint = "it holds: " + ", ".join(f"{part.name}*{part.instances or '?'}" for part in profile.compute)
        raise NotSupported(f"{request.single} is more than one {profile.name} holds", hint, code="mig_profile_unknown")
    return profile


def in_order(wish: Wish, profiles: Sequence[Profile], instances: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
    """Return GPU instances in the order of a wish: those that serve its first word, by place, and so on; then all others."""
    unused = sorted(instances, key=lambda instance: instance.start)
    # The places that a word names are left for that word.
    named_starts = {request.start for request in wish if request.start is not None}
    chosen: list[GpuInstance] = []
    for request in wish:
        profile = resolve(request, profiles).name
        alike = [
            each
            for each in unused
            if each.profile.name == profile
            and sorted(part.profile.slices for part in each.compute)
            == sorted(request.compute or (each.profile.slices,))
        ]
        if request.start is None:
            serving = [each for each in alike if each.start not in named_starts]
        else:
            serving = [each for each in alike if each.start == request.start]
        chosen += serving[: request.count]
        unused = [instance for instance in unused if instance not in chosen]
    return (*chosen, *unused)


def find_profile(text: str, profiles: Sequence[Profile]) -> Profile:
    """Return the profile with this name, size or id.

    Raises:
        BadUsage: several profiles have this size; the hint lists them.
        NotSupported: this GPU has no such profile; the hint lists all.
    """
    wanted = text.strip().lower().removeprefix("mig").strip(" -")
    if _ID.fullmatch(wanted):
        matches = [profile for profile in profiles if profile.id == int(wanted)]
    else:
        matches = [p for p in profiles if p.name == wanted] or _profiles_of_size(wanted, profiles)
    if len(matches) == 1:
        return matches[0]
    if matches:
        candidates = ", ".join(profile.name for profile in matches)
        raise BadUsage(
            f"{quoted(text)} matches several profiles", f"give one of: {candidates}", code="ambiguous_profile"
        )
    names = [profile.name for profile in profiles]
    if not names:
        raise no_profiles_error()
    raise NotSupported(
        f"this GPU has no MIG profile {quoted(text)}", f"its profiles: {', '.join(names)}", code="mig_profile_unknown"
    )


def no_profiles_error(gpu: int | None = None) -> NotSupported:
    where, which = ("this GPU", "GPU") if gpu is None else (f"GPU {gpu}", gpu)
    return NotSupported(
        f"the driver lists no MIG profiles of {where} (up to driver 575: only while MIG is on)",
        f"switch it on first: gpushare mig enable -g {which}; or plan for a model: --model h100-80gb",
        gpu=gpu,
        code="no_profiles",
    )


def _profiles_of_size(wanted: str, profiles: Sequence[Profile]) -> list[Profile]:
    """Return the profiles of a size and extension (``3g``, ``1g+me``), the plain one alone if there is no extension."""
    match = re.fullmatch(r"(\d+)g([+-].+)?", wanted)
    if match is None:
        return []
    extension = match.group(2) or ""
    of_size = [p for p in profiles if re.sub(r"\.\d+gb", "", p.name) == f"{match.group(1)}g{extension}"]
    if extension:
        return of_size
    # 1g is 1g.10gb, not the revision 1g.20gb, which NVML has as a different size.
    return [p for p in of_size if p.plain] or of_size


def smallest_for_need(need: Need, profiles: Sequence[Profile]) -> Profile:
    """Return the smallest plain profile that meets a need: fewest memory slices, then compute slices, then memory.

    A profile whose memory or SM count is unknown does not count.
    """
    ordinary = [profile for profile in profiles if not profile.attributes and profile.placements]
    serving = [
        profile
        for profile in ordinary
        if _at_least(profile.memory_bytes, need.memory_bytes)
        and _at_least(profile.multiprocessors, need.multiprocessors)
    ]
    if serving:
        return min(serving, key=lambda p: (p.size or 0, p.slices, p.memory_bytes or 0, p.multiprocessors or 0))
    raise NotSupported(
        f"no MIG profile of this GPU is known to have {need}", "see: gpushare mig profiles", code="mig_need_too_large"
    )


def _at_least(has: int | None, wanted: int | None) -> bool:
    return wanted is None or (has is not None and has >= wanted)


def wish_of(instances: Iterable[GpuInstance]) -> Wish:
    """Return the wish with which ``apply`` creates these instances again, in their places."""
    return merge_equal(
        tuple(
            placed_request(each.profile.name, each.start, [part.profile.slices for part in each.compute])
            for each in sorted(instances, key=lambda each: each.start)
        )
    )


def placed_request(profile: str, start: int, slices_of_each: Sequence[int]) -> Request:
    """Return the request for one GPU instance (``3g.40gb``) at a place, with compute instances of these slices.

    A request without compute instances means one over all slices.
    """
    parts = tuple(sorted(slices_of_each, reverse=True))
    whole = (int(profile.partition("g")[0]),)
    return Request(profile=profile, start=start, compute=() if parts == whole else parts)
