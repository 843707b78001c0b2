"""``gpushare capture``: write the host as gpushare.yaml; done by `gpushare/hostfile/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gpushare.base.errors import no_gpu_error
from gpushare.base.selection import select
from gpushare.cli.options import GPU_OPTION, Command, settings, verb
from gpushare.hostfile.file import document_of, text_of
from gpushare.hostfile.kept import file_applied_by_root
from gpushare.hostfile.live import captured_file
from gpushare.hostfile.load import kept_file
from gpushare.hostfile.look import live_gpus
from gpushare.show.result import Result
from gpushare.show.status import gpu_errors
from gpushare.snapshot import HostState

# The note on how to survive a reboot.
_AT_BOOT: Final = (
    "to restore it at every boot: gpushare capture > gpushare.yaml; sudo gpushare apply gpushare.yaml; "
    "gpushare export systemd --to units; sh units/apply.sh"
)


@verb(Command)
def capture(gpu: str | None = GPU_OPTION) -> Any:
    """Write how each GPU is shared as gpushare.yaml: gpushare capture > gpushare.yaml.

    `gpushare apply -f gpushare.yaml` restores it, after a reboot or on another host. A note names what a file cannot
    express. Needs root for what only root sees: grants, and daemons of other users.
    """
    state = HostState(settings.connect())
    gpus = {device.gpu.index: device.gpu for device in select(gpu, state.gpus)}
    if not gpus:
        raise no_gpu_error()
    file, notes = captured_file(live_gpus(state, list(gpus.values())))
    kept = kept_file(state.host)
    in_force = file_applied_by_root(state.host)
    # Rules and limits cannot be seen on the host. Limits are in force only from root's file.
    if kept is not None:
        file = replace(file, rules=kept.rules)
    if in_force is not None:
        file = replace(file, memory=in_force.memory, longest_lease_seconds=in_force.longest_lease_seconds)
    if file.rules or file.memory:
        notes = [
            *notes,
            "slices, memory and reserve are those of the file that was applied last, by root where it limits users",
        ]
    return Result(
        data=document_of(file),
        text=text_of(file).rstrip("\n"),
        notes=(*notes, _AT_BOOT),
        errors=gpu_errors(gpus.values()),
    )
