"""Random walks of MIG changes through the real bindings, beside a little model that was written on its own.

After every step the driver answers as the model expects, and `MigReader` reads back exactly what the model holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.gpu_models import GpuModel, find_model, load_models
from gpushare.host.nvml import NvmlReader
from gpushare.mig.driver import MigReader
from gpushare.mig.profile import Profile
from gpushare.sim import admin
from gpushare.sim.mig import occupied_places
from gpushare.sim.state import StateFile
from tests.sim.nvml_host import add_process, loaded, new_host, remaining_capacity

OK, IN_USE, NO_ROOM = 0, 19, 23


def shape(model: GpuModel) -> tuple[object, ...]:
    """Return what decides how instances lie: models with equal shapes walk alike."""
    profiles = sorted(
        (profile.slices, profile.name.partition("gb")[2], profile.starts, profile.size) for profile in model.profiles
    )
    return model.axis, model.arch, tuple(profiles)


# One model of each shape whose placements are known.
MODELS = list(
    {
        shape(model): model.short
        for model in load_models().values()
        if model.mig and all(profile.id is not None and profile.starts is not None for profile in model.profiles)
    }.values()
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["create", "create", "place", "place", "split", "split", "part", "destroy", "join", "join", "busy"]
        ),
        st.integers(0, 63),
        st.integers(0, 63),
    ),
    # Deep enough that instances come and go more than once.
    min_size=15,
    max_size=40,
)


@dataclass
class Part:
    """A compute instance: its slices, and whether somebody is in it."""

    slices: set[int]
    busy: bool = False


@dataclass
class Box:
    """A GPU instance: its profile, its memory slices, its compute instances by id."""

    profile: Profile
    cells: set[int]
    parts: dict[int, Part] = field(default_factory=dict)

    def room(self, size: int) -> list[set[int]]:
        """Return where a compute instance of this size fits: at multiples of 1, 2 or 4 (two halves of a 7g)."""
        step = {1: 1, 2: 2}.get(size, 4)
        places = [
            set(range(s, s + size)) for s in range(0, self.profile.slices, step) if s + size <= self.profile.slices
        ]
        return [place for place in places if all(not place & part.slices for part in self.parts.values())]


def cells(profile: Profile, start: int) -> set[int]:
    return set(range(start, start + (profile.size or 0)))


def allowed(boxes: Sequence[tuple[Profile, set[int]]]) -> bool:
    """Say whether the driver lets these exist together, pair by pair."""
    for index, (one, mine) in enumerate(boxes):
        others = [(other, theirs) for at, (other, theirs) in enumerate(boxes) if at != index]
        if any(mine & theirs for _, theirs in others):
            return False
        if "+me" in one.name and any("+me" in other.name for other, _ in others):
            return False
        if one.name.endswith("+me.all") and any(not other.name.endswith("-me") for other, _ in others):
            return False
        if sum(other.name == one.name for other, _ in boxes) > one.instances:
            return False
    return True


def capacity(profile: Profile, boxes: list[tuple[Profile, set[int]]], first: int = 0) -> int:
    """Return how many more fit, by trying every set of places."""
    best = 0
    for start in profile.starts or ():
        if start >= first and allowed([*boxes, (profile, cells(profile, start))]):
            best = max(best, 1 + capacity(profile, [*boxes, (profile, cells(profile, start))], start + 1))
    return best


class Walk:
    """The driver and the model, side by side."""

    def __init__(self, name: str, nvml: Any, reader: NvmlReader, file: StateFile) -> None:
        self.profiles = find_model(name).profiles
        self.model = find_model(name)
        self.nvml, self.reader, self.file = nvml, reader, file
        self.boxes: dict[int, Box] = {}

    @property
    def present(self) -> list[tuple[Profile, set[int]]]:
        return [(box.profile, box.cells) for box in self.boxes.values()]

    def ask(self, name: str, *arguments: Any) -> tuple[int, Any]:
        """Return the code of a call, and its answer."""
        try:
            return OK, getattr(self.nvml, name)(*arguments)
        except self.nvml.NVMLError as error:
            return error.value, None

    def gpu_instance(self, identity: int) -> Any:
        return self.nvml.nvmlDeviceGetGpuInstanceById(self.reader.handle(0), identity)

    def step(self, kind: str, first: int, second: int) -> None:
        profile = self.profiles[first % len(self.profiles)]
        if kind == "create":
            self.created(profile, None, self.ask("nvmlDeviceCreateGpuInstance", self.reader.handle(0), profile.id))
        elif kind == "place":
            start = (profile.starts or ())[second % len(profile.starts or ())]
            place = self.nvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
            name = "nvmlDeviceCreateGpuInstanceWithPlacement"
            self.created(profile, start, self.ask(name, self.reader.handle(0), profile.id, byref(place)))
        elif self.boxes:
            identity = sorted(self.boxes)[first % len(self.boxes)]
            getattr(self, kind)(identity, second)

    def created(self, profile: Profile, start: int | None, answer: tuple[int, Any]) -> None:
        tried = (profile.starts or ()) if start is None else (start,)
        possible = [one for one in tried if allowed([*self.present, (profile, cells(profile, one))])]
        code, handle = answer
        assert code == (OK if possible else NO_ROOM)
        if handle is not None:
            info = self.nvml.nvmlGpuInstanceGetInfo(handle)
            assert info.placement.start in possible
            assert info.id not in self.boxes
            self.boxes[info.id] = Box(profile, cells(profile, info.placement.start))

    def split(self, identity: int, number: int) -> None:
        """Create a compute instance where the driver likes."""
        self.parted(identity, number, at=None)

    def part(self, identity: int, number: int) -> None:
        """Create a compute instance at the last place of its size."""
        self.parted(identity, number, at=-1)

    def parted(self, identity: int, number: int, at: int | None) -> None:
        box, handle = self.boxes[identity], self.gpu_instance(identity)
        infos = [self.ask("nvmlGpuInstanceGetComputeInstanceProfileInfo", handle, one, 0)[1] for one in range(9)]
        offered = [info for info in infos if info is not None]
        info = offered[number % len(offered)]
        room = box.room(info.sliceCount)
        if at is None:
            code, made = self.ask("nvmlGpuInstanceCreateComputeInstance", handle, info.id)
            possible = room
        else:
            everywhere = Box(box.profile, box.cells).room(info.sliceCount)
            place = self.nvml.c_nvmlComputeInstancePlacement_t(min(everywhere[at]), info.sliceCount)
            name = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
            code, made = self.ask(name, handle, info.id, byref(place))
            possible = [one for one in room if one == everywhere[at]]
        assert code == (OK if possible else NO_ROOM)
        if made is not None:
            found = self.nvml.nvmlComputeInstanceGetInfo(made)
            slices = set(range(found.placement.start, found.placement.start + found.placement.size))
            assert slices in possible
            # The lowest id that is free.
            assert found.id == min(set(range(8)) - set(box.parts))
            box.parts[found.id] = Part(slices)

    def destroy(self, identity: int, _: int) -> None:
        """Destroy a GPU instance; nothing inside may be lost with it."""
        code, _answer = self.ask("nvmlGpuInstanceDestroy", self.gpu_instance(identity))
        assert code == (IN_USE if self.boxes[identity].parts else OK)
        if code == OK:
            del self.boxes[identity]

    def join(self, identity: int, number: int) -> None:
        """Destroy a compute instance."""
        parts = self.boxes[identity].parts
        if parts:
            chosen = sorted(parts)[number % len(parts)]
            handle = self.nvml.nvmlGpuInstanceGetComputeInstanceById(self.gpu_instance(identity), chosen)
            code, _answer = self.ask("nvmlComputeInstanceDestroy", handle)
            assert code == (IN_USE if parts[chosen].busy else OK)
            if code == OK:
                del parts[chosen]

    def busy(self, identity: int, number: int) -> None:
        """Let somebody into a compute instance, or end who is in it."""
        parts = self.boxes[identity].parts
        if not parts:
            return
        chosen = sorted(parts)[number % len(parts)]
        with self.file.changed() as state:
            if parts[chosen].busy:
                place = (identity, chosen)
                state.processes = [
                    process
                    for process in state.processes
                    if (process.gpu_instance_id, process.compute_instance_id) != place
                ]
            else:
                add_process(state, state.gpus[0], gpu_instance_id=identity, compute_instance_id=chosen)
        parts[chosen].busy = not parts[chosen].busy

    def check(self) -> None:
        """Compare what the driver offers and what is read back with the model."""
        state = self.file.read()
        assert state is not None
        taken = occupied_places(state.gpus[0], self.model)
        for profile in self.profiles:
            assert capacity(profile, self.present) == remaining_capacity(profile, taken)
        gpu = self.reader.gpu(0)
        layout = MigReader(self.reader).layout(gpu)
        read = {
            instance.id: (
                instance.profile.name,
                set(range(instance.start, instance.start + instance.placement.size)),
                {
                    part.id: (set(range(part.placement.start, part.placement.start + part.placement.size)), part.busy)
                    for part in instance.compute
                    if part.placement is not None
                },
            )
            for instance in layout.instances
        }
        assert read == {
            identity: (
                box.profile.name,
                box.cells,
                {number: (part.slices, part.busy) for number, part in box.parts.items()},
            )
            for identity, box in self.boxes.items()
        }
        # Every compute instance is a MIG device of its own, and nothing else is.
        uuids = [part.uuid for instance in layout.instances for part in instance.compute]
        assert None not in uuids
        assert sorted(uuids, key=str) == sorted(instance.uuid for instance in gpu.mig_instances)
        assert len(set(uuids)) == len(uuids)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20, deadline=None)
@given(steps=STEPS)
def test_a_walk_of_changes_is_what_the_model_expects(name: str, steps: list[tuple[str, int, int]]) -> None:
    admin.reset(f"sim:{name}")
    file = new_host(f"sim:{name}")
    with loaded(file) as (nvml, library):
        reader = NvmlReader(library)
        assert reader.demand(lambda api: api.nvmlDeviceSetMigMode(reader.handle(0), 1)) == OK
        walk = Walk(name, nvml, reader, file)
        walk.check()
        for kind, first, second in steps:
            walk.step(kind, first, second)
            walk.check()


def test_the_models_of_the_walks_cover_every_layout() -> None:
    assert {find_model(name).axis for name in MODELS} == {4, 8, 12}
