"""The task definition for Amazon ECS: what its own API model takes, and what ECS cannot express."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpushare.base.errors import BadUsage, GpushareError, NotFound, NotSupported
from gpushare.base.model import Priority, Way
from gpushare.base.units import GIB
from gpushare.export.containers import ExportedDevice
from gpushare.export.ecs import FILE, ecs_export
from tests.errors import fails
from tests.export.hosts import gpu, mig, mps, text

SHARE = ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(25.0, memory_limit_bytes=4 * GIB)))


def task(share: ExportedDevice, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text(ecs_export(share, **options), FILE))
    return found


def requirement(share: ExportedDevice) -> dict[str, Any]:
    (container,) = task(share)["containerDefinitions"]
    (found,) = container["resourceRequirements"]
    return dict(found)


@pytest.mark.parametrize("share", [SHARE, ExportedDevice(gpu=gpu(0, Way.EXCLUSIVE))])
def test_the_api_takes_it(share: ExportedDevice) -> None:
    session = pytest.importorskip("botocore.session")
    validate = pytest.importorskip("botocore.validate").ParamValidator().validate
    model = session.get_session().get_service_model("ecs").operation_model("RegisterTaskDefinition").input_shape
    report = validate(task(share, family="train-1", image="registry:5000/train:1"), model)
    assert not report.has_errors(), report.generate_report()


def test_a_share() -> None:
    assert requirement(SHARE) == {
        "type": "GPU",
        "sharingStrategy": {"nvidiaMps": {"memory": 4096, "maxComputePercent": 25}},
    }
    without = ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(None, memory_limit_bytes=GIB)))
    assert requirement(without)["sharingStrategy"] == {"nvidiaMps": {"memory": 1024}}
    whole = ExportedDevice(gpu=gpu(0, Way.EXCLUSIVE))
    assert requirement(whole) == {"type": "GPU", "value": "1"}


def test_what_is_lost() -> None:
    low = ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(25.0, memory_limit_bytes=GIB, priority=Priority.LOW)))
    assert any("low MPS priority" in text for text in ecs_export(low).lost)
    assert any("per process" in text for text in ecs_export(low).needs)


@pytest.mark.parametrize(
    ("share", "options", "kind", "code"),
    [
        (ExportedDevice(gpu=gpu(0)), {}, NotSupported, "no_time_slicing"),
        (ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(25.0))), {}, NotFound, "no_memory_limit"),
        (
            ExportedDevice(gpu=gpu(0, Way.MPS, mps=mps(33.3, memory_limit_bytes=GIB))),
            {},
            NotSupported,
            "fractional_threads",
        ),
        (ExportedDevice(gpu=gpu(0, Way.MIG), mig=mig()), {}, NotSupported, "no_mig_there"),
        (SHARE, {"family": "a b"}, BadUsage, "bad_name"),
    ],
)
def test_refused(share: ExportedDevice, options: dict[str, Any], kind: type[GpushareError], code: str) -> None:
    with fails(kind, code):
        ecs_export(share, **options)
