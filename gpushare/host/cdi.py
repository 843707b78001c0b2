"""The Container Device Interface specifications of NVIDIA GPUs on a host, for Docker and Podman.

`nvidia-ctk cdi generate` (NVIDIA Container Toolkit) writes them. Since 1.18 its unit nvidia-cdi-refresh writes
/var/run/cdi/nvidia.yaml at boot and after a driver change, but not after a MIG change (nvidia-container-toolkit#1828):
containers then get a wrong device, or none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from gpushare.base.errors import NoPermission, NotSupported, OperationFailed
from gpushare.base.model import Gpu
from gpushare.base.units import check_depth, first_few
from gpushare.base.values import dataclass
from gpushare.host.host import Host

PROGRAM: Final = "nvidia-ctk"
KIND: Final = "nvidia.com/gpu"
# Where container engines look (CDI specification); the second directory is empty after a boot.
DIRECTORIES: Final = ("/etc/cdi", "/var/run/cdi")
DEFAULT_PATH: Final = "/var/run/cdi/nvidia.yaml"
REFRESH_SECONDS: Final = 60.0

_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-f-]+", re.IGNORECASE | re.ASCII)
# By index (0, 1:0) and by type and index (gpu0, mig1:0).
_WHOLE: Final = re.compile(r"(?:gpu)?(\d{1,4})", re.ASCII)
_MIG: Final = re.compile(r"(?:mig)?(\d{1,4}):(\d{1,4})", re.ASCII)
_CAPABILITY: Final = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d{1,6})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CdiDevice:
    """One device of a specification: ``0``, ``1:0``, ``all``, ``GPU-<uuid>``, ``MIG-<uuid>``, and its device nodes."""

    name: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CdiSpec:
    """One specification file of kind nvidia.com/gpu; ``path`` is the path on the host."""

    path: str
    devices: tuple[CdiDevice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """What is wrong in a specification: UUIDs (or names, if it has no UUIDs) that are gone, missing or moved."""

    path: str
    gone: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    # Names by index that now belong to another MIG device.
    moved: tuple[str, ...] = ()


def root_of(host: Host) -> Path:
    """Return the directory that is ``/`` on this host; a simulated one has its own directory."""
    return host.run_directory.parent if host.is_simulated else Path("/")


def local_path(host: Host, path: str) -> Path:
    """Return the path of a host's file on this machine."""
    return root_of(host) / path.lstrip("/")


def find_specs(host: Host) -> tuple[CdiSpec, ...]:
    """Return the specifications that nvidia-ctk wrote.

    Left out are files of other kinds (k8s.device-plugin.nvidia.com/gpu belongs to the device plugin), files that cannot
    be read, and files written by hand, in which no device has a name as from nvidia-ctk.
    """
    specs = []
    for directory in DIRECTORIES:
        with contextlib.suppress(OSError):
            for file in sorted(local_path(host, directory).iterdir()):
                if file.suffix not in {".yaml", ".json"}:
                    continue
                spec = _read_spec(file, f"{directory}/{file.name}")
                if spec is not None and any(_is_generated(device.name) for device in spec.devices):
                    specs.append(spec)
    return tuple(specs)


def _read_spec(file: Path, path: str) -> CdiSpec | None:
    """Return the specification in a file, which is ``path`` on the host; None: not of NVIDIA's GPUs, or not readable."""
    try:
        raw = _parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        return None
    entries = raw.get("devices")
    if not isinstance(entries, list):
        entries = []
    devices = tuple(
        CdiDevice(name=str(entry.get("name", "")), nodes=tuple(_node_paths(entry)))
        for entry in entries
        if isinstance(entry, dict)
    )
    return CdiSpec(path=path, devices=devices)


def _parse_yaml(text: str) -> Any:
    """Return the content of YAML or JSON, every value as text. Raises ValueError."""
    import yaml

    # JSON is YAML. Read everything as text: YAML 1.1 takes a name like 1:0 for the number 60.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        check_depth(text, loader)
        return yaml.load(text, Loader=loader)  # noqa: S506 - BaseLoader makes texts, lists and dictionaries only
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _node_paths(device: dict[str, Any]) -> Iterable[str]:
    """Yield the paths of the device nodes of a device."""
    edits = device.get("containerEdits")
    nodes = edits.get("deviceNodes") if isinstance(edits, dict) else None
    if isinstance(nodes, list):
        for node in nodes:
            if isinstance(node, dict) and isinstance(node.get("path"), str):
                yield node["path"]


def _is_generated(name: str) -> bool:
    """Return whether nvidia-ctk gives devices such names."""
    return name == "all" or any(pattern.fullmatch(name) for pattern in (_UUID, _WHOLE, _MIG))


def stale_specs(host: Host, gpus: Sequence[Gpu]) -> tuple[Staleness, ...]:
    """Return the specifications that name MIG devices that are gone, lack devices, or have wrong indexes.

    ``gpus`` are all GPUs of the host with their MIG devices. If one does not answer, no device counts as gone.
    """
    compared = (_staleness_of(spec, gpus) for spec in find_specs(host))
    return tuple(spec for spec in compared if spec.gone or spec.missing or spec.moved)


def _staleness_of(spec: CdiSpec, gpus: Sequence[Gpu]) -> Staleness:
    """Return how a specification differs from the devices that are there."""
    answering = [gpu for gpu in gpus if gpu.error is None]
    mig_uuids = [mig.uuid for gpu in answering for mig in gpu.mig_instances]
    names = {device.name for device in spec.devices}
    uuid_by_name = _uuids_by_index_name(spec, gpus)
    # A specification without UUIDs names its MIG devices by index only.
    listed = {name for name in names if name.startswith("MIG-")} or set(uuid_by_name.values())
    listed_indexes = {int(match[1]) for name in names if (match := _WHOLE.fullmatch(name)) is not None}
    whole_gpus = [gpu for gpu in answering if gpu.uuid and not gpu.mig_enabled]
    missing = [uuid for uuid in mig_uuids if uuid not in listed]
    missing += [gpu.uuid or "" for gpu in whole_gpus if gpu.uuid not in names and gpu.index not in listed_indexes]
    # The devices of a GPU that does not answer may be there.
    gone = sorted(listed.difference(mig_uuids)) if len(answering) == len(gpus) else []
    # While devices are gone or missing, the indexes of the others differ for that reason alone.
    moved = [] if gone or missing else list(_stale_names(uuid_by_name, answering))
    return Staleness(path=spec.path, gone=tuple(gone), missing=tuple(missing), moved=tuple(moved))


def _uuids_by_index_name(spec: CdiSpec, gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the UUIDs of the MIG devices that a specification names by index, by that name (``0:1``, ``mig0:1``).

    A specification may have a device twice, by index and by UUID, with the same nodes. An unknown UUID is the name itself.
    """
    uuid_by_nodes = {
        device.nodes: device.name for device in spec.devices if device.nodes and device.name.startswith("MIG-")
    }
    uuids = {}
    for device in spec.devices:
        match = _MIG.fullmatch(device.name)
        if match is not None:
            gpu = next((gpu for gpu in gpus if gpu.index == int(match[1])), None)
            uuid = uuid_by_nodes.get(device.nodes) or _uuid_by_capabilities(device, gpu)
            uuids[device.name] = uuid or device.name
    return uuids


def _uuid_by_capabilities(device: CdiDevice, gpu: Gpu | None) -> str | None:
    """Return the UUID of the MIG device of a GPU with the same capability nodes; None: there is none.

    The minor of a GPU instance is 3 + 135 * GPU + 9 * id, of its compute instance that + 1 + id (nvidia-caps.c).
    """
    minors = sorted({int(match[1]) for node in device.nodes if (match := _CAPABILITY.fullmatch(node))})
    if gpu is None or len(minors) != 2:
        return None
    gpu_instance = (minors[0] - 3) % 135 // 9
    compute_instance = minors[1] - minors[0] - 1
    for mig in gpu.mig_instances:
        if (mig.gpu_instance_id, mig.compute_instance_id) == (gpu_instance, compute_instance):
            return mig.uuid
    return None


def _stale_names(uuid_by_name: dict[str, str], gpus: Sequence[Gpu]) -> Iterable[str]:
    """Yield the names by index (``0:1``, ``mig0:1``) whose UUID is no longer that of the device in this place on its GPU."""
    for prefix in ("", "mig"):
        for gpu in gpus:
            # NVML's indexes may have gaps: compare by order.
            head = f"{prefix}{gpu.index}:"
            names = sorted(
                (name for name in uuid_by_name if name.startswith(head)), key=lambda name: int(name[len(head) :])
            )
            for name, mig in zip(names, gpu.mig_instances, strict=False):
                if uuid_by_name[name] != mig.uuid:
                    yield name


def refresh_command(spec: CdiSpec | None = None) -> tuple[str, ...]:
    """Return the command that rewrites a specification at its path, with names of the same kinds.

    nvidia-ctk uses index and UUID (before 1.16 only the index) unless ``--device-name-strategy`` is given.
    """
    if spec is None:
        return (PROGRAM, "cdi", "generate", f"--output={DEFAULT_PATH}")
    command = [PROGRAM, "cdi", "generate", f"--output={spec.path}"]
    patterns = {"uuid": _UUID, "index": re.compile(r"\d+(:\d+)?"), "type-index": re.compile(r"(gpu\d+|mig\d+:\d+)")}
    kinds = [
        kind for kind, pattern in patterns.items() if any(pattern.fullmatch(device.name) for device in spec.devices)
    ]
    is_default = "index" in kinds and "type-index" not in kinds
    if not is_default:
        command += [f"--device-name-strategy={kind}" for kind in kinds]
    return tuple(command)


def refresh(host: Host, spec: CdiSpec) -> None:
    """Rewrite a specification and check that it matches the devices.

    If every GPU is in MIG mode without an instance, nvidia-ctk refuses ("empty device edits"), so the file stays.

    Raises:
        NotSupported: the toolkit is not installed.
        NoPermission, OperationFailed: it could not be written, or is still wrong.
        TimedOut: nvidia-ctk does not answer.
    """
    gpus = host.nvml.identities()
    if gpus and all(gpu.mig_enabled and not gpu.mig_instances for gpu in gpus):
        return
    command = refresh_command(spec)
    check_toolkit(host)
    done = host.programs.run(command, timeout=REFRESH_SECONDS)
    by_hand = f"see what it says: sudo {' '.join(command)}"
    if done.exit_code != 0:
        printed = (done.text.splitlines() or [f"exit code {done.exit_code}"])[-1][:300]
        if "permission denied" in done.text.lower():
            raise NoPermission(
                f"nvidia-ctk may not write {spec.path}: {printed}", f"run as root: sudo {' '.join(command)}"
            )
        raise OperationFailed(f"nvidia-ctk did not write {spec.path}: {printed}", by_hand, code="cdi_not_written")
    for staleness in stale_specs(host, gpus):
        if staleness.path == spec.path:
            raise OperationFailed(
                f"nvidia-ctk wrote {spec.path}, but it {describe(staleness)}", by_hand, code="cdi_still_stale"
            )


def check_toolkit(host: Host) -> None:
    """Raise NotSupported if nvidia-ctk is not installed."""
    if host.programs.find(PROGRAM) is None:
        raise NotSupported(
            f"{PROGRAM}, which writes the CDI specification of this host, is not installed",
            "install the package nvidia-container-toolkit-base, or drop --refresh-cdi",
            code="program_missing",
        )


def describe(staleness: Staleness) -> str:
    """Describe what is wrong: ``names devices that are gone (MIG-...) and lacks MIG-...``."""
    parts = []
    if staleness.gone:
        parts.append(f"names devices that are gone ({_first_names_text(staleness.gone)})")
    if staleness.missing:
        parts.append(f"lacks {_first_names_text(staleness.missing)}")
    if staleness.moved:
        parts.append(f"has wrong MIG devices for {_first_names_text(staleness.moved)}")
    return " and ".join(parts)


def _first_names_text(names: Sequence[str]) -> str:
    """Return three names; of more the first two, and how many more there are."""
    return first_few(names, 3 if len(names) <= 3 else 2)
