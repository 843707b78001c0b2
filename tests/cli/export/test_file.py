"""``gpushare export docker|compose|cdi|systemd -f gpushare.yaml``: engines that name devices by UUID, from a file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gpushare.sim import admin
from tests.cli.drive import Cli, Refused, Write

SPEC = "sim:2xa100-80gb"
FILE = """\
version: 1
gpus:
  - match: {index: 0}
    mps: {threads: 25, memory: 8G, priority: low}
  - match: {index: 1}
    mig:
      - {wish: 1g.10gb, name: small}
      - {wish: 3g.40gb, name: train}
      - {wish: 1g.10gb*2, mps: {threads: 50}}
"""


@pytest.fixture
def file(write: Write) -> str:
    return write(FILE)


def test_a_daemon_that_is_not_up_yet_has_its_pipe_already(cli: Cli, file: str) -> None:
    before = cli("export", "docker", "-g", "0", "-f", file, host=SPEC).ok().out
    flags = shlex.split(before)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25.0" in flags
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M" in flags
    assert cli("export", "docker", "-g", "0", host=SPEC).ok().out != before
    cli("apply", "-f", file, host=SPEC).ok()
    assert cli("export", "docker", "-g", "0", host=SPEC).ok().out == before


@pytest.mark.parametrize("engine", ["docker", "compose", "cdi", "systemd"])
def test_a_mig_device_that_is_not_there_yet_has_no_uuid(refused: Refused, file: str, engine: str) -> None:
    text = refused("export", engine, "-g", "1", "-f", file, code="not_applied", exit_code=6, host=SPEC)
    assert f"gpushare apply -f {file}" in text
    assert "GPU 1 has no 1g.10gb yet" in text


@pytest.mark.parametrize("engine", ["compose", "cdi", "systemd"])
def test_of_a_host_that_is_as_the_file_says_both_are_the_same(cli: Cli, file: str, engine: str) -> None:
    admin.set_fault(SPEC, "user", value="root")
    cli("apply", "-f", file, host=SPEC).ok()
    gpu = () if engine == "systemd" else ("-g", "0")
    live = cli("export", engine, *gpu, host=SPEC).ok().out
    assert cli("export", engine, *gpu, "-f", file, host=SPEC).ok().out == live
    if engine == "systemd":
        assert live.count("# file: gpushare-mps-mig-") == 2


def test_instances_of_the_file_are_those_of_their_names(cli: Cli, file: str) -> None:
    cli("apply", "-f", file, host=SPEC).ok()
    for name in ("small", "train"):
        uuid = cli("mig", "env", name, host=SPEC).ok().out.rpartition("=")[2].strip()
        out = cli("export", "docker", "-g", uuid, "-f", file, host=SPEC).ok().out
        assert shlex.split(out)[:2] == ["--gpus", f"device={uuid}"]
        assert "CUDA_MPS" not in out, "those with a daemon are the other two"


def test_units_need_only_the_devices_in_which_a_daemon_runs(cli: Cli, write: Write) -> None:
    path = write("version: 1\ngpus: [{match: {index: 0}, mig: [{wish: 3g.40gb}]}, {match: {index: 1}, mps: {}}]\n")
    units = cli("export", "systemd", "-f", path, "--at-boot", "/etc/gpushare.yaml", host=SPEC).ok().out
    assert "ExecStart=/usr/bin/gpushare apply -f /etc/gpushare.yaml --yes\n" in units
    assert units.count("# file: gpushare-mps-gpu-") == 1


@pytest.mark.parametrize("first", [0, 1])
def test_the_order_of_the_file_moves_no_daemon(cli: Cli, tmp_path: Path, first: int) -> None:
    """What `gpushare apply` finds as it should be, an export finds in the same devices."""
    # Units are root's: a daemon of another user lets in only that one.
    admin.set_fault(SPEC, "user", value="root")
    path = tmp_path / "gpushare.yaml"
    words = ["{wish: 3g.40gb, mps: {threads: 50}}", "3g.40gb"]
    for number in (first, 1 - first):
        both = f"{words[number]}, {words[1 - number]}"
        path.write_text(f"version: 1\ngpus: [{{match: {{index: 0}}, mig: [{both}]}}]\n")
        answer = cli("apply", "-f", str(path), output="json", host=SPEC).ok()
    # Nothing but the file, which is another one.
    assert [step["what"] for step in answer.data["steps"]] == ["keep the file for the next boot"]
    live = cli("export", "systemd", host=SPEC).ok().out
    assert live.count("# file: gpushare-mps-mig-") == 1
    assert cli("export", "systemd", "-f", str(path), host=SPEC).ok().out == live
