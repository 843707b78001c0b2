"""What `gpushare run --mig` says on stderr beside the program's own output."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from gpushare.actions.run_report import RunReport

if TYPE_CHECKING:
    from gpushare.actions.share import Watch
    from gpushare.selection import Device


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
