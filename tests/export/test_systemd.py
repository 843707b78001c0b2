"""Units that systemd takes without a word, and a script that makes a daemon's limits true."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import BadUsage, ExitCode
from gpushare.base.model import ComputeMode, Priority, Way
from gpushare.base.units import MIB
from gpushare.export.document import apply_script
from gpushare.export.systemd import FILE, READY, units_export
from gpushare.mps.home import LIMIT_FILE
from tests.errors import fails
from tests.export.hosts import gpu, host, mig, mps, t4s, text

LIMITS = mps(33.3, memory_limit_bytes=3840 * MIB, priority=Priority.LOW, users=("alice",))
HOST = host(
    gpu(0, Way.MPS, mps=LIMITS, compute_mode=ComputeMode.EXCLUSIVE_PROCESS),
    gpu(1),
    gpu(2, Way.MIG, mig=(mig(0, mps=mps(None)), mig(1))),
)
GPU_UNIT, MIG_UNIT = "gpushare-mps-gpu-00000000-ab4d6893.service", "gpushare-mps-mig-00000000-45f0367f.service"


def settings(unit: str) -> dict[str, list[str]]:
    """Return the settings of a unit by name."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_host_at_boot() -> None:
    export = units_export(t4s())
    assert [document.name for document in export.documents] == ["gpushare.service"]
    unit = settings(text(export, "gpushare.service"))
    assert unit["Type"] == ["oneshot"]
    assert unit["ExecStart"] == ["/usr/bin/gpushare apply -f /var/lib/gpushare/applied.yaml --yes"]
    assert unit["ConditionPathExists"] == ["/var/lib/gpushare/applied.yaml"]
    assert "nvidia-persistenced.service" in unit["After"][0]
    assert int(unit["TimeoutStartSec"][0]) > 0
    # What apply starts must outlive it: without this systemd ends every process of the unit.
    assert (unit["RemainAfterExit"], unit["KillMode"]) == (["yes"], ["process"])
    other = settings(text(units_export(t4s(), file="/etc/gpushare/gpushare.yaml"), "gpushare.service"))
    assert other["ExecStart"] == ["/usr/bin/gpushare apply -f /etc/gpushare/gpushare.yaml --yes"]


def test_the_script_stops_without_the_program_or_the_file_of_the_unit(tmp_path: Path) -> None:
    kept = units_export(t4s())
    assert any(need.startswith(FILE) and "apply -f" in need for need in kept.needs)
    assert f"{FILE} is missing; first: sudo gpushare apply -f" in kept.commands[1]
    file, program = tmp_path / "gpushare.yaml", tmp_path / "gpushare"
    export = units_export(t4s(), file=str(file), program=str(program))
    put = f"sudo install -m 644 gpushare.yaml {file}"
    assert any(put in need for need in export.needs)
    (tmp_path / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    script = f"PATH={tmp_path}:$PATH\nset -eu\n{export.commands[0]}\n{export.commands[1]}\necho further\n"

    def first() -> tuple[str, str]:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        return done.stdout, done.stderr

    assert first() == ("", f"{program} is missing; name the path: gpushare export systemd --program PATH\n")
    program.touch(0o755)
    assert first() == ("", f"{file} is missing; first: {put}\n")
    file.touch()
    assert first() == ("further\n", "")


def test_the_script_needs_no_sudo_as_root(tmp_path: Path) -> None:
    file, program = tmp_path / "gpushare.yaml", tmp_path / "gpushare"
    file.touch()
    export = units_export(t4s(), file=str(file), program=str(program))
    script = apply_script("systemd", replace(export, commands=(*export.commands[:2], "sudo echo further")))

    def run() -> tuple[str, str]:
        words = ["/bin/sh", "-c", script.text.replace("set -x\n", "")]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
        return done.stdout, done.stderr

    # A path without any program: cd, test and echo are the shell's own.
    (tmp_path / "dirname").write_text("#!/bin/sh\necho .\n")
    (tmp_path / "dirname").chmod(0o755)
    assert run() == ("", f"{program} is missing; name the path: gpushare export systemd --program PATH\n")
    program.touch(0o755)
    assert run() == ("further\n", "")


def test_a_daemon_in_the_foreground() -> None:
    export = units_export(HOST, program="/opt/gpushare/bin/gpushare")
    assert {document.name for document in export.documents} == {"gpushare.service", GPU_UNIT, MIG_UNIT, READY}
    unit = settings(text(export, GPU_UNIT))
    assert unit["ExecStart"] == ["/usr/bin/nvidia-cuda-mps-control -f"]
    (pipe,) = (one.partition("=")[2] for one in unit["Environment"] if one.startswith("CUDA_MPS_PIPE_DIRECTORY"))
    # A daemon that has gone already is as good as a stopped one.
    stop = f"/opt/gpushare/bin/gpushare mps stop --pipe-directory {pipe} --drain 60s --yes"
    assert unit["ExecStop"] == [f"/bin/sh -c '{stop} || [ $$? -eq {int(ExitCode.NOT_FOUND)} ]'"]
    assert len(pipe) <= 87
    assert f"/run/{unit['RuntimeDirectory'][0].split()[-1]}" == pipe
    # The longest drain fits into what systemd waits.
    assert int(unit["TimeoutStopSec"][0]) > 60
    assert unit["ExecStartPost"][0].endswith(f"{READY} 33.3 3840M 3G 1")
    # What `gpushare apply` started on this GPU gives way first; only "none there" (6) is as good.
    assert unit["ExecStartPre"][0] == (
        f"/bin/sh -c '/opt/gpushare/bin/gpushare mps stop -g {gpu(0).uuid} --yes || [ $$? -eq {int(ExitCode.NOT_FOUND)} ]'"
    )
    assert unit["ExecStartPre"][1].endswith("-c EXCLUSIVE_PROCESS")
    assert unit["ExecStopPost"][0].endswith("-c DEFAULT")
    other = settings(text(export, MIG_UNIT))
    assert len(other["ExecStartPre"]) == 1
    assert other["ExecStart"] == ["/usr/bin/nvidia-cuda-mps-control -f"]
    several = units_export(host(gpu(0, Way.MPS, mps=mps(None, multiuser=True))))
    assert settings(text(several, GPU_UNIT))["ExecStart"] == ["/usr/bin/nvidia-cuda-mps-control -f -M"]
    # A user's name may end in a $, which systemd would take for a variable.
    samba = units_export(host(gpu(0, Way.MPS, mps=mps(None, users=("pc$", "bob")))))
    assert "u:pc$$:rx,u:bob:rx,m::rx" in text(samba, GPU_UNIT)
    assert other["ExecStartPost"][0].endswith(f"{READY} - - - -")
    assert "CUDA_VISIBLE_DEVICES=MIG-00000000-0000-0000-0000-000000000000" in other["Environment"]
    assert f"/usr/bin/setfacl -m u:alice:rx,m::rx {pipe}" in unit["ExecStartPre"]
    assert unit["RuntimeDirectoryMode"] == ["0750"]
    assert other["RuntimeDirectoryMode"] == ["0755"]
    assert any("setfacl" in text for text in export.needs)
    assert any("MIG UUID" in text for text in export.lost)


@pytest.mark.parametrize(("driver", "first"), [("550.163.01", True), ("580.159.04", False), (None, False)])
def test_an_older_driver_gets_mig_first(driver: str | None, first: bool) -> None:
    """It tells the profiles of a GPU only while MIG is on."""
    unit = settings(text(units_export(host(*HOST.gpus, driver=driver)), "gpushare.service"))
    wanted = [f"-/usr/bin/gpushare mig enable -g {HOST.gpus[2].uuid} --yes"]
    assert unit.get("ExecStartPre", []) == (wanted if first else [])
    assert "ExecStartPre" not in settings(text(units_export(replace(t4s(), driver=driver)), "gpushare.service"))


@pytest.mark.parametrize("path", ["gpushare", "/opt/my tools/gpushare", "/opt/100%/gpushare", "/a$b"])
def test_a_path_that_no_unit_holds(path: str) -> None:
    for options in ({"program": path}, {"file": path}):
        with fails(BadUsage, "bad_path"):
            units_export(HOST, **options)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_them(tmp_path: Path) -> None:
    """Its exit code is 0 for a misspelt key too: nothing may be said."""
    true = shutil.which("true") or "/bin/true"
    names = []
    for document in units_export(HOST).documents:
        if document.kind == "unit":
            # NVIDIA's programs are not on every machine that runs the tests.
            body = re.sub(r"^(Exec\w+=)\S+", rf"\1{true}", document.text, flags=re.MULTILINE)
            (tmp_path / document.name).write_text(body)
            names.append(str(tmp_path / document.name))
    command = ["systemd-analyze", "verify", "--man=no", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "Failed to" in done.stderr and "unit" not in done.stderr:
        pytest.skip(f"systemd-analyze cannot work here: {done.stderr.strip()[:200]}")
    assert (done.returncode, done.stderr) == (0, "")
    broken = Path(names[0])
    broken.write_text(broken.read_text().replace("TimeoutStartSec", "TimeoutStart"))
    assert subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stderr != ""


CONTROL = """\
#!/bin/sh
# Stands in for nvidia-cuda-mps-control: keeps what is set in files, as {tmp}/broken says wrongly.
read -r line
set -- $line
case $1 in
set_*) name=${{1#set_}}; shift; [ -e {tmp}/broken ] || echo "$*" >{tmp}/$name ;;
get_default_active_thread_percentage) cat {tmp}/default_active_thread_percentage 2>/dev/null || echo 100.0 ;;
get_default_device_pinned_mem_limit) [ ! -e {tmp}/default_device_pinned_mem_limit ] || echo 3G ;;
get_default_client_priority) cat {tmp}/default_client_priority 2>/dev/null || echo 0 ;;
esac
"""


@pytest.mark.parametrize("broken", [False, True])
def test_the_limits_are_read_back(tmp_path: Path, broken: bool) -> None:
    (tmp_path / "nvidia-cuda-mps-control").write_text(CONTROL.format(tmp=tmp_path))
    (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    if broken:
        (tmp_path / "broken").touch()
    script = tmp_path / READY
    script.write_text(text(units_export(HOST), READY))
    done = subprocess.run(
        ["sh", str(script), "33.3", "3840M", "3G", "1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": f"{tmp_path}/pipe"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if broken:
        assert done.returncode == 1
        assert "MPS: thread percentage is '100.0', asked: '33.3'" in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "default_device_pinned_mem_limit").read_text() == "0 3840M\n"
    assert (tmp_path / "default_client_priority").read_text() == "1\n"
    assert (tmp_path / LIMIT_FILE).read_text() == "3840M\n"
