"""The picture of `gpushare top`: the cockpit on a simulated host, after five minutes of made-up work."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any, cast

from rich.text import Text

from gpushare.base.model import GpuSensors, JobWay, LinePlace, ListedJob, Way
from gpushare.base.units import GIB
from gpushare.connect import connect
from gpushare.run.look import with_memory
from gpushare.top.frame import Frame, HostUse, Reader
from gpushare.top.history import Event
from gpushare.top.screen import Cockpit
from gpushare.top.watch import Watch
from tools.terminal import NOON, Terminal

SIZE = (126, 34)
_SPEC = "sim:4xh100"
_PAST = 300


def cockpit(session: Terminal) -> Text:
    """Return the screen as text with styles."""
    return asyncio.run(_drawn(_frame(session)))


def _frame(session: Terminal) -> Frame:
    """Return a host of four GPUs: MPS with a server and trainings, MIG with three tenants, time-slicing, one all for a job."""
    from gpushare.sim import admin
    from gpushare.sim.current import current
    from gpushare.sim.state import StateFile

    session.type(f"export GPUSHARE_HOST={_SPEC}")
    session.type("gpushare mps start -g 0 --threads 40 --memory 24G")
    session.type("gpushare sim mig -g 1 3g.40gb 2g.20gb 2g.20gb")
    state = current(StateFile(_SPEC))
    instances = [one.uuid for one in state.gpus[1].mig]
    for name, instance in zip(("vision", "speech"), instances, strict=False):
        session.type(f"gpushare mig name {name} {instance}")
    mps = {"CUDA_MPS_PIPE_DIRECTORY": state.daemons[0].pipe_directory}

    def add(gpu: int, name: str, memory: float, sm: int, **facts: Any) -> int:
        mine: dict[str, Any] = {"environment": mps, "mps": True} if gpu == 0 else {}
        return admin.add_process(
            _SPEC, str(gpu), name=name, memory_bytes=int(memory * GIB), sm_percent=sm, **mine, **facts
        )

    rows = [
        _job(add(0, "vllm", 31.5, 44), "chat", "alice", "production", 0, "mps", 31.5, 36, threads=None, cpu=104, age=93_000, command="vllm serve --port 8000"),
        _job(add(0, "python", 17.2, 21), "embed", "alice", "opportunistic", 0, "mps", 17.2, 24, threads=40, cpu=87, age=5_400, command="python embed.py --batch 256"),
        _job(add(0, "python", 11.8, 17), "rerank", "alice", "opportunistic", 0, "mps", 11.8, 24, threads=25, cpu=62, age=1_260, command="python rerank.py"),
        _job(add(1, "python", 28.4, 88, mig=instances[0]), "vision", "bob", "plain", 1, "mig", 28.4, None, name="vision", cpu=211, age=40_000, command="python train.py --model vit-l"),
        _job(add(1, "python", 9.1, 35, mig=instances[1]), "speech", "carol", "plain", 1, "mig", 9.1, None, name="speech", cpu=48, age=8_000, command="python asr.py"),
        _job(add(2, "triton", 22.0, 38), "search", "dave", "production", 2, "timeslice", 22.0, None, slice_us=16_000, sm=38, cpu=71, age=320_000, command="tritonserver --model-repository /models"),
        _job(add(2, "python", 40.3, 58), "finetune", "dave", "opportunistic", 2, "timeslice", 40.3, 44, slice_us=200, sm=58, cpu=99, age=2_900, command="python lora.py --rank 64"),
        _job(add(3, "python", 71.6, 97), None, "erin", None, 3, "timeslice", 71.6, None, sm=97, cpu=402, age=61_000, command="python pretrain.py"),
    ]  # fmt: skip
    line = LinePlace(place=1, memory_bytes=48 * GIB, behind=(), held_by=("finetune", "search"))
    waiting = ListedJob(name="eval-70b", pid=20411, state="waiting", user="dave", role="plain", device=None, gpu_indexes=(2, 3), since_seconds=740, line=line)  # fmt: skip
    reader = Reader(connect(_SPEC), with_memory)
    frame = [reader.read() for _ in range(2)][-1]
    gpus = tuple(
        replace(gpu, jobs_reserved_bytes=reserved * GIB)
        for gpu, reserved in zip(frame.snapshot.gpus, (72, 0, 66, 0), strict=True)
    )
    return replace(
        frame,
        at=NOON,
        snapshot=replace(frame.snapshot, gpus=gpus),
        jobs=(*(job for job, _ in rows), waiting),
        uses={job.pid: use for job, use in rows if job.pid is not None},
        cpu_percent=17.0,
        memory_used=216 * GIB,
        memory_total=1024 * GIB,
    )


def _job(pid: int, job: str | None, user: str, role: str | None, gpu: int, way: str, memory: float, limit: int | None, *, cpu: int, age: int, command: str, sm: int | None = None, threads: float | None = None, slice_us: int | None = None, name: str | None = None) -> tuple[ListedJob, HostUse]:  # fmt: skip
    listed = ListedJob(
        name=job,
        pid=pid,
        state="running",
        user=user,
        role=role,
        device=f"GPU {gpu}",
        gpu_indexes=(gpu,),
        way=cast("JobWay", Way(way)),
        mig_name=name,
        threads_percent=threads,
        slice_us=slice_us,
        memory_used_bytes=int(memory * GIB),
        memory_limit_bytes=None if limit is None else limit * GIB,
        sm_percent=sm,
        since_seconds=age,
        command=command,
    )
    return listed, HostUse(cpu_percent=cpu, memory_bytes=int(memory * GIB) // 6)


def _past(frame: Frame, second: int) -> Frame:
    """Return the host some seconds ago: each GPU's load goes up and down in its own way."""

    def wave(index: int, mean: float, period: float, size: float) -> float:
        turns = math.sin(2 * math.pi * second / period + index) + 0.4 * math.sin(2 * math.pi * second / 17 + index)
        return min(100.0, max(0.0, mean + size * turns))

    shapes = {0: (78, 110, 13), 1: (62, 90, 16), 2: (86, 70, 9), 3: (95, 41, 4)}
    gpus, sensors = [], dict[int, GpuSensors]()
    for gpu in frame.snapshot.gpus:
        util = wave(gpu.index, *shapes[gpu.index])
        used = (gpu.memory_used_bytes or 0) * min(
            1.0, 0.72 + 0.28 * (_PAST - second) / _PAST + (0.1 if second < 140 else 0)
        )
        shown = None if gpu.mig_enabled else round(util)
        gpus.append(replace(gpu, utilization_percent=shown, memory_used_bytes=int(used)))
        sensors[gpu.index] = replace(
            frame.sensors[gpu.index], power_watts=90 + 5.4 * util, temperature_celsius=31 + round(util * 0.38)
        )
    activity = {
        place: percent and 0.7 * wave(place[0] + (place[1] or 0), *shapes[place[0]])
        for place, percent in frame.sm.items()
    }
    return replace(frame, at=frame.at - second, snapshot=replace(frame.snapshot, gpus=tuple(gpus)), sensors=sensors, sm=activity)  # fmt: skip


async def _drawn(frame: Frame) -> Text:
    watch = Watch(Reader(connect(_SPEC), with_memory), 1.0)

    async def nothing(_words: object) -> dict[str, object]:
        return {}

    app = Cockpit(watch, nothing, examine=False)
    async with app.run_test(size=SIZE) as pilot:
        for second in range(_PAST, 0, -1):
            app.past.add(_past(frame, second))
        for ago, text, colour in (
            (412, "chat is over its limit: 37.1 GiB of 36.0 GiB", "bad"),
            (95, "eval-70b waits for room, place 1", "warn"),
            (31, "sweep-12 ended with exit code 0", "good"),
        ):
            app.happened.all.append(Event(NOON - ago, text, colour))
        app.take(_past(frame, 0))
        await pilot.press("down", "down")
        await pilot.pause()
        lines = app.screen._compositor.render_strips()
        return Text("\n").join(Text.assemble(*((one.text, one.style or "") for one in line)) for line in lines)
