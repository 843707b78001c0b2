"""CDI specifications of containers after a MIG change: warnings about stale ones, and ``--refresh-cdi``."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from gpushare.base.errors import NotFound, OperationFailed
from gpushare.base.model import Gpu
from gpushare.host import cdi
from gpushare.host.host import Host
from gpushare.host.records import replace_file
from gpushare.plan import Step


def cdi_notes(host: Host, gpus_after: Sequence[Gpu]) -> tuple[str, ...]:
    """Return a warning for each CDI specification that is wrong after a MIG change.

    ``gpus_after`` are the changed GPUs as they are after it; the others are read from the host.
    """
    notes = []
    changed = {gpu.index: gpu for gpu in gpus_after}
    gpus = [changed.get(gpu.index, gpu) for gpu in host.nvml.identities()]
    specs = {spec.path: spec for spec in cdi.find_specs(host)}
    for spec in cdi.stale_specs(host, gpus):
        wrong = f"containers: the CDI specification {spec.path} {cdi.describe_staleness(spec)}"
        command = " ".join(cdi.refresh_command(specs.get(spec.path)))
        notes.append(f"{wrong}; rewrite it: sudo {command} (next time: --refresh-cdi)")
    return tuple(notes)


def refresh_steps(host: Host) -> tuple[Step, ...]:
    """Return the steps of --refresh-cdi: rewrite each CDI specification of this host; the undo restores the old file."""
    specs = cdi.find_specs(host)
    if not specs:
        raise NotFound(
            f"there is no CDI specification of {cdi.KIND} in {' or '.join(cdi.DIRECTORIES)}",
            f"make one: sudo {' '.join(cdi.refresh_command())}; or drop --refresh-cdi",
            code="no_cdi_spec",
        )
    cdi.check_toolkit(host)
    steps = []
    for spec in specs:
        work, command = _Refresh(host, spec), " ".join(cdi.refresh_command(spec))
        what = f"rewrite the CDI specification {spec.path}"
        steps.append(Step(what=what, command=command, undo=command, do=work.do, revert=work.undo))
    return tuple(steps)


class _Refresh:
    """Writes a specification again; the undo puts the old file back."""

    def __init__(self, host: Host, spec: cdi.CdiSpec) -> None:
        self._host, self._spec = host, spec
        self._file = cdi.local_path(host, spec.path)
        # The content of the old file, and its owner and mode.
        self._before: tuple[bytes, os.stat_result] | None = None

    def do(self) -> None:
        try:
            content, stated = self._file.read_bytes(), self._file.stat()
            # `undo` can only write text: another file is left alone.
            content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise OperationFailed(
                f"cannot read {self._spec.path}: {getattr(error, 'strerror', 'it is not UTF-8')}",
                f"see: ls -l {shlex.quote(str(self._spec.path))}",
                code="cdi_unreadable",
            ) from None
        self._before = content, stated
        cdi.refresh(self._host, self._spec)
        _keep_rights(self._file, stated)

    def undo(self) -> None:
        if self._before is not None:
            content, stated = self._before
            # One that nvidia-ctk was not allowed to write, this user cannot replace either.
            if not self._file.exists() or self._file.read_bytes() != content:
                replace_file(self._file, content.decode(), mode=stat.S_IMODE(stated.st_mode))
            _keep_rights(self._file, stated)


def _keep_rights(file: Path, stated: os.stat_result) -> None:
    """Give a new file the mode of the one that it replaces, and as root its owner: nvidia-ctk lets all users read each."""
    now = file.stat()
    if os.geteuid() == 0 and (now.st_uid, now.st_gid) != (stated.st_uid, stated.st_gid):
        os.chown(file, stated.st_uid, stated.st_gid)
    if now.st_mode != stated.st_mode:
        file.chmod(stat.S_IMODE(stated.st_mode))
