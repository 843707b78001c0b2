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
from gpushare.host.identity import identity_of
from gpushare.host.process import Processes
from gpushare.sim import activity, clients
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import Handle, HandleKind, Target
from gpushare.sim.processes import add_real_process
from gpushare.sim.state import DEFAULT_SLICE_US, SIM_HOST, SimulatedHostState, SimulatedProcess, StateFile, now, on_gpu

_CONTEXT_SECONDS: Final = 10.0
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
    pid = _start(file, options, ended)
    return 1 if pid is None else _run(file, pid, options, ended)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpushare.sim.job")
    parser.add_argument("--need", type=float, default=50.0, help="percent of the GPU that its full rate takes")
    parser.add_argument("--rate", type=float, default=100.0, help="its full rate: units of work per second")
    parser.add_argument("--streams", type=int, default=1, help="streams in one process")
    parser.add_argument("--threads", type=int, default=0, help="threads in one process: one stream, in turn")
    parser.add_argument("--priority", action="store_true", help="accepted: streams have no priorities here")
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds after which it ends")
    parser.add_argument("--work", type=float, default=math.inf, help="units of work after which it ends")
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
        time.sleep(min(options.every, max(0.0, options.work - done) / rate) if rate > 0 else options.every)
        at = time.monotonic()
        done, last = done + rate * (at - last), at
        sys.stdout.write(f"rate={rate:.3f}\n")
        if options.latency is not None and speed > 0:
            # It scatters with the rate: ``pace.rate / speed`` is the same noise.
            sys.stdout.write(f"latency_ms={options.latency * options.streams * pace.latency * pace.rate / speed:.4f}\n")
        sys.stdout.flush()
        if done >= options.work or at - started >= options.seconds:
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
    at, device = now(), (process.gpu_uuid, process.instance_ids)
    busy = [
        other
        for other in state.processes
        if (other.gpu_uuid, other.instance_ids) == device and on_gpu(other) and activity.is_busy(other, at)
    ]
    wanted = need * streams
    speed = min(wanted, _allowed_percent(state, process)) / wanted
    if process.mps_server is not None:
        speed *= _mps_factor(state, process, busy, contention)
    # The clients of one MPS server are one context.
    contexts: dict[int, list[SimulatedProcess]] = {}
    for other in busy:
        contexts.setdefault(other.mps_server or other.pid, []).append(other)
    contexts.pop(process.mps_server or process.pid, None)
    return _pace_in_turns(state, process, speed, list(contexts.values()))


def _mps_factor(
    state: SimulatedHostState, process: SimulatedProcess, busy: Sequence[SimulatedProcess], contention: float
) -> float:
    """Return the factor by which the clients of its MPS server slow a process down, at most 1."""
    members = [other for other in busy if other.mps_server == process.mps_server]
    with_all = _factor_while_all_work(state, process, members, contention)
    if process.busy_percent < 100:
        return with_all
    # Clients that have work now and then are there for a part of the time only.
    steady = [client for client in members if client.busy_percent >= 100 or client.pid == process.pid]
    busy_part = min(1.0, sum(client.busy_percent for client in members if client not in steady) / 100 / with_all)
    return busy_part * with_all + (1 - busy_part) * _factor_while_all_work(state, process, steady, contention)


def _factor_while_all_work(
    state: SimulatedHostState, process: SimulatedProcess, members: Sequence[SimulatedProcess], contention: float
) -> float:
    """Return the factor by which these clients slow the process down while all of them work."""
    load = sum(client.sm_percent for client in members)
    by_sms = 100 / load * (1 - contention / 100) if load > 100 else 1.0
    if process.bandwidth_percent is None:
        return by_sms
    drawing = [client for client in activity.with_stated_bandwidth(state, process.gpu_uuid) if client in members]
    return min(by_sms, 100 / max(100, sum(client.bandwidth_percent or 0 for client in drawing)))


class _Context(NamedTuple):
    """A process, or an MPS server with its clients, as the scheduler of the GPU sees it."""

    slice_us: int
    # The part of the time in which it has work.
    busy_part: float
    # How long one of its requests takes when it has the GPU alone.
    request_us: float


def _context_of(state: SimulatedHostState, members: Sequence[SimulatedProcess]) -> _Context:
    """Return the context of a process, or of the clients of one MPS server; the first stands for all."""
    first = members[0]
    slices = next((server.slices for server in state.servers if server.pid == first.mps_server), first.slices)
    slice_us = slices.get("compute", DEFAULT_SLICE_US)
    busy_part = min(1.0, sum(client.busy_percent for client in members) / 100)
    return _Context(slice_us, busy_part, (first.request_ms or slice_us / 1000) * 1000)


def _pace_in_turns(
    state: SimulatedHostState, process: SimulatedProcess, speed: float, others: Sequence[Sequence[SimulatedProcess]]
) -> Pace:
    """Return the pace of a process that has this ``speed`` in its turns, next to the contexts of others."""
    this = _context_of(state, [process])
    contexts = [_context_of(state, members) for members in others]
    if this.busy_part < 1:
        return _pace_of_requests(this, speed, contexts)
    if not contexts:
        return Pace(speed, 1 / speed)
    # What the others take that have work now and then: their requests, and the switches around each slice of these.
    free_part = 1.0
    for context in contexts:
        if context.busy_part < 1:
            switches = math.ceil(context.request_us / context.slice_us)
            free_part -= context.busy_part * (1 + switches * _SWITCH_US / context.request_us)
    slices = [this.slice_us, *(context.slice_us for context in contexts if context.busy_part >= 1)]
    # Switches cost only where a slice is short (see the top of this file).
    switching_us = _SWITCH_US * len(slices) if len(slices) > 1 and min(slices) < _SHORT_US else 0.0
    rate = speed * max(0.0, free_part) * this.slice_us / (sum(slices) + switching_us)
    return Pace(rate, 1 / rate if rate else math.inf)


def _pace_of_requests(this: _Context, speed: float, contexts: Sequence[_Context]) -> Pace:
    """Return the pace of a process whose requests arrive one by one: each of their slices waits for all other contexts."""
    wait_us = sum(context.slice_us * context.busy_part + _SWITCH_US for context in contexts)
    working_us = this.request_us / speed
    total_us = working_us + math.ceil(working_us / this.slice_us) * wait_us
    return Pace(min(1.0, this.request_us / total_us / this.busy_part), total_us / this.request_us)


def target_of(state: SimulatedHostState, process: SimulatedProcess) -> Target:
    """Return the GPU that a process is on, as an entry point of NVML takes it."""
    index, gpu = next((index, gpu) for index, gpu in enumerate(state.gpus) if gpu.uuid == process.gpu_uuid)
    return Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model))


def _device_percent(state: SimulatedHostState, process: SimulatedProcess) -> float:
    """Return the size of a process's device in percent of the whole GPU: less than 100 for a MIG device."""
    target = target_of(state, process)
    instance = next((mig for mig in target.gpu.mig if mig.instance_ids == process.instance_ids), None)
    return 100.0 if instance is None else 100.0 * activity.share_of_sms(target, instance)


def _allowed_percent(state: SimulatedHostState, process: SimulatedProcess) -> float:
    """Return how much of the whole GPU a process may use, in percent: its device, reduced by its thread limit."""
    return _device_percent(state, process) * (process.threads or 100.0) / 100


def _start(file: StateFile, options: argparse.Namespace, ended: list[int]) -> int | None:
    """Wait for the CUDA context of this job and write down what it uses; return its PID, or None: CUDA refused it.

    The process of the simulated host is this one, or the ancestor that `gpushare run` started.
    """
    family = list(Processes().ancestry(os.getpid()))
    if _RANK in os.environ:
        _add_rank(file, int(os.environ[_RANK]))
    deadline = time.monotonic() + _CONTEXT_SECONDS
    while time.monotonic() < deadline and not ended:
        processes = {process.pid: process for process in current(file).processes}
        process = next((processes[pid] for pid in family if pid in processes), None)
        if process is not None and process.refused is not None:
            _report(process.refused)
            return None
        if process is not None and process.checkpoint:
            # A call of CUDA waits for as long as its process is locked or out of the GPU.
            deadline = time.monotonic() + _CONTEXT_SECONDS
        elif process is not None and on_gpu(process):
            with changing(file) as (state, _):
                same = state.process(process.pid)
                if same is not None and not same.checkpoint:
                    return same.pid if _allocate(state, same, options) else None
        time.sleep(0.01)
    _report("CUDA_ERROR_NO_DEVICE")
    return None


def _add_rank(file: StateFile, rank: int) -> None:
    """Add this process, a rank of a job of several GPUs, to the GPU with its number in CUDA_VISIBLE_DEVICES."""
    identity = identity_of(os.getpid())
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if identity is None or rank >= len(devices):
        return
    with changing(file) as (state, lines):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices[rank]}
        lines += clients.attach(state, add_real_process(state, identity, [sys.executable, *sys.argv], environment))


def _allocate(state: SimulatedHostState, process: SimulatedProcess, options: argparse.Namespace) -> bool:
    """Write down what a job uses of its GPU; return False, with an error on stderr, where its memory does not fit."""
    allowed, wanted = _allowed_percent(state, process), options.need * options.streams
    process.sm_percent = max(1, round(100 * min(wanted, allowed) / _device_percent(state, process)))
    if options.bandwidth is not None:
        drawn = options.bandwidth * options.streams * min(1.0, allowed / wanted)
        process.bandwidth_percent = round(min(100.0, drawn))
    process.busy_percent, process.request_ms = options.busy, options.latency
    if options.footprint is None:
        return True
    size = parse_memory_limit(options.footprint) * options.streams
    # What it has before is the simulation's guess, and makes room.
    process.memory_bytes = 0
    limit, free = process.memory_limit_bytes, activity.memory_of(state, target_of(state, process)).free
    if size > free or (limit is not None and size > limit):
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
