"""A program for a simulated GPU whose speed is known: ``python -m gpushare.sim.job --need 40 --rate 100``.

It runs on the simulated host that started it (``GPUSHARE_SIM_HOST``) and prints its current rate as ``rate=NUMBER``, at
a fixed interval (``--metric 'rate=([0-9.]+)'``). The model is simple on purpose, so that the right answer can be worked
out by hand:

- It needs ``--need`` percent of the GPU to run at its full ``--rate``; each further stream needs as much again.
- Time-slicing: contexts get the whole GPU in turn. With k contexts each runs at 1/k of its rate alone, or at its
  time-slice's part of all slices. All clients of one MPS server are one such context. Where a slice is below a
  millisecond, each switch costs 0.25 ms (H200: next to a slice of 50 us a job has .79 of its rate, not .98).
- ``--busy 4``: it has work for 4 percent of the time, in requests of ``--latency`` ms that arrive one by one. Such a job
  keeps its rate as long as it catches up. A request waits for one slice of each other context, and a switch, before each of
  its own slices; that is its p99. Others run while it has no work.
- MPS: clients run at the same time. A client gets its need, or its thread cap if that is less; when together they want
  more than 100 percent, each is slowed by the same factor (and by ``--contention`` percent on top).
- ``--bandwidth``: what its full rate draws of the memory's bandwidth. Where clients together want more than all of it, each
  that draws is slowed by the same factor, whatever its cap; a cap below its need lets it draw less.
- With LOCAL_RANK in its environment, as torchrun sets it, it is on that one of its GPUs.
- A MIG instance has its share of the SMs, and nothing outside slows it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final, NamedTuple

from gpushare.base.units import parse_memory_limit
from gpushare.gpu_models import model_of
from gpushare.host.identity import ancestors, identity_of
from gpushare.sim import activity, clients
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import Handle, HandleKind, Target
from gpushare.sim.processes import real_process
from gpushare.sim.state import DEFAULT_SLICE_US, SIM_HOST, SimulatedHostState, SimulatedProcess, StateFile, now, on_gpu

_FOUND_SECONDS: Final = 10.0
# As torchrun sets it: the number of a process on this host, and of its GPU.
_RANK: Final = "LOCAL_RANK"
_SWITCH_US: Final = 250.0
_SHORT_US: Final = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return its exit code: 1 when CUDA would have refused it."""
    options = _parser().parse_args(arguments)
    spec = os.environ.get(SIM_HOST)
    if not spec:
        sys.stderr.write("error: not on a simulated host; start it by: gpushare --host sim:h200 run -- ...\n")
        return 2
    ended: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        ended.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    file = StateFile(spec)
    pid = _appear(file, options, ended)
    return 1 if pid is None else _run(file, pid, options, ended)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpushare.sim.job")
    parser.add_argument("--need", type=float, default=50.0, help="percent of the GPU that its full rate takes")
    parser.add_argument("--rate", type=float, default=100.0, help="its full rate: units of work per second")
    parser.add_argument("--streams", type=int, default=1, help="streams in one process")
    parser.add_argument("--threads", type=int, default=0, help="threads in one process: one stream, in turn")
    parser.add_argument("--priority", action="store_true", help="accepted: streams have no priorities here")
    parser.add_argument("--seconds", type=float, default=None, help="seconds after which it ends")
    parser.add_argument("--work", type=float, default=None, help="units of work after which it ends")
    parser.add_argument("--footprint", default=None, help="device memory: 1G")
    parser.add_argument("--bandwidth", type=float, default=None, help="percent of the memory's bandwidth that it draws")
    parser.add_argument("--contention", type=float, default=0.0, help="percent lost when clients want too much")
    parser.add_argument("--noise", type=float, default=0.5, help="percent by which the rate scatters")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two lines")
    parser.add_argument("--latency", type=float, default=None, help="milliseconds that a unit takes at full rate")
    parser.add_argument("--busy", type=float, default=100.0, help="percent of the time in which it has work")
    return parser


def _run(file: StateFile, pid: int, options: argparse.Namespace, ended: list[int]) -> int:
    """Print the rate at each interval until the job is done, ended or loses its context; return the exit code."""
    started = last = time.monotonic()
    done = 0.0
    while not ended:
        state = current(file)
        process = state.process(pid)
        if process is None or process.broken or process.refused:
            return _report("the context was lost" if process is None else process.refused or "CUDA_ERROR_MPS_CLIENT")
        pace = pace_of(state, process, options.need, options.streams, options.contention)
        speed = pace.rate * (1 + random.uniform(-options.noise, options.noise) / 100)  # noqa: S311 - not a secret
        rate = options.rate * options.streams * speed
        pause = options.every
        if options.work is not None and rate > 0:
            pause = min(pause, max(0.0, options.work - done) / rate)
        time.sleep(pause)
        at = time.monotonic()
        done, last = done + rate * (at - last), at
        sys.stdout.write(f"rate={rate:.3f}\n")
        if options.latency is not None and speed > 0:
            sys.stdout.write(f"latency_ms={options.latency * options.streams * pace.latency * pace.rate / speed:.4f}\n")
        sys.stdout.flush()
        if options.work is not None and done >= options.work:
            break
        if options.seconds is not None and at - started >= options.seconds:
            break
    return 0


class Pace(NamedTuple):
    """``rate``: the share of its full rate that a job reaches now. ``latency``: its p99, as a factor of that alone."""

    rate: float
    latency: float


def pace_of(
    state: SimulatedHostState, process: SimulatedProcess, need: float, streams: int = 1, contention: float = 0.0
) -> Pace:
    """Return how fast a job runs on its GPU now."""
    if not on_gpu(process) or process.stopped_at is not None or process.channels_off or process.checkpoint:
        return Pace(0.0, math.inf)
    at, here = now(), (process.gpu_uuid, process.place)
    beside = [process for process in state.processes if (process.gpu_uuid, process.place) == here]
    busy = [other for other in beside if on_gpu(other) and activity.is_busy(other, at)]
    want = need * streams
    reach = min(want, _capacity(state, process) * (process.threads or 100.0) / 100)
    speed = reach / want * (_squeeze(state, process, busy, contention) if process.mps_server is not None else 1.0)
    contexts: dict[int, list[SimulatedProcess]] = {}
    for other in busy:
        contexts.setdefault(other.mps_server or other.pid, []).append(other)
    others = [clients for key, clients in contexts.items() if key != (process.mps_server or process.pid)]
    return _in_turn(state, process, speed, others)


def _squeeze(
    state: SimulatedHostState, process: SimulatedProcess, busy: Sequence[SimulatedProcess], contention: float
) -> float:
    """Return what clients of a server leave each other: a share of the speed of each."""
    clients = [other for other in busy if other.mps_server == process.mps_server]
    always = [client for client in clients if client.busy_percent >= 100 or client.pid == process.pid]

    def share_among(present: Sequence[SimulatedProcess]) -> float:
        """Return the share of its speed that each of these clients has when all work."""
        load = sum(client.sm_percent for client in present)
        squeeze = 100 / load * (1 - contention / 100) if load > 100 else 1.0
        if process.bandwidth_percent is not None:
            draws = [client for client in activity.with_stated_bandwidth(state, process.gpu_uuid) if client in present]
            squeeze = min(squeeze, 100 / max(100, sum(client.bandwidth_percent or 0 for client in draws)))
        return squeeze

    with_all = share_among(clients)
    # Those that have work now and then are there for a part of the time only.
    busy_part = min(1.0, sum(client.busy_percent for client in clients if client not in always) / 100 / with_all)
    return with_all if process.busy_percent < 100 else busy_part * with_all + (1 - busy_part) * share_among(always)


def _in_turn(
    state: SimulatedHostState, process: SimulatedProcess, speed: float, others: Sequence[Sequence[SimulatedProcess]]
) -> Pace:
    """Return the pace of a process that has this ``speed`` in its turns, next to the contexts of others."""
    if process.busy_percent >= 100 and not others:
        return Pace(speed, 1 / speed)
    own_slice, slices = _slice(state, process), [_slice(state, clients[0]) for clients in others]
    busy_parts = [_work(clients) for clients in others]
    if process.busy_percent < 100:
        alone = (process.request_ms or own_slice / 1000) * 1000
        waits = sum(slice_us * part + _SWITCH_US for slice_us, part in zip(slices, busy_parts, strict=True))
        takes = alone / speed + math.ceil(alone / speed / own_slice) * waits
        return Pace(min(1.0, alone / takes / (process.busy_percent / 100)), takes / alone)
    always = [slice_us for slice_us, part in zip(slices, busy_parts, strict=True) if part >= 1]
    rest = 1.0
    for beside, part, slice_us in zip(others, busy_parts, slices, strict=True):
        if part < 1:
            request = (beside[0].request_ms or slice_us / 1000) * 1000
            rest -= part * (1 + math.ceil(request / slice_us) * _SWITCH_US / request)
    round_us = [own_slice, *always]
    turn = sum(round_us) + (_SWITCH_US * len(round_us) if always and min(round_us) < _SHORT_US else 0.0)
    rate = speed * max(0.0, rest) * own_slice / turn
    return Pace(rate, 1 / rate if rate else math.inf)


def _work(clients: Sequence[SimulatedProcess]) -> float:
    """Return the part of the time in which a context has work."""
    return min(1.0, sum(client.busy_percent for client in clients) / 100)


def _slice(state: SimulatedHostState, process: SimulatedProcess) -> int:
    """Return the time-slice that a process runs in, in microseconds: under MPS its server's."""
    servers = {server.pid: server for server in state.servers}
    return servers.get(process.mps_server or 0, process).slices.get("compute", DEFAULT_SLICE_US)


def target_of(state: SimulatedHostState, process: SimulatedProcess) -> Target:
    """Return the GPU that a process is on, as an entry point of NVML takes it."""
    index, gpu = next((index, gpu) for index, gpu in enumerate(state.gpus) if gpu.uuid == process.gpu_uuid)
    return Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model))


def _capacity(state: SimulatedHostState, process: SimulatedProcess) -> float:
    """Return what the device of a process has, in percent of the whole GPU."""
    target = target_of(state, process)
    whole = target.model.multiprocessors
    for instance in target.gpu.mig:
        if instance.place == process.place and whole:
            return 100.0 * activity.device_multiprocessors(target, instance) / whole
    return 100.0


def _appear(file: StateFile, options: argparse.Namespace, ended: list[int]) -> int | None:
    """Write the job's need down at its process in the simulated host; return that process, or None: CUDA refused."""
    deadline = time.monotonic() + _FOUND_SECONDS
    family = ancestors()
    if _RANK in os.environ:
        _join(file, int(os.environ[_RANK]))
    while time.monotonic() < deadline and not ended:
        state = current(file)
        seen = state.process(os.getpid()) or next(
            (process for process in state.processes if process.pid in family), None
        )
        if seen is not None and seen.checkpoint and seen.refused is None:
            # A call of CUDA waits for as long as its process is locked or out of the GPU.
            deadline = time.monotonic() + _FOUND_SECONDS
            time.sleep(0.01)
            continue
        if seen is None or (seen.refused is None and not on_gpu(seen)):
            time.sleep(0.01)
            continue
        if seen.refused is not None:
            _report(seen.refused)
            return None
        with changing(file) as (state, _):
            process = state.process(seen.pid)
            if process is not None and not process.checkpoint:
                return seen.pid if _allocate(state, process, options) else None
    _report("CUDA_ERROR_NO_DEVICE")
    return None


def _join(file: StateFile, rank: int) -> None:
    """Be a process of its own on the GPU of this number of CUDA_VISIBLE_DEVICES: a rank of a job of several GPUs."""
    own = identity_of(os.getpid())
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if own is None or rank >= len(devices):
        return
    with changing(file) as (state, lines):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices[rank]}
        process = real_process(state, own, [sys.executable, *sys.argv], environment)
        lines += clients.attach(state, process)


def _allocate(state: SimulatedHostState, process: SimulatedProcess, options: argparse.Namespace) -> bool:
    """Set what a job uses of its GPU; return False where its memory does not fit."""
    capacity = _capacity(state, process)
    allowed = capacity * (process.threads or 100.0) / 100
    process.sm_percent = max(1, round(100 * min(options.need * options.streams, allowed) / capacity))
    if options.bandwidth is not None:
        part = min(1.0, allowed / (options.need * options.streams))
        process.bandwidth_percent = round(min(100.0, options.bandwidth * options.streams * part))
    process.busy_percent, process.request_ms = options.busy, options.latency
    if options.footprint is None:
        return True
    size = parse_memory_limit(options.footprint) * options.streams
    limit = process.memory_limit_bytes
    process.memory_bytes = 0
    total, reserved, used = activity.memory_of(state, target_of(state, process))
    over = limit is not None and size > limit
    if over or size > total - reserved - used:
        _report("CUDA_ERROR_OUT_OF_MEMORY")
        return False
    process.memory_bytes = size
    return True


def _report(error: str) -> int:
    """Print an error on stderr; return the exit code."""
    sys.stderr.write(f"error: {error}\n")
    return 1


if __name__ == "__main__":
    # Each line is written at once, and to take the modules down would be a sixth of the work of a short job.
    os._exit(main())
