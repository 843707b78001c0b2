"""The check of `gpushare doctor` on the environments of live programs: devices that are gone, daemons that are not there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

from gpushare.actions.check import Check, Examination, Verdict

_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_PIPE: Final = "CUDA_MPS_PIPE_DIRECTORY"
# A whole UUID alone: CUDA takes a beginning too, and MIG-GPU-<uuid>/1/0 of drivers before 470 names a place.
_UUID: Final = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)


def environments(seen: Examination) -> Iterator[Check]:
    """Check what live programs, also shells that will start some, were told to use (their environment)."""
    if seen.nvml_error is not None or len(seen.answering) != len(seen.gpus):
        return
    found = seen.host.machine.environments((*_DEVICES, _PIPE))
    yield from _gone(seen, found)
    yield from _other_size(seen, found)
    yield from _no_daemon(seen, found)


def _gone(seen: Examination, found: Mapping[int, Mapping[str, str]]) -> Iterator[Check]:
    present = {gpu.uuid for gpu in seen.gpus} | {mig.uuid for gpu in seen.gpus for mig in gpu.mig_instances}
    by_value: dict[tuple[str, str], list[int]] = {}
    for pid, environment in sorted(found.items()):
        for variable in _DEVICES:
            for uuid in _UUID.findall(environment.get(variable, "")):
                if uuid not in present:
                    by_value.setdefault((variable, uuid), []).append(pid)
    for (variable, uuid), pids in by_value.items():
        mig = uuid.startswith("MIG-")
        yield Check(
            id="mig.environment" if mig else "gpu.environment",
            verdict=Verdict.WARN,
            seen=f"{variable} names {uuid}, which is not there, in {_who(seen, pids)}",
            why="CUDA finds no device (error 100)"
            + (", and what comes back with that UUID may be another size" if mig else ""),
            remedy="start it again with what is there now: "
            + ('eval "$(gpushare mig env NAME)", or gpushare run --mig NAME' if mig else "nvidia-smi -L"),
        )


def _other_size(seen: Examination, found: Mapping[int, Mapping[str, str]]) -> Iterator[Check]:
    """Yield who has the UUID of an instance at whose place a name means another one, and does not run in it yet."""
    running = {process.pid for gpu in seen.gpus for process in gpu.processes or ()}
    waiting = {pid: one["CUDA_VISIBLE_DEVICES"] for pid, one in sorted(found.items()) if _names_mig(one)}
    if not waiting.keys() - running:
        return
    meant = dict(_meant_otherwise(seen))
    for pid, uuid in waiting.items():
        if uuid in meant and pid not in running:
            yield Check(
                id="mig.environment",
                verdict=Verdict.WARN,
                seen=f"CUDA_VISIBLE_DEVICES={uuid} means {meant[uuid]}, in {_who(seen, [pid])}",
                why="a MIG UUID tells a place, not a size: what it starts runs with other memory and other SMs",
                remedy='start it again with what is there now: eval "$(gpushare mig env NAME)"',
            )


def _names_mig(environment: Mapping[str, str]) -> bool:
    return environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")


def _meant_otherwise(seen: Examination) -> Iterator[tuple[str, str]]:
    """Yield the UUIDs of instances that lie where a name means another one, with both in words."""
    from gpushare.actions.mig_places import places_on
    from gpushare.errors import GpushareError
    from gpushare.host.mig_names import names_of

    named = list(names_of(seen.host).values())
    for gpu in seen.gpus:
        mine = [one for one in named if one.gpu_uuid == gpu.uuid]
        if not mine or not gpu.mig_enabled:
            continue
        with contextlib.suppress(GpushareError):
            for place in places_on(seen.host, gpu):
                now = (place.instance.profile.name, place.instance.start)
                for one in mine:
                    if place.instance.placement.mask >> one.start & 1 and (one.profile, one.start) != now:
                        meaning = f"{now[0]}:{now[1]} now, where {one.name} meant {one.profile}:{one.start}"
                        yield place.mig.uuid, meaning


def _no_daemon(seen: Examination, found: Mapping[int, Mapping[str, str]]) -> Iterator[Check]:
    if any(one.daemon.pipe_directory is None for one in seen.daemons):
        # One of them may listen there.
        return
    if seen.host.processes.namespace_is_host() is False:
        return
    there = {os.path.realpath(one.daemon.pipe_directory or "") for one in seen.daemons}
    by_value: dict[str, list[int]] = {}
    for pid, environment in sorted(found.items()):
        pipe = environment.get(_PIPE)
        if pipe and os.path.realpath(pipe) not in there:
            by_value.setdefault(pipe, []).append(pid)
    for pipe, pids in by_value.items():
        yield Check(
            id="mps.environment",
            verdict=Verdict.WARN,
            seen=f"{_PIPE}={pipe}, where no daemon listens, in {_who(seen, pids)}",
            why="CUDA then says nothing and runs without MPS: on the whole GPU, without limits",
            remedy="start the daemon first: gpushare mps start; or let gpushare check it: gpushare run -- CMD",
        )


def _who(seen: Examination, pids: list[int]) -> str:
    if os.getpid() in pids:
        # What the shell exports comes along; its own /proc entry has only what it was started with.
        others = len(pids) - 1
        return "the environment of this shell" + (f" and of {others} other processes" if others else "")
    first = pids[0]
    info = seen.host.processes.describe(first)
    told = ", ".join(filter(None, (info.name, info.user))) if info else ""
    one = f"process {first}" + (f" ({told})" if told else "")
    return one if len(pids) == 1 else f"{len(pids)} processes, the first {one}"
