"""Boards and layouts for the tests of the planner: from the catalogue, as a caller without a driver does."""

from __future__ import annotations

from gpushare.base.model import GpuProcess
from gpushare.gpu_models import GpuModel, find_model, load_models
from gpushare.mig.plan import Call, MigPlan
from gpushare.mig.profile import ComputeInstance, GpuInstance, Layout, Profile

SOMEBODY = (GpuProcess(pid=4711, compute=True, name="python3"),)


# Models with known placements, one for each different table: names and sizes do not matter to the places.
MODELS = [
    model
    for model in load_models().values()
    if model.mig and model.profiles and all(raw.starts is not None for raw in model.profiles)
]


def _shape(model: GpuModel) -> tuple[object, ...]:
    return tuple((p.slices, p.starts, p.size, p.instances, p.media, p.all_media, p.no_media) for p in model.profiles)


SHAPES = list({_shape(model): model for model in reversed(MODELS)}.values())


def instance(
    profile: Profile,
    start: int,
    *,
    busy: bool = False,
    name: str | None = None,
    compute: tuple[int, ...] | None = None,
    busy_parts: tuple[int, ...] = (),
    identity: int | None = None,
) -> GpuInstance:
    """Return a GPU instance that exists, filled by one compute instance unless others are given."""
    placement = next(place for place in profile.placements or () if place.start == start)
    slices = (profile.slices,) if compute is None else compute
    parts = tuple(
        ComputeInstance(
            id=number,
            profile=profile.compute_of(size) or profile.filling_compute,
            holders=SOMEBODY if busy or number in busy_parts else (),
        )
        for number, size in enumerate(slices)
    )
    return GpuInstance(
        id=100 * placement.size + start if identity is None else identity,
        profile=profile,
        placement=placement,
        compute=parts,
        holders=SOMEBODY if busy and not parts else (),
        name=name,
    )


def layout(model: str, *instances: str, gpu: int = 0) -> Layout:
    """Return a GPU of a model: ``3g.40gb:4``, with ``!`` behind for busy, ``=name`` for bound, ``/1,1`` for compute."""
    profiles = find_model(model).profiles
    found = []
    for text in instances:
        rest, _, parts = text.partition("/")
        rest, _, name = rest.partition("=")
        busy = rest.endswith("!")
        profile_name, _, start = rest.rstrip("!").partition(":")
        profile = next(profile for profile in profiles if profile.name == profile_name)
        compute = tuple(int(one) for one in parts.split(",") if one) if "/" in text else None
        found.append(instance(profile, int(start), busy=busy, name=name or None, compute=compute))
    return Layout(gpu=gpu, uuid=f"GPU-{gpu}", profiles=profiles, instances=tuple(found))


def calls_of(plan: MigPlan) -> list[Call]:
    """Return the calls of a plan in order, one GPU after the other."""
    return [call for gpu in plan.gpus for call in gpu.calls()]
