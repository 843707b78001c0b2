"""`benchmarks.sharing` on several GPUs of one host at the same time: each GPU takes the next piece of the work."""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
from collections.abc import Sequence

from benchmarks.sharing_bench import Bench


def pieces(bench: Bench, parts: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each piece, those of which latencies count first and those that load the CPU last."""
    found: list[list[str]] = []
    for part in parts:
        if part == "farm":
            found += [["--parts", part, "--farms", name] for name, *_ in bench.farms]
        elif part in {"jobs", "pause"}:
            found.append(["--parts", part])
        else:
            chosen = [pair for pair in bench.pairs if part == "pairs" or pair.compared]
            chosen.sort(key=lambda pair: pair.p99 is None)
            found += [["--parts", part, "--pairs", pair.name.replace(" ", "")] for pair in chosen]
    return found


def on_all(gpus: Sequence[str], words: Sequence[str], work: Sequence[Sequence[str]]) -> int:
    """Run all pieces, each on the first GPU that is free, and return how many failed."""
    queue, failed = collections.deque(work), 0

    def serve(gpu: str) -> None:
        nonlocal failed
        while queue:
            piece = queue.popleft()
            sys.stderr.write(f"GPU {gpu}: {' '.join(piece)}\n")
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.sharing", "-g", gpu, *words, *piece],
                stdout=subprocess.DEVNULL,
                check=False,
            )
            failed += done.returncode != 0

    threads = [threading.Thread(target=serve, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed
