"""Fixtures for every test: nothing of the machine's own GPUs or simulated hosts is ever touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test waits for the clock: a busy machine must not fail one.
settings.register_profile("gpushare", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpushare")


def pytest_configure(config: pytest.Config) -> None:
    """Let what is looked at while tests are collected not be the simulated hosts of whoever runs them."""
    directory = tempfile.mkdtemp(prefix="gc", dir="/tmp")
    os.environ["GPUSHARE_SIM_DIR"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


@pytest.fixture(autouse=True)
def sim_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test its own directory of simulated hosts: short, because MPS pipe paths lie in it."""
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    monkeypatch.setenv("GPUSHARE_SIM_DIR", str(directory))
    for name in (
        "GPUSHARE_HOST",
        "GPUSHARE_MPS_CONTROL",
        "GPUSHARE_NVIDIA_SMI",
        "GPUSHARE_RUN_DIR",
        "GPUSHARE_STATE_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


GOLDENS = Path(__file__).parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-goldens``: rewrite tests/goldens/*.txt with what the tests draw now."""
    parser.addoption("--update-goldens", action="store_true", help="rewrite the golden texts")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a check of a text against tests/goldens/NAME.txt, byte for byte."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / f"{name}.txt"
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text.encode())
        assert path.exists(), f"no golden {path.name}: pytest --update-goldens writes it; look at it then"
        assert text == path.read_bytes().decode()

    return check
