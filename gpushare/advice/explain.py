"""Explanations of error codes and log lines: CUDA, NVML, Xid, and the logs of the MPS daemon and server.

The facts are in ``data/explanations.yaml``, those of our own error codes in ``data/error-codes.yaml``. Both are read on
first use.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple

from gpushare.base.errors import NotFound
from gpushare.base.package import package_rows
from gpushare.base.units import counted, plain_name
from gpushare.base.values import dataclass

TITLES: Final = {
    "cuda": "CUDA error",
    "nvml": "NVML return code",
    "xid": "Xid",
    "mps": "MPS log line",
    "concept": "concept",
    "column": "column of status or jobs",
    "gpushare": "gpushare error",
    "exit": "exit code",
}
_CODE: Final = re.compile(
    r"(?:(cuda|nvml|xid|exit)\b)?[\s:#-]*(?:error|code|return code|status)?[\s:#=(-]*(\d{1,4})\)?", re.IGNORECASE
)
_XID: Final = re.compile(r"\bXid\s*(?:\([^)]*\))?[\s:]*(\d{1,4})\b", re.IGNORECASE)
_CUDA: Final = re.compile(
    r"\b(?:CUDA(?:_| )error|CUDA result|cudaError_t|CUresult|error code)\D{0,12}(\d{1,4})\b", re.IGNORECASE
)
# in_use, or as JSON has it: "code": "in_use".
_OWN: Final = re.compile(r'(?:gpushare[\s:]+)?(?:error[\s:]+)?(?:"?code"?[\s:=]+)?"?([a-z]+(?:_[a-z]+)*)"?,?')
_NAME: Final = re.compile(r"\b(?:CUDA_ERROR_\w+|NVML_\w+|cudaError\w+)\b", re.IGNORECASE)
# Shorter texts ("Not Found", "Timeout") are not significant inside a longer line.
_LEAST_SIGNIFICANT: Final = 16


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One error or log line: its meaning, its usual cause on a shared GPU, the next commands, and the source."""

    # cuda, nvml, xid, mps, concept, column, gpushare or exit (the exit code of gpushare or of a job).
    kind: str
    code: int | None = None
    names: tuple[str, ...] = ()
    # The vendor's own text.
    text: str | None = None
    # A log line, as a regular expression.
    pattern: str | None = None
    meaning: str
    cause: str
    next: tuple[str, ...] = ()
    source: str

    @property
    def title(self) -> str:
        """Return its name: ``CUDA error 805``."""
        return TITLES[self.kind] if self.code is None else f"{TITLES[self.kind]} {self.code}"

    @property
    def normal(self) -> bool:
        """Return whether the line is normal, not a sign of a fault."""
        return self.cause.startswith("Normal")


@dataclass(frozen=True, kw_only=True)
class Explained(Explanation):
    """One error, log line or concept, and where a log has it."""

    # The first such line of the log.
    line: str
    # The number of that line.
    number: int = 1
    # How many such lines the log has.
    lines: int = 1
    json_properties: ClassVar = ("title", "normal")


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is known of a log: its explained lines, and how many lines it has."""

    matches: tuple[Explained, ...]
    lines: int

    @property
    def faults(self) -> tuple[Explained, ...]:
        return tuple(match for match in self.matches if not match.normal)

    @property
    def verdict(self) -> str:
        """Return in one or two sentences what is wrong."""
        faults = self.faults
        if not faults:
            normal = sum(match.lines for match in self.matches)
            return f"nothing is wrong: {counted(self.lines, 'line')}, {normal} of them known, all normal"
        first = min(faults, key=lambda match: match.number)
        where = f"line {first.number} of {self.lines}"
        more = "" if len(faults) == 1 else f"; {counted(len(faults), 'kind')} of errors in all"
        return f"{first.meaning} First in {where}{more}."


@lru_cache(maxsize=1)
def own_codes() -> dict[str, Explanation]:
    """Return the error codes of gpushare itself."""
    return {
        code: Explanation(
            kind="gpushare",
            names=(code,),
            meaning=meaning,
            cause=group["cause"],
            next=tuple(group["next"]),
            source="gpushare; the message and the hint of the error say the particulars",
        )
        for group in package_rows("error-codes.yaml")
        for code, meaning in group["codes"].items()
    }


@lru_cache(maxsize=1)
def explanations() -> tuple[Explanation, ...]:
    """Return all but our own error codes: of CUDA, NVML, Xids, MPS, and words."""
    return tuple(
        Explanation(**{**entry, "kind": kind, "names": tuple(entry.get("names", ())), "next": tuple(entry["next"])})
        for kind, entries in package_rows("explanations.yaml").items()
        for entry in entries
    )


def explain(text: str) -> tuple[Explained, ...]:
    """Return what explains a code (``805``, ``Xid 31``), a name, or each line of a pasted text.

    A bare number may be several codes: all of them are returned.

    Raises:
        NotFound: there is no explanation.
    """
    asked = text.strip()
    code = _CODE.fullmatch(asked)
    if code is not None:
        kind, number = (code[1] or "").lower(), int(code[2])
        entries = [entry for entry in explanations() if entry.code == number and (kind or entry.kind) == entry.kind]
        if kind == "exit" and not entries:
            entries = [_exit_explanation(number)]
        if not entries:
            raise _not_explained_error(asked)
        return tuple(Explained(**vars(entry), line=asked) for entry in entries)
    concepts = (entry for entry in explanations() if entry.kind == "concept")
    named = [entry for entry in concepts if plain_name(asked) in map(plain_name, entry.names)]
    if asked and named:
        return tuple(Explained(**vars(entry), line=asked) for entry in named)
    matches = list(explain_log(text.splitlines()).matches)
    own_code = _OWN.fullmatch(asked)
    if own_code is not None and own_code[1] in own_codes():
        matches.insert(0, Explained(**vars(own_codes()[own_code[1]]), line=asked))
    if not matches:
        raise _not_explained_error(asked)
    return tuple(matches)


def _exit_explanation(code: int) -> Explanation:
    """Return the explanation of an exit code that is not listed: a signal above 128, else it is the program's own."""
    number = code - 128
    try:
        names: tuple[str, ...] = (signal.Signals(number).name,)
        meaning = f"Signal {number} ended the program (128 + {number})."
    except ValueError:
        names = ()
        meaning = "The program ended with a code of its own."
    return Explanation(
        kind="exit",
        code=code,
        names=names,
        meaning=meaning,
        cause="The program's output or manual says more.",
        next=("gpushare jobs", "gpushare logs JOB"),
        source="signal(7)",
    )


# Nothing that is known is longer; a longer line is cut.
_LONGEST: Final = 4096


def explain_log(lines: Iterable[str]) -> Log:
    """Return what explains the lines of a log of any length."""
    matches: dict[Explanation, Explained] = {}
    known_beginnings = _known_beginnings()
    number = 0
    for number, text in enumerate(lines, 1):
        line = text[:_LONGEST].strip()
        # Quickly told: in a line without a known word, the search finds nothing.
        if known_beginnings.isdisjoint(word[:4] for word in _WORD.findall(line.lower())):
            continue
        # No code has four digits, and no time tells anything: without them most lines of a log are the same, and the
        # search is made once for all of these.
        for entry in _explanations_of(_LONG_NUMBER.sub("9999", _TIME.sub("", line))):
            match = matches.get(entry)
            if match is None:
                matches[entry] = Explained(**vars(entry), line=line, number=number)
            else:
                matches[entry] = replace(match, lines=match.lines + 1)
    return Log(matches=tuple(matches.values()), lines=number)


_TIME: Final = re.compile(r"\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?")
_LONG_NUMBER: Final = re.compile(r"\d{4,}")
_WORD: Final = re.compile(r"[a-z]{2,}")


@lru_cache(maxsize=1)
def _known_beginnings() -> frozenset[str]:
    """Return the first four letters of every word in an explanation: a line without any of them is not searched."""
    entries = explanations()
    texts = (text for entry in entries for text in (entry.pattern, entry.text, *entry.names, TITLES[entry.kind]))
    return frozenset(word[:4] for text in texts for word in _WORD.findall((text or "").lower()))


class _Sought(NamedTuple):
    """What is looked for in a line, as a sign that an explanation is meant."""

    entry: Explanation
    # The whole line, or a name of an error in it, as a plain name.
    names: frozenset[str]
    # Parts of the line, in lower case.
    parts: tuple[str, ...]
    pattern: re.Pattern[str] | None


@lru_cache(maxsize=1)
def _all_sought() -> tuple[_Sought, ...]:
    """Return what is looked for in a line, for all explanations but those of words without a pattern."""
    sought = []
    for entry in explanations():
        if entry.kind == "concept" and entry.pattern is None:
            continue
        texts = [*entry.names, *filter(None, [entry.text])]
        # A line of a log of MPS is told by its pattern.
        significant = [] if entry.kind == "mps" else [text for text in texts if len(text) >= _LEAST_SIGNIFICANT]
        parts = tuple(text.lower() for text in significant)
        pattern = None if entry.pattern is None else re.compile(entry.pattern, re.IGNORECASE)
        sought.append(_Sought(entry, frozenset(map(plain_name, texts)), parts, pattern))
    return tuple(sought)


@lru_cache(maxsize=4096)
def _explanations_of(line: str) -> tuple[Explanation, ...]:
    """Return what explains one line of a log: by a number, a name, a text or a pattern in it."""
    numbers = {
        "xid": {int(number) for number in _XID.findall(line)},
        "cuda": {int(number) for number in _CUDA.findall(line)},
    }
    names = {plain_name(name) for name in (*_NAME.findall(line), line)}
    lowered = line.lower()
    return tuple(
        sought.entry
        for sought in _all_sought()
        if (sought.entry.code is not None and sought.entry.code in numbers.get(sought.entry.kind, ()))
        # CUDA_ERROR_X of the driver API is cudaErrorX of the runtime.
        or not names.isdisjoint(sought.names)
        or (sought.pattern is not None and sought.pattern.search(line))
        or any(part in lowered for part in sought.parts)
    )


def _not_explained_error(asked: str) -> NotFound:
    shown = asked.splitlines()[0][:80] if asked else ""
    hint = "give a code (805), a name, or a log line; for text from stdin: -; what a job printed: gpushare logs JOB"
    return NotFound(f"no explanation found for '{shown}'", hint, code="not_explained")
