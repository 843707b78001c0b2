"""What apply, diff and capture share: the file, and which entry is for which GPU of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpushare.errors import BadUsage, GpushareError, NoPermission

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.hostfile.file import Entry, HostFile, Matched
    from gpushare.model import Gpu

FileOption = Annotated[
    str, typer.Option("-f", "--file", metavar="FILE", help="gpushare.yaml, version 1; - is stdin.", show_default=False)
]


def host_file(path: str) -> tuple[HostFile, str]:
    """Return a file and its text.

    Raises:
        BadUsage: it is none; the message has line and column.
        NotFound, NoPermission: it cannot be read.
    """
    from gpushare.hostfile.parse import HINT, parse
    from gpushare.inputs import shown_as, text_of

    text = text_of(path, "gpushare.yaml", HINT)
    return parse(text, shown_as(path)), text


def entries_of(file: HostFile, gpus: Sequence[Gpu]) -> Matched:
    """Return the entry of each GPU, its users by name.

    Raises:
        BadUsage: as `matched`.
        NotFound: a user that this machine does not have.
    """
    from dataclasses import replace

    from gpushare.hostfile.file import matched
    from gpushare.hostfile.look import with_known_users

    found = matched(file, gpus, same_model)
    return replace(found, entries={index: with_known_users(one, file.shown) for index, one in found.entries.items()})


def placed(error: GpushareError, file: HostFile, index: int, entry: Entry) -> GpushareError:
    """Return the error of a GPU with the place of its entry in the file."""
    whose = "" if f"GPU {index}" in error.message else f"GPU {index}: "
    return error.restated(message=f"{file.shown}:{entry.mark}: {whose}{error.message}")


def kept_entries(host: Host, gpus: Sequence[Gpu]) -> tuple[Mapping[int, Entry], GpushareError | None]:
    """Return what the kept gpushare.yaml says of these GPUs, and why it, or a part of it, is for this host no more.

    Nothing at all where none was kept, or where it is not this user's to read.
    """
    from gpushare.host.host import is_trusted_directory
    from gpushare.hostfile.look import applied_path

    if not is_trusted_directory(host.state_directory):
        return {}, None
    try:
        found = entries_of(host_file(str(applied_path(host)))[0], gpus)
    except GpushareError as error:
        hidden = error.code == "no_file" or isinstance(error, NoPermission)
        return {}, None if hidden else error
    return found.entries, next(iter(found.missing), None)


def same_model(written: str, name: str) -> bool:
    """Return whether a model as written, a product name or an alias of our catalogue, is that of a GPU's name."""
    from gpushare.gpu_models import find_model

    def key(text: str) -> str:
        try:
            return find_model(text).key
        except BadUsage:
            return " ".join(text.lower().split())

    return key(written) == key(name)
