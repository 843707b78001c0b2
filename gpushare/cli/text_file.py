"""Reading a file that a user names, or stdin: bounded, and as UTF-8 text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from gpushare.errors import BadUsage, NoPermission, NotFound

# Some hundred times what any of our files needs.
_MAX_BYTES: Final = 256 << 10


def text_of(path: str, kind: str, hint: str) -> str:
    """Return the text of a file; ``-`` is stdin. ``kind`` is what it should be (``mig-parted``), for errors.

    Raises:
        NotFound: there is none (code ``no_file``).
        NoPermission: it cannot be read.
        BadUsage: a directory, too large, or no text (code ``bad_file``).
    """
    shown = shown_as(path)
    give = f"give a {kind} file"
    if not path:
        raise BadUsage("the name of the file is empty", give, code="bad_file")
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {shown}", hint, code="no_file") from None
    except IsADirectoryError:
        raise BadUsage(f"{shown} is a directory", give, code="bad_file") from None
    except PermissionError:
        raise NoPermission(f"{shown} cannot be read", "read it as its owner, or as root", code="bad_file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadUsage(f"{shown} cannot be read: {reason}", give, code="bad_file") from None
    if len(data) > _MAX_BYTES:
        raise BadUsage(f"{shown} is larger than 256 KiB", give, code="bad_file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadUsage(f"{shown} is not UTF-8 text", give, code="bad_file") from None


def shown_as(path: str) -> str:
    """Return what a file is called in messages."""
    return "stdin" if path == "-" else path
