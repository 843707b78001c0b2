"""What `gpushare run` says on stderr beside the program's own output."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from gpushare.errors import GpushareError
from gpushare.mps.daemons import find_daemons
from gpushare.run.program import Reporter
from gpushare.run.roles import PausingWatch
from gpushare.run.share import Attachment
from gpushare.units import format_bytes, format_percent

if TYPE_CHECKING:
    from gpushare.model import MpsClient
    from gpushare.mps.kill import Drain
    from gpushare.mps.limits import Limits
    from gpushare.run.share import Watch
    from gpushare.selection import Device


class RunReport(Reporter):
    """Lines on a stream; with ``quiet`` only what is wrong."""

    def __init__(self, device: Device, stream: IO[str] | None, *, quiet: bool, limits: Limits | None = None) -> None:
        self._device, self._stream, self._quiet, self._limits = device, stream, quiet, limits

    def attached(self, watch: Watch, pid: int) -> None:
        """Say that a process is a client, and under which limits."""
        # Whoever is paused from time to time is a client as well.
        watch = watch.inner if isinstance(watch, PausingWatch) else watch
        client = _client(watch, pid) if isinstance(watch, Attachment) else None
        if client is None:
            self._say(f"process {pid} was attached to MPS on {self._device.title}")
            return
        threads, memory = format_percent(client.threads_percent), format_bytes(client.memory_limit_bytes)
        low = "" if client.priority is None or not client.priority else ", low priority"
        self._say(
            f"process {pid} is attached to MPS server {client.server_pid} on {self._device.title} "
            f"(threads {threads}, memory limit {'none' if memory == '-' else memory}{low})"
        )
        if self._lowered(client):
            self._say(
                f"the daemon of {self._device.title} allows less than was asked for; its limits hold (gpushare mps set)"
            )

    def _lowered(self, client: MpsClient) -> bool:
        """Return whether the daemon's own limits are below those that were asked for."""
        asked = self._limits
        if asked is None:
            return False
        pairs = (
            (client.threads_percent, asked.threads_percent),
            (client.memory_limit_bytes, asked.memory_limit_bytes),
        )
        return any(held is not None and wanted is not None and held < wanted for held, wanted in pairs)

    def outside(self, pid: int) -> None:
        """Say loudly that a process has escaped its share."""
        self._write(
            f"error: process {pid} runs on {self._device.title} outside MPS: it has no limits, and is time-sliced with all MPS clients\n"
            "hint: the program or a wrapper changes CUDA_MPS_PIPE_DIRECTORY or CUDA_VISIBLE_DEVICES; --strict ends such a program\n"
        )

    def pending(self, pid: int) -> None:
        """Say that a process waits for another user."""
        self._say(
            f"process {pid} waits: another user's clients hold the MPS server of {self._device.title}; "
            "one user at a time (see: gpushare mps status)"
        )

    def unproved(self) -> None:
        """Say that nothing was proved."""
        self._say("the program ended and no CUDA context of it was seen: that it ran inside its share is not proved")

    def daemon_gone(self) -> None:
        """Say that the share is gone."""
        self._write(
            f"error: the MPS daemon of {self._device.title} died while the program runs: its CUDA calls will fail\n"
            "hint: end the program and start it again; see: gpushare doctor\n"
        )

    def ended(self, drain: Drain) -> None:
        """Say how the program was ended."""
        how = {"idle": "the GPU was seen idle", "fall": "the GPU's activity was seen to fall"}.get(
            drain.by, "the whole bound was waited"
        )
        self._say(f"the program was stopped, its queue drained for {drain.seconds:.2f} s ({how}), and killed")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._write(f"gpushare: {text}\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The program goes on, whoever listens.
            self._quiet = True


def _client(attachment: Attachment, pid: int) -> MpsClient | None:
    try:
        found = find_daemons(attachment.host, [attachment.device.gpu])
    except GpushareError:
        return None
    clients = (client for item in found for client in item.daemon.clients)
    return next((client for client in clients if client.pid == pid), None)


class InstanceReport(RunReport):
    """Lines on a stream about a program in a MIG instance without MPS."""

    def __init__(self, device: Device, stream: IO[str] | None, *, quiet: bool) -> None:
        super().__init__(device, stream, quiet=quiet)

    def attached(self, watch: Watch, pid: int) -> None:  # noqa: ARG002 - NVML's word is the proof
        """Say that NVML lists a process in the instance."""
        mig = self._device.mig
        ids = (
            "" if mig is None else f" (GPU instance {mig.gpu_instance_id}, compute instance {mig.compute_instance_id})"
        )
        self._say(f"process {pid} runs in {self._device.title}{ids}")

    def outside(self, pid: int) -> None:
        """Say loudly that a process runs elsewhere."""
        self._write(
            f"error: process {pid} runs on a GPU outside {self._device.title}, which was taken for it\n"
            "hint: the program or a wrapper changes CUDA_VISIBLE_DEVICES or CUDA_MPS_PIPE_DIRECTORY\n"
        )

    def unproved(self) -> None:
        """Say that nothing was proved."""
        self._say(
            f"the program ended and no CUDA context of it was seen: that it ran in {self._device.title} is not proved"
        )
