"""One device of the host for containers: flags of Docker and Podman, a CDI file, a compose file. Pure.

Facts: CDI names `nvidia.com/gpu=<uuid>` are among those that nvidia-ctk writes by default (NVIDIA Container Toolkit
1.20, index and uuid); `docker run --gpus device=<uuid>`; compose-spec, deploy.resources.reservations.devices; NVIDIA's
MPS guide: the daemon's pipe directory, its /dev/shm and its user must be the container's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from gpushare.base.errors import BadUsage, NotFound, NotSupported
from gpushare.base.model import Gpu, Priority, TimeSlice, Way, device_key
from gpushare.base.selection import no_mig
from gpushare.base.units import MIB
from gpushare.export.description import GpuDescription, HostDescription, MigDescription, MpsDescription
from gpushare.export.document import IMAGE, Document, Export, yaml_document
from gpushare.mig.parted import Exported, document, file_text, parse_parted

# The vendor and class of our own CDI devices: they carry an MPS daemon, not a GPU.
CDI_KIND: Final = "gpushare.local/mps"
COMPOSE_FILE: Final = "compose.yaml"


@dataclass(frozen=True, kw_only=True)
class ContainerDevice:
    """One device for a container: a GPU, or a MIG device of it."""

    gpu: GpuDescription
    mig: MigDescription | None = None

    @property
    def uuid(self) -> str:
        return self.gpu.uuid if self.mig is None else self.mig.uuid

    @property
    def mps(self) -> MpsDescription | None:
        return self.gpu.mps if self.mig is None else self.mig.mps

    @property
    def title(self) -> str:
        return f"GPU {self.gpu.index}" if self.mig is None else f"MIG {self.mig.profile} of GPU {self.gpu.index}"

    @property
    def environment(self) -> dict[str, str]:
        """Return what an MPS client needs. The limits are per process; a client can only lower them."""
        if self.mps is None:
            return {}
        found = {"CUDA_MPS_PIPE_DIRECTORY": self.pipe_directory}
        if self.mps.limits.threads_percent is not None:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{self.mps.limits.threads_percent:g}"
        if self.mps.limits.memory_limit_bytes is not None:
            # The container sees this one device. CUDA drops all limits if one names another device.
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={self.mps.limits.memory_limit_bytes // MIB}M"
        if self.mps.limits.priority is Priority.LOW:
            found["CUDA_MPS_CLIENT_PRIORITY"] = "1"
        return found

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
        if any(one in path for one in " \t\n:,\"'\\$"):
            raise NotSupported(
                f"the pipe directory '{path}' cannot be used in a flag of Docker",
                "set GPUSHARE_RUN_DIR to a plain path, then restart the daemon",
                code="bad_path",
            )
        return path


def container_device(host: HostDescription, uuid: str) -> ContainerDevice:
    """Return one device by its UUID; for a GPU in MIG mode, its only MIG device."""
    for gpu in host.gpus:
        for mig in gpu.mig:
            if mig.uuid == uuid:
                return ContainerDevice(gpu=gpu, mig=mig)
        if gpu.uuid != uuid:
            continue
        if gpu.sharing is not Way.MIG:
            return ContainerDevice(gpu=gpu)
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
        return ContainerDevice(gpu=gpu, mig=gpu.mig[0])
    raise NotFound(f"there is no device {uuid}", "see: gpushare status", code="unknown_gpu")


def docker_export(share: ContainerDevice) -> Export:
    """Return the flags of `docker run` on one line; no quotes are needed."""
    flags = ["--gpus", f"device={share.uuid}", *_mps_flags(share)]
    return Export(
        documents=(Document(name="docker-flags", text=" ".join(flags) + "\n", kind="flags"),),
        commands=(f"docker run --rm {' '.join(flags)} {IMAGE}",),
        needs=(
            "NVIDIA's container runtime in Docker: sudo nvidia-ctk runtime configure --runtime=docker",
            *_needs(share),
        ),
        lost=tuple(_lost(share)),
    )


def cdi_export(share: ContainerDevice) -> Export:
    """Return the flags by the Container Device Interface; for an MPS share also the file of the CDI device.

    nvidia-ctk writes the file of the GPU or MIG device itself, with the driver's libraries and hooks.
    """
    flags = ["--device", f"nvidia.com/gpu={share.uuid}"]
    documents = []
    commands = ["sudo nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"]
    if share.mps is not None:
        name = device_key(share.uuid)
        # A file for each device: one for all would lose the others.
        file = f"gpushare-mps-{name}.yaml"
        flags += ["--device", f"{CDI_KIND}={name}", "--ipc=host"]
        documents.append(yaml_document(file, _cdi_spec(share, name)))
        commands.append(f"sudo install -D -m 644 {file} /etc/cdi/{file}")
    commands += [f"docker run --rm {' '.join(flags)} {IMAGE}", f"podman run --rm {' '.join(flags)} {IMAGE}"]
    return Export(
        documents=(Document(name="cdi-flags", text=" ".join(flags) + "\n", kind="flags"), *documents),
        commands=tuple(commands),
        needs=(
            "Docker 28.2 or later (25 to 28.1 with its feature cdi on), or Podman 4.1 or later",
            "nvidia-ctk cdi generate after every MIG change (nvidia-cdi-refresh does not notice; gpushare mig does it)",
            *_needs(share),
        ),
        lost=tuple(_lost(share)),
    )


def compose_export(
    share: ContainerDevice, *, image: str | None = None, service: str = "gpu", by_cdi: bool = False
) -> Export:
    """Return a compose file with one service on the device."""
    reserved: dict[str, Any] = {
        "driver": "cdi" if by_cdi else "nvidia",
        "device_ids": [f"nvidia.com/gpu={share.uuid}" if by_cdi else share.uuid],
        "capabilities": ["gpu"],
    }
    body: dict[str, Any] = {"image": image or IMAGE}
    if share.mps is not None:
        # Compose would expand a $ in a value.
        body["environment"] = {key: value.replace("$", "$$") for key, value in share.environment.items()}
        body["ipc"] = "host"
        mount = {"type": "bind", "source": share.pipe_directory, "target": share.pipe_directory}
        # By default compose makes a missing source, and the container would run without MPS.
        body["volumes"] = [{**mount, "bind": {"create_host_path": False}}]
    body["deploy"] = {"resources": {"reservations": {"devices": [reserved]}}}
    needs = [
        "Docker 28.2 or later (25 to 28.1 with its feature cdi on)"
        if by_cdi
        else "NVIDIA's container runtime in Docker: sudo nvidia-ctk runtime configure --runtime=docker",
        *_needs(share),
    ]
    return Export(
        documents=(yaml_document(COMPOSE_FILE, {"services": {service: body}}),),
        commands=(f"docker compose -f {COMPOSE_FILE} config --quiet", f"docker compose -f {COMPOSE_FILE} up"),
        needs=tuple(needs),
        lost=tuple(_lost(share)),
    )


def _mps_flags(share: ContainerDevice) -> list[str]:
    if share.mps is None:
        return []
    # Unlike -v, --mount refuses a source that does not exist: the container would run without MPS.
    flags = ["--ipc=host", "--mount", f"type=bind,source={share.pipe_directory},target={share.pipe_directory}"]
    for key, value in share.environment.items():
        flags += ["-e", f"{key}={value}"]
    return flags


def _cdi_spec(share: ContainerDevice, name: str) -> dict[str, Any]:
    mount = {
        "hostPath": share.pipe_directory,
        "containerPath": share.pipe_directory,
        "options": ["rw", "nosuid", "nodev", "bind"],
    }
    edits = {"env": [f"{key}={value}" for key, value in share.environment.items()], "mounts": [mount]}
    return {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": [{"name": name, "containerEdits": edits}]}


def _needs(share: ContainerDevice) -> list[str]:
    if share.mps is None:
        return []
    return [
        "the container run as the same user as the other clients (--user): an MPS server serves one user at a time",
        "the daemon running before the container starts: without its directory the container is refused",
    ]


def _lost(share: ContainerDevice) -> list[str]:
    lost = []
    if share.mps is not None:
        lost.append("limits per container: they are per process, so two processes get twice as much")
    elif share.gpu.sharing is Way.TIMESLICE:
        lost.append("not enforced: under time-slicing the container may use the whole GPU and its memory")
    if share.gpu.time_slice not in {None, TimeSlice.DEFAULT} and share.mig is None:
        lost.append("slice length per container: the host has one for all of them")
    if share.mig is not None:
        lost.append(
            "stable MIG UUIDs: after a new MIG layout a UUID can name a device of another size; check with gpushare status"
        )
    return lost


FILE = "mig-parted.yaml"
_MAX_LABEL = 63


def mig_config(host: HostDescription, name: str) -> dict[str, Any]:
    """Return the v1 file with one configuration: equal GPUs share an entry, ``devices: all`` if it covers every GPU.

    GPUs without MIG are left out: mig-parted skips them under ``all`` and refuses them by number.
    """
    capable = [gpu for gpu in host.gpus if gpu.mig_capable is not False]
    if not capable:
        raise no_mig([Gpu(index=gpu.index, name=gpu.name) for gpu in host.gpus])
    gpus = [
        Exported(
            index=gpu.index,
            counts=dict(sorted(Counter(mig.profile for mig in gpu.mig).items())) if gpu.sharing is Way.MIG else None,
        )
        for gpu in capable
    ]
    config = document(name, gpus, whole_host=host.whole)
    parse_parted(config)
    return config


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
    return f"gpushare-{sha256(file_text(config).encode()).hexdigest()[:12]}"


def parted_export(host: HostDescription, *, name: str) -> Export:
    """Return the file and how `nvidia-mig-parted` applies it."""
    lost = ["placements: gpushare mig export --placement keeps them for gpushare mig apply -f"]
    lost += lost_of(host)
    return Export(
        documents=(Document(name=FILE, text=file_text(mig_config(host, name))),),
        commands=(
            f"nvidia-mig-parted assert --valid-config -f {FILE} -c {name}",
            f"sudo nvidia-mig-parted apply -f {FILE} -c {name}",
            f"nvidia-mig-parted assert -f {FILE} -c {name}",
        ),
        needs=(
            "idle GPUs while it is applied; gpushare mig apply -f applies this file safely",
            "at boot: nvidia-mig-manager.service with MIG_PARTED_CONFIG_FILE, as its own config.yaml is overwritten each time",
        ),
        lost=tuple(lost),
    )


def lost_of(host: HostDescription) -> list[str]:
    """Return what a mig-parted file cannot say of a host."""
    lost = []
    if any(mig.mps is not None or (mig.replicas or 1) > 1 for _, mig in host.instances()):
        lost.append("sharing inside MIG devices: mig-parted has neither MPS nor replicas")
    if any(mig.name for _, mig in host.instances()):
        lost.append("instance names: mig-parted has none")
    other = sorted({gpu.sharing.value for gpu in host.gpus} - {Way.MIG.value})
    if other:
        lost.append(f"{', '.join(other)} on GPUs without MIG: mig-parted only creates MIG devices")
    return lost
