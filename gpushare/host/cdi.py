"""The Container Device Interface specifications of NVIDIA GPUs on a host, for Docker and Podman.

`nvidia-ctk cdi generate` (NVIDIA Container Toolkit) writes them. Since 1.18 its unit nvidia-cdi-refresh writes
/var/run/cdi/nvidia.yaml at boot and after a driver change, but not after a MIG change (nvidia-container-toolkit#1828):
containers then get a wrong device, or none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
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
# The names that nvidia-ctk gives to devices.
_GENERATED: Final = re.compile("|".join(pattern.pattern for pattern in (_UUID, _WHOLE, _MIG)), re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CdiSpec:
    """One specification file of kind nvidia.com/gpu: its path on the host, and its devices.

    A device is named ``0``, ``1:0``, ``all``, ``GPU-<uuid>`` or ``MIG-<uuid>``.
    """

    path: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """What is wrong in a specification: devices that are gone, and UUIDs that are missing."""

    path: str
    gone: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


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
                if spec is not None and any(name == "all" or _GENERATED.fullmatch(name) for name in spec.names):
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
    return CdiSpec(path=path, names=tuple(str(entry.get("name", "")) for entry in entries if isinstance(entry, dict)))


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


def stale_specs(host: Host, gpus: Sequence[Gpu]) -> tuple[Staleness, ...]:
    """Return the specifications that name MIG devices that are gone, or lack devices.

    ``gpus`` are all GPUs of the host with their MIG devices. If one does not answer, no UUID counts as
    gone, and no index on that GPU.
    """
    compared = (_staleness_of(spec, gpus) for spec in find_specs(host))
    return tuple(spec for spec in compared if spec.gone or spec.missing)


def _staleness_of(spec: CdiSpec, gpus: Sequence[Gpu]) -> Staleness:
    """Return how a specification differs from the devices that are there.

    One without UUIDs of MIG devices (before nvidia-ctk 1.16) is compared by how many it has of each GPU.
    """
    answering = [gpu for gpu in gpus if gpu.error is None]
    listed = {name for name in spec.names if name.startswith("MIG-")}
    listed_indexes = {int(match[1]) for name in spec.names if (match := _WHOLE.fullmatch(name)) is not None}
    gone: list[str] = []
    missing: list[str] = []
    for gpu in answering:
        uuids = [mig.uuid for mig in gpu.mig_instances]
        if listed:
            missing += [uuid for uuid in uuids if uuid not in listed]
        else:
            # A device may have a name by index and another by type and index.
            places = {
                match[2]: name
                for name in spec.names
                if (match := _MIG.fullmatch(name)) is not None and int(match[1]) == gpu.index
            }
            gone += [*places.values()][len(uuids) :]
            missing += uuids[len(places) :]
        if gpu.uuid and not gpu.mig_enabled and gpu.uuid not in spec.names and gpu.index not in listed_indexes:
            missing.append(gpu.uuid)
    # The devices of a GPU that does not answer may be there.
    if len(answering) == len(gpus):
        gone += sorted(listed.difference(mig.uuid for gpu in gpus for mig in gpu.mig_instances))
    return Staleness(path=spec.path, gone=tuple(gone), missing=tuple(missing))


def refresh_command(spec: CdiSpec | None = None) -> tuple[str, ...]:
    """Return the command that rewrites a specification at its path, with all names that it has; None: a new one.

    nvidia-ctk names devices by index and UUID (before 1.16 only by index) unless ``--device-name-strategy`` is given.
    """
    path = DEFAULT_PATH if spec is None else spec.path
    strategies: tuple[str, ...] = ()
    if spec is not None and any(re.match(r"(gpu|mig)\d", name) for name in spec.names):
        strategies = ("index", "uuid", "type-index")
    return (
        *(PROGRAM, "cdi", "generate", f"--output={path}"),
        *(f"--device-name-strategy={strategy}" for strategy in strategies),
    )


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
                f"nvidia-ctk wrote {spec.path}, but it {describe_staleness(staleness)}", by_hand, code="cdi_still_stale"
            )


def check_toolkit(host: Host) -> None:
    if host.programs.find(PROGRAM) is None:
        raise NotSupported(
            f"{PROGRAM}, which writes the CDI specification of this host, is not installed",
            "install the package nvidia-container-toolkit-base, or drop --refresh-cdi",
            code="program_missing",
        )


def describe_staleness(staleness: Staleness) -> str:
    """Describe what is wrong: ``names devices that are gone (MIG-...) and lacks MIG-...``."""
    parts = []
    if staleness.gone:
        parts.append(f"names devices that are gone ({first_few(staleness.gone, 3)})")
    if staleness.missing:
        parts.append(f"lacks {first_few(staleness.missing, 3)}")
    return " and ".join(parts)
