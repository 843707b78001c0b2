"""Limits of MPS clients: the same values as options, in an environment, and after a change and its undo."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.model import MpsDaemon, Priority
from gpushare.base.selection import Device, select_one
from gpushare.base.units import GIB, MIB
from gpushare.mps.limits import LimitOptions, Limits
from tests.show.hosts import h100

limits = st.builds(
    Limits,
    threads_percent=st.none() | st.integers(1, 1000).map(lambda tenths: tenths / 10),
    memory_limit_bytes=st.none() | st.integers(1, 80 * 1024).map(lambda number: number * MIB),
    priority=st.none() | st.sampled_from(Priority),
)
changes = limits | limits.map(lambda one: replace(one, memory_limit_bytes=None, no_memory_limit=True))


def typed(options: list[str]) -> Limits:
    given = dict(zip(options[::2], options[1::2], strict=True))
    device: Device = select_one("0", (h100(0),))
    wanted = LimitOptions(given.get("--threads"), given.get("--memory"), given.get("--priority"), removable=True)
    return wanted.for_devices([device])[device.uuid]


@given(changes)
def test_the_options_give_the_same_limits(one: Limits) -> None:
    assert typed(one.options()) == one


def test_the_words_of_a_command_line() -> None:
    one = Limits(threads_percent=30.0, memory_limit_bytes=4 * GIB, priority=Priority.LOW)
    assert one.options() == ["--threads", "30", "--memory", "4G", "--priority", "low"]
    assert Limits(memory_limit_bytes=1500 * MIB).options() == ["--memory", "1500M"]
    assert Limits().explicit.options() == ["--threads", "100", "--memory", "none", "--priority", "normal"]


@given(limits)
def test_an_environment_gives_the_same_limits(one: Limits) -> None:
    assert Limits.in_environment(one.environment(), "GPU-1") == one


@pytest.mark.parametrize(
    ("written", "percent"), [("100", 100.0), ("0.5", 0.5), ("0", None), ("-1", None), ("100.5", None), ("x", None)]
)
def test_the_threads_of_an_environment(written: str, percent: float | None) -> None:
    environment = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": written}
    assert Limits.in_environment(environment, "GPU-1").threads_percent == percent


def test_what_cuda_ignores_is_no_limit() -> None:
    strange = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "nan",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=1G",
        "CUDA_MPS_CLIENT_PRIORITY": "7",
    }
    assert Limits.in_environment(strange, "GPU-1") == Limits()


@given(limits, changes)
def test_the_undo_of_a_change_brings_back_what_was(before: Limits, change: Limits) -> None:
    after = before.changed_by(change)
    assert after.changed_by(before.undo_of(change)).explicit == before.explicit
    if change == Limits():
        assert (after, before.undo_of(change)) == (before, Limits())


def test_the_defaults_of_a_daemon_are_no_limits() -> None:
    daemon = MpsDaemon(pid=7, ours=True, pipe_directory="/p", threads_percent=100.0, priority=Priority.NORMAL)
    assert Limits.of(daemon) == Limits()
    assert Limits.of(replace(daemon, threads_percent=99.0)) == Limits(threads_percent=99.0)
