"""Lines for MIG: the layout that holds the shares, beside what exists, and how to get back. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpushare.advice.recipe_line import Line, Recipe, again, program, sudo, who
from gpushare.advice.slices import addable
from gpushare.advice.ways import Way
from gpushare.mig.wish import wish_of

if TYPE_CHECKING:
    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Workload

_MEASURE = (
    "each program in its instance, against the whole GPU: an instance has a share of the SMs and of the bandwidth",
    "peak memory: in an instance the GPU ends where the instance does",
)


def mig_lines(situation: Situation, way: Way) -> Recipe:
    """Return the lines for one process per instance."""
    free = situation.free_now(way)
    if free is not None:
        lines: list[Line] = []
        undo: tuple[Line, ...] = ()
        names = free
    else:
        lines, undo, names = _layout(situation, way)
    for name, one, count in _runs(situation, way, names):
        lines.append(Line(again(count, who(one)), f"gpushare run --mig {name or 'PROFILE'} -- {program(one)}"))
    return Recipe(lines=tuple(lines), undo=undo, measure=_MEASURE)


def mig_as_it_was(situation: Situation) -> Line:
    """Return the line that brings MIG back as it is now: on, with its instances in their places."""
    command = f"{sudo(situation)}gpushare mig"
    layout = situation.gpu.layout
    if layout is None or not layout.instances:
        return Line("turn MIG on again", f"{command} enable -g {situation.gpu.index}")
    before = shlex.join([str(request) for request in wish_of(layout.instances)])
    return Line("back to the instances of now", f"{command} apply -g {situation.gpu.index} {before}")


def off_first(situation: Situation) -> list[Line]:
    """Return the line that turns MIG off, where it is on."""
    if not situation.gpu.mig_enabled:
        return []
    return [Line("turn MIG off", f"{sudo(situation)}gpushare mig disable -g {situation.gpu.index} --destroy")]


def _layout(situation: Situation, way: Way) -> tuple[list[Line], tuple[Line, ...], list[str]]:
    """Return the lines that make the instances, those that take them back, and the profile of each share."""
    gpu, root = f"-g {situation.gpu.index}", sudo(situation)
    slices = situation.slices(way)
    on, layout = situation.gpu.mig_enabled, situation.gpu.layout
    off = Line("turn MIG off again", f"{root}gpushare mig disable {gpu} --destroy")
    if slices is None or not slices.profiles:
        lines = [] if on else [Line("turn MIG on", f"{root}gpushare mig enable {gpu}")]
        lines.append(Line("see what the driver offers, and choose", f"gpushare mig profiles {gpu}"))
        return lines, () if on else (off,), []
    words, names = shlex.join(slices.words), [one.name for one in slices.profiles]
    if not on:
        return [Line("turn MIG on, and make the instances", f"{root}gpushare mig apply {gpu} {words}")], (off,), names
    if layout is None or not layout.instances:
        undo = Line("take the instances away again", f"{root}gpushare mig destroy {gpu} all")
        return [Line("make the instances", f"{root}gpushare mig apply {gpu} {words}")], (undo,), names
    undo = mig_as_it_was(situation)
    if addable(layout, slices.wish):
        line = Line("make the instances beside those that exist", f"{root}gpushare mig create {gpu} {words}")
    else:
        line = Line("make the instances; idle ones that are not wished go", f"{root}gpushare mig apply {gpu} {words}")
    return [line], (undo,), names


def _runs(situation: Situation, way: Way, names: list[str]) -> list[tuple[str | None, Workload, int | None]]:
    """Return profile, workload and how often, for the runs."""
    ones = situation.case.workloads
    if len(ones) == 1:
        return [(names[0] if names else None, ones[0], ones[0].processes)]
    found: list[tuple[str | None, Workload, int | None]] = []
    position = 0
    for one in ones:
        count = (one.processes or 1) if way is Way.MIG else (one.groups or 1)
        found.append((names[position] if names else None, one, count))
        position += count
    return found


def mig_shared_lines(
    situation: Situation, way: Way, limits: Callable[[Workload, int, int | None], list[str]] | None
) -> Recipe:
    """Return the lines for several processes per instance: each instance has a name, and its shell.

    ``limits`` gives the MPS options for so many processes in so much memory; without it they are time-sliced.
    """
    gpu, root = f"-g {situation.gpu.index}", sudo(situation)
    slices = situation.slices(way)
    on = [] if situation.gpu.mig_enabled else [Line("turn MIG on", f"{root}gpushare mig enable {gpu}")]
    if slices is None or not slices.profiles:
        return mig_lines(situation, way)
    parties = _parties(situation, way)
    names = [name for name, _, _ in parties]
    layout = situation.gpu.layout
    room: list[Line] = []
    if layout is not None and layout.instances and not addable(layout, slices.wish):
        idle = " ".join(f"{situation.gpu.index}/{one.id}" for one in layout.instances if not one.busy)
        room = [Line("make room: instances that idle go", f"{root}gpushare mig destroy {idle}")]
    lines = [*on, *room, *_made(situation, parties, [one.name for one in slices.profiles])]
    for (name, one, inside), profile in zip(parties, slices.profiles, strict=True):
        lines.append(Line(f"in the shell of {name}", f'eval "$(gpushare mig env {name})"'))
        run = program(one)
        if limits is not None:
            words = " ".join(limits(one, inside, profile.memory_bytes))
            lines.append(Line("start MPS in it", f'gpushare mps start -g "$CUDA_VISIBLE_DEVICES" {words}'.strip()))
            run = f'gpushare run -g "$CUDA_VISIBLE_DEVICES" -- {run}'
        lines.append(Line(again(inside, who(one)), run))
    if on:
        undo = Line("take all of it back, when the programs have ended", f"{root}gpushare mig disable {gpu} --destroy")
    else:
        undo = Line("take the instances away, with their MPS", f"{root}gpushare mig destroy {' '.join(names)}")
    return Recipe(lines=tuple(lines), undo=(undo, mig_as_it_was(situation)) if room else (undo,), measure=_MEASURE)


def _made(situation: Situation, parties: list[tuple[str, Workload, int]], profiles: list[str]) -> list[Line]:
    """Return the lines that make a named instance for each party; equal ones are made at once, and numbered."""
    create = f"{sudo(situation)}gpushare mig create -g {situation.gpu.index}"
    if len(situation.case.workloads) == 1 and len(parties) > 1:
        words = shlex.quote(f"{profiles[0]}*{len(parties)}")
        return [Line("make an instance for each group", f"{create} {words} --name group")]
    return [
        Line(f"make the instance of {name}", f"{create} {profile} --name {name}")
        for (name, _, _), profile in zip(parties, profiles, strict=True)
    ]


def _parties(situation: Situation, way: Way) -> list[tuple[str, Workload, int]]:
    """Return name, workload and processes of each party."""
    ones = situation.case.workloads
    if len(ones) == 1:
        count = len(situation.shares(way))
        processes = ones[0].processes or 2 * count
        each = [processes // count + (number < processes % count) for number in range(count)]
        return [(f"group-{number}" if count > 1 else "group", ones[0], inside) for number, inside in enumerate(each, 1)]
    found: list[tuple[str, Workload, int]] = []
    for one in ones:
        parts = one.groups or 1
        processes = one.processes or 1
        for part in range(parts):
            name = _name(one.name, len(found) + 1) + (f"-{part + 1}" if parts > 1 else "")
            found.append((name, one, max(1, processes // parts + (part < processes % parts))))
    return found


def _name(text: str | None, number: int) -> str:
    """Return a name that stands on a command line as it is."""
    clean = "".join(letter for letter in text or "" if letter.isascii() and (letter.isalnum() or letter in "-_"))
    return clean if clean[:1].isalpha() else f"group{number}"
