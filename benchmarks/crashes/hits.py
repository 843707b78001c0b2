"""Hits one command at each of its side effects, and judges what one further command makes of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pkgutil
import random
import shlex
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import gpushare
from benchmarks.crashes.inject import AFTER, FAULTS, KILL
from benchmarks.crashes.rows import Row, Words, words_of
from benchmarks.crashes.world import Done, Look, World
from gpushare import cli
from gpushare.connect import connect
from gpushare.sim import admin
from gpushare.sim.state import parse_spec

_PR_SET_CHILD_SUBREAPER: Final = 36
# Their exit code, and what they print, is of the programs that they run.
RUNS_A_PROGRAM: Final = frozenset({"run", "farm"})
# A row with more effects polls; what comes later is the same again.
MOST: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One promise that was not kept."""

    row: str
    at: int
    fault: str
    effect: str
    what: str
    then: str = ""

    @property
    def again(self) -> str:
        """Return the line that repeats it."""
        return f"python -m benchmarks.crashes --verb {shlex.quote(self.row)} --at {self.at} --fault {self.fault}"


@dataclass(kw_only=True)
class Counts:
    """What was tried of one row."""

    row: str
    effects: int = 0
    kills: int = 0
    errors: int = 0
    violations: list[Violation] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "violations": [{**asdict(one), "again": one.again} for one in self.violations]}


@dataclass(frozen=True)
class _Outcome:
    code: int | None
    look: Look


@dataclass(frozen=True)
class _References:
    """What is there before and after the command, with its exit code and its effects where nothing hurts it."""

    old: Look
    new: Look
    code: int | None
    effects: list[list[str]]


# What each command does first, on another host than those of the rows. None of it changes anything.
_LOOKS: Final[Sequence[Words]] = (
    ("status",),
    ("mps", "start", "-g", "0", "--exclusive", "--threads", "50", "--memory", "8G", "--dry-run"),
    ("timeslice", "set", "long", "-g", "0", "--dry-run"),
    ("run", "-g", "0", "--dry-run", "--", "true"),
    ("mig", "apply", "-g", "1", "1g.10gb", "1c.2g.20gb*2", "--dry-run"),
)


def load() -> None:
    """Load all of gpushare and build its commands, so that each process that is forked has them."""
    for module in pkgutil.walk_packages(gpushare.__path__, "gpushare."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("psutil", "yaml", "pynvml", "tempfile", "jsonschema"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _build(cli.root())
    gc.collect()
    gc.freeze()


def warm(directory: Path) -> None:
    """Load gpushare and run its first steps, in an empty directory: each process that is forked has done them."""
    load()
    host = World("sim:2xh100", directory)
    host.enter()
    connect(host.spec)
    admin.set_mig(host.spec, "1", [])
    for words in _LOOKS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(["--host", host.spec, *words, "-o", "json"])
        if code != 0:
            raise RuntimeError(said.getvalue())
    gc.freeze()


def _build(group: Any) -> None:
    """Build the commands of a group, which are built on first use."""
    for command in group.children().values():
        if hasattr(command, "children"):
            _build(command)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which points of a row are tried: of these faults, a random sample, thinned to every Nth."""

    faults: tuple[str, ...] | None = None
    sample: int | None = None
    every: int = 1
    offset: int = 0
    # One further command for each point, in turn, instead of all of them.
    brief: bool = False

    def of(self, row: str, points: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return the chosen ones of all points of a row; the same in each run."""
        found = [point for point in points if self.faults is None or point[1].removesuffix("-after") in self.faults]
        if self.sample is not None and self.sample < len(found):
            found = sorted(random.Random(row).sample(found, self.sample))  # noqa: S311 - nobody is to guess it
        return found[self.offset :: self.every]


class Hits:
    """One row on one world."""

    def __init__(self, row: Row, world: World) -> None:
        # Guards and programs whose gpushare died come to this process, which buries them.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.row = row
        self.world = world
        self.world.spec = parse_spec(row.host).text
        self.counts = Counts(row=row.name)
        self._after: dict[int, tuple[_Outcome, _Outcome]] = {}
        self._references: _References | None = None

    def try_all(self, chosen: Chosen) -> Counts:
        """Hit the command at the chosen ones of its effects, by each fault that they can have."""
        for place, (number, fault) in enumerate(self._points(chosen)):
            self.hit(number, fault, one_of_then=place if chosen.brief else None)
        return self.counts

    def try_one(self, at: int, fault: str) -> Counts:
        """Hit the command at one effect."""
        self.hit(at, fault)
        return self.counts

    def _points(self, chosen: Chosen) -> list[tuple[int, str]]:
        """Return the points of the command as it runs unhurt: each effect with each of its faults."""
        effects = self._effects()
        self.counts.effects = len(effects)
        points = [(int(number), fault) for number, kind, *_ in effects[:MOST] for fault in (KILL, *FAULTS[kind])]
        if points:
            points.append((points[-1][0], AFTER))
        return chosen.of(self.row.name, points)

    def _effects(self) -> list[list[str]]:
        refer = self._refer()
        if self.row.guard_after is None:
            return refer.effects
        self._to("old")
        self._command()
        self.world.settle()
        return self.world.effects("guard")

    def hit(self, at: int, fault: str, *, one_of_then: int | None = None) -> None:
        """Hit the command once, and judge what is there, then what each further command makes of it (or one of them)."""
        refer = self._refer()
        self._to("old")
        done = self._command(at, fault)
        left = self._settled()
        effects = self.world.effects("guard" if self.row.guard_after is not None else "effects")
        effect = next((f"{kind} {what}" for _, kind, what, was in effects if was), "none: it ran through")
        killed = fault in {KILL, AFTER}
        if killed:
            self.counts.kills += 1
        else:
            self.counts.errors += 1

        def broken(what: str, then: str = "") -> None:
            self.counts.violations.append(
                Violation(row=self.row.name, at=at, fault=fault, effect=effect, what=what, then=then)
            )

        if left:
            broken(f"left running: {', '.join(left.values())}")
        if (why := done.improper()) is not None:
            broken(f"it says: {why}")
        look = self.world.look()
        looked = one_of_then is None or self.row.runs or one_of_then % 4 == 0
        if killed and looked and (why := self._run(("status",)).improper()) is not None:
            broken(f"it says: {why}", "gpushare status")
        if not killed and self.row.guard_after is None and not self._error_is_good(done, look, broken):
            return
        if killed or look not in (refer.old, refer.new):
            self._then(broken, one_of_then)

    def _error_is_good(self, done: Done, look: Look, broken: Any) -> bool:
        """Judge a command that one call failed for; return whether it is worth going on."""
        refer = self._refer()
        if done.code == refer.code:
            if look != refer.new:
                if self.row.command[0] in {*RUNS_A_PROGRAM, "stop"} and _is_left_by_the_dead(look, refer.new):
                    # The exit code is the program's. The next command removes it.
                    return True
                broken(f"exit code {done.code}, and it is not done: {difference(look, refer.new)}")
                return False
            return True
        hints = any(error.get("hint") for error in done.errors) or "\nhint: " in done.err
        if self.row.command[0] != "run" and not hints:
            broken(f"exit code {done.code} without an error and a hint: {(done.err or done.out)[:200]!r}")
        return True

    def _then(self, broken: Any, one_of_then: int | None) -> None:
        """Judge each further command on the host as it is now."""
        tried = list(range(len(self.row.then)))
        # A real daemon cannot be copied: there each point has one further command, too.
        if one_of_then is not None or self.world.real_program is not None:
            place = (one_of_then or 0) % len(tried)
            tried = tried[place : place + 1]
        missing = [number for number in tried if number not in self._after]
        if len(tried) > 1 or missing:
            self.world.save("hit")
        # What they make of the unhurt states, where that is not known yet.
        for number in missing:
            self._learn(number)
        for number in tried:
            if missing or number != tried[0]:
                self.world.put_back("hit")
            self._judge(number, broken)

    def _judge(self, number: int, broken: Any) -> None:
        """Run a further command, and compare what it makes of the host with what it makes of the unhurt states."""
        from_old, from_new = self._after[number]
        words = self.row.then[number]
        done = self._run(words)
        left = self._settled()
        look = self.world.look()
        said = f"gpushare {' '.join(words_of(self.world, words)[:6])}"
        if left:
            broken(f"left running: {', '.join(left.values())}", said)
        if (why := done.improper()) is not None:
            broken(f"it says: {why}", said)
        elif look not in (from_old.look, from_new.look):
            nearest = min((from_old.look, from_new.look), key=lambda one: len(_differing(look, one)))
            broken(f"exit code {done.code}, {_said(done)}{difference(look, nearest)}", said)
        elif done.code not in {0, from_old.code, from_new.code}:
            broken(f"exit code {done.code}: {_said(done)}", said)

    def _refer(self) -> _References:
        """Prepare the host, and learn what is there before and after the unhurt command."""
        if self._references is None:
            world = self.world
            self._prepare()
            old = world.look()
            world.save("old")
            done = self._run(self.row.command)
            effects = world.effects()
            self._settled()
            new = world.look()
            world.save("new")
            if done.code != 0:
                message = f"{self.row.name}: the unhurt command ends with {done}"
                raise RuntimeError(message)
            self._references = _References(old, new, done.code, effects)
            if world.real_program is not None:
                for number in range(len(self.row.then)):
                    self._learn(number)
        return self._references

    def _prepare(self) -> None:
        """Prepare the host; one that was prepared in this way before is put back."""
        if self.world.real_program is not None or not self.world.recall(self.row.prepare):
            self.world.clear()
            self.row.prepare(self.world)
            self.world.remember(self.row.prepare)

    def _learn(self, number: int) -> None:
        """Learn what a further command makes of the old and of the new state."""
        outcomes = []
        for name in ("old", "new"):
            self._to(name)
            done = self._run(self.row.then[number])
            self._settled()
            outcomes.append(_Outcome(done.code, self.world.look()))
        self._after[number] = (outcomes[0], outcomes[1])

    def _to(self, name: str) -> None:
        """Put the host back to a kept state; a real daemon cannot be copied and is started again."""
        if self.world.real_program is None:
            self.world.put_back(name)
            return
        self._prepare()
        if name == "new":
            self._run(self.row.command)
            self._settled()

    def _command(self, at: int = 0, fault: str = KILL) -> Done:
        words = [*words_of(self.world, self.row.command)]
        if self.row.guard_after is None:
            return self._run(words, at=at, fault=fault)
        return self._run(
            words, guard=f"{at}:{fault}", kill_after_program=self.row.guard_after, program=self.row.program
        )

    def _run(self, words: Words, **hit: Any) -> Done:
        given = words_of(self.world, words)
        # A program's own output is no document.
        return self.world.run(given if given[0] in RUNS_A_PROGRAM else [*given, "-o", "json"], **hit)

    def _settled(self) -> dict[int, str]:
        """Wait for guards and programs; end and return those that stay.

        Where the guard was killed too, nobody is left to end the program: the user does.
        """
        if not self.row.runs:
            return {}
        left = self.world.settle(1.0 if self.row.guard_after is not None else 20.0)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.world.settle(5.0)
        return {} if self.row.guard_after is not None else left


def _said(done: Done) -> str:
    text = "; ".join(str(error.get("message")) for error in done.errors) or done.err.strip()
    return f"{text[:300]}: " if text else ""


def _differing(look: Look, wanted: Look) -> list[str]:
    return sorted(key for key in look.keys() | wanted.keys() if look.get(key) != wanted.get(key))


def _is_left_by_the_dead(look: Look, wanted: Look) -> bool:
    """Return whether two looks differ by records of processes that have ended, and nothing else."""
    return all(key not in wanted and '"pid": "dead"' in look[key] for key in _differing(look, wanted))


def difference(look: Look, wanted: Look) -> str:
    """Return what differs between what is there and what should be, in one line."""
    return (
        "; ".join(
            f"{key} is {look.get(key, 'not there')!r}, not {wanted.get(key, 'absent')!r}"
            for key in _differing(look, wanted)[:4]
        )
        or "nothing differs"
    )
