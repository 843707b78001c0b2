"""The programs of `benchmarks.colocation`, with PyTorch and random weights, and the process that starts them.

``python -m benchmarks.colocation_programs`` imports PyTorch once and then forks a program for each line of JSON on its
standard input, so that a program is ready after a second or two. A program waits until it is released, works until it is
held again, and logs the end and the milliseconds of each request or step.

Production, as servers have it:

- ``bert-graph``, ``bert-eager``: an encoder like BERT-base, 128 tokens, batch 1, bf16, as a CUDA graph and without one.
  Requests arrive at random (Poisson), at half of what it can serve; a latency counts from the arrival.
- ``infer``: as in `benchmarks.jobs`, a request every 10 ms.
- ``enc1``: the encoder as one CUDA graph of 1 ms, every 25 ms.
- ``enc5``: the same with a batch that fills the GPU, 5.6 ms, at half load.
- ``decode``: steps of a language model, batch 4, that reads 7 GB of weights and keys per step; one step after the other.
- ``mid``, ``membw``: as in `benchmarks.jobs`.

Others: ``bert-train``, ``gpt2-train``, ``resnet-train`` (models like BERT-base, GPT-2 and ResNet-50, which fill the GPU),
``big`` and ``membw``. All of them have at most two steps in the queue.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from benchmarks import jobs

# Places in a program's state: 8 bytes each.
HOLD, READY, RUNS, COMMAND, SERVICE_NS, LAYERS, SMS, STEPS = range(8)
# Of COMMAND: measure the service time while nobody else works; or take the one that stands in the state.
MEASURE, TAKE = 1, 2
# More than the longest request, and less than what a queue may hold up the next cell.
_IDLE_SECONDS: Final = 0.002
_SEED: Final = 20261122
_AHEAD: Final = 2

Step = Callable[[], None]


class State:
    """A file that a program shares with the benchmark: numbers, and next to it a log of what was done."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.exists(path):
            Path(path).write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)

    def __getitem__(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self._map, 8 * at)[0])

    def __setitem__(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self._map, 8 * at, value)

    def log(self) -> IO[bytes]:
        """Open the log for more."""
        return open(self.path + ".log", "ab", buffering=0)

    def logged(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return (end, milliseconds) of what ended between two moments of CLOCK_MONOTONIC."""
        try:
            raw = Path(self.path + ".log").read_bytes()
        except FileNotFoundError:
            return []
        pairs = struct.iter_unpack("<dd", raw[: len(raw) // 16 * 16])
        return [pair for pair in pairs if start < pair[0] <= end]

    def forget(self) -> None:
        """Empty the log; only while the program is held."""
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.path + ".log", 0)


@dataclass
class Program:
    """What a program does: ``pace`` is closed (steps one after the other), poisson or period."""

    step: Step
    pace: str = "closed"
    period: float = 0.0
    finish: Step = lambda: None
    # Build the request with this number of layers, or so that the request takes a given time.
    build: Callable[[int], Step] | None = None
    layers: int = 0
    target: float = 0.0


# -- models ------------------------------------------------------------------------------------------------------------


def _layers(
    torch: Any, count: int, width: int, *, heads: int, wide: int, causal: bool = False, gated: bool = False
) -> Any:
    """Return the layers of a transformer, in bf16 on the GPU; written out, so that every kernel is launched by itself."""
    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
            self.gate = nn.Linear(width, wide) if gated else None
            # Keys and values of earlier tokens, where one token is generated after another.
            self.past: Any = None

        def forward(self, hidden: Any) -> Any:
            batch, length, _ = hidden.shape
            qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            query, key, value = qkv[0], qkv[1], qkv[2]
            if self.past is not None:
                self.past[0][:, :, -1:].copy_(key)
                self.past[1][:, :, -1:].copy_(value)
                key, value = self.past
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal and self.past is None)
            hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            found = self.norm2(hidden)
            opened = functional.gelu(self.up(found))
            if self.gate is not None:
                opened = opened * self.gate(found)
            return hidden + self.down(opened)

    with torch.device(_device(torch)):
        return nn.ModuleList([Layer().to(torch.bfloat16) for _ in range(count)])


def _device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _graph(torch: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a CUDA graph of some work and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def _served(torch: Any, ids: Any, result: Any, run: Step) -> Step:
    """Return a request: its tokens are copied to the GPU, its answer back."""
    there = ids.cpu().pin_memory() if ids.is_cuda else ids.clone()
    answer = torch.empty(result.shape, dtype=result.dtype, pin_memory=ids.is_cuda)

    def step() -> None:
        ids.copy_(there, non_blocking=True)
        run()
        answer.copy_(result, non_blocking=True)
        if ids.is_cuda:
            torch.cuda.synchronize()

    return step


def _encoder(torch: Any, *, batch: int, length: int, graph: bool) -> Callable[[int], Step]:
    """Return what builds a request to an encoder like BERT-base with a given number of layers; weights repeat after 12."""
    device = _device(torch)
    layers = _layers(torch, 12, 768, heads=12, wide=3072).eval()
    words = torch.nn.Embedding(30522, 768, device=device, dtype=torch.bfloat16)
    places = torch.randn(length, 768, device=device, dtype=torch.bfloat16)
    head = torch.nn.Linear(768, 2, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, 30522, (batch, length), device=device)

    def build(count: int) -> Step:
        def work() -> Any:
            with torch.no_grad():
                hidden = words(ids) + places
                for number in range(count):
                    hidden = layers[number % 12](hidden)
                return head(hidden[:, 0])

        if graph and device == "cuda":
            captured, result = _graph(torch, work)
            return _served(torch, ids, result, captured.replay)
        result = work()

        def run() -> None:
            result.copy_(work())

        return _served(torch, ids, result, run)

    return build


def _bert(torch: Any, *, graph: bool) -> Program:
    build = _encoder(torch, batch=1, length=128, graph=graph)
    return Program(build(12), "poisson")


def _enc1(torch: Any) -> Program:
    build = _encoder(torch, batch=1, length=128, graph=True)
    return Program(build(12), "period", 0.025, build=build, layers=12, target=0.001)


def _enc5(torch: Any) -> Program:
    build = _encoder(torch, batch=16, length=512, graph=True)
    return Program(build(12), "period", 0.0, build=build, layers=12, target=0.0056)


def _infer(torch: Any) -> Program:
    return Program(jobs.infer(torch), "period", 0.010)


def _decode(torch: Any, layers: int = 16, width: int = 4096, wide: int = 11008, past: int = 1024) -> Program:
    device, batch, heads = _device(torch), 4, max(1, width // 128)
    stack = _layers(torch, layers, width, heads=heads, wide=wide, gated=True).eval()
    for layer in stack:
        shape = (2, batch, heads, past, width // heads)
        layer.past = torch.randn(shape, device=device, dtype=torch.bfloat16)
    words = torch.nn.Embedding(32000, width, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=device)

    def work() -> Any:
        with torch.no_grad():
            hidden = words(ids)
            for layer in stack:
                hidden = layer(hidden)
            chosen = torch.matmul(hidden, words.weight.t()).argmax(-1)
            ids.copy_(chosen)
            return chosen

    if device != "cuda":
        return Program(lambda: _drop(work()))
    captured, result = _graph(torch, work)

    def step() -> None:
        captured.replay()
        # The next token is needed.
        result.tolist()

    return Program(step)


def _drop(_value: Any) -> None:
    """Take a result."""


def _ahead(torch: Any, work: Step) -> Program:
    """Return a program whose steps are queued, a few at most; so a training keeps the GPU busy."""
    if not torch.cuda.is_available():
        return Program(work)
    queue: collections.deque[Any] = collections.deque()

    def step() -> None:
        work()
        event = torch.cuda.Event()
        event.record()
        queue.append(event)
        if len(queue) > _AHEAD:
            queue.popleft().synchronize()

    def finish() -> None:
        torch.cuda.synchronize()
        queue.clear()

    return Program(step, finish=finish)


def _language_training(
    torch: Any, *, batch: int, length: int, words: int, causal: bool, scored: int, layers: int = 12
) -> Program:
    """Return a training of a model like BERT-base or GPT-2, all in bf16; ``scored`` tokens count for the loss."""
    device, nn = _device(torch), torch.nn
    stack = _layers(torch, layers, 768, heads=12, wide=3072, causal=causal).train()
    table = nn.Embedding(words, 768, device=device, dtype=torch.bfloat16)
    places = nn.Parameter(torch.zeros(length, 768, device=device, dtype=torch.bfloat16))
    parameters = [*stack.parameters(), *table.parameters(), places]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=device == "cuda")
    ids = torch.randint(0, words, (batch, length), device=device)
    wanted = torch.randint(0, words, (scored,), device=device)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        hidden = table(ids) + places
        for layer in stack:
            hidden = layer(hidden)
        scores = torch.matmul(hidden.reshape(-1, 768)[:scored], table.weight.t())
        nn.functional.cross_entropy(scores, wanted).backward()
        optimizer.step()

    return _ahead(torch, work)


def _bert_train(torch: Any) -> Program:
    return _language_training(torch, batch=64, length=128, words=30522, causal=False, scored=1280)


def _gpt2_train(torch: Any) -> Program:
    return _language_training(torch, batch=4, length=1024, words=50257, causal=True, scored=4096)


def _resnet_train(torch: Any, batch: int = 32, side: int = 224) -> Program:
    """Return a training of a model like ResNet-50: bottleneck blocks, channels last, bf16, SGD with momentum."""
    nn, device = torch.nn, _device(torch)

    def block(before: int, inner: int, stride: int) -> Any:
        after = 4 * inner

        class Block(nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(
                    nn.Conv2d(before, inner, 1, bias=False),
                    nn.BatchNorm2d(inner),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
                    nn.BatchNorm2d(inner),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(inner, after, 1, bias=False),
                    nn.BatchNorm2d(after),
                )
                plain = before == after and stride == 1
                short = (nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))
                self.short = nn.Identity() if plain else nn.Sequential(*short)

            def forward(self, found: Any) -> Any:
                return nn.functional.relu(self.body(found) + self.short(found))

        return Block()

    parts = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(block(before, inner, stride if number == 0 else 1))
            before = 4 * inner
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    model = model.to(device=device, dtype=torch.bfloat16, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    pictures = torch.randn(batch, 3, side, side, device=device, dtype=torch.bfloat16)
    pictures = pictures.to(memory_format=torch.channels_last)
    wanted = torch.randint(0, 1000, (batch,), device=device)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(pictures), wanted).backward()
        optimizer.step()

    return _ahead(torch, work)


def _membw(torch: Any, power: int = 28) -> Program:
    """Return additions that read and write 12 GB per step, over less memory than those of `benchmarks.jobs`."""
    one, other = (torch.zeros(1 << power, device=_device(torch)) for _ in range(2))

    def step() -> None:
        for _ in range(1 << max(0, 30 - power)):
            torch.add(one, other, out=one)
        if one.is_cuda:
            torch.cuda.synchronize()

    return Program(step)


PROGRAMS: Final[dict[str, Callable[[Any], Program]]] = {
    "bert-graph": lambda torch: _bert(torch, graph=True),
    "bert-eager": lambda torch: _bert(torch, graph=False),
    "infer": _infer,
    "enc1": _enc1,
    "enc5": _enc5,
    "decode": _decode,
    "mid": lambda torch: Program(jobs.mid(torch)),
    "membw": _membw,
    "bert-train": _bert_train,
    "gpt2-train": _gpt2_train,
    "resnet-train": _resnet_train,
    "big": lambda torch: Program(jobs.big(torch)),
}
# Milliseconds of a step, how they come, and their period, when there is no GPU.
FAKES: Final[dict[str, tuple[float, str, float]]] = {
    "bert-graph": (0.5, "poisson", 0),
    "bert-eager": (1.0, "poisson", 0),
    "infer": (0.5, "period", 0.010),
    "enc1": (1.0, "period", 0.025),
    "enc5": (2.0, "period", 0),
}


def _fake(name: str) -> Program:
    ms, pace, period = FAKES.get(name, (2.0, "closed", 0.0))
    return Program(lambda: time.sleep(ms / 1000), pace, period)


# -- one program -------------------------------------------------------------------------------------------------------


def run(name: str, path: str, *, fake: bool) -> None:
    """Run a program until SIGTERM."""
    state = State(path)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = _fake(name) if fake else _built(name, state)
    for _ in range(5):
        program.step()
    program.finish()
    # A collection of garbage would be a latency of its own.
    gc.collect()
    gc.freeze()
    if program.pace != "closed":
        gc.disable()
    state[READY] = 1
    with state.log() as log:
        while not ended:
            if state[COMMAND]:
                _settle(program, state)
                state[COMMAND] = 0
            if state[HOLD]:
                time.sleep(_IDLE_SECONDS)
                continue
            state[RUNS] = 1
            work = _closed if program.pace == "closed" else _paced
            work(program, state, ended, log)
            program.finish()
            state[RUNS] = 0
    program.finish()


def _built(name: str, state: State) -> Program:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    # It builds plans for seconds; the other implementations are as fast here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.init()
    state[SMS] = torch.cuda.get_device_properties(0).multi_processor_count
    return PROGRAMS[name](torch)


def _settle(program: Program, state: State) -> None:
    """Find out how long a request takes, or take that from the state; and make it as long as it is to be."""
    if state[COMMAND] == MEASURE:
        if program.build is not None:
            layers = round(program.layers * program.target / _service(program.step))
            state[LAYERS] = max(2, layers)
            program.step = program.build(state[LAYERS])
            program.step()
        state[SERVICE_NS] = round(1e9 * _service(program.step))
    elif program.build is not None and state[LAYERS]:
        program.step = program.build(state[LAYERS])
        program.step()


def _service(step: Step) -> float:
    """Return the median of the seconds that a request takes, one after the other."""
    took = []
    until = time.monotonic() + 0.4
    while len(took) < 20 or (len(took) < 200 and time.monotonic() < until):
        began = time.monotonic()
        step()
        took.append(time.monotonic() - began)
    # The first ones wake the GPU.
    last = sorted(took[len(took) // 3 :])
    return last[len(last) // 2]


def _closed(program: Program, state: State, ended: list[int], log: IO[bytes]) -> None:
    step, steps = program.step, state[STEPS]
    while not (state[HOLD] or ended):
        began = time.monotonic()
        step()
        now = time.monotonic()
        log.write(struct.pack("<dd", now, 1000 * (now - began)))
        steps += 1
        state[STEPS] = steps


def _paced(program: Program, state: State, ended: list[int], log: IO[bytes]) -> None:
    """Serve requests as they arrive. Each time the same arrivals: cells differ by what runs next to it only."""
    step, service = program.step, state[SERVICE_NS] / 1e9
    arrivals = random.Random(_SEED)  # noqa: S311
    poisson = program.pace == "poisson"
    period = program.period or 2 * service
    due = time.monotonic() + 0.001
    while not (state[HOLD] or ended):
        # It polls, as servers for short requests do: a CPU that has slept is slow at first, which no neighbor has done.
        if time.monotonic() < due:
            continue
        began = time.monotonic()
        step()
        now = time.monotonic()
        log.write(struct.pack("<dd", now, 1000 * (now - (due if poisson else began))))
        state[STEPS] += 1
        # At random it is served late; in time with a clock, what is late is not made up for.
        due = due + arrivals.expovariate(0.5 / service) if poisson else max(due + period, now)


# -- the process that starts them --------------------------------------------------------------------------------------


def main() -> int:
    """Fork a program for each line: {"name", "path", "env", "fake"}; answer its PID; end with standard input."""
    fake = "--fake" in sys.argv
    libc = ctypes.CDLL(None)
    if not fake:
        # Not more: asking for the GPU here would make it unusable in the programs.
        importlib.import_module("torch")
        importlib.import_module("torch.optim")
    children: set[int] = set()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        reply: Any = None
        if "name" in asked:
            pid = os.fork()
            if pid == 0:
                _child(libc, asked, fake=fake)
            children.add(pid)
            reply = pid
        elif "ended" in asked:
            reply = _reaped(children)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    _end(children)
    return 0


def _reaped(children: set[int]) -> dict[str, int]:
    """Return the exit codes of programs that have ended since the last look."""
    found = {}
    for pid in sorted(children):
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            children.discard(pid)
            found[str(pid)] = os.waitstatus_to_exitcode(status)
    return found


def _end(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10.0
    while children and time.monotonic() < deadline:
        _reaped(children)
        time.sleep(0.01)
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _child(libc: Any, asked: dict[str, Any], *, fake: bool) -> None:
    code = 1
    try:
        # PR_SET_PDEATHSIG: no program outlives the one that started it.
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        errors = os.open(asked["path"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(errors, 2)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.environ.update(asked["env"])
        run(asked["name"], asked["path"], fake=fake)
        code = 0
    except BaseException:  # noqa: BLE001 - what forked it must not go on here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
