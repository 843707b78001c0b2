"""`gpushare bench` on a real GPU: ``python -m benchmarks.gpu_bench_path --json OUT``.

The built-in workload (256 x 256 matrices) at 1, 4 and 8 copies under every way that can run, and copies of three jobs of
`benchmarks.jobs` (PyTorch). The figures are the documents of `gpushare bench`. Changes no setting of the GPU; about ten
minutes. It exits with 1 if anything was unexpected. ``--rehearse`` tries the script on a simulated host, where the jobs are
the simulation's.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from benchmarks.gpu_script import GPU, Part, measured, parser_of


def built_in(part: Part) -> dict[str, Any]:
    """Run the built-in workload."""
    return bench(part, "--size", "256", "--copies", "1,4,8", "--repeat", "3", "--for", "1s")


def copies(part: Part, job: str, count: int, ways: str, repeat: int) -> dict[str, Any]:
    """Run copies of a job that prints its rate."""
    program = [sys.executable, "-m", "benchmarks.jobs", job]
    if part.rehearse:
        program = [sys.executable, "-m", "gpushare.sim.job", "--need", "20", "--rate", "670", "--every", "0.1"]
    words = ("--copies", str(count), "--ways", ways, "--repeat", str(repeat), "--for", "1500ms")
    return bench(part, *words, "--metric", "^rate=(.+)$", "--", *program, copies=count)


def bench(part: Part, *words: str, copies: int = 8) -> dict[str, Any]:
    """Return the document; the choice for so many copies must be within 3 % of the best, and gain enough."""
    document = part.did("bench", "-g", GPU, *words).data
    cells = {
        cell["way"]: cell["throughput"]["mean"]
        for cell in document["cells"]
        if cell["copies"] == copies and cell["throughput"]
    }
    (pick,) = (pick for pick in document["picks"] if pick["copies"] == copies)
    gain = cells[pick["way"]] / cells["timeslice"]
    part.expect(cells[pick["way"]] >= 0.97 * max(cells.values()), f"the choice is not the best: {pick}, {cells}")
    part.expect(gain >= 1.5, f"{copies} copies gain {gain:.2f} x over time-slicing")
    failures = [text for cell in document["cells"] for text in cell["failures"]]
    part.expect(not failures, f"copies failed: {failures[:3]}")
    return document


def main() -> int:
    """Run the parts."""
    options = parser_of(__doc__, "built_in,tiny,mid,small").parse_args()
    caps = "timeslice,mps,mps:100/n,mps:200/n"
    parts = {
        "built_in": built_in,
        "tiny": partial(copies, job="tiny", count=8, ways=caps, repeat=3),
        "mid": partial(copies, job="mid", count=16, ways=caps, repeat=3),
        "small": partial(copies, job="small", count=8, ways="timeslice,mps,mps:200/n", repeat=2),
    }
    return measured(options, parts)


if __name__ == "__main__":
    sys.exit(main())
