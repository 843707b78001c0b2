"""What tests of farms run."""

from __future__ import annotations


def shell(text: str) -> list[str]:
    """Return a command that runs a line of shell."""
    return ["sh", "-c", text]
