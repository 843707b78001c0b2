"""The simulated nvidia-ctk: installed by ``sim cdi``, with names, file formats and refusals of the real one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from gpushare.base.errors import BadUsage, NotSupported
from gpushare.cli import main
from gpushare.host.program import Completed
from gpushare.sim import admin, nvidia_ctk, open_simulated
from tests.sim.nvml_host import state_of

SPEC = "sim:a30,l4"
GENERATE = ("cdi", "generate")


def run(*words: str) -> Completed:
    """Run nvidia-ctk on the simulated host."""
    return open_simulated(SPEC).programs.run(["nvidia-ctk", *words])


def install() -> None:
    nvidia_ctk.install(open_simulated(SPEC).state_file)


def names(text: str) -> list[str]:
    return [device["name"] for device in yaml.safe_load(text)["devices"]]


def generated(*words: str) -> list[str]:
    """Return the devices that are written with these options."""
    assert run(*GENERATE, "--output=/etc/cdi/nvidia.yaml", *words).exit_code == 0
    return names((open_simulated(SPEC).state_file.directory / "etc/cdi/nvidia.yaml").read_text())


def test_a_host_has_no_toolkit_until_it_is_installed_nor_while_it_is_missing() -> None:
    programs = open_simulated(SPEC).programs
    assert programs.find("nvidia-ctk") is None
    with pytest.raises(NotSupported):
        programs.run(["nvidia-ctk", *GENERATE])
    install()
    assert programs.find("nvidia-ctk") == "/usr/bin/nvidia-ctk"
    assert (open_simulated(SPEC).state_file.directory / "var/run/cdi/nvidia.yaml").exists()
    admin.set_fault(SPEC, "missing", value="nvidia-ctk")
    assert open_simulated(SPEC).programs.find("nvidia-ctk") is None
    admin.clear_faults(SPEC)
    assert open_simulated(SPEC).programs.find("nvidia-ctk") is not None
    with pytest.raises(BadUsage, match="needs a program"):
        admin.set_fault(SPEC, "missing", value="docker")


def test_names_by_index_and_uuid_without_a_gpu_that_is_lost() -> None:
    install()
    admin.set_mig(SPEC, "0", ["2g.12gb:0", "1g.6gb:2"])
    a30, l4 = state_of(SPEC).gpus
    assert generated() == ["0:0", a30.mig[0].uuid, "0:1", a30.mig[1].uuid, "1", l4.uuid, "all"]
    assert generated("--device-name-strategy=type-index") == ["mig0:0", "mig0:1", "gpu1", "all"]
    admin.set_fault(SPEC, "lost", "0")
    assert generated() == ["1", l4.uuid, "all"]


def test_what_is_written() -> None:
    install()
    assert run(*GENERATE, "--output=/etc/cdi/nvidia.json").exit_code == 0
    written = json.loads((open_simulated(SPEC).state_file.directory / "etc/cdi/nvidia.json").read_text())
    assert (written["kind"], [device["name"] for device in written["devices"]][-1]) == ("nvidia.com/gpu", "all")
    assert {"path": "/dev/nvidiactl"} in written["containerEdits"]["deviceNodes"]


def test_what_gpushare_never_runs_is_refused() -> None:
    install()
    for words in (("cdi", "list"), GENERATE, (*GENERATE, "--output=/etc/cdi/a.yaml", "--device-name-strategy=name")):
        done = run(*words)
        assert (done.exit_code, done.stdout, "level=error" in done.stderr) == (1, "", True)


@pytest.mark.parametrize(
    ("fault", "value", "said"),
    [
        ("no-driver", None, "NVML"),
        ("no-nvml", None, "NVML"),
        ("user", "1000", "permission denied"),
        ("lost", None, "empty device edits"),
    ],
)
def test_what_is_refused_writes_nothing(fault: str, value: str | None, said: str) -> None:
    install()
    file = open_simulated(SPEC).state_file.directory / "var/run/cdi/nvidia.yaml"
    before = file.read_text()
    admin.set_fault(SPEC, fault, value=value)
    done = run(*GENERATE, "--output=/var/run/cdi/nvidia.yaml")
    assert (done.exit_code, said in done.stderr) == (1, True)
    assert file.read_text() == before


def test_the_state_directory_stays_one_that_gpushare_believes_whatever_the_umask() -> None:
    before = os.umask(0o002)
    try:
        install()
    finally:
        os.umask(before)
    assert open_simulated(SPEC).state_directory.stat().st_mode & 0o777 == 0o755


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", SPEC, "sim", "cdi"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("/var/run/cdi/nvidia.yaml is ")
    assert "all" in names(Path(text.split(" is ")[1].strip()).read_text())
    assert main(["--host", SPEC, "sim", "reset"]) == 0
    assert open_simulated(SPEC).programs.find("nvidia-ctk") is None
