"""Yes, no, and not known: logic in which an unanswered question stays unanswered. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def any_of(values: Iterable[bool | None]) -> bool | None:
    """Return True when one is, False when all are not, else None."""
    found = list(values)
    if any(value is True for value in found):
        return True
    return None if any(value is None for value in found) else False


def all_of(values: Iterable[bool | None]) -> bool | None:
    """Return False when one is not, True when all are, else None."""
    return negated(any_of(negated(value) for value in values))


def negated(value: bool | None) -> bool | None:  # noqa: FBT001 - it is the value itself
    """Return the opposite; of the unknown the unknown."""
    return None if value is None else not value
