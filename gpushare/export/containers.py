"""One device of the host for containers (flags of Docker and Podman, a CDI file, a compose file), and mig-parted's file. Pure.

Facts: CDI names `nvidia.com/gpu=<uuid>` are among those that nvidia-ctk writes by default (NVIDIA Container Toolkit
1.20, index and uuid); `docker run --gpus device=<uuid>`; compose-spec, deploy.resources.reservations.devices; NVIDIA's
MPS guide: the daemon's pipe directory, its /dev/shm and its user must be the container's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from gpushare.base.errors import BadUsage, NotFound, NotSupported
from gpushare.base.model import Gpu, Priority, TimeSlice, Way, device_key
from gpushare.base.selection import no_mig_error
from gpushare.export.description import GpuDescription, HostDescription, MigDescription
from gpushare.export.document import IMAGE, Document, Export, check_word, image_or_default, notes, yaml_document
from gpushare.hostfile.file import MpsWish
from gpushare.inputs import yaml_text
from gpushare.mig.parted import PLACEMENTS, VERSION, parse_parted

# The vendor and class of our own CDI devices: they carry an MPS daemon, not a GPU.
CDI_KIND: Final = "gpushare.local/mps"
COMPOSE_FILE: Final = "compose.yaml"


@dataclass(frozen=True, kw_only=True)
class ExportedDevice:
    """One device for an engine that takes one: a GPU, or a MIG device of it."""

    gpu: GpuDescription
    mig: MigDescription | None = None

    @property
    def uuid(self) -> str:
        return self.gpu.uuid if self.mig is None else self.mig.uuid

    @property
    def mps(self) -> MpsWish | None:
        return self.gpu.mps if self.mig is None else self.mig.mps

    @property
    def title(self) -> str:
        return f"GPU {self.gpu.index}" if self.mig is None else f"MIG {self.mig.profile} of GPU {self.gpu.index}"

    @property
    def traits(self) -> set[str]:
        """Return the words that select notes on this device (`document.notes`): the conditions it meets."""
        mps = self.mps
        conditions = {
            "mps": mps is not None,
            "timeslice": mps is None and self.gpu.sharing is Way.TIMESLICE,
            "slice-length": self.mig is None and self.gpu.time_slice not in {None, TimeSlice.DEFAULT},
            "mig": self.mig is not None,
            "granted": self.mig is not None and self.mig.granted,
            "low-priority": mps is not None and mps.limits.priority is Priority.LOW,
            "restricted": mps is not None and bool(mps.users),
            "multiuser": mps is not None and mps.multiuser,
        }
        return {trait for trait, is_true in conditions.items() if is_true}

    @property
    def environment(self) -> dict[str, str]:
        """Return what an MPS client needs. The limits are per process; a client can only lower them."""
        if self.mps is None:
            return {}
        limits = self.mps.limits
        # Normal is what a client has without the variable.
        if limits.priority is not Priority.LOW:
            limits = replace(limits, priority=None)
        return {"CUDA_MPS_PIPE_DIRECTORY": self.pipe_directory, **limits.environment()}

    @property
    def pipe_directory(self) -> str:
        """Return the pipe directory of its MPS daemon on the host.

        The container has it at the same path, so that messages of the daemon mean the same on both sides.
        """
        if self.mps is None or self.mps.pipe_directory is None:
            raise NotFound(
                f"the pipe directory of the MPS daemon of {self.title} is unknown",
                "look as root: sudo gpushare mps status",
                code="pipe_unknown",
            )
        path = self.mps.pipe_directory
        if any(character in path for character in " \t\n:,\"'\\$"):
            raise NotSupported(
                f"the pipe directory '{path}' cannot be used in a flag of Docker",
                "set GPUSHARE_RUN_DIR to a plain path, then restart the daemon",
                code="bad_path",
            )
        return path


def container_device(host: HostDescription, uuid: str) -> ExportedDevice:
    """Return one device by its UUID; for a GPU in MIG mode, its only MIG device."""
    for gpu in host.gpus:
        for mig in gpu.mig:
            if mig.uuid == uuid:
                return ExportedDevice(gpu=gpu, mig=mig)
        if gpu.uuid != uuid:
            continue
        if gpu.sharing is not Way.MIG:
            return ExportedDevice(gpu=gpu)
        if not gpu.mig:
            raise NotFound(
                f"GPU {gpu.index} is in MIG mode and has no MIG device",
                f"make one: gpushare mig apply -g {gpu.index} 1g",
                code="no_device",
            )
        if len(gpu.mig) > 1:
            raise BadUsage(
                f"GPU {gpu.index} has {len(gpu.mig)} MIG devices; a container gets one",
                f"name it by its UUID: -g {gpu.mig[0].uuid} ({gpu.mig[0].profile})",
                code="one_device",
            )
        return ExportedDevice(gpu=gpu, mig=gpu.mig[0])
    raise NotFound(f"there is no device {uuid}", "see: gpushare status", code="unknown_gpu")


def _container_export(
    share: ExportedDevice, documents: Sequence[Document], commands: Sequence[str], *, traits: Collection[str] = ()
) -> Export:
    """Return an export for containers with its notes; ``traits`` are further words that select them."""
    words = share.traits.union(traits)
    needs, lost = notes("container", "needs", words), notes("container", "lost", words)
    return Export(documents=tuple(documents), commands=tuple(commands), needs=needs, lost=lost)


def docker_export(share: ExportedDevice) -> Export:
    """Return the flags of `docker run` on one line; no quotes are needed."""
    flags = ["--gpus", f"device={share.uuid}"]
    if share.mps is not None:
        # Unlike -v, --mount refuses a source that does not exist: the container would run without MPS.
        flags += ["--ipc=host", "--mount", f"type=bind,source={share.pipe_directory},target={share.pipe_directory}"]
        for key, value in share.environment.items():
            flags += ["-e", f"{key}={value}"]
    words = " ".join(flags)
    document = Document(name="docker-flags", text=f"{words}\n", kind="flags")
    return _container_export(share, [document], [f"docker run --rm {words} {IMAGE}"])


def cdi_export(share: ExportedDevice) -> Export:
    """Return the flags by the Container Device Interface; for an MPS share also the file of the CDI device.

    nvidia-ctk writes the file of the GPU or MIG device itself, with the driver's libraries and hooks.
    """
    flags = ["--device", f"nvidia.com/gpu={share.uuid}"]
    documents: list[Document] = []
    commands = ["sudo nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"]
    if share.mps is not None:
        name = device_key(share.uuid)
        # A file for each device: one for all would lose the others.
        file = f"gpushare-mps-{name}.yaml"
        flags += ["--device", f"{CDI_KIND}={name}", "--ipc=host"]
        pipe = share.pipe_directory
        mount = {"hostPath": pipe, "containerPath": pipe, "options": ["rw", "nosuid", "nodev", "bind"]}
        edits = {"env": [f"{key}={value}" for key, value in share.environment.items()], "mounts": [mount]}
        device = {"name": name, "containerEdits": edits}
        documents.append(yaml_document(file, {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": [device]}))
        commands.append(f"sudo install -D -m 644 {file} /etc/cdi/{file}")
    words = " ".join(flags)
    documents.insert(0, Document(name="cdi-flags", text=f"{words}\n", kind="flags"))
    commands += [f"{engine} run --rm {words} {IMAGE}" for engine in ("docker", "podman")]
    return _container_export(share, documents, commands, traits={"cdi"})


def compose_export(share: ExportedDevice, *, image: str | None = None) -> Export:
    reserved = {"driver": "nvidia", "device_ids": [share.uuid], "capabilities": ["gpu"]}
    body: dict[str, Any] = {"image": image_or_default(image)}
    if share.mps is not None:
        # Compose would expand a $ in a value.
        body["environment"] = {key: value.replace("$", "$$") for key, value in share.environment.items()}
        body["ipc"] = "host"
        mount = {"type": "bind", "source": share.pipe_directory, "target": share.pipe_directory}
        # By default compose makes a missing source, and the container would run without MPS.
        body["volumes"] = [{**mount, "bind": {"create_host_path": False}}]
    body["deploy"] = {"resources": {"reservations": {"devices": [reserved]}}}
    document = yaml_document(COMPOSE_FILE, {"services": {"gpu": body}})
    return _container_export(
        share, [document], [f"docker compose -f {COMPOSE_FILE} config --quiet", f"docker compose -f {COMPOSE_FILE} up"]
    )


FILE: Final = "mig-parted.yaml"
_MAX_LABEL: Final = 63
_CONFIG_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}", re.ASCII)
# mig-parted reads the first document only.
_PLACES_BELOW: Final = "---\n# For gpushare: exact placements. mig-parted reads the first document only.\n"


def mig_config(host: HostDescription, name: str) -> dict[str, Any]:
    """Return mig-parted's file with one configuration: equal GPUs share an entry, ``all`` if it covers every GPU.

    On GPUs without MIG it is off: mig-parted asserts something of every GPU of the host, and never that MIG is on there
    (cmd/nvidia-mig-parted/assert, mode.go and config.go). On a host with several models each entry has a ``device-filter``.
    """
    if all(gpu.mig_capable is False for gpu in host.gpus):
        raise no_mig_error([Gpu(index=gpu.index, name=gpu.name, mig_capable=False) for gpu in host.gpus])
    # By the number of devices of each profile; None: MIG is off.
    gpus_by_layout: dict[tuple[tuple[str, int], ...] | None, list[GpuDescription]] = {}
    for gpu in host.gpus:
        counts = sorted(Counter(mig.profile for mig in gpu.mig).items())
        gpus_by_layout.setdefault(tuple(counts) if gpu.sharing is Way.MIG else None, []).append(gpu)
    entries = []
    for layout, gpus in gpus_by_layout.items():
        entry = _devices_of_entry(host, gpus)
        entry["mig-enabled"] = layout is not None
        if layout is not None:
            entry["mig-devices"] = dict(layout)
        entries.append(entry)
    config = {"version": VERSION, "mig-configs": {name: entries}}
    parse_parted(config)
    return config


def _devices_of_entry(host: HostDescription, gpus: Sequence[GpuDescription]) -> dict[str, Any]:
    """Return the members of mig-parted's entry that select GPUs: by model, and then ``all`` or by index."""
    ids = {gpu.pci_device_id for gpu in host.gpus}
    selected: dict[str, Any] = {}
    candidates = len(host.gpus)
    if len(ids) > 1 and None not in ids:
        models = sorted({gpu.pci_device_id or 0 for gpu in gpus})
        selected["device-filter"] = [f"0x{model:08X}" for model in models]
        candidates = sum(gpu.pci_device_id in models for gpu in host.gpus)
    is_all = host.whole and len(gpus) == candidates
    return {**selected, "devices": "all" if is_all else [gpu.index for gpu in gpus]}


def _placements(host: HostDescription, name: str) -> dict[str, Any]:
    """Return the exact places on each GPU with MIG on, by index: ``{config: {"0": ["3g.40gb:4"]}}``."""
    places: dict[str, list[str]] = {}
    for gpu in host.gpus:
        if any(mig.start is None for mig in gpu.mig):
            raise BadUsage(
                f"the file does not place the instances of GPU {gpu.index}",
                "drop --placement, or give placements: 3g.40gb:4",
                code="bad_placement",
            )
        counts = Counter((mig.start or 0, mig.profile) for mig in gpu.mig)
        if gpu.sharing is Way.MIG:
            places[str(gpu.index)] = [
                f"{profile}:{start}" if count == 1 else f"{profile}:{start}*{count}"
                for (start, profile), count in sorted(counts.items())
            ]
    return {PLACEMENTS: {name: places}}


def layout_name(host: HostDescription) -> str:
    """Return a unique name for the layout that is a valid Kubernetes label.

    ``gpushare-7x1g.10gb`` if all GPUs have the same layout, else ``gpushare-`` and a digest.
    """
    config = mig_config(host, "gpushare")
    entries = config["mig-configs"]["gpushare"]
    counts = entries[0].get("mig-devices", {})
    if len(entries) == 1 and entries[0]["devices"] == "all" and counts:
        words = (f"{count}x{profile}".replace("+", ".") for profile, count in counts.items())
        name = "-".join(["gpushare", *words])
        if len(name) <= _MAX_LABEL:
            return name
    return f"gpushare-{sha256(yaml_text(config).encode()).hexdigest()[:12]}"


def mig_parted_export(host: HostDescription, *, name: str, placement: bool = False) -> Export:
    """Return the file of `nvidia-mig-parted` and the commands that apply it.

    ``placement`` appends a second YAML document to the file, with exact places; mig-parted does not read it.
    """
    check_word(name, _CONFIG_NAME, "a name for a configuration", "--name train-night")
    text = yaml_text(mig_config(host, name))
    if placement:
        text += _PLACES_BELOW + yaml_text(_placements(host, name))
    other_ways = sorted({gpu.sharing.value for gpu in host.gpus} - {Way.MIG.value})
    traits = host.traits | ({"placed"} if placement else set()) | ({"others"} if other_ways else set())
    return Export(
        documents=(Document(name=FILE, text=text),),
        commands=(
            f"nvidia-mig-parted assert --valid-config -f {FILE} -c {name}",
            f"sudo nvidia-mig-parted apply -f {FILE} -c {name}",
            f"nvidia-mig-parted assert -f {FILE} -c {name}",
        ),
        needs=notes("mig-parted", "needs", traits),
        lost=notes("mig-parted", "lost", traits, others=", ".join(other_ways)),
    )
