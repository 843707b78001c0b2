"""How a GPU differs from its entry of a file: each thing is said once, with what is and what is wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpushare.base.model import ComputeMode, Gpu, Priority, TimeSlice, Way
from gpushare.base.units import GIB, MIB
from gpushare.gpu_models import find_model
from gpushare.hostfile.diff import diff_points, mps_points
from gpushare.hostfile.file import Entry, Exactness, InstanceWish, Match, MpsWish
from gpushare.hostfile.live import LiveGpu, LiveMps
from gpushare.hostfile.load import _same_model
from gpushare.mig.ledger import NamedInstance
from gpushare.mig.profile import Layout
from gpushare.mps.limits import Limits
from tests.mig.boards import instance

UUID = "GPU-0"
PROFILES = {profile.name: profile for profile in find_model("h100").profiles}
ALL = Match(by=Exactness.ALL)
SLICED = Entry(match=ALL, sharing=Way.TIMESLICE)


def live(*, gpu: dict[str, Any] | None = None, **changes: Any) -> LiveGpu:
    facts = {"mig_enabled": False, "compute_mode": ComputeMode.DEFAULT, **(gpu or {})}
    return LiveGpu(gpu=Gpu(index=0, uuid=UUID, **facts), **{"time_slice": TimeSlice.DEFAULT, **changes})


def with_mig(*there: tuple[str, int], mig_enabled: bool = True, **changes: Any) -> LiveGpu:
    made = tuple(instance(PROFILES[name], start) for name, start in there)
    made = tuple(
        replace(one, compute=tuple(replace(part, uuid=f"MIG-{one.start}") for part in one.compute)) for one in made
    )
    layout = Layout(gpu=0, uuid=UUID, profiles=tuple(PROFILES.values()), instances=made)
    return live(gpu={"mig_enabled": mig_enabled}, layout=layout, **changes)


def mig(*wishes: str | InstanceWish) -> Entry:
    found = tuple(InstanceWish(wish=request) if isinstance(request, str) else request for request in wishes)
    return Entry(match=ALL, sharing=Way.MIG, mig=found)


def mps_wish(users: tuple[str, ...] = (), *, exclusive: bool = False, **limits: Any) -> MpsWish:
    return MpsWish(limits=Limits(**limits), users=users, exclusive=exclusive)


def daemon(**wish: Any) -> LiveMps:
    return LiveMps(pid=7, wish=mps_wish(**wish))


def said(now: LiveGpu, entry: Entry) -> list[str]:
    return [str(point) for point in diff_points(now, entry)]


def test_what_is_as_the_file_has_it_is_not_said() -> None:
    assert said(live(), SLICED) == []
    assert said(with_mig(("3g.40gb", 0)), mig("3g.40gb")) == []
    mps = mps_wish(("a", "b"), threads_percent=30.0)
    entry = Entry(match=ALL, sharing=Way.MPS, mps=mps)
    assert said(live(daemons={UUID: LiveMps(pid=1, wish=replace(mps, users=("b", "a")))}), entry) == []
    # A daemon of a run is no part of what the host is set to.
    assert said(live(daemons={UUID: replace(daemon(threads_percent=10.0), transient=True)}), SLICED) == []


@pytest.mark.parametrize(
    ("found", "wanted", "point"),
    [
        ({"threads_percent": 30.0}, {"threads_percent": 25.0}, "MPS threads: 30 %; the file: 25 %"),
        ({}, {"threads_percent": 25.0}, "MPS threads: 100 %; the file: 25 %"),
        ({"memory_limit_bytes": 4 * GIB}, {"memory_limit_bytes": 4096 * MIB + MIB}, "MPS memory: 4G; the file: 4097M"),
        ({"memory_limit_bytes": 4 * GIB}, {}, "MPS memory: 4G; the file: none"),
        ({}, {"memory_limit_bytes": 4 * GIB}, "MPS memory: none; the file: 4G"),
        ({}, {"priority": Priority.LOW}, "MPS priority: normal; the file: low"),
        ({"users": ("alice",)}, {}, "MPS users: alice; the file: all users"),
        ({}, {"users": ("bob", "alice")}, "MPS users: all users; the file: alice, bob"),
        ({"exclusive": True}, {}, "MPS exclusive: true; the file: false"),
    ],
)
def test_each_limit_of_a_daemon(found: dict[str, Any], wanted: dict[str, Any], point: str) -> None:
    assert [str(request) for request in mps_points("MPS", daemon(**found), mps_wish(**wanted))] == [point]
    assert list(mps_points("MPS", daemon(**wanted), mps_wish(**wanted))) == []


def test_a_daemon_that_is_not_there_too_many_or_does_not_answer() -> None:
    wish = mps_wish(threads_percent=25.0, memory_limit_bytes=4 * GIB, users=("alice",), exclusive=True)
    text = "a daemon, threads 25 %, memory 4.0 GiB, for alice, no programs outside it"
    (missing,) = mps_points("MPS", None, wish)
    assert (missing.found, missing.wanted) == (None, text)
    (extra,) = mps_points("MPS", LiveMps(pid=1, wish=wish), None)
    assert (extra.found, extra.wanted) == (text, None)
    for error, shown in ((None, "it does not answer"), ("it is dead", "it is dead")):
        silent = LiveMps(pid=1, wish=None, error=error)
        (point,) = mps_points("MPS", silent, wish)
        assert (point.found, point.wanted) == (shown, text)
        (point,) = mps_points("MPS", silent, None)
        assert (point.found, point.wanted) == (shown, None)
    assert list(mps_points("MPS", None, None)) == []


def test_a_daemon_that_gpushare_did_not_start_is_said() -> None:
    now = live(foreign=("PID 9 in /tmp/nvidia-mps",))
    assert said(now, SLICED) == ["MPS: PID 9 in /tmp/nvidia-mps; the file: none"]
    wanted = Entry(match=ALL, sharing=Way.MPS, mps=MpsWish())
    assert said(now, wanted)[0] == "MPS: PID 9 in /tmp/nvidia-mps; the file: a daemon of gpushare"


@pytest.mark.parametrize(
    ("facts", "entry", "points"),
    [
        ({"mig_enabled": True}, SLICED, ["MIG: on; the file: off"]),
        ({"mig_enabled": False}, mig("3g.40gb"), ["MIG: off; the file: on"]),
        ({"mig_enabled": None}, mig("3g.40gb"), ["MIG: not there; the file: on"]),
        ({"mig_enabled": None}, SLICED, []),
        ({"mig_enabled": False, "mig_pending": True}, SLICED, ["MIG: on is pending; the file: off"]),
        ({"mig_enabled": False, "mig_pending": False}, SLICED, []),
        ({"mig_enabled": True, "mig_pending": False}, mig("3g.40gb"), ["MIG: off is pending; the file: on"]),
        ({"mig_enabled": True, "mig_pending": True}, mig("3g.40gb"), []),
    ],
)
def test_the_mode_and_the_one_that_is_pending(facts: dict[str, Any], entry: Entry, points: list[str]) -> None:
    assert said(live(gpu=facts), entry) == points


@pytest.mark.parametrize(
    ("mode", "sharing", "point"),
    [
        (ComputeMode.EXCLUSIVE_PROCESS, Way.TIMESLICE, True),
        (ComputeMode.PROHIBITED, Way.TIMESLICE, True),
        (None, Way.TIMESLICE, False),
        (ComputeMode.DEFAULT, Way.EXCLUSIVE, True),
        (None, Way.EXCLUSIVE, True),
        (ComputeMode.EXCLUSIVE_PROCESS, Way.EXCLUSIVE, False),
    ],
)
def test_the_compute_mode(mode: ComputeMode | None, sharing: Way, point: bool) -> None:
    wanted = ComputeMode.EXCLUSIVE_PROCESS if sharing is Way.EXCLUSIVE else ComputeMode.DEFAULT
    shown = "unknown" if mode is None else mode.title
    made = said(live(gpu={"compute_mode": mode}), Entry(match=ALL, sharing=sharing))
    assert made == ([f"compute mode: {shown}; the file: {wanted.title}"] if point else [])


def test_the_compute_mode_of_a_daemon_that_is_to_be_alone() -> None:
    wish = MpsWish(exclusive=True)
    entry = Entry(match=ALL, sharing=Way.MPS, mps=wish)
    now = live(daemons={UUID: LiveMps(pid=1, wish=wish)})
    assert [one.split(":")[0] for one in said(now, entry)] == ["compute mode"]
    alone = replace(now, gpu=Gpu(index=0, uuid=UUID, mig_enabled=False, compute_mode=ComputeMode.EXCLUSIVE_PROCESS))
    assert said(alone, entry) == []


def test_a_divided_gpu_and_one_that_is_to_be_have_no_compute_mode() -> None:
    there = with_mig(("3g.40gb", 0))
    there = replace(there, gpu=Gpu(index=0, uuid=UUID, mig_enabled=True, compute_mode=ComputeMode.EXCLUSIVE_PROCESS))
    assert said(there, mig("3g.40gb")) == []
    assert said(there, SLICED) == ["MIG: on; the file: off", "MIG devices: 3g.40gb:0; the file: none"]
    off = live(gpu={"compute_mode": ComputeMode.EXCLUSIVE_PROCESS})
    assert said(off, mig("3g.40gb")) == ["MIG: off; the file: on"]


@pytest.mark.parametrize(
    ("now", "wanted", "has", "point"),
    [
        (TimeSlice.DEFAULT, TimeSlice.LONG, True, "time-slice: default; the file: long"),
        (None, TimeSlice.LONG, True, "time-slice: unknown; the file: long"),
        (None, TimeSlice.LONG, False, "time-slice: unknown; the file: long"),
        (None, TimeSlice.DEFAULT, False, None),
        (None, TimeSlice.DEFAULT, True, "time-slice: unknown; the file: default"),
        (TimeSlice.LONG, TimeSlice.LONG, True, None),
        (TimeSlice.LONG, None, True, None),
    ],
)
def test_the_time_slice(now: TimeSlice | None, wanted: TimeSlice | None, has: bool, point: str | None) -> None:
    made = said(live(time_slice=now, has_time_slice=has), replace(SLICED, time_slice=wanted))
    assert made == ([] if point is None else [point])


def test_mig_devices_that_are_missing_or_too_many() -> None:
    assert said(with_mig(("3g.40gb", 0)), mig("1g.10gb*2")) == [
        "MIG devices: none; the file: 1g.10gb*2",
        "MIG devices: 3g.40gb:0; the file: none",
    ]


@pytest.mark.parametrize("layout", [None, Layout(gpu=0, profiles=())])
def test_a_driver_that_lists_no_profiles_is_not_asked_for_them(layout: Layout | None) -> None:
    assert said(live(layout=layout), mig("3g.40gb")) == ["MIG: off; the file: on"]


def test_daemons_of_mig_devices_are_compared_each_with_its_own() -> None:
    there = (("3g.40gb", 0), ("3g.40gb", 4))
    wish = mig(InstanceWish(wish="3g.40gb:0", mps=mps_wish(threads_percent=50.0)), "3g.40gb:4")
    assert said(with_mig(*there), wish) == ["MPS of 3g.40gb:0: none; the file: a daemon, threads 50 %"]
    now = with_mig(*there, daemons={"MIG-0": daemon(threads_percent=50.0), "MIG-4": daemon()})
    assert said(now, wish) == ["MPS of 3g.40gb:4: a daemon; the file: none"]


def test_a_daemon_in_a_device_that_the_file_has_not_is_said() -> None:
    now = with_mig(("3g.40gb", 0), ("1g.10gb", 4), daemons={"MIG-4": daemon()})
    assert said(now, mig("3g.40gb:0"))[1:] == ["MPS of 1g.10gb:4: a daemon; the file: none"]


def test_names_and_their_users() -> None:
    named = mig(InstanceWish(wish="3g.40gb:0", name="train", users=("alice",)))
    there = [("3g.40gb", 0)]
    assert said(with_mig(*there), named) == [
        "name train: none; the file: 3g.40gb:0",
        "users of train: all users; the file: alice",
    ]
    right = NamedInstance(gpu_uuid=UUID, name="train", profile="3g.40gb", start=0, users=("alice",))
    assert said(with_mig(*there, names=(right,)), named) == []
    assert said(with_mig(*there, names=(replace(right, users=("bob",)),)), named) == [
        "users of train: bob; the file: alice"
    ]
    assert said(with_mig(*there, names=(right,), open=frozenset({"train"})), named) == [
        "users of train: not in force; the file: alice"
    ]
    bare = mig("3g.40gb:0")
    assert said(with_mig(*there, names=(right,)), bare) == ["name train: 3g.40gb:0; the file: none"]
    # The file wants the name on another GPU.
    (point,) = diff_points(with_mig(*there, names=(right,)), bare, {0: bare, 7: named})
    assert str(point) == "name train: 3g.40gb:0; the file: on GPU 7"


def test_a_name_whose_device_is_missing_is_not_said_to_be_absent_from_the_file() -> None:
    named = mig(InstanceWish(wish="3g.40gb:4", name="train"), InstanceWish(wish="2g.20gb", name="eval"))
    elsewhere = NamedInstance(gpu_uuid=UUID, name="train", profile="1g.10gb", start=0)
    assert said(with_mig(("1g.10gb", 0), names=(elsewhere,)), named) == [
        "MIG devices: none; the file: 3g.40gb:4",
        "MIG devices: none; the file: 2g.20gb",
        "MIG devices: 1g.10gb:0; the file: none",
        "name eval: none; the file: 2g.20gb",
        "name train: 1g.10gb:0; the file: 3g.40gb:4",
    ]


@pytest.mark.parametrize(
    ("written", "name", "same"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA  h100 80gb hbm3", "NVIDIA H100 80GB HBM3", True),
        ("h200", "NVIDIA H100 80GB HBM3", False),
        # Of models that are not in the catalogue.
        ("Tesla  x9", "Tesla X9", True),
        ("Tesla X8", "Tesla X9", False),
        ("Tesla X9", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_a_model_in_a_file_is_that_of_a_gpu(written: str, name: str, same: bool) -> None:
    assert _same_model(written, name) is same
