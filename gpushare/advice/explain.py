"""Explanations of error codes and log lines: CUDA, NVML, Xid, and the logs of the MPS daemon and server.

The facts are in ``data/explanations.yaml``, which is read on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from gpushare.errors import NotFound

TITLES: Final = {"cuda": "CUDA error", "nvml": "NVML return code", "xid": "Xid", "mps": "MPS log line"}
_CODE: Final = re.compile(
    r"(?:(cuda|nvml|xid)\b)?[\s:#-]*(?:error|code|return code)?[\s:#=(-]*(\d{1,4})\)?", re.IGNORECASE
)
_XID: Final = re.compile(r"\bXid\s*(?:\([^)]*\))?[\s:]*(\d{1,4})\b", re.IGNORECASE)
_CUDA: Final = re.compile(
    r"\b(?:CUDA(?:_| )error|CUDA result|cudaError_t|CUresult|error code)\D{0,12}(\d{1,4})\b", re.IGNORECASE
)
_NAME: Final = re.compile(r"\b(?:CUDA_ERROR_\w+|NVML_\w+|cudaError\w+)\b", re.IGNORECASE)
# Shorter texts ("Not Found", "Timeout") are not significant inside a longer line.
_TELLING: Final = 16


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One error or log line: its meaning, its usual cause on a shared GPU, the next commands, and the source."""

    # cuda, nvml, xid or mps.
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


@dataclass(frozen=True, kw_only=True)
class Match:
    """An explanation, with the first line of the text that it explains, and the number of such lines."""

    explanation: Explanation
    line: str
    lines: int = 1


@lru_cache(maxsize=1)
def explanations() -> tuple[Explanation, ...]:
    from importlib.resources import files

    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    raw: dict[str, list[dict[str, Any]]] = yaml.load(
        files("gpushare").joinpath("data/explanations.yaml").read_text(encoding="utf-8"),
        Loader=loader,  # noqa: S506 - a safe one
    )
    return tuple(
        Explanation(**{**entry, "kind": kind, "names": tuple(entry.get("names", ())), "next": tuple(entry["next"])})
        for kind, entries in raw.items()
        for entry in entries
    )


def explain(text: str) -> tuple[Match, ...]:
    """Return what explains a code (``805``, ``Xid 31``), a name, or each line of a pasted text.

    A bare number may be several codes: all of them are returned.

    Raises:
        NotFound: there is no explanation; the hint names close ones.
    """
    asked = text.strip()
    whole = _CODE.fullmatch(asked)
    if whole is not None:
        found = [
            one for one in explanations() if one.code == int(whole[2]) and (whole[1] or one.kind).lower() == one.kind
        ]
        if not found:
            raise _unknown(asked)
        return tuple(Match(explanation=one, line=asked) for one in found)
    matches: dict[Explanation, Match] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        for one in dict.fromkeys(_of_line(line)):
            before = matches.get(one)
            first = line if before is None else before.line
            matches[one] = Match(explanation=one, line=first, lines=1 if before is None else before.lines + 1)
    if not matches:
        raise _unknown(asked)
    return tuple(matches.values())


def _of_line(line: str) -> Iterator[Explanation]:
    numbers = {"xid": {int(one) for one in _XID.findall(line)}, "cuda": {int(one) for one in _CUDA.findall(line)}}
    names = {_plain(name) for name in (*_NAME.findall(line), line)}
    lowered, bare = line.lower(), _plain(line)
    for one in explanations():
        texts = [*one.names, *([one.text] if one.text else [])] if one.kind != "mps" else []
        if (
            (one.code is not None and one.code in numbers.get(one.kind, ()))
            or names & {_plain(name) for name in one.names}
            or (one.pattern is not None and re.search(one.pattern, line, re.IGNORECASE))
            or any(_plain(known) == bare or (len(known) >= _TELLING and known.lower() in lowered) for known in texts)
        ):
            yield one


def _plain(name: str) -> str:
    """Return a name normalized: CUDA_ERROR_X of the driver API is cudaErrorX of the runtime."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unknown(asked: str) -> NotFound:
    close = _close(asked)
    shown = asked.splitlines()[0][:80] if asked else ""
    hint = f"close: {', '.join(close)}" if close else "give a code (805), a name, or a log line; for text from stdin: -"
    return NotFound(f"no explanation found for '{shown}'", hint, code="not_explained")


def _close(asked: str) -> Sequence[str]:
    import difflib

    known = {_plain(name): name for one in explanations() if one.kind != "mps" for name in one.names}
    known |= {_plain(one.title): one.title for one in explanations() if one.code is not None}
    known |= {str(one.code): one.title for one in explanations() if one.code is not None}
    found = difflib.get_close_matches(_plain(asked[:80]), known, n=3, cutoff=0.6)
    return list(dict.fromkeys(known[one] for one in found))
