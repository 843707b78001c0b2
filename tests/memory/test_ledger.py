"""The ledger on a simulated host: what counts, what does not, and who may take a place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpushare.base.errors import BadUsage, DriverNotLoaded, InUse, NoPermission, OperationFailed
from gpushare.base.model import ComputeMode, Gpu, GpuProcess
from gpushare.base.selection import Device, select
from gpushare.base.units import GIB, MIB
from gpushare.connect import connect
from gpushare.host.claims import Claim, HeldClaim, claim_directory
from gpushare.host.host import Host
from gpushare.host.identity import Identity, identity_of
from gpushare.memory import ledger
from gpushare.memory.admission import Room, Running, UserLimits
from gpushare.memory.ledger import Line, Place, Request, Reservation, line_of, line_order, reservations, waiting_before
from gpushare.memory.look import waiting_jobs
from gpushare.memory.peaks import Profile, keep_profile
from gpushare.memory.room import (
    Draw,
    _no_room_error,
    _room_text,
    _use_percent_of_jobs,
    best_first,
    check_fits,
    check_limit_now,
    client_limit,
    outlook,
    wait_for_room,
)
from gpushare.memory.swapped import OUT, Image, Swap
from gpushare.mps.control import SERVER_PROGRAM
from gpushare.show.waiting import waiting_line
from gpushare.sim.admin import add_process, set_fault, set_mig
from tests.clock import Clock
from tests.errors import fails

SPEC = "sim:2xa30"
# A user who is neither root nor this one.
OTHER = os.geteuid() + 1


@pytest.fixture
def host() -> Host:
    return connect(SPEC)


def telling(messages: list[str]) -> Draw:
    """Return what notes what a job waits for when that changes, as off a terminal."""
    return contextlib.ExitStack().enter_context(waiting_line(messages.append))


def devices(host: Host) -> tuple[Device, ...]:
    return select(None, host.nvml.sweep())


def enter(host: Host, size: int | None, *, on: Sequence[Device] | None = None, **facts: Any) -> Place:
    keys = tuple(device.uuid for device in on or devices(host))
    return Place(host, Request(**{"memory_bytes": size, "keys": keys, "client": False, **facts}))


def hold(host: Host, size: int, device: Device) -> Place:
    """Enter a job that has a place on this device."""
    place = enter(host, size)
    place.take(device.uuid)
    return place


def wait(
    host: Host,
    place: Place,
    among: Sequence[Device],
    seconds: float | None,
    messages: list[str],
    *,
    limits: UserLimits | None = None,
    clock: Clock | None = None,
) -> None:
    """Wait for room by a clock that never stands still."""
    clock = clock or Clock()
    draw = telling(messages)
    wait_for_room(host, place, among, seconds, limits or UserLimits(), draw, clock=clock, sleep=clock.sleep)


def take(host: Host, place: Place) -> bool:
    return place.try_to_take(devices(host), {}, UserLimits())


def files(host: Host) -> list[Path]:
    return sorted(claim_directory(host).glob("gpushare-memory-*"))


def test_a_place_is_taken_kept_and_left(host: Host) -> None:
    place = enter(host, 10 * GIB, name="train")
    (reservation,) = reservations(host) or []
    assert (reservation.name, reservation.memory_bytes, reservation.held, reservation.claim.uid) == (
        "train",
        10 * GIB,
        (),
        os.geteuid(),
    )
    assert take(host, place)
    (reservation,) = reservations(host) or []
    assert (reservation.held, reservation.sure) == ((devices(host)[0].uuid,), True)
    line = line_of(host, devices(host)[0], [reservation])
    assert line.reserved_bytes == 10 * GIB
    assert line.free_bytes == line.room.memory_bytes - 10 * GIB
    (file,) = files(host)
    assert file.stat().st_mode & 0o777 == 0o644
    place.leave()
    assert reservations(host) == []


def test_a_second_gpu_takes_what_does_not_fit_on_the_first(host: Host) -> None:
    first, second, third = (enter(host, 16 * GIB) for _ in range(3))
    assert [take(host, place) for place in (first, second, third)] == [True, True, False]
    assert [first.held, second.held] == [(device.uuid,) for device in devices(host)]
    first.leave()
    assert take(host, third)


@pytest.mark.parametrize("client", [False, True])
def test_two_that_take_at_the_same_time_do_not_both_stay(
    host: Host, monkeypatch: pytest.MonkeyPatch, client: bool
) -> None:
    """Both saw room, or a place for a client; the one that came later steps back when it reads again."""
    key = devices(host)[0].uuid
    asked = Request(memory_bytes=GIB if client else 20 * GIB, keys=(key,), client=client)
    early, late = Place(host, asked), Place(host, asked)
    monkeypatch.setattr(Place, "_devices_free_to_take", lambda *_: (key,))
    early.claim.add_fact(f"hold {key}")
    assert not late.try_to_take(devices(host), {key: 1}, UserLimits())
    assert early.try_to_take(devices(host), {key: 1}, UserLimits())
    assert not late.held


def test_one_that_came_later_and_has_read_already_is_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both are sure: it has not seen the hold of the earlier one, which does not count that of the later one."""
    early, late = enter(host, 20 * GIB), enter(host, 20 * GIB)
    key = devices(host)[0].uuid
    monkeypatch.setattr(Place, "_devices_free_to_take", lambda *_: (key,))
    still_fit, answers = Place._still_fit, []

    def meanwhile(place: Place, *words: Any) -> bool:
        fits = still_fit(place, *words)
        if place is late:
            # Between its read and its word the earlier one begins.
            monkeypatch.setattr(Place, "_still_fit", still_fit)
            answers.append(take(host, early))
        return fits

    monkeypatch.setattr(Place, "_still_fit", meanwhile)
    monkeypatch.setattr(ledger, "_CHOOSING_SECONDS", 0.0)
    answers.append(take(host, late))
    assert sorted(answers) == [False, True]


def test_one_that_came_later_and_steps_back_holds_up_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = enter(host, 20 * GIB), enter(host, 20 * GIB)
    key = devices(host)[0].uuid
    monkeypatch.setattr(Place, "_devices_free_to_take", lambda *_: (key,))
    late.claim.add_fact(f"hold {key}")
    monkeypatch.setattr(ledger.time, "sleep", lambda _: late.claim.add_fact("back"))
    assert take(host, early)
    # With room for both there is nothing to wait for.
    small, other = enter(host, GIB), enter(host, GIB)
    other.claim.add_fact(f"hold {key}")
    monkeypatch.setattr(ledger.time, "sleep", lambda _: pytest.fail("it waits"))
    assert take(host, small)


def test_each_process_of_a_job_is_a_client(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices(host)[0]
    gpu = replace(
        device.gpu, processes=tuple(GpuProcess(pid=pid, mps=True, memory_used_bytes=GIB) for pid in (51, 52, 53))
    )
    place = Place(host, Request(memory_bytes=8 * GIB, keys=(device.uuid,), client=True))
    place.take(device.uuid)
    listed = reservations(host) or []
    monkeypatch.setattr(ledger, "owners_of", lambda *_: dict.fromkeys((51, 52, 53), listed[0].id))
    line = line_of(host, replace(device, gpu=gpu), listed, clients=4)
    assert sum(job.client for job in line.running) == 3
    assert sum(job.memory_bytes for job in line.running) == 8 * GIB
    assert line.free_clients == 1
    # A job starts as many processes as it likes: more than there were places for.
    crowded = line_of(host, replace(device, gpu=gpu), listed, clients=2)
    assert crowded.free_clients == 0


def test_an_instance_takes_its_share_of_the_clients(host: Host) -> None:
    assert client_limit(host, devices(host)[0]) == 48
    set_mig(SPEC, "0", ["1g.6gb", "2g.12gb"])
    gpu = devices(host)[0].gpu
    limits = {instance.profile: client_limit(host, Device(gpu=gpu, mig=instance)) for instance in gpu.mig_instances}
    assert limits == {"1g.6gb": 12, "2g.12gb": 24}
    assert client_limit(host, Device(gpu=gpu, mig=replace(gpu.mig_instances[0], profile=None))) is None


@pytest.mark.parametrize("own", ["the driver", "a display", "an MPS server"])
def test_what_is_there_without_a_job_keeps_no_job_out(host: Host, own: str) -> None:
    """An idle GPU shows a few MiB, an idle MIG instance 15 MiB: a job of unknown size would wait forever."""
    for gpu in ("0", "1"):
        if own == "the driver":
            set_fault(SPEC, "unlisted-memory", gpu, "15M")
        elif own == "a display":
            add_process(SPEC, gpu, memory_bytes=90 * MIB, graphics=True, name="Xorg")
        else:
            add_process(SPEC, gpu, memory_bytes=66 * MIB, name=SERVER_PROGRAM, sm_percent=0)
    first, second = enter(host, None), enter(host, None)
    assert take(host, first)
    assert take(host, second)
    assert first.held != second.held
    assert not take(host, enter(host, GIB))


@pytest.mark.parametrize("work", ["a job", "a large rendering", "the name of a server", "memory of the dead"])
def test_work_of_others_keeps_a_job_out_that_wants_all(host: Host, work: str) -> None:
    for gpu in ("0", "1"):
        if work == "memory of the dead":
            set_fault(SPEC, "unlisted-memory", gpu, "2G")
        else:
            size = 15 * MIB if work == "a job" else 2 * GIB
            name = SERVER_PROGRAM if work == "the name of a server" else "python3"
            add_process(SPEC, gpu, memory_bytes=size, graphics=work == "a large rendering", name=name)
    whole = enter(host, None)
    assert not take(host, whole)
    whole.leave()
    assert take(host, enter(host, GIB))


def test_a_job_outside_mps_has_an_exclusive_gpu_alone(host: Host) -> None:
    for index in (0, 1):
        host.nvml.set_compute_mode(index, ComputeMode.EXCLUSIVE_PROCESS)
    places = [enter(host, GIB) for _ in range(3)]
    assert [take(host, place) for place in places] == [True, True, False]
    assert places[0].held != places[1].held
    client = Place(host, replace(places[0].request, client=True))
    assert not take(host, client)


def test_one_that_steps_back_again_and_again_stays_in_the_ledger(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim only grows, and a long one cannot be read any more."""
    monkeypatch.setattr(ledger, "_MOST_STEPS_BACK", 3)
    monkeypatch.setattr(Place, "_still_fit", lambda *_: False)
    place = enter(host, 20 * GIB)
    written = []
    for _ in range(7):
        assert not take(host, place)
        written.append(place.claim.path.read_text().count("\nfact back"))
    # It is written again each third time.
    assert written == [1, 2, 0, 1, 2, 0, 1]
    assert [reservation.id for reservation in reservations(host) or []] == [place.id]
    monkeypatch.undo()
    assert take(host, place)
    assert len(files(host)) == 1


def test_a_program_that_is_started_again_and_again_keeps_its_place(host: Host) -> None:
    place = enter(host, 20 * GIB)
    place.take(devices(host)[0].uuid)
    for _ in range(100):
        place.tell_limit(GIB, "end")
        place.add(os.getpid())
    assert [reservation.held for reservation in reservations(host) or []] == [(devices(host)[0].uuid,)]


def test_an_instance_that_is_gone_is_said(host: Host) -> None:
    set_mig(SPEC, "0", ["1g.6gb"])
    gpu = host.nvml.gpu(0)
    device = Device(gpu=gpu, mig=gpu.mig_instances[0])
    set_mig(SPEC, "0", ["2g.12gb"])
    messages: list[str] = []
    with pytest.raises(InUse):
        wait(host, enter(host, GIB, on=[device], client=True), [device], 5.0, messages)
    assert messages == ["waiting for 1.0 GiB: MIG 1g.6gb of GPU 0 is gone"]


@pytest.mark.parametrize(("user", "claimant", "others"), [("nobody", 1, 12 * GIB), ("nobody", 0, 0), (None, 0, 0)])
def test_only_processes_of_a_claims_own_user_belong_to_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, user: str | None, claimant: int, others: int
) -> None:
    """A claim that names the parent of somebody else's process must not hide that one's memory; but root starts them as others."""
    pid = add_process(SPEC, memory_bytes=12 * GIB, user=user)
    monkeypatch.setattr(type(host.processes), "parent", lambda _, child: os.getpid() if child == pid else None)
    hold(host, 1 * GIB, devices(host)[0])
    listed = [
        replace(reservation, claim=replace(reservation.claim, uid=claimant)) for reservation in reservations(host) or []
    ]
    line = line_of(host, devices(host)[0], listed)
    assert others <= line.others_bytes < others + GIB
    assert line.room.memory_bytes - line.free_bytes >= 12 * GIB


def test_a_reservation_that_is_not_used_lapses(host: Host) -> None:
    hold(host, 10 * GIB, devices(host)[0])
    (job,) = reservations(host) or []
    for age, reserved in ((0, 10 * GIB), (ledger.LAPSE_SECONDS + 5, 0)):
        untouched = replace(job, claim=replace(job.claim, touched_at=time.time() - age))
        line = line_of(host, devices(host)[0], [untouched])
        assert line.reserved_bytes == reserved


def test_a_users_limit_bounds_what_its_reservations_count_for(host: Host) -> None:
    for _ in range(2):
        hold(host, 8 * GIB, devices(host)[0])
    line = line_of(host, devices(host)[0], reservations(host) or [], limits=UserLimits({os.geteuid(): 10 * GIB}))
    assert line.room.memory_bytes - line.free_bytes == 8 * GIB


@pytest.mark.parametrize(
    "facts",
    [
        ["want x 0 GPU-1"],
        ["want -5 0 GPU-1"],
        ["want 99999999999999999999 0 GPU-1"],
        ["want 1152921504606846976 0 GPU-1"],
        ["want 5 7 GPU-1"],
        ["want 5 0"],
        ["name x"],
        ["want 5 0 GPU-1", "sure GPU-2"],
        ["want 5 0 GPU-1", "fix GPU-2"],
        ["want 5 0 GPU-1,GPU-2", "gpus 2", "fix GPU-1"],
        *(["want 5 0 GPU-1", f"gpus {count}"] for count in ("x", "0", "2", "0001")),
        [],
    ],
)
def test_a_claim_that_we_would_not_write_counts_for_nothing(host: Host, facts: list[str]) -> None:
    enter(host, 1)
    path = files(host)[0]
    head = path.read_text().split("fact ")[0]
    path.write_text(head + "".join(f"fact {fact}\n" for fact in facts) + "ticket 5\n")
    assert reservations(host) == []


def test_a_job_may_name_all_instances_of_a_large_host(host: Host) -> None:
    keys = tuple(f"MIG-{number:08x}-0000-0000-0000-000000000000" for number in range(16 * 7))
    Place(host, Request(memory_bytes=GIB, keys=keys, client=True, name="n" * 64))
    (reservation,) = reservations(host) or []
    assert reservation.keys == keys


def test_a_fact_that_nobody_could_read_is_not_written(host: Host) -> None:
    for name in ("a b!", "a\nticket 1", "x" * 9000):
        with pytest.raises(OperationFailed):
            Place(host, Request(memory_bytes=GIB, keys=("GPU-1",), client=False, name=name))
    assert files(host) == []


def test_the_first_want_counts(host: Host) -> None:
    place = enter(host, 2 * GIB)
    place.claim.add_fact("want 5 0 GPU-1")
    (reservation,) = reservations(host) or []
    assert reservation.memory_bytes == 2 * GIB


def test_only_so_many_waiting_jobs_of_a_user_count_and_their_order_holds(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MOST_WAITING_OF_ONE_USER", 3)
    blockers = [hold(host, 20 * GIB, device) for device in devices(host)]
    *first, fourth, last = [enter(host, 20 * GIB) for _ in range(5)]
    assert sum(job.waits for job in reservations(host) or []) == 3
    assert not take(host, last)
    for job in [*first, blockers[0]]:
        job.leave()
    assert not take(host, last)
    assert take(host, fourth)


def test_a_gpu_on_which_the_user_may_reserve_no_more_is_last(host: Host) -> None:
    first, second = devices(host)
    hold(host, 10 * GIB, first)

    def order(limits: UserLimits, size: int) -> list[int]:
        ranked = best_first(
            host, devices(host), lambda device: ["web"] if device.uuid == second.uuid else [], limits, memory_bytes=size
        )
        return [device.gpu.index for device, _ in ranked]

    limits = UserLimits({os.geteuid(): 15 * GIB})
    assert order(limits, 5 * GIB) == order(UserLimits(), 6 * GIB) == [0, 1]
    assert order(limits, 6 * GIB) == [1, 0]


def test_a_gpu_without_room_for_the_job_is_last(host: Host) -> None:
    full, free = devices(host)
    hold(host, 20 * GIB, full)

    def order(size: int | None) -> list[int]:
        ranked = best_first(
            host, [full, free], lambda at: ["web"] if at.uuid == free.uuid else [], UserLimits(), memory_bytes=size
        )
        assert "production job 'web' runs there" in dict(ranked)[free]
        return [device.gpu.index for device, _ in ranked]

    # With room on both the GPU without a production job is best.
    assert order(GIB) == [0, 1]
    assert order(10 * GIB) == [1, 0]
    # A job of unknown size is admitted only where nothing else is.
    assert order(None) == [1, 0]
    production = enter(host, GIB)
    production.take(free.uuid)
    assert order(None) == [0, 1]


def test_a_try_reads_again_only_the_devices_that_it_takes(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = ledger.line_of

    def counted(host: Host, device: Device, *jobs: Any, **options: Any) -> Line | None:
        read.append(device.uuid)
        return original(host, device, *jobs, **options)

    monkeypatch.setattr(ledger, "line_of", counted)
    place = enter(host, GIB)
    assert take(host, place)
    keys = [device.uuid for device in devices(host)]
    assert read == [*keys, *place.held, *place.held]


@pytest.mark.parametrize(
    ("user", "name", "shown"),
    [
        (None, "python3", "it uses 50 %, those there 30 %"),
        # Others' profiles cannot be read, whatever their processes call themselves.
        ("nobody", "python3", "it uses 50 %, those there 40 %"),
        # What a server of MPS does is the work of its clients.
        (None, SERVER_PROGRAM, "it is idle"),
    ],
)
def test_only_own_processes_are_known_by_their_command(host: Host, user: str | None, name: str, shown: str) -> None:
    first, second = devices(host)
    for command, use in ((("python", "web.py"), 30.0), (("python", "mine.py"), 50.0)):
        keep_profile(host, first, command, Profile(use_percent=use))
    add_process(SPEC, user=user, name=name, command_line=("python", "web.py"), sm_percent=40)
    ordered = best_first(host, devices(host), lambda _: [], UserLimits(), command=("python", "mine.py"))
    (full,) = [reason for device, reason in ordered if device.gpu.index == first.gpu.index]
    assert f"; {shown}" in full
    (empty,) = [reason for device, reason in ordered if device.gpu.index == second.gpu.index]
    assert "it is idle" in empty


def test_a_job_that_has_just_got_its_place_counts_as_one_that_fills_the_gpu(host: Host) -> None:
    first, second = devices(host)
    place = hold(host, GIB, first)
    add_process(SPEC, gpu="1", memory_bytes=4 * GIB, sm_percent=40)
    ordered = best_first(host, devices(host), lambda _: [], UserLimits())
    assert [device.gpu.index for device, _ in ordered] == [second.gpu.index, first.gpu.index]
    assert "its load is unknown" in ordered[1][1]
    # It is not its own neighbour.
    assert "it is idle" in best_first(host, [first], lambda _: [], UserLimits(), own_place=place)[0][1]


def test_a_job_that_has_waited_takes_the_gpu_that_is_best_now(host: Host) -> None:
    blockers = [hold(host, 20 * GIB, device) for device in devices(host)]
    asked: list[int] = []

    def best(some: Sequence[Device]) -> list[Device]:
        asked.append(len(some))
        return list(some)[::-1]

    def sleep(_: float) -> None:
        for place in blockers:
            place.leave()

    place = enter(host, 10 * GIB)
    devices_taken = wait_for_room(host, place, devices(host), None, UserLimits(), telling([]), best=best, sleep=sleep)
    assert [device.gpu.index for device in devices_taken] == [1]
    assert asked == [2]
    place.leave()
    # One that need not wait has just been given the order.
    place = enter(host, 10 * GIB)
    assert wait_for_room(host, place, devices(host), None, UserLimits(), telling([]), best=best)[0].gpu.index == 0


def test_a_job_that_may_fit_where_no_program_can_come_now_is_not_refused(host: Host) -> None:
    """A larger GPU that one program has alone: when that has ended, the job fits there."""
    first, second = devices(host)
    add_process(SPEC, memory_bytes=GIB, name="alone")
    host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    small = replace(second, gpu=replace(second.gpu, memory_total_bytes=4 * GIB))
    with pytest.MonkeyPatch.context() as patch:
        now = (host.nvml.gpu(0), small.gpu)
        patch.setattr(type(host.nvml), "gpu", lambda _, index: now[index])
        with fails(InUse, "no_room"):
            wait(host, enter(host, 10 * GIB), (first, second), 5.0, [])


def test_full_servers_and_jobs_before_it_are_why_there_is_no_room(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory: to say only that would be a riddle."""
    monkeypatch.setattr("gpushare.memory.room.client_limit", lambda *_: 1)
    first = devices(host)[:1]
    running, _before, place = (enter(host, GIB, on=first, client=True) for _ in range(3))
    running.take(first[0].uuid)
    messages: list[str] = []
    with pytest.raises(InUse) as caught:
        wait(host, place, first, 0.05, messages)
    reason = "GPU 0 has 22.5 GiB free to reserve, but has 1 client of MPS and takes no more"
    assert messages == [
        f"waiting for 1.0 GiB, 1 job before it: {reason}; the rest is held by process {os.getpid()} (1.0 GiB)"
    ]
    assert caught.value.message == f"no room for 1.0 GiB within 0.05 s: {reason}; 1 job waited before it"


def test_a_job_that_waits_for_long_says_what_is_new(host: Host) -> None:
    first = devices(host)[:1]
    running = [hold(host, 10 * GIB, first[0]) for _ in range(2)]
    messages: list[str] = []

    class Strides(Clock):
        """It looks every second: in large steps."""

        def sleep(self, seconds: float) -> None:
            super().sleep(max(seconds, 20.0))
            if len(running) == 2 and self.now >= 600:
                running.pop().leave()

    with pytest.raises(InUse):
        wait(host, enter(host, 20 * GIB), first, 900.0, messages, clock=Strides())
    held = f"process {os.getpid()} (10.0 GiB)"
    assert messages == [
        f"waiting for 20.0 GiB: GPU 0 has 3.5 GiB free to reserve; the rest is held by {held}, {held}",
        f"waiting for 20.0 GiB: GPU 0 has 13.5 GiB free to reserve; the rest is held by {held}",
    ]


def test_a_driver_that_is_loaded_again_ends_no_wait(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    place, among, messages = enter(host, 10 * GIB), devices(host), list[str]()
    clock, restarted = Clock(), list[float]()
    real = host.nvml.gpu

    def gpu(_: object, index: int) -> Gpu:
        if not restarted:
            raise DriverNotLoaded("the NVIDIA driver is not loaded", "load it: sudo modprobe nvidia")
        return real(index)

    monkeypatch.setattr(type(host.nvml), "gpu", gpu)
    monkeypatch.setattr(type(host.nvml), "restart", lambda _: restarted.append(clock.now) if clock.now > 60 else None)
    wait(host, place, among, None, messages, clock=clock)
    assert messages == ["waiting for 10.0 GiB: the NVIDIA driver is not loaded"]
    assert len(restarted) == 1


def test_why_a_gpu_cannot_be_used_is_said(host: Host) -> None:
    pid = add_process(SPEC, memory_bytes=GIB, name="alone")
    host.nvml.set_compute_mode(0, ComputeMode.EXCLUSIVE_PROCESS)
    host.nvml.set_compute_mode(1, ComputeMode.PROHIBITED)
    messages: list[str] = []
    with pytest.raises(InUse) as caught:
        wait(host, enter(host, 10 * GIB), devices(host), 5.0, messages)
    reason = (
        f"GPU 0 is in compute mode exclusive-process, and process {pid} has it; GPU 1 is in compute mode prohibited"
    )
    assert messages == [f"waiting for 10.0 GiB: {reason}"]
    assert caught.value.message == f"no room for 10.0 GiB within 5 s: {reason}"
    # One without room is named before them.
    host.nvml.set_compute_mode(0, ComputeMode.DEFAULT)
    hold(host, 20 * GIB, devices(host)[0])
    why = outlook(host, devices(host), enter(host, 10 * GIB).request, UserLimits()).why
    assert "GPU 0 has 2.5 GiB free to reserve; " in why
    assert why.endswith("; GPU 1 is in compute mode prohibited")


def test_waiting_ends_in_time_and_leaves_the_line(host: Host) -> None:
    for device in devices(host):
        hold(host, 20 * GIB, device)
    clock, messages = Clock(), list[str]()
    with fails(InUse, "no_room"):
        wait(host, enter(host, 10 * GIB), devices(host), 3.0, messages, clock=clock)
    assert clock.now == pytest.approx(3.0, abs=0.02)
    assert len(messages) == 1
    assert messages[0].startswith("waiting for 10.0 GiB")
    assert len(reservations(host) or []) == 2


# -- production and opportunistic jobs that wait -------------------------------------------------------


def waiting_job(number: int, uid: int, role: str, keys: tuple[str, ...], *, waits: bool = True) -> Reservation:
    claim = Claim(
        path=Path(f"/{number}"), key="memory", uid=uid, processes=(Identity(number + 2, 1),), kept=True, ticket=number
    )
    return Reservation(
        claim=claim,
        name=role,
        memory_bytes=GIB,
        keys=keys,
        client=False,
        held=() if waits else keys[:1],
        sure=not waits,
        production=role == "production",
        opportunistic=role == "opportunistic",
    )


jobs = some.lists(
    some.tuples(
        some.sampled_from([0, 1, 2]),
        some.sampled_from(["plain", "production", "opportunistic"]),
        some.sampled_from([("a",), ("b",), ("a", "b")]),
        some.booleans(),
    ),
    max_size=8,
).map(lambda all_: [waiting_job(number, *each[:3], waits=each[3]) for number, each in enumerate(all_)])


def test_two_farms_and_the_jobs_between_them_take_turns(host: Host) -> None:
    first, second, job = (enter(host, 20 * GIB, on=devices(host)[:1]) for _ in range(3))
    assert [take(host, place) for place in (second, job, first)] == [False, False, True]
    # The first one has started a copy, and comes again for the next one: behind those that came meanwhile.
    again = enter(host, 20 * GIB, on=devices(host)[:1])
    first.leave()
    assert [take(host, place) for place in (again, job, second)] == [False, False, True]
    second.leave()
    assert [take(host, place) for place in (again, job)] == [False, True]
    job.leave()
    assert take(host, again)


@given(jobs)
def test_production_goes_first_without_delay_for_anybody_else(line: list[Reservation]) -> None:
    order = line_order(line)
    assert sorted(order, key=lambda job: job.id) == sorted(line, key=lambda job: job.id)
    # All but opportunistic jobs keep their order, and nobody new is before them.
    still = [each for each in order if not each.opportunistic]
    assert still == [each for each in line if not each.opportunistic]
    for each in still:
        assert set(map(id, order[: order.index(each)])) <= set(map(id, line[: line.index(each)]))
    for each in (job for job in line if job.opportunistic and job.waits):
        after = order[order.index(each) + 1 :]
        # Nobody that one could spare waits behind it.
        assert not any(
            other.production
            and other.waits
            and other.claim.uid in {0, each.claim.uid}
            and set(other.keys) & set(each.keys)
            for other in after
        )
        before, now = line[: line.index(each)], order[: order.index(each)]
        own = [other for other in line if other.production and other.waits and other.claim.uid in {0, each.claim.uid}]
        if not own:
            # What others call production moves nothing: only opportunistic jobs that moved are not before it any more.
            assert set(map(id, now)) <= set(map(id, before))


def test_an_opportunistic_job_lets_production_take_the_room_first(host: Host) -> None:
    first = devices(host)[:1]
    blocker = hold(host, 20 * GIB, first[0])
    batch = enter(host, 20 * GIB, on=first, opportunistic=True)
    assert not take(host, batch)
    plain = enter(host, 20 * GIB, on=first)
    web = enter(host, 20 * GIB, on=first, production=True)
    assert not take(host, plain)
    assert not take(host, web)
    blocker.leave()
    # The one in between is not delayed by production, and not by the one that stepped back.
    assert not take(host, batch)
    assert not take(host, web)
    assert take(host, plain)
    plain.leave()
    assert not take(host, batch)
    assert take(host, web)
    web.leave()
    assert take(host, batch)


def test_a_dry_run_of_production_goes_before_opportunistic_jobs(host: Host) -> None:
    key = devices(host)[0].uuid
    asked = Request(memory_bytes=20 * GIB, keys=(key,), client=False)
    Place(host, replace(asked, opportunistic=True))
    listed = reservations(host) or []
    assert waiting_before(listed, asked, os.geteuid()) == listed
    assert waiting_before(listed, replace(asked, production=True), os.geteuid()) == []
    assert waiting_before(listed, replace(asked, production=True), 12345) == listed


# -- limits of users ---------------------------------------------------------------------------------


def limited(size: int | None) -> UserLimits:
    return UserLimits({os.geteuid(): size} if size is not None else {}, 10 * GIB)


def test_a_limit_holds_a_job_back_until_the_users_other_jobs_have_ended(host: Host) -> None:
    first, second = enter(host, 8 * GIB), enter(host, 6 * GIB)
    limits = limited(10 * GIB)
    assert first.try_to_take(devices(host)[:1], {}, limits)
    assert not second.try_to_take(devices(host)[:1], {}, limits)
    # The limit is for each GPU.
    assert second.try_to_take(devices(host), {}, limits)
    third = enter(host, 6 * GIB)
    assert not third.try_to_take(devices(host), {}, limits)
    # A job that comes back is held back too, but it may return alone even if the limit was lowered meanwhile.
    assert not third.try_to_take(devices(host), {}, limits.at_least(os.geteuid(), 6 * GIB))
    second.leave()
    assert not third.try_to_take(devices(host), {}, limited(5 * GIB))
    assert third.try_to_take(devices(host), {}, limited(5 * GIB).at_least(os.geteuid(), 6 * GIB))


def test_two_of_one_user_do_not_exceed_the_limit_at_the_same_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    only, limits = devices(host)[:1], limited(10 * GIB)
    asked = Request(memory_bytes=6 * GIB, keys=(only[0].uuid,), client=False)
    batch = Place(host, replace(asked, opportunistic=True))
    tell, came = HeldClaim.add_fact, []

    def add_late(claim: HeldClaim, text: str) -> None:
        if not came and claim is batch.claim:
            came.append(Place(host, replace(asked, production=True)))
            assert came[0].try_to_take(only, {}, limits)
        tell(claim, text)

    monkeypatch.setattr(HeldClaim, "add_fact", add_late)
    # Production came between its look and its claim.
    assert not batch.try_to_take(only, {}, limits)
    came[0].leave()
    assert batch.try_to_take(only, {}, limits)


def test_a_job_above_the_limit_alone_is_refused(host: Host) -> None:
    for size in (12 * GIB, None):
        place = enter(host, size)
        with fails(NoPermission, "over_user_limit", message="you may reserve 10.0 GiB on a GPU"):
            wait_for_room(host, place, devices(host), None, limited(10 * GIB), telling([]))
    assert files(host) == []


def test_a_waiting_job_says_that_its_limit_holds_it_back(host: Host) -> None:
    enter(host, 8 * GIB).take(devices(host)[0].uuid)
    messages: list[str] = []
    with pytest.raises(InUse):
        wait_for_room(host, enter(host, 6 * GIB), devices(host)[:1], 0.1, limited(10 * GIB), telling(messages))
    assert any("your jobs have reserved 8.0 GiB of the 10.0 GiB" in each for each in messages)


def test_the_limit_for_all_is_not_for_root() -> None:
    limits = UserLimits({1000: GIB}, 2 * GIB)
    assert [limits.get(uid) for uid in (0, 1000, 1001)] == [None, GIB, 2 * GIB]
    assert UserLimits({0: GIB}, None).get(0) == GIB


@pytest.mark.parametrize("limits", [UserLimits({}, 2 * GIB), UserLimits({OTHER: 2 * GIB})])
def test_what_others_reserve_beyond_their_limit_keeps_nobody_out(host: Host, limits: UserLimits) -> None:
    """Also by a limit for all users, which names none."""
    hold(host, 20 * GIB, devices(host)[0])
    (job,) = reservations(host) or []
    forged = replace(job, claim=replace(job.claim, uid=OTHER))
    line = line_of(host, devices(host)[0], [forged], limits=limits)
    assert (line.reserved_bytes, line.beyond) == (0, {job.id})


@contextlib.contextmanager
def planted(host: Host, *lines: str, name: int = 0xF) -> Iterator[Path]:
    """Plant the claim of a process that lives, as its user may write it."""
    first = enter(host, GIB)
    head = files(host)[0].read_text().split("fact ")[0]
    first.leave()
    path = claim_directory(host) / f"gpushare-memory-{name:016x}"
    path.write_text(head + "".join(f"{line}\n" for line in lines))
    try:
        yield path
    finally:
        path.unlink()


def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what lets the ledger's clock go on."""
    clock = Clock(1000.0)
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock.sleep


def test_a_job_waits_for_the_ticket_of_one_that_came_first(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both look, each without the other, and both take the same memory."""
    clocked(monkeypatch)
    key = devices(host)[0].uuid
    with planted(host, f"fact want {20 * GIB} 0 {key}") as path:
        late = enter(host, 20 * GIB, on=devices(host)[:1])

        def draw(_: float) -> None:
            if "ticket" not in path.read_text():
                with path.open("a") as file:
                    file.write("ticket 1\n")

        monkeypatch.setattr(time, "sleep", draw)
        assert not take(host, late)
    assert take(host, late)


def test_a_claim_that_always_chooses_keeps_nobody_waiting(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch)
    keys = ",".join(device.uuid for device in devices(host))
    with planted(host, f"fact want 0 0 {keys}") as path:
        # Its owner may set this to any time, or touch it in a loop.
        os.utime(path, (2**33, 2**33))
        assert take(host, enter(host, 10 * GIB))


def test_nobody_comes_first_by_an_earlier_ticket(host: Host) -> None:
    keys = ",".join(gpu.uuid for gpu in devices(host))
    blocker, _ = (hold(host, size * GIB, device) for size, device in zip((24, 23), devices(host), strict=True))
    honest = enter(host, 20 * GIB)
    assert not take(host, honest)
    with planted(host, f"fact want {24 * GIB} 0 {keys}", "ticket 1"):
        blocker.leave()
        assert take(host, honest)


def test_a_ticket_that_is_drawn_late_is_a_late_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim can choose for days, and then say that it was there before all others."""
    clocked(monkeypatch)
    key = devices(host)[0].uuid
    blocker = hold(host, 20 * GIB, devices(host)[0])
    with planted(host, f"fact want {20 * GIB} 0 {key}") as path:
        honest = enter(host, 20 * GIB, on=devices(host)[:1])
        assert not take(host, honest)
        with path.open("a") as file:
            file.write("ticket 1\n")
        blocker.leave()
        assert take(host, honest)


def test_one_that_could_come_and_does_not_is_passed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting gpushare that was stopped (Ctrl-Z), or a file that only looks like one."""
    forward = clocked(monkeypatch)
    key = devices(host)[0].uuid
    with planted(host, f"fact want {20 * GIB} 0 {key}", "ticket 1"):
        honest = enter(host, 20 * GIB, on=devices(host)[:1])
        assert not take(host, honest)
        forward(ledger.PATIENCE_SECONDS / 2)
        assert not take(host, honest)
        forward(ledger.PATIENCE_SECONDS / 2)
        assert not take(host, honest)
        assert take(host, honest)


def test_all_jobs_of_a_user_that_do_not_come_share_one_patience(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 64 claims for the whole GPU, which are let in one after another, hold up each new job for ten minutes."""
    forward = clocked(monkeypatch)
    key = devices(host)[0].uuid
    with contextlib.ExitStack() as held:
        for number in range(1, 33):
            held.enter_context(planted(host, f"fact want - 0 {key}", f"ticket {number}", name=number))
        honest = enter(host, 20 * GIB, on=devices(host)[:1])
        for _ in range(6):
            assert not take(host, honest)
            forward(ledger.PATIENCE_SECONDS / 5)
        assert take(host, honest)


def test_a_user_whose_jobs_come_has_all_patience_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = clocked(monkeypatch)
    key = devices(host)[0].uuid
    with (
        planted(host, f"fact want - 0 {key}", "ticket 1", name=1) as first,
        planted(host, f"fact want - 0 {key}", "ticket 2", name=2),
    ):
        honest = enter(host, 20 * GIB, on=devices(host)[:1])
        for _ in range(4):
            assert not take(host, honest)
            forward(ledger.PATIENCE_SECONDS / 5)
        with first.open("a") as file:
            file.write(f"fact sure {key}\n")
        assert not take(host, honest)
        first.write_text("ended")
        for _ in range(4):
            assert not take(host, honest)
            forward(ledger.PATIENCE_SECONDS / 5)


def test_to_root_the_swap_of_a_user_moves_only_that_users_jobs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a forged record would free what another user has reserved."""
    key = devices(host)[0].uuid
    hold(host, 20 * GIB, devices(host)[0])
    me = identity_of(os.getpid())
    who = {"pid": me.pid, "started": me.started, "name": None, "uid": None}
    swap = Swap(**who, gpu_uuid=key, state=OUT, since=1.0, images=(Image(me.pid, me.started, GIB),))
    for keeper, counts in ((os.geteuid() + 1, 1), (None, 0), (0, 0)):
        kept = replace(swap, keeper_uid=keeper)
        monkeypatch.setattr("gpushare.memory.swapped.swaps", lambda _, kept=kept: [kept])
        monkeypatch.setattr(ledger, "has_records", lambda *_: True)
        assert len(reservations(host) or []) == counts


def test_a_waiting_job_that_is_stopped_holds_up_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z: until it continues, others pass it at once, even if its own turn may never come."""
    hold(host, 4 * GIB, devices(host)[0])
    large, small = (enter(host, size, on=devices(host)[:1]) for size in (None, 4 * GIB))
    assert not take(host, small)
    monkeypatch.setattr(ledger, "is_stopped", lambda pid: pid == os.getpid())
    assert waiting_before(reservations(host) or [], small.request, 0) == []
    assert waiting_jobs(host, [device.gpu for device in devices(host)], reservations(host) or [])[0].line.stopped
    assert take(host, small)
    monkeypatch.undo()
    assert not take(host, large)


def test_the_time_of_a_claim_cannot_be_in_the_future(host: Host) -> None:
    key = devices(host)[0].uuid
    with planted(host, f"fact want {20 * GIB} 0 {key}", "ticket 1", f"fact sure {key}") as path:
        os.utime(path, (2**33, 2**33))
        (reservation,) = reservations(host) or []
        assert reservation.claim.touched_at <= time.time()


def test_a_job_counts_with_what_it_holds_if_that_is_more_than_it_said(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = add_process(SPEC, memory_bytes=22 * GIB)
    monkeypatch.setattr(type(host.processes), "parent", lambda _, child: os.getpid() if child == pid else None)
    hold(host, 0, devices(host)[0])
    line = line_of(host, devices(host)[0], reservations(host) or [])
    assert line.room.memory_bytes - line.free_bytes >= 22 * GIB


def test_the_use_of_a_gpu_is_that_of_its_compute_processes(host: Host) -> None:
    add_process(SPEC, "0", graphics=True, sm_percent=50, name="Xorg")
    add_process(SPEC, "1", sm_percent=70)

    def use(device: Device, **facts: Any) -> float | None:
        line = line_of(host, replace(device, gpu=replace(device.gpu, **facts)), [])
        assert line is not None
        return _use_percent_of_jobs(host, line, {})

    assert [use(device) for device in devices(host)] == [0.0, 70.0]
    # One whose processes are unknown is not idle.
    for busy in (None, 40):
        assert use(devices(host)[0], processes=None, utilization_percent=busy) == busy


def test_a_job_would_not_start_while_the_ledger_cannot_be_read(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(memory_bytes=GIB, keys=tuple(device.uuid for device in devices(host)), client=False)
    assert outlook(host, devices(host), request, UserLimits()).starts_now
    monkeypatch.setattr(
        "gpushare.host.claims._claims_or_reason", lambda *_: "/run/lock cannot be read: Input/output error"
    )
    answer = outlook(host, devices(host), request, UserLimits())
    assert (answer.starts_now, answer.gpus) == (False, ())
    assert answer.why.startswith("now it would wait for 1.0 GiB: ")
    assert answer.why.endswith("; /run/lock cannot be read: Input/output error")


# -- what is told of who waits and who is refused -------------------------------------------------------------------------


def test_a_device_whose_use_is_unknown_has_no_line(host: Host) -> None:
    """It would count as empty."""
    device = devices(host)[0]
    assert line_of(host, device, []) is not None
    for unknown in ("memory_used_bytes", "memory_total_bytes"):
        assert line_of(host, replace(device, gpu=replace(device.gpu, **{unknown: None})), []) is None


def line_with(
    index: int,
    holders: Sequence[tuple[str, int]] = (),
    *,
    others: int = 0,
    clients: int | None = None,
    granted: int = 0,
) -> Line:
    """Return a device of 80 GiB with jobs of these names and sizes in GiB; each is a client of MPS."""
    jobs = [replace(waiting_job(number, 0, name, ("u",), waits=False)) for number, (name, _) in enumerate(holders)]
    return Line(
        device=Device(gpu=Gpu(index=index, uuid=f"GPU-{index}")),
        room=Room(memory_bytes=80 * GIB, clients=clients),
        running=tuple(Running(memory_bytes=size * GIB, client=True) for _, size in holders)
        + ((Running(memory_bytes=others),) if others else ()),
        holders=tuple(jobs),
        others_bytes=others,
        granted={os.geteuid(): granted * GIB},
    )


def under_limit(lines: Sequence[Line], limit: int | None) -> list[Line]:
    """Return these devices, on each of which this user may reserve so many bytes; None: any number."""
    return [
        replace(line, limits=UserLimits() if limit is None else UserLimits({os.geteuid(): limit})) for line in lines
    ]


def asking(size: int | None, **facts: Any) -> Request:
    """Return a request for this many GiB."""
    return Request(**{"memory_bytes": size and size * GIB, "keys": ("GPU-0", "GPU-1"), "client": False, **facts})


FULL = line_with(0, [("a", 10), ("b", 30), ("c", 20), ("d", 15)], others=5 * GIB)
STAYING = replace(FULL, holders=(replace(FULL.holders[0], stays=True), *FULL.holders[1:]))


@pytest.mark.parametrize(
    ("lines", "request_", "ahead", "limit", "reasons", "text"),
    [
        (
            [FULL],
            asking(8),
            0,
            None,
            [],
            "8.0 GiB: GPU 0 has 0 MiB free to reserve; the rest is held by 'b' (30.0 GiB), 'c' (20.0 GiB), 'd' (15.0 GiB) and 2 more",
        ),
        ([line_with(0, others=GIB)], asking(80), 0, None, [], "80.0 GiB: GPU 0 has 79.0 GiB free to reserve; the rest is held by other programs (1.0 GiB)"),
        ([line_with(0, others=GIB - MIB)], asking(80), 0, None, [], "80.0 GiB: GPU 0 has 79.0 GiB free to reserve"),
        (
            [FULL, line_with(1)],
            asking(90, count=2),
            1,
            None,
            ["GPU 2 is gone"],
            "90.0 GiB on each of 2 GPUs, 1 job before it: GPU 0 has 0 MiB free to reserve; the rest is held by 'b' (30.0 GiB) and 4 more; GPU 1 has 80.0 GiB free to reserve; GPU 2 is gone",
        ),
        ([STAYING], asking(8, production=True), 2, None, [], "8.0 GiB, 2 jobs before it: GPU 0 has 0 MiB free to reserve; the rest is held by 'b' (30.0 GiB), 'c' (20.0 GiB), 'd' (15.0 GiB) and 2 more; 'a' (process 2) was to leave the GPU for it, and cannot: see its output"),
        ([STAYING], asking(8), 2, None, [], "8.0 GiB, 2 jobs before it: GPU 0 has 0 MiB free to reserve; the rest is held by 'b' (30.0 GiB), 'c' (20.0 GiB), 'd' (15.0 GiB) and 2 more"),
        (
            [line_with(0, [("a", 1)], clients=1)],
            asking(None, client=True),
            0,
            None,
            [],
            "a GPU without other jobs: GPU 0 has 79.0 GiB free to reserve, but has 1 client of MPS and takes no more; the rest is held by 'a' (1.0 GiB)",
        ),
        ([line_with(0, [("a", 1)], clients=1)], asking(None, count=2), 0, None, [], "2 GPUs without other jobs: GPU 0 has 79.0 GiB free to reserve; the rest is held by 'a' (1.0 GiB)"),
        ([], asking(8), 3, None, [f"GPU {gpu} is gone" for gpu in range(4)], "8.0 GiB: GPU 0 is gone; GPU 1 is gone; GPU 2 is gone; GPU 3 is gone"),
        ([], asking(8), 0, None, [f"GPU {gpu} is gone" for gpu in range(5)], "8.0 GiB: GPU 0 is gone; GPU 1 is gone; GPU 2 is gone; GPU 3 is gone and 1 more"),
        ([line_with(0, granted=12)], asking(8), 0, 20 * GIB, [], "8.0 GiB: GPU 0 has 80.0 GiB free to reserve"),
        (
            [line_with(0, granted=14), line_with(1, granted=13)],
            asking(8),
            0,
            20 * GIB,
            [],
            "8.0 GiB: GPU 0 has 80.0 GiB free to reserve; GPU 1 has 80.0 GiB free to reserve; your jobs have reserved 13.0 GiB of the 20.0 GiB that you may have on a GPU",
        ),
        ([line_with(0, granted=14), line_with(1)], asking(8), 0, 20 * GIB, [], "8.0 GiB: GPU 0 has 80.0 GiB free to reserve; GPU 1 has 80.0 GiB free to reserve"),
    ],
)  # fmt: skip
def test_what_a_job_waits_for(
    lines: list[Line], request_: Request, ahead: int, limit: int | None, reasons: list[str], text: str
) -> None:
    assert _room_text(under_limit(lines, limit), request_, ahead, reasons) == text


@pytest.mark.parametrize(
    ("lines", "request_", "limit", "error"),
    [
        ([line_with(0)], asking(80), None, None),
        ([line_with(0)], asking(81), None, "the job needs 81.0 GiB, and 0 GPUs of 1 can have that even when empty"),
        ([line_with(0), line_with(1)], asking(80, count=2), None, None),
        ([line_with(0)], asking(80, count=2), None, "the job needs 80.0 GiB on each of 2 GPUs, and 1 GPU of 1 can have that even when empty"),
        ([line_with(0)], asking(20), 20 * GIB, None),
        ([line_with(0)], asking(21), 20 * GIB, "the job needs 21.0 GiB, and you may reserve 20.0 GiB on a GPU"),
        ([line_with(0)], asking(None), 80 * GIB, None),
        ([line_with(0)], asking(None), 79 * GIB, "the job needs a GPU without other jobs, and you may reserve 79.0 GiB on a GPU"),
        ([], asking(21), 20 * GIB, None),
    ],
)  # fmt: skip
def test_a_job_that_can_never_come_is_refused(
    lines: list[Line], request_: Request, limit: int | None, error: str | None
) -> None:
    lines = under_limit(lines, limit)
    if error is None:
        check_fits(lines, request_)
        return
    with pytest.raises((BadUsage, NoPermission)) as raised:
        check_fits(lines, request_)
    assert raised.value.message == error
    if "may reserve" not in error:
        # It may fit on a device that is not among these.
        check_fits(lines, request_, when_empty=False)


@pytest.mark.parametrize(
    ("lines", "request_", "seconds", "message", "hint"),
    [
        ([FULL], asking(8), 0.0, "no room for 8.0 GiB now: at most 0 MiB are free to reserve; 1 job waited before it", "wait for it: --wait, or --wait --timeout 10m; see"),
        ([FULL, line_with(1, [("a", 79)])], asking(None), 60.0, "no room for a job that needs a whole GPU within 1 min: at most 1.0 GiB are free to reserve;", "wait longer: --timeout TIME; see"),
        ([FULL], asking(None, count=2), 60.0, "no room for 2 GPUs without other jobs within", "wait longer"),
        ([line_with(0, [("a", 1)], clients=1)], asking(8, client=True), 0.0, "GPU 0 has 79.0 GiB free to reserve, but has 1 client of MPS and takes no more;", "wait for it"),
        ([line_with(0, granted=19)], asking(8), 0.0, "; your jobs have reserved 19.0 GiB of the 20.0 GiB that you may have on a GPU", "; or end one of your jobs: gpushare stop NAME; see"),
        ([], asking(8), 0.0, "no room for 8.0 GiB now: GPU 3 is gone; 1 job waited before it", "wait for it"),
    ],
)  # fmt: skip
def test_a_job_that_found_no_room(
    lines: list[Line], request_: Request, seconds: float, message: str, hint: str
) -> None:
    lines = under_limit(lines, 20 * GIB if lines and lines[0].granted[os.geteuid()] else None)
    error = _no_room_error(lines, request_, seconds, ["GPU 3 is gone"], 1)
    assert message in error.message
    assert hint in (error.hint or "")


def test_the_limit_of_a_user_counts_the_users_other_jobs() -> None:
    check_limit_now(under_limit([line_with(0, granted=12)], 20 * GIB), asking(8))
    check_limit_now([line_with(0, granted=13)], asking(8))
    with pytest.raises(InUse, match=r"no room for 9\.0 GiB now; your jobs have reserved 12\.0 GiB of the 20\.0 GiB"):
        check_limit_now(under_limit([line_with(0, granted=13), line_with(1, granted=12)], 20 * GIB), asking(9))
