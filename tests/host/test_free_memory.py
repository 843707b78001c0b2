"""How much host memory a process can still get: the machine's, and what its cgroups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare.base.units import GIB
from gpushare.host import machine
from gpushare.host.machine import Machine


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {64 * GIB >> 10} kB\n")
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/user.slice/job\n")
    (tmp_path / "cgroup" / "user.slice" / "job").mkdir(parents=True)
    monkeypatch.setattr(machine, "CGROUPS", str(tmp_path / "cgroup"))
    return tmp_path


def limit(here: Path, name: str, most: str, now: int, cached: int | None = None) -> None:
    directory = here / "cgroup" / name
    (directory / "memory.max").write_text(f"{most}\n")
    (directory / "memory.current").write_text(f"{now}\n")
    if cached is not None:
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 3\n")


def free(here: Path) -> int | None:
    return Machine(str(here / "proc")).free_memory(7)


def test_without_a_limit_it_is_the_machines(here: Path) -> None:
    assert free(here) == 64 * GIB
    limit(here, "user.slice/job", "max", 5)
    assert free(here) == 64 * GIB


def test_the_cgroup_that_leaves_least_counts(here: Path) -> None:
    limit(here, "user.slice", str(16 * GIB), 6 * GIB)
    assert free(here) == 10 * GIB
    limit(here, "user.slice/job", str(8 * GIB), 5 * GIB)
    assert free(here) == 3 * GIB
    limit(here, "user.slice/job", str(8 * GIB), 9 * GIB)
    assert free(here) == 0


def test_cached_files_are_no_obstacle(here: Path) -> None:
    """A training that reads its data fills the limit of its cgroup with the cache of files."""
    limit(here, "user.slice/job", str(32 * GIB), 32 * GIB, cached=20 * GIB)
    assert free(here) == 20 * GIB


def test_where_the_kernel_begins_to_slow_it_down_counts_too(here: Path) -> None:
    limit(here, "user.slice/job", str(32 * GIB), 5 * GIB)
    (here / "cgroup" / "user.slice" / "job" / "memory.high").write_text(f"{8 * GIB}\n")
    assert free(here) == 3 * GIB
    (here / "cgroup" / "user.slice" / "job" / "memory.high").write_text("max\n")
    assert free(here) == 27 * GIB


def first_version(here: Path, name: str, most: int, now: int, cached: int = 0) -> None:
    directory = here / "cgroup" / "memory" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{most}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{now}\n")
    (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory,pids"])
def test_the_first_version_of_cgroups_has_limits_too(here: Path, controllers: str) -> None:
    """As RHEL 8 and Ubuntu 20.04 have it, and containers there."""
    (here / "proc" / "7" / "cgroup").write_text(f"12:{controllers}:/docker/job\n1:name=systemd:/docker/job\n0::/\n")
    assert free(here) == 64 * GIB
    first_version(here, "", 9223372036854771712, 50 * GIB)
    assert free(here) == 64 * GIB
    first_version(here, "docker", 16 * GIB, 6 * GIB)
    assert free(here) == 10 * GIB
    first_version(here, "docker/job", 8 * GIB, 7 * GIB, cached=GIB)
    assert free(here) == 2 * GIB


def test_a_line_that_is_none_does_no_harm(here: Path) -> None:
    (here / "proc" / "7" / "cgroup").write_text("\n0\n4:memory\n4:memory:relative\n0::/../../etc\n")
    assert free(here) == 64 * GIB


def test_unknown_is_unknown(here: Path) -> None:
    (here / "proc" / "meminfo").write_text("MemTotal: 5 kB\n")
    assert free(here) is None
    (here / "proc" / "meminfo").write_text("MemAvailable: 5 kB\n")
    (here / "proc" / "7" / "cgroup").unlink()
    assert free(here) == 5 << 10
