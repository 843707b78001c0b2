"""Random changes of MIG with random faults: the host is as before or as requested, and nothing busy is ever lost."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpushare.connect import connect
from gpushare.gpu_models import load_models
from gpushare.mig.ledger import MigLedger
from gpushare.mig.profile import standard_compute_profiles
from gpushare.mig.recover import is_complete
from tests.cli.drive import CRASHED, Answer, Seen, World

HOSTS = [
    *(f"sim:{model.short}" for model in load_models().values() if model.mig and model.axis is not None),
    "sim:2xa100-80gb",
    "sim:h100,2xa30",
    "sim:rtx-pro-6000,h200",
]


# None most often: layouts are to grow too.
FAULTS = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.sampled_from(["fail", "crash"]), st.integers(1, 4)),
    st.tuples(st.sampled_from(["fail", "crash"]), st.integers(1, 12)),
)


class Piece(NamedTuple):
    """One part of a random wish: how it is written, and the MIG devices that it is."""

    words: str
    devices: Counter[tuple[str, int]]

    @property
    def slices(self) -> int:
        """Return how many compute slices its GPU instances have at most."""
        return sum(int(profile.partition("g")[0]) * number for (profile, _), number in self.devices.items())


def pieces(profiles: tuple[...]) -> list[Piece]:
    """Return what a wish on a GPU with these profiles may consist of."""
    found = []
    for profile in profiles:
        found.append(Piece(profile.name, Counter({(profile.name, profile.slices): 1})))
        if profile.instances > 1:
            found.append(Piece(f"{profile.name}*2", Counter({(profile.name, profile.slices): 2})))
        found += [
            Piece(f"{profile.name}:{start}", Counter({(profile.name, profile.slices): 1}))
            for start in (profile.starts or ())[:2]
        ]
        for part in standard_compute_profiles(profile.slices, profile.nvml_profile):
            if part.slices < profile.slices:
                found.append(Piece(f"{part.slices}c.{profile.name}", Counter({(profile.name, part.slices): 1})))
                if 2 * part.slices <= profile.slices:
                    found.append(Piece(f"{part.slices}c.{profile.name}*2", Counter({(profile.name, part.slices): 2})))
    return found


class Transactions(RuleBasedStateMachine):
    """One host, changed at random."""

    def __init__(self) -> None:
        super().__init__()
        self.host: World
        self.busy: dict[int, Any] = {}
        self.names = 0
        # What was there before a change that crashed and is not recovered yet.
        self.crashed: list[Seen] | None = None

    @initialize(spec=st.sampled_from(HOSTS), data=st.data())
    def open(self, spec: str, data: st.DataObject) -> None:
        self.host = World.new(spec)
        assert self.host.run("mig", "enable", "-g", "all").code == 0
        for gpu in range(len(self.host.state.gpus)):
            words = " ".join(request.words for request in self.wish(data, gpu))
            self.host.run("mig", "apply", "-g", str(gpu), words)

    # -- programs ------------------------------------------------------------------------------

    @precondition(lambda self: self.host.devices())
    @rule(data=st.data())
    def start_program(self, data: st.DataObject) -> None:
        _, uuid = data.draw(st.sampled_from(self.host.devices()))
        pid = self.host.add(uuid)
        self.busy[pid] = self.host.busy()[pid]

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end_programs(self, data: st.DataObject) -> None:
        for pid in data.draw(st.sets(st.sampled_from(sorted(self.busy)), min_size=1)):
            self.host.run("sim", "end", str(pid))
            del self.busy[pid]

    # -- changes -------------------------------------------------------------------------------

    def wish(self, data: st.DataObject, gpu: int, room: int | None = None) -> list[Piece]:
        """Return a wish that has some hope: not more slices than there are."""
        model = self.host.model(gpu)
        room = (model.compute_slices or 0) if room is None else room
        found: list[Piece] = []
        for piece in data.draw(st.lists(st.sampled_from(pieces(model.profiles)), min_size=1, max_size=6)):
            if not found or piece.slices <= room:
                found.append(piece)
                room -= piece.slices
        return found

    def gpu(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.host.state.gpus) - 1))

    @rule(data=st.data(), fault=FAULTS)
    def create(self, data: st.DataObject, fault: tuple[str, int] | None) -> None:
        gpu, named = self.gpu(data), data.draw(st.booleans())
        taken = sum(int(profile.partition("g")[0]) for profile, _ in self.host.look()[gpu].places)
        wish = self.wish(data, gpu, (self.host.model(gpu).compute_slices or 0) - taken)
        self.names += 1
        name = ("--name", f"name{self.names}") if named else ()
        before = self.host.look()
        text = self.change(fault, "mig", "create", "-g", str(gpu), " ".join(request.words for request in wish), *name)
        if text is None:
            return
        now = self.host.look()
        assert [one for n, one in enumerate(now) if n != gpu] == [one for n, one in enumerate(before) if n != gpu]
        assert before[gpu].places <= now[gpu].places
        made = now[gpu].devices - before[gpu].devices
        assert made == sum((request.devices for request in wish), Counter()), (before[gpu], now[gpu])
        gone = before[gpu].devices - now[gpu].devices
        # Only an empty GPU instance may have been filled.
        assert all(not slices for _, slices in gone)

    @rule(data=st.data(), fault=FAULTS)
    def apply(self, data: st.DataObject, fault: tuple[str, int] | None) -> None:
        gpu = self.gpu(data)
        wish = self.wish(data, gpu)
        before = self.host.look()
        evict = data.draw(st.sampled_from(self.evictable(gpu)))
        words = ("mig", "apply", "-g", str(gpu), " ".join(request.words for request in wish), *evict)
        said = self.change(fault, *words, evict=evict)
        if said is None:
            return
        now = self.host.look()
        assert [one for n, one in enumerate(now) if n != gpu] == [one for n, one in enumerate(before) if n != gpu]
        assert (now[gpu].mode, now[gpu].pending) == (1, 1)
        assert now[gpu].devices == sum((request.devices for request in wish), Counter()), now[gpu]

    @precondition(lambda self: self.host.devices())
    @rule(data=st.data(), fault=FAULTS)
    def destroy(self, data: st.DataObject, fault: tuple[str, int] | None) -> None:
        state = self.host.state
        devices = [(n, mig) for n, gpu in enumerate(state.gpus) for mig in gpu.mig]
        gpu, one = data.draw(st.sampled_from(devices))
        part = data.draw(st.booleans())
        before = self.host.look()
        word = f"{gpu}/{one.gpu_instance_id}" + (f"/{one.compute_instance_id}" if part else "")
        evict = ("--evict", word) if data.draw(st.booleans()) else ()
        said = self.change(fault, "mig", "destroy", word, *evict, evict=evict)
        if said is None:
            return
        now = self.host.look()
        alone = sum(mig.gpu_instance_id == one.gpu_instance_id for n, mig in devices if n == gpu) == 1
        if part and not alone:
            assert now[gpu].places == before[gpu].places
            assert sum((before[gpu].devices - now[gpu].devices).values()) == 1
        else:
            assert before[gpu].places - now[gpu].places == {(one.profile, one.start)}
        assert now[gpu].places <= before[gpu].places

    @rule(data=st.data(), enable=st.booleans(), fault=FAULTS)
    def switch(self, data: st.DataObject, fault: tuple[str, int] | None, enable: bool) -> None:
        gpu = self.gpu(data)
        gone = ("--destroy",) if not enable and data.draw(st.booleans()) else ()
        before = self.host.look()
        said = self.change(fault, "mig", "enable" if enable else "disable", "-g", str(gpu), *gone)
        if said is None:
            return
        now = self.host.look()
        assert (now[gpu].mode, now[gpu].pending) == (int(enable), int(enable))
        assert now[gpu].instances == (before[gpu].instances if enable else ())

    @precondition(lambda self: self.crashed is not None)
    @rule()
    def recover(self) -> None:
        was, here = self.crashed, self.host.look()
        said = self.host.run("mig", "recover")
        self.crashed = None
        now = self.host.look()
        if said.code:
            # Only what somebody has begun to use meanwhile cannot go back, and is named.
            assert said.error["code"] == "not_restored"
            for gpu, (old, new) in enumerate(zip(was or [], now, strict=True)):
                for profile, start in old.places ^ new.places:
                    assert f"{profile}:{start}" in said.error["message"], (gpu, said.error)
        elif "was complete" in said.json["data"]["done"][0]:
            assert now == here
        else:
            assert now == was

    def evictable(self, gpu: int) -> list[tuple[str, ...]]:
        state = self.host.state.gpus[gpu]
        return [
            (),
            *(
                ("--evict", f"{gpu}/{instance.gpu_instance_id}/{instance.compute_instance_id}")
                for instance in state.mig
            ),
        ]

    # -- what holds of every change ----------------------------------------------------------------

    def change(self, fault: tuple[str, int] | None, *words: str, evict: tuple[str, ...] = ()) -> Answer | None:
        """Run a change; return what it said when its result can be compared with what was there before."""
        before, waiting = self.host.look(), self.crashed is not None
        ledger = MigLedger(connect(self.host.spec))
        left = ledger.interrupted_change()
        if left is not None and is_complete(connect(self.host.spec), left):
            # The next change leaves it as it is, and begins from here.
            self.crashed = before
        if fault is not None:
            self.host.fault(f"{fault[0]}-step", fault[1])
        crash = fault is not None and fault[0] == "crash"
        named = self.held_by(evict)
        code = self.host.run_apart(*words) if crash else (said := self.host.run(*words)).code
        self.host.clear()
        for pid in named.difference(self.host.pids()):
            del self.busy[pid]
        if code == CRASHED:
            assert self.host.journal.exists()
            self.crashed = self.crashed or before
            return None
        if waiting:
            # Refused before anything was done, it is still to be recovered; else it is over.
            self.crashed = self.crashed if self.host.journal.exists() else None
            return None
        assert not self.host.journal.exists()
        if code:
            assert self.host.look() == before, words
            return None
        return None if crash else said

    def held_by(self, evict: tuple[str, ...]) -> set[int]:
        if not evict:
            return set()
        gpu, instance, *part = map(int, evict[1].split("/"))
        uuid = self.host.state.gpus[gpu].uuid
        ids = [
            (process.pid, process.gpu_instance_id, process.compute_instance_id)
            for process in self.host.state.processes
            if process.gpu_uuid == uuid
        ]
        return {pid for pid, gi, ci in ids if gi == instance and (not part or ci == part[0])}

    @invariant()
    def nothing_busy_is_lost(self) -> None:
        if self.busy:
            assert self.host.busy() == self.busy

    @invariant()
    def every_name_is_one_place(self) -> None:
        if hasattr(self, "host"):
            places = list(self.host.names().values())
            assert len(places) == len(set(places))


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(
    max_examples=20,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
