"""An export printed, or written as files; what is said of it goes to stderr."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.cli.options import settings
from gpushare.errors import BadUsage, InUse, NoPermission

if TYPE_CHECKING:
    from gpushare.export.document import Document, Export
    from gpushare.show.result import Result

_NODE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


def node_name(given: str | None, *, short: bool = False) -> str | None:
    """Return the node's name: what was given, else this machine's (``short``: up to the dot); of a simulated host None.

    Raises:
        BadUsage: it cannot be the name of a node (DNS-1123).
    """
    if given is None:
        import socket

        if settings.spec != "local":
            return None
        own = socket.gethostname().lower()
        own = own.partition(".")[0] if short else own
        # A name that no cluster could have is nobody's mistake here.
        return own if _NODE.fullmatch(own) else None
    if _NODE.fullmatch(given) is None:
        raise BadUsage(
            f"'{given[:60]}' is no name of a node", "give it as the cluster does: --node gpu01", code="bad_node"
        )
    return given


def exported(engine: str, found: Export, to: str | None) -> Result:
    """Return the result of an export; with ``to`` the files are written there.

    Raises:
        InUse: a file is there already.
        NoPermission: the directory cannot be written.
    """
    from gpushare.show.result import Result

    written = () if to is None else _written(found.documents, Path(to))
    where = "" if to is None else f"cd {shlex.quote(to)}; "
    notes = [f"apply: {where if number == 0 else ''}{line}" for number, line in enumerate(found.commands)]
    notes += [f"needs: {one}" for one in found.needs]
    notes += [f"lost: {one}" for one in found.lost]
    if to is None and len(found.documents) > 1:
        notes.insert(0, f"write them as files: gpushare export {engine} --to DIR, with the same options")
    data: dict[str, Any] = {
        "engine": engine,
        "documents": found.documents,
        "commands": found.commands,
        "needs": found.needs,
        "lost": found.lost,
        "written": written,
    }
    text = "\n".join(written) if written else printed(found.documents)
    return Result(command=f"export {engine}", data=data, text=text, notes=tuple(notes))


def printed(documents: tuple[Document, ...]) -> str:
    """Return documents as one text; each of several has a line with its name."""
    if len(documents) == 1:
        return documents[0].text
    parts = []
    for number, one in enumerate(documents):
        separator = "---\n" if one.kind == "yaml" and number else ""
        parts.append(f"{separator}# file: {one.name}\n{one.text}")
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _written(documents: tuple[Document, ...], directory: Path) -> tuple[str, ...]:
    from gpushare.host.written_file import create_file, directory_of

    written: list[str] = []
    try:
        with directory_of(directory) as descriptor:
            there = [one.name for one in documents if os.path.lexists(directory / one.name)]
            if there:
                raise _there(directory / there[0])
            for one in documents:
                # Nobody else's link or file is written through, whatever happened since.
                mode = 0o755 if one.kind == "sh" else 0o644
                try:
                    create_file(one.name, one.text.encode(), directory=descriptor, mode=mode)
                except FileExistsError:
                    raise _there(directory / one.name) from None
                written.append(str(directory / one.name))
    except OSError as error:
        raise unwritten(directory, error, "give a directory of your own: --to DIR") from None
    return tuple(written)


def _there(path: Path) -> InUse:
    return InUse(f"{path} is there already", "give another directory, or remove it", code="file_exists")


def unwritten(path: Path, error: OSError, hint: str) -> NoPermission:
    """Return the error for files that a user wanted somewhere and that cannot be written there."""
    return NoPermission(f"cannot write {path}: {error.strerror or error}", hint, code="not_written")
