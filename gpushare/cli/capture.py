"""``gpushare capture``: write the host as gpushare.yaml; done by `gpushare/hostfile/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gpushare.base.errors import no_gpu_error
from gpushare.base.selection import select
from gpushare.cli.options import GPU_OPTION, Command, settings, verb
from gpushare.host.host import Host
from gpushare.hostfile.file import HostFile, document_of, text_of
from gpushare.hostfile.kept import file_applied_by_root, unread_kept_files
from gpushare.hostfile.live import captured_file
from gpushare.hostfile.load import applied_path, kept_file
from gpushare.hostfile.look import live_gpus
from gpushare.show.result import Result
from gpushare.show.status import gpu_errors
from gpushare.snapshot import HostState

# The note on how to survive a reboot.
_AT_BOOT: Final = (
    "to restore it at every boot: sudo gpushare capture > gpushare.yaml; sudo gpushare apply gpushare.yaml; "
    "sudo gpushare export systemd --to units; sh units/apply.sh"
)
_OWN_SLICES: Final = "slices are those of the file that you applied last: sudo gpushare capture leaves them out"


@verb(Command)
def capture(gpu: str | None = GPU_OPTION) -> Any:
    """Write how each GPU is shared as gpushare.yaml: gpushare capture > gpushare.yaml.

    `gpushare apply -f gpushare.yaml` restores it, after a reboot or on another host. A note names what a file cannot
    express. slices, memory and reserve cannot be seen on the host: they are those of the file that root applied last.
    Needs root for what only root sees: the daemons of other users.
    """
    state = HostState(settings.connect())
    gpus = {device.gpu.index: device.gpu for device in select(gpu, state.gpus)}
    if not gpus:
        raise no_gpu_error()
    file, notes = captured_file(live_gpus(state, list(gpus.values())))
    file, kept_notes = _with_kept(state.host, file)
    return Result(
        data=document_of(file),
        text=text_of(file).rstrip("\n"),
        notes=(*notes, *kept_notes, _AT_BOOT),
        errors=gpu_errors(gpus.values()),
    )


def _with_kept(host: Host, file: HostFile) -> tuple[HostFile, list[str]]:
    """Return a file with the rules and limits of the files that were applied last, and notes on them.

    They cannot be seen on the host. Those of root's file are in force. The rules of this user's own file are followed
    only where root's file has none.
    """
    own, roots = kept_file(host), file_applied_by_root(host)
    notes = [
        f"{path} cannot be read, or is not valid: its slices, memory and reserve are left out"
        for path in unread_kept_files(host)
    ]
    if roots is not None:
        file = replace(file, rules=roots.rules, memory=roots.memory, longest_lease_seconds=roots.longest_lease_seconds)
        if file.rules or file.memory or file.longest_lease_seconds is not None:
            notes.append("slices, memory and reserve are those of the file that root applied last")
    if own is None or host.root or not own.rules:
        return file, notes
    if file.rules:
        return file, [*notes, f"the slices of your own file are left out: {applied_path(host)}"]
    return replace(file, rules=own.rules), [*notes, _OWN_SLICES]
