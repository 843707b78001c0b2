"""The CDI specifications of a host: found, compared with the MIG devices that exist, and written again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.base.errors import GpushareError, NoPermission, NotSupported, OperationFailed, TimedOut
from gpushare.base.model import Gpu
from gpushare.connect import connect
from gpushare.host import cdi
from gpushare.host.host import Host
from gpushare.sim import admin, nvidia_ctk, open_simulated

SPEC = "sim:2xa100-80gb"
NAME = "/var/run/cdi/nvidia.yaml"


@pytest.fixture
def host() -> Host:
    """Return a simulated host whose GPU 0 has two MIG devices, with the toolkit and a right specification."""
    host = connect(SPEC)
    admin.set_mig(SPEC, "0", ["3g.40gb:0", "3g.40gb:4"])
    nvidia_ctk.install(open_simulated(SPEC).state_file)
    return host


def gpus(host: Host) -> tuple[Gpu, ...]:
    host.nvml.restart()
    return tuple(host.nvml.identities())


def uuids(host: Host) -> list[str]:
    return [mig.uuid for mig in gpus(host)[0].mig_instances]


def put(host: Host, path: str, text: str) -> Path:
    """Write a file of the host."""
    file = cdi.local_path(host, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def written(names: list[str], kind: str = cdi.KIND) -> str:
    """Return a specification of devices with these names."""
    return json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": [{"name": name} for name in names]})


def test_what_the_toolkit_writes_is_read_whole_and_right(host: Host) -> None:
    (spec,) = cdi.find_specs(host)
    first, second = uuids(host)
    whole = gpus(host)[1].uuid
    assert spec.path == NAME
    assert list(spec.names) == ["0:0", first, "0:1", second, "1", whole, "all"]
    assert cdi.stale_specs(host, gpus(host)) == ()


def test_no_file_of_this_machine_is_read_for_a_simulated_host(host: Host) -> None:
    assert str(cdi.local_path(host, NAME)).startswith(str(host.run_directory.parent))
    assert cdi.local_path(replace(host, spec="local"), NAME) == Path(NAME)


def test_a_specification_as_json(host: Host) -> None:
    cdi.local_path(host, NAME).unlink()
    put(host, "/etc/cdi/nvidia.json", written(["0"]))
    (spec,) = cdi.find_specs(host)
    assert (spec.path, list(spec.names)) == ("/etc/cdi/nvidia.json", ["0"])


def test_a_device_that_is_gone_and_one_that_is_missing(host: Host) -> None:
    before = uuids(host)
    admin.set_mig(SPEC, "0", ["3g.40gb:0", "1g.10gb:4"])
    (one,) = cdi.stale_specs(host, gpus(host))
    assert (one.path, one.gone, one.missing) == (NAME, (before[1],), (uuids(host)[1],))
    assert cdi.describe_staleness(one) == f"names devices that are gone ({before[1]}) and lacks {uuids(host)[1]}"


def test_mig_switched_off_leaves_a_gpu_that_is_not_listed(host: Host) -> None:
    before = uuids(host)
    admin.set_mig(SPEC, "0", [])
    (one,) = cdi.stale_specs(host, gpus(host))
    assert (set(one.gone), one.missing) == (set(before), (gpus(host)[0].uuid,))


def test_nothing_is_called_gone_while_a_gpu_does_not_answer(host: Host) -> None:
    one, other = gpus(host)
    assert cdi.stale_specs(host, [Gpu(index=0, uuid=one.uuid, error="GPU is lost"), other]) == ()


def test_a_device_with_two_names_by_index_counts_once(host: Host) -> None:
    put(host, NAME, written(["0:0", "0:5", "mig0:0", "mig0:5", "1", "gpu1"]))
    assert cdi.stale_specs(host, gpus(host)) == ()


@pytest.mark.parametrize("prefix", ["", "mig"])
def test_names_by_index_alone_are_counted(host: Host, prefix: str) -> None:
    """The toolkit named by index alone before 1.16."""
    put(host, NAME, written([f"{prefix}0:0", f"{prefix}0:5", "gpu1" if prefix else "1"]))
    assert cdi.stale_specs(host, gpus(host)) == ()
    admin.set_mig(SPEC, "0", ["3g.40gb:0"])
    (one,) = cdi.stale_specs(host, gpus(host))
    assert (one.gone, one.missing) == ((f"{prefix}0:5",), ())
    admin.set_mig(SPEC, "0", ["3g.40gb:0", "1g.10gb:4", "1g.10gb:5"])
    (one,) = cdi.stale_specs(host, gpus(host))
    assert (one.gone, one.missing) == ((), (uuids(host)[2],))


def test_both_files_are_looked_at(host: Host) -> None:
    put(host, "/etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\ndevices:\n- name: 1:0\n- name: 0\n")
    first, second = cdi.find_specs(host)
    assert (first.path, second.path) == ("/etc/cdi/nvidia.yaml", NAME)
    # YAML 1.1 would read 1:0 as the number 60.
    assert list(first.names) == ["1:0", "0"]
    assert [one.path for one in cdi.stale_specs(host, gpus(host))] == ["/etc/cdi/nvidia.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kind: [",
        "- kind",
        "kind: nvidia.com/gpu\ndevices: 7\n",
        "kind: nvidia.com/gpu\ndevices: [7, {containerEdits: 3}, {name: mine, containerEdits: {deviceNodes: [3, {}]}}]\n",
        "kind: k8s.device-plugin.nvidia.com/gpu\ndevices:\n- name: MIG-0\n",
        "!!python/object/apply:os.system ['true']",
        "\x00",
    ],
)
def test_files_that_are_no_specification_of_the_toolkit(host: Host, text: str) -> None:
    cdi.local_path(host, NAME).unlink()
    put(host, "/etc/cdi/other.yaml", text)
    put(host, "/etc/cdi/nvidia.yaml.bak", written(["0"]))
    assert cdi.find_specs(host) == ()


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["0", "GPU-0d54321e-a080-c56a-bbc0-8fc271e8e655", "all"], ()),
        (["0", "1:0", "all"], ()),
        (["all"], ()),
        (["GPU-0d54321e-a080-c56a-bbc0-8fc271e8e655"], ()),
        (["gpu0", "mig1:0"], tuple(f"--device-name-strategy={kind}" for kind in ("index", "uuid", "type-index"))),
    ],
)
def test_refresh_keeps_path_and_names(names: list[str], options: tuple[str, ...]) -> None:
    spec = cdi.CdiSpec(path="/etc/cdi/nvidia.json", names=tuple(names))
    assert cdi.refresh_command(spec) == ("nvidia-ctk", "cdi", "generate", "--output=/etc/cdi/nvidia.json", *options)


@pytest.mark.parametrize("strategy", ["uuid", "type-index"])
def test_refresh_of_other_names_is_read_back(host: Host, strategy: str) -> None:
    done = host.programs.run(
        ["nvidia-ctk", "cdi", "generate", f"--output={NAME}", f"--device-name-strategy={strategy}"]
    )
    assert done.exit_code == 0
    names = set(cdi.find_specs(host)[0].names)
    admin.set_mig(SPEC, "0", ["2g.20gb:2", "3g.40gb:4"])
    host.nvml.restart()
    cdi.refresh(host, cdi.find_specs(host)[0])
    after = set(cdi.find_specs(host)[0].names)
    assert cdi.stale_specs(host, gpus(host)) == ()
    assert {name for name in names if not name.startswith("MIG-")} <= after


def failed(host: Host) -> GpushareError:
    admin.set_mig(SPEC, "0", ["1g.10gb:6"])
    (spec,) = cdi.find_specs(host)
    before = cdi.local_path(host, NAME).read_bytes()
    host.nvml.restart()
    with pytest.raises(GpushareError) as caught:
        cdi.refresh(host, spec)
    assert cdi.local_path(host, NAME).read_bytes() == before
    return caught.value


def test_refresh_without_the_toolkit(host: Host) -> None:
    admin.set_fault(SPEC, "missing", value="nvidia-ctk")
    error = failed(host)
    assert (type(error), error.code) == (NotSupported, "program_missing")
    assert "nvidia-container-toolkit-base" in error.hint


def test_refresh_by_a_user(host: Host) -> None:
    admin.set_fault(SPEC, "user", value="1000")
    error = failed(host)
    assert isinstance(error, NoPermission)
    assert error.hint == f"run as root: sudo nvidia-ctk cdi generate --output={NAME}"


def test_refresh_that_hangs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.set_fault(SPEC, "hang", value="nvidia-ctk")
    monkeypatch.setattr(cdi, "REFRESH_SECONDS", 0.05)
    assert isinstance(failed(host), TimedOut)


def test_refresh_that_fails_says_what_the_program_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_ctk, "main", lambda argv, *_: nvidia_ctk._failure(argv, "no space left"))
    error = failed(host)
    assert (type(error), error.code) == (OperationFailed, "cdi_not_written")
    assert "no space left" in error.message


def test_success_of_the_program_proves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_ctk, "_write_file", lambda *_: None)
    error = failed(host)
    assert error.code == "cdi_still_stale"
    assert uuids(host)[0] in error.message


def test_refresh_leaves_the_file_alone_while_there_is_no_device(host: Host) -> None:
    admin.set_mig(SPEC, "0", ["1g.10gb:6"])
    admin.set_mig(SPEC, "1", ["1g.10gb:6"])
    with open_simulated(SPEC).state_file.changed() as state:
        for gpu in state.gpus:
            gpu.mig = []
    host.nvml.restart()
    before = cdi.local_path(host, NAME).read_bytes()
    cdi.refresh(host, cdi.find_specs(host)[0])
    assert cdi.local_path(host, NAME).read_bytes() == before


def test_long_lists_are_cut() -> None:
    one = cdi.Staleness(path="p", missing=("a", "b", "c", "d"))
    assert cdi.describe_staleness(one) == "lacks a, b, c and 1 more"
    assert cdi.describe_staleness(replace(one, missing=("a", "b", "c"))) == "lacks a, b, c"
