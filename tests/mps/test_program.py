"""The programs of MPS themselves: version, room for clients, the daemon's environment, the name of a server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpushare.host.program import Completed, missing_program_error
from gpushare.mps.control import is_server, probe_version, start_environment
from gpushare.mps.limits import max_clients
from tests.mps.fake_daemon import Daemon


@pytest.mark.parametrize(
    ("text", "version"), [("... Binary version: 13000\n", 13000), ("Cannot find ...\n", None), ("", None)]
)
def test_the_version_is_probed(text: str, version: int | None) -> None:
    class Versioned(Daemon):
        def run(self, argv: Sequence[str], **_: object) -> Completed:  # type: ignore[override]
            assert list(argv) == ["nvidia-cuda-mps-control", "-v"]
            return Completed(tuple(argv), 0, text, "")

    assert probe_version(Versioned()) == version


def test_no_program_has_no_version() -> None:
    daemon = Daemon()
    daemon.error = missing_program_error("nvidia-cuda-mps-control")
    assert probe_version(daemon) is None


@pytest.mark.parametrize(
    ("version", "capability", "fraction", "expected"),
    [
        (13000, (9, 0), 1.0, 48),
        (13010, (9, 0), 1.0, 60),
        (None, (7, 0), 1.0, 48),
        (13020, (6, 0), 1.0, 16),
        (13000, (9, 0), 3 / 7, 20),
        (13000, (9, 0), 1 / 7, 6),
        (13000, (9, 0), 0.001, 1),
        (13000, None, 1.0, None),
    ],
)
def test_how_many_clients_a_server_takes(
    version: int | None, capability: tuple[int, int] | None, fraction: float, expected: int | None
) -> None:
    assert max_clients(version, capability, fraction) == expected


def test_the_daemon_inherits_no_limits_by_accident() -> None:
    environment = start_environment("GPU-1", "/p", "/l")
    removed = {name for name, value in environment.items() if value is None}
    assert {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_MPS_CLIENT_PRIORITY",
        "RUNNER_TRACKING_ID",
        "JENKINS_NODE_COOKIE",
        "BUILD_ID",
    } <= removed
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    ("name", "known"),
    [("nvidia-cuda-mps-server", True), ("nvidia-cuda-mps", True), ("nvidia", False), ("", False), (None, False)],
)
def test_a_server_is_known_by_its_name_also_where_the_kernel_cut_it(name: str | None, known: bool) -> None:
    assert is_server(name) is known
