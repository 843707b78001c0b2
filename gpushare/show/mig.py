"""MIG on the screen: instances as a tree, profiles with their placements, and the slices as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpushare.base.model import Gpu
from gpushare.base.units import format_bytes, ranges
from gpushare.base.values import dataclass
from gpushare.mig.plan import GpuPlan, MigPlan
from gpushare.mig.planner import free_profiles, holders_text, lost_slices
from gpushare.mig.profile import GpuInstance, Layout, Placement
from gpushare.show.result import Column, Table, plain_value, record_table
from gpushare.show.status import silent_word
from gpushare.show.text import wrapped

# The width of a slice on a GPU with up to eight; with more slices each is narrower, to fit 80 columns.
_CELL: Final = 9
_WIDTH: Final = 8 * _CELL
_COLUMNS: Final = 80


def placements_text(placements: Sequence[Placement] | None) -> str:
    """Return placements as ``-lgipp`` prints them: ``{0,4}:4``; ``-`` if unknown."""
    if not placements:
        return "-"
    return "{" + ",".join(str(placement.start) for placement in placements) + f"}}:{placements[0].size}"


def slices_picture(layout: Layout, instances: Iterable[tuple[Placement, str]]) -> str:
    """Return the memory slices of a GPU as one line of boxes; a free slice is a dot.

    A label that is too long loses its memory size: ``1g+me`` for ``1g.10gb+me``.
    """
    slice_width = _slice_width(layout)
    boxes = ["|" + "·".center(slice_width - 1)] * _drawn_slices(layout)
    # An instance has one box, that of its first slice; the slices after that have none.
    without_box: set[int] = set()
    for placement, label in instances:
        width = slice_width * placement.size - 1
        if len(label) > width:
            label = re.sub(r"\.\d+gb", "", label)
        boxes[placement.start] = "|" + label[:width].center(width)
        without_box |= set(range(placement.start + 1, placement.start + placement.size))
    return "".join(box for slot, box in enumerate(boxes) if slot not in without_box) + "|"


def ruler(layout: Layout) -> str:
    """Return the numbers of the slices above a picture."""
    return "".join(str(slot).center(_slice_width(layout)) for slot in range(_drawn_slices(layout))).rstrip()


def _slice_width(layout: Layout) -> int:
    """Return how many characters a slice has in a picture."""
    return min(_CELL, _WIDTH // max(1, _drawn_slices(layout)))


def _drawn_slices(layout: Layout) -> int:
    """Return how many memory slices are drawn: all; if the driver lists no placements, as many as instances reach."""
    ends = [instance.placement.start + instance.placement.size for instance in layout.instances]
    return max([layout.memory_slices, *ends])


def picture_now(layout: Layout) -> str:
    """Return the picture of what exists; ``*`` marks what is busy."""
    return slices_picture(layout, [(instance.placement, _busy_label(instance)) for instance in layout.instances])


def picture_after(layout: Layout, plan: GpuPlan) -> str:
    """Return the picture of what a plan leaves; ``+`` marks what is new, ``~`` what changes inside."""
    # A change that is not of a whole instance is one of its compute instances.
    changed_inside = {change.instance.place for change in (*plan.destroyed, *plan.created) if not change.whole}
    kept = [
        (instance.placement, _busy_label(instance) + ("~" if instance.place in changed_inside else ""))
        for instance in plan.kept
    ]
    created = [new.instance for new in plan.created if new.whole]
    return slices_picture(layout, [*kept, *((instance.placement, f"+{instance.profile.name}") for instance in created)])


def _busy_label(instance: GpuInstance) -> str:
    return instance.profile.name + ("*" if instance.busy else "")


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """A GPU instance profile of one GPU."""

    gpu: int
    profile: str
    id: int | None
    compute_slices: int
    memory_bytes: int | None
    multiprocessors: int | None
    # How many can be created now.
    free: int | None
    # How many fit on an empty GPU.
    total: int | None
    # In words: {0,4}:4 is the starts and the size, in memory slices.
    placements: str | None
    free_starts: tuple[int, ...] | None
    copy_engines: int | None
    decoders: int | None
    # How sure a published fact is; null: the driver says it.
    confidence: str | None


def profile_rows(layout: Layout, confidence: Mapping[str, str] | None = None) -> list[ProfileRow]:
    """Return a row per profile: the driver's columns, free count and free placements."""
    # Of a profile whose placements the driver does not list, it is unknown how often it still fits.
    placed = tuple(profile for profile in layout.profiles if profile.placements is not None)
    free = {row.profile.name: row for row in free_profiles(replace(layout, profiles=placed))} if placed else {}
    return [
        ProfileRow(
            gpu=layout.gpu,
            profile=profile.name,
            id=profile.id,
            compute_slices=profile.slices,
            memory_bytes=profile.memory_bytes,
            multiprocessors=profile.multiprocessors,
            free=free[profile.name].count if profile.name in free else None,
            total=profile.instances,
            placements=placements_text(profile.placements),
            free_starts=tuple(free[profile.name].starts) if profile.name in free else None,
            copy_engines=profile.engines.copy,
            decoders=profile.engines.decoders,
            confidence=None if confidence is None else confidence.get(profile.name),
        )
        for profile in layout.profiles
    ]


PROFILE_COLUMNS: Final = (
    Column("gpu", "GPU", right=True, group=True),
    Column("profile", "profile", whole=True),
    Column("id", "id", right=True, rank=1),
    Column("memory_bytes", "memory", right=True, format=format_bytes),
    Column("multiprocessors", "SMs", right=True),
    Column("free", "free", right=True),
    Column("total", "of", right=True),
    Column("placements", "placements", rank=2),
    Column("copy_engines", "CE", right=True, rank=4),
    Column("decoders", "DEC", right=True, rank=4),
    Column("confidence", "confidence", rank=3, optional=True),
)


def layout_text(layout: Layout, *, uuids: bool = True) -> str:
    """Return one GPU: its slices, its instances as a tree, what is lost and what still fits."""
    if not layout.profiles:
        return "  the driver lists no MIG profiles"
    lines = []
    if layout.places_known:
        lines += [f"  {ruler(layout)}", f"  {picture_now(layout)}"]
    for instance in sorted(layout.instances, key=lambda each: each.start):
        name = "" if instance.name is None else f"  '{instance.name}'"
        users = f" for {', '.join(instance.granted)} only" if instance.granted else ""
        lines.append(
            f"  GI {instance.id:<3} {instance.profile.name:<13} at {instance.placement}   "
            f"{format_bytes(instance.profile.memory_bytes)}, {plain_value(instance.profile.multiprocessors)} SMs{name}{users}"
        )
        for compute in instance.compute:
            uuid = f"{compute.uuid or '-'}  " if uuids else ""
            lines.append(f"    CI {compute.id:<3} {compute.profile.name:<4} {uuid}{holders_text(compute.holders)}")
        if not instance.compute:
            lines.append("    no compute instance: CUDA cannot use it")
        if instance.holders is None or instance.holders:
            lines.append(f"    held by {holders_text(instance.holders)}")
    if not layout.places_known:
        return "\n".join(
            [*lines, "  what still fits is unknown: the driver does not list the placements of the profiles"]
        )
    lost = lost_slices(layout)
    if lost.compute or lost.memory:
        lines.append(
            f"  unusable: {lost.compute} compute and {lost.memory} memory slices: no further instance fits into them"
        )
    free = [
        f"{row.profile.name} x{row.count} at {','.join(map(str, row.starts))}"
        for row in free_profiles(layout)
        if row.count
    ]
    lead = "  still fits: "
    return "\n".join([*lines, *wrapped("; ".join(free) or "nothing", _COLUMNS, lead, " " * len(lead))])


def grouped_text(texts: Sequence[tuple[int, str]]) -> str:
    """Return the texts of GPUs, each with the index of its GPU; GPUs with equal texts share one."""
    alike: dict[str, list[int]] = {}
    for index, text in texts:
        alike.setdefault(text, []).append(index)
    return "\n\n".join(f"GPU {ranges(indexes)}  {text}" for text, indexes in alike.items())


def silent_lines(gpus: Iterable[Gpu]) -> str:
    """Return a line for each GPU that does not answer; its instances are unknown."""
    return "".join(f"\n\nGPU {gpu.index}  {silent_word(gpu.error)}" for gpu in gpus if gpu.error is not None)


@dataclass(frozen=True, kw_only=True)
class MigGpu:
    """The instances of one GPU."""

    gpu: int
    uuid: str | None
    mig_enabled: bool | None
    mig_pending: bool | None
    # Null: they are hidden from this user, or unknown.
    instances: tuple[GpuInstance, ...] | None
    # Free compute slices that no further instance can use.
    lost_compute_slices: int | None
    # The same for memory slices.
    lost_memory_slices: int | None
    # Why the instances are unknown.
    unknown: str | None


def status_row(gpu: Gpu, layout: Layout | None, unknown: str | None) -> MigGpu:
    """Return one GPU as data; without a layout its instances are unknown, and ``unknown`` says why."""
    placed = layout if layout is not None and layout.places_known else None
    lost = None if placed is None else lost_slices(placed)
    return MigGpu(
        gpu=gpu.index,
        uuid=gpu.uuid,
        mig_enabled=gpu.mig_enabled,
        mig_pending=gpu.mig_pending,
        instances=None if layout is None else layout.instances,
        lost_compute_slices=None if lost is None else lost.compute,
        lost_memory_slices=None if lost is None else lost.memory,
        unknown=unknown,
    )


def plan_text(plan: MigPlan, layouts: Mapping[int, Layout]) -> str:
    """Return the slices of each GPU that a plan changes, before and after, with a legend of the marks."""
    lines = []
    for gpu in plan.gpus:
        if gpu.changes:
            layout = layouts[gpu.gpu]
            lines += [
                f"GPU {gpu.gpu}",
                f"       {ruler(layout)}",
                f"before {picture_now(layout)}",
                f"after  {picture_after(layout, gpu)}",
            ]
    return (
        "\n".join([*lines, "       * in use, + new, ~ changed inside"]) if lines else "nothing to do: it exists already"
    )


def profiles_table(rows: Sequence[ProfileRow]) -> Table:
    return Table(
        name="profiles",
        columns=PROFILE_COLUMNS,
        rows=tuple(map(vars, rows)),
        empty="the driver lists no MIG profiles (up to driver 575: only while MIG is on)",
    )


def status_csv(rows: Sequence[MigGpu]) -> Table:
    """Return a row per compute instance, and one for each GPU instance that has no compute instance.

    The completions of shells read the first four columns.
    """
    keys = ("gpu", "profile", "name", "uuid", "gpu_instance_id", "compute_instance_id", "start", "size", "memory_bytes")
    values = [
        {
            "gpu": row.gpu,
            "profile": instance.profile.name,
            "name": instance.name,
            "uuid": None if compute is None else compute.uuid,
            "gpu_instance_id": instance.id,
            "compute_instance_id": None if compute is None else compute.id,
            "start": instance.placement.start,
            "size": instance.placement.size,
            "memory_bytes": instance.profile.memory_bytes,
        }
        for row in rows
        for instance in row.instances or ()
        for compute in instance.compute or (None,)
    ]
    return record_table("instances", keys, values)
