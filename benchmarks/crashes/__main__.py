"""Crash gpushare at each of its side effects: ``python -m benchmarks.crashes [--verb NAME] [--every K]``.

Each changing command runs on a prepared simulated host, again and again. Each time it is killed (SIGKILL) before another
one of its side effects, or one of its system calls fails (ENOSPC, EACCES, EIO; "full": nothing has room from there on).
After that one further command must bring back the old or the new state, all of it; nothing of gpushare's may be left
running, and nothing of others may have been touched. What does not hold is printed with the line that repeats it.

``--real-daemon PATH`` uses the real nvidia-cuda-mps-control for the commands of MPS and run. It needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.crashes.hits import Chosen, Counts, Hits, warm
from benchmarks.crashes.inject import AFTER, ERRNOS, FULL, KILL
from benchmarks.crashes.report import Result, table, write
from benchmarks.crashes.rows import MPS_HOST, rows
from benchmarks.crashes.world import World


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one process tries of a row."""

    row: str
    chosen: Chosen
    real_program: str | None


def _try(part: _Part) -> Counts:
    return _hits(part.row, part.real_program).try_all(part.chosen)


def _hits(name: str, real_program: str | None) -> Hits:
    return Hits(_rows[name], _world(real_program))


# The same functions for all rows of a process: what one has prepared, another need not.
_rows = {row.name: row for row in rows()}


@functools.cache
def _world(real_program: str | None) -> World:
    """Return the world of this process, which is removed at its end."""
    world = World(MPS_HOST, Path(tempfile.mkdtemp(prefix="gc", dir=_place())), real_program)
    multiprocessing.util.Finalize(None, _remove, args=(world, os.getpid()), exitpriority=1)
    return world


def _place() -> str:
    # Short: the pipe directory of a daemon lies below it. In memory where there is such a place: no fsync waits.
    return next(one for one in ("/dev/shm", "/tmp") if os.access(one, os.W_OK))  # noqa: S108


def _remove(world: World, owner: int) -> None:
    if os.getpid() == owner:
        world.remove()


def _parser() -> argparse.ArgumentParser:
    names = [row.name for row in rows()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crashes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--verb",
        "--verbs",
        dest="verbs",
        action="append",
        metavar="NAME",
        help="only these: a name, or its beginning with *",
    )
    parser.add_argument("--list", action="store_true", help="print the names of all commands")
    parser.add_argument("--at", type=int, help="with one --verb: only this effect")
    parser.add_argument("--fault", action="append", choices=[KILL, AFTER, FULL, *ERRNOS], help="only these faults")
    parser.add_argument("--sample", type=int, metavar="N", help="N points of each command, always the same")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th of these points")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="with --every: begin at the N-th point")
    parser.add_argument("--brief", action="store_true", help="one further command for each point, not all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--real-daemon", metavar="PATH", help="the real nvidia-cuda-mps-control")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts and violations there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the counts into this Markdown file")
    parser.set_defaults(names=names)
    return parser


def _chosen(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    known = [row.name for row in rows() if row.real or arguments.real_daemon is None]
    if arguments.verbs is None:
        return known
    found = []
    for asked in arguments.verbs:
        names = [one for one in known if one == asked or (asked.endswith("*") and one.startswith(asked[:-1]))]
        if not names:
            parser.error(f"there is no command '{asked}' here; see --list")
        found += names
    return list(dict.fromkeys(found))


def main(words: Sequence[str] | None = None) -> int:
    """Try, print, and return 1 if a promise was broken."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.list:
        print("\n".join(arguments.names))
        return 0
    names = _chosen(arguments, parser)
    with tempfile.TemporaryDirectory(prefix="gc", dir=_place()) as directory:
        warm(Path(directory))
    if arguments.at is not None:
        faults = arguments.fault or [KILL]
        found = [_hits(name, arguments.real_daemon).try_one(arguments.at, fault) for name in names for fault in faults]
    else:
        found = _try_all(arguments, names)
    result = Result.of(found, real_daemon=arguments.real_daemon is not None, part=_part(arguments))
    for violation in result.violations:
        print(f"{violation.row}, effect {violation.at} ({violation.effect}), {violation.fault}:")
        print(f"  {'then ' + violation.then + ': ' if violation.then else ''}{violation.what}")
        print(
            f"  again: {violation.again}" + (f" --real-daemon {arguments.real_daemon}" if arguments.real_daemon else "")
        )
    print(table(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result.data(), indent=1) + "\n", encoding="utf-8")
    if arguments.write is not None:
        write(arguments.write, result)
    return 1 if result.violations else 0


def _part(arguments: argparse.Namespace) -> str:
    """Return which part of all points it is, in words; "" for all of them."""
    words = [] if arguments.sample is None else [f"{arguments.sample} points of each command"]
    words += [] if arguments.every == 1 else [f"every {arguments.every}th point"]
    words += [] if arguments.fault is None else [f"only {', '.join(arguments.fault)}"]
    return "; ".join(words)


def _try_all(arguments: argparse.Namespace, names: Sequence[str]) -> list[Counts]:
    jobs = max(1, arguments.jobs)
    faults = None if arguments.fault is None else tuple(arguments.fault)
    parts = [
        _Part(
            row=name,
            chosen=Chosen(
                faults=faults,
                sample=arguments.sample,
                every=arguments.every * jobs,
                offset=arguments.offset + arguments.every * share,
                brief=arguments.brief,
            ),
            real_program=arguments.real_daemon,
        )
        for name in names
        for share in range(jobs)
    ]
    if jobs == 1:
        return [_try(part) for part in parts]
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=None) as pool:
        found = []
        for number, counts in enumerate(pool.imap_unordered(_try, parts, chunksize=1), start=1):
            bad = f", {len(counts.violations)} violations" if counts.violations else ""
            print(f"[{number}/{len(parts)}] {counts.row}: {counts.kills + counts.errors} points{bad}", file=sys.stderr)
            found.append(counts)
        # In order, so that each removes its world.
        pool.close()
        pool.join()
        return sorted(found, key=lambda one: names.index(one.row))


if __name__ == "__main__":
    raise SystemExit(main())
