"""A production job next to another job, under every way of sharing: ``python -m benchmarks.colocation --out FILE``.

Run it as root on a machine with PyTorch and NVIDIA GPUs that nobody else uses. Each GPU has a worker that takes the next
batch of rows (`benchmarks.colocation_rows`). All processes of a batch are started once and held; a cell releases a
production job and one or two others, so that neither a start nor a warm-up is part of it:

- outside MPS: a production job and two others, whose time-slices are changed while they live, by gpushare's own calls;
- in one MPS daemon with a private directory: a production job, two others without a cap, one with low priority, and one
  for each cap. The slice of the daemon's server counts for all that run in it.

``--out`` gets a line of JSON per row; rows that are in it already, or in ``--done FILE``, are not measured again. ``--smoke``
tries each program and each way once, in a minute. ``--render FILE...`` writes the table into docs/measurements.md.
``--fake`` tries the script itself without a GPU. No setting of a GPU is changed, and the first Xid in the kernel log ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.colocation_programs import (
    COMMAND,
    HOLD,
    LAYERS,
    MEASURE,
    PROGRAMS,
    READY,
    RUNS,
    SERVICE_NS,
    SMS,
    TAKE,
    State,
)
from benchmarks.colocation_rows import (
    AS_IT_IS,
    LATENCY,
    LONGER,
    LOW,
    MPS,
    OTHERS,
    POISSON,
    WEIGHTS,
    Batch,
    Item,
    Setting,
    Target,
    batches,
    caps,
    choose,
    judged,
    known_settings,
    next_of,
    seen_by_tune,
    setting_of,
    slices,
    targets,
    two_settings,
)
from benchmarks.colocation_table import render
from benchmarks.gpu_script import xids
from gpushare.base.errors import GpushareError
from gpushare.host.channels import ChannelControl, Channels
from gpushare.measure.pair import Window, p99_factor_interval
from gpushare.measure.statistics import paired_ratio, percentile, ratio
from gpushare.run.results import CAPS, SLICES
from gpushare.timeslice.rules import Rule

SETTLE: Final = 0.35
PARTS: Final = 4
PAUSES: Final = 10_000
PAUSE_SECONDS: Final = 40.0
START_SECONDS: Final = 100.0


class Mps:
    """An MPS daemon in a private directory."""

    def __init__(self, directory: str) -> None:
        self.directory = f"{directory}/mps"
        os.makedirs(self.directory, 0o700, exist_ok=True)
        self.env = {"CUDA_MPS_PIPE_DIRECTORY": f"{self.directory}/p", "CUDA_MPS_LOG_DIRECTORY": f"{self.directory}/l"}
        for path in self.env.values():
            os.makedirs(path, exist_ok=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **self.env}, check=True, timeout=20)

    def say(self, text: str) -> str:
        done = subprocess.run(
            ["nvidia-cuda-mps-control"],
            input=text + "\n",
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return done.stdout

    def servers(self) -> list[int]:
        return [int(word) for word in re.findall(r"\d+", self.say("get_server_list"))]

    def end(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.say("quit")


def _pretended() -> Any:
    """Return answers without a driver: a pause is a SIGSTOP."""
    slices: dict[int, int] = {}

    def ask(request: Any, _seconds: float) -> dict[str, Any]:
        pid = request["pid"]
        group = {
            "descriptor": 5,
            "client": 0xC1D00001,
            "handle": 0x5C000010,
            "subdevice": 0x5C000002,
            "gpu": None,
            "engine": "compute",
            "classes": [0xCBC0],
            "channels": [0x5C000011],
            "slice_us": slices.setdefault(pid, 2048),
            "under_mps": False,
        }
        if request["do"] == "find":
            return {"started": 1, "groups": [group], "seconds": 0.1}
        if request["do"] == "read":
            return {"slices": [slices[pid]]}
        if request["do"] == "set":
            slices[pid] = request["microseconds"]
        else:
            os.kill(pid, signal.SIGSTOP if request["do"] == "off" else signal.SIGCONT)
        return {"seconds": 0.001}

    return ask


class Stop(Exception):
    """This worker is to end: the time is over, or an Xid was seen."""


class Starter:
    """The process that has imported PyTorch and forks the programs."""

    def __init__(self, *, fake: bool, directory: str) -> None:
        words = [sys.executable, "-m", "benchmarks.colocation_programs", *(["--fake"] if fake else [])]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self._errors = open(f"{directory}/starter.err", "w+b")  # noqa: SIM115 - as long as the worker
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env={**os.environ, **threads},
        )
        self._waits = True

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer to a line."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        if self._waits:
            self._waits = False
            self._line()
        process.stdin.write(json.dumps(request) + "\n")
        return json.loads(self._line())

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the starter ended: {self._errors.read()[-2000:].decode(errors='replace')}")
        return line

    def end(self) -> None:
        """End all programs, and it."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


class Job:
    """A program that was started, and is held."""

    def __init__(self, worker: Worker, name: str, env: Mapping[str, str], title: str) -> None:
        worker.count += 1
        self.name, self.title = name, title
        self.state = State(f"{worker.directory}/{worker.count}-{name}")
        self.state[HOLD] = 1
        self.pid = int(worker.starter.ask({"name": name, "path": self.state.path, "env": dict(env)}))
        self.channels: Channels | None = None

    def fail(self, what: str) -> RuntimeError:
        """Return the error that this program has."""
        try:
            said = Path(self.state.path + ".err").read_text(errors="replace")[-1500:]
        except OSError:
            said = ""
        return RuntimeError(f"{self.title} ({self.pid}) {what}: {said}")


class Worker:
    """One GPU, and the programs on it."""

    def __init__(self, options: argparse.Namespace, gpu: str, directory: str) -> None:
        self.options, self.gpu, self.directory, self.fake = options, gpu, directory, bool(options.fake)
        self.count = 0
        self.deadline = float(options.until)
        self.window = float(options.window)
        self.starter = Starter(fake=self.fake, directory=directory)
        self.control = ChannelControl(_pretended() if self.fake else None)
        self.meter = Meter(gpu, fake=self.fake)
        self.mps: Mps | None = None
        self.start = 0
        self.other = ""
        # Production by name: outside, inside MPS. The others: outside, and inside by setting.
        self.production: dict[str, tuple[Job, Job]] = {}
        self.outside: list[Job] = []
        self.inside: dict[Setting, Job] = {}
        self.second: Job | None = None
        self.server: Channels | None = None
        self.other_alone: dict[str, list[float]] = {}
        self.xids = xids()

    # -- programs ------------------------------------------------------------------------------------------------------

    def mps_env(self) -> dict[str, str]:
        """Return the variables of a client; the daemon is started for the first one."""
        if self.fake:
            return {}
        if self.mps is None:
            self.mps = Mps(self.directory)
        return dict(self.mps.env)

    def begin(self, batch: Batch, *, everything: bool = True) -> None:
        """Start what a batch needs and hold it; end what it does not need."""
        wanted = list(dict.fromkeys(item.production for item in batch.items if item.production))
        if batch.start != self.start:
            self.end_programs()
        self.start = batch.start
        if batch.other != self.other:
            self.end_others()
        # The memory of those that are not needed may be.
        self.end_jobs([job for name in [*self.production] if name not in wanted for job in self.production.pop(name)])
        fresh = [name for name in wanted if name not in self.production]
        for name in fresh:
            twin = Job(self, name, self.mps_env(), f"{name} in MPS")
            self.production[name] = (Job(self, name, {}, f"{name} outside"), twin)
        if batch.other != self.other:
            self.start_others(batch.other, caps() if everything else [Setting("caps", threads=50.0, low=True)])
        self.wait_ready(self.all_jobs())
        for name in fresh:
            self.calibrate(*self.production[name])
        for job in (*(pair[0] for pair in self.production.values()), *self.outside):
            if job.channels is None:
                job.channels = self.control.find(job.pid)
        if self.server is None:
            pids = [self.inside[MPS].pid] if self.mps is None else self.mps.servers()
            if len(pids) != 1:
                raise RuntimeError(f"MPS servers: {pids}")
            self.server = self.control.find(pids[0])
        self.check_clients()

    def start_others(self, name: str, capped: Sequence[Setting]) -> None:
        """Start the other job: two outside MPS, two in it, and one for each setting."""
        self.other, self.other_alone = name, {}
        self.outside = [Job(self, name, {}, f"{name} outside") for _ in range(2)]
        for setting in (MPS, LOW, *capped):
            own = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if setting.low else {}
            if setting.threads < 100:
                own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{setting.threads:g}"
            self.inside[setting] = Job(self, name, {**self.mps_env(), **own}, f"{name}: {setting.title}")
        self.second = Job(self, name, self.mps_env(), f"{name} in MPS, second")

    def end_others(self) -> None:
        """End the other job's processes."""
        self.end_jobs([*self.outside, *self.inside.values(), *([self.second] if self.second else [])])
        self.outside, self.inside, self.second, self.server, self.other = [], {}, None, None, ""

    def wait_ready(self, started: Iterable[Job]) -> None:
        """Wait until programs have warmed up."""
        waiting, limit = list(started), time.monotonic() + START_SECONDS
        while waiting:
            waiting = [job for job in waiting if not job.state[READY]]
            self.check_alive()
            if time.monotonic() > limit:
                raise waiting[0].fail("is not ready")
            time.sleep(0.02)

    def check_alive(self) -> None:
        """Raise if a program has ended."""
        ended = self.starter.ask({"ended": True})
        for job in self.all_jobs():
            if str(job.pid) in ended:
                raise job.fail(f"ended with {ended[str(job.pid)]}")

    def all_jobs(self) -> list[Job]:
        """Return all programs that were started."""
        pairs = [job for pair in self.production.values() for job in pair]
        return [*pairs, *self.outside, *self.inside.values(), *([self.second] if self.second else [])]

    def calibrate(self, outside: Job, inside: Job) -> None:
        """Let production find out how long its request takes while it is alone; its twin in MPS has the same load."""
        self.command(outside, MEASURE)
        for place in (SERVICE_NS, LAYERS):
            inside.state[place] = outside.state[place]
        self.command(inside, TAKE)

    def command(self, job: Job, number: int) -> None:
        """Give a held program a command, and wait until it is done."""
        job.state[COMMAND] = number
        limit = time.monotonic() + 30.0
        while job.state[COMMAND]:
            if time.monotonic() > limit:
                self.check_alive()
                raise job.fail("does not answer")
            time.sleep(0.005)

    def check_clients(self) -> None:
        """Say so unless those in MPS are clients with the SMs of their cap, and the others are not."""
        if self.mps is None or not self.inside:
            return
        clients = {
            int(word) for word in self.mps.say(f"get_client_list {self.mps.servers()[0]}").split() if word.isdigit()
        }
        inside = [pair[1] for pair in self.production.values()] + [*self.inside.values()]
        strange = [job.title for job in inside if job.pid not in clients]
        outside = [pair[0] for pair in self.production.values()] + self.outside
        strange += [job.title for job in outside if job.pid in clients]
        every = self.outside[0].state[SMS]
        for setting, job in self.inside.items():
            seen = job.state[SMS]
            if abs(seen - every * setting.threads / 100) > 4:
                strange.append(f"{job.title} sees {seen} of {every} SMs")
        if strange:
            _say(f"{self.gpu[:12]} STRANGE clients: {strange}")
            _write(Path(self.options.out), {"kind": "error", "text": f"clients: {strange}", "taken": _now()})

    def end_jobs(self, jobs: Sequence[Job]) -> None:
        """End programs, and wait until they are gone."""
        for job in jobs:
            job.state[HOLD] = 1
        for job in jobs:
            with contextlib.suppress(OSError):
                os.kill(job.pid, signal.SIGTERM)
        limit, left = time.monotonic() + 10.0, {job.pid for job in jobs}
        while left and time.monotonic() < limit:
            left -= {int(pid) for pid in self.starter.ask({"ended": True})}
            left = {pid for pid in left if os.path.exists(f"/proc/{pid}")}
            time.sleep(0.01)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def end_programs(self) -> None:
        """End all programs."""
        self.end_jobs([job for pair in self.production.values() for job in pair])
        self.production, self.start = {}, 0
        self.end_others()

    def end(self) -> None:
        """End everything on this GPU."""
        with contextlib.suppress(Exception):
            self.end_programs()
        self.starter.end()
        self.control.close()
        if self.mps is not None:
            self.mps.end()
        self.meter.close()

    # -- cells ---------------------------------------------------------------------------------------------------------

    def watched(self, production: Job | None, others: Sequence[Job], seconds: float) -> dict[str, Any]:
        """Release these programs for a while; return what they did, in their own units."""
        together = [*others, *([production] if production is not None else [])]
        for job in together:
            job.state.forget()
        for job in together:
            job.state[HOLD] = 0
        time.sleep(SETTLE if not self.fake else 0.02)
        start = time.monotonic()
        time.sleep(seconds / 2)
        seen = self.meter.read()
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        end = time.monotonic()
        for job in together:
            job.state[HOLD] = 1
        self.wait_idle(together)
        done = [job.state.logged(start, end) for job in others]
        requests = production.state.logged(start, end) if production is not None else []
        return {
            "seconds": end - start,
            "rates": _rates(requests, start, end),
            "latencies": [ms for _, ms in requests],
            "other_rates": [_rates(one, start, end) for one in done],
            **seen,
        }

    def wait_idle(self, jobs: Sequence[Job]) -> None:
        """Wait until held programs have nothing left on the GPU."""
        limit = time.monotonic() + 10.0
        while busy := [job for job in jobs if job.state[RUNS]]:
            if time.monotonic() > limit:
                self.check_alive()
                raise busy[0].fail("does not stop")
            time.sleep(0.001)

    def set_slices(self, production: Job | None, setting: Setting, others: Sequence[Job]) -> None:
        """Give production and the others their slices; None is what they had at first."""
        wanted: list[tuple[Channels | None, int | None]] = []
        if production is not None:
            wanted.append((production.channels, setting.production_us))
        if setting.way == "group":
            wanted.append((self.server, setting.other_us))
        else:
            wanted += [(job.channels, setting.other_us) for job in others]
        for channels, us in wanted:
            if channels is None:
                continue
            if us is None:
                self.control.restore_slices(channels)
            else:
                self.control.set_slice(channels, us)

    def cell(self, item: Item, setting: Setting, alone: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Measure one setting, relative to alone."""
        outside, inside = self.production[item.production]
        count = item.others
        if setting.way in {"timeslice", "slices"}:
            ours, others, place = outside, self.outside[:count], "outside"
        elif setting.way == "group":
            ours, others, place = outside, self.in_mps(count), "outside"
        else:
            ours, place = inside, "inside"
            others = self.in_mps(count) if setting == MPS else [self.inside[setting]]
        sliced = setting.way in {"slices", "group"}
        if sliced:
            self.set_slices(ours, setting, others)
        try:
            found = self.watched(ours, others, seconds)
        finally:
            if sliced:
                self.set_slices(ours, Setting(setting.way), others)
        one = {
            "setting": asdict(setting),
            "again": False,
            "tune": setting.way == "group",
            "found": found,
            "place": place,
            "paired": item.production in POISSON,
        }
        return {**one, **self.figures(one, alone)}

    def figures(self, one: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was measured in a cell relative to alone."""
        base = self.other_alone["inside" if one["setting"]["way"] in {"group", "mps", "caps"} else "outside"]
        return _relative(one["found"], alone[one["place"]], base, paired=one["paired"])

    def finished(self, cells: Sequence[Mapping[str, Any]], alone: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return cells relative to all that was seen of production alone, without what they were computed from."""
        both = [{**one, **self.figures(one, alone)} for one in cells]
        return [{key: value for key, value in one.items() if key not in {"found", "place", "paired"}} for one in both]

    def in_mps(self, count: int) -> list[Job]:
        """Return others in MPS without a cap."""
        second = [self.second] if self.second is not None else []
        return [self.inside[MPS], *second][:count]

    def others_alone(self) -> None:
        """Measure the other job alone, once per batch."""
        if not self.other_alone:
            for place, job in (("outside", self.outside[0]), ("inside", self.inside[MPS])):
                found = self.watched(None, [job], 0.8 * self.window)
                self.other_alone[place] = found["other_rates"][0]

    # -- rows ----------------------------------------------------------------------------------------------------------

    def row(self, item: Item) -> dict[str, Any]:
        """Measure a row."""
        self.others_alone()
        measure = {"pair": self.pair, "two": self.two, "weights": self.weights, "pause": self.pause}[item.kind]
        began = time.monotonic()
        found = measure(item)
        return {
            **asdict(item),
            "taken": _now(),
            "gpu": self.gpu,
            **self.meter.about,
            "window": self.window,
            "took": round(time.monotonic() - began, 1),
            **found,
        }

    def seconds(self, item: Item) -> float:
        """Return the length of a window."""
        return self.window * LONGER.get(item.production, 1.0) * (0.7 if item.short else 1.0)

    def alone(self, item: Item, places: Sequence[str]) -> dict[str, Any]:
        """Measure production alone."""
        outside, inside = self.production[item.production]
        jobs = {"outside": outside, "inside": inside}
        return {place: self.watched(jobs[place], [], self.seconds(item)) for place in places}

    def pair(self, item: Item) -> dict[str, Any]:
        """Measure one production job next to one other, under every way."""
        seconds, wanted = self.seconds(item), targets(item.production, item.other)
        alone = self.alone(item, ("outside", "inside"))
        if known := self.known(item, wanted):
            return self.again(item, known, alone)
        cells = [self.cell(item, AS_IT_IS, alone, seconds)]
        self.searched(SLICES, item, cells, alone)
        self.line(slices(item.production), item, cells, alone)
        # The host may have drifted since.
        _more(alone["outside"], self.watched(self.production[item.production][0], [], 0.7 * seconds))
        cells += [self.cell(item, one, alone, seconds) for one in (MPS, LOW)]
        self.searched(CAPS, item, cells, alone)
        self.line(caps(), item, cells, alone)
        return {**self.chosen(item, cells, alone, wanted), "alone": _alone(alone), "other_alone": self.other_alone}

    def searched(self, way: str, item: Item, cells: list[dict[str, Any]], alone: Mapping[str, Any]) -> None:
        """Measure what tune's search of a way asks for, until it has an answer to each target."""
        outside = self.production[item.production][0]
        request = outside.state[SERVICE_NS] / 1000 if item.production in LATENCY else None
        for number, target in enumerate(targets(item.production, item.other), 1):
            # It is bounded by itself.
            most = number * (5 if item.short else 8)
            while (setting := next_of(way, cells, target, most, request_us=request)) is not None:
                cells.append({**self.cell(item, setting, alone, self.seconds(item)), "tune": True})

    def line(
        self, settings: Sequence[Setting], item: Item, cells: list[dict[str, Any]], alone: Mapping[str, Any]
    ) -> None:
        """Measure settings that were not measured, from what gives the other most, until two meet the target."""
        wanted = targets(item.production, item.other)
        for setting in settings if not item.short else ():
            own = [one for one in cells if setting_of(one) in settings]
            met = [one for one in own if all(judged([one], target)[0].meets for target in wanted)]
            if setting not in {setting_of(one) for one in cells} and (len(met) < 2 or setting.way != "caps"):
                cells.append(self.cell(item, setting, alone, self.seconds(item)))

    def known(self, item: Item, wanted: Sequence[Target]) -> list[Setting]:
        """Return the settings that a later start repeats; none in the first."""
        if item.start == 1:
            return []
        rows = read_rows([Path(self.options.out), *self.options.done])
        first = next((row for row in rows if _key(row) == (item.kind, item.production, item.other, 1)), None)
        return [] if first is None else known_settings(first["cells"], wanted)

    def again(self, item: Item, known: Sequence[Setting], alone: dict[str, Any]) -> dict[str, Any]:
        """Measure known settings with new processes."""
        seconds = self.seconds(item)
        cells = [self.cell(item, one, alone, seconds) for one in known]
        _more(alone["outside"], self.watched(self.production[item.production][0], [], 0.7 * seconds))
        rest = {"choices": [], "alone": _alone(alone), "other_alone": self.other_alone}
        return {"cells": self.finished(cells, alone), **rest}

    def chosen(
        self, item: Item, cells: list[dict[str, Any]], alone: Mapping[str, Any], wanted: Sequence[Target]
    ) -> dict[str, Any]:
        """Measure what tune's rule chooses from the cells again."""
        inside = self.production[item.production][1]
        _more(alone["inside"], self.watched(inside, [], 0.5 * self.seconds(item)))
        cells = [{**one, **self.figures(one, alone)} for one in cells]
        choices = []
        for target in wanted:
            pick = choose(seen_by_tune(cells), target)
            if pick is None:
                continue
            again = self.cell(item, pick[0], alone, self.seconds(item))
            again["again"] = True
            choices.append({"target": asdict(target), "meets": pick[1], "cell": self.finished([again], alone)[0]})
        return {"cells": self.finished(cells, alone), "choices": choices}

    def two(self, item: Item) -> dict[str, Any]:
        """Measure production next to two others: each with its slice, and both in one MPS daemon with one slice."""
        wanted = targets(item.production, item.other, 2)
        alone = self.alone(item, ("outside", "inside"))
        seconds = self.seconds(item)
        if known := self.known(item, wanted):
            return self.again(item, known, alone)
        cells = [self.cell(item, one, alone, seconds) for one in (AS_IT_IS, *two_settings(), MPS)]
        _more(alone["outside"], self.watched(self.production[item.production][0], [], 0.7 * seconds))
        return {**self.chosen(item, cells, alone, wanted), "alone": _alone(alone), "other_alone": self.other_alone}

    def weights(self, _item: Item) -> dict[str, Any]:
        """Measure two jobs that always work, with slices of 3:1."""
        first, second = self.outside
        base = _mean(self.other_alone["outside"])
        found = []
        own = _weighted(3, 1)
        for ours, other in dict.fromkeys((own, *WEIGHTS)):
            for job, us in ((first, ours), (second, other)):
                if job.channels is not None:
                    self.control.set_slice(job.channels, us)
            seen = self.watched(None, [first, second], self.window)
            shares = [_mean(rates) / base for rates in seen["other_rates"]]
            found.append(
                {
                    "slices": [ours, other],
                    "by": "gpushare" if (ours, other) == own else "slices",
                    "shares": shares,
                    "sum": sum(shares),
                }
            )
        for job in (first, second):
            if job.channels is not None:
                self.control.restore_slices(job.channels)
        return {"cells": found}

    def pause(self, _item: Item) -> dict[str, Any]:
        """Take a training off the GPU and put it back on 10,000 times; then by the verb."""
        job = self.outside[0]
        channels = job.channels
        if channels is None:
            raise RuntimeError("no channels")
        before = _mean(self.other_alone["outside"])
        off, on, driver = [], [], []
        job.state.forget()
        job.state[HOLD] = 0
        time.sleep(0.3)
        limit = min(time.monotonic() + PAUSE_SECONDS, self.deadline - 10.0)
        count = PAUSES if not self.fake else 20
        try:
            while len(off) < count and time.monotonic() < limit:
                began = time.monotonic()
                driver.append(self.control.disable(channels))
                done = time.monotonic()
                self.control.enable(channels)
                on.append(time.monotonic() - done)
                off.append(done - began)
        finally:
            self.control.enable(channels)
        job.state.forget()
        time.sleep(0.2)
        start = time.monotonic()
        time.sleep(self.window)
        end = time.monotonic()
        after = len(job.state.logged(start, end)) / (end - start)
        verbs = self.verbs(job)
        job.state[HOLD] = 1
        self.wait_idle([job])
        self.check_alive()
        times = {"off": off, "on": on, "off_in_driver": driver}
        return {
            "count": len(off),
            **{name: _milliseconds(one) for name, one in times.items()},
            "rate_after": after / before if before else None,
            "verbs": verbs,
        }

    def verbs(self, job: Job) -> list[dict[str, Any]]:
        """Pause and resume a job by gpushare's verbs, if it has them."""
        found: list[dict[str, Any]] = []
        if self.fake or not os.path.exists("gpushare/cli/pause.py"):
            return found
        env = {**os.environ, "GPUSHARE_STATE_DIR": f"{self.directory}/state"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        for verb in ("pause", "resume") * 5:
            began = time.monotonic()
            words = [sys.executable, "-m", "gpushare", verb, str(job.pid)]
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=20, check=False)
            took = round(time.monotonic() - began, 4)
            found.append({"verb": verb, "seconds": took, "rc": done.returncode, "said": done.stderr[-200:]})
            time.sleep(0.1)
        if job.channels is not None:
            self.control.enable(job.channels)
        return found

    # -- all of it -----------------------------------------------------------------------------------------------------

    def work(self, claimed: Iterator[Batch], done: set[tuple[Any, ...]], out: Path) -> None:
        """Take batches until there are none, or the time is over."""
        for batch in claimed:
            left = tuple(item for item in batch.items if item.key not in done)
            if not left:
                continue
            if not self.time_for(15.0 + self.took(left[0])):
                continue
            try:
                self.begin(Batch(batch.other, batch.start, left))
                for item in left:
                    if not self.time_for(self.took(item)):
                        continue
                    self.check_xids()
                    row = self.row(item)
                    _write(out, row)
                    _say(f"{self.gpu[:12]} {self.deadline - time.monotonic():4.0f} s left: {_line(row)}")
            except Stop:
                raise
            except (Exception, GpushareError) as error:  # noqa: BLE001 - the other batches are worth the machine's time
                self.check_xids()
                text = f"{type(error).__name__}: {error}"
                _say(f"{self.gpu[:12]} FAILED {batch.other}: {text}")
                _write(
                    out, {"kind": "error", "other": batch.other, "start": batch.start, "text": text, "taken": _now()}
                )
                self.end_programs()

    def took(self, item: Item) -> float:
        """Return how long a row takes."""
        return item.seconds(self.window, SETTLE + 0.05)

    def time_for(self, seconds: float) -> bool:
        """Return whether this number of seconds is left."""
        return time.monotonic() + seconds < self.deadline

    def check_xids(self) -> None:
        """Stop at the first Xid since the start."""
        now = xids()
        if self.xids is not None and now is not None and len(now) > len(self.xids):
            _write(Path(self.options.out), {"kind": "xid", "lines": now[len(self.xids) :][:5], "taken": _now()})
            raise Stop(f"Xid: {now[len(self.xids) :][:3]}")

    def smoke(self) -> None:
        """Try each program outside MPS, and then each way with one pair."""
        began = time.monotonic()
        starting = {name: Job(self, name, {}, name) for name in PROGRAMS}
        failed = self.failures(list(starting.values()))
        for job, text in failed:
            del starting[job.name]
            _say(f"FAILED {text}")
        _say(f"ready after {time.monotonic() - began:.1f} s, {self.meter.used_mib()} MiB")
        for name, job in starting.items():
            self.command(job, MEASURE)
            found = self.watched(job, [], 1.0)
            if not found["latencies"]:
                _say(f"FAILED {job.fail('did nothing in a second')}")
                continue
            tail = f"p50 {percentile(found['latencies'], 50):.2f} p99 {percentile(found['latencies'], 99):.2f} ms"
            service, layers = job.state[SERVICE_NS] / 1e6, job.state[LAYERS]
            drawn = f"{found['mhz']} MHz {found['watts']} W, {job.state[SMS]} SMs"
            _say(f"{name:12} {_mean(found['rates']):8.1f}/s {tail}, request {service:.3f} ms, {layers} layers, {drawn}")
        self.end_jobs(list(starting.values()))
        item = Item("pair", "bert-eager", "bert-train", 1)
        starts = time.monotonic()
        self.begin(Batch("bert-train", 1, (item,)), everything=False)
        _say(f"a batch is ready after {time.monotonic() - starts:.1f} s, {self.meter.used_mib()} MiB")
        self.others_alone()
        alone = self.alone(item, ("outside", "inside"))
        cap, slice_ = Setting("caps", threads=50.0, low=True), Setting("slices", production_us=16000, other_us=200)
        for setting in (AS_IT_IS, slice_, MPS, LOW, cap, Setting("group", production_us=16000, other_us=500)):
            one = self.cell(item, setting, alone, 1.0)
            figures = (one["kept"], one["p99"] or 0.0, one["other"] or 0.0, one["mhz"], one["watts"])
            _say("{:45} kept {:.2f} p99 {:.2f}x other {:.2f} at {} MHz {} W".format(setting.title, *figures))
        paused = self.outside[0].channels
        if paused is not None:
            off = self.control.disable(paused)
            on = self.control.enable(paused)
            _say(f"off {1000 * off:.2f} ms, on {1000 * on:.2f} ms")
        _say(f"smoke: {time.monotonic() - began:.1f} s, {self.meter.used_mib()} MiB, Xids since: {self.fresh_xids()}")

        if failed:
            raise RuntimeError(f"{len(failed)} programs failed")

    def failures(self, jobs: Sequence[Job]) -> list[tuple[Job, str]]:
        """Wait until each program is ready or has ended; return those that are not ready, with what they said."""
        limit, ended = time.monotonic() + START_SECONDS, {}
        while time.monotonic() < limit:
            ended |= self.starter.ask({"ended": True})
            if all(job.state[READY] or str(job.pid) in ended for job in jobs):
                break
            time.sleep(0.05)
        left = [job for job in jobs if not job.state[READY]]
        return [(job, str(job.fail(f"ended with {ended.get(str(job.pid))}"))) for job in left]

    def fresh_xids(self) -> int:
        """Return how many Xids there were since the start."""
        return len(xids() or []) - len(self.xids or [])


class Meter:
    """What NVML tells of the GPU; nothing without one."""

    def __init__(self, gpu: str, *, fake: bool) -> None:
        self._nvml: Any = None
        self.about: dict[str, Any] = {"gpu_name": "simulated", "driver": None}
        if not fake:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu)
            name, driver = pynvml.nvmlDeviceGetName(self._gpu), pynvml.nvmlSystemGetDriverVersion()
            self.about = {"gpu_name": name, "driver": driver}

    def read(self) -> dict[str, Any]:
        """Return the clock, the power and why the clock is not higher, at this moment."""
        nvml = self._nvml
        if nvml is None:
            return {"mhz": None, "watts": None, "why": None}
        return {
            "mhz": nvml.nvmlDeviceGetClockInfo(self._gpu, nvml.NVML_CLOCK_SM),
            "watts": round(nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000),
            "why": self._reasons(),
        }

    def _reasons(self) -> int | None:
        """Return why the clock is not higher, as bits (nvmlClocksEventReason*); older bindings have another name."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if (read := getattr(self._nvml, name, None)) is not None:
                with contextlib.suppress(self._nvml.NVMLError):
                    return int(read(self._gpu))
        return None

    def used_mib(self) -> int:
        """Return the memory in use."""
        if self._nvml is None:
            return 0
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu, version=self._nvml.nvmlMemory_v2).used >> 20)

    def close(self) -> None:
        """End it."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()


# -- figures -----------------------------------------------------------------------------------------------------------


def _rates(done: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    """Return the rate in each part of a window."""
    length = (end - start) / PARTS
    counts = [0] * PARTS
    for at, _ in done:
        counts[min(PARTS - 1, int((at - start) / length))] += 1
    return [count / length for count in counts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _more(alone: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add a second look at production alone."""
    alone["rates"] = [*alone["rates"], *found["rates"]]
    alone["latencies"] = [*alone["latencies"], *found["latencies"]]


def _alone(alone: Mapping[str, Any]) -> dict[str, Any]:
    return {
        place: {
            "rate": _mean(one["rates"]),
            "rates": one["rates"],
            "p50_ms": percentile(one["latencies"], 50) if one["latencies"] else None,
            "p99_ms": percentile(one["latencies"], 99) if one["latencies"] else None,
            "requests": len(one["latencies"]),
            "mhz": one["mhz"],
            "watts": one["watts"],
        }
        for place, one in alone.items()
    }


def _relative(
    found: Mapping[str, Any], alone: Mapping[str, Any], base: Sequence[float], *, paired: bool
) -> dict[str, Any]:
    """Return what was measured relative to alone, with 95 % intervals where there are any.

    ``paired``: the requests come at the same moments in each window of this length, of which alone had one first.
    """
    kept = paired_ratio(found["rates"], alone["rates"][:PARTS]) if paired else ratio(found["rates"], alone["rates"])
    shares = [ratio(rates, base) for rates in found["other_rates"]]
    sums = [sum(parts) for parts in zip(*found["other_rates"], strict=True)]
    both = ratio(sums, base)
    now, before = found["latencies"], alone["latencies"]
    tail = percentile(now, 99) / percentile(before, 99) if now and before else None
    windows = [[Window(rate=None, latencies=tuple(one))] for one in (before, now)]
    between = p99_factor_interval(*windows) if now and before else None
    return {
        "rate": _mean(found["rates"]),
        "kept": 0.0 if kept is None else kept.value,
        "kept_low": None if kept is None else kept.low,
        "kept_high": None if kept is None else kept.high,
        "p50_ms": percentile(now, 50) if now else None,
        "p99_ms": percentile(now, 99) if now else None,
        "p50": percentile(now, 50) / percentile(before, 50) if now and before else None,
        "p99": tail,
        "p99_low": None if between is None else between[0],
        "p99_high": None if between is None else between[1],
        "requests": len(now),
        "others": [0.0 if one is None else one.value for one in shares],
        "other": _mean(sums) / _mean(base) if both is None else both.value,
        "other_low": None if both is None else both.low,
        "other_high": None if both is None else both.high,
        "mhz": found["mhz"],
        "watts": found["watts"],
        "why": found["why"],
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = [1000 * one for one in seconds]
    return {
        "median": percentile(values, 50),
        "p99": percentile(values, 99),
        "p99.9": percentile(values, 99.9),
        "max": max(values),
    }


def _weighted(*weights: float) -> tuple[int, ...]:
    """Return the slices that gpushare gives jobs with these weights."""
    return tuple(Rule(weight=weight).microseconds for weight in weights)


def _line(row: Mapping[str, Any]) -> str:
    """Return a row in words, for whoever watches."""
    title = f"{row['kind']} {row['production']} + {row['other']} start {row['start']} ({row['took']} s)"
    if row["kind"] in {"pair", "two"}:
        for one in row["choices"]:
            cell = one["cell"]
            figures = f"{cell['kept']:.2f} {cell['p99'] or 0:.2f}x {cell['other'] or 0:.2f}"
            title += f"; {one['target']['p99'] or ''} {Setting(**cell['setting']).title}: {figures}"
    elif row["kind"] == "weights":
        title += "; " + ", ".join(f"{c['slices']}: {c['shares'][0]:.2f}:{c['shares'][1]:.2f}" for c in row["cells"])
    else:
        title += f"; {row['count']} times, off {row['off']}"
    return title


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _write(out: Path, row: Mapping[str, Any]) -> None:
    """Add a line at once: a machine may be taken back at any time."""
    line = json.dumps(_rounded(row)) + "\n"
    with out.open("ab", buffering=0) as file:
        file.write(line.encode())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of result files; a line that was cut off is left out."""
    found = []
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


# -- the machine -------------------------------------------------------------------------------------------------------


def _gpus(options: argparse.Namespace) -> list[str]:
    if options.fake:
        return [f"fake-{number}" for number in range(2)]
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    found = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    pynvml.nvmlShutdown()
    return found


def _wanted(options: argparse.Namespace) -> list[Batch]:
    return [batch for batch in batches(options.starts) if options.only is None or batch.other in options.only]


def _claimed(wanted: Sequence[Batch], directory: str) -> Iterator[Batch]:
    """Take batches that no other worker has taken."""
    for number, batch in enumerate(wanted):
        try:
            os.close(os.open(f"{directory}/claim-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield batch


def _work(options: argparse.Namespace) -> int:
    """Be the worker of one GPU."""

    def late(number: int, _frame: object) -> None:
        raise Stop(f"signal {number}")

    signal.signal(signal.SIGTERM, late)
    # PR_SET_PDEATHSIG: it does not outlive what started it.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    directory = f"{options.directory}/{options.gpu[-8:]}"
    os.makedirs(directory, exist_ok=True)
    worker = Worker(options, options.gpu, directory)
    code = 0
    try:
        if options.smoke:
            worker.smoke()
        else:
            done = {_key(row) for row in read_rows([options.out, *options.done]) if row["kind"] not in {"error", "xid"}}
            worker.work(_claimed(_wanted(options), options.directory), done, options.out)
    except (Exception, GpushareError) as error:  # noqa: BLE001 - whatever it was, the GPU is left empty
        _say(f"{options.gpu[:12]} STOPPED {type(error).__name__}: {error}")
        code = 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.end()
    return code


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("kind", "production", "other", "start"))


def _everything(options: argparse.Namespace) -> int:
    began = time.monotonic()
    gpus = _gpus(options)[: options.gpus or None]
    before = xids()
    directory = tempfile.mkdtemp(prefix="co", dir="/tmp")
    words = [sys.executable, "-m", "benchmarks.colocation", "--out", str(options.out), "--directory", directory]
    words += ["--until", str(began + options.seconds), "--window", str(options.window), "--starts", str(options.starts)]
    words += [f"--{name}" for name in ("fake", "smoke") if getattr(options, name)]
    words += ["--only", ",".join(options.only)] if options.only else []
    for path in options.done:
        words += ["--done", str(path)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = []
    for gpu in gpus:
        env = {**os.environ, **({} if options.fake else {"CUDA_VISIBLE_DEVICES": gpu})}
        workers.append(subprocess.Popen([*words, "--gpu", gpu], env=env))
    try:
        _wait(workers, began + options.seconds + 25.0)
    except KeyboardInterrupt:
        pass
    finally:
        for process in workers:
            if process.poll() is None:
                process.terminate()
        for process in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)
    time.sleep(0 if options.fake else 2.0)
    after = xids()
    new = [] if before is None or after is None else after[len(before) :]
    used = {} if options.fake else {gpu: Meter(gpu, fake=False).used_mib() for gpu in gpus}
    _say(
        f"{time.monotonic() - began:.0f} s; MiB left {used}; Xids {new[:3]}; exit codes {[one.returncode for one in workers]}"
    )
    left = {item.key for batch in _wanted(options) for item in batch.items}
    left -= {_key(row) for row in read_rows([options.out, *options.done])}
    _say(f"{len(left)} rows left" + (": run it again with the same --out, or --done FILE" if left else ""))
    return 1 if new or any(one.returncode for one in workers) else 0


def _wait(workers: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    while time.monotonic() < until and any(one.poll() is None for one in workers):
        time.sleep(0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, try, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("colocation.jsonl"), help="a line of JSON per row is added to it"
    )
    parser.add_argument(
        "--done", type=Path, action="append", default=[], help="rows of an earlier run, which are left out"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no row that would end later (default: 480)")
    parser.add_argument("--starts", type=int, default=3, help="how often all programs start (default: 3)")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of a cell (default: 3)")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs (default: all)")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"these other jobs: {','.join(OTHERS)}")
    parser.add_argument("--smoke", action="store_true", help="try each program and each way once")
    parser.add_argument("--fake", action="store_true", help="without a GPU")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="write the table from these results")
    for name in ("--gpu", "--directory"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        render(read_rows(options.render), Path("docs/measurements.md"))
        return 0
    return _work(options) if options.gpu else _everything(options)


if __name__ == "__main__":
    sys.exit(main())
