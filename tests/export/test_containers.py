"""One device for a container: flags, a CDI file, a compose file."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

import pytest

from gpushare.base.errors import BadUsage, GpushareError, NotFound, NotSupported
from gpushare.base.model import Priority, TimeSlice, Way, device_key
from gpushare.base.units import GIB
from gpushare.export.containers import (
    COMPOSE_FILE,
    ExportedDevice,
    cdi_export,
    compose_export,
    container_device,
    docker_export,
)
from gpushare.export.description import HostDescription
from tests.errors import fails
from tests.export.hosts import gpu, host, loaded, mig, mps, t4s, text

PIPE = "/run/gpushare/mps/gpu-0/pipe"
MPS = ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(12.5, memory_limit_bytes=4 * GIB, priority=Priority.LOW)))
MIG = ExportedDevice(gpu=gpu(0, Way.MIG, mig=(mig(),)), mig=mig())
MIG_MPS = ExportedDevice(gpu=gpu(0, Way.MIG), mig=mig(mps=mps(50.0)))

# Restated from the compose specification (deploy.resources.reservations.devices, volumes): members that we write.
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
DEVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["capabilities"],
    "not": {"required": ["count", "device_ids"]},
    "properties": {"capabilities": TEXTS, "device_ids": TEXTS, "driver": {"type": "string"}, "count": {}},
}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


VOLUME = closed(
    type={"enum": ["bind"]},
    source={"type": "string"},
    target={"type": "string"},
    bind=closed(create_host_path={"type": "boolean"}),
)
SERVICE = closed(
    image={"type": "string"},
    environment={"type": "object", "additionalProperties": {"type": "string"}},
    ipc={"type": "string"},
    volumes={"type": "array", "items": VOLUME},
    deploy=closed(resources=closed(reservations=closed(devices={"type": "array", "items": DEVICE}))),
)
COMPOSE = closed(
    services={"type": "object", "patternProperties": {"^[a-zA-Z0-9._-]+$": SERVICE}, "additionalProperties": False}
)
# Restated from the CDI specification 0.5.0 (schema.json, defs.json).
EDITS = closed(
    env={"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.*$"}},
    mounts={
        "type": "array",
        "items": {
            **closed(hostPath={"type": "string"}, containerPath={"type": "string"}, options=TEXTS),
            "required": ["hostPath", "containerPath"],
        },
    },
)
CDI = {
    **closed(
        cdiVersion={"type": "string", "pattern": r"^0\.\d+\.\d+$"},
        kind={"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]/[A-Za-z][A-Za-z0-9_-]*$"},
        devices={
            "type": "array",
            "minItems": 1,
            "items": {
                **closed(name={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.:-]*$"}, containerEdits=EDITS),
                "required": ["name", "containerEdits"],
            },
        },
    ),
    "required": ["cdiVersion", "kind", "devices"],
}


def check(document: Any, schema: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema").validate(document, schema)


@pytest.mark.parametrize("share", [ExportedDevice(gpu=gpu(0)), MPS, MIG, MIG_MPS])
def test_docker_takes_the_flags(share: ExportedDevice) -> None:
    export = docker_export(share)
    line = text(export, "docker-flags").strip()
    # A shell that expands $(gpushare export docker) cuts at blanks and knows no quotes.
    flags = line.split(" ")
    assert flags == shlex.split(line)
    assert flags[:2] == ["--gpus", f"device={share.uuid}"]
    assert ("--ipc=host" in flags) is (share.mps is not None)
    assert export.commands[0].startswith(f"docker run --rm {line} ")


def test_the_share_of_an_mps_client() -> None:
    flags = text(docker_export(MPS), "docker-flags").split()
    # -v would make a directory that is missing, and the container would run without MPS.
    assert flags[flags.index("--mount") + 1] == f"type=bind,source={PIPE},target={PIPE}"
    assert "-v" not in flags
    environment = dict(word.split("=", 1) for before, word in pairwise(flags) if before == "-e")
    assert environment == {
        "CUDA_MPS_PIPE_DIRECTORY": PIPE,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
    assert any("per process" in text for text in docker_export(MPS).lost)
    assert any("one user at a time" in text for text in docker_export(MPS).needs)


def test_cdi_names_and_file() -> None:
    export = cdi_export(MIG_MPS)
    (file,) = [document.name for document in export.documents if document.name.endswith(".yaml")]
    spec = loaded(export, file)
    check(spec, CDI)
    (device,) = spec["devices"]
    # Each device has a file of its own: the next export must not remove this one.
    assert file == f"gpushare-mps-{device['name']}.yaml"
    assert f"/etc/cdi/{file}" in export.commands[1]
    assert loaded(cdi_export(MPS), f"gpushare-mps-{device_key(MPS.uuid)}.yaml")["devices"][0]["name"] != device["name"]
    flags = text(export, "cdi-flags").split()
    assert flags == [
        *("--device", f"nvidia.com/gpu={MIG_MPS.uuid}"),
        *("--device", f"{spec['kind']}={device['name']}"),
        "--ipc=host",
    ]
    assert device["containerEdits"]["mounts"][0]["hostPath"] == PIPE
    assert f"CUDA_MPS_PIPE_DIRECTORY={PIPE}" in device["containerEdits"]["env"]
    alone = cdi_export(MIG)
    assert [document.name for document in alone.documents] == ["cdi-flags"]
    assert text(alone, "cdi-flags") == f"--device nvidia.com/gpu={MIG.uuid}\n"
    assert any("nvidia-ctk cdi generate" in text for text in alone.commands)
    assert any("Podman" in text for text in alone.needs)


@pytest.mark.parametrize("share", [ExportedDevice(gpu=gpu(0)), MPS, MIG, MIG_MPS])
def test_compose(share: ExportedDevice) -> None:
    export = compose_export(share, image="registry:5000/train:1")
    document = loaded(export, COMPOSE_FILE)
    check(document, COMPOSE)
    service = document["services"]["gpu"]
    assert service["image"] == "registry:5000/train:1"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["device_ids"] == [share.uuid]
    assert service.get("environment", {}) == share.environment
    assert [one["bind"] for one in service.get("volumes", [])] == [{"create_host_path": False}] * (
        share.mps is not None
    )
    # Numbers and "0=4096M" are texts in YAML too.
    assert all(isinstance(value, str) for value in service.get("environment", {}).values())


def test_what_is_lost() -> None:
    assert any("whole GPU" in text for text in docker_export(ExportedDevice(gpu=gpu(0))).lost)
    assert any(
        "time-slice level" in text for text in docker_export(ExportedDevice(gpu=gpu(0, time_slice=TimeSlice.LONG))).lost
    )
    assert any("another size" in text for text in docker_export(MIG).lost)


def test_which_device() -> None:
    described = host(gpu(0, Way.MIG, mig=(mig(0), mig(1))), gpu(1, Way.MIG, mig=(mig(2),)), gpu(2))
    assert container_device(described, mig(1).uuid).mig == mig(1)
    # A GPU in MIG mode stands for its only device.
    assert container_device(described, gpu(1).uuid).mig == mig(2)
    assert container_device(described, gpu(2).uuid).mig is None


@pytest.mark.parametrize(
    ("described", "uuid", "kind", "code"),
    [
        (host(gpu(0, Way.MIG, mig=(mig(0), mig(1)))), gpu(0).uuid, BadUsage, "one_device"),
        (host(gpu(0, Way.MIG)), gpu(0).uuid, NotFound, "no_device"),
        (t4s(1), "GPU-nobody", NotFound, "unknown_gpu"),
    ],
)
def test_no_such_device(described: HostDescription, uuid: str, kind: type[GpushareError], code: str) -> None:
    with fails(kind, code):
        container_device(described, uuid)


@pytest.mark.parametrize(
    ("path", "kind", "code"),
    [
        (None, NotFound, "pipe_unknown"),
        ("/run/my pipes/0", NotSupported, "bad_path"),
        ("/a:b", NotSupported, "bad_path"),
    ],
)
@pytest.mark.parametrize("engine", [docker_export, cdi_export, compose_export])
def test_a_pipe_directory_that_cannot_be_mounted(
    engine: Any, path: str | None, kind: type[GpushareError], code: str
) -> None:
    with fails(kind, code):
        engine(ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(pipe_directory=path))))
