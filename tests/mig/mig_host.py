"""A simulated host for the tests of MIG changes: commands, what is there by its state file, and crashes."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpushare.cli import main
from gpushare.connect import connect
from gpushare.gpu_models import GpuModel, find_model
from gpushare.mig.names import names_of
from gpushare.sim import admin
from gpushare.sim import mig as mig_compute
from gpushare.sim.state import SimulatedGpu, SimulatedHostState, StateFile, parse_spec

CRASHED = 137
# (profile, start, ((slices, start), ...)), by place.
Instances = tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...]


class Seen(NamedTuple):
    """One GPU as the state file has it, without asking gpushare."""

    mode: int | None
    pending: int | None
    instances: Instances

    @property
    def places(self) -> set[tuple[str, int]]:
        """Return profile and start of each GPU instance."""
        return {(profile, start) for profile, start, _ in self.instances}

    @property
    def devices(self) -> Counter[tuple[str, int]]:
        """Return the MIG devices: profile and compute slices; 0 stands for a GPU instance without one."""
        return Counter((profile, slices) for profile, _, parts in self.instances for slices, _ in parts or ((0, 0),))


@dataclass(frozen=True)
class Said:
    """What a command ended with."""

    code: int
    document: dict[str, Any]
    err: str

    @property
    def error(self) -> dict[str, Any]:
        """Return its only error."""
        (error,) = self.document["errors"]
        return dict(error)


class MigHost:
    """One simulated host, driven by the command line."""

    def __init__(self, spec: str) -> None:
        self.spec = parse_spec(spec).text
        connect(self.spec)
        admin.reset(self.spec)
        # `connect` makes it anew at the first look.
        self.run("status")

    @property
    def file(self) -> StateFile:
        return StateFile(self.spec)

    @property
    def state(self) -> SimulatedHostState:
        state = self.file.read()
        assert state is not None
        return state

    @property
    def journal(self) -> Path:
        return self.file.directory / "run" / "mig" / "journal.json"

    def model(self, gpu: int) -> GpuModel:
        """Return the model of a GPU."""
        return find_model(self.state.gpus[gpu].model)

    def look(self) -> list[Seen]:
        """Return every GPU as it is."""
        return [_seen(gpu) for gpu in self.state.gpus]

    def run(self, *words: str) -> Said:
        """Run a command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["--host", self.spec, "-o", "json", *words])
        assert "Traceback" not in err.getvalue(), err.getvalue()
        document = json.loads(out.getvalue())
        assert all(error["code"] != "bug" for error in document["errors"]), document
        return Said(code, document, err.getvalue())

    def run_apart(self, *words: str) -> int:
        """Run a command in a process of its own, which may be killed; return its exit code."""
        child = os.fork()
        if not child:
            code = 99
            try:
                code = self.run(*words).code
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fault(self, kind: str, value: object = None, gpu: int | None = None) -> None:
        """Make something fail."""
        admin.set_fault(self.spec, kind, None if gpu is None else str(gpu), None if value is None else str(value))

    def clear(self) -> None:
        """Take every fault back."""
        admin.clear_faults(self.spec)

    def busy(self) -> dict[int, tuple[str, str | None, int | None, int | None]]:
        """Return each living process by PID with its GPU, profile, start, and compute instance."""
        state, found = self.state, {}
        for one in state.processes:
            gpu = next((gpu for gpu in state.gpus if gpu.uuid == one.gpu_uuid), None)
            for mig in [] if gpu is None else gpu.mig:
                if (mig.gpu_instance_id, mig.compute_instance_id) == (one.gpu_instance_id, one.compute_instance_id):
                    found[one.pid] = (one.gpu_uuid, mig.profile, mig.start, mig.compute_instance_id)
        return found

    def pids(self) -> set[int]:
        """Return the PIDs of all processes."""
        return {one.pid for one in self.state.processes}

    def names(self) -> dict[str, tuple[str, str, int]]:
        """Return what each name means."""
        return {name: (one.gpu_uuid, one.profile, one.start) for name, one in names_of(connect(self.spec)).items()}

    def devices(self) -> list[tuple[int, str]]:
        """Return GPU and UUID of each MIG device."""
        return [(index, mig.uuid) for index, gpu in enumerate(self.state.gpus) for mig in gpu.mig]

    def add(self, uuid: str) -> int:
        """Put a process into a MIG device."""
        gpu = next(gpu for gpu, one in self.devices() if one == uuid)
        return admin.add_process(self.spec, str(gpu), mig=uuid)


def _seen(gpu: SimulatedGpu) -> Seen:
    model = find_model(gpu.model)
    found: dict[tuple[str, int], list[tuple[int, int]]] = {(one.profile, one.start): [] for one in gpu.bare}
    for one in gpu.mig:
        profile = model.profile(one.profile)
        assert profile is not None
        slices = profile.slices if one.compute_profile is None else mig_compute.slices_of(one.compute_profile)
        found.setdefault((one.profile, one.start), []).append((slices, one.compute_start))
    instances = [(name, start, tuple(sorted(parts))) for (name, start), parts in found.items()]
    return Seen(gpu.mig_mode, gpu.mig_pending, tuple(sorted(instances, key=lambda one: (one[1], one[0]))))


@contextlib.contextmanager
def fault_at(host: MigHost, step: int) -> Iterator[None]:
    """Let the so-manieth changing call fail; afterwards nothing does."""
    host.fault("fail-step", step)
    try:
        yield
    finally:
        host.clear()
