"""The vocabulary, and the way of sharing in force."""

from __future__ import annotations

import itertools

import pytest

from gpushare.base.model import (
    ComputeMode,
    Gpu,
    GpuProcess,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Priority,
    TimeSlice,
    Way,
    sharing_now,
    way_in_force,
)

MPS_PROCESS = GpuProcess(pid=9, mps=True)


def daemon(
    gpu_index: int | None = 0,
    *,
    more: tuple[int, ...] = (),
    error: str | None = None,
    pid: int | None = 1,
    pipe: str | None = "/p",
) -> MpsDaemon:
    return MpsDaemon(pid=pid, ours=False, pipe_directory=pipe, gpu_index=gpu_index, gpu_indexes=more, error=error)


def gpu(
    mode: ComputeMode | None = ComputeMode.DEFAULT,
    *,
    mig: bool | None = False,
    error: str | None = None,
    processes: tuple[GpuProcess, ...] | None = None,
) -> Gpu:
    return Gpu(index=0, compute_mode=mode, mig_enabled=mig, error=error, processes=processes)


@pytest.mark.parametrize(
    ("shown", "daemons", "expected"),
    [
        (gpu(), (), Way.TIMESLICE),
        (gpu(mig=None), (), Way.TIMESLICE),
        (gpu(), (daemon(),), Way.MPS),
        (gpu(), (daemon(None, more=(0, 1)),), Way.MPS),
        (gpu(), (daemon(1),), Way.TIMESLICE),
        (gpu(), (daemon(None),), Way.TIMESLICE),
        (gpu(), (daemon(error="gone", pid=None),), Way.TIMESLICE),
        (gpu(), (daemon(error="gone", pid=None), daemon()), Way.MPS),
        # Stopped or hanging: its clients have the GPU all the same.
        (gpu(), (daemon(error="no answer"),), Way.MPS),
        (gpu(), (daemon(None, error="unreadable", pipe=None),), None),
        (gpu(processes=(MPS_PROCESS,)), (daemon(None, error="unreadable", pipe=None),), Way.MPS),
        (gpu(ComputeMode.EXCLUSIVE_PROCESS), (daemon(),), Way.MPS),
        (gpu(ComputeMode.EXCLUSIVE_PROCESS), (), Way.EXCLUSIVE),
        (gpu(ComputeMode.EXCLUSIVE_THREAD), (), Way.EXCLUSIVE),
        (gpu(ComputeMode.PROHIBITED), (daemon(),), Way.PROHIBITED),
        (gpu(mig=True), (daemon(),), Way.MIG),
        # The mode alone is unknown: what else is seen still holds.
        (gpu(None, mig=True), (), Way.MIG),
        (gpu(None), (daemon(),), Way.MPS),
        (gpu(None), (), None),
        (gpu(error="lost"), (daemon(),), None),
    ],
)
def test_the_way_of_sharing_in_force(shown: Gpu, daemons: tuple[MpsDaemon, ...], expected: Way | None) -> None:
    assert way_in_force(shown, daemons) is expected


SERVED = MpsDaemon(
    pid=1, ours=True, pipe_directory="/p", gpu_index=0, servers=(MpsServer(pid=5, clients=(MpsClient(pid=6),)),)
)


@pytest.mark.parametrize(
    ("processes", "daemons", "expected"),
    [
        (None, (SERVED,), Way.MPS),
        ((), (SERVED,), Way.MPS),
        # Its server and its clients are not outside; a new server is in no list yet, and graphics are no CUDA program.
        ((GpuProcess(pid=5, compute=True), GpuProcess(pid=6, compute=True)), (SERVED,), Way.MPS),
        ((GpuProcess(pid=7, compute=True, name="nvidia-cuda-mps-server"),), (SERVED,), Way.MPS),
        ((GpuProcess(pid=7, graphics=True), GpuProcess(pid=8, mps=True)), (SERVED,), Way.MPS),
        ((GpuProcess(pid=7, compute=True),), (SERVED,), Way.MPS_TIMESLICE),
        ((GpuProcess(pid=7, compute=True),), (), Way.TIMESLICE),
    ],
)
def test_programs_outside_mps_are_told(
    processes: tuple[GpuProcess, ...] | None, daemons: tuple[MpsDaemon, ...], expected: Way
) -> None:
    assert sharing_now(gpu(processes=processes), daemons) is expected


@pytest.mark.parametrize(
    ("flags", "letters"),
    [("c", "C"), ("g", "G"), ("cg", "C+G"), ("mc", "M+C"), ("m", "M+C"), ("mcg", "M+C+G"), ("", "")],
)
def test_the_type_of_a_process_is_nvidia_smis(flags: str, letters: str) -> None:
    assert GpuProcess(pid=1, compute="c" in flags, graphics="g" in flags, mps="m" in flags).type == letters


def test_titles_are_what_users_type() -> None:
    assert [level.title for level in TimeSlice] == ["default", "short", "medium", "long"]
    assert [mode.title for mode in ComputeMode] == ["default", "exclusive-thread", "prohibited", "exclusive-process"]
    assert [priority.title for priority in Priority] == ["normal", "low"]


def test_the_clients_of_a_daemon_are_those_of_all_its_servers() -> None:
    pids = itertools.count(10)
    servers = tuple(MpsServer(pid=n, clients=(MpsClient(pid=next(pids)), MpsClient(pid=next(pids)))) for n in (1, 2))
    found = MpsDaemon(pid=1, ours=True, pipe_directory=None, servers=servers).clients
    assert [client.pid for client in found] == [10, 11, 12, 13]
