"""The whole MPS path with real CUDA clients, in one call: ``python -m benchmarks.gpu_mps_path --json OUT``.

Run it on a machine with PyTorch and one NVIDIA GPU that nobody else uses. Parts:

- ``limits``: two clients with different limits, started by `gpushare run`, which starts the daemon.
- ``alone``: one client alone, with 100, 50 and 25 % of the threads.
- ``kill``: `gpushare stop` of a client with more than 100 ms of queued work, next to a small training, ``--tries`` times.
- ``endings``: Ctrl-C, SIGTERM and the death of gpushare with such a client, ``--endings`` times each.
- ``outside``: a program that runs outside MPS is found and ended by ``--strict``.

Changes no setting of the GPU: only MPS daemons in a private directory. It prints JSON and exits with 1 if anything was
unexpected. ``--rehearse`` tries the script on a simulated host, and measures nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_script import GPU, LATER, Job, Part, State, Work, measured, parser_of, pretended, run_job
from benchmarks.jobs import small

GIB = 1 << 30


# -- clients -----------------------------------------------------------------------------------------------------------


def _steady(_state: State) -> Work:
    """A small training."""
    import torch

    return Work(small(torch))


def _deep(_state: State) -> Work:
    """A deep queue: 256 products of 8192 x 8192 in flight, always one batch ahead."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    events: list[Any] = []

    def step() -> None:
        for _ in range(64):
            torch.matmul(a, a, out=out)
            torch.relu_(out)
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) > 1:
            events.pop(0).synchronize()

    return Work(step)


def _probe(state: State) -> Work:
    """Print what this client may use, then wait."""
    import torch

    facts = {
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "allocated_mib": _largest_allocation(torch),
        "products_per_second": round(_products_per_second(torch, 1.0), 1),
    }
    print(json.dumps(facts), flush=True)
    return pretended(state)


def _largest_allocation(torch: Any) -> int:
    """Return how many MiB can be allocated in blocks of 64 MiB before CUDA refuses (up to 12 GiB)."""
    held = []
    try:
        while len(held) < 192:
            held.append(torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        pass
    count = len(held)
    del held
    torch.cuda.empty_cache()
    return 64 * count


def _products_per_second(torch: Any, seconds: float) -> float:
    """Return the rate of 4096 x 4096 half-precision products."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    for _ in range(5):
        a @ a
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        count += 20
    return count / (time.perf_counter() - start)


# -- parts -------------------------------------------------------------------------------------------------------------


def _facts(part: Part, probe: Job) -> dict[str, Any]:
    """Return what a client says that it may use; nothing when rehearsing."""
    probe.wait()
    return {} if part.rehearse else json.loads(probe.printed().splitlines()[0])


def _joined(part: Part, kind: str, *, later: bool = False) -> Job:
    """Start a client from a shell's environment: `mps env`, without `run`, which the simulated host needs."""
    if part.rehearse:
        return part.run(kind)
    return Job(part, kind, later=later, **part.did("mps", "env").data["environment"])


def _clients(part: Part) -> list[dict[str, Any]]:
    daemons = part.did("mps", "status").data["mps_daemons"]
    return [client for daemon in daemons for server in daemon["servers"] for client in server["clients"]]


def _steady_now(steady: Job, since: float) -> tuple[dict[str, Any], bool]:
    """Return the rate of the neighbour in the last half second, its longest step since a time, and whether it broke."""
    now = time.monotonic()
    rate = len(steady.state.logged(now - 0.5, now)) / 0.5
    longest = max((ms for _, ms in steady.state.logged(since, now)), default=None)
    figures = {"steady_rate_after": rate, "steady_longest_ms": None if longest is None else round(longest, 2)}
    return figures, not rate or steady.process.poll() is not None


def limits(part: Part) -> dict[str, Any]:
    """Return what two clients with different limits may use, and what `status` shows of them."""
    both = [
        part.run("probe", "--threads", threads, "--memory", memory) for threads, memory in (("25", "4G"), ("50", "8G"))
    ]
    probes = [_facts(part, job) for job in both]
    rows = sorted(_clients(part), key=lambda row: row["threads_percent"] or 0)
    shown = [(row["threads_percent"], row["memory_limit_bytes"]) for row in rows]
    part.expect(shown == [(25.0, 4 * GIB - GIB // 2), (50.0, 8 * GIB - GIB // 2)], f"status shows {shown}")
    if not part.rehearse:
        part.expect(probes[0]["multiprocessors"] < probes[1]["multiprocessors"], f"no client sees its cap: {probes}")
        refused = probes[0]["allocated_mib"] < 4096 and probes[1]["allocated_mib"] < 8192
        part.expect(refused, f"an allocation over the limit succeeds: {probes}")
    for job in both:
        part.expect("attached to MPS" in job.said(), f"run does not prove the attachment: {job.said()}")
    part.end()
    part.expect(not part.did("mps", "status").data["mps_daemons"], "the daemon did not go with its last program")
    return {"probes": probes, "status": rows}


def alone(part: Part) -> dict[str, Any]:
    """Return what a client may use alone, by its percentage of the threads."""
    rates = {}
    for percent in ("100", "50", "25"):
        rates[percent] = _facts(part, part.run("probe", "--threads", percent))
        part.end()
    return rates


def kill(part: Part) -> dict[str, Any]:
    """Stop clients with a deep queue beside a steady one."""
    part.did("mps", "start", "-g", GPU, "--memory", "20G")
    steady = _joined(part, "steady")
    steady.wait()
    # The next ones load PyTorch meanwhile.
    ahead = [_joined(part, "deep", later=True) for _ in range(2)]
    outcomes: list[dict[str, Any]] = []
    while len(outcomes) < part.options.tries and not (outcomes and outcomes[-1]["broke"]):
        victim = ahead.pop(0)
        if len(outcomes) + 2 < part.options.tries:
            ahead.append(_joined(part, "deep", later=True))
        outcomes.append(_kill_one(part, victim, steady))
    part.jobs = [steady, *ahead]
    part.end()
    part.did("mps", "stop", "-g", GPU, "-y")
    broke = sum(outcome["broke"] for outcome in outcomes)
    part.expect(not broke, f"the neighbour broke in {broke} of {len(outcomes)} tries")
    return {"outcomes": outcomes, "broke": broke, "tries": len(outcomes)}


def _kill_one(part: Part, victim: Job, steady: Job) -> dict[str, Any]:
    victim.state[LATER] = 0
    victim.wait()
    time.sleep(0.6)
    began = time.monotonic()
    done = part.did("stop", str(victim.pid), "-y")
    time.sleep(0.8)
    figures, broke = _steady_now(steady, began)
    (stopped,) = done.data.get("jobs") or [{}]
    return {
        "exit_code": done.code,
        "drain": stopped.get("drain"),
        "server_status": stopped.get("server_status"),
        **figures,
        "broke": broke or done.code != 0,
    }


def endings(part: Part) -> dict[str, Any]:
    """End gpushare by signals while its client has a deep queue, next to the steady client."""
    steady = part.run("steady")
    steady.wait()
    outcomes = [
        _end_one(part, number, steady)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        for _ in range(part.options.endings)
    ]
    broke = [outcome for outcome in outcomes if outcome["broke"]]
    part.expect(not broke, f"the neighbour broke in {len(broke)} of {len(outcomes)} endings: {broke}")
    return {"outcomes": outcomes}


def _end_one(part: Part, number: signal.Signals, steady: Job) -> dict[str, Any]:
    victim = part.run("deep")
    part.jobs.remove(victim)
    victim.wait()
    time.sleep(0.8)
    before = len(_clients(part))
    began = time.monotonic()
    victim.process.send_signal(number)
    code = victim.process.wait(60)
    # Of a gpushare that was killed, the guard ends the program.
    while number == signal.SIGKILL and len(_clients(part)) >= before and time.monotonic() - began < 30:
        time.sleep(0.2)
    seconds = round(time.monotonic() - began, 2)
    time.sleep(0.8)
    figures, broke = _steady_now(steady, began)
    clients = len(_clients(part))
    part.expect(clients < before, f"the client lives on after {number.name}")
    return {"signal": number.name, "exit_code": code, "seconds": seconds, **figures, "broke": broke}


def outside(part: Part) -> dict[str, Any]:
    """Start a program whose pipe directory a wrapper changes."""
    wrapper = [*part.gpushare("run", "-g", GPU, "--strict", "--"), "env", "CUDA_MPS_PIPE_DIRECTORY=/nonexistent"]
    wrapper += ["GPUSHARE_SIM_OUTSIDE=1"] if part.rehearse else []
    job = Job(part, "steady", wrapper, **({"GPUSHARE_SIM_OUTSIDE": "1"} if part.rehearse else {}))
    part.jobs.remove(job)
    code = job.process.wait(60)
    part.expect(code == 1 and "outside MPS" in job.said(), f"it is not reported and ended: {code}, {job.said()}")
    return {"exit_code": code, "said": job.said().strip()}


def main() -> int:
    """Run a client, or the parts."""
    parts: dict[str, Callable[[Part], dict[str, Any]]] = {
        "limits": limits, "alone": alone, "kill": kill, "endings": endings, "outside": outside,
    }  # fmt: skip
    parser = parser_of(__doc__, ",".join(parts))
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--endings", type=int, default=5)
    options = parser.parse_args()
    if options.job:
        return run_job(options, {"probe": _probe, "steady": _steady, "deep": _deep})
    return measured(options, parts)


if __name__ == "__main__":
    sys.exit(main())
