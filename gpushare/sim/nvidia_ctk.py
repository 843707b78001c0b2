"""nvidia-ctk of a simulated host: `host.cdi.refresh_command`, with the device names and messages of the real one.

A simulated host has no NVIDIA Container Toolkit until ``gpushare sim cdi`` installs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gpushare.host.host import make_private_directory
from gpushare.host.program import Completed
from gpushare.host.records import replace_file
from gpushare.sim.current import changing, current
from gpushare.sim.devices import nodes_of
from gpushare.sim.state import SimulatedHostState, StateFile

_PATH: Final = "/var/run/cdi/nvidia.yaml"
# The names of a device (--device-name-strategy): by default the first two.
_STRATEGIES: Final = ("index", "uuid", "type-index")


def install(state_file: StateFile) -> str:
    """Install the toolkit and write the specification, as its package does; return its path on the host.

    With MIG mode on and no instance there is no device, and no specification.
    """
    with changing(state_file) as (state, _):
        state.toolkit_installed = True
        strategies = _STRATEGIES[:2]
        if any(_devices(state, strategies)):
            _write_file(state_file, _PATH, _document(state, strategies))
    return _PATH


def main(argv: Sequence[str], state_file: StateFile) -> Completed:
    """Run the program; ``argv`` with its name."""
    options = [word.partition("=")[::2] for word in argv[3:]]
    output = dict(options).get("--output", "")
    strategies = [value for name, value in options if name == "--device-name-strategy"] or _STRATEGIES[:2]
    if list(argv[1:3]) != ["cdi", "generate"] or not output or not set(strategies) <= set(_STRATEGIES):
        return _failure(argv, f"not simulated: {' '.join(argv[1:])}")
    state = current(state_file)
    if not state.nvml_installed or not state.driver_loaded:
        return _failure(argv, "failed to generate CDI spec: failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND")
    if not list(_devices(state, strategies)):
        return _failure(argv, 'failed to write spec: failed add device "all": invalid device, empty device edits')
    text = _document(state, strategies)
    if not state.root:
        directory = output.rpartition("/")[0]
        return _failure(argv, f"failed to write spec: open {directory}/.spec: permission denied")
    _write_file(state_file, output, text)
    return Completed(tuple(argv), 0, "", 'level=info msg="Generated CDI spec with version 0.5.0"\n')


def _document(state: SimulatedHostState, strategies: Sequence[str]) -> str:
    """Return the specification of all devices as JSON, which is YAML too: GPUs without MIG, MIG devices, all together."""
    nodes_by_name = dict(_devices(state, strategies))
    # Each node once.
    nodes_by_name["all"] = list(dict.fromkeys(node for nodes in nodes_by_name.values() for node in nodes))
    devices = [{"name": name, "containerEdits": _container_edits(nodes)} for name, nodes in nodes_by_name.items()]
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": _container_edits(["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]),
    }
    return json.dumps(spec, indent=2)


def _container_edits(nodes: Sequence[str]) -> dict[str, Any]:
    return {"deviceNodes": [{"path": node} for node in nodes]}


def _devices(state: SimulatedHostState, strategies: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each device under each of its names, with its nodes. Of a GPU in MIG mode only its MIG devices are listed."""
    for index, gpu in enumerate(state.gpus):
        if gpu.lost:
            continue
        if not gpu.mig_mode:
            for name in _names(strategies, str(index), "gpu", gpu.uuid):
                yield name, nodes_of(index, None)
        for slot, mig in enumerate(gpu.mig):
            for name in _names(strategies, f"{index}:{slot}", "mig", mig.uuid):
                yield name, nodes_of(index, mig.instance_ids)


def _names(strategies: Sequence[str], index: str, kind: str, uuid: str) -> list[str]:
    """Return the name of a device by each strategy: ``0``, ``GPU-...``, ``gpu0``."""
    names = {"index": index, "uuid": uuid, "type-index": f"{kind}{index}"}
    return [names[strategy] for strategy in strategies]


def _write_file(state_file: StateFile, path: str, text: str) -> None:
    file = state_file.directory / Path(path.lstrip("/"))
    make_private_directory(file.parent, variable="GPUSHARE_SIM_DIR")
    replace_file(file, text)


def _failure(argv: Sequence[str], message: str) -> Completed:
    return Completed(tuple(argv), 1, "", f'level=error msg="{message}"\n')
