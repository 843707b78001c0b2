"""A program for a simulated GPU whose speed is known: ``python -m gpushare.sim.job --need 40 --rate 100``.

It runs on the simulated host that started it (``GPUSHARE_SIM_HOST``) and prints its current rate as ``rate=NUMBER``, at
a fixed interval (``--metric 'rate=([0-9.]+)'``). The model is simple on purpose, so that the right answer can be worked
out by hand:

- It needs ``--need`` percent of the GPU to run at its full ``--rate``; each further stream needs as much again.
- Time-slicing: contexts get the whole GPU in turn. With k contexts each runs at 1/k of its rate alone, or at its
  time-slice's part of all slices. All clients of one MPS server are one such context.
- MPS: clients run at the same time. A client gets its need, or its thread cap if that is less; when together they want
  more than 100 percent, each is slowed by the same factor (and by ``--contention`` percent on top).
- ``--bandwidth``: what its full rate draws of the memory's bandwidth. Where clients together want more than all of it, each
  that draws is slowed by the same factor, whatever its cap; a cap below its need lets it draw less.
- A MIG instance has its share of the SMs, and nothing outside slows it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gpushare.gpu_models import model_of
from gpushare.sim import activity
from gpushare.sim.current import changing, current
from gpushare.sim.nvml_abi import Handle, HandleKind, Target
from gpushare.sim.processes import SIM_HOST
from gpushare.sim.state import DEFAULT_SLICE_US, SimulatedHostState, SimulatedProcess, StateFile, now, on_gpu
from gpushare.units import parse_memory_limit

if TYPE_CHECKING:
    from types import FrameType

_FOUND_SECONDS: Final = 10.0


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
    return 1 if pid is None else _work(file, pid, options, ended)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpushare.sim.job")
    parser.add_argument("--need", type=float, default=50.0, help="percent of the GPU that its full rate takes")
    parser.add_argument("--rate", type=float, default=100.0, help="its full rate: units of work per second")
    parser.add_argument("--streams", type=int, default=1, help="streams in one process")
    parser.add_argument("--seconds", type=float, default=None, help="seconds after which it ends")
    parser.add_argument("--work", type=float, default=None, help="units of work after which it ends")
    parser.add_argument("--footprint", default=None, help="device memory: 1G")
    parser.add_argument("--bandwidth", type=float, default=None, help="percent of the memory's bandwidth that it draws")
    parser.add_argument("--contention", type=float, default=0.0, help="percent lost when clients want too much")
    parser.add_argument("--noise", type=float, default=0.5, help="percent by which the rate scatters")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two lines")
    parser.add_argument("--latency", type=float, default=None, help="milliseconds that a unit takes at full rate")
    return parser


def _work(file: StateFile, pid: int, options: argparse.Namespace, ended: list[int]) -> int:
    started = last = time.monotonic()
    done = 0.0
    while not ended:
        state = current(file)
        process = next((one for one in state.processes if one.pid == pid), None)
        if process is None or process.broken or process.refused:
            return _refused("the context was lost" if process is None else process.refused or "CUDA_ERROR_MPS_CLIENT")
        speed = speed_of(state, process, options.need, options.streams, options.contention)
        speed *= 1 + random.uniform(-options.noise, options.noise) / 100  # noqa: S311 - not a secret
        rate = options.rate * options.streams * speed
        pause = options.every
        if options.work is not None and rate > 0:
            pause = min(pause, max(0.0, options.work - done) / rate)
        time.sleep(pause)
        at = time.monotonic()
        done, last = done + rate * (at - last), at
        sys.stdout.write(f"rate={rate:.3f}\n")
        if options.latency is not None and speed > 0:
            sys.stdout.write(f"latency_ms={options.latency * options.streams / speed:.4f}\n")
        sys.stdout.flush()
        if options.work is not None and done >= options.work:
            break
        if options.seconds is not None and at - started >= options.seconds:
            break
    return 0


def speed_of(
    state: SimulatedHostState, process: SimulatedProcess, need: float, streams: int = 1, contention: float = 0.0
) -> float:
    """Return the share of its full rate that a job reaches on its GPU now; 1.0 is what it reaches alone there."""
    if not on_gpu(process) or process.stopped_at is not None or process.channels_off:
        return 0.0
    at, here = now(), _place(process)
    busy = [one for one in state.processes if on_gpu(one) and _place(one) == here and activity.is_busy(one, at)]
    # Time-slicing: each has its slice of a turn; all clients of an MPS server have the server's together.
    slices = {one.mps_server or one.pid: _slice(state, one) for one in busy}
    want = need * streams
    mine = min(want, _capacity(state, process) * (process.threads or 100.0) / 100)
    squeeze = 1.0
    if process.mps_server is not None:
        load = sum(one.sm_percent for one in busy if one.mps_server == process.mps_server)
        if load > 100:
            squeeze = 100 / load * (1 - contention / 100)
        if process.bandwidth_percent is not None:
            draws = [one for one in activity.drawing(state, process.gpu_uuid) if one.mps_server == process.mps_server]
            squeeze = min(squeeze, 100 / max(100, sum(one.bandwidth_percent or 0 for one in draws)))
    turn = sum(slices.values())
    return mine / want * squeeze * (_slice(state, process) / turn if len(slices) > 1 else 1.0)


def _slice(state: SimulatedHostState, process: SimulatedProcess) -> int:
    """Return the time-slice that a process runs in, in microseconds: under MPS its server's."""
    servers = {server.pid: server for daemon in state.daemons for server in daemon.servers}
    return servers.get(process.mps_server or 0, process).slices.get("compute", DEFAULT_SLICE_US)


def _target(state: SimulatedHostState, process: SimulatedProcess) -> Target:
    index, gpu = next((index, gpu) for index, gpu in enumerate(state.gpus) if gpu.uuid == process.gpu_uuid)
    return Target(Handle(HandleKind.GPU, index), gpu, model_of(gpu.model))


def _place(process: SimulatedProcess) -> tuple[str, int | None, int | None]:
    return process.gpu_uuid, process.gpu_instance_id, process.compute_instance_id


def _capacity(state: SimulatedHostState, process: SimulatedProcess) -> float:
    """Return what the device of a process has, in percent of the whole GPU."""
    target = _target(state, process)
    whole = target.model.multiprocessors
    for one in target.gpu.mig:
        if (one.gpu_instance_id, one.compute_instance_id) == _place(process)[1:] and whole:
            return 100.0 * activity.device_multiprocessors(target, one) / whole
    return 100.0


def _appear(file: StateFile, options: argparse.Namespace, ended: list[int]) -> int | None:
    """Write the job's need down at its process in the simulated host; return that process, or None: CUDA refused."""
    deadline = time.monotonic() + _FOUND_SECONDS
    family = _ancestors(os.getpid())
    while time.monotonic() < deadline and not ended:
        state = current(file)
        found = next((one for one in state.processes if one.pid in family), None)
        if found is None or (found.refused is None and not on_gpu(found)):
            time.sleep(0.01)
            continue
        if found.refused is not None:
            _refused(found.refused)
            return None
        with changing(file) as (state, _):
            process = next((one for one in state.processes if one.pid == found.pid), None)
            if process is not None:
                return found.pid if _settle_in(state, process, options) else None
    _refused("CUDA_ERROR_NO_DEVICE")
    return None


def _settle_in(state: SimulatedHostState, process: SimulatedProcess, options: argparse.Namespace) -> bool:
    capacity = _capacity(state, process)
    allowed = capacity * (process.threads or 100.0) / 100
    process.sm_percent = max(1, round(100 * min(options.need * options.streams, allowed) / capacity))
    if options.bandwidth is not None:
        part = min(1.0, allowed / (options.need * options.streams))
        process.bandwidth_percent = round(min(100.0, options.bandwidth * options.streams * part))
    if options.footprint is None:
        return True
    size = parse_memory_limit(options.footprint) * options.streams
    limit = process.memory_limit_bytes
    process.memory_bytes = 0
    total, reserved, used = activity.memory_of(state, _target(state, process))
    if (limit is not None and size > limit) or size > total - reserved - used:
        _refused("CUDA_ERROR_OUT_OF_MEMORY")
        return False
    process.memory_bytes = size
    return True


def _ancestors(pid: int) -> set[int]:
    """Return a process and those that it descends from: it may have been started by a script."""
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def _refused(error: str) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
